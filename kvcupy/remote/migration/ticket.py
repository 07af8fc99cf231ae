"""Tickets, which name an offer and where its bytes are, and the status that the sender writes."""

from __future__ import annotations

import base64
import hmac
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from ...cache.identity import PoolIdentity
from ...cache.pages import Pages
from ...errors import TransferError
from .agent import Process
from .memory import PoolMemory, Regions, described

STATUS_BYTES = 64
KEY_BYTES = TOKEN_BYTES = 16
OUTCOMES = ("", "completed", "expired", "withdrawn", "failed", "closed")

_STATUS = struct.Struct("<QQQ")  # generation, number of ready layers, index in OUTCOMES
_MAGIC = b"kvpages\1"
_MAC_BYTES = 32
# Generation, address and key of the status, token, lease; bytes of the description of the sender;
# numbers of parts, units, hashes; bytes of the attachment.
_HEAD = struct.Struct("<QQ16s16sdIIIII")
_PART = struct.Struct("<II")  # number of the pool, number of pages
_MAX_PAGES, _MAX_LAYERS = 1 << 24, 1 << 16
_MIN_SECRET_BYTES = 16


# --- The status ---


class Status(NamedTuple):
    """What the sender says of an offer. An ended one has another generation, and its outcome."""

    generation: int
    num_ready: int
    outcome: str = ""

    def encoded(self, key: bytes) -> bytes:
        record = _STATUS.pack(self.generation, self.num_ready, OUTCOMES.index(self.outcome))
        return record + blake2b(record, digest_size=16, key=key).digest()

    @classmethod
    def decoded(cls, encoded: bytes, key: bytes) -> Status | None:
        """Return the status, or None for one that was read while it was written."""
        record, digest = encoded[: _STATUS.size], encoded[_STATUS.size : _STATUS.size + 16]
        if blake2b(record, digest_size=16, key=key).digest() != digest:
            return None
        generation, num_ready, outcome = _STATUS.unpack(record)
        return cls(generation, num_ready, OUTCOMES[outcome])


# --- The sender, as tickets describe it ---


@dataclass(frozen=True)
class TheirPool:
    """A pool of the sender."""

    identity: PoolIdentity
    num_pages: int
    regions: Regions


@dataclass(frozen=True)
class TheirAgent:
    """A sender: the metadata of its NIXL agent, its process, and its pools."""

    metadata: bytes
    process: Process
    pools: Sequence[TheirPool]


def encode_sender(metadata: bytes, memories: Sequence[PoolMemory]) -> bytes:
    """Describe this process and some pools, for the tickets of a sender."""
    state = {
        "agent": base64.b64encode(metadata).decode(), "process": asdict(Process.current()),
        "pools": [described(m, asdict(PoolIdentity.of(m.pool))) for m in memories],
    }  # fmt: skip
    return json.dumps(state, sort_keys=True, separators=(",", ":")).encode()


@lru_cache(64)
def _decode_sender(encoded: bytes) -> TheirAgent:
    state = json.loads(encoded)
    process = Process(**state["process"])
    if [type(value) for value in asdict(process).values()] != [str, str, int, int]:
        raise ValueError("no process")
    pools = []
    for pool in state["pools"]:
        identity = PoolIdentity.decoded(json.dumps(pool["identity"]).encode())
        if not 0 < identity.num_layers <= _MAX_LAYERS:
            raise ValueError("no number of layers")
        num_parts = (2 if identity.kind == "kv" else 1) * (2 if identity.scales else 1)
        regions = Regions.decoded(pool["groups"], identity.num_layers, num_parts)
        if type(pool["num_pages"]) is not int:
            raise ValueError("no number of pages")
        pools.append(TheirPool(identity, pool["num_pages"], regions))
    return TheirAgent(base64.b64decode(state["agent"], validate=True), process, pools)


# --- Tickets ---


def checked_secret(secret: Any) -> bytes:
    """Return the key of tickets, empty without a secret."""
    if secret is None:
        return b""
    if not isinstance(secret, bytes):
        raise TypeError(f"secret: expected bytes, got {type(secret).__name__}")
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(f"secret: expected at least {_MIN_SECRET_BYTES} bytes, got {len(secret)}")
    return blake2b(secret, digest_size=_MAC_BYTES, person=b"kvcupy ticket").digest()


class Part(NamedTuple):
    """Offered pages of one pool of the sender, int64 (n,)."""

    pool: int
    pages: Pages


@dataclass(frozen=True, eq=False)
class Ticket:
    """What a ticket says.

    Attributes
    ----------
    generation : of the offer
    status : address of its status
    key : of the digest of the status
    token : that a receiver returns when it is done
    lease_s : seconds from the offer until it ends
    sender : encoded `TheirAgent`
    parts : pages of the sender's pools
    units : (part, layer), in the order in which they become ready
    hashes : of the pages, or none
    attachment : the user's bytes
    """

    generation: int
    status: int
    key: bytes = field(repr=False)
    token: bytes = field(repr=False)
    lease_s: float
    sender: bytes
    parts: Sequence[Part]
    units: Sequence[tuple[int, int]]
    hashes: Sequence[int] = ()
    attachment: bytes = b""

    @property
    def num_pages(self) -> int:
        return sum(len(part.pages) for part in self.parts)

    @property
    def agent(self) -> TheirAgent:
        return _decode_sender(self.sender)

    def encoded(self, key: bytes) -> bytes:
        """Encode for `decoded`, with a keyed digest of all of it; `key` is of `checked_secret`."""
        head = _HEAD.pack(
            self.generation, self.status, self.key, self.token, self.lease_s, len(self.sender),
            len(self.parts), len(self.units), len(self.hashes), len(self.attachment),
        )  # fmt: skip
        parts = [_PART.pack(part.pool, len(part.pages)) for part in self.parts]
        pages = [part.pages.astype("<u4").tobytes() for part in self.parts]
        units = np.array(self.units, "<u4").tobytes()
        hashes = [hash.to_bytes(16, "little") for hash in self.hashes]
        body = b"".join((head, self.sender, *parts, *pages, units, *hashes, self.attachment))
        return _MAGIC + _mac(body, key) + body

    @classmethod
    def decoded(cls, ticket: Any, key: bytes) -> Ticket:
        """Decode a ticket.

        Raises
        ------
        TypeError : it is not bytes
        TransferError : it is damaged, no ticket, or made with another secret
        """
        if not isinstance(ticket, (bytes, bytearray)):
            raise TypeError(f"ticket: expected bytes, got {type(ticket).__name__}")
        ticket = bytes(ticket)
        start = len(_MAGIC) + _MAC_BYTES
        if not ticket.startswith(_MAGIC):
            raise TransferError("ticket: expected one of PageSender.offer", "ticket")
        if not hmac.compare_digest(ticket[len(_MAGIC) : start], _mac(ticket[start:], key)):
            raise TransferError("ticket: damaged, or made with another secret", "ticket")
        try:
            return cls._parsed(memoryview(ticket)[start:])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error,
                OverflowError, MemoryError) as error:  # fmt: skip
            raise TransferError(f"ticket: malformed: {error!r:.200}", "ticket") from None

    @classmethod
    def _parsed(cls, body: memoryview) -> Ticket:
        (generation, status, key, token, lease_s, sender_bytes, num_parts, num_units, num_hashes,
         attachment_bytes) = _HEAD.unpack_from(body)  # fmt: skip
        rest = body[_HEAD.size :]

        def take(num_bytes: int) -> memoryview:
            nonlocal rest
            if num_bytes > len(rest):
                raise ValueError("truncated")
            taken, rest = rest[:num_bytes], rest[num_bytes:]
            return taken

        sender = bytes(take(sender_bytes))
        pools = _decode_sender(sender).pools
        counts = list(_PART.iter_unpack(take(num_parts * _PART.size)))
        parts = []
        for pool, count in counts:
            pages = np.frombuffer(take(4 * count), "<u4").astype(np.int64)
            if not (pool < len(pools) and 0 < count <= _MAX_PAGES):
                raise ValueError("pages of no pool")
            if pages.max() >= pools[pool].num_pages:
                raise ValueError("pages past the end of a pool")
            parts.append(Part(pool, pages))
        table = np.frombuffer(take(8 * num_units), "<u4").reshape(num_units, 2).tolist()
        units = [(part, layer) for part, layer in table]
        expected = [
            (number, layer) for number, part in enumerate(parts)
            for layer in range(pools[part.pool].identity.num_layers)
        ]  # fmt: skip
        if not units or sorted(units) != expected:
            raise ValueError("layers that do not occur once each")
        encoded = bytes(take(16 * num_hashes))
        hashes = [int.from_bytes(encoded[i : i + 16], "little") for i in range(0, len(encoded), 16)]
        attachment = bytes(take(attachment_bytes))
        if rest:
            raise ValueError("bytes after the end")
        return cls(
            generation, status, key, token, lease_s, sender, parts, units, hashes, attachment
        )


def _mac(body: bytes, key: bytes) -> bytes:
    return blake2b(body, digest_size=_MAC_BYTES, key=key).digest()
