"""ArrayView: pointer, shape, byte strides, format and device of any array, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import formats
from .pickling import ProcessLocal


class ArrayView(ProcessLocal):
    """An array of any library, described by address.

    Attributes
    ----------
    pointer : address of element (0, 0, ...)
    shape : elements on each axis
    strides : bytes between neighbours on each axis; zero and negative are possible
    format : a name of `kvcupy.formats.FORMATS`, else a NumPy dtype name such as "int64"
    itemsize : bytes an element
    device : "host", "cuda:0", ...
    library : "numpy", "cupy", "torch" or "dlpack"; whose current stream `stream=None` means
    readonly : whether the exporter forbids writing
    owner : the object that keeps the memory alive
    """

    __slots__ = (
        "device", "format", "itemsize", "library", "owner", "pointer", "readonly", "shape",
        "strides",
    )  # fmt: skip

    _instead = "it is an address; pickle device.to_numpy(view), and tag that with kv.view_as"

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        format: str,
        device: str,
        *,
        library: str = "numpy",
        readonly: bool = False,
        owner: object = None,
    ) -> None:
        self.pointer = pointer
        self.shape = shape
        self.strides = strides
        self.format = format
        self.itemsize = formats.itemsize(format)
        self.device = device
        self.library = library
        self.readonly = readonly
        self.owner = owner

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        product = 1
        for n in self.shape:
            product *= n
        return product

    @property
    def pinned(self) -> bool:
        """Whether this is page-locked host memory, which a GPU reads and writes directly."""
        return self.device == "host" and is_pinned(self.owner)

    def byte_range(self) -> tuple[int, int]:
        """Return the first address, and the one past the last, that the view can touch."""
        low = high = self.pointer
        for n, stride in zip(self.shape, self.strides, strict=True):
            if n == 0:
                return self.pointer, self.pointer
            if stride < 0:
                low += (n - 1) * stride
            else:
                high += (n - 1) * stride
        return low, high + self.itemsize

    def without_owner(self) -> ArrayView:
        """Return the same description, which keeps nothing alive: for what is remembered."""
        return ArrayView(
            self.pointer,
            self.shape,
            self.strides,
            self.format,
            self.device,
            library=self.library,
            readonly=self.readonly,
        )

    def __getitem__(self, index: Any) -> ArrayView:
        """Return part of the array, by integers, slices, `...` and None, as NumPy reads them."""
        steps = index if isinstance(index, tuple) else (index,)
        if not all(i is None or isinstance(i, (int, np.integer, slice, type(...))) for i in steps):
            raise TypeError(f"index: expected integers, slices, ... or None, got {index!r}")
        if ... not in steps:
            steps = (*steps, ...)  # else NumPy would read a single element
        part = _untyped(self)[steps]
        return ArrayView(
            part.__array_interface__["data"][0],
            part.shape,
            part.strides,
            self.format,
            self.device,
            library=self.library,
            readonly=self.readonly,
            owner=self.owner,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return type and number of the device, as DLPack has them."""
        kind, _, index = self.device.partition(":")
        return (1, 0) if kind == "host" else (2, int(index))

    def __dlpack__(self, **options: Any) -> object:
        """Return a DLPack capsule, without a copy: `torch.from_dlpack(view)`.

        `options` are `stream`, `max_version`, `dl_device` and `copy`, as DLPack has them. bf16 and
        fp8 go under their own codes, which NumPy and CuPy do not import.

        Raises
        ------
        BufferError : the consumer cannot be told that the array is read-only, or asks for another
            device
        """
        from . import devices, dlpack

        return dlpack.export(devices.get(self.device).carrier(self), self.format, options)

    def __repr__(self) -> str:
        return f"<{describe(self)} on {self.device} at {self.pointer:#x}>"


def describe(view: ArrayView) -> str:
    """Return shape and format as error messages show them: `(4, 8, 128) bf16`."""
    return f"({', '.join(map(str, view.shape))}{',' if view.ndim == 1 else ''}) {view.format}"


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Return whether two views share a byte; interleaved views do not."""
    a_low, a_high = a.byte_range()
    b_low, b_high = b.byte_range()
    if a_high <= b_low or b_high <= a_low:
        return False
    if a.device != b.device:
        return False
    return bool(np.shares_memory(_untyped(a), _untyped(b)))


def _untyped(view: ArrayView) -> np.ndarray[Any, Any]:
    """Return an array over addresses, of any device: its bytes are never touched."""
    untyped = np.dtype((np.void, view.itemsize))
    return array_at(None, view.pointer, view.shape, untyped, view.strides)


class Memory(ProcessLocal):
    """Bytes at an address, exported to NumPy as untyped elements. They live as long as `owner`."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self,
        owner: object,
        pointer: int,
        shape: tuple[int, ...],
        itemsize: int,
        strides: tuple[int, ...] | None,
        *,
        readonly: bool,
    ) -> None:
        self.owner = owner
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (pointer, readonly),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
        }


def array_at(
    owner: object,
    pointer: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None = None,
    *,
    readonly: bool = False,
    memory: type[Memory] = Memory,
) -> np.ndarray[Any, Any]:
    """Return the NumPy array at an address of host memory that `owner` keeps alive.

    >>> source = np.arange(6, dtype=np.uint8)
    >>> array_at(source, source.ctypes.data + 4, (3,), np.dtype(np.uint8), (-2,))
    array([4, 2, 0], dtype=uint8)
    """
    exporter = memory(owner, pointer, shape, dtype.itemsize, strides, readonly=readonly)
    return np.asarray(exporter).view(dtype)


class PinnedMemory(Memory):
    """Page-locked host memory, which a GPU reads and writes directly.

    A pinned array is an ordinary `numpy.ndarray`; what marks it is where its chain of `.base` ends.
    """

    __slots__ = ()


def pinned_at(
    owner: object, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return the contiguous array of pinned memory at an address that `owner` keeps alive."""
    return array_at(owner, pointer, shape, dtype, memory=PinnedMemory)


def is_pinned(owner: object) -> bool:
    """Return whether host memory is page-locked, from the object that keeps it alive.

    >>> is_pinned(np.zeros(3))
    False
    """
    while isinstance(owner, (np.ndarray, memoryview)):  # the latter is in between for np.frombuffer
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, PinnedMemory):
        return True
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(owner, torch.Tensor):
        return bool(owner.is_pinned())
    if cupy is not None and isinstance(owner, cupy.cuda.PinnedMemoryPointer):
        return True
    return bool(getattr(owner, "pinned", False))  # a DLPack capsule says so itself


def memory_of(owner: object) -> object:
    """Return what is equal for arrays in one allocation, from the objects that keep them alive.

    >>> a = np.zeros((2, 3))
    >>> memory_of(a[0]) == memory_of(a[1]) != memory_of(np.zeros(3))
    True
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(owner, torch.Tensor):
        return "torch", owner.untyped_storage().data_ptr()
    if cupy is not None and isinstance(owner, cupy.ndarray):
        return "cupy", id(owner.data.mem)
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return id(owner)


def transposed(v: ArrayView, axes: Sequence[int]) -> ArrayView:
    """Return a view with its axes in another order."""
    return reshaped(v, tuple(v.shape[i] for i in axes), tuple(v.strides[i] for i in axes))


def reshaped(v: ArrayView, shape: tuple[int, ...], strides: tuple[int, ...]) -> ArrayView:
    """Return the same memory with other axes."""
    return ArrayView(
        v.pointer,
        shape,
        strides,
        v.format,
        v.device,
        library=v.library,
        readonly=v.readonly,
        owner=v.owner,
    )


def first_overlap(views: Sequence[ArrayView]) -> tuple[int, int] | None:
    """Return the first two of some views, by index, that share a byte.

    >>> a = np.zeros(8, np.uint8)
    >>> from kvcupy.exporters import view
    >>> first_overlap([view(a[4:]), view(a[:4]), view(a[2:6:2])])
    (0, 2)
    """
    ranges = [view.byte_range() for view in views]
    order = sorted(range(len(views)), key=ranges.__getitem__)
    found: list[tuple[int, int]] = []
    open_: list[int] = []  # whose range may reach into the next one's
    for i in order:
        open_ = [j for j in open_ if ranges[j][1] > ranges[i][0]]
        found += [(min(i, j), max(i, j)) for j in open_ if overlap(views[i], views[j])]
        open_.append(i)
    return min(found, default=None)


def overlaps_itself(v: ArrayView) -> bool:
    """Return whether two elements may share a byte: an axis steps less far than one within reaches.

    >>> from kvcupy.exporters import view
    >>> overlaps_itself(view(np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3)))
    True
    """
    reach = v.itemsize
    for step, n in sorted((abs(s), n) for n, s in zip(v.shape, v.strides, strict=True) if n > 1):
        if step < reach:
            return True
        reach += (n - 1) * step
    return False


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a C-contiguous array.

    >>> contiguous_strides((4, 2, 3), 2)
    (12, 6, 2)
    """
    strides: list[int] = []
    for n in reversed(shape):
        strides.insert(0, itemsize)
        itemsize *= n
    return tuple(strides)
