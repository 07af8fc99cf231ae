"""Pages between processes on a stand-in for NIXL, whose READs come when a test likes."""

from __future__ import annotations

import hmac
import random

import numpy as np
import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pages_world import CANARY, LAYERS, OFFERED, PAGES, World, mutated, pool_of

import kvcupy as kv
from kvcupy.cache.pages import PageAllocator
from kvcupy.config import cache_logger
from kvcupy.remote.migration import ticket as tickets
from kvcupy.remote.migration.receiver import PageReceiver, Pull
from kvcupy.remote.migration.sender import PageSender
from kvcupy.remote.migration.ticket import Status, Ticket

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
        self.canaries = []  # pages of the receiver that belong to somebody else by now
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
        """Free the pages of a failed pull at once, and let somebody else write to free pages."""
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
        assert sorted(world.sender._free_slots) == list(range(len(world.sender._slots)))
        world.sender.close()
        world.receiver.close()
        assert all(agent.is_closed for agent in world.network.agents.values())


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
    assert 1 < random_runs(monkeypatch, range(examples(60)))


def receiver_text(old, new, name="_run"):
    return lambda patch: mutated(patch, PageReceiver, name, old, new)


def sender_text(old, new, name):
    return lambda patch: mutated(patch, PageSender, name, old, new)


def free_before_the_generation_is_raised(patch):
    mutated(patch, PageSender, "_end",
            "self._write(offer, Status(next(self._generations), offer.num_ready, outcome))",
            "pass")  # fmt: skip
    mutated(patch, PageSender, "_settle", "self._free_slots.append(offer.slot)",
            "self._write(offer, Status(next(self._generations), 0, offer.outcome)); "
            "self._free_slots.append(offer.slot)")  # fmt: skip
    # So that a receiver can read between the two.
    settle = PageSender._settle

    def later(self, offer):
        if offer.outcome and not offer.is_over and not hasattr(offer, "is_freed"):
            offer.is_freed, release = True, offer.release
            release()
            offer.release = lambda: None
            return
        settle(self, offer)

    patch.setattr(PageSender, "_settle", later)


CONTROLS = {
    "layers are passed on without a second status":
        receiver_text("num_covered = num_read  # only", "num_covered = posted  # only"),
    "layers are confirmed by a status that was read before them":
        receiver_text("pull._arrive(num_covered)", "pull._arrive(num_read)"),
    "the generation is not looked at":
        receiver_text("_require_open_offer(found, ticket)", "pass"),
    "the generation is raised after the pages are free": free_before_the_generation_is_raised,
    "the generation is not raised":
        sender_text("next(self._generations)", "offer.generation", "_end"),
    "layers are read before they are ready":
        receiver_text("self._batch(pull, posted, num_ready)",
                      "self._batch(pull, posted, pull._num_units)"),
    "the receiver's pages are not held":
        lambda patch: patch.setattr(PageAllocator, "_mark_busy", lambda *_: None),
    "pages are free although READs are in flight":
        receiver_text("if pull._reads:", "if False:", "_end"),
    "an offer is released twice":
        sender_text("del self._offers[offer.generation]", "offer.is_over = False", "_settle"),
}  # fmt: skip


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("control", CONTROLS)
def test_without_a_guard_it_is_noticed(monkeypatch, control):
    CONTROLS[control](monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        for seed in range(20):
            for event in ("expire", "cancel"):
                every_moment(monkeypatch, event, [seed])
