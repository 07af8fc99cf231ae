"""What has happened in the tiers so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .room import Tiers


@dataclass
class Counts:
    """What has happened so far, in blocks, bytes and seconds; see `TieredCache.stats`."""

    device_hits: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    inserted: int = 0
    device_evicted: int = 0
    host_evicted: int = 0
    disk_evicted: int = 0
    lost: int = 0
    failed_loads: int = 0
    failed_saves: int = 0
    load_bytes: int = 0
    load_s: float = 0.0
    save_bytes: int = 0
    save_s: float = 0.0


def stats(tiers: Tiers) -> dict[str, float]:
    """Return what `TieredCache.stats` does."""
    disk = tiers.disk
    return {
        "device_blocks": len(tiers.device.copies),
        "host_blocks": len(tiers.host.copies),
        "disk_blocks": 0 if disk is None else len(disk.slots),
        **asdict(tiers.counts),
        "disk_read_bytes": 0 if disk is None else disk.read_bytes,
        "disk_read_s": 0.0 if disk is None else disk.read_s,
        "disk_write_bytes": 0 if disk is None else disk.written_bytes,
        "disk_write_s": 0.0 if disk is None else disk.write_s,
        "disk_errors": 0 if disk is None else disk.errors,
    }
