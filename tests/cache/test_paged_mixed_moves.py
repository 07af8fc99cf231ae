"""`PagedKVCache` with `demotion`: sequences with demoted pages are offloaded, or exported."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from agents import Network
from helpers import full_only
from line_process import poll
from paged_tiers_cases import NUM_LAYERS, PAGE, Prefixed, hashes_of, same_outputs, tokens_of
from stream_cases import Log

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.hazards import PageAccess

# These tests are about the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

MIXED = {"num_pages": 12, "num_past_pages": 10, "past": "fp8_e4m3", "recent": 5, "head_dim": 16}
PASTS = ["fp8_e4m3", "nvfp4", full_only("int8"), full_only("mxfp4")]
PROMPT = tokens_of(1, 22)  # of 6 pages, of which 4 or 3 are demoted


def mixed(device, **options):
    options = {**MIXED, **options}
    if options["past"] == "mxfp4":
        options["head_dim"] = 32
    return Prefixed(device, **options)


def begin(side, name="s", tokens=PROMPT):
    """Add a sequence of some tokens, some of whose pages are demoted."""
    side.cache.add_sequence(name)
    side.step(name, tokens)
    assert any(side.cache._sequences.past_range(side.cache._sequences.find(name)))


def counts(side):
    """Free pages of both pools."""
    return side.cache.num_available_pages, side.cache.num_available_past_pages


def spoil(side):
    """Overwrite the pages of both pools that are free."""
    side.device.synchronize()
    for pool in (side.cache.pool, side.cache.past_pool):
        free = np.setdiff1d(np.arange(pool.num_pages), pool.allocator.allocated())
        like = kv.KVPool(
            len(free), pool.page_size, pool.num_layers, pool.num_kv_heads, pool.head_dim,
            dtype=pool.encoding, scales=bool(pool.scale_parts), device=side.device,
        )  # fmt: skip
        for part in like.scale_parts:
            side.device.copy(part, np.full(part.shape, 3, np.float32))
        kv.transfer_pages(like, pool, range(len(free)), free)
    side.device.synchronize()


def assert_empty(*sides):
    for side in sides:
        side.cache.clear()
        if side.tiers is not None:
            side.tiers.clear()
            side.host_pool.allocator.check_leaks()
            for engine in side.cache._tiers._past_engines.values():
                engine.host_pool.allocator.check_leaks()
        assert counts(side) == (side.cache.pool.num_pages, side.cache.past_pool.num_pages)
        assert not side.cache._sequences._references.any()
        assert not side.cache._sequences._demoted and not side.cache._sequences._origins


# --- Offload ---


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("sinks", [0, 6])
def test_bits(device, past, sinks):
    """Pages of both formats come back as they were, and sequences continue from them."""
    one, plain = (mixed(device, past=past, sinks=sinks, tiered=t) for t in (True, False))
    for side in (one, plain):
        begin(side)
    raw, bits, before = one.raw("s"), one.bits("s"), counts(one)
    one.cache.offload("s")
    assert counts(one) == (12, 10) and one.cache.sequence_length("s") == 22
    demoted = 10 - before[1]
    assert one.host_pool.allocator.num_allocated == 6 - demoted
    far = one.cache._tiers._past_engines[0].host_pool
    assert (far.dtype, far.num_pages, far.allocator.num_allocated) == (past, 10, demoted)
    spoil(one)
    one.cache.onboard("s")
    assert one.raw("s") == raw and one.bits("s") == bits == plain.bits("s")
    assert counts(one) == before
    for tokens in (tokens_of(2, 3), tokens_of(3, 9)):
        same_outputs(one.step("s", tokens), plain.step("s", tokens))
    assert one.bits("s") == plain.bits("s")
    one.settle()
    assert far.allocator.num_allocated == one.host_pool.allocator.num_allocated == 0
    assert_empty(one)


ROTATED = {"past": "nvfp4", "hadamard": True, "scale_rule": "four_over_six"}


def test_no_room(device):
    """After CacheFull everything is as it was: in host memory for demoted pages, and back here."""
    one = mixed(device, num_past_pages=5)
    begin(one, "a")
    one.cache.offload("a")
    begin(one, "b", tokens_of(7, 22))
    before, raw = one.state(), one.raw("b")
    with pytest.raises(kv.CacheFull):
        one.cache.offload("b")
    one.settle()
    assert one.state() == before and one.raw("b") == raw
    before, held = one.state(), counts(one)
    assert held[1] < 4
    with pytest.raises(kv.CacheFull):
        one.cache.onboard("a")
    assert one.state() == before and counts(one) == held
    one.cache.remove_sequence("b")
    one.cache.onboard("a")
    assert_empty(one)


def test_no_block_is_evicted_for_a_sequence_that_cannot_go(device):
    one = mixed(device, num_past_pages=4, host_pages=6)
    begin(one, "first")
    one.cache.offload("first")  # to all host pages for demoted ones
    one.tiers.insert([5, 6, 7, 8], one.cache.pool.allocator.alloc(4))
    one.tiers.flush()
    begin(one)
    before, raw = one.state(), one.raw("s")
    with pytest.raises(kv.CacheFull):
        one.cache.offload("s")
    one.settle()
    assert one.state() == before and one.raw("s") == raw
    assert one.tiers.stats()["host_evicted"] == 0
    assert_empty(one)


@pytest.mark.parametrize("save", ["first", "second"])
def test_a_save_that_is_refused_changes_nothing(device, monkeypatch, save):
    one = mixed(device)
    begin(one)
    one.cache.offload("s")
    one.cache.onboard("s")  # the engine is there
    one.step("s", [1])
    before, raw = one.state(), one.raw("s")
    engine = one.tiers.engine if save == "first" else one.cache._tiers._past_engines[0]

    def fail(*args, **options):
        raise MemoryError("not now")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine, "save", fail)
        one.cache.offload("s")
    one.settle()
    one.cache._tiers._past_engines[0].save_stream.synchronize()
    assert one.state() == before and one.raw("s") == raw
    one.cache.offload("s")
    one.cache.onboard("s")
    assert one.raw("s") == raw
    assert_empty(one)


@pytest.mark.parametrize("load", ["first", "second"])
def test_a_load_that_is_refused_leaves_it_offloaded(device, monkeypatch, load):
    one = mixed(device)
    begin(one)
    raw = one.raw("s")
    one.cache.offload("s")
    one.settle()
    before = one.state()
    engine = one.tiers.engine if load == "first" else one.cache._tiers._past_engines[0]

    def fail(*args, **options):
        raise MemoryError("not now")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine, "load", fail)
        one.cache.onboard("s")
    one.settle()
    one.cache._tiers._past_engines[0].load_stream.synchronize()
    assert one.state() == before and counts(one) == (12, 10)
    one.cache.onboard("s")
    assert one.raw("s") == raw
    assert_empty(one)


def test_pages_that_could_not_be_saved_do_not_come_back(device):
    one = mixed(device)
    begin(one)
    one.cache.offload("s")
    one.cache.onboard("s")
    one.step("s", [1])
    with observe.attached(Log(refuse="save")), suppress(kv.DeviceError):
        one.cache.offload("s")
    if one.cache._sequences.find("s").offloaded is not None:
        with pytest.raises(kv.DeviceError):
            one.cache.onboard("s")
    one.cache.remove_sequence("s")
    assert_empty(one)


def test_the_last_pages_for_old_tokens_wait_for_a_load(device):
    """Nothing reads demoted pages before they are there: each step waits for them."""
    one, plain = mixed(device), mixed(device, tiered=False)
    for side in (one, plain):
        begin(side)
    one.cache.offload("s")
    spoil(one)
    held = threading.Event()
    one.cache._tiers._past_engines[0].load_stream.call(lambda: held.wait(20))
    one.cache.onboard("s")
    threading.Timer(0.05, held.set).start()
    same_outputs(one.step("s", tokens_of(6, 3)), plain.step("s", tokens_of(6, 3)))
    assert_empty(one)


# --- From cache to cache ---


class Pair:
    """Two caches with `past`; the first has senders, the second receivers."""

    def __init__(self, device, *, tiered=False, other=None, **options):
        self.one = mixed(device, tiered=tiered, **options)
        self.two = mixed(device, tiered=False, **{**options, **(other or {})})
        self.sender, self.receiver = kv.PageSender(self.one.cache), kv.PageReceiver(self.two.cache)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.receiver.close()
        self.sender.close()

    def export(self, name="s", **options):
        return self.one.cache.export_sequence(name, self.sender, **options)

    def receive(self, ticket, name="t", **options):
        return self.two.cache.import_sequence(name, ticket, self.receiver, **options)

    def described(self, ticket):
        """What a ticket says of its sequence."""
        return self.receiver.inspect(ticket).sequence

    def forged(self, ticket, **fields):
        """The ticket with other fields, as its sender would authenticate it."""
        return replace(self.receiver.inspect(ticket), **fields).encoded(self.sender._key)

    def settle(self):
        def is_settled():
            return not (self.sender.stats()["offered_pages"] or self.receiver.stats()["pulls"])

        assert poll(is_settled)

    def end(self):
        self.settle()
        for side in (self.one, self.two):
            side.cache.clear()
        assert_empty(self.one, self.two)


@pytest.fixture(autouse=True)
def network(monkeypatch):
    return Network(immediate=True).install(monkeypatch)


@pytest.fixture
def pair(device):
    with Pair(device) as pair:
        yield pair


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("sinks", [0, 6])
def test_a_sequence_comes_over_bit_for_bit_and_goes_on(device, past, sinks):
    with Pair(device, past=past, sinks=sinks) as pair:
        begin(pair.one)
        spoil(pair.two)
        pull = pair.receive(pair.export())
        assert pair.two.cache.sequence_length("t") == 22
        more = tokens_of(2, PAGE + 1)
        pull.synchronize()
        assert pair.two.raw("t") == pair.one.raw("s")
        same_outputs(pair.two.step("t", more), pair.one.step("s", more))
        assert pair.two.bits("t") == pair.one.bits("s")
        assert pull.done() and pull.failure is None
        stored = sum(len(part) for part in pair.one.raw("s") if isinstance(part, bytes))
        moved = pair.receiver.stats()["received_bytes"]
        assert pull.num_bytes == moved <= stored, "demoted pages go as they are"
        pair.end()


def test_layers_are_waited_for_one_by_one(pair):
    begin(pair.one)
    pull = pair.receive(pair.export())
    for layer in range(NUM_LAYERS):
        pull.wait_layer(layer)
    pull.wait()
    pull.synchronize()
    assert pair.two.raw("t") == pair.one.raw("s")
    pair.end()


@pytest.mark.parametrize("before", range(NUM_LAYERS + 1))
@pytest.mark.parametrize("is_taken_back", [False, True])
def test_within_a_step(pair, before, is_taken_back):
    """Demoted pages go out at once, others layer by layer; a step that ends demotes more here."""
    begin(pair.one)
    tokens = tokens_of(9, 6)
    rows = pair.one.rows(tokens)
    pair.one.cache.begin_forward(["s"], [6])
    for layer in range(NUM_LAYERS):
        if layer == before:
            ticket = pair.export()
        pair.one.attend(layer, rows)
    if before == NUM_LAYERS:
        ticket = pair.export()
    pair.one.device.synchronize()
    expected = pair.one.raw("s")
    pull = pair.receive(ticket)
    if is_taken_back:
        pair.one.cache.abort_forward()
        with pytest.raises(kv.TransferError):
            pull.synchronize()
        pair.two.cache.remove_sequence("t")
    else:
        pair.one.cache.end_forward()
        pull.synchronize()
        assert pair.two.raw("t") == expected
        for side, name in ((pair.one, "s"), (pair.two, "t")):
            side.step(name, [3])
        assert pair.two.bits("t") == pair.one.bits("s")
    pair.end()


def test_a_step_is_taken_back_though_nothing_can_follow_its_work(pair, monkeypatch):
    begin(pair.one)
    bits, before = pair.one.bits("s"), counts(pair.one)
    pair.one.cache.begin_forward(["s"], [6])
    pull = pair.receive(pair.export())
    with monkeypatch.context() as patch, pytest.raises(kv.DeviceError, match="not now"):
        failing = Mock(side_effect=kv.DeviceError("not now"))
        patch.setattr(PageAccess, "copy_stream_after_all", failing)
        pair.one.cache.abort_forward()
    with pytest.raises(kv.TransferError):
        pull.synchronize()
    pair.two.cache.remove_sequence("t")
    pair.settle()
    assert pair.one.bits("s") == bits and counts(pair.one) == before
    pair.one.step("s", [3])
    pair.end()


def test_as_it_was_at_the_call(pair):
    """An export does not follow later changes: more is demoted, some is written again."""
    begin(pair.one)
    raw = pair.one.raw("s")
    ticket = pair.export()
    key, value = pair.one.cache.get_kv("s", 0, 6)
    pair.one.cache.set_kv("s", 0, value, key)
    pair.one.step("s", tokens_of(5, 7))
    pair.one.cache.pop_tokens("s", 20)
    pair.one.step("s", tokens_of(6, 5))
    pair.receive(ticket).synchronize()
    assert pair.two.raw("t") == raw
    pair.end()


def test_its_hashes_come_over_and_wide_blocks_are_published(device):
    tokens = tokens_of(1, 22)
    with Pair(device, tiered=True) as pair:
        pair.one.prefill("s", tokens)
        ticket = pair.export()
        pair.one.cache.remove_sequence("s")
        pull = pair.receive(ticket)
        pull.synchronize()
        assert pair.two.cache._sequences.find("t").hashes == hashes_of(tokens)
        pair.settle()
        assert counts(pair.one)[1] == 10  # what the offer has held is let go
        assert pair.one.tiers.match(hashes_of(tokens)[4:]).device == 1
        pair.end()


def test_a_lease_that_is_over_fails_the_sequence(pair):
    begin(pair.one)
    ticket = pair.export(lease_s=1e-3)
    assert poll(lambda: pair.sender.stats()["expired"])
    pull = pair.receive(ticket)
    with pytest.raises(kv.TransferError):
        pull.synchronize()
    assert isinstance(pull.failure, kv.TransferError)
    with pytest.raises(kv.TransferError):
        pull.done()
    with pytest.raises(kv.TransferError):
        pair.two.step("t", [3])
    pair.two.cache.remove_sequence("t")
    pair.sender.close()
    pair.end()


def test_a_cancelled_import_frees_all_pages(pair):
    begin(pair.one)
    pull = pair.receive(pair.export())
    pull.cancel()
    pair.two.cache.remove_sequence("t")
    pair.receiver.close()
    pair.sender.close()
    pair.end()


def test_an_export_that_cannot_be_offered_holds_nothing(pair, monkeypatch):
    begin(pair.one)
    before = counts(pair.one)
    pair.sender.close()
    with pytest.raises(kv.KvcupyError, match="closed"):
        pair.export()
    assert counts(pair.one) == before
    references = pair.one.cache._sequences._references
    assert references.sum() == 6
    pair.end()


# --- What is refused ---


@pytest.mark.parametrize(("other", "name"), [
    ({"recent": 6}, "recent 6, got 5"), ({"sinks": 4}, "sinks 4, got 0"),
    ({"past": "int8"}, "past int8, got fp8_e4m3"),
])  # fmt: skip
def test_other_settings_are_refused(device, other, name):
    """Windows of attention go by `recent`: pages that were demoted sooner would be missing."""
    with Pair(device, other=other) as pair:
        begin(pair.one)
        with pytest.raises(ValueError, match=f"^ticket: expected a sequence with {name}"):
            pair.receive(pair.export())
        assert "t" not in pair.two.cache and counts(pair.two) == (12, 10)
        pair.sender.close()
        pair.end()


def test_a_cache_without_past_refuses_demoted_pages(pair, device):
    begin(pair.one)
    plain = Prefixed(device, tiered=False, head_dim=16)
    ticket, refused = pair.export(), r"^ticket: expected a sequence with past None, got fp8_e4m3"
    with kv.PageReceiver(plain.cache) as receiver, pytest.raises(ValueError, match=refused):
        plain.cache.import_sequence("t", ticket, receiver)
    assert plain.cache.num_available_pages == 12


@pytest.mark.parametrize("ends", ["wide", "demoted", "fewer"])
def test_a_ticket_with_other_pages_is_refused_before_any_is_allocated(pair, monkeypatch, ends):
    """As many pages as the sequence needs; nothing is evicted for others."""
    begin(pair.one)
    ticket = pair.export()
    described, parts = pair.described(ticket), pair.receiver.inspect(ticket).parts
    (group,) = described["groups"]
    if ends == "wide":
        described["length"] += 4
        group["demoted"] = [0, 3]
    elif ends == "demoted":
        group["demoted"][1] -= 1
    else:
        parts = [parts[0]._replace(pages=parts[0].pages[1:]), *parts[1:]]
    forged = pair.forged(ticket, sequence=described, parts=parts)

    def fail(*counts):
        raise AssertionError("pages are allocated")

    monkeypatch.setattr(pair.two.cache._sequences, "allocate_both", fail)
    with pytest.raises(ValueError, match=r"^ticket: expected pages of its sequence, .* got "):
        pair.receive(forged)
    monkeypatch.undo()
    pair.sender.close()
    pair.end()


def test_a_ticket_with_layers_in_another_order_is_refused(pair):
    begin(pair.one)
    ticket = pair.export()
    forged = pair.forged(ticket, units=pair.receiver.inspect(ticket).units[::-1])
    with pytest.raises(ValueError, match=r"^ticket: expected pages of its sequence"):
        pair.receive(forged)
    pair.sender.close()
    pair.end()


def test_pages_that_are_rotated_otherwise_are_refused(device):
    with Pair(device, **ROTATED, other={"hadamard": False}) as pair:
        begin(pair.one)
        with pytest.raises(ValueError, match=r"ticket: .*past nvfp4, got nvfp4\+hadamard:16"):
            pair.receive(pair.export())
        pair.sender.close()
        pair.end()
