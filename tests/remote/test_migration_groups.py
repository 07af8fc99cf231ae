"""Sequences of groups between caches: what is sent, what ends early, what arrives late."""

from __future__ import annotations

import time

import pytest
from exchange_groups_cases import MIXES, GroupsPair
from groups_model import PAGE, full, sliding
from line_process import poll
from tiered_groups_cases import hashes_of

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("quick_host")

HYBRID = MIXES["state, window, full"]
POINTS = ["attention", "states", "end"]


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
            pulls.append(pair.two.cache.import_sequence("b", ticket, pair.receivers))
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
            assert not pair.one.cache._steps.mixed._chains
            tiers.close()
    assert found[0] == found[1] > 24


# --- Transfers that fail ---


def free_of(side):
    """Free pages of each group, and free states."""
    counts = [group.pool.allocator.num_available for group in side.cache._groups]
    states = side.cache._states
    return counts if states is None else [*counts, states.num_available]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("ending", ["lease", "withdrawn", "closed"])
def test_an_offer_that_ends_early_takes_its_sequence_with_it(device, ending, number):
    """Of whichever pool it is; what is imported afterwards fails, and all pages come back."""
    with GroupsPair(HYBRID, device) as pair:
        free = free_of(pair.one)
        pair.prefill("a", 21)
        lease_s = 0.2 if ending == "lease" else 30.0
        ticket = pair.export("a", lease_s=lease_s)
        tokens = pair.one.tokens["a"]
        pair.one.remove("a")
        sender = pair.senders[number]
        if ending == "withdrawn":
            assert sender.withdraw(pair.tickets(ticket)[number])
        if ending == "closed":
            sender.close()
        outcomes = {"lease": "expired", **dict.fromkeys(("withdrawn", "closed"), ending)}
        assert poll(lambda: sender.outcome(pair.tickets(ticket)[number]) == outcomes[ending])
        assert poll(lambda: pair.one.cache.num_available_pages and free_of(pair.one) == free)
        pull = pair.receive("b", ticket, tokens)
        with pytest.raises(kv.TransferError):
            pull.synchronize()
        pair.two.remove("b")
        pair.check_empty()


@pytest.mark.parametrize("number", range(3))
def test_a_sender_that_is_gone(device, number):
    """A sequence of which a part cannot come is not used, and its pages come back."""
    with GroupsPair(HYBRID, device) as pair:
        free = free_of(pair.two)
        pair.prefill("a", 21)
        ticket = pair.export("a")
        pair.senders[number].close()
        pull = pair.receive("b", ticket, pair.one.tokens["a"])
        with pytest.raises(kv.TransferError) as raised:
            pull.synchronize()
        assert raised.value.reason == "lost" and pull.failure is not None
        with pytest.raises(kv.TransferError):
            pair.two.step({"b": pair.two.new(1)}, work="attention")
            pair.two.cache.state_slots_of(["b"])
        pair.two.remove("b")
        assert poll(lambda: pair.two.cache.num_available_pages and free_of(pair.two) == free)
        pair.check_empty()


@pytest.mark.parametrize("when", POINTS)
def test_late_bytes_do_not_reach_pages_that_are_used_again(device, when):
    """The receiver gives up while the layers of a step go out, and reuses its pages at once."""
    with GroupsPair(HYBRID, device) as pair:
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
        for sender in pair.senders:
            sender.close()
        pair.two.step({"c": pair.two.new(5)})
        pair.check_empty()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("option", ["model", "secret"])
def test_another_model_or_secret_in_one_end_is_refused_before_a_byte_moves(
    device, monkeypatch, option, number
):
    with GroupsPair(HYBRID, device) as pair:
        pair.prefill("a", 21)
        ticket = pair.export("a")
        pool = pair.receivers[number].pool
        pair.receivers[number].close()
        value = "another" if option == "model" else b"a secret of another"
        pair.receivers[number] = kv.PageReceiver(pool, **{option: value})
        free, begun, pull = free_of(pair.two), [], kv.PageReceiver.pull
        with monkeypatch.context() as patched, pytest.raises(kv.TransferError):
            patched.setattr(
                kv.PageReceiver, "pull", lambda *a, **k: begun.append(a) or pull(*a, **k)
            )
            pair.receive("b", ticket, ())
        assert free_of(pair.two) == free and "b" not in pair.two.cache
        assert not begun
        pair.receivers[number].close()
        pair.receivers[number] = kv.PageReceiver(pool)
        pair.receive("b", ticket, pair.one.tokens["a"])
        pair.two.step({"b": pair.two.new(1)})
        pair.check_empty()
