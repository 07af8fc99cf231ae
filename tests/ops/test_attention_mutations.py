"""Attention and merges are checked well enough to notice kernels broken in one place."""

from __future__ import annotations

import attention_checks
import pytest
from mutation_cases import Mutation, one_of_each
from prefill_calls import Call

DECODE, APPEND = attention_checks.check_attention_decode, attention_checks.check_attention_append
LONG_DECODE = attention_checks.check_attention_long_decode
MASKS = attention_checks.check_attention_append_masks
CAUSAL = "p.causal && key > position"
WINDOW = "!p.window || key > position - p.window || key < p.sink_keys"
SHARED, ROPE, TILES = "attention.cuh", "attention_rope.cuh", "attention_tiles.cuh"
SPANS, TREES = (
    attention_checks.check_attention_evicted_spans,
    attention_checks.check_attention_trees,
)
ROTATED_TILES = attention_checks.check_attention_append_rotated_keys
MMA, MMA_SHARED = "attention_decode_mma.cu", "attention_decode_mma.cuh"
MMA_LONG = attention_checks.check_attention_long_decode_fp16
MMA_BYTES = attention_checks.check_attention_long_decode_fp8
MMA_MASKS = attention_checks.check_attention_decode_masks_fp16
LATENT_FILE = "attention_decode_latent.cu"
LATENT, WIDE = attention_checks.check_attention_latent, attention_checks.check_attention_wide_rows
HEADS_FILE, HEADS = "attention_decode_heads.cu", attention_checks.check_attention_heads
HEADS_FP8 = attention_checks.check_attention_heads_fp8
HEADS_WIDE = attention_checks.check_attention_heads_wide_rows
RISING = attention_checks.check_attention_decode_rising_scales
WHOLE_TILES = attention_checks.check_attention_append_whole_tiles
ROTATED_BYTES = attention_checks.check_attention_rotated_bytes
INTERLEAVED_BYTES = attention_checks.check_attention_interleaved_bytes
SMALL_TREES = attention_checks.check_attention_small_trees_bf16
WEIGHT = "logits[r][n] == -kInfinity ? 0.0f : exp2f("
SLOT = "const i64 slot = page * p.page_size + offset;"


def decode_tree(device):
    """Nodes that no query sees, which are NaN in the cache."""
    Call(kernel="decode", tree=True, seq_lens=(40, 21), query_lens=(5, 6)).check(device)


def kept_keys_in_order(device):
    """More kept keys than the window leaves out."""
    Call(window=4, sink_keys=100, seq_lens=(60,), query_lens=(12,), kernel="decode").check(device)


MUTATIONS = {
    "the head of a neighbouring group": Mutation(
        "const i64 head = i64{kv_head} * p.group + packed % p.group;\n  return p.query",
        "const i64 head = i64{kv_head ^ 1} * p.group + packed % p.group;\n  return p.query",
        DECODE, SHARED),
    "one page for all keys": Mutation(
        "place >> p.page_shift : place / p.page_size;", "0 : 0;", DECODE, SHARED),
    "the first offset of every page": Mutation(
        "place & ((i64{1} << p.page_shift) - 1) : place % p.page_size", "0 : 0", DECODE, SHARED),
    "the scale of scores forgotten": Mutation(
        "const float score = dot * p.score_scale;", "const float score = dot;", DECODE, SHARED),
    "the future seen": Mutation(f"if ({CAUSAL}) return false;", "", APPEND, SHARED),
    "the present not seen": Mutation(
        CAUSAL, CAUSAL.replace("key > position", "key >= position"), APPEND, SHARED),
    "a window one too wide": Mutation(
        WINDOW, WINDOW.replace("key > position -", "key >= position -"), MASKS, SHARED),
    "first keys forgotten past the window": Mutation(
        WINDOW, WINDOW.replace(" || key < p.sink_keys", ""), MASKS, SHARED),
    "the tree of the neighbouring token": Mutation(
        "(t.first_token + token) * p.mask_row_bytes", "(t.first_token + token + 1) * "
        "p.mask_row_bytes", MASKS, SHARED),
    "new tokens of a tree outside of the window": Mutation(
        "if (first > first_tree) first = first_tree;", "", MASKS, SHARED),
    "the cap after the logarithm": Mutation(
        "p.cap_scale * tanhf(", "p.soft_cap * tanhf(", MASKS,
        SHARED),
    "learned sinks bring nothing": Mutation(
        "if (sink != -kInfinity) {", "if (false) {", MASKS, "attention_end.cuh"),
    "the sum not rescaled": Mutation("    sum[r] *= rescale;\n", "", LONG_DECODE, "attention.cu"),
    "the values not rescaled": Mutation(
        "values[r][s].values[j] *= rescale;", "values[r][s].values[j] *= 1.0f;", LONG_DECODE,
        "attention.cu"),
    "groups merged without their tops": Mutation(
        "sum += sums[g * kRows + r] * weight;", "sum += sums[g * kRows + r];", DECODE,
        "attention.cu"),
    "no barrier before groups are merged": Mutation(
        "__syncthreads();  // the groups have written theirs", "", DECODE, "attention.cu"),
    "keys of a split left out": Mutation(
        "first += groups * kKeys", "first += groups * kKeys + 1", LONG_DECODE, "attention.cu"),
    "splits that begin alike": Mutation(
        "range.begin = min(split * per_split, t.num_visible);", "range.begin = 0;", LONG_DECODE,
        SHARED),
    "what is not seen weighs in": Mutation(
        WEIGHT, "logits[r][n] < -3e38f ? 1.0f : exp2f(", APPEND, "attention.cu"),
    "dynamic scales by the offset in the page": Mutation(
        SLOT, SLOT.replace("page * p.page_size + ", ""),
        attention_checks.check_attention_decode_int8_plain, "attention.cu"),
    "the scale of K for V in attention": Mutation(
        "weights[r] *= v_scales[n];", "weights[r] *= k_scales[n];",
        attention_checks.check_attention_decode_int8_plain, "attention.cu"),
    "tiles of the first warp for all": Mutation(
        "i64{number} * kDecodeWarps + warp", "i64{number} * kDecodeWarps", MMA_LONG, MMA),
    "the keys of the tile before": Mutation(
        "first_of(number + kStages + 1)", "first_of(number + kStages)", MMA_LONG, MMA),
    "queries of bytes in their own order": Mutation(
        "(four[0] * inverse, four[2] * inverse)", "(four[0] * inverse, four[1] * inverse)",
        MMA_BYTES, MMA_SHARED),
    "odd elements of keys before even ones": Mutation(
        "(s[n], a, even, odd)", "(s[n], a, odd, even)", MMA_BYTES, MMA),
    "columns of values side by side": Mutation(
        "first[0], second[0], first[1], second[1]", "first[0], first[1], second[0], second[1]",
        MMA_BYTES, MMA_SHARED),
    "the scale of a query forgotten": Mutation(
        "shared.query_scales[lane / 4 + h * 8] * (", "(", MMA_BYTES, MMA),
    "the scale of keys forgotten": Mutation(
        "p.k_scale_cache ? 1.0f : static_scale(p.k_scale, p.k, kv_head)", "1.0f", MMA_BYTES, MMA),
    "the scale of values forgotten": Mutation(
        "kSmallestScale : static_scale(p.v_scale, p.v, kv_head)", "kSmallestScale : 1.0f",
        MMA_BYTES, MMA),
    "scales of keys by the wrong column": Mutation(
        "table.k_scales[stage][n * 8 + lane % 4 * 2 + i % 2]",
        "table.k_scales[stage][n * 8 + lane % 4 * 2]", attention_checks.check_attention_decode_int8,
        MMA),
    "scales of values by the wrong column": Mutation(
        "table.v_scales[stage][n * 8 + lane % 4 * 2 + i]", "table.v_scales[stage][n * 8 + i]",
        RISING, MMA),
    "values not rescaled when a scale rises": Mutation(
        "o[n][i] *= rescale;", "o[n][i] *= 1.0f;", RISING, MMA_SHARED),
    "weights rounded to 16 bits": Mutation(
        "mma_m16n8k16<T>(o[2 * n + i], rest, b[2 * i], b[2 * i + 1]);", "",
        attention_checks.check_attention_decode_bf16, MMA_SHARED),
    "sums of warps merged without their tops": Mutation(
        "sum += own * weights[w];", "sum += own;", MMA_LONG, MMA),
    "values of warps merged without their tops": Mutation(
        "own.values[i] * weights[w];", "own.values[i];", MMA_LONG, MMA),
    "a window one too narrow on tensor cores": Mutation(
        "highest - p.window + 1", "highest - p.window + 2", MMA_MASKS, SHARED),
    "kept keys forgotten on tensor cores": Mutation(
        "(first >= t.sinks && first_key >= p.sink_keys)", "true", MMA_MASKS, TILES),
    "kept keys in the window forgotten on tensor cores": Mutation(
        "(first >= t.sinks && first_key >= p.sink_keys)", "first >= t.sinks",
        kept_keys_in_order, TILES),
    "what the last row sees seen by all": Mutation(
        "limits_of(p, t, position_of(p, t, 0), position_of(p, t, t.num_rows - 1))",
        "limits_of(p, t, position_of(p, t, t.num_rows - 1), position_of(p, t, 0))", WHOLE_TILES,
        SHARED),
    "what the last row sees seen by all, plainly": Mutation(
        "limits_of(p, t, position_of(p, t, 0), position_of(p, t, t.num_rows - 1))",
        "limits_of(p, t, position_of(p, t, t.num_rows - 1), position_of(p, t, 0))", APPEND,
        SHARED),
    "nodes of trees seen by all": Mutation(
        "if (limits.end > first_tree) limits.end = first_tree;", "", MASKS, SHARED),
    "what the last row sees seen by each": Mutation(
        "const i64 position = position_of(p, t, row);",
        "const i64 position = position_of(p, t, t.num_rows - 1);", WHOLE_TILES, MMA_SHARED),
    "missing keys weigh in": Mutation(
        "if (complete) return;", "return;", attention_checks.check_attention_faults_fp16, TILES),
    "trees ignored on tensor cores": Mutation(
        "in_order && before_tree", "in_order", SMALL_TREES, TILES),
    "nodes that no query sees are read": Mutation(
        "if (!seen_by_any(p, t, found.key)) return found;", "", decode_tree, MMA_SHARED),
    "no holes on tensor cores, few rows": Mutation(
        "found.place = place_of(p, t, found.key);", "found.place = found.key;",
        attention_checks.check_attention_evicted_spans_fp16, MMA_SHARED),
    "keys of few rows left as they are": Mutation(
        "rotate_keys<TCache, kWidth, kKeys, 32>(p, keys, table.k[stage], table.angles[stage], "
        "lane);", "", attention_checks.check_attention_rotated_keys_fp16, MMA),
    "keys of 8 bits left as they are": Mutation(
        "const bool rotary = at >= 0 && at < p.rotary_dim;", "const bool rotary = false;",
        ROTATED_BYTES, MMA),
    "the second half of a row rotated by the angles of the first": Mutation(
        "if (apart && at >= half_dim) continue;", "", ROTATED_BYTES, MMA),
    "halves of a row rotated one way": Mutation(
        "-x[1].values[i] * sine", "x[1].values[i] * sine", ROTATED_BYTES, MMA),
    "keys of 8 bits rotated by the angles of the first ones": Mutation(
        "key_of(p, t, first + n * 8 + lane / 4)", "key_of(p, t, first + lane / 4)", ROTATED_BYTES,
        MMA),
    "neighbours rotated by the angles of others": Mutation(
        "at / 2 + lane % 4 * 2)", "at / 2 + lane % 4 / 2 * 2)", INTERLEAVED_BYTES, MMA),
    "rotated scores in units of others": Mutation(
        "s[n][i] *= 1.0f / kUnit;", "s[n][i] *= 1.0f;", ROTATED_BYTES, MMA),
    "the first half of a tile of 32 keys twice": Mutation(
        "keys + chunk_at<kRowBytes>(n * 16 + lane % 16, k + lane / 16)",
        "keys + chunk_at<kRowBytes>(lane % 16, k + lane / 16)", MMA_BYTES, MMA),
    "a split that repeats the one before": Mutation(
        "range.begin = min(split * per_split, t.num_visible);",
        "range.begin = min((split / 2 * 2) * per_split, t.num_visible);", MMA_LONG, SHARED),
    "splits without keys leave no LSE": Mutation(
        "*end_of_row(p, t, threadIdx.x, kv_head, split, -kInfinity, 0.0f).lse = -kInfinity;", "",
        MMA_LONG, MMA_SHARED),
    "latents of the first warp for all": Mutation(
        "threadIdx.x / 32 * 8 + lane % 8", "lane % 8", LATENT, LATENT_FILE),
    "columns of the first warp for all": Mutation(
        "warp * kOwnColumns * kBytes / 16", "0", LATENT, LATENT_FILE),
    "half of the depth of latents": Mutation(
        "sums[0][i] + sums[1][i]", "sums[0][i]", LATENT, LATENT_FILE),
    "the table of another tile of latents": Mutation(
        "set_rows(table, (number + kLatentStages) % kLatentTables",
        "set_rows(table, number % kLatentTables", LATENT, LATENT_FILE),
    "keys taken for values that lie elsewhere": Mutation(
        "if (fetches_values) {", "if (false) {", WIDE, LATENT_FILE),
    "latents hidden by the numbers of the first warp": Mutation(
        "p, t, 0, first + warp * 8)", "p, t, 0, first)", WIDE, LATENT_FILE),
    "missing latents of the first warp hidden for all": Mutation(
        "table.present[entry] >> warp * 8", "table.present[entry]", LATENT, LATENT_FILE),
    "the depth of the first warp for all": Mutation(
        "(quarter * kDepthSteps + k) * 2", "k * 2", HEADS, HEADS_FILE),
    "the depth of the first warp for all, of bytes": Mutation(
        "quarter * kDepthSteps + k));", "k));", HEADS_FP8, HEADS_FILE),
    "the queries of the first 16 rows for all": Mutation(
        "row = queries.rows[2 * m + h]", "row = queries.rows[h]", HEADS, HEADS_FILE),
    "queries of shared memory of the first rows for all": Mutation(
        "own.load(queries + ((k - kHeld) * 2 + m) * 512", "own.load(queries + ((k - kHeld) * 2) * "
        "512", HEADS, HEADS_FILE),
    "scores of one quarter for all three": Mutation(
        "sums + (owner * 3 + i) *", "sums + (owner * 3) *", HEADS, HEADS_FILE),
    "scores of the rows of the first warp for all": Mutation(
        "if (owner == quarter) {", "if (owner == 0) {", HEADS, HEADS_FILE),
    "columns of the first warp of a group for all": Mutation(
        "quarter * kWarpColumns * kBytes / 16", "0", HEADS, HEADS_FILE),
    "weights of the first 16 rows for all": Mutation(
        "m * 16 + lane % 16, i * (kKeys / 8)", "lane % 16, i * (kKeys / 8)", HEADS, HEADS_FILE),
    "the rest of weights left out": Mutation(
        "chunk_at<Shape::kWeightBytes>(row, n + kScores)) = rest;",
        "chunk_at<Shape::kWeightBytes>(row, n + kScores)) = 0;",
        attention_checks.check_attention_heads_bits, HEADS_FILE),
    "values of many heads not rescaled": Mutation(
        "o[n][i] *= rescales[n / kColumnProducts * 2 + i / 2];", ";", HEADS, HEADS_FILE),
    "sums of many heads not rescaled": Mutation("sum *= rescale;", "", HEADS, HEADS_FILE),
    "missing latents of many heads weigh in": Mutation(
        "present[1] = {table.present[entry]}", "present[1] = {kAllLanes >> (32 - kKeys)}", HEADS,
        HEADS_FILE),
    "keys of many heads hidden by the rows of the first warp": Mutation(
        "t, warp_row, first)", "t, 0, first)", HEADS_WIDE, HEADS_FILE),
    "the table of another tile of many heads": Mutation(
        "(number + kHeadsStages) % kHeadsTables", "number % kHeadsTables", HEADS, HEADS_FILE),
    "latents of a chunk past the row": Mutation(
        "if (kChunks % kLanes != 0 && chunk >= kChunks) break;", "", HEADS, HEADS_FILE),
    "keys of many heads taken for values that lie elsewhere": Mutation(
        "if (fetches_values) {", "if (false) {", HEADS_WIDE, HEADS_FILE),
    "the largest query of the first quarter for all": Mutation(
        "query_tops[j * kHeadsRows + row]", "query_tops[row]", HEADS_FP8, HEADS_FILE),
    "the scale of a query of many heads forgotten": Mutation(
        "shared.query_scales[warp_row + lane / 4] * (", "(", HEADS_FP8, HEADS_FILE),
    "odd elements of keys of many heads before even ones": Mutation(
        "(s[m][n], a[m], even, odd)", "(s[m][n], a[m], odd, even)", HEADS_FP8, HEADS_FILE),
    "scales of keys of many heads by the wrong column": Mutation(
        "table.k_scales[entry][n * 8 + lane % 4 * 2 + i]",
        "table.k_scales[entry][n * 8 + lane % 4 * 2]", HEADS_WIDE, HEADS_FILE),
    "scales of values of many heads left out": Mutation(
        "own[n][i] *= scales[n][i] * inverse;", "own[n][i] *= inverse;", HEADS_WIDE, HEADS_FILE),
    "rows of the first 16 written for all": Mutation(
        "const int row = group_row + m * 16 + i;", "const int row = group_row + i;", HEADS,
        HEADS_FILE),
    "prefill's rows hidden by those of the first warp": Mutation(
        "p, t, first_row, first);", "p, t, 0, first);",
        attention_checks.check_attention_append_long, "attention_prefill.cu"),
    "what the first row of a warp sees seen by the last": Mutation(
        "position_of(p, t, first_row), position_of(p, t, first_row + 15)",
        "position_of(p, t, first_row + 15), position_of(p, t, first_row)",
        attention_checks.check_attention_append_long, "attention_prefill.cu"),
    "rows of the sequence before": Mutation(
        "const i64 start = before + end - length;", "const i64 start = before + end;", APPEND,
        "attention.cu"),
    "pages past the end of a table not reported": Mutation(
        "    if (reports) {\n      report_fault(p.faults, p.table_operation",
        "    if (false) {\n      report_fault(p.faults, p.table_operation",
        attention_checks.check_attention_faults, SHARED),
    "lengths past the table not reported": Mutation(
        "if (reports && within == 0) {", "if (false) {", attention_checks.check_attention_faults,
        SHARED),
    "queries of no position see nothing, whatever they look for": Mutation(
        "(position < 0 && position_counts(p, first_tree))", "position < 0",
        attention_checks.check_attention_shared_keys, SHARED,
        (("attention.cuh", "lowest < 0 && position_counts(p, first_tree)", "lowest < 0"),)),
    "queries of no position see what a window leaves": Mutation(
        "return p.causal || p.window ||", "return p.causal ||",
        attention_checks.check_attention_shared_keys, SHARED),
    "a hole that begins one key later": Mutation(
        "|| key < count_of(", "|| key <= count_of(", SPANS, SHARED),
    "no holes on tensor cores": Mutation(
        "const i64 place = place_of(p, t, key);", "const i64 place = key;",
        attention_checks.check_attention_append_places, "attention_prefill.cuh"),
    "lengths past the table but for their holes": Mutation(
        "most - count_of(p.evicted_lens, p.evicted_len_bytes, t.sequence);", "most;",
        attention_checks.check_attention_evicted_span_at_the_end, SHARED),
    "keys left to others seen": Mutation(
        "t.first_key = start < end ? start : end;", "t.first_key = 0;", SPANS, SHARED),
    "first keys kept though they are left to others": Mutation(
        ": t.first_key) - start;", ": t.first_key);", SPANS, SHARED),
    "first keys from the first on": Mutation(
        "i < t.sinks ? i + key_start(p, t)", "i < t.sinks ? i", SPANS, SHARED),
    "trees of new tokens alone": Mutation(
        "p.tree_lens ? count_of(", "false ? count_of(", TREES, SHARED),
    "nodes rotated by their places": Mutation(
        "if (p.tree_positions &&", "if (false &&", TREES, ROPE),
    "one more position than there are columns": Mutation(
        "column < p.tree_position_columns", "column <= p.tree_position_columns", TREES, ROPE),
    "positions past the table rotated by what lies there": Mutation(
        "position < last ? position : last", "position", TREES, ROPE),
    "negative positions rotated by what lies there": Mutation(
        "position < 0 ? 0 : ", "", TREES, ROPE),
    "keys rotated backwards": Mutation(
        "fmaf(own, angles[pair], first ? -other : other)", "fmaf(own, angles[pair], first ? other "
        ": -other)", attention_checks.check_attention_rotated_keys, ROPE),
    "half of a key rotated wrongly": Mutation(
        "fmaf(own.values[j], cosines.values[j], first ? -other : other)",
        "fmaf(own.values[j], cosines.values[j], -other)",
        attention_checks.check_attention_rotated_packs, ROPE),
    "neighbours that are themselves": Mutation(
        "p.rotary_start + (at ^ 1)", "p.rotary_start + at",
        attention_checks.check_attention_interleaved, ROPE),
    "halves next to each other": Mutation(
        "i + p.rotary_dim / 2 : i - p.rotary_dim / 2", "i + 8 : i - 8",
        attention_checks.check_attention_rotated_packs, ROPE),
    "angles of the first half for all": Mutation(
        "const int pair = first ? at : at - half;\n  Pack", "const int pair = at % 8;\n  Pack",
        attention_checks.check_attention_rotated_packs, ROPE),
    "angles of other neighbours": Mutation(
        "angles + half + at / 2", "angles + half + (at / 2 ^ 4)",
        attention_checks.check_attention_interleaved_packs, ROPE),
    "the rotary part begins with the row": Mutation(
        "const int at = i - p.rotary_start;\n  const int half = p.rotary_dim / 2;\n"
        "  if (at < 0 || at >= p.rotary_dim) return own;\n  Pack",
        "const int at = i;\n  const int half = p.rotary_dim / 2;\n"
        "  if (at < 0 || at >= p.rotary_dim) return own;\n  Pack",
        attention_checks.check_attention_rotated_packs, ROPE),
    "no barrier after keys are rotated": Mutation(
        "__syncthreads();  // all keys are rotated", "",
        attention_checks.check_attention_append_rotated_keys_in_any_order, "attention_prefill.cu"),
    "keys of a tile left as they are": Mutation(
        "rotate_keys<T, kWidth, kKeys, kPrefillThreads>(p, keys, table.k, table.angles, "
        "threadIdx.x);", "", ROTATED_TILES, "attention_prefill.cu"),
    "the next chunk for the other half": Mutation(
        "first + half / 8 + pack", "first + 1 + pack", ROTATED_TILES, TILES),
    "angles of the first chunk for all": Mutation(
        ", sines + pack * 8", ", sines", ROTATED_TILES, TILES),
    "angles of the first neighbours for all": Mutation(
        ", sines + pack * 4", ", sines", attention_checks.check_attention_append_interleaved,
        TILES),
    "float32 written as if it had 16 bits": Mutation(
        "p.partial_out || p.out_format == 0", "p.partial_out", ROTATED_TILES,
        "attention_prefill.cu"),
    "a NaN of e4m3 that is 480 before sm_89": Mutation(
        "(magnitude + 0x00800080u) & 0x40004000u", "0",
        attention_checks.check_attention_visible_nan, "mma.cuh", arch=75),
    "states merged as if alike": Mutation(
        "power(lse[i] - origin, p.base_two)", "1.0f", attention_checks.check_merge_two, "merge.cu"),
    "the largest state of each lane alone": Mutation(
        "largest = fmaxf(largest, __shfl_xor_sync(row_lanes, largest, distance));", "",
        attention_checks.check_merge_many, "merge.cu"),
    "the sum of weights of each lane alone": Mutation(
        "total += __shfl_xor_sync(row_lanes, total, distance);", "",
        attention_checks.check_merge_many, "merge.cu"),
    "the last state that counts left out": Mutation(
        "used = state + 1;", "used = state;", attention_checks.check_merge_many, "merge.cu"),
    "natural logarithms taken for binary": Mutation(
        "return base_two ? exp2f(exponent) : expf(exponent);", "return exp2f(exponent);",
        attention_checks.check_merge_two, "merge.cu"),
    "states past the eighth forgotten": Mutation(
        "exists ? *reinterpret_cast<const float*>(rows.at(first + i))",
        "exists && first + i < 4 ? *reinterpret_cast<const float*>(rows.at(first + i))",
        attention_checks.check_merge_many, "merge.cu"),
}  # fmt: skip


@pytest.mark.parametrize("arch", [0, 75, 89])
def test_a_visible_nan_is_seen(kernel_sources, arch):
    attention_checks.check_attention_visible_nan(
        kernel_sources.device("-O0", f"-DKVCUPY_ARCH={10 * arch}")
    )


@pytest.mark.parametrize("name", one_of_each(MUTATIONS))
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)
