"""Sequences of several groups of layers that are offloaded to host memory, and come back."""

from __future__ import annotations

import numpy as np
import pytest
from groups_model import HEADS, PAGE, full, latent, recurrent, sliding
from stream_cases import Log
from test_tiered_groups import removing_what_fails
from groups_model import TieredMixture, hashes_of

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.engine import TransferEngine, TransferQueue
from kvcupy.cache.paged.sequences import Sequences
from kvcupy.cache.paged.states import States

pytestmark = pytest.mark.usefixtures("lenient_host")

MIXES = {
    "window, full": [sliding(0, 1, window=6), full(2)],
    "sinks": [full(0), sliding(1, window=9, sink_tokens=5), latent(2)],
    "full, state": [full(0), recurrent(1, 2)],
    "state, window, full": [recurrent(0), sliding(1, window=7), full(2)],
    "two states": [recurrent(0), full(1), recurrent(2), sliding(3, window=40)],
}


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


@pytest.mark.parametrize("length", [1, PAGE, 6, 24, 42])
@pytest.mark.parametrize("mix", MIXES)
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


def test_loads_go_out_in_the_order_of_layers(device):
    groups = [full(1, 5), sliding(0, 2, 4, window=6), recurrent(3)]
    mixture = TieredMixture(groups, device, blocks=40, num_tokens=300)
    mixture.add("a")
    grow(mixture, "a", 42)
    mixture.offload("a")
    layers = {}
    for cache, group in zip(mixture.caches, mixture.tiers.groups, strict=True):
        for i, layer in enumerate(group.layers):
            layers[cache.engine.load_stream, f"load {i}"] = layer
    with observe.attached(Log()) as log:
        mixture.onboard("a")
    sent = [(stream, name) for when, name, stream in log.lines if when == "before"]
    assert [layers[key] for key in sent if key in layers] == [0, 1, 2, 3, 4, 5]
    mixture.check_empty()


@pytest.mark.parametrize("mix", ["window, full", "state, window, full"])
def test_one_of_two_forks_goes(device, mix):
    mixture = mixture_of(device, mix, tokens=24)
    mixture.fork("a", "b")
    mixture.offload("a")
    mixture.pop("b", 2)
    grow(mixture, "b", 9)
    mixture.onboard("a")
    grow(mixture, "a", 9)
    mixture.check()
    mixture.offload("b")
    mixture.remove("b")
    mixture.check()
    mixture.check_empty()


def test_a_prompt_goes_and_comes_back(device):
    """Its blocks are of use to others meanwhile, and go to the tiers when it is removed."""
    mixture = mixture_of(device, "state, window, full", tokens=3)
    prompt = mixture.new(41)
    mixture.prompt("b", prompt)
    mixture.offload("b")
    mixture.prompt("c", prompt[:30])
    mixture.remove("c")
    mixture.onboard("b")
    mixture.step({"b": mixture.new(3)})
    mixture.remove("b")
    mixture.prompt("d", prompt)
    assert mixture.hits[-1] == 40
    mixture.check()
    mixture.check_empty()


@pytest.mark.parametrize("mix", MIXES)
def test_blocks_of_a_sequence_that_was_loaded_again(device, mix):
    """They go to the tiers as if it had not been away, though nothing has attended since."""
    found = []
    for goes_away in (False, True):
        mixture = TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300)
        tokens = mixture.new(41)
        mixture.prompt("a", tokens)
        if goes_away:
            mixture.offload("a")
            mixture.evict_all()
            mixture.tiers.clear()
            mixture.onboard("a")
        mixture.remove("a")
        found.append(mixture.tiers.match(hashes_of(tokens)).stores)
        mixture.prompt("b", tokens)
        mixture.check()
        mixture.check_empty()
    assert found[0] == found[1] >= 8


def test_an_empty_sequence(device):
    mixture = mixture_of(device, "full, state", tokens=0)
    mixture.offload("a")
    mixture.step({"a": mixture.new(2)}, {"a": [-1, 0]})
    mixture.commit("a", -1)
    mixture.offload("a")  # it has a slot, but no state
    mixture.onboard("a")
    mixture.step({"a": mixture.new(2)})
    mixture.check()
    mixture.check_empty()


def test_all_tokens_left_a_window(device):
    """A step that is taken back has freed all pages of a window of one token."""
    mixture = TieredMixture([full(0), sliding(1, window=1)], device, blocks=40, num_tokens=300)
    mixture.add("a")
    grow(mixture, "a", 8)
    mixture.step({"a": mixture.new(1)}, keep=False)
    assert (mixture.cache._groups[1].sequences.find("a").pages < 0).all()
    mixture.offload("a")
    mixture.onboard("a")
    grow(mixture, "a", 5)
    mixture.check()
    mixture.check_empty()


def test_old_tokens_in_a_narrower_format(device):
    """Pages of both pools of a group go, beside the pages of a window."""
    shape = {"num_kv_heads": 2, "head_dim": 32, "dtype": "bf16"}
    demotion = kv.Demotion("nvfp4", recent=6, first=2)
    groups = [sliding(0, window=7), kv.FullAttention(layers=[5], demotion=demotion, **shape)]
    caches = [
        kv.PagedKVCache(
            num_q_heads=HEADS, page_size=PAGE, device=device, groups=groups, num_tokens=64
        )
        for _ in range(2)
    ]
    caches[0].attach(kv.TieredCache(groups=caches[0], host_bytes=1 << 20))
    rng = np.random.default_rng(3)
    for number in range(6):
        rows = [
            device.asarray(rng.standard_normal((7, heads, 32), np.float32))
            for heads in (HEADS, 2, 2)
        ]
        for cache in caches:
            if not number:
                cache.add_sequence("a")
            with cache.forward(["a"], [7]):
                rows.append(device.to_numpy(cache.attention(5, *rows[:3])))
        np.testing.assert_array_equal(*rows[3:])
        caches[0].offload("a")
        group = caches[0]._groups[1]
        assert group.pool.allocator.num_available == group.pool.num_pages
        assert group.past_pool.allocator.num_available == group.past_pool.num_pages
        caches[0].onboard("a")
    assert caches[0]._groups[1].past_pool.allocator.num_allocated > 0


# --- Controls: a group that is forgotten is noticed ---


@pytest.mark.parametrize("number", range(3))
def test_a_group_whose_pages_do_not_come_back_is_noticed(device, monkeypatch, number):
    mixture = mixture_of(device, "state, window, full", tokens=24)
    engine, load = mixture.caches[number].engine, TransferEngine.load
    monkeypatch.setattr(
        TransferEngine, "load",
        lambda self, host, pages, **options: load(
            self, *(([], []) if self is engine else (host, pages)), **options
        ),
    )  # fmt: skip
    mixture.offload("a")
    mixture.check()
    mixture.onboard("a")
    with pytest.raises(AssertionError):
        mixture.step({"a": mixture.new(1)})


@pytest.mark.parametrize("what", ["kept states", "freed pages"])
def test_what_goes_to_the_wrong_place_is_noticed(device, monkeypatch, what):
    mixture = mixture_of(device, "full, state" if what == "kept states" else "window, full")
    if what == "kept states":
        sound = States.sound_kept
        monkeypatch.setattr(
            States, "sound_kept", lambda *args: dict(
                zip(reversed(sound(*args)), sound(*args).values(), strict=True)
            )
        )  # fmt: skip
    else:
        combine = Sequences.combine
        monkeypatch.setattr(
            Sequences, "combine", lambda self, s, pages, *rest: combine(
                self, s, np.flip(pages), *rest
            )
        )  # fmt: skip
    mixture.offload("a")
    with pytest.raises((AssertionError, ValueError)):
        mixture.onboard("a")
        mixture.pop("a", 2)
        mixture.step({"a": mixture.new(1)})


# --- While it is away ---


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
        num_q_heads=HEADS, groups=MIXES["window, full"], num_tokens=64, page_size=PAGE,
        device=device,
    )  # fmt: skip
    cache.add_sequence("a")
    with pytest.raises(ValueError, match="attach first"):
        cache.offload("a")
    cache.onboard("a")


# --- Room ---


@pytest.mark.parametrize(("number", "label"), [
    (0, "SlidingWindow of layers 1"), (1, "FullAttention of layers 2"),
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


def test_blocks_make_room(device):
    """On the device and in host memory; a state that is kept makes room for a live one."""
    mixture = mixture_of(device, "state, window, full", tokens=40, blocks=12, num_tokens=64)
    for _ in range(3):
        mixture.offload("a")
        mixture.prompt("b", mixture.new(41))
        mixture.remove("b")
        mixture.check()
        mixture.onboard("a")
        mixture.step({"a": mixture.new(1)})
        mixture.check()
    mixture.check_empty()


# --- Failures ---


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("which", ["save", "load"])
def test_a_transfer_that_cannot_be_queued(device, monkeypatch, which, number):
    mixture = mixture_of(device, "state, window, full", tokens=20)
    call = mixture.offload
    if which == "load":
        mixture.offload("a")
        call = mixture.onboard
    before = state_of(mixture)

    def fail(*arguments, **options):
        raise MemoryError("not now")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(mixture.caches[number].engine, which, fail)
        call("a")
    assert state_of(mixture) == before
    call("a")
    mixture.onboard("a")
    mixture.step({"a": mixture.new(3)})
    mixture.check()
    mixture.check_empty()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("which", ["save", "load"])
def test_a_transfer_that_cannot_be_sent(device, monkeypatch, which, number):
    mixture = mixture_of(device, "state, window, full", tokens=20)
    call = mixture.offload
    if which == "load":
        mixture.offload("a")
        call = mixture.onboard
    before = state_of(mixture)
    queue = getattr(mixture.caches[number].engine, f"_{which}")

    def fail(*arguments):
        raise OSError("no bus")

    with monkeypatch.context() as patch, pytest.raises(kv.DeviceError, match="no bus"):
        patch.setattr(queue, "_issue", fail)
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

    def boom():
        raise OSError("no such luck")

    if which == "save":
        engine.save_stream.call(boom)
        mixture.offload("a")
        with pytest.raises(kv.DeviceError, match="no such luck"):
            mixture.onboard("a")
    else:
        mixture.offload("a")
        mixture.settle()
        engine.load_stream.call(boom)
        mixture.onboard("a")
        with pytest.raises(kv.DeviceError, match="no such luck"):
            mixture.step({"a": mixture.new(1)})
        with pytest.raises(kv.DeviceError, match="no such luck"):
            mixture.offload("a")
    mixture.cache.remove_sequence("a")
    mixture.tokens.clear()
    mixture.check()
    mixture.check_empty()


def test_transfers_that_fail_at_random(device, monkeypatch):
    mixture = mixture_of(device, "state, window, full", tokens=20)
    rng, issue = np.random.default_rng(4), TransferQueue._issue
    failed = []

    def fails_at_times(queue, batch, other):
        if rng.random() < 0.15:
            failed.append(queue.kind)
            raise OSError("no bus")
        return issue(queue, batch, other)

    with monkeypatch.context() as patch:
        patch.setattr(TransferQueue, "_issue", fails_at_times)
        for _ in range(60):
            if not mixture.tokens:
                mixture.add("a")
            with removing_what_fails(mixture):
                mixture.step({"a": mixture.new(3)})
                mixture.offload("a")
                mixture.onboard("a")
            mixture.check()
    assert {"load", "save"} == set(failed)
    mixture.check_empty()
