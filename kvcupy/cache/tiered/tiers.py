"""The tiers of a group of layers: blocks and their pages, transfers in flight, and eviction.

    caller --insert--> device page --save--> host page --put--> stores
                       device page <--load-- host page <--get-- stores

A block is in one tier or several, in a page of each. `PageTier` has its states there: arriving
(`filled_by`), at rest, leased or held, and, in host memory, still to be put into stores
(`unwritten`) or stored. Only `GroupTiers` and the thread of the stores move blocks. A block is
copied down only if no lower tier has it, and leaves a tier only when its copy below is finished.

A page is freed in one place, `PageTier.give_back`: by `evict_from_device` or `discard`, at the
release of a lease or a hold if its block was forgotten meanwhile, or after a failure (`drop`).

An eviction is planned before anything changes, and carried out while the lock is still held, so a
plan cannot become stale. A step that cannot be planned yet returns a `Wait`; `GroupTiers.run` waits
without the lock, and runs the step again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ... import metrics
from ...errors import ORDERLY_ERRORS, CacheFull, DeviceError, InterruptGuard, KvcupyError
from ...formats import Write
from ..engine import TransferEngine
from ..hazards import StreamCompletion
from ..identity import identity_of
from ..pages import Pages
from .changes import Described, Listener, Replaced, announce
from .in_flight import Arrivals, BlockCompletion, CompletionQueue
from .order import Retentions
from .page_tier import PageTier
from .store_tier import PATIENCE_S, StoreTier, open_stores

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from .prefixes import TierGroup

_NO_HASHES: frozenset[int] = frozenset()
_Result = TypeVar("_Result")


class Wait(NamedTuple):
    """What a step waits for without the lock: a transfer, a store for some seconds, or nothing."""

    transfer: Callable[[], object] | None = None
    store: Callable[[float], object] | None = None


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
    """A plan for host pages: free pages, and pages whose blocks are evicted."""

    num_free: int = 0
    victims: list[int] = field(default_factory=list)
    can_grow: bool = False  # puts and transfers will free more
    wait: Wait | None = None  # in place of a plan

    @property
    def num_pages(self) -> int:
        return self.num_free + len(self.victims)


def _counted(counts: Counts, store: StoreTier | None) -> dict[str, float]:
    """Collect counts, without a reference to the tiers, whose failures refer to their callers."""
    return {**asdict(counts), **({} if store is None else store.stats())}


def _final_samples(counts: Counts, store: StoreTier | None) -> Iterable[tuple[str, Any, float]]:
    return metrics.cache_samples(_counted(counts, store))


class GroupTiers:
    """The tiers of a group of layers, transfers in flight between them, and eviction.

    One thread at a time uses them, with `lock`; neither the engine nor an allocator calls back, so
    the lock order cannot invert. No thread waits for a transfer or a store while it holds the lock.
    Methods require it, except `run`. Methods named `plan_*` change nothing.

    Attributes
    ----------
    group : its layers, and its pool on the device
    engine : between the pools
    device, host : the tiers of pages; `store` has the ones below, or is None
    through : whether inserted blocks are copied to the host tier at once
    listeners : called with changes of the blocks
    """

    def __init__(
        self, group: TierGroup, engine: TransferEngine, *,
        stores: Any, write: Write, model: str, heads: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        self.group, self.engine = group, engine
        host_pool = engine.host_pool
        identity = identity_of(host_pool, model, heads)
        states = open_stores(stores, host_pool, model, heads, identity)
        self.through = write == "through"
        self.store: StoreTier | None = None
        if states:
            self.store = StoreTier(states, host_pool, write_through=self.through)
        self._retentions = Retentions()
        self.device = PageTier("device", group.pool, self._retentions.priorities)
        self.host = PageTier("host", host_pool, self._retentions.priorities)
        self.host.listeners = self.listeners = self.device.listeners
        self.in_flight = CompletionQueue()
        self.counts = Counts()
        self.num_leased = 0  # counts each block once per lease
        self.closed = False
        self._has_time = True  # whether the running call has time to wait for stores
        # Weak, because the listeners would keep all pools alive until Python looks for cycles.
        self._note_retained = partial(self._retentions.note, weakref.ref(self))
        self.lock = threading.Lock()
        self.guard = InterruptGuard("TieredCache")
        metrics.follow(
            self, lambda tiers: metrics.cache_samples(tiers.stats()),
            partial(_final_samples, self.counts, self.store),
        )  # fmt: skip

    # --- The lock, and waiting without it ---

    def require_open(self) -> None:
        """Process what has ended; raise if the cache is closed or broken."""
        if self.engine._guard.is_broken:
            self.guard.mark_broken()
        self.guard.require_whole()
        if self.closed:
            raise KvcupyError("TieredCache: the cache is closed")
        if self.store is not None:
            self.store.raise_order_error()
        self.process_ended()

    def run(
        self, step: Callable[[], _Result | Wait], *,
        may_be_closed: bool = False, send: bool = True, patience_s: float = PATIENCE_S,
    ) -> _Result:  # fmt: skip
        """Run a step with the lock, and send the transfers that it has queued.

        While it returns a `Wait`, wait without the lock, and run it again. Waits for stores at most
        `patience_s` in all. KvcupyError if the cache is closed, unless it may be.
        """
        ends: float | None = None  # of the time to wait for stores, once a wait has begun
        while True:
            try:
                with self.lock:
                    if may_be_closed:
                        self.guard.require_whole()
                    else:
                        self.require_open()
                    self._has_time = patience_s > 0 and (ends is None or time.monotonic() < ends)
                    result = step()
                if send:
                    self.engine._send()
                if not isinstance(result, Wait):
                    return result
            except ORDERLY_ERRORS:
                raise
            except BaseException:  # also if the result has not reached the caller
                self.guard.is_broken = True  # a call here could be interrupted
                raise
            if result.store is not None:
                ends = ends or time.monotonic() + patience_s
                result.store(max(0.0, ends - time.monotonic()))
            elif result.transfer is not None:
                result.transfer()

    # --- Blocks and their listeners ---

    def __contains__(self, hash: Any) -> bool:
        return hash in self.device.pages or hash in self.host.pages

    def follow(self, listener: Listener) -> None:
        """Announce all blocks and, from now on, every change, to a listener."""
        if listener not in self.listeners:
            self.listeners.append(listener)
        listener(Replaced({tier.name: list(tier.pages) for tier in (self.device, self.host)}))

    def describe(self, blocks: Described, hashes: Iterable[int]) -> None:
        """Announce what precedes the blocks with `hashes`, which are among `blocks`."""
        if self.listeners:
            announce(self.listeners, blocks.of(hashes))

    def require_unleased(self) -> None:
        if self.num_leased:
            raise KvcupyError(f"{self.num_leased} blocks are leased: release them first")

    def clear(self) -> None:
        """Forget all blocks; KvcupyError if one is leased."""
        self.require_unleased()
        self.forget_all()

    def forget_all(self) -> None:
        """Forget all blocks; pages that are leased or held are freed on release."""
        self.device.clear()
        self.host.clear()
        if self.store is not None:
            self.store.forget()
        if self.listeners:
            announce(self.listeners, Replaced())

    def only_on_device(self, pages: Iterable[int]) -> list[int]:
        """Return those device pages whose blocks no lower tier is known to have whole."""
        hashes, stored = self.device.hashes, self.device.stored
        pages = [page for page in pages if page not in stored]
        in_host = self.host.pages.find([hashes[page] for page in pages])
        return [page for page, copy in zip(pages, in_host, strict=True) if copy is None]

    def pin(self, pages: Sequence[int]) -> None:
        pins = self.device.pins
        for page in pages:
            pins[page] = pins.get(page, 0) + 1
        self.num_leased += len(pages)

    def unpin(self, pages: Sequence[int]) -> None:
        """Unpin leased pages, and free those whose blocks were forgotten meanwhile."""
        device, pins = self.device, self.device.pins
        hashes = list(map(device.hashes.__getitem__, pages))
        known_pages = device.pages.find(hashes)
        orphans = []
        for page, known in zip(pages, known_pages, strict=True):
            if pins[page] > 1:
                pins[page] -= 1
            else:
                del pins[page]
                if known != page:
                    orphans.append(page)
        self.num_leased -= len(pages)
        device.give_back(orphans)
        device.order.touch([page for page in reversed(known_pages) if page is not None])
        self.host.use(hashes)

    def stats(self) -> dict[str, float]:
        """Return the statistics of `TieredCache.stats`; without the lock, perhaps stale ones."""
        return {
            "device_blocks": len(self.device.pages),
            "host_blocks": len(self.host.pages),
            **_counted(self.counts, self.store),
        }

    def release_arrivals(self, arrivals: Arrivals) -> None:
        """Release the holds on blocks that have arrived, after a call that has failed."""
        if self.store is not None and not self.guard.is_broken:
            with self.lock, self.guard:
                self.store.release(self, arrivals)

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
        self.device.use(hashes)
        self.host.use(hashes)

    # --- In flight ---

    def process_ended(self) -> None:
        """Process completions that have ended, and retentions that are over."""
        if self._retentions.priorities and (over := self._retentions.expire(time.monotonic())):
            self._reorder(over)
        for completion in self.in_flight.take_ended():
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
        for accessed, pages in (
            (filled, completion.pages), (self.host.used_by, completion.host_pages)
        ):  # fmt: skip
            for page in pages:
                if accessed.get(page) is completion:
                    del accessed[page]
        completion.pages = completion.host_pages = ()

    def drop(self, completion: BlockCompletion) -> None:
        """Forget the blocks that a failed completion was to write; leases keep their pages."""
        is_save = completion.kind == "save"
        tier = self.host if is_save else self.device
        self.in_flight.add_failed(completion)
        pages = [
            page for page in completion.pages
            if tier.has_block(page) and tier.filled_by.get(page) is completion
        ]  # fmt: skip
        tier.forget(pages)
        self.counts.lost += sum(tier.hashes[page] not in self for page in pages)
        tier.free_unless_in_use(pages)
        if is_save:
            self.counts.failed_saves += len(pages)
        else:
            self.counts.failed_loads += len(pages)

    def wait_for_pages(self, tier: PageTier, num_free: int) -> Wait | None:
        """Return a Wait if more than `num_free` pages are free now or after pending transfers."""
        allocator = tier.pool.allocator
        if allocator.num_available <= num_free:
            return None
        if allocator.num_free > num_free:
            return Wait()
        oldest = self.in_flight.oldest()
        return Wait(allocator._wait_for_freed if oldest is None else oldest.synchronize)

    def after_writers(self, pages: Iterable[int], after: Any) -> Any:
        """Return a stream that waits for `after` and for streams that write these device pages."""
        arriving = [self.device.arriving(page) for page in pages]
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

    # --- Transfers between the tiers ---

    def save(
        self, hashes: Sequence[int], sources: Sequence[int], targets: Pages, after: Any
    ) -> dict[int, int]:
        """Queue a save to host pages; return them by hash. They are not in the tier yet."""
        try:
            return self._queue_save(hashes, sources, targets, after) if hashes else {}
        except ORDERLY_ERRORS:
            self.host.give_back(targets)
            raise

    def _queue_save(
        self, hashes: Sequence[int], sources: Sequence[int], targets: Pages, after: Any
    ) -> dict[int, int]:
        pages: list[int] = targets.tolist()
        transfer = self.engine.save(sources, pages, after=self.after_writers(sources, after))
        arriving = [self.device.arriving(page) for page in sources]
        self._note_transfer(BlockCompletion("save", transfer, pages, arriving, pages))
        saved = dict(zip(hashes, pages, strict=True))
        if self.store is not None:
            self.store.note_saved(self, saved)
        return saved

    def load(
        self, sources: Sequence[int], targets: Sequence[int], after: Any, *, cached: bool
    ) -> BlockCompletion:
        """Queue a load from host pages to device pages: `cached` ones, or a caller's."""
        transfer = self.engine.load(sources, targets, after=after)
        arriving = [self.host.arriving(page) for page in sources]
        filled = targets if cached else ()
        return self._note_transfer(BlockCompletion("load", transfer, filled, arriving, sources))

    def _note_transfer(self, completion: BlockCompletion) -> BlockCompletion:
        filled = self.host if completion.kind == "save" else self.device
        self.in_flight.add(completion)
        filled.filled_by.update(dict.fromkeys(completion.pages, completion))
        self.host.used_by.update(dict.fromkeys(completion.host_pages, completion))
        return completion

    # --- Inserting ---

    def insert(self, blocks: Described, pages: Pages, stream: Stream) -> list[int]:
        """Add pages to the device tier; return the pages of blocks that it already has."""
        device, hashes = self.device, blocks.hashes
        ordered = device.pool.allocator._require_allocated(pages)
        if len(owned := ordered[device.owned[ordered]]):
            raise ValueError(f"pages: expected the caller's, got {owned[0]}, which is the cache's")
        written = StreamCompletion(stream)
        is_written = written.done() and written.failure is None  # may raise: nothing has changed
        inserted: dict[int, int] = {}  # pages by hash
        unneeded = []
        known_pages = device.pages.find(hashes)
        for hash, page, known in zip(hashes, pages.tolist(), known_pages, strict=True):
            if known is not None or hash in inserted:
                unneeded.append(page)
            else:
                inserted[hash] = page
        saved = {}
        if self.through:
            in_host = self.host.pages.find(inserted)
            saves = [h for h, known in zip(inserted, in_host, strict=True) if known is None]
            host_pages = self.evict_from_host(self.plan_host_eviction(len(saves), keep=inserted))
            saves = saves[: len(host_pages)]
            saved = self.save(saves, [inserted[hash] for hash in saves], host_pages, stream)
        if inserted and not is_written:
            self._wait_for_writes(list(inserted.values()), written)
        self.describe(blocks, hashes)
        device.use(hashes, inserted)
        self.host.use(hashes, saved)
        self.counts.inserted += len(inserted)
        return unneeded

    def _wait_for_writes(self, pages: list[int], written: StreamCompletion) -> None:
        """Prevent reads and overwrites of pages before their stream has written them."""
        completion = self.in_flight.add(BlockCompletion("insert", written, pages, ()))
        self.device.filled_by.update(dict.fromkeys(pages, completion))
        self.device.pool.allocator._mark_busy(pages, written)

    # --- Evicting from the host tier ---

    def plan_host_eviction(
        self, count: int, *, keep: Collection[int] = _NO_HASHES,
        leaving: Collection[int] = _NO_HASHES, wait: bool = False, lossless: bool = False,
    ) -> HostEviction:  # fmt: skip
        """Choose blocks to evict for `count` host pages; the plan may have fewer pages.

        Blocks that are still to be put into a store stay, and are put. For calls that wait, those
        that stay on the device can go without, if nothing else can.

        Parameters
        ----------
        keep : hashes that stay in the host tier
        leaving : hashes that are about to leave the device. They are evicted from the host tier
            last, and only if a store has them
        wait : plan a `Wait` for transfers and, as long as the call has time, for stores, instead of
            fewer pages
        lossless : do not evict blocks that stores have refused
        """
        host, store = self.host, self.store
        num_free = min(count, host.num_free)
        stay: Container[int] = {*keep, *leaving} if leaving else keep
        if store is None:
            plan = HostEviction(num_free, host.choose(count - num_free, stay, idle=not wait))
            if wait and plan.num_pages < count:
                plan.wait = self.wait_for_pages(host, num_free)
            return plan
        unwritten: list[int] = []
        bits, on_device = store.usable_bits, self.device.pages

        def stays(hash: int, page: int) -> bool:
            if host.unwritten.get(page, 0) & bits:
                unwritten.append(hash)
                return True
            return page not in host.stored and (lossless or hash in leaving)

        def is_only_here(hash: int, page: int) -> bool:
            return hash not in on_device

        plan = HostEviction(
            num_free, host.choose(count - num_free, stay, idle=not wait, stays=stays)
        )
        chosen = {*keep, *(host.hashes[page] for page in plan.victims)}
        for allowed, stays_now in ((bool(leaving), stays), (wait, is_only_here)):
            if allowed and plan.num_pages < count:
                missing = count - plan.num_pages
                more = host.choose(missing, chosen, idle=not wait, stays=stays_now)
                chosen.update(host.hashes[page] for page in more)
                plan.victims += more
            chosen.update(leaving)
        if unwritten:
            store.put_first(self, unwritten[: max(count, store.blocks_per_call)])
        if plan.num_pages < count:
            plan.can_grow = bool(unwritten) or store.holding or (not wait and bool(host.used_by))
            if wait:
                plan.wait = self.wait_for_pages(host, num_free)
                if plan.wait is None and plan.can_grow and self._has_time:
                    plan.wait = Wait(store=store.next_move())
        return plan

    def evict_from_host(self, plan: HostEviction) -> Pages:
        """Carry out a plan; return its pages, which are now empty."""
        host, device = self.host, self.device
        pages = host.take(plan.num_free)
        num_lost = 0
        for page in plan.victims:
            on_device = device.pages.get(host.hashes[page])
            if page not in host.stored:
                num_lost += on_device is None
            elif on_device is not None and page not in host.unwritten and page not in host.refused:
                device.stored.add(on_device)
        host.forget(plan.victims)
        self.counts.host_evicted += len(plan.victims)
        self.counts.lost += num_lost
        return np.concatenate((pages, np.array(plan.victims, np.int64)))

    def take_host_pages(self, count: int) -> Pages | Wait:
        """Take pages for a caller, evicting blocks; CacheFull if too few can be freed."""
        plan = self.plan_host_eviction(count, wait=True)
        if plan.wait is not None:
            return plan.wait
        if plan.num_pages < count:
            raise CacheFull(f"expected room for {count} pages in host memory, got less", "n")
        for page in plan.victims:
            if (accessed := self.host.accessed(page)) is not None:
                return Wait(accessed.synchronize)
        pages = self.evict_from_host(plan)
        self.host.owned[pages] = False  # the caller owns them now
        return pages

    def discard(self, hashes: Sequence[int]) -> None:
        """Forget blocks in both tiers, except where they are leased or held."""
        for tier in (self.device, self.host):
            pages = [
                page for page in tier.pages.known_pages(hashes)
                if page not in tier.pins and page not in tier.held
            ]  # fmt: skip
            tier.forget(pages)
            tier.give_back(pages)

    # --- Evicting from the device tier ---

    def evict_from_device(
        self, victims: Sequence[int], keep: Collection[int] = _NO_HASHES
    ) -> int | Wait:
        """Evict blocks, saved first if only here; return how many, fewer while stores lack them."""
        hashes = self.device.hashes
        saves = self.only_on_device(victims)
        if saves:
            leaving = {hashes[page] for page in victims}
            plan = self.plan_host_eviction(len(saves), keep=keep, leaving=leaving, wait=True)
            if plan.wait is not None:
                return plan.wait
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
            saves = saves[len(saves) - len(pages) :]
            self.host.add(self.save([hashes[page] for page in saves], saves, pages, None))
        self.remove_from_device(victims)
        self.device.give_back(victims)
        return len(victims)

    def remove_from_device(self, pages: Sequence[int]) -> None:
        """Remove the blocks of pages from the device tier; the cache keeps the pages."""
        device = self.device
        stored = device.stored.intersection(pages)
        device.forget(pages)
        self.counts.device_evicted += len(pages)
        in_host = self.host.pages.find([device.hashes[page] for page in pages])
        self.counts.lost += sum(
            page not in stored and copy is None for page, copy in zip(pages, in_host, strict=True)
        )
