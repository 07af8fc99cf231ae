"""The number formats: names, sizes, limits, and the dtypes that carry them.

`FORMATS` have elements of whole bytes. `FOUR_BIT` have two codes a byte and a scale for each group
of elements; their unit is the row.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class FourBitFormat(Format):
    """A format of two codes a byte, element 2i in the low nibble of byte i, scaled by groups.

    A row of `width` elements is `width / 2` bytes of codes, then its scales in order; or its scales
    lie in an array of their own. value = code * group scale * scale of the tensor or head.

    Attributes
    ----------
    group : elements that share a scale; the width of a row is a multiple of it
    scale_format : of the group scales: "fp8_e4m3", "e8m0" (a power of two) or "fp16"
    scale_bytes : of one group scale
    """

    group: int
    scale_format: str
    scale_bytes: int

    @property
    def native(self) -> bool:
        """False: no library has it; arrays of it are views of bytes."""
        return False

    @property
    def group_bytes(self) -> int:
        """Bytes of a group with its scale."""
        return self.group // 2 + self.scale_bytes

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` elements with its scales."""
        return width // self.group * self.group_bytes

    @property
    def scale_carrier(self) -> str:
        """The format of a view of the group scales; e8m0 is viewed as bytes."""
        return "uint8" if self.scale_format == "e8m0" else self.scale_format


FOUR_BIT: dict[str, FourBitFormat] = {
    name: FourBitFormat(
        name, 1, np.dtype(np.uint8), np.dtype(np.uint8), limit, ctype, group, scale_format, size
    )
    for name, limit, ctype, group, scale_format, size in (
        ("nvfp4", 6.0, "nvfp4", 16, "fp8_e4m3", 1),
        ("mxfp4", 6.0, "mxfp4", 32, "e8m0", 1),
        ("int4", 7.0, "int4x2", 32, "fp16", 2),
        ("int4_g64", 7.0, "int4x2", 64, "fp16", 2),
        ("int4_g128", 7.0, "int4x2", 128, "fp16", 2),
    )
}

ROTATIONS = ("hadamard",)
"""How rows of a four-bit format may be rotated before they are stored."""

MAX_ROTATION_BLOCK = 512
"""Elements that rotate together, at most: what a warp holds."""

SCALE_RULES = ("absmax", "four_over_six")
"""How groups get their scales: by their largest magnitude; or, of nvfp4, by their error."""

CACHE_FORMATS: dict[str, Format] = {**FORMATS, **FOUR_BIT}
"""What caches and pools may hold."""

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
    """Return the bytes per element of a format, or of a NumPy dtype by name.

    Four-bit formats are counted by rows (`FourBitFormat.row_bytes`); the unit of their memory is a
    byte.
    """
    if name in FOUR_BIT:
        return 1
    return numpy_dtype(name).itemsize


def carrier_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype in which every array library can hold the bits of `name`."""
    return CACHE_FORMATS[name].carrier if name in CACHE_FORMATS else np.dtype(name)


def bytes_per_element(name: str) -> float:
    """Return the bytes of a row by its elements, with the group scales of a four-bit format.

    >>> bytes_per_element("bf16"), bytes_per_element("nvfp4")
    (2, 0.5625)
    """
    four_bit = FOUR_BIT.get(name)
    return itemsize(name) if four_bit is None else four_bit.group_bytes / four_bit.group


def num_bytes(shape: tuple[int, ...], name: str) -> int:
    """Return the bytes of an array, with the group scales of a four-bit format."""
    four_bit = FOUR_BIT.get(name)
    unit, size = (1, itemsize(name)) if four_bit is None else (four_bit.group, four_bit.group_bytes)
    return math.prod(shape) // unit * size


def rotation_block(rotated_width: int) -> int:
    """Return how many elements rotate together: the largest power of two that divides the width.

    >>> rotation_block(128), rotation_block(192), rotation_block(0)
    (128, 64, 0)
    """
    return rotated_width & -rotated_width


def encoding(name: str, rotated_width: int) -> str:
    """Return what the bytes of rows are: their format, and how many elements are rotated.

    >>> encoding("bf16", 0), encoding("nvfp4", 128)
    ('bf16', 'nvfp4+hadamard:128')
    """
    return f"{name}+hadamard:{rotated_width}" if rotated_width else name


def require_scale_rule(rule: Any, format: str) -> str:
    """Return how groups of a format get their scales; ValueError unless it can be so."""
    if not isinstance(rule, str) or rule not in SCALE_RULES:
        known = " or ".join(map(repr, SCALE_RULES))
        raise ValueError(f"scale_rule: expected {known}, got {rule!r}")
    if rule != "absmax" and format != "nvfp4":
        raise ValueError(f"scale_rule: expected 'absmax' for {format}, got {rule!r}")
    return rule


def rotated_elements(rotation: Any, rotated_width: Any, width: int, format: str) -> int:
    """Return how many elements of a row are rotated; 0 for `rotation=None`.

    Parameters
    ----------
    rotated_width : the first elements of a row, which are rotated; None: all `width`

    Raises
    ------
    TypeError, ValueError : an argument does not fit, or the format has no rotation
    """
    if rotation is None:
        if rotated_width is not None:
            raise ValueError(f"rotated_width: expected None without rotation, got {rotated_width}")
        return 0
    if not isinstance(rotation, str) or rotation not in ROTATIONS:
        known = ", ".join(map(repr, ROTATIONS))
        raise ValueError(f"rotation: expected None or {known}, got {rotation!r}")
    four_bit = FOUR_BIT.get(format)
    if four_bit is None:
        known = ", ".join(FOUR_BIT)
        raise ValueError(
            f"rotation: expected None for {format} (of {known} rows can be rotated), got "
            f"{rotation!r}"
        )
    if rotated_width is None:
        rotated_width = width
    elif isinstance(rotated_width, bool) or not isinstance(rotated_width, (int, np.integer)):
        raise TypeError(f"rotated_width: expected an int, got {rotated_width!r}")
    elif not 0 < rotated_width <= width or rotated_width % four_bit.group:
        raise ValueError(
            f"rotated_width: expected whole groups of {four_bit.group}, at most {width}, got "
            f"{rotated_width}"
        )
    block = rotation_block(int(rotated_width))
    if block > MAX_ROTATION_BLOCK:
        raise ValueError(
            f"rotation: expected blocks of at most {MAX_ROTATION_BLOCK} elements, got rows of "
            f"{rotated_width}, which are rotated by {block}"
        )
    return int(rotated_width)


def require_groups(format: FourBitFormat, width: int, name: str) -> None:
    """Raise ValueError unless rows of `width` elements are whole groups of a four-bit format."""
    if width % format.group:
        expected = f"rows of a multiple of {format.group} elements for {format.name}"
        raise ValueError(f"{name}: expected {expected}, got {width}")
