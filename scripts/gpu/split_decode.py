"""Repeat a split decode, and compare the bits of each result with the first result.

The parts of a long sequence are attended by several blocks, the last of which merges them. A merge
that begins too early is rare, and a single verification does not see it.

    python -m gpu.split_decode --device cuda --repeats 100000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvcupy as kv

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
LENGTHS = (16_384, 37, 4096, 1)


def repeat(device: Any, repeats: int, lengths: Sequence[int] = LENGTHS) -> int:
    """Return how many elements of the outputs of a decode ever differed from the first one's."""
    rng = np.random.default_rng(0)
    pages = [-(-length // PAGE_SIZE) for length in lengths]
    table = np.full((len(lengths), max(pages)), -1, np.int32)
    order = rng.permutation(sum(pages)).astype(np.int32)
    for row, (start, count) in enumerate(zip(np.cumsum([0, *pages]), pages, strict=False)):
        table[row, :count] = order[start : start + count]

    def random(*shape: int) -> Any:
        bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
        return kv.view_as(device.asarray(bits.astype(np.uint16)), "bf16")

    caches = [random(sum(pages), PAGE_SIZE, KV_HEADS, HEAD_DIM) for _ in "kv"]
    query = random(len(lengths), HEADS, HEAD_DIM)
    indices = device.asarray(table), device.asarray(np.array(lengths, np.int32))
    out = device.zeros(query.shape, np.float32)
    bits = device.carrier(kv.arrays.view(out)).view(np.uint32)
    stream = device.stream()
    device.synchronize()

    def decode() -> None:
        kv.paged_attention(query, *caches, *indices, out=out, stream=stream)

    decode()
    stream.synchronize()
    first, differs = bits.copy(), bits ^ bits
    scratch = bits.copy()
    device.synchronize()

    def compare() -> None:
        np.bitwise_xor(bits, first, out=scratch)  # CuPy's, of its arrays
        np.bitwise_or(differs, scratch, out=differs)

    for number in range(repeats):
        decode()
        device.run(compare, stream)
        if number % 1000 == 999:
            stream.synchronize()
    stream.synchronize()
    return int(np.count_nonzero(device.to_numpy(differs)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--repeats", type=int, default=100_000)
    options = parser.parse_args(argv)
    device = kv.device(options.device) if options.device else kv.default_device()
    wrong = repeat(device, options.repeats)
    print(f"{options.repeats} decodes on {device.name}, {wrong} elements differed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
