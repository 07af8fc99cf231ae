"""Sessions of agents: turns that extend a prefix, sub-agents that share it, and pauses between.

A turn's request names all blocks so far. Pauses are calls of tools and people; a framework knows
their kind when they begin, and so the median, but not how long one takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

BLOCK_TOKENS = 64
PROMPTS = 3  # system prompts with tools, of which a session has one
PROMPT_BLOCKS = 150
FIRST_BLOCKS = (800, 1300)  # of a session: its prompt, repository and instructions
TURNS = (6, 16)
TURN_BLOCKS = (10, 60)  # that a turn adds
SUBAGENTS = 0.15  # share of turns that start some
SUBAGENT_TURNS = (2, 5)
SUBAGENT_DELAY_S = 2.0  # until the first one begins; the others follow a second apart
BETWEEN_SESSIONS_S = 25.0  # mean
# Kinds of pauses: share, median in seconds, and the standard deviation of the logarithm.
PAUSES = {"tool": (0.6, 5.0, 0.6), "build": (0.25, 60.0, 0.6), "person": (0.15, 600.0, 1.0)}


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes
    ----------
    at_s : when it begins
    ids : of its blocks, new ones included
    num_prompt : leading blocks of the system prompt
    num_shared : leading blocks that other sessions or sub-agents may need
    pause : kind of the pause that follows, or None: the session or sub-agent has ended
    expected_s, resumes_s : when the next turn is expected to begin, and when it does; None after
        the last
    parent_expected_s, parent_resumes_s : of the session that waits for this sub-agent, or None
    """

    at_s: float
    ids: tuple[int, ...]
    num_prompt: int
    num_shared: int
    pause: str | None = None
    expected_s: float | None = None
    resumes_s: float | None = None
    parent_expected_s: float | None = None
    parent_resumes_s: float | None = None


def sessions(count: int, seed: int = 0) -> list[Turn]:
    """Return the turns of sessions and their sub-agents, in order. Equal seeds give equal turns."""
    rng = np.random.default_rng(seed)
    fresh = itertools.count()
    prompts = [tuple(islice(fresh, PROMPT_BLOCKS)) for _ in range(PROMPTS)]
    turns: list[Turn] = []
    starts = np.cumsum(rng.exponential(BETWEEN_SESSIONS_S, count))
    for start in starts:
        prompt = prompts[int(rng.integers(PROMPTS))]
        ids = prompt + tuple(islice(fresh, int(rng.integers(*FIRST_BLOCKS))))
        _run(turns, rng, fresh, float(start), ids, len(prompt), int(rng.integers(*TURNS)), top=True)
    return sorted(turns, key=lambda turn: turn.at_s)


def _run(
    turns: list[Turn], rng: np.random.Generator, fresh: Iterator[int], now: float,
    ids: tuple[int, ...], num_shared: int, count: int, *, top: bool,
) -> tuple[float, float]:  # fmt: skip
    """Add the turns of a session or sub-agent; return when it ends, and when that is expected."""
    expected_end = now
    for number in range(count):
        ids += tuple(islice(fresh, int(rng.integers(*TURN_BLOCKS))))
        if number == count - 1:
            turns.append(Turn(now, ids, PROMPT_BLOCKS, num_shared))
            break
        if top and rng.random() < SUBAGENTS:
            pause, ends, expected, first = "sub-agents", [], [], len(turns)
            for i in range(int(rng.integers(2, 5))):
                end, likely = _run(
                    turns, rng, fresh, now + SUBAGENT_DELAY_S + i, ids, len(ids),
                    int(rng.integers(*SUBAGENT_TURNS)), top=False,
                )  # fmt: skip
                ends.append(end)
                expected.append(likely)
            resumes, likely = max(ends) + 1.0, max(expected) + 1.0
            turns[first:] = [
                replace(turn, parent_expected_s=likely, parent_resumes_s=resumes)
                for turn in turns[first:]
            ]
        else:
            kinds = ("tool", "build") if not top else tuple(PAUSES)
            shares = np.array([PAUSES[kind][0] for kind in kinds])
            pause = kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))]
            _, median_s, deviation = PAUSES[pause]
            resumes = now + median_s * float(rng.lognormal(0.0, deviation))
            likely = now + median_s
        turns.append(Turn(now, ids, PROMPT_BLOCKS, num_shared, pause, likely, resumes))
        expected_end += likely - now
        now = resumes
    return now, expected_end
