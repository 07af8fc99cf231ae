"""scripts/stress.py replay: the hits of its simulation, and every byte compared."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections import OrderedDict

import numpy as np
import pytest
from trace_cases import small_settings, small_trace

import kvcupy as kv
from kvcupy.cache.engine import Transfer

pytestmark = pytest.mark.usefixtures("scripts_on_path")

SIZES = [(60, 150), (80, 20), (60, 60), (60, 2000)]


def only_on_the_host(device):
    if device.name != "host":
        pytest.skip("the wrong byte, or the late one, is the host's")


def replayed(device, settings, requests, each=lambda replay, done: None, **options):
    """Replay requests; return the replay."""
    from workloads.trace import Replay

    replay = Replay(device, settings, requests, **options)
    try:
        for done in range(1, len(requests) + 1):
            replay.step()
            each(replay, done)
    finally:
        replay.close()
    return replay


# The replay -------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize(("write", "running"), [("through", 1), ("back", 3)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_replay_finds_what_the_simulation_finds(device, sizes, write, running):
    """`step` and `finish` compare hits, evictions, losses and moved blocks."""
    settings = small_settings(sizes, write=write, running=running)
    replay = replayed(device, settings, small_trace())
    assert replay.wrong == [] and replay.counts["not_as_matched"] == 0
    hits = sum(map(sum, replay.hits))
    assert replay.counts["checked_bytes"] == hits * settings.shape.page_bytes > 0
    stats = replay.cache.stats()
    assert sum(stats[f"{tier}_hits"] for tier in ("device", "host")) == hits


def test_nothing_is_waited_for_and_no_byte_is_wrong(device):
    for write in ("through", "back"):
        settings = small_settings((60, 100), write=write, running=4, eager=True)
        counts = replayed(device, settings, small_trace(200)).counts
        assert counts["wrong_bytes"] == 0 == counts["not_as_matched"] < counts["hit.host"]


# What must be noticed -----------------------------------------------------------------------------


def test_a_byte_that_changed_on_the_host_is_noticed(device):
    """Control: the cache does not know of it, and the next request that finds it must."""
    only_on_the_host(device)
    wrong_at = []

    def flip_one(replay, done):
        if done == 30:
            device.synchronize()
            part = kv.device("host").carrier(replay.host_pool.parts[0])
            part[:, -1, 0, 0, 0] ^= 1 << 3
        if replay.counts["wrong_bytes"] and not wrong_at:
            wrong_at.append(done)

    replay = replayed(device, small_settings((40, 300)), small_trace(60), flip_one)
    assert replay.counts["wrong_bytes"] > 0 and wrong_at[0] > 30
    named = r"request \d+: \d+ bytes in 1 of 2 layers, layer 1, K, block \d+, byte 0: got"
    assert len(replay.wrong) > 1 and all(re.match(named, line) for line in replay.wrong)


def test_a_page_that_went_elsewhere_is_noticed(device, monkeypatch):
    only_on_the_host(device)
    load = kv.TransferEngine.load
    monkeypatch.setattr(
        kv.TransferEngine, "load",
        lambda self, host_pages, *rest, **more: load(self, host_pages[::-1], *rest, **more),
    )  # fmt: skip
    replay = replayed(device, small_settings((40, 300)), small_trace(60))
    assert replay.counts["wrong_bytes"] > 0


def test_a_layer_that_does_not_wait_is_noticed(device, monkeypatch):
    """Control: loads come late; without the compute stream's wait it compares old bytes."""
    only_on_the_host(device)
    settings, requests = small_settings((40, 300)), small_trace(40)
    load = kv.TransferEngine.load

    def late(self, *pages, **options):
        self.load_stream.call(lambda: time.sleep(0.02))
        return load(self, *pages, **options)

    monkeypatch.setattr(kv.TransferEngine, "load", late)
    assert replayed(device, settings, requests).counts["wrong_bytes"] == 0
    monkeypatch.setattr(Transfer, "wait_layer", lambda self, layer, stream=None: self._sent())
    assert replayed(device, settings, requests).counts["wrong_bytes"] > 0


def test_other_hits_and_owners_are_noticed(device, monkeypatch):
    """Controls: the simulation of another order, and a page that nobody owns."""
    from workloads.audit import Broken
    from workloads.simulation import Tier

    settings, requests = small_settings((60, 60)), small_trace(60)
    with monkeypatch.context() as patch, pytest.raises(Broken, match="simulated"):
        patch.setattr(Tier, "use", lambda self, block: self.blocks.setdefault(block))
        replayed(device, settings, requests)

    def lose(replay, done):
        if done == 5:
            replay.host_pool.allocator.alloc(1)

    with pytest.raises(Broken, match=r"pages \[\d+\] are allocated, and nobody has them|are left"):
        replayed(device, settings, requests, lose)


# The simulation -------------------------------------------------------------------------------


def run_ids(*requests, sizes, running=1, write="through"):
    from workloads.simulation import Sizes, TierSimulation

    tiers = TierSimulation(Sizes(*sizes), write, running)
    return [tiers.request(ids) for ids in requests], tiers.counts


def one_tier_hits(requests, size):
    """What one tier of `size` blocks finds of each request, under LRU, a block at a time.

    Room is made before blocks come in. Later blocks of a request count as used before earlier ones.
    """
    order: OrderedDict[int, None] = OrderedDict()
    hits = []
    for ids in requests:
        found = list(itertools.takewhile(order.__contains__, ids))
        for block in reversed(found):
            order.move_to_end(block)
        while len(order) + len(ids) - len(found) > size:
            order.popitem(last=False)
        for block in reversed(ids):
            order[block] = None
            order.move_to_end(block)
        hits.append(len(found))
    return hits


@pytest.mark.parametrize("size", [50, 100, 10**6])
def test_the_device_alone_is_one_tier(size):
    requests = [request.hash_ids for request in small_trace(200)]
    # A host that is full of what is on the device anyway finds nothing more.
    hits, _ = run_ids(*requests, sizes=(size, 1))
    assert [on_device for on_device, _ in hits] == one_tier_hits(requests, size)


def test_what_leaves_the_device_is_on_the_host():
    for write in ("through", "back"):
        requests = [1, 2], [3, 4], [5, 6], [1, 2], [5, 6]
        hits, counts = run_ids(*requests, sizes=(2, 6), write=write)
        assert hits == [(0, 0)] * 3 + [(0, 2)] * 2 and counts["lost"] == 0
    hits, counts = run_ids([1, 2], [3, 4], [5, 6], [7, 8], [1, 2], sizes=(2, 2))
    assert hits[-1] == (0, 0) and counts["lost"] == 8


def test_the_least_recently_used_goes_first_and_what_is_pinned_stays():
    assert run_ids([1, 2, 3], [4], [1, 2, 3], sizes=(3, 1))[0][2][0] == 2  # leaves first
    before = [[1], [2], [1], [3], [4]]
    found = {n: any(run_ids(*before, [n], sizes=(3, 1))[0][-1]) for n in (1, 2, 3)}
    assert found == {1: True, 2: False, 3: True}
    late, _ = run_ids([1, 2], [3], [4], [1, 2], sizes=(3, 1), running=1)
    held, _ = run_ids([1, 2], [1, 2], [3], [4], [1, 2], sizes=(3, 1), running=3)
    assert late[-1][0] == 1 and held[-1] == (2, 0)
    # Where leases take all room, the oldest goes early instead.
    tight, _ = run_ids([1, 2], [1, 2], [3, 4], [3, 4], [1, 2], sizes=(2, 8), running=9)
    assert tight[-1] == (0, 2)


# The contents ---------------------------------------------------------------------------------


def flip(array, byte=5, bit=1):
    """Flip one bit of an array's memory."""
    array.reshape(-1).view(np.uint8)[byte] ^= 1 << bit


def test_every_byte_of_a_block_is_compared(device):
    only_on_the_host(device)
    from workloads.blocks import Contents, hashes_of

    pool = kv.KVPool(16, 16, 3, 2, 8, device=device)
    oracle, many = Contents(pool), hashes_of(range(200))
    words = np.stack([oracle.words(part, layer, many) for part in (0, 1) for layer in range(3)])
    assert len(set(many.tolist())) == 200 and len(np.unique(words)) == words.size
    pages, hashes = np.array([7, 2, 11]), hashes_of([5, 1, 9])
    for layer in range(3):
        oracle.write(layer, pages, hashes)
    assert [oracle.wrong_bytes(layer, pages, hashes) for layer in range(3)] == [0, 0, 0]
    k, v = (device.carrier(view) for view in pool.parts)
    assert not k[[0, 1, 3]].any() and not v[12:].any()
    flip(v[2, 1])
    assert [oracle.wrong_bytes(layer, pages, hashes) for layer in range(3)] == [0, 1, 0]
    assert oracle.first_wrong(pages, hashes).startswith("layer 1, V, block 1, byte 5: got")
    flip(v[2, 1])
    page_bytes = 2 * 16 * 2 * 8 * 2
    for wrong in (pages[::-1], np.array([7, 2, 2])):
        found = oracle.wrong_bytes(0, wrong, hashes)
        assert found > 0.98 * page_bytes * np.count_nonzero(wrong != pages)
    k[...], v[...] = v.copy(), k.copy()
    assert oracle.wrong_bytes(2, pages, hashes) > 0.98 * 3 * page_bytes


# The command line ---------------------------------------------------------------------------------


def main(device_name, *arguments):
    """Run the script on small pages; return its exit status."""
    import stress

    few = ["--device", device_name, "--scale", "16"]
    few += ["--device-blocks", "60", "--host-blocks", "150"]
    return stress.main(["replay", *few, *map(str, arguments)])


def test_the_report(device_name, tmp_path, capsys):
    path = tmp_path / "new" / "report.json"
    assert main(device_name, "--limit", 80, "--running", 2, "--json", path) == 0
    report, requests = json.loads(path.read_text()), small_trace(80, seed=0)
    counts = report["counts"]["blocks"]
    assert (report["requests"], report["steps"], report["trace"]) == (80, 80, "seed 0")
    assert report["blocks"] == sum(len(request.hash_ids) for request in requests)
    assert counts["hit.device"] + counts["hit.host"] + counts["missed"] == report["blocks"]
    assert counts["hit.host"] > 0 == counts["wrong_bytes"] and report["problems"] == []
    for key in ("device", "processor", "versions", "date", "commit"):
        assert key in report
    said = capsys.readouterr()
    assert "checked_bytes" in said.out and "80 of 80 steps" in said.err


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
    said = capsys.readouterr()
    assert "stopped after 30 steps: " in said.err and "'wrong_bytes': 0" in said.err
    assert said.out == "" and len(closed) == 1


def test_a_wrong_byte_is_the_exit_status(device_name, device, monkeypatch, capsys):
    only_on_the_host(device)
    from workloads.blocks import Contents

    write = Contents.write

    def wrong(self, layer, pages, hashes):
        write(self, layer, pages, hashes)
        if layer == 0:
            self._words[0][0][pages[0], 0] ^= np.uint64(1)

    monkeypatch.setattr(Contents, "write", wrong)
    assert main(device_name, "--limit", 20) == 1
    assert "bytes in 1 of 2 layers, layer 0, K, block 0, byte 0: got" in capsys.readouterr().err


@pytest.mark.parametrize(("lines", "said"), [
    ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "expected requests with hash_ids"),
    ('{"timestamp": 0, "input_length": 5}', r"t\.jsonl:2: expected an object with timestamp"),
    ("[1, 2]", r"t\.jsonl:2: expected an object with timestamp"),
])  # fmt: skip
def test_an_invalid_trace(device_name, tmp_path, lines, said):
    trace = tmp_path / "t.jsonl"
    trace.write_text(f"\n{lines}\n")
    with pytest.raises(ValueError, match=said):
        main(device_name, "--trace", trace)


@pytest.mark.parametrize("limit", [300, pytest.param(None, marks=pytest.mark.slow)])
def test_a_real_trace(device, limit):
    from common.requests import requests_of

    path = os.environ.get("KVCUPY_TRACE")
    if not path:
        pytest.skip("KVCUPY_TRACE names no trace")
    sizes = (400, 1000) if limit else (1000, 5000)
    assert replayed(device, small_settings(sizes), requests_of(path, limit)).wrong == []
