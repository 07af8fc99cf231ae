"""The checks of this suite notice kernels that are broken in one place.

Each mutation changes a copy of ``kernels_src``; then one of `operation_checks`, which check as the
tests of the operations do, must fail. Unchanged, the copy passes all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attention_checks
import operation_checks as checks
import pytest

import kvcupy as kv


@dataclass
class Mutation:
    """Text of the kernels, what stands there instead, and the check that must notice.

    Without a file, the text is replaced wherever it occurs; else in that file, where it must occur
    once. `more` is replaced along with it, each in its file.
    """

    old: str
    new: str
    check: Callable[[Any], Any]
    file: str | None = None
    more: tuple[tuple[str, str, str], ...] = ()


BARRIER = "    __syncthreads();\n"
REDUCE = "    for (int i = 0; i < warps; ++i) value = fmaxf(value, scratch[first_warp + i]);\n"
FAULT = "if (slot >= p.num_slots) {"
SKIP = "if (slot == p.skip_slot) slot = -1;"
K_ROW, V_ROW = "cache_row(p.k_cache, p.k, row, p)", "cache_row(p.v_cache, p.v, row, p)"
DIVIDE = "from_floats<T>(quotients(x, scale))"
NAN = "x != x ? int8{0} : "
TAIL = "first < k_words || first < v_words"

STORE = {
    "no barrier before the maxima of warps are read": Mutation(
        BARRIER + REDUCE, REDUCE, checks.check_dynamic),
    "no barrier after the maxima of warps are read": Mutation(
        REDUCE + BARRIER, REDUCE, checks.check_dynamic),
    "the maxima of one warp too few": Mutation(
        "i < warps; ++i", "i + 1 < warps; ++i", checks.check_dynamic),
    "half a warp reduced": Mutation(
        "distance = lanes / 2;", "distance = lanes / 4;", checks.check_dynamic),
    "K by the strides of V": Mutation(
        K_ROW, K_ROW.replace("p.k,", "p.v,"), checks.check_convert),  # narrower: inside the buffer
    "V by the strides of K": Mutation(
        V_ROW, V_ROW.replace("p.v,", "p.k,"), checks.check_copy),  # likewise
    "the heads of a row forgotten": Mutation(
        " +\n         row.head * side.cache.head_bytes;", ";", checks.check_convert),
    "the end of the wider row forgotten": Mutation(
        TAIL, "first < k_words", checks.check_copy),
    "pages of a power of two only": Mutation(
        "page_shift >= 0 ? slot >> page_shift : slot / page_size",
        "slot >> (page_shift >= 0 ? page_shift : 1)", checks.check_copy_of_odd_pages),
    "multiply by the reciprocal": Mutation(
        DIVIDE, "from_floats<T>(products(x, __fdiv_rn(1.0f, scale)))", checks.check_convert),
    "round towards zero": Mutation(
        "rintf(", "truncf(", checks.check_convert),
    "int8 of NaN undecided": Mutation(NAN, "", checks.check_convert),
    "no saturation in fp8": Mutation(
        "magnitude < kLimit ? magnitude : I{} + kLimit", "magnitude",
        checks.check_convert_to_fp8, "host/numbers.h"),
    "no smallest scale": Mutation("1e-6f", "0.0f", checks.check_dynamic),
    "negative slots count from the end": Mutation(
        FAULT, f"if (slot < 0) slot += p.num_slots;\n  {FAULT}", checks.check_copy),
    "slots past the end written": Mutation(
        FAULT, "if (slot > 2 * p.num_slots) {", checks.check_copy),
    "the slot just past the end written": Mutation(
        FAULT, "if (slot > p.num_slots) {", checks.check_copy),
    "slots past the end not reported": Mutation(
        " report_fault(p.faults", " if (false) report_fault(p.faults", checks.check_copy),
    "the skipped slot written": Mutation(SKIP, "", checks.check_copy),
}  # fmt: skip

FIRST = "sum_of_products(a, cosine, negative(b), sine)"
SECOND = "sum_of_products(b, cosine, a, sine)"
TURN = "rotate(a, b, cosine, sine, x, y);"


def turned(first: str = FIRST, second: str = SECOND, rounded: str = "from_floats<T>({})") -> str:
    """What `rotate` comes down to, to be changed."""
    return f"x = {rounded.format(first)};\n    y = {rounded.format(second)};"


POSITION_FAULT = "if (reports) report_fault(p.faults, p.position_operation"
SLOT_FAULT = "if (reports) report_fault(p.faults, p.slot_operation"
COPIES = "const bool copies = live && (live != in || norm);"
CACHED = "if (cached) to_cache<T, TCache>(x, scale)"
LIVE_KEY = (
    "if (!is_value && p.key_out) {\n"
    "    live = p.key_out + token * p.key_out_token_bytes + head * p.key_out_head_bytes;"
)
SUM = "distance = lanes / 2; distance > {}; distance /= 2) {{\n    value += "
MAX = "distance = lanes / 2; distance > {}; distance /= 2) {{\n    value = fmaxf("

ROPE = {
    "the other sine": Mutation(
        TURN, turned(FIRST.replace("negative(b)", "b")), checks.check_rotation, "rope.cu"),
    "the other sine of the second half": Mutation(
        TURN, turned(second=SECOND.replace(", a,", ", negative(a),")), checks.check_rotation,
        "rope.cu"),
    "cosines of half precision": Mutation(
        TURN, turned(FIRST.replace("cosine", "to_floats(from_floats<::half>(cosine))")),
        checks.check_rotation, "rope.cu"),
    "pairs side by side where they are halves apart": Mutation(
        "p.interleaved", "true", checks.check_rotation),
    "pairs halves apart where they are side by side": Mutation(
        "p.interleaved", "false", checks.check_interleaved_rotation),
    "the position of the neighbour": Mutation(
        "+ token * p.position_bytes", "+ (token ^ 1) * p.position_bytes", checks.check_rotation,
        "rope.cu"),
    "the table without its stride": Mutation(
        "position * p.table_row_bytes", "position * p.rotary_dim * 4", checks.check_rotation,
        "rope.cu"),
    "the position past the table looked up": Mutation(
        "position < p.max_positions", "position <= p.max_positions", checks.check_rotation,
        "rope.cu"),
    "negative positions count from the end": Mutation(
        "if (position >= 0 && position < p.max_positions) return p.table + position *",
        "if (position < p.max_positions) return p.table + (position & 63) *",
        checks.check_rotation, "rope.cu"),
    "positions outside not reported": Mutation(
        POSITION_FAULT, POSITION_FAULT.replace("reports", "false", 1), checks.check_rotation,
        "rope.cu"),
    "what passes is not copied": Mutation(
        COPIES, COPIES.replace("live != in || ", ""), checks.check_rotation, "rope.cu"),
    "what passes is not normalised": Mutation(
        COPIES, COPIES.replace(" || norm", ""), checks.check_partial_norm, "rope.cu"),
    "what passes is not stored": Mutation(
        CACHED, CACHED.replace("cached", "cached && is_value"), checks.check_rope_store,
        "rope.cu"),
    "no epsilon": Mutation(" + p.epsilon", "", checks.check_norm, "rope.cu"),
    "the mean over what turns": Mutation(
        "squares / p.head_dim", "squares / p.rotary_dim", checks.check_partial_norm, "rope.cu"),
    "the norm of the key for both": Mutation(
        "is_query ? p.query_norm : p.key_norm", "p.key_norm", checks.check_norm, "rope.cu"),
    "a sum one step short": Mutation(
        SUM.format(0), SUM.format(1), checks.check_norm, "common.cuh"),
    "a maximum one step short": Mutation(
        MAX.format(0), MAX.format(1), checks.check_rope_store_dynamic, "common.cuh"),
    "the second section forgotten": Mutation(
        "(i >= p.section_end_0) + (i >= p.section_end_1)", "2 * (i >= p.section_end_1)",
        checks.check_sections, "rope.cu"),
    "ends of interleaved sections swapped": Mutation(
        "axis == 1 ? p.section_end_0 : p.section_end_1",
        "axis == 1 ? p.section_end_1 : p.section_end_0", checks.check_interleaved_sections,
        "rope.cu"),
    "the first position for all sections": Mutation(
        "axis * p.axis_bytes", "0 * p.axis_bytes", checks.check_sections, "rope.cu"),
    "the key rounded twice": Mutation(
        TURN, turned(rounded="from_floats<T>(to_floats(from_floats<::half>({})))"),
        checks.check_rope_store, "rope.cu"),
    "the key quantised before it is rounded": Mutation(
        "  float inverse_rms;\n",
        "  float inverse_rms;\n  mutable Pack<float, kCount> exact_x, exact_y;\n",
        checks.check_rope_store_beside, "rope.cu", (
            ("rope.cu", TURN, turned(f"exact_x = {FIRST}", f"exact_y = {SECOND}")),
            ("rope.cu", "to_cache<T, TCache>(x, scale), to_cache<T, TCache>(y, scale)",
             "to_cache<float, TCache>(turning.exact_x, scale), "
             "to_cache<float, TCache>(turning.exact_y, scale)"),
        )),
    "the key written where it should not be": Mutation(
        LIVE_KEY, "if (!is_value) {\n    live = const_cast<char*>(in);",
        checks.check_rope_store_beside, "rope.cu"),
    "the value turned": Mutation(
        "is_value || !active ? 0 : p.rotary_dim / 2", "!active ? 0 : p.rotary_dim / 2",
        checks.check_rope_store, "rope.cu", (
            ("rope.cu", "if (is_value) {\n    for", "if (false) {\n    for"),
        )),
    "the scale of K for V": Mutation(
        "is_value ? p.v_scale : p.k_scale", "p.k_scale", checks.check_rope_store_beside,
        "rope.cu"),
    "a dynamic scale without what passes": Mutation(
        "largest.add(to_floats(turning.pass(i)));", "",
        checks.check_rope_store_dynamic, "rope.cu"),
    "tokens without a slot stored": Mutation(
        "if (token >= p.num_stored) return -1;", "", checks.check_rope_store, "rope.cu"),
    "the skipped slot written by a rotation": Mutation(
        "if (slot == p.skip_slot) return -1;", "", checks.check_rope_store, "rope.cu"),
    "the slot past the end written by a rotation": Mutation(
        "if (slot < p.num_slots) return slot;", "if (slot <= p.num_slots) return slot;",
        checks.check_rope_store, "rope.cu"),
    "slots past the end not reported by a rotation": Mutation(
        SLOT_FAULT, SLOT_FAULT.replace("reports", "false", 1), checks.check_good_positions,
        "rope.cu"),
    "MLA without its offset": Mutation(
        "cached = (is_value ? p.v_cache : p.k_cache) +", "cached = p.v_cache +",
        checks.check_rope_store_mla, "rope.cu"),
}  # fmt: skip

NOTHING_TO_DO = "  if (row.slot < 0) return;\n"
PAGE = "p.cache + {} * p.page_bytes"
PADDING = "for (i64 i = before + appended + lane; i < p.num_out; i += kLanes) p.out[i] = -1;"
PREFIX = "for (int other = lane; other < sequence; other += kLanes)"

OTHERS = {
    "scales of a gather ignored": Mutation(
        "if constexpr (kQuantised<TCache>)", "if constexpr (false)", checks.check_gather_static,
        "gather.cu"),
    "dynamic scales of a gather ignored": Mutation(
        "return scale_cache ? *scale", "return false ? *scale", checks.check_gather_dynamic,
        "gather.cu"),
    "dynamic scales of a gather by token": Mutation(
        "side, row.slot, row.head)\n", "side, row.token, row.head)\n",
        checks.check_gather_dynamic, "gather.cu"),
    "rows of skipped slots gathered": Mutation(
        f"{NOTHING_TO_DO}  const int lanes = 1 << p.lane_shift;\n"
        "  const int lane = threadIdx.x & (lanes - 1);\n  copy_rows",
        "  const int lanes = 1 << p.lane_shift;\n"
        "  const int lane = threadIdx.x & (lanes - 1);\n  copy_rows",
        checks.check_gather, "gather.cu"),
    "K gathered where V belongs": Mutation(
        "outside_row(p.key, p.k, row)", "outside_row(p.value, p.k, row)", checks.check_gather),
    "pages the other way": Mutation(
        PAGE.format("src"), PAGE.format("dst "), checks.check_pages, "pages.cu",
        (("pages.cu", PAGE.format("dst"), PAGE.format("src")),)),
    "the last word of a page dropped": Mutation(
        "p.row_bytes / kWordBytes", "p.row_bytes / kWordBytes - 1", checks.check_pages,
        "pages.cu"),
    "words in flight twice": Mutation(
        "first += lanes * kUnroll", "first += lanes * (kUnroll + 1)", checks.check_pages,
        "pages.cu"),
    "pages onto negative ones": Mutation(
        "if (src < 0 || dst < 0) return;", "if (src < 0) return;", checks.check_pages, "pages.cu"),
    "the page past the end copied": Mutation(
        "if (page < p.num_pages)", "if (page <= p.num_pages)", checks.check_pages, "pages.cu"),
    "pages past the end not reported": Mutation(
        "if (reports) report_fault", "if (false) report_fault", checks.check_pages, "pages.cu"),
    "the second axis of a page forgotten": Mutation(
        "outer % p.rows_1 * p.row_bytes_1", "outer % p.rows_1 * 0", checks.check_pages,
        "pages.cu"),
    "the sequence just before not counted": Mutation(
        PREFIX, PREFIX.replace("other < ", "other + 1 < "), checks.check_slot_mapping,
        "indexing.cu"),
    "the sequence itself counted": Mutation(
        PREFIX, PREFIX.replace("other < ", "other <= "), checks.check_slot_mapping,
        "indexing.cu"),
    "lengths of a warp summed one step short": Mutation(
        "distance = 16;", "distance = 8;", checks.check_slot_mapping, "indexing.cu"),
    "more sequences than lanes not counted": Mutation(
        PREFIX, PREFIX.replace("other < ", "other < 32 && other < "), checks.check_slot_mapping,
        "indexing.cu"),
    "no padding": Mutation(PADDING, "", checks.check_slot_mapping, "indexing.cu"),
    "padding from where the last sequence begins": Mutation(
        PADDING, PADDING.replace(" + appended", ""), checks.check_slot_mapping, "indexing.cu"),
    "slots of the tokens before": Mutation(
        "- max(append_len, i64{0});", "- 2 * max(append_len, i64{0});", checks.check_slot_mapping,
        "indexing.cu"),
}  # fmt: skip

SHORT, LONG = checks.check_transfer, checks.check_transfer_of_long_rows
CONVERTS = checks.check_transfer_converts
ROWS = "transfer_rows.cuh"
K_FROM = "p.src_k + offset_of(p.src_k_strides, src, at) + skipped"
DST = (
    "  const i64 dst = load_index(dst_pages + position * rows.dst_stride_bytes, "
    "rows.dst_index_bytes);"
)
TRANSFER_FAULT = "if (reports && within == 0 && rows.src_operation >= 0) {"


def changed_page(where: str, page: int) -> str:
    """The target of a transfer, another one where it should be skipped."""
    return f"{DST.replace('const ', '')}\n  if ({where}) dst = {page};"


TRANSFER = {
    "K of a transfer by the strides of V": Mutation(
        K_FROM, K_FROM.replace("src_k_strides", "src_v_strides"), SHORT, "transfer.cu"),
    "K of a transfer to where V belongs": Mutation(
        "k_to[r] = p.dst_k + offset_of(p.dst_k_strides", "k_to[r] = p.dst_k + offset_of("
        "p.dst_v_strides", SHORT, "transfer.cu"),
    "the piece of a row forgotten": Mutation(
        "i64{at.piece} * p.piece_words * kWordBytes", "0", LONG, "transfer.cu"),
    "only whole pieces": Mutation(
        "left < piece_words ? left : piece_words", "left < piece_words ? 0 : piece_words", LONG,
        "transfer.cu"),
    "pieces of a transfer left out": Mutation(
        "first += groups * kRows", "first += groups * (kRows + 1)", SHORT, "transfer.cu"),
    "the second row of a thread twice": Mutation(
        "first + r * groups", "first + (r / 2) * groups", SHORT, "transfer.cu"),
    "words of a transfer left out": Mutation(
        "const int w = word + i % kWords * lanes;\n        if (w < k_words[r]) store",
        "const int w = word + i % kWords * lanes;\n        if (w + 1 < k_words[r]) store", SHORT,
        "transfer.cu"),
    "the third axis of a transfer forgotten": Mutation(
        "at.axis_2 = rest - at.axis_1 * rows.rows_2.divisor;", "", SHORT, ROWS),
    "the wrong page list": Mutation(
        DST, DST.replace("dst_pages", "src_pages"), SHORT, ROWS),
    "transfers onto negative pages": Mutation(
        DST, changed_page("dst < 0", 11), SHORT, ROWS),
    "transfers onto the page past the end": Mutation(
        DST, changed_page("dst >= rows.dst_num_pages", 11), SHORT, ROWS),
    "pages past the end of a transfer not reported": Mutation(
        TRANSFER_FAULT, TRANSFER_FAULT.replace("reports", "false"), SHORT, ROWS),
    "pages past the end of a transfer reported by every row": Mutation(
        TRANSFER_FAULT, TRANSFER_FAULT.replace("within == 0", "true"), SHORT, ROWS),
    "pages past the end of a transfer reported for scales too": Mutation(
        " && rows.src_operation >= 0) {", ") {", SHORT, ROWS),
    "heads and offsets of a transfer swapped": Mutation(
        "at.axis_1 * s.axis_bytes_1 +\n         at.axis_2 * s.axis_bytes_2",
        "at.axis_2 * s.axis_bytes_1 +\n         at.axis_1 * s.axis_bytes_2", SHORT, ROWS),
    "a scale of the neighbouring row": Mutation(
        "p.dst_k_scale + offset_of(p.dst_k_scale_strides, dst, at)", "p.dst_k_scale + "
        "offset_of(p.dst_k_scale_strides, dst, {0, 0, at.axis_0, at.axis_1, at.axis_2 ^ 1, 0})",
        CONVERTS, "transfer.cu"),
    "scales of the source ignored": Mutation(
        "width && from_scale ?", "false ?", CONVERTS, "transfer.cu"),
    "scales of the target not kept": Mutation(
        "if (lane == 0 && width) *reinterpret_cast<float*>(to_scale) = scale;", "", CONVERTS,
        "transfer.cu"),
    "the largest of one lane only": Mutation(
        "max_within_warp(largest.value(), lanes)", "max_within_warp(largest.value(), lanes / 2)",
        CONVERTS, "transfer.cu"),
    "rows of one group a warp": Mutation(
        "first + of_warp, lane == 0", "first, lane == 0", CONVERTS, "transfer.cu"),
    "a last lane without work": Mutation(
        "for (int i = lane * kCount; i < width; i += lanes * kCount) {\n    Pack<TIn, kCount> in;\n"
        "    // Load", "for (int i = lane * kCount; i + kCount < width; i += lanes * kCount) {\n"
        "    Pack<TIn, kCount> in;\n    // Load", CONVERTS, "transfer.cu"),
}  # fmt: skip

DECODE, APPEND = attention_checks.check_attention_decode, attention_checks.check_attention_append
LONG_DECODE = attention_checks.check_attention_long_decode
MASKS = attention_checks.check_attention_append_masks
CAUSAL = "p.causal && key > position"
WINDOW = "!p.window || key > position - p.window || key < p.sink_keys"
SHARED, TURNS = "attention.cuh", "attention_rope.cuh"
PLACES, TREES = attention_checks.check_attention_places, attention_checks.check_attention_trees
TURN_IN_TILES = attention_checks.check_attention_append_turns
WEIGHT = "logits[r][n] == -kInfinity ? 0.0f : exp2f("
SLOT = "const i64 slot = page * p.page_size + offset;"

ATTENTION = {
    "the head of a neighbouring group": Mutation(
        "const i64 head = i64{kv_head} * p.group + packed % p.group;\n    const char* row",
        "const i64 head = i64{kv_head ^ 1} * p.group + packed % p.group;\n    const char* row",
        DECODE, "attention.cu"),
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
        "p.cap_scale * tanhf(score / p.soft_cap)", "p.soft_cap * tanhf(score / p.soft_cap)", MASKS,
        SHARED),
    "learned sinks bring nothing": Mutation(
        "if (sink != -kInfinity) {", "if (false) {", MASKS, "attention_end.cuh"),
    "the sum not rescaled": Mutation("    sum[r] *= rescale;\n", "", LONG_DECODE, "attention.cu"),
    "the values not rescaled": Mutation(
        "values[r][s].values[j] *= rescale;", "values[r][s].values[j] *= 1.0f;", LONG_DECODE,
        "attention.cu"),
    "groups merged without their tops": Mutation(
        "if (top != -kInfinity) sum += sums[g * kRows + r] * exp2f(top - largest);",
        "if (top != -kInfinity) sum += sums[g * kRows + r];", DECODE, "attention.cu"),
    "no barrier before groups are merged": Mutation(
        "  __syncthreads();\n  for (int r = 0; r < t.num_rows; ++r) {",
        "  for (int r = 0; r < t.num_rows; ++r) {", DECODE, "attention.cu"),
    "keys of a split left out": Mutation(
        "first += groups * kKeys", "first += groups * kKeys + 1", LONG_DECODE, "attention.cu"),
    "splits that begin alike": Mutation(
        "const i64 begin = split * a_split;", "const i64 begin = 0;", LONG_DECODE, "attention.cu"),
    "what is not seen weighs in": Mutation(
        WEIGHT, "logits[r][n] < -3e38f ? 1.0f : exp2f(", APPEND, "attention.cu"),
    "dynamic scales by the offset in the page": Mutation(
        SLOT, SLOT.replace("page * p.page_size + ", ""),
        attention_checks.check_attention_decode_int8, "attention.cu"),
    "the scale of K for V in attention": Mutation(
        "weights[r] *= v_scales[n];", "weights[r] *= k_scales[n];",
        attention_checks.check_attention_decode_int8, "attention.cu"),
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
        attention_checks.check_attention_shared_keys, SHARED),
    "queries of no position see what a window leaves": Mutation(
        "return p.causal || p.window ||", "return p.causal ||",
        attention_checks.check_attention_shared_keys, SHARED),
    "a hole that begins one key later": Mutation(
        "|| key < count_of(", "|| key <= count_of(", PLACES, SHARED),
    "no holes on tensor cores": Mutation(
        "const i64 place = place_of(p, t, key);", "const i64 place = key;",
        attention_checks.check_attention_append_places, "attention_prefill.cuh"),
    "lengths past the table but for their holes": Mutation(
        "most - count_of(p.holes, p.evicted_len_bytes, t.sequence);", "most;",
        attention_checks.check_attention_hole_at_the_end, SHARED),
    "keys left to others seen": Mutation(
        "t.first_key = start < end ? start : end;", "t.first_key = 0;", PLACES, SHARED),
    "first keys kept though they are left to others": Mutation(
        ": t.first_key) - start;", ": t.first_key);", PLACES, SHARED),
    "first keys from the first on": Mutation(
        "i < t.sinks ? i + key_start(p, t)", "i < t.sinks ? i", PLACES, SHARED),
    "trees of new tokens alone": Mutation(
        "p.tree_lens ? count_of(", "false ? count_of(", TREES, SHARED),
    "nodes turn by their places": Mutation("if (p.tail_positions &&", "if (false &&", TREES, TURNS),
    "one more position than there are columns": Mutation(
        "column < p.tail_columns", "column <= p.tail_columns", TREES, TURNS),
    "positions past the table turn by what lies there": Mutation(
        "position < last ? position : last", "position", TREES, TURNS),
    "negative positions turn by what lies there": Mutation(
        "position < 0 ? 0 : ", "", TREES, TURNS),
    "keys turn backwards": Mutation(
        "fmaf(own, angles[pair], first ? -other : other)", "fmaf(own, angles[pair], first ? other "
        ": -other)", attention_checks.check_attention_turns, TURNS),
    "half of a key turned wrongly": Mutation(
        "fmaf(own.values[j], cosines.values[j], first ? -other : other)",
        "fmaf(own.values[j], cosines.values[j], -other)",
        attention_checks.check_attention_packs_turn, TURNS),
    "neighbours that are themselves": Mutation(
        "p.rotary_start + (at ^ 1)", "p.rotary_start + at",
        attention_checks.check_attention_neighbours_turn, TURNS),
    "halves next to each other": Mutation(
        "i + p.rotary_dim / 2 : i - p.rotary_dim / 2", "i + 8 : i - 8",
        attention_checks.check_attention_packs_turn, TURNS),
    "angles of the first half for all": Mutation(
        "const int pair = first ? at : at - half;\n  Pack", "const int pair = at % 8;\n  Pack",
        attention_checks.check_attention_packs_turn, TURNS),
    "angles of other neighbours": Mutation(
        "angles + half + at / 2", "angles + half + (at / 2 ^ 4)",
        attention_checks.check_attention_packs_of_neighbours_turn, TURNS),
    "what turns begins with the row": Mutation(
        "const int at = i - p.rotary_start;\n  const int half = p.rotary_dim / 2;\n"
        "  if (at < 0 || at >= p.rotary_dim) return own;\n  Pack",
        "const int at = i;\n  const int half = p.rotary_dim / 2;\n"
        "  if (at < 0 || at >= p.rotary_dim) return own;\n  Pack",
        attention_checks.check_attention_packs_turn, TURNS),
    "no barrier after keys have turned": Mutation(
        "__syncthreads();  // all have turned", "",
        attention_checks.check_attention_append_turns_in_any_order, "attention_prefill.cu"),
    "keys of a tile left as they are": Mutation(
        "turn_keys<T, kWidth>(p, keys, table);", "", TURN_IN_TILES, "attention_prefill.cu"),
    "the next chunk for the other half": Mutation(
        "first + half / 8 + pack", "first + 1 + pack", TURN_IN_TILES, "attention_prefill.cuh"),
    "angles of the first chunk for all": Mutation(
        "angles + half + pack * 8", "angles + half", TURN_IN_TILES, "attention_prefill.cuh"),
    "angles of the first neighbours for all": Mutation(
        "angles + half + pack * 4", "angles + half",
        attention_checks.check_attention_append_neighbours_turn, "attention_prefill.cuh"),
    "float32 written as if it had 16 bits": Mutation(
        "p.partial_out || p.out_format == 0", "p.partial_out", TURN_IN_TILES,
        "attention_prefill.cu"),
    "states merged as if alike": Mutation(
        "power(lse[i] - origin, p.base_two)", "1.0f", attention_checks.check_merge_two, "merge.cu"),
    "natural logarithms taken for binary": Mutation(
        "return base_two ? exp2f(exponent) : expf(exponent);", "return exp2f(exponent);",
        attention_checks.check_merge_two, "merge.cu"),
    "states past the eighth forgotten": Mutation(
        "exists ? *reinterpret_cast<const float*>(rows.at(first + i))",
        "exists && first + i < 4 ? *reinterpret_cast<const float*>(rows.at(first + i))",
        attention_checks.check_merge_many, "merge.cu"),
}  # fmt: skip

MUTATIONS = STORE | ROPE | OTHERS | TRANSFER | ATTENTION


@pytest.mark.parametrize("check", checks.CHECKS + attention_checks.CHECKS)
def test_kernels_as_they_are(kernel_sources, check):
    """The control of the test below."""
    check(kernel_sources.device())


@pytest.mark.parametrize("check", checks.CHECKS + attention_checks.CHECKS)
def test_kernels_as_users_run_them(kernel_sources, lenient_host, check):
    """Likewise where the host device is not strict: wider words, and vector code of its own."""
    check(kernel_sources.device())


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_kernel_is_noticed(kernel_sources, mutation):
    broken = MUTATIONS[mutation]
    if broken.file is None:
        kernel_sources.replace_everywhere(broken.old, broken.new)
    else:
        kernel_sources.replace(broken.file, broken.old, broken.new)
    for file, old, new in broken.more:
        kernel_sources.replace(file, old, new)
    noticed = AssertionError, pytest.fail.Exception, kv.IndexFault, kv.DeviceError  # if strict
    with pytest.raises(noticed):
        broken.check(kernel_sources.device())
