"""Measure pages on their way from another process: the socket engine beside a plain socket.

A block is a page of all layers, K and V. Both ways move the same memory of the other process to the
same memory of this one, over TCP of this machine and over a Unix socket. The plain socket calls
`sendmsg` and `recvmsg_into` for lists of areas that were made before, 1 MiB at a time: nothing is
checked, agreed upon or freed. Rounds alternate between the two, in several pairs of processes:
where their memory and threads lie makes a difference. Caller: what `offer` and `pull` take of the
threads that call them.

    python scripts/bench.py migration
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import kvcupy as kv
from kvcupy.bench.report import format_table
from kvcupy.doctor import environment

CASES = ((64 << 10, 1), (64 << 10, 32), (1 << 20, 1), (1 << 20, 32), (2 << 20, 1), (2 << 20, 32))
LAYER_BYTES = 64 << 10  # of a block: K and V of 16 tokens, 8 heads of 128 in bf16
NUM_PAGES = 64
ROUND_S = 0.25
_PAIRS = 3  # of processes
_PIECE_BYTES = 1 << 20


def pool_of(block_bytes: int, num_pages: int = NUM_PAGES) -> kv.KVPool:
    """Return a pool of host memory whose pages have so many bytes, none of them zero pages."""
    pool = kv.KVPool(
        num_pages, 16, block_bytes // LAYER_BYTES, 8, 128,
        placement="pinned", device="host", layout="page_first_direct",
    )  # fmt: skip
    for layer in range(pool.num_layers):
        for array in (pool.k(layer), pool.v(layer)):
            array.view(np.uint16)[...] = np.arange(128, dtype=np.uint16)
    return pool


def pieces_of(pool: kv.KVPool, blocks: int) -> list[list[memoryview]]:
    """Return the memory of the pages that move, in the order of the wire, in lists of 1 MiB."""
    views = [
        memoryview(array[page].view(np.uint8).reshape(-1))
        for layer in range(pool.num_layers)
        for array in (pool.k(layer), pool.v(layer))
        for page in pages_of(blocks)
    ]
    count = max(1, _PIECE_BYTES // views[0].nbytes)
    return [views[i : i + count] for i in range(0, len(views), count)]


def pages_of(blocks: int) -> list[int]:
    """Return the pages that move: none of them are neighbours."""
    return list(range(0, 2 * blocks, 2))


def move(pieces: list[list[memoryview]], call: Callable[[list[memoryview]], int]) -> None:
    """Call `sendmsg`, or the like, until all pieces are through."""
    for views in pieces:
        rest = views
        while rest:
            moved = call(rest)
            while rest and moved >= rest[0].nbytes:
                moved -= rest[0].nbytes
                rest = rest[1:]
            if moved:
                rest = [rest[0][moved:], *rest[1:]]


class _Plain:
    """Sends pages of a pool over a plain socket whenever it gets a byte."""

    def __init__(self, address: str, pool: kv.KVPool, blocks: int) -> None:
        if address.startswith("unix:"):
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(address.removeprefix("unix:"))
            self._server.listen()
            self.address = address
        else:
            self._server = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self._pieces = pieces_of(pool, blocks)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with connection, self._server:
            while connection.recv(1):
                move(self._pieces, connection.sendmsg)


def connect(address: str) -> socket.socket:
    """Return a connection to a `_Plain`."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("unix:"))
        return connection
    host, port = address.removeprefix("tcp:").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def serve() -> None:
    """Be the other process: make pools and offers as standard input says."""
    for line in sys.stdin:
        request = json.loads(line)
        blocks = request["blocks"]
        if "listen" in request:
            pool = pool_of(request["block_bytes"])
            sender = kv.PageSender(pool, listen=request["listen"])
            plain = _Plain(request["plain"], pool, blocks)
            answer: Any = plain.address
        else:
            while pool.allocator.num_free < NUM_PAGES:
                time.sleep(0.0001)
            owned = pool.allocator.alloc(2 * blocks)
            pool.allocator.free(owned[1::2])
            start = time.perf_counter()
            ticket = sender.offer(owned[::2])
            answer = [ticket.hex(), (time.perf_counter() - start) * 1e6]
        print(json.dumps(answer), flush=True)


@contextmanager
def other_process() -> Iterator[Callable[..., Any]]:
    """Start the other process, for a with block; the function asks it something."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], cwd=Path(__file__).resolve().parents[1], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
    )  # fmt: skip

    def ask(**request: Any) -> Any:
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(request), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def _rounds(ways: dict[str, Callable[[], float]], rounds: int, round_s: float) -> dict[str, Any]:
    """Alternate between ways, each of which returns the seconds of one transfer."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            end = time.perf_counter() + round_s
            taken = [way()]
            while time.perf_counter() < end:
                taken.append(way())
            times[name].append(median(taken))
    return times


def measure(folder: str, block_bytes: int, blocks: int, *, quick: bool) -> dict[str, Any]:
    """Measure one size of block and number of blocks; `folder` is empty for TCP."""
    times: dict[str, list[float]] = {}
    for number in range(1 if quick else _PAIRS):
        name = f"{folder}/{block_bytes}-{blocks}-{number}" if folder else ""
        with other_process() as ask:
            for way, taken in measure_pair(ask, name, block_bytes, blocks, quick=quick).items():
                times.setdefault(way, []).extend(taken)
    best = {name: min(times[name]) for name in ("migration", "plain")}
    num_bytes = blocks * block_bytes
    pairs = zip(times["plain"], times["migration"], strict=True)
    return {
        "transport": "unix" if folder else "tcp", "block_bytes": block_bytes, "blocks": blocks,
        **{f"{name}_us": median(times[name]) * 1e6 for name in best},
        **{f"best_{name}_us": taken * 1e6 for name, taken in best.items()},
        "migration_gb_per_s": num_bytes / best["migration"] / 1e9,
        "plain_gb_per_s": num_bytes / best["plain"] / 1e9,
        "ratio": best["plain"] / best["migration"],
        "median_ratio": median(plain / migration for plain, migration in pairs),
        **{f"{call}_call_us": median(times[call]) for call in ("offer", "pull")},
    }  # fmt: skip


def measure_pair(
    ask: Callable[..., Any], name: str, block_bytes: int, blocks: int, *, quick: bool
) -> dict[str, list[float]]:
    """Return seconds of both ways between two processes, and microseconds of calls."""
    pool = pool_of(block_bytes)
    pages, pieces = pages_of(blocks), pieces_of(pool, blocks)
    listen = [f"unix:{name}{end}" if name else "tcp:127.0.0.1:0" for end in ("pages", "plain")]
    plain = connect(ask(listen=listen[0], plain=listen[1], block_bytes=block_bytes, blocks=blocks))
    offers: list[float] = []
    pulls: list[float] = []
    with plain, kv.PageReceiver(pool) as receiver:

        def migrate() -> float:
            ticket, offer_us = ask(blocks=blocks)
            data = bytes.fromhex(ticket)
            start = time.perf_counter()
            pull = receiver.pull(data, pages)
            called = time.perf_counter()
            pull.synchronize()
            end = time.perf_counter()
            offers.append(offer_us)
            pulls.append((called - start) * 1e6)
            return end - start

        def copy() -> float:
            start = time.perf_counter()
            plain.sendall(b"1")
            move(pieces, lambda views: plain.recvmsg_into(views, 0, socket.MSG_WAITALL)[0])
            return time.perf_counter() - start

        migrate()
        copy()
        ways = {"migration": migrate, "plain": copy}
        times = _rounds(ways, 2 if quick else 5, 0.01 if quick else ROUND_S)
    return {**times, "offer": offers, "pull": pulls}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the common options."""


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    cases = ((64 << 10, 1), (1 << 20, 8)) if options.quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        for where in ("", folder):
            for block_bytes, blocks in cases:
                rows.append(measure(where, block_bytes, blocks, quick=options.quick))
    return {"rows": rows, "cpus": os.cpu_count()}


def render(report: dict[str, Any]) -> str:
    heads = (
        "transport", "blocks", "us", "GB/s", "plain GB/s", "of plain", "median",
        "pull call us", "offer call us",
    )  # fmt: skip
    cells = [
        (
            row["transport"], f"{row['blocks']} x {row['block_bytes'] >> 10} KiB",
            f"{row['best_migration_us']:.0f}", f"{row['migration_gb_per_s']:.2f}",
            f"{row['plain_gb_per_s']:.2f}", f"{100 * row['ratio']:.0f} %",
            f"{100 * row['median_ratio']:.0f} %",
            f"{row['pull_call_us']:.0f}", f"{row['offer_call_us']:.0f}",
        )
        for row in report["rows"]
    ]  # fmt: skip
    return format_table(heads, cells)


if __name__ == "__main__":
    serve()
