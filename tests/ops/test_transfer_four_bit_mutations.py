"""Conversions of four-bit pages are checked well enough to notice kernels broken in one place."""

from __future__ import annotations

import pytest
from helpers import full_only
from mutation_cases import Mutation
from test_transfer_four_bit import pools
from transfer_cases import TransferCase

PAIRS = ([8, -1, 0, 5, 9, 3, 7, 2], [1, 6, 8, -4, 2, 13, 5, 4])
"""Page 0 of the target stays as it is: pieces without a page point there."""


def check_to(device, packed="nvfp4", other="fp8_e4m3", **geometry):
    """Rows with scales, in steps, V wider than K."""
    case = TransferCase(device, 1)
    geometry = {"widths": (128, 1056), "heads": 3, "pages": 9, **geometry}
    both = pools(case, packed, other, True, scales=True, **geometry)
    case.transfer(*both, *PAIRS, method="kernel", convert=True, max_blocks=1)


def check_to_long_groups(device):
    check_to(device, "int4_g128", "fp16", widths=(128, 128))


def check_from(device, other="int8", widths=(64, 32)):
    """Into rows that get scales, short ones."""
    case = TransferCase(device, 2)
    both = pools(case, "mxfp4", other, False, scales=True, widths=widths, heads=3, pages=9)
    case.transfer(*both, *PAIRS, method="kernel", convert=True, max_blocks=1)


def check_from_long_rows(device):
    check_from(device, widths=(1056, 544))


def check_from_plain(device):
    check_from(device, "fp32")


FILE = "transfer.cu"

MUTATIONS = {
    "group scales before the codes": Mutation(
        "return {row, row + width / 2};", "return {row + width / 16, row};", check_to, FILE),
    "V by the width of K": Mutation(
        "v_to[r], p.v_width, live[r] && has_v", "v_to[r], p.k_width, live[r] && has_v", check_to,
        FILE),
    "scales of the source ignored": Mutation(
        "k_factors[r] = *reinterpret_cast<const float*>(k_scale)", "k_factors[r] = 1.0f",
        check_to, FILE),
    "scales of V for K": Mutation(
        "k[r].values(k_factors[r]", "k[r].values(v_factors[r]", check_to, FILE),
    "only the first step of a row": Mutation(
        "start < max(p.k_width, p.v_width); start += lanes * kCodesPerThread",
        "start < lanes * kCodesPerThread; start += lanes * kCodesPerThread", check_to, FILE),
    "a lane's elements for all of them": Mutation(
        "const int element = start + lane * kCodesPerThread;\n      const bool has_k",
        "const int element = start;\n      const bool has_k", check_to, FILE),
    "skipped pages encoded": Mutation(
        "k_to[r], p.k_width, live[r] && has_k", "k_to[r], p.k_width, has_k", check_to, FILE),
    "the second row of a thread left out": Mutation(
        "k_to[r], p.k_width, live[r] && has_k", "k_to[0], p.k_width, live[r] && has_k",
        check_to_long_groups, FILE),
    "the shift of another group": Mutation(
        "operand.group_scales.group_shift = pool.group_shift;",
        "operand.group_scales.group_shift = pool.group_shift - 1;", check_to_long_groups, FILE),
    "no scales of rows": Mutation(
        "if (live[r] && lane == 0) *k_scale_to[r] = k_scales[r];", "", check_from, FILE),
    "the scale of K for V": Mutation(
        "*v_scale_to[r] = v_scales[r]", "*v_scale_to[r] = k_scales[r]", check_from, FILE),
    "the largest of a lane alone": Mutation(
        "dynamic_scale<TOut>(max_within_warp(absmax, lanes))", "dynamic_scale<TOut>(absmax)",
        check_from, FILE),
    "scales of the first step of a long row": Mutation(
        "for (int start = 0; start < width; start += lanes * kCodesPerThread) {",
        "for (int start = 0; start < 1; start += lanes * kCodesPerThread) {",
        check_from_long_rows, FILE),
    "long rows of V scaled by 1": Mutation(
        "if (p.dst_v_scale && p.v_width > step && !alone)", "if (false)",
        check_from_long_rows, FILE),
    "quantised without the scale of the row": Mutation(
        "quantise<TOut>(x, ScaleDivisor(scale))", "quantise<TOut>(x, ScaleDivisor(1.0f))",
        check_from, FILE),
    "elements of a lane at their bytes": Mutation(
        "k_to[r] + element * kOutBytes, k_scales[r]", "k_to[r] + element, k_scales[r]",
        check_from_plain, FILE),
    "V decoded from K": Mutation(
        "v[r].load(v_from[r], p.v_width, element, live[r], operand)",
        "v[r].load(k_from[r], p.v_width, element, live[r], operand)", check_from_plain, FILE),
    "rows of a thread left out": Mutation(
        "group - of_warp; first < p.rows.num_pieces; first += groups * kRows",
        "group - of_warp; first < p.rows.num_pieces; first += groups * (kRows + 1)", check_to, FILE,
        count=2),
    "the first row of a warp for all": Mutation(
        "first + of_warp + r * groups, lane == 0", "first + r * groups, lane == 0",
        check_from_plain, FILE, count=2),
    "pages past the end not reported": Mutation(
        "first + of_warp + r * groups, lane == 0", "first + of_warp + r * groups, false", check_to,
        FILE, count=2),
}  # fmt: skip


#: Like others that are always tried.
ALIKE = {
    "V by the width of K", "scales of V for K", "a lane's elements for all of them",
    "skipped pages encoded", "the scale of K for V", "V decoded from K",
    "long rows of V scaled by 1",
    "the first row of a warp for all", "pages past the end not reported",
    "the second row of a thread left out", "quantised without the scale of the row",
}  # fmt: skip


@pytest.mark.parametrize("name", [full_only(n) if n in ALIKE else n for n in MUTATIONS])
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)


@pytest.mark.parametrize(
    "check", [check_to, check_to_long_groups, check_from, check_from_long_rows, check_from_plain]
)
def test_a_whole_kernel_passes(device, check):
    check(device)
