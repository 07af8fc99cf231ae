"""The calls of FlashInfer, SGLang and vLLM, compared with what their documentation says.

Calls of several peers that mean the same are rows of one table.
"""

from __future__ import annotations

import math

import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

from peers import close, ints, quantised, rope_table, rotated, rows, same_bits  # noqa: E402

from kvcupy.interop import flashinfer, sglang, vllm  # noqa: E402

PAGES, SIZE, HEADS, WIDTH = 4, 16, 2, 8
SLOTS = [17, -1, 63, 0]
END = PAGES * SIZE
SEQUENCES = [2], [0, 3, 1]
"""FlashInfer's pages of two sequences."""


def no_scale(place):
    return torch.tensor([3.0], device=place)  # ignored where nothing is quantised


def by_position(slots, dtype):
    """Return FlashInfer's indices of slots; a slot past the end has no page in its sequence."""
    tokens, place = [], slots.device
    for slot in slots.tolist():
        page, offset = divmod(slot, SIZE)
        token = (-1, 0) if slot < 0 else (0, SIZE)
        for seq, pages in enumerate(SEQUENCES):
            if slot >= 0 and page in pages:
                token = seq, pages.index(page) * SIZE + offset
        tokens.append(token)
    batch, positions = zip(*tokens, strict=True)
    lists = batch, positions, [2, 0, 3, 1], [0, 1, 4], [SIZE, SIZE]
    return [ints(values, place, dtype) for values in lists]


# --- Stores ---------------------------------------------------------------------------------------


def append(k, v, cache, slots, **options):
    batch, positions, *table = by_position(slots, slots.dtype)
    flashinfer.append_paged_kv_cache(k, v, batch, positions, cache, *table, **options)


def reshape_and_cache(k, v, caches, slots):
    scale = no_scale(k.device)
    vllm.reshape_and_cache_flash(k, v, *caches, slots, "auto", scale, scale)


def reshape_and_cache_hnd(k, v, caches, slots):
    reshape_and_cache(k, v, [x.transpose(1, 2) for x in caches], slots)


STORES = {
    # By name the memory that the call writes, the slot that it skips, and the call.
    "append_paged_kv_cache": ("whole NHD", None, append),
    "append_paged_kv_cache HND": (
        "whole HND", None, lambda *arguments: append(*arguments, kv_layout="HND")
    ),
    "append_paged_kv_cache tuple": ("pair NHD", None, append),
    "append_paged_kv_cache tuple HND": (
        "pair HND", None, lambda *arguments: append(*arguments, kv_layout="HND")
    ),
    "reshape_and_cache_flash": ("pair NHD", None, reshape_and_cache),
    "reshape_and_cache_flash HND": ("pair HND", None, reshape_and_cache_hnd),
    "set_kv_buffer_kernel": (
        "slots", None, lambda k, v, c, slots: sglang.set_kv_buffer_kernel(*c, slots, k, v)
    ),
    "set_kv_buffer_kernel rows": (
        "rows", None,
        lambda k, v, c, slots: sglang.set_kv_buffer_kernel(*c, slots, k.flatten(1), v.flatten(1)),
    ),
    "store_cache": (
        "rows", 0,
        lambda k, v, c, slots: sglang.store_cache(
            k.flatten(1), v.flatten(1), *c, slots.repeat_interleave(2)[::2], num_split=2,
            row_bytes=k[0].nbytes, v_row_bytes=v[0].nbytes,
        ),
    ),
    "store_cache skips another": (
        "slots", 17,
        lambda k, v, c, slots: sglang.store_cache(k, v, *c, slots, reserved_skip_index=17),
    ),
    "store_cache skips none": (
        "slots", None,
        lambda k, v, c, slots: sglang.store_cache(k, v, *c, slots, reserved_skip_index=-1),
    ),
}  # fmt: skip


def memory(form, dtype, place):
    """Return a cache for a call, and K and V of it as (slots, heads, width) views or copies."""
    axes = {"NHD": (PAGES, SIZE, HEADS), "HND": (PAGES, HEADS, SIZE)}.get(form[-3:])
    shape = (END, HEADS) if axes is None else axes
    whole = torch.full((2, *shape, WIDTH), 7, device=place).to(dtype)
    if form == "rows":
        whole = whole.flatten(2)
    parts = list(whole)
    if form.startswith("whole"):
        whole = whole.transpose(0, 1).contiguous()
        parts = list(whole.unbind(1))

    def read():
        by_slot = [x.transpose(1, 2) if form.endswith("HND") else x for x in parts]
        return torch.stack([x.reshape(END, HEADS, WIDTH) for x in by_slot])

    return whole if form.startswith("whole") else parts, read


@pytest.mark.covering(2)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("name", STORES)
def test_rows_are_copied_to_their_slots(place, name, dtype, index_dtype):
    """Slots say how many tokens there are, of which negative ones are skipped."""
    if dtype == torch.uint8 and "set_kv_buffer_kernel" not in name and "store_cache" not in name:
        dtype = torch.int8
    form, skipped, store = STORES[name]
    k, v = (rows(5, HEADS, WIDTH, place=place, seed=s).to(dtype) for s in (1, 2))
    cache, read = memory(form, dtype, place)
    expected = read()
    for i, slot in enumerate(SLOTS):
        if slot >= 0 and slot != skipped:
            expected[:, slot] = torch.stack((k[i], v[i]))
    store(k, v, cache, ints(SLOTS, place, index_dtype))
    assert torch.equal(read(), expected)


@pytest.mark.parametrize("name", STORES)
def test_a_slot_past_the_end_is_a_fault(device, place, name):
    form, _, store = STORES[name]
    cache, read = memory(form, torch.bfloat16, place)
    before, k = read(), rows(2, HEADS, WIDTH, place=place, dtype=torch.bfloat16)
    store(k, k, cache, ints([END, 5], place))
    before[:, 5] = k[1]
    assert torch.equal(read(), before)
    with pytest.raises(kv.IndexFault, match="store_kv"):
        kv.check_faults(device)


def test_slots_past_the_limit_are_past_the_end(device, place):
    k = rows(2, 16, place=place)
    caches = [torch.zeros(12, 16, device=place) for _ in "kv"]
    sglang.store_cache(k, k, *caches, ints([8, 2], place), size_limit=8)
    assert torch.equal(caches[0][2], k[1]) and not caches[1][8].any()
    with pytest.raises(kv.IndexFault, match="store_kv"):
        kv.check_faults(device)


QUANTISING = {
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.covering(2)
@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("scales", [(0.7, 1.3), ([0.5, 0.3], [2.0, 1.1]), (None, 2.0)])
@pytest.mark.parametrize("name", QUANTISING)
def test_rows_are_divided_by_scales_once(place, name, scales, as_bytes):
    """In float32, whatever the dtype of the rows, which are not changed."""
    dtype = QUANTISING[name]
    k, v = (rows(4, HEADS, WIDTH, place=place, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    k[0, 0, 0], k[2, 1, 1], v[3, 0, 2] = 3e38, -math.inf, math.nan
    kept = k.clone(), v.clone()
    by = [None if x is None else torch.tensor(x, device=place).view(-1) for x in scales]
    caches, read = memory("pair NHD", torch.uint8 if as_bytes else dtype, place)
    expected = read().view(dtype)
    for part, new, scale in zip(expected, (k, v), scales, strict=True):
        as_stored = quantised(new, scale, dtype)
        for i, slot in enumerate(SLOTS):
            if slot >= 0:
                part[slot] = as_stored[i]
    vllm.reshape_and_cache_flash(k, v, *caches, ints(SLOTS, place), name, *by)
    assert same_bits(read().view(dtype), expected)
    assert same_bits(k, kept[0]) and same_bits(v, kept[1])


def append_mla(latent, rope, cache, slots):
    batch, positions, *table = by_position(slots, torch.int32)
    parts = cache.split([16, 8], dim=-1)
    flashinfer.append_paged_mla_kv_cache(latent, rope, batch, positions, *parts, *table)


MLA_STORES = {
    "append_paged_mla_kv_cache": append_mla,
    "concat_and_cache_mla": lambda x, r, c, s: vllm.concat_and_cache_mla(
        x, r, c, s, "auto", no_scale(x.device)
    ),
    "concat_and_cache_mla fp8": lambda x, r, c, s: vllm.concat_and_cache_mla(
        x, r, c, s, "fp8", torch.tensor([0.3], device=x.device)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MLA_STORES)
def test_latent_and_key_lie_side_by_side(place, name):
    store = MLA_STORES[name]
    latent, rope = (rows(5, n, place=place, seed=n, dtype=torch.bfloat16) for n in (16, 8))
    whole = torch.cat((latent, rope), dim=-1)
    if name.endswith("fp8"):
        whole = quantised(whole, 0.3, torch.float8_e4m3fn).view(torch.uint8)
    cache = torch.full((PAGES, SIZE, 24), 7, device=place).to(whole.dtype)
    expected = cache.clone()
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[slot // SIZE, slot % SIZE] = whole[i]
    store(latent, rope, cache, ints(SLOTS, place))
    assert torch.equal(cache, expected)


# --- Rotations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [4, 6])
def test_rope_by_a_table(place, rotary_dim, is_neox):
    """The rotary dimension is the table's; heads are side by side in strided rows."""
    packed, positions = rows(6, 7 * WIDTH, place=place), ints([3, 0, 9, 15, 4, 4], place)
    kept, table = packed.clone(), rope_table(rotary_dim, place)
    cos, sin = table[positions].cpu().chunk(2, dim=-1)
    parts = packed[:, : 4 * WIDTH], packed[:, 4 * WIDTH : 6 * WIDTH]
    expected = [rotated(x.unflatten(1, (-1, WIDTH)), cos, sin, is_neox).flatten(1) for x in parts]
    sglang.apply_rope_with_cos_sin_cache_inplace(positions, *parts, WIDTH, table, is_neox)
    for x, y in zip(parts, expected, strict=True):
        assert close(x, y)
    assert torch.equal(packed[:, 6 * WIDTH :], kept[:, 6 * WIDTH :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_fused_rope_stores_the_rounded_key(place, dtype):
    """It is the rotation, then a store of what that left."""
    table, positions = rope_table(4, place), ints([3, 0, 9], place)
    query, key, value = (
        rows(3, h * WIDTH, place=place, seed=s, dtype=torch.bfloat16)
        for s, h in ((1, 4), (2, 2), (3, 2))
    )
    q, k = query.clone(), key.clone()
    sglang.apply_rope_with_cos_sin_cache_inplace(positions, q, k, WIDTH, table)
    buffers = torch.zeros(2, 12, HEADS * WIDTH, device=place).to(dtype)
    loc, expected = ints([5, -1, 0], place, torch.int32), torch.zeros_like(buffers)
    scales = (None, None) if dtype == torch.bfloat16 else (0.7, torch.ones(1, device=place))
    fused = sglang.FusedSetKVBufferArg(value, *buffers, *scales, loc)
    sglang.apply_rope_with_cos_sin_cache_inplace(
        positions, query, key, WIDTH, table, fused_set_kv_buffer_arg=fused
    )
    assert torch.equal(query, q) and torch.equal(key, k)
    by_head = [x.unflatten(1, (HEADS, WIDTH)) for x in (*expected, k, value)]
    kv.store_kv(*by_head[2:], *by_head[:2], loc, k_scale=scales[0], v_scale=scales[1])
    assert same_bits(buffers, expected)
    assert buffers[0, 5].float().any() and buffers[1, 0].float().any()  # slot 0 is like others


# --- States ---------------------------------------------------------------------------------------


MERGES = {
    "merge_state": lambda v, s: flashinfer.merge_state(v[0], s[0], v[1], s[1]),
    "merge_states": lambda v, s: flashinfer.merge_states(v.transpose(0, 1), s.transpose(0, 1)),
}


@pytest.mark.parametrize("name", MERGES)
def test_states_merge(place, name):
    """Token 1 has keys in the second state alone, token 2 in none."""
    count = 5 if name == "merge_states" else 2
    v, s = rows(count, 4, HEADS, WIDTH, place=place), rows(count, 4, HEADS, place=place, seed=5)
    s[0, 1] = -math.inf
    s[2:, 1] = -math.inf
    s[:, 2] = -math.inf
    kept = v.clone(), s.clone()
    weights = 2.0 ** s.cpu().double()
    total = weights.sum(0)
    expected = (v.cpu() * weights[..., None]).sum(0) / total[..., None]
    out, lse = MERGES[name](v, s)
    assert close(out, expected.nan_to_num()) and close(lse, total.log2())
    assert torch.equal(out[1], v[1, 1]) and not out[2].any() and lse.dtype == torch.float32
    assert torch.equal(v, kept[0]) and torch.equal(s, kept[1])


# --- SGLang's transfers ---------------------------------------------------------------------------

LAYERS, ITEM = 3, 24
SRC, DST = [7, 2, 11, 3], [0, 9, 8, 5]


def random_bytes(*shape, place, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(place, torch.uint8)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("page_first", [False, True])
@pytest.mark.parametrize("mla", [False, True])
def test_rows_of_a_layer(place, mla, page_first, index_dtype):
    """Of another dtype and shape: item_size is bytes. Pairs with a negative row are skipped."""
    src = random_bytes(2, *((12, LAYERS) if page_first else (12,)), ITEM, place=place, seed=1)
    dst = random_bytes(2, 10, ITEM, place=place, seed=2)
    expected, before = dst.clone(), (src._version, dst._version)
    for part in range(1 if mla else 2):
        expected[part, DST] = (src[:, :, 1] if page_first else src)[part, SRC]
    indices = [ints([*x, -1], place, index_dtype) for x in (SRC, DST)]
    sizes = (1, ITEM, LAYERS * ITEM) if page_first else (ITEM,)
    name = "transfer_kv_per_layer" + "_mla" * mla + "_pf_lf" * page_first
    source = [x.view(torch.bfloat16).view(12, 3, -1) for x in src]
    arrays = (source[0], dst[0]) if mla else (source[0], dst[0], source[1], dst[1])
    getattr(sglang, name)(*arrays, *indices, *sizes, block_quota=1)
    assert torch.equal(dst, expected)
    assert src._version == before[0] and dst._version > before[1]
    getattr(sglang, name)(*arrays, *[indices[0][:0]] * 2, *sizes)
    assert torch.equal(dst, expected)


def test_an_index_past_a_tensor_is_a_fault(device, place):
    src, dst = random_bytes(2, 2, ITEM, place=place, seed=1)
    before = dst.clone()
    sglang.transfer_kv_per_layer_mla(src, dst, ints([2], place), ints([0], place), ITEM)
    with pytest.raises(kv.IndexFault, match="transfer_pages"):
        kv.check_faults(device)
    assert torch.equal(dst, before)


# --- Stand-ins, and torch.compile -----------------------------------------------------------------


def flashinfer_layer(place):
    new = rows(3, HEADS, WIDTH, place=place)
    batch, positions, *csr = by_position(ints([5, 1, 40], place), torch.int32)
    lse = rows(3, HEADS, place=place, seed=1)

    def layer(cache):
        flashinfer.append_paged_kv_cache(new, new, batch, positions, cache, *csr)
        return flashinfer.merge_state(new, lse, new, lse)

    return layer


def vllm_layer(place):
    k, slots = rows(3, HEADS, WIDTH, place=place), ints([5, 1, 40], place)
    scale = torch.tensor([0.5], device=place)

    def layer(cache):
        as_bytes = cache.view(torch.uint8)[..., :WIDTH]
        vllm.reshape_and_cache_flash(k, k, *as_bytes.unbind(1), slots, "fp8", scale, scale)
        return (k + 1,)

    return layer


def sglang_layer(place):
    query, key = (rows(3, 16, place=place, seed=s) for s in (1, 2))
    table, positions = rope_table(8, place), ints([3, 0, 9], place)
    loc = ints([5, 1, 40], place)

    def layer(cache):
        q, k = query.clone(), key.clone()
        sglang.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 8, table)
        buffers = cache.view(2, END, HEADS, WIDTH)
        sglang.set_kv_buffer_kernel(*buffers, loc, *[k.view(3, HEADS, WIDTH)] * 2)
        return q, k

    return layer


@pytest.mark.parametrize("make", [flashinfer_layer, vllm_layer, sglang_layer])
def test_a_layer_is_traced(place, make):
    """`torch.compile` takes stores, rotations and merges without a break."""
    import torch._dynamo as dynamo

    plain, traced = torch.zeros(2, PAGES, 2, SIZE, HEADS, WIDTH, device=place)
    layer = make(place)
    expected = layer(plain)
    dynamo.reset()
    results = torch.compile(layer, fullgraph=True, backend="aot_eager")(traced)
    dynamo.reset()
    assert torch.equal(plain, traced) and plain.any()
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


# --- What is refused ------------------------------------------------------------------------------


def arguments_of(function, place):
    """Valid arguments of a call, which a row of `REFUSED` changes, and a cache that it writes."""

    def half(*shape):
        return torch.ones(*shape, dtype=torch.float16, device=place)

    k, cache, loc = half(4, HEADS, WIDTH), half(PAGES, SIZE, HEADS, WIDTH), ints(SLOTS, place)
    flat, by_slot = half(4, 16), half(END, 16)
    positions, table = ints([0, 1, 2, 3], place), rope_table(WIDTH, place)
    batch, at, *csr = by_position(loc, torch.int32)
    names = ("kv_indices", "kv_indptr", "kv_last_page_len")
    pages = {"batch_indices": batch, "positions": at, **dict(zip(names, csr, strict=True))}
    row, pairs = ints([1], place), ints([[0, 1]], "cpu")
    return {
        flashinfer.append_paged_kv_cache: {
            "append_key": k, "append_value": k, **pages, "paged_kv_cache": (cache, cache.clone()),
        },
        flashinfer.apply_rope_pos_ids_inplace: {"q": k, "k": k.clone(), "pos_ids": positions},
        flashinfer.merge_state: {
            "v_a": k, "s_a": k[..., 0], "v_b": k.clone(), "s_b": k[..., 1],
        },
        sglang.set_kv_buffer_kernel: {
            "k_cache": by_slot, "v_cache": by_slot.clone(), "loc": loc, "k": flat, "v": flat,
        },
        sglang.store_cache: {
            "k": flat, "v": flat, "k_cache": by_slot, "v_cache": by_slot.clone(), "indices": loc,
        },
        sglang.apply_rope_with_cos_sin_cache_inplace: {
            "positions": positions, "query": flat, "key": flat.clone(), "head_size": WIDTH,
            "cos_sin_cache": table, "value": flat.clone(), "k_buffer": by_slot,
            "v_buffer": by_slot.clone(), "k_scale": None, "v_scale": None, "cache_loc": loc,
        },
        sglang.transfer_kv_per_layer_mla: {
            "src": by_slot, "dst": by_slot.clone(), "src_indices": row, "dst_indices": row,
            "item_size": 32,
        },
        sglang.transfer_kv_per_layer_mla_pf_lf: {
            "src": by_slot, "dst": by_slot.clone(), "src_indices": row, "dst_indices": row,
            "layer_id": 1, "item_size": 16, "src_layout_dim": 32,
        },
        vllm.reshape_and_cache_flash: {
            "key": k, "value": k, "key_cache": cache, "value_cache": cache.clone(),
            "slot_mapping": loc, "kv_cache_dtype": "auto", "k_scale": None, "v_scale": None,
        },
        vllm.concat_and_cache_mla: {
            "kv_c": flat[:, :12], "k_pe": flat[:, 12:], "kv_cache": by_slot.view(PAGES, SIZE, 16),
            "slot_mapping": loc, "kv_cache_dtype": "auto", "scale": None,
        },
        vllm.reshape_and_cache: {
            "key": k, "value": k, "key_cache": half(PAGES, HEADS, 1, SIZE, WIDTH),
            "value_cache": half(PAGES, HEADS, WIDTH, SIZE), "slot_mapping": loc,
            "kv_cache_dtype": "auto", "k_scale": None, "v_scale": None,
        },
        vllm.copy_blocks: {
            "key_caches": [cache], "value_caches": [cache.clone()], "block_mapping": pairs,
        },
        vllm.swap_blocks: {
            "src": flat, "dst": flat.clone(), "block_size_in_bytes": 32, "block_mapping": pairs,
        },
    }[function]  # fmt: skip


def half(*shape):
    return torch.ones(*shape, dtype=torch.float16)


BYTES = torch.zeros(PAGES, SIZE, HEADS, WIDTH, dtype=torch.uint8)
E5M2 = BYTES.view(torch.float8_e5m2)
FP8 = {"key_cache": BYTES, "value_cache": BYTES, "kv_cache_dtype": "fp8"}
SCALE = torch.ones(1, dtype=torch.float64)
REFUSED = [
    # The first of the changes is to be named; its value may be a function of the valid one.
    (flashinfer.append_paged_kv_cache, TypeError, {"append_key": torch.Tensor.float}),
    (flashinfer.append_paged_kv_cache, ValueError, {"append_value": lambda x: x[..., :7]}),
    (flashinfer.append_paged_kv_cache, ValueError, {"append_key": lambda x: x[:3]}),
    (flashinfer.append_paged_kv_cache, TypeError, {"batch_indices": torch.Tensor.float}),
    (flashinfer.append_paged_kv_cache, ValueError, {"positions": lambda x: x[:3]}),
    (flashinfer.append_paged_kv_cache, ValueError, {"paged_kv_cache": half(6, 3, SIZE, 2, 8)}),
    (flashinfer.append_paged_kv_cache, TypeError, {"paged_kv_cache": None}),
    (flashinfer.append_paged_kv_cache, ValueError, {
        "paged_kv_cache": lambda x: (x[0], x[1][:, :, [0, 1, 1]])}),
    (flashinfer.append_paged_kv_cache, ValueError, {"kv_last_page_len": lambda x: x[:1]}),
    (flashinfer.append_paged_kv_cache, TypeError, {"kv_indptr": [0, 2, 3]}),
    (flashinfer.append_paged_kv_cache, ValueError, {"kv_layout": "DHN"}),
    (flashinfer.apply_rope_pos_ids_inplace, ValueError, {"pos_ids": torch.tensor([[0, 1]])}),
    (flashinfer.merge_state, ValueError, {"v_b": lambda x: x[:1]}),
    (sglang.set_kv_buffer_kernel, TypeError, {"k": torch.Tensor.float}),
    (sglang.set_kv_buffer_kernel, ValueError, {"v": lambda x: x[:, :8]}),
    (sglang.set_kv_buffer_kernel, ValueError, {"v": lambda x: x[:1]}),
    (sglang.set_kv_buffer_kernel, ValueError, {"v_cache": lambda x: x[:3]}),
    (sglang.set_kv_buffer_kernel, TypeError, {"loc": torch.Tensor.float}),
    (sglang.store_cache, ValueError, {"row_bytes": 16}),
    (sglang.store_cache, ValueError, {"size_limit": END + 1}),
    (sglang.apply_rope_with_cos_sin_cache_inplace, ValueError, {"query": lambda x: x[:, :12]}),
    (sglang.apply_rope_with_cos_sin_cache_inplace, ValueError, {"k_buffer": lambda x: x[:, :8]}),
    (sglang.apply_rope_with_cos_sin_cache_inplace, ValueError, {"value": lambda x: x[:, :15]}),
    (sglang.apply_rope_with_cos_sin_cache_inplace, TypeError, {
        "k_buffer": lambda x: x.to(torch.uint8)}),
    (sglang.apply_rope_with_cos_sin_cache_inplace, TypeError, {"cache_loc": torch.Tensor.float}),
    # Of a cache that is not quantised.
    (sglang.apply_rope_with_cos_sin_cache_inplace, ValueError, {"k_scale": 0.5}),
    (sglang.transfer_kv_per_layer_mla, ValueError, {"src": lambda x: x.T}),
    (sglang.transfer_kv_per_layer_mla, TypeError, {"dst": None}),
    (sglang.transfer_kv_per_layer_mla, ValueError, {"item_size": 0}),
    (sglang.transfer_kv_per_layer_mla, ValueError, {"dst_indices": torch.tensor([0, 1])}),
    (sglang.transfer_kv_per_layer_mla, TypeError, {"src_indices": torch.Tensor.float}),
    (sglang.transfer_kv_per_layer_mla_pf_lf, ValueError, {"layer_id": 2}),
    (sglang.transfer_kv_per_layer_mla_pf_lf, ValueError, {"src_layout_dim": 0}),
    (vllm.reshape_and_cache_flash, TypeError, {"key": torch.Tensor.float}),
    (vllm.reshape_and_cache_flash, ValueError, {"key": lambda x: x[:3]}),
    (vllm.reshape_and_cache_flash, ValueError, {"value": lambda x: x[..., :7]}),
    (vllm.reshape_and_cache_flash, ValueError, {"key_cache": lambda x: x.flatten(2)}),
    (vllm.reshape_and_cache_flash, ValueError, {"value_cache": lambda x: x[:2]}),
    (vllm.reshape_and_cache_flash, TypeError, {"slot_mapping": torch.Tensor.float}),
    (vllm.reshape_and_cache_flash, ValueError, {"slot_mapping": lambda x: x.view(2, 2)}),
    (vllm.reshape_and_cache_flash, NotImplementedError, {"kv_cache_dtype": "nvfp4"}),
    (vllm.reshape_and_cache_flash, NotImplementedError, {"kv_cache_dtype": "fp8_ds_mla"}),
    (vllm.reshape_and_cache_flash, TypeError, {"key_cache": half(4, 16, 2, 8),
                                               "kv_cache_dtype": "fp8"}),
    (vllm.reshape_and_cache_flash, TypeError, {"key_cache": E5M2, "value_cache": E5M2,
                                               "kv_cache_dtype": "fp8"}),
    (vllm.reshape_and_cache_flash, ValueError, {"k_scale": torch.ones(3), **FP8}),
    (vllm.reshape_and_cache_flash, TypeError, {"k_scale": SCALE, **FP8}),
    (vllm.reshape_and_cache_flash, ValueError, {"k_scale": 0.0, **FP8}),
    (vllm.concat_and_cache_mla, ValueError, {"kv_cache": lambda x: x[..., :10]}),
    (vllm.concat_and_cache_mla, TypeError, {"k_pe": torch.Tensor.float}),
    (vllm.reshape_and_cache, ValueError, {"key_cache": lambda x: x.flatten(1, 2)}),
    (vllm.reshape_and_cache, ValueError, {"key_cache": half(4, 2, 8, 16, 1)}),
    (vllm.reshape_and_cache, ValueError, {"value_cache": lambda x: x[:, :, :7]}),
    (vllm.reshape_and_cache, TypeError, {"value": torch.Tensor.float}),
    (vllm.reshape_and_cache, ValueError, {"slot_mapping": lambda x: x.view(2, 2)}),
    (vllm.reshape_and_cache, ValueError, {"k_scale": torch.ones(2), "kv_cache_dtype": "fp8",
                                          "key_cache": BYTES.view(4, 2, 1, 16, 8),
                                          "value_cache": BYTES.view(4, 2, 8, 16)}),
    (vllm.copy_blocks, ValueError, {"value_caches": []}),
    (vllm.copy_blocks, TypeError, {"block_mapping": torch.Tensor.float}),
    (vllm.swap_blocks, ValueError, {"src": lambda x: x.T}),
    (vllm.swap_blocks, ValueError, {"block_size_in_bytes": 0}),
    (vllm.swap_blocks, ValueError, {"block_mapping": torch.tensor([0, 1])}),
    (vllm.swap_blocks, TypeError, {"block_mapping": torch.Tensor.float}),
]  # fmt: skip


def call_with(function, arguments):
    if function is sglang.apply_rope_with_cos_sin_cache_inplace:
        names = sglang.FusedSetKVBufferArg.__dataclass_fields__
        fused = sglang.FusedSetKVBufferArg(**{name: arguments.pop(name) for name in names})
        arguments["fused_set_kv_buffer_arg"] = fused
    function(**arguments)


@pytest.mark.parametrize(
    ("function", "error", "changes"), REFUSED,
    ids=[f"{f.__module__[15:]}.{f.__name__}-{next(iter(c))}" for f, _, c in REFUSED],
)  # fmt: skip
def test_a_refused_argument_is_named(place, function, error, changes):
    arguments = arguments_of(function, place)
    written = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    before = {name: x.clone() for name, x in written.items()}
    for name, value in changes.items():
        value = value.to(place) if isinstance(value, torch.Tensor) else value
        arguments[name] = value(arguments[name]) if callable(value) else value
    with pytest.raises(error, match=f"^{next(iter(changes))}( \\(.\\))?: "):
        call_with(function, arguments)
    assert all(torch.equal(x, before[name]) for name, x in written.items())


def test_arguments_of_refused_calls_are_valid(place):
    """So that a row of the table fails for the change it makes."""
    for function in dict.fromkeys(function for function, _, _ in REFUSED):
        call_with(function, arguments_of(function, place))
