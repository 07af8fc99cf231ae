"""The protocols between streams that kvcupy relies on, as small programs that can be explored.

Each takes a device, puts work on new streams, and returns all that must not depend on their
order. Nothing is held up, and no thread is started: the simulated device decides who goes first.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import paged_world

import kvcupy as kv

SHAPE = {"page_size": 2, "num_layers": 2, "num_kv_heads": 1, "head_dim": 4, "dtype": "fp32"}
ROW = (2, 1, 4)  # a page of a layer


def parts_of(pool, layers=(0, 1)):
    """Return layer and array of K and V of each layer."""
    return [(layer, side(layer)) for layer in layers for side in (pool.k, pool.v)]


class Pools:
    """A pool of the device, one of the host, and a compute stream that writes and reads pages."""

    def __init__(self, device, on_device=4, on_host=4, **host):
        self.device = device
        self.pool = kv.KVPool(on_device, **SHAPE, device=device)
        self.host = kv.KVPool(on_host, **SHAPE, placement="pinned", device=device, **host)
        self.compute = device.stream()
        self.compute.name = "compute"
        self.seen = []
        for sign, pool in ((1, self.pool), (-1, self.host)):
            for layer, part in parts_of(pool):
                for page in range(pool.num_pages):
                    part[page] = sign * (10 * page + layer + 1)
        # Values to write, so that no program allocates in between.
        self._values = itertools.count(100)

    def write(self, page, stream=None, layers=(0, 1)):
        value = np.full(ROW, next(self._values), np.float32)
        for _, part in parts_of(self.pool, layers):
            self.device.copy(part[page], value, stream=stream or self.compute)

    def read(self, page, stream=None, layers=(0, 1)):
        for _, part in parts_of(self.pool, layers):
            self.seen.append(self.device.zeros(ROW, "fp32"))
            self.device.copy(self.seen[-1], part[page], stream=stream or self.compute)

    def on_host(self, *pages):
        """What pages of the host pool hold, which nothing writes any more."""
        for _, part in parts_of(self.host):
            for page in pages:
                with kv.declare(reads=part[page]):
                    self.seen.append(np.array(part[page]))

    def fill(self, page):
        """Let the host overwrite a page of the host pool."""
        for _, part in parts_of(self.host):
            with kv.declare(writes=part[page]):
                part[page] = 77

    def results(self):
        self.device.synchronize()
        return self.seen

    def all_results(self):
        """What all pages hold, when all is over."""
        self.device.synchronize()
        for page in range(self.pool.num_pages):
            self.read(page)
        self.on_host(*range(self.host.num_pages))
        return self.results()


# --- Streams --------------------------------------------------------------------------------------


def fork_and_join(device):
    x, y = device.zeros(4, "fp32"), device.zeros(4, "fp32")
    main, side = device.stream(), device.stream()
    device.copy(x, np.ones(4, np.float32), stream=main)
    kv.fork(main, side)
    device.copy(y, x, stream=side)
    kv.join(main, side)
    device.copy(x, y, stream=main)
    device.copy(y, np.zeros(4, np.float32), stream=main)
    device.synchronize()
    return x, y


def alt_stream(device):
    """K is stored on one stream and V on another, between what comes before and after."""
    rng = np.random.default_rng(3)
    shapes = {"query": (2, 2, 8), "key": (2, 1, 8), "value": (2, 1, 8)}
    rows = {name: device.zeros(shape, "fp32") for name, shape in shapes.items()}
    k, v = (device.zeros((4, 1, 8), "fp32") for _ in "kv")
    table = kv.rope_table(8, 8, device=device)
    positions, slots = device.asarray(np.array([1, 5])), device.asarray(np.array([2, 0]))
    main, side, seen = device.stream(), device.stream(), []
    for _ in range(2):  # the second call overwrites what the first one reads
        for name, shape in shapes.items():
            value = rng.standard_normal(shape).astype(np.float32)
            device.copy(rows[name], value, stream=main)
        kv.rope_store_kv(
            *rows.values(), table, positions, k, v, slots, alt_stream=side, stream=main
        )
        for cache in (k, v):
            seen.append(device.zeros(cache.shape, "fp32"))
            device.copy(seen[-1], cache, stream=main)
    device.synchronize()
    return seen


# --- The transfer engine --------------------------------------------------------------------------


def load_by_layer(device):
    """Into pages that the compute stream has read; it reads each layer as that arrives."""
    w = Pools(device)
    engine = kv.TransferEngine(w.pool, w.host)
    w.read(2)
    load = engine.load([1], [2], after=w.compute)
    for layer in (0, 1):
        load.wait_layer(layer, w.compute)
        w.read(2, layers=[layer])
    return w.results()


def load(device):
    """Into pages that the compute stream has written; the host looks whether it is there."""
    w = Pools(device)
    engine = kv.TransferEngine(w.pool, w.host)
    w.write(2)
    first = engine.load([1], [2], after=w.compute)
    first.wait(w.compute)
    w.read(2)
    second = engine.load([3], [3], after=w.compute)
    second.synchronize()
    w.read(3, device.stream())
    third = engine.load([0], [0], after=w.compute)
    while not third.done():
        pass
    w.read(0, device.stream())
    return w.results()


def save(device):
    """Of pages that the compute stream has written, and overwrites afterwards."""
    w = Pools(device)
    engine = kv.TransferEngine(w.pool, w.host)
    w.write(1)
    transfer = engine.save([1], [3], after=w.compute)
    transfer.wait(w.compute)
    w.write(1)
    w.read(1)
    again = engine.save([1], [2], after=w.compute)
    again.synchronize()
    w.on_host(2, 3)
    return w.results()


def save_and_load_the_same_pages(device):
    """The later of two calls waits for the earlier, on either side, in either direction."""
    w = Pools(device, 6, 6)
    engine = kv.TransferEngine(w.pool, w.host)
    for saved, loaded in ((([0], [1]), ([1], [2])), (([3], [2]), ([4], [3]))):
        engine.save(*saved, after=w.compute)
        engine.load(*loaded, after=w.compute)
    for loaded, saved in ((([5], [4]), ([4], [0])), (([3], [5]), ([1], [3]))):
        engine.load(*loaded, after=w.compute)
        engine.save(*saved, after=w.compute)
    engine._flush()
    return w.all_results()


def batches_that_are_over_are_forgotten(device):
    """A queue looks which of its batches are over, and waits for the others."""
    w = Pools(device, 6, 6)
    streams = {"load_stream": device.stream(), "save_stream": device.stream()}
    engine = kv.TransferEngine(w.pool, w.host, **streams)  # which does not wait for its batches
    engine.save([0], [1], after=w.compute)
    engine._flush()
    engine.save([1], [2], after=w.compute)
    engine._flush()  # which asks for the first
    engine.load([1], [3], after=w.compute)
    engine.load([2], [4], after=w.compute)
    engine._flush()
    engine.load([0], [5], after=w.compute)
    engine._flush()
    engine.save([4], [5], after=w.compute)
    engine.save([3], [4], after=w.compute)
    engine._flush()
    return w.all_results()


def pages_freed_in_flight(device):
    """They are allocated again, and written by another stream, when the transfer is over."""
    w = Pools(device, 2, 4)
    engine, allocator, other = kv.TransferEngine(w.pool, w.host), w.pool.allocator, device.stream()
    pages = allocator.alloc(2)
    w.write(pages[0])
    w.write(pages[1])
    save = engine.save(pages, [0, 1], after=w.compute)
    allocator.free(pages[:1])
    (page,) = allocator.alloc(1)
    w.write(page, other)
    host = w.host.allocator.alloc(4)
    load = engine.load(host[2:3], [page], after=other)
    engine._flush()
    w.host.allocator.free(host[2:3])
    w.fill(w.host.allocator.alloc(1)[0])
    load.wait(other)
    w.read(page, other)
    save.synchronize()
    w.on_host(0, 1)
    return w.results()


# --- Tiers ----------------------------------------------------------------------------------------


class Tiers(Pools):
    """A tiered cache; `blocks` are written by the compute stream, and known by the name of each."""

    def __init__(self, device, on_device=3, on_host=6, **options):
        super().__init__(device, on_device, on_host, layout="page_first")
        self.cache = kv.TieredCache(self.pool, self.host, **options)

    def insert(self, *hashes, stream=None, times=1):
        """Write blocks, so many times, and insert them."""
        stream = stream or self.compute
        pages = self.pool.allocator.alloc(len(hashes))
        for page in pages.tolist() * times:
            self.write(page, stream)
        self.pool.allocator.free(self.cache.insert(list(hashes), pages, after=stream))

    def use(self, *hashes, stream=None, by_layer=False, settle=True):
        """Acquire, wait and read. Unless it settles, only what follows on `stream` may evict."""
        stream = stream or self.compute
        with self.cache.acquire(list(hashes), after=stream, deadline_s=0) as lease:
            self.seen.append(lease.num_blocks)
            if not by_layer:
                lease.wait(stream)
            for layer in (0, 1):
                if by_layer:
                    lease.wait_layer(layer, stream)
                for page in lease.pages.tolist():
                    self.read(page, stream, [layer])
            if settle:
                stream.synchronize()  # pages must not be read when the lease is released

    def results(self):
        self.cache.flush()
        self.device.synchronize()
        self.cache.close()
        return super().results()


def tiered_eviction(device):
    """Evicted pages are saved first, then written by another stream, and come back by layer."""
    w = Tiers(device, write="back")
    w.insert(1, 2, 3)
    w.cache.evict(2)
    w.insert(4, 5, stream=device.stream())
    w.use(1, 2, by_layer=True)
    return w.results()


def tiered_write_through(device):
    """Blocks are saved as they are inserted, and read by another stream while they are written."""
    w = Tiers(device)
    other = device.stream()
    w.insert(1, 2)
    w.use(1, 2, stream=other, by_layer=True)
    w.cache.evict(2)
    w.insert(3, 4, 5, stream=other)
    w.use(2, 1)
    return w.results()


def acquire_behind_readers(device):
    """What is evicted is still being written by one stream, and read by the one that acquires."""
    w = Tiers(device, 2, 4, write="back")
    other = device.stream()
    w.insert(1, 2)
    w.cache.evict(2)
    w.insert(3, 4, times=4)
    w.use(3, 4, stream=other, by_layer=True, settle=False)
    w.use(1, 2, stream=other)
    return w.results()


def leased_by_the_host(device):
    """The host waits for a lease, then asks for one; a stream that waits for neither reads."""
    w = Tiers(device, 4, 4, write="back")
    w.insert(1, 2, 3)
    w.cache.evict(3)
    for hashes in ([1], [2, 3]):
        with w.cache.acquire(hashes, after=w.compute) as lease:
            if len(hashes) == 1:
                lease.completion.synchronize()
            else:
                while not lease.completion.done():
                    pass
            reader = device.stream()
            for page in lease.pages.tolist():
                w.read(page, reader)
            reader.synchronize()
    return w.results()


def inserted_and_cleared(device):
    """Pages that are forgotten while a stream writes them are others' when it has."""
    w = Tiers(device, 2, 2, write="back")
    w.insert(1, 2)
    w.cache.clear()
    w.insert(3, 4, stream=device.stream())
    w.use(4, 3)
    w.use(3, 4, stream=device.stream())
    return w.results()


# --- The paged cache ------------------------------------------------------------------------------


class World(paged_world.World):
    """A world whose streams nothing holds up."""

    def __init__(self, device, **options):
        options = {"steps": 8, "tokens": 12, **options}
        options.pop("control", None)
        super().__init__(device, **options)

    def gate(self, name):
        return paged_world._Open()

    def finish(self, gate, name):
        pass

    def finish_on_host(self, gate, work):
        work()


def tiers_of(world, num_pages):
    """A tiered cache over the pages of a world's cache."""
    pool = world.cache.pool
    host = kv.KVPool(
        num_pages, pool.page_size, pool.num_layers, pool.num_kv_heads, pool.head_dim,
        dtype=pool.dtype, placement="pinned", device=world.device,
    )  # fmt: skip
    return kv.TieredCache(pool, host)


def offload_and_onboard(device):
    """A sequence goes to the host and back; its pages are others' meanwhile."""
    w = World(device, num_pages=4)
    w.cache.attach(tiers_of(w, 4))
    w.prefill("a", 9)
    w.cache.offload("a")
    w.prefill("b", 6, on="other")
    w.cache.remove_sequence("b")
    w.cache.onboard("a")
    w.step("a", on="other")
    w.read("a", "compute")
    return w.results("a")


def offload_a_fork(device):
    """Pages that two sequences share are saved for one while the other continues."""
    w = World(device, num_pages=8)
    w.cache.attach(tiers_of(w, 4))
    w.prefill("a", 8)
    w.cache.fork_sequence("a", "b")
    w.cache.offload("a")
    w.cache.pop_tokens("b", 2)
    w.step("b", on="other")
    w.write("b", 1, 2, "other")
    w.cache.onboard("a")
    w.read("a", "compute")
    return w.results("ab")


class Groups:
    """A cache of three groups over its tiers; steps update the states before they attend."""

    def __init__(self, device):
        shape = {"num_kv_heads": 1, "head_dim": 4, "dtype": "fp32"}
        self.device, self.compute = device, device.stream()
        self.cache = kv.PagedKVCache(
            num_q_heads=1, page_size=2, device=device, num_tokens=32, max_seq_len=16,
            groups=[
                kv.SlidingWindow(layers=[0], window=3, **shape),
                kv.Recurrent(
                    layers=[1], state={"s": ((4,), "fp32")}, checkpoint_tokens=4
                ),
                kv.FullAttention(layers=[2], **shape),
            ],
        )  # fmt: skip
        self.tiers = kv.TieredCache(groups=self.cache, host_bytes=1 << 13)
        self.cache.attach(self.tiers)
        self.rng, self.seen = np.random.default_rng(3), []

    def step(self, names, count):
        rows = self.rng.standard_normal((2, 3, count * len(names), 1, 4), np.float32)
        rows = [[*map(self.device.asarray, own)] for own in rows]
        self.seen += [self.device.zeros(own[0].shape, "fp32") for own in rows]
        array = self.cache.state(1, "s")
        with self.cache.forward(list(names), [count] * len(names)):
            slots = self.cache.state_slots(stream=self.compute)

            def update():
                array[slots] = 2 * array[slots] + count

            live = [array[slot] for slot in self.cache._states.slots(names)]
            with kv.declare(reads=(slots,), writes=live, stream=self.compute):
                self.compute.call(update)
            for layer, own, out in zip((0, 2), rows, self.seen[-2:], strict=True):
                self.cache.attention(layer, *own, out=out, stream=self.compute)

    def results(self, *names):
        self.device.synchronize()
        states = self.device.to_numpy(self.cache.state(1, "s"))[self.cache._states.slots(names)]
        lengths = np.array([self.cache.sequence_length(name) for name in names])
        return [*map(self.device.to_numpy, self.seen), states, lengths]


def prefix_of_groups(device):
    """A prompt whose pages and state come from host memory, and a fork of it at once."""
    w = Groups(device)
    hashes = kv.block_hashes(range(8), 2)
    w.cache.add_sequence("a", hashes=hashes)
    for count in (4, 4, 1):
        w.step(["a"], count)
    w.cache.remove_sequence("a")
    w.tiers.evict(16)
    w.cache.add_sequence("a", hashes=hashes)
    w.cache.fork_sequence("a", "b")
    w.step(["a", "b"], 1)
    return w.results("a", "b")


def prefix_of_groups_used_at_once(device):
    """The same without the fork, and a pop to a state that is loaded over the live one."""
    w = Groups(device)
    hashes = kv.block_hashes(range(8), 2)
    w.cache.add_sequence("a", hashes=hashes)
    for count in (4, 4, 1):
        w.step(["a"], count)
    w.cache.remove_sequence("a")
    w.tiers.evict(16)
    w.cache.add_sequence("a", hashes=hashes)
    w.step(["a"], 1)
    w.seen.append(np.full(1, w.cache.pop_tokens("a", 3), np.float32))
    w.step(["a"], 3)
    return w.results("a")


def onboard_and_launch(device):
    """A captured step of a sequence whose pages are on their way."""
    w = World(device, num_pages=8)
    w.cache.attach(tiers_of(w, 4))
    decoder = paged_world.Decoder(w, 1)
    w.prefill("a", 6)
    w.cache.offload("a")
    w.prefill("b", 9, on="other")
    w.cache.remove_sequence("b")
    w.cache.onboard("a")
    decoder.step("a")
    return w.results("a")


def saved_to_a_file(device):
    with tempfile.TemporaryDirectory() as folder:
        w = World(device)
        path = Path(folder) / "a.safetensors"
        w.prefill("a", 6)
        w.cache.save_sequence("a", path)
        w.step("a", on="other")
        w.cache.remove_sequence("a")
        w.cache.load_sequence("a", path)
        w.step("a", on="other")
        return w.results("a")
