"""Measure what reads caches and page tables: gather, page copies and slot mappings.

A candidate makes one call per set, and leaves its result in arrays of the case, or returns it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from common.measure import require_equal
from common.rotations import BF16, normal_bits

import kvcupy as kv

from .candidates import Bench, add_arguments, render
from .store import FP8, SCALE
from .timers import Call, Wrap, by_device, ignoring_stream, on_stream, upload

__all__ = ["add_arguments", "render", "run"]  # what `bench.py` calls

HEADS, WIDTH, PAGE = 8, 128, 16  # of llama-3.1-8b; tokens per page
ROW = HEADS * WIDTH
FORMATS = ("bf16", "fp8 static", "fp8 dynamic")


@dataclass(frozen=True)
class Shape:
    """One case: of `count` tokens to gather, pages to copy, or sequences of a step."""

    operation: str
    count: int
    format: str = "bf16"
    append: int = 1

    @property
    def name(self) -> str:
        if self.operation == "gather_kv":
            return f"gather_kv llama-3.1-8b {self.format} to bf16 T={self.count}"
        if self.operation == "copy_pages":
            return f"copy_pages llama-3.1-8b K and V pages={self.count}"
        return f"slot_mapping sequences={self.count} appended={self.append}"

    @property
    def bytes_moved(self) -> int:
        if self.operation == "gather_kv":
            read = 2 * ROW * (2 if self.format == "bf16" else 1)
            scales = 8 * HEADS if self.format == "fp8 dynamic" else 0
            return self.count * (read + 4 * ROW + scales + 8)
        if self.operation == "copy_pages":
            return self.count * (2 * 2 * PAGE * ROW * 2 + 16)
        tokens = self.count * self.append  # slots, and page table entries
        return tokens * 8 + self.count * (8 + 4 * -(-self.append // PAGE))

    def build(self, device: Any, sets: int) -> PageCase:
        kinds = {"gather_kv": Gather, "copy_pages": CopyPages, "slot_mapping": SlotMapping}
        return kinds[self.operation](device, self, sets)


def shapes() -> list[Shape]:
    """Return the cases."""
    cases = [Shape("gather_kv", count, fmt) for fmt in FORMATS for count in (1, 128, 4096)]
    cases += [Shape("copy_pages", count) for count in (1, 32, 512)]
    steps = ((1, 1), (64, 1), (256, 1), (1, 512), (16, 512))
    return cases + [Shape("slot_mapping", count, append=append) for count, append in steps]


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    return Bench(device, options).report(shapes())


class PageCase:
    """Arguments on one device, `sets` times over, and every candidate's calls."""

    def __init__(self, device: Any, shape: Shape, sets: int) -> None:
        self.device, self.shape, self.sets = device, shape, sets
        self.rng = np.random.default_rng(0)
        self.prepare()
        device.synchronize()

    def prepare(self) -> None: ...

    def wipe(self) -> None: ...

    def expressions(self) -> list[Call] | None:
        return None

    def by_device(self, works: Sequence[Callable[[], Any]]) -> list[Call]:
        return [partial(by_device, self.device, work) for work in works]

    def require(self, candidate: str, name: str, got: Any, want: np.ndarray[Any, Any]) -> None:
        """Compare with NumPy's result, byte by byte."""
        self.device.synchronize()
        case = f"{self.shape.name}, {candidate}, {name}"
        require_equal(case, self.device.to_numpy(got).view(want.dtype), want)


class Gather(PageCase):
    """Rows of K and V out of a paged cache, dequantised where it is quantised."""

    def prepare(self) -> None:
        shape, rng = self.shape, self.rng
        num_slots = -(-(self.sets * shape.count + 64) // PAGE) * PAGE
        cache = (num_slots // PAGE, PAGE, HEADS, WIDTH)
        self.host = [normal_bits(rng, cache) for _ in "kv"]
        if shape.format != "bf16":
            self.host = [(b.view(BF16).astype(np.float32) / SCALE).astype(FP8) for b in self.host]
        self.stored = "bf16" if shape.format == "bf16" else "fp8_e4m3"
        bits = np.uint16 if shape.format == "bf16" else np.uint8
        self.caches = [upload(self.device, array.view(bits)) for array in self.host]
        self.scales = rng.uniform(0.01, 0.1, (2, num_slots, HEADS)).astype(np.float32)
        self.scales_on_device = [upload(self.device, scales) for scales in self.scales]
        order = rng.permutation(num_slots)
        count = shape.count
        self.slots = [order[i * count : (i + 1) * count] for i in range(self.sets)]
        self.slots_on_device = [upload(self.device, slots) for slots in self.slots]
        out = (count, HEADS, WIDTH)
        self.out = [[self.device.zeros(out, np.uint16) for _ in "kv"] for _ in range(self.sets)]

    def wipe(self) -> None:
        for array in (array for outs in self.out for array in outs):
            self.device.copy(array, self.device.zeros(array.shape, array.dtype))

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        caches = [wrap(cache, self.stored) for cache in self.caches]
        options: dict[str, Any] = {}
        if self.shape.format == "fp8 static":
            options = {"k_scale": SCALE, "v_scale": SCALE}
        elif self.shape.format == "fp8 dynamic":
            scales = [wrap(scale, "fp32") for scale in self.scales_on_device]
            options = dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=True))
        calls: list[Call] = []
        for slots, outs in zip(self.slots_on_device, self.out, strict=True):
            targets = {f"{n}_out": wrap(o, "bf16") for n, o in zip("kv", outs, strict=True)}
            call = partial(kv.gather_kv, *caches, wrap(slots, "int64"), **targets, **options)
            calls.append(partial(on_stream, call))
        return calls

    def expressions(self) -> list[Call] | None:
        if self.shape.format != "bf16":
            return None
        flat = [cache.reshape(-1, HEADS, WIDTH) for cache in self.caches]

        def gather(slots: Any, outs: list[Any]) -> None:
            for cache, out in zip(flat, outs, strict=True):
                out[...] = cache[slots]

        sets = zip(self.slots_on_device, self.out, strict=True)
        return self.by_device([partial(gather, slots, outs) for slots, outs in sets])

    def torch(self, torch: Any, wrap: Wrap) -> list[Call]:
        caches = [wrap(cache, self.stored).reshape(-1, HEADS, WIDTH) for cache in self.caches]
        scales = [wrap(scale, "fp32") for scale in self.scales_on_device]

        def gather(slots: Any, outs: list[Any]) -> None:
            for cache, scale, out in zip(caches, scales, outs, strict=True):
                if self.shape.format == "bf16":
                    torch.index_select(cache, 0, slots, out=out)
                    continue
                rows = cache.view(torch.uint8)[slots].view(cache.dtype).float()
                own = scale[slots][..., None] if self.shape.format == "fp8 dynamic" else SCALE
                out.copy_(rows * own)

        calls: list[Call] = []
        for slots, outs in zip(self.slots_on_device, self.out, strict=True):
            targets = [wrap(out, "bf16") for out in outs]
            work = partial(gather, wrap(slots, "int64"), targets)
            calls.append(partial(ignoring_stream, work))
        return calls

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for slots, outs in zip(self.slots, self.out, strict=True):
            for cache, scales, out in zip(self.host, self.scales, outs, strict=True):
                rows = cache.reshape(-1, HEADS, WIDTH)[slots]
                if self.shape.format != "bf16":
                    static = self.shape.format == "fp8 static"
                    own = np.float32(SCALE) if static else scales[slots][..., None]
                    rows = (rows.astype(np.float32) * own).astype(BF16)
                self.require(candidate, "rows", out, rows.view(np.uint16))


class CopyPages(PageCase):
    """Pages of K and of V onto other pages."""

    def prepare(self) -> None:
        count = self.shape.count
        num_pages = 2 * self.sets * count
        self.host = [normal_bits(self.rng, (num_pages, PAGE, HEADS, WIDTH)) for _ in "kv"]
        self.caches = [upload(self.device, array) for array in self.host]
        order = self.rng.permutation(num_pages).reshape(self.sets, 2, count)
        self.pages = [(src.copy(), dst.copy()) for src, dst in order]
        self.pages_on_device = [
            tuple(upload(self.device, pages) for pages in pair) for pair in self.pages
        ]

    def wipe(self) -> None:
        for cache, bits in zip(self.caches, self.host, strict=True):
            self.device.copy(cache, self.device.asarray(bits))

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        caches = [wrap(cache, "bf16") for cache in self.caches]
        calls: list[Call] = []
        for pair in self.pages_on_device:
            pages = (wrap(array, "int64") for array in pair)
            calls.append(partial(on_stream, partial(kv.copy_pages, caches, *pages)))
        return calls

    def expressions(self) -> list[Call] | None:
        return self.by_device(
            [partial(_copy_all, self.caches, *pair) for pair in self.pages_on_device]
        )

    def torch(self, torch: Any, wrap: Wrap) -> list[Call]:
        caches = [wrap(cache, "bf16") for cache in self.caches]
        calls: list[Call] = []
        for pair in self.pages_on_device:
            pages = (wrap(array, "int64") for array in pair)
            calls.append(partial(ignoring_stream, partial(_copy_all, caches, *pages)))
        return calls

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for cache, bits in zip(self.caches, self.host, strict=True):
            want = bits.copy()
            for src, dst in self.pages:
                want[dst] = bits[src]
            self.require(candidate, "pages", cache, want)


def _copy_all(caches: list[Any], src: Any, dst: Any) -> None:
    for cache in caches:
        cache[dst] = cache[src]


class SlotMapping(PageCase):
    """The slots of a step in which every sequence appends the same number of tokens."""

    def prepare(self) -> None:
        batch, append, rng = self.shape.count, self.shape.append, self.rng
        most = 4096
        self.steps = []
        for _ in range(self.sets):
            table = rng.permutation(batch * most // PAGE).reshape(batch, -1).astype(np.int32)
            lengths = rng.integers(append, most + 1, batch).astype(np.int32)
            self.steps.append((table, lengths, np.full(batch, append, np.int32)))
        self.on_device = [[upload(self.device, a) for a in step] for step in self.steps]
        self.out = [self.device.zeros((batch * append,), np.int64) for _ in self.steps]
        self.unset = self.device.asarray(np.full(batch * append, -1))

    def wipe(self) -> None:
        for out in self.out:
            self.device.copy(out, self.unset)

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        calls: list[Call] = []
        for step, out in zip(self.on_device, self.out, strict=True):
            arrays = (wrap(array, "int32") for array in step)
            call = partial(kv.slot_mapping, *arrays, PAGE, out=wrap(out, "int64"))
            calls.append(partial(on_stream, call))
        return calls

    def expressions(self) -> list[Call] | None:
        library = sys.modules[type(self.out[0]).__module__.partition(".")[0]]  # numpy or cupy
        arange, repeat = library.arange, library.repeat
        sets = zip(self.on_device, self.out, strict=True)
        return self.by_device([partial(self._find, arange, repeat, *s, o) for s, o in sets])

    def torch(self, torch: Any, wrap: Wrap) -> list[Call]:
        arange = partial(torch.arange, device=wrap(self.out[0], "int64").device)
        calls: list[Call] = []
        for step, out in zip(self.on_device, self.out, strict=True):
            arrays = (wrap(array, "int32") for array in step)
            target = wrap(out, "int64")
            work = partial(self._find, arange, torch.repeat_interleave, *arrays, target)
            calls.append(partial(ignoring_stream, work))
        return calls

    def _find(
        self,
        arange: Callable[[int], Any],
        repeat: Callable[[Any, int], Any],
        table: Any,
        lengths: Any,
        counts: Any,
        out: Any,
    ) -> None:
        """Find the slots with array expressions, given how many tokens each sequence appends."""
        batch, append = self.shape.count, self.shape.append
        rows = repeat(arange(batch), append)
        tokens = (lengths - counts)[rows] + arange(batch * append) - rows * append
        out[...] = table[rows, tokens // PAGE] * PAGE + tokens % PAGE

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for (table, lengths, counts), out in zip(self.steps, self.out, strict=True):
            spans = zip(table, lengths, counts, strict=True)
            want = [
                pages[token // PAGE] * PAGE + token % PAGE
                for pages, length, count in spans
                for token in range(length - count, length)
            ]
            self.require(candidate, "slots", out, np.array(want, np.int64))
