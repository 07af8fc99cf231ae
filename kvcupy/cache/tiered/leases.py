"""Leases: the blocks of a prefix, pinned on the device, and loaded together from lower tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import ORDERLY_ERRORS, CacheFull, DeviceError, KvcupyError, ProcessLocal
from ..hazards import waiting_stream
from .changes import Described
from .in_flight import Arrivals, BlockCompletion
from .store_tier import PATIENCE_S
from .tiers import GroupTiers, HostEviction, Wait

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from ..pages import Pages

DEADLINE_S = 30.0  # of an acquire, for blocks of stores


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

    def __init__(self, tiers: GroupTiers, pages: list[int]) -> None:
        self.pages: Pages = np.array(pages, np.int64)
        self.pages.flags.writeable = False
        self.num_blocks = len(pages)
        self.released = False
        # Transfers that load some of the blocks, queued by this acquire or by earlier ones.
        device = tiers.device
        writers = [device.arriving(page) for page in pages if page in device.filled_by]
        arriving = {id(b): b for b in writers if b is not None}
        self.completion = LeaseCompletion(tiers, tuple(arriving.values()))
        self._tiers = tiers
        self._pinned = pages  # until they are released

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
        layer = self._tiers.engine.device_pool.layer_number(layer)
        self.completion.wait_layer(layer, self._waiting(stream))

    def wait(self, stream: Any = None) -> None:
        """Make later work of a compute stream wait for all layers; otherwise like `wait_layer`."""
        self.completion.wait(self._waiting(stream))

    def release(self) -> None:
        """Unpin the blocks. Do not read their pages after this call. Idempotent."""
        tiers = self._tiers
        if not (self.released or tiers.guard.is_broken):
            with tiers.lock, tiers.guard:  # also legal after the cache is closed
                if not self.released:
                    self.released = True
                    tiers.unpin(self._pinned)
        self.released = True
        self.completion.release()

    def _append(self, rest: Lease) -> None:
        """Take over the lease of the blocks that follow."""
        self.pages = np.concatenate((self.pages, rest.pages))
        self.pages.flags.writeable = False
        self.num_blocks = len(self.pages)
        self._pinned = [*self._pinned, *rest._pinned]
        self.completion.append(rest.completion)

    def _release_pages(self, pages: Collection[int]) -> None:
        """Unpin the blocks in some of the pages; the lease is released with the last of them."""
        left = [page for page in self._pinned if page not in pages]
        if not left:
            self.release()
            return
        with self._tiers.lock, self._tiers.guard:
            if not self.released:
                unpinned, self._pinned = [p for p in self._pinned if p in pages], left
                self._tiers.unpin(unpinned)

    def _waiting(self, stream: Any) -> Stream:
        waiting = waiting_stream(self._tiers.engine.device, stream, "blocks")
        if self.released:
            raise KvcupyError("the lease has been released: its pages may have been reused")
        return waiting


class LeaseCompletion(ProcessLocal):
    """The `Completion` of all blocks of a lease; empty once the lease is released."""

    def __init__(self, tiers: GroupTiers, arriving: tuple[BlockCompletion, ...]) -> None:
        self._tiers = tiers
        self._arriving = arriving

    @property
    def failure(self) -> BaseException | None:
        return next((b.failure for b in self._arriving if b.failure is not None), None)

    def done(self) -> bool:
        with self._tiers.lock, self._tiers.guard:
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
                with self._tiers.lock, self._tiers.guard:
                    if blocks.broken:  # else the stream itself has failed
                        blocks.fail(error)
                        self._tiers.drop(blocks)
                raise


# --- Looking up and acquiring ---


def match(tiers: GroupTiers, hashes: Sequence[int]) -> Match:
    """Count the leading blocks by tier; ask the stores for all blocks that no tier has."""
    with tiers.lock, tiers.guard:
        tiers.require_open()
        device, host, store = tiers.device.pages, tiers.host.pages, tiers.store
        num_on_device = num_here = device.count_leading(hashes)
        if num_here < len(hashes):
            num_here += device.count_leading(hashes[num_here:], host)
        if store is None or num_here == len(hashes):
            return Match(num_on_device, num_here, num_here)
        missing = list(dict.fromkeys([hash for hash in hashes[num_here:] if hash not in tiers]))
    num_stored = store.count_known(missing)
    is_whole = num_stored == len(missing)
    num_known = len(hashes) if is_whole else hashes.index(missing[num_stored])
    return Match(num_on_device, num_here, num_known)


def acquire(
    tiers: GroupTiers, blocks: Described, after: Stream, seconds: float, *, send: bool = True
) -> Lease:
    """Lease the leading blocks of a prefix, in parts if it is too long for host memory."""
    ends = time.monotonic() + seconds
    lease, is_whole = _acquire_part(tiers, blocks, after, ends, send)
    while not is_whole and lease.num_blocks < len(blocks.hashes):
        rest = blocks.at(range(lease.num_blocks, len(blocks.hashes)))
        with tiers.lock, tiers.guard:
            tiers.counts.misses -= len(rest.hashes)  # are counted again
        try:
            more, is_whole = _acquire_part(tiers, rest, after, ends, send)
            if not more.num_blocks:
                break
            lease._append(more)
        except CacheFull:
            break
        except BaseException as error:
            tiers.guard.note(error)
            lease.release()
            raise
    return lease


def _acquire_part(
    tiers: GroupTiers, blocks: Described, after: Stream, ends: float, send: bool
) -> tuple[Lease, bool]:
    """Lease blocks; return whether host memory had room for all that stores have."""
    store = tiers.store
    if store is None or (arrivals := store.fetch(tiers, blocks)) is None:
        return _lease(tiers, blocks, after, ends, send), True
    try:
        store.await_arrivals(tiers, arrivals, ends - time.monotonic())
        lease = _lease(tiers, blocks, after, ends, send, arrivals)
        return lease, not arrivals.lacks_room
    except BaseException as error:
        is_too_long = isinstance(error, CacheFull) and bool(arrivals.held)
        tiers.release_arrivals(arrivals)
        if not is_too_long:
            raise
    before = blocks.at(range(blocks.hashes.index(arrivals.hashes[0])))
    return _lease(tiers, before, after, ends, send), True


@dataclass
class AcquirePlan:
    """The planned steps of an acquire."""

    known: Sequence[int]  # leading hashes that some tier has
    pages: list[int]  # device pages of those that are on the device
    loads: dict[int, int]  # host pages of those that are not on the device, by hash
    num_free: int  # free device pages for the loads
    victims: list[int]  # device pages whose blocks are evicted for the other loads
    saves: list[int]  # victims that no lower tier has; saved as far as host pages suffice
    host: HostEviction  # host pages for the saves


def _lease(
    tiers: GroupTiers, blocks: Described, after: Stream, ends: float, send: bool,
    arrivals: Arrivals | None = None,
) -> Lease:  # fmt: skip
    """Lease the leading blocks that the tiers have, and release the holds on `arrivals`."""
    hashes = blocks.hashes

    def step() -> Lease | Wait:
        plan = plan_acquire(tiers, hashes)
        while tiers.store is not None and not isinstance(plan, Wait):
            if plan.host.num_pages >= len(plan.saves):
                break
            if plan.host.num_pages:  # some victims pass through the host tier before the others
                first = plan.victims[: plan.victims.index(plan.saves[plan.host.num_pages])]
                evicted = tiers.evict_from_device(first, plan.loads)
                return evicted if isinstance(evicted, Wait) else Wait()
            loads = list(plan.loads)
            num_loads = max(plan.num_free + plan.victims.index(plan.saves[0]), len(loads) // 2)
            end = hashes.index(loads[min(num_loads, len(loads) - 1)])
            plan = plan_acquire(tiers, hashes[:end])
        if isinstance(plan, Wait):
            return plan
        if plan.loads or blocks.token_ids is not None:
            tiers.describe(blocks, plan.known)
        pages = carry_out(tiers, plan, hashes, after)
        if arrivals is not None and tiers.store is not None:
            tiers.store.release(tiers, arrivals)
        return Lease(tiers, pages)

    return tiers.run(step, send=send, patience_s=min(PATIENCE_S, ends - time.monotonic()))


def plan_acquire(tiers: GroupTiers, hashes: Sequence[int]) -> AcquirePlan | Wait:
    """Find the leading known blocks, and pages for them; CacheFull if pages do not suffice."""
    device, host = tiers.device, tiers.host
    known, loads = hashes, dict[int, int]()
    pages: list[int] = []
    for i, page in enumerate(device.pages.find(hashes)):
        if page is not None:
            pages.append(page)
        elif (in_host := host.pages.get(hashes[i])) is not None:
            loads[hashes[i]] = in_host
        else:
            known = hashes[:i]
            break
    num_free = min(len(loads), device.num_free) if loads else 0
    num_missing = len(loads) - num_free
    victims = device.choose(num_missing, set(known)) if num_missing else []
    if len(victims) < num_missing:
        if (wait := tiers.wait_for_pages(device, num_free)) is not None:
            return wait
        raise CacheFull(
            f"expected at most {num_free + len(victims)} blocks to load, for which the "
            f"device pool has pages, got {len(loads)}",
            "hashes",
        )
    saves = tiers.only_on_device(victims)
    eviction = HostEviction()
    if saves:
        leaving = {device.hashes[page] for page in victims}
        eviction = tiers.plan_host_eviction(len(saves), keep=loads, leaving=leaving, wait=True)
        if eviction.wait is not None:
            return eviction.wait
    return AcquirePlan(known, pages, loads, num_free, victims, saves, eviction)


def carry_out(tiers: GroupTiers, plan: AcquirePlan, hashes: Sequence[int], after: Any) -> list[int]:
    """Load the blocks of a plan to the device, and pin them; return their pages."""
    device, host, counts = tiers.device, tiers.host, tiers.counts
    pages, num_fetched = plan.pages, 0
    if plan.loads:
        num_fetched = len(host.fetched.intersection(plan.loads.values()))
        device.use(plan.known, _load(tiers, plan, after))
        pages = device.pages.known_pages(plan.known)
        host.fetched.difference_update(plan.loads.values())
    else:
        host.use(plan.known)
        device.order.touch(reversed(pages))
    tiers.pin(pages)
    counts.host_hits += len(plan.loads) - num_fetched
    counts.device_hits += len(pages) - len(plan.loads)
    counts.misses += len(hashes) - len(pages)
    if tiers.store is not None:
        tiers.store.counts.store_hits += num_fetched
    return pages


def _load(tiers: GroupTiers, plan: AcquirePlan, after: Any) -> dict[int, int]:
    """Queue the loads of a plan, after the saves of what they overwrite; return pages by hash."""
    device, host = tiers.device, tiers.host
    load_after = tiers.after_writers(plan.victims, after)
    pages = device.take(plan.num_free).tolist()
    try:
        host_pages = tiers.evict_from_host(plan.host)
        saves = plan.saves[max(0, len(plan.saves) - len(host_pages)) :]
        saved = tiers.save([device.hashes[page] for page in saves], saves, host_pages, after)
        host.add(saved)
        host.use(plan.known)
        tiers.remove_from_device(plan.victims)
        pages += plan.victims
        tiers.load([*plan.loads.values()], pages, load_after, cached=True)
    except ORDERLY_ERRORS:
        device.give_back(pages)
        raise
    return dict(zip(plan.loads, pages, strict=True))
