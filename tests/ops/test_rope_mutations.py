"""Rotations are checked well enough to notice kernels that are broken in one place."""

from __future__ import annotations

import operation_checks as checks
import pytest
from mutation_cases import Mutation, one_of_each

FIRST = "sum_of_products(a, cosine, negative(b), sine)"
SECOND = "sum_of_products(b, cosine, a, sine)"
ROTATE = "rotate(a, b, cosine, sine, x, y);"


def rotated(first: str = FIRST, second: str = SECOND, rounded: str = "from_floats<T>({})") -> str:
    """What `rotate` comes down to, to be changed."""
    return f"x = {rounded.format(first)};\n    y = {rounded.format(second)};"


POSITION_FAULT = "if (reports) report_fault(p.faults, p.position_operation"
SLOT_FAULT = "if (reports) report_fault(p.faults, p.slot_operation"
COPIES = "const bool copies = live && (live != in || norm);"
CACHED = "if (cached) to_cache<T, TCache>(x, divisor)"
LIVE_KEY = (
    "if (!is_value && p.key_out) {\n"
    "    live = p.key_out + token * p.key_out_token_bytes + head * p.key_out_head_bytes;"
)
SUM = "distance = lanes / 2; distance > {}; distance /= 2) {{\n    value += "
MAX = "distance = lanes / 2; distance > {}; distance /= 2) {{\n    value = fmaxf("

MUTATIONS = {
    "the other sine": Mutation(
        ROTATE, rotated(FIRST.replace("negative(b)", "b")), checks.check_rotation, "rope.cu"),
    "the other sine of the second half": Mutation(
        ROTATE, rotated(second=SECOND.replace(", a,", ", negative(a),")), checks.check_rotation,
        "rope.cu"),
    "cosines of half precision": Mutation(
        ROTATE, rotated(FIRST.replace("cosine", "to_floats(from_floats<::half>(cosine))")),
        checks.check_rotation, "rope.cu"),
    "pairs side by side where they are halves apart": Mutation(
        "p.interleaved", "true", checks.check_rotation, "rope.cu", count=4),
    "pairs halves apart where they are side by side": Mutation(
        "p.interleaved", "false", checks.check_interleaved_rotation, "rope.cu", count=4),
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
        ROTATE, rotated(rounded="from_floats<T>(to_floats(from_floats<::half>({})))"),
        checks.check_rope_store, "rope.cu"),
    "the key quantised before it is rounded": Mutation(
        "  float inverse_rms;\n",
        "  float inverse_rms;\n  mutable Pack<float, kCount> exact_x, exact_y;\n",
        checks.check_rope_store_beside, "rope.cu", (
            ("rope.cu", ROTATE, rotated(f"exact_x = {FIRST}", f"exact_y = {SECOND}")),
            ("rope.cu", "to_cache<T, TCache>(x, divisor), to_cache<T, TCache>(y, divisor)",
             "to_cache<float, TCache>(rotary.exact_x, divisor), "
             "to_cache<float, TCache>(rotary.exact_y, divisor)"),
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
        "largest.add(rotary.pass(i));", "",
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


@pytest.mark.parametrize("name", one_of_each(MUTATIONS))
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)
