"""A program that uses a shared store: python shared_users.py URL SEED SECONDS.

It puts and gets blocks whose contents follow from their hashes, and fails if one is wrong.
"""

from __future__ import annotations

import random
import sys
import time

from shared_cases import Writer, block_hashes

from kvcupy.remote.stores import store

HASHES = block_hashes(48)


def use(url, seed, seconds):
    store._SKIP_S = store._NEGATIVE_CACHE_TTL_S = 0.02  # a server that was lost is asked again soon
    order = random.Random(seed)
    hits = 0
    with Writer(
        url, deadline_s=2.0, layout=order.choice(["page_first_direct", "page_first"])
    ) as user:
        print("open", flush=True)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            user.put(*order.sample(HASHES, 8))
            hits += sum(user.get(*order.sample(HASHES, 8)))
        print(hits, user.store.stats()["lost"])


if __name__ == "__main__":
    use(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
