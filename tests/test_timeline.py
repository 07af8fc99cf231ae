"""kv.timeline: spans, lanes, the JSON and the picture."""

from __future__ import annotations

import builtins
import html.parser
import json
import threading
import time

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import observe
from kvcupy.timelines.timeline import Span, Timeline, timeline


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


def test_operations_outside_the_block_are_not_seen(overlap):
    stream = ManualStream(ManualDevice(), "main")
    operate(stream, "late", 0, 1)
    assert "late" not in {span.name for span in overlap.spans}
    assert stream.device.events == 0


def test_a_stream_under_capture_is_skipped():
    stream = ManualStream(ManualDevice(), "main")
    with timeline() as result:
        stream.capturing = True
        operate(stream, "captured", 0, 1)
        stream.capturing = False
        operate(stream, "graph", 5, 1)
    assert [span.name for span in result.spans] == ["graph"]


def test_an_operation_that_was_refused_leaves_no_span():
    stream = ManualStream(ManualDevice(), "main")

    def refuse():
        raise ValueError("refused")

    with timeline() as result:
        with pytest.raises(ValueError, match="refused"):
            observe.issue(lambda: observe.Operation("bad", stream), refuse)
        operate(stream, "good", 0, 1)
    assert [span.name for span in result.spans] == ["good"]


def test_one_base_a_device_and_two_events_an_operation():
    devices = [ManualDevice("first"), ManualDevice("second")]
    with timeline() as result:
        for device in devices:
            for _ in range(3):
                operate(ManualStream(device, "main"), "copy", 0, 1)
    assert [device.events for device in devices] == [7, 7]
    assert {span.device for span in result.spans} == {"first", "second"}


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


def test_bytes_of_an_operation():
    device = kv.device("host")
    k, v = (device.zeros((4, 8, 2, 16), "fp16") for _ in range(2))
    key, value = (np.ones((5, 2, 16), np.float16) for _ in range(2))
    slots = np.arange(5)
    with timeline() as result:
        kv.store_kv(key, value, k, v, slots)
        kv.gather_kv(k, v, slots)
    rows = 2 * key.nbytes
    assert [span.num_bytes for span in result.spans] == [2 * rows + slots.nbytes] * 2


class Page(html.parser.HTMLParser):
    """The elements of a page, and what it refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.spans, self.references = [], [], []
        self.feed(text)
        assert self.open == [], "elements that are not closed"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.references += [attributes[name] for name in ("src", "href") if name in attributes]
        if attributes.get("class") == "span":
            self.spans.append(attributes)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_needs_nothing_else(overlap, tmp_path):
    overlap.save(tmp_path / "t.HTML", title="<stores> & copies")
    text = (tmp_path / "t.HTML").read_text()
    page = Page(text)
    assert not page.references and "http" not in text and "url(" not in text
    assert "&lt;stores&gt; &amp; copies" in text and "busy for 20 µs" in text
    styles = [dict(x.split(":") for x in s["style"].split(";")) for s in page.spans]
    assert [(x["left"], x["width"]) for x in styles] == [
        ("0.0000%", "45.4545%"), ("90.9091%", "9.0909%"), ("27.2727%", "36.3636%")
    ]  # fmt: skip
    assert (
        page.spans[2]["data-details"] == "copy on copy: 40 µs from 30 µs\n0 bytes read and written"
    )


def test_page_of_nothing(tmp_path):
    with timeline() as result:
        pass
    result.save(tmp_path / "t.html")
    assert "0 operations on 0 streams" in (tmp_path / "t.html").read_text()


def test_lanes_of_the_same_name_on_two_devices_stay_apart(tmp_path):
    with timeline() as result:
        for name in ("cuda:0", "cuda:1"):
            operate(ManualStream(ManualDevice(name), "main"), "copy", 0, 1)
    result.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert len({e["pid"] for e in events if e["ph"] == "X"}) == 2
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"cuda:0", "cuda:1"}


def test_shared_time_is_where_two_lanes_are_busy(overlap):
    from kvcupy.timelines.timeline import _shared

    spans = overlap.spans
    origin = spans[0].start_us
    stretches = [(round(a - origin, 6), round(b - origin, 6)) for a, b in _shared(spans)]
    assert stretches == [(30, 50)]


def test_bars_that_touch_share_no_time():
    from kvcupy.timelines.timeline import _shared

    device = ManualDevice()
    with timeline() as result:
        operate(ManualStream(device, "a"), "copy", 0, 10)
        operate(ManualStream(device, "b"), "copy", 10, 10)
    assert _shared(result.spans) == []


@pytest.mark.parametrize("blocks", ["overlap", "nothing"])
def test_plot_writes_a_picture(blocks, overlap, tmp_path):
    pytest.importorskip("matplotlib")
    (overlap if blocks == "overlap" else Timeline()).plot(tmp_path / "t.png", title="a title")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_plot_names_what_to_install(overlap, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        overlap.plot(tmp_path / "t.png")


# On a device ---------------------------------------------------------------------------------


def test_what_runs_at_the_same_time_overlaps(device):
    """Two streams whose functions wait for one another can only have run together."""
    meeting = threading.Barrier(2, timeout=30)
    first, second = device.stream(), device.stream()
    first.name, second.name = "first", "second"
    with kv.timeline() as result:
        first.call(meeting.wait)
        second.call(meeting.wait)
        device.synchronize()
    a, b = sorted(result.spans, key=lambda span: span.lane)
    assert (a.lane, b.lane) == ("first", "second")
    assert max(a.start_us, b.start_us) < min(a.end_us, b.end_us)


def test_what_waits_comes_after(device):
    first, second = device.stream(), device.stream()
    first.name, second.name = "first", "second"
    with kv.timeline() as result:
        first.call(lambda: time.sleep(0.01))
        second.wait(first)
        second.call(lambda: time.sleep(0.002))
    a, b = result.spans
    assert (a.lane, b.lane) == ("first", "second")
    assert a.duration_us >= 10_000 and b.duration_us >= 2_000
    assert b.start_us >= a.end_us
    assert a.start_us > 0


def test_operations_carry_their_names_and_results_are_unchanged(device):
    stream = device.stream()
    stream.name = "main"
    key = device.asarray(np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4))
    caches = [device.zeros((8, 3, 4), np.float32) for _ in range(2)]
    slots = device.asarray(np.array([5, 1], np.int64))
    device.synchronize()
    with kv.timeline() as result:
        kv.store_kv(key, key, *caches, slots, stream=stream)
        device.copy(caches[1], caches[0], stream=stream)
    assert [(span.name, span.lane) for span in result.spans] == [
        ("store_kv", "main"), ("copy", "main")
    ]  # fmt: skip
    for cache in caches:
        np.testing.assert_array_equal(device.to_numpy(cache)[[5, 1]], device.to_numpy(key))


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


def test_a_call_without_a_stream_has_a_lane(device):
    source, target = device.zeros((64,), np.uint8), device.zeros((64,), np.uint8)
    with kv.timeline() as result:
        device.copy(target, source)
    (span,) = result.spans
    assert span.name == "copy" and span.lane


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
        issued_us = (time.perf_counter() - result.start_s) * 1e6
        stream.call(lambda: time.sleep(0.01))
        stream.synchronize()
        stop_us = (time.perf_counter() - result.start_s) * 1e6
        ended.set()
        stream.call(lambda: time.sleep(0.01))
    first, second = result.spans
    assert issued_us <= first.start_us and first.end_us <= stop_us <= second.start_us
    assert result.spans == [first, second]


# Spans of others ---


def test_spans_of_another_process_join_in_order(device, tmp_path):
    before_s = time.perf_counter()
    with timeline() as recorded:
        operate(device.stream(), "own", 0, 0)
    assert before_s <= recorded.start_s <= time.perf_counter()
    own = [span.name for span in recorded.spans]
    late, early = (Span(name, "lane", us, 2.0, "other") for name, us in (("z", 1e9), ("a", -1e9)))
    recorded.add(iter([late, early]))
    assert [span.name for span in recorded.spans] == ["a", *own, "z"]
    recorded.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"a", "z"} <= {event["name"] for event in events if event["ph"] == "X"}


@pytest.mark.parametrize("spans", [5, [("a", "lane", 0.0, 1.0)], None])
def test_what_is_no_span_is_not_added(spans):
    recorded = Timeline()
    with pytest.raises(TypeError, match=r"^spans"):
        recorded.add(spans)
    assert recorded.spans == []
