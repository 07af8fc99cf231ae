"""The way in and out: pages that the cache comes to own, and those that it gives back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..completion import StreamCompletion
from ..pages import Pages
from .blocks import Copy, PageTier
from .flights import Flight
from .room import Tiers

if TYPE_CHECKING:
    from ...devices.protocol import Stream


def require_ownable(tier: PageTier, pages: Pages) -> None:
    """Refuse pages that are not allocated, given twice, or the cache's already."""
    ordered = tier.pool.allocator.require_allocated(pages)
    if len(owned := ordered[tier.owned[ordered]]):
        raise ValueError(f"pages: expected the caller's, got {owned[0]}, which is the cache's")


def insert(
    tiers: Tiers, hashes: list[int], pages: Pages, on: Stream, *, through: bool
) -> list[int]:
    """Take blocks into the device tier; return the pages of those that are there already.

    Parameters
    ----------
    on : the stream that has written the pages
    through : copy them to the host tier, the first ones if there is not room for all
    """
    fresh: dict[int, int] = {}
    unneeded = []
    for hash, page in zip(hashes, pages.tolist(), strict=True):
        if hash in fresh or hash in tiers.device.copies:
            unneeded.append(page)
        else:
            fresh[hash] = page
    made = {hash: Copy(hash, page) for hash, page in fresh.items()}
    saved = _save_through(tiers, made, on) if through else {}
    _hold(tiers, list(made.values()), on)
    tiers.device.use(hashes, made)
    tiers.host.use(hashes, saved)
    if tiers.disk is not None:
        tiers.disk.use(hashes)
    tiers.counts.inserted += len(made)
    return unneeded


def evict(tiers: Tiers, victims: Sequence[Copy], keep: Collection[int] = ()) -> int:
    """Let blocks leave the device tier, those that no other has by way of a save.

    Parameters
    ----------
    keep : hashes that stay in the host tier and on disk

    Returns
    -------
    how many have left: fewer than there are if the host tier cannot take all at once, while it can
    pass some on to the disk. The next call waits for that
    """
    saves = tiers.alone(victims)
    if saves:
        leaving = {copy.hash for copy in victims}
        room = tiers.plan_host(len(saves), keep=keep, leaving=leaving)
        if tiers.disk is not None and 0 < room.num_pages < len(saves):
            return evict(tiers, victims[: victims.index(saves[room.num_pages])], keep)
        pages = tiers.make_host(room)
        saved = _save(tiers, saves[len(saves) - len(pages) :], pages, None)
        tiers.host.add(saved.values())
    tiers.device.give_back(tiers.leave(victims))
    return len(victims)


def _save_through(tiers: Tiers, made: dict[int, Copy], on: Stream) -> dict[int, Copy]:
    wanted = [copy for copy in made.values() if copy.hash not in tiers.host.copies]
    pages = tiers.make_host(tiers.plan_host(len(wanted), keep=made, wait=False))
    return _save(tiers, wanted[: len(pages)], pages, on)


def _save(tiers: Tiers, copies: Sequence[Copy], pages: Pages, after: Any) -> dict[int, Copy]:
    try:
        return tiers.save(copies, pages, after)
    except BaseException:
        tiers.host.give_back(pages)
        raise


def _hold(tiers: Tiers, made: list[Copy], on: Stream) -> None:
    """Let nobody read the pages, or overwrite them, before the stream has written them."""
    written = StreamCompletion(on)
    if not made or (written.done() and written.failure is None):
        return
    flight = tiers.flights.add(Flight("insert", written, made, ()))
    for copy in made:
        copy.filled = flight
    tiers.device.pool.allocator.busy([copy.page for copy in made], written)
