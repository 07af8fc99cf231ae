"""Mooncake Store: blocks in the memory of its nodes.

Calls of the store block, some for a minute. Each runs in a thread, and late calls are abandoned.
Blocks go through buffers of this process, never from or to a page: an abandoned call, or one that
failed during a transfer, may still access its buffer. The client of the store is then replaced, and
closed with its buffers after its last call has ended.

Mooncake has no authentication and no encryption, and each process that uses it listens on two ports
of all interfaces; see docs/beyond_one_process.md. Unless already set in the environment,
`MC_STORE_CLIENT_SETUP_RETRIES` becomes 1 and `MC_RPC_TIMEOUT_MS` 5000.
Source: kvcache-ai/Mooncake `mooncake-store/include/types.h` for the codes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from ...config import cache_logger
from ...errors import ProcessLocal, finalize
from ...extras import install
from ...waiting import Waiters
from .backend import FAILED, FULL, KNOWN, STORED, BackendLost, Block, blocks_per_call

_MAX_CONCURRENT_CALLS = 4
_MAX_DRAINING = 2
_CLOSE_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 2.0

# Retries, and timeout in ms, with which the store connects to its master.
_ENVIRONMENT = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_RPC_TIMEOUT_MS": "5000"}

# Error codes of the store.
_NO_SPACE, _EXISTS = -200, -705
# No transfer is in progress after these: no space, bad arguments, not ready, unknown, known,
# leased, lease expired, damaged. After any other code, such as -800, bytes may still arrive.
_SAFE_CODES = frozenset((_NO_SPACE, -600, -703, -704, _EXISTS, -706, -707, -801))
_OUTCOMES = {0: STORED, _EXISTS: KNOWN, _NO_SPACE: FULL}


class _Settings(NamedTuple):
    """Arguments for setting up clients of the store, and the size of their buffers."""

    master: str
    host: str  # address under which other processes reach this one
    protocol: str
    devices: str
    num_bytes: int  # of a block


def open_backend(
    url: str, *, namespace: bytes, num_bytes: int, capacity_bytes: int | None, deadline: float
) -> MooncakeBackend:
    """Connect to the master of a store at "mooncake://host:port".

    In the query, "host=" is the name or address under which other processes reach this one, by
    default the source address of packets to the master; "protocol=rdma" and "devices=" name RDMA
    devices.
    """
    if capacity_bytes is not None:
        raise ValueError("capacity_bytes: expected None, since the nodes' memory decides")
    address, _, query = url.partition("?")
    master = _master(address)
    options = dict(parse_qsl(query))
    host, protocol = options.pop("host", ""), options.pop("protocol", "tcp")
    devices = options.pop("devices", "")
    if options or protocol not in ("tcp", "rdma"):
        raise ValueError(
            f"url: expected options host, protocol (tcp or rdma) and devices, got {query!r}"
        )
    _store_class()
    settings = _Settings(master, host or _own_address(master), protocol, devices, num_bytes)
    backend = MooncakeBackend(settings, namespace)
    try:
        backend.connect(deadline)
    except BaseException:
        backend.close(wait_s=0)
        raise
    return backend


def _master(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    in_path = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme != "mooncake" or not parts.hostname or not port or in_path:
        address = url.rpartition("@")[2]  # without a password
        raise ValueError(f"url: expected mooncake://host:port, got {address!r}")
    return f"{parts.hostname}:{port}"


def _is_alive(master: str) -> bool:
    """Return whether the master is alive: it then hangs up on an invalid request.

    Setting up a client without this probe holds the GIL until the master answers, up to 90 s.
    """
    host, port = master.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S) as probe:
            probe.sendall(b"?")
            return not probe.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False


def _own_address(master: str) -> str:
    """Return the source address of packets to the master, without sending any."""
    host, port = master.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError as error:
            raise BackendLost(f"mooncake {master}: {error}") from error
        return str(probe.getsockname()[0])


def _store_class() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ImportError(
            f"url: mooncake:// needs Mooncake, {install('mooncake')}, and the system's packages "
            f"libibverbs1, libnl-3-200 and libnl-route-3-200: {error}"
        ) from error
    # Client setup holds the GIL, by default for 90 s if the master disappears meanwhile.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return MooncakeDistributedStore


class MooncakeBackend(ProcessLocal):
    """Blocks as objects in a Mooncake Store, moved through buffers of this process."""

    _instead = "open one in each process"

    num_threads = 1

    def __init__(self, settings: _Settings, namespace: bytes) -> None:
        self._settings = settings
        self._prefix = f"kvcupy:{namespace.hex()}:"
        self.blocks_per_call = blocks_per_call(settings.num_bytes)
        self._clients = _Clients(settings)
        # Also runs at interpreter exit: calls that return during shutdown would crash the process.
        self._finalizer = finalize(self, self._clients.close, _CLOSE_TIMEOUT_S, at_exit=True)

    def __repr__(self) -> str:
        return f"<MooncakeBackend of {self._settings.master}>"

    def connect(self, deadline: float) -> None:
        """Set up a client. BackendLost if that failed or timed out."""
        with self._clients.buffer(deadline) as buffer:
            buffer.call(lambda store: [0], deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        names = self._names(keys)
        with self._clients.buffer(deadline) as buffer:
            codes = buffer.call(lambda store: store.batch_is_exist(names), deadline)
        return [code == 1 for code in codes]

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        names = self._names(keys)
        with self._clients.buffer(deadline) as buffer:
            for row, block in zip(buffer.rows, blocks, strict=False):
                for piece, in_row in _paired(block, row):
                    in_row[:] = piece
            places = buffer.places(len(names))
            codes = buffer.call(
                lambda store: store.batch_put_from_multi_buffers(names, *places), deadline
            )
        return [_OUTCOMES.get(code, FAILED) for code in codes]

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[bool | None]:  # fmt: skip
        names, whole = self._names(keys), self._settings.num_bytes
        with self._clients.buffer(deadline) as buffer:
            places = buffer.places(len(names))
            codes = buffer.call(
                lambda store: store.batch_get_into_multi_buffers(names, *places), deadline
            )
            for row, block, code in zip(buffer.rows, blocks, codes, strict=False):
                for piece, in_row in _paired(block, row) if code == whole else ():
                    piece[:] = in_row
        return [True if code == whole else False if code < 0 else None for code in codes]

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        names = self._names(keys)
        with self._clients.buffer(deadline) as buffer:
            buffer.call(lambda store: store.batch_remove(names, True), deadline)

    def clear(self, deadline: float) -> None:
        pattern = f"^{self._prefix}.*"
        with self._clients.buffer(deadline) as buffer:
            (count,) = buffer.call(lambda store: [store.remove_by_regex(pattern, True)], deadline)
        if count < 0:
            raise BackendLost(f"mooncake {self._settings.master}: code {count}")

    def stats(self) -> dict[str, int]:
        """Count clients that were set up and that are draining, and calls that were late, failed
        during a transfer, or failed otherwise."""
        return self._clients.stats()

    def close(self, wait_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Close the clients. Calls that have not returned after `wait_s` are abandoned."""
        self._finalizer.detach()
        if not self._clients.close(wait_s) and wait_s:
            cache_logger.warning("%r: abandoned calls that have not returned", self)

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]


def _paired(block: Block, row: Any) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield the pieces of a block, each with its part of a row of a buffer."""
    start = 0
    for piece in block:
        yield piece, row.data[start : start + piece.nbytes]
        start += piece.nbytes


# --- Clients of the store, and threads for its calls ---


class _CallFailed(BackendLost):
    """A call after which the client must be replaced, and the counter of the reason."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Clients:
    """The current client of the store, and retired clients that are draining."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._current: _Client | None = None
        self._draining: list[_Client] = []
        self._closed = False
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._counts = {"clients": 0, "late": 0, "failed_transfers": 0, "errors": 0}

    @contextmanager
    def buffer(self, deadline: float) -> Iterator[_Buffer]:
        """Yield a buffer for a call; retire its client if that call may still be in progress.

        BackendLost if the call failed or timed out, or no buffer was free in time.
        """
        buffer = self._changed.wait_for(self._take, deadline - time.monotonic())
        if buffer is None:
            raise BackendLost(f"mooncake {self._settings.master}: all calls are in use")
        client = buffer.client
        try:
            yield buffer
        except BaseException as error:  # also KeyboardInterrupt
            self._retire(client, error.reason if isinstance(error, _CallFailed) else "")
            raise
        with self._lock:
            client.free.append(buffer.rows)
            self._changed.notify()

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {**self._counts, "draining": len(self._draining)}

    def close(self, wait_s: float) -> bool:
        """Retire all clients; return whether they are closed within `wait_s`."""
        with self._lock:
            self._closed = True
            client = self._current
        if client is not None:
            self._retire(client)
        return self._changed.wait_for(lambda: not self._draining, wait_s)

    def start(self, client: _Client, work: Callable[[], object]) -> None:
        """Run `work` in a thread, until whose end the client is not closed."""

        def run() -> None:
            try:
                work()
            finally:
                self._leave(client)

        with self._lock:
            client.num_running += 1
        try:
            threading.Thread(target=run, name="kvcupy-mooncake", daemon=True).start()
        except RuntimeError as error:  # thread limit of the system, or interpreter shutdown
            self._leave(client)
            raise BackendLost(f"mooncake {self._settings.master}: {error}") from error

    def _take(self) -> _Buffer | None:
        """Take a buffer; None if all are in use. The caller holds the lock."""
        if self._closed:
            raise BackendLost("the store is closed")
        if self._current is None:
            if len(self._draining) >= _MAX_DRAINING:
                raise BackendLost(
                    f"mooncake {self._settings.master}: abandoned calls have not returned"
                )
            self._current = _Client(self._settings)
            self._counts["clients"] += 1
        free = self._current.free
        return _Buffer(self, self._current, free.pop()) if free else None

    def _retire(self, client: _Client, reason: str = "") -> None:
        """Stop using a client, and close it in a thread when its calls have ended."""
        with self._lock:
            if reason:
                self._counts[reason] += 1
            if self._current is client:
                self._current = None
            if client.is_retired:
                return
            client.is_retired = True
            self._draining.append(client)
            self._changed.notify()
        with suppress(BackendLost):  # then it has been closed here
            self.start(client, lambda: None)

    def _leave(self, client: _Client) -> None:
        with self._lock:
            client.num_running -= 1
            if client.num_running or not client.is_retired:
                return
        try:
            client.close()
        except Exception as error:  # the client keeps draining, with its buffers
            cache_logger.warning("cannot close a Mooncake client: %s", error)
            return
        with self._lock:
            self._draining.remove(client)
            self._changed.notify()


class _Client:
    """A client of the store, and its buffers, (blocks, bytes of a block) each."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        count = blocks_per_call(settings.num_bytes)
        self._rows = np.empty((_MAX_CONCURRENT_CALLS, count, settings.num_bytes), np.uint8)
        self.free = list(self._rows)
        self.num_running = 0
        self.is_retired = False
        self._store: Any = None
        self._lock = threading.Lock()

    def store(self) -> Any:
        """Return the store; the first call sets it up."""
        with self._lock:
            if self._store is None:
                if not _is_alive(self.settings.master):
                    raise ConnectionError("no answer")
                self._store = self._set_up()
            return self._store

    def _set_up(self) -> Any:
        settings, store = self.settings, _store_class()()
        code = store.setup(
            settings.host, "P2PHANDSHAKE", 0, 0, settings.protocol, settings.devices,
            settings.master,
        )  # fmt: skip
        if code:
            raise ConnectionError(f"client setup failed, code {code}")
        is_rdma, rows = settings.protocol == "rdma", self._rows
        if is_rdma and (code := store.register_buffer(rows.ctypes.data, rows.nbytes)):
            store.close()
            raise OSError(f"cannot register the buffers, code {code}")
        return store

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


class _Buffer:
    """Memory for the blocks of one call of the store."""

    def __init__(self, clients: _Clients, client: _Client, rows: Any) -> None:
        self._clients, self.client, self.rows = clients, client, rows

    def call(self, function: Callable[[Any], Any], deadline: float) -> list[int]:
        """Run a call of the store, which returns a code for each block.

        BackendLost if it failed or timed out, or may still be in progress.
        """
        name = f"mooncake {self.client.settings.master}"
        codes: list[int] = []
        errors: list[Exception] = []
        running, is_abandoned = threading.Lock(), False  # a lock is cheaper than an Event
        running.acquire()

        def work() -> None:
            try:
                store = self.client.store()
                if not is_abandoned:
                    codes.extend(function(store))
            except Exception as error:
                errors.append(error)
            running.release()

        self._clients.start(self.client, work)
        seconds = max(0.0, deadline - time.monotonic())
        if not running.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            is_abandoned = True
            raise _CallFailed(f"{name}: no answer in time", "late")
        if errors:
            raise _CallFailed(f"{name}: {errors[0]}", "errors") from errors[0]
        if unsafe := [code for code in codes if code < 0 and code not in _SAFE_CODES]:
            # A dead node stays in the index for about 10 s.
            raise _CallFailed(f"{name}: code {unsafe[0]}", "failed_transfers")
        return codes

    def places(self, count: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and the lengths of the first rows, as the store expects them."""
        first, num_bytes = self.rows.ctypes.data, self.rows.shape[1]
        pointers = [[first + i * num_bytes] for i in range(count)]
        return pointers, [[num_bytes]] * count
