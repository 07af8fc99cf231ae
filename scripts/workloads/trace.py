"""Replay a trace through a tiered cache, and compare every byte that it loads.

compute stream   wait_layer(0) [check hits, write misses] wait_layer(1) [check, write] ... done
host             acquire, room for new blocks, insert           ... release once done

Each request is simulated too, by its hash ids alone: the tiers must have held the same blocks.
Pages have a model's shape, each size divided by --scale; one page is one block of 512 tokens.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from common.measure import run_named
from common.models import MODELS, Model
from common.requests import (
    BLOCK_TOKENS,
    Request,
    add_trace_arguments,
    facts_of,
    requests_of,
)
from common.timers import named_stream

import kvcupy as kv
from kvcupy.progress import count

from .audit import audit_blocks, require
from .blocks import WORD, Contents, hashes_of
from .simulation import TIERS, Sizes, TierSimulation

# Counts of the cache's statistics that the simulation has, too.
STATISTICS = {"misses": "missed", "inserted": "inserted", "lost": "lost"}
STATISTICS |= {f"{tier}_evicted": f"evicted.{tier}" for tier in TIERS}
MOVED = {"load_bytes": "loaded", "save_bytes": "saved"}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
NAMED = 8  # wrong requests that are described


@dataclass(frozen=True)
class Shape:
    """A page of one block, in bf16: layers, tokens, KV heads, elements per head."""

    layers: int
    tokens: int
    heads: int
    width: int

    @property
    def page_bytes(self) -> int:
        return 2 * 2 * self.layers * self.tokens * self.heads * self.width


def scaled_shape(model: Model, block_tokens: int, scale: int) -> Shape:
    """Return the shape of a model's block, each size divided by `scale`, at least one.

    Raises
    ------
    ValueError
        A page of one layer is no whole number of words.
    """
    sizes = (model.layers, block_tokens, model.kv_heads, model.head_dim)
    shape = Shape(*(max(1, size // scale) for size in sizes))
    if shape.tokens * shape.heads * shape.width * 2 % WORD:
        raise ValueError(f"scale: expected pages of whole 8-byte words, got {scale}")
    return shape


@dataclass(frozen=True)
class Settings:
    """Settings of a replay.

    Attributes
    ----------
    running : requests whose leases are held at a time
    host_layout : layout of the host's pool
    """

    sizes: Sizes
    shape: Shape
    write: str = "through"
    running: int = 1
    host_layout: str = "page_first"


@dataclass
class Running:
    """A request whose lease is held: its hits, and its end on the stream.

    The arrays on the device must not be freed before the stream is done with them.
    """

    number: int
    lease: Any
    hits: tuple[Any, Any]  # pages, hashes
    new: tuple[Any, Any]
    done: Any


class Replay:
    """Pools, a tiered cache over them, and a stream that stands for a model's layers.

    A source of work, of one request per step.

    Parameters
    ----------
    facts : on the requests, for the report

    Attributes
    ----------
    counts : requests; hit.<tier> and missed, in blocks; cut (blocks that are more than the device
        has, not requested); not_as_matched (requests); checked_bytes; wrong_bytes
    hits : blocks by tier, of each request
    wrong : the first wrong requests, described
    """

    def __init__(
        self, device: Any, settings: Settings, requests: Sequence[Request],
        facts: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.device, self.settings, self.facts = device, settings, facts or {}
        self._requests = deque(enumerate(requests))
        self.total, self._finished = len(requests), False
        shape, sizes = settings.shape, settings.sizes
        page = (shape.tokens, shape.layers, shape.heads, shape.width)
        self.pool = kv.KVPool(sizes.device, *page, device=device)
        self.host_pool = kv.KVPool(
            sizes.host, *page, layout=settings.host_layout, placement="pinned", device=device
        )
        self.cache = kv.TieredCache(self.pool, self.host_pool, write=settings.write)
        self.simulation = TierSimulation(sizes, settings.write, settings.running)
        self._audit_every = 1 + (sizes.device + sizes.host) // 500  # it visits all blocks
        self.compute = named_stream(device, "compute")
        self.contents = Contents(self.pool)
        self.running: deque[Running] = deque()
        self.counts = Counter(dict.fromkeys(("requests", "wrong_bytes", "not_as_matched"), 0))
        self.hits: list[tuple[int, ...]] = []
        self.wrong: list[str] = []
        self._wrong = device.zeros((len(requests), shape.layers), np.int64)
        device.synchronize()  # it is initialized before another stream adds to it

    def step(self) -> None:
        """Serve the next request.

        Raises
        ------
        Broken : the tiers did not have what the simulation says, or a page has a wrong owner
        """
        number, request = self._requests.popleft()
        self._serve(number, request)
        simulated = self.simulation.request(request.hash_ids)
        require(
            self.hits[-1] == simulated,
            f"request {number}: hits {self.hits[-1]} by tier, simulated {simulated}",
        )
        if number % self._audit_every == 0:
            audit_blocks(self.cache)

    def finish(self) -> None:
        """Wait for the requests that run; compare what the cache has counted."""
        if self._finished:
            return
        self._finished = True
        while self.running:
            self._retire()
        self.device.synchronize()
        stats, page_bytes = self.cache.stats(), self.settings.shape.page_bytes
        got = {name: stats[key] for key, name in STATISTICS.items()}
        got |= {name: stats[key] // page_bytes for key, name in MOVED.items()}
        self.counts.update({name: n for name, n in got.items() if name != "missed"})
        expected = {name: self.simulation.counts[name] for name in got}
        require(got == expected, f"the cache counts {got}, simulated {expected}")

    def close(self) -> None:
        """Finish, and drop everything; no page may be left."""
        try:
            self.finish()
        finally:
            self.cache.clear()
            self.cache.close()
        for pool in (self.pool, self.host_pool):
            require(pool.allocator.num_allocated == 0, f"pages of {pool} are left")

    def report(self) -> dict[str, Any]:
        return {**self.facts, "counts": {"blocks": dict(self.counts)}}

    def problems(self) -> list[str]:
        return self.wrong

    def _serve(self, number: int, request: Request) -> None:
        counts = self.counts
        keys = hashes_of(request.hash_ids[: self.settings.sizes.device])
        names = keys.tolist()
        while len(self.running) >= self.settings.running:
            self._retire()
        match = self.cache.match(names)
        lease = self._until_room(lambda: self.cache.acquire(names, after=self.compute))
        num_hits = lease.num_blocks
        new = self._until_room(lambda: self._new_pages(len(names) - num_hits))
        self._compute(number, lease, keys, new)
        self.running[-1].done.synchronize()
        self.cache.engine.save_stream.synchronize()  # evictions do not depend on timing
        spare = self.cache.insert(names[num_hits:], new, after=self.compute)
        if len(spare):
            self.pool.allocator.free(spare)
        leading = [min(n, num_hits) for n in (0, match.device, match.host)]
        self.hits.append(tuple(upper - lower for lower, upper in pairwise(leading)))
        counts.update({f"hit.{tier}": n for tier, n in zip(TIERS, self.hits[-1], strict=True)})
        counts.update({
            "requests": 1, "missed": len(names) - num_hits,
            "not_as_matched": num_hits < match.host, "cut": len(request.hash_ids) - len(names),
            "checked_bytes": num_hits * self.settings.shape.page_bytes,
        })  # fmt: skip

    def _new_pages(self, count: int) -> Any:
        """Allocate pages for new blocks, and evict what is in their way."""
        allocator = self.pool.allocator
        # Pages that a transfer still reads count as free: `alloc` waits for them.
        short = count - (allocator.num_pages - allocator.num_allocated)
        if short > 0:
            self.cache.evict(short)
        return allocator.alloc(count)

    def _compute(self, number: int, lease: Any, keys: Any, new: Any) -> None:
        """Enqueue the layers: compare the hits, write the misses."""
        asarray, num_hits = self.device.asarray, lease.num_blocks
        hits = asarray(lease.pages), asarray(keys[:num_hits])
        fresh = asarray(new), asarray(keys[num_hits:])
        self.compute.wait(self.device.as_stream(None))  # until they are uploaded

        def layer_work(layer: int) -> None:
            if num_hits:
                self._wrong[number, layer] += self.contents.wrong_bytes(layer, *hits)
            if len(new):
                self.contents.write(layer, *fresh)

        for layer in range(self.settings.shape.layers):
            if num_hits:
                lease.wait_layer(layer, self.compute)
            run_named(self.device, f"layer {layer}", lambda n=layer: layer_work(n), self.compute)
        self.running.append(Running(number, lease, hits, fresh, self.compute.record()))

    def _until_room(self, attempt: Callable[[], Any]) -> Any:
        """Try until it succeeds; release the oldest running request where there is no room."""
        while True:
            try:
                return attempt()
            except kv.CacheFull:
                if not self.running:
                    raise
                self._retire()

    def _retire(self) -> None:
        """Wait until the oldest running request is computed, and release its lease."""
        oldest = self.running.popleft()
        oldest.done.synchronize()
        wrong = self.device.to_numpy(self._wrong[oldest.number])
        if wrong.any():
            self.counts["wrong_bytes"] += int(wrong.sum())
            if len(self.wrong) < NAMED:
                first = self.contents.first_wrong(*oldest.hits)
                self.wrong.append(
                    f"request {oldest.number}: {wrong.sum()} bytes in {np.count_nonzero(wrong)} of "
                    f"{len(wrong)} layers, {first}"
                )
        oldest.lease.release()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace_arguments(parser, device_blocks=128, host_blocks=512)
    add("--host-layout", choices=LAYOUTS, default="page_first")
    add("--write", choices=("through", "back"), default="through")
    add("--running", type=count, default=1, help="requests whose leases are held at a time")


def make(device: Any, options: argparse.Namespace) -> Replay:
    requests = requests_of(options.trace, options.limit, options.seed)
    shape = scaled_shape(MODELS[options.model], BLOCK_TOKENS, options.scale)
    sizes = Sizes(options.device_blocks, options.host_blocks)
    settings = Settings(
        sizes, shape, write=options.write, running=options.running,
        host_layout=options.host_layout,
    )  # fmt: skip
    facts = facts_of(requests, options) | {"page_bytes": shape.page_bytes}
    return Replay(device, settings, requests, facts=facts)
