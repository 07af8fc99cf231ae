"""Hints of callers: blocks to retain, their eviction order, and the answers to hints."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeAlias

from .changes import Change, Removed, Replaced
from .policies import Policy, in_order, untracked

_MAX_STALE = 1_000  # hints between two searches for replaced ones
_MAX_RESUMES = 16  # times per block
Place: TypeAlias = tuple[float, float]
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


@dataclass(frozen=True)
class Retention:
    """How blocks are retained. Times are from `time.monotonic`.

    Attributes
    ----------
    priority : infinite for pinned blocks
    resumes_at : expected times of the next acquires, the nearest first
    lasts : whether it outlives these acquires
    key : the place in the eviction order: by priority, then the farthest resume time first
    """

    priority: float
    resumes_at: tuple[float, ...] = ()
    expires_at: float = inf
    lasts: bool = True
    key: Place = field(init=False)

    def __post_init__(self) -> None:
        resume = -self.resumes_at[0] if self.resumes_at else -inf
        object.__setattr__(self, "key", (self.priority, resume))

    def after(self, before: Retention | None, now: float) -> Retention:
        """Return this retention with the resume times of an earlier one that have not passed."""
        if before is None or not (self.resumes_at and before.resumes_at):
            return self
        resumes_at = {*self.resumes_at, *(when for when in before.resumes_at if when > now)}
        return replace(
            self,
            resumes_at=tuple(sorted(resumes_at)[:_MAX_RESUMES]),
            expires_at=max(self.expires_at, before.expires_at),
        )

    def acquired(self) -> Retention | None:
        """Return what is left after an acquire: the other resume times, or a lasting retention."""
        left = self.resumes_at[1:]
        return replace(self, resumes_at=left) if left or self.lasts else None


class Hints:
    """The retained and pinned blocks of a cache.

    The lock of the cache guards it. Blocks with equal hints share a Retention.

    Attributes
    ----------
    retained : by hash
    pinned : hashes of pinned blocks, which are retained too
    """

    def __init__(self, tiers: Callable[[], Container[int] | None]) -> None:
        self.retained: dict[int, Retention] = {}
        self.pinned: set[int] = untracked(set())
        self._tiers = tiers  # a weak reference: the tiers refer to the hints
        # When to look for expired hints, and for which blocks; a heap.
        self._expiries: list[tuple[float, int, Sequence[int]]] = []
        self._num_expiries = 0

    def put(self, hashes: Sequence[int], retention: Retention, now: float) -> None:
        """Retain blocks, each with the resume times that it has."""
        changed: dict[Retention | None, Retention] = {}
        retained, latest = self.retained, retention.expires_at
        for hash in hashes:
            before = retained.get(hash)
            if (new := changed.get(before)) is None:
                new = changed[before] = retention.after(before, now)
                latest = max(latest, new.expires_at)
            retained[hash] = new
        if latest < inf:
            self._num_expiries += 1
            heapq.heappush(self._expiries, (latest, self._num_expiries, hashes))
            self._drop_stale_expiries()

    def drop(self, hash: int) -> None:
        self.retained.pop(hash, None)
        self.pinned.discard(hash)

    def note_acquired(self, hashes: Sequence[int]) -> None:
        """End hints that are about the time until an acquire; the release reorders the blocks."""
        changed: dict[Retention, Retention | None] = {}
        for hash in hashes:
            before = self.retained.get(hash)
            if before is None or (before.lasts and not before.resumes_at):
                continue
            if before not in changed:
                changed[before] = before.acquired()
            if (after := changed[before]) is None:
                self.drop(hash)
            else:
                self.retained[hash] = after

    def expired(self, now: float) -> list[int]:
        """Return hashes whose retention is over."""
        over: list[int] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, _, hashes = heapq.heappop(self._expiries)
            over += [
                hash
                for hash in hashes
                if hash in self.retained and self.retained[hash].expires_at <= now
            ]
        return over

    def _drop_stale_expiries(self) -> None:
        """Forget entries of blocks whose hints have been replaced, if there are many."""
        if self._num_expiries % _MAX_STALE:
            return
        retained = self.retained
        self._expiries = [
            entry
            for entry in self._expiries
            if any(h in retained and retained[h].expires_at <= entry[0] for h in entry[2])
        ]
        heapq.heapify(self._expiries)

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
        self._groups: dict[Place, OrderedDict[int, None]] = {}
        self._keys: list[Place] = []  # of the groups, sorted
        self._key_of: dict[int, Place] = {}
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
            return
        retention = self._retained.get(key)
        if retention is not None and retention.key == place:
            self._groups[place].move_to_end(key)
        else:
            self.remove(key)
            self.add(key)

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
