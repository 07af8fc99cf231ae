"""Copies of runs on a GPU: one call of the driver for all of them, or one call a run.

What a call costs is what many short copies cost, so all go into one where the driver can: since
CUDA 12.8, never on the legacy default stream, and never into a graph. A batch is given addresses as
the device knows them. Where those of registered host memory are not the host's, as in WSL2, it
faults on the latter, so there runs go one by one, by calls that look addresses up.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cuda_api import (
    ATTRIBUTE_REGISTERED_HOST_POINTERS,
    MEMCPY_DEFAULT,
    NO_COPY,
    NOT_SUPPORTED,
    in_stream_order,
)
from ..errors import KvcupyError
from . import runs

if TYPE_CHECKING:
    from .cuda import CudaDevice
    from .cuda_streams import Stream

_LEGACY_STREAMS = (0, 1)
_FEWEST = 2  # runs that are worth a batch

Runs = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


class _Thread(threading.local):
    ready = False  # whether this thread has the device's context


class RunCopies:
    """Puts copies of runs on the streams of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._thread = _Thread()
        self._attributes = in_stream_order()
        self._from_the_first = ctypes.c_size_t(0)  # those attributes are for all copies
        self._refused = False

    def enqueue(
        self,
        dst: np.ndarray[Any, Any],
        src: np.ndarray[Any, Any],
        sizes: np.ndarray[Any, Any],
        stream: Stream,
        keep: Sequence[object],
    ) -> None:
        """Copy runs in the order of a stream (`CudaDevice.copy_runs`)."""
        runs.require_equal(dst, src, sizes)
        device, api = self._device, self._device.api
        wanted = sizes != 0
        left = (dst[wanted], src[wanted], sizes[wanted])  # contiguous, whatever they were
        if not len(left[0]):
            return
        failed = ctypes.c_size_t(NO_COPY)
        try:
            with device.current():
                self._enqueue(left, stream, failed)
        except api.errors as error:
            with suppress(KvcupyError):  # part of it may be in flight; a lost device holds nothing
                device.retain(stream, keep)
            index = None
            if failed.value < len(left[0]):
                index = int(np.flatnonzero(wanted)[failed.value])
            raise api.failure(_describe(dst, src, sizes, index, stream), error) from error
        if keep:
            device.retain(stream, keep)

    def _enqueue(self, left: Runs, stream: Stream, failed: ctypes.c_size_t) -> None:
        batch = self._batch_for(len(left[0]), stream)
        if batch is not None:
            if self._as_batch(batch, left, stream, failed):
                return
            self._refused = True  # it is there, and says that here it cannot be used
        self._one_by_one(left, stream, failed)

    def _batch_for(self, count: int, stream: Stream) -> Callable[..., int] | None:
        """Return the driver's batched copy, or None where one by one is right."""
        if count < _FEWEST or self._refused or stream.pointer in _LEGACY_STREAMS:
            return None
        batch = self._device.api.memcpy_batch
        if batch is None or not self._addresses_are_the_hosts:
            return None
        return None if stream.capturing else batch

    @cached_property
    def _addresses_are_the_hosts(self) -> bool:
        """Whether registered host memory has one address for the processor and the GPU."""
        device = self._device
        attribute = ATTRIBUTE_REGISTERED_HOST_POINTERS
        return bool(device.api.runtime.deviceGetAttribute(attribute, device.index))

    def _as_batch(
        self, batch: Callable[..., int], left: Runs, stream: Stream, failed: ctypes.c_size_t
    ) -> bool:
        """Return False if the driver does not support it; then none or some are on their way, and
        runs that do not overlap may be copied again."""
        api = self._device.api
        if not self._thread.ready:  # as for a launch: no context before a call of the runtime
            with api.relaxed():
                api.runtime.setDevice(self._device.index)
                api.runtime.memGetInfo()
            self._thread.ready = True
        dst, src, sizes = left
        status = batch(
            dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(self._attributes), ctypes.addressof(self._from_the_first), 1,
            ctypes.addressof(failed), stream.pointer,
        )  # fmt: skip
        if status == NOT_SUPPORTED:
            return False
        api.driver.check_status(status)
        return True

    def _one_by_one(self, left: Runs, stream: Stream, failed: ctypes.c_size_t) -> None:
        copy, pointer = self._device.api.runtime.memcpyAsync, stream.pointer
        dst, src, sizes = left
        listed = zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True)
        for index, (to, of, size) in enumerate(listed):
            try:
                copy(to, of, size, MEMCPY_DEFAULT, pointer)
            except self._device.api.errors:
                failed.value = index
                raise


def _describe(
    dst: np.ndarray[Any, Any],
    src: np.ndarray[Any, Any],
    sizes: np.ndarray[Any, Any],
    index: int | None,
    stream: Stream,
) -> str:
    what = f"copy of {len(sizes)} runs on {stream!r}"
    if index is None:
        return f"{what}, {int(sizes.sum())} bytes"
    return (
        f"{what}, run {index}: {int(sizes[index])} bytes "
        f"from {int(src[index]):#x} to {int(dst[index]):#x}"
    )
