"""Order of streams in a paged cache: each wait, and what happens where it is left out."""

from __future__ import annotations

import access_order_cases
import mixed_order_cases
import page_order_cases
import pytest
import table_order_cases
from engine_cases import poll
from helpers import full_only
from paged_world import HOLD_S, check
from table_cases import background

import kvcupy as kv

# These tests are about the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

ORDER_CASES = {
    **table_order_cases.ORDER_CASES,
    **page_order_cases.ORDER_CASES,
    **access_order_cases.ORDER_CASES,
    **mixed_order_cases.ORDER_CASES,
}
# The tables of "step, demotion" are uploaded behind the pages: a wait for these alone brings none.
TWO_WAITS = [
    name for name, case in ORDER_CASES.items() if len(case.drop) == 2 and name != "step, demotion"
]

# With the copies behind the gate of the steps, the host waits where elsewhere a copy does.
ANYWHERE = [name for name in ORDER_CASES if not name.startswith("slot, ")]


@pytest.mark.parametrize("name", ORDER_CASES)
def test_order(device, monkeypatch, name):
    waits = ORDER_CASES[name].check(device, monkeypatch)
    assert waits == ORDER_CASES[name].waits, "the waits that the control below counts on"


@pytest.mark.races
@pytest.mark.parametrize("name", ORDER_CASES)
def test_without_the_wait_it_goes_wrong(device, monkeypatch, name):
    """The control of the test above."""
    ORDER_CASES[name].check_control(device, monkeypatch)


@pytest.mark.races("-0")
@pytest.mark.parametrize("dropped", [0, 1])
@pytest.mark.parametrize("name", TWO_WAITS)
def test_either_of_two_waits_will_do(device, monkeypatch, name, dropped):
    """So that the control leaves out both, and not for tables that only one of them brings."""
    ORDER_CASES[name].check(device, monkeypatch, drop=(dropped,))


@pytest.mark.parametrize("name", ORDER_CASES)
def test_a_copy_stream_of_the_users(device, monkeypatch, name):
    ORDER_CASES[name].check(device, monkeypatch, copy="given")


@pytest.mark.parametrize("name", ANYWHERE)
def test_the_copy_stream_may_compute(device, monkeypatch, name):
    ORDER_CASES[name].check(device, monkeypatch, copy="compute")


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


@pytest.mark.parametrize("num_slots", [1, 2, 3])
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
        world.step("a", [5], trees=[page_order_cases.TREE])
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


def test_a_file_of_a_step_to_come(device, tmp_path):
    """Saving waits; what is loaded is there for a step on another stream."""
    pytest.importorskip("safetensors")

    def program(world):
        world.prefill("a", 9)
        world.settle()
        gate = world.gate("compute")
        world.step("a", [3])
        world.finish_on_host(gate, lambda: world.cache.save_sequence("a", tmp_path / "a"))
        world.cache.load_sequence("b", tmp_path / "a")
        world.step("ba", [2, 1], on="other")
        return world.results("ab")

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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tables, two slots", "slot, two", "fork, step", "commit, step"])
def test_order_on_a_gpu(monkeypatch, name):
    ORDER_CASES[name].check(kv.device("cuda"), monkeypatch)
