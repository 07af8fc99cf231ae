"""Sequences of several groups of layers that leave for another process, in a simulated world."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from support.world import Simulated

import kvcupy as kv
from kvcupy.remote.migration.receiver import PageReceiver
from kvcupy.remote.migration.sender import PageSender

from .migration import SECRET, SLACK_S, History, Offer, disturb
from .pools import assert_stamped, stamp

MAX_TOKENS, CHECKPOINT_TOKENS = 14, 4
FULL, WINDOWED, RECURRENT = 0, 1, 2  # layers


def new_cache(world: Simulated) -> Any:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 8, "dtype": "fp16"}
    return kv.PagedKVCache(
        num_q_heads=1, page_size=2, num_tokens=3 * MAX_TOKENS, max_seq_len=MAX_TOKENS + 1,
        max_batch_tokens=MAX_TOKENS, device=world.device(),
        groups=[
            kv.FullAttention(layers=[FULL], **shape),
            kv.SlidingWindow(layers=[WINDOWED], window=3, **shape),
            kv.Recurrent(
                layers=[RECURRENT], state={"ssm": ((8,), "fp32")},
                checkpoint_tokens=CHECKPOINT_TOKENS,
            ),
        ],
    )  # fmt: skip


def kept_pages(cache: Any, name: str) -> list[tuple[Any, Any]]:
    """Return the pool and the pages of a sequence in each group of attention layers."""
    found = [(group.pool, group.sequences.find(name).pages) for group in cache._groups]
    return [(pool, pages[pages >= 0]) for pool, pages in found]


def run_step(cache: Any, name: str, count: int, value: float, ticket: Any = None) -> Any:
    """Append tokens in a step that writes a value to the pages and the state of a sequence.

    Of pages that it had before, the last one is written, which no offer shares any more.

    ticket : is called in the step; None: nothing is
    """
    first = max(0, cache.sequence_length(name) // 2)
    stream = cache.device.stream()
    with cache.forward([name], [count]):
        got = ticket() if ticket is not None else None
        slots = cache.state_slots(stream=stream)
        found = [(group.pool, group.sequences.find(name).pages[first:]) for group in cache._groups]
        pages = [(pool, own[own >= 0]) for pool, own in found]

        def write() -> None:
            for pool, own in pages:
                stamp(pool, own, value)
            cache.state(RECURRENT, "ssm")[int(slots[0])] = value

        stream.call(write)
    stream.synchronize()
    return got


def assert_free(world: Simulated, cache: Any, what: Any) -> None:
    """Wait until all pages and states are free, which they must become."""

    def missing() -> list[int]:
        assert cache.num_available_pages >= 0  # releases what ended offers have held
        return [pool.num_pages - pool.allocator.num_available for pool in cache.sequence_pools]

    for _ in range(200):
        if not any(missing()):
            return
        world.time.sleep(1.0)
    raise AssertionError(f"pages were lost: {missing()}, {[each.stats() for each in what]}")


def run_exporter(
    world: Simulated, history: History, ports: list[int], secret: bytes | None, count: int,
    values: Iterator[int],
) -> None:  # fmt: skip
    cache, draw = new_cache(world), world.random
    senders = [
        PageSender(pool, listen=f"tcp:127.0.0.1:{port}", secret=secret)
        for pool, port in zip(cache.sequence_pools, ports, strict=True)
    ]
    for number in range(count):
        world.time.sleep(draw.choice([0.0, 0.001, 0.05]))
        if not world.step("export"):
            continue
        name, value, lease_s = f"s{number}", next(values), draw.choice([0.5, 5.0, 30.0])
        offer = Offer(b"", value, 0, world.now, lease_s)

        def export(name: str = name, offer: Offer = offer) -> None:
            offer.ticket = cache.export_sequence(name, senders, lease_s=offer.lease_s)
            offer.num_pages = cache.sequence_length(name)
            history.offers.append(offer)

        in_step = draw.random() < 0.5
        cache.add_sequence(name)
        first = draw.choice([0, CHECKPOINT_TOKENS])  # so that a state is kept
        try:
            if first:
                run_step(cache, name, first, value)
            num_tokens = draw.randint(1, MAX_TOKENS - first)
            run_step(cache, name, num_tokens, value, export if in_step else None)
            if not in_step:
                export()
            if draw.random() < 0.3:  # the offer has a copy of the state
                run_step(cache, name, 1, -5)
        except kv.CacheFull:
            world.time.sleep(1.0)
        cache.remove_sequence(name)
        if offer.ticket and draw.random() < 0.1 and world.step("withdraw"):
            world.time.sleep(draw.choice([0.0, 0.01]))
            offer.withdrawn = True
            senders[0].withdraw(offer.ticket)
    world.time.sleep(31.0)
    assert_free(world, cache, senders)
    for sender in senders:
        sender.close()


def run_importer(world: Simulated, history: History, secret: bytes | None, count: int) -> None:
    cache, draw = new_cache(world), world.random
    receivers = [PageReceiver(pool, secret=secret) for pool in cache.sequence_pools]
    for number in range(count):
        world.wait(lambda: bool(history.offers), world.now + 5.0)
        if not history.offers:
            break
        offer = history.offers.pop(draw.randrange(len(history.offers)))
        if world.step("import"):
            import_once(world, history, cache, receivers, f"i{number}", offer)
    assert_free(world, cache, receivers)
    for receiver in receivers:
        receiver.close()


def import_once(
    world: Simulated, history: History, cache: Any, receivers: list[PageReceiver], name: str,
    offer: Offer,
) -> None:  # fmt: skip
    """Import a sequence: it has come whole, or fails where it may; then its pages are reused."""
    draw, process = world.random, world.task.process
    deadline_s = draw.choice([1.0, 10.0])
    began, stopped_before, was_calm = world.now, process.stopped_s, history.is_calm
    pull = cache.import_sequence(name, offer.ticket, receivers, deadline_s=deadline_s)
    is_cancelled = draw.random() < 0.1 and world.step("cancel")
    if is_cancelled:
        world.time.sleep(draw.choice([0.0, 1e-4, 0.01]))
        pull.cancel()
    try:
        pull.synchronize()
    except kv.TransferError as error:
        history.failed += 1
        world.note(f"import failed: {error.reason}")
        is_late = world.now > offer.made_at + offer.lease_s
        is_excused = is_cancelled or offer.withdrawn or is_late or not history.is_calm
        assert is_excused or not was_calm, f"an import failed in calm: {error.reason}: {error}"
    else:
        history.pulled += 1
        world.note("imported")
        for number, (pool, pages) in enumerate(kept_pages(cache, name)):
            assert_stamped(pool, pages, offer.value, f"pages of group {number}")
        slots = [*cache.state_slots_of([name]), *cache._states.sound_kept(name).values()]
        states = np.asarray(cache.state(RECURRENT, "ssm"))[slots]
        assert (states == offer.value).all(), f"states: expected {offer.value}, got {states}"
        assert cache.sequence_length(name) == offer.num_pages
    took = world.now - began - (process.stopped_s - stopped_before)
    assert took < deadline_s + SLACK_S, f"an import of {deadline_s:g} s took {took:g} s"
    cache.remove_sequence(name)
    # The next owner of the pages writes them, and no late byte may change that.
    cache.add_sequence("next")
    run_step(cache, "next", MAX_TOKENS, -3)
    world.time.sleep(draw.choice([0.0, 0.01, 2.0]))
    for pool, pages in kept_pages(cache, "next"):
        assert_stamped(pool, pages, -3, "reused pages")
    cache.remove_sequence("next")


def sequences(world: Simulated) -> History:
    """Run caches that export and caches that import, and faults."""
    draw = world.random
    history = History()
    values = iter(range(1, 2000))
    secret = SECRET if draw.random() < 0.7 else None
    ports = [9000, 9001, 9002]
    exporter = world.process("exporter")
    exporter.start(run_exporter, world, history, ports, secret, draw.randint(1, 6), values)
    processes = [exporter]
    for i in range(draw.randint(1, 2)):
        process = world.process(f"importer{i}")
        process.start(run_importer, world, history, secret, draw.randint(1, 5))
        processes.append(process)
    addresses: list[str | tuple[str, int]] = [("127.0.0.1", port) for port in ports]
    world.process("weather").start(disturb, world, history, processes, addresses)
    world.run(2000.0)
    return history
