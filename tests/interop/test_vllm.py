"""vLLM's calls, held against what its documentation says, on tensors of the run's device."""

from __future__ import annotations

import math

import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

import peer_modules  # noqa: E402

from kvcupy.interop import vllm  # noqa: E402

BLOCKS, SIZE, HEADS, WIDTH = 4, 16, 2, 8
SLOTS = [17, -1, 63, 0]
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pytest.fixture
def place(device):
    return "cpu" if device.kind == "host" else device.torch_name


def rows(*shape, place, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (16 * torch.randn(shape, generator=generator)).to(place, dtype)


def slots(place, dtype=torch.int64):
    return torch.tensor(SLOTS, dtype=dtype, device=place)


def quantised(x, scale, dtype):
    """Return x / scale, divided in float32, saturating, rounded once to nearest even."""
    limit = LIMITS[dtype]
    return (x.float().cpu() / torch.as_tensor(scale)).clamp(-limit, limit).to(dtype)


def caches(place, dtype, layout="NHD"):
    """Return two caches that look like (blocks, size, heads, width), filled with sevens."""
    axes = (SIZE, HEADS) if layout == "NHD" else (HEADS, SIZE)
    whole = torch.full((2, BLOCKS, *axes, WIDTH), 7.0, device=place).to(dtype)
    return list(whole if layout == "NHD" else whole.transpose(2, 3))


# --- Stores ---------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_copied(place, dtype, layout, padding, index_dtype):
    """The slots say how many tokens there are, negative ones are skipped, scales do not count."""
    key, value = (rows(4 + padding, HEADS, WIDTH, place=place, seed=s, dtype=dtype) for s in (1, 2))
    into = caches(place, dtype, layout)
    expected = [x.clone() for x in into]
    for x, new in zip(expected, (key, value), strict=True):
        for i, slot in enumerate(SLOTS):
            if slot >= 0:
                x[slot // SIZE, slot % SIZE] = new[i]
    scale = torch.tensor([3.0], device=place)
    mapping = slots(place, index_dtype)
    vllm.reshape_and_cache_flash(key, value, *into, mapping, "auto", scale, scale)
    for x, y in zip(into, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.covering(2)
@pytest.mark.parametrize("cache_bytes", ["uint8", "float8"])
@pytest.mark.parametrize("scales", [(0.7, 1.3), ([0.5, 0.3], [2.0, 1.1]), (None, 2.0)])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn),
     ("fp8_e5m2", torch.float8_e5m2)],
)  # fmt: skip
def test_rows_are_divided_by_scales(place, name, dtype, scales, cache_bytes):
    key, value = (rows(4, HEADS, WIDTH, place=place, seed=s) for s in (1, 2))
    key[0, 0, 0], key[2, 1, 1], value[3, 0, 2] = 3e38, -math.inf, math.nan
    into = caches(place, torch.uint8 if cache_bytes == "uint8" else dtype)
    before = [x.clone().view(torch.uint8) for x in into]
    tensors = [
        torch.tensor(x if isinstance(x, list) else [x], device=place) if x is not None else None
        for x in scales
    ]
    vllm.reshape_and_cache_flash(key, value, *into, slots(place), name, *tensors)
    for x, y, new, scale in zip(into, before, (key, value), scales, strict=True):
        scale = torch.tensor(1.0 if scale is None else scale)
        per_row = scale[:, None] if scale.ndim else scale
        for i, slot in enumerate(SLOTS):
            if slot >= 0:
                as_bytes = quantised(new[i], per_row, dtype).view(torch.uint8).to(place)
                y[slot // SIZE, slot % SIZE] = as_bytes
        assert same_fp8(x.view(torch.uint8), y, dtype)


def same_fp8(x, y, dtype):
    """Compare bytes, but for the sign and payload of NaN."""
    nans = [a.view(dtype).float().isnan() for a in (x, y)]
    return torch.equal(*nans) and torch.equal(x[~nans[0]], y[~nans[1]])


def test_stores_agree_with_the_stand_in(place):
    key, value = (rows(3, HEADS, WIDTH, place=place, seed=s) for s in (1, 2))
    scale, mapping = torch.tensor([0.7], device=place), torch.tensor([3, 40, 21], device=place)
    for name, dtype in (("auto", torch.bfloat16), ("fp8", torch.uint8)):
        ours, theirs = caches(place, dtype), caches(place, dtype)
        for module, into in ((vllm, ours), (peer_modules, theirs)):
            module.reshape_and_cache_flash(key, value, *into, mapping, name, scale, scale)
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_mla_rows_lie_side_by_side(place, name):
    latent, rope = rows(5, 16, place=place), rows(5, 8, place=place, seed=1)
    cache = torch.full((BLOCKS, SIZE, 24), 7, device=place)
    cache = cache.to(torch.bfloat16 if name == "auto" else torch.uint8)
    expected = cache.clone()
    scale = torch.tensor([0.3], device=place)
    whole = torch.cat((latent, rope), dim=-1)
    if name == "fp8":
        whole = quantised(whole, 0.3, torch.float8_e4m3fn).view(torch.uint8).to(place)
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[slot // SIZE, slot % SIZE] = whole[i]
    vllm.concat_and_cache_mla(latent, rope, cache, slots(place), name, scale)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("is_neox", [True, False])
def test_mla_rotates_and_writes(place, is_neox):
    """It is `rotary_embedding`, then `concat_and_cache_mla`."""
    latent, rope = rows(4, 16, place=place), rows(4, 8, place=place, seed=1)
    query = rows(4, 3, 8, place=place, seed=2)
    positions = torch.tensor([3, 0, 9, 9], device=place)
    table = torch.rand(10, 8, generator=torch.Generator().manual_seed(0)).to(place)
    expected = torch.zeros(BLOCKS, SIZE, 24, dtype=torch.bfloat16, device=place)
    q, k = query.clone(), rope.clone()
    vllm.rotary_embedding(positions, q, k, 8, table, is_neox)
    vllm.concat_and_cache_mla(latent, k, expected, slots(place), "auto", None)
    cache = torch.zeros_like(expected)
    vllm.concat_and_cache_mla_rope_fused(
        positions, query, rope[:, None], latent, table, is_neox, slots(place), cache, "auto", None
    )
    assert torch.equal(query, q) and torch.equal(rope, k) and torch.equal(cache, expected)
    assert cache[0, 0].any()


def test_a_slot_past_the_end_is_a_fault(device, place):
    key = rows(1, HEADS, WIDTH, place=place)
    into = caches(place, torch.bfloat16)
    before = [x.clone() for x in into]
    mapping = torch.tensor([BLOCKS * SIZE], device=place)
    vllm.reshape_and_cache_flash(key, key, *into, mapping, "auto", None, None)
    assert all(torch.equal(x, y) for x, y in zip(into, before, strict=True))
    with pytest.raises(kv.IndexFault, match="store_kv"):
        kv.check_faults(device)


# --- Rotations ------------------------------------------------------------------------------------


def rotated(x, table, positions, is_neox, start=0):
    """Rotate (tokens, heads, width) from an element on, in float64."""
    cos, sin = (part[:, None].double() for part in table[positions].chunk(2, dim=-1))
    out, n = x.double().clone(), table.shape[1]
    first, second = (
        (slice(start, start + n // 2), slice(start + n // 2, start + n))
        if is_neox
        else (slice(start, start + n, 2), slice(start + 1, start + n, 2))
    )
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def angles(rotary_dim, place, dtype=torch.float32):
    frequencies = 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    at = torch.arange(16)[:, None] * frequencies
    return torch.cat((at.cos(), at.sin()), dim=1).to(place, dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding(place, is_neox, offset, batch, table_dtype):
    table = angles(4, place, table_dtype)
    shape = (2, 3) if batch else (6,)
    query, key = (
        rows(*shape, heads * 8, place=place, seed=heads, dtype=torch.float32) for heads in (4, 2)
    )
    positions = torch.tensor([0, 9, 1, 15, 4, 4], device=place)
    expected = [
        rotated(x.reshape(6, -1, 8), table, positions, is_neox, offset).view(x.shape)
        for x in (query, key)
    ]
    vllm.rotary_embedding(positions.view(shape), query, key, 8, table, is_neox, offset)
    for x, y in zip((query, key), expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=1e-5, atol=1e-5)


def test_rotary_embedding_of_a_query_alone_and_back(place):
    table = angles(8, place)
    query = rows(6, 16, place=place, dtype=torch.float32)
    before = query.clone()
    positions = torch.tensor([0, 9, 1, 15, 4, 4], device=place, dtype=torch.int32)
    vllm.rotary_embedding(positions, query, None, 8, table, True)
    assert torch.allclose(
        query.double(), rotated(before.view(6, 2, 8), table, positions, True).flatten(1), atol=1e-5
    )
    vllm.rotary_embedding(positions, query, None, 8, table, True, inverse=True)
    assert torch.allclose(query, before, atol=1e-5)


# --- States ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_lse", [True, False])
def test_states_merge_in_base_e(place, with_lse):
    prefix, suffix = (rows(5, 2, 8, place=place, seed=s, dtype=torch.float32) for s in (1, 2))
    lse = [torch.randn(2, 5, generator=torch.Generator().manual_seed(s)).to(place) for s in (3, 4)]
    lse[0][0, 1], lse[1][1, 2] = math.inf, -math.inf  # neither has keys there
    kept = [x.clone() for x in lse]
    weights = [x.where(x != math.inf, -math.inf).double().exp() for x in lse]
    total = weights[0] + weights[1]
    parts = zip((prefix, suffix), weights, strict=True)
    expected = sum(x.double() * (w / total).T[..., None] for x, w in parts)
    output, output_lse = torch.empty_like(prefix), torch.empty(2, 5, device=place)
    vllm.merge_attn_states(output, prefix, lse[0], suffix, lse[1], output_lse if with_lse else None)
    assert torch.allclose(output.double(), expected, rtol=1e-5, atol=1e-5)
    if with_lse:
        assert torch.allclose(output_lse.double(), total.log(), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(lse, kept, strict=True))  # inputs stay


def test_tokens_without_context_take_the_suffix(place):
    prefix, suffix = (rows(3, 2, 8, place=place, seed=s) for s in (1, 2))
    zero, output = torch.zeros(2, 3, device=place), torch.empty_like(prefix)
    vllm.merge_attn_states(output, prefix, zero, suffix, zero, prefill_tokens_with_context=1)
    assert torch.equal(output[1:], suffix[1:]) and not torch.equal(output[0], suffix[0])


def test_a_layer_is_traced(place):
    """`torch.compile` takes a rotation and a store without a break."""
    import torch._dynamo as dynamo

    table, positions, mapping = angles(8, place), torch.tensor([3, 0], device=place), slots(place)
    query, value = (rows(2, 16, place=place, seed=s) for s in (1, 2))
    scale = torch.tensor([0.5], device=place)

    def layer(key, k_cache, v_cache):
        vllm.rotary_embedding(positions, query.clone(), key, 8, table, True)
        k, v = (x.view(2, HEADS, WIDTH) for x in (key, value))
        vllm.reshape_and_cache_flash(k, v, k_cache, v_cache, mapping[:2], "fp8", scale, scale)

    key = rows(2, 16, place=place)
    plain, traced = ([key.clone(), *caches(place, torch.uint8)] for _ in range(2))
    layer(*plain)
    dynamo.reset()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(*traced)
    dynamo.reset()
    assert all(torch.equal(x, y) for x, y in zip(plain, traced, strict=True))
    assert not torch.equal(plain[0], key)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        ("key", TypeError, torch.zeros(4, HEADS, WIDTH)),
        ("key", ValueError, torch.zeros(3, HEADS, WIDTH, dtype=torch.bfloat16)),
        ("value", ValueError, torch.zeros(4, HEADS, WIDTH + 1, dtype=torch.bfloat16)),
        ("key_cache", ValueError, torch.zeros(BLOCKS, HEADS, SIZE * WIDTH, dtype=torch.bfloat16)),
        ("value_cache", ValueError, torch.zeros(2, SIZE, HEADS, WIDTH, dtype=torch.bfloat16)),
        ("slot_mapping", TypeError, torch.zeros(4)),
        ("slot_mapping", ValueError, torch.zeros(2, 2, dtype=torch.int64)),
        ("kv_cache_dtype", NotImplementedError, "nvfp4"),
        ("kv_cache_dtype", NotImplementedError, "fp8_ds_mla"),
    ],
)
def test_a_store_names_the_argument(place, name, error, value):
    key = rows(4, HEADS, WIDTH, place=place)
    k_cache, v_cache = caches(place, torch.bfloat16)
    arguments = {
        "key": key, "value": key, "key_cache": k_cache, "value_cache": v_cache,
        "slot_mapping": slots(place), "kv_cache_dtype": "auto", "k_scale": None, "v_scale": None,
    }  # fmt: skip
    change = {name: value.to(place) if isinstance(value, torch.Tensor) else value}
    with pytest.raises(error, match=f"^{name}: "):
        vllm.reshape_and_cache_flash(**{**arguments, **change})
    assert bool((k_cache == 7).all())


@pytest.mark.parametrize(
    ("name", "error", "format", "scale"),
    [
        ("key_cache", TypeError, torch.bfloat16, 1.0),
        ("key_cache", TypeError, torch.float8_e5m2, 1.0),
        ("k_scale", ValueError, torch.uint8, torch.ones(3)),
        ("k_scale", TypeError, torch.uint8, torch.ones(1, dtype=torch.float64)),
        ("k_scale", ValueError, torch.uint8, 0.0),
    ],
)
def test_a_quantising_store_names_the_argument(place, name, error, format, scale):
    key, into = rows(4, HEADS, WIDTH, place=place), caches(place, format)
    scale = scale.to(place) if isinstance(scale, torch.Tensor) else scale
    with pytest.raises(error, match=f"^{name}: "):
        vllm.reshape_and_cache_flash(key, key, *into, slots(place), "fp8", scale, None)


def test_other_calls_name_the_argument(place):
    x, table = rows(2, 2, 8, place=place), angles(8, place)
    positions = torch.tensor([0, 1], device=place)
    lse, cache = torch.zeros(2, 2, device=place), torch.zeros(2, 4, 10, device=place)
    mla = rows(2, 8, place=place, dtype=torch.float32)
    for error, name, call in (
        (ValueError, "kv_cache", lambda: vllm.concat_and_cache_mla(
            mla, mla, cache, positions, "auto", None)),
        (TypeError, "k_pe", lambda: vllm.concat_and_cache_mla(
            mla, mla[:, :2].half(), cache, positions, "auto", None)),
        (ValueError, "q_pe", lambda: vllm.concat_and_cache_mla_rope_fused(
            positions, x, mla[:, :2], mla, table, True, positions, cache, "auto", None)),
        (TypeError, "positions", lambda: vllm.rotary_embedding(
            positions.float(), x, x.clone(), 8, table, True)),
        (ValueError, "rope_dim_offset", lambda: vllm.rotary_embedding(
            positions, x, x.clone(), 8, table, True, rope_dim_offset=2)),
        (ValueError, "key", lambda: vllm.rotary_embedding(
            positions, x, x[:1].clone(), 8, table, True)),
        (ValueError, "query", lambda: vllm.rotary_embedding(
            positions, x.flatten(1)[:, :12], x.clone(), 8, table, True)),
        (ValueError, "suffix_lse", lambda: vllm.merge_attn_states(
            torch.empty_like(x), x, lse, x, lse[:1])),
        (NotImplementedError, "output_scale", lambda: vllm.merge_attn_states(
            torch.empty_like(x), x, lse, x, lse, output_scale=lse)),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: "):
            call()


@pytest.mark.parametrize(
    "name",
    ["concat_and_cache_mla_grouped", "concat_mla_q", "copy_blocks", "cp_gather_cache",
     "gather_and_maybe_dequant_cache", "indexer_k_quant_and_cache", "paged_attention_v1",
     "reshape_and_cache", "swap_blocks", "swap_blocks_batch"],
)  # fmt: skip
def test_what_is_not_offered_says_why(name):
    with pytest.raises(NotImplementedError, match=f"^{name}: .{{15}}"):
        getattr(vllm, name)(1, 2, kv_cache_dtype="auto")
    assert not hasattr(vllm, f"{name}_of_another_version")
