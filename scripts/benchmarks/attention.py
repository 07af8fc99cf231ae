"""Measure paged attention: decode over long caches, and prefill, beside torch's own attention.

torch attends over the same keys and values, already gathered into contiguous arrays: the cost of
paging is in kvcupy's figure and not in torch's. Some rows of every result are checked against
float64. GB/s count K, V, query and output once; TFLOP/s count both products over visible keys.

    python scripts/bench.py attention --json build/attention.json
    python scripts/bench.py attention --batches 64 --contexts 8192 --prefill 2048   # for a GPU
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from common.measure import (
    WrongBytes,
    format_table,
    interleave,
    medians,
    minima,
)
from common.workload import MODELS, Model

import kvcupy as kv
from kvcupy import reference
from kvcupy.formats import numpy_dtype

from .command import TIMES
from .timers import TorchArrays, copy_gb_per_s, eager

PAGE_SIZE = 16
FORMATS = ("bf16", "fp32", "fp8_e4m3")  # of the cache; the query is bf16 for fp8
TOLERANCE = {"bf16": 1.6e-2, "fp32": 2e-5}  # of outputs of about 1: two roundings, and sums
SECONDS = 4.0  # for all candidates of a case, after which three rounds suffice
CHECKED_ROWS = 6
BANK = 1_000_003  # values drawn; a prime, so that no two rows are equal


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
        """Draw values, which repeat in large arrays: drawing them all would take minutes."""
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


def shapes(options: argparse.Namespace) -> list[Shape]:
    """Return the cases."""
    model = MODELS[options.model]
    batches = options.batches or ([2] if options.quick else [1, 8])
    contexts = options.contexts or ([256] if options.quick else [1024, 4096])
    cases = [
        Shape(model, batch, context, 1, form)
        for form in FORMATS
        for batch in batches
        for context in contexts
    ]
    new = (8 if options.quick else 64) if options.prefill is None else options.prefill
    cases += [Shape(model, 4, n, new, "bf16") for n in (new, 4 * new)] if new else []
    return cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", choices=sorted(MODELS))
    add("--batches", type=int, nargs="+", help="sequences; default: 1 8")
    add("--contexts", type=int, nargs="+", help="tokens of each sequence; default: 1024 4096")
    add("--prefill", type=int, help="new tokens per sequence, 0 for none; default: 64")
    add("--rounds", type=int, help="measurements of a case at most; default: 15")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    kv.config.fallback = "error"
    torch, bandwidth = TorchArrays(device), copy_gb_per_s(device, 1 << 26, 5)
    rounds = options.rounds or (3 if options.quick else 15)
    rows, cases = [], shapes(options)
    for i, shape in enumerate(cases):
        print(f"\r{i + 1} of {len(cases)}: {shape.name:60}", end="", file=sys.stderr, flush=True)
        rows.append(measure(device, shape, torch, rounds))
        rows[-1]["percent_of_copy"] = 100 * rows[-1]["gb_per_s"] / bandwidth
    print(file=sys.stderr)
    notes = [f"no torch baseline: {torch.missing}"] if torch.missing else []
    return {"copy_gb_per_s": bandwidth, "rows": rows, "notes": notes}


def render(report: dict[str, Any]) -> str:
    columns = ("case", *TIMES, "TFLOP/s", "torch us", "x torch")
    cells = [
        (row["case"], row["us"]["kvcupy"], row["least_us"]["kvcupy"], row["gb_per_s"],
         row["percent_of_copy"], row["tflops"], row["us"].get("torch"), row["vs_torch"])
        for row in report["rows"]
    ]  # fmt: skip
    about = f"copy {report['copy_gb_per_s']:.1f} GB/s; some rows of every case checked"
    return "\n".join([format_table(columns, cells), "", about, *report["notes"]])
