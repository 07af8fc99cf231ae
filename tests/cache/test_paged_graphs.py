"""Decode steps of a paged cache that are captured once and launched for whatever sequences there
are: the bits are the same as of plain calls. Each order of streams, with its wait left out too.
"""

from __future__ import annotations

from functools import partial

import graph_order_cases
import numpy as np
import pytest
from engine_cases import poll
from paged_cases import rope_of
from paged_decoder import Decoder
from paged_program import MAX_TOKENS, Program
from paged_world import HOLD_S, World, check
from table_cases import background

import kvcupy as kv

ORDER_CASES = graph_order_cases.ORDER_CASES


@pytest.mark.parametrize("name", ORDER_CASES)
def test_order(device, monkeypatch, name):
    waits = ORDER_CASES[name].check(device, monkeypatch)
    assert waits == ORDER_CASES[name].waits, "the waits that the control below counts on"


@pytest.mark.races
@pytest.mark.parametrize("name", ORDER_CASES)
def test_without_the_wait_it_goes_wrong(device, monkeypatch, name):
    """The control of the test above."""
    ORDER_CASES[name].check_control(device, monkeypatch)


# --- Tens of steps ---


def rope(device, mode):
    """Options of a cache that rotates."""
    return {} if mode == "none" else {"rope": device.asarray(rope_of(8)), "rope_mode": mode}


def generate(world, decoders):
    """Sequences that come, grow over pages, share them, slide and go, mostly by `decoders`.

    These are captured steps by how many sequences they are for.
    """
    cache = world.cache

    def decode(names, count=1, on="compute"):
        for _ in range(count):
            decoders[min(n for n in decoders if n >= len(names))].step(names, on)

    world.prefill("a", 3, "b", 6)
    decode("ab", 6)  # over the end of pages
    world.prefill("c", 5)
    decode("cab", 3)
    cache.fork_sequence("a", "d")
    decode("dabc", 4)
    cache.fork_sequence("b", "e", 5)
    cache.remove_sequence("a")
    world.step("ed", [3, 2])
    decode("ce", 3)
    cache.enable_sliding_window("c", 5, 2)
    cache.enable_sliding_window("d", 9, 0)
    decode("cd", 8)
    decode("c", 3, "other")
    decode("bdce", 3)
    cache.pop_tokens("e", 6)
    world.step("e", [4], trees=[[-1, 0, 0, 2]])
    cache.commit_token_tree(["e"], [3])
    decode("e", 3)
    cache.remove_sequence("b")
    cache.remove_sequence("c")
    world.prefill("f", 11)
    decode("fed", 9)
    return world.results("def")


PLAIN = {"steps": 80}


@pytest.mark.usefixtures("quick_host")
@pytest.mark.covering
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
def test_bits_of_plain_calls(device, mode, pieces):
    def program(world):
        return generate(world, {n: Decoder(world, n, pieces=pieces) for n in (4, 1, 2)})

    check(device, program, slots_in_flight=1, **PLAIN, **rope(device, mode))


@pytest.mark.usefixtures("quick_host")
@pytest.mark.covering
@pytest.mark.parametrize("way", ["within", "around", "taken back"])
@pytest.mark.parametrize("batch", [4, 6])
def test_ways_to_capture(device, way, batch):
    """Begin and end may be in the capture; the graph may be for more than there ever are."""
    check(device, lambda world: generate(world, {batch: Decoder(world, batch, way=way)}), **PLAIN)


FORMATS = {
    "fp16": {"dtype": "fp16"},
    "fp8": {"dtype": "fp8_e4m3"},
    "pages of one": {"page_size": 1, "num_pages": 90},
    "one slot, given": {"slots_in_flight": 1, "copy": "given"},
    "copies compute": {"copy": "compute"},
    "past": {"past": "fp8_e4m3", "recent": 3},
    "past, window": {"past": "fp8_e4m3", "recent": 3, "masks": {"window": 4}},
    "past, sinks": {"past": "int8", "recent": 3, "sinks": 2},
    "rotated": {"dtype": "nvfp4+hadamard", "head_dim": 16},
    "rotated past": {"past": "nvfp4", "recent": 3, "head_dim": 16, "hadamard": True},
}


@pytest.mark.usefixtures("quick_host")
@pytest.mark.parametrize("name", FORMATS)
def test_other_caches(device, name):
    options = {**PLAIN, **FORMATS[name]}
    masks = options.pop("masks", {})

    def program(world):
        world.cache.attention = partial(world.cache.attention, **masks)
        return generate(world, {n: Decoder(world, n) for n in (2, 4)})

    check(device, program, **options)


@pytest.mark.usefixtures("quick_host")
@pytest.mark.covering
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("seed", range(3))
def test_late_streams_change_nothing(device, mode, seed):
    """Random programs, with launches among all else."""

    def program(world):
        decoders = {n: Decoder(world, n, pieces=n == 2) for n in (1, 2, 4)}
        return Program(world, 100 + seed, decoders).run(150)

    options = {**PLAIN, "steps": 160, "tokens": MAX_TOKENS, "num_pages": 16}
    check(device, program, seed=seed, slots_in_flight=1 + seed, **options, **rope(device, mode))


# --- More than one in flight ---


def launches_ahead(world, count, held):
    """As many launches as the host may issue while a stream is held up; the next one blocks."""
    names = "abcd"
    decoder = graph_order_cases.decoder_of(world, "a", 3, "b", 4, "c", 5, "d", 6)
    gate = world.gate(held)
    for name in names[:count]:
        decoder.step(name)
    assert not world.live or not world.done(held)
    if world.live:
        with background(lambda: decoder.step(names[count])) as thread:
            assert not poll(lambda: not thread.is_alive(), HOLD_S), "the host is further ahead"
            gate.open()
    else:
        decoder.step(names[count])
    decoder.step("a")
    return world.results(names)


# The tables of a graph are packed into two buffers alternately, each once its last copy is done.
# With launches held up, the first copy goes through and the next two wait in both buffers.
@pytest.mark.parametrize(("held", "count"), [("compute", 3), ("copy", 2)])
def test_how_far_launches_are_ahead(device, held, count):
    check(device, lambda world: launches_ahead(world, count, held))


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_graphs_and_plain_steps_in_flight(device, num_slots):
    """Each graph has separate tables, and plain steps have others."""

    def program(world):
        decoders = [Decoder(world, batch) for batch in (1, 2, 4)]
        world.prefill("a", 3, "b", 4, "c", 2)
        world.settle()
        gate = world.gate("compute")
        for decoder, names in zip(decoders, ("a", "ab", "cab"), strict=True):
            decoder.step(names)
        world.prefill("d", 6)
        assert not world.live or not world.done("compute")
        gate.open()
        for decoder, names in zip(decoders, ("d", "cd", "dcba"), strict=True):
            decoder.step(names)
            world.step("bd", [2, 1])
        return world.results("abcd")

    check(device, program, slots_in_flight=num_slots)


# --- Graphs beside plain calls in one step ---


def test_a_layer_of_a_step_is_launched(device):
    """The graph of one layer before or after the plain call of another."""

    def program(world):
        decoder = Decoder(world, 2, pieces=True)
        world.prefill("a", 3, "b", 7)
        for layers in ((0,), (1,), (), (0, 1)):
            with world.cache.forward(["a", "b"], [1, 1]):
                for layer in world.layers:
                    if world.live and layer in layers:
                        decoder.graphs[layer].launch(world.streams["compute"])
                    else:
                        decoder.attend(layer)
            out = device.zeros(decoder.rows[3].shape, "fp32")
            device.copy(out, decoder.rows[3], stream=world.streams["compute"])
            world.keep("out", out)
        return world.results("ab")

    check(device, program)


@pytest.mark.parametrize("times", [1, 2])
def test_a_graph_is_launched_in_the_step_of_its_capture(device, times):
    def program(world):
        world.prefill("a", 3, "b", 7)
        decoder = Decoder(world, 2)
        stream = world.streams["compute"]
        with world.cache.forward(["a", "b"], [1, 1]):
            if world.live:
                with stream.capture() as graph:
                    for layer in world.layers:
                        decoder.attend(layer)
                for _ in range(times):
                    graph.launch(stream)
            else:
                for layer in world.layers:
                    decoder.attend(layer)
        world.step("ab")
        return world.results("ab")

    check(device, program)


@pytest.mark.usefixtures("quick_host")
def test_a_graph_writes_the_outputs_that_its_capture_allocated(device):
    """All of them in each launch: the bits of plain calls, and zeros past the tokens."""
    world = World(device, num_layers=1)
    cache, stream = world.cache, world.streams["compute"]
    query, key, value, _ = (a[0] for a in world.rows(3))
    world.prefill("a", 3, "b", 7)
    with cache.forward(["a", "b"], [1, 1]), stream.capture() as graph:
        out = cache.attention(0, query, key, value, stream=stream)
    for names in ("ab", "ba", "b"):
        for name in names:
            cache.fork_sequence(name, f"{name}, plain")
        with cache.forward([f"{name}, plain" for name in names], [1] * len(names)):
            want = cache.attention(0, query, key, value, stream=stream)
        stream.synchronize()
        out.fill(7)
        device.synchronize()
        with cache.forward(list(names), [1] * len(names)):
            graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(device.to_numpy(out), device.to_numpy(want))
        for name in names:
            cache.remove_sequence(f"{name}, plain")


def test_room_for_many_keys(device):
    """There keys are split among blocks, and sums come in another order than in a short table."""
    outs = []
    for live in (True, False):
        world = World(device, live, num_pages=80, page_size=16)
        decoder = Decoder(world, 2)
        world.prefill("a", 10, "b", 2)
        for _ in range(8):
            decoder.step("ab")
        outs.append({label: bits.view(np.float32) for label, bits in world.results("ab").items()})
    assert [*outs[0]] == [*outs[1]]
    for label, want in outs[1].items():
        np.testing.assert_allclose(outs[0][label], want, rtol=1e-5, atol=1e-6, err_msg=label)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["launch, tables", "tables, launch", "fork, launch"])
def test_order_on_a_gpu(monkeypatch, name):
    ORDER_CASES[name].check(kv.device("cuda"), monkeypatch)


@pytest.mark.gpu
def test_bits_of_plain_calls_on_a_gpu():
    test_bits_of_plain_calls(kv.device("cuda"), "normal", pieces=False)
