"""TieredCache of a paged cache with groups of layers: a cache for each group, under one index.

    prefix      [0][1][2][3]                 hashes of the caller
    full        [0][1][2][3]   tiers of its blocks
    window            [2][3]   tiers of its blocks
    state                [3]   tiers of its states, whose device pages are not cached

In the tiers of a group, a block has the caller's hash combined with the name of the group.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NoReturn, Protocol

from ...errors import KvcupyError, ProcessLocal
from ...ops import checks
from ..engine import send_together
from ..pages import hash_list
from ..pool import Pool, pool_like
from .cache import TieredCache
from .changes import Change, Removed
from .holds import HeldBlocks
from .leases import Lease, Match
from .prefixes import GroupBlocks, Prefixes, longest

_NAME_BYTES = 16

# Set by `kvcupy`: opens a shared store by URL for a host pool.
opener: Callable[..., Any] | None = None


@dataclass(frozen=True)
class TierGroup:
    """A group of layers whose blocks are kept in tiers.

    Attributes
    ----------
    name : distinguishes it from the other groups of the model, the same in every process
    pool : of its pages on the device
    blocks : which ones it needs of a prefix
    layers : for each layer of the pool, its number in the model
    """

    name: str
    pool: Pool
    blocks: GroupBlocks
    layers: tuple[int, ...]


class GroupedCache(Protocol):
    """The part of a `PagedKVCache` with groups that the tiers use."""

    def _tier_groups(self) -> list[TierGroup]: ...


class PrefixLease(ProcessLocal):
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
        return f"<PrefixLease of {self.num_blocks} blocks, {state}>"

    def __enter__(self) -> PrefixLease:
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
            for part in (*self.leases, self.states):
                if part is not None:
                    part.release()
            self._leave()


class MixedTieredCache(TieredCache):
    """What `TieredCache(groups=cache, ...)` makes; the documentation is there."""

    def __init__(
        self, device_pool: Any = None, host_pool: Any = None, *,
        groups: GroupedCache, host_bytes: int, disk: Any = None, disk_bytes: int = 0,
        model: str = "", encryption_key: Any = None, policy: Any = "lru", write: str = "through",
        shared: Any = None, shared_bytes: int | None = None, shared_write: str = "through",
        shared_prefetch: float = 0.25,
    ) -> None:  # fmt: skip
        if device_pool is not None or host_pool is not None:
            raise ValueError("device_pool, host_pool: expected None with groups, which have pools")
        if not isinstance(model, str):
            raise TypeError(f"model: expected a str, got {type(model).__name__}")
        describe = getattr(groups, "_tier_groups", None)
        if describe is None:
            raise TypeError(f"groups: expected a PagedKVCache with groups, got {groups!r}")
        self.groups: tuple[TierGroup, ...] = tuple(describe())
        blocks = [group.blocks for group in self.groups]
        counts = _host_pages(self.groups, host_bytes)
        host_pools = [
            pool_like(group.pool, count, dtype=group.pool.dtype)
            for group, count in zip(self.groups, counts, strict=True)
        ]
        weights = [pool.num_bytes for pool in host_pools]
        self._masks = [_mask(group.name) for group in self.groups]
        self._caches: list[TieredCache] = []
        self._stores: list[Any] = []  # opened by URL
        try:
            for i, (group, host) in enumerate(zip(self.groups, host_pools, strict=True)):
                own_model = f"{model}/{group.name}"
                store = self._store_of(shared, i, host, own_model, _share(shared_bytes, weights, i))
                self._caches.append(TieredCache(
                    group.pool, host, disk=None if disk is None else f"{disk}.{i}",
                    disk_bytes=_share(disk_bytes, weights, i) or 0, model=own_model,
                    encryption_key=encryption_key, policy=policy, write=write, shared=store,
                    shared_write=shared_write, shared_prefetch=shared_prefetch,
                ))  # fmt: skip
        except BaseException:
            for opened in (*self._caches, *self._stores):
                opened.close()
            raise
        self._is_shared = shared is not None
        self._lock = threading.RLock()  # of the prefixes; taken before the lock of a group's tiers
        # Not methods: in a cycle, all pools would stay until Python looks for cycles.
        has = partial(_has_block, self._caches, self._masks)
        # With a shared store blocks are of use even if the tiers lack others.
        discard = partial(_discard, [] if self._is_shared else self._caches, self._masks)
        self._prefixes = Prefixes(blocks, has, discard)
        self._lost: deque[tuple[int, int]] = deque()  # group and hash
        self._counts = {"prefix_hits": 0, "prefix_misses": 0}
        if not self._is_shared:  # else the store may have what the tiers have lost
            for i, cache in enumerate(self._caches):
                cache._follow(partial(_note_lost, self._lost, i, self._masks[i]))

    def _store_of(
        self, shared: Any, number: int, pool: Pool, model: str, capacity_bytes: int | None
    ) -> Any:
        """Return the store of a group, from the argument `shared`."""
        if shared is None:
            return None
        if isinstance(shared, str):
            assert opener is not None
            is_memory = shared.startswith("shm:")
            options = {"capacity_bytes": capacity_bytes} if is_memory else {}
            url = f"{shared}.{number}" if is_memory else shared  # one length of blocks each
            store = opener(url, pool, model=model, **options)
            self._stores.append(store)
            return store
        if not callable(shared):
            raise TypeError(
                "shared: expected a URL, or a function that opens a store for a host pool and a "
                f"model, with groups, got {shared!r}"
            )
        return shared(pool, model)

    def __repr__(self) -> str:
        return f"<TieredCache of {len(self.groups)} groups, {len(self._prefixes)} prefixes>"

    @property
    def closed(self) -> bool:
        return self._caches[0].closed

    # --- Looking prefixes up ---

    def match(self, hashes: Any, *, shared: bool = True) -> Match:
        keys = self._checked(hashes)
        levels = self._levels(keys)
        device, host, disk = (
            longest(self._blocks, len(keys), partial(_first_above, levels, level))
            for level in range(3)
        )
        stored = self._longest(keys, len(keys), levels) if shared and self._is_shared else disk
        return Match(device, host, disk, stored)

    def acquire(
        self, hashes: Any, *,
        after: Any = None, wait: str = "complete", deadline_s: float | None = None,
    ) -> Any:  # fmt: skip
        keys = self._checked(hashes)
        deadline_s = self._caches[0]._checked_wait(wait, deadline_s)
        lease = self.acquire_unsent(keys, after=after, wait=wait, deadline_s=deadline_s)
        self.send_loads()
        return lease

    def acquire_unsent(
        self, keys: list[int], is_there: Callable[[int, int], bool] | None = None, *,
        after: Any, wait: str = "complete", deadline_s: float | None = None,
    ) -> PrefixLease:  # fmt: skip
        """Acquire the longest prefix; loads are in the queues of the engines until `send_loads`.

        is_there : called with the number of a group and the index of a block; returns whether the
            caller has the block. None: it has none, and the blocks count as requested
        """
        self.enter(keys)
        leave = partial(self.leave, keys)
        try:
            has = _nowhere if is_there is None else is_there
            lease = self._acquire_prefix(keys, has, leave, after, wait, deadline_s)
        except BaseException:
            leave()
            raise
        if is_there is None:
            with self._lock:
                self._counts["prefix_hits"] += lease.num_blocks
                self._counts["prefix_misses"] += len(keys) - lease.num_blocks
        return lease

    def send_loads(self) -> None:
        """Send the loads out, in the order in which the model runs its layers."""
        send_together([
            (cache.engine, group.layers)
            for cache, group in zip(self._caches, self.groups, strict=True)
        ])  # fmt: skip

    def _acquire_prefix(
        self, keys: list[int], is_there: Callable[[int, int], bool], leave: Callable[[], None],
        after: Any, wait: str, deadline_s: float | None,
    ) -> PrefixLease:  # fmt: skip
        ends = None if deadline_s is None else time.monotonic() + deadline_s
        length = len(keys)
        while True:
            levels = self._levels(keys[:length])
            for i, own in enumerate(levels):
                own[:] = [0 if is_there(i, index) else level for index, level in enumerate(own)]
            length = self._longest(keys, length, levels)
            parts: list[Lease | HeldBlocks] = []
            indices: list[list[int]] = []
            missing = None
            try:
                for i, group in enumerate(self.groups) if length else ():
                    needed = [n for n in group.blocks.needed(length) if not is_there(i, n)]
                    indices.append(needed)
                    names = self.names(i, [keys[index] for index in needed])
                    left = None if ends is None else max(0.0, ends - time.monotonic())
                    cache = self._caches[i]
                    part: Lease | HeldBlocks
                    if group.blocks.is_state:
                        part = cache.hold(names, wait=wait, deadline_s=left)
                    else:
                        part = cache._acquire(names, after, wait, left, send=False)
                    parts.append(part)
                    if part.num_blocks < len(names):
                        missing = needed[part.num_blocks]
                        break
            except BaseException:
                _release(parts)
                raise
            if missing is None:
                leases = [p if isinstance(p, Lease) else None for p in parts]
                states = next((p for p in parts if isinstance(p, HeldBlocks)), None)
                return PrefixLease(length, indices, leases, states, leave)
            _release(parts)
            length = missing

    @property
    def _blocks(self) -> list[GroupBlocks]:
        return [group.blocks for group in self.groups]

    def _levels(self, keys: list[int]) -> list[list[int]]:
        """Return the highest tier of each block, by group: 0 to 2, or 3 for none."""
        return [cache._highest_tiers(self.names(i, keys)) for i, cache in enumerate(self._caches)]

    def _longest(self, keys: list[int], length: int, levels: list[list[int]]) -> int:
        """Return the length of the longest usable prefix, with the blocks in a shared store."""
        if not self._is_shared:
            return longest(self._blocks, length, partial(_first_above, levels, 2))

        def first_missing(number: int, indices: Sequence[int]) -> int | None:
            """Ask the store once for all blocks that no tier has."""
            own = levels[number]
            unknown = [index for index in indices if own[index] > 2]
            names = self.names(number, [keys[index] for index in unknown])
            num_stored = self._caches[number].match(names).shared if names else 0
            for index in unknown[:num_stored]:
                own[index] = 2
            return unknown[num_stored] if num_stored < len(unknown) else None

        return longest(self._blocks, length, first_missing)

    # --- For the paged cache ---

    def enter(self, keys: Sequence[int]) -> None:
        """Keep the blocks of a prefix until `leave`, also those that groups still lack."""
        with self._lock:
            self._process_lost()
            self._prefixes.enter(keys)

    def leave(self, keys: Sequence[int]) -> None:
        """End a use that has begun with `enter`; useless blocks are discarded."""
        with self._lock:
            self._process_lost()
            self._prefixes.leave(keys)

    def of_group(self, number: int) -> TieredCache:
        """Return the tiers of a group."""
        return self._caches[number]

    def has_state(self, key: int) -> bool:
        """Return whether the states behind a prefix are in some tier."""
        return all(
            _has_block(self._caches, self._masks, i, key)
            for i, group in enumerate(self.groups)
            if group.blocks.is_state
        )

    def names(self, number: int, keys: Sequence[int]) -> list[int]:
        """Return the hashes of blocks in the tiers of a group."""
        mask = self._masks[number]
        return [key ^ mask for key in keys]

    def _process_lost(self) -> None:
        """Discard what is useless without blocks that tiers have lost."""
        while self._lost:
            number, key = self._lost.popleft()
            if not _has_block(self._caches, self._masks, number, key):
                self._prefixes.lost(key)

    # --- Evicting, the files, and statistics ---

    def evict(self, num_blocks: int) -> None:
        checks.require_int(num_blocks, "num_blocks")
        if num_blocks < 0:
            raise ValueError(f"num_blocks: expected a number of blocks, got {num_blocks}")
        for cache in self._caches:
            cache._evict_up_to(int(num_blocks))
        with self._lock:
            self._process_lost()

    def flush(self, *, deadline_s: float = 30.0) -> None:
        failure: OSError | None = None
        for cache in self._caches:
            try:
                cache.flush(deadline_s=deadline_s)
            except OSError as error:
                failure = failure or error
        with self._lock:
            self._process_lost()
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
        failure: BaseException | None = None
        for part in (*self._caches, *self._stores):
            try:
                part.close(**({"deadline_s": deadline_s} if part in self._caches else {}))
            except (OSError, KvcupyError) as error:
                failure = failure or error
        self._stores = []
        if failure is not None:
            raise failure

    def stats(self) -> dict[str, float]:
        with self._lock:
            if not self.closed:
                self._process_lost()
        total: Counter[str] = Counter(self._counts)
        for cache in self._caches:
            total.update(cache.stats())
        return dict(total)

    def _follow(self, listener: Any) -> NoReturn:
        raise NotImplementedError("kvcupy.events of a cache of groups is not implemented")

    def _checked(self, hashes: Any) -> list[int]:
        """Check the argument `hashes`."""
        keys = hash_list(hashes)
        if self._is_shared and keys and min(keys) < 2**64:
            raise ValueError(
                "hashes: expected hashes of 128 bits (kv.block_hashes with bits=128) where "
                f"there is a shared store, got {min(keys)}"
            )
        if self.closed:
            raise KvcupyError("the cache is closed")
        return keys


def _release(parts: Sequence[Lease | HeldBlocks]) -> None:
    for part in parts:
        part.release()


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: MixedTieredCache, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"{name} of a cache of groups is not implemented")

    return refused


for _name in (
    "hold", "save", "insert", "retain", "release", "demote", "prefetch", "take_host_pages",
):  # fmt: skip
    setattr(MixedTieredCache, _name, _refuse(_name))


def _nowhere(number: int, index: int) -> bool:
    return False


def _has_block(caches: Sequence[TieredCache], masks: Sequence[int], number: int, key: int) -> bool:
    return caches[number]._has_block(key ^ masks[number])


def _discard(
    caches: Sequence[TieredCache], masks: Sequence[int], number: int, keys: Sequence[int]
) -> None:
    if caches:
        caches[number]._discard_blocks([key ^ masks[number] for key in keys])


def _note_lost(lost: deque[tuple[int, int]], number: int, mask: int, change: Change) -> None:
    """Note blocks that have left a tier; they may be in another."""
    if isinstance(change, Removed):
        lost.extend((number, hash ^ mask) for hash in change.hashes)


def _first_above(
    levels: Sequence[Sequence[int]], level: int, number: int, indices: Sequence[int]
) -> int | None:
    own = levels[number]
    return next((index for index in indices if own[index] > level), None)


def _mask(name: str) -> int:
    """Return what is combined with the hashes of a group's blocks: one for each name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=_NAME_BYTES).digest(), "little")


def _share(num_bytes: int | None, weights: Sequence[int], number: int) -> int | None:
    """Return a group's part of a number of bytes."""
    return None if num_bytes is None else num_bytes * weights[number] // sum(weights)


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
    low, high = least, 2 * least
    while total(high) <= host_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= host_bytes else (low, middle)
    return counts(low)


TieredCache._of_groups = MixedTieredCache
