"""Two streams use one page without order: the order checker names the missing wait."""

import numpy as np

import kvcupy as kv

device = kv.default_device()
main, copy = device.stream(), device.stream()
pool = kv.KVPool(16, 16, 1, 8, 128, device=device)
on_host = kv.KVPool(16, 16, 1, 8, 128, placement="pinned", device=device)
rows, slots = device.zeros((16, 8, 128), "bf16"), device.asarray(np.arange(16))

with kv.order_checker(action="record") as checker:
    kv.store_kv(rows, rows, pool.k(0), pool.v(0), slots, stream=main)
    kv.transfer_pages(pool, on_host, [0], [0], stream=copy)  # may read before the rows are there
    kv.transfer_pages(pool, on_host, [1], [1], stream=copy)  # another page: no report
device.synchronize()
print(checker.reports[0])
