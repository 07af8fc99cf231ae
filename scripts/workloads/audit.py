"""What must hold between any two calls of any workload, and what a process may hold over time.

Every page is free, in flight, or has the owners that it should have: sequences, leases and blocks
refer to each page as often as is counted; completed work is not remembered for long. Memory,
threads, files and Python's blocks stay level once as many plans of calls are kept as ever are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common.checks import WrongBytes

from kvcupy.ops import call

IN_FLIGHT = 512  # transfers, batches or accesses that are remembered, at most
WARM_UP = 0.2  # of the steps, at least
# How much more than after the warm-up there may be at the end, by a line through the samples.
SLACK = {"rss_bytes": 16 << 20, "threads": 16, "files": 6, "python_blocks": 20_000}

Sample = dict[str, float]


class Broken(WrongBytes):
    """Something is not as it must be; the message says what."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)


@dataclass(frozen=True)
class Part:
    """The pages of a cache, and the tiers of their blocks."""

    sequences: Any
    pool: Any
    demoted_pool: Any = None
    tiers: Any = None


def audit(part: Part) -> None:
    """Check the pages of a PagedKVCache, and the blocks in its tiers if it has some.

    Raises
    ------
    Broken : a page has too many owners or too few, or completed work is still remembered
    """
    held = _audit_device(part)
    if part.tiers is None:
        return
    leased = sum(len(lease._pinned) for lease in held)
    counted = part.tiers.num_leased
    require(counted == leased, f"{counted} blocks leased, {leased} by leases")
    audit_tiers(part.tiers, part.sequences._known.values())


def _audit_device(part: Part) -> list[Any]:
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
    used, first_demoted = np.flatnonzero(references), pool.num_pages
    owned = [used[used < first_demoted]]
    if part.tiers is not None:
        tier = part.tiers.device
        owned.append(np.flatnonzero(tier.owned))
        pages = list(tier.pages.values())
        require(len(set(pages)) == len(pages), "two blocks are on one device page")
        require(bool(tier.owned[pages].all()), "a block is on a page that is not the tier's")
    _compare("device", pool.allocator.allocated(), np.concatenate(owned))
    if part.demoted_pool is not None:
        demoted = used[used >= first_demoted] - first_demoted
        _compare("past", part.demoted_pool.allocator.allocated(), demoted)
    return list(held.values())


def audit_blocks(tiers: Any) -> None:
    """Compare the owners of pages of a TieredCache that no sequence uses."""
    (of_group,) = tiers._tiers
    owned = np.flatnonzero(of_group.device.owned)
    _compare("device", tiers.device_pool.allocator.allocated(), owned)
    audit_tiers(of_group, ())


def audit_tiers(tiers: Any, sequences: Iterable[Any]) -> None:
    """Compare the owners of host pages, and count what is in flight.

    sequences : those that may have pages in host memory
    """
    with tiers.lock:  # the thread of a store allocates and frees pages
        allocated = tiers.host.pool.allocator.allocated()
        taken = np.flatnonzero(tiers.host.owned)
    offloaded = [s.offloaded for s in sequences if s.offloaded is not None]
    owned = np.concatenate([taken, *(pages.pages for pages in offloaded)])
    require(len(np.unique(owned)) == len(owned), "a host page has two owners")
    _compare("host", allocated, owned)
    for pool in (tiers.device.pool, tiers.host.pool):
        require_few(f"transfers of {pool}", len(pool.allocator._transfers))
    for kind, queue in tiers.in_flight._queues.items():
        require_few(f"completions of {kind}s", len(queue))


def require_few(what: str, count: int) -> None:
    require(count <= IN_FLIGHT, f"{count} {what} are remembered, expected at most {IN_FLIGHT}")


def _compare(name: str, allocated: Any, owned: Any) -> None:
    leaked = np.setdiff1d(allocated, owned)
    require(not leaked.size, f"{name} pages {leaked.tolist()} are allocated, and nobody has them")
    lost = np.setdiff1d(owned, allocated)
    require(not lost.size, f"{name} pages {lost.tolist()} are in use, but not allocated")


# --- What a process holds -------------------------------------------------------------------------


def sample() -> Sample:
    """Return resident bytes, threads, open files, and the memory blocks of the interpreter."""
    status = Path("/proc/self/statm").read_text().split()
    return {
        "rss_bytes": int(status[1]) * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "python_blocks": sys.getallocatedblocks(),
        "plans": len(call._plans),
    }


def warm_up(samples: Sequence[Sample]) -> float | None:
    """Return the step at which the warm-up is over, None if it never is."""
    full = next((s["step"] for s in samples if s["plans"] >= call._MAX_PLANS), None)
    return None if full is None else max(full, WARM_UP * samples[-1]["step"])


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Return by how much each resource has grown after the warm-up, if that was over."""
    warm = warm_up(samples)
    kept = [] if warm is None else [s for s in samples if s["step"] >= warm]
    if len(kept) < 2:
        return {}
    steps = np.array([s["step"] for s in kept], np.float64)
    slopes = {name: np.polyfit(steps, [s[name] for s in kept], 1)[0] for name in SLACK}
    return {name: float(slope * (steps[-1] - steps[0])) for name, slope in slopes.items()}


def beyond_slack(grown: dict[str, float]) -> list[str]:
    """Return a sentence on each resource that has grown by more than it may."""
    return [
        f"{name} grew by {grown[name]:,.0f} after the warm-up, expected at most {slack:,}"
        for name, slack in SLACK.items()
        if grown.get(name, 0) > slack
    ]
