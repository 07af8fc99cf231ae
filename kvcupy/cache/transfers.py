"""What a call of the engine hands back: a `Transfer` to its caller, a `Hold` to the allocators."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..errors import CaptureError, DeviceError
from ..pickling import ProcessLocal

if TYPE_CHECKING:
    from .batches import Batch
    from .engine import TransferEngine


class Transfer(ProcessLocal):
    """One call of `TransferEngine.save` or `load`.

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
        elif batch.over():
            state = "done"
        plural = "" if self.num_pages == 1 else "s"
        return f"<{self.kind} {self.number}: {self.num_pages} page{plural}, {state}>"

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
        over = batch.over()
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
        on = self._engine.device.as_stream(stream)
        if on.capturing:
            raise CaptureError("stream: a captured stream cannot wait for a transfer outside it")
        batch = self._sent()
        if batch is None:
            return
        batch.raise_failure(self.number)
        event = batch.event(layer)
        batch.note(event)  # a stream would not be held up by a failure that has surfaced
        batch.raise_failure(self.number)
        try:
            on.wait(event)
        except DeviceError as error:
            batch.fail(error.__cause__ or error)
        batch.note(event)
        batch.raise_failure(self.number)

    def _sent(self) -> Batch | None:
        """Send the queued calls out, if this is one of them, and return its batch."""
        if self._batch is not None and not self._batch.issued:
            self._engine.send()
        return self._batch


class Hold:
    """What an allocator asks before it hands out a page that a transfer touches.

    It never raises the transfer's failure: a failed transfer may still be reading its pages. While
    a stream of the engine's is captured, calls stay queued, and it raises `CaptureError`. It does
    not keep the engine: calls that were queued and never sent touch nothing.
    """

    def __init__(self, engine: TransferEngine, batch: Batch) -> None:
        self._engine = weakref.ref(engine)
        self._batch = batch

    def done(self) -> bool:
        """Return whether the pages are no longer touched."""
        if not self._batch.issued:
            engine = self._engine()
            if engine is None:
                return True
            if engine.telling:  # an allocator tidies up in the middle of a call
                return False
            engine.send()
        return self._batch.over()

    def synchronize(self) -> None:
        """Wait until the pages are no longer touched."""
        if not self._batch.issued and (engine := self._engine()) is not None:
            engine.send()
        if self._batch.issued:
            self._batch.join()
