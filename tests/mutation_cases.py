"""Kernels that are broken in one place, and the check that must notice.

The tables stand beside the tests of each operation, in ``ops/test_*_mutations.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import KernelSources, full_only

import kvcupy as kv

# What a check raises; strict builds refuse some of what is broken.
NOTICED = (AssertionError, pytest.fail.Exception, kv.IndexFault, kv.DeviceError)


@dataclass
class Mutation:
    """Text of a file of the kernels, what stands there instead, and the check that must notice.

    The text occurs `count` times, with any white space. `more` is replaced along with it: a file,
    what occurs there once, and what stands there instead. `arch` is the GPU, as 75, whose branches
    run, if any's.
    """

    old: str
    new: str
    check: Callable[[Any], Any]
    file: str
    more: tuple[tuple[str, str, str], ...] = ()
    count: int = 1
    arch: int = 0

    def must_be_noticed(self, kernel_sources: KernelSources) -> None:
        """Break a copy of the kernels, and run the check, which must fail."""
        kernel_sources.replace(self.file, self.old, self.new, self.count)
        for file, old, new in self.more:
            kernel_sources.replace(file, old, new)
        device = kernel_sources.device("-O0", f"-DKVCUPY_ARCH={10 * self.arch}")
        with pytest.raises(NOTICED):
            self.check(device)


def one_of_each(mutations: dict[str, Mutation]) -> list[Any]:
    """Return the names of mutations, of which one per file and check runs without ``--full``.

    A check that has noticed one is able to fail; that it notices the rest says where it looks.
    """
    first: dict[tuple[str, Callable[[Any], Any]], str] = {}
    for name, mutation in mutations.items():
        first.setdefault((mutation.file, mutation.check), name)
    telling = set(first.values())
    return [name if name in telling else full_only(name) for name in mutations]
