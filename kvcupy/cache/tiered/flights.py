"""What fills pages in the background: transfers, and what compute streams still write.

A flight that fails takes with it whatever was to be read from the pages that it was to fill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import CaptureError, DeviceError, KvcupyError
from ..completion import StreamCompletion

if TYPE_CHECKING:
    from ..engine import Transfer
    from .blocks import Copy


class Blocked(Exception):
    """Raised before a call has changed anything: it must wait, without the lock, and try again.

    Attributes
    ----------
    wait : what to call; None: there is nothing to wait for any more
    """

    def __init__(self, wait: Callable[[], None] | None) -> None:
        super().__init__("waits for a transfer")
        self.wait = wait


class Flight:
    """One transfer, or what a compute stream writes, and the copies that it fills.

    It is the `Completion` of these copies: of itself, and of whatever fills the pages that it
    reads. All but `synchronize`, `wait` and `wait_layer` is called under the lock of the cache.

    Attributes
    ----------
    kind : "load", "save" or "insert"
    copies : of blocks, in the tier that it fills; none once it is done
    over : whether it is known to be done or to have failed
    failure : why it has failed, where that has been noted
    num_bytes, seconds : that it took, once it is done
    """

    def __init__(
        self,
        kind: str,
        completion: Transfer | StreamCompletion,
        copies: Sequence[Copy],
        sources: Iterable[Flight | None],
    ) -> None:
        self.kind = kind
        self.copies = copies
        self.over = False
        self.failure: BaseException | None = None
        self.num_bytes = 0
        self.seconds = 0.0
        # Let go when it is over: it holds events.
        self._completion: Transfer | StreamCompletion | None = completion
        # Those that fill the pages which this one reads.
        self._sources = tuple({id(s): s for s in sources if s is not None}.values())

    def done(self) -> bool:
        """Return whether it is over, including after a failure; notes a failure."""
        completion = self._completion
        if self.over or completion is None:
            return True
        try:
            arrived = completion.done() and all([source.done() for source in self._sources])
            if (failure := completion.failure) is not None:
                raise failure
            self._raise_failure_of_sources()
            if arrived:
                if not isinstance(completion, StreamCompletion):
                    self.num_bytes = completion.num_bytes
                    self.seconds = completion.elapsed_us / 1e6
                self.over, self._completion, self._sources, self.copies = True, None, (), ()
        except CaptureError:  # whoever polls may be capturing
            return False
        except KvcupyError as error:
            self.fail(error)
        return self.over

    def fail(self, error: BaseException) -> None:
        """Note why it has failed, unless it is over."""
        if not self.over:
            self.failure, self.over, self._sources = error, True, ()

    def synchronize(self) -> None:
        """Wait until the pages are no longer touched; leaves a failure to `done`."""
        completion, sources = self._completion, self._sources
        if completion is not None:
            with suppress(DeviceError):
                completion.synchronize()
        for source in sources:
            source.synchronize()

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for all layers; DeviceError if it has failed.

        Notes nothing: who gets the error calls `fail`, under the lock.
        """
        if (completion := self._pending()) is not None:
            completion.wait(stream)
            self._raise_failure_of_sources()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let a stream wait for one layer; otherwise like `wait`."""
        if (completion := self._pending()) is not None:
            completion.wait_layer(layer, stream)
            self._raise_failure_of_sources()

    def _pending(self) -> Transfer | StreamCompletion | None:
        """Return what a stream has to wait for, if anything."""
        self._raise_known_failure()
        if self._completion is not None:
            self._raise_failure_of_sources()
        return self._completion

    def _raise_known_failure(self) -> None:
        if self.failure is not None:
            raise DeviceError(f"the blocks have not arrived: {self.failure}") from self.failure

    def _raise_failure_of_sources(self) -> None:
        """Raise DeviceError if the pages that this one reads are known not to hold their blocks."""
        for source in self._sources:
            source._raise_known_failure()
            if (completion := source._completion) is not None:
                completion.done()  # a transfer takes note of its failure, and raises it
                if (failure := completion.failure) is not None:
                    raise failure
                source._raise_failure_of_sources()


class Flights:
    """The flights that are not known to be over, oldest first in each direction."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Flight]] = {k: deque() for k in ("insert", "load", "save")}
        self._failed: deque[Flight] = deque(maxlen=16)  # that may still touch pages

    def add(self, flight: Flight) -> Flight:
        self._lanes[flight.kind].append(flight)
        return flight

    def settle(self) -> list[Flight]:
        """Return the flights that are over by now, and forget them. Costs with their number."""
        over = []
        for kind, lane in self._lanes.items():
            while lane and lane[0].done():
                over.append(lane.popleft())
            if kind == "insert" and lane:  # streams of their own: a later one may be first
                rest = [flight for flight in lane if not flight.done()]
                over += [flight for flight in lane if flight.over]
                lane.clear()
                lane.extend(rest)
        return over

    def oldest(self) -> Flight | None:
        """Return one to wait for, rather a transfer than a compute stream.

        A failed one may touch pages a little longer; it is returned once.
        """
        if self._failed:
            return self._failed.popleft()
        return next((lane[0] for lane in reversed(self._lanes.values()) if lane), None)

    def failed(self, flight: Flight) -> None:
        """Note that a flight has failed, though what it does to pages may not be over."""
        self._failed.append(flight)

    def saves(self) -> list[Flight]:
        """Return those that fill pages of the host."""
        return list(self._lanes["save"])
