"""Pages of a peer's pool, read into one's own by NIXL: the engine "nixl" of page migration.

    sender     metadata, regions, pages | layers 0-3 are ready |          | checksums 0-3 | ...
    receiver                                                   | READ 0-3 |               | READ 4-7

NIXL is one-sided: the sender's pages are read without its doing, by RDMA, shared memory or TCP,
whichever UCX finds. So a layer is complete only when the sender has said, after the READ, that its
pages were still those of the offer, and what their checksum is, which is verified while the next
layers are read if these are ready. A READ that is given up may land later all the same: its pages
stay in quarantine until it has reached an end (`Reading.done`).
Nothing that NIXL would unpickle comes from a peer: addresses are numbers, and the metadata of the
sender's agent, which are opaque, come over the authenticated connection. The receiver sends none,
so that nobody can reach its memory.

Source: ai-dynamo/nixl `src/api/python/_api.py`, the wheel nixl-cu12, which works without torch.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import logging
import os
import secrets
import struct
import sys
import threading
import time
from concurrent import futures
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import bytes_of
from ..cache.migration.protocol import CHECKSUM, LAYER, READ, RENEW, Lost
from ..cache.pool import Pool
from ..config import cache_logger
from ..errors import KvcupyError, TransferError

if TYPE_CHECKING:
    from ..cache.migration.engines import PullTask, Service

Addresses = np.ndarray[Any, Any]

_WHEELS = ("nixl_cu12", "nixl_cu13")
_FIRST_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3
_GROUP_BYTES = 8 << 20  # of layers that are ready together, which one READ moves
_MOST_PAGES = 1 << 16  # of a message
_MOST_PEERS = 64  # that stay connected without a pull
_MOST_DESCRIPTIONS = 16  # of peers that are kept decoded
_MOST_VERIFIERS = 4  # threads, which all pulls share
_SOON_S = 2e-4  # in which a sender names the next layers if they are ready
_OWING_S = 60.0  # after a pull has broken off, in which the sender still helps a READ to its end
_LAYERS = struct.Struct(">IIQ")  # the first, how many, bytes of both
_COUNT = struct.Struct(">I")  # of the page numbers behind it; short messages are filled up
# Errors behind which nothing of a READ is in flight. Others may leave it so.
_FINAL = (
    "nixlRemoteDisconnectError", "nixlBackendError", "nixlCancelledError", "nixlNotPostedError",
)  # fmt: skip
_LOOK_S = 0.1  # between looks at whether a peer is alive
_GRACE_S = 2.0  # of polling after a peer's death, in which what its sockets still held arrives


def load() -> Any:
    """Return NIXL's Python module, whose log does not go to the standard output.

    Raises
    ------
    ImportError : none of its wheels is installed
    """
    for name in _WHEELS:
        if name in sys.modules:
            return sys.modules[name]
    cause: ImportError | None = None
    for name in _WHEELS:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # its log handler keeps the stream
                module = importlib.import_module(name)
        except ImportError as error:
            cause = cause or error
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return module
    raise ImportError(
        "the engine nixl needs NIXL: pip install --no-deps nixl-cu12 (torch, which it names, is "
        "not needed)"
    ) from cause


# --- Which bytes ---


@dataclass(frozen=True)
class Region:
    """Where the blocks of one part of a layer lie, of a page each: K, V, or scales of either.

    Attributes
    ----------
    pointer : of page 0
    page_stride : bytes from page to page
    num_bytes : of a block
    """

    pointer: int
    page_stride: int
    num_bytes: int


class BlockAddresses:
    """The addresses of a pool's blocks of one page and one layer, which are contiguous.

    Parameters
    ----------
    pool : with memory that the host can address, and a layout that keeps the slots of a page and a
        layer together: "layer_first" or "page_first_direct"

    Raises
    ------
    ValueError : it is another pool
    """

    def __init__(self, pool: Pool) -> None:
        if pool.placement == "device" and pool.device.kind != "host":
            raise ValueError(f"pool: expected host memory for the engine nixl, got {pool}")
        # By layer: its parts, scales last.
        self.regions: list[list[Region]] = [[] for _ in range(pool.num_layers)]
        spans: list[tuple[int, int]] = []  # of all memory, from and to
        for parts in ("parts", "scale_parts"):
            for group in pool.groups:
                for part in getattr(group, parts):
                    spans.append(self._add(pool, bytes_of(part), group.layers))
        # Pointer and bytes of what is to be registered: parts may lie between one another.
        self.memory: list[tuple[int, int]] = []
        start, end = min(spans)
        for low, high in sorted(spans):
            if low > end:
                self.memory.append((start, end - start))
                start, end = low, high
            end = max(end, high)
        self.memory.append((start, end - start))

    def _add(self, pool: Pool, part: Any, layers: range) -> tuple[int, int]:
        """Add the regions of one part; return from where to where it lies."""
        num_pages, num_layers, *block = part.shape
        page_stride, layer_stride, *inner = part.strides
        expected = part.itemsize
        for size, stride in zip(reversed(block), reversed(inner), strict=True):
            if size > 1 and stride != expected:
                raise ValueError(
                    f"pool: expected slots of a page and a layer side by side for the engine nixl "
                    f"(layer_first, page_first_direct), got {pool}"
                )
            expected *= size
        for i, layer in enumerate(layers):
            pointer = part.pointer + i * layer_stride
            self.regions[layer].append(Region(pointer, page_stride, expected))
        low = part.pointer + min(0, (num_pages - 1) * page_stride)
        low += min(0, (num_layers - 1) * layer_stride)
        span = abs(page_stride) * (num_pages - 1) + abs(layer_stride) * (num_layers - 1) + expected
        return low, low + span


def addresses_of(
    regions: list[list[Region]], pages: Addresses, layers: range
) -> tuple[Addresses, Addresses]:
    """Return address and size of each block, int64, by layer, part and page."""
    chosen = [region for layer in layers for region in regions[layer]]
    addresses = [region.pointer + pages * region.page_stride for region in chosen]
    sizes = [np.full(len(pages), region.num_bytes, np.int64) for region in chosen]
    return np.concatenate(addresses), np.concatenate(sizes)


def joined(
    local: Addresses, remote: Addresses, sizes: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Join blocks that follow one another on both sides.

    >>> joined(np.array([40, 0, 10]), np.array([90, 50, 60]), np.array([10, 10, 10]))
    (array([ 0, 40]), array([50, 90]), array([20, 10]))
    """
    order = np.argsort(local)
    local, remote, sizes = local[order], remote[order], sizes[order]
    follows = (local[:-1] + sizes[:-1] == local[1:]) & (remote[:-1] + sizes[:-1] == remote[1:])
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return local[starts], remote[starts], np.add.reduceat(sizes, starts)


# --- Who the peer is ---


@dataclass(frozen=True)
class Process:
    """A process of some machine, by what no later process has in common with it."""

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Process:
        """Describe this process; an empty boot where the system does not say."""
        try:
            return cls(*_machine(), os.getpid(), _started(os.getpid()))
        except OSError:
            return cls("", "", os.getpid(), 0)

    def is_dead(self) -> bool:
        """Return whether it is known to be dead, which only a process beside it can know."""
        try:
            if not self.boot or _machine() != (self.boot, self.namespace):
                return False
            return _started(self.pid) != self.started
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            return False


def _machine() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def _started(pid: int) -> int:
    """Return when a process was started, in ticks since the boot; 0 for a zombie, which is dead."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


# --- Agents ---


class Agent:
    """An agent of NIXL for the memory of one pool.

    Each call takes its lock. There is no thread of NIXL's own that progresses transfers, for that
    would spin: `poll` and `Reading.done` do.

    Parameters
    ----------
    blocks : of the pool, all of whose memory is registered, and nothing else
    """

    def __init__(self, blocks: BlockAddresses) -> None:
        nixl = load()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._lock = threading.Lock()
        self._agent: Any = nixl.nixl_agent(f"kvcupy-{secrets.token_hex(8)}", config)
        if "UCX" not in self._agent.backends:
            raise KvcupyError("the engine nixl needs NIXL's plugin UCX, which is missing")
        self._registered = [
            self._agent.register_memory([(pointer, num_bytes, 0, "")], "DRAM")
            for pointer, num_bytes in blocks.memory
        ]
        self.metadata: bytes = self._agent.get_agent_metadata()
        # By digest of the metadata: name, and pulls that use it; the longest idle first.
        self._peers: dict[bytes, tuple[Any, int]] = {}

    def poll(self) -> None:
        """Let peers connect, and read by protocols that need this side."""
        with self._lock:
            if self._agent is not None:
                self._agent.update_notifs()

    def add_peer(self, metadata: bytes) -> tuple[bytes, Any]:
        """Return key and name of the agent of an authenticated peer, for `release_peer`."""
        key = hashlib.sha256(metadata).digest()
        with self._lock:
            name, count = self._peers.pop(key, (None, 0))
            if name is None:
                idle = [k for k, (_, used) in self._peers.items() if not used]
                for old in idle[: max(0, len(idle) - _MOST_PEERS + 1)]:
                    self._forget(old)
                name = self._agent.add_remote_agent(metadata)
            self._peers[key] = name, count + 1
            return key, name

    def release_peer(self, key: bytes, *, failed: bool) -> None:
        """End the use of a peer; one that has failed has to connect anew."""
        with self._lock:
            if key not in self._peers:
                return
            name, count = self._peers.pop(key)
            self._peers[key] = name, count - 1
            if failed and count == 1:
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        name, _ = self._peers.pop(key)
        if self._agent is not None:
            with contextlib.suppress(Exception):  # it has disconnected: NIXL has forgotten it
                self._agent.remove_remote_agent(name)

    def read(
        self, peer: Any, process: Process, local: Addresses, remote: Addresses, sizes: Addresses
    ) -> Reading:
        """Begin to read blocks of a peer's memory into one's own."""
        local, remote, sizes = joined(local, remote, sizes)
        lists = [
            np.stack([side, sizes, np.zeros_like(sizes)], axis=1).astype(np.uint64)
            for side in (local, remote)
        ]
        every = np.arange(len(sizes), dtype=np.int32)
        with self._lock:
            agent = self._agent
            mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", lists[0], "DRAM")
            theirs = agent.prep_xfer_dlist(peer, lists[1], "DRAM")
            handle = agent.make_prepped_xfer("READ", mine, every, theirs, every)
            reading = Reading(self, process, handle, (mine, theirs))
            try:
                reading.state = agent.transfer(handle)
            except Exception as error:  # what NIXL raises differs from version to version
                reading.fail(error, is_over=type(error).__name__ in _FINAL)
        return reading

    def state_of(self, handle: Any) -> str:
        with self._lock:
            return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any, lists: tuple[Any, ...]) -> None:
        with self._lock:
            for prepared in (handle, *lists):
                with contextlib.suppress(Exception):  # of a peer that is gone
                    prepared.release()

    def close(self) -> None:
        """Deregister the memory; nothing may be read into it any more."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for name, _ in self._peers.values():
                with contextlib.suppress(Exception):
                    agent.remove_remote_agent(name)
            for registered in self._registered:
                with contextlib.suppress(Exception):
                    agent.deregister_memory(registered)


class Reading:
    """One READ: in flight, over, or failed. As a `Completion` it says when no byte lands any more.

    Giving up does not end it: NIXL has no abort. It has ended when its handle says so, or when the
    peer's process is known to be dead and what it had sent has had time to arrive.
    """

    def __init__(self, agent: Agent, process: Process, handle: Any, lists: tuple[Any, ...]) -> None:
        self.state = "PROC"
        self.failure: BaseException | None = None
        self._agent, self._process = agent, process
        self._handle, self._lists = handle, lists
        self._dead_since_s: float | None = None
        self._look_at_s = time.monotonic() + _LOOK_S
        self._lock = threading.Lock()

    def fail(self, error: BaseException, *, is_over: bool) -> None:
        self.failure = error
        if is_over:
            self.state = "ERR"

    def done(self) -> bool:
        """Return whether nothing lands any more; what progress there can be is made here."""
        with self._lock:
            if self._handle is None:
                return True
            if self.state == "PROC":
                try:
                    self.state = self._agent.state_of(self._handle)
                except Exception as error:  # see Agent.read
                    self.fail(error, is_over=type(error).__name__ in _FINAL)
            if self.state == "PROC":
                self._look_for_death()
            if self.state == "PROC":
                return False
            if self.state != "DONE" and self.failure is None:
                self.failure = KvcupyError(f"NIXL ended a transfer as {self.state}")
            self._agent.release(self._handle, self._lists)
            self._handle, self._lists = None, ()
            return True

    def synchronize(self) -> None:
        """Wait until nothing lands any more, which may be for as long as the peer is stopped."""
        pause_s = _FIRST_PAUSE_S
        while not self.done():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _look_for_death(self) -> None:
        now = time.monotonic()
        if now < self._look_at_s:
            return
        self._look_at_s = now + _LOOK_S
        if self._dead_since_s is None:
            if self._process.is_dead():
                self._dead_since_s = now
        elif now - self._dead_since_s > _GRACE_S:
            error = KvcupyError(f"the process {self._process.pid} of the peer is dead")
            self.fail(error, is_over=True)


# --- The engine ---


@dataclass(frozen=True)
class Peer:
    """What a sender says of itself: how to read its memory, and what lies where."""

    metadata: bytes
    process: Process
    regions: list[list[Region]]

    def encoded(self) -> bytes:
        described = {
            "metadata": base64.b64encode(self.metadata).decode(),
            "process": asdict(self.process),
            "regions": [
                [[r.pointer, r.page_stride, r.num_bytes] for r in layer] for layer in self.regions
            ],
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
            regions = [
                [Region(*map(_address, region)) for region in layer]
                for layer in described["regions"]
            ]
            return cls(base64.b64decode(described["metadata"], validate=True), process, regions)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Lost(f"the sender describes no memory: {error!r:.200}") from None


def _address(value: Any) -> int:
    if type(value) is not int or not -(2**62) < value < 2**62:
        raise ValueError(f"{value!r:.40} is no address")
    return value


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

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks = BlockAddresses(pool)
        self._agent = Agent(self._blocks)
        # By pull: what may still land, and the key of the peer that it is read from.
        self._readings: dict[PullTask, tuple[Reading, bytes]] = {}
        self._owing_until_s = 0.0
        self._described = Peer(
            self._agent.metadata, Process.own(), self._blocks.regions
        ).encoded()  # of this process, which is all that uses it
        self._decoded: dict[bytes, Peer] = {}  # by what peers have sent, the last ones
        self._verifiers = futures.ThreadPoolExecutor(_MOST_VERIFIERS, "kvcupy-nixl")

    @property
    def poll_s(self) -> float | None:
        """How often the sender has to poll: while a receiver may not be through with a READ."""
        return 0.005 if time.monotonic() < self._owing_until_s else None

    def describe(self) -> bytes:
        """Nothing: the sender describes itself to who pulls."""
        return b""

    # --- The sender ---

    def serve(self, service: Service) -> None:
        _require_all_heads(service.pool, service.heads)
        channel = service.channel
        channel.send(READ, self._described, service.deadline())
        for start in range(0, len(service.pages), _MOST_PAGES):
            numbers = service.pages[start : start + _MOST_PAGES].astype(">i4")
            message = _COUNT.pack(len(numbers)) + numbers.tobytes()
            channel.send(READ, message, service.deadline())
        layer = 0
        while layer < service.pool.num_layers:
            service.wait_ready(layer)
            count = self._ready(service, layer)
            try:
                self._serve_layers(service, range(layer, layer + count))
            except BaseException:
                self._owing_until_s = time.monotonic() + _OWING_S
                raise
            layer += count

    def _ready(self, service: Service, first: int) -> int:
        """Return how many layers from `first` on go together."""
        layer_bytes = max(1, len(service.pages) * service.page_bytes.page_bytes)
        most = min(service.pool.num_layers - first, max(1, _GROUP_BYTES // layer_bytes))
        count = 1
        while count < most and service.is_ready(first + count):
            count += 1
        return count

    def _serve_layers(self, service: Service, layers: range) -> None:
        channel = service.channel
        num_bytes = len(layers) * len(service.pages) * service.page_bytes.page_bytes
        named = _LAYERS.pack(layers.start, len(layers), num_bytes)
        channel.send(LAYER, named, service.deadline())
        checksums = []
        for layer in layers:  # while the receiver reads
            checksum = channel.checksum(service.number, service.generation, layer)
            for views, _ in service.page_bytes.reading(service.pages, range(layer, layer + 1)):
                service.check()
                self._agent.poll()
                for view in views:
                    checksum.update(view)
            checksums.append(checksum.intdigest())
        pause_s = _FIRST_PAUSE_S
        while True:
            self._agent.poll()
            service.check()
            if channel.readable(pause_s):
                kind, payload = channel.receive(service.deadline(), RENEW, READ)
                service.renew()
                if kind == READ:
                    if payload != named:
                        raise Lost("the receiver has read other layers than it was to")
                    break
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        service.check()  # the pages were those of the offer until now, and so while they were read
        channel.num_bytes += num_bytes
        packed = named + struct.pack(f">{len(layers)}Q", *checksums)
        channel.send(CHECKSUM, packed, service.deadline())

    # --- The receiver ---

    def pull(self, task: PullTask) -> None:
        _require_all_heads(task.pool, task.heads)
        peer = self._peer(task.receive(READ)[1])
        numbers = b""
        while len(numbers) < 4 * len(task.pages):
            _, message = task.receive(READ)
            (count,) = _COUNT.unpack_from(message)
            if not 0 < count <= len(task.pages) or len(message) < _COUNT.size + 4 * count:
                raise Lost("the sender offers no pages")
            numbers += message[_COUNT.size : _COUNT.size + 4 * count]
        if len(numbers) != 4 * len(task.pages):
            raise Lost("the sender offers another number of pages")
        pages = np.frombuffer(numbers, ">i4").astype(np.int64)
        try:
            key, name = self._agent.add_peer(peer.metadata)
        except Exception as error:  # see Agent.read
            raise TransferError(f"NIXL cannot reach the sender: {error}", "lost") from error
        failed = True
        verifying: futures.Future[None] | None = None  # the layers before
        try:
            layer = 0
            while layer < task.pool.num_layers:
                layers, named = self._next_layers(task, layer)
                remote, _ = addresses_of(peer.regions, pages, layers)
                local, sizes = addresses_of(self._blocks.regions, task.pages, layers)
                try:
                    reading = self._agent.read(name, peer.process, local, remote, sizes)
                except Exception as error:  # see Agent.read: nothing is in flight
                    raise TransferError(f"NIXL refuses to read: {error}", "lost") from error
                self._readings[task] = reading, key
                self._follow(task, reading)
                del self._readings[task]
                task.channel.num_bytes += int(sizes.sum())
                checksums = self._confirmed(task, named)
                if verifying is not None:
                    verifying.result()
                    verifying = None
                layer = layers.stop
                # Else a failure would be told only when they are ready.
                if layer < task.pool.num_layers and task.channel.readable(_SOON_S):
                    with contextlib.suppress(RuntimeError):  # the system has no more threads
                        verifying = self._verifiers.submit(self._verify, task, layers, checksums)
                if verifying is None:
                    self._verify(task, layers, checksums)
            failed = False
        finally:
            if verifying is not None and not verifying.cancel():
                futures.wait((verifying,))
            if task not in self._readings:  # else NIXL would not say when it has ended
                self._agent.release_peer(key, failed=failed)

    def _peer(self, encoded: bytes) -> Peer:
        """Return what a sender says of itself; Lost unless its blocks have the sizes of one's own.

        Pulls from one sender decode it once.
        """
        peer = self._decoded.get(encoded)
        if peer is None:
            peer = Peer.decoded(encoded)
            own = [[region.num_bytes for region in layer] for layer in self._blocks.regions]
            if [[region.num_bytes for region in layer] for layer in peer.regions] != own:
                raise Lost("the blocks of the sender's pool have other sizes")
            decoded = dict(list(self._decoded.items())[1 - _MOST_DESCRIPTIONS :])
            self._decoded = {**decoded, encoded: peer}
        return peer

    def _next_layers(self, task: PullTask, expected: int) -> tuple[range, bytes]:
        """Wait until layers are ready; return them, and what names them in messages."""
        _, named = task.receive(LAYER)
        if len(named) != _LAYERS.size:
            raise Lost("the sender names no layers")
        first, count, num_bytes = _LAYERS.unpack(named)
        if first != expected or not 0 < count <= task.pool.num_layers - first:
            raise Lost("the sender has other layers ready than the next")
        if num_bytes != count * len(task.pages) * task.page_bytes.page_bytes:
            raise Lost("the sender's layers have another size")
        return range(first, first + count), named

    def _follow(self, task: PullTask, reading: Reading) -> None:
        """Wait until a READ is over; raise if it fails, or the pull does."""
        pause_s = _FIRST_PAUSE_S
        while not reading.done() and reading.failure is None:
            if time.monotonic() >= task.deadline:
                raise TimeoutError("timed out")
            task.check()
            task.renew_if_due()
            if task.channel.readable(pause_s):  # the sender speaks again when this is read
                task.receive(CHECKSUM)
                raise Lost("the sender confirms what has not been read")
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        if reading.failure is not None:
            raise TransferError(f"NIXL: {reading.failure}", "lost") from reading.failure

    def _confirmed(self, task: PullTask, named: bytes) -> bytes:
        """Return the checksums of layers that were read, which the sender still offers."""
        task.channel.send(READ, named, task.deadline)
        _, payload = task.receive(CHECKSUM)
        if not payload.startswith(named):
            raise Lost("the sender confirms other layers than were read")
        return payload[len(named) :]

    def _verify(self, task: PullTask, layers: range, expected: bytes) -> None:
        """Compare what was read with what the sender has, while what follows is read."""
        checksums = []
        for layer in layers:
            checksum = task.channel.checksum(task.number, task.generation, layer)
            for views, _ in task.page_bytes.reading(task.pages, range(layer, layer + 1)):
                task.check()
                for view in views:
                    checksum.update(view)

            checksums.append(checksum.intdigest())
        if expected != struct.pack(f">{len(layers)}Q", *checksums):
            raise TransferError(
                f"layers {layers.start} to {layers.stop - 1}: a checksum is wrong", "corrupt"
            )
        for layer in layers:
            task.arrived(layer)

    def quiet(self, task: PullTask) -> bool:
        if task in self._readings:
            reading, key = self._readings[task]
            if not reading.done():
                return False
            del self._readings[task]
            self._agent.release_peer(key, failed=True)
        return True

    # --- Both ---

    def poll(self) -> None:
        self._agent.poll()

    def close(self, deadline: float) -> None:
        """Deregister the memory, once nothing is read into it any more.

        Where that does not come about in time, the memory stays as it is until the process ends.
        """
        pause_s = _FIRST_PAUSE_S
        while pending := [r for r, _ in list(self._readings.values()) if not r.done()]:
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


_abandoned: list[tuple[Agent, Pool, list[Reading]]] = []


def _require_all_heads(pool: Pool, heads: range) -> None:
    if len(heads) != pool.num_kv_heads:
        raise TransferError(
            f"the engine nixl moves all heads of a pool ({pool.num_kv_heads}), not {len(heads)}: "
            "use the engine socket",
            "identity",
        )
