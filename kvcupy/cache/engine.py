"""The transfer engine: pages between a pool of the device and one of the host, in the background.

    compute stream   | ... after |            wait_layer(0)[ layer 0 ] wait_layer(1)[ layer 1 ] ...
    load stream      wait, start | load 0, event | load 1, event | ... | end
    save stream      wait, start | save | end

The engine has no thread: calls are queued, and issued by the thread that sends them out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import observe
from ..config import cache_logger
from ..errors import CaptureError, DeviceError, InterruptGuard, ProcessLocal, device_failure
from ..formats import Method
from ..ops import transfer
from ..streams import stream_after
from .hazards import Completion, raise_failure, waiting_stream

if TYPE_CHECKING:
    from ..devices.protocol import Device, Event, Stream
    from .pool import Pool

Pages = np.ndarray[Any, np.dtype[np.int64]]

_POOLS = ("device_pool", "host_pool")
_LISTS = ("device_pages", "host_pages")
_PAGE_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


class TransferEngine(ProcessLocal):
    """Moves pages between two pools in the background: merged, ordered and layer by layer.

    Parameters
    ----------
    device_pool, host_pool : pools of one device that differ in layout, placement and num_pages only
    load_stream, save_stream : Stream, or a CuPy or torch stream; None: the engine makes one
    method, max_blocks, convert : as for `transfer_pages`

    Attributes
    ----------
    device, device_pool, host_pool, load_stream, save_stream

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Stream: a call is ordered after what `after` holds when it is made, and calls that touch the
    same pages keep their order. Work that reads pages which a transfer writes, or overwrites pages
    which it reads, has to wait for the handle. Pages that two engines share are ordered by `after`
    alone. Calls queued between two flushes go out as one batch per direction. The loads of a batch
    complete together, layer by layer.
    Lifetime: pages freed in flight become free when they are no longer touched. Calls still queued
    when engine and handles are gone are dropped. Threads may share an engine; a forked child makes
    its own, with its own pools. Capture: not legal; a transfer is outside of every capture.
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
        self, device_pool: Pool, host_pool: Pool, *,
        load_stream: Any = None, save_stream: Any = None, method: Method = "auto",
        max_blocks: int | None = None, convert: bool = False,
    ) -> None:  # fmt: skip
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
        self._load = TransferQueue(self, "load", load_stream, loads, sizes)
        self._save = TransferQueue(self, "save", save_stream, [save], sizes)
        self.load_stream: Stream = self._load.stream
        self.save_stream: Stream = self._save.stream
        self._calls = 0
        self._notifying = 0  # calls that are being announced to allocators
        # Held while work is put on the streams. Reentrant: freeing memory may call back.
        self._lock = threading.RLock()
        self._guard = InterruptGuard("TransferEngine", self, reentrant=True)

    def save(self, device_pages: Any, host_pages: Any, *, after: Any = None) -> Transfer:
        """Queue a copy of pages of every layer from the device pool to the host pool.

        Parameters
        ----------
        device_pages, host_pages : int32 or int64 (N,) of the host, or lists of ints, copied by the
            call. A pair with a negative page is skipped
        after : the compute stream that has written the pages: Stream, or a CuPy or torch stream;
            None: the one that is current in CuPy or torch, as for `transfer_pages`; False: there is
            nothing to wait for. Work put on it after the call does not delay the copy

        Raises
        ------
        TypeError, ValueError : an argument does not fit, or a page is past the end
        CaptureError : a stream is being captured
        """
        return self._submit(self._save, device_pages, host_pages, after)

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
        return self._submit(self._load, device_pages, host_pages, after)

    def _flush(self) -> None:
        """Send all queued calls out, then raise DeviceError if issuing some of them failed."""
        for batch in self._send():
            if batch.cause is not None:
                batch.raise_failure()

    def _send(self) -> list[Batch]:
        """Send all queued calls out; failures are left to the batches, which are returned."""
        with self._lock:
            if self.load_stream.capturing or self.save_stream.capturing:
                self._raise_capturing()
            try:
                return self._send_pending()
            except BaseException as error:
                self._guard.note(error)
                raise

    def _send_pending(self) -> list[Batch]:
        batches = []
        for queue, other in ((self._load, self._save), (self._save, self._load)):
            if queue.pending is not None:
                batches.append(queue.send(other))
        return batches

    def _submit(
        self, queue: TransferQueue, device_pages: Any, host_pages: Any, after: Any
    ) -> Transfer:
        device_list, host_list = self._page_lists(queue.kind, device_pages, host_pages)
        compute = stream_after(self.device, after, "a transfer")
        batch = None
        try:
            with self._lock:
                if self.load_stream.capturing or self.save_stream.capturing:
                    self._raise_capturing()
                for queued in (self._load, self._save):
                    if queued.pending and queued.conflicts(queue.kind, device_list, host_list):
                        self._send_pending()
                if len(device_list):
                    batch = queue.add(self._calls + 1, device_list, host_list, compute.record())
                    self._notifying += 1
                self._calls += 1
                transfer = Transfer(self, queue, self._calls, len(device_list), batch)
            if batch is not None:  # without the lock: allocators have their own locks
                self.device_pool.allocator._mark_busy(device_list, batch)
                self.host_pool.allocator._mark_busy(host_list, batch)
                with self._lock:
                    self._notifying -= 1
            return transfer
        except BaseException as error:
            self._guard.note(error)
            if batch is not None:  # an allocator has perhaps not heard of it
                self._guard.mark_broken()
            raise

    def _page_lists(self, kind: str, device_pages: Any, host_pages: Any) -> tuple[Pages, Pages]:
        """Check and copy the lists of a call; leave out the pairs that are skipped."""
        device, host = _as_int64(device_pages), _as_int64(host_pages)
        if device is None or host is None or len(device) != len(host):
            device, host = _checked_lists(kind, device_pages, host_pages)
        sizes = self.device_pool.num_pages, self.host_pool.num_pages
        if _exist(device, sizes[0]) and _exist(host, sizes[1]):
            return device, host
        moved = (device >= 0) & (host >= 0)
        device, host = device[moved], host[moved]
        for name, pages, size in zip(_LISTS, (device, host), sizes, strict=True):
            if not _exist(pages, size):
                raise ValueError(f"{name}: expected pages below {size}, got {pages.max()}")
        return device, host

    def _raise_capturing(self) -> None:
        kind = "load" if self.load_stream.capturing else "save"
        raise CaptureError(f"{kind}_stream: a transfer cannot be part of a capture")


def send_together(engines: Sequence[tuple[TransferEngine, Sequence[int]]]) -> None:
    """Send the queued calls of engines out, in the order of their `layers` in the model."""
    with ExitStack() as locks:
        for engine, _ in engines:
            locks.enter_context(engine._lock)
            locks.enter_context(engine._guard)
            if engine.load_stream.capturing or engine.save_stream.capturing:
                engine._raise_capturing()
        loads = [
            (engine._load.sending(engine._save), layers)
            for engine, layers in engines
            if engine._load.pending is not None
        ]
        order = sorted((layer, i) for i, (_, layers) in enumerate(loads) for layer in layers)
        for sending, _ in loads:
            next(sending, None)  # all of them wait before the first layer
        for _, i in order:
            next(loads[i][0], None)
        for engine, _ in engines:
            engine._send_pending()


# --- What a call returns ---


class Transfer(ProcessLocal):
    """One call of `TransferEngine.save` or `load`: a `Completion`.

    All methods and times send the queued calls out first. After a failure they raise `DeviceError`,
    which names the transfer and has the cause; the destination pages are then undefined.

    Attributes
    ----------
    kind : "load" or "save"
    number : of the call, counted from 1 for each engine
    num_pages : pairs of pages, without the skipped ones
    num_bytes : bytes that it moves, K and V counted once, as the source stores them
    failure : why it has failed, as far as is known, or None. Never sends, waits or raises
    """

    def __init__(
        self, engine: TransferEngine, queue: TransferQueue, number: int, num_pages: int,
        batch: Batch | None,
    ) -> None:  # fmt: skip
        self.kind = queue.kind
        self.number = number
        self.num_pages = num_pages
        self.num_bytes = num_pages * queue.page_bytes
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
        return None if self._batch is None else self._batch.failure_of(self.number)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let later work of a compute stream wait until one layer has been moved.

        Parameters
        ----------
        layer : 0 to num_layers - 1. A save is waited for as a whole
        stream : Stream, or a CuPy or torch stream; None: the current one. The host does not
            block, except where the stream is the calling thread itself

        Raises
        ------
        TypeError, ValueError : `layer` is out of range, or `stream` is not a stream
        CaptureError : the stream is being captured; a transfer is outside of every capture
        DeviceError : the transfer has failed
        """
        self._wait(stream, self._engine.device_pool.layer_number(layer))

    def wait(self, stream: Any = None) -> None:
        """Let later work of a compute stream wait for all of it; otherwise like `wait_layer`."""
        self._wait(stream, None)

    def done(self) -> bool:
        """Return whether the transfer is done; DeviceError if it has failed."""
        batch = self._sent()
        if batch is None:
            return True
        if over := batch.done():
            batch.join()
        batch.raise_failure(self.number)
        return over

    def synchronize(self) -> None:
        """Wait until the transfer is done; DeviceError if it failed, once no page is touched."""
        batch = self._sent()
        if batch is not None:
            batch.join()
            batch.raise_failure(self.number)

    @property
    def elapsed_us(self) -> float:
        """Wait, and return the microseconds that its batch took: all calls sent out together."""
        self.synchronize()
        if self._batch is None or self._batch.end is None:
            return 0.0
        return self._batch.end.elapsed_us(self._batch.start)

    @property
    def gb_per_s(self) -> float:
        """Wait, and return `num_bytes` over `elapsed_us` in 1e9 bytes per second."""
        elapsed_us = self.elapsed_us
        return self.num_bytes / elapsed_us / 1e3 if elapsed_us > 0 else 0.0

    def _wait(self, stream: Any, layer: int | None) -> None:
        waiting = waiting_stream(self._engine.device, stream, "a transfer")
        if self._batch is not None:
            self._batch.block(waiting, layer, self.number)

    def _sent(self) -> Batch | None:
        """Send the queued calls out if this is one of them; return its batch."""
        if self._batch is not None:
            self._batch.send()
        return self._batch


# --- Batches and queues ---


class Batch(Completion):
    """Calls of one direction that go out as one. It does not keep the engine alive."""

    def __init__(self, engine: weakref.ref[TransferEngine], kind: str, stream: Stream) -> None:
        self.kind = kind
        self.stream = stream
        self.calls: list[tuple[int, int]] = []  # number and page count of each
        self.device_pages: list[Pages] = []  # a list for each call, until the batch is done
        self.host_pages: list[Pages] = []
        self.after_events: list[Event] = []  # to wait for before any page is touched
        self.start: Event | None = None
        self.layer_events: list[Event] = []  # of loads, after each layer, until they are done
        self.end: Event | None = None
        self.issued = False  # all of it is on the stream, or as much as could be
        self.cause: BaseException | None = None  # why it has failed
        self.layer: int | None = None  # where, if that is known
        self._engine = engine
        self._joined = False

    @property
    def failure(self) -> DeviceError | None:
        return self.failure_of(None)

    def send(self) -> None:
        """Send it out, with all queued calls, if that has not been done."""
        if not self.issued and (engine := self._engine()) is not None:
            engine._send()

    @property
    def _is_lost(self) -> bool:
        """Whether the engine issues nothing more, because it is gone or broken."""
        engine = self._engine()
        return engine is None or engine._guard.is_broken

    def done(self) -> bool:
        """Return whether no page is touched any more; queued calls go out first."""
        if self._joined:
            return True
        if not self.issued:
            engine = self._engine()
            if engine is not None and not self._is_lost:
                if engine._notifying:  # an allocator polls, which must not send calls out
                    return False
                engine._send()
                if not self.issued:
                    return False
            elif self.start is None:
                return True
        try:
            return (self.stream if self.end is None else self.end).done()
        except CaptureError:
            return False
        except DeviceError:  # no work issued before the failure touches a page any more
            return True

    def synchronize(self) -> None:
        """Wait until no page is touched any more; queued calls go out first."""
        if not self._is_lost:
            self.send()
        if self.issued or self.start is not None:
            self.join()

    def wait(self, stream: Any = None) -> None:
        self.block(waiting_stream(self.stream.device, stream, "a transfer"), None)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self.block(waiting_stream(self.stream.device, stream, "a transfer"), layer)

    def block(self, stream: Stream, layer: int | None, number: int | None = None) -> None:
        """Let a stream wait for one layer, or for all; DeviceError names one call, or all."""
        self.send()
        if self.cause is None:
            if self.end is None:
                raise DeviceError(f"{self.name()}: waited for while it is being issued")
            events = self.layer_events  # `_reap` may take them away
            event = self.end if layer is None or not events else events[layer]
            self.note(event)  # a failure that has surfaced already would not stop the stream
            if self.cause is None:
                try:
                    stream.wait(event)
                except DeviceError as error:
                    self.note(event)
                    if self.cause is None:  # it is the stream that cannot wait
                        raise DeviceError(f"{self.name(number)}: {error}") from error
                self.note(event)
        if self.cause is not None:
            self.raise_failure(number)

    def join(self) -> None:
        """Wait until the stream has passed all that was issued, and note what failed in it."""
        if self._joined:  # later work of the stream is not the batch's
            return
        failure: BaseException | None = None
        try:
            (self.stream if self.end is None else self.end).synchronize()
        except DeviceError as error:
            failure = error.__cause__ or error
        if self.end is not None and self.end.error() is not None:
            self.note(self.end)  # it has recorded the layer
        if failure is not None:
            self.fail(failure)
        self._joined = True

    def note(self, event: Event) -> None:
        """Note a failure of work before `event`, and let it surface; else later work is skipped."""
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
        """Return why the batch has failed, if it has, naming one call, or all."""
        if self.cause is None:
            return None
        where = "" if self.layer is None else f", layer {self.layer}"
        cause = f"{type(self.cause).__name__}: {self.cause}"
        return device_failure(f"{self.name(number)}{where}: {cause}", self.cause)

    def raise_failure(self, number: int | None = None) -> None:
        if self.cause is not None:
            raise_failure(self.failure_of(number))


class TransferQueue:
    """One direction: its stream, the batch in which calls queue up, and the batches in flight."""

    def __init__(
        self, engine: TransferEngine, kind: str, stream: Any,
        prepared: Sequence[transfer.PreparedTransfer], sizes: Sequence[int],
    ) -> None:  # fmt: skip
        device = self._device = engine.device
        self.kind = kind
        self._own = stream is None
        if self._own:
            self.stream = device.stream()
            self.stream.name = kind
        else:
            self.stream = device.as_stream(stream, name=f"{kind}_stream")
        self.pending: Batch | None = None  # not sent out yet
        self.page_bytes: int = sum(part.page_bytes for part in prepared)  # of all layers
        self._engine = weakref.ref(engine)
        # A load is issued layer by layer, a save at once.
        names = ["save"] if kind == "save" else [f"load {layer}" for layer in range(len(prepared))]
        self._parts = list(zip(prepared, names, strict=True))
        self._in_flight: list[Batch] = []
        # By page, whether the pending batch touches it: of the device pool, of the host pool.
        self._marks = [np.zeros(size, np.bool_) for size in sizes]

    def add(self, number: int, device_pages: Pages, host_pages: Pages, after: Event) -> Batch:
        batch = self.pending
        if batch is None:
            batch = self.pending = Batch(self._engine, self.kind, self.stream)
        batch.calls.append((number, len(device_pages)))
        batch.device_pages.append(device_pages)
        batch.host_pages.append(host_pages)
        batch.after_events.append(after)
        self._marks[0][device_pages] = True
        self._marks[1][host_pages] = True
        return batch

    def conflicts(self, kind: str, device_pages: Pages, host_pages: Pages) -> bool:
        """Return whether a call touches pages of the pending batch, and one of the two writes."""
        kinds = (kind, self.kind)
        return ("load" in kinds and bool(self._marks[0][device_pages].any())) or (
            "save" in kinds and bool(self._marks[1][host_pages].any())
        )

    def send(self, other: TransferQueue) -> Batch:
        """Put the pending batch on the stream, after earlier ones of the other direction."""
        for queue in (self, other):
            if queue._in_flight:
                queue._reap()
        batch, self.pending = self.pending, None
        assert batch is not None
        pairs = None
        try:
            pairs = self._issue(batch, other)
            if pairs is not None:
                for part, name in self._parts:
                    part.issue(pairs, self.stream, name=name, keep=False)
                    if self.kind == "load":
                        batch.layer_events.append(self.stream.record())
        except BaseException as error:
            self._fail(batch, error)
        finally:
            self._close(batch, pairs)
        return batch

    def sending(self, other: TransferQueue) -> Iterator[None]:
        """Do as `send` for loads, and pause before each layer: generators cost more."""
        for queue in (self, other):
            queue._reap()
        batch, self.pending = self.pending, None
        assert batch is not None
        pairs = None
        try:
            pairs = self._issue(batch, other)
            if pairs is not None:
                for part, name in self._parts:
                    yield
                    part.issue(pairs, self.stream, name=name, keep=False)
                    batch.layer_events.append(self.stream.record())
        except BaseException as error:
            self._fail(batch, error)
        finally:
            self._close(batch, pairs)

    def _issue(self, batch: Batch, other: TransferQueue) -> transfer.PagePairs | None:
        """Make the stream wait for what a batch follows; None if the batch cannot run."""
        stream, is_save = self.stream, self.kind == "save"
        for event in batch.after_events:
            stream.wait(event)
            if (error := event.error()) is not None:  # once surfaced, it stops no stream
                batch.fail(error)
                return None
        for earlier in other._in_flight if other.stream != stream else ():
            if self._touches(earlier):
                stream.wait(other.stream if earlier.end is None else earlier.end)
        device_pages, host_pages = batch.device_pages[0], batch.host_pages[0]
        if len(batch.calls) > 1:
            device_pages = np.concatenate(batch.device_pages)
            host_pages = np.concatenate(batch.host_pages)
        sides = (device_pages, host_pages) if is_save else (host_pages, device_pages)
        pairs = transfer.PagePairs.of_arrays(*sides)
        if observe.order_observers:  # before any layer is on the stream
            for part, name in self._parts:
                part.check(pairs, stream, name=name)
        batch.start = stream.record(self._device.event(timing=True))
        return pairs

    def _fail(self, batch: Batch, error: BaseException) -> None:
        """Note why a batch could not be issued; raise what is no Exception."""
        begun = self.kind == "load" and batch.start is not None
        batch.fail(error, len(batch.layer_events) if begun else None)
        if not isinstance(error, Exception):
            raise error
        cache_logger.debug("%s: it could not be issued", batch.name(), exc_info=True)
        _drop_frames(error)

    def _close(self, batch: Batch, pairs: transfer.PagePairs | None) -> None:
        """End a batch, including after a failure; work in flight keeps its pools and page lists."""
        first, _ = self._parts[0]
        try:
            if pairs is not None:
                self._device.keep((first.src_pool, first.dst_pool, pairs), self.stream)
            batch.end = self.stream.record(self._device.event(timing=True))
        except Exception as error:  # the stream is then asked whether the batch is over
            batch.fail(error)
        for device_pages, host_pages in zip(batch.device_pages, batch.host_pages, strict=True):
            self._marks[0][device_pages] = False
            self._marks[1][host_pages] = False
        batch.after_events = []
        batch.issued = True
        self._in_flight.append(batch)

    def _reap(self) -> None:
        """Drop the batches that are over. Failures on streams that the engine made surface here."""
        for batch in list(self._in_flight):
            if batch.done():
                if self._own:
                    batch.join()
                    batch.layer_events = []  # the next batches use their handles
                batch.device_pages, batch.host_pages = [], []
                self._in_flight.remove(batch)

    def _touches(self, earlier: Batch) -> bool:
        """Return whether a batch in flight shares a page with the one that is being issued."""
        sides = (earlier.device_pages, earlier.host_pages)
        return any(
            bool(marks[pages].any())
            for marks, lists in zip(self._marks, sides, strict=True)
            for pages in lists
        )


def _drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an exception that is kept: their frames keep all callers alive."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _exist(pages: Pages, num_pages: int) -> bool:
    """Return whether all pages are in a pool; negative numbers are large as unsigned ones."""
    return not len(pages) or bool(np.maximum.reduce(pages.view(np.uint64)) < num_pages)


def _as_int64(pages: Any) -> Pages | None:
    """Return a copy of a page list of the usual kinds, a list of ints or an array; else None."""
    if type(pages) is list and set(map(type, pages)) <= {int}:
        try:
            return np.array(pages, np.int64)
        except OverflowError:
            return None
    if type(pages) is np.ndarray and pages.ndim == 1 and pages.dtype in _PAGE_DTYPES:
        return pages.astype(np.int64, order="C")
    return None


def _checked_lists(kind: str, device_pages: Any, host_pages: Any) -> tuple[Pages, Pages]:
    """Return copies of page lists of any kind, or raise what `transfer_pages` would."""
    lists = {"device_pages": device_pages, "host_pages": host_pages}
    src, dst = _LISTS if kind == "save" else _LISTS[::-1]
    pairs = transfer.PagePairs(lists[src], lists[dst], (src, dst))
    copies: dict[str, Pages] = {}
    for name, pages in ((src, pairs.src), (dst, pairs.dst)):
        if pages is None:
            raise TypeError(f"{name}: expected a list or an array of the host")
        copies[name] = pages
    return copies["device_pages"], copies["host_pages"]
