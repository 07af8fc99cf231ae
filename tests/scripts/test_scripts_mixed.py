"""scripts/replay_trace.py --mix: equal tokens and bytes in two services, and the simulated hits."""

from __future__ import annotations

import json
import re

import pytest
from replay_cases import only_on_the_host, real_trace, small_trace

import kvcupy as kv
from kvcupy.cache.hazards import CopiedPages
from kvcupy.cache.tiered.holds import HeldBlocks

pytestmark = pytest.mark.usefixtures("scripts_on_path", "lenient_host")

TIERS = ("device", "host", "disk")
MIX = ("window", "state", "window", "full")


def services(device, kinds=MIX, sizes=(30, 40, 0), **changes):
    from replay.mixed import MixedReplay, MixedSettings
    from replay.simulation import Sizes

    return MixedReplay(device, MixedSettings(kinds, 128, Sizes(*sizes), **changes))


def served(replay, requests):
    try:
        outcome = replay.run(requests)
        for group, part in zip(replay.simulation.groups, replay.parts, strict=True):
            simulated = {name: len(getattr(group, name).blocks) for name in TIERS}
            assert simulated == {name: part.stats()[f"{name}_blocks"] for name in TIERS}
            assert group.device.taken == 0
    finally:
        replay.close()
    return outcome


@pytest.mark.parametrize(("kinds", "sizes", "write"), [
    (MIX, (24, 60, 0), "through"),
    (MIX, (24, 50, 60), "back"),
    (("window", "full"), (24, 50, 60), "through"),
    (("state", "full"), (24, 50, 60), "back"),
    (("window",), (30, 16, 0), "back"),
], ids=str)  # fmt: skip
def test_two_services(device, tmp_path, kinds, sizes, write):
    requests = small_trace(60)
    replay = services(device, kinds, sizes, write=write, disk=tmp_path / "kv")
    outcome = served(replay, requests)
    counts = outcome.counts
    assert outcome.wrong == [] and counts["same_tokens"] == counts["requests"] == 60
    assert outcome.hits == outcome.simulated
    assert counts["plain_tokens"] == 3 * 3 and counts["cut"] >= 0
    for kind in set(kinds):
        assert counts[f"checked_bytes.{kind}"] > 0 == counts[f"wrong_bytes.{kind}"]
    stats = outcome.stats
    tiers = ["device", "host", *["disk"] * bool(sizes[2])]
    assert all(stats[f"{tier}_hits"] > 0 < stats[f"{tier}_evicted"] for tier in tiers)
    assert stats["lost"] > 0


def load_first(load, pool):
    """Load the first block in place of every block of a pool."""

    def wrong(self, host_pages, *rest, **more):
        if self.device_pool is pool:
            host_pages = [host_pages[0]] * len(host_pages)
        return load(self, host_pages, *rest, **more)

    return wrong


def load_nothing(held, *arguments, **options):
    """Return a completion, and load no state."""
    return CopiedPages(held._shared.engine.device.stream())


@pytest.mark.parametrize("forgotten", ["window", "state"])
def test_a_forgotten_group_is_noticed(device, monkeypatch, forgotten):
    """Control: by bytes, at first of that group alone, and by tokens; hits are as simulated."""
    only_on_the_host(device)
    replay = services(device, sizes=(30, 200, 0))
    if forgotten == "state":
        monkeypatch.setattr(HeldBlocks, "load", load_nothing)
    else:
        pool = replay.parts[1].device_pool
        monkeypatch.setattr(kv.TransferEngine, "load", load_first(kv.TransferEngine.load, pool))
    outcome = served(replay, small_trace(40))
    counts = outcome.counts
    assert counts["same_tokens"] < 40 and counts["wrong_bytes"] > 0
    first = re.fullmatch(
        rf"request \d+: \d+ bytes of {forgotten} of \d+ tokens .*", outcome.wrong[0]
    )
    assert first and ", expected [" in outcome.wrong[0]
    assert outcome.hits == outcome.simulated


def test_other_hits_are_noticed(device, monkeypatch):
    """Control: the simulation of another order."""
    from replay.simulation import Lru

    monkeypatch.setattr(Lru, "touch", lambda self, block: None)
    replay = services(device)
    try:
        outcome = replay.run(small_trace(60))
    finally:
        replay.close()
    assert outcome.hits != outcome.simulated and outcome.wrong == []


def test_the_report(device_name, tmp_path, capsys, monkeypatch):
    import replay_trace

    file = tmp_path / "report.json"
    few = ["--device", device_name, "--mix", ",".join(MIX), "--scale", "128", "--limit", "30"]
    few += ["--device-blocks", "20", "--host-blocks", "30", "--disk-blocks", "40"]
    assert replay_trace.main([*few, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    point = report["point"]
    assert report["mix"] == list(MIX) and report["requests"] == point["requests_as_simulated"] == 30
    assert point["hit_rate"] == point["simulated_hit_rate"] > 0
    assert point["counts"]["cut"] > 0 == point["counts"]["wrong_bytes"]
    assert list(point["groups"]) == ["full", "window", "state"]
    printed = capsys.readouterr().out
    assert "30 of 30 requests have equal tokens" in printed and "blocks of prompts" in printed
    monkeypatch.setattr(HeldBlocks, "load", load_nothing)
    only_on_the_host(kv.device(device_name))
    assert replay_trace.main(few) == 1
    assert "bytes of state" in capsys.readouterr().out
    for refused in (["--mix", "state"], ["--mix", "full,other"], ["--mix", "full", "--eager"]):
        with pytest.raises(SystemExit):
            replay_trace.main(refused)


def test_a_real_trace(device, tmp_path):
    replay = services(device, sizes=(60, 200, 1000), disk=tmp_path / "kv")
    outcome = served(replay, real_trace(200))
    assert outcome.wrong == [] and outcome.hits == outcome.simulated
