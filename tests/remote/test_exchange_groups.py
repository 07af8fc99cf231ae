"""`export_sequence` and `import_sequence` of caches with groups: what comes over."""

from __future__ import annotations

import random

import numpy as np
import pytest
from agents import Network
from exchange_groups_cases import MIXES, POINTS, GroupsPair
from groups_model import PAGE, Mixture, TieredMixture, full, hashes_of, recurrent, sliding
from helpers import full_only
from line_process import poll

import kvcupy as kv
from kvcupy.cache.paged.sequences import Sequences
from kvcupy.cache.paged.states import States

pytestmark = pytest.mark.usefixtures("quick_host")


@pytest.fixture(autouse=True)
def network(monkeypatch):
    return Network(immediate=True).install(monkeypatch)


HYBRID = MIXES["state, window, full"]
STATES = lambda: [recurrent(0, 2), full(1)]  # noqa: E731


@pytest.mark.parametrize("when", [None, *POINTS])
@pytest.mark.parametrize("mix", MIXES)
def test_a_sequence_comes_over_and_goes_on(device, mix, when):
    """With what its windows see and its states, from between steps or out of one."""
    with GroupsPair(MIXES[mix], device) as pair:
        for name, counts in {"a": (3,), "b": (23, 1, 1), "c": (8, 30)}.items():
            pair.prefill(name, *counts[:-1])
            if when is None:
                pair.one.step({name: pair.one.new(counts[-1])})
                ticket = pair.export(name)
            else:
                ticket = pair.export_in_step(name, counts[-1], when)
            pull = pair.receive(name, ticket, pair.one.tokens[name])
            pair.two.step({name: pair.two.new(1)})
            pull.synchronize()
            assert pull.done() and pull.num_pages > 0 and pull.failure is None
            pair.one.step({name: pair.one.new(9)})
            pair.two.step({name: pair.two.new(9)})
            pair.check()
        pair.two.fork("b", "d", at=20)
        pair.two.pop("c", 2)
        pair.two.step({name: pair.two.new(2) for name in "abcd"})
        pair.check_empty()


KINDS = [
    "add", "step", "step", "fork", "pop", *["export"] * 3, *["go on"] * 3, "fork that", "back",
    "remove",
]  # fmt: skip


def run(pair, seed, steps=40):
    """Random operations on both sides; what comes over is compared at each step."""
    rng = random.Random(seed)
    one, two = pair.one, pair.two
    compared = made = 0
    for _ in range(steps):
        known, arrived = sorted(one.tokens), sorted(two.tokens)
        kind, made, ticket = rng.choice(KINDS) if known else "add", made + 1, None
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
                if when is None:
                    ticket = pair.export(name)
                else:
                    ticket = pair.export_in_step(name, rng.randint(1, 20), when)
                pair.receive(f"i{made}", ticket, one.tokens[name])
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
            if ticket is not None:
                pair.withdraw()
        for side in (one, two):
            for name, tokens in list(side.tokens.items()):
                del tokens[side.cache.sequence_length(name) :]  # of a step that was taken back
                if not tokens or rng.random() < 0.04:
                    side.remove(name)
        pair.check()
    pair.check_empty()
    return compared


@pytest.mark.parametrize("seed", [0, *(full_only(n) for n in range(1, 8))])
@pytest.mark.parametrize("mix", MIXES)
def test_random_exchanges(device, mix, seed):
    with GroupsPair(MIXES[mix], device, num_tokens=512) as pair:
        assert run(pair, seed) > 1


# --- What is sent ---


def test_pages_that_no_window_sees_stay_behind(device):
    """Also of a long step, at whose end the window moves on from most of them."""
    mix = lambda: [sliding(0, window=8), full(1)]  # noqa: E731
    with GroupsPair(mix, device) as pair:
        pair.one.add("a")
        ticket = pair.export_in_step("a", 60, "attention")
        pull = pair.receive("b", ticket, pair.one.tokens["a"])
        pull.synchronize()
        window, whole = pair.two.cache._groups
        assert pull.num_pages == window.pool.allocator.num_allocated + 60 // PAGE
        assert window.pool.allocator.num_allocated == 8 // PAGE + 1
        assert whole.pool.allocator.num_allocated == 60 // PAGE
        pair.two.step({"b": pair.two.new(3)})
        pair.check_empty()


@pytest.mark.parametrize("when", [None, *POINTS])
def test_the_newest_kept_states_come_too(device, when):
    """So forks and pops need no more tokens again than at the source, and it can be sent on."""
    with GroupsPair(STATES, device) as pair, GroupsPair(STATES, device) as then:
        pair.prefill("a", 8, 8, 8)
        if when is None:
            pair.one.step({"a": pair.one.new(3)})
            ticket = pair.export("a")
        else:
            ticket = pair.export_in_step("a", 3, when)
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


def test_kept_states_that_are_offered_are_not_given_up(device):
    """Though the sequence is gone, and others need their slots."""
    with GroupsPair(STATES, device, num_tokens=16, max_seq_len=16) as pair:
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
        assert states.num_available == 2
        states.free(others)
        pair.check_empty()


def test_a_receiver_without_room_for_kept_states_leaves_them(device):
    """And takes the sequence. All of it is free at the source at once."""
    with GroupsPair(STATES, device) as pair:
        pair.prefill("a", 8, 8)
        pair.one.step({"a": pair.one.new(3)})
        tokens = pair.one.tokens["a"]
        ticket = pair.export("a", lease_s=30.0)
        pair.one.remove("a")
        states = pair.two.cache._states
        taken = states._allocator.alloc(states.num_slots - 2)
        pull = pair.receive("a", ticket, tokens)
        pull.synchronize()
        assert poll(lambda: pair.one.cache.num_available_pages == pair.one.cache.pool.num_pages)
        assert pair.two.pop("a", 1) == 18
        states.free(taken)
        pair.check_empty()


def test_demoted_pages_come_over_unconverted(device):
    def mix():
        demotion = kv.Demotion("fp8_e4m3", recent=8)
        return [sliding(0, window=8), full(1, demotion=demotion)]

    class Noted(Mixture):
        def _check_output(self, got, want, group):
            self.outputs.append(np.array(got))

    with GroupsPair(mix, device) as pair:
        for side in (pair.one, pair.two):
            side.__class__, side.outputs = Noted, []
        pair.prefill("a", 40, 3)
        assert len(pair.sender.pools) == 3 and pair.one.cache.past_pool is None
        pair.receive("a", pair.export("a"), pair.one.tokens["a"])
        pasts = [side.cache._groups[1].past_pool.allocator for side in (pair.one, pair.two)]
        assert pasts[0].num_allocated == pasts[1].num_allocated > 0
        for side in (pair.one, pair.two):
            side.outputs.clear()
            side.rng = np.random.default_rng(3)
            side.step({"a": range(1000, 1005)})
        np.testing.assert_array_equal(pair.one.outputs, pair.two.outputs)
        pair.check_empty()


@pytest.mark.parametrize(
    "mix", [MIXES["full, window"], STATES, HYBRID], ids=["windows", "states", "both"]
)
def test_prompts_come_over_with_their_hashes(device, mix):
    """And with the states kept behind them, so the importing cache gives its blocks to tiers."""
    with GroupsPair(mix, device) as pair:
        tiers = kv.TieredCache(groups=pair.two.cache, host_bytes=1 << 20)
        sent = kv.TieredCache(groups=pair.one.cache, host_bytes=1 << 20)
        pair.two.cache.attach(tiers)
        pair.one.cache.attach(sent)
        prompt = pair.one.new(32)
        hashes = hashes_of(prompt)
        pair.one.cache.add_sequence("a", hashes=hashes)
        pair.one.tokens["a"] = []
        for start in range(0, 32, 8):
            pair.one.step({"a": prompt[start : start + 8]})
        pair.receive("a", pair.export("a"), prompt)
        pair.two.step({"a": pair.two.new(1)})
        pair.settle()
        assert tiers.match(hashes).host == 0
        pair.two.remove("a")
        assert tiers.match(hashes).host == len(hashes)
        pair.two.cache.add_sequence("b", hashes=hashes)
        pair.two.tokens["b"] = prompt
        pair.two.step({"b": pair.two.new(3)})
        for side in (pair.one, pair.two):
            for name in list(side.tokens):
                side.remove(name)
        tiers.close()
        sent.close()


@pytest.mark.parametrize("mix", ["full, window", "state, window, full"])
def test_held_pages_go_to_the_tiers_when_they_are_let_go(device, mix):
    """The sequence is gone by then; its prompt is found as if it had not been exported."""
    found = []
    for is_exported in (False, True):
        with GroupsPair(MIXES[mix], device) as pair:
            tiers = kv.TieredCache(groups=pair.one.cache, host_bytes=1 << 20)
            pair.one.cache.attach(tiers)
            prompt = pair.one.new(34)
            hashes = hashes_of(prompt)
            pair.one.cache.add_sequence("a", hashes=hashes)
            pair.one.tokens["a"] = []
            for start in range(0, 34, 8):
                pair.one.step({"a": prompt[start : start + 8]})
            if is_exported:
                ticket = pair.export("a")
                pair.one.remove("a")
                assert not tiers.match(hashes).host
                pair.receive("b", ticket, prompt)
                pair.two.step({"b": pair.two.new(1)})
                pair.settle()
            else:
                pair.one.remove("a")
            pair.one.cache.add_sequence("c", hashes=hashes)
            length = pair.one.cache.sequence_length("c")
            pair.one.tokens["c"] = prompt[:length]
            pair.one.step({"c": pair.one.new(3)})
            found.append(length)
            pair.one.remove("c")
            assert not pair.one.cache._tiers._chains
            tiers.close()
    assert found[0] == found[1] > 24


def test_an_import_is_exported_and_offloaded_before_it_has_arrived(device):
    with (
        GroupsPair(HYBRID, device, kind=TieredMixture, blocks=40) as pair,
        GroupsPair(HYBRID, device) as then,
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


# --- As it was at the call ---


def test_what_happens_to_it_afterwards_does_not_come_over(device):
    """The model overwrites the live state, the last page and, behind a window, freed pages."""
    with GroupsPair(HYBRID, device, num_tokens=512) as pair:
        pair.prefill("a", 21)
        tokens = list(pair.one.tokens["a"])
        ticket = pair.export("a")
        pair.one.step({"a": pair.one.new(1)})
        pair.one.step({"a": pair.one.new(17)})
        pair.one.remove("a")
        pair.prefill("other", 40)
        pair.receive("b", ticket, tokens)
        pair.two.step({"b": pair.two.new(5)})
        pair.check_empty()


def unheld(monkeypatch):
    """Pages are not held."""
    hold = Sequences.hold

    def hold_nothing(self, sequence):
        held = hold(self, sequence)
        self._references[held.pages[held.pages >= 0]] -= 1
        return held

    monkeypatch.setattr(Sequences, "hold", hold_nothing)
    monkeypatch.setattr(Sequences, "drop", lambda *_: None)
    monkeypatch.setattr(Sequences, "free_unseen", lambda *_: None)


def test_without_a_reference_it_would(device, monkeypatch):
    """A control of the above."""
    with GroupsPair(HYBRID, device, num_tokens=512) as pair:
        pair.prefill("a", 21)
        tokens = list(pair.one.tokens["a"])
        with monkeypatch.context() as patched:
            unheld(patched)
            ticket = pair.export("a")
        pair.one.remove("a")
        pair.one.poison()
        pair.receive("b", ticket, tokens).synchronize()
        with pytest.raises(AssertionError):
            pair.two.step({"b": pair.two.new(5)})


@pytest.mark.parametrize("what", ["state", "window"])
def test_what_does_not_come_over_is_noticed(device, monkeypatch, what):
    """A control of the tests above."""
    if what == "state":
        hold = States.hold

        def hold_nothing(self, access, seq):
            slot, _ = hold(self, access, seq)
            return slot, lambda: self._copy(access, [], zeros=[slot])

        monkeypatch.setattr(States, "hold", hold_nothing)
    else:
        pull = kv.PageReceiver._pull

        def pull_in_another_order(self, ticket, into, *rest):
            return pull(self, ticket, [(pool, pages[::-1]) for pool, pages in into], *rest)

        monkeypatch.setattr(kv.PageReceiver, "_pull", pull_in_another_order)
    with GroupsPair(MIXES["two states" if what == "state" else "windows"], device) as pair:
        pair.prefill("a", 24)
        pair.receive("b", pair.export("a"), pair.one.tokens["a"]).synchronize()
        with pytest.raises(AssertionError):
            pair.two.step({"b": pair.two.new(1)})


# --- Layer by layer ---


def test_layers_go_out_while_the_step_runs(device):
    """Each group's, by the numbers of the model; states go out at the end of the step."""
    with GroupsPair(HYBRID, device) as pair:
        pair.one.add("a")
        arrived, started = [], []

        def has_arrived(layer):
            """Return whether a stream that waits for a layer gets past it."""
            stream = device.stream()
            pulls[0].wait_layer(layer, stream)
            return poll(stream.done, 0.05)

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
    with GroupsPair(mix, device) as pair:
        pair.prefill("s", 20)
        pull = pair.receive("t", pair.export("s"), pair.one.tokens["s"])
        stream = device.stream()
        for layer in (1, 3, 5, 7):
            pull.wait_layer(layer, stream)
        pull.wait(stream)
        stream.synchronize()
        with pytest.raises(ValueError, match="layer"):
            pull.wait_layer(0, stream)
        with pytest.raises(TypeError, match="layer"):
            pull.wait_layer("1", stream)
        sizes = [pool.page_bytes for pool in pair.two.cache.sequence_pools]
        kept = [*(len(g.sequences.split(g.sequences.find("t"))[0])
                  for g in pair.two.cache._groups), 1]  # fmt: skip
        assert pull.num_pages == sum(kept)
        assert pull.num_bytes == np.dot(sizes, kept)
        pair.check_empty()


@pytest.mark.parametrize("when", POINTS)
def test_a_step_that_is_taken_back_withdraws_what_it_exports(device, when):
    with GroupsPair(HYBRID, device) as pair:
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
