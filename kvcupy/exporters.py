"""From an array of any library to its description.

`probe` is what an operation calls for each argument on every call: a pointer and a hashable
signature, from attributes that the library answers in nanoseconds. `view` gives the whole
description; operations ask for it only the first time that they see a signature.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from . import dtypes
from .arrays import ArrayView, contiguous_strides

if TYPE_CHECKING:
    from .devices.protocol import Stream

Signature = tuple[Any, ...]
Probe = Callable[[Any], tuple[int, Signature]]


def _probe_view(x: ArrayView) -> tuple[int, Signature]:
    return x.pointer, (x.format, x.shape, x.strides, x.device, x.library, x.readonly)


def _probe_numpy(x: np.ndarray[Any, Any]) -> tuple[int, Signature]:
    pointer, readonly = x.__array_interface__["data"]
    return pointer, (x.dtype, x.shape, x.strides, readonly)


def _probe_torch(x: Any) -> tuple[int, Signature]:
    try:
        pointer = x.data_ptr()
        if not pointer or x.requires_grad:  # two reads of an attribute: seldom anything to look at
            _require_memory(x, pointer)
            _require_no_gradient(x)
        return pointer, (x.dtype, x.shape, x.stride(), x.device)
    except RuntimeError as error:  # sparse, transformed: without memory, or without strides
        raise TypeError(_without_memory(x)) from error


def _probe_cupy(x: Any) -> tuple[int, Signature]:
    # One more than a NumPy array has: its readonly False is equal to the number of a GPU, 0.
    memory = x.data
    return memory.ptr, (x.dtype, x.shape, x.strides, "cupy", memory.device_id)


def _probe_exporter(x: Any) -> tuple[int, Signature]:
    return _probe_view(_view_exporter(x))


_TORCH_TYPES: set[type] = set()  # torch.Tensor and the subclasses of it that have been seen
_STREAMED_TYPES: set[type] = set()  # of arrays that named the stream which still writes them
_PROBES: dict[type, Probe] = {ArrayView: _probe_view, np.ndarray: _probe_numpy}


def probe(x: Any) -> tuple[int, Signature]:
    """Return address and signature of an array; equal signatures mean equal descriptions.

    Raises
    ------
    TypeError : `x` exports no array; the message starts with what came, for callers to complete
    """
    known = _PROBES.get(type(x))
    return known(x) if known is not None else _probe_for(x)(x)


def probe_arguments(
    arguments: Iterable[Any],
) -> tuple[tuple[int, ...], tuple[Signature | float | None, ...]]:
    """Return addresses and signatures of arguments; None and numbers have the address 0."""
    pointers: list[int] = []
    signatures: list[Signature | float | None] = []
    for x in arguments:
        if x is None:
            pointers.append(0)
            signatures.append(None)
            continue
        known = _PROBES.get(type(x))
        if known is None and isinstance(x, numbers.Real):
            pointers.append(0)
            signatures.append(float(x))
            continue
        pointer, signature = (known or _probe_for(x))(x)
        pointers.append(pointer)
        signatures.append(signature)
    return tuple(pointers), tuple(signatures)


def _probe_for(x: Any) -> Probe:
    kind = type(x)
    if isinstance(x, np.ndarray):
        _require_unmasked(x)
        found: Probe = _probe_numpy
    elif _is(x, "torch", "Tensor"):
        _require_real(x)
        found = _probe_torch
        _TORCH_TYPES.add(kind)
    elif _is(x, "cupy", "ndarray"):
        found = _probe_cupy
    else:
        _view_exporter(x)  # refuses what exports nothing
        found = _probe_exporter
    _PROBES[kind] = found
    return found


def _is(x: object, module: str, name: str) -> bool:
    """Return whether `x` is an instance of a class of a module that need not be imported."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(x, getattr(loaded, name, ()))


# --- Views ----------------------------------------------------------------------------------------


def view(x: Any, name: str | None = None) -> ArrayView:
    """Describe an array without copying it.

    Parameters
    ----------
    x : NumPy or CuPy array, torch tensor (CPU or CUDA), ArrayView, or any exporter of
        `__cuda_array_interface__` or DLPack
    name : of the argument that `x` is, for error messages. None: an array that a call has checked
        before; whether it needs a gradient is not asked again, as that depends on the thread

    Raises
    ------
    TypeError : `x` is none of these, its dtype or device is not supported, or it is a tensor that
        needs a gradient while torch records gradients

    Examples
    --------
    >>> view(np.zeros((2, 3), np.float16))
    <(2, 3) fp16 on host at 0x...>
    """
    if isinstance(x, ArrayView):
        return x
    try:
        if isinstance(x, np.ndarray):
            return _view_numpy(x)
        if type(x) in _TORCH_TYPES or _is(x, "torch", "Tensor"):
            if name is not None and x.requires_grad:
                _require_no_gradient(x)
            return _view_torch(x)
        if _is(x, "cupy", "ndarray"):
            return _view_cupy(x)
        return _view_exporter(x)
    except TypeError as error:
        raise TypeError(f"{name or 'array'}: expected an array, {error}") from None


def _view_numpy(x: np.ndarray[Any, Any]) -> ArrayView:
    _require_unmasked(x)
    _require_plain(x.dtype)
    pointer, readonly = x.__array_interface__["data"]
    return ArrayView(
        pointer, x.shape, x.strides, dtypes.tag(x.dtype), "host", readonly=readonly, owner=x
    )


def _require_plain(dtype: np.dtype[Any]) -> None:
    """Refuse elements that are not numbers in this processor's byte order."""
    if not dtype.isnative or dtype.hasobject or dtype.names:
        raise TypeError(f"got NumPy dtype {dtype!r}")


def _require_unmasked(x: np.ndarray[Any, Any]) -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("got a masked array, whose mask is not seen; pass its .data or .filled(0)")


def _require_real(x: Any) -> None:
    """Refuse torch's fake tensors by their class: they warn when asked for an address."""
    for module in ("fake_tensor", "functional_tensor"):
        name = "FakeTensor" if module == "fake_tensor" else "FunctionalTensor"
        if _is(x, f"torch._subclasses.{module}", name):
            raise TypeError(
                f"got a torch {name}, which has no memory; call this outside of FakeTensorMode, "
                "torch.compile and torch.export, or behind a torch.library.custom_op"
            )


def _require_memory(x: Any, pointer: int) -> None:
    if not pointer and x.numel():
        raise TypeError(_without_memory(x))


def _without_memory(x: Any) -> str:
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.device.type not in ("cpu", "cuda"):
        kind = f"layout {x.layout} on {x.device}"
        hint = ", which has no memory; give it some with .to_empty()" if x.is_meta else ""
        return f"got a torch tensor with {kind}{hint}"
    return (
        "got a torch tensor that has no memory of its own, as inside torch.vmap, torch.func and "
        "torch.compile; call this outside of them"
    )


def _require_no_gradient(x: Any) -> None:
    """Refuse what autograd would record, in silence and wrongly."""
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise TypeError(
            "got a torch tensor that requires a gradient; kvcupy has no backward: call this under "
            "torch.no_grad(), or pass the tensor's .detach()"
        )


def _view_torch(x: Any) -> ArrayView:
    torch = sys.modules["torch"]
    if type(x) not in _TORCH_TYPES:
        _require_real(x)
    format, device = _torch_names(x.dtype, x.device)
    if device is None or x.layout is not torch.strided:
        raise TypeError(_without_memory(x))
    try:
        pointer = x.data_ptr()
    except RuntimeError:
        raise TypeError(_without_memory(x)) from None
    if not pointer:
        _require_memory(x, pointer)
    _TORCH_TYPES.add(type(x))
    if x.is_quantized or x.is_conj() or x.is_neg():
        raise TypeError(f"got a torch tensor of {x.dtype} whose bits are not its values")
    itemsize = x.element_size()
    return ArrayView(
        pointer,
        tuple(x.shape),
        tuple([s * itemsize for s in x.stride()]),
        format,
        device,
        library="torch",
        owner=x,
    )


@lru_cache(maxsize=256)
def _torch_names(dtype: Any, device: Any) -> tuple[str, str | None]:
    """Return the names of a torch dtype and of a torch device, None if that is none of kvcupy's."""
    name = {"cpu": "host", "cuda": f"cuda:{device.index}"}.get(device.type)
    return dtypes.tag(str(dtype).removeprefix("torch.")), name


def _view_cupy(x: Any) -> ArrayView:
    return ArrayView(
        x.data.ptr,
        x.shape,
        x.strides,
        dtypes.tag(x.dtype),
        f"cuda:{x.data.device_id}",
        library="cupy",
        owner=x,
    )


def _view_exporter(x: Any) -> ArrayView:
    """View anything else: `__cuda_array_interface__` first, since it needs no capsule."""
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        return _view_cuda_interface(x, interface)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        from . import dlpack

        v = dlpack.view(x)
        v.readonly = v.readonly or _is_immutable(x, v)
        return v
    hint = "; make it an array with np.asarray" if isinstance(x, (list, tuple, range)) else ""
    raise TypeError(f"got {type(x).__name__}{hint}")


def _is_immutable(x: Any, v: ArrayView) -> bool:
    """Return whether an exporter's arrays never change, whatever the flags of its export say.

    JAX marks its capsules as writable; what its arrays let NumPy see is not.
    """
    if _is(x, "jax", "Array"):
        return True
    if v.device != "host" or not hasattr(x, "__array__"):
        return False
    try:
        seen = np.asarray(x)
    except Exception:  # it has no such view, which says nothing
        return False
    return not seen.flags.writeable and seen.__array_interface__["data"][0] == v.pointer


def _view_cuda_interface(x: Any, interface: dict[str, Any]) -> ArrayView:
    from .devices import cuda_api

    if interface.get("mask") is not None:
        raise TypeError(f"got {type(x).__name__} with a mask")
    dtype = np.dtype(interface["typestr"])
    _require_plain(dtype)
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or contiguous_strides(shape, dtype.itemsize)
    pointer, readonly = interface["data"]
    if interface.get("stream") is not None:
        _STREAMED_TYPES.add(type(x))
    return ArrayView(
        pointer or 0,
        shape,
        tuple(strides),
        dtypes.tag(dtype),
        f"cuda:{cuda_api.device_of_pointer(pointer)}",
        library="cupy",
        readonly=readonly or _is(x, "jax", "Array"),
        owner=x,
    )


def note_written(arrays: Iterable[Any]) -> None:
    """Let autograd know that the memory of torch tensors among some arrays was written.

    As torch's own operations in place do, also without gradients: what backward has saved earlier
    is no longer what it was. Views of a tensor share its counter.
    """
    if not _TORCH_TYPES:
        return
    tensors = []
    for array in arrays:
        owner = array.owner if type(array) is ArrayView else array
        if type(owner) in _TORCH_TYPES:
            tensors.append(owner)
    if tensors:
        _increment_version()(tensors)


def is_tensor(array: Any) -> bool:
    """Return whether an array is a torch tensor, or a view of one."""
    return (array.library == "torch") if type(array) is ArrayView else type(array) in _TORCH_TYPES


@cache
def _increment_version() -> Callable[[list[Any]], Any]:
    """Return `torch.autograd.graph.increment_version`, or what it calls: a third of the time."""
    torch = sys.modules["torch"]
    direct: Callable[[list[Any]], Any] = torch._C._increment_version
    try:
        direct([])
    except TypeError:  # older versions take one tensor
        return _increment_one_by_one
    return direct


def _increment_one_by_one(tensors: list[Any]) -> None:
    for tensor in tensors:
        sys.modules["torch"].autograd.graph.increment_version(tensor)


class _Producer:
    """A stream by its address, as `__cuda_array_interface__` names it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def wait_for_producers(arrays: Iterable[Any], on: Stream) -> None:
    """Let a stream wait, by events, for those on which arrays are still being written.

    They are named by version 3 of `__cuda_array_interface__`. In a capture nothing outside can be
    waited for: the order there is the caller's, as for whatever a graph reads at its launch.
    """
    if not _STREAMED_TYPES:
        return
    owners: list[Any] = [a.owner if type(a) is ArrayView else a for a in arrays]
    producers = [
        owner.__cuda_array_interface__.get("stream")
        for owner in owners
        if type(owner) in _STREAMED_TYPES
    ]
    for pointer in dict.fromkeys(producers):
        if pointer is not None and not on.capturing:
            on.wait(_Producer(int(pointer)))


def view_as(array: Any, format: str) -> ArrayView:
    """Tag an array of integers that holds the bits of a number format.

    Parameters
    ----------
    array : uint16 or uint8 array (also int16, int8) of any library, any shape and strides
    format : one of "fp32 fp16 bf16 fp8_e4m3 fp8_e5m2 int8"

    Returns
    -------
    ArrayView : the same memory, accepted wherever an array is; it keeps `array` alive

    Raises
    ------
    ValueError : unknown format, or its size is not the array's
    TypeError : `array` holds neither integers nor that format

    Examples
    --------
    >>> view_as(np.zeros((4, 8), np.uint16), "bf16")
    <(4, 8) bf16 on host at 0x...>
    """
    if format not in dtypes.FORMATS:
        raise ValueError(f"format: expected one of {', '.join(dtypes.FORMATS)}, got {format!r}")
    v = view(array, "array")
    if v.format != format:
        if not v.format.startswith(("int", "uint")):
            raise TypeError(f"array: expected integers that hold {format} bits, got {v.format}")
        if v.itemsize != dtypes.FORMATS[format].itemsize:
            wanted = 8 * dtypes.FORMATS[format].itemsize
            raise ValueError(f"array: expected {wanted}-bit integers for {format}, got {v.format}")
    return ArrayView(
        v.pointer,
        v.shape,
        v.strides,
        format,
        v.device,
        library=v.library,
        readonly=v.readonly,
        owner=v.owner,
    )
