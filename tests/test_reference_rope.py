"""Prove the rotary position embedding of the specification against transformers, and by hand.

transformers computes frequencies and angles in float32, which is off by a hundredth of a radian at
position 131,071. With `torch.float` replaced by float64 its own code becomes a precise oracle.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import numpy as np
import pytest
from helpers import DTYPE, from_values

import kvcupy as kv
from kvcupy import reference
from kvcupy.testing.tolerances import ulp

FAR = np.array([0, 1, 2, 1023, 2047, 2048, 2049, 8191, 32768, 100_000, 131_071])
LONG = {
    "short_factor": np.linspace(1, 1.2, 16).tolist(),
    "long_factor": np.linspace(1, 40, 16).tolist(),
}
ORIGINAL = {"original_max_position_embeddings": 4096}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 32.0, **ORIGINAL}
LONGROPE = {"rope_type": "longrope", "factor": 32.0, **LONG, **ORIGINAL}

PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}

#: As in a config whose contexts are extended from 4,096 to 131,072 tokens. Head dimension 32.
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic, two lengths": DYNAMIC,
    "llama3": LLAMA3,
    "llama3, narrow": {**LLAMA3, **ORIGINAL, "factor": 32.0, "low_freq_factor": 2.0,
                       "high_freq_factor": 3.0},
    "yarn": YARN,
    "yarn, betas": {**YARN, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn, attention factor": {**YARN, "factor": 16.0, "attention_factor": 0.7, "mscale": 2.0,
                               "mscale_all_dim": 3.0},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, mscale alone": {**YARN, "factor": 40.0, "mscale": 3.0},
    "yarn, no factor": {**YARN, "factor": 1.0},
    "yarn, factor of the lengths": {**YARN, "factor": None},
    "yarn, steep": {**YARN, "factor": 8.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "longrope": LONGROPE,
    "longrope, factor of the lengths": {"rope_type": "longrope", **LONG, **ORIGINAL},
    "longrope, one length": {"rope_type": "longrope", **LONG},
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.25},
    "proportional": PROPORTIONAL,
    "proportional, odd": {**PROPORTIONAL, "factor": 8.0, "partial_rotary_factor": 0.34},
    "proportional, whole": {"rope_type": "proportional"},
}  # fmt: skip
LENGTHS = [1, 100, 4096, 4097, 131_072, 140_000]


@pytest.fixture
def torch64(monkeypatch):
    """torch, with float64 wherever it says float32."""
    torch = pytest.importorskip("torch")
    # Tables by dtype that modules make when they are imported must have float32 for later tests.
    for module in ("safetensors.torch", "transformers.models.llama.modeling_llama"):
        with suppress(ImportError):
            import_module(module)
    before = torch.get_default_dtype()
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield torch
    torch.set_default_dtype(before)


def llama_config(scaling, base=10000.0):
    """Return a config with such parameters, and what a user passes to `rope_table` from it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=131_072,
        rope_parameters={"rope_theta": base, **scaling},
    )  # fmt: skip
    lengths = {"max_position_embeddings": config.max_position_embeddings}
    return config, {**config.rope_parameters, **lengths}


def frequencies_of(config, context):
    """Return the frequencies and the attention factor that transformers computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    plain = LlamaRotaryEmbedding.compute_default_rope_parameters
    init = ROPE_INIT_FUNCTIONS.get(config.rope_parameters["rope_type"], plain)
    return init(config, device="cpu", seq_len=context)


def test_no_type_of_transformers_is_missing():
    """A type that a newer transformers has needs parameters in `SCALINGS`."""
    pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compared = {scaling["rope_type"] for scaling in SCALINGS.values()}
    assert {*ROPE_INIT_FUNCTIONS} - compared == set()


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_tables_are_those_of_transformers(torch64, name, base, caplog):
    config, scaling = llama_config(SCALINGS[name], base)
    for context in LENGTHS:
        want, attention = frequencies_of(config, context)
        assert want.dtype == torch64.float64
        got, factor = reference.rope_frequencies(context, 32, scaling=scaling)
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-13, err_msg=str(context))
        assert factor == pytest.approx(attention, rel=1e-14), context

        positions = np.append(FAR[context > FAR], context - 1)
        angles = positions[:, None] * want.numpy()
        rows = attention * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        np.testing.assert_allclose(reference.rope_rows(positions, got, factor), rows, atol=1e-9)
        table = kv.rope_table(context, 32, scaling=scaling, device="host")[positions]
        assert (np.abs(table - rows) <= ulp(rows, "fp32") * 0.501 + 1e-9).all(), context
    assert not [r for r in caplog.records if r.name.startswith("kvcupy") and r.levelname != "INFO"]


def test_type_was_once_the_key_of_rope_type():
    new = {"rope_type": "linear", "factor": 4.0}
    want = reference.rope_table(64, 8, scaling=new)
    assert np.array_equal(
        reference.rope_table(64, 8, scaling={"type": "linear", "factor": 4.0}), want
    )
    assert np.array_equal(reference.rope_table(64, 8, scaling={**new, "type": "yarn"}), want)
    for none in (None, {}, {"type": "default"}):
        assert np.array_equal(
            reference.rope_table(64, 8, scaling=none), reference.rope_table(64, 8)
        )


# The rotation --------------------------------------------------------------------------------


def turned_by_hand(row, table_row, interleaved):
    """Multiply complex numbers, one pair after another."""
    pairs = len(table_row) // 2
    result = row.astype(np.complex128).real.copy()
    for i in range(pairs):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        turn = complex(table_row[i], table_row[pairs + i])
        z = complex(row[first], row[second]) * turn
        result[first], result[second] = z.real, z.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 10])
@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
def test_rotation_against_complex_numbers(fmt, rotary_dim, interleaved):
    rng = np.random.default_rng(1)
    table = reference.rope_table(50, rotary_dim)
    positions = np.array([49, 0, 7, 7])
    query = from_values(rng.standard_normal((5, 3, 10)), fmt)
    key = from_values(rng.standard_normal((4, 2, 10)), fmt)
    got = reference.apply_rope(query, key, table, positions, interleaved=interleaved)
    for rows, rotated in zip((query, key), got, strict=True):
        assert rotated.dtype == rows.dtype
        for token, head in np.ndindex(rows.shape[:2]):
            want = rows[token, head]
            if token < 4:
                exact = turned_by_hand(
                    want.astype(np.float64), table[positions[token]].astype(np.float64), interleaved
                )
                want = exact.astype(np.float32 if fmt == "fp32" else np.float64).astype(DTYPE[fmt])
            assert rotated[token, head].tolist() == want.tolist()


def test_norm_against_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    rows = (rng.standard_normal((3, 2, 12)) * 4).astype(np.float32)
    weight = from_values(rng.uniform(0.5, 2, 12), "bf16")
    normed = torch.nn.functional.rms_norm(
        torch.from_numpy(rows).double(), (12,), torch.from_numpy(weight.astype(np.float64)), 1e-3
    )
    rest = reference.rotate(rows, np.ones((3, 4)), np.zeros((3, 4)), norm=weight, eps=1e-3)
    np.testing.assert_allclose(rest, normed.numpy(), rtol=1e-14)
    table = reference.rope_table(9, 8)
    both = [table[[8, 0, 5], half].astype(np.float64) for half in (slice(4), slice(4, 8))]
    exact = reference.rotate(rows, *both, norm=weight, eps=1e-3)
    for token, head in np.ndindex(3, 2):
        want = turned_by_hand(normed[token, head].numpy(), table[[8, 0, 5][token]], False)
        np.testing.assert_allclose(exact[token, head], want, rtol=1e-12)
    _, key = reference.apply_rope(None, rows, table, np.array([8, 0, 5]), key_norm=weight, eps=1e-3)
    assert np.array_equal(key, exact.astype(np.float32))


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        ("qwen2_vl", (2, 3, 3)),
        ("qwen2_vl", (4, 0, 4)),
        ("qwen3_vl", (3, 3, 2)),
        ("qwen3_vl", (4, 2, 2)),
        ("qwen3_vl", (6, 1, 1)),
    ],
    ids=str,
)
def test_sections_are_those_of_qwen(torch64, model, sections):
    transformers = pytest.importorskip("transformers")
    name = {"qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VLText"}[model]
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    config = getattr(transformers, f"{name.removesuffix('Text')}TextConfig")(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)
        },
    )  # fmt: skip
    positions = np.random.default_rng(6).integers(0, 4000, (3, 5))
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)
    expected = rotary(torch64.zeros(1), torch64.from_numpy(positions)[:, None])
    got = reference.cos_sin(
        reference.rope_table(4000, 16), positions, sections, model == "qwen3_vl"
    )
    for values, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.tile(values, 2), want[0].numpy(), atol=6e-8)


# Rotation and store --------------------------------------------------------------------------


@pytest.mark.parametrize("write_key", [True, False])
@pytest.mark.parametrize("query_out", [False, True])
def test_rope_store_kv_is_rotation_then_store(write_key, query_out):
    rng = np.random.default_rng(7)
    query = from_values(rng.standard_normal((6, 3, 8)), "fp16")
    key, value = (from_values(rng.standard_normal((6, 2, w)), "bf16") for w in (8, 5))
    table = reference.rope_table(20, 6)
    positions, slots = np.array([4, 20, 19, 0, 3]), np.array([7, 2, -1, 8])
    caches = [np.full((8, 2, w), 77, np.int8) for w in (8, 5)]
    scales = [np.full((8, 2), -1, np.float32) for _ in range(2)]
    want_q, want_k = reference.apply_rope(query, key, table, positions, interleaved=True)
    want_caches, want_scales = ([a.copy() for a in arrays] for arrays in (caches, scales))
    reference.store_kv(
        want_k,
        value,
        *want_caches,
        np.array([7, -1, -1, 8]),
        k_scale_cache=want_scales[0],
        v_scale_cache=want_scales[1],
    )
    old_q, old_k = query.copy(), key.copy()
    out = np.full_like(query, 9) if query_out else None
    faults = reference.rope_store_kv(
        query,
        key,
        value,
        table,
        positions,
        *caches,
        slots,
        interleaved=True,
        write_key=write_key,
        query_out=out,
        k_scale_cache=scales[0],
        v_scale_cache=scales[1],
    )
    assert faults == ([(1, 20)], [(3, 8)])
    if query_out:  # neither the token without a position nor the row past the positions
        want_q[[1, 5]] = 9
        assert np.array_equal(out, want_q) and np.array_equal(query, old_q)
    else:
        assert np.array_equal(query, want_q) and not np.array_equal(query, old_q)
    assert np.array_equal(key, want_k if write_key else old_k)
    for got, want in zip((*caches, *scales), (*want_caches, *want_scales), strict=True):
        assert np.array_equal(got, want)


def test_rope_store_mla_is_rotation_then_store():
    rng = np.random.default_rng(8)
    query, rope_key = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((4, 3, 6), (4, 6))
    )
    latent = rng.standard_normal((4, 5)).astype(np.float32)
    table, positions, slots = reference.rope_table(9, 6), np.array([8, 0, 9]), np.array([2, 4, 0])
    cache, want = np.zeros((2, 4, 11), np.float16)
    want_q, want_k = reference.apply_rope(query, rope_key, table, positions)
    reference.store_mla(latent, want_k, want, np.array([2, 4, -1]))
    faults = reference.rope_store_mla(query, latent, rope_key, table, positions, cache, slots)
    assert faults == ([(2, 9)], [(1, 4)])
    assert np.array_equal(query, want_q) and np.array_equal(rope_key, want_k)
    assert np.array_equal(cache, want) and cache[2].any() and not cache[0].any()
