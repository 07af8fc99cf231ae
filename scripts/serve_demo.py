r"""Serve requests with continuous batching on a paged cache, and show what its design saves.

Prompts are prefilled in chunks beside requests that decode, in one batch per step. A request forks
the longest cached prefix; when pages run out, kept prefixes are evicted, then the youngest requests
preempted. Each step's page tables are uploaded in one copy, on a stream of their own, while the
compute stream is still busy:

    tables                |copy 2|              |copy 3|
    compute   |step 1: embed, qkv, attention, mlp ... |step 2 ...

That is measured against the same steps with the copy on the compute stream itself. With --speculate
a step verifies a small tree of draft tokens for each request that decodes. Every request's tokens
are compared with those of a plain forward pass without a cache; with --past, which keeps old tokens
in a narrower format, with those of a cache of one format. --prompt-tokens compares what two such
caches of the same bytes hold, in a model that looks tokens up in its past and in the random one;
with --agreement, how often caches of other formats give the same tokens.

    python scripts/serve_demo.py --out build/serve
    python scripts/serve_demo.py --trace trace.jsonl --scale 32 --speculate
    python scripts/serve_demo.py --dtype bf16 --past nvfp4 --recent 64 --sinks 4 \
        --prompt-tokens 2048
    python scripts/serve_demo.py --dtype bf16 --recent 64 --sinks 4 --prompt-tokens 512 \
        --agreement =fp32 =fp8_e4m3 nvfp4 nvfp4+hadamard+four_over_six int4+hadamard@128
    python scripts/serve_demo.py --model path/to/llama --dtype bf16
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# One core computes while others copy and schedule; must be set before NumPy loads its BLAS.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common.measure import device_for_products, length_us, log_compilation, one_core_per_stream
from serving import agreement, capacity
from serving.draw import draw_steps
from serving.engine import CacheSettings, Outcome, Server
from serving.gguf import GgufFile, python_topics
from serving.llama import Llama, LlamaConfig
from serving.llama_files import load_weights, random_weights, read_config
from serving.lookup import lookup_config, lookup_prompts, lookup_weights
from serving.report import WrongTokens, check_tokens, drawn_steps, hidden_share, render, step_times
from serving.requests import Prompt, synthetic_prompts, trace_prompts
from serving.schedule import Policy

from kvcupy.bench.report import describe, write_json

HEADS = 8, 2  # of queries, of keys and values, in the random model
DRAWN_OF = 3  # runs, of which the shortest is drawn: other programs disturbed it least
OWN, SHARED = "on a stream of their own", "on the compute stream"


class Progress:
    """A progress line; without a terminal, one line at the end."""

    def __init__(self, total: int) -> None:
        self.total, self.ended = total, ""

    def show(self, label: str, done: int, more: str = "") -> None:
        line = f"{label}: {done} of {self.total} requests{more}"
        if sys.stderr.isatty():
            print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)
        elif done == self.total and label != self.ended:
            print(line, file=sys.stderr, flush=True)
            self.ended = label

    def end(self) -> None:
        if sys.stderr.isatty():
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)


def make_model(device: Any, arguments: argparse.Namespace, prompts_of: Any) -> Any:
    """Return the model and its prompts: the rope table is as long as the longest request."""
    config = read_config(arguments.model) if arguments.model else random_config(arguments)
    prompts = prompts_of(config.vocab)
    longest = max(prompt.goal for prompt in prompts)
    dtype = np.dtype(arguments.compute)
    if arguments.model:
        weights = load_weights(device, arguments.model, config, dtype=dtype)
    else:
        weights = random_weights(device, config, dtype=dtype)
    return Llama(device, config, weights, context=longest), prompts


def random_config(arguments: argparse.Namespace) -> LlamaConfig:
    q_heads, kv_heads = HEADS
    hidden = arguments.hidden
    return LlamaConfig(
        vocab=arguments.vocab, hidden=hidden, intermediate=2 * hidden, layers=arguments.layers,
        q_heads=q_heads, kv_heads=kv_heads, head_dim=hidden // q_heads,
    )  # fmt: skip


def prompts_of(arguments: argparse.Namespace, vocab: int) -> list[Prompt]:
    if arguments.trace:
        return trace_prompts(arguments.trace, arguments.requests, vocab, scale=arguments.scale)
    return synthetic_prompts(
        arguments.requests, vocab, seed=arguments.seed, output_tokens=arguments.output_tokens
    )


def enough_pages(prompts: Sequence[Prompt], page_size: int, running: int) -> int:
    """Return enough pages for `running` requests of mean length, and for the longest."""
    pages = [-(-prompt.goal // page_size) for prompt in prompts]
    return max(*pages, round(min(running, len(pages)) * sum(pages) / len(pages)))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests in every way and return the report."""
    device = device_for_products(arguments.device)
    where = describe(device)  # now: the tree may change while this runs
    model, prompts = make_model(device, arguments, lambda vocab: prompts_of(arguments, vocab))
    pages = arguments.pages or enough_pages(prompts, arguments.page_size, arguments.max_running)
    settings = CacheSettings(pages, arguments.page_size, arguments.dtype)
    if arguments.past:
        settings = replace(
            settings, past=arguments.past, recent=arguments.recent, sinks=arguments.sinks,
        )  # fmt: skip
    policy = Policy(
        budget=arguments.budget, max_running=arguments.max_running, share=not arguments.no_sharing,
        branches=arguments.branches if arguments.speculate else 0, depth=arguments.depth,
    )  # fmt: skip
    servers = {
        name: Server(model, settings, policy, own_copy_stream=name == OWN, ahead=arguments.ahead)
        for name in (OWN, SHARED)
    }
    progress = Progress(len(prompts))
    outcomes: dict[str, list[Outcome]] = {name: [] for name in servers}

    def serve(name: str, label: str, watch: tuple[int, int] | None = None) -> tuple[Outcome, Any]:
        def show(done: int, steps: int) -> None:
            progress.show(label, done, f", {steps} steps")

        return servers[name].serve(prompts, progress=show, watch=watch)

    with one_core_per_stream(device):
        for number in range(arguments.rounds + 1):  # the first warms up
            for name in servers:
                outcome, _ = serve(name, f"tables {name}, run {number}")
                outcomes[name].append(outcome)
        first = outcomes[OWN][0]
        steps = len(first.step_us)
        _, recorded = serve(OWN, "copies timed", (0, steps))
        copied = hidden_share(recorded.spans)
        if arguments.out:
            start, stop = drawn_steps(first.step_tokens, arguments.drawn + 2)
            watched = (serve(OWN, "steps drawn", (start, stop))[1] for _ in range(DRAWN_OF))
            recorded = min(watched, key=length_us)
            title = f"Steps {start + 1} to {stop - 2} of serving {len(prompts)} requests"
            arguments.out.mkdir(parents=True, exist_ok=True)
            recorded.save(arguments.out / "timeline.json")
            draw_steps(recorded.spans, arguments.out / "timeline.png", title)
    for runs in outcomes.values():
        require_same(first, runs)
    checked = None
    if arguments.check:
        checked = check_tokens(
            model, prompts, first.tokens, arguments.dtype,
            lambda done: progress.show("checked", done),
        )  # fmt: skip
    past = None
    if arguments.past:
        plain = replace(settings, past=None, recent=None, sinks=0)
        server = Server(model, plain, policy, ahead=arguments.ahead)
        with one_core_per_stream(device):
            outcome, _ = server.serve(prompts)
        past = compare_with_plain(first, outcome, servers[OWN].cache, prompts, settings)
    progress.end()
    counts = first.counts
    output = sum(map(len, first.tokens))
    return {
        **where,
        "model": str(arguments.model.name) if arguments.model else "random",
        "config": asdict(model.config),
        "trace": arguments.trace.name if arguments.trace else "synthetic",
        "requests": len(prompts),
        "prompt_tokens": sum(len(prompt.tokens) for prompt in prompts),
        "output_tokens": output,
        "num_pages": pages,
        "page_size": arguments.page_size,
        "dtype": arguments.dtype,
        "compute": arguments.compute,
        "budget": arguments.budget,
        "max_running": arguments.max_running,
        "ahead": servers[OWN].ahead,
        "speculate": arguments.speculate,
        "branches": policy.branches,
        "depth": policy.depth,
        "rounds": arguments.rounds,
        "steps": steps,
        "tables": {
            name: {
                "tokens_per_s": output / min(outcome.seconds for outcome in runs[1:]),
                **step_times([outcome.step_us for outcome in runs[1:]]),
            }
            for name, runs in outcomes.items()
        },
        "tables_copied": copied,
        "counts": asdict(counts),
        "acceptance_rate": counts.accepted / counts.guesses if counts.guesses else None,
        "tokens_per_tree": 1 + counts.accepted / counts.tree_steps if counts.tree_steps else None,
        "past": past,
        "checked": asdict(checked) if checked else None,
    }


def run_long(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare two caches of the same bytes with long requests, and return the report.

    Raises
    ------
    TooFewTokens
        The one with a past holds less than --held-at-least times the tokens of the other.
    """
    device = device_for_products(arguments.device)
    where = describe(device)
    tokens, output, count = arguments.prompt_tokens, arguments.output_tokens, arguments.requests
    settings = CacheSettings(
        1, arguments.page_size, arguments.dtype, past=arguments.past, recent=arguments.recent,
        sinks=arguments.sinks,
    )  # fmt: skip
    policy = Policy(budget=arguments.budget, max_running=min(arguments.max_running, count))
    rng, dtype = np.random.default_rng(arguments.seed), np.dtype(arguments.compute)
    context = tokens + output
    config = lookup_config(2 * tokens)
    weights = lookup_weights(device, config, seed=arguments.seed, dtype=dtype)
    asked, answers = lookup_prompts(count, config.vocab, tokens, output, seed=arguments.seed)
    cases: dict[str, Any] = {"lookup": (Llama(device, config, weights, context=context), asked)}
    config = random_config(arguments)
    weights = random_weights(device, config, dtype=dtype)
    drawn = long_prompts(rng, range(count), config.vocab, tokens, output)
    cases["random"] = Llama(device, config, weights, context=context), drawn
    if arguments.model:
        file = GgufFile(arguments.model)
        config, weights = file.load(device, dtype=dtype)
        texts = text_prompts(file.encode(python_topics()), count, tokens, output)
        cases[file.name] = Llama(device, config, weights, context=context), texts
    if arguments.only_file:
        cases = {name: case for name, case in cases.items() if name not in ("lookup", "random")}
    models: dict[str, Any] = {}
    report = {
        **where, "page_size": arguments.page_size, "dtype": arguments.dtype,
        "past": arguments.past, "recent": arguments.recent, "sinks": arguments.sinks,
        "compute": arguments.compute, "budget": arguments.budget, "seed": arguments.seed,
        "requests": count, "prompt_tokens": tokens, "output_tokens": output,
        "held_at_least": arguments.held_at_least, "models": models,
    }  # fmt: skip
    for name, (model, prompts) in cases.items():
        if arguments.agreement:
            models[name] = {}

            def keep(setting: str, row: Any, name: str = name) -> None:
                models[name][setting] = row
                same = row["on_text"]
                print(f"{name}, {setting}: {same['same_tokens']} of {same['tokens']} on the text",
                      file=sys.stderr, flush=True)  # fmt: skip
                if arguments.json:  # this takes long: an interrupted run leaves what it has
                    write_json(arguments.json, report)

            with one_core_per_stream(device):
                agreement.agreement(model, settings, policy, prompts, arguments.agreement, keep)
            continue
        numbers = range(count, 2 * count + 2)  # to fill the caches with
        overflow = long_prompts(rng, numbers, model.config.vocab, tokens, output)
        with one_core_per_stream(device):
            models[name] = capacity.compare(
                model, settings, policy, prompts, overflow, answers if name == "lookup" else None
            )
        if models[name]["times_the_tokens"] < arguments.held_at_least:
            raise capacity.TooFewTokens(
                f"{models[name]['times_the_tokens']:.2f} times the tokens, expected at least "
                f"{arguments.held_at_least}: are the prompts too short?"
            )
    return report


def long_prompts(
    rng: np.random.Generator, numbers: Sequence[int], vocab: int, tokens: int, output: int
) -> list[Prompt]:
    return [Prompt(number, 0.0, rng.integers(0, vocab, tokens), output) for number in numbers]


def text_prompts(ids: Sequence[int], count: int, tokens: int, output: int) -> list[Prompt]:
    """Return stretches of a text, evenly spaced."""
    starts = np.linspace(0, len(ids) - tokens, count).astype(int).tolist()
    return [
        Prompt(number, 0.0, np.array(ids[start : start + tokens]), output)
        for number, start in enumerate(starts)
    ]


def compare_with_plain(
    mixed: Outcome, plain: Outcome, cache: Any, prompts: Sequence[Prompt], settings: CacheSettings
) -> dict[str, Any]:
    """Compare the tokens with those of a cache of one format, and count the bytes of both.

    Bytes are those of a request's pages when it is complete: old pages in the narrower format.
    """
    size, own, old = settings.page_size, cache.pool.page_bytes, cache.past_pool.page_bytes
    recent, sinks = settings.recent or 0, -(-settings.sinks // settings.page_size)
    wide_bytes = mixed_bytes = 0
    for prompt in prompts:
        pages = -(-prompt.goal // size)
        demoted = max(0, (prompt.goal - recent) // size - sinks)
        wide_bytes += pages * own
        mixed_bytes += (pages - demoted) * own + demoted * old
    pairs = [
        (a, b)
        for one, other in zip(mixed.tokens, plain.tokens, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return {
        "format": settings.past, "recent": settings.recent, "sinks": settings.sinks,
        "same_tokens": sum(a == b for a, b in pairs), "tokens": len(pairs),
        "same_requests": sum(a == b for a, b in zip(mixed.tokens, plain.tokens, strict=True)),
        "page_bytes": own, "past_page_bytes": old,
        "tokens_in_the_bytes": wide_bytes / mixed_bytes, "at_most": own / old,
    }  # fmt: skip


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


def header(report: dict[str, Any]) -> str:
    config, shape = report["config"], report["model"]
    if shape == "random":
        shape = f"random Llama of {config['layers']} layers, hidden {config['hidden']}"
    guesses = f", trees of {report['branches']} branches" if report["speculate"] else ""
    return (
        f"{report['device']} ({report['gpu_and_driver'] or report['processor']}), "
        f"{report['date']}, commit {(report['commit'] or 'unknown')[:12]}\n"
        f"{shape}, {report['requests']} requests ({report['trace']}): "
        f"{report['prompt_tokens']} tokens in, {report['output_tokens']} out\n"
        f"{report['num_pages']} pages of {report['page_size']} {report['dtype']} tokens, at most "
        f"{report['budget']} tokens and {report['max_running']} requests per step{guesses}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    add("--model", type=Path,
        help="folder with config.json and safetensors; default: random. With --prompt-tokens: a "
        "GGUF file of a Llama, which then continues Python's documentation")  # fmt: skip
    add("--only-file", action="store_true", help="with --prompt-tokens, the model of --model alone")
    add("--layers", type=int, default=6, help="of the random model")
    add("--hidden", type=int, default=256, help="of the random model")
    add("--vocab", type=int, default=1024, help="of the random model")
    add("--trace", type=Path, help="request trace, JSON lines; default: synthetic chats")
    add("--scale", type=float, default=32.0, help="divides the lengths of a trace")
    add("--requests", type=int, help="requests to serve, at most; default: 48, 8 of the long ones")
    add("--seed", type=int, default=0, help="of the synthetic chats")
    add("--output-tokens", type=int, default=32, help="median of the synthetic chats")
    add("--pages", type=int, help="pages of the cache; default: enough for --max-running requests")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--dtype", default="fp32", choices=("fp32", "fp16", "bf16", "fp8_e4m3", "int8"),
        help="of the cache")  # fmt: skip
    add("--past", help="encoding of old tokens, such as nvfp4+hadamard; default: none")
    add("--recent", type=int, default=128, help="with --past, last tokens that stay in --dtype")
    add("--sinks", type=int, default=16, help="with --past, first tokens that stay in --dtype")
    add("--agreement", nargs="+", metavar="PAST",
        help="with --prompt-tokens: compare tokens alone, for each of these instead of --past: "
        "ENCODING[@RECENT], or =FORMAT of a whole cache")  # fmt: skip
    add("--prompt-tokens", type=int, help="with --past: compare caches with prompts of so many")
    add("--held-at-least", type=float, default=3.0,
        help="fail if the cache with a past holds fewer times the tokens")  # fmt: skip
    add("--compute", default="float32", choices=("float32", "float16"), help="of the matrices")
    add("--budget", type=int, default=96, help="tokens per step")
    add("--max-running", type=int, default=32, help="requests at a time")
    add("--ahead", type=int, default=1, choices=(0, 1), help="steps launched ahead")
    add("--no-sharing", action="store_true", help="do not fork shared prefixes")
    add("--speculate", action="store_true", help="verify trees of guesses")
    add("--branches", type=int, default=3, help="of a tree")
    add("--depth", type=int, default=4, help="of a tree")
    add("--rounds", type=int, default=7, help="measured runs of each variant")
    add("--check", action=argparse.BooleanOptionalAction, default=None,
        help="tokens against a plain pass; default: of the random model")  # fmt: skip
    add("--json", type=Path, help="write the report here")
    add("--out", type=Path, help="write a timeline (JSON and PNG) to this folder")
    add("--drawn", type=int, default=3, help="steps in the timeline")
    arguments = parser.parse_args(argv)
    if arguments.check is None:  # a plain pass has one format
        arguments.check = arguments.model is None and arguments.past is None
    if arguments.requests is None:
        arguments.requests = 8 if arguments.prompt_tokens else 48
    if arguments.prompt_tokens:
        if not (arguments.past or arguments.agreement) or arguments.trace or arguments.out:
            parser.error("--prompt-tokens: expected --past, and no --trace and --out")
        report = run_long(arguments)
        text = (agreement if arguments.agreement else capacity).render(report)
        print(f"{report['device']}, {report['date']}\n\n{text}")
    else:
        report = run(arguments)
        print(f"{header(report)}\n\n{render(report)}")
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.out:
        print(f"\ntimeline: {arguments.out / 'timeline.json'} {arguments.out / 'timeline.png'}")
    return 0


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
