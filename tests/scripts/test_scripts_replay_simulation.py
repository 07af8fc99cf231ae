"""What a replay is compared with: the simulation of the tiers, and the bytes of every block."""

from __future__ import annotations

import numpy as np
import pytest
from replay_cases import flip, one_tier_hits, only_on_the_host, small_trace

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("scripts_on_path")


# The simulation -------------------------------------------------------------------------------


def run_ids(*ids, sizes, **options):
    from replay.simulation import Sizes, simulate

    return simulate(ids, Sizes(*sizes), **options)


def test_without_limits_everything_seen_before_is_on_the_device():
    requests = [request.hash_ids for request in small_trace(200)]
    seen: set[int] = set()
    for ids, found in zip(requests, run_ids(*requests, sizes=(10**6, 10**6)).hits, strict=True):
        assert found == (next((n for n, i in enumerate(ids) if i not in seen), len(ids)), 0, 0)
        seen.update(ids)


@pytest.mark.parametrize("size", [50, 64, 100, 300])
def test_the_device_alone_is_one_tier(size):
    requests = [request.hash_ids for request in small_trace(200)]
    # A host that is full of what is on the device anyway finds nothing more.
    found = run_ids(*requests, sizes=(size, 1)).hits
    assert [on_device for on_device, _, _ in found] == one_tier_hits(requests, size)


def test_what_leaves_the_device_is_on_the_host_and_what_leaves_that_is_on_the_disk():
    for write in ("through", "back"):
        result = run_ids([1, 2], [3, 4], [5, 6], [1, 2], [5, 6], sizes=(2, 2, 6), write=write)
        assert [sum(found) for found in result.hits] == [0, 0, 0, 2, 2]
        assert result.hits[3] == (0, 0, 2)
        assert result.counts["lost"] == 0
    # Without a disk they are lost.
    result = run_ids([1, 2], [3, 4], [5, 6], [7, 8], [1, 2], sizes=(2, 2))
    assert result.hits[-1] == (0, 0, 0) and result.counts["lost"] == 8


def test_under_lru_leaves_go_before_their_parents():
    result = run_ids([1, 2, 3], [4], [1, 2, 3], sizes=(3, 1))
    assert result.hits[2][0] == 2


def test_the_least_recently_used_goes_first():
    before = [[1], [2], [1], [3], [4]]
    found = {n: any(run_ids(*before, [n], sizes=(3, 1)).hits[-1]) for n in (1, 2, 3)}
    assert found == {1: True, 2: False, 3: True}


def test_what_is_pinned_stays():
    late = run_ids([1, 2], [3], [4], [1, 2], sizes=(3, 1), running=1)
    held = run_ids([1, 2], [1, 2], [3], [4], [1, 2], sizes=(3, 1), running=3)
    assert late.hits[-1][0] == 1 and held.hits[-1] == (2, 0, 0)
    # Where leases take all room, the oldest goes early instead.
    tight = run_ids([1, 2], [1, 2], [3, 4], [3, 4], [1, 2], sizes=(2, 8), running=9)
    assert tight.hits[-1] == (0, 2, 0)


# The oracle -------------------------------------------------------------------------------------


@pytest.fixture
def contents(device):
    from replay.content import Contents

    pool = kv.KVPool(16, 16, 3, 2, 8, device=device)
    return Contents(pool), pool


def test_every_byte_of_a_block_is_its_own(contents):
    from replay.content import hashes_of

    oracle, _ = contents
    hashes = hashes_of(range(200))
    assert len(set(hashes.tolist())) == 200
    asarray = oracle.device.asarray
    words = np.stack([
        oracle.device.to_numpy(oracle.words(part, layer, asarray(hashes)))
        for part in (0, 1) for layer in range(3)
    ])  # fmt: skip
    assert len(np.unique(words)) == words.size
    shares = np.unpackbits(words.view(np.uint8)).reshape(-1, 8).mean(axis=0)
    assert np.all(np.abs(shares - 0.5) < 0.01)


def test_the_oracle_counts_wrong_bytes(device, contents):
    from replay.content import hashes_of

    only_on_the_host(device)
    oracle, pool = contents
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
    k[...], v[...] = v[:, [1, 0, 2]], k[:, [1, 0, 2]]
    assert oracle.wrong_bytes(0, pages, hashes) > 0.98 * 3 * page_bytes
    assert oracle.wrong_bytes(2, pages, hashes) == 0
