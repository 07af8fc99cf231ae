"""`PagedKVCache.export_sequence` and `import_sequence`: a sequence arrives whole, or not at all."""

from __future__ import annotations

import inspect
import random
import sys
import time
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from agents import Network
from groups_model import (
    PAGE,
    Mixture,
    TieredMixture,
    full,
    hashes_of,
    latent,
    recurrent,
    sliding,
)
from helpers import full_only
from line_process import PATIENCE_S, poll
from paged_cases import MLA, NUM_LAYERS, Prefixed, fresh, rope_of, same_outputs, tokens_of
from paged_world import background
from stream_cases import Gate

import kvcupy as kv
from kvcupy.cache.hazards import PageAccess
from kvcupy.cache.paged import exchange
from kvcupy.cache.paged.sequences import Sequences
from kvcupy.cache.paged.states import States
from kvcupy.cache.paged.step import GroupStep
from kvcupy.cache.pages import PageAllocator

pytestmark = pytest.mark.usefixtures("quick_host")

HOLD_S = 0.05  # long enough for a missing wait to show
MIXES = {
    "full, window": lambda: [full(0, 3), sliding(1, 2, window=8)],
    "window with sinks, full, latent": lambda: [
        sliding(0, window=5, sink_tokens=3), full(2), latent(1, 4),
    ],
    "state, window, full": lambda: [recurrent(0, 2), sliding(1, window=6), full(3)],
    "two states": lambda: [recurrent(0), full(1), recurrent(2), sliding(3, window=40)],
    "windows": lambda: [sliding(0, window=1), sliding(1, window=16, sink_tokens=4)],
}  # fmt: skip
HYBRID = MIXES["state, window, full"]
STATES = lambda: [recurrent(0, 2), full(1)]  # noqa: E731
POINTS = ["attention", "states", "end"]  # of a step, in order


@pytest.fixture(autouse=True)
def network(monkeypatch):
    return Network(immediate=True).install(monkeypatch)


class Exporting(Mixture):
    """Calls `before["attention"]`, `before["states"]` and `before["end"]` in the next step, once.

    Each is called when the step gets there, with the model's work so far enqueued.
    """

    def __init__(self, groups, device, **options):
        super().__init__(groups, device, **options)
        self.before = {}

    def _attend(self, names, lens):
        self.before.pop("attention", int)()
        super()._attend(names, lens)

    def _update(self, names, lens):
        self.before.pop("states", int)()
        super()._update(names, lens)
        self.before.pop("end", int)()


class Ends:
    """A cache `one` with a sender, and a cache `two` with a receiver."""

    def __init__(self, one, two):
        self.device, self.one, self.two = one.device, one, two
        self._stack = ExitStack()
        self.sender = self._stack.enter_context(kv.PageSender(one.cache))
        self.receiver = self._stack.enter_context(kv.PageReceiver(two.cache))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def export(self, name, **options):
        return self.one.cache.export_sequence(name, self.sender, **options)

    def receive(self, name, ticket, **options):
        return self.two.cache.import_sequence(name, ticket, self.receiver, **options)

    def withdraw(self):
        """Take all offers back, as a step does that is taken back."""
        for offer in list(self.sender._offers.values()):
            offer.withdraw()

    def settle(self):
        """Wait until no offer is open, no pull is in progress, and nothing is held."""

        def is_settled():
            for side in (self.one, self.two):
                assert side.cache.num_available_pages >= 0  # releases what ended offers have held
            return not (self.sender.stats()["offered_pages"] or self.receiver.stats()["pulls"])

        assert poll(is_settled), [end.stats() for end in (self.sender, self.receiver)]
        is_settled()

    def check_free(self):
        """Drop all sequences; no page is left behind."""
        self.settle()
        for side in (self.one, self.two):
            side.cache.clear()
            assert side.cache.num_available_pages == side.cache.pool.num_pages
            assert not side.cache._sequences._references.any()
            side.cache.pool.allocator.check_leaks()


def plain(device, **options):
    """Return ends of two caches with one group, whose rows follow from tokens."""
    return Ends(*(Prefixed(device, tiered=False, **options) for _ in "12"))


class Pair(Ends):
    """Ends of two caches of a mix, each with a model of its sequences."""

    def __init__(self, mix, device, *, other=None, kind=Exporting, **options):
        super().__init__(*(kind(each(), device, **options) for each in (mix, other or mix)))
        self.two._next = 100_000  # so their tokens differ

    def prefill(self, name, *counts):
        self.one.add(name)
        for count in counts:
            self.one.step({name: self.one.new(count)})

    def export_after(self, name, count, when):
        """Append tokens, and export the sequence after their step, or at a point of it."""
        tickets = []
        if when is not None:
            self.one.before[when] = lambda: tickets.append(self.export(name))
        self.one.step({name: self.one.new(count)})
        return tickets[0] if tickets else self.export(name)

    def receive(self, name, ticket, tokens, **options):
        """Import a sequence of some tokens."""
        pull = super().receive(name, ticket, **options)
        self.two.tokens[name] = list(tokens)
        return pull

    def check(self):
        self.settle()
        self.one.check()
        self.two.check()

    def check_empty(self):
        self.settle()
        self.one.check_empty()
        self.two.check_empty()


# --- What arrives ---


@pytest.mark.parametrize("when", [None, *POINTS])
@pytest.mark.parametrize("mix", MIXES)
def test_a_sequence_comes_over_and_goes_on(device, mix, when):
    """With what its windows see and its states, from between steps or out of one."""
    with Pair(MIXES[mix], device) as pair:
        for name, counts in {"a": (3,), "b": (23, 1, 1), "c": (8, 30)}.items():
            pair.prefill(name, *counts[:-1])
            ticket = pair.export_after(name, counts[-1], when)
            pull = pair.receive(name, ticket, pair.one.tokens[name])
            pair.two.step({name: pair.two.new(1)})
            pull.synchronize()
            assert pull.done() and pull.num_bytes > 0 and pull.failure is None
            pair.one.step({name: pair.one.new(9)})
            pair.two.step({name: pair.two.new(9)})
            pair.check()
        pair.two.fork("b", "d", at=20)
        pair.two.pop("c", 2)
        pair.two.step({name: pair.two.new(2) for name in "abcd"})
        pair.check_empty()


KINDS = [
    "add", "step", "step", "fork", "pop", *["export"] * 3, *["import"] * 3, *["go on"] * 3,
    "fork that", "back", "remove",
]  # fmt: skip


def run(pair, seed, steps=60):
    """Random operations on both sides; a sequence arrives as it was when it was exported."""
    rng = random.Random(seed)
    one, two = pair.one, pair.two
    tickets, compared = [], 0
    for made in range(steps):
        known, arrived = sorted(one.tokens), sorted(two.tokens)
        kind = rng.choice(KINDS) if known else "add"
        name = rng.choice(known or [None])
        try:
            if kind == "add":
                pair.prefill(f"s{made}", rng.randint(1, 30))
            elif kind == "step":
                one.step({name: one.new(rng.randint(1, 9))})
            elif kind == "fork":
                one.fork(name, f"s{made}", at=rng.randint(1, len(one.tokens[name])))
            elif kind == "pop":
                one.pop(name, rng.randint(0, len(one.tokens[name])))
            elif kind == "export":
                when = rng.choice([None, *POINTS])
                ticket = pair.export_after(name, rng.randint(1, 20), when)
                tickets.append((ticket, list(one.tokens[name])))
            elif kind == "import" and tickets:
                pair.receive(f"i{made}", *tickets.pop(rng.randrange(len(tickets))))
                if rng.random() < 0.5:
                    two.step({f"i{made}": two.new(1)})
                    compared += 1
            elif kind == "go on" and arrived:
                name = rng.choice(arrived)
                two.step({name: two.new(rng.randint(1, 7))})
                compared += 1
            elif kind == "fork that" and arrived:
                name = rng.choice(arrived)
                two.fork(name, f"i{made}", at=rng.randint(1, len(two.tokens[name])))
            elif kind == "back" and arrived:
                name = rng.choice(arrived)
                two.pop(name, rng.randint(0, min(9, len(two.tokens[name]))))
            elif kind == "remove" and arrived:
                two.remove(rng.choice(arrived))
        except kv.CacheFull:
            one.before.clear()
            tickets.clear()
            pair.withdraw()
        for side in (one, two):
            for name, tokens in list(side.tokens.items()):
                del tokens[side.cache.sequence_length(name) :]  # of a step that was taken back
                if not tokens or rng.random() < 0.04:
                    side.remove(name)
        if not tickets:
            pair.check()
    pair.withdraw()
    pair.check_empty()
    return compared


@pytest.mark.parametrize("seed", [0, *(full_only(n) for n in range(1, 8))])
@pytest.mark.parametrize("mix", MIXES)
def test_random_exchanges(device, mix, seed):
    with Pair(MIXES[mix], device, num_tokens=512) as pair:
        assert run(pair, seed) > 1


FORMATS = {"bf16": {"dtype": "bf16"}, "fp8 with scales": {"dtype": "fp8_e4m3"}, "mla": MLA,
           "rotated": {"rope": rope_of(8)}}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_come_over_bit_for_bit(device, kind):
    options = {n: device.asarray(v) if n == "rope" else v for n, v in FORMATS[kind].items()}
    with plain(device, **options) as pair:
        pair.one.cache.add_sequence("s")
        pair.one.step("s", tokens_of(1, 2 * PAGE + 3))
        pair.receive("t", pair.export("s"))
        more = tokens_of(2, PAGE)
        same_outputs(pair.two.step("t", more), pair.one.step("s", more))
        assert pair.two.bits("t") == pair.one.bits("s")
        pair.check_free()


@pytest.mark.parametrize("slid", [False, True])
def test_a_sliding_window_comes_over(device, slid):
    """Also with evicted places within its pages, and when it has yet to slide."""
    with plain(device) as pair:
        pair.one.cache.add_sequence("s")
        pair.one.step("s", tokens_of(1, 10))
        pair.one.cache.enable_sliding_window("s", 5, 2)
        for token in range(3 * slid):
            pair.one.step("s", [token])
        assert bool(pair.one.cache._sequences.find("s").evicted) == slid
        pair.receive("t", pair.export("s"))
        for token in range(9):
            same_outputs(pair.two.step("t", [token]), pair.one.step("s", [token]))
            assert pair.two.bits("t") == pair.one.bits("s")
        with pytest.raises(ValueError, match="sink_tokens"):  # it knows what was evicted
            pair.two.cache.enable_sliding_window("t", 4, 3)
        pair.check_free()


def test_pages_that_no_window_sees_are_not_sent(device):
    """Also of a long step, at whose end the window moves on from most of them."""
    mix = lambda: [sliding(0, window=8), full(1)]  # noqa: E731
    with Pair(mix, device) as pair:
        pair.one.add("a")
        pair.receive("b", pair.export_after("a", 60, "attention"), pair.one.tokens["a"])
        window, whole = pair.two.cache._groups
        assert window.pool.allocator.num_allocated == 8 // PAGE + 1
        assert whole.pool.allocator.num_allocated == 60 // PAGE
        pair.two.step({"b": pair.two.new(3)})
        pair.check_empty()


@pytest.mark.parametrize("when", [None, *POINTS])
def test_the_newest_kept_states_come_too(device, when):
    """So forks and pops need no more tokens again than at the source, and it can be sent on."""
    with Pair(STATES, device) as pair, Pair(STATES, device) as then:
        pair.prefill("a", 8, 8, 8)
        ticket = pair.export_after("a", 3, when)
        tokens = pair.one.tokens["a"]
        pair.one.remove("a")
        pair.receive("a", ticket, tokens)
        assert [pair.two.fork("a", f"at {at}", at=at) for at in (25, 24, 23, 16)] == [1, 0, 7, 0]
        sender = kv.PageSender(pair.two.cache)
        then.receive("a", pair.two.cache.export_sequence("a", sender), tokens)
        assert then.two.pop("a", 2) == 1
        assert then.two.pop("a", 2) == 6
        for side in (pair.two, then.two):
            side.step({name: side.new(1) for name in side.tokens})
        assert poll(lambda: not sender.stats()["offered_pages"])
        for each in (pair, then):
            each.check_empty()
        sender.close()


def test_kept_states_that_are_offered_are_not_dropped(device):
    """Though the sequence is gone, and others need their slots."""
    with Pair(STATES, device, num_tokens=16, max_seq_len=16) as pair:
        states = pair.one.cache._states
        pair.prefill("a", 8, 4)
        tokens = pair.one.tokens["a"]
        ticket = pair.export("a")
        pair.one.remove("a")
        free = states.num_available
        assert free == states.num_slots - 2  # a copy of the live one, and a kept one
        others = states._allocate(free)
        with pytest.raises(kv.CacheFull, match="Recurrent"):
            states._allocate(1)
        pair.receive("b", ticket, tokens)
        assert pair.two.pop("b", 3) == 1
        pair.two.step({"b": pair.two.new(1)})
        pair.settle()
        states.free(others)
        pair.check_empty()


def test_a_receiver_without_room_for_kept_states_leaves_them(device):
    with Pair(STATES, device) as pair:
        pair.prefill("a", 8, 8, 3)
        states = pair.two.cache._states
        taken = states._allocator.alloc(states.num_slots - 2)
        pair.receive("a", pair.export("a"), pair.one.tokens["a"]).synchronize()
        assert pair.two.pop("a", 1) == 18
        states.free(taken)
        pair.check_empty()


@pytest.mark.parametrize("mix", [MIXES["full, window"], HYBRID], ids=["windows", "states"])
def test_prompts_come_over_with_their_hashes(device, mix):
    """So tiered caches of both sides get the full blocks once nothing holds them: also of a prompt
    that is not computed to its end, and of a sequence that was removed meanwhile."""
    with Pair(mix, device) as pair:
        sent, arrived = (kv.TieredCache(groups=side.cache, host_bytes=1 << 20)
                         for side in (pair.one, pair.two))  # fmt: skip
        pair.one.cache.attach(sent)
        pair.two.cache.attach(arrived)
        prompt = pair.one.new(36)
        hashes = hashes_of(prompt)
        pair.one.cache.add_sequence("a", hashes=hashes)
        pair.one.tokens["a"] = []
        for start in range(0, 32, 8):
            pair.one.step({"a": prompt[start : start + 8]})
        ticket = pair.export("a")
        pair.one.remove("a")
        assert not sent.match(hashes).host
        pair.receive("a", ticket, prompt[:32])
        pair.two.step({"a": pair.two.new(4)})  # other tokens than the prompt's next
        pair.settle()
        assert arrived.match(hashes).host == 0
        pair.two.remove("a")
        for side, tiers in ((pair.one, sent), (pair.two, arrived)):
            assert tiers.match(hashes).host == len(hashes) - 1
            side.cache.add_sequence("b", hashes=hashes)
            length = side.cache.sequence_length("b")
            assert length > 24
            side.tokens["b"] = prompt[:length]
            side.step({"b": side.new(3)})
            side.remove("b")
            assert not side.cache._tiers._chains
            tiers.close()


def test_an_import_is_exported_and_offloaded_before_it_has_arrived(device):
    with (
        Pair(HYBRID, device, kind=TieredMixture, blocks=40) as pair,
        Pair(HYBRID, device) as then,
    ):
        pair.prefill("a", 20)
        tokens = pair.one.tokens["a"]
        pair.receive("b", pair.export("a"), tokens)
        sender = kv.PageSender(pair.two.cache)
        then.receive("c", pair.two.cache.export_sequence("b", sender), tokens)
        pair.two.offload("b")
        pair.two.onboard("b")
        then.two.step({"c": then.two.new(2)})
        pair.two.step({"b": pair.two.new(2)})
        assert poll(lambda: not sender.stats()["offered_pages"])
        pair.check_empty()
        then.check_empty()
        sender.close()


# --- Controls of the tests above ---


@pytest.mark.parametrize("is_held", [True, False], ids=["", "control"])
def test_offered_pages_are_held(device, monkeypatch, is_held):
    """A sequence that is changed and removed arrives as it was."""
    with Pair(HYBRID, device, num_tokens=512) as pair:
        pair.prefill("a", 21)
        tokens = list(pair.one.tokens["a"])
        with monkeypatch.context() as patched:
            if not is_held:
                patched.setattr(Sequences, "hold", hold_nothing)
                patched.setattr(Sequences, "free_unseen", lambda *_: None)
            ticket = pair.export("a")
        pair.one.step({"a": pair.one.new(1)})
        pair.one.remove("a")
        pair.one.poison()
        pair.receive("b", ticket, tokens).synchronize()
        if is_held:
            pair.two.step({"b": pair.two.new(5)})
            pair.check_empty()
        else:
            monkeypatch.setattr(Sequences, "drop", lambda *_: None)
            with pytest.raises(AssertionError):
                pair.two.step({"b": pair.two.new(5)})


def hold_nothing(sequences, sequence, hold=Sequences.hold):
    held = hold(sequences, sequence)
    sequences._references[held.pages[held.pages >= 0]] -= 1
    return held


@pytest.mark.parametrize("what", ["state", "window"])
def test_what_does_not_come_over_is_noticed(device, monkeypatch, what):
    if what == "state":
        hold = States.hold

        def hold_zeros(self, access, seq):
            slot, _ = hold(self, access, seq)
            return slot, lambda: self._copy(access, [], zeros=[slot])

        monkeypatch.setattr(States, "hold", hold_zeros)
    else:
        pull = kv.PageReceiver._pull

        def pull_in_another_order(self, ticket, into, *rest):
            return pull(self, ticket, [(pool, pages[::-1]) for pool, pages in into], *rest)

        monkeypatch.setattr(kv.PageReceiver, "_pull", pull_in_another_order)
    with Pair(MIXES["two states" if what == "state" else "windows"], device) as pair:
        pair.prefill("a", 24)
        pair.receive("b", pair.export("a"), pair.one.tokens["a"]).synchronize()
        with pytest.raises(AssertionError):
            pair.two.step({"b": pair.two.new(1)})


# --- Layer by layer ---


def test_layers_go_out_while_the_step_runs(device):
    """Each group's, by the numbers of the model; states go out at the end of the step."""
    with Pair(HYBRID, device) as pair:
        pair.one.add("a")
        arrived, started = [], []

        def has_arrived(layer):
            """Return whether a stream that waits for a layer gets past it."""
            stream = device.stream()
            pulls[0].wait_layer(layer, stream)
            return poll(stream.done, HOLD_S)

        pulls = []

        def begin():
            ticket = pair.export("a")
            pulls.append(pair.two.cache.import_sequence("b", ticket, pair.receiver))
            started.extend(has_arrived(layer) for layer in (0, 1, 3))

        pair.one.before["attention"] = begin
        pair.one.before["end"] = lambda: arrived.extend(map(has_arrived, (0, 1, 3)))
        pair.one.step({"a": pair.one.new(10)})
        assert started == [False, False, False]
        assert arrived == [False, True, True]
        pulls[0].synchronize()
        assert all(map(has_arrived, range(4)))
        pair.two.tokens["b"] = list(pair.one.tokens["a"])
        pair.two.step({"b": pair.two.new(1)})
        pair.check_empty()


def test_layers_are_waited_for_by_their_numbers_in_the_model(device):
    mix = lambda: [recurrent(3), sliding(1, 7, window=7), full(5)]  # noqa: E731
    with Pair(mix, device) as pair:
        pair.prefill("s", 20)
        pull = pair.receive("t", pair.export("s"), pair.one.tokens["s"])
        stream = device.stream()
        for layer in (1, 3, 5, 7):
            pull.wait_layer(layer, stream)
        pull.wait(stream)
        stream.synchronize()
        for layer, error in ((0, ValueError), ("1", TypeError)):
            with pytest.raises(error, match="layer"):
                pull.wait_layer(layer, stream)
        sizes = [pool.page_bytes for pool in pair.two.cache.sequence_pools]
        kept = [*(len(g.sequences.split(g.sequences.find("t"))[0])
                  for g in pair.two.cache._groups), 1]  # fmt: skip
        assert pull.num_bytes == np.dot(sizes, kept)
        pair.check_empty()


@pytest.mark.parametrize("when", POINTS)
def test_a_step_that_is_taken_back_withdraws_what_it_exports(device, when):
    with Pair(HYBRID, device) as pair:
        pair.prefill("a", 8)
        pulls = []
        tokens = pair.one.tokens["a"]
        pair.one.before[when] = lambda: pulls.append(pair.receive("b", pair.export("a"), tokens))
        pair.one.step({"a": pair.one.new(3)}, keep=False)
        with pytest.raises(kv.TransferError) as raised:
            pulls[0].synchronize()
        assert raised.value.reason == "withdrawn"
        pair.settle()
        with pytest.raises(kv.TransferError):
            pair.two.step({"b": pair.two.new(1)})
        pair.two.tokens["b"] = pair.two.tokens["b"][: pair.two.cache.sequence_length("b")]
        pair.two.remove("b")
        pair.one.step({"a": pair.one.new(3)})
        pair.check_empty()


@contextmanager
def beside(device, work):
    """Run work that waits for layers. With a GPU, staging pages make it block the host."""
    with background(work) as thread:
        if device.kind == "host":
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "it blocks"
        yield thread


@pytest.fixture
def compute(device):
    stream = device.stream()
    yield stream
    stream.synchronize()


@pytest.mark.races("control")
@pytest.mark.parametrize("waits", [True, False], ids=["", "control"])
def test_attention_waits_for_its_own_layer(device, compute, monkeypatch, waits):
    """It is enqueued before anything has arrived."""
    if not waits:
        monkeypatch.setattr(GroupStep, "wait_layer", lambda *_: None)
    with plain(device) as pair:
        tokens, outs = tokens_of(1, 2 * PAGE + 2), []
        pair.one.cache.add_sequence("s")
        rows, later = pair.one.rows(tokens), pair.two.rows([5])
        with pair.one.cache.forward(["s"], [len(tokens)]):
            pair.receive("t", pair.export("s"))

            def attend():
                with pair.two.cache.forward(["t"], [1]):
                    outs.extend(
                        pair.two.attend(layer, later, compute) for layer in range(NUM_LAYERS)
                    )

            with beside(device, attend) as thread:
                is_early = poll(lambda: not thread.is_alive() and compute.done(),
                                HOLD_S if waits else PATIENCE_S)  # fmt: skip
                for layer in range(NUM_LAYERS):
                    pair.one.attend(layer, rows)
        compute.synchronize()
        got = [device.to_numpy(out).copy() for out in outs]
        same = [np.array_equal(*both) for both in zip(got, pair.one.step("s", [5]), strict=True)]
        assert is_early != waits and (all(same) if waits else not any(same))
        pair.check_free()


@pytest.mark.races("control")
@pytest.mark.parametrize("dropped", [False, True], ids=["waits", "control"])
def test_pages_that_an_earlier_step_still_reads_are_not_written(
    device, compute, monkeypatch, dropped
):
    """Pages of a removed sequence go to the imported one while a late stream reads them."""
    with plain(device) as pair:
        tokens = tokens_of(4, 12 * PAGE - 1)
        pair.one.cache.add_sequence("s")
        pair.one.step("s", tokens_of(1, 12 * PAGE))
        pair.two.cache.add_sequence("u")
        pair.two.step("u", tokens)
        if dropped:
            pull = kv.PageReceiver._pull
            idle = device.stream()
            monkeypatch.setattr(kv.PageReceiver, "_pull", lambda *a: pull(*a[:-1], idle))
        gate = Gate(compute)
        rows = pair.two.rows([5])
        with pair.two.cache.forward(["u"], [1]):
            outs = [pair.two.attend(layer, rows, compute) for layer in range(NUM_LAYERS)]
        pair.two.cache.remove_sequence("u")
        arriving = pair.receive("t", pair.export("s"))
        assert poll(arriving.done, PATIENCE_S if dropped else HOLD_S) == dropped
        gate.open()
        compute.synchronize()
        arriving.synchronize()
        outs = [device.to_numpy(out).copy() for out in outs]
        want = fresh(pair.device, tokens, [5])[0]
        same = [np.array_equal(one, other) for one, other in zip(outs, want, strict=True)]
        assert all(same) != dropped
        pair.check_free()


def test_a_graph_goes_out_when_its_step_has_ended(device):
    """Nothing announces its layers; other layers may have been attended in before the call."""
    with plain(device, max_seq_len=32) as pair:
        stream, tokens = device.stream(), tokens_of(1, 6)
        pair.one.cache.add_sequence("s")
        rows = pair.one.rows(tokens)
        with pair.one.cache.forward(["s"], [6]):
            stream.call(lambda: time.sleep(HOLD_S))
            pair.one.attend(0, rows, stream)
            ticket = pair.export("s")
            for layer in range(1, NUM_LAYERS):
                pair.one.attend(layer, rows, stream)
        pair.receive("s", ticket).synchronize()
        assert pair.two.bits("s") == pair.one.bits("s")
        rows = pair.one.rows([5])
        outs = [device.zeros((1, *pair.one.out_shape), np.float32) for _ in range(NUM_LAYERS)]
        pair.one.cache.fork_sequence("s", "f")
        with pair.one.cache.forward(["s"], [1]), stream.capture() as graph:
            for layer in range(NUM_LAYERS):
                pair.one.cache.attention(
                    layer, *(r[layer] for r in rows), out=outs[layer], stream=stream
                )
        with pair.one.cache.forward(["f"], [1]):
            ticket = pair.export("f")
            graph.launch(stream)
        stream.synchronize()
        pair.receive("t", ticket).synchronize()
        assert pair.two.bits("t") == pair.one.bits("f")
        del graph
        pair.check_free()


# --- Transfers that fail ---


def free_of(side):
    """Free pages of each group, and free states."""
    counts = [group.pool.allocator.num_available for group in side.cache._groups]
    states = side.cache._states
    return counts if states is None else [*counts, states.num_available]


@pytest.mark.parametrize(("ending", "outcome"), [
    ("lease", "expired"), ("withdrawn", "withdrawn"), ("closed", "lost"),
])  # fmt: skip
def test_an_offer_that_ends_early(device, ending, outcome):
    """What is imported afterwards fails and is not used, and all pages come back."""
    with Pair(HYBRID, device) as pair:
        free, free_there = free_of(pair.one), free_of(pair.two)
        pair.prefill("a", 21)
        ticket = pair.export("a", lease_s=0.05 if ending == "lease" else 30.0)
        tokens = pair.one.tokens["a"]
        pair.one.remove("a")
        if ending == "withdrawn":
            pair.withdraw()
        if ending == "closed":
            pair.sender.close()
        assert poll(lambda: pair.one.cache.num_available_pages and free_of(pair.one) == free)
        pull = pair.receive("b", ticket, tokens)
        with pytest.raises(kv.TransferError) as raised:
            pull.synchronize()
        assert raised.value.reason == outcome and pull.failure is not None
        with pytest.raises(kv.TransferError):
            pair.two.step({"b": pair.two.new(1)}, work="attention")
            pair.two.cache.state_slots_of(["b"])
        pair.two.remove("b")
        assert poll(lambda: pair.two.cache.num_available_pages and free_of(pair.two) == free_there)
        pair.check_empty()


@pytest.mark.parametrize("when", POINTS)
def test_late_bytes_do_not_reach_pages_that_are_used_again(device, when):
    """The receiver gives up while the layers of a step go out, and reuses its pages at once."""
    with Pair(HYBRID, device) as pair:
        pair.prefill("a", 8)

        def give_up():
            pull = pair.receive("b", pair.export("a"), ())
            time.sleep(0.02)
            pull.cancel()
            pair.two.cache.remove_sequence("b")
            del pair.two.tokens["b"]
            pair.two.add("c")
            pair.two.step({"c": pair.two.new(60)})

        pair.one.before[when] = give_up
        pair.one.step({"a": pair.one.new(20)})
        pair.sender.close()
        pair.two.step({"c": pair.two.new(5)})
        pair.check_empty()


def test_an_import_that_failed_is_not_exported(device):
    with Pair(HYBRID, device) as pair:
        pair.prefill("s", 6)
        ticket = pair.export("s")
        pair.withdraw()
        pull = pair.receive("t", ticket, pair.one.tokens["s"])
        assert poll(lambda: pull.failure is not None)
        cache = pair.two.cache
        with kv.PageSender(cache) as sender:
            with pytest.raises(kv.TransferError):
                cache.export_sequence("t", sender)
            cache.begin_forward(["t"], [1])
            with suppress(kv.TransferError):
                cache.export_sequence("t", sender)
            with pytest.raises(kv.TransferError):
                cache.end_forward()
            assert sender.stats()["completed"] == sender.stats()["offers"] == 0
            pair.two.remove("t")
        pair.check_empty()


# --- What is refused ---


def others():
    """Groups that differ from `HYBRID` in one thing."""
    state = {"conv": ((4, 3), "bf16"), "ssm": ((5, 2), "fp32")}
    wide, half = ({"num_kv_heads": 2, "head_dim": 8, "dtype": "fp32", **changes}
                  for changes in ({"head_dim": 16}, {"dtype": "bf16"}))  # fmt: skip
    parts = [recurrent(0, 2), sliding(1, window=6), full(3)]
    return {
        "window": [parts[0], sliding(1, window=7), parts[2]],
        "sinks": [parts[0], sliding(1, window=6, sink_tokens=1), parts[2]],
        "layer": [*parts[:2], full(4)],
        "kind": [*parts[:2], latent(3)],
        "state": [kv.Recurrent(layers=[0, 2], state=state), *parts[1:]],
        "fewer": [parts[0], parts[2]],
        "no state": parts[1:],
        "width": [*parts[:2], kv.FullAttention(layers=[3], **wide)],
        "format": [*parts[:2], kv.FullAttention(layers=[3], **half)],
    }


@pytest.mark.parametrize("difference", others())
def test_another_mixture_is_refused_before_a_byte_moves(device, network, difference):
    with Pair(HYBRID, device, other=lambda: others()[difference]) as pair:
        pair.prefill("a", 21)
        free, ticket = free_of(pair.two), pair.export("a")
        with pytest.raises((ValueError, kv.TransferError)):
            pair.receive("b", ticket, ())
        assert free_of(pair.two) == free and "b" not in pair.two.cache
        assert not any(agent.peers for agent in network.agents.values())
        pair.withdraw()
        pair.check_empty()


def test_other_rotations_and_page_sizes_are_refused(device):
    with plain(device) as pair:
        pair.one.cache.add_sequence("s")
        pair.one.step("s", tokens_of(1, 6))
        for name, options in (
            ("rope_mode", {"rope": device.asarray(rope_of(8))}), ("page_size", {"page_size": 8}),
        ):  # fmt: skip
            other = Prefixed(device, tiered=False, **options).cache
            with kv.PageReceiver(other) as receiver, pytest.raises(ValueError, match=name):
                other.import_sequence("t", pair.export("s"), receiver)
            assert "t" not in other and other.num_available_pages == other.pool.num_pages
        pair.withdraw()
        pair.check_free()


def test_bad_arguments_change_nothing(device):
    with Pair(HYBRID, device) as pair, Pair(HYBRID, device) as other:
        pair.prefill("a", 21)
        pair.one.add("empty")
        free = free_of(pair.one)
        export, sender = pair.one.cache.export_sequence, pair.sender
        alone = kv.PageSender(pair.one.cache.pool)
        for arguments, error, text in (
            (("a", [sender]), TypeError, "sender"),
            (("a", None), TypeError, "sender"),
            (("a", alone), ValueError, "sender"),
            (("a", other.sender), ValueError, "sender"),
            (("a", pair.receiver), TypeError, "sender"),
            (("empty", sender), ValueError, "seq"),
            (("unknown", sender), kv.UnknownSequence, "seq"),
        ):
            with pytest.raises(error, match=f"^{text}"):
                export(*arguments)
        with pytest.raises(ValueError, match=r"^lease_s"):
            export("a", sender, lease_s=-1)
        with pytest.raises(ValueError, match=r"^pages: expected a sender of one pool"):
            sender.offer([0])
        pair.settle()
        assert free_of(pair.one) == free
        ticket = pair.export("a")
        pages = pair.one.cache.pool.allocator.alloc(1)
        offered = alone.offer(pages)
        add = pair.two.cache.import_sequence
        for arguments, error, text in (
            (("b", ticket, [pair.receiver]), TypeError, "^receiver"),
            (("b", ticket, other.receiver), ValueError, "^receiver"),
            (("b", offered, pair.receiver), ValueError, "^ticket"),
            (("b", ticket[:-1], pair.receiver), kv.TransferError, "ticket"),
        ):
            with pytest.raises(error, match=text):
                add(*arguments)
        with pytest.raises(ValueError, match=r"^ticket: expected one of PageSender.offer"):
            pair.receiver.pull(ticket, [0])
        with pytest.raises(ValueError, match=r"^deadline_s"):
            add("b", ticket, pair.receiver, deadline_s=0)
        pair.receive("b", ticket, pair.one.tokens["a"])
        pair.two.step({"b": pair.two.new(1)})
        for each in (sender, alone):
            each.close()
        pair.check_empty()


def test_a_tree_and_a_window_that_slides_at_the_end_of_the_step_are_refused(device):
    with plain(device) as pair:
        cache = pair.one.cache
        for name in ("s", "tree"):
            cache.add_sequence(name)
        with cache.forward(["tree"], [2], token_tree=[[-1, 0]]):
            for layer in range(NUM_LAYERS):
                pair.one.attend(layer, pair.one.rows([1, 2]))
        with pytest.raises(ValueError, match=r"^seq: .* has a token tree"):
            pair.export("tree")
        pair.one.step("s", tokens_of(1, 6))
        cache.enable_sliding_window("s", 6)
        with cache.forward(["s"], [1]):
            with pytest.raises(ValueError, match=r"^seq: the window"):
                pair.export("s")
            for layer in range(NUM_LAYERS):
                pair.one.attend(layer, pair.one.rows([1]))
        pair.receive("t", pair.export("s"))
        assert pair.two.bits("t") == pair.one.bits("s")
        pair.check_free()


# --- Calls that fail ---


@pytest.mark.parametrize("number", range(3))
def test_an_import_without_room_in_some_group_changes_nothing(device, number):
    """So the ticket is still good when there is room."""
    with Pair(HYBRID, device) as pair:
        pair.prefill("a", 21)
        ticket = pair.export("a")
        label = ["SlidingWindow of layers 1", "FullAttention of layers 3", "Recurrent of layers 0"]
        allocator = pair.two.cache.sequence_pools[number].allocator
        taken = allocator.alloc(allocator.num_free)
        free = free_of(pair.two)
        with pytest.raises(kv.CacheFull, match=label[number]):
            pair.receive("b", ticket, ())
        assert free_of(pair.two) == free and "b" not in pair.two.cache
        allocator.free(taken)
        pair.receive("b", ticket, pair.one.tokens["a"])
        pair.two.step({"b": pair.two.new(1)})
        pair.check_empty()


def state_of(mixture):
    mixture.device.synchronize()
    states = mixture.cache._states
    return (
        sorted(mixture.cache._sequences._known, key=str),
        [group.sequences._references.tolist() for group in mixture.cache._groups],
        [pool.allocator.num_available for pool in mixture.cache.sequence_pools],
        None if states is None else sorted(states._kept),
    )


FAULTS = {
    "alloc": PageAllocator, "on": PageAccess, "_offer_parts": kv.PageSender,
    "_pull": kv.PageReceiver, "inspect": kv.PageReceiver, "_copy": States,
    "copy_stream_after_all": PageAccess,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("call", ["export", "import"])
def test_a_call_that_fails_changes_nothing(device, monkeypatch, call, name):
    """Each of the calls that it makes fails once."""
    genuine, failed = getattr(FAULTS[name], name), []
    with Pair(HYBRID, device) as pair:
        pair.prefill("s", 4, 4, 2)
        tokens = pair.one.tokens["s"]
        while True:
            ticket = pair.export("s") if call == "import" else None
            before, number = (state_of(pair.one), state_of(pair.two)), len(failed) + 1
            calls = []

            def fail_once(*arguments, calls=calls, number=number, **options):
                calls.append(name)
                if len(calls) == number:
                    raise kv.DeviceError("a fault of the test")
                return genuine(*arguments, **options)

            with monkeypatch.context() as patch:
                patch.setattr(FAULTS[name], name, fail_once)
                try:
                    if call == "import":
                        pair.two.cache.import_sequence("t", ticket, pair.receiver)
                    else:
                        ticket = pair.export("s")
                except kv.DeviceError:
                    failed.append(number)
            if len(failed) < number:
                break  # there are no more calls
            assert "t" not in pair.two.cache
            if call == "import":
                assert poll(lambda before=before: state_of(pair.two) == before[1])
                pair.withdraw()
            pair.settle()
            if call == "export":
                assert poll(lambda before=before: state_of(pair.one) == before[0])
        if call == "export":
            pair.two.cache.import_sequence("t", ticket, pair.receiver)
        pair.two.tokens["t"], pair.two._next = list(tokens), pair.one._next
        pair.two.step({"t": pair.two.new(1)})
        pair.check_empty()
    made = {
        "export": {"alloc": 1, "on": 2, "_offer_parts": 1, "_copy": 1},
        "import": {"alloc": 4, "on": 1, "_pull": 1, "inspect": 1, "copy_stream_after_all": 1},
    }  # fmt: skip
    assert len(failed) == made[call].get(name, 0)


def test_a_state_that_cannot_be_copied_at_the_end_of_a_step(device, monkeypatch):
    """The offer is withdrawn, and the step has ended."""
    with Pair(lambda: [full(0), recurrent(1, 2)], device) as pair:
        one = pair.one
        pair.prefill("s", 4, 9)
        new = one.new(2)
        one.cache.begin_forward(["s"], [2])
        one.tokens["s"] += new
        pull = pair.receive("t", pair.export("s"), one.tokens["s"])
        one._attend(["s"], [2])
        one._update(["s"], [2])

        def fail(*arguments, **options):
            raise kv.DeviceError("a fault of the test")

        with monkeypatch.context() as patch, pytest.raises(kv.DeviceError, match="fault"):
            patch.setattr("kvcupy.cache.paged.states.copy_pages", fail)
            one.cache.end_forward()
        with pytest.raises(kv.TransferError):
            pull.synchronize()
        pair.two.remove("t")
        one.step({"s": one.new(1)})
        pair.check_empty()


def test_a_layer_that_could_not_be_announced_goes_out_at_the_end_of_the_step(device, monkeypatch):
    announce, calls = kv.PageSender._announce, []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise kv.DeviceError("a fault of the test")
        announce(*arguments)

    with plain(device) as pair:
        pair.one.cache.add_sequence("s")
        rows = pair.one.rows(tokens_of(1, 6))
        with pair.one.cache.forward(["s"], [6]):
            pull = pair.receive("t", pair.export("s"))
            pair.one.attend(0, rows)
            monkeypatch.setattr(kv.PageSender, "_announce", fail_once)
            with pytest.raises(kv.DeviceError, match="fault"):
                pair.one.attend(1, rows)
            pair.one.attend(2, rows)
        pull.synchronize()
        assert pair.two.bits("t") == pair.one.bits("s")
        pair.check_free()


# --- Interrupts ---


@pytest.mark.parametrize("when", ["outside of steps", "in a step", "after the lease"])
def test_an_export_that_is_interrupted_once_it_is_offered(device, monkeypatch, when):
    """The pages are held until the offer is over, and are released once."""
    offer_parts, in_step = kv.PageSender._offer_parts, when == "in a step"

    def interrupted(*arguments, **options):
        offer = offer_parts(*arguments, **options)
        if when == "after the lease":
            offer.withdraw()
            assert poll(lambda: offer.is_over and not pair.sender._offers)
        raise KeyboardInterrupt

    with Pair(HYBRID, device) as pair:
        pair.prefill("s", 6)
        if in_step:
            pair.one.cache.begin_forward(["s"], [3])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(kv.PageSender, "_offer_parts", interrupted)
            pair.export("s")
        if in_step:
            pair.one.cache.abort_forward()
        pair.settle()
        assert pair.sender.stats()["withdrawn"] == 1
        assert pair.one.cache._sequences._references.max() == 1
        pair.receive("t", pair.export("s"), pair.one.tokens["s"]).synchronize()
        pair.check_empty()


def interruptions(*owners):
    """Yield contexts, each interrupted once, at every place where Python runs signal handlers.

    A profile function raises there, in the modules of some classes. The last one goes through.
    """
    files, left, number = set(map(inspect.getfile, owners)), 0, 0

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    @contextmanager
    def interrupted():
        sys.setprofile(profile)
        try:
            with suppress(KeyboardInterrupt):
                yield number
        finally:
            sys.setprofile(None)

    while left <= 0:
        number += 1
        left = number
        yield interrupted()
    assert number > 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers
@pytest.mark.parametrize("in_step", [False, True])
def test_an_export_that_is_interrupted_anywhere_holds_nothing(device, in_step):
    """Once the offer has ended."""
    with plain(device) as pair:
        cache = pair.one.cache
        cache.add_sequence("s")
        pair.one.step("s", tokens_of(1, 6))
        for interrupted in interruptions(exchange.Exchange, kv.PageSender):
            if in_step:
                cache.begin_forward(["s"], [1])
            with interrupted as number:
                pair.export("s")
            if in_step:
                cache.abort_forward()
            pair.withdraw()
            pair.settle()
            assert cache.num_available_pages == cache.pool.num_pages - 2
            assert cache._sequences._references.max() == 1, number
        pair.check_free()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers
def test_an_import_that_is_interrupted_anywhere_holds_nothing(device):
    """Unless the sequence was added: then it can be removed."""
    with plain(device) as pair:
        pair.one.cache.add_sequence("s")
        pair.one.step("s", tokens_of(1, 6))
        cache = pair.two.cache
        for interrupted in interruptions(exchange.Exchange, kv.PageReceiver):
            ticket = pair.export("s")
            with interrupted as number:
                pair.receive("t", ticket)
            if "t" in cache:
                cache.remove_sequence("t")
            pair.withdraw()
            pair.settle()
            assert cache.num_available_pages == cache.pool.num_pages, number
            assert not cache._sequences._references.any()
        pair.check_free()
