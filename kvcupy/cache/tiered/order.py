"""The eviction order of a tier: by priority, and least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType

from .changes import Change, Removed, Replaced
from .index import untracked

_MIN_STALE = 1_000  # expirations without blocks, before they are dropped
_NO_PRIORITIES: Mapping[int, int] = MappingProxyType({})


class EvictionOrder:
    """The pages of a tier in eviction order: linked lists by page number, one for each priority."""

    def __init__(
        self, hashes: Sequence[int], priorities: Mapping[int, int] = _NO_PRIORITIES
    ) -> None:
        self._hashes, self._priorities = hashes, priorities
        num_pages = len(hashes)
        self._next: list[int] = untracked([0] * num_pages)
        self._previous: list[int] = untracked([-1] * num_pages)  # -1: the page is in no list
        self._lists: dict[int | None, int] = {}  # by priority, the node after the last page
        self._unretained = self._list_of(None)

    def touch(self, pages: Iterable[int]) -> None:
        """Note uses of pages in turn; unknown ones are added."""
        following, previous, priorities = self._next, self._previous, self._priorities
        end = self._unretained
        for page in pages:
            if priorities:
                end = self._list_of(priorities.get(self._hashes[page]))
            if (before := previous[page]) >= 0:
                after = following[page]
                following[before], previous[after] = after, before
            last = previous[end]
            following[last] = previous[end] = page
            previous[page], following[page] = last, end

    def remove(self, pages: Iterable[int]) -> None:
        """Remove pages; unknown ones are skipped."""
        for page in pages:
            if (before := self._previous[page]) >= 0:
                after = self._next[page]
                self._next[before], self._previous[after] = after, before
                self._previous[page] = -1

    def __iter__(self) -> Iterator[int]:
        """Yield every page once; the order must not change meanwhile."""
        following = self._next
        for _, end in sorted((-0.5 if p is None else p, end) for p, end in self._lists.items()):
            page = following[end]
            while page != end:
                yield page
                page = following[page]

    def _list_of(self, priority: int | None) -> int:
        """Return the last node of a priority's list, which may be a new one."""
        if (end := self._lists.get(priority)) is None:
            lists, following = self._lists, self._next
            empty = (p for p, end in lists.items() if p is not None and following[end] == end)
            if (other := next(empty, None)) is None:
                end = len(following)
                following.append(end)
                self._previous.append(end)
            else:
                end = lists.pop(other)
            lists[priority] = end
        return end


class Retentions:
    """The retained blocks of a cache, guarded by its lock."""

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
