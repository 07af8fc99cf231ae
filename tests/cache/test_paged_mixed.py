"""`PagedKVCache` with `past`: old tokens in a narrower format."""

from __future__ import annotations

import helpers
import numpy as np
import pytest
from helpers import demoting, full_only
from mixed_model import MixedTwin
from paged_cases import BINARY, rope_of
from paged_tiers_cases import Prefixed, tokens_of

import kvcupy as kv

PASTS = ["fp8_e4m3", full_only("int8"), "nvfp4"]
MIXED = {"num_pages": 24, "num_past_pages": 20, "past": "fp8_e4m3", "recent": 6, "head_dim": 16}


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("dtype", [full_only("fp32"), "bf16"])
@pytest.mark.parametrize("mode", ["none", "inline"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_steps_cross_the_border(device, past, dtype, mode, sinks):
    """Prefill, decode and chunks; each token is where the rule says, with what its format keeps."""
    twin = MixedTwin(
        device, **{**MIXED, "past": past, "dtype": dtype, "sinks": sinks},
        rope=None if mode == "none" else rope_of(16), rope_mode=mode,
    )  # fmt: skip
    twin.prefill("a", 17, "b", 3)
    assert twin.model.is_past("a").tolist() == [4 * (sinks > 0) <= i < 8 for i in range(17)]
    twin.step("ba", [9, 1])
    twin.step("ab", [5, 1], logits_soft_cap=4.0)
    for _ in range(4):
        twin.step("ab", [1, 1])
    assert twin.model.is_past("b").any()


@pytest.mark.parametrize(
    ("past", "width", "rule"),
    [
        ("nvfp4", 16, "absmax"), ("nvfp4", 64, "four_over_six"), ("int4", 96, "absmax"),
        full_only("mxfp4", 64, "absmax"), full_only("int4_g128", 128, "absmax"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [full_only("fp32"), "bf16", full_only("fp8_e4m3")])
@pytest.mark.parametrize("sinks", [0, 3])
def test_a_past_that_is_stored_rotated(device, past, width, rule, dtype, sinks):
    """Demoted, converted back, copied for a fork, written and read by `get_kv` and `set_kv`."""
    twin = MixedTwin(
        device, **{**MIXED, "past": past, "head_dim": width, "dtype": dtype, "sinks": sinks},
        hadamard=True, scale_rule=rule,
    )  # fmt: skip
    assert not twin.cache.pool.encoding.hadamard
    assert twin.cache.past_pool.encoding == kv.Encoding(past, hadamard=True, scale_rule=rule)
    twin.prefill("a", 17, "b", 3)
    twin.step("ba", [9, 1])
    twin.fork("a", "c", 6)
    twin.step("ca", [1, 5], logits_soft_cap=4.0)
    assert twin.model.is_past("a").any()
    twin.pop("a", 16)
    twin.set_kv("a", 1, 4)
    twin.step("ab", [2, 9])


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("past", ["fp8_e4m3", "int8"])
def test_keys_that_are_cached_rotated(device, past, sinks):
    """A rotated key may be a unit off in float32, and then a step of the past's format."""
    options = {**MIXED, "past": past, "sinks": sinks, "dtype": "bf16"}
    twin = MixedTwin(device, **options, rope=rope_of(16))
    twin.prefill("a", 17, "b", 3)
    twin.step("ba", [9, 1])
    for _ in range(4):
        twin.step("ab", [1, 1])


@pytest.mark.parametrize(("past", "width"), [
    ("mxfp4", 32), ("int4", 32), ("int4_g64", 64), ("fp8_e5m2", 8), ("nvfp4", 64),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_formats(device, dtype, past, width):
    """Whatever attention reads may be the past of whatever is wider."""
    if (dtype, past) == ("fp8_e4m3", "fp8_e5m2"):
        with pytest.raises(ValueError, match="demotion: expected a format narrower than fp8_e4m3"):
            MixedTwin(device, **{**MIXED, "dtype": dtype, "past": past})
        return
    twin = MixedTwin(device, **{**MIXED, "dtype": dtype, "past": past, "head_dim": width})
    twin.prefill("a", 17)
    twin.fork("a", "b", 5)
    twin.step("ab", [1, 1])
    twin.pop("a", 12)
    twin.set_kv("b", 1, 4)
    twin.step("ab", [2, 9])
    twin.step("ab", [2, 1])


@pytest.mark.parametrize("popped", [n if n % 3 == 1 else full_only(n) for n in range(14)])
def test_popping_across_the_border(device, popped):
    """What is popped, then appended to: a demoted page that is partly filled is converted back."""
    twin = MixedTwin(device, **MIXED)
    twin.prefill("a", 18)
    twin.fork("a", "b", 15)
    twin.pop("a", popped)
    twin.step("a", [1])
    twin.step("ab", [3, 1])
    twin.step("ab", [3, 6])


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("call", ["pop", "append", "fork", "evict"])
def test_every_offset_around_the_border(device, call, offset):
    """The oldest recent token is the `offset`-th of its page. Tokens are popped down to any offset
    of that page, appended from there, forked there, and evicted up to there."""
    length = 14 + offset
    page = length - MIXED["recent"] - offset  # where that page begins
    around = range(page - 5, page + 6) if helpers.full else range(page - 1, page + 5)
    for cut in around:
        twin = MixedTwin(device, **MIXED, num_layers=1, seed=cut)
        names = "ab" if call == "fork" else "a"
        twin.prefill("a", cut if call == "append" else length)
        if call != "append":
            assert twin.model.is_past("a").tolist() == [i < page for i in range(length)]
        if call == "pop":
            twin.pop("a", length - cut)
        elif call == "append":
            twin.step("a", [length - cut])
        elif call == "fork":
            twin.fork("a", "b", cut)
        else:
            twin.slide("a", length - cut)
        for counts in ([1, 1], [4, 2], [1, 3]):
            twin.step(names, counts[: len(names)])
        twin.remove(*names)
        twin.check_empty()


def test_trees(device):
    twin = MixedTwin(device, **MIXED)
    twin.prefill("a", 14, "b", 2)
    twin.step("ab", [7, 7], [BINARY, BINARY])
    twin.commit("ba", [3, 6])
    twin.step("ab", [1, 1])


@pytest.mark.parametrize("at", [n if n % 3 == 1 else full_only(n) for n in range(18)])
def test_forks(device, at):
    """Full pages are shared, demoted ones too; what one leaves behind the other may still have."""
    twin = MixedTwin(device, **{**MIXED, "recent": 4})
    twin.prefill("a", 17)
    twin.fork("a", "b", at)
    twin.step("ab", [3, 2])
    twin.step("b", [5])
    twin.set_kv("b", 0, 6)
    twin.step("ab", [4, 4])
    twin.remove("a")
    twin.remove("b")
    twin.check_empty()


def test_a_shared_page_is_converted_once(device):
    """Two that leave it later find what the first was given; the last one frees it."""
    twin = MixedTwin(device, **{**MIXED, "recent": 4})
    twin.prefill("a", 4)
    for name in "bc":
        twin.fork("a", name)
    names = "kvcupy_demoted_pages_total", "kvcupy_promoted_pages_total"
    kv.metrics.enable()
    try:
        before = [kv.metrics.value(name) for name in names]
        for name in "abc":
            twin.step(name, [5])
        twin.fork("a", "d", 2)
        counted = [kv.metrics.value(name) - n for name, n in zip(names, before, strict=True)]
    finally:
        kv.metrics.disable()
    assert counted == [1, 1]
    twin.remove("d")
    assert twin.cache.num_available_past_pages == 20 - 1
    assert twin.cache.num_available_pages == 24 - 3 * 2


@pytest.mark.parametrize("change", ["append", "set_kv behind", "set_kv ahead"])
def test_written_pages_are_converted_anew(device, change):
    """One has left a page that another has. Either is written to: they are the same no more."""
    twin = MixedTwin(device, **{**MIXED, "recent": 4})
    twin.prefill("a", 8)
    twin.fork("a", "b")
    twin.step("a", [5])
    if change == "append":
        twin.pop("b", 2)
    else:
        twin.set_kv("b" if "behind" in change else "a", 5, 2)
    twin.step("b", [7])
    assert twin.model.is_past("b")[4:8].all()


def test_a_sequence_whose_pages_never_came(device):
    """It keeps its pages, and the step of the others ends."""

    class Failed:
        failure = ValueError("lost")

    twin = MixedTwin(device, **MIXED)
    twin.prefill("a", 5, "b", 5)
    free = twin.cache.num_available_past_pages
    twin.cache._sequences.find("a").loads.append(Failed())
    twin.cache.begin_forward(["a", "b"], [6, 6])
    twin.cache.end_forward()
    assert twin.cache.num_available_past_pages == free - 1


def test_a_full_past(device):
    """Pages stay as they are while it has no room, and follow when it has."""
    twin = MixedTwin(device, **{**MIXED, "num_past_pages": 2, "recent": 4})
    twin.prefill("a", 17)
    assert twin.cache.num_available_past_pages == 0
    assert twin.model.is_past("a").sum() == 8
    twin.prefill("b", 9)
    twin.remove("a")
    twin.step("b", [1])
    assert twin.model.is_past("b").sum() == 4


def test_full(device):
    """A step that does not fit leaves both pools as they were."""
    twin = MixedTwin(device, **{**MIXED, "num_pages": 6, "num_past_pages": 3, "recent": 4})
    twin.prefill("a", 17)
    twin.pop("a", 10)  # within a demoted page, which an append converts back
    assert twin.step("a", [22]) is False
    assert twin.step("a", [21]) is True
    twin.add("b")
    assert twin.step("b", [9]) is False
    with pytest.raises(ZeroDivisionError), twin.cache.forward(["a"], [1]):
        raise ZeroDivisionError
    twin.check()


@pytest.mark.parametrize("call", ["end", "begin"])
def test_a_conversion_that_is_refused(device, monkeypatch, call):
    """After the step all pages are as they were, and the next end demotes them."""
    twin = MixedTwin(device, **MIXED)
    twin.prefill("a", 17)
    if call == "begin":
        twin.pop("a", 10)
    pages = twin.cache.num_available_pages, twin.cache.num_available_past_pages

    def refuse(*_, **__):
        raise kv.DeviceError("refused")

    cache = twin.cache
    if call == "begin":
        with monkeypatch.context() as patch:
            patch.setattr("kvcupy.cache.paged.past.store_kv", refuse)
            with pytest.raises(kv.DeviceError, match="refused"):
                cache.begin_forward(["a"], [1])
        twin.check()
    else:
        cache.begin_forward(["a"], [5])
        with monkeypatch.context() as patch:
            patch.setattr("kvcupy.cache.paged.past.store_kv", refuse)
            with pytest.raises(kv.DeviceError, match="refused"):
                cache.end_forward()
        assert cache.sequence_length("a") == 22
        assert cache.num_available_past_pages == pages[1]
        cache.begin_forward(["a"], [1])
        cache.end_forward()
        assert cache.num_available_past_pages == pages[1] - 2


def test_windows_of_attention(device):
    """Within the recent tokens they read those alone; longer ones are refused."""
    twin = MixedTwin(device, **MIXED)
    twin.prefill("a", 17)
    twin.step("a", [3], window=7)
    twin.step("a", [1], window=2)
    rows = device.zeros((1, 4, 16), "fp32")
    with twin.cache.forward(["a"], [1]):
        for masks in ({"window": 8}, {"window": 3, "sink_tokens": 1}):
            with pytest.raises(ValueError, match="in a cache with past"):
                twin.cache.attention(0, rows, rows[:, :2], rows[:, :2], **masks)
            twin.cache.attention(0, rows, rows[:, :2], rows[:, :2], sinks=device.zeros(4, "fp32"))


@pytest.mark.parametrize("sinks", [0, 3])
def test_windows_of_attention_reach_the_past(device, sinks):
    """Demoted tokens are near again where those behind them are popped, evicted or not shared."""
    twin = MixedTwin(device, **MIXED, sinks=sinks)
    twin.prefill("a", 26)
    for at in (9, 18, 22):
        twin.fork("a", at, at)
        twin.step([at], [1], window=7)
        twin.step([at, "a"], [3, 1], window=4)
        twin.both("begin", [at, "a"], [3, 1], [[-1, 0, 0], None])
        twin.attend(per_layer=[{"window": 7}, {}])  # the layers of a step may differ
        twin.both("end")
        twin.commit([at], [2])
        twin.remove(at)
    twin.pop("a", 10)
    twin.step("a", [2], window=7)
    twin.prefill("b", 26)
    twin.slide("b", 1, 5)
    twin.step("b", [1], window=7)
    twin.step("b", [1], window=7)


def test_a_captured_window_reaches_the_past(device):
    """Of later steps, where that of the capture hides it."""
    twin = MixedTwin(device, **MIXED)
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


def test_sliding_windows(device):
    """Tokens that are evicted free the pages of either pool."""
    for window, sinks in ((14, 0), (14, 5), (9, 2)):
        twin = MixedTwin(
            device, **MIXED, sinks=3, rope=rope_of(16), rope_mode="inline", seed=window
        )
        twin.prefill("a", 12)
        twin.slide("a", window - sinks, sinks)
        for count in (6, 1, 1, 1, 5):
            twin.step("a", [count])
        twin.remove("a")
        twin.check_empty()


@pytest.mark.parametrize("arguments", [
    {"past": "fp32"}, {"past": "nothing"}, {"recent": -1}, {"recent": None}, {"sinks": -1},
    {"num_past_pages": 0}, {"cascade": True}, {"past": "mxfp4"},
    {"k_scale": 0.5, "dtype": "fp8_e4m3", "past": "nvfp4"},
])  # fmt: skip
def test_refused(device, arguments):
    options = {
        "num_layers": 1, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "num_pages": 4,
        "past": "fp8_e4m3", "recent": 4, "device": device,
    }  # fmt: skip
    kv.PagedKVCache(**demoting(options))
    with pytest.raises((ValueError, TypeError)):
        kv.PagedKVCache(**demoting({**options, **arguments}))


def test_page_tables_for_others_are_refused(device):
    twin = MixedTwin(device, **MIXED)
    twin.add("a")
    with twin.cache.forward(["a"], [3]):
        for call in (twin.cache.block_table, twin.cache.page_table_csr):
            with pytest.raises(kv.KvcupyError, match="of two pools"):
                call()


def test_a_tiered_cache(device):
    """Prefixes are shared as they are computed; what the leased pages become is each's own."""
    plain = Prefixed(device, dtype="bf16", num_pages=30)
    tokens = tokens_of(3, 26)
    mixed = Prefixed(device, dtype="bf16", num_pages=30, past="fp8_e4m3", recent=9, host_pages=16)
    mixed.prefill("a", tokens[:8])
    mixed.cache.remove_sequence("a")  # two pages go to the tiered cache
    assert mixed.prefill("b", tokens) == 8
    assert mixed.prefill("c", tokens) == 8
    assert mixed.cache.num_available_past_pages == 30 - 2 * 4
    plain.prefill("b", tokens)
    for k, want in zip(*(c.cache.get_kv("b", 16, 26) for c in (mixed, plain)), strict=True):
        assert device.to_numpy(k).tobytes() == device.to_numpy(want).tobytes()
    assert mixed.bits("b") == mixed.bits("c")
    for name in "bc":
        mixed.cache.remove_sequence(name)  # the recent full pages go there, without those before
    assert mixed.cache.num_available_past_pages == 30
    assert mixed.prefill("d", tokens) == 8
    mixed.cache.add_sequence("short")
    mixed.step("short", tokens[:6])
    bits = mixed.bits("short")
    mixed.cache.offload("short")
    mixed.cache.onboard("short")
    assert mixed.bits("short") == bits


def test_demoted_leased_pages_are_given_back(device):
    """The page of a lease that all have left is the tiered cache's again, and may be evicted."""
    mixed = Prefixed(device, num_pages=12, past="fp8_e4m3", recent=2, host_pages=16)
    tokens = tokens_of(4, 40)
    mixed.publish(tokens[:4])
    mixed.prefill("a", tokens[:20])
    mixed.tiers.evict(1)
    mixed.device.synchronize()
    for name, seed in (("b", 5), ("c", 6)):
        mixed.cache.add_sequence(name)
        mixed.step(name, tokens_of(seed, 13))
    bits = {name: mixed.bits(name) for name in "abc"}
    alone = Prefixed(device, tiered=False, num_pages=12, past="fp8_e4m3", recent=2)
    for name, own in (("a", tokens[:20]), ("b", tokens_of(5, 13)), ("c", tokens_of(6, 13))):
        alone.cache.add_sequence(name)
        for part in (own[:4], own[4:]) if name == "a" else (own,):
            alone.step(name, part)
        assert alone.bits(name) == bits[name], name
