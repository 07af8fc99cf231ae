"""Order of streams that work on the same bytes, with and without each wait."""

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
from kvcupy.cache.hazards import AccessOrder
from kvcupy.devices import cuda
from kvcupy.devices.host import HostDevice


class World:
    """Bytes that streams access one after another: each reads them, then writes its own."""

    def __init__(self, device, count=3):
        self.device = device
        self.order = AccessOrder()
        self.streams = [device.stream() for _ in range(count)]
        self.bytes = device.zeros((4,), np.int64)
        self.seen = []

    def work(self, stream, value):
        """Read what is there, and write `value` over it, in one access."""
        self.order.begin(stream)
        self.put(stream, value)
        self.order.end(stream)

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
    world.order.begin(first)
    world.order.begin(second)
    world.put(second, 1)
    world.order.end(first)
    world.order.end(second)
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


def a_later_access_of_one_already_waited_for(world):
    first, second, _ = world.streams
    world.work(first, 1)
    world.order.begin(second)
    gate = Gate(first)
    world.work(first, 2)
    yield second, 0
    world.work(second, 3)
    return second, gate, (0, 1, 2, 3)


def one_that_was_captured_when_it_ended(world):
    first, second, _ = world.streams
    gate = Gate(first)
    world.order.begin(first)
    world.put(first, 1)
    with first.capture():
        world.order.end(first)
    yield second, 0
    world.work(second, 2)
    return second, gate, (0, 1, 2)


ORDER_CASES = [
    one_after_the_other,
    a_third_by_way_of_the_second,
    both_of_two_at_once,
    there_and_back,
    a_later_access_of_one_already_waited_for,
    one_that_was_captured_when_it_ended,
]


def run(monkeypatch, device, case, control):
    """The world at the end, what it must look like, and how often the stream in question waited."""
    world = World(device)
    rest = case(world)
    stream, index = next(rest)
    with dropped_wait(monkeypatch, stream, index if control else None) as seen:
        with pytest.raises(StopIteration) as ended:
            next(rest)
        late, gate, values = ended.value.value
        poll(late.done, PATIENCE_S if control else HOLD_S)
        gate.open()
    return world, values, len(seen) - index


@pytest.mark.parametrize("case", ORDER_CASES)
def test_order(device, monkeypatch, case):
    world, values, waits = run(monkeypatch, device, case, control=False)
    assert waits == 1, "no wait but those that the control below counts on"
    world.check(*values)


@pytest.mark.races
@pytest.mark.parametrize("case", ORDER_CASES)
def test_without_the_wait_it_goes_wrong(device, monkeypatch, case):
    world, values, _ = run(monkeypatch, device, case, control=True)
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
    assert lines(lambda: world.order.begin(first)) == []
    world.check(0, 1, 2, 3)


def test_no_stream_waits_twice(device):
    world = World(device)
    first, second, third = world.streams
    world.work(first, 1)
    assert lines(lambda: world.order.begin(second)) == [("waited", second)]
    assert lines(lambda: world.order.begin(second)) == []
    assert lines(lambda: world.order.begin(third)) == [("waited", third)]
    world.order.end(second)
    assert lines(lambda: world.order.begin(third)) == [("waited", third)], "for the second"
    world.order.end(third)
    assert len(world.order) == 1


def test_the_first_access_waits_for_nothing(device):
    world = World(device)
    assert len(world.order) == 0
    assert lines(lambda: world.order.begin(world.streams[0])) == []
    assert len(world.order) == 0


def test_ending_without_having_begun(device):
    """A stream that did not wait does not cover the others."""
    world = World(device)
    first, second, third = world.streams
    world.order.end(first)
    world.order.end(second)
    assert len(world.order) == 2
    assert lines(lambda: world.order.begin(third)) == 2 * [("waited", third)]
    world.order.end(third)
    assert len(world.order) == 1


def test_it_remembers_no_more_than_works_at_once(device):
    """However many streams there have been, and with the same few events."""
    order, most = AccessOrder(), 0
    with observe.attached(Log()) as log:
        for _ in range(30):
            together = [device.stream() for _ in range(3)]
            for stream in together:
                order.begin(stream)
            for stream in together:
                order.end(stream)
            most = max(most, len(order))
        remembered = {s for a in order._ended.values() for s in (a.stream, *a.waited)}
        assert len(remembered) == most == 3
        assert len(order._spare) <= 6
        events = {id(event): event for verb, event, _ in log.lines if verb == "recorded"}
    assert len(events) <= 6


def test_streams_that_only_begin_are_forgotten(device):
    order, writer = AccessOrder(), device.stream()
    for _ in range(3):
        order.begin(writer)
        order.end(writer)
        for _ in range(10):
            order.begin(device.stream())
        assert len(order._ended[writer].waited) == 10
    order.end(writer)
    assert len(order) == 1 and order._ended[writer].waited == set()


def test_a_captured_stream_cannot_begin(device):
    world = World(device)
    first, second, _ = world.streams
    with first.capture(), pytest.raises(kv.CaptureError, match=f"{first.name} is being captured"):
        world.order.begin(first)
    world.order.begin(first)
    world.put(first, 1)
    with first.capture():
        assert lines(lambda: world.order.end(first)) == []
        for _ in range(2):
            with pytest.raises(kv.CaptureError, match="end its capture"):
                world.order.begin(second)
    world.work(second, 2)
    world.check(0, 1, 2)


def test_ending_in_a_capture_after_an_earlier_access(device):
    """The later one covers both, up to where the stream has got."""
    world = World(device)
    first, second, third = world.streams
    world.work(third, 1)
    world.work(first, 2)
    world.order.begin(first)
    gate = Gate(first)
    world.put(first, 3)
    with first.capture():
        world.order.end(first)
    world.work(second, 4)
    assert not poll(second.done, HOLD_S)
    gate.open()
    world.check(0, 1, 2, 3, 4)


def test_the_calling_thread_is_ordered_too():
    world = World(HostDevice())
    inline = world.device.as_stream(None)
    delay(world.streams[0])
    world.work(world.streams[0], 1)
    world.work(inline, 2)
    world.work(world.streams[1], 3)
    assert len(world.order) == 1
    world.check(0, 1, 2, 3)


def test_the_calling_thread_may_wait_for_what_fails():
    world = World(HostDevice())
    first, second, _ = world.streams

    def fail():
        raise OSError("no such luck")

    first.call(fail)
    world.order.end(first)
    with pytest.raises(kv.DeviceError, match="luck"):
        world.order.begin(world.device.as_stream(None))
    world.work(world.device.as_stream(None), 1)
    world.work(second, 2)
    world.check(0, 1, 2)


def test_wrappers_of_one_stream_are_one_access(monkeypatch):
    api = FakeApi()
    api.install(monkeypatch)
    device, order = cuda.CudaDevice(0, api), AccessOrder()
    stream = device.stream()
    for _ in range(3):
        order.begin(device.as_stream(stream.cupy))
        order.end(device.as_stream(stream.cupy))
    assert len(order) == 1
    assert [entry for entry in api.runtime.log if entry[0] == "wait"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", ORDER_CASES)
def test_order_on_a_gpu(monkeypatch, case):
    test_order(kv.device("cuda"), monkeypatch, case)


@settings(max_examples=examples(60), deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=15))
def test_random_accesses(device, steps):
    """Each reads what the one before it wrote, however late that comes."""
    world = World(device)
    for value, (number, late) in enumerate(steps, start=1):
        stream = world.streams[number]
        world.order.begin(stream)
        if late:
            stream.call(lambda: time.sleep(0.002))
        world.put(stream, value)
        world.order.end(stream)
        assert len(world.order) == 1
    world.check(*range(len(steps) + 1))
