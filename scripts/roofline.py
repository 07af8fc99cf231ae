"""Bound and model the speed of the hot kernels on GPUs that need not be present.

    python scripts/roofline.py --op decode --arch sm_90 --verbose
    python scripts/roofline.py --against scripts/results/roofline.json
    python scripts/roofline.py --json scripts/results/roofline.json --plot \
        scripts/results/roofline.png --page docs/measurements.md
    python scripts/roofline.py --add-to scripts/results/roofline.json --page \
        docs/measurements.md    # with another NVRTC

No measurement: the kernels are compiled, and what their machine code allows is printed: the share
of a GPU's memory bandwidth that each of its resources leaves (`machine_code/bounds.py`), and how
long a call takes by an in-order model (`machine_code/model.py`), beside what an H100 took. The exit
status is 1 if a row is worse than in the file of --against: its shares by more than 3 %, or the
model's time by more than 5 %. With an NVRTC that is not recorded, worse rows are printed, and the
status is 0: code generation is not the project's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from machine_code.bounds import Entry, disassembler, examine
from machine_code.chips import CHIPS, DEFAULT_CHIPS, RATES
from machine_code.model import FITTED, LATENCIES
from machine_code.rows import ROWS

from kvcupy import sources
from kvcupy.bench.frame import count
from kvcupy.bench.report import require_matplotlib, write_json
from kvcupy.devices import nvrtc
from kvcupy.errors import CompileError
from kvcupy.precompile import require_archs
from kvcupy.progress import INTERRUPTED, Progress, available_cpus, run
from kvcupy.timelines import pictures

WHAT = (
    "From the machine code, not measured: the share of a chip's memory bandwidth (of the link's, "
    "of the tensor cores' peak) that each of its resources allows a kernel, and the time of a call "
    "by an in-order model. `measured` is of an H100."
)
MEASURED = Path(__file__).resolve().parent / "results" / "attention_h100.json"
_MODEL_SLACK = 0.05


def version() -> str:
    return ".".join(map(str, nvrtc.nvrtc_version()))


def table(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return what `--json` writes."""
    entries = list(entries)
    return {
        "what": WHAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "nvrtc": version(),
        "kernels": sources.digest(),
        "rates": RATES,
        "latencies": LATENCIES,
        "fitted": FITTED,
        "chips": {n: asdict(c) for n, c in CHIPS.items() if c.name in {e.chip for e in entries}},
        "rows": [{k: v for k, v in asdict(e).items() if k != "pipes"} for e in entries],
        "measured": measured(entries),
        "model_us_of_other_compilers": {},
    }


def measured(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return what an H100 took for a row, with the model and FlashInfer's fastest kernel beside."""
    recorded = json.loads(MEASURED.read_text())
    cases = {case["case"]: case["us"] for case in recorded["rows"]}
    peers = {case["case"]: min(case["us"].values()) for case in recorded["flashinfer"]}
    rows = {row.name: row for row in ROWS}
    return [
        {"row": e.row, "case": rows[e.row].measured, "bound_us": e.bound_us, "model_us": e.model_us,
         "measured_us": cases[rows[e.row].measured], "flashinfer_us": peers.get(rows[e.row].peer),
         "error": round(e.model_us / cases[rows[e.row].measured] - 1, 3),
         "is_newer": e.kernel.endswith(", 8>")}  # tiles of eight rows: made since that day
        for e in entries if e.chip == CHIPS["H100"].name and rows[e.row].measured in cases
    ]  # fmt: skip


def errors_of(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the errors of the model, sorted, where the kernel is the one that was measured."""
    return sorted(abs(row["error"]) for row in rows if not row["is_newer"])


def models_by_row(entries: Iterable[Entry]) -> dict[str, dict[str, float]]:
    """Return the model's time of each row, by chip: what is recorded of other compilers."""
    models: dict[str, dict[str, float]] = {}
    for entry in entries:
        models.setdefault(entry.row, {})[entry.chip] = entry.model_us
    return models


def worse(entries: Iterable[Entry], recorded: Mapping[str, Any]) -> list[str]:
    """Return a line for each entry that is worse than its recorded self by more than the slack.

    A row that the record lacks is new, and not worse.
    """
    before = {(row["row"], row["chip"]): row for row in recorded["rows"]}
    if version() != recorded["nvrtc"]:
        models = recorded.get("model_us_of_other_compilers", {}).get(version())
        if models is not None:
            before = {
                (row, chip): {"model_us": us} for row in models for chip, us in models[row].items()
            }
    lines = []
    for entry in entries:
        row = before.get((entry.row, entry.chip))
        if row is None:
            continue
        for name in ("share", "dearest_share"):
            now, then = getattr(entry, name), row.get(name, 0.0)
            if now < then * (1 - entry.slack):
                lines.append(
                    f"{entry.row}, {entry.chip}: {name} {now:.1%}, was {then:.1%} (slack "
                    f"{entry.slack:.0%}); {entry.binds} binds"
                )
        if entry.model_us > row["model_us"] * (1 + _MODEL_SLACK):
            lines.append(
                f"{entry.row}, {entry.chip}: {entry.model_us} us by the model, was "
                f"{row['model_us']} (slack {_MODEL_SLACK:.0%})"
            )
        lines += [f"{entry.row}, {entry.chip}: {problem}" for problem in entry.problems]
    return lines


def lines_of(entries: Iterable[Entry], *, verbose: bool = False) -> list[str]:
    """Return the table as text."""
    entries = list(entries)
    lines = [
        f"{'row':50} {'chip':15} {'regs':>4} {'warps':>5} {'instructions':>12} "
        f"{'share':>11} {'bound us':>9} {'model us':>9}  ceilings"
    ]
    for e in entries:
        name = _peak_of(e)
        peak = e.ceilings[name]
        others = ", ".join(f"{r} {c / peak:.0%}" for r, c in e.ceilings.items() if r != name)
        lines.append(
            f"{e.row:50} {e.chip:15} {e.registers:4} {e.warps_per_sm:5} "
            f"{e.instructions:5}..{e.dearest:5} {e.share:5.0%}..{e.dearest_share:4.0%} "
            f"{e.bound_us:9.1f} {e.model_us:9.1f}  {others}"
        )
        if verbose:
            pipes = ", ".join(f"{pipe} {count}" for pipe, count in e.pipes.items())
            kernels = ", ".join(f"{name} {us} us" for name, us in e.kernels_us.items())
            lines.append(f"    {e.kernel}: {pipes}")
            lines.append(f"    {kernels}; a pass of the warps of an SM {e.pass_clocks} clocks")
        if verbose and "tensor" in e.ceilings:
            busy = e.ceilings[e.binds] / e.ceilings["tensor"]
            lines.append(f"    tensor cores are busy for {busy:.0%} of the time at that bound")
        if e.uncounted_loops:
            lines.append(f"    {e.uncounted_loops} inner loops are counted once")
        lines += [f"    problem: {problem}" for problem in e.problems]
    return lines


def lines_of_measured(entries: Iterable[Entry]) -> list[str]:
    """Return `measured` as text."""
    rows = measured(entries)
    if not rows:
        return []
    lines = [f"{'measured on an H100, us':50} {'bound':>8} {'model':>8} {'measured':>8} FlashInfer"]
    for row in rows:
        peer = "" if row["flashinfer_us"] is None else f"{row['flashinfer_us']:10.1f}"
        lines.append(
            f"{row['row']:50} {row['bound_us']:8.1f} {row['model_us']:8.1f} "
            f"{row['measured_us']:8.1f} {peer:10} {row['error']:+.0%}"
        )
    errors = errors_of(rows)
    lines.append(f"errors: median {errors[len(errors) // 2]:.0%}, largest {errors[-1]:.0%}")
    return lines


def _peak_of(entry: Entry) -> str:
    return next(name for name in ("memory", "link", "tensor peak") if name in entry.ceilings)


# --- The page -------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- roofline: tables -->", "<!-- roofline: end -->"
_OF_PAGE = (
    "store bf16", "rope_store bf16", "gather fp8_e4m3 to bf16", "decode bf16 group 4",
    "decode fp8_e4m3 group 4", "decode int8 group 4", "decode nvfp4 group 4",
    "decode mxfp4 group 4", "decode int4 group 4", "decode bf16 group 4, 64 wide",
    "decode fp8_e4m3 group 4, 64 wide", "decode int8 group 4, 64 wide",
    "decode nvfp4 group 4, 64 wide", "decode mxfp4 group 4, 64 wide",
    "decode int4 group 4, 64 wide", "decode bf16 group 4, 1 of 8192",
    "decode nvfp4 group 4, 1 of 8192", "decode bf16 group 4, one of 128K among 2K",
    "decode bf16 group 4, lognormal", "decode bf16 group 4, pages of 1",
    "decode bf16 group 4, batch-invariant", "mla bf16 16 heads", "mla bf16 16 heads, 1 of 8192",
    "mla bf16 16 heads, one of 128K among 2K", "mla bf16 128 heads, 64 of 4096",
    "mla bf16 128 heads, 1 of 32768", "mla nvfp4 16 heads", "mla nvfp4 128 heads",
    "mla mxfp4 16 heads", "mla int4 16 heads",
    "prefill bf16 128x128, 8192 of 8192", "prefill fp8_e4m3 128x128, 2048 of 4096",
)  # fmt: skip


def tables(recorded: Mapping[str, Any]) -> str:
    """Return the tables of the page as Markdown, from what `--json` wrote."""
    lines = [
        "| H100, us | bound | model | measured | difference | FlashInfer, its fastest |",
        "|---|---|---|---|---|---|",
    ]
    for row in recorded["measured"]:
        peer = "" if row["flashinfer_us"] is None else f"{row['flashinfer_us']:.1f}"
        lines.append(
            f"| {row['row']} | {row['bound_us']:.1f} | {row['model_us']:.1f} | "
            f"{row['measured_us']:.1f} | {row['error']:+.0%} | {peer} |"
        )
    errors = errors_of(recorded["measured"])
    lines += [
        "",
        f"Model and measurement differ by {errors[len(errors) // 2]:.0%} in the median, and by "
        f"{errors[-1]:.0%} at most, where the kernel is the one measured.",
        "",
    ]
    chips = list(dict.fromkeys(row["chip"] for row in recorded["rows"]))
    times = {(row["row"], row["chip"]): row for row in recorded["rows"]}
    lines += [
        f"| model, us (bound) | {' | '.join(chips)} |", "|---" * (len(chips) + 1) + "|"
    ]  # fmt: skip
    for name in _OF_PAGE:
        cells = [times[name, chip] for chip in chips]
        shown = " | ".join(f"{_us(c['model_us'])} ({_us(c['bound_us'])})" for c in cells)
        lines.append(f"| {name} | {shown} |")
    for other, models in recorded["model_us_of_other_compilers"].items():
        ratios = sorted(
            (models[row][chip] / times[row, chip]["model_us"] - 1, row, chip)
            for row in models
            for chip in models[row]
        )
        (least, *of_least), (most, *of_most) = ratios[0], ratios[-1]
        lines += [
            "",
            f"NVRTC {other} instead of {recorded['nvrtc']} changes the model's times by "
            f"{ratios[len(ratios) // 2][0]:+.1%} in the median,",
            f"between {least:+.0%} ({', '.join(of_least)}) and",
            f"{most:+.0%} ({', '.join(of_most)}).",
        ]
    return "\n".join(lines)


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def write_page(page: Path, recorded: Mapping[str, Any]) -> None:
    """Replace the tables between their marks in a page.

    Raises
    ------
    ValueError : the page has no marks
    """
    text = page.read_text()
    before, begin, rest = text.partition(_BEGIN)
    _, end, behind = rest.partition(_END)
    if not end:
        raise ValueError(f"--page: expected {_BEGIN} and {_END} in {page}")
    page.write_text(f"{before}{begin}\n{tables(recorded)}\n{end}{behind}")


_COLOURS = {
    "issue": "tab:red", "alu": "tab:orange", "fma": "tab:brown", "imad": "tab:olive",
    "half": "tab:pink", "xu": "tab:purple", "lsu": "tab:cyan", "tensor": "tab:green",
    "fp64": "tab:gray",
}  # fmt: skip


def plot(entries: Sequence[Entry], file: Path) -> None:
    """Draw a panel for each chip: per row bound and model, and a mark for each resource's ceiling.

    Raises
    ------
    ImportError : matplotlib is missing
    """
    figure_class = require_matplotlib()
    from matplotlib.lines import Line2D

    chips = list(dict.fromkeys(entry.chip for entry in entries))
    names = list(dict.fromkeys(entry.row for entry in entries))
    size = (4 + 2.8 * len(chips), 1.6 + 0.22 * len(names))
    figure = figure_class(figsize=size, dpi=90, layout="constrained")
    panels = figure.subplots(1, len(chips), sharey=True, squeeze=False)[0]
    for panel, chip in zip(panels, chips, strict=True):
        own = [entry for entry in entries if entry.chip == chip]
        places = [names.index(entry.row) for entry in own]
        panel.barh(places, [100 * entry.share for entry in own], color="lightsteelblue")
        models = [100 * e.share * e.bound_us / e.model_us for e in own]
        panel.barh(places, models, color="steelblue")
        for place, entry in zip(places, own, strict=True):
            peak = entry.ceilings[_peak_of(entry)]
            for resource, ceiling in entry.ceilings.items():
                if resource in _COLOURS and ceiling < 2 * peak:
                    panel.plot(100 * ceiling / peak, place, "|", color=_COLOURS[resource],
                               markersize=9, markeredgewidth=2)  # fmt: skip
        panel.axvline(100, color="gray", linewidth=0.8)
        panel.set(xlim=(0, 200), title=chip, xlabel="% of the peak")
        panel.set_yticks(range(len(names)), names, fontsize=8)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    marks = [Line2D([], [], color=c, marker="|", linestyle="", markeredgewidth=2, label=r)
             for r, c in _COLOURS.items()]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8)
    figure.suptitle(
        "By the machine code, not measured: what the code allows (light) and the model of a call "
        "(dark)\nas a share of memory bandwidth (load: of PCIe; prefill: of the tensor cores' "
        "peak); marks: ceilings of resources",
        fontsize=10,
    )
    pictures.save(figure, file)


# --- The command ----------------------------------------------------------------------------------


def _task(task: tuple[str, Sequence[str]]) -> list[Entry]:
    """Examine a row by its name on chips that run the same code, in whichever process."""
    name, chips = task
    row = next(row for row in ROWS if row.name == name)
    return [examine(row, CHIPS[chip]) for chip in chips]


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
    recorded = None if options.against is None else _read(options.against, "--against")
    chips = _chips(options.arch, recorded)
    rows = [row for row in ROWS if any(text in row.name for text in options.op or ("",))]
    if not rows:
        names = ", ".join(row.name for row in ROWS)
        raise ValueError(f"--op: expected part of one of {names}; got {', '.join(options.op)}")
    if options.page is not None and options.json is None and options.add_to is None:
        raise ValueError("--page: expected --json or --add-to beside it")
    disassembler()
    added = None if options.add_to is None else _read(options.add_to, "--add-to")
    archs = dict.fromkeys(CHIPS[chip].arch for chip in chips)
    tasks = [
        (row.name, [chip for chip in chips if CHIPS[chip].arch == arch])
        for row in rows for arch in archs
    ]  # fmt: skip
    with Progress("roofline", len(tasks), "rows", lines=options.progress) as progress:
        entries = [e for each in run(_task, tasks, options.jobs, progress.to) for e in each]
    print("\n".join([*lines_of(entries, verbose=options.verbose), *lines_of_measured(entries)]))
    if added is not None:
        _add(entries, added, options.add_to)
    written = added
    if options.json is not None:
        written = table(entries)
        write_json(options.json, written)
    if options.page is not None:
        write_page(options.page, cast(dict[str, Any], written))
    if options.plot is not None:
        plot(entries, options.plot)
    return 0 if recorded is None else _compare(entries, recorded, options.against)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--arch", nargs="+", metavar="sm_90", help="of chips; default: all that are recorded")
    add("--op", nargs="+", metavar="TEXT", help="rows whose name contains it")
    add("--json", type=Path, metavar="FILE", help="write all that was counted")
    other = "add the model's times to a file that --json has written with another NVRTC"
    add("--add-to", type=Path, metavar="FILE", help=other)
    add("--page", type=Path, metavar="FILE", help="write its tables into a page")
    add("--plot", type=Path, metavar="FILE", help="draw it, as PNG or SVG")
    against = "fail where a row is worse than in a file that --json has written"
    add("--against", type=Path, metavar="FILE", help=against)
    add("--jobs", type=count, metavar="N", default=available_cpus(), help="processes")
    add("--verbose", action="store_true", help="print instructions by pipe")
    add("--progress", action="store_true", help="print lines where stderr is not a terminal")
    return parser.parse_args(argv)


def _chips(archs: Sequence[str] | None, recorded: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the names of the default chips, or of all chips of some architectures."""
    if archs is None:
        return DEFAULT_CHIPS if recorded is None else list(recorded["chips"])
    require_archs(archs)
    known = dict.fromkeys(chip.arch for chip in CHIPS.values())
    for arch in archs:
        if arch not in known:
            raise ValueError(f"--arch: expected one of {', '.join(known)}, got {arch}")
    return [name for name, chip in CHIPS.items() if chip.arch in archs]


def _read(file: Path, option: str) -> dict[str, Any]:
    try:
        recorded = json.loads(file.read_text())
        complete = all(key in recorded for key in ("rows", "nvrtc", "chips", "measured"))
    except (ValueError, TypeError):
        complete = False
    if not complete:
        raise ValueError(f"{option}: expected a file that --json has written, got {file}")
    return cast(dict[str, Any], recorded)


def _add(entries: Sequence[Entry], recorded: dict[str, Any], file: Path) -> None:
    """Record the model's times with this NVRTC in a file that another one wrote.

    Raises
    ------
    ValueError : the file is of this NVRTC, or of other kernels
    """
    if recorded["nvrtc"] == version() or recorded["kernels"] != sources.digest():
        raise ValueError(
            f"--add-to: expected a file of these kernels and another NVRTC, got {file}"
        )
    recorded["model_us_of_other_compilers"][version()] = models_by_row(entries)
    write_json(file, recorded)


def _compare(entries: Sequence[Entry], recorded: Mapping[str, Any], file: Path | None) -> int:
    """Print what is worse than recorded; return the exit status."""
    lines = worse(entries, recorded)
    for line in lines:
        print(f"worse: {line}")
    if not lines:
        print(f"none of {len(entries)} rows is worse than in {file}")
        return 0
    others = recorded.get("model_us_of_other_compilers", {})
    if version() not in (recorded["nvrtc"], *others):
        print(f"not a failure: NVRTC is {version()}, and {recorded['nvrtc']} in {file}")
        return 0
    image = "" if file is None else f" --plot {file.with_suffix('.png')}"
    page = " --page docs/measurements.md"
    print(f"to accept this: python scripts/roofline.py --json {file}{image}{page}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
