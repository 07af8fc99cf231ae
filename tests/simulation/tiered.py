"""A TieredCache with a disk in a simulated world: failing disks, killed processes, lost power."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from support.world import Process, Simulated

import kvcupy as kv
from kvcupy.cache.tiered.cache import TieredCache

from .pools import assert_stamped, stamp

NUM_DEVICE, NUM_HOST, NUM_HASHES = 5, 6, 16
FIRST_HASH = 1 << 100
PATH = "/disk/blocks"
SLOW_S = 1.0  # a disk call of a slow disk
HOT_S = 0.2  # a call that needs no disk


def new_pools(world: Simulated) -> Any:
    device = world.device()
    return [
        kv.KVPool(n, 2, 2, 1, 8, dtype="fp16", device=device, layout="page_first_direct")
        for n in (NUM_DEVICE, NUM_HOST)
    ]


class Disk:
    """Faults of the simulated disk.

    Attributes
    ----------
    kind : "", "read error", "write error", "slow"
    has_failed : whether calls have failed, so that blocks may be missing
    is_small : whether it has fewer slots than there are blocks
    """

    def __init__(self, world: Simulated) -> None:
        self.world = world
        self.kind = ""
        self.has_failed = False
        self.errors = 0
        self.is_small = False
        world.files.fault = self.fault

    def fault(self, call: str, path: str) -> None:
        if path != PATH:
            return
        if self.kind == "read error" and call == "read" and self.world.random.random() < 0.7:
            self.errors += 1
            self.has_failed = self.has_failed or self.errors >= 5  # the disk is skipped then
            raise OSError(errno.EIO, "Input/output error")
        if self.kind == "write error" and call in ("write", "fsync", "allocate"):
            self.has_failed = True
            code = self.world.random.choice([errno.EIO, errno.ENOSPC])
            raise OSError(code, os.strerror(code))
        if self.kind == "slow" and call in ("read", "write"):
            self.world.time.sleep(SLOW_S)


class Contents:
    """Record of the cache's blocks.

    Attributes
    ----------
    inserted : numbers of blocks that were ever inserted
    kept : numbers of blocks that the cache must have, unless the disk has failed or is too small
    flushed : `kept` after a restart: blocks that a completed flush has put on disk
    """

    def __init__(self) -> None:
        self.inserted: set[int] = set()
        self.kept: set[int] = set()
        self.flushed: set[int] = set()

    def note_flush(self, cache: TieredCache) -> None:
        """Note the blocks of the lower tiers, which a flush is about to write."""
        with cache._shared.lock:
            tiers = cache._shared.tiers
            self.flushed = {
                number for number in range(NUM_HASHES)
                if FIRST_HASH + number in tiers.host.pages
                or (tiers.disk is not None and FIRST_HASH + number in tiers.disk.slots
                    # A block that was torn by a power failure is found when it is read.
                    and (FIRST_HASH + number not in tiers.disk.unverified or number in self.kept))
            }  # fmt: skip


def open_cache(world: Simulated, num_slots: int, write: str) -> Any:
    device_pool, host_pool = new_pools(world)
    cache = TieredCache(
        device_pool, host_pool, disk=PATH, disk_bytes=2 * 4096 + 2 * 4096 * num_slots, write=write
    )
    return cache


def run_service(
    world: Simulated, disk: Disk, contents: Contents, num_slots: int, write: str, count: int
) -> None:
    draw = world.random
    cache = open_cache(world, num_slots, write)
    world.task.process.start(watch, world, cache).is_daemon = True
    pool = cache.device_pool
    pause_s = draw.choice([0.0, 1e-4, 0.02])
    flushes = ["flush"] * draw.randint(0, 1)
    kinds = ["insert", "insert", *["acquire"] * 3, "match", "evict", *flushes]
    for _ in range(count):
        world.time.sleep(pause_s)
        kind = draw.choice(kinds)
        start = draw.randrange(NUM_HASHES)
        numbers = list(range(start, min(NUM_HASHES, start + draw.randint(1, 3))))
        hashes = [FIRST_HASH + number for number in numbers]
        if not world.step(f"{kind} {numbers}"):
            continue
        try:
            perform(world, cache, pool, contents, disk, kind, numbers, hashes)
        except kv.CacheFull:
            world.note("full")
        except OSError as error:
            assert disk.has_failed, error
    if draw.random() < 0.5:
        flush(cache, contents, disk, cache.close)


def watch(world: Simulated, cache: TieredCache) -> None:
    """Look up and acquire a block that is on the device, however slow the disk is."""
    while not cache.closed:
        world.time.sleep(world.random.choice([1e-5, 1e-4, 0.05]))
        block = [FIRST_HASH + world.random.randrange(NUM_HASHES)]
        try:
            if not cache.match(block).device:
                continue
            lease = cache.acquire(block)
        except (kv.CacheFull, kv.KvcupyError):  # evicted meanwhile; closed
            continue
        for _ in range(50):
            began = world.now
            try:
                cache.match(block)
                cache.acquire(block).release()
            except kv.KvcupyError:
                break
            took = world.now - began
            assert took < HOT_S or not lease.num_blocks, f"a block on the device took {took:g} s"
            world.time.sleep(0.01)
        lease.release()


def perform(
    world: Simulated,
    cache: TieredCache,
    pool: Any,
    contents: Contents,
    disk: Disk,
    kind: str,
    numbers: list[int],
    hashes: list[int],
) -> None:
    if kind == "insert":
        if pool.allocator.num_free < len(numbers):
            cache.evict(min(len(numbers), int(cache.stats()["device_blocks"])))
            return
        pages = pool.allocator.alloc(len(numbers))
        for number, page in zip(numbers, pages, strict=True):
            stamp(pool, [page], number + 1)
        contents.inserted.update(numbers)
        try:
            unneeded = cache.insert(hashes, pages)
        except BaseException:
            pool.allocator.free(pages)
            raise
        contents.kept.update(numbers)
        pool.allocator.free(unneeded)
    elif kind == "acquire":
        errors = disk.errors
        with cache.acquire(hashes) as lease:
            lease.wait()
            for number, page in zip(numbers, lease.pages, strict=False):
                assert_stamped(pool, [page], number + 1, f"block {number}")
            if lease.num_blocks < len(numbers):
                missing = numbers[lease.num_blocks]
                is_excused = disk.has_failed or disk.is_small or disk.errors > errors
                assert missing not in contents.kept or is_excused, f"lost block {missing}"
    elif kind == "match":
        began = world.now
        match = cache.match(hashes)
        assert match.device <= match.host <= match.disk <= len(hashes)
        assert set(numbers[: match.disk]) <= contents.inserted, "a block that nobody inserted"
        took = world.now - began
        assert took < HOT_S, f"match took {took:g} s"
    elif kind == "evict":
        cache.evict(1)
    else:
        flush(cache, contents, disk, cache.flush)


def flush(cache: TieredCache, contents: Contents, disk: Disk, call: Callable[[], object]) -> None:
    """Flush or close the cache, and note the blocks that a restart must find."""
    before = contents.flushed
    contents.note_flush(cache)
    noted, contents.flushed = contents.flushed, before
    try:
        call()
        contents.flushed = noted
    except OSError:
        assert disk.has_failed


def weather(world: Simulated, disk: Disk, process: Process) -> None:
    draw = world.random
    for _ in range(draw.choice([0, 0, draw.randint(1, 4)])):
        world.time.sleep(draw.choice([1e-4, 2e-3, 0.5]))
        kind = draw.choice(["read error", "read error", "write error", "slow", "slow", "short"])
        if not world.step(f"disk: {kind}"):
            continue
        if kind == "short":
            world.files.is_short = True
            continue
        disk.kind = kind
        world.time.sleep(draw.choice([1e-3, 0.1, 2.0 if kind == "slow" else 0.3]))
        disk.kind = ""
    if draw.random() < 0.5 and world.step("kill"):
        process.kill()


def tiered_disk(world: Simulated) -> Any:
    """Run a service on a cache with a disk, kill it, let the power fail, and start it again."""
    draw = world.random
    num_slots = draw.choice([4, 2 * NUM_HASHES])
    contents, disk = Contents(), Disk(world)
    disk.is_small = num_slots < NUM_HASHES
    write = draw.choice(["through", "back"])
    for generation in range(draw.randint(1, 4)):
        process = world.process(f"service{generation}")
        process.start(run_service, world, disk, contents, num_slots, write, draw.randint(1, 60))
        world.process("weather").start(weather, world, disk, process)
        world.run(5000.0)
        process.kill()
        disk.kind, world.files.is_short = "", False
        if draw.random() < 0.6 and world.step("power failure"):
            world.files.lose_power()
        # With write="back" only evicted blocks are on disk.
        contents.kept = set(contents.flushed) if write == "through" else set()
    return contents
