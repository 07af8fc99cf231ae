"""`PagedKVCache` with `demotion`: what the machine of test_paged_machine.py does not do."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import demoting
from paged_cases import Twin
from paged_tiers_cases import Prefixed, tokens_of

import kvcupy as kv

MIXED = {"num_pages": 24, "num_past_pages": 20, "past": "fp8_e4m3", "recent": 6, "head_dim": 16}


@pytest.mark.parametrize("past", ["fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_which_tokens_are_demoted(device, past, sinks):
    """By hand: none of the first, none of the recent, whole pages of 4; a full pool of old tokens
    delays the rest."""
    twin = Twin(device, **{**MIXED, "past": past, "sinks": sinks, "num_past_pages": 3})
    twin.prefill("a", 17, "b", 3)
    first = 4 if sinks else 0
    assert twin.model.is_past("a").tolist() == [first <= i < 8 for i in range(17)]
    twin.step("ba", [9, 9])
    assert twin.cache.num_available_past_pages == 0
    twin.remove("a")
    twin.step("b", [4])
    assert twin.model.is_past("b").tolist() == [first <= i < 8 for i in range(16)]


def test_a_shared_page_is_converted_once(device):
    """Two that leave it later find what the first was given; the last one frees it."""
    twin = Twin(device, **{**MIXED, "recent": 4})
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
    assert twin.cache.num_available_past_pages == 20 - 1
    assert twin.cache.num_available_pages == 24 - 3 * 2


@pytest.mark.parametrize("change", ["append", "set_kv behind", "set_kv ahead"])
def test_written_pages_are_converted_anew(device, change):
    """One has left a page that another has. Either is written to: they are the same no more."""
    twin = Twin(device, **{**MIXED, "recent": 4})
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

    twin = Twin(device, **MIXED)
    twin.prefill("a", 5, "b", 5)
    free = twin.cache.num_available_past_pages
    twin.cache._sequences.find("a").loads.append(Failed())
    twin.cache.begin_forward(["a", "b"], [6, 6])
    twin.cache.end_forward()
    assert twin.cache.num_available_past_pages == free - 1


@pytest.mark.parametrize("call", ["end", "begin"])
def test_a_conversion_that_is_refused(device, monkeypatch, call):
    """After the step all pages are as they were, and the next end demotes them."""
    twin = Twin(device, **MIXED)
    twin.prefill("a", 17)
    if call == "begin":
        twin.pop("a", 10)
    free, cache = twin.cache.num_available_past_pages, twin.cache

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
        assert (cache.sequence_length("a"), cache.num_available_past_pages) == (22, free)
        cache.begin_forward(["a"], [1])
        cache.end_forward()
        assert cache.num_available_past_pages == free - 2


@pytest.mark.parametrize(("dtype", "past"), [("bf16", "fp8_e4m3"), ("fp8_e4m3", "nvfp4")])
def test_a_saved_sequence_with_more_tokens_than_pages_hold(device, tmp_path, dtype, past):
    """Loading it needs no more pages than it had."""
    pytest.importorskip("safetensors")
    twin = Twin(device, **{**MIXED, "num_pages": 4, "dtype": dtype, "past": past})
    twin.prefill("a", 8)
    for _ in range(8):
        twin.step("a", [4])
    recent = 40 - MIXED["recent"], 40
    bits = twin.cache.get_kv("a", *recent)
    pages = twin.cache.num_available_pages, twin.cache.num_available_past_pages
    twin.cache.save_sequence("a", tmp_path / "a")
    twin.cache.remove_sequence("a")
    twin.cache.load_sequence("a", tmp_path / "a")
    assert (twin.cache.num_available_pages, twin.cache.num_available_past_pages) == pages
    for own, loaded in zip(bits, twin.cache.get_kv("a", *recent), strict=True):
        assert device.to_numpy(own).tobytes() == device.to_numpy(loaded).tobytes()
    full = kv.PagedKVCache(
        **demoting({**twin.options, "num_past_pages": 2}), device=device
    )  # what is not demoted does not fit
    with pytest.raises(kv.CacheFull):
        full.load_sequence("a", tmp_path / "a")
    assert full.num_available_pages == 4 and full.num_available_past_pages == 2


@pytest.mark.parametrize(
    ("dtype", "past"),
    [("fp8_e4m3", "nvfp4"), ("fp8_e5m2", "mxfp4"), ("int8", "nvfp4"), ("bf16", "fp8_e4m3")],
)
def test_a_saved_sequence_is_the_same_to_the_bit(device, tmp_path, dtype, past):
    """Where it is not demoted, scales too; also in a cache that demotes nothing."""
    pytest.importorskip("safetensors")
    twin = Twin(device, **{**MIXED, "head_dim": 32, "dtype": dtype, "past": past, "sinks": 3})
    twin.prefill("a", 17)
    twin.set_kv("a", 0, 17, "fp32")  # bf16 has no such numbers
    kept = ~twin.model.is_past("a")
    assert kept.tolist() == [not 4 <= i < 8 for i in range(17)]
    twin.cache.save_sequence("a", tmp_path / "a")
    twin.model.load("b", twin.model.sequences["a"])
    twin.cache.load_sequence("b", tmp_path / "a")
    twin.check()
    plain = kv.PagedKVCache(**demoting({**twin.options, "past": None}), device=device)
    plain.load_sequence("b", tmp_path / "a")
    own = twin.cache.get_kv("a", 0, 17, dtype="fp32")
    for cache in (twin.cache, plain):
        for rows, loaded in zip(own, cache.get_kv("b", 0, 17, dtype="fp32"), strict=True):
            rows, loaded = device.to_numpy(rows)[:, kept], device.to_numpy(loaded)[:, kept]
            assert rows.tobytes() == loaded.tobytes()


def test_windows_of_attention(device):
    """Longer than the recent tokens they are refused; page tables are of one pool."""
    twin = Twin(device, **MIXED)
    twin.prefill("a", 17)
    twin.step("a", [3], window=7)
    rows = device.zeros((1, 4, 16), "fp32")
    with twin.cache.forward(["a"], [1]):
        for masks in ({"window": 8}, {"window": 3, "sink_tokens": 1}):
            with pytest.raises(ValueError, match="in a cache with past"):
                twin.cache.attention(0, rows, rows[:, :2], rows[:, :2], **masks)
        for call in (twin.cache.block_table, twin.cache.page_table_csr):
            with pytest.raises(kv.KvcupyError, match="of two pools"):
                call()


def test_a_captured_window_reaches_the_past(device):
    """In later steps, where the window hid it in the captured step."""
    twin = Twin(device, **MIXED)
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
    {"num_past_pages": 0}, {"past": "mxfp4"},
    {"dtype": "fp8_e4m3", "past": "fp8_e5m2"},
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


def test_a_tiered_cache(device):
    """Leased prefix pages are shared until they are demoted; demoted copies are private."""
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
