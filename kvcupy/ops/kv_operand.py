"""K and V as operations read them: rows, the cache that they are stored in, formats and scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import formats
from ..arrays import ArrayView, describe, recast
from ..checks import require_number
from ..formats import FOUR_BIT, Format, FourBitFormat, require_groups
from ..observe import Access, DerivedSlots
from .checks import (
    is_array,
    layout_name,
    number_format,
    require_contiguous,
    require_format,
    require_output,
    require_shape,
)
from .launch import Pointer

# --- Rows and caches ------------------------------------------------------------------------------


class GroupScales(NamedTuple):
    """Where the scales of four-bit rows are stored.

    `start_bytes` from the codes of the first row, with strides on the axes of rows or cache.
    """

    start_bytes: int
    strides: tuple[int, ...]

    def of(self, v: ArrayView, pointer: int, shape: tuple[int, ...]) -> ArrayView:
        """Return the scales of a view of `shape`, whose codes begin at `pointer`."""
        format = FOUR_BIT[v.format]
        return recast(
            v.scales or v, (*shape[:-1], shape[-1] // format.group),
            (*self.strides, format.scale_bytes), format.scale_carrier,
            pointer=pointer + self.start_bytes,
        )  # fmt: skip


class Rows(NamedTuple):
    """Rows outside of a cache: `num_tokens` of `num_heads` times `width` elements, byte strides."""

    num_tokens: int
    num_heads: int
    width: int
    token_bytes: int
    head_bytes: int
    scales: GroupScales | None = None

    def of(self, whole: ArrayView, num_tokens: int) -> ArrayView:
        """Return the first rows of an argument, (num_tokens, heads, width)."""
        shape = (num_tokens, self.num_heads, self.width)
        strides = (self.token_bytes, self.head_bytes, whole.itemsize)
        scales = self.scales and self.scales.of(whole, whole.pointer, shape)
        return recast(whole, shape, strides, whole.format, scales=scales)


class Cache(NamedTuple):
    """A cache by byte strides. A slot is `page * page_size + offset`."""

    num_slots: int
    page_size: int
    num_heads: int
    width: int
    page_bytes: int
    offset_bytes: int
    head_bytes: int
    scales: GroupScales | None = None

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes between pages, offsets and heads."""
        return self.page_bytes, self.offset_bytes, self.head_bytes

    @property
    def page_shift(self) -> int:
        """log2 of the page size, -1 if it is no power of two."""
        size = self.page_size
        return size.bit_length() - 1 if size & (size - 1) == 0 else -1

    def flattened(self) -> Cache:
        """Return the same cache with pages of one slot, where slots are evenly spaced anyway."""
        if self.page_bytes != self.page_size * self.offset_bytes:
            return self
        scales = self.scales
        if scales is not None:
            page_bytes, offset_bytes, head_bytes = scales.strides
            if page_bytes != self.page_size * offset_bytes:
                return self
            scales = scales._replace(strides=(offset_bytes, 0, head_bytes))
        return self._replace(
            page_size=1, page_bytes=self.offset_bytes, offset_bytes=0, scales=scales
        )


def rows(v: ArrayView, name: str) -> Rows:
    """Read an argument as (tokens, heads, width) or (tokens, width)."""
    shape, strides = v.shape, v.strides
    if len(shape) not in (2, 3):
        expected = "(tokens, heads, width) or (tokens, width)"
        raise ValueError(f"{name}: expected {expected}, got {describe(v)}")
    _require_rows_contiguous(v, name)
    scales = None
    if v.scales is not None:
        of_scales = rows(v.scales, name)
        start_bytes = v.scales.pointer - v.pointer
        scales = GroupScales(start_bytes, (of_scales.token_bytes, of_scales.head_bytes))
    if len(shape) == 2:
        return Rows(shape[0], 1, shape[1], strides[0], 0, scales)
    return Rows(shape[0], shape[1], shape[2], strides[0], strides[1], scales)


def cache(v: ArrayView, name: str, layout: str, rows_ndim: int, *, written: bool = True) -> Cache:
    """Read an argument as a cache for rows of `rows_ndim` dimensions."""
    return _with_scales(v, lambda part: _cache(part, name, layout, rows_ndim, written=written))


def _with_scales(v: ArrayView, read: Callable[[ArrayView], Cache]) -> Cache:
    """Read a cache, and with it the scales of a four-bit one."""
    if v.scales is None:
        return read(v)
    scales = GroupScales(v.scales.pointer - v.pointer, read(v.scales).strides)
    return read(v)._replace(scales=scales)


def _cache(v: ArrayView, name: str, layout: str, rows_ndim: int, *, written: bool) -> Cache:
    shape, strides = v.shape, v.strides
    _require_rows_contiguous(v, name)
    if written:
        require_output(v, name)
    if rows_ndim == 2:
        if len(shape) == 2:
            return Cache(shape[0], 1, 1, shape[1], strides[0], 0, 0)
        raise ValueError(f"{name}: expected (num_slots, width) for 2-D rows, got {describe(v)}")
    if len(shape) == 3:
        return Cache(shape[0], 1, shape[1], shape[2], strides[0], 0, strides[1])
    if len(shape) == 4:
        offset, head = (1, 2) if layout == "NHD" else (2, 1)
        return Cache(
            shape[0] * shape[offset], max(1, shape[offset]), shape[head], shape[3],
            strides[0], strides[offset], strides[head],
        )  # fmt: skip
    paged = "page_size, heads" if layout == "NHD" else "heads, page_size"
    expected = f"(num_slots, heads, width) or (num_pages, {paged}, width)"
    raise ValueError(f"{name}: expected {expected}, got {describe(v)}")


def _mla_cache(v: ArrayView) -> Cache:
    """Read an MLA cache, (num_slots, width) or (num_pages, page_size, width)."""
    _require_rows_contiguous(v, "cache")
    require_output(v, "cache")
    if v.ndim == 2:
        return Cache(v.shape[0], 1, 1, v.shape[1], v.strides[0], 0, 0)
    if v.ndim == 3:
        pages, page_size, width = v.shape
        return Cache(pages * page_size, max(1, page_size), 1, width, v.strides[0], v.strides[1], 0)
    expected = "(num_slots, width) or (num_pages, page_size, width)"
    raise ValueError(f"cache: expected {expected}, got {describe(v)}")


def _require_rows_contiguous(v: ArrayView, name: str) -> None:
    require_contiguous(v, name)
    if v.shape and v.shape[-1] == 0:
        raise ValueError(f"{name}: expected a width of at least 1, got {describe(v)}")


# --- Operands: K or V, with cache and scales ------------------------------------------------------


class KVArrays(NamedTuple):
    """The arguments that are K or V, or a part of MLA: rows, their cache and its scales.

    Of attention, `rows` is None. `scale` is the argument `scale_name`.
    """

    rows: Any
    cache: ArrayView
    scale_name: str
    scale: ArrayView | float | None
    scale_cache: ArrayView | None = None


_STRIDES = np.dtype([(f"{n}_bytes", np.int64) for n in ("page", "offset", "head")], align=True)


def _strides(field: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Return the fields of strides that are nested as `field`."""
    return {f"{field}.{name}": n for name, n in zip(_STRIDES.names or (), strides, strict=True)}


# GroupScales and KVOperand of kernels_src/kv_operand.cuh
_GROUP_SCALES = np.dtype([
    ("offset_bytes", np.int64), ("strides", _STRIDES), ("group_shift", np.int32),
    ("code_word_bytes", np.int32), ("rotation_shift", np.int32),
    ("rotated_width", np.int32), ("four_over_six", np.int32),
], align=True)  # fmt: skip
OPERAND_PARAMS = np.dtype([
    ("token_bytes", np.int64), ("head_bytes", np.int64), ("cache", _STRIDES),
    ("scale_head_bytes", np.int64), ("scale_cache_slot_bytes", np.int64),
    ("scale_cache_head_bytes", np.int64), ("group_scales", _GROUP_SCALES), ("scale", np.float32),
    ("width", np.int32),
], align=True)  # fmt: skip


class KVOperand(NamedTuple):
    """K or V, or a part of MLA: rows, the cache that they are stored in, formats and scales.

    It begins `cache_offset_bytes` into each row of the cache and `rows_offset_bytes` into each row
    outside. The first `rotated_width` elements of a row of a four-bit cache are stored rotated, and
    its blocks get their scales by `scale_rule`.
    """

    rows: Rows
    cache: Cache
    rows_format: Format
    cache_format: Format
    scale: Scale
    arrays: KVArrays
    cache_offset_bytes: int = 0
    rows_offset_bytes: int = 0
    rotated_width: int = 0
    scale_rule: str = "absmax"

    @property
    def four_bit(self) -> FourBitFormat | None:
        """The format of a four-bit cache."""
        return self.cache_format if isinstance(self.cache_format, FourBitFormat) else None

    @property
    def rotation_block(self) -> int:
        """Elements that are rotated together; 0 without rotation."""
        return formats.rotation_block(self.rotated_width)

    @property
    def shared_elements(self) -> int:
        """Elements of a four-bit row that depend on one another: a group, or a rotated block."""
        return max(self.four_bit.group if self.four_bit else 1, self.rotation_block)

    @property
    def copies(self) -> bool:
        """Whether bits are copied: rows and cache are of one format."""
        return self.rows_format is self.cache_format

    @property
    def heads_join(self) -> bool:
        """Whether the heads of a token are one row, outside and inside the cache."""
        if self.four_bit is not None:  # scales are between the codes of heads
            return self.rows.num_heads == 1
        outside = self.rows.head_bytes == self.rows.width * self.rows_format.itemsize
        inside = self.cache.head_bytes == self.rows.width * self.cache_format.itemsize
        one_scale = self.arrays.scale_cache is None and self.scale.head_bytes == 0
        return self.rows.num_heads == 1 or (outside and inside and one_scale)

    @property
    def row_strides(self) -> list[int]:
        return [self.rows.token_bytes, self.rows.head_bytes if self.rows.num_heads > 1 else 0]

    @property
    def cache_strides(self) -> list[int]:
        head_bytes = self.cache.head_bytes if self.cache.num_heads > 1 else 0
        return [self.cache.page_bytes, self.cache.offset_bytes, head_bytes]

    def byte_operands(self) -> list[KVOperand]:
        """Return the operands that copy the rows of a four-bit format as bytes.

        One, where the scales follow the codes in each row of both sides; else codes, then scales.
        """
        format, rows, cache = self.four_bit, self.rows, self.cache
        if format is None:
            return [self]
        assert rows.scales is not None
        assert cache.scales is not None
        code_bytes, scale_bytes = rows.width // 2, rows.width // format.group * format.scale_bytes
        by_rows = rows.scales == (code_bytes, (rows.token_bytes, rows.head_bytes))
        by_cache = cache.scales == (code_bytes, cache.strides)

        def part(
            width: int, row_strides: tuple[int, ...], cache_strides: tuple[int, ...],
            rows_start: int = 0, cache_start: int = 0,
        ) -> KVOperand:  # fmt: skip
            token_bytes, head_bytes = row_strides
            page_bytes, offset_bytes, cache_head_bytes = cache_strides
            return self._replace(
                rows=Rows(rows.num_tokens, rows.num_heads, width, token_bytes, head_bytes),
                cache=Cache(
                    cache.num_slots, cache.page_size, cache.num_heads, width, page_bytes,
                    offset_bytes, cache_head_bytes,
                ),
                rows_format=formats.FORMATS["int8"], cache_format=formats.FORMATS["int8"],
                rows_offset_bytes=self.rows_offset_bytes + rows_start,
                cache_offset_bytes=self.cache_offset_bytes + cache_start,
            )  # fmt: skip

        of_codes = (rows.token_bytes, rows.head_bytes), cache.strides
        if by_rows and by_cache:
            return [part(code_bytes + scale_bytes, *of_codes)]
        of_scales = rows.scales.strides, cache.scales.strides
        starts = rows.scales.start_bytes, cache.scales.start_bytes
        return [part(code_bytes, *of_codes), part(scale_bytes, *of_scales, *starts)]

    def code_word_bytes(self, alignment: int) -> int:
        """Return in which words, up to 8 bytes, the codes of a four-bit cache can be accessed.

        A word that divides `alignment` divides the address of the cache.
        """
        together = 8 | alignment | self.cache_offset_bytes
        for step in self.cache_strides:
            together |= step
        return together & -together

    def cache_view(self, views: Mapping[str, ArrayView]) -> ArrayView:
        """Return the cache by pages, (num_pages, page_size, heads, width)."""
        whole, cache = views[self.arrays.cache.name], self.cache
        shape = (cache.num_slots // cache.page_size, cache.page_size, cache.num_heads, cache.width)
        strides = *cache.strides, self.cache_format.itemsize
        pointer = whole.pointer + self.cache_offset_bytes
        return recast(
            whole, shape, strides, whole.format, pointer=pointer,
            scales=cache.scales and cache.scales.of(whole, pointer, shape),
            rotated_width=self.rotated_width,
        )  # fmt: skip

    def slots_of(
        self, name: str, view: ArrayView, slots: ArrayView | DerivedSlots, skip_slot: int = -1
    ) -> Access | None:
        """Return the access to some slots of the cache or its scales; None for another array.

        `view` is the array `name`: the cache by pages, as `cache_view` returns it, or whole.
        """
        scale_cache = self.arrays.scale_cache
        if scale_cache is not None and name == scale_cache.name:
            return Access(view, slots, name=name, axes=("slot", "head"), skip_slot=skip_slot)
        if name != self.arrays.cache.name:
            return None
        cache = self.cache
        if view.ndim != 4:  # whole: both parts of MLA
            scales = None
            if cache.scales is not None:
                assert view.scales is not None
                start_bytes = view.scales.pointer - view.pointer
                scales = GroupScales(start_bytes, cache.scales.strides[:2])
            shape = cache.num_slots // cache.page_size, cache.page_size, view.shape[-1]
            strides = cache.page_bytes, cache.offset_bytes, view.itemsize
            scale_view = scales and scales.of(view, view.pointer, shape)
            view = recast(view, shape, strides, view.format, scales=scale_view)
        axes = ("slot", "", "head") if cache.page_size == 1 else ("page", "offset", "head")
        return Access(view, slots, cache.page_size, 1, name, axes[: view.ndim - 1], skip_slot)

    def params(self, field: str, width: int, alignment: int = 1) -> dict[str, Any]:
        """Return the fields of the operand's Params, which is nested as `field`."""
        rows, cache, scales = self.rows, self.cache, self.arrays.scale_cache
        fields = {
            "token_bytes": rows.token_bytes, "head_bytes": rows.head_bytes, "width": width,
            "scale": self.scale.value, "scale_head_bytes": self.scale.head_bytes,
            **_strides("cache", cache.strides),
        }  # fmt: skip
        if scales is not None:
            fields["scale_cache_slot_bytes"], fields["scale_cache_head_bytes"] = scales.strides
        if self.four_bit is not None and cache.scales is not None:
            fields |= {
                "group_scales.offset_bytes": cache.scales.start_bytes,
                **_strides("group_scales.strides", cache.scales.strides),
                **group_params(
                    "group_scales", self.four_bit, self.rotated_width, self.scale_rule,
                    self.code_word_bytes(alignment),
                ),
            }  # fmt: skip
        return {f"{field}.{name}": value for name, value in fields.items()}

    @property
    def rows_pointer(self) -> Pointer:
        """Where the operand begins in its rows."""
        return self.arrays.rows, self.rows_offset_bytes

    @property
    def cache_pointer(self) -> Pointer:
        """Where the operand begins in its cache."""
        return self.arrays.cache, self.cache_offset_bytes


def group_params(
    field: str, format: FourBitFormat, rotated_width: int, scale_rule: str, code_word_bytes: int
) -> dict[str, Any]:
    """Return the fields of a four-bit format in GroupScales, which is nested as `field`."""
    return {
        f"{field}.group_shift": format.group.bit_length() - 1,
        f"{field}.code_word_bytes": code_word_bytes,
        f"{field}.rotation_shift": max(0, formats.rotation_block(rotated_width).bit_length() - 1),
        f"{field}.rotated_width": rotated_width,
        f"{field}.four_over_six": scale_rule == "four_over_six",
    }


def kv_operands(
    k_arrays: KVArrays, v_arrays: KVArrays, layout: Any, *, into_cache: bool = True
) -> tuple[KVOperand, KVOperand]:
    """Check K and V rows, their caches and scales, and that they fit together.

    `into_cache`: whether the caches are written, and not the rows.
    """
    layout = layout_name(layout)
    k_rows, v_rows = k_arrays.rows, v_arrays.rows
    if v_rows.ndim != k_rows.ndim and k_rows.ndim in (2, 3):
        expected = f"{k_rows.ndim} dimensions as in {k_rows.name} {describe(k_rows)}"
        raise ValueError(f"{v_rows.name}: expected {expected}, got {describe(v_rows)}")
    k = _kv_operand(k_arrays, layout, into_cache=into_cache)
    v = _kv_operand(v_arrays, layout, into_cache=into_cache)
    if v_rows.ndim != k_rows.ndim or v.rows.num_heads != k.rows.num_heads:
        expected = f"heads as in {k_rows.name} {describe(k_rows)}"
        raise ValueError(f"{v_rows.name}: expected {expected}, got {describe(v_rows)}")
    if (v.cache.num_slots, v.cache.page_size) != (k.cache.num_slots, k.cache.page_size):
        expected, got = describe(k_arrays.cache), describe(v_arrays.cache)
        raise ValueError(f"v_cache: expected pages as in k_cache {expected}, got {got}")
    k_flat, v_flat = k.cache.flattened(), v.cache.flattened()
    if k_flat.page_size == v_flat.page_size == 1:
        return k._replace(cache=k_flat), v._replace(cache=v_flat)
    return k, v


def _kv_operand(arrays: KVArrays, layout: str, *, into_cache: bool) -> KVOperand:
    rows_view, cache_view = arrays.rows, arrays.cache
    rows_format = number_format(rows_view, rows_view.name, four_bit=True)
    cache_format = number_format(cache_view, cache_view.name, four_bit=True)
    _require_convertible(rows_view.name, rows_format, cache_format)
    if rows_format.name in FOUR_BIT and rows_view.rotated_width != cache_view.rotated_width:
        raise ValueError(
            f"{rows_view.name}: expected rows rotated like {describe(cache_view)}, the cache, got "
            f"{describe(rows_view)}"
        )
    rotated = cache_view.rotated_width
    if rows_format is not cache_format and rotated and rotated != cache_view.shape[-1]:
        raise ValueError(
            f"{cache_view.name}: expected rows that are rotated whole or not at all (of a view, "
            f"[..., :{rotated}] and [..., {rotated}:] are), got {describe(cache_view)}"
        )
    row_axes = rows(rows_view, rows_view.name)
    cache_axes = cache(cache_view, cache_view.name, layout, rows_view.ndim, written=into_cache)
    if not into_cache:
        require_output(rows_view, rows_view.name)
    if (cache_axes.num_heads, cache_axes.width) != (row_axes.num_heads, row_axes.width):
        expected = f"{row_axes.num_heads} heads of {row_axes.width} like {rows_view.name}"
        raise ValueError(
            f"{cache_view.name}: expected {expected}, got {describe(cache_view)} ({layout})"
        )
    scale = checked_scale(arrays, cache_axes, cache_format, written=into_cache)
    return KVOperand(
        row_axes, cache_axes, rows_format, cache_format, scale, arrays,
        rotated_width=rotated, scale_rule=cache_view.scale_rule,
    )  # fmt: skip


def _require_convertible(name: str, rows_format: Format, cache_format: Format) -> None:
    """Raise ValueError for rows of a four-bit format that is not the cache's."""
    if rows_format.name in FOUR_BIT and rows_format is not cache_format:
        expected = f"{cache_format.name} like the cache, or one of {', '.join(formats.FORMATS)}"
        raise ValueError(f"{name}: expected {expected}, got {rows_format.name}")


def mla_operands(
    latent: ArrayView, rope_key: ArrayView, whole: ArrayView, scale: ArrayView | float | None
) -> tuple[KVOperand, KVOperand]:
    """Check latent and rope rows, (tokens, width) each, that share the rows of one cache."""
    for v in (latent, rope_key):
        if v.ndim != 2:
            raise ValueError(f"{v.name}: expected (tokens, width), got {describe(v)}")
    latent_rows, rope_rows = rows(latent, "latent"), rows(rope_key, "rope_key")
    cache_format = number_format(whole, "cache", four_bit=True)
    both = _with_scales(whole, _mla_cache)
    first, second = latent_rows.width, rope_rows.width
    if both.width != first + second:
        raise ValueError(f"cache: expected rows of {first} + {second}, got {describe(whole)}")
    if whole.rotated_width not in (0, first):
        raise ValueError(
            f"cache: expected rows of which the latent's {first} elements are rotated, as in a "
            f"kv.MLAPool, got {describe(whole)}"
        )
    static = static_scale(scale, "scale", 1, cache_format)

    def operand(v: ArrayView, row_axes: Rows, start: int, rotated: int) -> KVOperand:
        """Return the part of the cache from element `start` of each row on."""
        format = number_format(v, v.name, four_bit=True)
        _require_convertible(v.name, format, cache_format)
        if v.format in FOUR_BIT and v.rotated_width != rotated:
            expected = f"rows with {rotated} rotated elements, as in the cache"
            raise ValueError(f"{v.name}: expected {expected}, got {describe(v)}")
        cache, offset = both._replace(width=row_axes.width).flattened(), start * whole.itemsize
        if isinstance(cache_format, FourBitFormat) and cache.scales is not None:
            require_groups(cache_format, start, "latent")
            offset = start // 2
            scales_start = start // cache_format.group * cache_format.scale_bytes - offset
            start_bytes = cache.scales.start_bytes + scales_start
            cache = cache._replace(scales=cache.scales._replace(start_bytes=start_bytes))
        return KVOperand(
            row_axes, cache, format, cache_format, static, KVArrays(v, whole, "scale", scale),
            offset, rotated_width=rotated, scale_rule=whole.scale_rule,
        )  # fmt: skip

    return (
        operand(latent, latent_rows, 0, whole.rotated_width), operand(rope_key, rope_rows, first, 0)
    )  # fmt: skip


def require_rows(operand: KVOperand, num_slots: int) -> None:
    """Raise ValueError for fewer rows than slots."""
    num_rows = operand.rows.num_tokens
    if num_rows < num_slots:
        least = f"at least {num_slots} rows, one per slot"
        raise ValueError(f"{operand.arrays.rows.name}: expected {least}, got {num_rows}")


# --- Scales ---------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """A static scale: one number, or a device array with `head_bytes` between heads."""

    value: float
    array: ArrayView | None
    head_bytes: int


_UNIT_SCALE = Scale(1.0, None, 0)


def static_scale(argument: Any, name: str, num_heads: int, target: Format) -> Scale:
    """Check a static scale for a cache of format `target`."""
    if argument is None:
        return _UNIT_SCALE
    if not is_array(argument):
        require_number(argument, name)
        try:
            value = float(argument)
        except OverflowError:
            value = math.inf
        if not target.quantised and value != 1.0:
            raise ValueError(f"{name}: expected None or 1.0 for a {target.name} cache, got {value}")
        require_scales(np.float64(value), name)
        return Scale(value, None, 0)
    v = argument
    require_format(v, name, "fp32")
    if not target.quantised:
        raise ValueError(f"{name}: expected None or 1.0 for a {target.name} cache, got an array")
    if v.size == 1:
        return Scale(1.0, v, 0)
    if v.shape != (num_heads,):
        raise ValueError(f"{name}: expected one element or ({num_heads},), got {describe(v)}")
    return Scale(1.0, v, v.strides[0])


def require_scales(values: Any, name: str) -> None:
    """Raise ValueError unless all values are finite in float32 and above zero."""
    with np.errstate(over="ignore", under="ignore"):
        in_kernel = values.astype(np.float32)
    bad = np.ravel(values)[~np.ravel((in_kernel > 0) & np.isfinite(in_kernel))]
    if len(bad):
        raise ValueError(f"{name}: expected a finite float32 above zero, got {bad[0]}")


def checked_scale(arrays: KVArrays, target: Cache, format: Format, *, written: bool) -> Scale:
    """Check the static scale of a cache, and its dynamic scales, float32 (num_slots, num_heads).

    `written`: whether the dynamic scales are.
    """
    static = static_scale(arrays.scale, arrays.scale_name, target.num_heads, format)
    v = arrays.scale_cache
    if v is None:
        return static
    require_format(v, v.name, "fp32")
    if not format.quantised:
        raise ValueError(f"{v.name}: expected None for a {format.name} cache, got an array")
    if format.name in FOUR_BIT:
        expected = f"None for a {format.name} cache, which stores scales with its rows"
        raise ValueError(f"{v.name}: expected {expected}, got an array")
    if arrays.scale is not None:
        raise ValueError(f"{v.name}: expected None with {arrays.scale_name}, got an array")
    require_shape(v, v.name, (target.num_slots, target.num_heads), " fp32")
    require_contiguous(v, v.name)
    if written:
        require_output(v, v.name)
    return static
