"""Tables of a paged cache: uploaded, and overwritten. See `order_case`."""

from __future__ import annotations

from order_case import OrderCase


def attention_waits_for_its_tables(num_slots):
    """What is in its slot of the ring are the tables of an earlier step."""

    def program(world):
        world.prefill("a", 3, "b", 5)
        for _ in range(num_slots):
            world.step("a")
        world.settle()
        gate = world.gate("copy")
        yield
        world.step("b")
        world.finish(gate, "compute")

    return program


def second_stream_of_a_step_waits_for_its_tables(world):
    world.prefill("a", 3, "b", 5)
    for _ in range(2):
        world.step("a")
    world.settle()
    gate = world.gate("copy")
    yield
    world.step("b", on=("compute", "other"))
    world.finish(gate, "other")


def tables_wait_for_the_steps_that_read_others(num_slots):
    """As many steps as there are slots are issued, and one more, before the first one runs."""

    def program(world):
        names = "abcd"[: num_slots + 1]
        for name in names:
            world.prefill(name, 4)
        world.settle()
        gate = world.gate("compute")
        for name in names[:-1]:
            world.step(name)
        world.settle("copy")
        yield
        world.step(names[-1])
        world.finish(gate, "copy")

    return program


def tables_wait_for_every_stream_of_a_step(world):
    world.prefill("a", 4, "b", 5)
    world.settle()
    gate = world.gate("other")
    world.step("a", on=("compute", "other"))
    world.settle("copy", "compute")
    yield
    world.step("b")
    world.finish(gate, "copy")


def host_waits_before_it_repacks(num_slots):
    """The tables packed before are still being copied."""

    def program(world):
        names = "abcd"[: num_slots + 1]
        for name in names:
            world.prefill(name, 4)
        world.settle()
        gate = world.gate("copy")
        for name in names[:-1]:
            world.step(name)
        yield
        world.finish_on_host(gate, lambda: world.step(names[-1]))

    return program


def page_lists_wait_for_their_copy(world):
    """They are uploaded by themselves, if asked for."""
    world.prefill("a", 3, "b", 5)
    for name in "aab":  # as many pages as "b", then others in their place
        world.lists_of(name)
    world.settle()
    gate = world.gate("copy")
    yield
    world.lists_of("b")
    world.finish(gate, "other")


def page_lists_wait_for_their_readers(world):
    world.prefill("a", 4, "b", 4)
    world.lists_of("b")
    world.settle()
    gate = world.gate("other")
    world.lists_of("a")
    world.settle("copy")
    yield
    world.lists_of("b")
    world.finish(gate, "copy")


ONE, THREE = {"slots_in_flight": 1}, {"slots_in_flight": 3}
ORDER_CASES = {
    "tables, one slot": OrderCase(attention_waits_for_its_tables(1), "compute", (0,), 1, ONE),
    "tables, two slots": OrderCase(attention_waits_for_its_tables(2), "compute", (0,), 1),
    "tables, three slots": OrderCase(attention_waits_for_its_tables(3), "compute", (0,), 1, THREE),
    "tables, second stream": OrderCase(
        second_stream_of_a_step_waits_for_its_tables, "other", (0,), 2
    ),
    "page lists": OrderCase(page_lists_wait_for_their_copy, "other", (0,), 1),
    "slot, one": OrderCase(tables_wait_for_the_steps_that_read_others(1), "copy", (0,), 1, ONE),
    "slot, two": OrderCase(tables_wait_for_the_steps_that_read_others(2), "copy", (0,), 1),
    "slot, three": OrderCase(tables_wait_for_the_steps_that_read_others(3), "copy", (0,), 1, THREE),
    "slot, second stream": OrderCase(tables_wait_for_every_stream_of_a_step, "copy", (1,), 2, ONE),
    "slot, page lists": OrderCase(page_lists_wait_for_their_readers, "copy", (0,), 1, ONE),
    "pinned, one slot": OrderCase(host_waits_before_it_repacks(1), "host", (0,), 1, ONE),
    "pinned, two slots": OrderCase(host_waits_before_it_repacks(2), "host", (0,), 1),
    "pinned, three slots": OrderCase(host_waits_before_it_repacks(3), "host", (0,), 1, THREE),
}
