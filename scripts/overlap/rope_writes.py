"""A rotation and the KV write after it, layer by layer: apart, on two streams, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import kvcupy as kv
from kvcupy.bench.checks import (
    MAX_POSITIONS,
    ROPE_BASE,
    Rotation,
    normal_bits,
    require_equal,
    sample,
)
from kvcupy.bench.models import Model
from kvcupy.bench.timers import named_stream

from .kv_layers import LAYERS, KVLayers

ARRAYS, APART = "rotate, then array expressions", "rotate, then one store"
STREAMS, FUSED = "rotate, then K and V on two streams", "rotate and write in one launch"


class RopeWrites:
    """Query, key and value of a step in a few layers, and the ways to rotate and write them.

    Query and key are rotated in place, so that each pass rotates them further.
    """

    def __init__(self, device: Any, model: Model, tokens: int) -> None:
        rng = np.random.default_rng(3)
        self.device, self.model = device, model
        self.layers = KVLayers(device, model, 2 * tokens)
        self.rotary = model.rope or model.head_dim
        self.host_rows = normal_bits(rng, (tokens, LAYERS, self.layers.row_width))
        self.host_queries = normal_bits(rng, (tokens, LAYERS, model.q_heads, self.rotary))
        self.host_slots = rng.permutation(2 * tokens)[:tokens].astype(np.int64)
        self.host_positions = np.arange(tokens) % MAX_POSITIONS
        self.table = kv.rope_table(MAX_POSITIONS, self.rotary, base=ROPE_BASE, device=device)
        self.rows, self.queries, self.slots, self.positions = map(
            device.asarray,
            (self.host_rows, self.host_queries, self.host_slots, self.host_positions),
        )
        self.main, self.alt = named_stream(device, "main"), named_stream(device, "alt")
        device.synchronize()

    @property
    def bytes_moved(self) -> int:
        """Bytes of one layer: query and key read and written, K and V written, V and cos read."""
        tokens, layers = len(self.host_slots), self.layers
        key = self.rotary if self.model.mla else layers.widths[0]
        queries = self.model.q_heads * self.rotary
        elements = 2 * queries + key + 2 * layers.row_width
        return tokens * (2 * elements + 4 * self.rotary + 16)

    def forms(self) -> dict[str, Callable[[], None]]:
        """Return the ways to do all layers, each on `main`."""
        layers = range(LAYERS)
        rotations = [self._rotation(i) for i in layers]
        assignments = [self.layers.assignments(self.rows, self.slots, i) for i in layers]
        stores = [self.layers.launch(self.rows, self.slots, i) for i in layers]
        fused = [self._fused(i) for i in layers]

        def arrays() -> None:
            for rotate, assign in zip(rotations, assignments, strict=True):
                rotate(stream=self.main)
                for part in assign:
                    part(self.main)

        def apart() -> None:
            for rotate, store in zip(rotations, stores, strict=True):
                rotate(stream=self.main)
                store(stream=self.main)

        def streams() -> None:
            for launch in fused:
                launch(stream=self.main, alt_stream=self.alt)

        def one() -> None:
            for launch in fused:
                launch(stream=self.main)

        # MLA has no form on two streams: its key is one row.
        forms = {ARRAYS: arrays, APART: apart, STREAMS: streams, FUSED: one}
        if self.model.mla:
            del forms[STREAMS]
        return forms

    def _query(self, layer: int) -> Any:
        return kv.view_as(self.queries[:, layer], "bf16")

    def _rotation(self, layer: int) -> Callable[..., None]:
        first, second = self.layers.parts(self.rows, layer)
        key = second.reshape(-1, 1, self.rotary) if self.model.mla else first
        return partial(
            kv.apply_rope, self._query(layer), kv.view_as(key, "bf16"), self.table, self.positions,
            interleaved=self.model.mla,
        )  # fmt: skip

    def _fused(self, layer: int) -> Callable[..., None]:
        parts = [kv.view_as(part, "bf16") for part in self.layers.parts(self.rows, layer)]
        caches = [kv.view_as(cache, "bf16") for cache in self.layers.caches[layer]]
        rest = (*parts, self.table, self.positions, *caches, self.slots)
        if self.model.mla:
            return partial(kv.rope_store_mla, self._query(layer), *rest, interleaved=True)
        return partial(kv.rope_store_kv, self._query(layer), *rest)

    def reset(self) -> None:
        """Restore the rows from before any rotation, and wipe the caches."""
        self.device.copy(self.rows, self.device.asarray(self.host_rows))
        self.device.copy(self.queries, self.device.asarray(self.host_queries))
        self.layers.wipe()

    def check(self, forms: dict[str, Callable[[], None]]) -> None:
        """Run each form once on fresh rows and compare.

        The caches hold, byte by byte, the rotated key and the value that lie beside them; all
        forms leave the same bytes as the first; and those are within an ulp of float64.
        """
        first: list[np.ndarray[Any, Any]] = []
        for name, work in forms.items():
            self.reset()
            work()
            self.device.synchronize()
            results = [self.device.to_numpy(array) for array in (self.queries, self.rows)]
            self.layers.check(name, [(results[1], self.host_slots)])
            first = first or results
            for what, got, want in zip(("query", "K/V"), results, first, strict=True):
                require_equal(f"{name}, {what}", got, want)
        self._check_rotation(next(iter(forms)), *first)

    def _check_rotation(
        self, case: str, queries: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]
    ) -> None:
        tokens = sample(len(rows))
        table = self.device.to_numpy(self.table)
        width = self.layers.widths[0]
        rotated, rest = slice(0, width), slice(width, None)
        if self.model.mla:
            rotated, rest = rest, rotated
        require_equal(f"{case}, value", rows[..., rest], self.host_rows[..., rest])
        shape = (len(tokens), -1, self.rotary)
        for layer in range(LAYERS):
            for what, got, before in (
                ("query", queries, self.host_queries),
                ("key", rows[..., rotated], self.host_rows[..., rotated]),
            ):
                rotation = Rotation.of(
                    before[tokens, layer].reshape(shape), table, self.host_positions[tokens],
                    interleaved=self.model.mla,
                )  # fmt: skip
                where = f"{case}, {what} of layer {layer}"
                rotation.require(where, got[tokens, layer].reshape(shape))
