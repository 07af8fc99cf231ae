"""Sequences that leave for another cache, or come from one.

    exporting cache   hold pages | offer | ... layer 0 is written, layer 1 is written ... | release
    importing cache                 allocate pages | pull | attention waits layer by layer

An offer has the pages of all pools: of each group its pages and its demoted pages, which go out
unconverted, and of recurrent layers the live state and kept ones.
A held page is shared: a sequence copies it before a write, and it is freed with the last reference.

Senders, receivers, offers and pulls are classes of `kvcupy.remote.migration`, which imports this.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...devices.protocol import Stream
from ..hazards import PageAccess, StreamCompletion
from ..pool import Pool
from .page_group import PageGroup
from .sequences import CachedSequence, Ints, Sequences
from .states import KeptState, StateLoad, States
from .tiers import Tiers

# The kept state at the end of a sequence, if that is a checkpoint, and the one before it.
_MAX_KEPT_STATES = 2
_NUMBERS = ("evicted", "window", "sink_tokens", "first_kept")  # of a sequence
_ORDER = ("demoted", "pages", "kept", "state")  # in which the parts of a sequence go out


class Export:
    """Layers of an offered sequence, with their units, that the running step is yet to write.

    `fill` writes all of them when the step has ended; without it, attention writes each.
    """

    def __init__(
        self, offer: Any, units: Mapping[int, int], fill: Callable[[], object] | None = None
    ) -> None:
        self._offer, self._fill = offer, fill
        self._missing = dict(units)

    def layer_written(self, layer: int, stream: Stream) -> None:
        """Let a layer go out once `stream` has passed this point; the first call of each counts."""
        if self._fill is None and layer in self._missing:
            self._offer.announce([self._missing[layer]], stream)
            del self._missing[layer]

    def finish(self, stream: Stream) -> None:
        """Let the layers go out that have not been announced yet."""
        if self._fill is not None:
            self._fill()
            self._fill = None
        if self._missing:
            self._offer.announce([*self._missing.values()], stream)
            self._missing.clear()

    def withdraw(self, stream: Stream) -> None:
        """Take the offer back; the pages are free when `stream` has passed this point."""
        self._fill = None
        self._offer.withdraw()
        self.finish(stream)


class _Place(NamedTuple):
    """A part of a sequence: "pages" or "demoted" pages of a group, "state" or "kept"."""

    kind: str
    group: int
    pool: int


@dataclass(eq=False)
class _Held:
    """Parts of a sequence that are held until the offer of them is over."""

    sequences: list[CachedSequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    kept: dict[int, KeptState] = field(default_factory=dict)


class Exchange:
    """Offers sequences of a cache to other caches, and adds theirs.

    The pages of an offered sequence are held until its offer is over. An offer ends in a thread of
    its sender; the thread that uses the cache releases the pages when it needs or counts pages.
    `fields` returns what caches that exchange sequences must have in common; `pools` hold parts of
    a sequence.
    """

    def __init__(
        self, groups: Sequence[PageGroup], states: States | None,
        fields: Callable[[], Mapping[str, str]], tiers: Tiers, access: PageAccess,
    ) -> None:  # fmt: skip
        self._groups, self._states, self._fields = groups, states, fields
        self._tiers, self._access = tiers, access
        self._owners: list[Sequences | States] = [group.sequences for group in groups]
        self._places: list[_Place] = []
        pools: list[Pool] = []
        for number, group in enumerate(groups):
            for kind, pool in (("pages", group.pool), ("demoted", group.demoted_pool)):
                if pool is not None:
                    self._places.append(_Place(kind, number, len(pools)))
                    pools.append(pool)
        if states is not None:
            self._owners.append(states)
            self._places += [_Place(kind, 0, len(pools)) for kind in ("state", "kept")]
            pools.append(states.pool)
        self.pools = tuple(pools)
        self._ended: deque[_Held] = deque()  # whose offers are over
        self._removed: deque[Hashable] = deque()
        # Not a method: in a cycle, all pools would stay until Python looks for cycles.
        self._reclaim = partial(_reclaim, weakref.ref(self))

    def export(
        self, seq: Hashable, sender: Any, *, step_start: int | None,
        exports: Sequence[list[Export]], lease_s: float,
    ) -> bytes:  # fmt: skip
        """Offer a sequence, after all work so far or, in a step, layer by layer.

        Demoted pages are offered as a whole, and the state when the step has ended. Pages that no
        window sees then are not offered. `step_start` is the length before the step that the
        sequence belongs to, to whose `exports` the offer's are added, by group.
        """
        by_layer = step_start is not None
        found = [group.sequences.find(seq) for group in self._groups]
        if found[0].parents:
            raise ValueError(f"seq: {seq!r} has a token tree: call commit_token_tree first")
        if found[0].length == 0:
            raise ValueError(f"seq: expected a sequence with tokens, got {seq!r}, which is empty")
        if by_layer and found[0].num_beyond_window:
            raise ValueError(
                f"seq: the window of {seq!r} slides at the end of the step; export it after that"
            )
        self._require_pools(sender, "_offer_parts", "sender: expected a PageSender")
        stream, states = self._access.copy_stream, self._states
        self._reclaim_before_allocations()
        held, fill = _Held(), None
        release = partial(self._ended.append, held)
        numbers: list[Any] = []  # by place
        demoted: list[range] = []
        try:
            for group, sequence in zip(self._groups, found, strict=True):
                held.sequences.append(group.sequences.hold(sequence))
                group.free_unseen(held.sequences[-1], step_start or 0)
                pages, others, start = group.sequences.split(held.sequences[-1])
                numbers += [pages] if group.demoted_pool is None else [pages, others]
                demoted.append(range(start, start + len(others)))
            if states is not None:
                held.kept = states.hold_kept(seq, _MAX_KEPT_STATES)
            if not by_layer or held.kept or any(demoted):
                with self._access.on(stream, *found):
                    pass  # the offer waits for what the copy stream waits for
            if states is not None:
                slot, fill = states.hold(self._access, seq)
                held.slots.append(slot)
                if not by_layer:
                    fill()
                numbers += [held.slots, [kept.slot for kept in held.kept.values()]]
            places = self._present(list(map(len, numbers)))
            units = self._units(places)
            is_late = [by_layer and places[n].kind in ("pages", "state") for n, _ in units]
            completion = StreamCompletion(stream)
            self._tiers.fork(seq, held)
            offer = sender._offer_parts(
                [(place.pool, np.array(pages, np.int64))
                 for place, pages in zip(places, filter(len, numbers), strict=True)],
                units, [None if late else completion for late in is_late], release, lease_s,
                sequence=self._described(held, demoted),
            )  # fmt: skip
            for number, place in enumerate(places):
                late = {layer: unit for unit, (n, layer) in enumerate(units)
                        if n == number and is_late[unit]}  # fmt: skip
                if late:
                    late_fill = fill if place.kind == "state" else None
                    exports[place.group].append(Export(offer, late, late_fill))
        except BaseException:
            if (interrupted := sender._offer_with(release)) is not None:
                interrupted.withdraw()  # the sender has the pages already
                interrupted.announce(range(len(units)), stream)
            elif held not in self._ended:
                self._drop(held)
            raise
        return bytes(offer.ticket)

    def _described(self, held: _Held, demoted: Sequence[range]) -> dict[str, Any]:
        """Describe a sequence for its ticket.

        Only hashes of full pages are included: a prompt that is not computed to its end has more.
        """
        first = held.sequences[0]
        return {
            "fields": dict(self._fields()), "length": first.length, "kept": [*held.kept],
            "hashes": first.hashes[: first.length // self._groups[0].pool.page_size],
            "groups": [
                {
                    "demoted": (indices.start, indices.stop),
                    "demotion": _demotion_fields(group) if indices else {},
                    **{name: getattr(sequence, name) for name in _NUMBERS},
                }
                for group, sequence, indices in
                zip(self._groups, held.sequences, demoted, strict=True)
            ],
        }  # fmt: skip

    def remove_later(self, seqs: Iterable[Hashable]) -> None:
        """Remove sequences without hashes, outside of steps, when pages are next needed."""
        self._removed.extend(seqs)
        self._reclaim_before_allocations()

    def _reclaim_before_allocations(self) -> None:
        for part in self._owners:
            part.reclaim = self._reclaim

    def reclaim(self) -> None:
        """Release what ended offers have held; full pages with hashes go to tiered caches."""
        while self._removed:
            seq = self._removed.popleft()
            if seq in self._groups[0].sequences:
                for part in self._owners:
                    part.remove(seq)
        while self._ended:
            held = self._ended.popleft()
            published: Sequence[Collection[int]] = ()
            try:
                if held.sequences:
                    published = self._tiers.publish(held, held.sequences)
            finally:
                self._drop(held, published)

    def _drop(self, held: _Held, published: Sequence[Collection[int]] = ()) -> None:
        for number, sequence in enumerate(held.sequences):
            self._groups[number].sequences.drop(sequence, published[number] if published else ())
        if self._states is not None:
            self._states.free(held.slots)
            self._states.release_kept(held.kept.values())
        self._tiers.remove(held)

    def add(self, seq: Hashable, ticket: bytes, receiver: Any, deadline_s: float) -> Any:
        """Add the sequence that a ticket describes; its pages arrive in the background."""
        self._require_pools(receiver, "_pull", "receiver: expected a PageReceiver")
        decoded = receiver.inspect(ticket)
        if decoded.sequence is None:
            raise ValueError("ticket: expected one of export_sequence, got one of offer")
        sequences, demoted = self._decoded(decoded.sequence)
        num_kept = len(decoded.sequence["kept"])
        counts: list[int] = []  # by place
        for group, sequence, indices in zip(self._groups, sequences, demoted, strict=True):
            count = group.sequences.num_kept(sequence) - len(indices)
            counts += [count] if group.demoted_pool is None else [count, len(indices)]
        counts += [1, num_kept] if self._states is not None else []
        places = self._present(counts)
        units = self._units(places)
        expected = [(place.pool, count) for place, count in
                    zip(places, filter(None, counts), strict=True)]  # fmt: skip
        got = [(part.pool, len(part.pages)) for part in decoded.parts]
        if got != expected or units != list(decoded.units):
            raise ValueError(f"ticket: expected pages of its sequence, {expected}, got {got}")
        pages: list[tuple[Ints, Ints]] = []
        slots: list[int] = []
        kept_slots: list[int] = []
        try:
            targets: list[Any] = []
            for group, indices in zip(self._groups, demoted, strict=True):
                count = counts[len(targets)]
                pages.append(group.sequences.allocate_both(count, len(indices)))
                targets += pages[-1][:1] if group.demoted_pool is None else pages[-1]
            if self._states is not None:
                slots = self._states.take_slots(0)
                kept_slots = self._states.take_kept_slots(num_kept)
                targets += [slots, kept_slots]
            # Kept states stay where they are if there is no room for them.
            into = [
                (place.pool, target) if len(target) else None
                for place, target, count in zip(self._places, targets, counts, strict=True) if count
            ]  # fmt: skip
            pull = receiver._pull(
                decoded, into, self._layers(places, units), deadline_s,
                self._access.copy_stream_after_all(),
            )  # fmt: skip
            loads = {
                place: pull._part({layer: u for u, (n, layer) in enumerate(units) if n == number})
                for number, place in enumerate(places)
            }
            states = [StateLoad(loads[place]) for place in places if place.kind == "state"]
            for number, group in enumerate(self._groups):
                sequence = sequences[number]
                combined = group.sequences.combine(sequence, *pages[number], demoted[number].start)
                parts = [
                    load for place, load in loads.items()
                    if place.group == number and place.kind in ("pages", "demoted")
                ]  # fmt: skip
                group.sequences.receive(seq, sequence, combined, [*parts, *states])
            if self._states is not None:
                kept = dict(zip(decoded.sequence["kept"], kept_slots, strict=False))
                self._states.adopt(seq, slots[0], kept, loads.get(self._places[-1]))
        except BaseException:
            for group, both in zip(self._groups, pages, strict=False):
                if seq in group.sequences:
                    group.sequences.remove(seq)
                else:
                    group.sequences.free_both(*both)
            if self._states is not None:
                self._states.free([*slots, *kept_slots])
            raise
        return pull

    def _decoded(self, described: Mapping[str, Any]) -> tuple[list[CachedSequence], list[range]]:
        """Return a described sequence, without pages, and the indices of its demoted pages.

        ValueError that names the ticket unless this cache has what the other has in common with it.
        """
        _require_same(described["fields"], self._fields())
        sequences, ranges = [], []
        for group, numbers in zip(self._groups, described["groups"], strict=True):
            sequence, demoted = CachedSequence(), range(*numbers["demoted"])
            if demoted:
                _require_same(numbers["demotion"], _demotion_fields(group))
            sequence.length, sequence.hashes = described["length"], list(described["hashes"])
            for name in _NUMBERS:
                setattr(sequence, name, numbers[name])
            sequences.append(sequence)
            ranges.append(demoted)
        return sequences, ranges

    def _present(self, counts: Sequence[int]) -> list[_Place]:
        """Return the places that have pages."""
        return [place for place, count in zip(self._places, counts, strict=True) if count]

    def _units(self, places: Sequence[_Place]) -> list[tuple[int, int]]:
        """Return (number of the place, layer) in the order in which layers go out.

        Pages go out in the order of the layers of the model, and states, which a step writes last,
        at the end.
        """
        keyed = [
            (_ORDER.index(place.kind), model_layer, number, layer)
            for number, place in enumerate(places)
            for layer, model_layer in enumerate(self._model_layers(place))
        ]
        return [(number, layer) for *_, number, layer in sorted(keyed)]

    def _model_layers(self, place: _Place) -> Sequence[int]:
        """Return the number in the model of each layer of a place."""
        layers = None
        if place.kind in ("pages", "demoted"):
            layers = self._groups[place.group].model_layers
        return layers or range(self.pools[place.pool].num_layers)

    def _layers(self, places: Sequence[_Place], units: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Return the unit with which each layer of the model is complete; states as a whole."""
        found: dict[int, int] = {}
        for unit, (number, layer) in enumerate(units):
            place = places[number]
            if place.kind in ("pages", "demoted"):
                found[self._model_layers(place)[layer]] = unit
            elif place.kind == "state" and self._states is not None:
                found |= dict.fromkeys(self._states.layers, unit)
        return found

    def _require_pools(self, end: Any, method: str, expected: str) -> None:
        """Raise unless a sender or receiver is of the pools of this cache."""
        pools = getattr(end, "pools", None)
        if not (isinstance(pools, tuple) and hasattr(end, method)):
            raise TypeError(f"{expected}, got {end!r:.200}")
        if list(map(id, pools)) != list(map(id, self.pools)):
            raise ValueError(f"{expected} of this cache, got {end!r:.200}")


def _demotion_fields(group: PageGroup) -> dict[str, str]:
    """Return what caches that exchange demoted pages must have in common."""
    demoted = group.demoted
    if demoted is None:
        return {}
    return {
        "demoted": demoted.pool.stored_as, "recent": str(demoted.recent),
        "sinks": str(demoted.sinks),
    }  # fmt: skip


def _require_same(theirs: Mapping[str, str], fields: Mapping[str, str]) -> None:
    for name in sorted({*fields, *theirs}):
        if theirs.get(name) != fields.get(name):
            raise ValueError(
                f"ticket: expected a sequence with {name} {fields.get(name)}, got "
                f"{theirs.get(name)}"
            )


def _reclaim(exchange: weakref.ref[Exchange]) -> None:
    if (owner := exchange()) is not None:
        owner.reclaim()
