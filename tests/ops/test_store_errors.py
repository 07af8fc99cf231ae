"""What `store_kv` and `store_mla` refuse, and what looks wrong and is right."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Case, refused, repeat_rows
from store_calls import mla, small

import kvcupy as kv


def reshaped(arg, cut):
    return arg.sub(cut).array


def error_cases():
    """Yield (id, error, what the message matches, changes to a valid call)."""
    both = (TypeError, ValueError)
    for side, cache in (("key", "k_cache"), ("value", "v_cache")):
        width = 8 if side == "key" else 6
        yield f"{side} 1-D", ValueError, side, lambda c, s=side: {s: c.input("bf16", (6,)).array}
        yield (
            f"{side} 4-D",
            ValueError,
            side,
            lambda c, s=side, w=width: {s: c.input("bf16", (6, 2, 1, w)).array},
        )
        yield (
            f"{side} 2-D",
            ValueError,
            f"{side}|{cache}",
            lambda c, s=side, w=width: {s: c.input("bf16", (6, 2 * w)).array},
        )
        yield (
            f"{side} heads",
            ValueError,
            f"{side}|{cache}",
            lambda c, s=side, w=width: {s: c.input("bf16", (6, 3, w)).array},
        )
        yield (
            f"{side} width",
            ValueError,
            f"{side}|{cache}",
            lambda c, s=side, w=width: {s: c.input("bf16", (6, 2, w + 1)).array},
        )
        yield (
            f"{side} float64",
            TypeError,
            side,
            lambda c, s=side, w=width: {s: c.device.zeros((6, 2, w), np.float64)},
        )
        yield (
            f"{side} untagged",
            TypeError,
            side,
            lambda c, s=side, w=width: {s: c.device.zeros((6, 2, w), np.uint16)},
        )
        yield f"{side} list", TypeError, side, lambda c, s=side: {s: [[[1.0]]]}
        yield f"{side} None", TypeError, side, lambda c, s=side: {s: None}
        yield (
            f"{side} few",
            ValueError,
            f"{side}|slot_mapping",
            lambda c, s=side, w=width: {s: c.input("bf16", (5, 2, w)).array},
        )
        yield (
            f"{side} last dimension strided",
            ValueError,
            side,
            lambda c, s=side, w=width: {
                s: c.input("bf16", (6, 2, 2 * w), lambda a: a[..., ::2]).array
            },
        )
        yield (
            f"{side} last dimension reversed",
            ValueError,
            side,
            lambda c, s=side, w=width: {
                s: c.input("bf16", (6, 2, w), lambda a: a[..., ::-1]).array
            },
        )
        yield (
            f"{cache} 1-D",
            ValueError,
            cache,
            lambda c, s=cache: {s: c.output("bf16", (16,)).array},
        )
        yield (
            f"{cache} 5-D",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {s: c.output("bf16", (2, 4, 1, 2, w)).array},
        )
        yield (
            f"{cache} heads",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {s: c.output("bf16", (8, 3, w)).array},
        )
        yield (
            f"{cache} width",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {s: c.output("bf16", (8, 2, w - 1)).array},
        )
        yield (
            f"{cache} slots",
            ValueError,
            "k_cache|v_cache",
            lambda c, s=cache, w=width: {s: c.output("bf16", (9, 2, w)).array},
        )
        yield (
            f"{cache} float64",
            TypeError,
            cache,
            lambda c, s=cache, w=width: {s: c.device.zeros((8, 2, w), np.float64)},
        )
        yield (
            f"{cache} untagged",
            TypeError,
            cache,
            lambda c, s=cache, w=width: {s: c.device.zeros((8, 2, w), np.uint16)},
        )
        yield f"{cache} list", TypeError, cache, lambda c, s=cache: {s: [[[1.0]]]}
        yield (
            f"{cache} last dimension strided",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {
                s: c.output("bf16", (8, 2, 2 * w), lambda a: a[..., ::2]).array
            },
        )
        yield (
            f"{cache} zero stride over slots",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {
                s: c.output("bf16", (1, 2, w), lambda a: repeat_rows(a, 8)).array
            },
        )
        yield (
            f"{cache} zero stride over heads",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {
                s: c.output("bf16", (1, 8, w), lambda a: repeat_rows(a, 2).swapaxes(0, 1)).array
            },
        )
    yield (
        "heads of K and V differ",
        ValueError,
        "key|value|k_cache|v_cache",
        lambda c: {
            "value": c.input("bf16", (6, 3, 6)).array,
            "v_cache": c.output("bf16", (8, 3, 6)).array,
        },
    )
    yield (
        "slots float",
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.float32)},
    )
    yield (
        "slots uint32",
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.uint32)},
    )
    yield (
        "slots int16",
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.int16)},
    )
    yield "slots list", TypeError, "slot_mapping", lambda c: {"slot_mapping": [0] * 6}
    yield (
        "slots 2-D",
        ValueError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6, 1), np.int64)},
    )
    yield (
        "slots 0-D",
        ValueError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((), np.int64)},
    )
    yield (
        "slots longer than rows",
        ValueError,
        "slot_mapping|key",
        lambda c: {"slot_mapping": c.device.zeros((7,), np.int64)},
    )
    yield "layout", ValueError, "layout", lambda c: {"layout": "NDH"}
    yield "skip_slot", both, "skip_slot", lambda c: {"skip_slot": 1.5}


ERRORS = list(error_cases())


@pytest.mark.parametrize(
    ("error", "name", "change"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS]
)
def test_wrong_arguments(device, error, name, change):
    case = Case(device, 34)
    args = dict(
        zip(("key", "value", "k_cache", "v_cache"), (a.array for a in small(case)), strict=True)
    )
    args["slot_mapping"] = case.slots(range(6)).array
    args.update(change(case))
    refused(case, lambda: kv.store_kv(**args), error, name)


BAD_SCALES = {
    "zero": (0.0, ValueError),
    "negative": (-1.0, ValueError),
    "nan": (float("nan"), ValueError),
    "inf": (float("inf"), ValueError),
    "too small for float32": (1e-60, ValueError),
    "string": ("1.0", TypeError),
    "three for two heads": (np.ones(3, np.float32), ValueError),
    "2-D": (np.ones((2, 2), np.float32), ValueError),
    "float64": (np.ones(2, np.float64), TypeError),
    "integers": (np.ones(2, np.int32), TypeError),
}


@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("bad", BAD_SCALES)
def test_wrong_scales(device, side, bad):
    scale, error = BAD_SCALES[bad]
    case = Case(device, 35)
    args = [a.array for a in small(case, cache_fmt="fp8_e4m3")]
    slots = case.slots(range(6)).array
    scale = device.asarray(scale) if isinstance(scale, np.ndarray) else scale
    refused(
        case,
        lambda: kv.store_kv(*args, slots, **{f"{side}_scale": scale}),
        error,
        f"{side}_scale",
    )


@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("cache_fmt", ["fp32", "fp16", "bf16"])
def test_scales_belong_to_quantised_caches(device, cache_fmt, side):
    case = Case(device, 36)
    args = [a.array for a in small(case, cache_fmt=cache_fmt)]
    slots = case.slots(range(6)).array
    dynamic = case.output("fp32", (8, 2)).array
    for option, given_ in (
        (f"{side}_scale", 2.0),
        (f"{side}_scale", device.asarray(np.float32([2.0, 3.0]))),
        (f"{side}_scale_cache", dynamic),
    ):
        refused(
            case,
            lambda option=option, given_=given_: kv.store_kv(*args, slots, **{option: given_}),
            ValueError,
            option,
        )


@pytest.mark.parametrize("side", "kv")
def test_wrong_scale_caches(device, side):
    case = Case(device, 37)
    args = [a.array for a in small(case, cache_fmt="int8", layout="NHD")]
    slots = case.slots(range(6)).array
    name = f"{side}_scale_cache"

    def refuse(error, **options):
        refused(case, lambda: kv.store_kv(*args, slots, **options), error, name)

    for shape in ((8, 3), (7, 2), (9, 2), (16,), (2, 4, 2)):
        refuse(ValueError, **{name: case.output("fp32", shape).array})
    refuse(TypeError, **{name: device.zeros((8, 2), np.float64)})
    refuse(TypeError, **{name: device.zeros((8, 2), np.int32)})
    refuse(TypeError, **{name: 1.0})
    refuse(ValueError, **{name: case.output("fp32", (8, 4), lambda a: a[:, ::2]).array})
    refuse(ValueError, **{name: case.output("fp32", (1, 2), lambda a: repeat_rows(a, 8)).array})
    good = case.output("fp32", (8, 2)).array
    refuse(ValueError, **{name: good, f"{side}_scale": 2.0})
    refuse(ValueError, **{name: good, f"{side}_scale": device.asarray(np.float32([2.0, 3.0]))})


def test_scale_caches_may_not_be_one(device):
    case = Case(device, 38)
    args = [a.array for a in small(case, cache_fmt="int8")]
    both = case.output("fp32", (9, 2))
    first, second = both.sub(lambda a: a[:8]).array, both.sub(lambda a: a[1:]).array
    slots = case.slots(range(6)).array
    for other in (first, second):
        refused(
            case,
            lambda other=other: kv.store_kv(*args, slots, k_scale_cache=first, v_scale_cache=other),
            ValueError,
            "k_scale_cache|v_scale_cache",
        )


def test_overlapping_arrays_are_refused(device):
    case = Case(device, 39)
    memory = case.output("bf16", (40, 2, 8))
    free = [case.output("bf16", (8, 2, 8)).array for _ in range(2)]
    rows = [case.input("bf16", (6, 2, 8)).array for _ in range(2)]
    slots = case.slots(range(6)).array

    def part(start, count):
        return memory.sub(lambda a: a[start : start + count]).array

    def refuse(names, *args):
        refused(case, lambda: kv.store_kv(*args, slots), ValueError, names)

    refuse("k_cache|v_cache", *rows, part(0, 8), part(0, 8))
    refuse("k_cache|v_cache", *rows, part(0, 8), part(7, 8))
    refuse("key|k_cache", part(0, 6), rows[1], part(0, 8), free[1])
    refuse("key|k_cache", part(7, 6), rows[1], part(0, 8), free[1])
    refuse("key|v_cache", part(12, 6), rows[1], free[0], part(10, 8))
    refuse("value|k_cache", rows[0], part(5, 6), part(10, 8), free[1])
    refuse("value|v_cache", rows[0], part(5, 6), free[0], part(10, 8))


def test_neighbours_and_shared_inputs_are_allowed(device):
    """Touching is not overlapping, and inputs may share their bytes."""
    case = Case(device, 40)
    memory = case.output("bf16", (22, 2, 8))
    key = memory.sub(lambda a: a[:6])
    caches = [memory.sub(lambda a, s=start: a[s : s + 8]) for start in (6, 14)]
    case.store_kv(key, key, *caches, [3, 7, 0, -1, 1, 5])


@pytest.mark.parametrize("output", ["k_cache", "v_cache", "k_scale_cache", "v_scale_cache"])
def test_read_only_outputs_are_refused(device, output):
    case = Case(device, 41)
    key, value, k_cache, v_cache = (a.array for a in small(case, cache_fmt="int8"))
    args = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scale_cache": case.output("fp32", (8, 2)).array,
        "v_scale_cache": case.output("fp32", (8, 2)).array,
    }
    if not isinstance(args[output], np.ndarray):
        pytest.skip("this array library has no read-only arrays")
    args[output].flags.writeable = False
    slots = case.slots(range(6)).array
    refused(
        case,
        lambda: kv.store_kv(key, value, slot_mapping=slots, **args),
        ValueError,
        output,
    )


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


MLA_ERRORS = {
    "latent 3-D": (ValueError, "latent", lambda c: {"latent": c.input("bf16", (6, 1, 8)).array}),
    "rope_key 1-D": (ValueError, "rope_key", lambda c: {"rope_key": c.input("bf16", (6,)).array}),
    "latent width": (
        ValueError,
        "latent|rope_key|cache",
        lambda c: {"latent": c.input("bf16", (6, 9)).array},
    ),
    "rope_key width": (
        ValueError,
        "latent|rope_key|cache",
        lambda c: {"rope_key": c.input("bf16", (6, 3)).array},
    ),
    "cache 1-D": (ValueError, "cache", lambda c: {"cache": c.output("bf16", (12,)).array}),
    "cache 4-D": (ValueError, "cache", lambda c: {"cache": c.output("bf16", (2, 4, 1, 12)).array}),
    "few latents": (
        ValueError,
        "latent|slot_mapping",
        lambda c: {"latent": c.input("bf16", (5, 8)).array},
    ),
    "few rope keys": (
        ValueError,
        "rope_key|slot_mapping",
        lambda c: {"rope_key": c.input("bf16", (5, 4)).array},
    ),
    "latent float64": (
        TypeError,
        "latent",
        lambda c: {"latent": c.device.zeros((6, 8), np.float64)},
    ),
    "rope_key untagged": (
        TypeError,
        "rope_key",
        lambda c: {"rope_key": c.device.zeros((6, 4), np.uint16)},
    ),
    "cache float64": (
        TypeError,
        "cache",
        lambda c: {"cache": c.device.zeros((2, 4, 12), np.float64)},
    ),
    "latent strided": (
        ValueError,
        "latent",
        lambda c: {"latent": c.input("bf16", (6, 16), lambda a: a[:, ::2]).array},
    ),
    "rope_key reversed": (
        ValueError,
        "rope_key",
        lambda c: {"rope_key": c.input("bf16", (6, 4), lambda a: a[:, ::-1]).array},
    ),
    "cache strided": (
        ValueError,
        "cache",
        lambda c: {"cache": c.output("bf16", (2, 4, 24), lambda a: a[..., ::2]).array},
    ),
    "cache zero stride": (
        ValueError,
        "cache",
        lambda c: {"cache": c.output("bf16", (1, 4, 12), lambda a: repeat_rows(a, 2)).array},
    ),
    "slots float": (
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.float32)},
    ),
    "slots 2-D": (
        ValueError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6, 1), np.int64)},
    ),
    "scale without need": (ValueError, "scale", lambda c: {"scale": 2.0}),
    "overlap": (
        ValueError,
        "latent|cache",
        lambda c: (
            lambda both: {"latent": both.sub(lambda a: a[:6, :8]).array, "cache": both.array}
        )(c.output("bf16", (8, 12))),
    ),
}


@pytest.mark.parametrize("wrong", MLA_ERRORS)
def test_mla_wrong_arguments(device, wrong):
    error, name, change = MLA_ERRORS[wrong]
    case = Case(device, 55)
    args = dict(zip(("latent", "rope_key", "cache"), (a.array for a in mla(case)), strict=True))
    args["slot_mapping"] = case.slots(range(6)).array
    args.update(change(case))
    refused(case, lambda: kv.store_mla(**args), error, name)


@pytest.mark.parametrize("bad", BAD_SCALES)
def test_mla_wrong_scales(device, bad):
    scale, error = BAD_SCALES[bad]
    case = Case(device, 56)
    args = [a.array for a in mla(case, "int8")]
    slots = case.slots(range(6)).array
    scale = device.asarray(scale) if isinstance(scale, np.ndarray) else scale
    refused(case, lambda: kv.store_mla(*args, slots, scale=scale), error, "scale")
