"""Moves sequences of a paged cache to host memory and back, and their blocks to tiered caches.

Pages and states of all groups are saved, and released when the saves are done. They are loaded
layer by layer, and attention waits for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...devices.protocol import Stream
from ...errors import CacheFull, DeviceError, TransferError
from ..engine import Transfer, TransferEngine, send_together
from ..hazards import Completion, CopiedPages, PageAccess, loads_of, raise_failure
from ..pages import PageAllocator
from ..pool import pool_like
from ..tiered.cache import TieredCache
from ..tiered.leases import Lease, LeaseCompletion
from .page_group import PageGroup
from .sequences import CachedSequence, Ints, OffloadedPages
from .states import StateLoad, States


class Tiers:
    """Moves sequences and their blocks between a paged cache and tiered caches.

    Attributes
    ----------
    tiered : of a cache without groups, once attached
    """

    def __init__(
        self, groups: Sequence[PageGroup], states: States | None, access: PageAccess
    ) -> None:
        self.tiered: TieredCache | None = None
        self._groups, self._states, self._access = groups, states, access
        self._pool, self._sequences = groups[0].pool, groups[0].sequences
        # Of each group, and of the states: the tiers, and the numbers of the layers in the model.
        self._caches: list[tuple[TieredCache, Sequence[int]]] = []
        # By group, between the pool of old tokens and host memory, made when first needed.
        self._past_engines: dict[int, TransferEngine] = {}

    def attach(self, tiers: Any) -> None:
        """Use a tiered cache from now on, and evict its blocks where pages are needed."""
        if not isinstance(tiers, TieredCache):
            raise TypeError(f"tiers: expected a TieredCache, got {tiers!r}")
        if tiers.device_pool is not self._pool:
            raise ValueError("tiers: expected one whose device_pool is the pool of this cache")
        if self.tiered is not None:
            raise ValueError("tiers: expected to be attached once, got a second one")
        self.tiered = tiers
        self.attach_groups([tiers], [range(self._pool.num_layers)])
        # Not a method: in a cycle, all pools would stay until Python looks for cycles.
        self._sequences.evict = partial(evict, tiers, self._pool.allocator)

    def attach_groups(self, caches: Sequence[TieredCache], layers: Sequence[Sequence[int]]) -> None:
        """Offload to the host memory of these tiered caches: of each group, and of the states.

        layers : of each, their numbers in the model
        """
        self._caches = list(zip(caches, layers, strict=True))

    def require(self, name: str) -> TieredCache:
        """Return the tiered cache; raise if it is missing. `name` is the argument that needs it."""
        self.require_attached(name)
        assert self.tiered is not None
        return self.tiered

    def require_attached(self, name: str) -> None:
        """Raise if there is no tiered cache."""
        if not self._caches:
            raise ValueError(f"{name}: expected a cache with a tiered cache; call attach first")

    def acquire(self, hashes: Sequence[int], token_ids: Ints | None) -> Lease:
        """Return a lease of the leading blocks that the tiered cache knows."""
        after = self._access.copy_stream_behind_all()
        return self.require("hashes").acquire(hashes, after=after, token_ids=token_ids)

    def offload(self, seq: Hashable) -> None:
        """Save pages and states of a sequence to host memory, unconverted, and release them."""
        found = [group.sequences.find(seq) for group in self._groups]
        if found[0].length == 0:
            return
        split = [g.sequences.split(own) for g, own in zip(self._groups, found, strict=True)]
        parts, past_parts, kept = [], {}, {}
        for number, (pages, past_pages, _) in enumerate(split):
            if len(past_pages):
                engine = self._engine_of_past(number)
                past_parts[number] = _Part(engine, past_pages, engine.host_pool.allocator.alloc)
            cache, label = self._caches[number][0], self._groups[number].sequences.label
            parts.append(_Part(cache.engine, pages, cache.take_host_pages, label))
        if self._states is not None:
            kept = self._states.sound_kept(seq)
            slots = np.array([*self._states.slots([seq]), *kept.values()], np.int64)
            cache = self._caches[-1][0]
            parts.append(_Part(cache.engine, slots, cache.take_host_pages, self._states.label))
        # Host pages of old tokens are taken first: nothing is evicted for them.
        saved = iter(self._save([*past_parts.values(), *parts], found))
        past_saved = {number: next(saved) for number in past_parts}
        for number, (group, own) in enumerate(zip(self._groups, found, strict=True)):
            past = past_saved.get(number)
            if group.sequences.is_shared(own):
                # A sequence that shares a page may soon own it alone, and write during the save.
                for engine in [parts[number].engine, *([past.engine] if past else [])]:
                    self._access.order.end(engine.save_stream)
            offloaded = replace(next(saved), past=past, past_start=split[number][2])
            group.sequences.offload(own, offloaded)
        if self._states is not None:
            self._states.offload(seq, next(saved), kept)

    def _save(
        self, parts: Sequence[_Part], sequences: Sequence[CachedSequence]
    ) -> list[OffloadedPages]:
        """Save pages to host memory, behind all work and the loads of some sequences."""
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
        except BaseException:
            for part, host_pages in zip(parts, taken, strict=False):
                part.engine.host_pool.allocator.free(host_pages)
            raise
        return saved

    def onboard(self, seq: Hashable) -> None:
        """Load pages and states of an offloaded sequence; one on the device is left alone."""
        found = [group.sequences.find(seq) for group in self._groups]
        hosts = [own.offloaded for own in found if own.offloaded is not None]
        if not hosts:
            return
        states = self._states
        state = None if states is None else states.find(seq).offloaded
        for host in (*hosts, *([] if state is None else [state])):
            for part in (host, host.past):
                if part is not None:
                    part.save.synchronize()
        pages: list[tuple[Ints, Ints]] = []
        slots: list[int] = []
        try:
            for group, host in zip(self._groups, hosts, strict=True):
                num_past = 0 if host.past is None else len(host.past.pages)
                pages.append(group.sequences.allocate_both(len(host.pages), num_past))
            if states is not None:
                slots = states.take_slots(len(states.find(seq).offloaded_kept))
            loads = self._load(hosts, pages, state, slots)
        except BaseException:
            for group, own_pages in zip(self._groups, pages, strict=False):
                group.sequences.free_both(*own_pages)
            if states is not None:
                states.free(slots)
            raise
        state_load = None
        if states is not None and state is not None:
            state_load = StateLoad(loads.pop()[0])
            states.onboard(seq, slots, state_load)
            state.free()
        for number, (group, own) in enumerate(zip(self._groups, found, strict=True)):
            host = hosts[number]
            combined = group.sequences.combine(own, *pages[number], host.past_start)
            group.sequences.onboard(own, combined, loads[number])
            if state_load is not None:
                own.loads.append(state_load)
            host.free()

    def _load(
        self, hosts: Sequence[OffloadedPages], pages: Sequence[tuple[Ints, Ints]],
        state: OffloadedPages | None, slots: Sequence[int],
    ) -> list[list[Completion]]:  # fmt: skip
        """Load host pages of each group, and states, in the order in which layers run."""
        stream = self._access.copy_stream_behind_all()
        loads: list[list[Completion]] = []
        engines: list[tuple[TransferEngine, Sequence[int]]] = []
        targets: list[tuple[Ints, ...]] = [*pages]
        if state is not None:
            targets.append((np.array(slots, np.int64),))
        parts = [*hosts, *([] if state is None else [state])]
        try:
            for part, numbers, (_, layers) in zip(parts, targets, self._caches, strict=True):
                loads.append([])
                for source, target in zip((part, part.past), numbers, strict=False):
                    if source is not None:
                        sources = source.pages[: len(target)]  # kept states may be left out
                        loads[-1].append(source.engine.load(sources, target, after=stream))
                        engines.append((source.engine, layers))
        finally:
            send_together(engines)
        for own in loads:
            for load in own:
                raise_failure(load.failure)
        return loads

    def _engine_of_past(self, number: int) -> TransferEngine:
        """Return the engine between a group's pool of demoted pages and host memory, made once."""
        if number not in self._past_engines:
            past_pool = self._groups[number].past_pool
            assert past_pool is not None
            host_pool = pool_like(past_pool, past_pool.num_pages, dtype=past_pool.dtype)
            self._past_engines[number] = TransferEngine(past_pool, host_pool)
        return self._past_engines[number]

    def publish(self, sequence: CachedSequence) -> set[int]:
        """Give the tiered cache a sequence's own full pages with hashes; return those it took."""
        tiers = self.tiered
        if tiers is None or tiers.closed or sequence.offloaded:
            return set()
        count = min(len(sequence.hashes), sequence.committed // self._pool.page_size)
        owned = [
            index for index in self._sequences.owned_of(sequence, range(count))
            if sequence.pages[index] < self._pool.num_pages  # not the demoted ones
        ]  # fmt: skip
        if not owned or (after := stream_behind_loads(self._access, sequence)) is None:
            return set()
        pages = sequence.pages[owned].tolist()
        hashes = [sequence.hashes[i] for i in owned]
        parents = [sequence.hashes[i - 1] if i else 0 for i in owned]
        tokens = None if sequence.token_ids is None else sequence.token_ids[owned].reshape(-1)
        unneeded = tiers.insert(hashes, pages, after=after, parent=parents, token_ids=tokens)
        return set(pages) - set(unneeded)


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


def stream_behind_loads(access: PageAccess, *sequences: CachedSequence) -> Stream | None:
    """Return the copy stream behind all work and the loads of sequences.

    None if a load has failed, or is a pull in progress: on a GPU, a pull that fails does not stop
    the work behind it. A transfer that fails later does.
    """
    loads = loads_of(sequences)
    try:
        for load in loads:
            own = load.load if isinstance(load, StateLoad) else load
            if not (isinstance(own, (CopiedPages, Transfer, LeaseCompletion)) or own.done()):
                return None
        with access.on(access.copy_stream, *sequences):
            pass
    except (DeviceError, TransferError):
        if not any(load.failure for load in loads):
            raise
    return None if any(load.failure for load in loads) else access.copy_stream


def evict(tiers: TieredCache, allocator: PageAllocator, count: int) -> None:
    """Evict blocks so that `count` pages are free, now or when transfers that touch them end.

    Pages become free at any time, so each number is asked for once.
    """
    missing = count - allocator.num_free
    if missing <= 0:
        return
    try:
        tiers.evict(missing)
    except CacheFull:  # pages that transfers still touch are needed too
        tiers.evict(max(0, count - allocator.num_available))
