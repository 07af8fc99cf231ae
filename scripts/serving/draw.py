"""A picture of a few steps: what the compute stream does while tables are uploaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcupy.timelines import pictures

COLOURS = {
    "embed": "#72A98F", "qkv": "#B6566B", "rope_store_kv": "#9C8AC2", "paged_attention": "#4C78A8",
    "mlp": "#D9C45F", "logits": "#8C7B68", "copy": "#E8A15A",
}  # fmt: skip
OTHER = "#7F8C99"
LEGEND = {"copy": "copy of page tables (µs beside it)"}
ROWS = {"tables": 0.0, "compute": 1.0}
LABELS = ("page tables\ncopied beside", "the model's\ncompute stream")


def draw_steps(spans: Sequence[Any], path: Path, title: str) -> None:
    """Draw the lanes "tables" and "compute", from the second step's start to the last one's.

    The first step has nothing before it, the last nothing behind it. Uploads of tables are far
    shorter than a step: those that start together are one mark, with their time, and a line down
    to what the compute stream does then.

    Raises
    ------
    ImportError
        matplotlib is missing: `pip install matplotlib`.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    begins = [span.start_us for span in spans if span.name == "embed"]
    origin = begins[min(1, len(begins) - 1)]
    end_us = begins[-1] if begins[-1] > origin else max(span.end_us for span in spans)
    shown = [span for span in spans if origin <= span.start_us < end_us]
    compute = [span for span in shown if span.lane == "compute"]
    copies = [span for span in shown if span.lane == "tables"]

    figure = Figure(figsize=(12, 3.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    for span in compute:
        axes.barh(
            ROWS["compute"], span.duration_us / 1e3, 0.5, (span.start_us - origin) / 1e3,
            color=COLOURS.get(span.name, OTHER), linewidth=0,
        )  # fmt: skip
    for start_us, count, copy_us in _moments(copies, (end_us - origin) / 25):
        at = (start_us - origin) / 1e3
        axes.plot([at, at], [ROWS["tables"], 1.25], color=COLOURS["copy"], linewidth=1)
        axes.plot(at, ROWS["tables"], "v", color=COLOURS["copy"], markersize=9)
        what = f"{copy_us:.0f} µs" if count == 1 else f"{count} copies\n{copy_us:.0f} µs"
        axes.annotate(
            what, (at, ROWS["tables"]), (7, 4), textcoords="offset points", fontsize=9
        )  # fmt: skip
    for start_us in begins[1:]:
        axes.axvline((start_us - origin) / 1e3, color="#444444", linewidth=0.8, linestyle=":")
    axes.set_yticks(list(ROWS.values()), LABELS, fontsize=12)
    axes.set(xlim=(0, (end_us - origin) / 1e3), ylim=(1.45, -0.55))
    axes.set_xlabel("time, ms (dotted: a step begins)")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    seen = dict.fromkeys(s.name if s.name in COLOURS else "other" for s in [*compute, *copies])
    keys = [Patch(color=COLOURS.get(name, OTHER), label=LEGEND.get(name, name)) for name in seen]
    figure.legend(handles=keys, loc="outside lower left", ncols=8, frameon=False)
    pictures.save(figure, path)


def _moments(copies: Sequence[Any], apart_us: float) -> list[tuple[float, int, float]]:
    """Group copies that start close together: (start of the first, number, us in all)."""
    moments: list[tuple[float, int, float]] = []
    for span in sorted(copies, key=lambda span: span.start_us):
        if moments and span.start_us - moments[-1][0] < apart_us:
            start_us, count, copy_us = moments[-1]
            moments[-1] = start_us, count + 1, copy_us + span.duration_us
        else:
            moments.append((span.start_us, 1, span.duration_us))
    return moments
