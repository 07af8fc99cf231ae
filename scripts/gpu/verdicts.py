"""Verdicts on the parts of a GPU report, from what their processes leave."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINES = 40  # of a part that failed


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it left.

    Attributes
    ----------
    how : "exited", "limit" (stopped after its time limit) or "interrupted"
    status : exit status; negative: the signal that killed it. None if it could not be started
    text : standard output and standard error
    result : file of results, if it has written one
    """

    how: str
    status: int | None
    seconds: float
    text: str
    result: Path

    @property
    def is_good(self) -> bool:
        return self.how == "exited" and self.status == 0

    def __str__(self) -> str:
        if self.how == "limit":
            return f"stopped after its time limit, {self.seconds:.0f} s"
        if self.how == "interrupted":
            return "interrupted"
        if self.status is None:
            return "could not be started"
        if self.status < 0:
            return f"died of {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"


@dataclass
class Verdict:
    """The verdict on a part.

    Attributes
    ----------
    state : "passed", "failed" or "skipped"
    summary : one line
    lines : what it printed, as far as it matters
    result : what it measured
    failed : tests that failed
    """

    state: str
    summary: str
    lines: list[str] = field(default_factory=list)
    result: Any = None
    failed: list[str] = field(default_factory=list)


Judge = Callable[[Ended], Verdict]


def last_lines(text: str, count: int = LINES) -> list[str]:
    """Return the last lines that are not blank."""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def of_status(ended: Ended) -> Verdict:
    """Judge by the exit status."""
    if ended.is_good:
        return Verdict("passed", " ".join(last_lines(ended.text, 1)))
    return Verdict("failed", str(ended), last_lines(ended.text))


def of_page(ended: Ended) -> Verdict:
    """Judge by the exit status, and keep all that was printed."""
    verdict = of_status(ended)
    verdict.lines = last_lines(ended.text, 200)
    return verdict


def of_result(ended: Ended) -> Verdict:
    """Judge by the JSON of a program."""
    if not ended.is_good:
        return of_status(ended)
    try:
        result = json.loads(ended.result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Verdict("failed", f"no JSON: {error}", last_lines(ended.text))
    return Verdict("passed", "checked and measured", result=result)


_OUTCOME = re.compile(r"^\S+\.py::.*? (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)
_BEGUN = re.compile(r"^(\S+\.py::\S.*)$", re.MULTILINE)
_HEADINGS = re.compile(r"^(?:=+ (?!test session starts)|!{5,} )", re.MULTILINE)
_COUNTED = re.compile(r"^=+ (.*(?:passed|failed|skipped|error|no tests).*) in [\d.]+s.* =+$", re.M)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


def of_tests(may_skip_all: bool) -> Judge:
    """Return a judge of what pytest prints with `-v`.

    Parameters
    ----------
    may_skip_all : whether a run of skipped tests alone passes, as tests for GPUs without one
    """

    def judge(ended: Ended) -> Verdict:
        tests, *rest = _HEADINGS.split(ended.text, maxsplit=1)
        lines = last_lines("".join(rest) or tests, 10 * LINES)
        counted = _COUNTED.findall(ended.text)
        summary = counted[-1] if counted else f"{len(_OUTCOME.findall(tests))} tests ended"
        failed = _FAILED.findall(ended.text)
        if ended.how != "exited" or ended.status not in (0, 1, 5):
            begun = _BEGUN.findall(tests)
            within = ""
            if begun and not _OUTCOME.match(begun[-1]):
                failed.append(begun[-1].partition(" Fatal Python error")[0].strip())
                within = f", in {failed[-1]}"
            return Verdict("failed", f"{summary}; {ended}{within}", lines, failed=failed)
        if ended.status == 1:
            return Verdict("failed", summary, lines, failed=failed)
        if "passed" not in summary:
            state = "skipped" if may_skip_all or ended.status == 0 else "failed"
            return Verdict(state, f"no test ran, {summary}", lines)
        return Verdict("passed", summary)

    return judge


_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")
_NO_CUDA = "terminated before first instrumented API call"


def of_sanitizer(may_go_unused: bool) -> Judge:
    """Return a judge of compute-sanitizer, by its error count.

    Parameters
    ----------
    may_go_unused : whether a program without CUDA calls is skipped instead of failed
    """

    def judge(ended: Ended) -> Verdict:
        counts = [int(n) for n in _ERRORS.findall(ended.text)]
        counts += [int(n) for n, *_ in _HAZARDS.findall(ended.text)]
        if ended.how == "exited" and sum(counts):
            what = "hazards" if _HAZARDS.search(ended.text) else "errors"
            reported = [line for line in ended.text.splitlines() if line.startswith("=========")]
            return Verdict("failed", f"{sum(counts)} {what}", reported[: 3 * LINES])
        if may_go_unused and _NO_CUDA in ended.text:
            return Verdict("skipped", "the program made no CUDA call")
        if not ended.is_good:
            return of_status(ended)
        if not counts:
            return Verdict("failed", "no summary", last_lines(ended.text))
        return Verdict("passed", "nothing reported")

    return judge
