"""What `store_kv` and `store_mla` refuse, and what looks wrong and is right."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Case, refused, repeat_rows
from numpy import s_
from refused_calls import BOTH, array, bf16, changed, parts, read_only
from store_calls import mla, small

import kvcupy as kv


def caches(fmt):
    return {"k_cache": array(fmt, 8, 2, 8), "v_cache": array(fmt, 8, 2, 6)}


INT8 = caches("int8")
PAGED = {"k_cache": array("int8", 2, 4, 2, 8), "v_cache": array("int8", 2, 4, 2, 6)}
SCALE_CACHES = {"k_scale_cache": array("fp32", 8, 2), "v_scale_cache": array("fp32", 8, 2)}
WIDE = {"value": bf16(6, 2, 8), "v_cache": bf16(8, 2, 8)}


def one_scale_cache(case):
    return INT8 | dict.fromkeys(SCALE_CACHES, array("fp32", 8, 2)(case))


def stepped(a):
    return a[..., ::2]


def backwards(a):
    return a[..., ::-1]


def two_heads(a):
    return repeat_rows(a, 2).swapaxes(0, 1)


def eight_rows(a):
    return repeat_rows(a, 8)


# fmt: off
BAD_SCALES = (
    ("zero", 0.0, ValueError),
    ("negative", -1.0, ValueError),
    ("nan", float("nan"), ValueError),
    ("inf", float("inf"), ValueError),
    ("too small for float32", 1e-60, ValueError),
    ("string", "1.0", TypeError),
    ("three for two heads", array(np.float32, 3), ValueError),
    ("2-D", array(np.float32, 2, 2), ValueError),
    ("float64", array(np.float64, 2), TypeError),
    ("integers", array(np.int32, 2), TypeError),
)


def rows_of_either(rows, cache, width):
    """Yield the argument, what is wrong, its value, the error, and what the message names."""
    yield rows, "1-D", bf16(6), ValueError, rows
    yield rows, "4-D", bf16(6, 2, 1, width), ValueError, rows
    yield rows, "2-D", bf16(6, 2 * width), ValueError, f"{rows}|{cache}"
    yield rows, "heads", bf16(6, 3, width), ValueError, f"{rows}|{cache}"
    yield rows, "width", bf16(6, 2, width + 1), ValueError, f"{rows}|{cache}"
    yield rows, "float64", array(np.float64, 6, 2, width), TypeError, rows
    yield rows, "untagged", array(np.uint16, 6, 2, width), TypeError, rows
    yield rows, "list", [[[1.0]]], TypeError, rows
    yield rows, "None", None, TypeError, rows
    yield rows, "few", bf16(5, 2, width), ValueError, f"{rows}|slot_mapping"
    yield rows, "last dimension strided", bf16(6, 2, 2 * width, cut=stepped), ValueError, rows
    yield rows, "last dimension reversed", bf16(6, 2, width, cut=backwards), ValueError, rows
    yield cache, "1-D", bf16(16), ValueError, cache
    yield cache, "5-D", bf16(2, 4, 1, 2, width), ValueError, cache
    yield cache, "heads", bf16(8, 3, width), ValueError, cache
    yield cache, "width", bf16(8, 2, width - 1), ValueError, cache
    yield cache, "slots", bf16(9, 2, width), ValueError, "k_cache|v_cache"
    yield cache, "float64", array(np.float64, 8, 2, width), TypeError, cache
    yield cache, "untagged", array(np.uint16, 8, 2, width), TypeError, cache
    yield cache, "list", [[[1.0]]], TypeError, cache
    yield cache, "last dimension strided", bf16(8, 2, 2 * width, cut=stepped), ValueError, cache
    yield cache, "zero stride over slots", bf16(1, 2, width, cut=eight_rows), ValueError, cache
    yield cache, "zero stride over heads", bf16(1, 8, width, cut=two_heads), ValueError, cache


ROWS = (
    ("slot_mapping", "float", array(np.float32, 6), TypeError, "slot_mapping"),
    ("slot_mapping", "uint32", array(np.uint32, 6), TypeError, "slot_mapping"),
    ("slot_mapping", "int16", array(np.int16, 6), TypeError, "slot_mapping"),
    ("slot_mapping", "list", [0] * 6, TypeError, "slot_mapping"),
    ("slot_mapping", "2-D", array(np.int64, 6, 1), ValueError, "slot_mapping"),
    ("slot_mapping", "0-D", array(np.int64), ValueError, "slot_mapping"),
    ("slot_mapping", "longer than rows", array(np.int64, 7), ValueError, "slot_mapping|key"),
    ("layout", "NDH", "NDH", ValueError, "layout"),
    ("skip_slot", "1.5", 1.5, BOTH, "skip_slot"),
)


def scale_rows(scale, scale_cache):
    """Yield the other arguments, this one, what is wrong, its value, and the error."""
    good, per_head = array("fp32", 8, 2), array(np.float32, 2)
    for wrong, value, error in BAD_SCALES:
        yield caches("fp8_e4m3"), scale, wrong, value, error
    for fmt in ("fp32", "fp16", "bf16"):
        yield caches(fmt), scale, f"of {fmt}", 2.0, ValueError
        yield caches(fmt), scale, f"per head of {fmt}", per_head, ValueError
        yield caches(fmt), scale_cache, f"of {fmt}", good, ValueError
    for shape in ((8, 3), (7, 2), (9, 2), (16,), (2, 4, 2)):
        yield PAGED, scale_cache, str(shape), array("fp32", *shape), ValueError
    yield PAGED, scale_cache, "float64", array(np.float64, 8, 2), TypeError
    yield PAGED, scale_cache, "int32", array(np.int32, 8, 2), TypeError
    yield PAGED, scale_cache, "number", 1.0, TypeError
    yield PAGED, scale_cache, "strided", array("fp32", 8, 4, cut=stepped), ValueError
    yield PAGED, scale_cache, "zero stride", array("fp32", 1, 2, cut=eight_rows), ValueError
    yield PAGED | {scale: 2.0}, scale_cache, "beside a scale", good, ValueError
    yield PAGED | {scale: per_head}, scale_cache, "beside scales", good, ValueError


#: What shares memory, and which rows of it.
OVERLAPS = (
    {"k_cache": s_[0:8], "v_cache": s_[0:8]},
    {"k_cache": s_[0:8], "v_cache": s_[7:15]},
    {"key": s_[0:6], "k_cache": s_[0:8]},
    {"key": s_[7:13], "k_cache": s_[0:8]},
    {"key": s_[12:18], "v_cache": s_[10:18]},
    {"value": s_[5:11], "k_cache": s_[10:18]},
    {"value": s_[5:11], "v_cache": s_[10:18]},
)
MLA_ROWS = (
    ("latent", "3-D", bf16(6, 1, 8), ValueError, "latent"),
    ("rope_key", "1-D", bf16(6), ValueError, "rope_key"),
    ("latent", "width", bf16(6, 9), ValueError, "latent|rope_key|cache"),
    ("rope_key", "width", bf16(6, 3), ValueError, "latent|rope_key|cache"),
    ("cache", "1-D", bf16(12), ValueError, "cache"),
    ("cache", "4-D", bf16(2, 4, 1, 12), ValueError, "cache"),
    ("latent", "few", bf16(5, 8), ValueError, "latent|slot_mapping"),
    ("rope_key", "few", bf16(5, 4), ValueError, "rope_key|slot_mapping"),
    ("latent", "float64", array(np.float64, 6, 8), TypeError, "latent"),
    ("rope_key", "untagged", array(np.uint16, 6, 4), TypeError, "rope_key"),
    ("cache", "float64", array(np.float64, 2, 4, 12), TypeError, "cache"),
    ("latent", "strided", bf16(6, 16, cut=stepped), ValueError, "latent"),
    ("rope_key", "reversed", bf16(6, 4, cut=backwards), ValueError, "rope_key"),
    ("cache", "strided", bf16(2, 4, 24, cut=stepped), ValueError, "cache"),
    ("cache", "zero stride", bf16(1, 4, 12, cut=lambda a: repeat_rows(a, 2)), ValueError, "cache"),
    ("slot_mapping", "float", array(np.float32, 6), TypeError, "slot_mapping"),
    ("slot_mapping", "2-D", array(np.int64, 6, 1), ValueError, "slot_mapping"),
    ("scale", "without need", 2.0, ValueError, "scale"),
)


def refused_calls():
    """Yield (operation, id, changes to a valid call, error, what the message names)."""
    for argument, wrong, value, error, names in (
        *rows_of_either("key", "k_cache", 8), *rows_of_either("value", "v_cache", 6), *ROWS,
    ):
        yield "store_kv", f"{argument} {wrong}", {argument: value}, error, names
    three_heads = {"value": bf16(6, 3, 6), "v_cache": bf16(8, 3, 6)}
    yield "store_kv", "more heads of V", three_heads, ValueError, "key|value|k_cache|v_cache"
    for scale in ("k_scale", "v_scale"):
        for others, argument, wrong, value, error in scale_rows(scale, f"{scale}_cache"):
            changes = others | {argument: value}
            yield "store_kv", f"{argument} {wrong}", changes, error, argument
    part = parts("fp32", 9, 2, **INT8, k_scale_cache=s_[:8], v_scale_cache=s_[1:])
    for wrong, changes in (("are one", one_scale_cache), ("overlap", part)):
        yield "store_kv", f"scale caches {wrong}", changes, ValueError, "|".join(SCALE_CACHES)
    for spans in OVERLAPS:
        (x, a), (y, b) = spans.items()
        changes = parts("bf16", 40, 2, 8, **(WIDE | spans))
        wrong = f"{x} from {a.start}, {y} from {b.start}"
        yield "store_kv", wrong, changes, ValueError, f"{x}|{y}"
    for argument, make in (INT8 | SCALE_CACHES).items():
        changes = INT8 | SCALE_CACHES | {argument: read_only(make)}
        yield "store_kv", f"{argument} read-only", changes, ValueError, argument
    for argument, wrong, value, error, names in MLA_ROWS:
        yield "store_mla", f"{argument} {wrong}", {argument: value}, error, names
    part = parts("bf16", 8, 12, latent=s_[:6, :8], cache=s_[:])
    yield "store_mla", "latent overlaps cache", part, ValueError, "latent|cache"
    int8 = {"cache": array("int8", 2, 4, 12)}
    for wrong, value, error in BAD_SCALES:
        yield "store_mla", f"scale {wrong}", int8 | {"scale": value}, error, "scale"
# fmt: on


@pytest.mark.parametrize(
    ("operation", "changes", "error", "names"),
    [pytest.param(op, *row, id=f"{op}: {wrong}") for op, wrong, *row in refused_calls()],
)
def test_wrong_arguments(device, operation, changes, error, names):
    case = Case(device, 34)
    arguments, make = {
        "store_kv": (("key", "value", "k_cache", "v_cache"), small),
        "store_mla": (("latent", "rope_key", "cache"), mla),
    }[operation]
    call = dict(zip(arguments, (arg.array for arg in make(case)), strict=True))
    call["slot_mapping"] = case.slots(range(6)).array
    call = changed(case, call, changes)
    refused(case, lambda: getattr(kv, operation)(**call), error, names)


def test_neighbours_and_shared_inputs_are_allowed(device):
    """Touching is not overlapping, and inputs may share their bytes."""
    case = Case(device, 40)
    memory = case.output("bf16", (22, 2, 8))
    key = memory.sub(lambda a: a[:6])
    caches = [memory.sub(lambda a, s=start: a[s : s + 8]) for start in (6, 14)]
    case.store_kv(key, key, *caches, [3, 7, 0, -1, 1, 5])


def test_read_only_inputs_are_fine(device):
    case = Case(device, 42)
    args = small(case)
    slots = case.slots(range(6))
    for arg in (*args[:2], slots):
        if isinstance(arg.array, np.ndarray):
            arg.array.flags.writeable = False
    case.store_kv(*args, slots)


def test_arguments_after_the_slots_are_keywords(device):
    case = Case(device, 43)
    args = [a.array for a in small(case)]
    with pytest.raises(TypeError):
        kv.store_kv(*args, case.slots(range(6)).array, "NHD")
    case.check("", [])
