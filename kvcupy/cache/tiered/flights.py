"""What fills pages in the background: transfers, and what compute streams still write.

A flight that fails takes with it whatever was to be read from the pages that it was to fill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import CaptureError, DeviceError, KvcupyError

if TYPE_CHECKING:
    from ...devices.protocol import Device, Event, Stream
    from ..pages import PageAllocator
    from .blocks import Copy


class Moving(Protocol):
    """What a flight asks of a `Transfer`, or of a `Fence`."""

    num_bytes: int

    @property
    def elapsed_us(self) -> float: ...
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def wait_layer(self, layer: int, stream: Any = None) -> None: ...


class Blocked(Exception):
    """Raised before a call has changed anything: it must wait, without the lock, and try again.

    Without a flight there is nothing to wait for any more.
    """

    def __init__(self, flight: Flight | FreedPages | None) -> None:
        super().__init__("waits for a transfer")
        self.flight = flight


class FreedPages:
    """Freed pages of a pool that transfers of others still touch."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator

    def join(self) -> None:
        """Wait until some of them are free."""
        self._allocator.wait_for_freed()


class Fence:
    """The point of a compute stream after which the pages that it writes are complete.

    Whatever failed before that point stays for the owner of the stream to see as well.
    """

    num_bytes = 0
    elapsed_us = 0.0

    def __init__(self, device: Device, event: Event) -> None:
        self.event = event
        self._device = device
        self._relay: Stream | None = None

    def done(self) -> bool:
        over = self.event.done()
        self._raise_failure()
        return over

    def synchronize(self) -> None:
        self._behind().synchronize()
        self._raise_failure()

    def wait(self, stream: Any = None) -> None:
        on = self._device.as_stream(stream)
        if on.capturing:
            raise CaptureError("stream: a captured stream cannot wait for pages outside it")
        self._raise_failure()
        if not self.event.done():
            on.wait(self._behind().record())
        self._raise_failure()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self.wait(stream)

    def _behind(self) -> Stream:
        """Return a stream of its own behind the point.

        A thread that waited for the event itself would take the failure from the stream's owner.
        """
        if self._relay is None:
            relay = self._device.stream()
            relay.wait(self.event)
            self._relay = relay
        return self._relay

    def _raise_failure(self) -> None:
        if (error := self.event.error()) is None:
            return
        if self._relay is not None:  # it is over at once, and nobody else would look at it
            with suppress(DeviceError):
                self._relay.synchronize()
        raise DeviceError(f"the pages were never written: {error!r}") from error


class Writing:
    """Tells an allocator when a compute stream no longer writes pages, be it that it has failed."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def done(self) -> bool:
        return self._fence.event.done()

    def synchronize(self) -> None:
        with suppress(DeviceError):
            self._fence.synchronize()


class Flight:
    """One transfer, or one fence, and the copies that it fills.

    All but `join` and `wait` is called under the lock of the cache.

    Attributes
    ----------
    kind : "load", "save" or "insert"
    copies : of blocks, in the tier that it fills; none once it has arrived
    over : whether it has arrived or failed
    error : why it has failed
    num_bytes, seconds : that it took, once it has arrived
    """

    def __init__(
        self, kind: str, moving: Moving, copies: Sequence[Copy], sources: Iterable[Flight | None]
    ) -> None:
        self.kind = kind
        self.copies = copies
        self.over = False
        self.error: BaseException | None = None
        self.num_bytes = 0
        self.seconds = 0.0
        self._moving: Moving | None = moving  # let go when it is over: it holds events
        # Those that fill the pages which this one reads.
        self._sources = tuple({id(s): s for s in sources if s is not None}.values())

    def poll(self) -> bool:
        """Return whether it is over; never waits, never raises a failure."""
        moving = self._moving
        if self.over or moving is None:
            return True
        try:
            arrived = moving.done() and all([source.poll() for source in self._sources])
            self._raise_failure_of_sources()
            if arrived:
                self.num_bytes, self.seconds = moving.num_bytes, moving.elapsed_us / 1e6
                self.over, self._moving, self._sources, self.copies = True, None, (), ()
        except CaptureError:  # whoever polls may be capturing
            return False
        except KvcupyError as error:
            self.fail(error)
        return self.over

    def fail(self, error: BaseException) -> None:
        """Note why it has failed, unless it is over."""
        if not self.over:
            self.error, self.over, self._sources = error, True, ()

    def join(self) -> None:
        """Wait until the pages are no longer touched; never raises a failure."""
        moving, sources = self._moving, self._sources
        if moving is not None:
            with suppress(DeviceError):  # `poll` finds it again, and notes it
                moving.synchronize()
        for source in sources:
            source.join()

    def wait(self, layer: int | None, stream: Any) -> None:
        """Let a stream wait for one layer, or for all; DeviceError if it has failed.

        Notes nothing: who gets the error calls `fail`, under the lock.
        """
        moving = self._moving
        if self.error is not None:
            raise DeviceError(f"the blocks have not arrived: {self.error}") from self.error
        if moving is not None:
            self._raise_failure_of_sources()
            if layer is None:
                moving.wait(stream)
            else:
                moving.wait_layer(layer, stream)
            self._raise_failure_of_sources()

    def _raise_failure_of_sources(self) -> None:
        """Raise DeviceError if the pages that this one reads are known not to hold their blocks."""
        for source in self._sources:
            source._raise_failure()

    def _raise_failure(self) -> None:
        if self.error is not None:
            raise DeviceError(f"the blocks have not arrived: {self.error}") from self.error
        if (moving := self._moving) is not None:
            moving.done()
            self._raise_failure_of_sources()


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
            while lane and lane[0].poll():
                over.append(lane.popleft())
            if kind == "insert" and lane:  # streams of their own: a later one may be first
                rest = [flight for flight in lane if not flight.poll()]
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
