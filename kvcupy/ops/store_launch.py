"""What a store comes down to: the Params of `kernels_src/store.cu`, a kernel and a geometry.

A `Side` is K or V, checked; a `Launch` writes one or both of them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import ArrayView
from ..devices.protocol import Device
from ..dtypes import FORMATS, Format
from ..kernels import Kernel, Specialisation
from . import checks, geometry

_CACHE = np.dtype([(f"{n}_bytes", np.int64) for n in ("page", "offset", "head")], align=True)

_SIDE = np.dtype(
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

POINTERS = (
    "key", "value", "k_cache", "v_cache", "slots",
    "k_scale", "v_scale", "k_scale_cache", "v_scale_cache", "faults",
)  # fmt: skip

PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in POINTERS),
        ("k", _SIDE),
        ("v", _SIDE),
        ("slot_stride_bytes", np.int64),
        ("num_slots", np.int64),
        ("skip_slot", np.int64),
        ("operation", np.int64),
        ("num_rows", np.int32),
        ("num_heads", np.int32),
        ("page_size", np.int32),
        ("page_shift", np.int32),
        ("index_bytes", np.int32),
        ("lane_shift", np.int32),
    ],
    align=True,
)

_PACK_POINTERS = struct.Struct(f"={len(POINTERS)}Q")
_OF_SIDE = {
    "k": [n == "key" or n.startswith("k_") or n in ("slots", "faults") for n in POINTERS],
    "v": [n == "value" or n.startswith("v_") or n in ("slots", "faults") for n in POINTERS],
}

COPY = Kernel("store.cu", "store_copy", PARAMS, "StoreParams")
CONVERT = Kernel("store.cu", "store_convert", PARAMS, "StoreParams")
DYNAMIC = Kernel("store.cu", "store_dynamic", PARAMS, "StoreParams", barriers=True)

_PACK = 8  # elements that a thread converts at a time, where alignment allows


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a store can ask for."""
    found = [COPY.specialise(word) for word in (16, 8, 4, 2, 1)]
    for source in FORMATS.values():
        for target in FORMATS.values():
            for count in (_PACK, 1) if source is not target else ():
                found.append(CONVERT.specialise(source.ctype, target.ctype, count))
                if target.quantised:
                    found.append(DYNAMIC.specialise(source.ctype, target.ctype, count))
    return found


@dataclass(frozen=True)
class Side:
    """K or V (`prefix` "k" or "v"): rows of one format into a cache of another."""

    prefix: str
    rows: checks.Rows
    cache: checks.Cache
    source: Format
    target: Format
    scale: checks.Scale
    scale_cache: ArrayView | None = None

    @property
    def kernel(self) -> Kernel:
        if self.source is self.target:
            return COPY
        return CONVERT if self.scale_cache is None else DYNAMIC

    @property
    def kind(self) -> tuple[Kernel, str, str]:
        """What two sides must have in common to share a launch."""
        plain_copy = self.kernel is COPY
        return self.kernel, "" if plain_copy else self.source.ctype, self.target.ctype

    @property
    def heads_join(self) -> bool:
        """Whether the heads of a token are one row, in the input and in the cache."""
        joined_in = self.rows.head_bytes == self.rows.width * self.source.itemsize
        joined_out = self.cache.head_bytes == self.rows.width * self.target.itemsize
        one_scale = self.scale_cache is None and self.scale.head_bytes == 0
        return self.rows.num_heads == 1 or (joined_in and joined_out and one_scale)

    @property
    def strides(self) -> list[int]:
        cache = self.cache
        heads = [self.rows.head_bytes, cache.head_bytes] if self.rows.num_heads > 1 else []
        return [self.rows.token_bytes, cache.page_bytes, cache.offset_bytes, *heads]

    def rows_view(self, pointer: int, num_tokens: int, like: ArrayView) -> ArrayView:
        """Return the rows that a store reads, (tokens, heads, width)."""
        rows, size = self.rows, self.source.itemsize
        shape = (num_tokens, rows.num_heads, rows.width)
        strides = (rows.token_bytes, rows.head_bytes, size)
        return ArrayView(pointer, shape, strides, self.source.name, like.device, owner=like.owner)

    def cache_view(self, pointer: int, like: ArrayView) -> ArrayView:
        """Return the cache by pages, (num_pages, page_size, heads, width)."""
        cache, size = self.cache, self.target.itemsize
        shape = (cache.num_slots // cache.page_size, cache.page_size, cache.num_heads, cache.width)
        strides = (cache.page_bytes, cache.offset_bytes, cache.head_bytes, size)
        return ArrayView(pointer, shape, strides, self.target.name, like.device, owner=like.owner)

    def write(self, params: Any, width: int) -> None:
        """Fill the Params of this side."""
        cache, scales = self.cache, self.scale_cache
        params["token_bytes"], params["head_bytes"] = self.rows.token_bytes, self.rows.head_bytes
        params["cache"] = (cache.page_bytes, cache.offset_bytes, cache.head_bytes)
        params["scale"], params["scale_head_bytes"] = self.scale.value, self.scale.head_bytes
        if scales is not None:
            params["scale_cache_slot_bytes"], params["scale_cache_head_bytes"] = scales.strides
        params["width"] = width


class Launch:
    """A specialisation, its geometry and the constant part of its Params, for one or both sides."""

    def __init__(
        self,
        device: Device,
        sides: list[Side],
        slots: ArrayView,
        alignment: int,
        skip_slot: int,
        operation: int,
    ) -> None:
        first = sides[0]
        num_heads, widths = first.rows.num_heads, [side.rows.width for side in sides]
        if all(side.heads_join for side in sides):
            num_heads, widths = 1, [width * num_heads for width in widths]

        strides = [abs(stride) for side in sides for stride in side.strides]
        if first.kernel is COPY:
            widths = [w * s.source.itemsize for w, s in zip(widths, sides, strict=True)]
            step = geometry.widest((*widths, *strides, alignment))
            specialisation = COPY.specialise(step)
        else:
            word = min(16, _PACK * max(first.source.itemsize, first.target.itemsize))
            packs = geometry.widest((*strides, alignment)) >= word
            step = _PACK if packs and all(w % _PACK == 0 for w in widths) else 1
            specialisation = first.kernel.specialise(first.source.ctype, first.target.ctype, step)

        num_rows = slots.shape[0] * num_heads
        if num_rows >= 2**31:
            raise ValueError(f"slot_mapping: expected fewer than 2**31 rows, got {num_rows}")
        barriers = first.kernel.barriers
        shape = geometry.spread(
            num_rows,
            max(widths) // step,
            device.multiprocessors,
            warp_lanes=device.warp_lanes,
            whole_warps=barriers,
        )
        self.grid, self.block = shape.grid, shape.block
        self.smem_bytes = shape.block[0] // 32 * 4 if barriers else 0

        params = np.zeros((), PARAMS)
        for side, width in zip(sides, widths, strict=True):
            side.write(params[side.prefix], width)
        params["slot_stride_bytes"] = slots.strides[0]
        params["num_slots"] = first.cache.num_slots
        params["skip_slot"] = skip_slot
        params["operation"] = operation
        params["num_rows"] = num_rows
        params["num_heads"] = num_heads
        params["page_size"] = first.cache.page_size
        params["page_shift"] = first.cache.page_shift
        params["index_bytes"] = slots.itemsize
        params["lane_shift"] = shape.lane_shift
        self.constants = params.tobytes()[_PACK_POINTERS.size :]
        self.pointers = _OF_SIDE[first.prefix] if len(sides) == 1 else None
        self.function = device.load(specialisation)

    def params(self, pointers: tuple[int, ...]) -> bytes:
        if self.pointers is not None:
            mine = zip(pointers, self.pointers, strict=True)
            pointers = tuple(pointer if own else 0 for pointer, own in mine)
        return _PACK_POINTERS.pack(*pointers) + self.constants
