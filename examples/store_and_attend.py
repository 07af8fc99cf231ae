"""The smallest decode step: write K and V of new tokens into pages, and attend over them."""

import numpy as np

import kvcupy as kv

device = kv.default_device()  # a GPU if there is one, else the CPU
page_size, lengths = 16, np.array([20, 5], np.int32)  # of two sequences, the new tokens included
table = np.array([[7, 2], [4, 0]], np.int32)  # their pages, padded

k_cache, v_cache = (device.zeros((8, page_size, 2, 64), "bf16") for _ in "kv")
key, value, query = (device.asarray(np.ones((2, n, 64), np.float32)) for n in (2, 2, 8))
block_table, seq_lens, ones = map(device.asarray, (table, lengths, np.ones(2, np.int32)))

slots = kv.slot_mapping(block_table, seq_lens, ones, page_size)
kv.store_kv(key, value, k_cache, v_cache, slots)
out = kv.paged_attention(query, k_cache, v_cache, block_table, seq_lens)

print("slots:", device.to_numpy(slots))  # [35 68]: page * page_size + offset
print("attention:", device.to_numpy(out)[:, 0, 0].round(3))
