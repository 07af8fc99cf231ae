"""Measure the disk tier: blocks written to a file and read from it, plain and encrypted.

The file is in the page cache, or in memory (`--folder /dev/shm`), so that the times are of
checksums, encryption and copies, to which every disk adds its own. Both files are measured in
turns; the least time of each counts.

    python scripts/bench.py disk --json build/disk.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common.report import format_table

from kvcupy.cache.tiered.disk import DiskTier
from kvcupy.cache.tiered.disk_format import Layout

KINDS = {"plain": None, "encrypted": bytes(range(32))}


def measure(folder: Path, page_bytes: int, num_bytes: int, rounds: int, threads: int) -> Any:
    """Return rows with the least seconds of calls that move blocks of `num_bytes` together."""
    count = max(1, num_bytes // page_bytes)
    rng = np.random.default_rng(1)
    pages = [memoryview(rng.bytes(page_bytes)) for _ in range(count)]
    into = [memoryview(bytearray(page_bytes)) for _ in range(count)]
    tiers = {
        kind: DiskTier(
            folder / kind, Layout(count, page_bytes).num_bytes, page_bytes, {"kind": kind},
            encryption_key=key, num_threads=threads,
        )
        for kind, key in KINDS.items()
    }  # fmt: skip
    least = {(kind, call): float("inf") for kind in tiers for call in ("write", "read")}
    for _ in range(rounds):
        for kind, tier in tiers.items():
            started = time.perf_counter()
            errors = tier.write_many([(i, i, page) for i, page in enumerate(pages)])
            written = time.perf_counter()
            whole = tier.read_many([(i, i, page) for i, page in enumerate(into)])
            ended = time.perf_counter()
            assert errors == [None] * count and whole == [True] * count and into == pages
            least[kind, "write"] = min(least[kind, "write"], written - started)
            least[kind, "read"] = min(least[kind, "read"], ended - written)
    for tier in tiers.values():
        tier.close()
    return [
        {
            "call": call, "page_bytes": page_bytes, "blocks": count, "threads": threads,
            **{f"{kind}_us": least[kind, call] / count * 1e6 for kind in tiers},
            **{f"{kind}_gb_per_s": count * page_bytes / least[kind, call] / 1e9 for kind in tiers},
        }
        for call in ("write", "read")
    ]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="of the files; default: a temporary one")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure blocks of several sizes, by one thread and by the default number of threads."""
    rows = []
    sizes = (65536,) if options.quick else (4096, 65536, 2**20, 2**22)
    for page_bytes in sizes:
        for threads in (1,) if options.quick else (1, 4):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                rounds = 2 if options.quick else 25
                rows += measure(Path(folder), page_bytes, 2**24, rounds, threads)
    return {"rows": rows}


def render(report: dict[str, Any]) -> str:
    columns = ("call", "block", "threads", *(f"{k} {u}" for k in KINDS for u in ("us", "GB/s")))
    cells = [
        (
            row["call"], f"{row['page_bytes'] / 1024:g} KiB", row["threads"],
            *(row[f"{kind}_{unit}"] for kind in KINDS for unit in ("us", "gb_per_s")),
        )
        for row in report["rows"]
    ]  # fmt: skip
    return format_table(columns, cells)
