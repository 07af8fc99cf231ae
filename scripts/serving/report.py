"""Checks and results of the serving demo: tokens, hidden copies, tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvcupy.bench.report import format_table

from .llama import Llama
from .requests import Prompt

# By what share of the spread of a row of logits another order of summation, or a key rounded the
# other way, changes the difference of two logits at most. A token this close to the best is a tie.
TIES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2, "fp8_e4m3": 0.5, "fp8_e5m2": 1.0, "int8": 0.2}


class WrongTokens(Exception):
    """A request did not get the tokens of the plain uncached forward pass."""


@dataclass(frozen=True)
class Checked:
    """Tokens compared, and how many of them were not the first choice but tied with it."""

    tokens: int = 0
    ties: int = 0


def check_tokens(
    model: Llama, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]], cache_dtype: str,
    progress: Callable[[int], None] = lambda done: None,
) -> Checked:  # fmt: skip
    """Compare every request's tokens with those of a plain uncached pass over all of it.

    Raises
    ------
    WrongTokens
        A token is neither the plain pass's choice nor tied with it; the message names the request,
        the position, both tokens and their logits.
    """
    total = ties = 0
    for done, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
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
        progress(done)
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


def render(report: dict[str, Any]) -> str:
    """Return the report as text."""
    rows = [
        (name, row["tokens_per_s"], row["median_us"] / 1e3, row["least_us"] / 1e3)
        for name, row in report["tables"].items()
    ]
    columns = ("tables of a step", "tokens/s", "ms per step (median)", "(least)")
    counts, hidden, checked = report["counts"], report["tables_copied"], report["checked"]
    batch = f"{counts['most_running']} requests at the most; {counts['mixed_steps']} of "
    lines = [
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
    if report["acceptance_rate"] is not None:
        lines.append(
            f"guesses         {counts['guesses']} in {counts['tree_steps']} trees, "
            f"{report['acceptance_rate']:.0%} accepted: {report['tokens_per_tree']:.2f} tokens "
            "per tree"
        )
    past = report.get("past")
    if past is not None:
        lines += [
            f"past            {past['format']}, but for the last {past['recent']} and the first "
            f"{past['sinks']} tokens",
            f"                {past['same_tokens']} of {past['tokens']} tokens and "
            f"{past['same_requests']} of {report['requests']} requests are those of a",
            f"                cache of {report['dtype']} alone; these requests take "
            f"1 / {past['tokens_in_the_bytes']:.2f} of its bytes,",
            f"                and the demoted pages 1 / {past['at_most']:.2f}",
        ]
    if checked is not None:
        lines.append(
            f"checked         {checked['tokens']} tokens are those of a plain uncached pass "
            f"({checked['ties']} tied with its choice)"
        )
    return "\n".join(lines)
