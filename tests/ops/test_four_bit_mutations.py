"""Four-bit stores and gathers are checked well enough to notice kernels broken in one place."""

from __future__ import annotations

import numpy as np
import pytest
from four_bit_cases import place_rows
from helpers import Case, full_only
from mutation_cases import Mutation
from operation_checks import HEADS, caches, slots_of_every_kind
from rope_cases import RopeCase, store_arguments


def check_store(device, fmt="nvfp4", source="fp32"):
    """Rows that a thread takes in several packs, and V wider than K."""
    case = Case(device, 1)
    key, value = (place_rows(case, source, (24, HEADS, n), name=str(n)) for n in (128, 384))
    k_cache, v_cache = caches(case, fmt, (128, 384), 5, 4)
    case.store_kv(
        key, value, k_cache, v_cache, slots_of_every_kind(20), skip_slot=5,
        v_scale=np.float32([0.013, 1.9]),
    )  # fmt: skip


def check_store_of_pairs(device):
    """Groups of two threads, and rows of 16 bits."""
    check_store(device, "mxfp4", "bf16")


def check_store_of_int4(device):
    check_store(device, "int4")


def check_store_of_long_groups(device):
    check_store(device, "int4_g128")


def check_narrow(device):
    """Codes in words of 1, 2 and 4 bytes."""
    for width in (16, 32, 64):
        case = Case(device, 2)
        key, value = (place_rows(case, "fp32", (24, HEADS, width)) for _ in range(2))
        stored = caches(case, "nvfp4", (width, width), 5, 3)
        case.store_kv(key, value, *stored, slots_of_every_kind(15))
        outs = [case.output("fp32", (19, HEADS, width), name="out") for _ in range(2)]
        case.call(
            "gather_kv", *stored, case.slots(slots_of_every_kind(15)), k_out=outs[0], v_out=outs[1]
        )  # fmt: skip


def check_gather(device, fmt="nvfp4"):
    case = Case(device, 3)
    stored = caches(case, fmt, (128, 384), 5, 4)
    outs = [case.output("fp32", (24, HEADS, n), name=f"out {n}") for n in (128, 384)]
    for out in outs:
        out.buffer.exact = False
    case.call(
        "gather_kv", *stored, case.slots(slots_of_every_kind(20)), k_out=outs[0], v_out=outs[1],
        k_scale=0.37, v_scale=np.float32([0.013, 1.9]),
    )  # fmt: skip


def check_gather_of_pairs(device):
    check_gather(device, "mxfp4")


def check_gather_of_int4(device):
    check_gather(device, "int4_g64")


def check_rope(device):
    case = RopeCase(device, 4)
    args = store_arguments(case, "fp32", "int4", width=64, v_width=128, rotary_dim=40)
    case.store(*args, [7, 0, -1, 11, 3, 4], k_scale=0.5, write_key=False)


HEADER, STORE, GATHER, ROPE = "four_bit.cuh", "store_four_bit.cu", "gather_four_bit.cu", "rope.cu"
LINES = "code = fminf(code, __fmaf_rn(exact, 0.5f, kAligner + 4.0f));"
SMALLEST = "absmax > 0.0f ? max(bits, u32{1}) : 0"

MUTATIONS = {
    "a group without its other threads": Mutation(
        "absmax = max_within_warp(absmax, (1 << shift) / kCodesPerThread);", "",
        check_store_of_pairs, HEADER),
    "half of a long group": Mutation(
        "(1 << shift) / kCodesPerThread)", "(1 << shift) / kCodesPerThread / 2)",
        check_store_of_long_groups, HEADER),
    "NaN as the largest": Mutation(
        "if (x != x) pack.values[i] = T{};", "", check_store, HEADER),
    "infinite scales": Mutation(
        "return fminf(largest, kFloatMax);", "return largest;", check_store_of_pairs, HEADER),
    "a scale of zero for tiny groups": Mutation(SMALLEST, "bits", check_store, HEADER),
    "a scale above zero for groups of zeros": Mutation(
        SMALLEST, "max(bits, u32{1})", check_store, HEADER),
    "signs in groups of zeros": Mutation(
        "codes.words[i] = absmax > 0.0f ? word : 0;", "codes.words[i] = word;", check_store,
        HEADER),
    "powers of two rounded down": Mutation(
        "(bits + 0x007fffff) >> 23", "bits >> 23", check_store_of_pairs, HEADER),
    "fp16 scales that overflow": Mutation(
        "fminf(quotient, 65504.0f)", "quotient", check_store_of_int4, HEADER),
    "no line from 4 on": Mutation(LINES, "", check_store, HEADER),
    "halves away from zero": Mutation(
        "__fadd_rn(exact, kAligner + 2.0f)", "__fadd_rn(exact * 1.0000002f, kAligner + 2.0f)",
        check_store, HEADER),
    "no remainder of the quotient": Mutation(
        "step.divide(x[i], rough, exact);", "step.divide(x[i], exact, rough);", check_store,
        HEADER),
    "elements of a byte the other way": Mutation(
        "for (int i = 7; i >= 0; --i) {\n    float rough;",
        "for (int i = 0; i < 8; ++i) {\n    float rough;", check_store, HEADER),
    "signs of even elements on odd ones": Mutation(
        "__byte_perm(lower, upper, 0x6420), __byte_perm(lower, upper, 0x7531)",
        "__byte_perm(lower, upper, 0x7531), __byte_perm(lower, upper, 0x6420)", check_store,
        HEADER),
    "minus zero of two's complement carries": Mutation(
        "((inverted & 0x77777777) + ones) ^ (inverted & 0x88888888)", "inverted + ones",
        check_store_of_int4, HEADER),
    "the scale of a tensor without a say in the step": Mutation(
        "return __fmul_rn(group_scale<TFormat>(scale_bits), scale);",
        "return group_scale<TFormat>(scale_bits);", check_store, HEADER),
    "the limit of the other formats": Mutation(
        "kE2m1<T> ? 6.0f : 7.0f", "6.0f", check_store_of_int4, HEADER),
    "scales by the strides of the codes": Mutation(
        "offset_bytes(scales.strides, place)", "offset_bytes(operand.cache, place) / 2",
        check_store, HEADER),
    "the heads of the scales forgotten": Mutation(
        "+ head * scales.strides.head_bytes", "", check_store, HEADER),
    "a scale where every pack would have one": Mutation(
        "row.scales + group * kGroupScaleBytes<TFormat>, bits",
        "row.scales + at / 16 * kGroupScaleBytes<TFormat>, bits", check_store_of_pairs, HEADER),
    "codes past the end of a row": Mutation(
        "active && has_k, k_out, p.k", "active, k_out, p.k", check_store, STORE),
    "skipped slots stored": Mutation(
        "active && has_v, v_out", "has_v, v_out", check_store, STORE),
    "K with the scale of V": Mutation(
        "store(k, k_scale", "store(k, v_scale", check_store, STORE),
    "only the first packs of a row": Mutation(
        "first < max(p.k.width, p.v.width); first += lanes", "first < 16; first += lanes",
        check_store, STORE),
    "upper halves of narrow words lost": Mutation(
        "words[i * kBytes / 4] >> i * kBytes % 4 * 8", "words[i * kBytes / 4]", check_narrow,
        HEADER),
    "narrow words read in one place": Mutation(
        "<< i * kBytes % 4 * 8", "", check_narrow, HEADER),
    "E2M1 without its exponent's bias": Mutation(
        "0x74007400", "0x70007000", check_gather, HEADER),
    "codes of int4 without their offset": Mutation(
        "0xe408e408", "0xe400e400", check_gather_of_int4, HEADER),
    "the smallest power of two as zero": Mutation(
        "bits == 0 ? 0x00400000 :", "", check_gather_of_pairs, HEADER),
    "one scale for all groups of a row": Mutation(
        "scale_bits = load_group_scale<TFormat>(row.scales + group",
        "scale_bits = load_group_scale<TFormat>(row.scales + 0 * group", check_gather, HEADER),
    "V of a gather multiplied as K": Mutation(
        "(v, v_bits, v_scale", "(v, v_bits, k_scale", check_gather, GATHER),
    "rotated pairs not staged": Mutation(
        "if (cached) rotary.store_pairs(staged, i, x, y);", "", check_rope, ROPE),
    "what passes is not staged": Mutation(
        "if (cached) x.store(staged", "if (false) x.store(staged", check_rope, ROPE),
    "rows staged in one place": Mutation(
        "(threadIdx.x >> p.lane_shift) * p.head_dim * static_cast<int>(sizeof(T))", "0",
        check_rope, ROPE),
    "no barrier behind the staging": Mutation(
        "    __syncwarp();\n    const SlotPlace place", "    const SlotPlace place", check_rope,
        ROPE),
    "keys encoded as they came": Mutation(
        "is_value ? in : staged, scale", "in, scale", check_rope, ROPE),
}  # fmt: skip


#: Like others that are always tried.
ALIKE = {
    "half of a long group", "a scale above zero for groups of zeros", "fp16 scales that overflow",
    "no line from 4 on", "signs of even elements on odd ones", "the heads of the scales forgotten",
    "skipped slots stored", "K with the scale of V", "narrow words read in one place",
    "codes of int4 without their offset", "V of a gather multiplied as K",
    "what passes is not staged", "rows staged in one place", "the limit of the other formats",
}  # fmt: skip


@pytest.mark.parametrize("name", [full_only(n) if n in ALIKE else n for n in MUTATIONS])
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)


@pytest.mark.parametrize(
    "check",
    [check_store, check_store_of_pairs, check_store_of_int4, check_store_of_long_groups,
     check_narrow, check_gather, check_gather_of_pairs, check_gather_of_int4, check_rope],
)  # fmt: skip
def test_a_whole_kernel_passes(device, check):
    check(device)
