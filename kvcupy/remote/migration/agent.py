"""A NIXL agent, as far as senders and receivers of pages use one.

Source: ai-dynamo/nixl `src/api/python/_api.py`, the wheel nixl-cu12, which works without torch.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import KvcupyError
from .memory import Addresses

_RDMA_DEVICES = Path("/sys/class/infiniband")
WHEELS = ("nixl_cu12", "nixl_cu13")
_MAX_IDLE_PEERS = 64
# After these errors, a READ is not in flight. After others it may be.
_FINAL = (
    "nixlRemoteDisconnectError", "nixlBackendError", "nixlCancelledError", "nixlNotPostedError",
)  # fmt: skip
_LIVENESS_INTERVAL_S = 0.1
_DRAIN_AFTER_DEATH_S = 2.0  # for data left in the sockets of a dead peer


def load_nixl() -> Any:
    """Import NIXL's Python module, with its log redirected from stdout to stderr."""
    if not _RDMA_DEVICES.is_dir():
        # UCX's plugin for RDMA comes with a copy of libnl, which crashes at the exit of a process
        # that has loaded the system's, too.
        os.environ.setdefault("UCX_MODULES", "^ib")
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
        "pages between processes need NIXL: pip install --no-deps nixl-cu12 (torch, which it "
        "names, is not needed)"
    ) from cause


# --- Processes of peers ---


@dataclass(frozen=True)
class Process:
    """Identifies a process across machines, even if its pid is reused."""

    machine: str  # and its namespace of pids; empty where the system does not provide them
    pid: int
    started: int

    @classmethod
    def current(cls) -> Process:
        try:
            return cls(_machine(), os.getpid(), _started(os.getpid()))
        except OSError:
            return cls("", os.getpid(), 0)

    def is_dead(self) -> bool:
        """Return whether the process is known to be dead; False on another machine or namespace."""
        try:
            is_here = self.machine != "" and _machine() == self.machine
            return is_here and _started(self.pid) != self.started
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            return False


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int:
    """Return the start time of a process, in ticks since boot; 0 for a zombie, which is dead."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


# --- The agent ---


class NixlAgent:
    """A NIXL agent over UCX: RDMA, shared memory or TCP, as UCX chooses.

    Each call takes a lock. NIXL's progress thread is disabled, since it would spin: `poll` and
    `Reading.done` make progress. `ranges` of memory are registered; a peer needs `metadata`.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        nixl = load_nixl()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._lock = threading.Lock()
        self._unreleased: list[Any] = []  # handles that NIXL failed to release
        self._agent: Any = nixl.nixl_agent(f"kvcupy-{secrets.token_hex(8)}", config)
        if "UCX" not in self._agent.backends:
            raise KvcupyError("pages between processes need NIXL's plugin UCX, which is missing")
        self._registered = [
            self._agent.register_memory([(pointer, num_bytes, 0, "")], "DRAM")
            for pointer, num_bytes in ranges
        ]
        self.metadata: bytes = self._agent.get_agent_metadata()
        # (name, number of users) by metadata; the longest idle come first.
        self._peers: dict[bytes, tuple[Any, int]] = {}

    def poll(self) -> list[bytes]:
        """Make progress; return the messages of peers."""
        with self._lock:
            notified = {} if self._agent is None else self._agent.get_new_notifs()
        return [message for messages in notified.values() for message in messages]

    def notify(self, peer: Any, message: bytes) -> None:
        """Send a message, which may be lost."""
        with self._lock:
            self._agent.send_notif(peer, message)

    def connect(self, metadata: bytes) -> Any:
        """Add a peer until `disconnect`; return its name."""
        with self._lock:
            name, count = self._peers.pop(metadata, (None, 0))
            if name is None:
                idle = [known for known, (_, users) in self._peers.items() if not users]
                for old in idle[: max(0, len(idle) - _MAX_IDLE_PEERS + 1)]:
                    self._forget(old)
                name = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = name, count + 1
            return name

    def disconnect(self, metadata: bytes, *, failed: bool) -> None:
        """End the use of a peer; a failed one must connect again."""
        with self._lock:
            name, count = self._peers.pop(metadata)
            self._peers[metadata] = name, count - 1
            if failed and count == 1:
                self._forget(metadata)

    def _forget(self, metadata: bytes) -> None:
        name, _ = self._peers.pop(metadata)
        with contextlib.suppress(Exception):  # NIXL removes disconnected peers by itself
            self._agent.remove_remote_agent(name)

    def read(
        self, peer: Any, process: Process, local: Addresses, remote: Addresses, sizes: Addresses
    ) -> Reading:
        """Post a READ of pieces of a peer's memory."""
        described = np.zeros((2, len(sizes), 3), np.uint64)
        described[0, :, 0], described[1, :, 0], described[:, :, 1] = local, remote, sizes
        every = np.arange(len(sizes), dtype=np.int32)
        prepared: list[Any] = []
        with self._lock:
            agent = self._agent
            try:
                prepared.append(agent.prep_xfer_dlist("NIXL_INIT_AGENT", described[0], "DRAM"))
                prepared.append(agent.prep_xfer_dlist(peer, described[1], "DRAM"))
                prepared.append(
                    agent.make_prepped_xfer("READ", prepared[0], every, prepared[1], every)
                )
            except BaseException:
                self._release(prepared)
                raise
            reading = Reading(self, process, prepared)
            try:
                reading.state = agent.transfer(prepared[2])
            except Exception as error:  # NIXL's exception types differ between versions
                reading.fail(error, is_over=type(error).__name__ in _FINAL)
        return reading

    def state_of(self, prepared: Sequence[Any]) -> str:
        with self._lock:
            return str(self._agent.check_xfer_state(prepared[2]))

    def release(self, prepared: Sequence[Any]) -> None:
        with self._lock:
            self._release(prepared)

    def _release(self, prepared: Iterable[Any]) -> None:
        """Release NIXL handles explicitly, since their finalizers would not take the lock."""
        for each in reversed(list(prepared)):
            try:
                each.release()
            except Exception:  # such as a disconnected peer
                self._unreleased.append(each)

    def close(self) -> None:
        """Release all memory; no READ may be in flight."""
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
    """A READ in flight, done or failed. Tracks whether bytes may still arrive.

    NIXL has no abort, so an abandoned READ stays in flight. It ends when its handle reports the
    end, or when the peer's process is known to be dead and its last data has had time to arrive.
    """

    def __init__(self, agent: NixlAgent, process: Process, prepared: Sequence[Any]) -> None:
        self.state = "PROC"  # stays if an exception leaves the READ in flight
        self.failure: BaseException | None = None
        self._agent, self._process = agent, process
        self._prepared = prepared  # lists of pieces, and the READ
        self._dead_since_s: float | None = None
        self._check_at_s = time.monotonic() + _LIVENESS_INTERVAL_S

    def fail(self, error: BaseException, *, is_over: bool) -> None:
        self.failure = error
        if is_over:
            self.state = "ERR"

    def done(self) -> bool:
        """Make progress; return whether no more bytes can arrive."""
        if not self._prepared:
            return True
        if self.state == "PROC":
            try:
                self.state = self._agent.state_of(self._prepared)
            except Exception as error:  # as in NixlAgent.read
                self.fail(error, is_over=type(error).__name__ in _FINAL)
        if self.state == "PROC":
            self._check_liveness()
        if self.state == "PROC":
            return False
        if self.state != "DONE" and self.failure is None:
            self.failure = KvcupyError(f"NIXL ended a transfer as {self.state}")
        self._agent.release(self._prepared)
        self._prepared = ()
        return True

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
