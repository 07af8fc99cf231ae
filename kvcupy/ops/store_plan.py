"""What the signature of a store decides, and issuing the store."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from .. import devices, faults, observe
from ..arrays import ArrayView
from ..config import config
from ..errors import CompileError
from ..exporters import view
from . import checks
from .store_expressions import report_faults, store_side
from .store_launch import Launch, Side

_SLOTS = 4
_OUTPUTS = (2, 3, 7, 8)
_MAX_REMEMBERED = 4096


class Plan:
    """Everything that the signature of a call decides; another such call only packs addresses."""

    def __init__(
        self,
        operation: str,
        names: tuple[str, ...],
        sides: list[Side],
        slots: ArrayView,
        skip_slot: int,
        alignment: int,
        library: str,
    ) -> None:
        self.operation = operation
        self.names = names
        self.device = devices.get(slots.device)
        self.library = library
        self.sides: list[Side] = []
        self.skip_slot = skip_slot
        self.num_tokens = slots.shape[0]
        self.v_cache_offset = 0  # bytes, where both sides lie in one cache
        self.fault_id = faults.operation_id(operation, "slot_mapping")
        self.launches: list[Launch] = []
        self.cause: CompileError | None = None
        self._disjoint: set[tuple[int, ...]] = set()
        together = len({side.kind for side in sides}) == 1
        try:
            groups = [sides] if together else [[side] for side in sides]
            for group in groups if self.num_tokens else []:
                launch = Launch(self.device, group, slots, alignment, skip_slot, self.fault_id)
                self.launches.append(launch)
        except CompileError as cause:
            self.cause = copy(cause)
        # A plan is remembered, and must not keep the arrays of the call that it was made for.
        for side in sides:
            scale = replace(side.scale, array=None)
            self.sides.append(replace(side, scale=scale, scale_cache=None))

    def shifted(self, pointers: tuple[int, ...]) -> tuple[int, ...]:
        return (*pointers[:3], pointers[3] + self.v_cache_offset, *pointers[4:])

    def run(self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Any) -> None:
        """Issue the store."""
        on = self.device.as_stream(stream, self.library)
        if self.num_tokens == 0:
            return
        if pointers not in self._disjoint:
            self._require_disjoint(pointers, arrays)
        if self.cause is not None:
            config.fall_back(self.operation, self.cause)

        def enqueue() -> None:
            if self.cause is not None:
                self.device.run(lambda: self._as_expressions(pointers, arrays), on, arrays)
                return
            every = (*pointers, self.device.fault_pointer)
            for one in self.launches:
                self.device.launch(
                    one.function, one.grid, one.block, one.smem_bytes, one.params(every), on, arrays
                )

        if observe.watching():
            observe.issue(lambda: self._declare(pointers, arrays, on), enqueue)
        else:
            enqueue()

    def _views(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Describe the nine arrays: rows by tokens, caches by pages; None for what is no array."""
        k, v = self.sides
        return [
            k.rows_view(pointers[0], self.num_tokens, view(arrays[0])),
            v.rows_view(pointers[1], self.num_tokens, view(arrays[1])),
            k.cache_view(pointers[2], view(arrays[2])),
            v.cache_view(pointers[3], view(arrays[3])),
            *(view(a) if p else None for a, p in zip(arrays[4:], pointers[4:], strict=True)),
        ]

    def _require_disjoint(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        named = list(zip(self.names, self._views(pointers, arrays), strict=True))
        outputs = [named[i] for i in _OUTPUTS]
        inputs = [item for i, item in enumerate(named) if i not in _OUTPUTS]
        checks.require_disjoint(outputs, inputs)
        if len(self._disjoint) >= _MAX_REMEMBERED:
            self._disjoint.clear()
        self._disjoint.add(pointers)

    def _declare(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], on: Any
    ) -> observe.Operation:
        views = self._views(pointers, arrays)
        slots = views[_SLOTS]
        reads = [v for i, v in enumerate(views) if i not in _OUTPUTS and v is not None]
        writes = [v for i, v in enumerate(views) if i in _OUTPUTS and v is not None]
        return observe.Operation(
            self.operation,
            on,
            tuple(observe.Access(v) for v in reads),
            tuple(observe.Access(v, slots) for v in writes),
        )

    def _as_expressions(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        k_rows, v_rows, k_cache, v_cache, slots, k_scale, v_scale, k_scales, v_scales = self._views(
            pointers, arrays
        )
        assert k_rows and v_rows and k_cache and v_cache and slots
        num_slots = self.sides[0].cache.num_slots
        report_faults(self.device, slots, num_slots, self.fault_id)
        for side, rows, cache, scale, scales in (
            (self.sides[0], k_rows, k_cache, k_scale, k_scales),
            (self.sides[1], v_rows, v_cache, v_scale, v_scales),
        ):
            current = replace(side, scale=replace(side.scale, array=scale), scale_cache=scales)
            store_side(self.device, current, rows, cache, slots, self.skip_slot)
