"""Order of streams in a paged cache: each wait, what happens where it is left out, late streams."""

from __future__ import annotations

import order_cases
import pytest
from engine_cases import poll
from helpers import full_only
from paged_cases import rope_of
from paged_world import HOLD_S, MAX_TOKENS, Program, background, check

import kvcupy as kv
from kvcupy.cache.hazards import AccessOrder

# These tests are about the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

ORDER_CASES = {
    **order_cases.TABLE_CASES,
    **order_cases.PAGE_CASES,
    **order_cases.ACCESS_CASES,
    **order_cases.DEMOTION_CASES,
    **order_cases.GRAPH_CASES,
}


@pytest.mark.parametrize("name", ORDER_CASES)
def test_order(device, monkeypatch, name):
    waits = ORDER_CASES[name].check(device, monkeypatch)
    assert waits == ORDER_CASES[name].waits, "the waits that the control below counts on"


@pytest.mark.races
@pytest.mark.parametrize("name", ORDER_CASES)
def test_without_the_wait_it_goes_wrong(device, monkeypatch, name):
    """The control of the test above."""
    ORDER_CASES[name].check_control(device, monkeypatch)


# --- The host ---


def steps_ahead(world, count, held, fork):
    """As many steps as the host may begin and end while a stream is held up; the next one blocks.

    That is where its first attention packs its tables: its begin has returned.
    """
    cache = world.cache
    for name in "abcd":
        world.prefill(name, 2)
    world.settle()
    gate = world.gate(held)
    if fork:
        world.step("a")
        cache.fork_sequence("a", "e")
    for number in range(count):
        world.step("abcd"[number % 4], [1 + number])
    assert not world.live or not world.done(held)
    cache.begin_forward(["a"], [2])
    if world.live:
        with background(lambda: world.attend(2)) as thread:
            assert not poll(lambda: not thread.is_alive(), HOLD_S), "the host is further ahead"
            gate.open()
    else:
        world.attend(2)
    cache.end_forward()
    world.step("c")
    return world.results("abcde")


# Tables are packed into memory whose last copy is done. While the steps are held up, the tables of
# as many steps as there are slots are copied, and as many more are packed, their copies waiting for
# the readers of the slots; where the copies themselves are held up, only the former are packed.
AHEAD = {
    "steps held": ("compute", "own", False, 2),
    "copies held": ("copy", "own", False, 1),
    "one stream": ("compute", "compute", False, 1),
    "a page held": ("compute", "own", True, 1),  # its copy waits for the steps, tables behind it
}


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("name", AHEAD)
def test_how_far_the_host_is_ahead(device, name, num_slots):
    held, copy, fork, steps_per_slot = AHEAD[name]

    def program(world):
        return steps_ahead(world, steps_per_slot * num_slots, held, fork)

    check(device, program, copy=copy, slots_in_flight=num_slots)


def test_bookkeeping_never_waits(device):
    """Only attention does: no other call waits while every stream is held up."""

    def program(world):
        cache = world.cache
        world.prefill("a", 7, "b", 6)
        world.settle()
        gates = [world.gate(name) for name in ("compute", "other", "copy")]
        world.step("a", [5], trees=[order_cases.TREE])
        cache.commit_token_tree(["a"], [4])
        cache.enable_sliding_window("b", 4, 1)
        world.step("b", on="other")
        cache.fork_sequence("a", "c", 9)
        cache.fork_sequence("b", "d")
        cache.pop_tokens("a", 3)
        for _ in range(5):
            cache.begin_forward(["a", "c"], [3, 1])
            cache.end_forward()
            cache.pop_tokens("a", 3)
        cache.remove_sequence("b")
        world.write("c", 2, 5, "other")
        assert cache.sequence_length("a") == 7 and cache.sequence_length("c") == 14
        if world.live:
            assert not any(map(world.done, ("compute", "other", "copy")))
        for gate in gates:
            gate.open()
        world.write("c", 9, 5, "compute")  # what the empty steps have not
        world.step("cad", on="compute")
        return world.results("acd")

    check(device, program)


@pytest.mark.parametrize("num_slots", [full_only(1), 2, full_only(3)])
def test_tables_outgrow_their_slots(device, num_slots):
    """What is in flight keeps the memory that it has."""

    def program(world):
        world.prefill("a", 3, "b", 4)
        world.settle()
        gate = world.gate("compute")
        for count in (1, 279, 1, 299, 4, 1)[: 2 * num_slots]:
            world.step("ab", [1, count])
        assert not world.live or not world.done("compute")
        gate.open()
        world.step("ba")
        return world.results("ab")

    options = {"steps": 9, "tokens": 300, "num_pages": 300}
    check(device, program, slots_in_flight=num_slots, **options)


# --- Long random programs whose streams are late ---


ROOM = {"steps": 150, "tokens": MAX_TOKENS, "num_pages": 16}


CASES = {
    "one slot": {"slots_in_flight": 1},
    "two slots": {},
    "three slots": {"slots_in_flight": 3},
    "given": {"copy": "given"},
    "compute": {"copy": "compute"},
    "other": {"copy": "other", "slots_in_flight": 1},
    "rotated": {"rope": rope_of(8)},
    "inline": {"rope": rope_of(8), "rope_mode": "inline", "slots_in_flight": 1},
    "past": {"past": "fp8_e4m3", "recent": 5, "sinks": 3},
    "past, one slot": {"past": "int8", "recent": 2, "num_demoted_pages": 5, "slots_in_flight": 1},
    "pages of one": {"page_size": 1, "num_pages": 60},
}  # fmt: skip


@pytest.mark.usefixtures("quick_host")
@pytest.mark.covering
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_late_streams_change_nothing(device, name, seed):
    options, seed = {**ROOM, **CASES[name]}, 10 * [*CASES].index(name) + seed
    if "rope" in options:
        options["rope"] = device.asarray(options["rope"])
    check(device, lambda world: Program(world, seed).run(150), seed=seed, **options)


@pytest.mark.races
def test_without_access_order_it_goes_wrong(device, monkeypatch):
    """The control of the test above: tables keep their order, pages do not.

    A GPU calls host functions one after the other, so not every seed's delays disturb it.
    """

    def differs(seed):
        def program(world):
            with monkeypatch.context() as patch:
                if world.live:
                    patch.setattr(AccessOrder, "begin", lambda self, stream: None)
                return Program(world, seed).run(150)

        try:
            check(device, program, seed=seed, **ROOM)
        except AssertionError as error:
            assert "differ" in str(error)
            return True
        return False

    assert any(differs(seed) for seed in range(1, 9))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tables, two slots", "slot, two", "fork, step", "commit, step"])
def test_order_on_a_gpu(monkeypatch, name):
    ORDER_CASES[name].check(kv.device("cuda"), monkeypatch)
