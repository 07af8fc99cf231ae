"""Pages of a peer's pool, read into one's own by NIXL: the engine "nixl" of page migration.

    sender     metadata, pages | layers 0-3, 4-7 are ready |         | checksum 0-3 |         | ...
    receiver                                    | READ 0-3 | READ 4-7               | READ 8-11

NIXL is one-sided: the sender's pages are read without its doing, by RDMA, shared memory or TCP,
whichever UCX finds. So a layer is complete only when the sender has said, after the READ, that its
pages were still those of the offer, and what their checksum is. A READ that is given up may land
later all the same: its pages stay in quarantine until it has reached an end (`Reading.done`).
Checksums cost more than the READs where these are copies in memory, so that nobody waits for them:
the sender's thread that goes ahead of pulls has them by the time that they are asked for, and the
receiver verifies some MiB while the next are read.
Nothing that NIXL would unpickle comes from a peer: addresses are numbers, and the metadata of the
sender's agent, which are opaque, come over the authenticated connection. The receiver sends none,
so that nobody can reach its memory.
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
# Layers that are ready together go in groups of so many bytes, or a share of all layers if that is
# more: the more layers, the longer are the pieces that a READ is of, but the later is the first.
_GROUP_BYTES = 16 << 20
_MAX_GROUPS = 4
_READ_BYTES = 8 << 20  # which are verified while the next are read
_MAX_READS, _MAX_PREPARED = 4, 64  # of a pull at a time
_HASHED_BYTES = 1 << 20  # between looks whether an offer stands
_LOOK_AHEAD_S, _MAX_LOOK_AHEAD_S = 2e-3, 32e-3  # between looks whether layers are ready
_MAX_PAGES = 1 << 16  # of a message
_MAX_DESCRIPTIONS = 16  # of peers that are kept decoded
_MAX_VERIFIERS = 4  # threads, which all pulls share
_OWING_S = 60.0  # after a pull has broken off, in which the sender still helps a READ to its end
_LAYERS = struct.Struct(">II?Q")  # the first, how many, the order of blocks, bytes of all
_CHECKSUM = struct.Struct(">Q")
_COUNT = struct.Struct(">I")  # of the page numbers behind it; short messages are filled up
_WAIT_S = 0.1  # for a message, between looks at what else there is


@dataclass(frozen=True)
class Peer:
    """What a sender says of itself: how to read its memory, and what lies where."""

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
        """Lost unless it is what `encoded` makes. NIXL checks that addresses are registered."""
        try:
            described = json.loads(encoded)
            process = Process(**described["process"])
            if [type(v) for v in asdict(process).values()] != [str, str, int, int]:
                raise TypeError("its process is none")
            regions = Regions(**{n: _table(t) for n, t in described["regions"].items()})
            return cls(base64.b64decode(described["metadata"], validate=True), process, regions)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Lost(f"the sender describes no memory: {error!r:.200}") from None


def _table(rows: Any) -> Addresses:
    """Return lists of addresses as an array; ValueError or TypeError if they are none."""
    for value in itertools.chain.from_iterable(rows):
        if type(value) is not int or not -(2**62) < value < 2**62:
            raise ValueError(f"{value!r:.40} is no address")
    return np.array(rows, np.int64)


# --- The checksums of a sender ---


def _new_checksum(algorithm: int, of: Offered | PullTask, layers: range) -> Any:
    return new_checksum(algorithm, of.key, of.number, of.generation, layers.start, len(layers))


class _LayerGroup:
    """Layers of an offer that go together.

    Attributes
    ----------
    layers
    num_bytes : of their pages
    named : what names them in messages
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
        """Return the checksum of their pages, which is calculated once.

        `meanwhile` is called now and then until it is.

        Raises
        ------
        TransferError : the offer is over
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
        addresses, _, sizes, ends = cut(*blocks, _HASHED_BYTES)
        views = self._blocks.views(addresses, sizes)
        for start, stop in itertools.pairwise((0, *ends)):
            offered.check()
            meanwhile()
            for view in views[start:stop]:
                checksum.update(view)
        digest: int = checksum.intdigest()
        return digest


class _LayerGroups:
    """The layers of an offer in groups, with checksums by one algorithm.

    Which layers go together is decided when the first of them is asked for.
    """

    def __init__(self, offered: Offered, blocks: BlockAddresses, algorithm: int) -> None:
        self._offered, self._blocks, self._algorithm = offered, blocks, algorithm
        layer_bytes = max(1, len(offered.pages) * blocks.layer_bytes)
        share = offered.pool.num_layers // _MAX_GROUPS
        self._most = max(1, _GROUP_BYTES // layer_bytes, share)
        self._lock = threading.Lock()
        self._groups: dict[int, _LayerGroup] = {}  # by first layer
        self._next = 0  # layer without a checksum

    def beginning_with(self, first: int) -> _LayerGroup | None:
        """Return the group that a layer begins, or None if it is not ready.

        Raises
        ------
        TransferError : it never will be
        """
        with self._lock:
            if first not in self._groups:
                end = min(first + self._most, self._offered.pool.num_layers)
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
        """Calculate the next checksum; return False if its layer is not ready.

        Raises
        ------
        TransferError : the offer is over
        """
        with self._offered.reading():
            group = self.beginning_with(self._next)
            if group is None:
                return False
            group.digest()
        self._next = group.layers.stop
        return True


class _ChecksumWorker:
    """A thread that calculates checksums of offers before a pull asks for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._offers: list[_LayerGroups] = []
        self._closed = False

    def add(self, groups: _LayerGroups) -> None:
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work, name="kvcupy-nixl checksums", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the system has no more: pulls calculate them
                    return
                self._thread = thread
            self._offers.append(groups)
            self._changed.notify()

    def close(self, deadline: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread not in (None, threading.current_thread()):  # which may release pages
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        pause_s = _LOOK_AHEAD_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offers or self._closed)
                if self._closed:
                    self._offers.clear()
                    return
                offers = list(self._offers)
            moved = False
            for groups in offers:
                try:
                    moved |= groups.advance()
                    is_over = groups.is_complete
                except Exception:  # the offer is over; whatever else it is, pulls will say
                    is_over = True
                if is_over:
                    with self._changed:
                        self._offers.remove(groups)
            del offers, groups  # and with them what is over
            with self._changed:
                if moved or not self._offers or self._changed.wait(pause_s):
                    pause_s = _LOOK_AHEAD_S
                else:
                    pause_s = min(2 * pause_s, _MAX_LOOK_AHEAD_S)


# --- The checksums and the READs of a receiver ---


class _Verification:
    """The checksums of a pull, calculated in order by one thread at a time.

    That is a thread of `executor` while the pull has READs to begin, and else the pull's own.
    """

    def __init__(self, task: PullTask, blocks: BlockAddresses, executor: futures.Executor) -> None:
        self._task, self._blocks, self._executor = task, blocks, executor
        self._changed = threading.Condition()  # guards the next four
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_working = False
        self._is_submitted = False  # a thread of `executor` is to come
        self._failure: BaseException | None = None
        # What the thread at work has:
        self._checksum: Any = None  # of layers that are being read
        self._digests: deque[int] = deque()  # of layers that wait for the sender's

    def add_bytes(
        self, layers: range, addresses: Addresses, sizes: Addresses, *, is_last: bool
    ) -> None:
        """Add what has come of some layers, and whether that is all."""
        self._add(partial(self._hash, layers, addresses, sizes, is_last=is_last))

    def add_expected(self, layers: range, expected: int) -> None:
        """Add the sender's checksum of layers that have come."""
        self._add(partial(self._compare, layers, expected))

    def submit(self) -> None:
        """Let a thread do what there is to do; raise what has failed."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._is_working or self._is_submitted or not self._jobs:
                return
            self._is_submitted = True
        # Without another thread one that there is takes it, or the pull's own does all of it.
        with contextlib.suppress(RuntimeError):
            self._executor.submit(self._work)

    def run_next(self) -> bool:
        """Do the next of what there is to do; raise what has failed.

        Return whether there was anything that no thread is at.
        """
        did = self._run_next()
        if self._failure is not None:
            raise self._failure
        return did

    def finish(self) -> None:
        """Return when all is done; raise what has failed, or that the pull has."""
        while not self._is_finished():
            self._task.keep()
            if not self.run_next():
                with self._changed:
                    self._changed.wait_for(
                        lambda: not self._is_working, min(_WAIT_S, self._task.next_keep_s)
                    )
        self.run_next()

    def stop(self) -> None:
        """Leave the rest undone, and return when no thread is at it."""
        with self._changed:
            self._jobs.clear()
            self._changed.wait_for(lambda: not self._is_working)

    def _is_finished(self) -> bool:
        with self._changed:
            return not (self._jobs or self._is_working)

    def _add(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)

    def _work(self) -> None:
        with self._changed:
            self._is_submitted = False
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Do what comes next; return False if a thread is at it, or nothing is left."""
        with self._changed:
            if self._is_working or self._failure is not None or not self._jobs:
                return False
            self._is_working = True
            job = self._jobs.popleft()
        failure: BaseException | None = None
        try:
            job()
        except BaseException as error:
            failure = error
        with self._changed:
            self._failure = failure
            self._is_working = False
            self._changed.notify_all()
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
            raise TransferError(f"layer {layers[0]}{last}: the checksum is wrong", "corrupt")
        for layer in layers:
            self._task.arrived(layer)


class _Read(NamedTuple):
    """A READ, and what it brings."""

    reading: Reading
    layers: range
    addresses: Addresses  # of one's own blocks
    sizes: Addresses
    named: bytes  # what names the layers, if it is the last of them


class _Reader:
    """Reads the layers of a pull as the sender names them."""

    def __init__(
        self, task: PullTask, agent: Agent, blocks: BlockAddresses, peer: Peer, name: Any,
        pages: Addresses, verification: _Verification,
    ) -> None:  # fmt: skip
        self._task, self._agent, self._blocks = task, agent, blocks
        self._peer, self._name, self._pages = peer, name, pages
        self._verification = verification
        self._named: deque[bytes] = deque()  # layers of which no READ is prepared
        self._prepared: deque[_Read] = deque()
        self._begun: deque[_Read] = deque()
        self._unconfirmed: deque[_Read] = deque()  # last ones of layers that have come
        self._num_named = self._num_confirmed = 0  # layers

    def run(self) -> None:
        """Return when all layers are there, and verified."""
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
                pause_s = min(_WAIT_S, task.next_keep_s)
            if task.channel.readable(pause_s):
                self._hear()
                while task.channel.readable(0):  # layers that are ready are named together
                    self._hear()
        self._verification.finish()

    def pending(self) -> list[Reading]:
        """Return READs that may still write; they end in some order."""
        return [read.reading for read in list(self._begun) if not read.reading.done()]

    def drop(self) -> None:
        """Let go what NIXL keeps, when no READ is pending."""
        for read in self._prepared:
            read.reading.drop()

    def _end_read(self) -> bool:
        """Note that the oldest READ is over, if it is."""
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
        """Begin the next READ, if there is one, and room for it."""
        while self._named and len(self._prepared) < _MAX_PREPARED:
            self._prepare(self._named.popleft())
        if not self._prepared or len(self._begun) == _MAX_READS:
            return False
        self._begun.append(self._prepared.popleft())  # who closes the engine waits for it
        self._agent.begin(self._begun[-1].reading)
        return True

    def _prepare(self, named: bytes) -> None:
        """Prepare the READs of layers that are ready: what takes long is done before the first of
        them, for READs that are copies in memory leave no code in the processor's cache."""
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
        except Exception as error:  # see Agent.begin
            raise TransferError(f"NIXL refuses to read: {error}", "lost") from error
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
        """Take a message: layers are ready, or the checksum of some."""
        task = self._task
        kind, payload = task.channel.receive(task.deadline, LAYER, CHECKSUM)
        if len(payload) < _LAYERS.size:
            raise Lost("the sender names no layers")
        named, checksum = payload[: _LAYERS.size], payload[_LAYERS.size :]
        first, count, _, num_bytes = _LAYERS.unpack(named)
        if kind == LAYER:
            if first != self._num_named or not 0 < count <= task.pool.num_layers - first:
                raise Lost("the sender has other layers ready than the next")
            if num_bytes != self._bytes_of(count):
                raise Lost("the sender's layers have another size")
            self._named.append(named)
            self._num_named += count
            return
        if not self._unconfirmed or self._unconfirmed[0].named != named:
            raise Lost("the sender confirms other layers than were read")
        if len(checksum) != _CHECKSUM.size:
            raise Lost("the sender has no checksum")
        layers = self._unconfirmed.popleft().layers
        self._verification.add_expected(layers, *_CHECKSUM.unpack(checksum))
        self._num_confirmed += len(layers)


# --- The engine ---


class NixlEngine:
    """The engine "nixl": the receiver READs the sender's pages.

    Parameters
    ----------
    pool : in memory that the host can address, of layout "layer_first" or "page_first_direct"

    Raises
    ------
    ValueError : it is another pool
    ImportError : NIXL is not installed
    """

    name = "nixl"
    staged = False
    bounded = False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks = BlockAddresses(pool)
        self._agent = Agent(self._blocks)
        # By pull: its READs, which may still land, and the peer.
        self._readers: dict[PullTask, tuple[_Reader, Peer]] = {}
        self._owing_until_s = 0.0
        self._described = Peer(
            self._agent.metadata, Process.own(), self._blocks.regions
        ).encoded()  # of this process, which is all that uses it
        self._decoded: dict[bytes, Peer] = {}  # by what peers have sent, the last ones
        self._checksum_worker = _ChecksumWorker()
        self._verifiers = futures.ThreadPoolExecutor(_MAX_VERIFIERS, "kvcupy-nixl")

    @property
    def poll_s(self) -> float | None:
        """How often the sender has to poll: while a receiver may not be through with a READ."""
        return 0.005 if time.monotonic() < self._owing_until_s else None

    def describe(self) -> bytes:
        """Nothing: the sender describes itself to who pulls."""
        return b""

    # --- The sender ---

    def offered(self, offered: Offered) -> None:
        """Begin to calculate checksums as layers become ready."""
        self._checksum_worker.add(self._groups_of(offered, BEST_ALGORITHM))

    def _groups_of(self, offered: Offered, algorithm: int) -> _LayerGroups:
        groups = _LayerGroups(offered, self._blocks, algorithm)
        shared: _LayerGroups = offered.prepared.setdefault(algorithm, groups)
        return shared

    def serve(self, service: Service) -> None:
        _require_all_heads(service.pool, service.heads)
        channel = service.channel
        channel.send(READ, self._described, service.deadline(), more=True)
        for start in range(0, len(service.pages), _MAX_PAGES):
            numbers = service.pages[start : start + _MAX_PAGES].astype(">i4")
            message = _COUNT.pack(len(numbers)) + numbers.tobytes()
            channel.send(READ, message, service.deadline(), more=True)
        groups = self._groups_of(service.offered, channel.algorithm)
        unread: deque[_LayerGroup] = deque()
        try:
            self._serve_groups(service, groups, unread)
        except BaseException:
            if unread:
                self._owing_until_s = time.monotonic() + _OWING_S
            raise

    def _serve_groups(
        self, service: Service, groups: _LayerGroups, unread: deque[_LayerGroup]
    ) -> None:
        """Name layers once they are ready, and confirm those that have been read."""
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
                raise Lost("the receiver has read other layers than it was to")
            digest = unread[0].digest(self._agent.poll)  # for READs of those that follow
            service.check()  # pages were those of the offer until now, and so while they were read
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
        except Exception as error:  # see Agent.begin
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
        """Return what a sender says of itself; Lost unless its blocks have the sizes of one's own.

        Pulls from one sender decode it once.
        """
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
            decoded = dict(list(self._decoded.items())[1 - _MAX_DESCRIPTIONS :])
            self._decoded = {**decoded, encoded: peer}
        return peer

    def _pages(self, task: PullTask) -> Addresses:
        """Return the pages of the sender's pool."""
        numbers = b""
        while len(numbers) < 4 * len(task.pages):
            _, message = task.receive(READ)
            (count,) = _COUNT.unpack_from(message)
            if not 0 < count <= len(task.pages) or len(message) < _COUNT.size + 4 * count:
                raise Lost("the sender offers no pages")
            numbers += message[_COUNT.size : _COUNT.size + 4 * count]
        if len(numbers) != 4 * len(task.pages):
            raise Lost("the sender offers another number of pages")
        return np.frombuffer(numbers, ">i4").astype(np.int64)

    def quiet(self, task: PullTask) -> bool:
        return task not in self._readers or self._let_go(task, failed=True)

    def _let_go(self, task: PullTask, *, failed: bool) -> bool:
        """Let go of the peer of a pull; return False while something may land."""
        reader, peer = self._readers[task]
        if reader.pending():  # NIXL would not say when they have ended
            return False
        del self._readers[task]
        reader.drop()
        self._agent.release_peer(peer.metadata, failed=failed)
        return True

    # --- Both ---

    def poll(self) -> None:
        self._agent.poll()

    def close(self, deadline: float) -> None:
        """Deregister the memory, once nothing is read into it any more.

        Where that does not come about in time, the memory stays as it is until the process ends.
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
        """Return READs that are not over."""
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
