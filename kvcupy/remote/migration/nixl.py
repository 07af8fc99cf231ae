"""The engine "nixl" of page migration: the receiver reads the sender's pages through NIXL.

    sender     metadata, pages | layers 0-3, 4-7 are ready |         | checksum 0-3 |         | ...
    receiver                                    | READ 0-3 | READ 4-7               | READ 8-11

NIXL is one-sided: it reads the sender's pages without the sender's involvement, by RDMA, shared
memory or TCP, as chosen by UCX. A layer is therefore complete only when the sender confirms, after
the READ, that the offer still held its pages, and sends their checksum. An abandoned READ may still
write later: its pages stay in quarantine until the READ has ended (`Reading.done`).
Checksums cost more than READs that are memory copies, so they are kept off the critical path: a
thread of the sender computes them ahead of pulls, and the receiver verifies some MiB while it reads
the next.
NIXL unpickles nothing from a peer: addresses are numbers, and the opaque metadata of the sender's
agent comes over the authenticated connection. The receiver sends no metadata, so that peers cannot
access its memory.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...cache.pool import Pool
from ...config import cache_logger
from ...errors import TransferError
from ...waiting import Waiters
from .nixl_agents import (
    Addresses,
    Agent,
    BlockAddresses,
    Process,
    Reading,
    Regions,
    blocks_of,
    cut,
)
from .protocol import (
    BEST_ALGORITHM,
    CHECKSUM,
    LAYER,
    READ,
    RENEW,
    Lost,
    new_checksum,
)

if TYPE_CHECKING:
    from .engines import Offered, PullTask, Service

_FIRST_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3
# Ready layers form groups of _GROUP_BYTES, or of 1 / _MAX_GROUPS of all layers if that is more.
# Larger groups give READs longer contiguous pieces, but delay the first layer.
_GROUP_BYTES = 16 << 20
_MAX_GROUPS = 4
_READ_BYTES = 8 << 20  # verified while the next READ is in flight
_MAX_READS, _MAX_PREPARED = 4, 64  # per pull
_HASH_CHUNK_BYTES = 1 << 20  # between checks for the end of the offer
_READY_POLL_S, _MAX_READY_POLL_S = 2e-3, 32e-3
_MAX_PAGES_PER_MESSAGE = 1 << 16
_MAX_CACHED_PEERS = 16
_MAX_VERIFIERS = 4  # threads, shared by all pulls
_READ_DRAIN_TIMEOUT_S = 60.0  # time for which the sender polls after a broken pull
_LAYERS = struct.Struct(">II?Q")  # first layer, number of layers, whether by page, total bytes
_CHECKSUM = struct.Struct(">Q")
_COUNT = struct.Struct(">I")  # of the page numbers after it; short messages are padded
_MESSAGE_POLL_S = 0.1


@dataclass(frozen=True)
class Peer:
    """A sender's description for receivers: NIXL metadata, its process, and block addresses."""

    metadata: bytes
    process: Process
    regions: Regions

    def encoded(self) -> bytes:
        described = {
            "metadata": base64.b64encode(self.metadata).decode(),
            "process": asdict(self.process),
            "regions": {
                field.name: getattr(self.regions, field.name).tolist()
                for field in fields(self.regions)
            },
        }
        return json.dumps(described, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, encoded: bytes) -> Peer:
        """Decode a description; Lost if malformed. NIXL checks that addresses are registered."""
        try:
            described = json.loads(encoded)
            process = Process(**described["process"])
            if [type(v) for v in asdict(process).values()] != [str, str, int, int]:
                raise TypeError("invalid process description")
            regions = Regions(**{n: _table(t) for n, t in described["regions"].items()})
            return cls(base64.b64decode(described["metadata"], validate=True), process, regions)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Lost(f"invalid description of the sender: {error!r:.200}") from None


def _table(rows: Any) -> Addresses:
    """Convert lists of addresses to an array; ValueError or TypeError if invalid."""
    for value in itertools.chain.from_iterable(rows):
        if type(value) is not int or not -(2**62) < value < 2**62:
            raise ValueError(f"{value!r:.40} is not an address")
    return np.array(rows, np.int64)


# --- The checksums of a sender ---


def _new_checksum(algorithm: int, of: Offered | PullTask, layers: range) -> Any:
    return new_checksum(algorithm, of.key, of.number, of.generation, layers.start, len(layers))


class _LayerGroup:
    """Layers of an offer with one announcement and one checksum.

    Attributes
    ----------
    layers
    num_bytes : total bytes of their pages
    named : packed description of the group in messages
    """

    def __init__(
        self, offered: Offered, blocks: BlockAddresses, layers: range, algorithm: int
    ) -> None:
        self.layers = layers
        self.num_bytes = len(layers) * len(offered.pages) * blocks.layer_bytes
        is_by_page = blocks.regions.is_by_page
        self.named = _LAYERS.pack(layers.start, len(layers), is_by_page, self.num_bytes)
        self._offered, self._blocks, self._algorithm = offered, blocks, algorithm
        self._lock = threading.Lock()
        self._digest: int | None = None

    def digest(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Return the checksum of the group's pages, computed once.

        Calls `meanwhile` repeatedly during the computation.

        Raises
        ------
        TransferError : the offer has ended
        """
        while not self._lock.acquire(timeout=_MAX_PAUSE_S):
            meanwhile()
        try:
            if self._digest is None:
                self._digest = self._calculate(meanwhile)
            return self._digest
        finally:
            self._lock.release()

    def _calculate(self, meanwhile: Callable[[], None]) -> int:
        offered, regions = self._offered, self._blocks.regions
        pages = offered.pages
        checksum = _new_checksum(self._algorithm, offered, self.layers)
        blocks = blocks_of(regions, pages, regions, pages, self.layers, by_page=regions.is_by_page)
        addresses, _, sizes, ends = cut(*blocks, _HASH_CHUNK_BYTES)
        views = self._blocks.views(addresses, sizes)
        for start, stop in itertools.pairwise((0, *ends)):
            offered.check()
            meanwhile()
            for view in views[start:stop]:
                checksum.update(view)
        digest: int = checksum.intdigest()
        return digest


class _LayerGroups:
    """Groups of the layers of an offer, with checksums of one algorithm.

    The size of a group is fixed when its first layer is requested.
    """

    def __init__(self, offered: Offered, blocks: BlockAddresses, algorithm: int) -> None:
        self._offered, self._blocks, self._algorithm = offered, blocks, algorithm
        layer_bytes = max(1, len(offered.pages) * blocks.layer_bytes)
        share = offered.pool.num_layers // _MAX_GROUPS
        self._max_layers = max(1, _GROUP_BYTES // layer_bytes, share)
        self._lock = threading.Lock()
        self._groups: dict[int, _LayerGroup] = {}  # by first layer
        self._next = 0  # first layer without a checksum

    def beginning_with(self, first: int) -> _LayerGroup | None:
        """Return the group that starts with a layer, or None if the layer is not ready.

        Raises
        ------
        TransferError : the write of the layer has failed
        """
        with self._lock:
            if first not in self._groups:
                end = min(first + self._max_layers, self._offered.pool.num_layers)
                stop = first
                while stop < end and self._offered.is_ready(stop):
                    stop += 1
                if stop == first:
                    return None
                self._groups[first] = _LayerGroup(
                    self._offered, self._blocks, range(first, stop), self._algorithm
                )
            return self._groups[first]

    @property
    def is_complete(self) -> bool:
        return self._next == self._offered.pool.num_layers

    def advance(self) -> bool:
        """Compute the next checksum; return False if its layer is not ready.

        Raises
        ------
        TransferError : the offer has ended
        """
        with self._offered.reading():
            group = self.beginning_with(self._next)
            if group is None:
                return False
            group.digest()
        self._next = group.layers.stop
        return True


class _ChecksumWorker:
    """A thread that computes checksums of offers before pulls request them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._thread: threading.Thread | None = None
        self._offers: list[_LayerGroups] = []
        self._closed = False

    def add(self, groups: _LayerGroups) -> None:
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work, name="kvcupy-nixl checksums", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # thread limit of the system: pulls compute the checksums
                    return
                self._thread = thread
            self._changed.notify()
            self._offers.append(groups)

    def close(self, deadline: float) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify()
        if self._thread not in (None, threading.current_thread()):  # it may run `release`
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        pause_s = _READY_POLL_S
        while True:
            self._changed.wait_for(lambda: self._offers or self._closed)
            with self._lock:
                if self._closed:
                    self._offers.clear()
                    return
                offers = list(self._offers)
            moved = False
            for groups in offers:
                try:
                    moved |= groups.advance()
                    is_over = groups.is_complete
                except Exception:  # the offer has ended; pulls report other errors
                    is_over = True
                if is_over:
                    with self._lock:
                        self._offers.remove(groups)
            num_left = len(self._offers)
            del offers, groups  # drops references to ended offers
            if (
                moved
                or not num_left
                or self._changed.wait_for(partial(self._has_news, num_left), pause_s)
            ):
                pause_s = _READY_POLL_S
            else:
                pause_s = min(2 * pause_s, _MAX_READY_POLL_S)

    def _has_news(self, num_offers: int) -> bool:
        return self._closed or len(self._offers) != num_offers


# --- The checksums and the READs of a receiver ---


class _Verification:
    """The checksums of a pull, computed in order by one thread at a time.

    A thread of `executor` computes them while the pull has READs to begin, else the pull's thread.
    """

    def __init__(self, task: PullTask, blocks: BlockAddresses, executor: futures.Executor) -> None:
        self._task, self._blocks, self._executor = task, blocks, executor
        self._lock = threading.RLock()  # guards the next four fields
        self._changed = Waiters(self._lock)
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_working = False
        self._is_submitted = False  # whether `executor` has a pending `_work`
        self._failure: BaseException | None = None
        # Used only by the working thread:
        self._checksum: Any = None  # of the layers being read
        self._digests: deque[int] = deque()  # of layers without the sender's checksum

    def add_bytes(
        self, layers: range, addresses: Addresses, sizes: Addresses, *, is_last: bool
    ) -> None:
        """Queue received bytes of some layers for hashing; `is_last` ends the layers."""
        self._add(partial(self._hash, layers, addresses, sizes, is_last=is_last))

    def add_expected(self, layers: range, expected: int) -> None:
        """Queue the comparison with the sender's checksum of received layers."""
        self._add(partial(self._compare, layers, expected))

    def submit(self) -> None:
        """Start queued jobs on a thread of `executor`; raise the error of a failed job."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_working or self._is_submitted or not self._jobs:
                return
            self._is_submitted = True
        # If no new thread can start, an existing one or the pull's thread runs the jobs.
        with contextlib.suppress(RuntimeError):
            self._executor.submit(self._work)

    def run_next(self) -> bool:
        """Run the next job; raise the error of a failed job.

        Return False if no job is queued, or another thread is working.
        """
        has_run = self._run_next()
        if self._failure is not None:
            raise self._failure
        return has_run

    def finish(self) -> None:
        """Run and wait for all jobs; raise the error of a failed job or of the pull."""
        while not self._is_finished():
            self._task.keep()
            if not self.run_next():
                pause_s = min(_MESSAGE_POLL_S, self._task.next_keep_s)
                self._changed.wait_for(lambda: not self._is_working, pause_s)
        self.run_next()

    def stop(self) -> None:
        """Drop queued jobs, and wait until no thread is working."""
        with self._lock:
            self._jobs.clear()
        self._changed.wait_for(lambda: not self._is_working)

    def _is_finished(self) -> bool:
        with self._lock:
            return not (self._jobs or self._is_working)

    def _add(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append(job)

    def _work(self) -> None:
        with self._lock:
            self._is_submitted = False
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next job; return False if another thread is working, or no job can run."""
        with self._lock:
            if self._is_working or self._failure is not None or not self._jobs:
                return False
            self._is_working = True
            job = self._jobs.popleft()
        failure: BaseException | None = None
        try:
            job()
        except BaseException as error:
            failure = error
        with self._lock:
            self._failure = failure
            self._is_working = False
            self._changed.notify()
        return True

    def _hash(
        self, layers: range, addresses: Addresses, sizes: Addresses, *, is_last: bool
    ) -> None:
        if self._checksum is None:
            self._checksum = _new_checksum(self._task.channel.algorithm, self._task, layers)
        self._task.check()
        for view in self._blocks.views(addresses, sizes):
            self._checksum.update(view)
        if is_last:
            self._digests.append(self._checksum.intdigest())
            self._checksum = None

    def _compare(self, layers: range, expected: int) -> None:
        if self._digests.popleft() != expected:
            last = f" to {layers[-1]}" if len(layers) > 1 else ""
            raise TransferError(f"layer {layers[0]}{last}: checksum mismatch", "corrupt")
        for layer in layers:
            self._task.arrived(layer)


class _Read(NamedTuple):
    """A READ, and its destination."""

    reading: Reading
    layers: range
    addresses: Addresses  # of local blocks
    sizes: Addresses
    named: bytes  # `_LayerGroup.named` if this is the last READ of the group, else empty


class _Reader:
    """Reads the layers of a pull as the sender announces them."""

    def __init__(
        self, task: PullTask, agent: Agent, blocks: BlockAddresses, peer: Peer, name: Any,
        pages: Addresses, verification: _Verification,
    ) -> None:  # fmt: skip
        self._task, self._agent, self._blocks = task, agent, blocks
        self._peer, self._name, self._pages = peer, name, pages
        self._verification = verification
        self._named: deque[bytes] = deque()  # announced groups without prepared READs
        self._prepared: deque[_Read] = deque()
        self._begun: deque[_Read] = deque()
        self._unconfirmed: deque[_Read] = deque()  # last READs of groups without a checksum
        self._num_named = self._num_confirmed = 0  # numbers of layers

    def run(self) -> None:
        """Read and verify all layers."""
        task, pause_s = self._task, 0.0
        while self._num_confirmed < task.pool.num_layers:
            task.keep()
            has_moved = self._end_read() or self._begin_read()
            if self._begun or self._prepared:
                self._verification.submit()
                pause_s = 0.0 if has_moved else min(2 * pause_s or _FIRST_PAUSE_S, _MAX_PAUSE_S)
            elif has_moved or self._verification.run_next():
                pause_s = 0.0
            else:
                pause_s = min(_MESSAGE_POLL_S, task.next_keep_s)
            if task.channel.readable(pause_s):
                self._hear()
                while task.channel.readable(0):  # ready layers are announced together
                    self._hear()
        self._verification.finish()

    def pending(self) -> list[Reading]:
        """Return the READs that may still write, in any order."""
        return [read.reading for read in list(self._begun) if not read.reading.done()]

    def drop(self) -> None:
        """Release prepared READs; no READ may be pending."""
        for read in self._prepared:
            read.reading.drop()

    def _end_read(self) -> bool:
        """Process the end of the oldest READ; return whether it has ended."""
        if not self._begun:
            return False
        read = self._begun[0]
        is_over, failure = read.reading.done(), read.reading.failure
        if failure is not None:
            raise TransferError(f"NIXL: {failure}", "lost") from failure
        if not is_over:
            return False
        self._begun.popleft()
        self._verification.add_bytes(
            read.layers, read.addresses, read.sizes, is_last=bool(read.named)
        )
        if read.named:
            task = self._task
            task.channel.num_bytes += self._bytes_of(len(read.layers))
            task.channel.send(READ, read.named, task.deadline)
            self._unconfirmed.append(read)
        return True

    def _begin_read(self) -> bool:
        """Start the next READ, unless none is left or `_MAX_READS` are in flight."""
        while self._named and len(self._prepared) < _MAX_PREPARED:
            self._prepare(self._named.popleft())
        if not self._prepared or len(self._begun) == _MAX_READS:
            return False
        self._begun.append(self._prepared.popleft())  # from now on, `close` waits for the READ
        self._agent.begin(self._begun[-1].reading)
        return True

    def _prepare(self, named: bytes) -> None:
        """Prepare all READs of a group before the first starts, since READs that are memory copies
        evict this code from the CPU cache."""
        first, count, by_page, _ = _LAYERS.unpack(named)
        layers = range(first, first + count)
        local, remote, sizes = blocks_of(
            self._blocks.regions, self._task.pages, self._peer.regions, self._pages, layers,
            by_page=by_page,
        )  # fmt: skip
        local, remote, sizes, ends = cut(local, remote, sizes, _READ_BYTES)
        bounds = list(itertools.pairwise((0, *ends)))
        try:
            readings = self._agent.prepare(
                self._name, self._peer.process, local, remote, sizes, bounds
            )
        except Exception as error:  # as in Agent.begin
            raise TransferError(f"NIXL cannot prepare a READ: {error}", "lost") from error
        for reading, (start, stop) in zip(readings, bounds, strict=True):
            is_last = stop == len(sizes)
            self._prepared.append(
                _Read(
                    reading, layers, local[start:stop], sizes[start:stop],
                    named if is_last else b"",
                )
            )  # fmt: skip

    def _bytes_of(self, num_layers: int) -> int:
        return num_layers * len(self._task.pages) * self._blocks.layer_bytes

    def _hear(self) -> None:
        """Process a message: an announcement of layers, or a checksum."""
        task = self._task
        kind, payload = task.channel.receive(task.deadline, LAYER, CHECKSUM)
        if len(payload) < _LAYERS.size:
            raise Lost("truncated message of the sender")
        named, checksum = payload[: _LAYERS.size], payload[_LAYERS.size :]
        first, count, _, num_bytes = _LAYERS.unpack(named)
        if kind == LAYER:
            if first != self._num_named or not 0 < count <= task.pool.num_layers - first:
                raise Lost("the sender announced unexpected layers")
            if num_bytes != self._bytes_of(count):
                raise Lost("the sender announced layers of another size")
            self._named.append(named)
            self._num_named += count
            return
        if not self._unconfirmed or self._unconfirmed[0].named != named:
            raise Lost("the sender confirmed unexpected layers")
        if len(checksum) != _CHECKSUM.size:
            raise Lost("the sender sent no checksum")
        layers = self._unconfirmed.popleft().layers
        self._verification.add_expected(layers, *_CHECKSUM.unpack(checksum))
        self._num_confirmed += len(layers)


# --- The engine ---


class NixlEngine:
    """The engine "nixl": the receiver READs the sender's pages.

    Parameters
    ----------
    pool : in host-addressable memory, with layout "layer_first" or "page_first_direct"

    Raises
    ------
    ValueError : the pool has other memory or another layout
    ImportError : NIXL is not installed
    """

    name = "nixl"
    staged = False
    bounded = False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks = BlockAddresses(pool)
        self._agent = Agent(self._blocks)
        # Readers whose READs may be in flight, and their peers, by pull.
        self._readers: dict[PullTask, tuple[_Reader, Peer]] = {}
        self._drain_until_s = 0.0
        self._described = Peer(
            self._agent.metadata, Process.own(), self._blocks.regions
        ).encoded()  # only this process uses the engine
        self._decoded: dict[bytes, Peer] = {}  # recent peers, by encoded description
        self._checksum_worker = _ChecksumWorker()
        self._verifiers = futures.ThreadPoolExecutor(_MAX_VERIFIERS, "kvcupy-nixl")

    @property
    def poll_s(self) -> float | None:
        """Interval of `poll` while a receiver of a broken pull may have READs in flight."""
        return 0.005 if time.monotonic() < self._drain_until_s else None

    def describe(self) -> bytes:
        """Return nothing: `serve` sends the sender's description."""
        return b""

    # --- The sender ---

    def offered(self, offered: Offered) -> None:
        """Start computing checksums as layers become ready."""
        self._checksum_worker.add(self._groups_of(offered, BEST_ALGORITHM))

    def _groups_of(self, offered: Offered, algorithm: int) -> _LayerGroups:
        groups = _LayerGroups(offered, self._blocks, algorithm)
        shared: _LayerGroups = offered.prepared.setdefault(algorithm, groups)
        return shared

    def serve(self, service: Service) -> None:
        _require_all_heads(service.pool, service.heads)
        channel = service.channel
        channel.send(READ, self._described, service.deadline(), more=True)
        for start in range(0, len(service.pages), _MAX_PAGES_PER_MESSAGE):
            numbers = service.pages[start : start + _MAX_PAGES_PER_MESSAGE].astype(">i4")
            message = _COUNT.pack(len(numbers)) + numbers.tobytes()
            channel.send(READ, message, service.deadline(), more=True)
        groups = self._groups_of(service.offered, channel.algorithm)
        unread: deque[_LayerGroup] = deque()
        try:
            self._serve_groups(service, groups, unread)
        except BaseException:
            if unread:
                self._drain_until_s = time.monotonic() + _READ_DRAIN_TIMEOUT_S
            raise

    def _serve_groups(
        self, service: Service, groups: _LayerGroups, unread: deque[_LayerGroup]
    ) -> None:
        """Announce groups of layers once they are ready, and confirm them after the READs."""
        channel = service.channel
        first, num_layers = 0, service.pool.num_layers
        while unread or first < num_layers:
            service.check()
            while first < num_layers and (group := groups.beginning_with(first)) is not None:
                channel.send(LAYER, group.named, service.deadline(), more=True)
                unread.append(group)
                first = group.layers.stop
            service.flush()
            self._agent.poll()
            if not channel.readable(_MAX_PAUSE_S):
                continue
            kind, payload = channel.receive(service.deadline(), RENEW, READ)
            service.renew()
            if kind == RENEW:
                continue
            if not unread or payload != unread[0].named:
                raise Lost("the receiver has read unexpected layers")
            digest = unread[0].digest(self._agent.poll)  # `poll` serves READs of later groups
            service.check()  # the offer held the pages until now, and therefore during the READs
            group = unread.popleft()
            channel.num_bytes += group.num_bytes
            channel.send(CHECKSUM, group.named + _CHECKSUM.pack(digest), service.deadline())

    # --- The receiver ---

    def pull(self, task: PullTask) -> None:
        _require_all_heads(task.pool, task.heads)
        peer = self._peer(task.receive(READ)[1])
        pages = self._pages(task)
        try:
            name = self._agent.add_peer(peer.metadata)
        except Exception as error:  # as in Agent.begin
            raise TransferError(f"NIXL cannot reach the sender: {error}", "lost") from error
        verification = _Verification(task, self._blocks, self._verifiers)
        reader = _Reader(task, self._agent, self._blocks, peer, name, pages, verification)
        self._readers[task] = reader, peer
        failed = True
        try:
            reader.run()
            failed = False
        finally:
            verification.stop()
            self._let_go(task, failed=failed)

    def _peer(self, encoded: bytes) -> Peer:
        """Decode a sender's description, or take it from the cache; Lost if block sizes differ."""
        peer = self._decoded.get(encoded)
        if peer is None:
            peer = Peer.decoded(encoded)
            sizes = self._blocks.regions.sizes
            theirs = peer.regions
            if not (
                np.array_equal(theirs.sizes, sizes)
                and theirs.pointers.shape == theirs.page_strides.shape == sizes.shape
            ):
                raise Lost("the blocks of the sender's pool have other sizes")
            decoded = dict(list(self._decoded.items())[1 - _MAX_CACHED_PEERS :])
            self._decoded = {**decoded, encoded: peer}
        return peer

    def _pages(self, task: PullTask) -> Addresses:
        """Return the pages of the sender's pool."""
        numbers = b""
        while len(numbers) < 4 * len(task.pages):
            _, message = task.receive(READ)
            (count,) = _COUNT.unpack_from(message)
            if not 0 < count <= len(task.pages) or len(message) < _COUNT.size + 4 * count:
                raise Lost("invalid page numbers of the sender")
            numbers += message[_COUNT.size : _COUNT.size + 4 * count]
        if len(numbers) != 4 * len(task.pages):
            raise Lost("the sender offers a different number of pages")
        return np.frombuffer(numbers, ">i4").astype(np.int64)

    def quiet(self, task: PullTask) -> bool:
        return task not in self._readers or self._let_go(task, failed=True)

    def _let_go(self, task: PullTask, *, failed: bool) -> bool:
        """Release the peer of a pull; return False while READs are in flight."""
        reader, peer = self._readers[task]
        if reader.pending():  # without the peer, NIXL would not report their end
            return False
        del self._readers[task]
        reader.drop()
        self._agent.release_peer(peer.metadata, failed=failed)
        return True

    # --- Both ---

    def poll(self) -> None:
        self._agent.poll()

    def close(self, deadline: float) -> None:
        """Wait for READs in flight, and deregister the memory.

        If READs outlast the deadline, the memory stays registered and allocated until the process
        ends.
        """
        self._checksum_worker.close(deadline)
        self._agent.stop()
        pause_s = _FIRST_PAUSE_S
        while pending := self._pending():
            if time.monotonic() >= deadline:
                _abandoned.append((self._agent, self._pool, pending))
                cache_logger.warning(
                    "%d READs of NIXL have not ended: the memory of %r stays for the life of the "
                    "process", len(pending), self._pool,
                )  # fmt: skip
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        self._verifiers.shutdown()
        self._agent.close()

    def _pending(self) -> list[Reading]:
        """Return all READs that may still write."""
        readers = [reader for reader, _ in list(self._readers.values())]
        return [reading for reader in readers for reading in reader.pending()]


_abandoned: list[tuple[Agent, Pool, list[Reading]]] = []


def _require_all_heads(pool: Pool, heads: range) -> None:
    if len(heads) != pool.num_kv_heads:
        raise TransferError(
            f"the engine nixl moves all heads of a pool ({pool.num_kv_heads}), not {len(heads)}: "
            "use the engine socket",
            "identity",
        )
