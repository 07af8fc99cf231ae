"""Call every operation, so that each kernel is launched: run by compute-sanitizer.

The benchmarks' calls are made in shapes of small models, whose rows end within a thread's word and
whose pages end within a row of threads; then `kv.verify` runs its cases. Nothing is timed.

    compute-sanitizer --tool racecheck python scripts/gpu/every_operation.py --device cuda
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from benchmarks.operations import command, transfer
from benchmarks.operations.baselines import own_arrays
from common.models import Model
from common.timers import DIRECTIONS

import kvcupy as kv
from kvcupy.ops.store import store_kv

PAGE_SIZE = 16

# Conversions take rows of 72 element by element, rows of 64 in packs.
SMALL_MODELS = (
    Model("rows of 72", 288, 2, 4, 2, 72, window=24),
    Model("rows of 64", 512, 2, 8, 2, 64, qk_norm=True, sinks=True),
    Model("latents", 512, 2, 16, 0, 192, latent=512, rope=64),
)
SMALL = command.Sizes(
    tokens=(37,), batches=(3,), contexts=(70,), prefills=[(21, 42)], transferred=90
)


def benchmarked(device: Any, models: Sequence[Model], sizes: command.Sizes) -> None:
    """Call operations in the shapes of models, as the benchmarks do."""
    for shape in command.cases(command.OPERATIONS, models, command.FORMATS, sizes):
        print(shape.name, flush=True)
        for call in shape.build(device, 1).kvcupy(own_arrays):
            call(None)
        _finish(device)


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


def transfers(device: Any, models: Sequence[Model], sizes: command.Sizes) -> None:
    """Move pages between pools with every method, and pages that do not exist."""
    for model in models:
        print(f"transfer_pages {model.name}, every method", flush=True)
        shape = transfer.ModelShape(model, sizes.transferred, DIRECTIONS[0])
        pools = transfer.Pools(device, shape.pools)
        for direction in DIRECTIONS:
            for method in ("kernel", "copy", "staged"):
                pools.transfer(direction, None, method=method)
        _finish(device)
        src, dst, *_ = pools.ends(DIRECTIONS[0])
        with suppress(kv.IndexFault):  # the copy engine records no fault, a kernel does
            kv.transfer_pages(src, dst, [src.num_pages], [0], method="copy")
            kv.check_faults(device)


def others(device: Any, models: Sequence[Model], sizes: command.Sizes) -> None:
    """Call what has no benchmark: indices that the host reads, and a paged cache."""
    table = device.asarray(np.arange(8, dtype=np.int32).reshape(2, 4))
    lengths, new = (device.asarray(np.array(n, np.int32)) for n in ([50, 21], [3, 21]))
    slots = kv.slot_mapping(table, lengths, new, PAGE_SIZE)
    kv.page_table_csr(table, lengths, PAGE_SIZE)
    kv.find_duplicate_slots(slots)
    rows = [device.zeros((slots.shape[0], 2, 72), np.float32) for _ in "kv"]
    caches = [device.zeros((8, PAGE_SIZE, 2, 72), np.float32) for _ in "kv"]
    store_kv(*rows, *caches, slots)
    for model in (model for model in models if not model.mla):
        _serve(device, model, sizes.prefills[0][0])
    _finish(device)


def _serve(device: Any, model: Model, new: int) -> None:
    """Run steps of a paged cache in both rope modes: prefill, a fork, a draft tree."""
    rope = kv.rope_table(4096, model.head_dim, device=device)
    for rope_mode in ("normal", "inline"):
        print(f"PagedKVCache {model.name}, rope_mode {rope_mode}", flush=True)
        cache = kv.PagedKVCache(
            num_layers=2, num_q_heads=model.q_heads, num_kv_heads=model.kv_heads,
            head_dim=model.head_dim, num_pages=new // PAGE_SIZE + 8, page_size=PAGE_SIZE,
            rope=rope, rope_mode=rope_mode, device=device,
        )  # fmt: skip
        cache.add_sequence("prompt")
        _step(cache, device, model, ["prompt"], [new])
        cache.fork_sequence("prompt", "answer")
        trees = [None, [-1, 0, 0]]
        _step(cache, device, model, ["prompt", "answer"], [1, 3], token_tree=trees)
        cache.commit_token_tree(["answer"], [2])


def _step(
    cache: Any, device: Any, model: Model, names: list[str], new: list[int], **options: Any
) -> None:
    heads = (model.q_heads, model.kv_heads, model.kv_heads)
    with cache.forward(names, new, **options):
        for layer in range(2):
            rows = (device.zeros((sum(new), n, model.head_dim), "bf16") for n in heads)
            cache.attention(layer, *rows)


def _finish(device: Any) -> None:
    """Wait for the device; IndexFault if a kernel recorded a fault, as all indices are in range."""
    device.synchronize()
    kv.check_faults(device)


def run(device: Any) -> None:
    """Call the operations one after another, and check for faults after each."""
    for part in (benchmarked, transfers, others):
        part(device, SMALL_MODELS, SMALL)
    verified(device)


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
