"""Hints of callers: retained blocks, their eviction order, and the answers to hints."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeAlias

from .changes import Change, Removed, Replaced
from .parts import untracked
from .policies import Policy, in_order

_MIN_CHANGES = 1_000  # before stale ones are dropped
_MAX_RESUME_TIMES = 16  # per block
_RESUME_TOLERANCE_S = 1.0  # an acquire so much before a resume time counts as that resume
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
    lasts : whether it outlives an acquire after the last of these times
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
            resumes_at=tuple(sorted(resumes_at)[:_MAX_RESUME_TIMES]),
            expires_at=max(self.expires_at, before.expires_at),
        )

    def acquired(self, now: float) -> Retention | None:
        """Return the retention after an acquire: of later resume times, or lasting; else None."""
        later = self.passed(now + _RESUME_TOLERANCE_S)
        if self.priority < 0:
            later = replace(later, priority=0, lasts=False)
        return later if later.resumes_at or later.lasts else None

    def passed(self, now: float) -> Retention:
        """Return this retention without the resume times that have passed."""
        return replace(self, resumes_at=tuple(when for when in self.resumes_at if when > now))


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
        # Times at which hints change, and for which blocks; a heap.
        self._changes: list[tuple[float, int, Sequence[int]]] = []
        self._num_changes = self._num_kept = 0  # since stale ones were dropped, and then

    def put(self, hashes: Sequence[int], retention: Retention, now: float) -> None:
        """Retain blocks, each with the resume times that it has."""
        changed: dict[Retention | None, Retention] = {}
        retained = self.retained
        for hash in hashes:
            before = retained.get(hash)
            if (new := changed.get(before)) is None:
                new = changed[before] = retention.after(before, now)
            retained[hash] = new
        times = {*retention.resumes_at, *(new.expires_at for new in changed.values())}
        for when in times:
            if when < inf:
                self._num_changes += 1
                heapq.heappush(self._changes, (when, self._num_changes, hashes))
        if self._num_changes >= 2 * self._num_kept + _MIN_CHANGES:
            self._drop_stale_changes()

    def drop(self, hash: int) -> None:
        self.retained.pop(hash, None)
        self.pinned.discard(hash)

    def note_acquired(self, hashes: Sequence[int], now: float) -> None:
        """End hints that are about the time until an acquire; the release reorders the blocks.

        Later resume times stay: other sessions that share the blocks may have announced them.
        """
        changed: dict[Retention, Retention | None] = {}
        for hash in hashes:
            before = self.retained.get(hash)
            if before is None:
                continue
            if before not in changed:
                changed[before] = before.acquired(now)
            after = changed[before]
            if after is None:
                self.drop(hash)
            else:
                self.retained[hash] = after

    def due(self, now: float) -> tuple[list[int], list[int]]:
        """Return the hashes whose retention is over, and the hashes that have another place.

        A resume time that has passed counts as long as there is no later one.
        """
        over: list[int] = []
        moved: list[int] = []
        changed: dict[Retention, Retention] = {}
        while self._changes and self._changes[0][0] <= now:
            for hash in heapq.heappop(self._changes)[2]:
                if (before := self.retained.get(hash)) is None:
                    continue
                if before.expires_at <= now:
                    over.append(hash)
                elif before.resumes_at and before.resumes_at[0] <= now < before.resumes_at[-1]:
                    if before not in changed:
                        changed[before] = before.passed(now)
                    self.retained[hash] = changed[before]
                    moved.append(hash)
        return over, moved

    def _drop_stale_changes(self) -> None:
        """Forget changes of hints that were replaced."""
        kept = []
        for entry in self._changes:
            hints = {self.retained[hash] for hash in entry[2] if hash in self.retained}
            if any(entry[0] == hint.expires_at or entry[0] in hint.resumes_at for hint in hints):
                kept.append(entry)
        heapq.heapify(kept)
        self._changes = kept
        self._num_kept = self._num_changes = len(kept)

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
