"""Hits of a trace in tiers of some sizes, by hash ids alone: no pages, no bytes, no kvcupy.

    request    leading blocks known in a tier are pinned and moved to the device;
               the others are inserted; unpinned once `running` later requests have begun
    device     full: the least recently used unpinned blocks are evicted, to the host
    host       full: evicted the same way, and lost unless they are on the device

Written from the documented behaviour of the cache, not from its code, so that the two can be
compared: the same requests and sizes must give the same counts, block by block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

TIERS = ("device", "host")


@dataclass(frozen=True)
class Sizes:
    """How many blocks each tier holds."""

    device: int
    host: int


class Tier:
    """The blocks of one tier, the least recently used first; written for clarity, not speed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.blocks

    @property
    def free(self) -> int:
        return self.size - len(self.blocks)

    def use(self, block: int) -> None:
        """Add a block, or count it as used now."""
        self.blocks[block] = None
        self.blocks.move_to_end(block)

    def evict(self, count: int, kept: Collection[int]) -> list[int]:
        """Remove the first blocks, at most `count`, none of them in `kept`; return them."""
        others = (block for block in self.blocks if block not in kept)
        victims = list(islice(others, max(0, count)))
        for block in victims:
            del self.blocks[block]
        return victims


class TierSimulation:
    """Blocks in two tiers, moved as a tiered cache moves them.

    Parameters
    ----------
    sizes : blocks in each tier
    write : "through": inserted blocks are copied to the host at once, as far as there is room or
        it can be made; "back": when they leave the device
    running : requests whose blocks are pinned at a time, fewer where there is no room

    Attributes
    ----------
    counts : blocks by what happened to them: hit.device, hit.host, missed, inserted,
        evicted.device, evicted.host, lost, loaded (host to device), saved (device to host)
    """

    def __init__(self, sizes: Sizes, write: str = "through", running: int = 1) -> None:
        self.device, self.host = Tier(sizes.device), Tier(sizes.host)
        self._through, self._running = write == "through", running
        self._pins: Counter[int] = Counter()
        self._leases: deque[list[int]] = deque()
        self.counts: Counter[str] = Counter()

    def request(self, ids: Sequence[int]) -> tuple[int, int]:
        """Serve a request; return its hits on the device and on the host."""
        ids = ids[: self.device.size]
        while len(self._leases) >= self._running:
            self._release()
        hits = self._hits(ids)
        known = self._until_room(lambda: self._acquire(ids[: sum(hits)]))
        self._leases.append(known)
        fresh = ids[len(known) :]
        self._until_room(lambda: self._make_room(len(fresh)))
        self._insert(fresh)
        for tier, count in zip(TIERS, hits, strict=True):
            self.counts[f"hit.{tier}"] += count
        self.counts["missed"] += len(fresh)
        return hits

    def _hits(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return how many leading blocks are on the device, and how many more on the host."""
        on_device = next((n for n, i in enumerate(ids) if i not in self.device), len(ids))
        known = (n for n, i in enumerate(ids) if i not in self.device and i not in self.host)
        return on_device, next(known, len(ids)) - on_device

    def _until_room(self, attempt: Callable[[], Any]) -> Any:
        while (value := attempt()) in (None, False):
            self._release()
        return value

    def _release(self) -> None:
        """Unpin the blocks of the oldest request, and count them as used now."""
        known = self._leases.popleft()
        self._pins.subtract(known)
        self._pins = +self._pins
        self._use(known)

    def _acquire(self, known: Sequence[int]) -> list[int] | None:
        """Pin blocks and move them to the device; None if there is no room."""
        absent = [block for block in known if block not in self.device]
        if not self._can_free(len(absent), known):
            return None
        self._pins.update(known)
        self._leave_device(len(absent) - self.device.free, kept=absent)
        self.counts["loaded"] += len(absent)
        self._use(known, device=absent)
        return list(known)

    def _make_room(self, count: int) -> bool:
        if not self._can_free(count, ()):
            return False
        self._leave_device(count - self.device.free)
        return True

    def _insert(self, fresh: Sequence[int]) -> None:
        """Put blocks on the device, and copies on the host if written through."""
        self.counts["inserted"] += len(fresh)
        copied: Sequence[int] = []
        if self._through:
            absent = [block for block in fresh if block not in self.host]
            copied = absent[: self._room_on_host(len(absent), fresh)]
            self.counts["saved"] += len(copied)
        self._use(fresh, device=fresh, host=copied)

    def _can_free(self, count: int, more_pinned: Collection[int]) -> bool:
        pinned = sum(block in self.device for block in {*self._pins, *more_pinned})
        return count <= self.device.size - pinned

    def _use(
        self, ids: Sequence[int], *, device: Collection[int] = (), host: Collection[int] = ()
    ) -> None:
        """Add what is new to a tier and touch what is there, the last block of a prefix first."""
        for tier, added in ((self.device, set(device)), (self.host, set(host))):
            for block in reversed(ids):
                if block in tier or block in added:
                    tier.use(block)

    def _leave_device(self, count: int, kept: Collection[int] = ()) -> None:
        """Evict blocks from the device, to the host; those in `kept` stay on the host."""
        victims = self.device.evict(count, self._pins)
        self.counts["evicted.device"] += len(victims)
        alone = [block for block in victims if block not in self.host]
        room = self._room_on_host(len(alone), {*kept, *victims})
        saved = alone[len(alone) - room :]  # the last to be evicted
        for block in saved:
            self.host.use(block)
        self.counts["saved"] += len(saved)
        self.counts["lost"] += len(alone) - len(saved)

    def _room_on_host(self, count: int, kept: Collection[int]) -> int:
        """Evict blocks from the host, none in `kept`; return for how many there is room then."""
        victims = self.host.evict(count - self.host.free, set(kept))
        self.counts["evicted.host"] += len(victims)
        self.counts["lost"] += sum(block not in self.device for block in victims)
        return min(count, self.host.free)
