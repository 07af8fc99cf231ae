"""Compute a prompt's blocks once for all processes of this machine, including later ones."""

import tempfile

import kvcupy as kv

folder = tempfile.TemporaryDirectory()
url = f"file:{folder.name}/kv"  # all processes pass the same, such as file:/var/cache/kv
hashes = kv.block_hashes(range(160), 16)  # of the prompt, 16 tokens a block


def process(number):
    """Run the work of one process; here one after the other."""
    pool = kv.KVPool(64, 16, 4, 8, 128, layout="page_first_direct", placement="pinned")
    pages = pool.allocator.alloc(len(hashes))
    with kv.BlockStore.open(url, pool, capacity_bytes=2**26) as store:
        known = store.match(hashes)
        there = store.get(hashes[:known], pages[:known])
        print(f"process {number}: {sum(there)} of {len(hashes)} blocks were there")
        for layer in range(4):  # the rest is computed
            pool.k(layer)[pages[known:]] = 1
        print("put:", store.put(hashes[known:], pages[known:]))


process(0)
process(1)
folder.cleanup()
