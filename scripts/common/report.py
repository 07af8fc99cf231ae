"""Tables, files and pictures of measurements, and where they were made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from kvcupy.extras import install
from kvcupy.testing.report import describe, where, write_json
from kvcupy.timelines import pictures

__all__ = [
    "compare",
    "describe",
    "format_table",
    "plot",
    "read_json",
    "require_matplotlib",
    "where",
    "write_json",
]

_COLOURS = ("#4C78A8", "#E8A15A", "#72A98F", "#B6566B", "#9C8AC2", "#8C7B68", "#D9C45F", "#7F8C99")
_COLUMNS = 4  # of a picture, at most

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


# --- Pictures -------------------------------------------------------------------------------------


def require_matplotlib() -> Any:
    """Return matplotlib's Figure.

    Raises
    ------
    ImportError : it is missing; the message says how to get it
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"--plot needs matplotlib: {install('plot')}") from error
    return Figure


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw bandwidth against the bytes of a call: a panel per operation, a line per model.

    Raises
    ------
    ImportError : matplotlib is missing
    """
    figure_class = require_matplotlib()
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter

    rows = report["rows"]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(models)}
    columns = min(len(operations), _COLUMNS)
    lines = -(-len(operations) // columns)
    figure = figure_class(figsize=(4.2 * columns, 3.2 * lines + 1), dpi=110, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel in panels[len(operations) :]:
        panel.set_visible(False)
    for panel, operation in zip(panels, operations, strict=False):
        own = [row for row in rows if row["operation"] == operation]
        for key in dict.fromkeys(map(_series, own)):
            model, fmt, _ = key
            filled = colours[model] if fmt.startswith("bf16") else "white"
            for names, style in ((("kvcupy",), "o-"), (("torch", "torch, one thread"), "x:")):
                points = sorted(
                    (row["bytes"], row["bytes"] / min(times) / 1e3)
                    for row in own
                    if _series(row) == key
                    and (times := [row["us"][name] for name in names if name in row["us"]])
                )
                if points:
                    panel.plot(*zip(*points, strict=True), style, color=colours[model],
                               markerfacecolor=filled, markersize=4, linewidth=1)  # fmt: skip
        for peak in sorted({row["copy_gb_per_s"] for row in own}):
            panel.axhline(peak, color="gray", linewidth=0.8, linestyle="--")
        panel.set(xscale="log", yscale="log", title=operation, xlabel="bytes of a call")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(color="#E2E2E2", linewidth=0.6)
        panel.set_ylabel("GB/s")
    handles = [Line2D([], [], color=colours[name], label=name) for name in models]
    handles += [
        Line2D([], [], color="black", marker="o", label="kvcupy"),
        Line2D([], [], color="black", marker="o", markerfacecolor="white", label="8-bit cache"),
        Line2D([], [], color="black", marker="x", linestyle=":", label="torch"),
        Line2D([], [], color="gray", linestyle="--", label="measured copy"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(where(report), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures.save(figure, path)


def _series(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return what rows on one line of the picture share."""
    return row["model"], row["format"], row["series"]
