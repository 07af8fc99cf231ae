"""FlashInfer's calls that quantise: fp8 with a rotation, and nvfp4 with scales apart."""

from __future__ import annotations

import numpy as np
import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

from peers import attended, close, ints, quantised, rope_table, rotated, rotated_at, rows, same_bits  # noqa: E402

from kvcupy.interop import flashinfer  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS, KV_HEADS, ROPE, PAGE = 4, 2, 8, 4
POSITIONS = [3, 0, 9, 15, 4]
INDPTR, INDICES, LAST = [0, 2, 3], [5, 0, 3], [3, 2]
TOKENS = [0, 0, 1, -1, 1], [5, 6, 0, 0, 1]
"""Pages of two sequences, and sequence and position of each appended token, one of them padding."""
SLOTS = [0 * PAGE + 1, 0 * PAGE + 2, 3 * PAGE, -1, 3 * PAGE + 1]


def parts(place, nope, *heads, seed=0, dtype=torch.bfloat16):
    """Rotated and other part of one tensor, strided."""
    whole = rows(5, *heads, ROPE + nope, place=place, seed=seed, dtype=dtype)
    return whole[..., :ROPE], whole[..., ROPE:]


def expected_of(rope, nope, place, is_neox, scale, dtype):
    """Rotate with one rounding to the dtype, then quantise both parts."""
    cos, sin = rope_table(ROPE, place)[POSITIONS].cpu().chunk(2, dim=-1)
    turned = rotated(rope.reshape(5, -1, ROPE), cos, sin, is_neox)
    turned = turned.view(rope.shape).to(place, rope.dtype)
    return [quantised(x.flatten(1), 1 / scale, dtype).view(x.shape) for x in (turned, nope)]


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("nope", [0, 12])
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_queries_and_keys_are_rotated_and_quantised(place, mla, nope, is_neox, dtype):
    """Into new tensors, and in place into strided ones; inputs stay."""
    heads = () if mla else (KV_HEADS,)
    q, k = parts(place, nope, HEADS), parts(place, nope, *heads, seed=1)
    kept = [x.clone() for x in (*q, *k)]
    table, positions = rope_table(ROPE, place), ints(POSITIONS, place)
    name = "mla_rope_quantize_fp8" if mla else "rope_quantize_fp8"
    quantise = getattr(flashinfer, name)
    others = (q[1], k[1]) if nope else (None, None)
    scales = {"quant_scale_q": 0.7, "quant_scale_kv": 2.5}
    results = quantise(
        q[0], k[0], *others, table, positions, is_neox, quantize_dtype=dtype, **scales
    )
    expected = [
        expected_of(*q, place, is_neox, 0.7, dtype), expected_of(*k, place, is_neox, 2.5, dtype)
    ]  # fmt: skip
    expected = [each[part] for part in (0, 1) for each in expected]
    assert all(same_bits(x, y) for x, y in zip(results, expected, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((*q, *k), kept, strict=True))
    whole = [x.new_zeros((*x.shape[:-1], ROPE + nope)).to(dtype) for x in (q[0], k[0])]
    outs = [x[..., part] for part in (slice(ROPE), slice(ROPE, None)) for x in whole]
    names = "q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"
    given = dict(zip(names, outs, strict=True))
    written = quantise(q[0], k[0], *others, table, positions, is_neox, **given, **scales)
    assert all(x is y for x, y in zip(written, outs, strict=True))
    assert all(same_bits(x, y) for x, y in zip(written, results, strict=True))


def appended(place, kind, kv_layout, nope, **options):
    """Call the fused append; return its results, and K and V as (slots, heads, width)."""
    heads = () if kind == "mla" else (KV_HEADS,)
    q, k = parts(place, nope, HEADS), parts(place, nope, *heads, seed=1)
    axes = (PAGE, KV_HEADS) if kv_layout == "NHD" else (KV_HEADS, PAGE)
    if kind == "mla":
        v, shapes = None, ((6, PAGE, nope), (6, PAGE, ROPE))
    else:
        v = rows(5, KV_HEADS, 10, place=place, seed=2, dtype=torch.bfloat16)
        shapes = (6, *axes, ROPE + nope), (6, *axes, 10)
    caches = [torch.full(shape, 2.0, device=place).to(E4M3) for shape in shapes]
    tables = [ints(x, place, torch.int32) for x in (INDICES, INDPTR, *TOKENS)]
    others = (q[1], k[1]) if nope else (None, None)
    results = flashinfer.rope_quantize_fp8_append_paged_kv_cache(
        q[0], k[0], *others, v, rope_table(ROPE, place), ints(POSITIONS, place), tuple(caches),
        *tables, page_size=PAGE, kv_layout=kv_layout, **options,
    )  # fmt: skip
    by_slot = [
        (x.transpose(1, 2) if kv_layout == "HND" and kind != "mla" else x).flatten(0, 1)
        for x in caches
    ]
    return results, by_slot, q, k, v


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(
    ("kind", "kv_layout", "nope"),
    [("gqa", "NHD", 0), ("gqa", "HND", 0), ("gqa", "NHD", 12), ("gqa", "HND", 12),
     ("mla", "NHD", 12)],
)  # fmt: skip
def test_fp8_is_appended(place, kind, kv_layout, nope, is_neox):
    """What slots have is what `rope_quantize_fp8` gives; others stay."""
    options = {"quant_scale_q": 0.7, "quant_scale_kv": 2.5, "is_neox": is_neox}
    results, caches, q, k, v = appended(place, kind, kv_layout, nope, **options)
    others = (q[1], k[1]) if nope else (None, None)
    q_rope, k_rope, q_nope, k_nope = flashinfer.rope_quantize_fp8(
        q[0], k[0], *others, rope_table(ROPE, place), ints(POSITIONS, place), **options
    )
    assert same_bits(results[0], q_rope) and same_bits(results[1], q_nope)
    if kind == "mla":
        written = k_nope, k_rope
    else:
        written = (
            torch.cat((k_rope.float(), k_nope.float()), -1).to(E4M3),
            quantised(v.flatten(1), 1 / 2.5, E4M3).view(v.shape),
        )
    for cache, new in zip(caches, written, strict=True):
        expected = torch.full_like(cache.float(), 2.0)
        for i, slot in enumerate(SLOTS):
            if slot >= 0:
                expected[slot] = new[i].float()
        assert torch.equal(cache.float(), expected)


def test_a_position_outside_the_table_is_a_fault(device, place):
    q, k = parts(place, 4, HEADS), parts(place, 4, KV_HEADS)
    table, positions = rope_table(ROPE, place), ints([3, 0, 9, 16, 4], place)
    results = flashinfer.rope_quantize_fp8(q[0], k[0], q[1], k[1], table, positions)
    with pytest.raises(kv.IndexFault, match="rope_store_kv"):
        kv.check_faults(device)
    assert not results[0][3].float().any() and results[0][4].float().any()


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (ValueError, {"cos_sin_cache": torch.zeros(16, ROPE).half()}),
        (ValueError, {"q_rope": torch.zeros(4, HEADS, ROPE)}),
        (ValueError, {"k_rope": torch.zeros(5, KV_HEADS, 6)}),
        (TypeError, {"k_rope": torch.zeros(5, KV_HEADS, ROPE, dtype=torch.int32)}),
        (ValueError, {"q_nope": torch.zeros(5, 3, 12)}),
        (TypeError, {"k_nope": torch.zeros(5, KV_HEADS, 12, dtype=torch.float32)}),
        (TypeError, {"quantize_dtype": torch.float16}),
        (ValueError, {"quant_scale_q": 0.0}),
        (ValueError, {"quant_scale_kv": float("nan")}),
        (TypeError, {"q_rope_out": torch.zeros(5, HEADS, ROPE).to(E5M2), "quantize_dtype": E4M3}),
        (ValueError, {"k_nope_out": torch.zeros(5, KV_HEADS, 11).to(E4M3)}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_argument_of_a_rotation_is_named(place, error, changes):
    q, k = parts(place, 12, HEADS), parts(place, 12, KV_HEADS)
    arguments = {
        "q_rope": q[0], "k_rope": k[0], "q_nope": q[1], "k_nope": k[1],
        "cos_sin_cache": rope_table(ROPE, place), "pos_ids": ints(POSITIONS, place),
    }  # fmt: skip
    flashinfer.rope_quantize_fp8(**arguments)
    changes = {n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
    with pytest.raises(error, match=f"^{next(iter(changes))}: "):
        flashinfer.rope_quantize_fp8(**{**arguments, **changes})


def test_an_append_of_fp8_is_refused_by_name(place):
    for error, name, kind, options in (
        (TypeError, r"paged_kv_cache \(first\)", "gqa", {"quantize_dtype": E5M2}),
        (ValueError, r"q_rope_out", "mla", {"q_rope_out": torch.zeros(1, device=place)}),
    ):
        with pytest.raises(error, match=f"^{name}: "):
            appended(place, kind, "NHD", 12, **options)
    with pytest.raises(ValueError, match=r"^k_nope: expected latents"):
        appended(place, "mla", "NHD", 0)


# --- nvfp4 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("width", [16, 64])
def test_nvfp4_with_scales_apart(place, kv_layout, stacked, by_slot, width):
    """Codes and block scales are as in a row of a kvcupy cache; other slots stay."""
    k, v = (rows(6, KV_HEADS, width, place=place, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    axes = (PAGE, KV_HEADS) if kv_layout == "NHD" else (KV_HEADS, PAGE)
    codes = torch.full((6, 2, *axes, width // 2), 7, dtype=torch.uint8, device=place)
    scales = torch.full((6, 2, *axes, width // 16), 7.0, device=place).to(E4M3)
    before = codes.clone(), scales.clone()
    caches = (codes, scales) if stacked else [tuple(x.unbind(1)) for x in (codes, scales)]
    by = torch.tensor([0.5], device=place), 0.25
    if by_slot:
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            k, v, ints(SLOTS, place), *caches, *by, kv_layout
        )
    else:
        tables = [ints(x, place, torch.int32) for x in (INDICES, INDPTR, LAST)]
        flashinfer.nvfp4_quantize_append_paged_kv_cache(
            k, v, *(ints(x, place, torch.int32) for x in TOKENS), *caches, *tables, *by, kv_layout
        )
    own = torch.zeros(2, 6, KV_HEADS, width // 16 * 9, dtype=torch.uint8, device=place)
    kv.store_kv(
        k, v, *(kv.view_as(x, "nvfp4") for x in own), np.arange(6) if place == "cpu"
        else torch.arange(6, device=place), k_scale=by[0], v_scale=by[1],
    )  # fmt: skip
    expected = [x.clone() for x in before]
    for part in range(2):
        for i, slot in enumerate(SLOTS):
            page, offset = divmod(slot, PAGE)
            if slot >= 0:
                for cache, row in zip(
                    expected, own[part, i].split([width // 2, width // 16], -1), strict=True
                ):
                    at = cache[page, part].view(torch.uint8)
                    if kv_layout == "NHD":
                        at[offset] = row
                    else:
                        at[:, offset] = row
    for x, y in zip((codes, scales), expected, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    page, offset = divmod(SLOTS[0], PAGE)
    row = [(x if kv_layout == "NHD" else x.transpose(2, 3))[page, 0, offset]
           for x in (codes, scales)]  # fmt: skip
    error = (dequantised(*row, 0.5) - k[0]).abs()
    assert 0 < error.max() <= k[0].abs().max() / 5


def dequantised(codes, scales, scale):
    """Return the numbers of codes of E2M1, times both scales."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
    table = torch.cat((table, -table))
    numbers = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
    return numbers * scales.float().repeat_interleave(16, -1) * scale


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", ["Decode", "Prefill", "Prefill, rotated"])
def test_attention_over_nvfp4_with_scales_apart(place, kv_layout, kind):
    width, lengths, pages = 32, (7, 2), 6
    axes = (PAGE, KV_HEADS) if kv_layout == "NHD" else (KV_HEADS, PAGE)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (2, pages, *axes, width // 2), generator=generator)
    codes = codes.to(place, torch.uint8)
    scales = rows(2, pages, *axes, width // 16, place=place).abs().to(E4M3)
    by = 0.5, 0.25
    counts = (1, 1) if kind == "Decode" else (3, 2)
    q = rows(sum(counts), HEADS, width, place=place, seed=3) / 8
    name = f"Batch{kind.split(',')[0]}WithPagedKVCacheWrapper"
    workspace = torch.empty(0, dtype=torch.uint8, device=place)
    wrapper = getattr(flashinfer, name)(workspace, kv_layout)
    tables = [ints(x, place, torch.int32) for x in (INDPTR, INDICES, LAST)]
    options = {"q_data_type": torch.float32, "kv_data_type": torch.uint8}
    if kind != "Decode":
        tables.insert(0, ints([0, 3, 5], place, torch.int32))
        options |= {"causal": True}
        options |= {"pos_encoding_mode": "ROPE_LLAMA"} if "rotated" in kind else {}
    wrapper.plan(*tables, HEADS, KV_HEADS, width, PAGE, **options)
    k, v = (dequantised(codes[i], scales[i], by[i]) for i in range(2))
    if kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    expected = []
    for i, (new, length) in enumerate(zip(q.split(counts), lengths, strict=True)):
        own = INDICES[INDPTR[i] : INDPTR[i + 1]]
        keys, values = (x[own].flatten(0, 1)[:length] for x in (k, v))
        if "rotated" in kind:
            new = rotated_at(new, range(length - len(new), length))
            keys = rotated_at(keys, range(length))
        expected.append(attended(new, keys, values)[0])
    cache = tuple(codes)
    options = {"k_scale": by[0], "v_scale": by[1]}
    out = wrapper.run(q, cache, kv_cache_sf=tuple(scales), **options)
    assert close(out, torch.cat(expected), 1e-4)
    for error, name, sf in (
        (ValueError, "kv_cache_sf", None), (ValueError, r"kv_cache_sf \(K\)", scales[..., :1]),
        (TypeError, r"kv_cache_sf \(K\)", scales.to(E5M2)),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: "):
            wrapper.run(q, cache, kv_cache_sf=None if sf is None else tuple(sf))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_attention_over_nvfp4_without_pages(place, kv_layout):
    width, starts = 32, [0, 7, 9]
    generator = torch.Generator().manual_seed(1)
    axes = (9, KV_HEADS) if kv_layout == "NHD" else (KV_HEADS, 9)
    codes = torch.randint(0, 256, (2, *axes, width // 2), generator=generator)
    codes = codes.to(place, torch.uint8)
    scales = rows(2, *axes, width // 16, place=place).abs().to(E4M3)
    k, v = (dequantised(codes[i], scales[i], by) for i, by in enumerate((0.5, 0.25)))
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    q = rows(5, HEADS, width, place=place, seed=3) / 8
    options = {"k_scale": 0.5, "v_scale": 0.25, "kv_cache_sf": tuple(scales)}
    one = flashinfer.single_prefill_with_kv_cache(q, *codes, kv_layout=kv_layout, **options)
    assert close(one, attended(q, k, v, causal=False)[0], 1e-4)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(0, dtype=torch.uint8, device=place), kv_layout
    )
    indptr = [ints(x, place, torch.int32) for x in ([0, 3, 5], starts)]
    dtypes = {"q_data_type": torch.float32, "kv_data_type": torch.uint8}
    wrapper.plan(*indptr, HEADS, KV_HEADS, width, causal=True, **dtypes)
    expected = [attended(q[:3], k[:7], v[:7])[0], attended(q[3:], k[7:], v[7:])[0]]
    assert close(wrapper.run(q, *codes, **options), torch.cat(expected), 1e-4)
    with pytest.raises(ValueError, match=r"^k: expected \(pages, "):
        wrapper.plan(*indptr, HEADS, KV_HEADS, 2 * width, **dtypes)
        wrapper.run(torch.cat((q, q), -1), *codes, **options)


def test_an_argument_of_nvfp4_is_named(place):
    k = rows(5, KV_HEADS, 32, place=place)
    codes = torch.zeros(6, 2, PAGE, KV_HEADS, 16, dtype=torch.uint8, device=place)
    scales = torch.zeros(6, 2, PAGE, KV_HEADS, 2, device=place).to(E4M3)
    arguments = {
        "append_key": k, "append_value": k, "slot_mapping": ints(SLOTS, place),
        "paged_kv_cache": codes, "kv_cache_sf": scales, "k_scale": 1.0, "v_scale": 1.0,
    }  # fmt: skip
    append = flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    for error, name, value in (
        (ValueError, "append_key", k[..., :16]), (ValueError, "append_value", k[:3]),
        (TypeError, "slot_mapping", ints(SLOTS, place).float()),
        (TypeError, "paged_kv_cache", codes.view(torch.int8)),
        (TypeError, "kv_cache_sf", scales.view(torch.uint8)),
        (ValueError, "kv_cache_sf", scales[..., :1]), (ValueError, "k_scale", 0.0),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}"):
            append(**{**arguments, name: value})
    assert not codes.any()
    append(**arguments)
    assert codes.any()
