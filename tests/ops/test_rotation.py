"""Four-bit rows that are stored rotated: what that means, and what is refused.

Stores and gathers are in `test_four_bit.py`, transfers in `test_transfer.py`, bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest
from four_bit_cases import place_rows
from helpers import Case, refused
from rope_cases import RopeCase
from transfer_cases import TransferCase, pools

import kvcupy as kv
from kvcupy import reference


def test_a_latent_that_its_cache_does_not_rotate_is_refused(device):
    case = Case(device, 6)
    latent, rope_key = place_rows(case, "bf16", (6, 512)), place_rows(case, "bf16", (6, 64))
    cache = case.output("nvfp4", (12, 576)).rotated()
    slots = device.asarray(np.arange(6))
    call = lambda: kv.store_mla(latent.array, rope_key.array, cache.array, slots)  # noqa: E731
    refused(case, call, ValueError, "cache: expected rows of which the latent's 512 elements")


@pytest.mark.parametrize("fmt", ["nvfp4", "int4"])
def test_rows_of_which_a_part_is_rotated_are_stored_in_parts(device, fmt):
    """A call rotates whole rows; columns of such a cache are rotated whole or not at all."""
    case = RopeCase(device, 16)
    key = place_rows(case, "bf16", (6, 2, 192))
    caches = [case.output(fmt, (12, 2, 192), name="cache") for _ in "kv"]
    rotated, plain = caches[0].rotated(128), caches[1]
    numbers = np.arange(6)
    slots = device.asarray(numbers)
    table, positions = case.table(64, range(6)), case.positions(range(6))
    rope = None, key.array, key.array, table.array, positions.array
    for cache, other, name in ((rotated, plain, "k_cache"), (plain, rotated, "v_cache")):
        both = cache.array, other.array
        for call in (
            lambda both=both: kv.store_kv(key.array, key.array, *both, slots),
            lambda both=both: kv.gather_kv(*both, slots, dtype="bf16"),
            lambda both=both: kv.rope_store_kv(*rope, *both, slots),
        ):
            message = f"{name}: expected rows that are rotated whole or not at all .*:128"
            refused(case, call, ValueError, message)
    parts = [slice(0, 128), slice(128, 192)]
    kv.store_kv(
        *(key.array[..., part] for part in parts), *(rotated.array[..., part] for part in parts),
        slots,
    )  # fmt: skip
    unused = reference.FourBitRows(plain.view.codes.copy(), plain.view.scales.copy(), fmt)
    reference.store_kv(key.view, key.view, rotated.view, unused, numbers)
    case.check_buffers()
    for dtype in (fmt, f"{fmt}+hadamard"):
        copies = kv.gather_kv(rotated.array, rotated.array, slots, dtype=dtype)
        assert [copy.rotated_width for copy in copies] == [128, 128]
    with pytest.raises(ValueError, match=r"^dtype: expected .* like k_cache, got "):
        kv.gather_kv(plain.array, plain.array, slots, dtype=f"{fmt}+hadamard")


# Pools ---------------------------------------------------------------------------------------


def test_pools_that_rotate_otherwise_are_told_apart(device):
    case = TransferCase(device, 15)
    src, dst = pools(case, ("nvfp4+hadamard", "nvfp4"))
    with pytest.raises(ValueError, match=r"dst_pool: expected nvfp4\+hadamard:128 and .*convert"):
        kv.transfer_pages(src.pool, dst.pool, [1, 2], [3, 0])
    for memory in (*src.memories, *dst.memories):
        memory.check()


# Plans, round trips, refusals ----------------------------------------------------------------


def test_plans_tell_encodings_apart(device):
    """Calls that differ in nothing else, one after another, over the same bytes."""
    rng = np.random.default_rng(1)
    rows = device.asarray(rng.standard_normal((4, 2, 64)).astype(np.float32))
    slots = device.asarray(np.arange(4))
    raws = [device.zeros((4, 2, 36), np.uint8) for _ in "kv"]
    stored = {}
    for encoding in ("nvfp4", "nvfp4+hadamard", "nvfp4+four_over_six") * 2:
        caches = [kv.view_as(raw, encoding) for raw in raws]
        kv.store_kv(rows, rows, *caches, slots)
        got = device.to_numpy(raws[0]).tobytes()
        assert stored.setdefault(encoding, got) == got
        back, _ = kv.gather_kv(*caches, slots, dtype="fp32")
        np.testing.assert_allclose(device.to_numpy(back), device.to_numpy(rows), atol=0.5)
    assert len(set(stored.values())) == 3


def test_special_values(device):
    rows = np.ones((1, 1, 64), np.float32)
    rows[0, 0, 3] = np.nan
    cache, other = (device.zeros((1, 1, 64), "int4+hadamard") for _ in "kv")
    slots = device.asarray(np.arange(1))

    def stored(rows):
        kv.store_kv(device.asarray(rows), device.asarray(rows), cache, other, slots)
        return device.to_numpy(cache).tobytes(), device.to_numpy(
            kv.gather_kv(cache, other, slots, dtype="fp32")[0]
        )

    bits, _ = stored(rows)
    rows[0, 0, 3] = 0
    assert stored(rows)[0] == bits
    for infinity in (np.inf, -np.inf, 3e38):
        rows[0, 0, 3] = infinity
        bits, back = stored(rows)
        assert np.isfinite(back).all()
        rows[0, 0, 3] = np.copysign(2.0**112, infinity)
        assert stored(rows)[0] == bits


@pytest.mark.parametrize("make", ["empty", "zeros", "empty_pinned"])
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "fp32"])
def test_what_only_four_bits_have_is_refused(device, make, format):
    for option, name in (("hadamard", "hadamard"), ("four_over_six", "scale_rule")):
        with pytest.raises(ValueError, match=f"^dtype: {name}: expected"):
            getattr(device, make)((2, 64), f"{format}+{option}")


def test_rows_of_another_rotation_are_refused(device):
    case = Case(device, 16)
    cache, rows = case.output("nvfp4", (8, 2, 64)).rotated(), case.output("nvfp4", (4, 2, 64))
    slots = device.asarray(np.arange(4))
    for name, call in {
        "key": lambda: kv.store_kv(rows.array, rows.array, cache.array, cache.array, slots),
        "k_out": lambda: kv.gather_kv(cache.array, cache.array, slots, k_out=rows.array),
    }.items():
        refused(case, call, ValueError, f"{name}: expected rows rotated like")
    k, _ = kv.gather_kv(cache.array, case.output("nvfp4", (8, 2, 64)).array, slots, dtype="nvfp4")
    assert str(k.encoding) == "nvfp4+hadamard"
