"""The catalogue of what protocols need: that it is whole, and that a few schedules bear it out.

`scripts/order_table.py` runs all of it.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import catalogue
import numpy as np
import pytest
import sites
from helpers import full_only

pytestmark = pytest.mark.usefixtures("lenient_host", "scripts_on_path")

RESULT = Path(__file__).resolve().parents[2] / "scripts" / "results" / "order_table.json"
PROTOCOLS = {protocol.name: protocol for protocol in catalogue.PROTOCOLS}
EDGES = {
    f"{protocol.name}: {edge.name}": (protocol, edge)
    for protocol in catalogue.PROTOCOLS
    for edge in protocol.edges
}
SOME = [
    name if edge is protocol.edges[0] else full_only(name)
    for n, (name, (protocol, edge)) in enumerate(EDGES.items())
    if n % 3 == 0 or edge is protocol.edges[0]
]


@pytest.fixture(autouse=True)
def on_the_host(device):
    """The simulated device is one of the host."""
    if device.kind != "host":
        pytest.skip("the simulated device is one of the host")


# --- Whole ----------------------------------------------------------------------------------------


def test_every_wait_in_the_source_is_an_edge_or_said_to_order_nothing():
    known = catalogue.listed() | set(catalogue.NOT_NEEDED)
    assert sites.sites_in_source() - known == set()


def test_no_edge_is_also_said_to_order_nothing():
    assert catalogue.listed() & set(catalogue.NOT_NEEDED) == set()


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_wait_that_a_protocol_passes_is_known(name):
    known = catalogue.listed() | set(catalogue.NOT_NEEDED)
    passed = set()
    for program in PROTOCOLS[name].programs:
        passed |= catalogue.passed(program)
    assert passed - known == set()
    named = {edge.name for edge in PROTOCOLS[name].edges if ".py " in edge.name}
    missed = named - passed
    for program in PROTOCOLS[name].programs:
        missed = missed and missed - catalogue.passed(program, 40)
    assert missed == set(), "edges that the protocol never comes to"


def test_a_wait_that_nobody_lists_is_found(monkeypatch):
    protocol = PROTOCOLS["fork and join"]
    others = [p for p in catalogue.PROTOCOLS if p.edges[0].name != protocol.edges[0].name]
    monkeypatch.setattr(catalogue, "PROTOCOLS", others)
    known = catalogue.listed() | set(catalogue.NOT_NEEDED)
    expected = {edge.name for edge in protocol.edges}
    assert catalogue.passed(protocol.programs[0]) - known == expected
    assert sites.sites_in_source() - known >= expected


# --- Borne out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_is_right_in_every_order(name):
    protocol = PROTOCOLS[name]
    for number, program in enumerate(protocol.programs):
        if number < 2 or number % 6 == 0:
            _, problems = catalogue.run_all(program, 4, seed=number)
            assert problems == []


@pytest.mark.parametrize("name", SOME)
def test_an_edge_that_is_left_out_is_reported(name):
    protocol, edge = EDGES[name]
    for program in edge.programs or protocol.programs:
        if catalogue.run_without(edge, program, None, 60, seed=0)[0]:
            return
    pytest.fail(f"not reported without {edge.name}")


def test_what_is_no_edge_is_a_problem():
    """The table's own checks can fail."""
    nothing = catalogue.Edge("nothing", nullcontext)
    (program,) = PROTOCOLS["fork and join"].programs
    row = catalogue.survey(catalogue.Protocol("x", (program,), (nothing,)), 3, 5)
    assert (row.edges, row.reported, row.corrupted) == (1, 0, 0)
    assert row.problems == [
        "without nothing: not reported", "without nothing: no wrong bytes in 5 schedules"
    ]  # fmt: skip


def test_a_protocol_that_races_is_a_problem():
    def program(device):
        x, y = device.zeros(4, "fp32"), device.zeros(4, "fp32")
        device.copy(x, np.ones(4, np.float32), stream=device.stream())
        device.copy(y, x, stream=device.stream())
        device.synchronize()
        return y

    row = catalogue.survey(catalogue.Protocol("x", (program,), ()), 20, 0)
    assert any("RAW" in p for p in row.problems) and any("seed" in p for p in row.problems)


@pytest.mark.parametrize("jobs", [1, full_only(2)])
def test_the_scripts_table(capsys, tmp_path, monkeypatch, jobs):
    import order_table

    file = tmp_path / "table.json"
    arguments = ["--only", "fork and join", "--schedules", "10", "--tries", "20"]
    assert order_table.main([*arguments, "--json", str(file), "--jobs", str(jobs)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["edges"], row["reported"], row["corrupted"], row["schedules"]) == (4, 4, 4, 10)
    assert "fork and join" in capsys.readouterr().out
    monkeypatch.setattr(catalogue, "run_without", lambda *_: (False, True))
    assert order_table.main(arguments) == 1


def test_the_committed_table():
    """It is of these protocols and edges, and says that nothing was missed."""
    report = json.loads(RESULT.read_text())
    rows = {row["protocol"]: row for row in report["rows"]}
    assert {name: row["edge_names"] for name, row in rows.items()} == {
        name: [edge.name for edge in protocol.edges] for name, protocol in PROTOCOLS.items()
    }
    for row in rows.values():
        assert row["reported"] == row["corrupted"] == row["edges"]
        assert row["schedules"] >= 1000 and row["problems"] == []
