"""Sequences that move between caches: what a ticket says of one, and the pages held for it.

    exporting cache   hold pages | offer | ... layer 0 is written, layer 1 is written ... | release
    importing cache                 allocate pages | pull | attention waits layer by layer

A held page is shared: whoever would write to it copies it first, and it is freed with the last
reference.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...devices.protocol import Stream
from ..identity import hash_list
from ..pool import Pool
from .moves import PageAccess, Tiers
from .sequences import CachedSequence, Sequences

if TYPE_CHECKING:
    from ..migration.sender import PageSender

_KIND, _VERSION = "kvcupy sequence", 1
_NUMBERS = ("length", "evicted", "window", "sinks", "num_pages")
_MAX_BYTES = 1 << 20  # of a description
_MAX_NUMBER = 2**62


def encode_state(sequence: CachedSequence, fields: Mapping[str, str], page_size: int) -> bytes:
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
    }  # fmt: skip
    encoded = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    if len(encoded) > _MAX_BYTES:
        raise ValueError(
            f"seq: expected at most {_MAX_BYTES} bytes of description, got {len(encoded)}; "
            f"{len(hashes)} hashes are part of it"
        )
    return encoded


def decode_state(
    encoded: bytes, fields: Mapping[str, str], page_size: int
) -> tuple[CachedSequence, int]:
    """Return a sequence as `encode_state` described it, without pages, and how many it needs.

    ValueError that names the ticket unless all of it is consistent, and `fields` are the same.
    """
    described = _parsed(encoded)
    if described.get("kind") != _KIND or described.get("version") != _VERSION:
        raise ValueError(
            f"ticket: expected one of export_sequence, version {_VERSION}, got "
            f"{described.get('kind')!r}, version {described.get('version')!r}"
        )
    if set(described) != {"kind", "version", "fields", "hashes", *_NUMBERS}:
        raise ValueError(f"ticket: expected a sequence, got fields {sorted(described)}")
    theirs = described["fields"]
    if not isinstance(theirs, dict):
        raise ValueError(f"ticket: expected a sequence of a cache, got {theirs!r}")
    for name in sorted({*fields, *theirs}):
        if theirs.get(name) != fields.get(name):
            raise ValueError(
                f"ticket: expected a sequence with {name} {fields.get(name)}, "
                f"got {theirs.get(name)}"
            )
    numbers = {name: described[name] for name in _NUMBERS}
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number < _MAX_NUMBER:
            raise ValueError(f"ticket: expected {name} to be a count, got {number!r}")
    length, evicted = numbers["length"], numbers["evicted"]
    window, sinks = numbers["window"], numbers["sinks"]
    if window and sinks >= window:
        raise ValueError(f"ticket: expected sinks below window {window}, got {sinks}")
    # A page that holds evicted places alone is released, so that less than two are left.
    if evicted and not (window and sinks <= length and evicted < 2 * page_size):
        raise ValueError(f"ticket: expected no evicted span of {evicted} in {numbers}")
    if length == 0 or numbers["num_pages"] != -(-(length + evicted) // page_size):
        raise ValueError(
            f"ticket: expected pages of {page_size} for {length} tokens, got {numbers['num_pages']}"
        )
    sequence = CachedSequence()
    sequence.length, sequence.evicted = length, evicted
    sequence.window, sequence.sinks = window, sinks
    sequence.hashes = _hashes(described["hashes"], length // page_size)
    return sequence, numbers["num_pages"]


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

    def __init__(self, sender: PageSender, ticket: bytes, num_layers: int) -> None:
        self.ticket = ticket
        self._sender = sender
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
        self._sender.withdraw(self.ticket)
        self.finish(stream)


class Exports:
    """The exports of a cache, whose pages it holds until their offers are over.

    An offer ends in a thread of its sender. What that held is released by the thread that uses the
    cache, when it needs pages or counts them.
    """

    def __init__(self, pool: Pool, sequences: Sequences, access: PageAccess, tiers: Tiers) -> None:
        self._pool, self._sequences = pool, sequences
        self._access, self._tiers = access, tiers
        self._ended: deque[CachedSequence] = deque()
        # Not a method: in a cycle, all pools would stay until Python looks for those.
        self._reclaim = partial(_reclaim, weakref.ref(self))

    def start(
        self, sequence: CachedSequence, sender: PageSender, described: bytes, *, by_layer: bool,
        lease_s: float,
    ) -> Export:  # fmt: skip
        """Offer the pages of a sequence, behind all work so far or by layer."""
        stream = self._access.copy_stream
        if not by_layer:
            with self._access.on(stream, sequence):
                pass  # the offer waits for what the copy stream waits for
        self._sequences.reclaim = self._reclaim
        held = self._sequences.hold(sequence)
        try:
            ticket = sender.offer(
                held.pages.astype(np.int64), after=None if by_layer else stream,
                by_layer=by_layer, lease_s=lease_s, attachment=described,
                release=partial(_let_go, self._ended, held),
            )  # fmt: skip
        except BaseException:
            self._sequences.drop(held)
            raise
        return Export(sender, ticket, self._pool.num_layers if by_layer else 0)

    def reclaim(self) -> None:
        """Release what ended offers have held; full pages with hashes go to the tiered cache."""
        while self._ended:
            held, published = self._ended.popleft(), set[int]()
            try:
                published = self._tiers.publish(held)
            finally:
                self._sequences.drop(held, published)


def _let_go(ended: deque[CachedSequence], held: CachedSequence, pages: object) -> None:
    ended.append(held)


def _reclaim(exports: weakref.ref[Exports]) -> None:
    if (owner := exports()) is not None:
        owner.reclaim()
