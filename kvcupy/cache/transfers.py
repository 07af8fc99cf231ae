"""What a call of the engine hands back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..pickling import ProcessLocal
from .completion import waiting_stream

if TYPE_CHECKING:
    from ..errors import DeviceError
    from .batches import Batch
    from .engine import TransferEngine


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
