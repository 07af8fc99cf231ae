"""Page-locked host memory: of exact size, and on the side of the machine where its GPU is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrays, formats
from ..cuda_api import (
    HOST_ALLOC_MAPPED,
    HOST_ALLOC_PORTABLE,
    HOST_REGISTER_MAPPED,
    HOST_REGISTER_PORTABLE,
)
from . import host_memory

if TYPE_CHECKING:
    from .cuda import CudaDevice

# For every GPU, and where its kernels reach it. Unified addressing maps it anyway; asking costs
# nothing.
_ALLOC_FLAGS = HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED
_REGISTER_FLAGS = HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED


class RegisteredPages:
    """Pages that CUDA has locked. When this object goes they are unlocked, then given back.

    Attributes
    ----------
    ptr : their address
    num_bytes : whole pages
    """

    __slots__ = ("__weakref__", "num_bytes", "ptr")

    def __init__(self, device: CudaDevice, ptr: int, num_bytes: int) -> None:
        self.ptr = ptr
        self.num_bytes = num_bytes
        _on_release(self, device, lambda: _release(device, ptr, num_bytes))


class AllocatedMemory:
    """Memory that CUDA has allocated, by CuPy's object. When this one goes, so does that.

    Attributes
    ----------
    ptr : its address
    """

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, device: CudaDevice, memory: Any) -> None:
        self.ptr = int(memory.ptr)
        _on_release(self, device, [memory].clear)


def empty_pinned(device: CudaDevice, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Return uninitialised pinned memory of exactly the bytes asked for, for every GPU.

    A process forked from this one does not have it.
    """
    wanted = formats.numpy_dtype(dtype)
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * wanted.itemsize
    memory = _near_the_gpu(device, num_bytes)
    if memory is None:
        try:
            with device.current():
                made = device.api.cupy.cuda.PinnedMemory(max(num_bytes, 1), _ALLOC_FLAGS)
        except device.api.errors as error:
            raise device.api.failure(f"{num_bytes} bytes of pinned memory", error) from error
        memory = AllocatedMemory(device, made)
    return arrays.pinned_at(memory, memory.ptr, shape, wanted)


def numa_node(device: CudaDevice) -> int | None:
    """Return the NUMA node that the GPU is attached to; None if it is not known."""
    api = device.api
    try:
        bus_id = api.runtime.deviceGetPCIBusId(device.index)
    except api.errors:  # it has no address that it would tell, as a GPU passed through may not
        return None
    return host_memory.node_of_pci_device(bus_id, api.pci_devices)


def _near_the_gpu(device: CudaDevice, num_bytes: int) -> Any:
    """Return registered pages, or None where CUDA's own allocation is what is left.

    CUDA allocates on the node of the calling thread, which may be the far one.
    """
    if num_bytes < host_memory.PAGE_BYTES:
        return None
    node = numa_node(device)
    if node is None:
        return None
    try:
        pointer, mapped_bytes = host_memory.map_pages(num_bytes)
    except OSError:
        return None
    host_memory.prefer_node(pointer, mapped_bytes, node)  # else they come from where they may
    host_memory.keep_from_children(pointer, mapped_bytes)  # before CUDA learns where they are
    try:
        with device.current():
            device.api.runtime.hostRegister(pointer, mapped_bytes, _REGISTER_FLAGS)
    except device.api.errors:  # the process may not lock that much by itself; the driver may
        host_memory.unmap(pointer, mapped_bytes)
        return None
    return RegisteredPages(device, pointer, mapped_bytes)


def _on_release(owner: object, device: CudaDevice, release: Callable[[], object]) -> None:
    """Call `release` when `owner` goes.

    The collector lets go of owners wherever it happens to run. CUDA may wait for the device before
    it releases memory, and the device for the thread that calls host functions: never on that one.
    """

    def release_now() -> None:
        with device.api.relaxed():  # captures of others have nothing to do with it
            release()

    def released() -> None:
        if device.calls.here:
            threading.Thread(target=release_now, name="kvcupy release", daemon=True).start()
        else:
            release_now()

    # CUDA may be gone before the interpreter is, and the system takes the pages back.
    weakref.finalize(owner, released).atexit = False


def _release(device: CudaDevice, pointer: int, num_bytes: int) -> None:
    try:
        with device.current():
            device.api.runtime.hostUnregister(pointer)
    except device.api.errors:  # locked as before, so a GPU may reach them: they stay
        return
    host_memory.unmap(pointer, num_bytes)
