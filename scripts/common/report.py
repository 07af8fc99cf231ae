"""Tables and files of measurements, and where they were made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from kvcupy.testing.report import describe, write_json

__all__ = [
    "compare",
    "describe",
    "format_table",
    "read_json",
    "where",
    "write_json",
]

# --- Tables ---------------------------------------------------------------------------------------


def format_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out a table: the first column to the left, numbers to the right; None is `-`."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def where(report: dict[str, Any]) -> str:
    """Return one line on the device, the date and the commit of a report."""
    commit = (report["commit"] or "unknown")[:12] + (" with changes" if report["dirty"] else "")
    machine = report["gpu_and_driver"] or report["processor"]
    return f"{report['device']} ({machine}), {report['date']}, commit {commit}"


def read_json(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises
    ------
    ValueError : the file holds no report
    OSError : the file cannot be read
    """
    try:
        report = json.loads(path.read_text())
        complete = all({"case", "mode", "us"} <= row.keys() for row in report["rows"])
    except (ValueError, TypeError, KeyError, AttributeError):
        complete = False
    if not complete:
        raise ValueError(f"expected a file that --json has written, got {path}")
    return cast(dict[str, Any], report)


# --- Two reports ----------------------------------------------------------------------------------


def compare(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the times of the cases that two reports share, and how many times as fast they became.

    Examples
    --------
    >>> case = {"case": "store", "mode": "graph"}
    >>> old, new = ({"rows": [{**case, "us": {"kvcupy": us}}]} for us in (6.0, 4.0))
    >>> print(compare(old, new))
    case   run    us before  us after  times as fast
    -----  -----  ---------  --------  -------------
    store  graph       6.00      4.00           1.50
    """
    old, new = (
        {(row["case"], row["mode"]): row["us"]["kvcupy"] for row in report["rows"]}
        for report in (before, after)
    )
    rows = [(*key, old[key], us, old[key] / us) for key, us in new.items() if key in old]
    columns = ("case", "run", "us before", "us after", "times as fast")
    lines = [format_table(columns, rows)] if rows else ["no case is in both"]
    for name, only in (("first", old.keys() - new.keys()), ("second", new.keys() - old.keys())):
        if only:
            lines.append(f"{len(only)} cases are in the {name} alone")
    for key in ("device", "processor", "gpu_and_driver"):
        if before.get(key) != after.get(key):
            lines.append(f"{key} differs: {before.get(key)}, then {after.get(key)}")
    return "\n".join(lines)
