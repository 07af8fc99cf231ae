"""Containers of a million ints that stall no call: not for a garbage collection, nor to grow.

Python rebuilds a dict when its table is full: 50 ms for a million entries, 100 ms for an
OrderedDict.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

_Container = TypeVar("_Container")
_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))

MASK = 255  # the number of parts, less one


def untracked(container: _Container) -> _Container:
    """Exclude a container of ints from garbage collections, which would visit a million of them.

    Python itself excludes a dict of ints, in most versions, but not an OrderedDict.
    """
    _untrack(container)
    return container


def parts() -> list[dict[int, int]]:
    """Return the empty parts of a dict from hashes to ints: `parts[hash & MASK]` has a hash."""
    return [untracked({}) for _ in range(MASK + 1)]


class PartedDict(MutableMapping[int, int]):
    """A dict from hashes to ints.

    Attributes
    ----------
    parts : see `parts`. Loops over many hashes use them directly, which saves a call per hash
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts = parts()

    def __getitem__(self, hash: int) -> int:
        return self.parts[hash & MASK][hash]

    def __setitem__(self, hash: int, value: int) -> None:
        self.parts[hash & MASK][hash] = value

    def __delitem__(self, hash: int) -> None:
        del self.parts[hash & MASK][hash]

    def __contains__(self, hash: object) -> bool:
        return hash in self.parts[hash & MASK]  # type: ignore[operator]

    def get(self, hash: int, default: int | None = None) -> int | None:  # type: ignore[override]
        return self.parts[hash & MASK].get(hash, default)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[int]:
        for part in self.parts:
            yield from part
