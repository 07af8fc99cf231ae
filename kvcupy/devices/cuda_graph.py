"""Captures and the graphs that they become."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .. import observe
from ..cuda_api import DEFAULT_STREAMS, UNJOINED
from ..errors import CaptureError, DeviceError
from ..pickling import ProcessLocal
from .launch_hooks import LaunchHooks

if TYPE_CHECKING:
    from .cuda import CudaDevice
    from .cuda_streams import Stream


class Graph(ProcessLocal):
    """Captured work, or a capture in progress. Each launch reads its arrays anew.

    Attributes
    ----------
    open : whether the capture goes on
    id : CUDA's number of the capture
    hooks : what is called around each launch
    kept : what the captured work needs: arrays, host functions, graphs within the graph
    last_stream : where it was last launched, so that a host function's failure surfaces there
    """

    def __init__(self, device: CudaDevice | None) -> None:
        self.device = device
        self.open = True
        self.id: int | None = None
        self.hooks = LaunchHooks()
        self.kept: list[object] = []
        self.last_stream = 0
        self._streams: list[Stream] = []
        self._graph: Any = None

    def begin(self, stream: Stream) -> None:
        """Start capturing `stream`."""
        device = stream.device
        try:
            with device.current():
                stream.cupy.begin_capture(device.api.runtime.streamCaptureModeRelaxed)
                self.id = device.api.capture_id(stream.pointer)
        except device.api.errors as error:
            raise device.api.failure(f"capture of {stream!r}", error) from error
        self.last_stream = stream.pointer
        self.join(stream)

    def join(self, stream: Stream) -> None:
        """Note that `stream` takes part, because it waited for a captured one."""
        self._streams.append(stream)
        stream.device.captures[stream.pointer] = self

    def keep(self, owners: Sequence[object]) -> None:
        """Keep owners for as long as the graph may be launched."""
        self.kept.append(tuple(o for o in owners if not _is_kept_by_capture(o)))

    def finish(self) -> None:
        """End the capture and make the graph ready for launches."""
        device = self._origin.device
        try:
            with device.current(), device.api.relaxed():  # what it instantiates takes memory
                self._graph = self._origin.cupy.end_capture()
        except device.api.errors as error:
            if getattr(error, "status", None) == UNJOINED:
                forks = ", ".join(sorted({s.name for s in self._streams[1:]})) or "a stream"
                raise CaptureError(
                    f"{forks}: forked into the capture of {self._origin.name} and not joined; let "
                    f"{self._origin.name} wait for it before the block ends"
                ) from error
            raise device.api.failure(f"end of the capture of {self._origin!r}", error) from error
        finally:
            self._close()

    def abort(self) -> None:
        """End the capture and drop what it holds; the streams are usable again."""
        try:
            # Spoilt, or with a fork unjoined: CUDA complains and ends it all the same.
            device = self._origin.device
            with device.current(), device.api.relaxed(), suppress(RuntimeError):
                self._origin.cupy.end_capture()
        finally:
            self._close()

    def launch(self, stream: Any = None) -> None:
        """Replay on a stream; None is CuPy's current one.

        Raises
        ------
        CaptureError : the capture has not ended, or failed; or `stream` is being captured

        Notes
        -----
        Capture: illegal. CUDA launches no graph into a capture; capture the work itself there.
        """
        if self._graph is None or self.device is None:
            raise CaptureError("the graph cannot be launched: its capture did not end well")
        target = self.device.as_stream(stream, "cupy")
        if target.capturing:
            raise CaptureError(
                f"{target.name} is being captured: a graph cannot be launched into a capture; "
                "capture its work there instead"
            )
        with self.hooks.around(target):
            observe.issue(
                lambda: observe.Operation("graph", target),
                lambda: self._launch(target),
            )

    def _launch(self, target: Stream) -> None:
        device = target.device
        self.last_stream = target.pointer
        try:
            with device.current(), device.api.relaxed():  # the first one may take memory too
                self._graph.launch(target.cupy)
        except device.api.errors as error:
            raise device.api.failure(f"launch of a graph on {target!r}", error) from error
        device.retain(target, (self,))

    @property
    def _origin(self) -> Stream:
        if not self._streams:
            raise DeviceError("the capture was never begun")
        return self._streams[0]

    def _close(self) -> None:
        self.open = False
        if self._graph is None:
            self.kept.clear()
        for stream in self._streams:
            stream.device.captures.pop(stream.pointer, None)


FOREIGN = Graph(None)
"""Stands for a capture that another library began; whoever did keeps its arrays alive."""


def capture_of(device: CudaDevice, pointer: int) -> Graph | None:
    """Return the capture that a CUDA stream is part of, FOREIGN if kvcupy did not begin it."""
    tracked = device.captures.get(pointer) if pointer not in DEFAULT_STREAMS else None
    if tracked is not None:
        return tracked
    with device.current():
        if not device.api.is_capturing(pointer):
            return None
        if not device.captures:
            return FOREIGN
        number = device.api.capture_id(pointer)
    for graph in set(device.captures.values()):  # forked into ours by somebody else's wait?
        if graph.id is not None and graph.id == number:
            return graph
    return FOREIGN


class ForeignPoint:
    """Where in somebody else's capture an event was recorded.

    Attributes
    ----------
    id : CUDA's number of the capture
    """

    __slots__ = ("_stream", "id")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream  # which lives as long as it may be asked for
        self.id = stream.capture_id

    @property
    def open(self) -> bool:
        """Whether the capture goes on, in good order or not."""
        return self._stream.capturing and self._stream.capture_id in (self.id, None)


def _is_kept_by_capture(owner: object) -> bool:
    """Return whether an array is a buffer that the capture keeps anyway (`scratch`)."""
    return bool(getattr(getattr(owner, "owner", None), "kept_by_capture", False))
