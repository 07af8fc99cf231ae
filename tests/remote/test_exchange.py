"""`PagedKVCache.export_sequence` and `import_sequence`: a sequence arrives whole, or not at all."""

from __future__ import annotations

import inspect
import json
import sys
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from agents import Network
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from line_process import PATIENCE_S, poll
from paged_cases import (
    MLA,
    NUM_LAYERS,
    PAGE,
    Prefixed,
    fresh,
    hashes_of,
    rope_of,
    same_outputs,
    snapshot,
    tokens_of,
)
from paged_world import background
from stream_cases import Gate

import kvcupy as kv
from kvcupy.cache.hazards import PageAccess
from kvcupy.cache.paged import exchange
from kvcupy.cache.paged.sequences import CachedSequence
from kvcupy.cache.paged.step import GroupStep

pytestmark = pytest.mark.usefixtures("quick_host")

SECRET = b"a secret of tests, long enough"
HOLD_S = 0.05  # long enough for a missing wait to show


@contextmanager
def beside(device, work):
    """Run work that waits for layers. With a GPU, staging pages make it block the host."""
    with background(work) as thread:
        if device.kind == "host":
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "it blocks"
        yield thread


class Pair:
    """Two caches whose rows follow from tokens; the first has a sender, the second a receiver."""

    def __init__(self, device, *, secret=None, tiered=False, other=None, **options):
        self.device = device
        self.one = Prefixed(device, tiered=tiered, **options)
        self.two = Prefixed(device, tiered=False, **{**options, **(other or {})})
        self.sender = kv.PageSender(self.one.cache, secret=secret)
        self.receiver = kv.PageReceiver(self.two.cache, secret=secret)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.receiver.close()
        self.sender.close()

    def prefill(self, name, tokens, **options):
        self.one.cache.add_sequence(name)
        self.one.step(name, tokens, **options)

    def export(self, name, **options):
        return self.one.cache.export_sequence(name, self.sender, **options)

    def receive(self, name, ticket, **options):
        return self.two.cache.import_sequence(name, ticket, self.receiver, **options)

    def settle(self):
        """Wait until no offer is open and no page of one is held."""

        def is_settled():
            return not (self.sender.stats()["offered_pages"] or self.receiver.stats()["pulls"])

        assert poll(is_settled), (self.sender.stats(), self.receiver.stats())

    def assert_no_leak(self):
        self.settle()
        for side in (self.one, self.two):
            side.cache.clear()
        if self.one.tiers is not None:
            assert self.one.cache.num_available_pages >= 0  # what was held goes to it now
            self.one.tiers.clear()
        for side in (self.one, self.two):
            assert side.cache.num_available_pages == side.cache.pool.num_pages
            assert not side.cache._sequences._references.any()
            assert side.cache.total_length == 0
            side.cache.pool.allocator.check_leaks()


@pytest.fixture(autouse=True)
def network(monkeypatch):
    return Network(immediate=True).install(monkeypatch)


def withdraw(sender):
    """Take all offers back, as a step does that is taken back."""
    for offer in list(sender._offers.values()):
        offer.withdraw()


@pytest.fixture
def pair(device):
    with Pair(device) as pair:
        yield pair


# --- What comes over ---

KINDS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "fp8 with scales": {"dtype": "fp8_e4m3"},
    "mla": MLA,
    "rotated": {"rope": rope_of(8)},
}


def on(device, options):
    """Return options of a cache, with arrays of its device."""
    return {n: device.asarray(v) if n == "rope" else v for n, v in options.items()}


@pytest.mark.covering
@pytest.mark.parametrize("count", [1, PAGE, 2 * PAGE + 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_comes_over_bit_for_bit_and_goes_on(device, kind, count):
    with Pair(device, secret=SECRET, **on(device, KINDS[kind])) as pair:
        pair.prefill("s", tokens_of(1, count))
        pull = pair.receive("t", pair.export("s"))
        assert pair.two.cache.sequence_length("t") == pair.two.cache.total_length == count
        more = tokens_of(2, PAGE)
        same_outputs(pair.two.step("t", more), pair.one.step("s", more))
        assert pair.two.bits("t") == pair.one.bits("s")
        pair.settle()
        assert pull.done() and pull.num_pages == -(-count // PAGE)
        pair.assert_no_leak()


@pytest.mark.parametrize("slid", [False, True])
def test_its_window_comes_over(pair, slid):
    """Also with evicted places within its pages, and when it has yet to slide."""
    pair.prefill("s", tokens_of(1, 10))
    pair.one.cache.enable_sliding_window("s", 5, 2)
    if slid:
        for token in range(3):
            pair.one.step("s", [token])
        assert pair.one.cache.sequence_length("s") == 7
        assert pair.one.cache._sequences.find("s").evicted
    pair.receive("t", pair.export("s"))
    assert pair.two.cache.sequence_length("t") == pair.one.cache.sequence_length("s")
    for token in range(9):
        same_outputs(pair.two.step("t", [token]), pair.one.step("s", [token]))
        assert pair.two.bits("t") == pair.one.bits("s")
        assert pair.two.cache.sequence_length("t") == pair.one.cache.sequence_length("s") == 7
    with pytest.raises(ValueError, match="sink_tokens"):  # it knows what was evicted
        pair.two.cache.enable_sliding_window("t", 4, 3)
    pair.assert_no_leak()


@pytest.mark.parametrize("computed", [3 * PAGE + 1, PAGE + 2])
def test_its_hashes_come_over(device, computed):
    """With them its blocks go to a tiered cache over there, also of a prompt that is not computed
    to its end: it has hashes of pages that are still to come."""
    tokens = tokens_of(1, 3 * PAGE + 1)
    with Pair(device, tiered=True) as there, Pair(device, tiered=True) as here:
        there.one.cache.add_sequence("s", hashes_of(tokens))
        there.one.step("s", tokens[:computed])
        with kv.PageReceiver(here.one.cache) as receiver:
            here.one.cache.import_sequence("t", there.export("s"), receiver)
            here.one.step("t", tokens[computed:] or [5])
            here.one.cache.remove_sequence("t")
        assert here.one.known(tokens)[0] == computed // PAGE * PAGE
        there.assert_no_leak()
        here.assert_no_leak()


def test_several_sequences_and_forks_come_over(pair):
    """A fork brings its shared pages once more: over there it stands alone."""
    pair.prefill("s", tokens_of(1, 6))
    pair.one.cache.fork_sequence("s", "f", at=5)
    pair.one.step("f", tokens_of(3, 3))
    for name in "sf":
        pair.receive(name, pair.export(name))
    for name in "sf":
        assert pair.two.bits(name) == pair.one.bits(name)
    pair.two.cache.remove_sequence("s")
    same_outputs(pair.two.step("f", [7]), pair.one.step("f", [7]))
    pair.assert_no_leak()


# --- As it was at the call ---


def extend(pair):
    pair.one.step("s", tokens_of(5, 3))


def pop_and_extend(pair):
    pair.one.cache.pop_tokens("s", 3)
    pair.one.step("s", tokens_of(6, 5))


def overwrite(pair):
    key, value = pair.one.cache.get_kv("s", 0, 6)
    pair.one.cache.set_kv("s", 0, value, key)


def remove(pair):
    pair.one.cache.remove_sequence("s")
    pair.prefill("other", tokens_of(7, 5 * PAGE))


def clear(pair):
    pair.one.cache.clear()
    pair.prefill("other", tokens_of(7, 5 * PAGE))


def slide(pair):
    pair.one.cache.enable_sliding_window("s", 4, 1)
    for token in range(6):
        pair.one.step("s", [token])


def fork_and_extend(pair):
    pair.one.cache.fork_sequence("s", "f")
    for token in range(3):
        pair.one.step("s", [token], "f", [token + 1])


def grow_a_tree(pair):
    cache, rows = pair.one.cache, pair.one.rows([1, 2, 3])
    with cache.forward(["s"], [3], token_tree=[[-1, 0, 0]]):
        for layer in range(NUM_LAYERS):
            pair.one.attend(layer, rows)
    cache.commit_token_tree(["s"], [2])


CHANGES = (
    extend, pop_and_extend, overwrite, remove, clear, slide, fork_and_extend, grow_a_tree,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_happens_to_it_afterwards_does_not_come_over(pair, change):
    pair.prefill("s", tokens_of(1, 2 * PAGE + 2))
    before = pair.one.bits("s")
    ticket = pair.export("s")
    change(pair)
    pair.receive("t", ticket)
    assert pair.two.bits("t") == before
    pair.assert_no_leak()


def test_without_a_reference_it_would(pair, monkeypatch):
    """A control of the above."""
    sequences = type(pair.one.cache._sequences)
    hold = sequences.hold

    def hold_nothing(self, sequence):
        held = hold(self, sequence)
        self._references[held.pages] -= 1
        return held

    pair.prefill("s", tokens_of(1, 2 * PAGE + 2))
    before = pair.one.bits("s")
    monkeypatch.setattr(sequences, "hold", hold_nothing)
    monkeypatch.setattr(sequences, "drop", lambda *_: None)
    ticket = pair.export("s")
    pop_and_extend(pair)
    pair.receive("t", ticket)
    assert pair.two.bits("t") != before


def test_pages_are_held_until_the_receiver_has_them(pair):
    """Then the next step takes them, though nobody asks for `num_available_pages`."""
    count = pair.one.cache.pool.num_pages
    pair.prefill("s", tokens_of(1, count * PAGE))
    ticket = pair.export("s")
    pair.one.cache.remove_sequence("s")
    assert pair.one.cache.num_available_pages == 0
    pair.receive("t", ticket).synchronize()
    pair.settle()
    pair.prefill("u", tokens_of(2, count * PAGE))
    pair.assert_no_leak()


@pytest.mark.parametrize("ending", ["lease", "withdrawn", "closed"])
def test_pages_that_nobody_fetches_come_back(pair, ending):
    pair.prefill("s", tokens_of(1, 2 * PAGE + 2))
    ticket = pair.export("s", lease_s=0.05 if ending == "lease" else 30.0)
    pair.one.cache.remove_sequence("s")
    if ending == "withdrawn":
        withdraw(pair.sender)
    if ending == "closed":
        pair.sender.close()
    everything = pair.one.cache.pool.num_pages
    assert poll(lambda: pair.one.cache.num_available_pages == everything)
    pull = pair.receive("t", ticket)
    with pytest.raises(kv.TransferError):
        pull.synchronize()
    pair.two.cache.remove_sequence("t")
    pair.assert_no_leak()


def test_full_pages_go_to_the_tiered_cache_when_they_are_let_go(device):
    tokens = tokens_of(1, 3 * PAGE + 1)
    with Pair(device, tiered=True) as pair:
        pair.one.prefill("s", tokens)
        ticket = pair.export("s")
        pair.one.cache.remove_sequence("s")
        assert pair.one.tiers.match(hashes_of(tokens)).device == 0
        pair.receive("t", ticket).synchronize()
        pair.settle()
        assert pair.one.cache.num_available_pages == pair.one.cache.pool.num_pages - 3
        assert pair.one.tiers.match(hashes_of(tokens)).device == 3
        pair.assert_no_leak()


# --- Layer by layer ---


@pytest.fixture
def compute(device):
    stream = device.stream()
    yield stream
    stream.synchronize()


def test_layers_go_out_while_the_step_runs(pair):
    """A layer is there when its attention has run over here, and not before."""
    tokens = tokens_of(1, 2 * PAGE + 2)
    pair.one.cache.add_sequence("s")
    pair.one.step("s", tokens[:3])
    rows = pair.one.rows(tokens[3:])
    with pair.one.cache.forward(["s"], [len(tokens) - 3]):
        pull = pair.receive("t", pair.export("s"))
        arrived = []

        def wait_for_layers():
            for layer in range(NUM_LAYERS):
                stream = pair.device.stream()
                pull.wait_layer(layer, stream)
                stream.call(lambda layer=layer: arrived.append(layer))

        with beside(pair.device, wait_for_layers):
            for layer in range(NUM_LAYERS):
                time.sleep(HOLD_S)
                assert arrived == list(range(layer))
                pair.one.attend(layer, rows)
                assert poll(lambda layer=layer: arrived == list(range(layer + 1)))
    assert pair.two.bits("t") == pair.one.bits("s")
    pair.assert_no_leak()


def attend_over_there(pair, compute, patience_s):
    """Begin to attend here before anything has arrived; return outputs, and what came early."""
    tokens = tokens_of(1, 2 * PAGE + 2)
    pair.one.cache.add_sequence("s")
    rows, later = pair.one.rows(tokens), pair.two.rows([5])
    with pair.one.cache.forward(["s"], [len(tokens)]):
        pair.receive("t", pair.export("s"))
        outs = []

        def attend():
            with pair.two.cache.forward(["t"], [1]):
                outs.extend(pair.two.attend(layer, later, compute) for layer in range(NUM_LAYERS))

        with beside(pair.device, attend) as thread:
            early = poll(lambda: not thread.is_alive() and compute.done(), patience_s)
            for layer in range(NUM_LAYERS):
                pair.one.attend(layer, rows)
    compute.synchronize()
    return [pair.device.to_numpy(out).copy() for out in outs], early


def test_attention_waits_for_its_own_layer(pair, compute):
    outs, early = attend_over_there(pair, compute, HOLD_S)
    assert not early
    same_outputs(outs, pair.one.step("s", [5]))
    pair.assert_no_leak()


@pytest.mark.races
def test_without_its_wait_attention_is_wrong(pair, compute, monkeypatch):
    monkeypatch.setattr(GroupStep, "wait_layer", lambda *_: None)
    outs, early = attend_over_there(pair, compute, PATIENCE_S)
    assert early
    want = pair.one.step("s", [5])
    assert not any(np.array_equal(one, other) for one, other in zip(outs, want, strict=True))


@pytest.mark.races("control")
@pytest.mark.parametrize("dropped", [False, True], ids=["waits", "control"])
def test_pages_that_an_earlier_step_still_reads_are_not_written(
    pair, compute, monkeypatch, dropped
):
    """Pages of a removed sequence go to the imported one while a late stream reads them."""
    tokens = tokens_of(4, 12 * PAGE - 1)
    pair.prefill("s", tokens_of(1, 12 * PAGE))
    pair.two.cache.add_sequence("u")
    pair.two.step("u", tokens)
    if dropped:
        pull = kv.PageReceiver._pull
        idle = pair.device.stream()
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
    outs = [pair.device.to_numpy(out).copy() for out in outs]
    want = fresh(pair.device, tokens, [5])[0]
    same = [np.array_equal(one, other) for one, other in zip(outs, want, strict=True)]
    assert all(same) != dropped
    pair.assert_no_leak()


def test_what_is_written_before_the_call_comes_over_too(device):
    """Layers that the step has attended in already, and steps that still run."""
    with Pair(device) as pair:
        tokens, stream = tokens_of(1, 2 * PAGE + 2), device.stream()
        pair.one.cache.add_sequence("s")
        rows = pair.one.rows(tokens)
        with pair.one.cache.forward(["s"], [len(tokens)]):
            stream.call(lambda: time.sleep(HOLD_S))
            pair.one.attend(0, rows, stream)
            ticket = pair.export("s")
            for layer in range(1, NUM_LAYERS):
                pair.one.attend(layer, rows, stream)
        pair.receive("t", ticket).synchronize()
        assert pair.two.bits("t") == pair.one.bits("s")
        with pair.one.cache.forward(["s"], [1]):
            stream.call(lambda: time.sleep(HOLD_S))
            for layer in range(NUM_LAYERS):
                pair.one.attend(layer, pair.one.rows([5]), stream)
        pair.receive("u", pair.export("s")).synchronize()
        assert pair.two.bits("u") == pair.one.bits("s")
        pair.assert_no_leak()


def test_a_graph_goes_out_when_its_step_has_ended(device):
    """Nothing announces the layers of a graph."""
    with Pair(device, max_seq_len=32) as pair:
        stream = device.stream()
        pair.prefill("s", tokens_of(1, 6))
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
        pair.assert_no_leak()


def test_a_step_that_is_taken_back_withdraws_what_it_exports(pair):
    """The import can only be removed; the others are as they were, and the pages come back."""
    pair.prefill("s", tokens_of(1, 6))
    pair.receive("other", pair.export("s")).synchronize()
    bits = pair.two.bits("other")
    with pytest.raises(KeyboardInterrupt), pair.one.cache.forward(["s"], [3]):
        pull = pair.receive("t", pair.export("s"))
        pair.one.attend(0, pair.one.rows([1, 2, 3]))
        raise KeyboardInterrupt
    with pytest.raises(kv.TransferError) as raised:
        pull.synchronize()
    assert raised.value.reason == "withdrawn"
    assert pair.one.cache.sequence_length("s") == 6
    pair.settle()
    with pytest.raises(kv.TransferError, match="withdrawn"):
        pair.two.step("t", [1])
    pair.two.cache.remove_sequence("t")
    assert pair.two.bits("other") == bits
    pair.assert_no_leak()


def test_a_cancelled_import(pair):
    tokens = tokens_of(1, 6)
    pair.one.cache.add_sequence("s")
    with pair.one.cache.forward(["s"], [6]):
        ticket = pair.export("s")
        pair.receive("t", ticket).cancel()
        pair.two.cache.remove_sequence("t")
        for layer in range(NUM_LAYERS):
            pair.one.attend(layer, pair.one.rows(tokens))
    withdraw(pair.sender)  # else another receiver might still fetch it
    pair.assert_no_leak()


def test_an_import_goes_on_to_a_third_cache(device):
    """Before it has arrived, also in a step in which nothing attends: its loads are waited for."""
    with Pair(device) as first, Pair(device) as then:
        tokens = tokens_of(1, 6)
        first.one.cache.add_sequence("s")
        rows = first.one.rows(tokens)
        cache = then.one.cache
        with (
            first.one.cache.forward(["s"], [6]), kv.PageReceiver(cache) as receiver,
        ):  # fmt: skip
            arriving = cache.import_sequence("t", first.export("s"), receiver)
            pulls = [arriving]

            def export():
                pulls.append(then.receive("u", then.export("t")))
                with cache.forward(["t"], [1]):
                    pulls.append(then.receive("v", then.export("t")))

            with beside(device, export):
                time.sleep(HOLD_S)
                assert not any(pull.done() for pull in pulls)
                for layer in range(NUM_LAYERS):
                    first.one.attend(layer, rows)
            assert len(pulls) == 3
            for pull in pulls:
                pull.synchronize()
        assert then.two.bits("u") == then.two.bits("v", 6) == first.one.bits("s")
        first.assert_no_leak()
        then.assert_no_leak()


def test_an_import_that_failed_is_not_exported(pair):
    pair.prefill("s", tokens_of(1, 6))
    ticket = pair.export("s")
    withdraw(pair.sender)
    pull = pair.receive("t", ticket)
    assert poll(lambda: pull.failure is not None)
    with kv.PageSender(pair.two.cache) as sender:
        with pytest.raises(kv.TransferError):
            pair.two.cache.export_sequence("t", sender)
        pair.two.cache.begin_forward(["t"], [1])
        pair.two.cache.export_sequence("t", sender)
        with pytest.raises(kv.TransferError):
            pair.two.cache.end_forward()
        assert sender.stats()["withdrawn"] == 1
        pair.two.cache.remove_sequence("t")
    pair.assert_no_leak()


# --- What is refused ---


@pytest.mark.parametrize(
    ("name", "options", "error", "argument"),
    [
        ("u", {}, kv.UnknownSequence, "seq"),
        ([], {}, TypeError, "seq"),
        ("e", {}, ValueError, "seq"),
        ("tree", {}, ValueError, "seq"),
        ("s", {"sender": None}, TypeError, "sender"),
        ("s", {"sender": "of another pool"}, ValueError, "sender"),
        ("s", {"lease_s": -1}, ValueError, "lease_s"),
        ("s", {"sender": "closed"}, kv.KvcupyError, "PageSender: closed"),
    ],
    ids=["unknown", "no name", "empty", "tree", "no sender", "other pool", "lease", "closed"],
)
def test_an_export_that_is_refused_changes_nothing(pair, name, options, error, argument):
    pair.prefill("s", tokens_of(1, 6))
    pair.one.cache.add_sequence("e")
    pair.one.cache.add_sequence("tree")
    with pair.one.cache.forward(["tree"], [2], token_tree=[[-1, 0]]):
        for layer in range(NUM_LAYERS):
            pair.one.attend(layer, pair.one.rows([1, 2]))
    arguments = {"sender": pair.sender, **options}
    if arguments["sender"] == "of another pool":
        arguments["sender"] = kv.PageSender(pair.two.cache)
    if arguments["sender"] == "closed":
        arguments["sender"] = pair.sender
        pair.sender.close()
    before = snapshot(pair.one.cache, ["s"])
    with pytest.raises(error, match=f"^{argument}"):
        pair.one.cache.export_sequence(name, **arguments)
    assert snapshot(pair.one.cache, ["s"]) == before
    assert not pair.sender.stats()["offers"]
    pair.assert_no_leak()


def test_a_window_that_slides_at_the_end_of_the_step_is_refused(pair):
    pair.prefill("s", tokens_of(1, 6))
    pair.one.cache.enable_sliding_window("s", 6)
    with pair.one.cache.forward(["s"], [1]):
        with pytest.raises(ValueError, match="window"):
            pair.export("s")
        for layer in range(NUM_LAYERS):
            pair.one.attend(layer, pair.one.rows([1]))
    pair.receive("t", pair.export("s"))
    assert pair.two.bits("t") == pair.one.bits("s")
    pair.assert_no_leak()


DIFFER = (kv.TransferError, ValueError)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_pages": 2}, kv.CacheFull, "free"),
        ({"num_kv_heads": 4}, DIFFER, "heads"),
        ({"head_dim": 16}, DIFFER, "head_dim"),
        ({"dtype": "bf16"}, DIFFER, "dtype"),
        ({"page_size": 8}, DIFFER, "page_size"),
        ({"rope": rope_of(8)}, DIFFER, "rope_mode"),
    ],
    ids=["pages", "heads", "width", "format", "page", "rope"],
)
def test_an_import_that_does_not_fit_changes_nothing(device, options, error, text):
    """Into a cache that cannot hold what the fp32 cache exports."""
    with Pair(device, other=on(device, options)) as pair:
        pair.prefill("s", tokens_of(1, 2 * PAGE + 2))
        pair.two.cache.add_sequence("k")
        ticket = pair.export("s")
        before = snapshot(pair.two.cache, ["k"])
        with pytest.raises(error, match=text):
            pair.receive("t", ticket)
        assert "t" not in pair.two.cache
        assert snapshot(pair.two.cache, ["k"]) == before
        withdraw(pair.sender)
        pair.assert_no_leak()


def test_bad_arguments_of_an_import_change_nothing(device):
    with Pair(device, secret=SECRET) as pair, Pair(device) as stranger:
        pair.prefill("s", tokens_of(1, 6))
        stranger.prefill("s", tokens_of(1, 6))
        ticket = pair.export("s")
        pages = pair.one.cache.pool.allocator.alloc(1)
        offered = pair.sender.offer(pages)
        cache = pair.two.cache
        cache.add_sequence("k")
        before = snapshot(cache, ["k"])
        refused = [
            (("k", ticket, pair.receiver), ValueError, "seq"),
            (([], ticket, pair.receiver), TypeError, "seq"),
            (("t", ticket, None), TypeError, "receiver"),
            (("t", ticket, stranger.receiver), ValueError, "receiver"),
            (("t", "ticket", pair.receiver), TypeError, "ticket"),
            (("t", ticket[:-1], pair.receiver), kv.TransferError, "ticket"),
            (("t", ticket[:200] + b"!" + ticket[201:], pair.receiver), kv.TransferError, "ticket"),
            (("t", stranger.export("s"), pair.receiver), kv.TransferError, "ticket"),
            (("t", offered, pair.receiver), ValueError, "ticket"),
        ]
        for arguments, error, text in refused:
            with pytest.raises(error, match=text):
                cache.import_sequence(*arguments)
            assert snapshot(cache, ["k"]) == before
        with pytest.raises(ValueError, match="deadline_s"):
            pair.receive("t", ticket, deadline_s=0)
        assert snapshot(cache, ["k"]) == before
        pair.receive("t", ticket).synchronize()
        withdraw(pair.sender)
        pair.assert_no_leak()


def failing_once(monkeypatch, kind, name):
    """Let the next call of a method raise."""
    method, calls = getattr(kind, name), []

    def fail_once(*arguments, **options):
        calls.append(name)
        if len(calls) == 1:
            raise kv.DeviceError("a fault of the test")
        return method(*arguments, **options)

    monkeypatch.setattr(kind, name, fail_once)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        ("export", (kv.PageSender, "_offer_parts")),
        ("export", (PageAccess, "on")),
        ("import", (kv.PageReceiver, "_pull")),
        ("import", (PageAccess, "on")),
    ],
)
def test_a_call_that_fails_holds_nothing(pair, monkeypatch, call, part):
    pair.prefill("s", tokens_of(1, 6))
    ticket = pair.export("s") if call == "import" else b""
    before = snapshot(pair.one.cache, ["s"])
    failing_once(monkeypatch, *part)
    with pytest.raises(kv.DeviceError, match="fault"):
        pair.receive("t", ticket or pair.export("s"))
    assert snapshot(pair.one.cache, ["s"]) == before
    assert call == "import" or pair.one.cache._sequences._references.max() == 1
    assert "t" not in pair.two.cache and pair.two.cache.total_length == 0
    assert pair.two.cache.num_available_pages == pair.two.cache.pool.num_pages
    pair.receive("t", ticket or pair.export("s"))
    assert pair.two.bits("t") == pair.one.bits("s")
    pair.assert_no_leak()


@pytest.mark.parametrize("when", ["outside of steps", "in a step", "after the lease"])
@pytest.mark.parametrize("tiered", [False, True])
def test_an_export_that_is_interrupted_once_it_is_offered(device, monkeypatch, when, tiered):
    """The pages are held until the offer is over, and are released once."""
    offer_parts, in_step = kv.PageSender._offer_parts, when == "in a step"

    def interrupted(*arguments, **options):
        offer = offer_parts(*arguments, **options)
        if when == "after the lease":
            offer.withdraw()
            assert poll(lambda: offer.is_over and not pair.sender._offers)
        raise KeyboardInterrupt

    with Pair(device, tiered=tiered) as pair:
        pair.prefill("s", tokens_of(1, 6))
        if in_step:
            pair.one.cache.begin_forward(["s"], [3])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(kv.PageSender, "_offer_parts", interrupted)
            pair.export("s")
        if in_step:
            pair.one.cache.abort_forward()
        pair.settle()
        assert pair.sender.stats()["withdrawn"] == 1
        assert pair.one.cache.num_available_pages < pair.one.cache.pool.num_pages
        assert pair.one.cache._sequences._references.max() == 1
        pair.receive("t", pair.export("s")).synchronize()
        assert pair.two.bits("t") == pair.one.bits("s")
        pair.assert_no_leak()


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
    assert number > 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers
@pytest.mark.parametrize("in_step", [False, True])
def test_an_export_that_is_interrupted_anywhere_holds_nothing(pair, in_step):
    """Once the offer has ended."""
    pair.prefill("s", tokens_of(1, 6))
    cache = pair.one.cache
    for interrupted in interruptions(exchange.Exchange, kv.PageSender):
        if in_step:
            cache.begin_forward(["s"], [1])
        with interrupted as number:
            pair.export("s")
        if in_step:
            cache.abort_forward()
        withdraw(pair.sender)
        pair.settle()
        assert cache.num_available_pages == cache.pool.num_pages - 2
        assert cache._sequences._references.max() == 1, number
    pair.assert_no_leak()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers
def test_an_import_that_is_interrupted_anywhere_holds_nothing(pair):
    """Unless the sequence was added: then it can be removed."""
    pair.prefill("s", tokens_of(1, 6))
    cache = pair.two.cache
    for interrupted in interruptions(exchange.Exchange, kv.PageReceiver):
        ticket = pair.export("s")
        with interrupted as number:
            pair.receive("t", ticket)
        if "t" in cache:
            cache.remove_sequence("t")
        withdraw(pair.sender)
        pair.settle()
        assert cache.num_available_pages == cache.pool.num_pages, number
        assert cache.total_length == 0 and not cache._sequences._references.any()
    pair.assert_no_leak()


def test_a_layer_that_could_not_be_announced_goes_out_at_the_end_of_the_step(pair, monkeypatch):
    pair.one.cache.add_sequence("s")
    tokens = tokens_of(1, 6)
    rows = pair.one.rows(tokens)
    with pair.one.cache.forward(["s"], [6]):
        pull = pair.receive("t", pair.export("s"))
        pair.one.attend(0, rows)
        failing_once(monkeypatch, kv.PageSender, "_announce")
        with pytest.raises(kv.DeviceError, match="fault"):
            pair.one.attend(1, rows)
        pair.one.attend(2, rows)
    pull.synchronize()
    assert pair.two.bits("t") == pair.one.bits("s")
    pair.assert_no_leak()


# --- Descriptions ---

FIELDS = {"rope_mode": "none", "num_layers": "2"}
GROUPS = Prefixed(kv.device("host"), tiered=False).cache._groups


def described(length=10, evicted=0, window=0, sink_tokens=0, hashes=()):
    sequence = CachedSequence()
    sequence.length, sequence.evicted = length, evicted
    sequence.window, sequence.sink_tokens, sequence.hashes = window, sink_tokens, list(hashes)
    one = exchange.Described([sequence], [range(0)])
    return exchange.encode_state(one, FIELDS, GROUPS)


def decoded(encoded):
    """The sequence of a description, and the number of its pages."""
    got = exchange.decode_state(encoded, FIELDS, GROUPS)
    (sequence,), (demoted,) = got.sequences, got.demoted
    assert len(demoted) == 0
    return sequence, GROUPS[0].sequences.num_kept(sequence)


@given(
    st.integers(1, 100), st.integers(0, 2 * PAGE - 1), st.integers(1, 8), st.integers(0, 7),
    st.lists(st.integers(0, 2**128 - 1), unique=True, max_size=30),
)  # fmt: skip
@settings(max_examples=examples(200), deadline=None)
def test_a_description_says_all_of_a_sequence(length, evicted, window, sink_tokens, hashes):
    sink_tokens = min(sink_tokens, length)
    hashes = hashes[: length // PAGE]
    encoded = described(length, evicted, window, sink_tokens, hashes)
    got, num_pages = decoded(encoded)
    assert (got.length, got.evicted) == (length, evicted)
    assert (got.window, got.sink_tokens) == (window, sink_tokens)
    assert got.hashes == hashes and num_pages == -(-(length + evicted) // PAGE)
    assert got.num_pages == 0 and not got.loads


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**65), st.floats(), st.text(max_size=5),
    st.lists(st.integers(0, 5), max_size=3), st.just({}),
)  # fmt: skip


STATE = json.loads(described())


@given(st.sampled_from(sorted({*STATE, *STATE["groups"][0]})), VALUES)
@settings(max_examples=examples(400), deadline=None)
def test_a_wrong_description_is_refused_or_consistent(field, value):
    state = json.loads(described(window=6, sink_tokens=2, evicted=3, hashes=[5, 6]))
    inner = {**state["groups"][0], field: value}
    is_inner = field in state["groups"][0]
    changed = {**state, "groups": [inner]} if is_inner else {**state, field: value}
    try:
        got, num_pages = decoded(json.dumps(changed).encode())
    except ValueError as error:
        assert str(error).startswith("ticket: ")
        return
    assert num_pages == -(-got.end // PAGE) == changed["groups"][0]["num_pages"]
    assert got.length >= 1 and 0 <= got.evicted < 2 * PAGE
    assert len(got.hashes) <= got.length // PAGE


@given(st.binary(max_size=60) | st.sampled_from([b"[" * 100_000, b"1" * 5000, b'{"a":' * 9999]))
@settings(max_examples=examples(200), deadline=None)
def test_what_is_no_description_is_refused(encoded):
    with pytest.raises(ValueError, match=r"^ticket: "):
        exchange.decode_state(encoded, FIELDS, GROUPS)


def test_a_description_is_bounded():
    hashes = range(1 << 120, (1 << 120) + 40_000)
    with pytest.raises(ValueError, match="hashes"):
        described(length=40_000 * PAGE, hashes=hashes)
    with pytest.raises(ValueError, match="at most"):
        exchange.decode_state(b" " * (2 << 20), FIELDS, GROUPS)
