"""Verdicts on the parts of a GPU report, from the files that their processes leave."""

from __future__ import annotations

import csv
import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .run import Ended

LINES = 12  # per failure


@dataclass
class Files:
    """The files of a part: standard output, log, and results."""

    stdout: Path
    log: Path
    result: Path

    def text(self) -> str:
        """Return all output of the process."""
        paths = dict.fromkeys((self.stdout, self.log))
        return "\n".join(
            p.read_text(encoding="utf-8", errors="replace") for p in paths if p.exists()
        )

    def printed(self) -> str:
        """Return its standard output."""
        return (
            self.stdout.read_text(encoding="utf-8", errors="replace")
            if self.stdout.exists()
            else ""
        )


@dataclass
class Verdict:
    """The verdict on a part.

    Attributes
    ----------
    state : "passed", "failed" or "skipped"
    summary : one line
    details : paragraphs of Markdown
    """

    state: str
    summary: str
    details: list[str] = field(default_factory=list)


Judge = Callable[[Ended, Files], Verdict]


def end_of(ended: Ended, files: Files) -> str:
    """Return how a process ended that did not exit with status 0."""
    if ended.how == "limit":
        return f"stopped after its time limit, {ended.seconds:.0f} s"
    if ended.how == "interrupted":
        return "interrupted"
    if ended.status is None:
        return "could not be started"
    if ended.status < 0:
        return f"died of {signal.Signals(-ended.status).name}"
    return f"exit status {ended.status}"


def fenced(text: str, lines: int = 400) -> str:
    """Return text as a code block, without its middle if it is long."""
    shown = text.strip("\n").splitlines()
    if len(shown) > lines:
        half = lines // 2
        left_out = f"... {len(shown) - 2 * half} lines ..."
        shown = [*shown[:half], left_out, *shown[-half:]]
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`{3,}", "\n".join(shown)))])
    return "\n".join([fence, *shown, fence])


def last_lines(text: str, count: int = LINES) -> str:
    """Return the last lines that are not blank."""
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-count:])


# Programs ------------------------------------------------------------------------------------


def of_status(ended: Ended, files: Files) -> Verdict:
    """Judge by the exit status."""
    if ended.how == "exited" and ended.status == 0:
        return Verdict("passed", last_lines(files.printed(), 1))
    return Verdict("failed", end_of(ended, files), [fenced(last_lines(files.text(), 30))])


def of_doctor(kind: str) -> Judge:
    """Return a judge of the doctor's output: the device must work, with kernels."""

    def judge(ended: Ended, files: Files) -> Verdict:
        page = files.printed()
        works = re.search(rf"^What works$(?:\n +.*)*?\n +{kind} +(.*)$", page, re.MULTILINE)
        said = works[1] if works else end_of(ended, files)
        state = "passed" if ended.how == "exited" and said.startswith("yes") else "failed"
        return Verdict(state, f"{kind}: {said}", [fenced(files.text())])

    return judge


def of_benchmark(ended: Ended, files: Files) -> Verdict:
    """Judge by a benchmark's JSON; its tables are the details."""
    if ended.how != "exited" or ended.status != 0:
        return of_status(ended, files)
    try:
        json.loads(files.result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Verdict("failed", f"no JSON: {error}", [fenced(last_lines(files.text()))])
    return Verdict("passed", "checked and measured", [fenced(files.printed())])


# Tests ---------------------------------------------------------------------------------------

_OUTCOME = re.compile(r"^\S+\.py::.*? (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)
_BEGUN = re.compile(r"^(\S+\.py::\S.*)$", re.MULTILINE)
_HEADINGS = re.compile(r"^(?:=+ (?!test session starts)|!{5,} )", re.MULTILINE)
_COUNTED = re.compile(r"^=+ (.*(?:passed|failed|skipped|error|no tests).*) in [\d.]+s.* =+$", re.M)


def of_tests(may_skip_all: bool) -> Judge:
    """Return a judge of what pytest prints with `-v`; its failures and summary are the details.

    Parameters
    ----------
    may_skip_all : whether a run of skipped tests alone passes, as tests for GPUs without one
    """

    def judge(ended: Ended, files: Files) -> Verdict:
        tests, *rest = _HEADINGS.split(files.text(), maxsplit=1)
        details = [fenced("".join(rest) or last_lines(tests, 40))]
        counted = _COUNTED.findall(files.text())
        summary = counted[-1] if counted else f"{len(_OUTCOME.findall(tests))} tests ended"
        if ended.how != "exited" or ended.status not in (0, 1, 5):
            begun = _BEGUN.findall(tests)
            unfinished = begun and not _OUTCOME.match(begun[-1])
            within = f", in {begun[-1].strip()}" if unfinished else ""
            return Verdict("failed", f"{summary}; {end_of(ended, files)}{within}", details)
        if ended.status == 1:
            return Verdict("failed", summary, details)
        if "passed" not in summary:
            state = "skipped" if may_skip_all else "failed"
            return Verdict(state, f"no test ran, {summary}", details)
        return Verdict("passed", summary, details)

    return judge


# compute-sanitizer and ncu -------------------------------------------------------------------

_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")
_NO_CUDA = "terminated before first instrumented API call"


def of_sanitizer(may_go_unused: bool) -> Judge:
    """Return a judge of compute-sanitizer, by its error count.

    Parameters
    ----------
    may_go_unused : whether a program without CUDA calls is skipped instead of failed
    """

    def judge(ended: Ended, files: Files) -> Verdict:
        text = files.text()
        counts = [int(n) for n in _ERRORS.findall(text)]
        counts += [int(n) for n, *_ in _HAZARDS.findall(text)]
        if ended.how == "exited" and sum(counts):
            what = "hazards" if _HAZARDS.search(text) else "errors"
            reported = [line for line in text.splitlines() if line.startswith("=========")]
            return Verdict("failed", f"{sum(counts)} {what}", [fenced("\n".join(reported), 120)])
        if may_go_unused and _NO_CUDA in text:
            return Verdict("skipped", "the program made no CUDA call")
        if ended.how != "exited" or ended.status != 0:
            return of_status(ended, files)
        if not counts:
            return Verdict("failed", "no summary", [fenced(last_lines(text, 30))])
        return Verdict("passed", "nothing reported")

    return judge


METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM, % of peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "achieved occupancy, %",
    "launch__registers_per_thread": "registers",
}
NO_PERMISSION = "ERR_NVGPUCTRPERM"
_PERMIT = (
    f"not permitted ({NO_PERMISSION}): run it as root, or let users read performance counters "
    "(NVreg_RestrictProfilingToAdminUsers=0)"
)


def of_ncu(ended: Ended, files: Files) -> Verdict:
    """Return a table of what ncu measured, one line per kernel and grid."""
    measured = (
        files.result.read_text(encoding="utf-8", errors="replace") if files.result.exists() else ""
    )
    if NO_PERMISSION in measured or NO_PERMISSION in files.text():
        return Verdict("skipped", _PERMIT)
    if ended.how != "exited" or ended.status != 0:
        return of_status(ended, files)
    rows = kernels_of(measured)
    if not rows:
        text = last_lines(f"{measured}\n{files.text()}", 20)
        return Verdict("failed", "no kernel was measured", [fenced(text)])
    head = ["kernel", "grid", "block", *METRICS.values()]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return Verdict("passed", f"{len(rows)} kernels measured", ["\n".join(lines)])


def kernels_of(measured: str) -> list[list[str]]:
    """Return kernel, grid, block and metrics of each line of ncu's CSV, `--page raw`, once each."""
    table = [line for line in measured.splitlines() if line.startswith('"')]
    kernels: dict[tuple[str, str, str], list[str]] = {}
    units: dict[str, str] = {}
    for row in csv.DictReader(table):
        if not row.get("ID"):  # the line of units
            units = row
            continue
        name = re.sub(r"^void |\([^()]*\)$", "", row.get("Kernel Name", ""))
        key = (f"`{name}`", row.get("Grid Size", ""), row.get("Block Size", ""))
        values = []
        for metric in METRICS:
            unit = units.get(metric, "") if metric.startswith("gpu__time") else ""
            values.append(f"{row.get(metric) or '-'} {unit}".strip())
        kernels.setdefault(key, [*key, *values])
    return list(kernels.values())
