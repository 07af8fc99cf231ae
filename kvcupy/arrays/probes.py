"""What an operation asks of each argument on every call: its address and a hashable signature.

Both come from attributes that the library answers in nanoseconds. `view` gives the whole
description; operations need it only the first time that they see a signature.
"""

from __future__ import annotations

import ctypes
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from .. import cuda_api
from . import dlpack
from .views import (
    LEAST_ADDRESS,
    STREAMED_TYPES,
    TORCH_TYPES,
    ArrayView,
    has_memory,
    is_instance_of,
    require_no_gradient,
    require_plain,
    require_unmasked,
    view_exporter,
)

Signature = tuple[Any, ...]
Probe = Callable[[Any], tuple[int, Signature]]


def _probe_view(x: ArrayView) -> tuple[int, Signature]:
    if x.scales is not None:  # a plan finds them by their distance from the codes
        scales = x.scales.pointer - x.pointer, x.scales.strides, x.rotated_width, x.scale_rule
        signature = x.format, x.shape, x.strides, x.device, x.library, x.readonly, scales
        return x.pointer, signature
    return x.pointer, (x.format, x.shape, x.strides, x.device, x.library, x.readonly)


# Bits of `flags.num`: one read answers two questions. Without gaps strides follow from the shape.
_CONTIGUOUS, _WRITEABLE = 0x1, 0x400
_FLAGS = _CONTIGUOUS | _WRITEABLE


def _numpy_signature(x: np.ndarray[Any, Any]) -> Signature:
    flags = x.flags.num & _FLAGS
    return x.dtype, x.shape, flags & _CONTIGUOUS or x.strides, flags


def _probe_numpy(x: np.ndarray[Any, Any]) -> tuple[int, Signature]:
    return _all_memory[(id(x) + _HEAD_BYTES) // _WORD_BYTES], _numpy_signature(x)


def _probe_array_interface(x: np.ndarray[Any, Any]) -> tuple[int, Signature]:
    return x.__array_interface__["data"][0], _numpy_signature(x)


# By NumPy's ABI the address comes right after the head of the object. Reading it there is much
# faster than `__array_interface__`, which builds a dictionary. The array is all of the memory.
_WORD_BYTES = ctypes.sizeof(ctypes.c_size_t)
_all_memory = (ctypes.c_size_t * (sys.maxsize // _WORD_BYTES)).from_address(0)
_HEAD_BYTES = object.__basicsize__
_SAMPLE = np.zeros(1)
# Elsewhere `id` may be no address, and must not be read; nor does a signed size reach all memory.
_HAS_NUMPY_ABI = (
    sys.implementation.name == "cpython" and _WORD_BYTES == 8
    and _probe_numpy(_SAMPLE) == _probe_array_interface(_SAMPLE)
)  # fmt: skip
if not _HAS_NUMPY_ABI:
    _probe_numpy = _probe_array_interface
_READ_HERE = np.ndarray if _HAS_NUMPY_ABI else None  # by `probe_arguments` itself


def _probe_torch(x: Any) -> tuple[int, Signature]:
    pointers, signatures = probe_arguments((x,))
    return pointers[0], signatures[0]  # type: ignore[return-value]


def _probe_cupy(x: Any) -> tuple[int, Signature]:
    # One element longer than a NumPy signature: there, readonly=False would equal GPU number 0.
    memory = x.data
    return memory.ptr, (x.dtype, x.shape, x.strides, "cupy", memory.device_id)


def _probe_exporter(x: Any) -> tuple[int, Signature]:
    return _probe_view(view_exporter(x))


_PROBES: dict[type, Probe] = {ArrayView: _probe_view, np.ndarray: _probe_numpy}


def probe(x: Any) -> tuple[int, Signature]:
    """Return address and signature of an array; equal signatures mean equal descriptions."""
    known = _PROBES.get(type(x))
    return known(x) if known is not None else _probe_for(x)(x)


def address_of(x: Any) -> int:
    """Return the address of an array, without the checks of `probe`."""
    kind = type(x)
    if kind in TORCH_TYPES:
        pointer: int = x.data_ptr()
        return pointer
    if kind is _READ_HERE:
        return _all_memory[(id(x) + _HEAD_BYTES) // _WORD_BYTES]
    return probe(x)[0]


def probe_arguments(
    arguments: Iterable[Any],
) -> tuple[tuple[int, ...], tuple[Signature | float | None, ...]]:
    """Return addresses and signatures of arguments; None and numbers have the address 0."""
    pointers: list[int] = []
    signatures: list[Signature | float | None] = []
    last: Any = None
    pointer, signature = 0, last
    for x in arguments:
        if x is not last:  # what is written in place comes twice
            last = x
            kind = type(x)
            if kind is _READ_HERE:  # as `_probe_numpy`
                pointer = _all_memory[(id(x) + _HEAD_BYTES) // _WORD_BYTES]
                flags = x.flags.num & _FLAGS
                signature = x.dtype, x.shape, flags & _CONTIGUOUS or x.strides, flags
            elif x is None:
                pointer, signature = 0, None
            elif kind in TORCH_TYPES:
                try:
                    pointer, dtype = x.data_ptr(), x.dtype
                    low = pointer < LEAST_ADDRESS and not has_memory(x, pointer)
                    if low or x.is_neg() or dtype.is_complex:
                        require_plain(x)
                    if x.requires_grad:
                        require_no_gradient(x)
                    signature = dtype, x.shape, x.is_contiguous() or x.stride(), x.device
                except (RuntimeError, ValueError):  # sparse, nested or transformed
                    require_plain(x)
                    raise
            else:
                known = _PROBES.get(kind)
                if known is None and isinstance(x, numbers.Real):
                    try:
                        pointer, signature = 0, float(x)
                    except OverflowError:  # the checks say so
                        pointer, signature = 0, math.inf
                else:
                    pointer, signature = (known or _probe_for(x))(x)
        pointers.append(pointer)
        signatures.append(signature)
    return tuple(pointers), tuple(signatures)


class TensorMatcher:
    """Recognises arguments that differ from the arguments of an earlier call in addresses alone.

    `probe_arguments` asks a tensor six questions. Where all arguments are torch tensors or None,
    torch compares the answers itself, in one call, with those that it was given first.
    """

    def __init__(self, guards: Any, arguments: Sequence[Any]) -> None:
        """Record the properties of arguments, which are not kept alive; see `tensor_matcher`."""
        present = [i for i, x in enumerate(arguments) if x is not None]
        first: dict[int, int] = {}  # positions by object: what is written in place comes twice
        for i in present:
            first.setdefault(id(arguments[i]), i)
        tensors = list(first.values())
        self._tensors = taking(tensors)
        self._absent = taking([i for i, x in enumerate(arguments) if x is None])
        self._nones = self._absent(arguments)
        self._repeated = [
            (i, first[id(arguments[i])]) for i in present if first[id(arguments[i])] != i
        ]
        # Their place among the addresses of tensors, which end with a 0.
        order = {i: number for number, i in enumerate(tensors)}
        self._in_order = taking([
            len(tensors) if x is None else order[first[id(x)]] for x in arguments
        ])  # fmt: skip
        # Addresses of tensors, and of all arguments, of the last call.
        self._last: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._address_of = sys.modules["torch"].Tensor.data_ptr
        self._match = guards(
            *self._tensors(arguments), dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check

    def addresses(self, arguments: tuple[Any, ...]) -> tuple[int, ...] | None:
        """Return addresses as `probe_arguments` does; None if something may differ."""
        tensors = self._tensors(arguments)
        try:
            for x in tensors:
                if x.is_nested:  # the comparison would end the process
                    return None
            if self._absent(arguments) != self._nones:
                return None
        except (AttributeError, ValueError):  # another library's
            return None
        for i, j in self._repeated:
            if arguments[i] is not arguments[j]:
                return None
        if not self._match(*tensors):
            return None
        addresses = tuple(map(self._address_of, tensors))
        last, in_order = self._last
        if addresses == last:
            return in_order
        if min(addresses) < LEAST_ADDRESS and not all(map(has_memory, tensors, addresses)):
            return None
        in_order = self._in_order((*addresses, 0))
        self._last = addresses, in_order
        return in_order


def tensor_matcher(arguments: Sequence[Any]) -> TensorMatcher | None:
    """Return what recognises arguments like these, which `probe_arguments` has accepted.

    None where some are no plain tensors, where one is empty or requires a gradient (which is
    accepted in `torch.no_grad` only), or where torch has no such comparison.
    """
    torch = sys.modules.get("torch")
    tensors = [x for x in arguments if x is not None]
    if torch is None or set(map(type, tensors)) != {torch.Tensor}:
        return None
    if any([x.requires_grad or not x.data_ptr() for x in tensors]):
        return None
    guards = _tensor_guards()
    return None if guards is None else TensorMatcher(guards, arguments)


@cache
def _tensor_guards() -> Any:
    """Return the class by which `torch.compile` recognises tensors, where there still is one.

    Formats, sizes, strides, devices, gradients, Python types and dispatch keys must be equal.
    """
    torch = sys.modules["torch"]
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        with torch.inference_mode(False):
            sample, equal = torch.zeros(2, 3, device="cpu"), torch.ones(2, 3, device="cpu")
            check = guards(sample, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            others = (
                sample.double(), sample[:1], sample.view(3, 2), sample.t().contiguous().t(),
                sample.to("meta"), sample.clone().requires_grad_(), sample.numpy(),
            )  # fmt: skip
            return guards if check(equal) and not any(map(check, others)) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def taking(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what takes some items of a tuple or a mapping, as a tuple even of one."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    if len(keys) == 0:
        return lambda items: ()
    return lambda items: (items[keys[0]],)


def _probe_for(x: Any) -> Probe:
    if isinstance(x, np.ndarray):
        require_unmasked(x)
        prober: Probe = _probe_numpy
    elif is_instance_of(x, "torch", "Tensor"):
        require_plain(x)
        prober = _probe_torch
        TORCH_TYPES.add(type(x))
    elif is_instance_of(x, "cupy", "ndarray"):
        prober = _probe_cupy
    else:
        view_exporter(x)  # raises TypeError for what exports nothing
        prober = _probe_exporter
    _PROBES[type(x)] = prober
    return prober


# --- What other libraries must know, or wait for --------------------------------------------------


def note_written(arrays: Sequence[Any]) -> None:
    """Tell autograd that torch tensors among these arrays were written.

    It increments their version counters, as torch's in-place operations do, also without gradients:
    a tensor that backward has saved earlier has changed. Views of a tensor share its counter.
    """
    if not TORCH_TYPES:
        return
    for array in arrays:
        if type(array) not in TORCH_TYPES:
            views = [x for x in arrays if type(x) is ArrayView]
            owners = [x.owner if type(x) is ArrayView else x for x in arrays]
            owners += [x.scales.owner for x in views if x.scales is not None]
            arrays = [x for x in owners if type(x) in TORCH_TYPES]
            break
    if arrays:
        _increment_version()(arrays)


def noting_written(arrays: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    """Return what does as `note_written` for all arrays of the signatures of these."""
    if TORCH_TYPES.issuperset(map(type, arrays)):
        return _increment_version()
    return note_written


@cache
def _increment_version() -> Callable[[Sequence[Any]], Any]:
    """Return `torch.autograd.graph.increment_version`, or what it calls, in a third of the time."""
    torch = sys.modules["torch"]
    direct: Callable[[Sequence[Any]], Any] = torch._C._increment_version
    try:
        direct([])
    except TypeError:  # older versions take one tensor
        increment = torch.autograd.graph.increment_version
        return lambda tensors: [increment(tensor) for tensor in tensors]
    return direct


def wait_for_producers(arrays: Iterable[Any], stream: Any) -> None:
    """Make a stream wait, by events, for those on which arrays are still being written.

    Version 3 of `__cuda_array_interface__` names them, and an exporter of DLPack makes the stream
    wait itself. In a capture nothing outside can be waited for: the order there is the caller's, as
    for whatever a graph reads at its launch.
    """
    if not STREAMED_TYPES:
        return
    owners: list[Any] = []
    for a in arrays:
        owners.append(a.owner if type(a) is ArrayView else a)
        if type(a) is ArrayView and a.scales is not None:
            owners.append(a.scales.owner)
    streamed = [owner for owner in owners if type(owner) in STREAMED_TYPES]
    if not streamed or stream.capturing:
        return
    exporters = [owner.exporter if type(owner) is dlpack.Capsule else owner for owner in streamed]
    producers: dict[Any, None] = {}
    for exporter in {id(exporter): exporter for exporter in exporters}.values():
        interface = getattr(exporter, "__cuda_array_interface__", None) or {}
        if interface.get("stream") is not None:
            producers[interface["stream"]] = None
        elif hasattr(exporter, "__dlpack_device__"):
            dlpack.let_wait(stream.pointer, exporter)
    for pointer in producers:
        stream.wait(cuda_api.StreamAddress(int(pointer)))
