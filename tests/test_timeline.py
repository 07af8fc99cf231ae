"""kv.timeline: spans, lanes, the JSON and the picture."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import observe
from kvcupy.timelines.timeline import Timeline, _shared, timeline


class ManualEvent:
    def __init__(self, timing):
        self.timing, self.time_us = timing, None

    def synchronize(self):
        assert self.time_us is not None, "waits for an event that was never recorded"

    def elapsed_us(self, since):
        return self.time_us - since.time_us


class ManualDevice:
    """A device whose clock the test sets."""

    def __init__(self, name="manual"):
        self.name, self.events = name, 0

    def event(self, timing=False):
        self.events += 1
        return ManualEvent(timing)

    def stream(self, priority=0):
        return ManualStream(self, "unused")


class ManualStream:
    capturing, identity = False, ("manual", 1)

    def __init__(self, device, name):
        self.device, self.name, self.now_us = device, name, 0.0

    def record(self, event):
        assert event.timing
        event.time_us = self.now_us
        observe.recorded(event, self)
        return event


def operate(stream, name, start_us, duration_us):
    def run():
        stream.now_us += duration_us

    stream.now_us = start_us
    observe.issue(lambda: observe.Operation(name, stream), run)


@pytest.fixture
def overlap():
    """Two streams, one copy of which overlaps a store for 20 us."""
    device = ManualDevice()
    main, copier = ManualStream(device, "main"), ManualStream(device, "copy")
    with timeline() as result:
        operate(main, "store_kv", 100, 50)
        operate(copier, "copy", 130, 40)
        operate(main, "store_kv", 200, 10)
    return result


def relative(spans):
    origin = spans[0].start_us
    return [(s.name, s.lane, round(s.start_us - origin, 6), round(s.duration_us, 6)) for s in spans]


def test_spans_are_the_distances_of_events_in_order_of_start(overlap):
    assert relative(overlap.spans) == [
        ("store_kv", "main", 0, 50),
        ("copy", "copy", 30, 40),
        ("store_kv", "main", 100, 10),
    ]
    assert overlap.spans == overlap.spans  # asking twice adds nothing
    (both,) = _shared(overlap.spans)
    assert both[1] - both[0] == pytest.approx(20)


def test_captured_and_refused_operations_are_skipped():
    stream = ManualStream(ManualDevice(), "main")

    def refuse():
        raise ValueError("refused")

    with timeline() as result:
        with pytest.raises(ValueError, match="refused"):
            observe.issue(lambda: observe.Operation("bad", stream), refuse)
        stream.capturing = True
        operate(stream, "captured", 0, 1)
        stream.capturing = False
        operate(stream, "graph", 5, 1)
    assert [span.name for span in result.spans] == ["graph"]


def test_json_is_a_perfetto_trace(overlap, tmp_path):
    overlap.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [e for e in events if e["ph"] == "X"]
    assert sorted(names.values()) == ["copy", "main"]
    assert [(e["name"], names[e["tid"]]) for e in bars] == [
        ("store_kv", "main"), ("copy", "copy"), ("store_kv", "main")
    ]  # fmt: skip
    assert bars[1]["ts"] - bars[0]["ts"] == pytest.approx(30)
    assert [e["dur"] for e in bars] == pytest.approx([50, 40, 10])
    assert {e["ph"] for e in events} == {"M", "X"}
    assert len({(e["pid"], e["tid"]) for e in bars}) == 2


def test_what_an_operation_waited_for(tmp_path):
    device = ManualDevice()
    main, copier = ManualStream(device, "main"), ManualStream(device, "copy")
    with timeline() as result:
        operate(copier, "copy", 0, 40)
        event = copier.record(device.event(timing=True))
        for stream in (main, main, copier):
            observe.waited(stream, event)
        operate(main, "store_kv", 50, 10)
        operate(main, "gather_kv", 60, 10)
        operate(copier, "copy", 70, 10)
    assert [span.waits for span in result.spans] == [(), ("copy",), (), ()]
    result.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["args"]["waits for"] for e in events if e["ph"] == "X"] == [[], ["copy"], [], []]


@pytest.mark.parametrize("blocks", ["overlap", "nothing"])
def test_plot_writes_a_picture(blocks, overlap, tmp_path):
    pytest.importorskip("matplotlib")
    (overlap if blocks == "overlap" else Timeline()).plot(tmp_path / "t.png", title="a title")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


# On a device ---------------------------------------------------------------------------------


def test_a_replayed_graph_is_one_span(device):
    stream = device.stream()
    source, target = device.zeros((4096,), np.uint8), device.zeros((4096,), np.uint8)
    device.synchronize()
    with kv.timeline() as result:
        with stream.capture() as graph:
            device.copy(target, source, stream=stream)
            device.copy(source, target, stream=stream)
        graph.launch(stream)
    assert len(result.spans) == 1


def test_a_late_base_event_moves_no_span_before_the_block(device, monkeypatch):
    """The worker of the stream of the base event is held back until the operation has ended."""
    stream, make = device.stream(), device.stream

    def late_stream(priority=0):
        late = make(priority)
        late.enqueue(ended.wait)
        return late

    ended = threading.Event()
    monkeypatch.setattr(device, "stream", late_stream)
    with kv.timeline() as result:
        issued_us = (time.perf_counter() - result._start_s) * 1e6
        stream.call(lambda: time.sleep(0.01))
        stream.synchronize()
        stop_us = (time.perf_counter() - result._start_s) * 1e6
        ended.set()
        stream.call(lambda: time.sleep(0.01))
    first, second = result.spans
    assert issued_us <= first.start_us and first.end_us <= stop_us <= second.start_us
    assert result.spans == [first, second]
