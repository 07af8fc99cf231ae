"""Show how much of the time to load cached pages from the host hides behind a model's layers.

A cached prefix of a prompt lies in host memory. Its pages are loaded layer by layer, while the
layers whose pages have arrived compute:

    load      |load 0|load 1|load 2|load 3| ...
    compute          |read 0, matmul |read 1, matmul |read 2, matmul | ...

Three ways, over page sizes and layouts of the host's pool: load all, then compute; one copy per
page and layer, with an event per layer; and the transfer engine with each of its methods.

hidden     (copy alone + compute alone - total) / copy alone, of medians, with each way's own
           copy. Negative where the two slow each other down. All wall time, calls included.
(min)      the same of the least times, which other programs disturb least
at most    what a perfect overlap would hide: the first layer's copy has nothing to hide behind, and
           neither has what exceeds the computation.

Proportions are those of a real model on a GPU. A hit of N tokens loads N * (bytes of K and V of a
layer) over the link (PCIe 5 x16: 55 GB/s), while M new tokens compute at 500 TFLOP/s in bf16:
2 FLOP per weight and token, and attention over all earlier tokens. The matrices here are chosen so
that a layer's computation and the engine's own load of it, by "auto", have that ratio. As many
tokens are loaded as take about 10 ms in one large copy.

    python scripts/offload_demo.py --out build/offload
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# One core computes while the other copies; must be set before NumPy loads its BLAS.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common.measure import (
    device_for_products,
    length_us,
    log_compilation,
    one_core_per_stream,
    random_bits,
)
from overlap.offload_model import (
    BEST,
    FEED_FORWARD,
    FIRST,
    OffloadedModel,
    Proportions,
    proportions,
    ways,
)

import kvcupy as kv
from kvcupy.bench.models import MODELS, Model
from kvcupy.bench.report import describe, format_table, write_json
from kvcupy.bench.timers import medians, minima, wall_us
from kvcupy.ops import transfer

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
COPY_US = 10_000  # of everything that a run loads, as one large copy
DRAWN_LAYERS = 6  # so that no two layers share a colour
DRAWN_OF = 5  # runs, of which the shortest is drawn: other programs disturbed it least
SECONDS = 0.4  # for each measurement of a case, after which it is not repeated


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


def pinned_gb_per_s(device: Any, num_bytes: int = 64 << 20) -> float:
    """Measure one large copy from pinned memory to the device."""
    target, source = device.zeros((num_bytes,), np.uint8), device.empty_pinned((num_bytes,), "int8")
    source[...] = 1
    copy = partial(device.copy, target.view(np.int8), source)
    return num_bytes / min(wall_us(device, copy) for _ in range(5)) / 1e3


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


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases and return the report."""
    device = device_for_products(arguments.device)
    where = describe(device)  # now: the tree may change while this runs
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
    pinned = pinned_gb_per_s(device)
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
        **where,
        "quick": arguments.quick,
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
    """Save a timeline of each way, and `timeline`: two of them, one after the other.

    Parameters
    ----------
    bits, page_size, layout : as for `OffloadedModel`; only the first layers are taken
    ratio : time to load a layer with "auto", over the time that it computes
    """
    few = np.ascontiguousarray(bits[:, :, :DRAWN_LAYERS])
    short = OffloadedModel(device, model, few, page_size, layout)
    candidates = ways(short)
    copy_us = min(wall_us(device, candidates[BEST].alone) for _ in range(5))
    short.fit(copy_us / short.layers / ratio)
    title = f"{model.name}, {short.layers} layers, pages of {page_size}, {layout}"
    drawn = {name: [way.run] for name, way in candidates.items()}
    drawn["timeline"] = [candidates[FIRST].run, candidates[BEST].run]
    out.mkdir(parents=True, exist_ok=True)
    for name, works in drawn.items():
        recorded = min((record(short, works) for _ in range(DRAWN_OF)), key=length_us)
        stem = name.replace(",", "").replace(" ", "_")
        order = f"{FIRST}; then the engine" if name == "timeline" else name
        recorded.save(out / f"{stem}.json")
        recorded.plot(out / f"{stem}.png", title=f"{title}: {order}")


def record(model: OffloadedModel, works: Sequence[Callable[[], None]]) -> Any:
    """Run the works one after another and return their timeline."""
    with kv.timeline() as recorded:
        for work in works:
            model.shuffle_pages()
            work()
            model.device.synchronize()
    model.check_reads("drawn")
    return recorded


def header(report: dict[str, Any]) -> str:
    """Say what was measured, where, and where the proportions come from."""
    real = Proportions(report["real_copy_us"], report["real_compute_us"])
    return (
        f"{report['device']} ({report['gpu_and_driver'] or report['processor']}), "
        f"{report['date']}, commit {(report['commit'] or 'unknown')[:12]}\n"
        f"{report['model']}: a hit of {report['tokens']} tokens at {report['link_gb_per_s']:g} GB/s"
        f" is {real.copy_us:.0f} us per layer, {report['new_tokens']} new ones at "
        f"{report['tflops']:g} TFLOP/s are {real.compute_us:.0f}: copy / compute "
        f"{real.ratio:.2f}\n"
        f"here {report['tokens_loaded']} tokens of {report['layers']} layers "
        f"({report['bytes_loaded'] / 1e6:.0f} MB), large copies at "
        f"{report['pinned_gb_per_s']:.1f} GB/s, a layer computes about {report['compute']}\n"
        "every byte that a layer read in any run, and all pages once, checked against NumPy"
    )


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
    return "\n\n".join([format_table(columns, rows), said, *caveats(report)])


def caveats(report: dict[str, Any]) -> list[str]:
    """Say why shares may be out of bounds: they are differences of noisy times."""
    shares = [row["hidden"] for row in report["rows"]]
    notes = []
    if report["quick"]:
        notes.append(
            "--quick: runs this few and short show that it works, not how much it hides; "
            "run it without --quick for that."
        )
    if min(shares) < 0 or max(shares) > 1:
        notes.append(
            "Shares below 0 % or above 100 % are noise: a share is a difference of three times, "
            "and other programs disturbed them."
        )
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--model", choices=FEED_FORWARD, default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=8192, help="of the cached prefix")
    parser.add_argument("--new-tokens", type=int, default=1024, help="tokens to compute")
    parser.add_argument("--link-gb-per-s", type=float, default=55.0, help="of the real GPU")
    parser.add_argument("--tflops", type=float, default=500.0, help="of the real GPU, bf16")
    parser.add_argument("--page-sizes", type=int, nargs="+", help="default: 1 16 64")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="of the host; default: all")
    parser.add_argument("--rounds", type=int, help="measurements of a case at most")
    parser.add_argument("--quick", action="store_true", help="few layers, tokens and rounds")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--out", type=Path, help="write timelines (JSON and PNG) to this folder")
    arguments = parser.parse_args(argv)
    report = run(arguments)
    print(f"{header(report)}\n\n{render(report)}")
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.out:
        print(f"\ntimelines: {arguments.out}")
    return 0


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
