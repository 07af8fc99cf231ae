"""`scripts/bench.py migration`: all ways move the same bytes, and the report has them all."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from kvcupy.remote.migration import nixl_agents

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in nixl_agents.WHEELS),
    reason="needs NIXL: pip install --no-deps nixl-cu12",
)


def run(path, *arguments):
    import bench

    small = ["--quick", "--device", "host", "--json", str(path)]
    return bench.main(["migration", *small, *arguments])


def test_report(tmp_path, capsys):
    path = tmp_path / "migration.json"
    assert run(path) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["transport"], row["blocks"]) for row in rows] == [
        ("tcp", 1), ("tcp", 8), ("unix", 1), ("unix", 8),
    ]  # fmt: skip
    for row in rows:
        times = [value for name, value in row.items() if name.endswith(("_us", "per_s"))]
        assert len(times) == 8 and min(times) > 0
        assert row["ratio"] > 0
    assert "of plain" in capsys.readouterr().out


def test_ratios_are_medians_over_rounds():
    from benchmarks.migration import row_of

    times = {"migration": [2.0, 4.0, 8.0], "bare": [1.0, 1.0, 1.0], "verified": [1.0, 2.0, 4.0]}
    row = row_of(times | {"aged": [1.0, 2.0, 4.0]}, 4_000_000_000, "bare")
    assert row["ratio"] == 0.25 and row["aged_ratio"] == 0.5
    assert row["aged_ratio_to_verified"] == 1.0
    assert row["migration_us"] == 4e6 and row["best_migration_us"] == 2e6
    assert row["migration_gb_per_s"] == 2.0


@needs_nixl
@pytest.mark.full
def test_report_of_nixl(tmp_path, capsys):
    path = tmp_path / "nixl.json"
    assert run(path, "--engine", "nixl") == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["block_bytes"], row["blocks"]) for row in rows] == [(64 << 10, 1), (1 << 20, 8)]
    for row in rows:
        ratios = ("ratio", "aged_ratio", "verified_ratio", "aged_ratio_to_verified")
        assert all(0 < row[name] < 3 for name in ratios)
    assert "of bare" in capsys.readouterr().out


def test_without_nixl_it_says_so(tmp_path, monkeypatch, capsys):
    def missing():
        raise ImportError("the engine nixl needs NIXL")

    monkeypatch.setattr(nixl_agents, "load", missing)
    path = tmp_path / "nixl.json"
    assert run(path, "--engine", "nixl") == 0
    assert json.loads(path.read_text())["rows"] == []
    assert "needs NIXL" in capsys.readouterr().out


def test_bytes_that_differ_are_noticed():
    from benchmarks import migration

    pool, expected = (migration.pool_of(64 << 10, 2) for _ in range(2))
    migration.require_equal(pool, expected, [0, 2])
    pool.v(0)[2, 3, 4, 5] = 7
    migration.require_equal(pool, expected, [0, 1])
    with pytest.raises(AssertionError, match="layer 0: other bytes"):
        migration.require_equal(pool, expected, [0, 2])


def test_the_plain_socket_moves_what_the_engine_does():
    from benchmarks import migration
    from kvcupy.remote.migration.layers import PageBytes

    pool = migration.pool_of(128 << 10, 32)
    pages = np.array(migration.pages_of(3))
    engine = PageBytes(pool, range(8))
    sent = [view.tobytes() for views, _ in engine.reading(pages, range(2)) for view in views]
    plain = [view.tobytes() for views in migration.pieces_of(pool, 3) for view in views]
    assert b"".join(plain) == b"".join(sent)
