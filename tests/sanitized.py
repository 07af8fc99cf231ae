"""What `test_sanitizers.py` starts: kernels over arrays that end where their allocation ends.

usage: sanitized.py stores|traps <folder of the kernels>

The runtime of the sanitizers is loaded before Python, so that NumPy's allocations are guarded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.pop("LD_PRELOAD", None)  # the compiler that is started below needs none of it

import numpy as np
from helpers import UNSIGNED, from_values

import kvcupy as kv
from kvcupy import devices, reference, sources
from kvcupy.devices.host import HostDevice
from kvcupy.kernels import Kernel

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer",
         "-g", "-O1")  # fmt: skip
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
        bits = UNSIGNED[want.dtype.itemsize]
        np.testing.assert_array_equal(
            np.ascontiguousarray(got).view(bits), want.view(bits), f"{name} of {STORES[number]}"
        )


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


def main(what: str, folder: str) -> None:
    """Run what the command line names."""
    sources.kernels_dir = lambda: Path(folder)
    kv.config.fallback = "error"
    device = HostDevice()
    device.extra_flags, device.warp_lanes = FLAGS, 32
    devices._devices["host"] = device
    if what == "traps":
        run_traps(device)
    else:
        for number in range(len(STORES)):
            print(f"store {number} {STORES[number]}", flush=True)
            store(device, number)
    print("all done")


if __name__ == "__main__":
    main(*sys.argv[1:])
