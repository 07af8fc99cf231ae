"""Measure how the calls of a tiered cache grow with the number of its blocks.

New blocks are inserted in calls of 1,024; each call first evicts as many from the device tier, once
it is full. The host tier grows until it is full, and then loses as many as it gets. Blocks have 16
bytes, so that a million fits into memory. Times are CPU times of the calling thread, with garbage
collections of what the calls have made, but not of the modules of this process (`gc.freeze`).

insert, evict  a call at this number of blocks: the median and the longest of the last calls
match, acquire per block of 1,024 that are on the device; the acquire includes the release
bytes          memory of the process per block of both tiers, without the pools

    python scripts/bench.py blocks --json build/bench_blocks.json
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common.report import format_table

import kvcupy as kv

BLOCKS = (62_500, 250_000, 1_000_000)
CALL = 1024
ON_DEVICE = 16  # the device has a 16th of the blocks of the host
ROUNDS = 10


def pool(num_pages: int, device: Any) -> kv.KVPool:
    placement = {} if device == "device" else {"placement": "pinned"}
    pool = kv.KVPool(num_pages, 1, 1, 1, 8, dtype="int8", device="host", **placement)
    for part in (pool.k(0), pool.v(0)):
        part[...] = 1  # the first access maps the memory
    return pool


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed_ms(work: Callable[[], object]) -> float:
    """Return the CPU time of this thread: others may keep the processors busy."""
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1e3


class Growing:
    """A tiered cache whose host tier has room for a number of blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = pool(max(4 * CALL, num_blocks // ON_DEVICE), "device")
        host = pool(num_blocks, "host")
        self.before = resident()
        self.cache = kv.TieredCache(self.pool, host)
        self.random = random.Random(1)
        self.last: list[int] = []
        self.insert_ms: list[float] = []
        self.evict_ms: list[float] = []

    @property
    def num_blocks(self) -> int:
        stats = self.cache.stats()
        return int(stats["device_blocks"] + stats["host_blocks"])

    def insert(self) -> None:
        """Insert new blocks, after an eviction of as many if there is no page."""
        allocator = self.pool.allocator
        if allocator.num_free < CALL:
            self.evict_ms.append(timed_ms(lambda: self.cache.evict(CALL)))
        self.last = [self.random.getrandbits(127) + 2**127 for _ in range(CALL)]
        pages = allocator.alloc(CALL)
        self.insert_ms.append(timed_ms(lambda: self.cache.insert(self.last, pages)))

    def row(self, phase: str) -> dict[str, Any]:
        """Report the calls since the last row."""
        match = min(timed_ms(lambda: self.cache.match(self.last)) for _ in range(ROUNDS))
        acquire = min(
            timed_ms(lambda: self.cache.acquire(self.last).release()) for _ in range(ROUNDS)
        )
        row = {
            "phase": phase, "blocks": self.num_blocks,
            "bytes": (resident() - self.before) / self.num_blocks,
            "insert_median_ms": median(self.insert_ms), "insert_longest_ms": max(self.insert_ms),
            "evict_median_ms": median(self.evict_ms), "evict_longest_ms": max(self.evict_ms),
            "match_us": match / CALL * 1e3, "acquire_us": acquire / CALL * 1e3,
        }  # fmt: skip
        self.insert_ms, self.evict_ms = [], []
        return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, nargs="+", help=f"of the host; default: {BLOCKS}")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    gc.collect()
    gc.freeze()
    for count in options.blocks or ((16 * CALL,) if options.quick else BLOCKS):
        print(f"{count:,} blocks ...", file=sys.stderr, flush=True)
        growing = Growing(count)
        while growing.cache.stats()["host_blocks"] < count - CALL:
            growing.insert()
        rows.append(growing.row("growing"))
        for _ in range(max(8, count // CALL // 2)):
            growing.insert()
        rows.append(growing.row("full"))
        growing.cache.close()
    return {"rows": rows}


def render(report: dict[str, Any]) -> str:
    columns = tuple(report["rows"][0])
    return format_table(columns, [tuple(row.values()) for row in report["rows"]])
