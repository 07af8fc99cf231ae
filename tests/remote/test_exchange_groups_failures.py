"""Sequences of groups of which a part does not come, or that do not fit: nothing is left."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from agents import Network
from exchange_groups_cases import MIXES, POINTS, GroupsPair
from groups_model import HEADS, PAGE, full, latent, recurrent, sliding
from line_process import poll

import kvcupy as kv
from kvcupy.cache.hazards import PageAccess
from kvcupy.cache.paged import exchange
from kvcupy.cache.paged.states import States
from kvcupy.cache.pages import PageAllocator

pytestmark = pytest.mark.usefixtures("quick_host")


@pytest.fixture(autouse=True)
def network(monkeypatch):
    return Network(immediate=True).install(monkeypatch)


HYBRID = MIXES["state, window, full"]


def free_of(side):
    """Free pages of each group, and free states."""
    counts = [group.pool.allocator.num_available for group in side.cache._groups]
    states = side.cache._states
    return counts if states is None else [*counts, states.num_available]


# --- Transfers that fail ---


@pytest.mark.parametrize(("ending", "outcome"), [
    ("lease", "expired"), ("withdrawn", "withdrawn"), ("closed", "lost"),
])  # fmt: skip
def test_an_offer_that_ends_early(device, ending, outcome):
    """What is imported afterwards fails and is not used, and all pages come back."""
    with GroupsPair(HYBRID, device) as pair:
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
        pair.sender.close()
        pair.two.step({"c": pair.two.new(5)})
        pair.check_empty()


# --- What is refused ---


def others():
    """Groups that differ from `HYBRID` in one thing."""
    state = {"conv": ((4, 3), "bf16"), "ssm": ((2, 5), "fp32")}
    other = {**state, "ssm": ((5, 2), "fp32")}
    return {
        "window": [recurrent(0, 2), sliding(1, window=7), full(3)],
        "sinks": [recurrent(0, 2), sliding(1, window=6, sink_tokens=1), full(3)],
        "layer": [recurrent(0, 2), sliding(1, window=6), full(4)],
        "kind": [recurrent(0, 2), sliding(1, window=6), latent(3)],
        "state": [kv.Recurrent(layers=[0, 2], state=other), sliding(1, window=6), full(3)],
        "fewer": [recurrent(0, 2), full(3)],
        "no state": [sliding(1, window=6), full(3)],
        "width": [recurrent(0, 2), sliding(1, window=6), full(3).__class__(
            layers=[3], num_kv_heads=2, head_dim=16, dtype="fp32")],
        "format": [recurrent(0, 2), sliding(1, window=6), full(3).__class__(
            layers=[3], num_kv_heads=2, head_dim=8, dtype="bf16")],
    }  # fmt: skip


@pytest.mark.parametrize("difference", others())
def test_another_mixture_is_refused_before_a_byte_moves(device, network, difference):
    with GroupsPair(HYBRID, device, other=lambda: others()[difference]) as pair:
        pair.prefill("a", 21)
        free = free_of(pair.two)
        ticket = pair.export("a")
        with pytest.raises((ValueError, kv.TransferError)):
            pair.receive("b", ticket, ())
        assert free_of(pair.two) == free and "b" not in pair.two.cache
        assert not any(agent.peers for agent in network.agents.values())
        pair.withdraw()
        pair.check_empty()


def test_bad_arguments_change_nothing(device):
    with GroupsPair(HYBRID, device) as pair, GroupsPair(HYBRID, device) as other:
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


def test_a_cache_without_groups_takes_a_sequence_of_one_group(device):
    with GroupsPair(lambda: [full(0)], device) as pair:
        pair.prefill("a", 5)
        alone = kv.PagedKVCache(
            num_layers=1, num_q_heads=HEADS, num_kv_heads=2, head_dim=8, num_pages=8,
            page_size=PAGE, dtype="fp32", device=device,
        )  # fmt: skip
        ticket = pair.export("a")
        with kv.PageReceiver(alone) as receiver:
            alone.import_sequence("b", ticket, receiver).synchronize()
            contents = [cache.get_kv(name, 0, 5) for cache, name in
                        ((pair.one.cache, "a"), (alone, "b"))]  # fmt: skip
        for one, other in zip(*contents, strict=True):
            np.testing.assert_array_equal(device.to_numpy(one), device.to_numpy(other))
        assert alone.sequence_pools == (alone.pool,)
        pair.settle()
        pair.check_empty()


@pytest.mark.parametrize("field", ["fields", "groups", "kept", "kind", "length", "another"])
def test_a_damaged_description_is_refused(device, monkeypatch, field):
    """In a ticket that its sender has authenticated."""
    with GroupsPair(HYBRID, device) as pair:
        pair.prefill("a", 8, 8)
        genuine = exchange.encode_state
        for value in (None, False, 3, "x", [], {}, ["zz"], "00", [8, 16], [16, 0], [22, 8]):

            def encode(*described, value=value):
                return json.dumps({**json.loads(genuine(*described)), field: value}).encode()

            monkeypatch.setattr(exchange, "encode_state", encode)
            ticket = pair.export("a")
            with pytest.raises(ValueError, match=r"^ticket: "):
                pair.receive("b", ticket, ())
            pair.withdraw()
            pair.settle()
        pair.check_empty()


@pytest.mark.parametrize("change", [
    {"first_kept": 1}, {"first_kept": 400}, {"first_kept": -1}, {"first_kept": True},
    {"window": 3}, {"first_kept": None},
])  # fmt: skip
def test_what_a_ticket_says_of_a_window_is_checked(device, change):
    with GroupsPair(lambda: [full(0), sliding(1, window=9, sink_tokens=5)], device) as pair:
        pair.prefill("a", *[4] * 7, 2)
        ticket = pair.export("a")
        attachment, cache = pair.receiver.inspect(ticket).attachment, pair.two.cache
        fields = cache._exchange._fields()
        described = exchange.decode_state(attachment, fields, cache._groups)
        assert described.sequences[1].first_kept == 5
        changed = json.loads(attachment)
        changed["groups"][1] |= change
        with pytest.raises(ValueError, match=r"^ticket: "):
            exchange.decode_state(json.dumps(changed).encode(), fields, cache._groups)
        pair.withdraw()
        pair.check_empty()


# --- Calls that fail ---


@pytest.mark.parametrize("number", range(3))
def test_an_import_without_room_in_some_group_changes_nothing(device, number):
    """So the ticket is still good when there is room."""
    with GroupsPair(HYBRID, device) as pair:
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


def test_no_slot_for_the_state_of_an_export(device):
    with GroupsPair(lambda: [full(0), recurrent(1, 2)], device) as pair:
        pair.prefill("s", 4, 10)
        allocator = pair.one.cache.sequence_pools[-1].allocator
        taken = allocator.alloc(allocator.num_free)
        pair.one.cache._states._drop_kept(pair.one.cache._states.find("s"), 0)
        taken = [*taken, *allocator.alloc(allocator.num_free)]
        before = free_of(pair.one)
        with pytest.raises(kv.CacheFull, match="Recurrent"):
            pair.export("s")
        assert free_of(pair.one) == before
        allocator.free(taken)
        pair.receive("t", pair.export("s"), pair.one.tokens["s"])
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
    with GroupsPair(HYBRID, device) as pair:
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
    with GroupsPair(lambda: [full(0), recurrent(1, 2)], device) as pair:
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
