"""ArrayView: pointer, shape, byte strides, format and device of any array, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .. import cuda_api, formats
from ..errors import DeviceError, Unpicklable
from ..formats import Encoding, ScaleRule
from . import dlpack

TORCH_TYPES: set[type] = set()  # torch.Tensor and the subclasses of it that have been seen
STREAMED_TYPES: set[type] = set()  # whose arrays a stream may still be writing


class ArrayView(Unpicklable):
    """An array of any library, described by address.

    Attributes
    ----------
    pointer : address of element (0, 0, ...)
    shape : elements on each axis
    strides : bytes between neighbours on each axis; zero and negative are possible
    format : a name of `kvcupy.formats.CACHE_FORMATS`, else a NumPy dtype name such as "int64"
    itemsize : bytes per element
    scales : ArrayView of the group scales (..., groups) of a four-bit format, else None
    encoding : format, rotation and scale rule, as a `dtype` argument takes them
    rotated_width : the first elements of a row, which are rotated: all of them, or the latent
        without the rope part; 0 without rotation
    scale_rule : how what is written gets its group scales: "absmax", or of nvfp4 "four_over_six".
        Reading does not depend on it
    device : "host", "cuda:0", ...
    library : "numpy", "cupy", "torch" or "dlpack": whose current stream `stream=None` means
    readonly : whether the exporter forbids writing
    owner : the object that keeps the memory alive
    name : of the argument that it was made for, for error messages; else empty

    Notes
    -----
    The rows of a four-bit format are counted in elements: `shape` is logical, `pointer` and
    `strides` describe the codes, with a last stride of 0, and `itemsize` is 1. `memory` holds
    the bytes: `packed`, uint8 (..., row_bytes), where the scales follow the codes of each
    row, else `codes`, uint8 (..., width / 2), and `scales`.
    """

    __slots__ = (
        "device", "format", "itemsize", "library", "name", "owner", "pointer", "readonly",
        "rotated_width", "scale_rule", "scales", "shape", "strides",
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
        scales: ArrayView | None = None,
        rotated_width: int = 0,
        scale_rule: ScaleRule = "absmax",
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
        self.name = ""
        self.scales = scales
        self.rotated_width = rotated_width
        self.scale_rule = scale_rule
        if format in formats.FOUR_BIT:
            if not shape:
                raise ValueError(f"shape: expected rows for {format}, got {shape!r}")
            self.strides = (*strides[:-1], 0)
            if scales is None:
                self.scales = _packed_scales(self)

    @property
    def encoding(self) -> Encoding:
        """Format, rotation and scale rule, as a `dtype` argument takes them."""
        return Encoding(
            self.format, hadamard=bool(self.rotated_width), scale_rule=self.scale_rule
        )  # fmt: skip

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
    def num_bytes(self) -> int:
        """Bytes of all elements, with the group scales of a four-bit format."""
        format = formats.FOUR_BIT.get(self.format)
        if format is None:
            return self.size * self.itemsize
        return self.size // format.group * format.group_bytes

    @property
    def pinned(self) -> bool:
        """Whether this is page-locked host memory, which a GPU reads and writes directly."""
        return self.device == "host" and all([is_pinned(part.owner) for part in self.memory])

    @property
    def codes(self) -> ArrayView:
        """The codes of a four-bit format, uint8 (..., width / 2), without the scales.

        ValueError for another format.
        """
        self._require_four_bit()
        return self._bytes(self.shape[-1] // 2)

    @property
    def packed(self) -> ArrayView | None:
        """The bytes of a four-bit format, uint8 (..., row_bytes); None where the scales do not
        follow the codes of each row.

        ValueError for another format.
        """
        scales, packed = self._require_four_bit(), _packed_scales(self)
        if (scales.pointer, scales.strides) != (packed.pointer, packed.strides):
            return None
        return self._bytes(formats.FOUR_BIT[self.format].row_bytes(self.shape[-1]))

    def _require_four_bit(self) -> ArrayView:
        """Return the group scales; ValueError if the format has none."""
        if self.scales is None:
            known = ", ".join(formats.FOUR_BIT)
            raise ValueError(f"format: expected one of {known}, got {self.format}")
        return self.scales

    @property
    def memory(self) -> tuple[ArrayView, ...]:
        """The views of whole bytes that hold the elements: itself, but for four-bit formats."""
        if self.scales is None:
            return (self,)
        packed = self.packed
        return (self.codes, self.scales) if packed is None else (packed,)

    def _bytes(self, width: int) -> ArrayView:
        return recast(self, (*self.shape[:-1], width), (*self.strides[:-1], 1), "uint8")

    def byte_range(self) -> tuple[int, int]:
        """Return the first address, and the one past the last, of its bytes."""
        if self.scales is not None:
            ranges = [part.byte_range() for part in self.memory]
            return min(low for low, _ in ranges), max(high for _, high in ranges)
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
        """Return the same description without its owner, to be cached: it keeps nothing alive."""
        copy = recast(
            self, self.shape, self.strides, self.format,
            scales=self.scales and self.scales.without_owner(),
        )  # fmt: skip
        copy.owner = None
        return copy

    def __getitem__(self, index: Any) -> ArrayView:
        """Return part of the array, by integers, slices, `...` and None, as NumPy reads them.

        Of a four-bit format the last axis takes whole groups alone, `[..., :512]` say, and of
        rotated rows what is rotated by the same blocks.

        Raises
        ------
        TypeError, ValueError : the index is something else, a slice has no steps, or rows of a
            four-bit format would be cut
        IndexError : it is out of range, or has more axes than the array
        """
        steps = index if isinstance(index, tuple) else (index,)
        if not all(i is None or isinstance(i, (int, np.integer, slice, type(...))) for i in steps):
            raise TypeError(f"index: expected integers, slices, ... or None, got {index!r}")
        if ... not in steps:
            steps = (*steps, ...)  # else NumPy would read a single element
        if self.scales is not None:
            return self._rows(steps, self.scales)
        try:
            part = _untyped(self)[steps]
        except (TypeError, ValueError) as error:  # of a slice
            raise type(error)(
                f"index: expected slices of integers, got {index!r}: {error}"
            ) from None
        except OverflowError:
            raise IndexError(f"index: expected signed 64-bit integers, got {index!r}") from None
        pointer = part.__array_interface__["data"][0]
        return recast(self, part.shape, part.strides, self.format, pointer=pointer)

    def _rows(self, steps: tuple[Any, ...], scales: ArrayView) -> ArrayView:
        """Index the axes before the rows of a four-bit format, and take whole groups of rows."""
        num_taken = sum(step is not None and step is not ... for step in steps)
        if num_taken > self.ndim:
            raise IndexError(f"index: expected at most {self.ndim} axes, got {steps!r}")
        at = len(steps) - 1
        if num_taken >= self.ndim and steps.index(...) == at:
            at -= 1  # nothing is left for the ellipsis
        last, width, group = steps[at], self.shape[-1], formats.FOUR_BIT[self.format].group
        start, stop, step = _bounds_of(slice(None) if last is ... else last, width)
        whole = step == 1 and start % group == 0 and stop % group == 0
        whole = whole and (start < stop or (start, stop) == (0, width))
        if not whole:
            raise ValueError(
                f"index: expected : or whole groups of {group} on the last axis of {self.format}, "
                f"got {steps!r}"
            )
        if last is not ...:
            steps = (*steps[:at], slice(None), *steps[at + 1 :])
        rows = four_bit_view(
            self.codes[steps], scales[steps], self.format, self.rotated_width, self.scale_rule
        )
        return columns(rows, start, stop)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return type and number of the device in DLPack's numbering."""
        kind, _, index = self.device.partition(":")
        return (1, 0) if kind == "host" else (2, int(index))

    def __dlpack__(self, **options: Any) -> object:
        """Return a DLPack capsule, without a copy: `torch.from_dlpack(view)`.

        `options` are `stream`, `max_version`, `dl_device` and `copy`, as DLPack defines them. bf16
        and fp8 are exported under their own type codes, which NumPy and CuPy do not import.
        Four-bit formats are exported as their bytes, uint8 (..., row_bytes).

        Raises
        ------
        BufferError : the array is read-only, which the consumer's version of DLPack cannot express,
            the consumer asks for another device, or a four-bit view's scales do not follow its
            codes (`codes` and `scales` are exported one by one)
        TypeError, ValueError : an option is not as DLPack defines it
        """
        try:
            whole = bytes_of(self)
        except ValueError as error:
            raise BufferError(str(error)) from None
        return dlpack.export(_bits(whole), whole.format, options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return host memory as a NumPy array, bf16 and fp8 with dtypes of ml_dtypes.

        Of a four-bit format the bytes, uint8 (..., row_bytes).

        Raises
        ------
        TypeError : the memory is a GPU's, which `Device.to_numpy` copies
        """
        if self.device != "host":
            raise TypeError(
                f"array: expected memory of the host, got {self!r}; Device.to_numpy copies it"
            )
        v = bytes_of(self)
        array = array_at(
            v.owner, v.pointer, v.shape, formats.numpy_dtype(v.format), v.strides,
            readonly=v.readonly,
        )  # fmt: skip
        return np.array(array, dtype, copy=copy) if copy or dtype is not None else array

    def __repr__(self) -> str:
        return f"<{describe(self)} on {self.device} at {self.pointer:#x}>"


def recast(
    v: ArrayView, shape: tuple[int, ...], strides: tuple[int, ...], format: str, *,
    pointer: int | None = None, scales: ArrayView | None = None,
    rotated_width: int | None = None, scale_rule: ScaleRule | None = None,
) -> ArrayView:  # fmt: skip
    """Return another description of the same memory, from `pointer` on.

    Rotation and scale rule stay with the format, unless others are passed.
    """
    same = format == v.format
    if rotated_width is None:
        rotated_width = v.rotated_width if same else 0
    if scale_rule is None:
        scale_rule = v.scale_rule if same else "absmax"
    part = ArrayView(
        v.pointer if pointer is None else pointer, shape, strides, format, v.device,
        library=v.library, readonly=v.readonly, owner=v.owner, scales=scales,
        rotated_width=rotated_width, scale_rule=scale_rule,
    )  # fmt: skip
    part.name = v.name
    return part


def describe(view: ArrayView) -> str:
    """Return shape and format as error messages show them: `(4, 8, 128) bf16`."""
    text = f"({', '.join(map(str, view.shape))}{',' if view.ndim == 1 else ''}) {view.format}"
    if not view.rotated_width:
        return text
    whole = view.rotated_width == view.shape[-1]
    return f"{text}, {'' if whole else f'the first {view.rotated_width} '}rotated"


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Return whether two views share a byte; interleaved views do not."""
    a_low, a_high = a.byte_range()
    b_low, b_high = b.byte_range()
    if a_high <= b_low or b_high <= a_low or a.device != b.device:
        return False
    if a.scales is not None or b.scales is not None:
        return any(overlap(part, other) for part in a.memory for other in b.memory)
    return bool(np.shares_memory(_untyped(a), _untyped(b)))


def _bounds_of(step: Any, size: int) -> tuple[int, int, int]:
    """Return start, stop and step of a slice; of anything else, and a wrong one, a step of 0."""
    try:
        return step.indices(size) if isinstance(step, slice) else (0, 0, 0)
    except (TypeError, ValueError):
        return 0, 0, 0


def _packed_scales(v: ArrayView) -> ArrayView:
    """Return the group scales of a four-bit view that follow the codes of each row."""
    format = formats.FOUR_BIT[v.format]
    width = v.shape[-1]
    return recast(
        v, (*v.shape[:-1], width // format.group), (*v.strides[:-1], format.scale_bytes),
        format.scale_carrier, pointer=v.pointer + width // 2,
    )  # fmt: skip


def four_bit_view(
    codes: ArrayView, scales: ArrayView, format: str, rotated_width: int, scale_rule: ScaleRule
) -> ArrayView:
    """Return the elements of a four-bit format, from views of its codes and group scales."""
    rows = recast(
        codes, (*codes.shape[:-1], 2 * codes.shape[-1]), codes.strides, format,
        scales=scales, rotated_width=rotated_width, scale_rule=scale_rule,
    )  # fmt: skip
    rows.readonly = codes.readonly or scales.readonly
    return rows


def columns(v: ArrayView, start: int, stop: int) -> ArrayView:
    """Return some elements of each row; of a four-bit format whole groups."""
    format = formats.FOUR_BIT.get(v.format)
    if format is None or v.scales is None:
        return v[..., start:stop]
    if (start, stop) == (0, v.shape[-1]):
        return v
    group = format.group
    if start % group or stop % group:
        raise ValueError(
            f"columns: expected whole groups of {group} elements of {v.format}, got {start} to "
            f"{stop}"
        )
    codes, scales = (
        v.codes[..., start // 2 : stop // 2],
        v.scales[..., start // group : stop // group],
    )
    rotated = _rotated_columns(v, start, stop)
    return four_bit_view(codes, scales, v.format, rotated, v.scale_rule)


def _rotated_columns(v: ArrayView, start: int, stop: int) -> int:
    """Return how many of some columns are rotated: all that the row has, none, or whole blocks."""
    rotated, block = v.rotated_width, formats.rotation_block(v.rotated_width)
    if start >= rotated:
        return 0
    width = min(stop, rotated) - start
    if start % block or formats.rotation_block(width) != block:
        raise ValueError(
            f"columns: expected an odd number of rotated blocks of {block}, the {rotated} elements "
            f"that are rotated or none of them, got {start} to {stop} of {describe(v)}"
        )
    return width


def strides_of(shape: tuple[int, ...], format: str) -> tuple[int, ...]:
    """Return the byte strides of a C-contiguous array of a number format.

    >>> strides_of((4, 2, 16), "bf16"), strides_of((4, 2, 16), "nvfp4")
    ((64, 32, 2), (18, 9, 0))
    """
    four_bit = formats.FOUR_BIT.get(format)
    if four_bit is None:
        return contiguous_strides(shape, formats.itemsize(format))
    return (*contiguous_strides(shape[:-1], four_bit.row_bytes(shape[-1])), 0)


def bytes_of(v: ArrayView, name: str = "array") -> ArrayView:
    """Return a view unchanged, or the bytes of a four-bit format, uint8 (..., row_bytes)."""
    if v.scales is None:
        return v
    packed = v.packed
    if packed is None:
        raise ValueError(
            f"{name}: expected {v.format} with the scales after the codes of each row, got scales "
            "in an array of their own; take .codes and .scales"
        )
    return packed


def transposed(v: ArrayView, axes: Sequence[int]) -> ArrayView:
    """Return a view with its axes in another order; the rows of a four-bit format stay last."""
    if v.scales is not None and v.packed is None:
        codes, scales = transposed(v.codes, axes), transposed(v.scales, axes)
        return four_bit_view(codes, scales, v.format, v.rotated_width, v.scale_rule)
    return reshaped(v, tuple(v.shape[i] for i in axes), tuple(v.strides[i] for i in axes))


def reshaped(v: ArrayView, shape: tuple[int, ...], strides: tuple[int, ...]) -> ArrayView:
    """Return the same memory with other axes."""
    if v.scales is not None:
        bytes_of(v)  # raises for scales that do not follow the codes
    other = ArrayView(  # not `recast`: each step of a cache comes here
        v.pointer, shape, strides, v.format, v.device,
        library=v.library, readonly=v.readonly, owner=v.owner, rotated_width=v.rotated_width,
        scale_rule=v.scale_rule,
    )  # fmt: skip
    other.name = v.name
    return other


def first_overlap(views: Sequence[ArrayView]) -> tuple[int, int] | None:
    """Return the indices of the first two views that share a byte, or None.

    >>> a = np.zeros(8, np.uint8)
    >>> first_overlap([view(a[4:]), view(a[:4]), view(a[2:6:2])])
    (0, 2)
    """
    ranges = [view.byte_range() for view in views]
    order = sorted(range(len(views)), key=ranges.__getitem__)
    pairs: list[tuple[int, int]] = []
    open_: list[int] = []  # whose range may reach into the next one's
    for i in order:
        open_ = [j for j in open_ if ranges[j][1] > ranges[i][0]]
        pairs += [(min(i, j), max(i, j)) for j in open_ if overlap(views[i], views[j])]
        open_.append(i)
    return min(pairs, default=None)


def overlaps_itself(v: ArrayView) -> bool:
    """Return whether two elements may share a byte: an axis strides less than the inner axes span.

    >>> overlaps_itself(view(np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3)))
    True
    """
    if v.scales is not None:
        codes, *scales = v.memory
        apart = not any(overlap(codes, other) for other in scales)
        return not apart or any(map(overlaps_itself, v.memory))
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


# --- Arrays over addresses ------------------------------------------------------------------------


def _untyped(view: ArrayView) -> np.ndarray[Any, Any]:
    """Return a NumPy array over the addresses of any device. Its bytes must not be accessed."""
    untyped = np.dtype((np.void, view.itemsize))
    return array_at(None, view.pointer, view.shape, untyped, view.strides)


class Memory(Unpicklable):
    """Bytes at an address, exported to NumPy as untyped elements; `owner` keeps them alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self, owner: object, pointer: int, shape: tuple[int, ...], itemsize: int,
        strides: tuple[int, ...] | None, *, readonly: bool,
    ) -> None:  # fmt: skip
        self.owner = owner
        self.__array_interface__: dict[str, Any] = {
            "version": 3, "data": (pointer, readonly), "shape": shape, "strides": strides,
            "typestr": f"|V{itemsize}",
        }  # fmt: skip


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


def _bits(v: ArrayView) -> Any:
    """Return the memory of a view as a NumPy or CuPy array of the format's carrier dtype."""
    dtype = formats.carrier_dtype(v.format)
    kind, _, index = v.device.partition(":")
    if kind == "host":
        return array_at(v.owner, v.pointer, v.shape, dtype, v.strides, readonly=v.readonly)
    cupy = cuda_api.CudaApi().cupy
    return cupy_array_at(cupy, v.owner, v.pointer, v.shape, dtype, v.strides, int(index))


def cupy_array_at(
    cupy: Any, owner: object, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any],
    strides: tuple[int, ...], device_index: int,
) -> Any:  # fmt: skip
    """Return the CuPy array at an address that a GPU can reach, in memory that `owner` keeps."""
    reach = sum(abs((n - 1) * s) for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = cupy.cuda.UnownedMemory(pointer, reach, owner, device_index)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0), strides=strides)


class PinnedMemory(Memory):
    """Page-locked host memory, which a GPU reads and writes directly.

    A pinned array is an ordinary `numpy.ndarray` whose chain of `.base` ends here.
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
    while isinstance(owner, (np.ndarray, memoryview)):  # np.frombuffer puts a memoryview in between
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
    """Return a key that is equal for arrays of one allocation, from the objects that own them.

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


# --- Views ----------------------------------------------------------------------------------------


def view(x: Any, name: str | None = None) -> ArrayView:
    """Describe an array without copying it.

    Examples
    --------
    >>> view(np.zeros((2, 3), np.float16))
    <(2, 3) fp16 on host at 0x...>
    """
    if isinstance(x, ArrayView):
        return x
    try:
        if isinstance(x, np.ndarray):
            v = _view_numpy(x)
        elif is_instance_of(x, "torch", "Tensor"):
            if name is not None:
                require_no_gradient(x)
            v = _view_torch(x)
        elif is_instance_of(x, "cupy", "ndarray"):
            v = _view_cupy(x)
        else:
            v = view_exporter(x)
    except (TypeError, DeviceError) as error:
        raise type(error)(f"{name or 'array'}: expected an array, {error}") from None
    v.name = name or ""
    return v


def _view_numpy(x: np.ndarray[Any, Any]) -> ArrayView:
    if type(x) is not np.ndarray:
        require_unmasked(x)
    format, shape, strides = _numpy_format(x.dtype), x.shape, x.strides
    pointer, readonly = x.__array_interface__["data"]
    if min(shape, default=1) < 2 and x.flags.c_contiguous:  # axes of one element may have any
        strides = contiguous_strides(shape, x.itemsize)
    return ArrayView(pointer, shape, strides, format, "host", readonly=readonly, owner=x)


@lru_cache(maxsize=256)
def _numpy_format(dtype: np.dtype[Any]) -> str:
    _require_plain(dtype)
    return formats.tag(dtype)


def _require_plain(dtype: np.dtype[Any]) -> None:
    """Raise unless elements are numbers in this processor's byte order."""
    if not dtype.isnative or dtype.hasobject or dtype.names or not dtype.itemsize:
        raise TypeError(f"got NumPy dtype {dtype!r}")


def require_unmasked(x: np.ndarray[Any, Any]) -> None:
    """Raise TypeError for a masked array."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("got a masked array, whose mask is not seen; pass its .data or .filled(0)")


LEAST_ADDRESS = 1 << 40  # offsets into memory that was freed are less, as may be a few addresses


def has_memory(x: Any, pointer: int) -> bool:
    """Return whether a torch tensor has memory at its address, or no elements.

    A tensor of freed storage has its offset in that storage as its address.
    """
    return pointer >= LEAST_ADDRESS or bool(x.untyped_storage().data_ptr()) or not x.numel()


def _lacks_memory(x: Any) -> bool:
    try:
        return not has_memory(x, x.data_ptr())
    except (RuntimeError, ValueError):
        return True


def _is_one_of(x: Any, **modules_by_class: str) -> bool:
    return any(is_instance_of(x, module, name) for name, module in modules_by_class.items())


TENSOR_PROPERTIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fake": (
        lambda x: _is_one_of(
            x, FakeTensor="torch._subclasses.fake_tensor",
            FunctionalTensor="torch._subclasses.functional_tensor",
        ),
        "a torch {type}, which has no memory; call this outside of FakeTensorMode, torch.compile "
        "and torch.export, or the function of kvcupy.interop.torch in them",
    ),
    "uninitialized": (
        lambda x: _is_one_of(x, UninitializedTensorMixin="torch.nn.parameter"),
        "a torch {type}, which has no memory yet; give it some with .materialize(shape)",
    ),
    "nested": (
        lambda x: x.is_nested,
        "a nested torch tensor, whose rows have no common strides; pass its rows as one tensor, "
        "torch.cat(tensor.unbind())",
    ),
    "meta": (
        lambda x: x.is_meta,
        "a torch tensor on {x.device}, which has no memory; give it some with .to_empty()",
    ),
    "device": (
        lambda x: x.device.type not in ("cpu", "cuda"), "a torch tensor on {x.device}",
    ),
    "sparse": (
        lambda x: x.layout is not sys.modules["torch"].strided,
        "a torch tensor of layout {x.layout}; pass its .to_dense()",
    ),
    "memory": (
        _lacks_memory,
        "a torch tensor that has no memory of its own, as inside torch.vmap, torch.func and "
        "torch.compile (call this outside of them), or whose storage was freed",
    ),
    "quantized": (
        lambda x: x.is_quantized,
        "a torch tensor of {x.dtype}, whose bits are not its values; pass its .int_repr() and "
        "the scale",
    ),
    "conjugate": (
        lambda x: x.is_conj(),
        "a torch tensor with the conjugate bit, whose bits are not its values; pass its "
        ".resolve_conj()",
    ),
    "negative": (
        lambda x: x.is_neg(),
        "a torch tensor with the negative bit, whose bits are not its values; pass its "
        ".resolve_neg()",
    ),
}  # fmt: skip
"""Properties of a torch tensor with which its memory does not hold its values, and what to do.

Whatever else decides it is in the signature (class, format, shape, strides, device), or depends on
the thread (`require_no_gradient`). A known signature is refused as a new one is: `probe_arguments`
meets an error, or looks (`require_plain`); `TensorMatcher` compares dispatch keys and addresses.
"""


def require_plain(x: Any) -> None:
    """Raise TypeError for a torch tensor that has one of `TENSOR_PROPERTIES`."""
    for has, message in TENSOR_PROPERTIES.values():
        if has(x):
            raise TypeError("got " + message.format(x=x, type=type(x).__name__))


def require_no_gradient(x: Any) -> None:
    """Raise TypeError for a tensor whose operations autograd records: it would not see this one.

    The message is what was received, for callers to prefix.
    """
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise TypeError(
            "got a torch tensor that requires a gradient; kvcupy has no backward: call this under "
            "torch.no_grad(), or pass the tensor's .detach()"
        )


def _view_torch(x: Any) -> ArrayView:
    require_plain(x)
    TORCH_TYPES.add(type(x))
    format, device = _torch_names(x.dtype, x.device)
    shape, itemsize = tuple(x.shape), x.element_size()
    if x.is_contiguous():  # strides that mean nothing, of empty tensors say, may be any
        strides = contiguous_strides(shape, itemsize)
    else:
        strides = tuple([s * itemsize for s in x.stride()])
    return ArrayView(x.data_ptr(), shape, strides, format, device, library="torch", owner=x)


@lru_cache(maxsize=256)
def _torch_names(dtype: Any, device: Any) -> tuple[str, str]:
    """Return kvcupy's names of a torch dtype and device."""
    name = "host" if device.type == "cpu" else f"cuda:{device.index}"
    return formats.tag(str(dtype).removeprefix("torch.")), name


def _view_cupy(x: Any) -> ArrayView:
    format, device = formats.tag(x.dtype), f"cuda:{x.data.device_id}"
    return ArrayView(x.data.ptr, x.shape, x.strides, format, device, library="cupy", owner=x)


def view_exporter(x: Any) -> ArrayView:
    """View any other exporter by the protocol that orders its work.

    `__cuda_array_interface__` needs no capsule, but may name no stream to wait for, as JAX's.
    """
    interface = getattr(x, "__cuda_array_interface__", None)
    has_dlpack = hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")
    if interface is not None and (interface.get("stream") is not None or not has_dlpack):
        return _view_cuda_interface(x, interface)
    if has_dlpack:
        return _view_dlpack(x)
    hint = "; make it an array with np.asarray" if isinstance(x, (list, tuple, range)) else ""
    raise TypeError(f"got {type(x).__name__}{hint}")


def _view_dlpack(x: Any) -> ArrayView:
    export = dlpack.read(x)
    strides = export.strides or contiguous_strides(export.shape, formats.itemsize(export.format))
    v = ArrayView(
        export.pointer, export.shape, strides, export.format, export.device,
        library="dlpack", readonly=export.readonly, owner=export.owner,
    )  # fmt: skip
    v.readonly = v.readonly or _is_immutable(x, v)
    if v.device != "host":
        STREAMED_TYPES.update((type(x), dlpack.Capsule))
    return v


def _is_immutable(x: Any, v: ArrayView) -> bool:
    """Return whether an exporter's arrays are immutable, whatever the flags of its export say.

    JAX marks its capsules as writable, but not its arrays' NumPy views.
    """
    if is_instance_of(x, "jax", "Array"):
        return True
    if v.device != "host" or not hasattr(x, "__array__"):
        return False
    try:
        array = np.asarray(x)
    except Exception:  # without a NumPy view there is nothing to compare
        return False
    return not array.flags.writeable and array.__array_interface__["data"][0] == v.pointer


def _view_cuda_interface(x: Any, interface: dict[str, Any]) -> ArrayView:
    if interface.get("mask") is not None:
        raise TypeError(f"got {type(x).__name__} with a mask")
    try:
        dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
        strides = tuple(interface.get("strides") or contiguous_strides(shape, dtype.itemsize))
        pointer, readonly = interface["data"]
    except (KeyError, TypeError, ValueError) as error:
        kind = type(x).__name__
        raise TypeError(f"got {kind}, whose interface lacks what it needs: {error!r}") from None
    _require_plain(dtype)
    if interface.get("stream") is not None:
        STREAMED_TYPES.add(type(x))
    device = f"cuda:{cuda_api.device_of_pointer(pointer)}"
    return ArrayView(
        pointer or 0, shape, strides, formats.tag(dtype), device,
        library="cupy", readonly=readonly or is_instance_of(x, "jax", "Array"), owner=x,
    )  # fmt: skip


def tensor_of(v: ArrayView, name: str = "array") -> Any:
    """Return the memory of a view as a torch tensor that shares it, and keeps its owner alive."""
    import torch

    v = bytes_of(v, name)
    if any(step < 0 for step in v.strides):  # torch.from_dlpack would abort the process
        raise ValueError(f"{name}: expected strides that torch has, got {v.strides} bytes")
    dtype = getattr(torch, formats.numpy_dtype(v.format).name)
    if isinstance(v.owner, torch.Tensor) and v.owner.element_size() == v.itemsize:
        first = v.owner.storage_offset() + (v.pointer - v.owner.data_ptr()) // v.itemsize
        strides = [step // v.itemsize for step in v.strides]
        with torch.inference_mode(False):  # callers cache the tensor
            return v.owner.detach().as_strided(v.shape, strides, first).view(dtype)
    try:
        return torch.from_dlpack(v)
    except (RuntimeError, BufferError):  # this version of torch does not import the format
        bits = recast(v, v.shape, v.strides, f"int{8 * v.itemsize}")
        bits.readonly = False
        return torch.from_dlpack(bits).view(dtype)


def is_instance_of(x: object, module: str, name: str) -> bool:
    """Return whether `x` is an instance of a class whose module may not have been imported."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(x, getattr(loaded, name, ()))
