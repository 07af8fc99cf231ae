"""Sequences of a paged cache in tiered caches, and in host memory.

    add        acquire a prefix | share its pages in each group | load the state at its end
    step end   pages that a window has passed | kept states    to the tiers
    remove     full pages that have hashes                     to the tiers
    offload    all pages and states                            to host memory, and back by onboard

Pages and states of all groups are loaded layer by layer, and attention waits for each. A prefix in
use keeps the blocks that it will need, though other groups still lack theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...config import cache_logger
from ...devices.protocol import Stream
from ...errors import (
    ORDERLY_ERRORS,
    CacheFull,
    CaptureError,
    DeviceError,
    KvcupyError,
    OrderError,
    TransferError,
)
from ..engine import Transfer, TransferEngine, send_together
from ..hazards import Completion, CopiedPages, PageAccess, loads_of, raise_failure
from ..pages import PageAllocator
from ..pool import pool_like
from ..tiered.cache import TieredCache, evict
from ..tiered.changes import Described
from ..tiered.group_prefixes import GroupedLease, GroupPrefixes
from ..tiered.holds import HeldBlocks
from ..tiered.leases import LeaseCompletion
from ..tiered.prefixes import GroupBlocks, TierGroup
from ..tiered.tiers import GroupTiers
from .groups import Recurrent
from .memory_plan import MemoryPlan
from .page_group import PageGroup
from .sequences import FREED, CachedSequence, Ints, OffloadedPages, Sequences
from .states import StateLoad, States


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


class Tiers:
    """Moves sequences and their blocks between a paged cache and a tiered cache.

    Attributes
    ----------
    tiered : once attached
    """

    def __init__(
        self, groups: Sequence[PageGroup], states: States | None, access: PageAccess
    ) -> None:
        self.tiered: TieredCache | None = None
        self._groups, self._states, self._access = groups, states, access
        self._page_size = groups[0].pool.page_size
        self._tiers: list[GroupTiers] = []  # of each group, and of the states
        self._prefixes: GroupPrefixes | None = None  # of a cache with groups
        self._chains: dict[Hashable, list[int]] = {}  # hashes with which sequences have entered
        # By group, between the pool of demoted pages and host memory, made when first needed.
        self._demoted_engines: dict[int, TransferEngine] = {}

    def attach(self, tiers: Any) -> None:
        """Use a tiered cache from now on, and evict its blocks where pages are needed."""
        groups = self._groups
        is_plain = len(groups) == 1 and self._states is None and not groups[0].window
        what = "a TieredCache" if is_plain else "TieredCache(groups=this cache)"
        if not isinstance(tiers, TieredCache) or (tiers._prefixes is None and not is_plain):
            raise TypeError(f"tiers: expected {what}, got {tiers!r}")
        if [group.pool for group in tiers.groups[: len(groups)]] != [g.pool for g in groups]:
            what = "one whose device_pool is the pool of this cache" if is_plain else what
            raise ValueError(f"tiers: expected {what}, got another cache's")
        if self.tiered is not None:
            raise ValueError("tiers: expected to be attached once, got a second one")
        self.tiered, self._tiers, self._prefixes = tiers, tiers._tiers, tiers._prefixes
        for number, group in enumerate(groups):
            # Not methods: in a cycle, all pools would stay until Python looks for cycles.
            group.sequences.evict = partial(_evict, tiers._tiers[number], group.pool.allocator)
            if group.window:
                group.sequences.take_unseen = partial(_take_unseen, tiers, number, self._access)

    def require(self, name: str) -> TieredCache:
        """Return the tiered cache; raise if it is missing. `name` is the argument that needs it."""
        if self.tiered is None:
            raise ValueError(f"{name}: expected a cache with a tiered cache; call attach first")
        return self.tiered

    # --- Prefixes ---

    def add(self, seq: Hashable, keys: list[int], token_ids: Ints | None, max_blocks: int) -> None:
        """Add a sequence that begins with the longest prefix that all groups can restore.

        max_blocks : of the prefix
        """
        after = self._access.copy_stream_after_all()
        lease = self._acquire(Described.prefix(keys, token_ids), after, max_blocks)
        length, states, loaded = lease.num_blocks, self._states, None
        try:
            if states is not None and lease.states is not None:
                loaded = states.receive(seq, partial(_load_state, lease.states, after))
            elif states is not None:
                states.add(seq)
            try:
                self._send_loads()
            except ORDERLY_ERRORS:
                if states is not None:
                    states.remove(seq)
                raise
        except ORDERLY_ERRORS:
            lease.release()
            raise
        if self._prefixes is not None:
            self._chains[seq] = keys
        for number, group in enumerate(self._groups):
            pages, indices = None, list[int]()
            if lease.leases:
                pages, indices = lease.leases[number], lease.indices[number]
            sequence = group.sequences.share(seq, pages, length, indices)
            sequence.hashes, sequence.token_ids = list(keys), token_ids
            if loaded is not None:
                sequence.loads.append(loaded)
        lease.hand_over()

    def _acquire(self, prefix: Described, after: Stream, max_blocks: int) -> GroupedLease:
        """Acquire a prefix; with groups, loads stay in the queues of the engines."""
        tiers = self.require("hashes")
        if self._prefixes is not None:
            return self._prefixes.acquire(prefix, tiers._stream(after), max_blocks=max_blocks)
        tokens = prefix.token_ids
        lease = tiers.acquire(
            prefix.hashes[:max_blocks], after=after,
            token_ids=None if tokens is None else tokens[:max_blocks].reshape(-1),
        )  # fmt: skip
        count = lease.num_blocks
        return GroupedLease(count, [list(range(count))], [lease], None, _nothing)

    def _send_loads(self) -> None:
        if self._prefixes is not None:
            self._prefixes.send_loads()

    def acquire_more(self, seq: Hashable, length: int, max_tokens: int) -> GroupedLease | None:
        """Acquire what a sequence lacks for a prefix of more than `length` tokens.

        Whole blocks only, up to `max_tokens`. None if the tiers have no such prefix.
        """
        sequences = [group.sequences.find(seq) for group in self._groups]
        page_size = self._page_size
        keys = sequences[0].hashes[: max_tokens // page_size]
        if seq not in self._chains or self._is_closed or len(keys) * page_size <= length:
            return None
        assert self._prefixes is not None and self.tiered is not None
        present = [set(np.flatnonzero(each.pages != FREED).tolist()) for each in sequences]
        if (states := self._states) is not None:
            ends = range(len(keys))
            present.append({i for i in ends if states.has_kept(seq, (i + 1) * page_size)})
        after = self.tiered._stream(self._access.copy_stream_after_all())
        try:
            lease = self._prefixes.acquire(Described.prefix(keys), after, present=present)
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
        return partial(_load_state, lease.states, self._access.copy_stream_after_all())

    def fill(self, seq: Hashable, lease: GroupedLease, loaded: Completion | None) -> None:
        """Give a sequence of the length of a lease the pages that it lacks."""
        for number, group in enumerate(self._groups):
            pages, indices = lease.leases[number], lease.indices[number]
            sequence = group.sequences.find(seq)
            if pages is not None:
                group.sequences.fill(sequence, pages, indices)
            if loaded is not None:
                sequence.loads.append(loaded)
        lease.leases = []
        lease.release()
        self._send_loads()

    # --- Sequences of groups keep their prefixes from being discarded ---

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Note that a sequence has the hashes of another."""
        if (keys := self._chains.get(parent)) is not None:
            self._enter(child, keys)

    def receive(self, seq: Hashable) -> None:
        """Note that a sequence has come from another cache, with its hashes."""
        if keys := self._groups[0].sequences.find(seq).hashes:
            self._enter(seq, list(keys))

    def _enter(self, seq: Hashable, keys: list[int]) -> None:
        if self._prefixes is not None:
            self._prefixes.enter(keys)
            self._chains[seq] = keys

    def remove(self, seq: Hashable) -> None:
        """Note that a sequence is gone."""
        if self._prefixes is not None and (keys := self._chains.pop(seq, None)) is not None:
            self._prefixes.leave(keys)

    def clear(self) -> None:
        """Note that all sequences are gone."""
        for seq in list(self._chains):
            self.remove(seq)

    # --- Blocks and states for the tiers ---

    @property
    def _is_closed(self) -> bool:
        """Whether no tiers take blocks."""
        return self.tiered is None or self.tiered.closed

    def publish(
        self, seq: Hashable, held: Sequence[CachedSequence] | None = None
    ) -> list[set[int]]:
        """Give the tiers the full pages of a sequence that have hashes.

        Returns the pages that they took, by group.

        held : the sequence in each group, if it is not of the cache
        """
        taken: list[set[int]] = [set() for _ in self._groups]
        if self.tiered is None or self.tiered.closed:
            return taken
        if self._prefixes is not None and seq not in self._chains:
            return taken
        sequences = held or [group.sequences.find(seq) for group in self._groups]
        first = sequences[0]
        if first.offloaded or not first.hashes:
            return taken
        if (after := stream_after_loads(self._access, *sequences)) is None:
            return taken
        if held is None and self._states is not None:
            # An imported sequence's are not in the tiers yet.
            kept = self._states.sound_kept(seq).items()
            self.publish_states([(seq, n, slot) for n, slot in kept], only_missing=True)
        length = min(len(first.hashes), first.committed // self._page_size)
        if self._states is not None:  # nothing after the last state is usable
            assert self._prefixes is not None
            interval = self.tiered.groups[-1].blocks.interval
            length -= length % interval
            while length and not self._prefixes.has_state(first.hashes[length - 1]):
                length -= interval
        for number, sequence in enumerate(sequences) if length else ():
            try:
                taken[number] = _insert(
                    self.tiered, number, self._groups[number].sequences, sequence, range(length),
                    after,
                )  # fmt: skip
            except Exception as error:
                if not any(taken):
                    raise
                cache_logger.warning("blocks of a sequence could not be kept: %s", error)
        return taken

    def publish_states(
        self, kept: Sequence[tuple[Hashable, int, int]], *, only_missing: bool = False
    ) -> None:
        """Give the tiers states that were kept: sequence, length and slot of each."""
        if self._is_closed or self._prefixes is None:
            return
        page_size = self._page_size
        keys, slots, parents, tokens = [], [], [], []
        for seq, length, slot in kept:
            sequence, index = self._groups[0].sequences.find(seq), length // page_size - 1
            if length % page_size == 0 and index < len(sequence.hashes):
                if only_missing and self._prefixes.has_state(sequence.hashes[index]):
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
                self._prefixes.save_states(saved, slots, self._access.copy_stream)

    # --- Host memory ---

    def offload(self, seq: Hashable) -> None:
        """Save pages and states of a sequence to host memory, unconverted, and release them."""
        sequences = [group.sequences.find(seq) for group in self._groups]
        if sequences[0].length == 0:
            return
        split = [g.sequences.split(each) for g, each in zip(self._groups, sequences, strict=True)]
        parts, demoted_parts, kept = [], {}, {}
        for number, (pages, demoted_pages, _) in enumerate(split):
            if len(demoted_pages):
                engine = self._engine_of_demoted(number)
                demoted_parts[number] = _Part(
                    engine, demoted_pages, engine.host_pool.allocator.alloc
                )
            tiers, label = self._tiers[number], self._groups[number].sequences.label
            parts.append(_Part(tiers.engine, pages, partial(_take_host_pages, tiers), label))
        if self._states is not None:
            kept = self._states.sound_kept(seq)
            slots = np.array([*self._states.slots([seq]), *kept.values()], np.int64)
            tiers, label = self._tiers[-1], self._states.label
            parts.append(_Part(tiers.engine, slots, partial(_take_host_pages, tiers), label))
        # Host pages of old tokens are taken first: nothing is evicted for them.
        saved = iter(self._save([*demoted_parts.values(), *parts], sequences))
        demoted_saved = {number: next(saved) for number in demoted_parts}
        for number, (group, sequence) in enumerate(zip(self._groups, sequences, strict=True)):
            demoted = demoted_saved.get(number)
            if group.sequences.is_shared(sequence):
                # A sequence that shares a page may soon own it alone, and write during the save.
                for engine in [parts[number].engine, *([demoted.engine] if demoted else [])]:
                    self._access.order.end(engine.save_stream)
            offloaded = replace(next(saved), demoted=demoted, demoted_start=split[number][2])
            group.sequences.offload(sequence, offloaded)
        if self._states is not None:
            self._states.offload(seq, next(saved), kept)

    def _save(
        self, parts: Sequence[_Part], sequences: Sequence[CachedSequence]
    ) -> list[OffloadedPages]:
        """Save pages to host memory, after all work and the loads of some sequences."""
        stream = self._access.copy_stream
        taken: list[Ints] = []
        try:
            for part in parts:
                taken.append(part.take_host_pages())
            with self._access.on(stream, *sequences):
                pass  # the saves wait for what the copy stream waits for
            saved = []
            for part, host_pages in zip(parts, taken, strict=True):
                save = part.engine.save(part.pages, host_pages, after=stream)
                part.engine._flush()
                saved.append(OffloadedPages(host_pages, save, part.engine))
        except ORDERLY_ERRORS:
            for part, host_pages in zip(parts, taken, strict=False):
                part.engine.host_pool.allocator.free(host_pages)
            raise
        return saved

    def onboard(self, seq: Hashable) -> None:
        """Load pages and states of an offloaded sequence; one on the device is not changed."""
        sequences = [group.sequences.find(seq) for group in self._groups]
        hosts = [each.offloaded for each in sequences if each.offloaded is not None]
        if not hosts:
            return
        states = self._states
        state = None if states is None else states.find(seq).offloaded
        for host in (*hosts, *([] if state is None else [state])):
            for part in (host, host.demoted):
                if part is not None:
                    part.save.synchronize()
        pages: list[tuple[Ints, Ints]] = []
        slots: list[int] = []
        try:
            for group, host in zip(self._groups, hosts, strict=True):
                num_demoted = 0 if host.demoted is None else len(host.demoted.pages)
                pages.append(group.sequences.allocate_both(len(host.pages), num_demoted))
            if states is not None:
                slots = states.take_slots(len(states.find(seq).offloaded_kept))
            loads = self._load(hosts, pages, state, slots)
        except ORDERLY_ERRORS:
            for group, in_group in zip(self._groups, pages, strict=False):
                group.sequences.free_both(*in_group)
            if states is not None:
                states.free(slots)
            raise
        state_load = None
        if states is not None and state is not None:
            state_load = StateLoad(loads.pop()[0])
            states.onboard(seq, slots, state_load)
            state.free()
        for number, (group, sequence) in enumerate(zip(self._groups, sequences, strict=True)):
            host = hosts[number]
            combined = group.sequences.combine(sequence, *pages[number], host.demoted_start)
            group.sequences.onboard(sequence, combined, loads[number])
            if state_load is not None:
                sequence.loads.append(state_load)
            host.free()

    def _load(
        self, hosts: Sequence[OffloadedPages], pages: Sequence[tuple[Ints, Ints]],
        state: OffloadedPages | None, slots: Sequence[int],
    ) -> list[list[Completion]]:  # fmt: skip
        """Load host pages of each group, and states, in the order in which layers run."""
        stream = self._access.copy_stream_after_all()
        loads: list[list[Completion]] = []
        engines: list[tuple[TransferEngine, Sequence[int]]] = []
        targets: list[tuple[Ints, ...]] = [*pages]
        if state is not None:
            targets.append((np.array(slots, np.int64),))
        parts = [*hosts, *([] if state is None else [state])]
        try:
            for part, numbers, tiers in zip(parts, targets, self._tiers, strict=True):
                loads.append([])
                for source, target in zip((part, part.demoted), numbers, strict=False):
                    if source is not None:
                        sources = source.pages[: len(target)]  # kept states may be left out
                        loads[-1].append(source.engine.load(sources, target, after=stream))
                        engines.append((source.engine, tiers.group.layers))
        finally:
            send_together(engines)
        for of_part in loads:
            for load in of_part:
                raise_failure(load.failure)
        return loads

    def _engine_of_demoted(self, number: int) -> TransferEngine:
        """Return the engine between a group's pool of demoted pages and host memory, made once."""
        if number not in self._demoted_engines:
            demoted_pool = self._groups[number].demoted_pool
            assert demoted_pool is not None
            host_pool = pool_like(demoted_pool, demoted_pool.num_pages, dtype=demoted_pool.dtype)
            self._demoted_engines[number] = TransferEngine(demoted_pool, host_pool)
        return self._demoted_engines[number]


@dataclass(frozen=True)
class _Part:
    """Pages of a sequence in one pool, to be saved to pages that `take` allocates."""

    engine: TransferEngine
    pages: Ints
    take: Callable[[int], Ints]
    label: str = ""

    def take_host_pages(self) -> Ints:
        try:
            return self.take(len(self.pages))
        except CacheFull as error:
            if not self.label:
                raise
            raise CacheFull(f"{self.label}: {error.args[0]}", error.argument) from error


def stream_after_loads(access: PageAccess, *sequences: CachedSequence) -> Stream | None:
    """Return the copy stream, after all work and the loads of sequences.

    None if a load has failed, or is a pull in progress: on a GPU, a pull that fails does not stop
    later work. A transfer that fails later does.
    """
    loads = loads_of(sequences)
    try:
        for load in loads:
            copy = load.load if isinstance(load, StateLoad) else load
            if not (isinstance(copy, (CopiedPages, Transfer, LeaseCompletion)) or copy.done()):
                return None
        with access.on(access.copy_stream, *sequences):
            pass
    except (DeviceError, TransferError):
        if not any(load.failure for load in loads):
            raise
    return None if any(load.failure for load in loads) else access.copy_stream


def _evict(tiers: GroupTiers, allocator: PageAllocator, count: int) -> None:
    """Evict blocks so that `count` pages are free, now or when transfers that touch them end.

    Pages become free at any time, so each number is asked for once.
    """
    missing = count - allocator.num_free
    if missing <= 0:
        return
    try:
        evict(tiers, missing)
    except CacheFull:  # pages that transfers still access are needed too
        evict(tiers, max(0, count - allocator.num_available))


def _take_host_pages(tiers: GroupTiers, count: int) -> Ints:
    return tiers.run(lambda: tiers.take_host_pages(count))


def _load_state(held: HeldBlocks, after: Any, slot: int) -> Completion:
    return held.load([slot], after=after)


def _insert(
    tiered: TieredCache, number: int, sequences: Sequences, sequence: CachedSequence,
    indices: range, after: Stream,
) -> set[int]:  # fmt: skip
    """Give the tiers of a group the unshared pages of a sequence; return the pages they took."""
    group = tiered.groups[number]
    owned = [
        index for index in sequences.owned_of(sequence, indices)
        if sequence.pages[index] < group.pool.num_pages  # not the demoted ones
        and group.blocks.can_serve(index)
    ]  # fmt: skip
    if not owned:
        return set()
    hashes, pages = sequence.hashes, sequence.pages[owned]
    tokens = None if sequence.token_ids is None else sequence.token_ids[owned]
    parents = [hashes[index - 1] if index else 0 for index in owned]
    blocks = Described([hashes[index] for index in owned], parents, tokens)
    return set(pages.tolist()) - set(tiered._insert(number, blocks, pages, after))


def _take_unseen(
    tiered: TieredCache, number: int, access: PageAccess,
    sequences: Sequences, sequence: CachedSequence, start: int, stop: int,
) -> set[int]:  # fmt: skip
    """Give the tiers the pages from `start` to `stop`, which a window has passed."""
    indices = range(start, min(stop, len(sequence.hashes)))
    if not indices or tiered.closed:
        return set()
    taken: set[int] = set()
    with losing("blocks that a window has passed"):
        if (after := stream_after_loads(access, sequence)) is not None:
            taken = _insert(tiered, number, sequences, sequence, indices, after)
    return taken


def _nothing() -> None:
    """End the use of a prefix that needs no end."""


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
