"""FlashInfer's attention over latents in pages. Import it from the package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import require_none, require_shape
from .plan import PlannedAttention


class BatchMLAPagedAttentionWrapper(PlannedAttention):
    """Attend over latents and rotated keys of MLA in pages: `kvcupy.paged_attention`, one head.

    Parameters
    ----------
    float_workspace_buffer : only its device counts
    use_cuda_graph : keep the tables of all plans in the same memory, so that a captured run attends
        over the pages of the last plan. Batch size and all other options stay as captured
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : with use_cuda_graph: (B + 1,), (B + 1,), as many
        pages as a plan may have, (B,); a plan copies its table there. Else ignored
    backend : ignored
    max_pages_per_sequence : only in kvcupy, as in `BatchDecodeWithPagedKVCacheWrapper`

    Notes
    -----
    Latents and rotated keys are read in place where they are the two parts of one cache's rows, as
    engines keep them: `cache[..., :R]` and `cache[..., R:]`. Of two separate caches each run first
    copies the planned pages into rows, which takes longer than attention; the parts of a query are
    put together likewise. `plan` waits for the tables on the host; `run` does not wait. Source:
    FlashInfer `flashinfer.mla`.

    Examples
    --------
    >>> cache = torch.ones(2, 4, 12)  # pages, slots of a page, latent and rotated key
    >>> wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0, dtype=torch.uint8))
    >>> starts, pages, lengths = torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([3])
    >>> dtypes = torch.float32, torch.float32
    >>> wrapper.plan(starts, starts, pages, lengths, 2, 8, 4, 4, True, 0.5, *dtypes)
    >>> q_nope, q_pe = torch.zeros(1, 2, 12).split([8, 4], -1)
    >>> wrapper.run(q_nope, q_pe, cache[..., :8], cache[..., 8:]).shape
    torch.Size([1, 2, 8])
    """

    _cache_names = ("ckv_cache", "ckv_cache")

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
        *,
        max_pages_per_sequence: int | None = None,
    ) -> None:
        buffers = {
            "qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }  # fmt: skip
        super().__init__(
            float_workspace_buffer, "NHD", use_cuda_graph, buffers, max_pages_per_sequence
        )

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Any,
        kv_data_type: Any,
        use_profiler: bool = False,
        *,
        lse_mode: str = "none",
    ) -> None:
        """Set the new tokens, pages and options of the next runs.

        Parameters
        ----------
        qo_indptr : (B + 1,), where the new tokens of each sequence begin; they are its last ones
        kv_indptr, kv_indices : (B + 1,), (kv_indptr[-1],), the pages of each sequence
        kv_len_arr : (B,), its keys
        num_heads, head_dim_ckv, head_dim_kpe, page_size : of the tensors of the runs
        causal : a token sees keys up to its own position; else all of its sequence
        q_data_type, kv_data_type : as in `BatchDecodeWithPagedKVCacheWrapper.plan`
        use_profiler : True raises NotImplementedError
        lse_mode : "basee": the log-sum-exp of the runs is natural; "none", "base2": as they say

        Raises
        ------
        TypeError, ValueError : an argument does not fit, or the table's values do not
        NotImplementedError : an option is not offered
        """
        if use_profiler:
            raise NotImplementedError("use_profiler: kvcupy.timeline records what runs")
        if lse_mode not in ("none", "base2", "basee"):
            raise ValueError(f"lse_mode: expected 'none', 'base2' or 'basee', got {lse_mode!r}")
        self._set_plan(
            {
                "qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices,
                "kv_len_arr": kv_len_arr,
            },
            heads=(num_heads, 1), head_dims=(head_dim_ckv + head_dim_kpe, head_dim_ckv),
            page_size=page_size, sm_scale=sm_scale, dtypes=(q_data_type, kv_data_type, None),
            causal=causal,
        )  # fmt: skip
        self._is_natural = lse_mode == "basee"

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> Any:
        """Attend with the new tokens of all sequences over the planned pages.

        Parameters
        ----------
        q_nope, q_pe : (nnz, Hq, R), (nnz, Hq, P), of the planned tokens, and perhaps further rows
        ckv_cache, kpe_cache : (pages, page_size, R), (pages, page_size, P); see the class
        out : (nnz, Hq, R), written in place; None: allocated
        lse : float32 (nnz, Hq), written in place; None: allocated, with return_lse
        profiler_buffer, kv_len, page_table : anything but None raises NotImplementedError
        return_lse_base_on_e : the log-sum-exp is natural, else of base 2

        Returns
        -------
        out, or with return_lse (out, lse)

        Raises
        ------
        RuntimeError, TypeError, ValueError : as in `BatchDecodeWithPagedKVCacheWrapper.run`
        """
        require_none(
            "expected None, since plan sets the pages", profiler_buffer=profiler_buffer,
            kv_len=kv_len, page_table=page_table,
        )  # fmt: skip
        plan = self._planned()
        width, latent = plan.head_dims
        require_shape(q_nope, "q_nope", ("tokens", plan.heads[0], latent))
        require_shape(q_pe, "q_pe", (*q_nope.shape[:2], width - latent), q_nope.dtype)
        require_shape(ckv_cache, "ckv_cache", ("pages", plan.page_size, latent))
        kpe_shape = *ckv_cache.shape[:2], width - latent
        require_shape(kpe_cache, "kpe_cache", kpe_shape, ckv_cache.dtype)
        query = _side_by_side(q_nope, q_pe)
        if query is None:
            query = torch.cat((q_nope, q_pe), dim=-1)
        cache = _side_by_side(ckv_cache, kpe_cache)
        if cache is None:
            cache, table = _joined(ckv_cache, kpe_cache, plan.block_table)
            plan = replace(plan, block_table=table)
        rows = cache[:, :, None]
        results = plan.run(
            query, rows, rows[..., :latent], out=out, lse=lse,
            return_lse=return_lse or lse is not None,
            base_2=not (return_lse_base_on_e or self._is_natural),
        )  # fmt: skip
        return results if return_lse or lse is None else results[0]

    def _lengths(self, name: str, last: Tensor, counts: Tensor, page_size: int) -> Tensor:
        """Return the tokens of each sequence, which the table says itself."""
        if bool(((last > counts * page_size) | (last < 0)).any()):
            expected = f"0 to {(counts * page_size).tolist()}, for which there are pages"
            raise ValueError(f"{name}: expected {expected}, got {last.tolist()}")
        return last


def _side_by_side(first: Tensor, second: Tensor) -> Tensor | None:
    """Return the rows of two tensors as one tensor, or None unless they lie so in memory."""
    widths = first.shape[-1], second.shape[-1]
    if not widths[1]:
        return first
    if (
        first.stride() != second.stride()
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or second.storage_offset() - first.storage_offset() != widths[0]
        or any(abs(step) < sum(widths) for step in first.stride()[:-1])
    ):
        return None
    return first.as_strided((*first.shape[:-1], sum(widths)), first.stride())


def _joined(first: Tensor, second: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the planned pages of two caches as pages of longer rows, and the table of these."""
    num_pages = len(first)
    if table.numel() >= num_pages:
        return torch.cat((first, second), dim=-1), table
    pages = table.flatten().clamp(0, num_pages - 1)
    rows = torch.cat((first[pages], second[pages]), dim=-1)
    own = torch.arange(len(pages), dtype=table.dtype, device=table.device).view_as(table)
    # Entries that are not pages stay so: skipped, or faults.
    return rows, own.where(table < num_pages, len(pages)).where(table >= 0, -1)
