"""What each step runs: continuous batching over the pages of one cache.

    waiting --admit: fork the longest prefix, if pages are free--> running --done--> kept
       ^                                                              |                |
       `------------------- preempt, youngest first <-- CacheFull ----+---- evict <----'

A step holds one token of every sequence that decodes, and prompt chunks, oldest first, up to a
budget of tokens. Finished sequences are kept for their prefix until their pages are needed. Old
tokens may have separate pages, in a narrower format: both kinds are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvcupy as kv

from .llama import StepInputs
from .requests import Prompt


@dataclass(frozen=True)
class CacheSettings:
    """Arguments of a PagedKVCache."""

    num_pages: int
    page_size: int = 16
    dtype: str = "fp32"

    def pages(self, tokens: int) -> int:
        """Return the pages of a sequence of so many tokens."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class Policy:
    """How steps are filled.

    Attributes
    ----------
    budget : tokens per step, at most
    max_running : requests at a time, at most `budget`
    share : fork prefixes, and keep finished sequences for them
    """

    budget: int = 64
    max_running: int = 32
    share: bool = True


class Sequence:
    """A request in progress: how many of its tokens are known, planned, cached.

    known <= planned: a step in flight chooses the tokens between. cached <= planned: the cache
    holds these once the steps begun so far have run.

    Attributes
    ----------
    ids : int64 (goal,), the token IDs, 0 where none is generated yet
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

    def learn(self, token: int) -> None:
        """Store the token that a step has chosen."""
        self.ids[self.known] = token
        self.known += 1


def common_prefix(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> int:
    """Return the length of the common prefix of two arrays."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if different.size else length


@dataclass(frozen=True)
class Item:
    """The next `count` tokens of a sequence; `chooses`: they end with its last planned token."""

    sequence: Sequence
    count: int
    chooses: bool

    @property
    def decodes(self) -> bool:
        """Whether it is a decode, and not a chunk of a prompt."""
        return self.count == 1 and self.chooses


def next_tokens(sequence: Sequence, most: int) -> Item:
    """Return what runs next of a sequence, at most `most` tokens."""
    count = min(sequence.pending, most)
    return Item(sequence, count, count == sequence.pending)


def step_inputs(items: list[Item]) -> StepInputs:
    """Return the tokens of a step that has begun but not ended."""
    ids, feeds, rows, total = [], [], [], 0
    for item in items:
        sequence, start = item.sequence, item.sequence.cached
        feed = np.full(item.count, -1)
        feed[max(sequence.known - start, 0) :] = sequence.feed  # at most one token
        ids.append(sequence.ids[start : start + item.count])
        feeds.append(feed)
        total += item.count
        rows += [total - 1] * item.chooses
    return StepInputs(np.concatenate(ids), np.concatenate(feeds), np.array(rows, np.int64))


@dataclass
class Counts:
    """What a run did. Tokens are counted per request."""

    forks: int = 0
    shared_tokens: int = 0  # reused by forks, not computed
    computed_tokens: int = 0  # prompts, outputs, and recomputed tokens
    preemptions: int = 0
    evictions: int = 0  # of finished sequences that were kept for their prefix
    mixed_steps: int = 0  # in which some decode and others prefill
    most_running: int = 0
    least_pages_free: int | None = None


class Scheduler:
    """Requests, the pages that they hold, and which of their tokens run next.

    Parameters
    ----------
    cache, settings : the PagedKVCache, and its arguments
    settle : waits for steps in flight, so that every planned token is known

    Raises
    ------
    ValueError
        A request needs more pages than there are, or the policy does not fit.
    """

    def __init__(
        self, cache: Any, settings: CacheSettings, policy: Policy,
        prompts: Iterable[Prompt], settle: Callable[[], None],
    ) -> None:  # fmt: skip
        if not 1 <= policy.max_running <= policy.budget:
            raise ValueError(
                f"max_running: expected 1 to the budget of {policy.budget} tokens, "
                f"got {policy.max_running}"
            )
        self.cache, self.settings, self.policy = cache, settings, policy
        self.settle = settle
        self.waiting = deque(Sequence(prompt) for prompt in prompts)
        self.running: list[Sequence] = []  # in order of admission
        self.kept: dict[int, Sequence] = {}  # by number, least recently used first
        self.counts = Counts()
        for sequence in self.waiting:
            goal = sequence.prompt.goal
            if settings.pages(goal) > settings.num_pages:
                raise ValueError(
                    f"request {sequence.number}: its {goal} tokens need {settings.pages(goal)} "
                    f"pages, expected at most {settings.num_pages}"
                )

    # What a step runs.

    def begin_step(self, now_ms: float) -> list[Item]:
        """Admit, choose tokens, and begin the step in the cache; empty if nothing can run."""
        self._admit(now_ms)
        items = self._items()
        while items:
            try:
                self.cache.begin_forward(
                    [item.sequence.number for item in items], [item.count for item in items]
                )
            except kv.CacheFull:
                if not self.kept and len(self.running) == 1:
                    raise
                items = self._give_way(items)
            else:
                self._count(items)
                return items
        return []

    def _items(self) -> list[Item]:
        decoding = [s for s in self.running if s.pending == 1]
        items = [next_tokens(sequence, 1) for sequence in decoding]
        left = self.policy.budget - len(items)
        for sequence in self.running:
            if sequence.pending > 1 and left:
                items.append(next_tokens(sequence, left))
                left -= items[-1].count
        return items

    def _count(self, items: list[Item]) -> None:
        counts, free = self.counts, self.cache.num_available_pages
        counts.computed_tokens += sum(item.count for item in items)
        decoding = [item.decodes for item in items]
        counts.mixed_steps += any(decoding) and not all(decoding)
        counts.most_running = max(counts.most_running, len(self.running))
        least = counts.least_pages_free
        counts.least_pages_free = free if least is None else min(least, free)

    def end_step(self, items: list[Item]) -> None:
        """End the step in the cache; the tokens that it chooses are planned from now on."""
        self.cache.end_forward()
        row = 0
        for item in items:
            sequence = item.sequence
            sequence.cached += item.count
            if item.chooses:
                sequence.feed, sequence.planned = row, sequence.planned + 1
                self._retire(sequence)
                row += 1

    def _retire(self, sequence: Sequence) -> None:
        if not sequence.done:
            return
        self.running.remove(sequence)
        if self.policy.share:
            self.kept[sequence.number] = sequence
        else:
            self.cache.remove_sequence(sequence.number)

    # Admission.

    def _admit(self, now_ms: float) -> None:
        for sequence in list(self.waiting):
            if len(self.running) == self.policy.max_running:
                return
            if sequence.prompt.arrival_ms > now_ms:
                return
            donor, shared, soon = self._donor(sequence)
            if soon >= shared + self.settings.page_size:
                continue  # a running request is computing more of its prefix
            if not self._make_room(sequence, donor, shared):
                return
            self.waiting.remove(sequence)
            self._enter(sequence, donor, shared)

    def _donor(self, sequence: Sequence) -> tuple[Sequence | None, int, int]:
        """Return the sequence with the longest cached prefix, its length, and the length soon."""
        least = (self.settings.page_size + 1) // 2  # less is not worth copying a page
        best, longest, soon = None, least - 1, 0
        prefix = sequence.ids[: sequence.known - 1]  # the last is run, to get its successor
        for other in [*self.kept.values(), *self.running] if self.policy.share else ():
            shared = common_prefix(prefix, other.ids[: other.known])
            soon = soon if other.done else max(soon, shared)
            if min(shared, other.cached) > longest:
                best, longest = other, min(shared, other.cached)
        return best, longest if best else 0, soon

    def _make_room(self, sequence: Sequence, donor: Sequence | None, shared: int) -> bool:
        """Evict until a sequence fits, with what the running ones are sure to need."""
        settings, tokens = self.settings, sequence.planned + 1
        shared -= shared % settings.page_size  # the rest is copied
        needed = settings.pages(tokens) - settings.pages(shared)
        for other in self.running:
            needed += settings.pages(other.planned + 1) - settings.pages(other.cached)
        while self.cache.num_available_pages < needed:
            victim = next((s for s in self.kept.values() if s is not donor), None)
            if victim is None:
                return not self.running  # alone, it fits once its donor is evicted
            self._evict(victim)
        return True

    def _enter(self, sequence: Sequence, donor: Sequence | None, shared: int) -> None:
        sequence.cached = 0
        if donor is not None:
            if donor.number in self.kept:
                self.kept[donor.number] = self.kept.pop(donor.number)  # most recently used
            sequence.cached = self._fork(donor, sequence, shared)
        else:
            self.cache.add_sequence(sequence.number)
        sequence.shared = sequence.cached
        self.running.append(sequence)

    def _fork(self, donor: Sequence, sequence: Sequence, shared: int) -> int:
        """Fork `shared` tokens, or only full pages of them where there is no page for a copy."""
        try:
            self.cache.fork_sequence(donor.number, sequence.number, shared)
        except kv.CacheFull:
            shared -= shared % self.settings.page_size
            self.cache.fork_sequence(donor.number, sequence.number, shared)
        self.counts.forks += 1
        self.counts.shared_tokens += shared
        return shared

    # Preemption and eviction.

    def _give_way(self, items: list[Item]) -> list[Item]:
        """Free pages: evict a kept prefix, or preempt the youngest."""
        if self.kept:
            self._evict(next(iter(self.kept.values())))
            return items
        self.settle()
        youngest = self.running.pop()
        self.cache.remove_sequence(youngest.number)
        self.waiting.appendleft(youngest)
        self.counts.preemptions += 1
        return [item for item in items if item.sequence is not youngest]

    def _evict(self, sequence: Sequence) -> None:
        del self.kept[sequence.number]
        self.cache.remove_sequence(sequence.number)
        self.counts.evictions += 1
