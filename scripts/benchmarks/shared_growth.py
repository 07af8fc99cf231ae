"""Measure how a shared store in memory grows: with its blocks, and with its clients.

repair    a writer dies while it has the lock; how long the next writer has the lock until the
          store is whole again, by number of blocks of 4 KiB
eviction  puts of one block into a full store of which every block is marked used: median, longest
clients   processes that put new blocks and get blocks that are there, in calls of 16 blocks of
          64 KiB, as often as they can: bytes per second of all, and the time of a call: the 99th
          percentile of the slowest process. Each has mapped the memory of the store before

The blocks of the first two have records and no contents, so that a million fits into memory.

    python scripts/bench.py growth --json build/bench_shared_growth.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common.report import format_table

import kvcupy as kv
from kvcupy.remote.stores import shm
from kvcupy.remote.stores.shm import Layout, ShmBackend

BLOCKS = (62_500, 250_000, 1_000_000)
CLIENTS = (1, 2, 8, 64)
SMALL = {"page_size": 4, "num_kv_heads": 2, "head_dim": 128}  # 4 KiB
LARGE = {"page_size": 16, "num_kv_heads": 8, "head_dim": 128}  # 64 KiB
BATCH, SHARED_BLOCKS = 16, 2048
LATE_S = 600.0


def pool(num_pages: int, page: dict[str, int]) -> kv.KVPool:
    return kv.KVPool(
        num_pages, num_layers=1, layout="page_first_direct", dtype="fp16", device="host", **page
    )


@contextmanager
def backend_of(num_blocks: int, *, used: int) -> Iterator[ShmBackend]:
    """Yield the backend of a full store of 4 KiB blocks, which have records alone."""
    block_bytes = pool(1, SMALL).page_bytes
    path = Path("/dev/shm", f"kvcupy-bench-growth-{os.getpid()}")
    capacity = Layout(block_bytes, num_blocks).num_bytes
    backend = ShmBackend(path, block_bytes, capacity)
    try:
        records = np.frombuffer(backend._records, np.uint64).reshape(-1, shm._RECORD_WORDS)
        records = records[:num_blocks]
        records[:, shm._GENERATION] = 2
        records[:, shm._LENGTH] = block_bytes
        keys = np.random.default_rng(0).integers(0, 2**64, (num_blocks, 4), np.uint64)
        records[:, shm._KEY : shm._HEADER_LENGTH] = keys
        records[:, shm._HEADER_LENGTH] = 80
        records[:, shm._USED] = used
        del records
        backend._words[shm._HIGH_WATER] = num_blocks
        backend._words[shm._DIRTY] = 1
        backend.discard([bytes(32)], time.monotonic() + LATE_S)  # repairs it: makes the buckets
        assert backend.stats()["blocks"] == num_blocks
        yield backend
    finally:
        with suppress(OSError):
            path.unlink()
        backend.close()


def put_one(backend: ShmBackend, block: memoryview) -> float:
    """Put a new block, and return the seconds."""
    key = os.urandom(32)
    start = time.perf_counter()
    outcome = backend.put([key], [[block]], [bytes(80)], time.monotonic() + LATE_S)
    seconds = time.perf_counter() - start
    assert outcome == ["stored"]
    return seconds


def repair(num_blocks: int, rounds: int) -> dict[str, Any]:
    """Measure the repair after a dead writer, which had the lock."""
    times: list[float] = []

    def recover(backend: ShmBackend, really: Callable[[Any], None] = ShmBackend._recover) -> None:
        start = time.perf_counter()
        really(backend)
        times.append(time.perf_counter() - start)

    with backend_of(num_blocks, used=0) as backend:
        block, path = memoryview(bytes(backend._layout.block_bytes)), backend.path
        puts = []
        for _ in range(rounds):
            writer = os.fork()
            if not writer:
                with suppress(BaseException):
                    other = ShmBackend(path, len(block), None)
                    ShmBackend._at = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                    put_one(other, block)
                os._exit(1)
            assert os.waitpid(writer, 0)[1] == signal.SIGKILL
            ShmBackend._recover = recover
            survivor = ShmBackend(path, len(block), None)  # has mapped nothing yet
            try:
                puts.append(put_one(survivor, block))
            finally:
                survivor.close()
                ShmBackend._recover = recover.__defaults__[0]
        assert len(times) == rounds
        return {
            "blocks": num_blocks, "lock_ms": 1e3 * min(times), "longest_lock_ms": 1e3 * max(times),
            "put_ms": 1e3 * min(puts), "longest_put_ms": 1e3 * max(puts),
        }  # fmt: skip


def evict(num_blocks: int, puts: int) -> dict[str, Any]:
    """Measure puts into a full store whose blocks are all marked used."""
    with backend_of(num_blocks, used=1) as backend:
        block = memoryview(bytes(backend._layout.block_bytes))
        times = [put_one(backend, block) for _ in range(puts)]
        assert backend.stats()["evicted"] == puts
    return {
        "blocks": num_blocks, "median_us": 1e6 * median(times), "longest_ms": 1e3 * max(times)
    }  # fmt: skip


def client(url: str, seed: int, ready: int, start: int, seconds: float) -> dict[str, Any]:
    """Put and get blocks for some time; return bytes and the times of calls.

    `ready` and `start` are pipes: one to say that it is ready, one that ends when all are.
    """
    host_pool = pool(2 * BATCH, LARGE)
    order = random.Random(seed)
    calls: dict[str, list[float]] = {"put": [], "get": []}
    num_bytes = 0
    with kv.SharedStore.open(url, host_pool, deadline_s=LATE_S) as store:
        backend: Any = store._backend
        for slot in range(backend._layout.num_slots):  # its first access to each takes longer
            backend._map_payload(slot)
        os.write(ready, b".")
        os.read(start, 1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            first = order.randrange(SHARED_BLOCKS)
            shared = [(first + i) % SHARED_BLOCKS + 1 << 100 for i in range(BATCH)]
            new = [order.getrandbits(127) | 1 << 127 for _ in range(BATCH // 2)]
            for call, hashes, pages in (
                ("get", shared, range(BATCH)), ("put", new, range(BATCH, BATCH + len(new))),
            ):  # fmt: skip
                began = time.perf_counter()
                outcomes = getattr(store, call)(hashes, list(pages))
                calls[call].append(time.perf_counter() - began)
                num_bytes += host_pool.page_bytes * sum(o in (True, "stored") for o in outcomes)
    return {"bytes": num_bytes, **calls}


def clients(count: int, seconds: float) -> dict[str, Any]:
    """Measure so many processes that use one store at a time."""
    url = f"shm:bench-growth-{os.getpid()}"
    host_pool = pool(BATCH, LARGE)
    capacity = Layout(host_pool.page_bytes, 2 * SHARED_BLOCKS).num_bytes
    with kv.SharedStore.open(url, host_pool, capacity_bytes=capacity) as store:
        try:
            for first in range(0, 4 * SHARED_BLOCKS, BATCH):  # all memory is allocated
                store.put([first + i + 1 << 100 for i in range(BATCH)], range(BATCH))
            for first in range(0, SHARED_BLOCKS, BATCH):
                store.put([first + i + 1 << 100 for i in range(BATCH)], range(BATCH))
            (ready, is_ready), (start, has_started) = os.pipe(), os.pipe()
            pipes = []
            for seed in range(count):
                read_end, write_end = os.pipe()
                if not os.fork():
                    os.close(has_started)
                    with suppress(BaseException), os.fdopen(write_end, "w") as file:
                        json.dump(client(url, seed, is_ready, start, seconds), file)
                    os._exit(0)
                os.close(write_end)
                pipes.append(os.fdopen(read_end))
            for _ in pipes:
                os.read(ready, 1)
            os.close(has_started)
            reports = [json.load(pipe) for pipe in pipes]
            for pipe in pipes:
                pipe.close()
                os.wait()
            for descriptor in (ready, is_ready, start):
                os.close(descriptor)
        finally:
            store.remove()
    row: dict[str, Any] = {
        "clients": count,
        "gb_per_s": sum(report["bytes"] for report in reports) / seconds / 1e9,
    }
    for call in ("put", "get"):
        p99 = [float(np.percentile(report[call] or [seconds], 99)) for report in reports]
        row |= {
            f"{call}_median_ms": 1e3 * median(t for report in reports for t in report[call]),
            f"{call}_worst_p99_ms": 1e3 * max(p99),
            f"{call}_longest_ms": 1e3 * max(t for report in reports for t in report[call]),
        }
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sections", nargs="+", choices=["repair", "eviction", "clients"], metavar="NAME",
        default=["repair", "eviction", "clients"],
    )  # fmt: skip


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    counts = (2000,) if options.quick else BLOCKS
    report: dict[str, Any] = {}
    if "repair" in options.sections:
        report["repair"] = [repair(n, 1 if options.quick else 5) for n in counts]
    if "eviction" in options.sections:
        report["eviction"] = [evict(n, 20 if options.quick else 1000) for n in counts]
    if "clients" in options.sections:
        seconds = 0.1 if options.quick else 6.0
        report["clients"] = [clients(n, seconds) for n in ((2,) if options.quick else CLIENTS)]
    return report


def render(report: dict[str, Any]) -> str:
    tables = []
    for name in ("repair", "eviction", "clients"):
        if rows := report.get(name):
            cells = [
                [f"{v:,}" if isinstance(v, int) else f"{v:.3f}" for v in row.values()]
                for row in rows
            ]
            tables.append(f"{name}\n{format_table([*rows[0]], cells)}")
    return "\n\n".join(tables)
