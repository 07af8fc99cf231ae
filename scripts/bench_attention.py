"""Measure paged attention: decode over long caches, and prefill, beside torch's own attention.

torch attends over the same keys and values, already gathered into contiguous arrays, so what paging
costs is in kvcupy's figure and not in torch's. Every result is checked against float64 on some of
its rows. GB/s count K and V once, query and output; TFLOP/s count both products of what is visible.

    python scripts/bench_attention.py --json build/attention.json
    python scripts/bench_attention.py --batches 64 --contexts 8192 --prefill 2048   # for a GPU
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench_timers import TorchArrays, copy_gb_per_s, eager
from benchlib import (
    WrongBytes,
    chosen_device,
    describe,
    format_table,
    interleave,
    medians,
    minima,
    write_json,
)
from workload import MODELS, Model

import kvcupy as kv
from kvcupy import reference
from kvcupy.formats import numpy_dtype

PAGE_SIZE = 16
FORMATS = ("bf16", "fp32", "fp8_e4m3")  # of the cache; the query is bf16 for fp8
TOLERANCE = {"bf16": 1.6e-2, "fp32": 2e-5}  # of outputs of about 1: two roundings, and sums
SECONDS = 4.0  # for the candidates of a case together, after which three rounds do
CHECKED_ROWS = 6
BANK = 1_000_003  # values drawn; a prime, so that no two rows are alike


@dataclass(frozen=True)
class Shape:
    """Sequences of one length, each with the same number of new tokens."""

    model: Model
    batch: int
    context: int
    new: int
    format: str

    @property
    def name(self) -> str:
        what = "decode" if self.new == 1 else f"prefill {self.new} of"
        return f"{what} {self.batch} x {self.context}, {self.model.name}, {self.format}"

    @property
    def query_format(self) -> str:
        return self.format if self.format != "fp8_e4m3" else "bf16"

    @property
    def bytes_moved(self) -> int:
        size = {"bf16": 2, "fp32": 4, "fp8_e4m3": 1}[self.format]
        rows = self.batch * self.context * self.model.kv_heads * self.model.head_dim
        queries = self.batch * self.new * self.model.q_heads * self.model.head_dim
        return 2 * rows * size + 2 * queries * (4 if self.format == "fp32" else 2)

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products."""
        seen = self.context * self.new - self.new * (self.new - 1) // 2
        return 4 * self.batch * seen * self.model.q_heads * self.model.head_dim


class Case:
    """The arguments of one shape."""

    def __init__(self, device: Any, shape: Shape) -> None:
        self.device, self.shape = device, shape
        rng = np.random.default_rng(0)
        model, pages = shape.model, -(-shape.context // PAGE_SIZE)
        self.table = rng.permutation(shape.batch * pages).reshape(shape.batch, pages)
        cache = (shape.batch * pages, PAGE_SIZE, model.kv_heads, model.head_dim)
        tokens = shape.batch * shape.new
        self.query = self._values(rng, (tokens, model.q_heads, model.head_dim), shape.query_format)
        self.caches = [self._values(rng, cache, shape.format) for _ in "kv"]
        self.on_device = [device.asarray(a) for a in (self.query, *self.caches)]
        self.lengths = np.full(shape.batch, shape.context, np.int32)
        self.table_on_device = device.asarray(self.table.astype(np.int32))
        self.lengths_on_device = device.asarray(self.lengths)
        self.new_on_device = device.asarray(np.full(shape.batch, shape.new, np.int32))
        out = (tokens, model.q_heads, model.head_dim)
        self.out = device.zeros(out, shape.query_format)
        device.synchronize()

    def _values(self, rng: np.random.Generator, shape: tuple[int, ...], form: str) -> Any:
        """Draw values, which repeat in large arrays: to draw and round them all takes minutes."""
        values = rng.standard_normal(min(int(np.prod(shape)), BANK), np.float32)
        return np.resize(reference.encode(values, form).view(numpy_dtype(form)), shape)

    def kvcupy(self) -> Callable[[Any], Any]:
        """Return kvcupy's call."""
        query, k, v = self.on_device
        options: dict[str, Any] = {"out": self.out}
        if self.shape.new > 1:
            options["query_lens"] = self.new_on_device
        table, lengths = self.table_on_device, self.lengths_on_device
        return lambda stream: kv.paged_attention(
            query, k, v, table, lengths, stream=stream, **options
        )

    def torch(self, wrapping: TorchArrays) -> Callable[[Any], Any]:
        """Return torch's call over contiguous keys; its result goes to `self.theirs`."""
        torch, shape = wrapping.torch, self.shape
        carriers = [a.view(np.uint16 if shape.format == "bf16" else np.float32)
                    for a in self.on_device]  # fmt: skip
        query, k, v = (wrapping.wrap(a, "bf16" if shape.format == "bf16" else "fp32")
                       for a in carriers)  # fmt: skip
        table = torch.as_tensor(self.table, device=query.device)
        heads, width = shape.model.kv_heads, shape.model.head_dim
        keys, values = (
            a[table].reshape(shape.batch, -1, heads, width)[:, : shape.context].transpose(1, 2)
            .contiguous() for a in (k, v)
        )  # fmt: skip
        rows = query.reshape(shape.batch, shape.new, -1, width).transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        mask = None
        if 1 < shape.new < shape.context:
            ahead = shape.context - shape.new
            mask = torch.ones(shape.new, shape.context, dtype=torch.bool, device=query.device)
            mask = mask.tril(ahead)
        causal = shape.new == shape.context

        def call(_: Any) -> None:
            self.theirs = attend(
                rows, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
            )

        return call

    def check(self) -> None:
        """Compare some rows with float64."""
        self.device.synchronize()
        got = self.device.to_numpy(self.out).astype(np.float64)
        shape, rng = self.shape, np.random.default_rng(1)
        query = reference.decode(self.query, shape.query_format)
        group = shape.model.q_heads // shape.model.kv_heads
        for row in rng.choice(len(query), min(CHECKED_ROWS, len(query)), replace=False):
            sequence, head = row // shape.new, int(rng.integers(shape.model.q_heads))
            end = shape.context - shape.new + row % shape.new + 1
            pages = self.table[sequence]
            keys, values = (
                reference.decode(a[pages, :, head // group], shape.format)
                .reshape(-1, shape.model.head_dim)[:end] for a in self.caches
            )  # fmt: skip
            scores = keys @ query[row, head] / np.sqrt(shape.model.head_dim)
            weights = np.exp(scores - scores.max())
            want = weights @ values / weights.sum()
            error = np.abs(got[row, head] - want).max()
            if not error <= TOLERANCE[shape.query_format]:
                raise WrongBytes(f"{shape.name}: row {row}, head {head} is off by {error:.2g}")


def measure(device: Any, shape: Shape, torch: TorchArrays, rounds: int) -> dict[str, Any]:
    """Check and measure one shape."""
    case = Case(device, shape)
    calls = {"kvcupy": case.kvcupy()}
    calls["kvcupy"](None)
    case.check()
    if torch.torch is not None and shape.format != "fp8_e4m3":
        calls["torch"] = case.torch(torch)
    timers = {name: eager(device, [call], 20_000.0) for name, call in calls.items()}
    samples = interleave(timers, rounds, seconds=SECONDS)
    us, least = medians(samples), minima(samples)
    return {
        "case": shape.name,
        "bytes": shape.bytes_moved,
        "us": us,
        "least_us": least,
        "gb_per_s": shape.bytes_moved / us["kvcupy"] / 1e3,
        "tflops": shape.operations / us["kvcupy"] / 1e6,
        "vs_torch": least["torch"] / least["kvcupy"] if "torch" in least else None,
    }


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Return the cases."""
    model = MODELS[arguments.model]
    found = [
        Shape(model, batch, context, 1, form)
        for form in FORMATS
        for batch in arguments.batches
        for context in arguments.contexts
    ]
    new = arguments.prefill
    found += [Shape(model, 4, n, new, "bf16") for n in (new, 4 * new)] if new else []
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the JSON that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda or cuda:1; by default a GPU if there is one")
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--prefill", type=int, default=64, help="new tokens a sequence; 0: none")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one short case of each kind")
    parser.add_argument("--json", help="where to write the results")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.batches, arguments.contexts, arguments.prefill = [2], [256], 8
        arguments.rounds = 3
    kv.config.fallback = "error"
    device = chosen_device(arguments.device)
    about, torch = describe(device), TorchArrays(device)
    bandwidth = copy_gb_per_s(device, 1 << 26, 5)
    print(f"{device.name}, {about['processor']}, copies at {bandwidth:.1f} GB/s")
    if torch.torch is None:
        print(f"torch is left out: {torch.missing}")
    rows = []
    cases = shapes(arguments)
    for i, shape in enumerate(cases):
        print(f"\r{i + 1} of {len(cases)}: {shape.name:60}", end="", file=sys.stderr, flush=True)
        rows.append(measure(device, shape, torch, arguments.rounds))
        rows[-1]["percent_of_copy"] = 100 * rows[-1]["gb_per_s"] / bandwidth
    print(file=sys.stderr)
    columns = ("case", "us", "GB/s", "% of copy", "TFLOP/s", "torch us", "vs torch")
    print(format_table(columns, [
        (r["case"], r["us"]["kvcupy"], r["gb_per_s"], r["percent_of_copy"], r["tflops"],
         r["us"].get("torch"), r["vs_torch"])
        for r in rows
    ]))  # fmt: skip
    if arguments.json:
        write_json(arguments.json, {**about, "copy_gb_per_s": bandwidth, "cases": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
