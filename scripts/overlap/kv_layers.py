"""KV caches of a few layers of a model: ways to write one, and a check of every byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from common.measure import run_named

import kvcupy as kv
from kvcupy import observe
from kvcupy.arrays import view
from kvcupy.bench.checks import require_equal
from kvcupy.bench.models import Model

LAYERS = 4  # enough that they do not all stay in a CPU cache
POISON = 0xA5A5


class KVLayers:
    """The caches of a few layers, and the ways to write one of them.

    A row of `rows` holds one token, layer by layer: K then V, or latent then rope.
    """

    def __init__(self, device: Any, model: Model, num_slots: int) -> None:
        self.device, self.model = device, model
        self.widths = model.row_widths
        self.row_width = sum(self.widths)
        self.num_slots = num_slots
        shapes = [(num_slots, self.row_width)] if model.mla else [self._heads(num_slots)] * 2
        self.caches = [[device.empty(s, np.uint16) for s in shapes] for _ in range(LAYERS)]
        self._poisoned = [device.asarray(np.full(s, POISON, np.uint16)) for s in shapes]
        self.wipe()

    def _heads(self, tokens: int) -> tuple[int, ...]:
        return (tokens, self.model.kv_heads, self.model.head_dim)

    def parts(self, rows: Any, layer: int) -> tuple[Any, Any]:
        """Return views of K and V (or latent and rope) in rows (tokens, LAYERS, row_width)."""
        first, second = rows[:, layer, : self.widths[0]], rows[:, layer, self.widths[0] :]
        if self.model.mla:
            return first, second
        shape = self._heads(rows.shape[0])
        return first.reshape(shape), second.reshape(shape)

    def targets(self, layer: int) -> tuple[Any, Any]:
        """Return the two arrays that the parts go to: two caches, or two ranges of columns."""
        if self.model.mla:
            (cache,) = self.caches[layer]
            return cache[:, : self.widths[0]], cache[:, self.widths[0] :]
        k_cache, v_cache = self.caches[layer]
        return k_cache, v_cache

    def assignments(self, rows: Any, slots: Any, layer: int) -> list[Callable[[Any], None]]:
        """Return the two array expressions `cache[slots] = part`; each takes a stream."""
        names = ("put latent", "put rope") if self.model.mla else ("put K", "put V")
        where = view(slots)
        calls: list[Callable[[Any], None]] = []
        for name, target, part in zip(
            names, self.targets(layer), self.parts(rows, layer), strict=True
        ):
            accesses = {
                "reads": (observe.Access(view(part)), observe.Access(where)),
                "writes": (observe.Access(view(target), slots=where),),
            }
            assign = partial(target.__setitem__, slots, part)
            calls.append(partial(run_named, self.device, name, assign, **accesses))
        return calls

    def launch(self, rows: Any, slots: Any, layer: int) -> Callable[..., None]:
        """Return the single launch that writes both parts; it takes `stream=`."""
        parts = [kv.view_as(part, "bf16") for part in self.parts(rows, layer)]
        caches = [kv.view_as(cache, "bf16") for cache in self.caches[layer]]
        operation = kv.store_mla if self.model.mla else kv.store_kv
        return partial(operation, *parts, *caches, slots)

    def wipe(self) -> None:
        """Fill the caches with a poison pattern."""
        for caches in self.caches:
            for cache, poison in zip(caches, self._poisoned, strict=True):
                self.device.copy(cache, poison)
        self.device.synchronize()

    def check(self, case: str, writes: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Compare every byte of the caches with NumPy's, after `writes` of (rows, slots)."""
        for layer in range(LAYERS):
            want = np.full((self.num_slots, self.row_width), POISON, np.uint16)
            for rows, slots in writes:
                want[slots] = rows[:, layer]
            stored = [self.device.to_numpy(target) for target in self.targets(layer)]
            got = np.concatenate([part.reshape(len(want), -1) for part in stored], axis=1)
            require_equal(f"{case}, layer {layer}", got, want)
