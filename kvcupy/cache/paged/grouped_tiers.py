"""Sequences of a cache with groups, and their blocks and states in a tiered cache.

    add        acquire a prefix | share its pages in each group | load the state behind it
    step end   pages behind a window | kept states                 to the tiers
    remove     full pages that have hashes                         to the tiers

A prefix in use keeps the blocks that it will make useful, though other groups still lack theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ...config import cache_logger
from ...errors import CacheFull, CaptureError, KvcupyError, OrderError
from ..hazards import Completion, PageAccess
from ..tiered.cache import TieredCache
from ..tiered.changes import Described
from ..tiered.grouped import GroupedLease, GroupedTieredCache
from ..tiered.holds import HeldBlocks
from ..tiered.prefixes import GroupBlocks, TierGroup
from .groups import Recurrent
from .memory_plan import MemoryPlan
from .page_group import PageGroup
from .sequences import FREED, CachedSequence, Ints, Sequences
from .states import States
from .tiers import evict, stream_behind_loads


def tier_groups(
    plan: MemoryPlan, groups: Sequence[PageGroup], states: States | None, page_size: int
) -> list[TierGroup]:
    """Describe the groups of attention layers and, as one group, all recurrent layers."""
    interval = 1
    if states is not None:
        interval = math.lcm(states.checkpoint_tokens, page_size) // page_size
    found = []
    for group in groups:
        num_last = None if group.window == 0 else -(-(group.window - 1) // page_size)
        num_first = -(-group.sink_tokens // page_size)
        blocks = GroupBlocks(num_last, num_first, interval)
        name = f"layers {','.join(map(str, group.model_layers))}"
        found.append(TierGroup(name, group.pool, blocks, group.model_layers, group.window))
    if states is not None:
        recurrent = [part.group for part in plan.groups if isinstance(part.group, Recurrent)]
        layers = [layer for group in recurrent for layer in group.layers]
        blocks = GroupBlocks(1, 0, interval, is_state=True)
        name = f"states of layers {','.join(map(str, layers))}"
        first = (min(layers),) * states.pool.num_layers
        found.append(TierGroup(name, states.pool, blocks, first))
    return found


class GroupedTiers:
    """Moves sequences of a cache with groups to and from a tiered cache of these groups."""

    def __init__(
        self, tiers: Any, groups: Sequence[PageGroup], states: States | None, access: PageAccess
    ) -> None:
        if not isinstance(tiers, GroupedTieredCache):
            raise TypeError(f"tiers: expected TieredCache(groups=this cache), got {tiers!r}")
        pools = [group.pool for group in groups]
        if [group.pool for group in tiers.groups[: len(groups)]] != pools:
            raise ValueError("tiers: expected TieredCache(groups=this cache), got another cache's")
        self.tiers = tiers
        self._groups, self._states, self._access = groups, states, access
        self._chains: dict[Hashable, list[int]] = {}  # hashes with which sequences have entered
        for number, group in enumerate(groups):
            sequences, own = group.sequences, tiers.of_group(number)
            # Not methods: in a cycle, all pools would stay until Python looks for cycles.
            sequences.evict = partial(evict, own, group.pool.allocator)
            if group.window:
                sequences.take_unseen = partial(
                    _take_unseen, tiers, number, access, group.pool.num_pages
                )

    def caches(self) -> tuple[list[TieredCache], list[tuple[int, ...]]]:
        """Return the tiers of each group and of the states, and their layers."""
        groups = self.tiers.groups
        return list(map(self.tiers.of_group, range(len(groups)))), [g.layers for g in groups]

    def add(self, seq: Hashable, keys: list[int], token_ids: Ints | None, most: int) -> None:
        """Add a sequence that begins with the longest prefix that all groups can restore.

        most : blocks of it
        """
        after = self._access.copy_stream_behind_all()
        prefix = Described.prefix(keys, token_ids)
        lease = self.tiers.acquire_unsent(prefix, after=after, most=most)
        length, states, loaded = lease.num_blocks, self._states, None
        try:
            if states is not None and lease.states is not None:
                loaded = states.receive(seq, partial(_load_state, lease.states, after))
            elif states is not None:
                states.add(seq)
            try:
                self.tiers.send_loads()
            except BaseException:
                if states is not None:
                    states.remove(seq)
                raise
        except BaseException:
            lease.release()
            raise
        self._chains[seq] = keys
        for number, group in enumerate(self._groups):
            own, indices = (lease.leases[number], lease.indices[number]) if length else (None, [])
            sequence = group.sequences.share(seq, own, length, indices)
            sequence.hashes, sequence.token_ids = list(keys), token_ids
            if loaded is not None:
                sequence.loads.append(loaded)
        lease.hand_over()

    def acquire_behind(self, seq: Hashable, length: int, most: int) -> GroupedLease | None:
        """Acquire what a sequence lacks for a prefix longer than `length`, up to `most` tokens.

        Whole blocks only. None if the tiers have no such prefix.
        """
        sequences = [group.sequences.find(seq) for group in self._groups]
        page_size = self._groups[0].pool.page_size
        keys = sequences[0].hashes[: most // page_size]
        if seq not in self._chains or self.tiers.closed or len(keys) * page_size <= length:
            return None
        present = [set(np.flatnonzero(own.pages != FREED).tolist()) for own in sequences]
        if (states := self._states) is not None:
            ends = range(len(keys))
            present.append({i for i in ends if states.has_kept(seq, (i + 1) * page_size)})
        after = self._access.copy_stream_behind_all()
        try:
            lease = self.tiers.acquire_unsent(Described.prefix(keys), present, after=after)
        except CacheFull:
            return None
        if lease.num_blocks * page_size > length:
            return lease
        lease.release()
        return None

    def load_state(self, lease: GroupedLease) -> Callable[[int], Completion] | None:
        """Return what begins to load the state of a lease to a slot; None if it has none."""
        if lease.states is None or not lease.states.num_blocks:
            return None
        return partial(_load_state, lease.states, self._access.copy_stream_behind_all())

    def fill(self, seq: Hashable, lease: GroupedLease, loaded: Completion | None) -> None:
        """Give a sequence of the length of a lease the pages that it lacks."""
        for number, group in enumerate(self._groups):
            own, indices = lease.leases[number], lease.indices[number]
            sequence = group.sequences.find(seq)
            if own is not None:
                group.sequences.fill(sequence, own, indices)
            if loaded is not None:
                sequence.loads.append(loaded)
        lease.leases = []
        lease.release()
        self.tiers.send_loads()

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Note that a sequence has the hashes of another."""
        if (keys := self._chains.get(parent)) is not None:
            self.tiers.enter(keys)
            self._chains[child] = keys

    def receive(self, seq: Hashable) -> None:
        """Note that a sequence has come from another cache, with its hashes."""
        if keys := self._groups[0].sequences.find(seq).hashes:
            self.tiers.enter(keys)
            self._chains[seq] = list(keys)

    def publish(
        self, seq: Hashable, found: Sequence[CachedSequence] | None = None
    ) -> list[set[int]]:
        """Give the tiers the full pages of a sequence that have hashes.

        Returns the pages that they took, by group.

        found : the sequence in each group, if it is not of the cache
        """
        taken: list[set[int]] = [set() for _ in self._groups]
        if seq not in self._chains or self.tiers.closed:
            return taken
        sequences = found or [group.sequences.find(seq) for group in self._groups]
        if (after := stream_behind_loads(self._access, *sequences)) is None:
            return taken
        if found is None and self._states is not None:
            # An imported sequence's are not in the tiers yet.
            kept = self._states.sound_kept(seq).items()
            self.publish_states([(seq, n, slot) for n, slot in kept], only_missing=True)
        first = sequences[0]
        length = min(len(first.hashes), first.committed // self._groups[0].pool.page_size)
        if self._states is not None:  # nothing behind the last state is usable
            interval = self.tiers.groups[-1].blocks.interval
            length -= length % interval
            while length and not self.tiers.has_state(first.hashes[length - 1]):
                length -= interval
        if not length:
            return taken
        for number, (group, sequence) in enumerate(zip(self._groups, sequences, strict=True)):
            try:
                taken[number] = _insert(
                    self.tiers, number, group.sequences, sequence, range(length), after,
                    group.pool.num_pages,
                )  # fmt: skip
            except Exception as error:
                if not any(taken):
                    raise
                cache_logger.warning("blocks of a sequence could not be kept: %s", error)
        return taken

    def remove(self, seq: Hashable) -> None:
        """Note that a sequence is gone."""
        if (keys := self._chains.pop(seq, None)) is not None:
            self.tiers.leave(keys)

    def clear(self) -> None:
        """Note that all sequences are gone."""
        for seq in list(self._chains):
            self.remove(seq)

    def publish_states(
        self, kept: Sequence[tuple[Hashable, int, int]], *, only_missing: bool = False
    ) -> None:
        """Give the tiers states that were kept: sequence, length and slot of each."""
        if self.tiers.closed:
            return
        page_size = self._groups[0].pool.page_size
        keys, slots, parents, tokens = [], [], [], []
        for seq, length, slot in kept:
            sequence, index = self._groups[0].sequences.find(seq), length // page_size - 1
            if length % page_size == 0 and index < len(sequence.hashes):
                if only_missing and self.tiers.has_state(sequence.hashes[index]):
                    continue
                keys.append(sequence.hashes[index])
                slots.append(slot)
                parents.append(sequence.hashes[index - 1] if index else 0)
                if sequence.token_ids is not None:
                    tokens.append(sequence.token_ids[index])
        if keys:
            known = np.stack(tokens) if len(tokens) == len(keys) else None
            with losing("states"):
                saved = Described(keys, parents, known)
                self.tiers.save_states(saved, slots, self._access.copy_stream)


def _load_state(held: HeldBlocks, after: Any, slot: int) -> Completion:
    return held.load([slot], after=after)


def _insert(
    tiers: GroupedTieredCache, number: int, sequences: Sequences, sequence: CachedSequence,
    indices: range, after: Any, num_pages: int,
) -> set[int]:  # fmt: skip
    """Give the tiers of a group the unshared pages of a sequence; return the pages they took."""
    blocks = tiers.groups[number].blocks
    owned = [
        index for index in sequences.owned_of(sequence, indices)
        if sequence.pages[index] < num_pages and blocks.can_serve(index)
    ]  # fmt: skip
    if not owned:
        return set()
    pages = sequence.pages[owned].tolist()
    tokens = None if sequence.token_ids is None else sequence.token_ids[owned].reshape(-1)
    unneeded = tiers.of_group(number).insert(
        [sequence.hashes[index] for index in owned], pages, after=after,
        parent=[sequence.hashes[index - 1] if index else 0 for index in owned], token_ids=tokens,
    )  # fmt: skip
    return set(pages) - set(unneeded)


def _take_unseen(
    tiers: GroupedTieredCache, number: int, access: PageAccess, num_pages: int,
    sequences: Sequences, sequence: CachedSequence, start: int, stop: int,
) -> set[int]:  # fmt: skip
    """Give the tiers the pages from `start` to `stop`, which a window has left behind."""
    indices = range(start, min(stop, len(sequence.hashes)))
    if not indices or tiers.closed:
        return set()
    taken: set[int] = set()
    with losing("blocks behind a window"):
        if (after := stream_behind_loads(access, sequence)) is not None:
            taken = _insert(tiers, number, sequences, sequence, indices, after, num_pages)
    return taken


@contextmanager
def losing(what: str) -> Iterator[None]:
    """Continue without blocks or states that cannot be kept."""
    try:
        yield
    except OrderError:
        raise
    except KvcupyError as error:
        if not isinstance(error, CaptureError):  # a copy cannot be part of a graph
            cache_logger.warning("%s could not be kept: %s", what, error)
