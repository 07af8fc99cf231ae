"""Rows of calls that are refused: what is passed instead of the arguments of a valid call.

A row is the name of a test, the arguments that change (each a value, or what makes it from a
`Case`), the error, and the arguments of which its message names one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import Case, Cut

BOTH = (TypeError, ValueError)

Maker = Callable[[Case], Any]


def array(dtype: Any, *shape: int, cut: Cut | None = None) -> Maker:
    """Make an array of ones, which every index array may hold, or random ones of a format."""
    if isinstance(dtype, str):
        return lambda c: c.output(dtype, shape, cut).array
    return lambda c: c.place(np.ones(shape, dtype), np.dtype(dtype).name, cut).array


def bf16(*shape: int, cut: Cut | None = None) -> Maker:
    return array("bf16", *shape, cut=cut)


def read_only(make: Maker) -> Maker:
    """Make an array that must not be written."""

    def make_read_only(case: Case) -> Any:
        argument = make(case)
        if not isinstance(argument, np.ndarray):
            pytest.skip("this array library has no read-only arrays")
        argument.flags.writeable = False
        return argument

    return make_read_only


def parts(fmt: str, *shape: int, **changes: Any) -> Maker:
    """Make arguments of which those given as slices are cut from one array."""

    def make_parts(case: Case) -> dict[str, Any]:
        whole = case.output(fmt, shape)
        return {
            name: value if callable(value) else whole.sub(lambda a, cut=value: a[cut]).array
            for name, value in changes.items()
        }

    return make_parts


def changed(case: Case, call: dict[str, Any], changes: Any) -> dict[str, Any]:
    """Return a valid call with the changes of a row."""
    changes = changes(case) if callable(changes) else changes
    return call | {
        name: value(case) if callable(value) else value for name, value in changes.items()
    }
