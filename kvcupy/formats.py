"""The number formats: names, sizes, limits, and the dtypes that carry them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """One number format.

    `carrier` is the dtype of its bits, which every array library has; `limit` is the largest
    magnitude of a quantised format, None for the others; `ctype` is its name in the kernels.
    """

    name: str
    itemsize: int
    numpy: np.dtype[Any]
    carrier: np.dtype[Any]
    limit: float | None
    ctype: str

    @property
    def quantised(self) -> bool:
        return self.limit is not None

    @property
    def native(self) -> bool:
        """Whether it is a dtype of NumPy itself."""
        return self.numpy == self.carrier


FORMATS: dict[str, Format] = {
    name: Format(name, np.dtype(dtype).itemsize, np.dtype(dtype), np.dtype(carrier), limit, ctype)
    for name, dtype, carrier, limit, ctype in (
        ("fp32", np.float32, np.float32, None, "float"),
        ("fp16", np.float16, np.float16, None, "half"),
        ("bf16", ml_dtypes.bfloat16, np.uint16, None, "bfloat16"),
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn, np.uint8, 448.0, "fp8_e4m3"),
        ("fp8_e5m2", ml_dtypes.float8_e5m2, np.uint8, 57344.0, "fp8_e5m2"),
        ("int8", np.int8, np.int8, 127.0, "int8"),
    )
}

_TAGS: dict[str, str] = {f.numpy.name: f.name for f in FORMATS.values()}


def tag(dtype: Any) -> str:
    """Return the format name of a dtype, or the dtype's own name if it has none.

    >>> tag("float32"), tag("int64")
    ('fp32', 'int64')
    """
    return _tag_of(dtype) if isinstance(dtype, (str, np.dtype)) else _tag_of(np.dtype(dtype))


@lru_cache(maxsize=256)  # `dtype.name` builds a new string at each access
def _tag_of(dtype: str | np.dtype[Any]) -> str:
    name = dtype if isinstance(dtype, str) else dtype.name
    return _TAGS.get(name, name)


def numpy_dtype(name: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a format name, or of anything `numpy.dtype` takes."""
    if isinstance(name, str) and name in FORMATS:
        return FORMATS[name].numpy
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except (TypeError, ValueError):
        known = ", ".join(FORMATS)
        raise TypeError(f"dtype: expected one of {known}, or a NumPy dtype, got {name!r}") from None
    return dtype


@lru_cache(maxsize=256)
def itemsize(name: str) -> int:
    """Return the bytes per element of a format, or of a NumPy dtype by name."""
    return numpy_dtype(name).itemsize


def carrier_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype in which every array library can hold the bits of `name`."""
    return FORMATS[name].carrier if name in FORMATS else np.dtype(name)
