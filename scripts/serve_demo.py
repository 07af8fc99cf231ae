"""Serve requests with continuous batching on a paged cache, and show what its design saves.

Prompts are prefilled in chunks together with requests that decode, in one batch per step. A request
begins with the cached blocks of its prefix, on the device or in host memory; when pages run out,
the youngest requests are preempted. Each step's page tables are uploaded in one copy, on a separate
stream, while the compute stream is still busy:

    tables                |copy 2|              |copy 3|
    compute   |step 1: embed, qkv, attention, mlp ... |step 2 ...

That is measured against the same steps with the copy on the compute stream itself. Every request's
tokens are compared with the tokens of a plain forward pass without a cache.

    python scripts/serve_demo.py --out build/timeline.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import common.one_core  # noqa: F401
import numpy as np
from common import frame
from common.checks import WrongBytes
from common.measure import log_compilation, one_core_per_stream, require_products
from common.report import format_table
from serving.llama import Llama, LlamaConfig, random_weights
from serving.server import CacheSettings, Outcome, Prompt, Server, chats

from kvcupy.progress import Progress

HEADS = 8, 2  # of queries, of keys and values
OWN, SHARED = "on a stream of their own", "on the compute stream"
TIMELINE_STEPS = 3

# By what share of the spread of a row of logits another order of summation, or a key rounded the
# other way, changes the difference of two logits at most. A token this close to the best is a tie.
TIES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2, "fp8_e4m3": 0.5, "int8": 0.2}


class WrongTokens(WrongBytes):
    """A request did not get the tokens of the plain uncached forward pass."""


def check_tokens(
    model: Llama, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]], cache_dtype: str
) -> dict[str, int]:
    """Compare every request's tokens with a plain uncached pass over all of it.

    Returns
    -------
    how many tokens were compared, and how many of them were tied with the first choice

    Raises
    ------
    WrongTokens
        A token is neither the plain pass's choice nor tied with it.
    """
    total = ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
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
    return {"tokens": total, "ties": ties}


def hidden_share(spans: Sequence[Any]) -> dict[str, float]:
    """Return how much of the time of copies of tables passes while the compute stream is busy.

    Returns
    -------
    copies (a number), copy_us and hidden_us (sums), hidden (their ratio; 0 without a copy)
    """
    copies = [span for span in spans if span.lane == "tables" and span.name == "copy"]
    busy = [span for span in spans if span.lane == "compute"]  # one after another
    copy_us = sum(span.duration_us for span in copies)
    hidden_us = sum(
        max(0.0, min(work.end_us, span.end_us) - max(work.start_us, span.start_us))
        for span in copies
        for work in busy
    )
    hidden = hidden_us / copy_us if copy_us else 0.0
    return {"copies": len(copies), "copy_us": copy_us, "hidden_us": hidden_us, "hidden": hidden}


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests with both kinds of uploads and return the report."""
    require_products(device)
    with one_core_per_stream(device):
        return serve(device, options)


def serve(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    prompts = chats(
        options.requests, options.vocab, seed=options.seed, output_tokens=options.output_tokens
    )
    (q_heads, kv_heads), hidden = HEADS, options.hidden
    config = LlamaConfig(
        vocab=options.vocab, hidden=hidden, intermediate=2 * hidden, layers=options.layers,
        q_heads=q_heads, kv_heads=kv_heads, head_dim=hidden // q_heads,
    )  # fmt: skip
    longest = max(prompt.goal for prompt in prompts)
    model = Llama(device, config, random_weights(device, config), context=longest)
    pages = options.pages or -(-longest // options.page_size) * options.max_running
    settings = CacheSettings(pages, options.page_size, options.dtype)
    servers = {
        name: Server(
            model, settings, budget=options.budget, max_running=options.max_running,
            own_copy_stream=name == OWN,
        )
        for name in (OWN, SHARED)
    }  # fmt: skip
    outcomes: dict[str, list[Outcome]] = {name: [] for name in servers}
    for number in range(options.rounds + 1):  # the first warms up
        for name, server in servers.items():
            label = f"tables {name}, run {number}"
            with Progress(label, len(prompts), "requests", lines=True) as progress:
                outcomes[name].append(server.serve(prompts, progress=progress.to)[0])
    first = outcomes[OWN][0]
    for outcome in (outcome for runs in outcomes.values() for outcome in runs):
        if outcome.tokens != first.tokens:
            raise WrongTokens("two runs of the same requests gave different tokens")
    checked = check_tokens(model, prompts, first.tokens, options.dtype)
    steps = len(first.step_us)
    _, recorded = servers[OWN].serve(prompts, watch=(0, steps))
    if options.out:
        _, few = servers[OWN].serve(prompts, watch=(steps // 3, steps // 3 + TIMELINE_STEPS))
        few.save(options.out)
    counts = asdict(first)
    for name in ("tokens", "seconds", "step_us"):
        del counts[name]
    return {
        "config": asdict(config),
        "requests": len(prompts),
        "prompt_tokens": sum(len(prompt.tokens) for prompt in prompts),
        "output_tokens": sum(map(len, first.tokens)),
        "num_pages": pages, "page_size": options.page_size, "dtype": options.dtype,
        "budget": options.budget, "max_running": options.max_running, "rounds": options.rounds,
        "steps": steps, "tables": {name: times_of(runs[1:]) for name, runs in outcomes.items()},
        "tables_copied": hidden_share(recorded.spans), "counts": counts, "checked": checked,
    }  # fmt: skip


def times_of(runs: Sequence[Outcome]) -> dict[str, float]:
    """Return the fastest run, and the time of a step: the median, and of the least of each step."""
    times = [run.step_us for run in runs]
    return {
        "tokens_per_s": sum(map(len, runs[0].tokens)) / min(run.seconds for run in runs),
        "median_us": median(us for run in times for us in run),
        "least_us": median(min(step) for step in zip(*times, strict=True)),
    }


def render(report: dict[str, Any]) -> str:
    rows = [
        (name, row["tokens_per_s"], row["median_us"] / 1e3, row["least_us"] / 1e3)
        for name, row in report["tables"].items()
    ]
    columns = ("tables of a step", "tokens/s", "ms per step (median)", "(least)")
    counts, copied, checked = report["counts"], report["tables_copied"], report["checked"]
    return "\n".join([
        f"random Llama of {report['config']['layers']} layers, {report['requests']} requests: "
        f"{report['prompt_tokens']} tokens in, {report['output_tokens']} out, in "
        f"{report['steps']} steps", "", format_table(columns, rows), "",
        f"{copied['copies']} copies of tables, {copied['copy_us'] / 1e3:.2f} ms in all, "
        f"{copied['hidden']:.0%} while the compute stream was busy",
        f"{counts['prefix_hits']} requests began with {counts['cached_tokens']} cached tokens; "
        f"{counts['computed_tokens']} were computed",
        f"at most {counts['most_running']} requests at a time, {counts['preemptions']} preemptions",
        f"{checked['tokens']} tokens equal a plain pass without a cache ({checked['ties']} tied "
        "with its choice)",
    ])  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=int, default=6, help="of the random model")
    add("--hidden", type=int, default=256, help="of the random model")
    add("--vocab", type=int, default=1024, help="of the random model")
    add("--requests", type=int, default=48, help="requests to serve")
    add("--seed", type=int, default=0, help="of the requests")
    add("--output-tokens", type=int, default=32, help="median of the requests")
    add("--pages", type=int, help="pages of the cache; default: enough for --max-running requests")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--dtype", default="fp32", choices=TIES, help="of the cache")
    add("--budget", type=int, default=96, help="tokens per step")
    add("--max-running", type=int, default=16, help="requests at a time")
    add("--rounds", type=int, default=7, help="measured runs of each variant")
    add("--out", type=Path, metavar="FILE", help="write a timeline of some steps (JSON)")


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_quick=False)


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
