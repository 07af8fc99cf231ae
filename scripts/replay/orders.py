"""Eviction orders of a simulated tier, written for clarity, not for speed."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import Protocol


class Order(Protocol):
    """Which blocks of a tier to evict first."""

    def add(self, block: int) -> None: ...
    def touch(self, block: int) -> None: ...
    def remove(self, block: int) -> None: ...
    def first(self, count: int, kept: Collection[int]) -> list[int]: ...


class Fifo:
    """First in, first out."""

    def __init__(self) -> None:
        self.queue: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self.queue[block] = None

    def touch(self, block: int) -> None:
        pass

    def remove(self, block: int) -> None:
        del self.queue[block]

    def first(self, count: int, kept: Collection[int]) -> list[int]:
        return list(islice((block for block in self.queue if block not in kept), count))


class Lru(Fifo):
    """Least recently used."""

    def touch(self, block: int) -> None:
        self.queue.move_to_end(block)


class Lfu:
    """Least frequently used; of several, the least recently used."""

    def __init__(self) -> None:
        self.uses: dict[int, tuple[int, int]] = {}  # count, and time of the last use
        self.heap: list[tuple[int, int, int]] = []  # the same and the block; with stale entries
        self.clock = 0

    def add(self, block: int) -> None:
        self._use(block, 1)

    def touch(self, block: int) -> None:
        self._use(block, self.uses[block][0] + 1)

    def remove(self, block: int) -> None:
        del self.uses[block]

    def first(self, count: int, kept: Collection[int]) -> list[int]:
        blocks: list[int] = []
        popped = []
        for often, when, block in self._ascending():
            popped.append((often, when, block))
            if block not in kept:
                blocks.append(block)
                if len(blocks) == count:
                    break
        for entry in popped:
            heapq.heappush(self.heap, entry)
        return blocks

    def _ascending(self) -> Iterator[tuple[int, int, int]]:
        while self.heap:
            often, when, block = heapq.heappop(self.heap)
            if self.uses.get(block) == (often, when):
                yield often, when, block

    def _use(self, block: int, often: int) -> None:
        self.clock += 1
        self.uses[block] = (often, self.clock)
        heapq.heappush(self.heap, (often, self.clock, block))


class TwoQueues:
    """Blocks used once, oldest first, while they are more than a quarter; then those used again.

    A block that is evicted after one use is remembered, and counts as used again if it returns: as
    many are remembered as the tier holds.
    """

    def __init__(self) -> None:
        self.once: OrderedDict[int, None] = OrderedDict()
        self.again: OrderedDict[int, None] = OrderedDict()
        self.remembered: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        known = block in self.remembered
        self.remembered.pop(block, None)
        (self.again if known else self.once)[block] = None

    def touch(self, block: int) -> None:
        self.once.pop(block, None)
        self.again[block] = None
        self.again.move_to_end(block)

    def remove(self, block: int) -> None:
        blocks = len(self.once) + len(self.again)
        if block in self.once:
            del self.once[block]
            self.remembered[block] = None
        else:
            del self.again[block]
        while len(self.remembered) > blocks:
            self.remembered.popitem(last=False)

    def first(self, count: int, kept: Collection[int]) -> list[int]:
        quarter = max(1, (len(self.once) + len(self.again)) // 4)
        excess = max(0, len(self.once) - quarter)
        once = iter(self.once)
        order = chain(islice(once, excess), self.again, once)
        return list(islice((block for block in order if block not in kept), count))


ORDERS: dict[str, type[Order]] = {"lru": Lru, "fifo": Fifo, "lfu": Lfu, "2q": TwoQueues}
