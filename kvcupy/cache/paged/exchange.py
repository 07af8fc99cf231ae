"""Sequences that leave for another cache, or come from one.

    exporting cache   hold pages | offer | ... layer 0 is written, layer 1 is written ... | release
    importing cache                 allocate pages | pull | attention waits layer by layer

Demoted pages are offered unconverted by a second sender; its ticket is part of the first ticket.
A held page is shared: a sequence copies it before a write, and it is freed with the last reference.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ...devices.protocol import Stream
from ...errors import ProcessLocal, TransferError
from ...ops import checks
from ..hazards import Completion, PageAccess
from ..pages import hash_list
from ..pool import Pool
from .page_group import PageGroup
from .sequences import CachedSequence, Ints, Sequences
from .states import KeptState, StateLoad, States
from .tiers import Tiers


class SenderProtocol(Protocol):
    """The part of a `PageSender` that exports use."""

    def offer(self, pages: Any, **options: Any) -> bytes: ...
    def layer_done(self, ticket: bytes, layer: int, stream: Any) -> None: ...
    def withdraw(self, ticket: bytes) -> None: ...
    def outcome(self, ticket: bytes) -> str: ...


class PullProtocol(Completion, Protocol):
    """The part of a `Pull` that imports use."""

    num_pages: int
    num_bytes: int

    @property
    def failure(self) -> TransferError | None: ...
    def cancel(self) -> None: ...


class ReceiverProtocol(Protocol):
    """The part of a `PageReceiver` that imports use."""

    def inspect(self, ticket: Any) -> Any: ...
    def check(self, ticket: Any) -> None: ...
    def pull(self, ticket: Any, pages: Any, *, deadline_s: float, after: Any) -> PullProtocol: ...


_KIND = "kvcupy sequence"
_VERSION, _FLAT_VERSION = 2, 1  # of caches with groups, and without
_COMMON = ("kind", "version", "fields", "length", "hashes")  # of both versions
# The kept state behind a sequence, if it ends at a checkpoint, and the one before it.
_MAX_KEPT_STATES = 2
_WINDOW = ("evicted", "window", "sink_tokens")  # of a sequence of a cache without groups
_MAX_BYTES = 1 << 20  # of a description
_MAX_NUMBER = 2**62


@dataclass(frozen=True)
class Described:
    """A sequence as a ticket describes it.

    Attributes
    ----------
    sequences : without pages, of each group
    demoted : range of the indices of its demoted pages in each group
    tickets : of all offers but the first. There is an offer for each pool that has some of its
        pages: of each group its own pool and its pool of old tokens, and then of the live state and
        of the kept ones
    kept : the numbers of tokens before the kept states, the newest first
    """

    sequences: Sequence[CachedSequence]
    demoted: Sequence[range]
    tickets: Sequence[bytes] = ()
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
        "kind": _KIND, "version": _VERSION, "fields": dict(fields), "length": first.length,
        "hashes": [f"{hash:x}" for hash in hashes],
        "groups": [
            _encoded_group(*own)
            for own in zip(groups, described.sequences, described.demoted, strict=True)
        ],
        "tickets": [ticket.hex() for ticket in described.tickets],
    }  # fmt: skip
    if described.kept:
        state["kept"] = [*described.kept]
    if groups[0].tables is None:
        state = _flat(state)
    encoded = json.dumps(state, sort_keys=True, separators=(",", ":")).encode()
    if len(encoded) > _MAX_BYTES:
        raise ValueError(
            f"seq: expected at most {_MAX_BYTES} bytes of description, got {len(encoded)}; "
            f"{len(hashes)} hashes are part of it"
        )
    return encoded


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return a description of a single group in version 1."""
    (own,), tickets = state["groups"], state["tickets"]
    if "demoted" in own:
        own["demoted"]["ticket"] = "".join(tickets)
    return {**{name: state[name] for name in _COMMON}, **own, "version": _FLAT_VERSION}


def _nested(state: dict[str, Any]) -> dict[str, Any]:
    """Return a description of version 1 as one of a single group."""
    own, tickets = {name: state[name] for name in state if name not in _COMMON}, []
    if isinstance(demoted := own.get("demoted"), dict):
        ticket = demoted.pop("ticket", None)
        tickets = [] if ticket == "" else [ticket]  # "": it has no other pages
    common = {name: state[name] for name in state if name in _COMMON}
    return {**common, "groups": [own], "tickets": tickets}


def _numbers_of(group: PageGroup, sequence: CachedSequence) -> dict[str, int]:
    """Return what a description says of a sequence in a group, besides the length."""
    if group.tables is not None:
        return {"first_kept": sequence.first_kept}
    numbers = {name: getattr(sequence, name) for name in _WINDOW}
    return {**numbers, "num_pages": -(-sequence.end // group.pool.page_size)}


def _encoded_group(group: PageGroup, sequence: CachedSequence, demoted: range) -> dict[str, Any]:
    encoded: dict[str, Any] = {**_numbers_of(group, sequence)}
    if demoted:
        fields = _past_fields(group)
        encoded["demoted"] = {"start": demoted.start, "count": len(demoted), "fields": fields}
    return encoded


def decode_state(
    encoded: bytes, fields: Mapping[str, str], groups: Sequence[PageGroup]
) -> Described:
    """Return the sequence of `encode_state`.

    ValueError that names the ticket unless all of it is consistent and `fields` are the same, and
    the fields of demoted pages if there are any.
    """
    described = _parsed(encoded)
    version, whose = _VERSION, "a cache with groups"
    if groups[0].tables is None:
        version, whose = _FLAT_VERSION, "a cache without groups"
    if described.get("kind") != _KIND or described.get("version") != version:
        raise ValueError(
            f"ticket: expected one of export_sequence of {whose}, version {version}, got "
            f"{described.get('kind')!r}, version {described.get('version')!r}"
        )
    if version == _FLAT_VERSION:
        described = _nested(described)
    kept = described.pop("kept", [])
    if set(described) != {*_COMMON, "groups", "tickets"}:
        raise ValueError(f"ticket: expected a sequence, got fields {sorted(described)}")
    _require_same(described["fields"], fields)
    length, own = described["length"], described["groups"]
    if not (_is_count(length) and length):
        raise ValueError(f"ticket: expected a length, got {length!r}")
    if not isinstance(own, list) or len(own) != len(groups):
        raise ValueError(f"ticket: expected {len(groups)} groups, got {own!r:.80}")
    parts = [_decoded_group(*pair, length) for pair in zip(groups, own, strict=True)]
    hashes = _hashes(described["hashes"], length // groups[0].pool.page_size)
    for sequence, _ in parts:
        sequence.hashes = list(hashes)
    try:
        tickets = [bytes.fromhex(ticket) for ticket in described["tickets"]]
    except (TypeError, ValueError):
        raise ValueError("ticket: expected tickets of offers in hexadecimal") from None
    if not (isinstance(kept, list) and all(_is_count(n) and 0 < n <= length for n in kept)) or (
        kept != sorted(set(kept), reverse=True)
    ):
        raise ValueError(f"ticket: expected lengths before kept states, got {kept!r:.80}")
    return Described([s for s, _ in parts], [demoted for _, demoted in parts], tickets, kept)


def _decoded_group(group: PageGroup, encoded: Any, length: int) -> tuple[CachedSequence, range]:
    """Return a sequence of a group without pages, and the indices of its demoted pages."""
    sequence, page_size = CachedSequence(), group.pool.page_size
    sequence.length = length
    names = _numbers_of(group, sequence)
    if not isinstance(encoded, dict) or set(encoded) - {"demoted"} != {*names}:
        raise ValueError(f"ticket: expected {', '.join(names)} of a group, got {encoded!r:.80}")
    for name in names:
        if not _is_count(encoded[name]):
            raise ValueError(f"ticket: expected {name} to be a count, got {encoded[name]!r}")
        if name != "num_pages":
            setattr(sequence, name, encoded[name])
    # Pages of evicted places only are released, so the span is shorter than two pages.
    if sequence.evicted and not (
        sequence.window and sequence.sink_tokens <= length and sequence.evicted < 2 * page_size
    ):
        raise ValueError(f"ticket: expected no evicted span of {sequence.evicted} in {encoded}")
    if not group.sequences.may_be(length, sequence.first_kept):
        raise ValueError(f"ticket: expected no freed pages before {sequence.first_kept}")
    if encoded.get("num_pages") != _numbers_of(group, sequence).get("num_pages"):
        raise ValueError(f"ticket: expected pages of {page_size} tokens, got {encoded!r:.80}")
    demoted = range(0)
    if "demoted" in encoded:
        demoted = _decoded_range(group, encoded["demoted"], -(-sequence.end // page_size))
    return sequence, demoted


def _decoded_range(group: PageGroup, encoded: Any, num_pages: int) -> range:
    """Return the indices of the demoted pages of a sequence."""
    fields = _past_fields(group)
    if fields is None:
        raise ValueError("ticket: expected a sequence without demoted pages, got some")
    if not isinstance(encoded, dict) or set(encoded) != {"start", "count", "fields"}:
        raise ValueError(f"ticket: expected demoted pages, got {encoded!r:.80}")
    _require_same(encoded["fields"], fields)
    start, count = encoded["start"], encoded["count"]
    if not (_is_count(start) and _is_count(count) and count and start + count <= num_pages):
        raise ValueError(
            f"ticket: expected demoted pages within {num_pages}, got {count!r} from {start!r} on"
        )
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


def _require_same(theirs: Any, fields: Mapping[str, str]) -> None:
    if not isinstance(theirs, dict):
        raise ValueError(f"ticket: expected a sequence of a cache, got {theirs!r:.80}")
    for name in sorted({*fields, *theirs}):
        if theirs.get(name) != fields.get(name):
            raise ValueError(
                f"ticket: expected a sequence with {name} {fields.get(name)}, "
                f"got {theirs.get(name)}"
            )


def _parsed(encoded: bytes) -> dict[str, Any]:
    if len(encoded) > _MAX_BYTES:
        raise ValueError(f"ticket: expected at most {_MAX_BYTES} bytes, got {len(encoded)}")
    try:
        described = json.loads(encoded)
    except (ValueError, RecursionError):
        described = None
    if not isinstance(described, dict):
        raise ValueError("ticket: expected one of export_sequence, got pages without a sequence")
    return described


def _hashes(encoded: Any, most: int) -> list[int]:
    try:
        hashes = hash_list([int(text, 16) for text in encoded])
    except (TypeError, ValueError):
        raise ValueError(f"ticket: expected hashes in hexadecimal, got {encoded!r:.80}") from None
    if len(hashes) > most or len(set(hashes)) < len(hashes):
        raise ValueError(f"ticket: expected at most {most} hashes, each once, got {len(hashes)}")
    return hashes


class Export:
    """Pages of a sequence that are offered, in a step layer by layer.

    Parameters
    ----------
    num_layers : those that the step is yet to write
    fill : writes all of them when the step has ended; None: attention writes each
    """

    def __init__(
        self, sender: SenderProtocol, ticket: bytes, num_layers: int,
        fill: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self._sender, self._ticket, self._fill = sender, ticket, fill
        self._missing = set(range(num_layers))

    def layer_written(self, layer: int, stream: Stream) -> None:
        """Let a layer go out once `stream` has passed this point; the first call of each counts."""
        if self._fill is None and layer in self._missing:
            self._sender.layer_done(self._ticket, layer, stream)
            self._missing.discard(layer)

    def finish(self, stream: Stream) -> None:
        """Let the layers go out that have not been announced yet."""
        if self._fill is not None:
            self._fill()
            self._fill = None
        for layer in sorted(self._missing):
            self.layer_written(layer, stream)

    @property
    def has_ended_early(self) -> bool:
        """Whether the offer has ended, and no receiver has all of it."""
        return self._sender.outcome(self._ticket) not in ("", "completed")

    def withdraw(self, stream: Stream) -> None:
        """Take the offer back; the pages are free when `stream` has passed this point."""
        self._fill = None
        self._sender.withdraw(self._ticket)
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


class _Held:
    """Parts of a sequence that are held until the offers of them are over.

    Kept states have a separate hold, because a receiver without room for them leaves their offer.

    Attributes
    ----------
    following : exports of the separate hold, which are withdrawn if an offer of this one ends early
    """

    def __init__(self, sequences: Sequence[CachedSequence] = ()) -> None:
        self.sequences = sequences
        self.slots: list[int] = []
        self.kept: dict[int, KeptState] = {}
        self.exports: list[Export] = []
        self.following: list[Export] = []
        self.num_offers = 0  # that are not over


class GroupTiersProtocol(Protocol):
    """The part of `GroupedTiers` that exchanges use, with a held sequence as a name."""

    def fork(self, parent: Hashable, child: Hashable) -> None: ...
    def publish(
        self, seq: Hashable, found: Sequence[CachedSequence] | None = None
    ) -> list[set[int]]: ...
    def remove(self, seq: Hashable) -> None: ...


class Exchange:
    """Offers sequences of a cache to other caches, and adds theirs.

    The pages of an offered sequence are held until its offers are over; one that ends early takes
    the others with it, unless it is of kept states. An offer ends in a thread of its sender; the
    thread that uses the cache releases the pages when it needs or counts pages.

    Parameters
    ----------
    fields : returns what caches that exchange sequences must have in common

    Attributes
    ----------
    pools : all that hold parts of a sequence
    group_tiers : of a cache with groups, once it is attached to tiers
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
        self.group_tiers: GroupTiersProtocol | None = None
        self._ended: deque[_Held] = deque()  # each once for every offer that is over
        self._removed: deque[Hashable] = deque()
        # Not a method: in a cycle, all pools would stay until Python looks for cycles.
        self._reclaim = partial(_reclaim, weakref.ref(self))

    def export(
        self, seq: Hashable, sender: Any, past_sender: Any, *, step_start: int | None,
        lease_s: float,
    ) -> tuple[bytes, list[list[Export]]]:  # fmt: skip
        """Offer a sequence, behind all work so far or, in a step, layer by layer.

        Demoted pages are offered as a whole, and the state when the step has ended. Pages that no
        window sees then are not offered. Returns the ticket, and the exports of each group.

        step_start : in a step that the sequence belongs to, its length before; else None
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
        ends = self._ends("sender", "PageSender", sender, past_sender)
        stream, states = self._access.copy_stream, self._states
        self._reclaim_before_allocations()
        held = _Held([g.sequences.hold(own) for g, own in zip(self._groups, found, strict=True)])
        held_kept = _Held()
        held.following = held_kept.exports
        exports: list[list[Export]] = [[] for _ in self._groups]
        fill: Callable[[], object] | None = None

        def offer(place: _Place, by: SenderProtocol, numbers: Any, attachment: bytes) -> bytes:
            is_late = by_layer and place.kind in ("pages", "state")
            hold = held_kept if place.kind == "kept" else held
            ticket = by.offer(
                numbers, lease_s=lease_s, release=partial(_let_go, self._ended, hold),
                attachment=attachment, after=None if is_late else stream, by_layer=is_late,
            )  # fmt: skip
            hold.num_offers += 1
            num_layers = place.pool.num_layers if is_late else 0
            late_fill = fill if is_late and place.kind == "state" else None
            exports[place.number].append(Export(by, ticket, num_layers, late_fill))
            hold.exports.append(exports[place.number][-1])
            return ticket

        try:
            split = []
            for group, own in zip(self._groups, held.sequences, strict=True):
                group.free_unseen(own, step_start or 0)
                split.append(group.sequences.split(own))
            lists: list[Any] = [numbers for own, past, _ in split for numbers in (own, past)]
            if states is not None:
                held_kept.kept = states.hold_kept(seq, _MAX_KEPT_STATES)
            kept_slots = [kept.slot for kept in held_kept.kept.values()]
            places = self._places(list(map(len, lists)), len(kept_slots))
            senders = [_end_of(ends, place, "sender", "PageSender", repr(seq)) for place in places]
            if not by_layer or any(place.kind in ("past", "kept") for place in places):
                with self._access.on(stream, *found):
                    pass  # the offers wait for what the copy stream waits for
            if states is not None:
                slot, fill = states.hold(self._access, seq)
                held.slots.append(slot)
                if not by_layer:
                    fill()
            numbers = list(filter(len, [*lists, held.slots, kept_slots]))
            first, *others = zip(places, senders, numbers, strict=True)
            tickets = [offer(*other, b"") for other in others]
            demoted = [range(start, start + len(past)) for _, past, start in split]
            described = Described(held.sequences, demoted, tickets, [*held_kept.kept])
            ticket = offer(*first, encode_state(described, self._fields(), self._groups))
        except BaseException:
            for hold in (held, held_kept):
                for export in hold.exports:
                    export.withdraw(stream)  # which releases what is held
                if not hold.exports:
                    self._drop(hold)
            raise
        if self.group_tiers is not None:
            self.group_tiers.fork(seq, held)
        return ticket, exports

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
            held, tiers = self._ended.popleft(), self.group_tiers
            held.num_offers -= 1
            if any(export.has_ended_early for export in held.exports):
                for export in (*held.exports, *held.following):
                    export.withdraw(self._access.copy_stream)
            if held.num_offers:
                continue
            published: list[set[int]] = [set() for _ in self._groups]
            try:
                if tiers is not None:
                    published = tiers.publish(held, held.sequences)
                elif held.sequences:
                    published[0] = self._tiers.publish(held.sequences[0])
            finally:
                self._drop(held, published)
                if tiers is not None:
                    tiers.remove(held)

    def _drop(self, held: _Held, published: Sequence[Collection[int]] | None = None) -> None:
        for number, own in enumerate(held.sequences):
            self._groups[number].sequences.drop(own, published[number] if published else ())
        if self._states is not None:
            self._states.free(held.slots)
            self._states.release_kept(held.kept.values())

    def add(
        self, seq: Hashable, ticket: bytes, receiver: Any, past_receiver: Any, deadline_s: float
    ) -> PullProtocol | SequencePull:
        """Add the sequence that a ticket describes; its pages arrive in the background."""
        ends = self._ends("receiver", "PageReceiver", receiver, past_receiver)
        attachment = next(iter(ends.values())).inspect(ticket).attachment
        described = decode_state(attachment, self._fields(), self._groups)
        counts: list[int] = []
        for group, sequence, past in zip(
            self._groups, described.sequences, described.demoted, strict=True
        ):
            counts += [group.sequences.num_kept(sequence) - len(past), len(past)]
        places = self._places(counts, len(described.kept))
        tickets = [ticket, *described.tickets]
        if len(tickets) != len(places):
            raise ValueError(f"ticket: expected {len(places)} offers, got {len(tickets)}")
        receivers = [
            _end_of(ends, place, "receiver", "PageReceiver", "the ticket") for place in places
        ]
        for place, by, named in zip(places, receivers, tickets, strict=True):
            if (got := by.inspect(named).num_pages) != place.count:
                raise ValueError(f"ticket: expected {place.count} pages of its sequence, got {got}")
            by.check(named)
        pages: list[tuple[Ints, Ints]] = []
        slots: list[int] = []
        kept_slots: list[int] = []
        pulls: list[PullProtocol] = []
        try:
            for number, group in enumerate(self._groups):
                pages.append(group.sequences.allocate_both(*counts[2 * number : 2 * number + 2]))
            if self._states is not None:
                slots = self._states.take_slots(0)
                kept_slots = self._states.take_kept_slots(len(described.kept))
            after = self._access.copy_stream_behind_all()
            targets: list[Any] = [*itertools.chain(*pages), slots, kept_slots]
            targets = list(filter(len, targets))
            # The last offer is left where there is no room for kept states.
            for by, named, into in zip(receivers, tickets, targets, strict=False):
                pulls.append(by.pull(named, into, deadline_s=deadline_s, after=after))
        except BaseException:
            for pull in pulls:
                pull.cancel()
            for group, own in zip(self._groups, pages, strict=False):
                group.sequences.free_both(*own)
            if self._states is not None:
                self._states.free([*slots, *kept_slots])
            raise
        places = places[: len(pulls)]
        kept = dict(zip(described.kept, kept_slots, strict=False))
        self._receive(seq, described, pages, slots, kept, list(zip(places, pulls, strict=True)))
        if len(pulls) == 1 and self._groups[0].tables is None:
            return pulls[0]
        return SequencePull(pulls, [self._layers_of(place) for place in places])

    def _receive(
        self, seq: Hashable, described: Described, pages: Sequence[tuple[Ints, Ints]],
        slots: Sequence[int], kept: Mapping[int, int], pulls: Sequence[tuple[_Place, PullProtocol]],
    ) -> None:  # fmt: skip
        """Add the sequence that some pulls bring."""
        by_kind = {place.kind: pull for place, pull in pulls}
        states = [StateLoad(by_kind["state"])] if slots else []
        for number, group in enumerate(self._groups):
            sequence, known = described.sequences[number], group.sequences
            combined = known.combine(sequence, *pages[number], described.demoted[number].start)
            own = [
                pull for place, pull in pulls
                if place.number == number and place.kind in ("pages", "past")
            ]  # fmt: skip
            known.receive(seq, sequence, combined, [*own, *states])
        if self._states is not None:
            self._states.adopt(seq, slots[0], kept, by_kind.get("kept"))

    def _places(self, counts: Sequence[int], num_kept: int = 0) -> list[_Place]:
        """Return the pools in which a sequence has pages, and the pool of states for kept ones.

        counts : of its pages in each group's own pool and the one of old tokens
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

    def _layers_of(self, place: _Place) -> Mapping[int, int | None]:
        """Return by the number of a layer in the model its number in the pool; None: no layers."""
        if self._states is not None and place.pool is self._states.pool:
            return dict.fromkeys(self._states.layers if place.kind == "state" else ())
        layers = self._groups[place.number].model_layers or range(place.pool.num_layers)
        return {layer: number for number, layer in enumerate(layers)}

    def _ends(self, name: str, kind: str, ends: Any, past_end: Any) -> dict[int, Any]:
        """Return senders, or receivers, by the ids of their pools; raise unless they fit.

        ends : with groups, a list of one for each pool; else one for the first pool
        """
        first = self._groups[0]
        if first.tables is not None:
            expected = f"{name}: expected a list of a {kind} for each of sequence_pools"
            if past_end is not None:
                raise ValueError(f"past_{name}: expected None with groups, got {past_end!r}")
            if not isinstance(ends, (list, tuple)):
                raise TypeError(f"{expected}, got {ends!r}")
            by_pool = {id(getattr(end, "pool", None)): end for end in ends}
            if len(ends) != len(self.pools) or set(by_pool) != set(map(id, self.pools)):
                raise ValueError(f"{expected}, which are {len(self.pools)}, got {ends}")
            return by_pool
        if getattr(ends, "pool", None) is not first.pool:
            raise ValueError(f"{name}: expected a {kind} of the pool of this cache")
        if past_end is None:
            return {id(first.pool): ends}
        if first.past_pool is None:
            raise ValueError(f"past_{name}: expected None without past, got {past_end!r}")
        if getattr(past_end, "pool", None) is not first.past_pool:
            raise ValueError(f"past_{name}: expected a {kind} of the past_pool of this cache")
        return {id(first.pool): ends, id(first.past_pool): past_end}


def _end_of(ends: Mapping[int, Any], place: _Place, name: str, kind: str, what: str) -> Any:
    """Return the sender or receiver of a pool; raise if it is missing."""
    if (end := ends.get(id(place.pool))) is None:
        raise ValueError(
            f"past_{name}: expected a {kind} of past_pool, for {what} has demoted pages, got None"
        )
    return end


def _let_go(ended: deque[_Held], held: _Held, pages: object) -> None:
    ended.append(held)


def _reclaim(exchange: weakref.ref[Exchange]) -> None:
    if (owner := exchange()) is not None:
        owner.reclaim()


class SequencePull(ProcessLocal, Completion):
    """The pulls of a sequence's pages in several pools: a `Completion`, used like a `Pull`.

    Parameters
    ----------
    layers : of each pull, by the number of a layer in the model its number in the pool; None: it is
        waited for as a whole

    Attributes
    ----------
    num_pages, num_bytes : of all
    failure : TransferError, why one has failed, or None. Neither waits nor raises
    """

    def __init__(
        self, pulls: Sequence[PullProtocol], layers: Sequence[Mapping[int, int | None]]
    ) -> None:
        self._pulls, self._layers = pulls, layers
        self.num_pages = sum(pull.num_pages for pull in pulls)
        self.num_bytes = sum(pull.num_bytes for pull in pulls)

    @property
    def failure(self) -> TransferError | None:
        return next((pull.failure for pull in self._pulls if pull.failure is not None), None)

    def done(self) -> bool:
        """Return whether all of it is there; TransferError if one has failed."""
        return all([pull.done() for pull in self._pulls])

    def synchronize(self) -> None:
        """Wait until all of it is there; TransferError if one has failed, and nothing can land.

        A failure cancels the rest.
        """
        failure = None
        for pull in self._pulls:
            try:
                pull.synchronize()
            except TransferError as error:
                failure = failure or error
                self.cancel()
        if failure is not None:
            raise failure

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream wait for all of it, as `Pull.wait` does."""
        for pull in self._pulls:
            pull.wait(stream)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let later work of a stream wait for one layer of the model, as `Pull.wait_layer` does.

        The states of recurrent layers are waited for together.
        """
        checks.require_int(layer, "layer")
        if not any(layer in numbers for numbers in self._layers):
            raise ValueError(f"layer: expected the number of a layer, got {layer}")
        for pull, numbers in zip(self._pulls, self._layers, strict=True):
            if layer in numbers:
                number = numbers[layer]
                if number is None:
                    pull.wait(stream)
                else:
                    pull.wait_layer(number, stream)

    def cancel(self) -> None:
        """Cancel the rest, as `Pull.cancel` does."""
        for pull in self._pulls:
            pull.cancel()
