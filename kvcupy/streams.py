"""Order between streams: fork, join, and how long arrays must live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import devices, observe
from .arrays import view
from .devices.protocol import Stream, is_device


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


def keep_alive(arrays: Any, stream: Any) -> None:
    """Keep arrays from being freed, and their memory reused, before `stream` has passed this point.

    Operations keep their own arguments; this is for arrays that a stream uses by other means.

    Parameters
    ----------
    arrays : one array, or a list or tuple of them
    stream : Stream, or a CuPy or torch stream, or anything with `__cuda_stream__`

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    A memory pool may hand a freed block out again at once, to any stream that allocates from it.
    Capture: legal; the graph keeps the arrays.
    """
    kept = tuple(arrays) if isinstance(arrays, (list, tuple)) else (arrays,)
    (queue,) = as_streams((stream,), "stream")
    if observe.order_observers:
        observe.kept([view(array, "arrays") for array in kept], queue)
    queue.device.run(_no_work, queue, kept)


def _no_work() -> None:
    """Do nothing: the stream keeps the arrays alive until it gets here."""


def as_streams(streams: Sequence[Any], name: str) -> list[Stream]:
    """Resolve streams on the device of the first kvcupy stream, else on the current GPU.

    `name` is the argument that the first is; the rest are the `others`.
    """
    known = (getattr(stream, "device", None) for stream in streams)
    device: Any = next((d for d in known if is_device(d)), None) or devices.get("cuda")
    names = [name, *["others"] * (len(streams) - 1)]
    return [device.as_stream(s, name=n) for s, n in zip(streams, names, strict=True)]
