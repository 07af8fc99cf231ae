"""Measure block stores in files, and the same blocks in LMDB: puts, gets, evictions, reopening.

move      processes put new blocks into a full store, each of which evicts another one, and get
          those that they have put last; every block is verified. Bytes per second of all processes,
          the best of several rounds
reopen    a store of many blocks is opened: time to open it, to match, until the first put into the
          full store has returned, and of the puts after that

    python scripts/bench.py stores --json build/stores.json
    python scripts/bench.py stores --folder /mnt/nvme --url redis://127.0.0.1
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash
from common.checks import WrongBytes
from common.frame import OptionError
from common.report import format_table

import kvcupy as kv
from kvcupy.remote.wire import WirePages

try:
    import lmdb
except ImportError:  # a candidate that kvcupy does not use
    lmdb = None

BLOCKS = (2**16, 2**18, 2**21)
PROCESSES = (1, 4)
ROUND_BYTES = 2**25  # of a process
NUM_ROUNDS, ROUNDS_KEPT = 7, 2
MANY_BLOCKS = 100_000
MEMORY = Path("/dev/shm")

Opener = Callable[[Path, Any, int, int], Any]


class Lmdb:
    """Blocks in LMDB, evicted by a second table of their uses, 16 in a transaction."""

    def __init__(self, folder: Path, pool: Any, num_blocks: int) -> None:
        self._pages, self._num_blocks = WirePages(pool), num_blocks
        self._env = lmdb.open(
            str(folder), map_size=2 * num_blocks * (pool.page_bytes + 2**13) + 2**26, max_dbs=2,
            writemap=True, map_async=True, sync=False, metasync=False,
        )  # fmt: skip
        self._blocks, self._uses = (self._env.open_db(name) for name in (b"blocks", b"uses"))

    def match(self, hashes: Sequence[int]) -> int:
        with self._env.begin(self._blocks) as transaction:
            known = [transaction.get(key) is not None for key in map(_key, hashes)]
        return [*known, False].index(False)

    def put(self, hashes: Sequence[int], pages: Sequence[int]) -> list[str]:
        for start in range(0, len(hashes), 16):
            with self._env.begin(write=True) as transaction:
                for hash, page in zip(hashes[start : start + 16], pages[start:], strict=False):
                    pieces = self._pages.pieces(page)
                    if transaction.stat(self._blocks)["entries"] >= self._num_blocks:
                        cursor = transaction.cursor(self._uses)
                        cursor.first()
                        transaction.delete(cursor.value(), db=self._blocks)
                        cursor.delete()
                    used = struct.pack(">Q", time.time_ns())
                    value = used + _sum(pieces) + b"".join(pieces)
                    transaction.put(_key(hash), value, db=self._blocks)
                    transaction.put(used, _key(hash), db=self._uses)
        return ["stored"] * len(hashes)

    def get(self, hashes: Sequence[int], pages: Sequence[int]) -> list[bool]:
        there = []
        for start in range(0, len(hashes), 16):
            uses = []
            with self._env.begin(self._blocks, buffers=True) as transaction:
                for hash, page in zip(hashes[start : start + 16], pages[start:], strict=False):
                    value = transaction.get(_key(hash))
                    if value is not None:
                        at, pieces = 16, self._pages.pieces(page)
                        for piece in pieces:
                            piece[:] = value[at : at + piece.nbytes]
                            at += piece.nbytes
                        uses.append((_key(hash), bytes(value[:8])))
                        there.append(_sum(pieces) == bytes(value[8:16]))
                    else:
                        there.append(False)
            with self._env.begin(self._uses, write=True) as transaction:
                for key, used in uses:  # the key of the block keeps the time of the put
                    transaction.delete(used)
                    transaction.put(used, key)
        return there

    def close(self) -> None:
        self._env.close()


def _key(hash: int) -> bytes:
    return hash.to_bytes(16, "big")


def _sum(pieces: Sequence[memoryview]) -> bytes:
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def open_files(folder: Path, pool: Any, num_blocks: int, size: int) -> Any:
    return kv.BlockStore.open(f"file:{folder}", pool, capacity_bytes=num_blocks * size)


def open_lmdb(folder: Path, pool: Any, num_blocks: int, size: int) -> Any:
    return Lmdb(folder, pool, num_blocks)


def candidates(url: str | None = None) -> dict[str, Opener]:
    found: dict[str, Opener] = {"files": open_files}
    if lmdb is not None:
        found["lmdb"] = open_lmdb
    if url is not None:
        found[url.partition(":")[0]] = lambda folder, pool, *_: kv.BlockStore.open(url, pool)
    return found


def pool_of(block_bytes: int, num_pages: int) -> Any:
    return kv.KVPool(
        num_pages, page_size=16, num_layers=1, num_kv_heads=block_bytes // 2**13, head_dim=128,
        dtype="fp16", layout="page_first_direct", device="host",
    )  # fmt: skip


def hashes_of(number: int, count: int) -> list[int]:
    rng = np.random.default_rng([7, number])
    return [2**127 + int.from_bytes(rng.bytes(15), "little") for _ in range(count)]


# --- Moving blocks ---


def work(
    opener: Opener, folder: Path, block_bytes: int, number: int, count: int, barrier: Any,
    results: Any,
) -> None:  # fmt: skip
    """Put and get rounds of blocks in one process, together with the others."""
    per_round = max(1, ROUND_BYTES // block_bytes)
    pool = pool_of(block_bytes, 2 * per_round)
    wire, expected = WirePages(pool), {}
    for page in range(per_round):
        data = np.random.default_rng([number, page]).bytes(64) * (block_bytes // 64)
        wire.write_from(page, data)
        wire.write_from(per_round + page, bytes(block_bytes))
        expected[page] = data
    size = -(-(block_bytes + 64) // 4096) * 4096
    store = opener(folder, pool, count * ROUNDS_KEPT * per_round, size)
    pages, into = range(per_round), range(per_round, 2 * per_round)
    for index in range(NUM_ROUNDS):
        hashes = hashes_of(1000 * number + index, per_round)
        barrier.wait()
        started = time.perf_counter()
        outcomes = store.put(hashes, pages)
        put_s = time.perf_counter() - started
        barrier.wait()
        started = time.perf_counter()
        there = store.get(hashes, into)
        get_s = time.perf_counter() - started
        buffer = bytearray(block_bytes)
        wire.read_into(per_round, buffer)
        wrong = there[0] and bytes(buffer) != expected[0]
        results.put((index, put_s, get_s, outcomes.count("stored"), sum(there), wrong))
    barrier.wait()
    store.close()


def measure(
    opener: Opener, place: Path, block_bytes: int, count: int, runs: int = 1
) -> dict[str, float]:
    """Return GB/s of puts and gets of all processes, the best round of those that evict."""
    best = {"put_gb_per_s": 0.0, "get_gb_per_s": 0.0}
    for _ in range(runs):
        folder = Path(tempfile.mkdtemp(prefix="kvcupy-bench-", dir=place))
        forked = multiprocessing.get_context("fork")
        barrier, results = forked.Barrier(count), forked.Queue()
        try:
            processes = [
                forked.Process(
                    target=work,
                    args=(opener, folder / "s", block_bytes, n, count, barrier, results),
                )
                for n in range(count)
            ]  # fmt: skip
            (folder / "s").mkdir(mode=0o700)
            for process in processes:
                process.start()
            seen = [results.get(timeout=600) for _ in range(count * NUM_ROUNDS)]
            for process in processes:
                process.join()
        finally:
            shutil.rmtree(folder)
        if any(wrong for *_, wrong in seen):
            raise WrongBytes("a block is not what was put")
        for index in range(ROUNDS_KEPT, NUM_ROUNDS):
            rounds = [each for each in seen if each[0] == index]
            for name, seconds, number in (("put", 1, 3), ("get", 2, 4)):
                moved = sum(each[number] for each in rounds) * block_bytes
                rate = moved / max(each[seconds] for each in rounds) / 1e9
                best[f"{name}_gb_per_s"] = max(best[f"{name}_gb_per_s"], rate)
    return best


# --- Many blocks ---


def reopen(opener: Opener, place: Path, num_blocks: int) -> dict[str, float]:
    """Fill a store with blocks of 8 KiB, open it again, and put blocks into it."""
    folder = Path(tempfile.mkdtemp(prefix="kvcupy-bench-", dir=place))
    pool, batch = pool_of(2**13, 1000), 1000
    try:
        (folder / "s").mkdir(mode=0o700)
        store = opener(folder / "s", pool, num_blocks, 12288)
        for index in range(num_blocks // batch):
            store.put(hashes_of(index, batch), range(batch))
        store.close()
        started = time.perf_counter()
        store = opener(folder / "s", pool, num_blocks, 12288)
        opened = time.perf_counter()
        known = store.match(hashes_of(num_blocks // batch - 1, batch))
        matched = time.perf_counter()
        first = store.put(hashes_of(10**6, 1), [0])
        put = time.perf_counter()
        if known != batch or first != ["stored"]:
            raise WrongBytes(f"{known} of {batch} blocks are found after reopening")
        times = []
        for hash in hashes_of(10**6 + 1, 2000):
            began = time.perf_counter()
            store.put([hash], [0])
            times.append(time.perf_counter() - began)
        store.close()
    finally:
        shutil.rmtree(folder)
    return {
        "open_s": opened - started, "match_1000_s": matched - opened, "first_put_s": put - matched,
        "put_median_us": median(times) * 1e6, "put_longest_ms": max(times) * 1e3,
    }  # fmt: skip


# --- The benchmark ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="on a disk; default: a temporary one")
    parser.add_argument("--url", help="of another store, such as redis://127.0.0.1, to be measured")
    parser.add_argument("--runs", type=int, default=3, help="of which the best counts")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all candidates in turns."""
    disk = options.folder or Path(tempfile.gettempdir())
    if not disk.is_dir():
        raise OptionError(f"--folder: expected a folder, got {disk}")
    places = {"disk": disk, **({"/dev/shm": MEMORY} if MEMORY.is_dir() else {})}
    openers = candidates(options.url)
    sizes, counts = (BLOCKS[:1], PROCESSES[:1]) if options.quick else (BLOCKS, PROCESSES)
    rows = []
    for name, place in places.items():
        for block_bytes in sizes:
            for count in counts:
                for candidate, opener in openers.items():
                    best = measure(opener, place, block_bytes, count, options.runs)
                    rows.append({
                        "place": name, "block_bytes": block_bytes, "processes": count,
                        "store": candidate, **best,
                    })  # fmt: skip
    num_blocks = min(2000, MANY_BLOCKS) if options.quick else MANY_BLOCKS
    many = [
        {"place": name, "blocks": num_blocks, "store": candidate,
         **reopen(opener, place, num_blocks)}
        for name, place in places.items()
        for candidate, opener in openers.items() if candidate in ("files", "lmdb")
    ]  # fmt: skip
    return {"rows": rows, "reopen": many}


def render(report: dict[str, Any]) -> str:
    moved = format_table(
        ("place", "block", "processes", "store", "put GB/s", "get GB/s"),
        [
            (row["place"], f"{row['block_bytes'] / 1024:g} KiB", row["processes"], row["store"],
             row["put_gb_per_s"], row["get_gb_per_s"])
            for row in report["rows"]
        ],
    )  # fmt: skip
    many = format_table(
        ("place", "blocks", "store", "open ms", "match ms", "first put ms", "put us", "longest ms"),
        [
            (row["place"], row["blocks"], row["store"], row["open_s"] * 1e3,
             row["match_1000_s"] * 1e3, row["first_put_s"] * 1e3, row["put_median_us"],
             row["put_longest_ms"])
            for row in report["reopen"]
        ],
    )  # fmt: skip
    return f"{moved}\n\n{many}"
