"""Measure what a call costs in Python: warm, with arrays at new addresses, and of a new shape.

There is one token, so that kernels take a few us and the overhead of the call dominates.

same    the same arrays again and again
fresh   arrays of the same shapes at new addresses, as a model's activations are
shape   arrays with a new number of rows, or of columns of the page table, most of them spare, so
        that the work is the same; all kernels are loaded

Least times of single calls, in us, which other programs disturb least; medians are in the JSON.
Arrays are torch tensors where torch is installed, else those of the device's own library.

    python scripts/bench.py calls --json build/bench_calls.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import numpy as np
from common.measure import format_table

import kvcupy as kv

from .timers import TorchArrays, own_arrays

HEADS, WIDTH, PAGES, PAGE_SIZE, MAX_POSITIONS = 8, 64, 64, 16, 512
KINDS = ("same", "fresh", "shape")

Arguments = dict[str, Any]
Make = Callable[[int], Arguments]


class Cases:
    """Arguments of each operation on one device, with some spare rows or columns."""

    def __init__(self, device: Any) -> None:
        self.device = device
        torch = TorchArrays(device)
        self._wrap = own_arrays if torch.torch is None else torch.wrap
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
    "store_kv", "rope_store_kv", "gather_kv", "copy_pages", "slot_mapping", "paged_attention",
    "merge_states",
)  # fmt: skip


def time_calls(operation: Callable[..., Any], calls: Iterable[Arguments]) -> list[float]:
    """Time calls one by one, in us. All arguments live to the end: no address comes twice."""
    times, kept = [], []
    for arguments in calls:
        kept.append(arguments)
        start = time.perf_counter_ns()
        operation(**arguments)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def measure(device: Any, name: str, make: Make, rounds: int) -> dict[str, Any]:
    """Return the least and the median time of each kind of call of one operation."""
    operation = getattr(kv, name)
    first = [make(spare) for spare in (0, 1, 2)]
    time_calls(operation, first * 5)  # loads the kernels that these shapes take
    times = {
        "same": time_calls(operation, [first[0]] * rounds),
        "fresh": time_calls(operation, (make(0) for _ in range(rounds))),
        "shape": time_calls(operation, (make(3 + i) for i in range(rounds))),
    }
    device.synchronize()
    return {
        "operation": name,
        **{f"least_{kind}_us": min(times[kind]) for kind in KINDS},
        **{f"median_{kind}_us": median(times[kind]) for kind in KINDS},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=OPERATIONS)


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    cases, rounds = Cases(device), 20 if options.quick else 200
    return {"rows": [measure(device, n, getattr(cases, n), rounds) for n in options.only]}


def render(report: dict[str, Any]) -> str:
    columns = ("operation", *(f"{kind} us" for kind in KINDS))
    rows = [
        (row["operation"], *(row[f"least_{kind}_us"] for kind in KINDS)) for row in report["rows"]
    ]
    return format_table(columns, rows)
