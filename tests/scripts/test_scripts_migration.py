"""`scripts/bench.py migration`: the pages arrive, and the report has all cases."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")


def test_report(tmp_path, capsys):
    pytest.importorskip("nixl_cu12", reason="pip install --no-deps nixl-cu12")
    import bench

    path = tmp_path / "migration.json"
    assert bench.main(["migration", "--quick", "--device", "host", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["transport"], row["block_bytes"] >> 10) for row in rows] == [
        ("shared memory", 64), ("shared memory", 256), ("tcp", 64), ("tcp", 256),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["least_pull_us"] <= row["pull_us"] and row["copy_gb_per_s"] > 0
        num_bytes = row["block_bytes"] * row["blocks"]
        assert row["gb_per_s"] == pytest.approx(num_bytes / row["pull_us"] / 1e3)
    assert "shared memory" in capsys.readouterr().out


def test_bytes_that_differ_are_noticed():
    from benchmarks import migration

    pool, expected = (migration.pool_of(64 << 10, 2) for _ in range(2))
    migration.require_equal(pool, expected, [0, 2])
    pool.v(0)[2, 3, 4, 5] = 7
    migration.require_equal(pool, expected, [0, 1])
    with pytest.raises(AssertionError, match="layer 0: other bytes"):
        migration.require_equal(pool, expected, [0, 2])
