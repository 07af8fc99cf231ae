"""Metrics: each counted once, and what Prometheus gets."""

from __future__ import annotations

import gc
import re
import sys
import threading
from pathlib import Path

import pytest

import kvcupy as kv
from kvcupy import metrics


@pytest.fixture
def counting(monkeypatch):
    """Metrics as in a new process."""
    monkeypatch.setattr(metrics, "_counts", type(metrics._counts)())
    monkeypatch.setattr(metrics, "_sources", type(metrics._sources)())
    monkeypatch.setattr(metrics, "_final", type(metrics._final)())
    return metrics


def tiered(device, on_device=2, on_host=4, **options):
    sizes = {"page_size": 2, "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "fp16"}
    pools = (kv.KVPool(on_device, **sizes, device=device),
             kv.KVPool(on_host, **sizes, placement="pinned", device=device))  # fmt: skip
    return kv.TieredCache(*pools, **options)


def paged(device):
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, num_pages=8, page_size=4,
        dtype="fp32", device=device,
    )  # fmt: skip
    cache.add_sequence("a")
    return cache


def step(cache, lengths):
    rows = cache.device.zeros((sum(lengths), 1, 8), "fp32")
    with cache.forward(["a"], lengths):
        cache.attention(0, rows, rows, rows)
    cache.device.synchronize()


def test_steps_and_sequences(device, counting):
    cache = paged(device)
    for length in (5, 1, 1):
        step(cache, [length])
    assert counting.value("kvcupy_sequences") == 1
    assert counting.value("kvcupy_sequence_tokens") == 7
    assert counting.value("kvcupy_pool_pages", placement="device") == 8
    assert counting.value("kvcupy_pool_allocated_pages", placement="device") == 2
    del cache
    gc.collect()
    assert counting.value("kvcupy_sequences") == 0


def use(cache):
    pages = cache.device_pool.allocator.alloc(2)
    cache.insert([1, 2], pages)
    cache.evict(1)
    cache.acquire([1, 2, 3]).release()
    cache.flush()


def of_caches(counting):
    """Return what the tiered caches have counted, by the names that `stats` has."""
    return {key: counting.value(name, **dict(labels))
            for key, (name, labels) in metrics.CACHE_STATS.items()}  # fmt: skip


def test_caches_are_their_own_statistics(device, counting):
    cache = tiered(device)
    of_stores = {key for key in metrics.CACHE_STATS if key.startswith("store_")}
    assert set(cache.stats()) == set(metrics.CACHE_STATS) - of_stores  # test_tiered_stores.py
    use(cache)
    stats = cache.stats() | dict.fromkeys(of_stores, 0.0)
    assert stats["misses"] == 1 and stats["device_evicted"] == 1 and stats["save_bytes"] > 0
    seen = of_caches(counting)
    labels = {}  # two of `stats` may share a metric but never a sample
    for key, sample in metrics.CACHE_STATS.items():
        assert labels.setdefault(sample, key) == key
    assert seen == stats


def test_counts_outlive_their_caches_and_blocks_do_not(device, counting):
    caches = [tiered(device), tiered(device)]
    for cache in caches:
        use(cache)
    before = of_caches(counting)
    assert before["inserted"] == 4 and before["device_blocks"] > 0
    del cache, caches[0]
    gc.collect()
    half = of_caches(counting)
    assert half["device_blocks"] == before["device_blocks"] / 2
    del caches
    gc.collect()
    for _ in range(2):  # asking changes nothing
        after = of_caches(counting)
        for key in ("inserted", "misses", "device_evicted", "save_bytes", "device_hits"):
            assert after[key] == half[key] == before[key], key
        assert after["device_blocks"] == after["host_blocks"] == 0


def test_a_busy_cache_is_read_without_waiting(device, counting):
    cache = tiered(device)
    with cache._tiers[0].lock:
        reader = threading.Thread(target=counting.collect, daemon=True)
        reader.start()
        reader.join(30)
        assert not reader.is_alive()


def test_a_name_that_no_metric_has():
    with pytest.raises(KeyError, match="kvcupy_steps"):
        metrics.value("kvcupy_steps")


# --- Adapters ---


def test_prometheus(device, counting):
    prometheus = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = prometheus.CollectorRegistry()
    registry.register(counting.PrometheusCollector())
    cache = tiered(device)
    use(cache)
    step(paged(device), [3])
    text = prometheus.generate_latest(registry).decode()
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }  # fmt: skip
    for metric in counting.collect():
        for labels, number in metric.samples.items():
            assert samples[metric.name, labels] == number, metric.name
    assert samples["kvcupy_cache_evictions_total", (("tier", "device"),)] == 1


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install .*metrics"):
        metrics.PrometheusCollector()


# --- The guide ---

GUIDE = (Path(__file__).resolve().parents[1] / "docs" / "running.md").read_text()


def test_the_guide_lists_every_metric_and_no_other():
    listed = set(re.findall(r"`(kvcupy_\w+)`", GUIDE))
    assert listed == {*metrics._COUNTERS, *metrics._GAUGES}


def test_the_guide_lists_every_logger_and_level():
    """Below "kvcupy", and all made in one place."""
    package = Path(kv.__file__).parent
    texts = {path.relative_to(package).as_posix(): path.read_text()
             for path in package.rglob("*.py")}  # fmt: skip
    made = [
        name for name, text in texts.items() if re.search(r'getLogger\((?!"nixl"\))|getChild', text)
    ]  # NIXL's is only silenced
    assert made == ["config.py"]
    listed, logger = set(), ""
    for name, level in re.findall(r"^\| (`kvcupy[.\w]*` )?\| ([A-Z]+) \|", GUIDE, re.MULTILINE):
        logger = name.strip("` ") or logger
        listed.add((logger, level))
    used = set()
    for text in texts.values():
        for child, level in re.findall(r"\b(?:([a-z]+)_)?logger\.(debug|info|warning)\(", text):
            used.add((f"kvcupy.{child}" if child else "kvcupy", level.upper()))
    assert used == listed
