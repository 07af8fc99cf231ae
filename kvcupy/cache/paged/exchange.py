"""Sequences that leave for another cache, or come from one.

    exporting cache   hold pages | offer | ... layer 0 is written, layer 1 is written ... | release
    importing cache                 allocate pages | pull | attention waits layer by layer

An offer has the pages of all pools: of each group its pages and its demoted pages, which go out
unconverted, and of recurrent layers the live state and kept ones.
A held page is shared: a sequence copies it before a write, and it is freed with the last reference.

Senders, receivers, offers and pulls are classes of `kvcupy.remote.migration`, which imports this.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ...devices.protocol import Stream
from ..hazards import PageAccess, StreamCompletion
from ..pages import hash_list
from ..pool import Pool
from .page_group import PageGroup
from .sequences import CachedSequence, Ints, Sequences
from .states import KeptState, StateLoad, States
from .tiers import Tiers

_KIND = "kvcupy sequence"
_NAMES = {"kind", "fields", "length", "hashes", "groups", "kept"}
# The kept state at the end of a sequence, if that is a checkpoint, and the one before it.
_MAX_KEPT_STATES = 2
_NUMBERS = ("evicted", "window", "sink_tokens", "first_kept")  # of a sequence
_MAX_BYTES = 1 << 20  # of a description
_MAX_NUMBER = 2**62


@dataclass(frozen=True)
class Described:
    """A sequence as a ticket describes it.

    Attributes
    ----------
    sequences : without pages, of each group
    demoted : range of the indices of its demoted pages in each group
    kept : the numbers of tokens before the kept states, the newest first
    """

    sequences: Sequence[CachedSequence]
    demoted: Sequence[range]
    kept: Sequence[int] = ()


def encode_state(
    described: Described, fields: Mapping[str, str], groups: Sequence[PageGroup]
) -> bytes:
    """Describe a sequence as canonical JSON, with the `fields` that both caches have in common.

    Only hashes of full pages are included: a prompt that is not computed to its end has more.
    """
    first, page_size = described.sequences[0], groups[0].pool.page_size
    hashes = first.hashes[: first.length // page_size]
    state: dict[str, Any] = {
        "kind": _KIND, "fields": dict(fields), "length": first.length,
        "hashes": [f"{hash:x}" for hash in hashes], "kept": [*described.kept],
        "groups": [
            {**_numbers_of(group, sequence), **_encoded_range(group, demoted)}
            for group, sequence, demoted in
            zip(groups, described.sequences, described.demoted, strict=True)
        ],
    }  # fmt: skip
    encoded = json.dumps(state, sort_keys=True, separators=(",", ":")).encode()
    if len(encoded) > _MAX_BYTES:
        raise ValueError(
            f"seq: expected at most {_MAX_BYTES} bytes of description, got {len(encoded)}; "
            f"{len(hashes)} hashes are part of it"
        )
    return encoded


def _numbers_of(group: PageGroup, sequence: CachedSequence) -> dict[str, int]:
    """Return what a description says of a sequence in a group, besides the length."""
    numbers = {name: getattr(sequence, name) for name in _NUMBERS}
    return {**numbers, "num_pages": -(-sequence.end // group.pool.page_size)}


def _encoded_range(group: PageGroup, demoted: range) -> dict[str, Any]:
    if not demoted:
        return {}
    fields = _past_fields(group)
    return {"demoted": {"start": demoted.start, "count": len(demoted), "fields": fields}}


def decode_state(
    encoded: bytes, fields: Mapping[str, str], groups: Sequence[PageGroup]
) -> Described:
    """Return the sequence of `encode_state`.

    ValueError that names the ticket unless all of it is consistent and `fields` are the same, and
    the fields of demoted pages if there are any.
    """
    _require(len(encoded) <= _MAX_BYTES, f"at most {_MAX_BYTES} bytes", len(encoded))
    try:
        state = json.loads(encoded)
    except (ValueError, RecursionError):
        state = None
    _require(isinstance(state, dict), "one of export_sequence", "pages without a sequence")
    _require(set(state) == _NAMES and state["kind"] == _KIND, "one of export_sequence",
             f"fields {sorted(state)}")  # fmt: skip
    _require_same(state["fields"], fields)
    length, numbers, kept = state["length"], state["groups"], state["kept"]
    _require(_is_count(length) and length > 0, "a length", length)
    _require(isinstance(numbers, list) and len(numbers) == len(groups), f"{len(groups)} groups",
             numbers)  # fmt: skip
    _require(
        isinstance(kept, list) and all(_is_count(n) and 0 < n <= length for n in kept)
        and kept == sorted(set(kept), reverse=True),
        "lengths before kept states", kept,
    )  # fmt: skip
    # With several groups, or one with a window, sequences have no sliding window themselves.
    may_slide = fields.get("num_groups", "1") == "1" and not groups[0].window
    parts = [
        _decoded_group(*pair, length, may_slide=may_slide)
        for pair in zip(groups, numbers, strict=True)
    ]
    hashes = _hashes(state["hashes"], length // groups[0].pool.page_size)
    for sequence, _ in parts:
        sequence.hashes = list(hashes)
    return Described([s for s, _ in parts], [demoted for _, demoted in parts], kept)


def _decoded_group(
    group: PageGroup, encoded: Any, length: int, *, may_slide: bool
) -> tuple[CachedSequence, range]:
    """Return a sequence of a group without pages, and the indices of its demoted pages."""
    sequence, page_size = CachedSequence(), group.pool.page_size
    sequence.length = length
    _require(isinstance(encoded, dict), "the numbers of a group", encoded)
    for name in _NUMBERS:
        _require(_is_count(encoded.get(name)), f"{name} to be a count", encoded)
        setattr(sequence, name, encoded[name])
    is_windowed = may_slide and sequence.window > 0
    _require(is_windowed or not sequence.window, "no sliding window of a sequence", encoded)
    # Pages of evicted places only are released, so the span is shorter than two pages.
    _require(
        not sequence.evicted
        or (is_windowed and sequence.sink_tokens <= length and sequence.evicted < 2 * page_size),
        "no evicted span", encoded,
    )  # fmt: skip
    _require(group.sequences.may_be(length, sequence.first_kept), "no freed pages", encoded)
    numbers = {name: value for name, value in encoded.items() if name != "demoted"}
    _require(numbers == _numbers_of(group, sequence), f"pages of {page_size} tokens", encoded)
    num_pages, demoted = -(-sequence.end // page_size), range(0)
    if "demoted" in encoded:
        demoted = _decoded_range(group, encoded["demoted"], num_pages)
    return sequence, demoted


def _decoded_range(group: PageGroup, encoded: Any, num_pages: int) -> range:
    """Return the indices of the demoted pages of a sequence."""
    fields = _past_fields(group)
    _require(
        fields is not None and isinstance(encoded, dict)
        and set(encoded) == {"start", "count", "fields"},
        "a sequence without demoted pages" if fields is None else "demoted pages", encoded,
    )  # fmt: skip
    _require_same(encoded["fields"], fields or {})
    start, count = encoded["start"], encoded["count"]
    _require(
        _is_count(start) and _is_count(count) and count > 0 and start + count <= num_pages,
        f"demoted pages within {num_pages}", encoded,
    )  # fmt: skip
    return range(start, start + count)


def _past_fields(group: PageGroup) -> dict[str, str] | None:
    """Return what caches that exchange demoted pages must have in common; None without any."""
    past = group.past
    if past is None:
        return None
    return {
        "past": past.pool.stored_as, "recent": str(past.recent), "sinks": str(past.sinks),
    }  # fmt: skip


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < _MAX_NUMBER


def _require(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"ticket: expected {expected}, got {got!s:.200}")


def _require_same(theirs: Any, fields: Mapping[str, str]) -> None:
    _require(isinstance(theirs, dict), "a sequence of a cache", theirs)
    for name in sorted({*fields, *theirs}):
        _require(theirs.get(name) == fields.get(name), f"a sequence with {name} {fields.get(name)}",
                 theirs.get(name))  # fmt: skip


def _hashes(encoded: Any, most: int) -> list[int]:
    try:
        hashes = hash_list([int(text, 16) for text in encoded])
    except (TypeError, ValueError):
        raise ValueError(f"ticket: expected hashes in hexadecimal, got {encoded!r:.80}") from None
    _require(len(hashes) <= most and len(set(hashes)) == len(hashes),
             f"at most {most} hashes, each once", len(hashes))  # fmt: skip
    return hashes


class Export:
    """Layers of an offered sequence that the running step is yet to write.

    Parameters
    ----------
    units : of the offer, by layer of the group
    fill : writes all of them when the step has ended; None: attention writes each
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


@dataclass(frozen=True)
class _Place:
    """A pool that has some pages of a sequence.

    Attributes
    ----------
    number : of the group; 0 for states
    count : how many pages
    kind : "pages", "past" for demoted ones, "state" for the live state, "kept" for kept ones
    """

    number: int
    pool: Pool
    count: int
    kind: str = "pages"


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

    Parameters
    ----------
    fields : returns what caches that exchange sequences must have in common

    Attributes
    ----------
    pools : all that hold parts of a sequence
    """

    def __init__(
        self, groups: Sequence[PageGroup], states: States | None,
        fields: Callable[[], Mapping[str, str]], tiers: Tiers, access: PageAccess,
    ) -> None:  # fmt: skip
        self._groups, self._states, self._fields = groups, states, fields
        self._tiers, self._access = tiers, access
        self._owners: list[Sequences | States] = [group.sequences for group in groups]
        self._owners += [] if states is None else [states]
        self.pools = tuple(place.pool for place in self._places([1] * 2 * len(groups)))
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
        window sees then are not offered. Returns the ticket.

        step_start : in a step that the sequence belongs to, its length before; else None
        exports : of that step, in each group; the exports of this offer are added
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
        held = _Held()
        fill: Callable[[], object] | None = None
        release = partial(self._ended.append, held)
        try:
            for group, sequence in zip(self._groups, found, strict=True):
                held.sequences.append(group.sequences.hold(sequence))
            split = []
            for group, sequence in zip(self._groups, held.sequences, strict=True):
                group.free_unseen(sequence, step_start or 0)
                split.append(group.sequences.split(sequence))
            lists: list[Any] = [pages for *both, _ in split for pages in both]
            if states is not None:
                held.kept = states.hold_kept(seq, _MAX_KEPT_STATES)
            kept_slots = [kept.slot for kept in held.kept.values()]
            places = self._places(list(map(len, lists)), len(kept_slots))
            if not by_layer or any(place.kind in ("past", "kept") for place in places):
                with self._access.on(stream, *found):
                    pass  # the offer waits for what the copy stream waits for
            if states is not None:
                slot, fill = states.hold(self._access, seq)
                held.slots.append(slot)
                if not by_layer:
                    fill()
            pages = filter(len, [*lists, held.slots, kept_slots])
            parts = [
                (self._number_of(place), _int64(numbers))
                for place, numbers in zip(places, pages, strict=True)
            ]
            units = self._units(places)
            is_late = [by_layer and places[n].kind in ("pages", "state") for n, _ in units]
            completion = StreamCompletion(stream)
            demoted = [range(start, start + len(past)) for _, past, start in split]
            described = Described(held.sequences, demoted, [*held.kept])
            self._tiers.fork(seq, held)
            offer = sender._offer_parts(
                parts, units, [None if late else completion for late in is_late],
                release, lease_s, attachment=encode_state(described, self._fields(), self._groups),
            )  # fmt: skip
            for number, place in enumerate(places):
                late = {layer: unit for unit, (n, layer) in enumerate(units)
                        if n == number and is_late[unit]}  # fmt: skip
                if late:
                    late_fill = fill if place.kind == "state" else None
                    exports[place.number].append(Export(offer, late, late_fill))
        except BaseException:
            if (interrupted := sender._offer_with(release)) is not None:
                interrupted.withdraw()  # the sender has the pages already
                interrupted.announce(range(len(units)), stream)
            elif held not in self._ended:
                self._drop(held)
            raise
        return bytes(offer.ticket)

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
        described = decode_state(decoded.attachment, self._fields(), self._groups)
        counts: list[int] = []
        for group, sequence, past in zip(
            self._groups, described.sequences, described.demoted, strict=True
        ):
            counts += [group.sequences.num_kept(sequence) - len(past), len(past)]
        places = self._places(counts, len(described.kept))
        expected = [(self._number_of(place), place.count) for place in places]
        got = [(part.pool, len(part.pages)) for part in decoded.parts]
        if got != expected:
            raise ValueError(f"ticket: expected pages of its sequence, {expected}, got {got}")
        units = self._units(places)
        if units != list(decoded.units):
            raise ValueError("ticket: expected the layers of its sequence in their order")
        pages: list[tuple[Ints, Ints]] = []
        slots: list[int] = []
        kept_slots: list[int] = []
        pull: Any = None
        try:
            for number, group in enumerate(self._groups):
                pages.append(group.sequences.allocate_both(*counts[2 * number : 2 * number + 2]))
            if self._states is not None:
                slots = self._states.take_slots(0)
                kept_slots = self._states.take_kept_slots(len(described.kept))
            lists: list[Any] = [numbers for both in pages for numbers in both]
            targets: list[Any] = [*filter(len, [*lists, slots, kept_slots])]
            # Kept states stay where they are if there is no room for them.
            into = [
                (number, target) for (number, _), target in zip(expected, targets, strict=False)
            ]
            pull = receiver._pull(
                decoded, [*into, *[None] * (len(places) - len(into))], self._layers(places, units),
                deadline_s, self._access.copy_stream_after_all(),
            )  # fmt: skip
            self._receive(seq, described, pages, slots, kept_slots, places, units, pull)
        except BaseException:
            if pull is not None:  # an interrupt
                pull.cancel()
            for group, both in zip(self._groups, pages, strict=False):
                if seq in group.sequences:
                    group.sequences.remove(seq)
                else:
                    group.sequences.free_both(*both)
            if self._states is not None:
                self._states.free([*slots, *kept_slots])
            raise
        return pull

    def _receive(
        self, seq: Hashable, described: Described, pages: Sequence[tuple[Ints, Ints]],
        slots: Sequence[int], kept_slots: Sequence[int], places: Sequence[_Place],
        units: Sequence[tuple[int, int]], pull: Any,
    ) -> None:  # fmt: skip
        """Add the sequence that a pull brings."""
        parts = [
            pull._part({layer: unit for unit, (n, layer) in enumerate(units) if n == number})
            for number in range(len(places))
        ]
        by_kind = {place.kind: part for place, part in zip(places, parts, strict=True)}
        states = [StateLoad(by_kind["state"])] if slots else []
        for number, group in enumerate(self._groups):
            sequence, sequences = described.sequences[number], group.sequences
            combined = sequences.combine(sequence, *pages[number], described.demoted[number].start)
            loads = [
                part for place, part in zip(places, parts, strict=True)
                if place.number == number and place.kind in ("pages", "past")
            ]  # fmt: skip
            sequences.receive(seq, sequence, combined, [*loads, *states])
        if self._states is not None:
            kept = dict(zip(described.kept, kept_slots, strict=False))
            self._states.adopt(seq, slots[0], kept, by_kind.get("kept"))

    def _places(self, counts: Sequence[int], num_kept: int = 0) -> list[_Place]:
        """Return the pools in which a sequence has pages, and the pool of states for kept ones.

        counts : of its pages in each group's pool and its pool of demoted tokens
        """
        places = []
        for number, group in enumerate(self._groups):
            places.append(_Place(number, group.pool, counts[2 * number]))
            if group.past_pool is not None:
                places.append(_Place(number, group.past_pool, counts[2 * number + 1], "past"))
        if self._states is not None:
            places.append(_Place(0, self._states.pool, 1, "state"))
            places.append(_Place(0, self._states.pool, num_kept, "kept"))
        return [place for place in places if place.count]

    def _number_of(self, place: _Place) -> int:
        """Return the number of the pool of a place."""
        return next(number for number, pool in enumerate(self.pools) if pool is place.pool)

    def _units(self, places: Sequence[_Place]) -> list[tuple[int, int]]:
        """Return (number of the place, layer) in the order in which layers go out.

        Demoted pages come first, then pages in the order of the layers of the model, and states,
        which a step writes last.
        """
        order = ("past", "pages", "kept", "state")
        keyed = []
        for number, place in enumerate(places):
            model = self._model_layers(place)
            for layer in range(place.pool.num_layers):
                keyed.append((order.index(place.kind), model[layer], number, layer))
        return [(number, layer) for *_, number, layer in sorted(keyed)]

    def _model_layers(self, place: _Place) -> Sequence[int]:
        """Return the number in the model of each layer of a place."""
        layers = (
            self._groups[place.number].model_layers if place.kind in ("pages", "past") else None
        )
        return layers or range(place.pool.num_layers)

    def _layers(self, places: Sequence[_Place], units: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Return the unit with which each layer of the model is complete; states as a whole."""
        found: dict[int, int] = {}
        for unit, (number, layer) in enumerate(units):
            place = places[number]
            if place.kind in ("pages", "past"):
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


def _int64(pages: Any) -> Any:
    return np.array(pages, np.int64)


def _reclaim(exchange: weakref.ref[Exchange]) -> None:
    if (owner := exchange()) is not None:
        owner.reclaim()
