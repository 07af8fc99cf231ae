"""Metrics: each counted once and only when enabled, and what Prometheus gets."""

from __future__ import annotations

import gc
import re
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from stream_cases import Log

import kvcupy as kv
from kvcupy import metrics, observe
from kvcupy.cache.tiered import tiers


@pytest.fixture
def counting(monkeypatch):
    """Metrics as in a new process, enabled."""
    monkeypatch.setattr(metrics, "_counts", type(metrics._counts)())
    monkeypatch.setattr(metrics, "_distributions", {})
    monkeypatch.setattr(metrics, "_sources", type(metrics._sources)())
    monkeypatch.setattr(metrics, "_final", type(metrics._final)())
    metrics.enable()
    yield metrics
    metrics.disable()


def store(device, rows=3, stream=None):
    key, cache = device.zeros((rows, 2, 4), "fp16"), device.zeros((8, 2, 4), "fp16")
    slots = device.asarray(np.arange(rows))
    kv.store_kv(key, key, cache, device.zeros((8, 2, 4), "fp16"), slots, stream=stream)
    device.synchronize()


def tiered(device, on_device=2, on_host=4, **options):
    sizes = {"page_size": 2, "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "fp16"}
    pools = (kv.KVPool(on_device, **sizes, device=device),
             kv.KVPool(on_host, **sizes, placement="pinned", device=device))  # fmt: skip
    return kv.TieredCache(*pools, **options)


def test_operations_and_their_bytes(device, counting):
    value = partial(counting.value, device=device.name, operation="store_kv")
    for calls, rows in ((1, 3), (2, 3), (3, 5)):
        before = value("kvcupy_bytes_total")
        store(device, rows)
        # K and V, each read and written; and the slots.
        assert value("kvcupy_bytes_total") - before == 4 * rows * 2 * 4 * 2 + rows * 8
        assert value("kvcupy_operations_total") == calls


@pytest.mark.parametrize("in_place", [True, False, True])
def test_bytes_of_an_operation_in_place(device, counting, in_place):
    """As many as accesses that are described for every call have."""
    query, key = device.zeros((2, 2, 8), "fp32"), device.zeros((2, 1, 8), "fp32")
    table = kv.rope_table(16, 8, device=device)
    outputs = {} if in_place else {"query_out": device.zeros((2, 2, 8), "fp32"),
                                   "key_out": device.zeros((2, 1, 8), "fp32")}  # fmt: skip
    positions = device.asarray(np.arange(2))
    before = counting.value("kvcupy_bytes_total", device=device.name, operation="apply_rope")
    with observe.attached(Log()) as log:
        kv.apply_rope(query, key, table, positions, **outputs)
    device.synchronize()
    (operation,) = log.operations
    described = observe.Operation("", None, operation.reads, operation.writes)
    after = counting.value("kvcupy_bytes_total", device=device.name, operation="apply_rope")
    assert operation.name == "apply_rope"
    assert after - before == described.num_bytes > 0


def test_layers_of_a_load_are_one_label(device, counting):
    sizes = {"page_size": 2, "num_layers": 12, "num_kv_heads": 1, "head_dim": 8, "device": device}
    engine = kv.TransferEngine(kv.KVPool(2, **sizes), kv.KVPool(2, **sizes, placement="pinned"))
    transfer = engine.load([0], [1])
    transfer.synchronize()
    value = partial(counting.value, device=device.name, operation="load")
    assert value("kvcupy_operations_total") == 12
    assert value("kvcupy_bytes_total") == 2 * transfer.num_bytes
    samples = next(m.samples for m in counting.collect() if m.name == "kvcupy_operations_total")
    assert not [labels for labels in samples if dict(labels)["operation"][-1].isdigit()]


def test_waits_of_streams(device, counting):
    first, second = device.stream(), device.stream()
    before = counting.value("kvcupy_stream_waits_total", device=device.name)
    second.wait(first.record())
    assert counting.value("kvcupy_stream_waits_total", device=device.name) == before + 1


def test_graphs_count_when_they_are_launched(device, counting):
    key, cache = device.zeros((1, 2, 4), "fp16"), device.zeros((8, 2, 4), "fp16")
    slots, stream = device.asarray(np.arange(1)), device.stream()
    value = partial(counting.value, "kvcupy_operations_total", device=device.name)
    with stream.capture() as graph:
        kv.store_kv(key, key, cache, device.zeros((8, 2, 4), "fp16"), slots, stream=stream)
    assert value(operation="store_kv") == 0
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    assert value(operation="store_kv") == 0 and value(operation="graph") == 3


def test_disabled_nothing_is_counted_or_notified(device, counting):
    store(device)
    counting.disable()
    before = counting.collect()
    cache = paged(device)
    step(cache, [2])
    store(device)
    device.stream().wait(device.stream().record())
    totals = [m for m in counting.collect() if m.kind != "gauge"]
    assert totals == [m for m in before if m.kind != "gauge"]
    assert not any(isinstance(o, metrics._Operations) for o in observe.observers)


def test_enabling_twice_counts_once(device, counting):
    counting.enable()
    store(device)
    value = partial(counting.value, "kvcupy_operations_total", device=device.name)
    assert value(operation="store_kv") == 1
    counting.disable()
    assert not any(isinstance(o, metrics._Operations) for o in observe.observers)


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
    with pytest.raises(ZeroDivisionError), cache.forward(["a"], [1]):
        _ = 1 / 0
    seen = counting.value("kvcupy_step_seconds")
    assert seen.count == 3 and seen.sum > 0
    assert counting.value("kvcupy_step_tokens_total") == 7
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


class Late:
    """A transfer that is over when it has been waited for."""

    over = False

    def done(self):
        return self.over

    def synchronize(self):
        self.over = True


def test_waits_for_pages(device, counting):
    pages = kv.PageAllocator(2)
    pages.alloc(2)
    pages._mark_busy([0], Late())
    pages.free([0, 1])
    pages.alloc(1)
    assert counting.value("kvcupy_host_wait_seconds", waiter="pages") == 0.0
    pages.alloc(1)
    assert counting.value("kvcupy_host_wait_seconds", waiter="pages").count == 1


def test_waits_for_blocks(device, counting):
    """Another run of a step without anything to wait for is no wait."""
    waits = [tiers.Wait(lambda: None), tiers.Wait(), tiers.Wait(lambda: None)]
    tiered(device)._tiers[0].run(lambda: waits.pop() if waits else None)
    assert counting.value("kvcupy_host_wait_seconds", waiter="blocks").count == 2


def test_a_wait_that_raises_is_counted(counting):
    with (
        pytest.raises(ZeroDivisionError),
        counting.timed("kvcupy_host_wait_seconds", waiter="pages"),
    ):
        _ = 1 / 0
    assert counting.value("kvcupy_host_wait_seconds", waiter="pages").count == 1


def test_buckets(counting):
    for seconds in (0.0, 1e-5, 1.1e-5, 9.9, 10.0, 10.1, 99.0):
        counting.note("kvcupy_step_seconds", seconds)
    seen = counting.value("kvcupy_step_seconds")
    assert list(seen.bounds) == sorted(seen.bounds) and len(seen.counts) == len(seen.bounds) + 1
    assert seen.counts[:2] == (2, 1) and seen.counts[-2:] == (2, 2)
    assert seen.sum == pytest.approx(129.00002 + 1.1e-6, abs=1e-5)


def test_a_name_that_no_metric_has():
    with pytest.raises(KeyError, match="kvcupy_steps"):
        metrics.value("kvcupy_steps")


def test_threads_lose_nothing(counting):
    def count():
        for _ in range(2000):
            counting.add("kvcupy_step_tokens_total", 2)
            counting.note("kvcupy_compile_seconds", 1.0, target="host")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.value("kvcupy_step_tokens_total") == 16000
    assert counting.value("kvcupy_compile_seconds", target="host").counts[3] == 8000


def test_compilations(counting):
    from kvcupy.devices import cache

    with cache.announced("a kernel", "sm_90"):
        pass
    assert counting.value("kvcupy_compile_seconds", target="sm_90").count == 1


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
            if metric.kind == "histogram":
                buckets = [samples[f"{metric.name}_bucket", tuple(sorted((*labels, ("le", le))))]
                           for le in map(prometheus.utils.floatToGoString,
                                         (*number.bounds, float("inf")))]  # fmt: skip
                assert buckets == list(np.cumsum(number.counts))
                assert samples[f"{metric.name}_sum", labels] == number.sum
            else:
                assert samples[metric.name, labels] == number, metric.name
    assert samples["kvcupy_cache_evictions_total", (("tier", "device"),)] == 1
    assert samples["kvcupy_step_seconds_count", ()] == 1


def test_transfers_of_a_cache_are_timed(device, counting):
    cache = tiered(device)
    use(cache)
    device.synchronize()
    assert cache.stats()["load_bytes"]
    for move in ("load", "save"):
        seen = counting.value("kvcupy_cache_transfer_seconds", move=move)
        assert sum(seen.counts) > 0
        total = counting.value("kvcupy_cache_moved_seconds_total", move=move)
        assert seen.sum == pytest.approx(total)


@pytest.mark.parametrize(
    "adapter",
    [metrics.PrometheusCollector],
)
def test_a_missing_package_is_named(monkeypatch, adapter):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install .*metrics"):
        adapter()


def test_every_metric_follows_the_rules_of_names():
    for name in metrics._COUNTERS:
        assert name.startswith("kvcupy_") and name.endswith("_total")
    for name in (*metrics._GAUGES, *metrics._HISTOGRAMS):
        assert name.startswith("kvcupy_") and not name.endswith(("_total", "_count", "_sum"))
    assert all(name.endswith("_seconds") for name in metrics._HISTOGRAMS)


# --- The guide ---

GUIDE = (Path(__file__).resolve().parents[1] / "docs" / "running.md").read_text()


def test_the_guide_lists_every_metric_and_no_other(device, counting, tmp_path):
    listed = set(re.findall(r"`(kvcupy_\w+)`", GUIDE))
    assert listed == {*metrics._COUNTERS, *metrics._GAUGES, *metrics._HISTOGRAMS}


def test_the_guide_runs(counting, monkeypatch):
    """In a registry of the test's own."""
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    monkeypatch.setattr(prometheus, "REGISTRY", registry)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(compile(code, "running.md", "exec"), names)
    counting.add("kvcupy_step_tokens_total")
    assert "kvcupy_step_tokens_total 1.0" in prometheus.generate_latest(registry).decode()


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
