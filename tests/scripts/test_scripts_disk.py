"""`scripts/bench.py disk`: blocks of the disk tier, plain and encrypted."""

from __future__ import annotations

import json


def test_both_kinds_are_measured(tmp_path, capsys):
    import bench

    path = tmp_path / "report.json"
    arguments = ["disk", "--device", "host", "--quick", "--folder", str(tmp_path)]
    assert bench.main([*arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["call"] for row in rows] == ["write", "read"]
    for row in rows:
        for kind in ("plain", "encrypted"):
            moved = row["page_bytes"] / row[f"{kind}_us"] / 1e3
            assert abs(moved / row[f"{kind}_gb_per_s"] - 1) < 1e-6
    assert "encrypted GB/s" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"], "the files are removed"
