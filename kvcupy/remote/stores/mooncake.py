"""Mooncake Store: blocks in the memory of its nodes.

Notes
-----
Mooncake has no authentication and no encryption. Each process that uses it listens on two ports of
all interfaces; with RDMA, any host that reaches them can read and write the buffers of this module,
which are not the pool. Use it only on networks where every host is trusted. Mooncake logs to
stderr; `MC_LOG_LEVEL=ERROR` limits it to errors. Unless already set in the environment,
`MC_STORE_CLIENT_SETUP_RETRIES` becomes 1 and `MC_RPC_TIMEOUT_MS` 5000.
Source: kvcache-ai/Mooncake `mooncake-store/include/types.h` for the codes.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from ...config import cache_logger
from ...errors import ProcessLocal, finalize
from ...extras import install
from ...waiting import Latch, Waiters
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
    """Connect to the master of a store.

    Parameters
    ----------
    url : "mooncake://host:port" of the master, and as a query "host=", the name or address under
        which other processes reach this one, by default the source address of packets to the
        master; "protocol=rdma" and "devices=", the names of the RDMA devices
    capacity_bytes : must be None; the nodes' memory is the capacity

    Raises
    ------
    ImportError : Mooncake's wheel or the system's libibverbs is missing
    TypeError, ValueError : an argument is invalid
    BackendLost : the master did not answer in time
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
    """Blocks as objects in a Mooncake Store, moved through buffers of this process.

    Store calls block, some for a minute. Each runs in a worker thread, and late calls are
    abandoned. An abandoned call, or a call that failed during a transfer, may still access the
    buffer of its worker. The store client is then replaced, and closed with its buffers after its
    last call has ended. No call of the store sees the memory of a page, so late bytes cannot reach
    one.

    Parameters
    ----------
    settings : arguments for setting up clients
    namespace : part of the keys, in hexadecimal, by which `clear` finds them

    Notes
    -----
    Bytes: each block once more in each direction, between the pages and the buffer.
    """

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
        with self._clients.worker(deadline) as worker:
            worker.call(lambda store: [0], deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        names = self._names(keys)
        with self._clients.worker(deadline) as worker:
            codes = worker.call(lambda store: store.batch_is_exist(names), deadline)
        return [code == 1 for code in codes]

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        names = self._names(keys)
        with self._clients.worker(deadline) as worker:
            for row, block in zip(worker.rows, blocks, strict=False):
                start, buffer = 0, row.data
                for piece in block:
                    buffer[start : start + piece.nbytes] = piece
                    start += piece.nbytes
            codes = worker.call(
                lambda store: store.batch_put_from_multi_buffers(
                    names, *worker.buffers(len(names))
                ),
                deadline,
            )  # fmt: skip
        return [_OUTCOMES.get(code, FAILED) for code in codes]

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[bool | None]:  # fmt: skip
        names = self._names(keys)
        with self._clients.worker(deadline) as worker:
            codes = worker.call(
                lambda store: store.batch_get_into_multi_buffers(
                    names, *worker.buffers(len(names))
                ),
                deadline,
            )  # fmt: skip
            for row, block, code in zip(worker.rows, blocks, codes, strict=False):
                if code == self._settings.num_bytes:
                    start, buffer = 0, row.data
                    for piece in block:
                        piece[:] = buffer[start : start + piece.nbytes]
                        start += piece.nbytes
        return [
            True if code == self._settings.num_bytes else False if code < 0 else None
            for code in codes
        ]

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        names = self._names(keys)
        with self._clients.worker(deadline) as worker:
            worker.call(lambda store: store.batch_remove(names, True), deadline)

    def clear(self, deadline: float) -> None:
        pattern = f"^{self._prefix}.*"
        with self._clients.worker(deadline) as worker:
            (count,) = worker.call(lambda store: [store.remove_by_regex(pattern, True)], deadline)
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


# --- Store clients and their worker threads ---


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
    def worker(self, deadline: float) -> Iterator[_Worker]:
        """Yield a worker for one call; retire its client if that call may still be in progress.

        Raises
        ------
        BackendLost : the call failed or timed out, or no worker was free in time
        """
        started = self._changed.wait_for(self._take, deadline - time.monotonic())
        if started is None:
            raise BackendLost(f"mooncake {self._settings.master}: all calls are in use")
        client, worker = started
        try:
            yield worker
        except BaseException as error:  # also KeyboardInterrupt
            self._retire(client, error.reason if isinstance(error, _CallFailed) else "")
            raise
        with self._lock:
            client.idle.append(worker)
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

    def _take(self) -> tuple[_Client, _Worker] | None:
        """Take an idle worker; None if all are busy. The caller holds the lock."""
        if self._closed:
            raise BackendLost("the store is closed")
        if self._current is None:
            if len(self._draining) >= _MAX_DRAINING:
                raise BackendLost(
                    f"mooncake {self._settings.master}: abandoned calls have not returned"
                )
            self._current = _Client(self._settings)
            self._counts["clients"] += 1
        worker = self._current.take_worker()
        return None if worker is None else (self._current, worker)

    def _retire(self, client: _Client, reason: str = "") -> None:
        """Stop using a client, and close it when its calls end."""
        with self._lock:
            if reason:
                self._counts[reason] += 1
            if self._current is client:
                self._current = None
            if client in self._draining or client.closed.is_set():
                return
            self._draining.append(client)
            self._changed.notify()
        thread = threading.Thread(
            target=self._drain, args=(client,), name="kvcupy-mooncake-drain", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # interpreter shutdown
            self._drain(client, _CLOSE_TIMEOUT_S)

    def _drain(self, client: _Client, wait_s: float | None = None) -> None:
        try:
            client.drain(wait_s)
        except Exception as error:  # the client keeps draining, with its buffers
            cache_logger.warning("cannot close a Mooncake client: %s", error)
            return
        with self._lock:
            self._draining.remove(client)
            self._changed.notify()


class _CallFailed(BackendLost):
    """A call after which the client must be replaced, and the counter of the reason."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Client:
    """A client of the store, with worker threads for its blocking calls.

    Attributes
    ----------
    idle : workers without a call
    closed : set once the client accesses no buffer any more
    """

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.idle: list[_Worker] = []
        self.closed = Latch()
        self._workers: list[_Worker] = []
        count = blocks_per_call(settings.num_bytes)
        self._rows = np.empty((_MAX_CONCURRENT_CALLS, count, settings.num_bytes), np.uint8)
        self._store: Any = None
        self._lock = threading.Lock()

    def take_worker(self) -> _Worker | None:
        """Return an idle worker, or None if all are busy. The caller holds the lock.

        BackendLost if the system cannot start another thread.
        """
        if self.idle:
            return self.idle.pop()
        if len(self._workers) == _MAX_CONCURRENT_CALLS:
            return None
        worker = _Worker(self, self._rows[len(self._workers)])
        try:
            worker.thread.start()
        except RuntimeError as error:  # thread limit of the system
            raise BackendLost(f"mooncake {self.settings.master}: {error}") from error
        self._workers.append(worker)
        return worker

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

    def drain(self, wait_s: float | None = None) -> None:
        """Wait for the calls, and close the client. TimeoutError after `wait_s` per worker."""
        for worker in self._workers:
            worker.jobs.put(None)
        for worker in self._workers:
            worker.thread.join(wait_s)
            if worker.thread.is_alive():
                raise TimeoutError("a call has not returned")
        if self._store is not None:
            self._store.close()
        self._store = None
        self.closed.set()


class _Job:
    """A call of the store."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call
        self._running = threading.Lock()  # cheaper than an Event
        self._running.acquire()
        self.is_abandoned = False
        self.codes: list[int] = []
        self.error: Exception | None = None

    def wait(self, deadline: float) -> bool:
        """Wait for the job; return whether it ended by the deadline. Called once."""
        seconds = max(0.0, deadline - time.monotonic())
        return self._running.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    def run(self, client: _Client) -> None:
        try:
            if not self.is_abandoned:
                store = client.store()
                if not self.is_abandoned:
                    self.codes = list(self._call(store))
        except Exception as error:
            self.error = error
        self._running.release()


class _Worker:
    """A thread that runs jobs one after the other, and its buffer.

    Attributes
    ----------
    rows : (blocks, bytes of a block)
    """

    def __init__(self, client: _Client, rows: Any) -> None:
        self._client, self.rows = client, rows
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="kvcupy-mooncake", daemon=True)

    def call(self, call: Callable[[Any], Any], deadline: float) -> list[int]:
        """Run a call of the store, which returns a code for each block.

        Raises
        ------
        BackendLost : the call failed or timed out, or may still be in progress
        """
        name, job = f"mooncake {self._client.settings.master}", _Job(call)
        self.jobs.put(job)  # before the None of `_Client.drain`
        if not job.wait(deadline):
            job.is_abandoned = True
            raise _CallFailed(f"{name}: no answer in time", "late")
        if job.error is not None:
            raise _CallFailed(f"{name}: {job.error}", "errors") from job.error
        if unsafe := [code for code in job.codes if code < 0 and code not in _SAFE_CODES]:
            # A dead node stays in the index for about 10 s.
            raise _CallFailed(f"{name}: code {unsafe[0]}", "failed_transfers")
        return job.codes

    def buffers(self, count: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and the lengths of the first rows, as the store expects them."""
        first, num_bytes = self.rows.ctypes.data, self.rows.shape[1]
        pointers = [[first + i * num_bytes] for i in range(count)]
        return pointers, [[num_bytes]] * count

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run(self._client)
