"""Memory of a GPU: what its kernels can address, pinned host memory, and the copy engine's work."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import ArrayView
from ..cuda_api import (
    ATTRIBUTE_REGISTERED_HOST_POINTERS,
    IN_STREAM_ORDER,
    MEMCPY_DEFAULT,
    NOT_SUPPORTED,
    PINNED_FLAGS,
    UNREGISTERED_MEMORY,
    CopyAttributes,
)  # fmt: skip
from ..errors import finalize
from . import host_memory
from .cuda_context import CudaContext
from .cuda_streams import Stream

_MAX_PITCH_BYTES = 2**31 - 1  # of one two-dimensional copy
_MAX_RECTANGLES = 16  # beyond that, or with rows shorter than this, a kernel moves them faster
_MIN_WIDTH_BYTES = 64

_LEGACY_STREAMS = (0, 1)
_MIN_BATCH_RUNS = 2

Runs = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]
"""Addresses to copy to, addresses to copy from, and bytes: uint64 (runs,) each."""


def device_address(context: CudaContext, view: ArrayView) -> int | None:
    """Return where kernels of the GPU find a view; None if they cannot reach it."""
    if view.device == context.name or view.size == 0:
        return view.pointer
    if view.device != "host":
        return None
    attributes = context.api.runtime.pointerGetAttributes(view.pointer)
    return None if attributes.type == UNREGISTERED_MEMORY else attributes.devicePointer or None


# --- Pinned host memory ---------------------------------------------------------------------------


class RegisteredPages:
    """Pages that CUDA has locked; they are unlocked and unmapped when this object is deleted."""

    __slots__ = ("__weakref__", "num_bytes", "ptr")

    def __init__(self, context: CudaContext, ptr: int, num_bytes: int) -> None:
        self.ptr = ptr
        self.num_bytes = num_bytes
        _on_release(self, context, lambda: _release(context, ptr, num_bytes))


class AllocatedMemory:
    """Memory that CUDA has allocated, as CuPy's object, which is deleted with this one."""

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, context: CudaContext, memory: Any) -> None:
        self.ptr = int(memory.ptr)
        _on_release(self, context, [memory].clear)


def pinned_memory(context: CudaContext, num_bytes: int) -> RegisteredPages | AllocatedMemory:
    """Return page-locked host memory for every GPU, near this one where its NUMA node is known.

    A process forked from this one does not have it.
    """
    with context.relaxed(f"{num_bytes} bytes of pinned memory"):
        memory = _near_the_gpu(context, num_bytes)
        if memory is not None:
            return memory
        allocated = context.api.cupy.cuda.PinnedMemory(max(num_bytes, 1), PINNED_FLAGS)
        return AllocatedMemory(context, allocated)


def numa_node(context: CudaContext) -> int | None:
    """Return the NUMA node that the GPU is attached to; None if it is not known."""
    api = context.api
    try:
        bus_id = api.runtime.deviceGetPCIBusId(context.index)
    except api.errors:  # a GPU passed through to a virtual machine may have none
        return None
    return host_memory.node_of_pci_device(bus_id, api.pci_devices)


def _near_the_gpu(context: CudaContext, num_bytes: int) -> RegisteredPages | None:
    """Return registered pages on the GPU's NUMA node, or None where CUDA must allocate.

    CUDA allocates on the node of the calling thread, which may be the far one.
    """
    if num_bytes < host_memory.PAGE_BYTES:
        return None
    node = numa_node(context)
    if node is None:
        return None
    try:
        pointer, mapped_bytes = host_memory.map_pages(num_bytes)
    except OSError:
        return None
    host_memory.prefer_node(pointer, mapped_bytes, node)  # best effort: else default NUMA placement
    host_memory.keep_from_children(pointer, mapped_bytes)  # before CUDA learns where they are
    try:
        context.api.runtime.hostRegister(pointer, mapped_bytes, PINNED_FLAGS)
    except context.api.errors:  # e.g. RLIMIT_MEMLOCK, which does not bind the driver's allocation
        host_memory.unmap(pointer, mapped_bytes)
        return None
    return RegisteredPages(context, pointer, mapped_bytes)


def _on_release(owner: object, context: CudaContext, release: Callable[[], object]) -> None:
    """Call `release` when `owner` is deleted.

    Garbage collection may run on any thread. CUDA may wait for the device before it frees memory,
    and the device for the thread that calls host functions, so that one starts another thread.
    """

    def release_now() -> None:
        with context.current(), context.api.relaxed():  # captures of others do not depend on it
            release()

    def released() -> None:
        if context.calls.here:
            threading.Thread(target=release_now, name="kvcupy release", daemon=True).start()
        else:
            release_now()

    # CUDA may be gone before the interpreter is, and the system takes the pages back.
    finalize(owner, released)


def _release(context: CudaContext, pointer: int, num_bytes: int) -> None:
    try:
        with context.current():
            context.api.runtime.hostUnregister(pointer)
    except context.api.errors:  # still locked, and reachable by a GPU: never unmap them
        return
    host_memory.unmap(pointer, num_bytes)


# --- Copies between strided arrays ----------------------------------------------------------------
#
# The axes that both arrays walk without a gap are joined first. What is left is a number of
# rectangles: `height` rows of `width` contiguous bytes, a pitch apart.


@dataclass(frozen=True)
class CopyPlan:
    """How to copy one strided array to another of the same shape."""

    outer: tuple[tuple[int, int, int], ...]  # axes to loop over: (length, dst and src stride)
    row_axis: tuple[
        int, int, int
    ]  # the rows of a rectangle, in the same way; length 1 if it has none
    width: int  # contiguous bytes per row

    @property
    def suits_engine(self) -> bool:
        """Whether the copy engine is the better choice where a kernel could do it too."""
        rows_are_long = self.width >= _MIN_WIDTH_BYTES or self.row_axis[0] == 1
        return math.prod(n for n, _, _ in self.outer) <= _MAX_RECTANGLES and rows_are_long

    def offsets(self) -> Iterator[tuple[int, int]]:
        """Yield where every rectangle begins in dst and in src, in bytes."""
        for index in itertools.product(*(range(n) for n, _, _ in self.outer)):
            dst = sum(i * d for i, (_, d, _) in zip(index, self.outer, strict=True))
            src = sum(i * s for i, (_, _, s) in zip(index, self.outer, strict=True))
            yield dst, src


def plan_copy(
    shape: tuple[int, ...], dst_strides: tuple[int, ...], src_strides: tuple[int, ...],
    itemsize: int,
) -> CopyPlan:  # fmt: skip
    """Return the plan for a copy of at least one element. Strides are in bytes.

    >>> plan_copy((4, 8), (16, 2), (64, 2), 2)
    CopyPlan(outer=(), row_axis=(4, 16, 64), width=16)
    """
    # The axes, widest stride of `dst` first; neighbours without a gap are joined.
    split = [a for a in zip(shape, dst_strides, src_strides, strict=True) if a[0] != 1]
    axes: list[tuple[int, int, int]] = []
    for length, dst, src in sorted(split, key=lambda axis: (-abs(axis[1]), -abs(axis[2]))):
        if axes and axes[-1][1:] == (dst * length, src * length):
            length *= axes.pop()[0]
        axes.append((length, dst, src))
    width = itemsize
    if axes and axes[-1][1:] == (width, width):
        width *= axes.pop()[0]
    row_axis = (1, width, width)
    if axes and all(width <= pitch <= _MAX_PITCH_BYTES for pitch in axes[-1][1:]):
        row_axis = axes.pop()
    return CopyPlan(tuple(axes), row_axis, width)


def enqueue_copy(runtime: Any, copy: CopyPlan, dst: int, src: int, stream: int) -> None:
    """Put the rectangles of a copy between two addresses on a stream, for the copy engine."""
    width, (height, dst_pitch, src_pitch) = copy.width, copy.row_axis
    for dst_offset, src_offset in copy.offsets():
        to, start = dst + dst_offset, src + src_offset
        if height == 1:
            runtime.memcpyAsync(to, start, width, MEMCPY_DEFAULT, stream)
        else:
            runtime.memcpy2DAsync(
                to, dst_pitch, start, src_pitch, width, height, MEMCPY_DEFAULT, stream
            )


def copy_in_words(
    copy: CopyPlan, dst: int, src: int
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the copy in the widest words that fit: bytes per word, shape, both strides.

    >>> copy_in_words(plan_copy((4, 8), (16, 2), (64, 2), 2), 0, 0)
    (8, (4, 2), (16, 8), (64, 8))
    """
    axes = [*copy.outer, copy.row_axis]
    numbers = [dst, src, copy.width, *(n for _, d, s in axes for n in (d, s))]
    word = next(w for w in (8, 4, 2, 1) if all(n % w == 0 for n in numbers))
    axes.append((copy.width // word, word, word))
    lengths, dst_strides, src_strides = zip(*axes, strict=True)
    return word, lengths, dst_strides, src_strides


# --- Copies of runs -------------------------------------------------------------------------------
#
# Many short copies cost as much as their calls, so all go into one call where the driver can:
# since CUDA 12.8, never on the legacy default stream, and never into a graph. A batch takes
# addresses as the device knows them. Where the device has other addresses than the host for
# registered memory, as in WSL2, a batch of host addresses faults, so there runs go one by one, by
# calls that look addresses up.
# Runs of pageable memory go one by one, too: CUDA documents how single copies stage such memory and
# when they return, but not how a batch does.


class RunCopies:
    """Puts copies of runs on the streams of one device."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._attributes = CopyAttributes(src_access_order=IN_STREAM_ORDER)
        self._first_copy = ctypes.c_size_t(0)  # the attributes hold from this copy on
        self._unsupported = False

    def enqueue(self, runs: Runs, stream: Stream, failed: ctypes.c_size_t, pageable: bool) -> None:
        """Copy runs in the order of a stream, with the device current; CuPy's exceptions pass.

        There is at least one run, and none of zero bytes. `failed` gets the index of the run whose
        copy was refused, if that is known.
        """
        batch = None if pageable else self._batch_for(len(runs[0]), stream)
        if batch is not None:
            if self._as_batch(batch, runs, stream, failed):
                return
            self._unsupported = True  # the function exists, and reports that it cannot be used here
        dst, src, sizes = (array.tolist() for array in runs)
        copy = self._context.api.runtime.memcpyAsync
        for index, (to, start, size) in enumerate(zip(dst, src, sizes, strict=True)):
            try:
                copy(to, start, size, MEMCPY_DEFAULT, stream.pointer)
            except self._context.api.errors:
                failed.value = index
                raise

    def _batch_for(self, count: int, stream: Stream) -> Callable[..., int] | None:
        """Return the driver's batched copy, or None where one by one is right."""
        if count < _MIN_BATCH_RUNS or self._unsupported or stream.pointer in _LEGACY_STREAMS:
            return None
        batch = self._context.api.memcpy_batch
        if batch is None or not self._host_addresses_are_shared:
            return None
        return None if stream.capturing else batch

    @cached_property
    def _host_addresses_are_shared(self) -> bool:
        """Whether registered host memory has one address for the processor and the GPU."""
        context, attribute = self._context, ATTRIBUTE_REGISTERED_HOST_POINTERS
        return bool(context.api.runtime.deviceGetAttribute(attribute, context.index))

    def _as_batch(
        self, batch: Callable[..., int], runs: Runs, stream: Stream, failed: ctypes.c_size_t
    ) -> bool:
        """Return False if the driver does not support it; some runs may have been copied then, and
        can be copied again, since runs do not overlap."""
        api = self._context.api
        if not self._context.thread.ready:
            self._context.prepare_thread()
        dst, src, sizes = runs
        status = batch(
            dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(self._attributes), ctypes.addressof(self._first_copy), 1,
            ctypes.addressof(failed), stream.pointer,
        )  # fmt: skip
        if status != NOT_SUPPORTED:
            api.driver.check_status(status)
        return bool(status != NOT_SUPPORTED)


def describe_runs(runs: Runs, index: int | None, stream: Stream) -> str:
    """Return what a failed copy of runs was, for its error; `index` of the run, if known."""
    dst, src, sizes = runs
    what = f"copy of {len(sizes)} runs on {stream!r}"
    if index is None:
        return f"{what}, {int(sizes.sum())} bytes"
    to, start, size = int(dst[index]), int(src[index]), int(sizes[index])
    return f"{what}, run {index}: {size} bytes from {start:#x} to {to:#x}"
