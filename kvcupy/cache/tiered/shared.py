"""Tiers that threads share: the lock, and what is waited for without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ...errors import KvcupyError
from . import counts as tiered_counts
from . import policies
from .flights import Blocked, Flight
from .lease import Lease

if TYPE_CHECKING:
    from ..engine import TransferEngine
    from .blocks import Copy
    from .policies import Policy
    from .room import Tiers

_Result = TypeVar("_Result")


class SharedTiers:
    """Lets one thread at a time change the tiers.

    Neither the engine nor an allocator calls back, so none of their locks is ever waited for by
    who has the other way round; and no transfer is waited for with the lock held.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.engine: TransferEngine = tiers.engine
        self.closed = False
        self._tiers = tiers
        self._lock = threading.Lock()
        self._leased = 0  # blocks, each as often as it is leased

    @contextmanager
    def opened(self) -> Iterator[Tiers]:
        """Give the tiers as they are now; KvcupyError if the cache is closed."""
        with self._lock:
            if self.closed:
                raise KvcupyError("the cache is closed")
            self._tiers.settle()
            yield self._tiers

    def attempt(self, change: Callable[[Tiers], _Result]) -> _Result:
        """Change the tiers, once nothing is in the way; then start the transfers that came up.

        While something is, `change` raises Blocked before it has changed anything.
        """
        while True:
            try:
                with self.opened() as tiers:
                    result = change(tiers)
                break
            except Blocked as blocked:
                wait = blocked.wait
            if wait is not None:
                wait()
        self.engine.send()
        return result

    def lease(self, copies: list[Copy]) -> Lease:
        """Return a lease of copies that have been pinned for it. With the lock held."""
        self._leased += len(copies)
        return Lease(self, copies)

    def release(self, lease: Lease, copies: list[Copy]) -> None:
        """Unpin what a lease has."""
        with self._lock:
            if not lease.released:
                lease.released = True
                self._leased -= len(copies)
                self._tiers.unpin(copies)

    def done(self, flights: Sequence[Flight]) -> bool:
        """Return whether all of some flights are over."""
        with self._lock:
            return all([flight.done() for flight in flights])

    def fail(self, flight: Flight, error: BaseException) -> None:
        """Forget the blocks that a flight was to bring."""
        with self._lock:
            flight.fail(error)
            self._tiers.drop(flight)

    def clear(self, orders: Sequence[Policy]) -> None:
        """Forget all blocks and take new orders of eviction; KvcupyError if some are leased."""
        with self.opened() as tiers:
            if self._leased:
                raise KvcupyError(f"{self._leased} blocks are leased: release them first")
            tiers.device.clear(orders[0])
            tiers.host.clear(orders[1])
            if tiers.disk is not None:
                tiers.disk.clear(orders[2])

    def close(self) -> None:
        """Give all pages back but those of leases, and close the file; again is a no-op."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for tier in (self._tiers.device, self._tiers.host):
                tier.clear(policies.make("fifo"))
            if self._tiers.disk is not None:
                self._tiers.disk.close()

    def stats(self) -> dict[str, float]:
        """Return figures as they are now."""
        with self._lock:
            if not self.closed:
                self._tiers.settle()
            return tiered_counts.stats(self._tiers)
