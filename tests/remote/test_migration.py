"""Pages between processes on a stand-in for NIXL, whose READs come when a test likes."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from agents import Network
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from line_process import poll
from pages_world import CANARY, LAYERS, OFFERED, PAGES, World, mutated, pool_of

import kvcupy as kv
from kvcupy.cache.pages import PageAllocator
from kvcupy.config import cache_logger
from kvcupy.remote.migration import receiver as receiving
from kvcupy.remote.migration import sender as sending
from kvcupy.remote.migration import ticket as tickets
from kvcupy.remote.migration.receiver import PageReceiver
from kvcupy.remote.migration.sender import PageSender
from kvcupy.remote.migration.ticket import Status, Ticket

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
SECRET = b"a secret of at least sixteen bytes"


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def reason_of(pull):
    with pytest.raises(kv.TransferError) as caught:
        pull.done()
    return caught.value.reason


# --- Everything at any moment ---


class Run:
    """A pull of which each event comes at a random moment."""

    KINDS = (
        "sender", "receiver", "receiver", "receiver", "fetch", "fetch", "land", "land", "announce",
        "share", "tick",
    )  # fmt: skip
    RARE = ("expire", "cancel", "close", "fail", "lose", "repeat", "again", "reuse", "late", "torn")

    def __init__(self, world, rng, rare):
        self.world, self.rng, self.rare = world, rng, rare
        world.offer(ready=rng.randrange(LAYERS + 1), lease_s=rng.choice([0.01, 0.05, 1.0]))
        self.ticket = world.offered.ticket
        self.canaries = []  # pages of the receiver that have another owner by now
        self.pulls = [world.pull(self.ticket, deadline_s=rng.choice([0.05, 1.0]))]

    def step(self):
        world, rng = self.world, self.rng
        kind = rng.choice(self.RARE if rng.random() < self.rare else self.KINDS)
        reads, agents = world.network.reads, list(world.network.agents.values())
        reading = rng.choice(reads) if reads else None
        if kind == "sender":
            world.sender._step()
        elif kind == "receiver":
            world.receiver._step()
        elif kind == "fetch" and reading:
            reading.fetch()
        elif kind == "torn" and reading:
            reading.fetch(rng.sample(reading.words, rng.randint(1, len(reading.words))))
        elif kind == "land" and reading:
            reading.land()
        elif kind == "share" and reading:
            reading.land(share=rng.random() * 0.99)
        elif kind == "announce":
            world.announce()
        elif kind == "tick":
            world.now += rng.choice([1e-4, 1e-3, 5e-3])
        elif kind == "expire":
            world.offered.expires = 0.0
        elif kind == "late":
            world.now += 0.2
        elif kind == "cancel":
            rng.choice(self.pulls).cancel()
        elif kind == "close" and rng.random() < 0.3:
            world.sender.close()
        elif kind == "fail" and reading:
            reading.fail()
        elif kind == "lose":
            for each in agents:
                each.messages.clear()
        elif kind == "repeat":
            is_done = any(not p.failure and p._landing.done() for p in self.pulls)
            agents[0].messages += [b"?", *[world.offered.token] * 2 * is_done]
        elif kind == "again" and len(self.pulls) < 3 and world.target.allocator.num_free >= 2:
            self.pulls.append(world.pull(self.ticket))
        elif kind == "reuse":
            self.reuse()
        self.check()

    def reuse(self):
        """Free the pages of a failed pull at once, and let another owner write to free pages."""
        world, allocator = self.world, self.world.target.allocator
        for pull in list(world.pulls):
            if pull.failure is not None:
                allocator.free(pull.into)
                world.pulls.remove(pull)
        taken = allocator.alloc(min(2, allocator.num_free))
        world.write(world.target, taken, CANARY)
        self.canaries += taken.tolist()

    def check(self):
        self.world.check()
        for layer in range(LAYERS):
            for view in self.world.views(self.world.target, layer):
                assert (np.array(view[self.canaries]) == CANARY).all(), "landed in others' pages"

    def finish(self):
        """Whatever has happened, everything ends, and every page is free."""
        world = self.world
        while world.num_written < LAYERS:
            world.announce()
        for _ in range(400):
            world.now += 0.05
            world.sender._step()
            world.receiver._step()
            for reading in list(world.network.reads):
                reading.land()
            if not world.receiver._pulls and not world.sender._offers:
                break
        self.check()
        assert not world.receiver._pulls and not world.sender._offers
        assert world.released == 1
        assert world.source.allocator.num_free == PAGES
        assert all(pull._landing.done() for pull in self.pulls)
        self.reuse()
        world.target.allocator.free(world.target.allocator.allocated())
        assert world.target.allocator.num_free == PAGES
        world.sender.close()
        world.receiver.close()
        assert all(
            agent.is_closed and not agent.was_in_use for agent in world.network.agents.values()
        )


def random_runs(monkeypatch, seeds):
    num_completed = 0
    for seed in seeds:
        with monkeypatch.context() as patch:
            rng, world = random.Random(seed), World(patch)
            run = Run(world, rng, 0.3 * rng.random())
            for _ in range(100):
                run.step()
            run.finish()
            num_completed += world.receiver.stats()["completed"]
    return num_completed


EVENTS = ("expire", "cancel", "late", "close", "fail")


def run_with(monkeypatch, event, moment, seed):
    """Let an event come at a moment of a pull, after which free pages are used by others at once;
    return whether the pull was over before."""
    with monkeypatch.context() as patch:
        rng, world = random.Random(seed), World(patch)
        run = Run(world, rng, 0.0)
        run.pulls[0]._deadline, world.offered.expires = 10.0, 10.0
        while world.num_written < rng.choice([1, LAYERS]):
            world.announce()
        for _ in range(moment):
            run.step()
        was_over = not world.receiver._pulls
        if event == "expire":
            world.offered.expires = 0.0
        elif event == "cancel":
            run.pulls[0].cancel()
        elif event == "late":
            run.pulls[0]._deadline = 0.0
            world.receiver._step()
        elif event == "close":
            world.sender.close()
        elif world.network.reads:
            rng.choice(world.network.reads).fail()
        for step in range(24):
            if step in (0, 2):
                world.sender._step()
            run.reuse()
            world.announce()
            run.step()
        run.finish()
        return was_over


def every_moment(monkeypatch, event, seeds):
    for seed in seeds:
        for moment in range(60):
            if run_with(monkeypatch, event, moment, seed):
                break


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(cache_logger, "disabled", True)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_at_every_moment_of_a_pull(monkeypatch, event):
    every_moment(monkeypatch, event, range(4))


@pytest.mark.usefixtures("quiet")
def test_no_wrong_byte_at_random(monkeypatch):
    """Torn, late and failed READs, lost and repeated notifications, and several pulls, too."""
    assert random_runs(monkeypatch, range(examples(60))) > 1


# --- Guards, and what happens without them ---


def land(world, count=None):
    """Deliver READs in flight, the oldest first, and let the receiver notice."""
    for reading in world.network.reads[:count]:
        reading.land()
    world.receiver._step()
    world.check()


def begin(world, ready=LAYERS):
    """Begin a pull; two layers are being read."""
    pull = world.pull(world.offer(ready=ready))
    world.sender._step()
    world.receiver._step()
    land(world)
    for _ in range(3):
        world.receiver._step()
    return pull


def expire(world):
    world.offered.expires = 0.0
    world.sender._step()
    assert world.released == 1


def reads_while_the_pages_become_free(world):
    pull = begin(world)

    def deliver():
        for _ in range(40):
            land(world)

    world.at_release = deliver
    expire(world)
    world.run(until=lambda: not world.receiver._pulls)
    assert reason_of(pull) == "expired"


def a_cancelled_pull_into_the_same_pages(world):
    """A later pull into the pages begins when no READ of the earlier one can land."""
    pull = begin(world)
    (late, *_), ticket = world.network.reads, world.offered.ticket
    late.fetch()
    pull.cancel()
    world.pulls.clear()
    expire(world)
    world.at_release = lambda: None
    world.pages = world.source.allocator.alloc(OFFERED)
    world.content = lambda layer, side: np.full((OFFERED, 2, 2, 4), 5.0 + layer, np.float32)
    again = world.pull(world.offer(), pages=pull.into)
    for _ in range(10):
        world.sender._step()
        for reading in [each for each in world.network.reads if each is not late]:
            reading.land()
        world.receiver._step()
    assert again._num_arrived == 0
    world.released = 0
    world.run(until=again._landing.done)
    assert again.done() and ticket != world.offered.ticket


def receiver_text(old, new, name="_run"):
    return lambda patch: mutated(patch, PageReceiver, name, old, new)


def free_before_the_generation_is_raised(patch):
    write = "self._write(offer, Status(next(self._generations), offer.num_ready, outcome))"
    mutated(patch, PageSender, "_end", write, "pass")
    release = "offer.release()"
    mutated(patch, PageSender, "_settle", release, f"{release}; {write}".replace(
        " outcome)", " offer.outcome)"))  # fmt: skip


# How to remove each guard, and a scenario if random runs do not need it.
GUARDS = {
    "a status is read after each layer": (
        receiver_text("max(num_read, reads.popleft()[1]), True",
                      "max(num_read, reads.popleft()[1]), True; pull._arrive(num_read)"), None),
    "a status confirms only what was read before": (
        receiver_text("pull._arrive(num_covered)", "pull._arrive(num_read)"), None),
    "the generation is compared": (
        receiver_text("_require_open_offer(found, ticket)", "pass"), None),
    "the generation is raised": (
        lambda patch: mutated(patch, PageSender, "_end", "next(self._generations)",
                              "offer.generation"), None),
    "the generation is raised before pages are free": (
        free_before_the_generation_is_raised, reads_while_the_pages_become_free),
    "layers are ready": (
        receiver_text("posted < num_ready", "posted < pull._num_units and "
                      "(num_ready := pull._num_units)"), None),
    "pages of the receiver are held": (
        lambda patch: patch.setattr(PageAllocator, "_mark_busy", lambda *_: None), None),
    "pages are held while READs are in flight": (
        receiver_text("if pull._reads:", "if False:", "_end"), None),
    "a pull waits for those before it": (
        receiver_text("for each in self._before(pull)", "for each in ()"),
        a_cancelled_pull_into_the_same_pages),
    "an offer is released once": (
        lambda patch: mutated(patch, PageSender, "_settle", "del self._offers[offer.generation]",
                              "offer.is_over = False"), None),
}  # fmt: skip


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_is_needed(monkeypatch, guard):
    """Random runs, or else a scenario, fail without it."""
    remove, scenario = GUARDS[guard]
    if scenario is not None:
        scenario(World(monkeypatch))
    remove(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        if scenario is None:
            random_runs(monkeypatch, range(400))
        else:
            scenario(World(monkeypatch))


# --- The status ---


@given(st.integers(0, 2**40), st.integers(0, 2**16), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_a_status_that_is_read_while_it_is_written(generation, num_ready, data):
    """Any mixture of the bytes of two is one of them, or none."""
    key = bytes(16)
    states = [Status(generation, num_ready), Status(generation + 1, num_ready + 1, "expired")]
    one, other = (state.encoded(key) for state in states)
    taken = data.draw(st.lists(st.booleans(), min_size=len(one), max_size=len(one)))
    mixed = bytes(a if own else b for a, b, own in zip(one, other, taken, strict=True))
    assert Status.decoded(mixed, key) in (None, *states)
    assert Status.decoded(mixed, b"another key 1234") is None
    assert len(one) <= tickets.STATUS_BYTES


def test_without_the_digest_a_mixture_counts(monkeypatch):
    monkeypatch.setattr(tickets, "blake2b", lambda *_, **__: Mock(digest=lambda: bytes(16)))
    one, other = Status(1, 0xFF).encoded(bytes(16)), Status(1, 0x100).encoded(bytes(16))
    mixed = one[:8] + one[8:9] + other[9:]
    assert Status.decoded(mixed, bytes(16)) == Status(1, 0x1FF)


def test_a_torn_status_is_read_again(world):
    pull = begin(world, ready=1)
    land(world)
    for _ in range(40):  # until a status is in flight that does not confirm anything
        land(world)
        if pull._num_arrived == 1 and world.network.reads:
            break
        world.now += 1e-3
    (status,) = world.network.reads
    status.fetch(status.words[1:2])  # how many layers are ready
    world.announce()
    world.sender._step()
    status.land()
    world.receiver._step()
    assert pull.failure is None
    world.announce()
    world.run(until=pull._landing.done)
    assert pull.done()


# --- Tickets ---


def with_secret(monkeypatch, secret=SECRET):
    world = World(monkeypatch, secret=secret)
    return world, world.offer()


@given(st.data())
@settings(max_examples=examples(400), deadline=None)
def test_a_damaged_or_forged_ticket_changes_nothing(data):
    """Without a secret, anybody can make a digest, and an error still names the ticket."""
    with pytest.MonkeyPatch.context() as patch:
        world, ticket = with_secret(patch, data.draw(st.sampled_from([None, SECRET])))
        start = len(tickets._MAGIC) + tickets._MAC_BYTES
        kind = data.draw(st.sampled_from(["bit", "cut", "more", "key", "noise", "malformed"]))
        damaged = bytearray(ticket)
        if kind == "bit":
            damaged[data.draw(st.integers(0, len(ticket) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del damaged[data.draw(st.integers(0, len(ticket) - 1)) :]
        elif kind == "more":
            damaged += b"\0"
        elif kind == "key":
            key = tickets.checked_secret(b"another secret of 16 bytes")
            damaged = bytearray(Ticket.decoded(ticket, world.sender._key).encoded(key))
        elif kind == "noise":
            damaged = bytearray(data.draw(st.binary(max_size=200)))
        else:
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(start, len(damaged) - 1))
                damaged[at] = data.draw(st.sampled_from(b'\0\1\x7f\xff-9"[]{},'))
            damaged[len(tickets._MAGIC) : start] = tickets._mac(bytes(damaged[start:]), b"")
            with suppress(kv.TransferError):
                Ticket.decoded(damaged, b"")
                return  # another ticket
        with pytest.raises(kv.TransferError) as caught:
            world.receiver.pull(bytes(damaged), [0, 1])
        assert caught.value.reason == "ticket" and str(caught.value).startswith("ticket: ")
        assert not world.receiver._pulls and not world.target.allocator._transfers


def test_without_its_digest_a_forged_ticket_is_taken(monkeypatch):
    world, ticket = with_secret(monkeypatch)
    forged = Ticket.decoded(ticket, world.sender._key).encoded(b"")
    with pytest.raises(kv.TransferError, match="secret"):
        world.receiver.pull(forged, [0, 1])
    monkeypatch.setattr(tickets.hmac, "compare_digest", lambda *_: True)
    world.receiver.pull(forged, [0, 1]).cancel()


@pytest.mark.parametrize("units", [[], [(0, 0)] * LAYERS, [(0, 0), (0, 1)], [(1, 0)] * LAYERS])
def test_a_ticket_has_each_layer_once(world, units):
    decoded = replace(world.receiver.inspect(world.offer()), units=units)
    with pytest.raises(kv.TransferError, match="malformed"):
        world.receiver.pull(decoded.encoded(world.sender._key), [0, 1])


@pytest.mark.parametrize(("name", "value"), [
    ("page_size", 4), ("num_layers", 2), ("head_dim", 8), ("num_kv_heads", 4), ("v_head_dim", 8),
])  # fmt: skip
def test_another_pool_is_refused_before_anything_moves(world, name, value):
    ticket, other = world.offer(), pool_of(**{name: value})
    receiver = kv.PageReceiver(other)
    with pytest.raises(kv.TransferError, match=f"the pools differ: {name}") as caught:
        receiver.pull(ticket, [0, 1])
    assert caught.value.reason == "identity"
    assert not receiver._pulls and not receiver._agent.peers and not other.allocator._transfers


@pytest.mark.parametrize("layouts", [
    (one, other) for one in LAYOUTS for other in LAYOUTS
])  # fmt: skip
def test_layouts_may_differ(monkeypatch, layouts):
    world = World(monkeypatch, layouts=layouts)
    pull = world.pull(world.offer(), pages=[7, 3])
    world.run(until=pull._landing.done)
    assert pull.done()
    assert pull.num_bytes == 2 * world.target.page_bytes == world.receiver.stats()["received_bytes"]


# --- Arguments ---


@pytest.mark.parametrize(("pages", "options", "error", "text"), [
    ([], {}, ValueError, "pages: expected at least one"),
    ([0, 0], {}, ValueError, "pages: expected each page once"),
    ([9], {}, ValueError, "pages: expected allocated pages"),
    ([99], {}, ValueError, "pages: expected 0 to 9"),
    ("x", {}, TypeError, "pages"),
    ([2], {"hashes": [1, 2]}, ValueError, "hashes: expected one for each page, 1, got 2"),
    ([2], {"lease_s": 0}, ValueError, "lease_s"),
    ([2], {"lease_s": "x"}, TypeError, "lease_s"),
    ([2], {"after": 3}, TypeError, "after"),
    ([2], {"after": [3] * LAYERS}, TypeError, "after: expected an Event for each layer"),
    ([2], {"after": []}, ValueError, "after: expected an event for each of 3 layers, got 0"),
    ([0], {}, ValueError, "pages: expected pages that are not offered, got 0"),
])  # fmt: skip
def test_an_offer_that_is_refused_changes_nothing(world, pages, options, error, text):
    world.offer()
    world.source.allocator.alloc(2)
    with pytest.raises(error, match=f"^{text}"):
        world.sender.offer(pages, **options)
    assert world.sender.stats()["offers"] == 1 and world.source.allocator.num_allocated == 4


@pytest.mark.parametrize(("pages", "options", "error", "text"), [
    ([0], {}, ValueError, "pages: expected 2, as many as are offered, got 1"),
    ([0, 0], {}, ValueError, "pages: expected each page once"),
    ([0, 10], {}, ValueError, "pages: expected 0 to 9, got 10"),
    ([0, -1], {}, ValueError, "pages: expected 0 to 9, got -1"),
    (3, {}, TypeError, "pages"),
    ([0, 1], {"deadline_s": -1}, ValueError, "deadline_s"),
])  # fmt: skip
def test_a_pull_that_is_refused_changes_nothing(world, pages, options, error, text):
    ticket = world.offer()
    with pytest.raises(error, match=f"^{text}"):
        world.receiver.pull(ticket, pages, **options)
    with pytest.raises(TypeError, match=r"^ticket: expected bytes"):
        world.receiver.pull("ticket", [0, 1])
    assert not world.receiver._pulls and not world.target.allocator._transfers


def test_ends_that_are_refused(world, monkeypatch):
    with pytest.raises(TypeError, match=r"^pool: expected a KVPool, an MLAPool or a PagedKVCache"):
        kv.PageSender(3)
    with pytest.raises(TypeError, match=r"^secret: expected bytes"):
        kv.PageReceiver(world.target, secret="a secret that is text")
    with pytest.raises(ValueError, match=r"^secret: expected at least 16 bytes, got 2"):
        kv.PageSender(world.source, secret=b"12")
    ticket = world.offer()
    world.sender.close()
    world.receiver.close()
    with pytest.raises(kv.KvcupyError, match=r"^PageSender: closed"):
        world.sender.offer(world.source.allocator.alloc(1))
    with pytest.raises(kv.KvcupyError, match=r"^PageReceiver: closed"):
        world.receiver.pull(ticket, [0, 1])
    with pytest.raises(kv.KvcupyError, match="less than 0 open offers"):
        monkeypatch.setattr(sending, "_MAX_OFFERS", 0)
        kv.PageSender(world.source).offer(world.source.allocator.alloc(1))


# --- Layers, and reasons ---


def test_layers_are_announced_by_events(monkeypatch):
    """Each goes out when its event has passed, and is passed on then."""
    Network(immediate=True).install(monkeypatch)
    source, target = pool_of(), pool_of()
    stream, gates = source.device.stream(), [threading.Event() for _ in range(LAYERS)]
    with kv.PageSender(source) as sender, kv.PageReceiver(target) as receiver:
        events = []
        for layer, gate in enumerate(gates):
            stream.call(gate.wait)
            stream.call(lambda layer=layer: source.k(layer).__setitem__(slice(0, 2), layer + 1.0))
            events.append(stream.record())
        pages = source.allocator.alloc(2)
        pull = receiver.pull(sender.offer(pages, after=events, hashes=[5, 6]), [3, 2])
        for layer, gate in enumerate(gates):
            reader = target.device.stream()
            pull.wait_layer(layer, reader)
            assert pull._num_arrived == layer and not reader.done()
            gate.set()
            reader.synchronize()
            assert (target.k(layer)[[2, 3]] == layer + 1.0).all()
        pull.synchronize()
        with pytest.raises(ValueError, match="layer"):
            pull.wait_layer(LAYERS)
        assert poll(lambda: source.allocator.num_free == PAGES)


def test_work_that_fails_ends_the_offer(monkeypatch):
    Network(immediate=True).install(monkeypatch)
    source, target = pool_of(), pool_of()
    stream = source.device.stream()
    with kv.PageSender(source) as sender, kv.PageReceiver(target) as receiver:
        gate = threading.Event()
        stream.call(gate.wait)
        stream.call(lambda: 1 / 0)
        pull = receiver.pull(sender.offer(source.allocator.alloc(2), after=stream), [3, 2])
        gate.set()
        with pytest.raises(kv.TransferError, match="work that writes the pages") as caught:
            pull.synchronize()
        assert caught.value.reason == "failed"
        assert poll(lambda: sender.stats()["failed"] == 1 and source.allocator.num_free == PAGES)
        with pytest.raises(kv.DeviceError):
            stream.synchronize()


def test_pages_are_not_free_while_they_are_written(monkeypatch):
    """Though the lease is over."""
    Network(immediate=True).install(monkeypatch)
    source, gate = pool_of(), threading.Event()
    stream = source.device.stream()
    with kv.PageSender(source) as sender:
        stream.call(gate.wait)
        sender.offer(source.allocator.alloc(2), after=stream, lease_s=1e-3)
        assert poll(lambda: sender.stats()["expired"] and not sender._offers)
        assert source.allocator.num_free == PAGES - 2
        gate.set()
        stream.synchronize()
        assert source.allocator.num_free == PAGES


def test_pages_that_their_sender_frees_meanwhile_cannot_be_offered(world, monkeypatch):
    """The check that they are allocated holds until the sender owns them."""
    world.offer()
    written = kv.PageSender._written

    def until_they_are_free(*arguments):
        world.offered.withdraw()
        return written(*arguments)

    monkeypatch.setattr(kv.PageSender, "_written", until_they_are_free)
    with pytest.raises(ValueError, match="pages"):
        world.sender.offer(world.pages)
    assert world.released == 1 and not world.sender._offers


def test_slots_of_ended_offers_and_pulls_are_used_again(monkeypatch):
    Network(immediate=True).install(monkeypatch)
    monkeypatch.setattr(sending, "_MAX_OFFERS", 2)
    monkeypatch.setattr(receiving, "_MAX_PULLS", 2)
    source, target = pool_of(), pool_of()
    with kv.PageSender(source) as sender, kv.PageReceiver(target) as receiver:
        for _ in range(5):
            receiver.pull(sender.offer(source.allocator.alloc(2)), [0, 1]).synchronize()
            assert poll(lambda: not sender._offers)


def test_a_ticket_shows_no_key(world):
    shown = repr(world.receiver.inspect(world.offer())) + repr(world.offered)
    for secret in (world.offered.token, world.sender._status_key):
        assert repr(secret)[2:-1] not in shown


def test_reasons(monkeypatch):
    """A second receiver, an end of time, a sender that closes."""
    world = World(monkeypatch)
    ticket = world.offer()
    first, second = world.pull(ticket), world.pull(ticket)
    world.run(until=first._landing.done)
    late = world.pull(ticket, pages=[8, 9], deadline_s=0.5)
    world.run()
    assert first.done() and second._landing.done()
    assert reason_of(late) == "taken"
    assert world.sender.stats()["completed"] == 1
    world.released = 0
    world.pages, world.pulls = world.source.allocator.alloc(OFFERED), []
    third = world.pull(world.offer(), pages=[8, 9], deadline_s=0.01)
    world.now += 1
    world.receiver._step()
    assert reason_of(third) == "late"


def test_a_receiver_that_closes_cancels_and_waits(world):
    pull = begin(world)
    world.receiver.close()
    assert reason_of(pull) == "closed" and world.receiver._pulls
    assert not world.receiver._agent.is_closed
    for reading in list(world.network.reads):
        reading.land()
    world.receiver._step()
    assert not world.receiver._pulls
    assert world.receiver.stats()["pull_failures"] == {"closed": 1}


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_close_that_an_interrupt_ended_is_finished_by_the_next(world, monkeypatch, end):
    end = getattr(world, end)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(end, "_step", Mock(side_effect=KeyboardInterrupt))
        end.close()
    assert not end._agent.is_closed
    end.close()
    assert end._agent.is_closed


def test_a_pull_that_an_interrupt_keeps_from_starting_holds_nothing(world, monkeypatch):
    ticket = world.offer()
    monkeypatch.setattr(kv.PageReceiver, "_start_thread", Mock(side_effect=KeyboardInterrupt))
    pages = world.target.allocator.alloc(2)
    with pytest.raises(KeyboardInterrupt):
        world.receiver.pull(ticket, pages)
    world.target.allocator.free(pages)
    assert world.target.allocator.num_free == PAGES
    monkeypatch.setattr(kv.PageSender, "_start_thread", Mock(side_effect=KeyboardInterrupt))
    mine = world.source.allocator.alloc(1)
    with pytest.raises(KeyboardInterrupt):
        world.sender.offer(mine)
    world.source.allocator.free(mine)
    assert world.sender.stats()["offers"] == 1
