"""The batches in which calls go out, and the two directions that they go in.

A batch of loads: wait for the fences | start | layer 0, event | layer 1, event | ... | end
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CaptureError, DeviceError
from ..ops import transfer
from .completion import waiting_stream

if TYPE_CHECKING:
    from ..devices.protocol import Event, Stream
    from .engine import TransferEngine

Pages = np.ndarray[Any, np.dtype[np.int64]]


class Batch:
    """Calls of one direction that go out as one: a start, an event a layer (loads), an end.

    It is the `Completion` that allocators ask before they hand out a page that it touches: a failed
    one may still touch pages. It does not keep the engine: calls that were queued and never sent
    touch nothing. While a stream of the engine is captured, calls stay queued, and it raises
    `CaptureError`.

    Attributes
    ----------
    kind : "load" or "save"
    calls : number and page count of each call
    device_pages, host_pages : a list of pages a call, until the batch is done
    fences : events of the compute streams, to wait for before any page is touched
    cause, layer : why the batch has failed, and in which layer, where that is known
    """

    def __init__(self, engine: weakref.ref[TransferEngine], kind: str, stream: Stream) -> None:
        self._engine = engine
        self.kind = kind
        self.stream = stream
        self.calls: list[tuple[int, int]] = []
        self.device_pages: list[Pages] = []
        self.host_pages: list[Pages] = []
        self.fences: list[Event] = []
        self.start: Event | None = None
        self.layer_events: list[Event] = []
        self.end: Event | None = None
        self.issued = False
        self.cause: BaseException | None = None
        self.layer: int | None = None
        self._joined = False

    def add(self, number: int, device_pages: Pages, host_pages: Pages, fence: Event) -> None:
        """Take one more call along."""
        self.calls.append((number, len(device_pages)))
        self.device_pages.append(device_pages)
        self.host_pages.append(host_pages)
        self.fences.append(fence)

    def release(self) -> None:
        """Let go of what only an unfinished batch needs."""
        self.device_pages, self.host_pages, self.fences = [], [], []

    def event(self, layer: int | None) -> Event:
        """Return the event after which a layer, or everything, is in place."""
        if self.end is None:
            raise DeviceError(f"{self.name()}: waited for while it is being issued")
        return self.end if layer is None or self.kind == "save" else self.layer_events[layer]

    @property
    def failure(self) -> DeviceError | None:
        return self.failure_of(None)

    def done(self) -> bool:
        """Return whether no page is touched any more; queued calls go out first."""
        if not self.issued:
            engine = self._engine()
            if engine is None:
                return True
            if engine.telling:  # an allocator tidies up in the middle of a call
                return False
            engine.send()
            if not self.issued:
                return False
        try:
            return self.stream.done() if self.end is None else self.end.done()
        except CaptureError:
            return False
        except DeviceError:  # nothing that was issued before it touches a page any more
            return True

    def synchronize(self) -> None:
        """Wait until no page is touched any more; queued calls go out first."""
        if not self.issued and (engine := self._engine()) is not None:
            engine.send()
        if self.issued:
            self.join()

    def wait(self, stream: Any = None) -> None:
        self.block(waiting_stream(self.stream.device, stream, "a transfer"), None)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self.block(waiting_stream(self.stream.device, stream, "a transfer"), layer)

    def block(self, stream: Stream, layer: int | None, number: int | None = None) -> None:
        """Let a stream wait for a layer or for all; DeviceError names one call, or all."""
        self.raise_failure(number)
        event = self.event(layer)
        self.note(event)  # a stream would not be held up by a failure that has surfaced
        self.raise_failure(number)
        try:
            stream.wait(event)
        except DeviceError as error:
            self.fail(error.__cause__ or error)
        self.note(event)
        self.raise_failure(number)

    def join(self) -> None:
        """Wait until the stream has passed all that was issued, and note what failed in it."""
        if self._joined:  # what a stream does later is none of the batch's
            return
        failure: BaseException | None = None
        try:
            (self.stream if self.end is None else self.end).synchronize()
        except DeviceError as error:
            failure = error.__cause__ or error
        if self.end is not None:
            self.note(self.end)  # it knows the layer
        if failure is not None:
            self.fail(failure)
        self._joined = True

    def note(self, event: Event) -> None:
        """Note the failure of work before `event`, if it is passed, and let it surface.

        Work behind a failure is skipped until it surfaces; here it does, for every transfer of
        the batch raises it from now on.
        """
        if (error := event.error()) is None:
            return
        with suppress(DeviceError):
            event.synchronize()
        failed = [passed.error() is not None for passed in self.layer_events]
        before = self.start is not None and self.start.error() is not None
        self.fail(error, failed.index(True) if True in failed and not before else None)

    def fail(self, cause: BaseException, layer: int | None = None) -> None:
        """Note why the batch failed; the first cause stays."""
        if self.cause is None:
            self.layer, self.cause = layer, cause

    def name(self, number: int | None = None) -> str:
        """Name one call, or all: `load 7: 12 pages`."""
        calls = [(n, count) for n, count in self.calls if number in (None, n)]
        names = ", ".join(f"{self.kind} {n}" for n, _ in calls)
        pages = sum(count for _, count in calls)
        return f"{names}: {pages} page{'' if pages == 1 else 's'}"

    def failure_of(self, number: int | None) -> DeviceError | None:
        """Return the failure of the batch, if it has failed, naming one call, or all."""
        if self.cause is None:
            return None
        where = "" if self.layer is None else f", layer {self.layer}"
        said = f"{type(self.cause).__name__}: {self.cause}"
        failure = DeviceError(f"{self.name(number)}{where}: {said}")
        failure.__cause__ = self.cause
        return failure

    def raise_failure(self, number: int | None = None) -> None:
        """Raise the failure of the batch, if it has failed."""
        if (failure := self.failure_of(number)) is not None:
            raise failure from failure.__cause__


class Lane:
    """One direction: its stream, the batch that calls queue up in, and those in flight.

    Attributes
    ----------
    kind : "load" or "save"
    stream : where its batches go out, in order
    pending : the batch that has not gone out, if calls are queued
    page_bytes : of a page of all layers, as the source stores them
    """

    def __init__(
        self,
        engine: TransferEngine,
        kind: str,
        stream: Any,
        prepared: Sequence[Any],
        sizes: Sequence[int],
    ) -> None:
        device = engine.device
        self.kind = kind
        self.stream: Stream = device.stream() if stream is None else device.as_stream(stream)
        if stream is None:
            self.stream.name = kind
        self.pending: Batch | None = None
        self.page_bytes: int = sum(one.page_bytes for one in prepared)
        self._engine = weakref.ref(engine)
        self._device = device
        self._own = stream is None
        self._prepared = prepared  # a load's layers one by one, or all that a save moves
        self._in_flight: list[Batch] = []
        self._marks = [np.zeros(size, np.bool_) for size in sizes]  # pages pending, on each side

    def queue(self, number: int, device_pages: Pages, host_pages: Pages, fence: Event) -> Batch:
        """Let a call go out with the pending batch."""
        if self.pending is None:
            self.pending = Batch(self._engine, self.kind, self.stream)
        self.pending.add(number, device_pages, host_pages, fence)
        self._mark(device_pages, host_pages, True)
        return self.pending

    def conflicts(self, kind: str, device_pages: Pages, host_pages: Pages) -> bool:
        """Return whether a call touches pages of the pending batch, and one of the two writes."""
        if self.pending is None:
            return False
        for mover, marks, pages in zip(("load", "save"), self._marks, (device_pages, host_pages),
                                       strict=True):  # fmt: skip
            if mover in (kind, self.kind) and marks[pages].any():
                return True
        return False

    def send(self, other: Lane) -> Batch:
        """Put the pending batch on the stream and return it; what fails is noted in it.

        Parameters
        ----------
        other : the other direction. What of it is in flight on the same pages is waited for
        """
        self._tidy()
        other._tidy()
        batch, self.pending = self.pending, None
        assert batch is not None
        try:
            self._enqueue(batch, other)
        except BaseException as error:
            begun = self.kind == "load" and batch.start is not None
            batch.fail(error, len(batch.layer_events) if begun else None)
            if not isinstance(error, Exception):
                raise
        finally:
            self._close(batch)
        return batch

    def _enqueue(self, batch: Batch, other: Lane) -> None:
        sides = (joined(batch.device_pages), joined(batch.host_pages))
        for fence in batch.fences:
            self.stream.wait(fence)
            if (error := fence.error()) is not None:  # one that has surfaced holds no stream up
                batch.fail(error)
                return
        for earlier in other._in_flight if other.stream != self.stream else ():
            if self._touches(earlier):
                self.stream.wait(other.stream if earlier.end is None else earlier.end)
        pairs = transfer.PagePairs(*(sides if self.kind == "save" else sides[::-1]))
        batch.start = self.stream.record(self._device.event(timing=True))
        for layer, prepared in enumerate(self._prepared):
            if self.kind == "save":
                prepared.issue(pairs, self.stream, name="save")
            else:
                prepared.issue(pairs, self.stream, name=f"load {layer}")
                batch.layer_events.append(self.stream.record(self._device.event()))

    def _close(self, batch: Batch) -> None:
        """End a batch, whatever has become of it."""
        try:
            batch.end = self.stream.record(self._device.event(timing=True))
        except Exception as error:  # the stream then tells when the batch is over
            batch.fail(error)
        for pages in zip(batch.device_pages, batch.host_pages, strict=True):
            self._mark(*pages, False)
        batch.fences = []
        batch.issued = True
        self._in_flight.append(batch)

    def _tidy(self) -> None:
        """Let go of the batches that are over.

        On a stream of the engine's own a failure surfaces here too: nobody else may ever look.
        """
        for batch in [batch for batch in self._in_flight if batch.done()]:
            if self._own:
                batch.join()
            batch.release()
            self._in_flight.remove(batch)

    def _mark(self, device_pages: Pages, host_pages: Pages, pending: bool) -> None:
        self._marks[0][device_pages] = pending
        self._marks[1][host_pages] = pending

    def _touches(self, earlier: Batch) -> bool:
        """Return whether a batch in flight shares a page with the one that is pending."""
        sides = (earlier.device_pages, earlier.host_pages)
        return any(
            bool(marks[pages].any())
            for marks, lists in zip(self._marks, sides, strict=True)
            for pages in lists
        )


def joined(pages: Sequence[Pages]) -> Pages:
    """Return the page lists of several calls end to end."""
    return pages[0] if len(pages) == 1 else np.concatenate(pages)
