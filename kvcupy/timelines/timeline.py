"""What ran when, on which stream: spans from timing events, as Perfetto JSON and a picture.

    op on stream A   |--event--[ operation ]--event--|
    op on stream B          |--event--[ operation ]--event--|
    base event       |  once per device, in a separate stream, so that nothing precedes it

A device measures distances from its base event. When the base event itself passed is known only
from below, for its stream may have been late: no earlier than it was recorded, and no earlier than
lets every operation start after it was issued. The latest of these bounds is taken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .. import observe
from ..errors import file_path, process_lock
from . import pictures

if TYPE_CHECKING:
    from ..devices.protocol import Event, Stream

# Muted, and neighbours differ in lightness too.
_PALETTE = ("#4C78A8", "#E8A15A", "#72A98F", "#B6566B", "#9C8AC2", "#8C7B68", "#D9C45F", "#7F8C99")


@dataclass(frozen=True)
class Span:
    """One operation as it ran on a stream (its lane). Times count from the start of the block.

    Attributes
    ----------
    num_bytes : read and written, of as many rows as there are slots; None: that depends on what
        arrays on the device hold
    waits : streams whose events the lane waits for since its previous operation
    """

    name: str
    lane: str
    start_us: float
    duration_us: float
    device: str = ""
    num_bytes: int | None = None
    waits: tuple[str, ...] = ()

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


class Timeline(observe.Observer):
    """An observer that brackets each operation with two timing events; made by `timeline`."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._bases: dict[str, Event] = {}
        # When the base event of a device passed, at the earliest, in us since the start.
        self._base_us: dict[str, float] = {}
        self._open: dict[int, tuple[float, Event, Event]] = {}  # issued at, start, end
        # A span whose times are not known yet, issued at, start, end.
        self._ended: list[tuple[Span, float, Event, Event]] = []
        self._measured: list[Span] = []  # times count from the base event
        # The stream that has recorded an event.
        self._origins: WeakKeyDictionary[Event, str] = WeakKeyDictionary()
        self._waits: dict[Stream, list[str]] = {}  # of a stream, since its last operation
        self._lock = process_lock()

    # The observer.

    def before(self, operation: observe.Operation) -> None:
        stream = operation.stream
        if stream.capturing:  # an event in a graph has no time
            return
        device = stream.device
        with self._lock:
            if device.name not in self._bases:
                base = device.event(timing=True)
                self._base_us[device.name] = self._now_us()
                device.stream().record(base)
                self._bases[device.name] = base
        start, end = device.event(timing=True), device.event(timing=True)
        self._open[id(operation)] = (self._now_us(), start, end)
        stream.record(start)

    def after(self, operation: observe.Operation) -> None:
        if id(operation) not in self._open:
            return
        issued_us, start, end = self._open.pop(id(operation))
        stream = operation.stream
        stream.record(end)
        waits = tuple(dict.fromkeys(self._waits.pop(stream, ())))
        span = Span(
            operation.name, stream.name, 0, 0, stream.device.name, operation.num_bytes, waits
        )
        self._ended.append((span, issued_us, start, end))

    def recorded(self, event: Event, stream: Stream) -> None:
        self._origins[event] = stream.name

    def waited(self, stream: Stream, event: Event) -> None:
        origin = self._origins.get(event)
        if origin is not None and origin != stream.name:
            self._waits.setdefault(stream, []).append(origin)

    def _now_us(self) -> float:
        return (time.perf_counter() - self._start_s) * 1e6

    # The result.

    @property
    def spans(self) -> list[Span]:
        """Wait for the operations seen so far and return them, ordered by start.

        Raises
        ------
        DeviceError
            An operation failed on its stream.
        """
        ended, self._ended = self._ended, []
        for span, issued_us, start, end in ended:
            end.synchronize()
            start_us = start.elapsed_us(self._bases[span.device])
            self._base_us[span.device] = max(self._base_us[span.device], issued_us - start_us)
            self._measured.append(
                replace(span, start_us=start_us, duration_us=end.elapsed_us(start))
            )
        measured = [
            replace(span, start_us=self._base_us[span.device] + span.start_us)
            for span in self._measured
        ]
        return sorted(measured, key=lambda span: (span.start_us, span.end_us))

    def save(self, path: str | Path) -> None:
        """Write the spans as trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

        Raises
        ------
        TypeError, ValueError : `path` is not the name of a file
        OSError : it cannot be written
        DeviceError : an operation failed on its stream
        """
        target = file_path(path, "path")
        spans = self.spans
        lanes = _lanes(spans)
        processes = {device: pid for pid, device in enumerate(dict.fromkeys(d for d, _ in lanes))}
        threads = {lane: tid for tid, lane in enumerate(lanes, start=1)}
        events: list[dict[str, Any]] = []

        def describe(kind: str, pid: int, tid: int, **arguments: object) -> None:
            events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments})

        for device, pid in processes.items():
            describe("process_name", pid, 0, name=device)
        for (device, lane), tid in threads.items():
            describe("thread_name", processes[device], tid, name=lane)
            describe("thread_sort_index", processes[device], tid, sort_index=tid)
        for span in spans:
            events.append({
                "ph": "X", "cat": "kvcupy", "name": span.name, "ts": span.start_us,
                "dur": span.duration_us, "pid": processes[span.device],
                "tid": threads[span.device, span.lane],
                "args": {"bytes": span.num_bytes, "waits for": list(span.waits)},
            })  # fmt: skip
        target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def plot(self, path: str | Path, *, title: str | None = None) -> None:
        """Draw a lane per stream and a bar per operation; shade where several streams are busy.

        Raises
        ------
        ImportError
            matplotlib is missing: `pip install matplotlib`.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from error

        spans = self.spans
        lanes = _lanes(spans)
        origin = min((span.start_us for span in spans), default=0.0)
        length = max((span.end_us for span in spans), default=origin + 1.0) - origin
        scale, unit = (1e3, "ms") if length >= 10_000 else (1.0, "µs")
        names = list(dict.fromkeys(span.name for span in spans))
        colours = {name: _PALETTE[i % len(_PALETTE)] for i, name in enumerate(names)}
        shared = _shared(spans)
        shared_us = sum(stop - start for start, stop in shared)

        size = (12, 1.9 + 0.75 * max(len(lanes), 1))
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        axes = figure.subplots()
        for start, stop in shared:
            axes.axvspan((start - origin) / scale, (stop - origin) / scale, color="#F3EBD3", lw=0)
        labels = []
        for span in spans:
            row, left = lanes.index((span.device, span.lane)), (span.start_us - origin) / scale
            width, fill = span.duration_us / scale, colours[span.name]
            axes.barh(row, width, 0.62, left, color=fill, edgecolor="white", linewidth=0.6)
            labels.append(axes.text(left + width / 2, row, span.name, ha="center", va="center"))
            labels[-1].set(fontsize=10, color=_ink(fill), clip_on=True)

        several = len({device for device, _ in lanes}) > 1
        axes.set_yticks(range(len(lanes)), [f"{d} {n}" if several else n for d, n in lanes])
        axes.set(xlim=(0, length / scale), ylim=(max(len(lanes), 1) - 0.45, -0.55))
        axes.set_xlabel(f"time, {unit}", fontsize=11)
        axes.tick_params(axis="x", labelsize=10, color="#999999")
        axes.tick_params(axis="y", labelsize=12, length=0)
        axes.grid(axis="x", color="#E2E2E2", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color("#999999")
        if title:
            figure.suptitle(title, fontsize=13, x=0.01, ha="left")
        keys = [Patch(color=colours[name], label=name) for name in names]
        if shared:
            busy = f"several streams busy: {shared_us / scale:,.4g} of {length / scale:,.4g} {unit}"
            keys.append(Patch(color="#F3EBD3", label=busy))
        if keys:
            figure.legend(handles=keys, loc="outside lower left", ncols=6, frameon=False)

        figure.draw_without_rendering()  # bars now have their final width in pixels
        for span, label in zip(spans, labels, strict=True):
            ends = axes.transData.transform([(0, 0), (span.duration_us / scale, 0)])
            label.set_visible(bool(label.get_window_extent().width + 6 < ends[1][0] - ends[0][0]))
        pictures.save(figure, path)


def _lanes(spans: list[Span]) -> list[tuple[str, str]]:
    """Return (device, lane) pairs in order of first appearance, grouped by device."""
    seen = list(dict.fromkeys((span.device, span.lane) for span in spans))
    return sorted(seen, key=lambda pair: pair[0])


def _shared(spans: list[Span]) -> list[tuple[float, float]]:
    """Return the intervals in which at least two lanes were busy."""
    ends: list[tuple[float, int, tuple[str, str]]] = []
    for span in spans:
        lane = (span.device, span.lane)
        ends += [(span.start_us, 1, lane), (span.end_us, -1, lane)]
    busy: dict[tuple[str, str], int] = {}
    intervals: list[tuple[float, float]] = []
    since: float | None = None
    for moment, step, lane in sorted(ends):
        busy[lane] = busy.get(lane, 0) + step
        several = sum(count > 0 for count in busy.values()) > 1
        if several and since is None:
            since = moment
        elif not several and since is not None:
            if moment > since:
                intervals.append((since, moment))
            since = None
    return intervals


def _ink(fill: str) -> str:
    """Return the text colour with enough contrast on `fill`, by its luma."""
    red, green, blue = bytes.fromhex(fill[1:])
    return "#222222" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


@contextmanager
def timeline() -> Iterator[Timeline]:
    """Time every operation issued within the block.

    Returns
    -------
    Timeline : with `.spans`, `.save("t.json")` for Perfetto, `.plot("t.png")`

    Notes
    -----
    Stream: two timing events are recorded in each operation's stream; nothing waits until the
    result is asked for. Capture: operations put into a graph are not timed.
    """
    result = Timeline()
    with observe.attached(result):
        yield result
