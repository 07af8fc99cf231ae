"""Requests in progress, and what a step runs of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .drafts import Tree
from .llama import StepInputs
from .requests import Prompt


class Sequence:
    """A request in progress: how many of its tokens are known, planned, cached.

    known <= planned: a step in flight chooses the tokens between. cached <= planned: the cache
    holds these once the steps begun so far have run.

    Attributes
    ----------
    ids : int64 (goal,), the tokens, as far as they are known
    shared : tokens reused by a fork when it was last admitted
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.ids = np.zeros(prompt.goal, np.int64)
        self.known = self.planned = len(prompt.tokens)
        self.ids[: self.known] = prompt.tokens
        self.cached = self.shared = 0
        self.feed = -1  # the row of the last step that chooses the token at `known`

    @property
    def number(self) -> int:
        return self.prompt.number

    @property
    def pending(self) -> int:
        """Tokens that a step has yet to run."""
        return self.planned - self.cached

    @property
    def done(self) -> bool:
        return self.planned == self.prompt.goal

    @property
    def output(self) -> list[int]:
        """Tokens decoded so far."""
        return [int(token) for token in self.ids[len(self.prompt.tokens) : self.known]]

    def learn(self, tokens: Any) -> None:
        """Store tokens that a step has chosen."""
        count = len(tokens)
        self.ids[self.known : self.known + count] = tokens
        self.known += count
        self.planned = max(self.planned, self.known)


def common_prefix(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> int:
    """Return the length of the common prefix of two arrays."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if different.size else length


@dataclass(frozen=True)
class Item:
    """What a step runs for one sequence: its next `count` tokens, or a tree of guesses.

    `rows` is for how many of them a successor is needed: all of a tree, the last planned token,
    none of an earlier chunk of a prompt.
    """

    sequence: Sequence
    count: int
    rows: int
    tree: Tree | None = None

    @property
    def decodes(self) -> bool:
        """Whether it is a decode, of one token or a tree, and not a chunk of a prompt."""
        return self.tree is not None or (self.count == 1 and self.rows == 1)


def next_tokens(sequence: Sequence, most: int) -> Item:
    """Return what runs next of a sequence without guesses, at most `most` tokens."""
    count = min(sequence.pending, most)
    return Item(sequence, count, int(count == sequence.pending))


def step_inputs(items: list[Item]) -> StepInputs:
    """Return the tokens of a step that has begun but not ended."""
    ids, feeds, rows, total = [], [], [], 0
    for item in items:
        sequence, start = item.sequence, item.sequence.cached
        feed = np.full(item.count, -1)
        if item.tree is not None:
            ids.append(np.array(item.tree.tokens))
        else:
            ids.append(sequence.ids[start : start + item.count])
            feed[max(sequence.known - start, 0) :] = sequence.feed  # at most one token
        feeds.append(feed)
        total += item.count
        rows.append(np.arange(total - item.rows, total))
    return StepInputs(*(np.concatenate(parts) for parts in (ids, feeds, rows)))


@dataclass
class Counts:
    """What a run did. Tokens are counted per request."""

    forks: int = 0
    shared_tokens: int = 0  # reused by forks, not computed
    computed_tokens: int = 0  # prompts, outputs, guesses, and recomputed tokens
    preemptions: int = 0
    evictions: int = 0  # of finished sequences that were kept for their prefix
    tree_steps: int = 0  # trees verified
    guesses: int = 0  # nodes of trees but the first
    accepted: int = 0
    mixed_steps: int = 0  # in which some decode and others prefill
    most_running: int = 0
    least_pages_free: int | None = None
