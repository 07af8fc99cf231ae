"""Counters and histograms of a running process, and an adapter for Prometheus.

What the caches count anyway, hits, evictions and bytes, is read from them when it is asked for, so
there is one count of each. Operations, waits, steps and compilations are counted while that is
enabled; disabled, each costs the test of one global.

Notes
-----
Stream: nothing is put on a stream, waited for or asked of a device, by `collect` neither: what a
transfer has moved is counted once the cache has noted that it is over. Capture: legal. An operation
that goes into a graph is not counted; each launch of the graph counts as the operation "graph".
Source: prometheus.io, "Metric and label naming".

Examples
--------
>>> import numpy as np
>>> import kvcupy as kv
>>> rows, cache = np.ones((2, 1, 4), np.float16), np.zeros((8, 1, 4), np.float16)
>>> labels = {"operation": "store_kv", "device": "host"}
>>> before = kv.metrics.value("kvcupy_bytes_total", **labels)
>>> kv.metrics.enable()
>>> kv.store_kv(rows, rows, cache, cache.copy(), np.array([0, 1]))
>>> kv.metrics.value("kvcupy_bytes_total", **labels) - before
80.0
>>> kv.metrics.disable()
"""

from __future__ import annotations

import bisect
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from . import observe
from .errors import finalize, in_child, process_lock
from .extras import install

Labels = tuple[tuple[str, str], ...]  # sorted by name

enabled = False
"""Whether operations, waits, steps and compilations are counted. Set by `enable`."""


@dataclass(frozen=True)
class Distribution:
    """What a histogram has seen.

    Attributes
    ----------
    bounds : upper bounds of all buckets but the last
    counts : of each bucket alone, one more than `bounds`
    sum : of the values
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Metric:
    """A metric as it is now.

    Attributes
    ----------
    name : with its unit; of a counter with "_total"
    kind : "counter", "gauge" or "histogram"
    help : a sentence
    samples : by labels, (name, value) pairs sorted by name: numbers, or a Distribution each
    """

    name: str
    kind: str
    help: str
    samples: Mapping[Labels, Any]


_COUNTERS = {
    "kvcupy_operations_total": "Operations put on streams, outside of graphs.",
    "kvcupy_bytes_total": "Bytes that operations read and write, where shapes and host lists tell.",
    "kvcupy_stream_waits_total": "Waits of streams for events.",
    "kvcupy_step_tokens_total": "Tokens of the steps of paged caches.",
    "kvcupy_demoted_pages_total": "Pages of paged caches converted to the format of old tokens.",
    "kvcupy_promoted_pages_total": "Pages of old tokens converted back.",
    "kvcupy_cache_hits_total": "Blocks asked of tiered caches, by the highest tier that had them.",
    "kvcupy_cache_misses_total": "Blocks asked of tiered caches that no tier had.",
    "kvcupy_cache_insertions_total": "Blocks inserted into tiered caches.",
    "kvcupy_cache_evictions_total": "Blocks evicted from a tier.",
    "kvcupy_cache_lost_blocks_total": "Blocks that left the last tier that had them.",
    "kvcupy_cache_failed_blocks_total": "Blocks whose load or save has failed.",
    "kvcupy_cache_store_misses_total": "Blocks asked of stores that did not come.",
    "kvcupy_cache_store_puts_total": "Blocks put into stores, by outcome.",
    "kvcupy_cache_store_errors_total": "Calls of stores by tiered caches that failed.",
    "kvcupy_cache_moved_bytes_total": "Bytes moved between tiers.",
    "kvcupy_cache_moved_seconds_total": "Seconds that moves between tiers took.",
    "kvcupy_migration_offers_total": "Offers of page senders that are over, by outcome.",
    "kvcupy_migration_pulls_total": "Pulls of page receivers that are over, by outcome.",
    "kvcupy_migration_failed_pulls_total": "Failed pulls, by reason.",
    "kvcupy_migration_bytes_total": "Bytes of pages received from other processes.",
    "kvcupy_store_blocks_total": "Blocks put into block stores, or asked of them.",
    "kvcupy_store_bytes_total": "Bytes moved to block stores and from them.",
    "kvcupy_store_seconds_total": "Seconds that calls of block stores took.",
    "kvcupy_store_damaged_blocks_total": "Blocks that were not what had been stored.",
    "kvcupy_store_lost_calls_total": "Calls that lost a block store, were late, or left out.",
}
_GAUGES = {
    "kvcupy_cache_blocks": "Blocks in a tier.",
    "kvcupy_cache_store_queued_blocks": "Blocks that wait to be put into a store.",
    "kvcupy_pool_pages": "Pages of pools.",
    "kvcupy_pool_allocated_pages": "Allocated pages of pools.",
    "kvcupy_migration_offered_pages": "Pages that page senders have not freed yet.",
    "kvcupy_migration_quarantined_pages": "Pages of failed pulls that may still be written.",
    "kvcupy_sequences": "Sequences of paged caches.",
    "kvcupy_sequence_tokens": "Tokens of the sequences of paged caches; shared ones for each.",
}
# Seconds.
_SHORT = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3,
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
_HISTOGRAMS = {
    "kvcupy_step_seconds": (_SHORT, "Steps of paged caches, from begin_forward to end_forward."),
    "kvcupy_migration_pull_seconds": (_SHORT, "Pulls of pages, until no more bytes can arrive."),
    "kvcupy_host_wait_seconds": (_SHORT, "Waits of the host for transfers that hold pages."),
    "kvcupy_compile_seconds": (_LONG, "Compilations of kernels."),
    "kvcupy_store_call_seconds": (_SHORT, "Puts and gets of block stores, by worst outcome."),
    "kvcupy_cache_transfer_seconds": (_SHORT, "Completed loads and saves of tiered caches."),
}

# What `TieredCache.stats` names, as a metric and its labels.
CACHE_STATS: dict[str, tuple[str, Labels]] = {
    "misses": ("kvcupy_cache_misses_total", ()),
    "inserted": ("kvcupy_cache_insertions_total", ()),
    "lost": ("kvcupy_cache_lost_blocks_total", ()),
    "failed_loads": ("kvcupy_cache_failed_blocks_total", (("move", "load"),)),
    "failed_saves": ("kvcupy_cache_failed_blocks_total", (("move", "save"),)),
}
for _tier in ("device", "host"):
    _labels = (("tier", _tier),)
    CACHE_STATS[f"{_tier}_blocks"] = "kvcupy_cache_blocks", _labels
    CACHE_STATS[f"{_tier}_hits"] = "kvcupy_cache_hits_total", _labels
    CACHE_STATS[f"{_tier}_evicted"] = "kvcupy_cache_evictions_total", _labels
CACHE_STATS |= {
    "store_hits": ("kvcupy_cache_hits_total", (("tier", "store"),)),
    "store_errors": ("kvcupy_cache_store_errors_total", ()),
    "store_queued": ("kvcupy_cache_store_queued_blocks", ()),
}
for _why, _key in (("absent", "misses"), ("late", "late"), ("no room", "skipped")):
    CACHE_STATS[f"store_{_key}"] = "kvcupy_cache_store_misses_total", (("why", _why),)
for _outcome in ("stored", "known", "full", "failed"):
    _labels = (("outcome", _outcome),)
    CACHE_STATS[f"store_{_outcome}"] = "kvcupy_cache_store_puts_total", _labels
for _move in ("load", "save", "store_get", "store_put"):
    _labels = (("move", _move),)
    CACHE_STATS[f"{_move}_bytes"] = "kvcupy_cache_moved_bytes_total", _labels
    CACHE_STATS[f"{_move}_s"] = "kvcupy_cache_moved_seconds_total", _labels

_Samples = Iterable[tuple[str, Labels, float]]

_lock = process_lock(threading.RLock)  # of all below; finalizers may come while it is held
_counts: Counter[tuple[str, Labels]] = Counter()
_distributions: dict[tuple[str, Labels], tuple[list[int], list[float]]] = {}
_sources: weakref.WeakKeyDictionary[Any, Callable[[Any], _Samples]] = weakref.WeakKeyDictionary()
_final: deque[list[tuple[str, Labels, float]]] = deque()  # counts of caches that are gone
in_child(_sources.clear)


# --- Switching on and off, and reading ---


class _Operations(observe.Observer):
    """An observer that counts operations, their bytes, and the waits of streams."""

    def after(self, operation: observe.Operation) -> None:
        stream = operation.stream
        if stream.capturing:
            return
        name = operation.name.rstrip("0123456789 ")  # "load 31": the layers are one operation
        labels = ("device", stream.device.name), ("operation", name)
        num_bytes = operation.num_bytes
        with _lock:
            _counts["kvcupy_operations_total", labels] += 1
            if num_bytes:
                _counts["kvcupy_bytes_total", labels] += num_bytes

    def waited(self, stream: Any, event: Any) -> None:
        if not stream.capturing:
            add("kvcupy_stream_waits_total", device=stream.device.name)


_operations = _Operations()


def enable() -> None:
    """Count operations, waits, steps and compilations from now on. Repeated calls do nothing."""
    global enabled
    observe.attach(_operations)
    enabled = True


def disable() -> None:
    """Stop counting them; what was counted stays."""
    global enabled
    enabled = False
    observe.detach(_operations)


def collect() -> list[Metric]:
    """Return all metrics that have samples, in a fixed order.

    Notes
    -----
    Any thread may call this at any time; it waits for no transfer and no store. What caches count
    includes those that are gone.
    """
    with _lock:
        _fold()
        numbers = Counter(_counts)
        distributions = {
            key: (tuple(counts), total[0]) for key, (counts, total) in _distributions.items()
        }
        sources = list(_sources.items())
    for owner, read in sources:
        for name, labels, number in read(owner):
            numbers[name, labels] += number  # type: ignore[assignment]
    metrics = []
    for kind, helps in (("counter", _COUNTERS), ("gauge", _GAUGES)):
        for name, text in helps.items():
            samples = {labels: float(n) for (own, labels), n in numbers.items() if own == name}
            metrics.append(Metric(name, kind, text, samples))
    for name, (bounds, text) in _HISTOGRAMS.items():
        seen = {
            labels: Distribution(bounds, counts, total)
            for (own, labels), (counts, total) in distributions.items() if own == name
        }  # fmt: skip
        metrics.append(Metric(name, "histogram", text, seen))
    return [metric for metric in metrics if metric.samples]


def value(name: str, **labels: str) -> Any:
    """Return a metric's number, or its Distribution; 0.0 where there is no such sample.

    Raises
    ------
    KeyError : no metric has that name
    """
    if name not in _COUNTERS and name not in _GAUGES and name not in _HISTOGRAMS:
        raise KeyError(name)
    metrics = {metric.name: metric.samples for metric in collect()}
    return metrics.get(name, {}).get(tuple(sorted(labels.items())), 0.0)


# --- What the rest of the package calls ---


def add(name: str, amount: float = 1, **labels: str) -> None:
    """Add to a counter."""
    with _lock:
        _counts[name, tuple(sorted(labels.items()))] += amount  # type: ignore[assignment]


def note(name: str, seconds: float, **labels: str) -> None:
    """Add the duration of what has just ended to a histogram."""
    bounds = _HISTOGRAMS[name][0]
    key = name, tuple(sorted(labels.items()))
    with _lock:
        if key not in _distributions:
            _distributions[key] = [0] * (len(bounds) + 1), [0.0]
        counts, total = _distributions[key]
        counts[bisect.bisect_left(bounds, seconds)] += 1
        total[0] += seconds


def timed(name: str, **labels: str) -> AbstractContextManager[object]:
    """Note how long a with block takes, including when it raises."""
    return _Timer(name, labels) if enabled else _UNTIMED


class _Timer:
    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self._name, self._labels = name, labels

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        note(self._name, time.perf_counter() - self._start_s, **self._labels)


_UNTIMED = nullcontext()


def follow(
    owner: Any, read: Callable[[Any], _Samples], final: Callable[[], _Samples] | None = None
) -> None:
    """Include samples that `read` takes of an object for as long as that lives.

    Parameters
    ----------
    read : takes the owner, from any thread
    final : called when the owner is gone, perhaps within garbage collection, so it must take no
        lock; its counters are kept. It must not refer to the owner
    """
    with _lock:
        _fold()
        _sources[owner] = read
    if final is not None:
        finalize(owner, _keep, final)


def cache_samples(stats: Mapping[str, float]) -> _Samples:
    """Yield the samples of what `TieredCache.stats` returns."""
    for key, number in stats.items():
        name, labels = CACHE_STATS[key]
        yield name, labels, number


def _keep(final: Callable[[], _Samples]) -> None:
    _final.append(list(final()))


def _fold() -> None:
    """Add the counts of caches that are gone; the caller holds the lock."""
    while _final:
        for name, labels, number in _final.popleft():
            if name in _COUNTERS:
                _counts[name, labels] += number  # type: ignore[assignment]


# --- Adapters ---


@contextmanager
def _needing_packages(adapter: str) -> Iterator[None]:
    """Name the packages to install if an import fails."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{adapter} needs: {install('metrics')}") from error


class PrometheusCollector:
    """A collector for a registry of `prometheus_client`.

    Raises
    ------
    ImportError : prometheus_client is not installed

    Examples
    --------
    ::

        from prometheus_client import REGISTRY, start_http_server

        kv.metrics.enable()
        REGISTRY.register(kv.metrics.PrometheusCollector())
        start_http_server(9100)
    """

    def __init__(self) -> None:
        with _needing_packages("PrometheusCollector"):
            from prometheus_client import core
        self._core = core

    def collect(self) -> Iterator[Any]:
        """Yield the families of all metrics."""
        families = {
            "counter": self._core.CounterMetricFamily, "gauge": self._core.GaugeMetricFamily,
            "histogram": self._core.HistogramMetricFamily,
        }  # fmt: skip
        for metric in collect():
            names = [name for name, _ in next(iter(metric.samples))]
            family = families[metric.kind](metric.name, metric.help, labels=names)
            for labels, sample in metric.samples.items():
                values = [label for _, label in labels]
                if isinstance(sample, Distribution):
                    family.add_metric(values, _cumulative(sample), sample.sum)
                else:
                    family.add_metric(values, sample)
            yield family


def _cumulative(sample: Distribution) -> list[tuple[str, int]]:
    """Return (upper bound, values up to it) of each bucket, as Prometheus counts."""
    bounds = *map(repr, sample.bounds), "+Inf"
    return list(zip(bounds, accumulate(sample.counts), strict=True))
