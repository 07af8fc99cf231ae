"""Test and measure kvcupy on a GPU, and leave one folder that can be attached to an issue.

The doctor, the tests, compute-sanitizer and ncu where they are installed, and the benchmarks run
one after another, each in a separate process with a time limit: a part that fails, hangs or
crashes is reported, and the next one runs. The report is rewritten after each. Ctrl-C stops the
running part and ends the report there; a second Ctrl-C kills it.

Paths, user and host names are replaced in the report. The exit status is 0 if parts passed and none
failed.

    scripts/gpu_report.sh --quick
    scripts/gpu_report.sh --only ncu bench --out build/measured
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import environment as gpu_environment
from .page import Result, all_well, as_json, counts, page, verdict_on_machine
from .parts import TOOLS, Part, parts
from .private import ROOT, Anonymiser, pack
from .run import GRACE_S, Interrupts, run, shorten
from .verdicts import Files, Verdict

LOG_BYTES = 32 << 20
OUT = ROOT / "build" / "gpu_report"


def say(text: str = "") -> None:
    """Print a line, unless the terminal is gone."""
    with suppress(OSError):
        print(text, flush=True)


class Report:
    """A run of parts, and the folder that they fill.

    Parameters
    ----------
    chosen : the parts to run
    out : an empty folder
    about : from `environment.facts`
    options : of the command line, to show
    """

    def __init__(
        self, chosen: Sequence[Part], out: Path, about: dict[str, Any], options: str = ""
    ) -> None:
        self.results = [Result(part) for part in chosen]
        self.out, self.about, self.options = out, about, options
        self.private = Anonymiser.of_this_machine(out)
        self.cwd, self.grace_s = ROOT, GRACE_S
        for name in ("logs", "results"):
            (out / name).mkdir(parents=True, exist_ok=True)

    def run(self, interrupts: Interrupts) -> bool:
        """Run all parts, unless interrupted; return whether all is well."""
        for number, result in enumerate(self.results, 1):
            if interrupts.count:
                break
            part = result.part
            say(f"[{number}/{len(self.results)}] {part.name}: {part.title}")
            result.state = "running"
            self.write("running")
            self._run(result, interrupts)
            took = "" if result.seconds is None else f" in {result.seconds:.0f} s"
            say(self.private.text(f"      {result.state}{took}: {result.summary}"))
        self.private.clean(self.out)
        self.write("interrupted" if interrupts.count else "finished")
        return all_well(self.results)

    def write(self, state: str) -> None:
        """Write the report so far, atomically."""
        head = {"state": state, "options": self.options}
        texts = {
            "report.md": page(self.results, self.about, **head),
            "report.json": json.dumps(as_json(self.results, self.about, **head), indent=1) + "\n",
        }
        for name, text in texts.items():
            unfinished = self.out / f".{name}"
            unfinished.write_text(self.private.text(text), encoding="utf-8", errors="replace")
            unfinished.replace(self.out / name)

    def _run(self, result: Result, interrupts: Interrupts) -> None:
        part = result.part
        if part.missing:
            result.state, result.summary = "skipped", part.missing
            return
        log = self.out / "logs" / f"{part.name}.log"
        stdout = self.out / "results" / f"{part.name}.txt" if part.keep_apart else log
        files = Files(stdout, log, self.out / "results" / (part.result or f"{part.name}.json"))
        places = {"{result}": str(files.result), "{folder}": str(self.out / "results" / part.name)}
        command = [_filled(word, places) for word in part.command]
        ended = run(
            command, cwd=self.cwd, environment=gpu_environment.environment() | part.variables,
            stdout=stdout, log=log, limit_s=part.limit_s, interrupts=interrupts,
            grace_s=self.grace_s,
        )  # fmt: skip
        for path in (stdout, log):
            shorten(path, LOG_BYTES)
        try:
            verdict = part.judge(ended, files)
        except Exception as error:  # unexpected output of a tool: the other parts still run
            verdict = Verdict("failed", f"not understood: {type(error).__name__}: {error}")
        result.state = "interrupted" if ended.how == "interrupted" else verdict.state
        result.summary, result.details = verdict.summary, verdict.details
        result.seconds = ended.seconds
        for path in (files.stdout, files.log, files.result):
            if path.exists():
                self.private.clean_file(path)


def _filled(word: str, places: dict[str, str]) -> str:
    for name, path in places.items():
        word = word.replace(name, path)
    return word


def chosen_parts(parts: Sequence[Part], only: Sequence[str] | None) -> list[Part]:
    """Return the parts with some names or groups; all if `only` is empty.

    Raises
    ------
    ValueError
        There is no such part.
    """
    known = {name for part in parts for name in (part.name, part.group)}
    for name in only or ():
        if name not in known:
            raise ValueError(f"--only: expected one of {', '.join(sorted(known))}; got {name}")
    return [part for part in parts if not only or part.name in only or part.group in only]


def make_room(out: Path) -> None:
    """Create the folder; move an earlier report aside.

    Raises
    ------
    ValueError
        It holds something else.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, got a file, {out}")
    if out.is_dir() and any(out.iterdir()):
        earlier = out / "report.json"
        if not earlier.is_file():
            raise ValueError(
                f"--out: expected a new folder, an empty one or an earlier report, got {out}, "
                "which holds something else"
            )
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(earlier.stat().st_mtime))
        aside = out.with_name(f"{out.name}-{stamp}")
        out.rename(aside)
        say(f"An earlier report is kept as {aside}.")
    out.mkdir(parents=True, exist_ok=True)


def plan(chosen: Sequence[Part], out: Path) -> str:
    """Return what will run and how long it takes."""
    lines = []
    width = max(len(part.name) for part in chosen)
    for part in chosen:
        takes = "skipped" if part.missing else f"{part.minutes:g} min"
        lines.append(f"  {part.name:{width}}  {takes:>8}  {part.missing or part.title}")
    running = [part for part in chosen if not part.missing]
    minutes = sum(part.minutes for part in running)
    most = sum(part.limit_s for part in running) / 60
    lines.append(
        f"About {minutes:.0f} minutes on a GPU, by estimate (by the parts' limits at most "
        f"{most:.0f}). Ctrl-C ends it\nearlier, with a report of what has run until then. "
        f"It goes to {out}."
    )
    return "\n".join(lines)


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_report.sh", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1; host: to try it out")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", dest="extent", action="store_const", const="quick", default="full",
        help="all that decides whether kvcupy works, and small benchmarks: under 15 minutes",
    )  # fmt: skip
    extent.add_argument(
        "--smoke",
        dest="extent",
        action="store_const",
        const="smoke",
        help="the least that decides it: under 3 minutes",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PART",
        help="doctor, verify, operations, driver_facts, gpu, suite, sanitizer, ncu, bench, "
        "or a part as it is listed",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=OUT, help="default: build/gpu_report")
    parser.add_argument("--list", action="store_true", help="say what would run, and stop")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"host|cuda(:\d+)?", options.device):
        parser.error(f"--device: expected host, cuda or cuda:1, got {options.device}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = read(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what tests say may be in any alphabet
        sys.stdout.reconfigure(errors="replace")
    say("Looking at this machine ...")
    tools = {name: gpu_environment.tool(name) for name in TOOLS}
    no_device = gpu_environment.no_device(options.device)
    available = parts(options.device, extent=options.extent, no_device=no_device, tools=tools)
    out = options.out.absolute()
    try:
        chosen = chosen_parts(available, options.only)
        say(plan(chosen, out))
        if no_device:
            say(f"{options.device} cannot be used: {no_device}.")
            say("With --device host the report can be tried without a GPU.")
        if options.list:
            return 0
        make_room(out)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return report(chosen, out, gpu_environment.facts(options.device, tools), argv)


def report(
    chosen: Sequence[Part], out: Path, about: dict[str, Any], argv: Sequence[str] | None = None
) -> int:
    """Run the parts, pack the folder, and return the exit status."""
    interrupts = Interrupts()
    shown = shlex.join(sys.argv[1:] if argv is None else argv)
    with interrupts.noted():
        result = Report(chosen, out, about, shown)
        well = result.run(interrupts)
        archive = pack(out)
    say(f"\n{verdict_on_machine(result.results)}")
    say(f"{counts(result.results)}: {out / 'report.md'}")
    say(f"Please attach to an issue: {archive}")
    return 0 if well else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first part
        sys.exit(1)
