"""A model whose layers read pages that are being loaded from the host, and the ways to load them.

A layer gathers K and V of some slots, every byte of which is checked after each run, and multiplies
matrices. Each run loads other contents into each page, so that leftovers of earlier runs are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common.measure import run_named

import kvcupy as kv
from kvcupy.bench.checks import require_equal
from kvcupy.bench.models import Model
from kvcupy.bench.timers import named_stream, wall_us
from kvcupy.bench.transfer import bits_of, fill

from .step_pipeline import Compute

# Columns of the feed-forward part on one GPU, for models whose layers are all alike and dense.
FEED_FORWARD = {"llama-3.1-8b": 14336, "llama-3.1-70b-tp8": 28672 // 8, "qwen3-8b": 12288}
FIRST_SIZE = (64, 32)  # rows and columns of the smallest product that is tried
MAX_ROWS = 1024
MUCH_FASTER = 1.3  # a product of twice the rows and columns is worth it from here
METHODS = ("kernel", "staged", "copy", "auto")
FIRST, BEST = "load all, then compute", "engine, auto"
READ_SHARE = 8  # one slot in so many is read and compared


@dataclass(frozen=True)
class Proportions:
    """What a cached prefix in host memory costs per layer, by published peaks.

    Attributes
    ----------
    copy_us : K and V of the cached tokens, over the link
    compute_us : the new tokens through the weights, and their attention over all tokens
    """

    copy_us: float
    compute_us: float

    @property
    def ratio(self) -> float:
        return self.copy_us / self.compute_us


def proportions(
    model: Model, cached: int, new: int, *, link_gb_per_s: float, tflops: float
) -> Proportions:
    """Return what loading `cached` tokens and computing `new` ones takes per layer, in bf16.

    >>> from kvcupy.bench.models import MODELS
    >>> peaks = {"link_gb_per_s": 55.0, "tflops": 500.0}
    >>> round(proportions(MODELS["llama-3.1-8b"], 8192, 1024, **peaks).ratio, 2)
    0.51
    """
    queries = model.q_heads * model.head_dim
    weights = model.hidden * (2 * queries + sum(model.row_widths) + 3 * FEED_FORWARD[model.name])
    attention = 4 * queries * (cached + new / 2)
    return Proportions(
        copy_us=cached * sum(model.row_widths) * 2 / link_gb_per_s / 1e3,
        compute_us=new * (2 * weights + attention) / tflops / 1e6,
    )


class LayerProducts(Compute):
    """The smallest matrix product that runs at full speed, repeated.

    Small, so that it stays in caches: on a GPU, whose memory is many times as fast as the link, a
    copy takes no bandwidth from a computation beside it. Its inner size is the model's hidden size.
    """

    def __init__(self, device: Any, model: Model) -> None:
        super().__init__(device, model, MAX_ROWS)

    def fit(self, stream: Any, target_us: float) -> None:
        """Choose the size, then the number of repeats, so that all of it takes `target_us`."""
        self.repeats = 1
        best, us = (0, 0), math.inf
        rows, columns = FIRST_SIZE
        while (rows, columns) != best:
            self._allocate(rows, columns)
            now_us = self._measure(stream)
            if rows * columns / now_us < MUCH_FASTER * math.prod(best) / us:
                break
            best, us = (rows, columns), now_us
            rows, columns = min(2 * rows, MAX_ROWS), min(2 * columns, self.most_columns)
        repeats = max(1, round(target_us / us))
        self._allocate(max(1, round(best[0] * target_us / (us * repeats))), best[1])
        self.repeats = repeats


class OffloadedModel:
    """Layers that compute on the stream "compute", and pools that the stream "load" fills.

    Parameters
    ----------
    bits : K and V of every token as stored on the host, uint16 (2, tokens, layers, heads, width)
    page_size, layout : of the host's pool; the device's is "layer_first"
    """

    def __init__(
        self, device: Any, model: Model, bits: np.ndarray[Any, Any], page_size: int, layout: str
    ) -> None:
        self.device, self.bits = device, bits
        _, tokens, self.layers, heads, width = bits.shape
        self.num_pages, self.page_size = tokens // page_size, page_size
        self.main, self.loader = named_stream(device, "compute"), named_stream(device, "load")
        sizes = (self.num_pages, page_size, self.layers, heads, width)
        self.pool = kv.KVPool(*sizes, device=device)
        self.host_pool = kv.KVPool(*sizes, layout=layout, placement="pinned", device=device)
        fill(self.host_pool, [self._paged(part) for part in bits])

        rng = np.random.default_rng(page_size)
        self.pages, self.host_pages = (rng.permutation(self.num_pages) for _ in range(2))
        self._slots = rng.permutation(tokens)[: max(1, tokens // READ_SHARE)]
        self._device_slots = device.asarray(self._slots)
        shape = (self.layers, len(self._slots), heads, width)
        self._read = [device.empty(shape, np.uint16) for _ in range(2)]
        self._targets = [
            [kv.view_as(read[layer], "bf16") for read in self._read] for layer in range(self.layers)
        ]
        self.compute = LayerProducts(device, model)
        device.synchronize()

    def _paged(self, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """View (tokens, layers, heads, width) as (pages, layers, page_size, heads, width)."""
        return part.reshape(self.num_pages, self.page_size, *part.shape[1:]).swapaxes(1, 2)

    @property
    def num_bytes(self) -> int:
        return self.bits.nbytes

    def fit(self, layer_us: float) -> None:
        """Choose matrices so that a layer, with its reads, takes `layer_us`."""
        for layer in range(self.layers):
            self.read(layer)
        reads_us = min(wall_us(self.device, self._reads) for _ in range(3)) / self.layers
        self.compute.fit(self.main, max(layer_us - reads_us, layer_us / 4))

    def shuffle_pages(self) -> None:
        """Let the next run load other contents into each page."""
        self.host_pages = np.roll(self.host_pages, 1)

    def read(self, layer: int) -> None:
        k_out, v_out = self._targets[layer]
        kv.gather_kv(
            self.pool.k(layer), self.pool.v(layer), self._device_slots,
            k_out=k_out, v_out=v_out, stream=self.main,
        )  # fmt: skip

    def _reads(self) -> None:
        for layer in range(self.layers):
            self.read(layer)

    def layer(self, layer: int) -> None:
        """Enqueue one layer, which reads its pages and computes."""
        self.read(layer)
        run_named(self.device, "matmul", self.compute.product(self.compute.tokens), self.main)

    def compute_alone(self) -> None:
        for layer in range(self.layers):
            self.layer(layer)

    def check_reads(self, case: str) -> None:
        """Compare every byte that the layers read in the last run."""
        stored_at = np.empty(self.num_pages, np.int64)
        stored_at[self.pages] = self.host_pages
        page, offset = np.divmod(self._slots, self.page_size)
        tokens = stored_at[page] * self.page_size + offset
        for name, read, bits in zip("KV", self._read, self.bits, strict=True):
            got, want = self.device.to_numpy(read), bits[tokens].swapaxes(0, 1)
            if not np.array_equal(got, want):
                require_equal(f"{case}: {name} as (layer, slot, head, element)", got, want)

    def check_pages(self, case: str) -> None:
        """Compare every byte that the last run loaded."""
        for name, stored, bits in zip("KV", bits_of(self.pool), self.bits, strict=True):
            got, want = stored[self.pages], self._paged(bits)[self.host_pages]
            if not np.array_equal(got, want):
                require_equal(f"{case}: pages of {name}", got, want)


class EngineLoads:
    """A TransferEngine loads the pages; a layer waits for its own."""

    def __init__(self, model: OffloadedModel, method: str) -> None:
        self.model = model
        self.engine = kv.TransferEngine(
            model.pool, model.host_pool, load_stream=model.loader, method=method
        )

    def load(self) -> Any:
        model = self.model
        return self.engine.load(model.host_pages, model.pages, after=model.main)

    def alone(self) -> None:
        self.load().synchronize()

    def run(self) -> None:
        transfer = self.load()
        for layer in range(self.model.layers):
            transfer.wait_layer(layer, self.model.main)
            self.model.layer(layer)


class LoadsFirst(EngineLoads):
    """All pages are loaded, the host waits for them, and then the layers start."""

    def run(self) -> None:
        self.load().synchronize()
        self.model.compute_alone()


class PageCopies:
    """One copy per page, layer, and K or V, with an event per layer."""

    def __init__(self, model: OffloadedModel) -> None:
        self.model = model

    def _copy(self, layer: int) -> None:
        model = self.model
        pairs = list(zip(model.pages.tolist(), model.host_pages.tolist(), strict=True))
        for target, source in (
            (model.pool.k(layer), model.host_pool.k(layer)),
            (model.pool.v(layer), model.host_pool.v(layer)),
        ):
            for page, host_page in pairs:
                model.device.copy(target[page], source[host_page], stream=model.loader)

    def alone(self) -> None:
        for layer in range(self.model.layers):
            self._copy(layer)

    def run(self) -> None:
        model = self.model
        model.loader.wait(model.main)
        for layer in range(model.layers):
            self._copy(layer)
            model.main.wait(model.loader)
            model.layer(layer)


def ways(model: OffloadedModel, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    """Return the ways to run a model: without overlap, by single copies, and by the engine."""
    candidates: dict[str, Any] = {
        FIRST: LoadsFirst(model, "auto"),
        "a copy per page": PageCopies(model),
    }
    return candidates | {f"engine, {method}": EngineLoads(model, method) for method in methods}
