"""`PagedKVCache`: rotation by position, before the cache or in attention."""

from __future__ import annotations

import numpy as np
import pytest
from gather_cases import as_numpy
from helpers import from_values, to_device
from paged_cases import BINARY, Twin, rope_of

import kvcupy as kv
from kvcupy import reference

MODES = ("none", "normal", "inline")
FLOATS = ("fp32", "fp16", "bf16")
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [*range(1, 9)],
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", FLOATS)
def test_modes(device, mode, fmt, interleaved):
    """Chunks, decode, a fork within a page and a pop: positions are those in the cache."""
    twin = Twin(device, dtype=fmt, rope=rope_of(8), rope_mode=mode, interleaved=interleaved)
    twin.prefill("a", 9, "b", 3)
    twin.step("ba", [5, 2])
    twin.fork("a", "c", 6)
    twin.pop("b", 3)
    twin.step("cab", [1, 1, 1])
    twin.step("bca", [2, 3, 1])


@pytest.mark.parametrize("mode", ["normal", "inline"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_tables(device, kind, mode):
    """Whatever the table holds is what rotates keys: no theta or factor of the cache's own."""
    twin = Twin(
        device, seed=1, rope=rope_of(16, scaling=SCALINGS[kind]), rope_mode=mode, head_dim=16
    )
    twin.prefill("a", 70)
    twin.step("a", [1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_part_of_a_head(device, mode, interleaved):
    """A table narrower than the head: the rest of query and key passes."""
    twin = Twin(
        device, seed=2, head_dim=24, v_head_dim=16, rope=rope_of(10), rope_mode=mode,
        interleaved=interleaved, dtype="bf16",
    )  # fmt: skip
    twin.prefill("a", 9)
    twin.step("a", [1])
    twin.fork("a", "b", 5)
    twin.step("ab", [3, 2])


def test_no_table_is_no_rotation(device):
    """Whatever the mode says."""
    for mode in MODES:
        twin = Twin(device, seed=3, rope=None, rope_mode=mode)
        twin.prefill("a", 9)
        twin.step("a", [1])


@pytest.mark.parametrize("mode", MODES)
def test_what_the_cache_holds(device, mode):
    """Rotated keys in normal mode, raw ones in the others; the query and key given stay."""
    table = rope_of(8)
    twin = Twin(device, seed=4, rope=table, rope_mode=mode, num_layers=1)
    rows = [np.float32(twin.rng.standard_normal((5, h, 8))) for h in (4, 2, 2)]
    placed = [to_device(device, a) for a in rows]
    twin.cache.add_sequence("a")
    with twin.cache.forward(["a"], [5]):
        twin.cache.attention(0, *placed)
    key = as_numpy(device, twin.cache.get_kv("a", 0, 5)[0], "fp32")[0]
    rotated = reference.apply_rope(None, rows[1], table, np.arange(5))[1]
    np.testing.assert_allclose(key, rotated if mode == "normal" else rows[1], atol=1e-6)
    assert np.abs(key - (rows[1] if mode == "normal" else rotated))[1:].max() > 0.1
    for one, other in zip(placed, rows, strict=True):
        np.testing.assert_array_equal(device.to_numpy(one), other)


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_normal_and_inline_agree(device, fmt):
    """Two caches, one sequence each, the same tokens: fp32 rounds the keys of one once more."""
    rng, outs = np.random.default_rng(5), []
    rows = [[from_values(rng.standard_normal((n, h, 16)), fmt) for h in (4, 2, 2)]
            for n in (9, 1, 4, 1)]  # fmt: skip
    for mode in ("normal", "inline"):
        cache = kv.PagedKVCache(
            num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16, num_pages=9, page_size=3,
            dtype=fmt, rope=device.asarray(rope_of(16)), rope_mode=mode, device=device,
        )  # fmt: skip
        cache.add_sequence(0)
        for step in rows:
            with cache.forward([0], [len(step[0])]):
                out = cache.attention(0, *(to_device(device, a) for a in step))
        outs.append(reference.decode(as_numpy(device, out, fmt), fmt))
    np.testing.assert_allclose(*outs, atol={"fp32": 1e-5, "bf16": 0.05}[fmt])


@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_nodes_of_a_tree_are_rotated_by_depth(device, mode):
    twin = Twin(device, seed=6, rope=rope_of(8), rope_mode=mode)
    twin.prefill("a", 5, "b", 9)
    twin.step("ba", [7, 3], [BINARY, [-1, 0, 0]])
    twin.step("ab", [2, 2], [[1, 2], [6, 6]])
    twin.commit("ab", [4, 8])
    twin.step("ab", [1, 1])


@pytest.mark.parametrize("mode", MODES)
def test_the_last_position_of_a_table(device, mode):
    """It is there; the next is not, and a step that needs it is refused before anything."""
    twin = Twin(device, seed=7, rope=rope_of(8, positions=12), rope_mode=mode)
    twin.prefill("a", 11, "b", 2)
    twin.step("ab", [1, 1])
    if mode == "none":
        twin.step("a", [1])
        return
    for names, lens in ((["a"], [1]), (["b", "a"], [1, 1]), (["b"], [10])):
        with pytest.raises(ValueError, match=r"\bappend_lens\b"):
            twin.cache.begin_forward(names, lens)
        twin.check()
    twin.step("b", [9])


def test_a_tree_deeper_than_a_table(device):
    """Depth counts, not the number of nodes."""
    twin = Twin(device, seed=8, rope=rope_of(8, positions=12))
    twin.prefill("a", 10)
    twin.step("a", [5], [[-1, -1, 0, 0, 1]])
    twin.commit("a", [-1])
    with pytest.raises(ValueError, match=r"\b(append_lens|token_tree)\b"):
        twin.cache.begin_forward(["a"], [3], token_tree=[[-1, 0, 1]])
    twin.check()
    twin.step("a", [2])


@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_slid_sequences(device, mode):
    """Inline, keys are rotated by their new positions; in normal mode they stay as written."""
    twin = Twin(device, seed=9, rope=rope_of(8), rope_mode=mode)
    twin.add("a", "b")
    twin.slide("a", 7, 2)
    twin.slide("b", 8)
    twin.step("ab", [6, 13])
    for _ in range(12):
        twin.step("ba", [1, 1])


def test_a_window_may_outlast_the_table(device):
    """Positions are those in the cache, so a slid sequence decodes for as long as it likes."""
    twin = Twin(device, seed=10, rope=rope_of(8, positions=10), rope_mode="inline")
    twin.add("a")
    twin.slide("a", 7, 1)
    twin.step("a", [10])
    for _ in range(20):
        twin.step("a", [2])
