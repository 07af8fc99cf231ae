"""The waits of sequences that move between tiers, with and without each wait."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from engine_cases import PATIENCE_S, poll
from paged_tiers_cases import NUM_LAYERS, Prefixed, hashes_of, tokens_of
from paged_world import HOLD_S
from stream_cases import Gate, Log
from table_cases import background

from kvcupy import observe
from kvcupy.cache.hazards import AccessOrder, PageAccess
from kvcupy.cache.paged.sequences import CachedSequence
from kvcupy.cache.paged.step import GroupStep
from kvcupy.cache.pages import PageAllocator

# These tests check the host's bookkeeping, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

PROMPT = tokens_of(1, 14)


class GateBefore(Log):
    """Holds the load stream up before the load of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.name, self.gate = f"load {layer}", None

    def before(self, operation):
        super().before(operation)
        if operation.name == self.name and self.gate is None:
            self.gate = Gate(operation.stream)


@pytest.fixture
def one(device):
    prefixed = Prefixed(device)
    prefixed.prefill("s", PROMPT)
    prefixed.compute = device.stream()
    prefixed.compute.name = "compute"
    return prefixed


@pytest.fixture
def want(device):
    """Outputs of a token behind the prompt, or behind its blocks, and K and V of the prompt."""
    found = {}
    for way, stop in (("onboard", 14), ("reuse", 12)):
        plain = Prefixed(device, tiered=False)
        plain.cache.add_sequence("s")
        plain.step("s", PROMPT[:stop])
        found[way] = plain.bits("s"), plain.step("s", [5])
    return found


def step_aside(one, way):
    """Take the sequence, or its blocks, off the device, where nothing is left of it."""
    if way == "onboard":
        one.cache.offload("s")
    else:
        one.cache.remove_sequence("s")
        one.tiers.evict(3)
    one.settle()
    one.spoil()


@contextmanager
def coming_back(one, way, layer):
    """Bring it back, held up before a layer; the gate is opened in the end whatever happens."""
    with observe.attached(GateBefore(layer)) as log:
        if way == "onboard":
            one.cache.onboard("s")
        else:
            one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
    try:
        yield log.gate
    finally:
        log.gate.open()


def wrong(outs, want):
    return [i for i, (a, b) in enumerate(zip(outs, want, strict=True)) if not np.array_equal(a, b)]


def attend_held(one, way, layer, patience_s):
    """Attend in all layers while the load of one is held; return outputs, and what came early."""
    step_aside(one, way)
    rows = one.rows([5])
    with coming_back(one, way, layer) as gate, one.cache.forward(["s"], [1]):
        outs = []
        for i in range(NUM_LAYERS):
            outs.append(one.attend(i, rows, one.compute))
            if i == layer - 1:
                assert poll(one.compute.done, PATIENCE_S), "it waits for a layer that is not its"
        early = poll(one.compute.done, patience_s)
        gate.open()
    one.compute.synchronize()
    return [one.device.to_numpy(out).copy() for out in outs], early


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("way", ["onboard", "reuse"])
def test_attention_waits_for_its_own_layer(one, want, way, layer):
    outs, early = attend_held(one, way, layer, HOLD_S)
    assert not early and wrong(outs, want[way][1]) == []
    bits = one.bits("s", 12)
    assert bits == [np.ascontiguousarray(a).tobytes() for a in first(want[way][0], way)]
    one.assert_no_leak()


def first(bits, way):
    """The first 12 tokens of K and V."""
    count = {"onboard": 14, "reuse": 12}[way]
    return [np.frombuffer(b, np.float32).reshape(NUM_LAYERS, count, -1)[:, :12] for b in bits]


@pytest.mark.races
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("way", ["onboard", "reuse"])
def test_without_its_wait_attention_is_wrong(one, want, monkeypatch, way, layer):
    monkeypatch.setattr(GroupStep, "wait_layer", lambda *_: None)
    outs, early = attend_held(one, way, layer, PATIENCE_S)
    held = list(range(layer, NUM_LAYERS))
    # Layers before it are not waited for either, and are mostly there.
    assert early and wrong(outs, want[way][1])[-(NUM_LAYERS - layer) :] == held


@pytest.mark.races("control")
@pytest.mark.parametrize("dropped", [False, True], ids=["waits", "control"])
def test_a_fork_and_other_streams_wait_too(one, want, monkeypatch, dropped):
    """The pages of the fork are being loaded too, and its readers wait for that."""
    step_aside(one, "onboard")
    if dropped:
        monkeypatch.setattr(GroupStep, "wait_layer", lambda *_: None)
    rows = one.rows([5])
    with coming_back(one, "onboard", 1) as gate:
        one.cache.fork_sequence("s", "fork", 12)
        one.cache.pop_tokens("s", 2)
        with one.cache.forward(["fork"], [1]):
            outs = [one.attend(i, rows, one.compute) for i in range(NUM_LAYERS)]
        early = poll(one.compute.done, PATIENCE_S if dropped else HOLD_S)
        gate.open()
    one.compute.synchronize()
    bad = wrong([one.device.to_numpy(out) for out in outs], want["reuse"][1])
    assert early == dropped and bool(bad) == dropped


def capture(one):
    """Return the graph of a decode step, its outputs, and the rows that it reads."""
    one.cache.add_sequence("captured")
    rows = one.rows([5])
    outs = [one.device.zeros((1, *one.out_shape), np.float32) for _ in range(NUM_LAYERS)]
    with one.cache.forward(["captured"], [1]), one.compute.capture() as graph:
        for i, out in enumerate(outs):
            given = [r[i] for r in rows]
            one.cache.attention(i, *given, out=out, stream=one.compute)
    one.cache.remove_sequence("captured")
    return graph, outs, rows


@pytest.mark.races("control")
@pytest.mark.parametrize("dropped", [False, True], ids=["waits", "control"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("way", ["onboard", "reuse"])
def test_a_launch_waits_for_the_whole_load(one, want, monkeypatch, way, layer, dropped):
    graph, outs, _rows = capture(one)
    step_aside(one, way)
    if dropped:
        monkeypatch.setattr(GroupStep, "before_launch", lambda *_: None)
    with coming_back(one, way, layer) as gate, one.cache.forward(["s"], [1]):
        graph.launch(one.compute)
        early = poll(one.compute.done, PATIENCE_S if dropped else HOLD_S)
        gate.open()
    one.compute.synchronize()
    bad = wrong([one.device.to_numpy(out) for out in outs], want[way][1])
    assert early == dropped
    if dropped:  # layers before it are not waited for either, and are mostly there
        assert bad[-(NUM_LAYERS - layer) :] == list(range(layer, NUM_LAYERS))
    else:
        assert bad == []
        with one.cache.forward(["s"], [1]):
            graph.launch(one.compute)
        one.compute.synchronize()
        one.assert_no_leak()


# --- Saves ---


@contextmanager
def unordered(self, stream, *sequences):
    yield


@pytest.mark.races("control")
@pytest.mark.parametrize("dropped", [False, True], ids=["waits", "control"])
@pytest.mark.parametrize("way", ["offload", "remove"])
def test_a_save_waits_for_the_step_that_wrote(device, one, monkeypatch, way, dropped):
    """The save of an offloaded sequence, and of blocks that the tiered cache takes over."""
    tokens, rows = tokens_of(3, 12), one.rows(tokens_of(3, 12))
    plain = Prefixed(device, tiered=False)
    plain.cache.add_sequence("late")
    plain.step("late", tokens)
    one.cache.add_sequence("late", hashes=hashes_of(tokens))
    save = one.tiers.engine.save_stream
    one.settle()
    gate = Gate(one.compute)
    with one.cache.forward(["late"], [12]):
        for i in range(NUM_LAYERS):
            one.attend(i, rows, one.compute)
    if dropped:
        monkeypatch.setattr(PageAccess, "on", unordered)
    (one.cache.offload if way == "offload" else one.cache.remove_sequence)("late")
    assert poll(save.done, PATIENCE_S if dropped else HOLD_S) == dropped
    gate.open()
    one.device.synchronize()
    save.synchronize()
    monkeypatch.undo()
    if way == "offload":
        one.cache.onboard("late")
    else:
        one.tiers.evict(3)
        one.settle()
        one.spoil()
        one.cache.add_sequence("late", hashes=hashes_of(tokens))
        assert one.cache.sequence_length("late") == 12
    assert (one.bits("late") == plain.bits("late")) != dropped


@pytest.mark.races("control")
@pytest.mark.parametrize("dropped", [False, True], ids=["waits", "control"])
def test_pages_of_an_offloaded_sequence_are_read_before_others_write(
    one, want, monkeypatch, dropped
):
    rows = one.rows(tokens_of(2, 48))
    one.cache.add_sequence("t")
    one.settle()
    gate = Gate(one.tiers.engine.save_stream)
    if dropped:
        monkeypatch.setattr(PageAllocator, "_mark_busy", lambda *_: None)
    one.cache.offload("s")

    def step():
        with one.cache.forward(["t"], [48]):
            for i in range(NUM_LAYERS):
                one.attend(i, rows, one.compute)
        one.compute.synchronize()

    with background(step) as thread:
        poll(lambda: not thread.is_alive(), PATIENCE_S if dropped else HOLD_S)
        assert thread.is_alive() != dropped
        gate.open()
    one.cache.remove_sequence("t")
    one.cache.onboard("s")
    assert (one.bits("s") == want["onboard"][0]) != dropped


@pytest.mark.races("control")
@pytest.mark.parametrize("dropped", [False, True], ids=["waits", "control"])
def test_a_page_that_was_shared_is_read_before_its_other_owner_writes(
    one, want, monkeypatch, dropped
):
    """Once one of the two has gone, the other may append to it in place."""
    one.cache.fork_sequence("s", "child", 12)
    one.cache.pop_tokens("child", 2)  # of the third page it is to overwrite two tokens
    rows = one.rows([9, 9])
    genuine, save = AccessOrder.end, one.tiers.engine.save_stream
    if dropped:
        monkeypatch.setattr(AccessOrder, "end", lambda o, s: None if s is save else genuine(o, s))
    one.settle()
    gate = Gate(save)
    one.cache.offload("s")
    with one.cache.forward(["child"], [2]):
        for i in range(NUM_LAYERS):
            one.attend(i, rows, one.compute)
    assert poll(one.compute.done, PATIENCE_S if dropped else HOLD_S) == dropped
    gate.open()
    one.compute.synchronize()
    one.cache.onboard("s")
    assert (one.bits("s") == want["onboard"][0]) != dropped


@pytest.mark.races("control")
@pytest.mark.parametrize("dropped", [False, True], ids=["waits", "control"])
@pytest.mark.parametrize("way", ["onboard", "reuse"])
def test_a_load_waits_for_who_still_reads_its_pages(one, want, monkeypatch, way, dropped):
    """A sequence that had every page is removed while a step of it is still to run."""
    step_aside(one, way)
    one.cache.add_sequence("t")
    one.step("t", tokens_of(2, 47))
    right = one.step("t", [5])
    one.cache.pop_tokens("t", 1)
    rows, load = one.rows([5]), one.tiers.engine.load_stream
    one.settle()
    gate = Gate(one.compute)
    with one.cache.forward(["t"], [1]):
        outs = [one.attend(i, rows, one.compute) for i in range(NUM_LAYERS)]
    one.cache.remove_sequence("t")
    if dropped:
        idle = one.device.stream()
        monkeypatch.setattr(PageAccess, "copy_stream_after_all", lambda _: idle)
    if way == "onboard":
        one.cache.onboard("s")
    else:
        one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
    assert poll(load.done, PATIENCE_S if dropped else HOLD_S) == dropped
    gate.open()
    one.compute.synchronize()
    assert bool(wrong([one.device.to_numpy(out) for out in outs], right)) == dropped
    if not dropped:
        assert one.bits("s") == want[way][0]
        one.assert_no_leak()


def test_a_launch_waits_once(device):
    """What a launch has waited for, later steps do not wait for again."""
    sequence = CachedSequence()
    sequence.extend(np.array([0]))
    sequence.length = 1
    waits = []

    class Load:
        def wait(self, stream):
            waits.append(stream)

    sequence.loads.append(Load())
    cache = Prefixed(device, tiered=False).cache
    step = GroupStep(cache._groups[0], [sequence], [1], [False], [], None)
    assert not step.is_loaded
    step.before_launch("s")
    assert step.is_loaded and waits == ["s"]
