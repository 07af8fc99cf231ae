"""Kernels that are broken in one place are noticed by the checks of the operations.

The mutants are made by general operators (`mutants.py`), a sample of each file: two of them, with
`--full` more. One that no check can notice is listed below with the reason.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import attention_checks as attention
import four_bit_checks as four_bit
import operation_checks as operations
import pytest
import test_indexing
from mutants import STRICT, USERS, Build, Mutant, Runner, mutants
from schedule_checks import check_attention_schedule
from valid_calls import check_case, checks_of, name_check

STORES = (*checks_of("store_kv", "store_mla"), *checks_of("store_kv", layout="wider rows"))
GATHERS = (
    *checks_of("gather_kv"),
    operations.check_gather_allocated, partial(operations.check_gather_allocated, source="int8"),
)  # fmt: skip
ROPES = (*checks_of("apply_rope", "rope_store_kv"), operations.check_rope_store_mla)
TRANSFERS = (
    operations.check_transfer, operations.check_transfer_by_copies,
    operations.check_transfer_of_a_few_short_rows,
    operations.check_transfer_of_long_rows, operations.check_transfer_converts,
    operations.check_transfer_converts_wide_rows,
)  # fmt: skip
SHIFTS = (
    *checks_of("shift_pages"), operations.check_shift_with_scales,
    partial(operations.check_shift, fmt="nvfp4"),
    partial(operations.check_shift_of_latents, fmt="int4+hadamard"),
)  # fmt: skip
FOUR_BIT_STORES = (
    four_bit.check_store,
    partial(four_bit.check_store, fmt="mxfp4", source="bf16"),
    partial(four_bit.check_store, fmt="int4"),
    four_bit.check_narrow,
    four_bit.check_scale_rule,
    four_bit.check_rotated_blocks,
    four_bit.check_long_rotated_rows,
)
FOUR_BIT_GATHERS = (
    four_bit.check_gather,
    partial(four_bit.check_gather, fmt="mxfp4"),
    partial(four_bit.check_gather, fmt="int4"),
    partial(operations.check_gather_allocated, source="nvfp4"),
    four_bit.check_narrow,
    four_bit.check_rotated_blocks,
    four_bit.check_long_rotated_rows,
)
FOUR_BIT_TRANSFERS = (
    four_bit.check_transfer,
    *(
        partial(four_bit.check_transfer, src=src, dst=dst, widths=widths)
        for src, dst, widths in (
            ("fp16", "int4", (128, 128)), ("mxfp4", "int8", (64, 32)),
            ("mxfp4", "int8", (1056, 544)), ("mxfp4", "fp32", (64, 32)),
            ("fp16", "nvfp4+hadamard", (128, 192)), ("nvfp4+hadamard", "fp32", (128, 192)),
            ("mxfp4+hadamard", "int8", (128, 1152)),
            ("nvfp4+hadamard", "mxfp4+hadamard", (128, 192)),
        )
    ),
    partial(four_bit.check_transfer, src="mxfp4", dst="int8", widths=(64, 32), scales=False),
    four_bit.check_transfer_of_latents,
)  # fmt: skip
FOUR_BIT_ROPES = (
    four_bit.check_rope, partial(four_bit.check_rope, v_width=1024), four_bit.check_rotated_rope,
)  # fmt: skip
FOUR_BIT_ATTENTION = (
    four_bit.check_attention,
    partial(four_bit.check_attention, cache_fmt="mxfp4", widths=(128, 128)),
    partial(four_bit.check_attention, cache_fmt="int4"),
    partial(four_bit.check_attention, cache_fmt="int4", widths=(128, 128)),
    partial(four_bit.check_attention, widths=(128, 128), rope=True),
    partial(four_bit.check_attention, cache_fmt="int4", widths=(128, 128), rope=True),
    partial(four_bit.check_attention, widths=(128, 128), rope=True, interleaved=True),
    four_bit.check_attention_large_values,
    four_bit.check_attention_rising_exponents,
    partial(four_bit.check_attention, widths=(192, 128), stored_rotated=True),
    partial(four_bit.check_attention, widths=(256, 256), stored_rotated=True),
    partial(four_bit.check_attention, stored_rotated=True),
    four_bit.check_attention_loud,
    four_bit.check_attention_latents,
)
FOUR_BIT_PLAIN_ATTENTION = (
    partial(four_bit.check_attention, fmt="fp32", widths=(64, 96)),
    partial(four_bit.check_attention, cache_fmt="int4", fmt="fp32", widths=(128, 128), rope=True),
    partial(four_bit.check_attention, fmt="fp32", widths=(96, 128), stored_rotated=True),
    partial(four_bit.check_attention_latents, latent=512),
)
PLAIN_ATTENTION = (
    attention.check_attention_decode, attention.check_attention_append,
    attention.check_attention_long_decode, attention.check_attention_decode_int8_plain,
    attention.check_attention_append_masks, attention.check_attention_evicted_spans,
    attention.check_attention_evicted_span_at_the_end, attention.check_attention_trees,
    attention.check_attention_shared_keys, attention.check_attention_rotated_keys,
    attention.check_attention_interleaved, attention.check_attention_rotated_packs,
    attention.check_attention_interleaved_packs, attention.check_attention_faults,
    attention.check_attention_full_table,
    attention.check_attention_append_faults,
)  # fmt: skip
DECODES = (
    attention.check_attention_decode_bf16, attention.check_attention_long_decode_fp16,
    attention.check_attention_long_decode_fp8, attention.check_attention_decode_int8,
    attention.check_attention_decode_rising_scales, attention.check_attention_decode_fp8,
    attention.check_attention_decode_masks_fp16, attention.check_attention_append_whole_tiles,
    attention.check_attention_evicted_spans_fp16, attention.check_attention_small_trees_bf16,
    attention.check_attention_decode_tree, attention.check_attention_kept_keys_in_order,
    attention.check_attention_rotated_keys_fp16, attention.check_attention_rotated_bytes,
    attention.check_attention_interleaved_bytes, attention.check_attention_faults_fp16,
    attention.check_attention_decode_heads_first,
)  # fmt: skip
LATENTS = (
    attention.check_attention_latent, attention.check_attention_latent_fp8,
    attention.check_attention_latent_nvfp4, attention.check_attention_latent_mxfp4,
    attention.check_attention_latent_int4,
    attention.check_attention_wide_rows, attention.check_attention_wide_rows_mxfp4,
)  # fmt: skip
HEADS = (
    attention.check_attention_heads, attention.check_attention_heads_fp8,
    attention.check_attention_heads_wide_rows, attention.check_attention_heads_bits,
)  # fmt: skip
PREFILLS = (
    attention.check_attention_append_bf16, attention.check_attention_append_long,
    attention.check_attention_append_in_large_tiles,
    attention.check_attention_append_masks_bf16, attention.check_attention_append_places,
    attention.check_attention_shared_keys_fp16, attention.check_attention_trees_fp16,
    attention.check_attention_append_rotated_keys, attention.check_attention_append_interleaved,
    attention.check_attention_append_quantised,
)  # fmt: skip
QUANTISED_PREFILLS = (
    attention.check_attention_prefill_of_8_bits, attention.check_attention_prefill_of_4_bits,
)  # fmt: skip
SLOTS = (
    *checks_of("slot_mapping"),
    *(
        partial(test_indexing.test_garbage_lengths_never_write_past_the_output, name=name)
        for name in test_indexing.GARBAGE
    ),
)
PART_MERGES = (
    attention.check_merge_parts, attention.check_merge_parts_in_two_steps,
    attention.check_merge_parts_of_any_strides, attention.check_attention_decode_bf16,
)  # fmt: skip
MERGES = (attention.check_merge_two, *checks_of("merge_states"), attention.check_merge_many)
USERS_ATTENTION = (
    attention.check_few_rows, attention.check_many_rows, attention.check_few_rows_beside_many,
    attention.check_heads_that_are_taken_together, attention.check_no_keys_of_a_tile,
    partial(attention.check_values_that_are_no_numbers, query_lens=(40, 33)),
    attention.check_values_that_are_no_numbers, attention.check_scores_that_are_no_numbers,
    attention.check_attention_decode_int8, attention.check_four_bits,
    attention.check_rotated_four_bits, attention.check_stored_rotated,
)  # fmt: skip

FP8_ATTENTION = (
    attention.check_attention_visible_nan, attention.check_attention_long_decode_fp8,
    attention.check_attention_decode_fp8, attention.check_attention_heads_fp8,
)  # fmt: skip

CHECKS = {
    "attention.cu": PLAIN_ATTENTION + FOUR_BIT_PLAIN_ATTENTION,
    "attention.cuh": PLAIN_ATTENTION + DECODES + PREFILLS,
    "attention_decode_four_bit.cuh": FOUR_BIT_ATTENTION,
    "attention_decode_heads.cu": HEADS,
    "attention_decode_latent.cu": LATENTS,
    "attention_decode_mma.cu": DECODES + FOUR_BIT_ATTENTION,
    "attention_decode_mma.cuh": DECODES + LATENTS + HEADS,
    "attention_merge.cuh": PART_MERGES,
    "attention_end.cuh": PLAIN_ATTENTION + DECODES[:7] + PREFILLS,
    "attention_dequantise.cuh": QUANTISED_PREFILLS,
    "attention_prefill.cu": PREFILLS + QUANTISED_PREFILLS,
    "attention_prefill.cuh": PREFILLS + QUANTISED_PREFILLS,
    "attention_rope.cuh": PLAIN_ATTENTION[7:13] + DECODES[-5:] + PREFILLS[-4:],
    "attention_schedule.cu": (check_attention_schedule, *PLAIN_ATTENTION),
    "attention_rows.cuh": FOUR_BIT_PLAIN_ATTENTION + PLAIN_ATTENTION,
    "attention_tiles.cuh": PREFILLS + DECODES,
    "cache_rows.cuh": STORES + GATHERS,
    "common.cuh": STORES + MERGES + ROPES,
    "conv_state.cu": (*checks_of("update_conv_state"), operations.check_conv_state),
    "faults.cu": (operations.check_transfer_by_copies,),
    "four_bit.cuh": FOUR_BIT_STORES + FOUR_BIT_GATHERS + FOUR_BIT_ROPES + FOUR_BIT_TRANSFERS,
    "fp8.cuh": (*STORES, *FP8_ATTENTION, *GATHERS, operations.check_transfer_converts),
    "gather.cu": GATHERS,
    "gather_four_bit.cu": FOUR_BIT_GATHERS,
    "hadamard.cuh": FOUR_BIT_ATTENTION[-5:] + FOUR_BIT_PLAIN_ATTENTION[-2:],
    "index_load.cuh": (*STORES, *checks_of("store_kv", index="int32")),
    "indexing.cu": SLOTS,
    "kv_operand.cuh": GATHERS + STORES,
    "merge.cu": (*MERGES, attention.check_attention_long_append),
    "mma.cuh": FP8_ATTENTION + PREFILLS + FOUR_BIT_ATTENTION[:1],
    "numeric.cuh": STORES + GATHERS + TRANSFERS[3:],
    "pages.cu": checks_of("copy_pages"),
    "rope.cu": ROPES + FOUR_BIT_ROPES,
    "shift.cu": SHIFTS,
    "store.cu": STORES,
    "store_four_bit.cu": FOUR_BIT_STORES,
    "transfer.cu": TRANSFERS + FOUR_BIT_TRANSFERS,
    "transfer_rows.cuh": TRANSFERS,
    "host/attention.h": USERS_ATTENTION,
}
"""The checks of each kernel file: quick ones, and those that notice most, first.

`attention_latent.cuh` is left out: it decides whether values are fetched again, only a matter
of speed.
"""

ARCHS = {"fp8.cuh": 75, "mma.cuh": 75}
"""Files with branches of GPUs, and the one whose branches run; else a processor's do."""

EQUIVALENT = {
    "cache_rows.cuh: if (first_of_token && p.operation >= 0) { -> "
    "if (first_of_token && p.operation > 0) {":
        "No operation has the number 0.",
    "gather.cu: if (i < p.v.width) v.load(v_in + i * kInBytes); -> if (i <= p.v.width) "
    "v.load(v_in + i * kInBytes);":
        "It reads past a row what it does not store.",
    "conv_state.cu: const int kept = appended < p.length ? static_cast<int>(p.length - appended) "
    ": 0; -> const int kept = appended <= p.length ? static_cast<int>(p.length - appended) : 0;":
        "After as many new tokens either way keeps none.",
    "conv_state.cu: if (kept == p.length) return; -> if (false) return;":
        "Without new tokens each input is copied onto itself.",
    "conv_state.cu: for (int first = 0; first < p.length; first += kUnroll) { -> for (int first = "
    "0; first <= p.length; first += kUnroll) {":
        "Each input is compared with the length again.",
    "conv_state.cu: if (j < p.length) in_flight[i] = *reinterpret_cast<const "
    "Word<kWordBytes>*>(from); -> if (j <= p.length) in_flight[i] = *reinterpret_cast<const "
    "Word<kWordBytes>*>(from);":
        "It reads past the inputs what it does not store.",
    "conv_state.cu: if (j < p.length) in_flight[i] = *reinterpret_cast<const "
    "Word<kWordBytes>*>(from); -> if (true) in_flight[i] = *reinterpret_cast<const "
    "Word<kWordBytes>*>(from);":
        "It reads past the inputs what it does not store.",
    "store.cu: if (i < k_width) k.load(k_in + i * kInBytes); -> if (i <= k_width) "
    "k.load(k_in + i * kInBytes);":
        "It reads past a row what it does not store.",
    "gather_four_bit.cu: if (has_v) load_in_group<TFormat>(v_in, at, p.v, v, v_bits); -> "
    "if (true) load_in_group<TFormat>(v_in, at, p.v, v, v_bits);":
        "It reads past a row what it does not store.",
    "gather_four_bit.cu: for (int first = 0; first < operand.width; first += "
    "kElementsAlone) { -> for (int first = 0; first <= operand.width; first += "
    "kElementsAlone) {":
        "A row is whole steps, and after the last nothing is left of it.",
    "four_bit.cuh: } else if (word_bytes == 2) { -> } else if (false) { #2":
        "Single bytes instead of words are slower and the same.",
    "indexing.cu: return page > (kLargest - offset) / page_size ? kLargest : page * "
    "page_size + offset; -> return page >= (kLargest - offset) / page_size ? kLargest : "
    "page * page_size + offset;":
        "Both slots are past the end of every cache.",
    "kv_operand.cuh: if constexpr (kQuantised<TOut>) return "
    "quantise<TOut>(to_floats(in), scale); -> if constexpr (true) return "
    "quantise<TOut>(to_floats(in), scale);":
        "The scale of other formats is 1.",
    "numeric.cuh: if (divisor == kInfinity || divisor == -kInfinity) divisor = 0.0f; -> "
    "if (false) divisor = 0.0f;":
        "A correction with an infinity is NaN, and NaN corrects nothing.",
    "attention_decode_four_bit.cuh: return a.page_bytes == b.page_bytes && "
    "a.offset_bytes == b.offset_bytes && -> return a.page_bytes != b.page_bytes && "
    "a.offset_bytes == b.offset_bytes &&":
        "Arrays are then addressed one by one, which is slower; no caller differs in pages alone.",
    "attention_decode_latent.cu: if (num_tiles > 0) coded.load(table.k[0], p.k); -> if (true) "
    "coded.load(table.k[0], p.k);":
        "Without tiles the first table has no rows.",
    "attention_decode_latent.cu: if (num_tiles > 0) coded.load(table.k[0], p.k); -> if (num_tiles "
    ">= 0) coded.load(table.k[0], p.k);":
        "Without tiles the first table has no rows.",
    "attention_decode_latent.cu: if (number + 1 < num_tiles) coded.load(table.k[(number + 1) % "
    "Shape::kTables], p.k); -> if (number + 1 <= num_tiles) coded.load(table.k[(number + 1) % "
    "Shape::kTables], p.k);":
        "The table past the last has no rows.",
    "attention_decode_latent.cu: if (number + 1 < num_tiles) coded.load(table.k[(number + 1) % "
    "Shape::kTables], p.k); -> if (true) coded.load(table.k[(number + 1) % Shape::kTables], p.k);":
        "The table past the last has no rows.",
    "attention_decode_latent.cu: if (fetches_values) { -> if (true) {":
        "Values that are part of the keys are fetched again.",
    "attention_decode_latent.cu: if (!row || sixteen * 16 >= operand.width) return; -> if (!row || "
    "sixteen * 16 > operand.width) return;":
        "It reads past a row what meets zeros of a query, and is not stored.",
    "attention_decode_latent.cu: if (sixteen % 2 == 0) { -> if (sixteen % 2 != 0) {":
        "Either sixteen of a chunk has its scale.",
    "attention_merge.cuh: int most = min(kMostMerged, kMergedBytes / (t.num_rows * p.v.width * "
    "4)); -> int most = (kMergedBytes / (t.num_rows * p.v.width * 4));":
        "Shared memory has room for more parts of such few elements.",
    "attention_merge.cuh: for (most = 1; most * most < parts;) ++most; -> for (most = 1; "
    "most * most <= parts;) ++most;":
        "Groups may be larger.",
    "attention_merge.cuh: if (parts > most) { -> if (true) {":
        "Few parts may be merged twice.",
    "attention_merge.cuh: if (count > 1) merge_group(p, t, kv_head, thread, {state, step, count}, "
    "is_all); -> if (count >= 1) merge_group(p, t, kv_head, thread, {state, step, count}, is_all);":
        "A part alone is merged to itself.",
    "attention_merge.cuh: const int nth = min(part + j, group.count - 1); -> const int nth = "
    "(part + j);":
        "It reads past the parts what it does not add.",
    "merge.cu: if (first > 0) __syncthreads(); -> if (true) __syncthreads();":
        "It waits once more.",
    "attention_tiles.cuh: const int permuted = kRowBytes % 128 == 0 ? chunk ^ (row & 7) -> "
    "const int permuted = kRowBytes % 129 == 0 ? chunk ^ (row & 7)":
        "Chunks lie elsewhere for all who read and write them; banks conflict.",
    "host/attention.h: } else if (!p.key_block && t.num_rows <= kFewRows) { -> } else if "
    "(!p.key_block && t.num_rows < kFewRows) {":
        "It chooses how a tile of few rows is computed.",
    "host/attention.h: if (rescale[i] == 1.0f) continue; -> if (false) continue;":
        "Values times 1 are the same.",
    "host/attention.h: this->fetch_k(block, place.key, first_head + place.head); -> "
    "this->fetch_k(block, place.key, first_head - place.head);":
        "What is fetched early is only a matter of speed.",
    "host/attention.h: if constexpr (kFourBit<TCache>) return width / 2; -> if constexpr "
    "(kFourBit<TCache>) return width / 3;":
        "So is how much of it.",
    "host/attention.h: if constexpr (kMost > 2 && kProductRows > 2) { -> if constexpr (true) {":
        "It chooses how many rows are multiplied at once.",
    "transfer.cu: if (p.dst_v_scale && p.v_width) scales[1] = v_scale_to[r]; -> if (true) "
    "scales[1] = v_scale_to[r];":
        "Without scales of V its address is null.",
    "mma.cuh: constexpr bool kTuring = kArch != 0 && kArch < 800; -> constexpr bool "
    "kTuring = kArch != 0 && kArch <= 800;":
        "It differs on sm_80 alone.",
    "mma.cuh: if constexpr (!kCopiesAreAsync) { -> if constexpr (false) {":
        "On a processor either copy is one of bytes.",
}  # fmt: skip
"""By the name of a mutant that no check can notice, the reason."""


def mutants_of(file: str) -> list[Mutant]:
    if file.startswith("host/"):
        return mutants(file, {"KVCUPY_HOST_VARIANTS": 1})
    return mutants(file, {"KVCUPY_STRICT": 1, "KVCUPY_ARCH": 10 * ARCHS.get(file, 0)})


def runner_of(file: str, folder: Path) -> Runner:
    builds = USERS if file.startswith("host/") else STRICT
    if file in ARCHS:
        builds = (Build(True, 32, (f"-DKVCUPY_ARCH={10 * ARCHS[file]}",)), *builds, *USERS)
    return Runner(folder, CHECKS[file], builds)


@pytest.mark.usefixtures("kernel_sources")  # broken on purpose: not for sanitizers
@pytest.mark.parametrize("file", CHECKS)
def test_mutants_are_noticed(request, tmp_path, file):
    count = 4 if request.config.option.full else 2
    candidates = [m for m in mutants_of(file) if m.name not in EQUIVALENT]
    compiled = runner_of(file, tmp_path).compiled(candidates, count)
    assert [m.name for m, noticed in compiled if not noticed] == []


def test_listed_mutants_exist():
    assert set(EQUIVALENT) <= {m.name for file in CHECKS for m in mutants_of(file)}


ALL = dict.fromkeys(
    check for checks in CHECKS.values() for check in checks
    if getattr(check, "func", None) is not check_case  # which `test_every_operation` runs
)  # fmt: skip


@pytest.mark.parametrize("check", ALL, ids=name_check)
def test_kernels_as_they_are(kernel_sources, check):
    check(kernel_sources.device())


@pytest.mark.parametrize("check", ALL, ids=name_check)
def test_kernels_as_users_run_them(kernel_sources, lenient_host, check):
    """Likewise where it is not strict, and one thread has a row, with its own vector code."""
    device = kernel_sources.device()
    device.warp_lanes = 1
    check(device)
