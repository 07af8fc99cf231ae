"""Hits of a trace in tiers of some sizes, by hash ids alone: no pages, no bytes, no kvcupy.

    request    leading blocks known in a tier are pinned and moved to the device;
               the others are inserted; unpinned once `running` later requests have begun
    device     full: the least recently used unpinned blocks are evicted, to the host unless below
    host       full: likewise, to the disk unless they are elsewhere
    disk       full: they are lost

Written from the documented behaviour of the cache, not from its code, so that the two can be
compared: the same requests and sizes must give the same counts, block by block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

TIERS = ("device", "host", "disk")


def hit_rates(counts: Mapping[str, int], tiers: Sequence[str] = TIERS) -> dict[str, float]:
    """Return the hit rate of each tier, and of all."""
    hits = {tier: counts.get(f"hit.{tier}", 0) for tier in tiers}
    asked = max(1, sum(hits.values()) + counts.get("missed", 0))
    return {tier: n / asked for tier, n in hits.items()} | {"total": sum(hits.values()) / asked}


class Lru:
    """Blocks of a tier, the least recently used first; written for clarity, not for speed."""

    def __init__(self) -> None:
        self.queue: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self.queue[block] = None

    def touch(self, block: int) -> None:
        self.queue.move_to_end(block)

    def remove(self, block: int) -> None:
        del self.queue[block]

    def first(self, count: int, kept: Collection[int]) -> list[int]:
        return list(islice((block for block in self.queue if block not in kept), count))


# The tiers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How many blocks each tier holds. A disk of 0 blocks is no disk."""

    device: int
    host: int
    disk: int = 0

    @property
    def longest(self) -> int:
        """The most blocks of a request: they must fit on the device, and on the way to it."""
        return min(self.device, self.host) if self.disk else self.device

    @property
    def all(self) -> tuple[int, int, int]:
        return self.device, self.host, self.disk


class Tier:
    """The blocks of one tier, in their eviction order; `taken` pages have other users."""

    def __init__(self, size: int) -> None:
        self.size, self.order = size, Lru()
        self.taken = 0
        self.blocks: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self.blocks

    @property
    def free(self) -> int:
        return self.size - len(self.blocks) - self.taken

    def add(self, block: int) -> None:
        self.blocks.add(block)
        self.order.add(block)

    def remove(self, block: int) -> None:
        self.blocks.remove(block)
        self.order.remove(block)

    def victims(self, count: int, kept: Collection[int]) -> list[int]:
        """Return the first blocks to evict, at most `count`, none of them in `kept`."""
        return self.order.first(count, kept) if count > 0 else []


class TierSimulation:
    """Blocks in three tiers, moved as a tiered cache moves them.

    Parameters
    ----------
    sizes : blocks in each tier
    write : "through": inserted blocks are copied to the host at once, as far as there is room or
        it can be made; "back": when they leave the device

    Attributes
    ----------
    counts : blocks by what happened to them: hit.device, hit.host, hit.disk, missed, inserted,
        evicted.device, evicted.host, evicted.disk, lost, loaded (host to device), saved (device
        to host), disk_read, disk_written
    """

    def __init__(self, sizes: Sizes, write: str = "through") -> None:
        self.device, self.host, self.disk = map(Tier, sizes.all)
        self.through = write == "through"
        self.pins: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()

    def match(self, ids: Sequence[int]) -> tuple[int, int, int]:
        """Return how many leading blocks are on the device, on device or host, in any tier."""
        counts, tiers = [], [self.device, self.host, self.disk]
        for depth in (1, 2, 3):
            above = [tier.blocks for tier in tiers[:depth]]
            leading = (n for n, i in enumerate(ids) if not any(i in blocks for blocks in above))
            counts.append(next(leading, len(ids)))
        return counts[0], counts[1], counts[2]

    def acquire(self, ids: Sequence[int]) -> list[int] | None:
        """Pin the leading known blocks and move them to the device; None if there is no room."""
        known = list(ids[: self.match(ids)[2]])
        absent = [block for block in known if block not in self.device]
        if not self._can_free(len(absent), known):
            return None
        self.pins.update(known)
        below = [block for block in absent if block not in self.host]
        self._leave_device(len(absent) - self.device.free, below, kept=set(absent))
        self.counts["disk_read"] += len(below)
        self.counts["loaded"] += len(absent)
        self._use(known, device=absent, host=below)
        return known

    def release(self, known: Sequence[int]) -> None:
        """Unpin what an `acquire` has pinned, and count it as used now."""
        for block in known:
            self.pins[block] -= 1
            if not self.pins[block]:
                del self.pins[block]
        self._use(known)

    def make_room(self, count: int) -> bool:
        """Make room to insert `count` blocks; return False, with nothing changed, if impossible."""
        if not self._can_free(count, ()):
            return False
        self._leave_device(count - self.device.free)
        return True

    def insert(self, ids: Sequence[int]) -> None:
        """Put blocks on the device, and copies on the host if written through.

        There must be room for them on the device: `make_room`.
        """
        fresh = [block for block in ids if block not in self.device]
        self.counts["inserted"] += len(fresh)
        copied: list[int] = []
        if self.through:
            absent = [block for block in fresh if block not in self.host]
            copied = absent[: self._room_on_host(len(absent), set(fresh), set(fresh))]
            self.counts["saved"] += len(copied)
        self._use(ids, device=fresh, host=copied)

    def _can_free(self, count: int, more_pinned: Collection[int]) -> bool:
        pinned = sum(block in self.device for block in {*self.pins, *more_pinned})
        return count <= self.device.size - self.device.taken - pinned

    def _use(
        self, ids: Sequence[int], *, device: Collection[int] = (), host: Collection[int] = ()
    ) -> None:
        """Add what is new to a tier and touch what is there, the last block of a prefix first."""
        for tier, new in ((self.device, device), (self.host, host), (self.disk, ())):
            added = set(new)
            for block in reversed(ids):
                if block in tier:
                    tier.order.touch(block)
                elif block in added:
                    tier.add(block)

    def _leave_device(
        self, count: int, below: Sequence[int] = (), kept: Collection[int] = ()
    ) -> None:
        """Evict blocks from the device, to the host unless they are below.

        Parameters
        ----------
        below : blocks that the host makes room for as well, first
        kept : blocks that stay on the host, and on disk
        """
        victims = self.device.victims(count, self.pins)
        for block in victims:
            self.device.remove(block)
        self.counts["evicted.device"] += len(victims)
        alone = [block for block in victims if block not in self.host and block not in self.disk]
        # Blocks that are evicted from the device should stay on the host.
        count, stay = len(below) + len(alone), {*kept, *victims}
        if len(below) > self.host.size - sum(block in self.host for block in stay):
            count, stay = len(below), set(kept)
        # The cache writes without its lock, and then plans again: a write that took the slot of a
        # block that is to be on disk only would have that block written again.
        slots_kept = {*kept, *(block for block in victims if block not in self.host)}
        room = self._room_on_host(count, stay, slots_kept) - len(below)
        fitting = alone[max(0, len(alone) - room) :]  # of those, the last to be evicted
        for block in fitting:
            self.host.add(block)
        self.counts["saved"] += len(fitting)
        self._to_disk(alone[: len(alone) - len(fitting)], kept)

    def _room_on_host(self, count: int, stay: Collection[int], kept: Collection[int]) -> int:
        """Evict blocks from the host, to the disk unless they are elsewhere.

        Parameters
        ----------
        stay, kept : blocks that are not evicted from the host, and from the disk. Nor are the
            victims on the host from the disk

        Returns
        -------
        for how many of `count` blocks there is room then
        """
        victims = self.host.victims(count - self.host.free, stay)
        for block in victims:
            self.host.remove(block)
        self.counts["evicted.host"] += len(victims)
        alone = [block for block in victims if block not in self.device and block not in self.disk]
        self._to_disk(alone, {*kept, *victims})
        return min(count, self.host.free)

    def _to_disk(self, blocks: Sequence[int], kept: Collection[int]) -> None:
        """Write blocks that are nowhere else to the disk, the last to be evicted; lose the rest."""
        overwritten = self.disk.victims(len(blocks) - self.disk.free, kept)
        for block in overwritten:
            self.disk.remove(block)
        self.counts["evicted.disk"] += len(overwritten)
        fitting = blocks[max(0, len(blocks) - self.disk.free) :]
        for block in fitting:
            self.disk.add(block)
        self.counts["disk_written"] += len(fitting)
        gone = [b for b in overwritten if b not in self.device and b not in self.host]
        self.counts["lost"] += len(gone) + len(blocks) - len(fitting)


@dataclass
class Simulated:
    """The counts of a simulated trace, and the hits of each request by tier."""

    counts: Counter[str] = field(default_factory=Counter)
    hits: list[tuple[int, int, int]] = field(default_factory=list)


def simulate(
    requests: Iterable[Sequence[int]], sizes: Sizes, write: str = "through",
    *, running: int = 1, each: Callable[[Any], None] = lambda tiers: None,
) -> Simulated:  # fmt: skip
    """Run requests through tiers one after another, as `run.Replay` does.

    Parameters
    ----------
    requests : the hash ids of each, cut to `sizes.longest`
    running : requests whose blocks are pinned at a time, fewer where there is no room
    each : called with the `TierSimulation` after each request
    """
    tiers = TierSimulation(sizes, write)
    result = Simulated(tiers.counts)
    leases: deque[list[int]] = deque()

    def until_room(attempt: Callable[..., Any], *arguments: Any) -> Any:
        while (value := attempt(*arguments)) in (None, False):
            tiers.release(leases.popleft())
        return value

    for ids in requests:
        ids = ids[: sizes.longest]
        while len(leases) >= running:
            tiers.release(leases.popleft())
        in_tiers = tiers.match(ids)
        known = until_room(tiers.acquire, ids)
        leases.append(known)
        missing = ids[len(known) :]
        until_room(tiers.make_room, len(missing))
        tiers.insert(missing)
        above = (0, *in_tiers)
        hits = tuple(n - before for n, before in zip(in_tiers, above, strict=False))
        result.hits.append(hits)
        for tier, count in zip(TIERS, hits, strict=True):
            tiers.counts[f"hit.{tier}"] += count
        tiers.counts["missed"] += len(missing)
        each(tiers)
    return result
