"""Measure pages on their way from another process: the engine nixl beside NIXL's own calls.

A block is a page of all layers, K and V. Both ways READ the same descriptors of the other process
into the same pages of this one, by what UCX finds between two processes of a machine. `bare` is an
agent of NIXL with the memory of the pool registered and all descriptors prepared before, which
makes a transfer, posts it, and asks for its state until it is over; the other process progresses
its agent meanwhile. Nothing is agreed upon, verified or freed. `verified` is the same, and then a
checksum of what has come, with which nothing is compared. `migration` is a
`kv.PageReceiver.pull` and all that belongs to it, with the checksums of both sides: of an offer
that was made just before, and of one that the sender has had the time to calculate them for, as
where a prompt is computed layer by layer (`aged`). Rounds alternate between all, in several pairs
of processes: where their memory and threads lie makes a difference of a third.

    python scripts/bench.py migration_nixl
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import kvcupy as kv
from benchmarks.migration import CASES, ROUND_S, pages_of, pool_of
from kvcupy.bench.report import format_table
from kvcupy.bench.timers import interleave
from kvcupy.doctor import environment
from kvcupy.remote import wire
from kvcupy.remote.migration import nixl_agents

_CASES = (*CASES, (2 << 20, 128))
_PAIRS = 3  # of processes
_POLL_S = 20e-6  # of the other process, between looks at its agent
_HASHED_PER_S = 8e9  # bytes of an offer whose checksums are calculated by then
_OVER = b"over"
RATIOS = ("ratio", "aged_ratio", "verified_ratio", "aged_ratio_to_verified")


class Bare:
    """An agent of NIXL for the memory of a pool."""

    def __init__(self, name: str, pool: kv.KVPool) -> None:
        module = nixl_agents.load()
        config = module.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent: Any = module.nixl_agent(name, config)
        self.blocks = nixl_agents.BlockAddresses(pool)
        self._registered = [
            self.agent.register_memory([(pointer, num_bytes, 0, "")], "DRAM")
            for pointer, num_bytes in self.blocks.memory
        ]

    def prepare(self, described: dict[str, Any], pages: list[int], num_layers: int) -> None:
        """Prepare to read some pages of another process into the same pages of this one."""
        tables = (np.array(table, np.int64) for table in described["regions"])
        peer = self.agent.add_remote_agent(bytes.fromhex(described["metadata"]))
        chosen = np.array(pages)
        local, remote, sizes = nixl_agents.blocks_of(
            self.blocks.regions, chosen, nixl_agents.Regions(*tables), chosen, range(num_layers),
            by_page=True,
        )  # fmt: skip
        lists = [
            np.stack([side, sizes, np.zeros_like(sizes)], axis=1).astype(np.uint64)
            for side in (local, remote)
        ]
        self._every = np.arange(len(sizes), dtype=np.int32)
        self._views = self.blocks.views(local, sizes)
        self._mine = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", lists[0], "DRAM")
        self._theirs = self.agent.prep_xfer_dlist(peer, lists[1], "DRAM")

    def read(self) -> None:
        """Read what was prepared."""
        agent, every = self.agent, self._every
        handle = agent.make_prepped_xfer("READ", self._mine, every, self._theirs, every, _OVER)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL ended a transfer as {state}")
        agent.release_xfer_handle(handle)

    def checksum(self) -> int:
        """Return a checksum of what `read` has brought."""
        return wire.checksum(self._views)

    def serve(self) -> None:
        """Progress until the other process has read once."""
        while not any(self.agent.get_new_notifs().values()):
            time.sleep(_POLL_S)


def serve() -> None:
    """Be the other process: make pools and offers as standard input says."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        if "listen" in request:
            pool = pool_of(request["block_bytes"], request["num_pages"])
            sender = kv.PageSender(pool, listen=request["listen"], engine="nixl")
            bare = Bare("sender", pool)
            tables = bare.blocks.regions
            regions = [t.tolist() for t in (tables.pointers, tables.page_strides, tables.sizes)]
            answer = {"metadata": bare.agent.get_agent_metadata().hex(), "regions": regions}
        elif "offer" in request:
            while pool.allocator.num_free < pool.num_pages:
                time.sleep(0.0001)
            owned = pool.allocator.alloc(2 * request["offer"])
            pool.allocator.free(owned[1::2])
            answer = sender.offer(owned[::2]).hex()
            if request["aged"]:
                time.sleep(2e-4 + owned[::2].size * pool.page_bytes / _HASHED_PER_S)
        else:
            bare.serve()
        print(json.dumps(answer), flush=True)


class OtherProcess:
    """A process that answers requests in turn."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=Path(__file__).resolve().parents[1], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
        )  # fmt: skip

    def request(self, **request: Any) -> None:
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def other_process() -> Iterator[OtherProcess]:
    other = OtherProcess()
    try:
        yield other
    finally:
        other.kill()


def measure(folder: str, block_bytes: int, blocks: int, *, quick: bool) -> dict[str, Any]:
    """Measure one size of block and number of blocks."""
    times: dict[str, list[float]] = {}
    for number in range(1 if quick else _PAIRS):
        listen = f"unix:{folder}/{block_bytes}-{blocks}-{number}"
        for name, taken in measure_pair(listen, block_bytes, blocks, quick=quick).items():
            times.setdefault(name, []).extend(taken)
    best = {name: min(taken) for name, taken in times.items()}
    num_bytes = blocks * block_bytes

    def ratio(of: str, to: str) -> float:
        return median(b / t for b, t in zip(times[to], times[of], strict=True))

    return {
        "block_bytes": block_bytes, "blocks": blocks,
        **{f"{name}_us": median(taken) * 1e6 for name, taken in times.items()},
        **{f"best_{name}_us": taken * 1e6 for name, taken in best.items()},
        **{f"{name}_gb_per_s": num_bytes / taken / 1e9 for name, taken in best.items()},
        "ratio": ratio("migration", "bare"),
        "aged_ratio": ratio("aged", "bare"),
        "verified_ratio": ratio("verified", "bare"),
        "aged_ratio_to_verified": ratio("aged", "verified"),
    }  # fmt: skip


def measure_pair(
    listen: str, block_bytes: int, blocks: int, *, quick: bool
) -> dict[str, list[float]]:
    """Return seconds of all ways between two processes."""
    num_pages = 2 * blocks
    pool = pool_of(block_bytes, num_pages)
    pages = pages_of(blocks)
    with other_process() as other, kv.PageReceiver(pool, engine="nixl") as receiver:
        other.request(listen=listen, block_bytes=block_bytes, num_pages=num_pages)
        bare = Bare("receiver", pool)
        bare.prepare(other.answer(), pages, pool.num_layers)

        def migrate(*, aged: bool = False) -> float:
            other.request(offer=blocks, aged=aged)
            ticket = bytes.fromhex(other.answer())
            start = time.perf_counter()
            receiver.pull(ticket, pages).synchronize()
            return time.perf_counter() - start

        def read(*, verified: bool = False) -> float:
            other.request(serve=True)
            time.sleep(_POLL_S)  # it has begun to poll
            start = time.perf_counter()
            bare.read()
            if verified:
                bare.checksum()
            seconds = time.perf_counter() - start
            other.answer()
            return seconds

        expected = pool_of(block_bytes, num_pages)
        for way in (read, migrate):
            wipe(pool)
            way()
            require_equal(pool, expected, pages)
        del expected
        round_s = 0.01 if quick else ROUND_S
        ways = {
            "migration": partial(repeat, migrate, round_s),
            "aged": partial(repeat, partial(migrate, aged=True), round_s),
            "bare": partial(repeat, read, round_s),
            "verified": partial(repeat, partial(read, verified=True), round_s),
        }
        return interleave(ways, 2 if quick else 5)


def repeat(way: Callable[[], float], seconds: float) -> float:
    """Call what returns the seconds of a transfer for a while; return their median."""
    end = time.perf_counter() + seconds
    taken = [way()]
    while time.perf_counter() < end:
        taken.append(way())
    return median(taken)


def wipe(pool: kv.KVPool) -> None:
    for layer in range(pool.num_layers):
        pool.k(layer)[...] = pool.v(layer)[...] = 0


def require_equal(pool: kv.KVPool, expected: kv.KVPool, pages: list[int]) -> None:
    """Raise unless pages have what they have in another pool."""
    for layer in range(pool.num_layers):
        for read, sent in ((pool.k, expected.k), (pool.v, expected.v)):
            same = read(layer).view(np.uint16)[pages] == sent(layer).view(np.uint16)[pages]
            if not same.all():
                raise AssertionError(f"layer {layer}: other bytes than were sent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the common options."""


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    try:
        nixl_agents.load()
    except ImportError as error:
        return {"rows": rows, "notes": [str(error)]}
    cases = ((1 << 20, 8),) if options.quick else _CASES
    with tempfile.TemporaryDirectory() as folder:
        for block_bytes, blocks in cases:
            rows.append(measure(folder, block_bytes, blocks, quick=options.quick))
    return {"rows": rows, "notes": notes}


def render(report: dict[str, Any]) -> str:
    heads = (
        "blocks", "us", "aged us", "verified us", "bare us", "of bare", "aged", "verified",
        "aged of verified",
    )  # fmt: skip
    cells = [
        (
            f"{row['blocks']} x {row['block_bytes'] >> 10} KiB",
            *(f"{row[f'{name}_us']:.0f}" for name in ("migration", "aged", "verified", "bare")),
            *(f"{100 * row[ratio]:.0f} %" for ratio in RATIOS),
        )
        for row in report["rows"]
    ]  # fmt: skip
    return "\n".join([format_table(heads, cells), *report["notes"]])


if __name__ == "__main__":
    serve()
