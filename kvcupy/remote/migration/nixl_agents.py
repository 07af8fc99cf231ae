"""NIXL agents for pool memory, and the addresses of a pool's blocks.

Source: ai-dynamo/nixl `src/api/python/_api.py`, the wheel nixl-cu12, which works without torch.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays import array_at, bytes_of
from ...cache.pool import Pool
from ...errors import KvcupyError

Addresses = np.ndarray[Any, Any]

WHEELS = ("nixl_cu12", "nixl_cu13")
_MAX_IDLE_PEERS = 64
# After these errors, a READ is not in flight. After others it may be.
_FINAL = (
    "nixlRemoteDisconnectError", "nixlBackendError", "nixlCancelledError", "nixlNotPostedError",
)  # fmt: skip
_LIVENESS_INTERVAL_S = 0.1
_DRAIN_AFTER_DEATH_S = 2.0  # for data left in the sockets of a dead peer


def load() -> Any:
    """Import NIXL's Python module, with its log redirected from stdout to stderr.

    Raises
    ------
    ImportError : no NIXL wheel is installed
    """
    for name in WHEELS:
        if name in sys.modules:
            return sys.modules[name]
    cause: ImportError | None = None
    for name in WHEELS:
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


# --- Block addresses ---


@dataclass(frozen=True)
class Regions:
    """Addresses of blocks. A block is one page of one layer and part: K, V, or scales of either.

    Attributes
    ----------
    pointers : int64 (parts, layers), address in page 0
    page_strides : int64 (parts, layers), bytes from page to page
    sizes : int64 (parts, layers), bytes per block
    """

    pointers: Addresses
    page_strides: Addresses
    sizes: Addresses

    @cached_property
    def is_by_page(self) -> bool:
        """Whether the layers of each page are contiguous."""
        ends = self.pointers[:, :-1] + self.sizes[:, :-1]
        strides = self.page_strides
        return np.array_equal(ends, self.pointers[:, 1:]) and bool(
            (strides == strides[:, :1]).all()
        )

    def joined_layers(self, layers: range) -> Regions:
        """Merge contiguous layers into one."""
        chosen = slice(layers.start, layers.stop)
        sizes = self.sizes[:, chosen].sum(axis=1, keepdims=True)
        first = slice(layers.start, layers.start + 1)
        return Regions(self.pointers[:, first], self.page_strides[:, first], sizes)

    def blocks(
        self, pages: Addresses, layers: range, *, by_page: bool
    ) -> tuple[Addresses, Addresses]:
        """Return address and size of each block, int64, ordered by part, then by page and layer
        (`by_page`) or by layer and page."""
        pointers, strides, sizes = (
            table[:, layers.start : layers.stop, None]
            for table in (self.pointers, self.page_strides, self.sizes)
        )
        addresses = pointers + strides * pages
        sizes = np.broadcast_to(sizes, addresses.shape)
        if by_page:
            addresses, sizes = addresses.swapaxes(1, 2), sizes.swapaxes(1, 2)
        return addresses.reshape(-1), sizes.reshape(-1)


class BlockAddresses:
    """The addresses of a pool's blocks, which must be contiguous.

    Parameters
    ----------
    pool : in host-addressable memory, with a layout in which the slots of a page and layer are
        contiguous: "layer_first" or "page_first_direct"

    Attributes
    ----------
    regions : addresses of the blocks
    memory : (pointer, bytes) of the disjoint memory ranges that contain the blocks
    layer_bytes : bytes per page and layer

    Raises
    ------
    ValueError : the pool has other memory or another layout
    """

    def __init__(self, pool: Pool) -> None:
        if pool.placement == "device" and pool.device.kind != "host":
            raise ValueError(f"pool: expected host memory for the engine nixl, got {pool}")
        extents: list[tuple[int, int]] = []  # (start, end) of each part
        tables: list[Any] = []  # (pointer, stride, size) of each layer, by part, scales last
        for parts in ("parts", "scale_parts"):
            for number in range(len(getattr(pool.groups[0], parts))):
                table: list[tuple[int, int, int]] = []
                for group in pool.groups:
                    part = bytes_of(getattr(group, parts)[number])
                    table += _blocks_of(pool, part)
                    extents.append(_extent_of(part))
                tables.append(table)
        self.regions = Regions(*np.array(tables, np.int64).transpose(2, 0, 1))
        # Ranges to register; parts may be interleaved, so overlapping extents are merged.
        self.memory: list[tuple[int, int]] = []
        start, end = min(extents)
        for low, high in sorted(extents):
            if low > end:
                self.memory.append((start, end - start))
                start, end = low, high
            end = max(end, high)
        self.memory.append((start, end - start))
        self.layer_bytes = int(self.regions.sizes[:, 0].sum())
        self._starts = [start for start, _ in self.memory]
        uint8 = np.dtype(np.uint8)
        spans: Any = [array_at(pool, start, (size,), uint8) for start, size in self.memory]
        self._views = [memoryview(span) for span in spans]

    def views(self, addresses: Addresses, sizes: Addresses) -> list[memoryview]:
        """Return memoryviews of ranges of the pool's memory."""
        views = []
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            number = bisect.bisect_right(self._starts, address) - 1
            start = address - self._starts[number]
            views.append(self._views[number][start : start + size])
        return views


def _blocks_of(pool: Pool, part: Any) -> list[tuple[int, int, int]]:
    """Return the (pointer, page stride, size) of the blocks of each layer of a part."""
    _, num_layers, *block = part.shape
    page_stride, layer_stride, *inner = part.strides
    size = part.itemsize
    for count, stride in zip(reversed(block), reversed(inner), strict=True):
        if count > 1 and stride != size:
            raise ValueError(
                f"pool: expected contiguous slots of a page and layer for the engine nixl "
                f"(layer_first, page_first_direct), got {pool}"
            )
        size *= count
    return [(part.pointer + i * layer_stride, page_stride, size) for i in range(num_layers)]


def _extent_of(part: Any) -> tuple[int, int]:
    """Return the (start, end) addresses of a part."""
    extents = [(count - 1) * stride for count, stride in zip(part.shape, part.strides, strict=True)]
    low = part.pointer + sum(min(0, extent) for extent in extents)
    return low, low + sum(map(abs, extents)) + part.itemsize


def blocks_of(
    mine: Regions, pages: Addresses, theirs: Regions, their_pages: Addresses, layers: range,
    *, by_page: bool,
) -> tuple[Addresses, Addresses, Addresses]:  # fmt: skip
    """Pair the blocks of two pools, and merge neighbours: local addresses, remote addresses, sizes.

    They are ordered by part, then by page and layer (`by_page`) or by layer and page.
    """
    if by_page and mine.is_by_page and theirs.is_by_page:
        mine, theirs = mine.joined_layers(layers), theirs.joined_layers(layers)
        layers = range(1)
    local, sizes = mine.blocks(pages, layers, by_page=by_page)
    remote, _ = theirs.blocks(their_pages, layers, by_page=by_page)
    return joined(local, remote, sizes)


def joined(
    local: Addresses, remote: Addresses, sizes: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Merge blocks that are contiguous on both sides.

    >>> joined(np.array([0, 10, 40]), np.array([50, 60, 90]), np.array([10, 10, 10]))
    (array([ 0, 40]), array([50, 90]), array([20, 10]))
    """
    follows = (local[:-1] + sizes[:-1] == local[1:]) & (remote[:-1] + sizes[:-1] == remote[1:])
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return local[starts], remote[starts], np.add.reduceat(sizes, starts)


def cut(
    local: Addresses, remote: Addresses, sizes: Addresses, num_bytes: int
) -> tuple[Addresses, Addresses, Addresses, list[int]]:
    """Cut blocks to at most `num_bytes`, in groups of about `num_bytes` and at most twice that.

    Return the blocks, and the end index of each group.

    >>> cut(np.array([0, 40]), np.array([50, 90]), np.array([10, 4]), 4)
    (array([ 0,  4,  8, 40]), array([50, 54, 58, 90]), array([4, 4, 2, 4]), [1, 2, 3, 4])
    """
    counts = -(-sizes // num_bytes)  # pieces per block
    if counts.max() > 1:
        numbers = np.repeat(np.arange(len(sizes)), counts)
        firsts = np.cumsum(counts) - counts
        offsets = (np.arange(len(numbers)) - firsts[numbers]) * num_bytes
        local, remote = local[numbers] + offsets, remote[numbers] + offsets
        sizes = np.minimum(sizes[numbers] - offsets, num_bytes)
    groups = (np.cumsum(sizes) - 1) // num_bytes
    ends = [*(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(sizes)]
    return local, remote, sizes, ends


# --- Processes of peers ---


@dataclass(frozen=True)
class Process:
    """Identifies a process across machines, even if its pid is reused."""

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Process:
        """Describe this process; `boot` is empty where the system does not provide it."""
        try:
            return cls(*_machine(), os.getpid(), _started(os.getpid()))
        except OSError:
            return cls("", "", os.getpid(), 0)

    def is_dead(self) -> bool:
        """Return whether the process is known to be dead; False on another machine or namespace."""
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
    """Return the start time of a process, in ticks since boot; 0 for a zombie, which is dead."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


# --- Agents ---


class Agent:
    """A NIXL agent for the memory of one pool.

    Each call takes a lock. NIXL's progress thread is disabled, since it would spin: `poll` and
    `Reading.done` make progress.

    Parameters
    ----------
    blocks : of the pool; exactly their memory is registered
    """

    def __init__(self, blocks: BlockAddresses) -> None:
        nixl = load()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._lock = threading.Lock()
        self._has_stopped = False
        self._unreleased: list[Any] = []  # handles that NIXL failed to release
        self._agent: Any = nixl.nixl_agent(f"kvcupy-{secrets.token_hex(8)}", config)
        if "UCX" not in self._agent.backends:
            raise KvcupyError("the engine nixl needs NIXL's plugin UCX, which is missing")
        self._registered = [
            self._agent.register_memory([(pointer, num_bytes, 0, "")], "DRAM")
            for pointer, num_bytes in blocks.memory
        ]
        self.metadata: bytes = self._agent.get_agent_metadata()
        # (name, number of pulls) by metadata; the longest idle come first.
        self._peers: dict[bytes, tuple[Any, int]] = {}

    def poll(self) -> None:
        """Make progress for peers that connect, or that read by protocols involving this side."""
        with self._lock:
            if self._agent is not None:
                self._agent.update_notifs()

    def add_peer(self, metadata: bytes) -> Any:
        """Add the agent of an authenticated peer until `release_peer`; return its name."""
        with self._lock:
            name, count = self._peers.pop(metadata, (None, 0))
            if name is None:
                idle = [k for k, (_, used) in self._peers.items() if not used]
                for old in idle[: max(0, len(idle) - _MAX_IDLE_PEERS + 1)]:
                    self._forget(old)
                name = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = name, count + 1
            return name

    def release_peer(self, metadata: bytes, *, failed: bool) -> None:
        """End the use of a peer; a failed peer must reconnect."""
        with self._lock:
            if metadata not in self._peers:
                return
            name, count = self._peers.pop(metadata)
            self._peers[metadata] = name, count - 1
            if failed and count == 1:
                self._forget(metadata)

    def _forget(self, metadata: bytes) -> None:
        name, _ = self._peers.pop(metadata)
        if self._agent is not None:
            with contextlib.suppress(Exception):  # NIXL removes disconnected peers by itself
                self._agent.remove_remote_agent(name)

    def prepare(
        self, peer: Any, process: Process, local: Addresses, remote: Addresses, sizes: Addresses,
        bounds: Iterable[tuple[int, int]],
    ) -> list[Reading]:  # fmt: skip
        """Prepare READs from a peer's memory into this pool, for `begin`.

        `bounds` has the (start, stop) of the blocks of each READ. READs end in their order, or are
        dropped together.
        """
        described = np.zeros((2, len(sizes), 3), np.uint64)
        described[0, :, 0], described[1, :, 0], described[:, :, 1] = local, remote, sizes
        every = np.arange(len(sizes), dtype=np.int32)
        prepared: list[Any] = []  # NIXL handles
        with self._lock:
            agent = self._agent
            try:
                prepared.append(agent.prep_xfer_dlist("NIXL_INIT_AGENT", described[0], "DRAM"))
                prepared.append(agent.prep_xfer_dlist(peer, described[1], "DRAM"))
                mine, theirs = prepared
                for start, stop in bounds:
                    some = every[start:stop]
                    prepared.append(agent.make_prepped_xfer("READ", mine, some, theirs, some))
            except BaseException:
                self._release(prepared[::-1])
                raise
        mine, theirs, *handles = prepared
        readings = [Reading(self, process, handle) for handle in handles]
        readings[-1].lists = (mine, theirs)
        return readings

    def begin(self, reading: Reading) -> None:
        """Start a READ; a memory copy has ended when this returns."""
        with self._lock:
            if self._has_stopped:
                reading.fail(KvcupyError("the engine was closed"), is_over=True)
                return
            reading.state = "PROC"  # stays if an exception leaves the READ in flight
            try:
                reading.state = self._agent.transfer(reading.handle)
            except Exception as error:  # NIXL's exception types differ between versions
                reading.fail(error, is_over=type(error).__name__ in _FINAL)

    def state_of(self, handle: Any) -> str:
        with self._lock:
            return str(self._agent.check_xfer_state(handle))

    def release(self, *prepared: Any) -> None:
        with self._lock:
            self._release(prepared)

    def _release(self, prepared: Iterable[Any]) -> None:
        """Release NIXL handles explicitly, since their finalizers would not take the lock."""
        for each in prepared:
            try:
                each.release()
            except Exception:  # such as a disconnected peer
                self._unreleased.append(each)

    def stop(self) -> None:
        """Prevent further READs."""
        with self._lock:
            self._has_stopped = True

    def close(self) -> None:
        """Deregister the memory; no READ may be in flight."""
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
    """One READ: prepared, in flight, done, or failed. Tracks whether bytes may still arrive.

    NIXL has no abort, so an abandoned READ stays in flight. It ends when its handle reports the
    end, or when the peer's process is known to be dead and its last data has had time to arrive.
    """

    def __init__(self, agent: Agent, process: Process, handle: Any) -> None:
        self.state = "NEW"
        self.failure: BaseException | None = None
        self.handle = handle
        self.lists: tuple[Any, ...] = ()  # block lists to release with the handle
        self._agent, self._process = agent, process
        self._dead_since_s: float | None = None
        self._check_at_s = time.monotonic() + _LIVENESS_INTERVAL_S
        self._lock = threading.Lock()

    def fail(self, error: BaseException, *, is_over: bool) -> None:
        self.failure = error
        if is_over:
            self.state = "ERR"

    def done(self) -> bool:
        """Make progress; return whether no more bytes can arrive."""
        with self._lock:
            if self.handle is None:
                return True
            if self.state == "PROC":
                try:
                    self.state = self._agent.state_of(self.handle)
                except Exception as error:  # as in Agent.begin
                    self.fail(error, is_over=type(error).__name__ in _FINAL)
            if self.state == "PROC":
                self._check_liveness()
            if self.state in ("NEW", "PROC"):
                return False
            if self.state != "DONE" and self.failure is None:
                self.failure = KvcupyError(f"NIXL ended a transfer as {self.state}")
            self.drop()
            return True

    def drop(self) -> None:
        """Release the NIXL handles of a READ that has ended or not begun."""
        self._agent.release(self.handle, *self.lists)
        self.handle, self.lists = None, ()

    def _check_liveness(self) -> None:
        now = time.monotonic()
        if now < self._check_at_s:
            return
        self._check_at_s = now + _LIVENESS_INTERVAL_S
        if self._dead_since_s is None:
            if self._process.is_dead():
                self._dead_since_s = now
        elif now - self._dead_since_s > _DRAIN_AFTER_DEATH_S:
            error = KvcupyError(f"the process {self._process.pid} of the peer is dead")
            self.fail(error, is_over=True)
