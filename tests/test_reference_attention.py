"""Prove the attention of the specification by hand, by a more naive loop, and against torch."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from helpers import FORMATS, QUANTISED, examples, from_values
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcupy import reference

INF = math.inf


def one_sequence(keys, values, page_size=2):
    """Caches with the keys (n, H, D) in order from page 1 on, and their table."""
    pages = -(-len(keys) // page_size)

    def paged(rows):
        cache = np.full(((pages + 1) * page_size, *rows.shape[1:]), np.nan, rows.dtype)
        cache[page_size : page_size + len(rows)] = rows
        return cache.reshape(pages + 1, page_size, *rows.shape[1:])

    return paged(keys), paged(values), np.arange(1, pages + 1, dtype=np.int32)[None]


def attend(query, keys, values, **options):
    """Attend with one sequence; keys and values are lists of one head's rows."""
    query = np.asarray(query, np.float32)
    keys, values = (np.asarray(rows, np.float32)[:, None] for rows in (keys, values))
    lens = np.array([len(keys)])
    if len(query) > 1:
        options["query_lens"] = np.array([len(query)])
    out, lse, faults = reference.paged_attention(
        query, *one_sequence(keys, values), lens, **options
    )
    assert not any(faults.values())
    return out, lse


# By hand -------------------------------------------------------------------------------------

LOG = math.log
TREE = np.array([[True, False, True]])
THREE = ([[LOG(1.0)], [LOG(2.0)], [LOG(5.0)]], [[8.0, 0.0], [0.0, 8.0], [16.0, 16.0]])
"""Keys that a query of one gives weights of 1, 2 and 5 eighths, in float32, and values."""


@pytest.mark.parametrize(
    ("options", "want", "total"),
    [
        ({}, [11.0, 12.0], 8),
        ({"window": 2}, [80 / 7, 96 / 7], 7),
        ({"window": 1}, [16.0, 16.0], 5),
        ({"window": 1, "sink_tokens": 1}, [88 / 6, 80 / 6], 6),
        ({"window": 3, "sink_tokens": 2}, [11.0, 12.0], 8),
        ({"sinks": np.float32([LOG(8.0)])}, [5.5, 6.0], 16),
        ({"sinks": np.float32([-INF])}, [11.0, 12.0], 8),
        ({"window": 1, "sinks": np.float32([LOG(5.0)])}, [8.0, 8.0], 10),
        ({"sm_scale": 2.0}, [(8 + 400) / 30, (32 + 400) / 30], 30),
        ({"tree_mask": np.array([[True]])}, [11.0, 12.0], 8),
        ({"tree_mask": np.array([[False, True]])}, [8 / 3, 16 / 3], 3),
        ({"key_starts": 0}, [11.0, 12.0], 8),
        ({"key_starts": 1}, [80 / 7, 96 / 7], 7),
        ({"key_starts": 3}, [0.0, 0.0], 0),
        ({"key_starts": 1, "window": 1, "sink_tokens": 1}, [16.0, 16.0], 5),
        ({"key_starts": 1, "window": 1, "sink_tokens": 2}, [80 / 7, 96 / 7], 7),
        ({"tree_mask": TREE, "tree_lens": 3}, [88 / 6, 80 / 6], 6),
        ({"tree_mask": TREE, "tree_lens": 2}, [8 / 3, 16 / 3], 3),
        ({"tree_mask": TREE, "tree_lens": 0}, [11.0, 12.0], 8),
        ({"tree_mask": TREE, "tree_lens": 3, "key_starts": 1}, [16.0, 16.0], 5),
        ({"tree_mask": TREE, "tree_lens": 3, "window": 1}, [88 / 6, 80 / 6], 6),
    ],
)
def test_three_keys(options, want, total):
    """Weights of 1, 2 and 5."""
    counts = ("key_starts", "tree_lens")
    options = {n: np.array([v]) if n in counts else v for n, v in options.items()}
    out, lse = attend([[[1.0]]], *THREE, **options)
    np.testing.assert_allclose(out[0, 0], want, rtol=1e-6)
    np.testing.assert_allclose(lse, LOG(total) if total else -INF, rtol=1e-6)


def test_rows_that_see_nothing():
    """No key, queries before the first token, a tree without old tokens: zero, and -inf."""
    keys = np.ones((1, 1, 1), np.float32)
    caches = one_sequence(keys, keys)[:2]
    table = np.array([[2**31 - 1], [1], [1]])
    query = np.ones((5, 2, 1), np.float32)
    lens, appended = np.array([0, 1, 1]), np.array([1, 3, 1])
    out, lse, faults = reference.paged_attention(query, *caches, table, lens, query_lens=appended)
    assert out[:, 0, 0].tolist() == [0, 0, 0, 1, 1] and lse[:, 1].tolist() == [-INF] * 3 + [1, 1]
    assert not any(faults.values())
    mask = np.zeros((5, 3), bool)
    logits = np.float32([0.5, -INF])
    out, lse, _ = reference.paged_attention(
        query, *caches, table, lens, query_lens=appended, tree_mask=mask, sinks=logits
    )
    assert not out.any() and lse.tolist() == [[0.5, -INF]] * 5


def test_faults():
    keys = np.ones((4, 1, 1), np.float32)
    k, v, _ = one_sequence(keys, keys)  # three pages of two
    table = np.array([[1, -1, 2], [1, 3, 9], [2, 77, 88]])
    query = np.ones((4, 1, 1), np.float32)
    out, lse, faults = reference.paged_attention(query, k, v, table, np.array([6, 9, 2]),
                                                 query_lens=np.array([1, 1, 3]))  # fmt: skip
    np.testing.assert_allclose(np.exp(lse[:, 0]), np.array([4, 2, 1, 2]) * math.e, rtol=1e-6)
    assert faults == {
        "block_table": [(4, 3), (5, 9)], "seq_lens": [(1, 9)], "query_lens": [(2, 3)]
    }  # fmt: skip
    assert out[:, 0, 0].tolist() == [1, 1, 1, 1]


# A loop over queries and keys ----------------------------------------------------------------


def is_seen(j, i, length, new, o):
    """Whether query i of a sequence sees key j."""
    position = length - new + i
    tree_from = None if o["tree_mask"] is None or not o["tree_lens"] else length - o["tree_lens"]
    if position < 0 and (o["causal"] or o["window"] is not None or tree_from is not None):
        return False
    if j < o["key_starts"]:
        return False
    if tree_from is not None and j >= tree_from:
        row = o["tree_mask"][i]
        return j - tree_from < len(row) and bool(row[j - tree_from])
    if o["window"] is not None and j <= position - o["window"] and j >= o["sink_tokens"]:
        return False
    return j <= position or not o["causal"] or tree_from is not None


def naive(query, keys, values, length, new, o):
    """One sequence; nothing is paged."""
    out = np.zeros((*query.shape[:2], values.shape[2]))
    lse = np.full(query.shape[:2], -INF)
    group = query.shape[1] // keys.shape[1]
    for i, h in np.ndindex(lse.shape):
        weights = np.zeros(length)
        for j in range(length):
            if is_seen(j, i, length, new, o):
                score = np.dot(query[i, h].astype(np.float64), keys[j, h // group]) * o["sm_scale"]
                cap = o["logits_soft_cap"]
                weights[j] = math.exp(cap * math.tanh(score / cap) if cap else score)
        total = weights.sum() + (0 if o["sinks"] is None else math.exp(o["sinks"][h]))
        if total:
            out[i, h] = weights @ values[:, h // group].astype(np.float64) / total
            lse[i, h] = math.log(total)
    return out, lse


@st.composite
def options_of_attention(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return {
        "causal": draw(st.booleans()), "window": draw(st.none() | st.integers(1, 5)),
        "sink_tokens": draw(st.integers(0, 3)), "sm_scale": draw(st.sampled_from([0.3, 1.0])),
        "logits_soft_cap": draw(st.none() | st.sampled_from([3.0, 9.0])),
        "sinks": draw(st.none() | st.just(rng.standard_normal(4).astype(np.float32))),
        "tree_mask": draw(st.none() | st.just(rng.random((40, draw(st.integers(1, 9)))) < 0.6)),
        "layout": draw(st.sampled_from(["NHD", "HND"])), "rng": rng,
    }  # fmt: skip


@settings(max_examples=examples(400), deadline=None, database=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 9)] * 6), min_size=1, max_size=3), st.integers(1, 4),
    options_of_attention(),
)  # fmt: skip
def test_against_a_loop(sequences, page_size, options):
    """Sequences of any lengths, new tokens, first keys, evicted spans and tokens of a tree."""
    rng, layout = options.pop("rng"), options.pop("layout")
    lens, new, starts, holes, nodes, first = map(np.array, zip(*sequences, strict=True))
    nodes = np.minimum(nodes, lens)
    max_pages = 20 // page_size + 1
    pages = rng.permutation(len(lens) * max_pages).reshape(len(lens), max_pages)
    caches = [np.full((pages.size * page_size, 2, w), np.nan, np.float32) for w in (5, 4)]
    rows = []
    for b, length in enumerate(lens):
        keys = np.arange(length)
        slots = np.where(keys < starts[b], keys, keys + holes[b])
        where = pages[b, slots // page_size] * page_size + slots % page_size
        rows.append(
            [rng.standard_normal((length, *c.shape[1:])).astype(np.float32) for c in caches]
        )
        for cache, own in zip(caches, rows[-1], strict=True):
            cache[where] = own
    caches = [c.reshape(pages.size, page_size, *c.shape[1:]) for c in caches]
    query = rng.standard_normal((new.sum() + 2, 4, 5)).astype(np.float32)
    mask = options["tree_mask"]
    out, lse, faults = reference.paged_attention(
        query, *(c if layout == "NHD" else c.swapaxes(1, 2) for c in caches), pages, lens,
        query_lens=new, layout=layout, evicted_starts=starts, evicted_lens=holes,
        key_starts=first, tree_lens=nodes,
        **{**options, "tree_mask": None if mask is None else mask[: len(query)]},
    )  # fmt: skip
    assert not any(faults.values()) and not out[-2:].any() and not lse[-2:].any()
    ends = np.cumsum(new)
    for b, (length, count) in enumerate(zip(lens, new, strict=True)):
        mine = slice(ends[b] - count, ends[b])
        own = {**options, "key_starts": first[b], "tree_lens": nodes[b]}
        own["tree_mask"] = None if mask is None else mask[mine]
        want, want_lse = naive(query[mine], *rows[b], length, count, own)
        np.testing.assert_allclose(out[mine], want, atol=1e-13)
        np.testing.assert_allclose(lse[mine], want_lse, atol=1e-13)


PLAIN = {
    "causal": True, "window": None, "sink_tokens": 0, "sm_scale": 0.5, "logits_soft_cap": None,
    "sinks": None, "tree_mask": None, "tree_lens": 0, "key_starts": 0,
}  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_and_scales(fmt):
    """Elements are what `decode` says, times a scale a tensor, a head, or a slot and head."""
    rng = np.random.default_rng(4)
    k, v = (from_values(rng.standard_normal((2, 3, 2, w)) * 3, fmt) for w in (4, 5))
    exact = [reference.decode(c, fmt).reshape(6, 2, -1) for c in (k, v)]
    table, lens = np.array([[1, 0]]), np.array([5])
    order = [3, 4, 5, 0, 1]
    query = from_values(rng.standard_normal((1, 2, 4)), "bf16")
    dynamic = rng.uniform(0.5, 2, (6, 2)).astype(np.float32)
    options = [({}, np.ones((6, 2)), np.ones((6, 2)))]
    if fmt in QUANTISED:
        heads = np.float32([0.5, 3.0])
        options += [
            ({"k_scale": 0.75, "v_scale": heads}, np.full((6, 2), 0.75), np.tile(heads, (6, 1))),
            ({"k_scale_cache": dynamic, "v_scale_cache": dynamic[::-1]}, dynamic, dynamic[::-1]),
            ({"k_scale": np.float32([2.0])}, np.full((6, 2), 2.0), np.ones((6, 2))),
        ]
    for option, k_by, v_by in options:
        keys, values = (
            (a * by[..., None])[order] for a, by in zip(exact, (k_by, v_by), strict=True)
        )
        want, want_lse = naive(query, keys, values, 5, 1, PLAIN)
        out, lse, _ = reference.paged_attention(query, k, v, table, lens, **option)
        np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_against_torch(group, causal):
    """scaled_dot_product_attention of torch in float64: nothing older than the queries."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    query = (rng.standard_normal((7, 2 * group, 8)) * 2).astype(np.float32)
    keys = (rng.standard_normal((7, 2, 8)) * 2).astype(np.float32)
    values = rng.standard_normal((7, 2, 6)).astype(np.float32)
    out, lse, _ = reference.paged_attention(
        query, *one_sequence(keys, values), np.array([7]), query_lens=np.array([7]), causal=causal,
        sm_scale=0.4,
    )  # fmt: skip
    heads_first = [
        torch.from_numpy(a).double().transpose(0, 1)[None] for a in (query, keys, values)
    ]
    want = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=causal, scale=0.4, enable_gqa=True
    )
    np.testing.assert_allclose(out, want[0].transpose(0, 1).numpy(), atol=1e-13)
    scores = 0.4 * torch.einsum(
        "htd,hnd->htn", heads_first[0][0], heads_first[1][0].repeat_interleave(group, 0)
    )
    if causal:
        scores = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -INF)
    np.testing.assert_allclose(lse, scores.logsumexp(-1).T.numpy(), atol=1e-13)


# What a cache asks of attention ---------------------------------------------------------------


def test_keys_are_rotated_by_their_positions():
    """Keys of one, of width two, against a query of one: scores are cosines."""
    table = np.stack([np.cos(np.arange(9.0)), np.sin(np.arange(9.0))], 1).astype(np.float32)
    keys = [[1.0, 0.0]] * 4

    def total(**options):
        _, lse = attend([[[1.0, 0.0]]], keys, keys, sm_scale=1.0, rope_table=table, **options)
        return float(np.exp(lse[0, 0]))

    cosines = np.exp(np.cos(np.arange(9.0)))
    assert total() == pytest.approx(cosines[:4].sum())
    assert total(key_starts=np.array([2])) == pytest.approx(cosines[2:4].sum())
    tree = {"tree_mask": np.ones((1, 2), bool), "tree_lens": np.array([2])}
    assert total(**tree, tree_positions=np.array([[7, 20]])) == pytest.approx(
        cosines[[0, 1, 7, 8]].sum()
    )
    assert total(**tree, tree_positions=np.array([[6]])) == pytest.approx(
        cosines[[0, 1, 6, 3]].sum()
    )


def test_a_window_counts_from_the_depth_of_a_node():
    """Four old keys, two roots and a child of the first; equal scores, so keys are counted."""
    keys = [[0.0]] * 7
    tree = {
        "tree_mask": np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], bool),
        "tree_positions": np.array([[4, 4, 5]]),
    }

    def seen(**options):
        lse = attend([[[0.0]]] * 3, keys, keys, **tree, **options)[1]
        return np.round(np.exp(lse[:, 0])).astype(int).tolist()

    assert seen() == [5, 5, 6]
    assert seen(window=3) == [3, 3, 3]
    assert seen(window=1) == [1, 1, 1]
    assert seen(window=1, sink_tokens=2) == [3, 3, 3]
    del tree["tree_positions"]
    assert seen(window=3) == [3, 2, 2]


def test_a_node_is_a_sink_token_by_its_depth():
    """Three roots of an empty sequence; a child of the first, one of the last, and its child."""
    parents = [-1, -1, -1, 0, 2, 4]
    mask = np.eye(6, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    tree = {"tree_mask": mask, "tree_positions": np.array([[0, 0, 0, 1, 1, 2]])}
    keys = [[0.0]] * 6

    def seen(**options):
        lse = attend([[[0.0]]] * 6, keys, keys, **tree, **options)[1]
        return np.round(np.exp(lse[:, 0])).astype(int).tolist()

    assert seen(window=1) == [1, 1, 1, 1, 1, 1]
    assert seen(window=1, sink_tokens=1) == [1, 1, 1, 2, 2, 2]
    assert seen(window=1, sink_tokens=2) == [1, 1, 1, 2, 2, 3]


# merge_states --------------------------------------------------------------------------------


def test_merging_by_hand():
    """Totals of 1 and 3, then 4; base 2 likewise."""
    out_a, out_b = np.float32([[[8.0, 0.0]]]), np.float32([[[0.0, 4.0]]])
    for base, log in (("e", np.log), ("2", np.log2)):
        a, b = (log(np.float64([[total]])) for total in (1.0, 3.0))
        out, lse = reference.merge_states(out_a, a, out_b, b, lse_base=base)
        np.testing.assert_allclose(out, [[[2.0, 3.0]]])
        np.testing.assert_allclose(lse, log([[4.0]]))
        many = reference.merge_states(np.stack([out_a, out_b]), np.stack([a, b]), lse_base=base)
        assert np.array_equal(many[0], out) and np.array_equal(many[1], lse)


@pytest.mark.parametrize("base", ["e", "2"])
def test_merging_with_nothing(base):
    """Not even NaN comes from a state that saw no key."""
    some, none = from_values([[[1.0, 2.0]]], "bf16"), from_values([[[np.nan, np.inf]]], "bf16")
    one, minus = np.float32([[0.5]]), np.float32([[-INF]])
    for pair in ((some, one, none, minus), (none, minus, some, one)):
        out, lse = reference.merge_states(*pair, lse_base=base)
        assert out.tolist() == [[[1.0, 2.0]]] and lse[0, 0] == pytest.approx(0.5)
    out, lse = reference.merge_states(none, minus, none, minus, lse_base=base)
    assert out.tolist() == [[[0.0, 0.0]]] and lse.tolist() == [[-INF]]
    for strange in (np.nan, INF):
        out, lse = reference.merge_states(some, one, some, np.float32([[strange]]), lse_base=base)
        assert not np.isfinite(lse).any() and not np.isfinite(out).any()


def test_merging_parts_gives_the_whole():
    rng = np.random.default_rng(6)
    scores, values = rng.standard_normal((3, 2, 12)) * 5, rng.standard_normal((12, 4))
    total = np.exp(scores).sum(-1)
    whole = np.exp(scores) @ values / total[..., None]
    outs, lses = [], []
    for part in (slice(0, 1), slice(1, 8), slice(8, 12)):
        weights = np.exp(scores[..., part])
        outs.append((weights @ values[part] / weights.sum(-1)[..., None]).astype(np.float32))
        lses.append(np.log(weights.sum(-1)))
    out, lse = reference.merge_states(np.stack(outs), np.stack(lses))
    np.testing.assert_allclose(out, whole, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(total), atol=1e-13)


def test_formats_are_read_as_they_are():
    rows = np.full((1, 1, 3), 1.5, ml_dtypes.bfloat16)
    out, _ = reference.merge_states(rows, np.zeros((1, 1)), rows, np.zeros((1, 1)))
    assert out.tolist() == [[[1.5, 1.5, 1.5]]]
