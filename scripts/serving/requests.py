"""Requests to serve: prompts that share prefixes, generated from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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
