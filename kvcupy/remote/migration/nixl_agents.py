"""NIXL's agents for the memory of pools, and where the blocks of a pool lie in it.

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
_MAX_PEERS = 64  # that stay connected without a pull
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


# --- Which bytes ---


@dataclass(frozen=True)
class Regions:
    """Where blocks lie, each of a page, a layer and a part: K, V, or scales of either.

    Attributes
    ----------
    pointers : int64 (parts, layers), of page 0
    page_strides : int64 (parts, layers), bytes from page to page
    sizes : int64 (parts, layers), bytes of a block
    """

    pointers: Addresses
    page_strides: Addresses
    sizes: Addresses

    @cached_property
    def is_by_page(self) -> bool:
        """Whether the layers of a page lie side by side, in every page."""
        ends = self.pointers[:, :-1] + self.sizes[:, :-1]
        strides = self.page_strides
        return np.array_equal(ends, self.pointers[:, 1:]) and bool(
            (strides == strides[:, :1]).all()
        )

    def joined_layers(self, layers: range) -> Regions:
        """Return layers as one, where they lie side by side."""
        chosen = slice(layers.start, layers.stop)
        sizes = self.sizes[:, chosen].sum(axis=1, keepdims=True)
        first = slice(layers.start, layers.start + 1)
        return Regions(self.pointers[:, first], self.page_strides[:, first], sizes)

    def blocks(
        self, pages: Addresses, layers: range, *, by_page: bool
    ) -> tuple[Addresses, Addresses]:
        """Return address and size of each block, int64, by part, then by page and layer or by layer
        and page."""
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
    """The addresses of a pool's blocks of one page and one layer, which are contiguous.

    Parameters
    ----------
    pool : with memory that the host can address, and a layout that keeps the slots of a page and a
        layer together: "layer_first" or "page_first_direct"

    Attributes
    ----------
    regions : where they are
    memory : pointer and bytes of all memory that they lie in
    layer_bytes : of a page in one layer

    Raises
    ------
    ValueError : it is another pool
    """

    def __init__(self, pool: Pool) -> None:
        if pool.placement == "device" and pool.device.kind != "host":
            raise ValueError(f"pool: expected host memory for the engine nixl, got {pool}")
        extents: list[tuple[int, int]] = []  # of all memory, from and to
        tables: list[Any] = []  # by part, scales last: of each layer pointer, stride, size
        for parts in ("parts", "scale_parts"):
            for number in range(len(getattr(pool.groups[0], parts))):
                table: list[tuple[int, int, int]] = []
                for group in pool.groups:
                    part = bytes_of(getattr(group, parts)[number])
                    table += _blocks_of(pool, part)
                    extents.append(_extent_of(part))
                tables.append(table)
        self.regions = Regions(*np.array(tables, np.int64).transpose(2, 0, 1))
        # Pointer and bytes of what is to be registered: parts may lie between one another.
        self.memory: list[tuple[int, int]] = []
        start, end = min(extents)
        for low, high in sorted(extents):
            if low > end:
                self.memory.append((start, end - start))
                start, end = low, high
            end = max(end, high)
        self.memory.append((start, end - start))
        self.layer_bytes = int(self.regions.sizes[:, 0].sum())  # of a page
        self._starts = [start for start, _ in self.memory]
        uint8 = np.dtype(np.uint8)
        spans: Any = [array_at(pool, start, (size,), uint8) for start, size in self.memory]
        self._views = [memoryview(span) for span in spans]

    def views(self, addresses: Addresses, sizes: Addresses) -> list[memoryview]:
        """Return memory of the pool."""
        views = []
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            number = bisect.bisect_right(self._starts, address) - 1
            start = address - self._starts[number]
            views.append(self._views[number][start : start + size])
        return views


def _blocks_of(pool: Pool, part: Any) -> list[tuple[int, int, int]]:
    """Return of each layer of a part the pointer, the stride and the size of blocks."""
    _, num_layers, *block = part.shape
    page_stride, layer_stride, *inner = part.strides
    size = part.itemsize
    for count, stride in zip(reversed(block), reversed(inner), strict=True):
        if count > 1 and stride != size:
            raise ValueError(
                f"pool: expected slots of a page and a layer side by side for the engine nixl "
                f"(layer_first, page_first_direct), got {pool}"
            )
        size *= count
    return [(part.pointer + i * layer_stride, page_stride, size) for i in range(num_layers)]


def _extent_of(part: Any) -> tuple[int, int]:
    """Return from where to where a part lies, whose blocks are contiguous."""
    extents = [(count - 1) * stride for count, stride in zip(part.shape, part.strides, strict=True)]
    low = part.pointer + sum(min(0, extent) for extent in extents)
    return low, low + sum(map(abs, extents)) + part.itemsize


def blocks_of(
    mine: Regions, pages: Addresses, theirs: Regions, their_pages: Addresses, layers: range,
    *, by_page: bool,
) -> tuple[Addresses, Addresses, Addresses]:  # fmt: skip
    """Return what corresponds in two pools: both addresses, and sizes, of as few blocks as can be.

    They are in the order of parts, and then by page and layer, or by layer and page.
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
    """Join blocks that follow one another on both sides.

    >>> joined(np.array([0, 10, 40]), np.array([50, 60, 90]), np.array([10, 10, 10]))
    (array([ 0, 40]), array([50, 90]), array([20, 10]))
    """
    follows = (local[:-1] + sizes[:-1] == local[1:]) & (remote[:-1] + sizes[:-1] == remote[1:])
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return local[starts], remote[starts], np.add.reduceat(sizes, starts)


def cut(
    local: Addresses, remote: Addresses, sizes: Addresses, num_bytes: int
) -> tuple[Addresses, Addresses, Addresses, list[int]]:
    """Cut blocks into groups of about so many bytes, at most twice that; return blocks of at most
    so many, and where each group ends.

    >>> cut(np.array([0, 40]), np.array([50, 90]), np.array([10, 4]), 4)
    (array([ 0,  4,  8, 40]), array([50, 54, 58, 90]), array([4, 4, 2, 4]), [1, 2, 3, 4])
    """
    counts = -(-sizes // num_bytes)  # that a block is cut into
    if counts.max() > 1:
        numbers = np.repeat(np.arange(len(sizes)), counts)
        firsts = np.cumsum(counts) - counts
        offsets = (np.arange(len(numbers)) - firsts[numbers]) * num_bytes
        local, remote = local[numbers] + offsets, remote[numbers] + offsets
        sizes = np.minimum(sizes[numbers] - offsets, num_bytes)
    groups = (np.cumsum(sizes) - 1) // num_bytes
    ends = [*(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(sizes)]
    return local, remote, sizes, ends


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
        self._has_stopped = False
        self._unreleased: list[Any] = []  # what NIXL would not release
        self._agent: Any = nixl.nixl_agent(f"kvcupy-{secrets.token_hex(8)}", config)
        if "UCX" not in self._agent.backends:
            raise KvcupyError("the engine nixl needs NIXL's plugin UCX, which is missing")
        self._registered = [
            self._agent.register_memory([(pointer, num_bytes, 0, "")], "DRAM")
            for pointer, num_bytes in blocks.memory
        ]
        self.metadata: bytes = self._agent.get_agent_metadata()
        # By metadata: name, and pulls that use it; the longest idle first.
        self._peers: dict[bytes, tuple[Any, int]] = {}

    def poll(self) -> None:
        """Let peers connect, and read by protocols that need this side."""
        with self._lock:
            if self._agent is not None:
                self._agent.update_notifs()

    def add_peer(self, metadata: bytes) -> Any:
        """Return the name of the agent of an authenticated peer, until `release_peer`."""
        with self._lock:
            name, count = self._peers.pop(metadata, (None, 0))
            if name is None:
                idle = [k for k, (_, used) in self._peers.items() if not used]
                for old in idle[: max(0, len(idle) - _MAX_PEERS + 1)]:
                    self._forget(old)
                name = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = name, count + 1
            return name

    def release_peer(self, metadata: bytes, *, failed: bool) -> None:
        """End the use of a peer; one that has failed has to connect anew."""
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
            with contextlib.suppress(Exception):  # it has disconnected: NIXL has forgotten it
                self._agent.remove_remote_agent(name)

    def prepare(
        self, peer: Any, process: Process, local: Addresses, remote: Addresses, sizes: Addresses,
        bounds: Iterable[tuple[int, int]],
    ) -> list[Reading]:  # fmt: skip
        """Return READs of some blocks of a peer's memory into one's own, for `begin`.

        `bounds` are the first and the end of the blocks of each. They end in their order, or are
        dropped together.
        """
        described = np.zeros((2, len(sizes), 3), np.uint64)
        described[0, :, 0], described[1, :, 0], described[:, :, 1] = local, remote, sizes
        every = np.arange(len(sizes), dtype=np.int32)
        prepared: list[Any] = []  # what NIXL keeps
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
        """Begin a READ; where it is a copy in memory it is over when this returns."""
        with self._lock:
            if self._has_stopped:
                reading.fail(KvcupyError("the engine was closed"), is_over=True)
                return
            reading.state = "PROC"  # also where what is raised leaves it open
            try:
                reading.state = self._agent.transfer(reading.handle)
            except Exception as error:  # what NIXL raises differs from version to version
                reading.fail(error, is_over=type(error).__name__ in _FINAL)

    def state_of(self, handle: Any) -> str:
        with self._lock:
            return str(self._agent.check_xfer_state(handle))

    def release(self, *prepared: Any) -> None:
        with self._lock:
            self._release(prepared)

    def _release(self, prepared: Iterable[Any]) -> None:
        """Release what NIXL keeps, for its finalizers would do so without the lock."""
        for each in prepared:
            try:
                each.release()
            except Exception:  # of a peer that is gone
                self._unreleased.append(each)

    def stop(self) -> None:
        """Let no READ begin any more."""
        with self._lock:
            self._has_stopped = True

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
    """One READ: prepared, in flight, over, or failed. It says when no byte lands any more.

    Giving up does not end it: NIXL has no abort. It has ended when its handle says so, or when the
    peer's process is known to be dead and what it had sent has had time to arrive.
    """

    def __init__(self, agent: Agent, process: Process, handle: Any) -> None:
        self.state = "NEW"
        self.failure: BaseException | None = None
        self.handle = handle
        self.lists: tuple[Any, ...] = ()  # of blocks, to release with it
        self._agent, self._process = agent, process
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
            if self.handle is None:
                return True
            if self.state == "PROC":
                try:
                    self.state = self._agent.state_of(self.handle)
                except Exception as error:  # see Agent.begin
                    self.fail(error, is_over=type(error).__name__ in _FINAL)
            if self.state == "PROC":
                self._look_for_death()
            if self.state in ("NEW", "PROC"):
                return False
            if self.state != "DONE" and self.failure is None:
                self.failure = KvcupyError(f"NIXL ended a transfer as {self.state}")
            self.drop()
            return True

    def drop(self) -> None:
        """Let go what NIXL keeps of one that is over, or has not begun."""
        self._agent.release(self.handle, *self.lists)
        self.handle, self.lists = None, ()

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
