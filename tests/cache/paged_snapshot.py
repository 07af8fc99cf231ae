"""All that can be seen of a `PagedKVCache`, for comparison before and after a call."""

from __future__ import annotations

import numpy as np

from kvcupy.arrays import bytes_of


def pages_of_pool(pool):
    """K, V and the scales of all layers as bytes, each (num_pages, page_size, bytes)."""
    device = pool.device
    device.synchronize()  # copies may be in flight on the cache's own stream
    found = []
    for view in (pool.k, pool.v, pool.k_scale, pool.v_scale):
        for layer in range(pool.num_layers):
            part = view(layer)
            if part is None:
                continue
            if hasattr(part, "pointer"):
                part = device.carrier(bytes_of(part))
            array = np.ascontiguousarray(device.to_numpy(part))
            found.append(array.reshape(pool.num_pages, pool.page_size, -1).view(np.uint8).copy())
    return found


def snapshot(cache, names):
    """Bytes of the pool and of the sequences, lengths and free pages, to be compared by ==."""
    state = {
        "pool": [part.tobytes() for part in pages_of_pool(cache.pool)],
        "free": cache.num_available_pages,
        "total": cache.total_length,
    }
    for name in names:
        length = cache.sequence_length(name)
        arrays = cache.get_kv(name, 0, length)
        device = cache.pool.device
        arrays = [device.carrier(a) if hasattr(a, "pointer") else a for a in arrays]
        state[name] = (length, *(device.to_numpy(a).tobytes() for a in arrays))
    return state
