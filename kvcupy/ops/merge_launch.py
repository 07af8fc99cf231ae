"""The Params of `kernels_src/merge.cu`, and launches of it: for `merge_states` and other plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import contiguous_strides
from ..devices.protocol import Device
from ..formats import FORMATS, Format
from ..kernels import Kernel, Specialisation, zeroed
from . import geometry, plan

_POINTERS = ("out_a", "lse_a", "out_b", "lse_b", "sinks", "num_valid", "out", "lse")
_ROWS = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")

_STRIDES = np.dtype([("token_bytes", np.int64), ("head_bytes", np.int64)], align=True)

PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*_POINTERS, "faults")),
        *((f"{name}_rows", _STRIDES) for name in _ROWS),
        ("out_state_bytes", np.int64),
        ("lse_state_bytes", np.int64),
        ("sink_bytes", np.int64),
        ("num_states", np.int32),
        ("num_rows", np.int32),
        ("num_heads", np.int32),
        ("width", np.int32),
        ("base_two", np.int32),
        ("lane_shift", np.int32),
    ],
    align=True,
)

# By whether several threads share a row: they wait for one another before its lse is written.
MERGE = {
    shared: Kernel("merge.cu", "merge_states", PARAMS, "MergeParams", barriers=shared)
    for shared in (True, False)
}

STATES = 8  # in flight a thread, where there are more than two
MERGED = ("fp32", "fp16", "bf16")


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a GPU is asked for."""
    return [
        MERGE[True].specialise(FORMATS[source].ctype, FORMATS[target].ctype, count, states)
        for source in MERGED
        for target in MERGED
        if source in (target, "fp32")
        for count in (_pack(FORMATS[source]), 1)
        for states in (2, STATES)
    ]


def merge_launch(
    device: Device,
    *,
    num_states: int,
    num_tokens: int,
    num_heads: int,
    width: int,
    out_format: str,
    out_strides: tuple[int, int],
    lse_strides: tuple[int, int] = (0, 0),
    sink_bytes: int = 4,
    alignment: int,
    pointers: Sequence[int | None] = range(6),
) -> plan.Launch:
    """Load and lay out the merge of float32 partial results, for another operation's plan.

    Parameters
    ----------
    num_states, num_tokens, num_heads, width : the shape of the partial results
    out_format : "fp32", "fp16" or "bf16"
    out_strides, lse_strides : of out and lse, bytes between tokens and between heads
    sink_bytes : bytes between heads of the sinks
    alignment : of the addresses of partial_out and out, as `plan.alignment` gives it
    pointers : for each of these arrays, the index of its address among those that the launch will
        be given, or None where there is none:

        0. partial_out, float32 (num_states, num_tokens, num_heads, width), contiguous
        1. partial_lse, float32 (num_states, num_tokens, num_heads), contiguous, natural logarithms
        2. sinks, float32 (num_heads,), or None: logits that join the denominator and the lse
        3. num_valid, int32 (1,), or None: tokens past so many are left alone
        4. out (num_tokens, num_heads, width)
        5. lse, float32 (num_tokens, num_heads), or None

    Raises
    ------
    CompileError : the kernel cannot be compiled

    Notes
    -----
    A partial lse of minus infinity stands for a state that saw no key: its output is not read. The
    launch is legal in a capture; it allocates nothing.
    """
    partial_out, partial_lse, sinks, num_valid, out, lse = pointers
    out_steps = contiguous_strides((num_states, num_tokens, num_heads, width), 4)
    lse_steps = contiguous_strides((num_states, num_tokens, num_heads), 4)
    params = zeroed(PARAMS)
    params["num_states"], params["sink_bytes"] = num_states, sink_bytes
    params["out_state_bytes"], params["lse_state_bytes"] = out_steps[0], lse_steps[0]
    params["out_a_rows"], params["lse_a_rows"] = out_steps[1:3], lse_steps[1:]
    params["out_rows"], params["lse_rows"] = out_strides, lse_strides
    return launch(
        device, params, FORMATS["fp32"], FORMATS[out_format], (num_tokens, num_heads, width),
        alignment, (partial_out, partial_lse, None, None, sinks, num_valid, out, lse),
    )  # fmt: skip


def launch(
    device: Device,
    params: Any,
    source: Format,
    target: Format,
    shape: tuple[int, ...],
    alignment: int,
    pointers: Sequence[int | None],
) -> plan.Launch:
    """Lay out a launch whose strides and states are in `params`."""
    num_tokens, num_heads, width = shape
    ratio = source.itemsize // target.itemsize  # a pack of out is so much less than a word
    strides = [
        *params["out_a_rows"].item(), *params["out_b_rows"].item(),
        *(n * ratio for n in params["out_rows"].item()), int(params["out_state_bytes"]),
    ]  # fmt: skip
    pack = _pack(source)
    packs = width % pack == 0 and geometry.widest((alignment, *map(abs, strides))) == 16
    count = pack if packs else 1
    num_rows = num_tokens * num_heads
    geometry.require_countable(num_rows, "out_a")
    laid = geometry.spread(
        num_rows,
        width // count,
        device.sm_count,
        warp_lanes=device.warp_lanes,
        most_lanes=32,
    )
    params["num_rows"], params["num_heads"], params["width"] = num_rows, num_heads, width
    params["lane_shift"] = laid.lane_shift
    states = 2 if params["num_states"] <= 2 else STATES
    specialisation = MERGE[laid.lanes > 1].specialise(source.ctype, target.ctype, count, states)
    return plan.Launch(device, specialisation, laid.grid, laid.block, 0, params, pointers)


def _pack(source: Format) -> int:
    """Return how many elements a thread loads at a time: 16 bytes."""
    return 16 // source.itemsize
