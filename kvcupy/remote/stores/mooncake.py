"""Blocks in a Mooncake Store: pages go to its nodes, and come from them, where they lie.

`kvcupy.SharedStore.open("mooncake://host:port", ...)` uses this module, which needs a wheel of
Mooncake and the system's libibverbs.

Notes
-----
Mooncake has no authentication and no encryption. Each process that uses it listens on two ports of
all interfaces, and whoever reaches them reads and writes the memory that is registered there: that
of a node's segment, and with RDMA the pool's. Use it on networks where every host is trusted.
It logs to stderr, with `MC_LOG_LEVEL=ERROR` errors alone. Unless the environment has them,
`MC_STORE_CLIENT_SETUP_RETRIES` is set to 1 and `MC_RPC_TIMEOUT_MS` to 5000.
Source: kvcache-ai/Mooncake `mooncake-store/include/types.h` for the codes.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from ...config import cache_logger
from ...errors import ProcessLocal
from ...extras import install
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

_LENGTH_BYTES = 2  # of the header that follows
_HEADER_BYTES = 256  # of an object in front of its payload
_MAX_STAGED_BYTES = 2**17  # of blocks that go through a buffer: a request costs as much as a copy
_BLOCKS_PER_CALL, _STAGED_BLOCKS_PER_CALL = 512, 64
_BLOCKS_PER_GET = 32
_CALLS_AT_ONCE = 4
_MAX_DRAINING = 2
_CLOSE_S = 5.0
_MASTER_S = 2.0  # in which a master that is there hangs up

# How often, and for how many ms, the store tries to reach its master.
_ENVIRONMENT = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_RPC_TIMEOUT_MS": "5000"}

# Codes of the store.
_NO_ROOM, _EXISTS = -200, -705
# After these nothing is under way: bad arguments, not ready, unknown, known, leased, lease over,
# damaged, no answer of the master. After any other, such as -800, bytes may still arrive.
_QUIET = frozenset((_NO_ROOM, -600, -703, -704, _EXISTS, -706, -707, -801, -900, -901))
_NO_MASTER = frozenset((-900, -901))
_OUTCOMES = {0: STORED, _EXISTS: KNOWN, _NO_ROOM: FULL}


class _Settings(NamedTuple):
    """What a client of the store is set up with."""

    master: str
    host: str  # where other processes find this one
    protocol: str
    devices: str
    regions: tuple[tuple[int, int], ...]  # to register: addresses and bytes


def open_backend(
    url: str, pages: WirePages, *, namespace: bytes, capacity_bytes: int | None, deadline: float,
    segment_bytes: int = 0, host: str | None = None, protocol: str = "tcp", devices: str = "",
) -> MooncakeBackend:  # fmt: skip
    """Return the blocks of a store whose master answers.

    Parameters
    ----------
    url : "mooncake://host:port" of the master
    pages, namespace, deadline : as in `kvcupy.remote.stores.backend`
    capacity_bytes : None
    segment_bytes : memory of this process that becomes part of the store until it closes it. 0: it
        is only a client, and other processes have the memory
    host : the name or address by which other processes reach this one. None: the address that it
        reaches the master from
    protocol, devices : "tcp", or "rdma" and the names of its devices

    Raises
    ------
    ImportError : a wheel of Mooncake or the system's libibverbs is missing
    TypeError, ValueError : an argument does not fit
    BackendLost : no master has answered in time
    """
    if capacity_bytes is not None:
        raise ValueError("capacity_bytes: expected None; segment_bytes is what this process adds")
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
            "host_pool: expected pages of large pieces for rdma, such as those of the layout "
            f"page_first_direct, got {pages.num_pieces} in a page"
        )
    master = _master(url)
    _store_class()
    # Over TCP the memory of a caller need not be registered, and is out of the reach of others.
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
    """Return whether a master hangs up at once on what is no request, as one that runs does.

    Setting up a client would hold Python's lock until it has an answer, for 90 s if there is none.
    """
    host, port = master.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=_MASTER_S) as probe:
            probe.sendall(b"?")
            return not probe.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False


def _own_address(master: str) -> str:
    """Return the address that packets to the master are sent from; none are sent."""
    host, port = master.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError as error:
            raise BackendLost(f"mooncake {master}: {error}") from error
        return str(probe.getsockname()[0])


def _regions(pages: WirePages) -> tuple[tuple[int, int], ...]:
    """Return the memory of a pool as ranges that do not overlap: addresses and bytes."""
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
    # Setting a client up holds Python's lock: by default 90 s, should the master go just then.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return MooncakeDistributedStore


class MooncakeBackend(ProcessLocal):
    """Blocks as objects of a Mooncake Store: a header of 256 bytes, then the payload.

    Blocks of up to 128 KiB are copied to and from a buffer, where they are behind their headers:
    the store makes a request of each piece, which takes longer than the copy of such a block.

    Calls of the store block, some for a minute. Each runs in a thread of this class; one that is
    late is given up. It may still access the memory that it was called with, and so may one that
    failed while bytes were under way: then the client of the store is replaced, and closed when its
    last call is over. Nothing can land after that, which is what `busy` waits for.

    Parameters
    ----------
    settings : of the clients
    namespace : bytes that begin each key in hexadecimal
    pages : whose memory is registered, if any is, and kept alive
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
        self._clients = _Clients(settings, pages)
        # At the end of the process too: it would crash if calls came back while it ends.
        self._finalizer = weakref.finalize(self, self._clients.close, _CLOSE_S)

    def __repr__(self) -> str:
        return f"<MooncakeBackend of {self._settings.master}>"

    def connect(self, deadline: float) -> None:
        """Set up a client, and the segment of this process.

        Raises
        ------
        BackendLost : that has failed, or was not over in time
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
        # What arrives late must not replace what arrives now.
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
                "calls that were given up may still write to these pages", headers,
                repeatable=False,
            )  # fmt: skip
        return headers

    def busy(self, keys: Sequence[bytes]) -> _Quiet | None:
        return self._clients.busy(keys)

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        names = self._names(keys)
        self._call(lambda store, _: store.batch_remove(names, True), (), (), deadline, ())

    def remove(self, deadline: float) -> int:
        """Remove the blocks of this namespace; return how many there were."""
        pattern = f"^{self._prefix}.*"
        (count,) = self._call(
            lambda store, _: [store.remove_by_regex(pattern, True)], (), (), deadline, ()
        )
        if count < 0:
            raise BackendLost(f"mooncake {self._settings.master}: code {count}")
        return count

    def stats(self) -> dict[str, int]:
        """Return how many clients were set up and are still draining, and calls that were late or
        failed with bytes under way."""
        return self._clients.stats()

    def close(self, wait_s: float = _CLOSE_S) -> None:
        """Close the clients, and the segment of this process with what it holds.

        Calls that do not come back are left to end by themselves.
        """
        self._finalizer.detach()
        if not self._clients.close(wait_s) and wait_s:
            cache_logger.warning("%r: calls of the store have not come back; left behind", self)

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _call(
        self, call: _Call, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float,
        results: Sequence[Any],
    ) -> list[int]:  # fmt: skip
        """Return the codes that a call of the store returned."""
        try:
            return self._clients.call(call, keys, blocks, deadline)
        except BackendLost as error:
            raise BackendLost(str(error), results) from error

    def _require_no_failure(self, codes: Iterable[int], results: Sequence[Any]) -> None:
        failures = [code for code in codes if _is_unsafe(code) or code in _NO_MASTER]
        if failures:
            # A node that died stays in the index for some 10 s, and each failure costs a client.
            raise BackendLost(
                f"mooncake {self._settings.master}: code {failures[0]}", results,
                repeatable=not any(map(_is_unsafe, failures)),
            )  # fmt: skip


# --- Calls of the store, with memory for headers, and for small blocks behind them ---

_Call = Callable[[Any, Any], list[int]]  # returns codes


def _exist(names: list[str], store: Any, rows: Any) -> list[int]:
    return list(store.batch_is_exist(names))


def _put(
    names: list[str], contents: Sequence[bytes], blocks: Sequence[Block], store: Any, rows: Any
) -> list[int]:
    codes = list(store.batch_is_exist(names))
    if min(codes) < 0:
        return [min(codes)] * len(codes)
    # A put of a known key is answered as if it were stored.
    new = [i for i, known in enumerate(codes) if not known]
    codes = [_EXISTS if known else 0 for known in codes]
    if not new:
        return codes
    for row, i in zip(rows, new, strict=False):
        content = contents[i]
        if len(content) > MAX_HEADER_BYTES:
            raise ValueError(f"headers: expected {MAX_HEADER_BYTES} bytes, got {len(content)}")
        data = len(content).to_bytes(_LENGTH_BYTES, "little") + content
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
            update = block.begin() if isinstance(block, SummedBlock) else None
            start = _HEADER_BYTES
            for piece in block:
                piece[:] = memory[start : start + piece.nbytes]
                if update is not None:
                    update(piece)
                start += piece.nbytes
    return codes


def _is_staged(rows: Any, block: Block) -> bool:
    """Return whether a block has room behind its header."""
    return bool(_HEADER_BYTES + sum(piece.nbytes for piece in block) <= rows.shape[1])


def _addresses(rows: Any, blocks: Sequence[Block]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the addresses and lengths of header and pieces, for each block."""
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
    """Return the header in what was stored in front of a payload, None if there is none."""
    num_bytes = int.from_bytes(row[:_LENGTH_BYTES], "little")
    if num_bytes > MAX_HEADER_BYTES:
        return None
    return row[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes]


def _is_unsafe(code: int) -> bool:
    """Return whether bytes may still arrive after a call has returned this code."""
    return code < 0 and code not in _QUIET


def _parts(count: int, at_once: int) -> list[slice]:
    return [slice(i, min(i + at_once, count)) for i in range(0, count, at_once)]


# --- Clients of the store, and threads ---


class _Clients:
    """The client of the store that is in use, and those that are no longer."""

    def __init__(self, settings: _Settings, pages: WirePages) -> None:
        self._settings = settings
        self._pages = pages
        is_staged = pages.block_bytes <= _MAX_STAGED_BYTES
        self.blocks_per_call = _STAGED_BLOCKS_PER_CALL if is_staged else _BLOCKS_PER_CALL
        self._current: _Client | None = None
        self._node: _Client | None = None
        self._draining: list[_Client] = []
        self._closed = False
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._counts = {"clients": 0, "late": 0, "failed_transfers": 0, "errors": 0}

    def call(
        self, call: _Call, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[int]:
        """Return what a call in another thread returns.

        Parameters
        ----------
        call : of the store and of memory for headers and small blocks
        keys, blocks : whose memory it accesses, which is kept alive as long as it may

        Raises
        ------
        BackendLost : it failed, or was not over in time
        """
        job = _Job(call, keys, blocks)
        client, lane = self._begin(job, deadline)
        try:
            in_time = job.wait(deadline)
        except BaseException:  # such as KeyboardInterrupt
            self._retire(client, job)
            raise
        if not in_time:
            job.is_given_up = True
            self._retire(client, job, "late")
            raise BackendLost(f"mooncake {self._settings.master}: it did not answer in time")
        if job.error is not None:
            self._retire(client, job, "errors")
            raise BackendLost(f"mooncake {self._settings.master}: {job.error}") from job.error
        if any(map(_is_unsafe, job.codes)):
            self._retire(client, job, "failed_transfers")
        else:
            self._give_back(client, lane)
        return job.codes

    def add_node(self, segment_bytes: int, deadline: float) -> None:
        """Set up another client that has a segment, and is never called."""
        self._node = node = _Client(self._settings._replace(regions=()), segment_bytes, None)
        job = _Job(lambda store, _: [0], (), ())
        lane = node.take_lane()
        assert lane is not None
        lane.jobs.put(job)
        if not job.wait(deadline) or job.error is not None:
            reason = job.error or "it did not answer in time"
            raise BackendLost(f"mooncake {self._settings.master}: {reason}")

    def busy(self, keys: Sequence[bytes]) -> _Quiet | None:
        with self._changed:
            clients = [
                client
                for client in self._draining
                if any(not job.keys.isdisjoint(keys) for job in client.unsafe)
            ]
        return _Quiet(clients) if clients else None

    def may_be_written(self, block: Block) -> bool:
        """Return whether bytes may still arrive where a block is."""
        if not self._draining:
            return False
        start = _address(block[0])
        with self._changed:
            return any(start in job.addresses for client in self._draining for job in client.unsafe)

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {**self._counts, "draining": len(self._draining)}

    def close(self, wait_s: float) -> bool:
        """Let all clients be closed when their calls are over; return whether they are by then."""
        if os.getpid() != self._pid:  # its threads are the parent's
            return True
        with self._changed:
            self._closed = True
            clients = [client for client in (self._current, self._node) if client is not None]
            self._node = None
        for client in clients:
            self._retire(client, None)
        with self._changed:
            return self._changed.wait_for(lambda: not self._draining, wait_s)

    def _begin(self, job: _Job, deadline: float) -> tuple[_Client, _Lane]:
        """Let a thread run a call; return it and its client."""
        if os.getpid() != self._pid:
            raise BackendLost("the store was opened in another process; open it in each")
        with self._changed:
            while True:
                if self._closed:
                    raise BackendLost("the store is closed")
                if self._current is None:
                    if len(self._draining) >= _MAX_DRAINING:
                        raise BackendLost(
                            f"mooncake {self._settings.master}: calls that were given up have not "
                            f"come back"
                        )
                    self._current = _Client(self._settings, 0, self._pages)
                    self._counts["clients"] += 1
                if (lane := self._current.take_lane()) is not None:
                    lane.jobs.put(job)  # before anything that `_Client.drain` puts there
                    return self._current, lane
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    raise BackendLost(f"mooncake {self._settings.master}: all calls are in use")

    def _give_back(self, client: _Client, lane: _Lane) -> None:
        with self._changed:
            client.idle.append(lane)
            self._changed.notify()

    def _retire(self, client: _Client, job: _Job | None, reason: str = "") -> None:
        """Use a client no more, and close it when its calls are over."""
        with self._changed:
            if reason:
                self._counts[reason] += 1
            if job is not None:
                client.unsafe.append(job)
            if self._current is client:
                self._current = None
            if client in self._draining or client.quiet.is_set():
                return
            self._draining.append(client)
            self._changed.notify_all()
        thread = threading.Thread(
            target=self._drain, args=(client,), name="kvcupy-mooncake-drain", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            self._drain(client, _CLOSE_S)

    def _drain(self, client: _Client, wait_s: float | None = None) -> None:
        try:
            client.drain(wait_s)
        except Exception as error:  # it stays among those that are not quiet
            cache_logger.warning("a client of Mooncake could not be closed: %s", error)
            return
        with self._changed:
            self._draining.remove(client)
            self._changed.notify_all()


class _Client:
    """A client of the store, with threads that wait for its calls.

    Attributes
    ----------
    idle : threads without a call
    unsafe : calls whose memory it may still access, which they keep alive
    quiet : set when it is closed: it accesses no memory any more
    """

    def __init__(self, settings: _Settings, segment_bytes: int, pages: Any) -> None:
        self._settings = settings
        self._segment_bytes = segment_bytes
        self._pages = pages  # kept alive
        self.idle: list[_Lane] = []
        self.unsafe: list[_Job] = []
        self.quiet = threading.Event()
        self._lanes: list[_Lane] = []
        shape = (_CALLS_AT_ONCE, _BLOCKS_PER_CALL, _HEADER_BYTES)
        if pages is not None and pages.block_bytes <= _MAX_STAGED_BYTES:
            staged_bytes = _HEADER_BYTES + pages.block_bytes
            shape = (_CALLS_AT_ONCE, _STAGED_BLOCKS_PER_CALL, staged_bytes)
        self._rows = np.zeros(shape, np.uint8)
        self._store: Any = None
        self._lock = threading.Lock()

    def take_lane(self) -> _Lane | None:
        """Return a thread without a call, or None if all have one. Called with a lock held.

        BackendLost if the system has no more threads.
        """
        if self.idle:
            return self.idle.pop()
        if len(self._lanes) == _CALLS_AT_ONCE:
            return None
        lane = _Lane(self, self._rows[len(self._lanes)])
        try:
            lane.start()
        except RuntimeError as error:  # the system has no more threads
            raise BackendLost(f"mooncake {self._settings.master}: {error}") from error
        self._lanes.append(lane)
        return lane

    def store(self, job: _Job) -> Any:
        """Return the store, set up by the first call."""
        with self._lock:
            if self._store is None:
                if not _is_alive(self._settings.master) or job.is_given_up:
                    raise ConnectionError("it does not answer")
                self._store = self._set_up()
            return self._store

    def _set_up(self) -> Any:
        settings, store = self._settings, _store_class()()
        code = store.setup(
            settings.host, "P2PHANDSHAKE", self._segment_bytes, 0, settings.protocol,
            settings.devices, settings.master,
        )  # fmt: skip
        if code:
            raise ConnectionError(f"its client could not be set up, code {code}")
        rows = (self._rows.ctypes.data, self._rows.nbytes)
        for pointer, num_bytes in (*settings.regions, rows) if settings.regions else ():
            if code := store.register_buffer(pointer, num_bytes):
                store.close()
                raise OSError(f"memory of the pool could not be registered, code {code}")
        return store

    def drain(self, wait_s: float | None = None) -> None:
        """Wait for the calls, and close the client. TimeoutError if that takes too long."""
        for lane in self._lanes:
            lane.jobs.put(None)
        for lane in self._lanes:
            lane.join(wait_s)
            if lane.is_alive():
                raise TimeoutError("a call has not come back")
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
        self.is_given_up = False
        self.codes: list[int] = []
        self.error: Exception | None = None

    def wait(self, deadline: float) -> bool:
        """Wait until it is over; return whether it is by the deadline. Called once."""
        seconds = max(0.0, deadline - time.monotonic())
        return self._running.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    @cached_property
    def addresses(self) -> frozenset[int]:
        """Where its blocks start."""
        return frozenset(_address(block[0]) for block in self._blocks)

    def run(self, client: _Client, rows: Any) -> None:
        try:
            store = client.store(self)
            if not self.is_given_up:
                self.codes = self._call(store, rows)
        except Exception as error:
            self.error = error
        self._running.release()


class _Lane(threading.Thread):
    """A thread that runs one call after the other."""

    def __init__(self, client: _Client, rows: Any) -> None:
        super().__init__(name="kvcupy-mooncake", daemon=True)
        self._rows = rows
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._client = client

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run(self._client, self._rows)
            del job  # with the memory that it kept alive


class _Quiet:
    """The Completion of calls that were given up, or failed with bytes under way."""

    failure = None
    unbounded = True  # a peer that has stopped may go on at any time, or never

    def __init__(self, clients: list[_Client]) -> None:
        self._clients = clients

    def done(self) -> bool:
        return all(client.quiet.is_set() for client in self._clients)

    def synchronize(self) -> None:
        for client in self._clients:
            client.quiet.wait()

    def wait(self, stream: Any = None) -> None:
        self.synchronize()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self.synchronize()
