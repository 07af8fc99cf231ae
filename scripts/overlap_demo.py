"""Show what overlaps on this device, and what one launch saves, with every result checked.

Three questions, three tables:

write K and V     two array expressions on one stream; one each on two streams that wait for one
                  another by events; one launch that writes both; that launch replayed in a graph.
rotate and write  query and key rotated by position, then K and V written: apart, with K and V on
                  two streams, and in one launch; called from Python, and replayed.
prefetch the      K, V and slots of step i+1 are copied from pinned memory while step i computes and
next step's K/V   stores, against the same work in sequence:

    copy     |copy 0 |copy 1 |        |copy 2 |          copy i waits until buffer i % 2 was read
    main             |compute 0 |store 0|compute 1 |store 1|      step i waits for copy i

    python scripts/overlap_demo.py --out build/overlap
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
    captured,
    device_for_products,
    log_compilation,
    one_core_per_stream,
    random_bits,
    save_timeline,
)
from common.workload import Step, busy_steps, read_trace, synthetic_trace
from overlap.kv_layers import LAYERS, KVLayers
from overlap.rope_writes import ARRAYS, RopeWrites
from overlap.step_pipeline import Steps, hidden_fraction

import kvcupy as kv
from kvcupy.bench.models import MODELS, Model
from kvcupy.bench.report import describe, format_table, write_json
from kvcupy.bench.timers import interleave, medians, minima, named_stream, wall_us

SECONDS = 5.0  # for each part, after which three rounds do
PASS_US = 5_000  # of one measurement, about: short ones find a processor undisturbed


def run_writes(device: Any, model: Model, tokens: int, rounds: int, out: Path | None) -> list[dict]:
    """Measure the ways to write K and V of `tokens` tokens, in us per layer."""
    rng = np.random.default_rng(0)
    layers = KVLayers(device, model, 2 * tokens)
    host_rows = random_bits(rng, (tokens, LAYERS, layers.row_width))
    host_slots = rng.permutation(2 * tokens)[:tokens].astype(np.int64)
    rows, slots = device.asarray(host_rows), device.asarray(host_slots)
    device.synchronize()  # what was uploaded is there before another stream reads it
    main, alt = named_stream(device, "main"), named_stream(device, "alt")
    assignments = [layers.assignments(rows, slots, i) for i in range(LAYERS)]
    launches = [layers.launch(rows, slots, i) for i in range(LAYERS)]

    def one_stream() -> None:
        for first, second in assignments:
            first(main)
            second(main)

    def two_streams() -> None:
        for first, second in assignments:
            kv.fork(main, alt)
            first(main)
            second(alt)
            kv.join(main, alt)

    def fused() -> None:
        for launch in launches:
            launch(stream=main)

    cases = {
        "array expressions, one stream": one_stream,
        "array expressions, two streams": two_streams,
        "one launch": fused,
    }
    fused()  # compiled before anything is captured
    cases["one launch, graph replay"] = captured(main, fused)
    for name, work in cases.items():
        layers.wipe()
        work()
        device.synchronize()
        layers.check(name, [(host_rows, host_slots)])
    save_timeline(
        device, [one_stream, two_streams, fused], out, "write",
        f"{model.name}, {tokens} tokens, {LAYERS} layers: K and V",
    )  # fmt: skip
    moved = tokens * (2 * layers.row_width * 2 + 8)
    return compare(device, cases, rounds, moved)


def run_rope(device: Any, model: Model, tokens: int, rounds: int, out: Path | None) -> list[dict]:
    """Measure the ways to rotate query and key and to write K and V, in us per layer."""
    work = RopeWrites(device, model, tokens)
    forms = work.forms()
    for form in forms.values():  # compile before anything is captured
        form()
    device.synchronize()
    cases = dict(forms)
    for name, form in forms.items():
        if name != ARRAYS:  # whose library may allocate, which no capture allows
            cases[f"{name}, graph replay"] = captured(work.main, form)
    work.check(cases)
    save_timeline(
        device, list(forms.values()), out, "rope",
        f"{model.name}, {tokens} tokens, {LAYERS} layers: rotate, then K and V",
    )  # fmt: skip
    return compare(device, cases, rounds, work.bytes_moved)


def compare(
    device: Any, cases: dict[str, Callable[[], None]], rounds: int, bytes_moved: int
) -> list[dict]:
    """Measure cases of `LAYERS` layers each; return a row for each, in us per layer."""
    first = next(iter(cases))
    repeat = max(1, int(PASS_US / max(wall_us(device, cases[first]), 1.0)))
    timers = {name: partial(wall_us, device, work, repeat) for name, work in cases.items()}
    samples = interleave(timers, rounds, seconds=SECONDS)
    times, least = medians(samples), minima(samples)
    return [
        {
            "case": name,
            "time_us": us / LAYERS,
            "least_us": least[name] / LAYERS,
            "gb_per_s": bytes_moved * LAYERS / us / 1e3,
            "ratio": least[first] / least[name],
            "hidden": None,
        }
        for name, us in times.items()
    ]


def run_steps(
    device: Any, model: Model, batch: Sequence[Step], rounds: int, out: Path | None
) -> tuple[list[dict], str]:
    """Measure steps whose K/V are copied on a copy stream, in us per step."""
    steps = Steps(device, model, batch)
    largest = int(np.argmax(steps.counts))
    copy = partial(steps.copy, largest, steps.copier)
    copy_us = min(wall_us(device, copy) for _ in range(20))
    steps.compute.fit(steps.main, 1.3 * copy_us)

    for name, work in (("in sequence", steps.in_sequence), ("copy stream", steps.overlapped)):
        for array in steps.rows:  # stale buffers must not pass for fresh ones
            device.copy(array, device.zeros(array.shape, array.dtype))
        steps.layers.wipe()
        work()
        device.synchronize()
        steps.check(name)

    alone, sequence, overlap = "copy alone", "in sequence, one stream", "copy stream, two buffers"
    cases = {
        alone: steps.copy_alone,
        "compute and store alone": steps.work_alone,
        sequence: steps.in_sequence,
        overlap: steps.overlapped,
    }
    timers = {name: partial(steps.step_times_us, work) for name, work in cases.items()}
    samples = interleave(timers, rounds, seconds=SECONDS)
    times = {name: float(np.median(np.sum(us, axis=1))) for name, us in samples.items()}
    # Many rounds, and each step's least time of all, so that other programs disturb little.
    least = {name: float(np.sum(np.min(rounds_us, axis=0))) for name, rounds_us in samples.items()}
    hidden = hidden_fraction(least[sequence], least[overlap], least[alone])
    most = 1 - steps.counts[0] / sum(steps.counts)  # nothing can hide the first copy
    title = f"{model.name}, {len(batch)} steps:"
    save_timeline(device, [steps.in_sequence], out, "sequence", f"{title} in sequence")
    save_timeline(
        device, [steps.overlapped], out, "overlap",
        f"{title} {hidden:.0%} of the copy time hidden, {most:.0%} possible",
    )  # fmt: skip
    moved = sum(steps.counts) * (LAYERS * steps.layers.row_width * 2 + 8)
    rows = [
        {
            "case": name,
            "time_us": us / len(batch),
            "least_us": least[name] / len(batch),
            "gb_per_s": moved / us / 1e3,
            "ratio": least[sequence] / least[name] if name in (sequence, overlap) else None,
            "hidden": hidden if name == overlap else None,
            "hidden_at_most": most if name == overlap else None,
        }
        for name, us in times.items()
    ]
    return rows, str(steps.compute)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all parts and return the report."""
    device = device_for_products(arguments.device)
    where = describe(device)  # now: the tree may change while this runs
    model = MODELS[arguments.model]
    requests = read_trace(arguments.trace) if arguments.trace else synthetic_trace()
    batch = busy_steps(requests, arguments.tokens, arguments.steps)
    common = (arguments.rounds, arguments.out)
    writes = run_writes(device, model, arguments.tokens, *common)
    rope = run_rope(device, model, arguments.tokens, *common)
    with one_core_per_stream(device):
        steps, compute = run_steps(device, model, batch, *common)
    return {
        **where,
        "model": model.name,
        "tokens": arguments.tokens,
        "layers": LAYERS,
        "trace": Path(arguments.trace).name if arguments.trace else "synthetic",
        "steps": [{"decode": step.decode, "prefill": step.prefill} for step in batch],
        "compute": compute,
        "writes": writes,
        "rope": rope,
        "overlap": steps,
    }


def render(report: dict[str, Any]) -> str:
    """Return the report as tables, each under a line that says what it compares."""
    columns = ("case", "us (median)", "us (min)", "GB/s", "times as fast (min)", "copy hidden")
    most = report["overlap"][-1]["hidden_at_most"]
    lines = []
    for part, title in (
        ("writes", f"Write K and V of {report['tokens']} tokens, per layer"),
        ("rope", f"Rotate query and key of {report['tokens']} tokens and write K and V, per layer"),
        (
            "overlap",
            f"Copy in the next step's K/V while this one computes, per step of "
            f"{len(report['steps'])}"
            f"\n(hidden: (in sequence - copy stream) / copy alone, least time of each step;"
            f" at most {most:.0%}, because nothing hides the first copy)",
        ),
    ):
        rows = []
        for row in report[part]:
            hidden = None if row["hidden"] is None else f"{row['hidden']:.0%} of {most:.0%}"
            measured = (row["time_us"], row["least_us"], row["gb_per_s"])
            rows.append((row["case"], *measured, row["ratio"], hidden))
        width = len(columns) if part == "overlap" else len(columns) - 1
        lines += [title, "", format_table(columns[:width], [row[:width] for row in rows]), ""]
    return "\n".join(lines[:-1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per step at most")
    parser.add_argument("--steps", type=int, default=8, help="steps of continuous batching")
    parser.add_argument("--rounds", type=int, default=150, help="measurements of a case at most")
    parser.add_argument("--trace", type=Path, help="request trace, JSON lines")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--out", type=Path, help="write timelines (JSON and PNG) to this folder")
    arguments = parser.parse_args(argv)
    report = run(arguments)
    print(f"{report['device']} ({report['gpu_and_driver'] or report['processor']}), ", end="")
    print(f"{report['model']}, {report['tokens']} tokens per step, {LAYERS} layers")
    print(f"compute of a full step: {report['compute']}; every case checked against NumPy\n")
    print(render(report))
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.out:
        print()
        for name in ("write", "rope", "sequence", "overlap"):
            print(arguments.out / f"{name}.json", arguments.out / f"{name}.png")
    return 0


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
