"""TieredCache: blocks by content hash, on the device, in host memory and on disk."""

from __future__ import annotations

import threading
import time
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial, wraps
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import metrics
from ...config import config
from ...errors import CacheFull, KvcupyError, ProcessLocal
from ...formats import StoreWrite, Write
from ...ops import checks
from ...streams import stream_after
from ..encryption import key_for
from ..engine import TransferEngine
from ..hazards import StreamCompletion
from ..identity import PoolIdentity
from ..pages import Pages, hash_list, page_array, token_array
from .changes import Described, Listener, TokenIds
from .disk_blocks import DiskBlocks, DiskMove
from .holds import HeldBlocks, hold, save
from .leases import Lease, LeaseCompletion, Match, acquire
from .order import EvictionOrder, Retentions
from .parts import MASK
from .store_tier import JOIN_TIMEOUT_S, Arrivals, StoreTier, require_options
from .tiers import (
    BlockCompletion,
    Blocked,
    Copy,
    Counts,
    PageTier,
    SharedTiers,
    Tiers,
    copy_of,
    counted,
)

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from .prefixes import TierGroup

_MAX_WRITE_BYTES = 2**26  # written by a flush at once; these pages cannot be evicted meanwhile
_WAITS = ("complete", "best_effort", "timeout")


class TieredCache(ProcessLocal, metaclass=ABCMeta):
    """Caches blocks by hash. A block is a page of every layer; its hash identifies a prefix.

    Parameters
    ----------
    device_pool, host_pool : pools as for `TransferEngine`. Other users may share them
    disk : path of a file, or None. An existing file is opened with its blocks
    disk_bytes : size of the file
    model : a string that distinguishes models whose pools look alike: weights and their revision,
        adapter, rotary settings; at most about 3000 bytes. Blocks of another one are refused
    heads : (first head, number of heads of the model), if this pool has some of the model's heads;
        None: all of them. Without `model` and `heads`, both are the same as in the shared store
    encryption_key : None, or 32 bytes, with which blocks on disk are encrypted and
        authenticated; or a function that returns them, called with the tenant ""
    convert : whether the pools may differ in encoding: blocks are converted on each way
    write : when to copy a block to the next tier. "through": to host memory on insertion, as far as
        pages can be freed there, and to disk on flush or eviction from host memory. "back": on
        eviction
    shared : a `SharedStore` of the host pool, an object with thread-safe methods `match`, `put` and
        `get`, or None. Caches of other processes on the same store share their blocks with this
        one. Closing the cache does not close the store
    shared_write : when to put a block into the store, unless the store has it. "through": once it
        is complete in host memory. "back": before eviction from host memory, if neither the device
        nor the store has it. "second_use": when it is acquired for the second time
    shared_prefetch : maximum fraction of the host pool's pages for blocks from the store that are
        in flight, or that have arrived and wait for the rest of their prefix
    groups : a PagedKVCache with groups of layers, in place of the pools: see Groups. Pass the
        result to its `attach`
    host_bytes : with groups, the bytes of host memory, divided so that all groups have room for the
        same prefixes
    shared_bytes : with groups, the size of a store "shm:NAME" that `shared` names

    Attributes
    ----------
    engine : the TransferEngine between the pools
    device_pool, host_pool

    Raises
    ------
    TypeError, ValueError, OSError : an argument is invalid, or the file cannot be opened

    Notes
    -----
    Blocks: the tiers are inclusive: a loaded block stays in the lower tiers until its eviction
    there. No block is lost while lower tiers have space. The least recently used blocks are evicted
    first; `retain` changes that.

    Stream: `insert` takes pages that are complete on its stream `after`. `acquire` may overwrite
    evicted pages; only work enqueued before its `after` may still read them. Do not read the pages
    of a released lease.

    Failure: a failed transfer loses only its destination copies. If a shared store fails or is
    late, blocks are missing and the failure is counted, but no call raises.

    Groups: a prefix is found if every group can restore it: full attention needs all blocks, a
    window its last blocks and its sink tokens, recurrent layers the state that was kept behind it.
    `acquire` returns a GroupedLease. Each group has its own tiers, the file `disk`.N and its own
    model in its identity; the bytes are divided like host memory. `shared` is a URL, or a function
    that opens a store for a host pool and a model: a store "shm:NAME" becomes one per group,
    "shm:NAME.N"; other stores must keep blocks of different models apart, as `SharedStore` does.
    When a block is lost, the blocks and states that are useless without it are discarded in all
    groups, unless a shared store may have it. States are in host memory and below; `Match.device`
    counts none. `stats` sums the groups, and has `prefix_hits` and `prefix_misses`, in blocks of
    the requested prefixes. `retain` is about the longest prefix that can be restored, so its hashes
    start at the first block.
    Not implemented for groups: `heads`, and `insert`, `hold`, `save` and `take_host_pages`, which
    are for engines that own the pages of the device.

    Threads may share a cache. A lock is held for bookkeeping, but not while waiting for a transfer,
    the disk or a shared store: a slow disk delays only calls that need it. Acquires that read from
    disk do so one after the other. With a store the cache has a thread, which ends when the cache
    is closed or garbage collected. A forked child must make another cache: calls raise KvcupyError.
    Capture: illegal for `acquire` and `insert`.

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
    >>> with cache, cache.acquire([0xA, 0xB, 0xC]) as lease:
    ...     lease.wait_layer(0)
    ...     float(pools[0].k(0)[lease.pages[1], 0, 0, 0]), lease.num_blocks
    (5.0, 2)
    """

    def __init__(
        self, device_pool: Any = None, host_pool: Any = None, *,
        disk: Any = None, disk_bytes: int = 0, model: str = "",
        heads: tuple[int, int] | None = None, encryption_key: Any = None, convert: bool = False,
        write: Write = "through",
        shared: Any = None, shared_write: StoreWrite = "through", shared_prefetch: float = 0.25,
        groups: Any = None, host_bytes: int | None = None, shared_bytes: int | None = None,
    ) -> None:  # fmt: skip
        for name, number in (("host_bytes", host_bytes), ("shared_bytes", shared_bytes)):
            if number is not None:
                raise ValueError(f"{name}: expected None without groups, got {number!r}")
        if not isinstance(write, str) or write not in ("through", "back"):
            raise ValueError(f'write: expected "through" or "back", got {write!r}')
        checks.require_int(disk_bytes, "disk_bytes")
        if not 0 <= disk_bytes < 2**62:
            raise ValueError(f"disk_bytes: expected 0 to 2**62 - 1, got {disk_bytes}")
        if disk is None and disk_bytes:
            raise ValueError(f"disk_bytes: expected 0 where there is no disk, got {disk_bytes}")
        if disk is None and encryption_key is not None:
            raise ValueError("encryption_key: expected None where there is no disk, got a key")
        require_options(shared_write, shared_prefetch)
        self._through = write == "through"
        self.engine = TransferEngine(device_pool, host_pool, convert=convert)
        self.device_pool, self.host_pool = device_pool, host_pool
        identity = _identity(host_pool, model, heads, shared)
        key = None if encryption_key is None else key_for(encryption_key)
        store = None
        if shared is not None:
            store = StoreTier(shared, host_pool, shared_write, shared_prefetch)
        self._store = store
        blocks = None
        retentions = Retentions()
        self._priorities = retentions.priorities
        if disk is not None:
            order = EvictionOrder(self._priorities)
            blocks = DiskBlocks(disk, int(disk_bytes), host_pool, order, identity, key)
        self._needs_long_hashes = store is not None or blocks is not None
        device = PageTier("device", device_pool, self._priorities)
        host = PageTier("host", host_pool, self._priorities)
        parts = Tiers(self.engine, device, host, blocks, store, retentions)
        self._shared = tiers = SharedTiers(parts)
        if store is not None:
            store.attach(self, tiers)
        metrics.follow(
            self, lambda cache: metrics.cache_samples(cache._shared.stats()),
            partial(_final_samples, parts.counts, blocks, store),
        )  # fmt: skip

    if not TYPE_CHECKING:  # type checkers and editors see __init__

        @wraps(__init__, assigned=())
        def __new__(
            cls, device_pool: Any = None, host_pool: Any = None, *, groups: Any = None,
            **options: Any,
        ) -> Any:  # fmt: skip
            """Return a cache of one pool; with `groups` the GroupedTieredCache of their pools."""
            if groups is None:
                return super().__new__(cls)
            if device_pool is not None or host_pool is not None:
                raise ValueError(
                    "device_pool, host_pool: expected None with groups, which have pools"
                )
            if (make := getattr(groups, "_make_tiers", None)) is None:
                raise TypeError(f"groups: expected a PagedKVCache with groups, got {groups!r}")
            return make(**options)

    def __repr__(self) -> str:
        counts = self.stats()
        tiers = [f"{counts[f'{name}_blocks']} {name}" for name in ("device", "host", "disk")]
        return f"<TieredCache of {', '.join(tiers)} blocks>"

    def _follow(self, listener: Listener) -> None:
        """Announce all blocks, and from now on every change, to a listener."""
        with self._shared.lock:
            self._shared.opened().follow(listener)

    def _unfollow(self, listener: Listener) -> None:
        with self._shared.lock:
            if listener in (listeners := self._shared.tiers.listeners):
                listeners.remove(listener)

    # --- Looking blocks up ---

    def match(self, hashes: Any, *, shared: bool = True) -> Match:
        """Count the leading blocks on the device, on device or host, and in any tier.

        Parameters
        ----------
        hashes : list or array of 64-bit or 128-bit ints, starting at the first block of a prefix
        shared : query a shared store once, for all blocks that no tier has, and wait for the answer

        Raises
        ------
        TypeError, ValueError : an argument has other values
        KvcupyError : the cache is closed
        """
        keys = self._hashes(hashes)
        checks.flag(shared, "shared")
        with self._shared.lock:
            tiers = self._shared.opened()
            device, host = tiers.device.pages.parts, tiers.host.pages.parts
            i = 0
            for hash in keys:
                if hash not in device[hash & MASK]:
                    break
                i += 1
            counts = [i]
            known: Callable[[int], bool]
            for known in (
                lambda hash: hash in device[hash & MASK] or hash in host[hash & MASK],
                tiers.readable,
            ):
                while i < len(keys) and known(keys[i]):
                    i += 1
                counts.append(i)
            if self._store is None or not shared:
                return Match(counts[0], counts[1], counts[2], counts[2])
            missing = list(dict.fromkeys([hash for hash in keys[i:] if not tiers.readable(hash)]))
        stored = self._store.count_known(missing)
        num_known = len(keys) if stored == len(missing) else keys.index(missing[stored])
        return Match(counts[0], counts[1], counts[2], num_known)

    def acquire(
        self, hashes: Any, *,
        after: Any = None, wait: str = "complete", deadline_s: float | None = None,
        token_ids: Any = None,
    ) -> Lease:  # fmt: skip
        """Pin the leading cached blocks, and start loading blocks that are not on the device.

        Parameters
        ----------
        hashes : as in `match`
        after : compute stream with the last reads of evicted pages; None for the current stream;
            False if no work reads them
        wait : how to wait for blocks that only the shared store has. "complete" and "timeout":
            until all blocks of the prefix in the store have arrived in host memory, or the
            deadline. "best_effort": do not wait. Late blocks count as misses but stay in flight
        deadline_s : seconds from the call. None: 30 for "complete"; for "timeout", 1 plus 0.25 per
            1,024 missing tokens
        token_ids : as in `insert`

        Returns
        -------
        Lease : empty if no block is cached

        Raises
        ------
        TypeError, ValueError : an argument is invalid
        CaptureError : `after` is being captured
        KvcupyError : the cache is closed
        CacheFull : too few pages are free or can be evicted. Nothing has changed, except that
            blocks of the shared store may have arrived in host memory. Blocks from disk pass
            through the host pool, which must have pages for all of them at once

        Notes
        -----
        All blocks are loaded together, layer by layer. Blocks on disk are read during the call. A
        damaged block is forgotten, and the lease ends before it, as before a block that the disk
        fails to read, which stays. After several failures in a row the disk is skipped for 10 s:
        its blocks count as missing, and evicted blocks are not written. If pages do not suffice for
        blocks from the shared store, these blocks are missing.

        Source: the values of `wait` and the deadline of "timeout" are from sgl-project/sglang
        `hicache_storage_prefetch_policy`; its maximum is 30 s.
        """
        keys = self._hashes(hashes)
        seconds = self._checked_wait(wait, deadline_s)
        tokens = tokens_of(token_ids, len(keys), self.device_pool.page_size)
        return self._acquire(Described.prefix(keys, tokens), self._stream(after), wait, seconds)

    def _acquire(
        self, blocks: Described, stream: Stream, wait: str, seconds: float | None, *,
        send: bool = True,
    ) -> Lease:  # fmt: skip
        """Do as `acquire`; unless `send`, leave the loads in the queue of the engine."""
        lease_of = partial(acquire, self._shared, after=stream, send=send)
        if self._store is None:
            return lease_of(blocks)
        arrivals = self._wait_for_arrivals(self._store, blocks, wait, seconds)
        if arrivals is None:
            return lease_of(blocks)
        try:
            return lease_of(blocks)
        except CacheFull:
            if not arrivals.held:
                raise
        finally:
            with self._shared.lock:
                tiers = self._shared.tiers
                self._store.release(tiers, arrivals)
        return lease_of(blocks.at(range(blocks.hashes.index(arrivals.hashes[0]))))

    # --- Below an engine that owns the device's pages ---

    def hold(
        self, hashes: Any, *, wait: str = "complete", deadline_s: float | None = None,
    ) -> HeldBlocks:  # fmt: skip
        """Hold the leading cached blocks in host memory, fetching them from disk and the store.

        For engines with their own index of device pages. Blocks that are only on the device are
        not found: use `save` in place of `insert`, and `hold` in place of `acquire`.

        Parameters
        ----------
        hashes, wait, deadline_s : as in `acquire`

        Returns
        -------
        HeldBlocks : empty if no block is cached. `num_blocks`, `pages` and `sources` describe the
            blocks; `load(device_pages, after=, first=0)` starts to load them into pages of the
            caller, and returns a `Completion`; `release()` lets them be evicted again

        Raises
        ------
        TypeError, ValueError : an argument is invalid
        KvcupyError : the cache is closed

        Notes
        -----
        Held blocks are not evicted. If host memory has too few pages for all blocks from disk,
        fewer leading blocks are held: at most half of the pages in one call.

        Examples
        --------
        >>> import kvcupy as kv
        >>> pools = [kv.KVPool(n, 2, 3, 1, 8, dtype="fp16", device="host") for n in (4, 16)]
        >>> cache = TieredCache(*pools)
        >>> pools[0].k(1)[2] = 5
        >>> cache.save([0xA], [2]).synchronize()
        >>> with cache.hold([0xA, 0xB]) as held:
        ...     held.load([3]).synchronize()
        >>> held.num_blocks, float(pools[0].k(1)[3, 0, 0, 0])
        (1, 5.0)
        """
        keys = self._hashes(hashes)
        return self._hold(Described.prefix(keys), wait, self._checked_wait(wait, deadline_s))

    def _hold(self, blocks: Described, wait: str, seconds: float | None) -> HeldBlocks:
        arrivals = None
        if self._store is not None:
            arrivals = self._wait_for_arrivals(self._store, blocks, wait, seconds)
        try:
            return hold(self._shared, blocks.hashes, max(1, self.host_pool.num_pages // 2))
        finally:
            if arrivals is not None and self._store is not None:
                with self._shared.lock:
                    tiers = self._shared.tiers
                    self._store.release(tiers, arrivals)

    def save(self, hashes: Any, pages: Any, *, after: Any = None) -> LeaseCompletion:
        """Start to copy blocks to host memory from device pages that the caller keeps.

        Parameters
        ----------
        hashes : as in `match`; preceding blocks need not be cached
        pages : list or integer array (n,) of pages of the device pool, one for each hash
        after : compute stream that writes the pages, as in `insert`

        Returns
        -------
        Completion : of the copies. Do not overwrite the pages before; calls of `HeldBlocks.load`
            and `save` that touch them keep their order

        Raises
        ------
        TypeError, ValueError : an argument is invalid; nothing has changed
        CaptureError : `after` is being captured; nothing has changed
        KvcupyError : the cache is closed

        Notes
        -----
        Blocks in host memory are not copied again. Others may be skipped, the last ones first, if
        no host page can be freed for them without waiting, neither for a transfer nor for a write
        to disk (`flush` writes blocks ahead of that). Copies to disk and to a shared store are made
        as after `insert`.
        """
        keys, page_list = self._hashes(hashes), page_array(pages).tolist()
        if len(keys) != len(page_list):
            raise ValueError(f"pages: expected {len(keys)} like hashes, got {len(page_list)}")
        if page_list and not 0 <= min(page_list) <= max(page_list) < self.device_pool.num_pages:
            raise ValueError(f"pages: expected pages of the device pool, got {page_list}")
        blocks = Described(keys, [0] * len(keys))
        return save(self._shared, blocks, page_list, self._stream(after))

    def _wait_for_arrivals(
        self, store: StoreTier, blocks: Described, wait: str, seconds: float | None
    ) -> Arrivals | None:
        """Fetch missing blocks from the store, and wait for them; None without a wait."""
        with self._shared.lock:
            tiers = self._shared.opened()
            if wait == "best_effort":
                store.note_late(store.request(tiers, blocks, urgent=False))
                return None
            arrivals = store.expect(tiers, blocks)
        if arrivals is None:
            return None
        if seconds is None:
            tokens = len(arrivals.hashes) * self.host_pool.page_size
            seconds = 30.0 if wait == "complete" else 1.0 + 0.25 * tokens / 1024
        try:
            arrivals.settled.wait(seconds)
        except BaseException:  # an interrupt
            with self._shared.lock:
                tiers = self._shared.tiers
                store.expire(arrivals)
                store.release(tiers, arrivals)
            raise
        with self._shared.lock:
            store.expire(arrivals)
        return arrivals

    # --- Retention ---

    def retain(self, hashes: Any, *, priority: int = 0, ttl_s: float | None = None) -> None:
        """Evict the cached ones of these blocks after others.

        Parameters
        ----------
        hashes : as in `match`: of a session, or a slice of them
        priority : blocks of lower priority are evicted before. Blocks that are not retained come
            before priority 0, and after negative priorities
        ttl_s : seconds until the blocks are evicted like others again; None: without limit

        Raises
        ------
        TypeError, ValueError : an argument is invalid
        KvcupyError : the cache is closed

        Notes
        -----
        A later call replaces what earlier ones said of a block. The retention of a block also ends
        on `release`, and when it leaves its last tier.
        """
        keys = list(dict.fromkeys(self._hashes(hashes)))
        checks.require_int(priority, "priority")
        expires_at = inf
        if ttl_s is not None:
            expires_at = time.monotonic() + seconds_of(ttl_s, "ttl_s")
        with self._shared.lock:
            self._shared.opened().retain(keys, int(priority), expires_at)

    def release(self, hashes: Any) -> None:
        """Evict retained blocks like others again.

        Parameters
        ----------
        hashes : as in `match`; blocks that are not retained do not change

        Raises
        ------
        TypeError, ValueError : `hashes` has other values
        KvcupyError : the cache is closed
        """
        keys = list(dict.fromkeys(self._hashes(hashes)))
        with self._shared.lock:
            self._shared.opened().release(keys)

    def prefetch(self, hashes: Any) -> None:
        """Start fetching leading blocks that only the shared store has to host memory.

        Parameters
        ----------
        hashes : as in `match`, for example of a queued request

        Raises
        ------
        TypeError, ValueError : `hashes` has other values
        KvcupyError : the cache is closed

        Notes
        -----
        Does not block, and leaves out blocks for which the queue has no room. Prefetched blocks may
        be evicted like any other block before they are acquired. `acquire` reads blocks on disk.
        """
        keys = self._hashes(hashes)
        with self._shared.lock:
            tiers = self._shared.opened()
            if self._store is not None:
                self._store.request(tiers, Described.prefix(keys), urgent=False)

    # --- Inserting and evicting ---

    def insert(
        self, hashes: Any, pages: Any, *,
        after: Any = None, parent: Any = 0, token_ids: Any = None,
    ) -> list[int]:  # fmt: skip
        """Transfer ownership of pages to the cache, each with the block of a hash.

        Parameters
        ----------
        hashes : as in `match`; preceding blocks need not be cached
        pages : list or integer array (n,) of allocated pages of the device pool, without duplicates
        after : compute stream that writes the pages; None for the current stream; False if the
            pages are written
        parent : hash of the block before the first one, or 0; or a list with one for each block,
            if `hashes` are not consecutive. Published by `kvcupy.events`, like `token_ids`
        token_ids : list or array (n * page_size,), the tokens of the blocks; None: unknown

        Returns
        -------
        list of int : pages whose blocks are already on the device; the caller keeps them

        Raises
        ------
        TypeError, ValueError : an argument is invalid, such as a page that is not allocated;
            nothing has changed
        CaptureError : `after` is being captured; nothing has changed
        KvcupyError : the cache is closed
        """
        keys, page_list = self._hashes(hashes), page_array(pages)
        if len(keys) != len(page_list):
            raise ValueError(f"pages: expected {len(keys)} like hashes, got {len(page_list)}")
        stream = self._stream(after)
        tokens = tokens_of(token_ids, len(keys), self.device_pool.page_size)
        blocks = Described(keys, _parents(keys, parent), tokens)

        def change(tiers: Tiers) -> list[int]:
            return _insert(tiers, blocks, page_list, stream, through=self._through)

        return self._shared.attempt(change)

    def evict(self, num_blocks: int | None = None) -> None:
        """Evict blocks from the device, and free their pages.

        Parameters
        ----------
        num_blocks : number of blocks to evict; None: all that are not leased

        Raises
        ------
        TypeError, ValueError : `num_blocks` is not an int, or negative
        KvcupyError : the cache is closed
        CacheFull : fewer blocks can be evicted; nothing has changed

        Notes
        -----
        Blocks that no lower tier has are saved first, in the background. A page becomes free after
        its save, and `alloc` waits for it.
        """
        if num_blocks is None:
            self._evict_up_to(self.device_pool.num_pages)
            return
        checks.require_int(num_blocks, "num_blocks")
        if num_blocks < 0:
            raise ValueError(f"num_blocks: expected a number of blocks, got {num_blocks}")

        def change(tiers: Tiers) -> int:
            victims = tiers.device.choose(left)
            if len(victims) < left:
                raise CacheFull(
                    f"expected at most {len(victims)}, which are on the device and "
                    f"not leased, got {left}",
                    "num_blocks",
                )
            return tiers.evict_from_device(victims)

        left = int(num_blocks)
        while (left := left - self._shared.attempt(change)) > 0:
            pass

    def take_host_pages(self, n: int) -> Any:
        """Allocate pages of the host pool, evicting blocks if necessary.

        Returns
        -------
        int64 (n,) : the pages, owned by the caller until freed to `host_pool.allocator`

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
            tiers.host.owned[pages] = False  # the caller owns them now
            return pages

        try:
            return self._shared.attempt(change)
        except CacheFull as error:
            message = f"expected room for {n} pages in host memory, got less"
            raise CacheFull(message, "n") from error

    def clear(self) -> None:
        """Forget all blocks in every tier; blocks in a shared store stay.

        Raises
        ------
        KvcupyError : a block is leased, and nothing has changed; or the cache is closed
        """

        def change(tiers: Tiers) -> None:
            if tiers.num_leased:
                raise KvcupyError(f"{tiers.num_leased} blocks are leased: release them first")
            if tiers.disk is not None and (wait_for := tiers.disk.wait_for_others()) is not None:
                raise Blocked(wait_for)
            tiers.device.clear()
            tiers.host.clear()
            if tiers.disk is not None:
                tiers.disk.clear(EvictionOrder(self._priorities))
            if self._store is not None:
                self._store.forget()
            tiers.announce_clear()

        self._shared.attempt(change)

    # --- The file, and statistics ---

    def flush(self, *, deadline_s: float = 30.0) -> None:
        """Wait for saves, write blocks to disk, and wait for queued puts to the shared store.

        With write="through" the blocks of the host tier are written to disk, evicting others from a
        full disk; if the disk is too small, the blocks that are evicted last are written. With
        "back" the disk already has the blocks evicted from the host tier. The shared store gets the
        blocks queued by `shared_write`.

        Parameters
        ----------
        deadline_s : time limit for the shared store, in seconds; blocks may still be queued then
            (see `stats`)

        Raises
        ------
        OSError : the disk failed; blocks that were not written stay in host memory
        TypeError, ValueError : `deadline_s` is not a number, or negative
        KvcupyError : the cache is closed
        """
        deadline = time.monotonic() + seconds_of(deadline_s)
        shared = self._shared
        with shared.lock:
            tiers = shared.opened()
            saves = tiers.in_flight.saves()
        self.engine._send()
        for completion in saves:
            completion.synchronize()
        if self._store is not None:
            self._store.drain(deadline)
        with shared.lock:
            tiers = shared.opened()
            disk = tiers.disk
            if disk is None:
                return
            hashes = list(tiers.host.order)[-disk.num_slots :] if self._through else []
        failed: dict[int, OSError] = {}
        size = max(1, _MAX_WRITE_BYTES // disk.page_bytes)
        for start in range(0, len(hashes), size):
            begin = partial(_begin_write, disk, hashes[start : start + size], frozenset(hashes))
            try:
                if (move := shared.attempt(begin)) is not None:
                    shared.carry_out(move)
                    failed |= move.failed
            except BaseException:  # an interrupt between the two
                shared.end_own_writes()
                raise
        disk.flush()
        for error in failed.values():
            raise error

    def close(self, *, deadline_s: float = 30.0) -> None:
        """Flush, close the file, and free the pages; leased pages are freed on release.

        Idempotent. Only leases can be used after that. Pages that a call of the shared store still
        accesses are freed when it returns.

        Parameters
        ----------
        deadline_s : as for `flush`; blocks still queued then are dropped

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
            if not self._shared.closed:  # else another thread has closed the cache
                raise
        finally:
            with self._shared.lock:
                tiers = self._shared.tiers
                if not self._shared.closed:
                    self._shared.closed = True
                    for tier in (tiers.device, tiers.host):
                        tier.clear()
                    if self._store is not None:
                        self._store.forget()
                    tiers.announce_clear()
                    tiers.listeners.clear()
            self._close_file()
            if self._store is not None:
                self._store.stop(join_s=JOIN_TIMEOUT_S)

    def _close_file(self) -> None:
        """Close the file when no move is in flight; none begins in a closed cache."""
        while True:
            with self._shared.lock:
                tiers = self._shared.tiers
                disk = tiers.disk
                wait_for = None if disk is None else disk.wait_for_others()
            if wait_for is None:
                break
            wait_for()
        if disk is not None:
            disk.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._shared.closed

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- As the tiers of a group ---

    def _highest_tiers(self, hashes: Sequence[int]) -> list[int]:
        """Return where each block is: 0 for the device, 1 host memory, 2 disk, 3 none of them."""
        with self._shared.lock:
            tiers = self._shared.opened()
            device, host, readable = tiers.device.pages, tiers.host.pages, tiers.readable
            return [
                0 if h in device else 1 if h in host else 2 if readable(h) else 3 for h in hashes
            ]

    def _by_group(self) -> list[tuple[TierGroup | None, TieredCache]]:
        """Return the tiers of each group; None without groups."""
        return [(None, self)]

    def _save_states(self, blocks: Described, slots: Sequence[int], after: Any) -> None:
        """Start to save states; like `insert` it may have to write others to disk first."""
        save(self._shared, blocks, slots, after, write=True)

    def _has_blocks(self, hashes: Sequence[int]) -> list[bool]:
        """Return whether some tier has each block."""
        with self._shared.lock:
            return list(map(self._shared.tiers.__contains__, hashes))

    def _discard_blocks(self, hashes: Sequence[int]) -> None:
        """Forget blocks that are neither leased nor held nor on their way to or from disk."""
        with self._shared.lock:
            self._shared.tiers.discard(hashes)

    def _evict_up_to(self, num_blocks: int) -> None:
        """Evict blocks that are not leased from the device."""

        def change(tiers: Tiers) -> int:
            victims = tiers.device.choose(left)
            return tiers.evict_from_device(victims) if victims else 0

        left = num_blocks
        while left > 0 and (count := self._shared.attempt(change)):
            left -= count

    def _require_unleased(self) -> None:
        """Raise KvcupyError if a block is leased."""
        with self._shared.lock:
            if num_leased := self._shared.opened().num_leased:
                raise KvcupyError(f"{num_leased} blocks are leased: release them first")

    def stats(self) -> dict[str, float]:
        """Return statistics since the cache was made.

        Returns
        -------
        dict of numbers. `device_blocks`, `host_blocks`, `disk_blocks`: blocks now in each tier.
        `device_hits`, `host_hits`, `disk_hits`, `misses`: blocks requested by `acquire`, by the
        highest tier that had them. `inserted`; `device_evicted`, `host_evicted`, `disk_evicted`;
        `lost`: blocks that left their last tier, evicted for capacity or after a failure.
        `failed_loads`, `failed_saves`: blocks. `load_bytes`, `load_s`, `save_bytes`, `save_s`,
        `disk_read_bytes`, `disk_read_s`, `disk_write_bytes`, `disk_write_s`: stored bytes and
        seconds of completed work. `disk_errors`: blocks that failed to be read or written, or were
        damaged.

        With a shared store also, in blocks, `shared_hits`: acquired after being fetched from the
        store; `shared_misses`: requested, but not in the store or not delivered; `shared_late`:
        arrived after an acquire stopped waiting; `shared_skipped`: not fetched for lack of a host
        page; `shared_stored`, `shared_known`, `shared_full`, `shared_failed`: put, by outcome;
        `shared_dropped`: evicted from host memory before the put; `shared_queued`: waiting for a
        put. `shared_errors`: calls that raised; `shared_get_bytes`, `shared_get_s`,
        `shared_put_bytes`, `shared_put_s`
        """
        with self._shared.lock:
            tiers = self._shared.tiers
            if not self._shared.closed:
                tiers.settle()
            return tiers.stats()

    def _hashes(self, hashes: Any) -> list[int]:
        """Check the argument `hashes`, which must have 128 bits with a shared store."""
        keys = hash_list(hashes)
        if self._needs_long_hashes and keys and min(keys) < 2**64:
            if self._store is not None:
                raise ValueError(
                    "hashes: expected hashes of 128 bits (kv.block_hashes with bits=128) where "
                    f"there is a shared store, got {min(keys)}"
                )
            config.warn_once(
                "TieredCache: hashes of 64 bits on disk, of which two can be equal for different "
                "tokens; use kv.block_hashes with bits=128"
            )
            self._needs_long_hashes = False
        return keys

    def _checked_wait(self, wait: Any, deadline_s: Any) -> float | None:
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


def _identity(pool: Any, model: Any, heads: Any, store: Any) -> PoolIdentity:
    """Identify the blocks of a pool, by the arguments `model` and `heads`, or as the store does."""
    stored = getattr(store, "identity", None)
    if model == "" and heads is None and isinstance(stored, PoolIdentity):
        return stored
    identity = _identity_of(pool, model, heads)
    if isinstance(stored, PoolIdentity) and (difference := identity.difference(stored)):
        raise ValueError(f"shared: expected a store of the same blocks; {difference}")
    return identity


def _identity_of(pool: Any, model: Any, heads: Any) -> PoolIdentity:
    if heads is None:
        return PoolIdentity.of(pool, model=model)
    if not isinstance(heads, tuple) or len(heads) != 2:
        raise TypeError(f"heads: expected a tuple of two ints, got {heads!r}")
    for number in heads:
        checks.require_int(number, "heads")
    first, total = heads
    if not 0 <= first <= total - pool.num_kv_heads:
        raise ValueError(
            f"heads: expected the first of {pool.num_kv_heads} heads, and the number of all, got "
            f"{heads}"
        )
    return PoolIdentity.of(pool, head_start=first, total_kv_heads=total, model=model)


def _parents(hashes: list[int], parent: Any) -> list[int]:
    """Return the hash before each block, from the argument `parent`."""
    if isinstance(parent, (int, np.integer)) and not isinstance(parent, bool):
        return [*hash_list([parent], "parent"), *hashes][: len(hashes)]
    parents = hash_list(parent, "parent")
    if len(parents) != len(hashes):
        raise ValueError(f"parent: expected {len(hashes)} like hashes, got {len(parents)}")
    return parents


def tokens_of(token_ids: Any, num_blocks: int, page_size: int) -> TokenIds | None:
    """Return the argument `token_ids` as (num_blocks, page_size), or None."""
    if token_ids is None:
        return None
    tokens = token_array(token_ids)
    if len(tokens) != num_blocks * page_size:
        raise ValueError(
            f"token_ids: expected {num_blocks} blocks of {page_size}, got {len(tokens)}"
        )
    return tokens.reshape(num_blocks, page_size).copy()


def _insert(
    tiers: Tiers, blocks: Described, pages: Pages, stream: Stream, *, through: bool
) -> list[int]:
    """Add blocks to the device tier; return the pages of blocks that it already has.

    With `through`, copy the blocks to the host tier too, as many of the first as it can take.
    ValueError unless pages are allocated, without duplicates, and not already owned by the cache.
    """
    device, hashes = tiers.device, blocks.hashes
    ordered = device.pool.allocator._require_allocated(pages)
    if len(owned := ordered[device.owned[ordered]]):
        raise ValueError(f"pages: expected the caller's, got {owned[0]}, which is the cache's")
    written = StreamCompletion(stream)
    is_written = written.done() and written.failure is None  # this may raise: nothing has changed
    on_device, in_host = device.pages.parts, tiers.host.pages.parts
    inserted: dict[int, int] = {}  # pages by hash
    unneeded = []
    for hash, page in zip(hashes, pages.tolist(), strict=True):
        if hash in inserted or hash in on_device[hash & MASK]:
            unneeded.append(page)
        else:
            inserted[hash] = page
    saved = {}
    if through:
        saves = [
            copy_of((hash, page))
            for hash, page in inserted.items()
            if hash not in in_host[hash & MASK]
        ]
        plan = tiers.plan_host_eviction(len(saves), keep=inserted, wait=False)
        host_pages = tiers.evict_from_host(plan)
        saved = tiers.save_or_free(saves[: len(host_pages)], host_pages, stream)
    if inserted and not is_written:
        _hold(tiers, list(map(copy_of, inserted.items())), written)
    tiers.describe(blocks, hashes)
    device.use(hashes, inserted)
    tiers.host.use(hashes, saved)
    if tiers.disk is not None:
        tiers.disk.use(hashes)
    tiers.counts.inserted += len(inserted)
    return unneeded


def _hold(tiers: Tiers, inserted: list[Copy], written: StreamCompletion) -> None:
    """Prevent reads and overwrites of pages before their stream has written them."""
    completion = tiers.in_flight.add(BlockCompletion("insert", written, inserted, ()))
    for copy in inserted:
        tiers.device.filled_by[copy.page] = completion
    tiers.device.pool.allocator._mark_busy([copy.page for copy in inserted], written)


def _begin_write(
    disk: DiskBlocks, hashes: Sequence[int], keep: Collection[int], tiers: Tiers
) -> DiskMove | None:
    """Begin to write blocks that are in the host tier but not on disk; None if there are none."""
    if (wait_for := disk.wait_for_others()) is not None:
        raise Blocked(wait_for)
    there = [copy for hash in hashes if (copy := tiers.host.find(hash)) is not None]
    tiers.require_verified(disk, there)
    copies = [copy for copy in there if copy.hash not in disk.slots]
    tiers.require_arrived(copies)
    replaced = disk.choose(len(copies) - disk.num_free, keep)
    copies = copies[: disk.num_free + len(replaced)]
    return tiers.begin_write(disk, copies, replaced) if copies else None


def seconds_of(deadline_s: Any, name: str = "deadline_s") -> float:
    """Check the argument `deadline_s`, and clip it to the longest time that a thread can wait."""
    checks.require_number(deadline_s, name)
    if not deadline_s >= 0:
        raise ValueError(f"{name}: expected seconds from 0 on, got {deadline_s}")
    return float(min(deadline_s, threading.TIMEOUT_MAX))
