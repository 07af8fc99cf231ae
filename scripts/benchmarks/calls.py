"""Measure what a call costs in Python: warm, at new addresses, and of a new shape.

There is one token, so that kernels take a few us and the overhead of the call dominates.

same         the same arrays again and again
fresh        arrays of the same shapes at new addresses, as a model's activations are
shape        arrays with a new number of rows, or of columns of the page table, most of them spare,
             so that the work is the same; all kernels are loaded
operator     the same call through `kvcupy.interop.torch`: an operator of torch's, which its
             compilers take
layer        "fresh" of a layer of a decode step of `PagedKVCache`, but for the first: the keys are
             rotated and written, and the queries attend over them
torch        what a user of torch writes instead, for operations where that is one line or two

Where the kernels can be left out, on the host device, "Python" is the time of the same calls
without them. Least times of a call, in us, which other programs disturb least; medians are in the
JSON. Arrays are torch tensors where torch is installed, else arrays of the device's own library.

    python scripts/bench.py calls --json build/bench_calls.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from common.report import format_table

import kvcupy as kv
from benchmarks.operations.baselines import TorchArrays, own_arrays
from kvcupy.devices.host import HostFunction

HEADS, WIDTH, PAGES, PAGE_SIZE, MAX_POSITIONS = 8, 64, 64, 16, 512
KINDS = ("same", "fresh", "shape", "operator", "torch")
WARM = ("same", "fresh", "operator")
SETS = 20  # of arguments, each at other addresses
LAYERS, LAYER = 9, "layer"

Arguments = dict[str, Any]
Make = Callable[[int], Arguments]
Calls = Sequence[Callable[[], Any]]


class Cases:
    """Arguments of each operation on one device, with some spare rows or columns."""

    def __init__(self, device: Any, torch: TorchArrays | None) -> None:
        self.device = device
        self._wrap = own_arrays if torch is None else torch.wrap
        self.k_cache, self.v_cache = (self.zeros(PAGES, PAGE_SIZE, HEADS, WIDTH) for _ in "kv")
        self.table = self.zeros(MAX_POSITIONS, WIDTH, dtype="fp32")

    def array(self, values: Any) -> Any:
        """Return a copy of a NumPy array on the device, in the library that is measured."""
        return self._wrap(self.device.asarray(values), values.dtype.name)

    def zeros(self, *shape: int, dtype: str = "bf16") -> Any:
        """Return zeros on the device, in the library that is measured."""
        return self._wrap(self.device.zeros(shape, dtype), dtype)

    def rows(self, spare: int) -> Any:
        return self.zeros(1 + spare, HEADS, WIDTH)

    def slots(self) -> Any:
        return self.array(np.zeros(1, np.int64))

    def tables(self, spare: int) -> Arguments:
        return {
            "block_table": self.array(np.zeros((1, 1 + spare), np.int32)),
            "seq_lens": self.array(np.ones(1, np.int32)),
        }

    def store_kv(self, spare: int) -> Arguments:
        return {
            "key": self.rows(spare), "value": self.rows(spare), "k_cache": self.k_cache,
            "v_cache": self.v_cache, "slot_mapping": self.slots(),
        }  # fmt: skip

    def rope_store_kv(self, spare: int) -> Arguments:
        return {
            "query": self.rows(spare), **self.store_kv(spare), "rope_table": self.table,
            "positions": self.slots(),
        }  # fmt: skip

    def gather_kv(self, spare: int) -> Arguments:
        return {
            "k_cache": self.k_cache, "v_cache": self.v_cache, "slots": self.slots(),
            "k_out": self.rows(spare), "v_out": self.rows(spare),
        }  # fmt: skip

    def copy_pages(self, spare: int) -> Arguments:
        none = np.full(1 + spare, -1)
        return {
            "cache": self.k_cache, "src_pages": self.array(none), "dst_pages": self.array(none),
        }  # fmt: skip

    def shift_pages(self, spare: int) -> Arguments:
        none = np.full(1 + spare, -1)
        return {
            "pool": self.k_cache, "pages": self.array(none), "delta": 1, "rope_table": self.table,
            "out_pages": self.array(none),
        }  # fmt: skip

    def slot_mapping(self, spare: int) -> Arguments:
        return {
            **self.tables(spare), "append_lens": self.array(np.ones(1, np.int32)),
            "page_size": PAGE_SIZE, "out": self.zeros(1, dtype="int64"),
        }  # fmt: skip

    def paged_attention(self, spare: int) -> Arguments:
        return {
            "query": self.rows(0), "k_cache": self.k_cache, "v_cache": self.v_cache,
            **self.tables(spare), "out": self.rows(0),
        }  # fmt: skip

    def merge_states(self, spare: int) -> Arguments:
        def lse() -> Any:
            return self.zeros(1 + spare, HEADS, dtype="fp32")

        return {
            "out_a": self.rows(spare), "lse_a": lse(), "out_b": self.rows(spare), "lse_b": lse(),
            "out": self.rows(spare), "lse_out": lse(),
        }  # fmt: skip


OPERATIONS = (
    "store_kv", "rope_store_kv", "gather_kv", "copy_pages", "shift_pages", "slot_mapping",
    "paged_attention", "merge_states",
)  # fmt: skip


def torch_call(torch: Any, name: str, arguments: Arguments) -> Callable[[], Any] | None:
    """Return what a user of torch writes instead of an operation."""
    if name == "store_kv":
        caches = [arguments[n].view(-1, HEADS, WIDTH) for n in ("k_cache", "v_cache")]
        key, value, slots = arguments["key"], arguments["value"], arguments["slot_mapping"]

        def store() -> None:
            caches[0][slots] = key
            caches[1][slots] = value

        return store
    if name == "gather_kv":
        caches = [arguments[n].view(-1, HEADS, WIDTH) for n in ("k_cache", "v_cache")]
        slots, k_out, v_out = (arguments[n] for n in ("slots", "k_out", "v_out"))

        def gather() -> None:
            torch.index_select(caches[0], 0, slots, out=k_out)
            torch.index_select(caches[1], 0, slots, out=v_out)

        return gather
    return None


def time_calls(operation: Callable[..., Any], calls: Iterable[Arguments]) -> list[float]:
    """Time calls one by one, in us. All arguments live to the end: no address comes twice."""
    times, kept = [], []
    for arguments in calls:
        kept.append(arguments)
        start = time.perf_counter_ns()
        operation(**arguments)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def time_warm(calls: Calls, rounds: int) -> list[float]:
    """Time calls that have been made before, one after another; us of one, by round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for call in calls:
            call()
        times.append((time.perf_counter_ns() - start) / 1e3 / len(calls))
    return times


@contextmanager
def without_kernels(device: Any) -> Iterator[bool]:
    """Let launches on the host device return at once; say whether they do."""
    if device.kind != "host":
        yield False
        return
    entry = property(lambda self: lambda *arguments: 0)
    with mock.patch.object(HostFunction, "entry", entry, create=True):
        yield True


def measure(device: Any, torch: Any, name: str, make: Make, rounds: int) -> dict[str, Any]:
    """Return the least and the median time of each kind of call of one operation."""
    operation = getattr(kv, name)
    first = [make(spare) for spare in (0, 1, 2)]
    time_calls(operation, first * 5)  # loads the kernels that these shapes take
    sets = [make(0) for _ in range(SETS)]
    warm: dict[str, Calls] = {
        "same": [partial(operation, **first[0])] * SETS,
        "fresh": [partial(operation, **arguments) for arguments in sets],
    }
    if torch is not None:
        from kvcupy.interop import torch as operators

        warm["operator"] = [partial(getattr(operators, name), **first[0])] * SETS
    times = {kind: time_warm(calls, rounds) for kind, calls in warm.items()}
    times["shape"] = time_calls(operation, (make(3 + i) for i in range(rounds)))
    theirs = None if torch is None else torch_call(torch, name, first[0])
    if theirs is not None:
        times["torch"] = time_warm([theirs] * SETS, rounds)
    with without_kernels(device) as is_python_alone:
        if is_python_alone:
            for kind, calls in warm.items():
                times[f"python_{kind}"] = time_warm(calls, rounds)
    device.synchronize()
    return row_of(device, torch, name, times)


def row_of(device: Any, torch: Any, name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the least and the median of some times by kind."""
    return {
        "operation": name, "arrays": device.kind if torch is None else "torch",
        **{f"least_{kind}_us": min(times[kind]) for kind in times},
        **{f"median_{kind}_us": median(times[kind]) for kind in times},
    }  # fmt: skip


def measure_layers(device: Any, torch: Any, cases: Cases, rounds: int) -> dict[str, Any]:
    """Return what a layer of a decode step of a paged cache costs."""
    cache = kv.PagedKVCache(
        num_layers=LAYERS, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=WIDTH, num_pages=PAGES,
        page_size=PAGE_SIZE, rope=kv.rope_table(MAX_POSITIONS, WIDTH, device=device), device=device,
    )  # fmt: skip
    cache.add_sequence("sequence")
    layers = [[cases.rows(0) for _ in range(4)] for _ in range(LAYERS)]  # query, key, value, out

    def time_step() -> float:
        with cache.forward(["sequence"], [1]):
            start = time.perf_counter_ns()
            for layer, (query, key, value, out) in enumerate(layers):
                if layer == 1:  # the first uploads the tables of the step
                    start = time.perf_counter_ns()
                cache.attention(layer, query, key, value, out=out)
            end = time.perf_counter_ns()
        cache.pop_tokens("sequence", 1)
        return (end - start) / 1e3 / (LAYERS - 1)

    time_step()
    times = {"fresh": [time_step() for _ in range(rounds)]}
    with without_kernels(device) as is_python_alone:
        if is_python_alone:
            times["python_fresh"] = [time_step() for _ in range(rounds)]
    device.synchronize()
    return row_of(device, torch, LAYER, times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    choices = (*OPERATIONS, LAYER)
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rounds, torch = 20 if options.quick else 200, TorchArrays(device)
    rows = []
    for arrays in [torch] * (torch.torch is not None) + [None]:
        cases, module = Cases(device, arrays), None if arrays is None else arrays.torch
        for name in options.only:
            if name == LAYER:
                rows.append(measure_layers(device, module, cases, rounds))
            else:
                rows.append(measure(device, module, name, getattr(cases, name), rounds))
    return {"rows": rows}


def render(report: dict[str, Any]) -> str:
    kinds = (*KINDS, *(f"python_{kind}" for kind in WARM))
    titles = [f"{kind.replace('python_', 'Python ').replace('_', ' ')} us" for kind in kinds]
    rows = []
    for row in report["rows"]:
        times = [row.get(f"least_{kind}_us") for kind in kinds]
        torch = row.get("least_torch_us")
        ratio = f"{torch / row['least_same_us']:.2f}x" if torch else None
        rows.append((row["operation"], row["arrays"], *times, ratio))
    return format_table(("operation", "arrays", *titles, "to torch"), rows)
