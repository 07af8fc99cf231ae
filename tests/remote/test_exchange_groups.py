"""`export_sequence` and `import_sequence` of caches with groups of layers."""

from __future__ import annotations

import json
import random
from contextlib import suppress

import numpy as np
import pytest
from groups_model import HEADS, PAGE, Mixture, Taken, full, latent, recurrent, sliding
from helpers import full_only
from line_process import poll
from tiered_groups_cases import TieredMixture, hashes_of

import kvcupy as kv
from kvcupy.cache.hazards import PageAccess
from kvcupy.cache.paged import exchange
from kvcupy.cache.paged.states import States
from kvcupy.cache.pages import PageAllocator

pytestmark = pytest.mark.usefixtures("lenient_host")

MIXES = {
    "window, full": [sliding(0, 1, window=6), full(2)],
    "sinks": [full(0), sliding(1, window=9, sink_tokens=5), latent(2)],
    "full, state": [full(0), recurrent(1, 2)],
    "state, window, full": [recurrent(0), sliding(1, window=7), full(2)],
    "windows": [sliding(0, window=1), sliding(1, window=12, sink_tokens=2)],
}


def pools_of(cache):
    return [*cache.pools, *([] if cache.state_pool is None else [cache.state_pool])]


class Pair:
    """Two caches of equal groups: `one` has senders, and `two` has receivers."""

    def __init__(self, device, mix, *, other=None, kind=Mixture, **options):
        groups = MIXES[mix] if isinstance(mix, str) else mix
        self.one = kind(groups, device, **{"num_tokens": 300, **options})
        self.two = kind(other or groups, device, **{"num_tokens": 300, **options})
        self.senders = [kv.PageSender(pool) for pool in pools_of(self.one.cache)]
        self.receivers = [kv.PageReceiver(pool) for pool in pools_of(self.two.cache)]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for end in (*self.receivers, *self.senders):
            end.close()

    def begin(self, name, count):
        """Add a sequence of some tokens, in steps of 4."""
        self.one.add(name)
        for start in range(0, count, PAGE):
            self.one.step({name: self.one.new(min(PAGE, count - start))})

    def export(self, name, **options):
        return self.one.cache.export_sequence(name, self.senders, **options)

    def withdraw(self, ticket):
        """End all offers of a ticket."""
        described = json.loads(self.receivers[0].inspect(ticket).attachment)
        for each in (ticket, *map(bytes.fromhex, described["tickets"])):
            for sender in self.senders:
                with suppress(kv.TransferError):  # of another sender
                    sender.withdraw(each)

    def receive(self, name, ticket, tokens):
        try:
            pull = self.two.cache.import_sequence(name, ticket, self.receivers)
        except kv.CacheFull:
            self.withdraw(ticket)
            raise
        self.two.tokens[name] = list(tokens)
        self.two._next = max(self.two._next, self.one._next)
        return pull

    def settle(self):
        def is_settled():
            return not (
                any(sender.stats()["offered_pages"] for sender in self.senders)
                or any(receiver.stats()["pulls"] for receiver in self.receivers)
            )

        assert poll(is_settled)
        for side in (self.one, self.two):
            assert side.cache.num_available_pages >= 0  # what was held is free now

    def close_senders(self):
        """End all offers that nobody has taken."""
        for sender in self.senders:
            sender.close()

    def check(self):
        self.settle()
        for side in (self.one, self.two):
            side.check()

    def end(self):
        self.check()
        for side in (self.one, self.two):
            side.check_empty()


@pytest.mark.parametrize("count", [1, PAGE, 42])
@pytest.mark.parametrize("mix", MIXES)
def test_a_sequence_comes_over_and_goes_on(device, mix, count):
    with Pair(device, mix) as pair:
        pair.begin("s", count)
        pair.two.poison()
        pull = pair.receive("t", pair.export("s"), pair.one.tokens["s"])
        assert pair.two.cache.sequence_length("t") == pair.two.cache.total_length == count
        more = pair.one.new(3)
        pair.two.step({"t": more})
        pair.one.step({"s": more})
        pull.synchronize()
        assert pull.done() and pull.failure is None
        pages = [
            [(g.sequences.find(n).pages >= 0).tolist() for g in side.cache._groups]
            for side, n in ((pair.one, "s"), (pair.two, "t"))
        ]
        assert pages[0] == pages[1]
        pair.check()
        for number in (5, 1, 9):
            pair.two.step({"t": pair.two.new(number)})
            pair.two.check()
        pair.end()


def test_layers_are_waited_for_by_their_numbers_in_the_model(device):
    with Pair(device, [recurrent(3), sliding(1, 7, window=7), full(5)]) as pair:
        pair.begin("s", 20)
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
        sizes = [pool.page_bytes for pool in pools_of(pair.two.cache)]
        kept = [*(len(g.sequences.split(g.sequences.find("t"))[0])
                  for g in pair.two.cache._groups), 1]  # fmt: skip
        assert pull.num_pages == sum(kept)
        assert pull.num_bytes == np.dot(sizes, kept)
        pair.end()


@pytest.mark.parametrize("mix", ["window, full", "state, window, full"])
def test_what_happens_afterwards_does_not_come_over(device, mix):
    with Pair(device, mix) as pair:
        pair.begin("s", 24)
        tokens, ticket = list(pair.one.tokens["s"]), pair.export("s")
        pair.one.step({"s": pair.one.new(7)})
        pair.one.fork("s", "f")
        pair.one.pop("s", 3)
        pair.one.step({"s": pair.one.new(5), "f": pair.one.new(2)})
        pair.one.remove("s")
        pair.begin("other", 30)
        pair.receive("t", ticket, tokens)
        pair.two.step({"t": pair.two.new(1)})
        pair.end()


def test_a_prompt_and_its_hashes_come_over(device):
    """Over there its blocks go to the tiers."""
    with Pair(device, "state, window, full", kind=TieredMixture, blocks=40) as pair:
        prompt = pair.one.new(45)
        pair.one.prompt("s", prompt)
        pair.receive("t", pair.export("s"), prompt)
        pair.settle()
        pair.two.step({"t": pair.two.new(3)})
        pair.two.remove("t")
        assert pair.two.tiers.match(hashes_of(prompt[:-1])).device == 0  # no state at a checkpoint
        pair.receive("u", pair.export("s"), prompt)
        assert pair.two.cache._steps.mixed._chains["u"] == hashes_of(prompt)[:11]
        pair.end()


def test_an_import_is_exported_and_offloaded_before_it_has_arrived(device):
    with (
        Pair(device, "state, window, full", kind=TieredMixture, blocks=40) as pair,
        Pair(device, "state, window, full") as then,
    ):
        pair.begin("s", 20)
        tokens = pair.one.tokens["s"]
        pair.receive("t", pair.export("s"), tokens)
        with_sender = [kv.PageSender(pool) for pool in pools_of(pair.two.cache)]
        then.receive("u", pair.two.cache.export_sequence("t", with_sender), tokens)
        pair.two.offload("t")
        pair.two.onboard("t")
        then.two.step({"u": then.two.new(2)})
        pair.two.step({"t": pair.two.new(2)})
        then.settle()
        assert poll(lambda: not any(end.stats()["offered_pages"] for end in with_sender))
        pair.end()
        then.end()
        for end in with_sender:
            end.close()


# --- Within a step ---


@pytest.mark.parametrize("is_taken_back", [False, True])
@pytest.mark.parametrize("when", ["first", "between", "last"])
@pytest.mark.parametrize("mix", ["window, full", "full, state", "state, window, full"])
def test_within_a_step(device, mix, when, is_taken_back):
    """Layers go out as attention writes them, and the state when the step has ended."""
    with Pair(device, mix) as pair:
        one = pair.one
        pair.begin("s", 17)
        pair.one.fork("s", "other")
        new = one.new(5)
        before = list(one.tokens["s"])
        with suppress(Taken), one.cache.forward(["s"], [5]):
            one.tokens["s"] = before + new
            for now, work in (("first", one._attend), ("between", one._update), ("last", None)):
                if now == when:
                    pull = pair.receive("t", pair.export("s"), one.tokens["s"])
                    if is_taken_back:
                        raise Taken
                if work is not None:
                    work(["s"], [5])
        if is_taken_back:
            with pytest.raises(kv.TransferError):
                pull.synchronize()
            pair.two.remove("t")
            one.tokens["s"] = before[: one.cache.sequence_length("s")]
        else:
            pull.synchronize()
            pair.two.step({"t": pair.two.new(3)})
            pair.two.step({"t": pair.two.new(1)})
        one.step({"s": one.new(2), "other": one.new(1)})
        pair.end()


# --- Random programs ---


def export_in_step(pair, name, target, new, number):
    """Export a sequence before a part of a step, and import it within the step."""
    one = pair.one
    before = list(one.tokens[name])
    try:
        with one.cache.forward([name], [len(new)]):
            one.tokens[name] = before + new
            for i, work in enumerate((one._attend, one._update, None)):
                if i == number:
                    ticket = pair.export(name)
                if work is not None:
                    work([name], [len(new)])
            pair.receive(target, ticket, one.tokens[name])
    except kv.CacheFull:  # over there, or for the state: the step is taken back
        one.tokens[name] = before[: one.cache.sequence_length(name)]
        raise


def run(pair, seed, steps=40):
    """Change sequences of one cache at random, and export them to the other at any time."""
    rng = random.Random(seed)
    one, two = pair.one, pair.two
    names = iter(f"s{i}" for i in range(1000))
    exported = 0
    for _ in range(steps):
        known = sorted(one.tokens)
        kind = rng.choices(
            ["add", "step", "fork", "pop", "remove", "export", "export in step", "there"],
            [2, 6, 2, 2, 1, 4, 3, 4],
        )[0]
        name = rng.choice(known) if known else None
        with suppress(kv.CacheFull):
            if kind == "add" or name is None:
                one.add(next(names))
            elif kind == "step":
                one.step({name: one.new(rng.randint(1, 9))})
            elif kind == "fork":
                one.fork(name, next(names), rng.randint(0, len(one.tokens[name])))
            elif kind == "pop":
                one.pop(name, rng.randint(0, min(4, len(one.tokens[name]))))
            elif kind == "remove":
                one.remove(name)
            elif kind == "export" and one.tokens[name]:
                tokens, ticket = list(one.tokens[name]), pair.export(name)
                with suppress(kv.CacheFull):
                    one.step({name: one.new(rng.randint(1, 3))})
                pair.receive(next(names), ticket, tokens)
                exported += 1
            elif kind == "export in step":
                export_in_step(
                    pair, name, next(names), one.new(rng.randint(1, 6)), rng.randrange(3)
                )
                exported += 1
            elif kind == "there" and two.tokens:
                there = rng.choice(sorted(two.tokens))
                if rng.random() < 0.3:
                    two.remove(there)
                elif rng.random() < 0.3:
                    two.pop(there, rng.randint(0, min(4, len(two.tokens[there]))))
                else:
                    two.step({there: two.new(rng.randint(1, 9))})
        pair.settle()
        if len(two.tokens) > 4:
            two.remove(min(two.tokens))
        pair.check()
    pair.end()
    return exported


@pytest.mark.parametrize("seed", [0, *(full_only(n) for n in range(1, 10))])
@pytest.mark.parametrize("mix", MIXES)
def test_random_operations(device, mix, seed):
    with Pair(device, mix) as pair:
        assert run(pair, seed) > 0


@pytest.mark.parametrize("what", ["state", "window"])
def test_what_does_not_come_over_is_noticed(device, monkeypatch, what):
    """The control of the tests above."""
    if what == "state":
        hold = States.hold

        def hold_nothing(self, access, seq):
            slot, _ = hold(self, access, seq)
            return slot, lambda: self._copy(access, [], zeros=[slot])

        monkeypatch.setattr(States, "hold", hold_nothing)
    else:
        pull = kv.PageReceiver.pull

        def pull_in_another_order(self, ticket, pages, **options):
            return pull(self, ticket, pages[::-1], **options)

        monkeypatch.setattr(kv.PageReceiver, "pull", pull_in_another_order)
    with Pair(device, "full, state" if what == "state" else "windows") as pair:
        pair.begin("s", 24)
        pair.receive("t", pair.export("s"), pair.one.tokens["s"]).synchronize()
        with pytest.raises(AssertionError):
            pair.two.step({"t": pair.two.new(1)})
        pair.close_senders()


# --- What is refused, and failures ---


def state_of(mixture):
    mixture.device.synchronize()
    states = mixture.cache._states
    return (
        sorted(mixture.cache._sequences._known, key=str),
        [group.sequences._references.tolist() for group in mixture.cache._groups],
        [pool.allocator.num_available for pool in pools_of(mixture.cache)],
        None if states is None else sorted(states._kept),
    )


@pytest.mark.parametrize("number", range(3))
def test_ends_that_are_missing(device, number):
    label = ["SlidingWindow of layers 1", "FullAttention of layers 2", "Recurrent of layers 0"]
    with Pair(device, "state, window, full") as pair:
        pair.begin("s", 10)
        before = state_of(pair.one), state_of(pair.two)
        fewer = [end for i, end in enumerate(pair.senders) if i != number]
        with pytest.raises(ValueError, match=f"^sender: .*{label[number]}"):
            pair.one.cache.export_sequence("s", fewer)
        with pytest.raises(ValueError, match=r"^sender: expected a PageSender of the pool of this"):
            pair.one.cache.export_sequence("s", [*fewer, pair.receivers[number]])
        with pytest.raises(ValueError, match=r"^sender: expected at least one"):
            pair.one.cache.export_sequence("s", [])
        with pytest.raises(ValueError, match=r"^past_sender: expected None without past"):
            pair.one.cache.export_sequence("s", pair.senders, past_sender=pair.senders[0])
        ticket = pair.export("s")
        fewer = [end for i, end in enumerate(pair.receivers) if i != number]
        with pytest.raises(ValueError, match=f"^receiver: .*{label[number]}"):
            pair.two.cache.import_sequence("t", ticket, fewer)
        assert state_of(pair.two) == before[1]
        pair.close_senders()
        pair.settle()
        assert state_of(pair.one) == before[0]
        pair.end()


@pytest.mark.parametrize(("other", "name"), [
    ([recurrent(0), sliding(1, window=8), full(2)], "1 window"),
    ([recurrent(0), sliding(3, window=7), full(2)], "1 layers"),
    ([sliding(1, window=7), full(2)], "0 "),
])  # fmt: skip
def test_a_cache_of_other_groups_is_refused(device, other, name):
    with Pair(device, "state, window, full", other=other) as pair:
        pair.begin("s", 10)
        ticket = pair.export("s")
        with pytest.raises(ValueError, match=f"^ticket: expected a sequence with {name}"):
            pair.two.cache.import_sequence("t", ticket, pair.receivers)
        pair.two.check()
        pair.close_senders()
        pair.end()


def test_a_cache_without_groups_is_refused(device):
    plain = kv.PagedKVCache(
        num_layers=1, num_q_heads=HEADS, num_kv_heads=2, head_dim=8, num_pages=8, page_size=PAGE,
        dtype="fp32", device=device,
    )  # fmt: skip
    with Pair(device, [full(0)]) as pair, kv.PageReceiver(plain.pool) as receiver:
        pair.begin("s", 10)
        with pytest.raises(ValueError, match=r"^ticket: "):
            plain.import_sequence("t", pair.export("s"), receiver)
        pair.close_senders()
        pair.end()


@pytest.mark.parametrize("change", [
    {"first_kept": 1}, {"first_kept": 400}, {"first_kept": -1}, {"first_kept": True},
    {"window": 3}, {"first_kept": None},
])  # fmt: skip
def test_what_a_ticket_says_of_a_window_is_checked(device, change):
    with Pair(device, "sinks") as pair:
        pair.begin("s", 30)
        attachment = pair.receivers[0].inspect(pair.export("s")).attachment
        described = json.loads(attachment)
        assert exchange.decode_state(
            attachment, pair.two.cache._exchange._fields(), pair.two.cache._groups
        ).sequences[1].first_kept == 5  # fmt: skip
        described["groups"][1] |= change
        with pytest.raises(ValueError, match=r"^ticket: "):
            exchange.decode_state(
                json.dumps(described).encode(), pair.two.cache._exchange._fields(),
                pair.two.cache._groups,
            )  # fmt: skip
        pair.close_senders()
        pair.end()


@pytest.mark.parametrize("number", range(3))
def test_no_room(device, number):
    """The error names the group, and nothing has changed."""
    label = ["SlidingWindow of layers 1", "FullAttention of layers 2", "Recurrent of layers 0"]
    with Pair(device, "state, window, full") as pair:
        pair.begin("s", 10)
        ticket = pair.export("s")
        allocator = pools_of(pair.two.cache)[number].allocator
        taken = allocator.alloc(allocator.num_free)
        before = state_of(pair.two)
        with pytest.raises(kv.CacheFull, match=label[number]):
            pair.two.cache.import_sequence("t", ticket, pair.receivers)
        assert state_of(pair.two) == before and "t" not in pair.two.cache
        allocator.free(taken)
        pair.receive("t", ticket, pair.one.tokens["s"])
        pair.end()


def test_no_slot_for_the_state_of_an_export(device):
    with Pair(device, "full, state") as pair:
        pair.begin("s", 10)
        allocator = pair.one.cache.state_pool.allocator
        taken = allocator.alloc(allocator.num_free)
        pair.one.cache._states._give_up(pair.one.cache._states.find("s"), 0)
        taken = [*taken, *allocator.alloc(allocator.num_free)]
        before = state_of(pair.one)
        with pytest.raises(kv.CacheFull, match="Recurrent"):
            pair.export("s")
        assert state_of(pair.one) == before
        allocator.free(taken)
        pair.receive("t", pair.export("s"), pair.one.tokens["s"])
        pair.end()


FAULTS = {
    "alloc": PageAllocator, "on": PageAccess, "offer": kv.PageSender, "pull": kv.PageReceiver,
    "inspect": kv.PageReceiver, "check": kv.PageReceiver, "_copy": States,
    "copy_stream_behind_all": PageAccess,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("call", ["export", "import"])
def test_a_call_that_fails_holds_nothing(device, monkeypatch, call, name):
    """Each of the calls that it makes fails once."""
    genuine, failed = getattr(FAULTS[name], name), []
    with Pair(device, "state, window, full") as pair:
        pair.begin("s", 10)
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
        pair.end()
    made = {
        "export": {"alloc": 1, "on": 2, "offer": 3, "_copy": 1},
        "import": {
            "alloc": 3,
            "on": 1,
            "pull": 3,
            "inspect": 4,
            "check": 3,
            "copy_stream_behind_all": 1,
        },
    }
    assert len(failed) == made[call].get(name, 0)


def test_a_state_that_cannot_be_copied_at_the_end_of_a_step(device, monkeypatch):
    """The offer is withdrawn, and the step has ended."""
    with Pair(device, "full, state") as pair:
        one = pair.one
        pair.begin("s", 9)
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
        pair.end()


@pytest.mark.parametrize("ending", ["lease", "withdrawn"])
def test_pages_that_nobody_fetches_come_back(device, ending):
    with Pair(device, "state, window, full") as pair:
        pair.begin("s", 20)
        before = state_of(pair.one)
        ticket = pair.export("s", lease_s=0.05 if ending == "lease" else 30.0)
        if ending == "withdrawn":
            pair.withdraw(ticket)
        assert poll(lambda: pair.one.cache.num_available_pages and state_of(pair.one) == before)
        pair.end()


def test_a_load_that_fails_over_there(device):
    """One of the offers has ended: the sequence can only be removed."""
    with Pair(device, "state, window, full") as pair:
        pair.begin("s", 20)
        ticket = pair.export("s")
        pair.senders[-1].close()
        pull = pair.receive("t", ticket, pair.one.tokens["s"])
        with pytest.raises(kv.TransferError):
            pull.synchronize()
        assert isinstance(pull.failure, kv.TransferError)
        with pytest.raises(kv.TransferError):
            pair.two.step({"t": pair.two.new(1)})
        pair.two.tokens["t"] = []
        pair.two.remove("t")
        pair.close_senders()
        pair.end()
