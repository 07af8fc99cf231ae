"""Launches of captured steps of a paged cache. See `order_case`."""

from __future__ import annotations

from order_case import OrderCase
from paged_decoder import Decoder


def decoder_of(world, *names_and_lens):
    """A captured step, launched once for each of some sequences."""
    decoder = Decoder(world, 1)
    world.prefill(*names_and_lens)
    for name in names_and_lens[::2]:
        decoder.step([name])
    world.settle()
    return decoder


# --- Tables ---


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


# --- Pages ---


def launch_waits_for_a_step(world):
    decoder = decoder_of(world, "a", 4)
    gate = world.gate("other")
    world.step("a", [2], on="other")
    yield
    decoder.step("a")
    world.finish(gate, "compute")


def step_waits_for_a_launch(world):
    decoder = decoder_of(world, "a", 4)
    gate = world.gate("compute")
    decoder.step("a")
    yield
    world.step("a", on="other")
    world.finish(gate, "other")


def freed_pages_wait_for_a_launch(world):
    decoder = decoder_of(world, "a", 7)
    gate = world.gate("compute")
    decoder.step("a")
    world.cache.remove_sequence("a")
    yield
    world.prefill("b", 9, on="other")
    world.finish(gate, "other")


def fork_waits_for_a_launch(world):
    decoder = decoder_of(world, "a", 4)
    gate = world.gate("compute")
    decoder.step("a")
    yield
    world.cache.fork_sequence("a", "b")
    world.finish(gate, "copy")
    decoder.step("ab"[1:])


def launch_waits_for_set(world):
    decoder = decoder_of(world, "a", 6)
    gate = world.gate("other")
    world.write("a", 1, 4, "other")
    yield
    decoder.step("a")
    world.finish(gate, "compute")


def get_waits_for_a_launch(world):
    decoder = decoder_of(world, "a", 4)
    gate = world.gate("compute")
    decoder.step("a")
    yield
    world.read("a", "other")
    world.finish(gate, "other")


ORDER_CASES = {
    "launch, tables": OrderCase(launch_waits_for_its_tables, "compute", (0,), 1),
    "tables, launch": OrderCase(tables_wait_for_the_last_launch, "copy", (0,), 1),
    "pinned, launch": OrderCase(host_waits_for_the_launch_before_the_last, "host", (0,), 1),
    "launch, second stream": OrderCase(second_stream_waits_for_its_tables, "other", (0,), 2),
    "tables, second stream": OrderCase(tables_wait_for_every_stream, "copy", (1,), 2),
    "launch, step": OrderCase(launch_waits_for_a_step, "compute", (1,), 2),
    "step, launch": OrderCase(step_waits_for_a_launch, "other", (1,), 2),
    "freed pages, launch": OrderCase(freed_pages_wait_for_a_launch, "other", (1,), 2),
    "fork, launch": OrderCase(fork_waits_for_a_launch, "copy", (0,), 2),
    "launch, set_kv": OrderCase(launch_waits_for_set, "compute", (1,), 2),
    "get_kv, launch": OrderCase(get_waits_for_a_launch, "other", (0,), 1),
}
