"""The attention kernels that there are, and which of them a call takes.

`attention_prefill` has tiles of 64 packed rows on tensor cores, for fp16 and bf16 of one kind.
`attention_decode` splits the keys of a few packed rows, and is the plain path of everything else.
`attention_starts` goes before both where queries are ragged.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes, faults
from ..arrays import ArrayView
from ..devices.protocol import Device
from ..kernels import Kernel, Specialisation, zeroed
from . import checks, geometry, plan, side
from .side import Side

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Options:
    """What is asked for beside the arrays. `window` 0, `soft_cap` 0: none.

    The last two say what the rope table turns, where one is given.
    """

    layout: str
    sm_scale: float | None
    causal: bool
    window: int
    sink_keys: int
    soft_cap: float
    interleaved: bool = False
    rotary_start: int = 0

    @classmethod
    def of(
        cls, layout: Any, sm_scale: Any, causal: Any, window: Any, sinks: Any, soft_cap: Any,
        interleaved: Any = False, rotary_start: Any = 0,
    ) -> Options:  # fmt: skip
        """Check the options; `sinks` may be learned logits, which are an array."""
        layout = checks.layout_name(layout)
        if not isinstance(causal, (bool, np.bool_)):
            raise TypeError(f"causal: expected a bool, got {causal!r}")
        if window is not None:
            checks.require_int(window, "window")
            if not 1 <= window < 2**63:
                off = "; None is no window" if window in (-1, 0) else ""  # as others have it
                raise ValueError(f"window: expected None or at least 1, got {window}{off}")
        sink_keys = 0
        if sinks is not None and not checks.is_array(sinks):
            checks.require_int(sinks, "sinks")
            if not 0 <= sinks < 2**63:
                raise ValueError(f"sinks: expected at least 0, got {sinks}")
            sink_keys = int(sinks)
        if not isinstance(interleaved, (bool, np.bool_)):
            raise TypeError(f"interleaved: expected a bool, got {interleaved!r}")
        checks.require_int(rotary_start, "rotary_start")
        if rotary_start < 0:
            raise ValueError(f"rotary_start: expected at least 0, got {rotary_start}")
        return cls(
            layout, _number(sm_scale, "sm_scale"), bool(causal), int(window or 0), sink_keys,
            _number(soft_cap, "logits_soft_cap", positive=True) or 0.0, bool(interleaved),
            int(rotary_start),
        )  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call whose arguments fit together.

    Attributes
    ----------
    given : the arrays by name, as views; only those that are given
    k, v : the caches, with their scales
    num_tokens, num_heads, num_sequences, max_pages : T, Hq, B, pages a row of the table
    """

    given: dict[str, Any]
    options: Options
    k: Side
    v: Side
    num_tokens: int
    num_heads: int
    num_sequences: int
    max_pages: int

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.k.cache.num_heads

    @property
    def sm_scale(self) -> float:
        given = self.options.sm_scale
        return 1.0 / math.sqrt(self.k.cache.width) if given is None else given

    @property
    def max_keys(self) -> int:
        """The most keys that the table has room for."""
        return self.max_pages * self.k.cache.page_size

    def view(self, name: str) -> ArrayView | None:
        """Return an array argument, None if it is none."""
        found = self.given.get(name)
        return found if isinstance(found, ArrayView) else None


def _number(value: Any, name: str, *, positive: bool = False) -> float | None:
    if value is None:
        return None
    if type(value) is float and 1e-30 < value < 1e30:  # the usual: float32 has room for it
        return value
    checks.require_number(value, name)
    assert isinstance(value, numbers.Real)
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    if not np.isfinite(rounded) or (positive and not rounded > 0):
        wanted = "a finite float32 above zero" if positive else "a finite float32"
        off = "; None is no cap" if positive and value == 0 else ""
        raise ValueError(f"{name}: expected {wanted}, got {value!r}{off}")
    return float(value)


ARRAYS = (
    "query", "k_cache", "v_cache", "block_table", "seq_lens", "query_starts", "k_scale", "v_scale",
    "k_scale_cache", "v_scale_cache", "sinks", "tree_mask", "tree_lens", "hole_starts", "holes",
    "key_starts", "rope_table", "tail_positions", "out", "lse", "partial_out", "partial_lse",
)  # fmt: skip

PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*ARRAYS, "faults")),
        ("k", side.PARAMS),
        ("v", side.PARAMS),
        ("query_token_bytes", np.int64),
        ("query_head_bytes", np.int64),
        ("out_token_bytes", np.int64),
        ("out_head_bytes", np.int64),
        ("lse_token_bytes", np.int64),
        ("lse_head_bytes", np.int64),
        ("table_row_bytes", np.int64),
        ("table_entry_bytes", np.int64),
        ("seq_len_bytes", np.int64),
        ("sink_bytes", np.int64),
        ("mask_row_bytes", np.int64),
        ("mask_column_bytes", np.int64),
        ("tree_len_bytes", np.int64),
        ("hole_start_bytes", np.int64),
        ("hole_bytes", np.int64),
        ("key_start_bytes", np.int64),
        ("rope_row_bytes", np.int64),
        ("tail_row_bytes", np.int64),
        ("tail_column_bytes", np.int64),
        ("max_positions", np.int64),
        ("num_pages", np.int64),
        ("max_pages", np.int64),
        ("window", np.int64),
        ("sink_keys", np.int64),
        ("table_operation", np.int64),
        ("length_operation", np.int64),
        ("score_scale", np.float32),
        ("soft_cap", np.float32),
        ("cap_scale", np.float32),
        ("num_tokens", np.int32),
        ("num_sequences", np.int32),
        ("num_splits", np.int32),
        ("num_heads", np.int32),
        ("group", np.int32),
        ("page_size", np.int32),
        ("page_shift", np.int32),
        ("table_index_bytes", np.int32),
        ("length_index_bytes", np.int32),
        ("mask_columns", np.int32),
        ("tail_columns", np.int32),
        ("rotary_start", np.int32),
        ("rotary_dim", np.int32),
        ("interleaved", np.int32),
        ("causal", np.int32),
        ("query_format", np.int32),
        ("k_format", np.int32),
        ("v_format", np.int32),
        ("out_format", np.int32),
        ("lane_shift", np.int32),
    ],
    align=True,
)

FORMAT_NUMBERS = {
    name: i for i, name in enumerate(("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"))
}


@dataclass(frozen=True)
class Tiling:
    """How a kernel is laid over a call.

    Parameters
    ----------
    specialisation : the kernel
    rows : packed rows a tile
    lanes : threads that share a key (the plain path)
    threads : a block
    smem_bytes : of dynamic shared memory a block
    """

    specialisation: Specialisation
    rows: int
    lanes: int
    threads: int
    smem_bytes: int


def fill(call: Call, num_splits: int, lanes: int) -> np.ndarray[Any, Any]:
    """Return the Params of a call without its addresses."""
    params = zeroed(PARAMS)
    options, cache = call.options, call.k.cache
    for name, one in (("k", call.k), ("v", call.v)):
        one.write(params[name], one.cache.width)
        params[f"{name}_format"] = FORMAT_NUMBERS[one.cache_format.name]
    query, out, lse, mask, sinks = (
        call.view(name) for name in ("query", "out", "lse_out", "tree_mask", "sinks")
    )
    table, lengths = call.view("block_table"), call.view("seq_lens")
    assert query is not None and out is not None and table is not None and lengths is not None
    for prefix, v in (("query", query), ("out", out), ("lse", lse)):
        if v is not None:
            params[f"{prefix}_token_bytes"], params[f"{prefix}_head_bytes"] = v.strides[:2]
    params["query_format"] = FORMAT_NUMBERS[query.format]
    params["out_format"] = FORMAT_NUMBERS[out.format]
    params["table_row_bytes"], params["table_entry_bytes"] = table.strides
    params["table_index_bytes"] = table.itemsize
    params["seq_len_bytes"], params["length_index_bytes"] = lengths.strides[0], lengths.itemsize
    params["table_operation"] = faults.operation_id("paged_attention", "block_table")
    params["length_operation"] = faults.operation_id("paged_attention", "seq_lens")
    if sinks is not None:
        params["sink_bytes"] = sinks.strides[0]
    if mask is not None:
        params["mask_row_bytes"], params["mask_column_bytes"] = mask.strides
        params["mask_columns"] = mask.shape[1]
    for name in ("tree_len", "hole_start", "hole", "key_start"):
        if (counts := call.view(f"{name}s")) is not None:
            params[f"{name}_bytes"] = counts.strides[0]
    _fill_rope(params, call)
    params["num_pages"] = cache.num_slots // cache.page_size
    params["page_size"], params["page_shift"] = cache.page_size, cache.page_shift
    params["max_pages"], params["num_sequences"] = call.max_pages, call.num_sequences
    params["num_tokens"], params["num_heads"] = call.num_tokens, call.num_heads
    params["group"], params["num_splits"] = call.group, num_splits
    params["window"], params["sink_keys"] = options.window, options.sink_keys
    params["causal"] = options.causal
    params["soft_cap"], params["cap_scale"] = options.soft_cap, options.soft_cap * _LOG2_E
    params["score_scale"] = call.sm_scale * (1.0 if options.soft_cap else _LOG2_E)
    params["lane_shift"] = lanes.bit_length() - 1
    return params


def _fill_rope(params: np.ndarray[Any, Any], call: Call) -> None:
    table, tail = call.view("rope_table"), call.view("tail_positions")
    if table is None:
        return
    params["max_positions"], params["rotary_dim"] = table.shape
    params["rope_row_bytes"] = table.strides[0]
    params["rotary_start"] = call.options.rotary_start
    params["interleaved"] = call.options.interleaved
    if tail is not None:
        params["tail_columns"] = tail.shape[1]
        params["tail_row_bytes"], params["tail_column_bytes"] = tail.strides


STARTS_PARAMS = np.dtype(
    [
        ("query_lens", np.uint64),
        ("starts", np.uint64),
        ("faults", np.uint64),
        ("length_bytes", np.int64),
        ("operation", np.int64),
        ("num_sequences", np.int32),
        ("num_tokens", np.int32),
        ("index_bytes", np.int32),
    ],
    align=True,
)

# By the threads that step together: a warp, or one.
STARTS = {
    lanes: Kernel(
        "attention.cu", "attention_starts", STARTS_PARAMS, "AttentionStartsParams",
        barriers=lanes > 1,
    )
    for lanes in (32, 1)
}  # fmt: skip
DECODE = {
    lanes: Kernel("attention.cu", "attention_decode", PARAMS, "AttentionParams", barriers=lanes > 1)
    for lanes in (32, 1)
}

# Packed rows a tile, by the packs of a row that a lane has where a warp shares it.
ROWS = {1: (1, 4, 8), 3: (1, 2)}
# Where keys turn, there are fewer kernels, and registers: this is for one of `_ANY` format.
_TURNING_ROWS = {1: (1, 4, 8), 3: (2,)}
_TURNING_ANY_ROWS = {1: (1, 4, 8), 3: (1,)}
_HOST_ROWS = (1, 4, 8)
_HOST_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 72, 96)  # where one thread has all of a row
_PACK = 8  # elements of a row that a lane loads at a time, and in a word of 16-bit ones
_ANY = "AnyFormat"  # formats told at run time, rows of any alignment
_NOT_TURNING = "float"  # keys of this format turn as those of any do: few caches have it
_DECODE_THREADS = 128

PREFILL = Kernel(
    "attention_prefill.cu", "attention_prefill", PARAMS, "AttentionParams", barriers=True
)

# kPrefillRows and kPrefillThreads of the kernel.
PREFILL_ROWS = 64
PREFILL_THREADS = 128

WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Widths of K and V that there are kernels for; others are padded to the first that has room."""

PREFILL_FORMATS = {"fp16": "half", "bf16": "bfloat16"}

_ALIGNMENT = 16  # bytes: rows are copied in words of so many
_ROWS_A_SEQUENCE = 16  # fewer leave most of a product of a tensor core to nothing
_TURING_SMEM_BYTES = 64 * 1024
_TILE_BYTES = 144  # a PrefillTile


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a GPU is asked for."""
    formats = [*(f.ctype for f in dtypes.FORMATS.values()), _ANY]
    decodes = [
        DECODE[32].specialise(name, rows, steps, _bool(turns))
        for turns in (False, True)
        for name in formats
        if not turns or name != _NOT_TURNING
        for steps, row_counts in _row_counts(name, turns).items()
        for rows in row_counts
    ]
    prefills = [
        specialisation_for(name, *widths, turns=turns)
        for turns in (False, True)
        for name in PREFILL_FORMATS
        for widths in WIDTHS
    ]
    starts = [kernel.specialise(lanes) for lanes, kernel in STARTS.items()]
    return [*decodes, *prefills, *starts]


def tiling_of(device: Device, call: Call, alignment: int) -> Tiling:
    """Choose the kernel of a call, and lay it out: tensor cores where they suit.

    Parameters
    ----------
    alignment : of the addresses of query, caches and output, as `plan.alignment` gives it
    """
    if call.view("query_lens") is not None and suits(device, call, alignment):
        return prefill_tiling(call)
    return decode_tiling(device, call, alignment)


def decode_tiling(device: Device, call: Call, alignment: int) -> Tiling:
    """Lay the plain path over a call.

    Parameters
    ----------
    alignment : of the addresses of the caches, as `plan.alignment` gives it
    """
    turns = call.view("rope_table") is not None
    name = call.k.cache_format.ctype
    if call.k.cache_format is not call.v.cache_format or not (
        _packed(call, alignment) and _turns_in_packs(call, alignment)
    ):
        name = _ANY
    row_counts: tuple[int, ...]
    packs = -(-max(call.k.cache.width, call.v.cache.width) // _PACK)
    if device.warp_lanes == 1:
        lanes, row_counts = 1, _HOST_ROWS
        steps = next(n for n in _HOST_STEPS if n >= packs)
    else:
        if turns and name == _NOT_TURNING:
            name = _ANY
        steps = next(n for n in ROWS if packs <= 32 * n)
        lanes = min(32, 1 << (-(-packs // steps) - 1).bit_length())
        row_counts = _row_counts(name, turns)[steps]
    # Rows that a sequence has to share what is loaded, as far as shapes tell.
    sharing = call.group * -(-call.num_tokens // call.num_sequences)
    rows = next((n for n in row_counts if n >= sharing), row_counts[-1])
    threads = 1 if device.warp_lanes == 1 else _DECODE_THREADS
    groups = threads // lanes
    floats = groups * rows * (2 + lanes * _PACK * steps)
    kernel = DECODE[1 if device.warp_lanes == 1 else 32]
    return Tiling(
        kernel.specialise(name, rows, steps, _bool(turns)), rows, lanes, threads,
        0 if groups == 1 else 4 * floats,
    )  # fmt: skip


def _row_counts(name: str, turns: bool) -> dict[int, tuple[int, ...]]:
    """Return the packed rows a tile that there are kernels of a format for, by packs a lane."""
    if not turns:
        return ROWS
    return _TURNING_ANY_ROWS if name == _ANY else _TURNING_ROWS


def _bool(value: bool) -> str:
    """Return a template argument."""
    return "true" if value else "false"


def _packed(call: Call, alignment: int) -> bool:
    """Return whether rows of both caches are whole packs at aligned addresses."""
    strides = [n for one in (call.k, call.v) for n in one.cache_strides]
    word = min(16, _PACK * call.k.cache_format.itemsize)
    whole = all(one.cache.width % _PACK == 0 for one in (call.k, call.v))
    return whole and geometry.widest((alignment, *map(abs, strides))) >= word


def _turns_in_packs(call: Call, alignment: int) -> bool:
    """Return whether no pack of a row of K turns in part, and angles are at aligned addresses."""
    table = call.view("rope_table")
    if table is None:
        return True
    turning = table.shape[1] if call.options.interleaved else table.shape[1] // 2
    whole = call.options.rotary_start % _PACK == 0 and turning % _PACK == 0
    return whole and geometry.widest((alignment, abs(table.strides[0]))) == _ALIGNMENT


def padded_widths(k_width: int, v_width: int) -> tuple[int, int] | None:
    """Return the smallest widths of a kernel with room for rows of K and V; None if there is none.

    >>> padded_widths(80, 80), padded_widths(192, 128), padded_widths(576, 512)
    ((128, 128), (192, 128), None)
    """
    return next((w for w in WIDTHS if k_width <= w[0] and v_width <= w[1]), None)


def specialisation_for(
    format_name: str, k_width: int, v_width: int, *, turns: bool = False
) -> Specialisation:
    """Return the kernel for a format and rows of such widths, which it must have room for."""
    widths = padded_widths(k_width, v_width)
    if widths is None:
        raise ValueError(f"widths {k_width}, {v_width}: expected at most {WIDTHS[-1]}")
    return PREFILL.specialise(PREFILL_FORMATS[format_name], *widths, _bool(turns))


def smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `PrefillShape::kBytes` of the kernel."""
    k_width, v_width = map(int, specialisation.arguments[1:3])
    in_registers = k_width <= 192  # the queries
    keys = 64 if in_registers else 32
    k_bytes, v_bytes, query_bytes = (2 * n for n in (keys * k_width, keys * v_width, 64 * k_width))
    values = max(v_bytes, query_bytes) if in_registers else v_bytes + query_bytes
    angles = keys if specialisation.arguments[3] == _bool(True) else 1
    table_bytes = -(-(16 * keys + 8 * angles + 4 * (keys // 32)) // 8) * 8
    return k_bytes + values + 2 * table_bytes + _TILE_BYTES


def suits(device: Device, call: Call, alignment: int) -> bool:
    """Return whether a call may take the kernel.

    Parameters
    ----------
    call : `out` is of the format of `query`, or float32
    alignment : of the addresses of query, caches and output, as `plan.alignment` gives it

    Notes
    -----
    It may where lanes step together, everything is fp16 or bf16 of one kind and unscaled, rows are
    whole words at aligned addresses, and sequences have rows enough on average, as far as shapes
    tell. On Turing, which has little shared memory, the widest rows take the plain path, and so
    does bf16, which its tensor cores do not know.
    """
    query, out = call.view("query"), call.view("out")
    assert query is not None and out is not None
    names = {query.format, call.k.cache_format.name, call.v.cache_format.name}
    widths = padded_widths(call.k.cache.width, call.v.cache.width)
    if (
        device.warp_lanes != 32
        or len(names) != 1
        or query.format not in PREFILL_FORMATS
        or widths is None
    ):
        return False
    scales = ("k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
    if any(call.given.get(name) is not None for name in scales):
        return False
    strides = [n for one in (call.k, call.v) for n in one.cache_strides]
    strides += [*query.strides[:2], *out.strides[:2]]
    whole = call.k.cache.width % _PACK == 0 and call.v.cache.width % _PACK == 0
    if not whole or geometry.widest((alignment, *map(abs, strides))) < _ALIGNMENT:
        return False
    if not _turns_in_packs(call, alignment):
        return False
    if getattr(device, "arch", None) == "sm_75":
        needed = smem_bytes(_prefill_kernel(call))
        if query.format == "bf16" or needed > _TURING_SMEM_BYTES:
            return False
    rows = call.num_tokens * call.group
    return rows >= _ROWS_A_SEQUENCE * max(1, call.num_sequences)


def prefill_tiling(call: Call) -> Tiling:
    """Lay the kernel over a call that it suits. Of `Tiling`, `lanes` means nothing to it."""
    chosen = _prefill_kernel(call)
    return Tiling(chosen, PREFILL_ROWS, 1, PREFILL_THREADS, smem_bytes(chosen))


def _prefill_kernel(call: Call) -> Specialisation:
    query = call.view("query")
    assert query is not None
    widths = call.k.cache.width, call.v.cache.width
    return specialisation_for(query.format, *widths, turns=call.view("rope_table") is not None)


_MOST_SPLITS = 128
_KEYS_A_SPLIT = 256  # at least
_BLOCKS_A_MULTIPROCESSOR = 4  # wanted, so that short sequences do not leave it idle


def num_tiles(call: Call, rows: int) -> int:
    """Return a bound on the tiles of all sequences, as `find_tile` of the kernels numbers them."""
    if call.view("query_lens") is None:
        return call.num_sequences * -(-call.group // rows)
    packed = call.num_tokens * call.group
    geometry.require_countable(packed, "query")
    return packed // rows + call.num_sequences


def splits(device: Device, call: Call, num_blocks: int) -> int:
    """Return how many splits of the keys occupy the device. Shapes decide, not lengths."""
    window = call.options.window
    most_keys = call.max_keys
    if window:
        most_keys = min(most_keys, window + call.options.sink_keys)
    wanted = _BLOCKS_A_MULTIPROCESSOR * device.multiprocessors // max(1, num_blocks)
    return max(1, min(wanted, most_keys // _KEYS_A_SPLIT, _MOST_SPLITS))


def starts_launch(device: Device, call: Call, pointers: list[int | None]) -> plan.Launch:
    """Load and lay out the launch of `attention_starts`."""
    lengths = call.view("query_lens")
    assert lengths is not None
    lanes = 1 if device.warp_lanes == 1 else 32
    params = zeroed(STARTS_PARAMS)
    params["length_bytes"], params["index_bytes"] = lengths.strides[0], lengths.itemsize
    params["operation"] = faults.operation_id("paged_attention", "query_lens")
    params["num_sequences"], params["num_tokens"] = call.num_sequences, call.num_tokens
    return plan.Launch(
        device, STARTS[lanes].specialise(lanes), (1, 1, 1), (lanes, 1, 1), 0, params, pointers
    )
