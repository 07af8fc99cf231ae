"""Run scheduled steps on a model and a PagedKVCache, preparing the next step while one runs.

    host     |plan 1|launch 1|plan 2|launch 2|collect 1|plan 3|launch 3|collect 2| ...
    tables      copy 1          copy 2                    copy 3
    compute            |step 1 ..............|step 2 ...............|step 3 ......

A step takes its tokens from device memory, where the step before has left them; the host gets them
a step later.
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

from .llama import Buffers, Llama, StepInputs
from .requests import Prompt
from .schedule import CacheSettings, Counts, Item, Policy, Scheduler, step_inputs

IN_FLIGHT = 2  # steps in flight, with buffers for each


@dataclass(frozen=True)
class Launched:
    """A step in flight."""

    items: list[Item]
    slot: int
    done: Any  # an event


@dataclass
class Outcome:
    """What a run returned, and how long it took."""

    tokens: list[list[int]]  # of each request, decoded
    counts: Counts
    seconds: float = 0.0
    step_us: list[float] = field(default_factory=list)  # from the end of a step to the next
    step_tokens: list[tuple[int, int]] = field(default_factory=list)  # decoding, prefilling


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
            num_layers=config.layers,
            num_q_heads=config.q_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            num_pages=settings.num_pages,
            dtype=settings.dtype,
            page_size=settings.page_size,
            rope=model.rope,
            max_batch_tokens=max_tokens,
            device=self.device,
            copy_stream=copier,
        )
        self.buffers = Buffers(self.device, config, max_tokens, steps)

    def enqueue(self, parts: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> None:
        """Enqueue the begun step, whose sequences get these tokens.

        `rows` are the tokens whose successors are needed: by default the last of each sequence.
        """
        ids = np.concatenate([np.asarray(part, np.int64) for part in parts])
        if rows is None:
            rows = np.cumsum([len(part) for part in parts]) - 1
        inputs = StepInputs(ids, np.full(len(ids), -1), np.asarray(rows, np.int64))
        self.model.forward_step(self.cache, self.buffers, inputs, self.compute)

    def step(
        self, names: Sequence[Any], parts: Sequence[Sequence[int]],
        rows: Sequence[int] | None = None,
    ) -> list[int]:  # fmt: skip
        """Append tokens to sequences; return the most likely successors of `rows`."""
        with self.cache.forward(list(names), [len(part) for part in parts]):
            self.enqueue(parts, rows)
        return self.chosen(len(names) if rows is None else len(rows))

    def chosen(self, count: int) -> list[int]:
        """Wait for the step, and return the tokens that it chose."""
        self.compute.synchronize()
        return [int(token) for token in self.buffers.pinned_next[0, :count]]


class Server(Node):
    """A node that serves requests by a policy.

    Parameters
    ----------
    ahead : steps that are launched before the last one's tokens are known, 0 or 1
    step_ms : simulated time per step, by which requests arrive
    """

    def __init__(
        self, model: Llama, settings: CacheSettings, policy: Policy, *,
        own_copy_stream: bool = True, ahead: int = 1, step_ms: float = 30.0,
    ) -> None:  # fmt: skip
        super().__init__(
            model, settings, policy.budget, own_copy_stream=own_copy_stream, steps=IN_FLIGHT
        )
        self.policy, self.ahead, self.step_ms = policy, ahead, step_ms

    def serve(
        self,
        prompts: Sequence[Prompt],
        *,
        progress: Callable[[int], None] = lambda done: None,
        watch: tuple[int, int] | None = None,
    ) -> tuple[Outcome, Any]:
        """Serve all requests, starting with an empty cache.

        Parameters
        ----------
        progress : called with the number of requests done
        watch : the first step that a timeline records, and the one after the last

        Returns
        -------
        the outcome, and the timeline; None without `watch`
        """
        self.cache.clear()
        run = _Run(self, prompts, progress)
        with ExitStack() as watching:
            recorded = run.until_done(watch, watching)
        self.model.device.synchronize()
        kv.check_faults(self.model.device)
        return run.outcome, recorded


class _Run:
    """One pass over the requests."""

    def __init__(
        self, server: Server, prompts: Sequence[Prompt], progress: Callable[[int], None]
    ) -> None:
        self.server, self.progress = server, progress
        self.flying: deque[Launched] = deque()
        self.schedule = Scheduler(
            server.cache, server.settings, server.policy, prompts, self.settle,
        )  # fmt: skip
        self.sequences = list(self.schedule.waiting)
        self.outcome = Outcome([], self.schedule.counts)
        self.steps = 0
        self.last_end = 0.0

    def until_done(self, watch: tuple[int, int] | None, watching: ExitStack) -> Any:
        schedule, now_ms, recorded = self.schedule, 0.0, None
        start = self.last_end = time.perf_counter()
        while schedule.waiting or schedule.running:
            if watch and self.steps == watch[0] and recorded is None:
                self.settle()
                recorded = watching.enter_context(kv.timeline())
            items = schedule.begin_step(now_ms)
            if items:
                self.launch(items)
                now_ms += self.server.step_ms
            else:  # no request has arrived yet
                self.settle()
                now_ms = max(now_ms, schedule.waiting[0].prompt.arrival_ms)
                self.last_end = time.perf_counter()
            while len(self.flying) > self.server.ahead:
                self.collect()
            if watch and self.steps == watch[1]:
                self.settle()
                watching.close()
        self.settle()
        self.outcome.seconds = time.perf_counter() - start
        self.outcome.tokens = [sequence.output for sequence in self.sequences]
        return recorded

    def launch(self, items: list[Item]) -> None:
        """Enqueue a step on the compute stream, and end it in the cache."""
        server, slot = self.server, self.steps % IN_FLIGHT
        inputs = step_inputs(items)
        server.model.forward_step(server.cache, server.buffers, inputs, server.compute, slot=slot)
        done = server.compute.record()
        self.schedule.end_step(items)
        decoding = sum(item.count for item in items if item.decodes)
        self.outcome.step_tokens.append((decoding, len(inputs.ids) - decoding))
        self.flying.append(Launched(items, slot, done))
        self.steps += 1

    def settle(self) -> None:
        """Wait for all steps in flight."""
        while self.flying:
            self.collect()

    def collect(self) -> None:
        """Wait for the oldest step in flight and take its tokens."""
        step = self.flying.popleft()
        step.done.synchronize()
        now = time.perf_counter()
        self.outcome.step_us.append((now - self.last_end) * 1e6)
        self.last_end = now
        tokens = iter(self.server.buffers.pinned_next[step.slot].tolist())
        for item in step.items:
            if item.chooses:
                item.sequence.learn(next(tokens))
        done = sum(s.done and s.known == s.planned for s in self.sequences)
        self.progress(done)
