"""The page of a GPU report: the machine, a verdict for each part, and the failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .parts import DECIDING, Part

STATES = ("passed", "failed", "interrupted", "skipped", "running", "not run")


@dataclass
class Result:
    """The result of a part: one of `STATES`, a summary line, and paragraphs of Markdown."""

    part: Part
    state: str = "not run"
    summary: str = ""
    seconds: float | None = None
    details: list[str] = field(default_factory=list)


def all_well(results: Sequence[Result]) -> bool:
    """Return whether some parts passed and the others were skipped."""
    states = {result.state for result in results}
    return "passed" in states and states <= {"passed", "skipped"}


def counts(results: Sequence[Result]) -> str:
    """Return how many parts are in which state."""
    states = [result.state for result in results]
    parts = [f"{states.count(state)} {state}" for state in STATES if state in states]
    return ", ".join(parts)


def verdict_on_machine(results: Sequence[Result]) -> str:
    """Return whether kvcupy works on the machine, by the parts that decide it, in one line."""
    deciding = [result for result in results if result.part.group in DECIDING]
    failed = next((result for result in deciding if result.state == "failed"), None)
    if failed is not None:
        return f"kvcupy does not work here: {failed.part.name}: {failed.summary}"
    passed = {result.part.group for result in deciding if result.state == "passed"}
    open_groups = dict.fromkeys(r.part.group for r in deciding if r.part.group not in passed)
    if open_groups or not deciding:
        open_text = ", ".join(open_groups) or "what decides it"
        return f"Whether kvcupy works here is open, for this did not run: {open_text}."
    others = [result.part.name for result in results if result.state == "failed"]
    return "kvcupy works here" + (f", but these failed: {', '.join(others)}." if others else ".")


def page(results: Sequence[Result], about: dict[str, Any], *, state: str, options: str) -> str:
    """Return the report.

    Parameters
    ----------
    about : from `environment.facts`
    state : "running", "finished" or "interrupted"
    options : of the command line
    """
    lines = [
        f"# kvcupy on {about.get('device', 'a GPU')}",
        "",
        f"**{verdict_on_machine(results)}**",
        "",
        "Please attach `gpu_report.tar.gz`, which holds this page with its logs and results, to an "
        "issue: also when all is well.",
        "",
        f"**{state.capitalize()}: {counts(results)}.**",
        "",
    ]
    lines += [f"`scripts/gpu_report.sh {options}`".replace(" `", "`"), ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(_plain(value))} |" for name, value in about.items()]
    lines += ["", "| part | what | verdict | seconds | |", "|---|---|---|---:|---|"]
    for result in results:
        seconds = "" if result.seconds is None else f"{result.seconds:.0f}"
        cells = (result.part.name, result.part.title, result.state, seconds, result.summary)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    for result in results:
        if result.details:
            lines += ["", f"## {result.part.name}: {result.state}", "", result.summary]
            for paragraph in result.details:
                lines += ["", paragraph]
    return "\n".join(lines) + "\n"


def as_json(
    results: Sequence[Result], about: dict[str, Any], *, state: str, options: str
) -> dict[str, Any]:
    """Return the report without details of failures, for programs."""
    return {
        "state": state,
        "options": options,
        "all_well": state == "finished" and all_well(results),
        "about": about,
        "parts": [
            {
                "name": result.part.name,
                "group": result.part.group,
                "state": result.state,
                "seconds": result.seconds,
                "summary": result.summary,
            }
            for result in results
        ],
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(_plain, value)) or "none"
    return "none" if value is None else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
