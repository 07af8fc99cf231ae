"""Measure blocks put to and got from servers of this machine, beside sockets that move the same.

Blocks of 64 KiB, 1 MiB and 2 MiB, one or 32 in a call, in two pieces of memory each (K and V), all
over loopback, from and to 64 MiB of memory. `socket` is another process that takes and sends as
many blocks on request, as fast as Python's sockets do that. `backend` is what a `SharedStore` has
below it, and `SharedStore` the whole, with checksums. `Mooncake` is its own batch calls, on
registered memory: of the blocks alone, and in `Mooncake asked` after the call that asks which keys
are known, without which a put does not tell. kvcupy's objects have a header of 256 bytes more. Each
round measures every candidate of a case, puts of new keys and then gets of the same; a row has the
best and the median round. Every block that was got is compared once with what was put.

A server that is not installed is left out: redis-server, and a wheel of Mooncake with libibverbs1.

    python scripts/bench.py shared_servers --json build/bench_shared_servers.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common.tests import use_tests

import kvcupy as kv
from kvcupy.bench.report import format_table
from kvcupy.bench.timers import interleave
from kvcupy.remote.stores import redis
from kvcupy.remote.wire import WirePages

PAGE = {"page_size": 16, "num_kv_heads": 8, "head_dim": 128, "layout": "page_first_direct"}
LAYER_BYTES = 2 * 16 * 8 * 128 * 2
BLOCK_KIB = (64, 1024, 2048)
BATCHES = (1, 32)
SECONDS = 600.0  # of a call, at most
CALL_BYTES = 64 << 20  # moved in a round, in calls of one batch each
BASELINES = {
    "redis tcp backend": "socket tcp", "redis unix backend": "socket unix",
    "redis tcp SharedStore": "socket tcp", "redis unix SharedStore": "socket unix",
    "Mooncake asked": "Mooncake", "Mooncake backend": "Mooncake",
    "Mooncake SharedStore": "Mooncake",
}  # fmt: skip

Times = tuple[float, float]  # seconds of puts and of gets


class Blocks:
    """Pages to put, and pages to get into, of two pools: those of one call after the other."""

    def __init__(self, block_kib: int, batch: int, round_bytes: int) -> None:
        self.num_bytes, self.batch = block_kib << 10, batch
        count = max(batch, round_bytes // self.num_bytes)
        self.calls = [slice(i, i + batch) for i in range(0, count, batch)]
        layers = self.num_bytes // LAYER_BYTES
        shape = {**PAGE, "num_layers": layers, "device": "host", "placement": "pageable"}
        self.source, self.target = kv.KVPool(count, **shape), kv.KVPool(count, **shape)
        words = np.random.default_rng(0).integers(0, 2**62, self.num_bytes // 8, np.int64)
        for page in range(count):
            WirePages(self.source).write_from(page, (words + page).tobytes())
        self.sent = [WirePages(self.source).pieces(page) for page in range(count)]
        self.received = [WirePages(self.target).pieces(page) for page in range(count)]

    def check(self, name: str) -> None:
        """Raise unless the target has what the source has; and wipe it."""
        for sent, received in zip(self.sent, self.received, strict=True):
            for one, other in zip(sent, received, strict=True):
                if one != other:
                    raise AssertionError(f"{name}: other bytes than were put")
                np.frombuffer(other, np.uint8)[:] = 0


def hashes(count: int) -> list[int]:
    """Return new hashes."""
    return [int.from_bytes(os.urandom(16), "little") | 1 << 127 for _ in range(count)]


def timed(
    blocks: Blocks, put: Callable[[list[Any], slice], Any], get: Callable[[list[Any], slice], Any],
    new: Callable[[int], list[Any]],
) -> Times:  # fmt: skip
    """Return the seconds of all puts of a round, and of the gets of what they have put.

    Parameters
    ----------
    put, get : called with names of blocks, and with the pages that these have
    new : returns names that were not used before
    """
    calls = [(new(blocks.batch), pages) for pages in blocks.calls]
    start = time.perf_counter()
    for names, pages in calls:
        put(names, pages)
    between = time.perf_counter()
    for names, pages in calls:
        get(names, pages)
    return between - start, time.perf_counter() - between


# --- Sockets ---


def serve(listener: socket.socket, num_bytes: int, count: int) -> None:
    """Take and send blocks in turn: a put is answered with a byte, a get with the next block."""
    connection, _ = listener.accept()
    if listener.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    blocks = itertools.cycle([memoryview(bytearray(num_bytes)) for _ in range(count)])
    request = bytearray(1)
    while connection.recv_into(request):
        block = next(blocks)
        if request == b"P":
            receive(connection, [block])
            connection.sendall(b"+")
        else:
            connection.sendall(block)


def receive(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        rest = piece
        while rest:
            rest = rest[connection.recv_into(rest) :]


def send(connection: socket.socket, pieces: Sequence[Any]) -> None:
    rest = connection.sendmsg(pieces)
    for piece in pieces:
        if rest < len(piece):
            connection.sendall(memoryview(piece)[rest:])
        rest = max(0, rest - len(piece))


@contextmanager
def socket_engine(kind: str, blocks: Blocks, folder: Path) -> Iterator[Callable[[], Times]]:
    """Yield what moves a round of blocks to another process and back."""
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    address: Any = str(folder / f"{time.monotonic_ns()}") if kind == "unix" else ("127.0.0.1", 0)
    with socket.socket(family) as listener, socket.socket(family) as connection:
        listener.bind(address)
        listener.listen()
        peer = os.fork()
        if peer == 0:
            with suppress(BaseException):
                serve(listener, blocks.num_bytes, len(blocks.sent))
            os._exit(0)
        try:
            connection.connect(listener.getsockname())
            if kind == "tcp":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def put(names: list[Any], pages: slice) -> None:
                for pieces in blocks.sent[pages]:
                    send(connection, [b"P", *pieces])
                receive(connection, [memoryview(bytearray(blocks.batch))])

            def get(names: list[Any], pages: slice) -> None:
                connection.sendall(b"G" * blocks.batch)
                for pieces in blocks.received[pages]:
                    receive(connection, pieces)

            yield lambda: timed(blocks, put, get, lambda count: [])
        finally:
            connection.close()
            os.kill(peer, signal.SIGKILL)
            os.waitpid(peer, 0)


# --- Servers ---


def backend_round(backend: Any, blocks: Blocks) -> Callable[[], Times]:
    """Return what moves a round of blocks through a backend."""
    header = [b"header" * 16] * blocks.batch

    def put(keys: list[Any], pages: slice) -> None:
        sent = blocks.sent[pages]
        require(backend.put(keys, sent, header, time.monotonic() + SECONDS), "stored")

    def get(keys: list[Any], pages: slice) -> None:
        received = blocks.received[pages]
        require(backend.get(keys, received, time.monotonic() + SECONDS), header[0])

    def measure() -> Times:
        times = timed(blocks, put, get, lambda count: [os.urandom(32) for _ in range(count)])
        backend.remove(time.monotonic() + SECONDS)
        return times

    return measure


def store_round(url: str, blocks: Blocks, stack: ExitStack, **options: Any) -> Callable[[], Times]:
    """Return what moves a round of blocks through a `SharedStore`."""
    stores = [
        stack.enter_context(
            kv.SharedStore.open(url, pool, deadline_s=SECONDS, tenant="store", **options)
        )
        for pool in (blocks.source, blocks.target)
    ]

    def put(names: list[Any], pages: slice) -> None:
        require(stores[0].put(names, range(pages.start, pages.stop)), "stored")

    def get(names: list[Any], pages: slice) -> None:
        require(stores[1].get(names, range(pages.start, pages.stop)), True)

    def measure() -> Times:
        times = timed(blocks, put, get, hashes)
        stores[0].remove()
        return times

    return measure


def mooncake_round(
    url: str, blocks: Blocks, stack: ExitStack, *, asks: bool
) -> Callable[[], Times]:
    """Return what moves a round of blocks by Mooncake's own calls.

    `asks`: whether each put asks first which keys are known.
    """
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master = url.removeprefix("mooncake://")
    require([store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)], 0)
    stack.callback(store.close)
    for pool in (blocks.source, blocks.target):
        for part in pool.parts:
            start, stop = part.byte_range()
            require([store.register_buffer(start, stop - start)], 0)
    sent, sizes = addresses(blocks.source)
    received, _ = addresses(blocks.target)

    def put(keys: list[Any], pages: slice) -> None:
        if asks:
            require(store.batch_is_exist(keys), 0)
        require(store.batch_put_from_multi_buffers(keys, sent[pages], sizes[pages]), 0)

    def measure() -> Times:
        times = timed(
            blocks,
            put,
            lambda keys, pages: require(
                store.batch_get_into_multi_buffers(keys, received[pages], sizes[pages]),
                blocks.num_bytes,
            ),
            lambda count: [os.urandom(16).hex() for _ in range(count)],
        )
        store.remove_by_regex("^[0-9a-f]{32}$", True)
        return times

    return measure


def addresses(pool: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return the addresses and lengths of the pieces of all pages."""
    wire = WirePages(pool)
    of_pages = [wire.addresses(page) for page in range(pool.num_pages)]
    return [pointers for pointers, _ in of_pages], [sizes for _, sizes in of_pages]


def require(results: Sequence[Any], expected: Any) -> None:
    if any(result != expected for result in results):
        raise RuntimeError(f"expected {expected!r} each, got {results}")


@contextmanager
def servers(stack: ExitStack, folder: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the servers that can be started, by name."""
    use_tests("cache", "interop")
    import mooncake_servers
    import redis_server

    started: dict[str, Any] = {}
    if redis_server.PROGRAM is None:
        notes.append("redis: there is no redis-server")
    else:
        started["redis"] = stack.enter_context(redis_server.servers_in(folder))()
    if mooncake_servers.PROBLEM:
        notes.append(f"Mooncake: {mooncake_servers.PROBLEM}")
    else:
        started["mooncake"] = stack.enter_context(mooncake_servers.servers_in(folder))()
        started["mooncake"].add_node(1 << 30)
    yield started


def candidates(
    blocks: Blocks, started: dict[str, Any], folder: Path, stack: ExitStack
) -> dict[str, Callable[[], Times]]:
    """Return what is measured of a case, by name."""
    rounds: dict[str, Callable[[], Times]] = {}
    for kind in ("tcp", "unix"):
        rounds[f"socket {kind}"] = stack.enter_context(socket_engine(kind, blocks, folder))
    if "redis" in started:
        for kind, url in (("tcp", started["redis"].url), ("unix", started["redis"].unix_url)):
            backend = redis.open_backend(
                url, WirePages(blocks.source), namespace=kind.encode(), capacity_bytes=None,
                deadline=time.monotonic() + 60,
            )  # fmt: skip
            stack.callback(backend.close)
            rounds[f"redis {kind} backend"] = backend_round(backend, blocks)
            rounds[f"redis {kind} SharedStore"] = store_round(url, blocks, stack)
    if "mooncake" in started:
        from kvcupy.remote.stores import mooncake

        url = started["mooncake"].url
        rounds["Mooncake"] = mooncake_round(url, blocks, stack, asks=False)
        rounds["Mooncake asked"] = mooncake_round(url, blocks, stack, asks=True)
        other = mooncake.open_backend(
            url, WirePages(blocks.source), namespace=b"backend", capacity_bytes=None,
            deadline=time.monotonic() + 60, host="127.0.0.1",
        )  # fmt: skip
        stack.callback(other.close)
        rounds["Mooncake backend"] = backend_round(other, blocks)
        rounds["Mooncake SharedStore"] = store_round(url, blocks, stack, host="127.0.0.1")
    return rounds


def case_rows(
    block_kib: int, batch: int, started: dict[str, Any], folder: Path, *, quick: bool
) -> list[dict[str, Any]]:
    """Measure all candidates with blocks of a size, some in a call; return a row of each."""
    num_bytes = CALL_BYTES >> 5 if quick else CALL_BYTES
    blocks = Blocks(block_kib, batch, num_bytes)
    with ExitStack() as stack:
        measured = candidates(blocks, started, folder, stack)
        for name, measure in measured.items():
            measure()
            if "socket" not in name:
                blocks.check(name)
        samples = interleave(measured, 2 if quick else 9, seconds=0.0 if quick else 20.0)
    moved = blocks.num_bytes * len(blocks.sent)
    rows = []
    for name, times in samples.items():
        row: dict[str, Any] = {"candidate": name, "block_kib": block_kib, "batch": batch}
        for call, seconds in zip(("put", "get"), zip(*times, strict=True), strict=True):
            row[f"{call}_gb_per_s"] = moved / min(seconds) / 1e9
            row[f"median_{call}_gb_per_s"] = moved / median(seconds) / 1e9
        rows.append(row)
    by_name = {row["candidate"]: row for row in rows}
    for row in rows:
        baseline = by_name.get(BASELINES.get(row["candidate"], ""))
        for call in ("put", "get") if baseline is not None else ():
            key = f"{call}_gb_per_s"
            row[f"{call}_percent"] = 100 * row[key] / baseline[key]
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the common options."""


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        with servers(stack, folder, notes) as started:
            for block_kib in BLOCK_KIB[:1] if options.quick else BLOCK_KIB:
                for batch in BATCHES[-1:] if options.quick else BATCHES:
                    rows += case_rows(block_kib, batch, started, folder, quick=options.quick)
    return {"rows": rows, "notes": notes}


def render(report: dict[str, Any]) -> str:
    columns = ("blocks", "candidate", "put GB/s", "get GB/s", "put %", "get %", "of")
    cells = [
        (
            f"{row['block_kib']} KiB x {row['batch']}", row["candidate"], row["put_gb_per_s"],
            row["get_gb_per_s"], row.get("put_percent"), row.get("get_percent"),
            BASELINES.get(row["candidate"], ""),
        )
        for row in report["rows"]
    ]  # fmt: skip
    return "\n".join([format_table(columns, cells), *report["notes"]])
