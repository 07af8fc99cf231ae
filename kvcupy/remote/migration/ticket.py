"""Tickets, which name an offer and where its bytes are, and the status that the sender writes."""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from ...cache.identity import PoolIdentity
from ...cache.pages import Pages
from ...errors import TransferError
from .agent import Process
from .memory import Addresses, PoolMemory, tables_of

STATUS_BYTES = 64
KEY_BYTES = TOKEN_BYTES = 16
OUTCOMES = ("", "completed", "expired", "withdrawn", "failed", "closed")

_STATUS = struct.Struct("<QQQ")  # generation, number of ready layers, index in OUTCOMES
_MAGIC = b"kvpages\1"
_MAC_BYTES = 32
_MIN_SECRET_BYTES = 16


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


class TheirPool(NamedTuple):
    """A pool of the sender, and where its rows are (`tables_of`)."""

    identity: PoolIdentity
    tables: Addresses


class TheirAgent(NamedTuple):
    """A sender: the metadata of its NIXL agent, its process, and its pools."""

    metadata: bytes
    process: Process
    pools: Sequence[TheirPool]


def described_sender(metadata: bytes, memories: Sequence[PoolMemory]) -> Mapping[str, Any]:
    """Describe this process and some pools, for the tickets of a sender."""
    return {
        "agent": metadata.hex(), "process": asdict(Process.current()),
        "pools": [(asdict(PoolIdentity.of(each.pool)), each.regions) for each in memories],
    }  # fmt: skip


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
    """What a ticket says, from `PageReceiver.inspect`.

    Attributes
    ----------
    generation : of the offer
    status : address of its status
    key : of the digest of the status
    token : that a receiver returns when it is done
    lease_s : seconds from the offer until it ends
    sender : description of the sender
    parts : pages of the sender's pools
    units : (part, layer), in the order in which they become ready
    hashes : of the pages, or none
    sequence : of `PagedKVCache.export_sequence`, what else there is to say of it
    """

    generation: int
    status: int
    key: bytes = field(repr=False)
    token: bytes = field(repr=False)
    lease_s: float
    sender: Mapping[str, Any]
    parts: Sequence[Part]
    units: Sequence[tuple[int, int]]
    hashes: Sequence[int] = ()
    sequence: Mapping[str, Any] | None = None

    @property
    def num_pages(self) -> int:
        """The number of pages to allocate for a pull."""
        return sum(len(part.pages) for part in self.parts)

    @cached_property
    def agent(self) -> TheirAgent:
        """The sender."""
        pools = []
        for fields, regions in self.sender["pools"]:
            identity, tables = PoolIdentity(**fields), tables_of(regions)
            if tables.shape[1] != identity.num_layers:
                raise ValueError("regions of other layers")
            pools.append(TheirPool(identity, tables))
        process = Process(**self.sender["process"])
        return TheirAgent(bytes.fromhex(self.sender["agent"]), process, pools)

    def encoded(self, key: bytes) -> bytes:
        """Encode for `decoded`, with a keyed digest of all of it; `key` is of `checked_secret`."""
        parts = [(part.pool, part.pages.tolist()) for part in self.parts]
        state = {**vars(self), "key": self.key.hex(), "token": self.token.hex(), "parts": parts}
        state.pop("agent", None)
        body = json.dumps(state, separators=(",", ":")).encode()
        return _MAGIC + _mac(body, key) + body

    @classmethod
    def decoded(cls, ticket: Any, key: bytes) -> Ticket:
        """Decode a ticket; TransferError if it is damaged, or made with another secret."""
        if not isinstance(ticket, (bytes, bytearray)):
            raise TypeError(f"ticket: expected bytes, got {type(ticket).__name__}")
        ticket = bytes(ticket)
        start = len(_MAGIC) + _MAC_BYTES
        if not ticket.startswith(_MAGIC):
            raise TransferError("ticket: expected one of PageSender.offer", "ticket")
        if not hmac.compare_digest(ticket[len(_MAGIC) : start], _mac(ticket[start:], key)):
            raise TransferError("ticket: damaged, or made with another secret", "ticket")
        try:  # without a secret, anybody can make a digest
            state = json.loads(ticket[start:])
            state["key"], state["token"] = (bytes.fromhex(state[n]) for n in ("key", "token"))
            state["parts"] = [
                Part(number, np.array(pages, np.int64).reshape(len(pages)))
                for number, pages in state["parts"]
            ]
            state["units"] = [(part, layer) for part, layer in state["units"]]
            decoded = cls(**state)
            pools = [decoded.agent.pools[part.pool] for part in decoded.parts]
            counts = [pool.identity.num_layers for pool in pools]
            if not 0 < len(decoded.units) == sum(counts) or sorted(decoded.units) != [
                (number, layer) for number, count in enumerate(counts) for layer in range(count)
            ]:
                raise ValueError("layers that do not occur once each")
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
                RecursionError, MemoryError) as error:  # fmt: skip
            raise TransferError(f"ticket: malformed: {error!r:.200}", "ticket") from None
        return decoded


def _mac(body: bytes, key: bytes) -> bytes:
    return blake2b(body, digest_size=_MAC_BYTES, key=key).digest()
