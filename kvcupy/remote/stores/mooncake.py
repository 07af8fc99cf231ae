"""Mooncake Store backend: transfers pages between the pool and the store's nodes without copies.

`kvcupy.SharedStore.open("mooncake://host:port", ...)` uses this module, which needs a wheel of
Mooncake and the system's libibverbs.

Notes
-----
Mooncake has no authentication and no encryption. Each process that uses it listens on two ports of
all interfaces, and any host that reaches them can read and write the memory registered there: a
node's segment, and with RDMA the pool. Use it only on networks where every host is trusted.
Mooncake logs to stderr; `MC_LOG_LEVEL=ERROR` limits it to errors. Unless already set in the
environment, `MC_STORE_CLIENT_SETUP_RETRIES` becomes 1 and `MC_RPC_TIMEOUT_MS` 5000.
Source: kvcache-ai/Mooncake `mooncake-store/include/types.h` for the codes.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from ...cache.hazards import Completion
from ...config import cache_logger
from ...errors import ProcessLocal, finalize
from ...extras import install
from ...waiting import Latch, Waiters
from ..wire import WirePages
from .backend import (
    FAILED,
    FULL,
    KNOWN,
    MAX_HEADER_BYTES,
    STORED,
    BackendLost,
    Block,
    SummedBlock,
)

_LENGTH_PREFIX_BYTES = 2  # in front of the header
_HEADER_BYTES = 256  # prefix, header and padding, in front of an object's payload
_MAX_STAGED_BYTES = 2**17  # block size up to which a copy is cheaper than a request per piece
_BLOCKS_PER_CALL, _STAGED_BLOCKS_PER_CALL = 512, 64
_BLOCKS_PER_GET = 32
_MAX_CONCURRENT_CALLS = 4
_MAX_DRAINING = 2
_CLOSE_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 2.0

# Retries, and timeout in ms, with which the store connects to its master.
_ENVIRONMENT = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_RPC_TIMEOUT_MS": "5000"}

# Error codes of the store.
_NO_SPACE, _EXISTS = -200, -705
# No transfer is in progress after these: no space, bad arguments, not ready, unknown, known,
# leased, lease expired, damaged, no answer from the master. After any other code, such as -800,
# bytes may still arrive.
_SAFE_CODES = frozenset((_NO_SPACE, -600, -703, -704, _EXISTS, -706, -707, -801, -900, -901))
_NO_MASTER = frozenset((-900, -901))
_OUTCOMES = {0: STORED, _EXISTS: KNOWN, _NO_SPACE: FULL}


class _Settings(NamedTuple):
    """Arguments for setting up a client of the store."""

    master: str
    host: str  # address under which other processes reach this one
    protocol: str
    devices: str
    regions: tuple[tuple[int, int], ...]  # (address, bytes) of memory to register


def open_backend(
    url: str, pages: WirePages, *, namespace: bytes, capacity_bytes: int | None, deadline: float,
    segment_bytes: int = 0, host: str | None = None, protocol: str = "tcp", devices: str = "",
) -> MooncakeBackend:  # fmt: skip
    """Connect to the master of a store.

    Parameters
    ----------
    url : "mooncake://host:port" of the master
    pages, namespace, deadline : as in `kvcupy.remote.stores.backend`
    capacity_bytes : must be None
    segment_bytes : memory that this process adds to the store until it closes the store. 0 makes
        it a pure client of other processes' memory
    host : name or address under which other processes reach this one. None uses the source address
        of packets to the master
    protocol, devices : "tcp", or "rdma" and the names of the RDMA devices

    Raises
    ------
    ImportError : Mooncake's wheel or the system's libibverbs is missing
    TypeError, ValueError : an argument is invalid
    BackendLost : the master did not answer in time
    """
    if capacity_bytes is not None:
        raise ValueError("capacity_bytes: expected None; set segment_bytes to add memory")
    if not isinstance(segment_bytes, int) or isinstance(segment_bytes, bool):
        raise TypeError(f"segment_bytes: expected an int, got {segment_bytes!r}")
    if segment_bytes < 0:
        raise ValueError(f"segment_bytes: expected at least 0, got {segment_bytes}")
    for name, value in (("url", url), ("protocol", protocol), ("devices", devices)):
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected a str, got {type(value).__name__}")
    if protocol not in ("tcp", "rdma"):
        raise ValueError(f"protocol: expected tcp or rdma, got {protocol!r}")
    if protocol == "rdma" and not pages.is_direct:
        raise ValueError(
            "host_pool: expected pages of large pieces for rdma, such as layout "
            f"page_first_direct, got {pages.num_pieces} in a page"
        )
    master = _master(url)
    _store_class()
    # TCP needs no registered memory, so the pool is not exposed to other hosts.
    regions = () if protocol == "tcp" else _regions(pages)
    settings = _Settings(master, host or _own_address(master), protocol, devices, regions)
    backend = MooncakeBackend(settings, namespace, pages, segment_bytes=segment_bytes)
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
        raise ValueError(f"url: expected mooncake://host:port, got {url!r}")
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


def _regions(pages: WirePages) -> tuple[tuple[int, int], ...]:
    """Return the memory of a pool as disjoint (address, bytes) ranges."""
    ranges: list[list[int]] = []
    for start, stop in sorted(
        part.byte_range() for part in (*pages.pool.parts, *pages.pool.scale_parts)
    ):
        if ranges and start <= ranges[-1][1]:
            ranges[-1][1] = max(stop, ranges[-1][1])
        else:
            ranges.append([start, stop])
    return tuple((start, stop - start) for start, stop in ranges)


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
    """Blocks as objects in a Mooncake Store: a header of 256 bytes, then the payload.

    Blocks of up to 128 KiB are staged in a buffer behind their headers: the store makes a request
    per piece, and a request takes longer than copying such a block.

    Store calls block, some for a minute. Each runs in a worker thread, and late calls are
    abandoned. An abandoned call, or a call that failed during a transfer, may still access the
    memory passed to it. The store client is then replaced, and closed after its last call ends.
    No bytes can arrive after that; `busy` waits for it.

    Parameters
    ----------
    settings : arguments for setting up clients
    namespace : key prefix, written in hexadecimal
    pages : kept alive; with RDMA their memory is registered
    segment_bytes : as in `open_backend`
    """

    blocks_per_get = _BLOCKS_PER_GET
    put_asks_first = True

    def __init__(
        self, settings: _Settings, namespace: bytes, pages: WirePages, *, segment_bytes: int = 0
    ) -> None:
        self._settings = settings
        self._prefix = f"kvcupy:{namespace.hex()}:"
        self._segment_bytes = segment_bytes
        is_staged = pages.block_bytes <= _MAX_STAGED_BYTES
        self.puts_pages_only = bool(settings.regions) and not is_staged
        self._clients = _Clients(settings, pages)
        # Also runs at interpreter exit: calls that return during shutdown would crash the process.
        self._finalizer = finalize(self, self._clients.close, _CLOSE_TIMEOUT_S, at_exit=True)

    def __repr__(self) -> str:
        return f"<MooncakeBackend of {self._settings.master}>"

    def connect(self, deadline: float) -> None:
        """Set up a client, and the segment of this process.

        Raises
        ------
        BackendLost : the setup failed or timed out
        """
        self._clients.call(lambda store, _: [0], (), (), deadline)
        if self._segment_bytes:
            self._clients.add_node(self._segment_bytes, deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        known = [False] * len(keys)
        for part in _parts(len(keys), _BLOCKS_PER_CALL):
            names = self._names(keys[part])
            codes = self._call(partial(_exist, names), (), (), deadline, known)
            known[part] = [code == 1 for code in codes]
            if min(codes) < 0:
                raise BackendLost(f"mooncake {self._settings.master}: code {min(codes)}", known)
        return known

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], headers: Sequence[bytes],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        outcomes = [FAILED] * len(keys)
        for part in _parts(len(keys), self._clients.blocks_per_call):
            names, pieces = self._names(keys[part]), blocks[part]
            call = partial(_put, names, headers[part], pieces)
            codes = self._call(call, keys[part], pieces, deadline, outcomes)
            outcomes[part] = [_OUTCOMES.get(code, FAILED) for code in codes]
            self._require_no_failure(codes, outcomes)
        return outcomes

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[bytes | None]:
        headers: list[bytes | None] = [None] * len(keys)
        # A late transfer of an abandoned call must not overwrite a block of this one.
        usable = [i for i, block in enumerate(blocks) if not self._clients.may_be_written(block)]
        for part in _parts(len(usable), self._clients.blocks_per_call):
            chosen = usable[part]
            chosen_keys, pieces = [keys[i] for i in chosen], [blocks[i] for i in chosen]
            rows: list[bytes] = []
            call = partial(_get, self._names(chosen_keys), pieces, rows)
            codes = self._call(call, chosen_keys, pieces, deadline, headers)
            for i, code, row, block in zip(chosen, codes, rows, pieces, strict=True):
                if code == _HEADER_BYTES + sum(piece.nbytes for piece in block):
                    headers[i] = _header(row)
            self._require_no_failure(codes, headers)
        if len(usable) < len(keys):
            raise BackendLost(
                "abandoned calls may still write to these pages", headers,
                repeatable=False,
            )  # fmt: skip
        return headers

    def busy(self, keys: Sequence[bytes]) -> _Quiet | None:
        return self._clients.busy(keys)

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        names = self._names(keys)
        self._call(lambda store, _: store.batch_remove(names, True), (), (), deadline, ())

    def remove(self, deadline: float) -> int:
        """Remove the blocks of this namespace, and return their number."""
        pattern = f"^{self._prefix}.*"
        (count,) = self._call(
            lambda store, _: [store.remove_by_regex(pattern, True)], (), (), deadline, ()
        )
        if count < 0:
            raise BackendLost(f"mooncake {self._settings.master}: code {count}")
        return count

    def stats(self) -> dict[str, int]:
        """Count clients that were set up and that are draining, and calls that were late, failed
        during a transfer, or failed otherwise."""
        return self._clients.stats()

    def close(self, wait_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Close the clients, and the segment of this process with its blocks.

        Calls that have not returned after `wait_s` are abandoned.
        """
        self._finalizer.detach()
        if not self._clients.close(wait_s) and wait_s:
            cache_logger.warning("%r: abandoned calls that have not returned", self)

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _call(
        self, call: _Call, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float,
        results: Sequence[Any],
    ) -> list[int]:  # fmt: skip
        """Make a store call, and attach `results` to BackendLost."""
        try:
            return self._clients.call(call, keys, blocks, deadline)
        except BackendLost as error:
            raise BackendLost(str(error), results) from error

    def _require_no_failure(self, codes: Iterable[int], results: Sequence[Any]) -> None:
        failures = [code for code in codes if _is_unsafe(code) or code in _NO_MASTER]
        if failures:
            # A dead node stays in the index for about 10 s, and each failure costs a client.
            raise BackendLost(
                f"mooncake {self._settings.master}: code {failures[0]}", results,
                repeatable=not any(map(_is_unsafe, failures)),
            )  # fmt: skip


# --- Store calls, with rows of memory for headers and for staged blocks behind them ---

_Call = Callable[[Any, Any], list[int]]  # (store, rows) -> codes


def _exist(names: list[str], store: Any, rows: Any) -> list[int]:
    return list(store.batch_is_exist(names))


def _put(
    names: list[str], contents: Sequence[bytes], blocks: Sequence[Block], store: Any, rows: Any
) -> list[int]:
    codes = list(store.batch_is_exist(names))
    if min(codes) < 0:
        return [min(codes)] * len(codes)
    # The store reports a put of a known key as stored.
    new = [i for i, known in enumerate(codes) if not known]
    codes = [_EXISTS if known else 0 for known in codes]
    if not new:
        return codes
    for row, i in zip(rows, new, strict=False):
        content = contents[i]
        if len(content) > MAX_HEADER_BYTES:
            raise ValueError(f"headers: expected {MAX_HEADER_BYTES} bytes, got {len(content)}")
        data = len(content).to_bytes(_LENGTH_PREFIX_BYTES, "little") + content
        memory = row.data
        memory[:_HEADER_BYTES] = data.ljust(_HEADER_BYTES, b"\0")
        if _is_staged(rows, blocks[i]):
            start = _HEADER_BYTES
            for piece in blocks[i]:
                memory[start : start + piece.nbytes] = piece
                start += piece.nbytes
    pointers, sizes = _addresses(rows, [blocks[i] for i in new])
    put_codes = store.batch_put_from_multi_buffers([names[i] for i in new], pointers, sizes)
    for i, code in zip(new, put_codes, strict=True):
        codes[i] = code
    return codes


def _get(
    names: list[str], blocks: Sequence[Block], headers: list[bytes], store: Any, rows: Any
) -> list[int]:
    pointers, sizes = _addresses(rows, blocks)
    codes = list(store.batch_get_into_multi_buffers(names, pointers, sizes))
    for row, block, code, lengths in zip(rows, blocks, codes, sizes, strict=False):
        memory = row.data
        headers.append(bytes(memory[:_HEADER_BYTES]))
        if code == sum(lengths) and _is_staged(rows, block):
            header = _header(headers[-1])
            update = block.begin(header) if isinstance(block, SummedBlock) else None
            start = _HEADER_BYTES
            for piece in block:
                piece[:] = memory[start : start + piece.nbytes]
                if update is not None:
                    update(piece)
                start += piece.nbytes
    return codes


def _is_staged(rows: Any, block: Block) -> bool:
    """Return whether rows have space for a block behind its header."""
    return bool(_HEADER_BYTES + sum(piece.nbytes for piece in block) <= rows.shape[1])


def _addresses(rows: Any, blocks: Sequence[Block]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the addresses and the lengths of header and pieces, for each block."""
    first, row_bytes = rows.ctypes.data, rows.shape[1]
    pointers, sizes = [], []
    for i, block in enumerate(blocks):
        lengths = [piece.nbytes for piece in block]
        row = first + i * row_bytes
        if _HEADER_BYTES + sum(lengths) <= row_bytes:
            pointers.append([row])
            sizes.append([_HEADER_BYTES + sum(lengths)])
        else:
            pointers.append([row, *map(_address, block)])
            sizes.append([_HEADER_BYTES, *lengths])
    return pointers, sizes


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])


def _header(row: bytes) -> bytes | None:
    """Parse a header; None if its length is invalid."""
    num_bytes = int.from_bytes(row[:_LENGTH_PREFIX_BYTES], "little")
    if num_bytes > MAX_HEADER_BYTES:
        return None
    return row[_LENGTH_PREFIX_BYTES : _LENGTH_PREFIX_BYTES + num_bytes]


def _is_unsafe(code: int) -> bool:
    """Return whether bytes may still arrive after a call that returned this code."""
    return code < 0 and code not in _SAFE_CODES


def _parts(count: int, at_once: int) -> list[slice]:
    return [slice(i, min(i + at_once, count)) for i in range(0, count, at_once)]


# --- Store clients and their worker threads ---


class _Clients:
    """The current client of the store, and retired clients that are draining."""

    def __init__(self, settings: _Settings, pages: WirePages) -> None:
        self._settings = settings
        self._pages = pages
        is_staged = pages.block_bytes <= _MAX_STAGED_BYTES
        self.blocks_per_call = _STAGED_BLOCKS_PER_CALL if is_staged else _BLOCKS_PER_CALL
        self._current: _Client | None = None
        self._node: _Client | None = None
        self._draining: list[_Client] = []
        self._closed = False
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._counts = {"clients": 0, "late": 0, "failed_transfers": 0, "errors": 0}

    def call(
        self, call: _Call, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[int]:
        """Run a store call in a worker thread, and return its codes.

        Parameters
        ----------
        call : function of the store and of rows for headers and small blocks
        keys, blocks : keys, and memory that the call accesses. The memory is kept alive until no
            access is possible

        Raises
        ------
        BackendLost : the call failed or timed out
        """
        job = _Job(call, keys, blocks)
        client, worker = self._begin(job, deadline)
        try:
            in_time = job.wait(deadline)
        except BaseException:  # such as KeyboardInterrupt
            self._retire(client, job)
            raise
        if not in_time:
            job.is_abandoned = True
            self._retire(client, job, "late")
            raise BackendLost(f"mooncake {self._settings.master}: no answer in time")
        if job.error is not None:
            self._retire(client, job, "errors")
            raise BackendLost(f"mooncake {self._settings.master}: {job.error}") from job.error
        if any(map(_is_unsafe, job.codes)):
            self._retire(client, job, "failed_transfers")
        else:
            self._give_back(client, worker)
        return job.codes

    def add_node(self, segment_bytes: int, deadline: float) -> None:
        """Set up a second client, which only provides a segment."""
        self._node = node = _Client(self._settings._replace(regions=()), segment_bytes, None)
        job = _Job(lambda store, _: [0], (), ())
        worker = node.take_worker()
        assert worker is not None
        worker.jobs.put(job)
        if not job.wait(deadline) or job.error is not None:
            reason = job.error or "no answer in time"
            raise BackendLost(f"mooncake {self._settings.master}: {reason}")

    def busy(self, keys: Sequence[bytes]) -> _Quiet | None:
        with self._lock:
            clients = [
                client
                for client in self._draining
                if any(not job.keys.isdisjoint(keys) for job in client.unsafe)
            ]
        return _Quiet(clients) if clients else None

    def may_be_written(self, block: Block) -> bool:
        """Return whether a retired client may still write to a block."""
        if not self._draining:
            return False
        start = _address(block[0])
        with self._lock:
            return any(start in job.addresses for client in self._draining for job in client.unsafe)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {**self._counts, "draining": len(self._draining)}

    def close(self, wait_s: float) -> bool:
        """Retire all clients; return whether they are closed within `wait_s`."""
        with self._lock:
            self._closed = True
            clients = [client for client in (self._current, self._node) if client is not None]
            self._node = None
        for client in clients:
            self._retire(client, None)
        return self._changed.wait_for(lambda: not self._draining, wait_s)

    def _begin(self, job: _Job, deadline: float) -> tuple[_Client, _Worker]:
        """Start a job on a worker of the current client; return both."""
        started = self._changed.wait_for(partial(self._start, job), deadline - time.monotonic())
        if started is None:
            raise BackendLost(f"mooncake {self._settings.master}: all calls are in use")
        return started

    def _start(self, job: _Job) -> tuple[_Client, _Worker] | None:
        """Start a job; None if all workers are busy. The caller holds the lock."""
        if self._closed:
            raise BackendLost("the store is closed")
        if self._current is None:
            if len(self._draining) >= _MAX_DRAINING:
                raise BackendLost(
                    f"mooncake {self._settings.master}: abandoned calls have not returned"
                )
            self._current = _Client(self._settings, 0, self._pages)
            self._counts["clients"] += 1
        worker = self._current.take_worker()
        if worker is None:
            return None
        worker.jobs.put(job)  # before the None of `_Client.drain`
        return self._current, worker

    def _give_back(self, client: _Client, worker: _Worker) -> None:
        with self._lock:
            client.idle.append(worker)
            self._changed.notify()

    def _retire(self, client: _Client, job: _Job | None, reason: str = "") -> None:
        """Stop using a client, and close it when its calls end."""
        with self._lock:
            if reason:
                self._counts[reason] += 1
            if job is not None:
                client.unsafe.append(job)
            if self._current is client:
                self._current = None
            if client in self._draining or client.quiet.is_set():
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
        except Exception as error:  # the client keeps draining, so its pages stay held back
            cache_logger.warning("cannot close a Mooncake client: %s", error)
            return
        with self._lock:
            self._draining.remove(client)
            self._changed.notify()


class _Client:
    """A client of the store, with worker threads for its blocking calls.

    Attributes
    ----------
    idle : workers without a call
    unsafe : jobs whose memory the client may still access; they keep it alive
    quiet : set once the client is closed and accesses no memory
    """

    def __init__(self, settings: _Settings, segment_bytes: int, pages: Any) -> None:
        self._settings = settings
        self._segment_bytes = segment_bytes
        self._pages = pages  # kept alive
        self.idle: list[_Worker] = []
        self.unsafe: list[_Job] = []
        self.quiet = Latch()
        self._workers: list[_Worker] = []
        shape = (_MAX_CONCURRENT_CALLS, _BLOCKS_PER_CALL, _HEADER_BYTES)
        if pages is not None and pages.block_bytes <= _MAX_STAGED_BYTES:
            staged_bytes = _HEADER_BYTES + pages.block_bytes
            shape = (_MAX_CONCURRENT_CALLS, _STAGED_BLOCKS_PER_CALL, staged_bytes)
        self._rows = np.zeros(shape, np.uint8)
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
            raise BackendLost(f"mooncake {self._settings.master}: {error}") from error
        self._workers.append(worker)
        return worker

    def store(self, job: _Job) -> Any:
        """Return the store; the first call sets it up."""
        with self._lock:
            if self._store is None:
                if not _is_alive(self._settings.master) or job.is_abandoned:
                    raise ConnectionError("no answer")
                self._store = self._set_up()
            return self._store

    def _set_up(self) -> Any:
        settings, store = self._settings, _store_class()()
        code = store.setup(
            settings.host, "P2PHANDSHAKE", self._segment_bytes, 0, settings.protocol,
            settings.devices, settings.master,
        )  # fmt: skip
        if code:
            raise ConnectionError(f"client setup failed, code {code}")
        rows = (self._rows.ctypes.data, self._rows.nbytes)
        for pointer, num_bytes in (*settings.regions, rows) if settings.regions else ():
            if code := store.register_buffer(pointer, num_bytes):
                store.close()
                raise OSError(f"cannot register the pool's memory, code {code}")
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
        self._store = self._pages = None
        self.unsafe.clear()
        self.quiet.set()


class _Job:
    """A call of the store."""

    def __init__(self, call: _Call, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        self._call = call
        self._blocks = blocks
        self.keys = frozenset(keys)
        self._running = threading.Lock()  # cheaper than an Event
        self._running.acquire()
        self.is_abandoned = False
        self.codes: list[int] = []
        self.error: Exception | None = None

    def wait(self, deadline: float) -> bool:
        """Wait for the job; return whether it ended by the deadline. Called once."""
        seconds = max(0.0, deadline - time.monotonic())
        return self._running.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    @cached_property
    def addresses(self) -> frozenset[int]:
        """Start addresses of the blocks."""
        return frozenset(_address(block[0]) for block in self._blocks)

    def run(self, client: _Client, rows: Any) -> None:
        try:
            store = client.store(self)
            if not self.is_abandoned:
                self.codes = self._call(store, rows)
        except Exception as error:
            self.error = error
        self._running.release()


class _Worker:
    """A thread that runs jobs one after the other."""

    def __init__(self, client: _Client, rows: Any) -> None:
        self._client, self._rows = client, rows
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="kvcupy-mooncake", daemon=True)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run(self._client, self._rows)
            del job  # releases the memory that the job kept alive


class _Quiet(Completion):
    """The Completion of calls that were abandoned, or that failed during a transfer."""

    failure = None
    unbounded = True  # a stopped peer may resume at any time, or never

    def __init__(self, clients: list[_Client]) -> None:
        self._clients = clients

    def done(self) -> bool:
        return all(client.quiet.is_set() for client in self._clients)

    def synchronize(self) -> None:
        for client in self._clients:
            client.quiet.wait()

    def wait(self, stream: Any = None) -> None:
        self.synchronize()
