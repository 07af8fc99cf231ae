"""Leases: the blocks of a prefix, pinned on the device, and loaded together from lower tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import observe
from ...errors import CacheFull, DeviceError, KvcupyError, ProcessLocal
from ..hazards import waiting_stream
from .tiers import BlockCompletion, Copy, HostEviction, SharedTiers, Tiers

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

    def __init__(self, shared: SharedTiers, copies: list[Copy]) -> None:
        self.pages: Pages = np.array([copy.page for copy in copies], np.int64)
        self.pages.flags.writeable = False
        self.num_blocks = len(copies)
        self.released = False
        # Transfers that load some of the blocks, queued by this acquire or by earlier ones.
        arriving = {id(b): b for c in copies if (b := c.filled_by) is not None and not b.over}
        self.completion = LeaseCompletion(shared, tuple(arriving.values()))
        if observe.order_observers:
            for copy in copies:
                if copy.filled_by is not None:  # found over, perhaps by another thread
                    observe.handed_around(copy.filled_by)
        self._shared = shared
        self._copies = copies

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
        with self._shared.locked() as tiers:  # also legal after the cache is closed
            if not self.released:
                self.released = True
                tiers.unpin(self._copies)
        self.completion.release()

    def _waiting(self, stream: Any) -> Stream:
        waiting = waiting_stream(self._shared.engine.device, stream, "blocks")
        if self.released:
            raise KvcupyError("the lease has been released: its pages may have been reused")
        return waiting


class LeaseCompletion:
    """The `Completion` of all blocks of a lease; empty once the lease is released."""

    def __init__(self, shared: SharedTiers, arriving: tuple[BlockCompletion, ...]) -> None:
        self._shared = shared
        self._arriving = arriving

    @property
    def failure(self) -> BaseException | None:
        return next((b.failure for b in self._arriving if b.failure is not None), None)

    def done(self) -> bool:
        with self._shared.locked():
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
                with self._shared.locked() as tiers:
                    if blocks.broken:  # else the stream itself has failed
                        blocks.fail(error)
                        tiers.drop(blocks)
                raise


# --- Acquiring ---


@dataclass
class AcquirePlan:
    """The planned steps of an acquire."""

    known: list[int]  # leading hashes that some tier has
    loads: list[int]  # known hashes that are not on the device, without duplicates
    reads: list[int]  # loads that are only on disk
    num_free: int  # free device pages for the loads
    victims: list[Copy]  # device copies to evict for the other loads
    saves: list[Copy]  # victims that no other tier has; saved as far as host pages suffice
    host: HostEviction  # host pages, first for the reads, then for the saves


def plan_acquire(tiers: Tiers, hashes: list[int]) -> AcquirePlan:
    """Find the leading known blocks, and pages for them, without changing anything.

    Raises CacheFull if pages do not suffice, Blocked to wait for a transfer.
    """
    device, host = tiers.device, tiers.host
    known = hashes
    missing: dict[int, None] = {}
    reads: dict[int, None] = {}
    for i, hash in enumerate(hashes):
        if hash in device.copies:
            continue
        if hash not in host.copies:
            if not tiers.on_disk(hash):
                known = hashes[:i]
                break
            reads[hash] = None
        missing[hash] = None
    loads = list(missing)
    num_free = min(len(loads), device.num_free) if loads else 0
    short = len(loads) - num_free
    victims = device.choose(short, set(known)) if short else []
    if len(victims) < short:
        tiers.require_settled(device, num_free)
        raise CacheFull(
            f"hashes: expected at most {num_free + len(victims)} blocks to load, for which the "
            f"device pool has pages, got {len(loads)}"
        )
    saves = tiers.only_on_device(victims)
    eviction = HostEviction()
    if count := len(reads) + len(saves):
        leaving = {copy.hash for copy in victims}
        eviction = tiers.plan_host_eviction(
            count, required=len(reads), keep=missing, leaving=leaving
        )
    return AcquirePlan(known, loads, list(reads), num_free, victims, saves, eviction)


def evict_some_first(tiers: Tiers, plan: AcquirePlan) -> bool:
    """Evict some victims first, if the host pages do not suffice to save all of them.

    These victims pass through the host tier to disk, unless that evicts blocks to acquire. Returns
    whether some were evicted, so that the caller must plan again.
    """
    disk, to_spare = tiers.disk, plan.host.num_pages - len(plan.reads)
    if disk is None or to_spare >= len(plan.saves):
        return False
    if to_spare > 0:
        return tiers.evict_from_device(plan.victims, plan.loads) > 0
    # The blocks to acquire take all host pages. They can go to disk, if that loses no block.
    saves = plan.saves[: disk.num_free]
    if not saves:
        return False
    first = plan.victims[: plan.victims.index(saves[-1]) + 1]
    return tiers.evict_from_device(first) > 0


def carry_out(tiers: Tiers, plan: AcquirePlan, hashes: list[int], after: Any) -> list[Copy]:
    """Load the blocks of a plan to the device, and pin them; return their copies.

    Returns fewer copies than planned if a block on disk is damaged.
    """
    device, host, counts = tiers.device, tiers.host, tiers.counts
    free = device.take(plan.num_free)
    try:
        pages = tiers.evict_from_host(plan.host)
        try:
            read = _read(tiers, plan, pages.tolist())
            num_saves = min(len(plan.saves), len(pages) - len(plan.reads))
            saves = plan.saves[len(plan.saves) - num_saves :] if num_saves > 0 else []
            if len(read) < len(plan.reads):  # truncate the plan before the damaged block
                damaged = plan.reads[len(read)]
                plan.known = plan.known[: plan.known.index(damaged)]
                plan.loads = plan.loads[: plan.loads.index(damaged)]
            num_loads = len(plan.loads)
            victims = plan.victims[: max(0, num_loads - len(free))]
            leaving = set(map(id, victims))
            saves = [copy for copy in saves if id(copy) in leaving]
            used = len(plan.reads) + len(saves)
            behind = tiers.stream_behind(victims, after)
            saved = tiers.save(saves, pages[len(plan.reads) : used], after)
        except BaseException:
            host.give_back(pages)
            raise
    except BaseException:
        device.give_back(free)
        raise
    host.give_back(np.concatenate((pages[len(read) : len(plan.reads)], pages[used:])))
    host.add(saved.values())
    host.use(plan.known, read)
    if tiers.disk is not None:
        tiers.disk.use(plan.known)
    targets = np.concatenate((free[:num_loads], tiers.remove_from_device(victims)))
    device.give_back(free[num_loads:])
    num_fetched = sum(host.copies[hash].fetched for hash in plan.loads)
    loaded = _load(tiers, plan.loads, targets, behind) if num_loads else {}
    device.use(plan.known, loaded)
    copies = [device.copies[hash] for hash in plan.known]
    tiers.pin(copies)
    counts.disk_hits += len(read)
    counts.host_hits += len(loaded) - len(read) - num_fetched
    counts.device_hits += len(copies) - len(loaded)
    counts.misses += len(hashes) - len(copies)
    if tiers.store is not None:
        tiers.store.note_saved(read.values())
        tiers.store.note_acquired(tiers, plan.known, num_fetched)
        for hash in plan.loads:
            host.copies[hash].fetched = False
    return copies


def _read(tiers: Tiers, plan: AcquirePlan, pages: list[int]) -> dict[int, Copy]:
    """Read blocks from disk into the first host pages; stop before a damaged block."""
    if not plan.reads or tiers.disk is None:
        return {}
    whole = tiers.disk.read(plan.reads, pages[: len(plan.reads)])
    return {hash: Copy(hash, page) for hash, page in zip(plan.reads[:whole], pages, strict=False)}


def _load(tiers: Tiers, hashes: list[int], targets: Any, after: Any) -> dict[int, Copy]:
    """Queue the load of blocks from the host tier; return their device copies."""
    sources = [tiers.host.copies[hash] for hash in hashes]
    try:
        transfer = tiers.engine.load([c.page for c in sources], targets, after=after)
    except BaseException:
        tiers.device.give_back(targets)
        raise
    loaded = [Copy(hash, page) for hash, page in zip(hashes, targets.tolist(), strict=True)]
    completion = BlockCompletion("load", transfer, loaded, [copy.arriving for copy in sources])
    tiers.in_flight.add(completion)
    for copy, source in zip(loaded, sources, strict=True):
        copy.filled_by = copy.used_by = source.used_by = completion
    return {copy.hash: copy for copy in loaded}
