"""Load cached pages layer by layer, while the layers whose pages have arrived compute.

A cached prefix of a prompt is in host memory:

    load      |load 0|load 1|load 2|load 3| ...
    compute          |read 0, matmul |read 1, matmul |read 2, matmul | ...

Three ways, over page sizes and layouts of the host's pool: load all, then compute; one copy per
page and layer, with an event per layer; and the transfer engine.

hidden     (copy alone + compute alone - total) / copy alone, of medians, with each way's own
           copy. Negative where the two slow each other down. All wall time, calls included.
(min)      the same of the least times, which other programs disturb least
at most    what a perfect overlap would hide: not the first layer's copy, nor what exceeds the
           computation.

The matrices are chosen so that a layer's computation and the engine's load of it have the ratio of
a prefix hit on a real GPU (`RATIO`). As many tokens are loaded as take about 10 ms in one large
copy.

    python scripts/overlap_demo.py offload --out build/offload
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.pools import bits_of, fill
from common.checks import require_equal
from common.measure import (
    QUICK_NOTE,
    one_core_per_stream,
    random_bits,
    require_products,
    save_timeline,
)
from common.models import MODELS, Model
from common.report import format_table
from common.timers import (
    TO_DEVICE,
    interleave,
    link_gb_per_s,
    medians,
    minima,
    named_stream,
    wall_us,
)

import kvcupy as kv

from .products import Products

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
COPY_US = 10_000  # of everything that a run loads, as one large copy
DRAWN_LAYERS = 6  # so that no two layers share a colour
SECONDS = 3.0  # for all measurements of a case, after which three rounds suffice
MAX_TOKENS = 8192
# Copy over computation of a layer of Llama 3.1 8B, of 8,192 cached tokens over PCIe 5 x16 (55 GB/s)
# and 1,024 new ones at 500 TFLOP/s in bf16: K and V of the cached tokens; 2 FLOP per weight and new
# token, and attention over all earlier tokens.
RATIO = 0.51
FIRST, BEST = "load all, then compute", "engine"
READ_SHARE = 8  # one slot in so many is read and compared


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
        self.compute = Products(device, model)
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
        self.compute.enqueue(self.main)

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

    def __init__(self, model: OffloadedModel) -> None:
        self.model = model
        self.engine = kv.TransferEngine(model.pool, model.host_pool, load_stream=model.loader)

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


def ways(model: OffloadedModel) -> dict[str, Any]:
    """Return the ways to run a model: without overlap, by single copies, and by the engine."""
    return {
        FIRST: LoadsFirst(model), "a copy per page": PageCopies(model), BEST: EngineLoads(model),
    }  # fmt: skip


# --- The demo -------------------------------------------------------------------------------------


def measure(model: OffloadedModel, rounds: int) -> list[dict[str, Any]]:
    """Fit the computation, check every way once in full, and measure them all."""
    device = model.device
    candidates = ways(model)
    copy_us = min(wall_us(device, candidates[BEST].alone) for _ in range(5))
    model.fit(copy_us / model.layers / RATIO)

    def timed(work: Callable[[], None], check: Callable[[], None]) -> float:
        model.shuffle_pages()
        us = wall_us(device, work)
        check()
        return us

    def nothing() -> None: ...

    checked: set[str] = set()

    def check(name: str) -> None:
        model.check_reads(name)
        if name not in checked:
            model.check_pages(name)
            checked.add(name)

    timers = {"compute": partial(timed, model.compute_alone, nothing)}
    for name, way in candidates.items():
        timers[f"{name}: copy"] = partial(timed, way.alone, nothing)
        timers[f"{name}: total"] = partial(timed, way.run, partial(check, name))
    samples = interleave(timers, rounds, seconds=SECONDS)
    us, least = medians(samples), minima(samples)
    return [
        {
            "page_size": model.page_size,
            "layout": model.host_pool.layout,
            "way": name,
            "total_ms": us[f"{name}: total"] / 1e3,
            "copy_ms": us[f"{name}: copy"] / 1e3,
            "compute_ms": us["compute"] / 1e3,
            "hidden": hidden(us, name),
            "hidden_at_most": (1 - 1 / model.layers)
            * min(1.0, us["compute"] / us[f"{name}: copy"]),
            "gb_per_s": model.num_bytes / us[f"{name}: copy"] / 1e3,
            "least_total_ms": least[f"{name}: total"] / 1e3,
            "least_copy_ms": least[f"{name}: copy"] / 1e3,
            "least_compute_ms": least["compute"] / 1e3,
            "least_hidden": hidden(least, name),
            "runs": len(samples[f"{name}: total"]),
        }
        for name in candidates
    ]


def hidden(us: dict[str, float], name: str) -> float:
    """Return the share of the copy's time that does not add to the total."""
    copy_us = us[f"{name}: copy"]
    return (copy_us + us["compute"] - us[f"{name}: total"]) / copy_us


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    require_products(device)
    model = MODELS[arguments.model]
    quick = arguments.quick
    sizes = arguments.page_sizes or ([1, 16] if quick else [1, 16, 64])
    layouts = arguments.layouts or (LAYOUTS[:2] if quick else LAYOUTS)
    rounds, layers = arguments.rounds or (2 if quick else 9), 4 if quick else model.layers
    pinned = link_gb_per_s(device, named_stream(device, "load"), 64 << 20, 5)[TO_DEVICE]
    token_bytes = layers * sum(model.row_widths) * 2
    fitting = COPY_US / (100 if quick else 1) * pinned * 1e3 / token_bytes
    step = int(np.lcm.reduce(sizes))
    tokens = max(min(MAX_TOKENS, int(fitting)) // step, 1) * step
    shape = (2, tokens, layers, model.kv_heads, model.head_dim)
    bits = random_bits(np.random.default_rng(0), shape)
    rows: list[dict[str, Any]] = []
    compute = ""
    with one_core_per_stream(device):
        for page_size in sizes:
            for layout in layouts:
                print(f"pages of {page_size}, {layout} ...", file=sys.stderr, flush=True)
                case = OffloadedModel(device, model, bits, page_size, layout)
                rows += measure(case, rounds)
                compute = str(case.compute)
                del case
        if arguments.out is not None:
            draw(device, model, bits, 16 if 16 in sizes else sizes[-1], "page_first", arguments.out)
    return {
        "model": model.name, "layers": layers, "ratio": RATIO, "tokens_loaded": tokens,
        "bytes_loaded": bits.nbytes, "pinned_gb_per_s": pinned, "compute": compute,
        "rows": rows,
    }  # fmt: skip


def draw(
    device: Any, model: Model, bits: np.ndarray[Any, Any], page_size: int, layout: str, out: Path
) -> None:
    """Save a timeline of loading some layers before they compute, and then of the engine."""
    few = np.ascontiguousarray(bits[:, :, :DRAWN_LAYERS])
    short = OffloadedModel(device, model, few, page_size, layout)
    candidates = ways(short)
    copy_us = min(wall_us(device, candidates[BEST].alone) for _ in range(5))
    short.fit(copy_us / short.layers / RATIO)
    works = [candidates[name].run for name in (FIRST, BEST)]
    title = f"{model.name}, {short.layers} layers, pages of {page_size}, {layout}: {FIRST}; then"
    save_timeline(device, works, out, "timeline", f"{title} the engine")
    short.check_reads("drawn")


def render(report: dict[str, Any]) -> str:
    """Return the table, and what the engine hides when it chooses for itself."""
    columns = ("page, host layout", "way", "total ms", "copy ms", "compute ms", "GB/s")
    columns += ("hidden", "(min)", "at most")
    rows = []
    for row in report["rows"]:
        case = f"{row['page_size']}, {row['layout']}"
        times = (row["total_ms"], row["copy_ms"], row["compute_ms"], row["gb_per_s"])
        shares = (row["hidden"], row["least_hidden"], row["hidden_at_most"])
        rows.append((case, row["way"], *times, *(f"{share:.0%}" for share in shares)))
    best = [row["hidden"] for row in report["rows"] if row["way"] == BEST]
    said = f"{BEST}: {min(best):.0%} to {max(best):.0%} of the copy hidden in {len(best)} cases"
    about = (
        f"{report['tokens_loaded']} tokens of {report['layers']} layers of {report['model']} "
        f"({report['bytes_loaded'] / 1e6:.0f} MB), large copies at "
        f"{report['pinned_gb_per_s']:.1f} GB/s, a layer computes about {report['compute']}\n"
        "every byte that a layer read in any run, and all pages once, checked against NumPy"
    )
    notes = [f"{said}, median {np.median(best):.0%}"] + [QUICK_NOTE] * report["quick"]
    return "\n\n".join([about, format_table(columns, rows), *notes])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models = [name for name, model in MODELS.items() if not model.mla]
    add("--model", choices=models, default="llama-3.1-8b")
    add("--page-sizes", type=int, nargs="+", help="default: 1 16 64")
    add("--layouts", nargs="+", choices=LAYOUTS, help="of the host; default: all")
    add("--rounds", type=int, help="measurements of a case at most")
    add("--out", type=Path, help="write a timeline (JSON and PNG) to this folder")
