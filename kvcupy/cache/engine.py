"""The transfer engine: pages between a pool of the device and one of the host, in the background.

    compute stream   | ... fence |            wait_layer(0)[ layer 0 ] wait_layer(1)[ layer 1 ] ...
    load stream      wait, start | load 0, event | load 1, event | ... | end
    save stream      wait, start | save | end

There is no thread of its own: calls are queued, and enqueued from whichever thread sends them out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CaptureError, DeviceError
from ..ops import checks, transfer
from ..pickling import ProcessLocal
from .completion import waiting_stream

if TYPE_CHECKING:
    from ..devices.protocol import Device, Event, Stream
    from .pool import Pool

Pages = np.ndarray[Any, np.dtype[np.int64]]

_POOLS = ("device_pool", "host_pool")
_SIDES = ("device_pages", "host_pages")


class TransferEngine(ProcessLocal):
    """Moves pages between two pools on streams of its own, merged, ordered and layer by layer.

    Parameters
    ----------
    device_pool, host_pool : pools of one device, alike in all but layout, placement and page count
    load_stream, save_stream : Stream, or a CuPy or torch stream; None: one of its own
    method, max_blocks, convert : as for `transfer_pages`

    Attributes
    ----------
    device, device_pool, host_pool, load_stream, save_stream

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Stream: a call is ordered behind what `after` holds when it is made, and calls that touch the
    same pages keep their order. What computes on pages that a transfer writes, or overwrites those
    that it reads, waits by the handle. Pages that two engines share are ordered by `after` alone.
    Calls queued between two flushes go out as one per direction. A load of several calls is in
    place layer by layer for all of them at once.
    Lifetime: pages freed to the pools' allocators in flight come back when they are no longer
    touched. Calls that are still queued when engine and handles go are dropped.
    Threads may share an engine. Capture: refused; a transfer is outside of every capture.
    Source: sgl-project/sglang `python/sglang/srt/managers/cache_controller.py` (an event a layer).

    Examples
    --------
    >>> from kvcupy import KVPool
    >>> pools = [KVPool(4, 2, 3, 1, 8, dtype="fp16", device="host") for _ in range(2)]
    >>> engine = TransferEngine(*pools)
    >>> pools[0].k(2)[1] = 5
    >>> engine.save([1], [3]).synchronize()
    >>> float(pools[1].k(2)[3, 0, 0, 0])
    5.0
    """

    def __init__(
        self,
        device_pool: Pool,
        host_pool: Pool,
        *,
        load_stream: Any = None,
        save_stream: Any = None,
        method: str = "auto",
        max_blocks: int | None = None,
        convert: bool = False,
    ) -> None:
        if device_pool is host_pool:
            raise ValueError("host_pool: expected another pool than device_pool")
        options: Any = {"method": method, "max_blocks": max_blocks, "convert": convert}
        save = transfer.prepare(device_pool, host_pool, names=_POOLS, **options)
        loads = [
            transfer.prepare(host_pool, device_pool, layers=[i], names=_POOLS[::-1], **options)
            for i in range(device_pool.num_layers)
        ]
        self.device: Device = device_pool.device
        self.device_pool = device_pool
        self.host_pool = host_pool
        sizes = (device_pool.num_pages, host_pool.num_pages)
        with _stream_named("load_stream"):
            self._load = Lane(self, "load", load_stream, loads, sizes)
        with _stream_named("save_stream"):
            self._save = Lane(self, "save", save_stream, [save], sizes)
        self._calls = 0
        self._telling = 0
        # Held while work is put on the streams. Reentrant, for freeing memory may call back.
        self._lock = threading.RLock()

    @property
    def load_stream(self) -> Stream:
        return self._load.stream

    @property
    def save_stream(self) -> Stream:
        return self._save.stream

    def save(self, device_pages: Any, host_pages: Any, *, after: Any = None) -> Transfer:
        """Queue a copy of pages of every layer from the device pool to the host pool.

        Parameters
        ----------
        device_pages, host_pages : int32 or int64 (N,) of the host, or lists of ints, copied by the
            call. A pair with a negative page is skipped
        after : the compute stream that has written the pages: Stream, or a CuPy or torch stream;
            None: the one that is current in CuPy or torch, as for `transfer_pages`. What it is
            given after the call does not hold the copy up

        Raises
        ------
        TypeError, ValueError : an argument does not fit, or a page is past the end
        CaptureError : a stream is being captured
        """
        return self._queue(self._save, device_pages, host_pages, after)

    def load(self, host_pages: Any, device_pages: Any, *, after: Any = None) -> Transfer:
        """Queue a copy of pages of every layer from the host pool to the device pool.

        Parameters
        ----------
        host_pages, device_pages : as in `save`
        after : the compute stream that has read the pages, or written them, for the last time

        Raises
        ------
        TypeError, ValueError, CaptureError : as in `save`
        """
        return self._queue(self._load, device_pages, host_pages, after)

    def flush(self) -> None:
        """Send all queued calls out, then raise DeviceError if that failed for some of them."""
        for batch in self.send():
            batch.raise_failure()

    def send(self) -> list[Batch]:
        """Send all queued calls out, and return the batches; their handles tell of failures."""
        with self._lock:
            self._refuse_capture()
            directions = ((self._load, self._save), (self._save, self._load))
            return [lane.send(other) for lane, other in directions if lane.pending is not None]

    def layer_number(self, layer: Any) -> int:
        """Check the number of a layer."""
        checks.require_int(layer, "layer")
        if not 0 <= layer < self.device_pool.num_layers:
            most = self.device_pool.num_layers - 1
            raise ValueError(f"layer: expected 0 to {most}, got {layer}")
        return int(layer)

    def page_bytes(self, kind: str) -> int:
        """Return the bytes of a page of all layers, as its source stores them."""
        return (self._load if kind == "load" else self._save).page_bytes

    @property
    def telling(self) -> bool:
        """Whether an allocator is being told of a call: what it polls then is none of the caller's
        doing, and sends nothing out."""
        return self._telling > 0

    def _queue(self, lane: Lane, device_pages: Any, host_pages: Any, after: Any) -> Transfer:
        pages = self._page_lists(lane.kind, device_pages, host_pages)
        with _stream_named("after"):
            on = self.device.as_stream(after)
        if on.capturing:
            raise CaptureError("after: a transfer cannot be part of a capture")
        with self._lock:
            self._refuse_capture()
            if any(one.conflicts(lane.kind, *pages) for one in (self._load, self._save)):
                self.send()
            batch = None
            if len(pages[0]):
                batch = lane.queue(self._calls + 1, *pages, on.record())
            self._calls += 1
            made = Transfer(self, lane.kind, self._calls, len(pages[0]), batch)
        if batch is not None:
            self._tell(pages, batch)
        return made

    def _page_lists(self, kind: str, device_pages: Any, host_pages: Any) -> tuple[Pages, Pages]:
        """Check and copy the lists of a call; leave the pairs out that are skipped."""
        given, names = (device_pages, host_pages), _SIDES
        if kind == "load":
            given, names = given[::-1], names[::-1]
        pairs = transfer.PagePairs(*given, names)
        lists: dict[str, Pages] = {}
        for name, pages in zip(names, (pairs.src, pairs.dst), strict=True):
            if pages is None:
                raise TypeError(f"{name}: expected a list or an array of the host")
            lists[name] = pages
        device, host = (lists[name] for name in _SIDES)
        if pairs.count and min(device.min(), host.min()) < 0:
            meant = (device >= 0) & (host >= 0)
            device, host = device[meant], host[meant]
        pools = (self.device_pool, self.host_pool)
        for name, pages, pool in zip(_SIDES, (device, host), pools, strict=True):
            if len(pages) and (last := pages.max()) >= pool.num_pages:
                raise ValueError(f"{name}: expected pages below {pool.num_pages}, got {last}")
        return device, host

    def _tell(self, pages: tuple[Pages, Pages], batch: Batch) -> None:
        """Hold pages back, should they be freed. Not with the lock held: allocators have theirs."""
        with self._lock:
            self._telling += 1
        try:
            self.device_pool.allocator.busy(pages[0], batch)
            self.host_pool.allocator.busy(pages[1], batch)
        finally:
            with self._lock:
                self._telling -= 1

    def _refuse_capture(self) -> None:
        for lane in (self._load, self._save):
            if lane.stream.capturing:
                raise CaptureError(f"{lane.kind}_stream: a transfer cannot be part of a capture")


# --- What a call hands back ---


class Transfer(ProcessLocal):
    """One call of `TransferEngine.save` or `load`: a `Completion`.

    Whatever is asked here but `num_bytes` sends the queued calls out first. After a failure
    everything but `num_bytes` raises `DeviceError`, which names the transfer and has the cause;
    its destination pages are undefined.

    Attributes
    ----------
    kind : "load" or "save"
    number : counts the calls of the engine, from 1
    num_pages : pairs of pages, the skipped ones left out
    num_bytes : bytes that it moves, K and V counted once, as the source stores them
    """

    def __init__(
        self, engine: TransferEngine, kind: str, number: int, num_pages: int, batch: Batch | None
    ) -> None:
        self.kind = kind
        self.number = number
        self.num_pages = num_pages
        self.num_bytes = num_pages * engine.page_bytes(kind)
        self._engine = engine
        self._batch = batch  # None: no pages, so nothing to wait for

    def __repr__(self) -> str:
        batch, state = self._batch, "in flight"
        if batch is None:
            state = "done"
        elif not batch.issued:
            state = "queued"
        elif batch.cause is not None:
            state = "failed"
        elif batch.done():
            state = "done"
        plural = "" if self.num_pages == 1 else "s"
        return f"<{self.kind} {self.number}: {self.num_pages} page{plural}, {state}>"

    @property
    def failure(self) -> DeviceError | None:
        """Why it has failed, as far as that is known. Neither waits nor raises, and sends nothing
        out."""
        return None if self._batch is None else self._batch.failure_of(self.number)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let later work of a compute stream wait until one layer is in place.

        Parameters
        ----------
        layer : 0 to num_layers - 1. A save is waited for as a whole
        stream : Stream, or a CuPy or torch stream; None: the current one. The host does not
            wait, except where the stream is the calling thread itself

        Raises
        ------
        TypeError, ValueError : `layer` is none
        CaptureError : the stream is being captured; a transfer is outside of every capture
        DeviceError : the transfer has failed
        """
        self._wait(stream, self._engine.layer_number(layer))

    def wait(self, stream: Any = None) -> None:
        """Let later work of a compute stream wait for all of it; otherwise like `wait_layer`."""
        self._wait(stream, None)

    def done(self) -> bool:
        """Return whether the transfer is done; DeviceError if it has failed."""
        batch = self._sent()
        if batch is None:
            return True
        over = batch.done()
        if over:
            batch.join()
        batch.raise_failure(self.number)
        return over

    def synchronize(self) -> None:
        """Wait until the transfer is done; DeviceError if it has failed, once that is over too."""
        batch = self._sent()
        if batch is not None:
            batch.join()
            batch.raise_failure(self.number)

    @property
    def elapsed_us(self) -> float:
        """Wait, and return the microseconds that the batch took: all that went out together."""
        self.synchronize()
        if self._batch is None or self._batch.end is None:
            return 0.0
        return self._batch.end.elapsed_us(self._batch.start)

    @property
    def gb_per_s(self) -> float:
        """Wait, and return 1e9 bytes a second: `num_bytes` over `elapsed_us`."""
        elapsed_us = self.elapsed_us
        return self.num_bytes / elapsed_us / 1e3 if elapsed_us > 0 else 0.0

    def _wait(self, stream: Any, layer: int | None) -> None:
        waiting = waiting_stream(self._engine.device, stream, "a transfer")
        batch = self._sent()
        if batch is not None:
            batch.block(waiting, layer, self.number)

    def _sent(self) -> Batch | None:
        """Send the queued calls out, if this is one of them, and return its batch."""
        if self._batch is not None and not self._batch.issued:
            self._engine.send()
        return self._batch


# --- Batches and queues ---


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


@contextmanager
def _stream_named(name: str) -> Iterator[None]:
    """Let errors of a stream argument call it by its name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}{str(error).removeprefix('stream')}") from None
