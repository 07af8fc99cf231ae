"""Prefetch the next step's K/V: copy it on a copy stream while this step computes and stores.

    copy     |copy 0 |copy 1 |        |copy 2 |          copy i waits until buffer i % 2 was read
    main             |compute 0 |store 0|compute 1 |store 1|      step i waits for copy i

K, V and slots of each step come from pinned memory. The same work in sequence is measured next to
it, and every byte that is stored is compared.

    python scripts/overlap_demo.py --out build/overlap
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common.checks import require_equal
from common.measure import (
    one_core_per_stream,
    random_bits,
    require_products,
    save_timeline,
)
from common.models import MODELS, Model
from common.report import format_table
from common.timers import interleave, named_stream, wall_us

import kvcupy as kv

from .products import Products

LAYERS = 4  # enough that they do not all stay in a CPU cache
POISON = 0xA5A5
SOURCES = 3  # pinned buffers that the steps use round-robin
SECONDS = 5.0  # after which three rounds do


class KVLayers:
    """The caches of a few layers, and the ways to write one of them.

    A row of `rows` holds one token, layer by layer: K then V, or latent then rope.
    """

    def __init__(self, device: Any, model: Model, num_slots: int) -> None:
        self.device, self.model = device, model
        self.widths = model.row_widths
        self.row_width = sum(self.widths)
        self.num_slots = num_slots
        shapes = [(num_slots, self.row_width)] if model.mla else [self._heads(num_slots)] * 2
        self.caches = [[device.empty(s, np.uint16) for s in shapes] for _ in range(LAYERS)]
        self._poisoned = [device.asarray(np.full(s, POISON, np.uint16)) for s in shapes]
        self.wipe()

    def _heads(self, tokens: int) -> tuple[int, ...]:
        return (tokens, self.model.kv_heads, self.model.head_dim)

    def parts(self, rows: Any, layer: int) -> tuple[Any, Any]:
        """Return views of K and V (or latent and rope) in rows (tokens, LAYERS, row_width)."""
        first, second = rows[:, layer, : self.widths[0]], rows[:, layer, self.widths[0] :]
        if self.model.mla:
            return first, second
        shape = self._heads(rows.shape[0])
        return first.reshape(shape), second.reshape(shape)

    def targets(self, layer: int) -> tuple[Any, Any]:
        """Return the two arrays that the parts go to: two caches, or two ranges of columns."""
        if self.model.mla:
            (cache,) = self.caches[layer]
            return cache[:, : self.widths[0]], cache[:, self.widths[0] :]
        k_cache, v_cache = self.caches[layer]
        return k_cache, v_cache

    def launch(self, rows: Any, slots: Any, layer: int) -> Callable[..., None]:
        """Return the single launch that writes both parts; it takes `stream=`."""
        parts = [kv.view_as(part, "bf16") for part in self.parts(rows, layer)]
        caches = [kv.view_as(cache, "bf16") for cache in self.caches[layer]]
        operation = kv.store_mla if self.model.mla else kv.store_kv
        return partial(operation, *parts, *caches, slots)

    def wipe(self) -> None:
        """Fill the caches with a poison pattern."""
        for caches in self.caches:
            for cache, poison in zip(caches, self._poisoned, strict=True):
                self.device.copy(cache, poison)
        self.device.synchronize()

    def check(self, case: str, writes: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Compare every byte of the caches with NumPy's, after `writes` of (rows, slots)."""
        for layer in range(LAYERS):
            want = np.full((self.num_slots, self.row_width), POISON, np.uint16)
            for rows, slots in writes:
                want[slots] = rows[:, layer]
            stored = [self.device.to_numpy(target) for target in self.targets(layer)]
            got = np.concatenate([part.reshape(len(want), -1) for part in stored], axis=1)
            require_equal(f"{case}, layer {layer}", got, want)


class Steps:
    """Steps that each copy K, V and slots from pinned memory, compute, and store."""

    def __init__(self, device: Any, model: Model, tokens: int, count: int) -> None:
        rng = np.random.default_rng(1)
        self.device, self.model, self.tokens, self.count = device, model, tokens, count
        self.layers = KVLayers(device, model, 2 * tokens)
        shape = (tokens, LAYERS, self.layers.row_width)
        self.pinned_rows = [device.empty_pinned(shape, np.uint16) for _ in range(SOURCES)]
        for array in self.pinned_rows:
            array[...] = random_bits(rng, shape)
        self.pinned_slots = [device.empty_pinned((tokens,), np.int64) for _ in range(count)]
        for array in self.pinned_slots:
            array[...] = rng.permutation(2 * tokens)[:tokens]
        self.rows = [device.empty(shape, np.uint16) for _ in range(2)]
        self.slots = [device.empty((tokens,), np.int64) for _ in range(2)]
        self.main, self.copier = named_stream(device, "main"), named_stream(device, "copy")
        self.launches = [
            [self.layers.launch(rows, slots, layer) for layer in range(LAYERS)]
            for rows, slots in zip(self.rows, self.slots, strict=True)
        ]
        self.compute = Products(device, model)
        self.ends = [device.event(timing=True) for _ in range(count + 1)]

    def copy(self, step: int, stream: Any) -> None:
        side = step % 2
        self.device.copy(self.rows[side], self.pinned_rows[step % SOURCES], stream=stream)
        self.device.copy(self.slots[side], self.pinned_slots[step], stream=stream)

    def work(self, step: int) -> None:
        self.compute.enqueue(self.main)
        for launch in self.launches[step % 2]:
            launch(stream=self.main)

    def copy_alone(self) -> None:
        for step in self._steps(self.copier):
            self.copy(step, self.copier)

    def work_alone(self) -> None:
        for step in self._steps(self.main):
            self.work(step)

    def in_sequence(self) -> None:
        for step in self._steps(self.main):
            self.copy(step, self.main)
            self.work(step)

    def overlapped(self) -> None:
        """Copy ahead by one step. `read[i]` guards buffer i: no copy into it before that event."""
        kv.fork(self.main, self.copier)
        read: list[Any] = [None, None]
        arrived: list[Any] = [None, None]

        def fetch(step: int) -> None:
            if read[step % 2] is not None:
                self.copier.wait(read[step % 2])
            self.copy(step, self.copier)
            arrived[step % 2] = self.copier.record()

        for step in self._steps(self.main):
            if step == 0:
                fetch(0)
            if step + 1 < self.count:
                fetch(step + 1)
            self.main.wait(arrived[step % 2])
            self.work(step)
            read[step % 2] = self.main.record()
        kv.join(self.main, self.copier)

    def _steps(self, stream: Any) -> Iterator[int]:
        """Go through the steps, and record on `stream` when each has ended."""
        stream.record(self.ends[0])
        for step in range(self.count):
            yield step
            stream.record(self.ends[step + 1])

    def step_times_us(self, work: Callable[[], None]) -> list[float]:
        """Run one of the ways to do all steps; return the time from the end of each to the next."""
        self.device.synchronize()
        work()
        self.device.synchronize()
        return [float(end.elapsed_us(start)) for start, end in pairwise(self.ends)]

    def check(self, case: str) -> None:
        rows = [self.pinned_rows[step % SOURCES] for step in range(self.count)]
        self.layers.check(case, list(zip(rows, self.pinned_slots, strict=True)))


def hidden_fraction(sequence_us: float, overlap_us: float, copy_us: float) -> float:
    """Return the part of the copy time that the overlap hides, between 0 and 1.

    >>> hidden_fraction(30.0, 22.0, 10.0)
    0.8
    """
    return min(max((sequence_us - overlap_us) / copy_us, 0.0), 1.0)


# --- The demo -------------------------------------------------------------------------------------


def measure(
    device: Any, model: Model, tokens: int, count: int, rounds: int, out: Path | None
) -> tuple[list[dict[str, Any]], str]:
    """Measure steps whose K/V are copied on a copy stream, in us per step."""
    steps = Steps(device, model, tokens, count)
    copy = partial(steps.copy, 0, steps.copier)
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
    most = 1 - 1 / count  # nothing can hide the first copy
    title = f"{model.name}, {count} steps:"
    save_timeline(device, [steps.in_sequence], out, "sequence", f"{title} in sequence")
    save_timeline(
        device, [steps.overlapped], out, "overlap",
        f"{title} {hidden:.0%} of the copy time hidden, {most:.0%} possible",
    )  # fmt: skip
    moved = count * tokens * (LAYERS * steps.layers.row_width * 2 + 8)
    rows = [
        {
            "case": name,
            "time_us": us / count,
            "least_us": least[name] / count,
            "gb_per_s": moved / us / 1e3,
            "ratio": least[sequence] / least[name] if name in (sequence, overlap) else None,
            "hidden": hidden if name == overlap else None,
            "hidden_at_most": most if name == overlap else None,
        }
        for name, us in times.items()
    ]
    return rows, str(steps.compute)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-3.1-8b")
    add("--tokens", type=int, default=2048, help="tokens per step")
    add("--steps", type=int, default=8)
    add("--rounds", type=int, help="measurements of a case at most; default: 150")
    add("--out", type=Path, help="write timelines (JSON and PNG) to this folder")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    require_products(device)
    model = MODELS[options.model]
    rounds = options.rounds or (15 if options.quick else 150)
    with one_core_per_stream(device):
        rows, compute = measure(device, model, options.tokens, options.steps, rounds, options.out)
    return {
        "model": model.name, "tokens": options.tokens, "layers": LAYERS, "steps": options.steps,
        "compute": compute, "rows": rows,
    }  # fmt: skip


def render(report: dict[str, Any]) -> str:
    columns = ("case", "us (median)", "us (min)", "GB/s", "times as fast (min)", "copy hidden")
    rows = []
    for row in report["rows"]:
        hidden = row["hidden"]
        share = None if hidden is None else f"{hidden:.0%} of {row['hidden_at_most']:.0%}"
        times = (row["time_us"], row["least_us"], row["gb_per_s"], row["ratio"])
        rows.append((row["case"], *times, share))
    return (
        f"{report['model']}, {report['tokens']} tokens per step, {LAYERS} layers; compute of a "
        f"step: {report['compute']}; every case checked against NumPy\n\n"
        f"Copy in the next step's K/V while this one computes, per step of {report['steps']}\n"
        "(hidden: (in sequence - copy stream) / copy alone, least time of each step; nothing hides "
        f"the first copy)\n\n{format_table(columns, rows)}"
    )
