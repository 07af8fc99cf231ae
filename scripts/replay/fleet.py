"""Hits of a trace on many nodes over one shared store, by hash ids alone.

    router     sends each request to a node
    node       a `TierSimulation`: device and host memory of its own
    store      the blocks of all nodes, on a hash ring of its parts; least recently used leave first

A request's leading blocks are found in the node's tiers, then in the store, as many of them as
`TieredCache(shared_prefetch=)` lets through; the others are computed, and put. A fetched block
becomes a block of the node like a computed one. Requests come one after another, so that a
block is in the store when the next one asks for it: a real store is never better.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .simulation import TIERS, Sizes, TierSimulation

WRITES = ("through", "second_use")
ROUTES = ("turns", "prefix")
CROWDED = 1.5  # times the mean load, from which a node gets no request for its prefix alone


@dataclass(frozen=True)
class Fleet:
    """A fleet of nodes, and its store.

    Attributes
    ----------
    nodes : how many
    sizes : blocks of each node
    store : blocks that the shared store holds; 0: there is none; None: all
    route : "turns", or "prefix": to the node that last served the longest part of it, unless that
        has had half as many requests again as the others
    write : "through": what is computed is put; "second_use": what a node uses a second time
    share : of a node's host memory, which blocks that are fetched for one request may take
    dead : the request at which the first node and its part of the store die, or None
    mourning_s : how long puts into that part fail, and lookups find nothing there, before its place
        on the ring is given to others
    """

    nodes: int
    sizes: Sizes
    store: int | None = None
    route: str = "turns"
    write: str = "through"
    share: float = 0.25
    dead: int | None = None
    mourning_s: float = 10.0


@dataclass
class FleetResult:
    """The result of a simulation.

    Attributes
    ----------
    counts : blocks: hit.device, hit.host, hit.disk, hit.shared, missed; fetched, put, known (puts
        of what the store has), refused (for want of a part), evicted (from the store); requests;
        queries (of metadata: one for a request whose blocks are not all in the node's tiers, and
        one for its puts)
    served : requests of each node
    windows : of each tenth of the requests, blocks asked for and found
    """

    counts: Counter[str] = field(default_factory=Counter)
    served: list[int] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)

    @property
    def hit_rate(self) -> dict[str, float]:
        names = (*TIERS, "shared")
        hits = {name: self.counts[f"hit.{name}"] for name in names}
        asked = max(1, sum(hits.values()) + self.counts["missed"])
        return {name: n / asked for name, n in hits.items()} | {"total": sum(hits.values()) / asked}


class Store:
    """Blocks by id on the parts of a store, one for each node."""

    def __init__(self, capacity: int | None, parts: int) -> None:
        self.capacity, self.parts = capacity, parts
        self.blocks: OrderedDict[int, int] = OrderedDict()  # the part of each, latest use last
        self.dead: int | None = None
        self.mourned = False  # its place has been given to others
        self.evicted = 0

    def part_of(self, block: int) -> int:
        digest = hashlib.blake2b(block.to_bytes(8, "little"), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        part = number % self.parts
        if part == self.dead and self.mourned and self.parts > 1:
            others = [other for other in range(self.parts) if other != self.dead]
            part = others[(number >> 20) % len(others)]
        return part

    def leading(self, ids: Sequence[int]) -> int:
        """Return how many leading blocks it has, and count them as used."""
        for count, block in enumerate(ids):
            if block not in self.blocks:
                return count
            self.blocks.move_to_end(block)
        return len(ids)

    def put(self, block: int) -> str:
        if block in self.blocks:
            self.blocks.move_to_end(block)
            return "known"
        part = self.part_of(block)
        if self.capacity == 0 or part == self.dead:
            return "refused"
        self.blocks[block] = part
        if self.capacity is not None and len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
            self.evicted += 1
        return "put"

    def lose(self, part: int) -> None:
        """Lose a part, and a part of the capacity with it."""
        self.dead = part
        for block in [block for block, of in self.blocks.items() if of == part]:
            del self.blocks[block]
        if self.capacity is not None:
            self.capacity -= self.capacity // self.parts


class Router:
    """Sends requests to nodes."""

    def __init__(self, fleet: Fleet) -> None:
        self.route, self.alive = fleet.route, list(range(fleet.nodes))
        self.served = [0] * fleet.nodes
        self._turn = 0
        self._last: dict[int, int] = {}  # by block, the node that has served it last

    def node_for(self, ids: Sequence[int]) -> int:
        node = None
        if self.route == "prefix":
            node = self._nearest(ids)
        if node is None:
            node = self.alive[self._turn % len(self.alive)]
            self._turn += 1
        self.served[node] += 1
        if self.route == "prefix":
            self._last.update(dict.fromkeys(ids, node))
        return node

    def _nearest(self, ids: Sequence[int]) -> int | None:
        mean = sum(self.served) / len(self.served)
        for block in reversed(ids):
            if (node := self._last.get(block)) is not None and node in self.alive:
                return node if self.served[node] <= CROWDED * mean + 1 else None
        return None

    def bury(self, node: int) -> None:
        if len(self.alive) > 1:
            self.alive.remove(node)


def simulate_fleet(requests: Sequence[tuple[float, Sequence[int]]], fleet: Fleet) -> FleetResult:
    """Serve requests, (seconds, hash ids) of each, one after another."""
    nodes = [TierSimulation(fleet.sizes) for _ in range(fleet.nodes)]
    used: list[set[int]] = [set() for _ in nodes]  # by node, what it has served before
    store, router = Store(fleet.store, fleet.nodes), Router(fleet)
    result, counts = FleetResult(), Counter[str]()
    died_s: float | None = None
    most_fetched = max(1, int(fleet.share * fleet.sizes.host))
    window = max(1, -(-len(requests) // 10))
    asked = found = 0
    for number, (now_s, all_ids) in enumerate(requests):
        if number == fleet.dead:
            died_s = now_s
            store.lose(0)
            router.bury(0)
            nodes[0], used[0] = TierSimulation(fleet.sizes), set()
        if died_s is not None and now_s > died_s + fleet.mourning_s:
            store.mourned = True
        ids = all_ids[: fleet.sizes.longest]
        place = router.node_for(ids)
        node = nodes[place]
        in_tiers = node.match(ids)
        known = node.acquire(ids)
        if known is None:
            raise AssertionError("a request is longer than a node's memory")
        rest = list(ids[len(known) :])
        in_store = 0
        if rest and fleet.store != 0:
            counts["queries"] += 1
            in_store = min(store.leading(rest), most_fetched)
        if not node.make_room(len(rest)):
            raise AssertionError("a request is longer than a node's memory")
        node.insert(rest)
        node.release([*known])
        computed = rest[in_store:]
        new = computed
        if fleet.write == "second_use":
            new = [block for block in ids if block in used[place] and block not in store.blocks]
            used[place].update(ids)
        if new and fleet.store != 0:
            counts["queries"] += 1
            counts.update(store.put(block) for block in new)
        for tier, hits, above in zip(TIERS, in_tiers, (0, *in_tiers), strict=False):
            counts[f"hit.{tier}"] += hits - above
        counts["hit.shared"] += in_store
        counts["fetched"] += in_store
        counts["missed"] += len(computed)
        counts["requests"] += 1
        asked += len(ids)
        found += len(ids) - len(computed)
        if (number + 1) % window == 0 or number + 1 == len(requests):
            result.windows.append((asked, found))
            asked = found = 0
    counts["evicted"] = store.evicted
    result.counts, result.served = counts, router.served
    return result
