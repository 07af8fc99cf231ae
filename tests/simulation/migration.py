"""Senders and receivers of pages in a simulated world, and the permitted outcomes of pulls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from support.world import Process, Simulated

import kvcupy as kv
from kvcupy.remote.migration.receiver import PageReceiver
from kvcupy.remote.migration.sender import PageSender

from .pools import assert_stamped, stamp

TLS_PROBABILITY = 0.4
MAX_STRANGERS = 20
NUM_PAGES = 8
SECRET = b"a secret of at least sixteen bytes"
SLACK_S = 7.0  # that a pull may take beyond its deadline, for the handshake of a stopped peer


def new_pool(world: Simulated) -> Any:
    return kv.KVPool(NUM_PAGES, 2, 3, 1, 8, dtype="fp16", device=world.device())


@dataclass
class Offer:
    """An offer that a receiver can take."""

    ticket: bytes
    value: int
    num_pages: int
    made_at: float
    lease_s: float
    withdrawn: bool = False


@dataclass
class History:
    """Record of a run.

    Attributes
    ----------
    offers : offers that no receiver has taken
    is_calm : whether neither processes nor connections have failed, so that pulls must succeed
    """

    offers: list = field(default_factory=list)
    is_calm: bool = True
    pulled: int = 0
    failed: int = 0


def run_sender(
    world: Simulated,
    history: History,
    listen: str,
    tls: Any,
    secret: bytes | None,
    count: int,
    pool: Any,
    values: Iterator[int],
) -> None:
    sender = PageSender(pool, listen=listen, secret=secret, tls=tls)
    draw = world.random
    for _ in range(count):
        world.time.sleep(draw.choice([0.0, 0.001, 0.05]))
        if not world.step("offer"):
            continue
        n = draw.randint(1, 3)
        if pool.allocator.num_free < n:
            world.time.sleep(1.0)
            continue
        pages = pool.allocator.alloc(n)
        value = next(values)
        stamp(pool, pages, value)
        lease_s = draw.choice([0.5, 5.0, 30.0])
        ticket = sender.offer(pages, lease_s=lease_s, after=False)
        offer = Offer(ticket, value, n, world.now, lease_s)
        history.offers.append(offer)
        if draw.random() < 0.1 and world.step("withdraw"):
            world.time.sleep(draw.choice([0.0, 0.01]))
            offer.withdrawn = True
            sender.withdraw(ticket)
            stamp_free(pool)
    # Every offer ends; then every page is back.
    world.time.sleep(31.0)
    for _ in range(200):
        if pool.allocator.num_free == NUM_PAGES:
            break
        world.time.sleep(1.0)
    assert pool.allocator.num_free == NUM_PAGES, f"pages were lost: {sender.stats()}"
    sender.close()


def stamp_free(pool: Any) -> None:
    """Overwrite the pages that are free, as their next owner would."""
    pages = pool.allocator.alloc(pool.allocator.num_free)
    if len(pages):
        stamp(pool, pages, -1)
        pool.allocator.free(pages)


def run_receiver(
    world: Simulated, history: History, tls: Any, secret: bytes | None, count: int
) -> None:
    pool = new_pool(world)
    receiver = PageReceiver(pool, secret=secret, tls=tls)
    draw = world.random
    for _ in range(count):
        world.wait(lambda: bool(history.offers), world.now + 5.0)
        if not history.offers:
            break
        offer = history.offers.pop(draw.randrange(len(history.offers)))
        if not world.step("pull"):
            continue
        pull_once(world, history, receiver, pool, offer)
    for _ in range(200):
        if pool.allocator.num_free == NUM_PAGES:
            break
        world.time.sleep(1.0)
    assert pool.allocator.num_free == NUM_PAGES, f"pages were lost: {receiver.stats()}"
    assert receiver.stats()["quarantined_pages"] == 0
    receiver.close()


def pull_once(
    world: Simulated, history: History, receiver: PageReceiver, pool: Any, offer: Offer
) -> None:
    draw = world.random
    pages = pool.allocator.alloc(offer.num_pages)
    stamp(pool, pages, -2)
    deadline_s = draw.choice([1.0, 10.0])
    process = world.task.process
    began, stopped_before = world.now, process.stopped_s
    was_calm = history.is_calm
    pull = receiver.pull(offer.ticket, pages, deadline_s=deadline_s, after=False)
    is_cancelled = draw.random() < 0.1 and world.step("cancel")
    if is_cancelled:
        world.time.sleep(draw.choice([0.0, 1e-4, 0.01]))
        pull.cancel()
    try:
        pull.synchronize()
    except kv.TransferError as error:
        history.failed += 1
        world.note(f"pull failed: {error.reason}")
        is_late = world.now > offer.made_at + offer.lease_s
        is_excused = is_cancelled or offer.withdrawn or is_late or not history.is_calm
        assert is_excused or not was_calm, f"a pull failed in calm: {error.reason}: {error}"
    else:
        history.pulled += 1
        world.note("pulled")
        assert_stamped(pool, pages, offer.value, "pulled pages")
    took = world.now - began - (process.stopped_s - stopped_before)
    assert took < deadline_s + SLACK_S, f"a pull of {deadline_s:g} s took {took:g} s"
    pool.allocator.free(pages)
    # The next owner of the pages writes them, and no late byte may change that.
    reused = pool.allocator.alloc(offer.num_pages)
    stamp(pool, reused, -3)
    world.time.sleep(draw.choice([0.0, 0.01, 2.0]))
    assert_stamped(pool, reused, -3, "reused pages")
    pool.allocator.free(reused)


def disturb(
    world: Simulated,
    history: History,
    processes: list[Process],
    addresses: list[str | tuple[str, int]],
) -> None:
    """Disturb processes and connections, and connect strangers, at random times."""
    draw = world.random
    for _ in range(draw.randint(0, 6)):
        world.time.sleep(draw.choice([0.001, 0.02, 0.3, 3.0]))
        kind = draw.choice(["reset", "stop", "partition", "kill", "silent", "garbage"])
        if not world.step(kind):
            continue
        if kind in ("silent", "garbage"):
            address = draw.choice(addresses)
            for _ in range(draw.randint(1, MAX_STRANGERS)):
                stranger(world, address, kind)
            continue
        history.is_calm = False
        victim = draw.choice(processes)
        if kind == "reset":
            live = world.network.live()
            if live:
                world.network.reset(draw.choice(live))
        elif kind == "stop" and victim.is_alive:
            victim.stop()
            world.time.sleep(draw.choice([0.01, 1.0, 20.0]))
            victim.resume()
        elif kind == "partition":
            world.network.partition(victim)
            world.time.sleep(draw.choice([0.01, 1.0, 20.0]))
            world.network.heal(victim)
        elif kind == "kill" and draw.random() < 0.3:
            victim.kill()


def stranger(world: Simulated, address: str | tuple[str, int], kind: str) -> None:
    """Connect without being a receiver."""
    is_unix = isinstance(address, str)
    connection = world.socket.socket(world.socket.AF_UNIX if is_unix else world.socket.AF_INET)
    connection.settimeout(1.0)
    try:
        connection.connect(address)
        if kind == "garbage":
            connection.sendall(world.random.randbytes(world.random.randint(1, 300)))
    except OSError:
        pass  # the sender is not there


def migration(world: Simulated) -> History:
    """Run senders, receivers and faults."""
    draw = world.random
    history = History()
    values = iter(range(1, 2000))
    tls = world.ssl.SSLContext() if draw.random() < TLS_PROBABILITY else None
    secret = SECRET if draw.random() < 0.7 else None
    processes, addresses = [], []
    for i in range(draw.randint(1, 2)):
        process = world.process(f"sender{i}")
        port = 9000 + i
        is_unix = draw.random() < 0.3
        addresses.append(f"/run/sender{i}" if is_unix else ("127.0.0.1", port))
        listen = f"unix:/run/sender{i}" if is_unix else f"tcp:127.0.0.1:{port}"
        process.start(
            run_sender,
            world,
            history,
            listen,
            tls,
            secret,
            draw.randint(1, 8),
            new_pool(world),
            values,
        )
        processes.append(process)
    for i in range(draw.randint(1, 3)):
        process = world.process(f"receiver{i}")
        process.start(run_receiver, world, history, tls, secret, draw.randint(1, 6))
        processes.append(process)
    world.process("weather").start(disturb, world, history, processes, addresses)
    world.run(2000.0)
    return history


def stale_socket(world: Simulated) -> None:
    """Senders that start at once over the socket of a dead one: exactly one listens, reachably."""
    draw = world.random
    history = History()
    path = "/run/pages"
    first = world.process("first")
    first.start(lambda: PageSender(new_pool(world), listen=f"unix:{path}"), name="serve")
    offers = []

    def serve() -> None:
        pool = new_pool(world)
        world.time.sleep(draw.choice([0.0, 1e-5, 1e-4]))
        try:
            sender = PageSender(pool, listen=f"unix:{path}")
        except OSError as error:
            world.note(f"in use: {error}")
            return
        pages = pool.allocator.alloc(1)
        stamp(pool, pages, 7)
        ticket = sender.offer(pages, after=False)
        offers.append(Offer(ticket, 7, 1, world.now, 30.0))
        world.time.sleep(20.0)
        sender.close()

    def fetch() -> None:
        world.time.sleep(1.0)
        pool = new_pool(world)
        receiver = PageReceiver(pool)
        for offer in offers:
            pull_once(world, history, receiver, pool, offer)
        assert len(offers) == 1, f"{len(offers)} senders listen on one path"
        receiver.close()

    def start() -> None:
        world.time.sleep(0.5)
        first.kill()
        for i in range(draw.randint(2, 3)):
            world.process(f"sender{i}").start(serve)
        world.process("receiver").start(fetch)

    world.process("starter").start(start)
    world.run(100.0)
