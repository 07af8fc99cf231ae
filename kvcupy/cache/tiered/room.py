"""Making room in tiers: what goes down when other blocks come, planned before anything changes.

    device page --save--> host page --write--> slot on disk --> lost

A block goes down only if no lower tier has it. What is planned is carried out under one hold of
the cache's lock, so plans do not grow old.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import CacheFull, DeviceError
from ..engine import TransferEngine
from ..pages import Pages
from .blocks import Copy, PageTier
from .counts import Counts
from .disk_blocks import DiskBlocks
from .flights import Blocked, Flight, Flights

_NOTHING: frozenset[int] = frozenset()


@dataclass
class Room:
    """Host pages that can be had, and what goes for them.

    Attributes
    ----------
    num_free : pages that are free
    victims : host copies that go, for a page each
    writes : those of them that are written to disk
    slots : hashes that go from the disk for that
    """

    num_free: int = 0
    victims: list[Copy] = field(default_factory=list)
    writes: list[Copy] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        return self.num_free + len(self.victims)


class Tiers:
    """The tiers, what is under way between them, and the way down.

    Attributes
    ----------
    engine, device, host, disk, flights, counts

    Notes
    -----
    The caller holds the lock of the cache. What is called `plan` changes nothing.
    """

    def __init__(
        self, engine: TransferEngine, device: PageTier, host: PageTier, disk: DiskBlocks | None
    ) -> None:
        self.engine = engine
        self.device = device
        self.host = host
        self.disk = disk
        self.flights = Flights()
        self.counts = Counts()

    def __contains__(self, hash: int) -> bool:
        """Whether a block is in any tier."""
        return hash in self.device.copies or hash in self.host.copies or self.on_disk(hash)

    def on_disk(self, hash: int) -> bool:
        """Return whether the disk has a block."""
        return self.disk is not None and hash in self.disk.slots

    # --- What is under way ---

    def settle(self) -> None:
        """Take note of the transfers that are over by now."""
        for flight in self.flights.settle():
            if flight.failure is not None:
                self.drop(flight)
            elif flight.kind == "load":
                self.counts.load_bytes += flight.num_bytes
                self.counts.load_s += flight.seconds
            elif flight.kind == "save":
                self.counts.save_bytes += flight.num_bytes
                self.counts.save_s += flight.seconds

    def drop(self, flight: Flight) -> None:
        """Forget the copies that a failed flight was to fill.

        Leased pages stay with their leases. The allocator holds the others back while the transfer
        may still write them.
        """
        tier = self.host if flight.kind == "save" else self.device
        self.flights.failed(flight)
        copies, flight.copies = [copy for copy in flight.copies if tier.has(copy)], ()
        tier.forget(copies)
        tier.give_back([copy.page for copy in copies if not copy.pins])
        self.counts.lost += sum(copy.hash not in self for copy in copies)
        if flight.kind == "save":
            self.counts.failed_saves += len(copies)
        else:
            self.counts.failed_loads += len(copies)

    def unpin(self, copies: Sequence[Copy]) -> None:
        """Let go of leased copies, and of the pages of those that have been forgotten meanwhile."""
        orphans = []
        for copy in copies:
            copy.pins -= 1
            if not copy.pins and not self.device.has(copy):
                orphans.append(copy.page)
        self.device.give_back(orphans)
        hashes = [copy.hash for copy in copies]
        self.device.use(hashes, {})
        self.host.use(hashes, {})
        if self.disk is not None:
            self.disk.use(hashes)

    def wait_for_pages(self, tier: PageTier, num_free: int) -> None:
        """Raise Blocked if more than `num_free` pages are free, or are when a transfer is over."""
        allocator = tier.pool.allocator
        if allocator.num_pages - allocator.num_allocated > num_free:
            if allocator.num_free > num_free:
                raise Blocked(None)
            flight = self.flights.oldest()
            raise Blocked(allocator.wait_for_freed if flight is None else flight.synchronize)

    def require_arrived(self, copies: Iterable[Copy]) -> None:
        """Raise Blocked if pages do not have their blocks yet."""
        for copy in copies:
            if copy.arriving is not None:
                raise Blocked(copy.arriving.synchronize)

    # --- Out of the host tier ---

    def plan_host(
        self,
        wanted: int,
        *,
        must: int = 0,
        keep: Collection[int] = _NOTHING,
        leaving: Collection[int] = _NOTHING,
        wait: bool = True,
    ) -> Room:
        """Choose what goes for `wanted` host pages; less room than that is an answer too.

        Parameters
        ----------
        must : pages that there must be. They are the first of the room, and no transfer touches
            them
        keep : hashes that stay in the host tier and on disk
        leaving : hashes that are about to leave the device. They go from the host tier last, and
            only to the disk or where there must be pages
        wait : rather wait for transfers than give less room

        Raises
        ------
        CacheFull : there is less room than there must be
        Blocked : to wait for a transfer
        """
        num_free = min(wanted, self.host.num_free)
        stay = {*keep, *leaving} if leaving else keep
        room = Room(num_free, self.host.choose(wanted - num_free, stay, settled=not wait))
        least = must if self.disk is None else wanted
        if leaving and room.num_pages < least:
            room.victims = self.host.choose(least - num_free, keep, settled=not wait)
        if wait:
            for copy in room.victims[: max(0, must - num_free)]:
                if copy.touched is not None:
                    raise Blocked(copy.touched.synchronize)
            if room.num_pages < wanted:
                self.wait_for_pages(self.host, num_free)
        if room.num_pages < must:
            raise CacheFull(
                f"hashes: expected at most {room.num_pages} blocks from disk at once, for which "
                f"the host pool has room, got {must}"
            )
        if self.disk is not None:
            self._plan_disk(room, self.disk, keep, leaving)
        return room

    def _plan_disk(
        self, room: Room, disk: DiskBlocks, keep: Collection[int], leaving: Collection[int]
    ) -> None:
        for copy in room.victims:
            if copy.hash in disk.slots:
                continue
            if copy.hash in self.device.copies and copy.hash not in leaving:
                continue
            room.writes.append(copy)
        self.require_arrived(room.writes)
        room.slots = disk.choose(len(room.writes) - disk.num_free, keep)
        excess = len(room.writes) - disk.num_free - len(room.slots)
        if excess > 0:
            del room.writes[:excess]  # the first to go are lost

    def make_host(self, room: Room) -> Pages:
        """Carry a plan out: return the pages, which no block has any more."""
        pages = self.host.take(room.num_free)
        if self.disk is not None:
            self.write(self.disk, room.writes, room.slots)
        self.host.forget(room.victims)
        self.counts.host_evicted += len(room.victims)
        self.counts.lost += sum(copy.hash not in self for copy in room.victims)
        return np.concatenate((pages, _pages(room.victims)))

    def write(
        self, disk: DiskBlocks, copies: Sequence[Copy], slots: Sequence[int]
    ) -> dict[int, OSError]:
        """Write host copies to disk, in place of the blocks `slots`; return what failed."""
        disk.evict(slots)
        self.counts.disk_evicted += len(slots)
        self.counts.lost += sum(hash not in self for hash in slots)
        return disk.write(copies) if copies else {}

    # --- Out of the device tier ---

    def alone(self, copies: Iterable[Copy]) -> list[Copy]:
        """Return the device copies of blocks that no lower tier has."""
        known = self.host.copies
        return [c for c in copies if c.hash not in known and not self.on_disk(c.hash)]

    def save(self, copies: Sequence[Copy], pages: Pages, after: Any) -> dict[int, Copy]:
        """Queue the copying of device copies into host pages.

        Returns
        -------
        the new host copies by hash, which the tier does not have yet
        """
        if not copies:
            return {}
        transfer = self.engine.save(_pages(copies), pages, after=self.behind(copies, after))
        sources = [copy.arriving for copy in copies]
        made = [Copy(c.hash, page) for c, page in zip(copies, pages.tolist(), strict=True)]
        flight = self.flights.add(Flight("save", transfer, made, sources))
        for copy in made:
            copy.filled = copy.used = flight
        return {copy.hash: copy for copy in made}

    def leave(self, victims: Sequence[Copy]) -> Pages:
        """Take blocks out of the device tier; return their pages, which stay the cache's."""
        self.device.forget(victims)
        self.counts.device_evicted += len(victims)
        self.counts.lost += sum(copy.hash not in self for copy in victims)
        return _pages(victims)

    def behind(self, copies: Iterable[Copy], after: Any) -> Any:
        """Return a stream behind `after`, and behind those that still write the pages of copies."""
        fences = {id(f): f for c in copies if (f := c.arriving) is not None and f.kind == "insert"}
        if not fences:
            return after
        device = self.engine.device
        relay = device.stream()
        relay.wait(device.as_stream(after))
        for fence in fences.values():
            with suppress(DeviceError):  # then nobody writes the pages any more
                fence.wait(relay)
        return relay


def _pages(copies: Sequence[Copy]) -> Pages:
    return np.array([copy.page for copy in copies], np.int64)
