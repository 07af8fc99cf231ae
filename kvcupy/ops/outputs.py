"""Outputs that an operation allocates: arrays of the library that its inputs came from."""

from __future__ import annotations

import sys
from typing import Any

from .. import devices
from .. import formats as dtypes
from ..arrays import ArrayView


def format_name(dtype: Any) -> str:
    """Return the name of the number format that a dtype argument asks for.

    Raises
    ------
    TypeError, ValueError : it is no dtype, or none of the formats
    """
    name = dtype if isinstance(dtype, str) and dtype in dtypes.FORMATS else None
    if name is None:
        text = str(dtype).removeprefix("torch.")
        try:
            name = dtypes.tag(
                text if str(dtype).startswith("torch.") else dtypes.numpy_dtype(dtype)
            )
        except TypeError:
            known = ", ".join(dtypes.FORMATS)
            raise TypeError(
                f"dtype: expected a number format ({known}), or a dtype that is one, got {dtype!r}"
            ) from None
    if name not in dtypes.FORMATS:
        raise ValueError(f"dtype: expected one of {', '.join(dtypes.FORMATS)}, got {dtype!r}")
    return name


def zeros(like: ArrayView, shape: tuple[int, ...], format: str, stream: Any) -> Any:
    """Return zeros on the device and of the library of `like`, ready for use on `stream`."""
    device = devices.get(like.device)
    if like.library != "torch":
        made = device.zeros(shape, format)
    else:
        torch = sys.modules["torch"]
        made = torch.zeros(
            shape,
            dtype=getattr(torch, dtypes.numpy_dtype(format).name),
            device=device.torch_name,
        )
    if stream is not None:
        device.as_stream(stream).wait(device.as_stream(None, like.library))
    return made


def in_library(array: Any, like: ArrayView) -> Any:
    """Return an array of the device as one of the library of `like`, without a copy."""
    return sys.modules["torch"].from_dlpack(array) if like.library == "torch" else array
