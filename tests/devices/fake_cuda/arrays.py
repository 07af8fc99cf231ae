"""CuPy's memory pool and arrays: stream-ordered, so that what is freed too early shows as bytes."""

from __future__ import annotations

import ctypes
import sys
import weakref
from types import SimpleNamespace

import numpy as np

from kvcupy.arrays import array_at

from .machine import MISALIGNED, OUT_OF_MEMORY, CudaError, Memory, OutOfMemoryError

_GRAIN = 512  # bytes to which the pool rounds
_DTYPES = "?bBhHiIlLqQefdFD"  # CuPy's, by their characters


class DeviceMemory:
    """`cupy.cuda.Memory`: memory of the current device outside the pool."""

    def __init__(self, runtime, size):
        self._runtime = runtime
        self.size, self.device_id = size, runtime.current
        self.ptr = runtime.malloc(max(size, 1))

    def __del__(self, is_finalizing=sys.is_finalizing):  # for when there are no modules any more
        if not hasattr(self, "ptr") or is_finalizing():
            return
        try:
            self._runtime.free(self.ptr)
        except CudaError as error:  # CuPy's destructor cannot raise either
            self._runtime.log.append(("refused free", error.status))


class PinnedMemory:
    """`cupy.cuda.PinnedMemory`."""

    def __init__(self, runtime, size):
        self._runtime, self._memory = runtime, Memory(size)
        self.ptr = self._memory.ptr
        runtime.pinned[self.ptr] = max(size, 1)

    def __del__(self, is_finalizing=sys.is_finalizing):
        if not is_finalizing():
            try:
                self._runtime.freeHost(self.ptr)
            except CudaError as error:
                self._runtime.log.append(("refused free host", error.status))


class PooledMemory:
    """A block of the pool. When it goes, the arena that it came from has it back at once."""

    def __init__(self, pool, arena, block):
        self._block, self.ptr, self.size = block, block.ptr, block.size
        self.device_id = block.device_id
        weakref.finalize(self, pool.free, arena, block).atexit = False


class Pool:
    """CuPy's default pool: an arena for each device and each stream that is current at an
    allocation. A block goes back there, whatever other streams still do with it."""

    def __init__(self, runtime, current_stream):
        self._runtime, self._current_stream = runtime, current_stream
        self._arenas = {}

    def malloc(self, size):
        arena = (self._runtime.current, self._current_stream().ptr)
        rounded = -(-max(size, 1) // _GRAIN) * _GRAIN
        free = self._arenas.setdefault(arena, [])
        for block in free:
            if block.size == rounded:
                free.remove(block)
                return PooledMemory(self, arena, block)
        try:
            block = DeviceMemory(self._runtime, rounded)
        except CudaError as error:
            if error.status == OUT_OF_MEMORY:
                raise OutOfMemoryError(rounded, 0) from error
            raise
        return PooledMemory(self, arena, block)

    def free(self, arena, block):
        self._arenas[arena].insert(0, block)


class MemoryPointer:
    """`cupy.cuda.MemoryPointer`."""

    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset
        self.device_id = getattr(mem, "device_id", 0)


def array_class(api):
    """Return what stands for `cupy.ndarray`: work on it goes to CuPy's current stream."""

    class ndarray:
        def __init__(self, shape, dtype, memptr=None, strides=None):
            dtype = np.dtype(dtype)
            if dtype.char not in _DTYPES and dtype.name != "bfloat16":
                raise ValueError(f"Unsupported dtype {dtype}")
            shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
            if memptr is None:
                size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                memptr = MemoryPointer(api.pool.malloc(size), 0)
            self.data, self.base = memptr, None
            self._bytes = array_at(memptr.mem, memptr.ptr, shape, dtype, strides)

        shape = property(lambda self: self._bytes.shape)
        strides = property(lambda self: self._bytes.strides)
        dtype = property(lambda self: self._bytes.dtype)
        size = property(lambda self: self._bytes.size)
        ndim = property(lambda self: self._bytes.ndim)
        nbytes = property(lambda self: self._bytes.nbytes)
        itemsize = property(lambda self: self._bytes.itemsize)

        def _as(self, part):
            result = object.__new__(ndarray)
            result._bytes = part
            result.base = self if self.base is None else self.base
            offset = part.__array_interface__["data"][0] - self.data.mem.ptr
            result.data = MemoryPointer(self.data.mem, offset)
            return result

        def view(self, dtype):
            return self._as(self._bytes.view(dtype))

        def transpose(self, axes):
            return self._as(self._bytes.transpose(axes))

        def reshape(self, *shape):
            return self._as(self._bytes.reshape(*shape))

        def __getitem__(self, index):
            part = self._bytes[index]
            part = part if isinstance(part, np.ndarray) else self._bytes[index, None]
            if np.may_share_memory(part, self._bytes):
                return self._as(part)
            result, whole = ndarray(part.shape, part.dtype), at_address(self._bytes)
            result._assign(..., lambda: whole[index], part)
            return result

        def __setitem__(self, index, value):
            values = at_address(value._bytes) if isinstance(value, ndarray) else np.asarray(value)
            self._assign(index, lambda: values, values)

        def _assign(self, index, values, like):
            """Put an assignment on the current stream; `values()` is asked for when it runs."""
            whole = at_address(self._bytes)
            api.load_expression(whole.dtype, whole.ndim, like.dtype, like.ndim)
            api.submit(lambda: whole.__setitem__(index, values()))

        def copy(self):
            result = ndarray(self.shape, self.dtype)
            result[...] = self
            return result

        def fill(self, value):
            self[...] = value

        def get(self):
            """Copy to the host and wait, which no capture allows."""
            host = np.empty(self.shape, self.dtype)
            stream = api.cupy.cuda.get_current_stream()
            if api.runtime.streamIsCapturing(stream.ptr):
                raise RuntimeError("the operation is not permitted while a stream is capturing")
            source = at_address(self._bytes)
            if not (source.flags.c_contiguous or source.flags.aligned):
                api.runtime.fault = MISALIGNED  # of the kernel that gathers the elements
            api.submit(lambda: host.__setitem__(..., source))
            api.runtime.streamSynchronize(stream.ptr)
            return host

    ndarray.__module__, ndarray.__qualname__ = "cupy", "ndarray"
    return ndarray


def at_address(array):
    """Return an array at the same address that keeps nothing alive, as a kernel does not."""
    pointer = array.__array_interface__["data"][0]
    return array_at(None, pointer, array.shape, array.dtype, array.strides)


def functions(api, ndarray):
    """Return `empty`, `zeros` and `array` of CuPy."""

    def empty(shape, dtype):
        return ndarray(shape, dtype)

    def zeros(shape, dtype):
        result = ndarray(shape, dtype)
        stream = api.cupy.cuda.get_current_stream()
        api.runtime.memsetAsync(result.data.ptr, 0, result.nbytes, stream.ptr)
        return result

    def array(source):
        result, source = ndarray(source.shape, source.dtype), np.ascontiguousarray(source).copy()
        stream = api.cupy.cuda.get_current_stream()
        if api.runtime.streamIsCapturing(stream.ptr):
            raise RuntimeError("the operation is not permitted while a stream is capturing")
        api.runtime._machine.require_safe()  # it takes pinned memory and asks for its events
        if source.size:
            api.submit(lambda: ctypes.memmove(result.data.ptr, source.ctypes.data, source.nbytes))
        return result

    return SimpleNamespace(empty=empty, zeros=zeros, array=array)
