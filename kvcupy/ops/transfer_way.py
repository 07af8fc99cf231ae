"""Everything that two pools and the options of a transfer decide; pages come later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from .. import faults, observe
from ..arrays import ArrayView
from ..config import config
from ..devices.protocol import Device, Stream
from ..errors import CompileError
from . import (
    expressions,
    transfer_expressions,
    transfer_kernels,
    transfer_method,
    transfer_runs,
)
from .page_pairs import PagePairs
from .transfer_checks import Request
from .transfer_route import PoolPages, Route
from .transfer_staged import Staging, is_to_host

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
        pieces, piece_bytes = transfer_runs.fragments(route.rows[0], num_pages, num_runs)
        staged_pieces, staged_bytes = staging.fragments(num_pages, num_runs)
        limits = transfer_method.thresholds(self.device, self._direction)
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
        return transfer_method.thresholds(self.device, self._direction).blocks

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
                transfer_expressions.move(self.device, route.src, route.dst, src[live], dst[live])

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
