"""Copy whole pages of a pool, an array, or every layer's arrays, onto other pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import devices, faults
from ..arrays import ArrayView, describe, first_overlap, view
from ..errors import CompileError
from ..kernels import Kernel, Specialisation, zeroed
from . import cache_rows, checks, expressions, geometry, plan

_ARRAYS = ("cache", "src_pages", "dst_pages")

_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*_ARRAYS, "faults")),
        ("page_bytes", np.int64),
        ("row_bytes_0", np.int64),
        ("row_bytes_1", np.int64),
        ("row_bytes_2", np.int64),
        ("num_pages", np.int64),
        ("src_stride_bytes", np.int64),
        ("dst_stride_bytes", np.int64),
        ("src_operation", np.int64),
        ("dst_operation", np.int64),
        ("num_rows", np.int64),
        ("row_bytes", np.int64),
        ("rows_1", np.int32),
        ("rows_2", np.int32),
        ("rows_a_page", np.int32),
        ("src_index_bytes", np.int32),
        ("dst_index_bytes", np.int32),
        ("lane_shift", np.int32),
    ],
    align=True,
)

COPY = Kernel("pages.cu", "copy_pages", _PARAMS, "CopyPagesParams")


def specialisations() -> list[Specialisation]:
    """Return every specialisation that copying pages can ask for."""
    return cache_rows.copies(COPY)


def copy_pages(cache: Any, src_pages: Any, dst_pages: Any, *, stream: Any = None) -> None:
    """Copy pages onto other pages of the same array, all bytes, in one launch an array.

    Parameters
    ----------
    cache : a pool, of which every layer is copied, with its scales; or an array of any dtype with
        pages on its first axis, or a list or tuple of them (the layers of K and V, say). Written in
        place. The last axis is contiguous
    src_pages, dst_pages : int32 or int64 (N,). A pair with a negative page is skipped. Past the
        end: likewise, and raised by `check_faults`
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    A page that is read and written in one call ends up undefined. Stream: one kernel an array, in
    order. Capture: legal. Bytes: each copied page is read once and written once.
    Source: vLLM `copy_blocks`.

    Examples
    --------
    >>> cache = np.arange(12).reshape(4, 3)
    >>> copy_pages(cache, np.array([0]), np.array([3]))
    >>> cache[3].tolist()
    [0, 1, 2]
    """
    layers = _arrays_of(cache)
    if len(layers) == 0:
        raise ValueError("cache: expected at least one array, got none")
    calls = []
    for one in layers:
        arrays = (one, src_pages, dst_pages)
        pointers, made = plan.obtain("copy_pages", _ARRAYS, arrays, 1, (), _plan)
        made.check(pointers, arrays)
        calls.append((pointers, made, arrays))
    if len(calls) > 1:
        _require_layers([view(one, "cache") for one in layers])
    for pointers, made, arrays in calls:
        made.run(pointers, arrays, stream)
    if hasattr(cache, "note_written"):
        cache.note_written()


@dataclass
class PagesPlan(plan.Plan):
    """Copies of pages of one array."""

    cache: ArrayView
    src: ArrayView
    dst: ArrayView
    alignment: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.src.shape[0] == 0 or self.cache.size == 0:
            return
        try:
            self.launches.append(self._launch())
        except CompileError as cause:
            self.cause = cause

    def views(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Describe the three arrays."""
        return [view(array) for array in arrays]

    def slots(self, views: list[ArrayView | None], output: int) -> ArrayView | None:
        """Return the pages that are written."""
        return views[2]

    def express(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Copy as array expressions."""
        device, num_pages = self.device, self.cache.shape[0]
        cache, src, dst = (device.carrier(view(array)) for array in arrays)
        meant = (src >= 0) & (dst >= 0)
        for name, pages in (("src_pages", src), ("dst_pages", dst)):
            bad = (meant & (pages >= num_pages)).nonzero()[0]
            meant &= pages < num_pages
            if len(bad):
                operation = faults.operation_id("copy_pages", name)
                expressions.note_fault(device, len(bad), operation, bad[0], pages[bad[0]])
        cache[dst[meant]] = cache[src[meant]]

    def _launch(self) -> plan.Launch:
        row_bytes, outer = _rows_of_page(self.cache)
        (n0, s0), (n1, s1), (n2, s2) = [(1, 0)] * (3 - len(outer)) + outer
        page_bytes = self.cache.strides[0]
        word = geometry.widest(
            (row_bytes, abs(page_bytes), abs(s0), abs(s1), abs(s2), self.alignment)
        )
        num_rows = self.src.shape[0] * n0 * n1 * n2
        geometry.require_countable(num_rows, "src_pages")
        shape = geometry.spread(
            num_rows,
            row_bytes // word,
            self.device.sm_count,
            warp_lanes=self.device.warp_lanes,
        )
        params = zeroed(_PARAMS)
        params["page_bytes"], params["num_pages"] = page_bytes, self.cache.shape[0]
        params["row_bytes_0"], params["row_bytes_1"], params["row_bytes_2"] = s0, s1, s2
        for name, pages in (("src", self.src), ("dst", self.dst)):
            params[f"{name}_stride_bytes"] = pages.strides[0]
            params[f"{name}_index_bytes"] = pages.itemsize
            params[f"{name}_operation"] = faults.operation_id("copy_pages", f"{name}_pages")
        params["num_rows"], params["row_bytes"] = num_rows, row_bytes
        params["rows_1"], params["rows_2"], params["rows_a_page"] = n1, n2, n0 * n1 * n2
        params["lane_shift"] = shape.lane_shift
        specialisation = COPY.specialise(word)
        return plan.Launch(
            self.device, specialisation, shape.grid, shape.block, 0, params, range(3)
        )


def _plan(given: dict[str, Any], alignment: int) -> PagesPlan:
    checks.require_given(given, _ARRAYS)
    checks.require_same_device(given)
    cache, src, dst = (given[name] for name in _ARRAYS)
    if cache.ndim == 0:
        raise ValueError(f"cache: expected pages on the first axis, got {describe(cache)}")
    if cache.ndim > 1:
        checks.require_contiguous(cache, "cache")
    checks.require_output(cache, "cache")
    if len(_rows_of_page(cache)[1]) > 3:
        raise ValueError(
            f"cache: expected pages of at most three axes of gaps, got strides {cache.strides}"
        )
    src_count, dst_count = checks.length_of(src, "src_pages"), checks.length_of(dst, "dst_pages")
    if src_count != dst_count:
        raise ValueError(f"dst_pages: expected {src_count} like src_pages, got {dst_count}")
    return PagesPlan(
        "copy_pages", _ARRAYS, (0,), devices.get(cache.device), cache.library,
        cache, src, dst, alignment,
    )  # fmt: skip


def _arrays_of(cache: Any) -> Sequence[Any]:
    """Return the arrays of a cache, pages first; those of a pool are its parts and their scales."""
    if isinstance(cache, (list, tuple)):
        return cache
    if hasattr(cache, "parts"):
        return (*cache.parts, *getattr(cache, "scale_parts", ()))
    return (cache,)


def _require_layers(views: list[ArrayView]) -> None:
    """Refuse layers of unlike page counts, or that share bytes."""
    for v in views[1:]:
        if v.shape[0] != views[0].shape[0]:
            raise ValueError(
                f"cache: expected {views[0].shape[0]} pages in each, got {describe(v)}"
            )
    if first_overlap(views) is not None:
        raise ValueError("cache: expected memory of its own, got some of cache's")


def _rows_of_page(cache: ArrayView) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes of a contiguous row, and (count, stride) of the axes of rows in a page."""
    row_bytes = cache.itemsize
    outer: list[tuple[int, int]] = []
    for n, stride in zip(reversed(cache.shape[1:]), reversed(cache.strides[1:]), strict=True):
        if n == 1:
            continue
        if not outer and stride == row_bytes:
            row_bytes *= n
        elif outer and stride == outer[0][0] * outer[0][1]:
            outer[0] = (n * outer[0][0], outer[0][1])
        else:
            outer.insert(0, (n, stride))
    return row_bytes, outer
