"""Transfers between pools with known bytes, and a model of what they must leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from common.checks import require_equal
from common.timers import TO_HOST

import kvcupy as kv
from kvcupy.formats import carrier_dtype


def fill(pool: Any, parts: list[np.ndarray[Any, Any]]) -> None:
    """Write bits (pages, layers, page_size, heads, width), one array per part, into a pool."""
    for view, bits in zip(pool.parts, parts, strict=True):
        if pool.placement == "device":
            pool.device.copy(view, kv.view_as(pool.device.asarray(bits), pool.dtype))
        else:
            kv.device("host").carrier(view)[...] = bits
    pool.device.synchronize()


def bits_of(pool: Any) -> list[np.ndarray[Any, Any]]:
    """Return copies of the parts of a pool as unsigned integers, in the axes of `fill`."""
    carrier = carrier_dtype(pool.dtype)
    return [pool.device.to_numpy(view).view(carrier) for view in pool.parts]


def random_parts(rng: np.random.Generator, pool: Any) -> list[np.ndarray[Any, Any]]:
    """Return random bits for every part of a pool."""
    carrier = carrier_dtype(pool.dtype)
    return [
        np.frombuffer(rng.bytes(view.size * view.itemsize), carrier).reshape(view.shape)
        for view in pool.parts
    ]


@dataclass(frozen=True)
class Shape:
    """What is moved.

    Attributes
    ----------
    row_bytes : of K, and of V, per token and layer; of the latent in an MLA pool
    layouts : of the device's pool and of the host's
    """

    row_bytes: int
    page_size: int
    num_layers: int
    num_pages: int
    layouts: tuple[str, str] = ("layer_first", "layer_first")
    mla: bool = False

    @property
    def parts(self) -> int:
        return 1 if self.mla else 2

    @property
    def bytes_moved(self) -> int:
        """Bytes of all pages that one transfer moves, each counted once."""
        rows = self.num_pages * self.page_size * self.num_layers * self.parts
        return rows * self.row_bytes

    def pool(self, device: Any, *, host: bool) -> Any:
        """Return a pool with a few pages more than are moved, which nothing may write."""
        sizes = (self.num_pages + 3, self.page_size, self.num_layers)
        where: dict[str, Any] = {
            "layout": self.layouts[host],
            "placement": "pinned" if host else "device",
            "device": device,
        }
        if self.mla:  # one byte per element: 576 of fp8, or 512 with scales and bf16 rope
            return kv.MLAPool(*sizes, self.row_bytes, dtype="int8", **where)
        heads = max(1, self.row_bytes // 256)
        return kv.KVPool(*sizes, heads, self.row_bytes // heads // 2, dtype="bf16", **where)


class Pools:
    """Two pools, scattered pages in both, and what each must hold after every transfer."""

    def __init__(self, device: Any, shape: Shape, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.device, self.shape = device, shape
        self.device_pool = shape.pool(device, host=False)
        self.host_pool = shape.pool(device, host=True)
        self._want = {}
        for pool in (self.device_pool, self.host_pool):
            parts = random_parts(self._rng, pool)
            fill(pool, parts)
            self._want[pool] = [part.copy() for part in parts]
        self.scatter()

    def scatter(self) -> None:
        """Choose other pages, so that leftovers of an earlier transfer are wrong."""
        pools = (self.device_pool, self.host_pool)
        self._pages = {
            pool: self._rng.permutation(pool.num_pages)[: self.shape.num_pages] for pool in pools
        }

    def accept(self) -> None:
        """Take what the pools hold for what they should, after a transfer that went wrong."""
        self._want = {pool: bits_of(pool) for pool in self._want}

    def ends(self, direction: str) -> tuple[Any, Any, Any, Any]:
        """Return source pool, target pool, and the pages in each."""
        pools = (self.device_pool, self.host_pool)
        src, dst = pools if direction == TO_HOST else pools[::-1]
        return src, dst, self._pages[src], self._pages[dst]

    def transfer(self, direction: str, stream: Any, **options: Any) -> None:
        """Enqueue one transfer on a stream."""
        kv.transfer_pages(*self.ends(direction), stream=stream, **options)

    def copy_each_page(self, direction: str, stream: Any) -> None:
        """Enqueue one copy per page, layer and part, as one would without kernels."""
        src, dst, src_pages, dst_pages = self.ends(direction)
        pairs = list(zip(src_pages.tolist(), dst_pages.tolist(), strict=True))
        for layer in range(self.shape.num_layers):
            for part in ("k", "v")[: self.shape.parts]:
                source, target = getattr(src, part)(layer), getattr(dst, part)(layer)
                for i, j in pairs:
                    self.device.copy(target[j], source[i], stream=stream)

    def check(self, name: str, direction: str) -> None:
        """Compare every byte of the target with NumPy's, pages that were not moved included."""
        src, dst, src_pages, dst_pages = self.ends(direction)
        for part, (got, want, source) in enumerate(
            zip(bits_of(dst), self._want[dst], self._want[src], strict=True)
        ):
            want[dst_pages] = source[src_pages]
            require_equal(f"{name}, {direction}, part {part}", got, want)
