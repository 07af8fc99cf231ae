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

from .. import cuda_api, dlpack
from .views import (
    STREAMED_TYPES,
    TORCH_TYPES,
    ArrayView,
    is_instance_of,
    require_memory,
    require_no_gradient,
    require_real,
    require_unmasked,
    view_exporter,
    without_memory,
)

Signature = tuple[Any, ...]
Probe = Callable[[Any], tuple[int, Signature]]


def _probe_view(x: ArrayView) -> tuple[int, Signature]:
    if x.scales is not None:  # a plan finds them by their distance from the codes
        scales = x.scales.pointer - x.pointer, x.scales.strides, x.rotated_width, x.scale_rule
        signature = x.format, x.shape, x.strides, x.device, x.library, x.readonly, scales
        return x.pointer, signature
    return x.pointer, (x.format, x.shape, x.strides, x.device, x.library, x.readonly)


def _probe_numpy(x: np.ndarray[Any, Any]) -> tuple[int, Signature]:
    pointer = _unsigned_at(id(x) + _HEAD_BYTES).value
    return pointer, (x.dtype, x.shape, x.strides, x.flags.writeable)


def _probe_array_interface(x: np.ndarray[Any, Any]) -> tuple[int, Signature]:
    pointer, readonly = x.__array_interface__["data"]
    return pointer, (x.dtype, x.shape, x.strides, not readonly)


# By NumPy's ABI the address comes right behind the head of the object. Reading it there is much
# faster than `__array_interface__`, which builds a dictionary.
_unsigned_at = ctypes.c_size_t.from_address
_HEAD_BYTES = object.__basicsize__
_SAMPLE = np.zeros(1)
# Elsewhere `id` may be no address, and must not be read.
_HAS_NUMPY_ABI = sys.implementation.name == "cpython" and _probe_numpy(
    _SAMPLE
) == _probe_array_interface(_SAMPLE)
if not _HAS_NUMPY_ABI:
    _probe_numpy = _probe_array_interface


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
    """Return address and signature of an array; equal signatures mean equal descriptions.

    Raises
    ------
    TypeError : `x` exports no array; the message is what was received, for callers to prefix
    """
    known = _PROBES.get(type(x))
    return known(x) if known is not None else _probe_for(x)(x)


def address_of(x: Any) -> int:
    """Return the address of an array, without the checks of `probe`."""
    if type(x) in TORCH_TYPES:
        pointer: int = x.data_ptr()
        return pointer
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
            if kind in TORCH_TYPES:
                try:
                    pointer = x.data_ptr()
                    if not pointer or x.requires_grad:  # the checks cost more than these two reads
                        require_memory(x, pointer)
                        require_no_gradient(x)
                    signature = x.dtype, x.shape, x.is_contiguous() or x.stride(), x.device
                except RuntimeError as error:  # sparse or transformed: no memory, or no strides
                    raise TypeError(without_memory(x)) from error
            elif x is None:
                pointer, signature = 0, None
            elif kind is np.ndarray and _HAS_NUMPY_ABI:  # as `_probe_numpy`
                pointer = _unsigned_at(id(x) + _HEAD_BYTES).value
                signature = x.dtype, x.shape, x.strides, x.flags.writeable
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
        require_real(x)
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

    Parameters
    ----------
    stream : a `devices.protocol.Stream`
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
