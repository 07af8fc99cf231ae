"""Calls planned as for a GPU that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np

from kvcupy import formats
from kvcupy.arrays import ArrayView, strides_of
from kvcupy.config import shared_bytes
from kvcupy.kernels import Specialisation


@dataclass(frozen=True)
class Planned:
    """A launch that an operation asked for."""

    specialisation: Specialisation
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    params: bytes

    @property
    def warps_per_block(self) -> int:
        return -(-prod(self.block) // 32)


class _Stream:
    """The one stream of a `PlannedDevice`, which has nothing to wait for."""

    name, priority, capturing, retains_owners, capture_id = "planned", 0, False, True, None

    def __init__(self, device: PlannedDevice) -> None:
        self.device = device

    def wait(self, other: Any) -> None:
        pass


class PlannedDevice:
    """A GPU as far as plans see it: arrays are addresses, and launches are written down.

    Attributes
    ----------
    launches : in the order of issue
    """

    kind, warp_lanes, has_copy_engine, torch_name = "cuda", 32, True, "cuda:0"
    fault_pointer = 1 << 32

    def __init__(self, arch: str, sm_count: int) -> None:
        self.name = self.model = arch
        self.arch, self.sm_count, self.shared_bytes = arch, sm_count, shared_bytes(arch)
        self.launches: list[Planned] = []
        self._next = 1 << 40
        self._stream = _Stream(self)

    def array(self, *shape: int, format: str) -> ArrayView:
        """Return an array of this device, which no memory stands behind."""
        strides = strides_of(shape, format)
        # Operations look a device up by what an array says: a name, or the device itself.
        v = ArrayView(self._next, shape, strides, format, cast(str, self), library="cupy")
        self._next += -(-v.num_bytes // 256) * 256
        return v

    def allocate(
        self, shape: tuple[int, ...], dtype: Any, stream: Any, *, zeroed: bool
    ) -> ArrayView:
        return self.array(*shape, format=formats.tag(np.dtype(dtype)))

    def release(self, owners: list[Any]) -> None:
        owners.clear()

    def run(self, function: Callable[[], object], stream: Any, keep: Sequence[object] = ()) -> None:
        """Run nothing: what counts are launches."""

    def keep(self, owners: Sequence[object], stream: Any) -> None:
        """Keep nothing: no memory stands behind an array."""

    def as_stream(self, stream: Any, library: str = "", name: str = "stream") -> _Stream:
        return self._stream

    def address(self, view: ArrayView) -> int:
        return view.pointer

    def load(self, specialisation: Specialisation) -> Specialisation:
        return specialisation

    def launch(
        self, function: Specialisation, grid: tuple[int, int, int], block: tuple[int, int, int],
        smem_bytes: int, params: bytes, stream: Any, keep: Sequence[object] = (),
    ) -> None:  # fmt: skip
        self.launches.append(Planned(function, grid, block, smem_bytes, bytes(params)))
