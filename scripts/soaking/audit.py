"""What must hold between any two calls, read from the insides of the caches.

Every page is free, in flight, or has the owners that it should have: sequences, leases and blocks
refer to each page as often as is counted; work that is over is not remembered for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcupy.bench.checks import WrongBytes

IN_FLIGHT = 512  # transfers, batches or accesses that are remembered, at most


class Broken(WrongBytes):
    """Something is not as it must be; the message says what."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)


def audit(cache: Any, tiers: Any, leases: Sequence[Any]) -> None:
    """Check the pages of a PagedKVCache and its TieredCache.

    Parameters
    ----------
    leases : those that no sequence holds

    Raises
    ------
    Broken : a page has too many owners or too few, or what is in flight piles up
    """
    tiers.stats()  # which lets it notice what is over
    held = _audit_device(cache, tiers, leases)
    parts = tiers._shared.tiers
    leased = sum(len(lease._pinned) for lease in held)
    require(parts.num_leased == leased, f"{parts.num_leased} blocks leased, {leased} by leases")
    _audit_host(cache, tiers)
    if (disk := parts.disk) is not None:
        slots = sorted([*disk.slots.values(), *disk._free])
        require(slots == list(range(disk.num_slots)), "a slot of the file is lost, or used twice")
    in_flight = {
        "transfers of the device pool": len(cache.pool.allocator._transfers),
        "transfers of the host pool": len(tiers.host_pool.allocator._transfers),
        "accesses to the pages": len(cache._steps.access.order),
        **{f"completions of {k}s": len(q) for k, q in parts.in_flight._queues.items()},
    }
    for what, count in in_flight.items():
        require(count <= IN_FLIGHT, f"{count} {what} are remembered, expected at most {IN_FLIGHT}")


def _audit_device(cache: Any, tiers: Any, leases: Sequence[Any]) -> list[Any]:
    """Compare references and owners of device pages; return all leases."""
    sequences = cache._sequences
    references = np.zeros(len(sequences._references), np.int64)  # of a past, too
    length = 0
    for sequence in sequences._known.values():
        pages = sequence.pages
        require(len(np.unique(pages)) == len(pages), "a page occurs twice in a sequence")
        needed = 0 if sequence.offloaded else -(-sequence.end // cache.pool.page_size)
        require(len(pages) == needed, f"{len(pages)} pages of a sequence, expected {needed}")
        references[pages] += 1
        length += sequence.length
    held = {id(lease): lease for pages in sequences._leased._of.values() for lease in pages}
    for lease in held.values():
        references[lease._pinned] += 1  # those that are not released yet
    wrong = np.flatnonzero(references != sequences._references)
    require(
        not wrong.size,
        f"pages {wrong.tolist()} are referred to {references[wrong].tolist()} times, "
        f"{sequences._references[wrong].tolist()} are counted",
    )
    require(cache.total_length == length, f"total_length {cache.total_length}, expected {length}")
    tier = tiers._shared.tiers.device
    pinned = [lease.pages for lease in leases]
    used, first_past = np.flatnonzero(references), cache.pool.num_pages
    owned = np.concatenate([used[used < first_past], np.flatnonzero(tier.owned), *pinned])
    _compare("device", cache.pool.allocator.allocated(), owned)
    if cache.past_pool is not None:
        demoted = used[used >= first_past] - first_past
        _compare("past", cache.past_pool.allocator.allocated(), demoted)
    pages = list(tier.pages.values())
    require(len(set(pages)) == len(pages), "two blocks are on one device page")
    require(bool(tier.owned[pages].all()), "a block is on a page that is not the tier's")
    return [*held.values(), *leases]


def _audit_host(cache: Any, tiers: Any) -> None:
    with tiers._shared.lock:  # a shared store's thread takes and frees pages
        allocated = tiers.host_pool.allocator.allocated()
        taken = np.flatnonzero(tiers._shared.tiers.host.owned)
    known = cache._sequences._known.values()
    offloaded = [s.offloaded.pages for s in known if s.offloaded is not None]
    owned = np.concatenate([taken, *offloaded])
    require(len(np.unique(owned)) == len(owned), "a host page has two owners")
    _compare("host", allocated, owned)


def _compare(name: str, allocated: Any, owned: Any) -> None:
    leaked = np.setdiff1d(allocated, owned)
    require(not leaked.size, f"{name} pages {leaked.tolist()} are allocated, and nobody has them")
    lost = np.setdiff1d(owned, allocated)
    require(not lost.size, f"{name} pages {lost.tolist()} are in use, but not allocated")
