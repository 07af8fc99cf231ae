"""Order of streams: fences, calls on the same pages, layers. Each with its wait removed too."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from engine_cases import (
    NUM_LAYERS,
    PATIENCE_S,
    World,
    bits_of,
    contents,
    dropped_wait,
    layer_bits,
    page_values,
    poll,
    transfers_in,
)
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Gate, Log

from kvcupy import observe

HOLD_S = 0.05  # for so long something is held up, that must be waited for


class Story:
    """One order that must hold: what is held up, and what must not come before it is done.

    With `finish` the second half is given its chance to come too early before the first may run.
    """

    def __init__(self, device, control):
        self.world = World(device)
        self.patience_s = PATIENCE_S if control else HOLD_S

    def finish(self, gate, done):
        poll(done, self.patience_s)
        gate.open()
        self.world.device.synchronize()


def save_waits_for_the_writer(story):
    world = story.world
    gate, values = Gate(world.compute), page_values(world.device_pool, 1)
    world.write(world.device_pool, 3, values, world.compute)
    save = world.engine.save([3], [5], after=world.compute)
    yield
    save.done()
    story.finish(gate, save.done)
    assert np.array_equal(world.saved(5), bits_of(values))


def load_waits_for_the_reader(story):
    world = story.world
    gate = Gate(world.compute)
    bits = world.read(3, world.compute)
    load = world.engine.load([5], [3], after=world.compute)
    yield
    load.done()
    story.finish(gate, load.done)
    assert np.array_equal(bits(), world.before[0][3])


def load_waits_for_the_writer(story):
    world = story.world
    gate = Gate(world.compute)
    world.write(world.device_pool, 3, page_values(world.device_pool, 1), world.compute)
    load = world.engine.load([5], [3], after=world.compute)
    yield
    load.done()
    story.finish(gate, load.done)
    assert np.array_equal(world.loaded(3), world.before[1][5])


def two_calls(first, second, held, target):
    """The second call waits for the first; `target` names the page that must equal another."""

    def story_of(story):
        world = story.world
        gate = Gate(world.streams[held])
        getattr(world.engine, first[0])(*first[1:])
        later = getattr(world.engine, second[0])(*second[1:])
        yield
        later.done()
        story.finish(gate, later.done)
        side, page, source_side, source = target
        now = (contents(world.device_pool), contents(world.host_pool))[side][page]
        assert np.array_equal(now, world.before[source_side][source])

    return story_of


def compute_waits_for_a_layer(story):
    world = story.world
    gate = Gate(world.engine.load_stream)
    load = world.engine.load([5], [3], after=world.compute)
    load.done()
    yield
    load.wait_layer(1, world.compute)
    bits = world.read(3, world.compute, [1])
    story.finish(gate, world.compute.done)
    assert np.array_equal(bits(), layer_bits(world.host_pool, world.before[1][5], 1))


def compute_waits_for_a_load(story):
    world = story.world
    gate = Gate(world.engine.load_stream)
    load = world.engine.load([5], [3], after=world.compute)
    load.done()
    yield
    load.wait(world.compute)
    bits = world.read(3, world.compute)
    story.finish(gate, world.compute.done)
    assert np.array_equal(bits(), world.before[1][5])


def compute_waits_for_a_save(story):
    world = story.world
    gate = Gate(world.engine.save_stream)
    save = world.engine.save([3], [5], after=world.compute)
    save.done()
    yield
    save.wait(world.compute)
    world.write(world.device_pool, 3, page_values(world.device_pool, 1), world.compute)
    story.finish(gate, world.compute.done)
    assert np.array_equal(world.saved(5), world.before[0][3])


def compute_waits_for_a_save_by_a_layer(story):
    world = story.world
    gate = Gate(world.engine.save_stream)
    save = world.engine.save([3], [5], after=world.compute)
    save.done()
    yield
    save.wait_layer(0, world.compute)
    world.write(world.device_pool, 3, page_values(world.device_pool, 1), world.compute)
    story.finish(gate, world.compute.done)
    assert np.array_equal(world.saved(5), world.before[0][3])


# The story, and which wait of which stream it hangs on: waits are counted from the `yield`.
DEVICE, HOST = 0, 1
STORIES = {
    "save after a write": (save_waits_for_the_writer, "save", 0),
    "load after a read": (load_waits_for_the_reader, "load", 0),
    "load after a write": (load_waits_for_the_writer, "load", 0),
    "wait_layer of a load": (compute_waits_for_a_layer, "compute", 0),
    "wait of a load": (compute_waits_for_a_load, "compute", 0),
    "wait of a save": (compute_waits_for_a_save, "compute", 0),
    "wait_layer of a save": (compute_waits_for_a_save_by_a_layer, "compute", 0),
    # A load reads the host page that a save has written.
    "save, load, host page": (
        two_calls(("save", [1], [2]), ("load", [2], [3]), "save", (DEVICE, 3, DEVICE, 1)),
        "load", 1,
    ),
    # A load overwrites a page that is being saved.
    "save, load, device page": (
        two_calls(("save", [1], [2]), ("load", [7], [1]), "save", (HOST, 2, DEVICE, 1)),
        "load", 1,
    ),
    # A save reads the device page that a load has written.
    "load, save, device page": (
        two_calls(("load", [1], [2]), ("save", [2], [3]), "load", (HOST, 3, HOST, 1)),
        "save", 1,
    ),
    # A save overwrites a page that is being loaded.
    "load, save, host page": (
        two_calls(("load", [1], [2]), ("save", [5], [1]), "load", (DEVICE, 2, HOST, 1)),
        "save", 1,
    ),
}  # fmt: skip


def begin(device, name, control):
    """The story up to the wait that it is about, and the stream that waits there."""
    tell, stream, index = STORIES[name]
    story = Story(device, control)
    rest = tell(story)
    next(rest)
    return rest, story.world.streams[stream], index


@pytest.mark.parametrize("name", STORIES)
def test_order(device, monkeypatch, name):
    rest, stream, index = begin(device, name, control=False)
    with dropped_wait(monkeypatch, stream, None) as seen:
        assert next(rest, "ended") == "ended"
    assert len(seen) == index + 1, "the waits that the control below counts on"


@pytest.mark.races
@pytest.mark.parametrize("name", STORIES)
def test_without_the_wait_it_goes_wrong(device, monkeypatch, name):
    """The control of the test above."""
    rest, stream, index = begin(device, name, control=True)
    with pytest.raises(AssertionError), dropped_wait(monkeypatch, stream, index):
        next(rest, None)


def test_after_is_a_point_in_the_stream(device):
    """Work that the compute stream gets after the call delays nothing."""
    world = World(device)
    save = world.engine.save([1], [1], after=world.compute)
    load = world.engine.load([2], [2], after=world.compute)
    gate = Gate(world.compute)
    save.synchronize()
    load.synchronize()
    gate.open()


def test_every_call_of_a_batch_has_its_own_fence(device):
    world = World(device)
    first, second = device.stream(), device.stream()
    gates = [Gate(first), Gate(second)]
    saves = [
        world.engine.save([1], [1], after=first),
        world.engine.save([2], [2], after=second),
        world.engine.save([3], [3]),
    ]
    for gate in gates:
        assert not poll(saves[2].done, HOLD_S)
        gate.open()
    for save in saves:
        save.synchronize()


def test_calls_on_different_pages_do_not_wait_for_one_another(device):
    world = World(device)
    gate = Gate(world.engine.load_stream)
    loads = [world.engine.load([page], [page]) for page in (0, 1)]
    world.engine.save([2], [2]).synchronize()
    assert not loads[0].done()
    gate.open()
    loads[1].synchronize()


def test_reads_of_one_page_do_not_wait_and_go_out_together(device):
    world = World(device)
    with observe.attached(Log()) as log:
        world.engine.save([1, 2], [1, 2])
        world.engine.save([1], [3])
        world.engine.save([1], [4]).synchronize()
        world.engine.load([7], [5])
        world.engine.load([7], [6]).synchronize()
    names = [operation.name for operation in transfers_in(log, device)]
    assert names == ["save", *(f"load {layer}" for layer in range(NUM_LAYERS))]


KINDS = {"load": ("load", 1, 2), "save": ("save", 2, 1)}  # of host page 1, device page 2


@pytest.mark.parametrize("shared", ["device", "host", "both"])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("sent", [False, True], ids=["queued", "sent"])
def test_calls_that_touch_the_same_pages_keep_their_order(device, first, second, shared, sent):
    """All pairs of calls, while both streams are late in turn."""
    for late in ("load", "save"):
        world = World(device)
        model = [side.copy() for side in world.before]
        gate = Gate(world.streams[late])
        lists = {"load": [[1], [2]], "save": [[2], [1]]}[first]
        others = [[1], [2]]  # host page, device page
        if shared == "device":
            others[0] = [6]
        elif shared == "host":
            others[1] = [6]
        calls = [(first, lists), (second, others if second == "load" else others[::-1])]
        transfers = []
        for kind, pages in calls:
            transfers.append(getattr(world.engine, kind)(*pages))
            if kind == "load":
                model[DEVICE][pages[1]] = model[HOST][pages[0]]
            else:
                model[HOST][pages[1]] = model[DEVICE][pages[0]]
            if sent:
                world.engine._flush()
        transfers[1].done()
        time.sleep(0.01)
        gate.open()
        for transfer in transfers:
            transfer.synchronize()
        assert np.array_equal(contents(world.device_pool), model[DEVICE])
        assert np.array_equal(contents(world.host_pool), model[HOST])


@pytest.mark.parametrize("streams", ["own", "one", "compute"])
def test_the_last_of_several_calls_on_one_page_wins(device, streams):
    """Whatever streams the engine has."""
    given = {}
    if streams != "own":
        given = dict.fromkeys(("load_stream", "save_stream"), device.stream())
    world = World(device, **given)
    after = given["load_stream"] if streams == "compute" else world.compute
    gate = Gate(world.engine.load_stream)
    world.engine.load([1], [2], after=after)
    world.engine.load([3], [2], after=after)
    world.engine.save([2], [4], after=after)
    world.engine.load([4], [5], after=after)
    world.engine.save([5], [4], after=after)
    world.engine._flush()
    gate.open()
    device.synchronize()
    for bits in (world.loaded(2), world.saved(4), world.loaded(5)):
        assert np.array_equal(bits, world.before[HOST][3])


def test_conflicts_are_forgotten_once_a_batch_is_out(device):
    """Batches that went out do not make later calls go out one by one."""
    world = World(device)
    world.engine.load([1], [1]).synchronize()
    with observe.attached(Log()) as log:
        world.engine.load([2], [2])
        world.engine.save([1], [1])
        assert log.operations == []


# Random programs ---------------------------------------------------------------------------------

DEVICE_PAGES, HOST_PAGES = 4, 5


def pairs(source, target):
    """Lists of pages, the targets each once; some are skipped."""
    return st.lists(
        st.tuples(st.integers(-1, source - 1), st.integers(-1, target - 1)),
        max_size=4, unique_by=lambda pair: pair[1],
    )  # fmt: skip


STEPS = st.one_of(
    st.tuples(st.just("save"), pairs(DEVICE_PAGES, HOST_PAGES)),
    st.tuples(st.just("load"), pairs(HOST_PAGES, DEVICE_PAGES)),
    st.tuples(st.just("write"), st.integers(0, DEVICE_PAGES - 1)),
    st.tuples(st.just("read"), st.integers(0, DEVICE_PAGES - 1)),
    st.tuples(st.just("late"), st.sampled_from(["load", "save", "compute"])),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.sampled_from(["done", "synchronize"]), st.integers(0, 9)),
)


class Program:
    """Runs steps on a world, and at once on plain arrays; compute waits where its user must."""

    def __init__(self, device, by_layer):
        self.world = World(device)
        self.by_layer = by_layer
        self.model = [side.copy() for side in self.world.before]
        self.calls = []  # (transfer, device pages), not waited for by compute
        self.all_calls = []
        self.reads = []

    def wait_for(self, page, to_write):
        for call in [c for c in self.calls if page in c[1] and (to_write or c[0].kind == "load")]:
            self.calls.remove(call)
            if self.by_layer:
                for layer in range(NUM_LAYERS):
                    call[0].wait_layer(layer, self.world.compute)
            else:
                call[0].wait(self.world.compute)

    def step(self, number, verb, argument):
        world = self.world
        if verb in ("save", "load"):
            source, target = ([pair[i] for pair in argument] for i in (0, 1))
            transfer = getattr(world.engine, verb)(source, target, after=world.compute)
            of, to = (DEVICE, HOST) if verb == "save" else (HOST, DEVICE)
            before = self.model[of].copy()
            for s, t in argument:
                if s >= 0 and t >= 0:
                    self.model[to][t] = before[s]
            self.calls.append((transfer, source if verb == "save" else target))
            self.all_calls.append(transfer)
        elif verb == "write":
            self.wait_for(argument, to_write=True)
            values = page_values(world.device_pool, number)
            world.write(world.device_pool, argument, values, world.compute)
            self.model[DEVICE][argument] = bits_of(values)
        elif verb == "read":
            self.wait_for(argument, to_write=False)
            seen = world.read(argument, world.compute)
            self.reads.append((number, seen, self.model[DEVICE][argument].copy()))
        elif verb == "late":
            world.streams[argument].call(lambda: time.sleep(0.003))
        elif verb == "flush":
            world.engine._flush()
        elif self.all_calls:
            getattr(self.all_calls[argument % len(self.all_calls)], verb)()

    def check(self):
        self.world.engine._flush()
        self.world.device.synchronize()
        for number, seen, expected in self.reads:
            assert np.array_equal(seen(), expected), f"the read of step {number}"
        assert np.array_equal(contents(self.world.device_pool), self.model[DEVICE])
        assert np.array_equal(contents(self.world.host_pool), self.model[HOST])


@settings(max_examples=examples(150), deadline=None)
@given(steps=st.lists(STEPS, max_size=20), by_layer=st.booleans())
def test_random_programs_do_what_they_would_one_step_after_the_other(device, steps, by_layer):
    program = Program(device, by_layer)
    for number, (verb, argument) in enumerate(steps):
        program.step(number, verb, argument)
    program.check()


def test_threads_that_touch_the_same_pages_see_whole_pages(device):
    """The order of calls of two threads is open, but each page comes from one of them."""
    world = World(device)
    start = threading.Barrier(2)

    def work(source):
        start.wait(PATIENCE_S)
        for _ in range(20):
            world.engine.load([source], [0])
            world.engine.save([0], [source + 4]).done()

    threads = [threading.Thread(target=work, args=(page,)) for page in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    world.engine._flush()
    device.synchronize()
    sources = [world.before[HOST][page].tobytes() for page in (1, 2)]
    for bits in (world.loaded(0), world.saved(5), world.saved(6)):
        assert bits.tobytes() in sources


class Halts:
    """Halts the thread that issues an operation, in the middle of a batch."""

    def __init__(self, name):
        self.name, self.reached, self.go_on = name, threading.Event(), threading.Event()

    def before(self, operation):
        if operation.name == self.name:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)

    def after(self, operation): ...
    def recorded(self, event, stream): ...
    def waited(self, stream, event): ...


def test_a_call_that_comes_while_another_thread_sends_is_behind_it(device):
    world = World(device)
    load = world.engine.load([5], [3])
    with observe.attached(Halts("load 1")) as halts:
        sender = threading.Thread(target=world.engine._flush)
        sender.start()
        assert halts.reached.wait(PATIENCE_S)
        saver = threading.Thread(target=lambda: world.engine.save([3], [7]).synchronize())
        saver.start()
        saver.join(HOLD_S)
        assert saver.is_alive()
        halts.go_on.set()
        for thread in (sender, saver):
            thread.join(PATIENCE_S)
    assert load.done()
    assert np.array_equal(world.saved(7), world.before[HOST][5])
