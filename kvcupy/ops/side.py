"""K or V of a cache, checked: the rows outside of it, the cache, the formats and the scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import ArrayView, describe
from ..formats import Format
from . import checks

_CACHE = np.dtype([(f"{n}_bytes", np.int64) for n in ("page", "offset", "head")], align=True)

# CacheSide of kernels_src/cache_side.cuh
PARAMS = np.dtype(
    [
        ("token_bytes", np.int64),
        ("head_bytes", np.int64),
        ("cache", _CACHE),
        ("scale_head_bytes", np.int64),
        ("scale_cache_slot_bytes", np.int64),
        ("scale_cache_head_bytes", np.int64),
        ("scale", np.float32),
        ("width", np.int32),
    ],
    align=True,
)


class Side(NamedTuple):
    """K or V: rows of format `rows_format` and a cache of format `cache_format`."""

    rows: checks.Rows
    cache: checks.Cache
    rows_format: Format
    cache_format: Format
    scale: checks.Scale
    scale_cache: ArrayView | None = None

    @property
    def heads_join(self) -> bool:
        """Whether the heads of a token are one row, outside and inside the cache."""
        outside = self.rows.head_bytes == self.rows.width * self.rows_format.itemsize
        inside = self.cache.head_bytes == self.rows.width * self.cache_format.itemsize
        one_scale = self.scale_cache is None and self.scale.head_bytes == 0
        return self.rows.num_heads == 1 or (outside and inside and one_scale)

    @property
    def row_strides(self) -> list[int]:
        return [self.rows.token_bytes, self.rows.head_bytes if self.rows.num_heads > 1 else 0]

    @property
    def cache_strides(self) -> list[int]:
        cache = self.cache
        return [
            cache.page_bytes,
            cache.offset_bytes,
            cache.head_bytes if cache.num_heads > 1 else 0,
        ]

    def rows_view(self, pointer: int, num_tokens: int, like: ArrayView) -> ArrayView:
        """Return the rows that are used, (tokens, heads, width)."""
        rows, size = self.rows, self.rows_format.itemsize
        shape = (num_tokens, rows.num_heads, rows.width)
        strides = (rows.token_bytes, rows.head_bytes, size)
        return ArrayView(
            pointer, shape, strides, self.rows_format.name, like.device, owner=like.owner
        )

    def cache_view(self, pointer: int, like: ArrayView) -> ArrayView:
        """Return the cache by pages, (num_pages, page_size, heads, width)."""
        cache, size = self.cache, self.cache_format.itemsize
        shape = (cache.num_slots // cache.page_size, cache.page_size, cache.num_heads, cache.width)
        strides = (cache.page_bytes, cache.offset_bytes, cache.head_bytes, size)
        return ArrayView(
            pointer, shape, strides, self.cache_format.name, like.device, owner=like.owner
        )

    def write(self, params: Any, width: int) -> None:
        """Fill the Params of this side."""
        cache, scales = self.cache, self.scale_cache
        params["token_bytes"], params["head_bytes"] = self.rows.token_bytes, self.rows.head_bytes
        params["cache"] = (cache.page_bytes, cache.offset_bytes, cache.head_bytes)
        params["scale"], params["scale_head_bytes"] = self.scale.value, self.scale.head_bytes
        if scales is not None:
            params["scale_cache_slot_bytes"], params["scale_cache_head_bytes"] = scales.strides
        params["width"] = width


def sides_of_kv(
    given: dict[str, Any],
    layout: Any,
    rows_names: tuple[str, str] = ("key", "value"),
    *,
    into_cache: bool = True,
) -> tuple[Side, Side]:
    """Check K and V rows, their caches and scales, and that they fit together.

    Parameters
    ----------
    given : arguments by name: the rows under `rows_names`, "k_cache" and so on
    into_cache : whether the caches are written, and not the rows
    """
    layout = checks.layout_name(layout)
    first, second = (given[name] for name in rows_names)
    if second.ndim != first.ndim and first.ndim in (2, 3):
        raise ValueError(
            f"{rows_names[1]}: expected {first.ndim} dimensions as in {rows_names[0]} "
            f"{describe(first)}, got {describe(second)}"
        )
    found = []
    for prefix, name in zip("kv", rows_names, strict=True):
        rows_view, cache_view = given[name], given[f"{prefix}_cache"]
        scale, dynamic = given.get(f"{prefix}_scale"), given.get(f"{prefix}_scale_cache")
        rows_format = checks.number_format(rows_view, name)
        cache_format = checks.number_format(cache_view, f"{prefix}_cache")
        rows = checks.rows(rows_view, name)
        cache = checks.cache(
            cache_view, f"{prefix}_cache", layout, rows_view.ndim, written=into_cache
        )
        if not into_cache:
            checks.require_output(rows_view, name)
        if (cache.num_heads, cache.width) != (rows.num_heads, rows.width):
            raise ValueError(
                f"{prefix}_cache: expected {rows.num_heads} heads of {rows.width} like {name}, "
                f"got {describe(cache_view)} ({layout})"
            )
        static = checks.scale(scale, f"{prefix}_scale", rows.num_heads, cache_format)
        own_scales = checks.scale_cache(
            dynamic, f"{prefix}_scale_cache", (f"{prefix}_scale", scale), cache, cache_format,
            written=into_cache,
        )  # fmt: skip
        found.append(Side(rows, cache, rows_format, cache_format, static, own_scales))
    k, v = found
    require_like(k, v, given, rows_names)
    flat = [side._replace(cache=side.cache.flattened()) for side in found]
    if all(side.cache.page_size == 1 for side in flat):
        k, v = flat
    return k, v


def require_like(k: Side, v: Side, given: dict[str, Any], rows_names: tuple[str, str]) -> None:
    """Refuse V rows or a V cache that do not go with K's."""
    k_rows, v_rows = (given[name] for name in rows_names)
    if v_rows.ndim != k_rows.ndim or v.rows.num_heads != k.rows.num_heads:
        name, other = rows_names[1], rows_names[0]
        raise ValueError(
            f"{name}: expected heads as in {other} {describe(k_rows)}, got {describe(v_rows)}"
        )
    if (v.cache.num_slots, v.cache.page_size) != (k.cache.num_slots, k.cache.page_size):
        k_cache, v_cache = given["k_cache"], given["v_cache"]
        raise ValueError(
            f"v_cache: expected pages as in k_cache {describe(k_cache)}, got {describe(v_cache)}"
        )


def sides_of_mla(given: dict[str, Any]) -> tuple[Side, Side]:
    """Check latent and rope rows, (tokens, width) each, that share the rows of one cache.

    Parameters
    ----------
    given : arguments by name: "latent", "rope_key", "cache" and perhaps "scale"
    """
    rows_names = ("latent", "rope_key")
    for name in rows_names:
        if given[name].ndim != 2:
            raise ValueError(f"{name}: expected (tokens, width), got {describe(given[name])}")
    rows = [checks.rows(given[name], name) for name in rows_names]
    formats = [checks.number_format(given[name], name) for name in rows_names]
    cache_format = checks.number_format(given["cache"], "cache")
    cache = checks.mla_cache(given["cache"], "cache")
    if cache.width != rows[0].width + rows[1].width:
        got = describe(given["cache"])
        raise ValueError(f"cache: expected rows of {rows[0].width} + {rows[1].width}, got {got}")
    static = checks.scale(given.get("scale"), "scale", 1, cache_format)
    latent, rope = (
        Side(own, cache._replace(width=own.width).flattened(), own_format, cache_format, static)
        for own, own_format in zip(rows, formats, strict=True)
    )
    return latent, rope


def require_rows(side: Side, name: str, num_slots: int) -> None:
    """Refuse fewer rows than slots."""
    if side.rows.num_tokens < num_slots:
        got = side.rows.num_tokens
        raise ValueError(f"{name}: expected at least {num_slots} rows, one a slot, got {got}")
