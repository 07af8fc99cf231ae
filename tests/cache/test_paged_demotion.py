"""`PagedKVCache` with `demotion`: which tokens, and sequences that are offloaded or exported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from agents import Network
from helpers import demoting, full_only
from line_process import poll
from paged_cases import PAGE, Prefixed, Twin, same_outputs, tokens_of

import kvcupy as kv

# These tests are about the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")


DEMOTING = {
    "num_pages": 24,
    "num_demoted_pages": 20,
    "past": "fp8_e4m3",
    "recent": 6,
    "head_dim": 16,
}


@pytest.mark.parametrize("past", ["fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_which_tokens_are_demoted(device, past, sinks):
    """By hand: none of the first, none of the recent, whole pages of 4; a full pool of old tokens
    delays the rest."""
    twin = Twin(device, **{**DEMOTING, "past": past, "sinks": sinks, "num_demoted_pages": 3})
    twin.prefill("a", 17, "b", 3)
    first = 4 if sinks else 0
    assert twin.model.is_demoted("a").tolist() == [first <= i < 8 for i in range(17)]
    twin.step("ba", [9, 9])
    assert twin.cache.num_available_demoted_pages == 0
    twin.remove("a")
    twin.step("b", [4])
    assert twin.model.is_demoted("b").tolist() == [first <= i < 8 for i in range(16)]


def test_a_shared_page_is_converted_once(device):
    """Two that leave it later find what the first was given; the last one frees it."""
    twin = Twin(device, **{**DEMOTING, "recent": 4})
    twin.prefill("a", 4)
    for name in "bc":
        twin.fork("a", name)
    names = "kvcupy_demoted_pages_total", "kvcupy_promoted_pages_total"
    before = [kv.metrics.value(name) for name in names]
    for name in "abc":
        twin.step(name, [5])
    twin.fork("a", "d", 2)
    counted = [kv.metrics.value(name) - n for name, n in zip(names, before, strict=True)]
    assert counted == [1, 1]
    twin.remove("d")
    assert twin.cache.num_available_demoted_pages == 20 - 1
    assert twin.cache.num_available_pages == 24 - 3 * 2


@pytest.mark.parametrize("call", ["end", "begin"])
def test_a_conversion_that_is_refused(device, monkeypatch, call):
    """After the step all pages are as they were, and the next end demotes them."""
    twin = Twin(device, **DEMOTING)
    twin.prefill("a", 17)
    if call == "begin":
        twin.pop("a", 10)
    free, cache = twin.cache.num_available_demoted_pages, twin.cache

    def refuse(*_, **__):
        raise kv.DeviceError("refused")

    if call == "end":
        cache.begin_forward(["a"], [5])
    with monkeypatch.context() as patch:
        patch.setattr("kvcupy.cache.paged.moves.store_kv", refuse)
        with pytest.raises(kv.DeviceError, match="refused"):
            cache.begin_forward(["a"], [1]) if call == "begin" else cache.end_forward()
    if call == "begin":
        twin.check()
    else:
        assert (cache.sequence_length("a"), cache.num_available_demoted_pages) == (22, free)
        cache.begin_forward(["a"], [1])
        cache.end_forward()
        assert cache.num_available_demoted_pages == free - 2


def test_windows_of_attention(device):
    """Longer than the recent tokens they are refused; page tables are of one pool."""
    twin = Twin(device, **DEMOTING)
    twin.prefill("a", 17)
    twin.step("a", [3], window=7)
    rows = device.zeros((1, 4, 16), "fp32")
    with twin.cache.forward(["a"], [1]):
        for masks in ({"window": 8}, {"window": 3, "sink_tokens": 1}):
            with pytest.raises(ValueError, match="in a cache with demotion"):
                twin.cache.attention(0, rows, rows[:, :2], rows[:, :2], **masks)
        for call in (twin.cache.block_table, twin.cache.page_table_csr):
            with pytest.raises(kv.KvcupyError, match="in two pools"):
                call()


def test_a_captured_window_reaches_the_past(device):
    """In later steps, where the window hid it in the captured step."""
    twin = Twin(device, **DEMOTING)
    twin.prefill("a", 26)
    stream, rng = device.stream(), np.random.default_rng(0)
    rows = [
        device.asarray(rng.standard_normal((1, heads, 16)).astype(np.float32))
        for heads in (4, 2, 2)
    ]
    out = device.zeros((1, 4, 16), "fp32")
    device.synchronize()

    def attend(**options):
        return twin.cache.attention(0, *rows, window=7, stream=stream, **options)

    with twin.cache.forward(["a"], [1]):
        attend()
        with stream.capture() as graph:
            attend(out=out)
    twin.cache.pop_tokens("a", 9)
    with twin.cache.forward(["a"], [1]):
        graph.launch(stream)
        want = attend()
        stream.synchronize()
        np.testing.assert_array_equal(device.to_numpy(out), device.to_numpy(want))
        assert device.to_numpy(out).any()


@pytest.mark.parametrize("arguments", [
    {"past": "fp32"}, {"past": "nothing"}, {"recent": -1}, {"recent": None}, {"sinks": -1},
    {"num_demoted_pages": 0}, {"past": "mxfp4"},
    {"dtype": "fp8_e4m3", "past": "fp8_e5m2"},
    {"k_scale": 0.5, "dtype": "fp8_e4m3", "past": "nvfp4"},
])  # fmt: skip
def test_options_that_are_refused(device, arguments):
    options = {
        "num_layers": 1, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "num_pages": 4,
        "past": "fp8_e4m3", "recent": 4, "device": device,
    }  # fmt: skip
    kv.PagedKVCache(**demoting(options))
    with pytest.raises((ValueError, TypeError)):
        kv.PagedKVCache(**demoting({**options, **arguments}))


# --- Offload ---


MIXED = {"num_pages": 12, "num_demoted_pages": 10, "past": "fp8_e4m3", "recent": 5, "head_dim": 16}


PASTS = ["fp8_e4m3", "nvfp4", full_only("int8"), full_only("mxfp4")]


PROMPT = tokens_of(1, 22)  # of 6 pages, of which 4 or 3 are demoted


ROTATED = {"past": "nvfp4", "hadamard": True, "scale_rule": "four_over_six"}


def mixed(device, **options):
    options = {**MIXED, **options}
    if options["past"] == "mxfp4":
        options["head_dim"] = 32
    return Prefixed(device, **options)


def begin(side, name="s", tokens=PROMPT):
    """Add a sequence of some tokens, some of whose pages are demoted."""
    side.cache.add_sequence(name)
    side.step(name, tokens)
    assert any(side.cache._sequences.demoted_range(side.cache._sequences.find(name)))


def counts(side):
    """Free pages of both pools."""
    return side.cache.num_available_pages, side.cache.num_available_demoted_pages


def spoil(side):
    """Overwrite the pages of both pools that are free."""
    side.device.synchronize()
    for pool in (side.cache.pool, side.cache.demoted_pool):
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
            for engine in side.cache._tiers._demoted_engines.values():
                engine.host_pool.allocator.check_leaks()
        assert counts(side) == (side.cache.pool.num_pages, side.cache.demoted_pool.num_pages)
        assert not side.cache._sequences._references.any()
        assert not side.cache._sequences._demoted and not side.cache._sequences._origins


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
    far = one.cache._tiers._demoted_engines[0].host_pool
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


@pytest.mark.parametrize("which", ["save", "load"])
def test_a_transfer_of_demoted_pages_that_is_refused(device, monkeypatch, which):
    """The pages of the other pool have been queued by then; nothing has changed."""
    one = mixed(device)
    begin(one)
    one.cache.offload("s")
    if which == "save":
        one.cache.onboard("s")
        one.step("s", [1])
    one.settle()
    before = one.state()
    call = one.cache.offload if which == "save" else one.cache.onboard
    engine = one.cache._tiers._demoted_engines[0]

    def fail(*args, **options):
        raise MemoryError("not now")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine, which, fail)
        call("s")
    one.settle()
    getattr(engine, f"{which}_stream").synchronize()
    assert one.state() == before
    call("s")
    one.cache.onboard("s")
    one.step("s", [2])
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


@pytest.mark.parametrize(("other", "name"), [
    ({"recent": 6}, "recent 6, got 5"), ({"sinks": 4}, "sinks 4, got 0"),
    ({"past": "int8"}, "demoted int8, got fp8_e4m3"),
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
    ticket, refused = pair.export(), r"^ticket: expected a sequence with demoted None, got fp8_e4m3"
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


def test_pages_that_are_rotated_otherwise_are_refused(device):
    with Pair(device, **ROTATED, other={"hadamard": False}) as pair:
        begin(pair.one)
        with pytest.raises(ValueError, match=r"ticket: .*demoted nvfp4, got nvfp4\+hadamard:16"):
            pair.receive(pair.export())
        pair.sender.close()
        pair.end()
