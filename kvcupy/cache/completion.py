"""Work in flight: how to wait for it, to poll it, and to learn that it has failed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CaptureError, DeviceError

if TYPE_CHECKING:
    from ..devices.protocol import Device, Stream


class Completion(Protocol):
    """Work that is queued, in flight, over, or has failed.

    `wait` and `wait_layer` order a stream behind it, and raise DeviceError if it has failed. `done`
    and `synchronize` say when it no longer touches memory; in a handle for users (`Transfer`) they
    raise the failure too, in all others they leave it to `failure`. Each of them may raise
    CaptureError, which does not mean that the work has failed.
    """

    @property
    def failure(self) -> BaseException | None:
        """Why it has failed, as far as that is known. Neither waits nor raises."""

    def done(self) -> bool:
        """Return whether it is over, including after a failure. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Block the host until it is over, including after a failure."""

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream wait for all of it."""

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let later work of a stream wait for one layer; for all of it where it has no layers."""


class StreamCompletion:
    """All work of a stream so far, such as that of a model which writes pages.

    A failure of that work still surfaces for the owner of the stream too.
    """

    def __init__(self, stream: Stream) -> None:
        self._device = stream.device
        self._event = stream.record()
        self._relay: Stream | None = None

    @property
    def failure(self) -> BaseException | None:
        if (error := self._event.error()) is None:
            return None
        if self._relay is not None:  # it has passed, and its failure would surface nowhere else
            with suppress(DeviceError):
                self._relay.synchronize()
        failure = DeviceError(f"the pages were never written: {error!r}")
        failure.__cause__ = error
        return failure

    def done(self) -> bool:
        return self._event.done()

    def synchronize(self) -> None:
        with suppress(DeviceError):
            self._behind().synchronize()

    def wait(self, stream: Any = None) -> None:
        waiting = waiting_stream(self._device, stream, "pages")
        self._raise_failure()
        if not self._event.done():
            waiting.wait(self._behind().record())
        self._raise_failure()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self.wait(stream)

    def _behind(self) -> Stream:
        """Return a stream of its own behind that work.

        Waiting for the event itself would make the failure surface here, and not for the owner.
        """
        if self._relay is None:
            relay = self._device.stream()
            relay.wait(self._event)
            self._relay = relay
        return self._relay

    def _raise_failure(self) -> None:
        if (failure := self.failure) is not None:
            raise failure from failure.__cause__


def waiting_stream(device: Device, stream: Any, awaited: str) -> Stream:
    """Return a stream argument as the Stream that is to wait for work outside of every capture.

    CaptureError, which names what is `awaited`, if it is being captured.
    """
    waiting = device.as_stream(stream)
    if waiting.capturing:
        raise CaptureError(f"stream: a captured stream cannot wait for {awaited} outside it")
    return waiting
