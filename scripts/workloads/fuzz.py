"""Call everything public with wrong arguments, and look at what happens.

Each case is a random call, or random calls on one object, most of them with one to three wrong
arguments. Cases run in a separate process, so that a crash or a hang is a finding too. Every
finding is printed with the line that repeats it: `stress.py fuzz --case "store_kv 12345"`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from common.frame import OptionError
from common.tests import ROOT, use_tests

from .audit import SLACK

HANG_S = 300  # a compiler may take its time
CASES_PER_PROCESS = 1000  # kernels and what libraries keep fill its address space
WARM_UP_CASES = 200  # of a process, after which it opens no more files and threads


class Worker:
    """A process that runs cases; what it writes to stderr goes to a file."""

    def __init__(self, *, torch: bool = True) -> None:
        command = [sys.executable, "-X", "faulthandler", str(ROOT / "scripts" / "stress.py"),
                   "fuzz", "--serve", *([] if torch else ["--no-torch"])]  # fmt: skip
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self._cases, self._answers = self.process.stdin, self.process.stdout
        self._num_cases = 0
        self._warm: dict[str, float] | None = None
        self._answers.readline()  # it has imported everything

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None or self._num_cases >= CASES_PER_PROCESS

    def run(self, case: str) -> dict[str, Any]:
        """Run one case; a finding says if it ended the process, or hangs."""
        self._num_cases += 1
        with suppress(BrokenPipeError):
            self._cases.write(case + "\n")
            self._cases.flush()
        if not select.select([self._answers], [], [], HANG_S)[0]:
            return self._lost(case, f"no answer for {HANG_S} s")
        if not (answer := self._answers.readline()):
            return self._lost(case, f"the process ended with status {self.process.wait()}")
        result: dict[str, Any] = json.loads(answer)
        held = result.pop("held")
        if self._warm is None and self._num_cases >= WARM_UP_CASES:
            self._warm = held
        for name in ("threads", "files"):
            if self._warm and held[name] > self._warm[name] + SLACK[name]:
                text = f"leak: {self._num_cases} cases hold {held[name]} {name}, "
                result["finding"] = result["finding"] or f"{text}at first {self._warm[name]}"
        return result

    def _lost(self, case: str, what: str) -> dict[str, Any]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self._errors.seek(0)
        finding = f"{case.split()[0]}: {what}\n{''.join(self._errors.readlines()[-40:])}"
        return {"case": case, "finding": finding, "raised": [], "accepted": [], "strict": None}

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._errors.close()


class Fuzzer:
    """A source of work that draws cases, and collects their results."""

    total = None

    def __init__(self, seed: int, names: Sequence[str], *, torch: bool = True) -> None:
        self._rng = random.Random(seed)
        self._names, self._torch = list(names), torch
        self._worker: Worker | None = None
        self.cases: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.strict = 0
        self.findings: dict[str, list[str]] = {}

    def draw(self) -> str:
        return f"{self._rng.choice(self._names)} {self._rng.randrange(2**31)}"

    def step(self) -> None:
        """Run a case; one that ends its process is followed by others in a new one."""
        if self._worker is None or self._worker.is_over:
            self.close()
            self._worker = Worker(torch=self._torch)
        result = self._worker.run(self.draw())
        self.cases[result["case"].split()[0]] += 1
        self.raised.update(result["raised"])
        self.accepted.update(result["accepted"])
        self.strict += bool(result["strict"])
        if result["finding"]:
            # One finding is met by many cases.
            key = result.get("key") or result["finding"].splitlines()[0]
            self.findings.setdefault(key, []).append(result["case"])
            if len(self.findings[key]) == 1:
                print(f'FOUND --case "{result["case"]}"\n  {result["finding"]}', flush=True)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def report(self) -> dict[str, Any]:
        return {
            "counts": {"calls": {
                "cases": self.cases.total(), "cases in strict mode": self.strict,
                "accepted": self.accepted.total(), "refused": self.raised.total(),
            }},
            "accepted": dict(sorted(self.accepted.items())),
            "raised": dict(sorted(self.raised.items())),
            "targets": dict(sorted(self.cases.items())),
            "findings": {key: cases[:5] for key, cases in self.findings.items()},
        }  # fmt: skip

    def problems(self) -> list[str]:
        return list(self.findings)


# --- The command line ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the cases that are drawn")
    add("--only", action="append", metavar="NAME", help="a target; may be repeated")
    add("--case", metavar="LINE", help="repeat one case, and show its calls")
    add("--no-torch", action="store_true", help="without tensors")
    add("--list", action="store_true", help="show the targets")
    add("--serve", action="store_true", help=argparse.SUPPRESS)


def run_here(options: argparse.Namespace) -> int | None:
    """Run what takes no other process, and return the exit status; None: there is no such option.

    A process that runs cases imports torch before it limits its memory.
    """
    if not options.no_torch and (options.serve or options.case):
        with suppress(ImportError):
            import torch  # noqa: F401
    use_tests("cache")
    from . import cases

    if options.serve:
        cases.serve()
    elif options.list:
        print("\n".join(cases.TARGETS))
    elif options.case:
        cases.limit_memory()
        name, number = options.case.split()
        result = cases.run_case(name, int(number), verbose=True)
        print(json.dumps(result, indent=2).replace("\\n", "\n"))
        return bool(result["finding"])
    else:
        return None
    return 0


def make(device: Any, options: argparse.Namespace) -> Fuzzer:
    from .cases import TARGETS

    names = options.only or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        expected = ", ".join(TARGETS)
        raise OptionError(f"--only: expected one of {expected}, got {unknown[0]}")
    return Fuzzer(options.seed, names, torch=not options.no_torch)
