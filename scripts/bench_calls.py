"""Measure what a call costs in Python: warm, with arrays at new addresses, and of a new shape.

Shapes are small, so that the kernels are done in a few us and what counts is the way there.

same    the same arrays again and again
fresh   arrays of the same shapes at addresses that no call has had: what a model's activations are
shape   a number of tokens (or sequences, or pages) that no call has had; all kernels are loaded

Least times of single calls, in us, which other programs disturb least; medians are in the JSON.
Arrays are torch tensors where torch is installed, else NumPy arrays.

    python scripts/bench_calls.py --json scripts/results/bench_calls.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np
from bench_timers import TorchArrays, own_arrays
from benchlib import describe, format_table, write_json

import kvcupy as kv

HEADS, WIDTH, PAGES, PAGE_SIZE, MAX_POSITIONS = 8, 64, 64, 16, 512
KINDS = ("same", "fresh", "shape")

Arguments = dict[str, Any]
Make = Callable[[int], Arguments]


class Cases:
    """Arguments of each operation, for a number of tokens, on one device."""

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

    def rows(self, tokens: int) -> Any:
        return self.zeros(tokens, HEADS, WIDTH)

    def slots(self, tokens: int) -> Any:
        return self.array(np.arange(tokens))

    def store_kv(self, tokens: int) -> Arguments:
        return {
            "key": self.rows(tokens), "value": self.rows(tokens), "k_cache": self.k_cache,
            "v_cache": self.v_cache, "slot_mapping": self.slots(tokens),
        }  # fmt: skip

    def rope_store_kv(self, tokens: int) -> Arguments:
        return {
            "query": self.rows(tokens), **self.store_kv(tokens), "rope_table": self.table,
            "positions": self.slots(tokens),
        }  # fmt: skip

    def gather_kv(self, tokens: int) -> Arguments:
        return {
            "k_cache": self.k_cache, "v_cache": self.v_cache, "slots": self.slots(tokens),
            "k_out": self.rows(tokens), "v_out": self.rows(tokens),
        }  # fmt: skip

    def copy_pages(self, pages: int) -> Arguments:
        none = np.full(pages, -1)
        return {
            "cache": self.k_cache, "src_pages": self.array(none), "dst_pages": self.array(none),
        }  # fmt: skip

    def slot_mapping(self, sequences: int) -> Arguments:
        ones = np.ones(sequences, np.int32)
        return {
            "block_table": self.array(np.zeros((sequences, 4), np.int32)),
            "seq_lens": self.array(ones), "append_lens": self.array(ones),
            "page_size": PAGE_SIZE, "out": self.zeros(sequences, dtype="int64"),
        }  # fmt: skip

    def paged_attention(self, sequences: int) -> Arguments:
        return {
            "query": self.rows(sequences), "k_cache": self.k_cache, "v_cache": self.v_cache,
            "block_table": self.array(np.zeros((sequences, 4), np.int32)),
            "seq_lens": self.array(np.ones(sequences, np.int32)), "out": self.rows(sequences),
        }  # fmt: skip

    def merge_states(self, tokens: int) -> Arguments:
        def lse() -> Any:
            return self.zeros(tokens, HEADS, dtype="fp32")

        return {
            "out_a": self.rows(tokens), "lse_a": lse(), "out_b": self.rows(tokens), "lse_b": lse(),
            "out": self.rows(tokens), "lse_out": lse(),
        }  # fmt: skip


OPERATIONS = (
    "store_kv", "rope_store_kv", "gather_kv", "copy_pages", "slot_mapping", "paged_attention",
    "merge_states",
)  # fmt: skip


def time_calls(operation: Callable[..., Any], calls: Iterable[Arguments]) -> list[float]:
    """Time calls one by one, in us."""
    times = []
    for arguments in calls:
        start = time.perf_counter_ns()
        operation(**arguments)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def measure(device: Any, name: str, make: Make, rounds: int) -> dict[str, Any]:
    """Return the least and the median time of each kind of call of one operation."""
    operation = getattr(kv, name)
    first = [make(tokens) for tokens in (1, 2, 3)]
    time_calls(operation, first * 5)  # loads the kernels that these shapes take
    # All live at once, so that no two sets have an address in common.
    moved, grown = [make(1) for _ in range(rounds)], [make(4 + i) for i in range(rounds)]
    times = {
        "same": time_calls(operation, [first[0]] * rounds),
        "fresh": time_calls(operation, moved),
        "shape": time_calls(operation, grown),
    }
    device.synchronize()
    return {
        "operation": name,
        **{f"least_{kind}_us": min(times[kind]) for kind in KINDS},
        **{f"median_{kind}_us": median(times[kind]) for kind in KINDS},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="such as host or cuda:0; by default the first GPU or host")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    options = parser.parse_args(argv)
    device = kv.device(options.device) if options.device else kv.devices.get()
    rows = measure_all(device, options.only, 20 if options.quick else 200)
    columns = ("operation", *(f"{kind} us" for kind in KINDS))
    print(format_table(columns, [[r["operation"], *_least(r)] for r in rows]))
    if options.json:
        write_json(options.json, {**describe(device), "rows": rows})
    return 0


def measure_all(device: Any, operations: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measure some operations on a device."""
    cases = Cases(device)
    return [measure(device, name, getattr(cases, name), rounds) for name in operations]


def _least(row: dict[str, Any]) -> list[float]:
    return [row[f"least_{kind}_us"] for kind in KINDS]


if __name__ == "__main__":
    sys.exit(main())
