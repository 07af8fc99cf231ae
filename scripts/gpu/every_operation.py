"""Call every operation, so that each kernel is launched: run by compute-sanitizer.

`kv.verify` runs its cases; pages move between pools by every method, and steps of a paged cache
prefill, fork and verify a draft tree. Nothing is timed.

    compute-sanitizer --tool racecheck python scripts/gpu/every_operation.py --device cuda
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from benchmarks import pools
from common.timers import DIRECTIONS

import kvcupy as kv
from kvcupy.ops.store import store_kv

PAGE_SIZE = 16

# Conversions of rows of 72 are element by element, of rows of 64 in packs.
HEADS = ((4, 2, 72), (8, 2, 64))
"""Of queries, of keys and values, and their width."""
NEW = 37  # tokens of a prompt


def verified(device: Any) -> None:
    """Run the conformance cases, and a case of each kernel that they do not launch.

    Raises
    ------
    RuntimeError : a result is wrong
    """
    report = kv.verify(device)
    print(report, flush=True)
    if not report.ok:
        raise RuntimeError(str(report))


def transfers(device: Any) -> None:
    """Move pages between pools with every method, and pages that do not exist."""
    for row_bytes, mla in ((288, False), (256, False), (1152, True)):
        print(f"transfer_pages of rows of {row_bytes} bytes, every method", flush=True)
        shape = pools.Shape(row_bytes, PAGE_SIZE, 2, 6, ("layer_first", "page_first"), mla)
        case = pools.Pools(device, shape)
        for direction in DIRECTIONS:
            for method in ("kernel", "copy", "staged"):
                case.transfer(direction, None, method=method)
        _finish(device)
        src, dst, *_ = case.ends(DIRECTIONS[0])
        with suppress(kv.IndexFault):  # the copy engine records no fault, a kernel does
            kv.transfer_pages(src, dst, [src.num_pages], [0], method="copy")
            kv.check_faults(device)


def others(device: Any) -> None:
    """Call what takes indices that the host reads, and a paged cache."""
    table = device.asarray(np.arange(8, dtype=np.int32).reshape(2, 4))
    lengths, new = (device.asarray(np.array(n, np.int32)) for n in ([50, 21], [3, 21]))
    slots = kv.slot_mapping(table, lengths, new, PAGE_SIZE)
    kv.page_table_csr(table, lengths, PAGE_SIZE)
    kv.find_duplicate_slots(slots)
    rows = [device.zeros((slots.shape[0], 2, 72), np.float32) for _ in "kv"]
    caches = [device.zeros((8, PAGE_SIZE, 2, 72), np.float32) for _ in "kv"]
    store_kv(*rows, *caches, slots)
    kv.paged_attention(rows[0][:2], *caches, table, lengths)
    zeros = (device.zeros((slots.shape[0], *shape), "bf16") for shape in ((16, 64), (512,), (64,)))
    cache, rope = device.zeros((8, PAGE_SIZE, 576), "bf16"), kv.rope_table(128, 64, device=device)
    kv.rope_store_mla(*zeros, rope, slots, cache, slots)
    for heads in HEADS:
        _serve(device, *heads)
    _finish(device)


def _serve(device: Any, q_heads: int, kv_heads: int, width: int) -> None:
    """Run steps of a paged cache in both rope modes: prefill, a fork, a draft tree."""
    rope = kv.rope_table(4096, width, device=device)
    for rope_mode in ("normal", "inline"):
        print(f"PagedKVCache of heads of {width}, rope_mode {rope_mode}", flush=True)
        cache = kv.PagedKVCache(
            num_layers=2, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=width, num_pages=12,
            page_size=PAGE_SIZE, rope=rope, rope_mode=rope_mode, device=device,
        )  # fmt: skip

        def step(names: list[str], new: list[int], **options: Any) -> None:
            with cache.forward(names, new, **options):  # noqa: B023
                for layer in range(2):
                    heads = (q_heads, kv_heads, kv_heads)
                    rows = (device.zeros((sum(new), n, width), "bf16") for n in heads)
                    cache.attention(layer, *rows)  # noqa: B023

        cache.add_sequence("prompt")
        step(["prompt"], [NEW])
        cache.fork_sequence("prompt", "answer")
        step(["prompt", "answer"], [1, 3], token_tree=[None, [-1, 0, 0]])
        cache.commit_token_tree(["answer"], [2])


def _finish(device: Any) -> None:
    """Wait for the device; IndexFault if a kernel recorded a fault, as all indices are in range."""
    device.synchronize()
    kv.check_faults(device)


def run(device: Any) -> None:
    """Call the operations one after another, and check for faults after each."""
    for part in (transfers, others, verified):
        part(device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    arguments = parser.parse_args(argv)
    kv.config.fallback = "error"
    try:
        device = kv.device(arguments.device) if arguments.device else kv.default_device()
    except (ValueError, kv.DeviceError) as error:
        parser.exit(2, f"--device: {str(error).splitlines()[0]}\n")
    if device.kind == "cuda":
        import cupy

        cupy.cuda.set_allocator(None)  # one allocation per array, so that overruns are seen
    else:
        device.warp_lanes = 32  # the same kernels, laid out as on a GPU
    run(device)
    print(f"every operation was called on {device.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
