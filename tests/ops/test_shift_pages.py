"""`shift_pages`, by what a user sees of it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import QUANTISED, random_finite
from shift_cases import ENCODINGS, POSITIONS, ShiftCase
from valid_calls import array

import kvcupy as kv
from kvcupy import reference

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PAGES, OUT = (6, 0, 3), (1, 7, 5)


@pytest.mark.covering
@pytest.mark.parametrize("out_pages", [None, OUT], ids=["in place", "onto other pages"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["kv", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_pools_of_every_encoding(device, encoding, layout, kind, interleaved, out_pages):
    case = ShiftCase(device, kind, dtype=encoding, layout=layout)
    case.shift(PAGES, 5, out_pages=out_pages, interleaved=interleaved)


@pytest.mark.parametrize("encoding", ["fp16", "fp8_e4m3", "nvfp4", "int4+hadamard"])
def test_one_thread_to_a_row(users_device, encoding):
    for kind in ("kv", "mla"):
        for out_pages, interleaved in ((None, False), (OUT, True)):
            case = ShiftCase(users_device, kind, dtype=encoding, scales=encoding in QUANTISED)
            case.shift(PAGES, (5, -3, 0), out_pages=out_pages, interleaved=interleaved)


@pytest.mark.parametrize("out_pages", [None, OUT], ids=["in place", "onto other pages"])
@pytest.mark.parametrize("kind", ["kv", "mla"])
@pytest.mark.parametrize("encoding", QUANTISED)
def test_dynamic_scales(device, encoding, kind, out_pages):
    case = ShiftCase(device, kind, dtype=encoding, scales=True)
    case.shift(PAGES, -3, out_pages=out_pages)
    case = ShiftCase(device, kind, 1, dtype=encoding, scales=True, layout="page_head")
    case.shift(PAGES, (3, -2, 0), out_pages=out_pages, interleaved=True)


@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8", "nvfp4", "nvfp4+hadamard"])
@pytest.mark.parametrize("rotary_dim", [2, 6, 16, 24])
def test_a_part_of_each_head(device, encoding, rotary_dim):
    """Whole packs of pairs or not."""
    for interleaved in (False, True):
        case = ShiftCase(device, dtype=encoding, rotary_dim=rotary_dim)
        case.shift(PAGES, 5, out_pages=OUT, interleaved=interleaved)
        case.shift(PAGES, 5, interleaved=interleaved)


@pytest.mark.parametrize("encoding", ["bf16", "nvfp4"])
def test_what_is_skipped(device, encoding):
    """Negative pages, pages past the end, and deltas outside of the table; the latter are faults,
    each once."""
    case = ShiftCase(device, dtype=encoding)
    case.shift((6, -1, 3, 4), (1, 99, POSITIONS, -POSITIONS))
    case.shift((8, 6, 2**40, -7), 3)
    case.shift((8, 0, 1, 2, -1), (99, 1, 1, -(2**63), 1), out_pages=(9, 8, -2, 3, 4))
    case.shift((), 3)
    case.shift((), ())


def test_lists_of_a_pool(device):
    """Lists of ints, arrays of the host, and of int32."""
    case = ShiftCase(device, dtype="bf16")
    case.shift([6, 0], [3, -4])
    case.shift([6, 0], 2, out_pages=[1, 3])
    want = ShiftCase(device, dtype="bf16")
    pages, deltas = np.array([6, 0], np.int32), np.array([3, -4], np.int32)
    want.shift([6, 0], [3, -4])
    other = ShiftCase(device, dtype="bf16")
    kv.shift_pages(other.pool, pages, deltas, device.asarray(other.table))
    assert other.bytes() == want.bytes()


def test_layers_in_separate_allocations(device):
    """One launch for each evenly spaced set of them."""
    layers = [(array(device, 6, 4, 2, 16), array(device, 6, 4, 2, 16)) for _ in range(3)]
    pool = kv.KVPool.wrap([k for k, _ in layers], [v for _, v in layers])
    before = [tuple(np.array(device.to_numpy(x)) for x in layer) for layer in layers]
    table = kv.rope_table(64, 16, device=device)
    kv.shift_pages(pool, [2, 5], 7, table, out_pages=[0, 1])
    for (k, v), (old_k, old_v) in zip(layers, before, strict=True):
        got_k, got_v = device.to_numpy(k), device.to_numpy(v)
        assert (got_v[:2] == old_v[[2, 5]]).all() and (got_v[2:] == old_v[2:]).all()
        exact = reference.shift_rows(old_k[[2, 5]], np.asarray(device.to_numpy(table)), 7)
        assert np.allclose(got_k[:2], exact, rtol=0, atol=1e-6)
        assert (got_k[2:] == old_k[2:]).all()


# What it means ---------------------------------------------------------------------------------

SCALINGS = {
    "default": None,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "longrope": {
        "rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 16, "long_factor": [1.5] * 16,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_shifted_key_is_the_key_at_the_other_position(device, scaling, interleaved):
    """Whatever the positions, and with an attention factor, which a cached key has already."""
    table = kv.rope_table(2048, 32, scaling=SCALINGS[scaling], device=device)
    plain = array(device, 16, 2, 32, seed=3)

    def cached(first):
        key = device.asarray(device.to_numpy(plain).copy())
        positions = device.asarray(np.arange(first, first + 16))
        kv.apply_rope(None, key, table, positions, interleaved=interleaved)
        return key.reshape(4, 4, 2, 32)

    pages = device.asarray(np.arange(4))
    for first, second in ((0, 1000), (1000, 3), (700, 1700), (40, 40)):
        shifted, want = cached(first), cached(second)
        kv.shift_pages(shifted, pages, second - first, table, interleaved=interleaved)
        got, want = (device.to_numpy(x) for x in (shifted, want))
        assert np.abs(got - want).max() < 4e-6 * np.abs(want).max()


def test_float32_is_rotated_as_by_apply_rope(device):
    """Bit for bit, where the table has no factor: one rotation, one rounding."""
    table = kv.rope_table(64, 16, device=device)
    keys = array(device, 3, 4, 2, 16, seed=5)
    want = keys.copy().reshape(12, 2, 16)
    kv.apply_rope(None, want, table, device.asarray(np.full(12, 9)))
    kv.shift_pages(keys, device.asarray(np.arange(3)), 9, table)
    assert device.to_numpy(keys).tobytes() == device.to_numpy(want).tobytes()


@pytest.mark.parametrize(
    "encoding", ["fp8_e4m3", "fp8_e5m2", "int8", "nvfp4", "mxfp4", "int4", "nvfp4+hadamard"]
)
def test_quantised_keys_are_what_a_store_makes_of_the_rotated_values(device, encoding):
    """All but the few that float32 brings to the other side of a rounding."""
    rng, slots = np.random.default_rng(7), device.asarray(np.arange(16))
    options = {"dtype": encoding, "device": device, "scales": encoding in QUANTISED}
    shifted, stored = (kv.KVPool(4, 4, 1, 2, 128, **options) for _ in range(2))

    def scales(pool):
        names = ("k_scale_cache", "v_scale_cache") if pool.scale_parts else ()
        return dict(zip(names, (pool.k_scale(0), pool.v_scale(0)), strict=False))

    def store(pool, values):
        rows = device.asarray(values.astype(np.float32))
        kv.store_kv(rows, rows, pool.k(0), pool.v(0), slots, **scales(pool))

    def load(pool):
        rows, _ = kv.gather_kv(pool.k(0), pool.v(0), slots, dtype="fp32", **scales(pool))
        return np.array(device.to_numpy(rows))

    store(shifted, rng.standard_normal((16, 2, 128)))
    table = kv.rope_table(64, 128, device=device)
    exact = reference.shift_rows(load(shifted), np.asarray(device.to_numpy(table)), 11)
    kv.shift_pages(shifted, [0, 1, 2, 3], 11, table)
    store(stored, exact)
    assert np.isclose(load(shifted), load(stored), rtol=1e-5).mean() > 0.995


def test_any_values(device):
    """Infinities and NaN stay in their pairs."""
    keys = random_finite(np.random.default_rng(2), "fp16", 4 * 4 * 2 * 16).reshape(4, 4, 2, 16)
    keys[0, 0, 0, 3], keys[1, 2, 1, 9] = np.inf, np.nan
    got, pages = device.asarray(keys.copy()), device.asarray(np.arange(4))
    table = kv.rope_table(64, 16, device=device)
    kv.shift_pages(got, pages, 3, table)
    got = device.to_numpy(got)
    touched = np.zeros(keys.shape, bool)
    touched[0, 0, 0, [3, 11]] = touched[1, 2, 1, [1, 9]] = True
    with np.errstate(invalid="ignore", over="ignore"):
        exact = reference.shift_rows(keys, np.asarray(device.to_numpy(table)), 3)
        overflown = np.abs(exact) > 65504
    assert (np.isfinite(got) == ~(touched | overflown)).all()


# Refusals and order ------------------------------------------------------------------------------


def test_what_is_refused_of_a_pool(device):
    case = ShiftCase(device, dtype="bf16")
    before, table = case.bytes(), device.asarray(case.table)
    for arguments, error, name in (
        (([0], 24, table), ValueError, "delta"),
        (([0], [1, 2], table), ValueError, "delta"),
        (([0], [1.0], table), TypeError, "delta"),
        (([0.5], 1, table), TypeError, "pages"),
        (([0], 1, kv.rope_table(8, 64, device=device)), ValueError, "pool"),
        ((None, 1, table), TypeError, "pages"),
    ):
        with pytest.raises(error, match=f"{name}: "):
            kv.shift_pages(case.pool, *arguments)
    with pytest.raises(ValueError, match="out_pages: expected 2 like pages"):
        kv.shift_pages(case.pool, [0, 1], 1, table, out_pages=[3])
    assert case.bytes() == before


def test_order_is_checked(device):
    """A shift reads its pages and writes its targets, and no other page."""
    if device.kind != "host":
        pytest.skip("delays are simulated")
    case = ShiftCase(device, dtype="bf16")
    table = device.asarray(case.table)
    lists = {n: case.index([i]) for n, i in (("one", 1), ("two", 2), ("three", 3), ("four", 4))}
    a, b = device.stream(), device.stream()
    with kv.order_checker():
        kv.shift_pages(case.pool, lists["one"], 3, table, out_pages=lists["two"], stream=a)
        kv.shift_pages(case.pool, lists["three"], 3, table, out_pages=lists["four"], stream=b)
    for pages, out_pages in (("two", "three"), ("three", "one"), ("three", "two")):
        with pytest.raises(kv.OrderError), kv.order_checker():
            kv.shift_pages(case.pool, lists["one"], 3, table, out_pages=lists["two"], stream=a)
            kv.shift_pages(
                case.pool, lists[pages], 3, table, out_pages=lists[out_pages], stream=b
            )  # fmt: skip
