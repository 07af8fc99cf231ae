"""Measure pages on their way from another process: the socket engine beside a plain socket.

A block is a page of all layers, K and V. Both ways move the same bytes from the memory of the other
process to that of this one, over TCP of this machine and over a Unix socket. The plain socket calls
`sendall` and `recv_into`, 1 MiB at a time, with nothing checked and nothing agreed upon. Rounds
alternate between the two. Caller: what `offer` and `pull` take of the threads that call them.

    python scripts/bench.py migration
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
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

CASES = ((2 << 20, 1), (2 << 20, 32))
LAYER_BYTES = 64 << 10  # of a block: K and V of 16 tokens, 8 heads of 128 in bf16
NUM_PAGES = 64
ROUND_S = 0.25
_PIECE_BYTES = 1 << 20


def pool_of(block_bytes: int) -> kv.KVPool:
    """Return a pool of host memory whose pages have so many bytes, none of them zero pages."""
    pool = kv.KVPool(
        NUM_PAGES, 16, block_bytes // LAYER_BYTES, 8, 128,
        placement="pinned", device="host", layout=os.environ.get("LAYOUT") or "page_first_direct",
    )  # fmt: skip
    for layer in range(pool.num_layers):
        for array in (pool.k(layer), pool.v(layer)):
            array.view(np.uint16)[...] = np.arange(128, dtype=np.uint16)
    return pool


class _Plain:
    """Sends so many bytes whenever it is asked to, over a plain socket."""

    def __init__(self, address: str) -> None:
        if address.startswith("unix:"):
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(address.removeprefix("unix:"))
            self._server.listen()
            self.address = address
        else:
            self._server = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self._memory = memoryview(np.ones(NUM_PAGES * max(b for b, _ in CASES), np.uint8))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection:
                while head := connection.recv(8):
                    count = struct.unpack("<Q", head)[0]
                    for start in range(0, count, _PIECE_BYTES):
                        connection.sendall(self._memory[start : min(count, start + _PIECE_BYTES)])


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
    senders: dict[tuple[str, int], tuple[kv.PageSender, kv.KVPool]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "plain" in request:
            answer = _Plain(request["plain"]).address
        else:
            key = request["listen"], request["block_bytes"]
            if key not in senders:
                pool = pool_of(request["block_bytes"])
                senders[key] = kv.PageSender(pool, listen=request["listen"]), pool
            sender, pool = senders[key]
            while pool.allocator.num_free < request["blocks"]:
                time.sleep(0.0002)
            pages = pool.allocator.alloc(request["blocks"])
            start = time.perf_counter()
            ticket = sender.offer(pages)
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


def measure(ask: Callable[..., Any], folder: Path, transport: str, *, quick: bool) -> Iterator[Any]:
    """Yield a row for each size of block and number of blocks."""

    def listen(name: str) -> str:
        return f"unix:{folder}/{name}" if transport == "unix" else "tcp:127.0.0.1:0"

    plain = connect(ask(plain=listen("plain")))
    cases = ((64 << 10, 1), (1 << 20, 8)) if quick else CASES
    for block_bytes, blocks in cases:
        pool = pool_of(block_bytes)
        num_bytes = blocks * block_bytes
        pages = list(range(blocks)) if os.environ.get("LAYOUT") else list(range(0, 2 * blocks, 2))
        target = memoryview(np.ones(NUM_PAGES * block_bytes, np.uint8))
        offers: list[float] = []
        pulls: list[float] = []
        address = listen(f"pages{block_bytes}")
        with kv.PageReceiver(pool) as receiver:

            def migrate() -> float:
                ticket, offer_us = ask(listen=address, block_bytes=block_bytes, blocks=blocks)
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
                plain.sendall(struct.pack("<Q", num_bytes))
                received = 0
                while received < num_bytes:
                    received += plain.recv_into(
                        target[received : min(num_bytes, received + _PIECE_BYTES)]
                    )
                return time.perf_counter() - start

            migrate()
            times = _rounds(
                {"migration": migrate, "plain": copy},
                2 if quick else 7,
                0.01 if quick else ROUND_S,
            )
        best = {name: min(taken) for name, taken in times.items()}
        yield {
            "transport": transport, "block_bytes": block_bytes, "blocks": blocks,
            **{f"{name}_us": median(taken) * 1e6 for name, taken in times.items()},
            **{f"best_{name}_us": taken * 1e6 for name, taken in best.items()},
            "migration_gb_per_s": num_bytes / best["migration"] / 1e9,
            "plain_gb_per_s": num_bytes / best["plain"] / 1e9,
            "ratio": best["plain"] / best["migration"],
            "offer_call_us": median(offers), "pull_call_us": median(pulls),
        }  # fmt: skip
    plain.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the common options."""


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, other_process() as ask:
        for transport in ("tcp", "unix"):
            rows += measure(ask, Path(folder), transport, quick=options.quick)
    return {"rows": rows, "cpus": os.cpu_count()}


def render(report: dict[str, Any]) -> str:
    heads = (
        "transport", "blocks", "us", "GB/s", "plain GB/s", "of plain", "pull call us",
        "offer call us",
    )  # fmt: skip
    cells = [
        (
            row["transport"], f"{row['blocks']} x {row['block_bytes'] >> 10} KiB",
            f"{row['best_migration_us']:.0f}", f"{row['migration_gb_per_s']:.2f}",
            f"{row['plain_gb_per_s']:.2f}", f"{100 * row['ratio']:.0f} %",
            f"{row['pull_call_us']:.0f}", f"{row['offer_call_us']:.0f}",
        )
        for row in report["rows"]
    ]  # fmt: skip
    return format_table(heads, cells)


if __name__ == "__main__":
    serve()
