"""Transfers are checked well enough to notice kernels that are broken in one place."""

from __future__ import annotations

import operation_checks as checks
import pytest
from mutation_cases import Mutation, one_of_each

SHORT, LONG = checks.check_transfer, checks.check_transfer_of_long_rows
CONVERTS = checks.check_transfer_converts
WIDE = checks.check_transfer_converts_wide_rows
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


MUTATIONS = {
    "K of a transfer by the strides of V": Mutation(
        K_FROM, K_FROM.replace("src_k_strides", "src_v_strides"), SHORT, "transfer.cu"),
    "K of a transfer to where V belongs": Mutation(
        "k_to[r] = p.dst_k + offset_of(p.dst_k_strides, dst, at) + skipped",
        "k_to[r] = p.dst_k + offset_of(p.dst_v_strides, dst, at) + skipped", SHORT, "transfer.cu"),
    "the piece of a row forgotten": Mutation(
        "i64{at.piece} * p.piece_words * kWordBytes", "0", LONG, "transfer.cu"),
    "only whole pieces": Mutation(
        "left < piece_words ? left : piece_words", "left < piece_words ? 0 : piece_words", LONG,
        "transfer.cu"),
    "pieces of a transfer left out": Mutation(
        "first = group; first < p.rows.num_pieces; first += groups * kRows",
        "first = group; first < p.rows.num_pieces; first += groups * (kRows + 1)", SHORT,
        "transfer.cu"),
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
        "scales + offset_of(strides, at.dst_page, at)", "scales + offset_of(strides, at.dst_page, "
        "{0, 0, at.axis_0, at.axis_1, at.axis_2 ^ 1, 0})",
        CONVERTS, "transfer.cu"),
    "scales of the source ignored": Mutation(
        "factors[i] = from_scale ?", "factors[i] = false ?", CONVERTS, "transfer.cu"),
    "scales of the source ignored for wide rows": Mutation(
        "width && from_scale ?", "false ?", WIDE, "transfer.cu"),
    "scales of the target not kept": Mutation(
        "*scale_at(i) = scales[i];", "{}", CONVERTS, "transfer.cu"),
    "scales of the target not kept for wide rows": Mutation(
        "if (lane == 0 && width) *reinterpret_cast<float*>(to_scale) = scale;", "", WIDE,
        "transfer.cu"),
    "the largest of one lane only": Mutation(
        "max_within_warp(of_row, lanes)", "max_within_warp(of_row, lanes / 2)",
        CONVERTS, "transfer.cu"),
    "the largest of one lane of a wide row only": Mutation(
        "max_within_warp(largest.value(), lanes)", "max_within_warp(largest.value(), lanes / 2)",
        WIDE, "transfer.cu"),
    "the largest of one pack of two only": Mutation(
        "if (shift > 0) of_row = fmaxf(of_row, largest[i ^ 1]);", "", WIDE, "transfer.cu"),
    "the largest of two packs of four only": Mutation(
        "if (kHeld > 2 && shift > 1)", "if (false)", WIDE, "transfer.cu"),
    "rows of one group a warp": Mutation(
        "first + of_warp + (i >> shift) * groups", "first + (i >> shift) * groups", CONVERTS,
        "transfer.cu"),
    "the first row of a thread for all": Mutation(
        "first + of_warp + (i >> shift) * groups", "first + of_warp", CONVERTS, "transfer.cu"),
    "rows that a thread holds left out": Mutation(
        "first += groups * (kHeld >> shift)", "first += groups * kHeld", WIDE, "transfer.cu"),
    "the first pack of a row for all": Mutation(
        "(pack * lanes + lane) * kCount", "lane * kCount", WIDE, "transfer.cu"),
    # Nothing that writes past the end of a row: behind the last one there may be others' memory.
    "the last pack of a row left out": Mutation(
        "if (elements[i] < p.k_width)", "if (elements[i] + kCount < p.k_width)", WIDE,
        "transfer.cu"),
    "V written where K goes": Mutation(
        "v_targets[i] = p.dst_v + offset_of(p.dst_v_strides",
        "v_targets[i] = p.dst_k + offset_of(p.dst_v_strides", CONVERTS, "transfer.cu"),
    "packs moved by a byte per element": Mutation(
        "elements[i] * static_cast<int>(sizeof(TOut));\n      if",
        "elements[i];\n      if", WIDE, "transfer.cu"),
    "a last lane without work": Mutation(
        "if (i < width) convert(held[j], i);", "if (i + kCount < width) convert(held[j], i);", WIDE,
        "transfer.cu"),
}  # fmt: skip


@pytest.mark.parametrize("name", one_of_each(MUTATIONS))
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)
