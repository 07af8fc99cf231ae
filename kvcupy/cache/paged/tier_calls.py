"""Sequences of a paged cache that begin with known blocks, or that step aside for a while."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...errors import CacheFull
from ..tiered.cache import TieredCache
from ..tiered.prefix import hash_list
from .content_calls import PagedContents
from .sequence import CachedSequence


class Away:
    """Where an offloaded sequence is: pages of the host pool, and the save that fills them."""

    def __init__(self, tiers: TieredCache, pages: Any, saved: Any) -> None:
        self.pages = pages
        self.saved = saved
        self._tiers = tiers

    def drop(self) -> None:
        """Give the pages back, as soon as no transfer touches them."""
        self._tiers.host_pool.allocator.free(self.pages)


class PagedTiers(PagedContents):
    """Sequences whose blocks a tiered cache keeps, in host memory and on disk too."""

    _tiers: TieredCache | None = None

    def attach(self, tiers: TieredCache) -> None:
        """Use a tiered cache, which shares the pages of this one.

        From then on blocks that it may let go make room for new tokens; `num_available_pages` does
        not count them.

        Parameters
        ----------
        tiers : a TieredCache whose `device_pool` is the `pool` of this cache. One tiered cache
            belongs to one paged cache

        Raises
        ------
        TypeError, ValueError : it is none, or of another pool, or there is one already
        """
        if not isinstance(tiers, TieredCache):
            raise TypeError(f"tiers: expected a TieredCache, got {tiers!r}")
        if tiers.device_pool is not self.pool:
            raise ValueError("tiers: expected one whose device_pool is the pool of this cache")
        if self._tiers is not None:
            raise ValueError("tiers: expected to be attached once, got a second one")
        self._tiers = tiers
        self._sequences.make_room = self._make_room

    def add_sequence(self, seq: Hashable, hashes: Any = None) -> None:
        """Add a sequence, with the tokens that are known already if it has hashes.

        Parameters
        ----------
        hashes : of the blocks of its prompt, a page each, as `block_hashes` gives them; they need a
            tiered cache (`attach`). The leading blocks that it knows are the sequence's from the
            start: `sequence_length` tells how many tokens need not be computed. The full pages of
            the others go to the tiered cache when the sequence is removed

        Raises
        ------
        ValueError : the sequence exists, a hash comes twice, or there is no tiered cache
        CacheFull : pages for known blocks cannot be had; nothing has changed

        Notes
        -----
        Stream: blocks come in the background; the attention of each layer waits for its own part.
        What hashes say of tokens is the caller's word. A prompt whose last token is needed for its
        logits leaves out the block that ends it.
        """
        if hashes is None:
            super().add_sequence(seq)
            return
        tiers = self._require_tiers("hashes")
        self._sequences.require_new(seq, "seq")
        keys = hash_list(hashes)
        if len(set(keys)) < len(keys):
            raise ValueError("hashes: expected each once, as a chain of them has")
        lease = tiers.acquire(keys, after=self._behind_all())
        self._sequences.share(seq, lease).hashes = keys

    def remove_sequence(self, seq: Hashable) -> None:
        """Remove a sequence, in any order; pages that no other shares become free.

        Full pages of its own whose hashes are known go to the tiered cache instead.

        Raises
        ------
        UnknownSequence : there is no such sequence
        KvcupyError : it belongs to the running step
        """
        sequence = self._sequences.find(seq)
        self._steps.require_outside(seq)
        self._sequences.remove(seq, self._publish(sequence))

    def offload(self, seq: Hashable) -> None:
        """Move a sequence to host memory, and let its pages go.

        Raises
        ------
        UnknownSequence : there is no such sequence
        ValueError : it is offloaded already, its tree is not committed, or there is no tiered cache
        CacheFull : the host pool has no room, and can make none; nothing has changed
        KvcupyError : it belongs to the running step

        Notes
        -----
        Stream: the copy waits for all steps so far. Its pages are free when it has read them, those
        that others share when these let go. What is left of the sequence is its length; it can be
        removed. Bytes: its pages, those that others share included.
        """
        tiers = self._require_tiers("seq")
        sequence = self._settled(seq)
        if sequence.num_pages == 0:
            return
        pages = tiers.take_host_pages(sequence.num_pages)
        try:
            with self._steps.turn(self._steps.copy_stream, sequence):
                pass  # what it waits for, the save waits for too
            saved = tiers.engine.save(sequence.pages, pages, after=self._steps.copy_stream)
            tiers.engine.flush()
        except BaseException:
            tiers.host_pool.allocator.free(pages)
            raise
        if len(self._sequences.owned(sequence, sequence.num_pages)) < sequence.num_pages:
            # Whoever shares a page may soon have it alone, and write while it is still read.
            self._steps.turns.leave(tiers.engine.save_stream)
        self._sequences.leave(sequence, Away(tiers, pages, saved))

    def onboard(self, seq: Hashable) -> None:
        """Bring a sequence back that was offloaded; one that is here stays as it is.

        Raises
        ------
        UnknownSequence : there is no such sequence
        CacheFull : there are too few pages; nothing has changed
        DeviceError : it could not be saved when it was offloaded; all that is left is to remove it

        Notes
        -----
        Stream: it comes in the background, layer by layer; the attention of each layer waits for
        its own part. The host waits for the save, if that is not done yet.
        """
        sequence = self._sequences.find(seq)
        away = sequence.away
        if away is None:
            return
        tiers = self._require_tiers("seq")
        away.saved.synchronize()
        pages = self._sequences.allocate(len(away.pages))
        try:
            loaded = tiers.engine.load(away.pages, pages, after=self._behind_all())
            tiers.engine.flush()
        except BaseException:
            self.pool.allocator.free(pages)
            raise
        self._sequences.come_back(sequence, pages, loaded)
        away.drop()

    # --- Parts ---

    def _make_room(self, num_pages: int) -> None:
        """Let blocks leave the device, for so many pages more than are free by now."""
        tiers, pages = self._require_tiers("seq"), self.pool.allocator
        try:
            tiers.evict(num_pages)
        except CacheFull:  # pages that transfers still touch are free soon
            in_flight = pages.num_pages - pages.num_allocated - pages.num_free
            tiers.evict(max(0, num_pages - in_flight))

    def _publish(self, sequence: CachedSequence) -> set[int]:
        """Give the tiered cache the pages that only a sequence has; return those that it took."""
        tiers = self._tiers
        if tiers is None or tiers.closed or sequence.arriving or sequence.away:
            return set()
        count = min(len(sequence.hashes), sequence.committed // self.pool.page_size)
        own = self._sequences.owned(sequence, count)
        pages = sequence.pages[own].tolist()
        if not pages:
            return set()
        hashes = [sequence.hashes[i] for i in own.tolist()]
        unneeded = tiers.insert(hashes, pages, after=self._behind_all())
        return set(pages) - set(unneeded)

    def _behind_all(self) -> Any:
        """Return a stream that waits for all that has been done with the pages so far."""
        with self._steps.turn(self._steps.copy_stream):
            return self._steps.copy_stream

    def _require_tiers(self, name: str) -> TieredCache:
        if self._tiers is None:
            raise ValueError(f"{name}: expected a cache with a tiered cache; call attach first")
        return self._tiers
