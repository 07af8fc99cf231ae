"""The index of a tier: the page of each block, by hash; a million of them stall no call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

_Container = TypeVar("_Container")
_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))

_MASK = 255  # number of parts - 1


def untracked(container: _Container) -> _Container:
    """Exclude a container of ints from garbage collections, which would visit a million of them."""
    _untrack(container)
    return container


class BlockIndex(Mapping[int, int]):
    """The page of each block, by hash.

    Python rebuilds a dict when its table is full, which takes 39 ms with a million entries. So the
    blocks are divided by their hashes into many small dicts, which grow at different times. Methods
    with many hashes save a call for each.

    Examples
    --------
    >>> index, host = BlockIndex(), BlockIndex()
    >>> index.add({0xA: 3, 0xB: 0})
    >>> host.add({0xC: 7})
    >>> index.find([0xA, 0xC]), index.count_leading([0xA, 0xB, 0xC])
    ([3, None], 2)
    >>> index.count_leading([0xA, 0xB, 0xC, 0xD], host)
    3
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[dict[int, int]] = [untracked({}) for _ in range(_MASK + 1)]

    def __getitem__(self, hash: int) -> int:
        return self._parts[hash & _MASK][hash]

    def __contains__(self, hash: object) -> bool:
        return hash in self._parts[hash & _MASK]  # type: ignore[operator]

    def get(self, hash: int, default: int | None = None) -> int | None:  # type: ignore[override]
        return self._parts[hash & _MASK].get(hash, default)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def add(self, new: Mapping[int, int]) -> None:
        """Add blocks, or change their pages."""
        parts = self._parts
        for hash, page in new.items():
            parts[hash & _MASK][hash] = page

    def remove(self, hashes: Iterable[int]) -> None:
        """Remove blocks, which must be in the index."""
        parts = self._parts
        for hash in hashes:
            del parts[hash & _MASK][hash]

    def find(self, hashes: Iterable[int]) -> list[int | None]:
        """Return the page of each block; None for a block that is not in the index."""
        parts = self._parts
        return [parts[hash & _MASK].get(hash) for hash in hashes]

    def known_pages(self, hashes: Iterable[int]) -> list[int]:
        """Return the pages of those blocks that are in the index."""
        parts = self._parts
        return [p for hash in hashes if (p := parts[hash & _MASK].get(hash)) is not None]

    def count_leading(self, hashes: Sequence[int], other: BlockIndex | None = None) -> int:
        """Count the blocks before the first that is neither in this index nor in another one."""
        parts, others = self._parts, (self if other is None else other)._parts
        for count, hash in enumerate(hashes):
            part = hash & _MASK
            if hash not in parts[part] and hash not in others[part]:
                return count
        return len(hashes)
