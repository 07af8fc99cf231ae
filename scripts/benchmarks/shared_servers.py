"""Measure puts of blocks into a shared store, and gets.

Blocks of 64 KiB, 1 MiB and 2 MiB, one or 32 in a call, in two pieces of memory each (K and V). Each
round measures every candidate of a case, puts of new keys and then gets of the same; a row has the
best and the median round, and the share of a baseline that moves the same bytes without kvcupy.
Every block that was got is compared once with what was put.

In memory, from and to 128 MiB, which no processor's cache holds, and of 2 MiB also in 64 pieces:

memcpy        NumPy, from pages to pages, in one thread
checksum      of the pages alone, in one thread
shm           kv.SharedStore, with as many threads as the report says. It is full, so that each put
              evicts. "shm, 1 thread": in the caller's alone; "shm unverified, 1 thread": without
              checksums too; "shm encrypted": with `encryption_key`, beside the plain store

With `--servers`, over loopback, from and to 64 MiB:

socket        another process that takes and sends as many blocks on request
backend       the backend of a `SharedStore`; `SharedStore`: the whole, with checksums;
              `encrypted`: with `encryption_key`, beside the plain store
Mooncake      its own batch calls, on registered memory: of the blocks alone, and in `Mooncake
              asked` after the call that asks which keys are known, without which a put does not
              tell. kvcupy's objects have a header of 256 bytes more.

A server that is not installed is left out: redis-server, and a wheel of Mooncake with libibverbs1.

    python scripts/bench.py shared --json build/bench_shared.json
    python scripts/bench.py shared --servers --json build/bench_shared_servers.json
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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common.report import format_table
from common.tests import use_tests
from common.timers import interleave

import kvcupy as kv
from kvcupy.remote.stores.shm import default_threads
from kvcupy.remote.wire import WirePages, checksum

PAGE = {"page_size": 16, "num_kv_heads": 8, "head_dim": 128}
LAYOUTS = ("page_first_direct", "layer_first")
LAYER_BYTES = 2 * 16 * 8 * 128 * 2
BLOCK_KIB = (64, 1024, 2048)
BATCHES = (1, 32)
SECONDS = 600.0  # of a call, at most
SERVER_BYTES, MEMORY_BYTES = 64 << 20, 128 << 20  # moved in a round, in calls of one batch each
BASELINES = {
    "redis tcp backend": "socket tcp", "redis unix backend": "socket unix",
    "redis tcp SharedStore": "socket tcp", "redis unix SharedStore": "socket unix",
    "Mooncake asked": "Mooncake", "Mooncake backend": "Mooncake",
    "Mooncake SharedStore": "Mooncake",
    "checksum": "memcpy", "shm": "memcpy", "shm, 1 thread": "memcpy",
    "shm unverified, 1 thread": "memcpy",
    "shm encrypted": "shm", "shm encrypted, 1 thread": "shm, 1 thread",
    "redis tcp encrypted": "redis tcp SharedStore",
    "redis unix encrypted": "redis unix SharedStore",
    "Mooncake encrypted": "Mooncake SharedStore",
}  # fmt: skip

KEY = bytes(range(32))

MEMORY_STORES: dict[str, dict[str, Any]] = {
    "shm": {},
    "shm, 1 thread": {"threads": 1},
    "shm unverified, 1 thread": {"threads": 1, "checksum": "none"},
    "shm encrypted": {"encryption_key": KEY},
    "shm encrypted, 1 thread": {"threads": 1, "encryption_key": KEY},
}

Times = tuple[float, float]  # seconds of puts and of gets


class Blocks:
    """Pages to put, and pages to get into, in two pools; each call takes the next ones."""

    def __init__(
        self, block_kib: int, batch: int, round_bytes: int, layout: str = LAYOUTS[0]
    ) -> None:
        self.num_bytes, self.batch = block_kib << 10, batch
        count = max(batch, round_bytes // self.num_bytes)
        self.calls = [slice(i, i + batch) for i in range(0, count, batch)]
        layers = self.num_bytes // LAYER_BYTES
        shape = {**PAGE, "num_layers": layers, "device": "host", "placement": "pageable"}
        shape["layout"] = layout
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


# --- Memory ---


def copy_round(blocks: Blocks) -> Callable[[], Times]:
    """Return a measurement of a round of blocks that is copied twice."""
    pairs = [
        [
            (np.frombuffer(b, np.uint8), np.frombuffer(a, np.uint8))
            for a, b in zip(*pieces, strict=True)
        ]
        for pieces in zip(blocks.sent, blocks.received, strict=True)
    ]

    def copy(names: list[Any], pages: slice) -> None:
        for block in pairs[pages]:
            for target, source in block:
                np.copyto(target, source)

    return lambda: timed(blocks, copy, copy, lambda count: [])


def checksum_round(blocks: Blocks) -> Callable[[], Times]:
    """Return a measurement of a round of blocks whose checksums are calculated twice."""

    def verify(names: list[Any], pages: slice) -> None:
        for pieces in blocks.sent[pages]:
            checksum(pieces)

    return lambda: timed(blocks, verify, verify, lambda count: [])


def memory_candidates(blocks: Blocks, stack: ExitStack) -> dict[str, Callable[[], Times]]:
    """Return the measurements of a case in memory, by name."""
    rounds = {"memcpy": copy_round(blocks), "checksum": checksum_round(blocks)}
    capacity = len(blocks.sent) * (blocks.num_bytes + 4096) + 2**16
    for name, options in MEMORY_STORES.items():
        url = f"shm:kvcupy-bench-{os.getpid()}-{len(rounds)}"
        rounds[name] = store_round(
            url, blocks, stack, stays=True, capacity_bytes=capacity, **options
        )
    return rounds


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


def store_round(
    url: str, blocks: Blocks, stack: ExitStack, *, stays: bool = False, **options: Any
) -> Callable[[], Times]:
    """Return what moves a round of blocks through a `SharedStore`.

    `stays`: blocks stay until the end; the next round evicts them.
    """
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
        if not stays:
            stores[0].remove()
        return times

    if stays:
        stack.callback(stores[0].remove)
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
    use_tests("remote")
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
    blocks: Blocks, stack: ExitStack, started: dict[str, Any], folder: Path
) -> dict[str, Callable[[], Times]]:
    """Return what is measured of a case, by name."""
    rounds: dict[str, Callable[[], Times]] = {}
    for kind in ("tcp", "unix"):
        rounds[f"socket {kind}"] = stack.enter_context(socket_engine(kind, blocks, folder))
    if "redis" in started:
        for kind, url in (("tcp", started["redis"].url), ("unix", started["redis"].unix_url)):
            from kvcupy.remote.stores import redis  # needs redis-py

            backend = redis.open_backend(
                url, WirePages(blocks.source), namespace=kind.encode(), capacity_bytes=None,
                deadline=time.monotonic() + 60,
            )  # fmt: skip
            stack.callback(backend.close)
            rounds[f"redis {kind} backend"] = backend_round(backend, blocks)
            rounds[f"redis {kind} SharedStore"] = store_round(url, blocks, stack)
            rounds[f"redis {kind} encrypted"] = store_round(url, blocks, stack, encryption_key=KEY)
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
        rounds["Mooncake encrypted"] = store_round(
            url, blocks, stack, host="127.0.0.1", encryption_key=KEY
        )
    return rounds


def case_rows(
    blocks: Blocks, layout: str,
    open_all: Callable[[Blocks, ExitStack], dict[str, Callable[[], Times]]], *, quick: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure all candidates with the blocks of a case; return a row of each."""
    with ExitStack() as stack:
        measured = open_all(blocks, stack)
        for name, measure in measured.items():
            measure()
            if "socket" not in name and name != "checksum":
                blocks.check(name)
        samples = interleave(measured, 2 if quick else 9, seconds=0.0 if quick else 20.0)
    moved = blocks.num_bytes * len(blocks.sent)
    rows = []
    for name, times in samples.items():
        row: dict[str, Any] = {
            "candidate": name, "block_kib": blocks.num_bytes >> 10, "batch": blocks.batch,
            "layout": layout,
        }  # fmt: skip
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
    parser.add_argument("--servers", action="store_true", help="servers, not memory")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    num_bytes = SERVER_BYTES if options.servers else MEMORY_BYTES
    sizes = BLOCK_KIB[:1] if options.quick else BLOCK_KIB
    cases = [(size, LAYOUTS[0]) for size in sizes]
    if not options.servers and not options.quick:
        cases.append((BLOCK_KIB[-1], LAYOUTS[1]))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        open_all = memory_candidates
        if options.servers:
            started = stack.enter_context(servers(stack, Path(name), notes))
            open_all = partial(candidates, started=started, folder=Path(name))
        for block_kib, layout in cases:
            for batch in BATCHES[-1:] if options.quick else BATCHES:
                moved = num_bytes >> 5 if options.quick else num_bytes
                blocks = Blocks(block_kib, batch, moved, layout)
                rows += case_rows(blocks, layout, open_all, quick=options.quick)
    report = {"rows": rows, "notes": notes}
    if not options.servers:
        report |= {"checksum": "xxh3_64", "threads": default_threads()}
    return report


def render(report: dict[str, Any]) -> str:
    columns = ("blocks", "candidate", "put GB/s", "get GB/s", "put %", "get %", "of")
    cells = [
        (
            f"{row['block_kib']} KiB x {row['batch']}, {row['layout']}", row["candidate"],
            row["put_gb_per_s"], row["get_gb_per_s"], row.get("put_percent"),
            row.get("get_percent"), BASELINES.get(row["candidate"], ""),
        )
        for row in report["rows"]
    ]  # fmt: skip
    return "\n".join([format_table(columns, cells), *report["notes"]])
