"""The requests of a replay: from a trace, or synthetic with a fixed seed."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvcupy.progress import count

from .models import MODELS

BLOCK_TOKENS = 512  # input tokens per hash of a trace
SYNTHETIC = 600  # requests, without a trace and a limit

PROMPTS = 4  # system prompts that conversations begin with
SCANS = 0.08  # share of long requests that never recur
CONTINUES = 0.65  # share of the others that continue a conversation
GAP_MS = 300.0


@dataclass(frozen=True)
class Request:
    """One line of a request trace. `hash_ids` name the prefix blocks of the input."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: str | Path) -> Iterator[Request]:
    """Read a trace of JSON lines, in order of arrival.

    Raises
    ------
    ValueError
        A line is not a request; the message names file and line.
    """
    with Path(path).open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                yield Request(
                    float(entry["timestamp"]),
                    int(entry["input_length"]),
                    int(entry["output_length"]),
                    tuple(entry.get("hash_ids", ())),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}:{number}: expected an object with timestamp, input_length and "
                    f"output_length, got {line.strip()[:80]!r}"
                ) from error


def requests_of(trace: str | Path | None, limit: int | None, seed: int = 0) -> list[Request]:
    """Return the requests of a trace, or synthetic ones, at most `limit`.

    Raises
    ------
    ValueError
        A line of the trace is not a request, or no request names its blocks.
    """
    if trace is None:
        return list(islice(conversations(seed), limit or SYNTHETIC))
    requests = list(islice(read_trace(trace), limit))
    if not any(request.hash_ids for request in requests):
        raise ValueError(f"{trace}: expected requests with hash_ids, got none")
    return requests


def add_trace_arguments(
    parser: argparse.ArgumentParser, *, device_blocks: int, host_blocks: int
) -> None:
    """Add the options that say which requests are served, and by tiers of which sizes."""
    add = parser.add_argument
    add("--trace", type=Path, help="JSON lines; default: a synthetic one with a fixed seed")
    add("--limit", type=count, help="requests, at most")
    add("--seed", type=int, default=0, help="of the synthetic trace")
    add("--device-blocks", type=count, default=device_blocks, help="of each process or node")
    add("--host-blocks", type=count, default=host_blocks, help="of each process or node")
    models = [name for name, model in MODELS.items() if not model.mla]
    add("--model", choices=models, default="llama-3.1-8b", help="whose blocks are moved")
    add("--scale", type=count, default=8, help="divides layers, tokens, heads and head_dim")


def facts_of(requests: Sequence[Request], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the facts on the requests in a report."""
    return {
        "trace": Path(arguments.trace).name if arguments.trace else f"seed {arguments.seed}",
        "requests": len(requests),
        "blocks": sum(len(request.hash_ids) for request in requests),
        "distinct_blocks": len({i for request in requests for i in request.hash_ids}),
    }


def conversations(seed: int = 0) -> Iterator[Request]:
    """Yield requests without end: rounds of conversations, and long prompts that never recur.

    A round is the conversation so far and a few new blocks. Conversations share system prompts;
    recent ones are likelier to continue. Equal seeds give equal requests.
    """
    rng = np.random.default_rng(seed)
    fresh = itertools.count()

    def new(blocks: float) -> tuple[int, ...]:
        return tuple(islice(fresh, max(1, round(blocks))))

    prompts = [new(rng.integers(2, 7)) for _ in range(PROMPTS)]
    talks: list[tuple[int, ...]] = []  # the latest last
    now = 0.0
    while True:
        kind = rng.random()
        if kind < SCANS:
            blocks = new(rng.integers(20, 50))
        else:
            if talks and kind < SCANS + (1 - SCANS) * CONTINUES:
                talk = talks.pop(-min(int(rng.geometric(0.1)), len(talks)))
            else:
                talk = prompts[int(rng.integers(PROMPTS))] + new(rng.lognormal(1.2, 0.7))
            blocks = talk + new(rng.lognormal(0.5, 0.6))
            talks.append(blocks)
        yield Request(now, len(blocks) * BLOCK_TOKENS, int(rng.integers(50, 500)), blocks)
        now += float(rng.exponential(GAP_MS))
