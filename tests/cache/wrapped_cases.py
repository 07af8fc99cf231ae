"""Arrays as other projects lay their caches out, with canaries around every allocation."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

import kvcupy as kv

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
    import torch

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
    import torch

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
