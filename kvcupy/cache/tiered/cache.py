"""A cache of blocks by content hash, on the device, in host memory and on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import metrics
from ...errors import CacheFull, KvcupyError, ProcessLocal
from ...ops import checks
from ...streams import stream_after
from ..engine import TransferEngine
from ..hashes import hash_list
from ..pages import Pages, StreamCompletion, page_array
from . import policies
from .disk import DiskBlocks
from .leases import Lease, Match, carry_out, evict_some_first, plan_acquire
from .store_tier import JOIN_S, Arrivals, StoreTier
from .tiers import BlockCompletion, Copy, Counts, PageTier, SharedTiers, Tiers, counted

if TYPE_CHECKING:
    from ...devices.protocol import Stream

_PIECE_BYTES = 2**26  # written under one hold of the lock
_WAITS = ("complete", "best_effort", "timeout")


class TieredCache(ProcessLocal):
    """Keeps blocks, each a page of every layer, by hashes that identify a prefix up to its end.

    Parameters
    ----------
    device_pool, host_pool : pools as for `TransferEngine`. They may have other users too
    disk : path of a file, or None. An existing file is opened with the blocks that it has
    disk_bytes : size of the file
    policy : which block of a tier is evicted first: "lru", "fifo", "lfu", "2q" (scan resistant), or
        a class, of which each tier gets an instance (`policies.Policy` says its methods)
    write : when a block is copied to the next tier. "through": to host memory when it is inserted,
        as far as pages can be freed there, and to disk when it is flushed or evicted from host
        memory. "back": when it is evicted
    shared : a `SharedStore` of the host pool, or None; or anything that has its `match`, `put` and
        `get`, which threads may call. The caches of other processes on the same store find the
        blocks of this one, and it theirs. Closing the cache does not close the store
    shared_write : when a block is put into the store, unless that knows it. "through": when it is
        whole in host memory. "back": before it is evicted from host memory, while neither the
        device nor the store has it. "second_use": when it is acquired for the second time
    shared_prefetch : the share of the host pool's pages that blocks from the store may take while
        they are on their way, or have arrived and wait for the rest of their prefix

    Attributes
    ----------
    engine : the TransferEngine between the pools
    device_pool, host_pool

    Raises
    ------
    TypeError, ValueError, OSError : an argument does not fit, or the file cannot be opened

    Notes
    -----
    Blocks: the tiers are inclusive: a block that is loaded stays in the lower tiers too, until it
    is evicted there. No block is lost while the tiers below have space.

    Stream: `insert` takes pages that are complete on its stream `after`. `acquire` may overwrite
    evicted pages, which only work before its `after` may still read. Pages of a released lease must
    not be read any more.

    Failure: a transfer that fails loses the copies that it was to make, and nothing else. A shared
    store that fails, is late or lost makes blocks missing, and is counted; no call raises for it.

    Threads may share a cache. One lock is held for bookkeeping and while blocks are written to disk
    or read from it, but not while a transfer or a shared store is waited for. With a store the
    cache has a thread of its own, which ends when the cache is closed or gone; a forked child has
    to make another cache. Capture: not legal for `acquire` and `insert`.

    Examples
    --------
    >>> import kvcupy as kv
    >>> pools = [kv.KVPool(n, 2, 3, 1, 8, dtype="fp16", device="host") for n in (4, 16)]
    >>> cache = TieredCache(*pools)
    >>> pages = pools[0].allocator.alloc(2)
    >>> for layer in range(3):
    ...     pools[0].k(layer)[pages] = 5
    >>> cache.insert([0xA, 0xB], pages)
    []
    >>> cache.evict(2)
    >>> cache.match([0xA, 0xB, 0xC])
    Match(device=0, host=2, disk=2, shared=2)
    >>> with cache.acquire([0xA, 0xB, 0xC]) as lease:
    ...     lease.wait_layer(0)
    ...     float(pools[0].k(0)[lease.pages[1], 0, 0, 0]), lease.num_blocks
    (5.0, 2)
    """

    def __init__(
        self, device_pool: Any, host_pool: Any, *,
        disk: Any = None, disk_bytes: int = 0, policy: Any = "lru", write: str = "through",
        shared: Any = None, shared_write: str = "through", shared_prefetch: float = 0.25,
    ) -> None:  # fmt: skip
        if not isinstance(write, str) or write not in ("through", "back"):
            raise ValueError(f'write: expected "through" or "back", got {write!r}')
        checks.require_int(disk_bytes, "disk_bytes")
        if not 0 <= disk_bytes < 2**62:
            raise ValueError(f"disk_bytes: expected 0 to 2**62 - 1, got {disk_bytes}")
        if disk is None and disk_bytes:
            raise ValueError(f"disk_bytes: expected 0 where there is no disk, got {disk_bytes}")
        orders = [policies.make(policy) for _ in range(3)]
        self._policy = policy
        self._through = write == "through"
        self.engine = TransferEngine(device_pool, host_pool)
        self.device_pool, self.host_pool = device_pool, host_pool
        store = None
        if shared is not None:
            store = StoreTier(shared, host_pool, shared_write, shared_prefetch)
        self._store = store
        blocks = None
        if disk is not None:
            blocks = DiskBlocks(disk, int(disk_bytes), host_pool, orders[2])
        device = PageTier("device", device_pool, orders[0])
        host = PageTier("host", host_pool, orders[1])
        parts = Tiers(self.engine, device, host, blocks, store)
        self._shared = tiers = SharedTiers(parts)
        if store is not None:
            store.attach(self, tiers)
        metrics.follow(
            self, lambda cache: metrics.cache_samples(cache._shared.stats()),
            partial(_final_samples, parts.counts, blocks, store),
        )  # fmt: skip

    def __repr__(self) -> str:
        counts = self.stats()
        tiers = [f"{counts[f'{name}_blocks']} {name}" for name in ("device", "host", "disk")]
        return f"<TieredCache of {', '.join(tiers)} blocks>"

    # --- Looking blocks up ---

    def match(self, hashes: Any) -> Match:
        """Return how many leading blocks are on the device, in host memory too, and in any tier.

        Parameters
        ----------
        hashes : list or array of ints of 64 or 128 bits, from the first block of a prefix on

        Raises
        ------
        TypeError, ValueError : `hashes` are not such numbers
        KvcupyError : the cache is closed

        Notes
        -----
        A shared store is asked once, for all blocks that no tier has. This waits for the answer.
        """
        keys = self._hashes(hashes)
        with self._shared.opened() as tiers:
            device, host = tiers.device.copies, tiers.host.copies
            counts, i = [], 0
            for known in (
                device.__contains__,
                lambda hash: hash in device or hash in host,
                tiers.__contains__,
            ):
                while i < len(keys) and known(keys[i]):
                    i += 1
                counts.append(i)
            if self._store is None:
                return Match(counts[0], counts[1], counts[2], counts[2])
            missing = list(dict.fromkeys([hash for hash in keys[i:] if hash not in tiers]))
        stored = self._store.count_known(missing)
        shared = len(keys) if stored == len(missing) else keys.index(missing[stored])
        return Match(counts[0], counts[1], counts[2], shared)

    def prefetch(self, hashes: Any) -> None:
        """Start to bring the leading blocks that only the shared store has to host memory.

        Parameters
        ----------
        hashes : as in `match`, such as those of a request that waits for its turn

        Raises
        ------
        TypeError, ValueError : `hashes` are not such numbers
        KvcupyError : the cache is closed

        Notes
        -----
        Nothing is waited for; without a shared store this does nothing. What arrives is evicted
        like any other block, to be acquired or not.
        """
        keys = self._hashes(hashes)
        with self._shared.opened() as tiers:
            if self._store is not None:
                self._store.request(tiers, keys, urgent=False)

    def acquire(
        self, hashes: Any, *,
        after: Any = None, wait: str = "complete", deadline_s: float | None = None,
    ) -> Lease:  # fmt: skip
        """Pin the leading blocks that are cached, and start to load those not on the device.

        Parameters
        ----------
        hashes : as in `match`
        after : the compute stream that has read the pages of evicted blocks for the last time;
            None: the current one; False: no work has
        wait : for blocks that only the shared store has. "complete" and "timeout": until all that
            it has of the prefix have arrived in host memory, or the deadline. "best_effort": not at
            all; what has arrived is taken. What is late is missing, and goes on arriving for others
        deadline_s : seconds from the call; None: with "complete" 30, and with "timeout" 1, and 0.25
            for every 1,024 tokens that are missing

        Returns
        -------
        Lease : empty if none is cached

        Raises
        ------
        TypeError, ValueError, CaptureError : an argument does not fit
        KvcupyError : the cache is closed
        CacheFull : too few pages are free or can be evicted; nothing has changed, but that blocks
            of the shared store may have arrived in host memory. Blocks from disk pass through pages
            of the host pool, which has to have enough for all of them at once

        Notes
        -----
        All blocks are loaded together, layer by layer. Blocks on disk are read during the call; one
        that is damaged there is forgotten, and the lease ends before it. Where there are too few
        pages for blocks from the shared store too, those are missing.

        Source: the ways to wait and the deadline of "timeout" are those of sgl-project/sglang
        `hicache_storage_prefetch_policy`; 30 s is its longest.
        """
        keys = self._hashes(hashes)
        seconds = self._patience(wait, deadline_s)
        stream = self._stream(after)
        if self._store is None:
            return self._acquire(keys, stream)
        arrivals = self._wait_for_arrivals(self._store, keys, wait, seconds)
        if arrivals is None:
            return self._acquire(keys, stream)
        try:
            return self._acquire(keys, stream)
        except CacheFull:
            if not arrivals.held:
                raise
        finally:
            with self._shared.locked() as tiers:
                self._store.release(tiers, arrivals)
        return self._acquire(keys[: keys.index(arrivals.hashes[0])], stream)

    def _acquire(self, keys: list[int], stream: Stream) -> Lease:
        """Lease the leading blocks that some tier of this cache has."""

        def change(tiers: Tiers) -> Lease | None:
            plan = plan_acquire(tiers, keys)
            if evict_some_first(tiers, plan):
                return None
            return Lease(self._shared, carry_out(tiers, plan, keys, stream))

        while (lease := self._shared.attempt(change)) is None:
            pass
        return lease

    def _wait_for_arrivals(
        self, store: StoreTier, keys: list[int], wait: str, seconds: float | None
    ) -> Arrivals | None:
        """Start to fetch missing blocks, and wait for them; None if nothing was waited for."""
        with self._shared.opened() as tiers:
            if wait == "best_effort":
                store.note_late(store.request(tiers, keys, urgent=False))
                return None
            arrivals = store.expect(tiers, keys)
        if arrivals is None:
            return None
        if seconds is None:
            tokens = len(arrivals.hashes) * self.host_pool.page_size
            seconds = 30.0 if wait == "complete" else 1.0 + 0.25 * tokens / 1024
        try:
            arrivals.settled.wait(seconds)
        except BaseException:  # an interrupt
            with self._shared.locked() as tiers:
                store.expire(arrivals)
                store.release(tiers, arrivals)
            raise
        with self._shared.locked():
            store.expire(arrivals)
        return arrivals

    # --- Inserting and evicting ---

    def insert(self, hashes: Any, pages: Any, *, after: Any = None) -> list[int]:
        """Hand pages over to the cache, each with the block of a hash.

        Parameters
        ----------
        hashes : as in `match`; the blocks before them need not be known
        pages : list or integer array (n,) of pages that were allocated from the device pool, each
            once
        after : the compute stream that has written them; None: the current one; False: there is
            nothing to wait for

        Returns
        -------
        list of int : the pages whose blocks are on the device already; the caller keeps them

        Raises
        ------
        TypeError, ValueError, CaptureError : an argument does not fit; nothing has changed
        KvcupyError : the cache is closed
        """
        keys, page_list = self._hashes(hashes), page_array(pages)
        if len(keys) != len(page_list):
            raise ValueError(f"pages: expected {len(keys)} like hashes, got {len(page_list)}")
        stream = self._stream(after)
        return self._shared.attempt(
            lambda tiers: _insert(tiers, keys, page_list, stream, through=self._through)
        )

    def evict(self, num_blocks: int) -> None:
        """Evict blocks from the device, and free their pages.

        Parameters
        ----------
        num_blocks : how many, of those that are not leased

        Raises
        ------
        TypeError, ValueError : `num_blocks` is not an int, or negative
        KvcupyError : the cache is closed
        CacheFull : fewer can be evicted; nothing has changed

        Notes
        -----
        A block that no lower tier has is saved first, in the background: its page becomes free
        when that is done, and `alloc` waits for it.
        """
        checks.require_int(num_blocks, "num_blocks")
        if num_blocks < 0:
            raise ValueError(f"num_blocks: expected a number of blocks, got {num_blocks}")

        def change(tiers: Tiers) -> int:
            victims = tiers.device.choose(left)
            if len(victims) < left:
                raise CacheFull(
                    f"num_blocks: expected at most {len(victims)}, which are on the device and "
                    f"not leased, got {left}"
                )
            return tiers.evict_from_device(victims)

        left = int(num_blocks)
        while (left := left - self._shared.attempt(change)) > 0:
            pass

    def take_host_pages(self, n: int) -> Any:
        """Allocate pages of the host pool, evicting as many blocks as that takes.

        Returns
        -------
        int64 (n,) : the pages, which are the caller's until freed to `host_pool.allocator`

        Raises
        ------
        TypeError, ValueError : `n` is not an int, or negative
        KvcupyError : the cache is closed
        CacheFull : fewer pages can be freed; nothing has changed
        """
        checks.require_int(n, "n")
        if n < 0:
            raise ValueError(f"n: expected a number of pages, got {n}")

        def change(tiers: Tiers) -> Pages:
            pages = tiers.evict_from_host(tiers.plan_host_eviction(int(n), required=int(n)))
            tiers.host.owned[pages] = False  # they are the caller's now
            return pages

        try:
            return self._shared.attempt(change)
        except CacheFull as error:
            message = f"n: expected room for {n} pages in host memory, got less"
            raise CacheFull(message) from error

    def clear(self) -> None:
        """Forget all blocks in every tier; those in a shared store stay, for others.

        Raises
        ------
        KvcupyError : a block is leased; nothing has changed; or the cache is closed
        """
        orders = [policies.make(self._policy) for _ in range(3)]
        with self._shared.opened() as tiers:
            if tiers.num_leased:
                raise KvcupyError(f"{tiers.num_leased} blocks are leased: release them first")
            tiers.device.clear(orders[0])
            tiers.host.clear(orders[1])
            if tiers.disk is not None:
                tiers.disk.clear(orders[2])
            if self._store is not None:
                self._store.forget()

    # --- The file, and statistics ---

    def flush(self, *, deadline_s: float = 30.0) -> None:
        """Wait until saves are done, and until disk and store have the blocks that belong there.

        With write="through" the disk gets the blocks of the host tier, for which others are evicted
        from a full disk; if it cannot take them all, those that are evicted last. With "back" it
        has the blocks that were evicted from the host tier. The shared store gets the blocks that
        are queued for it by `shared_write`.

        Parameters
        ----------
        deadline_s : seconds that the shared store has for that; then blocks may still be queued,
            as `stats` says

        Raises
        ------
        OSError : the disk failed; blocks that could not be written stay in host memory
        TypeError, ValueError : `deadline_s` is not a number, or negative
        KvcupyError : the cache is closed
        """
        deadline = time.monotonic() + seconds_of(deadline_s)
        shared = self._shared
        with shared.opened() as tiers:
            saves = tiers.in_flight.saves()
        self.engine._send()
        for completion in saves:
            completion.synchronize()
        if self._store is not None:
            self._store.drain(deadline)
        with shared.opened() as tiers:
            disk = tiers.disk
            if disk is None:
                return
            order = tiers.host.order
            hashes = list(order.victims())[-disk.num_slots :] if self._through else []
        keep = frozenset(hashes)
        size = max(1, _PIECE_BYTES // disk.page_bytes)
        failed: dict[int, OSError] = {}
        for start in range(0, len(hashes), size):
            piece = hashes[start : start + size]

            def change(tiers: Tiers, piece: Sequence[int] = piece) -> dict[int, OSError]:
                return _write(tiers, disk, piece, keep)

            failed |= shared.attempt(change)
        disk.flush()
        for error in failed.values():
            raise error

    def close(self, *, deadline_s: float = 30.0) -> None:
        """Flush, close the file, and free the pages; those of leases when they are released.

        Repeated calls do nothing. Only leases can be used after that. Pages that a call of the
        shared store still touches are freed when it returns.

        Parameters
        ----------
        deadline_s : as for `flush`; blocks that are still queued are not put

        Raises
        ------
        TypeError, ValueError : `deadline_s` is not a number, or negative; nothing has changed
        OSError : as for `flush`; the cache is closed nevertheless
        """
        seconds_of(deadline_s)
        if self._shared.closed:
            return
        try:
            self.flush(deadline_s=deadline_s)
        except KvcupyError:
            if not self._shared.closed:  # else another thread was first
                raise
        finally:
            with self._shared.locked() as tiers:
                if not self._shared.closed:
                    self._shared.closed = True
                    for tier in (tiers.device, tiers.host):
                        tier.clear(policies.make("fifo"))
                    if tiers.disk is not None:
                        tiers.disk.close()
                    if self._store is not None:
                        self._store.forget()
            if self._store is not None:
                self._store.stop(join_s=JOIN_S)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._shared.closed

    def stats(self) -> dict[str, float]:
        """Return statistics since the cache was made.

        Returns
        -------
        dict of numbers. `device_blocks`, `host_blocks`, `disk_blocks`: in each tier now.
        `device_hits`, `host_hits`, `disk_hits`, `misses`: blocks asked of `acquire`, by the
        highest tier that had them. `inserted`; `device_evicted`, `host_evicted`, `disk_evicted`;
        `lost`: blocks that left the last tier that had them, for want of space or by a failure.
        `failed_loads`, `failed_saves`: blocks. `load_bytes`, `load_s`, `save_bytes`, `save_s`,
        `disk_read_bytes`, `disk_read_s`, `disk_write_bytes`, `disk_write_s`: bytes, as they are
        stored, and seconds of completed work. `disk_errors`: blocks that could not be written or
        converted, or were damaged.

        With a shared store also `shared_hits`: blocks acquired that had come from there for it;
        of those asked of the store, `shared_misses`: that it did not have or deliver;
        `shared_late`: that an acquire did not wait for any longer; `shared_skipped`: for which
        there was no host page; `shared_stored`, `shared_known`, `shared_full`, `shared_failed`:
        blocks put, by its answer; `shared_dropped`: that left host memory before they were put;
        `shared_queued`: to be put; `shared_errors`: calls that raised; `shared_get_bytes`,
        `shared_get_s`, `shared_put_bytes`, `shared_put_s`
        """
        with self._shared.locked() as tiers:
            if not self._shared.closed:
                tiers.settle()
            return tiers.stats()

    def _hashes(self, hashes: Any) -> list[int]:
        """Return the argument `hashes` as ints, of 128 bits where processes share them."""
        keys = hash_list(hashes)
        if self._store is not None and keys and min(keys) < 2**64:
            raise ValueError(
                "hashes: expected hashes of 128 bits (kv.block_hashes with bits=128) where there "
                f"is a shared store, got {min(keys)}"
            )
        return keys

    def _patience(self, wait: Any, deadline_s: Any) -> float | None:
        """Check the arguments `wait` and `deadline_s`, and return the seconds."""
        if not isinstance(wait, str) or wait not in _WAITS:
            raise ValueError(f"wait: expected one of {', '.join(_WAITS)}, got {wait!r}")
        return None if deadline_s is None else seconds_of(deadline_s)

    def _stream(self, after: Any) -> Stream:
        """Return the argument `after` as a stream that is not being captured."""
        return stream_after(self.engine.device, after, "a move of blocks")


def _final_samples(
    counts: Counts, disk: DiskBlocks | None, store: StoreTier | None
) -> Iterable[tuple[str, Any, float]]:
    return metrics.cache_samples(counted(counts, disk, store))


def _insert(
    tiers: Tiers, hashes: list[int], pages: Pages, stream: Stream, *, through: bool
) -> list[int]:
    """Add blocks to the device tier; return the pages of those that it has already.

    With `through` they are copied to the host tier too, or as many of the first as it can take.
    ValueError unless pages are allocated, listed once each, and not the cache's already.
    """
    device = tiers.device
    ordered = device.pool.allocator._require_allocated(pages)
    if len(owned := ordered[device.owned[ordered]]):
        raise ValueError(f"pages: expected the caller's, got {owned[0]}, which is the cache's")
    written = StreamCompletion(stream)
    is_written = written.done() and written.failure is None  # this may raise: nothing has changed
    inserted: dict[int, Copy] = {}
    unneeded = []
    for hash, page in zip(hashes, pages.tolist(), strict=True):
        if hash in inserted or hash in device.copies:
            unneeded.append(page)
        else:
            inserted[hash] = Copy(hash, page)
    saved = {}
    if through:
        saves = [copy for copy in inserted.values() if copy.hash not in tiers.host.copies]
        plan = tiers.plan_host_eviction(len(saves), keep=inserted, wait=False)
        host_pages = tiers.evict_from_host(plan)
        saved = tiers.save_or_free(saves[: len(host_pages)], host_pages, stream)
    if inserted and not is_written:
        _hold(tiers, list(inserted.values()), written)
    device.use(hashes, inserted)
    tiers.host.use(hashes, saved)
    if tiers.disk is not None:
        tiers.disk.use(hashes)
    tiers.counts.inserted += len(inserted)
    return unneeded


def _hold(tiers: Tiers, inserted: list[Copy], written: StreamCompletion) -> None:
    """Let nothing read the pages, or overwrite them, before their stream has written them."""
    completion = tiers.in_flight.add(BlockCompletion("insert", written, inserted, ()))
    for copy in inserted:
        copy.filled_by = completion
    tiers.device.pool.allocator._mark_busy([copy.page for copy in inserted], written)


def _write(
    tiers: Tiers, disk: DiskBlocks, hashes: Sequence[int], keep: Collection[int]
) -> dict[int, OSError]:
    """Write those blocks that are in the host tier but not on disk; return what failed."""
    copies = [
        copy
        for hash in hashes
        if hash not in disk.slots and (copy := tiers.host.copies.get(hash)) is not None
    ]
    tiers.require_arrived(copies)
    slots = disk.choose(len(copies) - disk.num_free, keep)
    return tiers.write(disk, copies[: disk.num_free + len(slots)], slots)


def seconds_of(deadline_s: Any) -> float:
    """Return the argument `deadline_s`, at most the longest time that a thread can wait."""
    checks.require_number(deadline_s, "deadline_s")
    if not deadline_s >= 0:
        raise ValueError(f"deadline_s: expected seconds from 0 on, got {deadline_s}")
    return float(min(deadline_s, threading.TIMEOUT_MAX))
