"""Sequences that go to host memory and come back, and that begin with blocks of the tiers.

Any order of these calls is walked through by the machines of `test_paged_machine.py`.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from groups_model import HEADS, MIXES, PAGE, TieredMixture, hashes_of
from paged_cases import FORMATS, Prefixed, fresh, same_outputs, tokens_of

import kvcupy as kv

# These tests are about the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

PROMPT = tokens_of(1, 14)  # three blocks, and two tokens
OTHER = PROMPT[:8] + tokens_of(2, 6)  # two of them, then another


@pytest.fixture
def one(device):
    prefixed = Prefixed(device)
    prefixed.prefill("s", PROMPT)
    return prefixed


# --- Prompts of which blocks are known ---


def test_attach(device):
    one, other = Prefixed(device, tiered=False), Prefixed(device)
    for wrong in (None, one.cache.pool, "tiers", kv.TransferEngine):
        with pytest.raises(TypeError, match=r"^tiers: "):
            one.cache.attach(wrong)
    with pytest.raises(ValueError, match=r"^tiers: .*pool of this cache"):
        one.cache.attach(other.tiers)
    again = kv.TieredCache(other.cache.pool, other.host_pool)
    for tiers in (other.tiers, again):
        with pytest.raises(ValueError, match=r"^tiers: .*once"):
            other.cache.attach(tiers)
    other.publish(PROMPT)
    assert other.known(PROMPT)[0] == 12, "it is attached as before"


def test_names_and_hashes_that_are_refused(device):
    one = Prefixed(device)
    one.publish(PROMPT)
    one.prefill("s", PROMPT)
    before = one.state()
    with pytest.raises(ValueError, match=r"^seq: "):
        one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
    with pytest.raises(TypeError, match=r"^seq: "):
        one.cache.add_sequence([], hashes=hashes_of(PROMPT))
    for wrong in (3, ["a"], [2**128], [1.5]):
        with pytest.raises((TypeError, ValueError), match=r"^hashes: "):
            one.cache.add_sequence("t", hashes=wrong)
    for wrong in (11, 0, -1, "12", True, 12.0):
        with pytest.raises((TypeError, ValueError), match=r"^num_tokens: expected"):
            one.cache.add_sequence("t", hashes=hashes_of(PROMPT[:12]), num_tokens=wrong)
    for call in (one.cache.offload, one.cache.onboard, one.cache.remove_sequence):
        with pytest.raises(kv.UnknownSequence, match="seq"):
            call("t")
    assert one.state() == before
    one.assert_no_leak()


@pytest.mark.parametrize("name", FORMATS)
def test_a_known_prefix(device, name):
    """Its bits, and attention of new tokens, equal a cache that computes the whole prompt."""
    one = Prefixed(device, **FORMATS[name])
    assert one.prefill("first", PROMPT) == 0
    raw = [part[:3] for part in one_page_each(one, "first")]
    one.cache.remove_sequence("first")
    assert one.tiers.stats()["device_blocks"] == 3
    assert one.cache.num_available_pages == 9
    one.cache.add_sequence("second", hashes=hashes_of(PROMPT))
    assert one.cache.sequence_length("second") == 12
    assert [part[:3] for part in one_page_each(one, "second")] == raw
    out = one.step("second", PROMPT[12:])
    want, bits = fresh(device, PROMPT[:12], PROMPT[12:], **FORMATS[name])
    same_outputs(out, want)
    assert one.bits("second") == bits
    one.assert_no_leak()


def one_page_each(one, name):
    """The raw bytes of each page of a sequence, by part."""
    pages = one.cache._sequences.find(name).num_pages
    return [np.frombuffer(part, np.uint8).reshape(pages, -1).tolist() for part in one.raw(name)]


def test_a_sequence_that_no_longer_uses_its_lease(device):
    """Its lease has been released before any stream waited for its blocks."""
    one = Prefixed(device)
    one.publish(PROMPT)
    cases = {
        "popped": lambda: one.cache.pop_tokens("s", 12),
        "forked": lambda: (
            one.cache.fork_sequence("s", "child", at=2), one.cache.remove_sequence("s"),
            one.cache.fork_sequence("child", "s"), one.cache.remove_sequence("child"),
        ),
        "written": lambda: one.cache.set_kv("s", 0, *one.rows(PROMPT[:12])[1:]),
        "begun": lambda: (
            one.cache.pop_tokens("s", 11), one.cache.begin_forward(["s"], [1]),
            one.cache.end_forward(),
        ),
    }  # fmt: skip
    for name, change in cases.items():
        for again in (lambda: one.step("s", [3]), lambda: one.bits("s")):
            one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
            change()
            assert len(one.cache._sequences._leased) == 0, name
            again()
            one.cache.remove_sequence("s")
    one.assert_no_leak()


def test_pools_go_with_a_cache_that_nobody_has(device):
    """At once, not when cycles are looked for: they are most of a GPU's memory."""
    one = Prefixed(device)
    one.publish(tokens_of(1, 14))
    device.synchronize()
    one.tiers.close()
    parts = one.cache, one.cache.pool, one.host_pool, one.tiers, one.tiers.engine
    remaining = [weakref.ref(part) for part in parts]
    gc.collect()
    gc.disable()
    try:
        del one, parts
        assert [part() for part in remaining] == [None] * 5
    finally:
        gc.enable()


def test_blocks_behind_a_shared_prefix_can_be_evicted(device):
    """Of a sequence that is gone, only the pages that others use stay leased."""
    one = Prefixed(device)
    one.publish(PROMPT, OTHER)
    for name, tokens in (("a", PROMPT), ("b", OTHER)):
        assert one.prefill(name, tokens) == 12
    one.cache.remove_sequence("a")
    one.settle()
    one.tiers.evict(1)  # the block of "a" behind the common prefix
    assert one.tiers.match(hashes_of(PROMPT)).device == 2
    with pytest.raises(kv.CacheFull):
        one.tiers.evict(1)
    one.cache.pop_tokens("b", 6)
    one.tiers.evict(1)
    one.assert_no_leak()


# --- To host memory and back ---


def test_sequences_of_the_running_step_and_trees(one):
    one.prefill("t", [1, 2, 3])
    one.cache.begin_forward(["s"], [1])
    with pytest.raises(kv.KvcupyError, match="running step"):
        one.cache.offload("s")
    one.cache.onboard("s")  # it is here
    one.cache.offload("t")
    one.cache.onboard("t")
    one.cache.end_forward()
    with one.cache.forward(["s"], [2], token_tree=[[-1, 0]]):
        pass
    with pytest.raises(ValueError, match=r"^seq: .*commit_token_tree"):
        one.cache.offload("s")
    one.assert_no_leak()


@pytest.mark.parametrize("way", ["onboard", "reuse"])
def test_a_load_that_fails_on_the_stream(one, way):
    if one.device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    if way == "onboard":
        one.cache.offload("s")
    else:
        one.cache.remove_sequence("s")
        one.tiers.evict(3)
    one.settle()
    one.tiers.engine.load_stream.call(boom)
    if way == "onboard":
        one.cache.onboard("s")
    else:
        one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
    rows = one.rows([1])
    for _ in range(2):
        with pytest.raises(kv.DeviceError, match="no bus"), one.cache.forward(["s"], [1]):
            one.attend(0, rows)
        with pytest.raises(kv.DeviceError, match="no bus"):
            one.cache.get_kv("s", 0, 4)
        with pytest.raises(kv.DeviceError, match="no bus"):
            one.cache.offload("s")
    one.cache.remove_sequence("s")
    assert one.cache.num_available_pages == 12
    one.prefill("t", tokens_of(2, 14))
    one.assert_no_leak()


# --- Groups of layers ---


def mixture_of(device, mix, *, tokens=42, **options):
    """A cache with tiers, and a sequence "a" of some tokens in steps of 4."""
    options = {"blocks": 40, "num_tokens": 300, **options}
    mixture = TieredMixture(MIXES[mix], device, **options)
    mixture.add("a")
    grow(mixture, "a", tokens)
    return mixture


def grow(mixture, name, count):
    for start in range(0, count, PAGE):
        mixture.step({name: mixture.new(min(PAGE, count - start))})


def pages(mixture):
    """Device and host pages in use, by group."""
    mixture.settle()
    pools = [tiers.device.pool for tiers in mixture.caches]
    hosts = [tiers.host.pool for tiers in mixture.caches]
    return [[p.allocator.num_allocated for p in side] for side in (pools, hosts)]


def state_of(mixture):
    """What an operation that fails leaves alone."""
    lists = [
        (name, s.length, s.first_kept, s.pages.tolist(), s.offloaded is None)
        for group in mixture.cache._groups
        for name, s in group.sequences._known.items()
    ]
    states = mixture.cache._states
    slots = {} if states is None else {
        name: (own.live, {n: kept.slot for n, kept in own.kept.items()})
        for name, own in states._of.items()
    }  # fmt: skip
    references = [group.sequences._references.tolist() for group in mixture.cache._groups]
    return lists, slots, references, pages(mixture)


@pytest.mark.parametrize("length", [6, 42])
@pytest.mark.parametrize("mix", ["full", "state, window, full"])
def test_a_sequence_comes_back(device, mix, length):
    mixture = mixture_of(device, mix, tokens=length)
    before = pages(mixture)[0]
    kept = [(g.sequences.find("a").pages >= 0).tolist() for g in mixture.cache._groups]
    mixture.offload("a")
    assert pages(mixture) == [[0] * len(before), before]
    assert mixture.cache.sequence_length("a") == mixture.cache.total_length == length
    mixture.check()
    mixture.onboard("a")
    mixture.onboard("a")  # it is here
    assert pages(mixture) == [before, [0] * len(before)]
    assert kept == [(g.sequences.find("a").pages >= 0).tolist() for g in mixture.cache._groups]
    mixture.check()
    for count in (1, 5, 2):
        mixture.step({"a": mixture.new(count)})
        mixture.check()
    mixture.check_empty()


def test_kept_states_come_back(device):
    mixture = mixture_of(device, "full, state")
    mixture.offload("a")
    mixture.check()
    mixture.onboard("a")
    states = mixture.cache._states
    assert list(states._of["a"].kept) == [8, 16, 24, 32, 40]
    assert [mixture.fork("a", f"at {n}", n) for n in (8, 17, 41)] == [0, 1, 1]
    assert mixture.pop("a", 9) == 1
    mixture.step({name: mixture.new(3) for name in mixture.tokens})
    mixture.check()
    mixture.check_empty()


def test_kept_states_need_free_slots(device):
    """The newest come back; no other sequence loses a kept state for them."""
    mixture = mixture_of(device, "full, state")
    states = mixture.cache._states
    mixture.offload("a")
    mixture.settle()
    taken = states._allocator.alloc(states._allocator.num_free - 3)
    mixture.add("b")
    mixture.step({"b": mixture.new(5)})
    mixture.onboard("a")
    assert list(states._of["a"].kept) == [40]
    states._allocator.free(taken)
    mixture.step({"a": mixture.new(6)})
    assert list(states._of["a"].kept) == [40, 48]
    mixture.check()
    mixture.check_empty()


def test_an_offloaded_sequence_is_of_no_use(device, tmp_path):
    mixture = mixture_of(device, "state, window, full", tokens=10)
    cache = mixture.cache
    mixture.add("b")
    mixture.step({"b": mixture.new(3)})
    mixture.offload("a")
    before = state_of(mixture)
    for name, call in (
        ("seqs", lambda: cache.begin_forward(["b", "a"], [1, 1])),
        ("seqs", lambda: cache.state_slots_of(["b", "a"])),
        ("parent", lambda: cache.fork_sequence("a", "c", 0)),
        ("seq", lambda: cache.pop_tokens("a", 0)),
        ("seq", lambda: cache.restorable_length("a", 0)),
        ("seq", lambda: cache.save_sequence("a", tmp_path / "a")),
        ("seq", lambda: cache.offload("a")),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: 'a' is offloaded"):
            call()
        assert state_of(mixture) == before
    cache.begin_forward(["b"], [1])
    with pytest.raises(kv.KvcupyError, match="running step"):
        cache.offload("b")
    cache.abort_forward()
    mixture.check_empty()


def test_without_tiers(device):
    cache = kv.PagedKVCache(
        num_q_heads=HEADS, groups=MIXES["full, window"], num_tokens=64, page_size=PAGE,
        device=device,
    )  # fmt: skip
    cache.add_sequence("a")
    with pytest.raises(ValueError, match="attach first"):
        cache.offload("a")
    cache.onboard("a")


@pytest.mark.parametrize(("number", "label"), [
    (0, "SlidingWindow of layers 1"), (1, "FullAttention of layers 3"),
    (2, "Recurrent of layers 0"),
])  # fmt: skip
@pytest.mark.parametrize("side", ["host", "device"])
def test_no_room(device, side, number, label):
    """The error names the group; nothing has changed, and the call can be made again."""
    mixture = mixture_of(device, "state, window, full", tokens=10)
    cache = mixture.caches[number]
    call = mixture.offload
    if side == "device":
        mixture.offload("a")
        call = mixture.onboard
    mixture.settle()
    allocator = getattr(cache, side).pool.allocator
    taken = allocator.alloc(allocator.num_free)
    before = state_of(mixture)
    with pytest.raises(kv.CacheFull, match=label):
        call("a")
    assert state_of(mixture) == before
    allocator.free(taken)
    call("a")
    mixture.onboard("a")
    mixture.step({"a": mixture.new(3)})
    mixture.check()
    mixture.check_empty()


def boom(*arguments, **options):
    raise kv.DeviceError("no bus")


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("which", ["save", "load"])
@pytest.mark.parametrize("how", ["queued", "sent"])
def test_a_transfer_that_cannot_go_out(device, monkeypatch, how, which, number):
    """Nothing has changed, and the call can be made again."""
    mixture = mixture_of(device, "state, window, full", tokens=20)
    call = mixture.offload
    if which == "load":
        mixture.offload("a")
        call = mixture.onboard
    before = state_of(mixture)
    engine = mixture.caches[number].engine
    with monkeypatch.context() as patch, pytest.raises(kv.DeviceError, match="no bus"):
        if how == "queued":
            patch.setattr(engine, which, boom)
        else:
            patch.setattr(getattr(engine, f"_{which}"), "_issue", boom)
        call("a")
    assert state_of(mixture) == before
    call("a")
    mixture.onboard("a")
    mixture.step({"a": mixture.new(3)})
    mixture.check()
    mixture.check_empty()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("which", ["save", "load"])
def test_a_transfer_that_fails_on_its_stream(device, which, number):
    """The sequence can only be removed."""
    if device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    mixture = mixture_of(device, "state, window, full", tokens=20)
    engine = mixture.caches[number].engine

    if which == "save":
        engine.save_stream.call(boom)
        mixture.offload("a")
        with pytest.raises(kv.DeviceError, match="no bus"):
            mixture.onboard("a")
    else:
        mixture.offload("a")
        mixture.settle()
        engine.load_stream.call(boom)
        mixture.onboard("a")
        with pytest.raises(kv.DeviceError, match="no bus"):
            mixture.step({"a": mixture.new(1)})
        with pytest.raises(kv.DeviceError, match="no bus"):
            mixture.offload("a")
    mixture.cache.remove_sequence("a")
    mixture.tokens.clear()
    mixture.check()
    mixture.check_empty()
