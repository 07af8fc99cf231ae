"""Move pages between pools: GPU to pinned host memory and back, in any layout."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .. import calibration, faults, observe, scratch
from ..arrays import ArrayView, describe, overlap
from ..config import config
from ..devices.protocol import Device, Stream
from ..errors import CompileError
from . import expressions, transfer_kernels
from .page_pairs import Existing, PagePairs, PageRuns, page_runs
from .transfer_kernels import KernelMove, Rows, joined

__all__ = ["PagePairs", "PreparedTransfer", "prepare", "transfer_pages"]

_NAMES = ("src_pool", "dst_pool")

_MAX_WAYS = 256  # of two pools: sets of layers come in any number

# By source and target, which it keeps neither of, and by options, the last used last.
_ways: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Request, Way]]] = WeakKeyDictionary()
_lock = threading.Lock()


def transfer_pages(
    src_pool: Any,
    dst_pool: Any,
    src_pages: Any,
    dst_pages: Any,
    *,
    layers: Any = None,
    method: str = "auto",
    max_blocks: int | None = None,
    convert: bool = False,
    stream: Any = None,
) -> None:
    """Copy pages of one pool onto pages of another: K and V, of all layers or of some.

    Parameters
    ----------
    src_pool, dst_pool : KVPool or MLAPool of one device and geometry, in any layout and placement,
        of any page counts. They may be one pool
    src_pages, dst_pages : int32 or int64 (N,), or lists of ints. A pair with a negative page is
        skipped. Past the end: likewise, and raised by `check_faults`
    layers : which layers; None: all
    method : "kernel" (a launch for each evenly spaced set of layers, which reads and writes pinned
        memory directly), "copy" (contiguous runs by the copy engine), "staged" (relaid in a buffer
        of the device, then copied in long runs), or "auto", which chooses by how many pieces there
        are and how long: as `python -m kvcupy calibrate` found for this device; else, on a GPU,
        kernels for 16 pieces and more of less than 28 KiB, which to the host are relaid first if
        that makes them so long; on the host device kernels
    max_blocks : of the kernels; None: one for every 24 multiprocessors of the device, where bytes
        leave its memory or enter it
    convert : allow pools of different formats. Scales of a quantised pool are dynamic, one a token
        and head, as in `store_kv`; without scales they are 1
    stream : Stream, or a CuPy or torch stream. None: the current one of the library that the page
        lists come from, if they lie on the GPU, else torch's if a pool is made of torch tensors.
        Else the one that is current in CuPy or torch: torch's inside `torch.cuda.stream(s)` and
        `torch.cuda.graph`, CuPy's inside `with s:`. On the host device this thread

    Raises
    ------
    TypeError, ValueError : an argument does not fit; or `stream` is None, and CuPy and torch have
        made different streams current. Nothing was moved
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    A page that is written twice, or read and written, in one call ends up undefined. Stream: in
    order. "copy", "staged" and "auto" read page lists of the host during the call; lists that only
    a GPU holds need "kernel" ("auto" takes it). Capture: legal; a replay reads page lists that
    kernels can reach again. Bytes: K and V once, and the scales.
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
    src_pool: Any,
    dst_pool: Any,
    *,
    layers: Any = None,
    method: str = "auto",
    max_blocks: int | None = None,
    convert: bool = False,
    names: tuple[str, str] = _NAMES,
) -> PreparedTransfer:
    """Check everything but the pages, for calls that differ in nothing else.

    Parameters
    ----------
    names : what errors call the two pools
    """
    request = Request.of(layers, method, max_blocks, convert)
    require_pool(src_pool, names[0])
    require_pool(dst_pool, names[1])
    with _lock:
        known = _ways.setdefault(src_pool, WeakKeyDictionary()).setdefault(dst_pool, {})
        way = known.pop(request, None)
        if way is not None:
            known[request] = way
    if way is None:
        src, dst = pages_of(src_pool), pages_of(dst_pool)
        devices = src_pool.device, dst_pool.device
        require_geometry(src, dst, request, devices, names)
        way = Way(src_pool.device, src, dst, request)
        with _lock:
            known[request] = way
            if len(known) > _MAX_WAYS:
                del known[next(iter(known))]
    return PreparedTransfer(src_pool, dst_pool, way)


@dataclass(frozen=True)
class PreparedTransfer:
    """A transfer that lacks only its pages. Keeps its pools alive."""

    src_pool: Any
    dst_pool: Any
    way: Way

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page, in the layers that are moved, as the source stores them."""
        return self.way.page_bytes

    def _library(self, pairs: PagePairs) -> str:
        """Return whose current stream no stream means; empty if the arrays do not say.

        That kvcupy's own pools are CuPy's memory is no choice of the caller's.
        """
        way = self.way
        lists = [v.library for v in pairs.views if v.device == way.device.name]
        parts = [v.library for v in (*way.src.parts, *way.dst.parts) if v.library == "torch"]
        return next(iter((*lists, *parts)), "")

    def issue(self, pairs: PagePairs, stream: Any, *, name: str = "transfer_pages") -> None:
        """Put the transfer of some pages on a stream.

        Parameters
        ----------
        name : under which it is announced to timelines and checkers
        """
        way = self.way
        on = way.device.as_stream(stream, "" if stream is not None else self._library(pairs))
        if pairs.count == 0 or not way.routes:
            return
        pools = self.src_pool, self.dst_pool
        enqueue = way.plan(pairs, on, pools)

        def describe() -> observe.Operation:
            reads = way.accesses(way.source, pools[0], pairs.views[0])
            return observe.Operation(
                name, on, reads, way.accesses(way.target, pools[1], pairs.views[1])
            )

        observe.issue(describe, enqueue)
        self.dst_pool.note_written(way.layers)


@dataclass(frozen=True)
class Request:
    """The options of a transfer, checked. `layers` is in rising order; None: all."""

    layers: tuple[int, ...] | None
    method: str
    max_blocks: int | None
    convert: bool

    @classmethod
    def of(cls, layers: Any, method: Any, max_blocks: Any, convert: Any) -> Request:
        """Check the options."""
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if max_blocks is not None:
            if not _is_int(max_blocks):
                raise TypeError(f"max_blocks: expected None or an int, got {max_blocks!r}")
            if not 1 <= max_blocks < 2**31:
                raise ValueError(f"max_blocks: expected at least 1, got {max_blocks}")
            max_blocks = int(max_blocks)
        if not isinstance(convert, (bool, np.bool_)):
            raise TypeError(f"convert: expected a bool, got {convert!r}")
        return cls(_layers(layers), method, max_blocks, bool(convert))

    def slices(self, num_layers: int) -> list[slice]:
        """Return the layers as evenly spaced sets."""
        if self.layers is None:
            return [slice(0, num_layers, 1)]
        return [
            slice(run[0], run[-1] + 1, run[1] - run[0] if len(run) > 1 else 1)
            for run in evenly_spaced(self.layers)
        ]


def evenly_spaced(numbers: Iterable[int]) -> list[list[int]]:
    """Split rising numbers into runs of one step each, every run as long as it gets.

    >>> evenly_spaced([0, 1, 2, 5, 11, 17, 18])
    [[0, 1, 2], [5, 11, 17], [18]]
    """
    runs: list[list[int]] = []
    for n in numbers:
        run = runs[-1] if runs else []
        if run and (len(run) == 1 or n - run[-1] == run[-1] - run[-2]):
            run.append(n)
        else:
            runs.append([n])
    return runs


def require_pool(pool: Any, name: str) -> None:
    """Refuse what is no pool."""
    if not all(hasattr(pool, a) for a in ("groups", "device", "placement")):
        raise TypeError(f"{name}: expected a KVPool or MLAPool, got {type(pool).__name__}")


def pages_of(pool: Any) -> PoolPages:
    """Return the pages of a pool, described by address: nothing is kept alive."""
    on_device = pool.placement == "device"
    return PoolPages(
        tuple(
            (
                group.layers,
                Pages(
                    tuple(v.without_owner() for v in group.parts),
                    tuple(v.without_owner() for v in group.scale_parts),
                    on_device,
                ),
            )
            for group in pool.groups
        )
    )


def require_geometry(
    source: PoolPages, target: PoolPages, request: Request, devices: tuple[Device, Device],
    names: tuple[str, str],
) -> None:  # fmt: skip
    """Refuse pools that do not go together, and layers that they do not have."""
    src_name, dst_name = names
    src, dst = source.any_group, target.any_group
    if devices[0] is not devices[1]:
        raise ValueError(
            f"{dst_name}: expected one of {devices[0].name} like {src_name}, "
            f"got one of {devices[1].name}"
        )
    if len(src.parts) != len(dst.parts):
        kinds = {1: "an MLA pool", 2: "a pool of K and V"}
        raise ValueError(
            f"{dst_name}: expected {kinds[len(src.parts)]} like {src_name}, "
            f"got {kinds[len(dst.parts)]}"
        )
    shapes = zip(source.row_shapes, target.row_shapes, strict=True)
    for part, (a, b) in zip(("K", "V"), shapes, strict=False):
        if a != b:
            raise ValueError(
                f"{dst_name}: expected pages of (layers, page_size, heads, width) "
                f"{a} like {part} of {src_name}, got {b}"
            )
    if src.format != dst.format:
        if not request.convert:
            raise ValueError(
                f"{dst_name}: expected {src.format} like {src_name}, got {dst.format}; "
                "convert=True converts in transit"
            )
        if request.method == "copy":
            raise ValueError(
                'method: expected "kernel", "staged" or "auto" between pools of different '
                'formats, got "copy"'
            )
    elif bool(src.scales) != bool(dst.scales):
        own, other = ("scales", "none") if src.scales else ("no scales", "some")
        raise ValueError(f"{dst_name}: expected {own} like {src_name}, got {other}")
    num_layers = source.num_layers
    for layer in request.layers or ():
        if not 0 <= layer < num_layers:
            raise ValueError(f"layers: expected 0 to {num_layers - 1}, got {layer}")
    _require_separate(source.all, target.all, names)


def _require_separate(
    src: tuple[ArrayView, ...], dst: tuple[ArrayView, ...], names: tuple[str, str]
) -> None:
    """Refuse two pools that share bytes; one pool may be both."""
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


def _layers(layers: Any) -> tuple[int, ...] | None:
    if layers is None:
        return None
    given = [layers] if _is_int(layers) else layers
    try:
        chosen = list(given)
    except TypeError:
        raise TypeError(f"layers: expected None, an int or several, got {layers!r}") from None
    for layer in chosen:
        if not _is_int(layer):
            raise TypeError(f"layers: expected ints, got {layer!r}")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers: expected each once, got {layers!r}")
    return tuple(sorted(int(layer) for layer in chosen))


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Pages:
    """Pages of a pool, of some of its layers.

    Attributes
    ----------
    parts : K and V, or the latent, each (pages, layers, page_size, heads, width)
    scales : of each part, (pages, layers, page_size, heads, 1) float32; or none
    on_device : whether this is the device's own memory, and not the host's
    """

    parts: tuple[ArrayView, ...]
    scales: tuple[ArrayView, ...]
    on_device: bool

    @property
    def num_pages(self) -> int:
        return self.parts[0].shape[0]

    @property
    def format(self) -> str:
        return self.parts[0].format

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page, without scales."""
        return sum(v.size // v.shape[0] * v.itemsize for v in self.parts)

    def of_layers(self, layers: slice) -> Pages:
        return Pages(
            tuple(v[:, layers] for v in self.parts),
            tuple(v[:, layers] for v in self.scales),
            self.on_device,
        )


@dataclass(frozen=True)
class PoolPages:
    """Pages of a pool by groups of evenly spaced layers.

    Attributes
    ----------
    groups : the numbers of the layers of a group, and its pages; together all layers in order
    """

    groups: tuple[tuple[range, Pages], ...]

    @property
    def num_layers(self) -> int:
        return self.groups[-1][0].stop

    @property
    def all(self) -> tuple[ArrayView, ...]:
        """Parts and scales of all groups."""
        return tuple(v for _, pages in self.groups for v in (*pages.parts, *pages.scales))

    @property
    def any_group(self) -> Pages:
        """Pages that stand for all in format, page count and whether there are scales."""
        return self.groups[0][1]

    @property
    def row_shapes(self) -> list[tuple[int, ...]]:
        """Of each part, (layers, page_size, heads, width)."""
        return [(self.num_layers, *v.shape[2:]) for v in self.any_group.parts]

    def split(self, layers: slice) -> list[slice]:
        """Return evenly spaced layers by the groups that they are in."""
        numbers = range(layers.start, layers.stop, layers.step)
        within = [[n for n in numbers if n in group] for group, _ in self.groups]
        return [slice(own[0], own[-1] + 1, layers.step) for own in within if own]

    def of_layers(self, layers: slice) -> Pages:
        """Return the pages of evenly spaced layers of one group."""
        group, pages = next((g, p) for g, p in self.groups if layers.start in g)
        start = layers.start - group.start
        return pages.of_layers(slice(start, start + layers.stop - layers.start, layers.step))


class Route:
    """One evenly spaced set of layers on its way between pages of the same geometry.

    Attributes
    ----------
    rows : K and V, and their scales if both pools have them, as they lie
    converts : whether the formats differ; then `rows` are of no use but to estimate
    reachable : whether kernels reach all of both pools
    """

    def __init__(self, device: Device, src: Pages, dst: Pages) -> None:
        self.device, self.src, self.dst = device, src, dst
        self.converts = src.format != dst.format
        self._moves: list[KernelMove] | None = None
        groups = [(src.parts, dst.parts)]
        if src.scales and dst.scales:
            groups.append((src.scales, dst.scales))
        self._groups = groups
        self.rows = [joined(s, d, [v.pointer for v in (*s, *d)]) for s, d in groups]
        views = [v for pages in (src, dst) for v in (*pages.parts, *pages.scales)]
        self.reachable = transfer_kernels.reached(device, views) is not None

    @property
    def over_link(self) -> bool:
        """Whether the bytes leave the device's memory, or enter it."""
        return not (self.src.on_device and self.dst.on_device)

    def kernel_moves(self) -> list[KernelMove]:
        """Return the launches of the kernel method; CompileError if one cannot be had."""
        if self._moves is None:
            pages = self.src.num_pages, self.dst.num_pages
            if self.converts:
                self._moves = [self._converting(pages)]
            else:
                rows = [joined(s, d, self._reach((*s, *d))) for s, d in self._groups]
                self._moves = [transfer_kernels.copying(self.device, r, *pages) for r in rows]
        return self._moves

    def by_kernel(
        self, pairs: PagePairs, max_blocks: int | None, on: Stream, keep: Sequence[object],
        *, reports: bool = False,
    ) -> None:  # fmt: skip
        """Launch the kernels. `reports`: whether they note pages past the end."""
        lists, owners = pairs.lists(self.device, on)
        blocks = transfer_kernels.blocks(self.device, max_blocks, over_link=self.over_link)
        for i, move in enumerate(self.kernel_moves()):
            move.launch(lists, blocks, on, (*keep, *owners), reports=reports and i == 0)

    def by_runs(self, runs: PageRuns, on: Stream, keep: Sequence[object]) -> None:
        """Copy runs of pages, all of which exist."""
        expanded = [transfer_kernels.expand(rows, runs) for rows in self.rows]
        dst, src, sizes = (np.concatenate(one) for one in zip(*expanded, strict=True))
        self.device.copy_runs(dst, src, sizes, on, keep)

    def _converting(self, pages: tuple[int, int]) -> KernelMove:
        parts = (*self.src.parts, *self.dst.parts)
        values = transfer_kernels.separate(self.src.parts, self.dst.parts, self._reach(parts))
        scales: list[Rows | None] = []
        for own in (self.src.scales, self.dst.scales):
            found = transfer_kernels.separate(own, own, self._reach((*own, *own))) if own else None
            scales.append(found)
        formats = self.src.format, self.dst.format
        return transfer_kernels.converting(
            self.device, values, (scales[0], scales[1]), formats, pages
        )

    def _reach(self, views: Sequence[ArrayView]) -> list[int]:
        addresses = transfer_kernels.reached(self.device, views)
        assert addresses is not None  # asked for only where `reachable`
        return addresses


BUFFER_BYTES = 32 << 20
_ALIGNMENT = 256  # of each part in the buffer
_MOST_KNOWN = 8


class Staging:
    """The way of some layers, evenly spaced in the far pool, over a buffer.

    Parameters
    ----------
    layers : of both pools
    near_layers : the same, by groups of the near pool: the kernel takes a launch for each
    """

    def __init__(
        self,
        device: Device,
        src: PoolPages,
        dst: PoolPages,
        layers: slice,
        near_layers: Sequence[slice],
    ) -> None:
        self._device = device
        self._to_host = is_to_host(src.any_group, dst.any_group)
        far, near = (dst, src) if self._to_host else (src, dst)
        self._far = far.of_layers(layers)
        self._near = [near.of_layers(s) for s in near_layers]
        self._within = [_slice_within(s, layers) for s in near_layers]
        arrays = (*self._far.parts, *self._far.scales)
        self._page_bytes = sum(v.size // v.shape[0] * v.itemsize for v in arrays)
        self.pages_a_turn = max(1, BUFFER_BYTES // self._page_bytes)
        self._known: dict[tuple[int, int], tuple[list[Route], Route]] = {}
        inside = _compact(self._far, 0, 2, None)
        addresses = [v.pointer for v in (*inside.parts, *self._far.parts)]
        self._rows = joined(inside.parts, self._far.parts, addresses)

    @property
    def reachable(self) -> bool:
        """Whether kernels reach the pool on this side of the buffer."""
        views = [v for near in self._near for v in (*near.parts, *near.scales)]
        return transfer_kernels.reached(self._device, views) is not None

    def fragments(self, num_pages: int, num_runs: int) -> tuple[int, int]:
        """Return how many pieces the copies have, and the bytes of one on average."""
        return transfer_kernels.fragments(self._rows, num_pages, num_runs)

    def prepare(self, num_pages: int, on: Stream) -> Turns:
        """Return what moves `num_pages` pages on a stream, its buffer and its kernels in hand.

        Raises
        ------
        CompileError, DeviceError : there is no kernel, or no memory for the buffer
        """
        most = min(num_pages, self.pages_a_turn)
        arrays = len(self._far.parts) + len(self._far.scales)
        buffer = scratch.borrow(self._device, most * self._page_bytes + arrays * _ALIGNMENT, on)
        by_kernel, by_copy = self._legs(buffer, most)
        for route in by_kernel:
            route.kernel_moves()
        return Turns(self._to_host, by_kernel, by_copy, buffer, most)

    def _legs(self, buffer: ArrayView, num_pages: int) -> tuple[list[Route], Route]:
        """Return the routes between the near pool and the buffer, and that to or from the far."""
        key = buffer.pointer, num_pages
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            inside = _compact(self._far, buffer.pointer, num_pages, buffer)
            near = [
                self._route(own, inside.of_layers(within))
                for own, within in zip(self._near, self._within, strict=True)
            ]
            ends = (inside, self._far) if self._to_host else (self._far, inside)
            self._known[key] = near, Route(self._device, *ends)
        return self._known[key]

    def _route(self, near: Pages, inside: Pages) -> Route:
        ends = (near, inside) if self._to_host else (inside, near)
        return Route(self._device, *ends)


def is_to_host(src: Pages, dst: Pages) -> bool:
    """Return whether the buffer comes behind the kernel: the far pool is the target."""
    return not dst.on_device or src.on_device


def _slice_within(part: slice, whole: slice) -> slice:
    """Return where layers are among others of the same step."""
    first = (part.start - whole.start) // whole.step
    return slice(first, first + len(range(part.start, part.stop, part.step)), 1)


@dataclass(frozen=True)
class Turns:
    """A buffer, and the routes into it and out of it.

    Parameters
    ----------
    to_host : whether the kernels come first
    num_pages : how many pages the buffer holds
    """

    to_host: bool
    by_kernel: Sequence[Route]
    by_copy: Route
    buffer: ArrayView
    num_pages: int

    def move(
        self, pairs: Existing, max_blocks: int | None, on: Stream, keep: Sequence[object]
    ) -> None:
        """Move pages, all of which exist."""
        order = np.argsort(pairs.dst if self.to_host else pairs.src, kind="stable")
        kept = (*keep, self.buffer)
        for start in range(0, pairs.count, self.num_pages):
            turn = order[start : start + self.num_pages]
            src, dst, inside = pairs.src[turn], pairs.dst[turn], np.arange(len(turn))
            if not self.to_host:
                self.by_copy.by_runs(page_runs(src, inside), on, kept)
            ends = (src, inside) if self.to_host else (inside, dst)
            lists = PagePairs(*ends)
            for route in self.by_kernel:
                route.by_kernel(lists, max_blocks, on, kept)
            if self.to_host:
                self.by_copy.by_runs(page_runs(inside, dst), on, kept)


def _compact(like: Pages, pointer: int, num_pages: int, memory: ArrayView | None) -> Pages:
    """Return pages without gaps at an address, with the axes in the order of `like`."""
    arrays = []
    for v in (*like.parts, *like.scales):
        pointer = -(-pointer // _ALIGNMENT) * _ALIGNMENT
        shape = (num_pages, *v.shape[1:])
        strides = [0] * v.ndim
        step = v.itemsize
        for _, axis in sorted((abs(stride), -i) for i, stride in enumerate(v.strides)):
            strides[-axis] = step
            step *= shape[-axis]
        where = v.device if memory is None else memory.device
        library = v.library if memory is None else memory.library
        arrays.append(ArrayView(pointer, shape, tuple(strides), v.format, where, library=library))
        pointer += step
    split = len(like.parts)
    return Pages(tuple(arrays[:split]), tuple(arrays[split:]), on_device=True)


_MUCH_LONGER = 4  # staging is worth its detour where it makes pieces so many times as long


class Way:
    """The way of pages from one pool to another. Holds addresses, and keeps no pool alive.

    Attributes
    ----------
    source, target : the pages of both pools, all layers
    src, dst : some of their layers, for what is alike in all
    layers : which are moved; None: all
    routes : one an evenly spaced set of layers
    page_bytes : bytes of K and V of one page in those layers, as the source stores them
    """

    def __init__(
        self, device: Device, source: PoolPages, target: PoolPages, request: Request
    ) -> None:
        src, dst = self.src, self.dst = source.any_group, target.any_group
        self.device, self.source, self.target = device, source, target
        self._request = request
        self.layers = request.layers
        self._stagings: list[Staging] = []
        self.routes: list[Route] = []
        far, near = (target, source) if is_to_host(src, dst) else (source, target)
        for asked in request.slices(source.num_layers):
            for layers in far.split(asked):
                parts = near.split(layers)
                routes = [Route(device, source.of_layers(s), target.of_layers(s)) for s in parts]
                self.routes += routes
                self._stagings.append(Staging(device, source, target, layers, parts))
        self.page_bytes = sum(route.src.page_bytes for route in self.routes)
        self._reachable = all(route.reachable for route in self.routes)
        self._stageable = all(staging.reachable for staging in self._stagings)
        if request.method == "kernel" and not self._reachable:
            raise ValueError(
                'method: expected "copy" or "staged" for pageable memory, which kernels do not '
                'reach, got "kernel"'
            )
        if request.method == "staged" and not self._stageable:
            raise ValueError(
                'method: expected "copy" between pools of pageable memory, got "staged"'
            )
        if self.routes and self.routes[0].converts and not self._stageable:
            raise ValueError("convert: expected memory that kernels reach on one side, got none")
        self._direction = {(True, True): "within", (False, True): "to_device"}.get(
            (src.on_device, dst.on_device), "to_host"
        )
        # Of ways of one kind, those of the layers of a load say, one choice serves all.
        self._kind = repr((
            device.name, self._direction, self._reachable, self._stageable, src.format, dst.format,
            src.num_pages, dst.num_pages, [route.rows[0].shape for route in self.routes],
        ))  # fmt: skip

    def plan(self, pairs: PagePairs, on: Stream, keep: Sequence[object]) -> Callable[[], None]:
        """Choose a method; return what puts the transfer on the stream.

        Raises
        ------
        ValueError : the method cannot take these pages or pools
        CompileError : the kernel cannot be compiled and `config.fallback` is "error"
        """
        method = self._choose(pairs)
        if method == "kernel":
            try:
                for route in self.routes:
                    for one in route.kernel_moves():
                        one.check(pairs.count)
            except CompileError as cause:
                return self._expressed(cause, pairs, on, keep)
            return lambda: self._by_kernels(pairs, on, keep)
        existing = pairs.existing(self.src.num_pages, self.dst.num_pages)
        notes = self._notes(pairs, on) if existing.count < pairs.count else []
        if method == "copy":
            moves: list[Callable[[], None]] = [
                partial(route.by_runs, existing.runs, on, keep) for route in self.routes
            ]
        else:
            try:
                turns = [s.prepare(max(1, existing.count), on) for s in self._stagings]
            except CompileError as cause:
                return self._expressed(cause, pairs, on, keep)
            moves = [partial(t.move, existing, self._max_blocks(), on, keep) for t in turns]

        def move() -> None:
            for note in notes:
                note()
            if existing.count:
                for enqueue in moves:
                    enqueue()

        return move

    def accesses(
        self, pages: PoolPages, pool: Any, numbers: ArrayView
    ) -> tuple[observe.Access, ...]:
        """Return the bytes of a pool that the transfer touches, for who watches."""
        return tuple(observe.Access(_owned(part, pool), numbers) for part in pages.all)

    def _choose(self, pairs: PagePairs) -> str:
        method = self._request.method
        if method != "auto":
            return method
        if self._kind not in pairs.methods:
            pairs.methods[self._kind] = self._choose_for(pairs)
        return pairs.methods[self._kind]

    def _choose_for(self, pairs: PagePairs) -> str:
        route, staging = self.routes[0], self._stagings[0]
        if self._reachable and (pairs.src is None or pairs.dst is None):
            return "kernel"
        existing = pairs.existing(self.src.num_pages, self.dst.num_pages)
        num_pages, num_runs = existing.count, len(existing.runs.lengths)
        pieces, piece_bytes = transfer_kernels.fragments(route.rows[0], num_pages, num_runs)
        staged_pieces, staged_bytes = staging.fragments(num_pages, num_runs)
        limits = thresholds(self.device, self._direction)
        longer = staged_bytes >= max(
            _MUCH_LONGER * piece_bytes, limits.crossover(staged_pieces * len(self._stagings))
        )
        longer = self._stageable and longer
        if route.converts:
            return "kernel" if self._reachable and not (longer and limits.staged) else "staged"
        if piece_bytes >= limits.crossover(pieces * len(self.routes)):
            return "copy"
        if longer and (limits.staged or not self._reachable):
            return "staged"
        return "kernel" if self._reachable else "copy"

    def _max_blocks(self) -> int | None:
        if self._request.max_blocks is not None or self._direction == "within":
            return self._request.max_blocks
        return thresholds(self.device, self._direction).blocks

    def _by_kernels(self, pairs: PagePairs, on: Stream, keep: Sequence[object]) -> None:
        for i, route in enumerate(self.routes):
            route.by_kernel(pairs, self._max_blocks(), on, keep, reports=i == 0)

    def _expressed(
        self, cause: CompileError, pairs: PagePairs, on: Stream, keep: Sequence[object]
    ) -> Callable[[], None]:
        """Return the transfer as array expressions, if they are allowed."""
        self.device.check_fallback("transfer_pages", on)
        config.fall_back("transfer_pages", cause)

        def express() -> None:
            src, dst = (
                self.device.carrier(view) if given is None or view.device == self.device.name
                else given
                for view, given in zip(pairs.views, (pairs.src, pairs.dst), strict=True)
            )  # fmt: skip
            for fault in self._faults(src, dst):
                expressions.note_fault(self.device, *fault)
            live = (src >= 0) & (dst >= 0)
            live &= (src < self.src.num_pages) & (dst < self.dst.num_pages)
            for route in self.routes:
                move_expressed(self.device, route.src, route.dst, src[live], dst[live])

        return lambda: self.device.run(express, on, (*keep, *pairs.views))

    def _notes(self, pairs: PagePairs, on: Stream) -> list[Callable[[], None]]:
        """Return functions that record on the stream which pages of host lists are past the end.

        Copies need no compiler, so where there is none no warning is logged and nothing is refused.
        """
        device, note = self.device, transfer_kernels.note_fault
        found = [
            (count, operation, int(position), int(page))
            for count, operation, position, page in self._faults(pairs.src, pairs.dst)
        ]
        if not found:
            return []
        try:
            device.load(transfer_kernels.NOTE)
        except CompileError:
            device.check_fallback("transfer_pages", on)
            return [
                partial(device.run, partial(expressions.note_fault, device, *fault), on)
                for fault in found
            ]
        return [partial(note, device, fault, on) for fault in found]

    def _faults(self, src: Any, dst: Any) -> Iterator[tuple[int, int, Any, Any]]:
        """Yield pages past the end as the kernel reports them: the fields of the record."""
        meant = (src >= 0) & (dst >= 0)
        for name, pages, most in (
            ("src_pages", src, self.src.num_pages), ("dst_pages", dst, self.dst.num_pages)
        ):  # fmt: skip
            bad = (meant & (pages >= most)).nonzero()[0]
            meant &= pages < most
            if len(bad):
                operation = faults.operation_id("transfer_pages", name)
                yield len(bad), operation, bad[0], pages[bad[0]]


def _owned(part: ArrayView, pool: Any) -> ArrayView:
    return ArrayView(
        part.pointer, part.shape, part.strides, part.format, part.device,
        library=part.library, owner=pool,
    )  # fmt: skip


METHODS = ("auto", "kernel", "copy", "staged")

DIRECTIONS = ("to_device", "to_host", "within")


@dataclass(frozen=True)
class Thresholds:
    """What decides, in one direction.

    Attributes
    ----------
    copy_from_bytes : from how many bytes a piece on the copy engine wins over the kernel, by the
        number of pieces: (at least so many pieces, bytes) in rising order of pieces
    staged : whether relaying pages on the device first is worth it where that makes pieces long
        enough for the copy engine
    blocks : of a kernel over a link; None: `transfer_kernels.bounded_blocks`
    """

    copy_from_bytes: tuple[tuple[int, int], ...]
    staged: bool
    blocks: int | None = None

    def crossover(self, pieces: int) -> int:
        """Return from how many bytes a piece copies win."""
        found = self.copy_from_bytes[0][1]
        for at_least, num_bytes in self.copy_from_bytes:
            if pieces >= at_least:
                found = num_bytes
        return found


# Without a calibration. vLLM's rule on an H100 (vllm#42212): kernel for 16 pieces and more of less
# than 28 KiB. Stores of a kernel to host memory over PCIe are slow (TensorRT-LLM), so pages whose
# pieces are short are relaid first on the way there.
_LINK = ((1, 0), (16, 28 * 1024))
NEVER = 1 << 62
_BY_KERNEL = Thresholds(((1, NEVER),), staged=False)
DEFAULTS = {
    "to_device": Thresholds(_LINK, staged=False),
    "to_host": Thresholds(_LINK, staged=True),
    "within": _BY_KERNEL,
}


_known: WeakKeyDictionary[Device, dict[str, Thresholds]] = WeakKeyDictionary()


def default(device: Device, direction: str) -> Thresholds:
    """Return what decides without a calibration."""
    return DEFAULTS[direction] if device.has_copy_engine else _BY_KERNEL


def thresholds(device: Device, direction: str) -> Thresholds:
    """Return what decides on a device in a direction: as calibrated, or by default."""
    if device not in _known:
        kept = calibration.load(device.model)
        _known[device] = {d: _read(kept.get(d), default(device, d)) for d in DIRECTIONS}
    return _known[device][direction]


def forget() -> None:
    """Read calibrations anew at the next transfer."""
    _known.clear()


def _read(kept: Any, default: Thresholds) -> Thresholds:
    try:
        steps = tuple(
            (int(pieces), int(num_bytes)) for pieces, num_bytes in kept["copy_from_bytes"]
        )
        blocks = None if kept["blocks"] is None else int(kept["blocks"])
        staged = bool(kept["staged"])
    except (TypeError, KeyError, ValueError):
        return default
    return Thresholds(steps, staged, blocks) if steps else default


def move_expressed(device: Device, src: Pages, dst: Pages, src_pages: Any, dst_pages: Any) -> None:
    """Move pages, all of which exist, between pools; convert where the formats differ."""
    if src.format == dst.format:
        for source, target in zip((*src.parts, *src.scales), (*dst.parts, *dst.scales),
                                  strict=True):  # fmt: skip
            device.carrier(target)[dst_pages] = device.carrier(source)[src_pages]
        return
    for i, (source, target) in enumerate(zip(src.parts, dst.parts, strict=True)):
        values = expressions.decode(device.carrier(source)[src_pages], src.format)
        if src.scales:
            values = expressions.multiply(values, device.carrier(src.scales[i])[src_pages])
        if dst.scales:
            scale = expressions.dynamic_scale(values, dst.format)
            device.carrier(dst.scales[i])[dst_pages] = scale[..., None]
            values = expressions.divide(values, scale[..., None])
        device.carrier(target)[dst_pages] = expressions.encode(values, dst.format)
