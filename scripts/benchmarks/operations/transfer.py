"""Transfers between pools with known bytes, and a model of what they must leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from common.checks import require_equal
from common.models import Model
from common.timers import TO_HOST, Call

import kvcupy as kv
from kvcupy.formats import carrier_dtype

from . import candidates
from .baselines import Compile, Wrap, as_it_is, ignoring_stream, on_stream


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


# --- A case of the benchmark ----------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape(candidates.Shape):
    """Tokens of all layers of a model, between the device and page-first pinned memory."""

    model: Model
    tokens: int
    direction: str
    format: str = "bf16"
    page_size: int = 16

    operation = "transfer_pages"
    compiles = False  # it copies between devices
    modes = ("eager",)  # page lists are of the host, and change from call to call

    @property
    def name(self) -> str:
        pages = f" page={self.page_size}" * (self.page_size != 16)
        return f"transfer_pages {self.model.name} {self.direction} T={self.tokens}{pages}"

    @property
    def pools(self) -> Shape:
        """What is moved, as pools see it: rows of bytes."""
        width = sum(self.model.row_widths) if self.model.mla else self.model.row_widths[0]
        return Shape(
            2 * width, self.page_size, self.model.layers, -(-self.tokens // self.page_size),
            ("layer_first", "page_first"), mla=self.model.mla,
        )  # fmt: skip

    @property
    def bytes_moved(self) -> int:
        return self.pools.bytes_moved

    @property
    def series(self) -> str:
        return self.direction

    def build(self, device: Any, sets: int) -> ModelCase:
        return ModelCase(device, self, 1)


class ModelCase(candidates.Case):
    """One set of pages: pinned memory is in no cache of the device."""

    def draw(self, rng: np.random.Generator) -> None:
        self._pools = Pools(self.device, self.shape.pools)

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        """Return a transfer by whatever method is chosen for it."""
        return [partial(on_stream, self._transfer)]

    def _transfer(self, stream: Any) -> None:
        self._pools.transfer(self.shape.direction, stream)

    def torch(self, torch: Any, wrap: Wrap, compile: Compile = as_it_is) -> list[Call]:
        """Return an indexed copy for each layer and part."""
        parts = ("torch_k", "torch_v")[: self._pools.shape.parts]
        layers = range(self._pools.shape.num_layers)

        def copy() -> None:
            src, dst, src_pages, dst_pages = self._pools.ends(self.shape.direction)
            source, target = (torch.as_tensor(pages) for pages in (src_pages, dst_pages))
            for part in parts:
                for layer in layers:
                    src_cache, dst_cache = getattr(src, part)(layer), getattr(dst, part)(layer)
                    moved = src_cache[source.to(src_cache.device)].to(dst_cache.device)
                    dst_cache[target.to(dst_cache.device)] = moved

        return [partial(ignoring_stream, copy)]

    def wipe(self) -> None:
        """Choose other pages, whatever the last candidate left."""
        self._pools.accept()
        self._pools.scatter()

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare every byte of the target."""
        self._pools.check(f"{self.shape.name}, {candidate}", self.shape.direction)
