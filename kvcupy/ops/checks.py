"""Argument checks that operations share: rows, caches, K/V operands, index arrays and scales.

Each check names the argument, what was expected and what came, before anything is launched.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, MappingView, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .. import formats
from ..arrays import ArrayView, describe, overlap, recast, view
from ..formats import FOUR_BIT, Format, FourBitFormat, require_groups
from ..observe import Access, DerivedSlots
from .spec import Declaration

# --- Rows and caches ------------------------------------------------------------------------------


class GroupScales(NamedTuple):
    """Where the group scales of four-bit rows lie.

    Attributes
    ----------
    start_bytes : from the codes of the first row to its scales
    strides : between scales, on the axes on which the strides of rows or cache are between codes
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
    """A cache by byte strides. A slot is `page * page_size + offset`.

    Attributes
    ----------
    scales : of a four-bit format, with strides of pages, offsets and heads
    """

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


def number_format(v: ArrayView, name: str, *, four_bit: bool = False) -> Format:
    """Return the number format of an argument.

    Parameters
    ----------
    four_bit : whether the operation takes four-bit formats, too
    """
    known = formats.FORMATS.get(v.format)
    if v.format in FOUR_BIT:
        if four_bit:
            return FOUR_BIT[v.format]
        names = ", ".join(formats.FORMATS)
        raise ValueError(
            f"{name}: expected one of the formats {names}, got {v.format}, which this does not "
            "take; gather_kv widens it"
        )
    if known is None:
        hint = "; tag it with kv.view_as" if v.format in ("uint8", "uint16") else ""
        if v.format == "float64":
            hint = "; convert it with .astype(np.float32) or .float()"
        names = ", ".join(formats.FORMATS)
        raise TypeError(f"{name}: expected one of the formats {names}, got {v.format}{hint}")
    return known


def rows(v: ArrayView, name: str) -> Rows:
    """Read an argument as (tokens, heads, width) or (tokens, width)."""
    shape, strides = v.shape, v.strides
    if len(shape) not in (2, 3):
        expected = "(tokens, heads, width) or (tokens, width)"
        raise ValueError(f"{name}: expected {expected}, got {describe(v)}")
    _require_rows_contiguous(v, name)
    scales = None
    if v.scales is not None:
        own = rows(v.scales, name)
        start_bytes = v.scales.pointer - v.pointer
        scales = GroupScales(start_bytes, (own.token_bytes, own.head_bytes))
    if len(shape) == 2:
        return Rows(shape[0], 1, shape[1], strides[0], 0, scales)
    return Rows(shape[0], shape[1], shape[2], strides[0], strides[1], scales)


def cache(v: ArrayView, name: str, layout: str, rows_ndim: int, *, written: bool = True) -> Cache:
    """Read an argument as a cache for rows of `rows_ndim` dimensions."""
    return _with_scales(v, lambda part: _cache(part, name, layout, rows_ndim, written=written))


def _with_scales(v: ArrayView, read: Callable[[ArrayView], Cache]) -> Cache:
    """Read a cache, and the group scales of a four-bit one likewise."""
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


def layout_name(layout: object) -> str:
    """Check a layout argument."""
    if not isinstance(layout, str) or layout not in ("NHD", "HND"):
        raise ValueError(f'layout: expected "NHD" or "HND", got {layout!r}')
    return str(layout)


def _require_rows_contiguous(v: ArrayView, name: str) -> None:
    require_contiguous(v, name)
    if v.shape and v.shape[-1] == 0:
        raise ValueError(f"{name}: expected a width of at least 1, got {describe(v)}")


# --- Operands: K or V, with cache and scales ------------------------------------------------------


class KVNames(NamedTuple):
    """The arguments that one operand consists of; empty where the operation has none."""

    rows: str
    cache: str
    scale: str
    scale_cache: str = ""


K = KVNames("key", "k_cache", "k_scale", "k_scale_cache")
V = KVNames("value", "v_cache", "v_scale", "v_scale_cache")
LATENT = KVNames("latent", "cache", "scale")
ROPE_KEY = KVNames("rope_key", "cache", "scale")

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

    Attributes
    ----------
    names : of the arguments
    cache_offset_bytes : where the operand begins in each row of the cache
    rows_offset_bytes : where it begins in each row outside
    rotated_width : the first elements of a row of a four-bit cache, which are stored rotated; 0: it
        is not rotated
    scale_rule : how groups of a four-bit cache get their scales
    """

    rows: Rows
    cache: Cache
    rows_format: Format
    cache_format: Format
    scale: Scale
    scale_cache: ArrayView | None = None
    names: KVNames = KVNames("", "", "")
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
        if self.four_bit is not None:  # scales lie between the codes of heads
            return self.rows.num_heads == 1
        outside = self.rows.head_bytes == self.rows.width * self.rows_format.itemsize
        inside = self.cache.head_bytes == self.rows.width * self.cache_format.itemsize
        one_scale = self.scale_cache is None and self.scale.head_bytes == 0
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

        Parameters
        ----------
        alignment : a word that divides it divides the address of the cache
        """
        together = 8 | alignment | self.cache_offset_bytes
        for step in self.cache_strides:
            together |= step
        return together & -together

    def cache_view(self, views: Mapping[str, ArrayView]) -> ArrayView:
        """Return the cache by pages, (num_pages, page_size, heads, width)."""
        whole, cache = views[self.names.cache], self.cache
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

        Parameters
        ----------
        name, view : of the array; the cache by pages, as `cache_view` returns it, or whole
        """
        if name == self.names.scale_cache:
            return Access(view, slots, name=name, axes=("slot", "head"), skip_slot=skip_slot)
        if name != self.names.cache:
            return None
        cache = self.cache
        if view.ndim != 4:  # whole: K and V of MLA lie side by side
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
        """Return the fields of the operand's Params, which is nested as `field`.

        Parameters
        ----------
        alignment : of a four-bit cache, as `code_word_bytes` takes it
        """
        rows, cache, scales = self.rows, self.cache, self.scale_cache
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

    def pointers(self, field: str) -> dict[str, Any]:
        """Return what the pointer fields of cache and scales take, `k_cache` for "k" and so on."""
        names, offset = self.names, self.cache_offset_bytes
        bound: dict[str, Any] = {f"{field}_cache": (names.cache, offset) if offset else names.cache}
        if self.scale.array is not None:
            bound[f"{field}_scale"] = names.scale
        if self.scale_cache is not None:
            bound[f"{field}_scale_cache"] = names.scale_cache
        return bound


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
    arguments: Mapping[str, Any], layout: Any, names: tuple[KVNames, KVNames] = (K, V), *,
    into_cache: bool = True,
) -> tuple[KVOperand, KVOperand]:  # fmt: skip
    """Check K and V rows, their caches and scales, and that they fit together.

    Parameters
    ----------
    arguments : by name; scales may be numbers, or left out
    names : which of them are K's and which are V's
    into_cache : whether the caches are written, and not the rows
    """
    layout = layout_name(layout)
    k_names, v_names = names
    k_rows, v_rows = arguments[k_names.rows], arguments[v_names.rows]
    if v_rows.ndim != k_rows.ndim and k_rows.ndim in (2, 3):
        expected = f"{k_rows.ndim} dimensions as in {k_names.rows} {describe(k_rows)}"
        raise ValueError(f"{v_names.rows}: expected {expected}, got {describe(v_rows)}")
    k = _kv_operand(arguments, layout, k_names, into_cache=into_cache)
    v = _kv_operand(arguments, layout, v_names, into_cache=into_cache)
    if v_rows.ndim != k_rows.ndim or v.rows.num_heads != k.rows.num_heads:
        expected = f"heads as in {k_names.rows} {describe(k_rows)}"
        raise ValueError(f"{v_names.rows}: expected {expected}, got {describe(v_rows)}")
    if (v.cache.num_slots, v.cache.page_size) != (k.cache.num_slots, k.cache.page_size):
        expected, got = (describe(arguments[each.cache]) for each in names)
        raise ValueError(
            f"{v_names.cache}: expected pages as in {k_names.cache} {expected}, got {got}"
        )
    k_flat, v_flat = k.cache.flattened(), v.cache.flattened()
    if k_flat.page_size == v_flat.page_size == 1:
        return k._replace(cache=k_flat), v._replace(cache=v_flat)
    return k, v


def _kv_operand(
    arguments: Mapping[str, Any], layout: str, names: KVNames, *, into_cache: bool
) -> KVOperand:
    rows_view, cache_view = arguments[names.rows], arguments[names.cache]
    rows_format = number_format(rows_view, names.rows, four_bit=True)
    cache_format = number_format(cache_view, names.cache, four_bit=True)
    _require_convertible(names.rows, rows_format, cache_format)
    if rows_format.name in FOUR_BIT and rows_view.rotated_width != cache_view.rotated_width:
        raise ValueError(
            f"{names.rows}: expected rows rotated like {describe(cache_view)}, the cache, got "
            f"{describe(rows_view)}"
        )
    rotated = cache_view.rotated_width
    if rows_format is not cache_format and rotated and rotated != cache_view.shape[-1]:
        raise ValueError(
            f"{names.cache}: expected rows that are rotated whole or not at all (of a view, "
            f"[..., :{rotated}] and [..., {rotated}:] are), got {describe(cache_view)}"
        )
    own_rows = rows(rows_view, names.rows)
    own_cache = cache(cache_view, names.cache, layout, rows_view.ndim, written=into_cache)
    if not into_cache:
        require_output(rows_view, names.rows)
    if (own_cache.num_heads, own_cache.width) != (own_rows.num_heads, own_rows.width):
        expected = f"{own_rows.num_heads} heads of {own_rows.width} like {names.rows}"
        raise ValueError(
            f"{names.cache}: expected {expected}, got {describe(cache_view)} ({layout})"
        )
    own_scales = scales(arguments, names, own_cache, cache_format, written=into_cache)
    return KVOperand(
        own_rows, own_cache, rows_format, cache_format, *own_scales, names,
        rotated_width=rotated, scale_rule=cache_view.scale_rule,
    )  # fmt: skip


def _require_convertible(name: str, rows_format: Format, cache_format: Format) -> None:
    """Raise ValueError for rows of a four-bit format beside a cache of another."""
    if rows_format.name in FOUR_BIT and rows_format is not cache_format:
        expected = f"{cache_format.name} like the cache, or one of {', '.join(formats.FORMATS)}"
        raise ValueError(f"{name}: expected {expected}, got {rows_format.name}")


def mla_operands(arguments: Mapping[str, Any]) -> tuple[KVOperand, KVOperand]:
    """Check latent and rope rows, (tokens, width) each, that share the rows of one cache.

    Parameters
    ----------
    arguments : "latent", "rope_key", "cache" and perhaps "scale", by name
    """
    whole = arguments["cache"]
    for names in (LATENT, ROPE_KEY):
        if arguments[names.rows].ndim != 2:
            got = describe(arguments[names.rows])
            raise ValueError(f"{names.rows}: expected (tokens, width), got {got}")
    latent, rope_key = (rows(arguments[names.rows], names.rows) for names in (LATENT, ROPE_KEY))
    cache_format = number_format(whole, "cache", four_bit=True)
    both = _with_scales(whole, _mla_cache)
    first, second = latent.width, rope_key.width
    if both.width != first + second:
        raise ValueError(f"cache: expected rows of {first} + {second}, got {describe(whole)}")
    if whole.rotated_width not in (0, first):
        raise ValueError(
            f"cache: expected rows of which the latent's {first} elements are rotated, as in a "
            f"kv.MLAPool, got {describe(whole)}"
        )
    static = scale(arguments.get("scale"), "scale", 1, cache_format)

    def operand(names: KVNames, own: Rows, start: int, rotated: int) -> KVOperand:
        """Return the part of the cache from element `start` of each row on."""
        v = arguments[names.rows]
        format = number_format(v, names.rows, four_bit=True)
        _require_convertible(names.rows, format, cache_format)
        if v.format in FOUR_BIT and v.rotated_width != rotated:
            expected = f"rows with {rotated} rotated elements, as in the cache"
            raise ValueError(f"{names.rows}: expected {expected}, got {describe(v)}")
        cache, offset = both._replace(width=own.width).flattened(), start * cache_format.itemsize
        if isinstance(cache_format, FourBitFormat) and cache.scales is not None:
            require_groups(cache_format, start, "latent")
            offset = start // 2
            scales_start = start // cache_format.group * cache_format.scale_bytes - offset
            start_bytes = cache.scales.start_bytes + scales_start
            cache = cache._replace(scales=cache.scales._replace(start_bytes=start_bytes))
        return KVOperand(
            own, cache, format, cache_format, static, None, names, offset,
            rotated_width=rotated, scale_rule=whole.scale_rule,
        )  # fmt: skip

    return (
        operand(LATENT, latent, 0, whole.rotated_width), operand(ROPE_KEY, rope_key, first, 0)
    )  # fmt: skip


def require_rows(operand: KVOperand, num_slots: int) -> None:
    """Raise ValueError for fewer rows than slots."""
    name, num_rows = operand.names.rows, operand.rows.num_tokens
    if num_rows < num_slots:
        least = f"at least {num_slots} rows, one per slot"
        raise ValueError(f"{name}: expected {least}, got {num_rows}")


# --- Scales ---------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """A static scale: one number, or a device array with `head_bytes` between heads."""

    value: float
    array: ArrayView | None
    head_bytes: int


_UNIT_SCALE = Scale(1.0, None, 0)


def is_array(argument: object) -> bool:
    """Return whether an argument that may be a number is meant as an array."""
    return argument is not None and not isinstance(argument, numbers.Real)


def scale(argument: Any, name: str, num_heads: int, target: Format) -> Scale:
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
    v = view(argument, name).without_owner()
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


def scales(
    arguments: Mapping[str, Any], names: KVNames, target: Cache, format: Format, *, written: bool
) -> tuple[Scale, ArrayView | None]:
    """Check the static scale of a cache, and its dynamic scales, float32 (num_slots, num_heads).

    Parameters
    ----------
    written : whether the dynamic scales are written
    """
    own = scale(arguments.get(names.scale), names.scale, target.num_heads, format)
    name = names.scale_cache
    if arguments.get(name) is None:
        return own, None
    v = view(arguments[name], name).without_owner()
    require_format(v, name, "fp32")
    if not format.quantised:
        raise ValueError(f"{name}: expected None for a {format.name} cache, got an array")
    if format.name in FOUR_BIT:
        expected = f"None for a {format.name} cache, whose groups have scales of their own"
        raise ValueError(f"{name}: expected {expected}, got an array")
    if arguments.get(names.scale) is not None:
        raise ValueError(f"{name}: expected None beside {names.scale}, got an array")
    require_shape(v, name, (target.num_slots, target.num_heads), " fp32")
    require_contiguous(v, name)
    if written:
        require_output(v, name)
    return own, v


# --- Index arrays and numbers ---------------------------------------------------------------------


def indices(v: ArrayView, name: str) -> int:
    """Check an index array, int32 or int64 of one dimension; return its length."""
    if v.format not in ("int32", "int64"):
        hint = "; convert it with .astype(np.int64) or .long()"
        raise TypeError(f"{name}: expected int32 or int64, got {describe(v)}{hint}")
    if v.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got {describe(v)}")
    return v.shape[0]


def sink_slot(skip_slot: Any) -> int:
    """Check a slot that is never accessed."""
    require_int(skip_slot, "skip_slot")
    if not -(2**63) <= skip_slot < 2**63:
        raise ValueError(f"skip_slot: expected a 64-bit int, got {skip_slot!r}")
    return int(skip_slot)


def as_list(values: Any, name: str, items: str) -> list[Any]:
    """Return an iterable argument as a list of `items`; not of a string or bytes, nor of a set."""
    if isinstance(values, np.ndarray) and values.ndim:
        return list(values.tolist())
    # The views of a dict are sets, too, but in order.
    has_order = isinstance(values, MappingView) or not isinstance(values, Set)
    try:
        if has_order and not isinstance(values, (str, bytes, bytearray)):
            return list(values)
    except TypeError:
        pass
    hint = "" if has_order else ", which has no order"
    raise TypeError(f"{name}: expected a list of {items}, got {type(values).__name__}{hint}")


def require_int(value: Any, name: str) -> None:
    """Raise TypeError unless `value` is an int; bool is excluded."""
    # NumPy counts durations among its integers.
    if isinstance(value, (bool, np.timedelta64)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {value!r}")


def require_number(value: Any, name: str) -> None:
    """Raise TypeError unless `value` is a real number; bool is excluded."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")


def flag(value: Any, name: str) -> bool:
    """Return an argument that is True or False; TypeError if it is neither."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
    return bool(value)


def block_table(v: ArrayView) -> tuple[int, int]:
    """Check a block table; return the number of sequences, and of pages per row."""
    require_format(v, "block_table", "int32", "int64")
    if v.ndim != 2:
        raise ValueError(f"block_table: expected (sequences, max_pages), got {describe(v)}")
    return v.shape[0], v.shape[1]


def rope_table(v: ArrayView, *, min_positions: int = 0) -> tuple[int, int]:
    """Check a table of cos and sin; return its positions and its width."""
    require_format(v, "rope_table", "fp32")
    if v.ndim != 2 or v.shape[0] < min_positions or v.shape[1] % 2 or v.shape[1] < 2:
        expected = "(max_positions, even rotary_dim)"
        raise ValueError(f"rope_table: expected {expected}, got {describe(v)}")
    require_contiguous(v, "rope_table")
    return v.shape[0], v.shape[1]


def require_format(v: ArrayView, name: str, *allowed: str, expected: str = "") -> None:
    """Raise TypeError unless an array has one of some formats; `expected` describes them."""
    if v.format not in allowed:
        known = expected or " or ".join(allowed).replace("fp32", "float32")
        raise TypeError(f"{name}: expected {known}, got {describe(v)}")


def require_shape(v: ArrayView, name: str, shape: tuple[int, ...], hint: str = "") -> None:
    """Raise ValueError unless an array has a shape; `hint` says why."""
    if v.shape != shape:
        raise ValueError(f"{name}: expected {shape}{hint}, got {describe(v)}")


# --- Arrays of a call -----------------------------------------------------------------------------


def require_arrays(views: Mapping[str, ArrayView], names: Iterable[str]) -> None:
    """Raise TypeError where None came for an argument that must be an array."""
    for name in names:
        if name not in views:
            raise TypeError(f"{name}: expected an array, got None")


def require_arguments(declaration: Declaration, views: Mapping[str, Any]) -> None:
    """Raise for a required array that is None, and for arrays of several devices in one call."""
    require_arrays(views, declaration.required)
    require_same_device(views)


def require_same_device(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arrays of several devices in one call; numbers are passed over."""
    devices = [(name, v.device) for name, v in arguments.items() if isinstance(v, ArrayView)]
    for name, device in devices:
        first_name, first = devices[0]
        if device != first:
            raise ValueError(f"{name}: expected {first} like {first_name}, got {device}")


def require_output(v: ArrayView, name: str) -> None:
    """Raise ValueError for an array that cannot be written element by element."""
    if v.readonly:
        raise ValueError(
            f"{name}: expected a writable array, got a read-only one; pass a .copy() of it, or one "
            "of NumPy, CuPy or torch where it is immutable, as JAX's are"
        )
    if v.scales is not None:
        for part in v.memory:
            require_output(part, name)
        return
    repeats = 0 in v.strides and v.size
    if repeats and any(n > 1 and s == 0 for n, s in zip(v.shape, v.strides, strict=True)):
        raise ValueError(f"{name}: expected distinct elements, got a broadcast array")


def require_contiguous(v: ArrayView, name: str) -> None:
    """Raise ValueError for gaps between the elements of the last axis."""
    shape, strides = v.shape, v.strides
    if v.scales is not None:  # a view of rows that are
        return
    if shape and shape[-1] > 1 and strides[-1] != v.itemsize and v.size:
        raise ValueError(
            f"{name}: expected a contiguous last dimension ({v.itemsize} bytes a step), got "
            f"strides of {strides} bytes; .contiguous() or np.ascontiguousarray makes a copy that "
            "has one"
        )


def require_aligned(named: Sequence[tuple[str, ArrayView | None]]) -> None:
    """Raise ValueError for elements at addresses that are no multiples of their size.

    A GPU cannot read them.
    """
    for name, v in named:
        if v is not None and any(n % v.itemsize for n in (v.pointer, *v.strides)):
            raise ValueError(
                f"{name}: expected elements at multiples of {v.itemsize} bytes, "
                f"got address {v.pointer:#x} and strides of {v.strides} bytes"
            )


def require_disjoint(
    outputs: Sequence[tuple[str, ArrayView | None]], inputs: Sequence[tuple[str, ArrayView | None]]
) -> None:
    """Raise ValueError for outputs that share bytes with an input or with one another."""
    ranges = sorted(v.byte_range() for _, v in (*outputs, *inputs) if v is not None)
    if all(end <= start for (_, end), (start, _) in pairwise(ranges)):
        return  # many layers, say, one behind the other
    for i, (name, output) in enumerate(outputs):
        for other_name, other in (*outputs[i + 1 :], *inputs):
            if output is not None and other is not None and overlap(output, other):
                raise ValueError(f"{name}: expected memory of its own, got some of {other_name}'s")
