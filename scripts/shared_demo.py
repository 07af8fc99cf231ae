r"""Serve a trace in several processes, without a shared store and with one, and compare the hits.

Requests go to the processes by turns, so the rounds of a conversation meet another process each
time: alone, a process has computed few of their blocks. Over one shared store each finds what the
others have computed. Every block that is loaded is compared byte by byte with the contents that its
hash determines.

    python scripts/shared_demo.py --plot build/shared.png
    python scripts/shared_demo.py --trace trace.jsonl --processes 4 --url redis://127.0.0.1:6379 \
        --json build/shared.json
    python scripts/shared_demo.py --kill

With --kill the first process is killed (SIGKILL) when it has served half of its requests; the
others continue. Blocks that the processes evict from host memory can be found in the store as long
as it has them. The exit status is 1 if a byte was wrong, or if a process ended that was not killed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import common.one_core  # noqa: F401
from common import charts, frame
from common.measure import chosen_device, one_core_per_stream
from common.models import MODELS
from common.report import format_table
from common.requests import BLOCK_TOKENS, add_trace_arguments, facts_of, requests_of
from workloads.simulation import Sizes
from workloads.trace import Replay, Settings, scaled_shape

import kvcupy as kv
from kvcupy.progress import count

TIERS = ("device", "host", "store")
SLOT_BYTES = 4096  # room for the header of a block, at most
STORE_STATS = (
    "shared_stored", "shared_known", "shared_full", "shared_failed", "shared_dropped",
    "shared_late", "shared_skipped", "shared_errors", "shared_get_bytes", "shared_put_bytes",
)  # fmt: skip


def hit_rates(counts: Counter[str]) -> dict[str, float]:
    """Return the hit rate of each tier, and of all."""
    hits = {tier: counts[f"hit.{tier}"] for tier in TIERS}
    asked = max(1, sum(hits.values()) + counts["missed"])
    return {tier: n / asked for tier, n in hits.items()} | {"total": sum(hits.values()) / asked}


# --- One process ---


def settings_of(arguments: argparse.Namespace) -> Settings:
    shape = scaled_shape(MODELS[arguments.model], BLOCK_TOKENS, arguments.scale)
    sizes = Sizes(arguments.device_blocks, arguments.host_blocks)
    return Settings(sizes, shape, host_layout="page_first_direct")


def open_store(arguments: argparse.Namespace, host_pool: Any) -> Any:
    options: dict[str, Any] = {}
    if arguments.url.startswith("shm:"):
        slot_bytes = host_pool.page_bytes + SLOT_BYTES
        options["capacity_bytes"] = arguments.store_blocks * slot_bytes
    return kv.SharedStore.open(arguments.url, host_pool, tenant="shared_demo", **options)


def serve(arguments: argparse.Namespace) -> int:
    """Serve one process's requests, and print lines of JSON: the number served, then a report."""
    device = chosen_device(arguments.device)
    requests = requests_of(arguments.trace, arguments.limit, arguments.seed)
    mine = requests[arguments.worker :: arguments.processes]
    stores: list[Any] = []

    def open_it(host_pool: Any) -> dict[str, Any]:
        stores.append(open_store(arguments, host_pool))
        return {"shared": stores[-1]}

    lower = open_it if arguments.shared else None
    replay = Replay(device, settings_of(arguments), mine, lower)
    print(json.dumps({"ready": arguments.worker}), flush=True)
    sys.stdin.readline()  # until all are ready

    def say(done: int) -> None:
        print(json.dumps(done), flush=True)
        if done == arguments.stop_after:
            sys.stdin.readline()  # until it is killed

    try:
        start = time.perf_counter()
        with one_core_per_stream(device):
            for done in range(1, len(mine) + 1):
                replay.step()
                say(done)
            replay.finish()
        wall_s = time.perf_counter() - start
        replay.cache.flush()
        stats = {k: v for k, v in replay.cache.stats().items() if not k.endswith("_blocks")}
    finally:
        replay.close()
        for store in stores:
            store.close()
    report = {"counts": replay.counts, "stats": stats, "wrong": replay.wrong, "wall_s": wall_s}
    print(json.dumps(report), flush=True)
    return 0


# --- All of them ---


class Worker:
    """A process that serves every n-th request, or is killed when it has served so many."""

    def __init__(
        self, arguments: argparse.Namespace, number: int, *, shared: bool, kill_at: int | None
    ) -> None:
        names = ("device", "trace", "limit", "seed", "processes", "url", "store_blocks",
                 "device_blocks", "host_blocks", "model", "scale")  # fmt: skip
        given = {name: getattr(arguments, name) for name in names}
        command = [sys.executable, __file__, "--worker", str(number)]
        for name, value in given.items():
            if value is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        if kill_at is not None:
            command += ["--stop-after", str(kill_at)]
        self.number, self.kill_at = number, kill_at
        self.served, self.killed = 0, False
        self.report: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            command + ["--shared"] * shared, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def wait_until_ready(self) -> bool:
        return bool(self._process.stdout and self._process.stdout.readline())

    def start(self) -> None:
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def follow(self) -> None:
        """Read what it prints until it ends, or is killed."""
        for line in self._process.stdout or ():
            said = json.loads(line)
            if isinstance(said, dict):
                self.report = said
                continue
            self.served = said
            if said == self.kill_at:
                self._process.kill()
                self.killed = True
                break
        self._process.wait()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def run_processes(arguments: argparse.Namespace, *, shared: bool) -> dict[str, Any]:
    """Serve the trace in all processes; return the report of that."""
    num_requests = len(requests_of(arguments.trace, arguments.limit, arguments.seed))
    half = max(1, num_requests // arguments.processes // 2)
    workers = [
        Worker(arguments, n, shared=shared, kill_at=half if arguments.kill and n == 0 else None)
        for n in range(arguments.processes)
    ]
    try:
        for worker in workers:
            worker.wait_until_ready()
        for worker in workers:
            worker.start()
        threads = [threading.Thread(target=worker.follow) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.end()
    counts: Counter[str] = Counter()
    stats: Counter[str] = Counter()
    wrong: list[str] = []
    for worker in workers:
        if worker.report is not None:
            counts.update(worker.report["counts"])
            stats.update(worker.report["stats"])
            wrong += worker.report["wrong"]
    return {
        "shared": shared,
        "counts": dict(sorted(counts.items())),
        "hit_rate": hit_rates(counts),
        "store": {name: stats[name] for name in STORE_STATS} if shared else {},
        "wall_s": max((w.report["wall_s"] for w in workers if w.report), default=0.0),
        "served": [worker.served for worker in workers],
        "killed": [worker.number for worker in workers if worker.killed],
        "failed": [w.number for w in workers if w.report is None and not w.killed],
        "wrong": wrong,
    }


def remove_store(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the store says of itself, and remove what the processes have stored."""
    settings = settings_of(arguments)
    shape = settings.shape
    pool = kv.KVPool(
        1, shape.tokens, shape.layers, shape.heads, shape.width, layout=settings.host_layout,
        placement="pinned", device=chosen_device(arguments.device),
    )  # fmt: skip
    with open_store(arguments, pool) as store:
        stats = store.stats()
        store.remove()
    return {name: value for name, value in stats.items() if isinstance(value, (int, float, str))}


def run(device: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    requests = requests_of(arguments.trace, arguments.limit, arguments.seed)
    try:
        points = [run_processes(arguments, shared=shared) for shared in (False, True)]
    except BaseException:  # the memory would stay until the machine restarts
        with suppress(OSError):
            remove_store(arguments)
        raise
    return {
        **facts_of(requests, arguments),
        "processes": arguments.processes,
        "url": arguments.url.partition(":")[0],
        "model": arguments.model,
        "scale": arguments.scale,
        "page_bytes": settings_of(arguments).shape.page_bytes,
        "device_blocks": arguments.device_blocks,
        "host_blocks": arguments.host_blocks,
        "store_blocks": arguments.store_blocks,
        "killed": arguments.kill,
        "store": remove_store(arguments),
        "points": points,
    }


def render(report: dict[str, Any]) -> str:
    rows = []
    for point in report["points"]:
        rates, counts = point["hit_rate"], point["counts"]
        rows.append((
            "shared store" if point["shared"] else "alone", sum(point["served"]),
            *(f"{rates[tier]:.2%}" for tier in (*TIERS, "total")), counts.get("missed", 0),
            f"{counts.get('checked_bytes', 0) / 1e6:,.1f}", counts.get("wrong_bytes", 0),
        ))  # fmt: skip
    columns = ("", "served", *TIERS, "any", "missed", "MB compared", "wrong bytes")
    store = report["points"][1]["store"]
    lines = [
        f"{report['trace']}: {report['requests']} requests, {report['blocks']} blocks, "
        f"{report['distinct_blocks']} of them distinct; {report['processes']} processes, each with "
        f"{report['device_blocks']} blocks on the device, {report['host_blocks']} in host memory",
        "",
        format_table(columns, rows),
        "",
        f"the store: {store['shared_stored']} blocks stored, {store['shared_known']} known, "
        f"{store['shared_full']} full, {store['shared_failed']} failed, "
        f"{store['shared_late']} late, {store['shared_errors']} errors; MB got: "
        f"{store['shared_get_bytes'] / 1e6:,.1f}, put: {store['shared_put_bytes'] / 1e6:,.1f}",
    ]
    for point in report["points"]:
        lines += [f"killed: process {number}" for number in point["killed"]]
        lines += [f"failed: process {number}" for number in point["failed"]]
        lines += point["wrong"]
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the hits of each tier, without the store and with it."""
    names = ["over one shared store" if point["shared"] else "each process alone"
             for point in report["points"]]  # fmt: skip
    shares = {tier: [100 * p["hit_rate"][tier] for p in report["points"]] for tier in TIERS}
    figure, (axes,) = charts.panels_of(1, 1, (7, 5))
    charts.stacked_bars(axes, names, shares, ("#1F6F8B", "#E2A33B", "#B4436C"))
    axes.set_ylabel("hits, % of blocks")
    title = f"{report['trace']}, {report['requests']} requests in {report['processes']} processes"
    charts.save(figure, path, title)


def problems(report: dict[str, Any]) -> list[str]:
    """Return a line on each run with a wrong byte, or with a process that failed."""
    return [
        f"{'over one store' if p['shared'] else 'alone'}: wrong bytes, or a process failed"
        for p in report["points"]
        if p["wrong"] or p["failed"] or p["counts"].get("wrong_bytes")
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace_arguments(parser, device_blocks=128, host_blocks=512)
    add("--processes", type=count, default=2)
    add("--url", default=f"shm:kvcupy-demo-{os.getpid()}",
        help="of the store; default: memory of this machine, which is given back")  # fmt: skip
    add("--store-blocks", type=count, default=4096, help="that memory of this machine holds")
    add("--kill", action="store_true", help="kill the first process in the middle")
    add("--plot", type=Path, help="draw a chart (PNG)")
    add("--worker", type=int, help=argparse.SUPPRESS)  # serve one process's requests
    add("--shared", action="store_true", help=argparse.SUPPRESS)
    add("--stop-after", type=count, help=argparse.SUPPRESS)


def main(argv: Sequence[str] | None = None) -> int:
    module = sys.modules[__name__]
    options = frame.parse(module, argv, has_quick=False)
    if options.worker is not None:
        return serve(options)
    return frame.run("shared_demo", module, options, program="shared_demo")


if __name__ == "__main__":
    sys.exit(main())
