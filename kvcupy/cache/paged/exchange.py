"""Sequences that leave the pages of a cache, for host memory or another cache, and come back.

    exporting cache   hold pages | offer | ... layer 0 is written, layer 1 is written ... | release
    importing cache                 allocate pages | pull | attention waits layer by layer

Demoted pages are offered unconverted by a second sender; its ticket is part of the first ticket.
A held page is shared: a sequence copies it before a write, and it is freed with the last reference.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ...devices.protocol import Stream
from ...errors import CacheFull, TransferError
from ..engine import TransferEngine, send_together
from ..hazards import Completion, CopiedPages, PageAccess, raise_failure
from ..pages import PageAllocator, hash_list
from ..pool import Pool, pool_like, positive_int
from ..tiered.cache import TieredCache
from ..tiered.leases import Lease
from .contents import Contents
from .moves import Past
from .page_group import PageGroup
from .sequences import CachedSequence, Ints, OffloadedPages, Sequences
from .states import StateLoad, States


class SenderProtocol(Protocol):
    """The part of a `PageSender` that exports use."""

    def offer(self, pages: Any, **options: Any) -> bytes: ...
    def layer_done(self, ticket: bytes, layer: int, stream: Any) -> None: ...
    def withdraw(self, ticket: bytes) -> None: ...


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
    def pull(self, ticket: Any, pages: Any, *, deadline_s: float, after: Any) -> PullProtocol: ...


_KIND, _VERSION = "kvcupy sequence", 1
_NUMBERS = ("length", "evicted", "window", "sink_tokens", "num_pages")
_MAX_BYTES = 1 << 20  # of a description
_MAX_NUMBER = 2**62


@dataclass(frozen=True)
class DemotedPages:
    """The part of a ticket about the demoted pages of a sequence.

    Attributes
    ----------
    start, count : index of the first of them in the sequence, and their number
    ticket : of their offer; empty if the sequence has no other pages: its ticket is for these
    fields : format, recent and sinks, which both caches must have in common
    """

    start: int
    count: int
    ticket: bytes
    fields: Mapping[str, str]

    def encoded(self) -> dict[str, Any]:
        return {
            "start": self.start, "count": self.count, "ticket": self.ticket.hex(),
            "fields": dict(self.fields),
        }  # fmt: skip

    @classmethod
    def decoded(cls, described: Any, fields: Mapping[str, str], num_pages: int) -> DemotedPages:
        """Return the result of `encoded`; ValueError unless it fits the fields and the pages."""
        if not isinstance(described, dict) or set(described) != {
            "start", "count", "ticket", "fields"
        }:  # fmt: skip
            raise ValueError(f"ticket: expected demoted pages, got {described!r:.80}")
        _require_same(described["fields"], fields)
        start, count = described["start"], described["count"]
        if not (type(start) is int and type(count) is int and start >= 0 and count > 0):
            raise ValueError(f"ticket: expected a range of demoted pages, got {start!r}, {count!r}")
        if start + count > num_pages:
            raise ValueError(
                f"ticket: expected demoted pages within {num_pages}, got {count} from {start} on"
            )
        try:
            ticket = bytes.fromhex(described["ticket"])
        except (TypeError, ValueError):
            raise ValueError("ticket: expected one of demoted pages in hexadecimal") from None
        if bool(ticket) == (count == num_pages):
            raise ValueError("ticket: expected another of demoted pages, where there are others")
        return cls(start, count, ticket, fields)


def encode_state(
    sequence: CachedSequence,
    fields: Mapping[str, str],
    page_size: int,
    demoted: DemotedPages | None = None,
) -> bytes:
    """Describe a sequence as canonical JSON, with the `fields` that both caches have in common.

    Only hashes of full pages are included: a prompt that is not computed to its end has more.

    >>> encode_state(CachedSequence(), {"rope_mode": "none"}, 16)  # doctest: +ELLIPSIS
    b'{"evicted":0,"fields":{"rope_mode":"none"},"hashes":[],"kind":"kvcupy sequence",...}'
    """
    hashes = sequence.hashes[: sequence.length // page_size]
    described = {
        "kind": _KIND, "version": _VERSION, "fields": dict(fields),
        **{name: int(getattr(sequence, name)) for name in _NUMBERS},
        "hashes": [f"{hash:x}" for hash in hashes],
        **({} if demoted is None else {"demoted": demoted.encoded()}),
    }  # fmt: skip
    encoded = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    if len(encoded) > _MAX_BYTES:
        raise ValueError(
            f"seq: expected at most {_MAX_BYTES} bytes of description, got {len(encoded)}; "
            f"{len(hashes)} hashes are part of it"
        )
    return encoded


def decode_state(
    encoded: bytes, fields: Mapping[str, str], page_size: int,
    past_fields: Mapping[str, str] | None = None,
) -> tuple[CachedSequence, int, DemotedPages | None]:  # fmt: skip
    """Return the sequence of `encode_state` without pages, the number of pages, and demoted pages.

    ValueError that names the ticket unless all of it is consistent, `fields` are the same, and
    `past_fields` where pages are demoted (None: none may be).
    """
    described = _parsed(encoded)
    if described.get("kind") != _KIND or described.get("version") != _VERSION:
        raise ValueError(
            f"ticket: expected one of export_sequence, version {_VERSION}, got "
            f"{described.get('kind')!r}, version {described.get('version')!r}"
        )
    if set(described) - {"demoted"} != {"kind", "version", "fields", "hashes", *_NUMBERS}:
        raise ValueError(f"ticket: expected a sequence, got fields {sorted(described)}")
    _require_same(described["fields"], fields)
    numbers = {name: described[name] for name in _NUMBERS}
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number < _MAX_NUMBER:
            raise ValueError(f"ticket: expected {name} to be a count, got {number!r}")
    length, evicted = numbers["length"], numbers["evicted"]
    window, sink_tokens = numbers["window"], numbers["sink_tokens"]
    # Pages of evicted places only are released, so the span is shorter than two pages.
    if evicted and not (window and sink_tokens <= length and evicted < 2 * page_size):
        raise ValueError(f"ticket: expected no evicted span of {evicted} in {numbers}")
    if length == 0 or numbers["num_pages"] != -(-(length + evicted) // page_size):
        raise ValueError(
            f"ticket: expected pages of {page_size} for {length} tokens, got {numbers['num_pages']}"
        )
    sequence = CachedSequence()
    sequence.length, sequence.evicted = length, evicted
    sequence.window, sequence.sink_tokens = window, sink_tokens
    sequence.hashes = _hashes(described["hashes"], length // page_size)
    demoted = None
    if "demoted" in described:
        if past_fields is None:
            raise ValueError("ticket: expected a sequence without demoted pages, got some")
        demoted = DemotedPages.decoded(described["demoted"], past_fields, numbers["num_pages"])
    return sequence, numbers["num_pages"], demoted


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


# --- Tiers ---


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
        self._num_past_host_pages = 0

    def attach(self, tiers: Any, num_past_host_pages: Any) -> None:
        """Use a tiered cache from now on, and evict its blocks where pages are needed."""
        if not isinstance(tiers, TieredCache):
            raise TypeError(f"tiers: expected a TieredCache, got {tiers!r}")
        if tiers.device_pool is not self._pool:
            raise ValueError("tiers: expected one whose device_pool is the pool of this cache")
        if self.tiered is not None:
            raise ValueError("tiers: expected to be attached once, got a second one")
        if num_past_host_pages is not None:
            count = positive_int(num_past_host_pages, "num_past_host_pages")
            if self._groups[0].past_pool is None:
                raise ValueError(f"num_past_host_pages: expected None without past, got {count}")
            self._num_past_host_pages = count
        self.tiered = tiers
        self.attach_groups([tiers], [range(self._pool.num_layers)])
        # Not a method: in a cycle, all pools would stay until Python looks for cycles.
        self._sequences.evict = partial(evict, tiers, self._pool.allocator)

    def attach_groups(
        self, caches: Sequence[TieredCache], layers: Sequence[Sequence[int]]
    ) -> None:
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

    def acquire(self, hashes: Sequence[int]) -> Lease:
        """Return a lease of the leading blocks that the tiered cache knows."""
        return self.require("hashes").acquire(hashes, after=self._access.copy_stream_behind_all())

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
                slots = states.take_slots(seq)
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
            count = self._num_past_host_pages or past_pool.num_pages
            host_pool = pool_like(past_pool, count, dtype=past_pool.dtype)
            self._past_engines[number] = TransferEngine(past_pool, host_pool)
        return self._past_engines[number]

    def publish(self, sequence: CachedSequence) -> set[int]:
        """Give the tiered cache a sequence's own full pages with hashes; return those it took."""
        tiers = self.tiered
        if tiers is None or tiers.closed or sequence.offloaded:
            return set()
        if any(load.failure or not isinstance(load, CopiedPages) for load in sequence.loads):
            return set()
        count = min(len(sequence.hashes), sequence.committed // self._pool.page_size)
        owned = [
            index for index in self._sequences.owned_of(sequence, range(count))
            if sequence.pages[index] < self._pool.num_pages  # not the demoted ones
        ]  # fmt: skip
        if not owned:
            return set()
        pages = sequence.pages[owned].tolist()
        hashes = [sequence.hashes[i] for i in owned]
        parents = [sequence.hashes[i - 1] if i else 0 for i in owned]
        tokens = None if sequence.token_ids is None else sequence.token_ids[owned].reshape(-1)
        unneeded = tiers.insert(
            hashes, pages, after=self._access.copy_stream_behind_all(), parent=parents,
            token_ids=tokens,
        )  # fmt: skip
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
            raise CacheFull(f"{self.label}: {error}") from error


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


# --- Other caches ---


class Export:
    """A sequence that is offered layer by layer: in its state at the call.

    Attributes
    ----------
    ticket : of the offer
    """

    def __init__(
        self, sender: SenderProtocol, ticket: bytes, num_layers: int,
        demoted: tuple[SenderProtocol, bytes] | None = None,
    ) -> None:  # fmt: skip
        self.ticket = ticket
        self._sender = sender
        self._demoted = demoted  # the offer of its demoted pages, by its sender and ticket
        self._missing = set(range(num_layers))

    def layer_written(self, layer: int, stream: Stream) -> None:
        """Let a layer go out once `stream` has passed this point; the first call of each counts."""
        if layer in self._missing:
            self._sender.layer_done(self.ticket, layer, stream)
            self._missing.discard(layer)

    def finish(self, stream: Stream) -> None:
        """Let the layers go out that have not been announced yet."""
        for layer in sorted(self._missing):
            self.layer_written(layer, stream)

    def withdraw(self, stream: Stream) -> None:
        """Take the offer back; the pages are free when `stream` has passed this point."""
        if self._demoted is not None:
            sender, ticket = self._demoted
            sender.withdraw(ticket)
        self._sender.withdraw(self.ticket)
        self.finish(stream)


class _Held:
    """The pages of a sequence, held until the offers of them are over."""

    def __init__(self, sequence: CachedSequence) -> None:
        self.sequence = sequence
        self.num_offers = 0


class Exchange:
    """Offers sequences of a cache to other caches, and adds theirs.

    The pages of an offered sequence are held until its offers are over. An offer ends in a thread
    of its sender; the thread that uses the cache releases the pages when it needs or counts pages.
    """

    def __init__(
        self, pool: Pool, sequences: Sequences, contents: Contents, tiers: Tiers,
        access: PageAccess, past: Past | None,
    ) -> None:  # fmt: skip
        self._pool, self._sequences, self._contents = pool, sequences, contents
        self._tiers, self._access, self._past = tiers, access, past
        self._ended: deque[_Held] = deque()  # each once for every offer that is over
        # Not a method: in a cycle, all pools would stay until Python looks for cycles.
        self._reclaim = partial(_reclaim, weakref.ref(self))

    def export(
        self, seq: Hashable, sequence: CachedSequence, sender: SenderProtocol,
        past_sender: SenderProtocol | None, *, by_layer: bool, lease_s: float,
    ) -> Export:  # fmt: skip
        """Offer a sequence, behind all work so far or, in a step, layer by layer.

        Demoted pages are offered as a whole, by `past_sender`.
        """
        if sequence.parents:
            raise ValueError(f"seq: {seq!r} has a token tree: call commit_token_tree first")
        if sequence.length == 0:
            raise ValueError(f"seq: expected a sequence with tokens, got {seq!r}, which is empty")
        if by_layer and sequence.num_beyond_window:
            raise ValueError(
                f"seq: the window of {seq!r} slides at the end of the step; export it after that"
            )
        self._require_pools("sender", "PageSender", sender, past_sender)
        pages, past_pages, start = self._sequences.split(sequence)
        if past_sender is None and len(past_pages):
            raise ValueError(
                f"past_sender: expected a PageSender of past_pool, for {seq!r} has demoted pages, "
                "got None"
            )
        stream = self._access.copy_stream
        if len(past_pages) or not by_layer:
            with self._access.on(stream, sequence):
                pass  # the offer waits for what the copy stream waits for
        self._sequences.reclaim = self._reclaim
        held = _Held(self._sequences.hold(sequence))

        def offer(by: SenderProtocol, numbers: Ints, state: bytes, **options: Any) -> bytes:
            release = partial(_let_go, self._ended, held)
            ticket = by.offer(
                numbers, lease_s=lease_s, release=release, attachment=state, **options
            )
            held.num_offers += 1
            return ticket

        demoted, past_offer = None, None
        try:
            if past_sender is not None and len(past_pages):
                demoted = DemotedPages(start, len(past_pages), b"", self._past_fields() or {})
                state = b"" if len(pages) else self._describe(sequence, demoted)
                past_ticket = offer(past_sender, past_pages, state, after=stream)
                if not len(pages):
                    return Export(past_sender, past_ticket, 0)
                past_offer = past_sender, past_ticket
                demoted = replace(demoted, ticket=past_ticket)
            state = self._describe(sequence, demoted)
            after = None if by_layer else stream
            ticket = offer(sender, pages, state, after=after, by_layer=by_layer)
        except BaseException:
            if past_offer is None:
                self._sequences.drop(held.sequence)
            else:
                past_offer[0].withdraw(past_offer[1])  # which releases what is held
            raise
        return Export(sender, ticket, self._pool.num_layers if by_layer else 0, past_offer)

    def reclaim(self) -> None:
        """Release what ended offers have held; full pages with hashes go to the tiered cache."""
        while self._ended:
            held, published = self._ended.popleft(), set[int]()
            held.num_offers -= 1
            if held.num_offers:
                continue
            try:
                published = self._tiers.publish(held.sequence)
            finally:
                self._sequences.drop(held.sequence, published)

    def add(
        self, seq: Hashable, ticket: bytes, receiver: ReceiverProtocol,
        past_receiver: ReceiverProtocol | None, deadline_s: float,
    ) -> PullProtocol | SequencePull:  # fmt: skip
        """Add the sequence that a ticket describes; its pages arrive in the background."""
        self._require_pools("receiver", "PageReceiver", receiver, past_receiver)
        state, num_pages, demoted = decode_state(
            receiver.inspect(ticket).attachment, self._fields(), self._pool.page_size,
            self._past_fields(),
        )  # fmt: skip
        pulled: list[tuple[ReceiverProtocol, bytes, int]] = []  # with the number of pages
        if demoted is None:
            pulled.append((receiver, ticket, num_pages))
        elif past_receiver is None:
            raise ValueError(
                "past_receiver: expected a PageReceiver of past_pool, for the ticket has demoted "
                "pages, got None"
            )
        else:
            if num_pages > demoted.count:
                pulled.append((receiver, ticket, num_pages - demoted.count))
            pulled.append((past_receiver, demoted.ticket or ticket, demoted.count))
        for by, named, count in pulled:
            if (got := by.inspect(named).num_pages) != count:
                raise ValueError(f"ticket: expected {count} pages of its sequence, got {got}")
        start, count = (0, 0) if demoted is None else (demoted.start, demoted.count)
        pages, past_pages = self._sequences.allocate_both(num_pages - count, count)
        combined = self._sequences.combine(state, pages, past_pages, start)
        pulls: list[PullProtocol] = []
        try:
            after = self._access.copy_stream_behind_all()
            for by, named, _ in pulled:
                into = pages if by is receiver else past_pages
                pulls.append(by.pull(named, into, deadline_s=deadline_s, after=after))
        except BaseException:
            for pull in pulls:
                pull.cancel()
            self._sequences.free(combined)
            raise
        self._sequences.receive(seq, state, combined, pulls)
        return pulls[0] if len(pulls) == 1 else SequencePull((pulls[0], pulls[1]))

    def _require_pools(self, name: str, kind: str, end: Any, past_end: Any) -> None:
        """Raise unless senders, or receivers, are of the pools of this cache."""
        if getattr(end, "pool", None) is not self._pool:
            raise ValueError(f"{name}: expected a {kind} of the pool of this cache")
        if past_end is None:
            return
        if self._past is None:
            raise ValueError(f"past_{name}: expected None without past, got {past_end!r}")
        if getattr(past_end, "pool", None) is not self._past.pool:
            raise ValueError(f"past_{name}: expected a {kind} of the past_pool of this cache")

    def _describe(self, sequence: CachedSequence, demoted: DemotedPages | None) -> bytes:
        return encode_state(sequence, self._fields(), self._pool.page_size, demoted)

    def _fields(self) -> dict[str, str]:
        """Return what caches that exchange sequences must have in common."""
        return {**self._contents.fields(), "page_size": str(self._pool.page_size)}

    def _past_fields(self) -> dict[str, str] | None:
        """Return what caches that exchange demoted pages must have in common; None without any."""
        past = self._past
        if past is None:
            return None
        return {
            "past": past.pool.stored_as, "recent": str(past.recent), "sinks": str(past.sinks),
        }  # fmt: skip


def _let_go(ended: deque[_Held], held: _Held, pages: object) -> None:
    ended.append(held)


def _reclaim(exchange: weakref.ref[Exchange]) -> None:
    if (owner := exchange()) is not None:
        owner.reclaim()


class SequencePull(Completion):
    """The pulls of a sequence's pages of both formats: a `Completion`, used like a `Pull`.

    Attributes
    ----------
    num_pages, num_bytes : of both
    failure : TransferError, why one has failed, or None. Neither waits nor raises
    """

    def __init__(self, pulls: tuple[PullProtocol, PullProtocol]) -> None:
        self._pulls = pulls
        self.num_pages = sum(pull.num_pages for pull in pulls)
        self.num_bytes = sum(pull.num_bytes for pull in pulls)

    @property
    def failure(self) -> TransferError | None:
        return next((pull.failure for pull in self._pulls if pull.failure is not None), None)

    def done(self) -> bool:
        """Return whether all of it is there; TransferError if one has failed."""
        return all([pull.done() for pull in self._pulls])

    def synchronize(self) -> None:
        """Wait until all of it is there; TransferError if one has failed, and nothing can land."""
        failure = None
        for pull in self._pulls:
            try:
                pull.synchronize()
            except TransferError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream wait for all of it, as `Pull.wait` does."""
        for pull in self._pulls:
            pull.wait(stream)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let later work of a stream wait for one layer, as `Pull.wait_layer` does."""
        for pull in self._pulls:
            pull.wait_layer(layer, stream)

    def cancel(self) -> None:
        """Cancel the rest, as `Pull.cancel` does."""
        for pull in self._pulls:
            pull.cancel()
