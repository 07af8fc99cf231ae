"""`scripts/bench.py migration`: both ways move the same bytes, and the report has them all."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")


def test_report(tmp_path, capsys):
    import bench

    path = tmp_path / "migration.json"
    assert bench.main(["migration", "--quick", "--device", "host", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["transport"], row["blocks"]) for row in rows] == [
        ("tcp", 1), ("tcp", 8), ("unix", 1), ("unix", 8),
    ]  # fmt: skip
    for row in rows:
        times = [value for name, value in row.items() if name.endswith(("_us", "per_s"))]
        assert len(times) == 8 and min(times) > 0
        assert row["ratio"] == pytest.approx(row["best_plain_us"] / row["best_migration_us"])
    assert "of plain" in capsys.readouterr().out


def test_the_plain_socket_moves_what_the_engine_does():
    from benchmarks import migration

    from kvcupy.remote.migration.layers import PageBytes

    pool = migration.pool_of(128 << 10)
    pages = np.array(migration.pages_of(3))
    engine = PageBytes(pool, range(8))
    sent = [view.tobytes() for views, _ in engine.reading(pages, range(2)) for view in views]
    plain = [view.tobytes() for views in migration.pieces_of(pool, 3) for view in views]
    assert b"".join(plain) == b"".join(sent)
