"""Kernels as objects: a source file, a template, and the mirror of its `Params` struct.

A `Kernel` names what `kernels_src/` holds; a `Specialisation` is one instantiation of it. Both
are plain data. Compiling and loading belong to the devices, which key their caches on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Kernel:
    """One `__global__` function template.

    Parameters
    ----------
    source : file name in `kernels_src/`
    name : the function's name
    params : NumPy mirror (`align=True`) of the struct that is its only argument
    struct : the struct's name in the source
    barriers : whether threads of a block wait for, or exchange values with, one another. The host
        device runs a kernel without barriers as plain loops.
    """

    source: str
    name: str
    params: np.dtype[Any]
    struct: str
    barriers: bool = False

    def specialise(self, *arguments: str | int) -> Specialisation:
        return Specialisation(self, tuple(str(a) for a in arguments))


@dataclass(frozen=True)
class Specialisation:
    """A kernel with its template arguments, e.g. `store_copy<16>`."""

    kernel: Kernel
    arguments: tuple[str, ...]

    @cached_property
    def expression(self) -> str:
        """The name expression that a compiler instantiates and looks up."""
        return f"{self.kernel.name}<{', '.join(self.arguments)}>"

    def __str__(self) -> str:
        return f"{self.kernel.source}:{self.expression}"


def pointer_fields(dtype: np.dtype[Any]) -> int:
    """Return how many fields at the start of a Params dtype are addresses (uint64)."""
    count = 0
    for name in dtype.names or ():
        if dtype.fields is None or dtype.fields[name][0] != np.dtype(np.uint64):
            break
        count += 1
    return count
