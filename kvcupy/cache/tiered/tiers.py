"""The tiers of a cache: which page has which block, what is in flight, and eviction.

    device page --save--> host page --write--> slot on disk --> lost
                              | put
                              v
                         shared store

A block is copied down only if no lower tier has it. An eviction is planned before anything
changes, and carried out under the same hold of the cache's lock, so a plan cannot become stale.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ... import metrics
from ...errors import CacheFull, CaptureError, DeviceError, KvcupyError
from ..engine import Transfer, TransferEngine
from ..pages import Pages, StreamCompletion
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
    pins : leases on it
    filled_by : what brings the block into the page, if that was in flight when the copy was made
    used_by : in the host tier, the last transfer that touches the page, if there was one; when it
        is over, so are those before it
    held : in the host tier, how often it is on its way to a shared store, or waited for by an
        acquire since it came from there; it is not evicted meanwhile
    stored : whether a shared store has it, or has failed to take it; None: it was not asked
    fetched : whether it came from a shared store, and was not acquired since
    """

    __slots__ = (
        "fetched", "filled_by", "hash", "held", "page", "pins", "stored", "used_by",
    )  # fmt: skip

    def __init__(self, hash: int, page: int, filled_by: BlockCompletion | None = None) -> None:
        self.hash = hash
        self.page = page
        self.pins = 0
        self.filled_by = filled_by
        self.used_by = filled_by
        self.held = 0
        self.stored: bool | None = None
        self.fetched = False

    @property
    def arriving(self) -> BlockCompletion | None:
        """What still brings the block, if anything."""
        return None if self.filled_by is None or self.filled_by.over else self.filled_by

    @property
    def touched(self) -> BlockCompletion | None:
        """A transfer that may still touch the page, if any."""
        return None if self.used_by is None or self.used_by.over else self.used_by


class PageTier:
    """The blocks in the pages of one pool.

    Attributes
    ----------
    name : "device" or "host"
    copies : by hash
    order : of eviction, of the same hashes but those that are aside
    aside : of leased blocks that an eviction has met, so that no other has to pass them: their
        places in the order, by hash
    owned : bool (num_pages,), which pages of the pool belong to the cache, including those of
        blocks that are forgotten but leased
    """

    def __init__(self, name: str, pool: Pool, order: Policy) -> None:
        self.name = name
        self.pool = pool
        self.order = order
        self.copies: dict[int, Copy] = {}
        self.aside: dict[int, Any] = {}
        self.owned = np.zeros(pool.num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        """Pages of the pool that can be allocated without waiting."""
        return self.pool.allocator.num_free

    def choose(self, count: int, keep: Container[int] = (), *, settled: bool = False) -> list[Copy]:
        """Choose up to `count` copies to evict, in order; they stay until they are forgotten.

        Hashes to `keep` stay, as leased ones do; `settled` skips pages that transfers may touch.
        """
        chosen: list[Copy] = []
        leased: list[int] = []
        for hash in self.order.victims() if count > 0 else ():
            copy = self.copies[hash]
            if copy.pins:
                leased.append(hash)
            elif copy.held:
                continue
            elif hash not in keep and not (settled and copy.touched):
                chosen.append(copy)
                if len(chosen) == count:
                    break
        if leased and (set_aside := getattr(self.order, "set_aside", None)) is not None:
            for hash in leased:
                if (place := set_aside(hash)) is not None:
                    self.aside[hash] = place
        return chosen

    def add(self, copies: Iterable[Copy]) -> None:
        """Add blocks, the first to be evicted in front."""
        for copy in copies:
            self.copies[copy.hash] = copy
            self.order.add(copy.hash)
            self.owned[copy.page] = True

    def use(self, hashes: Sequence[int], new: Mapping[int, Copy]) -> None:
        """Add `new` blocks and touch the others, from the last of a prefix to its first.

        So a block is evicted before those it extends. Hashes that the tier lacks are skipped.
        """
        copies, add, touch = self.copies, self.order.add, self.order.touch
        for hash in reversed(hashes):
            if hash in copies:
                self._put_back(hash)
                touch(hash)
            elif hash in new:
                copies[hash] = copy = new[hash]
                self.owned[copy.page] = True
                add(hash)

    def forget(self, copies: Iterable[Copy]) -> None:
        """Remove blocks from index and order. The cache keeps their pages."""
        for copy in copies:
            del self.copies[copy.hash]
            self._put_back(copy.hash)
            self.order.remove(copy.hash)

    def _put_back(self, hash: int) -> None:
        if hash in self.aside:
            self.order.put_back(hash, self.aside.pop(hash))  # type: ignore[attr-defined]

    def clear(self, order: Policy) -> None:
        """Forget all blocks, and free the pages that are neither leased nor held."""
        pages = [copy.page for copy in self.copies.values() if not copy.pins and not copy.held]
        self.copies, self.aside, self.order = {}, {}, order
        self.give_back(pages)

    def has(self, copy: Copy) -> bool:
        """Return whether the tier has this very copy, rather than another of its block or none."""
        return self.copies.get(copy.hash) is copy

    def take(self, count: int) -> Pages:
        """Allocate pages; CacheFull if another thread was first."""
        pages = self.pool.allocator.alloc(count)
        self.owned[pages] = True
        return pages

    def give_back(self, pages: Any) -> None:
        """Free pages; the pool holds back those that a transfer touches."""
        if len(pages):
            self.owned[pages] = False
            self.pool.allocator.free(pages)


class Blocked(Exception):
    """Raised before a call has changed anything: it has to `wait` unlocked, and try again."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        super().__init__("waits for a transfer")
        self.wait = wait


class BlockCompletion:
    """The `Completion` of copies that a transfer fills, or that a compute stream still writes.

    It has failed if that has, or if whatever fills the pages that the transfer reads has. All but
    `synchronize`, `wait` and `wait_layer` is called under the lock of the cache.
    """

    def __init__(
        self, kind: str, completion: Transfer | StreamCompletion, copies: Sequence[Copy],
        sources: Iterable[BlockCompletion | None],
    ) -> None:  # fmt: skip
        self.kind = kind  # "load", "save" or "insert"
        self.copies = copies  # what it fills; none once it is done
        self.over = False  # known to be done or to have failed
        self.failure: BaseException | None = None  # once it has been noted
        self.num_bytes, self.seconds = 0, 0.0  # moved, and taken for that, once it is done
        # Dropped when it is over, because it holds events.
        self._completion: Transfer | StreamCompletion | None = completion
        # Those that fill the pages which this one reads.
        self._sources = tuple({id(s): s for s in sources if s is not None}.values())

    def done(self) -> bool:
        """Return whether it is over, including after a failure, which is noted."""
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
        except CaptureError:  # the caller may be capturing
            return False
        except KvcupyError as error:
            self.fail(error)
        return self.over

    @property
    def broken(self) -> bool:
        """Whether a failure is known, of itself or of what fills the pages that it reads."""
        completions = (self, self._completion, *self._sources)
        return any(c is not None and c.failure is not None for c in completions)

    def fail(self, error: BaseException) -> None:
        """Note why it has failed, unless it is over."""
        if not self.over:
            self.failure, self.over, self._sources = error, True, ()

    def synchronize(self) -> None:
        """Wait until no page is touched any more; a failure is left to `done`."""
        completion, sources = self._completion, self._sources
        if completion is not None:
            with suppress(DeviceError):
                completion.synchronize()
        for source in sources:
            source.synchronize()

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for all layers; DeviceError if it has failed.

        The failure is not noted: the caller calls `fail`, under the lock.
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
        """Raise DeviceError if pages that are read here are known not to hold their blocks."""
        for source in self._sources:
            source._raise_known_failure()
            if (completion := source._completion) is not None:
                completion.done()  # a transfer looks for its failure, and raises it
                if (failure := completion.failure) is not None:
                    raise failure
                source._raise_failure_of_sources()


class CompletionQueue:
    """The completions that are not known to be over, oldest first for each kind."""

    def __init__(self) -> None:
        kinds = ("insert", "load", "save")
        self._queues: dict[str, deque[BlockCompletion]] = {kind: deque() for kind in kinds}
        self._failed: deque[BlockCompletion] = deque(maxlen=16)  # that may still touch pages

    def add(self, completion: BlockCompletion) -> BlockCompletion:
        self._queues[completion.kind].append(completion)
        return completion

    def settle(self) -> list[BlockCompletion]:
        """Remove and return those that are over by now, in time proportional to their number."""
        over = []
        for kind, queue in self._queues.items():
            while queue and queue[0].done():
                over.append(queue.popleft())
            if kind == "insert" and queue:  # of several streams: a later one may be over first
                pending = [completion for completion in queue if not completion.done()]
                over += [completion for completion in queue if completion.over]
                queue.clear()
                queue.extend(pending)
        return over

    def oldest(self) -> BlockCompletion | None:
        """Return one to wait for, preferably a transfer; one that has failed is returned once."""
        if self._failed:
            return self._failed.popleft()
        return next((queue[0] for queue in reversed(self._queues.values()) if queue), None)

    def add_failed(self, completion: BlockCompletion) -> None:
        self._failed.append(completion)

    def saves(self) -> list[BlockCompletion]:
        return list(self._queues["save"])


@dataclass
class Counts:
    """What has happened so far, in blocks, bytes and seconds, as `TieredCache.stats` lists."""

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
class HostEviction:
    """A plan for host pages: which are free, and which copies are evicted for the others."""

    num_free: int = 0  # pages
    victims: list[Copy] = field(default_factory=list)  # host copies to evict, for a page each
    writes: list[Copy] = field(default_factory=list)  # those of them that are written to disk
    slots: list[int] = field(default_factory=list)  # hashes evicted from the disk for that

    @property
    def num_pages(self) -> int:
        return self.num_free + len(self.victims)


class Below(Protocol):
    """What the tiers need of whatever takes blocks to a shared store, and brings them from there.

    All but `wait_for_call` is called with the lock of the cache.
    """

    def require_own_process(self) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def note_saved(self, copies: Collection[Copy]) -> None: ...
    def note_acquired(self, tiers: Tiers, hashes: Sequence[int], num_fetched: int) -> None: ...
    def wake(self) -> None: ...
    def unsent(
        self, tiers: Tiers, victims: Sequence[Copy], leaving: Collection[int]
    ) -> list[Copy]: ...
    def put_later(self, copies: Collection[Copy]) -> None: ...
    def put_first(self, tiers: Tiers, copies: Sequence[Copy]) -> Callable[[], None]: ...
    @property
    def holding(self) -> bool: ...
    def wait_for_call(self) -> None: ...


def counted(counts: Counts, disk: DiskBlocks | None, store: Below | None) -> dict[str, float]:
    """Return what is counted so far; without the tiers, whose failures refer to their callers."""
    return {
        **asdict(counts),
        "disk_read_bytes": 0 if disk is None else disk.read_bytes,
        "disk_read_s": 0.0 if disk is None else disk.read_s,
        "disk_write_bytes": 0 if disk is None else disk.written_bytes,
        "disk_write_s": 0.0 if disk is None else disk.write_s,
        "disk_errors": 0 if disk is None else disk.errors,
        **({} if store is None else store.stats()),
    }


class Tiers:
    """The tiers, what is in flight between them, and eviction.

    The caller holds the lock of the cache. Methods called `plan` change nothing.
    """

    def __init__(
        self, engine: TransferEngine, device: PageTier, host: PageTier, disk: DiskBlocks | None,
        store: Below | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.device = device
        self.host = host
        self.disk = disk
        self.store = store
        self.in_flight = CompletionQueue()
        self.counts = Counts()
        self.num_leased = 0  # each block once for every lease

    def __contains__(self, hash: int) -> bool:
        return hash in self.device.copies or hash in self.host.copies or self.on_disk(hash)

    def on_disk(self, hash: int) -> bool:
        return self.disk is not None and hash in self.disk.slots

    def only_on_device(self, copies: Iterable[Copy]) -> list[Copy]:
        """Return those device copies whose blocks no lower tier has."""
        host = self.host.copies
        return [c for c in copies if c.hash not in host and not self.on_disk(c.hash)]

    def pin(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            copy.pins += 1
            self.num_leased += 1

    def unpin(self, copies: Sequence[Copy]) -> None:
        """Unpin leased copies, and free the pages of those that were forgotten meanwhile."""
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

    def stats(self) -> dict[str, float]:
        """Return what `TieredCache.stats` does."""
        return {
            "device_blocks": len(self.device.copies),
            "host_blocks": len(self.host.copies),
            "disk_blocks": 0 if self.disk is None else len(self.disk.slots),
            **counted(self.counts, self.disk, self.store),
        }

    # --- In flight ---

    def settle(self) -> None:
        """Take note of what is over by now."""
        for completion in self.in_flight.settle():
            if completion.failure is not None:
                self.drop(completion)
            elif completion.kind == "load":
                self.counts.load_bytes += completion.num_bytes
                self.counts.load_s += completion.seconds
            elif completion.kind == "save":
                self.counts.save_bytes += completion.num_bytes
                self.counts.save_s += completion.seconds
                if self.store is not None:
                    self.store.wake()

    def drop(self, completion: BlockCompletion) -> None:
        """Forget the copies that were to be filled by what has failed.

        Leases keep their pages; the allocator holds others back while a transfer may write them.
        """
        is_save = completion.kind == "save"
        tier = self.host if is_save else self.device
        self.in_flight.add_failed(completion)
        copies, completion.copies = [copy for copy in completion.copies if tier.has(copy)], ()
        tier.forget(copies)
        tier.give_back([copy.page for copy in copies if not copy.pins and not copy.held])
        self.counts.lost += sum(copy.hash not in self for copy in copies)
        if is_save:
            self.counts.failed_saves += len(copies)
        else:
            self.counts.failed_loads += len(copies)

    def require_settled(self, tier: PageTier, num_free: int) -> None:
        """Raise Blocked if more than `num_free` pages are free, or will be after a transfer."""
        allocator = tier.pool.allocator
        if allocator.num_available > num_free:
            if allocator.num_free > num_free:
                raise Blocked
            oldest = self.in_flight.oldest()
            raise Blocked(allocator._wait_for_freed if oldest is None else oldest.synchronize)

    def require_arrived(self, copies: Iterable[Copy]) -> None:
        """Raise Blocked if pages do not have their blocks yet."""
        for copy in copies:
            if copy.arriving is not None:
                raise Blocked(copy.arriving.synchronize)

    def stream_behind(self, copies: Iterable[Copy], after: Any) -> Any:
        """Return a stream behind `after` and behind whatever still writes the pages of copies."""
        writers = {id(w): w for c in copies if (w := c.arriving) is not None and w.kind == "insert"}
        if not writers:
            return after
        device = self.engine.device
        relay = device.stream()
        relay.wait(device.as_stream(after))
        for writer in writers.values():
            with suppress(DeviceError):  # after a failure nothing writes the pages any more
                writer.wait(relay)
        return relay

    # --- Evicting from the host tier ---

    def plan_host_eviction(
        self, count: int, *, required: int = 0, keep: Collection[int] = _NOTHING,
        leaving: Collection[int] = _NOTHING, wait: bool = True,
    ) -> HostEviction:  # fmt: skip
        """Choose what to evict for `count` host pages; the plan may have fewer.

        Parameters
        ----------
        required : pages that the plan must have, or CacheFull. They come first, and no transfer
            touches them
        keep : hashes that stay in the host tier and on disk
        leaving : hashes that are about to leave the device. They are evicted from the host tier
            last, and only to the disk or for required pages
        wait : for transfers, by raising Blocked, rather than plan fewer pages
        """
        num_free = min(count, self.host.num_free)
        stay = {*keep, *leaving} if leaving else keep
        plan = HostEviction(num_free, self.host.choose(count - num_free, stay, settled=not wait))
        least = required if self.disk is None else count
        if leaving and plan.num_pages < least:
            plan.victims = self.host.choose(least - num_free, keep, settled=not wait)
        if wait:
            for copy in plan.victims[: max(0, required - num_free)]:
                if copy.touched is not None:
                    raise Blocked(copy.touched.synchronize)
            if plan.num_pages < count:
                self.require_settled(self.host, num_free)
            if plan.num_pages < required and self.store is not None and self.store.holding:
                raise Blocked(self.store.wait_for_call)
        if plan.num_pages < required:
            raise CacheFull(
                f"hashes: expected at most {plan.num_pages} blocks from disk at once, for which "
                f"the host pool has room, got {required}"
            )
        if self.store is not None:
            self._plan_puts(plan, self.store, leaving, wait=wait)
        if self.disk is not None:
            self._plan_writes(plan, self.disk, keep, leaving)
        return plan

    def _plan_puts(
        self, plan: HostEviction, store: Below, leaving: Collection[int], *, wait: bool
    ) -> None:
        """Let blocks that leave be put into the store first, or stay."""
        if not (unsent := store.unsent(self, plan.victims, leaving)):
            return
        if wait:
            self.require_arrived(unsent)
            raise Blocked(store.put_first(self, unsent))
        store.put_later(unsent)
        staying = set(map(id, unsent))
        plan.victims = [copy for copy in plan.victims if id(copy) not in staying]

    def _plan_writes(
        self, plan: HostEviction, disk: DiskBlocks, keep: Collection[int], leaving: Collection[int]
    ) -> None:
        plan.writes = [
            copy
            for copy in plan.victims
            if copy.hash not in disk.slots
            and (copy.hash not in self.device.copies or copy.hash in leaving)
        ]
        self.require_arrived(plan.writes)
        plan.slots = disk.choose(len(plan.writes) - disk.num_free, keep)
        excess = len(plan.writes) - disk.num_free - len(plan.slots)
        del plan.writes[: max(0, excess)]  # the first to be evicted are lost

    def evict_from_host(self, plan: HostEviction) -> Pages:
        """Carry out a plan; return its pages, which have no block any more."""
        pages = self.host.take(plan.num_free)
        if self.disk is not None:
            self.write(self.disk, plan.writes, plan.slots)
        self.host.forget(plan.victims)
        self.counts.host_evicted += len(plan.victims)
        self.counts.lost += sum(c.hash not in self and not c.stored for c in plan.victims)
        return np.concatenate((pages, _pages(plan.victims)))

    def write(
        self, disk: DiskBlocks, copies: Sequence[Copy], slots: Sequence[int]
    ) -> dict[int, OSError]:
        """Write host copies to disk, replacing the blocks `slots`; return what failed, by hash."""
        disk.evict(slots)
        self.counts.disk_evicted += len(slots)
        self.counts.lost += sum(hash not in self for hash in slots)
        return disk.write({copy.hash: copy.page for copy in copies}) if copies else {}

    # --- Evicting from the device tier ---

    def evict_from_device(self, victims: Sequence[Copy], keep: Collection[int] = _NOTHING) -> int:
        """Evict blocks from the device; those that no other tier has are saved first.

        Hashes to `keep` stay in the host tier and on disk. Returns how many were evicted: fewer
        than asked for if the host tier cannot take all at once, but can pass some on to the disk.
        The next call waits for that.
        """
        saves = self.only_on_device(victims)
        if saves:
            leaving = {copy.hash for copy in victims}
            plan = self.plan_host_eviction(len(saves), keep=keep, leaving=leaving)
            if self.disk is not None and 0 < plan.num_pages < len(saves):
                first = victims[: victims.index(saves[plan.num_pages])]
                return self.evict_from_device(first, keep)
            pages = self.evict_from_host(plan)
            saved = self.save_or_free(saves[len(saves) - len(pages) :], pages, None)
            self.host.add(saved.values())
        self.device.give_back(self.remove_from_device(victims))
        return len(victims)

    def save(self, copies: Sequence[Copy], pages: Pages, after: Any) -> dict[int, Copy]:
        """Queue a save of device copies; return the new host copies, which the tier lacks yet."""
        if not copies:
            return {}
        transfer = self.engine.save(_pages(copies), pages, after=self.stream_behind(copies, after))
        sources = [copy.arriving for copy in copies]
        saved = [Copy(c.hash, page) for c, page in zip(copies, pages.tolist(), strict=True)]
        completion = self.in_flight.add(BlockCompletion("save", transfer, saved, sources))
        for copy in saved:
            copy.filled_by = copy.used_by = completion
        if self.store is not None:
            self.store.note_saved(saved)
        return {copy.hash: copy for copy in saved}

    def save_or_free(self, copies: Sequence[Copy], pages: Pages, after: Any) -> dict[int, Copy]:
        """Queue a save; free the host pages if that raises."""
        try:
            return self.save(copies, pages, after)
        except BaseException:
            self.host.give_back(pages)
            raise

    def remove_from_device(self, victims: Sequence[Copy]) -> Pages:
        """Remove blocks from the device tier; return their pages, which the cache keeps."""
        self.device.forget(victims)
        self.counts.device_evicted += len(victims)
        self.counts.lost += sum(copy.hash not in self for copy in victims)
        return _pages(victims)


def _pages(copies: Sequence[Copy]) -> Pages:
    return np.array([copy.page for copy in copies], np.int64)


class SharedTiers:
    """The tiers behind a lock, so that one thread at a time changes them.

    Neither the engine nor an allocator calls back, so the lock order cannot invert; and no transfer
    is waited for with the lock held.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.engine: TransferEngine = tiers.engine
        self.closed = False
        self._tiers = tiers
        self._lock = threading.Lock()

    def stats(self) -> dict[str, float]:
        """Return what `TieredCache.stats` does, without the lock and as last noted."""
        return self._tiers.stats()

    @contextmanager
    def locked(self) -> Iterator[Tiers]:
        """Hold the lock; the tiers are as they were left, and may be closed."""
        self._require_own_process()
        with self._lock:
            yield self._tiers

    @contextmanager
    def opened(self) -> Iterator[Tiers]:
        """Hold the lock; the tiers are up to date. KvcupyError if the cache is closed."""
        self._require_own_process()
        with self._lock:
            if self.closed:
                raise KvcupyError("the cache is closed")
            self._tiers.settle()
            yield self._tiers

    def _require_own_process(self) -> None:
        """Raise KvcupyError in a forked child, where another thread may hold the lock for ever."""
        if self._tiers.store is not None:
            self._tiers.store.require_own_process()

    def attempt(self, change: Callable[[Tiers], _Result]) -> _Result:
        """Call `change` until it is not Blocked, then send out the transfers that it has queued."""
        while True:
            try:
                with self.opened() as tiers:
                    result = change(tiers)
                break
            except Blocked as blocked:
                wait = blocked.wait
            if wait is not None:
                with metrics.timed("kvcupy_host_wait_seconds", waiter="blocks"):
                    wait()
        self.engine._send()
        return result
