"""Measure whether the host's work for a batch grows with what takes no part in it.

Each operation is timed for several sizes of batches and of caches, allocators and pools; what it
did is taken back before the next. Work on all sequences, pages or blocks, rather than on the batch
alone, would show as times that rise with the size.

    python scripts/bench.py scale --json build/scale.json
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from common.report import format_table
from common.timers import named_stream

import kvcupy as kv
from kvcupy.cache.pages import PageAllocator

CHUNK = 10_000  # blocks that are inserted at once
FILLED = 1000  # sequences that are filled in one step
CONTEXT = 96  # tokens of a sequence of the batch: whole pages, so that a fork copies none


def timed(work: Callable[[], object]) -> float:
    """Return the microseconds that `work` takes."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


class SteppedCache:
    """A cache with a batch of long sequences and many of one page.

    Heads are as small as possible: only the tables matter.
    """

    def __init__(self, device: Any, live: int, batch: int, context: int, page_size: int) -> None:
        self.device, self.batch = device, [("batch", i) for i in range(batch)]
        self.stream = named_stream(device, "compute")
        pages = live + batch * (context // page_size + 1)
        self.cache = kv.PagedKVCache(
            num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=1, num_pages=pages,
            page_size=page_size, dtype="bf16", device=device, copy_stream=device.stream(),
            max_batch_tokens=max(FILLED * page_size, context),
        )  # fmt: skip
        others = list(range(live))
        for first in range(0, live, FILLED):
            self._fill(others[first : first + FILLED], page_size)
        most = max(1, FILLED * page_size // context)
        for start in range(0, batch, most):
            names = self.batch[start : start + most]
            self._fill(names, context)

    def _fill(self, names: Sequence[Any], tokens: int) -> None:
        for name in names:
            self.cache.add_sequence(name)
        with self.cache.forward(names, [tokens] * len(names)):
            pass

    def step_us(self, count: int | None = None) -> float:
        """Append a token to the first `count` of the batch, or all, and return the time.

        The step allocates slots and pages, packs the tables and enqueues their upload. There is no
        model and no attention. The tokens are popped again.
        """
        cache, names = self.cache, self.batch[:count]

        def step() -> None:
            cache.begin_forward(names, [1] * len(names))
            cache.slot_mapping(stream=self.stream)
            cache.end_forward()

        us = timed(step)
        for name in names:
            cache.pop_tokens(name, 1)
        self.device.synchronize()  # the upload of the tables is not host work
        return us


class SequencesState:
    """A paged cache with `size` sequences besides the batches.

    Each operation, here and below, takes a number of sequences, pages or blocks, and returns the
    microseconds of what is measured.
    """

    def __init__(self, device: Any, size: int, largest: int) -> None:
        self.stepped = SteppedCache(device, size, largest, CONTEXT, page_size=16)
        self.cache = self.stepped.cache
        self.new = [("new", i) for i in range(largest)]

    def step(self, batch: int) -> float:
        return self.stepped.step_us(batch)

    def add_and_remove(self, batch: int) -> float:
        def work() -> None:
            for name in self.new[:batch]:
                self.cache.add_sequence(name)
            self._remove(batch)

        return timed(work)

    def fork_and_remove(self, batch: int) -> float:
        def work() -> None:
            for parent, child in zip(self.stepped.batch[:batch], self.new, strict=False):
                self.cache.fork_sequence(parent, child)
            self._remove(batch)

        return timed(work)

    def pop(self, batch: int) -> float:
        names = self.stepped.batch[:batch]
        with self.cache.forward(names, [1] * batch):
            pass
        return timed(lambda: [self.cache.pop_tokens(name, 1) for name in names])

    def _remove(self, batch: int) -> None:
        for name in self.new[:batch]:
            self.cache.remove_sequence(name)


class PagesState:
    """An allocator of `size` pages, half of which are allocated."""

    def __init__(self, device: Any, size: int, largest: int) -> None:
        self.allocator = PageAllocator(size)
        self.allocator.alloc(size // 2)

    def alloc_and_free(self, batch: int) -> float:
        return timed(lambda: self.allocator.free(self.allocator.alloc(batch)))


class BlocksState:
    """A tiered cache of `size` blocks on the device; half are leased, those longest unused."""

    def __init__(self, device: Any, size: int, largest: int) -> None:
        shape = size + largest, 1, 1, 1, 1  # pages, page_size, layers, heads, head_dim
        self.pool = kv.KVPool(*shape, dtype="int8", device=device)
        host = kv.KVPool(*shape, dtype="int8", placement="pinned", device=device)
        self.cache = kv.TieredCache(self.pool, host, write="back")
        self.end = 0
        while self.end < size:
            self._insert(min(CHUNK, size - self.end))
        self.lease = self.cache.acquire(range(size // 2))
        self.cache.acquire(range(size // 2, size)).release()

    def match(self, batch: int) -> float:
        return timed(lambda: self.cache.match(self._newest(batch)))

    def acquire(self, batch: int) -> float:
        return timed(lambda: self.cache.acquire(self._newest(batch)).release())

    def evict_and_insert(self, batch: int) -> float:
        def work() -> None:
            self.cache.evict(batch)
            self._insert(batch)

        us = timed(work)
        self.cache.flush()
        return us

    def _newest(self, batch: int) -> range:
        return range(self.end - batch, self.end)

    def _insert(self, count: int) -> None:
        hashes = range(self.end, self.end + count)
        self.end += count
        self.cache.insert(hashes, self.pool.allocator.alloc(count))


class ElementsState:
    """A paged cache with `size` elements of K, and of V; batches use the last of its pages."""

    def __init__(self, device: Any, size: int, largest: int) -> None:
        heads, width, page_size = 8, 128, 16
        num_pages = size // (page_size * heads * width)
        self.cache = kv.PagedKVCache(
            num_layers=1, num_q_heads=heads, num_kv_heads=heads, head_dim=width,
            num_pages=num_pages, page_size=page_size, dtype="int8", k_scale=1.0, v_scale=1.0,
            device=device,
        )  # fmt: skip
        self.cache.pool.allocator.alloc(num_pages - largest)
        self.rows = [device.zeros((largest, heads, width), "bf16") for _ in range(4)]
        self.stream = named_stream(device, "compute")

    def attention(self, batch: int) -> float:
        names, rows = range(batch), [array[:batch] for array in self.rows]
        for name in names:
            self.cache.add_sequence(name)
        with self.cache.forward(names, [1] * batch):
            self.cache.slot_mapping(stream=self.stream)  # uploads the tables
            issued = threading.Event()  # until then the kernels, which are no host work, wait
            self.stream.call(issued.wait)
            us = timed(lambda: self.cache.attention(0, *rows[:3], out=rows[3], stream=self.stream))
            issued.set()
            self.stream.synchronize()
        self.cache.clear()
        return us


@dataclass(frozen=True)
class Family:
    """Operations on one kind of state.

    Attributes
    ----------
    grows : what there are `sizes` of
    state : what is built of each size, for batches up to a largest one
    operations : methods of the state, and what the report calls them
    """

    grows: str
    state: Callable[[Any, int, int], Any]
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    operations: dict[str, str]


FAMILIES = {
    "sequences": Family(
        "other sequences", SequencesState, (1_000, 10_000, 100_000), (1, 64, 1024),
        {
            "step": "begin_forward, tables, end_forward", "add_and_remove": "add, remove",
            "fork_and_remove": "fork, remove", "pop": "pop",
        },
    ),
    "pages": Family(
        "pages of an allocator", PagesState, (100_000, 1_000_000, 10_000_000), (1, 100, 10_000),
        {"alloc_and_free": "alloc, free"},
    ),
    "blocks": Family(
        "cached blocks, half leased", BlocksState, (10_000, 100_000, 1_000_000), (1, 64, 1024),
        {"match": "match", "acquire": "acquire, release", "evict_and_insert": "evict, insert"},
    ),
    "elements": Family(
        "elements of K", ElementsState, (2**26, 2**29, 2**32), (1, 64, 1024),
        {"attention": "attention of a layer"},
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="what to measure")
    add("--sizes", type=int, nargs="+", help="instead of the defaults of each family")
    add("--batches", type=int, nargs="+", help="instead of the defaults of each family")
    add("--rounds", type=int, help="samples of each; default: 40, or 8 with --quick")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    rounds = options.rounds or (8 if options.quick else 40)
    rows: list[dict[str, Any]] = []
    for name in options.only:
        family = FAMILIES[name]
        sizes = options.sizes or (family.sizes[:2] if options.quick else family.sizes)
        batches = options.batches or family.batches
        print(f"{name}: {', '.join(map(str, sizes))} ...", file=sys.stderr, flush=True)
        rows += measure(device, name, sizes, batches, rounds)
    return {"rows": rows}


def measure(
    device: Any, name: str, sizes: Sequence[int], batches: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield the times of one family, all sizes in rotation: a disturbance affects all of them."""
    family = FAMILIES[name]
    states = [family.state(device, size, max(batches)) for size in sizes]
    for operation, label in family.operations.items():
        for batch in batches:
            samples: list[list[float]] = [[] for _ in sizes]
            for _ in range(rounds + 1):  # the first warms up
                for state, times in zip(states, samples, strict=True):
                    times.append(getattr(state, operation)(batch))
            for size, times in zip(sizes, samples, strict=True):
                yield {
                    "family": name, "operation": label, "batch": batch, "size": size,
                    "least_us": min(times[1:]), "median_us": median(times[1:]),
                }  # fmt: skip


def lines(report: dict[str, Any]) -> dict[tuple[str, str], dict[int, list[dict[str, Any]]]]:
    """Return the rows by family and operation, then by batch, in order of size."""
    grouped: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    for row in report["rows"]:
        of_operation = grouped.setdefault((row["family"], row["operation"]), {})
        of_operation.setdefault(row["batch"], []).append(row)
    return grouped


def render(report: dict[str, Any]) -> str:
    tables: dict[str, list[tuple[Any, ...]]] = {}
    for (name, operation), by_batch in lines(report).items():
        for batch, rows in by_batch.items():
            times = [row["least_us"] for row in rows]
            ratio = f"{times[-1] / times[0]:.2f}x"
            tables.setdefault(name, []).append((operation, f"{batch:,}", *times, ratio))
    text = []
    for name, rows in tables.items():
        sizes = dict.fromkeys(row["size"] for row in report["rows"] if row["family"] == name)
        columns = ("us (min)", "batch", *(f"{size:,}" for size in sizes), "last to first")
        text.append(f"{FAMILIES[name].grows}\n\n{format_table(columns, rows)}")
    return "\n\n".join(text)
