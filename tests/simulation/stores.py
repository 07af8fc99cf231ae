"""Clients of a shared store in a simulated world, and the permitted results of calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

from support.world import Process, Simulated

import kvcupy as kv
from kvcupy.remote.stores import mooncake, shm
from kvcupy.remote.stores.shm import ShmBackend
from kvcupy.remote.stores.store import SharedStore

from .mooncake_model import MooncakeModel
from .pools import assert_stamped, stamp
from .redis_model import PORT, RedisModel

NUM_PAGES, NUM_HASHES = 6, 12
FIRST_HASH = 1 << 100
# Of clients: no encryption, a key per tenant, or one key for all tenants.
ENCRYPTION_KEYS = None, lambda tenant: sha256(tenant.encode()).digest(), bytes(32)


def new_pool(world: Simulated) -> Any:
    return kv.KVPool(
        NUM_PAGES, 2, 2, 1, 8, dtype="fp16", device=world.device(), layout="page_first_direct"
    )


class Blocks:
    """Record of a store. The hash and owner of a block determine its content.

    Attributes
    ----------
    is_calm : whether no process was killed or stopped, and nothing was removed
    stored : hashes of each owner, a tenant and its encryption key, that a completed put has stored
    evicts : whether the capacity is too small for all blocks
    """

    def __init__(self) -> None:
        self.is_calm = True
        self.evicts = False
        self.stored = {}
        self.puts = self.hits = self.misses = 0

    @staticmethod
    def value(number: int, owner: tuple[int, int]) -> int:
        tenant, key = owner
        return number + 1 + 100 * tenant + 200 * key


def run_client(
    world: Simulated, blocks: Blocks, url: str, tenant: int, count: int,
    is_ready: Callable[[], bool] = lambda: True, slack_s: float = 1.0, **options: Any,
) -> None:  # fmt: skip
    world.wait(is_ready)
    draw = world.random
    pool = new_pool(world)
    deadline_s = draw.choice([0.5, 5.0])
    owner = tenant, draw.choice([0, 0, 1, 2])
    try:
        store = SharedStore.open(
            url, pool, tenant=f"tenant {tenant}", deadline_s=deadline_s,
            encryption_key=ENCRYPTION_KEYS[owner[1]], **options,
        )  # fmt: skip
    except OSError as error:
        assert not blocks.is_calm, f"cannot open the store in calm: {error}"
        return
    known = blocks.stored.setdefault(owner, set())
    process = world.task.process
    for _ in range(count):
        world.time.sleep(draw.choice([0.0, 1e-4, 0.01]))
        candidates = sorted(known) if len(known) > 1 and draw.random() < 0.6 else range(NUM_HASHES)
        numbers = draw.sample(candidates, min(len(candidates), draw.randint(1, 4)))
        hashes = [FIRST_HASH + number for number in numbers]
        try:
            pages = pool.allocator.alloc(len(numbers))
        except kv.CacheFull:  # late bytes may still arrive in the others
            assert not blocks.is_calm
            continue
        began, stopped_before = world.now, process.stopped_s
        kind = draw.choice(["put", "put", "get", "get", "get", "match"])
        if not world.step(f"{kind} {numbers} of owner {owner}"):
            pool.allocator.free(pages)
            continue
        expected = set(known)
        if kind == "put":
            for number, page in zip(numbers, pages, strict=True):
                stamp(pool, [page], blocks.value(number, owner))
            outcomes = store.put(hashes, pages)
            blocks.puts += outcomes.count("stored")
            for number, outcome in zip(numbers, outcomes, strict=True):
                assert outcome in ("stored", "known", "full", "failed"), outcome
                if outcome in ("stored", "known"):
                    known.add(number)
                elif blocks.is_calm and not blocks.evicts:
                    raise AssertionError(f"a put in calm was {outcome}")
        elif kind == "get":
            stamp(pool, pages, -1)
            for number, page, hit in zip(numbers, pages, store.get(hashes, pages), strict=True):
                if hit:
                    blocks.hits += 1
                    assert_stamped(pool, [page], blocks.value(number, owner), f"block {number}")
                    known.add(number)
                else:
                    blocks.misses += 1
                    is_lost = number in expected and blocks.is_calm and not blocks.evicts
                    assert not is_lost, f"block {number} was lost"
        else:
            leading = store.match(hashes)
            assert 0 <= leading <= len(hashes)
            if blocks.is_calm and not blocks.evicts:
                least = next((i for i, n in enumerate(numbers) if n not in expected), len(numbers))
                assert leading >= least, f"match gave {leading}, {least} blocks are stored"
        took = world.now - began - (process.stopped_s - stopped_before)
        assert took < deadline_s + slack_s, f"{kind} of {deadline_s:g} s took {took:g} s"
        pool.allocator.free(pages)
        reuse(world, pool)
    store.close()


def reuse(world: Simulated, pool: Any) -> None:
    """Write free pages as their next owner does; no late byte may change them."""
    pages = pool.allocator.alloc(pool.allocator.num_free)
    stamp(pool, pages, -2)
    world.time.sleep(world.random.choice([0.0, 0.0, 0.02, 2.0]))
    assert_stamped(pool, pages, -2, "reused pages")
    pool.allocator.free(pages)


def disturb(
    world: Simulated, blocks: Blocks, processes: list[Process], hook: dict[Process, tuple[str, int]]
) -> None:
    """Kill and stop clients in the middle of their calls."""
    draw = world.random
    for _ in range(draw.randint(0, 4)):
        victim = draw.choice(processes)
        kind = draw.choice(["kill", "stop", "pause"])
        if not world.step(f"{kind} {victim.name} soon"):
            continue
        blocks.is_calm = blocks.is_calm and kind == "pause"
        hook[victim] = (kind, draw.randint(1, 40))
        world.time.sleep(draw.choice([0.01, 0.5, 3.0]))
        if kind == "stop" and victim.is_alive:
            world.time.sleep(draw.choice([0.0, 2.0]))
            victim.resume()
    for process in processes:
        hook.pop(process, None)
        process.resume()


def audit(world: Simulated, blocks: Blocks, capacity: int) -> None:
    """After all clients have ended, check that every slot of the store is usable."""
    pool = new_pool(world)
    store = SharedStore.open(
        "shm:simulated", pool, capacity_bytes=capacity, tenant="auditor", threads=1
    )
    numbers = range(300, 300 + store.stats()["capacity_blocks"])
    for first in range(0, len(numbers), NUM_PAGES // 2):
        some = numbers[first : first + NUM_PAGES // 2]
        hashes = [FIRST_HASH + number for number in some]
        pages = list(range(len(some)))
        for number, page in zip(some, pages, strict=True):
            stamp(pool, [page], number)
        assert store.put(hashes, pages) == ["stored"] * len(some), f"blocks {some}"
        copies = [NUM_PAGES // 2 + page for page in pages]
        assert store.get(hashes, copies) == [True] * len(some), f"blocks {some}"
        for number, page in zip(some, copies, strict=True):
            assert_stamped(pool, [page], number, "a new block")
    stats = store.stats()
    assert stats["blocks"] == stats["capacity_blocks"], f"slots were lost: {stats}"
    store.close()


def shared_memory(world: Simulated) -> Blocks:
    """Run several clients of "shm:"; some are killed or stopped while they write."""
    draw = world.random
    blocks = Blocks()
    blocks.evicts = draw.random() < 0.4
    hook = {}

    def at(backend: Any, step: str) -> None:
        world.pause()
        process = world.task.process
        if process in hook:
            kind, left = hook[process]
            hook[process] = kind, left - 1
            if left == 0 and kind == "kill":
                world.note(f"at {step}")
                process.kill()
            elif left == 0 and kind == "stop":
                world.note(f"at {step}")
                process.stop()
                world.suspend()

    def copied_in_pieces(parts: Any, is_read: bool) -> None:
        """Copy as the functions of the backend do, but with other tasks running in between."""
        for in_slot, in_block in parts.pairs:
            if parts.update is not None and not is_read:
                parts.update(in_block)
            middle = draw.randint(0, len(in_block))
            for piece in (slice(0, middle), slice(middle, None)):
                if is_read:
                    in_block[piece] = in_slot[piece]
                else:
                    in_slot[piece] = in_block[piece]
                at(None, "copy")
            if parts.update is not None and is_read:
                parts.update(in_block)

    original = ShmBackend._at, shm._read_parts, shm._write_parts, shm._MAX_POLL_S
    shm._MAX_POLL_S = 3e-3  # few polls of the lock of a stopped process, which cost most of a run
    ShmBackend._at = at
    shm._read_parts = lambda parts: copied_in_pieces(parts, True)
    shm._write_parts = lambda parts: copied_in_pieces(parts, False)
    try:
        processes = []
        num_slots = draw.randint(2, 6) if blocks.evicts else 6 * NUM_HASHES
        block_bytes = new_pool(world).page_bytes
        capacity = shm.Layout(block_bytes, num_slots).num_bytes
        for i in range(draw.randint(1, 4)):
            process = world.process(f"client{i}")
            tenant = draw.randrange(2)
            quota = 4096 * draw.randint(1, 3) if blocks.evicts and draw.random() < 0.5 else None
            process.start(
                partial(run_client, capacity_bytes=capacity, threads=1, quota_bytes=quota),
                world, blocks, "shm:simulated", tenant, draw.randint(1, 15), name="client",
            )  # fmt: skip
            processes.append(process)
        world.process("weather").start(disturb, world, blocks, processes, hook)
        world.run(2000.0)
        world.process("auditor").start(audit, world, blocks, capacity)
        world.run(2000.0)
    finally:
        ShmBackend._at, shm._read_parts, shm._write_parts, shm._MAX_POLL_S = original
    return blocks


# --- Redis ----------------------------------------------------------------------------------------


def disturb_server(
    world: Simulated, blocks: Blocks, server: RedisModel, clients: list[Process]
) -> None:
    """Make the server, its connections and its clients fail."""
    draw = world.random
    for _ in range(draw.randint(0, 5)):
        world.time.sleep(draw.choice([1e-3, 0.02, 0.5]))
        kind = draw.choice(["reset", "slow", "stop", "restart", "full", "partition", "kill"])
        if not world.step(kind):
            continue
        blocks.is_calm = False
        if kind == "reset" and (live := world.network.live()):
            world.network.reset(draw.choice(live))
        elif kind == "slow":
            server.delay_s = draw.choice([0.01, 2.0])
            world.time.sleep(draw.choice([0.1, 3.0]))
            server.delay_s = 0.0
        elif kind == "stop":
            server.process.stop()
            world.time.sleep(draw.choice([0.1, 10.0]))
            server.process.resume()
        elif kind == "restart":
            server.process.kill()
            world.time.sleep(draw.choice([0.0, 1.0]))
            server.start()
        elif kind == "full":
            server.memory_bytes = draw.choice([0, 1000])
        elif kind == "partition":
            world.network.partition(server.process)
            world.time.sleep(draw.choice([0.1, 10.0]))
            world.network.heal(server.process)
        elif kind == "kill":
            draw.choice(clients).kill()


def redis(world: Simulated) -> Blocks:
    """Run several clients of a Redis server with every fault except wrong data."""
    draw = world.random
    blocks = Blocks()
    server = RedisModel(world)
    clients = []
    for i in range(draw.randint(1, 3)):
        process = world.process(f"client{i}")
        process.start(
            partial(
                run_client, is_ready=lambda: server.is_listening, retries=draw.choice([0, 1, 3])
            ),
            world, blocks, f"redis://127.0.0.1:{PORT}", draw.randrange(2), draw.randint(1, 12),
            name="client",
        )  # fmt: skip
        clients.append(process)
    world.process("weather").start(disturb_server, world, blocks, server, clients)
    world.run(2000.0)
    return blocks


# --- Mooncake -------------------------------------------------------------------------------------


def disturb_mooncake(
    world: Simulated, blocks: Blocks, model: MooncakeModel, clients: list[Process]
) -> None:
    draw = world.random
    for _ in range(draw.randint(0, 5)):
        world.time.sleep(draw.choice([0.0, 1e-3, 0.5]))
        kind = draw.choice(["failed transfers", "failed transfers", "slow", "lost", "full", "kill"])
        if not world.step(kind):
            continue
        blocks.is_calm = False
        if kind == "kill":
            draw.choice(clients).kill()
        elif kind == "full":
            model.capacity_bytes = 0
        else:
            model.kind = kind
            world.time.sleep(draw.choice([0.01, 5.0, 20.0]))
            model.kind = ""


def mooncake_store(world: Simulated) -> Blocks:
    """Run clients of a Mooncake store whose failed transfers may still write later."""
    draw = world.random
    blocks = Blocks()
    model = MooncakeModel(world)
    names = ("_store_class", "_is_alive", "_own_address", "_MAX_STAGED_BYTES")
    original = {name: getattr(mooncake, name) for name in names}
    if draw.random() < 0.7:
        mooncake._MAX_STAGED_BYTES = 0  # transfers write to the pages themselves
    mooncake._store_class = lambda: model.client
    mooncake._is_alive = lambda master: model.kind != "lost"
    mooncake._own_address = lambda master: "127.0.0.1"
    try:
        clients = []
        for i in range(draw.randint(1, 3)):
            process = world.process(f"client{i}")
            process.start(
                partial(run_client, slack_s=1.0, retries=draw.choice([0, 1])),
                world, blocks, "mooncake://127.0.0.1:50051", draw.randrange(2),
                draw.randint(1, 12), name="client",
            )  # fmt: skip
            clients.append(process)
        world.process("weather").start(disturb_mooncake, world, blocks, model, clients)
        world.run(5000.0)
    finally:
        for name, value in original.items():
            setattr(mooncake, name, value)
    blocks.late_landings = model.late_landings
    return blocks
