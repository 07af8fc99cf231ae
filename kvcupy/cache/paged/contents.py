"""What a paged cache holds, out of it and into it: as arrays, and as files."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from ...arrays import ArrayView, describe, view
from ...devices.protocol import Stream
from ...formats import FORMATS, numpy_dtype
from ...ops import checks, outputs
from ...ops.gather import gather_kv
from ...ops.page_pairs import send
from ...ops.store import store_kv, store_mla
from ..pool import MLAPool
from ..storage import Pool
from .layers import Layers
from .sequence import Ints

Tensors = dict[str, tuple[str, tuple[int, ...], Any]]
"""As in a file: format, shape and bytes by name."""


class Contents:
    """Reads and writes tokens of a pool, all layers, by their slots.

    Parameters
    ----------
    layers : the layers of the cache whose pool it is
    """

    def __init__(self, pool: Pool, layers: Layers) -> None:
        self._pool = pool
        self._device = pool.device
        self._is_latent = isinstance(pool, MLAPool)
        self._scaled: list[
            dict[str, Any]
        ] = []  # of each layer: arguments of a store or gather that converts
        self._bits = []  # K and V as they are
        for arguments in layers.caches:
            k, v = arguments["k_cache"], arguments["v_cache"]
            if self._is_latent:  # latent and rope key, side by side
                v = k[..., layers.v_width :]
                k = k[..., : layers.v_width]
            self._bits.append((k, v))
            self._scaled.append({**arguments, "k_cache": k, "v_cache": v})
        self._latents = [k[:, :, 0] for k in (a["k_cache"] for a in layers.caches)]

    def read(self, slots: Ints, dtype: Any, stream: Any, on: Stream) -> tuple[Any, Any]:
        """Return K and V of slots, (L, n, H, D) and (L, n, H, Dv); of MLA (L, n, R), (L, n, P)."""
        format = self._format(dtype)
        k, v = (self._empty(part, len(slots), format, stream) for part in self._bits[0])
        where = self._send(slots, on)
        if len(slots):
            for layer, arguments in enumerate(self._scaled):
                gather_kv(slots=where, k_out=k[layer], v_out=v[layer], stream=on, **arguments)
        return (k[:, :, 0], v[:, :, 0]) if self._is_latent else (k, v)

    def check(self, key: Any, value: Any) -> tuple[ArrayView, ArrayView]:
        """Refuse what `write` cannot write; return both as views."""
        given = view(key, "K"), view(value, "V")
        for rows, name, part in zip(given, "KV", self._bits[0], strict=True):
            checks.number_format(rows, name)
            row = part.shape[3:] if self._is_latent else part.shape[2:]
            wanted = (self._pool.num_layers, given[0].shape[1] if given[0].ndim > 1 else 0, *row)
            if rows.shape != wanted:
                raise ValueError(
                    f"{name}: expected ({wanted[0]}, tokens, {', '.join(map(str, row))}), "
                    f"got {describe(rows)}"
                )
            if rows.device != self._device.name:
                raise ValueError(f"{name}: expected it on {self._device.name}, got {rows.device}")
            checks.require_contiguous(rows, name)
        return given

    def write(self, slots: Ints, key: ArrayView, value: ArrayView, on: Stream) -> None:
        """Write K and V, shaped as `read` gives them, quantised if the cache is."""
        where = self._send(slots, on)
        for layer, arguments in enumerate(self._scaled):
            if self._is_latent:
                store_mla(
                    key[layer], value[layer], self._latents[layer], where,
                    scale=arguments.get("k_scale"), stream=on,
                )  # fmt: skip
            else:
                store_kv(key[layer], value[layer], slot_mapping=where, stream=on, **arguments)

    # --- Bits, for files ---

    def save(self, slots: Ints, on: Stream) -> Tensors:
        """Return the tokens of slots as they are stored, on the host. Waits for them."""
        where = self._send(slots, on)
        found: dict[str, Any] = {}
        for names, caches in self._stored():
            format = caches[0][0].format
            outs = [self._empty(c, len(slots), format, on) for c in caches[0]]
            for layer, (k, v) in enumerate(caches):
                if len(slots):
                    gather_kv(k, v, where, k_out=outs[0][layer], v_out=outs[1][layer], stream=on)
            found.update(zip(names, outs, strict=True))
        on.synchronize()
        return {
            name: (view(array).format, view(array).shape, self._device.to_numpy(array))
            for name, array in found.items()
        }

    def expected(self, count: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return format and shape of the tensors of so many tokens, by name."""
        return {
            name: (cache.format, (len(caches), count, *_row(cache)))
            for names, caches in self._stored()
            for name, cache in zip(names, caches[0], strict=True)
        }

    def load(self, slots: Ints, tensors: Tensors, on: Stream) -> None:
        """Write tensors as `save` gives them; they are there when the call returns."""
        where = self._send(slots, on)
        for names, caches in self._stored():
            sides = []
            for name in names:
                format, shape, data = tensors[name]
                bits = np.frombuffer(data, numpy_dtype(format)).reshape(shape)
                sides.append(self._device.asarray(bits))
            for layer, (k, v) in enumerate(caches):
                if len(slots):
                    store_kv(sides[0][layer], sides[1][layer], k, v, where, stream=on)
        on.synchronize()

    def fields(self) -> dict[str, str]:
        """Return what a file must have been saved with, for it to be loaded."""
        pool = self._pool
        digest = hashlib.sha256()
        for arguments in self._scaled:
            for name in ("k_scale", "v_scale"):
                scale = arguments.get(name)
                if scale is not None:
                    numbers = self._device.to_numpy(scale) if checks.is_array(scale) else scale
                    digest.update(np.asarray(numbers, np.float32).tobytes())
        return {
            "num_layers": str(pool.num_layers),
            "num_kv_heads": str(pool.num_kv_heads),
            "head_dim": str(pool.head_dim),
            "v_head_dim": str(self._bits[0][1].shape[3]),
            "dtype": pool.dtype,
            "static_scales": digest.hexdigest(),
        }

    def _stored(self) -> list[tuple[tuple[str, str], list[tuple[ArrayView, ArrayView]]]]:
        """Return what is stored, pairwise: two names, and both caches of each layer."""
        names = ("latent", "rope_key") if self._is_latent else ("k", "v")
        pairs = [(names, self._bits)]
        if self._pool.scale_parts:
            scales = [(a["k_scale_cache"], a["v_scale_cache"]) for a in self._scaled]
            pairs.append((("k_scale", "v_scale"), scales))
        return pairs

    # --- Arrays ---

    def _format(self, dtype: Any) -> str:
        if dtype is not None:
            return outputs.format_name(dtype)
        return "bf16" if FORMATS[self._pool.dtype].quantised else self._pool.dtype

    def _empty(self, cache: ArrayView, count: int, format: str, stream: Any) -> Any:
        shape = (self._pool.num_layers, count, *_row(cache))
        return outputs.zeros(cache, shape, format, stream)

    def _send(self, slots: Ints, on: Stream) -> ArrayView:
        return send([slots], self._device, on)[0]


def _row(cache: ArrayView) -> tuple[int, ...]:
    """Return the shape of a token in a paged or a flat cache."""
    return cache.shape[2:] if cache.ndim == 4 else cache.shape[1:]
