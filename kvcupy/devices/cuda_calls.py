"""Host functions in the order of a stream, and what becomes of the exceptions that they raise."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import CaptureError, DeviceError
from .cuda_graph import FOREIGN

if TYPE_CHECKING:
    from .cuda import CudaDevice
    from .cuda_streams import Stream


class HostCalls:
    """The host functions of one device.

    The driver calls them on a thread of its own, where an exception has nowhere to go. It is noted
    with the stream, and raised when somebody synchronises that stream or the device.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._failures: list[tuple[int, str, BaseException]] = []
        self._lock = threading.Lock()
        self._used = False

    def enqueue(self, stream: Stream, function: Callable[[], object]) -> None:
        """Put a function on a stream, or into the graph that the stream is captured into."""
        if not self._used:  # a function that ran while Python goes away would crash the process
            self._used = True
            atexit.register(self._drain)
        graph = self._device.capture_of(stream.pointer)
        api = self._device.api

        def guarded(_: object) -> None:
            try:
                function()
            except BaseException as error:
                where = stream.pointer if graph is None else graph.last_stream
                with self._lock:
                    self._failures.append(
                        (where, getattr(function, "__name__", repr(function)), error)
                    )

        try:
            if graph is None:
                api.runtime.launchHostFunc(stream.pointer, guarded, 0)
            elif graph is FOREIGN or not hasattr(api.runtime, "_launchHostFuncUnmanaged"):
                raise CaptureError("a host function can only be captured by Stream.capture")
            else:  # CUDA holds no reference, and the graph may be launched many times
                entry = (guarded, None)
                graph.kept.append(entry)
                api.runtime._launchHostFuncUnmanaged(stream.pointer, entry)
        except api.errors as error:
            raise api.failure(f"call in {stream!r}", error) from error

    def raise_failures(self, pointer: int | None = None) -> None:
        """Raise the first exception of a stream's functions, or of all, and forget the others."""
        if not self._failures:
            return
        with self._lock:
            mine = [f for f in self._failures if pointer is None or f[0] == pointer]
            self._failures = [f for f in self._failures if f not in mine]
        if mine:
            _, name, error = mine[0]
            raise DeviceError(
                f"host function {name} on {self._device.name} failed: {error!r}"
            ) from error

    def _drain(self) -> None:
        with suppress(*self._device.api.errors), self._device.current():
            self._device.api.runtime.deviceSynchronize()
