"""`PagedKVCache` in fp8 and int8: scales of every token and head, or given ones.

What was not rotated is stored as the reference stores it, bit for bit. Beside that, the values are
compared with those that came, within what the format loses.
"""

from __future__ import annotations

import numpy as np
import pytest
from gather_cases import as_numpy
from helpers import QUANTISED, from_values, to_device
from paged_cases import BINARY, Twin, rope_of

from kvcupy import reference

HALF_STEP = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3, "int8": 0.5 / 127}
"""Of the largest element of a row: half a unit where a format has 3 or 2 digits, or 255 steps."""
BF16 = 2.0**-9
"""Half a unit of bf16, in which `get_kv` gives what a quantised cache holds."""


@pytest.mark.parametrize("scales", ["dynamic", "static"])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_steps(device, fmt, scales):
    """Prefill, chunks, decode, a fork within a page: scales go wherever tokens go."""
    static = {"k_scale": 0.05, "v_scale": 0.03} if scales == "static" else {}
    twin = Twin(device, dtype=fmt, head_dim=16, v_head_dim=24, **static)
    twin.prefill("a", 9, "b", 3)
    twin.step("ba", [5, 1])
    twin.fork("a", "c", 7)
    twin.step("cab", [1, 1, 1])
    twin.pop("c", 3)
    twin.step("bc", [1, 4])
    twin.set_kv("a", 2, 5)
    twin.step("abc", [1, 1, 1])


@pytest.mark.parametrize("mode", ["normal", "inline"])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_rotation(device, fmt, mode):
    """The rotated key is what is quantised, or the raw one that is rotated after it was read."""
    twin = Twin(device, seed=1, dtype=fmt, rope=rope_of(16), rope_mode=mode, head_dim=16)
    twin.prefill("a", 9)
    twin.step("a", [1])
    twin.step("a", [5])


@pytest.mark.parametrize("query", ["fp32", "fp16"])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_queries_of_other_formats(device, fmt, query):
    twin = Twin(device, seed=2, dtype=fmt, fmt=query)
    twin.prefill("a", 9)
    twin.step("a", [1])


@pytest.mark.parametrize("k_scale", [
    0.05, np.float32([0.02, 0.2]), np.float32([0.07]), np.float32([[0.02], [0.1], [0.3]]),
    np.float32([[0.02, 0.1], [0.3, 0.05], [0.1, 0.1]]),
])  # fmt: skip
def test_forms_of_scales(device, k_scale):
    """One, one a head, one a layer, one a layer and head."""
    twin = Twin(
        device, seed=3, dtype="int8", num_layers=3, k_scale=k_scale,
        v_scale=np.float32([0.04, 0.02]),
    )  # fmt: skip
    twin.prefill("a", 6)
    twin.step("a", [1])


@pytest.mark.parametrize("fmt", QUANTISED)
def test_what_comes_back(device, fmt):
    """With dynamic scales, quiet and loud rows alike: off by half a step of the row's own size."""
    twin = Twin(device, seed=4, dtype=fmt, num_layers=1)
    sizes = 10.0 ** twin.rng.integers(-3, 4, (6, 2, 1))
    key, value = (from_values(twin.rng.standard_normal((6, 2, 8)) * sizes, "bf16") for _ in "kv")
    query = from_values(np.zeros((6, 4, 8)), "bf16")
    twin.cache.add_sequence(0)
    with twin.cache.forward([0], [6]):
        twin.cache.attention(0, *(to_device(device, a) for a in (query, key, value)))
    for array, rows in zip(twin.cache.get_kv(0, 0, 6), (key, value), strict=True):
        got = reference.decode(as_numpy(device, array, "bf16"), "bf16")[0]
        want = reference.decode(rows, "bf16")
        largest = np.abs(want).max(-1, keepdims=True)
        lost = np.abs(got - want)
        assert (lost <= largest * (HALF_STEP[fmt] + BF16)).all()
        assert lost.max() > 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_get_kv_in_other_formats(device, dtype):
    """fp32 gives the product of what is stored and its scale, unrounded."""
    twin = Twin(device, seed=5, dtype="fp8_e4m3")
    twin.prefill("a", 6)
    got = twin.cache.get_kv("a", 0, 6, dtype=dtype)
    for side, array, values in zip("KV", got, twin.model.get_kv("a", 0, 6), strict=True):
        twin.compare_rows(side, array, values, dtype, side)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_trees_and_windows(device, fmt):
    """Compaction and sliding move scales along with rows."""
    twin = Twin(device, seed=6, dtype=fmt)
    twin.add("a", "b")
    twin.slide("b", 5, 1)
    twin.step("ab", [6, 9])
    twin.step("ab", [7, 7], [BINARY, BINARY])
    twin.commit("ba", [6, 4])
    twin.step("ab", [1, 1])
    twin.step("ab", [3, 3], window=5)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_a_shared_prefix(device, fmt):
    twin = Twin(device, seed=7, dtype=fmt, cascade=True)
    twin.prefill("a", 12)
    for name in "bcd":
        twin.fork("a", name)
    twin.step("abcd", [1, 2, 1, 3])
    twin.step("dabc", [1, 1, 1, 1])
