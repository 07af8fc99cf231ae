"""Copy whole pages of a pool, an array, or each layer's arrays, onto other pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import devices, faults, observe
from ..arrays import ArrayView, describe, first_overlap, view
from ..devices.protocol import Device, Stream
from ..kernels import Kernel, Specialisation
from . import checks
from .call import Operation, Plan, Views
from .launch import Launch, fields_of, require_countable, spread, widest
from .spec import Argument
from .store import copies

_COPY_PAGES = Operation(
    "copy_pages",
    Argument("cache", "all_pages page_size head_dim", output=True, words=True, several=True),
    Argument("src_pages", "pairs", example=(0, 1)), Argument("dst_pages", "pairs", example=(3, 2)),
)  # fmt: skip

_PARAMS = np.dtype(
    [
        *fields_of(np.uint64, "cache src_pages dst_pages faults"),
        *fields_of(np.int64, "page_bytes row_bytes_0 row_bytes_1 row_bytes_2 num_pages"),
        *fields_of(np.int64, "src_stride_bytes dst_stride_bytes src_operation dst_operation"),
        *fields_of(np.int64, "row_words"),
        *fields_of(np.uint32, "num_pieces pieces_per_row rows_per_page rows_1 rows_2"),
        *fields_of(np.int32, "piece_words src_index_bytes dst_index_bytes lane_shift"),
    ],
    align=True,
)

COPY = Kernel("pages.cu", "copy_pages", _PARAMS, "CopyPagesParams")

_PIECE_WORDS = 512  # of a small block, four words a thread
_PIECE_BYTES_ALONE = 64 * 1024  # where a single thread copies a piece


def specialisations() -> list[Specialisation]:
    """Return every specialisation that copying pages can ask for."""
    return copies(COPY)


@_COPY_PAGES.public
def copy_pages(cache: Any, src_pages: Any, dst_pages: Any, *, stream: Any = None) -> None:
    """Copy pages onto other pages of the same array, all bytes, in one launch per array.

    Parameters
    ----------
    cache : a pool, of which every layer is copied, with its scales; or an array of any dtype with
        pages on its first axis, or a list or tuple of them (the layers of K and V, say). Written in
        place. The last axis is contiguous. Of a four-bit format codes and scales are copied
    src_pages, dst_pages : int32 or int64 (N,). A pair with a negative page is skipped. Past the
        end: likewise, and raised by `check_faults`
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    A page that is read and written in one call ends up undefined. Stream: one kernel per array, in
    order. Capture: legal. Bytes: each copied page is read once and written once.
    Source: vLLM `copy_blocks`.

    Examples
    --------
    >>> cache = np.arange(12).reshape(4, 3)
    >>> copy_pages(cache, np.array([0]), np.array([3]))
    >>> cache[3].tolist()
    [0, 1, 2]
    """
    layers = [part for layer in _arrays_of(cache) for part in _bytes_of(layer)]
    if len(layers) == 0:
        raise ValueError("cache: expected at least one array, got none")
    if len(layers) == 1 and layers[0] is cache:
        _COPY_PAGES.run((cache, src_pages, dst_pages), (), _plan, stream)
        return
    calls = []
    for layer in layers:
        arrays = (layer, src_pages, dst_pages)
        plan, pointers = _COPY_PAGES.prepare(arrays, (), _plan)
        plan.check(pointers, arrays)
        calls.append((plan, pointers, arrays))
    if len(calls) > 1:
        _require_layers([view(layer, "cache") for layer in layers])
    for plan, pointers, arrays in calls:
        plan.run(pointers, arrays, stream)
    if hasattr(cache, "note_written"):
        cache.note_written()


class PagesPlan(Plan):
    """Copies of pages of one array."""

    def __init__(self, views: Views, alignment: int) -> None:
        cache, src = views["cache"], views["src_pages"]
        super().__init__(_COPY_PAGES, devices.get(cache.device), cache.library)
        self.num_pairs = src.shape[0]
        if self.num_pairs and cache.size:
            self.load(lambda aligned: [_launch(self.device, views, aligned)], alignment)

    def _announced(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Stream
    ) -> observe.Operation:
        """Announce that the cache is read in some pages and written in others."""
        views = self.views(arrays)
        lists = [observe.Access(views[name], name=name) for name in ("src_pages", "dst_pages")]
        source, target = (
            observe.Access(views["cache"], pages.view, name="cache", axes=("page",))
            for pages in lists
        )
        return observe.Operation(self.operation.name, stream, (*lists, source), (target,))


def _plan(views: Views, alignment: int) -> PagesPlan:
    checks.require_arrays(views, _COPY_PAGES.names)
    checks.require_same_device(views)
    cache, src, dst = (views[name] for name in _COPY_PAGES.names)
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
    return PagesPlan(views, alignment)


def _launch(device: Device, views: Views, alignment: int) -> Launch:
    cache, src, dst = (views[name] for name in _COPY_PAGES.names)
    row_bytes, outer = _rows_of_page(cache)
    (n0, s0), (n1, s1), (n2, s2) = [(1, 0)] * (3 - len(outer)) + outer
    page_bytes = cache.strides[0]
    word = widest((row_bytes, abs(page_bytes), abs(s0), abs(s1), abs(s2), alignment))
    longest = _PIECE_BYTES_ALONE // word if device.warp_lanes == 1 else _PIECE_WORDS
    piece_words = min(row_bytes // word, longest)
    pieces_per_row = -(-row_bytes // (word * piece_words))
    num_pieces = src.shape[0] * n0 * n1 * n2 * pieces_per_row
    require_countable(num_pieces, "src_pages")
    geometry = spread(num_pieces, piece_words, device.sm_count, warp_lanes=device.warp_lanes)
    params = {
        "page_bytes": page_bytes, "num_pages": cache.shape[0],
        "row_bytes_0": s0, "row_bytes_1": s1, "row_bytes_2": s2,
        "rows_1": n1, "rows_2": n2, "rows_per_page": n0 * n1 * n2,
        "num_pieces": num_pieces, "pieces_per_row": pieces_per_row, "piece_words": piece_words,
        "row_words": row_bytes // word, "lane_shift": geometry.lane_shift,
    }  # fmt: skip
    for side, pages in (("src", src), ("dst", dst)):
        params[f"{side}_stride_bytes"] = pages.strides[0]
        params[f"{side}_index_bytes"] = pages.itemsize
        params[f"{side}_operation"] = faults.operation_id("copy_pages", f"{side}_pages")
    names = _COPY_PAGES.names
    return Launch(
        device, COPY.specialise(word), geometry.grid, geometry.block, 0, params,
        dict(zip(names, names, strict=True)), names,
    )  # fmt: skip


def _arrays_of(cache: Any) -> Sequence[Any]:
    """Return the arrays of a cache, pages first; of a pool, its parts and their scales."""
    if isinstance(cache, (list, tuple)):
        return cache
    if hasattr(cache, "parts"):
        return (*cache.parts, *getattr(cache, "scale_parts", ()))
    return (cache,)


def _bytes_of(layer: Any) -> tuple[Any, ...]:
    """Return what holds the bytes of an array; of a four-bit format perhaps two."""
    if isinstance(layer, ArrayView) and layer.scales is not None:
        return layer.memory
    return (layer,)


def _require_layers(views: list[ArrayView]) -> None:
    """Raise ValueError for layers of different page counts, or that share bytes."""
    num_pages = views[0].shape[0]
    for v in views:
        if v.shape[0] != num_pages:
            raise ValueError(f"cache: expected {num_pages} pages in each, got {describe(v)}")
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
