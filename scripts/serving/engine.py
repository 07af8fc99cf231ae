"""Run scheduled steps on a model and a PagedKVCache, preparing the next step while one runs.

    host     |plan 1|launch 1|plan 2|launch 2|collect 1|plan 3|launch 3|collect 2| ...
    tables      copy 1          copy 2                    copy 3
    compute            |step 1 ..............|step 2 ...............|step 3 ......

A step takes its tokens from device memory, where the step before has left them; the host gets them
a step later. With draft trees it needs them first, so that nothing is prepared ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import kvcupy as kv
from kvcupy.bench.timers import named_stream

from .drafts import longest_match
from .llama import Buffers, Llama
from .requests import Prompt
from .schedule import CacheSettings, Policy, Scheduler
from .sequences import Counts, Item, step_inputs

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


class Server:
    """One model, one cache, and the requests that are served with them.

    Parameters
    ----------
    own_copy_stream : upload a step's tables on a stream of their own, else on the compute stream
    ahead : steps that are launched before the last one's tokens are known, 0 or 1
    step_ms : simulated time per step, by which requests arrive
    """

    def __init__(
        self, model: Llama, settings: CacheSettings, policy: Policy, *,
        own_copy_stream: bool = True, ahead: int = 1, step_ms: float = 30.0,
    ) -> None:  # fmt: skip
        device, config = model.device, model.config
        self.model, self.settings, self.policy, self.step_ms = model, settings, policy, step_ms
        self.ahead = 0 if policy.branches else min(ahead, IN_FLIGHT - 1)
        self.compute = named_stream(device, "compute")
        copier = named_stream(device, "tables") if own_copy_stream else self.compute
        self.cache = kv.PagedKVCache(
            num_layers=config.layers,
            num_q_heads=config.q_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            num_pages=settings.num_pages,
            page_size=settings.page_size,
            dtype=settings.dtype,
            demotion=settings.demotion,
            rope=model.rope,
            max_batch_tokens=policy.budget,
            device=device,
            copy_stream=copier,
        )
        self.buffers = Buffers(device, config, policy.budget, IN_FLIGHT)

    def serve(
        self,
        prompts: Sequence[Prompt],
        *,
        progress: Callable[[int, int], None] = lambda done, steps: None,
        watch: tuple[int, int] | None = None,
    ) -> tuple[Outcome, Any]:
        """Serve all requests, starting with an empty cache.

        Parameters
        ----------
        progress : called with the numbers of requests done and of steps
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
        self, server: Server, prompts: Sequence[Prompt], progress: Callable[[int, int], None]
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
        chosen, at = self.server.buffers.pinned_next[step.slot], 0
        for item in step.items:
            if item.tree is not None:
                following = chosen[at : at + item.rows]
                path = longest_match(item.tree, following.tolist())
                self.schedule.commit_tree(item, path, following[path])
            else:
                item.sequence.learn(chosen[at : at + item.rows])
            at += item.rows
        done = sum(s.done and s.known == s.planned for s in self.sequences)
        self.progress(done, self.steps)
