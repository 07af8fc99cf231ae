"""FlashInfer's attention over keys that lie end to end, and over one sequence."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peers import attended, close, ints, rotated_at, rows  # noqa: E402

from kvcupy.interop import flashinfer  # noqa: E402

HEADS, KV_HEADS, WIDTH, V_WIDTH = 4, 2, 64, 32
QUERY_LENS, KEY_LENS = (3, 1, 0, 2), (5, 1, 4, 9)
FP8 = torch.float8_e4m3fn


def starts_of(lengths, place, dtype=torch.int32):
    return ints(np.cumsum([0, *lengths]).tolist(), place, dtype)


def inputs(place, kv_layout="NHD", dtype=torch.float32):
    """Queries, K and V with some rows more than planned; K and V as NHD, and in the layout."""
    q = rows(sum(QUERY_LENS) + 1, HEADS, WIDTH, place=place) / 4
    k, v = (
        rows(sum(KEY_LENS) + 2, KV_HEADS, n, place=place, seed=n, dtype=dtype)
        for n in (WIDTH, V_WIDTH)
    )
    laid_out = (k, v) if kv_layout == "NHD" else [x.transpose(0, 1).contiguous() for x in (k, v)]
    return q, k, v, laid_out


def by_sequence(q, k, v):
    queries, keys, values = (
        x[: sum(lengths)].split(lengths)
        for x, lengths in ((q, QUERY_LENS), (k, KEY_LENS), (v, KEY_LENS))
    )
    return zip(queries, keys, values, strict=True)


def ragged(place, kv_layout="NHD", lengths=(QUERY_LENS, KEY_LENS), dtype=torch.int32, **options):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(0, dtype=torch.uint8, device=place), kv_layout
    )
    return plan(wrapper, place, lengths, dtype, **options)


def plan(wrapper, place, lengths, dtype=torch.int32, **options):
    options = {"q_data_type": torch.float32, "head_dim_vo": V_WIDTH, **options}
    wrapper.plan(*(starts_of(x, place, dtype) for x in lengths), HEADS, KV_HEADS, WIDTH, **options)
    return wrapper


OPTIONS = {
    "plain": ({}, {"causal": False}),
    "causal": ({"causal": True}, {}),
    "window, cap, scale": (
        {"causal": True, "window_left": 2, "logits_soft_cap": 3.0, "sm_scale": 0.3},
        {"window_left": 2, "cap": 3.0, "scale": 0.3},
    ),
}


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", OPTIONS)
def test_keys_end_to_end(place, name, kv_layout, index_dtype):
    """Rows past the planned ones are not read, and 0 in new outputs."""
    plan_options, expected_options = OPTIONS[name]
    q, k, v, laid_out = inputs(place, kv_layout)
    q[-1], k[-2:], v[-2:] = np.nan, np.nan, np.nan
    wrapper = ragged(place, kv_layout, dtype=index_dtype, **plan_options)
    out, lse = wrapper.run(q, *laid_out, return_lse=True)
    results = [attended(*part, **expected_options) for part in by_sequence(q, k, v)]
    expected, expected_lse = (torch.cat(x) for x in zip(*results, strict=True))
    assert close(out[:-1], expected) and close(lse[:-1], expected_lse)
    assert not out[-1].any() and out.shape[2] == V_WIDTH
    outs = torch.ones_like(out), torch.ones_like(lse)
    assert wrapper.run_return_lse(q, *laid_out, out=outs[0], lse=outs[1])[0] is outs[0]
    assert torch.equal(outs[0][:-1], out[:-1]) and torch.equal(outs[1][:-1], lse[:-1])


def test_scales_of_keys_end_to_end(place):
    """fp8 by head; of 16 bits numbers, which multiply."""
    scale = torch.tensor([0.5, 0.25], device=place)
    q, k, v, _ = inputs(place, dtype=FP8)
    out = ragged(place, kv_data_type=FP8).run(q, k, v, k_scale=scale, v_scale=2.0)
    parts = by_sequence(q, k.float() * scale[:, None], 2 * v.float())
    assert close(out[:-1], torch.cat([attended(*part, causal=False)[0] for part in parts]))
    out = ragged(place).run(q, k.float(), v.float(), k_scale=0.5, v_scale=2.0)
    parts = by_sequence(q, k.float() * 0.5, 2 * v.float())
    assert close(out[:-1], torch.cat([attended(*part, causal=False)[0] for part in parts]))


def test_masks_and_rotations_of_keys_end_to_end(place):
    q, k, v, _ = inputs(place)
    generator = torch.Generator().manual_seed(1)
    masks = [
        torch.rand(shape, generator=generator) < 0.7
        for shape in zip(QUERY_LENS, KEY_LENS, strict=True)
    ]
    flat = torch.cat([x.flatten() for x in masks]).to(place)
    out = ragged(place, custom_mask=flat).run(q, k, v)
    expected = [
        attended(*part, mask=mask.to(place))[0]
        for part, mask in zip(by_sequence(q, k, v), masks, strict=True)
    ]
    assert close(out[:-1], torch.cat(expected).nan_to_num())
    out = ragged(place, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_theta=5e4).run(q, k, v)
    expected = [
        attended(
            rotated_at(new, range(len(keys) - len(new), len(keys)), theta=5e4),
            rotated_at(keys, range(len(keys)), theta=5e4), values,
        )[0]
        for new, keys, values in by_sequence(q, k, v)
    ]  # fmt: skip
    assert close(out[:-1], torch.cat(expected), 1e-4)


def test_forward_takes_the_options_of_the_call(place):
    q, k, v, _ = inputs(place)
    wrapper = ragged(place)
    wrapper.end_forward()
    out, lse = wrapper.forward_return_lse(q, k, v, True, window_left=2, sm_scale=0.2)
    results = [attended(*part, window_left=2, scale=0.2) for part in by_sequence(q, k, v)]
    assert close(out[:-1], torch.cat([x for x, _ in results]))
    assert close(lse[:-1], torch.cat([x for _, x in results]))


def graph_wrapper(place, **options):
    buffers = [torch.zeros(5, dtype=torch.int32, device=place) for _ in range(2)]
    options = {"max_keys_per_sequence": 12, "qo_indptr_buf": buffers[0],
               "kv_indptr_buf": buffers[1], **options}  # fmt: skip
    workspace = torch.empty(0, dtype=torch.uint8, device=place)
    return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace, use_cuda_graph=True, **options
    ), buffers


def test_tables_of_a_graph_stay_in_place(place):
    """A replay calls the same kernel with the same addresses, and attends by the last plan."""
    wrapper, buffers = graph_wrapper(place)
    addresses = []
    for lengths in ((QUERY_LENS, KEY_LENS), ((1, 2, 2, 1), (3, 2, 7, 6))):
        plan(wrapper, place, lengths, causal=True)
        tables = wrapper._plan.block_table, wrapper._plan.seq_lens, wrapper._plan.query_lens
        addresses.append([x.data_ptr() for x in tables])
        q, k, v, _ = inputs(place)
        expected = ragged(place, lengths=lengths, causal=True).run(q, k, v)
        assert torch.equal(wrapper.run(q, k, v), expected)
        for buffer, counts in zip(buffers, lengths, strict=True):
            assert torch.equal(buffer, starts_of(counts, place))
    assert addresses[0] == addresses[1] and wrapper.is_cuda_graph_enabled
    before = [x.clone() for x in buffers]
    with pytest.raises(ValueError, match=r"^kv_indptr: expected at most 12 "):
        plan(wrapper, place, ((1, 1, 1, 1), (1, 13, 1, 1)))
    assert all(torch.equal(x, y) for x, y in zip(buffers, before, strict=True))


def test_what_is_refused(place):
    q, k, v, _ = inputs(place)
    with pytest.raises(ValueError, match=r"^max_keys_per_sequence: "):
        graph_wrapper(place, max_keys_per_sequence=None)
    with pytest.raises(TypeError, match=r"^kv_indptr_buf: "):
        graph_wrapper(place, kv_indptr_buf=None)
    with pytest.raises(ValueError, match=r"^qo_indptr_buf: expected \(5,\)"):
        graph_wrapper(place, qo_indptr_buf=torch.zeros(4))
    with pytest.raises(RuntimeError, match="plan"):
        graph_wrapper(place)[0].run(q, k, v)
    wrapper = ragged(place)
    for error, name, arguments in (
        (ValueError, "k", (q, k[:18], v)), (ValueError, "v", (q, k, v[..., :8])),
        (ValueError, "k", (q, k.half(), v)), (ValueError, "q", (q[:5], k, v)),
        (NotImplementedError, "\\*args", (q, k, v, 1)),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: "):
            wrapper.run(*arguments)
    for name in ("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            ragged(place, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match=r"^qo_indptr: expected \(4,\)"):
        ragged(place, lengths=(QUERY_LENS, KEY_LENS[:3]))
    with pytest.raises(ValueError, match=r"^kv_indptr: expected ascending"):
        wrapper.plan(*(ints(x, place) for x in ([0, 1, 1], [0, 2, 1])), HEADS, KV_HEADS, WIDTH)
    assert wrapper.run(q, k, v).any()


# --- One sequence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_prefill_of_one_sequence(place, name, kv_layout):
    options, expected_options = OPTIONS[name]
    q, k, v, laid_out = inputs(place, kv_layout)
    out = flashinfer.single_prefill_with_kv_cache(q, *laid_out, kv_layout=kv_layout, **options)
    expected = attended(q, k, v, **expected_options)
    assert close(out, expected[0]) and out.dtype == q.dtype
    results = flashinfer.single_prefill_with_kv_cache_return_lse(
        q, *laid_out, kv_layout=kv_layout, **options
    )
    assert torch.equal(results[0], out) and close(results[1], expected[1])


def test_masks_and_rotations_of_one_sequence(place):
    q, k, v, _ = inputs(place)
    mask = torch.rand((len(q), len(k)), generator=torch.Generator().manual_seed(1)) < 0.7
    packed = torch.from_numpy(np.packbits(mask.numpy(), bitorder="little")).to(place)
    expected = attended(q, k, v, mask=mask.to(place))[0]
    attend = flashinfer.single_prefill_with_kv_cache
    assert close(attend(q, k, v, custom_mask=mask.to(place)), expected)
    assert close(attend(q, k, v, packed_custom_mask=packed), expected)
    out = attend(q, k, v, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0)
    queries = rotated_at(q, range(len(k) - len(q), len(k)), scale=2.0)
    expected = attended(queries, rotated_at(k, range(len(k)), scale=2.0), v)[0]
    assert close(out, expected, 1e-4)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_decode_of_one_sequence(place, kv_layout):
    q, k, v, laid_out = inputs(place, kv_layout)
    decode = flashinfer.single_decode_with_kv_cache
    out, lse = decode(q[0], *laid_out, kv_layout, window_left=7, q_scale=0.5, return_lse=True)
    expected = attended(q[:1], k, v, window_left=7, scale=0.5 * WIDTH**-0.5)
    assert close(out, expected[0][0]) and close(lse, expected[1][0])
    out = decode(q[0], *laid_out, kv_layout, pos_encoding_mode="ROPE_LLAMA")
    rotated = rotated_at(q[:1], [len(k) - 1]), rotated_at(k, range(len(k)))
    assert close(out, attended(*rotated, v)[0][0], 1e-4)


def test_formats_of_one_sequence(place):
    """fp8 with scales by head, and an output of float32."""
    q, k, v, _ = inputs(place, dtype=FP8)
    q, by_head = q.half(), torch.tensor([0.5, 2.0], device=place)
    out = flashinfer.single_prefill_with_kv_cache(
        q, k, v, scale_k=by_head, v_scale=3.0, o_dtype=torch.float32, causal=True
    )
    expected = attended(q, k.float() * by_head[:, None], 3 * v.float())[0]
    assert out.dtype == torch.float32 and close(out, expected, 1e-3)


def test_what_is_refused_of_one_sequence(place):
    q, k, v, _ = inputs(place)
    for error, name, options in (
        (NotImplementedError, "scale_q", {"scale_q": torch.ones(4)}),
        (TypeError, "k", {"kv_cache_sf": (k, v)}),
        (NotImplementedError, "pos_encoding_mode", {"pos_encoding_mode": "ALIBI"}),
        (ValueError, "kv_layout", {"kv_layout": "DHN"}),
        (ValueError, "custom_mask", {"custom_mask": torch.ones(3, dtype=torch.bool)}),
    ):
        with pytest.raises(error, match=f"^{name}: "):
            flashinfer.single_prefill_with_kv_cache(q, k, v, **options)
    with pytest.raises(ValueError, match=r"^v: "):
        flashinfer.single_prefill_with_kv_cache(q, k, v[:3])
    with pytest.raises(ValueError, match=r"^q: "):
        flashinfer.single_decode_with_kv_cache(q, k, v)
