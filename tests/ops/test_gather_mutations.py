"""Gathers, page copies and slot mappings are checked well enough to notice broken kernels."""

from __future__ import annotations

import operation_checks as checks
import pytest
from mutation_cases import Mutation, one_of_each

NOTHING_TO_DO = "  if (row.slot < 0) return;\n"
PAGE = "p.cache + {} * p.page_bytes"
PADDING = "for (i64 i = before + appended + lane; i < p.num_out; i += kLanes) p.out[i] = -1;"
PREFIX = "for (int other = lane; other < sequence; other += kLanes)"

MUTATIONS = {
    "scales of a gather ignored": Mutation(
        "if constexpr (kQuantised<TCache>)", "if constexpr (false)", checks.check_gather_static,
        "gather.cu"),
    "dynamic scales of a gather ignored": Mutation(
        "return scale_cache ? *scale", "return false ? *scale", checks.check_gather_dynamic,
        "gather.cu"),
    "dynamic scales of a gather by token": Mutation(
        "operand, row.slot, row.head)\n", "operand, row.token, row.head)\n",
        checks.check_gather_dynamic, "gather.cu"),
    "rows of skipped slots gathered": Mutation(
        f"{NOTHING_TO_DO}  const int lanes = 1 << p.lane_shift;\n"
        "  const int lane = threadIdx.x & (lanes - 1);\n  copy_rows",
        "  const int lanes = 1 << p.lane_shift;\n"
        "  const int lane = threadIdx.x & (lanes - 1);\n  copy_rows",
        checks.check_gather, "gather.cu"),
    "K gathered where V belongs": Mutation(
        "outside_row(p.key, p.k, row)", "outside_row(p.value, p.k, row)", checks.check_gather,
        "gather.cu", count=3),
    "pages the other way": Mutation(
        PAGE.format("src"), PAGE.format("(dst)"), checks.check_pages, "pages.cu",
        (("pages.cu", PAGE.format("dst"), PAGE.format("src")),)),
    "the last word of a page dropped": Mutation(
        "p.row_words - skipped", "p.row_words - 1 - skipped", checks.check_pages,
        "pages.cu"),
    "every piece from where its row begins": Mutation(
        "+ skipped * kWordBytes", "", checks.check_pages, "pages.cu"),
    "only whole pieces of a page": Mutation(
        "left < p.piece_words ? static_cast<int>(left)", "left < p.piece_words ? 0",
        checks.check_pages, "pages.cu"),
    "pages past the end reported by every piece": Mutation(
        "&& piece == 0", "", checks.check_pages, "pages.cu"),
    "the last word of a piece dropped": Mutation(
        "if (first + i * lanes < words) out", "if (first + i * lanes + 1 < words) out",
        checks.check_pages, "pages.cu"),
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


@pytest.mark.parametrize("name", one_of_each(MUTATIONS))
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)
