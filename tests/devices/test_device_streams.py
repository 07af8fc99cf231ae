"""Streams, events, graphs, memory and copies: what every device does.

Runs on the device of ``--device`` and on the stand-in for CUDA. `test_host_streams.py` and
`test_cuda*.py` test what is specific to one kind of device.
"""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
from stream_cases import Gate

from kvcupy import observe
from kvcupy.errors import CaptureError, DeviceError, KvcupyError


@pytest.fixture
def device(each_device):
    return each_device


def fail():
    raise OSError("no such luck")


class Rows:
    """Rows of four numbers on the device, the first of which is all ones."""

    def __init__(self, device, count=4):
        self.device = device
        self.rows = [device.empty_pinned(4, "fp32") for _ in range(count)]
        for row, value in zip(self.rows, (1, *[0] * count), strict=False):
            row[...] = value
        device.synchronize()

    def copy(self, dst, src, stream):
        self.device.copy(self.rows[dst], self.rows[src], stream=stream)

    def __getitem__(self, index):
        return self.rows[index].tolist()[0]


# Order -------------------------------------------------------------------------------------------


def test_a_function_is_between_the_work_before_and_after_it(device):
    stream, rows, seen = device.stream(), Rows(device), []
    rows.copy(1, 0, stream)
    stream.call(lambda: seen.append(rows[1]) or rows.rows[1].fill(2))
    rows.copy(2, 1, stream)
    stream.synchronize()
    assert (seen, rows[2]) == ([1], 2)


@pytest.mark.parametrize("wrong", [7, "main", object()])
def test_what_is_no_stream(device, wrong):
    a, b = np.zeros(2), np.ones(2)
    with pytest.raises(TypeError, match=r"^stream:"):
        device.as_stream(wrong)
    with pytest.raises(TypeError, match=r"^stream:"):
        device.copy(a, b, stream=wrong)
    assert not a.any()
    with pytest.raises(TypeError, match=r"^(event|stream|other):"):
        device.stream().wait(wrong)
    with pytest.raises(TypeError, match=r"^event:"):
        device.stream().record(wrong)


@pytest.mark.parametrize("priority", ["high", 2.5, True, None, 2**40])
def test_a_priority_is_an_int(device, priority):
    """Else the thread of a host stream ends at once, and a wait for the stream never does."""
    with pytest.raises((TypeError, ValueError), match=r"^priority: expected an int"):
        device.stream(priority=priority)
    for valid in (-5, np.int64(0), 5):
        stream = device.stream(priority=valid)
        stream.call(lambda: None)
        stream.synchronize()
        assert stream.priority == valid


def test_an_event_never_recorded_is_done(device):
    event, stream, rows = device.event(), device.stream(), Rows(device)
    assert event.done() and event.error() is None
    event.synchronize()
    stream.wait(event)
    rows.copy(1, 0, stream)
    stream.synchronize()
    assert rows[1] == 1


def test_an_event_is_done_when_its_stream_has_passed_it(device):
    stream = device.stream()
    gate = Gate(stream)
    event = stream.record()
    after = Gate(stream)
    assert not event.done()
    gate.open()
    event.synchronize()
    assert event.done()
    assert not stream.done(), "the event was recorded before the second gate"
    after.open()
    stream.synchronize()


def test_a_wait_is_for_the_point_recorded_when_it_was_called(device):
    first, second, waiting = (device.stream() for _ in range(3))
    event, rows = device.event(), Rows(device)
    first.record(event)
    waiting.wait(event)
    rows.copy(1, 0, waiting)
    gate = Gate(second)
    second.record(event)  # the wait above is not for this
    waiting.synchronize()
    assert rows[1] == 1
    assert not event.done()
    gate.open()
    event.synchronize()


def test_a_wait_for_a_stream_is_for_what_it_holds_so_far(device):
    producer, consumer, rows = device.stream(), device.stream(), Rows(device)
    gate = Gate(producer)
    rows.copy(1, 0, producer)
    consumer.wait(producer)
    rows.copy(2, 1, consumer)
    later = Gate(producer)
    assert not consumer.done()
    gate.open()
    consumer.synchronize()
    assert rows[2] == 1
    later.open()


def test_elapsed_time_needs_two_recorded_events_with_timing(device):
    timed, never, plain = device.event(timing=True), device.event(timing=True), device.event()
    stream = device.stream()
    stream.record(timed)
    stream.record(plain)
    for event, since in itertools.permutations((timed, never, plain), 2):
        with pytest.raises(ValueError, match="timing=True"):
            event.elapsed_us(since)
    with pytest.raises(ValueError, match="timing=True"):
        timed.elapsed_us(None)
    end = device.event(timing=True)
    Gate(stream).open()
    stream.record(end)
    assert end.elapsed_us(timed) > 0


@pytest.mark.parametrize("wait", ["stream", "event", "device"])
def test_a_failure_surfaces_once_at_its_own_stream(device, wait):
    stream, other, seen = device.stream(), device.stream(), []
    for repeat in range(3):
        before = stream.record()
        stream.call(fail)
        event = stream.record()
        before.synchronize()
        other.synchronize()
        waits = {"stream": stream, "event": event, "device": device}
        with pytest.raises(DeviceError, match="no such luck") as error:
            waits[wait].synchronize()
        assert isinstance(error.value.__cause__, OSError)
        stream.call(lambda repeat=repeat: seen.append(repeat))
        for each in (before, event, stream, device):
            each.synchronize()
        assert stream.done()
    assert seen == [0, 1, 2]


# Lifetime ----------------------------------------------------------------------------------------


def use(device, how, stream, target):
    """Let a stream use an array, and return a weak reference to it."""
    source = device.empty_pinned((8,), "fp32")
    source[...] = 1
    if how == "copy":
        device.copy(target[::-1], source, stream=stream)
    elif how == "run":
        device.run(lambda: None, stream, (source,))
    else:
        stream.call(lambda source=source: target.fill(source[0]))
    return weakref.ref(source)


@pytest.mark.parametrize("how", ["copy", "run", "function"])
def test_arrays_live_while_they_are_queued_and_no_longer(device, how):
    stream, target = device.stream(), device.empty_pinned((8,), "fp32")
    gate = Gate(stream)
    watched = use(device, how, stream, target)
    gc.collect()
    assert watched() is not None
    gate.open()
    stream.synchronize()
    device.synchronize()
    gc.collect()
    assert watched() is None
    assert how == "run" or target.all()


@pytest.mark.parametrize("how", ["copy", "run", "function"])
def test_a_graph_keeps_its_arrays(device, how):
    stream, target = device.stream(), device.empty_pinned((8,), "fp32")
    with stream.capture() as graph:
        watched = use(device, how, stream, target)
    gc.collect()
    for _ in range(2):
        assert watched() is not None
        graph.launch(stream)
        stream.synchronize()
    assert how == "run" or target.all()
    del graph
    device.synchronize()
    gc.collect()
    assert watched() is None


# Graphs ------------------------------------------------------------------------------------------


def test_a_graph_reads_its_arrays_at_replay(device):
    stream, rows, seen = device.stream(), Rows(device), []
    with stream.capture() as graph:
        rows.copy(1, 0, stream)
        stream.call(lambda: seen.append(rows[1]))
    device.synchronize()
    assert (seen, rows[1]) == ([], 0), "capturing runs nothing"
    for value in (1, 2, 3):
        rows.rows[0][...] = value
        graph.launch(stream)
        stream.synchronize()
        assert rows[1] == value
    assert seen == [1, 2, 3]


def test_forks_of_a_graph_keep_their_order(device):
    """main -> a -> b, and back b -> a -> main; by a stream and by an event."""
    main, a, b, other = (device.stream() for _ in range(4))
    rows = Rows(device, 5)
    with main.capture() as graph:
        rows.copy(1, 0, main)
        a.wait(main)
        b.wait(a.record())
        rows.copy(2, 1, b)
        a.wait(b)
        rows.copy(3, 2, a)
        main.wait(a)
        rows.copy(4, 3, main)
        assert main.capturing and a.capturing and b.capturing and not other.capturing
    assert not (main.capturing or a.capturing or b.capturing)
    for value, stream in ((5, main), (6, a), (7, other)):
        rows.rows[0][...] = value
        graph.launch(stream)
        stream.synchronize()
        assert rows[4] == value, f"launched on {stream}"


def test_a_graph_is_in_the_order_of_its_stream(device):
    stream, seen = device.stream(), []
    with stream.capture() as graph:
        stream.call(lambda: seen.append("graph"))
    stream.call(lambda: seen.append("before"))
    graph.launch(stream)
    stream.call(lambda: seen.append("after"))
    stream.synchronize()
    assert seen == ["before", "graph", "after"]


@pytest.mark.parametrize("where", ["main", "side"])
def test_a_failure_in_a_graph_surfaces_where_it_was_launched(device, where):
    """The next replay is as good as new."""
    main, side, target = (device.stream() for _ in range(3))
    broken, seen = [True], []
    with main.capture() as graph:
        side.wait(main)
        (main if where == "main" else side).call(lambda: fail() if broken[0] else seen.append(1))
        main.wait(side)
    for repeat in range(2):
        broken[0] = True
        graph.launch(target)
        main.synchronize()
        with pytest.raises(DeviceError, match="luck"):
            target.synchronize()
        broken[0] = False
        graph.launch(target)
        target.synchronize()
        assert seen == [1] * (repeat + 1)


def assert_usable(*streams):
    """Streams run work, and can be captured, as if nothing had been."""
    for stream in streams:
        seen = []
        assert not stream.capturing
        stream.call(lambda seen=seen: seen.append(1))
        stream.synchronize()
        stream.record().synchronize()
        with stream.capture() as graph:
            stream.call(lambda seen=seen: seen.append(2))
        graph.launch(stream)
        stream.synchronize()
        assert seen == [1, 2]


FORBIDDEN = {
    "synchronising the stream": lambda c: c.main.synchronize(),
    "synchronising a forked stream": lambda c: c.side.synchronize(),
    "asking whether the stream is done": lambda c: c.main.done(),
    "asking whether a forked stream is done": lambda c: c.side.done(),
    "synchronising an event": lambda c: c.event.synchronize(),
    "asking whether an event is done": lambda c: c.event.done(),
    "synchronising the device": lambda c: c.device.synchronize(),
    "a second capture": lambda c: c.main.capture().__enter__(),
    "a second capture of a forked stream": lambda c: c.side.capture().__enter__(),
    "launching the graph": lambda c: c.graph.launch(),
    "launching the graph into itself": lambda c: c.graph.launch(c.main),
    "launching the graph elsewhere": lambda c: c.graph.launch(c.other),
    "launching another graph into it": lambda c: c.finished.launch(c.main),
    "waiting for a stream outside": lambda c: c.main.wait(c.other),
    "waiting for an event outside": lambda c: c.main.wait(c.outside),
    "waiting for an event outside in a fork": lambda c: c.side.wait(c.outside),
    "waiting for another capture": lambda c: c.in_another_capture(),
}


class Captured:
    """A capture in progress, of `main` with a fork to `side`."""

    def __init__(self, device):
        self.device, self.seen = device, []
        self.main, self.side, self.other = (device.stream() for _ in range(3))
        self.outside = self.other.record()
        with self.other.capture() as self.finished:
            self.other.call(lambda: None)

    def in_another_capture(self):
        with self.other.capture():
            self.other.wait(self.event)


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_forbidden_in_a_capture(device, what, caught):
    """Refused; a capture that continues all the same is whole, one that ends there is not launched.
    Either way all streams are usable afterwards."""
    c = Captured(device)

    def capture(refused):
        with c.main.capture() as c.graph:
            c.main.call(lambda: c.seen.append("main"))
            c.side.wait(c.main)
            c.side.call(lambda: c.seen.append("side"))
            c.event = c.side.record()
            refused(lambda: FORBIDDEN[what](c))
            c.main.wait(c.side)

    def refused(forbidden):
        with pytest.raises(CaptureError):
            forbidden()

    if caught == "inside":
        capture(refused)
        assert c.seen == []
        c.graph.launch(c.other)
        c.other.synchronize()
        assert c.seen == ["main", "side"]
        assert c.event.done()
        c.other.wait(c.event)
    else:
        with pytest.raises(CaptureError):
            capture(lambda forbidden: forbidden())
        assert c.seen == []
        with pytest.raises(CaptureError, match="did not end well"):
            c.graph.launch(c.main)
    assert_usable(c.main, c.side, c.other)
    device.synchronize()


@pytest.mark.parametrize("joined", ["never", "before its work", "by an event before its work"])
def test_a_fork_must_be_joined(device, joined):
    main, side, seen = device.stream(), device.stream(), []
    side.name = "the fork"
    with pytest.raises(CaptureError, match=r"the fork.* joined"), main.capture() as graph:
        side.wait(main)
        event = side.record()
        if joined == "before its work":
            main.wait(side)
        side.call(lambda: seen.append(1))
        if joined == "by an event before its work":
            main.wait(event)
    with pytest.raises(CaptureError):
        graph.launch(main)
    assert seen == []
    assert_usable(main, side)


def test_an_exception_ends_a_capture_and_lets_go_of_what_it_kept(device):
    main, side, seen = device.stream(), device.stream(), []
    owner = device.empty_pinned((4,), "fp32")
    watched = weakref.ref(owner)
    with pytest.raises(ZeroDivisionError), main.capture() as graph:
        main.call(lambda: seen.append(1))
        side.wait(main)
        device.run(lambda: None, main, (owner,))
        1 / 0  # noqa: B018
    del owner
    with pytest.raises(CaptureError, match="did not end well"):
        graph.launch(main)
    assert seen == []
    assert_usable(main, side)
    del graph
    gc.collect()
    assert watched() is None


class Calls:
    """Writes down who was called with what."""

    def __init__(self):
        self.seen = []

    def before(self, stream):
        self.seen.append(("before", stream))

    def after(self, stream):
        self.seen.append(("after", stream))


class Launches(observe.Observer):
    """Writes the launches of graphs down among the calls."""

    def __init__(self, calls):
        self.calls = calls

    def before(self, operation):
        self.calls.seen.append((operation.name, operation.stream))


def capture(stream, *hooks):
    with stream.capture() as graph:
        for calls in hooks:
            stream.on_launch(calls.before, calls.after)
    return graph


def test_each_launch_is_between_its_calls(device):
    calls, stream, other = Calls(), device.stream(), device.stream()
    graph = capture(stream, calls)
    assert calls.seen == [], "capturing is no launch"
    with observe.attached(Launches(calls)):
        graph.launch(stream)
        graph.launch(other)
    assert calls.seen == [
        ("before", stream), ("graph", stream), ("after", stream),
        ("before", other), ("graph", other), ("after", other),
    ]  # fmt: skip


def test_a_pair_is_called_once_and_pairs_are_nested(device):
    outer, inner, stream = Calls(), Calls(), device.stream()
    inner.seen = outer.seen
    graph = capture(stream, outer, outer, inner, outer)
    graph.launch(stream)
    assert outer.seen == [(what, stream) for what in ("before", "before", "after", "after")]
    order = []
    with stream.capture() as graph:
        for name in "ab":
            stream.on_launch(
                lambda on, name=name: order.append(name),
                lambda on, name=name: order.append(name.upper()),
            )
    graph.launch(stream)
    assert "".join(order) == "abBA"


def test_what_raises_before_prevents_the_launch(device):
    first, second, stream = Calls(), Calls(), device.stream()

    def refuse(on):
        raise KvcupyError("not now")

    with stream.capture() as graph:
        for before, after in (
            (first.before, first.after), (refuse, second.after), (second.before, second.after),
        ):  # fmt: skip
            stream.on_launch(before, after)
    with observe.attached(Launches(first)), pytest.raises(KvcupyError, match="not now"):
        graph.launch(stream)
    assert first.seen == [("before", stream), ("after", stream)], "and no graph"
    assert second.seen == []


class Refuses(Launches):
    def before(self, operation):
        raise KvcupyError("refused")


def test_after_is_called_for_a_launch_that_fails(device):
    calls, stream = Calls(), device.stream()
    graph = capture(stream, calls)
    with observe.attached(Refuses(calls)), pytest.raises(KvcupyError, match="refused"):
        graph.launch(stream)
    assert calls.seen == [("before", stream), ("after", stream)]


def test_a_stream_that_is_not_captured(device):
    stream, calls = device.stream(), Calls()
    with pytest.raises(CaptureError, match="not being captured"):
        stream.on_launch(calls.before, calls.after)
    capture(stream, calls)
    with pytest.raises(CaptureError, match="not being captured"):
        stream.on_launch(calls.before, calls.after)
