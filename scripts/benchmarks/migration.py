"""Measure pages on their way from another process, beside the same transport without kvcupy.

A block is a page of all layers, K and V. All ways move the same memory of the other process to the
same memory of this one. With the engine of sockets, over TCP of this machine and a Unix socket:

migration  `kv.PageReceiver.pull` and all that belongs to it
plain      `sendmsg` and `recvmsg_into` for lists of areas that were made before, 1 MiB at a time

With `--engine nixl`, by what UCX finds between two processes of a machine:

migration  of an offer that was made just before; `aged`: of one whose checksums the sender has had
           the time to calculate, as where a prompt is computed layer by layer
bare       an agent of NIXL with the memory registered and all descriptors prepared, which posts a
           READ and asks for its state until it is over, while the other process progresses its own
verified   the same, and a checksum of the pages that have arrived

Neither `plain` nor `bare` checks, agrees upon or frees anything. Rounds alternate between the ways,
in several pairs of processes: where their memory and threads lie makes a difference. The report has
the time of the calls of `offer` and `pull` too.

    python scripts/bench.py migration
    python scripts/bench.py migration --engine nixl
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
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common.report import format_table
from common.timers import interleave

import kvcupy as kv
from kvcupy.doctor import environment
from kvcupy.remote import wire
from kvcupy.remote.migration import nixl_agents

CASES = ((64 << 10, 1), (64 << 10, 32), (1 << 20, 1), (1 << 20, 32), (2 << 20, 1), (2 << 20, 32))
NIXL_CASES = (*CASES, (2 << 20, 128))
LAYER_BYTES = 64 << 10  # of a block: K and V of 16 tokens, 8 heads of 128 in bf16
ROUND_S = 0.25
_PAIRS = 3  # of processes
_PIECE_BYTES = 1 << 20
_POLL_S = 20e-6  # of the other process, between looks at its agent
_HASHED_PER_S = 8e9  # bytes of an aged offer whose checksums are calculated per second
_OVER = b"over"
_BASELINES = {"socket": "plain", "nixl": "bare"}


# --- Pages ----------------------------------------------------------------------------------------


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
    """Return the pages that move: none of them are neighbours."""
    return list(range(0, 2 * blocks, 2))


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


def wipe(pool: kv.KVPool) -> None:
    for layer in range(pool.num_layers):
        pool.k(layer)[...] = pool.v(layer)[...] = 0


def require_equal(pool: kv.KVPool, expected: kv.KVPool, pages: list[int]) -> None:
    """Raise unless pages have the same bytes as in another pool."""
    for layer in range(pool.num_layers):
        for read, sent in ((pool.k, expected.k), (pool.v, expected.v)):
            same = read(layer).view(np.uint16)[pages] == sent(layer).view(np.uint16)[pages]
            if not same.all():
                raise AssertionError(f"layer {layer}: other bytes than were sent")


# --- Without kvcupy -------------------------------------------------------------------------------


class Plain:
    """Either end of a plain socket that moves the pages of a pool."""

    def __init__(self, pool: kv.KVPool, blocks: int) -> None:
        self._pieces = pieces_of(pool, blocks)
        self._socket: Any = None

    def listen(self, path: str) -> dict[str, str]:
        """Send all pages for each byte that arrives; return the address."""
        if path:
            server = socket.socket(socket.AF_UNIX)
            server.bind(path)
            server.listen()
            address = path
        else:
            server = socket.create_server(("127.0.0.1", 0))
            address = str(server.getsockname()[1])
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        return {"address": address}

    def _serve(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, server:
            while connection.recv(1):
                self._move(connection.sendmsg)

    def connect(self, address: str) -> None:
        """Connect to a port of this machine, or to the path of a Unix socket."""
        if address.isdigit():
            self._socket = socket.create_connection(("127.0.0.1", int(address)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address)

    def read(self) -> None:
        """Ask for the pages, and receive them."""
        self._socket.sendall(b"1")
        self._move(lambda views: self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0])

    def _move(self, call: Callable[[list[memoryview]], int]) -> None:
        """Call `sendmsg` or `recvmsg_into` until all pieces have moved."""
        for views in self._pieces:
            rest = views
            while rest:
                moved = call(rest)
                while rest and moved >= rest[0].nbytes:
                    moved -= rest[0].nbytes
                    rest = rest[1:]
                if moved:
                    rest = [rest[0][moved:], *rest[1:]]


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

    def describe(self) -> dict[str, Any]:
        """Return what the other process needs to read from this one."""
        tables = self.blocks.regions
        regions = [t.tolist() for t in (tables.pointers, tables.page_strides, tables.sizes)]
        return {"metadata": self.agent.get_agent_metadata().hex(), "regions": regions}

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

    def read(self, *, verified: bool = False) -> None:
        """Read the prepared pages, and calculate a checksum of them if `verified`."""
        agent, every = self.agent, self._every
        handle = agent.make_prepped_xfer("READ", self._mine, every, self._theirs, every, _OVER)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL ended a transfer as {state}")
        agent.release_xfer_handle(handle)
        if verified:
            wire.checksum(self._views)

    def serve(self) -> None:
        """Progress until the other process has read once."""
        while not any(self.agent.get_new_notifs().values()):
            time.sleep(_POLL_S)


# --- The other process ----------------------------------------------------------------------------


def serve() -> None:
    """Be the other process: make pools and offers as standard input says."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        if "open" in request:
            blocks, engine = request["blocks"], request["engine"]
            pool = pool_of(request["block_bytes"], blocks)
            sender = kv.PageSender(pool, listen=request["open"], engine=engine)
            if engine == "nixl":
                bare = Bare("sender", pool)
                answer = bare.describe()
            else:
                answer = Plain(pool, blocks).listen(request["plain"])
        elif "aged" in request:
            while pool.allocator.num_free < pool.num_pages:
                time.sleep(0.0001)
            owned = pool.allocator.alloc(2 * blocks)
            pool.allocator.free(owned[1::2])
            start = time.perf_counter()
            ticket = sender.offer(owned[::2])
            answer = [ticket.hex(), (time.perf_counter() - start) * 1e6]
            if request["aged"]:
                time.sleep(2e-4 + blocks * pool.page_bytes / _HASHED_PER_S)
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

    def ask(self, **request: Any) -> Any:
        self.request(**request)
        return self.answer()

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


# --- Rounds ---------------------------------------------------------------------------------------


class Pair:
    """Two processes, and the ways to move pages to this one.

    Parameters
    ----------
    engine : of kvcupy: "socket" or "nixl"
    folder : for Unix sockets; empty: TCP
    """

    def __init__(
        self, stack: ExitStack, engine: str, folder: str, block_bytes: int, blocks: int
    ) -> None:
        self.blocks, self.pool = blocks, pool_of(block_bytes, blocks)
        self.other = stack.enter_context(other_process())
        self.offers_us: list[float] = []
        self.pulls_us: list[float] = []
        listen = f"unix:{folder}/pages" if folder else "tcp:127.0.0.1:0"
        peer = self.other.ask(
            open=listen, plain=f"{folder}/plain" if folder else "", engine=engine,
            block_bytes=block_bytes, blocks=blocks,
        )  # fmt: skip
        self.receiver = stack.enter_context(kv.PageReceiver(self.pool, engine=engine))
        self.ways: dict[str, Callable[[], float]] = {"migration": self.migrate}
        if engine == "nixl":
            bare = Bare("receiver", self.pool)
            bare.prepare(peer, pages_of(blocks), self.pool.num_layers)
            self.ways["aged"] = partial(self.migrate, aged=True)
            self.ways["bare"] = partial(self._served, bare.read)
            self.ways["verified"] = partial(self._served, partial(bare.read, verified=True))
        else:
            plain = Plain(self.pool, blocks)
            plain.connect(peer["address"])
            self.ways["plain"] = partial(seconds_of, plain.read)

    def migrate(self, *, aged: bool = False) -> float:
        """Return the seconds of a pull."""
        ticket, offer_us = self.other.ask(aged=aged)
        data, pages = bytes.fromhex(ticket), pages_of(self.blocks)
        start = time.perf_counter()
        pull = self.receiver.pull(data, pages)
        called = time.perf_counter()
        pull.synchronize()
        end = time.perf_counter()
        self.offers_us.append(offer_us)
        self.pulls_us.append((called - start) * 1e6)
        return end - start

    def _served(self, read: Callable[[], None]) -> float:
        """Return the seconds of a read that the other process progresses."""
        self.other.request(serve=True)
        time.sleep(_POLL_S)  # it has begun to poll
        seconds = seconds_of(read)
        self.other.answer()
        return seconds

    def check(self, expected: kv.KVPool) -> None:
        """Move pages by each way once, and compare them."""
        for way in self.ways.values():
            wipe(self.pool)
            way()
            require_equal(self.pool, expected, pages_of(self.blocks))


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def repeat(way: Callable[[], float], seconds: float) -> float:
    """Call what returns the seconds of a transfer for a while; return their median."""
    end = time.perf_counter() + seconds
    taken = [way()]
    while time.perf_counter() < end:
        taken.append(way())
    return median(taken)


def measure(
    engine: str, transport: str, block_bytes: int, blocks: int, *, quick: bool
) -> dict[str, Any]:
    """Measure one size of block and number of blocks, in several pairs of processes."""
    times: dict[str, list[float]] = {}
    calls: dict[str, list[float]] = {"offer": [], "pull": []}
    for _ in range(1 if quick else _PAIRS):
        with ExitStack() as stack:
            unix = transport == "unix"
            folder = stack.enter_context(tempfile.TemporaryDirectory()) if unix else ""
            pair = Pair(stack, engine, folder, block_bytes, blocks)
            pair.check(pool_of(block_bytes, blocks))
            round_s = 0.01 if quick else ROUND_S
            rounds = {name: partial(repeat, way, round_s) for name, way in pair.ways.items()}
            for name, taken in interleave(rounds, 2 if quick else 5).items():
                times.setdefault(name, []).extend(taken)
            calls["offer"] += pair.offers_us
            calls["pull"] += pair.pulls_us
    return {
        "transport": transport, "block_bytes": block_bytes, "blocks": blocks,
        **row_of(times, blocks * block_bytes, _BASELINES[engine]),
        **{f"{call}_call_us": median(taken) for call, taken in calls.items()},
    }  # fmt: skip


def row_of(times: dict[str, list[float]], num_bytes: int, baseline: str) -> dict[str, float]:
    """Return times and bandwidths of each way, and its speed over the baseline's.

    `ratio` is of kvcupy, `NAME_ratio` of another way, and `..._to_verified` are those over
    `verified`. They are medians over rounds.
    """
    best = {name: min(taken) for name, taken in times.items()}

    def ratio(way: str, to: str) -> float:
        return median(b / t for b, t in zip(times[to], times[way], strict=True))

    row = {f"{name}_us": median(taken) * 1e6 for name, taken in times.items()}
    row |= {f"best_{name}_us": taken * 1e6 for name, taken in best.items()}
    row |= {f"{name}_gb_per_s": num_bytes / taken / 1e9 for name, taken in best.items()}
    row["ratio"] = ratio("migration", baseline)
    row |= {f"{name}_ratio": ratio(name, baseline) for name in ("aged", "verified") if name in best}
    if "verified" in best:
        row["aged_ratio_to_verified"] = ratio("aged", "verified")
    return row


# --- The benchmark --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=_BASELINES, default="socket", help="default: socket")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    report = {"engine": options.engine, "cpus": os.cpu_count(), "rows": rows, "notes": []}
    transports, cases = ("tcp", "unix"), CASES
    if options.engine == "nixl":
        transports, cases = ("unix",), NIXL_CASES
        try:
            nixl_agents.load()
        except ImportError as error:
            return {**report, "notes": [str(error)]}
    if options.quick:
        cases = ((64 << 10, 1), (1 << 20, 8))
    for transport in transports:
        for block_bytes, blocks in cases:
            rows.append(
                measure(options.engine, transport, block_bytes, blocks, quick=options.quick)
            )
    return report


def render(report: dict[str, Any]) -> str:
    baseline = _BASELINES[report["engine"]]
    ways = [name for name in ("migration", "aged", "verified", baseline)
            if f"{name}_us" in (report["rows"] or [{}])[0]]  # fmt: skip
    ratios = {
        "ratio": f"of {baseline}", "aged_ratio": "aged", "verified_ratio": "verified",
        "aged_ratio_to_verified": "aged of verified",
    }  # fmt: skip
    shown = [name for name in ratios if name in (report["rows"] or [{}])[0]]
    heads = ("transport", "blocks", *(f"{way} us" for way in ways),
             *(ratios[name] for name in shown), "pull call us", "offer call us")  # fmt: skip
    cells = [
        (
            row["transport"], f"{row['blocks']} x {row['block_bytes'] >> 10} KiB",
            *(f"{row[f'{way}_us']:.0f}" for way in ways),
            *(f"{100 * row[name]:.0f} %" for name in shown),
            f"{row['pull_call_us']:.0f}", f"{row['offer_call_us']:.0f}",
        )
        for row in report["rows"]
    ]  # fmt: skip
    return "\n".join([format_table(heads, cells), *report["notes"]])


if __name__ == "__main__":
    serve()
