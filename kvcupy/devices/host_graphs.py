"""Captures on the host device, and the graphs that they become."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import observe
from ..config import config
from ..errors import CaptureError
from ..pickling import ProcessLocal
from .host_events import HostEvent
from .protocol import LaunchHooks

if TYPE_CHECKING:
    from .host import HostDevice
    from .host_streams import HostStream


class Point:
    """A recorded event inside a capture: which node, and what had happened before it."""

    def __init__(self, capture: Capture, node: int, seen: dict[HostStream, int]) -> None:
        self.capture = capture
        self.node = node
        self.seen = seen


class Capture:
    """A capture in progress: the program so far, and what each stream has waited for."""

    def __init__(self, origin: HostStream) -> None:
        self.origin = origin
        self.open = True
        self.hooks = LaunchHooks()
        self.program: list[tuple[int, str, Any]] = []  # lane, kind, function or node
        self.lanes: dict[HostStream, int] = {}
        self.counts: dict[HostStream, int] = {}  # actions of each lane so far
        self.seen: dict[HostStream, dict[HostStream, int]] = {}  # of others, known to be done
        self._enter(origin)

    def _enter(self, stream: HostStream) -> None:
        self.lanes[stream] = len(self.lanes)
        self.counts[stream] = 0
        self.seen[stream] = {}
        stream._capture = self

    def add(self, stream: HostStream, kind: str, payload: Any) -> None:
        self.counts[stream] += 1
        self.seen[stream][stream] = self.counts[stream]
        self.program.append((self.lanes[stream], kind, payload))

    def mark(self, stream: HostStream) -> Point:
        point = Point(self, len(self.program), dict(self.seen[stream]))
        self.program.append((self.lanes[stream], "record", point.node))
        return point

    def join(self, stream: HostStream, point: Point) -> None:
        if stream._capture is None:
            self._enter(stream)
        elif stream._capture is not self:
            raise CaptureError("two captures cannot wait for one another")
        self.add(stream, "wait", point.node)
        mine = self.seen[stream]
        for other, count in point.seen.items():
            mine[other] = max(mine.get(other, 0), count)

    def require_joined(self) -> None:
        known = self.seen[self.origin]
        for stream, count in self.counts.items():
            if known.get(stream, 0) < count:
                raise CaptureError(f"{stream.name} was forked into the capture and never joined")

    def close(self) -> None:
        self.open = False
        for stream in self.lanes:
            stream._capture = None


class HostGraph(ProcessLocal):
    """Captured work of one or more streams. Each launch reads its arrays anew."""

    def __init__(
        self, device: HostDevice, capture: Capture, make_stream: Callable[[HostDevice], HostStream]
    ) -> None:
        self.device = device
        self.finished = False
        self._capture = capture
        self._make_stream = make_stream
        self._streams: list[HostStream] = []  # for the lanes beside the one launched on
        self._last: HostEvent | None = None
        self._lock = threading.Lock()

    def launch(self, stream: Any = None) -> None:
        """Replay on a stream; with None the call returns when the work is done.

        Raises
        ------
        CaptureError : the capture has not ended, or failed; or `stream` is captured, and the graph
            calls functions before each launch (`Stream.on_launch`), or the host device is strict: a
            GPU launches no graph into a capture
        """
        if not self.finished:
            raise CaptureError("the graph cannot be launched: its capture did not end well")
        target = self.device.as_stream(stream)
        with self._capture.hooks.around(target):
            if config.strict and target.capturing:
                raise CaptureError(
                    f"{target.name} is being captured: a graph cannot be launched into a capture"
                )
            observe.issue(lambda: observe.Operation("graph", target), lambda: self._launch(target))

    def _launch(self, target: Any) -> None:
        if target.inline or target.capturing:
            target.enqueue(self._launch_and_wait)
        else:
            self._replay(target)

    def _launch_and_wait(self) -> None:
        own = self._make_stream(self.device)
        self._replay(own)
        own.synchronize()

    def _replay(self, target: HostStream) -> None:
        with self._lock:
            while len(self._streams) < len(self._capture.lanes) - 1:
                self._streams.append(self._make_stream(self.device))
            lanes = [target, *self._streams]
            for stream in self._streams:
                stream.forgive()  # a failed replay has surfaced in the stream that launched it
            if self._last is not None:
                target._follow(self._last)
            events: dict[int, HostEvent] = {}
            for lane, kind, payload in self._capture.program:
                if kind == "run":
                    lanes[lane].enqueue(payload)
                elif kind == "record":
                    events[payload] = lanes[lane]._mark(HostEvent())
                else:
                    lanes[lane]._follow(events[payload])
            self._last = target._mark(HostEvent())
