"""Serve requests with continuous batching on a paged cache, and show what its design saves.

Prompts are prefilled in chunks together with requests that decode, in one batch per step. A request
forks the longest cached prefix; when pages run out, kept prefixes are evicted, then the youngest
requests preempted. Each step's page tables are uploaded in one copy, on a separate stream, while
the compute stream is still busy:

    tables                |copy 2|              |copy 3|
    compute   |step 1: embed, qkv, attention, mlp ... |step 2 ...

That is measured against the same steps with the copy on the compute stream itself. Every request's
tokens are compared with the tokens of a plain forward pass without a cache.

    python scripts/serve_demo.py --out build/serve
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common.one_core  # noqa: F401
import numpy as np
from common import frame
from common.measure import length_us, log_compilation, one_core_per_stream, require_products
from common.report import require_matplotlib
from serving.engine import CacheSettings, Outcome, Server
from serving.llama import Llama, LlamaConfig, random_weights
from serving.report import (
    WrongTokens,
    check_tokens,
    draw_steps,
    drawn_steps,
    hidden_share,
    render_served,
    step_times,
)
from serving.requests import Prompt, synthetic_prompts
from serving.schedule import Policy

from kvcupy.progress import Progress

HEADS = 8, 2  # of queries, of keys and values, in the random model
DRAWN_OF = 3  # runs, of which the shortest is drawn: other programs disturbed it least
OWN, SHARED = "on a stream of their own", "on the compute stream"


def random_model(device: Any, options: argparse.Namespace, context: int) -> Llama:
    """Return the random model; `context` is the length of the longest request."""
    (q_heads, kv_heads), hidden = HEADS, options.hidden
    config = LlamaConfig(
        vocab=options.vocab, hidden=hidden, intermediate=2 * hidden, layers=options.layers,
        q_heads=q_heads, kv_heads=kv_heads, head_dim=hidden // q_heads,
    )  # fmt: skip
    weights = random_weights(device, config, dtype=np.dtype(options.compute))
    return Llama(device, config, weights, context=context)


def enough_pages(prompts: Sequence[Prompt], page_size: int, running: int) -> int:
    """Return enough pages for `running` requests of mean length, and for the longest."""
    pages = [-(-prompt.goal // page_size) for prompt in prompts]
    return max(*pages, round(min(running, len(pages)) * sum(pages) / len(pages)))


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    require_products(device)
    if options.out:
        require_matplotlib()  # before all is measured, not after
    with one_core_per_stream(device):
        return serve(device, options)


def serve(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests with both kinds of uploads and return the report."""
    prompts = synthetic_prompts(
        options.requests, options.vocab, seed=options.seed, output_tokens=options.output_tokens
    )
    model = random_model(device, options, max(prompt.goal for prompt in prompts))
    pages = options.pages or enough_pages(prompts, options.page_size, options.max_running)
    settings = CacheSettings(pages, options.page_size, options.dtype)
    policy = Policy(options.budget, options.max_running, share=not options.no_sharing)
    servers = {
        name: Server(model, settings, policy, own_copy_stream=name == OWN, ahead=options.ahead)
        for name in (OWN, SHARED)
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in servers}
    for number in range(options.rounds + 1):  # the first warms up
        for name, server in servers.items():
            label = f"tables {name}, run {number}"
            with Progress(label, len(prompts), "requests", lines=True) as progress:
                outcome, _ = server.serve(prompts, progress=progress.to)
            outcomes[name].append(outcome)
    first = outcomes[OWN][0]
    steps = len(first.step_us)
    _, recorded = servers[OWN].serve(prompts, watch=(0, steps))
    copied = hidden_share(recorded.spans)
    if options.out:
        start, stop = drawn_steps(first.step_tokens, options.drawn + 2)
        watched = (servers[OWN].serve(prompts, watch=(start, stop))[1] for _ in range(DRAWN_OF))
        recorded = min(watched, key=length_us)
        title = f"Steps {start + 1} to {stop - 2} of serving {len(prompts)} requests"
        options.out.mkdir(parents=True, exist_ok=True)
        recorded.save(options.out / "timeline.json")
        draw_steps(recorded.spans, options.out / "timeline.png", title)
    for runs in outcomes.values():
        require_same(first, runs)
    checked = check_tokens(model, prompts, first.tokens, options.dtype) if options.check else None
    output = sum(map(len, first.tokens))
    return {
        "model": "random",
        "config": asdict(model.config),
        "requests": len(prompts),
        "prompt_tokens": sum(len(prompt.tokens) for prompt in prompts),
        "output_tokens": output,
        "num_pages": pages,
        "page_size": options.page_size,
        "dtype": options.dtype,
        "compute": options.compute,
        "budget": options.budget,
        "max_running": options.max_running,
        "ahead": options.ahead,
        "rounds": options.rounds,
        "steps": steps,
        "tables": {
            name: {
                "tokens_per_s": output / min(outcome.seconds for outcome in runs[1:]),
                **step_times([outcome.step_us for outcome in runs[1:]]),
            }
            for name, runs in outcomes.items()
        },
        "tables_copied": copied,
        "counts": asdict(first.counts),
        "checked": asdict(checked) if checked else None,
    }


def require_same(first: Outcome, others: Sequence[Outcome]) -> None:
    """Compare the tokens and the steps of runs of the same requests.

    Raises
    ------
    WrongTokens
        They differ; the message names the first request.
    """
    for other in others:
        for number, (want, got) in enumerate(zip(first.tokens, other.tokens, strict=True)):
            if got != want:
                raise WrongTokens(f"request {number}: {want} in one run, {got} in another")
        if other.step_tokens != first.step_tokens:
            raise WrongTokens("two runs of the same requests made different steps")


def render(report: dict[str, Any]) -> str:
    return render_served(report)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=int, default=6, help="of the random model")
    add("--hidden", type=int, default=256, help="of the random model")
    add("--vocab", type=int, default=1024, help="of the random model")
    add("--requests", type=int, default=48, help="requests to serve")
    add("--seed", type=int, default=0, help="of the synthetic chats")
    add("--output-tokens", type=int, default=32, help="median of the synthetic chats")
    add("--pages", type=int, help="pages of the cache; default: enough for --max-running requests")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--dtype", default="fp32", choices=("fp32", "fp16", "bf16", "fp8_e4m3", "int8"),
        help="of the cache")  # fmt: skip
    add("--compute", default="float32", choices=("float32", "float16"), help="of the matrices")
    add("--budget", type=int, default=96, help="tokens per step")
    add("--max-running", type=int, default=32, help="requests at a time")
    add("--ahead", type=int, default=1, choices=(0, 1), help="steps launched ahead")
    add("--no-sharing", action="store_true", help="do not fork shared prefixes")
    add("--rounds", type=int, default=7, help="measured runs of each variant")
    add("--check", action=argparse.BooleanOptionalAction, default=True,
        help="compare the tokens with a forward pass without a cache")  # fmt: skip
    add("--out", type=Path, help="write a timeline (JSON and PNG) to this folder")
    add("--drawn", type=int, default=3, help="steps in the timeline")


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_quick=False)


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
