"""Streams that work on the pages of a paged cache one after another. See `order_case`."""

from __future__ import annotations

import numpy as np
from order_case import OrderCase


def freed_pages_wait_for_their_readers(world):
    """What one stream attends over is given to a sequence of another."""
    world.prefill("a", 12)
    world.settle()
    gate = world.gate("compute")
    world.step("a")
    world.cache.remove_sequence("a")
    yield
    world.prefill("b", 9, on="other")
    world.finish(gate, "other")


def slid_pages_wait_for_their_readers(world):
    """Likewise, when a window has left them."""
    cache = world.cache
    world.prefill("a", 9)
    cache.enable_sliding_window("a", 2, 1)
    world.settle()
    gate = world.gate("compute")
    world.step("a")
    yield
    world.prefill("b", 4, on="other")
    world.finish(gate, "other")


def abandoned_pages_wait_for_their_writers(world):
    """The pages of a step that an exception took back while it was running."""
    world.cache.add_sequence("a")
    gate = world.gate("compute")
    world.step("a", [9], keep=False)
    yield
    world.prefill("b", 9, on="other")
    world.finish(gate, "other")


def cleared_pages_wait_for_their_writers(world):
    world.cache.add_sequence("a")
    gate = world.gate("compute")
    world.cache.begin_forward(["a"], [9])
    world.attend(9)
    world.cache.clear()
    yield
    world.prefill("b", 9, on="other")
    world.finish(gate, "other")


def step_waits_for_readers_of_its_own(export):
    """A caller reads the pages by other means, with the tables that a step exports."""

    def program(world):
        rows = world.cache.pool.k(0)
        copy = world.device.zeros(rows.shape, np.float32)
        world.prefill("a", 9)
        world.settle()
        gate = world.gate("other")
        with world.cache.forward(["a"], [1]):
            getattr(world.cache, export)(stream=world.streams["other"])
            world.device.copy(copy, rows, stream=world.streams["other"])
        world.keep("pages", copy)
        world.cache.remove_sequence("a")
        yield
        world.prefill("b", 9, on="compute")
        world.finish(gate, "compute")

    return program


def second_step_waits_for_the_first(world):
    """The second step attends over what the first one writes."""
    world.prefill("a", 3)
    world.settle()
    gate = world.gate("compute")
    world.step("a", [2], on="compute")
    yield
    world.step("a", on="other")
    world.finish(gate, "other")
    world.step("a", on="compute")
    world.step("a", on="other")


def step_waits_for_both_streams_of_the_last(world):
    world.prefill("a", 3)
    world.settle()
    gate = world.gate("other")
    world.step("a", [2], on=("compute", "other"))
    yield
    world.step("a", on="compute")
    world.finish(gate, "compute")


def get_waits_for_the_step_that_wrote(world):
    gate = world.gate("compute")
    world.prefill("a", 6)
    yield
    world.read("a", "other")
    world.finish(gate, "other")


def set_waits_for_the_step_that_reads(world):
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("compute")
    world.step("a")
    yield
    world.write("a", 1, 4, "other")
    world.finish(gate, "other")


def get_waits_for_the_running_step(world):
    """What has been put on the stream of a step is there for others, although it has not ended."""
    world.cache.add_sequence("a")
    gate = world.gate("compute")
    world.cache.begin_forward(["a"], [6])
    world.attend(6)
    yield
    world.read("a", "other")
    world.finish(gate, "other")
    world.cache.end_forward()
    world.step("a", on="other")


def host_waits_for_the_step_that_wrote(world):
    """For it reads inline."""
    gate = world.gate("compute")
    world.prefill("a", 6)
    yield
    world.finish_on_host(gate, lambda: world.read("a", "inline"))


def inline_step_waits_for_the_last(world):
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("compute")
    world.step("a", [2])
    yield
    world.finish_on_host(gate, lambda: world.step("a", on="inline"))


def step_waits_for_set(world):
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("other")
    world.write("a", 1, 4, "other")
    yield
    world.step("a", on="compute")
    world.finish(gate, "compute")


def step_waits_for_get(world):
    """The pages that are read are given to another sequence meanwhile."""
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("other")
    world.read("a", "other")
    world.cache.remove_sequence("a")
    yield
    world.prefill("b", 9)
    world.finish(gate, "compute")


def get_waits_for_set(world):
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("other")
    world.write("a", 1, 4, "other")
    yield
    world.read("a", "compute")
    world.finish(gate, "compute")


def set_waits_for_get(world):
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("other")
    world.read("a", "other")
    yield
    world.write("a", 1, 4, "compute")
    world.finish(gate, "compute")


ORDER_CASES = {
    "freed pages": OrderCase(freed_pages_wait_for_their_readers, "other", (1,), 2),
    "slid pages": OrderCase(slid_pages_wait_for_their_readers, "other", (1,), 2),
    "abandoned pages": OrderCase(abandoned_pages_wait_for_their_writers, "other", (1,), 2),
    "cleared pages": OrderCase(cleared_pages_wait_for_their_writers, "other", (1,), 2),
    "step, block_table": OrderCase(
        step_waits_for_readers_of_its_own("block_table"), "compute", (1,), 2
    ),
    "step, page_table_csr": OrderCase(
        step_waits_for_readers_of_its_own("page_table_csr"), "compute", (1,), 2
    ),
    "step, step": OrderCase(second_step_waits_for_the_first, "other", (1,), 4),
    "step, two streams": OrderCase(step_waits_for_both_streams_of_the_last, "compute", (1,), 2),
    "get_kv, step": OrderCase(get_waits_for_the_step_that_wrote, "other", (0,), 1),
    "get_kv, running step": OrderCase(get_waits_for_the_running_step, "other", (0,), 3),
    "get_kv inline, step": OrderCase(host_waits_for_the_step_that_wrote, "inline", (0,), 1),
    "step inline, step": OrderCase(inline_step_waits_for_the_last, "inline", (1,), 2),
    "set_kv, step": OrderCase(set_waits_for_the_step_that_reads, "other", (0,), 1),
    "step, set_kv": OrderCase(step_waits_for_set, "compute", (1,), 2),
    "step, get_kv": OrderCase(step_waits_for_get, "compute", (1,), 2),
    "get_kv, set_kv": OrderCase(get_waits_for_set, "compute", (0,), 1),
    "set_kv, get_kv": OrderCase(set_waits_for_get, "compute", (0,), 1),
}
