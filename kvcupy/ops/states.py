"""Rows of recurrent states, a slot per sequence: stored, gathered, and moved on by new tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import Any

import numpy as np

from .. import devices, faults, observe
from ..arrays import ArrayView, contiguous_strides, describe
from ..kernels import Kernel, Specialisation
from . import call, checks
from .call import Operation, Plan, Views
from .launch import Launch, fields_of, require_countable, spread, widest
from .spec import Argument
from .store import COPY, GATHER_COPY, CacheRowsPointers, copies

_ROWS, _SLOTS = "tokens kv_heads head_dim", Argument("slots", "tokens", example=(5, -1, 0))


def _allocated(
    arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and format of the rows that a gather of one array allocates."""
    cache = arguments["caches"]
    return {"out": ((arguments["slots"].shape[0], *cache.shape[1:]), cache.format)}


def _store(*numbers: str) -> Operation:
    """Declare a store of one array, or of some with `numbers` after their names."""
    return Operation(
        "store_state",
        *[Argument(f"states{n}", _ROWS, words=True, several=True) for n in numbers],
        *[
            Argument(f"caches{n}", "slots kv_heads head_dim", output=True, words=True, several=True)
            for n in numbers
        ],
        _SLOTS,
    )


def _gather(*numbers: str) -> Operation:
    """Declare a gather of one array, or of some."""
    return Operation(
        "gather_state",
        *[
            Argument(
                f"out{n}", _ROWS, output=True, fresh=True, words=True, several=True, returned=True
            )
            for n in numbers
        ],
        *[
            Argument(f"caches{n}", "slots kv_heads head_dim", words=True, several=True)
            for n in numbers
        ],
        _SLOTS, outputs_of=_allocated,
    )  # fmt: skip


_BOTH = ("[0]", "[1]")
_STORE_STATE, _STORE_BOTH = _store(""), _store(*_BOTH)
_GATHER_STATE, _GATHER_BOTH = _gather(""), _gather(*_BOTH)
_UPDATE_CONV_STATE = Operation(
    "update_conv_state",
    Argument("x", "tokens channels", words=True),
    Argument("cache", "slots channels conv_inputs", output=True, words=True),
    Argument("slots", "sequences", example=(5, 0)),
    Argument("cu_query_lens", "sequences", example=(0, 1, 3)),
)

_CONV_PARAMS = np.dtype(
    [
        *fields_of(np.uint64, "x cache slots cu_query_lens faults"),
        *fields_of(np.int64, "token_bytes x_group_bytes slot_bytes cache_group_bytes input_bytes"),
        *fields_of(np.int64, "slot_stride_bytes sum_stride_bytes num_tokens num_slots skip_slot"),
        *fields_of(np.int64, "slot_operation sum_operation"),
        *fields_of(np.uint32, "num_pieces pieces_per_sequence"),
        *fields_of(
            np.int32, "length num_units group_shift piece_units slot_index_bytes sum_index_bytes"
        ),
        *fields_of(np.int32, "lane_shift"),
    ],
    align=True,
)

CONV = Kernel("conv_state.cu", "update_conv_state", _CONV_PARAMS, "ConvStateParams")

_PIECE_WORDS = 512  # of a small block, four words a thread
_PIECE_BYTES_ALONE = 64 * 1024  # where a single thread copies a piece
_PIECE_UNITS = 128  # of a warp, four a thread
_PIECE_UNITS_ALONE = 16 * 1024


def specialisations() -> list[Specialisation]:
    """Return every specialisation that only the operations here can ask for."""
    return copies(CONV)


@_STORE_STATE.public
def store_state(
    states: Any, caches: Any, slots: Any, *, skip_slot: int | None = None, stream: Any = None
) -> None:
    """Write rows of recurrent states into the slots of caches, two arrays in one launch.

    Parameters
    ----------
    states : (N, ...) of any dtype with elements of whole bytes, a contiguous row for each slot; or
        two of them in a tuple, of a convolution and of a recurrence, say
    caches : (num_slots, ...), or two as `states`, written in place. Rows of the shape and dtype of
        `states`, contiguous each, with any stride between slots. Two have equally many slots
    slots : int32 or int64 (N,). Negative: skipped. Past the end: skipped, and raised by
        `check_faults`
    skip_slot : a slot that is never written
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    Bits are copied. Which of two rows with the same slot is kept is undefined. Stream: one kernel,
    in order. Capture: legal. Bytes: each row is read once and written once.
    Source: vLLM `scatter_states`, of one array.

    Examples
    --------
    >>> conv, ssm = np.ones((2, 4, 3), np.float16), np.full((2, 8, 16), 2, np.float32)
    >>> caches = np.zeros((5, 4, 3), np.float16), np.zeros((5, 8, 16), np.float32)
    >>> store_state((conv, ssm), caches, np.array([3, -1]))
    >>> float(caches[0][3, 0, 0]), float(caches[1][3, 0, 0]), float(caches[1].sum())
    (1.0, 2.0, 256.0)
    """
    skip_slot = -1 if skip_slot is None else checks.sink_slot(skip_slot)
    rows, cached = _arrays(states, "states"), _arrays(caches, "caches")
    _require_as_many(cached, "caches", rows, "states")
    operation, make = _STORES[len(rows) - 1]
    operation.run((*rows, *cached, slots), (skip_slot,), make, stream)


@_GATHER_STATE.public
def gather_state(
    caches: Any, slots: Any, *, out: Any = None, skip_slot: int | None = None, stream: Any = None
) -> Any:
    """Read the rows of recurrent states in some slots, zeros for skipped ones.

    Parameters
    ----------
    caches : (num_slots, ...) of any dtype with elements of whole bytes, contiguous rows with any
        stride between slots; or two of them in a tuple, as in `store_state`
    slots : int32 or int64 (N,). Negative: the row becomes zeros, the state of a new sequence. Past
        the end: zeros too, and raised by `check_faults`
    out : (N, ...), or two as `caches`, written in place; None: allocated
    skip_slot : a slot that is never read; its rows become zeros
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Returns
    -------
    `out`, or allocated arrays of the caches' library: one, or a tuple of two

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    Bits are copied. Stream: one kernel, in order. Capture: legal with `out`. Bytes: each row is
    read once and written once.
    Source: vLLM `gather_initial_states`, which zeroes the rows of sequences that have none.

    Examples
    --------
    >>> cache = np.arange(12, dtype=np.float32).reshape(4, 3)
    >>> gather_state(cache, np.array([2, -1])).tolist()
    [[6.0, 7.0, 8.0], [0.0, 0.0, 0.0]]
    """
    skip_slot = -1 if skip_slot is None else checks.sink_slot(skip_slot)
    cached = _arrays(caches, "caches")
    rows: tuple[Any, ...] = (None,) * len(cached)
    if out is not None:
        rows = _arrays(out, "out")
        _require_as_many(rows, "out", cached, "caches")
    operation, make = _GATHERS[len(cached) - 1]
    return operation.run((*rows, *cached, slots), (skip_slot,), make, stream)


@_UPDATE_CONV_STATE.public
def update_conv_state(
    x: Any, cache: Any, slots: Any, cu_query_lens: Any, *,
    skip_slot: int | None = None, stream: Any = None,
) -> None:  # fmt: skip
    """Move the states of a causal convolution on by the inputs of a step, in place.

    The slot of a sequence then holds the last inputs of what it held followed by the new ones:
    fewer tokens than it holds shift the old ones, and no tokens leave it unchanged.

    Parameters
    ----------
    x : (num_tokens, channels), the inputs of the convolution, sequence after sequence, of any dtype
        with elements of whole bytes. Tokens past the last sequence are not read
    cache : (num_slots, channels, inputs) of the dtype of `x`, the oldest input first, written in
        place; `inputs` is the width of the convolution - 1, or more. In any strides: where slots
        are (inputs, channels) in memory, pass `cache.swapaxes(1, 2)`
    slots : int32 or int64 (B,), of the sequences. Negative: skipped. Past the end: skipped, and
        raised by `check_faults`
    cu_query_lens : int32 or int64 (B + 1,), 0 and the sums of the sequences' tokens. One that
        decreases, or is past the end of `x`: its sequence is skipped, and raised by `check_faults`
    skip_slot : a slot that is never written
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    Bits are copied. Two sequences with one slot leave it undefined. A new sequence's slot should be
    zero before. Stream: one kernel, in order. Capture: legal. Bytes: each input of a slot is read
    once, of the slot or of `x`, and written once.
    Source: Dao-AILab/causal-conv1d `causal_conv1d_varlen_states`, which begins with zeros; vLLM
    `causal_conv1d_fn`; transformers `update_conv_state` of its caches.

    Examples
    --------
    >>> cache = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    >>> x = np.array([[10], [11], [12], [13], [14], [15]], np.float32)
    >>> update_conv_state(x, cache, np.array([1, 0]), np.array([0, 1, 6]))
    >>> cache[:, 0].tolist()
    [[12.0, 13.0, 14.0, 15.0], [5.0, 6.0, 7.0, 10.0]]
    """
    skip_slot = -1 if skip_slot is None else checks.sink_slot(skip_slot)
    arrays = (x, cache, slots, cu_query_lens)
    _UPDATE_CONV_STATE.run(arrays, (skip_slot,), _plan_conv, stream)


# --- Checks ---------------------------------------------------------------------------------------


def _arrays(value: Any, name: str) -> tuple[Any, ...]:
    """Return one array, or the two of a sequence."""
    if not isinstance(value, (list, tuple)):
        return (value,)
    if len(value) != 2:
        raise TypeError(f"{name}: expected an array, or two in a tuple, got {len(value)}")
    return tuple(value)


def _require_as_many(
    arrays: Sequence[Any], name: str, others: Sequence[Any], other_name: str
) -> None:
    if len(arrays) != len(others):
        expected = f"{len(others)} arrays like {other_name}" if len(others) > 1 else "one array"
        raise TypeError(f"{name}: expected {expected}, got {len(arrays)}")


def _require_rows(v: ArrayView, name: str) -> None:
    """Raise unless an array has contiguous rows of whole bytes on its first axis."""
    _require_whole_bytes(v, name)
    if v.ndim == 0:
        raise ValueError(f"{name}: expected rows on the first axis, got {describe(v)}")
    contiguous = contiguous_strides(v.shape[1:], v.itemsize)
    steps = zip(v.shape[1:], v.strides[1:], contiguous, strict=True)
    if v.size and any(n > 1 and stride != step for n, stride, step in steps):
        raise ValueError(f"{name}: expected contiguous rows, got strides of {v.strides} bytes")
    if _row_bytes(v) >= 2**31:
        raise ValueError(f"{name}: expected rows of less than 2 GiB, got {describe(v)}")


def _require_whole_bytes(v: ArrayView, name: str) -> None:
    if v.scales is not None:
        raise ValueError(f"{name}: expected elements of whole bytes, got {describe(v)}")


def _pairs(operation: Operation) -> list[tuple[str, str]]:
    """Return the names of the rows and of the cache of each array of a store or a gather."""
    arrays = operation.names[:-1]
    count = len(arrays) // 2
    return list(zip(arrays[:count], arrays[count:], strict=True))


def _row_bytes(v: ArrayView) -> int:
    return prod(v.shape[1:]) * v.itemsize


# --- Stores and gathers ---------------------------------------------------------------------------


class _SlotsPlan(Plan):
    """Work on slots of caches."""

    def __init__(
        self, operation: Operation, caches: Sequence[ArrayView], slots: ArrayView, skip_slot: int
    ) -> None:
        super().__init__(operation, devices.get(slots.device), caches[0].library)
        self.report(slots=faults.below(caches[0].shape[0]))
        self._caches, self._skip_slot = [cache.name for cache in caches], skip_slot

    def access(self, name: str, views: Views) -> observe.Access:
        """Return the slots of caches, and all of other arrays."""
        if name not in self._caches:
            return super().access(name, views)
        return observe.Access(
            views[name], views["slots"], name=name, axes=("slot",), skip_slot=self._skip_slot
        )


class StatePlan(_SlotsPlan):
    """Copies states between rows and the slots of caches: `pairs` of one array, or of two.

    The kernels take the arrays as K and V, and cut long rows into pieces, their heads.
    """

    def __init__(
        self, operation: Operation, kernel: Kernel, pairs: Sequence[tuple[ArrayView, ArrayView]],
        slots: ArrayView, skip_slot: int, alignment: int, allocated: Views,
    ) -> None:  # fmt: skip
        super().__init__(operation, [cache for _, cache in pairs], slots, skip_slot)
        self.allocated, self.zeroed = allocated, False
        pairs = [pair for pair in pairs if _row_bytes(pair[1])]
        if slots.shape[0] and pairs:
            self.load(lambda aligned: [self._launch(kernel, pairs, slots, aligned)], alignment)

    def _launch(
        self, kernel: Kernel, pairs: Sequence[tuple[ArrayView, ArrayView]], slots: ArrayView,
        alignment: int,
    ) -> Launch:  # fmt: skip
        device = self.device
        row_bytes = [_row_bytes(cache) for _, cache in pairs]
        steps = [abs(v.strides[0]) for pair in pairs for v in pair]
        word = widest((*row_bytes, *steps, alignment))
        longest = _PIECE_BYTES_ALONE // word if device.warp_lanes == 1 else _PIECE_WORDS
        pieces = _num_pieces([n // word for n in row_bytes], longest)
        num_rows = slots.shape[0] * pieces
        require_countable(num_rows, "slots")
        geometry = spread(
            num_rows, max(row_bytes) // (word * pieces), device.sm_count,
            warp_lanes=device.warp_lanes,
        )  # fmt: skip
        params: dict[str, Any] = {
            "operation": self.fault_ids["slots"],
            "skip_slot": self._skip_slot, "num_slots": pairs[0][1].shape[0],
            "slot_stride_bytes": slots.strides[0], "index_bytes": slots.itemsize,
            "num_rows": num_rows, "num_heads": pieces, "page_size": 1,
            "lane_shift": geometry.lane_shift, "zeroed_outputs": (1 << len(pairs)) - 1,
        }  # fmt: skip
        pointers: CacheRowsPointers = {"slots": slots}
        for (rows, cache), whole, field in zip(pairs, row_bytes, ("k", "v"), strict=False):
            width = whole // pieces
            params |= {
                f"{field}.width": width,
                f"{field}.token_bytes": rows.strides[0], f"{field}.head_bytes": width,
                f"{field}.cache.page_bytes": cache.strides[0],
                f"{field}.cache.head_bytes": width,
            }  # fmt: skip
        pointers["key"], pointers["k_cache"] = pairs[0]
        if len(pairs) > 1:
            pointers["value"], pointers["v_cache"] = pairs[1]
        return Launch(
            device, kernel.specialise(word), geometry.grid, geometry.block, 0, params, pointers,
            self.operation.names,
        )  # fmt: skip


def _num_pieces(words: Sequence[int], longest: int) -> int:
    """Return how many equal pieces to cut rows of some lengths into, of `longest` words or more.

    >>> _num_pieces([1536, 131072], 512), _num_pieces([1536, 131071], 512)
    (256, 1)
    """
    common = gcd(*words)
    most = min(common, max(words) // longest)
    return next((n for n in range(most, 1, -1) if common % n == 0), 1)


def _plan(
    operation: Operation, kernel: Kernel, alignment: int, skip_slot: int, *, slots: ArrayView,
    **views: ArrayView,
) -> StatePlan:  # fmt: skip
    checks.require_arrays(views, [a.name for a in operation.arguments[:-1] if not a.fresh])
    num_rows = checks.indices(slots, "slots")
    num_slots = None
    allocated: Views = {}
    pairs = []
    for rows_name, cache_name in _pairs(operation):
        cache = views[cache_name]
        _require_rows(cache, cache_name)
        if num_slots is not None and cache.shape[0] != num_slots:
            raise ValueError(f"{cache_name}: expected {num_slots} slots, got {describe(cache)}")
        num_slots = cache.shape[0]
        shape = (num_rows, *cache.shape[1:])
        rows = views.get(rows_name)
        if rows is None:
            rows = call.to_allocate(cache, shape, cache.format, rows_name)
            allocated[rows_name] = rows
        else:
            _require_rows(rows, rows_name)
            checks.require_format(rows, rows_name, cache.format)
            checks.require_shape(rows, rows_name, shape, f" like {cache_name}, a row for each slot")
        pairs.append((rows, cache))
    for a in operation.arguments:
        if a.output and a.name in views:
            checks.require_output(views[a.name], a.name)
    return StatePlan(operation, kernel, pairs, slots, skip_slot, alignment, allocated)


# What is called for one array and for two, with what makes its plan.
_STORES = [(each, partial(_plan, each, COPY)) for each in (_STORE_STATE, _STORE_BOTH)]
_GATHERS = [(each, partial(_plan, each, GATHER_COPY)) for each in (_GATHER_STATE, _GATHER_BOTH)]


# --- Convolutions ---------------------------------------------------------------------------------


class ConvStatePlan(_SlotsPlan):
    """Updates of the states of a convolution."""

    def __init__(
        self, x: ArrayView, cache: ArrayView, slots: ArrayView, cu_query_lens: ArrayView,
        skip_slot: int, alignment: int,
    ) -> None:  # fmt: skip
        super().__init__(_UPDATE_CONV_STATE, [cache], slots, skip_slot)
        self.report(
            slots=faults.below(cache.shape[0]), cu_query_lens=faults.starts(x.shape[0])
        )  # fmt: skip
        if slots.shape[0] and prod(cache.shape[1:]):
            arrays = x, cache, slots, cu_query_lens
            self.load(lambda aligned: [self._launch(*arrays, aligned)], alignment)

    def _launch(
        self, x: ArrayView, cache: ArrayView, slots: ArrayView, cu_query_lens: ArrayView,
        alignment: int,
    ) -> Launch:  # fmt: skip
        device = self.device
        num_slots, channels, length = cache.shape
        token_bytes, x_group_bytes = x.strides
        slot_bytes, cache_group_bytes, input_bytes = cache.strides
        steps = [token_bytes, slot_bytes, input_bytes]
        is_row = channels == 1 or x_group_bytes == cache_group_bytes == x.itemsize
        group_bytes = channels * x.itemsize if is_row else x.itemsize
        if not is_row:
            steps += [x_group_bytes, cache_group_bytes]
        unit = widest((group_bytes, *map(abs, steps), alignment))
        group_shift = 31 if is_row else (group_bytes // unit).bit_length() - 1
        num_units = channels * x.itemsize // unit
        piece = min(num_units, _PIECE_UNITS_ALONE if device.warp_lanes == 1 else _PIECE_UNITS)
        pieces = -(-num_units // piece)
        num_pieces = slots.shape[0] * pieces
        require_countable(num_pieces, "slots")
        geometry = spread(num_pieces, piece, device.sm_count, warp_lanes=device.warp_lanes)
        params = {
            "token_bytes": token_bytes, "x_group_bytes": x_group_bytes, "slot_bytes": slot_bytes,
            "cache_group_bytes": cache_group_bytes, "input_bytes": input_bytes,
            "slot_stride_bytes": slots.strides[0], "slot_index_bytes": slots.itemsize,
            "sum_stride_bytes": cu_query_lens.strides[0],
            "sum_index_bytes": cu_query_lens.itemsize,
            "num_tokens": x.shape[0], "num_slots": num_slots, "skip_slot": self._skip_slot,
            "slot_operation": self.fault_ids["slots"],
            "sum_operation": self.fault_ids["cu_query_lens"],
            "length": length, "num_pieces": num_pieces, "pieces_per_sequence": pieces,
            "num_units": num_units, "group_shift": group_shift, "piece_units": piece,
            "lane_shift": geometry.lane_shift,
        }  # fmt: skip
        pointers = {"x": x, "cache": cache, "slots": slots, "cu_query_lens": cu_query_lens}
        return Launch(
            device, CONV.specialise(unit), geometry.grid, geometry.block, 0, params, pointers,
            self.operation.names,
        )  # fmt: skip


def _plan_conv(
    alignment: int, skip_slot: int, *, x: ArrayView, cache: ArrayView, slots: ArrayView,
    cu_query_lens: ArrayView,
) -> ConvStatePlan:  # fmt: skip
    for v, axes in ((x, ("num_tokens", "channels")), (cache, ("num_slots", "channels", "inputs"))):
        _require_whole_bytes(v, v.name)
        if v.ndim != len(axes):
            raise ValueError(f"{v.name}: expected ({', '.join(axes)}), got {describe(v)}")
    checks.require_format(cache, "cache", x.format)
    if cache.shape[1] != x.shape[1]:
        raise ValueError(f"cache: expected {x.shape[1]} channels like x, got {describe(cache)}")
    checks.require_output(cache, "cache")
    if _row_bytes(cache) >= 2**31:
        raise ValueError(f"cache: expected slots of less than 2 GiB, got {describe(cache)}")
    num_sequences = checks.indices(slots, "slots")
    checks.indices(cu_query_lens, "cu_query_lens")
    hint = ", a sum for each slot and 0"
    checks.require_shape(cu_query_lens, "cu_query_lens", (num_sequences + 1,), hint)
    return ConvStatePlan(x, cache, slots, cu_query_lens, skip_slot, alignment)
