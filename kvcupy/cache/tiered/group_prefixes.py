"""The prefixes of a cache with groups of layers: each group has its own tiers.

    prefix      [0][1][2][3]                 hashes of the caller
    full        [0][1][2][3]   tiers of its blocks
    window            [2][3]   tiers of its blocks
    state                [3]   tiers of its states, whose device pages are not cached

The hash of a block is the same in all groups. Stores tell groups apart by their models.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import ORDERLY_ERRORS, InterruptGuard, ProcessLocal
from ..engine import send_together
from .changes import Change, Described, Removed
from .holds import HeldBlocks, hold, save
from .leases import DEADLINE_S, Lease, Match, acquire, match
from .prefixes import Prefixes, longest
from .tiers import GroupTiers

if TYPE_CHECKING:
    from ...devices.protocol import Stream


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


class GroupPrefixes:
    """Finds and leases prefixes that all groups can restore, and discards unreachable blocks."""

    def __init__(self, tiers: Sequence[GroupTiers]) -> None:
        self._tiers = tiers
        self._blocks = [each.group.blocks for each in tiers]
        self._has_stores = any(each.store is not None for each in tiers)
        self.counts = {"prefix_hits": 0, "prefix_misses": 0}
        self.lock = threading.RLock()  # of the prefixes; taken before the lock of a group's tiers
        self._guard = InterruptGuard("TieredCache", reentrant=True)
        self._prefixes = Prefixes(
            self._blocks, [partial(_has_blocks, each) for each in tiers],
            [partial(_discard, each) for each in tiers],
        )  # fmt: skip
        self._lost: deque[tuple[int, Sequence[int]]] = deque()  # group and hashes
        if not self._has_stores:
            for number, each in enumerate(tiers):
                # Not a method: in a cycle, all pools would stay until Python looks for cycles.
                each.listeners.append(partial(_note_lost, self._lost, number))

    # --- Looking up and acquiring ---

    def match(self, keys: Sequence[int]) -> Match:
        """Count the blocks of the longest prefix on the device, in host memory, and in stores."""
        levels = self._levels(keys)
        device, host = (self._longest_in(levels, len(keys), tier) for tier in range(2))
        return Match(device, host, self._longest(keys, levels))

    def restorable(self, keys: Sequence[int]) -> list[list[int]]:
        """Return, by group, the blocks of the longest prefix that device and host can restore."""
        length = self._longest_in(self._levels(keys), len(keys))
        return [[keys[index] for index in blocks.needed(length)] for blocks in self._blocks]

    def acquire(
        self, prefix: Described, after: Stream, seconds: float = DEADLINE_S, *,
        present: Sequence[Collection[int]] = (), max_blocks: int | None = None,
    ) -> GroupedLease:  # fmt: skip
        """Acquire the longest prefix, without `present` blocks; `send_loads` follows."""
        keys = prefix.hashes
        length = len(keys) if max_blocks is None else max_blocks
        try:
            self.enter(keys)
            try:
                lease = self._acquire(prefix, length, present, after, seconds)
            except ORDERLY_ERRORS:
                self.leave(keys)
                raise
            if not present:
                with self.lock:
                    self.counts["prefix_hits"] += lease.num_blocks
                    self.counts["prefix_misses"] += length - lease.num_blocks
            return lease
        except BaseException as error:
            self.note(error)
            raise

    def note(self, error: BaseException) -> None:
        """Note what has ended a call that may have changed the groups."""
        for guard in (self._guard, *(each.guard for each in self._tiers)):
            guard.note(error)

    def send_loads(self) -> None:
        """Send the loads out, in the order in which the model runs its layers."""
        send_together([(each.engine, each.group.layers) for each in self._tiers])

    def _acquire(
        self, prefix: Described, length: int, present: Sequence[Collection[int]], after: Stream,
        seconds: float,
    ) -> GroupedLease:  # fmt: skip
        ends = time.monotonic() + seconds
        keys = prefix.hashes
        while True:
            levels = self._levels(keys[:length])
            for in_group, known in zip(levels, present, strict=False):
                in_group[:] = [0 if i in known else level for i, level in enumerate(in_group)]
            length = self._longest(keys[:length], levels)
            parts: list[Lease | HeldBlocks] = []
            indices: list[list[int]] = []
            missing = None
            try:
                for number, tiers in enumerate(self._tiers) if length else ():
                    needed = self._blocks[number].needed(length)
                    if present:
                        needed = [index for index in needed if index not in present[number]]
                    indices.append(needed)
                    blocks = prefix.at(needed)
                    left = max(0.0, ends - time.monotonic())
                    if self._blocks[number].is_state:
                        parts.append(hold(tiers, blocks, left))
                    else:
                        parts.append(acquire(tiers, blocks, after, left, send=False))
                    if parts[-1].num_blocks < len(needed):
                        missing = needed[parts[-1].num_blocks]
                        break
            except ORDERLY_ERRORS:
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
        levels = []
        for tiers in self._tiers:
            with tiers.lock, tiers.guard:
                tiers.require_open()
                pairs = zip(tiers.device.pages.find(keys), tiers.host.pages.find(keys), strict=True)
                levels.append([
                    0 if on_device is not None else 1 if in_host is not None else 2
                    for on_device, in_host in pairs
                ])  # fmt: skip
        return levels

    def _longest_in(self, levels: Sequence[Sequence[int]], length: int, tier: int = 1) -> int:
        """Return the length of the longest usable prefix in tiers up to one."""

        def first_missing(number: int, indices: Sequence[int]) -> int | None:
            in_group = levels[number]
            return next((index for index in indices if in_group[index] > tier), None)

        return longest(self._blocks, length, first_missing)

    def _longest(self, keys: Sequence[int], levels: Sequence[list[int]]) -> int:
        """Return the length of the longest usable prefix, with the blocks in stores."""
        if not self._has_stores:
            return self._longest_in(levels, len(keys))

        def first_missing(number: int, indices: Sequence[int]) -> int | None:
            """Ask the stores once for all blocks that no tier has."""
            in_group = levels[number]
            unknown = [index for index in indices if in_group[index] > 1]
            asked = [keys[index] for index in unknown]
            num_stored = match(self._tiers[number], asked).stores if asked else 0
            for index in unknown[:num_stored]:
                in_group[index] = 1
            return unknown[num_stored] if num_stored < len(unknown) else None

        return longest(self._blocks, len(keys), first_missing)

    # --- Prefixes in use, and unreachable blocks ---

    def enter(self, keys: Sequence[int]) -> None:
        """Keep the blocks of a prefix until `leave`, also those that groups still lack."""
        if not self._has_stores:
            with self.lock, self._guard:
                self.discard_unreachable()
                self._prefixes.enter(keys)

    def leave(self, keys: Sequence[int]) -> None:
        """End a use that has begun with `enter`; unreachable blocks are discarded."""
        if not (self._has_stores or self._guard.is_broken):
            with self.lock, self._guard:
                self.discard_unreachable()
                self._prefixes.leave(keys)

    def discard_unreachable(self) -> None:
        """Discard what is unreachable without blocks that tiers have lost."""
        with self.lock, self._guard:
            gone: list[int] = []
            while self._lost:
                number, hashes = self._lost.popleft()
                is_known = _has_blocks(self._tiers[number], hashes)
                gone += [hash for hash, known in zip(hashes, is_known, strict=True) if not known]
            if gone:
                self._prefixes.lost(gone)

    def clear(self) -> None:
        """Forget all prefixes without users: the tiers are empty."""
        with self.lock, self._guard:
            self._lost.clear()
            self._prefixes.clear()

    # --- States ---

    def has_state(self, key: int) -> bool:
        """Return whether the states at the end of a prefix are in some tier."""
        return all(
            _has_blocks(tiers, [key])[0]
            for tiers, blocks in zip(self._tiers, self._blocks, strict=True)
            if blocks.is_state
        )

    def save_states(self, prefixes: Described, slots: Sequence[int], after: Any) -> None:
        """Start to save states from their slots; waits for puts into stores that make room."""
        save(self._tiers[-1], prefixes, slots, after, wait=True)


def _has_blocks(tiers: GroupTiers, hashes: Sequence[int]) -> list[bool]:
    """Return whether some tier has each block."""
    with tiers.lock, tiers.guard:
        return [hash in tiers for hash in hashes]


def _discard(tiers: GroupTiers, hashes: Sequence[int]) -> None:
    """Forget blocks that are neither leased nor held."""
    with tiers.lock, tiers.guard:
        tiers.discard(hashes)


def _release(parts: Sequence[Lease | HeldBlocks]) -> None:
    for part in parts:
        part.release()


def _note_lost(lost: deque[tuple[int, Sequence[int]]], number: int, change: Change) -> None:
    """Note blocks that have left a tier; they may be in another."""
    if isinstance(change, Removed):
        lost.append((number, change.hashes))
