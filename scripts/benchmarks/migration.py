"""Measure `PageReceiver.pull` of blocks of another process, over NIXL, by size of block.

A block is a page of all layers, K and V, of pools with layout page_first_direct. Each pull is of an
offer that was made just before; the time ends when all layers have arrived and are confirmed.
`copy` is the time of NumPy for the same pages within this process: what shared memory could reach.
Transports are what UCX chooses (shared memory between processes of a machine) and TCP.

    python scripts/bench.py migration
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common.report import format_table

import kvcupy as kv

CASES = ((64 << 10, 32), (256 << 10, 32), (1 << 20, 32), (2 << 20, 32))  # bytes of a block, blocks
LAYER_BYTES = 64 << 10  # of a block: K and V of 16 tokens, 8 heads of 128 in bf16
TRANSPORTS = {"shared memory": {}, "tcp": {"UCX_TLS": "tcp"}}
ROUNDS = 15


def pool_of(block_bytes: int, blocks: int) -> kv.KVPool:
    """Return a pool of host memory for twice as many blocks, all of it written."""
    pool = kv.KVPool(
        2 * blocks, 16, block_bytes // LAYER_BYTES, 8, 128,
        placement="pinned", device="host", layout="page_first_direct",
    )  # fmt: skip
    for layer in range(pool.num_layers):
        for array in (pool.k(layer), pool.v(layer)):
            array.view(np.uint16)[...] = np.arange(128, dtype=np.uint16)
    return pool


def pages_of(blocks: int) -> list[int]:
    """Return the pages that move: none of them are neighbors."""
    return list(range(0, 2 * blocks, 2))


def require_equal(pool: kv.KVPool, expected: kv.KVPool, pages: list[int]) -> None:
    """Raise unless pages have the same bytes as in another pool."""
    for layer in range(pool.num_layers):
        for read, sent in ((pool.k, expected.k), (pool.v, expected.v)):
            same = read(layer).view(np.uint16)[pages] == sent(layer).view(np.uint16)[pages]
            if not same.all():
                raise AssertionError(f"layer {layer}: other bytes than were sent")


def serve() -> None:
    """Offer the pages that lines ask for: bytes of a block, and blocks."""
    pool: Any = None
    sender: Any = None
    for line in sys.stdin:
        block_bytes, blocks = json.loads(line)
        if pool is None:
            pool = pool_of(block_bytes, blocks)
            sender = kv.PageSender(pool)
        pages = pool.allocator.alloc(pool.num_pages)
        pool.allocator.free(np.setdiff1d(pages, pages_of(blocks)))
        print(sender.offer(pages_of(blocks)).hex(), flush=True)
        while sender.stats()["offered_pages"]:
            time.sleep(1e-4)
    if sender is not None:
        sender.close()


def measure(block_bytes: int, blocks: int, rounds: int) -> dict[str, Any]:
    """Be the receiver of a sender in another process; return the times."""
    pool, expected = (pool_of(block_bytes, blocks) for _ in range(2))
    code = "from benchmarks.migration import serve; serve()"
    folder = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert other.stdin is not None and other.stdout is not None
    pages, times, copies = pages_of(blocks), [], []
    num_bytes = blocks * block_bytes
    parts = [[p.k(i) for i in range(p.num_layers)] for p in (pool, expected)]
    with kv.PageReceiver(pool) as receiver:
        for number in range(rounds + 1):
            for layer in range(pool.num_layers):
                pool.k(layer)[...] = pool.v(layer)[...] = 0
            other.stdin.write(json.dumps((block_bytes, blocks)) + "\n")
            other.stdin.flush()
            ticket = bytes.fromhex(other.stdout.readline())
            start = time.perf_counter()
            receiver.pull(ticket, pages).synchronize()
            end = time.perf_counter()
            require_equal(pool, expected, pages)
            start_copy = time.perf_counter()
            for mine, theirs in zip(*parts, strict=True):
                mine[pages] = theirs[pages]
            copied = 2 * (time.perf_counter() - start_copy)  # of K alone
            if number:  # the first connects
                times.append(end - start)
                copies.append(copied)
    other.stdin.close()
    other.wait(10)
    other.stdout.close()
    return {
        "block_bytes": block_bytes, "blocks": blocks, "pull_us": 1e6 * median(times),
        "least_pull_us": 1e6 * min(times), "gb_per_s": num_bytes / median(times) / 1e9,
        "copy_gb_per_s": num_bytes / median(copies) / 1e9,
    }  # fmt: skip


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all transports, each in new processes."""
    cases = ((64 << 10, 2), (256 << 10, 2)) if arguments.quick else CASES
    rounds = 2 if arguments.quick else ROUNDS
    folder = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    code = "import json, sys; from benchmarks.migration import measure; " \
           "print(json.dumps(measure(*json.loads(sys.argv[1]))))"  # fmt: skip
    rows = []
    for transport, environment in TRANSPORTS.items():
        for case in cases:
            done = subprocess.run(
                [sys.executable, "-c", code, json.dumps((*case, rounds))], text=True, check=True,
                stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths, **environment},
            )  # fmt: skip
            rows.append({"transport": transport, **json.loads(done.stdout)})
    return {"rows": rows}


def render(report: dict[str, Any]) -> str:
    """Return the table."""
    columns = ("transport", "block", "blocks", "pull us", "GB/s", "copy GB/s")
    rows = [
        (row["transport"], f"{row['block_bytes'] >> 10} KiB", row["blocks"], row["pull_us"],
         row["gb_per_s"], row["copy_gb_per_s"])
        for row in report["rows"]
    ]  # fmt: skip
    return format_table(columns, rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options to the common ones."""
