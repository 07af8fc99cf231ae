"""The tiers of a paged cache with groups of layers: a TieredCache per group, under one index.

    prefix      [0][1][2][3]                 hashes of the caller
    full        [0][1][2][3]   tiers of its blocks
    window            [2][3]   tiers of its blocks
    state                [3]   tiers of its states, whose device pages are not cached

The hash of a block is the same in all groups. Stores tell groups apart by their models.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from ... import checks
from ...checks import seconds_of
from ...errors import KvcupyError, ProcessLocal
from ...formats import Write
from ..engine import send_together
from ..pool import pool_like
from .cache import TieredCache, seconds_to_wait, tokens_of
from .changes import Change, Described, Removed
from .holds import HeldBlocks
from .leases import Lease, Match
from .prefixes import Prefixes, TierGroup, longest


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
        host_bytes: int, stores: Any = (), model: str = "", write: Write = "through",
    ) -> None:  # fmt: skip
        if not isinstance(model, str):
            raise TypeError(f"model: expected a str, got {type(model).__name__}")
        if isinstance(stores, str) or not isinstance(stores, Iterable):
            kind = type(stores).__name__  # a URL may contain a password
            raise TypeError(f"stores: expected a sequence of stores, got {kind}")
        stores = list(stores)
        for store in stores:
            if not (isinstance(store, str) or (callable(store) and not hasattr(store, "match"))):
                raise TypeError(
                    "stores: expected URLs, or functions that open a store for a host pool and a "
                    f"model, with groups, got {type(store).__name__}"
                )
        self.groups = tuple(groups)
        counts = _host_pages(self.groups, host_bytes)
        self._has_stores = bool(stores)
        self._caches: list[TieredCache] = []
        try:
            for group, count in zip(self.groups, counts, strict=True):
                host = pool_like(group.pool, count, dtype=group.pool.dtype)
                name = f"{model}/{group.name}"
                self._caches.append(
                    TieredCache(group.pool, host, stores=stores, model=name, write=write)
                )
        except BaseException:
            for opened in self._caches:
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
        if not self._has_stores:
            for i, cache in enumerate(self._caches):
                # Not a method: in a cycle, all pools would stay until Python looks for cycles.
                cache._follow(partial(_note_lost, self._lost, i))

    def __repr__(self) -> str:
        state = ", closed" if self.closed else f" of {len(self.groups)} groups"
        return f"<TieredCache{state}>"

    @property
    def closed(self) -> bool:
        return self._caches[0].closed

    def of_group(self, number: int) -> TieredCache:
        """Return the tiers of a group."""
        return self._caches[number]

    def _by_group(self) -> list[tuple[TierGroup | None, TieredCache]]:
        return list(zip(self.groups, self._caches, strict=True))

    # --- Looking prefixes up ---

    def match(self, hashes: Any) -> Match:
        keys = self._checked(hashes)
        levels = self._levels(keys)
        device, host = (self._longest_in(levels, len(keys), tier) for tier in range(2))
        return Match(device, host, self._longest(keys, levels))

    def acquire(
        self, hashes: Any, *,
        after: Any = None, deadline_s: float | None = None, token_ids: Any = None,
    ) -> GroupedLease:  # fmt: skip
        keys = self._checked(hashes)
        tokens = tokens_of(token_ids, len(keys), self.groups[0].pool.page_size)
        prefix = Described.prefix(keys, tokens)
        lease = self.acquire_unsent(prefix, after=after, deadline_s=deadline_s)
        self.send_loads()
        return lease

    def acquire_unsent(
        self, prefix: Described, present: Sequence[Collection[int]] = (), *,
        after: Any, deadline_s: float | None = None, most: int | None = None,
    ) -> GroupedLease:  # fmt: skip
        """Acquire the longest prefix; loads are in the queues of the engines until `send_loads`.

        most : blocks to acquire; None: all
        present : by group, the indices of blocks that the caller has; if there are any, the blocks
            do not count as requested
        """
        seconds = seconds_to_wait(deadline_s)
        stream, keys = self._caches[0]._stream(after), prefix.hashes
        most = len(keys) if most is None else most
        self.enter(keys)
        try:
            lease = self._acquire(prefix, most, present, stream, seconds)
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
        seconds: float,
    ) -> GroupedLease:  # fmt: skip
        ends = time.monotonic() + seconds
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
                    left = max(0.0, ends - time.monotonic())
                    if self._blocks[i].is_state:
                        parts.append(cache._hold(blocks, left))
                    else:
                        parts.append(cache._acquire(blocks, stream, left, send=False))
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
        """Return the highest tier of each block, by group: 0, 1, or 2 for none."""
        return [cache._highest_tiers(keys) for cache in self._caches]

    def _longest_in(self, levels: Sequence[Sequence[int]], length: int, tier: int = 1) -> int:
        """Return the length of the longest usable prefix in tiers up to one."""

        def first_missing(number: int, indices: Sequence[int]) -> int | None:
            own = levels[number]
            return next((index for index in indices if own[index] > tier), None)

        return longest(self._blocks, length, first_missing)

    def _longest(self, keys: Sequence[int], levels: Sequence[list[int]]) -> int:
        """Return the length of the longest usable prefix, with the blocks in stores."""
        if not self._has_stores:
            return self._longest_in(levels, len(keys))

        def first_missing(number: int, indices: Sequence[int]) -> int | None:
            """Ask the stores once for all blocks that no tier has."""
            own = levels[number]
            unknown = [index for index in indices if own[index] > 1]
            asked = [keys[index] for index in unknown]
            num_stored = self._caches[number].match(asked).stores if asked else 0
            for index in unknown[:num_stored]:
                own[index] = 1
            return unknown[num_stored] if num_stored < len(unknown) else None

        return longest(self._blocks, len(keys), first_missing)

    # --- For the paged cache ---

    def enter(self, keys: Sequence[int]) -> None:
        """Keep the blocks of a prefix until `leave`, also those that groups still lack.

        With stores no block is useless: they may have what the tiers lack.
        """
        if self._has_stores:
            return
        with self._lock:
            self._discard_useless()
            self._prefixes.enter(keys)

    def leave(self, keys: Sequence[int]) -> None:
        """End a use that has begun with `enter`; useless blocks are discarded."""
        if self._has_stores:
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

    # --- Evicting, writing down, and statistics ---

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

    def flush(self, *, deadline_s: float = 30.0) -> int:
        ends = time.monotonic() + seconds_of(deadline_s)
        num_unwritten = 0
        for cache in self._caches:
            num_unwritten += cache.flush(deadline_s=max(0.0, ends - time.monotonic()))
        with self._lock:
            self._discard_useless()
        return num_unwritten

    def clear(self, stores: bool = False) -> None:
        with self._lock:
            for cache in self._caches:
                cache._require_unleased()
            for cache in self._caches:
                cache.clear(stores)
            self._lost.clear()
            self._prefixes.clear()

    def close(self, *, deadline_s: float = 30.0) -> None:
        ends = time.monotonic() + seconds_of(deadline_s)
        failure: BaseException | None = None
        for cache in self._caches:
            try:
                cache.close(deadline_s=max(0.0, ends - time.monotonic()))
            except (OSError, KvcupyError) as error:
                failure = failure or error
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
            raise KvcupyError("TieredCache: the cache is closed")
        return keys


def _release(parts: Sequence[Lease | HeldBlocks]) -> None:
    for part in parts:
        part.release()


def _note_lost(lost: deque[tuple[int, Sequence[int]]], number: int, change: Change) -> None:
    """Note blocks that have left a tier; they may be in another."""
    if isinstance(change, Removed):
        lost.append((number, change.hashes))


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
