"""Sequences of groups of which a part does not come, or that do not fit: nothing is left."""

from __future__ import annotations

import json
import time

import pytest
from exchange_groups_cases import MIXES, POINTS, GroupsPair
from groups_model import HEADS, PAGE, full, latent, recurrent, sliding
from line_process import poll

import kvcupy as kv
from kvcupy.cache.hazards import PageAccess
from kvcupy.cache.paged import exchange
from kvcupy.cache.paged.states import States
from kvcupy.cache.pages import PageAllocator

pytestmark = pytest.mark.usefixtures("quick_host")

HYBRID = MIXES["state, window, full"]


def free_of(side):
    """Free pages of each group, and free states."""
    counts = [group.pool.allocator.num_available for group in side.cache._groups]
    states = side.cache._states
    return counts if states is None else [*counts, states.num_available]


# --- Transfers that fail ---


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


def test_an_offer_of_kept_states_ends_alone(device):
    """A sequence without them is whole."""
    with GroupsPair(lambda: [full(0), recurrent(1, 2)], device) as pair:
        pair.prefill("a", 8, 8, 5)
        ticket = pair.export("a")
        *_, states = pair.senders
        assert states.withdraw(pair.tickets(ticket)[-1])
        pull = pair.receive("b", ticket, pair.one.tokens["a"])
        with pytest.raises(kv.TransferError):
            pull.synchronize()
        assert pair.two.cache.restorable_length("b", 20) == 0
        pair.two.step({"b": pair.two.new(1)})
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
def test_another_mixture_is_refused_before_a_byte_moves(device, difference):
    with GroupsPair(HYBRID, device, other=lambda: others()[difference]) as pair:
        pair.prefill("a", 21)
        free = free_of(pair.two)
        ticket = pair.export("a")
        with pytest.raises((ValueError, kv.TransferError)):
            pair.receive("b", ticket, ())
        assert free_of(pair.two) == free and "b" not in pair.two.cache
        assert not any(sender.stats()["sent_bytes"] for sender in pair.senders)
        assert not any(len(sender._connections) for sender in pair.senders)
        pair.withdraw(ticket)
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


def test_bad_arguments_change_nothing(device):
    with GroupsPair(HYBRID, device) as pair, GroupsPair(HYBRID, device) as other:
        pair.prefill("a", 21)
        pair.one.add("empty")
        free = free_of(pair.one)
        export, senders = pair.one.cache.export_sequence, pair.senders
        for arguments, error, text in (
            (("a", senders[0]), TypeError, "sender"),
            (("a", None), TypeError, "sender"),
            (("a", senders[1:]), ValueError, "sender"),
            (("a", [*senders, senders[0]]), ValueError, "sender"),
            (("a", [*senders[1:], other.senders[0]]), ValueError, "sender"),
            (("empty", senders), ValueError, "seq"),
            (("unknown", senders), kv.UnknownSequence, "seq"),
        ):
            with pytest.raises(error, match=f"^{text}"):
                export(*arguments)
        with pytest.raises(ValueError, match=r"^past_sender"):
            export("a", senders, past_sender=senders[0])
        with pytest.raises(ValueError, match=r"^lease_s"):
            export("a", senders, lease_s=-1)
        pair.settle()
        assert free_of(pair.one) == free
        ticket = pair.export("a")
        pages = pair.one.cache.pool.allocator.alloc(1)
        offered = senders[[s.pool for s in senders].index(pair.one.cache.pool)].offer(pages)
        add = pair.two.cache.import_sequence
        for arguments, error, text in (
            (("b", ticket, pair.receivers[0]), TypeError, "^receiver"),
            (("b", ticket, pair.receivers[1:]), ValueError, "^receiver"),
            (("b", offered, pair.receivers), ValueError, "^ticket"),
            (("b", ticket[:-1], pair.receivers), kv.TransferError, "ticket"),
        ):
            with pytest.raises(error, match=text):
                add(*arguments)
        with pytest.raises(ValueError, match=r"^past_receiver"):
            add("b", ticket, pair.receivers, past_receiver=pair.receivers[0])
        with pytest.raises(ValueError, match=r"^deadline_s"):
            add("b", ticket, pair.receivers, deadline_s=0)
        pair.receive("b", ticket, pair.one.tokens["a"])
        pair.two.step({"b": pair.two.new(1)})
        for sender in senders:
            sender.close()
        pair.check_empty()


def test_a_cache_without_groups_refuses_a_sequence_of_groups(device):
    with GroupsPair(lambda: [full(0)], device) as pair:
        pair.prefill("a", 5)
        alone = kv.PagedKVCache(
            num_layers=1, num_q_heads=HEADS, num_kv_heads=2, head_dim=8, num_pages=8,
            page_size=PAGE, dtype="fp32", device=device,
        )  # fmt: skip
        ticket = pair.export("a")
        with kv.PageReceiver(alone.pool) as receiver, pytest.raises(ValueError, match="ticket"):
            alone.import_sequence("b", ticket, receiver)
        alone.add_sequence("c")
        assert alone.sequence_pools == (alone.pool,)
        pair.withdraw(ticket)
        pair.check_empty()


@pytest.mark.parametrize(
    "field", ["fields", "groups", "kept", "kind", "length", "tickets", "version"]
)
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
            pair.withdraw(ticket)
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
        attachment, cache = pair.receivers[0].inspect(ticket).attachment, pair.two.cache
        fields = cache._exchange._fields()
        described = exchange.decode_state(attachment, fields, cache._groups)
        assert described.sequences[1].first_kept == 5
        changed = json.loads(attachment)
        changed["groups"][1] |= change
        with pytest.raises(ValueError, match=r"^ticket: "):
            exchange.decode_state(json.dumps(changed).encode(), fields, cache._groups)
        pair.withdraw(ticket)
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
        pair.one.cache._states._give_up(pair.one.cache._states.find("s"), 0)
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
    "alloc": PageAllocator, "on": PageAccess, "offer": kv.PageSender, "pull": kv.PageReceiver,
    "inspect": kv.PageReceiver, "check": kv.PageReceiver, "_copy": States,
    "copy_stream_behind_all": PageAccess,
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
                        pair.two.cache.import_sequence("t", ticket, pair.receivers)
                    else:
                        ticket = pair.export("s")
                except kv.DeviceError:
                    failed.append(number)
            if len(failed) < number:
                break  # there are no more calls
            assert "t" not in pair.two.cache
            if call == "import":
                assert poll(lambda before=before: state_of(pair.two) == before[1])
                pair.withdraw(ticket)
            pair.settle()
            if call == "export":
                assert poll(lambda before=before: state_of(pair.one) == before[0])
        if call == "export":
            pair.two.cache.import_sequence("t", ticket, pair.receivers)
        pair.two.tokens["t"], pair.two._next = list(tokens), pair.one._next
        pair.two.step({"t": pair.two.new(1)})
        pair.check_empty()
    made = {
        "export": {"alloc": 1, "on": 2, "offer": 4, "_copy": 1},
        "import": {
            "alloc": 4, "on": 1, "pull": 4, "inspect": 5, "check": 4, "copy_stream_behind_all": 1,
        },
    }  # fmt: skip
    assert len(failed) == made[call].get(name, 0)


@pytest.mark.parametrize("when", [None, *POINTS])
@pytest.mark.parametrize("call", range(3))
def test_an_offer_or_a_pull_that_fails_holds_nothing(device, monkeypatch, call, when):
    """Of each pool, also in a step."""
    with GroupsPair(HYBRID, device) as pair:
        pair.prefill("a", 21)
        for kind, name in ((kv.PageSender, "offer"), (kv.PageReceiver, "pull")):
            genuine, calls = getattr(kind, name), []

            def fail_once(*arguments, genuine=genuine, calls=calls, **options):
                calls.append(arguments)
                if len(calls) - 1 == call:
                    raise kv.DeviceError("a fault of the test")
                return genuine(*arguments, **options)

            ticket = pair.export("a") if name == "pull" else b""
            pair.settle() if not ticket else None
            before = free_of(pair.one), free_of(pair.two)
            monkeypatch.setattr(kind, name, fail_once)

            def failing(ticket=ticket):
                with pytest.raises(kv.DeviceError, match="fault"):
                    pair.receive("b", ticket or pair.export("a"), ())

            if when is None or ticket:
                failing()
            else:
                pair.one.before[when] = failing
                pair.one.step({"a": pair.one.new(1)})
                before = None, before[1]
            monkeypatch.setattr(kind, name, genuine)
            assert "b" not in pair.two.cache
            if name == "offer":
                pair.settle()
                assert before[0] in (None, free_of(pair.one))
                pair.one.check()
            else:
                pair.withdraw(ticket)
            assert poll(lambda before=before: free_of(pair.two) == before[1])
        pair.check_empty()


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
