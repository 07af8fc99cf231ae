"""TieredCache: blocks by content hash, on the device, in host memory and in stores below."""

from __future__ import annotations

import time
from abc import ABCMeta
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial, wraps
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import checks, metrics
from ...checks import seconds_of
from ...config import cache_logger
from ...errors import CacheFull, KvcupyError, ProcessLocal
from ...formats import Write
from ...streams import stream_after
from ..engine import TransferEngine
from ..hazards import StreamCompletion
from ..identity import identity_of
from ..pages import Pages, hash_list, page_array, token_array
from .changes import Described, Listener, TokenIds
from .holds import HeldBlocks, hold, save
from .leases import Lease, LeaseCompletion, Match, acquire
from .order import Retentions
from .parts import MASK
from .store_tier import JOIN_TIMEOUT_S, Arrivals, StoreTier, open_stores
from .tiers import (
    PATIENCE_S,
    BlockCompletion,
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

_DEADLINE_S = 30.0  # of an acquire, for blocks of stores
_POLL_S = 0.05  # of a flush


class TieredCache(ProcessLocal, metaclass=ABCMeta):
    """Caches blocks by hash. A block is a page of every layer; its hash identifies a prefix.

    Parameters
    ----------
    device_pool, host_pool : pools as for `TransferEngine`. Other users may share them
    stores : the stores below host memory, the nearest first. Each is a URL (see `BlockStore.open`);
        a function (host_pool, model) that opens a `BlockStore`, for options; or an opened
        `BlockStore` of the host pool. The cache closes those that it has opened
    model : a string that distinguishes models with pools of the same shape: weights, revision,
        adapter, rotary settings. Blocks of another one are not found
    heads : (first head, number of heads of the model), if this pool has some of the model's heads;
        None: all of them. Without `model` and `heads`, an opened store may be of any model
    convert : whether the pools may differ in encoding: blocks are converted on each way
    write : when to copy a block down. "through": to host memory on insertion, as far as pages can
        be freed there, and into every store once it is complete in host memory. "back": before its
        eviction, to the next tier
    groups : a PagedKVCache with groups of layers, in place of the pools: see Groups. Pass the
        result to its `attach`
    host_bytes : with groups, the bytes of host memory, divided so that all groups have room for the
        same prefixes

    Attributes
    ----------
    engine : the TransferEngine between the pools
    device_pool, host_pool

    Raises
    ------
    TypeError, ValueError : an argument is invalid
    ImportError, OSError : a store cannot be opened

    Notes
    -----
    Blocks: the tiers are inclusive: a loaded block stays in the lower tiers until its eviction
    there. While lower tiers have space, no block is lost: it leaves a tier only when its copy below
    is finished. The least recently used blocks are evicted first; `retain` changes that. A block
    that was got from a store is put into the nearer ones.

    Room: where host memory is full of blocks that are still to be put into stores, `acquire` brings
    fewer blocks, and calls that need room wait for the puts, at most 5 s, and then raise CacheFull.
    A block that a store refuses, because it is full or because a put has failed twice, may be
    evicted; `flush` tries again. A store that fails three times in a row is left alone for 10 s,
    and one that does not return from a call for 10 s until it does. Nothing waits for it meanwhile.

    Stream: `insert` takes pages that are complete on its stream `after`. `acquire` may overwrite
    evicted pages; only work enqueued before its `after` may still read them. Do not read the pages
    of a released lease.

    Failure: a failed transfer loses only its destination copies. If a store fails, is late or does
    not deliver what it has promised, blocks are missing, the failure is counted and logged, and no
    call raises.

    Groups: a prefix is found if every group can restore it: full attention needs all blocks, a
    window its last blocks and its sink tokens, recurrent layers the state that was kept behind it.
    `acquire` returns a GroupedLease. Each group has its own tiers, and opens its stores, by URLs or
    functions, with its own model.
    When a block is lost, the blocks and states that are useless without it are discarded in all
    groups, unless a store may have it. States are in host memory and below; `Match.device`
    counts none. `stats` sums the groups, and has `prefix_hits` and `prefix_misses`, in blocks of
    the requested prefixes. `retain` is about the longest prefix that can be restored, so its hashes
    start at the first block.
    Not implemented for groups: `heads`, and `insert`, `hold`, `save` and `take_host_pages`, which
    are for engines that own the pages of the device.

    Threads may share a cache. A lock is held for bookkeeping, but not while waiting for a transfer
    or a store: a slow store delays only calls that wait for it. With stores the cache has a thread,
    which ends when the cache is closed or garbage collected. A forked child must make another
    cache: calls raise KvcupyError. Capture: illegal for `acquire` and `insert`.

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
    Match(device=0, host=2, stores=2)
    >>> with cache, cache.acquire([0xA, 0xB, 0xC]) as lease:
    ...     lease.wait_layer(0)
    ...     float(pools[0].k(0)[lease.pages[1], 0, 0, 0]), lease.num_blocks
    (5.0, 2)
    """

    def __init__(
        self, device_pool: Any = None, host_pool: Any = None, *,
        stores: Any = (), write: Write = "through", convert: bool = False, model: str = "",
        heads: tuple[int, int] | None = None, groups: Any = None, host_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if host_bytes is not None:
            raise ValueError(f"host_bytes: expected None without groups, got {host_bytes!r}")
        if not isinstance(write, str) or write not in ("through", "back"):
            raise ValueError(f'write: expected "through" or "back", got {write!r}')
        self._through = write == "through"
        self.engine = TransferEngine(device_pool, host_pool, convert=convert)
        self.device_pool, self.host_pool = device_pool, host_pool
        identity = identity_of(host_pool, model, heads)
        states = open_stores(stores, host_pool, model, heads, identity)
        store = StoreTier(states, host_pool, write_through=self._through) if states else None
        self._store = store
        retentions = Retentions()
        device = PageTier("device", device_pool, retentions.priorities)
        host = PageTier("host", host_pool, retentions.priorities)
        parts = Tiers(self.engine, device, host, store, retentions)
        self._shared = tiers = SharedTiers(parts)
        if store is not None:
            store.attach(self, tiers)
        metrics.follow(
            self, lambda cache: metrics.cache_samples(cache._shared.stats()),
            partial(_final_samples, parts.counts, store),
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
        if self.closed:
            return "<TieredCache, closed>"
        counts = self.stats()
        tiers = f"{counts['device_blocks']} device, {counts['host_blocks']} host blocks"
        number = 0 if self._store is None else len(self._store.states)
        return f"<TieredCache of {tiers}, {number} store{'s' * (number != 1)}>"

    def _follow(self, listener: Listener) -> None:
        """Announce all blocks, and from now on every change, to a listener."""
        with self._shared.lock:
            self._shared.opened().follow(listener)

    def _unfollow(self, listener: Listener) -> None:
        with self._shared.lock:
            if listener in (listeners := self._shared.tiers.listeners):
                listeners.remove(listener)

    # --- Looking blocks up ---

    def match(self, hashes: Any) -> Match:
        """Count the leading blocks on the device, on device or host, and there or in a store.

        Parameters
        ----------
        hashes : list or array of 64-bit or 128-bit ints, starting at the first block of a prefix.
            With stores, of 128 bits (`kv.block_hashes`)

        Raises
        ------
        TypeError, ValueError : `hashes` has other values
        KvcupyError : the cache is closed

        Notes
        -----
        Asks the stores for all blocks that no tier has, and waits for the answers.
        """
        keys = self._hashes(hashes)
        with self._shared.lock:
            tiers = self._shared.opened()
            device, host = tiers.device.pages.parts, tiers.host.pages.parts
            num_on_device = 0
            for hash in keys:
                if hash not in device[hash & MASK]:
                    break
                num_on_device += 1
            num_here = num_on_device
            for hash in keys[num_on_device:]:
                if hash not in device[hash & MASK] and hash not in host[hash & MASK]:
                    break
                num_here += 1
            if self._store is None or num_here == len(keys):
                return Match(num_on_device, num_here, num_here)
            missing = list(dict.fromkeys([hash for hash in keys[num_here:] if hash not in tiers]))
        num_stored = self._store.count_known(missing)
        is_known = num_stored == len(missing)
        num_known = len(keys) if is_known else keys.index(missing[num_stored])
        return Match(num_on_device, num_here, num_known)

    def acquire(
        self, hashes: Any, *,
        after: Any = None, deadline_s: float | None = None, token_ids: Any = None,
    ) -> Lease:  # fmt: skip
        """Pin the leading known blocks, and start loading blocks that are not on the device.

        Parameters
        ----------
        hashes : as in `match`
        after : compute stream with the last reads of evicted pages; None for the current stream;
            False if no work reads them
        deadline_s : seconds to wait for blocks that only stores have; None: 30. Late blocks count
            as misses but stay in flight
        token_ids : as in `insert`

        Returns
        -------
        Lease : empty if no block is known

        Raises
        ------
        TypeError, ValueError : an argument is invalid
        CaptureError : `after` is being captured
        KvcupyError : the cache is closed
        CacheFull : too few pages of the device are free or can be evicted. Nothing has changed,
            except that blocks of stores may have arrived in host memory

        Notes
        -----
        Blocks are loaded together, layer by layer, and blocks of stores in parts of at most half of
        the host pool. The lease ends before a block that no store delivers whole, and
        where pages do not suffice for blocks of stores.
        """
        keys = self._hashes(hashes)
        seconds = seconds_to_wait(deadline_s)
        tokens = tokens_of(token_ids, len(keys), self.device_pool.page_size)
        return self._acquire(Described.prefix(keys, tokens), self._stream(after), seconds)

    def _acquire(
        self, blocks: Described, stream: Stream, seconds: float, *, send: bool = True
    ) -> Lease:
        """Do as `acquire`; unless `send`, leave the loads in the queue of the engine.

        A prefix that is too long for host memory is fetched and leased in parts.
        """
        ends = time.monotonic() + seconds
        lease, is_whole = self._acquire_part(blocks, stream, ends, send)
        while not is_whole and lease.num_blocks < len(blocks.hashes):
            rest = blocks.at(range(lease.num_blocks, len(blocks.hashes)))
            with self._shared.lock:
                self._shared.tiers.counts.misses -= len(rest.hashes)  # are counted again
            try:
                more, is_whole = self._acquire_part(rest, stream, ends, send)
            except BaseException as error:
                if isinstance(error, CacheFull):
                    break
                lease.release()
                raise
            if not more.num_blocks:
                break
            lease._append(more)
        return lease

    def _acquire_part(
        self, blocks: Described, stream: Stream, ends: float, send: bool
    ) -> tuple[Lease, bool]:
        """Acquire blocks; return whether host memory had room for all that stores have."""

        def lease(some: Described) -> Lease:
            patience_s = min(PATIENCE_S, ends - time.monotonic())
            return acquire(self._shared, some, after=stream, patience_s=patience_s, send=send)

        if self._store is None:
            return lease(blocks), True
        seconds = max(0.0, ends - time.monotonic())
        arrivals = self._wait_for_arrivals(self._store, blocks, seconds)
        if arrivals is None:
            return lease(blocks), True
        try:
            return lease(blocks), not arrivals.lacks_room
        except CacheFull:
            if not arrivals.held:
                raise
        finally:
            with self._shared.lock:
                tiers = self._shared.tiers
                self._store.release(tiers, arrivals)
        return lease(blocks.at(range(blocks.hashes.index(arrivals.hashes[0])))), True

    # --- Below an engine that owns the device's pages ---

    def hold(self, hashes: Any, *, deadline_s: float | None = None) -> HeldBlocks:
        """Hold the leading known blocks in host memory, fetching them from the stores.

        For engines with their own index of device pages. Blocks that are only on the device are
        not found: use `save` in place of `insert`, and `hold` in place of `acquire`.

        Parameters
        ----------
        hashes, deadline_s : as in `acquire`

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
        Held blocks are not evicted. If host memory has too few pages for all blocks of stores,
        fewer leading blocks are held: one call fetches at most half of the pages.

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
        return self._hold(Described.prefix(keys), seconds_to_wait(deadline_s))

    def _hold(self, blocks: Described, seconds: float) -> HeldBlocks:
        arrivals = None
        if self._store is not None:
            arrivals = self._wait_for_arrivals(self._store, blocks, seconds)
        try:
            return hold(self._shared, blocks.hashes)
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
        no host page can be freed for them without waiting, neither for a transfer nor for a put
        into a store (`flush` writes blocks ahead of that). Blocks are put into stores as after
        `insert`.
        """
        keys, page_list = self._hashes(hashes), page_array(pages).tolist()
        if len(keys) != len(page_list):
            raise ValueError(f"pages: expected {len(keys)} like hashes, got {len(page_list)}")
        if page_list and not 0 <= min(page_list) <= max(page_list) < self.device_pool.num_pages:
            raise ValueError(f"pages: expected pages of the device pool, got {page_list}")
        blocks = Described(keys, [0] * len(keys))
        return save(self._shared, blocks, page_list, self._stream(after))

    def _wait_for_arrivals(
        self, store: StoreTier, blocks: Described, seconds: float
    ) -> Arrivals | None:
        """Fetch missing blocks from the stores, and wait for them; None without missing blocks."""
        with self._shared.lock:
            tiers = self._shared.opened()
            arrivals = store.expect(tiers, blocks)
        if arrivals is None:
            return None
        try:
            store.wait(arrivals, seconds)
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
        """Start fetching leading blocks that only stores have to host memory.

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
        be evicted like any other block before they are acquired.
        """
        keys = self._hashes(hashes)
        with self._shared.lock:
            tiers = self._shared.opened()
            if self._store is not None:
                self._store.request(tiers, Described.prefix(keys), urgent=False)

    # --- Inserting and evicting ---

    def insert(
        self, hashes: Any, pages: Any, *,
        after: Any = None, parent: Any = None, token_ids: Any = None,
    ) -> list[int]:  # fmt: skip
        """Transfer ownership of pages to the cache, each with the block of a hash.

        Parameters
        ----------
        hashes : as in `match`; preceding blocks need not be cached
        pages : list or integer array (n,) of allocated pages of the device pool, without duplicates
        after : compute stream that writes the pages; None for the current stream; False if the
            pages are written
        parent : hash of the block before the first one; None, or 0, at the start of a sequence; or
            a list with one for each block, if `hashes` are not consecutive. Published by
            `kvcupy.events`, like `token_ids`
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
        CacheFull : fewer blocks can be evicted, and nothing has changed; or host memory is full of
            blocks that are still to be put into stores, and some blocks may have been evicted

        Notes
        -----
        Blocks that no lower tier has are saved first, in the background. A page becomes free after
        its save, and `alloc` waits for it. Waits up to 5 s for puts into stores that make room in
        host memory.
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
            plan = tiers.plan_host_eviction(int(n), wait=True)
            if plan.num_pages < n:
                raise CacheFull(f"expected room for {n} pages in host memory, got less", "n")
            tiers.require_untouched(plan)
            pages = tiers.evict_from_host(plan)
            tiers.host.owned[pages] = False  # the caller owns them now
            return pages

        return self._shared.attempt(change)

    def clear(self, stores: bool = False) -> None:
        """Forget all blocks on the device and in host memory.

        Parameters
        ----------
        stores : whether to remove the blocks of this model from the stores too

        Raises
        ------
        TypeError : `stores` is not a bool
        KvcupyError : a block is leased, and nothing has changed; or the cache is closed
        """
        checks.flag(stores, "stores")

        def change(tiers: Tiers) -> None:
            if tiers.num_leased:
                raise KvcupyError(f"{tiers.num_leased} blocks are leased: release them first")
            tiers.device.clear()
            tiers.host.clear()
            if self._store is not None:
                self._store.forget()
            tiers.announce_clear()

        self._shared.attempt(change)
        if stores and self._store is not None:
            self._store.clear_stores(PATIENCE_S)

    # --- Writing down, and statistics ---

    def flush(self, *, deadline_s: float = 30.0) -> int:
        """Wait for saves, and write the blocks that only device and host have to every store.

        Parameters
        ----------
        deadline_s : time limit in seconds

        Returns
        -------
        int : number of blocks that some store does not have, because it is full, has failed or is
            late; 0 without stores

        Raises
        ------
        TypeError, ValueError : `deadline_s` is not a number, or negative
        KvcupyError : the cache is closed
        """
        ends = time.monotonic() + seconds_of(deadline_s)
        shared, store = self._shared, self._store
        with shared.lock:
            tiers = shared.opened()
            saves = tiers.in_flight.saves()
        self.engine._send()
        for completion in saves:
            completion.synchronize()
        if store is None:
            return 0
        with shared.lock:
            tiers = shared.opened()
            store.write_all(tiers)
            only_above = [c.hash for c in tiers.only_on_device(_copies(tiers.device))]
            hashes = deque(only_above)
        incomplete: set[int] = set()  # blocks that have left host memory for others
        while True:
            num_saved = shared.attempt(partial(_save_some, hashes, incomplete)) if hashes else 0
            with shared.lock:
                shared.opened()
                is_writing, wait = store.is_writing, store.next_move()
            if not (num_saved or is_writing) or (seconds := ends - time.monotonic()) <= 0:
                break
            if not (num_saved and hashes):
                wait(min(seconds, _POLL_S))
        with shared.lock:
            tiers = shared.opened()
            host = tiers.host
            left = [c for h in only_above if (c := tiers.device.find(h)) is not None]
            incomplete.update(copy.hash for copy in tiers.only_on_device(left))
            pages = host.unwritten.keys() | host.refused.keys()
            incomplete.update(hash for hash in host.pages if host.pages[hash] in pages)
            return len(incomplete)

    def close(self, *, deadline_s: float = 30.0) -> None:
        """Flush, and free the pages; leased pages are freed on release.

        Idempotent. Only leases can be used after that. Pages that a call of a store still accesses
        are freed when it returns. The number of blocks that could not be written is logged.

        Parameters
        ----------
        deadline_s : as for `flush`

        Raises
        ------
        TypeError, ValueError : `deadline_s` is not a number, or negative; nothing has changed
        """
        seconds_of(deadline_s)
        if self._shared.closed:
            return
        try:
            if num_unwritten := self.flush(deadline_s=deadline_s):
                cache_logger.warning(
                    "%d blocks of a closed cache are not in all of its stores", num_unwritten
                )
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
            if self._store is not None:
                self._store.stop(join_s=JOIN_TIMEOUT_S)
                self._store.close_stores()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._shared.closed

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- As the tiers of a group ---

    def _num_here(self, hashes: Sequence[int]) -> int:
        """Count the leading blocks on the device or in host memory."""
        with self._shared.lock:
            tiers = self._shared.opened()
            return next((i for i, hash in enumerate(hashes) if hash not in tiers), len(hashes))

    def _highest_tiers(self, hashes: Sequence[int]) -> list[int]:
        """Return where each block is: 0 for the device, 1 host memory, 2 neither of them."""
        with self._shared.lock:
            tiers = self._shared.opened()
            device, host = tiers.device.pages, tiers.host.pages
            return [0 if hash in device else 1 if hash in host else 2 for hash in hashes]

    def _by_group(self) -> list[tuple[TierGroup | None, TieredCache]]:
        """Return the tiers of each group; None without groups."""
        return [(None, self)]

    def _save_states(self, blocks: Described, slots: Sequence[int], after: Any) -> None:
        """Start to save states; waits for puts into stores that make room."""
        save(self._shared, blocks, slots, after, wait=True)

    def _has_blocks(self, hashes: Sequence[int]) -> list[bool]:
        """Return whether some tier has each block."""
        with self._shared.lock:
            return list(map(self._shared.tiers.__contains__, hashes))

    def _discard_blocks(self, hashes: Sequence[int]) -> None:
        """Forget blocks that are neither leased nor held."""
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
        dict of numbers. `device_blocks`, `host_blocks`: blocks now in each tier. `device_hits`,
        `host_hits`, `misses`: blocks requested by `acquire`, by the highest tier that had them.
        `inserted`; `device_evicted`, `host_evicted`; `lost`: blocks that left their last tier,
        evicted for capacity or after a failure, and that no store has. `failed_loads`,
        `failed_saves`: blocks. `load_bytes`, `load_s`, `save_bytes`, `save_s`: stored bytes and
        seconds of completed work.

        With stores also, in blocks, `store_hits`: acquired after being fetched from a store;
        `store_misses`: requested, but in no store, or not delivered; `store_late`: arrived after
        an acquire stopped waiting; `store_skipped`: not fetched for lack of a host page;
        `store_stored`, `store_known`, `store_full`, `store_failed`: put, by outcome;
        `store_queued`: puts that wait. `store_errors`: calls that raised or gave no valid answer;
        `store_get_bytes`, `store_get_s`, `store_put_bytes`, `store_put_s`
        """
        with self._shared.lock:
            tiers = self._shared.tiers
            if not self._shared.closed:
                tiers.settle()
            return tiers.stats()

    def _hashes(self, hashes: Any) -> list[int]:
        """Check the argument `hashes`, which must have 128 bits with stores."""
        keys = hash_list(hashes)
        if self._store is not None and keys and min(keys) < 2**64:
            raise ValueError(
                "hashes: expected hashes of 128 bits (kv.block_hashes) where there are stores, got "
                f"{min(keys)}"
            )
        return keys

    def _stream(self, after: Any) -> Stream:
        """Return the argument `after` as a stream that is not being captured."""
        return stream_after(self.engine.device, after, "a move of blocks")


def _final_samples(counts: Counts, store: StoreTier | None) -> Iterable[tuple[str, Any, float]]:
    return metrics.cache_samples(counted(counts, store))


def _copies(tier: PageTier) -> Iterable[Copy]:
    """Return the blocks of a tier in eviction order, and those that are leased."""
    hashes = dict.fromkeys([*(tier.hashes[page] for page in tier.order), *tier.pages])
    return (copy_of((hash, tier.pages[hash])) for hash in hashes)


def _parents(hashes: list[int], parent: Any) -> list[int]:
    """Return the hash before each block, from the argument `parent`."""
    if parent is None:
        parent = 0
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
        plan = tiers.plan_host_eviction(len(saves), keep=inserted)
        host_pages = tiers.evict_from_host(plan)
        saved = tiers.save_or_free(saves[: len(host_pages)], host_pages, stream)
    if inserted and not is_written:
        _hold(tiers, list(map(copy_of, inserted.items())), written)
    tiers.describe(blocks, hashes)
    device.use(hashes, inserted)
    tiers.host.use(hashes, saved)
    tiers.counts.inserted += len(inserted)
    return unneeded


def _hold(tiers: Tiers, inserted: list[Copy], written: StreamCompletion) -> None:
    """Prevent reads and overwrites of pages before their stream has written them."""
    completion = tiers.in_flight.add(BlockCompletion("insert", written, inserted, ()))
    for copy in inserted:
        tiers.device.filled_by[copy.page] = completion
    tiers.device.pool.allocator._mark_busy([copy.page for copy in inserted], written)


def _save_some(hashes: deque[int], incomplete: set[int], tiers: Tiers) -> int:
    """Save the first blocks that only the device has, as host pages are free; return how many.

    hashes : blocks to save; those that were saved, or are gone, are removed
    incomplete : gets blocks that leave host memory, and that some store has refused
    """
    store = tiers.store
    assert store is not None
    copies: list[Copy] = []
    while hashes and len(copies) < store.blocks_per_call:
        if (copy := tiers.device.find(hashes.popleft())) is not None:
            copies += tiers.only_on_device([copy])
    plan = tiers.plan_host_eviction(len(copies), lossless=True)
    incomplete.update(copy.hash for copy in plan.victims if copy.page in tiers.host.refused)
    pages = tiers.evict_from_host(plan)
    hashes.extendleft(copy.hash for copy in reversed(copies[len(pages) :]))
    saved = tiers.save_or_free(copies[: len(pages)], pages, None)
    tiers.host.add(saved)
    store.put_first(tiers, list(saved))
    return len(saved)


def seconds_to_wait(deadline_s: Any) -> float:
    """Return the argument `deadline_s` of an acquire."""
    return _DEADLINE_S if deadline_s is None else seconds_of(deadline_s)
