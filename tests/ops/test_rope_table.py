"""`rope_table`, by what a user sees of it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import name_values

import kvcupy as kv
from kvcupy import reference
from kvcupy.testing.tolerances import ulp

ORIGINAL = {"original_max_position_embeddings": 512}
LONG = {
    "short_factor": [1.0 + i / 40 for i in range(8)],
    "long_factor": [1.0 + 4 * i for i in range(8)],
}


def assert_table(device, table, max_positions, rotary_dim, **options):
    """Rounded once from float64: half a unit, and 1e-9 for how an angle of 1e5 may be computed."""
    got = np.asarray(device.to_numpy(table))
    assert got.shape == (max_positions, rotary_dim) and got.dtype == np.float32
    want = reference.rope_rows(
        np.arange(max_positions), *reference.rope_frequencies(max_positions, rotary_dim, **options)
    )
    error = np.abs(got - want)
    assert (error <= ulp(want, "fp32") * 0.501 + 1e-9).all(), f"off by {error.max()}"


@pytest.mark.parametrize(
    ("max_positions", "rotary_dim"), [(1, 2), (7, 6), (5, 100), (2000, 16), (131_072, 8)]
)
def test_table(device, max_positions, rotary_dim):
    """`tests/test_reference_rope.py` compares scaled tables with transformers."""
    table = kv.rope_table(max_positions, rotary_dim, base=1e6, device=device.name)
    assert_table(device, table, max_positions, rotary_dim, base=1e6)


WRONG_SCALINGS = [
    {"rope_type": "logarithmic"},
    {"type": "su"},
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": None},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", **ORIGINAL},
    {"rope_type": "yarn", "factor": 2.0},
    {"rope_type": "yarn", **ORIGINAL},
    {"rope_type": "longrope", **LONG},
    {"rope_type": "longrope", **LONG, **ORIGINAL},
    {"rope_type": "longrope", **LONG, "max_position_embeddings": "x"},
    {"rope_type": "longrope", **LONG, **ORIGINAL, "factor": 2.0, "short_mscale": []},
    {"rope_type": "proportional", "partial_rotary_factor": 1.5},
    {"rope_type": "proportional", "partial_rotary_factor": -0.1},
    {"rope_type": "longrope", **ORIGINAL, "short_factor": LONG["short_factor"]},
    {"rope_type": "longrope", **ORIGINAL, "short_factor": [1.0] * 7, "long_factor": [1.0] * 7},
    {"rope_type": "longrope", **LONG, **ORIGINAL, "factor": 2.0, "long_factor": [1.0] * 7},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, **ORIGINAL},
]


@pytest.mark.parametrize("scaling", WRONG_SCALINGS, ids=name_values)
def test_wrong_scalings_of_the_table(device, scaling):
    with pytest.raises(ValueError, match=r"\bscaling\b"):
        kv.rope_table(64, 16, scaling=scaling, device=device)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((64, 7), "rotary_dim"),
        ((64, 0), "rotary_dim"),
        ((64, -2), "rotary_dim"),
        ((-1, 8), "max_positions"),
        ((64, 8.5), "rotary_dim"),
        ((6.5, 8), "max_positions"),
        (("64", 8), "max_positions"),
    ],
    ids=str,
)
def test_wrong_shapes_of_the_table(device, args, name):
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        kv.rope_table(*args, device=device)


# --- Configs of Hugging Face ---


def test_a_length_that_is_missing_is_asked_for(device):
    with pytest.raises(ValueError, match=r"dynamic to have .*; add max_position_embeddings of"):
        kv.rope_table(64, 16, scaling={"rope_type": "dynamic", "factor": 2.0}, device=device)


def test_theta_of_a_config(device):
    scaling = {"rope_type": "default", "rope_theta": 5e5}
    plain = device.to_numpy(kv.rope_table(64, 16, base=5e5, device=device))
    for base in ({}, {"base": 10000.0}, {"base": 5e5}):
        table = device.to_numpy(kv.rope_table(64, 16, scaling=scaling, device=device, **base))
        np.testing.assert_array_equal(table, plain)
    with pytest.raises(ValueError, match=r"^base: expected 500000.0 as in scaling"):
        kv.rope_table(64, 16, base=1e6, scaling=scaling, device=device)
    for theta in (0, -1.0, float("inf"), "5e5", True):
        with pytest.raises(ValueError, match=r"^scaling: expected a .*rope_theta"):
            kv.rope_table(64, 16, scaling={"rope_theta": theta}, device=device)
    none = kv.rope_table(64, 16, scaling={"rope_theta": None}, device=device)
    np.testing.assert_array_equal(
        device.to_numpy(none), device.to_numpy(kv.rope_table(64, 16, device=device))
    )


def test_parameters_by_layer_type(device):
    scaling = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(ValueError, match=r"full_attention, sliding_attention; .*each.*\['full_att"):
        kv.rope_table(64, 16, scaling=scaling, device=device)
    kv.rope_table(64, 16, scaling=scaling["sliding_attention"], device=device)


@pytest.mark.parametrize(
    ("scaling", "ignored"),
    [
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "'mrope_section'"),
        ({"rope_type": "default", "factor": 4.0}, "'factor'"),
        ({"rope_type": "linear", "factor": 4.0, "alpha": 1.0, "beta_fast": 1}, "'alpha', 'beta_f"),
    ],
)
def test_keys_that_are_ignored_are_said(device, scaling, ignored, caplog):
    kv.rope_table(64, 16, scaling=scaling, device=device)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert ignored in caplog.text and scaling["rope_type"] in caplog.text
    caplog.clear()
    kv.rope_table(64, 16, scaling={"type": "linear", "rope_type": "linear", "factor": 2.0,
                                   "attention_factor": None}, device=device)  # fmt: skip
    assert not caplog.records
