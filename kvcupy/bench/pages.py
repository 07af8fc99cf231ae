"""Measure what reads caches and page tables: gather, page copies and slot mappings.

A candidate makes one call per set, and leaves its result in arrays of the case, or returns it.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import kvcupy as kv

from . import candidates
from .baselines import (
    Compile,
    Wrap,
    as_it_is,
    by_device,
    ignoring_stream,
    on_stream,
    upload,
)
from .checks import BF16, normal_bits
from .models import MODELS, Model
from .store import FP8, SCALE
from .timers import Call


@dataclass(frozen=True)
class Shape(candidates.Shape):
    """One case: of `count` tokens to gather, pages to copy, or sequences of a step.

    `page_size` is in tokens; in the name where it is not 16. Slots are of no model.
    """

    operation: str
    count: int
    format: str = "bf16"
    append: int = 1
    model: Model = MODELS["llama-3.1-8b"]
    page_size: int = 16

    @property
    def name(self) -> str:
        model, pages = self.model.name, f" page={self.page_size}" * (self.page_size != 16)
        if self.operation == "gather_kv":
            return f"gather_kv {model} {self.format} to bf16 T={self.count}{pages}"
        if self.operation == "copy_pages":
            what = "latent" if self.model.mla else "K and V"
            return f"copy_pages {model} {what} pages={self.count}{pages}"
        return f"slot_mapping sequences={self.count} appended={self.append}{pages}"

    @property
    def model_name(self) -> str:
        return "any" if self.operation == "slot_mapping" else self.model.name

    @property
    def row_shape(self) -> tuple[int, int]:
        """Heads and width of a token in one cache."""
        if self.model.mla:
            return 1, sum(self.model.row_widths)
        return self.model.kv_heads, self.model.head_dim

    @property
    def num_caches(self) -> int:
        return 1 if self.model.mla else 2

    @property
    def bytes_moved(self) -> int:
        elements = sum(self.model.row_widths)
        if self.operation == "gather_kv":
            read = elements * (2 if self.format == "bf16" else 1)
            scales = 8 * self.model.kv_heads if self.format == "fp8 dynamic" else 0
            return self.count * (read + 2 * elements + scales + 8)
        if self.operation == "copy_pages":
            return self.count * (2 * elements * self.page_size * 2 + 16)
        tokens = self.count * self.append  # slots, and page table entries
        return tokens * 8 + self.count * (8 + 4 * -(-self.append // self.page_size))

    def build(self, device: Any, sets: int) -> candidates.Case:
        kinds: dict[str, type[_Case]] = {
            "gather_kv": Gather, "copy_pages": CopyPages, "slot_mapping": SlotMapping
        }  # fmt: skip
        return kinds[self.operation](device, self, sets)


class _Case(candidates.Case):
    """Arguments on one device, `sets` times over."""

    def __init__(self, device: Any, shape: Shape, sets: int) -> None:
        super().__init__(device, shape, sets)
        self.rng = np.random.default_rng(0)
        self.prepare()
        device.synchronize()

    @abc.abstractmethod
    def prepare(self) -> None:
        """Draw the arguments, and upload them."""

    def by_device(self, works: Sequence[Callable[[], Any]]) -> list[Call]:
        """Return calls of array expressions."""
        return [partial(by_device, self.device, work) for work in works]


class Gather(_Case):
    """Rows of K and V out of a paged cache, dequantised where it is quantised."""

    def prepare(self) -> None:
        shape, rng = self.shape, self.rng
        num_pages = -(-(self.sets * shape.count + 64) // shape.page_size)
        num_slots = num_pages * shape.page_size
        cache = (num_pages, shape.page_size, *shape.row_shape)
        self.host = [normal_bits(rng, cache) for _ in "kv"]
        if shape.format != "bf16":
            self.host = [(b.view(BF16).astype(np.float32) / SCALE).astype(FP8) for b in self.host]
        self.stored = "bf16" if shape.format == "bf16" else "fp8_e4m3"
        bits = np.uint16 if shape.format == "bf16" else np.uint8
        self.caches = [upload(self.device, array.view(bits)) for array in self.host]
        self.scales = rng.uniform(0.01, 0.1, (2, num_slots, shape.row_shape[0])).astype(np.float32)
        self.scales_on_device = [upload(self.device, scales) for scales in self.scales]
        order = rng.permutation(num_slots)
        count = shape.count
        self.slots = [order[i * count : (i + 1) * count] for i in range(self.sets)]
        self.slots_on_device = [upload(self.device, slots) for slots in self.slots]
        out = (count, *shape.row_shape)
        self.out = [[self.device.zeros(out, np.uint16) for _ in "kv"] for _ in range(self.sets)]

    def wipe(self) -> None:
        for array in (array for outs in self.out for array in outs):
            self.device.copy(array, self.device.zeros(array.shape, array.dtype))

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        caches = [wrap(cache, self.stored) for cache in self.caches]
        gather: Any = kv.gather_kv
        options: dict[str, Any] = {}
        if self.shape.format == "fp8 static":
            options = {"k_scale": SCALE, "v_scale": SCALE}
        elif self.shape.format == "fp8 dynamic":
            scales = [wrap(scale, "fp32") for scale in self.scales_on_device]
            options = dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=True))
        calls: list[Call] = []
        for slots, outs in zip(self.slots_on_device, self.out, strict=True):
            targets = {f"{n}_out": wrap(o, "bf16") for n, o in zip("kv", outs, strict=True)}
            rows = [*caches, wrap(slots, "int64")]
            calls.append(partial(on_stream, partial(gather, *rows, **targets, **options)))
        return calls

    def expressions(self) -> list[Call] | None:
        if self.shape.format != "bf16":
            return None
        flat = [cache.reshape(-1, *self.shape.row_shape) for cache in self.caches]

        def gather(slots: Any, outs: list[Any]) -> None:
            for cache, out in zip(flat, outs, strict=True):
                out[...] = cache[slots]

        sets = zip(self.slots_on_device, self.out, strict=True)
        return self.by_device([partial(gather, slots, outs) for slots, outs in sets])

    def torch(self, torch: Any, wrap: Wrap, compile: Compile = as_it_is) -> list[Call]:
        rows = self.shape.row_shape
        caches = [wrap(cache, self.stored).reshape(-1, *rows) for cache in self.caches]
        scales = [wrap(scale, "fp32") for scale in self.scales_on_device]

        def gather(slots: Any, outs: list[Any]) -> None:
            for cache, scale, out in zip(caches, scales, outs, strict=True):
                if self.shape.format == "bf16":
                    torch.index_select(cache, 0, slots, out=out)
                    continue
                rows = cache.view(torch.uint8)[slots].view(cache.dtype).float()
                own = scale[slots][..., None] if self.shape.format == "fp8 dynamic" else SCALE
                out.copy_(rows * own)

        work = compile(gather)
        calls: list[Call] = []
        for slots, outs in zip(self.slots_on_device, self.out, strict=True):
            targets = [wrap(out, "bf16") for out in outs]
            bound = partial(work, wrap(slots, "int64"), targets)
            calls.append(partial(ignoring_stream, bound))
        return calls

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for slots, outs in zip(self.slots, self.out, strict=True):
            for cache, scales, out in zip(self.host, self.scales, outs, strict=True):
                rows = cache.reshape(-1, *self.shape.row_shape)[slots]
                if self.shape.format != "bf16":
                    static = self.shape.format == "fp8 static"
                    own = np.float32(SCALE) if static else scales[slots][..., None]
                    rows = (rows.astype(np.float32) * own).astype(BF16)
                self.require(candidate, "rows", out, rows.view(np.uint16))


class CopyPages(_Case):
    """Pages of each cache onto other pages."""

    def prepare(self) -> None:
        count = self.shape.count
        num_pages = 2 * self.sets * count
        pages = (num_pages, self.shape.page_size, *self.shape.row_shape)
        self.host = [normal_bits(self.rng, pages) for _ in range(self.shape.num_caches)]
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

    def torch(self, torch: Any, wrap: Wrap, compile: Compile = as_it_is) -> list[Call]:
        caches, work = [wrap(cache, "bf16") for cache in self.caches], compile(_copy_all)
        calls: list[Call] = []
        for pair in self.pages_on_device:
            pages = (wrap(array, "int64") for array in pair)
            calls.append(partial(ignoring_stream, partial(work, caches, *pages)))
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


class SlotMapping(_Case):
    """The slots of a step in which every sequence appends the same number of tokens."""

    def prepare(self) -> None:
        batch, append, rng, page_size = (
            self.shape.count, self.shape.append, self.rng, self.shape.page_size
        )  # fmt: skip
        most = 4096
        self.steps = []
        for _ in range(self.sets):
            table = rng.permutation(batch * most // page_size).reshape(batch, -1).astype(np.int32)
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
            tables, *lengths = (wrap(array, "int32") for array in step)
            find = partial(kv.slot_mapping, tables, *lengths, out=wrap(out, "int64"))
            calls.append(partial(on_stream, partial(find, page_size=self.shape.page_size)))
        return calls

    def expressions(self) -> list[Call] | None:
        library = sys.modules[type(self.out[0]).__module__.partition(".")[0]]  # numpy or cupy
        find: Callable[..., None] = partial(self._find, library.arange, library.repeat)
        sets = zip(self.on_device, self.out, strict=True)
        return self.by_device([partial(find, *step, out) for step, out in sets])

    def torch(self, torch: Any, wrap: Wrap, compile: Compile = as_it_is) -> list[Call]:
        work = compile(self._find)
        arange = partial(torch.arange, device=wrap(self.out[0], "int64").device)
        calls: list[Call] = []
        for step, out in zip(self.on_device, self.out, strict=True):
            arrays = [wrap(array, "int32") for array in step] + [wrap(out, "int64")]
            bound = partial(work, arange, torch.repeat_interleave, *arrays)
            calls.append(partial(ignoring_stream, bound))
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
        batch, append, size = self.shape.count, self.shape.append, self.shape.page_size
        rows = repeat(arange(batch), append)
        tokens = (lengths - counts)[rows] + arange(batch * append) - rows * append
        out[...] = table[rows, tokens // size] * size + tokens % size

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        size = self.shape.page_size
        for (table, lengths, counts), out in zip(self.steps, self.out, strict=True):
            spans = zip(table, lengths, counts, strict=True)
            want = [
                pages[token // size] * size + token % size
                for pages, length, count in spans
                for token in range(length - count, length)
            ]
            self.require(candidate, "slots", out, np.array(want, np.int64))
