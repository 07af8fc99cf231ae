"""The blocks in the pages of one pool. A block is known by its hash, and in a tier by its page."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..pages import Pages
from .changes import Listener, Removed, Stored, announce
from .in_flight import BlockCompletion
from .index import BlockIndex, untracked
from .order import EvictionOrder

if TYPE_CHECKING:
    from ..pool import Pool

_MAX_SKIPPED = 4096  # blocks that a choice of victims passes because they are still to be put


class PageTier:
    """The blocks in the pages of one pool.

    There may be millions, so a block at rest has only an entry in `pages`, `hashes` and `order`, of
    ints, which garbage collections do not visit. The other dicts and sets have the pages that
    differ. A page is not reused while it is leased or held.

    Attributes
    ----------
    name : "device" or "host"
    pages : by hash
    hashes : of the blocks, by page; of a page that was forgotten, the last one
    pins : number of leases, by leased page
    held : in the host tier, by page, number of puts, HeldBlocks, and acquires that wait for a
        prefix with this fetched block; a held block is not evicted
    filled_by : by page, the completion that writes the block to it, until it is processed
    used_by : in the host tier, by page, the last transfer that accesses it, until it is processed;
        earlier transfers end before it
    unwritten : in the host tier, by page, the stores to which the block is still to be put, as bits
    refused : in the host tier, by page, the stores that answered "full" or "failed", as bits
    stored : pages of the host tier whose blocks some store has; pages of the device whose blocks
        were evicted from host memory after all stores had them
    fetched : pages whose blocks came from a store and were not acquired since
    order : eviction order of these pages, without leased ones that an eviction met and removed, so
        that later evictions need not skip them; they return with their release
    owned : bool (num_pages,), whether each page of the pool belongs to the cache, including pages
        of forgotten blocks that are still leased
    listeners : called with blocks that enter and leave; the other tier has the same list
    """

    def __init__(self, name: str, pool: Pool, priorities: Mapping[int, int]) -> None:
        self.name = name
        self.pool = pool
        self.pins: dict[int, int] = untracked({})
        self.held: dict[int, int] = {}
        self.owned = np.zeros(pool.num_pages, np.bool_)
        self.listeners: list[Listener] = []
        self._priorities = priorities
        self._forget_all()

    def _forget_all(self) -> None:
        self.pages = BlockIndex()
        self.hashes: list[int] = untracked([0] * self.pool.num_pages)
        self.order = EvictionOrder(self.hashes, self._priorities)
        self.filled_by: dict[int, BlockCompletion] = {}
        self.used_by: dict[int, BlockCompletion] = {}
        self.unwritten: dict[int, int] = untracked({})
        self.refused: dict[int, int] = untracked({})
        self.stored: set[int] = untracked(set())
        self.fetched: set[int] = untracked(set())

    @property
    def num_free(self) -> int:
        """Pages of the pool that can be allocated without waiting."""
        return self.pool.allocator.num_free

    # --- Blocks that enter, are used and leave ---

    def add(self, new: Mapping[int, int]) -> None:
        """Add blocks, pages by hash; the first one is evicted first."""
        self._enter(new)
        self.order.touch(new.values())

    def use(self, hashes: Sequence[int], new: Mapping[int, int] | None = None) -> None:
        """Add `new` ones of some blocks, and touch all of them, the last of a prefix first."""
        if new:
            self._enter(new)
        self.order.touch(self.pages.known_pages(reversed(hashes)))

    def _enter(self, new: Mapping[int, int]) -> None:
        hashes = self.hashes
        for hash, page in new.items():
            hashes[page] = hash
        self.pages.add(new)
        self.owned[list(new.values())] = True
        if self.listeners and new:
            announce(self.listeners, Stored(self.name, list(new)))

    def choose(
        self, count: int, keep: Container[int] = (), *,
        idle: bool = False, stays: Callable[[int, int], bool] | None = None,
    ) -> list[int]:  # fmt: skip
        """Choose pages of up to `count` blocks to evict, in order; they stay until `forget`.

        Skips leased and held pages, the hashes in `keep`, and blocks of which `stays(hash, page)`
        is true; `idle` also skips pages that transfers may access.
        """
        hashes, pins, held, used = self.hashes, self.pins, self.held, self.used_by
        chosen: list[int] = []
        leased: list[int] = []
        num_skipped = 0
        for page in self.order if count > 0 else ():
            hash = hashes[page]
            if page in pins:
                leased.append(page)
            elif page in held or hash in keep or (idle and page in used and self.accessed(page)):
                continue
            elif stays is not None and stays(hash, page):
                num_skipped += 1
                if num_skipped == _MAX_SKIPPED:
                    break
            else:
                chosen.append(page)
                if len(chosen) == count:
                    break
        self.order.remove(leased)
        return chosen

    def forget(self, pages: Sequence[int]) -> None:
        """Remove the blocks of pages from index and order. The cache keeps the pages."""
        hashes = [self.hashes[page] for page in pages]
        self.order.remove(pages)
        self.pages.remove(hashes)
        by_page: tuple[dict[int, Any], ...] = (
            self.filled_by, self.used_by, self.unwritten, self.refused
        )  # fmt: skip
        for states in by_page:
            if states:
                for page in pages:
                    states.pop(page, None)
        self.stored.difference_update(pages)
        self.fetched.difference_update(pages)
        if self.listeners and pages:
            announce(self.listeners, Removed(self.name, hashes))

    def clear(self) -> None:
        """Remove all blocks, and free the pages that are neither leased nor held."""
        pages = self.pages.values()
        self._forget_all()
        self.free_unless_in_use(pages)

    def has_block(self, page: int) -> bool:
        """Return whether a page has a block of the tier, which was not forgotten."""
        return self.pages.get(self.hashes[page]) == page

    # --- Transfers, and users of a page ---

    def arriving(self, page: int) -> BlockCompletion | None:
        """Return the completion that still writes the block of a page, or None."""
        return None if (last := self.filled_by.get(page)) is None or last.over else last

    def accessed(self, page: int) -> BlockCompletion | None:
        """Return a transfer that may still access a page, or None."""
        return None if (last := self.used_by.get(page)) is None or last.over else last

    def hold(self, page: int) -> None:
        """Keep a block from eviction until `release`."""
        self.held[page] = self.held.get(page, 0) + 1

    def release(self, page: int) -> None:
        """End one hold on a page; free the page if its block was forgotten meanwhile."""
        if self.held[page] > 1:
            self.held[page] -= 1
        else:
            del self.held[page]
            if not self.has_block(page):
                self.give_back([page])

    # --- Pages of the pool ---

    def take(self, count: int) -> Pages:
        """Allocate pages; CacheFull if another user of the pool took them first."""
        pages = self.pool.allocator.alloc(count)
        self.owned[pages] = True
        return pages

    def free_unless_in_use(self, pages: Iterable[int]) -> None:
        """Free those pages of forgotten blocks that are neither leased nor held."""
        self.give_back([page for page in pages if page not in self.pins and page not in self.held])

    def give_back(self, pages: Any) -> None:
        """Free pages; the pool holds back pages that a transfer accesses."""
        if len(pages):
            self.owned[pages] = False
            self.pool.allocator.free(pages)
