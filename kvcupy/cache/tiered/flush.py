"""Bringing the host tier's blocks to disk, so that they outlive the process."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .disk_blocks import DiskBlocks
from .room import Tiers
from .shared import SharedTiers

_PIECE_BYTES = 2**26  # written under one hold of the lock


def flush(shared: SharedTiers, *, through: bool) -> None:
    """Wait for saves; write what the host tier has to disk, if `through`; wait for the disk.

    Where the disk has not room for all of that, it gets what is to leave the host tier last.

    Raises
    ------
    OSError : the disk failed
    """
    with shared.opened() as tiers:
        saves = tiers.flights.saves()
    shared.engine.send()
    for flight in saves:
        flight.synchronize()
    with shared.opened() as tiers:
        disk = tiers.disk
        if disk is None:
            return
        wanted = list(tiers.host.order.victims())[-disk.num_slots :] if through else []
    keep = frozenset(wanted)
    size = max(1, _PIECE_BYTES // disk.page_bytes)
    failed: dict[int, OSError] = {}
    for start in range(0, len(wanted), size):
        piece = wanted[start : start + size]

        def change(tiers: Tiers, piece: Sequence[int] = piece) -> dict[int, OSError]:
            return _write(tiers, disk, piece, keep)

        failed |= shared.attempt(change)
    disk.flush()
    for error in failed.values():
        raise error


def _write(
    tiers: Tiers, disk: DiskBlocks, hashes: Sequence[int], keep: Collection[int]
) -> dict[int, OSError]:
    """Write those blocks that are in the host tier but not on disk; return what failed."""
    copies = [
        copy
        for hash in hashes
        if hash not in disk.slots and (copy := tiers.host.copies.get(hash)) is not None
    ]
    tiers.require_arrived(copies)
    slots = disk.choose(len(copies) - disk.num_free, keep)
    room = disk.num_free + len(slots)
    return tiers.write(disk, copies[:room], slots)
