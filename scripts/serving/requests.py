"""Requests to serve: prompts that share prefixes, from a trace or generated from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from common.workload import read_trace

BLOCK_TOKENS = 512  # input tokens per hash of a trace
MAX_OUTPUT = 4  # times its median


@dataclass(frozen=True)
class Prompt:
    """A request: continue `tokens` by `output_length` tokens."""

    number: int
    arrival_ms: float
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    output_length: int

    @property
    def goal(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.tokens) + self.output_length


def synthetic_prompts(
    count: int,
    vocab: int,
    *,
    seed: int = 0,
    systems: int = 3,
    system_tokens: int = 72,
    user_tokens: int = 40,
    output_tokens: int = 32,
    gap_ms: float = 40.0,
) -> list[Prompt]:
    """Return chats, each of which begins with one of a few system prompts.

    Parameters
    ----------
    systems, system_tokens : how many system prompts there are, and how long
    user_tokens, output_tokens : medians of log-normal lengths
    gap_ms : mean time between arrivals, which are a Poisson process
    """
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, (systems, system_tokens))
    prompts, now = [], 0.0
    for number in range(count):
        user = rng.integers(0, vocab, int(rng.lognormal(np.log(user_tokens), 0.6)) + 1)
        length = int(rng.lognormal(np.log(output_tokens), 0.5)) + 1
        tokens = np.concatenate([shared[rng.integers(systems)], user])
        prompts.append(Prompt(number, now, tokens, min(length, MAX_OUTPUT * output_tokens)))
        now += rng.exponential(gap_ms)
    return prompts


def trace_prompts(
    path: str | Path, count: int, vocab: int, *, scale: float = 32.0, seed: int = 0
) -> list[Prompt]:
    """Read the first requests of a trace, with lengths and arrival times divided by `scale`.

    Blocks of equal hash are equal tokens, so that prompts share what they share in the trace.

    Raises
    ------
    ValueError
        A line is not a request, or there is none.
    """
    block = max(1, round(BLOCK_TOKENS / scale))
    prompts = []
    for number, request in enumerate(islice(read_trace(path), count)):
        length = max(1, round(request.input_length / scale))
        blocks = [_tokens((seed, 0, name), block, vocab) for name in request.hash_ids]
        rest = max(length - block * len(blocks), 0)
        tokens = np.concatenate([*blocks, _tokens((seed, 1, number), rest, vocab)])[:length]
        output = max(1, round(request.output_length / scale))
        prompts.append(Prompt(number, request.timestamp / scale, tokens, output))
    if not prompts:
        raise ValueError(f"{path}: expected a trace of at least one request, got none")
    return prompts


def _tokens(name: tuple[int, ...], count: int, vocab: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(name).integers(0, vocab, count)
