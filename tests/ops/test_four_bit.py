"""Stores into caches of the four-bit formats, and gathers out of them, bit for bit.

Rows may be rotated before they are stored, and groups of nvfp4 may have the scale of the smaller
error; what these are is in `test_rotation.py` and `test_scale_rules.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from four_bit_cases import FLOATS, FOUR_BIT, check_gather, place_rows, split_cache
from helpers import FORMATS, LAYOUTS, Case, cache_shape, refused
from kernel_checks import check_scale_rule, there_and_back
from rope_cases import SLOTS, RopeCase, mla_arguments, store_arguments
from store_calls import shuffled_slots

import kvcupy as kv
from kvcupy import formats, reference

BLOCKS = {16: 16, 48: 16, 64: 64, 96: 32, 128: 128, 192: 64, 256: 256, 512: 512, 768: 256}
"""By width, the elements that rotate together."""
ROWS = [
    (fmt, width, rule)
    for fmt in FOUR_BIT for width in BLOCKS if width % formats.FOUR_BIT[fmt].group == 0
    for rule in (("absmax", "four_over_six") if (fmt, width) == ("nvfp4", 192) else ("absmax",))
]  # fmt: skip
"""Every format with every block that has whole groups: codes in words of 1 to 8 bytes."""


@pytest.mark.covering
@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize(("fmt", "width", "rule"), ROWS)
def test_there_and_back(device, fmt, width, rule, source):
    """Stored and gathered, of K and V each rotated or not; layouts and targets change in turn."""
    turn = ROWS.index((fmt, width, rule)) + FORMATS.index(source)
    options = {"heads": 3, "layout": ("slots", "NHD", "HND")[turn % 3], "rule": rule}
    target = FORMATS[turn % len(FORMATS)]
    there_and_back(Case(device, width), fmt, (width, 128), source, target, **options)


@pytest.mark.covering
@pytest.mark.parametrize("fmt", FOUR_BIT)
@pytest.mark.parametrize("layout", [*LAYOUTS, "slots", "2-D"])
def test_rows_of_the_format_itself(device, layout, fmt):
    """Gathered from one cache, and stored into another."""
    case = Case(device, 3)
    shape = (lambda width: (9, width)) if layout == "2-D" else (lambda width: (9, 3, width))
    key, value = (place_rows(case, "bf16", shape(n)) for n in (128, 256))
    caches = [case.output(fmt, cache_shape(layout, 4, 3, 3, n)) for n in (128, 256)]
    options = {"layout": layout} if layout in LAYOUTS else {}
    slots = shuffled_slots(case, 9, 12)
    case.store_kv(key, value, *caches, slots, **options)
    rows = [case.output(fmt, shape(n), name=f"rows {n}") for n in (128, 256)]
    case.call("gather_kv", *caches, slots, k_out=rows[0], v_out=rows[1], **options)
    others = [case.output(fmt, cache_shape(layout, 4, 3, 3, n)) for n in (128, 256)]
    case.store_kv(*rows, *others, slots[::-1].copy(), **options)


@pytest.mark.parametrize("misalign", [0, 1, 4])
def test_rows_at_any_element(device, misalign):
    case = Case(device, 5)
    key = place_rows(case, "bf16", (7, 2, 32), misalign=misalign)
    value = place_rows(case, "bf16", (7, 5, 48), lambda a: a[:, 1:4:2, 5:37])
    caches = [case.output("mxfp4", (9, 2, 32), misalign=3) for _ in range(2)]
    slots = shuffled_slots(case, 7, 9)
    case.store_kv(key, value, *caches, slots)
    check_gather(case, caches, slots, [(7, 2, 32)] * 2, "fp16", misalign=misalign)


def test_key_and_value_of_two_formats(device):
    case = Case(device, 6)
    key, value = place_rows(case, "bf16", (9, 2, 128)), place_rows(case, "fp16", (9, 2, 64))
    for k_fmt, v_fmt in (("nvfp4", "int4"), ("int4", "mxfp4"), ("fp8_e4m3", "mxfp4")):
        k_cache, v_cache = (
            case.output(f, (12, 2, n)) for f, n in ((k_fmt, 128), (v_fmt, 64))
        )  # fmt: skip
        slots = shuffled_slots(case, 9, 12)
        case.store_kv(key, value, k_cache, v_cache, slots, k_scale=0.5)
        shapes = [(9, 2, n) for n in (128, 64)]
        check_gather(case, (k_cache, v_cache), slots, shapes, "bf16", k_scale=0.5)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_scales_in_an_array_of_their_own(device, fmt, rotates):
    """Pages of vLLM: the codes of a page, then its scales. Gathered into packed rows, and back."""
    if device.kind != "host":
        pytest.skip("strides over memory that the test makes with NumPy")
    case = Case(device, 7)
    caches = [split_cache(case, fmt, 4, 3, 2, n) for n in (128, 256)]
    arrays, mirrors = [c[0] for c in caches], [c[1] for c in caches]
    for array, mirror in zip(arrays, mirrors, strict=True):
        array.rotated_width = mirror.rotated_width = array.shape[-1] * rotates
    key, value = (place_rows(case, "bf16", (9, 2, n)) for n in (128, 256))
    slots = shuffled_slots(case, 9, 12)
    kv.store_kv(key.array, value.array, *arrays, slots, v_scale=3.0)
    reference.store_kv(key.view, value.view, *mirrors, slots, v_scale=3.0)
    case.check_buffers()
    rows = [case.output(fmt, (9, 2, n), name=f"rows {n}") for n in (128, 256)]
    rows = [row.rotated() if rotates else row for row in rows]
    kv.gather_kv(*arrays, slots, k_out=rows[0].array, v_out=rows[1].array)
    reference.gather_kv(*mirrors, slots, k_out=rows[0].view, v_out=rows[1].view)
    case.check_buffers()
    other = slots[::-1].copy()
    kv.store_kv(rows[0].array, rows[1].array, *arrays, other)
    reference.store_kv(rows[0].view, rows[1].view, *mirrors, other)
    case.check_buffers()
    pages = np.array([3, 0]), np.array([1, 2])
    kv.copy_pages(arrays, *pages)
    for mirror in mirrors:
        reference.copy_pages((mirror.codes, mirror.scales), *pages)
    case.check_buffers()
    outs = [case.output("fp16", (9, 2, n), name=f"out {n}") for n in (128, 256)]
    kv.gather_kv(*arrays, slots, k_out=outs[0].array, v_out=outs[1].array, v_scale=3.0)
    reference.gather_kv(*mirrors, slots, k_out=outs[0].view, v_out=outs[1].view, v_scale=3.0)
    for out in outs:
        out.buffer.exact = False
    case.check_buffers()


@pytest.mark.parametrize(("rotates", "rule"), [(False, ""), (True, ""), (True, "four_over_six")])
@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_latents(device, fmt, rotates, rule):
    """Rotated without the rope part, which is stored unchanged; with rows of the format itself."""
    if rule and fmt != "nvfp4":
        fmt, rule = "nvfp4", rule  # which alone has it
    group = formats.FOUR_BIT[fmt].group
    rank, rope = 8 * group, 2 * group
    for paged, source in ((False, "bf16"), (True, "fp32")):
        case = Case(device, 9)
        latent, rope_key = (place_rows(case, source, (6, n)) for n in (rank, rope))
        cache = case.output(fmt, (3, 4, rank + rope) if paged else (12, rank + rope), name="cache")
        cache = cache.rotated(rank) if rotates else cache
        cache = cache.ruled(rule) if rule else cache
        case.call("store_mla", latent, rope_key, cache, [7, 0, -1, 11, 3, 4], scale=0.25)
        parts = cache.array[..., :rank], cache.array[..., rank:]
        assert [part.rotated_width for part in parts] == [rank * rotates, 0]
        if not rotates:
            packed = [case.output(fmt, (6, n)) for n in (rank, rope)]
            case.call("store_mla", *packed, cache, [8, 1, -1, 10, 2, 5])
        case = RopeCase(device, 15)
        *args, cache = mla_arguments(
            case, "bf16", fmt, rank=rank, width=rope, rotary_dim=group, paged=paged
        )
        cache = cache.rotated(rank) if rotates else cache
        cache = cache.ruled(rule) if rule else cache
        case.rotate("rope_store_mla", *args, cache, SLOTS, write_key=not paged, scale=0.5)


def test_a_latent_of_no_whole_groups_is_refused(device):
    case = Case(device, 10)
    latent, rope_key = place_rows(case, "bf16", (6, 40)), place_rows(case, "bf16", (6, 24))
    cache = case.output("nvfp4", (12, 64))
    slots = device.asarray(np.arange(6))
    call = lambda: kv.store_mla(latent.array, rope_key.array, cache.array, slots)  # noqa: E731
    refused(case, call, ValueError, "latent")


# Rotation ------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("rotary_dim", [128, 48, 8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", FOUR_BIT)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize(
    "rotates", [(False, False), (True, True), (True, False), (False, True)], ids=str
)
def test_rope_store(device, source, fmt, rotates, interleaved, rotary_dim):
    """Queries, keys and values in one warp; of nvfp4, K or V by the rule of the smaller error."""
    rules = (("four_over_six", "absmax"), ("absmax", "four_over_six")) if fmt == "nvfp4" else ()
    for layout, write_key, *rule in (("NHD", True, *rules[:1]), ("HND", False, *rules[1:])):
        case = RopeCase(device, 11)
        *args, k_cache, v_cache = store_arguments(
            case, source, fmt, layout=layout, width=128, v_width=256, rotary_dim=rotary_dim
        )
        stored = [c.rotated() if r else c for c, r in zip((k_cache, v_cache), rotates, strict=True)]
        if rule:
            stored = [c.ruled(r) for c, r in zip(stored, rule[0], strict=True)]
        case.rotate(
            "rope_store_kv",
            *args, *stored, [7, 12, -1, 11, 3, 4], layout=layout, write_key=write_key,
            interleaved=interleaved, k_scale=np.float32([0.5, 3.0]), v_scale=0.5,
        )  # fmt: skip


def test_rope_store_of_what_the_pack_does_not_fit(device):
    """Odd rotary widths and rows at any element: one by one."""
    for width, rotary_dim, source in ((16, 6, "bf16"), (48, 22, "fp32"), (80, 80, "fp16")):
        case = RopeCase(device, 12)
        args = store_arguments(
            case, source, "nvfp4", width=width, v_width=32, rotary_dim=rotary_dim
        )
        case.rotate("rope_store_kv", *args, SLOTS)


def test_rope_store_with_norms_and_no_query(device):
    case = RopeCase(device, 13)
    query, key, *rest = store_arguments(case, "bf16", "int4", width=64, v_width=128)
    norms = {f"{n}_norm": case.rows("fp32", (64,), name=n) for n in ("query", "key")}
    case.rotate("rope_store_kv", query, key, *rest, SLOTS, **norms)
    case.rotate("rope_store_kv", None, key, *rest, SLOTS[::-1], key_norm=norms["key_norm"])


@pytest.mark.parametrize("fmt", ["nvfp4", "int4"])
def test_rope_store_on_two_streams(device, fmt):
    """The copies read keys from where the rotation wrote them, or rotate as they copy."""
    for write_key in (True, False):
        case = RopeCase(device, 14)
        args = store_arguments(case, "bf16", fmt, width=64, v_width=32)
        streams = [device.stream() for _ in range(2)]
        case.rotate(
            "rope_store_kv",
            *args, SLOTS, write_key=write_key, stream=streams[0], alt_stream=streams[1]
        )  # fmt: skip


def test_rows_too_long_to_stage_are_refused(device):
    case = RopeCase(device, 16)
    width = 49152 // 4 + 128
    args = store_arguments(case, "fp32", "nvfp4", width=width, v_width=16, rotary_dim=16)
    arrays = [arg.array for arg in args]
    slots = device.asarray(np.array(SLOTS))
    call = lambda: kv.rope_store_kv(*arrays, slots)  # noqa: E731
    refused(case, call, ValueError, "key")


# Refusals ------------------------------------------------------------------------------------


def calls(case, device):
    """Name of the argument, what is wrong, and the call."""
    key = place_rows(case, "bf16", (4, 2, 64)).array
    cache = case.output("nvfp4", (8, 2, 64)).array
    other = case.output("mxfp4", (8, 2, 64)).array
    plain = case.output("bf16", (8, 2, 64)).array
    rows = case.output("nvfp4", (4, 2, 64)).array
    dynamic = device.zeros((8, 2), "fp32")
    slots = device.asarray(np.arange(4))
    return {
        "k_scale_cache": lambda: kv.store_kv(key, key, cache, other, slots, k_scale_cache=dynamic),
        "key": lambda: kv.store_kv(rows, key, other, cache, slots),
        "value": lambda: kv.store_kv(key, rows, cache, plain, slots),
        "k_out": lambda: kv.gather_kv(plain, plain, slots, k_out=rows),
        "k_scale": lambda: kv.store_kv(key, key, cache, other, slots, k_scale=-1.0),
        "v_cache": lambda: kv.store_kv(key, key, cache, cache, slots),
    }


@pytest.mark.parametrize("name", ["k_scale_cache", "key", "value", "k_out", "k_scale", "v_cache"])
def test_what_does_not_fit_is_refused(device, name):
    case = Case(device, 17)
    refused(case, calls(case, device)[name], ValueError, f"{name}|k_cache")


def test_rows_that_a_thread_holds_alone(users_device):
    """As users run it on the host device."""
    for fmt, width, source in (("nvfp4", 48, "bf16"), ("int4", 512, "bf16"), ("int4", 128, "fp32")):
        there_and_back(Case(users_device, 3), fmt, (width, 768), source, source)
    check_scale_rule(users_device, "bf16")
    check_scale_rule(users_device, "bf16", rotates=True)
    for fmt, width, v_width, rotates in (
        ("nvfp4", 96, 64, True), ("nvfp4", 128, 256, False), ("int4", 128, 256, False),
    ):  # fmt: skip
        case = RopeCase(users_device, 8)
        *args, k_cache, v_cache = store_arguments(
            case, "bf16", fmt, width=width, v_width=v_width, rotary_dim=48
        )
        stored = [c.rotated() if rotates else c for c in (k_cache, v_cache)]
        case.rotate("rope_store_kv", *args, *stored, SLOTS)
