"""Call everything public with wrong arguments, and look at what happens.

Each case is a random call, or random calls on one object, most of them with one to three wrong
arguments. A call may only raise documented errors that name an argument. Nothing may change if it
raises; otherwise no byte may change but the call's outputs. Cases run in separate processes, so
that a crash or a hang is a finding too. Every finding is printed with the line that repeats it.

    python scripts/fuzz.py --seconds 600 --seed 1
    python scripts/fuzz.py --only store_kv --only PagedKVCache --seconds 60
    python scripts/fuzz.py --case "store_kv 12345"

The exit status is 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
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
from common.tests import ROOT, use_tests

use_tests("cache")

HANG_S = 20
CASES_PER_PROCESS = 1000  # kernels and what libraries keep fill its address space


class Worker:
    """A process that runs cases, and what it wrote to stderr."""

    def __init__(self, *, torch: bool) -> None:
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            str(ROOT / "scripts" / "fuzz.py"),
            "--serve",
        ]
        self.process = subprocess.Popen(
            [*command, *([] if torch else ["--no-torch"])], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",
            env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()
        self._answers.get()  # it has imported everything

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._answers.put(line)
        self._answers.put("")

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self._errors = [*self._errors[-40:], line]

    def run(self, case: str) -> dict[str, Any]:
        """Run one case; a finding says if it ended the process, or hangs."""
        assert self.process.stdin is not None
        self._errors.clear()
        try:
            self.process.stdin.write(case + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        start, start_cpu_s = time.monotonic(), self._cpu_s()
        while True:
            try:
                answer = self._answers.get(timeout=1.0)
                break
            except queue.Empty:
                if self._has_children():  # a compiler may take its time
                    start, start_cpu_s = time.monotonic(), self._cpu_s()
                # By its own time, or much longer where other programs have the processor.
                waited_s = max(self._cpu_s() - start_cpu_s, (time.monotonic() - start) / 4)
                if waited_s > HANG_S:
                    return self._lost(case, f"no answer for {HANG_S} s")
        if answer:
            return json.loads(answer)
        return self._lost(case, f"the process ended with status {self.process.wait()}")

    def _cpu_s(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _has_children(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task")
        try:
            return any((task / "children").read_text().split() for task in tasks.iterdir())
        except OSError:
            return False

    def _lost(self, case: str, what: str) -> dict[str, Any]:
        if self.process.poll() is None:
            self.process.send_signal(6)  # SIGABRT: faulthandler prints the stacks
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        time.sleep(0.2)
        finding = f"{case.split()[0]}: {what}\n{''.join(self._errors)}"
        return {"case": case, "finding": finding, "raised": [], "accepted": [], "strict": None}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Fuzzer:
    """Draws cases, and collects their results."""

    def __init__(self, seed: int, names: Sequence[str], *, torch: bool) -> None:
        self._rng = random.Random(seed)
        self._names = list(names)
        self._torch = torch
        self.cases: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.strict = 0
        self.findings: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def draw(self) -> str:
        with self._lock:
            return f"{self._rng.choice(self._names)} {self._rng.randrange(2**31)}"

    def run(self, until: float, count: int | None) -> None:
        """Run cases in one process after another, as each that crashes needs a new one."""
        worker, count_here = None, 0
        while time.monotonic() < until and (count is None or sum(self.cases.values()) < count):
            if worker is None or worker.process.poll() is not None:
                worker, count_here = Worker(torch=self._torch), 0
            self._note(worker.run(self.draw()))
            count_here += 1
            if count_here == CASES_PER_PROCESS:
                worker.close()
        if worker is not None:
            worker.close()

    def _note(self, result: dict[str, Any]) -> None:
        with self._lock:
            self.cases[result["case"].split()[0]] += 1
            self.raised.update(result["raised"])
            self.accepted.update(result["accepted"])
            self.strict += bool(result["strict"])
            if not result["finding"]:
                return
            # One finding is met by many cases.
            key = result.get("key") or result["finding"].splitlines()[0]
            known = self.findings.setdefault(key, [])
            known.append(result["case"])
            if len(known) == 1:
                print(f'FOUND --case "{result["case"]}"\n  {result["finding"]}', flush=True)

    def report(self, seed: int, seconds: float) -> dict[str, Any]:
        return {
            "seed": seed, "seconds": round(seconds, 1), "cases": sum(self.cases.values()),
            "strict_cases": self.strict, "accepted": dict(sorted(self.accepted.items())),
            "raised": dict(sorted(self.raised.items())),
            "targets": dict(sorted(self.cases.items())),
            "findings": {key: cases[:5] for key, cases in self.findings.items()},
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long (default 600)")
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the cases that are drawn")
    parser.add_argument("--only", action="append", metavar="NAME", help="a target; may be repeated")
    parser.add_argument("--case", metavar="LINE", help="repeat one case, and show its calls")
    parser.add_argument("--processes", type=int, default=1, help="that run at a time (default 1)")
    parser.add_argument("--no-torch", action="store_true", help="without tensors")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the counts to a file")
    parser.add_argument("--list", action="store_true", help="show the targets")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.no_torch and (options.serve or options.case):
        with suppress(ImportError):
            import torch  # noqa: F401
    from fuzzing.run import TARGETS, limit_memory, run_case, serve

    if options.serve:
        serve()
        return 0
    if options.list:
        print("\n".join(TARGETS))
        return 0
    if options.case:
        limit_memory()
        name, number = options.case.split()
        result = run_case(name, int(number), verbose=True)
        print(json.dumps(result, indent=2).replace("\\n", "\n"))
        return bool(result["finding"])
    names = options.only or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"--only: expected one of {', '.join(TARGETS)}, got {unknown[0]}")
    fuzzer = Fuzzer(options.seed, names, torch=not options.no_torch)
    start = time.monotonic()
    until = start + options.seconds
    threads = [
        threading.Thread(target=fuzzer.run, args=(until, options.cases))
        for _ in range(options.processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = fuzzer.report(options.seed, time.monotonic() - start)
    print(
        f"{report['cases']} cases in {report['seconds']:.0f} s, "
        f"{sum(report['accepted'].values())} calls accepted, raised {report['raised']}, "
        f"{len(report['findings'])} findings"
    )
    if options.json:
        from common.report import write_json

        whole = json.loads(options.json.read_text()) if options.json.exists() else {"runs": []}
        whole["runs"].append(report)
        write_json(options.json, whole)
    return bool(report["findings"])


if __name__ == "__main__":
    sys.exit(main())
