"""Pages of a paged cache that are copied, and tokens that are moved. See `order_case`."""

from __future__ import annotations

from order_case import OrderCase

TREE = [-1, 0, 0, 1, 2]  # its last node is reached by 0 and 2, so that both others of its path move


# --- Copies of pages ---


def fork_waits_for_the_step_that_wrote(world):
    """The partial page of the parent is still to be written."""
    gate = world.gate("compute")
    world.prefill("a", 6)
    yield
    world.cache.fork_sequence("a", "b")
    world.finish(gate, "copy")
    world.step("b")


def fork_waits_for_the_stream_that_set(world):
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("other")
    world.write("a", 4, 2, "other")
    yield
    world.cache.fork_sequence("a", "b")
    world.finish(gate, "copy")
    world.step("b")


def fork_waits_for_readers_of_freed_pages(world):
    """It copies to a page that another step is still attending over."""
    world.prefill("a", 9, "b", 2)
    world.settle()
    gate = world.gate("compute")
    world.step("a")
    world.cache.remove_sequence("a")
    yield
    world.cache.fork_sequence("b", "c")
    world.finish(gate, "copy")
    world.step("c")


def reader_waits_for_the_fork(world):
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("copy")
    world.cache.fork_sequence("a", "b")
    yield
    world.read("b", "other")
    world.finish(gate, "other")


def step_waits_for_the_fork(world):
    """The tables come behind the page on the same stream, so that there are two waits for it.

    A first attempt has left the right tables behind, and another sequence the wrong bytes in the
    page: a read that comes too early gets these.
    """
    cache = world.cache
    world.prefill("a", 6)
    cache.fork_sequence("a", "b")
    world.step("b", keep=False)
    cache.remove_sequence("b")
    scribble(world)
    world.settle()
    gate = world.gate("copy")
    cache.fork_sequence("a", "b")
    yield
    world.step("b")
    world.finish(gate, "compute")


def scribble(world):
    """Leave something in the page that is given out next."""
    world.cache.add_sequence("scribble")
    world.cache.begin_forward(["scribble"], [4])
    world.cache.end_forward()
    world.write("scribble", 0, 4, "compute")
    world.cache.remove_sequence("scribble")


def begin_waits_for_the_step_that_wrote(world):
    """Two sequences share a page that was full and is partial now; to append is to copy it."""
    cache = world.cache
    gate = world.gate("compute")
    world.prefill("a", 8)
    cache.fork_sequence("a", "b")
    cache.pop_tokens("b", 2)
    yield
    cache.begin_forward(["b"], [1])
    world.finish(gate, "copy")
    world.attend(1)
    cache.end_forward()


def reader_waits_for_the_copy_of_begin(world):
    cache = world.cache
    world.prefill("a", 8)
    cache.fork_sequence("a", "b")
    cache.pop_tokens("b", 2)
    world.settle()
    gate = world.gate("copy")
    cache.begin_forward(["b"], [1])
    yield
    world.keep("K", cache.get_kv("b", 0, 6, stream=world.streams["other"])[0])
    world.finish(gate, "other")
    world.attend(1)
    cache.end_forward()


def step_waits_for_the_copy_of_begin(world):
    """As `step_waits_for_the_fork`, of a page that a begin copies."""
    cache = world.cache
    world.prefill("a", 8)
    cache.fork_sequence("a", "b")
    cache.pop_tokens("b", 2)
    world.step("b", keep=False)
    scribble(world)
    world.settle()
    gate = world.gate("copy")
    cache.begin_forward(["b"], [1])
    yield
    world.attend(1)
    world.finish(gate, "compute")
    cache.end_forward()


def set_waits_for_its_copy(world):
    """Tokens of a shared page are overwritten: the copy comes first."""
    cache = world.cache
    world.prefill("a", 8)
    cache.fork_sequence("a", "b")
    world.settle()
    gate = world.gate("copy")
    yield
    world.write("b", 5, 2, "other")
    world.finish(gate, "other")
    world.step("ab")


def copy_of_set_waits_for_the_step_that_wrote(world):
    cache = world.cache
    gate = world.gate("compute")
    world.prefill("a", 8)
    cache.fork_sequence("a", "b")
    yield
    world.write("b", 5, 2, "other")
    world.finish(gate, "copy")
    world.step("ab")


# --- Trees ---


def commit_waits_for_the_step_that_wrote(world):
    world.prefill("a", 3)
    world.settle()
    gate = world.gate("compute")
    world.step("a", [5], trees=[TREE])
    yield
    world.cache.commit_token_tree(["a"], [4])
    world.finish(gate, "copy")
    world.step("a")


def reader_waits_for_the_commit(world):
    world.prefill("a", 3)
    world.step("a", [5], trees=[TREE])
    world.settle()
    gate = world.gate("copy")
    world.cache.commit_token_tree(["a"], [4])
    yield
    world.read("a", "other")
    world.finish(gate, "other")


def step_waits_for_the_commit(world):
    """As with a fork there are two waits; an earlier attempt has left the right tables behind."""
    cache = world.cache
    world.prefill("a", 6)
    world.step("a", keep=False)  # the tables of a seventh token
    cache.pop_tokens("a", 3)
    world.step("a", [5], trees=[TREE])
    world.settle()
    gate = world.gate("copy")
    cache.commit_token_tree(["a"], [4])
    yield
    world.step("a")
    world.finish(gate, "compute")


ONE = {"slots_in_flight": 1}
ORDER_CASES = {
    "fork, step": OrderCase(fork_waits_for_the_step_that_wrote, "copy", (0,), 2),
    "fork, set_kv": OrderCase(fork_waits_for_the_stream_that_set, "copy", (0,), 2),
    "fork, freed page": OrderCase(fork_waits_for_readers_of_freed_pages, "copy", (0,), 2),
    "get_kv, fork": OrderCase(reader_waits_for_the_fork, "other", (0,), 1),
    "step, fork": OrderCase(step_waits_for_the_fork, "compute", (0, 1), 2, ONE),
    "begin, step": OrderCase(begin_waits_for_the_step_that_wrote, "copy", (0,), 2),
    "get_kv, begin": OrderCase(reader_waits_for_the_copy_of_begin, "other", (0,), 1),
    "step, begin": OrderCase(step_waits_for_the_copy_of_begin, "compute", (0, 1), 2, ONE),
    "set_kv, own page": OrderCase(set_waits_for_its_copy, "other", (0,), 1),
    "own page, step": OrderCase(copy_of_set_waits_for_the_step_that_wrote, "copy", (0,), 2),
    "commit, step": OrderCase(commit_waits_for_the_step_that_wrote, "copy", (0,), 2),
    "get_kv, commit": OrderCase(reader_waits_for_the_commit, "other", (0,), 1),
    "step, commit": OrderCase(step_waits_for_the_commit, "compute", (0, 1), 2),
}
