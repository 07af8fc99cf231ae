"""Decode steps that are captured once and launched for whatever sequences there are.

The bits are the same as of plain calls; calls after a refused capture or launch still work. The
order of streams is in `test_paged_order.py`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from engine_cases import poll
from order_cases import decoder_of
from paged_cases import rope_of
from paged_world import HOLD_S, MAX_TOKENS, Decoder, Program, World, background, check
from stream_cases import Log

import kvcupy as kv
from kvcupy import observe

pytestmark = pytest.mark.usefixtures("quick_host")


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


@pytest.mark.covering
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
def test_bits_of_plain_calls(device, mode, pieces):
    def program(world):
        return generate(world, {n: Decoder(world, n, pieces=pieces) for n in (4, 1, 2)})

    check(device, program, slots_in_flight=1, **PLAIN, **rope(device, mode))


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
    "past, sinks": {"past": "int8", "recent": 3, "sinks": 2, "rope_mode": "inline"},
    "rotated": {"dtype": "nvfp4+hadamard", "head_dim": 16},
    "rotated past": {"past": "nvfp4", "recent": 3, "head_dim": 16, "hadamard": True},
}


@pytest.mark.parametrize("name", FORMATS)
def test_other_caches(device, name):
    options = {**PLAIN, **FORMATS[name]}
    masks = options.pop("masks", {})

    def program(world):
        world.cache.attention = partial(world.cache.attention, **masks)
        return generate(world, {n: Decoder(world, n) for n in (2, 4)})

    if "rope_mode" in options:
        options["rope"] = device.asarray(rope_of(8))
    check(device, program, **options)


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("seed", [1])
def test_late_streams_change_nothing(device, mode, seed):
    """Random programs, with launches among all else."""

    def program(world):
        decoders = {n: Decoder(world, n, pieces=n == 2) for n in (1, 2, 4)}
        return Program(world, 100 + seed, decoders).run(150)

    options = {**PLAIN, "steps": 160, "tokens": MAX_TOKENS, "num_pages": 16}
    check(device, program, seed=seed, slots_in_flight=1 + seed, **options, **rope(device, mode))


def launches_ahead(world, count, held):
    """As many launches as the host may issue while a stream is held up; the next one blocks."""
    names = "abcd"
    decoder = decoder_of(world, "a", 3, "b", 4, "c", 5, "d", 6)
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


# --- What is refused ---


def attend(world, count, on="compute", layer=0):
    """One layer of the step that is begun, which is not to count."""
    query, key, value, out = (a[layer] for a in world.rows(count))
    world.cache.attention(layer, query, key, value, out=out, stream=world.streams[on])


def attend_to_tensors(world):
    """The output would be filled on torch's current stream, which is not captured."""
    torch = pytest.importorskip("torch")
    rows = [torch.as_tensor(a[0], device=world.device.torch_name) for a in world.rows(1)]
    world.cache.attention(0, *rows[:3], stream=world.streams["compute"])


def launch(world, decoder):
    decoder.graphs[0].launch(world.streams["compute"])


def launch_in_a_step(names, lens, **options):
    """Launch in a step that the graph was not captured for."""

    def call(world, decoder):
        with world.cache.forward(list(names), lens, **options):
            launch(world, decoder)

    return call


def launch_in_another_capture(world, decoder):
    with world.cache.forward(["a"], [1]), world.streams["compute"].capture():
        launch(world, decoder)


def launch_a_capture_that_failed(world, decoder):
    graphs = []
    with pytest.raises(ZeroDivisionError), world.cache.forward(["a"], [1]):  # noqa: SIM117
        with world.streams["compute"].capture() as graph:
            graphs.append(graph)
            attend(world, 1)
            raise ZeroDivisionError
    with world.cache.forward(["a"], [1]):
        graphs[0].launch(world.streams["compute"])


def capture(names, lens, **options):
    """Capture a step that is not one of one token per sequence."""

    def call(world, decoder):
        with world.cache.forward(list(names), lens, **options), world.streams["compute"].capture():
            attend(world, sum(lens))

    return call


def captured(call, on="compute"):
    """Call while a stream is captured."""

    def calls(world, decoder):
        with world.streams[on].capture():
            call(world, decoder)

    return calls


def captured_in_a_step(call):
    """Call in the capture of a step of one token."""

    def calls(world, decoder):
        with world.cache.forward(["a"], [1]), world.streams["compute"].capture():
            call(world)

    return calls


def get(world, _):
    world.cache.get_kv("a", 0, 3, stream=world.streams["compute"])


def set_rows(world, _):
    _, key, value, _ = world.rows(2)
    world.cache.set_kv("b", 0, key, value, stream=world.streams["compute"])


def page_lists(world):
    world.cache.page_table_csr(stream=world.streams["compute"])


def step(world, _):
    with world.cache.forward(["a"], [1]):
        attend(world, 1)


def fork(world, _):
    world.cache.fork_sequence("a", "f", 7)


def begin(world, _):
    world.cache.begin_forward(["s"], [1])


def commit(world, _):
    world.cache.commit_token_tree(["t"], [2])


# What is refused, the call, the error, what the message says.

# fmt: off
ERRORS = [
    ("launch, no step", launch, kv.KvcupyError, "outside of a step"),
    ("launch, many", launch_in_a_step("abc", [1] * 3), ValueError, "append_lens.*at most 2"),
    ("launch, prefill", launch_in_a_step("a", [2]), ValueError, "append_lens.*got 2 for 1"),
    ("launch, tree", launch_in_a_step("a", [1], token_tree=[[-1]]), ValueError,
     "append_lens.*one token"),
    ("launch, long", launch_in_a_step("al", [1, 1]), ValueError, "seqs.*max_seq_len.*got 5"),
    ("launch, captured", launch_in_another_capture, kv.CaptureError, 
     "part of another|into a capture"),
    ("launch, failed", launch_a_capture_that_failed, kv.CaptureError, "did not end well"),
    ("capture, prefill", capture("ab", [1, 2]), kv.CaptureError, "one token per sequence"),
    ("capture, tree", capture("a", [1], token_tree=[[-1]]), kv.CaptureError, "one token per seq"),
    ("capture, no step", captured(lambda w, _: attend(w, 1)), kv.KvcupyError, "no step is running"),
    ("capture, tensors without out", captured_in_a_step(attend_to_tensors), kv.CaptureError,
     "outside the capture"),
    ("capture, page lists", captured_in_a_step(page_lists), kv.CaptureError, "page_table_csr"),
    ("capture, get_kv", captured(get), kv.CaptureError, "is being captured"),
    ("capture, set_kv", captured(set_rows), kv.CaptureError, "is being captured"),
    ("copies captured, step", captured(step, "copy"), kv.CaptureError, "copy_stream"),
    ("copies captured, launch", captured(launch_in_a_step("a", [1]), "copy"), kv.CaptureError,
     "copy_stream"),
    ("copies captured, fork", captured(fork, "copy"), kv.CaptureError, "is being captured"),
    ("copies captured, begin", captured(begin, "copy"), kv.CaptureError, "is being captured"),
    ("copies captured, commit", captured(commit, "copy"), kv.CaptureError, "is being captured"),
]
# fmt: on


def state(cache):
    names = "abclst"
    return [
        *map(cache.sequence_length, names), cache.num_available_pages, cache.total_length,
        "f" in cache,
    ]  # fmt: skip


def around_an_error(world, call, kind, message):
    """Everything a cache does, with a call in the middle that is refused if there are streams."""
    cache = world.cache
    decoder = Decoder(world, 2)
    world.prefill("a", 7, "b", 6, "c", 4, "l", 15)
    cache.fork_sequence("a", "s", 4)
    cache.pop_tokens("s", 1)  # it shares a page with "a", to be copied
    world.prefill("t", 3)
    world.step("t", [3], trees=[[-1, -1, 1]])
    decoder.step("al")
    if world.live:
        before = state(cache)
        for _ in range(2):
            with pytest.raises(kind, match=message):
                call(world, decoder)
        assert state(cache) == before
        assert not any(world.streams[on].capturing for on in ("compute", "copy"))
    for name in "abcs":
        decoder.step(name)
        world.step(name, [2])
    world.read("b", "compute")
    world.write("b", 1, 2, "other")
    cache.fork_sequence("b", "f")
    decoder.step("fa")
    cache.commit_token_tree(["t"], [2])
    Decoder(world, 2).step("tf")
    return world.results("abcstf")


@pytest.mark.parametrize(
    ("call", "error", "message"), [pytest.param(*row, id=what) for what, *row in ERRORS]
)
def test_all_goes_on(device, call, error, message):
    options = {"copy": "given", "max_seq_len": 12, "tokens": 40, "steps": 30}
    check(device, lambda world: around_an_error(world, call, error, message), **options)


def test_a_refused_launch_puts_nothing_on_a_stream(device):
    world = World(device)
    decoder = Decoder(world, 1)
    world.prefill("a", 3, "b", 3)
    world.step("ab")
    with observe.attached(Log()) as log:
        with pytest.raises(ValueError, match="append_lens"):
            launch_in_a_step("ab", [1, 1])(world, decoder)
        with pytest.raises(kv.KvcupyError, match="outside of a step"):
            launch(world, decoder)
    assert log.lines == []


@pytest.mark.gpu
def test_bits_of_plain_calls_on_a_gpu():
    test_bits_of_plain_calls(kv.device("cuda"), "normal", pieces=False)
