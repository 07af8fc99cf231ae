"""Verdicts on the parts of a GPU report, from the files that their processes leave."""

from __future__ import annotations

import csv
import json
import re
import signal
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .run import Ended

NAMED = 100  # failing tests to name
SHOWN = 25  # of those, to show with their last lines
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
    failing : ids of failed tests, in order
    """

    state: str
    summary: str
    details: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)


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


def of_tests(may_skip_all: bool, *, names_all: bool = False) -> Judge:
    """Return a judge of pytest's report.

    Parameters
    ----------
    may_skip_all : whether a run of skipped tests alone passes, as those for GPUs without one
    names_all : whether to name passing tests too
    """

    def judge(ended: Ended, files: Files) -> Verdict:
        try:
            listed = list(ElementTree.parse(files.result).iter("testcase"))
        except (OSError, ElementTree.ParseError):
            return _without_report(ended, files)
        cases = [case for case in listed if case.get("name")]  # one that was stopped has none
        failed = [case for case in cases if _failure(case) is not None]
        skipped = [case for case in cases if case.find("skipped") is not None]
        passed = [case for case in cases if case not in failed and case not in skipped]
        summary = f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped"
        details = _failures(failed)
        if names_all and passed:
            details.append("Passed:\n\n" + fenced("\n".join(map(_name, passed))))
        if skipped:
            details.append("Skipped:\n\n" + fenced("\n".join(_reasons(skipped))))
        if ended.how != "exited" or ended.status not in (0, 1, 5):
            stopped_in = _unfinished(files.text())
            within = f", in {stopped_in}" if stopped_in else ""
            details.append(fenced(last_lines(files.text(), 20)))
            return Verdict("failed", f"{summary}; {end_of(ended, files)}{within}", details)
        if failed or ended.status == 1:
            failing = dict.fromkeys(map(_name, failed))  # a test can fail, and its teardown too
            return Verdict("failed", summary, details, list(failing))
        if not passed:
            summary = f"no test ran, {len(skipped)} skipped"
            return Verdict("skipped" if may_skip_all else "failed", summary, details)
        return Verdict("passed", summary, details)

    return judge


def _reasons(skipped: Sequence[ElementTree.Element]) -> list[str]:
    """Return why tests were skipped, the most frequent reason first."""
    elements = [case.find("skipped") for case in skipped]
    counts = Counter(one.get("message", "") for one in elements if one is not None)
    return [f"{count:6} {reason}" for reason, count in counts.most_common(30)]


def _failure(case: ElementTree.Element) -> ElementTree.Element | None:
    for kind in ("failure", "error"):
        failure = case.find(kind)
        if failure is not None:
            return failure
    return None


def _name(case: ElementTree.Element) -> str:
    where = case.get("file") or case.get("classname", "").replace(".", "/")
    return f"{where}::{case.get('name')}"


def _failures(cases: Sequence[ElementTree.Element]) -> list[str]:
    """List failed tests in order, as the first may have caused the others."""
    details = []
    for case in cases[:SHOWN]:
        failure = _failure(case)
        assert failure is not None
        text = failure.text or failure.get("message") or ""
        details.append(f"`{_name(case)}`\n\n{fenced(last_lines(text))}")
    if len(cases) > SHOWN:
        names = "\n".join(_name(case) for case in cases[SHOWN:NAMED])
        more = f"\n... and {len(cases) - NAMED} more" if len(cases) > NAMED else ""
        details.append(f"Failed as well:\n\n{fenced(names + more)}")
    return details


_OUTCOME = re.compile(r"^(\S+\.py::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)
_BEGUN = re.compile(r"^(\S+\.py::\S.*)$", re.MULTILINE)
_SUMMARIES = re.compile(r"^(?:=+ (?!test session starts)|!{5,} )", re.MULTILINE)


def _unfinished(text: str) -> str:
    """Return the test that had begun but not ended in a log, if any."""
    begun = _BEGUN.findall(_SUMMARIES.split(text, maxsplit=1)[0])  # warnings name tests as well
    return "" if not begun or _OUTCOME.match(begun[-1]) else begun[-1].strip()


def _without_report(ended: Ended, files: Files) -> Verdict:
    """Judge by the log of a run that did not write its report."""
    text = files.text()
    outcomes = _OUTCOME.findall(text)
    summary = f"{end_of(ended, files)} after {len(outcomes)} tests"
    if stopped_in := _unfinished(text):
        summary += f", in {stopped_in}"
    names = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")][:NAMED]
    details = ["Failed until then:\n\n" + fenced("\n".join(names))] if names else []
    return Verdict("failed", summary, [*details, fenced(last_lines(text, 40))])


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
