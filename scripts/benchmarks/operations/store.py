"""Measure one store of many tokens, by kvcupy, array expressions and torch.

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
FORMATS = ("bf16", "fp8 static", "fp8 dynamic", "int8 static")
STORED = {"bf16": "bf16", "fp8": "fp8_e4m3", "int8": "int8"}


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
        """Bytes read and written by one call: rows, slots, stored rows and their scales."""
        elements = sum(self.model.row_widths)
        stored = elements * (2 if self.format == "bf16" else 1)
        scales = 8 * self.model.kv_heads if self.format == "fp8 dynamic" else 0
        return self.tokens * (2 * elements + 8 + stored + scales)

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
        """Draw the slots; add caches, and their scales."""
        shape, model = self.shape, self.shape.model
        num_slots = slots_for(self.sets, shape.tokens)
        stored, _, scaled = shape.stored.partition(" ")
        for own, slots in zip(
            self.own, draw_slots(rng, num_slots, self.sets, shape.tokens), strict=True
        ):
            own["slot_mapping"] = self.bits(slots, "int64")
        rows = {"cache": (sum(model.row_widths),)}
        if not model.mla:
            rows = {f"{side}_cache": part for side, part in zip("kv", shape.parts, strict=True)}
        self.caches = [self.zeros((num_slots, *row), STORED[stored]) for row in rows.values()]
        self.shared |= dict(zip(rows, self.caches, strict=True))
        self.scales: list[candidates.Bits] = []
        if scaled == "static":
            names = ("scale",) if model.mla else ("k_scale", "v_scale")
            self.options |= dict.fromkeys(names, SCALE)
        elif scaled == "dynamic":
            scales = (num_slots, model.kv_heads)
            self.scales = [self.zeros(scales, "fp32") for _ in "kv"]
            names = ("k_scale_cache", "v_scale_cache")
            self.shared |= dict(zip(names, self.scales, strict=True))

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
            targets = [target.view(torch.bfloat16) for target in targets]
        scales = [wrap(scale.array, "fp32") for scale in self.scales]
        return targets, torch_write(torch, self.shape.stored, scales)

    def expression(self) -> Callable[..., Any] | None:
        """Return `cache[slots] = part`; None for formats that CuPy has no dtype for."""
        if self.shape.format != "bf16":
            return None
        targets = self.targets([cache.array for cache in self.caches])
        return lambda first, second, slots: assign_all(targets, slots, [first, second])

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        """Return a store as written in systems without a kernel for it."""
        targets, write = self.torch_targets(torch, wrap)
        return lambda first, second, slots: write(targets, slots, [first, second])

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        """Return the stores of those who take this format."""
        shape = self.shape
        if shape.format not in ("bf16", "fp8 static"):
            return {}
        makers: dict[str, Callable[[Any, list[Any], int], Store]] = {}
        if shape.format == "fp8 static":
            if shape.model.mla:
                return {}
            makers["vllm"] = partial(baselines.vllm_store, scale=SCALE)
        elif shape.model.mla:
            makers["vllm"] = baselines.vllm_store_mla
        else:
            makers.update(baselines.STORES)
            if self.device.kind == "host":
                makers["vllm"] = baselines.vllm_cpu_store
        caches = [wrap(c.array, "bf16" if shape.format == "bf16" else "bits") for c in self.caches]
        if shape.format != "bf16":
            caches = [cache.view(torch.uint8) for cache in caches]

        def build(make: Callable[[Any, list[Any], int], Store]) -> list[Call]:
            return self.calls_of(make(torch, caches, PAGE_SIZE), wrap)

        return {name: partial(build, make) for name, make in makers.items()}

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare all caches and scales with NumPy's, byte by byte."""
        sets = [[own[name].host for name in self.rows] for own in self.own]
        self.check_caches(candidate, sets, results[0])

    def check_caches(
        self, candidate: str, sets: Sequence[Sequence[Array]], elsewhere: Any = None
    ) -> None:
        """Compare all caches and scales with what the rows of each set become.

        `elsewhere` is where a candidate stores rows instead: torch tensors of whole pages.
        """
        caches = [np.zeros_like(cache.host) for cache in self.caches]
        scales = [np.zeros_like(scale.host) for scale in self.scales]
        for own, parts in zip(self.own, sets, strict=True):
            slots = own["slot_mapping"].host
            for i, (target, part) in enumerate(zip(self.targets(caches), parts, strict=True)):
                bits, row_scales = quantise(part.view(BF16), self.shape.stored)
                target[slots] = bits.view(target.dtype)
                if row_scales is not None:
                    scales[i][slots] = row_scales
        stored = [cache.array for cache in self.caches]
        if elsewhere is not None:
            stored = [pages.flatten(0, 1)[: len(caches[0])] for pages in elsewhere]
        for name, arrays, expected in (
            ("cache", stored, caches), ("scale", [scale.array for scale in self.scales], scales)
        ):  # fmt: skip
            for i, (array, want) in enumerate(zip(arrays, expected, strict=True)):
                self.require(candidate, f"{name} {i}", array, want)


def slots_for(sets: int, tokens: int) -> int:
    """Return how many slots a cache has for some sets: whole pages, and some to spare."""
    return -(-(sets * tokens + 64) // PAGE_SIZE) * PAGE_SIZE


def draw_slots(rng: np.random.Generator, num_slots: int, sets: int, tokens: int) -> list[Array]:
    """Return the slots of each set, none twice, and never 0, which some projects do not write."""
    order = rng.permutation(num_slots - 1).astype(np.int64) + 1
    return [order[i * tokens : (i + 1) * tokens] for i in range(sets)]


def quantise(part: Array, fmt: str) -> tuple[Array, Array | None]:
    """Return the stored bits and the dynamic scales of one part, in NumPy."""
    if fmt == "bf16":
        return part.view(np.uint16), None
    values = part.astype(np.float32)
    scales = None
    divisor: Any = np.float32(SCALE)
    if fmt == "fp8 dynamic":
        scales = np.maximum(np.abs(values).max(axis=-1), np.float32(1e-6)) / LIMIT
        divisor = scales[..., None]
    values = values / divisor
    if fmt == "int8 static":
        return np.rint(values).clip(-127, 127).astype(np.int8).view(np.uint8), scales
    return values.clip(-LIMIT, LIMIT).astype(FP8).view(np.uint8), scales


def assign_all(targets: list[Any], slots: Any, parts: list[Any]) -> None:
    """Write rows as array libraries do."""
    for target, part in zip(targets, parts, strict=True):
        target[slots] = part


def torch_write(torch: Any, fmt: str, scales: list[Any]) -> Callable[[Any, Any, Any], None]:
    """Return torch's `(targets, slots, parts)` write into caches of a format."""
    if fmt == "bf16":
        return assign_all
    is_int8 = fmt == "int8 static"
    limit, dtype = (127.0, torch.int8) if is_int8 else (float(LIMIT), torch.float8_e4m3fn)
    # A tensor, for a true division: torch multiplies by the reciprocal of a number.
    divisor = torch.full((1,), limit, device=scales[0].device) if scales else None

    def write(targets: list[Any], slots: Any, parts: list[Any]) -> None:
        for i, (target, part) in enumerate(zip(targets, parts, strict=True)):
            values = part.float()
            if scales:
                own_scales = values.abs().amax(dim=-1).clamp(min=1e-6) / divisor
                scales[i][slots] = own_scales
                values = values / own_scales[..., None]
            else:
                values = values / SCALE
            if is_int8:
                values = values.round_()
            target[slots] = values.clamp_(-limit, limit).to(dtype).view(torch.uint8)

    return write
