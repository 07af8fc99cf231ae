"""Merge states of attention: outputs over different keys, by their log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np

from .. import devices
from ..arrays import ArrayView, describe
from ..devices.protocol import Device
from ..formats import FORMATS, LseBase
from ..kernels import Kernel, Specialisation
from . import call, checks
from .call import Operation, Plan, Views
from .launch import Geometry, Launch, Pointer, fields_of, require_countable, spread, widest
from .spec import Argument

_SHAPE, _SUMS = "tokens kv_heads head_dim", "tokens kv_heads"


def _merged_like(
    arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and format of the outputs that a merge allocates."""
    out_a = arguments["out_a"]
    shape = tuple(out_a.shape if "out_b" in arguments else out_a.shape[1:])
    outputs = {"out": (shape, out_a.format), "lse_out": (shape[:2], "fp32")}
    return {name: each for name, each in outputs.items() if name not in arguments}


_MERGE_STATES = Operation(
    "merge_states",
    Argument("out_a", _SHAPE, words=True), Argument("out_b", _SHAPE, words=True, optional=True),
    Argument(
        "out", _SHAPE, output=True, fresh=True, words=True, replaces=("out_a", "out_b"),
        returned=True,
    ),
    Argument("lse_a", _SUMS), Argument("lse_b", _SUMS, optional=True),
    Argument(
        "lse_out", _SUMS, output=True, fresh=True, replaces=("lse_a", "lse_b"), returned=True
    ),
    outputs_of=_merged_like,
)  # fmt: skip

_ROWS = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")

_STRIDES = np.dtype([("token_bytes", np.int64), ("head_bytes", np.int64)], align=True)


class MergePointers(TypedDict, total=False):
    """The pointers of MergeParams in kernels_src/merge.cu."""

    out_a: Pointer
    lse_a: Pointer
    out_b: Pointer
    lse_b: Pointer
    sinks: Pointer
    split_tiles: Pointer
    out: Pointer
    lse: Pointer
    faults: Pointer


# MergeParams
PARAMS = np.dtype(
    [
        *fields_of(np.uint64, MergePointers.__annotations__),
        *((f"{name}_rows", _STRIDES) for name in _ROWS),
        *fields_of(np.int64, "out_state_bytes lse_state_bytes sink_bytes"),
        *fields_of(
            np.int32,
            "num_states num_rows num_heads group state_rows width base_two lane_shift stripe_shift",
        ),
    ],
    align=True,
)

# Of two states and of more; by whether several threads share a row: they wait for one another.
MERGE, MERGE_MANY = (
    {
        shared: Kernel("merge.cu", name, PARAMS, "MergeParams", barriers=shared)
        for shared in (True, False)
    }
    for name in ("merge_states", "merge_many")
)

_STATES = 8  # kStates of the kernel: in flight
_MAX_LANES, _MAX_THREADS = 128, 256  # of a row of many states
_MAX_BLOCKS_PER_SM = 2  # with more rows, there are enough warps to hide latency
_TILE_BLOCKS_PER_SM = 8  # which go through the rows of all tiles that there may be
_SHARES = 3 * _MAX_THREADS // 32  # words of RowShares
MERGED = ("fp32", "fp16", "bf16")


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a GPU is asked for."""
    return [
        kernel[True].specialise(FORMATS[source].ctype, FORMATS[target].ctype, count, *block)
        for source in MERGED
        for target in MERGED
        if source in (target, "fp32")
        for count in (_pack(source), 1)
        for kernel, *block in ((MERGE,), (MERGE_MANY, False), (MERGE_MANY, True))
    ]


@_MERGE_STATES.public
def merge_states(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    out: Any = None,
    lse_out: Any = None,
    lse_base: LseBase = "e",
    stream: Any = None,
) -> tuple[Any, Any]:
    """Combine the attention of the same queries over different keys into that over all of them.

    Parameters
    ----------
    out_a, out_b : outputs of attention, (T, Hq, Dv) fp32, fp16 or bf16
    lse_a, lse_b : float32 (T, Hq), logarithms of the sums of exp(score); of any strides. Minus
        infinity: that state saw no key, and its output, which may hold anything, is not read
    out : (T, Hq, Dv) of out_a's format, written in place; it may be out_a or out_b itself. float32
        states also merge into fp16 or bf16. None: allocated, like out_a
    lse_out : float32 (T, Hq), written in place; it may be lse_a or lse_b itself
    lse_base : "e" or "2", of the logarithms in and out
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Returns
    -------
    (out, lse) : the outputs; allocated ones are of out_a's library. Where no state saw a key, 0 and
        minus infinity

    Raises
    ------
    TypeError, ValueError : an argument does not fit, or an output is part of an input without being
        the same memory; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    To merge N states at once give out_a (N, T, Hq, Dv), lse_a (N, T, Hq) and None for out_b, lse_b.
    Weights are exp(lse - largest lse) over their sum, in float32; each output is rounded once.
    Cascade: attend a prefix that sequences share once, with all their queries as one sequence over
    its pages and `causal=False`, and merge that with the attention of each over its remaining keys.
    Stream: one kernel, in order. Capture: legal with both outputs given. Bytes: each row of a state
    read once, each row of out written once. Source: FlashInfer `merge_state` (base 2), vLLM
    `merge_attn_states` (base e); Milakov and Gimelshein 2018, online normaliser of softmax.

    Examples
    --------
    >>> out_a, out_b = np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), 5, np.float32)
    >>> lse_a, lse_b = np.zeros((1, 1), np.float32), np.full((1, 1), np.log(3), np.float32)
    >>> out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    >>> out.round(4).tolist(), np.exp(lse).round(4).tolist()
    ([[[4.0, 4.0]]], [[4.0]])
    """
    arrays = (out_a, out_b, out, lse_a, lse_b, lse_out)
    outputs: tuple[Any, Any] = _MERGE_STATES.run(arrays, (lse_base,), _plan, stream)
    return outputs


class States(NamedTuple):
    """Outputs of attention, (T, Hq, Dv), and the logarithms of their sums, (T, Hq).

    Inputs of more than two states have those on their first axis.
    """

    out: ArrayView
    lse: ArrayView


class MergePlan(Plan):
    """A merge of two states, or of several on the first axis of `a`."""

    def __init__(
        self, a: States, b: States | None, merged: States, allocated: Views, lse_base: str,
        alignment: int,
    ) -> None:  # fmt: skip
        super().__init__(_MERGE_STATES, devices.get(a.out.device), a.out.library)
        self.allocated, self.lse_base = allocated, lse_base
        self.zeroed = False  # the kernel writes every element
        if merged.lse.size:
            self.load(lambda aligned: [self._launch(a, b, merged, aligned)], alignment)

    def _launch(self, a: States, b: States | None, merged: States, alignment: int) -> Launch:
        params: dict[str, Any] = {
            "num_states": 2, "num_heads": merged.out.shape[1], "base_two": self.lse_base == "2",
            **row_strides("out_a", a.out.strides[-3:-1]),
            **row_strides("lse_a", a.lse.strides[-2:]),
            **row_strides("out", merged.out.strides[:2]),
            **row_strides("lse", merged.lse.strides),
        }  # fmt: skip
        pointers: MergePointers = {
            "out_a": a.out, "lse_a": a.lse, "out": merged.out, "lse": merged.lse
        }  # fmt: skip
        if b is not None:
            params |= row_strides("out_b", b.out.strides[:2]) | row_strides("lse_b", b.lse.strides)
            pointers["out_b"], pointers["lse_b"] = b.out, b.lse
        else:
            params["num_states"] = a.out.shape[0]
            params["out_state_bytes"] = a.out.strides[0]
            params["lse_state_bytes"] = a.lse.strides[0]
        num_rows = merged.out.shape[0] * merged.out.shape[1]
        return merge_launch(
            self.device, params, a.out.format, merged.out.format, num_rows, merged.out.shape[2],
            alignment, pointers, self.operation.names,
        )  # fmt: skip


def row_strides(field: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Return the fields of Params for the strides of tokens and heads of an array."""
    token_bytes, head_bytes = strides
    return {f"{field}_rows.token_bytes": token_bytes, f"{field}_rows.head_bytes": head_bytes}


def merge_launch(
    device: Device, params: dict[str, Any], source: str, target: str, num_rows: int, width: int,
    alignment: int, pointers: MergePointers, names: tuple[str, ...],
) -> Launch:  # fmt: skip
    """Load and lay out a launch, also for the plan of an operation whose states are in a workspace.

    `params` has strides, states and heads, and where tiles have states `group`, `state_rows` and
    `sink_bytes`. `source` and `target` are the formats of the states and of `out`. With the pointer
    `split_tiles`, SplitTile (num_tiles,), rows of a tile are merged from as many states as it has;
    `sinks` and `lse` may be left out. CompileError if the kernel cannot be compiled.
    """
    # A pack of out is smaller than a word where it is rounded to fewer bytes.
    ratio = FORMATS[source].itemsize // FORMATS[target].itemsize
    steps = [alignment, params.get("out_state_bytes", 0)]
    for field, factor in (("out_a", 1), ("out_b", 1), ("out", ratio)):
        for axis in ("token_bytes", "head_bytes"):
            steps.append(factor * params.get(f"{field}_rows.{axis}", 0))
    pack = _pack(source)
    count = pack if width % pack == 0 and widest(map(abs, steps)) == 16 else 1
    if device.warp_lanes == 1 and count > 1:  # for each pack, a thread finds all weights again
        count = max(count, math.gcd(width, _MAX_HOST_PACK))
    require_countable(num_rows, "out_a")
    num_states = params["num_states"]
    words = width // count
    geometry = spread(num_rows, words, device.sm_count, warp_lanes=device.warp_lanes, max_lanes=32)
    stripes = 1
    if (
        num_states > 2
        and device.warp_lanes > 1
        and num_rows <= _MAX_BLOCKS_PER_SM * device.sm_count
    ):
        stripes, geometry = _spread_states(num_rows, words, num_states) or (1, geometry)
    params |= {"num_rows": num_rows, "width": width}
    params |= {"lane_shift": geometry.lane_shift, "stripe_shift": stripes.bit_length() - 1}
    threads = geometry.lanes * stripes
    has_block = threads > 32
    grid = geometry.grid
    if "split_tiles" in pointers and num_states > 2 and 1 < threads <= 32:
        grid = min(grid[0], _TILE_BLOCKS_PER_SM * device.sm_count), 1, 1
    kernels, block = (MERGE, []) if num_states <= 2 else (MERGE_MANY, [has_block])
    ctypes = FORMATS[source].ctype, FORMATS[target].ctype
    specialisation = kernels[threads > 1].specialise(*ctypes, count, *block)
    smem_bytes = 4 * (_SHARES + threads * count) if has_block else 0
    return Launch(device, specialisation, grid, geometry.block, smem_bytes, params, pointers, names)


def _spread_states(num_rows: int, words: int, num_states: int) -> tuple[int, Geometry] | None:
    """Give each row a block, if a warp would have much to do: stripes of lanes share its states.

    A stripe takes at least as many states as it has in flight.
    """
    lanes = min(1 << max(0, words - 1).bit_length(), _MAX_LANES)
    stripes = 1 << max(1, num_states // _STATES).bit_length() - 1
    stripes = min(stripes, _MAX_THREADS // lanes)
    if lanes * stripes <= 32:
        return None
    return stripes, Geometry(lanes, (num_rows, 1, 1), (lanes * stripes, 1, 1))


_MAX_HOST_PACK = 64  # elements


def _pack(format: str) -> int:
    """Return how many elements a thread loads at a time: 16 bytes."""
    return 16 // FORMATS[format].itemsize


def _plan(
    alignment: int, lse_base: Any, *, out_a: ArrayView, lse_a: ArrayView,
    out_b: ArrayView | None = None, lse_b: ArrayView | None = None, out: ArrayView | None = None,
    lse_out: ArrayView | None = None,
) -> MergePlan:  # fmt: skip
    a, b = States(out_a, lse_a), None
    if out_b is not None and lse_b is not None:
        b = States(out_b, lse_b)
    elif out_b is not None or lse_b is not None:
        missing = "out_b" if out_b is None else "lse_b"
        raise TypeError(f"{missing}: expected an array, got None")
    shape = _shape_of_result(out_a, several=b is None)
    allocated: Views = {}
    if out is None:
        out = allocated["out"] = call.to_allocate(out_a, shape, out_a.format, "out")
    if lse_out is None:
        lse_out = allocated["lse_out"] = call.to_allocate(out_a, shape[:2], "fp32", "lse_out")
    merged = States(out, lse_out)
    if not isinstance(lse_base, str) or lse_base not in ("e", "2"):
        raise ValueError(f'lse_base: expected "e" or "2", got {lse_base!r}')
    for states, expected in ((a, out_a.shape), (b, shape), (merged, shape)):
        if states is None:
            continue
        v = states.out
        widens = states is merged and out_a.format == "fp32" and v.format in MERGED
        format = v.format if widens else out_a.format
        checks.require_format(v, v.name, format, expected=format)
        checks.require_shape(v, v.name, expected, f" {format}")
        if v.size:
            checks.require_contiguous(v, v.name)
        checks.require_format(states.lse, states.lse.name, "fp32", expected="fp32")
        checks.require_shape(states.lse, states.lse.name, expected[:-1], " fp32")
    for v in merged:
        checks.require_output(v, v.name)
    return MergePlan(a, b, merged, allocated, str(lse_base), alignment)


def _shape_of_result(out_a: ArrayView, *, several: bool) -> tuple[int, ...]:
    """Check format and shape of the first array; return the shape of the output."""
    if checks.number_format(out_a, "out_a").name not in MERGED:
        raise TypeError(f"out_a: expected {', '.join(MERGED)}, got {describe(out_a)}")
    if out_a.ndim != (4 if several else 3):
        axes = "(states, tokens, heads, width)" if several else "(tokens, heads, width)"
        raise ValueError(f"out_a: expected {axes}, got {describe(out_a)}")
    if several and out_a.shape[0] == 0:
        raise ValueError(f"out_a: expected at least one state, got {describe(out_a)}")
    return out_a.shape[-3:]
