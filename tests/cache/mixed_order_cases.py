"""Pages of a paged cache with `past` that are converted. See `order_case`."""

from __future__ import annotations

from order_case import OrderCase
from page_order_cases import scribble


def begun(world):
    """A step of 12 tokens whose end is to demote, and whose tables are uploaded."""
    world.cache.add_sequence("a")
    world.cache.begin_forward(["a"], [12])
    world.attend(12)


def demotion_waits_for_the_step_that_wrote(world):
    world.cache.add_sequence("a")
    world.cache.begin_forward(["a"], [12])
    world.cache.slot_mapping(stream=world.streams["compute"])
    world.settle()
    gate = world.gate("compute")
    world.attend(12)
    yield
    world.cache.end_forward()
    world.finish(gate, "copy")
    world.step("a")


def reader_waits_for_the_demotion(world):
    begun(world)
    world.settle()
    gate = world.gate("copy")
    world.cache.end_forward()
    yield
    world.read("a", "other")
    world.finish(gate, "other")


def writer_waits_for_the_demotion(world):
    """It overwrites the page that a demotion still reads, and that is free by now."""
    begun(world)
    world.settle()
    gate = world.gate("copy")
    world.cache.end_forward()
    world.cache.add_sequence("b")
    world.cache.begin_forward(["b"], [8])
    world.cache.end_forward()
    yield
    world.write("b", 0, 8, "other")
    world.finish(gate, "other")
    world.settle()
    world.read("a")


def step_waits_for_the_demotion(world):
    """The tables come behind the pages on the same stream, so that there are two waits for both.

    The tables of the step before have as many sequences and tokens, and would serve.
    """
    begun(world)
    world.cache.end_forward()
    for _ in range(2):
        world.step("a")
    world.cache.begin_forward(["a"], [1])
    world.attend(1)
    world.settle()
    gate = world.gate("copy")
    world.cache.end_forward()
    yield
    world.step("a")
    world.finish(gate, "compute")


def promotion_waits_for_the_set(world):
    """A demoted page, part of which is to be kept, is written to and then converted back."""
    begun(world)
    world.cache.end_forward()
    world.cache.pop_tokens("a", 5)
    world.settle()
    gate = world.gate("other")
    world.write("a", 4, 3, "other")
    yield
    world.cache.begin_forward(["a"], [1])
    world.finish(gate, "copy")
    world.attend(1)
    world.cache.end_forward()


def reader_waits_for_the_promotion(world):
    begun(world)
    world.cache.end_forward()
    world.cache.pop_tokens("a", 5)
    scribble(world)
    world.settle()
    gate = world.gate("copy")
    world.cache.begin_forward(["a"], [1])
    yield
    world.keep("K", world.cache.get_kv("a", 0, 7, stream=world.streams["other"])[0])
    world.finish(gate, "other")
    world.attend(1)
    world.cache.end_forward()


MIXED = {"past": "fp8_e4m3", "recent": 3}
ONE = {**MIXED, "slots_in_flight": 1}
ORDER_CASES = {
    "demotion, step": OrderCase(demotion_waits_for_the_step_that_wrote, "copy", (0,), 2, MIXED),
    "get_kv, demotion": OrderCase(reader_waits_for_the_demotion, "other", (0,), 1, MIXED),
    "set_kv, demotion": OrderCase(writer_waits_for_the_demotion, "other", (0,), 1, MIXED),
    "step, demotion": OrderCase(step_waits_for_the_demotion, "compute", (0, 1), 2, ONE),
    "promotion, set_kv": OrderCase(promotion_waits_for_the_set, "copy", (0,), 2, MIXED),
    "get_kv, promotion": OrderCase(reader_waits_for_the_promotion, "other", (0,), 1, MIXED),
}
