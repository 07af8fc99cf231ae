"""Plans of FlashInfer's attention wrappers: tables and options, and runs with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...arrays import ArrayView, view_as
from ...ops.attention import LayerArrays, StepAttention, check_options
from .. import describe_tensor, require_none, require_shape
from .. import torch as _kv

PagedCache: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
Masks: TypeAlias = "tuple[Tensor | None, Tensor | None]"  # custom_mask, packed_custom_mask
Rope: TypeAlias = "tuple[str, float | None, float | None]"  # its mode, rope_scale, rope_theta

_LOG2_E = math.log2(math.e)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


# --- Arguments ------------------------------------------------------------------------------------


def k_and_v(
    paged_kv_cache: Any, kv_layout: str, *, name: str = "paged_kv_cache"
) -> tuple[Tensor, Tensor]:
    """Return K and V of a cache that is one 5-D tensor or two of four dimensions."""
    require_layout(kv_layout)
    axes: tuple[str, ...] = ("page_size", "heads", "head_dim")
    if kv_layout == "HND":
        axes = ("heads", "page_size", "head_dim")
    if isinstance(paged_kv_cache, Tensor):
        require_shape(paged_kv_cache, name, ("pages", 2, *axes))
        return paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        got = describe_tensor(paged_kv_cache)
        raise TypeError(f"{name}: expected a tensor, or K and V as a tuple, got {got}")
    k_cache, v_cache = paged_kv_cache
    require_shape(k_cache, f"{name} (K)", ("pages", *axes))
    require_shape(v_cache, f"{name} (V)", (*k_cache.shape[:3], "head_dim"))
    return k_cache, v_cache


_CACHE_NAMES = ("paged_kv_cache (K)", "paged_kv_cache (V)")


def nvfp4_views(
    k_cache: Tensor, v_cache: Tensor, kv_cache_sf: Any, kv_layout: str,
    names: tuple[str, str] = _CACHE_NAMES,
) -> tuple[ArrayView, ArrayView]:  # fmt: skip
    """Return codes and block scales of K and V as caches of nvfp4, without a copy."""
    views = []
    scales = k_and_v(kv_cache_sf, kv_layout, name="kv_cache_sf")
    for codes, sf, name, part in zip((k_cache, v_cache), scales, names, "KV", strict=True):
        require_shape(codes, name, tuple(codes.shape), torch.uint8)
        sf_shape = *codes.shape[:3], codes.shape[3] // 8
        require_shape(sf, f"kv_cache_sf ({part})", sf_shape, torch.float8_e4m3fn)
        views.append(view_as(codes, "nvfp4", scales=sf))
    return views[0], views[1]


def require_layout(kv_layout: str) -> None:
    """Raise unless it is "NHD" or "HND"."""
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")


def _require_aligned(workspace: Tensor, name: str) -> None:
    if workspace.data_ptr() % 16:
        raise ValueError(f"{name} must be 16-byte aligned, got address {workspace.data_ptr()}")


def _dtype(dtype: Any, name: str) -> torch.dtype | None:
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(named, torch.dtype):
        raise TypeError(f"{name}: expected a torch dtype or its name, got {dtype!r}")
    return named


def require_dtypes(
    q: Any, kv: Any, out: Any
) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
    """Return the dtypes of a plan, of which kv is q's where it is None."""
    q, kv, out = _dtype(q, "q_data_type"), _dtype(kv, "kv_data_type"), _dtype(out, "o_data_type")
    if q not in (torch.float32, torch.float16, torch.bfloat16):
        raise NotImplementedError(f"q_data_type: expected 16 or 32 bits, got {q}")
    if out not in (None, q, torch.float32):
        raise NotImplementedError(f"o_data_type: expected q_data_type or float32, got {out}")
    return q, kv or q, out


def _offsets(indptr: Tensor, name: str) -> Tensor:
    """Return offsets on the host, which waits for them."""
    starts = indptr.cpu().long()
    if len(starts) and (int(starts[0]) < 0 or bool((starts[1:] < starts[:-1]).any())):
        raise ValueError(f"{name}: expected ascending offsets, got {starts.tolist()}")
    return starts


def _query_lens_of(qo_indptr: Any, count: int) -> Tensor:
    """Return how many new tokens each of `count` sequences has, on the host, which waits."""
    require_shape(qo_indptr, "qo_indptr", (count + 1,))
    starts = _offsets(qo_indptr, "qo_indptr")
    if int(starts[0]):
        raise ValueError(f"qo_indptr: expected offsets from 0, got {starts.tolist()}")
    return starts[1:] - starts[:-1]


@lru_cache(maxsize=16)
def rope_table(
    rows: int, rotary_dim: int, theta: float, scaling: tuple[Any, ...], device: str
) -> Tensor:
    """Return the table of a rotation that FlashInfer describes by numbers, and keep it.

    `scaling` are the values of a scaling dictionary of `kvcupy.rope_table`, the type first.
    """
    names = "rope_type factor low_freq_factor high_freq_factor original_max_position_embeddings"
    config = dict(zip(names.split(), scaling, strict=False))
    return _kv.rope_table(rows, rotary_dim, base=theta, scaling=config, device=device)


def rows_for(length: int) -> int:
    """Return rows of a table for positions below `length`, a power of two.

    So growing sequences need few tables.
    """
    return 1 << max(length - 1, 1023).bit_length()


def rotations_of(
    rope: Rope, num_positions: int, width: int, device: torch.device, kept: dict[Any, Tensor]
) -> Tensor | None:
    """Return the rotations of all positions, or None. `kept` has tables that captured runs read."""
    mode, scale, theta = rope
    if mode == "NONE":
        return None
    if mode != "ROPE_LLAMA":
        raise NotImplementedError(
            f"pos_encoding_mode: expected 'NONE' or 'ROPE_LLAMA', got {mode!r}; no kernel adds a "
            "bias by position"
        )
    linear = "linear", 1.0 if scale is None else float(scale)
    base = 1e4 if theta is None else float(theta)
    options = rows_for(num_positions), width, base, linear, str(device)
    return kept.setdefault(options, rope_table(*options))


def mask_of(
    masks: Masks, query_lens: Tensor, key_lens: Tensor, window_left: int = -1
) -> Tensor | None:
    """Return which keys each query sees, bool (sum(query_lens), max(key_lens)), or None for all.

    Parameters
    ----------
    masks : bool, the masks (query_lens[b], key_lens[b]) of all sequences, end to end; or uint8,
        likewise, each padded to whole bytes, the lowest bit of a byte first
    query_lens, key_lens : on the host
    window_left : keys before its own position that a query sees at most; -1: all

    Raises
    ------
    TypeError, ValueError : a mask does not fit
    """
    custom, packed = masks
    if packed is not None:
        name, mask, unit, dtype = "packed_custom_mask", packed, 8, torch.uint8
    elif custom is not None:
        name, mask, unit, dtype = "custom_mask", custom.flatten(), 1, torch.bool
    else:
        return None
    sizes = [-(-size // unit) for size in (query_lens * key_lens).tolist()]
    require_shape(mask, name, (sum(sizes),), dtype)
    if bool((query_lens > key_lens).any()):
        raise ValueError(
            f"{name}: expected no more new tokens than keys in each sequence, got "
            f"{query_lens.tolist()} and {key_lens.tolist()}"
        )
    if unit == 8:
        shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
        mask = (mask[:, None] >> shifts & 1).flatten().bool()
    rows = mask.new_zeros((int(query_lens.sum()), max([1, *key_lens.tolist()])))
    parts = mask.split([unit * size for size in sizes])
    first = 0
    for part, count, length in zip(parts, query_lens.tolist(), key_lens.tolist(), strict=True):
        seen = part[: count * length].view(count, length)
        if window_left >= 0:
            seen = seen.triu(length - count - window_left)
        rows[first : first + count, :length] = seen
        first += count
    return rows


# --- Plans ----------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The tables and options of runs, and `kvcupy.paged_attention` with them.

    Attributes
    ----------
    block_table, seq_lens, query_lens : on the device, as in `kvcupy.paged_attention`
    mask, rope_table : of `mask_of` and `rotations_of`
    num_tokens : new tokens of all sequences
    heads, head_dims : of query and keys; of keys and values
    dtypes : of query, cache and output
    takes_rest : whether a query may have further rows, which are not read
    cache_names : of K and V in errors
    """

    block_table: Tensor
    seq_lens: Tensor
    query_lens: Tensor | None
    mask: Tensor | None
    rope_table: Tensor | None
    num_tokens: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    page_size: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    kv_layout: str
    cache_names: tuple[str, str]
    takes_rest: bool = True
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None

    def run(
        self, q: Any, k_cache: Tensor, v_cache: Tensor, arguments: tuple[Any, ...] = (), *,
        q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, window_left: int | None = None,
        sinks: Tensor | None = None, kv_cache_sf: Any = None, base_2: bool = True,
    ) -> Any:  # fmt: skip
        """Attend over pages as `run` of the wrappers does; `arguments` are its `*args`."""
        if arguments:
            raise NotImplementedError("*args: kvcupy has no customised kernel that takes them")
        self._require_planned(q, k_cache, v_cache, window_left)
        if isinstance(q_scale, Tensor):
            raise NotImplementedError("q_scale: expected a number, got a tensor")
        sm_scale = 1 / math.sqrt(self.head_dims[0]) if self.sm_scale is None else self.sm_scale
        if q_scale is not None:
            sm_scale *= float(q_scale)
        caches: tuple[Any, Any] = k_cache, v_cache
        out_scale: Any = None
        if kv_cache_sf is not None:
            caches = nvfp4_views(*caches, kv_cache_sf, self.kv_layout, self.cache_names)
        elif k_cache.dtype is torch.uint8:
            raise ValueError("kv_cache_sf: expected block scales with a uint8 cache, got None")
        elif k_cache.dtype not in FP8:
            # As FlashInfer does: the scales multiply scores and outputs.
            if isinstance(k_scale, Tensor):
                raise NotImplementedError(
                    "k_scale: expected a number with a cache that is not fp8, got a tensor"
                )
            if k_scale is not None:
                sm_scale *= k_scale
            k_scale, v_scale, out_scale = None, None, v_scale
        if sinks is not None and return_lse:
            raise NotImplementedError("return_lse: expected False with sinks, got True")
        shape = (len(q), self.heads[0], self.head_dims[1])
        if out is None:
            # Rows past the last sequence are not written.
            out = q.new_zeros(shape, dtype=self.dtypes[2] or q.dtype)
        require_shape(out, "out", shape, q.dtype, torch.float32)
        if not return_lse:
            lse = None
        else:
            lse = q.new_zeros(shape[:2], dtype=torch.float32) if lse is None else lse
            require_shape(lse, "lse", shape[:2], torch.float32)
        self._attend(q, caches, sm_scale, (k_scale, v_scale), sinks, out, lse)
        if out_scale is not None and (isinstance(out_scale, Tensor) or out_scale != 1):
            out.mul_(out_scale)
        if lse is None:
            return out
        return out, lse.mul_(_LOG2_E) if base_2 else lse

    def _attend(
        self, q: Tensor, caches: tuple[Any, Any], sm_scale: float, scales: tuple[Any, Any],
        sinks: Tensor | None, out: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        # A mask has the window in it.
        window = self.window_left + 1 if self.window_left >= 0 and self.mask is None else None
        cap = self.logits_soft_cap if self.logits_soft_cap and self.logits_soft_cap > 0 else None
        is_tensor = isinstance(caches[0], Tensor)  # else of nvfp4, which no operator takes
        if is_tensor and self.rope_table is None and self.mask is None:
            _kv.paged_attention(
                q, *caches, self.block_table, self.seq_lens, query_lens=self.query_lens,
                layout=self.kv_layout, causal=self.causal, sinks=sinks, sm_scale=sm_scale,
                window=window, logits_soft_cap=cap, k_scale=scales[0], v_scale=scales[1], out=out,
                lse_out=lse,
            )  # fmt: skip
            return
        if self.mask is not None:  # it has no rows for those past the last sequence
            q, out = q[: self.num_tokens], out[: self.num_tokens]
            lse = None if lse is None else lse[: self.num_tokens]
        if self.rope_table is not None:
            q = self._rotated(q, self.rope_table)
        step = StepAttention(
            block_table=self.block_table, seq_lens=self.seq_lens, query_lens=self.query_lens,
            tree_mask=self.mask, tree_lens=None if self.mask is None else self.seq_lens,
            rope_table=self.rope_table,
        )  # fmt: skip
        options = check_options(self.kv_layout, sm_scale, self.causal, window, None, cap)
        step.run(LayerArrays(*caches, *scales), q, out, options, lse_out=lse, sinks=sinks)

    def _rotated(self, q: Tensor, table: Tensor) -> Tensor:
        """Return queries that are rotated by their positions, the last of their sequences."""
        if self.query_lens is None:
            positions = self.seq_lens - 1
        else:
            ends = self.query_lens.cumsum(0)
            tokens = torch.arange(len(q), device=q.device)
            last = max(len(ends) - 1, 0)  # rows past the last sequence are not read
            sequences = torch.searchsorted(ends, tokens, right=True).clamp_(max=last)
            positions = tokens + (self.seq_lens - ends)[sequences]
        rotated = torch.empty_like(q)
        positions = positions.clamp(0, len(table) - 1)
        _kv.apply_rope(None, q, table, positions, key_out=rotated)
        return rotated

    def _require_planned(
        self, q: Any, k_cache: Tensor, v_cache: Tensor, window_left: int | None
    ) -> None:
        """Raise unless the plan was made for tensors like these."""
        tokens = "tokens" if self.takes_rest else self.num_tokens
        require_shape(q, "q", (tokens, self.heads[0], self.head_dims[0]))
        if len(q) < self.num_tokens:
            got = describe_tensor(q)
            raise ValueError(f"q: expected at least {self.num_tokens} tokens, got {got}")
        axes = (self.page_size, self.heads[1])
        axes = axes if self.kv_layout == "NHD" else axes[::-1]
        packed = 2 if self.dtypes[1] is torch.uint8 else 1  # codes of nvfp4 in a byte
        for x, name, width in zip((k_cache, v_cache), self.cache_names, self.head_dims,
                                  strict=True):  # fmt: skip
            require_shape(x, name, ("pages", *axes, width // packed))
        kv_name = self.cache_names[0].split()[0]
        for name, x, planned in (("q", q, self.dtypes[0]), (kv_name, k_cache, self.dtypes[1])):
            if x.dtype != planned:  # a ValueError in FlashInfer too
                names = [str(dtype).removeprefix("torch.") for dtype in (planned, x.dtype)]
                raise ValueError(f"{name}: expected {names[0]} as planned, got {names[1]}")
        if window_left not in (None, self.window_left):
            raise ValueError(
                f"window_left: expected None or {self.window_left} as planned, got {window_left}"
            )


class PlannedAttention:
    """The last plan of a wrapper, and what FlashInfer's wrappers have in common.

    Parameters
    ----------
    buffers : of use_cuda_graph, by name: offsets of the new tokens, unless the wrapper is for
        decode; offsets of the pages, pages, and tokens of the last pages
    """

    _is_decode = False
    _cache_names = _CACHE_NAMES
    run: Any

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool,
        buffers: Mapping[str, Tensor | None], max_pages_per_sequence: int | None,
        jit_args: Any = None,
    ) -> None:  # fmt: skip
        require_layout(kv_layout)
        require_none("kvcupy compiles its own kernels", jit_args=jit_args)
        _require_aligned(float_workspace_buffer, "float_workspace_buffer")
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._plan: Plan | None = None
        self._rope_tables: dict[Any, Tensor] = {}
        self._graph_tables: _GraphTables | None = None
        if use_cuda_graph:
            self._graph_tables = _GraphTables(buffers, max_pages_per_sequence, self.device)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph`."""
        return self._graph_tables is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Check that both begin at a multiple of 16 bytes; kvcupy has its own workspaces."""
        _require_aligned(float_workspace_buffer, "float_workspace_buffer")
        _require_aligned(int_workspace_buffer, "int_workspace_buffer")

    def workspace_size(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        """Return bytes of the two workspaces of a `plan` with these arguments: any will do."""
        return 16, 16

    def forward(
        self,
        *arrays: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        **options: Any,
    ) -> Any:
        """Call `run` with options that replace the plan's; FlashInfer deprecates it.

        Parameters
        ----------
        arrays, options : as in `run`
        causal : as in `plan` of the prefill wrapper; the decode wrapper is always causal
        others : as in `plan`, and kept for further runs
        """
        plan = self._planned()
        if plan.mask is not None and window_left != plan.window_left:
            raise NotImplementedError(
                f"window_left: expected {plan.window_left} as planned, with a custom mask, got "
                f"{window_left}"
            )
        rope = pos_encoding_mode, rope_scale, rope_theta
        num_positions = plan.block_table.shape[1] * plan.page_size
        self._plan = replace(
            plan, causal=causal or self._is_decode, window_left=window_left, sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            rope_table=self._rotations(rope, num_positions, plan.head_dims[0]),
        )  # fmt: skip
        return self.run(*arrays, **options)

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """Call `run` with return_lse."""
        return self.run(*args, return_lse=True, **options)

    def forward_return_lse(self, *args: Any, **options: Any) -> Any:
        """Call `forward` with return_lse."""
        return self.forward(*args, return_lse=True, **options)

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer, which deprecates it."""

    def _planned(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("run: expected a plan before it, call plan first")
        return self._plan

    def _set_plan(
        self, tables: Mapping[str, Tensor], *, page_size: int, head_dims: tuple[int, int],
        dtypes: tuple[Any, Any, Any], q_len_per_req: int = 1, seq_lens: Any = None,
        window_left: int = -1, masks: Masks = (None, None), rope: Rope = ("NONE", None, None),
        **options: Any,
    ) -> None:  # fmt: skip
        """Keep tables and options; the host waits for the tables.

        `tables` are `buffers` by the names of `plan`'s arguments, `q_len_per_req` new tokens per
        sequence of decode. Other options are attributes of `Plan`.
        """
        types, graph = require_dtypes(*dtypes), self._graph_tables
        table, lengths = self._rectangular(tables, page_size)
        if seq_lens is not None:
            require_shape(seq_lens, "seq_lens", (len(lengths),))
            lengths = seq_lens.cpu().long()
        query_lens = mask = None
        if not self._is_decode:
            query_lens = _query_lens_of(tables["qo_indptr"], len(lengths))
            if graph is not None:
                reason = "expected None with use_cuda_graph, which keeps no masks"
                require_none(reason, custom_mask=masks[0], packed_custom_mask=masks[1])
            mask = mask_of(masks, query_lens, lengths, window_left)
        elif q_len_per_req > 1:
            query_lens = torch.full_like(lengths, q_len_per_req)
            if bool(((lengths > 0) & (lengths < q_len_per_req)).any()):
                expected = f"none or at least q_len_per_req {q_len_per_req} keys per sequence"
                raise ValueError(f"last_page_len: expected {expected}, got {lengths.tolist()}")
        num_tokens = len(lengths) if query_lens is None else int(query_lens.sum())
        num_positions = (table.shape[1] if graph is None else graph.max_pages) * page_size
        rope_table = self._rotations(rope, num_positions, head_dims[0])
        lengths = lengths.int().to(self.device)
        query_lens = None if query_lens is None else query_lens.int().to(self.device)
        if graph is not None:
            table, lengths, query_lens = graph.update(tables, table, lengths, query_lens)
        # All checks are done: a plan that raises leaves the last one in place.
        self._plan = Plan(
            table, lengths, query_lens, mask, rope_table, num_tokens, page_size=page_size,
            head_dims=head_dims, dtypes=types, kv_layout=self._kv_layout,
            cache_names=self._cache_names, takes_rest=not self._is_decode,
            window_left=window_left, **options,
        )  # fmt: skip

    def _rotations(self, rope: Rope, num_positions: int, width: int) -> Tensor | None:
        return rotations_of(rope, num_positions, width, self.device, self._rope_tables)

    def _rectangular(self, tables: Mapping[str, Tensor], page_size: int) -> tuple[Tensor, Tensor]:
        """Return pages by sequence, and lengths on the host."""
        for name, x in tables.items():
            require_shape(x, name, ("length",), torch.int32, torch.int64)
        *_, starts_name, indices_name, last_name = tables
        *_, indptr, indices, last_page_len = tables.values()
        require_shape(last_page_len, last_name, (len(indptr) - 1,))
        starts = _offsets(indptr, starts_name)
        counts = starts[1:] - starts[:-1]
        if int(starts[-1]) > len(indices):
            raise ValueError(
                f"{indices_name}: expected at least {int(starts[-1])} pages, got {len(indices)}"
            )
        lengths = self._lengths(last_name, last_page_len.cpu().long(), counts, page_size)
        columns = torch.arange(max([1, *counts.tolist()]))
        entries = (starts[:-1, None] + columns).clamp(max=max(len(indices) - 1, 0))
        pages = indices.to(self.device).int()
        table = pages[entries.to(self.device)] if len(indices) else entries.int().to(self.device)
        return table, lengths

    def _lengths(self, name: str, last: Tensor, counts: Tensor, page_size: int) -> Tensor:
        """Return the tokens of each sequence, from its pages and the tokens of the last one."""
        if bool(((last > page_size) | (last < (counts > 0))).any()):
            raise ValueError(f"{name}: expected 1 to page_size {page_size}, got {last.tolist()}")
        return torch.where(counts > 0, (counts - 1) * page_size + last, 0)


class _GraphTables:
    """Tables that keep their addresses, so that a captured run reads the tables of each new plan.

    Parameters
    ----------
    buffers : as in `PlannedAttention`: the caller's tensors, which say how many sequences and pages
        there can be
    max_pages : of one sequence
    """

    def __init__(
        self, buffers: Mapping[str, Tensor | None], max_pages: int | None, device: torch.device
    ) -> None:
        for name, buffer in buffers.items():
            if not isinstance(buffer, Tensor):
                got = type(buffer).__name__
                raise ValueError(f"{name}: expected a tensor with use_cuda_graph, got {got}")
            require_shape(buffer, name, ("length",))
        self._buffers = {name: x for name, x in buffers.items() if x is not None}
        *offsets, (indices_name, indices), (_, last_page_len) = self._buffers.items()
        count = len(last_page_len)
        for name, buffer in offsets:
            require_shape(buffer, name, (count + 1,))
        if max_pages is not None and not 1 <= max_pages <= len(indices):
            expected = f"1 to the {len(indices)} of {indices_name}"
            raise ValueError(f"max_pages_per_sequence: expected {expected}, got {max_pages}")
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.max_pages = max(len(indices) if max_pages is None else max_pages, 1)
        self._block_table = torch.zeros((count, self.max_pages), **options)
        self._seq_lens, self._query_lens = torch.zeros((2, count), **options)

    def update(
        self, tables: Mapping[str, Tensor], table: Tensor, lengths: Tensor,
        query_lens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Copy the tables of a plan into those that stay, and return these.

        Raises
        ------
        ValueError : there are other sequences, or more pages, than the buffers have; nothing has
            changed
        """
        *_, indptr_name, indices_name, last_name = tables
        *_, buffer_name, count_name = self._buffers
        count, num_pages = len(self._seq_lens), len(self._buffers[buffer_name])
        if len(lengths) != count:
            expected = f"the {count} sequences of {count_name}"
            raise ValueError(f"{last_name}: expected {expected}, got {len(lengths)}")
        if len(tables[indices_name]) > num_pages:
            expected = f"at most the {num_pages} pages of {buffer_name}"
            got = len(tables[indices_name])
            raise ValueError(f"{indices_name}: expected {expected}, got {got}")
        if table.shape[1] > self.max_pages:
            expected = f"at most {self.max_pages} pages of a sequence (max_pages_per_sequence)"
            raise ValueError(f"{indptr_name}: expected {expected}, got {table.shape[1]}")
        for buffer, values in zip(self._buffers.values(), tables.values(), strict=True):
            buffer[: len(values)].copy_(values)
        self._block_table[:, : table.shape[1]].copy_(table)
        self._seq_lens.copy_(lengths)
        if query_lens is None:
            return self._block_table, self._seq_lens, None
        self._query_lens.copy_(query_lens)
        return self._block_table, self._seq_lens, self._query_lens
