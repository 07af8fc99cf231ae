"""Rotate query and key by position; alone, or fused with writing key and value into a cache."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

import numpy as np

from .. import devices, faults, streams
from ..arrays import ArrayView, describe
from ..checks import flag, require_number
from ..devices.protocol import Device
from ..formats import FORMATS, FOUR_BIT, Format, Layout
from ..kernels import Kernel, Specialisation
from ..observe import Access
from . import checks, kv_operand
from .call import Operation, Plan, StepOperation, Views
from .kv_operand import KVArrays, KVOperand, Rows
from .launch import Geometry, Launch, Pointer, fields_of, require_countable, spread, staging, widest
from .spec import Argument
from .store import (
    CACHES,
    LATENTS,
    ROPE_KEY,
    SCALE_CACHES,
    SCALES,
    SLOT_MAPPING,
    VALUE,
    Scale,
)

_QUERY = (
    Argument("query", "tokens heads head_dim", words=True, optional=True),
    Argument(
        "query_out", "tokens heads head_dim",
        output=True, fresh=True, words=True, replaces=("query",),
    ),
)  # fmt: skip
_KEY = Argument("key", "tokens kv_heads head_dim", words=True)
_KEY_OUT = Argument(
    "key_out", "tokens kv_heads head_dim", in_example=False,
    output=True, fresh=True, words=True, replaces=("key",),
)  # fmt: skip
_TABLE = Argument("rope_table", "positions rotary_dim", words=True)
_NORMS = (
    Argument("query_norm", "head_dim", words=True), Argument("key_norm", "head_dim", words=True)
)  # fmt: skip
_POSITIONS = Argument("positions", "tokens", example=(15, 0, 7))
_APPLY_ROPE = Operation("apply_rope", *_QUERY, _KEY, _KEY_OUT, _TABLE, *_NORMS, _POSITIONS)
_ROPE_STORE_KV = Operation(
    "rope_store_kv", *_QUERY, _KEY, replace(_KEY_OUT, written_if="write_key"), VALUE, *CACHES,
    *SCALES, *SCALE_CACHES, _TABLE, *_NORMS, _POSITIONS, SLOT_MAPPING,
)  # fmt: skip
_ROPE_KEY_OUT = Argument(
    "rope_key_out", output=True, fresh=True, words=True, replaces=("rope_key",),
    written_if="write_key",
)  # fmt: skip
_ROPE_STORE_MLA = Operation(
    "rope_store_mla", *[replace(a, shape="tokens heads rope_dim") for a in _QUERY],
    ROPE_KEY, _ROPE_KEY_OUT, *LATENTS, replace(_TABLE, shape="positions rope_dim"), _POSITIONS,
    SLOT_MAPPING,
)  # fmt: skip


class RopePointers(TypedDict, total=False):
    """The pointers of RopeParams in kernels_src/rope.cu."""

    query: Pointer
    query_out: Pointer
    key: Pointer
    key_out: Pointer
    value: Pointer
    k_cache: Pointer
    v_cache: Pointer
    table: Pointer
    query_norm: Pointer
    key_norm: Pointer
    positions: Pointer
    slots: Pointer
    k_scale: Pointer
    v_scale: Pointer
    k_scale_cache: Pointer
    v_scale_cache: Pointer
    faults: Pointer


_LONG = (
    "query_token_bytes query_head_bytes query_out_token_bytes query_out_head_bytes "
    "key_out_token_bytes key_out_head_bytes table_row_bytes max_positions position_bytes "
    "axis_bytes slot_stride_bytes num_slots skip_slot position_operation slot_operation"
)
_SHORT = (
    "num_groups num_stored num_q_heads num_k_heads num_v_heads q_groups k_groups v_groups "
    "group_heads rotated_segments row_segments v_segments reports head_dim rotary_dim "
    "interleaved sections section_end_0 section_end_1 page_size page_shift slot_bytes "
    "position_index lane_shift norm_is_float"
)

# RopeParams
PARAMS = np.dtype(
    [
        *fields_of(np.uint64, RopePointers.__annotations__),
        ("k", kv_operand.OPERAND_PARAMS),
        ("v", kv_operand.OPERAND_PARAMS),
        *fields_of(np.int64, _LONG),
        *fields_of(np.int32, _SHORT),
        ("epsilon", np.float32),
    ],
    align=True,
)

# By whether whole rows are read first, for RMSNorm or dynamic scales.
_KERNELS = {
    reduces: Kernel("rope.cu", "rope_store", PARAMS, "RopeParams", barriers=reduces)
    for reduces in (False, True)
}

ROTATED = ("fp32", "fp16", "bf16")
REPORT_POSITIONS, REPORT_SLOTS = 1, 2  # as in kernels_src/rope.cu

_PACK = 8  # pairs, or elements that are not rotated, that a thread handles at a time
_HELD_BYTES = 4  # heads of a group times bytes per element: kHeldHeads of kernels_src/rope.cu
_MIN_SM_THREADS = 640  # groups take several heads where an SM has as many threads all the same
# On the host, where a thread loops over the heads of its group.
_CORE_HEADS, _MIN_CORE_THREADS = 16, 16


def specialisations() -> list[Specialisation]:
    """Return every specialisation that the operations on RoPE can ask for."""
    caches = [(cache, reduces) for cache in FORMATS.values() for reduces in (False, True)]
    four_bit = {format.ctype: format for format in FOUR_BIT.values()}
    return [
        _specialise(FORMATS[rows], cache, count, reduces)
        for rows in ROTATED
        for cache, reduces in [*caches, *((format, True) for format in four_bit.values())]
        for count in (_PACK, 1)
    ]


def _specialise(rows: Format, cache: Format, count: int, reduces: bool) -> Specialisation:
    return _KERNELS[reduces].specialise(rows.ctype, cache.ctype, count, reduces)


@_APPLY_ROPE.public
def apply_rope(
    query: Any,
    key: Any,
    rope_table: Any,
    positions: Any,
    *,
    interleaved: bool = False,
    sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Any = None,
    key_norm: Any = None,
    eps: float = 1e-6,
    query_out: Any = None,
    key_out: Any = None,
    stream: Any = None,
) -> None:
    """Rotate query and key heads by position, in place or into other arrays.

    Parameters
    ----------
    query : (T', Hq, D) fp32, fp16 or bf16, T' >= T; or None. D is even
    key : (T', H, D)
    rope_table : float32 (max_positions, rotary_dim) `[cos | sin]`, from `rope_table`. The first
        rotary_dim elements of a head are rotated, the rest pass
    positions : int32 or int64 (T,); with `sections` (3, T). One outside the table is a fault: its
        token is left alone, and `check_faults` raises it
    interleaved : pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
    sections : three counts of pairs that sum to rotary_dim / 2 (mrope): consecutive sections of
        pairs are rotated by the first, second and third position of a token
    sections_interleaved : pairs take the first, second and third position cyclically, while a
        section has pairs left (as Qwen3-VL does)
    query_norm, key_norm : RMSNorm weights (D,), float32 or the rows' format, applied to each head
        before the rotation
    eps : of RMSNorm
    query_out, key_out : shaped like query and key; None: in place
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    Arithmetic is float32 with one rounding. Stream: one kernel, in order; query and key of
    different formats take one each. Capture: legal. Bytes: each row read and written once (a norm
    reads it again from L1). Source: sgl-project/sglang pull 9014, vLLM `rotary_embedding`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcupy import rope_table
    >>> q, k = np.ones((1, 2, 4), np.float32), np.ones((1, 1, 4), np.float32)
    >>> apply_rope(q, k, rope_table(8, 4, device="host"), np.array([0]))
    >>> q[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if key is None:
        raise TypeError("key: expected an array, got None")
    arrays = (
        query, query if query_out is None else query_out, key, key if key_out is None else key_out,
        rope_table, query_norm, key_norm, positions,
    )  # fmt: skip
    if sections is not None:
        sections = _hashable(sections)
    options = (interleaved, sections, sections_interleaved, eps)
    _APPLY_ROPE.run(arrays, options, _plan_rotation, stream)


@_ROPE_STORE_KV.public
def rope_store_kv(
    query: Any,
    key: Any,
    value: Any,
    rope_table: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    interleaved: bool = False,
    sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Any = None,
    key_norm: Any = None,
    eps: float = 1e-6,
    write_key: bool = True,
    query_out: Any = None,
    layout: Layout = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    skip_slot: int | None = None,
    alt_stream: Any = None,
    stream: Any = None,
) -> None:
    """Rotate query and key, and write key and value into a cache, in one launch.

    The rotated key is rounded once to its format; that value goes to `key` and is what the
    cache stores or quantises.

    Parameters
    ----------
    query, rope_table, positions, interleaved, sections, sections_interleaved, query_norm, key_norm,
    eps, query_out : as in `apply_rope`
    key : (T', H, D) fp32, fp16 or bf16; rotated in place unless `write_key` is False
    value : (T', H, Dv), in one of the same formats
    k_cache, v_cache, layout, k_scale, v_scale, k_scale_cache, v_scale_cache, skip_slot : as in
        `store_kv`
    slot_mapping : int32 or int64 (S,), S <= T. Tokens without a slot, or with a skipped one, are
        rotated all the same
    alt_stream : do it in three launches instead: rotate, then the K copy on `stream` and the V copy
        on this stream, ordered by events both ways. The result is the same; it exists to compare
        with the one launch. Without `write_key` the K copy rotates as it copies
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    A token whose position is outside the table is neither rotated nor stored. Stream: one kernel,
    in order; a query or value of another format pair than the key's needs a separate one. Capture:
    legal, with `alt_stream` too. Bytes: each row is read once (a norm and dynamic scales read it
    again from L1) and written once per destination.
    Source: sgl-project/sglang pulls 9014 and 9077.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcupy import rope_table
    >>> q, k, v = (np.ones((1, 2, 8), np.float16) for _ in range(3))
    >>> k_cache, v_cache = np.zeros((2, 16, 2, 8), np.float16)
    >>> table = rope_table(32, 8, device="host")
    >>> rope_store_kv(q, k, v, table, np.array([9]), k_cache, v_cache, np.array([5]))
    >>> bool((k_cache[5] == k[0]).all()), float(v_cache[5, 0, 0])
    (True, 1.0)
    """
    skip_slot = -1 if skip_slot is None else checks.sink_slot(skip_slot)
    writes_key = write_key if type(write_key) is bool else flag(write_key, "write_key")
    arrays = (
        query, query if query_out is None else query_out, key, key if writes_key else None, value,
        k_cache, v_cache, k_scale, v_scale, k_scale_cache, v_scale_cache,
        rope_table, query_norm, key_norm, positions, slot_mapping,
    )  # fmt: skip
    if sections is not None:
        sections = _hashable(sections)
    options = (interleaved, sections, sections_interleaved, eps, layout, skip_slot)
    if alt_stream is None:
        _ROPE_STORE_KV.run(arrays, options, _plan_store, stream)
    else:
        _ROPE_STORE_KV.run(arrays, (*options, True), _plan_store, stream, alt_stream)


@_ROPE_STORE_MLA.public
def rope_store_mla(
    query: Any,
    latent: Any,
    rope_key: Any,
    rope_table: Any,
    positions: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    interleaved: bool = False,
    write_key: bool = True,
    query_out: Any = None,
    scale: Any = None,
    skip_slot: int | None = None,
    stream: Any = None,
) -> None:
    """Rotate the rope parts of an MLA query and key, and write latent and key side by side.

    Parameters
    ----------
    query : (T', Hq, P) fp32, fp16 or bf16, the rope part of the query heads; or None
    latent : (T', R), in one of the same formats
    rope_key : (T', P); rotated in place unless `write_key` is False
    cache : (num_slots, R + P) or (num_pages, page_size, R + P), written in place
    scale : of a quantised cache: None (1), a number, or float32 of one element
    rope_table, positions, slot_mapping, interleaved, query_out, skip_slot, stream : as in
        `rope_store_kv`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    Stream, Capture: as `rope_store_kv`. Source: vLLM `concat_and_cache_mla_rope_fused`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcupy import rope_table
    >>> latent, key = np.ones((1, 512), np.float16), np.ones((1, 64), np.float16)
    >>> cache = np.zeros((16, 576), np.float16)
    >>> table = rope_table(32, 64, device="host")
    >>> rope_store_mla(None, latent, key, table, np.array([0]), cache, np.array([3]))
    >>> float(cache[3].sum())
    576.0
    """
    skip_slot = -1 if skip_slot is None else checks.sink_slot(skip_slot)
    writes_key = write_key if type(write_key) is bool else flag(write_key, "write_key")
    arrays = (
        query, query if query_out is None else query_out,
        rope_key, rope_key if writes_key else None, latent, cache, scale, rope_table, positions,
        slot_mapping,
    )  # fmt: skip
    options = (interleaved, skip_slot)
    _ROPE_STORE_MLA.run(arrays, options, _plan_store_mla, stream)


def step_rotation(rope_table: Any, positions: Any, *, interleaved: bool) -> StepOperation:
    """Return `apply_rope` at the positions of a step, for rows (query, query_out, key, key_out)."""
    arrays = rope_table, None, None, positions
    options = (interleaved, None, False, 1e-6)
    return StepOperation(_APPLY_ROPE, _plan_rotation, 4, arrays, options)


def step_rope_store(
    rope_table: Any, positions: Any, slot_mapping: Any, *, interleaved: bool
) -> StepOperation:
    """Return `rope_store_kv` for a step, for rows (query, query_out, key, key_out, value)."""
    arrays = rope_table, None, None, positions, slot_mapping
    options = (interleaved, None, False, 1e-6, "NHD", -1)
    return StepOperation(_ROPE_STORE_KV, _plan_store, 5, arrays, options)


def step_rope_store_mla(
    rope_table: Any, positions: Any, slot_mapping: Any, *, interleaved: bool
) -> StepOperation:
    """Return `rope_store_mla` for a step, for rows (query, its output, rope_key, its, latent)."""
    arrays = rope_table, positions, slot_mapping
    options = (interleaved, -1)
    return StepOperation(_ROPE_STORE_MLA, _plan_store_mla, 5, arrays, options)


def _hashable(sections: Any) -> Any:
    """Return a list of sections as a tuple, which can be part of a signature."""
    return tuple(sections) if isinstance(sections, list) else sections


# --- Checks ---------------------------------------------------------------------------------------


class Rotated(NamedTuple):
    """Query or key: rows to rotate, and the rows that the rotated ones are written to, if any."""

    array: ArrayView
    out_array: ArrayView | None
    norm: ArrayView | None
    rows: Rows
    out: Rows | None
    format: Format


class Rotation(NamedTuple):
    """What all rows of a call have in common; None is the current stream of `library`."""

    operation: Operation
    library: str
    table: ArrayView
    positions: ArrayView
    interleaved: bool
    sections: tuple[int, int, int] | None
    sections_interleaved: bool
    epsilon: float

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[-1]

    @property
    def dim(self) -> int:
        return self.table.shape[1]

    def params(self) -> dict[str, Any]:
        """Return the fields of Params for the table, the positions and the sections."""
        table, positions = self.table, self.positions
        fields = {
            "table_row_bytes": table.strides[0], "max_positions": table.shape[0],
            "position_bytes": positions.strides[-1], "position_index": positions.itemsize,
            "interleaved": self.interleaved, "epsilon": self.epsilon,
        }  # fmt: skip
        if self.sections is not None:
            first, second, third = self.sections
            ends = (3 * second, 3 * third) if self.sections_interleaved else (first, first + second)
            fields["axis_bytes"] = positions.strides[0]
            fields["sections"] = 2 if self.sections_interleaved else 1
            fields["section_end_0"], fields["section_end_1"] = ends
        return fields


class Slots(NamedTuple):
    """The slots of a call that stores."""

    view: ArrayView
    skip_slot: int


def _plan_rotation(
    alignment: int, interleaved: Any, sections: Any, sections_interleaved: Any, eps: Any, *,
    rope_table: ArrayView, positions: ArrayView,
    query: ArrayView | None = None, query_out: ArrayView | None = None,
    key: ArrayView | None = None, key_out: ArrayView | None = None,
    query_norm: ArrayView | None = None, key_norm: ArrayView | None = None,
) -> RopePlan:  # fmt: skip
    rotation = _rotation(
        _APPLY_ROPE, rope_table, positions, query or key,
        interleaved, sections, sections_interleaved, eps,
    )  # fmt: skip
    rotated_query = _rotated(query, query_out, query_norm, rotation)
    rotated_key = _rotated(key, key_out, key_norm, rotation)
    return RopePlan(rotation, _parts(rotated_query, rotated_key, None, None), None, alignment)


def _plan_store(
    alignment: int, interleaved: Any, sections: Any, sections_interleaved: Any, eps: Any,
    layout: Any, skip_slot: int, two_streams: bool = False, *,
    key: ArrayView, value: ArrayView, rope_table: ArrayView, positions: ArrayView,
    k_cache: ArrayView, v_cache: ArrayView, slot_mapping: ArrayView,
    query: ArrayView | None = None, query_out: ArrayView | None = None,
    key_out: ArrayView | None = None, query_norm: ArrayView | None = None,
    key_norm: ArrayView | None = None, k_scale: Scale = None, v_scale: Scale = None,
    k_scale_cache: ArrayView | None = None, v_scale_cache: ArrayView | None = None,
) -> RopePlan:  # fmt: skip
    rotation = _rotation(
        _ROPE_STORE_KV, rope_table, positions, query or key,
        interleaved, sections, sections_interleaved, eps,
    )  # fmt: skip
    rotated_query = _rotated(query, query_out, query_norm, rotation)
    rotated_key = _rotated(key, key_out, key_norm, rotation)
    k, v = kv_operand.kv_operands(
        KVArrays(key, k_cache, "k_scale", k_scale, k_scale_cache),
        KVArrays(value, v_cache, "v_scale", v_scale, v_scale_cache), layout,
    )  # fmt: skip
    slots = _slots(slot_mapping, v, rotation, skip_slot)
    parts = _parts(rotated_query, rotated_key, k, v)
    if not two_streams:
        return RopePlan(rotation, parts, slots, alignment)
    written = key_out is not None
    rotate = _parts(rotated_query, rotated_key if written else None, None, None)
    reports = 0 if rotate else REPORT_POSITIONS
    store_k = RopePart(key=rotated_key, k=k, rotates=not written, reports=reports)
    store_v = RopePart(v=v, reports=REPORT_SLOTS)
    launched = [rotate, [store_k], [store_v]]
    return TwoStreamPlan(rotation, parts, slots, alignment, launched)


def _plan_store_mla(
    alignment: int, interleaved: Any, skip_slot: int, *, latent: ArrayView,
    rope_key: ArrayView, rope_table: ArrayView, positions: ArrayView, cache: ArrayView,
    slot_mapping: ArrayView, query: ArrayView | None = None, query_out: ArrayView | None = None,
    rope_key_out: ArrayView | None = None, scale: Scale = None,
) -> RopePlan:  # fmt: skip
    rotation = _rotation(_ROPE_STORE_MLA, rope_table, positions, query or rope_key, interleaved)
    rotated_query = _rotated(query, query_out, None, rotation)
    rotated_key = _rotated(rope_key, rope_key_out, None, rotation)
    v, k = kv_operand.mla_operands(latent, rope_key, cache, scale)
    slots = _slots(slot_mapping, v, rotation, skip_slot)
    alignment |= k.cache_offset_bytes & 15
    return RopePlan(rotation, _parts(rotated_query, rotated_key, k, v), slots, alignment)


def _slots(slots: ArrayView, v: KVOperand, rotation: Rotation, skip_slot: int) -> Slots:
    """Check the slots, and the rows that are not rotated."""
    num_slots = checks.indices(slots, "slot_mapping")
    if num_slots > rotation.num_tokens:
        most = f"at most {rotation.num_tokens} slots, one per position"
        raise ValueError(f"slot_mapping: expected {most}, got {num_slots}")
    kv_operand.require_rows(v, num_slots)
    rows = v.arrays.rows
    if v.rows_format.name not in ROTATED:
        raise TypeError(f"{rows.name}: expected {', '.join(ROTATED)}, got {describe(rows)}")
    return Slots(slots, skip_slot)


def _rotated(
    v: ArrayView | None, target: ArrayView | None, norm: ArrayView | None, rotation: Rotation
) -> Rotated | None:
    """Check query or key, where its rotated rows go, and its norm."""
    if v is None:
        return None
    name, num_tokens = v.name, rotation.num_tokens
    format = checks.number_format(v, name)
    if format.name not in ROTATED:
        raise TypeError(f"{name}: expected {', '.join(ROTATED)}, got {describe(v)}")
    if v.ndim == 2 and name != "rope_key":
        raise ValueError(f"{name}: expected (tokens, heads, width), got {describe(v)}")
    rows = kv_operand.rows(v, name)
    if rows.num_tokens < num_tokens:
        raise ValueError(f"{name}: expected at least {num_tokens} rows, got {describe(v)}")
    if rows.width % 2:
        raise ValueError(f"{name}: expected an even head dimension, got {describe(v)}")
    if rows.width < rotation.dim:
        least = f"heads of at least {rotation.dim}, the width of rope_table"
        raise ValueError(f"{name}: expected {least}, got {describe(v)}")
    out = None
    if target is not None:
        in_place = (target.pointer, target.shape, target.strides) == (v.pointer, v.shape, v.strides)
        target_name = name if in_place else target.name
        checks.require_output(target, target_name)
        out = kv_operand.rows(target, target_name)
        if target.format != v.format or target.shape[1:] != v.shape[1:]:
            raise ValueError(f"{target_name}: expected {describe(v)}, got {describe(target)}")
        if out.num_tokens < num_tokens:
            raise ValueError(f"{target_name}: expected {num_tokens} rows, got {describe(target)}")
    if norm is not None:
        formats = f"fp32 or {v.format}"
        checks.require_format(norm, norm.name, "fp32", v.format, expected=formats)
        if norm.shape != (rows.width,) or (rows.width > 1 and norm.strides[0] != norm.itemsize):
            shape = f"contiguous ({rows.width},)"
            raise ValueError(f"{norm.name}: expected {shape}, got {describe(norm)}")
    return Rotated(v, target, norm, rows, out, format)


def _rotation(
    operation: Operation, table: ArrayView, positions: ArrayView, rows: ArrayView | None,
    interleaved: Any, sections: Any = None, sections_interleaved: Any = False, eps: Any = 0.0,
) -> Rotation:  # fmt: skip
    """Check the table, the positions and how pairs use them; `rows` are the first to be rotated."""
    checks.rope_table(table)
    checks.require_format(positions, "positions", "int32", "int64")
    if sections is None:
        if positions.ndim != 1:
            raise ValueError(f"positions: expected (tokens,), got {describe(positions)}")
    else:
        sections = _sections(sections, table.shape[1] // 2)
        if positions.ndim != 2 or positions.shape[0] != 3:
            raise ValueError(f"positions: expected (3, tokens), got {describe(positions)}")
    require_number(eps, "eps")
    if not eps >= 0:
        raise ValueError(f"eps: expected at least 0, got {eps!r}")
    epsilon = float(eps) if eps <= _MAX_FLOAT32 else math.inf
    library = (positions if rows is None else rows).library
    return Rotation(
        operation, library, table, positions, flag(interleaved, "interleaved"), sections,
        flag(sections_interleaved, "sections_interleaved"), epsilon,
    )  # fmt: skip


_MAX_FLOAT32 = float(np.finfo(np.float32).max)  # a Python float: any int compares with it


def _sections(sections: Any, pairs: int) -> tuple[int, int, int]:
    try:
        counts = [int(n) for n in sections]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # tensors without numbers, say
        raise TypeError(f"sections: expected three ints, got {sections!r}") from None
    if len(counts) != 3 or min(counts) < 0 or sum(counts) != pairs:
        raise ValueError(f"sections: expected three that sum to {pairs}, got {sections!r}")
    return counts[0], counts[1], counts[2]


# --- Plans ----------------------------------------------------------------------------------------


class RopePart(NamedTuple):
    """What one launch of a call does: any of the query, the key and the value.

    A key that does not rotate has been rotated before, and is stored from where that was written.
    """

    query: Rotated | None = None
    key: Rotated | None = None
    k: KVOperand | None = None
    v: KVOperand | None = None
    rotates: bool = True
    reports: int = REPORT_POSITIONS | REPORT_SLOTS

    @property
    def rotated(self) -> list[Rotated]:
        return [rotated for rotated in (self.query, self.key) if rotated is not None]

    @property
    def stored(self) -> list[KVOperand]:
        return [stored for stored in (self.k, self.v) if stored is not None]

    @property
    def reduces(self) -> bool:
        """Whether whole rows are read first: for RMSNorm, dynamic scales, or groups."""
        if any(stored.arrays.scale_cache is not None or stored.four_bit for stored in self.stored):
            return True
        return self.rotates and any(rotated.norm is not None for rotated in self.rotated)

    @property
    def formats(self) -> tuple[Format, Format]:
        """Return the formats of the rows, and of the cache."""
        rotated, stored = self.query or self.key, self.k or self.v
        if rotated is None:
            assert stored is not None
            return stored.rows_format, stored.cache_format
        return rotated.format, stored.cache_format if stored else rotated.format

    def pointers(self, rotation: Rotation, slots: Slots | None) -> RopePointers:
        """Return what the pointer fields take."""
        pointers: RopePointers = {"table": rotation.table, "positions": rotation.positions}
        if slots is not None:
            pointers["slots"] = slots.view
        query, key, k, v = self.query, self.key, self.k, self.v
        if query is not None:
            pointers["query"] = query.array
            pointers["query_out"] = query.out_array
            pointers["query_norm"] = query.norm
        if key is not None and self.rotates:
            pointers["key"] = key.array
            pointers["key_out"] = key.out_array
            pointers["key_norm"] = key.norm
        elif key is not None:
            pointers["key"] = key.out_array
        if k is not None:
            pointers["k_cache"] = k.cache_pointer
            pointers["k_scale"] = k.scale.array
            pointers["k_scale_cache"] = k.arrays.scale_cache
        if v is not None:
            pointers["value"] = v.arrays.rows
            pointers["v_cache"] = v.cache_pointer
            pointers["v_scale"] = v.scale.array
            pointers["v_scale_cache"] = v.arrays.scale_cache
        return pointers


def _parts(
    query: Rotated | None, key: Rotated | None, k: KVOperand | None, v: KVOperand | None
) -> list[RopePart]:
    """Put as much as possible into one launch: rows of another format take a separate one."""
    parts = []
    if query is not None and key is not None and query.rows.width != key.rows.width:
        width = f"heads of {key.rows.width} like the key's"
        raise ValueError(f"query: expected {width}, got heads of {query.rows.width}")
    with_query = query is None or (
        key is not None
        and query.format is key.format
        and (query.norm is None or key.norm is None or query.norm.format == key.norm.format)
    )
    with_value = v is None or (
        k is not None and v.rows_format is k.rows_format and v.cache_format is k.cache_format
    )
    if key is not None or v is not None:
        parts.append(RopePart(query if with_query else None, key, k, v if with_value else None))
    if query is not None and not with_query:
        parts.append(RopePart(query=query, reports=0 if parts else REPORT_POSITIONS))
    if v is not None and not with_value:
        parts.append(RopePart(v=v, reports=0))
    return parts


class RopePlan(Plan):
    """A rotation, with or without a store; one that does not load only checks addresses."""

    def __init__(
        self, rotation: Rotation, parts: list[RopePart], slots: Slots | None, alignment: int, *,
        loads: bool = True,
    ) -> None:  # fmt: skip
        device = devices.get(rotation.positions.device)
        super().__init__(rotation.operation, device, rotation.library)
        self.rotation, self.parts, self.slots = rotation, parts, slots
        bounds = {"positions": faults.below(rotation.table.shape[0])}
        for operand in [operand for part in parts for operand in part.stored]:
            bounds["slot_mapping"] = faults.below(operand.cache.num_slots)
        self.report(**bounds)
        if loads and rotation.num_tokens:
            self.load(lambda aligned: [self._launch(part, aligned) for part in parts], alignment)

    def touched(self, views: Views) -> Views:
        """Return what the parts touch: the rows of the tokens there are, caches by pages."""
        tokens = self.rotation.num_tokens
        touched: Views = {}
        for part in self.parts:
            for source in part.pointers(self.rotation, self.slots).values():
                v = source[0] if isinstance(source, tuple) else source
                if isinstance(v, ArrayView):
                    touched.setdefault(v.name, views[v.name])
            for rotated in part.rotated:
                name, rows, out, out_array = (
                    rotated.array.name, rotated.rows, rotated.out, rotated.out_array
                )  # fmt: skip
                if out is not None and out_array is not None:
                    out_name = out_array.name
                    if not part.rotates:  # read from where they were written
                        touched.pop(out_name, None)
                        touched[name] = out.of(views[out_name], tokens)
                        continue
                    touched[out_name] = out.of(views[out_name], tokens)
                touched[name] = rows.of(views[name], tokens)
            for operand in part.stored:
                cache_name = operand.arrays.cache.name
                if cache_name != "cache":  # not shared by both
                    touched[cache_name] = operand.cache_view(views)
            if part.v is not None and self.slots is not None:
                name = part.v.arrays.rows.name
                touched[name] = part.v.rows.of(views[name], self.slots.view.shape[0])
        return {name: touched[name] for name in self.operation.names if name in touched}

    def label(self, output: str, accessed: Views) -> str:
        """Name an output as the caller does: what is written in place is query or key itself."""
        for part in self.parts:
            for rotated in part.rotated:
                if rotated.out_array is not None and output == rotated.out_array.name:
                    return output if rotated.array.name in accessed else rotated.array.name
        return output

    def access(self, name: str, views: Views) -> Access:
        """Return the slots of caches and their scales, and all of other arrays."""
        for part in self.parts:
            for operand in part.stored:
                assert self.slots is not None
                access = operand.slots_of(
                    name, views[name], views["slot_mapping"], self.slots.skip_slot
                )
                if access is not None:
                    return access
        return super().access(name, views)

    def _launch(self, part: RopePart, alignment: int) -> Launch:
        device, rotation = self.device, self.rotation
        params = rotation.params()
        params["position_operation"] = self.fault_ids["positions"]
        params["reports"] = part.reports
        strides = [rotation.table.strides[0]]
        head_dim, v_width = 0, 0
        for field, stored in (("k", part.k), ("v", part.v)):
            if stored is None or self.slots is None:
                continue
            cache, slots = stored.cache, self.slots.view
            params |= stored.params(field, stored.rows.width, alignment)
            # A pack of one-byte elements is half a word of 16 bytes, so rows may be at multiples
            # of 8. But interleaved pairs are written both halves at once: those are whole words.
            pairs_together = field == "k" and rotation.interleaved and part.rotates
            half_words = stored.cache_format.itemsize == 1 and not pairs_together
            strides += stored.row_strides
            if stored.four_bit is None:
                strides += [(2 if half_words else 1) * stride for stride in stored.cache_strides]
            params |= {
                "num_stored": slots.shape[0], "slot_stride_bytes": slots.strides[0],
                "slot_bytes": slots.itemsize, "num_slots": cache.num_slots,
                "skip_slot": self.slots.skip_slot,
                "slot_operation": self.fault_ids["slot_mapping"],
                "page_size": cache.page_size, "page_shift": cache.page_shift,
            }  # fmt: skip
        for name, field, count, rotated in (
            ("query", "query_", "num_q_heads", part.query), ("key", "k.", "num_k_heads", part.key),
        ):  # fmt: skip
            if rotated is None:
                continue
            rows, out = rotated.rows, rotated.out
            source = rows if part.rotates or out is None else out
            params[f"{field}token_bytes"] = source.token_bytes
            params[f"{field}head_bytes"] = source.head_bytes
            if out is not None:
                params[f"{name}_out_token_bytes"] = out.token_bytes
                params[f"{name}_out_head_bytes"] = out.head_bytes
                strides += [out.token_bytes, out.head_bytes]
            params[count], head_dim = rows.num_heads, rows.width
            strides += [rows.token_bytes, rows.head_bytes]
            if rotated.norm is not None and rotated.norm.format == "fp32":
                params["norm_is_float"] = True
        if part.v is not None:
            v_width = part.v.rows.width
            params["num_v_heads"] = part.v.rows.num_heads

        pairs = rotation.dim // 2 if part.rotates and head_dim else 0
        unrotated = head_dim - 2 * pairs
        params["head_dim"], params["rotary_dim"] = head_dim, 2 * pairs
        whole = pairs % _PACK == 0 and unrotated % _PACK == 0 and v_width % _PACK == 0
        pack = _PACK if whole and widest((alignment, *map(abs, strides))) == 16 else 1
        heads = tuple(params.get(f"num_{kind}_heads", 0) for kind in "qkv")
        smem_bytes = 0
        if part.reduces:
            # A thread holds 16 elements of a group.
            codes = [stored.shared_elements // 16 for stored in part.stored if stored.four_bit]
            units = max(pairs, unrotated, (v_width + 1) // 2) // pack
            groups, geometry = _whole_rows(
                device, rotation.num_tokens, heads, max(1, units, *codes)
            )
            if codes and part.key is not None:
                row_bytes = head_dim * part.key.format.itemsize
                geometry, smem_bytes = staging(
                    geometry, row_bytes, groups["num_groups"], part.key.array.name
                )
        else:
            packs = pairs // pack, -(-unrotated // (2 * pack)), -(-v_width // (2 * pack))
            held = _HELD_BYTES // part.formats[0].itemsize
            most_heads = _CORE_HEADS if device.warp_lanes == 1 else held
            groups, geometry = _segments(device, rotation.num_tokens, heads, packs, most_heads)
        params |= groups
        params["lane_shift"] = geometry.lane_shift
        specialisation = _specialise(*part.formats, pack, part.reduces)
        pointers = part.pointers(rotation, self.slots)
        return Launch(
            device, specialisation, geometry.grid, geometry.block, smem_bytes, params, pointers,
            self.operation.names,
        )  # fmt: skip


def _whole_rows(
    device: Device, num_tokens: int, heads: tuple[int, ...], words: int
) -> tuple[dict[str, int], Geometry]:
    """Give each head of each token a group of lanes; return fields of Params, and the geometry."""
    num_rows = num_tokens * sum(heads)
    require_countable(num_rows, "positions")
    geometry = spread(
        num_rows, words, device.sm_count,
        warp_lanes=device.warp_lanes, whole_warps=True, max_lanes=32,
    )  # fmt: skip
    groups = dict(zip(("q_groups", "k_groups", "v_groups"), heads, strict=True))
    return {
        **groups, "num_groups": num_rows, "group_heads": 1, "rotated_segments": 1,
        "row_segments": 1, "v_segments": 1,
    }, geometry  # fmt: skip


def _segments(
    device: Device, num_tokens: int, heads: tuple[int, ...], packs: tuple[int, int, int],
    most_heads: int,
) -> tuple[dict[str, int], Geometry]:  # fmt: skip
    """Give each segment of several heads a group of lanes: a lane handles two packs of each head.

    `heads` are of query, key and value, `packs` pairs of packs in the rotated part of a row, in the
    rest of it, and in a value; a group has `most_heads` at most.
    """
    # No lane is idle, unless too few of them share a row for whole sectors of memory.
    lanes = max(4, widest(packs))
    rotated, passing, v_segments = (-(-count // lanes) for count in packs)
    if device.warp_lanes == 1:  # a thread goes through whole rows
        lanes, rotated, passing, v_segments = 1, 1, 0, 1
    segments = rotated + passing, rotated + passing, v_segments
    # Long calls have several heads in flight in each thread, short ones occupy all of the device.
    groups = list(map(operator.mul, heads, segments))
    threads, group_heads = num_tokens * sum(groups) * lanes, most_heads
    min_threads = device.sm_count * (_MIN_SM_THREADS if lanes > 1 else _MIN_CORE_THREADS)
    while group_heads > 1 and threads < group_heads * min_threads:
        group_heads //= 2
    q, k, v = (-(-count // group_heads) * n for count, n in zip(heads, segments, strict=True))
    num_groups = num_tokens * (q + k + v)
    require_countable(num_groups, "positions")
    geometry = spread(
        num_groups, lanes, device.sm_count,
        warp_lanes=device.warp_lanes, whole_warps=lanes > 1, max_lanes=lanes,
    )  # fmt: skip
    return {
        "q_groups": q, "k_groups": k, "v_groups": v, "num_groups": num_groups,
        "group_heads": group_heads, "rotated_segments": rotated,
        "row_segments": rotated + passing, "v_segments": v_segments,
    }, geometry  # fmt: skip


class TwoStreamPlan(RopePlan):
    """Rotation, then the K copy on the stream and the V copy on another, ordered by events.

    `launched` are the parts of each; `parts` are of all three together, for the checks of
    addresses.
    """

    def __init__(
        self, rotation: Rotation, parts: list[RopePart], slots: Slots, alignment: int,
        launched: list[list[RopePart]],
    ) -> None:  # fmt: skip
        super().__init__(rotation, parts, slots, alignment, loads=False)
        self.steps = [RopePlan(rotation, each, slots, alignment) for each in launched]
        self.launches = [launch for plan in self.steps for launch in plan.launches]
        self.cause = next((plan.cause for plan in self.steps if plan.cause is not None), None)

    @property
    def lasting(self) -> bool:
        """Whether later calls may use it."""
        return all([plan.lasting for plan in self.steps])

    def prepare_checks(self, views: Views, arrays: tuple[Any, ...]) -> None:
        """Prepare the checks, and drop the arrays of the call that made the plan."""
        super().prepare_checks(views, arrays)
        for plan in self.steps:
            plan.prepare_checks(views, arrays)

    def run(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Any,
        alt_stream: Any = None,
    ) -> None:  # fmt: skip
        """Issue the three launches and the events between them."""
        device, library = self.device, self.library
        rotate, store_k, store_v = self.steps
        main = device.as_stream(stream, library)
        other = device.as_stream(alt_stream, library, "alt_stream")
        self.check(pointers, arrays)
        if self.cause is not None:  # the reference does all of it on one stream
            device.fall_back(self.operation.name, self.cause)
            streams.fork(main, other)
            self.issue(pointers, arrays, other)
            streams.join(main, other)
            return
        if other.capturing:  # in a capture that `main` is not in: raises before anything is rotated
            streams.fork(main, other)
        rotate.issue(pointers, arrays, main)
        streams.fork(main, other)
        store_k.issue(pointers, arrays, main)
        store_v.issue(pointers, arrays, other)
        streams.join(main, other)
