"""Blocks in pages: which page of a pool has which block, and in which order they go."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..pages import Pages
from .policies import Policy

if TYPE_CHECKING:
    from ..pool import Pool
    from .flights import Flight


class Copy:
    """One block in one page of a pool.

    Attributes
    ----------
    hash, page : which block, and where
    pins : leases on it
    filled : what brings the block into the page, if that was under way when the copy was made
    used : in the host tier, the last transfer that touches the page, if there was one; when it is
        over, those before it are
    """

    __slots__ = ("filled", "hash", "page", "pins", "used")

    def __init__(self, hash: int, page: int, filled: Flight | None = None) -> None:
        self.hash = hash
        self.page = page
        self.pins = 0
        self.filled = filled
        self.used = filled

    @property
    def arriving(self) -> Flight | None:
        """What still brings the block."""
        return None if self.filled is None or self.filled.over else self.filled

    @property
    def touched(self) -> Flight | None:
        """A transfer that may still touch the page."""
        return None if self.used is None or self.used.over else self.used


class PageTier:
    """The blocks in the pages of one pool.

    Attributes
    ----------
    name : "device" or "host"
    copies : by hash
    order : of eviction, of the same hashes
    owned : which pages of the pool are the cache's, those of blocks that are forgotten but leased
        among them
    """

    def __init__(self, name: str, pool: Pool, order: Policy) -> None:
        self.name = name
        self.pool = pool
        self.order = order
        self.copies: dict[int, Copy] = {}
        self.owned = np.zeros(pool.num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        """Pages of the pool that can be had without waiting."""
        return self.pool.allocator.num_free

    def choose(self, count: int, keep: Container[int] = (), *, settled: bool = False) -> list[Copy]:
        """Return up to `count` copies that may go, in order; nothing changes.

        Parameters
        ----------
        keep : hashes that stay, beside those that are leased
        settled : pass over pages that transfers may still touch
        """
        if count <= 0:
            return []
        copies = self.copies
        evictable = (
            copy
            for copy in map(copies.__getitem__, self.order.victims())
            if not copy.pins and copy.hash not in keep and not (settled and copy.touched)
        )
        return list(islice(evictable, count))

    def add(self, copies: Iterable[Copy]) -> None:
        """Take blocks in, the one that is to go first in front."""
        for copy in copies:
            self.copies[copy.hash] = copy
            self.order.add(copy.hash)
            self.owned[copy.page] = True

    def use(self, hashes: Sequence[int], new: Mapping[int, Copy]) -> None:
        """Take `new` blocks in and mark the others as used, from the last of a prefix to its first.

        So leaves go before what they hang on. Hashes that the tier does not have are passed over.
        """
        copies, add, touch = self.copies, self.order.add, self.order.touch
        for hash in reversed(hashes):
            if hash in copies:
                touch(hash)
            elif hash in new:
                copies[hash] = copy = new[hash]
                self.owned[copy.page] = True
                add(hash)

    def forget(self, copies: Iterable[Copy]) -> None:
        """Take blocks out of index and order. Their pages stay the cache's."""
        for copy in copies:
            del self.copies[copy.hash]
            self.order.remove(copy.hash)

    def clear(self, order: Policy) -> None:
        """Forget all blocks, and take another order; pages that no lease has go back."""
        pages = [copy.page for copy in self.copies.values() if not copy.pins]
        self.copies, self.order = {}, order
        self.give_back(pages)

    def has(self, copy: Copy) -> bool:
        """Return whether this very copy is known, not another one of its block or none."""
        return self.copies.get(copy.hash) is copy

    def take(self, count: int) -> Pages:
        """Take free pages from the pool; CacheFull if another thread has been quicker."""
        pages = self.pool.allocator.alloc(count)
        self.owned[pages] = True
        return pages

    def give_back(self, pages: Any) -> None:
        """Return pages to the pool, which holds back those that a transfer touches."""
        if len(pages):
            self.owned[pages] = False
            self.pool.allocator.free(pages)
