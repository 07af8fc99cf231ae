"""Kernels that are broken in one place are noticed by the checks of the operations.

The mutants are made by general operators (`mutants.py`), a sample of each file: one of them, with
`--full` four. One that no check can notice is listed below with the reason.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import kernel_checks as checks
import pytest
import test_indexing
from kernel_checks import attention
from mutants import STRICT, USERS, Build, Mutant, Runner, mutants
from schedule_checks import check_attention_schedule
from valid_calls import check_case, checks_of, name_check


def each_of(check, *options):
    return tuple(partial(check, **each) for each in options)


STORES = (*checks_of("store_kv", "store_mla"), *checks_of("store_kv", layout="wider rows"))
GATHERS = (*checks_of("gather_kv"), *each_of(checks.check_gather_allocated, {}, {"source": "int8"}))
ROPES = (*checks_of("apply_rope", "rope_store_kv"), checks.check_rope_store_mla)
SHIFTS = (
    *checks_of("shift_pages"), checks.check_shift_with_scales,
    partial(checks.check_shift, fmt="nvfp4"),
    partial(checks.check_shift_of_latents, fmt="int4+hadamard"),
)  # fmt: skip
FOUR_BIT_ROWS = (
    checks.check_narrow, checks.check_rotated_blocks, checks.check_long_rotated_rows
)  # fmt: skip
FOUR_BIT_STORES = (
    *each_of(
        checks.check_store, {}, {"fmt": "mxfp4", "source": "bf16"}, {"fmt": "int4"}),
    *FOUR_BIT_ROWS, checks.check_scale_rule,
)  # fmt: skip
FOUR_BIT_GATHERS = (
    *each_of(checks.check_gather, {}, {"fmt": "mxfp4"}, {"fmt": "int4"}),
    partial(checks.check_gather_allocated, source="nvfp4"), *FOUR_BIT_ROWS,
)  # fmt: skip
FOUR_BIT_TRANSFERS = (
    checks.check_transfer_of_four_bits,
    *each_of(checks.check_transfer_of_four_bits, *(
        {"src": src, "dst": dst, "widths": widths}
        for src, dst, widths in (
            ("fp16", "int4", (128, 128)), ("mxfp4", "int8", (64, 32)),
            ("mxfp4", "int8", (1056, 544)), ("mxfp4", "fp32", (64, 32)),
            ("fp16", "nvfp4+hadamard", (128, 192)), ("nvfp4+hadamard", "fp32", (128, 192)),
            ("mxfp4+hadamard", "int8", (128, 1152)),
            ("nvfp4+hadamard", "mxfp4+hadamard", (128, 192)),
        )
    ), {"src": "mxfp4", "dst": "int8", "widths": (64, 32), "scales": False}),
    checks.check_transfer_of_latents,
)  # fmt: skip
FOUR_BIT_ROPES = (*each_of(checks.check_rope, {}, {"v_width": 1024}), checks.check_rotated_rope)
STORED_ROTATED = attention(
    "nvfp4, 192, 128, stored rotated", "nvfp4, 256, 256, stored rotated",
    "nvfp4, 128, 64, stored rotated", "loud queries, stored rotated",
    "latents of 128, stored rotated",
)  # fmt: skip
FOUR_BIT_ATTENTION = (
    *attention(
        "nvfp4, 128, 64", "mxfp4, 128, 128", "int4, 128, 64", "int4, 128, 128",
        "nvfp4, rotated keys", "int4, rotated keys", "nvfp4, rotated keys, interleaved",
        "large values of int4", "exponents of mxfp4 that rise",
    ),
    *STORED_ROTATED,
)  # fmt: skip
PLAIN_STORED_ROTATED = attention("fp32, nvfp4, stored rotated", "latents of 512, stored rotated")
FOUR_BIT_PLAIN_ATTENTION = (
    *attention("fp32, nvfp4", "fp32, int4, rotated keys"), *PLAIN_STORED_ROTATED
)  # fmt: skip
PLAIN_ROTATED_KEYS = attention(
    "rotated keys, fp32", "rotated keys, fp32, interleaved", "rotated keys, int8",
    "rotated keys, int8, interleaved",
)  # fmt: skip
PLAIN_ATTENTION = (
    *attention(
        "decode", "append, fp32", "long decode", "decode, fp32, int8", "append, masks",
        "evicted spans", "an evicted span at the end", "trees", "shared keys",
    ),
    *PLAIN_ROTATED_KEYS, checks.check_faults, *attention("a full table"),
    partial(checks.check_faults, new=checks.NEW),
)  # fmt: skip
DECODE_ROTATED_KEYS = attention("rotated keys, fp16", "rotated bytes", "rotated bytes, interleaved")
DECODES = (
    *attention(
        "decode, bf16", "long decode, fp16", "long decode, fp8", "decode, int8",
        "decode, scales that rise", "decode, fp8", "decode, masks", "append, whole tiles",
        "evicted spans, fp16", "small trees",
    ),
    checks.check_decode_tree, checks.check_kept_keys_in_order, *DECODE_ROTATED_KEYS,
    partial(checks.check_faults, fmt="fp16"), *attention("decode, HND, combined"),
)  # fmt: skip
LATENTS = attention(
    "latents", "latents, fp8", "latents, nvfp4", "latents, mxfp4", "latents, int4", "wide rows",
    "wide rows, mxfp4",
)  # fmt: skip
HEADS = attention("heads", "heads, fp8", "heads, wide rows", "heads, bits")
PREFILL_ROTATED_KEYS = attention(
    "trees, fp16", "append, rotated keys", "append, rotated keys, interleaved"
)
PREFILLS = (
    *attention("append, bf16", "append, long"), checks.check_large_tiles,
    *attention("append, masks, bf16", "append, evicted spans", "shared keys, fp16"),
    *PREFILL_ROTATED_KEYS, *attention("append, quantised"),
)  # fmt: skip
QUANTISED_PREFILLS = attention("prefill of 8 bits", "prefill of 4 bits")
SLOTS = (
    *checks_of("slot_mapping"),
    *each_of(
        test_indexing.test_garbage_lengths_never_write_past_the_output,
        *({"name": name} for name in test_indexing.GARBAGE),
    ),
)
PART_MERGES = (
    checks.check_merge_parts, checks.check_merge_parts_of_any_strides, *attention("decode, bf16")
)  # fmt: skip
MERGES = (checks.check_merge_two, *checks_of("merge_states"), checks.check_merge_many)
USERS_ATTENTION = (
    *attention(
        "few rows", "many rows", "few rows beside many", "heads that are taken together",
        "no keys of a tile",
    ),
    *each_of(checks.check_no_number_in_v, {"query_lens": (40, 33)}, {}),
    checks.check_no_number_in_k,
    *attention("decode, int8", "four bits", "rotated four bits", "stored rotated"),
)  # fmt: skip
FP8_ATTENTION = (
    checks.check_visible_nan, *attention("long decode, fp8", "decode, fp8", "heads, fp8")
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
    "attention_rope.cuh": PLAIN_ROTATED_KEYS + DECODE_ROTATED_KEYS + PREFILL_ROTATED_KEYS,
    "attention_schedule.cu": (check_attention_schedule, *PLAIN_ATTENTION),
    "attention_rows.cuh": FOUR_BIT_PLAIN_ATTENTION + PLAIN_ATTENTION,
    "attention_tiles.cuh": PREFILLS + DECODES,
    "cache_rows.cuh": STORES + GATHERS,
    "common.cuh": STORES + MERGES + ROPES,
    "conv_state.cu": (*checks_of("update_conv_state"), checks.check_conv_state),
    "faults.cu": (checks.check_transfer_by_copies,),
    "four_bit.cuh": FOUR_BIT_STORES + FOUR_BIT_GATHERS + FOUR_BIT_ROPES + FOUR_BIT_TRANSFERS,
    "fp8.cuh": (*STORES, *FP8_ATTENTION, *GATHERS, checks.check_transfer_converts),
    "gather.cu": GATHERS,
    "gather_four_bit.cu": FOUR_BIT_GATHERS,
    "hadamard.cuh": STORED_ROTATED + PLAIN_STORED_ROTATED,
    "index_load.cuh": (*STORES, *checks_of("store_kv", index="int32")),
    "indexing.cu": SLOTS,
    "kv_operand.cuh": GATHERS + STORES,
    "merge.cu": MERGES + attention("long append"),
    "mma.cuh": FP8_ATTENTION + PREFILLS + FOUR_BIT_ATTENTION[:1],
    "numeric.cuh": STORES + GATHERS + checks.TRANSFERS[3:],
    "pages.cu": checks_of("copy_pages"),
    "rope.cu": ROPES + FOUR_BIT_ROPES,
    "shift.cu": SHIFTS,
    "store.cu": STORES,
    "store_four_bit.cu": FOUR_BIT_STORES,
    "transfer.cu": checks.TRANSFERS + FOUR_BIT_TRANSFERS,
    "transfer_rows.cuh": checks.TRANSFERS,
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
    count = 4 if request.config.option.full else 1
    candidates = [m for m in mutants_of(file) if m.name not in EQUIVALENT]
    compiled = runner_of(file, tmp_path).compiled(candidates, count)
    assert [m.name for m, noticed in compiled if not noticed] == []


def test_listed_mutants_exist():
    assert set(EQUIVALENT) <= {m.name for file in CHECKS for m in mutants_of(file)}


ALL = {
    name_check(check): check for each in CHECKS.values() for check in each
    if getattr(check, "func", None) is not check_case  # which `test_every_operation` runs
}  # fmt: skip


@pytest.mark.parametrize("check", ALL)
def test_kernels_as_they_are(kernel_sources, check):
    ALL[check](kernel_sources.device())


@pytest.mark.parametrize("check", ALL)
def test_kernels_as_users_run_them(kernel_sources, lenient_host, check):
    """Likewise where it is not strict, and one thread has a row, with its own vector code."""
    device = kernel_sources.device()
    device.warp_lanes = 1
    ALL[check](device)
