"""scripts/bench.py steps: what it reports, and what it takes time of."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("scripts_on_path")


def bench(device_name, *arguments):
    import bench

    small = ["--device", device_name, "--live", "5", "1200", "--batch", "3", "--rounds", "4"]
    return bench.main(["steps", *small, *map(str, arguments)])


def test_it_reports_every_size(device_name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "new" / "steps.json", tmp_path / "pictures" / "steps.png"
    assert bench(device_name, "--json", path, "--plot", picture) == 0
    report = json.loads(path.read_text())
    assert report["device"] == kv.device(device_name).name and report["batch"] == 3
    assert [row["live"] for row in report["rows"]] == [5, 1200]
    for row in report["rows"]:
        assert row["steps"] == 4
        assert row["p90_us"] >= row["median_us"] >= row["p10_us"] >= row["least_us"] > 0
        assert min(row[f"{part}_us"] for part in ("begin", "tables", "end")) > 0
    assert picture.stat().st_size > 5_000
    printed = capsys.readouterr().out
    assert "1,200" in printed and "to the first" in printed


def test_a_step_leaves_the_cache_as_it_was(device):
    from benchmarks.steps import SteppedCache

    stepped = SteppedCache(device, live=7, batch=2, context=40, page_size=16)
    cache = stepped.cache
    lengths = [cache.sequence_length(name) for name in [*range(7), *stepped.batch]]
    assert lengths == [16] * 7 + [40] * 2
    free = cache.num_available_pages
    times = [stepped.step_us() for _ in range(3)]
    assert np.shape(times) == (3, 3) and np.min(times) > 0
    assert [cache.sequence_length(name) for name in [*range(7), *stepped.batch]] == lengths
    assert cache.num_available_pages == free == 0 or cache.num_available_pages == free


def test_each_step_sends_its_tables_once(device):
    from benchmarks.steps import SteppedCache

    stepped = SteppedCache(device, live=3, batch=2, context=20, page_size=16)
    stepped.step_us()
    with kv.timeline() as recorded:
        for _ in range(5):
            stepped.step_us()
    assert sum(span.name == "copy" for span in recorded.spans) == 5
