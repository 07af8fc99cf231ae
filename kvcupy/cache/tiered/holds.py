"""Blocks held in host memory, for an engine that owns the pages of the device.

    store --hold--> host page, held --load--> a device page of the engine
    a device page of the engine --save--> host page

The device tier of the cache stays empty: the engine decides which device page has which block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import checks
from ...errors import CacheFull, KvcupyError, ProcessLocal
from ...streams import stream_after
from ..pages import page_array
from .in_flight import BlockCompletion
from .leases import LeaseCompletion
from .tiers import GroupTiers, Wait

if TYPE_CHECKING:
    from ..pages import Pages
    from .changes import Described


class HeldBlocks(ProcessLocal):
    """Leading blocks of a prefix in host memory, held until their release. Made by `hold`.

    Attributes
    ----------
    num_blocks : number of leading blocks of the requested hashes
    pages : int64 (num_blocks,), the host page of each block, read-only
    sources : where `hold` has found each block: "host" or "store"
    released : whether `release` was called
    """

    def __init__(
        self, tiers: GroupTiers, pages: list[int], sources: list[str], num_requested: int
    ) -> None:
        self.num_blocks = len(pages)
        self.pages: Pages = np.array(pages, np.int64)
        self.pages.flags.writeable = False
        self.sources = sources
        self.released = False
        self._tiers = tiers
        self._held = pages
        self._num_requested = num_requested

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<HeldBlocks, {self.num_blocks} of {self._num_requested}, {state}>"

    def __enter__(self) -> HeldBlocks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def load(
        self, pages: Any, *,
        after: Any = None, first: int = 0, blocks: Sequence[int] | None = None,
    ) -> LeaseCompletion:  # fmt: skip
        """Start to load blocks into device pages of the caller.

        Parameters
        ----------
        pages : list or integer array (n,) of pages of the device pool, for n blocks from `first` on
        after : compute stream with the last uses of the pages; None for the current stream; False
            if no work uses them
        first : number of the first block
        blocks : numbers of the n blocks, in place of `first`

        Returns
        -------
        Completion : also has `wait_layer(layer, stream)`. It fails if a block has not arrived in
            host memory; the pages are then undefined

        Raises
        ------
        TypeError, ValueError : an argument is invalid, or there are fewer than n blocks
        CaptureError : `after` is being captured
        KvcupyError : the blocks have been released, or the cache is closed
        """
        stream = stream_after(self._tiers.engine.device, after, "a move of blocks")
        targets = page_array(pages).tolist()
        checks.require_int(first, "first")
        numbers = range(first, first + len(targets)) if blocks is None else blocks
        if len(numbers) != len(targets):
            raise ValueError(f"pages: expected {len(numbers)} like blocks, got {len(targets)}")
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.num_blocks:
            raise ValueError(
                f"pages: expected at most {self.num_blocks} blocks, got {len(targets)} from "
                f"{min(numbers)} on"
            )
        sources = [self._held[number] for number in numbers]

        def step() -> BlockCompletion:
            if self.released:
                raise KvcupyError("the blocks have been released: their pages may be reused")
            return self._tiers.load(sources, targets, stream, cached=False)

        return LeaseCompletion(self._tiers, (self._tiers.run(step),))

    def release(self) -> None:
        """Let the blocks be evicted again; loads in flight are unaffected. Idempotent."""
        tiers = self._tiers
        if not (self.released or tiers.guard.is_broken):
            with tiers.lock, tiers.guard:  # also legal after the cache is closed
                if not self.released:
                    self.released = True
                    for page in self._held:
                        tiers.host.release(page)
        self.released = True


def hold(tiers: GroupTiers, blocks: Described, seconds: float) -> HeldBlocks:
    """Hold the leading blocks of a prefix in host memory, fetched from the stores if necessary."""
    store, hashes = tiers.store, blocks.hashes
    arrivals = None if store is None else store.fetch(tiers, blocks)

    def step() -> HeldBlocks:
        host, counts = tiers.host, tiers.counts
        known = hashes[: host.pages.count_leading(hashes)]
        host.use(known)
        pages = host.pages.known_pages(known)
        sources = ["store" if page in host.fetched else "host" for page in pages]
        for page in pages:
            host.hold(page)
        counts.host_hits += sources.count("host")
        counts.misses += len(hashes) - len(known)
        if store is not None:
            store.counts.store_hits += sources.count("store")
            host.fetched.difference_update(pages)
            if arrivals is not None:
                store.release(tiers, arrivals)
        return HeldBlocks(tiers, pages, sources, len(hashes))

    try:
        if store is not None and arrivals is not None:
            store.await_arrivals(tiers, arrivals, seconds)
        return tiers.run(step)
    except BaseException:
        if arrivals is not None:
            tiers.release_arrivals(arrivals)
        raise


def save(
    tiers: GroupTiers, blocks: Described, pages: Sequence[int], after: Any, *, wait: bool = False
) -> LeaseCompletion:
    """Save device pages of a caller; blocks without a host page are skipped, unless `wait`."""
    hashes = blocks.hashes

    def step() -> list[BlockCompletion] | Wait:
        host = tiers.host
        fresh: dict[int, int] = {}
        for hash, page in zip(hashes, pages, strict=True):
            if hash not in host.pages:
                fresh.setdefault(hash, page)
        saved: dict[int, int] = {}
        if fresh:
            plan = tiers.plan_host_eviction(len(fresh), keep=set(hashes), wait=wait)
            if plan.wait is not None:
                return plan.wait
            if wait and plan.can_grow:
                raise CacheFull(
                    "expected room in host memory, got blocks that are not written to the stores "
                    "yet",
                    "hashes",
                )
            targets = tiers.evict_from_host(plan)
            count = len(targets)
            saved = tiers.save([*fresh][:count], [*fresh.values()][:count], targets, after)
        if saved:
            tiers.describe(blocks, saved)
        host.use(hashes, saved)
        tiers.counts.inserted += len(saved)
        completions = [host.arriving(page) for page in saved.values()]
        return list({id(c): c for c in completions if c is not None}.values())

    return LeaseCompletion(tiers, tuple(tiers.run(step)))
