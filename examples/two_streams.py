"""Load pages on a copy stream while the main stream computes; events order the two."""

import sys

import numpy as np

import kvcupy as kv

device = kv.default_device()
pool = kv.KVPool(256, 16, 8, 8, 128, device=device)
on_host = kv.KVPool(256, 16, 8, 8, 128, layout="page_first", placement="pinned", device=device)
pages = np.arange(128)
main, copy = device.stream(), device.stream()
rows = device.zeros((2048, 8, 128), "bf16")
slots = device.asarray(np.arange(2048) + 128 * 16)  # not the pages that are loaded

with kv.timeline() as timeline:
    kv.fork(main, copy)  # copy waits for all work queued on main so far
    kv.transfer_pages(on_host, pool, pages, pages, stream=copy)
    for layer in range(8):
        kv.store_kv(rows, rows, pool.k(layer), pool.v(layer), slots, stream=main)
    kv.join(main, copy)  # main waits for all work queued on copy
    main.synchronize()

for span in timeline.spans:
    print(f"{span.lane:10} {span.name:16} {span.start_us:9.0f} + {span.duration_us:7.0f} us")
if len(sys.argv) > 1:  # python two_streams.py overlap.json
    timeline.save(sys.argv[1])
