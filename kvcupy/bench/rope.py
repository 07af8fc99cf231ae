"""Measure rotations, alone and followed by the store, by kvcupy, array expressions and torch.

Every case holds several sets of arguments, which calls rotate over. A candidate makes one call per
set, and returns the rotated query and key, or None if they are where query and key were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

import kvcupy as kv

from . import baselines, candidates
from .baselines import (
    Builder,
    Compile,
    RopeStore,
    Wrap,
    as_it_is,
    by_device,
    ignoring_stream,
    on_stream,
    upload,
)
from .checks import BF16, MAX_POSITIONS, ROPE_BASE, Rotation, normal_bits, sample
from .models import Model
from .store import PAGE_SIZE, SCALE, assign_all, draw_slots, quantise, slots_for, torch_write
from .timers import Call

TORCH_ROUNDINGS = 3  # of cos, of a product, of the sum
NORM_ROUNDINGS = 2  # of the normalised value, and of its product with the weight

Rotate = Callable[[Any, str], Any]  # rows, and "query" or "key"
Write = Callable[[list[Any], Any, list[Any]], None]  # targets, slots, parts


@dataclass(frozen=True)
class Shape(candidates.Shape):
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
    def model_name(self) -> str:
        return self.model.name

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


class RopeCase(candidates.Case):
    """Arguments of one shape on one device, `sets` times over. kvcupy rotates them in place."""

    def __init__(self, device: Any, shape: Shape, sets: int) -> None:
        super().__init__(device, shape, sets)
        rng = np.random.default_rng(0)
        model, tokens, num_slots = shape.model, shape.tokens, slots_for(sets, shape.tokens)
        self.key_width = model.kv_heads or 1, shape.rotary
        value = (model.latent,) if model.mla else (model.kv_heads, model.head_dim)
        key = (shape.rotary,) if model.mla else self.key_width
        shapes = {"query": (model.q_heads, shape.rotary), "key": key, "value": value}
        self.inputs = [
            {name: normal_bits(rng, (tokens, *part)) for name, part in shapes.items()}
            for _ in range(sets)
        ]
        self.slots = draw_slots(rng, num_slots, sets, tokens)
        self.positions = np.arange(tokens) + 1000
        weights = rng.uniform(0.5, 1.5, (2, shape.rotary)).astype(np.float32).astype(BF16)
        self.norms = dict(zip(("query", "key"), weights, strict=True)) if shape.norm else {}

        self.on_device = [{n: upload(device, a) for n, a in rows.items()} for rows in self.inputs]
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
        rotary = wrap(self.table, "fp32"), wrap(self.positions_on_device, "int64")
        operation = getattr(kv, shape.operation)
        calls: list[Call] = []
        for bits, slots in zip(self.on_device, self.slots_on_device, strict=True):
            query, key, value = (wrap(bits[name], "bf16") for name in ("query", "key", "value"))
            if not shape.stores:
                bound = partial(operation, query, key, *rotary, **options)
            else:
                rows = (value, key) if shape.model.mla else (key, value)
                rest = (*rows, *rotary, *caches, wrap(slots, "int64"))
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

    def torch(self, torch: Any, wrap: Wrap, compile: Compile = as_it_is) -> list[Call]:
        """Return torch's calls, as models are written."""
        shape = self.shape
        table = wrap(self.table, "fp32")[wrap(self.positions_on_device, "int64")]
        norms = {name: wrap(weight, "bf16") for name, weight in self.norms_on_device.items()}
        rotate = rotation_by_torch(torch, table, shape.model.mla, norms)
        targets = self._targets([wrap(cache, "bits") for cache in self.caches])
        if shape.stored == "bf16":
            targets = [target.view(torch.bfloat16) for target in targets]
        write = torch_write(torch, shape.stored, [wrap(scale, "fp32") for scale in self.scales])
        work = compile(partial(rotate_and_write, rotate, write))
        return self._with_tensors(wrap, lambda parts, slots: partial(work, targets, slots, parts))

    def _with_tensors(
        self, wrap: Wrap, bind: Callable[[dict[str, Any], Any], Callable[[], Any]]
    ) -> list[Call]:
        """Return a call for each set: what `bind` makes of its rows and slots, as tensors."""
        calls: list[Call] = []
        for bits, slots in zip(self.on_device, self.slots_on_device, strict=True):
            parts = {name: wrap(array, "bf16") for name, array in bits.items()}
            calls.append(partial(ignoring_stream, bind(parts, wrap(slots, "int64"))))
        return calls

    # Other projects

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        """Return what others launch to rotate and store bf16."""
        if self.shape.format != "bf16" or self.shape.model.mla or not self.shape.stores:
            return {}

        def build(make: Callable[[Any, list[Any], int, Any], RopeStore]) -> list[Call]:
            caches, table = [wrap(c, "bf16") for c in self.caches], wrap(self.table, "fp32")
            positions = wrap(self.positions_on_device, "int64")
            work = make(torch, caches, PAGE_SIZE, table)
            return self._with_tensors(wrap, lambda parts, slots: partial(
                work, parts["query"], parts["key"], parts["value"], positions, slots
            ))  # fmt: skip

        return {name: partial(build, make) for name, make in baselines.ROPE_STORES.items()}

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
        where = f"{self.shape.name}, {candidate}"
        roundings = None
        if candidate not in ("kvcupy", "kvcupy, torch tensors", "expression"):
            roundings = TORCH_ROUNDINGS + NORM_ROUNDINGS * self.shape.norm
        tokens = sample(self.shape.tokens)
        caches = [np.zeros(c.shape, c.dtype) for c in self.caches]
        scales = [np.zeros(s.shape, np.float32) for s in self.scales]
        for i, result in enumerate(results):
            rotated = (self.on_device[i]["query"], self.on_device[i]["key"])
            query, key = map(self._bits, rotated if result is None else result)
            for name, got in (("query", query), ("key", key)):
                exact = self.exact[i][name]
                selected = got[tokens].reshape(exact.exact.shape)
                exact.require(f"{where}, {name} of set {i}", selected, roundings)
            parts = (key, self.inputs[i]["value"])
            if self.shape.stores:
                for target, scale, part in zip(self._targets(caches), scales, parts, strict=True):
                    target[self.slots[i]], own = quantise(part.view(BF16), self.shape.stored)
                    if own is not None:
                        scale[self.slots[i]] = own
        for what, arrays, wants in (("cache", self.caches, caches), ("scale", self.scales, scales)):
            for i, (array, expected) in enumerate(zip(arrays, wants, strict=True)):
                self.require(candidate, f"{what} {i}", array, expected)

    def _bits(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self.device.to_numpy(array)).view(np.uint16)


# --- Baselines ------------------------------------------------------------------------------------
#
# torch rotates as transformers does, in the model's dtype with one rounding per operation. Array
# expressions, for libraries without bf16, work on its bits and compute in float32. For both, cos
# and sin of the tokens were looked up beforehand, as a model does once for all of its layers.


def rotate_and_write(
    rotate: Rotate, write: Write, targets: list[Any], slots: Any, parts: dict[str, Any]
) -> tuple[Any, Any]:
    """Rotate query and key, write key and value if there are targets, return query and key."""
    query, key = rotate(parts["query"], "query"), rotate(parts["key"], "key")
    if targets:
        write(targets, slots, [key, parts["value"]])
    return query, key


def rotation_of_bits(table: Any, interleaved: bool) -> Rotate:
    """Return the rotation of bf16 bits by rows `[cos | sin]` (T, D), in NumPy or CuPy."""
    half = table.shape[1] // 2

    def rotate(bits: Any, name: str) -> Any:
        shape = (len(bits), *(1 for _ in bits.shape[2:]), half)
        cosine, sine = table[:, :half].reshape(shape), table[:, half:].reshape(shape)
        rows = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        first, second = _pairs_of(rows, interleaved)
        rotated = rows.copy()
        target_first, target_second = _pairs_of(rotated, interleaved)
        target_first[...] = first * cosine - second * sine
        target_second[...] = second * cosine + first * sine
        word = rotated.view(np.uint32)  # rounded to nearest even; there is no NaN
        odd = (word >> np.uint32(16)) & np.uint32(1)
        return ((word + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)

    return rotate


def rotation_by_torch(torch: Any, table: Any, interleaved: bool, norms: dict[str, Any]) -> Rotate:
    """Return the rotation of bf16 tensors by rows `[cos | sin]` (T, D), in bf16."""
    half = table.shape[1] // 2
    cosine, sine = table[:, :half].bfloat16(), table[:, half:].bfloat16()
    if not interleaved:
        cosine, sine = torch.cat((cosine, cosine), dim=-1), torch.cat((sine, sine), dim=-1)
    rotate_pairs = partial(_torch_pairs if interleaved else _torch_halves, torch)

    def rotate(x: Any, name: str) -> Any:
        if name in norms:
            x = _torch_norm(torch, x, norms[name])
        if x.ndim == 2:
            return rotate_pairs(x, cosine, sine)
        return rotate_pairs(x, cosine[:, None], sine[:, None])

    return rotate


def _pairs_of(rows: Any, interleaved: bool) -> tuple[Any, Any]:
    half = rows.shape[-1] // 2
    if interleaved:
        return rows[..., 0::2], rows[..., 1::2]
    return rows[..., :half], rows[..., half:]


def _torch_halves(torch: Any, x: Any, cosine: Any, sine: Any) -> Any:
    first, second = _pairs_of(x, False)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _torch_pairs(torch: Any, x: Any, cosine: Any, sine: Any) -> Any:
    first, second = _pairs_of(x, True)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.stack(rotated, dim=-1).flatten(-2)


def _torch_norm(torch: Any, x: Any, weight: Any) -> Any:
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + 1e-6)
    return weight * values.to(x.dtype)
