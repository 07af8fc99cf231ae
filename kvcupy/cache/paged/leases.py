"""Pages that a tiered cache owns and sequences use, by the leases that pin them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..tiered.leases import Lease

Ints = np.ndarray[Any, Any]


class LeaseArrival:
    """What a lease brings, for as long as it is held.

    Notes
    -----
    A sequence may outlive the lease that it began with: nobody in the cache then uses its pages,
    and copies of them were made behind it.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let a stream wait for one layer."""
        if not self._lease.released:
            self._lease.wait_layer(layer, stream)

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for all layers."""
        if not self._lease.released:
            self._lease.wait(stream)


class LeasedPages:
    """Leases, each kept for as long as somebody uses one of its pages.

    Notes
    -----
    Each lease refers to its pages, as sequences do: so a page has more references than leases while
    it is in use, and nobody writes on it, because it is shared.
    """

    def __init__(self, references: Ints) -> None:
        self._references = references
        self._of: dict[int, list[Lease]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, lease: Lease) -> None:
        """Keep a lease, whose pages a sequence uses."""
        for page in lease.pages.tolist():
            self._of.setdefault(page, []).append(lease)
        self._references[lease.pages] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Release the leases of pages of which nobody uses any more."""
        leases = {id(one): one for page in pages for one in self._of.get(page, ())}
        for lease in leases.values():
            if all(self._references[p] == len(self._of[p]) for p in lease.pages.tolist()):
                self._drop(lease)

    def clear(self) -> None:
        """Release all leases."""
        for lease in {id(one): one for leases in self._of.values() for one in leases}.values():
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        for page in lease.pages.tolist():
            self._of[page].remove(lease)
            if not self._of[page]:
                del self._of[page]
        self._references[lease.pages] -= 1
        lease.release()
