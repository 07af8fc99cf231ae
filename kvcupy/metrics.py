"""The statistics of all caches, pools, stores and migrations of a process, for Prometheus.

Each is counted once, by the object itself, and read from it on collection. The counts of an object
that is gone are kept.

Notes
-----
Stream: nothing is put on a stream, waited for or asked of a device: what a transfer has moved is
counted once the cache has noted that it is over.
Source: prometheus.io, "Metric and label naming".

Examples
--------
>>> import kvcupy as kv
>>> pool = kv.KVPool(8, 4, 1, 1, 8, device="host")
>>> pages = pool.allocator.alloc(3)
>>> kv.metrics.value("kvcupy_pool_allocated_pages", placement="device") >= 3
True
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import finalize, in_child, process_lock
from .extras import install

Labels = tuple[tuple[str, str], ...]  # sorted by name


@dataclass(frozen=True)
class Metric:
    """A metric as it is now.

    Attributes
    ----------
    name : with its unit; of a counter with "_total"
    kind : "counter" or "gauge"
    help : a sentence
    samples : numbers by labels, which are (name, value) pairs sorted by name
    """

    name: str
    kind: str
    help: str
    samples: Mapping[Labels, float]


_COUNTERS = {
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
_sources: weakref.WeakKeyDictionary[Any, Callable[[Any], _Samples]] = weakref.WeakKeyDictionary()
_final: deque[list[tuple[str, Labels, float]]] = deque()  # counts of caches that are gone
in_child(_sources.clear)


def collect() -> list[Metric]:
    """Return all metrics that have samples, in a fixed order.

    Notes
    -----
    Any thread may call this at any time; it waits for no transfer and no store.
    """
    with _lock:
        _fold()
        numbers = Counter(_counts)
        sources = list(_sources.items())
    for owner, read in sources:
        for name, labels, number in read(owner):
            numbers[name, labels] += number  # type: ignore[assignment]
    metrics = []
    for kind, helps in (("counter", _COUNTERS), ("gauge", _GAUGES)):
        for name, text in helps.items():
            samples = {labels: float(n) for (of, labels), n in numbers.items() if of == name}
            metrics.append(Metric(name, kind, text, samples))
    return [metric for metric in metrics if metric.samples]


def value(name: str, **labels: str) -> float:
    """Return a metric's number; 0.0 where there is no such sample.

    Raises
    ------
    KeyError : no metric has that name
    """
    if name not in _COUNTERS and name not in _GAUGES:
        raise KeyError(name)
    metrics = {metric.name: metric.samples for metric in collect()}
    return metrics.get(name, {}).get(tuple(sorted(labels.items())), 0.0)


# --- What the rest of the package calls ---


def add(name: str, amount: float = 1, **labels: str) -> None:
    """Add to a counter."""
    with _lock:
        _counts[name, tuple(sorted(labels.items()))] += amount  # type: ignore[assignment]


def follow(
    owner: Any, read: Callable[[Any], _Samples], final: Callable[[], _Samples] | None = None
) -> None:
    """Include samples that `read` takes of an object, from any thread, for as long as that lives.

    `final` is called when the owner is gone, perhaps within garbage collection, so it must take no
    lock; its counters are kept.
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


class PrometheusCollector:
    """A collector for a registry of `prometheus_client`.

    Raises
    ------
    ImportError : prometheus_client is not installed

    Examples
    --------
    ::

        from prometheus_client import REGISTRY, start_http_server

        REGISTRY.register(kv.metrics.PrometheusCollector())
        start_http_server(9100)
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ImportError(f"PrometheusCollector needs: {install('metrics')}") from error
        self._families = {
            "counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily,
        }  # fmt: skip

    def collect(self) -> Iterator[Any]:
        """Yield the families of all metrics."""
        for metric in collect():
            names = [name for name, _ in next(iter(metric.samples))]
            family = self._families[metric.kind](metric.name, metric.help, labels=names)
            for labels, number in metric.samples.items():
                family.add_metric([label for _, label in labels], number)
            yield family
