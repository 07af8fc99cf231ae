"""Checks and results of the serving demo: tokens, hidden copies, tables, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import charts
from common.checks import WrongBytes
from common.report import format_table

from .llama import Llama
from .requests import Prompt

# By what share of the spread of a row of logits another order of summation, or a key rounded the
# other way, changes the difference of two logits at most. A token this close to the best is a tie.
TIES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2, "fp8_e4m3": 0.5, "fp8_e5m2": 1.0, "int8": 0.2}


class WrongTokens(WrongBytes):
    """A request did not get the tokens of the plain uncached forward pass."""


@dataclass(frozen=True)
class Checked:
    """Tokens compared, and how many of them were not the first choice but tied with it."""

    tokens: int = 0
    ties: int = 0


def check_tokens(
    model: Llama, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]], cache_dtype: str
) -> Checked:
    """Compare every request's tokens with a plain uncached pass over all of it.

    Raises
    ------
    WrongTokens
        A token is neither the plain pass's choice nor tied with it; the message names the request,
        the position, both tokens and their logits.
    """
    total = ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(output) != prompt.output_length:
            raise WrongTokens(
                f"request {prompt.number}: expected {prompt.output_length} tokens, "
                f"got {len(output)}"
            )
        whole = np.concatenate([prompt.tokens, np.array(output[:-1], np.int64)])
        logits = model.device.to_numpy(model.forward_plain(whole, cache_dtype=cache_dtype))
        rows = logits[len(prompt.tokens) - 1 :]
        best, taken = rows.max(axis=-1), rows[np.arange(len(rows)), output]
        wrong = np.flatnonzero(~(best - taken <= TIES[cache_dtype] * rows.std(axis=-1)))
        if wrong.size:
            at = int(wrong[0])
            raise WrongTokens(
                f"request {prompt.number}, output {at} of {len(output)}: expected "
                f"{rows[at].argmax()} (logit {best[at]:.4f}), got {output[at]} ({taken[at]:.4f})"
            )
        total += len(output)
        ties += int((rows.argmax(axis=-1) != output).sum())
    return Checked(total, ties)


def hidden_share(
    spans: Sequence[Any], copier: str = "tables", compute: str = "compute"
) -> dict[str, float]:
    """Return how much of the time of copies on one lane passes while another lane is busy.

    Returns
    -------
    copies (a number), copy_us and hidden_us (sums), hidden (their ratio; 0 without a copy)
    """
    copies = [span for span in spans if span.lane == copier and span.name == "copy"]
    busy = _merged([(span.start_us, span.end_us) for span in spans if span.lane == compute])
    copy_us = sum(span.duration_us for span in copies)
    hidden_us = sum(
        max(0.0, min(stop, span.end_us) - max(start, span.start_us))
        for span in copies
        for start, stop in busy
    )
    return {
        "copies": len(copies),
        "copy_us": copy_us,
        "hidden_us": hidden_us,
        "hidden": hidden_us / copy_us if copy_us else 0.0,
    }


def _merged(stretches: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def step_times(runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the median time of a step over all runs, and over the least of each step.

    Runs of the same requests make the same steps.
    """
    return {
        "median_us": median(us for run in runs for us in run),
        "least_us": median(min(times) for times in zip(*runs, strict=True)),
    }


def drawn_steps(step_tokens: Sequence[tuple[int, int]], count: int) -> tuple[int, int]:
    """Choose successive steps to draw: the first past a third that both decode and prefill."""
    third = len(step_tokens) // 3
    both = [n for n, (decode, prefill) in enumerate(step_tokens) if decode and prefill]
    start = next((n for n in both if n >= third), third)
    return start, min(start + count, len(step_tokens))


def render_served(report: dict[str, Any]) -> str:
    """Return the report as text."""
    rows = [
        (name, row["tokens_per_s"], row["median_us"] / 1e3, row["least_us"] / 1e3)
        for name, row in report["tables"].items()
    ]
    columns = ("tables of a step", "tokens/s", "ms per step (median)", "(least)")
    counts, hidden, checked = report["counts"], report["tables_copied"], report["checked"]
    batch = f"{counts['most_running']} requests at the most; {counts['mixed_steps']} of "
    config = report["config"]
    lines = [
        f"random Llama of {config['layers']} layers, hidden {config['hidden']}, "
        f"{report['requests']} requests: {report['prompt_tokens']} tokens in, "
        f"{report['output_tokens']} out\n{report['num_pages']} pages of {report['page_size']} "
        f"{report['dtype']} tokens, at most {report['budget']} tokens and "
        f"{report['max_running']} requests per step",
        "",
        format_table(columns, rows),
        "",
        f"copies          {hidden['copies']} of tables (a step's, or the page lists of a fork), "
        f"{hidden['copy_us'] / 1e3:.2f} ms in all",
        f"                {hidden['hidden']:.0%} hidden: the share of their time on their stream"
        " in which the",
        "                compute stream was busy, by timing events around each operation",
        f"prefixes        {counts['forks']} forks reused {counts['shared_tokens']} tokens; "
        f"{counts['computed_tokens']} were computed",
        f"pages           {counts['least_pages_free']} of {report['num_pages']} free at the least,"
        f" {counts['preemptions']} preemptions, {counts['evictions']} kept prefixes evicted",
        f"batch           {batch}{report['steps']} steps decode and prefill",
    ]
    if checked is not None:
        lines.append(
            f"checked         {checked['tokens']} tokens are those of a plain uncached pass "
            f"({checked['ties']} tied with its choice)"
        )
    return "\n".join(lines)


# A picture of a few steps ------------------------------------------------------------------------

COLOURS = {
    "embed": "#72A98F", "qkv": "#B6566B", "rope_store_kv": "#9C8AC2", "paged_attention": "#4C78A8",
    "mlp": "#D9C45F", "logits": "#8C7B68", "copy": "#E8A15A",
}  # fmt: skip
OTHER = "#7F8C99"
LEGEND = {"copy": "copy of page tables (with its µs)"}
ROWS = {"tables": 0.0, "compute": 1.0}
LABELS = ("page tables\ncopied during", "the model's\ncompute stream")


def draw_steps(spans: Sequence[Any], path: Path, title: str) -> None:
    """Draw the lanes "tables" and "compute", from the second step's start to the last one's.

    The first step has nothing before it, the last nothing after it. Uploads of tables are far
    shorter than a step: those that start together are one mark, with their time, and a line down
    to what the compute stream does then.
    """
    from matplotlib.patches import Patch

    begins = [span.start_us for span in spans if span.name == "embed"]
    origin = begins[min(1, len(begins) - 1)]
    end_us = begins[-1] if begins[-1] > origin else max(span.end_us for span in spans)
    shown = [span for span in spans if origin <= span.start_us < end_us]
    compute = [span for span in shown if span.lane == "compute"]
    copies = [span for span in shown if span.lane == "tables"]

    figure, (axes,) = charts.panels_of(1, 1, (12, 3.2))
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
    seen = dict.fromkeys(s.name if s.name in COLOURS else "other" for s in [*compute, *copies])
    keys = [Patch(color=COLOURS.get(name, OTHER), label=LEGEND.get(name, name)) for name in seen]
    figure.legend(handles=keys, loc="outside lower left", ncols=8, frameon=False)
    charts.save(figure, path, title)


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
