"""Show what overlaps on this device, and what one launch saves, with every result checked.

Two questions, two parts of the table:

write K and V     two array expressions on one stream; one each on two streams that wait for one
                  another by events; one launch that writes both; that launch replayed in a graph.
bring the next    K, V and slots of step i+1 come from pinned memory while step i computes and
step's K/V        stores, against the same work in sequence:

    copy     |copy 0 |copy 1 |        |copy 2 |          copy i waits until buffer i % 2 was read
    main             |compute 0 |store 0|compute 1 |store 1|      step i waits for copy i

    python scripts/overlap_demo.py --out build/overlap
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

# One core computes while the other copies; must be set before NumPy loads its BLAS.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from benchlib import (
    describe,
    format_table,
    interleave,
    medians,
    minima,
    named_stream,
    random_bits,
    wall_us,
    write_json,
)
from kv_layers import LAYERS, KVLayers
from step_pipeline import Steps, hidden_fraction
from workload import MODELS, Model, Step, busy_steps, read_trace, synthetic_trace

import kvcupy as kv


def run_writes(device: Any, model: Model, tokens: int, rounds: int, out: Path | None) -> list[dict]:
    """Measure the ways to write K and V of `tokens` tokens, in us a layer."""
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
    for launch in launches:  # compile before anything is captured
        launch(stream=main)
    main.synchronize()
    with main.capture() as graph:
        fused()
    cases["one launch, graph replay"] = partial(graph.launch, main)

    for name, work in cases.items():
        layers.wipe()
        work()
        device.synchronize()
        layers.check(name, [(host_rows, host_slots)])

    repeat = max(1, int(40_000 / max(wall_us(device, one_stream), 1.0)))
    timers = {name: partial(wall_us, device, work, repeat) for name, work in cases.items()}
    samples = interleave(timers, rounds)
    times, least = medians(samples), minima(samples)
    if out is not None:
        with kv.timeline() as timeline:
            for work in (one_stream, two_streams, fused):
                work()
                device.synchronize()
        save_timeline(
            timeline, out / "write", f"{model.name}, {tokens} tokens, {LAYERS} layers: K and V"
        )
    moved = 2 * tokens * layers.row_width * 2 + slots.nbytes
    return [
        {
            "case": name,
            "time_us": us / LAYERS,
            "least_us": least[name] / LAYERS,
            "gb_per_s": moved * LAYERS / us / 1e3,
            "ratio": times["array expressions, one stream"] / us,
            "hidden": None,
        }
        for name, us in times.items()
    ]


def run_steps(
    device: Any, model: Model, batch: Sequence[Step], rounds: int, out: Path | None
) -> tuple[list[dict], str]:
    """Measure steps whose K/V arrive on a copy stream, in us a step."""
    steps = Steps(device, model, batch)
    largest = int(np.argmax(steps.counts))
    copy = partial(steps.copy, largest, steps.copier)
    copy_us = min(wall_us(device, copy) for _ in range(5))
    steps.compute.fit(steps.main, 1.3 * copy_us)

    for name, work in (("in sequence", steps.in_sequence), ("copy stream", steps.overlapped)):
        for array in steps.rows:  # stale staging must not pass for fresh
            device.copy(array, device.zeros(array.shape, array.dtype))
        steps.layers.wipe()
        work()
        device.synchronize()
        steps.check(name)

    sequence, overlap = "in sequence, one stream", "copy stream, two buffers"
    cases = {
        "copy alone": steps.copy_alone,
        "compute and store alone": steps.work_alone,
        sequence: steps.in_sequence,
        overlap: steps.overlapped,
    }
    timers = {name: partial(wall_us, device, work) for name, work in cases.items()}
    samples = interleave(timers, rounds)
    times, least = medians(samples), minima(samples)
    hidden = hidden_fraction(least[sequence], least[overlap], least["copy alone"])
    most = 1 - steps.counts[0] / sum(steps.counts)  # nothing runs yet that could hide the first
    if out is not None:
        for name, work in (("sequence", steps.in_sequence), ("overlap", steps.overlapped)):
            with kv.timeline() as timeline:
                work()
            what = (
                f"{hidden:.0%} of the copy time hidden, {most:.0%} possible"
                if name == "overlap"
                else "in sequence"
            )
            save_timeline(timeline, out / name, f"{model.name}, {len(batch)} steps: {what}")
    moved = sum(steps.counts) * LAYERS * steps.layers.row_width * 2 + sum(steps.counts) * 8
    rows = [
        {
            "case": name,
            "time_us": us / len(batch),
            "least_us": least[name] / len(batch),
            "gb_per_s": moved / us / 1e3,
            "ratio": times[sequence] / us if name in (sequence, overlap) else None,
            "hidden": hidden if name == overlap else None,
            "hidden_at_most": most if name == overlap else None,
        }
        for name, us in times.items()
    ]
    return rows, str(steps.compute)


def save_timeline(timeline: Any, stem: Path, title: str) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    timeline.save(stem.with_suffix(".json"))
    timeline.plot(stem.with_suffix(".png"), title=title)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both parts and return the report."""
    device = kv.device(arguments.device) if arguments.device else kv.default_device()
    model = MODELS[arguments.model]
    requests = read_trace(arguments.trace) if arguments.trace else synthetic_trace()
    batch = busy_steps(requests, arguments.tokens, arguments.steps)
    writes = run_writes(device, model, arguments.tokens, arguments.rounds, arguments.out)
    steps, compute = run_steps(device, model, batch, arguments.rounds, arguments.out)
    return {
        **describe(device),
        "model": model.name,
        "tokens": arguments.tokens,
        "layers": LAYERS,
        "trace": Path(arguments.trace).name if arguments.trace else "synthetic",
        "steps": [{"decode": step.decode, "prefill": step.prefill} for step in batch],
        "compute": compute,
        "writes": writes,
        "overlap": steps,
    }


def render(report: dict[str, Any]) -> str:
    """Return the report as one table."""
    columns = ("case", "us (median)", "us (min)", "GB/s", "ratio", "copy hidden, of possible")
    rows: list[Sequence[object]] = []
    for title, part in (("write, a layer", "writes"), ("next step's K/V, a step", "overlap")):
        for row in report[part]:
            hidden = None
            if row["hidden"] is not None:
                hidden = f"{row['hidden']:.0%} of {row['hidden_at_most']:.0%}"
            name = f"{title}: {row['case']}"
            rows.append(
                (name, row["time_us"], row["least_us"], row["gb_per_s"], row["ratio"], hidden)
            )
    return format_table(columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a step at most")
    parser.add_argument("--steps", type=int, default=8, help="steps of continuous batching")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each case")
    parser.add_argument("--trace", type=Path, help="request trace, JSON lines")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--out", type=Path, help="write timelines (JSON and PNG) to this folder")
    arguments = parser.parse_args(argv)
    report = run(arguments)
    print(f"{report['device']} ({report['gpu_and_driver'] or report['processor']}), ", end="")
    print(f"{report['model']}, {report['tokens']} tokens a step, {LAYERS} layers")
    print(f"compute of a full step: {report['compute']}; every case checked against NumPy\n")
    print(render(report))
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.out:
        for name in ("write", "sequence", "overlap"):
            print(arguments.out / f"{name}.json", arguments.out / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
