"""SGLang's calls, held against what its documentation says, on tensors of the run's device."""

from __future__ import annotations

import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

import peer_modules  # noqa: E402

from kvcupy.interop import sglang  # noqa: E402

SLOTS, HEADS, WIDTH = 12, 2, 8


@pytest.fixture
def place(device):
    return "cpu" if device.kind == "host" else device.torch_name


def rows(*shape, place, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (16 * torch.randn(shape, generator=generator)).to(place, dtype)


def ints(values, place, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=place)


def random_bytes(*shape, place, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(place, torch.uint8)


# --- Stores ---------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("axes", ["rows", "heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_set_kv_buffer_kernel_copies_rows(place, dtype, axes, index_dtype):
    shape = (HEADS * WIDTH,) if axes == "rows" else (HEADS, WIDTH)
    k, v = (rows(5, *shape, place=place, seed=s).to(dtype) for s in (1, 2))
    caches = [rows(SLOTS, *shape, place=place, seed=s).to(dtype) for s in (3, 4)]
    expected = [x.clone() for x in caches]
    for x, new in zip(expected, (k, v), strict=True):
        x[[7, 0, 3]] = new[[0, 1, 3]]
    loc = ints([7, 0, -1, 3], place, index_dtype)
    sglang.set_kv_buffer_kernel(*caches, loc, k, v)
    assert all(torch.equal(x, y) for x, y in zip(caches, expected, strict=True))


@pytest.mark.parametrize("skipped", [0, 7, -1])
def test_store_cache_never_writes_the_reserved_slot(place, skipped):
    k, v = rows(4, 16, place=place, seed=1), rows(4, 24, place=place, seed=2)
    caches = [torch.zeros(SLOTS, n, dtype=k.dtype, device=place) for n in (16, 24)]
    indices = ints([7, 9, 0, 9, 3, 9, 1, 9], place)[::2]  # strided
    options = {} if skipped == 0 else {"reserved_skip_index": skipped}  # 0 is the default
    sglang.store_cache(k, v, *caches, indices, row_bytes=32, v_row_bytes=48, num_split=2, **options)
    for x, new in zip(caches, (k, v), strict=True):
        expected = torch.zeros_like(x)
        for i, slot in enumerate(indices.tolist()):
            if slot != skipped:
                expected[slot] = new[i]
        assert torch.equal(x, expected)
    assert sglang.can_use_store_cache(98, 100)


def test_store_cache_agrees_with_the_stand_in(place):
    k, v = (rows(4, 16, place=place, seed=s) for s in (1, 2))
    ours, theirs = (
        [torch.zeros(SLOTS, 16, dtype=k.dtype, device=place) for _ in "kv"] for _ in "ab"
    )
    for module, caches in ((sglang, ours), (peer_modules, theirs)):
        module.store_cache(k, v, *caches, ints([7, 0, 3, 1], place))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_a_location_past_the_limit_is_a_fault(device, place):
    k = rows(2, 16, place=place)
    caches = [torch.zeros(SLOTS, 16, dtype=k.dtype, device=place) for _ in "kv"]
    sglang.store_cache(k, k, *caches, ints([8, 2], place), size_limit=8)
    for x in caches:
        assert torch.equal(x[2], k[1]) and not x[8].any()
    with pytest.raises(kv.IndexFault, match="store_kv"):
        kv.check_faults(device)


def quantised(x, scale, dtype):
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_set_kv_buffer_divides_once(place, dtype, as_bytes):
    """In float32, whatever the rows' dtype is; the rows stay."""
    k, v = (rows(3, HEADS, WIDTH, place=place, seed=s) for s in (1, 2))
    kept = k.clone(), v.clone()
    k_buffer, v_buffer = torch.zeros(2, SLOTS, HEADS, WIDTH, device=place).to(dtype)
    loc = ints([4, -1, 9], place)
    targets = [x.view(torch.uint8) if as_bytes else x for x in (k_buffer, v_buffer)]
    per_head = torch.tensor([0.3, 1.7], device=place)
    sglang.set_kv_buffer(*targets, loc, k, v, 0.7, per_head, dtype=dtype if as_bytes else None)
    for x, new, scale in ((k_buffer, k, 0.7), (v_buffer, v, per_head[:, None])):
        expected = quantised(new, scale, dtype).view(torch.uint8)
        assert torch.equal(x.view(torch.uint8)[[4, 9]], expected[[0, 2]])
    assert torch.equal(k, kept[0]) and torch.equal(v, kept[1])


def test_set_kv_buffer_ignores_scales_of_the_same_dtype(place):
    k, v = (rows(1, HEADS, WIDTH, place=place, seed=s) for s in (1, 2))
    buffers = [torch.zeros(SLOTS, HEADS, WIDTH, dtype=k.dtype, device=place) for _ in "kv"]
    sglang.set_kv_buffer(*buffers, ints([4], place), k, v, 0.5, 2.0)
    assert torch.equal(buffers[0][4], k[0]) and torch.equal(buffers[1][4], v[0])


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("skipped", [0, -1])
def test_set_mla_kv_buffer(place, skipped, with_head):
    nope, rope = rows(3, 16, place=place), rows(3, 8, place=place, seed=1)
    cache = torch.zeros(SLOTS, 24, dtype=nope.dtype, device=place)
    expected = cache.clone()
    for i, slot in enumerate([5, 0, 2]):
        if slot != skipped:
            expected[slot] = torch.cat((nope[i], rope[i]))
    buffer, nope, rope = (x[:, None] if with_head else x for x in (cache, nope, rope))
    sglang.set_mla_kv_buffer(
        kv_buffer=buffer, loc=ints([5, 0, 2], place), cache_k_nope=nope, cache_k_rope=rope,
        reserved_skip_index=skipped,
    )  # fmt: skip
    assert torch.equal(cache, expected)


# --- Rotations ------------------------------------------------------------------------------------


def table_of(width, place):
    frequencies = 1e4 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(16)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(place)


def rotated(x, table, positions, is_neox):
    """Rotate (tokens, heads, width) in float64, and round once."""
    cos, sin = (part[:, None].double() for part in table[positions].chunk(2, dim=-1))
    out, n = x.double().clone(), table.shape[1]
    first, second = (
        (slice(0, n // 2), slice(n // 2, n)) if is_neox else (slice(0, n, 2), slice(1, n, 2))
    )
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def assert_rotated(x, expected):
    assert torch.allclose(x.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rope_in_place(place, rotary_dim, is_neox):
    table, positions = table_of(rotary_dim, place), ints([3, 0, 9], place)
    q, k = (rows(3, h, WIDTH, place=place, seed=h, dtype=torch.float32) for h in (4, 2))
    expected = [rotated(x, table, positions, is_neox) for x in (q, k)]
    flat = q.flatten(1).clone(), k.flatten(1).clone()
    sglang.apply_rope_inplace(q, k, table, positions, is_neox=is_neox, rope_dim=rotary_dim)
    sglang.apply_rope_with_cos_sin_cache_inplace(positions, *flat, WIDTH, table, is_neox)
    for x, y, z in zip((q, k), expected, flat, strict=True):
        assert_rotated(x, y)
        assert torch.equal(x.flatten(1), z)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rope_stores_the_rounded_key(place, dtype):
    """It is the rotation, then `set_kv_buffer` with what that left."""
    table, positions = table_of(4, place), ints([3, 0, 9], place)
    query, key, value = (
        rows(3, h * WIDTH, place=place, seed=s) for s, h in ((1, 4), (2, 2), (3, 2))
    )
    q, k = query.clone(), key.clone()
    sglang.apply_rope_with_cos_sin_cache_inplace(positions, q, k, WIDTH, table)
    buffers = torch.zeros(2, SLOTS, HEADS * WIDTH, device=place).to(dtype)
    loc = ints([5, -1, 0], place, torch.int32)
    scales = (None, None) if dtype == torch.bfloat16 else (0.7, torch.ones(1, device=place))
    argument = sglang.FusedSetKVBufferArg(
        value=value, k_buffer=buffers[0], v_buffer=buffers[1], k_scale=scales[0],
        v_scale=scales[1], cache_loc=loc,
    )  # fmt: skip
    sglang.apply_rope_with_cos_sin_cache_inplace(
        positions, query, key, WIDTH, table, fused_set_kv_buffer_arg=argument
    )
    assert torch.equal(query, q) and torch.equal(key, k)
    expected = torch.zeros_like(buffers)
    shape = (-1, HEADS, WIDTH)
    sglang.set_kv_buffer(
        *(x.view(SLOTS, HEADS, WIDTH) for x in expected), loc, k.view(shape), value.view(shape),
        *scales,
    )  # fmt: skip
    assert torch.equal(buffers.view(torch.uint8), expected.view(torch.uint8))
    assert buffers[0, 5].float().any() and buffers[1, 0].float().any()  # slot 0 is one like others


def test_rope_with_a_cache_agrees_with_the_stand_in(place):
    table, positions, loc = table_of(WIDTH, place), ints([3, 0, 9], place), ints([5, 1, 4], place)
    q, k, v = (rows(3, h, WIDTH, place=place, seed=s, dtype=torch.float32)
               for s, h in ((1, 4), (2, 2), (3, 2)))  # fmt: skip
    results = []
    for module in (sglang, peer_modules):
        tensors = [x.clone() for x in (q, k, v)]
        tensors += [torch.zeros(SLOTS, 16, device=place) for _ in "kv"]
        module.apply_rope_inplace_with_kvcache(*tensors, table, positions, loc, is_neox=True)
        results.append(tensors)
    for x, y in zip(*results, strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-4)
    assert torch.equal(results[0][3][5], results[0][1][0].flatten())


# --- Transfers ------------------------------------------------------------------------------------

LAYERS, ITEM = 3, 24
SRC, DST = [7, 2, 11, 3], [0, 9, 8, 5]


def layers_of(slots, place, seed):
    """Return memory of K and V, (2, layers, slots, item)."""
    return random_bytes(2, LAYERS, slots, ITEM, place=place, seed=seed)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("mla", [False, True])
def test_rows_of_a_layer(place, mla, index_dtype):
    src, dst = layers_of(12, place, 1)[:, 0], layers_of(10, place, 2)[:, 0]
    expected = dst.clone()
    for part in range(1 if mla else 2):
        expected[part, DST] = src[part, SRC]
    indices = [ints([*x, -1], place, index_dtype) for x in (SRC, DST)]
    if mla:
        sglang.transfer_kv_per_layer_mla(src[0], dst[0], *indices, ITEM)
    else:
        # Of another dtype and shape: item_size is bytes.
        k, v = (x.view(torch.bfloat16).view(12, 3, 4) for x in src)
        sglang.transfer_kv_per_layer(k, dst[0], v, dst[1], *indices, ITEM, block_quota=1)
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("mla", [False, True])
def test_page_first_memory_has_the_layers_of_a_token_together(place, mla):
    by_token = random_bytes(2, 12, LAYERS, ITEM, place=place, seed=2)
    layer = layers_of(10, place, 1)[:, 1].clone()
    expected = layer.clone()
    for part in range(1 if mla else 2):
        expected[part, DST] = by_token[part, SRC, 1]
    indices, row = (ints(SRC, place), ints(DST, place)), LAYERS * ITEM
    if mla:
        sglang.transfer_kv_per_layer_mla_pf_lf(by_token[0], layer[0], *indices, 1, ITEM, row)
    else:
        sglang.transfer_kv_per_layer_pf_lf(
            by_token[0], layer[0], by_token[1], layer[1], *indices, 1, ITEM, row
        )
    assert torch.equal(layer, expected)


def test_what_a_transfer_writes_counts_as_a_change(place):
    src, dst = layers_of(2, place, 1)[:, 0], layers_of(2, place, 2)[:, 0]
    before = src._version, dst._version
    row = ints([1], place)
    sglang.transfer_kv_per_layer(src[0], dst[0], src[1], dst[1], row, row, ITEM)
    assert src._version == before[0] and dst._version > before[1]


def test_no_rows_move_nothing(place):
    src, dst = layers_of(2, place, 1)[:, 0], layers_of(2, place, 2)[:, 0]
    before = dst.clone()
    sglang.transfer_kv_per_layer(src[0], dst[0], src[1], dst[1], *[ints([], place)] * 2, ITEM)
    assert torch.equal(dst, before)


def test_an_index_past_a_tensor_is_a_fault(device, place):
    src, dst = layers_of(2, place, 1)[0, 0], layers_of(2, place, 2)[0, 0]
    before = dst.clone()
    sglang.transfer_kv_per_layer_mla(src, dst, ints([2], place), ints([0], place), ITEM)
    with pytest.raises(kv.IndexFault, match="transfer_pages"):
        kv.check_faults(device)
    assert torch.equal(dst, before)


# --- What is refused ------------------------------------------------------------------------------


def test_stores_and_rotations_name_the_argument(place):
    k, cache, loc = rows(2, 16, place=place), rows(SLOTS, 16, place=place), ints([1, 2], place)
    table, positions = table_of(WIDTH, place), ints([0, 1], place)
    q = rows(2, 2, WIDTH, place=place)
    bytes_ = torch.zeros(SLOTS, HEADS, WIDTH, dtype=torch.uint8, device=place)

    def fused(**changes):
        stored = {
            "value": k, "k_buffer": cache, "v_buffer": cache.clone(), "k_scale": None,
            "v_scale": None, "cache_loc": loc,
        }  # fmt: skip
        argument = sglang.FusedSetKVBufferArg(**{**stored, **changes})
        sglang.apply_rope_with_cos_sin_cache_inplace(
            positions, k.clone(), k.clone(), WIDTH, table, True, argument
        )

    for error, name, call in (
        (TypeError, "k", lambda: sglang.set_kv_buffer_kernel(
            cache, cache.clone(), loc, k.float(), k)),
        (ValueError, "v", lambda: sglang.set_kv_buffer_kernel(
            cache, cache.clone(), loc, k, k[:, :8])),
        (ValueError, "v", lambda: sglang.set_kv_buffer_kernel(
            cache, cache.clone(), loc, k, k[:1])),
        (ValueError, "v_cache", lambda: sglang.set_kv_buffer_kernel(cache, cache[:3], loc, k, k)),
        (TypeError, "loc", lambda: sglang.set_kv_buffer_kernel(
            cache, cache.clone(), loc.float(), k, k)),
        (ValueError, "row_bytes", lambda: sglang.store_cache(
            k, k, cache, cache.clone(), loc, row_bytes=16)),
        (ValueError, "size_limit", lambda: sglang.store_cache(
            k, k, cache, cache.clone(), loc, size_limit=SLOTS + 1)),
        (ValueError, "kv_buffer", lambda: sglang.set_mla_kv_buffer(cache, loc, k, k)),
        (TypeError, "dtype", lambda: sglang.set_kv_buffer(bytes_, bytes_.clone(), loc, q, q)),
        (ValueError, "cos_sin_cache", lambda: sglang.apply_rope_inplace(
            q, q.clone(), table.half(), positions, is_neox=True)),
        (ValueError, "rope_dim", lambda: sglang.apply_rope_inplace(
            q, q.clone(), table, positions, is_neox=True, rope_dim=4)),
        (ValueError, "query", lambda: sglang.apply_rope_with_cos_sin_cache_inplace(
            positions, k[:, :12], k.clone(), WIDTH, table)),
        (ValueError, "k_buffer", lambda: fused(k_buffer=cache[:, :8])),
        (ValueError, "value", lambda: fused(value=k[:, :15])),
        (TypeError, "k_buffer", lambda: fused(k_buffer=cache.to(torch.uint8))),
        (TypeError, "cache_loc", lambda: fused(cache_loc=loc.float())),
        (ValueError, "k_scale", lambda: fused(k_scale=0.5)),  # of a cache that is not quantised
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: "):
            call()


def test_transfers_name_the_argument(place):
    src, dst = layers_of(8, place, 1)[:, 0], layers_of(8, place, 2)[:, 0]
    before = dst.clone()
    row = ints([1], place)
    per_layer = sglang.transfer_kv_per_layer_mla
    pages = ints([0, 1, 2, 3], place)
    for error, name, call in (
        (ValueError, "src", lambda: per_layer(src[0].T, dst[0], row, row, ITEM)),
        (TypeError, "dst", lambda: per_layer(src[0], None, row, row, ITEM)),
        (ValueError, "item_size", lambda: per_layer(src[0], dst[0], row, row, 0)),
        (ValueError, "dst_indices", lambda: per_layer(src[0], dst[0], row, pages, ITEM)),
        (TypeError, "src_indices", lambda: per_layer(src[0], dst[0], row.float(), row, ITEM)),
        (ValueError, "layer_id", lambda: sglang.transfer_kv_per_layer_mla_pf_lf(
            src[0], dst[0], row, row, 2, ITEM, 2 * ITEM)),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: "):
            call()
    assert torch.equal(dst, before)


# --- States ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["merge_state", "merge_state_v2"])
def test_states_merge(place, name, in_place):
    """In base 2; v2 in base e, where plus infinity says that there are no keys."""
    v = rows(2, 3, HEADS, WIDTH, place=place, dtype=torch.float32)
    s = rows(2, 3, HEADS, place=place, seed=5, dtype=torch.float32)
    s[0, 1] = torch.inf if name.endswith("v2") else -torch.inf
    before = s.clone()
    outs = (torch.empty_like(v[0]), torch.empty_like(s[0])) if in_place else ()
    merged, lse = getattr(sglang, name)(v[0], s[0], v[1], s[1], *outs)
    exp, log = (torch.exp, torch.log) if name.endswith("v2") else (torch.exp2, torch.log2)
    weights = exp(s.double().nan_to_num(posinf=-torch.inf))
    expected = (v * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    assert torch.allclose(merged.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse.double(), log(weights.sum(0)), rtol=1e-5, atol=1e-5)
    assert torch.equal(s, before) and torch.equal(merged[1], v[1, 1])
    assert not in_place or (merged is outs[0] and lse is outs[1])
    with pytest.raises(ValueError, match=r"^s_b: "):
        getattr(sglang, name)(v[0], s[0], v[1], s[1, :2])


@pytest.mark.parametrize(
    "name",
    ["concat_mla_k", "fused_fp8_qkv_kv_cache", "set_kv_buffer_prefix_valid",
     "transfer_hicache_one_layer", "transfer_hicache_all_layer", "transfer_kv_all_layer",
     "transfer_kv_direct"],
)  # fmt: skip
def test_what_is_not_offered_says_why(name):
    with pytest.raises(NotImplementedError, match=f"^{name}: .{{20}}"):
        getattr(sglang, name)(None)
    assert sglang.can_use_set_mla_kv_buffer(1024, 128) and not hasattr(sglang, "merge_state_v3")
