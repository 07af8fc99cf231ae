"""The way up: blocks of a prefix are pinned on the device, those of lower tiers in one load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import CacheFull
from .blocks import Copy
from .flights import Flight
from .insert import evict
from .room import Room, Tiers


@dataclass
class Plan:
    """What an acquire will do.

    Attributes
    ----------
    found : leading hashes that are known
    loads : those of them that are not on the device, each once
    reads : those of the loads that are on disk alone
    num_free : device pages that are free for the loads
    victims : device copies that go for the others
    saves : those of them that are saved, as far as `room` has pages behind those of the reads
    room : the host pages for both
    """

    found: list[int]
    loads: list[int]
    reads: list[int]
    num_free: int
    victims: list[Copy]
    saves: list[Copy]
    room: Room


def plan(tiers: Tiers, hashes: list[int]) -> Plan:
    """Find the leading blocks, and room for them; nothing changes.

    Raises
    ------
    CacheFull : there is no room for them
    Blocked : to wait for a transfer
    """
    device, host = tiers.device, tiers.host
    found = hashes
    missing: dict[int, None] = {}
    reads: dict[int, None] = {}
    for i, hash in enumerate(hashes):
        if hash in device.copies:
            continue
        if hash not in host.copies:
            if not tiers.on_disk(hash):
                found = hashes[:i]
                break
            reads[hash] = None
        missing[hash] = None
    loads = list(missing)
    num_free = min(len(loads), device.num_free) if loads else 0
    short = len(loads) - num_free
    victims = device.choose(short, set(found)) if short else []
    if len(victims) < short:
        tiers.wait_for_pages(device, num_free)
        raise CacheFull(
            f"hashes: expected at most {num_free + len(victims)} blocks to load, for which the "
            f"device pool has pages, got {len(loads)}"
        )
    saves = tiers.alone(victims)
    wanted = len(reads) + len(saves)
    room = Room()
    if wanted:
        leaving = {copy.hash for copy in victims}
        room = tiers.plan_host(wanted, must=len(reads), keep=missing, leaving=leaving)
    return Plan(found, loads, list(reads), num_free, victims, saves, room)


def make_way(tiers: Tiers, plan: Plan) -> bool:
    """Let some victims leave first, if there are too few host pages to save all of them at once.

    They go through the host tier to the disk, as long as that takes nothing away that is asked for.

    Returns
    -------
    whether some have left, so that another plan is needed
    """
    disk, to_spare = tiers.disk, plan.room.num_pages - len(plan.reads)
    if disk is None or to_spare >= len(plan.saves):
        return False
    if to_spare > 0:
        return evict(tiers, plan.victims, plan.loads) > 0
    # All host pages are taken by what is asked for: it can go to the disk, if that loses nothing.
    saves = plan.saves[: disk.num_free]
    return bool(saves) and evict(tiers, plan.victims[: plan.victims.index(saves[-1]) + 1]) > 0


def carry_out(tiers: Tiers, plan: Plan, hashes: list[int], after: Any) -> list[Copy]:
    """Bring the blocks of a plan to the device; return their copies, pinned.

    They are fewer than planned if blocks on disk turn out to be damaged.
    """
    device, host, counts = tiers.device, tiers.host, tiers.counts
    free = device.take(plan.num_free)
    try:
        pages = tiers.make_host(plan.room)
        try:
            read = _read(tiers, plan, pages.tolist())
            num_saves = min(len(plan.saves), len(pages) - len(plan.reads))
            saves = plan.saves[len(plan.saves) - num_saves :] if num_saves > 0 else []
            wanted = _cut(plan, len(read))
            victims = plan.victims[: max(0, wanted - len(free))]
            leaving = set(map(id, victims))
            saves = [copy for copy in saves if id(copy) in leaving]
            used = len(plan.reads) + len(saves)
            saved = tiers.save(saves, pages[len(plan.reads) : used], after)
        except BaseException:
            host.give_back(pages)
            raise
    except BaseException:
        device.give_back(free)
        raise
    host.give_back(np.concatenate((pages[len(read) : len(plan.reads)], pages[used:])))
    host.add(saved.values())
    host.use(plan.found, read)
    if tiers.disk is not None:
        tiers.disk.use(plan.found)
    behind = tiers.behind(victims, after)
    targets = np.concatenate((free[:wanted], tiers.leave(victims)))
    device.give_back(free[wanted:])
    loaded = _load(tiers, plan.loads, targets, behind) if wanted else {}
    device.use(plan.found, loaded)
    copies = [device.copies[hash] for hash in plan.found]
    for copy in copies:
        copy.pins += 1
    counts.disk_hits += len(read)
    counts.host_hits += len(loaded) - len(read)
    counts.device_hits += len(copies) - len(loaded)
    counts.misses += len(hashes) - len(copies)
    return copies


def _read(tiers: Tiers, plan: Plan, pages: list[int]) -> dict[int, Copy]:
    """Read blocks from disk into the first host pages; return those before one that is damaged."""
    if not plan.reads or tiers.disk is None:
        return {}
    whole = tiers.disk.read(plan.reads, pages[: len(plan.reads)])
    return {hash: Copy(hash, page) for hash, page in zip(plan.reads[:whole], pages, strict=False)}


def _cut(plan: Plan, num_read: int) -> int:
    """Leave out what follows a block that could not be read; return how many are to be loaded."""
    if num_read < len(plan.reads):
        bad = plan.reads[num_read]
        plan.found = plan.found[: plan.found.index(bad)]
        plan.loads = plan.loads[: plan.loads.index(bad)]
    return len(plan.loads)


def _load(tiers: Tiers, hashes: list[int], targets: Any, after: Any) -> dict[int, Copy]:
    """Queue the load of blocks from the host tier; return their device copies."""
    sources = [tiers.host.copies[hash] for hash in hashes]
    try:
        transfer = tiers.engine.load([c.page for c in sources], targets, after=after)
    except BaseException:
        tiers.device.give_back(targets)
        raise
    made = [Copy(hash, page) for hash, page in zip(hashes, targets.tolist(), strict=True)]
    flight = Flight("load", transfer, made, [copy.arriving for copy in sources])
    tiers.flights.add(flight)
    for copy in made:
        copy.filled = copy.used = flight
    for copy in sources:
        copy.used = flight
    return {copy.hash: copy for copy in made}
