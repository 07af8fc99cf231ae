"""Move pages between pools: GPU to pinned host memory and back, in any layout.

`transfer_pages` is `prepare`, for all but the pages, and `PreparedTransfer.issue`. A `TransferPlan`
holds what two pools and the options decide; by the page lists it chooses between

- "kernel": a launch for each evenly spaced set of layers (`LayerTransfer`)
- "copy": contiguous runs by the copy engine (`LayerTransfer`)
- "staged": a kernel and the copy engine, by way of a device buffer (`StagedTransfer`)

and where the host device cannot compile the kernel, the reference does the work.
"""

from __future__ import annotations

import hashlib
import json
import numbers
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from .. import faults, formats, observe, reference, scratch
from ..arrays import ArrayView, describe, overlap, recast
from ..checks import as_list, flag, positive_int, require_int
from ..devices import cache
from ..devices.protocol import Device, Stream
from ..errors import CompileError
from ..formats import Method
from . import by_reference, call, transfer_kernels
from .launch import MAX_ROWS, require_countable
from .transfer_kernels import LayerPages, PageLaunch, PagePairs, PageRuns, longest_rows

__all__ = ["PagePairs", "PreparedTransfer", "prepare", "transfer_pages"]

METHODS = get_args(Method)
DIRECTIONS = ("to_device", "to_host", "within")

_POOLS = ("src_pool", "dst_pool")
_Enqueue = Callable[[], None]


def transfer_pages(
    src_pool: Any,
    dst_pool: Any,
    src_pages: Any,
    dst_pages: Any,
    *,
    layers: Any = None,
    method: Method = "auto",
    max_blocks: int | None = None,
    convert: bool = False,
    stream: Any = None,
) -> None:
    """Copy pages of one pool onto pages of another: K and V, of all layers or of some.

    Parameters
    ----------
    src_pool, dst_pool : KVPool or MLAPool of one device and geometry, in any layout and placement,
        with any number of pages. They may be the same pool
    src_pages, dst_pages : int32 or int64 (N,), or lists of ints. A pair with a negative page is
        skipped. Past the end: skipped too, and raised by `check_faults`
    layers : int or ints, which layers; None: all
    method : "kernel" (a launch for each evenly spaced set of layers, which reads and writes pinned
        memory directly), "copy" (contiguous runs by the copy engine), "staged" (repacked in a
        device staging buffer, then copied in long runs), or "auto", which chooses by how many
        contiguous pieces there are and how long: as `python -m kvcupy calibrate` measured on this
        device; else, on a GPU, kernels for 16 or more pieces of less than 28 KiB, which to the
        host are staged if that makes the pieces so long; on the host device kernels
    max_blocks : of the kernels; None: one for every 24 SMs of the device, where bytes leave its
        memory or enter it
    convert : allow pools of different formats, or of rows that are rotated and not. Scales
        of an fp8 or int8 pool are dynamic, one per token and head, as in `store_kv`; without scales
        they are 1. Rows in a four-bit pool are those that `store_kv` stores
    stream : Stream, or a CuPy or torch stream. None: the current one of the library that the page
        lists come from, if they are on the GPU, else torch's if a pool is made of torch tensors.
        Else the one that is current in CuPy or torch: torch's inside `torch.cuda.stream(s)` and
        `torch.cuda.graph`, CuPy's inside `with s:`. On the host device this thread

    Raises
    ------
    TypeError, ValueError : an argument does not fit; or `stream` is None, and CuPy and torch have
        made different streams current. Nothing was moved
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    A page that is written twice, or read and written, in one call is undefined afterwards. Stream:
    in order. "copy", "staged" and "auto" read page lists of the host during the call; lists that
    only a GPU holds need "kernel" ("auto" chooses it). Capture: legal; a replay reads page lists
    again where kernels reach them. Bytes: K and V once, and the scales.
    Source: SGLang #7313 `transfer_kv_all_layer`, vLLM `swap_blocks`.

    Examples
    --------
    >>> import kvcupy as kv
    >>> on_device = kv.KVPool(8, 16, 2, 4, 64, device="host")
    >>> on_host = kv.KVPool(32, 16, 2, 4, 64, layout="page_first", placement="pinned",
    ...                     device="host")
    >>> kv.transfer_pages(on_device, on_host, [0, 3], [31, 7])
    """
    prepared = prepare(
        src_pool, dst_pool, layers=layers, method=method, max_blocks=max_blocks, convert=convert
    )
    prepared.issue(PagePairs(src_pages, dst_pages), stream)


def prepare(
    src_pool: Any, dst_pool: Any, *, layers: Any = None, method: Method = "auto",
    max_blocks: int | None = None, convert: bool = False, names: tuple[str, str] = _POOLS,
) -> PreparedTransfer:  # fmt: skip
    """Check everything but the pages, for calls that differ in nothing else.

    Arguments and errors are as in `transfer_pages`, in which the pools go by `names`.
    """
    options = TransferOptions.checked(layers, method, max_blocks, convert)
    _require_pool(src_pool, names[0])
    _require_pool(dst_pool, names[1])

    def make() -> TransferPlan:
        source, target = PoolPages.of(src_pool), PoolPages.of(dst_pool)
        _require_geometry(source, target, (src_pool.device, dst_pool.device), options, names)
        return TransferPlan(src_pool.device, source, target, options)

    # Pools by weak reference: a plan that is kept must not keep them alive.
    signature = "transfer_pages", weakref.ref(src_pool), weakref.ref(dst_pool), options
    return PreparedTransfer(src_pool, dst_pool, call.planned(signature, make))


@dataclass(frozen=True)
class PreparedTransfer:
    """A transfer that lacks only its pages. Keeps its pools alive, as their plan does not."""

    src_pool: Any
    dst_pool: Any
    plan: TransferPlan

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V in a page, in the layers that are moved, as the source stores them."""
        return self.plan.page_bytes

    def check(self, pairs: PagePairs, stream: Stream, *, name: str) -> None:
        """Raise the OrderError that `issue` would raise."""
        pools = self.src_pool, self.dst_pool
        if pairs.count and self.plan.transfers:
            observe.check(self.plan.describe(name, pairs, stream, pools))

    def issue(
        self, pairs: PagePairs, stream: Any, *, name: str = "transfer_pages", keep: bool = True
    ) -> None:
        """Put the transfer of some pages on a stream."""
        plan, pools = self.plan, (self.src_pool, self.dst_pool)
        library = plan.library(pairs) if stream is None else ""
        stream = plan.device.as_stream(stream, library)
        if pairs.count == 0 or not plan.transfers:
            return
        enqueue = plan.bind(pairs, stream, pools if keep else ())
        if observe.observers:
            observe.issue(lambda: plan.describe(name, pairs, stream, pools), enqueue)
        else:
            enqueue()
        self.dst_pool.note_written(plan.layers)


# --- Plans ----------------------------------------------------------------------------------------


class TransferPlan:
    """Everything that two pools and the options of a transfer decide. Keeps no pool alive.

    It has a LayerTransfer for each evenly spaced set of `layers`, None for all; `page_bytes` are of
    K and V in a page of those layers, as the source stores them.
    """

    def __init__(
        self, device: Device, source: PoolPages, target: PoolPages, options: TransferOptions
    ) -> None:
        self.lasting = True  # for `call.planned`
        self.device, self.layers = device, options.layers
        self._source, self._target = source, target
        self._src, self._dst = source.any_group, target.any_group
        is_torch = any(v.library == "torch" for v in (*self._src.parts, *self._dst.parts))
        self._library = "torch" if is_torch else ""
        self._converts = self._src.encoding != self._dst.encoding
        direction = "to_host"
        if self._dst.on_device:
            direction = "within" if self._src.on_device else "to_device"
        self._thresholds = thresholds(device, direction)
        self._split(options)
        self.page_bytes = sum(transfer.src.page_bytes for transfer in self.transfers)
        self._reachable = all(transfer.reachable for transfer in self.transfers)
        self._stageable = all(staged.reachable for staged in self._staged)
        self._require_reachable(options.method)
        self._method: str | None = options.method  # None: it depends on the pages
        if options.method == "auto":
            always = self._reachable and self._thresholds.prefers_kernels
            self._method = "kernel" if always else None
        self._launches: list[PageLaunch] = []
        self._max_pairs = -1  # that they take; none before they are loaded
        # Plans of one kind, such as for the layers of a load, choose the same for the same pages.
        self._kind = repr((
            device.name, direction, self._reachable, self._stageable,
            self._src.encoding, self._dst.encoding, self._src.num_pages, self._dst.num_pages,
            [transfer.rows[0].layout for transfer in self.transfers],
        ))  # fmt: skip

    def _split(self, options: TransferOptions) -> None:
        """Split the layers into sets that are evenly spaced in the far pool, and in both."""
        device, source, target = self.device, self._source, self._target
        max_blocks = options.max_blocks
        if max_blocks is None and not (self._src.on_device and self._dst.on_device):
            max_blocks = self._thresholds.blocks
        repacks_first = _repacks_first(device, self._src, self._dst)
        far, near = (target, source) if repacks_first else (source, target)
        self.transfers: list[LayerTransfer] = []
        self._staged: list[StagedTransfer] = []
        for chosen in options.slices(source.num_layers):
            for layers in far.split(chosen):
                near_layers = near.split(layers)
                for part in near_layers:
                    ends, is_first = (source.layers(part), target.layers(part)), not self.transfers
                    transfer = LayerTransfer(device, *ends, max_blocks, reports=is_first)
                    self.transfers.append(transfer)
                staged = StagedTransfer(device, source, target, layers, near_layers, max_blocks)
                self._staged.append(staged)

    def _require_reachable(self, method: str) -> None:
        """Raise unless kernels reach what the method and a conversion need them to."""
        if method == "kernel" and not self._reachable:
            raise ValueError(
                'method: expected "copy" or "staged" for pageable memory, which kernels do not '
                'reach, got "kernel"'
            )
        if method == "staged" and not self._stageable:
            raise ValueError(
                'method: expected "copy" between pools of pageable memory, got "staged"'
            )
        if self.transfers and self._converts and not self._stageable:
            raise ValueError("convert: expected memory that kernels reach on one side, got none")

    def library(self, pairs: PagePairs) -> str:
        """Return the library whose current stream None stands for; "" if the arrays do not say.

        The memory of kvcupy's pools says nothing: CuPy was not the caller's choice.
        """
        if pairs.src is None or pairs.dst is None:
            for v in pairs.views:
                if v.device == self.device.name:
                    return v.library
        return self._library

    def describe(
        self, name: str, pairs: PagePairs, stream: Stream, pools: tuple[Any, Any]
    ) -> observe.Operation:
        """Return the bytes that the transfer accesses, for observers."""
        layer = f", layer {self.layers[0]}" if self.layers and len(self.layers) == 1 else ""
        reads, writes = (
            tuple([
                observe.Access(
                    _owned_by(pool, view), pages, name=f"{pool_name}{layer}",
                    axes=("page", "layer", "offset", "head"),
                )
                for transfer in self.transfers
                for view in (transfer.src if is_source else transfer.dst).arrays
            ])
            for is_source, pool_name, pool, pages in zip(
                (True, False), _POOLS, pools, pairs.views, strict=True
            )
        )  # fmt: skip
        return observe.Operation(name, stream, reads, writes)

    def bind(self, pairs: PagePairs, stream: Stream, keep: Sequence[object]) -> _Enqueue:
        """Choose the method, do all that can fail, and return what enqueues the transfer.

        What is in `keep` lives until the transfer is done, and the page lists with it; if it is
        empty, the caller keeps them alive. Raises as `PreparedTransfer.issue` does.
        """
        method = self._method or self.method_for(pairs)
        if method == "kernel" and pairs.count <= self._max_pairs:
            return partial(self._launch, self._launches, pairs, stream, keep)
        try:
            if method == "kernel":
                return self._bind_kernels(pairs, stream, keep)
            return self._bind_copies(pairs, stream, keep, staged=method == "staged")
        except CompileError as cause:
            self.device.fall_back("transfer_pages", cause)
            return self._bind_reference(pairs, stream, keep)

    def method_for(self, pairs: PagePairs) -> str:
        """Return the method for some pages: "kernel", "copy" or "staged"."""
        method = self._method or pairs.methods.get(self._kind)
        if method is None:
            method = pairs.methods[self._kind] = self._choose(pairs)
        return method

    def _choose(self, pairs: PagePairs) -> str:
        """Choose by how many contiguous pieces there are and how long, with and without staging."""
        if self._reachable and (pairs.src is None or pairs.dst is None):
            return "kernel"
        existing, limits = self._existing(pairs), self._thresholds
        num_pages, num_runs = existing.count, len(existing.runs.lengths)
        count, piece_bytes = self.transfers[0].rows[0].count_pieces(num_pages, num_runs)
        staged_count, staged_bytes = self._staged[0].rows.count_pieces(num_pages, num_runs)
        worth_staging = self._stageable and staged_bytes >= max(
            _MUCH_LONGER * piece_bytes, limits.crossover(staged_count * len(self._staged))
        )
        if self._converts:
            stages = worth_staging and limits.staged
            return "kernel" if self._reachable and not stages else "staged"
        if piece_bytes >= limits.crossover(count * len(self.transfers)):
            return "copy"
        if worth_staging and (limits.staged or not self._reachable):
            return "staged"
        return "kernel" if self._reachable else "copy"

    def _existing(self, pairs: PagePairs) -> transfer_kernels.Existing:
        return pairs.existing(self._src.num_pages, self._dst.num_pages)

    def _bind_kernels(self, pairs: PagePairs, stream: Stream, keep: Sequence[object]) -> _Enqueue:
        launches = [launch for transfer in self.transfers for launch in transfer.launches()]
        pieces_per_page = max(launch.pieces_per_page for launch in launches)
        require_countable(pairs.count * pieces_per_page, "src_pages")
        if not any(launch.provisional for launch in launches):
            self._launches, self._max_pairs = launches, MAX_ROWS // pieces_per_page
        return partial(self._launch, launches, pairs, stream, keep)

    def _launch(
        self, launches: Sequence[PageLaunch], pairs: PagePairs, stream: Stream,
        keep: Sequence[object],
    ) -> None:  # fmt: skip
        lists, owners = pairs.on_device or pairs.lists(self.device, stream)
        try:
            for launch in launches:
                launch.issue(lists, stream)
        finally:
            if keep:
                self.device.keep((*keep, *owners), stream)

    def _bind_copies(
        self, pairs: PagePairs, stream: Stream, keep: Sequence[object], *, staged: bool
    ) -> _Enqueue:
        """Copy the pages that exist; the host records the faults of the others."""
        existing, record_faults = self._existing(pairs), self._fault_records(pairs, stream)
        if staged:
            moves = [transfer.bind(existing, stream, keep) for transfer in self._staged]
        else:
            moves = [partial(t.copy, existing.runs, stream, keep) for t in self.transfers]

        def enqueue() -> None:
            for record in record_faults:
                record()
            if existing.count:
                for move in moves:
                    move()

        return enqueue

    def _bind_reference(self, pairs: PagePairs, stream: Stream, keep: Sequence[object]) -> _Enqueue:
        device = self.device

        def move() -> None:
            src, dst = (
                device.carrier(view) if on_host is None or view.device == device.name else on_host
                for view, on_host in zip(pairs.views, (pairs.src, pairs.dst), strict=True)
            )
            for fault in self._faults(src, dst):
                by_reference.note_fault(device, *fault)
            for transfer in self.transfers:
                _move_by_reference(device, transfer.src, transfer.dst, src, dst)

        return lambda: device.run(move, stream, (*keep, *pairs.views))

    def _fault_records(self, pairs: PagePairs, stream: Stream) -> list[_Enqueue]:
        """Return functions that record on the stream which pages of host lists are past the end.

        Copies need no compiler: without one, nothing is logged on the host device.
        """
        if self._existing(pairs).count == pairs.count:
            return []
        device = self.device
        records = [
            (count, operation, int(position), int(page))
            for count, operation, position, page in self._faults(pairs.src, pairs.dst)
        ]
        if not records:
            return []
        try:
            device.load(transfer_kernels.NOTE)
        except CompileError as cause:
            if device.kind != "host":
                raise copy(cause) from None
            notes = [partial(by_reference.note_fault, device, *fault) for fault in records]
            return [partial(device.run, note, stream) for note in notes]
        return [partial(transfer_kernels.note_fault, device, fault, stream) for fault in records]

    def _faults(self, src: Any, dst: Any) -> Iterator[tuple[int, int, Any, Any]]:
        """Yield pages past the end as the kernel reports them: the fields of the record."""
        valid = (src >= 0) & (dst >= 0)
        for name, pages, num_pages in (
            ("src_pages", src, self._src.num_pages), ("dst_pages", dst, self._dst.num_pages)
        ):  # fmt: skip
            bad = (valid & (pages >= num_pages)).nonzero()[0]
            valid &= pages < num_pages
            if len(bad):
                operation = faults.operation_id("transfer_pages", name, faults.below(num_pages))
                yield len(bad), operation, bad[0], pages[bad[0]]


def _owned_by(pool: Any, view: ArrayView) -> ArrayView:
    owned = recast(view, view.shape, view.strides, view.format)
    owned.owner = pool
    return owned


def _repacks_first(device: Device, src: LayerPages, dst: LayerPages) -> bool:
    """Return whether a staged transfer starts with the kernel: the far pool is the target.

    Of two pools in host memory the near one is the one that kernels reach.
    """
    if src.on_device or dst.on_device:
        return src.on_device
    return transfer_kernels.reaches(device, src)


def _move_by_reference(
    device: Device, src: LayerPages, dst: LayerPages, src_pages: Any, dst_pages: Any
) -> None:
    """Move pages of evenly spaced layers; the caller reports those that do not exist."""
    sources, targets = (
        [
            _by_layer(device, part, pages, width)
            for part, width in zip(pages.parts, pages.rotated_widths, strict=True)
        ]
        for pages in (src, dst)
    )
    src_scales, dst_scales = (
        [device.carrier(scales)[..., 0].swapaxes(0, 1) for scales in pages.scales] or None
        for pages in (src, dst)
    )
    reference.transfer_pages(
        sources, targets, src_pages, dst_pages, src_scales=src_scales, dst_scales=dst_scales
    )


def _by_layer(device: Device, part: ArrayView, pages: LayerPages, rotated_width: int) -> Any:
    """Return a part for the reference, (layers, pages, page_size, H, D)."""
    rows = device.carrier(part)
    if pages.four_bit is None:
        return rows.view(formats.numpy_dtype(pages.format)).swapaxes(0, 1)
    packed = reference.FourBitRows.packed(rows, pages.format, rotated_width, pages.scale_rule)
    return packed.swapaxes(0, 1)


# --- Layers by kernel or copy engine --------------------------------------------------------------


class LayerTransfer:
    """One evenly spaced set of layers, moved between pages of the same geometry."""

    def __init__(
        self, device: Device, src: LayerPages, dst: LayerPages, max_blocks: int | None, *,
        reports: bool = False,
    ) -> None:  # fmt: skip
        self.src, self.dst = src, dst
        self.rows = [longest_rows(src.parts, dst.parts)]
        if src.scales and dst.scales:
            self.rows.append(longest_rows(src.scales, dst.scales))
        self.reachable = transfer_kernels.reaches(device, src, dst)
        self._device = device
        self._max_blocks = max_blocks or transfer_kernels.default_blocks(device, src, dst)
        self._reports = reports

    def launches(self) -> list[PageLaunch]:
        """Return what moves the layers by kernel; CompileError if one cannot be compiled."""
        return transfer_kernels.launches(
            self._device, self.src, self.dst, max_blocks=self._max_blocks, reports=self._reports
        )

    def copy(self, runs: PageRuns, stream: Stream, keep: Sequence[object]) -> None:
        """Copy runs of pages, all of which exist, by the copy engine."""
        pieces = [transfer_kernels.contiguous_pieces(rows, runs) for rows in self.rows]
        dst, src, sizes = (np.concatenate(column) for column in zip(*pieces, strict=True))
        self._device.copy_runs(dst, src, sizes, stream, keep, not self.reachable)


# --- Layers by way of a staging buffer ------------------------------------------------------------

STAGING_BYTES = 32 << 20  # of the buffer; larger transfers go through it piecewise
_MUCH_LONGER = 4  # staging is faster where pieces become so many times as long
_ALIGNMENT = 256  # of each part in the buffer
_MAX_KNOWN_BUFFERS = 8


class StagedTransfer:
    """Some layers, repacked by a kernel in a device buffer and copied in long runs.

    The buffer has the layout of the far pool (the one in host memory), so that a page, or a run of
    pages, is one piece there. Transfers larger than the buffer use it again, in stream order.
    """

    def __init__(
        self, device: Device, src: PoolPages, dst: PoolPages, layers: slice,
        near_layers: Sequence[slice], max_blocks: int | None,
    ) -> None:  # fmt: skip
        self._device = device
        self._max_blocks = max_blocks
        self._repacks_first = _repacks_first(device, src.any_group, dst.any_group)
        far, near = (dst, src) if self._repacks_first else (src, dst)
        self._far = far.layers(layers)
        self._near = [near.layers(part) for part in near_layers]
        self._in_buffer = [_slice_within(part, layers) for part in near_layers]
        self._page_bytes = sum(v.size // v.shape[0] * v.itemsize for v in self._far.arrays)
        self._known: dict[tuple[int, int], tuple[list[PageLaunch], LayerTransfer]] = {}
        self.rows = longest_rows(_compact(self._far, 0, 2).parts, self._far.parts)
        self.reachable = transfer_kernels.reaches(device, *self._near)

    def bind(
        self, pairs: transfer_kernels.Existing, stream: Stream, keep: Sequence[object]
    ) -> _Enqueue:
        """Borrow a buffer and prepare its kernels; return what enqueues the transfer.

        CompileError or DeviceError if there is no kernel, or no memory for the buffer.
        """
        max_pages = max(1, min(pairs.count, STAGING_BYTES // self._page_bytes))
        num_bytes = max_pages * self._page_bytes + len(self._far.arrays) * _ALIGNMENT
        buffer = scratch.borrow(self._device, num_bytes, stream)
        launches, copies = self._through(buffer, max_pages)
        kept = (*keep, buffer)

        def repack(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
            lists, owners = PagePairs.of_arrays(src, dst).lists(self._device, stream)
            try:
                for launch in launches:
                    launch.issue(lists, stream)
            finally:
                self._device.keep((*kept, *owners), stream)

        def enqueue() -> None:
            order = np.argsort(pairs.dst if self._repacks_first else pairs.src, kind="stable")
            for start in range(0, pairs.count, max_pages):
                part = order[start : start + max_pages]
                src, dst, buffered = pairs.src[part], pairs.dst[part], np.arange(len(part))
                if self._repacks_first:
                    repack(src, buffered)
                    copies.copy(transfer_kernels.page_runs(buffered, dst), stream, kept)
                else:
                    copies.copy(transfer_kernels.page_runs(src, buffered), stream, kept)
                    repack(buffered, dst)

        return enqueue

    def _through(self, buffer: ArrayView, num_pages: int) -> tuple[list[PageLaunch], LayerTransfer]:
        """Return the launches at the near side of a buffer, and the copies at the far side."""
        key = buffer.pointer, num_pages
        if key in self._known:
            return self._known[key]
        if len(self._known) >= _MAX_KNOWN_BUFFERS:
            self._known.clear()
        buffered = _compact(self._far, buffer.pointer, num_pages, buffer)
        launches: list[PageLaunch] = []
        for near, part in zip(self._near, self._in_buffer, strict=True):
            launches += self._between(near, buffered.layers(part)).launches()
        through = launches, self._between(buffered, self._far)
        if not any(launch.provisional for launch in launches):
            self._known[key] = through
        return through

    def _between(self, near: LayerPages, far: LayerPages) -> LayerTransfer:
        ends = (near, far) if self._repacks_first else (far, near)
        return LayerTransfer(self._device, *ends, self._max_blocks)


def _slice_within(part: slice, whole: slice) -> slice:
    """Return where layers are among others of the same step."""
    first = (part.start - whole.start) // whole.step
    return slice(first, first + len(range(part.start, part.stop, part.step)), 1)


def _compact(
    like: LayerPages, pointer: int, num_pages: int, memory: ArrayView | None = None
) -> LayerPages:
    """Return pages without gaps at an address, with the axes in the order of `like`."""
    arrays = []
    for v in like.arrays:
        pointer = -(-pointer // _ALIGNMENT) * _ALIGNMENT
        shape = (num_pages, *v.shape[1:])
        strides = [0] * v.ndim
        step = v.itemsize
        for _, axis in sorted((abs(stride), -i) for i, stride in enumerate(v.strides)):
            strides[-axis] = step
            step *= shape[-axis]
        where = memory or v
        arrays.append(
            ArrayView(pointer, shape, tuple(strides), v.format, where.device, library=where.library)
        )
        pointer += step
    num_parts = len(like.parts)
    return LayerPages(
        tuple(arrays[:num_parts]), tuple(arrays[num_parts:]), on_device=True, format=like.format,
        rotated_widths=like.rotated_widths, scale_rule=like.scale_rule,
    )  # fmt: skip


# --- Options and pools ----------------------------------------------------------------------------


class TransferOptions(NamedTuple):
    """The options of a transfer. `layers` is in ascending order; None: all."""

    layers: tuple[int, ...] | None
    method: str
    max_blocks: int | None
    convert: bool

    @classmethod
    def checked(cls, layers: Any, method: Any, max_blocks: Any, convert: Any) -> TransferOptions:
        """Check the options as far as they need no pool."""
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if max_blocks is not None:
            max_blocks = positive_int(max_blocks, "max_blocks")
            if max_blocks >= 2**31:
                raise ValueError(f"max_blocks: expected less than 2**31, got {max_blocks}")
        return cls(_layer_numbers(layers), method, max_blocks, flag(convert, "convert"))

    def slices(self, num_layers: int) -> list[slice]:
        """Return the layers as evenly spaced sets."""
        if self.layers is None:
            return [slice(0, num_layers, 1)]
        return [
            slice(run[0], run[-1] + 1, run[1] - run[0] if len(run) > 1 else 1)
            for run in evenly_spaced(self.layers)
        ]


def _layer_numbers(layers: Any) -> tuple[int, ...] | None:
    if layers is None:
        return None
    is_one = isinstance(layers, numbers.Integral)
    chosen = [layers] if is_one else as_list(layers, "layers", "ints")
    for layer in chosen:
        require_int(layer, "layers")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers: expected each once, got {layers!r}")
    return tuple(sorted(int(layer) for layer in chosen))


def evenly_spaced(ascending: Iterable[int]) -> list[list[int]]:
    """Split ascending numbers into evenly spaced runs, each as long as possible.

    >>> evenly_spaced([0, 1, 2, 5, 11, 17, 18])
    [[0, 1, 2], [5, 11, 17], [18]]
    """
    runs: list[list[int]] = []
    for n in ascending:
        run = runs[-1] if runs else []
        if run and (len(run) == 1 or n - run[-1] == run[-1] - run[-2]):
            run.append(n)
        else:
            runs.append([n])
    return runs


@dataclass(frozen=True)
class PoolPages:
    """The pages of a pool, by address: of each group of evenly spaced layers, all in order."""

    groups: tuple[tuple[range, LayerPages], ...]

    @classmethod
    def of(cls, pool: Any) -> PoolPages:
        """Describe a pool, without keeping it alive."""
        on_device = pool.placement == "device"
        return cls(tuple([
            (group.layers, LayerPages.of(group.parts, group.scale_parts, on_device=on_device))
            for group in pool.groups
        ]))  # fmt: skip

    @property
    def num_layers(self) -> int:
        return self.groups[-1][0].stop

    @property
    def arrays(self) -> tuple[ArrayView, ...]:
        """Parts and scales of all groups."""
        return tuple(v for _, pages in self.groups for v in pages.arrays)

    @property
    def any_group(self) -> LayerPages:
        """Pages of some layers, for what is the same in all: format, page count, scales."""
        return self.groups[0][1]

    def split(self, layers: slice) -> list[slice]:
        """Return evenly spaced layers by the groups that they are in."""
        chosen = range(layers.start, layers.stop, layers.step)
        in_groups = [[n for n in chosen if n in group] for group, _ in self.groups]
        return [slice(part[0], part[-1] + 1, layers.step) for part in in_groups if part]

    def layers(self, layers: slice) -> LayerPages:
        """Return the pages of evenly spaced layers of one group."""
        group, pages = next((g, p) for g, p in self.groups if layers.start in g)
        start = layers.start - group.start
        return pages.layers(slice(start, start + layers.stop - layers.start, layers.step))


def _require_pool(pool: Any, name: str) -> None:
    """Raise unless `pool` is a pool."""
    if not (hasattr(pool, "groups") and hasattr(pool, "device") and hasattr(pool, "placement")):
        raise TypeError(f"{name}: expected a KVPool or MLAPool, got {type(pool).__name__}")


def _require_geometry(
    source: PoolPages, target: PoolPages, devices: tuple[Device, Device], options: TransferOptions,
    names: tuple[str, str],
) -> None:  # fmt: skip
    """Raise unless the pools match, have the layers of the options, and share no bytes."""
    src_name, dst_name = names
    src, dst = source.any_group, target.any_group

    def mismatch(expected: str, got: str) -> ValueError:
        return ValueError(f"{dst_name}: expected {expected} like {src_name}, got {got}")

    if devices[0] is not devices[1]:
        raise mismatch(f"one of {devices[0].name}", f"one of {devices[1].name}")
    if len(src.parts) != len(dst.parts):
        kinds = {1: "an MLA pool", 2: "a pool of K and V"}
        raise mismatch(kinds[len(src.parts)], kinds[len(dst.parts)])
    for i, (a, b) in enumerate(zip(src.parts, dst.parts, strict=True)):
        part = "KV"[i]
        # (layers, page_size, heads, width)
        of_src = (source.num_layers, *a.shape[2:-1], src.widths[i])
        of_dst = (target.num_layers, *b.shape[2:-1], dst.widths[i])
        if of_src != of_dst:
            raise ValueError(
                f"{dst_name}: expected pages of (layers, page_size, heads, width) "
                f"{of_src} like {part} of {src_name}, got {of_dst}"
            )
    if src.encoding != dst.encoding:
        got = dst.described
        if not options.convert:
            raise mismatch(src.described, f"{got}; convert=True converts in transit")
        if options.method == "copy":
            raise ValueError(
                'method: expected "kernel", "staged" or "auto" between pools of different '
                'formats, got "copy"'
            )
    elif bool(src.scales) != bool(dst.scales):
        raise mismatch("scales", "none") if src.scales else mismatch("no scales", "some")
    for layer in options.layers or ():
        if not 0 <= layer < source.num_layers:
            raise ValueError(f"layers: expected 0 to {source.num_layers - 1}, got {layer}")
    _require_separate(source.arrays, target.arrays, names)


def _require_separate(
    src: tuple[ArrayView, ...], dst: tuple[ArrayView, ...], names: tuple[str, str]
) -> None:
    """Raise if two pools share bytes; one pool may be both."""
    ranges = [b.byte_range() for b in dst]
    for a in src:
        low, high = a.byte_range()
        for b, (b_low, b_high) in zip(dst, ranges, strict=True):
            if b_high <= low or high <= b_low:
                continue
            same = (a.pointer, a.shape, a.strides) == (b.pointer, b.shape, b.strides)
            if not same and overlap(a, b):
                raise ValueError(
                    f"{names[1]}: expected memory of its own, got {describe(b)} over {names[0]}'s"
                )


# --- Thresholds of method="auto" ------------------------------------------------------------------


@dataclass(frozen=True)
class Thresholds:
    """What method="auto" goes by in one direction.

    `copy_from_bytes` has the piece size from which the copy engine is faster than the kernel, by
    number of pieces: (at least so many pieces, bytes) in ascending order of pieces. `staged`:
    whether staging is faster where it makes pieces long enough for the copy engine. `blocks` of a
    kernel between device and host memory; None: `transfer_kernels.link_blocks`.
    """

    copy_from_bytes: tuple[tuple[int, int], ...]
    staged: bool
    blocks: int | None = None

    def crossover(self, pieces: int) -> int:
        """Return the piece size, in bytes, from which copies are faster for so many pieces."""
        reached = [size for at_least, size in self.copy_from_bytes if pieces >= at_least]
        return reached[-1] if reached else self.copy_from_bytes[0][1]

    @property
    def prefers_kernels(self) -> bool:
        """Whether kernels are the choice for all pages that they reach."""
        return not self.staged and all(size >= NEVER for _, size in self.copy_from_bytes)


# Without a calibration: vLLM's rule on an H100 (vllm#42212), kernels for 16 or more pieces of less
# than 28 KiB. A kernel's stores to host memory over PCIe are slow (TensorRT-LLM), so short pieces
# are staged on the way there.
NEVER = 1 << 62
_LINK = ((1, 0), (16, 28 * 1024))
_KERNELS = Thresholds(((1, NEVER),), staged=False)
DEFAULTS = {
    "to_device": Thresholds(_LINK, staged=False),
    "to_host": Thresholds(_LINK, staged=True),
    "within": _KERNELS,
}

_thresholds: weakref.WeakKeyDictionary[Device, dict[str, Thresholds]] = weakref.WeakKeyDictionary()


def thresholds(device: Device, direction: str) -> Thresholds:
    """Return the thresholds of a device in a direction: as calibrated, else the default."""
    if device not in _thresholds:
        calibration = read_calibration(device.model)
        _thresholds[device] = {
            d: _parse(calibration.get(d), default_thresholds(device, d)) for d in DIRECTIONS
        }
    return _thresholds[device][direction]


def default_thresholds(device: Device, direction: str) -> Thresholds:
    """Return the thresholds without a calibration."""
    return DEFAULTS[direction] if device.has_copy_engine else _KERNELS


def forget_thresholds() -> None:
    """Read calibrations again, for transfers that are prepared from now on."""
    _thresholds.clear()
    call.forget()


def _parse(calibrated: Any, default: Thresholds) -> Thresholds:
    try:
        copy_from_bytes = tuple(
            (int(pieces), int(num_bytes)) for pieces, num_bytes in calibrated["copy_from_bytes"]
        )
        blocks = None if calibrated["blocks"] is None else int(calibrated["blocks"])
        staged = bool(calibrated["staged"])
    except (TypeError, KeyError, ValueError):
        return default
    return Thresholds(copy_from_bytes, staged, blocks) if copy_from_bytes else default


def calibration_file(model: str) -> Path:
    """Return where the calibration of a device model is stored: next to the compiled kernels."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-") or "device"
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return cache.directory() / f"calibration-{name}-{digest}.json"


def read_calibration(model: str) -> dict[str, Any]:
    """Return what the command `calibrate` has written of a device model; {} if nothing."""
    return parse_calibration(calibration_file(model))


def parse_calibration(file: Path) -> dict[str, Any]:
    """Return a calibration; {} for a file that is missing or malformed."""
    try:
        content = json.loads(cache.read(file))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
