"""Blocks in Redis or Valkey, by redis-py: one server, a cluster, or a master behind sentinels."""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import ProcessLocal
from ...extras import install
from ...ops import checks
from ..wire import WirePages
from .backend import FAILED, FULL, KNOWN, MAX_HEADER_BYTES, STORED, BackendLost, Block

try:
    from redis import Redis, RedisCluster, exceptions
    from redis.backoff import NoBackoff
    from redis.connection import (
        Connection,
        ConnectionPool,
        SSLConnection,
        UnixDomainSocketConnection,
        parse_url,
    )
    from redis.retry import Retry
    from redis.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
except ImportError as error:
    raise ImportError(f"url: Redis needs redis-py, {install('redis')}: {error}") from error

_TRIP_BYTES = 4 << 20  # of blocks that share a round trip
_SPARE_REPLY_BYTES = 64 << 20  # that one call may receive beyond the blocks that it asks for
_KEYS_PER_SCAN = 1000
_LATE = "it did not answer in time"
_NO_REDIS = "it does not answer as a Redis server does"
_SENTINEL_PORT, _SENTINEL_TIMEOUT_S = 26379, 1.0
_URL_FORM = "redis://[user:password@]host[:port][/db]"
_SENTINEL_FORM = "redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]"
_REFUSALS = (
    exceptions.AuthenticationError, exceptions.NoPermissionError, ssl.SSLCertVerificationError,
)  # fmt: skip
_FAILURES = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
# Errors of redis-py's parsers over replies that no Redis server sends.
_NONSENSE = (exceptions.InvalidResponse, ValueError, ArithmeticError, RecursionError)


def open_backend(
    url: str, pages: WirePages, *, namespace: bytes, capacity_bytes: int | None, deadline: float,
    ttl_s: float | None = None, max_connections: int = 4, **options: Any,
) -> RedisBackend:  # fmt: skip
    """Return the blocks of a server that answers.

    Parameters
    ----------
    url : as redis-py spells it: "redis://[user:password@]host[:port][/db]", "rediss://..." for TLS,
        or "unix:///path"; "redis+cluster://..." and "rediss+cluster://..." name any node of a
        cluster, "redis+sentinel://[user:password@]host:port[,host:port...]/service[/db]" and
        "rediss+sentinel://..." sentinels and the service whose master they know. Special characters
        are percent-encoded, such as %40 for @ in a password
    pages, deadline : as in `Backend`
    namespace, ttl_s, max_connections : as in `RedisBackend`
    capacity_bytes : None; how much the server keeps is its own setting, `maxmemory`
    options : of redis-py's connections, such as `username`, `password`, `db`, `ssl_ca_certs`,
        `ssl_certfile`, `ssl_keyfile` and `ssl_cert_reqs`; `sentinel_kwargs`, a dict, has the
        options of connections to sentinels

    Raises
    ------
    TypeError, ValueError, OSError : an argument does not fit; no message has a password
    BackendLost : there is no server, or it does not let this user in
    """
    if capacity_bytes is not None:
        raise ValueError("capacity_bytes: expected None, since the server's maxmemory decides")
    connect = _connector(url, options)
    address = url.partition("://")[2].rpartition("@")[2].partition("?")[0]
    with _call(f"redis {address}", deadline):
        client = connect()
    backend = RedisBackend(
        client, namespace, address=address, ttl_s=ttl_s, max_connections=max_connections
    )
    backend.connect(deadline)
    return backend


def _connector(url: str, options: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes redis-py's client of a URL; that of a cluster asks a node."""
    scheme, _, rest = url.partition("://")
    scheme, _, kind = scheme.partition("+")
    secure = scheme == "rediss"
    url = f"{'redis' if secure else scheme}://{rest}"
    # Version 2 of the protocol needs no right to the command HELLO.
    options = {"protocol": 2, "retry": Retry(NoBackoff(), 1), **options}
    try:
        if kind == "sentinel":
            sentinel_class = _TlsSentinelConnection if secure else _SentinelConnection
            return _sentinel_connector(url, {**options, "connection_class": sentinel_class})
        parse_url(url)
    except ValueError:  # its message may have parts of a password
        form = _SENTINEL_FORM if kind == "sentinel" else _URL_FORM
        raise ValueError(f"url: expected {form} or unix:///path") from None
    if kind == "cluster":
        node_class: Any = _TlsConnection if secure else _TcpConnection
        return lambda: RedisCluster(url=url, connection_class=node_class, **options)
    server_class: Any = _TlsConnection if secure else _TcpConnection
    pool = ConnectionPool.from_url(
        url, connection_class=_UnixConnection if scheme == "unix" else server_class, **options
    )
    return lambda: Redis.from_pool(pool)


def _sentinel_connector(url: str, options: dict[str, Any]) -> Callable[[], Any]:
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
    if not service:
        raise ValueError
    sentinels = [(node.hostname, node.port or _SENTINEL_PORT) for node in nodes]
    in_url = parse_url(f"redis://{credentials}{at}/{db}?{parts.query}")
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), _SENTINEL_TIMEOUT_S)
    sentinel = Sentinel(
        sentinels, sentinel_kwargs={**timeouts, **options.pop("sentinel_kwargs", {})}
    )
    return lambda: sentinel.master_for(service, **{**options, **in_url})


class RedisBackend(ProcessLocal):
    """Blocks as values of Redis or Valkey: a header, then the payload.

    Calls of several threads run beside each other, each with a connection of its own.

    Parameters
    ----------
    client : a Redis or RedisCluster of redis-py
    namespace : bytes that begin each key in hexadecimal, so that `remove` finds them
    address : of the server, for error messages
    ttl_s : seconds after which the server forgets a block; None: when it evicts it
    max_connections : to each server; a call waits for one until its deadline

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Commands: AUTH, SELECT, PING, EXISTS, GET, SET with NX, SCAN and UNLINK, on keys that match
    "kvcupy:*"; with a cluster CLUSTER and COMMAND too. Looking up a host's address is left to the
    system, and takes as long as that takes.
    Bytes: sent from pages without a copy in this process except under TLS; received into memory of
    redis-py, and copied from there to pages when a reply is complete.
    """

    blocks_per_get = 4
    put_asks_first = False

    def __init__(
        self, client: Any, namespace: bytes, *, address: str = "", ttl_s: float | None = None,
        max_connections: int = 4,
    ) -> None:  # fmt: skip
        if ttl_s is not None:
            checks.require_number(ttl_s, "ttl_s")
            if not 0.001 <= ttl_s < 1e12:
                raise ValueError(f"ttl_s: expected seconds, at least 0.001, got {ttl_s!r}")
        checks.require_int(max_connections, "max_connections")
        if max_connections < 1:
            raise ValueError(f"max_connections: expected at least 1, got {max_connections}")
        self._client, self._address = client, address
        self._prefix = b"kvcupy:" + namespace.hex().encode() + b":"
        expiry = () if ttl_s is None else (b"PX", b"%d" % (ttl_s * 1000))
        self._after_value = (b"NX", *expiry)
        self._connections = threading.BoundedSemaphore(max_connections)
        self._counts: Counter[str] = Counter(timeouts=0, wrong_replies=0, errors=0)

    def __repr__(self) -> str:
        return f"<RedisBackend of {self._address}>"

    def connect(self, deadline: float) -> None:
        """Ask the server whether it is there, and lets this user in.

        Raises
        ------
        BackendLost : it is not there, or does not; `refused` says that it is the latter
        """
        if self._run([("PING",)], deadline) != [True]:
            raise BackendLost(f"redis {self._address}: {_NO_REDIS}")

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        commands = [("EXISTS", self._key(key)) for key in keys]
        return [count == 1 for count in self._run(commands, deadline)]

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], headers: Sequence[bytes],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        outcomes: list[str] = []
        for trip in _trips(blocks):
            # A header is calculated just before its block is sent.
            commands = [
                ("SET", self._key(keys[i]), [headers[i], *blocks[i]], *self._after_value)
                for i in trip
            ]
            outcomes += map(self._outcome, self._run(commands, deadline))
        return outcomes

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[bytes | None]:
        headers: list[bytes | None] = []
        for trip in _trips(blocks):
            commands = [("GET", self._key(keys[i])) for i in trip]
            values = self._run(commands, deadline, sum(_num_bytes(blocks[i]) for i in trip))
            headers += [self._fill(blocks[i], value) for i, value in zip(trip, values, strict=True)]
        return headers

    def busy(self, keys: Sequence[bytes]) -> None:
        """Return None: what a call has received, it has received when it returns."""

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        self._run([("UNLINK", self._key(key)) for key in keys], deadline)

    def remove(self, deadline: float) -> int:
        """Remove the blocks of this namespace, a batch at a time; return how many there were."""
        removed = 0
        with self._calling(deadline):
            keys = self._client.scan_iter(match=self._prefix + b"*", count=_KEYS_PER_SCAN)
            try:
                while batch := list(itertools.islice(keys, _KEYS_PER_SCAN)):
                    removed += sum(self._execute([("UNLINK", key) for key in batch]))
            except TypeError as error:  # a reply is of another type
                raise BackendLost(f"redis {self._address}: {_NO_REDIS}") from error
        return removed

    def stats(self) -> dict[str, int]:
        """Return how many calls were late or failed, and how many values were no blocks."""
        return dict(self._counts)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _key(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _outcome(self, reply: Any) -> str:
        """Return the outcome of a SET with NX."""
        if isinstance(reply, exceptions.OutOfMemoryError):
            return FULL
        return STORED if reply is True else KNOWN if reply is None else FAILED

    def _fill(self, block: Block, value: Any) -> bytes | None:
        """Copy the payload of a value to a block, and return the header before it.

        None, with nothing written, if there is no value or it is of another length.
        """
        if value is None:
            return None
        start = len(value) - _num_bytes(block) if isinstance(value, bytes) else -1
        if not 0 <= start <= MAX_HEADER_BYTES:
            self._counts["wrong_replies"] += 1
            return None
        header, payload = bytes(value[:start]), memoryview(value)
        for piece in block:
            piece[:] = payload[start : start + len(piece)]
            start += len(piece)
        return header

    def _run(self, commands: list[tuple[Any, ...]], deadline: float, num_bytes: int = 0) -> Any:
        """Return the replies to commands that are sent together, errors of single ones among them.

        `num_bytes` are those of the blocks that the replies have.
        """
        if not commands:
            return []
        with self._calling(deadline, num_bytes):
            return self._execute(commands)

    def _execute(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not _concerns_one_key(reply):
                if isinstance(reply, exceptions.MovedError) or str(reply).startswith("MOVED "):
                    raise BackendLost(
                        f"redis {self._address}: it is of a cluster, redis+cluster://..."
                    )
                raise reply
        return replies

    @contextmanager
    def _calling(self, deadline: float, num_bytes: int = 0) -> Iterator[None]:
        """Take a connection's place, and count what goes wrong."""
        name = f"redis {self._address}"
        if not self._connections.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BackendLost(f"{name}: {_LATE}")
        try:
            with _call(name, deadline, num_bytes):
                yield
        except BackendLost as error:
            late = isinstance(error.__cause__, TimeoutError | exceptions.TimeoutError)
            self._counts["timeouts" if late else "errors"] += 1
            raise
        finally:
            self._connections.release()


def _num_bytes(block: Block) -> int:
    return sum(piece.nbytes for piece in block)


def _trips(blocks: Sequence[Block]) -> Iterator[range]:
    """Divide the numbers of blocks, all as long as the first, among round trips."""
    count = max(1, _TRIP_BYTES // max(1, _num_bytes(blocks[0]))) if blocks else 1
    for start in range(0, len(blocks), count):
        yield range(start, min(start + count, len(blocks)))


def _concerns_one_key(error: Exception) -> bool:
    """Return whether other commands may have succeeded: no room for a value, or no string."""
    return isinstance(error, exceptions.OutOfMemoryError) or "WRONGTYPE" in str(error)


# --- Connections of redis-py that keep the deadline of a call ---


@dataclass
class _Limits:
    deadline: float  # of time.monotonic
    num_bytes: float  # that may still be received

    def remaining(self) -> float:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        return remaining


_limits: ContextVar[_Limits] = ContextVar("_limits")


@contextmanager
def _call(name: str, deadline: float, num_bytes: int = 0) -> Iterator[None]:
    """Limit what redis-py does in this thread, and raise its errors as `BackendLost`."""
    token = _limits.set(_Limits(deadline, num_bytes + _SPARE_REPLY_BYTES))
    try:
        yield
    except (TimeoutError, exceptions.TimeoutError) as error:
        raise BackendLost(f"{name}: {_LATE}") from error
    except _NONSENSE as error:
        raise BackendLost(f"{name}: {_NO_REDIS}") from error
    except _FAILURES as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _REFUSALS):
            cause = cause.__cause__ or cause.__context__
        raise BackendLost(f"{name}: {cause or error}", refused=cause is not None) from error
    finally:
        _limits.reset(token)


class _Socket:
    """A socket whose calls end at the deadline, not each after a timeout."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._blocks = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settimeout(self, seconds: float | None) -> None:
        self._blocks = seconds != 0
        self._inner.settimeout(seconds)

    def sendall(self, data: Any) -> None:
        self._inner.settimeout(_limits.get().remaining())
        self._inner.sendall(data)

    def recv(self, *arguments: int) -> bytes:
        limits = self._prepare()
        data: bytes = self._inner.recv(*arguments)
        limits.num_bytes -= len(data)
        return data

    def recv_into(self, buffer: Any) -> int:
        limits = self._prepare()
        count: int = self._inner.recv_into(buffer)
        limits.num_bytes -= count
        return count

    def _prepare(self) -> _Limits:
        limits = _limits.get()
        if limits.num_bytes < 0:
            raise OSError("it sends more than it was asked for")
        if self._blocks:
            self._inner.settimeout(limits.remaining())
        return limits


class _Packer:
    """Writes commands with values in several pieces of memory, which are sent from there."""

    def pack(self, *words: Any) -> list[Any]:
        words = (*words[0].split(), *words[1:])  # as in "CLUSTER SLOTS"
        packed: list[Any] = []
        head = b"*%d\r\n" % len(words)
        for word in words:
            if isinstance(word, list):
                packed += [head + b"$%d\r\n" % sum(map(len, word)), *word]
                head = b"\r\n"
            else:
                text = word if isinstance(word, bytes) else str(word).encode()
                head += b"$%d\r\n%b\r\n" % (len(text), text)
        return [*packed, head]


class _Timed:
    """Of connections: their sockets keep deadlines, their values may be lists of memory."""

    socket_timeout: float | None
    socket_connect_timeout: float | None

    def __init__(self, **options: Any) -> None:
        super().__init__(command_packer=_Packer(), **options)  # type: ignore[call-arg]
        # Without these there is no CLIENT SETINFO; arguments for it differ between releases.
        self.lib_name = self.lib_version = self.driver_info = None

    def _connect(self) -> _Socket:
        try:
            self.socket_timeout = self.socket_connect_timeout = _limits.get().remaining()
            return _Socket(super()._connect())  # type: ignore[misc]
        except TimeoutError as error:  # redis-py 8 wants to log the port, which a path has not
            raise exceptions.TimeoutError(_LATE) from error
        finally:
            self.socket_timeout = None


class _Verified(_Timed):
    """Of connections by TLS: the name in a certificate counts, in all releases of redis-py."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("ssl_check_hostname", options.get("ssl_cert_reqs") != "none")
        super().__init__(**options)


class _TcpConnection(_Timed, Connection):  # type: ignore[misc]
    pass


class _UnixConnection(_Timed, UnixDomainSocketConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Verified, SSLConnection):  # type: ignore[misc]
    pass


class _ClosedAfterErrors:
    """Of connections behind sentinels: the rest of a reply is not taken for the next."""

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        options["disconnect_on_error"] = True
        return super().read_response(*arguments, **options)  # type: ignore[misc]


class _SentinelConnection(
    _ClosedAfterErrors,
    _Timed,
    SentinelManagedConnection,  # type: ignore[misc]
):
    pass


class _TlsSentinelConnection(
    _ClosedAfterErrors,
    _Verified,
    SentinelManagedSSLConnection,  # type: ignore[misc]
):
    pass
