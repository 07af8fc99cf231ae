"""Sequences that move between caches: what a ticket says of one, and the pages held for it.

    exporting cache   hold pages | offer | ... layer 0 is written, layer 1 is written ... | release
    importing cache                 allocate pages | pull | attention waits layer by layer

Demoted pages are offered by a sender of their own, as they are; its ticket is part of the other's.
A held page is shared: whoever would write to it copies it first, and it is freed with the last
reference.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ...devices.protocol import Stream
from ...errors import TransferError
from ..hashes import hash_list
from ..pool import Pool
from .moves import PageAccess, Tiers
from .sequences import CachedSequence, Ints, Sequences


class SenderProtocol(Protocol):
    """What exports need of a `PageSender`."""

    def offer(self, pages: Any, **options: Any) -> bytes: ...
    def layer_done(self, ticket: bytes, layer: int, stream: Any) -> None: ...
    def withdraw(self, ticket: bytes) -> None: ...


class PullProtocol(Protocol):
    """What imports need of a `Pull`."""

    num_pages: int
    num_bytes: int

    @property
    def failure(self) -> TransferError | None: ...
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def wait_layer(self, layer: int, stream: Any = None) -> None: ...
    def cancel(self) -> None: ...


class ReceiverProtocol(Protocol):
    """What imports need of a `PageReceiver`."""

    def inspect(self, ticket: Any) -> Any: ...
    def pull(self, ticket: Any, pages: Any, *, deadline_s: float, after: Any) -> PullProtocol: ...


_KIND, _VERSION = "kvcupy sequence", 1
_NUMBERS = ("length", "evicted", "window", "sink_tokens", "num_pages")
_MAX_BYTES = 1 << 20  # of a description
_MAX_NUMBER = 2**62


@dataclass(frozen=True)
class DemotedPages:
    """What a ticket says of the demoted pages of a sequence.

    Attributes
    ----------
    start, count : at which of its pages they begin, and how many there are
    ticket : of their offer; empty: they are all the pages it has, and the ticket is that itself
    fields : what caches must have in common that exchange them: format, recent, sinks
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
        """Return what `encoded` gave, of a sequence of so many pages; ValueError if it differs."""
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
    """Describe a sequence as canonical JSON, with what a cache must have in common.

    Its hashes are those of full pages: a prompt that is not computed to its end has more.

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
    """Return a sequence as `encode_state` described it, without pages, and how many it needs.

    ValueError that names the ticket unless all of it is consistent, and `fields` are the same, and
    `past_fields` where pages are demoted (None: they must not be).
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
    # A page that holds evicted places alone is released, so that less than two are left.
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


# --- Exports ---


class Export:
    """A sequence that is offered layer by layer: what it was at the call.

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


class Exports:
    """The exports of a cache, whose pages it holds until their offers are over.

    An offer ends in a thread of its sender. What that held is released by the thread that uses the
    cache, when it needs pages or counts them.
    """

    def __init__(self, pool: Pool, sequences: Sequences, access: PageAccess, tiers: Tiers) -> None:
        self._pool, self._sequences = pool, sequences
        self._access, self._tiers = access, tiers
        self._ended: deque[_Held] = deque()  # each once for every offer that is over
        # Not a method: in a cycle, all pools would stay until Python looks for those.
        self._reclaim = partial(_reclaim, weakref.ref(self))

    def start(
        self, sequence: CachedSequence, sender: SenderProtocol, past_sender: SenderProtocol | None,
        describe: Callable[[DemotedPages | None], bytes], past_fields: Mapping[str, str], *,
        by_layer: bool, lease_s: float,
    ) -> Export:  # fmt: skip
        """Offer the pages of a sequence, behind all work so far or by layer.

        Demoted pages are offered as a whole, by `past_sender`; `describe` says what the ticket is
        of.
        """
        stream = self._access.copy_stream
        pages, past_pages, start = self._sequences.split(sequence)
        if len(past_pages) or not by_layer:
            with self._access.on(stream, sequence):
                pass  # the offer waits for what the copy stream waits for
        self._sequences.reclaim = self._reclaim
        held = _Held(self._sequences.hold(sequence))

        def offer(by: SenderProtocol, numbers: Ints, attachment: bytes, **how: Any) -> bytes:
            ticket = by.offer(
                numbers, lease_s=lease_s, release=partial(_let_go, self._ended, held),
                attachment=attachment, **how,
            )  # fmt: skip
            held.num_offers += 1
            return ticket

        demoted, past_offer = None, None
        try:
            if past_sender is not None and len(past_pages):
                demoted = DemotedPages(start, len(past_pages), b"", past_fields)
                described = b"" if len(pages) else describe(demoted)
                past_ticket = offer(past_sender, past_pages, described, after=stream)
                if not len(pages):
                    return Export(past_sender, past_ticket, 0)
                past_offer = past_sender, past_ticket
                demoted = replace(demoted, ticket=past_ticket)
            after = None if by_layer else stream
            ticket = offer(sender, pages, describe(demoted), after=after, by_layer=by_layer)
        except BaseException:
            if past_offer is None:
                self._sequences.drop(held.sequence)
            else:
                past_offer[0].withdraw(past_offer[1])  # which lets go of what is held
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


def _let_go(ended: deque[_Held], held: _Held, pages: object) -> None:
    ended.append(held)


def _reclaim(exports: weakref.ref[Exports]) -> None:
    if (owner := exports()) is not None:
        owner.reclaim()


# --- Imports ---


class SequencePull:
    """The pulls of a sequence's pages of two formats as one: a `Completion`, used like a `Pull`.

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
        """Give the rest up, as `Pull.cancel` does."""
        for pull in self._pulls:
            pull.cancel()
