"""One replay: requests go through a tiered cache, and every byte that it loads is compared.

compute stream   wait_layer(0) [check hits, write misses] wait_layer(1) [check, write] ... done
host             acquire, room for new blocks, insert           ... release once done
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common.measure import run_named
from common.models import Model
from common.timers import named_stream

import kvcupy as kv
from kvcupy import TieredCache

from .content import WORD, Contents, hashes_of
from .requests import Request
from .simulation import TIERS, Sizes

# Directions, by their names in the cache's statistics.
DIRECTIONS = {
    "host to device": "load",
    "device to host": "save",
    "disk to host": "disk_read",
    "host to disk": "disk_write",
}
COUNTED = ("requests", *(f"hit.{tier}" for tier in TIERS), "missed", "cut", "not_as_matched")
COUNTED += ("checked_bytes", "wrong_bytes")
POINTS = 400  # per series, at most
NAMED = 8  # wrong requests that are described


DISK_BLOCK = 4096  # alignment of pages in a disk tier, bytes
RECORD = 64  # bytes per record of a page there


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
    disk : the file of the disk tier; unused if `sizes` has no disk
    running : requests whose leases are held at a time
    eager : insert blocks while they are being written and others are being moved. Evictions, and
        so hits, then depend a little on timing
    host_layout : layout of the host's pool
    """

    sizes: Sizes
    shape: Shape
    write: str = "through"
    disk: Path | None = None
    running: int = 1
    eager: bool = False
    host_layout: str = "page_first"

    @property
    def disk_bytes(self) -> int:
        """Size of the file: a header, a table of records, pages."""
        table = _whole(self.sizes.disk * RECORD)
        return DISK_BLOCK + table + self.sizes.disk * _whole(self.shape.page_bytes)


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // DISK_BLOCK) * DISK_BLOCK


@dataclass
class Outcome:
    """The result of a replay.

    Attributes
    ----------
    counts : hit.<tier> and missed, in blocks, as `match` returned them; requests; cut (blocks
        beyond the longest lease, not requested); not_as_matched (requests); checked_bytes;
        wrong_bytes
    hits : blocks by tier, per request
    wrong : the first wrong requests, described
    series : rows of `Replay.sample`
    stats : `TieredCache.stats` at the end
    """

    counts: Counter[str] = field(default_factory=Counter)
    hits: list[tuple[int, ...]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    series: list[dict[str, float]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    waited_us: float = 0.0
    wall_s: float = 0.0


@dataclass
class Running:
    """A request whose lease is held: its hits, and events of its layers on the stream.

    The arrays on the device must not be freed before the stream is done with them.
    """

    number: int
    lease: Any
    hits: tuple[Any, Any]  # pages, hashes
    new: tuple[Any, Any]
    waits: list[tuple[Any, Any]]
    done: Any


class Replay:
    """Pools, a tiered cache over them, and a stream that stands for a model's layers.

    Parameters
    ----------
    device : a kvcupy device
    settings : see `Settings`
    open_store : returns a shared store for the host's pool, whose hits are then counted as
        hit.shared; None: without one
    """

    def __init__(
        self, device: Any, settings: Settings,
        open_store: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.device, self.settings = device, settings
        shape, sizes = settings.shape, settings.sizes
        page = (shape.tokens, shape.layers, shape.heads, shape.width)
        self.pool = kv.KVPool(sizes.device, *page, device=device)
        self.host_pool = kv.KVPool(
            sizes.host, *page, layout=settings.host_layout, placement="pinned", device=device
        )
        on_disk = {}
        if sizes.disk:
            on_disk = {"disk": settings.disk, "disk_bytes": settings.disk_bytes}
        self.store = None if open_store is None else open_store(self.host_pool)
        self.cache = TieredCache(
            self.pool, self.host_pool, write=settings.write,
            shared=self.store, **on_disk,
        )  # fmt: skip
        self.compute = named_stream(device, "compute")
        self.contents = Contents(self.pool)
        self.running: deque[Running] = deque()
        self.outcome = Outcome(Counter(dict.fromkeys(COUNTED, 0)))

    def close(self) -> None:
        self.cache.close()
        if self.store is not None:
            self.store.close()

    def run(
        self, requests: Sequence[Request], *, each: Callable[[int], None] = lambda done: None
    ) -> Outcome:
        """Replay requests; `each` is called with the number of requests done, after each."""
        outcome = self.outcome
        self._wrong = self.device.zeros((len(requests), self.settings.shape.layers), np.int64)
        self.device.synchronize()  # it is initialised before another stream adds to it
        every = max(1, -(-len(requests) // POINTS))
        start = time.perf_counter()
        for number, request in enumerate(requests):
            self._request(number, request)
            if (number + 1) % every == 0 or number + 1 == len(requests):
                outcome.series.append(self.sample(number + 1, request.timestamp))
            each(number + 1)
        while self.running:
            self._retire()
        self._settle()
        outcome.wall_s = time.perf_counter() - start
        outcome.stats = self.cache.stats()
        return outcome

    def sample(self, done: int, timestamp: float) -> dict[str, float]:
        """Return the state: requests, minutes of the trace, counts, the cache's statistics."""
        counts = self.outcome.counts
        row = {"requests": done, "minutes": timestamp / 60e3, "missed": counts["missed"]}
        row |= {f"hit.{tier}": counts[f"hit.{tier}"] for tier in TIERS}
        self._settle()
        stats = self.cache.stats()
        row |= {f"blocks.{tier}": stats[f"{tier}_blocks"] for tier in TIERS}
        return row | {f"bytes.{name}": stats[f"{key}_bytes"] for name, key in DIRECTIONS.items()}

    def _request(self, number: int, request: Request) -> None:
        counts = self.outcome.counts
        keys = hashes_of(request.hash_ids[: self.settings.sizes.longest])
        # A shared store needs hashes of 128 bits; the contents follow from the lower half.
        names = keys.tolist() if self.store is None else [2**64 + key for key in keys.tolist()]
        while len(self.running) >= self.settings.running:
            self._retire()
        match = self.cache.match(names)
        lease = self._until_room(lambda: self.cache.acquire(names, after=self.compute))
        num_hits = lease.num_blocks
        new = self._until_room(lambda: self._new_pages(len(names) - num_hits))
        self._compute(number, lease, keys, new)
        if not self.settings.eager:
            self.running[-1].done.synchronize()
            self._settle()
        spare = self.cache.insert(names[num_hits:], new, after=self.compute)
        if len(spare):
            self.pool.allocator.free(spare)

        # Blocks that were damaged on disk, and those after them, are misses.
        leading = [min(n, num_hits) for n in (0, match.device, match.host, match.disk)]
        by_tier = [upper - lower for lower, upper in pairwise(leading)]
        self.outcome.hits.append(tuple(by_tier))
        counts.update({f"hit.{tier}": n for tier, n in zip(TIERS, by_tier, strict=True)})
        counts["requests"] += 1
        counts["missed"] += len(names) - num_hits
        counts["not_as_matched"] += num_hits != match.shared
        if self.store is not None:
            counts["hit.shared"] += max(0, num_hits - match.disk)
        counts["cut"] += len(request.hash_ids) - len(names)
        counts["checked_bytes"] += num_hits * self.settings.shape.page_bytes

    def _settle(self) -> None:
        """Wait until blocks that were inserted or evicted earlier are saved."""
        self.cache.engine.save_stream.synchronize()

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
        waits = []

        def layer_work(layer: int) -> None:
            if num_hits:
                self._wrong[number, layer] += self.contents.wrong_bytes(layer, *hits)
            if len(new):
                self.contents.write(layer, *fresh)

        for layer in range(self.settings.shape.layers):
            if num_hits:
                before, after = (self.device.event(timing=True) for _ in range(2))
                self.compute.record(before)
                lease.wait_layer(layer, self.compute)
                self.compute.record(after)
                waits.append((before, after))
            run_named(self.device, f"layer {layer}", lambda n=layer: layer_work(n), self.compute)
        done = self.compute.record()
        self.running.append(Running(number, lease, hits, fresh, waits, done))

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
        self.outcome.waited_us += sum(end.elapsed_us(start) for start, end in oldest.waits)
        wrong = self.device.to_numpy(self._wrong[oldest.number])
        if wrong.any():
            self.outcome.counts["wrong_bytes"] += int(wrong.sum())
            if len(self.outcome.wrong) < NAMED:
                first = self.contents.first_wrong(*oldest.hits)
                self.outcome.wrong.append(
                    f"request {oldest.number}: {wrong.sum()} bytes in {np.count_nonzero(wrong)} of "
                    f"{len(wrong)} layers, {first}"
                )
        oldest.lease.release()
