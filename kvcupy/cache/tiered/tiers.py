"""Making room in tiers: what goes down when other blocks come, planned before anything changes.

    device page --save--> host page --write--> slot on disk --> lost

A block goes down only if no lower tier has it. What is planned is carried out under one hold of
the cache's lock, so plans do not grow old.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...errors import CacheFull, CaptureError, DeviceError, KvcupyError
from ..completion import StreamCompletion
from ..engine import Transfer, TransferEngine
from ..pages import Pages
from . import policies
from .disk import DiskBlocks
from .policies import Policy

if TYPE_CHECKING:
    from ..pool import Pool

_NOTHING: frozenset[int] = frozenset()
_Result = TypeVar("_Result")


class Copy:
    """One block in one page of a pool.

    Attributes
    ----------
    hash, page : which block, and where
    pins : leases on it
    filled : what brings the block into the page, if that was under way when the copy was made
    used : in the host tier, the last transfer that touches the page, if there was one; when it is
        over, those before it are
    """

    __slots__ = ("filled", "hash", "page", "pins", "used")

    def __init__(self, hash: int, page: int, filled: Flight | None = None) -> None:
        self.hash = hash
        self.page = page
        self.pins = 0
        self.filled = filled
        self.used = filled

    @property
    def arriving(self) -> Flight | None:
        """What still brings the block."""
        return None if self.filled is None or self.filled.over else self.filled

    @property
    def touched(self) -> Flight | None:
        """A transfer that may still touch the page."""
        return None if self.used is None or self.used.over else self.used


class PageTier:
    """The blocks in the pages of one pool.

    Attributes
    ----------
    name : "device" or "host"
    copies : by hash
    order : of eviction, of the same hashes
    owned : which pages of the pool are the cache's, those of blocks that are forgotten but leased
        among them
    """

    def __init__(self, name: str, pool: Pool, order: Policy) -> None:
        self.name = name
        self.pool = pool
        self.order = order
        self.copies: dict[int, Copy] = {}
        self.owned = np.zeros(pool.num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        """Pages of the pool that can be had without waiting."""
        return self.pool.allocator.num_free

    def choose(self, count: int, keep: Container[int] = (), *, settled: bool = False) -> list[Copy]:
        """Return up to `count` copies that may go, in order; nothing changes.

        Parameters
        ----------
        keep : hashes that stay, beside those that are leased
        settled : pass over pages that transfers may still touch
        """
        if count <= 0:
            return []
        copies = self.copies
        evictable = (
            copy
            for copy in map(copies.__getitem__, self.order.victims())
            if not copy.pins and copy.hash not in keep and not (settled and copy.touched)
        )
        return list(islice(evictable, count))

    def add(self, copies: Iterable[Copy]) -> None:
        """Take blocks in, the one that is to go first in front."""
        for copy in copies:
            self.copies[copy.hash] = copy
            self.order.add(copy.hash)
            self.owned[copy.page] = True

    def use(self, hashes: Sequence[int], new: Mapping[int, Copy]) -> None:
        """Take `new` blocks in and mark the others as used, from the last of a prefix to its first.

        So leaves go before what they hang on. Hashes that the tier does not have are passed over.
        """
        copies, add, touch = self.copies, self.order.add, self.order.touch
        for hash in reversed(hashes):
            if hash in copies:
                touch(hash)
            elif hash in new:
                copies[hash] = copy = new[hash]
                self.owned[copy.page] = True
                add(hash)

    def forget(self, copies: Iterable[Copy]) -> None:
        """Take blocks out of index and order. Their pages stay the cache's."""
        for copy in copies:
            del self.copies[copy.hash]
            self.order.remove(copy.hash)

    def clear(self, order: Policy) -> None:
        """Forget all blocks, and take another order; pages that no lease has go back."""
        pages = [copy.page for copy in self.copies.values() if not copy.pins]
        self.copies, self.order = {}, order
        self.give_back(pages)

    def has(self, copy: Copy) -> bool:
        """Return whether this very copy is known, not another one of its block or none."""
        return self.copies.get(copy.hash) is copy

    def take(self, count: int) -> Pages:
        """Take free pages from the pool; CacheFull if another thread has been quicker."""
        pages = self.pool.allocator.alloc(count)
        self.owned[pages] = True
        return pages

    def give_back(self, pages: Any) -> None:
        """Return pages to the pool, which holds back those that a transfer touches."""
        if len(pages):
            self.owned[pages] = False
            self.pool.allocator.free(pages)


class Blocked(Exception):
    """Raised before a call has changed anything: it must wait, without the lock, and try again.

    Attributes
    ----------
    wait : what to call; None: there is nothing to wait for any more
    """

    def __init__(self, wait: Callable[[], None] | None) -> None:
        super().__init__("waits for a transfer")
        self.wait = wait


class Flight:
    """One transfer, or what a compute stream writes, and the copies that it fills.

    It is the `Completion` of these copies: of itself, and of whatever fills the pages that it
    reads. All but `synchronize`, `wait` and `wait_layer` is called under the lock of the cache.

    Attributes
    ----------
    kind : "load", "save" or "insert"
    copies : of blocks, in the tier that it fills; none once it is done
    over : whether it is known to be done or to have failed
    failure : why it has failed, where that has been noted
    num_bytes, seconds : that it took, once it is done
    """

    def __init__(
        self,
        kind: str,
        completion: Transfer | StreamCompletion,
        copies: Sequence[Copy],
        sources: Iterable[Flight | None],
    ) -> None:
        self.kind = kind
        self.copies = copies
        self.over = False
        self.failure: BaseException | None = None
        self.num_bytes = 0
        self.seconds = 0.0
        # Let go when it is over: it holds events.
        self._completion: Transfer | StreamCompletion | None = completion
        # Those that fill the pages which this one reads.
        self._sources = tuple({id(s): s for s in sources if s is not None}.values())

    def done(self) -> bool:
        """Return whether it is over, including after a failure; notes a failure."""
        completion = self._completion
        if self.over or completion is None:
            return True
        try:
            arrived = completion.done() and all([source.done() for source in self._sources])
            if (failure := completion.failure) is not None:
                raise failure
            self._raise_failure_of_sources()
            if arrived:
                if not isinstance(completion, StreamCompletion):
                    self.num_bytes = completion.num_bytes
                    self.seconds = completion.elapsed_us / 1e6
                self.over, self._completion, self._sources, self.copies = True, None, (), ()
        except CaptureError:  # whoever polls may be capturing
            return False
        except KvcupyError as error:
            self.fail(error)
        return self.over

    def fail(self, error: BaseException) -> None:
        """Note why it has failed, unless it is over."""
        if not self.over:
            self.failure, self.over, self._sources = error, True, ()

    def synchronize(self) -> None:
        """Wait until the pages are no longer touched; leaves a failure to `done`."""
        completion, sources = self._completion, self._sources
        if completion is not None:
            with suppress(DeviceError):
                completion.synchronize()
        for source in sources:
            source.synchronize()

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for all layers; DeviceError if it has failed.

        Notes nothing: who gets the error calls `fail`, under the lock.
        """
        if (completion := self._pending()) is not None:
            completion.wait(stream)
            self._raise_failure_of_sources()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let a stream wait for one layer; otherwise like `wait`."""
        if (completion := self._pending()) is not None:
            completion.wait_layer(layer, stream)
            self._raise_failure_of_sources()

    def _pending(self) -> Transfer | StreamCompletion | None:
        """Return what a stream has to wait for, if anything."""
        self._raise_known_failure()
        if self._completion is not None:
            self._raise_failure_of_sources()
        return self._completion

    def _raise_known_failure(self) -> None:
        if self.failure is not None:
            raise DeviceError(f"the blocks have not arrived: {self.failure}") from self.failure

    def _raise_failure_of_sources(self) -> None:
        """Raise DeviceError if the pages that this one reads are known not to hold their blocks."""
        for source in self._sources:
            source._raise_known_failure()
            if (completion := source._completion) is not None:
                completion.done()  # a transfer takes note of its failure, and raises it
                if (failure := completion.failure) is not None:
                    raise failure
                source._raise_failure_of_sources()


class Flights:
    """The flights that are not known to be over, oldest first in each direction."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Flight]] = {k: deque() for k in ("insert", "load", "save")}
        self._failed: deque[Flight] = deque(maxlen=16)  # that may still touch pages

    def add(self, flight: Flight) -> Flight:
        self._lanes[flight.kind].append(flight)
        return flight

    def settle(self) -> list[Flight]:
        """Return the flights that are over by now, and forget them. Costs with their number."""
        over = []
        for kind, lane in self._lanes.items():
            while lane and lane[0].done():
                over.append(lane.popleft())
            if kind == "insert" and lane:  # streams of their own: a later one may be first
                rest = [flight for flight in lane if not flight.done()]
                over += [flight for flight in lane if flight.over]
                lane.clear()
                lane.extend(rest)
        return over

    def oldest(self) -> Flight | None:
        """Return one to wait for, rather a transfer than a compute stream.

        A failed one may touch pages a little longer; it is returned once.
        """
        if self._failed:
            return self._failed.popleft()
        return next((lane[0] for lane in reversed(self._lanes.values()) if lane), None)

    def failed(self, flight: Flight) -> None:
        """Note that a flight has failed, though what it does to pages may not be over."""
        self._failed.append(flight)

    def saves(self) -> list[Flight]:
        """Return those that fill pages of the host."""
        return list(self._lanes["save"])


@dataclass
class Counts:
    """What has happened so far, in blocks, bytes and seconds; see `TieredCache.stats`."""

    device_hits: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    inserted: int = 0
    device_evicted: int = 0
    host_evicted: int = 0
    disk_evicted: int = 0
    lost: int = 0
    failed_loads: int = 0
    failed_saves: int = 0
    load_bytes: int = 0
    load_s: float = 0.0
    save_bytes: int = 0
    save_s: float = 0.0


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
    num_leased : blocks that are leased, each as often as it is

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
        self.num_leased = 0

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

    def pin(self, copies: Iterable[Copy]) -> None:
        """Keep copies for a lease."""
        for copy in copies:
            copy.pins += 1
            self.num_leased += 1

    def unpin(self, copies: Sequence[Copy]) -> None:
        """Let go of leased copies, and of the pages of those that have been forgotten meanwhile."""
        orphans = []
        for copy in copies:
            copy.pins -= 1
            self.num_leased -= 1
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
        return disk.write({copy.hash: copy.page for copy in copies}) if copies else {}

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


def stats(tiers: Tiers) -> dict[str, float]:
    """Return what `TieredCache.stats` does."""
    disk = tiers.disk
    return {
        "device_blocks": len(tiers.device.copies),
        "host_blocks": len(tiers.host.copies),
        "disk_blocks": 0 if disk is None else len(disk.slots),
        **asdict(tiers.counts),
        "disk_read_bytes": 0 if disk is None else disk.read_bytes,
        "disk_read_s": 0.0 if disk is None else disk.read_s,
        "disk_write_bytes": 0 if disk is None else disk.written_bytes,
        "disk_write_s": 0.0 if disk is None else disk.write_s,
        "disk_errors": 0 if disk is None else disk.errors,
    }


def evict(tiers: Tiers, victims: Sequence[Copy], keep: Collection[int] = ()) -> int:
    """Let blocks leave the device tier, those that no other has by way of a save.

    Parameters
    ----------
    keep : hashes that stay in the host tier and on disk

    Returns
    -------
    how many have left: fewer than there are if the host tier cannot take all at once, while it can
    pass some on to the disk. The next call waits for that
    """
    saves = tiers.alone(victims)
    if saves:
        leaving = {copy.hash for copy in victims}
        room = tiers.plan_host(len(saves), keep=keep, leaving=leaving)
        if tiers.disk is not None and 0 < room.num_pages < len(saves):
            return evict(tiers, victims[: victims.index(saves[room.num_pages])], keep)
        pages = tiers.make_host(room)
        saved = save_into(tiers, saves[len(saves) - len(pages) :], pages, None)
        tiers.host.add(saved.values())
    tiers.device.give_back(tiers.leave(victims))
    return len(victims)


def save_into(tiers: Tiers, copies: Sequence[Copy], pages: Pages, after: Any) -> dict[int, Copy]:
    """Queue a save as `Tiers.save` does; give the host pages back if that raises."""
    try:
        return tiers.save(copies, pages, after)
    except BaseException:
        tiers.host.give_back(pages)
        raise


def _pages(copies: Sequence[Copy]) -> Pages:
    return np.array([copy.page for copy in copies], np.int64)


class SharedTiers:
    """Lets one thread at a time change the tiers.

    Neither the engine nor an allocator calls back, so none of their locks is ever waited for by
    who has the other way round; and no transfer is waited for with the lock held.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.engine: TransferEngine = tiers.engine
        self.closed = False
        self._tiers = tiers
        self._lock = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[Tiers]:
        """Give the tiers as they were left, even if the cache is closed."""
        with self._lock:
            yield self._tiers

    @contextmanager
    def opened(self) -> Iterator[Tiers]:
        """Give the tiers as they are now; KvcupyError if the cache is closed."""
        with self._lock:
            if self.closed:
                raise KvcupyError("the cache is closed")
            self._tiers.settle()
            yield self._tiers

    def attempt(self, change: Callable[[Tiers], _Result]) -> _Result:
        """Change the tiers, once nothing is in the way; then start the transfers that came up.

        While something is, `change` raises Blocked before it has changed anything.
        """
        while True:
            try:
                with self.opened() as tiers:
                    result = change(tiers)
                break
            except Blocked as blocked:
                wait = blocked.wait
            if wait is not None:
                wait()
        self.engine.send()
        return result

    def clear(self, orders: Sequence[Policy]) -> None:
        """Forget all blocks and take new orders of eviction; KvcupyError if some are leased."""
        with self.opened() as tiers:
            if tiers.num_leased:
                raise KvcupyError(f"{tiers.num_leased} blocks are leased: release them first")
            tiers.device.clear(orders[0])
            tiers.host.clear(orders[1])
            if tiers.disk is not None:
                tiers.disk.clear(orders[2])

    def close(self) -> None:
        """Give all pages back but those of leases, and close the file; again is a no-op."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for tier in (self._tiers.device, self._tiers.host):
                tier.clear(policies.make("fifo"))
            if self._tiers.disk is not None:
                self._tiers.disk.close()

    def stats(self) -> dict[str, float]:
        """Return figures as they are now."""
        with self._lock:
            if not self.closed:
                self._tiers.settle()
            return stats(self._tiers)
