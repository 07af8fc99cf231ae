"""Leases: the blocks of a prefix, pinned on the device, and loaded together from lower tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import CacheFull, DeviceError, KvcupyError, ProcessLocal
from ..hazards import waiting_stream
from .changes import Described
from .disk_blocks import DiskMove
from .parts import MASK
from .tiers import BlockCompletion, Copy, HostEviction, SharedTiers, Tiers, copy_of

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from ..pages import Pages


class Match(NamedTuple):
    """Numbers of leading blocks of a prefix in the tiers. Each count includes the preceding tiers.

    Attributes
    ----------
    device : on the device
    host : on the device or in host memory
    disk : in any tier of this cache
    shared : in any tier, or in the shared store; equal to `disk` without a store

    Examples
    --------
    >>> match = Match(1, 2, 2, 5)
    >>> match.shared - match.disk
    3
    """

    device: int
    host: int
    disk: int
    shared: int


class Lease(ProcessLocal):
    """Blocks on the device, pinned until they are released. Made by `TieredCache.acquire`.

    Call `wait_layer` or `wait` before reading the pages. Threads may share a lease.

    Attributes
    ----------
    pages : int64 (num_blocks,), the device page of each block, read-only
    num_blocks : number of leading blocks of the requested hashes
    released : whether `release` was called
    completion : `Completion` of the transfers that load the blocks, until the release
    """

    def __init__(self, shared: SharedTiers, hashes: Sequence[int], pages: list[int]) -> None:
        self.pages: Pages = np.array(pages, np.int64)
        self.pages.flags.writeable = False
        self.num_blocks = len(pages)
        self.released = False
        # Transfers that load some of the blocks, queued by this acquire or by earlier ones.
        device = shared.tiers.device
        fillers = [device.arriving(page) for page in pages if page in device.filled_by]
        arriving = {id(b): b for b in fillers if b is not None}
        self.completion = LeaseCompletion(shared, tuple(arriving.values()))
        self._shared = shared
        self._hashes, self._pinned = hashes, pages  # until they are released

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<Lease of {self.num_blocks} block{'s' * (self.num_blocks != 1)}, {state}>"

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make later work of a compute stream wait until a layer of all blocks has been loaded.

        Parameters
        ----------
        layer : 0 to num_layers - 1
        stream : Stream, or a CuPy or torch stream; None for the current stream. The host does not
            block, unless the stream is the calling thread

        Raises
        ------
        TypeError, ValueError : `layer` is out of range, or `stream` is not a stream
        CaptureError : the stream is being captured
        KvcupyError : the lease has been released
        DeviceError : a transfer of the blocks has failed, now or earlier. The cache has forgotten
            these blocks on the device; the lease keeps the pages until it is released
        """
        layer = self._shared.engine.device_pool.layer_number(layer)
        self.completion.wait_layer(layer, self._waiting(stream))

    def wait(self, stream: Any = None) -> None:
        """Make later work of a compute stream wait for all layers; otherwise like `wait_layer`."""
        self.completion.wait(self._waiting(stream))

    def release(self) -> None:
        """Unpin the blocks. Do not read their pages after this call. Idempotent."""
        with self._shared.lock:  # also legal after the cache is closed
            tiers = self._shared.tiers
            if not self.released:
                self.released = True
                tiers.unpin(self._hashes, self._pinned)
        self.completion.release()

    def _release_pages(self, pages: Collection[int]) -> None:
        """Unpin the blocks in some of the pages; the lease is released with the last of them."""
        left = [(h, p) for h, p in zip(self._hashes, self._pinned, strict=True) if p not in pages]
        if not left:
            self.release()
            return
        leaving = [(h, p) for h, p in zip(self._hashes, self._pinned, strict=True) if p in pages]
        with self._shared.lock:
            if not self.released:
                self._hashes, self._pinned = [h for h, _ in left], [p for _, p in left]
                self._shared.tiers.unpin([h for h, _ in leaving], [p for _, p in leaving])

    def _waiting(self, stream: Any) -> Stream:
        waiting = waiting_stream(self._shared.engine.device, stream, "blocks")
        if self.released:
            raise KvcupyError("the lease has been released: its pages may have been reused")
        return waiting


class LeaseCompletion(ProcessLocal):
    """The `Completion` of all blocks of a lease; empty once the lease is released."""

    def __init__(self, shared: SharedTiers, arriving: tuple[BlockCompletion, ...]) -> None:
        self._shared = shared
        self._arriving = arriving

    @property
    def failure(self) -> BaseException | None:
        return next((b.failure for b in self._arriving if b.failure is not None), None)

    def done(self) -> bool:
        with self._shared.lock:
            return all([blocks.done() for blocks in self._arriving])

    def synchronize(self) -> None:
        for blocks in self._arriving:
            blocks.synchronize()

    def wait(self, stream: Any = None) -> None:
        self._wait(lambda blocks: blocks.wait(stream))

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self._wait(lambda blocks: blocks.wait_layer(layer, stream))

    def release(self) -> None:
        self._arriving = ()  # the pages may be reused from now on

    def _wait(self, wait: Callable[[BlockCompletion], None]) -> None:
        for blocks in self._arriving:
            try:
                wait(blocks)
            except DeviceError as error:
                with self._shared.lock:
                    tiers = self._shared.tiers
                    if blocks.broken:  # else the stream itself has failed
                        blocks.fail(error)
                        tiers.drop(blocks)
                raise


# --- Acquiring ---


@dataclass
class AcquirePlan:
    """The planned steps of an acquire."""

    known: Sequence[int]  # leading hashes that some tier has
    pages: list[int]  # device pages of those that are on the device
    loads: list[int]  # known hashes that are not on the device, without duplicates
    reads: list[int]  # loads that are only on disk, and must be read before anything else
    num_free: int  # free device pages for the loads
    victims: list[Copy]  # device copies to evict for the other loads
    saves: list[Copy]  # victims that no other tier has; saved as far as host pages suffice
    host: HostEviction  # host pages, first for the reads, then for the saves

    @property
    def num_save_pages(self) -> int:
        return self.host.num_pages - len(self.reads)


class DiskReads:
    """The blocks that an acquire has read from disk, in host pages that it holds until its end.

    The host tier may get the blocks before that, and evicts none that is held.
    Acquires read one after the other (`SharedTiers.disk_turn`): each block is read once, and none
    waits for pages of another that waits for its own.
    """

    def __init__(self, shared: SharedTiers) -> None:
        self.arrived: dict[int, int] = {}  # pages by hash
        self.unreadable: set[int] = set()  # hashes that the disk failed to read in this call
        self._moves: list[DiskMove] = []
        self._shared = shared

    def claim(self, tiers: Tiers, plan: AcquirePlan) -> None:
        """Take host pages for the reads of a plan, and pin the slots of their blocks.

        Frees pages for the saves too: victims chosen after the reads could be others.
        """
        assert tiers.disk is not None
        pages, num_reads = tiers.evict_from_host(plan.host), len(plan.reads)
        self._moves.append(tiers.disk.begin_read(plan.reads, pages[:num_reads].tolist()))
        tiers.host.give_back(pages[num_reads:])

    def carry_out(self) -> None:
        """Read the blocks, without the lock; damaged ones are forgotten by the disk tier."""
        move = self._moves[-1]
        self._shared.carry_out(move)
        self.arrived |= {hash: move.pages[hash] for hash in move.arrived}
        self.unreadable |= move.failed.keys()

    def become_host_blocks(self, tiers: Tiers) -> None:
        """Give the blocks to the host tier, which may evict them like others."""
        tiers.host.use(list(self.arrived), self.arrived)
        self.free_unused(tiers)

    def give_back(self) -> None:
        """Free the pages whose blocks the host tier did not get."""
        with self._shared.lock:
            tiers = self._shared.tiers
            self.free_unused(tiers)

    def free_unused(self, tiers: Tiers) -> None:
        """End the moves. With the lock still held since the host tier got its pages."""
        assert tiers.disk is not None
        self.arrived = {}
        known = tiers.host.pages
        for move in self._moves:
            tiers.host.give_back([p for hash, p in move.pages.items() if known.get(hash) != p])
            tiers.disk.finish(move)
        self._moves = []


def acquire(shared: SharedTiers, blocks: Described, *, after: Any, send: bool = True) -> Lease:
    """Lease the leading blocks that the tiers have; unless `send`, leave loads in the queue."""
    if (lease := _attempt(shared, blocks, after, None, send)) is not None:
        return lease
    with shared.disk_turn:
        reads = DiskReads(shared)
        try:
            while (lease := _attempt(shared, blocks, after, reads, send)) is None:
                reads.carry_out()
        finally:
            reads.give_back()
    return lease


def _attempt(
    shared: SharedTiers, blocks: Described, after: Any, reads: DiskReads | None, send: bool
) -> Lease | None:
    """Lease the leading blocks; None if some must be read from disk first, to pages of `reads`."""
    hashes = blocks.hashes

    def change(tiers: Tiers) -> Lease | bool:
        """Return a Lease, or whether to plan again."""
        plan = plan_acquire(tiers, hashes, reads)
        if evict_some_first(tiers, plan, reads):
            return True
        if plan.reads:
            if reads is not None:
                reads.claim(tiers, plan)
            return False
        if plan.loads or blocks.token_ids is not None:
            tiers.describe(blocks, plan.known)
        return Lease(shared, plan.known, carry_out(tiers, plan, hashes, after, reads))

    while (outcome := shared.attempt(change, send=send)) is True:
        pass
    return outcome if isinstance(outcome, Lease) else None


def plan_acquire(tiers: Tiers, hashes: Sequence[int], reads: DiskReads | None) -> AcquirePlan:
    """Find the leading known blocks, and pages for them, without changing anything.

    Raises CacheFull if pages do not suffice, Blocked to wait for a transfer or a write to disk.
    """
    device, host = tiers.device, tiers.host
    arrived = {} if reads is None else reads.arrived
    unreadable = set() if reads is None else reads.unreadable
    on_device, in_host = device.pages.parts, host.pages.parts
    known = hashes
    missing: dict[int, None] = {}
    unread: dict[int, None] = {}
    pages: list[int] = []
    for i, hash in enumerate(hashes):
        if (page := on_device[hash & MASK].get(hash)) is not None:
            pages.append(page)
            continue
        if hash not in in_host[hash & MASK] and hash not in arrived:
            if hash in unreadable or not tiers.readable(hash):
                known = hashes[:i]
                break
            unread[hash] = None
        missing[hash] = None
    loads = list(missing)
    num_free = min(len(loads), device.num_free) if loads else 0
    short = len(loads) - num_free
    victims = device.choose(short, set(known)) if short else []
    if len(victims) < short:
        tiers.require_settled(device, num_free)
        raise CacheFull(
            f"expected at most {num_free + len(victims)} blocks to load, for which the "
            f"device pool has pages, got {len(loads)}",
            "hashes",
        )
    saves = tiers.only_on_device(victims)
    eviction = HostEviction()
    if count := len(unread) + len(saves):
        leaving = {copy.hash for copy in victims}
        eviction = tiers.plan_host_eviction(
            count, required=len(unread), keep=missing, leaving=leaving
        )
    return AcquirePlan(known, pages, loads, list(unread), num_free, victims, saves, eviction)


def evict_some_first(tiers: Tiers, plan: AcquirePlan, reads: DiskReads | None) -> bool:
    """Evict some victims first, if the host pages do not suffice to save all of them.

    These victims pass through the host tier to disk, unless that evicts blocks to acquire. Returns
    whether anything has changed, so that the caller must plan again.
    """
    disk = tiers.disk
    if disk is None or plan.num_save_pages >= len(plan.saves):
        return False
    if plan.num_save_pages > 0:
        return tiers.evict_from_device(plan.victims, plan.loads) > 0
    # The blocks to acquire take all host pages. They can go to disk, if that loses no block.
    saves = plan.saves[: disk.num_free]
    if not saves:
        return False
    if reads is not None and reads.arrived:
        reads.become_host_blocks(tiers)
        return True
    first = plan.victims[: plan.victims.index(saves[-1]) + 1]
    return tiers.evict_from_device(first) > 0


def carry_out(
    tiers: Tiers, plan: AcquirePlan, hashes: Sequence[int], after: Any, reads: DiskReads | None
) -> list[int]:
    """Load the blocks of a plan without reads to the device, and pin them; return their pages."""
    device, host, counts = tiers.device, tiers.host, tiers.counts
    arrived = {} if reads is None else reads.arrived
    free = device.take(plan.num_free)
    try:
        below = tiers.evict_from_host(plan.host)
        try:
            saves = plan.saves[max(0, len(plan.saves) - len(below)) :]
            behind = tiers.stream_behind(plan.victims, after)
            saved = tiers.save(saves, below[: len(saves)], after)
        except BaseException:
            host.give_back(below)
            raise
    except BaseException:
        device.give_back(free)
        raise
    host.give_back(below[len(saves) :])
    host.add(saved)
    host.use(plan.known, arrived)
    if reads is not None:
        reads.free_unused(tiers)
    if tiers.disk is not None:
        tiers.disk.use(plan.known)
    targets = np.concatenate((free, tiers.remove_from_device(plan.victims)))
    num_fetched = sum(host.pages[hash] in host.fetched for hash in plan.loads)
    read = [hash for hash in plan.loads if arrived.get(hash) == host.pages[hash]]
    loaded: dict[int, int] = {}
    pages = plan.pages
    if plan.loads:
        loaded = _load(tiers, plan.loads, targets, behind)
        device.use(plan.known, loaded)
        pages = [device.pages[hash] for hash in plan.known]
    else:
        device.order.touch(reversed(plan.known))
    tiers.pin(pages)
    counts.disk_hits += len(read)
    counts.host_hits += len(loaded) - len(read) - num_fetched
    counts.device_hits += len(pages) - len(loaded)
    counts.misses += len(hashes) - len(pages)
    if tiers.store is not None:
        tiers.store.note_saved(read)
        tiers.store.note_acquired(tiers, plan.known, num_fetched)
        host.fetched.difference_update([host.pages[hash] for hash in plan.loads])
    return pages


def _load(tiers: Tiers, hashes: list[int], targets: Any, after: Any) -> dict[int, int]:
    """Queue the load of blocks from the host tier; return their device pages by hash."""
    sources = [tiers.host.pages[hash] for hash in hashes]
    try:
        transfer = tiers.engine.load(sources, targets, after=after)
    except BaseException:
        tiers.device.give_back(targets)
        raise
    loaded = list(map(copy_of, zip(hashes, targets.tolist(), strict=True)))
    arriving = [tiers.host.arriving(page) for page in sources]
    completion = BlockCompletion("load", transfer, loaded, arriving, sources)
    tiers.in_flight.add(completion)
    tiers.device.filled_by.update(dict.fromkeys(targets.tolist(), completion))
    tiers.host.used_by.update(dict.fromkeys(sources, completion))
    return dict(loaded)
