"""Signal handlers that raise in the middle of any call; later calls must still work."""

from __future__ import annotations

import gc
from typing import Any

from support.world import Interrupt, Simulated

import kvcupy as kv
from kvcupy.cache.tiered.cache import TieredCache

from .tiered import Place, PlaceStore

NUM_PAGES = 8
FIRST_HASH = 1 << 100


def pool_of(world: Simulated, device: Any = None) -> Any:
    return kv.KVPool(
        NUM_PAGES, 2, 2, 1, 8, dtype="fp16", device=device or world.device(),
        layout="page_first_direct",
    )  # fmt: skip


def cache_calls(world: Simulated) -> Any:
    device = world.device()
    pools = [pool_of(world, device) for _ in range(2)]
    cache = TieredCache(*pools, stores=[PlaceStore(Place(world, 100), pools[1])])

    def call() -> None:
        pages = cache.device_pool.allocator.alloc(1)
        number = world.random.randrange(8)
        try:
            unneeded = cache.insert([FIRST_HASH + number], pages)
        except kv.CacheFull:
            unneeded = pages
        cache.device_pool.allocator.free(unneeded)
        with cache.acquire([FIRST_HASH + number]) as lease:
            lease.wait()
        cache.evict(min(1, int(cache.stats()["device_blocks"])))

    return cache, call


SUBJECTS = (cache_calls,)


def interrupts(world: Simulated) -> None:
    """Interrupt a loop of calls; then a call of another thread, and closing, must still return."""
    subject = world.random.choice(SUBJECTS)
    process = world.process("service")
    made = []

    def work() -> None:
        made.extend(subject(world))
        for _ in range(12):
            try:
                made[1]()
            except Interrupt:
                world.note("caught")
            except kv.CacheFull as error:  # pages of interrupted calls
                world.note(f"{type(error).__name__}")

    worker = process.start(work)

    def disturb() -> None:
        for _ in range(world.random.randint(1, 8)):
            world.time.sleep(world.random.choice([0.0, 1e-5, 1e-4, 1e-3]))
            if made and world.step("interrupt"):
                world.interrupt(worker)

    process.start(disturb)

    def use_afterwards() -> None:
        world.wait(lambda: worker.is_over)
        worker.interrupt = None
        gc.collect(0)  # two interrupts in a row may leave a cycle that holds a call
        began = world.now
        made[0].stats()
        made[0].close()
        took = world.now - began
        assert took < 120.0, f"closing took {took:g} s"

    process.start(use_afterwards)
    world.run(400.0)
