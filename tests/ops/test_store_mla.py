"""`store_mla`, by what a user sees of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import QUANTISED, Case
from store_calls import PAIRS, by_reciprocal, mla, shuffled_slots, telling_values, traps


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "pair", [*PAIRS, ("fp16", "bf16"), ("bf16", "int8"), ("fp32", "fp8_e5m2")], ids="-".join
)
def test_mla(device, pair, paged):
    for rank, rope in ((512, 64), (7, 3), (1, 1), (16, 5), (5, 16), (96, 32), (512, 144)):
        case = Case(device, (rank, rope))
        latent = case.input(pair[0], (6, rank), name="latent")
        rope_key = case.input(pair[0], (6, rope), name="rope_key")
        shape = (3, 4, rank + rope) if paged else (12, rank + rope)
        cache = case.output(pair[1], shape, name="cache")
        scale = 0.37 if pair[1] in QUANTISED else None
        case.store_mla(latent, rope_key, cache, shuffled_slots(case, 6, 12), scale=scale)


@pytest.mark.parametrize("misalign", [1, 2, 4, 8])
@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
def test_mla_alignment(device, pair, misalign):
    for which, (rank, rope) in itertools.product(range(3), ((64, 32), (24, 8))):
        case = Case(device, (which, rank))
        off = [misalign if i == which else 0 for i in range(3)]
        latent = case.input(pair[0], (4, rank), misalign=off[0])
        rope_key = case.input(pair[0], (4, rope), misalign=off[1])
        cache = case.output(pair[1], (6, rank + rope), misalign=off[2])
        case.store_mla(latent, rope_key, cache, [4, 5, -1, 0])


MLA_VIEWS = {
    "one projection": lambda c: (
        lambda both: (both.sub(lambda a: a[:, :24]), both.sub(lambda a: a[:, 24:]))
    )(c.input("bf16", (5, 32))),
    "reversed and broadcast": lambda c: (
        c.input("bf16", (5, 24), lambda a: a[::-1]),
        c.input("bf16", (1, 8), lambda a: np.broadcast_to(a, (5, 8))),
    ),
    "every other row": lambda c: (
        c.input("bf16", (10, 24), lambda a: a[1::2]),
        c.input("bf16", (15, 9), lambda a: a[::3, 1:]),
    ),
    "more rows than slots": lambda c: (c.input("bf16", (8, 24)), c.input("bf16", (8, 8))),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("cache_view", ["slots", "pages", "layer", "wider"])
@pytest.mark.parametrize("view", MLA_VIEWS)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_mla_views(device, fmt, view, cache_view):
    case = Case(device, 51)
    latent, rope_key = MLA_VIEWS[view](case)
    cache = {
        "slots": lambda: case.output(fmt, (8, 32)),
        "pages": lambda: case.output(fmt, (2, 4, 32)),
        "layer": lambda: case.output(fmt, (2, 3, 4, 32), lambda a: a[:, 1]),
        "wider": lambda: case.output(fmt, (2, 4, 37), lambda a: a[..., 3:35]),
    }[cache_view]()
    case.store_mla(latent, rope_key, cache, case.slots([7, 0, -1, 4, 3], "int32", 2))


@pytest.mark.parametrize("fmt", QUANTISED)
def test_mla_scale(device, fmt):
    for scale in (None, 1.0, 0.013, np.float32([0.7])):
        case = Case(device, 52)
        values = np.resize(telling_values("fp32", fmt), (8, 128))
        latent = case.place(values[:, :96], "fp32")
        rope_key = case.place(values[:, 96:], "fp32")
        case.store_mla(latent, rope_key, case.output(fmt, (8, 128)), range(8), scale=scale)


def test_mla_scaling_is_one_float32_division(device):
    rng = np.random.default_rng(53)
    scale, values = traps("fp8_e4m3", by_reciprocal, rng.uniform(0.01, 4, 200).astype(np.float32))
    assert values.size >= 8, "the input tells nothing"
    case = Case(device, 53)
    latent = case.place(np.resize(values, (2, 40)), "fp32")
    rope_key = case.place(np.resize(values[::-1], (2, 24)), "fp32")
    case.store_mla(latent, rope_key, case.output("fp8_e4m3", (2, 64)), [1, 0], scale=float(scale))


def test_mla_slots(device):
    case = Case(device, 54)
    case.store_mla(*mla(case), [3, -5, 7, 0, 5, 2], skip_slot=5)
    case.store_mla(*mla(case), [3, 8, -1, 0, 2**32 + 1, 2])
    case.store_mla(*mla(case), [3, 6, -(2**32) + 1, 0, 1, 777])
    case.store_mla(*mla(case), [])
    case.store_mla(*mla(case), [7, 2], stream=device.stream())
