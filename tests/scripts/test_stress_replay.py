"""scripts/stress.py replay: hits as simulated, every byte compared, and what must be noticed."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest

import kvcupy as kv
from kvcupy.cache.engine import Transfer

pytestmark = pytest.mark.usefixtures("scripts_on_path")


def requests_of(count):
    from common.requests import conversations

    return list(itertools.islice(conversations(1), count))


def replayed(device, sizes, count, each=lambda replay, done: None, **settings):
    """Replay requests over pages of 1 KiB in two layers; return the replay."""
    from workloads.simulation import Sizes
    from workloads.trace import Replay, Settings, Shape

    requests = requests_of(count)
    replay = Replay(device, Settings(Sizes(*sizes), Shape(2, 16, 1, 8), **settings), requests)
    try:
        for done in range(1, len(requests) + 1):
            replay.step()
            each(replay, done)
    finally:
        replay.close()
    return replay


@pytest.fixture
def host(device):
    if device.name != "host":
        pytest.skip("the wrong byte, or the late one, is the host's")
    return device


@pytest.mark.covering
@pytest.mark.parametrize(("write", "running"), [("through", 1), ("back", 3)])
@pytest.mark.parametrize("sizes", [(60, 150), (80, 20), (60, 2000)], ids=str)
def test_the_replay_finds_what_the_simulation_finds(device, sizes, write, running):
    """`step` and `finish` compare hits, evictions, losses and moved blocks."""
    replay = replayed(device, sizes, 120, write=write, running=running)
    assert replay.wrong == [] and replay.counts["not_as_matched"] == 0
    hits = sum(map(sum, replay.hits))
    assert replay.counts["checked_bytes"] == hits * replay.settings.shape.page_bytes > 0
    stats = replay.cache.stats()
    assert sum(stats[f"{tier}_hits"] for tier in ("device", "host")) == hits


def test_a_byte_that_changed_on_the_host_is_noticed(host):
    """Control: the cache does not know of it, and the next request that finds it must."""

    def flip_one(replay, done):
        if done == 30:
            host.synchronize()
            kv.device("host").carrier(replay.host_pool.parts[0])[:, -1, 0, 0, 0] ^= 1 << 3

    replay = replayed(host, (40, 300), 60, flip_one)
    assert replay.counts["wrong_bytes"] > 0
    named = r"request \d+: \d+ bytes in 1 of 2 layers, layer 1, K, block \d+, byte 0: got"
    assert len(replay.wrong) > 1 and all(re.match(named, line) for line in replay.wrong)


def test_a_layer_that_does_not_wait_is_noticed(host, monkeypatch):
    """Control: loads come late; without the compute stream's wait it compares old bytes."""
    load = kv.TransferEngine.load

    def late(self, *pages, **options):
        self.load_stream.call(lambda: time.sleep(0.02))
        return load(self, *pages, **options)

    monkeypatch.setattr(kv.TransferEngine, "load", late)
    assert replayed(host, (40, 300), 40).counts["wrong_bytes"] == 0
    monkeypatch.setattr(Transfer, "wait_layer", lambda self, layer, stream=None: self._sent())
    assert replayed(host, (40, 300), 40).counts["wrong_bytes"] > 0


def test_other_hits_and_owners_are_noticed(device, monkeypatch):
    """Controls: the simulation of another order, and a page that nobody owns."""
    from workloads.audit import Broken
    from workloads.simulation import Tier

    with monkeypatch.context() as patch, pytest.raises(Broken, match="simulated"):
        patch.setattr(Tier, "use", lambda self, block: self.blocks.setdefault(block))
        replayed(device, (60, 60), 60)

    def lose(replay, done):
        if done == 5:
            replay.host_pool.allocator.alloc(1)

    with pytest.raises(Broken, match=r"pages \[\d+\] are allocated, and nobody has them|are left"):
        replayed(device, (60, 60), 60, lose)


# The command line ---------------------------------------------------------------------------------


def main(device_name, *arguments):
    """Run the script on small pages; return its exit status."""
    import stress

    few = ["--device", device_name, "--scale", "16"]
    few += ["--device-blocks", "60", "--host-blocks", "150"]
    return stress.main(["replay", *few, *map(str, arguments)])


def test_the_report(device_name, tmp_path):
    path = tmp_path / "new" / "report.json"
    assert main(device_name, "--limit", 80, "--running", 2, "--json", path) == 0
    report = json.loads(path.read_text())
    counts = report["counts"]["blocks"]
    assert (report["requests"], report["steps"], report["trace"]) == (80, 80, "seed 0")
    assert counts["hit.device"] + counts["hit.host"] + counts["missed"] == report["blocks"]
    assert counts["hit.host"] > 0 == counts["wrong_bytes"] and report["problems"] == []


def test_ctrl_c_prints_the_progress(device_name, monkeypatch, capsys):
    from workloads.trace import Replay

    step, closed = Replay.step, []

    def stopped_at_30(self):
        if self.counts["requests"] == 30:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(Replay, "step", stopped_at_30)
    monkeypatch.setattr(
        Replay, "close", lambda self, close=Replay.close: closed.append(close(self))
    )
    assert main(device_name, "--limit", 60) == 130
    assert "stopped after 30 steps: " in capsys.readouterr().err and len(closed) == 1


@pytest.mark.parametrize(("lines", "said"), [
    ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "expected requests with hash_ids"),
    ("[1, 2]", r"t\.jsonl:1: expected an object with timestamp"),
])  # fmt: skip
def test_an_invalid_trace(device_name, tmp_path, lines, said):
    trace = tmp_path / "t.jsonl"
    trace.write_text(lines)
    with pytest.raises(ValueError, match=said):
        main(device_name, "--trace", trace)
