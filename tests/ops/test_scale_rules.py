"""Groups of nvfp4 with the scale of the smaller error: what that is, and where it is said.

Stores are in `test_four_bit.py`, transfers in `test_transfer.py`, bit for bit.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kvcupy as kv
from kvcupy import reference

RULE = "+four_over_six"


# What it is --------------------------------------------------------------------------------------


def squared_errors(rows, rule):
    """Of each group, in float64."""
    target = reference.FourBitRows.packed(np.zeros((len(rows), 9), np.uint8), "nvfp4", 0, rule)
    reference.quantise_rows(rows, target, np.ones(len(rows), np.float32))
    return ((reference.dequantise_rows(target).astype(np.float64) - rows) ** 2).sum(-1), target


def test_each_group_takes_the_smaller_error():
    rows = np.random.default_rng(8).standard_normal((4096, 16)).astype(np.float32)
    six, by_six = squared_errors(rows, "absmax")
    best, chosen = squared_errors(rows, "four_over_six")
    assert (best <= six * (1 + 1e-6)).all()
    assert best.sum() < 0.85 * six.sum()
    fours = (chosen.scales != by_six.scales)[:, 0]
    assert 0.2 < fours.mean() < 0.6
    np.testing.assert_array_equal(chosen.codes[~fours], by_six.codes[~fours])
    largest = reference.decode_codes(chosen.codes[fours], "e2m1")
    assert np.isin(np.abs(largest).max(-1), (4, 6)).all()  # a scale may be rounded down


def test_ties_and_special_groups_take_six():
    rows = np.zeros((5, 16), np.float32)
    rows[1] = 6 * np.float32(0.5)  # exact by either
    rows[2, 3], rows[3, 3], rows[4, 3:5] = np.inf, 1e38, np.nan
    np.testing.assert_array_equal(
        squared_errors(rows, "four_over_six")[1].scales, squared_errors(rows, "absmax")[1].scales
    )


# Where it is said --------------------------------------------------------------------------------


def test_views_and_arrays_keep_the_rule(device):
    cache = device.zeros((4, 3, 2, 64), "nvfp4" + RULE)
    assert cache.scale_rule == "four_over_six"
    for part in (
        cache[1],
        cache[..., :32],
        cache.without_owner(),
        kv.view_as(cache, "nvfp4" + RULE),
    ):
        assert part.scale_rule == "four_over_six"
    assert kv.view_as(cache, "nvfp4").scale_rule == "absmax"
    assert device.empty((4, 64), "nvfp4").scale_rule == "absmax"
    assert device.empty_pinned((4, 64), "nvfp4" + RULE).scale_rule == "four_over_six"
    codes, scales = np.zeros((4, 32), np.uint8), np.zeros((4, 4), np.uint8)
    apart = kv.view_as(codes, "nvfp4" + RULE, scales=scales)
    assert apart[1:].scale_rule == "four_over_six"


def test_pools_and_caches_say_it(device):
    """Their bytes are of one format: pages are exchanged, and identities are the same."""
    pools = [kv.KVPool(4, 4, 2, 2, 64, dtype="nvfp4" + rule, device=device) for rule in ("", RULE)]
    assert [pool.encoding.scale_rule for pool in pools] == ["absmax", "four_over_six"]
    assert {pool.k(1).scale_rule for pool in pools} == {"absmax", "four_over_six"}
    assert pools[0].stored_as == pools[1].stored_as
    kv.transfer_pages(pools[1], pools[0], [0], [1])
    k, v = ([pool.k(layer) for layer in range(2)] for pool in pools)
    with pytest.raises(ValueError, match=r"v.*: expected scale_rule absmax"):
        kv.KVPool.wrap(k, v)
    latents = kv.MLAPool(4, 4, 2, 64, dtype="nvfp4" + RULE, device=device)
    assert latents.k(0).scale_rule == "four_over_six"
    sizes = {"num_layers": 1, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    cache = kv.PagedKVCache(**sizes, num_pages=4, dtype="nvfp4" + RULE, device=device)
    assert cache.pool.encoding.scale_rule == "four_over_six"
    mixed = {"demotion": kv.Demotion("nvfp4" + RULE, recent=8), "dtype": "fp16"}
    cache = kv.PagedKVCache(**sizes, num_pages=4, device=device, **mixed)
    assert [str(p.encoding) for p in (cache.pool, cache.demoted_pool)] == ["fp16", "nvfp4" + RULE]


def test_a_cache_writes_by_the_rule(device):
    """What a step stores, and what becomes the past."""
    rng = np.random.default_rng(10)
    rows = rng.standard_normal((3, 12, 2, 64)).astype(ml_dtypes.bfloat16)
    want = reference.FourBitRows.packed(
        np.zeros((12, 2, 36), np.uint8), "nvfp4", 0, "four_over_six"
    )
    reference.quantise_rows(rows[1].astype(np.float32), want, np.ones((12, 2), np.float32))
    values = reference.dequantise_rows(want).astype(ml_dtypes.bfloat16)
    sizes = {"num_layers": 1, "num_q_heads": 2, "num_kv_heads": 2, "head_dim": 64, "page_size": 4}
    past = {"demotion": kv.Demotion("nvfp4" + RULE, recent=4)}
    for options, first in (({"dtype": "nvfp4" + RULE}, 12), (past, 8)):
        cache = kv.PagedKVCache(**sizes, num_pages=6, device=device, **options)
        cache.add_sequence("a")
        with cache.forward(["a"], [12]):
            cache.attention(0, *(device.asarray(part) for part in rows))
        k = device.to_numpy(kv.arrays.view(cache.get_kv("a", 0, first)[0]))[0]
        np.testing.assert_array_equal(
            k.view(np.uint16), values[:first].view(np.uint16), err_msg=str(options)
        )


REFUSED = {
    "an unknown rule": (lambda: kv.Encoding("nvfp4", scale_rule="6"),
                        "scale_rule: expected 'absmax' or 'four_over_six', got '6'"),
    "another format": (lambda: kv.device("host").zeros((2, 64), "int4" + RULE),
                       "scale_rule: expected 'absmax' for int4"),
    "no groups": (lambda: kv.device("host").zeros((2, 64), "bf16" + RULE),
                  "scale_rule: expected 'absmax' for bf16"),
    "a tag of no groups": (lambda: kv.view_as(np.zeros((2, 64), np.uint8), "fp8_e4m3" + RULE),
                           "scale_rule: expected 'absmax' for fp8_e4m3"),
    "a pool": (lambda: kv.KVPool(2, 2, 1, 1, 64, dtype="mxfp4" + RULE, device="host"),
               "scale_rule: expected 'absmax' for mxfp4"),
    "another pool": (
        lambda: kv.PagedKVCache(
            num_q_heads=1, device="host", dtype="nvfp4" + RULE,
            pool=kv.KVPool(2, 2, 1, 1, 64, dtype="nvfp4", device="host")),
        "dtype: expected nvfp4 as in pool"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()
