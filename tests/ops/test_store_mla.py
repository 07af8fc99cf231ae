"""`store_mla`, by what a user sees of it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import QUANTISED, Case
from store_calls import PAIRS, by_reciprocal, shuffled_slots, telling_values, traps


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
