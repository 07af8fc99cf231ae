"""Pools over arrays of other libraries: nothing is copied, and all that takes a pool takes them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
from tiered_cases import MemoryStore

import kvcupy as kv
from kvcupy.arrays import probes

torch = pytest.importorskip("torch")

# --- Arrays as other projects lay their caches out, with canaries around every allocation ---

PAGES, SIZE, LAYERS, HEADS, D, DV = 6, 4, 3, 2, 8, 12
GUARD = 64  # bytes before and behind each allocation
CANARY = 0xA5


@dataclass
class Memory:
    """Allocations of some bytes, filled at random between canaries."""

    rng: np.random.Generator
    whole: list[np.ndarray] = field(default_factory=list)

    def array(self, shape, dtype):
        """Return a NumPy array of unsigned integers, and remember what surrounds it."""
        bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
        num_bytes = int(np.prod(shape)) * bits.itemsize
        raw = np.full(num_bytes + 3 * GUARD, CANARY, np.uint8)
        start = -raw.ctypes.data % GUARD + GUARD
        raw[start : start + num_bytes] = self.rng.integers(0, 256, num_bytes, dtype=np.uint8)
        self.whole.append(raw)
        self.whole.append(raw[start : start + num_bytes])
        return raw[start : start + num_bytes].view(bits).reshape(shape)

    def check_canaries(self):
        for raw, inside in zip(self.whole[::2], self.whole[1::2], strict=True):
            start = inside.ctypes.data - raw.ctypes.data
            assert (raw[:start] == CANARY).all() and (raw[start + inside.size :] == CANARY).all()


def tensor(bits, dtype):
    """The same memory as a torch tensor."""
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
    return signed.view(getattr(torch, np.dtype(dtype).name))


@dataclass
class Wrapped:
    """A pool over arrays, and what it holds: of each part, of each layer, (pages, slots, H, W)."""

    pool: object
    parts: list[list[np.ndarray]]
    memory: Memory
    given: object = None

    def bits(self):
        return [[layer.copy() for layer in part] for part in self.parts]


def _vllm(memory, dtype):
    caches = [memory.array((2, PAGES, SIZE, HEADS, D), dtype) for _ in range(LAYERS)]
    tensors = [tensor(c, dtype) for c in caches]
    pool = kv.KVPool.wrap([t[0] for t in tensors], [t[1] for t in tensors])
    return Wrapped(pool, [[c[0] for c in caches], [c[1] for c in caches]], memory, tensors)


def _vllm_pages_first(memory, dtype):
    """K and V of a page side by side: slots of K are spaced unevenly."""
    caches = [memory.array((PAGES, 2, SIZE, HEADS, D), dtype) for _ in range(LAYERS)]
    tensors = [tensor(c, dtype) for c in caches]
    pool = kv.KVPool.wrap([t[:, 0] for t in tensors], [t[:, 1] for t in tensors])
    return Wrapped(pool, [[c[:, i] for c in caches] for i in (0, 1)], memory, tensors)


def _flashinfer_hnd(memory, dtype):
    caches = [memory.array((PAGES, 2, HEADS, SIZE, D), dtype) for _ in range(LAYERS)]
    tensors = [tensor(c, dtype) for c in caches]
    k, v = ([t[:, i].transpose(1, 2) for t in tensors] for i in (0, 1))
    parts = [[c[:, i].swapaxes(1, 2) for c in caches] for i in (0, 1)]
    return Wrapped(kv.KVPool.wrap(k, v), parts, memory, tensors)


def _sglang(memory, dtype):
    """By slots, V wider than K."""
    shapes = [(PAGES * SIZE, HEADS, width) for width in (D, DV)]
    slots = [[memory.array(shape, dtype) for _ in range(LAYERS)] for shape in shapes]
    k, v = ([tensor(a, dtype) for a in part] for part in slots)
    parts = [[a.reshape(PAGES, SIZE, *a.shape[1:]) for a in part] for part in slots]
    return Wrapped(kv.KVPool.wrap(k, v, page_size=SIZE), parts, memory, (k, v))


def _bytes(memory, dtype):
    """Tensors of uint8, as vLLM keeps fp8, tagged."""
    caches = [memory.array((2, PAGES, SIZE, HEADS, D), np.uint8) for _ in range(LAYERS)]
    k, v = (
        [kv.view_as(torch.from_numpy(c[i]), "fp8_e4m3") for c in caches] for i in (0, 1)
    )  # fmt: skip
    return Wrapped(kv.KVPool.wrap(k, v), [[c[i] for c in caches] for i in (0, 1)], memory)


def _one_array(layout):
    order = {"layer_first": "LPSHD", "page_first": "PSLHD", "page_first_direct": "PLSHD",
             "page_head": "PHSLD"}[layout]  # fmt: skip
    sizes = {"L": LAYERS, "P": PAGES, "S": SIZE, "H": HEADS, "D": D}

    def make(memory, dtype):
        arrays = [memory.array(tuple(sizes[a] for a in order), dtype) for _ in range(2)]
        pool = kv.KVPool.wrap(*(a.view(dtype) for a in arrays), layout=layout)
        by_layer = [a.transpose([order.index(axis) for axis in "LPSHD"]) for a in arrays]
        return Wrapped(pool, [list(a) for a in by_layer], memory)

    return make


def _scattered(memory, dtype):
    """Slices of one array in no order: layers 0 and 1 are one group, 2 is another."""
    whole = memory.array((7, 2, PAGES, SIZE, HEADS, D), dtype)
    chosen = (1, 3, 6)
    t = tensor(whole, dtype)
    pool = kv.KVPool.wrap([t[i, 0] for i in chosen], [t[i, 1] for i in chosen])
    return Wrapped(pool, [[whole[i, j] for i in chosen] for j in (0, 1)], memory)


def _mla(memory, dtype):
    arrays = [memory.array((PAGES * SIZE, 1, D + 4), dtype) for _ in range(LAYERS)]
    pool = kv.MLAPool.wrap([tensor(a, dtype) for a in arrays], page_size=SIZE)
    return Wrapped(pool, [[a.reshape(PAGES, SIZE, 1, D + 4) for a in arrays]], memory)


KINDS = {
    "vllm": _vllm,
    "vllm, pages first": _vllm_pages_first,
    "flashinfer, HND": _flashinfer_hnd,
    "sglang": _sglang,
    "bytes": _bytes,
    "scattered": _scattered,
    "mla": _mla,
    **{layout: _one_array(layout) for layout in
       ("layer_first", "page_first", "page_first_direct", "page_head")},
}  # fmt: skip


def make(kind, seed=0, dtype=ml_dtypes.bfloat16) -> Wrapped:
    return KINDS[kind](Memory(np.random.default_rng(seed)), dtype)


def like(wrapped, num_pages, **options):
    """An allocated pool of the same geometry."""
    pool = wrapped.pool
    sizes = (num_pages, pool.page_size, pool.num_layers)
    if isinstance(pool, kv.MLAPool):
        return kv.MLAPool(
            *sizes, pool.latent_dim, pool.rope_dim, dtype=pool.dtype, device="host", **options
        )
    return kv.KVPool(
        *sizes, pool.num_kv_heads, pool.head_dim, v_head_dim=pool.v_head_dim, dtype=pool.dtype,
        device="host", **options,
    )  # fmt: skip


# --- Tests ---

METHODS = ("kernel", "copy", "staged", "auto")
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.fixture(autouse=True)
def on_the_host(device):
    if device.kind != "host":
        pytest.skip("arrays of the host are the host device's")


def assert_bits(wrapped, expected, why=""):
    for part, want in zip(wrapped.parts, expected, strict=True):
        for layer, (got, bits) in enumerate(zip(part, want, strict=True)):
            np.testing.assert_array_equal(got, bits, err_msg=f"layer {layer} {why}")
    wrapped.memory.check_canaries()
    kv.check_faults("host")


# --- What a wrapped pool says ---


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied(kind):
    wrapped = make(kind)
    pool = wrapped.pool
    for layer in range(LAYERS):
        views = pool.views(layer)
        for view, part in zip(views, wrapped.parts, strict=True):
            bits = part[layer]
            assert (view.pointer, view.shape) == (bits.ctypes.data, bits.shape)
        shown = [pool.k(layer)] if len(views) == 1 else [pool.k(layer), pool.v(layer)]
        for array, part in zip(shown, wrapped.parts, strict=True):
            assert array.ctypes.data == part[layer].ctypes.data
            want = part[layer] if len(views) == 2 else part[layer][:, :, 0]
            np.testing.assert_array_equal(array.view(want.dtype), want)


def test_attributes():
    pool = make("sglang").pool
    assert (pool.num_pages, pool.page_size, pool.num_layers, pool.num_kv_heads) == (6, 4, 3, 2)
    assert (pool.head_dim, pool.v_head_dim, pool.dtype) == (8, 12, "bf16")
    assert (pool.layout, pool.placement, pool.device.name) == ("layer_first", "device", "host")
    assert pool.num_bytes == 6 * pool.page_bytes == 2 * 6 * 4 * 3 * 2 * (8 + 12)
    assert pool.allocator.num_free == 6 and pool.k_scale(0) is None
    assert "KVPool of 6 pages of 4, 3 layers of 2 heads of 8 (K) and 12 (V), bf16" in repr(pool)
    assert make("mla").pool.latent_dim == 12
    assert make("bytes").pool.dtype == "fp8_e4m3"


def test_arrays_live_as_long_as_the_pool():
    arrays = [np.zeros((2, 2, 1, 8), np.float16).view(type("Held", (np.ndarray,), {}))
              for _ in range(2)]  # fmt: skip
    held = [weakref.ref(a) for a in arrays]
    pool = kv.KVPool.wrap(arrays[:1], arrays[1:])
    del arrays
    gc.collect()
    assert all(ref() is not None for ref in held)
    pool.k(0)[1] = 3
    assert pool.k(0)[1].all()
    del pool
    gc.collect()
    assert not any(ref() for ref in held)


# --- Transfers ---


@pytest.mark.covering(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_and_loaded_back(kind, layout, method):
    """Bitwise, into other pages and other arrays, with nothing else touched."""
    source, target = make(kind, 1), make(kind, 2)
    pinned = like(source, 9, layout=layout, placement="pinned")
    before, expected = source.bits(), target.bits()
    pages, away, back = [4, 0, 1], [7, 2, 3], [5, 3, 2]
    kv.transfer_pages(source.pool, pinned, pages, away, method=method)
    for part, own in zip(before, (pinned.k, pinned.v), strict=False):
        for layer, bits in enumerate(part):
            got = np.asarray(own(layer)).view(bits.dtype).reshape(9, *bits.shape[1:])
            np.testing.assert_array_equal(got[away], bits[pages])
    kv.transfer_pages(pinned, target.pool, away, back, method=method)
    for want, bits in zip(expected, before, strict=True):
        for layer in range(LAYERS):
            want[layer][back] = bits[layer][pages]
    assert_bits(target, expected)
    assert_bits(source, before)


# --- Tiers ---


@pytest.mark.parametrize("with_store", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "flashinfer, HND", "sglang", "mla"])
def test_tiers_over_arrays_of_others(kind, with_store):
    """Blocks go down to wrapped host memory, or a store, and come back as they were."""
    near, far = make(kind, 1), make(kind, 2)
    stores = [MemoryStore(far.pool)] if with_store else []
    cache = kv.TieredCache(near.pool, far.pool, stores=stores)
    hashes = kv.block_hashes(range(4 * SIZE), SIZE)
    pages = near.pool.allocator.alloc(4)
    kept = near.bits()
    assert cache.insert(hashes, pages) == []
    cache.flush()
    cache.evict(4)
    for part in near.parts:
        for bits in part:
            bits[...] = 0
    with cache.acquire(hashes) as lease:
        assert lease.num_blocks == 4
        lease.wait(None)
        for part, bits in zip(near.parts, kept, strict=True):
            for layer in range(LAYERS):
                np.testing.assert_array_equal(part[layer][lease.pages], bits[layer][pages])
    cache.close()
    near.memory.check_canaries()
    far.memory.check_canaries()


# --- The paged cache ---


def paged(pool, **options):
    return kv.PagedKVCache(num_q_heads=4, pool=pool, device="host", **options)


def run(cache, seed):
    """Prefill, decode, a fork, a tree with moved tokens, a window; return what came out."""
    rng = np.random.default_rng(seed)
    pool, outs = cache.pool, []

    def step(seqs, lengths, **options):
        count = sum(lengths)
        with cache.forward(seqs, lengths, **options):
            for layer in range(pool.num_layers):
                q, k, v = (
                    rng.normal(size=(count, heads, width)).astype(np.float32)
                    for heads, width in ((4, pool.head_dim), (HEADS, pool.head_dim),
                                         (HEADS, pool.v_head_dim))
                )  # fmt: skip
                outs.append(np.array(cache.attention(layer, q, k, v)))

    cache.add_sequence("a")
    step(["a"], [6])
    cache.fork_sequence("a", "b")
    step(["a", "b"], [1, 2])
    step(["a"], [4], token_tree=[[-1, 0, 0, 2]])
    cache.commit_token_tree(["a"], [3])
    step(["a"], [1])
    cache.enable_sliding_window("b", 4, 1)
    step(["b"], [2])
    step(["b"], [1])
    cache.set_kv("b", 1, *[a[:, :2] for a in cache.get_kv("a", 0, 2)])
    for seq in ("a", "b"):
        for rows in cache.get_kv(seq, 0, cache.sequence_length(seq)):
            if isinstance(rows, torch.Tensor):  # as the arrays of the pool are
                rows = rows.float().numpy()
            outs.append(np.array(rows, np.float32))
    return outs


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("mla", "page_head", "bytes",
                                                               "page_first_direct")])  # fmt: skip
def test_a_paged_cache_over_arrays_of_others(kind):
    """The same numbers as over an allocated pool, and the tokens are in the arrays."""
    wrapped = make(kind, 1)
    own = like(wrapped, PAGES)
    cache = paged(wrapped.pool)
    before = [bits.copy() for part in wrapped.parts for bits in part]
    got, want = run(cache, 5), run(paged(own), 5)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert cache.pool is wrapped.pool and cache.num_available_pages < PAGES
    after = [bits for part in wrapped.parts for bits in part]
    assert all((a != b).any() for a, b in zip(after, before, strict=True))
    wrapped.memory.check_canaries()
    kv.check_faults("host")


@pytest.mark.parametrize("kind", ["vllm", "flashinfer, HND"])
def test_a_sequence_goes_to_wrapped_host_memory_and_back(kind):
    """A paged cache and its host tier, both over arrays of others."""
    near, far = make(kind, 1), make("vllm, pages first", 2)
    cache = paged(near.pool)
    cache.attach(tiers := kv.TieredCache(near.pool, far.pool))
    cache.add_sequence(0)
    rng = np.random.default_rng(0)
    with cache.forward([0], [7]):
        for layer in range(LAYERS):
            rows = rng.normal(size=(7, 4, 8)).astype(np.float32)
            cache.attention(layer, rows, rows[:, :2], rows[:, 2:])
    before = [a.clone() for a in cache.get_kv(0, 0, 7)]
    cache.offload(0)
    tiers.engine._flush()
    kv.device("host").synchronize()
    for part in near.parts:
        for bits in part:
            bits[...] = 0
    cache.onboard(0)
    for got, want in zip(cache.get_kv(0, 0, 7), before, strict=True):
        assert torch.equal(got, want) and got.any()
    near.memory.check_canaries()
    far.memory.check_canaries()


CONTRADICTIONS = {
    "num_layers": 4, "num_kv_heads": 4, "head_dim": 16, "num_pages": 7, "page_size": 8,
    "dtype": "fp16", "v_head_dim": 12, "latent_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_arguments_that_contradict_the_pool(name):
    pool = make("vllm").pool
    kind = TypeError if name == "latent_dim" else ValueError
    with pytest.raises(kind, match=rf"^({name}|pool): expected"):
        paged(pool, **{name: CONTRADICTIONS[name]})
    agreed = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "num_pages": 6, "page_size": 4,
              "dtype": "bf16", "v_head_dim": 8}  # fmt: skip
    paged(pool, **agreed)


def test_pools_that_a_paged_cache_cannot_have():
    with pytest.raises(TypeError, match=r"^pool: expected a KVPool without latent_dim, got MLA"):
        paged(make("mla").pool)
    with pytest.raises(TypeError, match=r"^pool: expected a KVPool"):
        paged(np.zeros(3))
    pinned = kv.KVPool(4, 4, 1, 2, 8, placement="pinned", device="host")
    with pytest.raises(ValueError, match=r"^pool: expected pages on the device"):
        paged(pinned)
    with pytest.raises(TypeError, match=r"^num_pages: expected an int, got None"):
        kv.PagedKVCache(num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, device="host")


# --- Gradients and streams ---


def test_versions_of_wrapped_tensors():
    """What goes into a pool counts as a change of the tensors that it is over."""
    wrapped = make("vllm", 1)
    tensors, pinned = wrapped.given, like(wrapped, PAGES, placement="pinned")

    def changed(call):
        before = [t._version for t in tensors]
        call()
        return [t._version > then for t, then in zip(tensors, before, strict=True)]

    assert not any(changed(lambda: kv.transfer_pages(wrapped.pool, pinned, [0], [0])))
    assert all(changed(lambda: kv.transfer_pages(pinned, wrapped.pool, [0], [1])))
    one = changed(lambda: kv.transfer_pages(pinned, wrapped.pool, [0], [1], layers=[2]))
    assert one == [False, False, True]
    assert all(changed(lambda: kv.copy_pages(wrapped.pool, np.array([0]), np.array([1]))))
    engine = kv.TransferEngine(wrapped.pool, pinned)
    assert all(changed(lambda: engine.load([0], [1]).synchronize()))
    cache = paged(wrapped.pool)
    cache.add_sequence(0)
    rows = np.ones((1, 4, 8), np.float32)

    def step():
        with cache.forward([0], [1]):
            cache.attention(1, rows, rows[:, :2], rows[:, :2])

    assert changed(step) == [False, True, False]
    rows = [torch.ones(LAYERS, 1, HEADS, D) for _ in range(2)]
    assert all(changed(lambda: cache.set_kv(0, 0, *rows)))


# --- Errors ---


def good(**changes):
    shape = (PAGES, SIZE, HEADS, D)
    arrays = {"k": [np.zeros(shape, np.float16) for _ in range(LAYERS)],
              "v": [np.zeros(shape, np.float16) for _ in range(LAYERS)]}  # fmt: skip
    return {**arrays, **changes}


def layers(shape=(PAGES, SIZE, HEADS, D), dtype=np.float16, count=LAYERS, cut=lambda a: a):
    return [cut(np.zeros(shape, dtype)) for _ in range(count)]


def read_only(array):
    array.flags.writeable = False
    return array


BAD = {
    "no layers": ({"k": []}, ValueError, r"^k: expected at least one layer"),
    "fewer layers of V": ({"v": layers(count=2)}, ValueError, r"^v: expected 3 layers like k"),
    "another shape": ({"v": layers((PAGES, SIZE, 3, D))}, ValueError, r"^v\[0\]: expected pages"),
    "another page count": ({"k": [*layers(count=2), *layers((7, SIZE, HEADS, D), count=1)]},
                           ValueError, r"^k\[2\]: expected pages of \(6, 4, 2, 8\)"),
    "another format": ({"v": layers(dtype=np.float32)}, ValueError,
                       r"^v\[0\]: expected fp16 like k\[0\], got fp32"),
    "bytes without a tag": ({"k": layers(dtype=np.uint8)}, TypeError, r"^k\[0\]: .*view_as"),
    "a strided last axis": ({"k": layers((PAGES, SIZE, D, HEADS), cut=lambda a: a.swapaxes(2, 3))},
                            ValueError, r"^k\[0\]: expected a contiguous last"),
    "read-only": ({"v": layers(cut=read_only)}, ValueError, r"^v\[0\]: expected a writable array"),
    "broadcast": ({"k": layers(cut=lambda a: np.lib.stride_tricks.as_strided(
        a, strides=(0, *a.strides[1:])))}, ValueError, r"^k\[0\]: expected distinct elements"),
    "a sliding window": ({"k": [np.lib.stride_tricks.as_strided(
        np.zeros(999, np.float16), (PAGES, SIZE, HEADS, D), (32, 32, 16, 2)) for _ in range(3)]},
        ValueError, r"^k\[0\]: expected distinct elements"),
    "slots without a page size": ({"k": layers((PAGES * SIZE, HEADS, D))}, ValueError,
                                  r"^k\[0\]: expected .*page_size="),
    "a page size that does not divide": (
        {"k": layers((PAGES * SIZE, HEADS, D)), "page_size": 5}, ValueError,
        r"^page_size: expected a divisor of the 24 slots of k\[0\], got 5"),
    "a page size of no pages": ({"page_size": 8}, ValueError, r"^k\[0\]: expected pages of 8"),
    "page sizes below one": ({"page_size": 0}, ValueError, r"^page_size: expected at least 1"),
    "two dimensions": ({"k": layers((24, 16))}, ValueError, r"^k\[0\]: expected \(pages, page_"),
    "one layer by itself": ({"k": np.zeros((6, 4, 2, 8), np.float16)}, ValueError,
                            r"^k: expected \(layers, pages, .* or a list of one array a layer"),
    "a list in another layout": ({"layout": "page_first"}, ValueError, r"^layout: expected layer_"),
    "an unknown layout": ({"layout": "NHD"}, ValueError, r"^layout: expected one of"),
    "a list of lists": ({"k": [[1, 2]]}, TypeError, r"^k\[0\]: expected an array, got list"),
    "no array": ({"k": None}, TypeError, r"^k: expected an array"),
    "nothing in it": ({"k": layers((0, SIZE, HEADS, D))}, ValueError, r"^k\[0\]: expected at"),
    "misaligned": ({"k": [np.zeros(2 * 384 + 1, np.uint8)[1:].view(np.float16).reshape(6, 4, 2, 8)
                          for _ in range(3)]}, ValueError, r"^k\[0\]: expected elements at mult"),
    "on a device without them": ({"device": "tpu"}, ValueError, r"^device: "),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_arrays_that_are_no_pool(kind):
    changes, error, message = BAD[kind]
    with pytest.raises(error, match=message):
        kv.KVPool.wrap(**good(**changes))
    kv.KVPool.wrap(**good())


def test_arrays_that_share_bytes():
    both = np.zeros((2, LAYERS, PAGES, SIZE, HEADS, D), np.float16)
    with pytest.raises(ValueError, match=r"^v\[1\]: expected memory of its own, got .* of k\[2\]"):
        kv.KVPool.wrap(list(both[0]), [both[1, 0], both[0, 2], both[1, 2]])
    same = np.zeros((LAYERS, PAGES, SIZE, HEADS, D), np.float16)
    with pytest.raises(ValueError, match=r"^v: expected memory of its own, got some of k's"):
        kv.KVPool.wrap(same, same)
    kv.KVPool.wrap(both[0], both[1])


def test_tensors_that_need_gradients():
    k = [torch.zeros(6, 4, 2, 8, requires_grad=True)]
    with pytest.raises(TypeError, match=r"^k\[0\]: .*no backward"):
        kv.KVPool.wrap(k, [torch.zeros(6, 4, 2, 8)])


# --- Arrays of a GPU, as far as that shows without one ---


def test_arrays_of_a_gpu(monkeypatch):
    """The device is theirs; offloaded to pinned memory and loaded back."""
    from types import SimpleNamespace

    from devices.fake_cuda import FakeApi

    from kvcupy import cuda_api, devices
    from kvcupy.devices import cuda

    class Gpu(cuda.CudaDevice):
        fault_pointer = 0

    api = FakeApi()
    api.install(monkeypatch)
    device = Gpu(0, api)
    monkeypatch.setitem(devices._devices, "cuda:0", device)
    monkeypatch.setattr(cuda_api, "device_of_pointer", lambda pointer: 0)
    monkeypatch.setattr(probes, "_PROBES", dict(probes._PROBES))

    def on_gpu(array):
        return SimpleNamespace(
            array=array,
            __cuda_array_interface__={
                "version": 3, "typestr": array.dtype.str, "shape": array.shape,
                "strides": array.strides, "data": (array.ctypes.data, False),
            },
        )  # fmt: skip

    rng = np.random.default_rng(0)
    shape = (PAGES, 2, SIZE, HEADS, D)
    caches = [rng.integers(0, 99, shape).astype(np.float16) for _ in range(LAYERS)]
    sides = [[on_gpu(c[:, i]) for c in caches] for i in (0, 1)]
    pool = kv.KVPool.wrap(*sides)
    assert pool.device is device and pool.placement == "device" and pool.dtype == "fp16"
    with pytest.raises(ValueError, match=r"^device: expected cuda:0, where the arrays are, got h"):
        kv.KVPool.wrap(*sides, device="host")
    with pytest.raises(ValueError, match=r"^v\[0\]: expected cuda:0 like k\[0\], got host"):
        kv.KVPool.wrap(sides[0], [c[:, 1] for c in caches])
    assert pool.views(1)[0].__dlpack_device__() == (2, 0)
    pinned = [device.empty_pinned((4, SIZE, HEADS, D), "fp16") for _ in range(2 * LAYERS)]
    far = kv.KVPool.wrap(pinned[:LAYERS], pinned[LAYERS:], device=device)
    assert far.placement == "pinned" and far.device is device
    plain = [np.zeros((4, SIZE, HEADS, D), np.float16) for _ in range(2 * LAYERS)]
    pageable = kv.KVPool.wrap(plain[:LAYERS], plain[LAYERS:], device=device)
    assert pageable.placement == "pageable" and pageable.device is device
    for host in (far, pageable):
        before = [c.copy() for c in caches]
        kv.transfer_pages(pool, host, [4, 1], [3, 0], method="copy")
        for c in caches:
            c[[4, 1]] = 0
        kv.transfer_pages(host, pool, [3, 0], [4, 1], method="copy")
        for c, kept in zip(caches, before, strict=True):
            np.testing.assert_array_equal(c, kept)
