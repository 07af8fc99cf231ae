"""Measure what the order checker adds to a call, in us of the calling thread.

python scripts/bench.py order
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from common.report import format_table

import kvcupy as kv

CALLS = 200  # between two synchronisations, which are not timed
_MODES = ("off", "on")


def calls_of(device: Any) -> dict[str, Callable[[], object]]:
    """Return calls on one stream, by name; caches have 256 pages of 16 slots."""
    stream, event = device.stream(), device.event()
    k, v = (device.zeros((256, 16, 8, 64), "fp16") for _ in "kv")
    rows, slots = device.zeros((8, 8, 64), "fp16"), device.asarray(np.arange(8))
    query, out = (device.zeros((4, 8, 64), "fp16") for _ in range(2))
    table = device.asarray(np.arange(64, dtype=np.int32).reshape(4, 16))
    lengths = device.asarray(np.full(4, 20, np.int32))
    return {
        "store_kv, 8 slots": lambda: kv.store_kv(rows, rows, k, v, slots, stream=stream),
        "paged_attention, 4 sequences": lambda: kv.paged_attention(
            query, k, v, table, lengths, out=out, stream=stream
        ),
        "copy": lambda: device.copy(out, query, stream=stream),
        "record and wait": lambda: stream.wait(stream.record(event)),
    }


def rows_of(device: Any, rounds: int) -> list[dict[str, Any]]:
    """Return the median over rounds of the us of each call, without and with a checker."""
    calls = calls_of(device)
    samples: dict[tuple[str, str], list[float]] = {(n, m): [] for n in calls for m in _MODES}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            for mode in _MODES:
                with kv.order_checker() if mode == "on" else nullcontext():
                    samples[name, mode].append(_time_us(device, call))
    return [
        {"call": name, **{f"{m}_us": float(np.median(samples[name, m][1:])) for m in _MODES}}
        for name in calls
    ]


def _time_us(device: Any, call: Callable[[], object]) -> float:
    device.synchronize()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    elapsed_ns = time.perf_counter_ns() - start
    device.synchronize()
    return elapsed_ns / CALLS / 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the common options."""


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    return {"rows": rows_of(device, 5 if options.quick else 25)}


def render(report: dict[str, Any]) -> str:
    columns = ("call", "us without checker", "us with checker")
    return format_table(columns, [(r["call"], r["off_us"], r["on_us"]) for r in report["rows"]])
