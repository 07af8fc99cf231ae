"""`scripts/bench.py shared`: it measures all engines, and finds blocks that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcupy.remote.stores.shm import ShmBackend

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench

    return lambda *arguments: bench.main(
        ["shared", "--device", "host", "--quick", *map(str, arguments)]
    )


def test_every_engine_is_measured(bench, tmp_path, capsys):
    report = tmp_path / "report.json"
    left = {path.name for path in Path("/dev/shm").iterdir()}
    assert bench("--rounds", 1, "--json", report) == 0
    read = json.loads(report.read_text())
    engines = ["memcpy", "checksum", "shm", "shm, 1 thread", "shm unverified, 1 thread"]
    assert [row["engine"] for row in read["rows"]] == engines * 2
    assert {row["case"] for row in read["rows"]} == {"64 KiB x1", "64 KiB x32"}
    for row in read["rows"]:
        for call in ("put", "get"):
            assert row[f"{call}_gb_per_s"] >= row[f"{call}_median_gb_per_s"] > 0
            assert 0 < row[f"{call}_p50_us"] <= row[f"{call}_p99_us"]
            assert row[f"{call}_cpu_us_per_block"] > 0
            assert row[f"{call}_median_percent_of_memcpy"] > 0
        if row["engine"] == "memcpy":
            percents = [row[f"{call}_percent_of_memcpy"] for call in ("put", "get")]
            assert percents == pytest.approx([100, 100])
    assert read["headlines"]["shm, 64 KiB x32: get, % of memcpy"] > 0
    assert "shm unverified" in capsys.readouterr().out
    bench_files = {p.name for p in Path("/dev/shm").glob("kvcupy-kvcupy-bench-*")} - left
    assert bench_files == set(), "stores are removed"


def test_wrong_blocks_are_found(bench, monkeypatch):
    real = ShmBackend.get

    def get(backend, keys, blocks, deadline):
        headers = real(backend, keys, blocks, deadline)
        blocks[0][0][:8] = b"12345678"
        return headers

    monkeypatch.setattr(ShmBackend, "get", get)
    with pytest.raises(AssertionError, match="is not what was put"):
        bench("--rounds", 1, "--engines", "shm unverified, 1 thread")
