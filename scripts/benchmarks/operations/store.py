"""Measure one store of many tokens, by kvcupy and torch.

Every case holds several sets of arguments, which calls rotate over, in one cache per part.
A candidate takes a stream and makes one call per set. All write what `check` expects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from common.checks import BF16, normal_bits
from common.models import Model
from common.timers import Call

from . import baselines, candidates
from .baselines import Builder, Store, Wrap

Array = np.ndarray[Any, Any]

PAGE_SIZE = 16  # of those who need pages: caches are slots here
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
LIMIT = np.float32(448.0)
SCALE = 0.0625  # a power of two: dividing and multiplying by the reciprocal agree bitwise
STORED = {"bf16": "bf16", "fp8 static": "fp8_e4m3"}


@dataclass(frozen=True)
class Shape(candidates.Shape):
    """One case: what is written, how many tokens, and the format of the cache."""

    operation: str
    model: Model
    tokens: int
    format: str

    @property
    def name(self) -> str:
        return f"{self.operation} {self.model.name} {self.format} T={self.tokens}"

    @property
    def stored(self) -> str:
        """The format of the cache."""
        return self.format

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The shape of a token in each part: K and V, or latent and rope."""
        if self.model.mla:
            return [(width,) for width in self.model.row_widths]
        return [(self.model.kv_heads, self.model.head_dim)] * 2

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by one call: rows, slots and stored rows."""
        elements = sum(self.model.row_widths)
        stored = elements * (2 if self.format == "bf16" else 1)
        return self.tokens * (2 * elements + 8 + stored)

    def build(self, device: Any, sets: int) -> StoreCase:
        return StoreCase(device, self, sets)


class StoreCase(candidates.Case):
    """Rows of each set, and the slots that they go to, in caches for all sets."""

    def draw(self, rng: np.random.Generator) -> None:
        shape = self.shape
        for own in self.own:
            for name, part in zip(self.rows, shape.parts, strict=True):
                own[name] = self.bits(normal_bits(rng, (shape.tokens, *part)), "bf16")
        self.draw_caches(rng)

    @property
    def rows(self) -> tuple[str, str]:
        """The arguments that are stored."""
        return ("latent", "rope_key") if self.shape.model.mla else ("key", "value")

    def draw_caches(self, rng: np.random.Generator) -> None:
        """Draw the slots, and add caches."""
        shape, model = self.shape, self.shape.model
        num_slots = slots_for(self.sets, shape.tokens)
        for own, slots in zip(
            self.own, draw_slots(rng, num_slots, self.sets, shape.tokens), strict=True
        ):
            own["slot_mapping"] = self.bits(slots, "int64")
        rows = {"cache": (sum(model.row_widths),)}
        if not model.mla:
            rows = {f"{side}_cache": part for side, part in zip("kv", shape.parts, strict=True)}
        self.caches = [self.zeros((num_slots, *row), STORED[shape.stored]) for row in rows.values()]
        self.shared |= dict(zip(rows, self.caches, strict=True))
        if shape.stored != "bf16":
            self.options |= dict.fromkeys(
                ("scale",) if model.mla else ("k_scale", "v_scale"), SCALE
            )

    def targets(self, caches: list[Any]) -> list[Any]:
        """Return what the rows are written to: of MLA, two parts of one cache."""
        if not self.shape.model.mla:
            return caches
        split = self.shape.model.row_widths[0]
        return [caches[0][:, :split], caches[0][:, split:]]

    def torch_targets(self, torch: Any, wrap: Wrap) -> tuple[list[Any], Any]:
        """Return what torch writes to, and how: `(targets, slots, parts)`."""
        targets = self.targets([wrap(cache.array, "bits") for cache in self.caches])
        if self.shape.stored == "bf16":
            return [target.view(torch.bfloat16) for target in targets], assign_all
        return targets, partial(torch_write, torch)

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        """Return a store as written in systems without a kernel for it."""
        targets, write = self.torch_targets(torch, wrap)
        return lambda first, second, slots: write(targets, slots, [first, second])

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        """Return the stores of other projects, of bf16 K and V."""
        if self.shape.format != "bf16" or self.shape.model.mla:
            return {}
        makers = dict(baselines.STORES)
        if self.device.kind == "host":
            makers["vllm"] = baselines.vllm_cpu_store
        caches = [wrap(cache.array, "bf16") for cache in self.caches]

        def build(make: Callable[[Any, list[Any], int], Store]) -> list[Call]:
            return self.calls_of(make(torch, caches, PAGE_SIZE), wrap)

        return {name: partial(build, make) for name, make in makers.items()}

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare all caches with NumPy's, byte by byte."""
        sets = [[own[name].host for name in self.rows] for own in self.own]
        self.check_caches(candidate, sets, results[0])

    def check_caches(
        self, candidate: str, sets: Sequence[Sequence[Array]], elsewhere: Any = None
    ) -> None:
        """Compare all caches with what the rows of each set become.

        `elsewhere` is where a candidate stores rows instead: torch tensors of whole pages.
        """
        caches = [np.zeros_like(cache.host) for cache in self.caches]
        for own, parts in zip(self.own, sets, strict=True):
            slots = own["slot_mapping"].host
            for target, part in zip(self.targets(caches), parts, strict=True):
                target[slots] = stored_bits(part, self.shape.stored).view(target.dtype)
        stored = [cache.array for cache in self.caches]
        if elsewhere is not None:
            stored = [pages.flatten(0, 1)[: len(caches[0])] for pages in elsewhere]
        for i, (array, want) in enumerate(zip(stored, caches, strict=True)):
            self.require(candidate, f"cache {i}", array, want)


def slots_for(sets: int, tokens: int) -> int:
    """Return how many slots a cache has for some sets: whole pages, and some to spare."""
    return -(-(sets * tokens + 64) // PAGE_SIZE) * PAGE_SIZE


def draw_slots(rng: np.random.Generator, num_slots: int, sets: int, tokens: int) -> list[Array]:
    """Return the slots of each set, none twice, and never 0, which some projects do not write."""
    order = rng.permutation(num_slots - 1).astype(np.int64) + 1
    return [order[i * tokens : (i + 1) * tokens] for i in range(sets)]


def stored_bits(part: Array, fmt: str) -> Array:
    """Return the stored bits of one part, in NumPy."""
    if fmt == "bf16":
        return part.view(np.uint16)
    values = part.view(BF16).astype(np.float32) / np.float32(SCALE)
    return values.clip(-LIMIT, LIMIT).astype(FP8).view(np.uint8)


def assign_all(targets: list[Any], slots: Any, parts: list[Any]) -> None:
    """Write rows as array libraries do."""
    for target, part in zip(targets, parts, strict=True):
        target[slots] = part


def torch_write(torch: Any, targets: list[Any], slots: Any, parts: list[Any]) -> None:
    """Write rows as fp8, as models are written in torch."""
    limit = float(LIMIT)
    for target, part in zip(targets, parts, strict=True):
        values = (part.float() / SCALE).clamp_(-limit, limit)
        target[slots] = values.to(torch.float8_e4m3fn).view(torch.uint8)
