"""Orders that must hold in a paged cache, each run with and without the wait that ensures it.

A program leads up to that wait, which comes after its `yield`. Run on streams it must give, bit for
bit, what the calls give one after another; run without that one wait it must not.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from paged_world import Decoder, World, dropped_host_wait, same

ONE = {"slots_in_flight": 1}


@dataclass
class OrderCase:
    """A program that a world runs, and the waits that it depends on.

    Attributes
    ----------
    program : a generator that gets the world, and yields once, before the wait in question
    who : the stream that waits, or "host"
    drop : of the waits after the `yield`, those that the control leaves out
    waits : how many these are
    options : of the world
    """

    program: Any
    who: str
    drop: tuple[int, ...]
    waits: int
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, device, monkeypatch, drop=(), **options):
        """Return the results on streams, and how many waits there were."""
        world = World(device, **self.options, **options)
        rest = self.program(world)
        next(rest)
        with without(monkeypatch, world, self.who, drop) as seen:
            assert next(rest, "ended") == "ended"
        return world.results("abc"), len(seen)

    def inline(self, device):
        """Return the results if every call is done when it returns."""
        world = World(device, live=False, **self.options)
        assert len([*self.program(world)]) == 1
        return world.results("abc")

    def check(self, device, monkeypatch, **options):
        """On streams it gives the same bits."""
        want = self.inline(device)  # first, so that kernels are loaded before a stream is held up
        got, waits = self.run(device, monkeypatch, **options)
        same(got, want)
        return waits

    def check_control(self, device, monkeypatch):
        """Without its wait it gives others."""
        want = self.inline(device)
        got, _ = self.run(device, monkeypatch, self.drop, control=True)
        with pytest.raises(AssertionError, match="got"):
            same(got, want)


@contextmanager
def without(monkeypatch, world, who, indices):
    """Leave out some waits of a stream, or of the host. Yields all that were called.

    They are counted from 0, over the length of the block.
    """
    if who == "host":
        assert len(indices) <= 1
        with dropped_host_wait(monkeypatch, world.device, *indices or (None,)) as seen:
            yield seen
        return
    stream, seen, number = world.device.as_stream(world.streams[who]), [], itertools.count()
    genuine = type(stream).wait

    def wait(self, other):
        if self == stream:
            seen.append(other)
            if next(number) in indices:
                return
        genuine(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(type(stream), "wait", wait)
        yield seen


# --- Tables: uploaded, and overwritten ---


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


TABLE_CASES = {
    "tables, one slot": OrderCase(attention_waits_for_its_tables(1), "compute", (0,), 1, ONE),
    "tables, two slots": OrderCase(attention_waits_for_its_tables(2), "compute", (0,), 1),
    "page lists": OrderCase(page_lists_wait_for_their_copy, "other", (0,), 1),
    "slot, one": OrderCase(tables_wait_for_the_steps_that_read_others(1), "copy", (0,), 1, ONE),
    "slot, two": OrderCase(tables_wait_for_the_steps_that_read_others(2), "copy", (0,), 1),
    "slot, second stream": OrderCase(tables_wait_for_every_stream_of_a_step, "copy", (1,), 2, ONE),
    "slot, page lists": OrderCase(page_lists_wait_for_their_readers, "copy", (0,), 1, ONE),
    "pinned, one slot": OrderCase(host_waits_before_it_repacks(1), "host", (0,), 1, ONE),
    "pinned, two slots": OrderCase(host_waits_before_it_repacks(2), "host", (0,), 1),
}


# --- Pages that are copied, and tokens that are moved ---


TREE = [-1, 0, 0, 1, 2]  # its last node is reached by 0 and 2, so that both others of its path move


def fork_waits_for_the_step_that_wrote(world):
    """The partial page of the parent is still to be written."""
    gate = world.gate("compute")
    world.prefill("a", 6)
    yield
    world.cache.fork_sequence("a", "b")
    world.finish(gate, "copy")
    world.step("b")


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


PAGE_CASES = {
    "fork, step": OrderCase(fork_waits_for_the_step_that_wrote, "copy", (0,), 2),
    "get_kv, fork": OrderCase(reader_waits_for_the_fork, "other", (0,), 1),
    "step, fork": OrderCase(step_waits_for_the_fork, "compute", (0, 1), 2, ONE),
    "step, begin": OrderCase(step_waits_for_the_copy_of_begin, "compute", (0, 1), 2, ONE),
    "set_kv, own page": OrderCase(set_waits_for_its_copy, "other", (0,), 1),
    "own page, step": OrderCase(copy_of_set_waits_for_the_step_that_wrote, "copy", (0,), 2),
    "commit, step": OrderCase(commit_waits_for_the_step_that_wrote, "copy", (0,), 2),
    "get_kv, commit": OrderCase(reader_waits_for_the_commit, "other", (0,), 1),
    "step, commit": OrderCase(step_waits_for_the_commit, "compute", (0, 1), 2),
}


# --- Streams that work on pages one after another ---


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


def get_waits_for_set(world):
    world.prefill("a", 6)
    world.settle()
    gate = world.gate("other")
    world.write("a", 1, 4, "other")
    yield
    world.read("a", "compute")
    world.finish(gate, "compute")


ACCESS_CASES = {
    "freed pages": OrderCase(freed_pages_wait_for_their_readers, "other", (1,), 2),
    "slid pages": OrderCase(slid_pages_wait_for_their_readers, "other", (1,), 2),
    "abandoned pages": OrderCase(abandoned_pages_wait_for_their_writers, "other", (1,), 2),
    "step, block_table": OrderCase(
        step_waits_for_readers_of_its_own("block_table"), "compute", (1,), 2
    ),
    "step, step": OrderCase(second_step_waits_for_the_first, "other", (1,), 4),
    "get_kv, running step": OrderCase(get_waits_for_the_running_step, "other", (0,), 3),
    "step inline, step": OrderCase(inline_step_waits_for_the_last, "inline", (1,), 2),
    "set_kv, step": OrderCase(set_waits_for_the_step_that_reads, "other", (0,), 1),
    "step, set_kv": OrderCase(step_waits_for_set, "compute", (1,), 2),
    "get_kv, set_kv": OrderCase(get_waits_for_set, "compute", (0,), 1),
}


# --- Old pages that are demoted ---


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


DEMOTING = {"past": "fp8_e4m3", "recent": 3}
DEMOTION_CASES = {
    "demotion, step": OrderCase(demotion_waits_for_the_step_that_wrote, "copy", (0,), 2, DEMOTING),
    "get_kv, demotion": OrderCase(reader_waits_for_the_demotion, "other", (0,), 1, DEMOTING),
    "step, demotion": OrderCase(
        step_waits_for_the_demotion, "compute", (0, 1), 2, {**DEMOTING, **ONE}
    ),
    "promotion, set_kv": OrderCase(promotion_waits_for_the_set, "copy", (0,), 2, DEMOTING),
}


# --- Launches of captured steps ---


def decoder_of(world, *names_and_lens):
    """A captured step, launched once for each of some sequences."""
    decoder = Decoder(world, 1)
    world.prefill(*names_and_lens)
    for name in names_and_lens[::2]:
        decoder.step([name])
    world.settle()
    return decoder


def launch_waits_for_its_tables(world):
    decoder = decoder_of(world, "b", 4, "a", 4)
    gate = world.gate("copy")
    yield
    decoder.step("b")
    world.finish(gate, "compute")


def tables_wait_for_the_last_launch(world):
    decoder = decoder_of(world, "a", 4, "b", 4)
    gate = world.gate("compute")
    decoder.step("a")
    world.settle("copy")
    yield
    decoder.step("b")
    world.finish(gate, "copy")


def host_waits_for_the_launch_before_the_last(world):
    """It repacks the memory of that one, which is still being copied."""
    decoder = decoder_of(world, "a", 4, "b", 4, "c", 4)
    gate = world.gate("copy")
    decoder.step("a")
    decoder.step("b")
    yield
    world.finish_on_host(gate, lambda: decoder.step("c"))


def launch_pieces(world, decoder, name, streams):
    """Launch the graph of each layer on a separate stream, which copies the output away."""
    outs = [world.device.zeros(out.shape, "fp32") for out in decoder.rows[3]]
    with world.cache.forward([name], [1]):
        for layer, (on, out) in enumerate(zip(streams, outs, strict=True)):
            if world.live:
                decoder.graphs[layer].launch(world.streams[on])
            else:
                decoder.attend(layer, on)
            world.device.copy(out, decoder.rows[3][layer], stream=world.streams[on])
            world.keep(f"out of layer {layer}", out)


def second_stream_waits_for_its_tables(world):
    decoder = Decoder(world, 1, pieces=True)
    world.prefill("a", 4, "b", 4)
    for name in "ba":
        launch_pieces(world, decoder, name, ("compute", "other"))
    world.settle()
    gate = world.gate("copy")
    yield
    launch_pieces(world, decoder, "b", ("compute", "other"))
    world.finish(gate, "other")


def tables_wait_for_every_stream(world):
    decoder = Decoder(world, 1, pieces=True)
    world.prefill("a", 4, "b", 4)
    launch_pieces(world, decoder, "a", ("compute", "other"))
    world.settle()
    gate = world.gate("other")
    launch_pieces(world, decoder, "a", ("compute", "other"))
    world.settle("copy", "compute")
    yield
    launch_pieces(world, decoder, "b", ("compute", "compute"))
    world.finish(gate, "copy")


def step_waits_for_a_launch(world):
    decoder = decoder_of(world, "a", 4)
    gate = world.gate("compute")
    decoder.step("a")
    yield
    world.step("a", on="other")
    world.finish(gate, "other")


def fork_waits_for_a_launch(world):
    decoder = decoder_of(world, "a", 4)
    gate = world.gate("compute")
    decoder.step("a")
    yield
    world.cache.fork_sequence("a", "b")
    world.finish(gate, "copy")
    decoder.step("ab"[1:])


def get_waits_for_a_launch(world):
    decoder = decoder_of(world, "a", 4)
    gate = world.gate("compute")
    decoder.step("a")
    yield
    world.read("a", "other")
    world.finish(gate, "other")


GRAPH_CASES = {
    "launch, tables": OrderCase(launch_waits_for_its_tables, "compute", (0,), 1),
    "tables, launch": OrderCase(tables_wait_for_the_last_launch, "copy", (0,), 1),
    "pinned, launch": OrderCase(host_waits_for_the_launch_before_the_last, "host", (0,), 1),
    "launch, second stream": OrderCase(second_stream_waits_for_its_tables, "other", (0,), 2),
    "tables, second stream": OrderCase(tables_wait_for_every_stream, "copy", (1,), 2),
    "step, launch": OrderCase(step_waits_for_a_launch, "other", (1,), 2),
    "fork, launch": OrderCase(fork_waits_for_a_launch, "copy", (0,), 2),
    "get_kv, launch": OrderCase(get_waits_for_a_launch, "other", (0,), 1),
}
