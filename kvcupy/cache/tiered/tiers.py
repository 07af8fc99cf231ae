"""The tiers of a cache: blocks and their pages, transfers in flight, and eviction.

    device page --save--> host page --put--> stores

A block is copied down only if no lower tier has it, and leaves a tier only when its copy below is
finished. An eviction is planned before anything changes, and carried out while the cache's lock is
still held, so a plan cannot become stale. A plan that has to wait raises `Blocked`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ... import metrics
from ...errors import CacheFull, CaptureError, DeviceError, KvcupyError, device_failure
from ..engine import Transfer, TransferEngine
from ..hazards import StreamCompletion
from ..pages import Pages
from .changes import Described, Listener, Removed, Replaced, Stored, announce
from .order import EvictionOrder, Retentions
from .parts import MASK, PartedDict, untracked

if TYPE_CHECKING:
    from ..pool import Pool

_NO_HASHES: frozenset[int] = frozenset()
_MAX_STAYING = 4096  # that a choice of victims passes: those will be put, and can go later
PATIENCE_S = 5.0  # for writes to stores, by calls that need room
_Result = TypeVar("_Result")


class Copy(NamedTuple):
    """A block in a page of a pool; no other block is in the page while it is leased or held."""

    hash: int
    page: int


# Copy(*item) in less time: an insert makes thousands.
copy_of: Callable[[tuple[int, int]], Copy] = partial(tuple.__new__, Copy)


class PageTier:
    """The blocks in the pages of one pool.

    There may be millions, so a block at rest has only an entry in `pages`, `hashes` and `order`, of
    ints, which garbage collections do not visit. The other dicts and sets have the pages that
    differ.

    Attributes
    ----------
    name : "device" or "host"
    pages : by hash
    hashes : of the blocks, by page; undefined for a page without a block
    pins : number of leases, by leased page
    held : in the host tier, by page, number of puts, HeldBlocks, and acquires that wait for a
        prefix with this fetched block; a held block is not evicted
    filled_by : by page, the completion that writes the block to it, until it is settled
    used_by : in the host tier, by page, the last transfer that accesses it, until it is settled;
        earlier transfers end before it
    unwritten : in the host tier, by page, the stores to which the block is still to be put, as bits
    refused : in the host tier, by page, the stores that answered "full" or "failed", as bits
    stored : pages of the host tier whose blocks some store has; pages of the device whose blocks
        were evicted from host memory after all stores had them
    fetched : pages whose blocks came from a store and were not acquired since
    order : eviction order of these pages, without leased ones that an eviction met and removed, so
        that later evictions need not skip them; they return with their release
    owned : bool (num_pages,), whether each page of the pool belongs to the cache, including pages
        of forgotten blocks that are still leased
    listeners : called with blocks that enter and leave; the other tiers have the same list
    """

    def __init__(self, name: str, pool: Pool, priorities: Mapping[int, int]) -> None:
        self.name = name
        self.pool = pool
        self.pins: dict[int, int] = untracked({})
        self.held: dict[int, int] = {}
        self.owned = np.zeros(pool.num_pages, np.bool_)
        self.listeners: list[Listener] = []
        self._priorities = priorities
        self._forget_all()

    def _forget_all(self) -> None:
        self.pages = PartedDict()
        self.hashes: list[int] = untracked([0] * self.pool.num_pages)
        self.order = EvictionOrder(self.hashes, self.pages, self._priorities)
        self.filled_by: dict[int, BlockCompletion] = {}
        self.used_by: dict[int, BlockCompletion] = {}
        self.unwritten: dict[int, int] = untracked({})
        self.refused: dict[int, int] = untracked({})
        self.stored: set[int] = untracked(set())
        self.fetched: set[int] = untracked(set())

    @property
    def num_free(self) -> int:
        """Pages of the pool that can be allocated without waiting."""
        return self.pool.allocator.num_free

    def choose(
        self, count: int, keep: Container[int] = (), *,
        settled: bool = False, stays: Callable[[int, int], bool] | None = None,
    ) -> list[Copy]:  # fmt: skip
        """Choose up to `count` copies to evict, in order; they stay until they are forgotten.

        Skips leased and held copies, the hashes in `keep`, and copies of which `stays(hash, page)`
        is true; `settled` also skips pages that transfers may access.
        """
        hashes, pins, held, used = self.hashes, self.pins, self.held, self.used_by
        chosen: list[Copy] = []
        leased: list[int] = []
        num_staying = 0
        for page in self.order if count > 0 else ():
            hash = hashes[page]
            if page in pins:
                leased.append(page)
            elif page in held or hash in keep or (settled and page in used and self.touched(page)):
                continue
            elif stays is not None and stays(hash, page):
                num_staying += 1
                if num_staying == _MAX_STAYING:
                    break
            else:
                chosen.append(copy_of((hash, page)))
                if len(chosen) == count:
                    break
        self.order.remove(leased)
        return chosen

    def add(self, new: Mapping[int, int]) -> None:
        """Add blocks, pages by hash; the first one is evicted first."""
        parts = self.pages.parts
        for hash, page in new.items():
            self.hashes[page] = hash
            parts[hash & MASK][hash] = page
            self.owned[page] = True
        self.order.touch(new.values())
        if self.listeners and new:
            announce(self.listeners, Stored(self.name, list(new)))

    def use(self, hashes: Sequence[int], new: Mapping[int, int]) -> None:
        """Add `new` blocks, pages by hash, and touch the others, the last of a prefix first.

        A block is therefore evicted before the blocks that it extends. Unknown hashes are skipped.
        """
        parts = self.pages.parts
        if new and self.listeners:
            entering = [h for h in dict.fromkeys(hashes) if h in new and h not in self.pages]
            if entering:
                announce(self.listeners, Stored(self.name, entering))
        for hash in hashes if new else ():
            if hash in new and hash not in (pages := parts[hash & MASK]):
                page = new[hash]
                self.hashes[page] = hash
                pages[hash] = page
                self.owned[page] = True
        self.touch(hashes)

    def touch(self, hashes: Sequence[int]) -> None:
        """Note uses of blocks, the last of a prefix first. Unknown hashes are skipped."""
        parts = self.pages.parts
        self.order.touch([
            page for hash in reversed(hashes)
            if (page := parts[hash & MASK].get(hash)) is not None
        ])  # fmt: skip

    def forget(self, copies: Sequence[Copy]) -> None:
        """Remove blocks from index and order. The cache keeps their pages."""
        pages, parts = [copy.page for copy in copies], self.pages.parts
        self.order.remove(pages)
        for hash, _ in copies:
            del parts[hash & MASK][hash]
        by_page: tuple[dict[int, Any], ...] = (
            self.filled_by, self.used_by, self.unwritten, self.refused
        )  # fmt: skip
        for known in by_page:
            if known:
                for page in pages:
                    known.pop(page, None)
        self.stored.difference_update(pages)
        self.fetched.difference_update(pages)
        if self.listeners and copies:
            announce(self.listeners, Removed(self.name, [hash for hash, _ in copies]))

    def clear(self) -> None:
        """Remove all blocks, and free the pages that are neither leased nor held."""
        pages = self.pages.values()
        self._forget_all()
        self.free_unless_in_use(pages)

    def has(self, copy: Copy) -> bool:
        """Return whether the tier has this copy; False for another copy of the same block."""
        return self.pages.get(copy.hash) == copy.page

    def find(self, hash: int) -> Copy | None:
        page = self.pages.get(hash)
        return None if page is None else Copy(hash, page)

    def arriving(self, page: int) -> BlockCompletion | None:
        """Return the completion that still writes the block of a page, or None."""
        return None if (last := self.filled_by.get(page)) is None or last.over else last

    def touched(self, page: int) -> BlockCompletion | None:
        """Return a transfer that may still access a page, or None."""
        return None if (last := self.used_by.get(page)) is None or last.over else last

    def hold(self, copy: Copy) -> None:
        self.held[copy.page] = self.held.get(copy.page, 0) + 1

    def release(self, copy: Copy) -> None:
        """Release one hold on a copy; free its page if it was forgotten meanwhile."""
        if self.held[copy.page] > 1:
            self.held[copy.page] -= 1
        else:
            del self.held[copy.page]
            if not self.has(copy):
                self.give_back([copy.page])

    def take(self, count: int) -> Pages:
        """Allocate pages; CacheFull if another user of the pool took them first."""
        pages = self.pool.allocator.alloc(count)
        self.owned[pages] = True
        return pages

    def free_unless_in_use(self, pages: Iterable[int]) -> None:
        """Free those pages of forgotten blocks that are neither leased nor held."""
        self.give_back([page for page in pages if page not in self.pins and page not in self.held])

    def give_back(self, pages: Any) -> None:
        """Free pages; the pool holds back pages that a transfer accesses."""
        if len(pages):
            self.owned[pages] = False
            self.pool.allocator.free(pages)


class Blocked(Exception):
    """Raised before a call changes anything: the caller must wait without the lock, and retry.

    Parameters
    ----------
    wait : a function to call, or None
    wait_for_store : in place of `wait`: called with the seconds that the caller can wait
    """

    def __init__(
        self, wait: Callable[[], object] | None = None, *,
        wait_for_store: Callable[[float], object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__("waits for a transfer")
        self.wait, self.wait_for_store = wait, wait_for_store


class BlockCompletion:
    """The `Completion` of copies that a transfer fills, or that a compute stream still writes.

    It fails if the transfer fails, or the completion of a page that the transfer reads. Methods
    require the lock of the cache, except `synchronize`, `wait` and `wait_layer`.
    """

    def __init__(
        self, kind: str, completion: Transfer | StreamCompletion, copies: Sequence[Copy],
        sources: Iterable[BlockCompletion | None], host_pages: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.kind = kind  # "load", "save" or "insert"
        self.copies = copies  # destination copies
        self.host_pages = host_pages  # that a transfer accesses
        self.over = False  # known to be done or to have failed
        self.failure: BaseException | None = None
        self.num_bytes, self.seconds = 0, 0.0  # bytes moved and duration, once done
        # Dropped at the end, because it holds events.
        self._completion: Transfer | StreamCompletion | None = completion
        # Completions of the pages that this one reads.
        self._sources = tuple({id(s): s for s in sources if s is not None}.values())

    def done(self) -> bool:
        """Return whether it has ended, including after a failure, which is recorded."""
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
                self.over, self._completion, self._sources = True, None, ()
        except CaptureError:  # the caller may be capturing
            return False
        except KvcupyError as error:
            self.fail(error)
        return self.over

    @property
    def broken(self) -> bool:
        """Whether a failure is known, of this completion or of one that fills its sources."""
        completions = (self, self._completion, *self._sources)
        return any(c is not None and c.failure is not None for c in completions)

    def fail(self, error: BaseException) -> None:
        """Record a failure, unless the completion has ended."""
        if not self.over:
            self.failure, self.over, self._sources = error, True, ()

    def synchronize(self) -> None:
        """Wait until no page is accessed; `done` records failures."""
        completion, sources = self._completion, self._sources
        if completion is not None:
            with suppress(DeviceError):
                completion.synchronize()
        for source in sources:
            source.synchronize()

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for all layers; DeviceError after a failure.

        Does not record the failure: the caller calls `fail`, under the lock.
        """
        if (completion := self._pending()) is not None:
            completion.wait(stream)
            self._raise_failure_of_sources()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make a stream wait for one layer; otherwise like `wait`."""
        if (completion := self._pending()) is not None:
            completion.wait_layer(layer, stream)
            self._raise_failure_of_sources()

    def _pending(self) -> Transfer | StreamCompletion | None:
        """Return the completion that a stream has to wait for, or None."""
        self._raise_known_failure()
        completion = self._completion  # another thread may note meanwhile that it is over
        if completion is not None:
            self._raise_failure_of_sources()
        return completion

    def _raise_known_failure(self) -> None:
        if self.failure is not None:
            raise device_failure(f"the blocks have not arrived: {self.failure}", self.failure)

    def _raise_failure_of_sources(self) -> None:
        """Raise DeviceError if source pages are known not to hold their blocks."""
        for source in self._sources:
            source._raise_known_failure()
            if (completion := source._completion) is not None:
                completion.done()  # a transfer checks for a failure, and raises it
                if (failure := completion.failure) is not None:
                    raise failure
                source._raise_failure_of_sources()


class CompletionQueue:
    """Pending completions, oldest first for each kind."""

    def __init__(self) -> None:
        kinds = ("insert", "load", "save")
        self._queues: dict[str, deque[BlockCompletion]] = {kind: deque() for kind in kinds}
        self._failed: deque[BlockCompletion] = deque(maxlen=16)  # may still access pages

    def add(self, completion: BlockCompletion) -> BlockCompletion:
        self._queues[completion.kind].append(completion)
        return completion

    def settle(self) -> list[BlockCompletion]:
        """Remove and return completions that have ended, in time proportional to their number."""
        over = []
        for kind, queue in self._queues.items():
            while queue and queue[0].done():
                over.append(queue.popleft())
            if kind == "insert" and queue:  # streams are independent: a later one may end first
                pending = [completion for completion in queue if not completion.done()]
                over += [completion for completion in queue if completion.over]
                queue.clear()
                queue.extend(pending)
        return over

    def oldest(self) -> BlockCompletion | None:
        """Return a completion to wait for, preferably a transfer; a failed one is returned once."""
        if self._failed:
            return self._failed.popleft()
        return next((queue[0] for queue in reversed(self._queues.values()) if queue), None)

    def add_failed(self, completion: BlockCompletion) -> None:
        self._failed.append(completion)

    def saves(self) -> list[BlockCompletion]:
        return list(self._queues["save"])


@dataclass
class Counts:
    """Cumulative counts in blocks, bytes and seconds, as listed by `TieredCache.stats`."""

    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    inserted: int = 0
    device_evicted: int = 0
    host_evicted: int = 0
    lost: int = 0
    failed_loads: int = 0
    failed_saves: int = 0
    load_bytes: int = 0
    load_s: float = 0.0
    save_bytes: int = 0
    save_s: float = 0.0


@dataclass
class HostEviction:
    """A plan for host pages: free pages, and host copies to evict."""

    num_free: int = 0  # free pages to take
    victims: list[Copy] = field(default_factory=list)  # host copies to evict, one page each
    can_grow: bool = False  # whether pages are missing that puts and transfers will free

    @property
    def num_pages(self) -> int:
        return self.num_free + len(self.victims)


class StoreTierProtocol(Protocol):
    """Interface of the tiers to the stores below them, implemented by `StoreTier`.

    All methods require the lock of the cache.
    """

    counts: Any
    blocks_per_call: int

    @property
    def usable_bits(self) -> int: ...
    @property
    def holding(self) -> bool: ...
    def next_move(self) -> Callable[[float], object]: ...
    def note_saved(self, tiers: Tiers, copies: Sequence[Copy]) -> None: ...
    def put_first(self, tiers: Tiers, hashes: Sequence[int]) -> None: ...
    def raise_order_error(self) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def wake(self) -> None: ...


def counted(counts: Counts, store: StoreTierProtocol | None) -> dict[str, float]:
    """Collect counts, without a reference to the tiers, whose failures refer to their callers."""
    return {**asdict(counts), **({} if store is None else store.stats())}


class Tiers:
    """The tiers, transfers in flight between them, and eviction.

    The caller holds the lock of the cache. Methods named `plan_*` change nothing.
    """

    def __init__(
        self, engine: TransferEngine, device: PageTier, host: PageTier,
        store: StoreTierProtocol | None, retentions: Retentions,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.device = device
        self.host = host
        self.store = store
        self.in_flight = CompletionQueue()
        self.counts = Counts()
        self.num_leased = 0  # counts each block once per lease
        self.can_wait = True  # whether the running call has time to wait for stores
        self._retentions = retentions
        # Weak, because the listeners would keep all pools alive until Python looks for cycles.
        self._note_retained = partial(retentions.note, weakref.ref(self))
        self.listeners = device.listeners
        host.listeners = device.listeners

    def __contains__(self, hash: Any) -> bool:
        part = hash & MASK
        return hash in self.device.pages.parts[part] or hash in self.host.pages.parts[part]

    def follow(self, listener: Listener) -> None:
        """Announce all blocks and, from now on, every change, to a listener."""
        if listener not in self.listeners:
            self.listeners.append(listener)
        listener(Replaced({tier.name: list(tier.pages) for tier in (self.device, self.host)}))

    def describe(self, blocks: Described, hashes: Iterable[int]) -> None:
        """Announce what precedes the blocks with `hashes`, which are among `blocks`."""
        if self.listeners:
            announce(self.listeners, blocks.of(hashes))

    def announce_clear(self) -> None:
        """Announce that all blocks are gone."""
        if self.listeners:
            announce(self.listeners, Replaced())

    def only_on_device(self, copies: Iterable[Copy]) -> list[Copy]:
        """Return the device copies whose blocks no lower tier is known to have whole."""
        parts, stored = self.host.pages.parts, self.device.stored
        return [c for c in copies if c.hash not in parts[c.hash & MASK] and c.page not in stored]

    def pin(self, pages: Sequence[int]) -> None:
        pins = self.device.pins
        for page in pages:
            pins[page] = pins.get(page, 0) + 1
        self.num_leased += len(pages)

    def unpin(self, hashes: Sequence[int], pages: Sequence[int]) -> None:
        """Unpin leased blocks, and free the pages of blocks that were forgotten meanwhile."""
        pins, parts = self.device.pins, self.device.pages.parts
        orphans, there = [], []
        for hash, page in zip(hashes, pages, strict=True):
            known = parts[hash & MASK].get(hash)
            if known is not None:
                there.append(known)
            if pins[page] > 1:
                pins[page] -= 1
            else:
                del pins[page]
                if known != page:
                    orphans.append(page)
        self.num_leased -= len(pages)
        self.device.give_back(orphans)
        self.device.order.touch(reversed(there))
        self.host.use(hashes, {})

    def stats(self) -> dict[str, float]:
        """Return the statistics of `TieredCache.stats`."""
        return {
            "device_blocks": len(self.device.pages),
            "host_blocks": len(self.host.pages),
            **counted(self.counts, self.store),
        }

    # --- Retention ---

    def retain(self, hashes: Sequence[int], priority: int, expires_at: float) -> None:
        """Retain the known blocks of a prefix."""
        if self._note_retained not in self.listeners:
            self.listeners.append(self._note_retained)
        known = [hash for hash in hashes if hash in self]
        self._retentions.put(known, priority, expires_at)
        self._reorder(known)

    def release(self, hashes: Sequence[int]) -> None:
        """End the retention of blocks."""
        retained = [hash for hash in hashes if hash in self._retentions.priorities]
        for hash in retained:
            self._retentions.drop(hash)
        self._reorder(retained)

    def _reorder(self, hashes: Sequence[int]) -> None:
        """Give blocks their new places in the eviction orders."""
        self.device.use(hashes, {})
        self.host.use(hashes, {})

    # --- In flight ---

    def settle(self) -> None:
        """Process completions that have ended, and retentions that are over."""
        if self._retentions.priorities and (over := self._retentions.expire(time.monotonic())):
            self._reorder(over)
        for completion in self.in_flight.settle():
            if metrics.enabled and completion.failure is None and completion.kind != "insert":
                metrics.note(
                    "kvcupy_cache_transfer_seconds", completion.seconds, move=completion.kind
                )
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
            self._end(completion)

    def _end(self, completion: BlockCompletion) -> None:
        """Forget which pages a completion has accessed."""
        filled = (self.host if completion.kind == "save" else self.device).filled_by
        used = self.host.used_by
        for copy in completion.copies:
            if filled.get(copy.page) is completion:
                del filled[copy.page]
        for page in completion.host_pages:
            if used.get(page) is completion:
                del used[page]
        completion.copies = completion.host_pages = ()

    def drop(self, completion: BlockCompletion) -> None:
        """Forget the destination copies of a failed completion.

        Leases keep their pages; the allocator holds back the others while a transfer may write
        them.
        """
        is_save = completion.kind == "save"
        tier = self.host if is_save else self.device
        self.in_flight.add_failed(completion)
        filled = tier.filled_by
        copies = [c for c in completion.copies if tier.has(c) and filled.get(c.page) is completion]
        tier.forget(copies)
        tier.free_unless_in_use(copy.page for copy in copies)
        self.counts.lost += sum(copy.hash not in self for copy in copies)
        if is_save:
            self.counts.failed_saves += len(copies)
        else:
            self.counts.failed_loads += len(copies)

    def require_settled(self, tier: PageTier, num_free: int) -> None:
        """Raise Blocked if more than `num_free` pages are free now or after pending transfers."""
        allocator = tier.pool.allocator
        if allocator.num_available > num_free:
            if allocator.num_free > num_free:
                raise Blocked
            oldest = self.in_flight.oldest()
            raise Blocked(allocator._wait_for_freed if oldest is None else oldest.synchronize)

    def stream_behind(self, copies: Iterable[Copy], after: Any) -> Any:
        """Return a stream behind `after` and streams that still write these device copies."""
        arriving = [self.device.arriving(copy.page) for copy in copies]
        writers = {id(w): w for w in arriving if w is not None and w.kind == "insert"}
        if not writers:
            return after
        device = self.engine.device
        relay = device.stream()
        relay.wait(device.as_stream(after))
        for writer in writers.values():
            with suppress(DeviceError):  # a failed writer no longer writes
                writer.wait(relay)
        return relay

    # --- Evicting from the host tier ---

    def plan_host_eviction(
        self, count: int, *, keep: Collection[int] = _NO_HASHES,
        leaving: Collection[int] = _NO_HASHES, wait: bool = False, lossless: bool = False,
    ) -> HostEviction:  # fmt: skip
        """Choose copies to evict for `count` host pages; the plan may have fewer pages.

        Blocks that are still to be put into a store stay, and are put. For calls that wait, those
        that stay on the device can go without, if nothing else can.

        Parameters
        ----------
        keep : hashes that stay in the host tier
        leaving : hashes that are about to leave the device. They are evicted from the host tier
            last, and only if a store has them
        wait : raise Blocked to wait for transfers and, as long as the call has time, for stores,
            instead of planning fewer pages
        lossless : do not evict blocks that stores have refused
        """
        host, store = self.host, self.store
        num_free = min(count, host.num_free)
        stay: Container[int] = {*keep, *leaving} if leaving else keep
        if store is None:
            plan = HostEviction(num_free, host.choose(count - num_free, stay, settled=not wait))
            if wait and plan.num_pages < count:
                self.require_settled(host, num_free)
            return plan
        unwritten: list[int] = []
        bits, on_device = store.usable_bits, self.device.pages.parts

        def stays(hash: int, page: int) -> bool:
            if host.unwritten.get(page, 0) & bits:
                unwritten.append(hash)
                return True
            return page not in host.stored and (lossless or hash in leaving)

        def is_only_here(hash: int, page: int) -> bool:
            return hash not in on_device[hash & MASK]

        plan = HostEviction(
            num_free, host.choose(count - num_free, stay, settled=not wait, stays=stays)
        )
        chosen = {*keep, *(copy.hash for copy in plan.victims)}
        for allowed, stays_there in ((bool(leaving), stays), (wait, is_only_here)):
            if allowed and plan.num_pages < count:
                some = host.choose(
                    count - plan.num_pages, chosen, settled=not wait, stays=stays_there
                )
                chosen.update(copy.hash for copy in some)
                plan.victims += some
            chosen.update(leaving)
        if unwritten:
            store.put_first(self, unwritten[: max(count, store.blocks_per_call)])
        if plan.num_pages < count:
            plan.can_grow = bool(unwritten) or store.holding or (not wait and bool(host.used_by))
            if wait:
                self.require_settled(host, num_free)
                if plan.can_grow and self.can_wait:
                    raise Blocked(wait_for_store=store.next_move())
        return plan

    def evict_from_host(self, plan: HostEviction) -> Pages:
        """Carry out a plan; return its pages, which are now empty."""
        host, device = self.host, self.device
        pages = host.take(plan.num_free)
        num_lost = 0
        for hash, page in plan.victims:
            on_device = device.pages.get(hash)
            if page not in host.stored:
                num_lost += on_device is None
            elif on_device is not None and page not in host.unwritten and page not in host.refused:
                device.stored.add(on_device)
        host.forget(plan.victims)
        self.counts.host_evicted += len(plan.victims)
        self.counts.lost += num_lost
        return np.concatenate((pages, _pages(plan.victims)))

    def require_untouched(self, plan: HostEviction) -> None:
        """Raise Blocked if a transfer accesses pages of a plan."""
        for copy in plan.victims:
            if (touched := self.host.touched(copy.page)) is not None:
                raise Blocked(touched.synchronize)

    def discard(self, hashes: Sequence[int]) -> None:
        """Forget blocks in both tiers, except where they are leased or held."""
        for tier in (self.device, self.host):
            copies = [copy for hash in hashes if (copy := tier.find(hash)) is not None]
            copies = [c for c in copies if c.page not in tier.pins and c.page not in tier.held]
            tier.forget(copies)
            tier.give_back([copy.page for copy in copies])

    # --- Evicting from the device tier ---

    def evict_from_device(self, victims: Sequence[Copy], keep: Collection[int] = _NO_HASHES) -> int:
        """Evict blocks from the device; save blocks first that no lower tier has.

        The hashes in `keep` stay in the host tier. Returns the number of evicted blocks: fewer than
        requested if the host tier cannot take all of them at once, but can put some into the
        stores. CacheFull if these puts take too long.
        """
        saves = self.only_on_device(victims)
        if saves:
            leaving = {copy.hash for copy in victims}
            plan = self.plan_host_eviction(len(saves), keep=keep, leaving=leaving, wait=True)
            if self.store is not None and plan.num_pages < len(saves):
                first = victims[: victims.index(saves[plan.num_pages])]
                if first:
                    return self.evict_from_device(first, keep)
                if plan.can_grow:
                    raise CacheFull(
                        "expected room in host memory, got blocks that are not written to the "
                        "stores yet",
                        "num_blocks",
                    )
            pages = self.evict_from_host(plan)
            saved = self.save_or_free(saves[len(saves) - len(pages) :], pages, None)
            self.host.add(saved)
        self.device.give_back(self.remove_from_device(victims))
        return len(victims)

    def save(self, copies: Sequence[Copy], pages: Pages, after: Any) -> dict[int, int]:
        """Queue a save of device copies; return the host pages by hash, not yet in the tier."""
        if not copies:
            return {}
        transfer = self.engine.save(_pages(copies), pages, after=self.stream_behind(copies, after))
        sources = [self.device.arriving(copy.page) for copy in copies]
        targets = pages.tolist()
        hashes = [copy.hash for copy in copies]
        saved = list(map(copy_of, zip(hashes, targets, strict=True)))
        completion = BlockCompletion("save", transfer, saved, sources, targets)
        self.in_flight.add(completion)
        self.host.filled_by.update(dict.fromkeys(targets, completion))
        self.host.used_by.update(dict.fromkeys(targets, completion))
        if self.store is not None:
            self.store.note_saved(self, saved)
        return dict(saved)

    def save_or_free(self, copies: Sequence[Copy], pages: Pages, after: Any) -> dict[int, int]:
        """Queue a save; free the host pages on an exception."""
        try:
            return self.save(copies, pages, after)
        except BaseException:
            self.host.give_back(pages)
            raise

    def remove_from_device(self, victims: Sequence[Copy]) -> Pages:
        """Remove blocks from the device tier; return their pages, which the cache keeps."""
        stored = self.device.stored.intersection([copy.page for copy in victims])
        self.device.forget(victims)
        self.counts.device_evicted += len(victims)
        self.counts.lost += sum(
            copy.page not in stored and copy.hash not in self for copy in victims
        )
        return _pages(victims)


def _pages(copies: Sequence[Copy]) -> Pages:
    return np.array([copy.page for copy in copies], np.int64)


class SharedTiers:
    """The tiers behind a lock, so that one thread at a time changes them.

    Neither the engine nor an allocator calls back, so the lock order cannot invert. No thread waits
    for a transfer while it holds the lock.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.engine: TransferEngine = tiers.engine
        self.closed = False
        self.tiers = tiers
        self._lock = threading.Lock()

    def stats(self) -> dict[str, float]:
        """Return the statistics of `TieredCache.stats`, without the lock and possibly stale."""
        return self.tiers.stats()

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The lock, for `with`: a context manager in Python could keep it after an interrupt."""
        return self._lock

    def opened(self) -> Tiers:
        """Settle the tiers, and return them. KvcupyError if the cache is closed.

        An OrderError of the store's thread is raised, once. The caller holds the lock.
        """
        if self.closed:
            raise KvcupyError("TieredCache: the cache is closed")
        if self.tiers.store is not None:
            self.tiers.store.raise_order_error()
        self.tiers.settle()
        return self.tiers

    def attempt(
        self, change: Callable[[Tiers], _Result], *,
        opened: bool = True, send: bool = True, patience_s: float = PATIENCE_S,
    ) -> _Result:  # fmt: skip
        """Call `change` until it is not Blocked, then send the transfers that it queued.

        KvcupyError if the cache is closed, unless `opened` is False. Waits for stores at most
        `patience_s` in all.
        """
        ends: float | None = None  # of the time to wait for stores, once a wait has begun
        while True:
            try:
                with self.lock:
                    tiers = self.opened() if opened else self.tiers
                    tiers.can_wait = patience_s > 0 and (ends is None or time.monotonic() < ends)
                    result = change(tiers)
                break
            except Blocked as blocked:  # kept no longer: its traceback refers to the caller
                wait, wait_for_store = blocked.wait, blocked.wait_for_store
            if wait is None and wait_for_store is None:
                continue
            with metrics.timed("kvcupy_host_wait_seconds", waiter="blocks"):
                if wait_for_store is not None:
                    ends = ends or time.monotonic() + patience_s
                    wait_for_store(max(0.0, ends - time.monotonic()))
                elif wait is not None:
                    wait()
        if send:
            self.engine._send()
        return result
