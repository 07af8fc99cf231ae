"""Pages of a pool or of arrays: copied onto other pages, or their keys moved to other positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import devices, faults, formats, observe
from ..arrays import ArrayView, bytes_of, describe, first_overlap, reshaped, view
from ..checks import flag, require_int
from ..devices.protocol import Device, Stream
from ..formats import FORMATS, FOUR_BIT
from ..kernels import Kernel, Specialisation, by_lanes
from . import checks, kv_operand, transfer_kernels
from .call import Operation, Plan
from .launch import Launch, fields_of, require_countable, spread, staging, widest
from .spec import Argument
from .store import CODES_PER_THREAD, PACK, copies
from .transfer_kernels import ROWS, STRIDES, head_rows, nested

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

_SHIFT_PAGES = Operation(
    "shift_pages",
    Argument(
        "pool", "all_pages page_size kv_heads head_dim", cache=True, output=True, words=True
    ),
    Argument("pages", "pairs", example=(0, 1)),
    Argument("delta", "pairs", example=(3, -2), number=True, whole=True),
    Argument("rope_table", "positions rotary_dim", words=True),
    Argument("out_pages", "pairs", example=(3, 2)),
    # Of a pool alone.
    Argument("values", cache=True, output=True, words=True),
    Argument("key_scales", output=True, words=True),
    Argument("value_scales", output=True, words=True),
)  # fmt: skip

_PARTS = ("pool", "values", "key_scales", "value_scales")
_FIELDS = ("keys", "values", "key_scales", "value_scales")  # of the Params
_LISTS = ("pages", "out_pages", "delta")
_AXES = ("page", "layer", "offset", "head")

_SHIFT_PARAMS = np.dtype(
    [
        *fields_of(np.uint64, "keys values key_scales value_scales src_pages dst_pages deltas"),
        *fields_of(np.uint64, "table faults"),
        *((f"{name}_strides", STRIDES) for name in ("key", "value", "key_scale", "value_scale")),
        ("rows", ROWS), ("key", kv_operand.OPERAND_PARAMS),
        *fields_of(np.int64, "delta delta_stride_bytes delta_operation table_row_bytes"),
        *fields_of(np.int64, "max_positions"),
        *fields_of(np.int32, "delta_index_bytes width start rotary_dim interleaved"),
        *fields_of(np.int32, "value_bytes value_word_bytes"),
    ],
    align=True,
)  # fmt: skip

SHIFT_ROWS, SHIFT_FOUR_BIT = (
    by_lanes("shift.cu", name, _SHIFT_PARAMS, "ShiftParams")
    for name in ("shift_rows", "shift_four_bit")
)


def specialisations() -> list[Specialisation]:
    """Return every specialisation that copying or shifting pages can ask for."""
    rows = [
        SHIFT_ROWS[32].specialise(format.ctype, count)
        for format in FORMATS.values()
        for count in (PACK, 1)
    ]
    four_bit = [
        SHIFT_FOUR_BIT[32].specialise(ctype, count)
        for ctype in dict.fromkeys(format.ctype for format in FOUR_BIT.values())
        for count in (CODES_PER_THREAD, 1)
    ]
    return [*copies(COPY), *rows, *four_bit]


@_COPY_PAGES.public
def copy_pages(cache: Any, src_pages: Any, dst_pages: Any, *, stream: Any = None) -> None:
    """Copy pages onto other pages of the same array, all bytes, in one launch per array.

    Parameters
    ----------
    cache : a pool, of which every layer is copied, with its scales; or an array of any dtype with
        pages on its first axis, or a list or tuple of them (the layers of K and V, say). Written in
        place. The last axis is contiguous. Of a four-bit format codes and scales are copied
    src_pages, dst_pages : int32 or int64 (N,), of a pool also lists of ints. A pair with a negative
        page is skipped. One past the end is skipped too, and raised by `check_faults`
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
    if hasattr(cache, "parts") and (_is_list(src_pages) or _is_list(dst_pages)):
        first = view(layers[0], "cache")
        device = devices.get(first.device)
        stream = device.as_stream(stream, first.library)
        lists = _on_device(device, stream, src_pages=src_pages, dst_pages=dst_pages)
        src_pages, dst_pages = lists.values()
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

    def __init__(
        self, cache: ArrayView, src_pages: ArrayView, dst_pages: ArrayView, alignment: int
    ) -> None:
        super().__init__(_COPY_PAGES, devices.get(cache.device), cache.library)
        self.num_pairs = src_pages.shape[0]
        bound = faults.below(cache.shape[0])
        self.report(src_pages=bound, dst_pages=bound)
        if self.num_pairs and cache.size:
            self.load(
                lambda aligned: [_launch(self, cache, src_pages, dst_pages, aligned)], alignment
            )

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


def _plan(
    alignment: int, *, cache: ArrayView, src_pages: ArrayView, dst_pages: ArrayView
) -> PagesPlan:
    if cache.ndim == 0:
        raise ValueError(f"cache: expected pages on the first axis, got {describe(cache)}")
    if cache.ndim > 1:
        checks.require_contiguous(cache, "cache")
    checks.require_output(cache, "cache")
    if len(_rows_of_page(cache)[1]) > 3:
        raise ValueError(
            f"cache: expected pages of at most three axes of gaps, got strides {cache.strides}"
        )
    src_count = checks.indices(src_pages, "src_pages")
    dst_count = checks.indices(dst_pages, "dst_pages")
    if src_count != dst_count:
        raise ValueError(f"dst_pages: expected {src_count} like src_pages, got {dst_count}")
    return PagesPlan(cache, src_pages, dst_pages, alignment)


def _launch(
    plan: PagesPlan, cache: ArrayView, src_pages: ArrayView, dst_pages: ArrayView, alignment: int
) -> Launch:
    device = plan.device
    row_bytes, outer = _rows_of_page(cache)
    (n0, s0), (n1, s1), (n2, s2) = [(1, 0)] * (3 - len(outer)) + outer
    page_bytes = cache.strides[0]
    word = widest((row_bytes, abs(page_bytes), abs(s0), abs(s1), abs(s2), alignment))
    longest = _PIECE_BYTES_ALONE // word if device.warp_lanes == 1 else _PIECE_WORDS
    piece_words = min(row_bytes // word, longest)
    pieces_per_row = -(-row_bytes // (word * piece_words))
    num_pieces = src_pages.shape[0] * n0 * n1 * n2 * pieces_per_row
    require_countable(num_pieces, "src_pages")
    geometry = spread(num_pieces, piece_words, device.sm_count, warp_lanes=device.warp_lanes)
    params = {
        "page_bytes": page_bytes, "num_pages": cache.shape[0],
        "row_bytes_0": s0, "row_bytes_1": s1, "row_bytes_2": s2,
        "rows_1": n1, "rows_2": n2, "rows_per_page": n0 * n1 * n2,
        "num_pieces": num_pieces, "pieces_per_row": pieces_per_row, "piece_words": piece_words,
        "row_words": row_bytes // word, "lane_shift": geometry.lane_shift,
    }  # fmt: skip
    for side, pages in (("src", src_pages), ("dst", dst_pages)):
        params[f"{side}_stride_bytes"] = pages.strides[0]
        params[f"{side}_index_bytes"] = pages.itemsize
        params[f"{side}_operation"] = plan.fault_ids[f"{side}_pages"]
    pointers = {"cache": cache, "src_pages": src_pages, "dst_pages": dst_pages}
    return Launch(
        device, COPY.specialise(word), geometry.grid, geometry.block, 0, params, pointers,
        _COPY_PAGES.names,
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


# --- Keys at other positions ----------------------------------------------------------------------


@_SHIFT_PAGES.public
def shift_pages(
    pool: Any,
    pages: Any,
    delta: Any,
    rope_table: Any,
    *,
    out_pages: Any = None,
    interleaved: bool = False,
    stream: Any = None,
) -> None:
    """Rotate the cached keys of pages on by a number of positions, in place or onto other pages.

    Parameters
    ----------
    pool : KVPool or MLAPool, of which every layer is shifted, one launch for each evenly spaced set
        of them; or an array of keys in any cache format, (num_pages, page_size, H, D) or with
        layers after the pages, or of latents, (num_pages, page_size, width). Written in place. Of
        a head the first elements are rotated; of a latent those after `latent_dim`, in an array
        the last. Keys cached before their rotation need no shift
    pages : int32 or int64 (N,), of a pool also a list of ints, each page once. Negative: skipped.
        Past the end: skipped, and raised by `check_faults`
    delta : positions that keys move on by, negative for back: an int below the length of the table,
        or int32 or int64 (N,), one for each page. Outside the table: the page is skipped, and
        raised by `check_faults`
    rope_table : float32 (max_positions, rotary_dim), the table that rotated the keys. An attention
        factor in it (yarn, longrope) is not applied again: rows are divided by the cosines of
        position 0
    out_pages : int32 or int64 (N,), as `pages`: the shifted pages go there, values and scales of
        a pool with them, and `pages` stay. None: in place, and values stay
    interleaved : pairs are elements (2i, 2i + 1); else (i, i + rotary_dim / 2)
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    float32 arithmetic, one rounding. Keys of 8 and 4 bits are dequantised, rotated and quantised as
    `store_kv` does, with new scales where the pool has scales, and in groups; a static scale stays,
    and is not needed. Rows that are stored rotated (hadamard) come back and go again. A page
    that is read and written in one call for different pairs ends up undefined. Stream: in order.
    Capture: legal. Bytes: the rotated part of each key is read once and written once; onto other
    pages all of K and V.
    Source: CacheBlend (arXiv 2405.16444), which recovers the positions of reused keys this way.

    Examples
    --------
    >>> import kvcupy as kv
    >>> pool = kv.KVPool(8, 16, 2, 4, 64, device="host")
    >>> table = kv.rope_table(4096, 64, device="host")
    >>> kv.shift_pages(pool, [0, 3], 128, table, out_pages=[5, 6])
    """
    is_pool = hasattr(pool, "groups")
    if not checks.is_array(delta) and not (is_pool and _is_list(delta)):
        require_int(delta, "delta")  # a number of another type may equal an int
    if not is_pool:
        arrays = (pool, pages, delta, rope_table, out_pages, None, None, None)
        _SHIFT_PAGES.run(arrays, (interleaved, None), _plan_shift, stream)
        return
    launch_stream = pool.device.as_stream(stream, pool.parts[0].library)
    lists = _on_device(pool.device, launch_stream, pages=pages, delta=delta, out_pages=out_pages)
    start = getattr(pool, "latent_dim", 0)
    calls = []
    for group in pool.groups:
        parts = [*group.parts, *[None] * (2 - len(group.parts))]
        scales = [*group.scale_parts, *[None] * (2 - len(group.scale_parts))]
        if out_pages is None:
            parts[1] = scales[1] = None
        arrays = (
            parts[0], lists["pages"], lists["delta"], rope_table, lists["out_pages"],
            parts[1], *scales,
        )  # fmt: skip
        plan, pointers = _SHIFT_PAGES.prepare(arrays, (interleaved, start), _plan_shift)
        plan.check(pointers, arrays)
        calls.append((plan, pointers, arrays))
    for plan, pointers, arrays in calls:
        plan.run(pointers, arrays, launch_stream)
    pool.note_written()


def _is_list(values: Any) -> bool:
    return isinstance(values, (list, tuple, range))


def _on_device(device: Device, stream: Stream, **lists: Any) -> dict[str, Any]:
    """Return lists as arrays of the device, uploaded where they are lists or host arrays."""
    result = dict(lists)
    for name, values in lists.items():
        if _is_list(values) or (checks.is_array(values) and device.kind != "host"):
            result[name], on_host = transfer_kernels.page_list(values, name)
            if on_host is not None and device.name != "host":
                result[name] = transfer_kernels.upload([on_host], device, stream)[0]
    return result


class _Shift(NamedTuple):
    """A shift that was checked: `parts` are (pages, layers, page_size, heads, width) by name."""

    parts: dict[str, ArrayView]
    pages: ArrayView
    out_pages: ArrayView
    delta: ArrayView | int
    table: ArrayView
    start: int
    interleaved: bool


class ShiftPlan(Plan):
    """Shifts of pages of evenly spaced layers."""

    def __init__(self, shift: _Shift, alignment: int) -> None:
        keys = shift.parts["pool"]
        super().__init__(_SHIFT_PAGES, devices.get(keys.device), keys.library)
        pages, most = faults.below(keys.shape[0]), shift.table.shape[0] - 1
        self.report(pages=pages, out_pages=pages, delta=f"{-most} to {most}")
        if shift.pages.shape[0] and keys.size:
            self.load(lambda aligned: [_launch_shift(self, shift, aligned)], alignment)

    def _announced(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Stream
    ) -> observe.Operation:
        """Announce that parts are read in some pages and written in others."""
        views = self.views(arrays)
        lists = [name for name in (*_LISTS, "rope_table") if name in views]
        target = views["out_pages" if "out_pages" in views else "pages"]
        reads = [observe.Access(views[name], name=name) for name in lists]
        writes = []
        for name in _PARTS:
            if name in views:
                whole = _by_layer(views[name])
                reads.append(observe.Access(whole, views["pages"], name=name, axes=_AXES))
                writes.append(observe.Access(whole, target, name=name, axes=_AXES))
        return observe.Operation(self.operation.name, stream, tuple(reads), tuple(writes))


def _plan_shift(
    alignment: int, interleaved: Any, start: int | None, *, pool: ArrayView, pages: ArrayView,
    delta: ArrayView | int, rope_table: ArrayView, out_pages: ArrayView | None = None,
    **others: ArrayView,
) -> ShiftPlan:  # fmt: skip
    checks.number_format(pool, "pool", four_bit=True)
    if pool.ndim not in (3, 4, 5):
        raise ValueError(
            "pool: expected a pool, (num_pages, [layers,] page_size, heads, width) or (num_pages, "
            f"page_size, width), got {describe(pool)}"
        )
    bytes_of(pool, "pool")
    checks.require_contiguous(pool, "pool")
    checks.require_output(pool, "pool")
    max_positions, rotary_dim = checks.rope_table(rope_table, min_positions=1)
    count = checks.indices(pages, "pages")
    for v in (out_pages, delta):
        if isinstance(v, ArrayView) and checks.indices(v, v.name) != count:
            raise ValueError(f"{v.name}: expected {count} like pages, got {v.shape[0]}")
    if not isinstance(delta, ArrayView):
        if not -max_positions < delta < max_positions:
            most = f"at most {max_positions - 1} positions, as rope_table has"
            raise ValueError(f"delta: expected {most}, got {delta}")
        delta = int(delta)
    width = pool.shape[-1]
    if start is None:
        start = width - rotary_dim if pool.ndim == 3 else 0
    if start < 0 or start + rotary_dim > width:
        least = f"{rotary_dim} elements to rotate, the width of rope_table"
        raise ValueError(f"pool: expected {least}, got {max(0, width - start)} in {describe(pool)}")
    parts = {name: _by_layer(v) for name, v in {"pool": pool, **others}.items()}
    shift = _Shift(
        parts, pages, pages if out_pages is None else out_pages, delta, rope_table, start,
        flag(interleaved, "interleaved"),
    )  # fmt: skip
    return ShiftPlan(shift, alignment)


def _by_layer(v: ArrayView) -> ArrayView:
    """View an array as (pages, layers, page_size, heads, width)."""
    if v.ndim == 5:
        return v
    pages, page_size, *heads, width = v.shape
    page_bytes, offset_bytes, *head_bytes, element_bytes = v.strides
    return reshaped(
        v, (pages, 1, page_size, *(heads or [1]), width),
        (page_bytes, 0, offset_bytes, *(head_bytes or [0]), element_bytes),
    )  # fmt: skip


def _launch_shift(plan: ShiftPlan, shift: _Shift, alignment: int) -> Launch:
    device = plan.device
    keys, table, delta = shift.parts["pool"], shift.table, shift.delta
    width = keys.shape[-1]
    key_rows = head_rows([bytes_of(keys)], ())
    aligned = widest((_row_alignment(key_rows), alignment))
    num_rows = shift.pages.shape[0] * key_rows.rows_per_page
    require_countable(num_rows, "pages")
    kernel, units, params = _shift_kernel(device, shift, alignment, aligned)
    smem_bytes = 0
    geometry = spread(
        num_rows, units, device.sm_count,
        warp_lanes=device.warp_lanes, whole_warps=True, max_lanes=32,
    )  # fmt: skip
    if keys.format in FOUR_BIT:
        geometry, smem_bytes = staging(
            geometry, 4 * width, num_rows, "pool", min_threads=min(32, device.warp_lanes)
        )
    params |= {
        "width": width, "start": shift.start, "rotary_dim": table.shape[1],
        "interleaved": shift.interleaved, "table_row_bytes": table.strides[0],
        "max_positions": table.shape[0],
        "delta_operation": plan.fault_ids["delta"],
    }  # fmt: skip
    in_pool = keys.shape[0], keys.shape[0]
    params |= transfer_kernels.rows_params(
        key_rows, 1, geometry.lanes, in_pool, True, operation="shift_pages", names=_LISTS[:2]
    )
    params["rows.num_pieces"] = num_rows
    pointers: dict[str, Any] = {
        "table": table, "src_pages": shift.pages, "dst_pages": shift.out_pages
    }  # fmt: skip
    for side, v in (("src", shift.pages), ("dst", shift.out_pages)):
        params[f"rows.{side}_stride_bytes"] = v.strides[0]
        params[f"rows.{side}_index_bytes"] = v.itemsize
    if isinstance(delta, ArrayView):
        pointers["deltas"] = delta
        params["delta_stride_bytes"] = delta.strides[0]
        params["delta_index_bytes"] = delta.itemsize
    else:
        params["delta"] = delta
    for name, field in zip(_PARTS, _FIELDS, strict=True):
        if name in shift.parts:
            pointers[field] = part = shift.parts[name]
            rows = head_rows([bytes_of(part)], ())
            params |= nested(f"{field.removesuffix('s')}_strides", STRIDES, rows.strides(0))
            if name == "values":
                (params["value_bytes"],) = rows.row_bytes
                params["value_word_bytes"] = widest((
                    alignment, _row_alignment(rows), *rows.row_bytes
                ))  # fmt: skip
    return Launch(
        device, kernel, geometry.grid, geometry.block, smem_bytes, params, pointers,
        _SHIFT_PAGES.names,
    )  # fmt: skip


def _shift_kernel(
    device: Device, shift: _Shift, alignment: int, aligned: int
) -> tuple[Any, int, dict[str, Any]]:
    """Return the kernel of a format, the words that lanes of a row share, and its parameters."""
    key, table, lanes = shift.parts["pool"], shift.table, device.warp_lanes
    width, rotary_dim = key.shape[-1], table.shape[1]
    four_bit = FOUR_BIT.get(key.format)
    if four_bit is None:
        format = FORMATS[key.format]
        packed = (shift.start, rotary_dim // 2, width)
        is_whole = all(n % PACK == 0 for n in packed) and table.strides[0] % 16 == 0
        whole = is_whole and alignment % 16 == 0 and aligned >= min(16, PACK * format.itemsize)
        pack = PACK if whole else 1
        words = max(rotary_dim // 2, (width - rotary_dim) // 2) // pack
        return SHIFT_ROWS[lanes].specialise(format.ctype, pack), max(1, words), {}
    count = CODES_PER_THREAD if alignment % 16 == 0 else 1
    block = formats.rotation_block(key.rotated_width)
    params = kv_operand.group_params(
        "key.group_scales", four_bit, key.rotated_width, key.scale_rule, min(8, aligned)
    )
    kernel = SHIFT_FOUR_BIT[lanes].specialise(four_bit.ctype, count)
    return kernel, max(width, block) // CODES_PER_THREAD, params


def _row_alignment(rows: transfer_kernels.PageRows) -> int:
    """Return the widest word to which rows are aligned from the first one on."""
    return widest((
        abs(rows.page_strides[0]), *(abs(a.strides[0]) for a in rows.axes if a.count > 1)
    ))  # fmt: skip
