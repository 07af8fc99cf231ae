"""Prove the attention of the specification by hand, by a more naive loop, and against torch."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from helpers import FORMATS, QUANTISED, from_values

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
    ],
)
def test_three_keys(options, want, total):
    """Weights of 1, 2 and 5."""
    out, lse = attend([[[1.0]]], *THREE, **options)
    np.testing.assert_allclose(out[0, 0], want, rtol=1e-6)
    np.testing.assert_allclose(lse, LOG(total), rtol=1e-6)


def test_soft_cap():
    """Two scores, 3 and -1, capped at 2; the sink is neither scaled nor capped."""
    keys, values = [[3.0], [-1.0]], [[1.0], [0.0]]
    first, second = (2 * math.tanh(score / 2) for score in (3.0, -1.0))
    out, lse = attend([[[2.0]]], keys, values, sm_scale=0.5, logits_soft_cap=2.0)
    assert out[0, 0, 0] == pytest.approx(1 / (1 + math.exp(second - first)))
    assert lse[0, 0] == pytest.approx(LOG(math.exp(first) + math.exp(second)))
    out, lse = attend(
        [[[2.0]]], keys, values, sm_scale=0.5, logits_soft_cap=2.0, sinks=np.float32([7.0])
    )
    total = math.exp(first) + math.exp(second) + math.exp(7.0)
    assert out[0, 0, 0] == pytest.approx(math.exp(first) / total)
    assert lse[0, 0] == pytest.approx(LOG(total))


def test_causal_rows():
    """The last two of three tokens: the first of them does not see the last."""
    query = [[[1.0]], [[1.0]]]
    out, lse = attend(query, *THREE)
    np.testing.assert_allclose(out[:, 0], [[8 / 3, 16 / 3], [11.0, 12.0]], rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], np.log([3.0, 8.0]), rtol=1e-6)
    out, _ = attend(query, *THREE, causal=False)
    np.testing.assert_allclose(out[:, 0], [[11.0, 12.0]] * 2, rtol=1e-6)
    out, _ = attend(query, *THREE, causal=False, window=1)
    np.testing.assert_allclose(out[:, 0], [[80 / 7, 96 / 7], [16.0, 16.0]], rtol=1e-6)


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


def test_more_queries_than_keys():
    """Without a mask all of them see all keys; else those before the first position see none."""
    query = [[[1.0]]] * 5
    out, _ = attend(query, *THREE, causal=False)
    np.testing.assert_allclose(out[:, 0], [[11.0, 12.0]] * 5, rtol=1e-6)
    for options in ({}, {"causal": False, "window": 9}):
        out, lse = attend(query, *THREE, **options)
        assert not out[:2].any() and (lse[:2] == -INF).all() and (lse[2:] > -INF).all()


def test_faults():
    keys = np.ones((4, 1, 1), np.float32)
    k, v, _ = one_sequence(keys, keys)  # three pages of two
    table = np.array([[1, -1, 2], [1, 3, 9], [2, 77, 88]])
    query = np.ones((4, 1, 1), np.float32)
    out, lse, faults = reference.paged_attention(query, k, v, table, np.array([6, 9, 2]),
                                                 query_lens=np.array([1, 1, 3]))  # fmt: skip
    assert np.exp(lse[:, 0]).round(3).tolist() == pytest.approx([4 * math.e, 2 * math.e, 0, math.e],
                                                               abs=1e-3)  # fmt: skip
    assert faults == {
        "block_table": [(4, 3), (5, 9)], "seq_lens": [(1, 9)], "query_lens": [(2, 3)]
    }  # fmt: skip
    assert out[:, 0, 0].tolist() == [1, 1, 0, 1]


def test_what_no_row_needs_is_no_fault():
    keys = np.ones((4, 1, 1), np.float32)
    k, v, _ = one_sequence(keys, keys)
    table = np.array([[9, 1, 9], [9, 9, 9]])
    out, _, faults = reference.paged_attention(
        np.ones((3, 1, 1), np.float32), k, v, table, np.array([4, 99]),
        query_lens=np.array([1, 0]), window=2,
    )  # fmt: skip
    assert not any(faults.values())
    assert out[:, 0, 0].tolist() == [1, 0, 0]


# A more naive loop ---------------------------------------------------------------------------


def naive(query, keys, values, length, new, mask, scaling, cap, sinks, window, first, causal):
    """One sequence, all keys at once, hidden ones by a mask of its own; nothing is paged."""
    i, j = np.arange(len(query))[:, None], np.arange(length)[None]
    position = length - new + i
    hidden = np.zeros((len(query), length), bool)
    if mask is not None:
        full = np.ones((len(query), length), bool)
        full[:, length - new :] = mask[:, :new]
        hidden |= ~full
    elif causal:
        hidden |= j > position
    if window is not None:
        far = (j <= position - window) & (j >= first)
        hidden |= far & (j < length - new) if mask is not None else far
    group = query.shape[1] // keys.shape[1]
    keys, values = (np.repeat(a.astype(np.float64), group, 1) for a in (keys, values))
    scores = np.einsum("thd,nhd->thn", query.astype(np.float64), keys) * scaling
    if cap:
        scores = cap * np.tanh(scores / cap)
    weights = np.exp(scores) * ~hidden[:, None]
    total = weights.sum(2) + (0 if sinks is None else np.exp(sinks.astype(np.float64)))
    return np.einsum("thn,nhv->thv", weights, values) / total[..., None], np.log(total)


VARIANTS = [
    {},
    {"causal": False},
    {"window": 3},
    {"window": 5, "causal": False},
    {"window": 2, "sink_tokens": 3},
    {"learned": True},
    {"learned": True, "window": 4, "cap": 6.0},
    {"cap": 3.0, "scale": 0.3},
    {"tree": True},
    {"tree": True, "window": 4, "sink_tokens": 2, "cap": 9.0},
]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_against_a_naive_loop(variant, layout):
    rng = np.random.default_rng(3)
    lens, new = np.array([7, 1, 9, 4]), np.array([3, 1, 9, 0])
    pages = rng.permutation(12)
    table = np.full((4, 4), 999)
    cache = [np.full((12, 3, 2, w), np.nan, np.float32) for w in (5, 4)]
    keys = [rng.standard_normal((n, 2, 5)).astype(np.float32) for n in lens]
    values = [rng.standard_normal((n, 2, 4)).astype(np.float32) for n in lens]
    for b, length in enumerate(lens):
        used = -(-length // 3)
        table[b, :used], pages = pages[:used], pages[used:]
        for j in range(length):
            cache[0][table[b, j // 3], j % 3] = keys[b][j]
            cache[1][table[b, j // 3], j % 3] = values[b][j]
    query = rng.standard_normal((new.sum() + 2, 6, 5)).astype(np.float32)
    mask = (rng.random((len(query), 11)) < 0.6) if variant.get("tree") else None
    first = variant.get("sink_tokens", 0)
    logits = rng.standard_normal(6).astype(np.float32) if variant.get("learned") else None
    scaling, window = variant.get("scale", 5**-0.5), variant.get("window")
    causal = variant.get("causal", True)
    out, lse, faults = reference.paged_attention(
        query, *(c if layout == "NHD" else c.swapaxes(1, 2) for c in cache), table, lens,
        query_lens=new, layout=layout, sm_scale=variant.get("scale"), causal=causal,
        window=window, sink_tokens=first, sinks=logits,
        logits_soft_cap=variant.get("cap"), tree_mask=mask,
    )  # fmt: skip
    assert not any(faults.values()) and not out[-2:].any() and not lse[-2:].any()
    start = 0
    for b in range(4):
        mine = slice(start, start + new[b])
        want, want_lse = naive(
            query[mine], keys[b], values[b], lens[b], new[b], None if mask is None else mask[mine],
            scaling, variant.get("cap"), logits, window, first, causal,
        )  # fmt: skip
        np.testing.assert_allclose(out[mine], want, atol=1e-13)
        np.testing.assert_allclose(lse[mine], want_lse, atol=1e-13)
        start += new[b]


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
        want, want_lse = naive(query, keys, values, 5, 1, None, 0.5, None, None, None, 0, True)
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

TREE = np.array([[True, False, True]])


@pytest.mark.parametrize(
    ("options", "want", "total"),
    [
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
def test_part_of_three_keys(options, want, total):
    counts = ("key_starts", "tree_lens")
    options = {n: np.array([v]) if n in counts else v for n, v in options.items()}
    out, lse = attend([[[1.0]]], *THREE, **options)
    np.testing.assert_allclose(out[0, 0], want, rtol=1e-6)
    np.testing.assert_allclose(lse, LOG(total) if total else -INF, rtol=1e-6)


def with_hole(start, size, length=5, pages=6):
    """What attends over keys 0 to 4, of which those from `start` on lie `size` slots further."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((length, 1, 2)).astype(np.float32)
    slots = np.array([p if p < start else p + size for p in range(length)])
    cache = np.full((2 * pages, 1, 2), np.nan, np.float32)
    cache[slots] = rows
    cache = cache.reshape(pages, 2, 1, 2)
    return reference.paged_attention(
        np.ones((1, 1, 2), np.float32), cache, cache, np.arange(pages)[None], np.array([length]),
        evicted_starts=np.array([start]), evicted_lens=np.array([size]),
    )  # fmt: skip


def test_holes():
    """Wherever keys lie, they are the same keys; those past the table are a fault."""
    want = with_hole(0, 0)
    for start, size in ((0, 3), (2, 4), (3, 7), (4, 1), (5, 6), (9, 100)):
        out, lse, faults = with_hole(start, size)
        assert np.array_equal(out, want[0]) and np.array_equal(lse, want[1])
        assert not any(faults.values())
    keys = np.ones((4, 1, 1), np.float32)
    caches = one_sequence(keys, keys)
    for start, size, seen in ((1, 1, 3), (0, 3, 1), (3, 5, 3), (4, 1, 4)):
        _, lse, faults = reference.paged_attention(
            np.zeros((1, 1, 1), np.float32), *caches, np.array([4]),
            evicted_starts=np.array([start]), evicted_lens=np.array([size]),
        )  # fmt: skip
        assert lse[0, 0] == pytest.approx(LOG(seen))
        assert faults["seq_lens"] == ([] if seen == 4 else [(0, 4)])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_is_multiplying_complex_numbers(interleaved):
    rng = np.random.default_rng(2)
    rows, positions = rng.standard_normal((5, 2, 10)), np.array([0, 3, 6, -4, 99])
    table = reference.rope_table(7, 6).astype(np.float32)
    got = reference.attention.rotate_keys(rows, table, positions, interleaved=interleaved, start=2)
    part = rows[..., 2:8]
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else np.split(part, 2, axis=-1)
    angles = table[[0, 3, 6, 0, 6]].astype(np.float64)[:, None]
    product = (first + 1j * second) * (angles[..., :3] + 1j * angles[..., 3:])
    order = np.stack([product.real, product.imag], -1 if interleaved else -2)
    want = np.concatenate([rows[..., :2], order.reshape(5, 2, 6), rows[..., 8:]], -1)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


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
