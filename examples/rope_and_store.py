"""Rotate queries and keys and write the keys to an fp8 cache, in one launch."""

import numpy as np

import kvcupy as kv

device = kv.default_device()
rng = np.random.default_rng(0)
query, key, value = (
    device.asarray(rng.standard_normal((4, heads, 128)).astype(np.float32)) for heads in (8, 2, 2)
)
k_cache, v_cache = (device.zeros((16, 16, 2, 128), "fp8_e4m3") for _ in "kv")
table = kv.rope_table(4096, 128, base=500000.0, device=device)
positions, slots = device.asarray(np.arange(4, dtype=np.int32)), device.asarray(np.arange(4))

before = device.to_numpy(value).copy()
kv.rope_store_kv(query, key, value, table, positions, k_cache, v_cache, slots, v_scale=0.02)
_, cached = kv.gather_kv(k_cache, v_cache, slots, v_scale=0.02, dtype="fp32")

error = np.abs(device.to_numpy(cached) - before).max() / np.abs(before).max()
print(f"V in fp8: largest error {error:.1%} of the largest value")
