"""Migration protocol: addresses, tickets, the handshake, messages.

    receiver                                             sender
    hello: version, nonce, pool's digest, offer ---->
                                                <----    hello: nonce, its id, HMAC of both hellos
    HMAC of both hellos                         ---->
    PULL offer, generation, heads               ---->
                                                <----    GRANT lease, bytes per layer   or   REFUSED
    START, if PULL announced it                 ---->
            ... layers, as the engine moves them; RENEW from the receiver at any time ...
    DONE                                        ---->
                                                <----    CONFIRMED

The HMACs are keyed with the secret, or else with the token of the offer, which its ticket holds.
Every later message has an authentication code with a key derived from that and a message count, so
messages cannot be forged, replayed or dropped. Sizes are checked before allocation, and nothing is
unpickled.

An operator has no ticket: its hello names offer 0, whose token is empty. Instead of PULL it sends
OPERATE, and the sender answers with OPERATE or REFUSED.

Versions: a ticket has the newest version that the sender speaks, and a hello the newest that both
speak. Version 3 names no offer in its hello; without a secret, its keys are public.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import xxhash

from ...cache.identity import PoolIdentity
from ...errors import TransferError, naming

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

VERSIONS = range(3, 5)  # of the wire, spoken by this release

# Kinds of messages.
PULL, GRANT, REFUSED, RENEW, DONE, CONFIRMED = 1, 2, 3, 4, 5, 6
LAYER, CHECKSUM, READ = 7, 8, 9  # used by engines
START = 10
OPERATE = 11  # request and answer of an operator, JSON
NAMES = {
    PULL: "PULL", GRANT: "GRANT", REFUSED: "REFUSED", RENEW: "RENEW", DONE: "DONE",
    CONFIRMED: "CONFIRMED", LAYER: "LAYER", CHECKSUM: "CHECKSUM", READ: "READ", START: "START",
    OPERATE: "OPERATE",
}  # fmt: skip

# Of failed pulls: `TransferError.reason`.
REASONS = frozenset((
    "cancelled", "closed", "late", "expired", "withdrawn", "taken", "failed", "lost", "corrupt",
    "identity", "secret", "version", "ticket",
))  # fmt: skip
_REFUSALS = REASONS - {"cancelled", "closed"}  # those are the receiver's own: a closed peer is lost

MAX_MESSAGE_BYTES = 1 << 20
MAX_TICKET_BYTES = 8 << 20
MAX_ATTACHMENT_BYTES = 1 << 20
MAX_TRACE_BYTES = 128
MAX_PAGES = 1 << 18  # per offer
HANDSHAKE_S = 5.0
MIN_SECRET_BYTES = 16

_HEAD = struct.Struct(">BI")  # kind, bytes of the payload
_MAC_BYTES = 16
_MIN_PAYLOAD_BYTES = 48  # shorter payloads are padded, so that one call receives most messages
MIN_MESSAGE_BYTES = _HEAD.size + _MIN_PAYLOAD_BYTES + _MAC_BYTES
_REFUSAL_TIMEOUT_S = 0.1
_MAX_REASON_CHARS = 1000
_LISTEN_TIMEOUT_S = 5.0
_LOCK_POLL_S = 0.005
_MAX_BUFFERS = 512  # per system call


# --- Addresses ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """Listening address of a sender: "unix:PATH" or "tcp:HOST:PORT".

    >>> Address.parse("tcp:[::1]:80", "listen")
    Address(path='', host='::1', port=80)
    """

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: Any, name: str) -> Address:
        """Parse the argument `name`; TypeError or ValueError if invalid."""
        expected = f'{name}: expected "unix:PATH" or "tcp:HOST:PORT", got {text!r}'
        if not isinstance(text, str):
            raise TypeError(expected)
        if not text.isprintable():
            raise ValueError(expected)
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest:
            num_bytes = len(os.fsencode(rest))
            if num_bytes > 107:
                raise ValueError(f"{name}: expected a path of at most 107 bytes, got {num_bytes}")
            return cls(path=rest)
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
            raise ValueError(expected)
        if int(port) > 65535:
            raise ValueError(f"{name}: expected a port of at most 65535, got {port}")
        return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"

    @cached_property
    def is_local(self) -> bool:
        """Whether only processes of this machine can connect."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_wildcard(self) -> bool:
        with suppress(ValueError):
            return bool(self.host) and ipaddress.ip_address(self.host).is_unspecified
        return False

    def connect(self, deadline_s: float) -> socket.socket:
        if not self.path:
            connection = socket.create_connection((self.host, self.port), deadline_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A socket option: with `settimeout`, connecting to a full backlog fails at once.
            set_timeout(connection, time.monotonic() + deadline_s)
            connection.connect(self.path)
        except BlockingIOError:
            connection.close()
            raise TimeoutError("timed out") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self) -> tuple[socket.socket, Address]:
        """Return a listening socket, and its address with the assigned port.

        Raises
        ------
        OSError : the address is in use, or the path exists and is not a socket
        """
        if not self.path:
            server = socket.create_server(
                (self.host, self.port),
                family=socket.AF_INET6 if ":" in self.host else socket.AF_INET,
            )
            return server, Address(host=self.host, port=server.getsockname()[1])
        with _locked(f"{self.path}.lock"):
            self._remove_stale()
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # A private name until the mode is set, so that no other user can connect before.
                private = f"{self.path}.{os.getpid():x}"
                bound = private if len(os.fsencode(private)) <= 107 else self.path
                if bound != self.path:
                    Path(bound).unlink(missing_ok=True)  # of a killed process with the same id
                server.bind(bound)
                Path(bound).chmod(0o600)
                server.listen()
                if bound != self.path:
                    try:
                        os.link(bound, self.path)  # raises if the name is taken
                    finally:
                        Path(bound).unlink()
            except BaseException:
                server.close()
                raise
        return server, self

    def _remove_stale(self) -> None:
        """Remove a socket without a listener; OSError if a process listens on it."""
        path = Path(self.path)
        if not path.is_socket():
            return
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.settimeout(1.0)
            probe.connect(self.path)
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except (FileNotFoundError, TimeoutError, BlockingIOError):
            return  # removed meanwhile; or still in use, and then `bind` or `link` raises
        finally:
            probe.close()
        raise FileExistsError(f"listen: another sender listens on {self}")


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Exclude other processes and threads through a lock file, which is removed in the end.

    Raises
    ------
    OSError : the file cannot be opened, or another process keeps the lock for 5 s
    """
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while True:
        with naming(Path(path).parent):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:  # else its last owner has removed it meanwhile
                break
        except BlockingIOError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        if time.monotonic() > deadline:
            raise TimeoutError(f"listen: another process keeps {path} locked")
        time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        Path(path).unlink()
        os.close(lock)


# --- Arguments ------------------------------------------------------------------------------------


def checked_trace_id(trace_id: Any) -> str:
    """Check the argument `trace_id`; TypeError or ValueError if it is invalid."""
    if not isinstance(trace_id, str):
        raise TypeError(f"trace_id: expected a str, got {type(trace_id).__name__}")
    if len(trace_id.encode("utf-8", "replace")) > MAX_TRACE_BYTES or not trace_id.isprintable():
        raise ValueError(
            f"trace_id: expected printable text of at most {MAX_TRACE_BYTES} bytes, "
            f"got {trace_id[:MAX_TRACE_BYTES]!r}"
        )
    return trace_id


def checked_secret(secret: Any) -> bytes:
    """Check the argument `secret`, and return it as bytes, empty for None."""
    if secret is None:
        return b""
    if not isinstance(secret, (bytes, bytearray)):
        raise TypeError(f"secret: expected bytes, got {type(secret).__name__}")
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"secret: expected at least {MIN_SECRET_BYTES} bytes, such as secrets.token_bytes(32), "
            f"got {len(secret)}"
        )
    return bytes(secret)


def checked_tls(tls: Any, role: str) -> ssl.SSLContext | None:
    """Check the argument `tls`: an SSLContext for "servers" or "clients", or None."""
    if tls is None:
        return None
    if not isinstance(tls, ssl.SSLContext):
        raise TypeError(f"tls: expected an ssl.SSLContext, got {type(tls).__name__}")
    others = {"PROTOCOL_TLS_SERVER": "servers", "PROTOCOL_TLS_CLIENT": "clients"}
    if (own := others.get(tls.protocol.name, role)) != role:
        raise ValueError(f"tls: expected a context for {role}, got one for {own}")
    return tls


def _hmac(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    keyed = hmac.new(key, purpose, hashlib.sha256)
    for part in parts:
        keyed.update(len(part).to_bytes(4, "big") + part)
    return keyed.digest()


# --- Tickets --------------------------------------------------------------------------------------


@lru_cache(16)
def _ticket_key(secret: bytes) -> bytes:
    return _hmac(secret, b"kvcupy tickets")


def _ticket_mac(secret: bytes, body: bytes) -> bytes:
    """Return the authentication code of a ticket.

    Keyed BLAKE2b touches much less memory than HMAC of OpenSSL, which would take longer than all
    other work of a pull on its ticket.
    """
    return hashlib.blake2b(body, key=_ticket_key(secret), digest_size=32).digest()


_encoded = lru_cache(64)(PoolIdentity.encoded)
_decoded = lru_cache(64)(PoolIdentity.decoded)
_TICKET = struct.Struct(">4sBBQQ16s16s16sQIHHBBII")
_TICKET_MAGIC = b"KVPT"
_PLAIN_TICKET, _TRACED_TICKET = 3, 4  # formats; the latter, with a trace id, came with version 4


@dataclass(frozen=True)
class Ticket:
    """A ticket of `PageSender.offer`, decoded by `PageReceiver.inspect`.

    Attributes
    ----------
    num_pages : number of pages in the offer
    num_pulls : number of pulls that complete the offer
    lease_s : initial lease of the offer. A duration, not a time, since clocks of machines differ
    hashes : hashes of the blocks in the pages, or empty
    attachment : bytes added by the sender's user
    identity : of the sender's pool: its geometry and its range of heads
    address : listening address of the sender
    trace_id : identifier that the sender's user chose, or empty
    number, generation, token, sender_id, engine : identify the offer
    version : newest version of the wire that the sender speaks
    """

    number: int
    generation: int
    token: bytes
    sender_id: bytes
    digest: bytes
    lease_s: float
    num_pages: int
    num_pulls: int
    address: str
    engine: str
    identity: PoolIdentity
    version: int
    hashes: tuple[int, ...] = ()
    attachment: bytes = b""
    trace_id: str = ""

    def is_alike(self, other: Ticket) -> bool:
        """Return whether another ticket has the same pool and engine."""
        return (
            self.identity is other.identity  # identities are cached, so equal ones are identical
            and self.digest == other.digest
            and self.engine == other.engine
            and self.address == other.address
        )

    def encoded(self, secret: bytes) -> bytes:
        address, identity = self.address.encode(), _encoded(self.identity)
        engine = self.engine.encode()
        wide = any(h >> 64 for h in self.hashes)
        hash_bytes = (16 if wide else 8) if self.hashes else 0
        trace = self.trace_id.encode()
        head = _TICKET.pack(
            _TICKET_MAGIC, _TRACED_TICKET if trace else _PLAIN_TICKET, hash_bytes, self.number,
            self.generation, self.token, self.sender_id, self.digest, round(self.lease_s * 1e3),
            self.num_pages, len(address), len(identity), len(engine), self.version,
            self.num_pulls, len(self.attachment),
        )  # fmt: skip
        if trace:
            head += bytes((len(trace),))
        hashes = b"".join(h.to_bytes(hash_bytes, "big") for h in self.hashes)
        body = b"".join((head, trace, address, identity, engine, hashes, self.attachment))
        return body + _ticket_mac(secret, body)

    @classmethod
    def decoded(cls, data: Any, secret: bytes) -> Ticket:
        """Decode a ticket; TransferError unless it is intact and made with the same secret."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"ticket: expected bytes, got {type(data).__name__}")
        whole = bytes(data[:MAX_TICKET_BYTES])
        body, mac = whole[:-32], whole[-32:]
        if len(data) > MAX_TICKET_BYTES or len(body) < _TICKET.size or body[:4] != _TICKET_MAGIC:
            raise TransferError("ticket: expected a ticket of PageSender.offer", "ticket")
        if body[4] not in (_PLAIN_TICKET, _TRACED_TICKET) or body[4] > VERSIONS[-1]:
            raise TransferError(
                f"ticket: expected version {_PLAIN_TICKET} to {VERSIONS[-1]}, got {body[4]}",
                "version",
            )
        if not hmac.compare_digest(mac, _ticket_mac(secret, body)):
            raise TransferError("ticket: damaged, or the sender has another secret", "secret")
        # From here on, the ticket is authentic.
        (_, layout, hash_bytes, number, generation, token, sender_id, digest, lease_ms, num_pages,
         address_bytes, identity_bytes, engine_bytes, version, num_pulls, attachment_bytes,
        ) = _TICKET.unpack_from(body)  # fmt: skip
        start, trace_bytes = _TICKET.size, 0
        if layout == _TRACED_TICKET:
            start, trace_bytes = start + 1, int.from_bytes(body[start : start + 1], "big")
        sizes = (
            trace_bytes, address_bytes, identity_bytes, engine_bytes, hash_bytes * num_pages,
            attachment_bytes,
        )  # fmt: skip
        if num_pages > MAX_PAGES or hash_bytes not in (0, 8, 16) or len(body) != start + sum(sizes):
            raise TransferError("ticket: inconsistent sizes", "ticket")
        parts = []
        for size in sizes:
            parts.append(body[start : start + size])
            start += size
        hashes = parts[4]
        try:
            trace_id = checked_trace_id(parts[0].decode())
            address, engine = parts[1].decode(), parts[3].decode()
            identity = _decoded(parts[2])
        except (ValueError, TypeError) as error:
            raise TransferError(f"ticket: {error}", "ticket") from error
        return cls(
            number, generation, token, sender_id, digest, lease_ms / 1e3, num_pages, num_pulls,
            address, engine, identity, version or 3,  # senders of version 3 write 0
            tuple(
                int.from_bytes(hashes[i : i + hash_bytes], "big")
                for i in range(0, len(hashes), hash_bytes or 1)
            ),
            parts[5], trace_id,
        )  # fmt: skip


# --- Checksums ------------------------------------------------------------------------------------


_ALGORITHMS = {1: xxhash.xxh3_64}
"""Checksums by number in a hello, preferred ones first. Number 2 was used by older versions."""
_SUPPORTED = sum(1 << number for number in _ALGORITHMS)
BEST_ALGORITHM = next(iter(_ALGORITHMS))


def new_checksum(algorithm: int, key: bytes, *names: int) -> Any:
    """Start a checksum that also covers a key and `names`, which identify the data."""
    checksum = _ALGORITHMS[algorithm]()
    checksum.update(key + struct.pack(f">{len(names)}Q", *names))
    return checksum


def offer_token(key: bytes, number: int) -> bytes:
    """Return the token of an offer, which proves its ticket. Only the sender knows `key`."""
    return hashlib.blake2b(
        number.to_bytes(8, "big"), key=key, digest_size=16, person=b"kvcupy offers"
    ).digest()


def offer_key(secret: bytes, token: bytes) -> bytes:
    """Return the key of the page checksums of an offer; holders of its ticket can derive it."""
    key = _ticket_key(secret)
    return hashlib.blake2b(token, key=key, digest_size=32, person=b"kvcupy pages").digest()


# --- Messages on a connection ---------------------------------------------------------------------


def _printable(text: str) -> str:
    """Return a printable copy of a peer's text, for logs and errors."""
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_REASON_CHARS])


class Lost(Exception):
    """The connection has ended, or the peer has violated the protocol.

    `reason` is the label under which senders count dropped connections.
    """

    def __init__(self, message: str, reason: str = "lost") -> None:
        super().__init__(message)
        self.reason = reason


class Channel:
    """A connection after its handshake: messages, and the bytes of pages.

    One thread uses it; any thread may call `abort`. Every call has a deadline, a value of
    `time.monotonic`, after which it raises TimeoutError.
    """

    def __init__(
        self, connection: socket.socket, send_key: bytes, receive_key: bytes, data_key: bytes,
        algorithm: int, peer: bytes,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.socket = connection
        self._keys = {True: send_key, False: receive_key}
        self._counts = {True: 0, False: 0}
        self._data_key = data_key
        self.algorithm = algorithm  # number of the checksum in `_ALGORITHMS`
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._timeout_s = 0.0  # current SO_RCVTIMEO and SO_SNDTIMEO
        self._unsent: list[memoryview] = []  # messages to send together with the next data
        self.num_bytes = 0  # page bytes sent and received
        self.confirming = False  # whether the sender has yet to send CONFIRMED
        self.moving = False  # whether the thread may block, so that ending the offer must abort it

    def __del__(self) -> None:
        self.socket.close()

    # --- Messages ---

    def send(self, kind: int, payload: bytes, deadline: float, *, more: bool = False) -> None:
        """Send a message; with `more`, buffer it until the next send."""
        self._unsent.append(self._message(kind, payload))
        if not more:
            self.flush(deadline)

    def flush(self, deadline: float) -> None:
        """Send buffered messages."""
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self._move(unsent, sum(map(len, unsent)), deadline, is_sent=True)

    def _message(self, kind: int, payload: bytes) -> memoryview:
        body = _HEAD.pack(kind, len(payload)) + payload.ljust(_MIN_PAYLOAD_BYTES, b"\0")
        return memoryview(body + self._mac(True, body))

    def receive(self, deadline: float, *kinds: int) -> tuple[int, bytes]:
        """Return kind and payload of the next message.

        Raises
        ------
        TransferError : the peer has refused; the error has the reason
        Lost : the message is of none of `kinds` or damaged, or the connection has ended
        """
        least = bytearray(MIN_MESSAGE_BYTES)
        self._move([memoryview(least)], MIN_MESSAGE_BYTES, deadline, is_sent=False)
        return self.received(least, deadline, *kinds)

    def received(self, first: bytearray, deadline: float, *kinds: int) -> tuple[int, bytes]:
        """Like `receive`, for a message whose first `MIN_MESSAGE_BYTES` have arrived."""
        kind, length = _HEAD.unpack_from(first)
        if length > MAX_MESSAGE_BYTES or kind not in NAMES:
            raise Lost("invalid message")
        if length > _MIN_PAYLOAD_BYTES:
            rest = bytearray(length - _MIN_PAYLOAD_BYTES)
            self._move([memoryview(rest)], len(rest), deadline, is_sent=False)
            first = first + rest
        body = bytes(first[:-_MAC_BYTES])
        if not hmac.compare_digest(first[-_MAC_BYTES:], self._mac(False, body)):
            raise Lost("message authentication failed")
        payload = body[_HEAD.size : _HEAD.size + length]
        if kind == REFUSED:
            reason, _, message = payload.decode("utf-8", "replace").partition("\n")
            raise TransferError(_printable(message), reason if reason in _REFUSALS else "lost")
        if kinds and kind not in kinds:
            expected = " or ".join(NAMES[k] for k in kinds)
            raise Lost(f"expected {expected}, got {NAMES[kind]}")
        return kind, payload

    def refuse(self, reason: str, message: str, deadline: float) -> None:
        """Send a REFUSED message with the reason."""
        self.send(REFUSED, f"{reason}\n{_printable(message)}".encode(), deadline)

    def readable(self, deadline_s: float) -> bool:
        """Wait for data or the end of the connection; return whether there is either."""
        if self._is_tls and self.socket.pending():  # type: ignore[attr-defined]
            return True
        return any_readable([self.socket], deadline_s)

    def has_ended(self) -> bool:
        """Return whether the peer has ended the connection, even if unread data is left."""
        poll = select.poll()
        try:
            poll.register(self.socket, getattr(select, "POLLRDHUP", 0))  # Linux only
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def _mac(self, is_sent: bool, body: bytes) -> bytes:
        number = self._counts[is_sent]
        self._counts[is_sent] = number + 1
        return hashlib.blake2b(
            number.to_bytes(8, "big") + body, key=self._keys[is_sent], digest_size=_MAC_BYTES
        ).digest()

    # --- Pages ---

    def checksum(self, *names: int) -> Any:
        """Start a checksum keyed to this connection; `names` identify the data."""
        return new_checksum(self.algorithm, self._data_key, *names)

    def send_data(
        self, views: list[memoryview], num_bytes: int, deadline: float,
        end: tuple[int, bytes] | None = None,
    ) -> None:  # fmt: skip
        """Send memory without copying it, after the buffered messages.

        `end` is kind and payload of a message to append to the last bytes.
        """
        total = num_bytes
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            total += sum(map(len, unsent))
            views = unsent + views
        if end is not None:
            message = self._message(*end)
            total += len(message)
            views = [*views, message]
        self._move(views, total, deadline, is_sent=True)
        self.num_bytes += num_bytes

    def receive_data(
        self, views: list[memoryview], num_bytes: int, deadline: float,
        end: bytearray | None = None,
    ) -> None:  # fmt: skip
        """Fill memory with received bytes, then `end` with the first bytes of a message."""
        if end is None:
            self._move(views, num_bytes, deadline, is_sent=False)
        else:
            self._move([*views, memoryview(end)], num_bytes + len(end), deadline, is_sent=False)
        self.num_bytes += num_bytes

    def _move(
        self, views: list[memoryview], num_bytes: int, deadline: float, *, is_sent: bool
    ) -> None:
        """Send or fill all of `views`, which have `num_bytes` in total."""
        connection = self.socket
        try:
            if not self._is_tls:
                move = connection.sendmsg if is_sent else self._fill
                self._move_all(views, num_bytes, move, deadline)
                return
            for rest in views:
                while rest.nbytes:
                    set_timeout(connection, deadline)
                    moved = connection.send(rest) if is_sent else connection.recv_into(rest)
                    rest = rest[_some(moved) :]
        except (OSError, ValueError) as error:
            ended = _ended(error)
            if is_sent and isinstance(ended, Lost):
                self._raise_refusal()
            raise ended from error

    def _raise_refusal(self) -> None:
        """Raise the TransferError of a received REFUSED message, if any."""
        with suppress(Lost, TimeoutError):
            while self.readable(0):
                self.receive(time.monotonic() + _REFUSAL_TIMEOUT_S)

    def _move_all(
        self, views: list[memoryview], left: int, move: Callable[[list[memoryview]], int],
        deadline: float,
    ) -> None:  # fmt: skip
        """Call `move` until it has moved all bytes of `views`."""
        rest = views
        while True:
            remaining_s = deadline - time.monotonic()
            if not 0 < self._timeout_s <= 1.05 * remaining_s:  # avoids most calls
                set_timeout(self.socket, deadline)
                self._timeout_s = remaining_s
            try:
                moved = move(rest if len(rest) <= _MAX_BUFFERS else rest[:_MAX_BUFFERS])
            except BlockingIOError:  # the timeout was set for an earlier deadline
                if time.monotonic() >= deadline:
                    raise
                self._timeout_s = 0.0
                continue
            left -= moved
            if left == 0:
                return
            first = 0
            while moved >= rest[first].nbytes:
                moved -= rest[first].nbytes
                first += 1
            rest = rest[first:]
            rest[0] = rest[0][moved:]

    def _fill(self, views: list[memoryview]) -> int:
        return _some(self.socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0])

    # --- Closing ---

    def abort(self) -> None:
        """Make a thread that waits for the peer fail at once. Any thread may call this."""
        abort(self.socket)

    def close(self) -> None:
        with suppress(OSError):
            self.socket.close()


def any_readable(sockets: Sequence[socket.socket], deadline_s: float) -> bool:
    """Wait until a socket has data or is closed; return whether one is."""
    poll = select.poll()
    try:
        if 0 < deadline_s < 1e-3 and max(each.fileno() for each in sockets) < 1024:
            return bool(select.select(sockets, (), (), deadline_s)[0])  # poll rounds up to ms
        for each in sockets:
            poll.register(each, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline_s) * 1e3))
    except (OSError, ValueError):
        return True


def set_timeout(connection: socket.socket, deadline: float) -> None:
    """Limit calls on a connection to a deadline; TimeoutError if it has passed.

    Socket options set the timeout, so that the socket stays blocking and one call can move all
    bytes.
    """
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("timed out")
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(remaining_s)
        return
    connection.settimeout(None)
    timeval = struct.pack("@ll", *divmod(int(remaining_s * 1e6) + 1, 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def encrypt(
    connection: socket.socket, tls: ssl.SSLContext, deadline: float,
    entered: Callable[[ssl.SSLSocket], None], **options: Any,
) -> ssl.SSLSocket:  # fmt: skip
    """Start TLS on a connection, which the returned socket replaces.

    Parameters
    ----------
    entered : called with the new socket before the handshake, so that other threads can abort it

    Raises
    ------
    Lost : the peer has ended the connection
    OSError : the handshake has failed, or the deadline has passed (TimeoutError)
    """
    encrypted = tls.wrap_socket(connection, do_handshake_on_connect=False, **options)
    try:
        entered(encrypted)
        # Not `set_timeout`: after a timeout of the socket option, Python would retry for ever.
        encrypted.settimeout(max(0.001, deadline - time.monotonic()))
        encrypted.do_handshake()
    except BaseException as error:
        encrypted.close()
        if isinstance(error, (ConnectionError, ssl.SSLEOFError)):
            raise Lost(f"the connection has ended: {error}") from error
        raise
    return encrypted


def abort(connection: socket.socket) -> None:
    """Reset a connection, so that threads that wait for the peer fail at once."""
    with suppress(OSError):  # a reset, since a peer blocked in a send may not notice a close
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    shut_down(connection)


def shut_down(connection: socket.socket) -> None:
    """Shut down a connection that another thread may be using.

    `SSLSocket.shutdown` first drops the encryption, and the other thread would continue in plain
    text.
    """
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receive `count` bytes; Lost or TimeoutError if they do not arrive."""
    data = bytearray(count)
    rest = memoryview(data)
    try:
        while rest.nbytes:
            set_timeout(connection, deadline)
            rest = rest[_some(connection.recv_into(rest)) :]
    except (OSError, ValueError) as error:
        raise _ended(error) from error
    return bytes(data)


def send_exactly(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Send all of `data`; Lost or TimeoutError if that fails."""
    try:
        set_timeout(connection, deadline)
        connection.sendall(data)
    except (OSError, ValueError) as error:
        raise _ended(error) from error


def _ended(error: OSError | ValueError) -> Lost | TimeoutError:
    """Return TimeoutError if a call has reached its deadline, else Lost."""
    if isinstance(error, (TimeoutError, BlockingIOError)) and error.errno != errno.ETIMEDOUT:
        return TimeoutError("timed out")
    return Lost(f"the connection has ended: {error}")


def _some(count: int) -> int:
    if count == 0:
        raise Lost("the connection has ended")
    return count


# --- The handshake --------------------------------------------------------------------------------

_CLIENT_HELLO = struct.Struct(">4sHBB32s16s")
_OFFER = struct.Struct(">Q")  # follows the receiver's hello from version 4 on
_SERVER_HELLO = struct.Struct(">4sHBB32s16s16s")
_MAGIC = b"KVPM"


def as_receiver(
    connection: socket.socket, secret: bytes, digest: bytes, ticket: Ticket | None, deadline: float
) -> tuple[Channel, bytes]:
    """Shake hands with a sender; return the channel, and the digest of the sender's pool.

    Without a ticket, as an operator: the keys are public unless there is a secret.

    Raises
    ------
    TransferError : the peer is not a sender, has another secret or version, or without a secret,
        has not made the ticket
    Lost, TimeoutError : the connection has ended, or the peer does not answer
    """
    number, token, newest = 0, b"", VERSIONS[-1]
    if ticket is not None:
        number, token, newest = ticket.number, ticket.token, ticket.version
    version = min(newest, VERSIONS[-1])
    if version not in VERSIONS:
        raise _other_version(newest)
    hello = _CLIENT_HELLO.pack(_MAGIC, version, bool(secret), _SUPPORTED, os.urandom(32), digest)
    key = secret
    if version > 3:
        hello += _OFFER.pack(number)
        key = secret or token
    send_exactly(connection, hello, deadline)
    answer = receive_exactly(connection, _SERVER_HELLO.size, deadline)
    magic, spoken, has_secret, algorithm, _, sender_id, its_digest = _SERVER_HELLO.unpack(answer)
    if magic != _MAGIC:
        raise TransferError("the peer is not a PageSender", "lost")
    too_old = TransferError("the sender's release does not answer operators", "version")
    if spoken != version:
        raise _other_version(spoken) if ticket is not None else too_old
    mac = receive_exactly(connection, 32, deadline)
    is_genuine = hmac.compare_digest(mac, _hmac(key, b"kvcupy sender", hello, answer))
    if has_secret != bool(secret) or (secret and not is_genuine):
        raise TransferError("secret: the sender has another secret, or none", "secret")
    if not is_genuine:
        gone = TransferError("the sender that made the ticket no longer listens", "lost")
        raise gone if ticket is not None else too_old
    if algorithm not in _ALGORITHMS:
        raise TransferError("the sender and this receiver have no checksum in common", "version")
    send_exactly(connection, _hmac(key, b"kvcupy receiver", hello, answer), deadline)
    to_sender, to_receiver, data = _session_keys(key, hello, answer)
    return Channel(connection, to_sender, to_receiver, data, algorithm, sender_id), its_digest


def _other_version(version: int) -> TransferError:
    own = f"{VERSIONS[0]} to {VERSIONS[-1]}"
    return TransferError(f"the sender has version {version}, this receiver {own}", "version")


def as_sender(
    connection: socket.socket, secret: bytes, digest: bytes, sender_id: bytes,
    token_of: Callable[[int], bytes], deadline: float,
) -> tuple[Channel, bytes]:  # fmt: skip
    """Shake hands with a receiver; return the channel, and the digest of the receiver's pool.

    Parameters
    ----------
    token_of : returns the token of an offer by its number

    Raises
    ------
    Lost, TimeoutError : the peer is not a receiver, has another secret or version, has no ticket
        and no secret, or does not answer
    """
    hello = receive_exactly(connection, _CLIENT_HELLO.size, deadline)
    magic, version, _, supported, _, its_digest = _CLIENT_HELLO.unpack(hello)
    if magic != _MAGIC:
        raise Lost("the peer is not a PageReceiver", "stranger")
    key, spoken = secret, version if version in VERSIONS else VERSIONS[-1]
    if version > 3:
        offer = receive_exactly(connection, _OFFER.size, deadline)
        (number,) = _OFFER.unpack(offer)
        hello, key = hello + offer, secret or (token_of(number) if number else b"")
    algorithm = next((n for n in _ALGORITHMS if supported >> n & 1), 0)
    answer = _SERVER_HELLO.pack(
        _MAGIC, spoken, bool(secret), algorithm, os.urandom(32), sender_id, digest
    )
    send_exactly(connection, answer + _hmac(key, b"kvcupy sender", hello, answer), deadline)
    if version != spoken:
        raise Lost(f"the receiver has version {version}", "version")
    proof = receive_exactly(connection, 32, deadline)
    if not hmac.compare_digest(proof, _hmac(key, b"kvcupy receiver", hello, answer)):
        raise Lost("the receiver has another secret, or no ticket", "secret")
    to_sender, to_receiver, data = _session_keys(key, hello, answer)
    return Channel(connection, to_receiver, to_sender, data, algorithm, b""), its_digest


def _session_keys(key: bytes, hello: bytes, answer: bytes) -> tuple[bytes, bytes, bytes]:
    to_sender = _hmac(key, b"kvcupy messages to the sender", hello, answer)
    to_receiver = _hmac(key, b"kvcupy messages to the receiver", hello, answer)
    return to_sender, to_receiver, _hmac(key, b"kvcupy data", hello, answer)
