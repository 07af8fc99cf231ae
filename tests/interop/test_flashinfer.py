"""FlashInfer's index functions, its rotations by position, and its attention wrappers.

Other calls are in `test_peer_calls.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peers import attended, close, ints, rotated, rotated_at, rows  # noqa: E402

from kvcupy.interop import flashinfer  # noqa: E402

# --- Indices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("append_indptr", "seq_lens", "nnz", "batch", "positions"),
    [  # the first is FlashInfer's own example
        ([0, 1, 3, 6, 10], [5, 5, 5, 5], 10, [0, 1, 1, 2, 2, 2, 3, 3, 3, 3],
         [4, 3, 4, 2, 3, 4, 1, 2, 3, 4]),
        ([0, 0, 2], [3, 2], 4, [1, 1, -1, -1], [0, 1, -1, -1]),
        ([0], [], 2, [-1, -1], [-1, -1]),
    ],
)  # fmt: skip
def test_positions_of_appended_tokens(place, append_indptr, seq_lens, nnz, batch, positions):
    """Allocated, and in place, as under a captured graph; tokens past the last are padding."""
    arguments = ints(append_indptr, place), ints(seq_lens, place), nnz
    results = flashinfer.get_batch_indices_positions(*arguments)
    assert [x.tolist() for x in results] == [batch, positions]
    outs = [torch.full_like(x, 9) for x in results]
    written = flashinfer.get_batch_indices_positions(*arguments, *outs)
    assert written[0] is outs[0] and written[1] is outs[1]
    assert [x.tolist() for x in outs] == [batch, positions] and outs[0].dtype == torch.int32
    only = flashinfer.get_batch_indices_positions(*arguments, positions=outs[1].zero_())
    assert only[1] is outs[1] and outs[1].tolist() == positions
    outs[0].zero_()
    with pytest.raises(ValueError, match=rf"^positions: expected \({nnz},\)"):
        flashinfer.get_batch_indices_positions(*arguments, outs[0], outs[1][1:])
    with pytest.raises(TypeError, match=r"^batch_indices: expected int32"):
        flashinfer.get_batch_indices_positions(*arguments, outs[0].long())
    assert not outs[0].any()


def test_lengths_are_full_pages_and_the_last(place):
    lengths = flashinfer.get_seq_lens(ints([0, 3, 3, 4], place), ints([13, 0, 8], place), 16)
    assert lengths.tolist() == [45, 0, 8]


# --- Rotations by position ------------------------------------------------------------------------


def frequencies(width, theta, llama31=False):
    powers = theta ** (-np.arange(0, width, 2) / width)
    if not llama31:
        return powers
    # Divided by 8 below a wavelength of 8192, and by less up to 8192 / 4.
    smooth = np.clip((8192 * powers / (2 * np.pi) - 1) / (4 - 1), 0, 1)
    scaled = (1 - smooth) * powers / 8 + smooth * powers
    assert (scaled < powers).any() and (scaled == powers).any()
    return scaled


ROTATIONS = [
    # The function, its place and options, and the frequencies.
    ("rope", {"rope_scale": 2}, frequencies(64, 1e4) / 2),
    ("rope", {"rotary_dim": 4, "interleave": True}, frequencies(4, 1e4)),
    ("rope_pos_ids", {"rope_theta": 5e4, "interleave": True}, frequencies(64, 5e4)),
    ("rope_pos_ids", {"rotary_dim": 8}, frequencies(8, 1e4)),
    ("llama31_rope", {}, frequencies(64, 5e5, llama31=True)),
    ("llama31_rope_pos_ids", {"interleave": True}, frequencies(64, 5e5, llama31=True)),
]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("name", "options", "by"), ROTATIONS, ids=str)
def test_rope_by_position(place, name, options, by, index_dtype, copies):
    """In place, and of copies; positions are past the first table."""
    q, k = rows(5, 2, 64, place=place), rows(5, 1, 64, place=place, seed=1)
    where = [ints([0, 2, 5], place, index_dtype), ints([1500, 0], place, index_dtype)]
    positions = [1500, 1501, 0, 1, 2]
    if "pos_ids" in name:
        where = [ints(positions, place, index_dtype)]
    angles = np.array(positions)[:, None] * by
    is_neox = not options.get("interleave", False)
    expected = [rotated(x, np.cos(angles), np.sin(angles), is_neox) for x in (q, k)]
    kept = q.clone(), k.clone()
    if copies:
        results = getattr(flashinfer, f"apply_{name}")(q, k=k, **dict(enumerate_names(name, where)),
                                                       **options)  # fmt: skip
        assert torch.equal(q, kept[0]) and torch.equal(k, kept[1])
    else:
        getattr(flashinfer, f"apply_{name}_inplace")(q, k, *where, **options)
        results = q, k
    assert all(close(x, y) for x, y in zip(results, expected, strict=True))


def enumerate_names(name, where):
    names = ["pos_ids"] if "pos_ids" in name else ["indptr", "offsets"]
    return zip(names, where, strict=True)


# --- Attention ------------------------------------------------------------------------------------

PAGE, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 64
LAST = [2, 4, 0, 3]  # tokens on the last page
INDPTR, INDICES = [0, 2, 3, 3, 6], [5, 0, 3, 1, 2, 4]
# Another plan of four sequences: other lengths, other pages, one more page in all.
LATER = [0, 1, 3, 4, 7], [1, 0, 5, 2, 4, 3, 0], [3, 2, 1, 4]


def lengths_of(indptr, last):
    pages = np.diff(indptr)
    return np.where(pages > 0, (pages - 1) * PAGE + np.array(last), 0).tolist()


def attended_pages(q, k_cache, v_cache, query_lens, tables, masks=None, **options):
    """Return out and base-2 lse in float64, of caches (pages, page_size, heads, width)."""
    indptr, indices, last = tables
    results, start = [], 0
    for i, (length, count) in enumerate(zip(lengths_of(indptr, last), query_lens, strict=True)):
        pages = indices[indptr[i] : indptr[i + 1]]
        k, v = (x[pages].flatten(0, 1)[:length] for x in (k_cache, v_cache))
        mask = None if masks is None else masks[i]
        results.append(attended(q[start : start + count], k, v, mask=mask, **options))
        start += count
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)


def paged(kv_layout, place, dtype=torch.float32):
    """Return a cache in a layout, and K and V of it as NHD."""
    k, v = (rows(6, PAGE, KV_HEADS, WIDTH, place=place, seed=s, dtype=dtype) for s in (3, 9))
    if kv_layout == "HND":
        return tuple(x.transpose(1, 2).contiguous() for x in (k, v)), (k, v)
    return torch.stack((k, v), 1), (k, v)


def wrapper_of(kind, place, kv_layout="NHD"):
    name = f"Batch{kind}WithPagedKVCacheWrapper"
    return getattr(flashinfer, name)(torch.empty(0, dtype=torch.uint8, device=place), kv_layout)


def plan(wrapper, place, query_lens=(1,) * 4, tables=(INDPTR, INDICES, LAST), *,
         index_dtype=torch.int32, method="plan", **options):  # fmt: skip
    arrays = [ints(x, place, index_dtype) for x in tables]
    if "Prefill" in type(wrapper).__name__:
        arrays.insert(0, ints(np.cumsum([0, *query_lens]).tolist(), place, index_dtype))
    options = {"q_data_type": torch.float32, **options}
    getattr(wrapper, method)(*arrays, HEADS, KV_HEADS, WIDTH, PAGE, **options)
    return wrapper


FP16, FP8 = torch.float16, torch.float8_e4m3fn
PER_HEAD = torch.tensor([0.5, 0.25])
ATTENTION = {
    # Query lengths (None: of decode), options of plan, of run, of `attended`, and factors of K
    # and V.
    "decode": (None, {"logits_soft_cap": 0.0}, {}, {}, (1, 1)),
    "decode, window, cap and scale": (
        None, {"window_left": 3, "logits_soft_cap": 2.0, "sm_scale": 0.2}, {},
        {"window_left": 3, "cap": 2.0, "scale": 0.2}, (1, 1),
    ),
    "decode, window of none": (
        None, {"window_left": 0}, {"window_left": 0}, {"window_left": 0}, (1, 1)
    ),
    "decode of three": (3, {"q_len_per_req": 3}, {}, {}, (1, 1)),
    "prefill": ((3, 4, 0, 1), {}, {}, {"causal": False}, (1, 1)),
    "prefill, causal": (
        (3, 4, 0, 1),
        {"causal": True, "fixed_split_size": 16, "disable_split_kv": True,
         "max_token_per_sequence": 4, "max_sequence_kv": 9},
        {}, {}, (1, 1),
    ),
    "prefill, window": ((3, 4, 0, 1), {"window_left": 2}, {}, {"causal": False, "window_left": 2},
                        (1, 1)),
    "prefill, causal window": (
        (1, 1, 0, 2), {"causal": True, "window_left": 2, "sm_scale": 0.5}, {},
        {"window_left": 2, "scale": 0.5}, (1, 1),
    ),
    "decode, fp8": (
        None, {"kv_data_type": FP8}, {"q_scale": 2.0, "k_scale": 0.5, "v_scale": 3.0},
        {"scale": 2 * WIDTH**-0.5}, (0.5, 3.0),
    ),
    "prefill, fp8 by head": (
        (3, 4, 0, 1), {"kv_data_type": FP8, "causal": True}, {"k_scale": PER_HEAD, "v_scale": 3.0},
        {}, (PER_HEAD[:, None], 3.0),
    ),
    # Scales of another cache multiply scores and outputs.
    "decode, fp16": (
        None, {"kv_data_type": FP16}, {"k_scale": 0.5, "v_scale": 2.0}, {}, (0.5, 2.0)
    ),
    "prefill, fp16": (
        (3, 4, 0, 1), {"kv_data_type": FP16, "causal": True},
        {"k_scale": 0.5, "v_scale": torch.tensor([2.0])}, {}, (0.5, 2.0),
    ),
}  # fmt: skip


@pytest.mark.covering(2)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(place, name, kv_layout, index_dtype):
    counts, plan_options, run_options, expected_options, factors = ATTENTION[name]
    kind = "Prefill" if name.startswith("prefill") else "Decode"
    query_lens = counts if isinstance(counts, tuple) else (counts or 1,) * 4
    cache, parts = paged(kv_layout, place, plan_options.get("kv_data_type", torch.float32))
    q = rows(sum(query_lens), HEADS, WIDTH, place=place) / 4
    wrapper = wrapper_of(kind, place, kv_layout)
    plan(wrapper, place, query_lens, index_dtype=index_dtype, **plan_options)
    run_options = {
        n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in run_options.items()
    }
    k, v = (
        x.float() * torch.as_tensor(by, device=place) for x, by in zip(parts, factors, strict=True)
    )
    expected, expected_lse = attended_pages(
        q, k, v, query_lens, (INDPTR, INDICES, LAST), **expected_options
    )
    out, lse = wrapper.run(q, cache, return_lse=True, **run_options)
    # A sequence without keys gives 0, and minus infinity in lse.
    assert close(out, expected.nan_to_num()) and close(lse, expected_lse)
    assert lse.dtype == torch.float32 and torch.equal(wrapper.run(q, cache, **run_options), out)
    outs = torch.ones_like(out), torch.ones_like(lse)
    results = wrapper.run_return_lse(q, cache, out=outs[0], lse=outs[1], **run_options)
    assert all(x is y for x, y in zip(results, outs, strict=True))
    assert torch.equal(outs[0], out) and torch.equal(outs[1], lse)


@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_sinks_join_the_denominator(place, kind):
    cache, (k, v) = paged("NHD", place)
    q, sinks = rows(4, HEADS, WIDTH, place=place) / 4, rows(HEADS, place=place, seed=5)
    wrapper = plan(wrapper_of(kind, place), place)
    expected, _ = attended_pages(q, k, v, (1,) * 4, (INDPTR, INDICES, LAST), sinks=sinks)
    assert close(wrapper.run(q, cache, sinks=sinks), expected)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_a_plan_replaces_the_last_unless_it_raises(place, kind, graph):
    cache, (k, v) = paged("NHD", place)
    q = rows(4, HEADS, WIDTH, place=place) / 4
    wrapper, buffers = graph_wrapper(kind, place) if graph else (wrapper_of(kind, place), [])
    plan(wrapper, place).run(q, cache)
    plan(wrapper, place, tables=LATER, sm_scale=0.5, method="begin_forward")
    second, before = wrapper.run(q, cache), [x.clone() for x in buffers]
    assert close(second, attended_pages(q, k, v, (1,) * 4, LATER, scale=0.5)[0])
    with pytest.raises(ValueError, match="last_page_len"):
        plan(wrapper, place, tables=(INDPTR, INDICES, [2, PAGE + 1, 0, 3]))
    with pytest.raises(ValueError, match="factor"):  # the last check
        plan(wrapper, place, pos_encoding_mode="ROPE_LLAMA", rope_scale=0.0)
    assert all(torch.equal(x, y) for x, y in zip(buffers, before, strict=True))
    assert torch.equal(wrapper.run(q, cache), second)


@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_forward_takes_the_options_of_the_call(place, kind):
    """FlashInfer deprecates it, and older programs call it. Prefill is not causal by default."""
    cache, (k, v) = paged("NHD", place)
    query_lens = (3, 2, 0, 4) if kind == "Prefill" else (1,) * 4
    q = rows(sum(query_lens), HEADS, WIDTH, place=place) / 4
    wrapper = plan(wrapper_of(kind, place), place, query_lens)
    options = {"window_left": 2, "logits_soft_cap": 3.0, "sm_scale": 0.25}
    for causal in (False, True):
        results = wrapper.forward_return_lse(
            q, cache, **options, **{"causal": True} if causal else {}
        )
        expected = attended_pages(
            q, k, v, query_lens, (INDPTR, INDICES, LAST), causal=causal or kind == "Decode",
            window_left=2, cap=3.0, scale=0.25,
        )  # fmt: skip
        assert close(results[0], expected[0].nan_to_num()) and close(results[1], expected[1])
    expected = plan(wrapper_of(kind, place), place, query_lens).run(q, cache)
    assert torch.equal(wrapper.forward(q, cache), expected)
    wrapper.end_forward()
    with pytest.raises(NotImplementedError, match=r"^pos_encoding_mode: "):
        wrapper.forward(q, cache, pos_encoding_mode="ALIBI")


def test_a_fast_plan_is_a_plan(place):
    cache, _ = paged("NHD", place)
    q, wrapper = rows(4, HEADS, WIDTH, place=place), wrapper_of("Decode", place)
    flashinfer.fast_decode_plan(
        wrapper, *(ints(x, place) for x in (INDPTR, INDICES, LAST)), HEADS, KV_HEADS, WIDTH, PAGE,
        q_data_type=torch.float32, global_override_indptr_cpu=ints(INDPTR, "cpu"),
    )  # fmt: skip
    expected = plan(wrapper_of("Decode", place), place).run(q, cache)
    assert torch.equal(wrapper.run(q, cache), expected)


def test_workspaces_begin_at_16_bytes(place):
    odd = torch.empty(33, dtype=torch.uint8, device=place)[1:]
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(odd)
    wrapper = wrapper_of("Decode", place)
    sizes = wrapper.workspace_size(*PLAN.values())
    buffers = [torch.empty(size, dtype=torch.uint8, device=place) for size in sizes]
    wrapper.reset_workspace_buffer(*buffers)
    with pytest.raises(ValueError, match="int_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(buffers[0], odd)


# --- Rotations in the kernel, masks, levels -------------------------------------------------------

ROPES = {
    "decode": ("Decode", (1,) * 4, {}),
    "decode of two": ("Decode", (2,) * 4, {"q_len_per_req": 2}),
    "prefill": ("Prefill", (3, 4, 0, 1), {"causal": True, "window_left": 4}),
}


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("options", [{}, {"rope_scale": 2.0, "rope_theta": 5e4}])
def test_rotations_in_the_kernel(place, name, kv_layout, options):
    """Queries and keys by their positions; query and cache do not change."""
    kind, query_lens, plan_options = ROPES[name]
    cache, parts = paged(kv_layout, place)
    q = rows(sum(query_lens), HEADS, WIDTH, place=place) / 4
    wrapper = plan(
        wrapper_of(kind, place, kv_layout), place, query_lens, pos_encoding_mode="ROPE_LLAMA",
        **plan_options, **options,
    )  # fmt: skip
    by = {"scale": options.get("rope_scale", 1.0), "theta": options.get("rope_theta", 1e4)}
    outs, start = [], 0
    for i, (length, count) in enumerate(zip(lengths_of(INDPTR, LAST), query_lens, strict=True)):
        pages = INDICES[INDPTR[i] : INDPTR[i + 1]]
        k, v = (x[pages].flatten(0, 1)[:length] for x in parts)
        new, start = q[start : start + count], start + count
        k, new = (
            rotated_at(k, range(length), **by),
            rotated_at(new, range(length)[-count:], **by) if length else new,
        )
        outs.append(attended(new, k, v, window_left=plan_options.get("window_left", -1))[0])
    kept = q.clone(), parts[0].clone()
    assert close(wrapper.run(q, cache), torch.cat(outs).nan_to_num(), 1e-4)
    assert torch.equal(q, kept[0]) and torch.equal(parts[0], kept[1])
    if kind == "Decode":  # `forward` has its own options
        plain = plan(wrapper_of(kind, place, kv_layout), place, query_lens, **plan_options)
        again = plain.forward(q, cache, pos_encoding_mode="ROPE_LLAMA", **options)
        assert torch.equal(again, wrapper.run(q, cache))


@pytest.mark.parametrize("window_left", [-1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rope", [False, True])
def test_custom_masks(place, packed, window_left, rope):
    """Of any keys, the window too; causal does not count. Rows past the last token are 0."""
    query_lens = 3, 4, 0, 2
    cache, (k, v) = paged("NHD", place)
    q = rows(sum(query_lens) + 1, HEADS, WIDTH, place=place) / 4
    generator = torch.Generator().manual_seed(5)
    masks = [
        torch.rand((count, length), generator=generator) < 0.6
        for count, length in zip(query_lens, lengths_of(INDPTR, LAST), strict=True)
    ]
    flat = [np.packbits(x.flatten().numpy(), bitorder="little") for x in masks]
    mask = {"packed_custom_mask": torch.from_numpy(np.concatenate(flat)).to(place)}
    if not packed:
        mask = {"custom_mask": torch.cat([x.flatten() for x in masks]).to(place)}
    mode = "ROPE_LLAMA" if rope else "NONE"
    wrapper = plan(
        wrapper_of("Prefill", place), place, query_lens, causal=True, window_left=window_left,
        pos_encoding_mode=mode, **mask,
    )  # fmt: skip
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert not out[-1].any() and not lse[-1].any()
    if not rope:
        expected = attended_pages(
            q, k, v, query_lens, (INDPTR, INDICES, LAST), [x.to(place) for x in masks],
            window_left=window_left,
        )  # fmt: skip
        assert close(out[:-1], expected[0].nan_to_num()) and close(lse[:-1], expected[1])
        assert torch.equal(wrapper.forward(q, cache, window_left=window_left), out)
        with pytest.raises(NotImplementedError, match=r"^window_left: "):
            wrapper.forward(q, cache, window_left=1)
    else:  # of all keys that are seen without a mask, it changes nothing
        causal = [torch.ones_like(x).tril(x.shape[1] - x.shape[0]).flatten() for x in masks]
        options = {"pos_encoding_mode": mode, "window_left": window_left}
        runs = [
            plan(wrapper_of("Prefill", place), place, query_lens, **options, **kind).run(q, cache)
            for kind in ({"causal": True}, {"custom_mask": torch.cat(causal).to(place)})
        ]
        assert close(*runs) and not torch.equal(runs[0], out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("graph", [False, True])
def test_levels_of_a_cascade(place, kv_layout, causal, graph):
    """Sequences 0 and 1 share a page, sequences 2 and 3 two; each has its own pages."""
    cache, (k, v) = paged(kv_layout, place)
    query_lens = 2, 1, 1, 3
    q = rows(sum(query_lens), HEADS, WIDTH, place=place) / 4
    shared = [0, 3, 7], [0, 1, 3], [5, 0, 2], [PAGE, PAGE]
    own = [0, 2, 3, 4, 7], [0, 1, 2, 2, 4], [1, 3, 4, 1], [2, 4, 0, 3]
    workspace, buffers = torch.empty(0, dtype=torch.uint8, device=place), {}
    if graph:
        sizes = {"qo_indptr": (3, 5), "paged_kv_indptr": (3, 5), "paged_kv_indices": (8, 8),
                 "paged_kv_last_page_len": (2, 4)}  # fmt: skip
        buffers = {
            f"{name}_buf_arr": [torch.zeros(n, dtype=torch.int32, device=place) for n in lengths]
            for name, lengths in sizes.items()
        }
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, workspace, kv_layout, use_cuda_graph=graph, **buffers
    )
    tables = [[ints(x, place, torch.int32) for x in pair] for pair in zip(shared, own, strict=True)]
    wrapper.plan(*tables, HEADS, KV_HEADS, WIDTH, PAGE, causal=causal, q_data_type=torch.float32)
    lengths = lengths_of(own[1], own[3])
    expected, start = [], 0
    for i, count in enumerate(query_lens):
        pages = (([5], [5], [0, 2], [0, 2])[i], own[2][own[1][i] : own[1][i + 1]])
        parts = [
            torch.cat((x[pages[0]].flatten(0, 1), x[pages[1]].flatten(0, 1)[: lengths[i]]))
            for x in (k, v)
        ]
        mask = torch.ones(count, len(parts[0]), dtype=torch.bool, device=place)
        if causal and lengths[i]:
            mask = mask.tril(len(parts[0]) - count)
        expected.append(attended(q[start : start + count], *parts, mask=mask)[0])
        start += count
    assert close(wrapper.run(q, cache), torch.cat(expected))
    assert wrapper.is_cuda_graph_enabled == graph
    wrapper.reset_workspace_buffer(workspace, [workspace, workspace])
    wrapper.end_forward()
    with pytest.raises(ValueError, match=r"^paged_kv_indices_arr: expected a tensor for each of 2"):
        wrapper.plan(*tables[:2], tables[2][:1], tables[3], HEADS, KV_HEADS, WIDTH, PAGE)


# --- With use_cuda_graph --------------------------------------------------------------------------


def graph_wrapper(kind, place, pages=16, **options):
    buffers = [torch.zeros(n, dtype=torch.int32, device=place) for n in (5, pages, 4)]
    workspace = torch.empty(0, dtype=torch.uint8, device=place)
    if kind == "CUDAGraphBatchDecode":
        cls = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
        return cls(workspace, *buffers, **options), buffers
    cls = getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")
    suffix = "buffer" if kind == "Decode" else "buf"
    names = [f"paged_kv_{name}_{suffix}" for name in ("indptr", "indices", "last_page_len")]
    named = dict(zip(names, buffers, strict=True))
    if kind == "Prefill":
        named["qo_indptr_buf"] = torch.zeros(5, dtype=torch.int32, device=place)
    return cls(workspace, "NHD", use_cuda_graph=True, **named, **options), buffers


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

    plan(wrapper, place, later, LATER)
    attend(*arguments, **options)
    plain = plan(wrapper_of("Decode" if "Decode" in kind else kind, place), place, later, LATER)
    assert torch.equal(out, plain.run(q, cache))
    assert [buffer[: len(x)].tolist() for buffer, x in zip(buffers, LATER, strict=True)] == [*LATER]
    assert wrapper.is_cuda_graph_enabled and not plain.is_cuda_graph_enabled


def test_the_number_of_new_tokens_of_a_captured_run_stays(place):
    wrapper, buffers = graph_wrapper("Decode", place)
    tables = []
    for _ in range(2):
        plan(wrapper, place, q_len_per_req=2)
        kept = wrapper._plan
        assert kept.query_lens.tolist() == [2] * 4
        tables.append([x.data_ptr() for x in (kept.query_lens, kept.seq_lens, kept.block_table)])
    assert tables[0] == tables[1]
    before = [buffer.clone() for buffer in buffers]
    for count in (1, 3):
        with pytest.raises(ValueError, match=r"^q_len_per_req: expected 2 as in the first plan"):
            plan(wrapper, place, tables=(INDPTR, INDICES, [4, 4, 0, 4]), q_len_per_req=count)
    assert all(torch.equal(x, y) for x, y in zip(buffers, before, strict=True))
    plain = wrapper_of("Decode", place)
    for count in (2, 3):  # without a graph they may change
        plan(plain, place, q_len_per_req=count)


@pytest.mark.parametrize("graph", [False, True])
def test_a_sequence_has_as_many_keys_as_new_tokens(place, graph):
    """Or none, as padding has."""
    wrapper = graph_wrapper("Decode", place)[0] if graph else wrapper_of("Decode", place)
    expected = r"^last_page_len: expected none or at least q_len_per_req"
    with pytest.raises(ValueError, match=expected):
        plan(wrapper, place, tables=(INDPTR, INDICES, [2, 2, 0, 1]), q_len_per_req=3)
    plan(wrapper, place, tables=(INDPTR, INDICES, [2, 3, 0, 1]), q_len_per_req=3)


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
    wrapper = plan(graph_wrapper("Decode", place)[0], place)
    out = wrapper.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out)
    plan(wrapper, place, tables=LATER)
    graph.replay()
    plain = plan(wrapper_of("Decode", place), place, tables=LATER)
    assert torch.equal(out, plain.run(q, cache))


# --- What is refused ------------------------------------------------------------------------------

PLAN = {
    "indptr": INDPTR, "indices": INDICES, "last_page_len": LAST, "num_qo_heads": HEADS,
    "num_kv_heads": KV_HEADS, "head_dim": WIDTH, "page_size": PAGE, "q_data_type": torch.float32,
}  # fmt: skip
PREFILL = {"qo_indptr": [0, 1, 2, 3, 4], "head_dim_qk": WIDTH} | {
    f"paged_kv_{name}" if isinstance(value, list) else name: value
    for name, value in PLAN.items() if name != "head_dim"
}  # fmt: skip
PLANS = [
    # The wrapper (with buffers of a graph, their options), the error and the argument that the
    # first of the changes is.
    ("Decode", None, ValueError, {"indptr": [0, 3, 2, 3, 6]}),
    ("Decode", None, ValueError, {"indices": INDICES[:-1]}),
    ("Decode", None, ValueError, {"last_page_len": [2, 5, 0, 1]}),
    ("Decode", None, ValueError, {"last_page_len": [2, 0, 0, 1]}),
    ("Decode", None, NotImplementedError, {"pos_encoding_mode": "ALIBI"}),
    ("Decode", None, NotImplementedError, {"q_data_type": torch.float8_e4m3fn}),
    ("Decode", None, TypeError, {"q_data_type": "float17"}),
    ("Decode", None, NotImplementedError, {"o_data_type": torch.float16}),
    ("Decode", None, ValueError, {"q_len_per_req": 0}),
    ("Decode", {"pages": 5}, ValueError, {"indices": INDICES}),
    ("Decode", {"max_pages_per_sequence": 2}, ValueError, {"indptr": INDPTR}),
    ("Decode", {}, ValueError, {"last_page_len": [1], "indptr": [0, 1]}),
    ("Prefill", None, ValueError, {"custom_mask": torch.ones(20, dtype=torch.bool)}),
    ("Prefill", None, TypeError, {"custom_mask": torch.ones(21)}),
    ("Prefill", None, ValueError, {"packed_custom_mask": torch.ones(3, dtype=torch.uint8)}),
    ("Prefill", None, ValueError, {
        "custom_mask": torch.ones(34, dtype=torch.bool), "qo_indptr": [0, 1, 2, 3, 6],
        "paged_kv_indptr": [0, 2, 3, 3, 4],
    }),
    ("Prefill", {}, NotImplementedError, {"custom_mask": torch.ones(21, dtype=torch.bool)}),
    ("Prefill", None, NotImplementedError, {"prefix_len_ptr": torch.ones(1)}),
    ("Prefill", None, ValueError, {"qo_indptr": [0, 1, 3, 2, 4]}),
    ("Prefill", None, ValueError, {"qo_indptr": [1, 2, 3, 4, 5]}),
    ("Prefill", None, ValueError, {"qo_indptr": [0, 1]}),
    ("Prefill", None, ValueError, {"paged_kv_last_page_len": [2, 5, 0, 1]}),
    ("Prefill", {"pages": 5}, ValueError, {"paged_kv_indices": INDICES}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "graph", "error", "changes"), PLANS, ids=str)
def test_plan_names_the_argument(place, kind, graph, error, changes):
    arguments = {**(PLAN if kind == "Decode" else PREFILL), **changes}
    arguments = {n: ints(x, place) if isinstance(x, list) else x for n, x in arguments.items()}
    wrapper, buffers = wrapper_of(kind, place), []
    if graph is not None:
        wrapper, buffers = graph_wrapper(kind, place, **graph)
    with pytest.raises(error, match=f"^{next(iter(changes))}: "):
        wrapper.plan(**arguments)
    assert not any(buffer.any() for buffer in buffers)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(torch.zeros(1, 1, 8), None)


@pytest.mark.parametrize(
    ("kind", "error", "changes"),
    [
        ("Decode", ValueError, {"q": torch.zeros(3, HEADS, WIDTH)}),
        ("Prefill", ValueError, {"q": torch.zeros(3, HEADS, WIDTH)}),
        ("Decode", ValueError, {"q": torch.zeros(5, HEADS, WIDTH)}),
        ("Decode", ValueError, {"q": torch.zeros(4, HEADS, WIDTH, dtype=torch.float16)}),
        ("Decode", ValueError, {"paged_kv_cache": torch.zeros(6, 2, 8, KV_HEADS, WIDTH)}),
        ("Prefill", ValueError, {"window_left": 3}),
        ("Decode", NotImplementedError, {"k_scale": torch.ones(1)}),
        ("Decode", TypeError, {"out": torch.zeros(4, HEADS, WIDTH, dtype=torch.float16)}),
        ("Decode", ValueError, {"lse": torch.zeros(4, 1), "return_lse": True}),
        ("Decode", NotImplementedError, {"q_scale": torch.ones(1)}),
        ("Decode", NotImplementedError, {"return_lse": True, "sinks": torch.zeros(HEADS)}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_run_names_the_argument(place, kind, error, changes):
    cache, _ = paged("NHD", place)
    arguments = {"q": rows(4, HEADS, WIDTH, place=place), "paged_kv_cache": cache}
    changes = {n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
    with pytest.raises(error, match=f"^{next(iter(changes))}"):
        plan(wrapper_of(kind, place), place).run(**{**arguments, **changes})


def test_kernels_of_the_caller_are_not_offered(place):
    with pytest.raises(NotImplementedError, match="jit_args: "):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=place), jit_args=[1])
    with pytest.raises(NotImplementedError, match="args: "):
        cache, _ = paged("NHD", place)
        plan(wrapper_of("Decode", place), place).run(rows(4, HEADS, WIDTH, place=place), cache, 1)
