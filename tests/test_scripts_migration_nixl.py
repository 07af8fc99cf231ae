"""`scripts/bench.py migration_nixl`: both ways read the same bytes, and the report has them all."""

from __future__ import annotations

import importlib.util
import json

import pytest

from kvcupy.remote.migration import nixl_agents

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in nixl_agents.WHEELS),
    reason="needs NIXL: pip install --no-deps nixl-cu12",
)


def run(path):
    import bench

    return bench.main(["migration_nixl", "--quick", "--device", "host", "--json", str(path)])


@needs_nixl
@pytest.mark.full
def test_report(tmp_path, capsys):
    from benchmarks import migration_nixl

    path = tmp_path / "nixl.json"
    assert run(path) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["block_bytes"], row["blocks"]) == (1 << 20, 8)
    assert all(0 < row[name] < 3 for name in migration_nixl.RATIOS)
    assert min(row.values()) > 0
    assert "of bare" in capsys.readouterr().out


def test_without_nixl_it_says_so(tmp_path, monkeypatch, capsys):
    def missing():
        raise ImportError("the engine nixl needs NIXL")

    monkeypatch.setattr(nixl_agents, "load", missing)
    path = tmp_path / "nixl.json"
    assert run(path) == 0
    assert json.loads(path.read_text())["rows"] == []
    assert "needs NIXL" in capsys.readouterr().out


def test_bytes_that_differ_are_noticed():
    from benchmarks import migration, migration_nixl

    pool, expected = (migration.pool_of(64 << 10) for _ in range(2))
    migration_nixl.require_equal(pool, expected, [0, 2])
    pool.v(0)[2, 3, 4, 5] = 7
    migration_nixl.require_equal(pool, expected, [0, 1])
    with pytest.raises(AssertionError, match="layer 0: other bytes"):
        migration_nixl.require_equal(pool, expected, [0, 2])
