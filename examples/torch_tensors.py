"""Torch tensors in and out, without a copy; kernels run on torch's current stream."""

import torch

import kvcupy as kv

device = "cuda" if kv.default_device().name.startswith("cuda") else "cpu"
keys, values = (torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16, device=device) for _ in "kv")
pool = kv.KVPool.wrap([keys], [values])  # the tensors' memory

rows = torch.randn(3, 2, 64, dtype=torch.bfloat16, device=device)
slots = torch.tensor([0, 17, 35], device=device)
kv.store_kv(rows, -rows, pool.k(0), pool.v(0), slots)

print(torch.equal(keys.view(-1, 2, 64)[slots], rows))  # True: no copy was made
print(torch.equal(pool.torch_v(0), values), pool.torch_v(0).data_ptr() == values.data_ptr())
