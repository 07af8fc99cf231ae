"""What must hold between any two calls, read from the insides of the caches.

Every page is free, in flight, or has the owners that it should have: sequences, leases and blocks
refer to each page as often as is counted; work that is over is not remembered for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common.checks import WrongBytes

IN_FLIGHT = 512  # transfers, batches or accesses that are remembered, at most


class Broken(WrongBytes):
    """Something is not as it must be; the message says what."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)


@dataclass(frozen=True)
class Part:
    """The pages of a group of layers, or of all layers, and the tiers of their blocks."""

    sequences: Any
    pool: Any
    past_pool: Any
    tiers: Any


def audit(part: Part, leases: Sequence[Any]) -> None:
    """Check the pages of a part of a PagedKVCache, and the blocks in its tiers.

    Parameters
    ----------
    leases : those that no sequence holds

    Raises
    ------
    Broken : a page has too many owners or too few, or what is in flight piles up
    """
    held = _audit_device(part, leases)
    leased = sum(len(lease._pinned) for lease in held)
    counted = part.tiers._shared.tiers.num_leased
    require(counted == leased, f"{counted} blocks leased, {leased} by leases")
    audit_tiers(part.tiers, part.sequences._known.values())


def _audit_device(part: Part, leases: Sequence[Any]) -> list[Any]:
    """Compare references and owners of device pages; return all leases."""
    sequences, pool = part.sequences, part.pool
    references = np.zeros(len(sequences._references), np.int64)  # of a past, too
    length = 0
    for sequence in sequences._known.values():
        pages = sequence.pages[sequence.pages >= 0]
        require(len(np.unique(pages)) == len(pages), "a page occurs twice in a sequence")
        needed = 0 if sequence.offloaded else -(-sequence.end // pool.page_size)
        count = len(sequence.pages)
        require(count == needed, f"{count} pages of a sequence, expected {needed}")
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
    total = sequences.total_length
    require(total == length, f"total_length {total}, expected {length}")
    tier = part.tiers._shared.tiers.device
    pinned = [lease.pages for lease in leases]
    used, first_past = np.flatnonzero(references), pool.num_pages
    owned = np.concatenate([used[used < first_past], np.flatnonzero(tier.owned), *pinned])
    _compare("device", pool.allocator.allocated(), owned)
    if part.past_pool is not None:
        demoted = used[used >= first_past] - first_past
        _compare("past", part.past_pool.allocator.allocated(), demoted)
    pages = list(tier.pages.values())
    require(len(set(pages)) == len(pages), "two blocks are on one device page")
    require(bool(tier.owned[pages].all()), "a block is on a page that is not the tier's")
    return [*held.values(), *leases]


def audit_states(states: Any) -> None:
    """Compare the owners of the slots of states, and the users of kept ones."""
    live, users = [], Counter[int]()
    for state in states._of.values():
        live += [slot for slot in (state.live, state.before_tree) if slot >= 0]
        users.update(kept.slot for kept in state.kept.values())
    require(len(set(live)) == len(live), "two sequences have one live state")
    require(not users.keys() & set(live), "a kept state is live")
    counted = {slot: kept.users for slot, kept in states._kept.items()}
    require(counted == users, f"kept states are used {dict(users)} times, {counted} are counted")
    _compare("state", states.pool.allocator.allocated(), np.array([*live, *users], np.int64))


def audit_tiers(tiers: Any, sequences: Iterable[Any]) -> None:
    """Compare the owners of host pages and of the disk's slots, and count what is in flight.

    sequences : those that may have pages in host memory
    """
    parts = tiers._shared.tiers
    with tiers._shared.lock:  # a shared store's thread takes and frees pages
        allocated = tiers.host_pool.allocator.allocated()
        taken = np.flatnonzero(parts.host.owned)
    offloaded = [s.offloaded for s in sequences if s.offloaded is not None]
    owned = np.concatenate([taken, *(pages.pages for pages in offloaded)])
    require(len(np.unique(owned)) == len(owned), "a host page has two owners")
    _compare("host", allocated, owned)
    if (disk := parts.disk) is not None:
        slots = sorted([*disk.slots.values(), *disk._free])
        require(slots == list(range(disk.num_slots)), "a slot of the file is lost, or used twice")
    for pool in (tiers.device_pool, tiers.host_pool):
        require_few(f"transfers of {pool}", len(pool.allocator._transfers))
    for kind, queue in parts.in_flight._queues.items():
        require_few(f"completions of {kind}s", len(queue))


def require_few(what: str, count: int) -> None:
    require(count <= IN_FLIGHT, f"{count} {what} are remembered, expected at most {IN_FLIGHT}")


def _compare(name: str, allocated: Any, owned: Any) -> None:
    leaked = np.setdiff1d(allocated, owned)
    require(not leaked.size, f"{name} pages {leaked.tolist()} are allocated, and nobody has them")
    lost = np.setdiff1d(owned, allocated)
    require(not lost.size, f"{name} pages {lost.tolist()} are in use, but not allocated")
