"""The Params of `kernels_src/rope.cu`, and the launch of one part of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import ArrayView
from ..devices.protocol import Device
from ..formats import FORMATS, Format
from ..kernels import Kernel, Specialisation, zeroed
from . import checks, geometry, side
from .plan import Launch
from .side import Side

ARRAYS = (
    "query", "query_out", "key", "key_out", "value", "k_cache", "v_cache", "table", "query_norm",
    "key_norm", "positions", "slots", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache",
)  # fmt: skip

INDEX = {name: i for i, name in enumerate(ARRAYS)}

_LONG = (
    "query_token_bytes", "query_head_bytes", "query_out_token_bytes", "query_out_head_bytes",
    "key_out_token_bytes", "key_out_head_bytes", "table_row_bytes", "max_positions",
    "position_bytes", "axis_bytes", "slot_stride_bytes", "num_slots", "skip_slot",
    "position_operation", "slot_operation",
)  # fmt: skip

_SHORT = (
    "num_rows", "num_stored", "num_q_heads", "num_k_heads", "num_v_heads", "reports", "head_dim",
    "rotary_dim", "interleaved", "sections", "section_end_0", "section_end_1", "page_size",
    "page_shift", "slot_bytes", "position_index", "lane_shift", "norm_is_float",
)  # fmt: skip

PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*ARRAYS, "faults")),
        ("k", side.PARAMS),
        ("v", side.PARAMS),
        *((name, np.int64) for name in _LONG),
        *((name, np.int32) for name in _SHORT),
        ("epsilon", np.float32),
    ],
    align=True,
)

PLAIN = Kernel("rope.cu", "rope_store", PARAMS, "RopeParams")
REDUCING = Kernel("rope.cu", "rope_store", PARAMS, "RopeParams", barriers=True)

ROTATED = ("fp32", "fp16", "bf16")
REPORT_POSITIONS, REPORT_SLOTS = 1, 2  # as in kernels_src/rope.cu

_PACK = 8  # pairs, or elements that do not turn, that a thread takes at a time


def specialisations() -> list[Specialisation]:
    """Return every specialisation that the operations on RoPE can ask for."""
    return [
        _specialise(FORMATS[rows], cache, count, reduces)
        for rows in ROTATED
        for cache in FORMATS.values()
        for count in (_PACK, 1)
        for reduces in (False, True)
    ]


def _specialise(rows: Format, cache: Format, count: int, reduces: bool) -> Specialisation:
    kernel = REDUCING if reduces else PLAIN
    return kernel.specialise(rows.ctype, cache.ctype, count, "true" if reduces else "false")


class Turned(NamedTuple):
    """Query or key: rows that turn, and the rows that the turned ones go to, if any."""

    rows: checks.Rows
    out: checks.Rows | None
    format: Format
    norm: ArrayView | None

    @property
    def strides(self) -> list[int]:
        found = [self.rows.token_bytes, self.rows.head_bytes]
        return found if self.out is None else [*found, self.out.token_bytes, self.out.head_bytes]


class Rotation(NamedTuple):
    """What all rows of a call have in common."""

    table: ArrayView
    positions: ArrayView
    interleaved: bool
    sections: tuple[int, int, int] | None
    sections_interleaved: bool
    epsilon: float
    fault_id: int

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[-1]

    @property
    def dim(self) -> int:
        return self.table.shape[1]

    def write(self, params: Any) -> None:
        """Fill the Params of the table, the positions and the sections."""
        params["table_row_bytes"] = self.table.strides[0]
        params["max_positions"] = self.table.shape[0]
        params["position_bytes"] = self.positions.strides[-1]
        params["position_index"] = self.positions.itemsize
        params["position_operation"] = self.fault_id
        params["interleaved"] = self.interleaved
        params["epsilon"] = self.epsilon
        if self.sections is not None:
            first, second, third = self.sections
            ends = (3 * second, 3 * third) if self.sections_interleaved else (first, first + second)
            params["axis_bytes"] = self.positions.strides[0]
            params["sections"] = 2 if self.sections_interleaved else 1
            params["section_end_0"], params["section_end_1"] = ends


class Store(NamedTuple):
    """The slots of a call that stores."""

    slots: ArrayView
    skip_slot: int
    fault_id: int


class Part(NamedTuple):
    """What one launch does of a call: any of the query, the key and the value.

    With `turns` False the key has turned before and is stored from where it went.
    """

    query: Turned | None = None
    key: Turned | None = None
    k: Side | None = None
    v: Side | None = None
    turns: bool = True
    reports: int = REPORT_POSITIONS | REPORT_SLOTS

    @property
    def reduces(self) -> bool:
        """Whether whole rows must be known first: for RMSNorm, or for dynamic scales."""
        norms = any(t is not None and t.norm is not None for t in (self.query, self.key))
        dynamic = any(s is not None and s.scale_cache is not None for s in (self.k, self.v))
        return (norms and self.turns) or dynamic

    @property
    def formats(self) -> tuple[Format, Format]:
        """Of the rows, and of the cache."""
        turned, stored = self.query or self.key, self.k or self.v
        if turned is None:
            assert stored is not None
            return stored.rows_format, stored.cache_format
        return turned.format, stored.cache_format if stored else turned.format

    def pointers(self) -> list[int | None]:
        """Return the array that each pointer field takes."""
        taken = ["table", "positions", "slots"]
        if self.query is not None:
            taken += ["query", "query_out", "query_norm"]
        if self.key is not None and self.turns:
            taken += ["key", "key_out", "key_norm"]
        if self.k is not None:
            taken += ["k_cache", "k_scale", "k_scale_cache"]
        if self.v is not None:
            taken += ["value", "v_cache", "v_scale", "v_scale_cache"]
        indices = {name: INDEX[name] for name in taken}
        if self.key is not None and not self.turns:
            indices["key"] = INDEX["key_out"]
        return [indices.get(name) for name in ARRAYS]


def launch(
    device: Device, part: Part, rotation: Rotation, store: Store | None, alignment: int
) -> Launch:
    """Load and lay out the launch of one part of a call."""
    params = zeroed(PARAMS)
    rotation.write(params)
    params["reports"] = part.reports
    strides = [rotation.table.strides[0]]
    num_heads, head_dim, v_width = 0, 0, 0
    if part.query is not None:
        rows, out = part.query.rows, part.query.out
        assert out is not None
        params["query_token_bytes"], params["query_head_bytes"] = rows.token_bytes, rows.head_bytes
        params["query_out_token_bytes"] = out.token_bytes
        params["query_out_head_bytes"] = out.head_bytes
        params["num_q_heads"], head_dim = rows.num_heads, rows.width
        num_heads += rows.num_heads
        strides += part.query.strides
    for name, stored in (("k", part.k), ("v", part.v)):
        if stored is None or store is None:
            continue
        stored.write(params[name], stored.rows.width)
        # A pack of one-byte elements is half a word of 16 bytes, so rows may lie at multiples of 8.
        # But interleaved pairs are written both halves at once: those are whole words.
        pairs_together = name == "k" and rotation.interleaved and part.turns
        half_words = stored.cache_format.itemsize == 1 and not pairs_together
        cache_strides = [(2 if half_words else 1) * stride for stride in stored.cache_strides]
        strides += stored.row_strides + cache_strides
        params["num_stored"] = store.slots.shape[0]
        params["slot_stride_bytes"] = store.slots.strides[0]
        params["slot_bytes"] = store.slots.itemsize
        params["num_slots"], params["skip_slot"] = stored.cache.num_slots, store.skip_slot
        params["page_size"] = stored.cache.page_size
        params["page_shift"] = stored.cache.page_shift
        params["slot_operation"] = store.fault_id
    if part.key is not None:
        rows, out = part.key.rows, part.key.out
        read = rows if part.turns or out is None else out
        params["k"]["token_bytes"], params["k"]["head_bytes"] = read.token_bytes, read.head_bytes
        if out is not None:
            params["key_out_token_bytes"] = out.token_bytes
            params["key_out_head_bytes"] = out.head_bytes
        params["num_k_heads"], head_dim = rows.num_heads, rows.width
        num_heads += rows.num_heads
        strides += part.key.strides
    if part.v is not None:
        v_width = part.v.rows.width
        params["num_v_heads"] = part.v.rows.num_heads
        num_heads += part.v.rows.num_heads

    pairs = rotation.dim // 2 if part.turns and head_dim else 0
    passing = head_dim - 2 * pairs
    params["head_dim"], params["rotary_dim"] = head_dim, 2 * pairs
    norms = [t.norm for t in (part.query, part.key) if t is not None and t.norm is not None]
    params["norm_is_float"] = any(norm.format == "fp32" for norm in norms)

    whole = all(n % _PACK == 0 for n in (pairs, passing, v_width))
    packs = geometry.widest((alignment, *map(abs, strides))) == 16
    count = _PACK if whole and packs else 1
    num_rows = rotation.num_tokens * num_heads
    geometry.require_countable(num_rows, "positions")
    units = max(pairs, passing, (v_width + 1) // 2) // count
    shape = geometry.spread(
        num_rows,
        max(1, units),
        device.sm_count,
        warp_lanes=device.warp_lanes,
        whole_warps=True,
        most_lanes=32,
    )
    params["num_rows"], params["lane_shift"] = num_rows, shape.lane_shift
    specialisation = _specialise(*part.formats, count, part.reduces)
    return Launch(device, specialisation, shape.grid, shape.block, 0, params, part.pointers())
