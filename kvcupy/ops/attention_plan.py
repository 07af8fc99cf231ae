"""Which kernels attention takes, and how they are laid over a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import devices, faults, scratch
from ..arrays import ArrayView
from ..devices.protocol import Device, Stream
from ..errors import CompileError
from ..exporters import view
from . import geometry, plan
from .attention_checks import NAMES, Call, Options, check_call
from .attention_kernels import STARTS, STARTS_PARAMS, tiling_of
from .attention_params import ARRAYS, FORMAT_NUMBERS, PARAMS
from .merge_launch import merge_launch

_OUTPUTS = (3, 4)  # of NAMES: out, lse_out
_ALIGNMENT = 256  # of each part of the workspace
_MOST_SPLITS = 128
_KEYS_A_SPLIT = 256  # at least
_BLOCKS_A_MULTIPROCESSOR = 4  # wanted, so that short sequences do not leave it idle
_LOG2_E = math.log2(math.e)

# The addresses of the Params that are arguments under another name, or workspace.
_ARGUMENT_OF = {"lse": "lse_out"}
_WORKSPACE = ("query_starts", "partial_out", "partial_lse")


@dataclass
class AttentionPlan(plan.Plan):
    """Attention for one signature."""

    call: Call
    alignment: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._starts: plan.Launch | None = None
        self._merge: plan.Launch | None = None
        if self.call.num_tokens == 0 or self.call.num_sequences == 0:
            return
        try:
            self._prepare()
        except CompileError as cause:
            self.cause = cause

    def views(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Describe the arrays."""
        return [
            None if name not in self.call.given or self.call.view(name) is None
            else view(array, name)
            for name, array in zip(NAMES, arrays, strict=True)
        ]  # fmt: skip

    def express(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Attend as array expressions."""
        from .attention_expressions import attend

        given = dict(zip(NAMES, self.views(pointers, arrays), strict=True))
        attend(self.device, self.call, {n: v for n, v in given.items() if v is not None})

    def _prepare(self) -> None:
        call, device = self.call, self.device
        tiling = tiling_of(device, call, self.alignment)
        tiles = _num_tiles(call, tiling.rows)
        num_kv_heads = call.k.cache.num_heads
        self._num_splits = _splits(device, call, tiles * num_kv_heads)
        params = _fill(call, self._num_splits, tiling.lanes)
        grid = (tiles, num_kv_heads, self._num_splits)
        self.launches.append(
            plan.Launch(
                device, tiling.specialisation, grid, (tiling.threads, 1, 1), tiling.smem_bytes,
                params, range(len(ARRAYS)),
            )
        )  # fmt: skip
        if call.view("query_lens") is not None:
            self._starts = _starts(device, call)
        sizes = [0, 0, 0]  # of _WORKSPACE
        if self._starts is not None:
            sizes[0] = 4 * (call.num_sequences + 1)
        if self._num_splits > 1:
            self._merge = self._merging()
            rows = self._num_splits * call.num_tokens * call.num_heads
            sizes[1:] = 4 * rows * call.v.cache.width, 4 * rows
        self._places = [0]
        for size in sizes:
            self._places.append(self._places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._used = [size > 0 for size in sizes]

    def _merging(self) -> plan.Launch:
        call = self.call
        out, lse, sinks = (call.view(name) for name in ("out", "lse_out", "sinks"))
        assert out is not None
        return merge_launch(
            self.device,
            num_states=self._num_splits,
            num_tokens=call.num_tokens,
            num_heads=call.num_heads,
            width=call.v.cache.width,
            out_format=out.format,
            out_strides=(out.strides[0], out.strides[1]),
            lse_strides=(0, 0) if lse is None else (lse.strides[0], lse.strides[1]),
            sink_bytes=4 if sinks is None else sinks.strides[0],
            alignment=self.alignment,
        )

    def _enqueue(self, pointers: tuple[int, ...], arrays: tuple[Any, ...], on: Stream) -> None:
        if self.cause is not None:
            super()._enqueue(pointers, arrays, on)
            return
        device, call = self.device, self.call
        given = dict(zip(NAMES, pointers, strict=True))
        keep = arrays
        if any(self._used):
            workspace = scratch.borrow(device, self._places[-1], on)
            keep = (*arrays, workspace)
            for name, place, used in zip(_WORKSPACE, self._places, self._used, strict=False):
                given[name] = workspace.pointer + place if used else 0

        def launch(one: plan.Launch, addresses: tuple[int, ...]) -> None:
            params = one.params(addresses, device.fault_pointer)
            device.launch(one.function, one.grid, one.block, one.smem_bytes, params, on, keep)

        if self._starts is not None:
            launch(self._starts, (given["query_lens"], given["query_starts"]))
        (attend,) = self.launches
        names = (_ARGUMENT_OF.get(name, name) for name in ARRAYS)
        launch(attend, tuple(given.get(name, 0) for name in names))
        if self._merge is not None:
            written = given.get("query_starts", 0)
            launch(
                self._merge,
                (
                    given["partial_out"], given["partial_lse"], given["sinks"],
                    written and written + 4 * call.num_sequences, given["out"], given["lse_out"],
                    0, 0,
                ),
            )  # fmt: skip


def make_plan(given: dict[str, Any], options: Options, alignment: int) -> AttentionPlan:
    """Check the arguments and plan."""
    call = check_call(given, options)
    query = given["query"]
    return AttentionPlan(
        "paged_attention", NAMES, _OUTPUTS, devices.get(query.device), query.library, call,
        alignment,
    )  # fmt: skip


def _num_tiles(call: Call, rows: int) -> int:
    """Return a bound on the tiles of all sequences, as `find_tile` of the kernels numbers them."""
    if call.view("query_lens") is None:
        return call.num_sequences * -(-call.group // rows)
    packed = call.num_tokens * call.group
    geometry.require_countable(packed, "query")
    return packed // rows + call.num_sequences


def _splits(device: Device, call: Call, num_blocks: int) -> int:
    """Return how many splits of the keys occupy the device. Shapes decide, not lengths."""
    window = call.options.window
    most_keys = call.max_keys
    if window:
        most_keys = min(most_keys, window + call.options.sink_keys)
    wanted = _BLOCKS_A_MULTIPROCESSOR * device.multiprocessors // max(1, num_blocks)
    return max(1, min(wanted, most_keys // _KEYS_A_SPLIT, _MOST_SPLITS))


def _starts(device: Device, call: Call) -> plan.Launch:
    lengths = call.view("query_lens")
    assert lengths is not None
    lanes = 1 if device.warp_lanes == 1 else 32
    params = np.zeros((), STARTS_PARAMS)
    params["length_bytes"], params["index_bytes"] = lengths.strides[0], lengths.itemsize
    params["operation"] = faults.operation_id("paged_attention", "query_lens")
    params["num_sequences"], params["num_tokens"] = call.num_sequences, call.num_tokens
    return plan.Launch(
        device, STARTS[lanes].specialise(lanes), (1, 1, 1), (lanes, 1, 1), 0, params, range(2)
    )


def _fill(call: Call, num_splits: int, lanes: int) -> np.ndarray[Any, Any]:
    """Return the Params of a call without its addresses."""
    params = np.zeros((), PARAMS)
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
    params["query_format"] = params["out_format"] = FORMAT_NUMBERS[query.format]
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
