"""PageSender and PageReceiver under random calls, cut connections and deadlines."""

from __future__ import annotations

import random
import threading
import time

import pytest
from helpers import examples
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from migration_cases import (
    SECRET,
    assert_pulled,
    eventually,
    fill,
    is_poisoned,
    poison,
    pool_of,
    reason_of,
)

import kvcupy as kv
from kvcupy.remote.migration import protocol
from kvcupy.remote.migration.protocol import Channel, Lost

NUM_LAYERS = 3
LAYOUTS = st.sampled_from(["layer_first", "page_first", "page_first_direct", "page_head"])
KINDS = st.sampled_from(
    [{}, {"kind": "mla"}, {"kind": "mla", "dtype": "fp8_e4m3", "scales": True},
     {"dtype": "int8", "scales": True}, {"dtype": "bf16", "v_head_dim": 16},
     {"placement": "device"}, {"placement": "pageable"}]
)  # fmt: skip
STAGING = st.sampled_from([None, None, 1, 3])
REASONS = {
    "cancelled", "late", "expired", "withdrawn", "taken", "lost", "closed", "failed", "ticket",
}  # fmt: skip
PICK = st.integers(0, 99)


class Failures:
    """Makes calls of channels fail with a probability."""

    def __init__(self, monkeypatch):
        self.rng, self.share = random.Random(0), 0.0
        for name in ("send", "receive", "send_data", "receive_data"):
            monkeypatch.setattr(Channel, name, self.failing(getattr(Channel, name)))

    def failing(self, method):
        def called(channel, *arguments, **options):
            drawn = self.rng.random()
            if drawn < self.share:
                raise Lost("drawn") if drawn < self.share / 2 else TimeoutError("drawn")
            return method(channel, *arguments, **options)

        return called


class Offer:
    """An offer, and the events that may end it.

    Attributes
    ----------
    missing : layers that are not announced, in the order of their announcement
    """

    def __init__(self, pages, missing, lease_s, pulls):
        self.pages, self.missing, self.lease_s, self.num_pulls = pages, missing, lease_s, pulls
        self.ticket, self.num_released = b"", 0
        self.withdrawn, self.pulls = False, []


class Pull:
    """A pull, its destination pages and its offer."""

    def __init__(self, pull, pages, offer, deadline_s):
        self.pull, self.pages, self.offer, self.deadline_s = pull, pages, offer, deadline_s
        self.cancelled = False


class MigrationMachine(RuleBasedStateMachine):
    """Offers and pulls between two pools.

    Without injected failures, the outcome of each pull follows from the calls: `possible_ends`.
    """

    failures = None

    @initialize(
        kind=KINDS, layouts=st.tuples(LAYOUTS, LAYOUTS), staging=st.tuples(STAGING, STAGING),
        share=st.sampled_from([0, 0, 0.01, 0.05]), secret=st.sampled_from([None, SECRET]),
        seed=st.integers(0, 999),
    )  # fmt: skip
    def start(self, kind, layouts, staging, share, secret, seed):
        self.failures.rng, self.failures.share = random.Random(seed), share
        self.source, self.target = (
            pool_of(**kind, layout=layouts[0]), pool_of(**kind, layout=layouts[1]),
        )  # fmt: skip
        poison(self.target, range(self.target.num_pages))
        self.sender = kv.PageSender(self.source, staging_pages=staging[0], secret=secret)
        self.receiver = kv.PageReceiver(self.target, staging_pages=staging[1], secret=secret)
        self.offers, self.pulls, self.closed, self.cut_off = [], [], False, False
        self.offer_and_pull(True, range(NUM_LAYERS), 1)

    @rule(
        count=st.integers(1, 3), by_layer=st.booleans(), order=st.permutations(range(NUM_LAYERS)),
        lease_s=st.sampled_from([0.01, 60.0, 60.0]), pulls=st.sampled_from([1, 1, 2]),
    )  # fmt: skip
    def offer(self, count, by_layer, order, lease_s, pulls):
        allocator = self.source.allocator
        if self.closed or allocator.num_free < count:
            return
        offer = Offer(allocator.alloc(count), list(order) if by_layer else [], lease_s, pulls)
        fill(self.source, pages=offer.pages)

        def release(pages):
            assert pages.tolist() == offer.pages.tolist()
            offer.num_released += 1
            poison(self.source, pages)  # a pull that still reads them must not complete
            allocator.free(pages)

        offer.ticket = self.sender.offer(
            offer.pages.copy(), by_layer=by_layer, lease_s=lease_s, pulls=pulls, release=release
        )
        self.offers.append(offer)

    @rule(
        by_layer=st.booleans(), order=st.permutations(range(NUM_LAYERS)), pulls=st.integers(1, 2)
    )  # fmt: skip
    def offer_and_pull(self, by_layer, order, pulls):
        """Pull an offer as often as it allows, and once more."""
        self.offer(1, by_layer, order, 60.0, pulls)
        for _ in range(pulls + 1):
            self.pull(len(self.offers) - 1, 60.0)

    @rule(pick=PICK, deadline_s=st.sampled_from([0.02, 60.0, 60.0]))
    def pull(self, pick, deadline_s):
        if self.closed or not self.offers:
            return
        offer, allocator = self.offers[pick % len(self.offers)], self.target.allocator
        if allocator.num_free < len(offer.pages):
            return
        pages = allocator.alloc(len(offer.pages))
        try:
            pull = self.receiver.pull(offer.ticket, pages, deadline_s=deadline_s)
        except kv.CacheFull:  # too many pages are in quarantine
            allocator.free(pages)
            return
        self.pulls.append(Pull(pull, pages, offer, deadline_s))
        offer.pulls.append(self.pulls[-1])

    @rule(pick=PICK)
    def layer_done(self, pick):
        if self.offers and (offer := self.offers[pick % len(self.offers)]).missing:
            assert not any(each.pull._landing.done() and each.pull.failure is None
                           for each in offer.pulls)  # fmt: skip
            self.sender.layer_done(offer.ticket, offer.missing.pop())

    @rule(pick=PICK)
    def cancel(self, pick):
        if self.pulls:
            chosen = self.pulls[pick % len(self.pulls)]
            chosen.cancelled = True
            chosen.pull.cancel()

    @rule(pick=PICK, confirmed=st.booleans())
    def withdraw(self, pick, confirmed):
        if confirmed and self.offers:
            chosen = self.offers[pick % len(self.offers)]
            chosen.withdrawn = True
            self.sender.withdraw(chosen.ticket)
            assert self.sender.withdraw(chosen.ticket) is False

    @rule(pick=PICK, confirmed=st.booleans())
    def cut(self, pick, confirmed):
        """Reset the connections of a pull."""
        if confirmed and self.pulls:
            self.cut_off = True
            for connection in list(self.pulls[pick % len(self.pulls)].pull._sockets):
                protocol.abort(connection)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.004]))
    def pause(self, seconds):
        time.sleep(seconds)

    @rule(pick=PICK, layer=st.integers(0, NUM_LAYERS - 1))
    def wait_for_layer(self, pick, layer):
        """A stream that has waited for a layer finds it and the layers before it."""
        if not self.pulls or self.receiver._staging is not None:  # the host would wait
            return
        chosen, stream, seen = self.pulls[pick % len(self.pulls)], kv.device("host").stream(), []

        def check():
            assert_pulled(
                self.target, chosen.pages, chosen.offer.pages, layers=range(layer + 1)
            )  # fmt: skip
            seen.append(layer)

        try:
            chosen.pull.wait_layer(layer, stream)
        except kv.TransferError as error:
            assert error.reason in REASONS
            return
        stream.call(check)
        if not set(range(layer + 1)) & set(chosen.offer.missing):  # else it waits for them
            try:
                stream.synchronize()
            except kv.DeviceError as error:
                assert not isinstance(error.__cause__, AssertionError), error
                assert chosen.pull.failure is not None
            else:
                assert seen == [layer]

    @rule(end=st.sampled_from(["sender", "receiver"]), rarely=st.integers(0, 9))
    def close(self, end, rarely):
        if not rarely:
            self.closed = True
            getattr(self, end).close()

    def possible_ends(self, pull):
        """Return the outcomes of a pull that the calls allow."""
        offer, ends = pull.offer, {"completed"}
        ends |= {"cancelled"} if pull.cancelled else set()
        ends |= {"late"} if pull.deadline_s < 1 else set()
        # A connection that still moves bytes some time after the end of its offer is aborted.
        ends |= {"expired", "lost"} if offer.lease_s < 1 else set()
        ends |= {"withdrawn", "lost"} if offer.withdrawn else set()
        ends |= {"taken"} if len(offer.pulls) > offer.num_pulls else set()
        ends |= {"closed", "lost"} if self.closed else set()
        if self.cut_off or self.failures.share:
            return REASONS | {"completed"}
        return ends

    def teardown(self):
        """End all pulls and offers, and check the final state."""
        if not hasattr(self, "pulls"):
            return
        for offer in self.offers:
            while offer.missing:
                self.sender.layer_done(offer.ticket, offer.missing.pop())
        outcomes = [self.outcome(pull) for pull in self.pulls]
        received = self.receiver.stats()
        self.receiver.close()
        self.sender.close()
        self.failures.share = 0
        assert self.target.allocator.num_free == self.target.num_pages
        used = {page for pull in self.pulls for page in pull.pages.tolist()}
        assert is_poisoned(self.target, set(range(self.target.num_pages)) - used)
        eventually(lambda: all(offer.num_released == 1 for offer in self.offers))
        self.source.allocator.check_leaks()
        assert self.source.allocator.num_free == self.source.num_pages
        assert received["pulls"] == received["quarantined_pages"] == 0
        assert received["completed"] == outcomes.count("completed")
        assert received["completed"] + received["failed"] + received["cancelled"] == len(outcomes)
        sent = self.sender.stats()
        ends = ("completed", "expired", "withdrawn", "failed", "closed")
        assert sum(sent[name] for name in ends) == len(self.offers)
        assert sent["offers"] == sent["offered_pages"] == sent["pulls"] == 0
        self.seen.update(outcomes)

    def outcome(self, pull):
        """Wait for the end of a pull, check its pages, and free them."""
        try:
            pull.pull.synchronize()
            outcome = "completed"
            assert_pulled(self.target, pull.pages, pull.offer.pages)
        except kv.TransferError as error:
            outcome = error.reason
            assert reason_of(pull.pull) == outcome
        assert outcome in self.possible_ends(pull), (outcome, self.possible_ends(pull))
        assert pull.pull._landing.done()
        self.target.allocator.free(pull.pages)
        return outcome


def own_threads():
    return {t for t in threading.enumerate() if t.name.startswith("kvcupy p")}


@pytest.mark.usefixtures("lenient_host")
def test_any_sequence_of_calls(monkeypatch):
    before = own_threads()  # of other tests in this process

    class Machine(MigrationMachine):
        failures, seen = Failures(monkeypatch), set()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples(400), stateful_step_count=30, deadline=None, database=None,
            # Threads and time limits make examples differ from run to run: they cannot be shrunk.
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert Machine.seen >= {"completed", "cancelled", "withdrawn"}
    eventually(lambda: own_threads() <= before, "all threads end")
