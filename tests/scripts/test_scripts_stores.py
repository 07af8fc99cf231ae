"""scripts/store_demo.py and `bench.py stores`: what they report, and what they must notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.parametrize("kills", [False, True])
def test_two_processes_find_each_others_blocks(tmp_path, kills):
    import store_demo

    path = tmp_path / "report.json"
    arguments = ["--json", str(path), "--url", f"file:{tmp_path}/kv", *["--kill"] * kills]
    assert store_demo.main(arguments) == 0
    report = json.loads(path.read_text())
    rows = report["rows"]
    assert len(rows) == 2 - kills and report["killed"] == kills
    for row in rows:
        assert row["wrong"] == row["store"]["damaged"] == 0
        # A round finds all of the last, which may be what the process has just put itself.
        assert row["found"] > 0.4 * row["blocks"]
        assert row["store"]["stored"] < row["blocks"] - row["found"] + 20


def test_a_wrong_byte_ends_the_demo_with_1(monkeypatch, tmp_path, capsys):
    import store_demo

    report = {"killed": 0, "rows": [{
        "requests": 1, "blocks": 4, "found": 2, "wrong": 1, "store": {"stored": 1, "damaged": 0},
    }]}  # fmt: skip
    monkeypatch.setattr(store_demo, "run", lambda device, options: report)
    assert store_demo.main(["--url", f"file:{tmp_path}"]) == 1
    assert "1 blocks were wrong" in capsys.readouterr().err


@pytest.fixture
def few(monkeypatch):
    from benchmarks import stores

    monkeypatch.setattr(stores, "ROUND_BYTES", 2**18)
    monkeypatch.setattr(stores, "NUM_ROUNDS", 3)
    return stores


def test_the_benchmark_measures_what_is_installed(few, tmp_path, monkeypatch):
    import bench

    monkeypatch.setattr(few, "MANY_BLOCKS", 1000)
    path = tmp_path / "stores.json"
    arguments = ["stores", "--quick", "--runs", "1", "--folder", str(tmp_path), "--json", str(path)]
    assert bench.main(arguments) == 0
    report = json.loads(path.read_text())
    assert {row["store"] for row in report["rows"]} >= {"files"}
    for row in report["rows"]:
        assert row["put_gb_per_s"] > 0 and row["get_gb_per_s"] > 0
    assert all(row["first_put_s"] > 0 for row in report["reopen"])
    assert [p.name for p in tmp_path.iterdir()] == ["stores.json"], "nothing is left"


def test_the_benchmark_notices_wrong_bytes(few, tmp_path, monkeypatch):
    from common.checks import WrongBytes

    class Wrong:
        def __init__(self, pool):
            self._pool = pool

        def put(self, hashes, pages):
            return ["stored"] * len(hashes)

        def get(self, hashes, pages):
            return [True] * len(hashes)

        def match(self, hashes):
            return 0

        def close(self):
            pass

    with pytest.raises(WrongBytes):
        few.measure(lambda folder, pool, *_: Wrong(pool), tmp_path, 2**16, 1)
    monkeypatch.setattr(few, "MANY_BLOCKS", 1000)
    with pytest.raises(WrongBytes):
        few.reopen(lambda folder, pool, *_: Wrong(pool), tmp_path, 1000)


def test_without_lmdb_the_files_are_measured(few, monkeypatch):
    monkeypatch.setattr(few, "lmdb", None)
    assert list(few.candidates()) == ["files"]
