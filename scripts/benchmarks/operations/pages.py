"""Measure what reads caches and page tables: gather, page copies, shifts and slot mappings.

A candidate makes one call per set, and leaves its result in arrays of the case, or returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from common.checks import BF16, MAX_POSITIONS, ROPE_BASE, Rotation, normal_bits, sample
from common.models import MODELS, Model

import kvcupy as kv
from kvcupy import reference

from . import candidates
from .baselines import Wrap
from .rope import TORCH_ROUNDINGS, rotation_by_torch
from .store import FP8, SCALE, STORED, stored_bits


@dataclass(frozen=True)
class Shape(candidates.Shape):
    """One case: of `count` tokens to gather, pages to copy or shift, or sequences of a step.

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
        if self.operation == "shift_pages":
            return f"shift_pages {model} K onto other pages={self.count}{pages}"
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
            return self.count * (read + 2 * elements + 8)
        if self.operation == "copy_pages":
            return self.count * (2 * elements * self.page_size * 2 + 16)
        if self.operation == "shift_pages":
            keys = self.page_size * self.model.row_widths[0]
            return self.count * (2 * keys * 2 + 16) + 4 * self.model.head_dim
        tokens = self.count * self.append  # slots, and page table entries
        return tokens * 8 + self.count * (8 + 4 * -(-self.append // self.page_size))

    def build(self, device: Any, sets: int) -> candidates.Case:
        kinds: dict[str, Callable[..., candidates.Case]] = {
            "gather_kv": Gather, "copy_pages": CopyPages, "shift_pages": ShiftPages,
            "slot_mapping": SlotMapping,
        }  # fmt: skip
        return kinds[self.operation](device, self, sets)


class Gather(candidates.Case):
    """Rows of K and V out of a paged cache, dequantised where it is quantised."""

    def draw(self, rng: np.random.Generator) -> None:
        shape, count = self.shape, self.shape.count
        num_pages = -(-(self.sets * count + 64) // shape.page_size)
        num_slots = num_pages * shape.page_size
        self.caches = []
        for side in "kv":
            bits = normal_bits(rng, (num_pages, shape.page_size, *shape.row_shape))
            bits = stored_bits(bits, shape.format)
            self.caches.append(self.bits(bits, STORED[shape.format]))
            self.shared[f"{side}_cache"] = self.caches[-1]
        if shape.format != "bf16":
            self.options = {"k_scale": SCALE, "v_scale": SCALE}
        slots = rng.permutation(num_slots)
        for i, own in enumerate(self.own):
            own["slots"] = self.bits(slots[i * count : (i + 1) * count], "int64")
            for side in "kv":
                own[f"{side}_out"] = self.zeros((count, *shape.row_shape), "bf16")

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        rows = self.shape.row_shape
        caches = [wrap(cache.array, cache.format).reshape(-1, *rows) for cache in self.caches]

        def gather(slots: Any, *outs: Any) -> None:
            for cache, out in zip(caches, outs, strict=True):
                if self.shape.format == "bf16":
                    torch.index_select(cache, 0, slots, out=out)
                    continue
                rows = cache.view(torch.uint8)[slots].view(cache.dtype)
                out.copy_(rows.float() * SCALE)

        return gather

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for own in self.own:
            slots = own["slots"].host
            for cache, out in zip(self.caches, (own["k_out"], own["v_out"]), strict=True):
                rows = cache.host.reshape(-1, *self.shape.row_shape)[slots]
                if self.shape.format != "bf16":
                    rows = (rows.view(FP8).astype(np.float32) * np.float32(SCALE)).astype(BF16)
                self.require(candidate, "rows", out.array, rows.view(np.uint16))


class CopyPages(candidates.Case):
    """Pages of each cache onto other pages."""

    def draw(self, rng: np.random.Generator) -> None:
        pages = (2 * self.sets * self.shape.count, self.shape.page_size, *self.shape.row_shape)
        self.caches = [
            self.bits(normal_bits(rng, pages), "bf16") for _ in range(self.shape.num_caches)
        ]
        self.shared["cache"] = self.caches
        _draw_lists(self, rng, "src_pages", "dst_pages")

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        return partial(_copy_all, [wrap(cache.array, "bf16") for cache in self.caches])

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for cache in self.caches:
            want = cache.host.copy()
            for own in self.own:
                want[own["dst_pages"].host] = cache.host[own["src_pages"].host]
            self.require(candidate, "pages", cache.array, want)


def _draw_lists(case: candidates.Case, rng: np.random.Generator, *names: str) -> None:
    """Draw source and target pages of each set, no page twice: all of a cache's pages."""
    count = case.shape.count
    order = rng.permutation(2 * case.sets * count).reshape(case.sets, 2, count)
    for own, lists in zip(case.own, order, strict=True):
        for name, pages in zip(names, lists, strict=True):
            own[name] = case.bits(pages.copy(), "int64")


def _copy_all(caches: list[Any], src: Any, dst: Any) -> None:
    for cache in caches:
        cache[dst] = cache[src]


class ShiftPages(candidates.Case):
    """Keys of pages, moved on by as many positions, onto other pages."""

    delta = 1000

    def draw(self, rng: np.random.Generator) -> None:
        shape = self.shape
        pages = (2 * self.sets * shape.count, shape.page_size, *shape.row_shape)
        keys = normal_bits(rng, pages)
        self.keys = self.shared["pool"] = self.bits(keys, "bf16")
        self.table = kv.rope_table(
            MAX_POSITIONS, shape.model.head_dim, base=ROPE_BASE, device=self.device
        )
        self.shared["rope_table"] = self.bits(self.device.to_numpy(self.table), "fp32")
        self.options = {"delta": self.delta}
        _draw_lists(self, rng, "pages", "out_pages")

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        angles = wrap(self.table[self.delta : self.delta + 1], "fp32")
        rotate = rotation_by_torch(torch, angles, False, {})
        return partial(self._shift, wrap(self.keys.array, "bf16"), rotate)

    def _shift(self, keys: Any, rotate: Any, pages: Any, out_pages: Any) -> None:
        rows = keys[pages]
        keys[out_pages] = rotate(rows.reshape(1, -1, rows.shape[-1]), "key").reshape(rows.shape)

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        self.device.synchronize()
        got = np.asarray(self.device.to_numpy(self.keys.array)).view(np.uint16)
        exactly = candidate.startswith("kvcupy")
        table = self.device.to_numpy(self.table)
        for own in self.own:
            chosen = sample(self.shape.count)
            source, target = own["pages"].host[chosen], own["out_pages"].host[chosen]
            rows = self.keys.host[source].reshape(len(chosen), -1, self.shape.row_shape[1])
            positions = np.full(len(chosen), self.delta)
            Rotation.of(rows, table, positions).require(
                f"{self.shape.name}, {candidate}", got[target].reshape(rows.shape),
                None if exactly else TORCH_ROUNDINGS,
            )  # fmt: skip


class SlotMapping(candidates.Case):
    """The slots of a step in which every sequence appends the same number of tokens."""

    def draw(self, rng: np.random.Generator) -> None:
        batch, append, page_size = self.shape.count, self.shape.append, self.shape.page_size
        max_tokens = -(-max(4096, append) // page_size) * page_size
        self.options = {"page_size": page_size}
        for own in self.own:
            table = rng.permutation(batch * max_tokens // page_size).reshape(batch, -1)
            own["block_table"] = self.bits(table.astype(np.int32), "int32")
            lengths = rng.integers(append, max_tokens + 1, batch)
            own["seq_lens"] = self.bits(lengths.astype(np.int32), "int32")
            own["append_lens"] = self.bits(np.full(batch, append, np.int32), "int32")
            own["out"] = self.bits(np.full(batch * append, -1), "int64")

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        device = wrap(self.own[0]["out"].array, "int64").device
        batch, append, size = self.shape.count, self.shape.append, self.shape.page_size

        def find(table: Any, lengths: Any, counts: Any, out: Any) -> None:
            rows = torch.repeat_interleave(torch.arange(batch, device=device), append)
            offsets = torch.arange(batch * append, device=device) - rows * append
            tokens = (lengths - counts)[rows] + offsets
            out[...] = table[rows, tokens // size] * size + tokens % size

        return find

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        for own in self.own:
            table, lengths, counts, out = own.values()
            want = reference.slot_mapping(
                table.host, lengths.host, counts.host, self.shape.page_size
            )
            self.require(candidate, "slots", out.array, want)
