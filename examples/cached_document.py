"""Compute a document once, and use its keys and values after another prefix.

The document's keys are rotated on by the difference of positions, its values are copied. Its tokens
did not attend to the new prefix, so the result approximates a prefill; CacheBlend (arXiv
2405.16444) and EPIC (arXiv 2410.15332) recompute some tokens, as the first ones are here.
"""

import numpy as np

import kvcupy as kv

HEADS, KV_HEADS, WIDTH, LAYERS, RECOMPUTED = 8, 2, 64, 2, 16
device = kv.default_device()
rope = kv.rope_table(4096, WIDTH, device=device)
cache = kv.PagedKVCache(
    num_layers=LAYERS, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, num_pages=32,
    dtype="fp32", device=device, rope=rope,
)  # fmt: skip
rng = np.random.default_rng(0)
document = rng.standard_normal((100, HEADS + 2 * KV_HEADS, WIDTH), np.float32)  # packed q, k, v


def append(seq, rows):
    """Run a step; here, the packed rows stand for what a model computes in every layer."""
    with cache.forward([seq], [len(rows)]):
        for layer in range(LAYERS):
            cache.attention_qkv(layer, device.asarray(rows))


def paste(seq, source, start):
    """Append the tokens of `source` from `start` on to `seq`, without computing them."""
    k, v = (x.copy() for x in cache.get_kv(source, start, cache.sequence_length(source)))
    first, count = cache.sequence_length(seq), k.shape[1]
    moved = kv.KVPool.wrap(k[:, None], v[:, None])  # one page of `count` tokens in each layer
    page = device.asarray(np.array([0]))
    kv.shift_pages(moved, page, first - start, rope, interleaved=False)
    append(seq, np.zeros((count, *document.shape[1:]), np.float32))  # allocates their slots
    cache.set_kv(seq, first, k, v)


cache.add_sequence("document")
append("document", document)  # once, from position 0 on
cache.add_sequence("prompt")
prefix = rng.standard_normal((37, *document.shape[1:]), np.float32)
append("prompt", np.concatenate((prefix, document[:RECOMPUTED])))
paste("prompt", "document", RECOMPUTED)

cache.add_sequence("computed")  # the same prompt, computed as a whole
append("computed", np.concatenate((prefix, document)))
pasted, computed = (device.to_numpy(cache.get_kv(seq, 0, 137)[0]) for seq in ("prompt", "computed"))
print(f"{len(document) - RECOMPUTED} of 137 tokens were not computed again")
print(f"largest difference of a key: {np.abs(pasted - computed).max():.0e}")
