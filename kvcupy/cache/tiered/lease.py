"""What a cache answers: which blocks there are, and pages that stay until they are released."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import DeviceError, KvcupyError
from ...pickling import ProcessLocal
from ..completion import waiting_stream

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from ..pages import Pages
    from .blocks import Copy
    from .flights import Flight
    from .shared import SharedTiers


class Match(NamedTuple):
    """How many leading blocks of a prefix are known.

    Attributes
    ----------
    device : on the device
    host : on the device or in host memory
    disk : in any tier
    """

    device: int
    host: int
    disk: int


class Lease(ProcessLocal):
    """Blocks on the device, pinned until they are released. Made by `TieredCache.acquire`.

    What reads the pages waits by `wait_layer` or `wait` first. Threads may share a lease.

    Attributes
    ----------
    pages : int64 (num_blocks,), the device page of each block, read-only
    num_blocks : leading blocks of the hashes that were asked for
    released : whether `release` was called
    completion : `Completion` of the transfers that bring the blocks, for as long as it is held
    """

    def __init__(self, shared: SharedTiers, copies: list[Copy]) -> None:
        self.pages: Pages = np.array([copy.page for copy in copies], np.int64)
        self.pages.flags.writeable = False
        self.num_blocks = len(copies)
        self.released = False
        # Each brings some of the blocks, for this lease or for others that came before it.
        arriving = {id(f): f for c in copies if (f := c.filled) is not None and not f.over}
        self.completion = LeaseCompletion(shared, tuple(arriving.values()))
        self._shared = shared
        self._copies = copies

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<Lease of {self.num_blocks} block{'s' * (self.num_blocks != 1)}, {state}>"

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let later work of a compute stream wait until one layer of all blocks is in place.

        Parameters
        ----------
        layer : 0 to num_layers - 1
        stream : Stream, or a CuPy or torch stream; None: the current one. The host does not
            wait, except where the stream is the calling thread itself

        Raises
        ------
        TypeError, ValueError : an argument does not fit
        CaptureError : the stream is being captured
        KvcupyError : the lease has been released
        DeviceError : a transfer that brings blocks has failed, now or earlier. The cache has
            forgotten those blocks on the device; the pages are the lease's until it is released
        """
        layer = self._shared.engine.layer_number(layer)
        self.completion.wait_layer(layer, self._waiting(stream))

    def wait(self, stream: Any = None) -> None:
        """Let later work of a compute stream wait for all layers; otherwise like `wait_layer`."""
        self.completion.wait(self._waiting(stream))

    def release(self) -> None:
        """Unpin the blocks, which nobody reads any more by way of this lease. Again: a no-op."""
        self._shared.release(self, self._copies)
        self.completion.release()

    def _waiting(self, stream: Any) -> Stream:
        waiting = waiting_stream(self._shared.engine.device, stream, "blocks")
        if self.released:
            raise KvcupyError("the lease has been released: its pages may be others' by now")
        return waiting


class LeaseCompletion:
    """All that brings the blocks of a lease; nothing more once the lease is released."""

    def __init__(self, shared: SharedTiers, flights: tuple[Flight, ...]) -> None:
        self._shared = shared
        self._flights = flights

    @property
    def failure(self) -> BaseException | None:
        return next((f.failure for f in self._flights if f.failure is not None), None)

    def done(self) -> bool:
        return self._shared.done(self._flights)

    def synchronize(self) -> None:
        for flight in self._flights:
            flight.synchronize()

    def wait(self, stream: Any = None) -> None:
        self._wait(lambda flight: flight.wait(stream))

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self._wait(lambda flight: flight.wait_layer(layer, stream))

    def release(self) -> None:
        """Forget the transfers: the pages may be others' from now on."""
        self._flights = ()

    def _wait(self, wait: Callable[[Flight], None]) -> None:
        for flight in self._flights:
            try:
                wait(flight)
            except DeviceError as error:
                self._shared.fail(flight, error)
                raise
