"""The tokens of sequences of a paged cache, read and written as arrays."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import formats
from ...arrays import ArrayView, columns, describe, view, view_as, with_rotation
from ...checks import require_int
from ...devices.protocol import Stream
from ...formats import CACHE_FORMATS, FOUR_BIT
from ...ops import call, checks
from ...ops.store import gather_kv, store_kv
from ...ops.transfer_kernels import upload
from ..hazards import PageAccess
from ..pool import MLAPool
from .page_group import PageGroup
from .sequences import FREED, CachedSequence, Ints

Arrays = Mapping[str, "np.ndarray[Any, Any]"]

_BYTES = "int8"  # format of four-bit rows in a file


class Contents:
    """Reads and writes tokens of sequences, all layers, in order with other work on the pages."""

    def __init__(self, group: PageGroup, access: PageAccess) -> None:
        pool, layers = group.pool, group.layers
        self._demoted, self._pool, self._layers, self._access = group.demoted, pool, layers, access
        self._device = pool.device
        self._is_latent = isinstance(pool, MLAPool)
        # Of each layer: arguments of a gather that converts; K and V as stored.
        self._arguments: list[dict[str, Any]] = []
        self._bits: list[tuple[ArrayView, ArrayView]] = []
        for arguments in layers.caches:
            k, v = arguments["k_cache"], arguments["v_cache"]
            if self._is_latent:  # latent and rope key, side by side
                v = columns(k, layers.v_width, k.shape[-1])
                k = columns(k, 0, layers.v_width)
            self._bits.append((k, v))
            self._arguments.append({**arguments, "k_cache": k, "v_cache": v})

    def read(
        self, sequence: CachedSequence, start: int, stop: int, dtype: Any, stream: Any,
        layer: int | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Return K and V of positions: (L, n, H, D), (L, n, H, Dv); of MLA (L, n, R), (L, n, P).

        Of one layer, without L.
        """
        for name, number in (("start", start), ("stop", stop)):
            require_int(number, name)
        if not 0 <= start <= sequence.length:
            raise ValueError(f"start: expected 0 to {sequence.length}, got {start}")
        if not start <= stop <= sequence.length:
            raise ValueError(f"stop: expected {start} to {sequence.length}, got {stop}")
        self._require_kept(sequence, start, stop)
        stream, layers = self._pool._as_stream(stream), self._numbers(layer)
        format = self._row_format if dtype is None else call.format_name(dtype)
        if (four_bit := FOUR_BIT.get(format)) is not None:
            for part in self._bits[0]:
                formats.require_groups(four_bit, part.shape[-1], "dtype")
        with self._access.on(stream, sequence):
            k, v = (
                self._zeros(part, stop - start, format, stream, len(layers))
                for part in self._bits[0]
            )
            for rows, slots, is_demoted in self._spans(sequence, start, stop):
                uploaded = upload([slots], self._device, stream)[0]
                stored = self._arguments
                if is_demoted and self._demoted is not None:
                    stored = self._demoted.layers.caches
                for i, number in enumerate(layers):
                    gather_kv(
                        slots=uploaded, k_out=k[i][rows], v_out=v[i][rows], stream=stream,
                        **stored[number],
                    )  # fmt: skip
        if self._is_latent:
            k, v = k[:, :, 0], v[:, :, 0]
        return (k, v) if layer is None else (k[0], v[0])

    def check(
        self, sequence: CachedSequence, start: Any, key: Any, value: Any, layer: int | None = None
    ) -> tuple[ArrayView, ArrayView]:
        """Raise if `write` cannot write K and V from position `start` on; return both as views.

        They have L, also of one layer.
        """
        require_int(start, "start")
        views = view(key, "k"), view(value, "v")
        lead = (self._pool.num_layers,) if layer is None else ()
        count = views[0].shape[len(lead)] if views[0].ndim > len(lead) else 0
        for rows, name, part in zip(views, "kv", self._bits[0], strict=True):
            checks.number_format(rows, name)
            row = part.shape[3:] if self._is_latent else part.shape[2:]
            if rows.shape != (*lead, count, *row):
                expected = ", ".join(map(str, (*lead, "tokens", *row)))
                raise ValueError(f"{name}: expected ({expected}), got {describe(rows)}")
            if rows.device != self._device.name:
                raise ValueError(f"{name}: expected it on {self._device.name}, got {rows.device}")
            checks.require_contiguous(rows, name)
        if not 0 <= start <= start + count <= sequence.length:
            raise ValueError(
                f"start: expected {count} tokens from there within {sequence.length}, got {start}"
            )
        self._require_kept(sequence, start, start + count)
        return views if layer is None else (views[0][None], views[1][None])

    def _require_kept(self, sequence: CachedSequence, start: int, stop: int) -> None:
        """Raise if a window has freed some tokens."""
        size = self._pool.page_size
        if (
            sequence.first_kept
            and (sequence.pages[start // size : -(-stop // size)] == FREED).any()
        ):
            kept = sequence.first_kept * size
            raise ValueError(
                f"start: expected tokens that the window of these layers keeps, such as those from "
                f"{kept} on, got {start} to {stop}"
            )

    def _numbers(self, layer: int | None) -> Sequence[int]:
        """Return the numbers of a layer, or of all."""
        return range(self._pool.num_layers) if layer is None else [layer]

    def write(
        self, sequence: CachedSequence, start: int, key: ArrayView, value: ArrayView,
        stream: Stream, layer: int | None = None,
    ) -> None:  # fmt: skip
        """Write K and V of all layers or of one, from `check`, quantised if the cache is."""
        with self._access.on(stream, sequence):
            for rows, slots, is_demoted in self._spans(sequence, start, start + key.shape[1]):
                uploaded = upload([slots], self._device, stream)[0]
                layers = self._layers
                if is_demoted and self._demoted is not None:
                    layers = self._demoted.layers
                for i, number in enumerate(self._numbers(layer)):
                    layers.store(
                        key[i, rows], value[i, rows], slot_mapping=uploaded, stream=stream,
                        **layers.stores[number],
                    )  # fmt: skip

    def _spans(
        self, sequence: CachedSequence, start: int, stop: int
    ) -> list[tuple[slice, Ints, bool]]:
        """Return the slots of the tokens at some positions, in runs within one pool.

        A run has the range of its tokens, their slots, and whether they are in demoted pages.
        """
        if start == stop:
            return []
        slots = sequence.slots(sequence.places(start, stop), self._pool.page_size)
        if self._demoted is None:
            return [(slice(0, stop - start), slots, False)]
        first = self._pool.num_pages * self._pool.page_size
        is_demoted = slots >= first
        cuts = [0, *(np.flatnonzero(np.diff(is_demoted)) + 1).tolist(), stop - start]
        return [
            (slice(a, b), slots[a:b] - first * bool(is_demoted[a]), bool(is_demoted[a]))
            for a, b in itertools.pairwise(cuts)
        ]

    # --- Files ---

    def tensors(
        self, sequence: CachedSequence, runs: Sequence[tuple[int, int]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the tokens at runs of positions, in the format of the cache. Waits for them."""
        stream, stored = self._pool._as_stream(None), self._stored()
        count = sum(stop - start for start, stop in runs)
        with self._access.on(stream, sequence):
            arrays: dict[str, Any] = {
                name: self._zeros(cache, count, cache.format, stream, self._pool.num_layers)
                for names, caches in stored
                for name, cache in zip(names, caches[0], strict=True)
            }
            first = 0
            for start, stop in runs:
                for span, slots, is_demoted in self._spans(sequence, start, stop):
                    rows = slice(first + span.start, first + span.stop)
                    self._copy_out(arrays, rows, slots, is_demoted, stream)
                first += stop - start
        stream.synchronize()
        tensors = {name: self._device.to_numpy(array) for name, array in arrays.items()}
        for name, array in arrays.items():
            if view(array).scales is not None:  # files have no such format
                tensors[name] = tensors[name].view(np.int8)
        return tensors

    def _copy_out(
        self, arrays: dict[str, Any], rows: slice, slots: Ints, is_demoted: bool, stream: Stream
    ) -> None:
        """Copy tokens of every layer to rows of arrays, (layers, tokens, ...)."""
        if is_demoted and self._demoted is not None:
            targets = [
                {f"{name}_cache": array[layer][rows] for name, array in arrays.items()}
                for layer in range(self._pool.num_layers)
            ]
            self._demoted.convert_back(slots, targets, stream)
            return
        uploaded = upload([slots], self._device, stream)[0]
        for names, caches in self._stored():
            k_outs, v_outs = (arrays[name] for name in names)
            for layer, (k, v) in enumerate(caches):
                gather_kv(
                    k, v, uploaded, k_out=k_outs[layer][rows], v_out=v_outs[layer][rows],
                    stream=stream,
                )  # fmt: skip

    def fill(self, sequence: CachedSequence, start: int, stop: int, tensors: Arrays) -> None:
        """Write the tokens at positions `start` to `stop` - 1; complete at return."""
        stream = self._pool._as_stream(None)
        with self._access.on(stream):
            slots = self._slots(sequence, start, stop, stream)
            for names, caches in self._stored():
                rows = [self._device.asarray(tensors[name]) for name in names]
                if caches[0][0].scales is not None:
                    rows = [
                        with_rotation(view_as(row, v.format), v.rotated_width)
                        for row, v in zip(rows, caches[0], strict=True)
                    ]
                for layer, (k, v) in enumerate(caches):
                    store_kv(rows[0][layer], rows[1][layer], k, v, slots, stream=stream)
            stream.synchronize()

    @property
    def _row_format(self) -> str:
        """The default format of `read`: the pool's, or bf16 if that is quantised."""
        return "bf16" if CACHE_FORMATS[self._pool.dtype].quantised else self._pool.dtype

    def expected(self, count: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return format and shape of the tensors of so many tokens, by name."""
        return {
            name: _in_file(cache.format, (len(caches), count, *_row(cache)))
            for names, caches in self._stored()
            for name, cache in zip(names, caches[0], strict=True)
        }

    def fields(self) -> dict[str, str]:
        """Return the fields that a file, or another cache, must have in common with this one."""
        pool = self._pool
        digest = hashlib.sha256()
        for arguments in self._arguments:
            for name in ("k_scale", "v_scale"):
                scale = arguments.get(name)
                if scale is not None:
                    numbers = self._device.to_numpy(scale) if checks.is_array(scale) else scale
                    digest.update(np.asarray(numbers, np.float32).tobytes())
        return {
            "num_layers": str(pool.num_layers), "num_kv_heads": str(pool.num_kv_heads),
            "head_dim": str(pool.head_dim), "v_head_dim": str(self._bits[0][1].shape[3]),
            "dtype": pool.stored_as, "static_scales": digest.hexdigest(),
            "rope_mode": self._layers.rope.mode,
        }  # fmt: skip

    def _stored(self) -> list[tuple[tuple[str, str], list[tuple[ArrayView, ArrayView]]]]:
        """Return the stored arrays in pairs: two names, and both arrays of each layer."""
        names = ("latent", "rope_key") if self._is_latent else ("k", "v")
        pairs = [(names, self._bits)]
        if self._pool.scale_parts:
            scales = [(a["k_scale_cache"], a["v_scale_cache"]) for a in self._arguments]
            pairs.append((("k_scale", "v_scale"), scales))
        return pairs

    # --- Arrays ---

    def _zeros(
        self, cache: ArrayView, count: int, format: str, stream: Any, num_layers: int
    ) -> Any:
        shape = (num_layers, count, *_row(cache))
        return call.zeros(cache, shape, format, stream)

    def _slots(self, sequence: CachedSequence, start: int, stop: int, stream: Stream) -> ArrayView:
        """Upload the slots of the tokens at positions `start` to `stop` - 1."""
        slots = sequence.slots(sequence.places(start, stop), self._pool.page_size)
        return upload([slots], self._device, stream)[0]


def _in_file(format: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return format and shape of an array in a file."""
    four_bit = FOUR_BIT.get(format)
    if four_bit is None:
        return format, shape
    return _BYTES, (*shape[:-1], four_bit.row_bytes(shape[-1]))


def _row(cache: ArrayView) -> tuple[int, ...]:
    """Return the shape of a token in a paged or a flat cache."""
    return cache.shape[2:] if cache.ndim == 4 else cache.shape[1:]
