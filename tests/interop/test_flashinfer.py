"""FlashInfer's calls, held against what its documentation says, on tensors of the run's device."""

from __future__ import annotations

import copy
import inspect
import math
import subprocess
import sys

import numpy as np
import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

import peer_modules  # noqa: E402
from helpers import full_only  # noqa: E402

from kvcupy.interop import flashinfer  # noqa: E402

PAGE = 4


@pytest.fixture
def place(device):
    return "cpu" if device.kind == "host" else device.torch_name


def ints(values, place, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=place)


def rows(*shape, place, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(place, dtype)


# --- Indices and appends --------------------------------------------------------------------------


def test_positions_are_those_of_the_documentation(place):
    append_indptr, seq_lens = ints([0, 1, 3, 6, 10], place), ints([5, 5, 5, 5], place)
    batch, positions = flashinfer.get_batch_indices_positions(append_indptr, seq_lens, 10)
    assert batch.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4]
    assert batch.dtype == positions.dtype == torch.int32


def test_positions_past_the_tokens_are_padding(place):
    batch, positions = flashinfer.get_batch_indices_positions(
        ints([0, 0, 2], place), ints([3, 2], place), 4
    )
    assert batch.tolist() == [1, 1, -1, -1]
    assert positions.tolist() == [0, 1, -1, -1]
    for x in flashinfer.get_batch_indices_positions(ints([0], place), ints([], place), 2):
        assert x.tolist() == [-1, -1]


def test_positions_are_written_in_place(place):
    """As under a captured graph, whose outputs stay where they are."""
    outs = [torch.full((4,), 9, dtype=torch.int32, device=place) for _ in range(2)]
    arguments = ints([0, 0, 2], place), ints([3, 2], place), 4
    results = flashinfer.get_batch_indices_positions(*arguments, *outs)
    assert [x is y for x, y in zip(results, outs, strict=True)] == [True, True]
    assert [x.tolist() for x in outs] == [[1, 1, -1, -1], [0, 1, -1, -1]]
    only = flashinfer.get_batch_indices_positions(*arguments, positions=outs[1].zero_())
    assert only[1] is outs[1] and outs[1].tolist() == [0, 1, -1, -1]
    with pytest.raises(ValueError, match=r"^positions: expected \(4,\)"):
        flashinfer.get_batch_indices_positions(*arguments, outs[0].zero_(), outs[1][:3])
    assert not outs[0].any()
    with pytest.raises(TypeError, match=r"^batch_indices: expected int32"):
        flashinfer.get_batch_indices_positions(*arguments, outs[0].long())


def test_lengths_are_full_pages_and_the_last(place):
    lengths = flashinfer.get_seq_lens(ints([0, 3, 3, 4], place), ints([13, 0, 8], place), 16)
    assert lengths.tolist() == [45, 0, 8]


# Two sequences of six and three tokens, of which the last three and two are appended.
TABLE = {"kv_indices": [5, 0, 3], "kv_indptr": [0, 2, 3], "kv_last_page_len": [2, 3]}
BATCH, POSITIONS = [0, 0, 0, 1, 1], [3, 4, 5, 1, 2]
SLOTS = [(5, 3), (0, 0), (0, 1), (3, 1), (3, 2)]


def caches(kv_layout, form, place, dtype=torch.float16):
    axes = (PAGE, 2, 8) if kv_layout == "NHD" else (2, PAGE, 8)
    whole = rows(6, 2, *axes, place=place, dtype=dtype)
    return whole if form == "one tensor" else (whole[:, 0].clone(), whole[:, 1].clone())


def parts(cache):
    return cache.unbind(1) if isinstance(cache, torch.Tensor) else cache


def table(place, dtype=torch.int32):
    return {name: ints(values, place, dtype) for name, values in TABLE.items()}


@pytest.mark.covering(2)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["one tensor", "a tuple"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append_writes_the_pages_of_each_token(device, place, kv_layout, form, index_dtype):
    cache = caches(kv_layout, form, place)
    expected = [x.clone() for x in parts(cache)]
    key, value = (rows(7, 2, 8, place=place, seed=s, dtype=torch.float16) for s in (1, 2))
    for i, (page, offset) in enumerate(SLOTS):
        at = (page, offset) if kv_layout == "NHD" else (page, slice(None), offset)
        for x, new in zip(expected, (key, value), strict=True):
            x[at] = new[i]
    batch, positions = (ints(x, place, index_dtype) for x in ([*BATCH, -1], [*POSITIONS, 0]))
    flashinfer.append_paged_kv_cache(
        key, value, batch, positions, cache, **table(place, index_dtype), kv_layout=kv_layout
    )
    for x, y in zip(parts(cache), expected, strict=True):
        assert torch.equal(x, y)
    kv.check_faults(device)


def test_append_agrees_with_the_stand_in(place):
    ours, theirs = (caches("NHD", "a tuple", place) for _ in range(2))
    key, value = (rows(5, 2, 8, place=place, seed=s, dtype=torch.float16) for s in (1, 2))
    arguments = ints(BATCH, place), ints(POSITIONS, place)
    flashinfer.append_paged_kv_cache(key, value, *arguments, ours, **table(place))
    peer_modules.append_paged_kv_cache(key, value, *arguments, theirs, *table(place).values())
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_a_position_without_a_page_is_a_fault(device, place):
    cache = caches("NHD", "one tensor", place)
    before = cache.clone()
    new = rows(2, 2, 8, place=place, dtype=torch.float16)
    positions = ints([3, 8], place)  # sequence 1 has four slots, sequence 0 eight
    flashinfer.append_paged_kv_cache(
        new, new, ints([1, 0], place), positions, cache, **table(place)
    )
    before[3, :, 3] = new[0]
    assert torch.equal(cache, before)
    with pytest.raises(kv.IndexFault, match="store_kv"):
        kv.check_faults(device)


@pytest.mark.parametrize("dtype", [torch.float16, full_only(torch.bfloat16)])
def test_append_mla_writes_two_caches(place, dtype):
    whole = torch.zeros(6, PAGE, 24, dtype=dtype, device=place)
    latent, rope = rows(5, 16, place=place, dtype=dtype), rows(5, 8, place=place, dtype=dtype)
    flashinfer.append_paged_mla_kv_cache(
        latent, rope, ints(BATCH, place), ints(POSITIONS, place), whole[..., :16], whole[..., 16:],
        **table(place),
    )  # fmt: skip
    expected = torch.zeros_like(whole)
    for i, at in enumerate(SLOTS):
        expected[at] = torch.cat((latent[i], rope[i]))
    assert torch.equal(whole, expected)


# --- Rotations ------------------------------------------------------------------------------------


def rotated(x, positions, frequencies, interleaved):
    """Rotate the leading elements of (tokens, heads, width) in float64."""
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    cos, sin = (torch.from_numpy(f(angles))[:, None] for f in (np.cos, np.sin))
    out, width = x.double().cpu(), 2 * len(frequencies)
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (
        slice(0, width // 2), slice(width // 2, width)
    )  # fmt: skip
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def powers(rotary_dim, theta):
    return theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def assert_rotated(x, expected):
    assert torch.allclose(x.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_rope_of_several_sequences(place, rotary_dim, interleave):
    q, k = rows(5, 2, 8, place=place), rows(5, 1, 8, place=place, seed=1)
    positions = [7, 8, 0, 1, 2]
    frequencies = powers(rotary_dim or 8, 1e4) / 2
    expected = [rotated(x, positions, frequencies, interleave) for x in (q, k)]
    flashinfer.apply_rope_inplace(
        q, k, ints([0, 2, 5], place), ints([7, 0], place), rotary_dim, interleave, rope_scale=2
    )
    for x, y in zip((q, k), expected, strict=True):
        assert_rotated(x, y)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rope_by_position(place, index_dtype):
    q, k = rows(3, 2, 8, place=place), rows(3, 1, 8, place=place, seed=1)
    positions = [1500, 0, 4]  # past the first table
    expected = [rotated(x, positions, powers(8, 5e4), False) for x in (q, k)]
    flashinfer.apply_rope_pos_ids_inplace(q, k, ints(positions, place, index_dtype), rope_theta=5e4)
    for x, y in zip((q, k), expected, strict=True):
        assert_rotated(x, y)


@pytest.mark.parametrize("by", ["pos_ids", "offsets"])
def test_rope_of_llama_31(place, by):
    """Frequencies are divided by 8 below a wavelength of 8192, and by less up to 8192 / 4."""
    q, k = rows(3, 2, 64, place=place), rows(3, 1, 64, place=place, seed=1)
    frequencies = powers(64, 5e5)
    smooth = np.clip((8192 * frequencies / (2 * np.pi) - 1) / (4 - 1), 0, 1)
    scaled = (1 - smooth) * frequencies / 8 + smooth * frequencies
    assert (scaled < frequencies).any() and (scaled == frequencies).any()
    expected = [rotated(x, [40, 41, 42], scaled, False) for x in (q, k)]
    if by == "pos_ids":
        flashinfer.apply_llama31_rope_pos_ids_inplace(q, k, ints([40, 41, 42], place))
    else:
        flashinfer.apply_llama31_rope_inplace(q, k, ints([0, 3], place), ints([40], place))
    for x, y in zip((q, k), expected, strict=True):
        assert_rotated(x, y)


@pytest.mark.parametrize("is_neox", [True, False])
def test_rope_by_a_table(place, is_neox):
    """The rotary dimension is the table's; heads lie side by side, rows may be strided."""
    packed = rows(3, 40, place=place)
    query, key = packed[:, :16], packed[:, 16:24]
    positions = [3, 0, 9]
    frequencies = powers(6, 1e4)
    angles = np.arange(16)[:, None] * frequencies
    cache = np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)
    expected = [
        rotated(x.unflatten(1, (-1, 8)), positions, frequencies, not is_neox).flatten(1)
        for x in (query, key)
    ]
    rest = packed[:, 24:].clone()
    flashinfer.apply_rope_with_cos_sin_cache_inplace(
        ints(positions, place), query, key, 8, torch.from_numpy(cache).to(place), is_neox
    )
    for x, y in zip((query, key), expected, strict=True):
        assert_rotated(x, y)
    assert torch.equal(packed[:, 24:], rest)


@pytest.mark.parametrize("name", ["rope", "rope_pos_ids", "llama31_rope", "llama31_rope_pos_ids"])
def test_rope_of_copies(place, name):
    q, k = rows(3, 2, 8, place=place), rows(3, 1, 8, place=place, seed=1)
    where = [ints([0, 3], place), ints([40], place)]
    where = [ints([40, 41, 42], place)] if "pos_ids" in name else where
    arguments = q.clone(), k.clone(), *where
    results = getattr(flashinfer, f"apply_{name}")(*arguments, interleave=True)
    assert torch.equal(arguments[0], q) and torch.equal(arguments[1], k)
    getattr(flashinfer, f"apply_{name}_inplace")(q, k, *where, interleave=True)
    assert torch.equal(results[0], q) and torch.equal(results[1], k)


def test_rope_of_copies_by_a_table(place):
    table = torch.rand(8, 8, device=place)
    query, key, positions = (
        rows(3, 16, place=place),
        rows(3, 8, place=place),
        ints([7, 0, 1], place),
    )
    results = flashinfer.apply_rope_with_cos_sin_cache(positions, query, key, 8, table, False)
    assert torch.equal(query, rows(3, 16, place=place)) and results[1].shape == key.shape
    flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, query, key, 8, table, False)
    assert torch.equal(results[0], query) and torch.equal(results[1], key)


# --- States ---------------------------------------------------------------------------------------


def merged(v, s):
    """Merge (seq_len, states, heads, width) by log-sum-exp in base 2, in float64."""
    weights = torch.exp2(s.double())
    total = weights.sum(1)
    return (v.double() * weights[..., None]).sum(1) / total[..., None], torch.log2(total)


def assert_state(state, expected):
    for x, y in zip(state, expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [2, 5])
def test_states_merge_in_base_2(place, count):
    v, s = rows(3, count, 2, 8, place=place), rows(3, count, 2, place=place, seed=1)
    expected = merged(v, s)
    assert_state(flashinfer.merge_states(v, s), expected)
    if count == 2:
        assert_state(flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), expected)


def test_merging_in_place_leaves_masked_tokens(place):
    v, s = rows(3, 2, 2, 8, place=place), rows(3, 2, 2, place=place, seed=1)
    expected = merged(v, s)
    into, lse = v[:, 0].clone(), s[:, 0].clone()
    flashinfer.merge_state_in_place(into, lse, v[:, 1], s[:, 1])
    assert_state((into, lse), expected)
    into, lse = v[:, 0].clone(), s[:, 0].clone()
    lse[1] = -math.inf  # its output stays all the same
    mask = torch.tensor([True, False, True], device=place)
    flashinfer.merge_state_in_place(into, lse, v[:, 1], s[:, 1], mask)
    assert_state((into[::2], lse[::2]), tuple(x[::2] for x in expected))
    assert torch.equal(into[1], v[1, 0]) and bool((lse[1] == -math.inf).all())


def test_states_without_keys_merge_to_none(place):
    v, s = rows(1, 1, 8, place=place), torch.full((1, 1), -math.inf, device=place)
    out, lse = flashinfer.merge_state(v, s, v, s)
    assert not out.any() and float(lse) == -math.inf


# --- Attention ------------------------------------------------------------------------------------

LAST = [2, 4, 0, 1]  # tokens on the last page
INDPTR, INDICES = [0, 2, 3, 3, 6], [5, 0, 3, 1, 2, 4]
LENGTHS = [6, 4, 0, 9]
HEADS, KV_HEADS, WIDTH = 4, 2, 64


def attended(q, k_cache, v_cache, query_lens, *, causal, window_left=-1, cap=0.0, scale=None,
             sinks=None):  # fmt: skip
    """Return out and base-2 lse in float64, caches (pages, page_size, heads, width)."""
    outs, lses, start = [], [], 0
    for i, (length, count) in enumerate(zip(LENGTHS, query_lens, strict=True)):
        pages = INDICES[INDPTR[i] : INDPTR[i + 1]]
        k, v = (x[pages].flatten(0, 1)[:length].double() for x in (k_cache, v_cache))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        queries = q[start : start + count].double()
        start += count
        scores = torch.einsum("qhd,khd->hqk", queries, k) * (scale or WIDTH**-0.5)
        if cap:
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(length - count, length, device=q.device)[:, None]
        keys = torch.arange(length, device=q.device)[None]
        seen = keys >= at - window_left if window_left >= 0 else keys >= 0
        seen = seen & (keys <= at) if causal else seen.expand(count, length)
        scores = scores.masked_fill(~seen, -math.inf)
        total = torch.exp(scores).sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks.double())[:, None]
        weights = torch.exp(scores) / total.clamp(min=1e-300)[..., None]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        lses.append(torch.log2(total).T)
    return torch.cat(outs), torch.cat(lses)


def paged(kv_layout, place, dtype=torch.float32, seed=3):
    """Return a cache in a layout, and K and V of it as NHD."""
    k, v = (rows(6, PAGE, KV_HEADS, WIDTH, place=place, seed=s, dtype=dtype) for s in (seed, 9))
    if kv_layout == "HND":
        return tuple(x.transpose(1, 2).contiguous() for x in (k, v)), (k, v)
    return torch.stack((k, v), 1), (k, v)


def wrapper_of(kind, kv_layout, place):
    name = f"Batch{kind}WithPagedKVCacheWrapper"
    workspace = torch.empty(0, dtype=torch.uint8, device=place)
    return getattr(flashinfer, name)(workspace, kv_layout)


def planned(kind, place, kv_layout="NHD", query_lens=(1, 1, 1, 1), index_dtype=torch.int32,
            dtype=torch.float32, **options):  # fmt: skip
    wrapper = wrapper_of(kind, kv_layout, place)
    plan(wrapper, place, query_lens, index_dtype, dtype, **options)
    return wrapper


def plan(wrapper, place, query_lens=(1, 1, 1, 1), index_dtype=torch.int32, dtype=torch.float32,
         **options):  # fmt: skip
    arrays = [ints(x, place, index_dtype) for x in (INDPTR, INDICES, LAST)]
    if "Prefill" in type(wrapper).__name__:
        arrays.insert(0, ints(np.cumsum([0, *query_lens]).tolist(), place, index_dtype))
    wrapper.plan(*arrays, HEADS, KV_HEADS, WIDTH, PAGE, q_data_type=dtype, **options)


def assert_attended(result, expected):
    for x, y in zip(result, expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.covering(2)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window_left", [-1, 0, 3])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode(place, kv_layout, window_left, cap, index_dtype):
    cache, (k, v) = paged(kv_layout, place)
    q = rows(4, HEADS, WIDTH, place=place)
    wrapper = planned(
        "Decode", place, kv_layout, index_dtype=index_dtype, window_left=window_left,
        logits_soft_cap=cap, sm_scale=0.2,
    )  # fmt: skip
    expected = attended(
        q, k, v, (1, 1, 1, 1), causal=True, window_left=window_left, cap=cap, scale=0.2
    )
    expected[0][2] = 0.0  # no keys
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert_attended((out, lse), expected)
    assert lse.dtype == torch.float32
    assert torch.equal(wrapper.run(q, cache), out)
    for x, y in zip(wrapper.run_return_lse(q, cache), (out, lse), strict=True):
        assert torch.equal(x, y)


def test_decode_agrees_with_the_stand_in(place):
    cache, (k, v) = paged("NHD", place)
    q = rows(3, HEADS, WIDTH, place=place)
    indptr, indices, last = ints([0, 2, 3, 6], place), ints(INDICES, place), ints([2, 4, 1], place)
    shape = HEADS, KV_HEADS, WIDTH, PAGE
    types = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    ours = wrapper_of("Decode", "NHD", place)
    theirs = peer_modules.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(0, dtype=torch.uint8), "NHD"
    )
    for each in (ours, theirs):
        each.plan(indptr, indices, last, *shape, window_left=2, **types)
    assert torch.allclose(ours.run(q, cache), theirs.run(q, (k, v)), rtol=1e-5, atol=1e-5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 2])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_prefill(place, kv_layout, window_left, causal):
    query_lens = (3, 4, 0, 1)
    cache, (k, v) = paged(kv_layout, place)
    q = rows(8, HEADS, WIDTH, place=place)
    wrapper = planned(
        "Prefill", place, kv_layout, query_lens, window_left=window_left, causal=causal
    )
    expected = attended(q, k, v, query_lens, causal=causal, window_left=window_left)
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert_attended((out, lse), expected)


def test_prefill_is_not_causal_unless_told(place):
    cache, (k, v) = paged("NHD", place)
    q = rows(8, HEADS, WIDTH, place=place)
    out = planned("Prefill", place, query_lens=(3, 4, 0, 1)).run(q, cache)
    assert_attended((out,), attended(q, k, v, (3, 4, 0, 1), causal=False)[:1])


def test_a_second_plan_replaces_the_first(place):
    cache, (k, v) = paged("NHD", place)
    q = rows(8, HEADS, WIDTH, place=place)
    wrapper = planned(
        "Prefill", place, query_lens=(3, 4, 0, 1), causal=True, fixed_split_size=16,
        disable_split_kv=True, max_token_per_sequence=4, max_sequence_kv=9,
    )  # fmt: skip
    first = wrapper.run(q, cache)
    plan(wrapper, place, (1, 1, 0, 2), causal=True, sm_scale=0.5)
    second = wrapper.run(q[:4], cache)
    assert_attended((first,), attended(q, k, v, (3, 4, 0, 1), causal=True)[:1])
    assert_attended((second,), attended(q, k, v, (1, 1, 0, 2), causal=True, scale=0.5)[:1])
    with pytest.raises(ValueError, match="last_page_len"):
        wrapper.plan(
            ints([0, 1], place), ints([0, 1], place), ints([0], place), ints([PAGE + 1], place),
            HEADS, KV_HEADS, WIDTH, PAGE, q_data_type=torch.float32,
        )  # fmt: skip
    assert torch.equal(wrapper.run(q[:4], cache), second)  # the plan that failed changed nothing


def test_several_tokens_of_each_request(place):
    """Of q_len_per_req each sees those before it."""
    cache, (k, v) = paged("NHD", place)
    q = rows(6, HEADS, WIDTH, place=place)
    wrapper = wrapper_of("Decode", "NHD", place)
    wrapper.plan(
        ints([0, 2, 3, 6], place), ints(INDICES, place), ints([2, 4, 1], place), HEADS, KV_HEADS,
        WIDTH, PAGE, q_data_type=torch.float32, q_len_per_req=2,
    )  # fmt: skip
    expected, _ = attended(q, k, v, (2, 2, 0, 2), causal=True)
    assert_attended((wrapper.run(q, cache),), (expected,))


@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_scales_of_an_fp8_cache_are_multipliers(place, kind):
    cache, (k, v) = paged("NHD", place, torch.float8_e4m3fn)
    q = rows(4, HEADS, WIDTH, place=place)
    options = {"causal": True} if kind == "Prefill" else {}
    wrapper = planned(kind, place, kv_data_type=torch.float8_e4m3fn, **options)
    out, lse = wrapper.run(q, cache, q_scale=2.0, k_scale=0.5, v_scale=3.0, return_lse=True)
    k, v = 0.5 * k.float(), 3.0 * v.float()
    expected = attended(2.0 * q, k, v, (1, 1, 1, 1), causal=True)
    expected[0][2] = 0.0
    assert_attended((out, lse), expected)
    per_head = torch.tensor([0.5, 0.25], device=place)
    out = wrapper.run(q, cache, k_scale=per_head, v_scale=3.0)
    k = k * torch.tensor([1.0, 0.5], device=place)[:, None]
    assert_attended(
        (out[[0, 1, 3]],), (attended(q, k, v, (1, 1, 1, 1), causal=True)[0][[0, 1, 3]],)
    )


@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_scales_beside_a_16_bit_cache_multiply_scores_and_outputs(place, kind):
    cache, (k, v) = paged("NHD", place, torch.float16)
    q = rows(4, HEADS, WIDTH, place=place)
    options = {"causal": True} if kind == "Prefill" else {}
    wrapper = planned(kind, place, kv_data_type=torch.float16, **options)
    scale = torch.tensor([2.0], device=place) if kind == "Prefill" else 2.0
    out, lse = wrapper.run(q, cache, k_scale=0.5, v_scale=scale, return_lse=True)
    expected = attended(q, 0.5 * k.float(), 2.0 * v.float(), (1, 1, 1, 1), causal=True)
    expected[0][2] = 0.0
    assert_attended((out, lse), expected)


@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_forward_takes_the_options_of_the_call(place, kind):
    """What FlashInfer deprecates, and older programs call."""
    cache, _ = paged("NHD", place)
    q = rows(4, HEADS, WIDTH, place=place)
    wrapper = wrapper_of(kind, "NHD", place)
    arrays = [ints(x, place) for x in (INDPTR, INDICES, LAST)]
    if kind == "Prefill":
        arrays.insert(0, ints([0, 1, 2, 3, 4], place))
    wrapper.begin_forward(*arrays, HEADS, KV_HEADS, WIDTH, PAGE, q_data_type=torch.float32)
    options = {"window_left": 2, "logits_soft_cap": 3.0, "sm_scale": 0.25}
    out, lse = wrapper.forward_return_lse(q, cache, **options)
    same = planned(kind, place, **options, **({"causal": True} if kind == "Prefill" else {}))
    assert torch.equal(out, same.run(q, cache))
    assert torch.equal(lse, same.run_return_lse(q, cache)[1])
    assert torch.equal(wrapper.forward(q, cache), planned(kind, place).run(q, cache))
    wrapper.end_forward()
    with pytest.raises(NotImplementedError, match=r"^pos_encoding_mode: "):
        wrapper.forward(q, cache, pos_encoding_mode="ALIBI")


def test_a_fast_plan_is_a_plan(place):
    cache, _ = paged("NHD", place)
    q, wrapper = rows(4, HEADS, WIDTH, place=place), wrapper_of("Decode", "NHD", place)
    flashinfer.fast_decode_plan(
        wrapper, *(ints(x, place) for x in (INDPTR, INDICES, LAST)), HEADS, KV_HEADS, WIDTH, PAGE,
        q_data_type=torch.float32, global_override_indptr_cpu=ints(INDPTR, "cpu"),
    )  # fmt: skip
    assert torch.equal(wrapper.run(q, cache), planned("Decode", place).run(q, cache))


def test_workspaces_begin_at_16_bytes(place):
    odd = torch.empty(33, dtype=torch.uint8, device=place)[1:]
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(odd)
    wrapper = wrapper_of("Decode", "NHD", place)
    sizes = wrapper.workspace_size(*PLAN.values())
    buffers = [torch.empty(size, dtype=torch.uint8, device=place) for size in sizes]
    wrapper.reset_workspace_buffer(*buffers)
    with pytest.raises(ValueError, match="int_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(buffers[0], odd)


@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_sinks_join_the_denominator(place, kind):
    cache, (k, v) = paged("NHD", place)
    q, sinks = rows(4, HEADS, WIDTH, place=place), rows(HEADS, place=place, seed=5)
    options = {"causal": True} if kind == "Prefill" else {}
    out = planned(kind, place, **options).run(q, cache, sinks=sinks)
    expected, _ = attended(q, k, v, (1, 1, 1, 1), causal=True, sinks=sinks)
    assert_attended((out,), (expected,))


def test_outputs_are_written_in_place(place):
    cache, _ = paged("NHD", place)
    q = rows(4, HEADS, WIDTH, place=place)
    wrapper = planned("Decode", place)
    out, lse = torch.ones_like(q), torch.ones(4, HEADS, device=place)
    results = wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
    assert results[0] is out and results[1] is lse
    for x, y in zip(results, wrapper.run(q, cache, return_lse=True), strict=True):
        assert torch.equal(x, y)


def test_a_layer_is_traced(place):
    """`torch.compile` takes an append and a run, planned before, without a break."""
    import torch._dynamo as dynamo

    wrapper = planned("Decode", place)
    cache, _ = paged("NHD", place)
    q = rows(4, HEADS, WIDTH, place=place)
    new = rows(4, KV_HEADS, WIDTH, place=place, seed=1)
    batch, positions, indices, indptr, last = (
        ints(x, place) for x in ([0, 1, 3, -1], [5, 3, 8, 0], INDICES, INDPTR, LAST)
    )

    def layer(cache):
        flashinfer.append_paged_kv_cache(new, new, batch, positions, cache, indices, indptr, last)
        out, lse = wrapper.run(q, cache, return_lse=True)
        return flashinfer.merge_state(out, lse, out, lse)

    other = cache.clone()
    expected = layer(cache)
    dynamo.reset()
    results = torch.compile(layer, fullgraph=True, backend="aot_eager")(other)
    dynamo.reset()
    assert torch.equal(cache, other)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


# --- What is refused ------------------------------------------------------------------------------


def appended(place, **changes):
    new = rows(5, 2, 8, place=place, dtype=torch.float16)
    arguments = {
        "append_key": new, "append_value": new, "batch_indices": ints(BATCH, place),
        "positions": ints(POSITIONS, place), "paged_kv_cache": caches("NHD", "one tensor", place),
        **table(place),
    }  # fmt: skip
    flashinfer.append_paged_kv_cache(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        ("append_key", TypeError, rows(5, 2, 8, place="cpu")),
        ("append_value", ValueError, torch.zeros(5, 2, 7, dtype=torch.float16)),
        ("append_key", ValueError, torch.zeros(4, 2, 8, dtype=torch.float16)),
        ("batch_indices", TypeError, torch.zeros(5)),
        ("positions", ValueError, torch.zeros(4, dtype=torch.int32)),
        ("paged_kv_cache", ValueError, torch.zeros(6, 3, PAGE, 2, 8, dtype=torch.float16)),
        ("paged_kv_cache", TypeError, None),
        ("kv_last_page_len", ValueError, torch.zeros(3, dtype=torch.int32)),
        ("kv_indptr", TypeError, [0, 2, 3]),
        ("kv_layout", ValueError, "DHN"),
    ],
)
def test_append_names_the_argument(place, name, error, value):
    value = value.to(place) if isinstance(value, torch.Tensor) else value
    with pytest.raises(error, match=f"^{name}"):
        appended(place, **{name: value})


PLAN = {
    "indptr": INDPTR, "indices": INDICES, "last_page_len": LAST, "num_qo_heads": HEADS,
    "num_kv_heads": KV_HEADS, "head_dim": WIDTH, "page_size": PAGE, "q_data_type": torch.float32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        ("indptr", ValueError, [0, 3, 2, 3, 6]),
        ("indices", ValueError, INDICES[:-1]),
        ("last_page_len", ValueError, [2, 5, 0, 1]),
        ("last_page_len", ValueError, [2, 0, 0, 1]),
        ("pos_encoding_mode", NotImplementedError, "ROPE_LLAMA"),
        ("pos_encoding_mode", NotImplementedError, "ALIBI"),
        ("q_data_type", NotImplementedError, torch.float8_e4m3fn),
        ("q_data_type", TypeError, "float17"),
        ("o_data_type", NotImplementedError, torch.float16),
        ("q_len_per_req", ValueError, 0),
    ],
)
def test_plan_names_the_argument(place, name, error, value):
    arguments = {**PLAN, name: value}
    arguments = {n: ints(x, place) if isinstance(x, list) else x for n, x in arguments.items()}
    with pytest.raises(error, match=f"^{name}"):
        wrapper_of("Decode", "NHD", place).plan(**arguments)


@pytest.mark.parametrize(
    ("name", "error", "change"),
    [
        ("q", ValueError, {"q": torch.zeros(3, HEADS, WIDTH)}),
        ("q", ValueError, {"q": torch.zeros(4, HEADS, WIDTH, dtype=torch.float16)}),
        ("paged_kv_cache", ValueError, {"paged_kv_cache": torch.zeros(6, 2, 8, KV_HEADS, WIDTH)}),
        ("window_left", ValueError, {"window_left": 3}),
        ("k_scale", NotImplementedError, {"k_scale": torch.ones(1)}),
        ("out", TypeError, {"out": torch.zeros(4, HEADS, WIDTH, dtype=torch.float16)}),
        ("lse", ValueError, {"lse": torch.zeros(4, 1), "return_lse": True}),
        ("q_scale", NotImplementedError, {"q_scale": torch.ones(1)}),
        ("return_lse", NotImplementedError, {"sinks": torch.zeros(HEADS), "return_lse": True}),
    ],
)
def test_run_names_the_argument(place, name, error, change):
    cache, _ = paged("NHD", place)
    arguments = {"q": rows(4, HEADS, WIDTH, place=place), "paged_kv_cache": cache}
    change = {n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    with pytest.raises(error, match=f"^{name}"):
        planned("Decode", place).run(**{**arguments, **change})


# --- With use_cuda_graph --------------------------------------------------------------------------

# Another plan of four sequences: other lengths, other pages, one more page in all.
LATER = [0, 1, 3, 4, 7], [1, 0, 5, 2, 4, 3, 0], [3, 2, 1, 4]


def graph_wrapper(kind, place, pages=16, **options):
    buffers = [torch.zeros(n, dtype=torch.int32, device=place) for n in (5, pages, 4)]
    workspace = torch.empty(0, dtype=torch.uint8, device=place)
    if kind == "CUDAGraphBatchDecode":
        cls = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
        return cls(workspace, *buffers, **options), buffers
    cls = getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")
    suffix = "buffer" if kind == "Decode" else "buf"
    named = {
        f"paged_kv_{name}_{suffix}": buffer
        for name, buffer in zip(("indptr", "indices", "last_page_len"), buffers, strict=True)
    }
    if kind == "Prefill":
        named["qo_indptr_buf"] = torch.zeros(5, dtype=torch.int32, device=place)
    return cls(workspace, "NHD", use_cuda_graph=True, **named, **options), buffers


def plan_later(wrapper, place, query_lens):
    arrays = [ints(x, place) for x in LATER]
    if "Prefill" in type(wrapper).__name__:
        arrays.insert(0, ints(np.cumsum([0, *query_lens]).tolist(), place))
    wrapper.plan(*arrays, HEADS, KV_HEADS, WIDTH, PAGE, q_data_type=torch.float32)


@pytest.mark.parametrize("max_pages", [None, 3])
@pytest.mark.parametrize("kind", ["Decode", "Prefill", "CUDAGraphBatchDecode"])
def test_a_captured_run_takes_the_tables_of_the_last_plan(place, kind, max_pages, monkeypatch):
    """A replay calls the same kernel with the same addresses: so does this, of the first run."""
    first, later = ((2, 1, 0, 3), (1, 2, 1, 2)) if kind == "Prefill" else ((1,) * 4, (1,) * 4)
    cache, _ = paged("NHD", place)
    q = rows(sum(first), HEADS, WIDTH, place=place)
    wrapper, buffers = graph_wrapper(kind, place, max_pages_per_sequence=max_pages)
    plan(wrapper, place, first)
    captured = []
    attend = flashinfer._kv.paged_attention
    monkeypatch.setattr(
        flashinfer._kv, "paged_attention",
        lambda *arguments, **options: captured.append((arguments, options)),
    )  # fmt: skip
    out = torch.zeros_like(q)
    wrapper.run(q, cache, out=out)
    monkeypatch.undo()
    ((arguments, options),) = captured

    plan_later(wrapper, place, later)
    attend(*arguments, **options)
    plain = wrapper_of("Decode" if "Decode" in kind else kind, "NHD", place)
    plan_later(plain, place, later)
    assert torch.equal(out, plain.run(q, cache))
    assert [buffer[: len(x)].tolist() for buffer, x in zip(buffers, LATER, strict=True)] == [*LATER]
    assert wrapper.is_cuda_graph_enabled and not plain.is_cuda_graph_enabled


def plan_rows(wrapper, place, last_page_len, q_len_per_req):
    wrapper.plan(
        ints(INDPTR, place), ints(INDICES, place), ints(last_page_len, place), HEADS, KV_HEADS,
        WIDTH, PAGE, q_data_type=torch.float32, q_len_per_req=q_len_per_req,
    )  # fmt: skip


def test_several_new_tokens_of_each_sequence_stay_in_place(place):
    wrapper, _ = graph_wrapper("Decode", place)
    tables = []
    for _ in range(2):
        plan_rows(wrapper, place, [2, 4, 0, 3], 2)
        assert wrapper._query_lens.tolist() == [2] * 4
        tables.append([x.data_ptr() for x in (
            wrapper._query_lens, wrapper._seq_lens, wrapper._block_table
        )])  # fmt: skip
    assert tables[0] == tables[1]


def test_the_number_of_new_tokens_of_a_captured_run_stays(place):
    wrapper, buffers = graph_wrapper("Decode", place)
    plan_rows(wrapper, place, LAST, 2)
    before = [buffer.clone() for buffer in buffers]
    for count in (1, 3):
        with pytest.raises(ValueError, match=r"^q_len_per_req: expected 2 as in the first plan"):
            plan_rows(wrapper, place, [4, 4, 0, 4], count)
    assert all(torch.equal(x, y) for x, y in zip(buffers, before, strict=True))
    for count in (2, 3):  # without a graph they may change
        plan_rows(plain := wrapper_of("Decode", "NHD", place), place, LAST, count)
    assert plain._num_tokens == 12


@pytest.mark.parametrize("graph", [False, True])
def test_a_sequence_has_as_many_keys_as_new_tokens(place, graph):
    """Or none, as padding has."""
    wrapper = graph_wrapper("Decode", place)[0] if graph else wrapper_of("Decode", "NHD", place)
    with pytest.raises(
        ValueError, match=r"^last_page_len: expected none or at least q_len_per_req"
    ):
        plan_rows(wrapper, place, [2, 2, 0, 1], 3)
    plan_rows(wrapper, place, [2, 3, 0, 1], 3)


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"pages": 5}, {}, r"^indices: expected at most the 5 pages"),
        ({"max_pages_per_sequence": 2}, {}, r"^indptr: expected at most 2 pages of a sequence"),
        ({}, {"indptr": [0, 1], "last_page_len": [1]}, r"^last_page_len: expected the 4 sequences"),
    ],
)
def test_a_plan_that_does_not_fit_the_buffers(place, options, change, message):
    wrapper, buffers = graph_wrapper("Decode", place, **options)
    arguments = {**PLAN, **change}
    arguments = {n: ints(x, place) if isinstance(x, list) else x for n, x in arguments.items()}
    with pytest.raises(ValueError, match=message):
        wrapper.plan(**arguments)
    assert not any(buffer.any() for buffer in buffers)


def test_buffers_of_a_graph_are_named(place):
    workspace = torch.empty(0, dtype=torch.uint8, device=place)
    cls = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    with pytest.raises(ValueError, match=r"^paged_kv_indptr_buffer: expected a tensor"):
        cls(workspace, use_cuda_graph=True)
    buffers = [torch.zeros(n, dtype=torch.int32, device=place) for n in (4, 8, 4)]
    with pytest.raises(ValueError, match=r"^paged_kv_indptr_buffer: expected \(5,\)"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    with pytest.raises(ValueError, match=r"^max_pages_per_sequence: "):
        graph_wrapper("Decode", place, max_pages_per_sequence=17)


@pytest.mark.gpu
def test_a_graph_of_torch(place):
    cache, _ = paged("NHD", place)
    q = rows(4, HEADS, WIDTH, place=place)
    wrapper, _ = graph_wrapper("Decode", place)
    plan(wrapper, place)
    out = wrapper.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out)
    plan_later(wrapper, place, (1,) * 4)
    graph.replay()
    plain = wrapper_of("Decode", "NHD", place)
    plan_later(plain, place, (1,) * 4)
    assert torch.equal(out, plain.run(q, cache))


def test_run_without_a_plan(place):
    for kind in ("Decode", "Prefill"):
        with pytest.raises(RuntimeError, match="plan"):
            wrapper_of(kind, "NHD", place).run(torch.zeros(1, 1, 8), None)


def test_what_is_not_offered_says_why(place):
    workspace = torch.empty(0, dtype=torch.uint8, device=place)
    for call, reason in (
        (lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, jit_args=[1]),
         "jit_args: "),
        (lambda: planned("Prefill", place, custom_mask=torch.ones(1)), "custom_mask: .*tree_mask"),
        (lambda: planned("Prefill", place, prefix_len_ptr=torch.ones(1)), "prefix_len_ptr: "),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=reason):
            call()


NOT_OFFERED = [
    "BatchAttention",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "concat_mla_k",
    "MultiLevelCascadeAttentionWrapper",
    "nvfp4_quantize_append_paged_kv_cache",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
    "single_prefill_with_kv_cache",
]


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_names_that_are_not_offered_can_be_imported(name):
    """They raise when they are called, with a reason: engines import more than they call."""
    stand_in = getattr(flashinfer, name)
    with pytest.raises(NotImplementedError, match=f"^{name}: .{{20}}"):
        stand_in(1, k_scale=2)
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        stand_in.plan(1)
    assert not hasattr(stand_in, "plan") and stand_in.__name__ == name
    assert name not in flashinfer.__all__ and name not in dir(flashinfer)


def test_other_names_stay_unknown():
    """Also to copy, inspect, doctest and `import *`, which ask for names of their own."""
    assert not hasattr(flashinfer, "no_such_name") and not hasattr(flashinfer, "__wrapped__")
    with pytest.raises(AttributeError, match=r"'kvcupy\.interop\.flashinfer' has no attribute 'x'"):
        _ = flashinfer.x
    everything = {}
    exec("from kvcupy.interop.flashinfer import *", everything)
    assert set(flashinfer.__all__) <= set(everything) and "BatchAttention" not in everything
    assert [name for name, _ in inspect.getmembers(flashinfer, inspect.isclass)]
    stand_in = copy.copy(flashinfer.BatchAttention)
    assert inspect.unwrap(stand_in) is stand_in and inspect.getdoc(stand_in)


def test_names_by_flashinfers_modules():
    """In a new process, where nothing has imported the adapter before."""
    program = """
from kvcupy.interop.flashinfer.rope import apply_rope_inplace
import kvcupy.interop.flashinfer.decode as decode
from kvcupy.interop import flashinfer
assert apply_rope_inplace is flashinfer.apply_rope_inplace
assert decode.fast_decode_plan is flashinfer.page.fast_decode_plan
assert not hasattr(flashinfer.attention.BatchAttention, "run")
try:
    flashinfer.sampling.top_k_sampling_from_probs()
except NotImplementedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "sampling: it has no operation on a KV cache" in done.stdout


def test_rope_names_the_argument(place):
    q, positions = rows(2, 2, 8, place=place), ints([0, 1], place)
    half = torch.zeros(4, 8, dtype=torch.float16, device=place)
    for error, name, call in (
        (ValueError, "cos_sin_cache", lambda: flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, q.flatten(1), q.flatten(1), 8, half)),
        (ValueError, "key", lambda: flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, q.flatten(1), q.flatten(1)[:, :12], 8, half.float())),
        (ValueError, "offsets", lambda: flashinfer.apply_rope_inplace(
            q, q.clone(), ints([0, 2], place), ints([0, 1], place))),
        (ValueError, "pos_ids", lambda: flashinfer.apply_rope_pos_ids_inplace(
            q, q.clone(), ints([[0, 1]], place))),
        (TypeError, "s", lambda: flashinfer.merge_state_in_place(
            q, q[..., 0].half(), q.clone(), q[..., 0].clone())),
        (ValueError, "v_b", lambda: flashinfer.merge_state(q, q[..., 0], q[:1], q[..., 0])),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: "):
            call()
