"""An 8-bit cache with a scale per token and head: half the memory, and its error."""

import numpy as np

import kvcupy as kv

device = kv.default_device()
rng = np.random.default_rng(0)
rows = [
    device.asarray(rng.standard_normal((96, heads, 64)).astype(np.float32)) for heads in (8, 2, 2)
]
outs = {}
for dtype in ("fp32", "bf16", "fp8_e4m3", "int8"):
    shape = dict(num_layers=1, num_q_heads=8, num_kv_heads=2, head_dim=64)
    cache = kv.PagedKVCache(**shape, num_pages=8, dtype=dtype, device=device)
    cache.add_sequence("a")
    with cache.forward(["a"], [96]):
        outs[dtype] = device.to_numpy(cache.attention(0, *rows))
    error = np.linalg.norm(outs[dtype] - outs["fp32"]) / np.linalg.norm(outs["fp32"])
    print(f"{dtype:9} {cache.pool.page_bytes:6} bytes per page, error {error:.2%}")
