"""The eviction order of a tier: by priority, and least recently used first."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from types import MappingProxyType

from .changes import Change, Removed, Replaced
from .parts import MASK, parts, untracked

_PIECE_KEYS = 4096
_MIN_STALE = 1_000  # expirations without blocks, before they are dropped
_NO_PRIORITIES: Mapping[int, int] = MappingProxyType({})


class Lru:
    """Keys, the least recently used first.

    Keys are appended to pieces, each of which has a number. A key that is used again is appended to
    the last piece; its earlier entry becomes stale: `_number_of` has another number. Unlike an
    OrderedDict, no table of all keys is ever rebuilt.
    """

    def __init__(self) -> None:
        self._number_of = parts()  # number of the piece with each key
        self._pieces: dict[int, list[int]] = {}  # by number, the oldest first; without the last
        self._sizes: dict[int, int] = {}  # of these pieces: the number of keys that are not stale
        self._last: dict[int, None] = untracked({})
        self._last_number = 0

    def touch(self, keys: Iterable[int]) -> None:
        """Append keys in turn, known or unknown."""
        last, number, sizes = self._last, self._last_number, self._sizes
        for key in keys:
            if key in last:
                del last[key]
            else:
                number_of = self._number_of[hash(key) & MASK]
                if (before := number_of.get(key)) is not None:
                    sizes[before] -= 1
                number_of[key] = number
            last[key] = None
        if len(last) >= _PIECE_KEYS:
            self._begin_piece()

    def remove(self, keys: Iterable[int]) -> None:
        """Remove keys; unknown ones are skipped."""
        for key in keys:
            number = self._number_of[hash(key) & MASK].pop(key, None)
            if number == self._last_number:
                del self._last[key]
            elif number is not None:
                self._sizes[number] -= 1

    def __iter__(self) -> Iterator[int]:
        self._drop_stale_front()
        number_of = self._number_of
        for number, piece in self._pieces.items():
            if self._sizes[number] == len(piece):
                yield from piece
                continue
            for key in piece:
                if number_of[hash(key) & MASK].get(key) == number:
                    yield key
        yield from self._last

    def _drop_stale_front(self) -> None:
        """Drop stale entries before the first key, so that no call passes them again."""
        while self._pieces:
            number = next(iter(self._pieces))
            if not self._sizes[number]:
                del self._pieces[number], self._sizes[number]
                continue
            number_of, piece = self._number_of, self._pieces[number]
            num_stale = 0
            while number_of[hash(key := piece[num_stale]) & MASK].get(key) != number:
                num_stale += 1
            del piece[:num_stale]
            return

    def _begin_piece(self) -> None:
        """Begin another last piece; make up for it by merging pieces that are mostly stale."""
        sizes = self._sizes
        self._pieces[self._last_number] = untracked(list(self._last))
        sizes[self._last_number] = len(self._last)
        self._last, self._last_number = untracked({}), self._last_number + 1
        numbers = list(sizes)
        small = (
            (first, second)
            for first, second in pairwise(numbers)
            if sizes[first] + sizes[second] <= _PIECE_KEYS // 2
        )
        if (pair := next(small, None)) is not None:
            self._merge(*pair)

    def _merge(self, number: int, second: int) -> None:
        """Append the keys of the second piece to the one before it."""
        moved = self._keys(second)
        self._pieces[number] = untracked(self._keys(number) + moved)
        self._sizes[number] += self._sizes.pop(second)
        del self._pieces[second]
        for key in moved:
            self._number_of[hash(key) & MASK][key] = number

    def _keys(self, number: int) -> list[int]:
        """Return the keys of a piece that are not stale."""
        of = self._number_of
        return [key for key in self._pieces[number] if of[hash(key) & MASK].get(key) == number]


class EvictionOrder:
    """The hashes of a tier in eviction order.

    Blocks without a priority come after negative priorities, and before the others. A changed
    priority counts from the next `touch` of the block on.

    Parameters
    ----------
    priorities : of retained blocks, by hash; the tiers of a cache share them
    """

    def __init__(self, priorities: Mapping[int, int] = _NO_PRIORITIES) -> None:
        self._priorities = priorities
        self._lru = Lru()  # of blocks without a priority
        self._groups: dict[int, OrderedDict[int, None]] = {}  # the others by priority
        self._group_of: dict[int, int] = {}
        self._sorted: list[int] = []  # priorities of the groups

    def touch(self, hashes: Iterable[int]) -> None:
        """Note uses of blocks in turn; unknown ones are added."""
        if not self._priorities and not self._group_of:
            self._lru.touch(hashes)
            return
        for hash in hashes:
            priority = self._priorities.get(hash)
            if self._group_of.get(hash) != priority:
                self.remove([hash])
            if priority is None:
                self._lru.touch([hash])
                continue
            if priority not in self._groups:
                self._groups[priority] = untracked(OrderedDict())
                insort(self._sorted, priority)
            self._groups[priority].pop(hash, None)
            self._groups[priority][hash] = None
            self._group_of[hash] = priority

    def remove(self, hashes: Sequence[int]) -> None:
        """Remove blocks; unknown ones are skipped."""
        self._lru.remove(hashes)
        for hash in hashes if self._group_of else ():
            if (priority := self._group_of.pop(hash, None)) is None:
                continue
            del self._groups[priority][hash]
            if not self._groups[priority]:
                del self._groups[priority]
                del self._sorted[bisect_left(self._sorted, priority)]

    def __iter__(self) -> Iterator[int]:
        """Yield every hash once; the order must not change meanwhile."""
        num_first = bisect_left(self._sorted, 0)
        for priority in self._sorted[:num_first]:
            yield from self._groups[priority]
        yield from self._lru
        for priority in self._sorted[num_first:]:
            yield from self._groups[priority]


class Retentions:
    """The retained blocks of a cache, guarded by its lock.

    Attributes
    ----------
    priorities : by hash
    """

    def __init__(self) -> None:
        self.priorities: dict[int, int] = untracked({})
        self._with: dict[int, dict[int, None]] = {}  # blocks whose retention ends together
        self._expirations: list[tuple[float, int, dict[int, None]]] = []  # a heap
        self._num_retained = 0  # calls of `put`

    def put(self, hashes: Sequence[int], priority: int, expires_at: float) -> None:
        """Retain blocks, in place of what was said of them before."""
        ending: dict[int, None] = untracked({})
        for hash in hashes:
            self.drop(hash)
            self.priorities[hash] = priority
            if expires_at < inf:
                self._with[hash] = ending
                ending[hash] = None
        if not ending:
            return
        self._num_retained += 1
        heapq.heappush(self._expirations, (expires_at, self._num_retained, ending))
        if len(self._expirations) > 2 * len(self._with) + _MIN_STALE:
            self._expirations = [entry for entry in self._expirations if entry[2]]
            heapq.heapify(self._expirations)

    def drop(self, hash: int) -> None:
        self.priorities.pop(hash, None)
        if (ending := self._with.pop(hash, None)) is not None:
            del ending[hash]

    def expire(self, now: float) -> list[int]:
        """End the retentions whose time is over; return their blocks."""
        over: list[int] = []
        while self._expirations and self._expirations[0][0] <= now:
            over += heapq.heappop(self._expirations)[2]
        for hash in over:
            self.drop(hash)
        return over

    def note(self, tiers: Callable[[], Container[int] | None], change: Change) -> None:
        """Forget blocks that have left their last tier."""
        if isinstance(change, Removed):
            known = tiers()
            for hash in change.hashes:
                if hash in self.priorities and (known is None or hash not in known):
                    self.drop(hash)
        elif isinstance(change, Replaced) and not change.blocks:
            self.priorities.clear()
            self._with.clear()
            self._expirations.clear()
