"""What `test_sanitizers.py` starts: calls of operations whose arrays lie between redzones.

usage: sanitized.py <operations, with commas>|transfers|redzones <kernels> [<which>]

Of the calls of each operation those run whose number leaves no remainder by `which`: all by 1. The
runtime of the sanitizers is loaded before Python, so that NumPy's allocations are guarded too.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path

os.environ.pop("LD_PRELOAD", None)  # the compiler that is started below needs none of it

import numpy as np
import redzones
from valid_calls import CASES, ValidCall

import kvcupy as kv
from kvcupy import devices, sources
from kvcupy.devices import host
from kvcupy.devices.host import HostDevice


def call_operation(device: HostDevice, operation: str, which: int) -> None:
    """Run and compare valid calls: arrays that begin anywhere, threads in any order."""
    cases = [case for case in CASES if case.operation == operation]
    for number, case in enumerate(cases[::which]):
        print(f"{operation}, {case.name}", flush=True)
        device.thread_order_seed = number
        index = "int32" if number % 2 else "int64"
        call = ValidCall(device, case, misalign=number % 3, index=index)
        call.run()
        call.check()


def transfer(device: HostDevice, which: int) -> None:
    """Move the first and the last pages between pools of all layouts and several formats."""
    layouts = ("layer_first", "page_first", "page_first_direct", "page_head")
    formats = (("fp16", "fp16"), ("bf16", "int8"), ("fp8_e5m2", "fp32"))
    rows = list(product(layouts, layouts, formats))
    for number in range(0, len(rows), 4 * which + 1):
        src_layout, dst_layout, (source, target) = rows[number]
        print(f"{source} {src_layout} to {target} {dst_layout}", flush=True)
        widths = {"head_dim": (64, 33, 24)[number % 3], "v_head_dim": (40, 1, 17)[number % 3]}
        src, dst = (
            kv.KVPool(pages, 4, 3, 2, **widths, dtype=dtype, layout=layout, device=device)
            for pages, dtype, layout in ((5, source, src_layout), (7, target, dst_layout))
        )
        src.k(2)[4][...] = 1
        pages = np.array([4, 0, -1, 2]), np.array([6, 1, 3, -7])
        kv.transfer_pages(
            src, dst, *pages, layers=[0, 2], method="kernel", convert=source != target
        )
        device.synchronize()
        assert device.to_numpy(dst.k(2))[6].any() and not device.to_numpy(dst.k(2))[5].any()


def store_between_redzones(device: HostDevice, which: int) -> None:
    """Store in arrays of the device, behind which memory of theirs is left for alignment."""
    rows = [device.asarray(np.ones((3, 2, width), np.float16)) for width in (64, 128)]
    caches = [device.zeros((8, 2, width), "fp16") for width in (64, 128)]
    kv.store_kv(*rows, *caches, device.asarray(np.array([7, -1, 0])))
    assert all((cache[[0, 7]] == 1).all() and not cache[1:7].any() for cache in caches)
    slots, positions = device.asarray(np.array([5, 6])), device.asarray(np.arange(3))
    table = kv.rope_table(8, 64, device=device)  # and fewer slots than tokens
    query = device.zeros((3, 4, 64), "fp16")
    kv.rope_store_kv(query, rows[0], rows[1][:2].copy(), table, positions, *caches, slots)
    assert all(cache[5:7].any() and not cache[1:5].any() for cache in caches)


PROGRAMS = {"transfers": transfer, "redzones": store_between_redzones}


def main(what: str, folder: str, which: str = "1") -> None:
    sources.kernels_dir = lambda: Path(folder)
    kv.config.fallback = "error"
    host._allocate = redzones.surround(host._allocate)
    device = HostDevice()
    device.extra_flags, device.warp_lanes = redzones.FLAGS, 32
    devices._devices["host"] = device
    if what in PROGRAMS:
        PROGRAMS[what](device, int(which))
    else:
        for operation in what.split(","):
            call_operation(device, operation, int(which))
    print("all done")


if __name__ == "__main__":
    main(*sys.argv[1:])
