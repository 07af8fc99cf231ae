"""Rows of K and V on their way into a cache or out of it: what store and gather share.

The Params of `kernels_src/cache_rows.cuh`, and a plan whose subclasses say which kernels.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import faults
from ..arrays import ArrayView, view
from ..errors import CompileError
from ..kernels import Kernel, Specialisation, zeroed
from . import geometry, plan, side
from .side import Side

ARRAYS = (
    "key", "value", "k_cache", "v_cache", "slots",
    "k_scale", "v_scale", "k_scale_cache", "v_scale_cache",
)  # fmt: skip

PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*ARRAYS, "faults")),
        ("k", side.PARAMS),
        ("v", side.PARAMS),
        ("slot_stride_bytes", np.int64),
        ("num_slots", np.int64),
        ("skip_slot", np.int64),
        ("operation", np.int64),
        ("num_rows", np.int32),
        ("num_heads", np.int32),
        ("page_size", np.int32),
        ("page_shift", np.int32),
        ("index_bytes", np.int32),
        ("lane_shift", np.int32),
    ],
    align=True,
)

NUM_ROWS = 4  # the first arrays are moved in whole words
PACK = 8  # elements that a thread converts at a time, where alignment allows
WORDS = (16, 8, 4, 2, 1)  # bytes that a thread copies at a time


@dataclass
class CacheRowsPlan(plan.Plan):
    """A move of K and V rows, or of the two parts of MLA, between a cache and its outside."""

    k: Side
    v: Side
    slot_view: ArrayView
    skip_slot: int
    alignment: int

    index_name: ClassVar[str] = "slot_mapping"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fault_id = faults.operation_id(self.operation, self.index_name)
        self.num_tokens = self.slot_view.shape[0]
        if self.num_tokens == 0:
            return
        try:
            for sides in self._groups():
                self.launches.append(self._launch(sides))
        except CompileError as cause:
            self.cause = cause

    @abc.abstractmethod
    def kernel_of(self, one: Side) -> Kernel:
        """Return the kernel that a side takes."""

    @abc.abstractmethod
    def formats_of(self, one: Side) -> tuple[str, str]:
        """Return the formats that a side comes from and goes to, as the kernels name them."""

    def views(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> list[ArrayView | None]:
        """Describe the arrays: rows by tokens, caches by pages."""
        return [
            self.k.rows_view(pointers[0], self.num_tokens, view(arrays[0])),
            self.v.rows_view(pointers[1], self.num_tokens, view(arrays[1])),
            self.k.cache_view(pointers[2], view(arrays[2])),
            self.v.cache_view(pointers[3], view(arrays[3])),
            *(view(a) if p else None for a, p in zip(arrays[4:], pointers[4:], strict=True)),
        ]

    def _groups(self) -> list[dict[str, Side]]:
        """Put both sides into one launch if they take the same kernel, else each into its own."""
        kernel = self.kernel_of(self.k)
        copies = self.k.rows_format is self.k.cache_format
        alike = copies or self.formats_of(self.k) == self.formats_of(self.v)
        if kernel is self.kernel_of(self.v) and alike:
            return [{"k": self.k, "v": self.v}]
        return [{"k": self.k}, {"v": self.v}]

    def _launch(self, sides: dict[str, Side]) -> plan.Launch:
        """Load and lay out the launch of "k", "v" or both."""
        first = next(iter(sides.values()))
        kernel = self.kernel_of(first)
        num_heads = first.rows.num_heads
        widths = {name: one.rows.width for name, one in sides.items()}
        if all(one.heads_join for one in sides.values()):
            widths = {name: width * num_heads for name, width in widths.items()}
            num_heads = 1

        strides = [n for one in sides.values() for n in one.row_strides + one.cache_strides]
        numbers = [self.alignment, *(abs(n) for n in strides)]
        if first.rows_format is first.cache_format:
            widths = {name: n * sides[name].rows_format.itemsize for name, n in widths.items()}
            step = geometry.widest((*widths.values(), *numbers))
            specialisation = kernel.specialise(step)
        else:
            word = min(16, PACK * max(first.rows_format.itemsize, first.cache_format.itemsize))
            whole = all(n % PACK == 0 for n in widths.values())
            step = PACK if whole and geometry.widest(numbers) >= word else 1
            specialisation = kernel.specialise(*self.formats_of(first), step)

        slots, num_rows = self.slot_view, self.num_tokens * num_heads
        geometry.require_countable(num_rows, self.index_name)
        shape = geometry.spread(
            num_rows,
            max(widths.values()) // step,
            self.device.sm_count,
            warp_lanes=self.device.warp_lanes,
            whole_warps=kernel.barriers,
        )
        params = zeroed(PARAMS)
        for name, one in sides.items():
            one.write(params[name], widths[name])
        cache = first.cache
        params["slot_stride_bytes"], params["index_bytes"] = slots.strides[0], slots.itemsize
        params["num_slots"], params["skip_slot"] = cache.num_slots, self.skip_slot
        # Where V goes alone, K's launch has reported.
        params["operation"] = self.fault_id if "k" in sides else -1
        params["num_rows"], params["num_heads"] = num_rows, num_heads
        params["page_size"], params["page_shift"] = cache.page_size, cache.page_shift
        params["lane_shift"] = shape.lane_shift
        smem_bytes = shape.block[0] // 32 * 4 if kernel.barriers else 0
        pointers = [i if _belongs(name, sides) else None for i, name in enumerate(ARRAYS)]
        return plan.Launch(
            self.device, specialisation, shape.grid, shape.block, smem_bytes, params, pointers
        )


def _belongs(array: str, sides: dict[str, Side]) -> bool:
    own = {"key": "k", "value": "v", "slots": ""}.get(array, array[0])
    return own == "" or own in sides


def copies(kernel: Kernel) -> list[Specialisation]:
    """Return the specialisations of a kernel that copies words."""
    return [kernel.specialise(word) for word in WORDS]
