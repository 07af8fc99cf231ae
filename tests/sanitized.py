"""What `test_sanitizers.py` starts: kernels over arrays that end where their allocation ends.

usage: sanitized.py stores|rotations|moves|transfers|attention|traps|redzones
                    <folder of the kernels> [<which>]

Of the rows of a table below those run whose number leaves no remainder by `which`: all by 1.

The runtime of the sanitizers is loaded before Python, so that NumPy's allocations are guarded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.pop("LD_PRELOAD", None)  # the compiler that is started below needs none of it

import attention_cases
import numpy as np
import redzones
from helpers import QUANTISED, UNSIGNED, from_values
from rope_cases import assert_rotated

import kvcupy as kv
from kvcupy import devices, reference, sources
from kvcupy.arrays import view
from kvcupy.devices import host
from kvcupy.devices.host import HostDevice
from kvcupy.kernels import Kernel
from kvcupy.testing.cases import exact_rotations

TOKENS, HEADS, PAGES, PAGE_SIZE = 7, 2, 3, 4
SLOTS = [11, -1, 0, 12, 5, 3, 8]  # the last, one skipped, the first, one past the end, ...

# Formats of source and cache, width of K, width of V, elements that pointers and rows are moved
# by, whether scales are dynamic. Of each kernel: its widest words, its narrowest and others.
STORES = (
    ("fp16", "fp16", 64, 128, 0, False),
    ("bf16", "bf16", 8, 6, 2, False),
    ("fp16", "fp16", 33, 1, 1, False),
    ("int8", "int8", 17, 5, 1, False),
    ("int8", "int8", 3, 129, 0, True),
    ("fp32", "fp8_e4m3", 64, 24, 0, False),
    ("fp32", "fp8_e4m3", 37, 1, 1, False),
    ("bf16", "int8", 256, 512, 0, False),
    ("bf16", "int8", 5, 7, 3, False),
    ("fp8_e5m2", "fp32", 24, 8, 0, False),
    ("fp32", "int8", 2048, 512, 0, True),
    ("bf16", "fp8_e5m2", 64, 32, 0, True),
    ("bf16", "fp8_e5m2", 19, 1, 1, True),
)

POSITIONS = [30, 0, 29, 31, -1, 7, 30, 5, 11]  # the last of the table, one past it, ...

# Formats of rows and cache, width of K, part of it that turns, width of V, elements that pointers
# and rows are moved by, and what else: "i" interleaved, "n" norm, "s" sections, "d" dynamic scales,
# "o" out of place, the key to the cache alone.
ROTATIONS = (
    ("bf16", "bf16", 64, 64, 128, 0, ""),
    ("fp16", "fp16", 48, 16, 8, 0, "io"),
    ("fp32", "fp32", 6, 2, 5, 0, "n"),
    ("bf16", "fp8_e4m3", 100, 98, 7, 1, "no"),
    ("fp16", "int8", 256, 128, 64, 0, "d"),
    ("fp16", "int8", 26, 26, 3, 3, "ind"),
    ("bf16", "fp8_e5m2", 80, 80, 96, 0, "is"),
    ("fp32", "fp8_e4m3", 32, 16, 16, 0, "sno"),
    ("bf16", "fp16", 2, 2, 1, 1, "i"),
)

# Formats of cache and output, width of K, width of V, elements moved by, dynamic scales or not.
GATHERS = (
    ("fp16", "fp16", 64, 128, 0, False),
    ("bf16", "bf16", 33, 1, 1, False),
    ("int8", "int8", 17, 5, 1, False),
    ("fp8_e4m3", "bf16", 64, 24, 0, False),
    ("int8", "fp16", 5, 7, 3, True),
    ("fp8_e5m2", "fp32", 24, 200, 0, True),
    ("fp32", "fp8_e5m2", 19, 1, 1, False),
)

# Shape of a pool, elements moved by.
POOLS = (((6, 2, 4, 8), 0), ((6, 1037), 0), ((6, 5, 3), 1), ((6,), 0), ((6, 2, 3, 9000), 3))

# Format and shape of keys, elements moved by.
SHIFTS = (
    ("int8", (6, 4, 2, 32), 0), ("fp8_e4m3", (6, 4, 2, 32), 0), ("fp8_e5m2", (6, 3, 10), 1),
    ("int8", (6, 4, 2, 6), 3),
)  # fmt: skip

# Shapes of two states, of which the first is a convolution's, their dtype, elements moved by: then
# channels are contiguous.
STATES = (
    (((24, 3), (2, 16)), np.float16, 0), (((13, 4), (5,)), np.uint8, 1),
    (((200, 3), (4099,)), np.float32, 2),
)  # fmt: skip

# Formats and axes of source and target (of pages, layers, offsets, heads), width of K, of V (0: no
# V), elements moved by, how: "s" scales in the source, "t" in the target.
TRANSFERS = (
    ("bf16", "bf16", "LPTH", "PTLH", 64, 128, 0, ""),
    ("fp16", "fp16", "PLTH", "PHTL", 33, 1, 1, ""),
    ("int8", "int8", "LPTH", "PHTL", 656, 0, 0, ""),
    ("int8", "int8", "LPTH", "LPTH", 1, 1, 0, ""),
    ("fp16", "fp16", "PTLH", "PTLH", 1003, 603, 3, ""),
    ("fp8_e4m3", "fp8_e4m3", "PTLH", "LPTH", 80, 48, 0, "st"),
    ("bf16", "int8", "LPTH", "PTLH", 24, 17, 0, "t"),
    ("fp8_e5m2", "fp32", "PTLH", "PHTL", 72, 8, 0, "s"),
    ("fp32", "fp8_e4m3", "PHTL", "LPTH", 136, 0, 1, "t"),
)

# Formats of query and cache, heads of both, widths of K and V, page size, new tokens of each
# sequence (None: one each), elements moved by, how: "w" window and sinks, "t" tree, "l" trees of
# given lengths, "h" evicted spans and first keys, "r" keys rotated on read, "i" interleaved.
ATTENTION = (
    ("fp32", "fp32", (6, 2), (64, 24), 4, None, 0, ""),
    ("fp16", "int8", (3, 1), (33, 17), 3, None, 1, ""),
    ("bf16", "bf16", (2, 2), (576, 512), 2, None, 0, "w"),
    ("bf16", "bf16", (4, 1), (64, 40), 4, (5, 0, 11), 0, ""),
    ("fp16", "fp16", (2, 2), (96, 128), 3, (9, 1, 8), 0, "wt"),
    ("fp32", "fp8_e4m3", (2, 1), (8, 8), 1, (3, 2, 1), 0, "t"),
    ("fp32", "fp16", (3, 1), (64, 24), 4, None, 0, "hwr"),
    ("fp16", "bf16", (2, 1), (33, 17), 3, (2, 0, 4), 1, "hlri"),
    ("bf16", "bf16", (4, 1), (64, 40), 4, (5, 0, 11), 0, "hlr"),
    ("fp16", "fp16", (4, 1), (80, 64), 1, (9, 1, 8), 0, "hwri"),
)
LENGTHS = (11, 0, 12)
EVICTED = ((3, 5), (0, 7), (9, 4))  # where they begin, how many slots: the last key is in the last
NODES = (7, 0, 12)


class Pages:
    """What a transfer asks of a pool: K and V, or one part, and their scales."""

    placement = "device"

    def __init__(self, device: HostDevice, axes: str, parts: list, scales: list, moved: int):
        order = [axes.index(axis) for axis in "PLTH"]
        self.device = device
        self.placed = [at_the_end(a, moved) for a in parts]
        self.placed_scales = [at_the_end(a) for a in scales]
        self.parts = tuple(view(a.transpose(*order, 4)) for a in self.placed)
        self.scale_parts = tuple(view(a.transpose(*order)[..., None]) for a in self.placed_scales)
        self.layers = range(self.parts[0].shape[1])
        self.groups = (self,)

    def note_written(self, layers: object) -> None:
        """Do nothing: these are no torch tensors, which count what is written."""


def at_the_end(content: np.ndarray, moved: int = 0) -> np.ndarray:
    """Copy an array to where its last byte is the last of an allocation.

    It begins `moved` elements after the first byte, and has gaps of as many between its rows.
    """
    gap = moved * content.itemsize
    strides = [content.itemsize]
    for n in content.shape[:0:-1]:
        strides.insert(0, strides[0] * n + (gap if len(strides) == 1 else 0))
    reach = sum((n - 1) * s for n, s in zip(content.shape, strides, strict=True))
    raw = np.full(gap + reach + content.itemsize, 0x5A, np.uint8)
    placed = np.ndarray(content.shape, content.dtype, raw, gap, strides)
    placed[...] = content
    return placed


def values(rng: np.random.Generator, fmt: str, *shape: int) -> np.ndarray:
    return from_values(rng.standard_normal(shape) * 3, fmt)


def same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    unsigned = UNSIGNED[want.dtype.itemsize]
    got, want = (np.ascontiguousarray(a).view(unsigned) for a in (got, want))
    np.testing.assert_array_equal(got, want, what)


def store(device: HostDevice, number: int) -> None:
    """Run one store in some order of threads, and compare it with the reference."""
    source, target, k_width, v_width, moved, dynamic = STORES[number]
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    index = np.int32 if number % 2 else np.int64
    inputs = [values(rng, source, TOKENS, HEADS, w) for w in (k_width, v_width)]
    caches = [values(rng, target, PAGES, PAGE_SIZE, HEADS, w) for w in (k_width, v_width)]
    arrays = [*inputs, *caches, np.array(SLOTS, index)]
    options = {}
    if dynamic:
        options = {name: np.zeros((PAGES * PAGE_SIZE, HEADS), np.float32)
                   for name in ("k_scale_cache", "v_scale_cache")}  # fmt: skip
    elif target in reference.LIMIT and source != target:
        options = {"k_scale": np.float32([0.5, 0.3]), "v_scale": np.float32([0.7])}
    placed = [at_the_end(a, moved) for a in arrays]
    placed_options = {name: at_the_end(a) for name, a in options.items()}

    kv.store_kv(*placed, **placed_options)
    with np.testing.assert_raises(kv.IndexFault):
        kv.check_faults(device)
    reference.store_kv(*arrays, **options)
    for name, got, want in [
        *zip(("key", "value", "k_cache", "v_cache", "slots"), placed, arrays, strict=True),
        *((name, placed_options[name], want) for name, want in options.items()),
    ]:
        same_bits(got, want, f"{name} of {STORES[number]}")


def store_between_redzones(device: HostDevice, number: int) -> None:
    """Store in arrays of the device, behind which memory of theirs is left for alignment."""
    host._allocate = redzones.surround(host._allocate)
    rng = np.random.default_rng(number)
    shapes = (TOKENS, HEADS, 64), (TOKENS, HEADS, 128), (40, HEADS, 64), (40, HEADS, 128)
    arrays = [device.asarray(values(rng, "fp16", *shape)) for shape in shapes]
    slots = device.asarray(np.array(SLOTS))
    kv.store_kv(*arrays, slots)
    for got, rows in zip(arrays[2:], arrays[:2], strict=True):
        same_bits(got[SLOTS[0]], rows[0], "the first row")


def rotate_and_store(device: HostDevice, number: int) -> None:
    """Run one rotation with its store, and compare both with the reference."""
    fmt, target, width, rotary_dim, v_width, moved, kinds = ROTATIONS[number]
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    index = np.int32 if number % 2 else np.int64
    tokens, pairs = len(POSITIONS), rotary_dim // 2
    options: dict[str, object] = {"interleaved": "i" in kinds}
    positions = np.array(POSITIONS, index)
    if "s" in kinds:
        positions = np.stack([positions, np.roll(positions, 1), positions[::-1]])
        options["sections"] = (pairs // 4, pairs // 2, pairs - pairs // 4 - pairs // 2)
    if "n" in kinds:
        options |= {name: at_the_end(values(rng, "fp32", width), moved)
                    for name in ("query_norm", "key_norm")}  # fmt: skip
    query, key = (values(rng, fmt, tokens + 2, heads, width) for heads in (3, HEADS))
    value = values(rng, fmt, TOKENS, HEADS, v_width)
    caches = [values(rng, target, PAGES, PAGE_SIZE, HEADS, w) for w in (width, v_width)]
    slots = np.array(SLOTS, index)
    table = reference.rope_table(31, rotary_dim)
    scales: dict[str, np.ndarray] = {}
    if "d" in kinds:
        scales = {name: np.zeros((PAGES * PAGE_SIZE, HEADS), np.float32)
                  for name in ("k_scale_cache", "v_scale_cache")}  # fmt: skip
    elif target in QUANTISED:
        scales = {"k_scale": np.float32([0.5, 0.3]), "v_scale": np.float32([0.7])}
    arrays = (query, key, value, table, positions, *caches, slots)
    placed = [at_the_end(a, moved) for a in arrays]
    placed_scales = {name: at_the_end(a) for name, a in scales.items()}
    out = at_the_end(np.zeros_like(query), moved) if "o" in kinds else placed[0]
    aside = {"query_out": out, "write_key": False} if "o" in kinds else {}

    kv.rope_store_kv(*placed, **options, **aside, **placed_scales)
    with np.testing.assert_raises(kv.IndexFault):
        kv.check_faults(device)
    if "o" in kinds:  # the key as it went to the cache
        same_bits(placed[1], key, f"key of {ROTATIONS[number]}")
        kv.apply_rope(None, *placed[1:2], *placed[3:5], **without_query(options))
        with np.testing.assert_raises(kv.IndexFault):
            kv.check_faults(device)
    axes = np.atleast_2d(positions)
    good = np.flatnonzero(((axes >= 0) & (axes < len(table))).all(axis=0))
    both = reference.cos_sin(table, positions[..., good], options.get("sections"))
    for name, got, rows in (("query", out, query), ("key", placed[1], key)):
        bad = np.setdiff1d(np.arange(tokens + 2), good)
        untouched = np.zeros_like(rows) if got is out and "o" in kinds else rows
        same_bits(got[bad], untouched[bad], f"{name} left alone of {ROTATIONS[number]}")
        assert_rotated(
            got[good], rows[good], *both, interleaved="i" in kinds,
            norm=options.get(f"{name}_norm"), name=f"{name} of {ROTATIONS[number]}",
        )  # fmt: skip
    stored = np.where(np.isin(np.arange(TOKENS), good), slots, -1)
    reference.store_kv(np.ascontiguousarray(placed[1]), value, *caches, stored, **scales)
    for name, got, want in [
        *zip(("k_cache", "v_cache"), placed[5:7], caches, strict=True),
        ("value", placed[2], value),
        *((name, placed_scales[name], want) for name, want in scales.items()),
    ]:
        same_bits(got, want, f"{name} of {ROTATIONS[number]}")


def without_query(options: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name != "query_norm"}


def gather(device: HostDevice, number: int) -> None:
    """Run one gather, and compare it with the reference."""
    source, target, k_width, v_width, moved, dynamic = GATHERS[number]
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    caches = [values(rng, source, PAGES, PAGE_SIZE, HEADS, w) for w in (k_width, v_width)]
    outs = [values(rng, target, TOKENS, HEADS, w) for w in (k_width, v_width)]
    slots = np.array(SLOTS, np.int32 if number % 2 else np.int64)
    scales = {}
    if dynamic:
        scales = {name: rng.uniform(0.1, 9, (PAGES * PAGE_SIZE, HEADS)).astype(np.float32)
                  for name in ("k_scale_cache", "v_scale_cache")}  # fmt: skip
    elif source in QUANTISED and source != target:
        scales = {"k_scale": np.float32([0.5, 0.3]), "v_scale": np.float32([0.7])}
    k_out, v_out = (at_the_end(a, moved) for a in outs)
    placed = [at_the_end(a, moved) for a in (*caches, slots)]
    kv.gather_kv(
        *placed, k_out=k_out, v_out=v_out, **{name: at_the_end(a) for name, a in scales.items()}
    )
    with np.testing.assert_raises(kv.IndexFault):
        kv.check_faults(device)
    reference.gather_kv(*caches, slots, k_out=outs[0], v_out=outs[1], **scales)
    for name, got, want in (("k_out", k_out, outs[0]), ("v_out", v_out, outs[1])):
        same_bits(got, want, f"{name} of {GATHERS[number]}")


def copy_pages(device: HostDevice, number: int) -> None:
    """Copy pages, the first and the last among them."""
    shape, moved = POOLS[number]
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    pool = rng.integers(0, 2**16, shape).astype(np.uint16)
    src, dst = np.array([0, 4, -1, 2, 6]), np.array([5, 1, 3, -7, 3], np.int32)
    placed = [at_the_end(a, moved) for a in (pool, src, dst)]
    kv.copy_pages(*placed)
    with np.testing.assert_raises(kv.IndexFault):
        kv.check_faults(device)
    reference.copy_pages(pool, src, dst)
    same_bits(placed[0], pool, f"pages {POOLS[number]}")


def shift_pages(device: HostDevice, number: int) -> None:
    """Shift pages, the first and the last among them, in rows of packs and of single pairs."""
    fmt, shape, moved = SHIFTS[number]
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    pool = values(rng, fmt, *shape)
    table = exact_rotations(rng, 8, shape[-1])
    pages, out_pages = np.array([0, 4, -1, 2, 6, 3]), np.array([5, 1, 3, -7, 3, 2], np.int32)
    deltas = np.array([3, -7, 0, 1, 2, 8])
    placed = [at_the_end(a, moved) for a in (pool, pages, deltas, table, out_pages)]
    kv.shift_pages(*placed[:4], out_pages=placed[4], interleaved=number % 2 == 1)
    with np.testing.assert_raises(kv.IndexFault):
        kv.check_faults(device)
    reference.shift_pages(
        pool, pages, deltas, table, out_pages=out_pages, interleaved=number % 2 == 1
    )
    same_bits(placed[0], pool, f"keys {SHIFTS[number]}")


def move_states(device: HostDevice, number: int) -> None:
    """Store, gather and update states, of the first and the last slot among them."""
    shapes, dtype, moved = STATES[number]
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    states, caches = (
        tuple(rng.integers(0, 2**7, (count, *shape)).astype(dtype) for shape in shapes)
        for count in (7, 12)
    )
    slots = np.array(SLOTS)
    placed = [tuple(at_the_end(a, 0) for a in arrays) for arrays in (states, caches)]
    kv.store_state(*placed, at_the_end(slots))
    reference.store_state(states, caches, slots)
    kv.gather_state(placed[1], at_the_end(slots[::-1]), out=placed[0])
    reference.gather_state(caches, slots[::-1], out=states)
    x = rng.integers(0, 2**7, (15, shapes[0][0])).astype(dtype)
    sums = np.array([0, 3, 3, 4, 9, 9, 14, 15], np.int32)
    conv = at_the_end(caches[0].swapaxes(1, 2), moved).swapaxes(1, 2) if moved else placed[1][0]
    kv.update_conv_state(at_the_end(x, moved), conv, at_the_end(slots), at_the_end(sums))
    reference.update_conv_state(x, caches[0], slots, sums)
    with np.testing.assert_raises(kv.IndexFault):
        kv.check_faults(device)
    same_bits(conv, caches[0], f"states of a convolution {STATES[number]}")
    same_bits(placed[1][1], caches[1], f"states {STATES[number]}")
    for got, want in zip(placed[0], states, strict=True):
        same_bits(got, want, f"rows of states {STATES[number]}")


def transfer(device: HostDevice, number: int) -> None:
    """Move pages between pools, the last pages of both among them."""
    source, target, src_axes, dst_axes, k_width, v_width, moved, scaled = TRANSFERS[number]
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    widths = [w for w in (k_width, v_width) if w]
    pools, arrays = [], []
    for fmt, axes, pages, has_scales in (
        (source, src_axes, 5, "s" in scaled), (target, dst_axes, 7, "t" in scaled)
    ):  # fmt: skip
        sizes = {"P": pages, "L": 3, "T": PAGE_SIZE, "H": HEADS}
        shape = tuple(sizes[axis] for axis in axes)
        parts = [values(rng, fmt, *shape, w) for w in widths]
        scales = [rng.uniform(0.1, 9, shape).astype(np.float32) for _ in widths if has_scales]
        pools.append(Pages(device, axes, parts, scales, moved))
        order = [axes.index(axis) for axis in "LPTH"]
        arrays.append(([a.transpose(*order, 4) for a in parts],
                       [a.transpose(order) for a in scales]))  # fmt: skip
    src_pages, dst_pages = np.array([4, 0, -1, 2, 5]), np.array([6, 1, 3, -7, 3], np.int32)
    placed_pages = [at_the_end(a) for a in (src_pages, dst_pages)]
    kv.transfer_pages(
        *pools, *placed_pages, layers=[0, 2], method="kernel", convert=source != target
    )
    with np.testing.assert_raises(kv.IndexFault):
        kv.check_faults(device)
    reference.transfer_pages(
        arrays[0][0], arrays[1][0], src_pages, dst_pages, layers=[0, 2],
        src_scales=arrays[0][1] or None, dst_scales=arrays[1][1] or None,
    )  # fmt: skip
    for pool, (parts, scales) in zip(pools, arrays, strict=True):
        for got, want in zip((*pool.parts, *pool.scale_parts), (*parts, *scales), strict=True):
            bits = device.to_numpy(got).swapaxes(0, 1)
            same_bits(bits, want.reshape(bits.shape), f"pages of {TRANSFERS[number]}")


def attend(device: HostDevice, number: int) -> None:
    """Attend over the last pages of caches, with tables and lengths that end where memory does."""
    fmt, cached, (heads, kv_heads), widths, page_size, new, moved, kinds = ATTENTION[number]
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    reach = max(LENGTHS) + (EVICTED[2][1] if "h" in kinds else 0)
    pages = 3 * -(-reach // page_size)
    table = rng.permutation(pages).reshape(3, -1).astype(np.int32)
    lengths = np.array(LENGTHS)
    options: dict[str, np.ndarray | int | bool] = {}
    if new is not None:
        lengths = np.maximum(lengths, new)
        options["query_lens"] = np.array(new)
    tokens = sum(new or (1, 1, 1))
    if "w" in kinds:
        options |= {"window": 5, "sink_tokens": 2}
    if "t" in kinds and new is not None:
        options["tree_mask"] = rng.random((tokens, max(new))) < 0.6
    if "l" in kinds:
        options["tree_mask"] = rng.random((tokens, max(NODES))) < 0.6
        options["tree_lens"] = np.array(NODES, np.int32)
        options["tree_positions"] = rng.integers(-3, 20, (3, 8), np.int32)
    if "h" in kinds:
        options |= dict(
            zip(("evicted_starts", "evicted_lens"), np.array(EVICTED, np.int32).T, strict=True)
        )
        options["key_starts"] = np.array([2, 5, 1], np.int32)
    if "r" in kinds:
        turning = widths[0] // 4 * 2
        options |= {"rope_table": reference.rope_table(9, turning).astype(np.float32),
                    "rotary_start": widths[0] - turning, "interleaved": "i" in kinds}  # fmt: skip
    if cached in QUANTISED:
        scales = rng.uniform(0.1, 1, (2, pages * page_size, kv_heads)).astype(np.float32)
        options |= dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=True))
    query = values(rng, fmt, tokens, heads, widths[0])
    caches = [values(rng, cached, pages, page_size, kv_heads, w) for w in widths]
    out, lse = values(rng, fmt, tokens, heads, widths[1]), np.zeros((tokens, heads), np.float32)
    placed = [at_the_end(a, moved) for a in (query, *caches)]
    placed_out, placed_lse = at_the_end(out, moved), at_the_end(lse)
    attention_cases.attend(
        *placed, at_the_end(table), at_the_end(lengths), out=placed_out, lse_out=placed_lse,
        **{n: at_the_end(a) if isinstance(a, np.ndarray) else a for n, a in options.items()},
    )  # fmt: skip
    kv.check_faults(device)
    want, want_lse, _ = reference.paged_attention(query, *caches, table, lengths, **options)
    tolerance, of_lse = 1e-4 if fmt == "fp32" else 4e-2, 1e-4
    if "r" in kinds and new is not None and fmt != "fp32":
        tolerance = of_lse = 0.4  # keys are rounded once they have turned; scores are in the tens
    got = reference.decode(placed_out, fmt)
    np.testing.assert_allclose(got, want, tolerance, tolerance, err_msg=f"{ATTENTION[number]}")
    np.testing.assert_allclose(placed_lse, want_lse, of_lse, of_lse, err_msg=f"{ATTENTION[number]}")


def map_slots(device: HostDevice, number: int) -> None:
    """Find slots, where the last page of the last sequence is the last entry of the table."""
    rng = np.random.default_rng(number)
    device.thread_order_seed = number
    lengths = rng.integers(0, 33, 40)
    lengths[-1] = 32
    appended = rng.integers(0, lengths + 1)
    table = rng.permutation(40 * 8).reshape(40, 8).astype(np.int32)
    want = reference.slot_mapping(table, lengths, appended, 4)
    for spare in (0, 3):
        placed = [at_the_end(a, number) for a in (table, lengths, appended)]
        out = at_the_end(np.full(len(want) + spare, 7))
        kv.slot_mapping(*placed, 4, out=out)
        kv.check_faults(device)
        same_bits(out, np.append(want, np.full(spare, -1)), "slots")
        if len(want) > 9:  # no room for the last ones: a fault, and not a write
            short = at_the_end(np.full(len(want) - 9, 7))
            kv.slot_mapping(*placed, 4, out=short)
            with np.testing.assert_raises(kv.IndexFault):
                kv.check_faults(device)
            same_bits(short, want[:-9], "the slots that there is room for")


def run_traps(device: HostDevice) -> None:
    """A block that ends in the middle leaves nothing behind that harms the next."""
    params = np.dtype([("in", "u8"), ("out", "u8"), ("shared_start", "u8"), ("count", "i4"),
                       ("who", "i4")], align=True)  # fmt: skip
    for name, barriers in (("trap_one", False), ("trap_between_barriers", True)):
        kernel = Kernel("host_threads.cu", name, params, "ThreadsParams", barriers)
        function = device.load(kernel.specialise(7))
        for who in (70, -1, 3, -1):
            out = at_the_end(np.zeros(4 * 96, np.int32))
            packed = np.zeros((), params)
            packed["out"], packed["count"], packed["who"] = out.ctypes.data, out.size, who
            try:
                device.launch(
                    function, (4, 1, 1), (96, 1, 1), 0, packed.tobytes(), device.as_stream(None)
                )
                trapped = False
            except kv.DeviceError:
                trapped = True
            assert trapped == (who >= 0), f"{name}: trapped {trapped}, who {who}"
            assert trapped or (out == 7).all(), f"{name}: got {out}"


def main(what: str, folder: str, which: str = "1") -> None:
    """Run what the command line names."""
    sources.kernels_dir = lambda: Path(folder)
    kv.config.fallback = "error"
    device = HostDevice()
    device.extra_flags, device.warp_lanes = redzones.FLAGS, 32
    devices._devices["host"] = device
    work = {
        "stores": ((store, len(STORES)),),
        "rotations": ((rotate_and_store, len(ROTATIONS)),),
        "moves": (
            (copy_pages, len(POOLS)),
            (map_slots, 3),
            (gather, len(GATHERS)),
            (shift_pages, len(SHIFTS)),
            (move_states, len(STATES)),
        ),
        "transfers": ((transfer, len(TRANSFERS)),),
        "attention": ((attend, len(ATTENTION)),),
        "redzones": ((store_between_redzones, 1),),
        "traps": ((lambda device, _: run_traps(device), 1),),
    }[what]
    for one, count in work:
        for number in range(0, count, int(which)):
            print(f"{getattr(one, '__name__', what)} {number}", flush=True)
            one(device, number)
    print("all done")


if __name__ == "__main__":
    main(*sys.argv[1:])
