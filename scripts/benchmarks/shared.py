"""Measure what it takes to put blocks into a shared store and to get them, against memcpy.

Blocks of 64 KiB, 1 MiB and 2 MiB, one and 32 a call, from pages in "page_first_direct"; those of
2 MiB from "layer_first" too, whose pages are 64 pieces. All engines take turns in each round, so
that what else the machine does meets all of them. Each call takes the next pages and blocks of 128
MiB (--mb), which no processor's cache holds. Puts are of blocks that the store does not have, into
one that is full, so that each evicts. The blocks of one call are compared with what was put, before
a case is measured.

memcpy     NumPy, from pages to pages, in one thread
checksum   of the pages alone, in one thread
shm        kv.SharedStore in memory: "shm", as it is opened by default, with as many threads as the
           report says; "shm, 1 thread" in the caller's alone; "shm unverified, 1 thread" without
           checksums too

GB/s counts a block once. Best and median of the rounds, each of which repeats a call for a while;
p50 and p99 are of single calls. CPU is that of the calling thread (of all threads in the report's
`process_cpu`), and what a block of 64 KiB costs more than its copy is the overhead of a call.

    python scripts/bench.py shared --json build/bench_shared.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import numpy as np

import kvcupy as kv
from kvcupy.bench.report import format_table
from kvcupy.remote.stores.shm import default_threads
from kvcupy.remote.wire import DEFAULT_CHECKSUM, WirePages, checksum

KIB = 1024
# Tokens per page of 32 layers of heads of 64 elements in fp16, 16 KiB a head for 64 tokens.
BLOCKS = {64 * KIB: (4, 2), 1024 * KIB: (16, 8), 2048 * KIB: (16, 16)}  # page size, heads
LAYERS, WIDTH = 32, 64
COUNTS = (1, 32)
ROUND_S, QUICK_ROUND_S = 0.25, 0.02
ROUNDS, QUICK_ROUNDS = 5, 2
MB, QUICK_MB = 128, 2


@dataclass(frozen=True)
class Case:
    """Blocks of one length, so many a call."""

    block_bytes: int
    count: int
    layout: str = "page_first_direct"

    @property
    def name(self) -> str:
        size = self.block_bytes // KIB
        text = f"{size} KiB" if size < KIB else f"{size // KIB} MiB"
        layout = "" if self.layout == "page_first_direct" else f", {self.layout}"
        return f"{text} x{self.count}{layout}"

    def pool(self, num_bytes: int) -> kv.KVPool:
        """Return a pool with pages of so many bytes to put, and as many to get into.

        All pages are written: the system keeps one page of zeros for all that were not, which stays
        in the processor's cache.
        """
        page_size, heads = BLOCKS[self.block_bytes]
        pool = kv.KVPool(
            2 * self.count * max(1, num_bytes // (self.block_bytes * self.count)),
            page_size, LAYERS, heads, WIDTH,
            dtype="fp16", layout=self.layout, placement="pageable", device="host",
        )  # fmt: skip
        if pool.page_bytes != self.block_bytes:
            raise AssertionError(f"{self.name}: a page has {pool.page_bytes} bytes")
        words = np.random.default_rng(0).integers(0, 2**62, self.block_bytes // 8, np.int64)
        for page in range(pool.num_pages):
            WirePages(pool).write_from(page, words + page)
        return pool

    def groups(self, pool: kv.KVPool) -> list[tuple[range, range]]:
        """Return the pages of each call: those that are put, and those that are got into."""
        half = pool.num_pages // 2
        return [
            (range(first, first + self.count), range(half + first, half + first + self.count))
            for first in range(0, half, self.count)
        ]


class Engine(Protocol):
    """What moves blocks, those of one group of pages a call, in turn."""

    def put(self) -> object:
        """Put the blocks of the next pages, which the engine does not have."""

    def get(self) -> object:
        """Get blocks that were put, the oldest first, into the next pages."""


class Copy:
    """NumPy's copies between pages, which is what the fastest store could do."""

    def __init__(self, case: Case, pool: kv.KVPool) -> None:
        pages = WirePages(pool)

        def arrays(group: range) -> list[Any]:
            return [np.frombuffer(piece, np.uint8) for n in group for piece in pages.pieces(n)]

        pairs = [
            list(zip(arrays(there), arrays(here), strict=True)) for here, there in case.groups(pool)
        ]
        self._groups = itertools.cycle(pairs)

    def put(self) -> None:
        for there, here in next(self._groups):
            np.copyto(there, here)

    get = put


class Checksum:
    """Checksums of pages: what verifying costs alone."""

    def __init__(self, case: Case, pool: kv.KVPool) -> None:
        pages = WirePages(pool)
        self._groups = itertools.cycle(
            [[pages.pieces(n) for n in here] for here, _ in case.groups(pool)]
        )

    def put(self) -> None:
        for block in next(self._groups):
            checksum(block)

    get = put


class Store:
    """A kv.SharedStore with room for the pages that are put, or more."""

    def __init__(self, case: Case, pool: kv.KVPool, store: kv.SharedStore) -> None:
        self._count, self._store = case.count, store
        groups = case.groups(pool)
        self._pages = itertools.cycle(groups)
        self._numbers = itertools.count()
        self._stored: deque[list[int]] = deque(maxlen=max(1, len(groups) // 2))

    def put(self) -> None:
        # Hashes that fill 128 bits; those of tokens would cost more than a small block.
        first = 2**127 + next(self._numbers) * self._count
        hashes = list(range(first, first + self._count))
        outcomes = self._store.put(hashes, next(self._pages)[0])
        if outcomes != ["stored"] * self._count:
            raise AssertionError(f"expected all blocks stored, got {outcomes}")
        self._stored.append(hashes)

    def get(self) -> None:
        hashes = self._stored[0]
        self._stored.rotate(-1)
        there = self._store.get(hashes, next(self._pages)[1])
        if not all(there):
            raise AssertionError(f"expected all blocks, got {there}")


@contextmanager
def memory_store(case: Case, pool: kv.KVPool, **options: Any) -> Iterator[Store]:
    """Open a store in memory with room for all that is put, and remove it at the end."""
    name = f"shm:kvcupy-bench-{os.getpid()}-" + "-".join(map(str, options.values()))
    capacity = pool.num_pages // 2 * (case.block_bytes + 4096) + 2**16
    with kv.SharedStore.open(name, pool, capacity_bytes=capacity, **options) as store:
        try:
            yield Store(case, pool, store)
        finally:
            store.remove()


@contextmanager
def copy_engine(case: Case, pool: kv.KVPool) -> Iterator[Engine]:
    yield Copy(case, pool)


@contextmanager
def checksum_engine(case: Case, pool: kv.KVPool) -> Iterator[Engine]:
    yield Checksum(case, pool)


ENGINES: dict[str, Callable[[Case, kv.KVPool], Any]] = {
    "memcpy": copy_engine,
    "checksum": checksum_engine,
    "shm": memory_store,
    "shm, 1 thread": lambda case, pool: memory_store(case, pool, threads=1),
    "shm unverified, 1 thread": lambda case, pool: memory_store(
        case, pool, threads=1, checksum="none"
    ),
}
"""What is measured, by name: each gives an `Engine` for a case, within a with block."""


@dataclass
class Times:
    """Seconds a call: of rounds, of single calls, and of the processor, for the caller and all."""

    rounds_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    process_cpu_s: list[float] = field(default_factory=list)


def measure(case: Case, engines: dict[str, Engine], rounds: int, round_s: float) -> dict[str, Any]:
    """Return the times of puts and gets by engine, which take turns."""
    times = {(name, call): Times() for name in engines for call in ("put", "get")}
    for _ in range(rounds):
        for name, engine in engines.items():
            for call in ("put", "get"):
                repeat(getattr(engine, call), times[name, call], round_s)
    return times


def repeat(function: Callable[[], object], times: Times, seconds: float) -> None:
    """Call a function for a while, as one round."""
    durations = []
    cpu, process_cpu = time.thread_time(), time.process_time()
    begin = now = time.perf_counter()
    while now - begin < seconds:
        function()
        before, now = now, time.perf_counter()
        durations.append(now - before)
    times.cpu_s.append((time.thread_time() - cpu) / len(durations))
    times.process_cpu_s.append((time.process_time() - process_cpu) / len(durations))
    times.rounds_s.append((now - begin) / len(durations))
    times.calls_s += durations


def check(case: Case, name: str, engine: Engine, pool: kv.KVPool) -> None:
    """Put blocks and get them, and compare those of one call."""
    pages = WirePages(pool)
    here, there = case.groups(pool)[0]
    engine.put()
    # Each engine takes pages in turn: until it gets into those of the first call.
    for _ in range(len(case.groups(pool)) - 1 if isinstance(engine, Store) else 0):
        next(engine._pages)
    engine.get()
    blocks = [bytearray(case.block_bytes) for _ in range(2)]
    for put, got in zip(here, there, strict=True) if name != "checksum" else ():
        for block, page in zip(blocks, (put, got), strict=True):
            pages.read_into(page, block)
        if blocks[0] != blocks[1]:
            raise AssertionError(f"{name}, {case.name}: block {put} is not what was put")
    for _ in range(2 * len(case.groups(pool))):  # until a store is full, and memory was touched
        engine.put()


def rows_of(case: Case, times: dict[tuple[str, str], Times]) -> list[dict[str, Any]]:
    """Return a row for each engine."""
    gb = case.block_bytes * case.count / 1e9
    rows = []
    for name in dict.fromkeys(name for name, _ in times):
        row: dict[str, Any] = {"case": case.name, "engine": name, "blocks": case.count}
        for call in ("put", "get"):
            of_call, of_copy = times[name, call], times["memcpy", call]
            best = min(of_call.rounds_s)
            row |= {
                f"{call}_gb_per_s": gb / best,
                f"{call}_median_gb_per_s": gb / median(of_call.rounds_s),
                f"{call}_percent_of_memcpy": 100 * min(of_copy.rounds_s) / best,
                f"{call}_p50_us": 1e6 * float(np.percentile(of_call.calls_s, 50)),
                f"{call}_p99_us": 1e6 * float(np.percentile(of_call.calls_s, 99)),
                f"{call}_us_per_block": 1e6 * best / case.count,
                f"{call}_cpu_us_per_block": 1e6 * min(of_call.cpu_s) / case.count,
                f"{call}_process_cpu_us_per_block": 1e6 * min(of_call.process_cpu_s) / case.count,
                f"{call}_median_percent_of_memcpy": 100
                * median(
                    copied / taken
                    for copied, taken in zip(of_copy.rounds_s, of_call.rounds_s, strict=True)
                ),
            }
        rows.append(row)
    return rows


def cases(*, quick: bool) -> list[Case]:
    """Return what is measured."""
    sizes = list(BLOCKS)[: 1 if quick else None]
    found = [Case(size, count) for size in sizes for count in COUNTS]
    return found if quick else [*found, *(Case(2048 * KIB, n, "layer_first") for n in COUNTS)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engines to measure, and for how long."""
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--mb", type=int, default=MB, help="of pages that are put in turn")
    parser.add_argument("--rounds", type=int, help=f"of each case (default {ROUNDS})")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    round_s = QUICK_ROUND_S if options.quick else ROUND_S
    num_bytes = (QUICK_MB if options.quick else options.mb) << 20
    names = list(dict.fromkeys(["memcpy", *options.engines]))
    rows = []
    for case in cases(quick=options.quick):
        pool = case.pool(num_bytes)
        with ExitStack() as stack:
            engines = {name: stack.enter_context(ENGINES[name](case, pool)) for name in names}
            for name, engine in engines.items():
                check(case, name, engine, pool)
            rows += rows_of(case, measure(case, engines, rounds, round_s))
    return {
        "rows": rows, "rounds": rounds, "round_s": round_s, "checksum": DEFAULT_CHECKSUM,
        "threads": default_threads(),
        "headlines": headlines(rows),
    }  # fmt: skip


def headlines(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures that are compared from run to run."""
    return {
        f"{row['engine']}, {row['case']}: {call}, % of memcpy": row[f"{call}_percent_of_memcpy"]
        for row in rows
        for call in ("put", "get")
        if row["engine"] != "memcpy"
    }


def render(report: dict[str, Any]) -> str:
    columns = (
        "case", "engine", "put GB/s", "get GB/s", "put %", "get %", "put % median",
        "get % median", "get p50 us", "get p99 us", "put CPU us/block", "get CPU us/block",
    )  # fmt: skip
    keys = (
        "case", "engine", "put_gb_per_s", "get_gb_per_s", "put_percent_of_memcpy",
        "get_percent_of_memcpy", "put_median_percent_of_memcpy", "get_median_percent_of_memcpy",
        "get_p50_us", "get_p99_us", "put_cpu_us_per_block", "get_cpu_us_per_block",
    )  # fmt: skip
    table = format_table(columns, [[row[key] for key in keys] for row in report["rows"]])
    return (
        f"{table}\n\nbest of {report['rounds']} rounds, and the median of their ratios to memcpy; "
        f"checksum: {report['checksum']}; threads of shm: {report['threads']}"
    )
