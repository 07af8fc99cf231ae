"""A TieredCache over stores in a simulated world: slow, failing and full; killed processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.world import Process, Simulated

import kvcupy as kv
from kvcupy.cache.tiered.cache import TieredCache

NUM_DEVICE, NUM_HOST, NUM_HASHES = 5, 6, 16
FIRST_HASH = 1 << 100
SLOW_S = 1.0  # a call of a slow store
HOT_S = 0.2  # a call that needs no store


def new_pools(world: Simulated) -> Any:
    device = world.device()
    return [
        kv.KVPool(n, 2, 2, 1, 8, dtype="fp16", device=device, layout="page_first_direct")
        for n in (NUM_DEVICE, NUM_HOST)
    ]


def stamp(pool: Any, pages: Any, value: float) -> None:
    """Write a value to all layers of some pages."""
    for layer in range(pool.num_layers):
        pool.k(layer)[pages] = value
        pool.v(layer)[pages] = value + 0.5


def assert_stamped(pool: Any, pages: Any, value: float, what: str) -> None:
    for layer in range(pool.num_layers):
        for array, expected in ((pool.k(layer), value), (pool.v(layer), value + 0.5)):
            got = np.asarray(array[pages], np.float64)
            assert (got == expected).all(), f"{what}: layer {layer}, expected {expected}, {got}"


class Place:
    """Where stores of several processes keep their blocks, and its weather.

    Attributes
    ----------
    blocks : what page a block was put from, by hash
    kind : "", "failing", "slow" or "late": calls take longer than anything waits for
    has_failed : whether calls have failed or were late, so that blocks may be missing
    capacity : blocks
    """

    def __init__(self, world: Simulated, capacity: int) -> None:
        self.world, self.capacity = world, capacity
        self.blocks: dict[int, list[Any]] = {}
        self.kind = ""
        self.has_failed = capacity < NUM_HASHES

    def pass_by(self) -> None:
        """Take the time of a call, or fail."""
        kind = self.kind
        self.has_failed = self.has_failed or kind in ("failing", "late")
        self.world.time.sleep({"slow": SLOW_S, "late": 20.0}.get(kind, 1e-4))
        if kind == "failing" and self.world.random.random() < 0.8:
            raise ConnectionError("the store is gone")


class PlaceStore:
    """A store of a process's host pool."""

    def __init__(self, place: Place, pool: Any) -> None:
        self.place, self.pool = place, pool

    def match(self, hashes: list[int]) -> int:
        self.place.pass_by()
        known = self.place.blocks
        return next((i for i, hash in enumerate(hashes) if hash not in known), len(hashes))

    def put(self, hashes: list[int], pages: list[int]) -> list[str]:
        outcomes = []
        for hash, page in zip(hashes, pages, strict=True):
            content = [array[page].copy() for array in self._arrays()]
            self.place.pass_by()  # a process that is killed here has put nothing
            whole = all((a[page] == b).all() for a, b in zip(self._arrays(), content, strict=True))
            assert whole, "a page has changed during its put"
            if hash in self.place.blocks:
                outcomes.append("known")
            elif len(self.place.blocks) >= self.place.capacity:
                outcomes.append("full")
            else:
                self.place.blocks[hash] = content
                outcomes.append("stored")
        return outcomes

    def get(self, hashes: list[int], pages: list[int], *, deadline_s: float | None) -> list[bool]:
        arrived = []
        for hash, page in zip(hashes, pages, strict=True):
            for array in self._arrays():
                array[page] = -1  # undefined until the block is whole
            self.place.pass_by()
            content = self.place.blocks.get(hash)
            if content is not None:
                for array, values in zip(self._arrays(), content, strict=True):
                    array[page] = values
            arrived.append(content is not None)
        return arrived

    def clear(self) -> None:
        self.place.blocks.clear()

    def close(self) -> None:
        pass

    def _arrays(self) -> list[Any]:
        pool = self.pool
        return [view(layer) for view in (pool.k, pool.v) for layer in range(pool.num_layers)]


class Contents:
    """Record of the cache's blocks.

    Attributes
    ----------
    inserted : numbers of blocks that were ever inserted
    kept : numbers of blocks that must be found, unless a store has failed or is too small
    written : numbers of blocks that a flush has written to every store
    found : numbers of blocks that a killed process has put into some store, perhaps not into all
    """

    def __init__(self) -> None:
        self.inserted: set[int] = set()
        self.kept: set[int] = set()
        self.written: set[int] = set()
        self.found: set[int] = set()


def run_service(
    world: Simulated, places: list[Place], contents: Contents, write: str, count: int
) -> None:
    draw = world.random
    pools = new_pools(world)
    stores = [PlaceStore(place, pools[1]) for place in places]
    cache = TieredCache(*pools, stores=stores, write=write)
    world.task.process.start(watch, world, cache).is_daemon = True
    pause_s = draw.choice([0.0, 1e-4, 0.02])
    flushes = ["flush"] * draw.randint(0, 1)
    kinds = ["insert", "insert", *["acquire"] * 3, "match", "evict", "prefetch", *flushes]
    for _ in range(count):
        world.time.sleep(pause_s)
        kind = draw.choice(kinds)
        start = draw.randrange(NUM_HASHES)
        numbers = list(range(start, min(NUM_HASHES, start + draw.randint(1, 3))))
        if not world.step(f"{kind} {numbers}"):
            continue
        try:
            perform(world, cache, places, contents, kind, numbers)
        except kv.CacheFull:
            world.note("full")
    if draw.random() < 0.5 and world.step("close"):
        there = set(contents.kept)
        cache.close(deadline_s=1000.0)
        if not any(place.has_failed for place in places):
            contents.written |= there


def watch(world: Simulated, cache: TieredCache) -> None:
    """Look up and acquire a block that is on the device, however slow the stores are."""
    while not cache.closed:
        world.time.sleep(world.random.choice([1e-4, 0.05, 1.0]))
        block = [FIRST_HASH + world.random.randrange(NUM_HASHES)]
        try:
            if block[0] not in cache._tiers[0].device.pages:
                continue
            lease = cache.acquire(block, deadline_s=0)
        except (kv.CacheFull, kv.KvcupyError):  # evicted meanwhile; closed
            continue
        for _ in range(10):
            began = world.now
            try:
                cache.match(block)
                cache.acquire(block).release()
            except kv.KvcupyError:
                break
            took = world.now - began
            assert took < HOT_S or not lease.num_blocks, f"a block on the device took {took:g} s"
            world.time.sleep(0.05)
        lease.release()


def perform(
    world: Simulated, cache: TieredCache, places: list[Place], contents: Contents, kind: str,
    numbers: list[int],
) -> None:  # fmt: skip
    pool = cache.device_pool
    hashes = [FIRST_HASH + number for number in numbers]
    has_failed = any(place.has_failed for place in places)
    began = world.now
    if kind == "insert":
        if pool.allocator.num_free < len(numbers):
            cache.evict(min(len(numbers), int(cache.stats()["device_blocks"])))
            return
        pages = pool.allocator.alloc(len(numbers))
        for number, page in zip(numbers, pages, strict=True):
            stamp(pool, [page], number + 1)
        contents.inserted.update(numbers)
        pool.allocator.free(cache.insert(hashes, pages))
        contents.kept.update(numbers)
        took = world.now - began
        assert took < HOT_S, f"insert took {took:g} s"
    elif kind == "acquire":
        is_kept = set(numbers[:1]) <= contents.kept
        with cache.acquire(hashes, deadline_s=world.random.choice([0.0, 0.5, 100.0])) as lease:
            took = world.now - began
            lease.wait()
            for number, page in zip(numbers, lease.pages, strict=False):
                assert_stamped(pool, [page], number + 1, f"block {number}")
            is_excused = has_failed or any(place.has_failed for place in places) or took < 100.0
            if is_kept and not lease.num_blocks:
                known = cache.match(hashes).stores
                assert known or is_excused, f"lost block {numbers[0]}"
    elif kind == "match":
        match = cache.match(hashes)
        assert match.device <= match.host <= match.stores <= len(hashes)
        assert set(numbers[: match.stores]) <= contents.inserted, "a block that nobody inserted"
        if set(numbers) <= contents.kept and not any(place.has_failed for place in places):
            assert match.stores == len(numbers), f"lost one of {numbers}"
    elif kind == "evict":
        cache.evict(1)
    elif kind == "prefetch":
        cache.prefetch(hashes)
    else:
        there = set(contents.kept)
        deadline_s = world.random.choice([0.1, 5.0, 1000.0])
        num_unwritten = cache.flush(deadline_s=deadline_s)
        took = world.now - began
        assert took < deadline_s + HOT_S, f"flush took {took:g} s"
        if num_unwritten == 0 and not any(place.has_failed for place in places):
            missing = {n for n in there if FIRST_HASH + n not in places[-1].blocks}
            missing -= contents.found
            assert not missing, f"a flush has not written {missing}"
            contents.written |= there


def weather(world: Simulated, places: list[Place], process: Process) -> None:
    draw = world.random
    for _ in range(draw.choice([0, 0, draw.randint(1, 4)])):
        world.time.sleep(draw.choice([1e-4, 2e-3, 0.5]))
        place, kind = draw.choice(places), draw.choice(["failing", "slow", "slow", "late"])
        if not world.step(f"store: {kind}"):
            continue
        place.kind = kind
        world.time.sleep(draw.choice([1e-3, 0.1, 2.0]))
        place.kind = ""
    if draw.random() < 0.5 and world.step("kill"):
        process.kill()


def tiers(world: Simulated) -> Contents:
    """Run a service on a cache over one to three stores, kill it, and start it again."""
    draw = world.random
    capacities = [draw.choice([4, NUM_HASHES]) for _ in range(draw.randint(1, 3))]
    places = [Place(world, capacity) for capacity in capacities]
    contents = Contents()
    write = draw.choice(["through", "back"])
    for generation in range(draw.randint(1, 4)):
        process = world.process(f"service{generation}")
        process.start(run_service, world, places, contents, write, draw.randint(1, 60))
        world.process("weather").start(weather, world, places, process)
        world.run(5000.0)
        process.kill()
        for place in places:
            place.kind = ""
            contents.found |= {hash - FIRST_HASH for hash in place.blocks}
        contents.kept = set(contents.written)
    return contents
