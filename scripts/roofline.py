"""Bound the speed of the hot kernels on GPUs that need not be present, by their machine code.

    python scripts/roofline.py --op decode --arch sm_90 --verbose
    python scripts/roofline.py --against scripts/results/roofline.json
    python scripts/roofline.py --json scripts/results/roofline.json --plot \
        scripts/results/roofline.png

A bound, not a measurement: the kernels are compiled, and the share of a GPU's memory bandwidth that
each of its resources allows is printed (`machine_code/bounds.py`). The exit status is 1 if a row is
worse than in the file of --against. With another NVRTC than recorded, worse rows are printed, and
the status is 0: code generation is not the project's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from machine_code.bounds import ROWS, Entry, disassembler, examine
from machine_code.chips import BOARDS, CHIPS, DEFAULT_ARCHS, RATES, Board

from kvcupy import sources
from kvcupy.bench.frame import count
from kvcupy.bench.report import require_matplotlib, write_json
from kvcupy.devices import nvrtc
from kvcupy.errors import CompileError
from kvcupy.precompile import require_archs
from kvcupy.progress import INTERRUPTED, Progress, available_cpus, run
from kvcupy.timelines import pictures

WHAT = (
    "A bound from the machine code, not a measurement: the share of a chip's memory bandwidth (of "
    "the link's, of the tensor cores' peak) that each of its resources allows a kernel."
)


def table(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return what `--json` writes."""
    entries = list(entries)
    return {
        "what": WHAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "nvrtc": ".".join(map(str, nvrtc.nvrtc_version())),
        "kernels": sources.digest(),
        "rates": RATES,
        "chips": {arch: asdict(CHIPS[arch]) for arch in dict.fromkeys(e.arch for e in entries)},
        "rows": [asdict(entry) for entry in entries],
        "boards": {name: asdict(board) for name, board in BOARDS.items()},
        "rows_of_boards": boards(entries),
    }


def worse(entries: Iterable[Entry], recorded: Mapping[str, Any]) -> list[str]:
    """Return a line for each entry that is worse than its recorded self by more than the slack.

    A row that the record lacks is new, and not worse.
    """
    before = {(row["row"], row["arch"]): row for row in recorded["rows"]}
    lines = []
    for entry in entries:
        row = before.get((entry.row, entry.arch))
        if row is None:
            continue
        for name in ("share", "dearest_share", "busy"):
            now = getattr(entry, name)
            if now < row.get(name, 0.0) * (1 - row["slack"]):
                lines.append(
                    f"{entry.row}, {entry.arch}: {name} {now:.1%}, was {row[name]:.1%} (slack "
                    f"{row['slack']:.0%}); {entry.binds} binds"
                )
        lines += [f"{entry.row}, {entry.arch}: {problem}" for problem in entry.problems]
    return lines


def lines_of(entries: Iterable[Entry], *, verbose: bool = False) -> list[str]:
    """Return the table as text."""
    lines = [
        f"{'row':39} {'arch':7} {'regs':>4} {'warps':>5} {'instructions':>12} {'bytes':>6} "
        f"{'share':>11} {'busy':>5}  ceilings"
    ]
    for e in entries:
        name = _peak_of(e)
        peak = e.ceilings[name]
        others = ", ".join(f"{r} {c / peak:.0%}" for r, c in e.ceilings.items() if r != name)
        lines.append(
            f"{e.row:39} {e.arch:7} {e.registers:4} {e.warps_per_sm:5} "
            f"{e.instructions:5}..{e.dearest:5} {e.asked_bytes:6.0f} "
            f"{e.share:5.0%}..{e.dearest_share:4.0%} {e.busy:5.0%}  {others}"
        )
        if verbose:
            pipes = ", ".join(f"{pipe} {count}" for pipe, count in e.pipes.items())
            lines.append(f"    {e.kernel}: {pipes}")
            lines.append(
                f"    at most {e.warps_per_sm * e.bytes_in_flight} bytes in flight per SM, of "
                f"{e.bytes_needed} that hide the latency"
            )
        if verbose and "tensor" in e.ceilings:
            busy = e.ceilings[e.binds] / e.ceilings["tensor"]
            lines.append(f"    tensor cores are busy for {busy:.0%} of the time at that bound")
        if e.uncounted_loops:
            lines.append(f"    {e.uncounted_loops} inner loops are counted once")
        lines += [f"    problem: {problem}" for problem in e.problems]
    return lines


def shares_on(entry: Entry, board: Board) -> tuple[float, float]:
    """Return `share` and `dearest_share` on another board, of a row whose peak is the memory's."""
    speed = board.clock_mhz / CHIPS[entry.arch].clock_mhz / board.memory_gb_s
    cheapest = min(c for resource, c in entry.ceilings.items() if resource != "memory")
    return (
        round(min(1.0, cheapest * speed), 4), round(min(1.0, entry.dearest_ceiling * speed), 4)
    )  # fmt: skip


def boards(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return each row that stays below the memory's bandwidth on a board of `BOARDS`."""
    entries = list(entries)
    return [
        {"board": name, "row": entry.row, "share": share, "dearest_share": dearest}
        for name, board in BOARDS.items()
        for entry in entries
        if entry.arch == board.arch and "memory" in entry.ceilings
        for share, dearest in [shares_on(entry, board)]
        if dearest < 1
    ]


def lines_of_boards(entries: Iterable[Entry]) -> list[str]:
    """Return `boards` as text."""
    lines = []
    for name, rows in itertools.groupby(boards(entries), lambda row: row["board"]):
        board = BOARDS[name]
        lines.append(f"{name}, {board.memory_gb_s:g} GB/s, {board.clock_mhz} MHz, rows below 100 %")
        lines += [f"    {r['row']:39} {r['share']:5.0%}..{r['dearest_share']:4.0%}" for r in rows]
    return lines


def _peak_of(entry: Entry) -> str:
    return next(name for name in ("memory", "link", "tensor peak") if name in entry.ceilings)


_COLOURS = {
    "issue": "tab:red", "alu": "tab:orange", "fma": "tab:brown", "imad": "tab:olive",
    "half": "tab:pink", "xu": "tab:purple", "lsu": "tab:cyan", "tensor": "tab:green",
    "latency": "black", "fp64": "tab:gray",
}  # fmt: skip


def plot(entries: Sequence[Entry], file: Path) -> None:
    """Draw a panel for each chip: per row what binds it, and a mark for each resource's ceiling.

    Raises
    ------
    ImportError : matplotlib is missing
    """
    figure_class = require_matplotlib()
    from matplotlib.lines import Line2D

    archs = list(dict.fromkeys(entry.arch for entry in entries))
    names = list(dict.fromkeys(entry.row for entry in entries))
    size = (4 + 3.2 * len(archs), 1.6 + 0.26 * len(names))
    figure = figure_class(figsize=size, dpi=110, layout="constrained")
    panels = figure.subplots(1, len(archs), sharey=True, squeeze=False)[0]
    for panel, arch in zip(panels, archs, strict=True):
        own = [entry for entry in entries if entry.arch == arch]
        places = [names.index(entry.row) for entry in own]
        panel.barh(places, [100 * entry.share for entry in own], color="lightsteelblue")
        panel.barh(places, [100 * entry.dearest_share for entry in own], color="steelblue")
        for place, entry in zip(places, own, strict=True):
            peak = entry.ceilings[_peak_of(entry)]
            for resource, ceiling in entry.ceilings.items():
                if resource in _COLOURS and ceiling < 2 * peak:
                    panel.plot(100 * ceiling / peak, place, "|", color=_COLOURS[resource],
                               markersize=9, markeredgewidth=2)  # fmt: skip
        panel.axvline(100, color="gray", linewidth=0.8)
        panel.set(xlim=(0, 200), title=f"{own[0].chip} ({arch})", xlabel="% of the peak")
        panel.set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    marks = [Line2D([], [], color=c, marker="|", linestyle="", markeredgewidth=2, label=r)
             for r, c in _COLOURS.items()]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8)
    figure.suptitle(
        "What the code allows, not a measurement: bars from the cheapest (light) and the dearest "
        "way\nas a share of memory bandwidth (load: of PCIe; prefill: of the tensor cores' peak); "
        "marks: ceilings of resources",
        fontsize=10,
    )
    pictures.save(figure, file)


# --- The command ----------------------------------------------------------------------------------


def _task(task: tuple[str, str]) -> Entry:
    """Examine a row by its name, in whichever process."""
    name, arch = task
    return examine(next(row for row in ROWS if row.name == name), arch)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        return bound(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CompileError, ValueError, OSError, ImportError) as error:
        print(f"roofline: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2


def bound(options: argparse.Namespace) -> int:
    """Examine rows, print and write them, and return the exit status."""
    recorded = None if options.against is None else _read(options.against)
    archs = _archs(options.arch, recorded)
    rows = [row for row in ROWS if any(text in row.name for text in options.op or ("",))]
    if not rows:
        names = ", ".join(row.name for row in ROWS)
        raise ValueError(f"--op: expected part of one of {names}; got {', '.join(options.op)}")
    disassembler()
    tasks = [(row.name, arch) for row in rows for arch in archs]
    with Progress("roofline", len(tasks), "rows", lines=options.progress) as progress:
        entries = run(_task, tasks, options.jobs, progress.to)
    print("\n".join([*lines_of(entries, verbose=options.verbose), *lines_of_boards(entries)]))
    if options.json is not None:
        write_json(options.json, table(entries))
    if options.plot is not None:
        plot(entries, options.plot)
    return 0 if recorded is None else _compare(entries, recorded, options.against)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--arch", nargs="+", metavar="sm_90", help="default: as in --against, or four of them")
    add("--op", nargs="+", metavar="TEXT", help="rows whose name contains it")
    add("--json", type=Path, metavar="FILE", help="write all that was counted")
    add("--plot", type=Path, metavar="FILE", help="draw it, as PNG or SVG")
    against = "fail where a row is worse than in a file that --json has written"
    add("--against", type=Path, metavar="FILE", help=against)
    add("--jobs", type=count, metavar="N", default=available_cpus(), help="processes")
    add("--verbose", action="store_true", help="print instructions by pipe")
    add("--progress", action="store_true", help="print lines where stderr is not a terminal")
    return parser.parse_args(argv)


def _archs(archs: Sequence[str] | None, recorded: Mapping[str, Any] | None) -> Sequence[str]:
    if archs is None:
        archs = DEFAULT_ARCHS if recorded is None else list(recorded["chips"])
    require_archs(archs)
    for arch in archs:
        if arch not in CHIPS:
            raise ValueError(f"--arch: expected one of {', '.join(CHIPS)}, got {arch}")
    return archs


def _read(file: Path) -> dict[str, Any]:
    try:
        recorded = json.loads(file.read_text())
        complete = all(key in recorded for key in ("rows", "nvrtc", "chips"))
    except (ValueError, TypeError):
        complete = False
    if not complete:
        raise ValueError(f"--against: expected a file that --json has written, got {file}")
    return cast(dict[str, Any], recorded)


def _compare(entries: Sequence[Entry], recorded: Mapping[str, Any], file: Path | None) -> int:
    """Print what is worse than recorded; return the exit status."""
    lines = worse(entries, recorded)
    for line in lines:
        print(f"worse: {line}")
    if not lines:
        print(f"none of {len(entries)} rows is worse than in {file}")
        return 0
    version = ".".join(map(str, nvrtc.nvrtc_version()))
    if version != recorded["nvrtc"]:
        print(f"not a failure: NVRTC is {version}, and {recorded['nvrtc']} in {file}")
        return 0
    image = "" if file is None else f" --plot {file.with_suffix('.png')}"
    print(f"to accept this: python scripts/roofline.py --json {file}{image}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
