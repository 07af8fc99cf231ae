"""Serve prompts in two processes over one block store, and count what each finds of the other's.

Requests go to the processes by turns, so the rounds of a conversation meet another process each
time. A process looks for the blocks of its prompt, reads those that the store has, compares every
byte with the contents that the hash determines, computes the rest, and puts it.

    python scripts/store_demo.py
    python scripts/store_demo.py --url file:/mnt/nvme/kv --kill
    python scripts/store_demo.py --url redis://127.0.0.1 --json build/store_demo.json

With --kill the first process is killed (SIGKILL) in the middle of its requests.
The exit status is 1 if a byte was wrong, or if a process ended that was not killed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import frame
from common.report import format_table

import kvcupy as kv
from kvcupy.remote.wire import WirePages

BLOCK_TOKENS, NUM_PAGES = 16, 64
CONVERSATIONS, ROUNDS, ROUND_TOKENS = 24, 4, 8 * BLOCK_TOKENS


def prompts(seed: int) -> list[list[int]]:
    """Return the prompts of all requests: each round of a conversation begins with the last."""
    rng = random.Random(seed)
    system = [rng.randrange(50_000) for _ in range(ROUND_TOKENS)]
    talks = [list(system) for _ in range(CONVERSATIONS)]
    requests = []
    for _ in range(ROUNDS):
        for talk in talks:
            talk += [rng.randrange(50_000) for _ in range(ROUND_TOKENS)]
            requests.append(list(talk))
    return requests


def contents_of(hash: int, num_bytes: int) -> bytes:
    return random.Random(hash).randbytes(64) * (num_bytes // 64)


def serve(options: argparse.Namespace) -> int:
    """Serve the requests of one process; print a line for each, and its counts in the end."""
    pool = kv.KVPool(
        NUM_PAGES, BLOCK_TOKENS, 4, 2, 64, layout="page_first_direct", placement="pinned"
    )
    pages = WirePages(pool)
    counts = {"requests": 0, "blocks": 0, "found": 0, "wrong": 0}
    with kv.BlockStore.open(options.url, pool, model="store_demo") as store:
        print("open", flush=True)
        for line in sys.stdin:  # the numbers of requests
            hashes = kv.block_hashes(options.requests[int(line)], BLOCK_TOKENS)
            known = store.match(hashes)
            there = store.get(hashes[:known], range(known))
            for page, hash in enumerate(hashes):
                expected, buffer = contents_of(hash, pool.page_bytes), bytearray(pool.page_bytes)
                if page < known and there[page]:
                    pages.read_into(page, buffer)
                    counts["found"] += 1
                    counts["wrong"] += bytes(buffer) != expected
                pages.write_from(page, expected)  # the model computes the block
            store.put(hashes[known:], range(known, len(hashes)))
            counts["requests"] += 1
            counts["blocks"] += len(hashes)
            print(line.strip(), flush=True)
        print(json.dumps({**counts, "store": store.stats()}), flush=True)
    return 0


class Worker:
    """A process that serves, one request at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", "--url", options.url,
             "--seed", str(options.seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.served: list[int] = []
        assert self._line() == "open"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()

    def wait(self, number: int) -> None:
        assert self._line() == str(number), "a process has ended"
        self.served.append(number)

    def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        report: dict[str, Any] = json.loads(self._line())
        self.process.wait()
        return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="of the store; default: files in a temporary folder")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--kill", action="store_true", help="kill the first process halfway")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options.url = options.url or f"file:{Path(folder, 'kv')}"
        workers = [Worker(options) for _ in range(2)]
        numbers = range(len(options.requests))
        killed = False
        for turn in range(0, len(numbers), 2):
            pair = [(workers[n], number) for n, number in enumerate(numbers[turn : turn + 2])]
            for worker, number in pair:
                worker.send(number)
            if options.kill and not killed and turn >= len(numbers) // 2:
                workers[0].process.send_signal(signal.SIGKILL)
                workers[0].process.wait()
                killed, workers = True, [workers[1], workers[1]]
                workers[1].wait(pair[1][1])
                continue
            for worker, number in pair:
                worker.wait(number)
        reports = [worker.end() for worker in dict.fromkeys(workers)]
    return {"url": options.url.partition(":")[0], "killed": int(killed), "rows": reports}


def render(report: dict[str, Any]) -> str:
    columns = ("process", "requests", "blocks", "found", "found %", "wrong", "stored", "damaged")
    return format_table(columns, [
        (number, row["requests"], row["blocks"], row["found"],
         100 * row["found"] / max(1, row["blocks"]), row["wrong"], row["store"]["stored"],
         row["store"]["damaged"])
        for number, row in enumerate(report["rows"])
    ])  # fmt: skip


def problems(report: dict[str, Any]) -> list[str]:
    wrong = sum(row["wrong"] for row in report["rows"])
    return [f"{wrong} blocks were wrong"] if wrong else []


def main(argv: Sequence[str] | None = None) -> int:
    module = sys.modules[__name__]
    options = frame.parse(module, argv, has_device=False, has_quick=False)
    options.requests = prompts(options.seed)
    if options.worker:
        return serve(options)
    return frame.run("store_demo", module, options, program="store_demo")


if __name__ == "__main__":
    sys.exit(main())
