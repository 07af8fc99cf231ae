"""`PagedKVCache` whose four-bit rows are stored rotated."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import from_values, full_only
from test_four_bit_pages import (
    WIDTH,
    attended,
    check_contents_forks_and_files,
    new_cache,
    read,
)

import kvcupy as kv
from kvcupy.reference.attention import rotate_keys


@pytest.mark.parametrize("latent_dim", [None, 4 * WIDTH], ids=["KV", "latent"])
@pytest.mark.parametrize("fmt", ["nvfp4", full_only("int4")])
def test_contents_forks_and_files(device, fmt, latent_dim, tmp_path):
    if fmt == "int4" and latent_dim:
        pytest.skip("latents may not be int4")
    file = tmp_path / "sequence.safetensors"
    check_contents_forks_and_files(device, f"{fmt}+hadamard", latent_dim, file)
    with pytest.raises(ValueError, match="hadamard"):
        new_cache(device, fmt, latent_dim).load_sequence(0, file)


@pytest.mark.parametrize("mode", ["none", full_only("normal")])
def test_latents(device, mode):
    """The latent alone is rotated, not the rope part."""
    latent_dim, rng = 4 * WIDTH, np.random.default_rng(5)
    table = None if mode == "none" else kv.rope_table(64, 2 * WIDTH, device=device)
    cache = new_cache(device, "nvfp4+hadamard", latent_dim, rope=table, rope_mode=mode)
    cache.add_sequence(0)
    for count in (6, 1):
        query, latent, key = (
            from_values(rng.standard_normal(shape) * 0.3, "bf16")
            for shape in ((count, 4, 6 * WIDTH), (count, latent_dim), (count, 2 * WIDTH))
        )
        with cache.forward([0], [count]):
            arrays = map(device.asarray, (query, latent, key))
            out = cache.attention_mla(1, *arrays, sm_scale=(6 * WIDTH) ** -0.5)
            device.synchronize()
    assert np.isfinite(device.to_numpy(out).astype(np.float32)).all()
    parts = read(cache, 0, 0, 7)
    latents, keys = (np.asarray(x[1], np.float32).reshape(7, 1, -1) for x in parts)
    query = query.astype(np.float64)
    if mode != "none":  # the query of the last token
        query = rotate_keys(query, device.to_numpy(table), np.array([6]), start=latent_dim)
    k = np.concatenate([latents, keys], axis=-1)
    want = attended(query, k, latents, 4)
    np.testing.assert_allclose(device.to_numpy(out).astype(np.float64), want, atol=0.02)


@pytest.mark.parametrize("dtype, demoted", [("nvfp4", ""), ("int8", ""), ("bf16", "nvfp4")])
def test_rope_in_attention_is_refused(device, dtype, demoted):
    """Keys of quantized caches are not rotated on read."""
    inline = {"rope": kv.rope_table(64, WIDTH, device=device), "rope_mode": "inline"}
    with pytest.raises(ValueError, match=r'^rope_mode: expected "normal" or "none".* quantized'):
        new_cache(device, dtype, **inline, **demoted_to(demoted))


@pytest.mark.parametrize("dtype", ["mxfp4", "int4+hadamard"])
def test_latents_of_some_formats_are_refused(device, dtype):
    with pytest.raises(ValueError, match=r"^dtype: expected nvfp4, or 8 bits or more, got "):
        new_cache(device, dtype, 4 * WIDTH)


def demoted_to(encoding):
    return {"demotion": kv.Demotion(encoding, recent=4)} if encoding else {}
