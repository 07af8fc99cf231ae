"""What a graph calls around its launches, on either device."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvcupy import observe
from kvcupy.devices.host import HostDevice
from kvcupy.errors import CaptureError, DeviceError, KvcupyError


@pytest.fixture
def device(each_device):
    return each_device


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


def test_no_stream_is_the_current_one(device):
    calls = Calls()
    capture(device.stream(), calls).launch()
    assert calls.seen == [(what, device.as_stream(None)) for what in ("before", "after")]


def test_the_calls_come_from_the_thread_that_launches(device):
    """Not in the order of the stream, where nothing can be put on streams."""
    stream, seen = device.stream(), []
    with stream.capture() as graph:
        stream.on_launch(
            lambda on: on.call(lambda: seen.append("before")),
            lambda on: on.call(lambda: seen.append("after")),
        )
        if device.kind == "host":
            stream.call(lambda: seen.append("graph"))
    graph.launch(stream)
    stream.synchronize()
    assert [what for what in seen if what != "graph"] == ["before", "after"]
    assert device.kind != "host" or seen[1] == "graph"


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


def test_a_fork_has_the_graph_of_its_origin(device):
    calls, main, side = Calls(), device.stream(), device.stream()
    with main.capture() as graph:
        side.wait(main)
        side.on_launch(calls.before, calls.after)
        main.on_launch(calls.before, calls.after)
        main.wait(side)
    graph.launch(main)
    assert calls.seen == [("before", main), ("after", main)]


def test_graphs_have_their_own_calls(device):
    calls, stream = Calls(), device.stream()
    capture(stream, calls)
    capture(stream).launch(stream)
    assert calls.seen == []


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


def test_after_is_called_for_work_that_fails_on_the_calling_thread():
    device, calls = HostDevice(), Calls()
    stream, inline = device.stream(), device.as_stream(None)

    def fail():
        raise OSError("no such luck")

    with stream.capture() as graph:
        stream.on_launch(calls.before, calls.after)
        stream.call(fail)
    with pytest.raises(DeviceError, match="luck"):
        graph.launch()
    assert calls.seen == [("before", inline), ("after", inline)]


def test_what_raises_after(device):
    """The launch has been made, and the others are called all the same."""
    calls, stream = Calls(), device.stream()

    def fail(on):
        raise KvcupyError("too late")

    with stream.capture() as graph:
        stream.on_launch(calls.before, calls.after)
        stream.on_launch(calls.before, fail)
    with observe.attached(Launches(calls)), pytest.raises(KvcupyError, match="too late"):
        graph.launch(stream)
    assert [what for what, _ in calls.seen] == ["before", "before", "graph", "after"]


def test_such_a_graph_is_no_part_of_another(device):
    """Its launches would come without its calls."""
    calls, stream, other = Calls(), device.stream(), device.stream()
    graph = capture(stream, calls)
    refusal = pytest.raises(CaptureError, match=f"{other.name} is being captured: a graph")
    with other.capture() as outer, refusal:
        graph.launch(other)
    outer.launch(other)
    assert calls.seen == []


def test_a_stream_that_is_not_captured(device):
    stream, calls = device.stream(), Calls()
    with pytest.raises(CaptureError, match="not being captured"):
        stream.on_launch(calls.before, calls.after)
    capture(stream, calls)
    with pytest.raises(CaptureError, match="not being captured"):
        stream.on_launch(calls.before, calls.after)


def test_the_calling_thread_is_never_captured():
    with pytest.raises(CaptureError, match="calling thread"):
        HostDevice().as_stream(None).on_launch(print, print)


def test_a_graph_keeps_what_it_calls(device):
    stream, calls = device.stream(), Calls()
    graph = capture(stream, calls)
    gone = weakref.ref(calls)
    del calls
    gc.collect()
    assert gone() is not None
    graph.launch(stream)
    stream.synchronize()
    del graph
    gc.collect()
    assert gone() is None
