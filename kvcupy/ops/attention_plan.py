"""Which kernels attention takes, and how they are laid over a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import devices, faults, scratch
from ..arrays import ArrayView, view
from ..devices.protocol import Device, Stream
from ..errors import CompileError
from ..kernels import zeroed
from . import geometry, plan
from .attention_checks import Call, Options, check_call
from .attention_kernels import STARTS, STARTS_PARAMS, tiling_of
from .attention_params import ARRAYS, fill
from .merge_launch import merge_launch

_ALIGNMENT = 256  # of each part of the workspace
_MOST_SPLITS = 128
_KEYS_A_SPLIT = 256  # at least
_BLOCKS_A_MULTIPROCESSOR = 4  # wanted, so that short sequences do not leave it idle

# What a call has addresses of beside its arguments; the last is the end of the first.
_WORKSPACE = ("query_starts", "partial_out", "partial_lse")
_NUM_VALID = "num_valid"


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
            else view(array)
            for name, array in zip(self.names, arrays, strict=True)
        ]  # fmt: skip

    def express(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Attend as array expressions."""
        from .attention_expressions import attend

        given = dict(zip(self.names, self.views(pointers, arrays), strict=True))
        attend(self.device, self.call, {n: v for n, v in given.items() if v is not None})

    def _prepare(self) -> None:
        call, device = self.call, self.device
        tiling = tiling_of(device, call, self.alignment)
        tiles = _num_tiles(call, tiling.rows)
        num_kv_heads = call.k.cache.num_heads
        self._num_splits = _splits(device, call, tiles * num_kv_heads)
        params = fill(call, self._num_splits, tiling.lanes)
        grid = (tiles, num_kv_heads, self._num_splits)
        self.launches.append(
            plan.Launch(
                device, tiling.specialisation, grid, (tiling.threads, 1, 1), tiling.smem_bytes,
                params, self._places_of(*ARRAYS),
            )
        )  # fmt: skip
        if call.view("query_lens") is not None:
            self._starts = _starts(device, call, self._places_of("query_lens", "query_starts"))
        sizes = [0, 0, 0]  # of _WORKSPACE
        if self._starts is not None:
            sizes[0] = 4 * (call.num_sequences + 1)
        if self._num_splits > 1:
            self._merge = self._merging()
            rows = self._num_splits * call.num_tokens * call.num_heads
            sizes[1:] = 4 * rows * call.v.cache.width, 4 * rows
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._workspace_bytes = places[-1]
        self._workspace = (*places[: len(sizes)], 4 * call.num_sequences)
        issues = (self._starts, *self.launches, self._merge)
        self._issues = [one for one in issues if one is not None]

    def _places_of(self, *arrays: str) -> list[int | None]:
        """Return where the addresses of arrays of the Params are among those of a call."""
        known = {name: i for i, name in enumerate((*self.names, *_WORKSPACE, _NUM_VALID))}
        known["lse"] = known["lse_out"]
        if self._num_splits == 1:
            del known["partial_out"], known["partial_lse"]
        if self.call.view("query_lens") is None:
            del known["query_starts"], known[_NUM_VALID]
        return [known.get(name) for name in arrays]

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
            pointers=self._places_of(
                "partial_out", "partial_lse", "sinks", _NUM_VALID, "out", "lse"
            ),
        )

    def _enqueue(self, pointers: tuple[int, ...], arrays: tuple[Any, ...], on: Stream) -> None:
        if self.cause is not None:
            super()._enqueue(pointers, arrays, on)
            return
        device, keep, addresses = self.device, arrays, pointers
        if self._workspace_bytes:
            workspace = scratch.borrow(device, self._workspace_bytes, on)
            keep = (*arrays, workspace)
            start = workspace.pointer
            addresses = (*pointers, *(start + place for place in self._workspace))
        for one in self._issues:
            params = one.params(addresses, device.fault_pointer)
            device.launch(one.function, one.grid, one.block, one.smem_bytes, params, on, keep)


def make_plan(
    names: tuple[str, ...], given: dict[str, Any], options: Options, alignment: int
) -> AttentionPlan:
    """Check the arguments and plan; `names` are those of all arrays, given or not."""
    call = check_call(given, options)
    query = given["query"]
    outputs = names.index("out"), names.index("lse_out")
    return AttentionPlan(
        "paged_attention", names, outputs, devices.get(query.device), query.library, call,
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
    wanted = _BLOCKS_A_MULTIPROCESSOR * device.sm_count // max(1, num_blocks)
    return max(1, min(wanted, most_keys // _KEYS_A_SPLIT, _MOST_SPLITS))


def _starts(device: Device, call: Call, pointers: list[int | None]) -> plan.Launch:
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
