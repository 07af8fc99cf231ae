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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ...devices.protocol import Stream
from ...errors import CacheFull, TransferError
from ..engine import TransferEngine
from ..hazards import Completion, CopiedPages, PageAccess
from ..pages import PageAllocator, hash_list
from ..pool import Pool, pool_like, positive_int
from ..tiered.cache import TieredCache
from ..tiered.leases import Lease
from .contents import Contents
from .moves import Past
from .sequences import CachedSequence, Ints, OffloadedPages, Sequences


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
    """Moves sequences and their blocks between the pages of a paged cache and a tiered cache."""

    def __init__(
        self, pool: Pool, sequences: Sequences, access: PageAccess, past_pool: Pool | None = None
    ) -> None:
        self.tiered: TieredCache | None = None  # once attached
        self._pool, self._past_pool = pool, past_pool
        self._sequences, self._access = sequences, access
        # Between the pool of old tokens and host memory, made when it is first needed.
        self._past_engine: TransferEngine | None = None
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
            if self._past_pool is None:
                raise ValueError(f"num_past_host_pages: expected None without past, got {count}")
            self._num_past_host_pages = count
        self.tiered = tiers
        # Not a method: in a cycle, all pools would stay until Python looks for cycles.
        self._sequences.evict = partial(evict, tiers, self._pool.allocator)

    def require(self, name: str) -> TieredCache:
        """Return the tiered cache; raise if it is missing. `name` is the argument that needs it."""
        if self.tiered is None:
            raise ValueError(f"{name}: expected a cache with a tiered cache; call attach first")
        return self.tiered

    def acquire(self, hashes: Sequence[int]) -> Lease:
        """Return a lease of the leading blocks that the tiered cache knows."""
        return self.require("hashes").acquire(hashes, after=self._access.copy_stream_behind_all())

    def offload(self, sequence: CachedSequence) -> None:
        """Save the pages of a sequence to host memory, unconverted, and release them."""
        tiers = self.require("seq")
        if sequence.num_pages == 0:
            return
        pages, past_pages, past_start = self._sequences.split(sequence)
        stream = self._access.copy_stream
        host_pages, past_host_pages = self._take_host_pages(tiers, len(pages), len(past_pages))
        parts = [(tiers.engine, pages, host_pages)]
        if len(past_pages):
            parts.append((self._engine_of_past(), past_pages, past_host_pages))
        saves = []
        try:
            with self._access.on(stream, sequence):
                pass  # the saves wait for what the copy stream waits for
            for engine, numbers, host_numbers in parts:
                saves.append(engine.save(numbers, host_numbers, after=stream))
                engine._flush()
        except BaseException:
            for engine, _, host_numbers in parts:
                engine.host_pool.allocator.free(host_numbers)
            raise
        if len(self._sequences.owned(sequence, sequence.num_pages)) < sequence.num_pages:
            # A sequence that shares a page may soon own it alone, and write during the save.
            for engine, _, _ in parts:
                self._access.order.end(engine.save_stream)
        past = None
        if len(past_pages):
            past = OffloadedPages(past_host_pages, saves[1], parts[1][0])
        offloaded = OffloadedPages(host_pages, saves[0], tiers.engine, past, past_start)
        self._sequences.offload(sequence, offloaded)

    def onboard(self, sequence: CachedSequence) -> None:
        """Load the pages of an offloaded sequence; one on the device is left alone."""
        host = sequence.offloaded
        if host is None:
            return
        parts = [host] if host.past is None else [host, host.past]
        for part in parts:
            part.save.synchronize()
        counts = [len(part.pages) for part in parts]
        pages = self._sequences.allocate_both(counts[0], sum(counts[1:]))
        combined = self._sequences.combine(*pages, host.past_start)
        loads = []
        try:
            stream = self._access.copy_stream_behind_all()
            for part, numbers in zip(parts, pages, strict=False):
                loads.append(part.engine.load(part.pages, numbers, after=stream))
                part.engine._flush()
        except BaseException:
            self._sequences.free(combined)
            raise
        self._sequences.onboard(sequence, combined, loads)
        host.free()

    def _engine_of_past(self) -> TransferEngine:
        """Return the engine between the pool of demoted pages and its host pool, made once."""
        if self._past_engine is None:
            past_pool = self._past_pool
            assert past_pool is not None
            count = self._num_past_host_pages or past_pool.num_pages
            host_pool = pool_like(past_pool, count, dtype=past_pool.dtype)
            self._past_engine = TransferEngine(past_pool, host_pool)
        return self._past_engine

    def _take_host_pages(
        self, tiers: TieredCache, count: int, past_count: int
    ) -> tuple[Ints, Ints]:
        """Take pages in host memory for both formats, all or none."""
        if not past_count:
            taken: Ints = tiers.take_host_pages(count)
            return taken, taken[:0]
        past_allocator = self._engine_of_past().host_pool.allocator
        past_pages = past_allocator.alloc(past_count)
        try:
            return tiers.take_host_pages(count), past_pages
        except BaseException:
            past_allocator.free(past_pages)
            raise

    def publish(self, sequence: CachedSequence) -> set[int]:
        """Give the tiered cache a sequence's own full pages with hashes; return those it took."""
        tiers = self.tiered
        if tiers is None or tiers.closed or sequence.offloaded:
            return set()
        if any(load.failure or not isinstance(load, CopiedPages) for load in sequence.loads):
            return set()
        count = min(len(sequence.hashes), sequence.committed // self._pool.page_size)
        owned = self._sequences.owned(sequence, count)
        owned = owned[sequence.pages[owned] < self._pool.num_pages]  # not the demoted ones
        pages = sequence.pages[owned].tolist()
        if not pages:
            return set()
        hashes = [sequence.hashes[i] for i in owned.tolist()]
        parents = [sequence.hashes[i - 1] if i else 0 for i in owned.tolist()]
        tokens = None if sequence.token_ids is None else sequence.token_ids[owned].reshape(-1)
        unneeded = tiers.insert(
            hashes, pages, after=self._access.copy_stream_behind_all(), parent=parents,
            token_ids=tokens,
        )  # fmt: skip
        return set(pages) - set(unneeded)


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
        combined = self._sequences.combine(pages, past_pages, start)
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
