"""Redis and Valkey backend, using redis-py: one server, a cluster, or a master with sentinels."""

from __future__ import annotations

import ipaddress
import itertools
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...cache.threads import Users
from ...errors import ProcessLocal
from ...extras import install
from ...ops import checks
from .backend import (
    FAILED,
    FULL,
    KNOWN,
    MAX_HEADER_BYTES,
    STORED,
    BackendLost,
    Block,
    StoredBlock,
)

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

_BYTES_PER_ROUND_TRIP = 4 << 20
_MAX_EXTRA_REPLY_BYTES = 64 << 20  # per call, beyond the requested blocks
_KEYS_PER_SCAN = 1000
_LATE = "no answer in time"
_NO_REDIS = "not a Redis server"
_SENTINEL_PORT, _SENTINEL_TIMEOUT_S = 26379, 1.0
_URL_FORM = "redis://[user:password@]host[:port][/db]"
_SENTINEL_FORM = "redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]"
_REFUSALS = (
    exceptions.AuthenticationError, exceptions.NoPermissionError, ssl.SSLCertVerificationError,
)  # fmt: skip
_FAILURES = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
# Raised by redis-py's parsers for replies that no Redis server sends.
_PARSER_ERRORS = (exceptions.InvalidResponse, ValueError, ArithmeticError, RecursionError)


def open_backend(
    url: str, pages: Any, *, namespace: bytes, capacity_bytes: int | None, deadline: float,
    ttl_s: float | None = None, max_connections: int = 4, plaintext_password: bool = False,
    **options: Any,
) -> RedisBackend:  # fmt: skip
    """Connect to a server.

    Parameters
    ----------
    url : in the syntax of redis-py: "redis://[user:password@]host[:port][/db]", "rediss://..." for
        TLS, or "unix:/path". "redis+cluster://..." and "rediss+cluster://..." name any node of a
        cluster; "redis+sentinel://[user:password@]host:port[,host:port...]/service[/db]" and
        "rediss+sentinel://..." name sentinels and a service. Special characters are
        percent-encoded, such as %40 for @ in a password
    pages : not used
    deadline : as in `Backend`
    namespace, ttl_s, max_connections : as in `RedisBackend`
    capacity_bytes : must be None; the server's `maxmemory` sets the capacity
    plaintext_password : send a password without TLS to hosts other than this one, and to the
        servers that a cluster or sentinels name. Otherwise that is a ValueError
    options : options of redis-py's connections, such as `username`, `password`, `db`,
        `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and `ssl_cert_reqs`. `sentinel_kwargs`, a
        dict, has the options of connections to sentinels

    Raises
    ------
    TypeError, ValueError, OSError : an argument is invalid
    BackendLost : the server is unreachable, or denies access

    Notes
    -----
    No error of this module contains a password or its start: the text of a server that does is
    withheld.
    """
    if capacity_bytes is not None:
        raise ValueError("capacity_bytes: expected None, since the server's maxmemory decides")
    if "quota_bytes" in options:
        raise TypeError("quota_bytes: expected a store in shm:, got a server, which has no quotas")
    plaintext_password = checks.flag(plaintext_password, "plaintext_password")
    server = _server(url, options)
    if server.exposes_password and not plaintext_password:
        raise ValueError(
            f"url: expected TLS (rediss://...), or plaintext_password=True, to send a password to "
            f"{server.address}, which is not loopback or names other servers"
        )
    try:
        with _call(f"redis {server.address}", deadline, server.secrets):
            client = server.connect()
        backend = RedisBackend(
            client, namespace, address=server.address, secrets=server.secrets, ttl_s=ttl_s,
            max_connections=max_connections,
        )  # fmt: skip
        backend.connect(deadline)
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise TypeError(f"options: {error}") from error  # redis-py checks them when it connects
    return backend


class _Server(NamedTuple):
    """What a URL and options say.

    Attributes
    ----------
    connect : makes a redis-py client; a cluster client connects when it is made
    address : of the URL, without user, password and options
    secrets : passwords
    exposes_password : whether a password may leave this machine without TLS
    """

    connect: Callable[[], Any]
    address: str
    secrets: tuple[str, ...]
    exposes_password: bool


def _server(url: str, options: dict[str, Any]) -> _Server:
    """Parse a URL and options of redis-py's connections."""
    if url.startswith("unix:/") and "://" not in url:
        url = f"unix://{url.removeprefix('unix:')}"
    address, slash, path = url.partition("://")[2].partition("?")[0].partition("/")
    connect, settings = _connector(url, options)
    sentinels = settings.get("sentinel_kwargs", {})
    secrets = tuple(
        value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for name, value in (*settings.items(), *sentinels.items())
        if "password" in name and value
    )
    scheme, _, kind = url.partition("://")[0].partition("+")
    is_local = scheme == "unix" or (not kind and _is_loopback(settings.get("host", "localhost")))
    exposes = scheme != "rediss" and not is_local
    has_password = bool(secrets) or "credential_provider" in {**settings, **sentinels}
    return _Server(
        connect, address.rpartition("@")[2] + slash + path, secrets, exposes and has_password
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _connector(url: str, options: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a function that makes a redis-py client, and the settings in URL and options."""
    scheme, _, rest = url.partition("://")
    scheme, _, kind = scheme.partition("+")
    secure = scheme == "rediss"
    url = f"{'redis' if secure else scheme}://{rest}"
    # Protocol version 2 needs no permission for the command HELLO.
    options = {"protocol": 2, "retry": Retry(NoBackoff(), 1), **options}
    try:
        if kind == "sentinel":
            sentinel_class = _TlsSentinelConnection if secure else _SentinelConnection
            return _sentinel_connector(url, {**options, "connection_class": sentinel_class})
        settings = {**options, **parse_url(url)}
    except ValueError:  # its message may contain parts of a password
        form = _SENTINEL_FORM if kind == "sentinel" else _URL_FORM
        raise ValueError(f"url: expected {form} or unix:/path") from None
    if kind == "cluster":
        node_class: Any = _TlsConnection if secure else _TcpConnection
        return lambda: RedisCluster(url=url, connection_class=node_class, **options), settings
    server_class: Any = _TlsConnection if secure else _TcpConnection
    pool = ConnectionPool.from_url(
        url, connection_class=_UnixConnection if scheme == "unix" else server_class, **options
    )
    return lambda: Redis.from_pool(pool), settings


def _sentinel_connector(
    url: str, options: dict[str, Any]
) -> tuple[Callable[[], Any], dict[str, Any]]:
    # `urlsplit` of newer Python patch releases rejects brackets after the first host.
    address, _, query = url.partition("://")[2].partition("?")
    servers, _, path = address.partition("/")
    credentials, at, hosts = servers.rpartition("@")
    service, _, db = path.strip("/").partition("/")
    nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
    if not service:
        raise ValueError
    sentinels = [(node.hostname, node.port or _SENTINEL_PORT) for node in nodes]
    in_url = parse_url(f"redis://{credentials}{at}/{db}?{query}")
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), _SENTINEL_TIMEOUT_S)
    settings = {**options, **in_url}
    of_sentinels = settings.pop("sentinel_kwargs", {})
    sentinel = Sentinel(sentinels, sentinel_kwargs={**timeouts, **of_sentinels})
    connect = partial(sentinel.master_for, service, **settings)
    return connect, {**settings, "sentinel_kwargs": of_sentinels}


class RedisBackend(ProcessLocal):
    """Blocks as values in Redis or Valkey: a header, then the payload.

    Calls of several threads run concurrently, each on a separate connection.

    Parameters
    ----------
    client : a Redis or RedisCluster of redis-py
    namespace : key prefix, written in hexadecimal, by which `remove` finds the keys
    address : of the server, for error messages
    secrets : texts that no error may contain
    ttl_s : seconds until a block expires on the server; None keeps it until eviction
    max_connections : per server; a call waits for a free connection until its deadline

    Raises
    ------
    TypeError, ValueError : `ttl_s` or `max_connections` is not a positive number

    Notes
    -----
    Commands: AUTH, SELECT, PING, EXISTS, GET, SET with NX, SCAN and UNLINK, on keys that match
    "kvcupy:*"; in a cluster also CLUSTER and COMMAND. The deadline does not limit host name
    resolution.
    Bytes: sent from pages without a copy in this process, except under TLS; received into memory
    of redis-py, and copied to pages when a reply is complete.
    """

    blocks_per_get = 4
    put_asks_first = False

    def __init__(
        self, client: Any, namespace: bytes, *, address: str = "", secrets: Sequence[str] = (),
        ttl_s: float | None = None, max_connections: int = 4,
    ) -> None:  # fmt: skip
        if ttl_s is not None:
            checks.require_number(ttl_s, "ttl_s")
            if not 0.001 <= ttl_s < 1e12:
                raise ValueError(f"ttl_s: expected seconds, at least 0.001, got {ttl_s!r}")
        checks.require_int(max_connections, "max_connections")
        if max_connections < 1:
            raise ValueError(f"max_connections: expected at least 1, got {max_connections}")
        self._client, self._address, self._secrets = client, address, secrets
        self._prefix = b"kvcupy:" + namespace.hex().encode() + b":"
        expiry = () if ttl_s is None else (b"PX", b"%d" % (ttl_s * 1000))
        self._after_value = (b"NX", *expiry)
        self._users = Users(max_connections)
        self._counts: Counter[str] = Counter(timeouts=0, wrong_replies=0, errors=0)

    def __repr__(self) -> str:
        return f"<RedisBackend of {self._address}>"

    def connect(self, deadline: float) -> None:
        """Check that the server answers and grants access.

        Raises
        ------
        BackendLost : the server is unreachable, or denies access (`refused`)
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
            # Each header is computed just before its block is sent.
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
        """Return None: no block is accessed after the call."""

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        self._run([("UNLINK", self._key(key)) for key in keys], deadline)

    def remove(self, deadline: float) -> int:
        """Remove the blocks of this namespace in batches, and return their number."""
        removed = 0
        with self._calling(deadline):
            keys = self._client.scan_iter(match=self._prefix + b"*", count=_KEYS_PER_SCAN)
            try:
                while batch := list(itertools.islice(keys, _KEYS_PER_SCAN)):
                    removed += sum(self._execute([("UNLINK", key) for key in batch]))
            except TypeError as error:  # unexpected type of reply
                raise BackendLost(f"redis {self._address}: {_NO_REDIS}") from error
        return removed

    # --- For an operator: blocks of all tenants ---

    def blocks(self, deadline: float) -> Iterator[StoredBlock]:
        """Yield the blocks, in no order."""
        with self._calling(deadline):
            keys = list(self._client.scan_iter(match=b"kvcupy:*", count=_KEYS_PER_SCAN))
        for start in range(0, len(keys), _KEYS_PER_SCAN):
            some = keys[start : start + _KEYS_PER_SCAN]
            # Commands that do not count as a use of the block.
            sizes = self._run([("MEMORY USAGE", key) for key in some], deadline)
            try:
                idle = self._run([("OBJECT IDLETIME", key) for key in some], deadline)
            except BackendLost:  # no permission, or the server counts uses instead
                idle = [None] * len(some)
            for key, num_bytes, seconds in zip(some, sizes, idle, strict=True):
                if num_bytes is not None:  # else it is gone
                    yield StoredBlock(key, num_bytes, seconds, key.split(b":")[1].decode())

    def read(
        self, block: StoredBlock, header_bytes: int, deadline: float
    ) -> tuple[bytes, memoryview] | None:
        """Return header and contents of a block; None if it is gone."""
        (value,) = self._run([("GET", block.key)], deadline, block.num_bytes)
        if not isinstance(value, bytes):
            return None
        return value[:header_bytes], memoryview(value)[header_bytes:]

    def drop(self, keys: Sequence[bytes], deadline: float) -> int:
        """Drop blocks, and return their number."""
        return sum(
            sum(self._run([("UNLINK", key) for key in keys[i : i + _KEYS_PER_SCAN]], deadline))
            for i in range(0, len(keys), _KEYS_PER_SCAN)
        )

    def memory(self, deadline: float) -> dict[str, int]:
        """Return the server's memory and limit; nothing if it does not tell this user."""
        try:
            (info,) = self._run([("INFO", "memory")], deadline)
        except BackendLost:
            return {}
        return {name: info[name] for name in ("used_memory", "maxmemory") if name in info}

    def stats(self) -> dict[str, int]:
        """Count late calls (`timeouts`), failed calls (`errors`) and values of another length."""
        return dict(self._counts)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _key(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _outcome(self, reply: Any) -> str:
        """Map the reply to SET NX to an outcome."""
        if isinstance(reply, exceptions.OutOfMemoryError):
            return FULL
        return STORED if reply is True else KNOWN if reply is None else FAILED

    def _fill(self, block: Block, value: Any) -> bytes | None:
        """Copy the payload of a value to a block, and return the value's header.

        Return None, with nothing written, if the value is missing or has another length.
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
        """Send commands in one round trip, and return the replies, including errors of single keys.

        `num_bytes` is the size of the blocks in the replies.
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
                        f"redis {self._address}: part of a cluster: use redis+cluster://..."
                    )
                raise reply
        return replies

    @contextmanager
    def _calling(self, deadline: float, num_bytes: int = 0) -> Iterator[None]:
        """Limit the number of connections in use, and count failures."""
        name = f"redis {self._address}"
        call = self._users.enter(deadline - time.monotonic())
        if call is None:
            raise BackendLost(f"{name}: {_LATE}")
        try:
            with _call(name, deadline, self._secrets, num_bytes):
                yield
        except BackendLost as error:
            self._counts["timeouts" if _LATE in str(error) else "errors"] += 1
            raise
        finally:
            self._users.leave(call)


def _num_bytes(block: Block) -> int:
    return sum(piece.nbytes for piece in block)


def _trips(blocks: Sequence[Block]) -> Iterator[range]:
    """Split the indices of blocks, which have equal lengths, into round trips."""
    count = max(1, _BYTES_PER_ROUND_TRIP // max(1, _num_bytes(blocks[0]))) if blocks else 1
    for start in range(0, len(blocks), count):
        yield range(start, min(start + count, len(blocks)))


def _concerns_one_key(error: Exception) -> bool:
    """Return whether other commands may have succeeded: out of memory, or not a string value."""
    return isinstance(error, exceptions.OutOfMemoryError) or "WRONGTYPE" in str(error)


# --- redis-py connections that enforce the deadline of a call ---


@dataclass
class _Limits:
    deadline: float  # in the clock of time.monotonic
    num_bytes: float  # left to receive

    def remaining(self) -> float:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        return remaining


_limits: ContextVar[_Limits] = ContextVar("_limits")


@contextmanager
def _call(name: str, deadline: float, secrets: Sequence[str], num_bytes: int = 0) -> Iterator[None]:
    """Limit time and received bytes in this thread; raise redis-py's errors as `BackendLost`."""
    token = _limits.set(_Limits(deadline, num_bytes + _MAX_EXTRA_REPLY_BYTES))
    try:
        yield
    except (TimeoutError, exceptions.TimeoutError) as error:
        raise BackendLost(f"{name}: {_LATE}") from _quotable(error, secrets)
    except _PARSER_ERRORS as error:
        raise BackendLost(f"{name}: {_NO_REDIS}") from _quotable(error, secrets)
    except _FAILURES as error:
        refusal = next((cause for cause in _causes(error) if isinstance(cause, _REFUSALS)), None)
        text: object = refusal or error
        if _quotable(error, secrets) is None:
            text = f"{type(text).__name__}, whose text may contain the password"
        raise BackendLost(f"{name}: {text}", refused=refusal is not None) from _quotable(
            error, secrets
        )
    finally:
        _limits.reset(token)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _quotable(error: BaseException, secrets: Sequence[str]) -> BaseException | None:
    """Return the error; None if a text in its traceback may contain a secret or its start.

    Servers that lack AUTH repeat its arguments, of which they cut the end, and redis-py escapes
    punctuation: the first letters and digits are compared.
    """
    texts = [re.sub(r"\W", "", str(cause)) for cause in _causes(error)]
    starts = [re.sub(r"\W", "", secret)[:6] for secret in secrets]
    return None if any(start in text for start in starts for text in texts) else error


class _Socket:
    """A socket with one deadline for all its calls, instead of a timeout per call."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._blocks = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def tls(self) -> ssl.SSLSocket:
        """The socket itself."""
        inner: ssl.SSLSocket = self._inner
        return inner

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
            raise OSError("the reply is longer than requested")
        if self._blocks:
            self._inner.settimeout(limits.remaining())
        return limits


class _Packer:
    """Packs commands whose values consist of several buffers, without copying the buffers."""

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
    """Connection mixin: sockets enforce deadlines, and values may be lists of buffers."""

    socket_timeout: float | None
    socket_connect_timeout: float | None

    def __init__(self, **options: Any) -> None:
        super().__init__(command_packer=_Packer(), **options)  # type: ignore[call-arg]
        # Suppresses CLIENT SETINFO, whose arguments differ between releases.
        self.lib_name = self.lib_version = self.driver_info = None

    def _connect(self) -> _Socket:
        try:
            self.socket_timeout = self.socket_connect_timeout = _limits.get().remaining()
            return _Socket(super()._connect())  # type: ignore[misc]
        except TimeoutError as error:  # redis-py 8 logs the port, which a Unix socket lacks
            raise exceptions.TimeoutError(_LATE) from error
        finally:
            self.socket_timeout = None


class _Verified(_Timed):
    """TLS connection mixin: verifies host names in certificates in all releases of redis-py."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("ssl_check_hostname", options.get("ssl_cert_reqs") != "none")
        super().__init__(**options)

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether the connection has unread data, or is closed.

        redis-py asks the socket, which is readable while session tickets of TLS 1.3 wait there.
        These are not data, so they are read here. redis-py drops a connection with unread data.
        """
        connection: Any = self
        if connection._sock is None:
            connection.connect()
        tls = connection._sock.tls
        try:
            tls.settimeout(0)
            tls.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        return True


class _TcpConnection(_Timed, Connection):  # type: ignore[misc]
    pass


class _UnixConnection(_Timed, UnixDomainSocketConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Verified, SSLConnection):  # type: ignore[misc]
    pass


class _ClosedAfterErrors:
    """Sentinel connection mixin: an error disconnects, so no stale bytes precede the next reply."""

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
