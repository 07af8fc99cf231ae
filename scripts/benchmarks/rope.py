"""Measure rotations, alone and followed by the store, by kvcupy, array expressions and torch.

Every case holds several sets of arguments, which calls rotate over. A candidate makes one call per
set, and returns the rotated query and key, or None if they are where query and key were.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from common.measure import require_equal
from common.rotations import BF16, MAX_POSITIONS, ROPE_BASE, Rotation, normal_bits, sample
from common.workload import MODELS, Model

import kvcupy as kv

from .candidates import Bench, add_arguments, render
from .rope_baselines import (
    NORM_ROUNDINGS,
    TORCH_ROUNDINGS,
    rotate_and_write,
    rotation_by_torch,
    rotation_of_bits,
)
from .store import SCALE, assign_all, quantise, torch_write
from .timers import Call, Wrap, by_device, ignoring_stream, on_stream, upload

__all__ = ["add_arguments", "render", "run"]  # what `bench.py` calls

TOKENS = (1, 64, 4096)
FORMATS = ("bf16", "bf16 norm", "fp8 static", "fp8 dynamic")


@dataclass(frozen=True)
class Shape:
    """One case: what is rotated, how many tokens, and the format of the cache.

    `fresh` arguments have just been written, as by a model's projection, so that they are in the
    processor's cache. Others rotate over more memory than the cache holds.
    """

    operation: str
    model: Model
    tokens: int
    format: str
    fresh: bool = False

    @property
    def name(self) -> str:
        name = f"{self.operation} {self.model.name} {self.format} T={self.tokens}"
        return f"{name} fresh" if self.fresh else name

    @property
    def stores(self) -> bool:
        return self.operation != "apply_rope"

    @property
    def norm(self) -> bool:
        return self.format.endswith("norm")

    @property
    def stored(self) -> str:
        """The format of the cache, as stores are named."""
        return self.format.removesuffix(" norm")

    @property
    def rotary(self) -> int:
        return self.model.rope or self.model.head_dim

    @property
    def compiles(self) -> bool:
        """Whether to try torch.compile, which is slow: only for the headlines."""
        return self in HEADLINES

    @property
    def bytes_moved(self) -> int:
        """Bytes of one call: query and key read and written, value, cache, cos and sin, indices."""
        queries = self.model.q_heads * self.rotary
        keys = self.rotary if self.model.mla else self.model.row_widths[0]
        bytes_per_token = 4 * (queries + keys) + 4 * self.rotary + 8
        if self.stores:
            row = sum(self.model.row_widths)
            bytes_per_token += 2 * (row - keys) + row * (2 if self.stored == "bf16" else 1) + 8
        if self.stored == "fp8 dynamic":
            bytes_per_token += 8 * self.model.kv_heads
        return self.tokens * bytes_per_token

    def build(self, device: Any, sets: int) -> RopeCase:
        return RopeCase(device, self, sets)


HEADLINES = tuple(
    Shape("rope_store_kv", MODELS["llama-3.1-8b"], count, "bf16", fresh=True) for count in TOKENS
)


def shapes() -> list[Shape]:
    """Return the cases, the headlines first."""
    cases = {shape.name: shape for shape in HEADLINES}
    for operation, name, formats in (
        ("apply_rope", "llama-3.1-8b", FORMATS[:2]),
        ("rope_store_kv", "llama-3.1-8b", FORMATS),
        ("rope_store_mla", "deepseek-v3-mla", ("bf16", "fp8 static")),
    ):
        for fmt in formats:
            for count in TOKENS:
                shape = Shape(operation, MODELS[name], count, fmt)
                cases.setdefault(shape.name, shape)
    return list(cases.values())


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    return Bench(device, options).report(shapes())


class RopeCase:
    """Arguments of one shape on one device, `sets` times over. kvcupy rotates them in place."""

    def __init__(self, device: Any, shape: Shape, sets: int) -> None:
        rng = np.random.default_rng(0)
        self.device, self.shape, self.sets = device, shape, sets
        model, tokens, num_slots = shape.model, shape.tokens, sets * shape.tokens + 64
        self.key_width = model.kv_heads or 1, shape.rotary
        value = (model.latent,) if model.mla else (model.kv_heads, model.head_dim)
        key = (shape.rotary,) if model.mla else self.key_width
        shapes = {"query": (model.q_heads, shape.rotary), "key": key, "value": value}
        self.inputs = [
            {name: normal_bits(rng, (tokens, *part)) for name, part in shapes.items()}
            for _ in range(sets)
        ]
        order = rng.permutation(num_slots).astype(np.int64)
        self.slots = [order[i * tokens : (i + 1) * tokens] for i in range(sets)]
        self.positions = np.arange(tokens) + 1000
        weights = rng.uniform(0.5, 1.5, (2, shape.rotary)).astype(np.float32).astype(BF16)
        self.norms = dict(zip(("query", "key"), weights, strict=True)) if shape.norm else {}

        self.on_device = [{n: upload(device, a) for n, a in one.items()} for one in self.inputs]
        self.slots_on_device = [upload(device, slots) for slots in self.slots]
        self.positions_on_device = upload(device, self.positions)
        self.norms_on_device = {n: upload(device, w.view(np.uint16)) for n, w in self.norms.items()}
        self.table = kv.rope_table(MAX_POSITIONS, shape.rotary, base=ROPE_BASE, device=device)
        rows = [(sum(model.row_widths),)] if model.mla else [self.key_width] * 2
        stored = np.uint16 if shape.stored == "bf16" else np.uint8
        self.caches = [device.zeros((num_slots, *row), stored) for row in rows * shape.stores]
        self.scales = [device.zeros((num_slots, model.kv_heads or 1), np.float32) for _ in "kv"]
        device.synchronize()

    # kvcupy

    def kvcupy(self, wrap: Wrap) -> list[Call]:
        """Return kvcupy's calls on arrays that `wrap` made of bits and a format."""
        shape = self.shape
        options: dict[str, Any] = {
            f"{name}_norm": wrap(weight, "bf16") for name, weight in self.norms_on_device.items()
        }
        if shape.model.mla:
            options["interleaved"] = True
        if shape.stored == "fp8 static":
            names = ("scale",) if shape.model.mla else ("k_scale", "v_scale")
            options |= dict.fromkeys(names, SCALE)
        elif shape.stored == "fp8 dynamic":
            scales = [wrap(scale, "fp32") for scale in self.scales]
            options |= dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=True))
        caches = [wrap(c, "bf16" if shape.stored == "bf16" else "fp8_e4m3") for c in self.caches]
        turning = wrap(self.table, "fp32"), wrap(self.positions_on_device, "int64")
        operation = getattr(kv, shape.operation)
        calls: list[Call] = []
        for bits, slots in zip(self.on_device, self.slots_on_device, strict=True):
            query, key, value = (wrap(bits[name], "bf16") for name in ("query", "key", "value"))
            if not shape.stores:
                bound = partial(operation, query, key, *turning, **options)
            else:
                rows = (value, key) if shape.model.mla else (key, value)
                rest = (*rows, *turning, *caches, wrap(slots, "int64"))
                bound = partial(operation, query, *rest, **options)
            calls.append(partial(on_stream, bound))
        return calls

    # The array library of the device

    def expressions(self) -> list[Call] | None:
        """Return array expressions on bits; None for formats that NumPy and CuPy lack."""
        if self.shape.format != "bf16":
            return None
        rotate = rotation_of_bits(self.table[self.positions_on_device], self.shape.model.mla)
        targets = self._targets(self.caches)
        calls: list[Call] = []
        for bits, slots in zip(self.on_device, self.slots_on_device, strict=True):
            work = partial(rotate_and_write, rotate, assign_all, targets, slots, bits)
            calls.append(partial(by_device, self.device, work))
        return calls

    def _targets(self, caches: list[Any]) -> list[Any]:
        """Return what key and value are written to."""
        if not self.shape.model.mla:
            return caches
        split = self.shape.model.row_widths[0]
        return [caches[0][:, split:], caches[0][:, :split]]

    # torch

    def torch(self, torch: Any, wrap: Wrap, *, compiled: bool = False) -> list[Call]:
        """Return torch's calls, as models are written; they go to torch's current stream."""
        shape = self.shape
        table = wrap(self.table, "fp32")[wrap(self.positions_on_device, "int64")]
        norms = {name: wrap(weight, "bf16") for name, weight in self.norms_on_device.items()}
        rotate = rotation_by_torch(torch, table, shape.model.mla, norms)
        targets = self._targets([wrap(cache, "bits") for cache in self.caches])
        if shape.stored == "bf16":
            targets = [target.view(torch.bfloat16) for target in targets]
        write = torch_write(torch, shape.stored, [wrap(scale, "fp32") for scale in self.scales])
        work = partial(rotate_and_write, rotate, write)
        if compiled:
            work = torch.compile(work, dynamic=False)
        calls: list[Call] = []
        for bits, slots in zip(self.on_device, self.slots_on_device, strict=True):
            parts = {name: wrap(array, "bf16") for name, array in bits.items()}
            bound = partial(work, targets, wrap(slots, "int64"), parts)
            calls.append(partial(ignoring_stream, bound))
        return calls

    # Checks

    def wipe(self) -> None:
        """Restore the rows from before any rotation, and zero what was written."""
        for arrays, bits in zip(self.on_device, self.inputs, strict=True):
            for name, array in arrays.items():
                self.device.copy(array, self.device.asarray(bits[name]))
        for array in (*self.caches, *self.scales):
            self.device.copy(array, self.device.zeros(array.shape, array.dtype))
        self.device.synchronize()

    @cached_property
    def exact(self) -> list[dict[str, Rotation]]:
        """What query and key of some tokens become, in float64."""
        table, tokens = self.device.to_numpy(self.table), sample(self.shape.tokens)
        shape = (len(tokens), -1, self.shape.rotary)
        return [
            {
                name: Rotation.of(
                    bits[name][tokens].reshape(shape), table, self.positions[tokens],
                    interleaved=self.shape.model.mla, norm=self.norms.get(name),
                )
                for name in ("query", "key")
            }
            for bits in self.inputs
        ]  # fmt: skip

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare rotated rows with float64, and the caches with the rotated rows, byte by byte.

        `results` are the rotated query and key of each call; None: they are where they were.
        """
        self.device.synchronize()
        where = f"{self.shape.name}, {candidate}"
        roundings = None
        if candidate in ("torch", "torch.compile"):
            roundings = TORCH_ROUNDINGS + NORM_ROUNDINGS * self.shape.norm
        tokens = sample(self.shape.tokens)
        caches = [np.zeros(c.shape, c.dtype) for c in self.caches]
        scales = [np.zeros(s.shape, np.float32) for s in self.scales]
        for i, result in enumerate(results):
            rotated = (self.on_device[i]["query"], self.on_device[i]["key"])
            query, key = map(self._bits, rotated if result is None else result)
            for name, got in (("query", query), ("key", key)):
                exact = self.exact[i][name]
                rows = got[tokens].reshape(exact.exact.shape)
                exact.require(f"{where}, {name} of set {i}", rows, roundings)
            parts = (key, self.inputs[i]["value"])
            if self.shape.stores:
                for target, scale, part in zip(self._targets(caches), scales, parts, strict=True):
                    target[self.slots[i]], own = quantise(part.view(BF16), self.shape.stored)
                    if own is not None:
                        scale[self.slots[i]] = own
        for what, got, want in (("cache", self.caches, caches), ("scale", self.scales, scales)):
            for i, (array, expected) in enumerate(zip(got, want, strict=False)):
                require_equal(f"{where}, {what} {i}", self.device.to_numpy(array), expected)

    def _bits(self, array: Any) -> np.ndarray[Any, Any]:
        return self.device.to_numpy(array).view(np.uint16)
