"""A cache of blocks by content hash, on the device, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ... import metrics
from ...errors import CacheFull, CaptureError, KvcupyError, ProcessLocal
from ...ops import checks
from ..engine import TransferEngine
from ..identity import hash_list
from ..pages import Pages, StreamCompletion, page_array
from . import policies
from .disk import DiskBlocks
from .leases import Lease, Match, carry_out, evict_some_first, plan_acquire
from .tiers import BlockCompletion, Copy, PageTier, SharedTiers, Tiers

if TYPE_CHECKING:
    from ...devices.protocol import Stream

_PIECE_BYTES = 2**26  # written under one hold of the lock


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

    Failure: a transfer that fails loses the copies that it was to make, and nothing else.

    Threads may share a cache. One lock is held for bookkeeping and while blocks are written to disk
    or read from it, but not while a transfer is waited for. Capture: not legal for `acquire` and
    `insert`.

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
    Match(device=0, host=2, disk=2)
    >>> with cache.acquire([0xA, 0xB, 0xC]) as lease:
    ...     lease.wait_layer(0)
    ...     float(pools[0].k(0)[lease.pages[1], 0, 0, 0]), lease.num_blocks
    (5.0, 2)
    """

    def __init__(
        self, device_pool: Any, host_pool: Any, *,
        disk: Any = None, disk_bytes: int = 0, policy: Any = "lru", write: str = "through",
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
        blocks = None
        if disk is not None:
            blocks = DiskBlocks(disk, int(disk_bytes), host_pool, orders[2])
        device = PageTier("device", device_pool, orders[0])
        host = PageTier("host", host_pool, orders[1])
        self._shared = shared = SharedTiers(Tiers(self.engine, device, host, blocks))
        metrics.follow(
            self, lambda cache: metrics.cache_samples(cache._shared.stats()),
            lambda: metrics.cache_samples(shared.stats()),
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
        """
        keys = hash_list(hashes)
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
        return Match(*counts)

    def acquire(self, hashes: Any, *, after: Any = None) -> Lease:
        """Pin the leading blocks that are cached, and start to load those not on the device.

        Parameters
        ----------
        hashes : as in `match`
        after : the compute stream that has read the pages of evicted blocks for the last time;
            None: the current one

        Returns
        -------
        Lease : empty if none is cached

        Raises
        ------
        TypeError, ValueError, CaptureError : an argument does not fit
        KvcupyError : the cache is closed
        CacheFull : too few pages are free or can be evicted; nothing has changed. Blocks from disk
            pass through pages of the host pool, which has to have enough for all of them at once

        Notes
        -----
        All blocks are loaded together, layer by layer. Blocks on disk are read during the call; one
        that is damaged there is forgotten, and the lease ends before it.
        """
        keys = hash_list(hashes)
        stream = self._stream(after)

        def change(tiers: Tiers) -> Lease | None:
            plan = plan_acquire(tiers, keys)
            if evict_some_first(tiers, plan):
                return None
            return Lease(self._shared, carry_out(tiers, plan, keys, stream))

        while (lease := self._shared.attempt(change)) is None:
            pass
        return lease

    # --- Inserting and evicting ---

    def insert(self, hashes: Any, pages: Any, *, after: Any = None) -> list[int]:
        """Hand pages over to the cache, each with the block of a hash.

        Parameters
        ----------
        hashes : as in `match`; the blocks before them need not be known
        pages : list or integer array (n,) of pages that were allocated from the device pool, each
            once
        after : the compute stream that has written them; None: the current one

        Returns
        -------
        list of int : the pages whose blocks are on the device already; the caller keeps them

        Raises
        ------
        TypeError, ValueError, CaptureError : an argument does not fit; nothing has changed
        KvcupyError : the cache is closed
        """
        keys, page_list = hash_list(hashes), page_array(pages)
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
        """Forget all blocks in every tier.

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

    # --- The file, and statistics ---

    def flush(self) -> None:
        """Wait until saves are done, and until the disk has the blocks that belong there.

        With write="through" those are the blocks of the host tier, for which others are evicted
        from a full disk; if it cannot take them all, those that are evicted last. With "back" they
        are the blocks that were evicted from the host tier.

        Raises
        ------
        OSError : the disk failed; blocks that could not be written stay in host memory
        KvcupyError : the cache is closed
        """
        shared = self._shared
        with shared.opened() as tiers:
            saves = tiers.in_flight.saves()
        self.engine.send()
        for completion in saves:
            completion.synchronize()
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

    def close(self) -> None:
        """Flush, close the file, and free the pages; those of leases when they are released.

        Repeated calls do nothing. Only leases can be used after that.

        Raises
        ------
        OSError : as for `flush`; the cache is closed nevertheless
        """
        if self._shared.closed:
            return
        try:
            self.flush()
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
        `disk_read_bytes`, `disk_read_s`, `disk_write_bytes`, `disk_write_s`: bytes and seconds of
        completed work. `disk_errors`: blocks that could not be written, or were damaged
        """
        with self._shared.locked() as tiers:
            if not self._shared.closed:
                tiers.settle()
            return tiers.stats()

    def _stream(self, after: Any) -> Stream:
        """Return the argument `after` as a stream that is not being captured."""
        stream = self.engine.device.as_stream(after, name="after")
        if stream.capturing:
            raise CaptureError("after: blocks cannot be moved as part of a capture")
        return stream


def _insert(
    tiers: Tiers, hashes: list[int], pages: Pages, stream: Stream, *, through: bool
) -> list[int]:
    """Add blocks to the device tier; return the pages of those that it has already.

    With `through` they are copied to the host tier too, or as many of the first as it can take.
    ValueError unless pages are allocated, listed once each, and not the cache's already.
    """
    device = tiers.device
    ordered = device.pool.allocator.require_allocated(pages)
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
    tiers.device.pool.allocator.busy([copy.page for copy in inserted], written)


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
