"""What kvcupy writes in torch tensors counts as a change in place, as torch's own operations do."""

from __future__ import annotations

import numpy as np
import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

SLOTS = torch.tensor([1, 3])


def version(*tensors):
    return [t._version for t in tensors]


def raised(before, *tensors):
    """Which of the tensors have changed since."""
    return [now > then for now, then in zip(version(*tensors), before, strict=True)]


def test_backward_notices_what_was_rotated():
    """As with `q.mul_`: what the graph has saved is there no more."""
    table = kv.rope_table(16, 8, device="host")
    weight = torch.ones(1, 2, 8, requires_grad=True)
    query = weight * torch.arange(16.0).view(1, 2, 8)
    loss = (query * query).sum()
    with torch.no_grad():
        kv.apply_rope(query, torch.ones(1, 2, 8), torch.from_numpy(table), torch.tensor([3]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_views_share_the_counter():
    whole = torch.zeros(2, 4, 2, 8)
    key = torch.ones(2, 2, 8)
    before = version(whole, key)
    kv.store_kv(key, key, whole[0], whole[1], SLOTS)
    assert raised(before, whole, key) == [True, False]


def test_every_operation_that_writes():
    rows = torch.randn(2, 2, 8)
    k, v, scales = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2)
    packed = torch.zeros(4, 2, 8, dtype=torch.int8)
    table, positions = torch.from_numpy(kv.rope_table(16, 8, device="host")), torch.tensor([0, 1])
    query, out, lse = torch.randn(2, 2, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2)
    pages = torch.tensor([[0], [1]], dtype=torch.int32)
    lengths = torch.tensor([2, 2], dtype=torch.int32)
    latent, rope_key, mla = torch.randn(2, 6), torch.randn(2, 2), torch.zeros(4, 8)
    slots = torch.zeros(2, dtype=torch.int64)
    paged = k.view(2, 2, 2, 8), v.view(2, 2, 2, 8)
    calls = {
        "store": (lambda: kv.store_kv(rows, rows, k, v, SLOTS), [k, v]),
        "scales": (
            lambda: kv.store_kv(rows, rows, packed, packed.clone(), SLOTS, k_scale_cache=scales,
                                v_scale_cache=scales.clone()), [packed, scales]),
        "mla": (lambda: kv.store_mla(latent, rope_key, mla, SLOTS), [mla]),
        "rotate": (lambda: kv.apply_rope(query, rows, table, positions), [query, rows]),
        "rotate and store": (
            lambda: kv.rope_store_kv(query, rows, rows.clone(), table, positions, k, v, SLOTS),
            [query, rows, k, v]),
        "in two": (
            lambda: kv.rope_store_kv(query, rows, rows.clone(), table, positions, k, v, SLOTS,
                                     alt_stream=None), [query, rows, k, v]),
        "gather": (lambda: kv.gather_kv(k, v, SLOTS, k_out=out, v_out=out.clone()), [out]),
        "attend": (
            lambda: kv.paged_attention(query, *paged, pages, lengths, out=out, lse_out=lse),
            [out, lse]),
        "merge": (
            lambda: kv.merge_states(query, lse.clone(), rows, lse.clone(), out=out, lse_out=lse),
            [out, lse]),
        "copy pages": (
            lambda: kv.copy_pages((k, v), torch.tensor([0]), torch.tensor([2])), [k, v]),
        "slots": (lambda: kv.slot_mapping(pages, lengths, torch.ones_like(lengths), 2, out=slots),
                  [slots]),
        "copy": (lambda: kv.device("host").copy(out, query), [out]),
        "an ArrayView": (
            lambda: kv.store_kv(rows, rows, kv.view_as(k, "fp32")[:], v, SLOTS), [k, v]),
    }  # fmt: skip
    inputs = [table, positions, pages, lengths, latent, rope_key, SLOTS]
    unread = version(*inputs)
    for name, (call, written) in calls.items():
        before = version(*written)
        call()
        assert all(raised(before, *written)), name
    assert version(*inputs) == unread


def test_a_call_that_raises_counts_as_nothing():
    k, v = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    before = version(k, v)
    with pytest.raises(ValueError, match="value"):
        kv.store_kv(torch.ones(2, 2, 8), torch.ones(2, 3, 8), k, v, SLOTS)
    kv.store_kv(torch.ones(0, 2, 8), torch.ones(0, 2, 8), k, v, SLOTS[:0])
    assert version(k, v) == before


def test_inference_tensors_have_no_counter():
    with torch.inference_mode():
        k, v = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
        kv.store_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 8), k, v, SLOTS)
    kv.store_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 8), k, v, SLOTS)
    assert bool((k[SLOTS] == 1).all())


def test_output_of_a_paged_cache():
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=2, num_kv_heads=2, head_dim=8, num_pages=2, page_size=4,
        dtype="fp32", device="host",
    )  # fmt: skip
    cache.add_sequence(0)
    rows, out = torch.ones(1, 2, 8), torch.zeros(1, 2, 8)
    before = version(rows, out)
    with cache.forward([0], [1]):
        cache.attention(0, rows, rows, rows, out=out)
    assert raised(before, rows, out) == [False, True]
    assert isinstance(cache.pool.k(0), np.ndarray)
