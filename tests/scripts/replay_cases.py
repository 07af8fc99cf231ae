"""Small traces for the replay scripts, an oracle for hits, and faults to be noticed."""

from __future__ import annotations

import itertools
import json
import os
from collections import OrderedDict
from dataclasses import asdict

import numpy as np
import pytest


def only_on_the_host(device):
    if device.name != "host":
        pytest.skip("the wrong byte, or the late one, is the host's")


def small_trace(count=120, seed=1):
    """Requests of a made-up trace, as `replay_requests` makes them."""
    from replay.requests import conversations

    return list(itertools.islice(conversations(seed), count))


def write_trace(path, requests):
    """Write requests as lines of JSON."""
    with path.open("w") as file:
        for request in requests:
            file.write(json.dumps(asdict(request)) + "\n")


def small_settings(sizes, **changes):
    """Pages of 1 KiB in two layers."""
    from replay.run import Settings, Shape
    from replay.simulation import Sizes

    return Settings(Sizes(*sizes), Shape(2, 16, 1, 8), **changes)


def replayed(device, settings, requests, each=lambda replay, done: None):
    """Replay requests; return the outcome."""
    from replay.run import Replay

    replay = Replay(device, settings)
    try:
        return replay.run(requests, each=lambda done: each(replay, done))
    finally:
        replay.close()


def simulated(settings, requests):
    from replay.simulation import simulate

    ids = [request.hash_ids for request in requests]
    return simulate(ids, settings.sizes, settings.write, running=settings.running)


def assert_as_simulated(outcome, settings, requests):
    """Check that every byte was right, and that every count is the simulation's."""
    from replay.report import COMPARED, MOVED, counted

    expected, page_bytes = simulated(settings, requests), settings.shape.page_bytes
    assert outcome.wrong == [] and outcome.counts["wrong_bytes"] == 0
    assert outcome.counts["not_as_matched"] == 0
    assert outcome.hits == expected.hits
    got, names = counted(outcome, page_bytes), (*COMPARED, *MOVED)
    assert {name: got[name] for name in names} == {name: expected.counts[name] for name in names}
    found = sum(map(sum, expected.hits))
    assert outcome.counts["checked_bytes"] == found * page_bytes > 0
    assert sum(outcome.stats[f"{tier}_hits"] for tier in ("device", "host", "disk")) == found


def main(device_name, *arguments):
    """Run the script on small pages; return its exit status."""
    import replay_trace

    few = ["--device", device_name, "--scale", "16"]
    few += ["--device-blocks", "60", "--host-blocks", "150"]
    return replay_trace.main([*few, *map(str, arguments)])


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


def flip(array, byte=5, bit=1):
    """Turn one bit of an array's memory."""
    array.reshape(-1).view(np.uint8)[byte] ^= 1 << bit


def flip_pages(pool, pages):
    """Turn one bit in the last layer of K of some pages of a pool in host memory."""
    import kvcupy as kv

    part = kv.device("host").carrier(pool.parts[0])
    for page in pages:
        part[page, -1, 0, 0, 0] ^= 1 << 3


def spoil(settings):
    """Turn a bit of every payload in the file of a disk tier."""
    pages = settings.sizes.disk * 4096  # each is smaller, and aligned
    raw = bytearray(settings.disk.read_bytes())
    for at in range(len(raw) - pages + 100, len(raw), 4096):
        raw[at] ^= 4
    with settings.disk.open("r+b") as file:
        file.write(raw)


def real_trace(limit):
    """The first requests of the trace that KVCUPY_TRACE names."""
    from replay.requests import requests_of

    path = os.environ.get("KVCUPY_TRACE")
    if not path:
        pytest.skip("KVCUPY_TRACE names no trace")
    return requests_of(path, limit)
