"""Order between streams: fork, join, and how long arrays must live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from . import devices, observe
from .arrays import view
from .devices.protocol import Device, Stream, is_device
from .errors import CaptureError, in_child, process_lock

_HANDLES = "__cuda_stream__", "cuda_stream", "ptr"  # of streams of other libraries


def fork(main: Any, *others: Any) -> None:
    """Make the other streams wait for all work that is on `main` so far.

    Parameters
    ----------
    main : Stream, or a CuPy or torch stream, or anything with `__cuda_stream__`
    others : streams of the same device

    Raises
    ------
    TypeError, ValueError : one is not a stream of that device
    CaptureError : one of the others is captured, but not with `main`

    Notes
    -----
    Capture: legal; the others join the capture, and must be joined to it again with `join`.
    """
    first, *rest = as_streams((main, *others), "main")
    event = first.record()
    for other in rest:
        other.wait(event)


def join(main: Any, *others: Any) -> None:
    """Make `main` wait for all work that is on the other streams so far.

    Parameters
    ----------
    main : Stream, or a CuPy or torch stream, or anything with `__cuda_stream__`
    others : streams of the same device

    Raises
    ------
    TypeError, ValueError : one is not a stream of that device
    CaptureError : `main` is captured, but not all of the others are with it
    """
    first, *rest = as_streams((main, *others), "main")
    for other in rest:
        first.wait(other.record())


def stream_after(device: Device, after: Any, what: str, library: str = "") -> Stream:
    """Return the stream that an argument `after` names; False: an idle one, to wait for nothing."""
    if after is False:
        with _lock:
            idle = _idle.get(device)
            if idle is None:
                idle = _idle[device] = device.stream()
        return idle
    stream = device.as_stream(after, library, name="after")
    if stream.capturing:
        raise CaptureError(f"after: {what} cannot be part of a capture")
    return stream


_idle: WeakKeyDictionary[Device, Stream] = WeakKeyDictionary()
_lock = process_lock()
in_child(_idle.clear)


def keep_alive(arrays: Any, stream: Any) -> None:
    """Keep arrays from being freed, and their memory reused, before `stream` has passed this point.

    Operations keep their own arguments; this is for arrays that a stream uses by other means.

    Parameters
    ----------
    arrays : one array, or a list or tuple of them
    stream : Stream, or a CuPy or torch stream, or anything with `__cuda_stream__`; None: the
        current one of the first array's library

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    A memory pool may hand a freed block out again at once, to any stream that allocates from it.
    Capture: legal; the graph keeps the arrays.
    """
    kept = tuple(arrays) if isinstance(arrays, (list, tuple)) else (arrays,)
    views = [view(array, "arrays") for array in kept]
    if stream is None and views:
        queue = devices.get(views[0].device).as_stream(None, views[0].library)
    else:
        (queue,) = as_streams((stream,), "stream")
    if observe.order_observers:
        observe.kept(views, queue)
    queue.device.keep(kept, queue)


def as_streams(streams: Sequence[Any], name: str) -> list[Stream]:
    """Resolve streams on the device of the first kvcupy stream, else on the current GPU.

    `name` is the argument that the first is; the rest are the `others`.
    """
    known = (getattr(stream, "device", None) for stream in streams)
    device: Any = next((d for d in known if is_device(d)), None)
    names = [name, *["others"] * (len(streams) - 1)]
    if device is None:
        for s, n in zip(streams, names, strict=True):
            if not any(hasattr(s, handle) for handle in _HANDLES):
                raise TypeError(f"{n}: expected a stream, got {s!r}")
        device = devices.get("cuda")
    return [device.as_stream(s, name=n) for s, n in zip(streams, names, strict=True)]
