"""Checks of arguments that are not arrays. Each returns the argument, or names it in an error."""

from __future__ import annotations

import numbers
import threading
from collections.abc import MappingView, Set
from typing import Any

import numpy as np


def require_int(value: Any, name: str) -> None:
    """Raise TypeError unless `value` is an int; bool is excluded."""
    # NumPy counts durations among its integers.
    if isinstance(value, (bool, np.timedelta64)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {value!r}")


def positive_int(value: Any, name: str) -> int:
    """Return an argument as an int; TypeError or ValueError unless it is at least 1."""
    require_int(value, name)
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return int(value)


def require_number(value: Any, name: str) -> None:
    """Raise TypeError unless `value` is a real number; bool is excluded."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")


def positive_seconds(value: Any, name: str) -> float:
    """Return an argument in seconds as a float: above 0 and at most 1e6."""
    require_number(value, name)
    if not 0 < value <= 1e6:
        raise ValueError(f"{name}: expected more than 0 and at most 1e6 seconds, got {value}")
    return float(value)


def seconds_of(value: Any, name: str = "deadline_s") -> float:
    """Return an argument in seconds, at least 0, clipped to the longest wait of a thread."""
    require_number(value, name)
    if not value >= 0:
        raise ValueError(f"{name}: expected seconds from 0 on, got {value}")
    return float(min(value, threading.TIMEOUT_MAX))


def flag(value: Any, name: str) -> bool:
    """Return an argument that is True or False; TypeError if it is neither."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
    return bool(value)


def as_list(values: Any, name: str, items: str) -> list[Any]:
    """Return an iterable argument as a list of `items`; not of a string or bytes, nor of a set."""
    if isinstance(values, np.ndarray) and values.ndim:
        return list(values.tolist())
    # The views of a dict are sets, too, but in order.
    has_order = isinstance(values, MappingView) or not isinstance(values, Set)
    try:
        if has_order and not isinstance(values, (str, bytes, bytearray)):
            return list(values)
    except TypeError:
        pass
    hint = "" if has_order else ", which has no order"
    raise TypeError(f"{name}: expected a list of {items}, got {type(values).__name__}{hint}")
