"""Order of streams that work on the same bytes: with each wait left out too."""

from __future__ import annotations

import time

import numpy as np
import pytest
from devices.fake_cuda import FakeApi
from engine_cases import PATIENCE_S, dropped_wait, poll
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Gate, Log, delay
from table_cases import HOLD_S

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.paged.turns import Turns
from kvcupy.devices import cuda
from kvcupy.devices.host import HostDevice


class World:
    """Bytes that streams take turns with, each reading what is there and writing its own."""

    def __init__(self, device, count=3):
        self.device = device
        self.turns = Turns()
        self.streams = [device.stream() for _ in range(count)]
        self.bytes = device.zeros((4,), np.int64)
        self.seen = []

    def work(self, stream, value):
        """Read what is there, and write `value` over it, in a turn."""
        self.turns.enter(stream)
        self.put(stream, value)
        self.turns.leave(stream)

    def put(self, stream, value):
        before = self.device.zeros((4,), np.int64)
        self.device.copy(before, self.bytes, stream=stream)
        self.device.copy(self.bytes, self.device.asarray(np.full(4, value)), stream=stream)
        self.seen.append(before)

    def check(self, *values):
        """Each has seen what the one before it wrote; the last is what remains."""
        self.device.synchronize()
        found = [self.device.to_numpy(a).tolist() for a in (*self.seen, self.bytes)]
        assert found == [[value] * 4 for value in values]


def one_after_the_other(world):
    first, second, _ = world.streams
    gate = Gate(first)
    world.work(first, 1)
    yield second, 0
    world.work(second, 2)
    return second, gate, (0, 1, 2)


def a_third_by_way_of_the_second(world):
    first, second, third = world.streams
    gate = Gate(first)
    world.work(first, 1)
    world.work(second, 2)
    yield third, 0
    world.work(third, 3)
    return third, gate, (0, 1, 2, 3)


def both_of_two_at_once(world):
    first, second, third = world.streams
    gate = Gate(second)
    world.turns.enter(first)
    world.turns.enter(second)
    world.put(second, 1)
    world.turns.leave(first)
    world.turns.leave(second)
    yield third, 1
    world.work(third, 2)
    return third, gate, (0, 1, 2)


def there_and_back(world):
    first, second, _ = world.streams
    world.work(first, 1)
    gate = Gate(second)
    world.work(second, 2)
    yield first, 0
    world.work(first, 3)
    return first, gate, (0, 1, 2, 3)


def a_later_turn_of_one_already_waited_for(world):
    first, second, _ = world.streams
    world.work(first, 1)
    world.turns.enter(second)
    gate = Gate(first)
    world.work(first, 2)
    yield second, 0
    world.work(second, 3)
    return second, gate, (0, 1, 2, 3)


def one_that_was_captured_when_it_left(world):
    first, second, _ = world.streams
    gate = Gate(first)
    world.turns.enter(first)
    world.put(first, 1)
    with first.capture():
        world.turns.leave(first)
    yield second, 0
    world.work(second, 2)
    return second, gate, (0, 1, 2)


STORIES = [
    one_after_the_other,
    a_third_by_way_of_the_second,
    both_of_two_at_once,
    there_and_back,
    a_later_turn_of_one_already_waited_for,
    one_that_was_captured_when_it_left,
]


def told(monkeypatch, device, story, control):
    """The world at the end, what it must look like, and how often the stream in question waited."""
    world = World(device)
    rest = story(world)
    stream, index = next(rest)
    with dropped_wait(monkeypatch, stream, index if control else None) as seen:
        with pytest.raises(StopIteration) as ended:
            next(rest)
        late, gate, values = ended.value.value
        poll(late.done, PATIENCE_S if control else HOLD_S)
        gate.open()
    return world, values, len(seen) - index


@pytest.mark.parametrize("story", STORIES)
def test_order(device, monkeypatch, story):
    world, values, waits = told(monkeypatch, device, story, control=False)
    assert waits == 1, "no wait but those that the control below counts on"
    world.check(*values)


@pytest.mark.parametrize("story", STORIES)
def test_without_the_wait_it_goes_wrong(device, monkeypatch, story):
    world, values, _ = told(monkeypatch, device, story, control=True)
    with pytest.raises(AssertionError):
        world.check(*values)


def lines(function):
    with observe.attached(Log()) as log:
        function()
    return [(line[0], line[2]) for line in log.lines]


def test_a_stream_does_not_wait_for_itself(device):
    world = World(device)
    first = world.streams[0]
    for value in (1, 2, 3):
        world.work(first, value)
    assert lines(lambda: world.turns.enter(first)) == []
    world.check(0, 1, 2, 3)


def test_nobody_waits_twice(device):
    world = World(device)
    first, second, third = world.streams
    world.work(first, 1)
    assert lines(lambda: world.turns.enter(second)) == [("waited", second)]
    assert lines(lambda: world.turns.enter(second)) == []
    assert lines(lambda: world.turns.enter(third)) == [("waited", third)]
    world.turns.leave(second)
    assert lines(lambda: world.turns.enter(third)) == [("waited", third)], "for the second"
    world.turns.leave(third)
    assert len(world.turns) == 1


def test_the_first_turn_waits_for_nothing(device):
    world = World(device)
    assert len(world.turns) == 0
    assert lines(lambda: world.turns.enter(world.streams[0])) == []
    assert len(world.turns) == 0


def test_leaving_without_having_entered(device):
    """Whoever did not wait does not stand for the others."""
    world = World(device)
    first, second, third = world.streams
    world.turns.leave(first)
    world.turns.leave(second)
    assert len(world.turns) == 2
    assert lines(lambda: world.turns.enter(third)) == 2 * [("waited", third)]
    world.turns.leave(third)
    assert len(world.turns) == 1


def test_it_remembers_no_more_than_works_at_once(device):
    """However many streams come by, and with the same few events."""
    turns, most = Turns(), 0
    with observe.attached(Log()) as log:
        for _ in range(30):
            together = [device.stream() for _ in range(3)]
            for stream in together:
                turns.enter(stream)
            for stream in together:
                turns.leave(stream)
            most = max(most, len(turns))
        remembered = {id(stream) for stream in (*turns._left, *turns._waited)}
        assert len(remembered) == most == 3
        assert len(turns._spare) <= 6
        events = {id(event): event for verb, event, _ in log.lines if verb == "recorded"}
    assert len(events) <= 6


def test_streams_that_only_enter_are_forgotten(device):
    turns, writer = Turns(), device.stream()
    for _ in range(3):
        turns.enter(writer)
        turns.leave(writer)
        for _ in range(10):
            turns.enter(device.stream())
        assert len(turns._waited) == 10
    turns.leave(writer)
    assert len(turns._waited) == 0


def test_a_captured_stream_cannot_enter(device):
    world = World(device)
    first, second, _ = world.streams
    with first.capture(), pytest.raises(kv.CaptureError, match=f"{first.name} is being captured"):
        world.turns.enter(first)
    world.turns.enter(first)
    world.put(first, 1)
    with first.capture():
        assert lines(lambda: world.turns.leave(first)) == []
        for _ in range(2):
            with pytest.raises(kv.CaptureError, match="end its capture"):
                world.turns.enter(second)
    world.work(second, 2)
    world.check(0, 1, 2)


def test_leaving_in_a_capture_after_an_earlier_turn(device):
    """The later one stands for both, and is as far as the stream has got."""
    world = World(device)
    first, second, third = world.streams
    world.work(third, 1)
    world.work(first, 2)
    world.turns.enter(first)
    gate = Gate(first)
    world.put(first, 3)
    with first.capture():
        world.turns.leave(first)
    world.work(second, 4)
    assert not poll(second.done, HOLD_S)
    gate.open()
    world.check(0, 1, 2, 3, 4)


def test_the_calling_thread_takes_turns():
    world = World(HostDevice())
    inline = world.device.as_stream(None)
    delay(world.streams[0])
    world.work(world.streams[0], 1)
    world.work(inline, 2)
    world.work(world.streams[1], 3)
    assert len(world.turns) == 1
    world.check(0, 1, 2, 3)


def test_the_calling_thread_may_wait_for_what_fails():
    world = World(HostDevice())
    first, second, _ = world.streams

    def fail():
        raise OSError("no such luck")

    first.call(fail)
    world.turns.leave(first)
    with pytest.raises(kv.DeviceError, match="luck"):
        world.turns.enter(world.device.as_stream(None))
    world.work(world.device.as_stream(None), 1)
    world.work(second, 2)
    world.check(0, 1, 2)


def test_wrappers_of_one_stream_take_one_turn(monkeypatch):
    api = FakeApi()
    api.install(monkeypatch)
    device, turns = cuda.CudaDevice(0, api), Turns()
    stream = device.stream()
    for _ in range(3):
        turns.enter(device.as_stream(stream.cupy))
        turns.leave(device.as_stream(stream.cupy))
    assert len(turns) == 1
    assert [entry for entry in api.runtime.log if entry[0] == "wait"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("story", STORIES)
def test_order_on_a_gpu(monkeypatch, story):
    test_order(kv.device("cuda"), monkeypatch, story)


@settings(max_examples=examples(60), deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=15))
def test_random_turns(device, steps):
    """Each reads what the one before it wrote, however late that comes."""
    world = World(device)
    for value, (number, late) in enumerate(steps, start=1):
        stream = world.streams[number]
        world.turns.enter(stream)
        if late:
            stream.call(lambda: time.sleep(0.002))
        world.put(stream, value)
        world.turns.leave(stream)
        assert len(world.turns) == 1
    world.check(*range(len(steps) + 1))
