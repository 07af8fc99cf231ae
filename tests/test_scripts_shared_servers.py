"""`scripts/bench.py shared_servers`: it measures what is installed, and finds wrong blocks."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest

from kvcupy.remote.stores.redis import RedisBackend

ROOT = Path(__file__).resolve().parents[1]

import mooncake_servers  # noqa: E402
import redis_server  # noqa: E402

SOCKETS = ["socket tcp", "socket unix"]
REDIS = [f"redis {kind} {what}" for kind in ("tcp", "unix") for what in ("backend", "SharedStore")]
MOONCAKE = ["Mooncake", "Mooncake asked", "Mooncake backend", "Mooncake SharedStore"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    if not helpers.full:
        monkeypatch.setattr(mooncake_servers, "PROBLEM", "left out")
    import bench

    return lambda *arguments: bench.main(
        ["shared_servers", "--device", "host", "--quick", *map(str, arguments)]
    )


def test_what_is_installed_is_measured(bench, tmp_path, capsys):
    assert bench("--json", tmp_path / "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    expected = list(SOCKETS)
    if redis_server.PROGRAM is not None:
        expected += REDIS
    if not mooncake_servers.PROBLEM:
        expected += MOONCAKE
    assert sorted(row["candidate"] for row in report["rows"]) == sorted(expected)
    assert len(report["notes"]) == (len(expected) <= 6) + (redis_server.PROGRAM is None)
    for row in report["rows"]:
        for call in ("put", "get"):
            assert row[f"{call}_gb_per_s"] >= row[f"median_{call}_gb_per_s"] > 0
            assert (f"{call}_percent" in row) == (row["candidate"] not in [*SOCKETS, "Mooncake"])
    assert "64 KiB x 32" in capsys.readouterr().out


@redis_server.needs_redis
def test_wrong_blocks_are_found(bench, monkeypatch):
    monkeypatch.setattr(mooncake_servers, "PROBLEM", "left out")
    real = RedisBackend.get

    def get(backend, keys, blocks, deadline):
        headers = real(backend, keys, blocks, deadline)
        blocks[0][0][:8] = b"12345678"
        return headers

    monkeypatch.setattr(RedisBackend, "get", get)
    with pytest.raises(AssertionError, match="redis tcp backend: other bytes than were put"):
        bench()
