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
from .transfer_route import Pages, Route
from .transfer_runs import page_runs

BUFFER_BYTES = 32 << 20
_ALIGNMENT = 256  # of each part in the buffer
_MOST_KNOWN = 8


class Staging:
    """The way of one route over a buffer."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._to_host = not route.dst.on_device or route.src.on_device
        self._far = route.dst if self._to_host else route.src
        arrays = (*self._far.parts, *self._far.scales)
        self._page_bytes = sum(v.size // v.shape[0] * v.itemsize for v in arrays)
        self.pages_a_turn = max(1, BUFFER_BYTES // self._page_bytes)
        self._known: dict[tuple[int, int], tuple[Route, Route]] = {}
        inside = _compact(self._far, 0, 2, None)
        addresses = [v.pointer for v in (*inside.parts, *self._far.parts)]
        self._rows = transfer_rows.joined(inside.parts, self._far.parts, addresses)

    @property
    def reachable(self) -> bool:
        """Whether kernels reach the pool on this side of the buffer."""
        near = self._route.src if self._to_host else self._route.dst
        views = (*near.parts, *near.scales)
        return transfer_kernels.reached(self._route.device, views) is not None

    def fragments(self, num_pages: int, num_runs: int) -> tuple[int, int]:
        """Return how many pieces the copies have, and the bytes of one on average."""
        return transfer_runs.fragments(self._rows, num_pages, num_runs)

    def prepare(self, num_pages: int, on: Stream) -> Turns:
        """Return what moves `num_pages` pages on a stream, its buffer and its kernels in hand.

        Raises
        ------
        CompileError, DeviceError : there is no kernel, or no memory for the buffer
        """
        device = self._route.device
        most = min(num_pages, self.pages_a_turn)
        arrays = len(self._far.parts) + len(self._far.scales)
        buffer = scratch.borrow(device, most * self._page_bytes + arrays * _ALIGNMENT, on)
        legs = self._legs(device, buffer, most)
        legs[0 if self._to_host else 1].kernel_moves()
        return Turns(self._to_host, legs, buffer, most)

    def _legs(self, device: Device, buffer: ArrayView, num_pages: int) -> tuple[Route, Route]:
        """Return the routes into the buffer and out of it."""
        key = buffer.pointer, num_pages
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            inside = _compact(self._far, buffer.pointer, num_pages, buffer)
            self._known[key] = (
                Route(device, self._route.src, inside),
                Route(device, inside, self._route.dst),
            )
        return self._known[key]


@dataclass(frozen=True)
class Turns:
    """A buffer, and the routes into it and out of it.

    Parameters
    ----------
    to_host : whether the kernel comes first
    num_pages : how many pages the buffer holds
    """

    to_host: bool
    legs: tuple[Route, Route]
    buffer: ArrayView
    num_pages: int

    def move(
        self, pairs: Existing, max_blocks: int | None, on: Stream, keep: Sequence[object]
    ) -> None:
        """Move pages, all of which exist."""
        order = np.argsort(pairs.dst if self.to_host else pairs.src, kind="stable")
        first, second = self.legs
        kept = (*keep, self.buffer)
        for start in range(0, pairs.count, self.num_pages):
            turn = order[start : start + self.num_pages]
            src, dst, inside = pairs.src[turn], pairs.dst[turn], np.arange(len(turn))
            if self.to_host:
                first.by_kernel(PagePairs(src, inside), max_blocks, on, kept)
                second.by_runs(page_runs(inside, dst), on, kept)
            else:
                first.by_runs(page_runs(src, inside), on, kept)
                second.by_kernel(PagePairs(inside, dst), max_blocks, on, kept)


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
