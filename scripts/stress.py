r"""Stress the package, and audit it: random calls, servers under random traffic, or a trace.

    python scripts/stress.py fuzz --seconds 600 --seed 1
    python scripts/stress.py soak --steps 144000 --json build/soak.json
    python scripts/stress.py replay --trace trace.jsonl --device-blocks 1000 --host-blocks 5000

fuzz calls everything public with wrong arguments, in other processes, so that a crash or a hang is
a finding too: an error must be documented, name an argument and change nothing; a call without one
writes only its outputs. soak lets servers with caches of four kinds admit, prefill, decode, fork,
preempt, offload, cancel, evict and restart, and compares rows and attention with what follows from
the tokens. replay sends the requests of a trace through a TieredCache, compares every
loaded byte with the contents that its hash determines, and the hits of each tier with a simulation
over hashes.

Between any two steps, each page has the owners that it must have. Memory, threads, files and
Python's blocks may not grow after the warm-up, which ends when as many plans of calls are kept as
ever are (some 10,000 steps). The exit status is 1 if something was wrong, and 130 after Ctrl-C,
which closes everything and prints the progress so far.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import common.one_core  # noqa: F401
from common import frame
from common.measure import log_compilation
from common.report import format_table
from workloads import fuzz, soak, trace
from workloads.audit import SLACK, Broken, Sample, beyond_slack, growth, sample, warm_up

from kvcupy.progress import Progress, count

SAMPLES = 400  # at most: their own memory is part of what is measured


DEFAULT_STEPS = 3000


class Source(Protocol):
    """A source of work: an object that makes one step after another.

    `step` raises Broken if something is not as it must be; `close` ends everything, and raises
    Broken if something is left. `problems` returns a line for each finding that did not end the
    run. `total` is the number of steps that there are, None: there is always another one.
    """

    total: int | None

    def step(self) -> None: ...
    def close(self) -> None: ...
    def report(self) -> dict[str, Any]: ...
    def problems(self) -> list[str]: ...


def drive(
    source: Source, *, steps: int | None = None, seconds: float | None = None, what: str = "steps",
    after_step: Callable[[], object] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Let a source work for some steps or seconds, at most to its end; return the report.

    A step that goes wrong ends the run.
    """
    if steps is None and seconds is None:
        steps = DEFAULT_STEPS if source.total is None else source.total
    most = min(n for n in (steps, source.total, sys.maxsize) if n is not None)
    done, broken, every = 0, "", max(1, min(most, 20_000) // SAMPLES)
    samples: list[Sample] = [{"step": 0, **sample()}]
    start = time.perf_counter()
    end = start + seconds if seconds else math.inf
    unit = "per mille" if seconds else "steps"
    with Progress(what, 1000 if seconds else most, unit, lines=True) as progress:
        try:
            while done < most and (now := time.perf_counter()) < end:
                progress.to(int(1000 * (now - start) / seconds) if seconds else done)
                source.step()
                done += 1
                after_step()
                if done % every == 0:
                    samples.append({"step": done, **sample()})
                if len(samples) > SAMPLES:
                    del samples[1::2]
                    every *= 2
            progress.to(progress.total)
        except Broken as error:
            broken = f"step {done}: {error}"
        except KeyboardInterrupt:
            print(f"stopped after {done} steps: {source.report()}", file=sys.stderr)
            source.close()
            raise
    elapsed_s = time.perf_counter() - start
    try:
        source.close()
    except Broken as error:
        broken = broken or f"at the end: {error}"
    grown = growth(samples)
    return {
        "steps": done,
        "seconds": round(elapsed_s, 1),
        **source.report(),
        "warm_up_steps": warm_up(samples),
        "slack": SLACK,
        "grown": grown,
        "at_first": samples[0],
        "at_the_end": samples[-1],
        "problems": [*source.problems(), *beyond_slack(grown), *([broken] if broken else [])],
    }


# --- The command line ---

SOURCES: dict[str, ModuleType] = {"fuzz": fuzz, "soak": soak, "replay": trace}
"""Each has `add_arguments(parser)` and `make(device, options)`, which returns a `Source`."""


class Command:
    """What `frame.run` runs of a source."""

    def __init__(self, module: ModuleType, after_step: Callable[[], object]) -> None:
        self._module, self._after_step = module, after_step

    def run(self, device: Any, options: argparse.Namespace) -> dict[str, Any]:
        source = self._module.make(device, options)
        return {"seed": options.seed} | drive(
            source, steps=options.steps, seconds=options.seconds, what=options.source,
            after_step=self._after_step,
        )  # fmt: skip

    def render(self, report: dict[str, Any]) -> str:
        """Return what was done and what the process holds, as tables."""
        counts = report["counts"]
        names = list(dict.fromkeys(name for own in counts.values() for name in own))
        rows = [(name, *(own.get(name, 0) for own in counts.values())) for name in names]
        held = [
            (name.replace("_", " "), f"{report['at_first'][name]:,}",
             f"{report['at_the_end'][name]:,}",
             "-" if name not in report["grown"] else f"{report['grown'][name]:+,.0f}", f"{slack:,}")
            for name, slack in report["slack"].items()
        ]  # fmt: skip
        return "\n\n".join([
            f"{report['steps']:,} steps in {report['seconds']:.0f} s",
            format_table(("", *counts), rows),
            format_table(("", "at first", "at the end", "after the warm-up", "slack"), held),
        ])  # fmt: skip

    def problems(self, report: dict[str, Any]) -> list[str]:
        return list(report["problems"])


def main(argv: Sequence[str] | None = None, after_step: Callable[[], object] = lambda: None) -> int:
    """Read the command line and run; `after_step` is called after each step."""
    parser = argparse.ArgumentParser(prog="stress.py", description=__doc__.splitlines()[0])
    names = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    for name, module in SOURCES.items():
        summary = (module.__doc__ or "").splitlines()[0]
        options = names.add_parser(name, help=summary, description=summary)
        frame.add_common_arguments(options, has_device=name != "fuzz", has_quick=False)
        length = options.add_mutually_exclusive_group()
        length.add_argument("--steps", type=count, help=f"default: {DEFAULT_STEPS}; all requests")
        length.add_argument("--seconds", type=float, help="how long, instead")
        module.add_arguments(options)
    parsed = parser.parse_args(argv)
    if parsed.source == "fuzz" and (status := fuzz.run_here(parsed)) is not None:
        return status
    command: Any = Command(SOURCES[parsed.source], after_step)
    return frame.run(parsed.source, command, parsed, program="stress")


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
