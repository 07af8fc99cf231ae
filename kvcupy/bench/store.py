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

import kvcupy as kv

from . import baselines, candidates
from .baselines import (
    Builder,
    Compile,
    Store,
    Wrap,
    as_it_is,
    by_device,
    ignoring_stream,
    on_stream,
    upload,
)
from .models import Model
from .timers import Call

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
    def model_name(self) -> str:
        return self.model.name

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
    """Arguments of one shape on one device, `sets` times over, and every candidate's calls."""

    def __init__(self, device: Any, shape: Shape, sets: int) -> None:
        super().__init__(device, shape, sets)
        rng = np.random.default_rng(0)
        tokens, num_slots = shape.tokens, slots_for(sets, shape.tokens)
        bank = rng.standard_normal(1 << 18, np.float32).astype(ml_dtypes.bfloat16)
        self.inputs = [
            [_draw(rng, bank, (tokens, *part)) for part in shape.parts] for _ in range(sets)
        ]
        self.slots = draw_slots(rng, num_slots, sets, tokens)
        self.stored = np.dtype(np.uint16 if shape.format == "bf16" else np.uint8)
        rows = [(sum(shape.model.row_widths),)] if shape.model.mla else shape.parts
        self.cache_shapes = [(num_slots, *row) for row in rows]
        self.scale_shape = (num_slots, shape.model.kv_heads)

        # As unsigned integers, which every array library has.
        self.on_device = [[upload(device, x.view(np.uint16)) for x in xs] for xs in self.inputs]
        self.slots_on_device = [upload(device, slots) for slots in self.slots]
        self.caches = [device.zeros(s, self.stored) for s in self.cache_shapes]
        self.scales = [device.zeros(self.scale_shape, np.float32) for _ in shape.parts]
        device.synchronize()

    # kvcupy

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        """Return kvcupy's calls, on arrays that `wrap` makes from bits and a format."""
        shape = self.shape
        stored = STORED[shape.format.split()[0]]
        caches = [wrap(cache, stored) for cache in self.caches]
        options: dict[str, Any] = {}
        if shape.format.endswith("static"):
            names = ("scale",) if shape.model.mla else ("k_scale", "v_scale")
            options = dict.fromkeys(names, SCALE)
        elif shape.format == "fp8 dynamic":
            scales = [wrap(scale, "fp32") for scale in self.scales]
            options = dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=True))
        operation = getattr(kv, shape.operation)
        calls: list[Call] = []
        for bits, slots in zip(self.on_device, self.slots_on_device, strict=True):
            parts = [wrap(part, "bf16") for part in bits]
            bound = partial(operation, *parts, *caches, wrap(slots, "int64"), **options)
            calls.append(partial(on_stream, bound))
        return calls

    # The array library of the device

    def expressions(self) -> list[Call] | None:
        """Return `cache[slots] = part` of NumPy or CuPy; None for what CuPy has no dtype for."""
        if self.shape.format != "bf16":
            return None
        calls: list[Call] = []
        for parts, slots in zip(self.on_device, self.slots_on_device, strict=True):
            work = partial(assign_all, self._targets(self.caches), slots, parts)
            calls.append(partial(by_device, self.device, work))
        return calls

    def _targets(self, caches: list[Any]) -> list[Any]:
        if not self.shape.model.mla:
            return caches
        split = self.shape.model.row_widths[0]
        return [caches[0][:, :split], caches[0][:, split:]]

    # torch

    def torch(self, torch: Any, wrap: Wrap, compile: Compile = as_it_is) -> list[Call]:
        """Return torch's calls, as written in systems without a kernel for it."""
        caches = self._targets([wrap(cache, "bits") for cache in self.caches])
        if self.shape.format == "bf16":
            caches = [cache.view(torch.bfloat16) for cache in caches]
        scales = [wrap(scale, "fp32") for scale in self.scales]
        work = compile(torch_write(torch, self.shape.format, scales))
        return self._with_tensors(wrap, lambda parts, slots: partial(work, caches, slots, parts))

    def _with_tensors(
        self, wrap: Wrap, bind: Callable[[list[Any], Any], Callable[..., Any]]
    ) -> list[Call]:
        """Return a call for each set: what `bind` makes of its rows and slots, as tensors."""
        calls: list[Call] = []
        for bits, slots in zip(self.on_device, self.slots_on_device, strict=True):
            parts = [wrap(part, "bf16") for part in bits]
            calls.append(partial(ignoring_stream, bind(parts, wrap(slots, "int64"))))
        return calls

    # Other projects

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
        caches = [wrap(c, "bf16" if shape.format == "bf16" else "bits") for c in self.caches]
        if shape.format != "bf16":
            caches = [cache.view(torch.uint8) for cache in caches]

        def build(make: Callable[[Any, list[Any], int], Store]) -> list[Call]:
            store: Callable[..., None] = make(torch, caches, PAGE_SIZE)
            return self._with_tensors(wrap, lambda parts, slots: partial(store, *parts, slots))

        return {name: partial(build, make) for name, make in makers.items()}

    # Checks

    def wipe(self) -> None:
        """Zero what an earlier candidate wrote."""
        for array in (*self.caches, *self.scales):
            self.device.copy(array, self.device.zeros(array.shape, array.dtype))
        self.device.synchronize()

    def check(self, candidate: str, results: Sequence[Any] = ()) -> None:
        """Compare all caches and scales with NumPy's, byte by byte."""
        caches = [np.zeros(s, self.stored) for s in self.cache_shapes]
        scales = [np.zeros(self.scale_shape, np.float32) for _ in self.scales]
        for parts, slots in zip(self.inputs, self.slots, strict=True):
            targets = zip(self._targets(caches), scales, parts, strict=True)
            for target, scale, part in targets:
                target[slots], row_scales = quantise(part, self.shape.format)
                if row_scales is not None:
                    scale[slots] = row_scales
        for name, arrays, expected in (
            ("cache", self.caches, caches), ("scale", self.scales, scales)
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


def _draw(rng: np.random.Generator, bank: Array, shape: tuple[int, ...]) -> Array:
    """Fill `shape` from `bank`, from a random offset on: cheaper than new values for each set."""
    return np.resize(np.roll(bank, int(rng.integers(bank.size))), shape)


def assign_all(targets: list[Any], slots: Any, parts: list[Any]) -> None:
    """Write rows as array libraries do."""
    for target, part in zip(targets, parts, strict=True):
        target[slots] = part


def torch_write(torch: Any, fmt: str, scales: list[Any]) -> Callable[[Any, Any, Any], None]:
    """Return torch's `(targets, slots, parts)` write into caches of a format."""
    if fmt == "bf16":
        return assign_all
    if fmt == "fp8 static":
        return partial(_torch_static, torch)
    if fmt == "int8 static":
        return partial(_torch_int8, torch)
    limit = torch.full((1,), float(LIMIT), device=scales[0].device)
    return partial(_torch_dynamic, torch, limit, scales)


def _torch_static(torch: Any, targets: list[Any], slots: Any, parts: list[Any]) -> None:
    for target, part in zip(targets, parts, strict=True):
        scaled = (part.float() / SCALE).clamp(-448.0, 448.0)
        target[slots] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def _torch_int8(torch: Any, targets: list[Any], slots: Any, parts: list[Any]) -> None:
    for target, part in zip(targets, parts, strict=True):
        scaled = (part.float() / SCALE).round_().clamp_(-127.0, 127.0)
        target[slots] = scaled.to(torch.int8).view(torch.uint8)


def _torch_dynamic(
    torch: Any,
    limit: Any,  # a tensor, for a true division: torch multiplies by the reciprocal of a number
    scale_caches: list[Any],
    targets: list[Any],
    slots: Any,
    parts: list[Any],
) -> None:
    for target, scale_cache, part in zip(targets, scale_caches, parts, strict=True):
        values = part.float()
        scales = values.abs().amax(dim=-1).clamp(min=1e-6) / limit
        scaled = (values / scales[..., None]).clamp(-448.0, 448.0)
        target[slots] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        scale_cache[slots] = scales
