"""Answer a prompt with a cached prefix: only the rest is computed."""

import numpy as np

import kvcupy as kv

device = kv.default_device()
shape = dict(num_layers=2, num_q_heads=8, num_kv_heads=2, head_dim=64)
cache = kv.PagedKVCache(**shape, num_pages=64, device=device)
on_host = kv.KVPool(256, 16, 2, 2, 64, layout="page_first", placement="pinned", device=device)
cache.attach(kv.TieredCache(cache.pool, on_host))

system = np.arange(48)  # token ids that all prompts begin with
for number in range(3):
    prompt = np.concatenate([system, 1000 + 20 * number + np.arange(20)])
    hashes = kv.block_hashes(prompt, 16)
    cache.add_sequence(number, hashes=hashes, num_tokens=len(prompt))
    known = cache.sequence_length(number)
    rows = [device.zeros((len(prompt) - known, heads, 64), "bf16") for heads in (8, 2, 2)]
    with cache.forward([number], [len(prompt) - known]):
        for layer in range(2):
            cache.attention(layer, *rows)
    cache.remove_sequence(number)  # its full pages stay cached
    print(f"prompt {number}: {known} of {len(prompt)} tokens were cached")
