"""The number formats: names, sizes, limits, and the dtypes that carry them.

`FORMATS` have elements of whole bytes. `FOUR_BIT` have two codes a byte and a scale for each group
of elements; their unit is the row.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Literal

import ml_dtypes
import numpy as np

# Values of options, for type checkers.
Layout = Literal["NHD", "HND"]
LseBase = Literal["e", "2"]
PoolLayout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
Placement = Literal["device", "pinned", "pageable"]
Method = Literal["auto", "kernel", "copy", "staged"]
RopeMode = Literal["none", "normal", "inline"]
ScaleRule = Literal["absmax", "four_over_six"]
Write = Literal["through", "back"]


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
    are stored in a separate array. value = code * group scale * scale of the tensor or head.

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
    )
}

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
    if isinstance(dtype, Encoding):
        return dtype.format
    return _tag_of(dtype) if isinstance(dtype, (str, np.dtype)) else _tag_of(np.dtype(dtype))


@lru_cache(maxsize=256)  # `dtype.name` builds a new string at each access
def _tag_of(dtype: str | np.dtype[Any]) -> str:
    name = dtype if isinstance(dtype, str) else dtype.name
    if name in FOUR_BIT and name is not dtype:  # of ml_dtypes: a byte per element
        raise TypeError(
            f"got dtype {name}, which is not packed; kv.view_as tags the bytes of packed {name}"
        )
    return _TAGS.get(name, name)


def numpy_dtype(name: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a format name, a torch dtype, or what `numpy.dtype` takes."""
    if isinstance(name, Encoding):
        name = name.format
    elif type(name).__module__ == "torch":
        name = str(name).removeprefix("torch.")
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


@dataclass(frozen=True)
class Encoding:
    """How numbers are stored: a format, and of four-bit formats a rotation and a scale rule.

    It is accepted wherever a `dtype` is, also as the string that `str` makes of it:
    "nvfp4+hadamard+four_over_six".

    Parameters
    ----------
    format : a number format of `CACHE_FORMATS`
    hadamard : whether rows are multiplied by an orthonormal Hadamard matrix when they are stored,
        and again when they are read; only for four-bit formats. It is part of what the bytes mean.
        Rows are rotated whole, in blocks of the largest power of two that divides their width, at
        most 512; of an `MLAPool` the latent is
    scale_rule : how groups of a four-bit format get their scales when rows are written. "absmax":
        by their largest magnitude; of nvfp4 also "four_over_six": that element gets the code 6 or
        4, whichever leaves the smaller squared error. Reading is the same for either rule

    Raises
    ------
    TypeError, ValueError : a value that no format has

    Examples
    --------
    >>> str(Encoding("nvfp4", hadamard=True, scale_rule="four_over_six"))
    'nvfp4+hadamard+four_over_six'
    >>> Encoding.of("nvfp4+hadamard").hadamard
    True
    """

    format: str
    _: KW_ONLY
    hadamard: bool = False
    scale_rule: ScaleRule = "absmax"

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in CACHE_FORMATS:
            known = ", ".join(CACHE_FORMATS)
            raise ValueError(f"format: expected one of {known}, got {self.format!r}")
        if not isinstance(self.hadamard, bool):
            raise TypeError(f"hadamard: expected a bool, got {self.hadamard!r}")
        if self.hadamard and self.format not in FOUR_BIT:
            known = ", ".join(FOUR_BIT)
            raise ValueError(
                f"hadamard: expected False for {self.format} (of {known} rows can be rotated), "
                "got True"
            )
        if not isinstance(self.scale_rule, str) or self.scale_rule not in SCALE_RULES:
            known = " or ".join(map(repr, SCALE_RULES))
            raise ValueError(f"scale_rule: expected {known}, got {self.scale_rule!r}")
        if self.scale_rule != "absmax" and self.format != "nvfp4":
            raise ValueError(
                f"scale_rule: expected 'absmax' for {self.format}, got {self.scale_rule!r}"
            )

    def __str__(self) -> str:
        parts = [self.format]
        if self.hadamard:
            parts.append("hadamard")
        if self.scale_rule != "absmax":
            parts.append(self.scale_rule)
        return "+".join(parts)

    @classmethod
    def of(cls, dtype: Any, name: str = "dtype") -> Encoding:
        """Return the encoding that a dtype argument stands for.

        Parameters
        ----------
        dtype : an Encoding, its string, or a dtype of any library that is a number format
        name : of the argument, for errors

        Raises
        ------
        TypeError, ValueError : it is no encoding
        """
        if isinstance(dtype, Encoding):
            return dtype
        if isinstance(dtype, str) and ("+" in dtype or dtype in CACHE_FORMATS):
            return _parsed(dtype, name)
        try:
            format = tag(numpy_dtype(dtype))
        except TypeError:
            format = ""
        if format not in FORMATS:
            known = ", ".join(CACHE_FORMATS)
            error = ValueError if format else TypeError
            raise error(f"{name}: expected one of {known}, or a dtype that is one, got {dtype!r}")
        return _parsed(format, name)

    def rotated_elements(self, width: int) -> int:
        """Return how many elements of rows of a width are rotated: all or none."""
        if not self.hadamard:
            return 0
        block = rotation_block(width)
        if block > MAX_ROTATION_BLOCK:
            raise ValueError(
                f"hadamard: expected blocks of at most {MAX_ROTATION_BLOCK} elements, got rows of "
                f"{width}, which are rotated by {block}"
            )
        return width


def stored_as(name: str, rotated_width: int) -> str:
    """Return what the bytes of rows are: their format, and how many elements are rotated.

    >>> stored_as("bf16", 0), stored_as("nvfp4", 128)
    ('bf16', 'nvfp4+hadamard:128')
    """
    return f"{name}+hadamard:{rotated_width}" if rotated_width else name


@lru_cache(maxsize=256)
def _parsed(text: str, name: str) -> Encoding:
    """Return the encoding of a string."""
    format, *options = text.split("+")
    named: dict[str, Any] = {}
    for option in options:
        if option == "hadamard" and "hadamard" not in named:
            named["hadamard"] = True
        elif option in SCALE_RULES and "scale_rule" not in named:
            named["scale_rule"] = option
        else:
            raise ValueError(
                f"{name}: expected an encoding such as 'nvfp4+hadamard+four_over_six', got {text!r}"
            )
    try:
        return Encoding(format, **named)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def require_groups(format: FourBitFormat, width: int, name: str) -> None:
    """Raise ValueError unless rows of `width` elements are whole groups of a four-bit format."""
    if width % format.group:
        expected = f"rows of a multiple of {format.group} elements for {format.name}"
        raise ValueError(f"{name}: expected {expected}, got {width}")
