"""The common part of FlashInfer's attention wrappers: tables and options of a plan, and runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...arrays import ArrayView, view_as
from ...ops.attention import LayerArrays, StepAttention, check_options
from .. import describe_tensor, require_dtype, require_shape
from .. import torch as _kv

PagedCache: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
Cache: TypeAlias = "Tensor | ArrayView"  # a view: of nvfp4
Rope: TypeAlias = "tuple[str, float | None, float | None]"

_LOG2_E = math.log2(math.e)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


# --- Arguments ------------------------------------------------------------------------------------


def k_and_v(
    paged_kv_cache: Any, kv_layout: str, *, name: str = "paged_kv_cache"
) -> tuple[Tensor, Tensor]:
    """Return K and V of a cache that is one 5-D tensor or two of four dimensions."""
    _require_layout(kv_layout)
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
        require_dtype(codes, name, torch.uint8)
        require_shape(sf, f"kv_cache_sf ({part})", (*codes.shape[:3], codes.shape[3] // 8))
        require_dtype(sf, f"kv_cache_sf ({part})", torch.float8_e4m3fn)
        views.append(view_as(codes, "nvfp4", scales=sf))
    return views[0], views[1]


def side_by_side(first: Tensor, second: Tensor) -> Tensor | None:
    """Return the rows of two tensors as one tensor, or None unless they lie so in memory."""
    widths = first.shape[-1], second.shape[-1]
    if not widths[1]:
        return first
    if (
        first.dtype != second.dtype
        or first.stride() != second.stride()
        or first.shape[:-1] != second.shape[:-1]
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or second.storage_offset() - first.storage_offset() != widths[0]
        or any(abs(step) < sum(widths) for step in first.stride()[:-1])
    ):
        return None
    return first.as_strided((*first.shape[:-1], sum(widths)), first.stride())


def _require_layout(kv_layout: str) -> None:
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


def require_no_items(
    prefix_len_ptr: Any, token_pos_in_items_ptr: Any, max_item_len_ptr: Any
) -> None:
    """Raise if an argument of multi-item scoring is passed."""
    for name, value in (
        ("prefix_len_ptr", prefix_len_ptr), ("token_pos_in_items_ptr", token_pos_in_items_ptr),
        ("max_item_len_ptr", max_item_len_ptr),
    ):  # fmt: skip
        if value is not None:
            raise NotImplementedError(f"{name}: multi-item scoring is not offered")


def offsets(indptr: Tensor, name: str) -> Tensor:
    """Return offsets on the host, which waits for them."""
    starts = indptr.cpu().long()
    if len(starts) and (int(starts[0]) < 0 or bool((starts[1:] < starts[:-1]).any())):
        raise ValueError(f"{name}: expected ascending offsets, got {starts.tolist()}")
    return starts


def query_lens_of(qo_indptr: Any, count: int) -> Tensor:
    """Return how many new tokens each of `count` sequences has, on the host, which waits."""
    require_shape(qo_indptr, "qo_indptr", (count + 1,))
    starts = offsets(qo_indptr, "qo_indptr")
    if len(starts) and int(starts[0]):
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


def mask_of(
    custom_mask: Tensor | None, packed_custom_mask: Tensor | None, query_lens: Tensor,
    key_lens: Tensor, window_left: int = -1,
) -> Tensor | None:  # fmt: skip
    """Return which keys each query sees, bool (sum(query_lens), max(key_lens)), or None for all.

    Parameters
    ----------
    custom_mask : bool, the masks (query_lens[b], key_lens[b]) of all sequences, end to end
    packed_custom_mask : uint8, likewise, each padded to whole bytes, the lowest bit of a byte first
    query_lens, key_lens : on the host
    window_left : keys before its own position that a query sees at most; -1: all

    Raises
    ------
    TypeError, ValueError : a mask does not fit
    """
    if packed_custom_mask is None and custom_mask is None:
        return None
    sizes = query_lens * key_lens
    if packed_custom_mask is not None:
        name, mask, unit = "packed_custom_mask", packed_custom_mask, 8
    else:
        assert custom_mask is not None
        name, mask, unit = "custom_mask", custom_mask.flatten(), 1
    sizes = (sizes + unit - 1) // unit
    require_shape(mask, name, (int(sizes.sum()),))
    require_dtype(mask, name, torch.uint8 if unit == 8 else torch.bool)
    if bool((query_lens > key_lens).any()):
        raise ValueError(
            f"{name}: expected no more new tokens than keys in each sequence, got "
            f"{query_lens.tolist()} and {key_lens.tolist()}"
        )
    if unit == 8:
        shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
        mask = (mask[:, None] >> shifts & 1).flatten().bool()
    starts = (sizes.cumsum(0) - sizes) * unit
    widths = key_lens.repeat_interleave(query_lens)
    firsts = (query_lens.cumsum(0) - query_lens).repeat_interleave(query_lens)
    in_sequence = torch.arange(len(widths)) - firsts
    rows = (starts.repeat_interleave(query_lens) + in_sequence * widths).to(mask.device)
    columns = torch.arange(int(key_lens.max()) if len(key_lens) else 0, device=mask.device)
    if not rows.numel() or not columns.numel():
        return mask.new_zeros((len(rows), max(len(columns), 1)))
    is_seen = columns < widths.to(mask.device)[:, None]
    if window_left >= 0:
        positions = (key_lens - query_lens).repeat_interleave(query_lens) + in_sequence
        is_seen &= columns >= positions.to(mask.device)[:, None] - window_left
    return mask[(rows[:, None] + columns).clamp(max=len(mask) - 1)] & is_seen


# --- Plans ----------------------------------------------------------------------------------------


class ReturnsLSE:
    """The methods of FlashInfer's wrappers that only set return_lse."""

    run: Any
    forward: Any

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """Call `run` with return_lse."""
        return self.run(*args, return_lse=True, **options)

    def forward_return_lse(self, *args: Any, **options: Any) -> Any:
        """Call `forward` with return_lse."""
        return self.forward(*args, return_lse=True, **options)


class PlannedAttention:
    """The tables and options of the last plan, and `kvcupy.paged_attention` with them.

    A subclass has FlashInfer's own constructor, `plan` and `run`.
    """

    _is_decode = True
    _cache_names = _CACHE_NAMES

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", jit_args: Any = None,
        buffers: Mapping[str, Tensor | None] | None = None,
        max_pages_per_sequence: int | None = None,
    ) -> None:  # fmt: skip
        _require_layout(kv_layout)
        if jit_args is not None:
            raise NotImplementedError("jit_args: kvcupy compiles its own kernels")
        _require_aligned(float_workspace_buffer, "float_workspace_buffer")
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._planned, self._causal = False, True
        self._rope_tables: dict[tuple[Any, ...], Tensor] = {}
        self._graph_tables: _GraphTables | None = None
        if buffers is not None:
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

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer, which deprecates it."""

    def _plan(
        self, csr: Mapping[str, Tensor], *, page_size: int, query_lens: Tensor | None,
        seq_lens: Any = None, min_keys: int = 1, window_left: int = -1,
        masks: tuple[Tensor | None, Tensor | None] = (None, None),
        rope: Rope = ("NONE", None, None), **options: Any,
    ) -> None:  # fmt: skip
        """Keep tables and options; a sequence that has keys has at least `min_keys`.

        `csr` are offsets, pages and tokens of the last pages by the names of `plan`'s arguments,
        `masks` what FlashInfer calls custom_mask and packed_custom_mask, and `rope` its
        pos_encoding_mode, rope_scale and rope_theta. Other options are as in `_keep`. The host
        waits for the tables.
        """
        dtypes = require_dtypes(*options.pop("dtypes"))
        table, lengths = self._tables(csr, page_size)
        if seq_lens is not None:
            require_shape(seq_lens, "seq_lens", (len(lengths),))
            lengths = seq_lens.cpu().long()
        if min_keys > 1 and bool(((lengths > 0) & (lengths < min_keys)).any()):
            expected = f"none or at least q_len_per_req {min_keys} keys per sequence"
            raise ValueError(f"last_page_len: expected {expected}, got {lengths.tolist()}")
        mask = None
        for name, values in zip(("custom_mask", "packed_custom_mask"), masks, strict=True):
            if values is not None and self._graph_tables is not None:
                raise NotImplementedError(
                    f"{name}: expected None with use_cuda_graph, which keeps no masks"
                )
        if query_lens is not None:
            mask = mask_of(*masks, query_lens, lengths, window_left)
            query_lens = query_lens.int().to(self.device)
        lengths = lengths.int().to(self.device)
        columns = table.shape[1] if self._graph_tables is None else self._graph_tables.max_pages
        rotations = self._rotations(rope, columns * page_size, options["head_dims"][0])
        if self._graph_tables is not None:
            table, lengths, query_lens = self._graph_tables.update(csr, table, lengths, query_lens)
        # All checks are done: a plan that raises leaves the last one in place.
        self._keep(
            table, lengths, query_lens, mask, rotations, page_size=page_size,
            window_left=window_left, dtypes=dtypes, **options,
        )  # fmt: skip

    def _keep(
        self, table: Tensor, lengths: Tensor, query_lens: Tensor | None, mask: Tensor | None,
        rotations: Tensor | None, *,
        heads: tuple[int, int], head_dims: tuple[int, int], page_size: int, num_tokens: int,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, causal: bool = True,
    ) -> None:  # fmt: skip
        """Keep tables of the device and options for the next runs."""
        self._block_table, self._seq_lens, self._query_lens = table, lengths, query_lens
        self._heads, self._head_dims, self._page_size = heads, head_dims, page_size
        self._q_dtype, self._kv_dtype, self._out_dtype = dtypes
        self._window_left, self._num_tokens = window_left, num_tokens
        self._soft_cap, self._sm_scale = logits_soft_cap, sm_scale
        self._causal, self._mask, self._rope_table = causal, mask, rotations
        self._planned = True

    def _replan(
        self, *, causal: bool, window_left: int, logits_soft_cap: float | None,
        sm_scale: float | None, rope: Rope,
    ) -> None:  # fmt: skip
        """Replace the options of the plan, as FlashInfer's `forward` does."""
        self._require_plan()
        num_positions = self._block_table.shape[1] * self._page_size
        rotations = self._rotations(rope, num_positions, self._head_dims[0])
        if self._mask is not None and window_left != self._window_left:
            raise NotImplementedError(
                f"window_left: expected {self._window_left} as planned, with a custom mask, got "
                f"{window_left}"
            )
        self._causal, self._window_left, self._sm_scale = causal, window_left, sm_scale
        self._soft_cap, self._rope_table = logits_soft_cap, rotations

    def _rotations(self, rope: Rope, num_positions: int, width: int) -> Tensor | None:
        """Return the rotations of every position that the tables have room for, or None."""
        mode, scale, theta = rope
        if mode == "NONE":
            return None
        if mode != "ROPE_LLAMA":
            raise NotImplementedError(
                f"pos_encoding_mode: expected 'NONE' or 'ROPE_LLAMA', got {mode!r}; no kernel adds "
                "a bias by position"
            )
        linear = "linear", 1.0 if scale is None else float(scale)
        base = 1e4 if theta is None else float(theta)
        options = rows_for(num_positions), width, base, linear, str(self.device)
        if options not in self._rope_tables:  # kept here too: a captured run reads it
            self._rope_tables[options] = rope_table(*options)
        return self._rope_tables[options]

    def _tables(self, csr: Mapping[str, Tensor], page_size: int) -> tuple[Tensor, Tensor]:
        """Return pages by sequence, and lengths on the host, from a CSR table."""
        for name, x in csr.items():
            require_shape(x, name, ("length",))
            require_dtype(x, name, torch.int32, torch.int64)
        (starts_name, indices_name, last_name), (indptr, indices, last_page_len) = csr, csr.values()
        require_shape(last_page_len, last_name, (len(indptr) - 1,))
        starts = offsets(indptr, starts_name)
        counts = starts[1:] - starts[:-1]
        if len(starts) and int(starts[-1]) > len(indices):
            raise ValueError(
                f"{indices_name}: expected at least {int(starts[-1])} pages, got {len(indices)}"
            )
        lengths = self._lengths(last_name, last_page_len.cpu().long(), counts, page_size)
        columns = torch.arange(max(int(counts.max()) if len(counts) else 0, 1))
        entries = (starts[:-1, None] + columns).clamp(max=max(len(indices) - 1, 0))
        pages = indices.to(self.device).int()
        table = pages[entries.to(self.device)] if len(indices) else entries.int().to(self.device)
        return table, lengths

    def _lengths(self, name: str, last: Tensor, counts: Tensor, page_size: int) -> Tensor:
        """Return the tokens of each sequence, from its pages and the tokens of the last one."""
        if bool(((last > page_size) | (last < (counts > 0))).any()):
            raise ValueError(f"{name}: expected 1 to page_size {page_size}, got {last.tolist()}")
        return torch.where(counts > 0, (counts - 1) * page_size + last, 0)

    # --- Runs ---

    def _run(
        self, q: Any, k_cache: Cache, v_cache: Cache, arguments: tuple[Any, ...] = (), *,
        q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, window_left: int | None = None,
        sinks: Tensor | None = None, block_table: Tensor | None = None, base_2: bool = True,
    ) -> Any:  # fmt: skip
        """Attend over pages as `run` of the wrappers says; `arguments` are its `*args`."""
        self._require_plan()
        if arguments:
            raise NotImplementedError("*args: kvcupy has no customised kernel that takes them")
        self._require_planned(q, k_cache, v_cache, window_left)
        if isinstance(q_scale, Tensor):
            raise NotImplementedError("q_scale: expected a number, got a tensor")
        sm_scale = 1 / math.sqrt(self._head_dims[0]) if self._sm_scale is None else self._sm_scale
        if q_scale is not None:
            sm_scale *= float(q_scale)
        out_scale: Any = None
        if isinstance(k_cache, Tensor) and k_cache.dtype not in FP8:
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
        shape = (len(q), self._heads[0], self._head_dims[1])
        if out is None:
            # Rows past the last sequence are not written.
            out = q.new_zeros(shape, dtype=self._out_dtype or q.dtype)
        require_shape(out, "out", shape)
        require_dtype(out, "out", q.dtype, torch.float32)
        if not return_lse:
            lse = None
        else:
            if lse is None:
                lse = q.new_zeros(shape[:2], dtype=torch.float32)
            require_shape(lse, "lse", shape[:2])
            require_dtype(lse, "lse", torch.float32)
        self._attend(
            q, k_cache, v_cache, self._block_table if block_table is None else block_table,
            sm_scale, (k_scale, v_scale), sinks, out, lse,
        )  # fmt: skip
        if out_scale is not None and (isinstance(out_scale, Tensor) or out_scale != 1):
            out.mul_(out_scale)
        if lse is None:
            return out
        return out, lse.mul_(_LOG2_E) if base_2 else lse

    def _attend(
        self, q: Tensor, k_cache: Cache, v_cache: Cache, block_table: Tensor, sm_scale: float,
        scales: tuple[Any, Any], sinks: Tensor | None, out: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        # A mask has the window in it.
        window = self._window_left + 1 if self._window_left >= 0 and self._mask is None else None
        cap = self._soft_cap if self._soft_cap and self._soft_cap > 0 else None
        is_tensor = isinstance(k_cache, Tensor)  # else of nvfp4, which no operator takes
        if is_tensor and self._rope_table is None and self._mask is None:
            _kv.paged_attention(
                q, k_cache, v_cache, block_table, self._seq_lens, query_lens=self._query_lens,
                layout=self._kv_layout, causal=self._causal, sinks=sinks, sm_scale=sm_scale,
                window=window, logits_soft_cap=cap, k_scale=scales[0], v_scale=scales[1], out=out,
                lse_out=lse,
            )  # fmt: skip
            return
        if self._mask is not None:  # it has no rows for those past the last sequence
            q, out = q[: self._num_tokens], out[: self._num_tokens]
            lse = None if lse is None else lse[: self._num_tokens]
        if self._rope_table is not None:
            q = self._rotated(q, self._rope_table)
        step = StepAttention(
            block_table=block_table, seq_lens=self._seq_lens, query_lens=self._query_lens,
            tree_mask=self._mask, tree_lens=None if self._mask is None else self._seq_lens,
            rope_table=self._rope_table,
        )  # fmt: skip
        options = check_options(self._kv_layout, sm_scale, self._causal, window, None, cap)
        layer = LayerArrays(k_cache, v_cache, *scales)
        step.run(layer, q, out, options, lse_out=lse, sinks=sinks)

    def _rotated(self, q: Tensor, table: Tensor) -> Tensor:
        """Return queries that are rotated by their positions, the last of their sequences."""
        if self._query_lens is None:
            positions = self._seq_lens - 1
        else:
            ends = self._query_lens.cumsum(0)
            tokens = torch.arange(len(q), device=q.device)
            last = max(len(ends) - 1, 0)  # rows past the last sequence are not read
            sequences = torch.searchsorted(ends, tokens, right=True).clamp_(max=last)
            positions = tokens + (self._seq_lens - ends)[sequences]
        rotated = torch.empty_like(q)
        positions = positions.clamp(0, len(table) - 1)
        _kv.apply_rope(None, q, table, positions, key_out=rotated)
        return rotated

    def _require_plan(self) -> None:
        if not self._planned:
            raise RuntimeError("run: expected a plan before it, call plan first")

    def _require_planned(
        self, q: Any, k_cache: Cache, v_cache: Cache, window_left: int | None
    ) -> None:
        """Raise unless the plan was made for tensors like these."""
        (q_heads, kv_heads), (k_width, v_width) = self._heads, self._head_dims
        num_tokens = self._num_tokens if self._is_decode else "tokens"
        require_shape(q, "q", (num_tokens, q_heads, k_width))
        if len(q) < self._num_tokens:
            got = describe_tensor(q)
            raise ValueError(f"q: expected at least {self._num_tokens} tokens, got {got}")
        axes = (self._page_size, kv_heads)
        axes = axes if self._kv_layout == "NHD" else axes[::-1]
        for x, part, width in zip((k_cache, v_cache), self._cache_names, (k_width, v_width),
                                  strict=True):  # fmt: skip
            if isinstance(x, Tensor):
                require_shape(x, part, ("pages", *axes, width))
            elif tuple(x.shape[1:]) != (*axes, width):  # of codes, two in a byte
                shape = *x.shape[1:-1], x.shape[-1] // 2
                raise ValueError(
                    f"{part}: expected pages of {(*axes, width // 2)} bytes, got {shape}"
                )
        kv_name = self._cache_names[0].split()[0]
        kv_dtype = k_cache.dtype if isinstance(k_cache, Tensor) else torch.uint8
        for name, dtype, planned in (
            ("q", q.dtype, self._q_dtype), (kv_name, kv_dtype, self._kv_dtype),
        ):  # fmt: skip
            if dtype != planned:  # a ValueError in FlashInfer too
                names = [str(x).removeprefix("torch.") for x in (planned, dtype)]
                raise ValueError(f"{name}: expected {names[0]} as planned, got {names[1]}")
        if window_left not in (None, self._window_left):
            raise ValueError(
                f"window_left: expected None or {self._window_left} as planned, got {window_left}"
            )


class _GraphTables:
    """Tables that keep their addresses, so that a captured run reads the tables of each new plan.

    Parameters
    ----------
    buffers : offsets, pages and tokens of the last pages by name: the caller's tensors, which say
        how many sequences and pages there can be
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
        self._names, self._buffers = (*buffers,), [x for x in buffers.values() if x is not None]
        indptr, indices, last_page_len = self._buffers
        count, pages = len(last_page_len), len(indices) if max_pages is None else max_pages
        require_shape(indptr, self._names[0], (count + 1,))
        if max_pages is not None and not 1 <= max_pages <= len(indices):
            expected = f"1 to the {len(indices)} of {self._names[1]}"
            raise ValueError(f"max_pages_per_sequence: expected {expected}, got {max_pages}")
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.max_pages = max(pages, 1)
        self._block_table = torch.zeros((count, self.max_pages), **options)
        self._seq_lens, self._query_lens = torch.zeros((2, count), **options)

    def update(
        self, csr: Mapping[str, Tensor], table: Tensor, lengths: Tensor, query_lens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy the tables of a plan into those that stay, and return these.

        Raises
        ------
        ValueError : there are other sequences, or more pages, than the buffers have; nothing has
            changed
        """
        count, width = self._block_table.shape
        names, (_, indices, _) = list(csr), csr.values()
        if len(lengths) != count:
            expected = f"the {count} sequences of {self._names[2]}"
            raise ValueError(f"{names[2]}: expected {expected}, got {len(lengths)}")
        if len(indices) > len(self._buffers[1]):
            expected = f"at most the {len(self._buffers[1])} pages of {self._names[1]}"
            raise ValueError(f"{names[1]}: expected {expected}, got {len(indices)}")
        if table.shape[1] > width:
            expected = f"at most {width} pages of a sequence (max_pages_per_sequence)"
            raise ValueError(f"{names[0]}: expected {expected}, got {table.shape[1]}")
        for buffer, values in zip(self._buffers, csr.values(), strict=True):
            buffer[: len(values)].copy_(values)
        self._block_table[:, : table.shape[1]].copy_(table)
        self._seq_lens.copy_(lengths)
        if query_lens is None:
            return self._block_table, self._seq_lens, None
        self._query_lens.copy_(query_lens)
        return self._block_table, self._seq_lens, self._query_lens
