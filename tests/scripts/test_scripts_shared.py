"""`scripts/bench.py shared`: it measures what is installed, and finds blocks that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import mooncake_servers
import pytest
import redis_server

# isort: split
from kvcupy.remote.stores.redis import RedisBackend
from kvcupy.remote.stores.shm import ShmBackend

pytestmark = pytest.mark.usefixtures("scripts_on_path")

MEMORY = ["memcpy", "checksum", "shm", "shm, 1 thread", "shm unverified, 1 thread"]
MEMORY += ["shm encrypted", "shm encrypted, 1 thread"]
SOCKETS = ["socket tcp", "socket unix"]
KINDS = "backend", "SharedStore", "encrypted"
REDIS = [f"redis {server} {kind}" for server in ("tcp", "unix") for kind in KINDS]
MOONCAKE = ["Mooncake", "Mooncake asked", *(f"Mooncake {kind}" for kind in KINDS)]


@pytest.fixture
def bench(monkeypatch):
    if not helpers.full:
        monkeypatch.setattr(mooncake_servers, "PROBLEM", "left out")
    import bench

    return lambda *arguments: bench.main(
        ["shared", "--device", "host", "--quick", *map(str, arguments)]
    )


def measured(bench, tmp_path, *arguments):
    """Return the report of a run, each of whose rows has times and a share of its baseline."""
    assert bench(*arguments, "--json", tmp_path / "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    for row in report["rows"]:
        for call in ("put", "get"):
            assert row[f"{call}_gb_per_s"] >= row[f"median_{call}_gb_per_s"] > 0
            is_baseline = row["candidate"] in ["memcpy", *SOCKETS, "Mooncake"]
            assert (f"{call}_percent" in row) != is_baseline
    return report


def test_every_way_in_memory_is_measured(bench, tmp_path, capsys):
    left = {path.name for path in Path("/dev/shm").iterdir()}
    report = measured(bench, tmp_path)
    assert [row["candidate"] for row in report["rows"]] == MEMORY
    assert {(row["block_kib"], row["batch"]) for row in report["rows"]} == {(64, 32)}
    assert report["threads"] >= 1
    assert "shm unverified" in capsys.readouterr().out
    stores = {p.name for p in Path("/dev/shm").glob("kvcupy-kvcupy-bench-*")} - left
    assert stores == set(), "stores are removed"


def test_the_servers_that_are_installed_are_measured(bench, tmp_path, capsys):
    report = measured(bench, tmp_path, "--servers")
    expected = list(SOCKETS)
    if redis_server.PROGRAM is not None:
        expected += REDIS
    if not mooncake_servers.PROBLEM:
        expected += MOONCAKE
    assert sorted(row["candidate"] for row in report["rows"]) == sorted(expected)
    missing = redis_server.PROGRAM is None, bool(mooncake_servers.PROBLEM)
    assert len(report["notes"]) == sum(missing)
    assert "64 KiB x 32" in capsys.readouterr().out


def spoil(monkeypatch, backend):
    """Let a backend return blocks with other bytes."""
    real = backend.get

    def get(self, keys, blocks, deadline):
        headers = real(self, keys, blocks, deadline)
        blocks[0][0][:8] = b"12345678"
        return headers

    monkeypatch.setattr(backend, "get", get)


def test_wrong_blocks_in_memory_are_found(bench, monkeypatch):
    spoil(monkeypatch, ShmBackend)
    with pytest.raises(AssertionError, match="shm: other bytes than were put"):
        bench()


@redis_server.needs_redis
def test_wrong_blocks_of_a_server_are_found(bench, monkeypatch):
    monkeypatch.setattr(mooncake_servers, "PROBLEM", "left out")
    spoil(monkeypatch, RedisBackend)
    with pytest.raises(AssertionError, match="redis tcp backend: other bytes than were put"):
        bench("--servers")


def test_growth_is_measured(tmp_path, capsys):
    import bench

    left = {path.name for path in Path("/dev/shm").iterdir()}
    report = tmp_path / "report.json"
    assert bench.main(["growth", "--device", "host", "--quick", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())
    assert rows["repair"][0]["put_ms"] >= rows["repair"][0]["lock_ms"] > 0
    assert rows["eviction"][0]["longest_ms"] > 0
    assert rows["clients"][0]["gb_per_s"] > 0 and rows["clients"][0]["put_worst_p99_ms"] > 0
    assert "longest_lock_ms" in capsys.readouterr().out
    assert {path.name for path in Path("/dev/shm").iterdir()} <= left
