"""Run steps on a model and a PagedKVCache, and serve requests with continuous batching.

    waiting --admit: cached prefix blocks--> running --goal--> removed, its blocks are cached
       ^                                        |
       `------ preempt, the youngest first <----' CacheFull

    host     |plan 1|launch 1|plan 2|launch 2|collect 1|plan 3|launch 3|collect 2| ...
    tables      copy 1          copy 2                    copy 3
    compute            |step 1 ..............|step 2 ...............|step 3 ......

A step holds one token of every sequence that decodes, and prompt chunks, oldest first, up to a
budget of tokens. It takes the tokens that the step before has chosen from device memory; the host
gets them a step later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common.timers import named_stream

import kvcupy as kv

from .llama import Buffers, Llama

IN_FLIGHT = 2  # steps in flight, with buffers for each


@dataclass(frozen=True)
class CacheSettings:
    """Arguments of a PagedKVCache."""

    num_pages: int
    page_size: int = 16
    dtype: str = "fp32"


class Node:
    """A model, and a cache for its sequences.

    Parameters
    ----------
    max_tokens : of a step
    own_copy_stream : upload a step's tables on a separate stream, else on the compute stream
    steps : in flight at a time, at most
    """

    def __init__(
        self, model: Llama, settings: CacheSettings, max_tokens: int, *,
        own_copy_stream: bool = True, steps: int = 1,
    ) -> None:  # fmt: skip
        self.device, config = model.device, model.config
        self.model, self.settings = model, settings
        self.compute = named_stream(self.device, "compute")
        copier = named_stream(self.device, "tables") if own_copy_stream else self.compute
        self.cache = kv.PagedKVCache(
            num_layers=config.layers, num_q_heads=config.q_heads, num_kv_heads=config.kv_heads,
            head_dim=config.head_dim, num_pages=settings.num_pages, dtype=settings.dtype,
            page_size=settings.page_size, rope=model.rope, max_batch_tokens=max_tokens,
            device=self.device, copy_stream=copier,
        )  # fmt: skip
        self.buffers = Buffers(self.device, config, max_tokens, steps)

    def enqueue(self, parts: Sequence[Sequence[int]]) -> None:
        """Enqueue the begun step, whose sequences get these tokens."""
        ids = np.concatenate([np.asarray(part, np.int64) for part in parts])
        rows = np.cumsum([len(part) for part in parts]) - 1
        feeds = np.full(len(ids), -1)
        self.model.forward_step(self.cache, self.buffers, (ids, feeds, rows), self.compute)

    def step(self, names: Sequence[Any], parts: Sequence[Sequence[int]]) -> list[int]:
        """Append tokens to sequences; return the most likely successor of each."""
        with self.cache.forward(list(names), [len(part) for part in parts]):
            self.enqueue(parts)
        return self.chosen(len(names))

    def chosen(self, count: int) -> list[int]:
        """Wait for the step, and return the tokens that it chose."""
        self.compute.synchronize()
        return [int(token) for token in self.buffers.pinned_next[0, :count]]


@dataclass(frozen=True)
class Prompt:
    """A request: continue `tokens` by `output_length` tokens."""

    number: int
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    output_length: int

    @property
    def goal(self) -> int:
        return len(self.tokens) + self.output_length


def chats(count: int, vocab: int, *, seed: int = 0, output_tokens: int = 32) -> list[Prompt]:
    """Return requests, each of which begins with one of three system prompts of 72 tokens.

    `output_tokens` is the median of log-normal lengths.
    """
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, (3, 72))
    prompts = []
    for number in range(count):
        user = rng.integers(0, vocab, int(rng.lognormal(np.log(40), 0.6)) + 1)
        length = int(rng.lognormal(np.log(output_tokens), 0.5)) + 1
        tokens = np.concatenate([shared[rng.integers(3)], user])
        prompts.append(Prompt(number, tokens, min(length, 4 * output_tokens)))
    return prompts


class Request:
    """A request in progress: how many of its tokens are known, planned, cached.

    known <= planned: a step in flight chooses the tokens between. cached <= planned: the cache
    holds these once the steps begun so far have run.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.ids = np.zeros(prompt.goal, np.int64)
        self.known = self.planned = len(prompt.tokens)
        self.ids[: self.known] = prompt.tokens
        self.cached = 0
        self.feed = -1  # the row of the last step that chooses the token at `known`

    @property
    def pending(self) -> int:
        """Tokens that a step has yet to run."""
        return self.planned - self.cached


@dataclass
class Outcome:
    """What a run returned, and how long it took. Tokens are counted per request."""

    tokens: list[list[int]] = field(default_factory=list)  # of each request, decoded
    seconds: float = 0.0
    step_us: list[float] = field(default_factory=list)  # from the end of a step to the next
    cached_tokens: int = 0  # of prefixes, not computed
    computed_tokens: int = 0  # prompts, outputs, and recomputed tokens
    prefix_hits: int = 0
    preemptions: int = 0
    mixed_steps: int = 0  # in which some decode and others prefill
    most_running: int = 0


class Server(Node):
    """A node that serves requests, with cached prefixes in two tiers.

    Parameters
    ----------
    budget, max_running : tokens per step, and requests at a time, at most
    """

    def __init__(
        self, model: Llama, settings: CacheSettings, *, budget: int, max_running: int,
        own_copy_stream: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model, settings, budget, own_copy_stream=own_copy_stream, steps=IN_FLIGHT)
        self.budget, self.max_running = budget, max_running
        config = model.config
        host_pool = kv.KVPool(
            settings.num_pages, settings.page_size, config.layers, config.kv_heads,
            config.head_dim, dtype=settings.dtype, scales=bool(self.cache.pool.scale_parts),
            layout="page_first", placement="pinned", device=self.device,
        )  # fmt: skip
        self.tiers = kv.TieredCache(self.cache.pool, host_pool)
        self.cache.attach(self.tiers)

    def serve(
        self, prompts: Sequence[Prompt], *, progress: Callable[[int], None] = lambda done: None,
        watch: tuple[int, int] | None = None,
    ) -> tuple[Outcome, Any]:  # fmt: skip
        """Serve all requests, starting with an empty cache; return the outcome and a timeline.

        Parameters
        ----------
        progress : called with the number of requests done
        watch : the first step that the timeline records, and the one after the last
        """
        self.cache.clear()
        self.tiers.clear()
        self.outcome, self._steps, recorded = Outcome(), 0, None
        self._waiting = deque(Request(prompt) for prompt in prompts)
        self._running: list[Request] = []  # in order of admission
        self._flying: deque[tuple[list[tuple[Request, int]], int, Any]] = deque()
        requests = list(self._waiting)
        start = self._last_end = time.perf_counter()
        with ExitStack() as watching:
            while self._waiting or self._running:
                if watch and self._steps == watch[0] and recorded is None:
                    self._settle()
                    recorded = watching.enter_context(kv.timeline())
                self._admit()
                self._launch(self._begin())
                if len(self._flying) == IN_FLIGHT:
                    self._collect()
                if watch and self._steps == watch[1]:
                    self._settle()
                    watching.close()
                progress(len(prompts) - len(self._waiting) - len(self._running))
            self._settle()
        self.outcome.seconds = time.perf_counter() - start
        self.outcome.tokens = [r.ids[len(r.prompt.tokens) :].tolist() for r in requests]
        kv.check_faults(self.device)
        return self.outcome, recorded

    def _admit(self) -> None:
        """Begin requests with what is cached of them, while pages are free."""
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting[0]
            ids = request.ids[: request.known]
            hashes = kv.block_hashes(ids, self.settings.page_size, bits=128)
            try:
                self.cache.add_sequence(request.prompt.number, hashes, num_tokens=len(ids))
            except kv.CacheFull:
                if not self._running:
                    raise
                return
            request.cached = self.cache.sequence_length(request.prompt.number)
            self.outcome.prefix_hits += request.cached > 0
            self.outcome.cached_tokens += request.cached
            self._running.append(self._waiting.popleft())
            self.outcome.most_running = max(self.outcome.most_running, len(self._running))

    def _begin(self) -> list[tuple[Request, int]]:
        """Choose the requests of a step and their tokens, and begin it in the cache."""
        while True:
            items, left = [], self.budget
            for request in sorted(self._running, key=lambda r: r.pending > 1):  # decodes first
                if left:
                    items.append((request, min(request.pending, left)))
                    left -= items[-1][1]
            try:
                self.cache.begin_forward(
                    [request.prompt.number for request, _ in items], [count for _, count in items]
                )
                return items
            except kv.CacheFull:
                if len(self._running) == 1:
                    raise
                self._settle()
                youngest = self._running.pop()
                self.cache.remove_sequence(youngest.prompt.number)
                self._waiting.appendleft(youngest)
                self.outcome.preemptions += 1

    def _launch(self, items: list[tuple[Request, int]]) -> None:
        """Enqueue the step, and end it in the cache; the tokens that it chooses are planned."""
        ids, feeds, rows, total = [], [], [], 0
        for request, count in items:
            feed = np.full(count, -1)
            feed[max(request.known - request.cached, 0) :] = request.feed  # at most one token
            feeds.append(feed)
            ids.append(request.ids[request.cached : request.cached + count])
            total += count
            rows += [total - 1] * (count == request.pending)
        slot, decoding = self._steps % IN_FLIGHT, [r.pending == 1 for r, _ in items]
        inputs = np.concatenate(ids), np.concatenate(feeds), np.array(rows, np.int64)
        self.model.forward_step(self.cache, self.buffers, inputs, self.compute, slot=slot)
        self._flying.append((items, slot, self.compute.record()))
        self.cache.end_forward()
        self.outcome.computed_tokens += total
        self.outcome.mixed_steps += any(decoding) and not all(decoding)
        self._steps += 1
        row = 0
        for number, (request, count) in enumerate(items):
            chooses = count == request.pending
            request.cached += count
            items[number] = request, chooses
            if chooses:
                request.feed, request.planned, row = row, request.planned + 1, row + 1
                if request.planned == request.prompt.goal:
                    self._running.remove(request)
                    self.cache.remove_sequence(request.prompt.number)

    def _settle(self) -> None:
        """Wait for all steps in flight."""
        while self._flying:
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest step in flight and take its tokens."""
        items, slot, done = self._flying.popleft()
        done.synchronize()
        now = time.perf_counter()
        self.outcome.step_us.append((now - self._last_end) * 1e6)
        self._last_end = now
        tokens = iter(self.buffers.pinned_next[slot].tolist())
        for request, chooses in items:
            if chooses:
                request.ids[request.known] = next(tokens)
                request.known += 1
