"""Events of a GPU, and the handles that they are made of."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..cuda_api import DISABLE_TIMING
from ..errors import CaptureError
from ..pickling import ProcessLocal

if TYPE_CHECKING:
    from .cuda import CudaDevice
    from .cuda_graph import ForeignPoint, Graph
    from .cuda_streams import Stream


class Event(ProcessLocal):
    """A point in a stream; recording it again moves it. Made by `Device.event`.

    An event that was never recorded, or last in a capture that has ended, counts as done.

    Attributes
    ----------
    capture : where it was last recorded, if that was in a capture, anybody's
    """

    __slots__ = ("__weakref__", "_handle", "_stream", "capture", "device", "timing")

    def __init__(self, device: CudaDevice, timing: bool = False) -> None:
        self.device = device
        self.timing = timing
        self._handle = 0  # no CUDA event before the first record
        self._stream = 0
        self.capture: Graph | ForeignPoint | None = None

    def __del__(self) -> None:
        if self._handle and not sys.is_finalizing():
            self.device.events.give(self._handle, self.timing)

    @property
    def pointer(self) -> int:
        """The CUDA event, made at the first use."""
        if not self._handle:
            self._handle = self.device.events.take(self.timing)
        return self._handle

    @property
    def recorded(self) -> bool:
        """Whether there is a point to wait for."""
        return self._handle != 0 and (self.capture is None or self.capture.open)

    def done(self) -> bool:
        """Return whether the stream has passed the point.

        Raises
        ------
        CaptureError : it was recorded in a capture that goes on
        DeviceError : the GPU has failed
        """
        self._refuse_captured()
        if not self.recorded:
            return True
        api = self.device.api
        with api.relaxed():
            status = api.runtime.eventQuery(self._handle)
        return api.query("event", status)

    def synchronize(self) -> None:
        """Wait until the stream has passed the point; raise as `done` does."""
        self._refuse_captured()
        if not self.recorded:
            return
        api = self.device.api
        try:
            with api.relaxed():
                api.runtime.eventSynchronize(self._handle)
        except api.errors as error:
            raise api.failure("waiting for an event", error) from error
        self.device.calls.raise_failures(self._stream)

    def error(self) -> BaseException | None:
        """Return None: a failure on a GPU ends all work there, and every later call raises."""
        return None

    def elapsed_us(self, since: Any) -> float:
        """Return the microseconds from `since` to this event, waiting for both.

        Raises
        ------
        ValueError : one of them has no timing, or was never recorded
        """
        for name, event in (("event", self), ("since", since)):
            if not isinstance(event, Event) or not event.timing or not event.recorded:
                raise ValueError(f"{name}: expected a recorded event made with timing=True")
            event.synchronize()
        api = self.device.api
        try:
            return float(api.runtime.eventElapsedTime(since._handle, self._handle)) * 1000
        except api.errors as error:
            raise api.failure("time between two events", error) from error

    def mark(self, stream: Stream, capture: Graph | ForeignPoint | None) -> None:
        """Note where the event was recorded."""
        self._stream = stream.pointer
        self.capture = capture

    def _refuse_captured(self) -> None:
        if self.capture is not None and self.capture.open:
            raise CaptureError("an event recorded in a capture cannot be waited for by the host")


def create_handle(device: CudaDevice, timing: bool) -> int:
    """Return a new CUDA event."""
    try:
        with device.current(), device.api.relaxed():
            flags = 0 if timing else DISABLE_TIMING
            return int(device.api.runtime.eventCreateWithFlags(flags))
    except device.api.errors as error:
        raise device.api.failure(f"event on {device.name}", error) from error
