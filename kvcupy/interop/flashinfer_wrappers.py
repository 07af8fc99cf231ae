"""FlashInfer's attention wrappers over `kvcupy.paged_attention`. Import them from `flashinfer`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import describe_tensor, require_dtype, require_shape
from . import torch as _kv

PagedCache: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

_LOG2_E = math.log2(math.e)
_ROTATED_OR_BIASED = (
    "rotates or biases in the kernel; rotate query and key before (kvcupy.rope_store_kv), ALiBi is "
    "not offered"
)
_MASK = "a mask over all keys; kvcupy.paged_attention takes tree_mask, over the new tokens of a "
_MASK += "sequence"
_ITEMS = "multi-item scoring is not offered"


def k_and_v(paged_kv_cache: Any, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Return K and V of a cache that is one 5-D tensor or two of four dimensions."""
    _require_layout(kv_layout)
    name, axes = "paged_kv_cache", ("page_size", "heads", "head_dim")
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


def _require_layout(kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")


def _require_aligned(workspace: Tensor, name: str) -> None:
    if workspace.data_ptr() % 16:
        raise ValueError(f"{name} must be 16-byte aligned, got address {workspace.data_ptr()}")


def _require_no_rotation(pos_encoding_mode: str) -> None:
    if pos_encoding_mode != "NONE":
        raise NotImplementedError(f"pos_encoding_mode: {pos_encoding_mode!r} {_ROTATED_OR_BIASED}")


def _dtype(dtype: Any, name: str) -> torch.dtype | None:
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(named, torch.dtype):
        raise TypeError(f"{name}: expected a torch dtype or its name, got {dtype!r}")
    return named


def _offsets(indptr: Tensor, name: str) -> Tensor:
    """Return offsets on the host, which waits for them."""
    starts = indptr.cpu().long()
    if len(starts) and (int(starts[0]) < 0 or bool((starts[1:] < starts[:-1]).any())):
        raise ValueError(f"{name}: expected ascending offsets, got {starts.tolist()}")
    return starts


class _PagedAttention:
    """The tables and options of the last plan, and `kvcupy.paged_attention` with them.

    A subclass has FlashInfer's own constructor and `plan`.
    """

    _is_decode = True

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str, jit_args: Any,
        buffers: Mapping[str, Tensor | None] | None, max_pages_per_sequence: int | None,
    ) -> None:  # fmt: skip
        _require_layout(kv_layout)
        if jit_args is not None:
            raise NotImplementedError("jit_args: kvcupy compiles its own kernels")
        _require_aligned(float_workspace_buffer, "float_workspace_buffer")
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._planned, self._causal = False, True
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

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *,
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
        q, paged_kv_cache, options : as in `run`
        causal : as in `plan` of the prefill wrapper; the decode wrapper is always causal
        others : as in `plan`, and kept for further runs
        """
        _require_no_rotation(pos_encoding_mode)
        self._causal = causal or self._is_decode
        self._window_left, self._sm_scale = window_left, sm_scale
        self._soft_cap = logits_soft_cap
        return self.run(q, paged_kv_cache, **options)

    def forward_return_lse(self, *arguments: Any, **options: Any) -> Any:
        """Call `forward` with return_lse."""
        return self.forward(*arguments, return_lse=True, **options)

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer, which deprecates it."""

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        """Attend with the new tokens of all sequences over the planned pages.

        Parameters
        ----------
        q : (nnz, Hq, D), of the planned tokens. The prefill wrapper accepts further rows, which are
            not read, and are 0 in new outputs
        paged_kv_cache : as in `append_paged_kv_cache`, of the planned dtype
        q_scale : a number that sm_scale is multiplied by
        k_scale, v_scale : dequantisation multipliers of an fp8 cache: a number, or float32 of one
            element or (H,). With another cache numbers, which scores and `out` are multiplied by;
            v_scale may be a tensor of one element
        out : (nnz, Hq, D), written in place; None: allocated
        lse : float32 (nnz, Hq), written in place with return_lse; None: allocated
        window_left : None, or as planned
        sinks : float32 logits (Hq,) that join the denominator of the softmax; not with return_lse
        enable_pdl : ignored
        args : must be empty; they are for FlashInfer's customised kernels

        Returns
        -------
        out, or with return_lse (out, lse), whose base is 2

        Raises
        ------
        RuntimeError : there is no plan
        TypeError, ValueError : an argument does not fit, or not to the plan; nothing was written
        NotImplementedError : an option is not offered

        Notes
        -----
        A sequence without keys gives 0, and minus infinity in lse. Stream: torch's current one.
        """
        if not self._planned:
            raise RuntimeError("run: expected a plan before it, call plan first")
        if args:
            raise NotImplementedError("*args: kvcupy has no customised kernel that takes them")
        k_cache, v_cache = k_and_v(paged_kv_cache, self._kv_layout)
        self._require_planned(q, k_cache, v_cache, window_left)
        if isinstance(q_scale, Tensor):
            raise NotImplementedError("q_scale: a number, which sm_scale is multiplied by")
        sm_scale = 1 / math.sqrt(self._head_dims[0]) if self._sm_scale is None else self._sm_scale
        if q_scale is not None:
            sm_scale *= float(q_scale)
        out_scale: Any = None
        if k_cache.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            # As FlashInfer does: the scales multiply scores and outputs.
            if isinstance(k_scale, Tensor):
                raise NotImplementedError("k_scale: a number with a cache that is not fp8")
            if k_scale is not None:
                sm_scale *= k_scale
            k_scale, v_scale, out_scale = None, None, v_scale
        if sinks is not None and return_lse:
            raise NotImplementedError("return_lse: not with sinks, which are no keys")
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
        _kv.paged_attention(
            q, k_cache, v_cache, self._block_table, self._seq_lens, query_lens=self._query_lens,
            layout=self._kv_layout, causal=self._causal, sinks=sinks, sm_scale=sm_scale,
            window=self._window_left + 1 if self._window_left >= 0 else None,
            logits_soft_cap=self._soft_cap if self._soft_cap and self._soft_cap > 0 else None,
            k_scale=k_scale, v_scale=v_scale, out=out, lse_out=lse,
        )  # fmt: skip
        if out_scale is not None and (isinstance(out_scale, Tensor) or out_scale != 1):
            out.mul_(out_scale)
        return out if lse is None else (out, lse.mul_(_LOG2_E))

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """Call `run` with return_lse."""
        return self.run(*args, return_lse=True, **options)

    def _require_planned(
        self, q: Any, k_cache: Tensor, v_cache: Tensor, window_left: int | None
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
        for x, part, width in ((k_cache, "K", k_width), (v_cache, "V", v_width)):
            require_shape(x, f"paged_kv_cache ({part})", ("pages", *axes, width))
        for x, name, dtype in (
            (q, "q", self._q_dtype), (k_cache, "paged_kv_cache", self._kv_dtype),
        ):  # fmt: skip
            if x.dtype != dtype:  # a ValueError in FlashInfer too
                planned = str(dtype).removeprefix("torch.")
                raise ValueError(f"{name}: expected {planned} as planned, got {describe_tensor(x)}")
        if window_left not in (None, self._window_left):
            raise ValueError(
                f"window_left: expected None or {self._window_left} as planned, got {window_left}"
            )

    def _plan(
        self, csr: Mapping[str, Tensor], *, heads: tuple[int, int], head_dims: tuple[int, int],
        page_size: int, pos_encoding_mode: str, window_left: int, logits_soft_cap: float | None,
        sm_scale: float | None, dtypes: tuple[Any, Any, Any], seq_lens: Any,
        query_lens: Tensor | None, num_tokens: int, min_keys: int = 1,
    ) -> None:  # fmt: skip
        """Keep tables and options; a sequence that has keys has at least `min_keys`.

        `csr` are offsets, pages and tokens of the last pages by the names of `plan`'s arguments.
        """
        _require_no_rotation(pos_encoding_mode)
        q_dtype, kv_dtype, out_dtype = (
            _dtype(dtype, f"{name}_data_type")
            for dtype, name in zip(dtypes, ("q", "kv", "o"), strict=True)
        )
        if q_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(f"q_data_type: expected 16 or 32 bits, got {q_dtype}")
        if out_dtype not in (None, q_dtype, torch.float32):
            raise NotImplementedError(
                f"o_data_type: expected q_data_type or float32, got {out_dtype}"
            )
        table, lengths = self._tables(csr, page_size)
        if seq_lens is not None:
            require_shape(seq_lens, "seq_lens", (len(lengths),))
            lengths = seq_lens.to(lengths)
        if min_keys > 1 and bool(((lengths > 0) & (lengths < min_keys)).any()):
            expected = f"none or at least q_len_per_req {min_keys} keys per sequence"
            raise ValueError(f"last_page_len: expected {expected}, got {lengths.tolist()}")
        if query_lens is not None:
            query_lens = query_lens.to(lengths)
        if self._graph_tables is not None:
            table, lengths, query_lens = self._graph_tables.update(csr, table, lengths, query_lens)
        # All checks are done: a plan that raises leaves the last one in place.
        self._block_table, self._seq_lens, self._query_lens = table, lengths, query_lens
        self._heads, self._head_dims, self._page_size = heads, head_dims, page_size
        self._q_dtype, self._kv_dtype, self._out_dtype = q_dtype, kv_dtype or q_dtype, out_dtype
        self._window_left, self._num_tokens = window_left, num_tokens
        self._soft_cap, self._sm_scale = logits_soft_cap, sm_scale
        self._planned = True

    def _tables(self, csr: Mapping[str, Tensor], page_size: int) -> tuple[Tensor, Tensor]:
        """Return pages by sequence, and lengths, from a CSR table. The host waits for it."""
        for name, x in csr.items():
            require_shape(x, name, ("length",))
            require_dtype(x, name, torch.int32, torch.int64)
        (starts_name, indices_name, last_name), (indptr, indices, last_page_len) = csr, csr.values()
        require_shape(last_page_len, last_name, (len(indptr) - 1,))
        starts, last = _offsets(indptr, starts_name), last_page_len.cpu().long()
        counts = starts[1:] - starts[:-1]
        if len(starts) and int(starts[-1]) > len(indices):
            raise ValueError(
                f"{indices_name}: expected at least {int(starts[-1])} pages, got {len(indices)}"
            )
        if bool(((last > page_size) | (last < (counts > 0))).any()):
            raise ValueError(
                f"{last_name}: expected 1 to page_size {page_size}, got {last.tolist()}"
            )
        lengths = torch.where(counts > 0, (counts - 1) * page_size + last, 0)
        columns = torch.arange(max(int(counts.max()) if len(counts) else 0, 1))
        entries = (starts[:-1, None] + columns).clamp(max=max(len(indices) - 1, 0))
        pages = indices.to(self.device).int()
        table = pages[entries.to(self.device)] if len(indices) else entries.int().to(self.device)
        return table, lengths.int().to(self.device)


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
        self._block_table = torch.zeros((count, max(pages, 1)), **options)
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


class BatchDecodeWithPagedKVCacheWrapper(_PagedAttention):
    """Attend with one new token per sequence, or a few: `kvcupy.paged_attention`.

    Parameters
    ----------
    float_workspace_buffer : only its device counts
    kv_layout : "NHD" or "HND"
    use_cuda_graph : keep the tables of all plans in the same memory, so that a captured run attends
        over the pages of the last plan. Batch size and all other options stay as captured
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : with
        use_cuda_graph: (B + 1,), as many pages as a plan may have, (B,); a plan copies its table
        there. Else ignored
    use_tensor_cores, backend : ignored; shapes choose the kernel
    jit_args : anything but None raises NotImplementedError
    max_pages_per_sequence : only in kvcupy, with use_cuda_graph: the most pages of one sequence, by
        which a captured launch is laid out. None: all that the buffer holds, which takes
        4 B len(buffer) bytes, and leaves short sequences with fewer blocks

    Notes
    -----
    `plan` waits for the tables, which it makes rectangular, on the host; `run` does not wait.
    Each may be called any number of times; a plan that raises leaves the last one in place.
    `begin_forward` is `plan`.
    Source: FlashInfer `flashinfer.decode`.

    Examples
    --------
    See `kvcupy.interop.flashinfer`.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        *,
        max_pages_per_sequence: int | None = None,
    ) -> None:
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(
            float_workspace_buffer, kv_layout, jit_args, buffers if use_cuda_graph else None,
            max_pages_per_sequence,
        )  # fmt: skip
        self.use_tensor_cores = use_tensor_cores
        self._q_len_per_req = 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Set the pages and options of the next runs.

        Parameters
        ----------
        indptr, indices, last_page_len : (B + 1,), (indptr[-1],), (B,), on any device
        num_qo_heads, num_kv_heads, head_dim, page_size : of the tensors of the runs
        pos_encoding_mode : other than "NONE" raises NotImplementedError
        window_left : keys before its own position that a query sees; -1: all
        logits_soft_cap : None or 0: no cap
        q_data_type, kv_data_type, o_data_type : dtypes or their names. None: q_data_type. The query
            has 16 or 32 bits; out has its dtype, or float32
        data_type : of query and cache, where q_data_type and kv_data_type are None
        sm_scale : None: 1 / sqrt(head_dim)
        seq_lens : (B,), instead of the lengths that follow from last_page_len
        q_len_per_req : new tokens per sequence, causal among themselves; with use_cuda_graph the
            same in all plans. A sequence has as many keys, or none
        others : ignored

        Raises
        ------
        TypeError, ValueError : an argument does not fit, or the table's values do not
        NotImplementedError : an option is not offered
        """
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req: expected at least 1, got {q_len_per_req}")
        if self.is_cuda_graph_enabled and self._planned and q_len_per_req != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req: expected {self._q_len_per_req} as in the first plan, which "
                f"captured runs keep, got {q_len_per_req}"
            )
        require_shape(last_page_len, "last_page_len", ("batch_size",))
        count = len(last_page_len)
        self._plan(
            {"indptr": indptr, "indices": indices, "last_page_len": last_page_len},
            heads=(num_qo_heads, num_kv_heads), head_dims=(head_dim, head_dim),
            page_size=page_size, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            dtypes=(
                data_type if q_data_type is None else q_data_type,
                data_type if kv_data_type is None else kv_data_type,
                o_data_type,
            ),
            seq_lens=seq_lens,
            query_lens=torch.full((count,), q_len_per_req) if q_len_per_req > 1 else None,
            num_tokens=count * q_len_per_req, min_keys=q_len_per_req,
        )  # fmt: skip
        self._q_len_per_req = q_len_per_req

    begin_forward = plan


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Attend with `use_cuda_graph`: `BatchDecodeWithPagedKVCacheWrapper` with its buffers by order.

    Parameters
    ----------
    workspace_buffer : only its device counts
    indptr_buffer, indices_buffer, last_page_len_buffer, others : as there

    Examples
    --------
    >>> buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 8, 2)]
    >>> workspace = torch.empty(0, dtype=torch.uint8)
    >>> CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers).is_cuda_graph_enabled
    True
    """

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
        *,
        max_pages_per_sequence: int | None = None,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer,
            last_page_len_buffer, max_pages_per_sequence=max_pages_per_sequence,
        )  # fmt: skip


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    *arguments: Any,
    global_override_indptr_cpu: Tensor | None = None,
    **options: Any,
) -> None:
    """Call `wrapper.plan`, which is no slower here; SGLang calls this function."""
    wrapper.plan(*arguments, **options)


class BatchPrefillWithPagedKVCacheWrapper(_PagedAttention):
    """Attend with the new tokens of each sequence: `kvcupy.paged_attention`.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, jit_args, max_pages_per_sequence : as in
        `BatchDecodeWithPagedKVCacheWrapper`, and so are notes
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf : with
        use_cuda_graph, likewise
    others : ignored

    Examples
    --------
    >>> cache = torch.ones(2, 2, 4, 1, 8)  # pages, K and V, slots of a page, heads, head_dim
    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> qo_indptr, indptr, pages, last = (torch.tensor(x) for x in ([0, 3], [0, 1], [1], [3]))
    >>> wrapper.plan(
    ...     qo_indptr, indptr, pages, last, 2, 1, 8, 4, causal=True, q_data_type=torch.float32
    ... )
    >>> out, lse = wrapper.run(torch.zeros(3, 2, 8), cache, return_lse=True)
    >>> (2 ** lse[:, 0]).tolist()  # how many keys each token sees, of equal scores
    [1.0, 2.0, 3.0]
    """

    _is_decode = False

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        *,
        max_pages_per_sequence: int | None = None,
    ) -> None:
        buffers = {
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        super().__init__(
            float_workspace_buffer, kv_layout, jit_args, buffers if use_cuda_graph else None,
            max_pages_per_sequence,
        )  # fmt: skip
        if use_cuda_graph and paged_kv_last_page_len_buf is not None:
            require_shape(qo_indptr_buf, "qo_indptr_buf", (len(paged_kv_last_page_len_buf) + 1,))
        self._qo_indptr_buf = qo_indptr_buf if use_cuda_graph else None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Set the new tokens, pages and options of the next runs.

        Parameters
        ----------
        qo_indptr : (B + 1,), where the new tokens of each sequence begin; they are its last ones
        head_dim_vo : None: head_dim_qk
        causal : a token sees keys up to its own position; else all of its sequence. As in
            FlashInfer, False is the default
        custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr :
            anything but None raises NotImplementedError
        use_fp16_qk_reduction : ignored; sums are float32
        seq_lens_q, max_token_per_sequence, max_sequence_kv : ignored; they follow from the tables
        others : as in `BatchDecodeWithPagedKVCacheWrapper.plan`, and so are errors
        """
        for name, value, reason in (
            ("custom_mask", custom_mask, _MASK),
            ("packed_custom_mask", packed_custom_mask, _MASK),
            ("prefix_len_ptr", prefix_len_ptr, _ITEMS),
            ("token_pos_in_items_ptr", token_pos_in_items_ptr, _ITEMS),
            ("max_item_len_ptr", max_item_len_ptr, _ITEMS),
        ):
            if value is not None:
                raise NotImplementedError(f"{name}: {reason}")
        require_shape(paged_kv_indptr, "paged_kv_indptr", ("batch_size + 1",))
        require_shape(qo_indptr, "qo_indptr", (len(paged_kv_indptr),))
        starts = _offsets(qo_indptr, "qo_indptr")
        if len(starts) and int(starts[0]):
            raise ValueError(f"qo_indptr: expected offsets from 0, got {starts.tolist()}")
        query_lens = starts[1:] - starts[:-1]
        width = head_dim_qk if head_dim_vo is None else head_dim_vo
        self._plan(
            {
                "paged_kv_indptr": paged_kv_indptr, "paged_kv_indices": paged_kv_indices,
                "paged_kv_last_page_len": paged_kv_last_page_len,
            },
            heads=(num_qo_heads, num_kv_heads), head_dims=(head_dim_qk, width),
            page_size=page_size, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type, o_data_type), seq_lens=seq_lens,
            query_lens=query_lens, num_tokens=int(query_lens.sum()),
        )  # fmt: skip
        if self._qo_indptr_buf is not None:
            self._qo_indptr_buf.copy_(qo_indptr)
        self._causal = causal

    begin_forward = plan
