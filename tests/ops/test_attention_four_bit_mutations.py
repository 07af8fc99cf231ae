"""Attention over four-bit caches is checked well enough to notice kernels broken in one place."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase, Views, as_rotated, rotated
from helpers import full_only
from mutation_cases import Mutation

from kvcupy import reference


def vary_scales(case, arg, low=-3, high=4):
    """Multiply each group by a power of two of its own, but those that are poison."""
    rows = arg.view
    values = reference.decode_scales(rows.scales, rows.fmt)
    powers = np.exp2(case.rng.integers(low, high, values.shape))
    bits = reference.encode_scales(
        np.where(np.isnan(values), 1.0, values) * powers, np.zeros(values.shape, bool), rows.fmt
    )
    rows.scales[...] = np.where(np.isnan(values), rows.scales, bits)
    arg.buffer.restore()


def check_decode(
    device, cache_fmt="nvfp4", fmt="bf16", widths=(128, 64), rope=False, stored_rotated=False,
    **options,
):  # fmt: skip
    """Two tiles of a warp; groups of very different sizes; a scale per head."""
    case = AttentionCase(device, 70)
    args = case.arguments(
        [300, 0, 37], fmt=fmt, cache_fmt=cache_fmt, heads=(8, 2), widths=widths, page_size=16,
        scales=("per head", "float"), loud=0.3,
    )  # fmt: skip
    for name in ("k_cache", "v_cache"):
        vary_scales(case, args[name])
    if rope:
        args |= case.rope(64, start=64, positions=250, **options)
    if stored_rotated:
        args = rotated(args)
    case.attend(args, *case.results(args, fmt="fp32"))
    return case


def check_mxfp4(device):
    return check_decode(device, "mxfp4", widths=(128, 128))


def check_int4(device):
    return check_decode(device, "int4", widths=(128, 64))


def check_int4_g64(device):
    return check_decode(device, "int4_g64", widths=(128, 128))


def check_plain(device):
    return check_decode(device, fmt="fp32", widths=(64, 96))


def check_plain_rotated(device):
    return check_decode(device, "int4", fmt="fp32", widths=(128, 128), rope=True)


def check_rotated(device):
    return check_decode(device, widths=(128, 128), rope=True)


def check_rotated_int4(device):
    return check_decode(device, "int4", widths=(128, 128), rope=True)


def check_interleaved(device):
    return check_decode(device, widths=(128, 128), rope=True, interleaved=True)


def check_large_values(device):
    """Values of int4 past the largest of fp16, in a tile that is not the first."""
    case = AttentionCase(device, 71)
    args = case.arguments([200], fmt="bf16", cache_fmt="int4", heads=(4, 1), widths=(128, 64),
                          page_size=16, loud=0.3)  # fmt: skip
    for entry, scale in ((0, 8000), (9, 30000)):  # of one warp
        page = args["block_table"].view[0, entry]
        args["v_cache"].view.scales[page] = np.float16(scale).view(np.uint16)
    args["v_cache"].buffer.restore()
    case.attend(args, *case.results(args, fmt="fp32"))
    return case


def check_stored_rotated(device):
    """Blocks of 64 and of 128, of fewer elements than a row has."""
    return check_decode(device, widths=(192, 128), stored_rotated=True)


def check_stored_rotated_wide(device):
    """Blocks of 256, of more elements than lanes hold at once."""
    return check_decode(device, widths=(256, 256), stored_rotated=True)


def check_stored_rotated_narrow(device):
    """What rounding leaves of queries takes their place."""
    return check_decode(device, widths=(128, 64), stored_rotated=True)


def check_stored_rotated_loud(device, cache_fmt="nvfp4"):
    """Scores so large that they need more bits of the queries than one fp16 has."""
    case = AttentionCase(device, 73)
    args = case.arguments([300, 0, 37], fmt="bf16", cache_fmt=cache_fmt, heads=(8, 2),
                          widths=(128, 128), page_size=16, loud=4.0)  # fmt: skip
    args = rotated(args)
    case.attend(args, *case.results(args, fmt="fp32"))
    return case


def check_plain_stored_rotated(device):
    return check_decode(device, fmt="fp32", widths=(96, 128), stored_rotated=True)


def check_stored_rotated_latents(device, latent=128, fmt="bf16"):
    """Of which the first part alone is rotated."""
    case = AttentionCase(device, 72)
    args = case.arguments([37, 3], fmt=fmt, cache_fmt="nvfp4", heads=(4, 1), page_size=16,
                          widths=(latent + 64, latent))  # fmt: skip
    k = as_rotated(args["k_cache"], latent)
    v = Views(k.array[..., :latent], k.view.columns(0, latent))
    args |= {"k_cache": k, "v_cache": v}
    case.attend(args, *case.results(args, fmt="fp32"))
    return case


def check_plain_stored_rotated_latents(device):
    """Blocks of 512, of more elements than a warp holds at once."""
    return check_stored_rotated_latents(device, 512)


TILES, ROWS = "attention_decode_four_bit.cuh", "attention_rows.cuh"
KERNEL, PLAIN, HADAMARD = "attention_decode_mma.cu", "attention.cu", "hadamard.cuh"

MUTATIONS = {
    "odd codes that are even ones": Mutation(
        "__byte_perm(odd, 0, 0x2404)", "__byte_perm(even, 0, 0x2404)", check_decode, TILES),
    "the offset of upper nibbles": Mutation("0xd480d480", "0xd470d470", check_int4, TILES),
    "scales of keys of the neighbouring group": Mutation(
        "lane & 2 ? 0x4431 : 0x4420", "lane & 2 ? 0x4420 : 0x4431", check_decode, TILES),
    "scales of values of the neighbouring group": Mutation(
        "lane & 16 ? 0x7351 : 0x6240", "lane & 8 ? 0x7351 : 0x6240", check_decode, TILES),
    "the first key's scale for two": Mutation(
        "table.v_groups[stage][key + 1] + pair * 4", "table.v_groups[stage][key] + pair * 4",
        check_decode, TILES),
    "values not rescaled when a group's scale rises": Mutation(
        "o[pair * 8 + n][i] *= rescale;", "o[pair * 8 + n][i] *= 1.0f;", check_mxfp4, TILES),
    "the rise of the first group for two": Mutation(
        "rise >> n / 4 * 16 & 0xffff", "rise & 0xffff", check_mxfp4, TILES),
    "powers of two forgotten in the end": Mutation(
        "* units.of_chunk(chunk) * scale", "* units.of_chunk(0) * scale", check_mxfp4, TILES),
    "large values without their unit": Mutation(
        "units.unit = Units::kRaised;", "units.unit = 1.0f;", check_large_values, TILES),
    "large values that overflow": Mutation(
        "__any_sync(kAllLanes, large)", "false", check_large_values, TILES),
    "what was summed before large values": Mutation(
        "o[n][i] *= 1.0f / Units::kRaised;", "o[n][i] *= 1.0f;", check_large_values, TILES),
    "the scale of the key before": Mutation(
        "sums_scales[n / 2].values[n % 2 * 2 + j % 2]", "sums_scales[n / 2].values[n % 2 * 2]",
        check_int4, TILES),
    "a group per chunk": Mutation(
        "chunk * 32 >> group_shift<TCache>(operand)", "chunk", check_int4_g64, TILES),
    "queries in their own order": Mutation(
        "x[4] * inverse", "x[0] * inverse", check_decode, TILES),
    "columns of values in another order": Mutation(
        "row + chunk * 32 + i * 4", "row + chunk * 32 + (1 - i) * 4", check_decode, TILES),
    "the unit of codes forgotten": Mutation(
        "factors[h] *= 1.0f / kCodeUnit<TCache>;", "factors[h] *= 1.0f;", check_decode, KERNEL),
    "scales used before they are there": Mutation(
        "prepare_key_scales<TCache, kWidth>(table, stage, p.k); __syncwarp();",
        "prepare_key_scales<TCache, kWidth>(table, stage, p.k);", check_int4, KERNEL),
    "scales of keys for values": Mutation(
        "p.v_cache + v.offset_bytes", "p.v_cache + k.offset_bytes", check_decode, TILES),
    "rows of values where those of keys are": Mutation(
        "as_codes.v_codes ? codes", "true ? codes", check_decode, TILES),
    "rotated the other way": Mutation(
        "-x[1][j] * sines.values[j]", "x[1][j] * sines.values[j]", check_rotated, TILES),
    "neighbours rotated the other way": Mutation(
        "-x[0][2 * j + 1] * sines.values[j]", "x[0][2 * j + 1] * sines.values[j]",
        check_interleaved, TILES),
    "rotated keys without their power of two": Mutation(
        "fmaf(sums[j] * kCodeUnit<TCache>, power, s[n][j])",
        "fmaf(sums[j] * kCodeUnit<TCache>, 1.0f, s[n][j])", check_rotated_int4, TILES),
    "the scale of the next group on the plain path": Mutation(
        "scales + (i >> group_shift)", "scales + ((i >> group_shift) ^ 1)", check_plain, ROWS),
    "the scale of a head forgotten on the plain path": Mutation(
        "decode_codes<T>(codes, group_step<T>(scale_bits, scale))",
        "decode_codes<T>(codes, group_step<T>(scale_bits, 1.0f))", check_plain, ROWS),
    "scales of values used before they are there": Mutation(
        "prepare_value_scales<TCache, kWidthV>(table, stage, p.v, units, o); __syncwarp();",
        "prepare_value_scales<TCache, kWidthV>(table, stage, p.v, units, o);", check_int4, KERNEL),
    "the other nibble of a partner": Mutation(
        "codes >> i % 2 * 4 & 15", "codes >> (i + 1) % 2 * 4 & 15", check_plain_rotated, ROWS),
    "queries not rotated": Mutation(
        "if (p.k.group_scales.rotation_shift) apply_hadamard(floats",
        "if (false) apply_hadamard(floats",
        check_stored_rotated, TILES),
    "rotated queries of 11 bits": Mutation(
        "} else if (p.k.group_scales.rotation_shift) {", "} else if (false) {",
        check_stored_rotated_loud, KERNEL),
    "rests of queries that nobody brings": Mutation(
        "rests.store(rest);", "", check_stored_rotated_narrow, KERNEL),
    "rests over queries that others read": Mutation(
        "if constexpr (Shape::kRestReplacesQuery) __syncthreads();", "",
        check_stored_rotated_narrow, KERNEL),
    "values as they are stored": Mutation(
        "apply_hadamard(totals, p.v.group_scales, lane, 32);", "", check_stored_rotated, KERNEL),
    "values rotated as keys are": Mutation(
        "apply_hadamard(totals, p.v.group_scales, lane, 32);",
        "apply_hadamard(totals, p.k.group_scales, lane, 32);", check_stored_rotated, KERNEL),
    "blocks as wide as a row": Mutation(
        "distance >= lanes || distance * kCount >= block", "distance >= lanes",
        check_stored_rotated, HADAMARD),
    "blocks that end with the lanes": Mutation(
        "if (distance * lanes * kCount >= block) break;", "break;",
        check_stored_rotated_wide, HADAMARD),
    "blocks of latents that end with the lanes": Mutation(
        "if (distance * lanes * kCount >= block) break;", "break;",
        check_plain_stored_rotated_latents, HADAMARD),
    "sums for differences": Mutation(
        "lane & distance ? other - own : own + other", "own + other",
        check_stored_rotated, HADAMARD),
    "blocks not divided by their root": Mutation(
        "if (is_rotated(s)) row[s].values[j] *= scale;", "", check_stored_rotated, HADAMARD),
    "the rope part rotated with the latent": Mutation(
        "< rotation.rotated_width", "< (1 << 20)", check_stored_rotated_latents, HADAMARD),
    "queries not rotated on the plain path": Mutation(
        "if (p.k.group_scales.rotation_shift)", "if (false)", check_plain_stored_rotated, PLAIN),
    "values as they are stored on the plain path": Mutation(
        "if (p.v.group_scales.rotation_shift)", "if (false)", check_plain_stored_rotated, PLAIN),
}  # fmt: skip
USUAL = (
    "odd codes that are even ones", "values not rescaled when a group's scale rises",
    "the scale of the next group on the plain path", "queries not rotated",
    "values as they are stored", "the scale of the key before",
)  # fmt: skip


@pytest.mark.parametrize(
    "check",
    [check_decode, check_mxfp4, check_int4, check_int4_g64, check_plain, check_plain_rotated,
     check_rotated, check_rotated_int4, check_interleaved, check_large_values,
     check_stored_rotated, check_stored_rotated_wide, check_stored_rotated_narrow,
     check_stored_rotated_loud, check_plain_stored_rotated,
     check_stored_rotated_latents,
     check_plain_stored_rotated_latents],
    ids=lambda check: check.__name__,
)  # fmt: skip
def test_a_check_passes(device, check):
    check(device)


@pytest.mark.parametrize("name", [n if n in USUAL else full_only(n) for n in MUTATIONS])
def test_a_broken_kernel_is_noticed(kernel_sources, name):
    MUTATIONS[name].must_be_noticed(kernel_sources)
