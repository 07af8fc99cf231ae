"""Load pages from host memory; the attention of each layer waits only for its own layer."""

import numpy as np

import kvcupy as kv

device = kv.default_device()
pool = kv.KVPool(64, 16, 4, 8, 128, device=device)
on_host = kv.KVPool(64, 16, 4, 8, 128, layout="page_first", placement="pinned", device=device)
engine = kv.TransferEngine(pool, on_host)
main = device.stream()

pages, stored = pool.allocator.alloc(8), on_host.allocator.alloc(8)
engine.save(pages, stored, after=main)
pool.allocator.free(pages)  # allocated again only when the save has read them
fresh = pool.allocator.alloc(8)

load = engine.load(stored, fresh, after=main)
query = device.zeros((1, 32, 128), "bf16")
table, lengths = device.asarray(fresh[None]), device.asarray(np.array([120]))
for layer in range(4):
    load.wait_layer(layer, main)
    kv.paged_attention(query, pool.k(layer), pool.v(layer), table, lengths, stream=main)
main.synchronize()
print(f"{load.num_bytes / 1e6:.1f} MB in {pool.num_layers} layers")
