"""Captures and launches of a paged cache that are refused; all calls after them still work."""

from __future__ import annotations

import pytest
from paged_decoder import Decoder
from paged_world import World, check
from stream_cases import Log

import kvcupy as kv
from kvcupy import observe

# These tests are about the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")


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


def test_as_long_as_there_is_room(device):
    """Pages for `max_seq_len`, and one more for what a window may leave empty."""

    def program(world):
        decoder = Decoder(world, 1)
        world.prefill("a", 1)
        for _ in range(11):  # 3 pages of 4
            decoder.step("a")
        if world.live:
            with pytest.raises(ValueError, match=r"seqs.*at most 3 pages"):
                launch_in_a_step("a", [1])(world, decoder)
        world.step("a")
        return world.results("a")

    check(device, program, max_seq_len=6)
