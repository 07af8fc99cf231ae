"""A pool of the device, one of the host, an engine between them, and streams that are held up."""

from __future__ import annotations

import time

import numpy as np

import kvcupy as kv

NUM_LAYERS = 3
SHAPE = {"page_size": 2, "num_layers": NUM_LAYERS, "num_kv_heads": 2, "head_dim": 4}
PATIENCE_S = 60  # nothing here takes as long; a test that hangs fails instead


def pool_of(device, num_pages, *, placement="device", **changes):
    return kv.KVPool(
        num_pages, **{**SHAPE, "dtype": "fp16", **changes}, placement=placement, device=device
    )


def parts_of(pool):
    """The views of all layers, K and V."""
    return [view(layer) for view in (pool.k, pool.v) for layer in range(pool.num_layers)]


def as_bits(pool, array):
    """An array of a pool as NumPy, (pages, bytes a page)."""
    found = pool.device.to_numpy(array) if pool.placement == "device" else np.array(array)
    return np.ascontiguousarray(found).reshape(found.shape[0], -1).view(np.uint8)


def contents(pool):
    """All bytes of a pool, (pages, bytes a page), in one order for every layout."""
    return np.concatenate([as_bits(pool, part) for part in parts_of(pool)], axis=1)


def page_values(pool, seed):
    """What a page may be filled with: an array for each of `parts_of`, without the page."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(part.shape[1:]).astype(np.float16) for part in parts_of(pool)]


def bits_of(values):
    """The bytes of such a page, as in a row of `contents`."""
    return np.concatenate([np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in values])


def load_kernels(device_pool, host_pool, **options):
    """Transfer pages both ways: a first load on a GPU waits for the device, and that for a gate."""
    if kv.device(device_pool.device).kind != "cuda":
        return
    engine = kv.TransferEngine(device_pool, host_pool, **options)
    count = min(device_pool.num_pages, host_pool.num_pages)
    for pages in ([0], [0, 1], [3, 1, 0]):
        there = [page for page in pages if page < count]
        engine.save(there, there).synchronize()
        engine.load(there, there).synchronize()
    for pool in (device_pool, host_pool):
        pool.allocator._poll()  # forgets them


class World:
    """Pools filled with random numbers, an engine, and a compute stream.

    `compute` writes and reads pages of the device pool. Each page that it reads goes to an array
    for that read alone, so that it can be compared later.
    """

    def __init__(self, device, device_pool=None, host_pool=None, **engine):
        self.device = device
        self.device_pool = device_pool or pool_of(device, 8)
        self.host_pool = host_pool or pool_of(device, 12, layout="page_first", placement="pinned")
        for pool, seed in ((self.device_pool, 1000), (self.host_pool, 2000)):
            for page in range(pool.num_pages):
                self.write(pool, page, page_values(pool, seed + page))
        load_kernels(self.device_pool, self.host_pool, **engine)
        device.synchronize()
        self.before = (contents(self.device_pool), contents(self.host_pool))
        self.engine = kv.TransferEngine(self.device_pool, self.host_pool, **engine)
        self.compute = device.stream()
        self.compute.name = "compute"

    @property
    def streams(self):
        return {
            "compute": self.compute,
            "load": self.engine.load_stream,
            "save": self.engine.save_stream,
        }

    def write(self, pool, page, values, stream=None):
        for part, value in zip(parts_of(pool), values, strict=True):
            on_host = pool.placement != "device"
            source = value if on_host else self.device.asarray(value)
            if on_host:
                part[page] = source
            else:
                self.device.copy(part[page], source, stream=stream)

    def read(self, page, stream=None, layers=None):
        """Let a stream copy a page of the device pool away; return a function for its bytes."""
        pool, copies = self.device_pool, []
        selected = range(pool.num_layers) if layers is None else layers
        for view in (pool.k, pool.v):
            for layer in selected:
                part = view(layer)[page]
                copies.append(self.device.zeros(part.shape, np.float16))
                self.device.copy(copies[-1], part, stream=stream)
        return lambda: bits_of([self.device.to_numpy(copy) for copy in copies])

    def saved(self, host_page):
        """The bytes of a page of the host pool."""
        return contents(self.host_pool)[host_page]

    def loaded(self, device_page):
        """The bytes of a page of the device pool."""
        return contents(self.device_pool)[device_page]


def layer_bits(pool, row, layer):
    """The part of a row of `contents` that belongs to one layer, K then V."""
    pieces = np.split(row, 2 * pool.num_layers)
    return np.concatenate([pieces[layer], pieces[pool.num_layers + layer]])


def transfers_in(log, device):
    """The operations that an engine has announced.

    Kernels of a GPU do not reach lists of pages in pageable memory, so there each batch may send
    its own up first, as a copy.
    """
    return [o for o in log.operations if device.kind == "host" or o.name != "copy"]


def poll(done, patience_s):
    """Wait until `done()`, or for so long; return which."""
    until = time.monotonic() + patience_s
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True
