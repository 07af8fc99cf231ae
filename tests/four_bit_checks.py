"""One small check of each thing that operations do with four-bit rows, as in `operation_checks`."""

from __future__ import annotations

import four_bit_cases
import numpy as np
from attention_cases import AttentionCase, Views, as_rotated, rotated
from four_bit_cases import place_rows
from helpers import LAYOUTS, Case, cache_shape
from operation_checks import HEADS, caches, slots_of_every_kind
from rope_cases import RopeCase, store_arguments
from store_calls import shuffled_slots
from transfer_cases import TransferCase, pools

from kvcupy import reference


def check_store(device, fmt="nvfp4", source="fp32"):
    """Rows that a thread takes in several packs, and V wider than K."""
    case = Case(device, 1)
    key, value = (place_rows(case, source, (24, HEADS, n), name=str(n)) for n in (128, 384))
    k_cache, v_cache = caches(case, fmt, (128, 384), 5, 4)
    case.store_kv(
        key, value, k_cache, v_cache, slots_of_every_kind(20), skip_slot=5,
        v_scale=np.float32([0.013, 1.9]),
    )  # fmt: skip


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
    stored, slots = caches(case, fmt, (128, 384), 5, 4), case.slots(slots_of_every_kind(20))
    shapes, scales = [(24, HEADS, n) for n in (128, 384)], np.float32([0.013, 1.9])
    four_bit_cases.check_gather(case, stored, slots, shapes, "fp32", k_scale=0.37, v_scale=scales)


def check_rope(device, v_width=128):
    """Keys are rotated, and encoded from what their warp has staged."""
    case = RopeCase(device, 4)
    args = store_arguments(case, "fp32", "int4", width=64, v_width=v_width, rotary_dim=40)
    case.store(*args, [7, 0, -1, 11, 3, 4], k_scale=0.5, write_key=False)


# Rows that are stored rotated (Hadamard) ---------------------------------------------------------


def there_and_back(case, fmt, widths, source, target, *, slots=9, heads=2, layout="slots"):
    """Store K and V and gather them, each rotated or not; arguments hold bits of every kind."""
    key, value = (place_rows(case, source, (slots, heads, n), name=str(n)) for n in widths)
    for rotates_key, rotates_value in ((True, True), (True, False), (False, True)):
        stored = [
            case.output(fmt, cache_shape(layout, 4, 3, heads, n), name=f"cache {n}") for n in widths
        ]
        rotates = rotates_key, rotates_value
        stored = [c.rotated() if r else c for c, r in zip(stored, rotates, strict=True)]
        options = {"layout": layout} if layout in LAYOUTS else {}
        options["k_scale"] = 0.37
        chosen = shuffled_slots(case, slots, 12)
        case.store_kv(key, value, *stored, chosen, **options)
        shapes = [(slots, heads, n) for n in widths]
        four_bit_cases.check_gather(case, stored, chosen, shapes, target, **options)


def check_rotated_blocks(device, fmt="nvfp4"):
    """A block of a thread, of two and of 32; K and V rotated otherwise."""
    for widths in ((48, 96), (512, 128)):
        there_and_back(Case(device, 1), fmt, widths, "fp32", "fp32", slots=5)


def check_long_rotated_rows(device):
    """Several blocks of a row, which lanes take in steps."""
    there_and_back(Case(device, 2), "nvfp4", (192, 768), "bf16", "fp32", slots=5)


def check_rotated_rope(device):
    """K and V of one warp, of blocks of different sizes."""
    for rotates in ((True, True), (False, True)):
        case = RopeCase(device, 3)
        *args, k_cache, v_cache = store_arguments(
            case, "bf16", "nvfp4", width=128, v_width=64, rotary_dim=48
        )
        stored = [c.rotated() if r else c for c, r in zip((k_cache, v_cache), rotates, strict=True)]
        case.store(*args, *stored, [7, 12, -1, 11, 3, 4])


def check_scale_rule(device, source="fp32", rotates=False, layout="slots", seed=1):
    """K by the rule and V not, then V and not K, in rows of several packs per thread."""
    case = Case(device, seed)
    key, value = (place_rows(case, source, (24, 2, n)) for n in (128, 384))
    shapes = [cache_shape(layout, 9, 3, 2, n) for n in (128, 384)]
    stored = [case.output("nvfp4", shape, name="cache") for shape in shapes]
    if rotates:
        stored = [cache.rotated() for cache in stored]
    k_cache, v_cache = stored
    for chosen in (
        (k_cache.ruled("four_over_six"), v_cache),
        (k_cache.ruled("absmax"), v_cache.ruled("four_over_six")),
    ):
        options = {"k_scale": 0.37, "v_scale": np.float32([1.0, 1.9])}
        case.store_kv(key, value, *chosen, shuffled_slots(case, 24, 27), **options)


# Transfers ---------------------------------------------------------------------------------------


PAGES = ([8, -1, 0, 5, 9, 3, 7, 2], [1, 6, 8, -4, 2, 13, 5, 4])
"""Of nine pages, some of them missing. Nothing goes to page 0, where rows without a page point."""


def check_transfer(device, src="fp8_e4m3", dst="nvfp4", widths=(128, 1056), scales=True):
    """Rows with scales where a format has some, in steps, by one block."""
    case = TransferCase(device, 1)
    both = pools(
        case, (src, dst), widths=widths, heads=3, page_size=3, layers=2, scales=scales,
    )  # fmt: skip
    case.transfer(*both, *PAGES, method="kernel", max_blocks=1)


def check_transfer_of_latents(device):
    """A part of each row is rotated."""
    case = TransferCase(device, 5)
    options = {"pages": 4, "page_size": 3, "layers": 2, "latent": 128, "rope": 64}
    target = case.pool(encoding="nvfp4+hadamard", **options)
    case.transfer(case.pool(encoding="fp16", **options), target, [1, 2, 0], [3, 0, 1])


# Attention ---------------------------------------------------------------------------------------


def vary_scales(case, arg, low=-3, high=4):
    """Multiply each group by its own power of two, but those that are poison."""
    rows = arg.view
    values = reference.decode_scales(rows.scales, rows.fmt)
    powers = np.exp2(case.rng.integers(low, high, values.shape))
    bits = reference.encode_scales(
        np.where(np.isnan(values), 1.0, values) * powers, np.zeros(values.shape, bool), rows.fmt
    )
    rows.scales[...] = np.where(np.isnan(values), rows.scales, bits)
    arg.buffer.restore()


def check_attention(
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


def check_attention_large_values(device, heads=(4, 1)):
    """Values of int4 past the largest of fp16, in a tile that is not the first."""
    case = AttentionCase(device, 71)
    args = case.arguments([200], fmt="bf16", cache_fmt="int4", heads=heads, widths=(128, 128),
                          page_size=16, loud=0.3)  # fmt: skip
    for entry, scale in ((0, 8000), (9, 30000)):  # of one warp
        page = args["block_table"].view[0, entry]
        args["v_cache"].view.scales[page] = np.float16(scale).view(np.uint16)
    args["v_cache"].buffer.restore()
    case.attend(args, *case.results(args, fmt="fp32"))


def check_attention_rising_exponents(device, heads=(4, 1)):
    """Values of mxfp4 whose exponents rise within a warp, of every other pair of chunks alone."""
    case = AttentionCase(device, 74)
    args = case.arguments([200], fmt="bf16", cache_fmt="mxfp4", heads=heads, widths=(128, 128),
                          page_size=16, loud=0.3)  # fmt: skip
    page = args["block_table"].view[0, 9]
    args["v_cache"].view.scales[page, ..., 1:3] += 5
    args["v_cache"].buffer.restore()
    case.attend(args, *case.results(args, fmt="fp32"))


def check_attention_loud(device, cache_fmt="nvfp4"):
    """Scores so large that they need more bits of the rotated queries than one fp16 has."""
    case = AttentionCase(device, 73)
    args = case.arguments([300, 0, 37], fmt="bf16", cache_fmt=cache_fmt, heads=(8, 2),
                          widths=(128, 128), page_size=16, loud=4.0)  # fmt: skip
    case.attend(rotated(args), *case.results(args, fmt="fp32"))


def check_attention_latents(device, latent=128, fmt="bf16"):
    """Rows of which the first part alone is rotated; of 512, more than a warp holds at once."""
    case = AttentionCase(device, 72)
    args = case.arguments([37, 3], fmt=fmt, cache_fmt="nvfp4", heads=(4, 1), page_size=16,
                          widths=(latent + 64, latent))  # fmt: skip
    k = as_rotated(args["k_cache"], latent)
    v = Views(k.array[..., :latent], k.view.columns(0, latent))
    case.attend(args | {"k_cache": k, "v_cache": v}, *case.results(args, fmt="fp32"))
