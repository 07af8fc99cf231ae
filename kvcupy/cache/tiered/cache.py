"""TieredCache: blocks by content hash, on the device, in host memory and in stores below."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import checks
from ...checks import seconds_of
from ...config import cache_logger
from ...errors import CacheFull, KvcupyError, ProcessLocal
from ...formats import Write
from ...streams import stream_after
from ..engine import TransferEngine
from ..pages import hash_list, page_array, token_array
from ..pool import pool_like
from .changes import Described, Listener, TokenIds
from .group_prefixes import GroupPrefixes
from .holds import HeldBlocks, hold, save
from .leases import DEADLINE_S, Lease, LeaseCompletion, Match, acquire, match
from .prefixes import GroupBlocks, TierGroup
from .store_tier import JOIN_TIMEOUT_S, PATIENCE_S
from .tiers import GroupTiers, Wait

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from ..pages import Pages

_POLL_S = 0.05  # of a flush


class TieredCache(ProcessLocal):
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
    evicted; `flush` tries again. A store that fails three times in a row is skipped for 10 s,
    and one that does not return from a call for 10 s until it does. Nothing waits for it meanwhile.

    Stream: `insert` takes pages that are complete on its stream `after`. `acquire` may overwrite
    evicted pages; only work enqueued before its `after` may still read them. Do not read the pages
    of a released lease.

    Failure: a failed transfer loses only the blocks that it was to write. If a store fails, is late
    or does not deliver what it has promised, blocks are missing, the failure is counted and logged,
    and no call raises.

    Groups: a prefix is found if every group can restore it: full attention needs all blocks, a
    window its last blocks and its sink tokens, recurrent layers the state at its end.
    `acquire` returns a GroupedLease. Each group has its own tiers, and opens its stores, by URLs or
    functions, with its own model.
    When a block is lost, the blocks and states that are unreachable without it are discarded in all
    groups, unless a store may have it. States are in host memory and below; `Match.device`
    counts none. `stats` sums the groups, and has `prefix_hits` and `prefix_misses`, in blocks of
    the requested prefixes. `retain` is about the longest prefix that can be restored, so its hashes
    start at the first block.
    Not implemented for groups: `heads`, and `insert`, `hold`, `save` and `take_host_pages`, which
    are for engines that own the pages of the device.

    Threads may share a cache. A lock is held for bookkeeping, but not while waiting for a transfer
    or a store: a slow store delays only calls that wait for it. With stores the cache has a thread,
    which ends when the cache is closed or garbage collected. A forked child must make another
    cache: calls raise KvcupyError. So do calls after an exception of a signal handler in the middle
    of a change: close the cache, and make another with other pools, since its pages stay allocated.
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
        if not isinstance(write, str) or write not in ("through", "back"):
            raise ValueError(f'write: expected "through" or "back", got {write!r}')
        if groups is None:
            if host_bytes is not None:
                raise ValueError(f"host_bytes: expected None without groups, got {host_bytes!r}")
            engine = TransferEngine(device_pool, host_pool, convert=convert)
            layers = tuple(range(device_pool.num_layers))
            self.groups: tuple[TierGroup, ...] = (
                TierGroup("", device_pool, GroupBlocks(), layers),
            )
            engines, models = [engine], [model]
            self.engine, self.device_pool, self.host_pool = engine, device_pool, host_pool
        else:
            for name, value in (("device_pool", device_pool), ("host_pool", host_pool)):
                if value is not None:
                    raise ValueError(f"{name}: expected None with groups, which have pools")
            if convert or heads is not None:
                raise ValueError(
                    f"convert, heads: expected False and None with groups, got {convert!r} and "
                    f"{heads!r}"
                )
            if not isinstance(model, str):
                raise TypeError(f"model: expected a str, got {type(model).__name__}")
            self.groups = _described(groups)
            stores = _openers(stores)
            engines = [
                TransferEngine(group.pool, pool_like(group.pool, count, dtype=group.pool.dtype))
                for group, count in zip(
                    self.groups, _host_pages(self.groups, host_bytes), strict=True
                )
            ]
            models = [f"{model}/{group.name}" for group in self.groups]
        self._tiers: list[GroupTiers] = []
        try:
            for group, engine, name in zip(self.groups, engines, models, strict=True):
                tiers = GroupTiers(
                    group, engine, stores=stores, write=write, model=name, heads=heads
                )
                self._tiers.append(tiers)
                if tiers.store is not None:
                    tiers.store.attach(self, tiers)
        except BaseException:
            for tiers in self._tiers:
                if tiers.store is not None:
                    tiers.store.close_stores()
            raise
        self._prefixes = None if groups is None else GroupPrefixes(self._tiers)

    def __repr__(self) -> str:
        if self.closed:
            return "<TieredCache, closed>"
        if self._prefixes is not None:
            return f"<TieredCache of {len(self.groups)} groups>"
        counts = self.stats()
        tiers = f"{counts['device_blocks']} device, {counts['host_blocks']} host blocks"
        store = self._tiers[0].store
        number = 0 if store is None else len(store.states)
        return f"<TieredCache of {tiers}, {number} store{'s' * (number != 1)}>"

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
        if self._prefixes is not None:
            return self._prefixes.match(keys)
        return match(self._tiers[0], keys)

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
        Lease : empty if no block is known; with groups, a GroupedLease

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
        tokens = tokens_of(token_ids, len(keys), self.groups[0].pool.page_size)
        prefix = Described.prefix(keys, tokens)
        if self._prefixes is None:
            return acquire(self._tiers[0], prefix, self._stream(after), seconds)
        stream = self._stream(after)
        try:
            lease: Any = self._prefixes.acquire(prefix, stream, seconds)
            self._prefixes.send_loads()
            return lease  # type: ignore[no-any-return]
        except BaseException as error:
            self._prefixes.note(error)
            raise

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
        tiers, keys = self._only_group(), self._hashes(hashes)
        return hold(tiers, Described.prefix(keys), seconds_to_wait(deadline_s))

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
        tiers, keys, page_list = (
            self._only_group(),
            self._hashes(hashes),
            page_array(pages).tolist(),
        )
        if len(keys) != len(page_list):
            raise ValueError(f"pages: expected {len(keys)} like hashes, got {len(page_list)}")
        if page_list and not 0 <= min(page_list) <= max(page_list) < self.device_pool.num_pages:
            raise ValueError(f"pages: expected pages of the device pool, got {page_list}")
        blocks = Described(keys, [0] * len(keys))
        return save(tiers, blocks, page_list, self._stream(after))

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
        by_group = [keys] if self._prefixes is None else self._prefixes.restorable(keys)
        for tiers, blocks in zip(self._tiers, by_group, strict=True):
            with tiers.lock, tiers.guard:
                tiers.require_open()
                tiers.retain(blocks, int(priority), expires_at)

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
        for tiers in self._tiers:
            with tiers.lock, tiers.guard:
                tiers.require_open()
                tiers.release(keys)

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
        prefix = Described.prefix(self._hashes(hashes))
        length = len(prefix.hashes)
        length -= length % max(group.blocks.interval for group in self.groups)
        for tiers in self._tiers:
            with tiers.lock, tiers.guard:
                tiers.require_open()
                if tiers.store is not None:
                    blocks = prefix.at(tiers.group.blocks.needed(length))
                    tiers.store.request(tiers, blocks, urgent=False)

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
        self._only_group()
        keys, page_list = self._hashes(hashes), page_array(pages)
        if len(keys) != len(page_list):
            raise ValueError(f"pages: expected {len(keys)} like hashes, got {len(page_list)}")
        tokens = tokens_of(token_ids, len(keys), self.device_pool.page_size)
        return self._insert(0, Described(keys, _parents(keys, parent), tokens), page_list, after)

    def evict(self, num_blocks: int | None = None) -> None:
        """Evict blocks from the device, and free their pages.

        Parameters
        ----------
        num_blocks : number of blocks to evict, with groups at most so many of each; None: all that
            are not leased

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
        if num_blocks is not None:
            checks.require_int(num_blocks, "num_blocks")
            if num_blocks < 0:
                raise ValueError(f"num_blocks: expected a number of blocks, got {num_blocks}")
        for tiers in self._tiers:
            count = tiers.device.pool.num_pages if num_blocks is None else int(num_blocks)
            evict(tiers, count, up_to=num_blocks is None or self._prefixes is not None)
        self._discard_unreachable()

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
        tiers = self._only_group()
        checks.require_int(n, "n")
        if n < 0:
            raise ValueError(f"n: expected a number of pages, got {n}")
        return tiers.run(lambda: tiers.take_host_pages(int(n)))

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
        with nullcontext() if self._prefixes is None else self._prefixes.lock:
            for tiers in self._tiers:
                with tiers.lock, tiers.guard:
                    tiers.require_open()
                    tiers.require_unleased()
            for tiers in self._tiers:
                tiers.run(tiers.clear)
                if stores and tiers.store is not None:
                    tiers.store.clear_stores(PATIENCE_S)
            if self._prefixes is not None:
                self._prefixes.clear()

    # --- Writing down, and statistics ---

    def flush(self, *, deadline_s: float = 30.0) -> int:
        """Wait for saves, and write the blocks that only device and host have to every store.

        Parameters
        ----------
        deadline_s : time limit in seconds

        Returns
        -------
        int : number of these blocks that some store does not have, because it is full, has failed
            or is late; 0 without stores

        Raises
        ------
        TypeError, ValueError : `deadline_s` is not a number, or negative
        KvcupyError : the cache is closed
        """
        ends = time.monotonic() + seconds_of(deadline_s)
        num_unwritten = sum([_flush(tiers, ends) for tiers in self._tiers])
        self._discard_unreachable()
        return num_unwritten

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
        ends = time.monotonic() + seconds_of(deadline_s)
        failure: BaseException | None = None
        for tiers in self._tiers:
            try:
                _close(tiers, ends)
            except (OSError, KvcupyError) as error:
                failure = failure or error
        if failure is not None:
            raise failure

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._tiers[0].closed

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        total: Counter[str] = Counter()
        if self._prefixes is not None:
            if not self.closed:
                self._prefixes.discard_unreachable()
            total.update(self._prefixes.counts)
        for tiers in self._tiers:
            with tiers.lock, tiers.guard:
                if not tiers.closed:
                    tiers.process_ended()
                total.update(tiers.stats())
        return dict(total)

    # --- Parts ---

    def _only_group(self) -> GroupTiers:
        """Return the tiers of a cache without groups."""
        if self._prefixes is not None:
            raise NotImplementedError(
                "insert, hold, save and take_host_pages are not implemented for groups: the paged "
                "cache moves their blocks"
            )
        return self._tiers[0]

    def _discard_unreachable(self) -> None:
        if self._prefixes is not None:
            self._prefixes.discard_unreachable()

    def _insert(self, number: int, blocks: Described, pages: Pages, after: Any) -> list[int]:
        """Insert blocks of a group; return the pages of those that its device tier has."""
        tiers, stream = self._tiers[number], self._stream(after)
        return tiers.run(lambda: tiers.insert(blocks, pages, stream))

    def _follow(self, listener: Listener, number: int = 0) -> None:
        """Announce all blocks of a group, and from now on every change, to a listener."""
        tiers = self._tiers[number]
        with tiers.lock, tiers.guard:
            tiers.require_open()
            tiers.follow(listener)

    def _unfollow(self, listener: Listener, number: int = 0) -> None:
        tiers = self._tiers[number]
        with tiers.lock, tiers.guard:
            if listener in tiers.listeners:
                tiers.listeners.remove(listener)

    def _num_here(self, hashes: Sequence[int]) -> int:
        """Count the leading blocks on the device or in host memory, of a cache without groups."""
        tiers = self._tiers[0]
        with tiers.lock, tiers.guard:
            tiers.require_open()
            return tiers.device.pages.count_leading(hashes, tiers.host.pages)

    def _hashes(self, hashes: Any) -> list[int]:
        """Check the argument `hashes`, which must have 128 bits with stores."""
        keys = hash_list(hashes)
        if self._tiers[0].store is not None and keys and min(keys) < 2**64:
            raise ValueError(
                "hashes: expected hashes of 128 bits (kv.block_hashes) where there are stores, got "
                f"{min(keys)}"
            )
        return keys

    def _stream(self, after: Any) -> Stream:
        """Return the argument `after` as a stream that is not being captured."""
        return stream_after(self._tiers[0].engine.device, after, "a move of blocks")


# --- Calls of one group ---


def evict(tiers: GroupTiers, num_blocks: int, *, up_to: bool = False) -> None:
    """Evict blocks from the device; CacheFull if there are fewer, unless `up_to`."""

    def step() -> int | Wait:
        victims = tiers.device.choose(left)
        if len(victims) < left and not up_to:
            raise CacheFull(
                f"expected at most {len(victims)}, which are on the device and "
                f"not leased, got {left}",
                "num_blocks",
            )
        return tiers.evict_from_device(victims) if victims else 0

    left = num_blocks
    while True:
        count = tiers.run(step)
        left -= count
        if left <= 0 or not count:
            break


def _flush(tiers: GroupTiers, ends: float) -> int:
    """Wait for saves, and put blocks into every store; return how many some store does not have."""
    store = tiers.store
    with tiers.lock, tiers.guard:
        tiers.require_open()
        saves = tiers.in_flight.saves()
    tiers.engine._send()
    for completion in saves:
        completion.synchronize()
    if store is None:
        return 0
    device, host = tiers.device, tiers.host
    with tiers.lock, tiers.guard:
        tiers.require_open()
        store.write_all(tiers)
        pages = dict.fromkeys([*device.order, *device.pages.values()])
        only_on_device = [device.hashes[page] for page in tiers.only_on_device(pages)]
        hashes = deque(only_on_device)
    incomplete: set[int] = set()  # blocks that have left host memory for others
    while True:
        num_saved = tiers.run(partial(_save_some, tiers, hashes, incomplete)) if hashes else 0
        with tiers.lock, tiers.guard:
            tiers.require_open()
            is_writing, wait = store.is_writing, store.next_move()
        if not (num_saved or is_writing) or (seconds := ends - time.monotonic()) <= 0:
            break
        if not (num_saved and hashes):
            wait(min(seconds, _POLL_S))
    with tiers.lock, tiers.guard:
        tiers.require_open()
        left = tiers.only_on_device(device.pages.known_pages(only_on_device))
        incomplete.update(device.hashes[page] for page in left)
        unput = host.unwritten.keys() | host.refused.keys()
        incomplete.update(host.hashes[page] for page in unput if host.has_block(page))
        return len(incomplete)


def _save_some(tiers: GroupTiers, hashes: deque[int], incomplete: set[int]) -> int:
    """Save the first blocks that only the device has, as host pages are free; return how many."""
    store, device, host = tiers.store, tiers.device, tiers.host
    assert store is not None
    saves: list[int] = []
    while hashes and len(saves) < store.blocks_per_call:
        saves += tiers.only_on_device(device.pages.known_pages([hashes.popleft()]))
    plan = tiers.plan_host_eviction(len(saves), lossless=True)
    incomplete.update(host.hashes[page] for page in plan.victims if page in host.refused)
    pages = tiers.evict_from_host(plan)
    hashes.extendleft(device.hashes[page] for page in reversed(saves[len(pages) :]))
    saves = saves[: len(pages)]
    saved = tiers.save([device.hashes[page] for page in saves], saves, pages, None)
    host.add(saved)
    store.put_first(tiers, list(saved))
    return len(saved)


def _close(tiers: GroupTiers, ends: float) -> None:
    """Flush, and free the pages."""
    if tiers.closed:
        return
    try:
        if num_unwritten := _flush(tiers, ends):
            cache_logger.warning(
                "%d blocks of a closed cache are not in all of its stores", num_unwritten
            )
    except KvcupyError:
        if not (tiers.closed or tiers.guard.is_broken):
            raise
    finally:
        with suppress(KvcupyError), tiers.lock, tiers.guard:  # a broken one keeps its pages
            if not tiers.closed:
                tiers.closed = True
                tiers.forget_all()
                tiers.listeners.clear()
        tiers.closed = True
        if tiers.store is not None:
            tiers.store.stop(join_s=JOIN_TIMEOUT_S)
            tiers.store.close_stores()


# --- Arguments ---


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


def seconds_to_wait(deadline_s: Any) -> float:
    """Return the argument `deadline_s` of an acquire."""
    return DEADLINE_S if deadline_s is None else seconds_of(deadline_s)


def _described(groups: Any) -> tuple[TierGroup, ...]:
    """Return the groups of the argument `groups`."""
    if (describe := getattr(groups, "_tier_groups", None)) is None:
        raise TypeError(f"groups: expected a PagedKVCache with groups, got {groups!r}")
    return tuple(describe())


def _openers(stores: Any) -> list[Any]:
    """Check the argument `stores` of a cache with groups, each of which opens its own."""
    if isinstance(stores, str) or not isinstance(stores, Sequence):
        kind = type(stores).__name__  # a URL may contain a password
        raise TypeError(f"stores: expected a sequence of stores, got {kind}")
    openers = list(stores)
    for store in openers:
        if not (isinstance(store, str) or (callable(store) and not hasattr(store, "match"))):
            raise TypeError(
                "stores: expected URLs, or functions that open a store for a host pool and a "
                f"model, with groups, got {type(store).__name__}"
            )
    return openers


def _host_pages(groups: Sequence[TierGroup], host_bytes: Any) -> list[int]:
    """Divide host memory: all groups have room for the same prefixes."""
    checks.require_int(host_bytes, "host_bytes")

    def counts(length: int) -> list[int]:
        return [
            -(-length // group.blocks.interval) if group.blocks.is_state else length
            for group in groups
        ]

    def total(length: int) -> int:
        pages = counts(length)
        return sum(n * g.pool.page_bytes for n, g in zip(pages, groups, strict=True))

    least = max(group.blocks.interval for group in groups)
    if total(least) > host_bytes:
        raise ValueError(
            f"host_bytes: expected at least {total(least)}, for {least} blocks of every group, "
            f"got {host_bytes}"
        )
    lengths = range(least, host_bytes + 1)  # a block has at least a byte
    return counts(lengths[bisect_right(lengths, host_bytes, key=total) - 1])
