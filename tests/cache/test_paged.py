"""`PagedKVCache`: steps of prefill and decode, what it keeps, and the tables that it gives out.

`Twin` (paged_cases.py) makes each call of the cache and of the model, and compares everything.
"""

from __future__ import annotations

import numpy as np
import pytest
from gather_cases import as_numpy
from helpers import DTYPE, from_values, to_device
from paged_cases import Twin, rope_of

import kvcupy as kv
from kvcupy import reference

FLOATS = ("fp32", "fp16", "bf16")


# --- Steps ---


def test_prefill_and_decode(device):
    twin = Twin(device)
    twin.prefill("a", 6)
    for _ in range(5):
        twin.step("a", [1])
    assert twin.cache.sequence_length("a") == twin.cache.total_length == 11
    assert twin.cache.num_available_pages == 40 - 3


def test_a_mixed_batch(device):
    """Prefill, a chunk of one, decode, in an order other than that of their arrival."""
    twin = Twin(device, seed=1)
    twin.prefill("a", 6, "b", 8, "c", 11, "d", 16)
    twin.add("e")
    twin.step("dbeca", [1, 5, 9, 1, 2])
    twin.step("ea", [1, 1])  # a subset
    twin.step("bced", [1, 1, 1, 1])
    assert twin.lengths() == {"a": 9, "b": 14, "c": 13, "d": 18, "e": 11}


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunks_give_what_the_whole_gives(device, chunk):
    """The model has both; the cache is compared with it in each."""
    twin = Twin(device, seed=chunk)
    twin.add("chunks")
    for start in range(0, 21, chunk):
        twin.step(["chunks"], [min(chunk, 21 - start)])


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("fmt", FLOATS)
def test_formats_and_page_sizes(device, fmt, page_size):
    twin = Twin(device, seed=2, dtype=fmt, page_size=page_size, num_pages=80)
    twin.prefill("a", 17, "b", 1, "c", 16)
    twin.step("bca", [3, 1, 1])
    twin.fork("a", "d", 13)
    twin.step("abcd", [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "width", "v_width"),
    [(2, 2, 8, None), (6, 1, 16, None), (28, 4, 16, None), (12, 2, 100, None), (4, 2, 24, 40),
     (4, 2, 40, 24), (3, 3, 7, 1), (8, 4, 128, 128), (32, 4, 64, None)],
)  # fmt: skip
def test_heads_and_widths(device, q_heads, kv_heads, width, v_width):
    shape = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": width}
    twin = Twin(device, seed=3, num_layers=1, **shape, v_head_dim=v_width, dtype="fp16")
    twin.prefill("a", 9, "b", 5)
    twin.step("ba", [1, 1])
    twin.step("ab", [2, 1])


@pytest.mark.parametrize(("query", "cache"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16")])
def test_a_cache_of_another_format(device, query, cache):
    """Rows are rounded once to the cache's format; results come in that of the query."""
    twin = Twin(device, seed=4, fmt=query, dtype=cache)
    twin.prefill("a", 9)
    twin.step("a", [1])


@pytest.mark.parametrize("padding", [1, 30])
@pytest.mark.parametrize("given_out", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_past_the_step(device, padding, given_out, packed):
    """They hold NaN, are not attended to, and those of `out` stay, or are zero if it is made."""
    twin = Twin(device, seed=5, dtype="bf16", rope=rope_of(8))
    options = {"padding": padding, "given_out": given_out, "packed": packed}
    twin.add("a", "b")
    for lens in ([5, 2], [1, 1], [1, 4]):
        twin.step("ab", lens, **options)


@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
def test_packed_rows(device, mode):
    """`attention_qkv` on (T, Hq + 2H, D), which stays as it was."""
    twin = Twin(device, seed=6, rope=rope_of(8), rope_mode=mode)
    twin.add("a", "b")
    for lens in ([9, 5], [1, 1], [3, 1]):
        twin.step("ab", lens, packed=True)


def test_strided_rows(device):
    """Rows of every other token of wider arrays, and an output by columns."""
    twin = Twin(device, seed=7, num_layers=1)
    twin.add("a")
    twin.both("begin", ["a"], [5], None)
    rows = [np.float32(twin.rng.standard_normal((10, 12, 8))) for _ in range(3)]
    cuts = (lambda a: a[::2, :4], lambda a: a[1::2, 4:6], lambda a: a[::-2, 8:10])
    query, key, value = (to_device(device, a, cut) for a, cut in zip(rows, cuts, strict=True))
    out = to_device(device, np.zeros((4, 5, 8), np.float32), lambda a: a.swapaxes(0, 1))
    assert twin.cache.attention(0, query, key, value, out=out) is out
    want, allowed = twin.model.attention(
        0, *(np.ascontiguousarray(cut(a)) for a, cut in zip(rows, cuts, strict=True))
    )
    assert (np.abs(as_numpy(device, out, "fp32") - want) <= allowed).all()
    twin.both("end")
    twin.check()


@pytest.mark.parametrize("masks", [{"sm_scale": 0.05}, {"sm_scale": 2.0, "logits_soft_cap": 5.0}])
def test_scale_and_soft_cap(device, masks):
    twin = Twin(device, seed=8)
    twin.prefill("a", 9)
    twin.step("a", [4], **masks)
    twin.step("a", [1], **masks)


def test_a_stream(device):
    """Several steps go to a stream of their own, one after another, without a wait between."""
    twin, stream = Twin(device, seed=9, rope=rope_of(8)), device.stream()
    twin.add("a", "b")
    for lens in ([9, 5], [1, 1], [3, 1], [1, 1], [1, 1]):
        twin.step("ab", lens, stream=stream)


def test_every_sequence_sees_itself_alone(device):
    """One is full of NaN; its pages, when they come back, are another's."""
    twin = Twin(device, seed=10, num_pages=4, num_layers=1)
    cache = twin.cache
    nan = device.asarray(np.full((16, 4, 8), np.nan, np.float32))
    twin.prefill("a", 6)
    cache.add_sequence("nan")
    with cache.forward(["nan"], [8]):
        cache.attention(0, nan[:8], nan[:8, :2], nan[:8, :2])
    twin.both("begin", ["a"], [1], None)
    twin.attend()
    twin.both("end")
    cache.remove_sequence("nan")
    twin.check()
    twin.step("a", [9])
    assert cache.num_available_pages == 0


def test_pages_hold_all_that_they_have_slots_for(device):
    """The last slot of the last page too; pages that were used come back."""
    twin = Twin(device, seed=11, num_pages=3, page_size=4)
    twin.prefill("a", 7, "b", 4)
    assert twin.cache.num_available_pages == 0
    twin.step("a", [1])
    assert not twin.step("a", [1])
    twin.remove("b")
    twin.step("a", [4])
    assert twin.cache.sequence_length("a") == 12
    twin.remove("a")
    twin.check_empty()
    twin.prefill("c", 12)


# --- Sequences ---


def test_names_of_sequences(device):
    """Any hashable: among them numbers that a fork under the number -1 - n would collide with."""
    twin = Twin(device, seed=12)
    names = [0, -1, 1, -2, "one", ("a", 2), None, frozenset([3])]
    twin.add(*names)
    twin.step(names, [*range(1, 9)])
    for name in (0, 1):
        twin.fork(name, (name, "fork"))
        twin.pop((name, "fork"), 1)
    assert all(name in twin.cache for name in names)
    assert "two" not in twin.cache and 2 not in twin.cache
    twin.step(names, [1] * 8)


def test_lengths(device):
    twin = Twin(device, seed=13)
    cache = twin.cache
    assert "a" not in cache and cache.total_length == 0 and cache.num_available_pages == 40
    twin.add("a")
    assert "a" in cache and cache.sequence_length("a") == 0 and cache.num_available_pages == 40
    twin.step("a", [6])
    twin.fork("a", "b")
    assert cache.total_length == 12  # what is shared counts for both
    cache.begin_forward(["a"], [3])
    assert cache.sequence_length("a") == 9 and cache.total_length == 15
    cache.end_forward()
    assert cache.sequence_length("a") == 9


def test_clear(device):
    twin = Twin(device, seed=14)
    twin.prefill("a", 9, "b", 5)
    twin.fork("a", "c")
    twin.clear()
    assert "a" not in twin.cache and "c" not in twin.cache
    twin.check_empty()
    twin.prefill("a", 20, "b", 3)
    twin.step("ab", [1, 1])


def test_clear_within_a_step(device):
    """The step goes too, and the next one may begin."""
    twin = Twin(device, seed=25)
    twin.prefill("a", 9, "b", 5)
    twin.both("begin", ["b"], [3], None)
    twin.attend()
    twin.clear()
    with pytest.raises(kv.KvcupyError):
        twin.cache.query_positions()
    with pytest.raises(kv.KvcupyError):
        twin.cache.end_forward()
    twin.check_empty()
    twin.prefill("b", 7)


def test_numbers_and_lists_of_numpy(device):
    """Names, lengths, positions, parents and leaves in arrays, tuples and NumPy's own integers."""
    twin = Twin(device, seed=24)
    twin.prefill(0, 6, 1, 5)
    twin.model.begin([1, 0], [3, 1], [[-1, 0, 0], [-1]])
    trees = (np.array([-1, 0, 0]), (-1,))
    twin.cache.begin_forward(np.array([1, 0]), np.array([3, 1], np.int32), token_tree=trees)
    twin.attend()
    twin.both("end")
    twin.cache.commit_token_tree((1, 0), np.array([2, -1]))
    twin.model.commit([1, 0], [2, -1])
    twin.both("fork", 1, 2, np.int64(3))
    twin.both("pop", np.int64(0), np.int32(2))
    twin.slide(2, np.int64(3), np.int32(1))
    twin.check()
    twin.step([0, 1, 2], [2, 1, 3])


# --- Contents ---


@pytest.mark.parametrize("dtype", [None, "fp32", "fp16", "bf16"])
def test_get_kv(device, dtype):
    twin = Twin(device, seed=15, dtype="fp16", v_head_dim=12)
    twin.prefill("b", 3, "a", 11)
    fmt = dtype or "fp16"
    for start, stop in ((0, 11), (0, 1), (3, 9), (10, 11), (4, 8), (5, 5)):
        got = twin.cache.get_kv("a", start, stop, dtype=dtype)
        assert tuple(got[0].shape) == (2, stop - start, 2, 8)
        assert tuple(got[1].shape) == (2, stop - start, 2, 12)
        want = twin.model.get_kv("a", start, stop)
        for side, array, values in zip("KV", got, want, strict=True):
            if start < stop:
                twin.compare_rows(side, array, values, fmt, side)


def test_get_kv_is_a_copy(device):
    """Its arrays are the caller's: the cache stays as it is, and they do."""
    twin = Twin(device, seed=16)
    twin.prefill("a", 6)
    key, value = twin.cache.get_kv("a", 0, 6)
    before = device.to_numpy(key).copy()
    value[...] = 0
    twin.check()
    twin.set_kv("a", 0, 6)
    np.testing.assert_array_equal(device.to_numpy(key), before)


@pytest.mark.parametrize("fmt", FLOATS)
def test_set_kv(device, fmt):
    """Within a page, across pages, all, none; steps that follow see what was set."""
    twin = Twin(device, seed=17, dtype="bf16", fmt="bf16", v_head_dim=12)
    twin.prefill("a", 11, "b", 6)
    for start, count in ((1, 2), (3, 6), (10, 1), (0, 11), (4, 0)):
        twin.set_kv("a", start, count, fmt)
    twin.step("ab", [1, 1])


def test_what_get_kv_gives_goes_back_by_set_kv(device):
    twin = Twin(device, seed=18, dtype="bf16", rope=rope_of(8))
    twin.prefill("a", 11)
    held = [as_numpy(device, a, "bf16").copy() for a in twin.cache.get_kv("a", 2, 9)]
    twin.set_kv("a", 2, 7)
    twin.cache.set_kv("a", 2, *(to_device(device, a) for a in held))
    again = [as_numpy(device, a, "bf16") for a in twin.cache.get_kv("a", 2, 9)]
    for one, other in zip(held, again, strict=True):
        np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))


# --- Tables ---


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tables_are_those_of_the_operations(device, page_size):
    """`kv.slot_mapping` and `kv.page_table_csr` of the block table give what the cache gives."""
    twin = Twin(device, seed=19, page_size=page_size, num_pages=70)
    cache = twin.cache
    twin.prefill("a", 17, "b", 2, "c", 16)
    twin.fork("a", "d")
    for lens in ([1, 3, 2, 16], [1, 1, 1, 1]):
        cache.begin_forward(list("dcba"), lens)
        seq_lens = device.asarray(np.int32([cache.sequence_length(name) for name in "dcba"]))
        table = cache.block_table()
        assert table.dtype == np.int32
        longest = int(device.to_numpy(seq_lens).max())
        assert tuple(table.shape) == (4, -(-longest // page_size))
        rows = zip(device.to_numpy(table), device.to_numpy(seq_lens), strict=True)
        assert not any(row[-(-length // page_size) :].any() for row, length in rows)
        slots = kv.slot_mapping(table, seq_lens, device.asarray(np.int32(lens)), page_size)
        np.testing.assert_array_equal(*map(device.to_numpy, (cache.slot_mapping(), slots)))
        got, want = cache.page_table_csr(), kv.page_table_csr(table, seq_lens, page_size)
        assert len(got) == 3
        for mine, other in zip(got, want, strict=True):
            assert mine.dtype == np.int32
            np.testing.assert_array_equal(*map(device.to_numpy, (mine, other)))
        cache.end_forward()


def test_tables_lead_to_the_tokens(device):
    """The rows of the pool, by the pages of the CSR table, are what `get_kv` gives."""
    twin = Twin(device, seed=20)
    twin.prefill("a", 9, "b", 6)
    twin.fork("a", "c", 7)
    twin.step("bac", [1, 4, 2])
    cache = twin.cache
    cache.begin_forward(["c", "b"], [1, 1])
    indptr, pages, last = (device.to_numpy(a) for a in cache.page_table_csr())
    for i, name in enumerate("cb"):
        held, length = device.to_numpy(cache.pool.v(1)), cache.sequence_length(name) - 1
        mine = pages[indptr[i] : indptr[i + 1]]
        assert (len(mine) - 1) * 4 + last[i] == length + 1
        rows = held[mine].reshape(-1, 2, 8)[:length]
        np.testing.assert_array_equal(rows, twin.model.get_kv(name, 0, length)[1][1])
    cache.end_forward()


def test_tables_before_and_after_attention(device):
    """They are the same in all layers, whichever is asked for first, and of the running step."""
    twin = Twin(device, seed=21, rope=rope_of(8))
    twin.add("a", "b")
    for lens in ([5, 3], [1, 1], [2, 7]):
        twin.both("begin", list("ab"), lens, None)
        twin.check_tables([])
        twin.attend()
        twin.check_tables([0, 1])
        twin.both("end")


def test_positions_for_a_table_of_ones_own(device):
    """`query_positions` are those that `apply_rope` takes, with a cache that does not rotate."""
    table, twin = rope_of(8), Twin(device, seed=22, num_layers=1, rope=rope_of(8))
    plain = kv.PagedKVCache(
        num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=8, num_pages=40, page_size=4,
        dtype="fp32", device=device,
    )  # fmt: skip
    for cache in (plain, twin.cache):
        cache.add_sequence("a")
    rng = np.random.default_rng(22)
    for count in (6, 1, 3):
        rows = [np.float32(rng.standard_normal((count, h, 8))) for h in (4, 2, 2)]
        query, key, value = map(device.asarray, rows)
        with twin.cache.forward(["a"], [count]):
            want = device.to_numpy(twin.cache.attention(0, query, key, value))
        plain.begin_forward(["a"], [count])
        kv.apply_rope(query, key, device.asarray(table), plain.query_positions())
        got = device.to_numpy(plain.attention(0, query, key, value))
        plain.end_forward()
        np.testing.assert_allclose(got, want, atol=1e-5)


# --- How it is made ---


def test_defaults(device):
    """bf16 in pages of 16, no rotation, 8192 tokens per step."""
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=8, num_pages=600, device=device
    )
    assert (cache.pool.page_size, cache.pool.dtype, cache.pool.num_pages) == (16, "bf16", 600)
    cache.add_sequence(0)
    with pytest.raises(ValueError, match="append_lens"):
        cache.begin_forward([0], [8193])
    cache.begin_forward([0], [8192])
    cache.end_forward()
    assert cache.num_available_pages == 600 - 512


@pytest.mark.parametrize("dtype", ["bf16", DTYPE["bf16"], DTYPE["bf16"].type])
def test_names_of_a_format(device, dtype):
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=8, num_pages=4, dtype=dtype,
        device=device,
    )  # fmt: skip
    assert cache.pool.dtype == "bf16"


def test_torch_tensors(device):
    """In: queries, keys, values; out: their own library, in place."""
    torch = pytest.importorskip("torch")
    if device.kind != "host":
        pytest.skip("CPU tensors are the host device's")
    twin = Twin(device, seed=23, dtype="bf16", num_layers=1)
    twin.add("a")
    twin.both("begin", ["a"], [5], None)
    rows = [
        from_values(twin.rng.standard_normal((5, h, 8)), "bf16").view(np.uint16) for h in (4, 2, 2)
    ]
    tensors = [torch.from_numpy(a.copy()).view(torch.bfloat16) for a in rows]
    out = twin.cache.attention(0, *tensors)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    want, allowed = twin.model.attention(0, *(a.view(DTYPE["bf16"]) for a in rows))
    got = reference.decode(out.view(torch.uint16).numpy(), "bf16")
    assert (np.abs(got - want) <= allowed).all()
    twin.both("end")
    twin.check()
