"""The tiers of a paged cache with groups of layers: a TieredCache per group, under one index.

    prefix      [0][1][2][3]                 hashes of the caller
    full        [0][1][2][3]   tiers of its blocks
    window            [2][3]   tiers of its blocks
    state                [3]   tiers of its states, whose device pages are not cached

The hash of a block is the same in all groups. Files and stores tell groups apart by their models.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn

from ...errors import KvcupyError, ProcessLocal
from ...formats import StoreWrite, Write
from ...ops import checks
from ..engine import send_together
from ..pool import Pool, pool_like
from . import store_tier
from .cache import TieredCache, tokens_of
from .changes import Change, Described, Removed
from .disk_format import BLOCK_BYTES
from .holds import HeldBlocks
from .leases import Lease, Match
from .prefixes import Prefixes, TierGroup, longest

_FILE_BYTES = 3 * BLOCK_BYTES  # of a file or a store in shared memory, beside its first block


class GroupedLease(ProcessLocal):
    """The blocks of a prefix in all groups, pinned until they are released. Made by `acquire`.

    Attributes
    ----------
    num_blocks : number of leading blocks of the requested hashes
    indices : of the blocks that each group needs
    leases : the Lease of these blocks in each group of attention layers; None for the states of
        recurrent layers, and everywhere if there are no blocks
    states : the HeldBlocks of the states, or None
    released : whether `release` was called
    """

    def __init__(
        self, num_blocks: int, indices: list[list[int]], leases: list[Lease | None],
        states: HeldBlocks | None, leave: Callable[[], None],
    ) -> None:  # fmt: skip
        self.num_blocks, self.indices = num_blocks, indices
        self.leases, self.states = leases, states
        self.released = False
        self._leave = leave

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<GroupedLease of {self.num_blocks} blocks, {state}>"

    def __enter__(self) -> GroupedLease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def wait(self, stream: Any = None) -> None:
        """Make later work of a stream wait until the blocks of attention layers are loaded."""
        for lease in self.leases:
            if lease is not None:
                lease.wait(stream)

    def release(self) -> None:
        """Unpin the blocks. Idempotent."""
        if not self.released:
            self.released = True
            _release([part for part in (*self.leases, self.states) if part is not None])
            self._leave()

    def hand_over(self) -> None:
        """Release the states; the caller has taken the leases, and calls `leave` later."""
        self.released = True
        if self.states is not None:
            self.states.release()


@TieredCache.register
class GroupedTieredCache(ProcessLocal):
    """What `TieredCache(groups=cache, ...)` makes; the documentation is there."""

    def __init__(
        self, groups: Sequence[TierGroup], *,
        host_bytes: int, disk: Any = None, disk_bytes: int = 0,
        model: str = "", encryption_key: Any = None, write: Write = "through",
        shared: Any = None, shared_bytes: int | None = None, shared_write: StoreWrite = "through",
        shared_prefetch: float = 0.25,
    ) -> None:  # fmt: skip
        if not isinstance(model, str):
            raise TypeError(f"model: expected a str, got {type(model).__name__}")
        if not (shared is None or isinstance(shared, str) or callable(shared)):
            raise TypeError(
                "shared: expected a URL, or a function that opens a store for a host pool and a "
                f"model, with groups, got {shared!r}"
            )
        self.groups = tuple(groups)
        host_pools = [
            pool_like(group.pool, count, dtype=group.pool.dtype)
            for group, count in zip(self.groups, _host_pages(self.groups, host_bytes), strict=True)
        ]
        padded = [_padded(pool.page_bytes) for pool in host_pools]
        in_files = [pool.num_pages * own for pool, own in zip(host_pools, padded, strict=True)]
        self._is_shared = shared is not None
        self._caches: list[TieredCache] = []
        self._stores: list[Any] = []  # opened by URL
        try:
            for i, (group, host) in enumerate(zip(self.groups, host_pools, strict=True)):
                name = f"{model}/{group.name}"
                share_of_files = partial(_share, in_files, [_FILE_BYTES + n for n in padded], i)
                store = shared
                if isinstance(shared, str):
                    capacity = share_of_files(shared_bytes, "shared_bytes")
                    store = _open(shared, i, host, name, capacity)
                    self._stores.append(store)
                elif shared is not None:
                    store = shared(host, name)
                self._caches.append(TieredCache(
                    group.pool, host, disk=None if disk is None else f"{disk}.{i}",
                    disk_bytes=(
                        disk_bytes if disk is None else share_of_files(disk_bytes, "disk_bytes")
                    ),
                    model=name, encryption_key=encryption_key, write=write,
                    shared=store, shared_write=shared_write, shared_prefetch=shared_prefetch,
                ))  # fmt: skip
        except BaseException:
            for opened in (*self._caches, *self._stores):
                opened.close()
            raise
        self._blocks = [group.blocks for group in self.groups]
        self._counts = {"prefix_hits": 0, "prefix_misses": 0}
        self._lock = threading.RLock()  # of the prefixes; taken before the lock of a group's tiers
        self._prefixes = Prefixes(
            self._blocks, [cache._has_blocks for cache in self._caches],
            [cache._discard_blocks for cache in self._caches],
        )  # fmt: skip
        self._lost: deque[tuple[int, Sequence[int]]] = deque()  # group and hashes
        if not self._is_shared:
            for i, cache in enumerate(self._caches):
                # Not a method: in a cycle, all pools would stay until Python looks for cycles.
                cache._follow(partial(_note_lost, self._lost, i))

    def __repr__(self) -> str:
        return f"<TieredCache of {len(self.groups)} groups>"

    @property
    def closed(self) -> bool:
        return self._caches[0].closed

    def of_group(self, number: int) -> TieredCache:
        """Return the tiers of a group."""
        return self._caches[number]

    def _by_group(self) -> list[tuple[TierGroup | None, TieredCache]]:
        return list(zip(self.groups, self._caches, strict=True))

    # --- Looking prefixes up ---

    def match(self, hashes: Any, *, shared: bool = True) -> Match:
        keys = self._checked(hashes)
        levels = self._levels(keys)
        device, host, disk = (self._longest_in(levels, len(keys), tier) for tier in range(3))
        stored = self._longest(keys, levels) if shared and self._is_shared else disk
        return Match(device, host, disk, stored)

    def acquire(
        self, hashes: Any, *,
        after: Any = None, wait: str = "complete", deadline_s: float | None = None,
        token_ids: Any = None,
    ) -> GroupedLease:  # fmt: skip
        keys = self._checked(hashes)
        tokens = tokens_of(token_ids, len(keys), self.groups[0].pool.page_size)
        lease = self.acquire_unsent(
            Described.prefix(keys, tokens), after=after, wait=wait, deadline_s=deadline_s
        )
        self.send_loads()
        return lease

    def acquire_unsent(
        self, prefix: Described, present: Sequence[Collection[int]] = (), *,
        after: Any, wait: str = "complete", deadline_s: float | None = None,
        most: int | None = None,
    ) -> GroupedLease:  # fmt: skip
        """Acquire the longest prefix; loads are in the queues of the engines until `send_loads`.

        most : blocks to acquire; None: all
        present : by group, the indices of blocks that the caller has; if there are any, the blocks
            do not count as requested
        """
        deadline_s = self._caches[0]._checked_wait(wait, deadline_s)
        stream, keys = self._caches[0]._stream(after), prefix.hashes
        most = len(keys) if most is None else most
        self.enter(keys)
        try:
            lease = self._acquire(prefix, most, present, stream, wait, deadline_s)
        except BaseException:
            self.leave(keys)
            raise
        if not present:
            with self._lock:
                self._counts["prefix_hits"] += lease.num_blocks
                self._counts["prefix_misses"] += most - lease.num_blocks
        return lease

    def send_loads(self) -> None:
        """Send the loads out, in the order in which the model runs its layers."""
        send_together([
            (cache.engine, group.layers)
            for cache, group in zip(self._caches, self.groups, strict=True)
        ])  # fmt: skip

    def _acquire(
        self, prefix: Described, length: int, present: Sequence[Collection[int]], stream: Any,
        wait: str, deadline_s: float | None,
    ) -> GroupedLease:  # fmt: skip
        ends = None if deadline_s is None else time.monotonic() + deadline_s
        keys = prefix.hashes
        while True:
            levels = self._levels(keys[:length])
            for own, there in zip(levels, present, strict=False):
                own[:] = [0 if index in there else level for index, level in enumerate(own)]
            length = self._longest(keys[:length], levels)
            parts: list[Lease | HeldBlocks] = []
            indices: list[list[int]] = []
            missing = None
            try:
                for i, cache in enumerate(self._caches) if length else ():
                    needed = self._blocks[i].needed(length)
                    if present:
                        needed = [index for index in needed if index not in present[i]]
                    indices.append(needed)
                    blocks = prefix.at(needed)
                    left = None if ends is None else max(0.0, ends - time.monotonic())
                    if self._blocks[i].is_state:
                        parts.append(cache._hold(blocks, wait, left))
                    else:
                        parts.append(cache._acquire(blocks, stream, wait, left, send=False))
                    if parts[-1].num_blocks < len(needed):
                        missing = needed[parts[-1].num_blocks]
                        break
            except BaseException:
                _release(parts)
                raise
            if missing is None:
                leases = [part if isinstance(part, Lease) else None for part in parts]
                states = next((part for part in parts if isinstance(part, HeldBlocks)), None)
                return GroupedLease(length, indices, leases, states, partial(self.leave, keys))
            _release(parts)
            length = missing

    def _levels(self, keys: Sequence[int]) -> list[list[int]]:
        """Return the highest tier of each block, by group: 0 to 2, or 3 for none."""
        return [cache._highest_tiers(keys) for cache in self._caches]

    def _longest_in(self, levels: Sequence[Sequence[int]], length: int, tier: int = 2) -> int:
        """Return the length of the longest usable prefix in tiers up to one."""

        def first_missing(number: int, indices: Sequence[int]) -> int | None:
            own = levels[number]
            return next((index for index in indices if own[index] > tier), None)

        return longest(self._blocks, length, first_missing)

    def _longest(self, keys: Sequence[int], levels: Sequence[list[int]]) -> int:
        """Return the length of the longest usable prefix, with the blocks in a shared store."""
        if not self._is_shared:
            return self._longest_in(levels, len(keys))

        def first_missing(number: int, indices: Sequence[int]) -> int | None:
            """Ask the store once for all blocks that no tier has."""
            own = levels[number]
            unknown = [index for index in indices if own[index] > 2]
            asked = [keys[index] for index in unknown]
            num_stored = self._caches[number].match(asked).shared if asked else 0
            for index in unknown[:num_stored]:
                own[index] = 2
            return unknown[num_stored] if num_stored < len(unknown) else None

        return longest(self._blocks, len(keys), first_missing)

    # --- For the paged cache ---

    def enter(self, keys: Sequence[int]) -> None:
        """Keep the blocks of a prefix until `leave`, also those that groups still lack.

        With a shared store no block is useless: the store may have what the tiers lack.
        """
        if self._is_shared:
            return
        with self._lock:
            self._discard_useless()
            self._prefixes.enter(keys)

    def leave(self, keys: Sequence[int]) -> None:
        """End a use that has begun with `enter`; useless blocks are discarded."""
        if self._is_shared:
            return
        with self._lock:
            self._discard_useless()
            self._prefixes.leave(keys)

    def has_state(self, key: int) -> bool:
        """Return whether the states behind a prefix are in some tier."""
        return all(
            cache._has_blocks([key])[0]
            for cache, blocks in zip(self._caches, self._blocks, strict=True)
            if blocks.is_state
        )

    def save_states(self, prefixes: Described, slots: Sequence[int], after: Any) -> None:
        """Start to save the states behind prefixes from their slots."""
        self._caches[-1]._save_states(prefixes, slots, after)

    def _discard_useless(self) -> None:
        """Discard what is useless without blocks that tiers have lost."""
        gone: list[int] = []
        while self._lost:
            number, hashes = self._lost.popleft()
            has = self._caches[number]._has_blocks(hashes)
            gone += [hash for hash, there in zip(hashes, has, strict=True) if not there]
        if gone:
            self._prefixes.lost(gone)

    # --- Retention ---

    def retain(self, hashes: Any, *, priority: int = 0, ttl_s: float | None = None) -> None:
        keys = self._checked(hashes)
        length = self._longest_in(self._levels(keys), len(keys))
        for cache, blocks in zip(self._caches, self._blocks, strict=True):
            needed = [keys[index] for index in blocks.needed(length)]
            cache.retain(needed, priority=priority, ttl_s=ttl_s)

    def release(self, hashes: Any) -> None:
        keys = self._checked(hashes)
        for cache in self._caches:
            cache.release(keys)

    def prefetch(self, hashes: Any) -> None:
        keys = self._checked(hashes)
        length = len(keys) - len(keys) % max(blocks.interval for blocks in self._blocks)
        for cache, blocks in zip(self._caches, self._blocks, strict=True):
            cache.prefetch([keys[index] for index in blocks.needed(length)])

    # --- Evicting, the files, and statistics ---

    def evict(self, num_blocks: int | None = None) -> None:
        if num_blocks is not None:
            checks.require_int(num_blocks, "num_blocks")
            if num_blocks < 0:
                raise ValueError(f"num_blocks: expected a number of blocks, got {num_blocks}")
        for cache in self._caches:
            cache._evict_up_to(
                cache.device_pool.num_pages if num_blocks is None else int(num_blocks)
            )
        with self._lock:
            self._discard_useless()

    def flush(self, *, deadline_s: float = 30.0) -> None:
        failure: OSError | None = None
        for cache in self._caches:
            try:
                cache.flush(deadline_s=deadline_s)
            except OSError as error:
                failure = failure or error
        with self._lock:
            self._discard_useless()
        if failure is not None:
            raise failure

    def clear(self) -> None:
        with self._lock:
            for cache in self._caches:
                cache._require_unleased()
            for cache in self._caches:
                cache.clear()
            self._lost.clear()
            self._prefixes.clear()

    def close(self, *, deadline_s: float = 30.0) -> None:
        closing = [partial(cache.close, deadline_s=deadline_s) for cache in self._caches]
        failure: BaseException | None = None
        for close in (*closing, *[store.close for store in self._stores]):
            try:
                close()
            except (OSError, KvcupyError) as error:
                failure = failure or error
        self._stores = []
        if failure is not None:
            raise failure

    def __enter__(self) -> GroupedTieredCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stats(self) -> dict[str, float]:
        with self._lock:
            if not self.closed:
                self._discard_useless()
        total: Counter[str] = Counter(self._counts)
        for cache in self._caches:
            total.update(cache.stats())
        return dict(total)

    # --- For engines that own the pages of the device ---

    def insert(self, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            "insert, hold, save and take_host_pages are not implemented for groups: the paged "
            "cache moves their blocks"
        )

    hold = save = take_host_pages = insert

    def _checked(self, hashes: Any) -> list[int]:
        """Check the argument `hashes`."""
        keys = self._caches[0]._hashes(hashes)
        if self.closed:
            raise KvcupyError("the cache is closed")
        return keys


def _release(parts: Sequence[Lease | HeldBlocks]) -> None:
    for part in parts:
        part.release()


def _note_lost(lost: deque[tuple[int, Sequence[int]]], number: int, change: Change) -> None:
    """Note blocks that have left a tier; they may be in another."""
    if isinstance(change, Removed):
        lost.append((number, change.hashes))


def _open(url: str, number: int, pool: Pool, model: str, capacity_bytes: int | None) -> Any:
    """Open the store of a group by URL."""
    assert store_tier.opener is not None
    if not url.startswith("shm:"):
        return store_tier.opener(url, pool, model=model)
    # The blocks of a store in shared memory have one length.
    return store_tier.opener(f"{url}.{number}", pool, model=model, capacity_bytes=capacity_bytes)


def _padded(num_bytes: int) -> int:
    """Return the bytes that a block takes in a file or a store in shared memory."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _share(
    weights: Sequence[int], least: Sequence[int], number: int, num_bytes: Any, name: str
) -> Any:
    """Return a group's part of the argument `name`, a number of bytes or None.

    least : what each group needs, beyond which the rest is divided by weights
    """
    if num_bytes is None:
        return None
    checks.require_int(num_bytes, name)
    rest = int(num_bytes) - sum(least)
    if rest < 0:
        raise ValueError(
            f"{name}: expected at least {sum(least)}, for a block of every group, got {num_bytes}"
        )
    return least[number] + rest * weights[number] // sum(weights)


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
