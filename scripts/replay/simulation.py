"""What tiers of given sizes find of a trace, by hash ids alone: no pages, no bytes, no kvcupy.

    request    leading blocks known in a tier are pinned and brought to the device;
               the others are inserted; pins go when so many later requests have begun
    device     full: the policy's first unpinned blocks leave, to the host if they are nowhere below
    host       full: likewise, to the disk if they are nowhere else
    disk       full: they are lost

Written from what the cache promises, not from how it does it, so that the two can be compared:
the same requests, sizes and policy must give the same counts, block by block.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .orders import ORDERS, Order

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Sizes:
    """How many blocks each tier holds. A disk of 0 blocks is no disk."""

    device: int
    host: int
    disk: int = 0

    def scaled(self, factor: float) -> Sizes:
        """Return the sizes times a factor, at least one block where there is a tier at all."""
        return Sizes(*(size and max(1, round(size * factor)) for size in self.all))

    @property
    def longest(self) -> int:
        """Blocks that a request can have: all at once on the device, and on their way to it."""
        return min(self.device, self.host) if self.disk else self.device

    @property
    def all(self) -> tuple[int, int, int]:
        return self.device, self.host, self.disk


class Tier:
    """The blocks of one tier, in the order in which they should leave it."""

    def __init__(self, size: int, order: Order) -> None:
        self.size, self.order = size, order
        self.blocks: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self.blocks

    @property
    def free(self) -> int:
        return self.size - len(self.blocks)

    def add(self, block: int) -> None:
        self.blocks.add(block)
        self.order.add(block)

    def remove(self, block: int) -> None:
        self.blocks.remove(block)
        self.order.remove(block)

    def victims(self, count: int, kept: Collection[int]) -> list[int]:
        """Return the first blocks to leave, at most `count`, none of them in `kept`."""
        return self.order.first(count, kept) if count > 0 else []


class TierSimulation:
    """Blocks in three tiers, moved as a tiered cache moves them.

    Parameters
    ----------
    sizes : blocks in each tier
    policy : one of `ORDERS`, for every tier
    write : "through": what is inserted is copied to the host at once, as far as there is room or
        can be made; "back": when it leaves the device

    Attributes
    ----------
    counts : blocks by what happened to them: hit.device, hit.host, hit.disk, missed, inserted,
        evicted.device, evicted.host, evicted.disk, lost, loaded (host to device), saved (device
        to host), disk_read, disk_written
    """

    def __init__(self, sizes: Sizes, policy: str = "lru", write: str = "through") -> None:
        self.device, self.host, self.disk = (Tier(size, ORDERS[policy]()) for size in sizes.all)
        self.through = write == "through"
        self.pins: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()

    def match(self, ids: Sequence[int]) -> tuple[int, int, int]:
        """Return how many leading blocks are on the device, there or on the host, in any tier."""
        found, tiers = [], [self.device, self.host, self.disk]
        for depth in (1, 2, 3):
            above = [tier.blocks for tier in tiers[:depth]]
            leading = (n for n, i in enumerate(ids) if not any(i in blocks for blocks in above))
            found.append(next(leading, len(ids)))
        return found[0], found[1], found[2]

    def acquire(self, ids: Sequence[int]) -> list[int] | None:
        """Pin the leading blocks known and bring them to the device; None: there is no room."""
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
        """Unpin what an `acquire` has pinned. Until now it was used."""
        for block in known:
            self.pins[block] -= 1
            if not self.pins[block]:
                del self.pins[block]
        self._use(known)

    def make_room(self, count: int) -> bool:
        """Let `count` blocks be inserted; return False, with nothing changed, if they cannot."""
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
            wanted = [block for block in fresh if block not in self.host]
            copied = wanted[: self._room_on_host(len(wanted), set(fresh), set(fresh))]
            self.counts["saved"] += len(copied)
        self._use(ids, device=fresh, host=copied)

    def _can_free(self, count: int, more_pinned: Collection[int]) -> bool:
        pinned = sum(block in self.device for block in {*self.pins, *more_pinned})
        return count <= self.device.size - pinned

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
        """Let blocks leave the device, to the host if they are nowhere below.

        Parameters
        ----------
        below : what the host is to have room for as well, before that
        kept : what stays on the host, and on disk
        """
        victims = self.device.victims(count, self.pins)
        for block in victims:
            self.device.remove(block)
        self.counts["evicted.device"] += len(victims)
        alone = [block for block in victims if block not in self.host and block not in self.disk]
        # What leaves the device had better stay on the host.
        count, stay = len(below) + len(alone), {*kept, *victims}
        if len(below) > self.host.size - sum(block in self.host for block in stay):
            count, stay = len(below), set(kept)
        room = self._room_on_host(count, stay, kept) - len(below)
        fitting = alone[max(0, len(alone) - room) :]  # of those, the last ones to go
        for block in fitting:
            self.host.add(block)
        self.counts["saved"] += len(fitting)
        self._to_disk(alone[: len(alone) - len(fitting)], kept)

    def _room_on_host(self, count: int, stay: Collection[int], kept: Collection[int]) -> int:
        """Let blocks leave the host, to the disk if they are nowhere else.

        Parameters
        ----------
        stay, kept : what does not leave the host, and the disk

        Returns
        -------
        for how many of `count` blocks there is room now
        """
        victims = self.host.victims(count - self.host.free, stay)
        for block in victims:
            self.host.remove(block)
        self.counts["evicted.host"] += len(victims)
        alone = [block for block in victims if block not in self.device and block not in self.disk]
        self._to_disk(alone, kept)
        return min(count, self.host.free)

    def _to_disk(self, blocks: Sequence[int], kept: Collection[int]) -> None:
        """Write blocks that are nowhere else to the disk, the last ones to go; lose the others."""
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
    """What a simulation of a trace has counted, and the hits of each request by tier."""

    counts: Counter[str] = field(default_factory=Counter)
    hits: list[tuple[int, int, int]] = field(default_factory=list)


def simulate(
    requests: Iterable[Sequence[int]], sizes: Sizes, policy: str = "lru", write: str = "through",
    *, running: int = 1, each: Callable[[Any], None] = lambda tiers: None,
) -> Simulated:  # fmt: skip
    """Let requests go through tiers one after another, as `replay_run.Replay` does.

    Parameters
    ----------
    requests : the hash ids of each, cut to `sizes.longest`
    running : requests whose blocks stay pinned at a time, fewer where there is no room
    each : called with the `TierSimulation` after each request
    """
    tiers = TierSimulation(sizes, policy, write)
    result = Simulated(tiers.counts)
    leases: deque[list[int]] = deque()

    def until(attempt: Callable[..., Any], *given: Any) -> Any:
        while (made := attempt(*given)) in (None, False):
            tiers.release(leases.popleft())
        return made

    for ids in requests:
        ids = ids[: sizes.longest]
        while len(leases) >= running:
            tiers.release(leases.popleft())
        in_tiers = tiers.match(ids)
        known = until(tiers.acquire, ids)
        leases.append(known)
        missing = ids[len(known) :]
        until(tiers.make_room, len(missing))
        tiers.insert(missing)
        above = (0, *in_tiers)
        found = tuple(n - before for n, before in zip(in_tiers, above, strict=False))
        result.hits.append(found)
        for tier, count in zip(TIERS, found, strict=True):
            tiers.counts[f"hit.{tier}"] += count
        tiers.counts["missed"] += len(missing)
        each(tiers)
    return result
