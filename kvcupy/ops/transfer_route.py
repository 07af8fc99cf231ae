"""A transfer of some layers from one pool to another, by each of the ways there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import ArrayView
from ..devices.protocol import Device, Stream
from . import transfer_kernels, transfer_rows, transfer_runs
from .page_pairs import PagePairs
from .transfer_kernels import KernelMove
from .transfer_rows import Rows
from .transfer_runs import PageRuns


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
        self.rows = [transfer_rows.joined(s, d, [v.pointer for v in (*s, *d)]) for s, d in groups]
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
                rows = [transfer_rows.joined(s, d, self._reach((*s, *d))) for s, d in self._groups]
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
        expanded = [transfer_runs.expand(rows, runs) for rows in self.rows]
        dst, src, sizes = (np.concatenate(one) for one in zip(*expanded, strict=True))
        self.device.copy_runs(dst, src, sizes, on, keep)

    def _converting(self, pages: tuple[int, int]) -> KernelMove:
        parts = (*self.src.parts, *self.dst.parts)
        values = transfer_rows.separate(self.src.parts, self.dst.parts, self._reach(parts))
        scales: list[Rows | None] = []
        for own in (self.src.scales, self.dst.scales):
            found = transfer_rows.separate(own, own, self._reach((*own, *own))) if own else None
            scales.append(found)
        formats = self.src.format, self.dst.format
        return transfer_kernels.converting(
            self.device, values, (scales[0], scales[1]), formats, pages
        )

    def _reach(self, views: Sequence[ArrayView]) -> list[int]:
        addresses = transfer_kernels.reached(self.device, views)
        assert addresses is not None  # asked for only where `reachable`
        return addresses
