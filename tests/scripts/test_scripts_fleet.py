"""scripts/fleet_simulation.py: what must hold of any fleet, and of one node."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from replay_cases import small_trace

pytestmark = pytest.mark.usefixtures("scripts_on_path")

TIERS = ("device", "host", "disk")


@pytest.fixture
def requests():
    return [(request.timestamp / 1e3, request.hash_ids) for request in small_trace(300)]


def fleet_of(nodes, sizes=(60, 150), **changes):
    from fleet_simulation import Fleet
    from replay.simulation import Sizes

    return Fleet(nodes, Sizes(*sizes), **changes)


def served(requests, fleet):
    from fleet_simulation import simulate_fleet

    return simulate_fleet(requests, fleet)


def bound_of(requests, longest=60):
    """Leading blocks that any earlier request has had."""
    seen, found = set(), 0
    for _, ids in requests:
        ids = ids[:longest]
        found += next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
    return found


def hits_of(result):
    return sum(result.counts[f"hit.{tier}"] for tier in (*TIERS, "shared"))


def test_one_node_is_the_replays_simulation(requests):
    from replay.simulation import Sizes, simulate

    result = served(requests, fleet_of(1, store=0))
    alone = simulate([ids for _, ids in requests], Sizes(60, 150))
    for tier in TIERS:
        assert result.counts[f"hit.{tier}"] == alone.counts[f"hit.{tier}"]
    assert result.counts["missed"] == alone.counts["missed"] > 0
    assert result.counts["queries"] == result.counts["hit.shared"] == 0


@pytest.mark.parametrize("route", ["turns", "prefix"])
@pytest.mark.parametrize("nodes", [1, 3, 20])
def test_a_store_of_everything_finds_all_that_was_computed(requests, nodes, route):
    fleet = fleet_of(nodes, route=route, share=1.0)
    result = served(requests, fleet)
    assert hits_of(result) == bound_of(requests)
    assert result.counts["put"] == len({block for _, ids in requests for block in ids[:60]})
    assert result.counts["evicted"] == 0
    assert served(requests, fleet) == result, "equal arguments, equal numbers"


@pytest.mark.parametrize("changes", [
    {"store": 0}, {"store": 100}, {"store": 400, "write": "second_use"}, {"dead": 150},
    {"store": 300, "dead": 100, "route": "prefix", "mourning_s": 1e9}, {"share": 0.02},
], ids=str)  # fmt: skip
def test_no_fleet_is_better_than_the_bound(requests, changes):
    result = served(requests, fleet_of(5, **changes))
    blocks = sum(min(60, len(ids)) for _, ids in requests)
    assert hits_of(result) + result.counts["missed"] == blocks
    assert hits_of(result) <= bound_of(requests)
    assert sum(result.served) == result.counts["requests"] == 300
    assert sum(asked for asked, _ in result.windows) == blocks
    assert sum(found for _, found in result.windows) == hits_of(result)
    assert result.counts["hit.shared"] == result.counts["fetched"]


def test_what_each_change_does(requests):
    whole = fleet_of(5, share=1.0)
    best = served(requests, whole)
    small = served(requests, replace(whole, store=60))
    assert small.counts["evicted"] > 0 and hits_of(small) < hits_of(best)
    rare = served(requests, replace(whole, write="second_use"))
    assert 0 < rare.counts["put"] < best.counts["put"] and hits_of(rare) < hits_of(best)
    narrow = served(requests, replace(whole, share=1 / 150))
    assert narrow.counts["fetched"] < best.counts["fetched"]
    alone = {r: served(requests, replace(whole, store=0, route=r)) for r in ("turns", "prefix")}
    assert hits_of(alone["turns"]) < hits_of(alone["prefix"]) < hits_of(best)
    by_prefix = served(requests, replace(whole, route="prefix"))
    assert by_prefix.counts["fetched"] < best.counts["fetched"]
    assert max(by_prefix.served) <= 1.5 * 60 + 2


def test_a_node_that_dies(requests):
    whole = fleet_of(4, share=1.0)
    best, hurt = (served(requests, replace(whole, dead=at)) for at in (None, 100))
    assert hurt.served[0] == 25 and sum(hurt.served) == 300
    assert best.windows[:3] == hurt.windows[:3] and hits_of(hurt) < hits_of(best)
    refused = hurt.counts["refused"]
    assert refused > 0 == best.counts["refused"]
    later = served(requests, replace(whole, dead=100, mourning_s=1e9))
    assert later.counts["refused"] > refused, "its place is given to others sooner"
    last = served(requests, replace(whole, nodes=1, dead=100))
    assert sum(last.served) == 300


def test_the_script(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    import fleet_simulation

    path, picture = tmp_path / "fleet.json", tmp_path / "new" / "fleet.png"
    arguments = ["--limit", "120", "--nodes", "1", "4", "--device-blocks", "60",
                 "--host-blocks", "150", "--store-blocks", "200"]  # fmt: skip
    assert fleet_simulation.main([*arguments, "--json", str(path), "--plot", str(picture)]) == 0
    report = json.loads(path.read_text())
    assert picture.stat().st_size > 10_000
    points = [point for group in report["points"].values() for point in group]
    assert len(points) == 2 * 4 + 3 + 4 + 2
    for point in points:
        assert 0 < point["hit_rate"]["total"] <= report["bound"] + 1e-9
        moved = point["fetched_bytes_per_token"] + point["put_bytes_per_token"]
        assert point["network_bytes_per_token"] == pytest.approx(moved)
        if point["breaks_first"] is not None:
            used = point["used"][point["breaks_first"]]
            assert used == max(point["used"].values())
            assert point["speed_at_break"] == pytest.approx(1 / used)
    printed = capsys.readouterr().out
    assert "Simulated" in printed and "a node dies" in printed


def test_costs_that_were_not_measured_are_not_made_up(tmp_path, capsys):
    import fleet_simulation

    assert set(fleet_simulation.measured_costs(tmp_path).values()) == {None}
    arguments = ["--limit", "30", "--nodes", "2", "--costs", str(tmp_path)]
    assert fleet_simulation.main(arguments) == 0
    assert "host to device" not in capsys.readouterr().out
    found = fleet_simulation.measured_costs(fleet_simulation.RESULTS)
    assert found["load_gb_per_s"] > 0 and found["store_get_gb_per_s"] > 0
