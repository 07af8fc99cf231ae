"""Rotated rows are checked well enough to notice kernels broken in one place."""

from __future__ import annotations

import pytest
from helpers import Case, full_only
from mutation_cases import Mutation
from rope_cases import RopeCase, store_arguments
from test_rotation import pools, there_and_back
from transfer_cases import TransferCase


def check_blocks(device, fmt="nvfp4"):
    """A block of a thread, of two and of 32; K and V rotated otherwise."""
    for widths in ((48, 96), (512, 128)):
        there_and_back(Case(device, 1), fmt, widths, "fp32", "fp32", slots=5)


def check_long_rows(device):
    """Several blocks of a row, which lanes take in steps."""
    there_and_back(Case(device, 2), "nvfp4", (192, 768), "bf16", "fp32", slots=5)


def check_rope(device):
    """K and V of one warp, of blocks of different sizes."""
    for rotates in ((True, True), (False, True)):
        case = RopeCase(device, 3)
        *args, k_cache, v_cache = store_arguments(
            case, "bf16", "nvfp4", width=128, v_width=64, rotary_dim=48
        )
        caches = [c.rotated() if r else c for c, r in zip((k_cache, v_cache), rotates, strict=True)]
        case.store(*args, *caches, [7, 12, -1, 11, 3, 4])


def transfer(device, src, dst, **geometry):
    case = TransferCase(device, 4)
    case.transfer(*pools(case, src, dst, **geometry), [1, -1, 2, 0], [3, 0, 0, 1], convert=True)


def check_to(device):
    transfer(device, ("fp16", False), ("nvfp4", True), widths=(128, 192))


def check_from(device):
    transfer(device, ("nvfp4", True), ("fp32", False), widths=(128, 192))


def check_from_scaled(device):
    """Rows that get a scale, in one step and in several."""
    transfer(device, ("mxfp4", True), ("int8", False), widths=(128, 1152))


def check_between(device):
    transfer(device, ("nvfp4", True), ("mxfp4", True), widths=(128, 192))


def check_latents(device):
    case = TransferCase(device, 5)
    options = {"pages": 4, "page_size": 3, "layers": 2, "latent": 192}
    target = case.pool(fmt="nvfp4", **options, encoding="+hadamard:128")
    both = [case.pool(fmt="fp16", **options), target]
    case.transfer(*both, [1, 2, 0], [3, 0, 1], convert=True)


HEADER, STORE, GATHER, ROPE, TRANSFER = (
    "four_bit.cuh", "store_four_bit.cu", "gather_four_bit.cu", "rope.cu", "transfer.cu"
)  # fmt: skip

MUTATIONS = {
    "a stage within a thread left out": Mutation(
        "half < kCodesPerThread; half *= 2", "half < kCodesPerThread / 2; half *= 2", check_blocks,
        HEADER),
    "a stage among threads left out": Mutation(
        "distance < (1 << rotation.most_shift) / kCodesPerThread; distance *= 2",
        "distance < (1 << rotation.most_shift) / kCodesPerThread / 2; distance *= 2", check_blocks,
        HEADER),
    "differences the other way": Mutation(
        "threadIdx.x & distance ? -1.0f : 1.0f", "threadIdx.x & distance ? 1.0f : -1.0f",
        check_blocks, HEADER),
    "not orthonormal": Mutation(
        "rotation.shift ? rotation_scale(rotation.shift) : 1.0f", "1.0f", check_blocks, HEADER),
    "the root of a block of an odd power": Mutation(
        "shift & 1 ? kRootOfHalf : 1.0f", "1.0f", check_blocks, HEADER),
    "blocks of a warp as large as the largest": Mutation(
        "if (distance < lanes) x.values[i]", "if (distance < 32) x.values[i]", check_rope, HEADER),
    "large numbers that overflow": Mutation(
        "if (bound > kRotatedLimit && rotation.shift) bound_sixteen(rotated);", "", check_blocks,
        HEADER),
    "NaN that spreads": Mutation(
        "const float bound = clear_nan(x);", "const float bound = 0.0f;", check_long_rows, HEADER),
    "stores that do not rotate": Mutation(
        "if (!is_stored_plainly(p.k) || !is_stored_plainly(p.v))", "if (false)",
        check_blocks, STORE),
    "blocks of one size": Mutation(
        "has, row, operand, rotation_of(operand));", "has, row, operand, Rotation{5, 5});",
        check_blocks, STORE),
    "gathers that leave rows rotated": Mutation(
        "if (rotation.most_shift) rotate_sixteen(values, rotation);", "", check_blocks, GATHER),
    "rows without a slot leave the exchange": Mutation(
        "if (!active && !rotates) return;", "if (!active) return;", check_blocks, GATHER),
    "rope that does not rotate what it stores": Mutation(
        "rotation_of(operand).shift, most_shift}", "0, most_shift}", check_rope, ROPE),
    "rope that looks at K alone": Mutation(
        "p.v_cache ? rotation_of(p.v).shift : 0", "0", check_rope, ROPE),
    "pages that are not rotated": Mutation(
        "if (rotated.shift == 0 && is_stored_plainly(operand))", "if (true)", check_to, TRANSFER),
    "pages that stay rotated": Mutation(
        "if (rotation.most_shift) rotate_sixteen(x, rotation);", "", check_from, TRANSFER),
    "scales of rows as they are stored": Mutation(
        "largest.add(values(rotation));", "largest.add(values(NotRotated{}));", check_from_scaled,
        TRANSFER),
    "V restored as K": Mutation(
        "rotation_at(p.src.v_rotated, element)", "rotation_at(p.src.k_rotated, element)",
        check_between, TRANSFER),
    "V rotated as K": Mutation(
        "live[r] && has_v,\n                p.dst.v_rotated", "live[r] && has_v,\n"
        "                p.dst.k_rotated", check_to, TRANSFER),
    "the rope part of latents rotated": Mutation(
        "element < part.width ? part.shift : 0", "part.shift", check_latents, HEADER),
}  # fmt: skip

#: Like others that are always tried.
ALIKE = {
    "the root of a block of an odd power", "blocks of one size", "V restored as K",
    "V rotated as K", "differences the other way", "a stage within a thread left out",
    "rope that looks at K alone", "stores that do not rotate", "pages that are not rotated",
    "NaN that spreads", "pages that stay rotated", "not orthonormal",
}  # fmt: skip


@pytest.mark.parametrize("name", [full_only(n) if n in ALIKE else n for n in MUTATIONS])
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)


@pytest.mark.full
@pytest.mark.parametrize(
    "check",
    [check_blocks, check_long_rows, check_rope, check_to, check_from, check_from_scaled,
     check_between, check_latents],
)  # fmt: skip
def test_a_whole_kernel_passes(device, check):
    check(device)
