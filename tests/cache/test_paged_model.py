"""The oracle against the reference and against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPE, QUANTISED, from_values
from paged_cases import BINARY, SMALL, random_tree, rope_of
from paged_model import Full, PagedModel, as_cached

from kvcupy import reference


def model_of(**options):
    return PagedModel(**{**SMALL, **options})


def rows(model, rng, count, fmt="fp32"):
    widths = (model.heads * model.group, model.k_width), (model.heads, model.k_width)
    return [
        from_values(rng.standard_normal((count, *width)), fmt)
        for width in (*widths, (model.heads, model.v_width))
    ]


def step(model, rng, names, lens, trees=None, **options):
    model.begin(names, lens, trees)
    result = [
        model.attention(layer, *rows(model, rng, sum(lens)), **options)[0]
        for layer in range(model.num_layers)
    ]
    model.end()
    return result


@pytest.mark.parametrize("options", [
    {}, {"window": 4}, {"window": 5, "sink_tokens": 2}, {"logits_soft_cap": 3.0}, {"sm_scale": 0.7},
    {"sinks": np.float32([0.5, -1, 2, 0]), "window": 3},
])  # fmt: skip
@pytest.mark.parametrize("trees", [False, True])
def test_attention_is_that_of_the_reference(options, trees):
    """Every sequence laid out in pages of one token, for `paged_attention` of the reference."""
    rng, model = np.random.default_rng(0), model_of(v_head_dim=6)
    for name in "ab":
        model.add(name)
    step(model, rng, "ab", [3, 9])
    lens = [7, 4]
    parents = [random_tree(rng, count) for count in lens] if trees else None
    model.begin("ab", lens, parents)
    query, key, value = rows(model, rng, sum(lens))
    got, _ = model.attention(1, query, key, value, **options)

    tokens = [token for name in "ab" for token in model.sequences[name].tokens]
    k, v = (np.stack([getattr(t, side)[1] for t in tokens])[:, None] for side in "kv")
    seq_lens, start = np.array([10, 13]), 0
    table = np.zeros((2, 13), np.int32)
    table[0, :10], table[1] = np.arange(10), np.arange(10, 23)
    mask = np.zeros((sum(lens), max(lens)), bool)
    positions = np.zeros((2, max(lens)), np.int64)
    for row, (count, tree) in enumerate(zip(lens, parents or [], strict=False)):
        for node in range(count):
            above = node
            while above >= 0:
                mask[start + node, above] = True
                above = tree[above]
            positions[row, node] = seq_lens[row] - count + mask[start + node].sum() - 1
        start += count
    want, _, _ = reference.paged_attention(
        query, k, v, table, seq_lens, query_lens=np.array(lens),
        tree_mask=mask if trees else None, tree_positions=positions if trees else None, **options,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_rotation_by_position():
    """Normal keeps what the reference rotates; inline keeps raw keys, and rotates them later."""
    table, outs = rope_of(8), []
    for mode in ("normal", "inline"):
        rng, model = np.random.default_rng(1), model_of(rope=table, rope_mode=mode)
        model.add("a")
        step(model, rng, "a", [5])
        model.begin("a", [4], [[-1, 0, 0, 1]])
        assert model.query_positions().tolist() == [5, 6, 6, 7]
        query, key, value = rows(model, rng, 4)
        outs.append(model.attention(0, query, key, value)[0])
        _, rotated = reference.apply_rope(None, key, table, np.array([5, 6, 6, 7]))
        held, _ = model.get_kv("a", 5, 9)
        np.testing.assert_array_equal(held[0], rotated if mode == "normal" else key)
    np.testing.assert_allclose(*outs, atol=1e-5)


def test_tree_paths_and_commit():
    model, rng = model_of(), np.random.default_rng(2)
    model.add("a")
    step(model, rng, "a", [2])
    step(model, rng, "a", [7], [BINARY])
    step(model, rng, "a", [2], [[4, 7]])  # a child of node 4, and its child
    sequence = model.sequences["a"]
    assert sequence.committed == 2 and sequence.path(8) == [0, 1, 4, 7, 8]
    assert sequence.positions().tolist() == [0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 6]
    seen = np.flatnonzero(sequence.sees(9, None, 0)).tolist()
    assert seen == [0, 1, 2, 3, 6, 9]
    expected = [sequence.tokens[i] for i in (0, 1, 2, 3, 6, 9)]
    model.commit("a", [7])
    assert sequence.tokens == expected and len(sequence.places) == 6 and not sequence.parents
    assert model.available == 40 - 2


def test_pages_by_hand():
    """The figures of TVM for 40 tokens in pages of 16, and what is copied when."""
    model, rng = model_of(num_pages=8, page_size=16, num_layers=1), np.random.default_rng(3)

    def free_after(call, *arguments):
        getattr(model, call)(*arguments)
        return model.available

    model.add("a")
    step(model, rng, "a", [40])
    assert model.available == 5
    assert free_after("fork", "a", "b", 35) == 4
    assert free_after("fork", "a", "c", 32) == 4
    assert free_after("fork", "a", "d", 0) == 4
    assert free_after("fork", "c", "e") == 4
    assert free_after("pop", "e", 1) == 4  # a, b and c share its last page
    step(model, rng, "e", [1])
    assert model.available == 3  # ... until it appends
    step(model, rng, "c", [16])
    assert model.available == 2
    assert free_after("remove", "a") == 3
    with pytest.raises(Full):
        model.begin(["b", "c", "e"], [13, 33, 1])
    assert model.available == 3 and len(model.sequences["b"].tokens) == 35
    for name, free in zip("becd", (4, 5, 8, 8), strict=True):
        assert free_after("remove", name) == free


def test_sliding_by_hand():
    """Pages of 4, the first 1 and the last 5 of up to 6 tokens remain."""
    model, rng = model_of(num_layers=1), np.random.default_rng(4)
    model.add("a")
    model.enable_sliding_window("a", 5, 1)
    step(model, rng, "a", [6])
    first = list(model.sequences["a"].tokens)
    step(model, rng, "a", [4])
    a = model.sequences["a"]
    assert len(a.tokens) == 6 and a.tokens[:2] == [first[0], first[5]]
    page_of_sinks, page_of_rest, last_page = (a.places[i][0] for i in (0, 1, 5))
    assert [offset for _, offset in a.places] == [0, 1, 2, 3, 0, 1]
    assert len({page_of_sinks, page_of_rest, last_page}) == 3 and model.available == 37
    step(model, rng, "a", [3])
    assert [offset for _, offset in a.places] == [0, 0, 1, 2, 3, 0]
    assert model.available == 37


@pytest.mark.parametrize("fmt", QUANTISED)
def test_quantised_rows(fmt):
    """Within half a step of what was stored, and saturated with a scale too small."""
    rows = np.random.default_rng(5).standard_normal((6, 2, 8)).astype(np.float32)
    step_of = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3, "int8": 1 / 254}[fmt]
    back = as_cached(rows, fmt, None)
    assert np.abs(back - rows).max() <= np.abs(rows).max() * step_of * 1.001
    assert not np.array_equal(back, rows)
    tiny = as_cached(rows, fmt, np.float32([1e-9, 1e-9]))
    assert np.abs(tiny).max() <= reference.LIMIT[fmt] * 1.001e-9
    assert DTYPE[fmt].itemsize == 1
