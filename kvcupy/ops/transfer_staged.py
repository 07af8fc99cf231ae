"""Pages moved in two steps: relaid by a kernel in a buffer of the device, and copied in long runs.

The buffer has the layout of the far pool (the one in host memory), so a page, or a run of pages, is
one piece there. Transfers that are larger than the buffer go through it in turns, in stream order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import scratch
from ..arrays import ArrayView
from ..devices.protocol import Device, Stream
from . import transfer_kernels, transfer_rows, transfer_runs
from .page_pairs import Existing, PagePairs
from .transfer_route import Pages, PoolPages, Route
from .transfer_runs import page_runs

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
        self._rows = transfer_rows.joined(inside.parts, self._far.parts, addresses)

    @property
    def reachable(self) -> bool:
        """Whether kernels reach the pool on this side of the buffer."""
        views = [v for near in self._near for v in (*near.parts, *near.scales)]
        return transfer_kernels.reached(self._device, views) is not None

    def fragments(self, num_pages: int, num_runs: int) -> tuple[int, int]:
        """Return how many pieces the copies have, and the bytes of one on average."""
        return transfer_runs.fragments(self._rows, num_pages, num_runs)

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
