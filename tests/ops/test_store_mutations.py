"""Stores are checked well enough to notice kernels that are broken in one place."""

from __future__ import annotations

import operation_checks as checks
import pytest
from mutation_cases import Mutation, one_of_each

BARRIER = "    __syncthreads();\n"
REDUCE = "    for (int i = 0; i < warps; ++i) value = fmaxf(value, scratch[first_warp + i]);\n"
FAULT = "if (slot >= p.num_slots) {"
SKIP = "if (slot == p.skip_slot) slot = -1;"
K_ROW, V_ROW = "cache_row(p.k_cache, p.k, row, p)", "cache_row(p.v_cache, p.v, row, p)"
DIVIDE = "from_floats<T>(quotients(x, scale))"
NAN = "x == x ? static_cast<int8>(code) : int8{0}"
EXACT = "fabsf(exact) > 0.0f ? exact : rough"
TAIL = "first < k_words || first < v_words"

MUTATIONS = {
    "no barrier before the maxima of warps are read": Mutation(
        BARRIER + REDUCE, REDUCE, checks.check_dynamic, "common.cuh"),
    "no barrier after the maxima of warps are read": Mutation(
        REDUCE + BARRIER, REDUCE, checks.check_dynamic, "common.cuh"),
    "the maxima of one warp too few": Mutation(
        "i < warps; ++i", "i + 1 < warps; ++i", checks.check_dynamic, "common.cuh"),
    "half a warp reduced": Mutation(
        "distance = lanes / 2;", "distance = lanes / 4;", checks.check_dynamic, "common.cuh",
        count=2),
    "K by the strides of V": Mutation(
        K_ROW, K_ROW.replace("p.k,", "p.v,"), checks.check_convert,  # narrower: inside the buffer
        "store.cu", count=3),
    "V by the strides of K": Mutation(
        V_ROW, V_ROW.replace("p.v,", "p.k,"), checks.check_copy, "store.cu", count=3),  # likewise
    "the heads of a row forgotten": Mutation(
        " +\n         row.head * operand.cache.head_bytes;", ";", checks.check_convert,
        "cache_rows.cuh"),
    "the end of the wider row forgotten": Mutation(
        TAIL, "first < k_words", checks.check_copy, "cache_rows.cuh"),
    "pages of a power of two only": Mutation(
        "page_shift >= 0 ? slot >> page_shift : slot / page_size",
        "slot >> (page_shift >= 0 ? page_shift : 1)", checks.check_copy_of_odd_pages,
        "common.cuh"),
    "multiply by the reciprocal": Mutation(
        DIVIDE, "from_floats<T>(products(products(x, scale.power), scale.reciprocal))",
        checks.check_convert, "numeric.cuh"),
    "no remainder of a division": Mutation(
        EXACT, "rough", checks.check_convert, "numeric.cuh"),
    "the sign of a zero lost in its division": Mutation(
        EXACT, "exact == exact ? exact : rough", checks.check_convert_to_fp8, "numeric.cuh"),
    "infinities lost in their division": Mutation(
        EXACT, "exact == 0.0f ? rough : exact", checks.check_convert_to_fp8, "numeric.cuh"),
    "round towards zero": Mutation(
        "__fadd_rn(fminf(fmaxf(x, -127.0f), 127.0f), kAligner)",
        "__fadd_rn(truncf(fminf(fmaxf(x, -127.0f), 127.0f)), kAligner)", checks.check_convert,
        "numeric.cuh"),
    "int8 of NaN undecided": Mutation(
        NAN, "static_cast<int8>(code)", checks.check_convert, "numeric.cuh"),
    "no saturation in fp8": Mutation(
        "magnitude < kLimit ? magnitude : I{} + kLimit", "magnitude",
        checks.check_convert_to_fp8, "host/numbers.h"),
    "the second pack of a row the first again": Mutation(
        "return (i * lanes + lane) * kCount;", "return lane * kCount;",
        checks.check_dynamic_of_any_rows, "store.cu"),
    "the first pack of a row without a say in its scale": Mutation(
        "largest.add(packs[i]);", "if (i > 0) largest.add(packs[i]);",
        checks.check_dynamic_of_any_rows, "store.cu"),
    "packs past the end of a row stored": Mutation(
        "if (at >= width) continue;", "", checks.check_dynamic_of_any_rows, "store.cu"),
    "only what lanes hold of a long row": Mutation(
        "if (held) {\n    k_row.load", "if (true) {\n    k_row.load",
        checks.check_dynamic_of_any_rows, "store.cu"),
    "long rows stored as if lanes held them": Mutation(
        "if (held) {\n    k_row.template", "if (true) {\n    k_row.template",
        checks.check_dynamic_of_any_rows, "store.cu"),
    "one lane's maximum of V for a row": Mutation(
        "v_absmax = fmaxf(v_absmax, __shfl_xor_sync(kAllLanes, v_absmax, distance));",
        "__shfl_xor_sync(kAllLanes, v_absmax, distance);", checks.check_dynamic_of_any_rows,
        "store.cu"),
    "no smallest scale": Mutation("1e-6f", "0.0f", checks.check_dynamic, "numeric.cuh"),
    "negative slots count from the end": Mutation(
        FAULT, f"if (slot < 0) slot += p.num_slots;\n  {FAULT}", checks.check_copy,
        "cache_rows.cuh"),
    "slots past the end written": Mutation(
        FAULT, "if (slot > 2 * p.num_slots) {", checks.check_copy, "cache_rows.cuh"),
    "the slot just past the end written": Mutation(
        FAULT, "if (slot > p.num_slots) {", checks.check_copy, "cache_rows.cuh"),
    "slots past the end not reported": Mutation(
        " report_fault(p.faults", " if (false) report_fault(p.faults", checks.check_copy,
        "cache_rows.cuh"),
    "the skipped slot written": Mutation(SKIP, "", checks.check_copy, "cache_rows.cuh"),
}  # fmt: skip


@pytest.mark.parametrize("name", one_of_each(MUTATIONS))
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)
