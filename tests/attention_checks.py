"""One small check of each thing that the attention operations do, on any device.

As in `operation_checks`, a check takes a device, calls an operation with arguments that expose
mistakes, compares everything with the reference, and returns the `Case`.
"""

from __future__ import annotations

import numpy as np
from attention_cases import AttentionCase, first_elements, rotated
from helpers import from_values
from prefill_calls import Call

import kvcupy as kv
from kvcupy import reference

LENS = [6, 0, 4, 13, 21]
NEW = [3, 0, 1, 13, 6]


def check_attention_decode(device, fmt="fp32"):
    """One token per sequence, three query heads per KV head, odd pages, values of another width."""
    case = AttentionCase(device, 40)
    case.attend(case.arguments(LENS, fmt=fmt, heads=(6, 2), widths=(24, 40), page_size=3))
    return case


def check_attention_decode_bf16(device):
    return check_attention_decode(device, "bf16")


def check_attention_decode_heads_first(device):
    """HND, in a combined array, wide rows."""
    case = AttentionCase(device, 41)
    case.attend(case.arguments(LENS, fmt="bf16", widths=(128, 128), how="combined HND"))
    return case


def check_attention_long_decode(device):
    """Enough keys for several blocks, whose largest scores differ."""
    case = AttentionCase(device, 42)
    case.attend(case.arguments([1300, 0, 5, 700], heads=(2, 1), page_size=16))
    return case


def check_attention_long_decode_fp16(device):
    """Likewise on tensor cores, whose warps take many tiles of keys."""
    case = AttentionCase(device, 42)
    case.attend(case.arguments([1300, 0, 5, 700], fmt="fp16", heads=(8, 1), page_size=16))
    return case


def check_attention_long_append(device):
    """Split keys of a few new tokens; rows of no sequence keep their values."""
    case = AttentionCase(device, 52)
    args = case.arguments([1300, 5], [2, 1], heads=(2, 1), page_size=16, padding=2)
    case.attend(args, *case.results(args))
    return case


def check_attention_long_decode_fp8(device):
    case = AttentionCase(device, 42)
    scales = ("per head", "float")
    case.attend(
        case.arguments([700, 0, 31], fmt="bf16", cache_fmt="fp8_e4m3", heads=(8, 2),
                       widths=(32, 64), page_size=16, scales=scales)
    )  # fmt: skip
    return case


def check_attention_visible_nan(device):
    """A NaN of e4m3 in V shows in its column, and one in K in the rows that see the key."""
    rng = np.random.default_rng(45)
    query = from_values(rng.standard_normal((2, 8, 64)), "bf16")
    k, v = (from_values(rng.standard_normal((4, 16, 2, 64)), "fp8_e4m3") for _ in "kv")
    reference.bits_of(v, "fp8_e4m3")[1, 3, :, 5] = 0xFF  # of the first sequence
    reference.bits_of(k, "fp8_e4m3")[2, 7, :, 9] = 0x7F  # of the second
    table = np.arange(4, dtype=np.int32).reshape(2, 2)
    seq_lens = np.array([30, 20], np.int32)
    arrays = (device.asarray(array) for array in (query, k, v, table, seq_lens))
    out = device.to_numpy(kv.paged_attention(*arrays)).astype(np.float32)
    expected = np.zeros(out.shape, bool)
    expected[0, :, 5] = expected[1] = True
    np.testing.assert_array_equal(np.isnan(out), expected)


def check_attention_decode_int8(device, fmt="bf16"):
    """A scale per slot for K, one per head for V."""
    case = AttentionCase(device, 43)
    case.attend(
        case.arguments(
            LENS, fmt=fmt, cache_fmt="int8", heads=(6, 3), scales=("dynamic", "per head")
        )
    )
    return case


def check_attention_decode_int8_plain(device):
    return check_attention_decode_int8(device, "fp32")


def check_attention_decode_rising_scales(device):
    """A scale per slot for V, of very different sizes."""
    case = AttentionCase(device, 60)
    args = case.arguments(
        [290, 7], fmt="fp16", cache_fmt="int8", heads=(4, 1), scales=("float", "dynamic")
    )
    scales = args["v_scale_cache"].view
    sizes = 2.0 ** case.rng.integers(-9, 9, scales.shape)
    args["v_scale_cache"] = case.place((scales * sizes).astype(np.float32), "fp32", name="scales")
    case.attend(args)
    return case


def check_attention_decode_fp8(device):
    """One scale for K, a scale per slot for V, in HND pages."""
    case = AttentionCase(device, 44)
    case.attend(
        case.arguments(LENS, fmt="fp16", cache_fmt=("fp8_e4m3", "fp8_e5m2"), how="HND",
                       scales=("float", "dynamic"))
    )  # fmt: skip
    return case


def check_attention_decode_masks(device, fmt="fp32"):
    """A window with first keys; a window with learned sinks and a cap."""
    case = AttentionCase(device, 45)
    args = case.arguments(LENS, fmt=fmt)
    case.attend(args, window=5, sink_tokens=3)
    case.attend(args, window=7, sinks=case.sinks(4), logits_soft_cap=6.0)
    return case


def check_attention_decode_masks_fp16(device):
    case = check_attention_decode_masks(device, "fp16")
    args = case.arguments([100, 40], fmt="fp16", heads=(8, 2), page_size=16)
    case.attend(args, window=37, sink_tokens=20)
    return case


def check_attention_append_whole_tiles(device):
    """Few new tokens, of which the last alone sees all of the last keys."""
    case = AttentionCase(device, 61)
    args = case.arguments([64, 33], [12, 5], fmt="bf16", heads=(1, 1), page_size=16)
    case.attend(args)
    case.attend(args, window=31)
    return case


def latents(
    case, seq_lens, query_lens=None, *, heads, fmt="bf16", cache_fmt=None, scale="none", loud=2.0
):  # fmt: skip
    """Return arguments whose values are the first elements of keys; a page is missing."""
    args = case.arguments(
        seq_lens, query_lens, fmt=fmt, cache_fmt=cache_fmt, heads=(heads, 1), widths=(576, 512),
        page_size=16, scales=(scale, "none"), loud=loud,
    )  # fmt: skip
    if cache_fmt in reference.FOUR_BIT:
        args["v_cache"] = first_elements(args["k_cache"], 512)
    else:
        args["v_cache"] = args["k_cache"].sub(lambda a: a[..., :512])
    if scale != "none":
        args["v_scale"] = args["k_scale"]
    table = args["block_table"].view.copy()
    table[0, 3] = -1
    return args | {"block_table": case.table(table)}


def check_attention_latent(device, cache_fmt=None, scale="none", fmt="bf16"):
    """A tile of heads, and two of heads and tokens."""
    case = AttentionCase(device, 63)
    options = {"fmt": fmt, "cache_fmt": cache_fmt, "scale": scale}
    case.attend(latents(case, [130, 0, 37], heads=16, **options))
    case.attend(latents(case, [70, 3, 5], [3, 1, 0], heads=8, **options))
    return case


def check_attention_latent_fp8(device):
    return check_attention_latent(device, "fp8_e4m3", "float")


def check_attention_latent_nvfp4(device):
    return check_attention_latent(device, "nvfp4", "float")


def check_attention_latent_mxfp4(device):
    """Rows of 306 bytes."""
    return check_attention_latent(device, "mxfp4", "float")


def check_attention_latent_int4(device):
    """Queries of fp16, which are two parts of bf16."""
    return check_attention_latent(device, "int4", "float", fmt="fp16")


def check_attention_heads(device):
    """More heads than a tile has rows."""
    case = AttentionCase(device, 65)
    case.attend(latents(case, [70, 0, 3], heads=100))
    return case


def check_attention_heads_fp8(device):
    """Two groups of a tile; queries that are small in the first quarter of their depth."""
    case = AttentionCase(device, 65)
    args = latents(case, [75, 2], heads=40, cache_fmt="fp8_e4m3", scale="float")
    query = args["query"].view.astype(np.float32)
    query[..., :144] *= 2.0**-20
    args["query"] = case.place(from_values(query, "bf16"), "bf16", name="query")
    case.attend(args)
    return case


def check_attention_heads_wide_rows(device):
    """V is not part of K; scales per slot, for V of very different sizes; windows and trees."""
    case = AttentionCase(device, 66)
    args = case.arguments(
        [44, 21], [3, 1], fmt="fp16", cache_fmt="int8", heads=(20, 2), widths=(320, 272),
        padding=2, scales=("dynamic", "dynamic"),
    )  # fmt: skip
    scales = args["v_scale_cache"].view
    sizes = 2.0 ** case.rng.integers(-9, 9, scales.shape)
    args["v_scale_cache"] = case.place((scales * sizes).astype(np.float32), "fp32", name="scales")
    case.attend(args, window=30, sink_tokens=5, logits_soft_cap=6.0)
    case.attend(args, tree_mask=case.tree([3, 1], 6))
    return case


def check_attention_heads_bits(device):
    """Small scores, and an output of float32: rounding weights would show."""
    case = AttentionCase(device, 67)
    args = latents(case, [70], heads=18, loud=0.5)
    case.attend(args, *case.results(args, fmt="fp32"))
    return case


def check_attention_wide_rows(
    device, cache_fmt="int8", widths=(320, 272), scales=("dynamic", "dynamic")
):  # fmt: skip
    """V is not part of K; a scale per slot for either; few new tokens; windows and trees."""
    case = AttentionCase(device, 64)
    args = case.arguments(
        [75, 40, 3], [3, 1, 2], fmt="fp16", cache_fmt=cache_fmt, heads=(6, 2), widths=widths,
        padding=2, scales=scales,
    )  # fmt: skip
    case.attend(args, window=30, sink_tokens=5, logits_soft_cap=6.0)
    case.attend(args, tree_mask=case.tree([3, 1, 2], 8))
    return case


def check_attention_wide_rows_mxfp4(device):
    """Likewise of codes, in rows of 170 and 136 bytes; scales per head."""
    return check_attention_wide_rows(device, "mxfp4", (320, 256), ("per head", "float"))


def check_attention_append(device, fmt="fp32"):
    """Several tokens per sequence, spare rows, causal and not."""
    case = AttentionCase(device, 46)
    args = case.arguments(LENS, NEW, fmt=fmt, heads=(6, 2), widths=(24, 40), padding=3, page_size=3)
    case.attend(args)
    case.attend(args, causal=False)
    return case


def check_attention_append_bf16(device):
    return check_attention_append(device, "bf16")


def check_attention_append_in_large_tiles(device):
    """Tiles of 128 rows, the last of which is not full, with a mask at their ends and without."""
    for masks in ({}, {"window": 50, "sink_keys": 3}, {"tree": True, "query_lens": (130, 9)}):
        arguments = {"seq_lens": (300, 140), "query_lens": (140, 9), "widths": (64, 64), **masks}
        Call(kernel="prefill of 128 rows", **arguments).check(device)


def check_attention_append_long(device):
    """More queries than a tile, over more keys than one."""
    case = AttentionCase(device, 47)
    case.attend(
        case.arguments([150], [70], fmt="bf16", heads=(1, 1), widths=(64, 64), page_size=16)
    )
    return case


def check_attention_append_quantised(device):
    """Scales per slot and per head, of int8 and fp8."""
    for fmt, kinds in (("int8", ("dynamic", "per head")), ("fp8_e4m3", ("per head", "dynamic"))):
        case = AttentionCase(device, 48)
        case.attend(
            case.arguments(LENS, NEW, fmt="bf16", cache_fmt=fmt, heads=(6, 3), scales=kinds)
        )
    return case


def check_attention_append_masks(device, fmt="fp32"):
    """Windows with first keys, learned sinks, a cap, and trees with them."""
    case = AttentionCase(device, 49)
    args = case.arguments(LENS, NEW, fmt=fmt, padding=2)
    rows = sum(NEW) + 2
    case.attend(args, window=5, sink_tokens=3)
    case.attend(args, window=4, causal=False)
    case.attend(args, sinks=case.sinks(4), logits_soft_cap=6.0)
    case.attend(args, tree_mask=case.tree(NEW, rows, 15), window=4, sink_tokens=2)
    case.attend(args, tree_mask=case.tree(NEW, rows, 15, any_mask=True), causal=False)
    return case


def check_attention_append_masks_bf16(device):
    return check_attention_append_masks(device, "bf16")


MORE_LENS = [30, 0, 41, 13, 21]
MORE_NEW = [9, 0, 20, 13, 6]
EVICTED = [(4, 3), (0, 5), (9, 8), (14, 2), (0, 4)]
STARTS = [2, 0, 11, 0, 30]
NODES = [12, 0, 0, 13, 9]


def check_attention_evicted_spans(device, fmt="fp32", new=None):
    """Evicted spans and hidden first keys, with a window that keeps first keys."""
    case = AttentionCase(device, 54)
    args = case.arguments(
        MORE_LENS, new, fmt=fmt, evicted=EVICTED, key_starts=STARTS, widths=(24, 40), page_size=3
    )
    case.attend(args)
    case.attend(args, window=8, sink_tokens=4)
    return case


def check_attention_evicted_spans_fp16(device):
    return check_attention_evicted_spans(device, "fp16")


def check_attention_append_places(device):
    return check_attention_evicted_spans(device, "fp16", MORE_NEW)


def check_attention_evicted_span_at_the_end(device):
    """A length that fits into the table only without its evicted span."""
    case = AttentionCase(device, 55)
    args = case.arguments([14, 16], evicted=[(5, 1), (7, 4)])
    args["block_table"] = args["block_table"].sub(lambda a: a[:, :4])
    case.attend(args)
    return case


def check_attention_shared_keys(device, fmt="fp32"):
    """More queries than keys, which all see all of them; with a window, queries before the first
    position see none.

    A tile of queries before the first position sees whole tiles of keys.
    """
    case = AttentionCase(device, 59)
    args = case.arguments([70, 3, 0], [140, 9, 4], fmt=fmt, heads=(1, 1))
    case.attend(args, causal=False)
    case.attend(args, causal=False, window=90)
    return case


def check_attention_shared_keys_fp16(device):
    return check_attention_shared_keys(device, "fp16")


def check_attention_trees(device, fmt="fp32"):
    """Nodes of earlier steps, rotated by their tree positions, some past the table."""
    case = AttentionCase(device, 56)
    args = case.arguments(MORE_LENS, MORE_NEW, fmt=fmt, widths=(32, 24)) | case.rope(32)
    args |= case.nodes(NODES, MORE_NEW) | case.tail(NODES, columns=11, low=-5, high=60)
    case.attend(args)
    case.attend(args, window=4, sink_tokens=2)
    return case


def check_attention_small_trees_bf16(device):
    """Few nodes, some of which no query of a tile sees."""
    case = AttentionCase(device, 62)
    args = case.arguments([40, 21, 16], [3, 5, 2], fmt="bf16", widths=(32, 24)) | case.rope(32)
    args |= case.nodes([12, 5, 4], [3, 5, 2]) | case.tail([12, 5, 4])
    case.attend(args)
    case.attend(args, window=20, sink_tokens=2)
    return case


def check_attention_trees_fp16(device):
    return check_attention_trees(device, "fp16")


def check_attention_rotated_keys(device, cache_fmt="fp32", interleaved=False):
    """A part of each key is rotated by its position; past the table, by the last."""
    case = AttentionCase(device, 57)
    args = case.arguments(MORE_LENS, cache_fmt=cache_fmt, widths=(40, 24))
    case.attend(args | case.rope(32, start=8, positions=25, interleaved=interleaved))
    return case


def check_attention_rotated_keys_fp16(device):
    """Likewise on tensor cores."""
    case = AttentionCase(device, 57)
    args = case.arguments(MORE_LENS, fmt="fp16", widths=(40, 24))
    case.attend(args | case.rope(32, start=8, positions=25))
    return case


def check_attention_interleaved(device):
    return check_attention_rotated_keys(device, interleaved=True)


def check_attention_rotated_packs(device):
    return check_attention_rotated_keys(device, "int8")


def check_attention_interleaved_packs(device):
    return check_attention_rotated_keys(device, "int8", interleaved=True)


def check_attention_rotated_bytes(device, interleaved=False):
    """Likewise on tensor cores, two tiles per warp of some."""
    case = AttentionCase(device, 58)
    args = case.arguments(
        [260, 31], fmt="fp16", cache_fmt="fp8_e5m2", widths=(80, 32), page_size=16
    )
    case.attend(args | case.rope(32, start=16, positions=250, interleaved=interleaved))
    return case


def check_attention_interleaved_bytes(device):
    return check_attention_rotated_bytes(device, interleaved=True)


def check_attention_append_rotated_keys(device, interleaved=False):
    """Likewise on tensor cores, into float32."""
    case = AttentionCase(device, 58)
    args = case.arguments(MORE_LENS, MORE_NEW, fmt="fp16", widths=(40, 24))
    args |= case.rope(32, start=8, positions=25, interleaved=interleaved)
    case.attend(args, *case.results(args, fmt="fp32"))
    return case


def check_attention_prefill_of_8_bits(device):
    """Two tiles of keys and more, and a scale for each key, dequantised in shared memory."""
    case = AttentionCase(device, 59)
    return case.attend(case.arguments(
        [150, 40], [70, 40], fmt="bf16", cache_fmt="fp8_e4m3", page_size=16, heads=(4, 2),
        widths=(128, 64), loud=1.0, scales=("dynamic", "dynamic"),
        index=("int64", "int32"),
    ))  # fmt: skip


def check_attention_prefill_of_4_bits(device):
    """Likewise of codes with group scales."""
    case = AttentionCase(device, 60)
    return case.attend(case.arguments(
        [150, 40], [70, 40], fmt="fp16", cache_fmt="nvfp4", page_size=16, heads=(4, 2),
        widths=(64, 128), loud=1.0, scales=("per head", "float"),
    ))  # fmt: skip


def check_attention_append_rotated_keys_in_any_order(device):
    """Warps wait for one another at barriers alone."""
    for device.thread_order_seed in (1, 2, 3, 4):
        case = check_attention_append_rotated_keys(device)
    device.thread_order_seed = 0
    return case


def check_attention_append_interleaved(device):
    return check_attention_append_rotated_keys(device, interleaved=True)


def check_attention_full_table(device):
    """A sequence that takes all of its row of the table is no fault."""
    case = AttentionCase(device, 51)
    args = case.arguments([8, 3])
    args["block_table"] = args["block_table"].sub(lambda a: a[:, :2])
    case.attend(args)


def faulty_table(case, args, page):
    table = args["block_table"].view.astype(np.int64)
    table[0, 1], table[3, 2], table[4, 0] = page, -1, page
    return {**args, "block_table": case.table(table, "int64")}


def check_attention_faults(device, new=None, fmt="fp32"):
    """Negative pages, the page past the end, one far past it, and a length past the table."""
    case = AttentionCase(device, 50)
    args = case.arguments(LENS, new, fmt=fmt)
    for page in (len(args["k_cache"].view), 2**32 + 1):
        case.attend(faulty_table(case, args, page))
    args["block_table"] = args["block_table"].sub(lambda a: a[:, :5])
    case.attend(args)
    return case


def check_attention_faults_fp16(device):
    return check_attention_faults(device, fmt="fp16")


def check_attention_append_faults(device):
    """Likewise, and rows that do not exist."""
    case = check_attention_faults(device, NEW)
    args = case.arguments(LENS, NEW)
    args["query"] = case.place(args["query"].view[:-2], "fp32", name="query")
    case.attend(args)
    return case


def check_merge_two(device, fmt="bf16"):
    """Empty states with NaN in them, natural and binary logarithms, small weights and none."""
    case = AttentionCase(device, 51)
    for base, loud in (("e", 4), ("2", 4), ("e", 90)):
        states = [states_of(case, fmt, (9, 3, 40), loud) for _ in "ab"]
        out, lse = case.output(fmt, (9, 3, 40)), case.output("fp32", (9, 3))
        case.merge(*states[0], *states[1], out, lse, base=base)
    return case


def check_merge_parts(device):
    """The last block of a tile merges what all have left, and leaves its counter at 0."""
    for splits in (2, 20):
        Call(
            kernel="decode", splits=splits, merges=True, seq_lens=(350, 0), query_lens=(3, 2),
            heads=(4, 2), learned=True, sm_scale=30.0,
        ).check(device)  # fmt: skip


def check_merge_parts_in_two_steps(device):
    for splits in (70, 81):  # groups of 9, the last one smaller, and nine of them
        Call(
            kernel="decode", splits=splits, merges=True, seq_lens=(150, 1200), query_lens=(1, 2),
            heads=(24, 2), fmt="bf16",
        ).check(device)  # fmt: skip


def check_merge_parts_of_any_strides(device):
    """Pieces of a few new tokens, rows of no sequence, outputs of float32 and fp16, no lse."""
    case = AttentionCase(device, 53)
    args = case.arguments(
        [1300, 5], [2, 1], fmt="fp16", heads=(4, 2), page_size=16, widths=(32, 24), padding=2
    )
    case.attend(args, *case.results(args, fmt="fp32"))
    args["sinks"] = case.sinks(4)
    case.attend(args, case.results(args)[0], None)
    return case


def check_merge_many(device):
    """Five states of odd width."""
    case = AttentionCase(device, 52)
    states = states_of(case, "fp32", (5, 9, 3, 33))
    case.merge(*states, out=case.output("fp32", (9, 3, 33)), lse=case.output("fp32", (9, 3)))
    return case


def states_of(case, fmt, shape, loud=4):
    """Outputs and logarithms, a third of them empty."""
    outs = from_values(case.rng.standard_normal(shape), fmt)
    lses = (case.rng.standard_normal(shape[:-1]) * loud).astype(np.float32)
    empty = case.rng.random(shape[:-1]) < 0.35
    lses[empty], outs[empty] = -np.inf, from_values(np.nan, fmt)
    lses[..., :2, :], outs[..., :2, :, :] = -np.inf, from_values(np.nan, fmt)
    return case.place(outs, fmt, name="out_a"), case.place(lses, "fp32", name="lse_a")


def check_attention_decode_tree(device):
    """Nodes that no query sees, which are NaN in the cache."""
    Call(kernel="decode", tree=True, seq_lens=(40, 21), query_lens=(5, 6)).check(device)


def check_attention_kept_keys_in_order(device):
    """More kept keys than the window leaves out."""
    Call(window=4, sink_keys=100, seq_lens=(60,), query_lens=(12,), kernel="decode").check(device)


# As users run them on a processor, in vector registers ------------------------------------------


def check_few_rows(device, fmt="fp32"):
    """K and V are read where they lie, with a tail of keys; a block without its first page."""
    case = AttentionCase(device, 70)
    args = case.arguments([77, 0, 1, 200], fmt=fmt, heads=(6, 2), widths=(64, 96), page_size=16)
    table = args["block_table"].view.copy()
    table[3, 4] = -1
    case.attend(args | {"block_table": case.table(table)})
    return case


def check_many_rows(device, fmt="fp32"):
    """Tiles that are taken together, and some that are not whole; windows that few rows see."""
    case = AttentionCase(device, 71)
    args = case.arguments(
        [150, 90, 41, 3], [70, 33, 41, 0], fmt=fmt, heads=(6, 2), widths=(80, 64), page_size=16
    )
    case.attend(args)
    case.attend(args, window=19, sink_tokens=5)
    return case


def check_heads_that_are_taken_together(device, fmt="fp32"):
    """More heads than a block takes, and more rows of each than a product."""
    case = AttentionCase(device, 75)
    for heads in ((18, 9), (35, 35), (25, 5)):
        case.attend(
            case.arguments([77, 1, 40], fmt=fmt, heads=heads, widths=(32, 64), page_size=16)
        )
    return case


def check_few_rows_beside_many(device, fmt="fp32"):
    """Sequences of one or two new tokens beside one of many."""
    case = AttentionCase(device, 76)
    args = case.arguments(
        [150, 70, 35], [90, 1, 2], fmt=fmt, heads=(6, 2), widths=(64, 64), page_size=16
    )
    case.attend(args)
    case.attend(args, window=40, logits_soft_cap=9.0)
    return case


def check_no_keys_of_a_tile(device):
    """The rows of the first tile see no key, the rows of the next do."""
    case = AttentionCase(device, 72)
    args = case.arguments([41, 30], [33, 20], heads=(2, 1), key_starts=[20, 30])
    case.attend(args)
    return case


def check_values_that_are_no_numbers(device, query_lens=(3, 4), fmt="fp32"):
    """A NaN in the value of the last key reaches the row that sees it alone."""
    case = AttentionCase(device, 73)
    args = case.arguments([45, 33], list(query_lens), fmt=fmt, heads=(2, 1), page_size=16)
    out, _ = case.attend(args)
    before = out.live().copy()
    table, values = args["block_table"].view, args["v_cache"].view.copy()
    values[table[0, 44 // 16], 44 % 16] = from_values(np.nan, fmt)
    args["v_cache"] = case.place(values, fmt, name="v_cache")
    after = reference.decode(device.to_numpy(case.issue(args)), fmt)
    sees = query_lens[0] - 1
    others = [row for row in range(len(after)) if row != sees]
    assert np.isnan(after[sees]).all()
    np.testing.assert_array_equal(after[others], reference.decode(before, fmt)[others])
    return case


def check_scores_that_are_no_numbers(device):
    """A NaN or an infinity in a key reaches the rows that see it."""
    for number in (np.nan, np.inf):
        case = AttentionCase(device, 74)
        args = case.arguments([40, 33], [2, 9], heads=(1, 1), page_size=16)
        keys = args["k_cache"].view.copy()
        keys[args["block_table"].view[1, 0], 3] = number
        args["k_cache"] = case.place(keys, "fp32", name="k_cache")
        out = device.to_numpy(case.issue(args))
        assert np.isfinite(out[:2]).all()
        assert np.isnan(out[2:]).all()
    return case


def check_four_bits(device, fmt="nvfp4", how="NHD"):
    """Scales of K and V beside group scales, which lie behind the rows or apart; a block without
    its first page."""
    case = AttentionCase(device, 75)
    args = case.arguments(
        [77, 0, 1, 45], [3, 0, 1, 9], fmt="bf16", cache_fmt=fmt, heads=(6, 2), widths=(128, 256),
        page_size=16, how=how, scales=("per head", "float"),
    )  # fmt: skip
    table = args["block_table"].view.copy()
    table[3, 2] = -1
    case.attend(args | {"block_table": case.table(table)})
    return case


def check_rotated_four_bits(device, fmt="int4", *, interleaved=False):
    """Keys that are rotated when they are read."""
    case = AttentionCase(device, 76)
    args = case.arguments(
        [41, 0, 33], [2, 0, 1], fmt="fp16", cache_fmt=fmt, heads=(4, 2), widths=(128, 128)
    )
    case.attend(args | case.rope(64, start=32, interleaved=interleaved))
    return case


def check_stored_rotated(device):
    """Keys and values that are stored rotated, and values alone."""
    case = AttentionCase(device, 77)
    for new in ([2, 0, 1], [33, 0, 2]):
        args = case.arguments(
            [41, 0, 33], new, fmt="fp16", cache_fmt="nvfp4", heads=(4, 2), widths=(128, 96)
        )
        case.attend(rotated(args))
        case.attend(rotated(args, "v_cache"))
    return case


CHECKS = (
    check_attention_decode,
    check_attention_decode_bf16,
    check_attention_decode_heads_first,
    check_attention_long_decode,
    check_attention_long_decode_fp16,
    check_attention_long_append,
    check_attention_long_decode_fp8,
    check_attention_decode_int8,
    check_attention_decode_int8_plain,
    check_attention_decode_rising_scales,
    check_attention_decode_fp8,
    check_attention_decode_masks,
    check_attention_decode_masks_fp16,
    check_attention_latent,
    check_attention_latent_fp8,
    check_attention_latent_nvfp4,
    check_attention_latent_mxfp4,
    check_attention_latent_int4,
    check_attention_wide_rows,
    check_attention_wide_rows_mxfp4,
    check_attention_heads,
    check_attention_heads_fp8,
    check_attention_heads_wide_rows,
    check_attention_heads_bits,
    check_attention_append,
    check_attention_append_bf16,
    check_attention_append_long,
    check_attention_append_whole_tiles,
    check_attention_append_quantised,
    check_attention_append_masks,
    check_attention_append_masks_bf16,
    check_attention_faults,
    check_attention_full_table,
    check_attention_faults_fp16,
    check_attention_append_faults,
    check_attention_evicted_spans,
    check_attention_evicted_spans_fp16,
    check_attention_append_places,
    check_attention_evicted_span_at_the_end,
    check_attention_shared_keys,
    check_attention_shared_keys_fp16,
    check_attention_trees,
    check_attention_trees_fp16,
    check_attention_small_trees_bf16,
    check_attention_rotated_keys,
    check_attention_rotated_keys_fp16,
    check_attention_interleaved,
    check_attention_rotated_packs,
    check_attention_interleaved_packs,
    check_attention_rotated_bytes,
    check_attention_interleaved_bytes,
    check_attention_append_rotated_keys,
    check_attention_append_rotated_keys_in_any_order,
    check_attention_append_interleaved,
    check_merge_two,
    check_merge_many,
    check_merge_parts,
    check_merge_parts_in_two_steps,
    check_merge_parts_of_any_strides,
)
