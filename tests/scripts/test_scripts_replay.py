"""scripts/replay_trace.py and the simulation beside it: the same hits, and every byte compared."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
from replay_cases import (
    assert_as_simulated,
    flip_pages,
    main,
    only_on_the_host,
    real_trace,
    replayed,
    simulated,
    small_settings,
    small_trace,
    spoil,
)

import kvcupy as kv
from kvcupy.cache.engine import Transfer

pytestmark = pytest.mark.usefixtures("scripts_on_path")

SIZES = [(60, 150, 0), (60, 150, 400), (80, 20, 0), (60, 60, 2000), (60, 2000, 50)]


# The replay -------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize(("write", "running"), [("through", 1), ("back", 3)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_replay_finds_what_the_simulation_finds(device, tmp_path, sizes, write, running):
    settings = small_settings(sizes, write=write, running=running, disk=tmp_path / "blocks")
    requests = small_trace()
    assert_as_simulated(replayed(device, settings, requests), settings, requests)


def test_nothing_is_waited_for_and_no_byte_is_wrong(device, tmp_path):
    for write in ("through", "back"):
        settings = small_settings(
            (60, 100, 300), write=write, running=4, eager=True, disk=tmp_path / write
        )
        requests = small_trace(200)
        outcome = replayed(device, settings, requests)
        assert outcome.counts["wrong_bytes"] == 0 == outcome.counts["not_as_matched"]
        found, expected = (sum(map(sum, o.hits)) for o in (outcome, simulated(settings, requests)))
        assert found == pytest.approx(expected, rel=0.01)


def test_replays_are_alike(device, tmp_path):
    outcomes = []
    for number in range(2):
        settings = small_settings((60, 150, 200), running=3, disk=tmp_path / str(number))
        outcomes.append(replayed(device, settings, small_trace()))
    first, second = outcomes
    assert first.counts == second.counts and first.hits == second.hits
    assert first.series == second.series and len(first.series) == 120


# What must be noticed -----------------------------------------------------------------------------


def test_a_byte_that_changed_on_the_host_is_noticed(device):
    """Control: the cache does not know of it, and the next request that finds it must."""
    only_on_the_host(device)
    settings = small_settings((40, 300, 0))
    requests = small_trace(60)
    wrong_at = []

    def flip_one(replay, done):
        if done == 30:
            device.synchronize()
            flip_pages(replay.host_pool, range(300))
        if replay.outcome.counts["wrong_bytes"] and not wrong_at:
            wrong_at.append(done)

    outcome = replayed(device, settings, requests, flip_one)
    assert outcome.counts["wrong_bytes"] > 0 and wrong_at[0] > 30
    named = r"request \d+: \d+ bytes in 1 of 2 layers, layer 1, K, block \d+, byte 0: got"
    assert len(outcome.wrong) > 1 and all(re.match(named, line) for line in outcome.wrong)
    assert outcome.hits == simulated(settings, requests).hits


def test_a_page_that_went_elsewhere_is_noticed(device, monkeypatch):
    only_on_the_host(device)
    load = kv.TransferEngine.load
    monkeypatch.setattr(
        kv.TransferEngine, "load",
        lambda self, host_pages, *rest, **more: load(self, host_pages[::-1], *rest, **more),
    )  # fmt: skip
    outcome = replayed(device, small_settings((40, 300, 0)), small_trace(60))
    assert outcome.counts["wrong_bytes"] > 0


def test_a_layer_that_does_not_wait_is_noticed(device, monkeypatch):
    """Control: loads come late; without the compute stream's wait it compares old bytes."""
    only_on_the_host(device)
    settings, requests = small_settings((40, 300, 0)), small_trace(40)
    load = kv.TransferEngine.load

    def late(self, *pages, **options):
        self.load_stream.call(lambda: time.sleep(0.02))
        return load(self, *pages, **options)

    monkeypatch.setattr(kv.TransferEngine, "load", late)
    outcome = replayed(device, settings, requests)
    assert outcome.counts["wrong_bytes"] == 0 and outcome.waited_us > 20e3
    monkeypatch.setattr(Transfer, "wait_layer", lambda self, layer, stream=None: self._sent())
    assert replayed(device, settings, requests).counts["wrong_bytes"] > 0


def test_a_byte_that_changed_on_disk_is_a_miss(device, tmp_path):
    only_on_the_host(device)
    settings = small_settings((60, 60, 400), disk=tmp_path / "blocks")
    requests = small_trace(90)

    def flip_all(replay, done):
        if done == 45:
            device.synchronize()
            spoil(settings)

    outcome = replayed(device, settings, requests, flip_all)
    expected = simulated(settings, requests).hits
    assert outcome.counts["wrong_bytes"] == 0 and outcome.counts["not_as_matched"] > 0
    assert outcome.hits[:45] == expected[:45]
    found, asked = sum(map(sum, outcome.hits)), sum(len(request.hash_ids) for request in requests)
    assert found + outcome.counts["missed"] == asked and found < sum(map(sum, expected))


def test_a_byte_that_a_disk_reads_wrongly_is_noticed(device, tmp_path, monkeypatch):
    """Control: a disk tier that verifies nothing."""
    only_on_the_host(device)
    from kvcupy.cache.tiered import disk_format

    settings = small_settings((60, 60, 400), disk=tmp_path / "blocks")
    monkeypatch.setattr(disk_format, "checksum", lambda hash, parts: bytes(16))
    outcome = replayed(
        device, settings, small_trace(90),
        lambda replay, done: done == 45 and (device.synchronize(), spoil(settings)),
    )  # fmt: skip
    assert outcome.counts["wrong_bytes"] > 0


# The command line ---------------------------------------------------------------------------------


def test_the_report(device_name, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    import replay_trace

    drawn, draw = [], replay_trace.draw_over_time
    monkeypatch.setattr(
        replay_trace,
        "draw_over_time",
        lambda point, *rest: (drawn.append(point["series"]), draw(point, *rest)),
    )
    report, chart = tmp_path / "new" / "report.json", tmp_path / "new" / "chart.png"
    few = ("--limit", 80, "--disk-blocks", 300, "--running", 2)
    assert main(device_name, *few, "--json", report, "--plot", chart) == 0
    read = json.loads(report.read_text())
    point = read["point"]
    requests = small_trace(80, seed=0)
    assert (read["requests"], read["trace"]) == (80, "seed 0")
    assert read["blocks"] == sum(len(request.hash_ids) for request in requests)
    assert read["page_bytes"] == 2 * 2 * 32 * 1 * 8 * 2 == read["layers"] * 1024
    for key in ("device", "processor", "gpu_and_driver", "versions", "date", "commit"):
        assert key in read

    counts, rates = point["counts"], point["hit_rate"]
    found = {tier: counts[f"hit.{tier}"] for tier in ("device", "host", "disk")}
    assert sum(found.values()) + counts["missed"] == read["blocks"] and min(found.values()) > 0
    assert rates["total"] == pytest.approx(sum(found.values()) / read["blocks"])
    assert point["simulated"]["hit_rate"] == rates and point["different"] == []
    assert point["requests_as_simulated"] == counts["requests"] == 80
    assert counts["wrong_bytes"] == 0 and point["wrong"] == []
    assert counts["checked_bytes"] == sum(found.values()) * read["page_bytes"]
    for moved in point["moved"].values():
        assert moved["bytes"] % read["page_bytes"] == 0 and moved["bytes"] > 0
        assert moved["gb_per_s"] == pytest.approx(moved["bytes"] / moved["seconds"] / 1e9)
    assert point["moved"]["disk to host"]["bytes"] == found["disk"] * read["page_bytes"]
    assert point["compute_waited_s"] >= 0 and point["wall_s"] > 0

    (series,) = drawn
    assert [row["requests"] for row in series] == list(range(1, 81))
    assert series[-1]["missed"] == counts["missed"]
    assert max(row["blocks.device"] for row in series) <= 60 == point["device_blocks"]
    assert series[-1]["minutes"] == pytest.approx(requests[-1].timestamp / 60e3)
    assert "series" not in point and chart.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "0 wrong" in printed.out and "80 of 80 requests found the same" in printed.out
    assert "80 of 80 requests" in printed.err


def test_ctrl_c_says_what_is_done(device_name, monkeypatch, capsys):
    from replay.run import Replay

    request = Replay._request

    def stopped_at_30(self, number, one):
        if number == 30:
            raise KeyboardInterrupt
        request(self, number, one)

    monkeypatch.setattr(Replay, "_request", stopped_at_30)
    assert main(device_name, "--limit", 60, "--disk-blocks", 900) == 130
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert last.startswith("stopped after 30 of 60 requests: ") and ", 0 wrong" in last
    assert said.out == ""


def test_a_wrong_byte_is_the_exit_status(device_name, device, monkeypatch, capsys):
    only_on_the_host(device)
    from replay.content import Contents

    write = Contents.write

    def wrong(self, layer, pages, hashes):
        write(self, layer, pages, hashes)
        if layer == 0:
            self._words[0][0][pages[0], 0] ^= np.uint64(1)

    monkeypatch.setattr(Contents, "write", wrong)
    assert main(device_name, "--limit", 20) == 1
    assert "bytes in 1 of 2 layers, layer 0, K, block 0, byte 0: got" in capsys.readouterr().out


@pytest.mark.parametrize(("lines", "said"), [
    ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "expected requests with hash_ids"),
    ('{"timestamp": 0, "input_length": 5}', r"t\.jsonl:2: expected an object with timestamp"),
    ("nonsense", r"t\.jsonl:2: expected an object with timestamp"),
    ("[1, 2]", r"t\.jsonl:2: expected an object with timestamp"),
])  # fmt: skip
def test_a_trace_that_is_none(device_name, tmp_path, lines, said):
    trace = tmp_path / "t.jsonl"
    trace.write_text(f"\n{lines}\n")
    with pytest.raises(ValueError, match=said):
        main(device_name, "--trace", trace)


# The real trace -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [300, pytest.param(None, marks=pytest.mark.slow)])
def test_a_real_trace(device, tmp_path, limit):
    requests = real_trace(limit)
    sizes = (400, 1000, 3000) if limit else (1000, 5000, 30000)
    settings = small_settings(sizes, disk=tmp_path / "blocks")
    assert_as_simulated(replayed(device, settings, requests), settings, requests)
