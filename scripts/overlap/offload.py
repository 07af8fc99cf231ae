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

Proportions are taken from a real model on a GPU. A hit of N tokens loads N * (bytes of K and V of a
layer) over the link (PCIe 5 x16: 55 GB/s), while M new tokens compute at 500 TFLOP/s in bf16:
2 FLOP per weight and token, and attention over all earlier tokens. The matrices here are chosen so
that a layer's computation and the engine's load of it have that ratio. As many
tokens are loaded as take about 10 ms in one large copy.

    python scripts/overlap_demo.py offload --out build/offload
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.pools import bits_of, fill
from common.checks import require_equal
from common.measure import (
    QUICK_NOTE,
    length_us,
    one_core_per_stream,
    random_bits,
    require_products,
)
from common.models import MODELS, Model
from common.report import format_table
from common.timers import (
    TO_DEVICE,
    link_gb_per_s,
    medians,
    minima,
    named_stream,
    wall_us,
)

import kvcupy as kv
from kvcupy.ops import transfer

from .products import Products

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
COPY_US = 10_000  # of everything that a run loads, as one large copy
DRAWN_LAYERS = 6  # so that no two layers share a colour
DRAWN_OF = 5  # runs, of which the shortest is drawn: other programs disturbed it least
SECONDS = 0.4  # for each measurement of a case, after which it is not repeated
# Columns of the feed-forward part on one GPU, for models whose layers are uniform and dense.
FEED_FORWARD = {"llama-3.1-8b": 14336, "llama-3.1-70b-tp8": 28672 // 8, "qwen3-8b": 12288}
FIRST, BEST = "load all, then compute", "engine"
READ_SHARE = 8  # one slot in so many is read and compared


@dataclass(frozen=True)
class Proportions:
    """The cost of a cached prefix in host memory per layer, by published peaks.

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

    >>> from common.models import MODELS
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


def measure_in_rotation(
    candidates: dict[str, Callable[[], float]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Measure all candidates round by round; the first round warms up.

    Each times itself, in us. One that has taken `seconds` is left out of later rounds; if it was
    measured only once, that measurement counts.
    """
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if sum(samples[name]) < seconds * 1e6:
                samples[name].append(candidates[name]())
    return {name: values[1:] or values for name, values in samples.items()}


def measure(model: OffloadedModel, ratio: float, rounds: int) -> list[dict[str, Any]]:
    """Fit the computation, check every way once in full, and measure them all."""
    device = model.device
    candidates = ways(model)
    copy_us = min(wall_us(device, candidates[BEST].alone) for _ in range(5))
    model.fit(copy_us / model.layers / ratio)

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
    samples = measure_in_rotation(timers, rounds, SECONDS)
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
    real = proportions(
        model, arguments.tokens, arguments.new_tokens,
        link_gb_per_s=arguments.link_gb_per_s, tflops=arguments.tflops,
    )  # fmt: skip
    layers = 4 if arguments.quick else model.layers
    sizes, layouts = arguments.page_sizes, arguments.layouts
    if arguments.quick:
        sizes, layouts = sizes or [1, 16], layouts or list(LAYOUTS[:2])
    sizes, layouts = sizes or [1, 16, 64], layouts or list(LAYOUTS)
    pinned = link_gb_per_s(device, named_stream(device, "load"), 64 << 20, 5)[TO_DEVICE]
    token_bytes = layers * sum(model.row_widths) * 2
    fitting = COPY_US / (100 if arguments.quick else 1) * pinned * 1e3 / token_bytes
    step = int(np.lcm.reduce(sizes))
    tokens = max(min(arguments.tokens, int(fitting)) // step, 1) * step
    rounds = arguments.rounds or (2 if arguments.quick else 9)
    shape = (2, tokens, layers, model.kv_heads, model.head_dim)
    bits = random_bits(np.random.default_rng(0), shape)

    rows: list[dict[str, Any]] = []
    compute = ""
    with one_core_per_stream(device):
        for page_size in sizes:
            for layout in layouts:
                print(f"pages of {page_size}, {layout} ...", file=sys.stderr, flush=True)
                case = OffloadedModel(device, model, bits, page_size, layout)
                rows += measure(case, real.ratio, rounds)
                compute = str(case.compute)
                del case
        if arguments.out:
            drawn = 16 if 16 in sizes else sizes[-1], "page_first"
            draw(device, model, bits, *drawn, real.ratio, arguments.out)
    return {
        "calibrated": bool(transfer.read_calibration(device.model)),
        "model": model.name,
        "layers": layers,
        "tokens": arguments.tokens,
        "new_tokens": arguments.new_tokens,
        "link_gb_per_s": arguments.link_gb_per_s,
        "tflops": arguments.tflops,
        "real_copy_us": real.copy_us,
        "real_compute_us": real.compute_us,
        "ratio": real.ratio,
        "tokens_loaded": tokens,
        "bytes_loaded": bits.nbytes,
        "pinned_gb_per_s": pinned,
        "compute": compute,
        "rows": rows,
    }


def draw(
    device: Any, model: Model, bits: np.ndarray[Any, Any], page_size: int, layout: str,
    ratio: float, out: Path,
) -> None:  # fmt: skip
    """Save a timeline of loading all first, and then of the engine.

    Parameters
    ----------
    bits, page_size, layout : as for `OffloadedModel`; only the first layers are taken
    ratio : time to load a layer, over the time that it computes
    """
    few = np.ascontiguousarray(bits[:, :, :DRAWN_LAYERS])
    short = OffloadedModel(device, model, few, page_size, layout)
    candidates = ways(short)
    copy_us = min(wall_us(device, candidates[BEST].alone) for _ in range(5))
    short.fit(copy_us / short.layers / ratio)
    works = [candidates[name].run for name in (FIRST, BEST)]
    recorded = min((record(short, works) for _ in range(DRAWN_OF)), key=length_us)
    title = f"{model.name}, {short.layers} layers, pages of {page_size}, {layout}: {FIRST}; then"
    out.mkdir(parents=True, exist_ok=True)
    recorded.save(out / "timeline.json")
    recorded.plot(out / "timeline.png", title=f"{title} the engine")


def record(model: OffloadedModel, works: Sequence[Callable[[], None]]) -> Any:
    """Run the works one after another and return their timeline."""
    with kv.timeline() as recorded:
        for work in works:
            model.shuffle_pages()
            work()
            model.device.synchronize()
    model.check_reads("drawn")
    return recorded


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
    said += f", median {np.median(best):.0%}"
    real = Proportions(report["real_copy_us"], report["real_compute_us"])
    about = (
        f"{report['model']}: a hit of {report['tokens']} tokens at {report['link_gb_per_s']:g} GB/s"
        f" is {real.copy_us:.0f} us per layer, {report['new_tokens']} new ones at "
        f"{report['tflops']:g} TFLOP/s are {real.compute_us:.0f}: copy / compute {real.ratio:.2f}\n"
        f"here {report['tokens_loaded']} tokens of {report['layers']} layers "
        f"({report['bytes_loaded'] / 1e6:.0f} MB), large copies at "
        f"{report['pinned_gb_per_s']:.1f} GB/s, a layer computes about {report['compute']}\n"
        "every byte that a layer read in any run, and all pages once, checked against NumPy"
    )
    return "\n\n".join([about, format_table(columns, rows), said, *caveats(report)])


def caveats(report: dict[str, Any]) -> list[str]:
    """Say why shares may be out of bounds: they are differences of noisy times."""
    shares = [row["hidden"] for row in report["rows"]]
    notes = []
    if report["quick"]:
        notes.append(QUICK_NOTE)
    if min(shares) < 0 or max(shares) > 1:
        notes.append(
            "Shares below 0 % or above 100 % are noise: a share is a difference of three times, "
            "and other programs disturbed them."
        )
    return notes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=FEED_FORWARD, default="llama-3.1-8b")
    add("--tokens", type=int, default=8192, help="of the cached prefix")
    add("--new-tokens", type=int, default=1024, help="tokens to compute")
    add("--link-gb-per-s", type=float, default=55.0, help="of the real GPU")
    add("--tflops", type=float, default=500.0, help="of the real GPU, bf16")
    add("--page-sizes", type=int, nargs="+", help="default: 1 16 64")
    add("--layouts", nargs="+", choices=LAYOUTS, help="of the host; default: all")
    add("--rounds", type=int, help="measurements of a case at most")
    add("--out", type=Path, help="write timelines (JSON and PNG) to this folder")
