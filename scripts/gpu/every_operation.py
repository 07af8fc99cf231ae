"""Call every operation, so that each kernel is launched: run by compute-sanitizer and ncu.

The shapes are small, and chosen so that rows end within a thread's word and pages within a row of
threads. With `--large` they are those of a served model, more than fits in an L2 cache. Nothing is
timed, and results are not compared: tests do that.

    compute-sanitizer --tool racecheck python scripts/gpu/every_operation.py --device cuda
    ncu python scripts/gpu/every_operation.py --device cuda --large
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import kvcupy as kv
from kvcupy.ops.store import store_kv

PAGE_SIZE = 16
DTYPES = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
}


@dataclass(frozen=True)
class Size:
    """Sizes of the arguments of every operation."""

    tokens: int
    heads: int  # of the query
    kv_heads: int
    head_dim: int
    sequences: int
    context: int  # tokens of each sequence
    new: int  # of them, in a prefill
    layers: int
    latent: tuple[int, int] = (512, 64)


# Conversions take rows of 72 element by element, rows of 64 in packs.
SMALL = (Size(37, 4, 2, 72, 3, 70, 21, 2, (40, 24)), Size(33, 8, 2, 64, 2, 50, 18, 1, (64, 32)))
LARGE = (Size(16_384, 32, 8, 128, 16, 2048, 512, 2),)


class Operations:
    """Arguments of one size on one device, and a method for each operation.

    Parameters
    ----------
    device : of the arrays
    size : of the arguments
    """

    def __init__(self, device: Any, size: Size) -> None:
        self.device, self.size = device, size
        self.rng = np.random.default_rng(0)
        self.pages = -(-max(size.tokens, size.sequences * size.context) // PAGE_SIZE) + 3
        self.positions = self.indices(np.arange(size.tokens) % 64)
        slots = self.rng.permutation(self.pages * PAGE_SIZE)[: size.tokens]
        slots[-1] = -1  # padding
        self.slots = self.indices(slots)

    # Arrays

    def values(self, *shape: int, fmt: str = "bf16") -> Any:
        """Return an array of random values; large ones repeat."""
        count = int(np.prod(shape))
        bank = self.rng.standard_normal(min(count, 1 << 16), np.float32)
        scaled = (bank * 20 if fmt == "int8" else bank).astype(DTYPES[fmt])
        return self.device.asarray(np.resize(scaled, shape))

    def indices(self, values: Any) -> Any:
        return self.device.asarray(np.asarray(values, np.int32))

    def rows(self, *heads: int, fmt: str = "bf16") -> list[Any]:
        """Return rows of all tokens, one array per number of heads."""
        size = self.size
        return [self.values(size.tokens, count, size.head_dim, fmt=fmt) for count in heads]

    def caches(self, fmt: str = "bf16") -> list[Any]:
        size = self.size
        shape = (self.pages, PAGE_SIZE, size.kv_heads, size.head_dim)
        return [self.values(*shape, fmt=fmt) for _ in "kv"]

    def scales(self) -> dict[str, Any]:
        """Return scales of a quantised cache, one per token and head."""
        shape = (self.pages * PAGE_SIZE, self.size.kv_heads)
        ones = np.ones(shape, np.float32)
        return {f"{part}_scale_cache": self.device.asarray(ones) for part in "kv"}

    def table(self, width: int) -> Any:
        return kv.rope_table(64, width, device=self.device)

    # Operations

    def store(self) -> None:
        """Copy rows, convert them, and quantise them with dynamic scales."""
        heads = self.size.kv_heads
        for fmt, options in (("bf16", {}), ("fp8_e4m3", {"k_scale": 0.5}), ("int8", self.scales())):
            kv.store_kv(*self.rows(heads, heads), *self.caches(fmt), self.slots, **options)
        key, value = self.rows(heads, heads)
        store = kv.bind(store_kv, kv.vary(key), value, *self.caches(), self.slots)
        store(key=value)
        latent, rope_key = (self.values(self.size.tokens, n) for n in self.size.latent)
        cache = self.values(self.pages, PAGE_SIZE, sum(self.size.latent))
        kv.store_mla(latent, rope_key, cache, self.slots)

    def rotate(self) -> None:
        """Rotate, alone and with stores."""
        size = self.size
        query, key, value = self.rows(size.heads, size.kv_heads, size.kv_heads)
        table = self.table(size.head_dim)
        norms = {f"{name}_norm": self.values(size.head_dim) for name in ("query", "key")}
        kv.apply_rope(query, key, table, self.positions, **norms)
        for fmt, options in (("bf16", {}), ("fp8_e4m3", self.scales())):
            kv.rope_store_kv(
                query, key, value, table, self.positions, *self.caches(fmt), self.slots, **options
            )
        latent, rope = size.latent
        kv.rope_store_mla(
            self.values(size.tokens, size.heads, rope), self.values(size.tokens, latent),
            self.values(size.tokens, rope), self.table(rope), self.positions,
            self.values(self.pages, PAGE_SIZE, latent + rope), self.slots,
        )  # fmt: skip

    def gather(self) -> None:
        """Read rows as they are, and dequantised."""
        kv.gather_kv(*self.caches(), self.slots)
        kv.gather_kv(*self.caches("int8"), self.slots, dtype="bf16", **self.scales())

    def four_bit(self) -> None:
        """Store into four-bit caches, rotated or not, read them, and attend over them."""
        size, heads = self.size, self.size.kv_heads
        if size.head_dim % 32:  # rows are whole groups
            return
        for fmt in ("nvfp4", "mxfp4", "int4"):
            shape = (self.pages, PAGE_SIZE, heads, size.head_dim)
            caches = [self.device.zeros(shape, fmt) for _ in "kv"]
            key, value = self.rows(heads, heads)
            kv.store_kv(key, value, *caches, self.slots)
            table = self.table(size.head_dim)
            kv.rope_store_kv(None, key, value, table, self.positions, *caches, self.slots)
            kv.gather_kv(*caches, self.slots, dtype="bf16")
            pages, lengths = self._sequences()
            query = self.values(size.sequences, size.heads, size.head_dim)
            kv.paged_attention(query, *caches, pages, lengths)

    def move_pages(self) -> None:
        """Copy pages within an array, and between pools with every method."""
        some = np.arange(0, self.pages // 2)
        kv.copy_pages(
            tuple(self.caches()), self.indices(some), self.indices(some + self.pages // 2)
        )
        size, device = self.size, self.device
        shape = (self.pages, PAGE_SIZE, size.layers, size.kv_heads, size.head_dim)
        near = kv.KVPool(*shape, device=device)
        far = kv.KVPool(*shape, layout="page_first", placement="pinned", device=device)
        packed = kv.KVPool(*shape, dtype="fp8_e4m3", scales=True, device=device)
        pages = list(range(0, self.pages, 2))
        for method in ("kernel", "copy", "staged"):
            kv.transfer_pages(near, far, pages, pages, method=method)
            kv.transfer_pages(far, near, pages, pages, method=method)
        kv.transfer_pages(near, packed, pages, pages, convert=True)
        kv.transfer_pages(packed, near, pages, pages, convert=True)
        if size.head_dim % 32 == 0:  # rows are whole groups
            codes = kv.KVPool(*shape, dtype="nvfp4", layout="page_first", device=device)
            kv.transfer_pages(near, codes, pages, pages, convert=True)
            kv.transfer_pages(codes, near, pages, pages, convert=True)
        with suppress(kv.IndexFault):  # the copy engine records no fault, a kernel does
            kv.transfer_pages(near, far, [self.pages], [0], method="copy")
            kv.check_faults(device)

    def find_slots(self) -> None:
        """Find slots and pages of sequences."""
        table, lengths = self._sequences()
        new = self.indices([self.size.new] * self.size.sequences)
        slots = kv.slot_mapping(table, lengths, new, PAGE_SIZE)
        kv.page_table_csr(table, lengths, PAGE_SIZE)
        kv.find_duplicate_slots(slots)

    def decode(self) -> None:
        """Attend with one token per sequence: split keys, 16-bit and quantised, and latents."""
        size = self.size
        query = self.values(size.sequences, size.heads, size.head_dim)
        table, lengths = self._sequences()
        wide = np.full((size.sequences, max(table.shape[1], 2048 // PAGE_SIZE)), -1)
        wide[:, : table.shape[1]] = self.device.to_numpy(table)
        for fmt, options in (("bf16", {}), ("fp8_e4m3", {"k_scale": 0.5})):
            kv.paged_attention(query, *self.caches(fmt), self.indices(wide), lengths, **options)
        latents = self.values(self.pages, PAGE_SIZE, 1, 576)
        for heads in (size.heads, 64):  # the kernels for few and for many
            query = self.values(size.sequences, heads, 576)
            kv.paged_attention(query, latents, latents[..., :512], table, lengths)

    def prefill(self) -> None:
        """Attend with many tokens per sequence, with tensor cores and without."""
        size = self.size
        table, lengths = self._sequences()
        new = np.full(size.sequences, size.new)
        for fmt in ("bf16", "fp32"):
            query = self.values(int(new.sum()), size.heads, size.head_dim, fmt=fmt)
            kv.paged_attention(
                query, *self.caches(fmt), table, lengths, query_lens=self.indices(new)
            )

    def merge(self) -> None:
        """Merge attention over two sets of keys."""
        shape = (self.size.tokens, self.size.heads)
        outs = [self.values(*shape, self.size.head_dim) for _ in "ab"]
        sums = [self.values(*shape, fmt="fp32") for _ in "ab"]
        kv.merge_states(outs[0], sums[0], outs[1], sums[1])

    def serve(self) -> None:
        """Run steps of a paged cache in both rope modes: prefill, a fork, a draft tree."""
        size, device = self.size, self.device
        for rope_mode in ("normal", "inline"):
            cache = kv.PagedKVCache(
                num_layers=2, num_q_heads=size.heads, num_kv_heads=size.kv_heads,
                head_dim=size.head_dim, num_pages=self.pages, page_size=PAGE_SIZE,
                rope=kv.rope_table(4096, size.head_dim, device=device), rope_mode=rope_mode,
                device=device,
            )  # fmt: skip
            cache.add_sequence("prompt")
            self._step(cache, ["prompt"], [size.new])
            cache.fork_sequence("prompt", "answer")
            self._step(cache, ["prompt", "answer"], [1, 3], token_tree=[None, [-1, 0, 0]])
            cache.commit_token_tree(["answer"], [2])

    def _step(self, cache: Any, names: list[str], new: list[int], **options: Any) -> None:
        size, tokens = self.size, sum(new)
        heads = (size.heads, size.kv_heads, size.kv_heads)
        with cache.forward(names, new, **options):
            for layer in range(2):
                cache.attention(layer, *(self.values(tokens, n, size.head_dim) for n in heads))

    def _sequences(self) -> tuple[Any, Any]:
        """Return page table and lengths, the last sequence the shortest."""
        size = self.size
        pages = -(-size.context // PAGE_SIZE)
        table = self.rng.permutation(self.pages)[: size.sequences * pages]
        lengths = np.full(size.sequences, size.context)
        lengths[-1] = size.new
        return self.indices(table.reshape(size.sequences, pages)), self.indices(lengths)


CALLS: dict[str, Callable[[Operations], None]] = {
    method.__name__: method
    for method in (
        Operations.store, Operations.rotate, Operations.gather, Operations.four_bit,
        Operations.move_pages,
        Operations.find_slots, Operations.decode, Operations.prefill, Operations.merge,
        Operations.serve,
    )
}  # fmt: skip


def run(device: Any, size: Size, names: Sequence[str] = tuple(CALLS)) -> None:
    """Call the operations one after another, and check for faults after each.

    Raises
    ------
    IndexFault
        A kernel recorded a fault, although all indices are in range.
    """
    operations = Operations(device, size)
    for name in names:
        print(f"{name}, rows of {size.head_dim}", flush=True)
        CALLS[name](operations)
        device.synchronize()
        kv.check_faults(device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--large", action="store_true", help="the shapes of a served model")
    parser.add_argument("--only", nargs="+", choices=CALLS, help="default: all")
    arguments = parser.parse_args(argv)
    kv.config.fallback = "error"
    try:
        device = kv.device(arguments.device) if arguments.device else kv.default_device()
    except (ValueError, kv.DeviceError) as error:
        parser.exit(2, f"--device: {str(error).splitlines()[0]}\n")
    if device.kind == "cuda":
        import cupy

        cupy.cuda.set_allocator(None)  # one allocation per array, so that overruns are seen
    elif not arguments.large:
        device.warp_lanes = 32  # the same kernels, laid out as on a GPU
    for size in LARGE if arguments.large else SMALL:
        run(device, size, arguments.only or tuple(CALLS))
    print(f"every operation was called on {device.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
