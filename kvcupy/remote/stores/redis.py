"""Redis and Valkey, by redis-py."""

from __future__ import annotations

import ipaddress
import itertools
import re
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ...cache.threads import Users
from ...errors import ProcessLocal
from ...extras import install
from .backend import (
    FAILED,
    FULL,
    KNOWN,
    STORED,
    BackendLost,
    Block,
    blocks_per_call,
    num_bytes_of,
)

try:
    from redis import Redis, exceptions
    from redis.backoff import NoBackoff
    from redis.connection import (
        Connection,
        ConnectionPool,
        SSLConnection,
        UnixDomainSocketConnection,
        parse_url,
    )
    from redis.retry import Retry
except ImportError as error:
    raise ImportError(f"url: Redis needs redis-py, {install('redis')}: {error}") from error

_MAX_CONNECTIONS = 4
_MAX_EXTRA_REPLY_BYTES = 64 << 20  # per call, beyond the requested blocks
_KEYS_PER_SCAN = 1000
_LATE = "no answer in time"
_NO_REDIS = "not a Redis server"
_URL_FORM = "redis://[user:password@]host[:port][/db]"
_REFUSALS = (
    exceptions.AuthenticationError, exceptions.NoPermissionError, ssl.SSLCertVerificationError,
)  # fmt: skip
_FAILURES = (exceptions.RedisError, OSError)
# Raised by redis-py's parsers for replies that no Redis server sends.
_PARSER_ERRORS = (exceptions.InvalidResponse, ValueError, ArithmeticError, RecursionError)


def open_backend(
    url: str, *, namespace: bytes, num_bytes: int, capacity_bytes: int | None, deadline: float
) -> RedisBackend:
    """Connect to a server, by a URL of redis-py with options of its connections as a query.

    Special characters are percent-encoded, such as %40 for @ in a password. No error of this module
    contains a password or its start: the text of a server that does is withheld.
    """
    if capacity_bytes is not None:
        raise ValueError("capacity_bytes: expected None, since the server's maxmemory decides")
    if url.startswith("unix:/") and "://" not in url:
        url = f"unix://{url.removeprefix('unix:')}"
    try:
        server, _, query = url.partition("?")
        options = dict(parse_qsl(query, strict_parsing=bool(query)))
        plaintext = options.pop("plaintext_password", "0") not in ("0", "")
        url = f"{server}?{urlencode(options)}" if options else server
        settings = parse_url(url)
    except ValueError:  # its message may contain parts of a password
        raise ValueError(f"url: expected {_URL_FORM} or unix:/path") from None
    scheme, _, address = server.partition("://")
    address, host = address.rpartition("@")[2], settings.get("host", "localhost")
    secrets = [str(value) for name, value in settings.items() if "password" in name and value]
    if secrets and scheme == "redis" and not (plaintext or _is_loopback(host)):
        raise ValueError(
            f"url: expected TLS (rediss://...), or plaintext_password=1, to send a password to "
            f"{address}, which is not loopback"
        )
    connections = {"redis": _TcpConnection, "rediss": _TlsConnection, "unix": _UnixConnection}
    # Protocol version 2 needs no permission for the command HELLO.
    pool = ConnectionPool.from_url(
        url, connection_class=connections[scheme], protocol=2, retry=Retry(NoBackoff(), 1)
    )
    backend = RedisBackend(
        Redis.from_pool(pool), namespace, num_bytes, address=address, secrets=secrets
    )
    try:
        backend.connect(deadline)
    except TypeError as error:  # redis-py checks its options when it connects
        raise TypeError(f"url: expected options of redis-py, got others: {error}") from None
    return backend


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class RedisBackend(ProcessLocal):
    """Blocks as values in Redis or Valkey, by keys "kvcupy:NAMESPACE:KEY" in hexadecimal.

    Calls of several threads run concurrently, each on a separate connection, of which there are
    four. Commands: AUTH, SELECT, PING, EXISTS, GET, SET with NX, SCAN and UNLINK, on keys that
    match "kvcupy:*". The deadline does not limit host name resolution. Blocks are sent from pages
    without a copy in this process, except under TLS, and received into memory of redis-py. No error
    may contain `secrets`.
    """

    _instead = "open one in each process"

    num_threads = 1

    def __init__(
        self, client: Any, namespace: bytes, num_bytes: int, *,
        address: str = "", secrets: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._client, self._address, self._secrets = client, address, secrets
        self._num_bytes, self.blocks_per_call = num_bytes, blocks_per_call(num_bytes)
        self._prefix = b"kvcupy:" + namespace.hex().encode() + b":"
        self._users = Users(_MAX_CONNECTIONS)
        self._counts: Counter[str] = Counter(timeouts=0, wrong_replies=0, errors=0)

    def __repr__(self) -> str:
        return f"<RedisBackend of {self._address}>"

    def connect(self, deadline: float) -> None:
        """Raise BackendLost unless the server answers and grants access."""
        if self._run([("PING",)], deadline) != [True]:
            raise self._lost(_NO_REDIS)

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        commands = [("EXISTS", self._key(key)) for key in keys]
        return [count == 1 for count in self._run(commands, deadline)]

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        commands = [
            ("SET", self._key(key), list(block), b"NX")
            for key, block in zip(keys, blocks, strict=True)
        ]
        return list(map(_outcome, self._run(commands, deadline)))

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[bool | None]:  # fmt: skip
        commands = [("GET", self._key(key)) for key in keys]
        values = self._run(commands, deadline, len(keys) * self._num_bytes)
        arrived = [self._fill(block, value) for block, value in zip(blocks, values, strict=True)]
        # Else the server would have something else under their keys for ever.
        self.discard([k for k, whole in zip(keys, arrived, strict=True) if whole is None], deadline)
        return arrived

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        self._run([("UNLINK", self._key(key)) for key in keys], deadline)

    def clear(self, deadline: float) -> None:
        with self._calling(deadline):
            keys = self._client.scan_iter(match=self._prefix + b"*", count=_KEYS_PER_SCAN)
            try:
                while batch := list(itertools.islice(keys, _KEYS_PER_SCAN)):
                    sum(self._execute([("UNLINK", key) for key in batch]))  # these are ints
            except TypeError as error:  # unexpected type of reply
                raise self._lost(_NO_REDIS) from error

    def stats(self) -> dict[str, int]:
        """Count late calls (`timeouts`), failed calls (`errors`) and values of another length."""
        return dict(self._counts)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _key(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _fill(self, block: Block, value: Any) -> bool | None:
        """Copy a value to a block; None if its type or length is wrong."""
        if value is None:
            return False
        if not isinstance(value, bytes) or len(value) != num_bytes_of(block):
            self._counts["wrong_replies"] += 1
            return None
        start, content = 0, memoryview(value)
        for piece in block:
            piece[:] = content[start : start + piece.nbytes]
            start += piece.nbytes
        return True

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
                raise reply
        return replies

    @contextmanager
    def _calling(self, deadline: float, num_bytes: int = 0) -> Iterator[None]:
        """Limit time, received bytes and connections; raise redis-py's errors as `BackendLost`."""
        token = _limits.set(_Limits(deadline, num_bytes + _MAX_EXTRA_REPLY_BYTES))
        call = self._users.enter(deadline - time.monotonic())
        try:
            if call is None:
                raise TimeoutError("all connections are in use")
            yield
        except (TimeoutError, exceptions.TimeoutError) as error:
            self._counts["timeouts"] += 1
            raise self._lost(_LATE) from _quotable(error, self._secrets)
        except _PARSER_ERRORS as error:
            self._counts["errors"] += 1
            raise self._lost(_NO_REDIS) from _quotable(error, self._secrets)
        except _FAILURES as error:
            self._counts["errors"] += 1
            refusal = next((each for each in _causes(error) if isinstance(each, _REFUSALS)), None)
            text: object = refusal or error
            if (cause := _quotable(error, self._secrets)) is None:
                text = f"{type(text).__name__}, whose text may contain the password"
            raise self._lost(text, refused=refusal is not None) from cause
        finally:
            _limits.reset(token)
            if call is not None:
                self._users.leave(call)

    def _lost(self, text: object, *, refused: bool = False) -> BackendLost:
        return BackendLost(f"redis {self._address}: {text}", refused=refused)


def _outcome(reply: Any) -> str:
    """Map the reply to SET NX to an outcome."""
    if isinstance(reply, exceptions.OutOfMemoryError):
        return FULL
    return STORED if reply is True else KNOWN if reply is None else FAILED


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


class _TcpConnection(_Timed, Connection):  # type: ignore[misc]
    pass


class _UnixConnection(_Timed, UnixDomainSocketConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Timed, SSLConnection):  # type: ignore[misc]
    """Verifies host names in certificates in all releases of redis-py."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("ssl_check_hostname", options.get("ssl_cert_reqs") != "none")
        super().__init__(**options)

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether the connection has unread data, or is closed.

        redis-py asks the socket, which is readable while session tickets of TLS 1.3 wait there.
        These are not data, so they are read here. redis-py drops a connection with unread data.
        """
        if self._sock is None:
            self.connect()
        tls: ssl.SSLSocket = self._sock._inner
        try:
            tls.settimeout(0)
            tls.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        return True
