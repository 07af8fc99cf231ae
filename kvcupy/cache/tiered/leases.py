"""Leases: the blocks of a prefix, pinned on the device, and loaded together from lower tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import CacheFull, DeviceError, KvcupyError, ProcessLocal
from ..hazards import waiting_stream
from .changes import Described
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
    stores : there, or in a store

    Examples
    --------
    >>> match = Match(1, 2, 5)
    >>> match.stores - match.host
    3
    """

    device: int
    host: int
    stores: int


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

    def _append(self, rest: Lease) -> None:
        """Take over the lease of the blocks that follow."""
        self.pages = np.concatenate((self.pages, rest.pages))
        self.pages.flags.writeable = False
        self.num_blocks = len(self.pages)
        self._hashes, self._pinned = [*self._hashes, *rest._hashes], [*self._pinned, *rest._pinned]
        self.completion.append(rest.completion)

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

    def append(self, other: LeaseCompletion) -> None:
        """Complete no earlier than another one."""
        self._arriving = (*self._arriving, *other._arriving)

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
    num_free: int  # free device pages for the loads
    victims: list[Copy]  # device copies to evict for the other loads
    saves: list[Copy]  # victims that no lower tier has; saved as far as host pages suffice
    host: HostEviction  # host pages for the saves


def acquire(
    shared: SharedTiers, blocks: Described, *, after: Any, patience_s: float, send: bool = True
) -> Lease:
    """Lease the leading blocks that the tiers have; unless `send`, leave loads in the queue.

    patience_s : how long to wait for stores to have what the blocks replace; then they are fewer
    """
    hashes = blocks.hashes

    def change(tiers: Tiers) -> Lease | None:
        """Return a Lease; None to plan again."""
        plan = plan_acquire(tiers, hashes)
        while tiers.store is not None and plan.host.num_pages < len(plan.saves):
            if plan.host.num_pages:  # some victims pass through the host tier before the others
                first = plan.victims[: plan.victims.index(plan.saves[plan.host.num_pages])]
                tiers.evict_from_device(first, plan.loads)
                return None
            num_loads = max(plan.num_free + plan.victims.index(plan.saves[0]), len(plan.loads) // 2)
            end = hashes.index(plan.loads[min(num_loads, len(plan.loads) - 1)])
            plan = plan_acquire(tiers, hashes[:end])
        if plan.loads or blocks.token_ids is not None:
            tiers.describe(blocks, plan.known)
        return Lease(shared, plan.known, carry_out(tiers, plan, hashes, after))

    ends = time.monotonic() + patience_s
    while (lease := shared.attempt(change, send=send, patience_s=patience_s)) is None:
        patience_s = ends - time.monotonic()
    return lease


def plan_acquire(tiers: Tiers, hashes: Sequence[int]) -> AcquirePlan:
    """Find the leading known blocks, and pages for them, without changing anything.

    Raises CacheFull if pages do not suffice, Blocked to wait for a transfer or a store.
    """
    device, host = tiers.device, tiers.host
    on_device, in_host = device.pages.parts, host.pages.parts
    known = hashes
    missing: dict[int, None] = {}
    pages: list[int] = []
    for i, hash in enumerate(hashes):
        if (page := on_device[hash & MASK].get(hash)) is not None:
            pages.append(page)
        elif hash in in_host[hash & MASK]:
            missing[hash] = None
        else:
            known = hashes[:i]
            break
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
    if saves:
        leaving = {copy.hash for copy in victims}
        eviction = tiers.plan_host_eviction(len(saves), keep=missing, leaving=leaving, wait=True)
    return AcquirePlan(known, pages, loads, num_free, victims, saves, eviction)


def carry_out(tiers: Tiers, plan: AcquirePlan, hashes: Sequence[int], after: Any) -> list[int]:
    """Load the blocks of a plan to the device, and pin them; return their pages."""
    device, host, counts = tiers.device, tiers.host, tiers.counts
    free = device.take(plan.num_free)
    try:
        below = tiers.evict_from_host(plan.host)
        saves = plan.saves[max(0, len(plan.saves) - len(below)) :]
        try:
            load_after = tiers.stream_behind(plan.victims, after)
            saved = tiers.save(saves, below, after)
        except BaseException:
            host.give_back(below)
            raise
    except BaseException:
        device.give_back(free)
        raise
    host.add(saved)
    host.use(plan.known, {})
    targets = np.concatenate((free, tiers.remove_from_device(plan.victims)))
    num_fetched = sum(host.pages[hash] in host.fetched for hash in plan.loads)
    loaded: dict[int, int] = {}
    pages = plan.pages
    if plan.loads:
        loaded = _load(tiers, plan.loads, targets, load_after)
        device.use(plan.known, loaded)
        pages = [device.pages[hash] for hash in plan.known]
    else:
        device.order.touch(reversed(pages))
    tiers.pin(pages)
    counts.host_hits += len(loaded) - num_fetched
    counts.device_hits += len(pages) - len(loaded)
    counts.misses += len(hashes) - len(pages)
    if tiers.store is not None:
        tiers.store.counts.store_hits += num_fetched
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
