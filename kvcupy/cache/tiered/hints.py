"""Hints of callers: blocks to retain, their eviction order, and the answers to hints."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from .changes import Change, Removed, Replaced
from .policies import Policy, in_order, untracked

_MAX_STALE = 1_000  # entries of replaced hints that are kept
_ASIDE = object()  # the place of a retained block that was set aside


@dataclass(frozen=True)
class Hint:
    """The answer to a hint.

    Attributes
    ----------
    outcome : "accepted"; "clipped", if it holds for some of the blocks; or "refused", if nothing
        has changed
    reason : why it was not accepted, else ""
    """

    outcome: str
    reason: str = ""


class Retention(NamedTuple):
    """How a block is retained. Times are from `time.monotonic`.

    Attributes
    ----------
    priority : infinite for pinned blocks
    lasts : whether it outlives the next `acquire` of the block
    """

    priority: float
    resume_at: float | None = None
    expires_at: float = inf
    lasts: bool = True

    @property
    def key(self) -> tuple[float, float]:
        """The place in the eviction order: by priority, then the farthest resume time first."""
        return self.priority, -inf if self.resume_at is None else -self.resume_at


class Hints:
    """The retained and pinned blocks of a cache.

    The lock of the cache guards it.

    Attributes
    ----------
    retained : by hash
    pinned : hashes of pinned blocks, which are retained too
    """

    def __init__(self, tiers: Callable[[], Container[int] | None]) -> None:
        self.retained: dict[int, Retention] = {}
        self.pinned: set[int] = untracked(set())
        self._tiers = tiers  # a weak reference: the tiers refer to the hints
        self._expiries: list[tuple[float, int, int]] = []  # (time, number, hash), a heap
        self._num_put = 0

    def __len__(self) -> int:
        return len(self.retained)

    def put(self, hash: int, retention: Retention) -> None:
        self.retained[hash] = retention
        if retention.expires_at < inf:
            self._num_put += 1
            heapq.heappush(self._expiries, (retention.expires_at, self._num_put, hash))
            if len(self._expiries) > 2 * len(self.retained) + _MAX_STALE:
                self._expiries = [entry for entry in self._expiries if self._is_current(*entry)]
                heapq.heapify(self._expiries)

    def drop(self, hash: int) -> None:
        self.retained.pop(hash, None)
        self.pinned.discard(hash)

    def expired(self, now: float) -> Iterator[int]:
        """Yield hashes whose retention is over."""
        while self._expiries and self._expiries[0][0] <= now:
            entry = heapq.heappop(self._expiries)
            if self._is_current(*entry):
                yield entry[2]

    def _is_current(self, when: float, number: int, hash: int) -> bool:
        return hash in self.retained and self.retained[hash].expires_at == when

    def note(self, change: Change) -> None:
        """Forget blocks that have left their last tier."""
        if isinstance(change, Removed):
            for hash in change.hashes:
                tiers = self._tiers() if hash in self.retained else None
                if tiers is not None and hash not in tiers:
                    self.drop(hash)
        elif isinstance(change, Replaced) and not change.blocks:
            self.retained.clear()
            self.pinned.clear()


class HintedOrder:
    """A policy that evicts retained blocks last, and blocks of negative priority first.

    Blocks of equal priority and resume time are evicted in the order of their last use.
    """

    def __init__(self, order: Policy, retained: Mapping[int, Retention]) -> None:
        self._order, self._retained = order, retained
        self._groups: dict[tuple[float, float], OrderedDict[int, None]] = {}
        self._keys: list[tuple[float, float]] = []  # of the groups, sorted
        self._key_of: dict[int, tuple[float, float]] = {}
        self._set_aside: Callable[[int], Any] | None = getattr(order, "set_aside", None)

    def add(self, key: int) -> None:
        retention = self._retained.get(key)
        if retention is None:
            self._order.add(key)
            return
        place = retention.key
        if place not in self._groups:
            self._groups[place] = untracked(OrderedDict())
            insort(self._keys, place)
        self._groups[place][key] = None
        self._key_of[key] = place

    def touch(self, key: int) -> None:
        place = self._key_of.get(key)
        if place is None:
            self._order.touch(key)
        else:
            self._groups[place].move_to_end(key)

    def remove(self, key: int) -> None:
        if key not in self._key_of:
            self._order.remove(key)
            return
        place = self._key_of.pop(key)
        group = self._groups[place]
        del group[key]
        if not group:
            del self._groups[place]
            del self._keys[bisect_left(self._keys, place)]

    def set_aside(self, key: int) -> Any:
        if key in self._key_of:
            self.remove(key)
            return _ASIDE
        return None if self._set_aside is None else self._set_aside(key)

    def put_back(self, key: int, place: Any) -> None:
        if place is _ASIDE:
            self.add(key)
        else:
            self._order.put_back(key, place)  # type: ignore[attr-defined]

    def victims(self) -> Iterator[int]:
        groups = [self._groups[place] for place in self._keys]
        num_first = bisect_left(self._keys, (0, -inf))
        for group in groups[:num_first]:
            yield from in_order(group)
        yield from self._order.victims()
        for group in groups[num_first:]:
            yield from in_order(group)
