"""Attention over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import devices, faults, scratch
from ..arrays import ArrayView, describe
from ..devices.protocol import Device, Stream
from ..errors import CompileError
from ..exporters import view
from . import checks, expressions, outputs, plan
from .attention_kernels import (
    ARRAYS,
    Call,
    Options,
    fill,
    num_tiles,
    splits,
    starts_launch,
    tiling_of,
)
from .merge_launch import merge_launch
from .side import Side

NAMES = (
    "query", "k_cache", "v_cache", "out", "lse_out", "block_table", "seq_lens", "query_lens",
    "k_scale", "v_scale", "k_scale_cache", "v_scale_cache", "sinks", "tree_mask",
)  # fmt: skip
NUM_ROWS = 4  # of these, what is read or written in words

# With what `attend` has beside them; of these, one more is read in words.
ALL_NAMES = (
    "rope_table", *NAMES, "hole_starts", "holes", "key_starts", "tree_lens", "tail_positions",
)  # fmt: skip

_WIDEST = 768  # elements of a row that a warp, or a thread of the host device, has registers for


def paged_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    query_lens: Any = None,
    layout: str = "NHD",
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Any = None,
    logits_soft_cap: float | None = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    out: Any = None,
    lse_out: Any = None,
    stream: Any = None,
) -> Any:
    """Attend with the last tokens of sequences over the pages of each.

    Parameters
    ----------
    query : fp32, fp16 or bf16 (T, Hq, D), the new tokens of all sequences, one after another
    k_cache, v_cache : any format, (num_pages, page_size, H, D) and (..., Dv) in the layout; widths
        up to 768. Hq is a multiple of H. For MLA, both are views of one latent cache, H = 1
    block_table : int32 or int64 (B, max_pages), the pages of each sequence; entries past its end
        are not read. A negative page is not seen; one past the end likewise, and raised by
        `check_faults`
    seq_lens : int32 or int64 (B,), the new tokens included, which are in the cache already
    query_lens : int32 or int64 (B,), new tokens of each sequence; None: one each. T may be more
        than their sum: what is beyond is left alone
    layout : "NHD" or "HND"
    sm_scale : what scores are multiplied by; None: 1 / sqrt(D)
    causal : a query sees its own position and those before, not those after; where it is False,
        sequences may have more new tokens than keys
    window : a query at position p sees keys p - window + 1 to p
    sinks : an int, how many of the first keys stay visible past the window; or float32 logits
        (Hq,) that join the denominator, unscaled, and bring no value
    logits_soft_cap : scores become cap * tanh(score / cap)
    tree_mask : bool (T, max(query_lens)), which new tokens of its sequence each query sees; all
        older tokens are visible. It takes the place of `causal`
    k_scale, v_scale, k_scale_cache, v_scale_cache : as in `store_kv`, of a quantised cache
    out : (T, Hq, Dv) of the query's format or float32, written in place; None: allocated, of the
        query's, zero where nothing is written
    lse_out : float32 (T, Hq), written in place: the natural logarithm of the sum of exponentials
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Returns
    -------
    (T, Hq, Dv) : `out`, or an array of the query's library

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Arithmetic is float32, the output is rounded once. A query that sees no key gives 0, and -inf
    in `lse_out`. Stream: up to three kernels, in order. Capture: legal with outputs given; grid and
    workspace depend on shapes alone. Bytes: visible K and V once for all query heads of a KV head
    in decode. Source: FlashInfer, Ye et al. 2025; Flash-Decoding, Dao et al. 2023.

    Examples
    --------
    >>> import numpy as np
    >>> k, v = np.ones((4, 2, 1, 8), np.float32), np.arange(64, dtype=np.float32)
    >>> query = np.ones((1, 2, 8), np.float32)
    >>> out = paged_attention(query, k, v.reshape(4, 2, 1, 8), np.array([[2, 0]]), np.array([3]))
    >>> float(out[0, 1, 0])  # the mean of 32, 40 and 0, over pages 2 and 0
    24.0
    """
    options = Options.of(layout, sm_scale, causal, window, sinks, logits_soft_cap)
    if out is None:
        out = _allocate(query, v_cache, stream)
    learned = sinks if checks.is_array(sinks) else None
    arrays = (
        query, k_cache, v_cache, out, lse_out, block_table, seq_lens, query_lens, k_scale, v_scale,
        k_scale_cache, v_scale_cache, learned, tree_mask,
    )  # fmt: skip
    return _issue(NAMES, NUM_ROWS, arrays, options, out, stream)


def attend(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    query_lens: Any = None,
    layout: str = "NHD",
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Any = None,
    logits_soft_cap: float | None = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    hole_starts: Any = None,
    holes: Any = None,
    key_starts: Any = None,
    tree_lens: Any = None,
    rope_table: Any = None,
    interleaved: bool = False,
    rotary_start: int = 0,
    tail_positions: Any = None,
    out: Any = None,
    lse_out: Any = None,
    stream: Any = None,
) -> Any:
    """Attend as `paged_attention` does, over what a cache of several steps makes of its pages.

    Parameters
    ----------
    hole_starts, holes : int32 (B,), both or neither: the key at position p lies at slot p of the
        pages of sequence b, or from position hole_starts[b] on at slot p + holes[b]. Only this goes
        by slots; masks, window, sinks and lengths go by positions
    key_starts : int32 (B,), keys before it are not looked at, sinks among them
    tree_lens : int32 (B,), with `tree_mask`, which then decides about the last tree_lens[b] keys:
        column c is about key seq_lens[b] - tree_lens[b] + c. Not less than the new tokens of a
        sequence, or 0: this one is as without a mask. None: `query_lens`
    rope_table : float32 (max_positions, rotary_dim), see `kvcupy.rope_table`: keys are cached raw,
        and elements rotary_start to rotary_start + rotary_dim - 1 of each turn by its position
        before the score. The query comes turned. Positions past the table are its last
    interleaved : pairs that turn together are neighbours, not halves apart
    rotary_start : see `rope_table`
    tail_positions : int32 (B, max(tree_lens)), positions by which the keys that `tree_mask` decides
        about turn, in place of their own

    Notes
    -----
    All else, what is raised among it, is as in `paged_attention`. Negative entries of the counts
    are 0. Keys of a 16-bit cache are rounded once they have turned, where tensor cores meet them.
    """
    options = Options.of(
        layout, sm_scale, causal, window, sinks, logits_soft_cap, interleaved, rotary_start
    )
    if out is None:
        out = _allocate(query, v_cache, stream)
    learned = sinks if checks.is_array(sinks) else None
    arrays = (
        query, k_cache, v_cache, out, lse_out, block_table, seq_lens, query_lens, k_scale, v_scale,
        k_scale_cache, v_scale_cache, learned, tree_mask,
    )  # fmt: skip
    more = (hole_starts, holes, key_starts, tree_lens, tail_positions)
    if rope_table is None and all(array is None for array in more):
        return _issue(NAMES, NUM_ROWS, arrays, options, out, stream)
    return _issue(ALL_NAMES, NUM_ROWS + 1, (rope_table, *arrays, *more), options, out, stream)


def _issue(
    names: tuple[str, ...], num_rows: int, arrays: tuple[Any, ...], options: Options, out: Any,
    stream: Any,
) -> Any:  # fmt: skip
    """Run the plan of a call; of its arrays, the first `num_rows` are read or written in words."""
    pointers, made = plan.obtain(
        "paged_attention", names, arrays, num_rows, (options,),
        lambda given, alignment: make_plan(names, given, options, alignment),
    )  # fmt: skip
    assert isinstance(made, AttentionPlan)
    made.run(pointers, arrays, stream)
    return out


def _allocate(query: Any, v_cache: Any, stream: Any) -> Any:
    """Allocate the output; other arguments that do not fit are told by the checks of the plan."""
    rows, cache = view(query, "query"), view(v_cache, "v_cache")
    check_query(rows)
    width = cache.shape[-1] if cache.ndim else 0
    return outputs.zeros(rows, (*rows.shape[:2], width), rows.format, stream)


# --- Checks ---------------------------------------------------------------------------------------


def check_call(given: dict[str, Any], options: Options) -> Call:
    """Check all arguments; `out` is among them."""
    checks.require_given(given, ("query", "k_cache", "v_cache", "block_table", "seq_lens"))
    checks.require_same_device(given)
    query = given["query"]
    check_query(query)
    num_tokens, num_heads, _ = query.shape
    k, v = (_side(given, prefix, options.layout) for prefix in "kv")
    _require_caches(given, k, v)
    num_kv_heads, width = k.cache.num_heads, k.cache.width
    if query.shape[2] != width:
        raise ValueError(
            f"query: expected width {width} like k_cache {describe(given['k_cache'])}, "
            f"got {describe(query)}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"query: expected a multiple of the {num_kv_heads} heads of k_cache, got {num_heads}"
        )
    num_sequences, max_pages = _table(given, num_tokens)
    _outputs(given, num_tokens, num_heads, v.cache.width)
    _sinks(given, num_heads)
    _tree_mask(given, num_tokens)
    check_sequences(given, num_sequences)
    check_rope(given, options.rotary_start, width, num_sequences)
    return Call(given, options, k, v, num_tokens, num_heads, num_sequences, max_pages)


def check_query(query: ArrayView, name: str = "query") -> None:
    """Refuse what is no query, whatever else is given."""
    if query.format not in ("fp32", "fp16", "bf16"):
        raise TypeError(f"{name}: expected fp32, fp16 or bf16, got {describe(query)}")
    if query.ndim != 3 or 0 in query.shape[1:]:
        raise ValueError(
            f"{name}: expected (tokens, heads, width) of at least one head and element, "
            f"got {describe(query)}"
        )
    checks.require_contiguous(query, name)


def _side(given: dict[str, Any], prefix: str, layout: str) -> Side:
    name = f"{prefix}_cache"
    form = checks.number_format(given[name], name)
    if given[name].ndim not in (3, 4):
        raise ValueError(
            f"{name}: expected (num_pages, page_size, heads, width) by layout, "
            f"got {describe(given[name])}"
        )
    cache = checks.cache(given[name], name, layout, 3, written=False)
    if 0 in (cache.num_heads, cache.width):
        raise ValueError(f"{name}: expected heads and width, got {describe(given[name])}")
    if cache.width > _WIDEST:
        raise ValueError(f"{name}: expected rows of at most {_WIDEST}, got {cache.width}")
    static = given.get(f"{prefix}_scale")
    scale = checks.scale(static, f"{prefix}_scale", cache.num_heads, form)
    own = checks.scale_cache(
        given.get(f"{prefix}_scale_cache"), f"{prefix}_scale_cache", (f"{prefix}_scale", static),
        cache, form, written=False,
    )  # fmt: skip
    rows = checks.Rows(0, cache.num_heads, cache.width, 0, 0)
    return Side(rows, cache, form, form, scale, own)


def _require_caches(given: dict[str, Any], k: Side, v: Side) -> None:
    if (v.cache.num_slots, v.cache.page_size, v.cache.num_heads) != (
        k.cache.num_slots, k.cache.page_size, k.cache.num_heads
    ):  # fmt: skip
        raise ValueError(
            f"v_cache: expected pages and heads as in k_cache {describe(given['k_cache'])}, "
            f"got {describe(given['v_cache'])}"
        )


def _table(given: dict[str, Any], num_tokens: int) -> tuple[int, int]:
    """Check the table and the lengths; return how many sequences, and pages a row, there are."""
    table, seq_lens = given["block_table"], given["seq_lens"]
    if table.format not in ("int32", "int64"):
        raise TypeError(f"block_table: expected int32 or int64, got {describe(table)}")
    if table.ndim != 2:
        raise ValueError(f"block_table: expected (sequences, max_pages), got {describe(table)}")
    num_sequences, max_pages = table.shape
    if checks.length_of(seq_lens, "seq_lens") != num_sequences:
        raise ValueError(
            f"seq_lens: expected {num_sequences} like block_table, got {describe(seq_lens)}"
        )
    query_lens = given.get("query_lens")
    if query_lens is None:
        if num_tokens != num_sequences:
            raise ValueError(
                f"query: expected {num_sequences} tokens, one a sequence, got {num_tokens}"
            )
    elif checks.length_of(query_lens, "query_lens") != num_sequences:
        raise ValueError(
            f"query_lens: expected {num_sequences} like block_table, got {describe(query_lens)}"
        )
    return num_sequences, max_pages


def _outputs(given: dict[str, Any], num_tokens: int, num_heads: int, width: int) -> None:
    query, out, lse = given["query"], given["out"], given.get("lse_out")
    shape = (num_tokens, num_heads, width)
    if out.format not in (query.format, "fp32"):
        raise TypeError(f"out: expected {query.format} like query, or fp32, got {describe(out)}")
    if out.shape != shape:
        raise ValueError(f"out: expected {shape}, got {describe(out)}")
    checks.require_contiguous(out, "out")
    checks.require_output(out, "out")
    if lse is None:
        return
    if lse.format != "fp32":
        raise TypeError(f"lse_out: expected float32, got {describe(lse)}")
    if lse.shape != shape[:2]:
        raise ValueError(f"lse_out: expected {shape[:2]}, got {describe(lse)}")
    checks.require_output(lse, "lse_out")


def _sinks(given: dict[str, Any], num_heads: int) -> None:
    sinks = given.get("sinks")
    if sinks is None:
        return
    if sinks.format != "fp32":
        raise TypeError(f"sinks: expected an int, or float32 logits, got {describe(sinks)}")
    if sinks.shape != (num_heads,):
        raise ValueError(f"sinks: expected ({num_heads},) like the query, got {describe(sinks)}")


def _tree_mask(given: dict[str, Any], num_tokens: int) -> None:
    mask = given.get("tree_mask")
    if mask is None:
        return
    if mask.format != "bool":
        raise TypeError(f"tree_mask: expected bool, got {describe(mask)}")
    if mask.ndim != 2 or mask.shape[0] != num_tokens:
        raise ValueError(
            f"tree_mask: expected ({num_tokens}, max(query_lens)), got {describe(mask)}"
        )


def check_sequences(given: dict[str, Any], num_sequences: int) -> None:
    """Check the arrays with one entry a sequence, and that those are together which belong so."""
    for name in ("hole_starts", "holes", "key_starts", "tree_lens"):
        counts = given.get(name)
        if counts is None:
            continue
        if counts.format != "int32":
            raise TypeError(f"{name}: expected int32, got {describe(counts)}")
        if counts.shape != (num_sequences,):
            raise ValueError(
                f"{name}: expected ({num_sequences},) like block_table, got {describe(counts)}"
            )
    for name, other in (("hole_starts", "holes"), ("holes", "hole_starts")):
        if name in given and other not in given:
            raise ValueError(f"{other}: expected an array beside {name}, got None")
    if "tree_lens" in given and "tree_mask" not in given:
        raise ValueError("tree_lens: expected None without tree_mask, got an array")


def check_rope(given: dict[str, Any], rotary_start: int, width: int, num_sequences: int) -> None:
    """Check the rope table against keys of `width` elements, and the positions in it."""
    table, tail = given.get("rope_table"), given.get("tail_positions")
    if table is not None:
        _check_table(table, rotary_start, width)
    if tail is None:
        return
    for other in ("rope_table", "tree_mask"):
        if other not in given:
            raise ValueError(f"tail_positions: expected None without {other}, got an array")
    if tail.format != "int32":
        raise TypeError(f"tail_positions: expected int32, got {describe(tail)}")
    if tail.ndim != 2 or tail.shape[0] != num_sequences:
        raise ValueError(
            f"tail_positions: expected ({num_sequences}, max(tree_lens)), got {describe(tail)}"
        )


def _check_table(table: ArrayView, rotary_start: int, width: int) -> None:
    if table.format != "fp32":
        raise TypeError(f"rope_table: expected float32, got {describe(table)}")
    if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] < 2 or table.shape[1] % 2:
        raise ValueError(
            f"rope_table: expected (max_positions, rotary_dim), not empty and rotary_dim even, "
            f"got {describe(table)}"
        )
    checks.require_contiguous(table, "rope_table")
    if rotary_start + table.shape[1] > width:
        raise ValueError(
            f"rotary_start: expected at most {width - table.shape[1]}, for {table.shape[1]} of the "
            f"{width} elements of k_cache turn, got {rotary_start}"
        )


# --- Plan -----------------------------------------------------------------------------------------


_PART_ALIGNMENT = 256  # of each part of the workspace

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
        given = dict(zip(self.names, self.views(pointers, arrays), strict=True))
        _attend_fallback(self.device, self.call, {n: v for n, v in given.items() if v is not None})

    def _prepare(self) -> None:
        call, device = self.call, self.device
        tiling = tiling_of(device, call, self.alignment)
        tiles = num_tiles(call, tiling.rows)
        num_kv_heads = call.k.cache.num_heads
        self._num_splits = splits(device, call, tiles * num_kv_heads)
        params = fill(call, self._num_splits, tiling.lanes)
        grid = (tiles, num_kv_heads, self._num_splits)
        self.launches.append(
            plan.Launch(
                device, tiling.specialisation, grid, (tiling.threads, 1, 1), tiling.smem_bytes,
                params, self._places_of(*ARRAYS),
            )
        )  # fmt: skip
        if call.view("query_lens") is not None:
            self._starts = starts_launch(
                device, call, self._places_of("query_lens", "query_starts")
            )
        sizes = [0, 0, 0]  # of _WORKSPACE
        if self._starts is not None:
            sizes[0] = 4 * (call.num_sequences + 1)
        if self._num_splits > 1:
            self._merge = self._merging()
            rows = self._num_splits * call.num_tokens * call.num_heads
            sizes[1:] = 4 * rows * call.v.cache.width, 4 * rows
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT)
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


# --- Fallback -------------------------------------------------------------------------------------


_COUNTS = ("seq_lens", "query_lens", "hole_starts", "holes", "key_starts", "tree_lens")


@dataclass(frozen=True)
class _Sequence:
    """What the host knows of a sequence: its number, page table, lengths, tree and hole.

    `length` new tokens begin at row `start` of the query, of which `there` exist. `first_tree` is
    the first key that the tree mask is about, None if it is about none.
    """

    number: int
    table: Any
    seq_len: int
    start: int
    length: int
    there: int
    first_tree: int | None
    hole_start: int
    hole: int
    key_start: int

    @property
    def first_new(self) -> int:
        """The position of the first query."""
        return max(self.seq_len, -1) - self.length

    def keys_before(self, most: int) -> int:
        """Return how many keys lie at places before `most`."""
        return max(min(self.hole_start, most), most - self.hole)


def _attend_fallback(device: Device, call: Call, given: dict[str, ArrayView]) -> None:
    """Attend sequence by sequence.

    Notes
    -----
    Lengths are read by the host, so this is not legal in a capture.
    """
    host = {
        name: device.to_numpy(given[name]).astype("int64")
        for name in ("block_table", *_COUNTS)
        if name in given
    }
    new = host.get("query_lens")
    start = 0
    for b in range(call.num_sequences):
        length = 1 if new is None else int(max(new[b], 0))
        there = min(length, call.num_tokens - start)
        if new is not None and (new[b] < 0 or there < length):
            _note(device, "query_lens", b, new[b])
        if there:
            counts = {name: int(max(host[name][b], 0)) for name in _COUNTS[2:] if name in host}
            seq_len, nodes = int(host["seq_lens"][b]), counts.get("tree_lens", length)
            first_tree = max(seq_len, -1) - nodes if nodes and "tree_mask" in given else None
            one = _Sequence(
                b, host["block_table"][b], seq_len, start, length, there, first_tree,
                counts.get("hole_starts", 0), counts.get("holes", 0), counts.get("key_starts", 0),
            )  # fmt: skip
            _attend_with(device, call, given, one)
        start += there


def _attend_with(device: Device, call: Call, given: dict[str, ArrayView], one: _Sequence) -> None:
    """Attend with the new tokens of one sequence."""
    cache, options, there = call.k.cache, call.options, one.there
    num_keys = max(0, one.seq_len)
    if num_keys > one.keys_before(call.max_keys):
        _note(device, "seq_lens", one.number, one.seq_len)
        num_keys = one.keys_before(call.max_keys)
    rows = slice(one.start, one.start + there)
    query = device.carrier(given["query"])[rows]
    xp = expressions.module_of(query)
    query = expressions.decode(query, given["query"].format)
    keys = xp.arange(num_keys)
    places = xp.where(keys < one.hole_start, keys, keys + one.hole)
    entries = places // cache.page_size
    seen = _visible(device, call, given, keys, one)
    pages = xp.where(seen.any(axis=0), xp.asarray(one.table)[entries], -1)
    num_pages = cache.num_slots // cache.page_size
    for entry in sorted({int(i) for i in entries[pages >= num_pages]}):
        _note(device, "block_table", one.number * call.max_pages + entry, one.table[entry])
    exists = (pages >= 0) & (pages < num_pages)
    where = xp.where(exists, pages, 0), places % cache.page_size
    seen = seen & exists[None]
    k, v = (_kv_rows(device, call, given, name, where) for name in "kv")
    if "rope_table" in given:
        k = _turned(device, call, given, k, keys, one)
    query = query.reshape(there, cache.num_heads, call.group, -1)
    scores = xp.einsum("thgd,khd->htgk", query, k) * query.dtype.type(call.sm_scale)
    if options.soft_cap:
        cap = query.dtype.type(options.soft_cap)
        scores = cap * xp.tanh(scores / cap)
    mask = seen[None, :, None, :]
    scores = xp.where(mask, scores, -xp.inf)
    sinks = None
    if "sinks" in given:
        sinks = device.carrier(given["sinks"]).reshape(cache.num_heads, 1, call.group, 1)
    out, lse = _softmax(xp, scores, mask, v, sinks)
    flat_out = out.transpose(1, 0, 2, 3).reshape(there, call.num_heads, -1)
    bits = expressions.encode(flat_out.astype(xp.float32), given["out"].format)
    device.carrier(given["out"])[rows] = bits
    if "lse_out" in given:
        flat = lse.transpose(1, 0, 2, 3).reshape(there, call.num_heads)
        device.carrier(given["lse_out"])[rows] = flat


@expressions.QUIET
def _softmax(xp: Any, scores: Any, mask: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    """Return (heads, tokens, group, width) outputs and (heads, tokens, group, 1) LSE."""
    shape = (*scores.shape[:3], 1)
    largest = xp.full(shape, -xp.inf, scores.dtype)
    if scores.shape[3]:
        largest = scores.max(axis=3, keepdims=True)
    if sinks is not None:
        largest = xp.maximum(largest, sinks)
    origin = xp.where(xp.isinf(largest), 0, largest)
    weights = xp.where(mask, xp.exp(scores - origin), 0)
    total = weights.sum(axis=3, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks - origin)
    known = xp.where(xp.isnan(v) & ~mask.any(axis=(0, 1, 2))[:, None, None], 0, v)
    out = xp.einsum("htgk,khd->htgd", weights, known)
    out = xp.where(total > 0, out / xp.where(total > 0, total, 1), xp.where(total == 0, 0, out))
    return out, (origin + xp.log(total)).astype(xp.float32)


def _kv_rows(device: Device, call: Call, given: dict[str, ArrayView], name: str, where: Any) -> Any:
    """Return the float32 K or V rows of keys, (keys, heads, width)."""
    one: Side = getattr(call, name)
    cache = given[f"{name}_cache"]
    bits = device.carrier(one.cache_view(cache.pointer, cache))[where]
    values = expressions.decode(bits, one.cache_format.name)
    slots = where[0] * one.cache.page_size + where[1]
    if f"{name}_scale_cache" in given:
        own = device.carrier(given[f"{name}_scale_cache"])[slots]
        return expressions.multiply(values, own[..., None])
    if f"{name}_scale" in given:
        scale = device.carrier(given[f"{name}_scale"]).reshape(-1, 1)
        return expressions.multiply(values, scale)
    return expressions.multiply(values, values.dtype.type(one.scale.value))


@expressions.QUIET
def _turned(
    device: Device, call: Call, given: dict[str, ArrayView], k: Any, keys: Any, one: _Sequence
) -> Any:
    """Turn the rows of keys by their positions."""
    xp, options = expressions.module_of(k), call.options
    table = device.carrier(given["rope_table"])
    positions = keys
    if "tail_positions" in given and one.first_tree is not None:
        tail = device.carrier(given["tail_positions"])[one.number]
        columns = keys - one.first_tree
        inside = (columns >= 0) & (columns < len(tail))
        if len(tail):
            positions = xp.where(inside, tail[xp.where(inside, columns, 0)], keys)
    angles = table[xp.clip(positions, 0, len(table) - 1)][:, None]
    half = table.shape[1] // 2
    cosines, sines = angles[..., :half], angles[..., half:]
    part = k[..., options.rotary_start : options.rotary_start + 2 * half]
    pairs = (
        (slice(0, None, 2), slice(1, None, 2)) if options.interleaved
        else (slice(half), slice(half, None))
    )  # fmt: skip
    a, b = (part[..., pair] for pair in pairs)
    turned = k.copy()
    into = turned[..., options.rotary_start : options.rotary_start + 2 * half]
    into[..., pairs[0]] = a * cosines - b * sines
    into[..., pairs[1]] = b * cosines + a * sines
    return turned


def _visible(
    device: Device, call: Call, given: dict[str, ArrayView], keys: Any, one: _Sequence
) -> Any:
    """Return which keys each new token sees, (tokens, keys)."""
    xp, options = expressions.module_of(keys), call.options
    at, key = one.first_new + xp.arange(one.there)[:, None], keys[None]
    seen = xp.repeat(key >= one.key_start, one.there, axis=0)
    if options.window:
        seen = seen & ((key > at - options.window) | (key < options.sink_keys))
    if options.causal:
        seen = seen & (key <= at)
    if one.first_tree is not None:
        mask = device.carrier(given["tree_mask"])[one.start : one.start + one.there]
        columns = keys - one.first_tree
        inside = (columns >= 0) & (columns < mask.shape[1])
        own = mask[:, xp.where(inside, columns, 0)].astype(bool) if mask.shape[1] else seen & False
        kept = own & inside[None] & (key >= one.key_start)
        seen = xp.where(columns[None] >= 0, kept, seen)
    if options.causal or options.window or one.first_tree is not None:
        seen = seen & (at >= 0)
    return seen


def _note(device: Device, argument: str, position: int, value: Any) -> None:
    operation = faults.operation_id("paged_attention", argument)
    expressions.note_fault(device, 1, operation, position, value)
