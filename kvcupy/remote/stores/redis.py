"""Blocks in Redis or Valkey, by a client whose replies land in the pages themselves."""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ...errors import ProcessLocal, file_path
from ...ops import checks
from ..wire import WirePages
from .backend import FAILED, FULL, KNOWN, MAX_HEADER_BYTES, STORED, BackendLost, Block

Buffer = bytes | bytearray | memoryview

_LINE_BYTES = 4096  # a reply's line; Redis' own are shorter
_MAX_PIECES = 512  # memory areas of one call to the system, which takes 1024
_GETS_AHEAD = 2  # with more the server copies whole replies into a buffer of its own
_PUTS_AHEAD = 4
_BLOCKS_PER_GET = 4
_QUESTIONS_AHEAD = 1024
_MAX_RECONNECTS = 2  # of one call
_SCAN_COUNT = b"1000"
_KEYS_PER_REPLY, _KEY_BYTES = 1 << 14, 256  # at most; a server returns some more than asked for
_NO_REDIS = "it does not answer as a Redis server does"
_REFUSALS = (b"-NOAUTH", b"-NOPERM", b"-WRONGPASS")
_LENGTH = re.compile(rb"\d{1,18}")


class _NotABlock(Exception):
    """A key has a value that cannot be a block, and may be too long to be skipped."""


class _Nonsense(Exception):
    """A reply is not what was asked for."""


@dataclass(frozen=True)
class RedisAddress:
    """Where a server listens, and as whom to speak to it."""

    host: str
    port: int
    path: str = ""  # of a Unix socket, instead of host and port
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"


def open_backend(
    url: str, pages: WirePages, *, namespace: bytes, capacity_bytes: int | None, deadline: float,
    ttl_s: float | None = None, max_connections: int = 4, **options: Any,
) -> RedisBackend:  # fmt: skip
    """Return the blocks of a server that answers.

    Parameters
    ----------
    url, options : those of `redis_address`
    pages, deadline : as in `Backend`
    namespace, ttl_s, max_connections : as in `RedisBackend`
    capacity_bytes : None; how much the server keeps is its own setting, `maxmemory`

    Raises
    ------
    TypeError, ValueError, OSError : an argument does not fit
    BackendLost : there is no server, or it does not let this user in
    """
    if capacity_bytes is not None:
        raise ValueError("capacity_bytes: expected None, since the server's maxmemory decides")
    address = redis_address(url, **options)
    backend = RedisBackend(address, namespace, ttl_s=ttl_s, max_connections=max_connections)
    backend.connect(deadline)
    return backend


def redis_address(
    url: str, *, user: str = "", password: str = "", db: int | None = None, ca_file: Any = None,
    cert_file: Any = None, key_file: Any = None, verify: bool = True,
) -> RedisAddress:  # fmt: skip
    """Return the address that a URL names.

    Parameters
    ----------
    url : "redis://[user:password@]host[:port][/db]", "rediss://" for TLS, or "unix:PATH". What is
        special in a URL is percent-encoded, such as %40 for @ in a password
    user, password, db : as in the URL, which must not name them then
    ca_file : certificates to trust in place of the system's, PEM
    cert_file, key_file : the client's own certificate and key, for servers that ask for one
    verify : False: any certificate is accepted, and whoever can redirect packets reads every block

    Raises
    ------
    TypeError, ValueError : an argument does not fit; no message has a password
    OSError : a file cannot be read

    Examples
    --------
    >>> redis_address("redis://:secret@cache.local/2")
    RedisAddress(host='cache.local', port=6379, path='', db=2, user='', tls=None)
    """
    for name, text in (("url", url), ("user", user), ("password", password)):
        if not isinstance(text, str):
            raise TypeError(f"{name}: expected a str, got {type(text).__name__}")
    if not isinstance(verify, bool):
        raise TypeError(f"verify: expected True or False, got {verify!r}")
    host, port, path, secure = "", 0, "", False
    if url.startswith("unix:"):
        path = str(file_path(url.removeprefix("unix:"), "url"))
        if path in ("", "."):
            raise ValueError("url: expected unix:PATH, got no path")
    else:
        host, port, secure, in_url = _server(url)
        for name, other in in_url.items():
            if other and {"user": user, "password": password, "db": db is not None}[name]:
                raise ValueError(f"{name}: expected it in the url or as an argument, got both")
        user, password = user or in_url["user"], password or in_url["password"]
        db = int(in_url["db"]) if in_url["db"] else db
    if not secure and (ca_file or cert_file or key_file or not verify):
        raise ValueError("url: expected rediss:// with options of TLS")
    if isinstance(db, bool) or not isinstance(db, int | None) or (db or 0) < 0:
        raise ValueError(f"db: expected the number of a database, got {db!r}")
    if user and not password:
        raise ValueError("password: expected one for the user")
    for name, text in (("user", user), ("password", password)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: expected text that UTF-8 can encode") from None
    tls = _tls(ca_file, cert_file, key_file, verify) if secure else None
    return RedisAddress(host, port, path, db or 0, user, password, tls)


def _server(url: str) -> tuple[str, int, bool, dict[str, str]]:
    """Return host, port, whether by TLS, and the user, password and database of a URL."""
    form = "redis://[user:password@]host[:port][/db]"
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:  # also of a name that no host can have
        raise ValueError(f"url: expected {form}") from None
    db = parts.path.removeprefix("/")
    known = parts.scheme in ("redis", "rediss") and parts.hostname and (not db or db.isdecimal())
    if not known or parts.query or parts.fragment:
        raise ValueError(f"url: expected {form}, rediss:// or unix:PATH")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    in_url = {"user": user, "password": password, "db": db}
    return parts.hostname or "", port or 6379, parts.scheme == "rediss", in_url


def _tls(ca_file: Any, cert_file: Any, key_file: Any, verify: bool) -> ssl.SSLContext:
    trusted = None if ca_file is None else str(_existing(ca_file, "ca_file"))
    context = ssl.create_default_context(cafile=trusted)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert_file is not None:
        key = None if key_file is None else _existing(key_file, "key_file")
        context.load_cert_chain(_existing(cert_file, "cert_file"), key)
    elif key_file is not None:
        raise ValueError("key_file: expected cert_file beside it")
    return context


def _existing(value: Any, name: str) -> Path:
    path = file_path(value, name)
    if not path.is_file():
        raise FileNotFoundError(f"{name}: there is no file {str(path)!r}")
    return path


class RedisBackend(ProcessLocal):
    """Blocks as values of a Redis or Valkey server: a header, then the payload.

    Each call takes a connection of its own from a pool, so that threads do not wait for one
    another. A connection is closed when a reply is late or is not what was asked for: nothing can
    land in pages after a call has returned. After a fork each process opens its own.

    Parameters
    ----------
    address : of `redis_address`
    namespace : bytes that begin each key in hexadecimal, so that `remove` finds them
    ttl_s : seconds after which the server forgets a block; None: when it evicts it
    max_connections : of this process; a call waits for one until its deadline

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Commands: AUTH, SELECT, PING, EXISTS, GET, SET with NX, SCAN and UNLINK, on keys that match
    "kvcupy:*". Looking up a host's address is left to the system, and takes as long as that takes.
    Bytes: a block crosses the socket once each way, without a copy in this process except under
    TLS.
    Source: Redis serialization protocol 2, redis.io/docs/latest/develop/reference/protocol-spec.

    Examples
    --------
    >>> RedisBackend(redis_address("redis://localhost"), b"tenant").stats()["connections"]
    0
    """

    blocks_per_get = _BLOCKS_PER_GET
    put_asks_first = False

    def __init__(
        self, address: RedisAddress, namespace: bytes, *, ttl_s: float | None = None,
        max_connections: int = 4,
    ) -> None:  # fmt: skip
        if ttl_s is not None:
            checks.require_number(ttl_s, "ttl_s")
            if not 0.001 <= ttl_s < 1e12:
                raise ValueError(f"ttl_s: expected seconds, at least 0.001, got {ttl_s!r}")
        checks.require_int(max_connections, "max_connections")
        if max_connections < 1:
            raise ValueError(f"max_connections: expected at least 1, got {max_connections}")
        self._address = address
        self._prefix = b"kvcupy:" + namespace.hex().encode() + b":"
        expiry = b"" if ttl_s is None else _bulk(b"PX") + _bulk(b"%d" % (ttl_s * 1000))
        self._after_value = b"\r\n" + _bulk(b"NX") + expiry
        self._set_words = 4 if ttl_s is None else 6
        self._connections = _Pool(address, max_connections)

    def __repr__(self) -> str:
        return f"<RedisBackend of {self._address}>"

    def connect(self, deadline: float) -> None:
        """Ask the server whether it is there, and lets this user in.

        Raises
        ------
        BackendLost : it is not there, or does not; `refused` says that it is the latter
        """
        if self._ask(deadline, b"PING") != b"PONG":
            raise BackendLost(f"redis {self._address}: {_NO_REDIS}")

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        known = [False] * len(keys)

        def receive(connection: _Connection, i: int) -> None:
            line = connection.reply(deadline)
            if line not in (b":0", b":1"):
                raise _Nonsense
            known[i] = line == b":1"

        def request(i: int) -> list[Buffer]:
            return [_command(b"EXISTS", self._key(keys[i]))]

        self._run(known, _QUESTIONS_AHEAD, request, receive, deadline)
        return known

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], headers: Sequence[bytes],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        outcomes = [FAILED] * len(keys)

        def request(i: int) -> list[Buffer]:
            header = headers[i]
            num_bytes = len(header) + sum(piece.nbytes for piece in blocks[i])
            words = b"*%d\r\n" % self._set_words + _bulk(b"SET") + _bulk(self._key(keys[i]))
            return [words + b"$%d\r\n" % num_bytes + header, *blocks[i], self._after_value]

        def receive(connection: _Connection, i: int) -> None:
            line = connection.reply(deadline)
            if line.startswith(b"-OOM"):
                outcomes[i:] = [FULL] * (len(keys) - i)
                raise _Full
            if line not in (b"+OK", b"$-1"):
                raise _Nonsense
            outcomes[i] = STORED if line == b"+OK" else KNOWN

        self._run(outcomes, _PUTS_AHEAD, request, receive, deadline)
        return outcomes

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[bytes | None]:
        headers: list[bytes | None] = [None] * len(keys)

        def request(i: int) -> list[Buffer]:
            return [_command(b"GET", self._key(keys[i]))]

        def receive(connection: _Connection, i: int) -> None:
            headers[i] = connection.value(blocks[i], deadline)

        self._run(headers, _GETS_AHEAD, request, receive, deadline)
        return headers

    def busy(self, keys: Sequence[bytes]) -> None:
        """Return None: what a call has received, it has received when it returns."""

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        self._ask(deadline, b"UNLINK", *map(self._key, keys))

    def remove(self, deadline: float) -> int:
        """Remove the blocks of this namespace, a batch at a time; return how many there were."""
        removed, cursor = 0, b"0"
        while True:
            mine = self._prefix + b"*"
            listed = self._ask(deadline, b"SCAN", cursor, b"MATCH", mine, b"COUNT", _SCAN_COUNT)
            cursor, keys = _page_of_keys(listed)
            if keys is None:
                raise BackendLost(f"redis {self._address}: {_NO_REDIS}")
            if keys:
                count = self._ask(deadline, b"UNLINK", *keys)
                removed += count if isinstance(count, int) else 0
            if cursor == b"0":
                return removed

    def stats(self) -> dict[str, int]:
        """Return connections that are open, how often one was opened, and what went wrong."""
        return self._pool.stats()

    def close(self) -> None:
        """Close all connections; calls in flight fail."""
        self._pool.close()

    @property
    def _pool(self) -> _Pool:
        if self._connections.pid != os.getpid():
            self._connections = self._connections.in_child()
        return self._connections

    def _key(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _ask(self, deadline: float, *words: bytes) -> Any:
        answers: list[Any] = [None]

        def receive(connection: _Connection, i: int) -> None:
            answers[i] = connection.structure(deadline)

        self._run(answers, 1, lambda i: [_command(*words)], receive, deadline)
        return answers[0]

    def _run(
        self, results: list[Any], ahead: int, request: Callable[[int], list[Buffer]],
        receive: Callable[[_Connection, int], None], deadline: float,
    ) -> None:  # fmt: skip
        """Send one request for each of the results and receive the replies, some requests behind.

        A value that is no block leaves its result as it was, and costs the connection: the rest is
        asked for on another. `BackendLost` has the results so far.
        """
        pool = self._pool
        done = 0  # results that are settled
        for attempt in range(1 + _MAX_RECONNECTS):
            connection: _Connection | None = None
            sent = done
            try:
                connection = pool.take(deadline)
                while done < len(results):
                    while sent < len(results) and sent < done + ahead:
                        connection.send(request(sent), deadline)
                        sent += 1
                    receive(connection, done)
                    done += 1
                pool.give_back(connection)
                return
            except _Full:  # what has been sent is answered alike; nothing more is sent
                assert connection is not None
                pool.discard(connection, "")
                return
            except _NotABlock:
                assert connection is not None
                pool.discard(connection, "wrong_replies")
                done += 1
                if done == len(results):
                    return
                failure: Exception = BackendLost("it has values that are no blocks")
            except (OSError, BackendLost, _Nonsense) as error:
                pool.discard(connection, _reason(error))
                failure = error
                # A server that was restarted has closed the connections to the one before.
                reused = connection is not None and connection.calls > 0
                if not (reused and isinstance(error, ConnectionError) and attempt == 0):
                    break
            except BaseException:  # such as KeyboardInterrupt: replies are still on their way
                pool.discard(connection, "errors")
                raise
        reason = str(failure)
        if isinstance(failure, TimeoutError):
            reason = "it did not answer in time"
        elif isinstance(failure, _Nonsense):
            reason = _NO_REDIS
        refused = isinstance(failure, ssl.SSLCertVerificationError) or (
            isinstance(failure, BackendLost) and failure.refused
        )
        raise BackendLost(f"redis {self._address}: {reason}", results, refused=refused) from failure


class _Full(Exception):
    """The server has no room for what was sent, nor for what would follow."""


class _Pool:
    """The connections of one process."""

    def __init__(self, address: RedisAddress, max_connections: int) -> None:
        self._address = address
        self._max = max_connections
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening = 0
        self._counts = {"opened": 0, "timeouts": 0, "wrong_replies": 0, "errors": 0}
        self._closed = False
        self.pid = os.getpid()
        self._changed = threading.Condition()

    def take(self, deadline: float) -> _Connection:
        """Return an idle connection, or a new one, before the deadline."""
        while True:
            with self._changed:
                while not self._closed and not self._idle and self._num_open() >= self._max:
                    self._changed.wait(_remaining(deadline))
                if self._closed:
                    raise BackendLost("the store is closed")
                connection = self._idle.pop() if self._idle else None
                self._opening += connection is None
            if connection is None:
                return self._open(deadline)
            if connection.is_quiet():
                return connection
            self.discard(connection, "")

    def give_back(self, connection: _Connection) -> None:
        connection.calls += 1
        with self._changed:
            if not self._closed and connection.has_no_rest():
                self._idle.append(connection)
                self._changed.notify()
                return
        self.discard(connection, "")

    def discard(self, connection: _Connection | None, reason: str) -> None:
        """Close a connection, and count why."""
        if connection is not None:
            connection.close()
        with self._changed:
            if connection is not None:
                self._all.discard(connection)
            if reason:
                self._counts[reason] += 1
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for connection in self._all:
                connection.interrupt()
            for connection in self._idle:
                connection.close()
                self._all.discard(connection)
            self._idle.clear()
            self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {"connections": len(self._all), **self._counts}

    def _num_open(self) -> int:
        return len(self._all) + self._opening

    def _open(self, deadline: float) -> _Connection:
        connection = None
        try:
            connection = _Connection(self._address, deadline)
            connection.introduce(self._address, deadline)
        except BaseException:
            if connection is not None:
                connection.close()
            with self._changed:
                self._opening -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._opening -= 1
            self._counts["opened"] += 1
            self._all.add(connection)
            closed = self._closed
        if closed:
            self.discard(connection, "")
            raise BackendLost("the store is closed")
        return connection

    def in_child(self) -> _Pool:
        """Return the pool of a child process, and close what it inherited.

        A lock of this one may be held by a thread that does not exist there.
        """
        for connection in list(self._all):
            connection.close()  # the child's descriptor only
        pool = _Pool(self._address, self._max)
        pool._closed = self._closed
        return pool


class _Connection:
    """A connection to a server, and what of its replies has been received."""

    def __init__(self, address: RedisAddress, deadline: float) -> None:
        self.calls = 0
        self._buffer = bytearray(_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what is in the buffer
        self._socket: socket.socket
        if address.path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._connect_unix(address.path, deadline)
            return
        self._socket = socket.create_connection(
            (address.host, address.port), timeout=_remaining(deadline)
        )
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if address.tls is not None:
                self._socket.settimeout(_remaining(deadline))
                self._socket = address.tls.wrap_socket(self._socket, server_hostname=address.host)
        except BaseException:
            self._socket.close()
            raise

    def _connect_unix(self, path: str, deadline: float) -> None:
        try:
            self._socket.settimeout(_remaining(deadline))
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise

    def introduce(self, address: RedisAddress, deadline: float) -> None:
        """Give user and password, and choose the database."""
        if address.password:
            names = [address.user] if address.user else []
            words = [text.encode() for text in (*names, address.password)]
            self._expect_ok(deadline, "it does not accept user and password", b"AUTH", *words)
        if address.db:
            number = b"%d" % address.db
            self._expect_ok(deadline, f"it has no database {address.db}", b"SELECT", number)

    def _expect_ok(self, deadline: float, complaint: str, *words: bytes) -> None:
        self.send([_command(*words)], deadline)
        try:
            line = self.reply(deadline)
        except BackendLost as error:
            raise BackendLost(f"{complaint}: {error}", refused=True) from None
        if line != b"+OK":
            raise _Nonsense

    def close(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        """Let a thread that waits for the server go on, with an error."""
        with suppress(OSError):  # it is closed already
            # Not the method of an SSLSocket: it would let that thread go on without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def is_quiet(self) -> bool:
        """Return whether the server has neither closed it nor said what nobody asked for."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def has_no_rest(self) -> bool:
        return self._start == self._end

    # --- Sending ---

    def send(self, pieces: list[Buffer], deadline: float) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            for piece in pieces:
                self._socket.settimeout(_remaining(deadline))
                self._socket.sendall(piece)
            return
        rest = _as_bytes(pieces)
        while rest:
            self._socket.settimeout(_remaining(deadline))
            rest = _after(rest, self._socket.sendmsg(rest[:_MAX_PIECES]))

    # --- Receiving ---

    def reply(self, deadline: float) -> bytes:
        """Return a reply of one line; `BackendLost` if it is an error of the whole server's."""
        line = self._line(deadline)
        if line.startswith(b"-") and not line.startswith((b"-OOM", b"-WRONGTYPE")):
            text = line[1:201].decode(errors="backslashreplace")
            raise BackendLost(f"it says {text!r}", refused=line.startswith(_REFUSALS))
        return line

    def value(self, pieces: Sequence[memoryview], deadline: float) -> bytes | None:
        """Receive the value of a key: its payload into the pieces; return the header before it.

        None if there is no such key. `_NotABlock`, with nothing written, if it has another size.
        """
        line = self.reply(deadline)
        if line == b"$-1":
            return None
        if line.startswith(b"-WRONGTYPE"):
            raise _NotABlock
        if not (line.startswith(b"$") and _LENGTH.fullmatch(line[1:])):
            raise _Nonsense
        payload = _as_bytes(pieces)
        header_bytes = int(line[1:]) - sum(len(piece) for piece in payload)
        if not 0 <= header_bytes <= MAX_HEADER_BYTES:
            raise _NotABlock
        header, end = bytearray(header_bytes), bytearray(2)
        self._receive([memoryview(header), *payload, memoryview(end)], deadline)
        if end != b"\r\n":
            raise _Nonsense
        return bytes(header)

    def structure(self, deadline: float, depth: int = 0) -> Any:
        """Receive a reply of keys and numbers: int, bytes, None, or a list, in a list at most."""
        line = self.reply(deadline)
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if line in (b"$-1", b"*-1"):
            return None
        if not _LENGTH.fullmatch(text):
            raise _Nonsense
        number = int(text)
        if kind == b":":
            return number
        if kind == b"$" and number <= _KEY_BYTES:
            data = bytearray(number + 2)
            self._receive([memoryview(data)], deadline)
            return bytes(data[:-2])
        if kind == b"*" and depth < 2 and number <= _KEYS_PER_REPLY:
            return [self.structure(deadline, depth + 1) for _ in range(number)]
        raise _Nonsense

    def _line(self, deadline: float) -> bytes:
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line
            if self._start:
                kept = self._buffer[self._start : self._end]
                self._buffer[: len(kept)] = kept
                self._start, self._end = 0, len(kept)
            if self._end == len(self._buffer):
                raise _Nonsense
            self._socket.settimeout(_remaining(deadline))
            count = self._socket.recv_into(self._view[self._end :])
            if count == 0:
                raise ConnectionResetError("it closed the connection")
            self._end += count

    def _receive(self, pieces: list[memoryview], deadline: float) -> None:
        """Fill memory with what comes next."""
        pieces = [piece for piece in pieces if len(piece)]
        while pieces and self._start < self._end:
            count = min(self._end - self._start, len(pieces[0]))
            pieces[0][:count] = self._view[self._start : self._start + count]
            self._start += count
            pieces = _after(pieces, count)
        while pieces:
            self._socket.settimeout(_remaining(deadline))
            if isinstance(self._socket, ssl.SSLSocket):
                count = self._socket.recv_into(pieces[0])
            else:
                count = self._socket.recvmsg_into(pieces[:_MAX_PIECES])[0]
            if count == 0:
                raise ConnectionResetError("it closed the connection")
            pieces = _after(pieces, count)


def _reason(error: Exception) -> str:
    """Return what `stats` counts an error as."""
    if isinstance(error, TimeoutError):
        return "timeouts"
    return "wrong_replies" if isinstance(error, _Nonsense) else "errors"


def _page_of_keys(listed: Any) -> tuple[bytes, list[bytes] | None]:
    """Return the cursor and keys of an answer to SCAN; None if it is none."""
    if isinstance(listed, list) and len(listed) == 2:
        cursor, keys = listed
        are_bytes = isinstance(keys, list) and all(isinstance(key, bytes) for key in keys)
        if isinstance(cursor, bytes) and are_bytes:
            return cursor, keys
    return b"", None


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the deadline has passed")
    return remaining


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def _as_bytes(pieces: Iterable[Buffer]) -> list[memoryview]:
    return [memoryview(piece).cast("B") for piece in pieces if len(piece)]


def _after(pieces: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of memory areas after some bytes of them."""
    for i, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[i + 1 :]]
        count -= len(piece)
    return []
