"""What the sequences of a paged cache hold, read and written as arrays and as files.

A file is of the safetensors format: tensors bit for bit, and metadata that say what they are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import formats
from ...arrays import ArrayView, columns, describe, view, view_as
from ...devices.protocol import Stream
from ...errors import file_path
from ...formats import FOUR_BIT, numpy_dtype, rotated
from ...ops import call, checks
from ...ops.page_pairs import upload
from ...ops.store import gather_kv, store_kv
from ..pool import MLAPool, Pool
from .layers import Layers
from .moves import PageAccess
from .past import Past, wide_format
from .sequences import CachedSequence, Ints

Tensor = tuple[str, tuple[int, ...], Any]  # format, shape, and bits: an array or other memory
PathLike = str | os.PathLike[str]

KIND = {"kvcupy": "1", "kind": "sequence"}  # metadata of every file

# The format's names of our formats, in files; calls of the package take NumPy's names.
_TAGS = {
    "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2",
    "I8": "int8",
}  # fmt: skip

_OWN = ("length", "window", "sink_tokens")  # metadata that may differ from sequence to sequence


@dataclass(frozen=True)
class SavedSequence:
    """What a file holds of a sequence; tensors by name."""

    length: int
    window: int
    sink_tokens: int
    tensors: Mapping[str, Tensor]


class Contents:
    """Reads and writes tokens of sequences, all layers, in order with other work on the pages.

    Parameters
    ----------
    layers, access : those of the cache whose pool it is
    past : where its old tokens are; None: in the pool like the others
    """

    def __init__(
        self, pool: Pool, layers: Layers, access: PageAccess, past: Past | None = None
    ) -> None:
        self._past = past
        self._pool, self._layers, self._access = pool, layers, access
        self._device = pool.device
        self._is_latent = isinstance(pool, MLAPool)
        # Of each layer: arguments of a gather that converts; K and V as they are.
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
        self, sequence: CachedSequence, start: int, stop: int, dtype: Any, stream: Any
    ) -> tuple[Any, Any]:
        """Return K and V of positions: (L, n, H, D), (L, n, H, Dv); of MLA (L, n, R), (L, n, P)."""
        own = self._device.as_stream(stream, self._pool.parts[0].library)
        with self._access.on(own, sequence):
            format = wide_format(self._pool)
            if dtype is not None:
                format = call.format_name(dtype)
            k, v = (self._zeros(part, stop - start, format, own) for part in self._bits[0])
            for rows, slots, is_past in self._spans(sequence, start, stop):
                uploaded = upload([slots], self._device, own)[0]
                stored = self._arguments
                if is_past and self._past is not None:
                    stored = self._past.layers.caches
                for layer, arguments in enumerate(stored):
                    gather_kv(
                        slots=uploaded, k_out=k[layer][rows], v_out=v[layer][rows], stream=own,
                        **arguments,
                    )  # fmt: skip
        return (k[:, :, 0], v[:, :, 0]) if self._is_latent else (k, v)

    def check(self, key: Any, value: Any) -> tuple[ArrayView, ArrayView]:
        """Raise if `write` cannot write K and V; return both as views."""
        views = view(key, "k"), view(value, "v")
        for rows, name, part in zip(views, "kv", self._bits[0], strict=True):
            checks.number_format(rows, name)
            row = part.shape[3:] if self._is_latent else part.shape[2:]
            count = views[0].shape[1] if views[0].ndim > 1 else 0
            num_layers = self._pool.num_layers
            if rows.shape != (num_layers, count, *row):
                raise ValueError(
                    f"{name}: expected ({num_layers}, tokens, {', '.join(map(str, row))}), "
                    f"got {describe(rows)}"
                )
            if rows.device != self._device.name:
                raise ValueError(f"{name}: expected it on {self._device.name}, got {rows.device}")
            checks.require_contiguous(rows, name)
        return views

    def write(
        self, sequence: CachedSequence, start: int, key: ArrayView, value: ArrayView, stream: Stream
    ) -> None:
        """Write K and V, shaped as `read` gives them, quantised if the cache is."""
        with self._access.on(stream, sequence):
            for rows, slots, is_past in self._spans(sequence, start, start + key.shape[1]):
                uploaded = upload([slots], self._device, stream)[0]
                layers = self._layers
                if is_past and self._past is not None:
                    layers = self._past.layers
                for layer, cache in enumerate(layers.stores):
                    layers.store(
                        key[layer, rows], value[layer, rows], slot_mapping=uploaded, stream=stream,
                        **cache,
                    )  # fmt: skip

    def _spans(
        self, sequence: CachedSequence, start: int, stop: int
    ) -> list[tuple[slice, Ints, bool]]:
        """Return the slots of the tokens at some positions, pool by pool.

        Each with which of those tokens they are, and whether in the pool of old tokens.
        """
        if start == stop:
            return []
        slots = sequence.slots(sequence.places(start, stop), self._pool.page_size)
        if self._past is None:
            return [(slice(0, stop - start), slots, False)]
        first = self._pool.num_pages * self._pool.page_size
        is_past = slots >= first
        cuts = [0, *(np.flatnonzero(np.diff(is_past)) + 1).tolist(), stop - start]
        return [
            (slice(a, b), slots[a:b] - first * bool(is_past[a]), bool(is_past[a]))
            for a, b in itertools.pairwise(cuts)
        ]

    # --- Files ---

    def save(self, sequence: CachedSequence, path: str | Path) -> None:
        """Write the tokens of a sequence to a file, as they are stored. Waits for them."""
        stream = self._device.as_stream(None, self._pool.parts[0].library)
        arrays: dict[str, Any] = {}
        if self._past is not None:
            self._save_widened(sequence, path, stream)
            return
        with self._access.on(stream, sequence):
            slots = self._slots(sequence, 0, sequence.length, stream)
            for names, caches in self._stored():
                format = caches[0][0].format
                outs = [self._zeros(c, sequence.length, format, stream) for c in caches[0]]
                for layer, (k, v) in enumerate(caches):
                    if sequence.length:
                        gather_kv(
                            k, v, slots, k_out=outs[0][layer], v_out=outs[1][layer], stream=stream
                        )
                arrays.update(zip(names, outs, strict=True))
            stream.synchronize()
            tensors = {}
            for name, array in arrays.items():
                v, data = view(array), self._device.to_numpy(array)
                if v.scales is None:
                    tensors[name] = v.format, v.shape, data
                else:  # files have no such format
                    tensors[name] = _BYTES, data.shape, data.view(np.int8)
        own = {name: str(getattr(sequence, name)) for name in _OWN}
        write_file(path, tensors, {**self.fields(), **own})

    def _save_widened(self, sequence: CachedSequence, path: str | Path, stream: Stream) -> None:
        """Write the tokens of a sequence to a file, old ones widened to the others' format."""
        arrays = self.read(sequence, 0, sequence.length, None, stream)
        stream.synchronize()
        tensors = {}
        for name, array in zip(("k", "v"), arrays, strict=True):
            tensors[name] = view(array).format, view(array).shape, self._device.to_numpy(array)
        own = {name: str(getattr(sequence, name)) for name in _OWN}
        write_file(path, tensors, {**self.fields(), **own})

    def open(self, path: str | Path) -> SavedSequence:
        """Return what a file holds; raise unless it is of a sequence of such a cache."""
        tensors, metadata = read_file(path)
        check_metadata(metadata, self.fields())
        try:
            length, window, sink_tokens = (int(metadata[name]) for name in _OWN)
        except (KeyError, ValueError):
            raise ValueError(
                f"path: expected a saved sequence, got {path} without {_OWN}"
            ) from None
        expected = self._expected(max(0, length))
        got = {name: (format, tuple(shape)) for name, (format, shape, _) in tensors.items()}
        if length < 0 or got != expected:
            raise ValueError(f"path: expected {path} to hold {expected}, got {got}")
        if window < 0 or sink_tokens < 0:
            raise ValueError(
                f"path: expected counts of window and sink_tokens in {path}, got {window} and "
                f"{sink_tokens}"
            )
        return SavedSequence(length, window, sink_tokens, tensors)

    def restore(self, sequence: CachedSequence, saved: SavedSequence) -> None:
        """Write what a file holds to the slots of a sequence, which is complete at return."""
        stream = self._device.as_stream(None, self._pool.parts[0].library)
        with self._access.on(stream):
            slots = self._slots(sequence, 0, saved.length, stream)
            for names, caches in self._stored():
                rows = []
                for name in names:
                    format, shape, data = saved.tensors[name]
                    bits = np.frombuffer(data, numpy_dtype(format)).reshape(shape)
                    uploaded = self._device.asarray(bits)
                    rows.append(uploaded)
                if caches[0][0].scales is not None:
                    rows = [
                        view_as(own, rotated(v.format, v.rotated_width))
                        for own, v in zip(rows, caches[0], strict=True)
                    ]
                for layer, (k, v) in enumerate(caches):
                    if saved.length:
                        store_kv(rows[0][layer], rows[1][layer], k, v, slots, stream=stream)
            stream.synchronize()

    def _expected(self, count: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return format and shape of the tensors of so many tokens, by name."""
        return {
            name: _in_file(cache.format, (len(caches), count, *_row(cache)))
            for names, caches in self._stored()
            for name, cache in zip(names, caches[0], strict=True)
        }

    def fields(self) -> dict[str, str]:
        """Return what a file, or another cache, must have in common with this one."""
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
        """Return what is stored, in pairs: two names, and both caches of each layer."""
        names = ("latent", "rope_key") if self._is_latent else ("k", "v")
        pairs = [(names, self._bits)]
        if self._pool.scale_parts:
            scales = [(a["k_scale_cache"], a["v_scale_cache"]) for a in self._arguments]
            pairs.append((("k_scale", "v_scale"), scales))
        return pairs

    # --- Arrays ---

    def _zeros(self, cache: ArrayView, count: int, format: str, stream: Any) -> Any:
        shape = (self._pool.num_layers, count, *_row(cache))
        return call.zeros(cache, shape, format, stream)

    def _slots(self, sequence: CachedSequence, start: int, stop: int, stream: Stream) -> ArrayView:
        """Upload the slots of the tokens at positions `start` to `stop` - 1."""
        slots = sequence.slots(sequence.places(start, stop), self._pool.page_size)
        return upload([slots], self._device, stream)[0]


_BYTES = "int8"  # as which the rows of a four-bit format are in a file


def _in_file(format: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return format and shape of an array in a file."""
    four_bit = FOUR_BIT.get(format)
    if four_bit is None:
        return format, shape
    return _BYTES, (*shape[:-1], four_bit.row_bytes(shape[-1]))


def _row(cache: ArrayView) -> tuple[int, ...]:
    """Return the shape of a token in a paged or a flat cache."""
    return cache.shape[2:] if cache.ndim == 4 else cache.shape[1:]


# --- Files ---


def write_file(
    path: PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]
) -> None:
    """Write a file, or replace one: as a whole, else what was there before stays.

    Bytes: all are written once, to a file beside `path` that takes its name when all are on disk;
    what is contiguous is not copied before.
    """
    package = _package()
    path = file_path(path, "path")
    if path.exists() and not path.is_file():  # a device, say, which the new file would replace
        raise ValueError(f"path: expected the name of a file, got {path}")
    bits = {name: _bits(name, *tensor) for name, tensor in tensors.items()}
    specs = {
        name: package.TensorSpec(
            dtype=formats.numpy_dtype(tensors[name][0]).name, shape=tensors[name][1],
            data_ptr=array.ctypes.data, data_len=array.nbytes,
        )
        for name, array in bits.items()
    }  # fmt: skip
    described = {**{name: str(value) for name, value in metadata.items()}, **KIND}
    temporary = path.with_name(f".kvcupy-{secrets.token_hex(8)}")
    with temporary.open("xb"):  # also shows the permissions of new files here
        permissions = temporary.stat().st_mode & 0o777
    try:
        try:
            package.serialize_file(specs, temporary, described)
        except package.SafetensorError as error:
            raise _system_error(error, path) from error
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(permissions)  # the package's are 0600
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_file(path: PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Bytes: those of the header. The arrays are the file itself, mapped, and are loaded where they
    are read. They keep the old contents if the file is replaced, as `write_file` does; if it is
    truncated meanwhile, reading them kills the process.
    """
    package = _package()
    path = file_path(path, "path")
    with path.open("rb") as file:
        try:
            with package.safe_open(path, framework="np"):
                pass  # checks that the header fits the file and itself, to the last byte
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except package.SafetensorError as error:
            raise ValueError(f"path: expected a safetensors file, got {path}: {error}") from None
    metadata = header.pop("__metadata__", None) or {}
    start = 8 + header_bytes
    tensors = {name: _mapped(path, name, entry, mapped, start) for name, entry in header.items()}
    return tensors, metadata


def check_metadata(metadata: Mapping[str, str], expected: Mapping[str, object]) -> None:
    """Raise if metadata are not those of a saved sequence, or differ in an expected field.

    >>> check_metadata({"kvcupy": "1", "kind": "sequence", "num_layers": "32"}, {"num_layers": 28})
    Traceback (most recent call last):
    ValueError: path: expected a saved sequence with num_layers 28, got 32
    """
    for field, value in {**KIND, **expected}.items():
        if metadata.get(field) != str(value):
            got = metadata.get(field, "none")
            raise ValueError(f"path: expected a saved sequence with {field} {value}, got {got}")


def _package() -> Any:
    """Return the safetensors package."""
    try:
        import safetensors
        from safetensors import TensorSpec  # noqa: F401 - since 0.8
    except ImportError as error:
        raise ImportError(
            "saved sequences need safetensors 0.8 or newer: pip install 'safetensors>=0.8'"
        ) from error
    return safetensors


def _bits(name: str, format: str, shape: tuple[int, ...], data: Any) -> np.ndarray[Any, Any]:
    """Return the bits of a tensor as one contiguous array, of as many bytes as its shape says."""
    if format not in formats.FORMATS:
        known = ", ".join(formats.FORMATS)
        raise ValueError(f"tensors: expected one of {known} for {name}, got {format!r}")
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    num_bytes = formats.FORMATS[format].itemsize
    for n in shape:
        num_bytes *= n
    if array.nbytes != num_bytes:  # the package reads them by address
        raise ValueError(f"tensors: expected {num_bytes} bytes of {name}, got {array.nbytes}")
    return np.ascontiguousarray(array)


def _mapped(path: Path, name: str, entry: Any, mapped: mmap.mmap, start: int) -> Tensor:
    """Return a tensor of a file as part of its mapping."""
    format = _TAGS.get(entry["dtype"])
    if format is None:
        raise ValueError(
            f"path: expected tensors of {', '.join(_TAGS)}, got {entry['dtype']} for {name} "
            f"in {path}"
        )
    first, last = entry["data_offsets"]
    dtype, shape = formats.numpy_dtype(format), tuple(entry["shape"])
    bits = np.frombuffer(mapped, np.uint8, last - first, start + first)
    return format, shape, bits.view(dtype).reshape(shape)


def _system_error(error: Exception, path: Path) -> Exception:
    """Return the OSError that an error of the package wraps, if it wraps one."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
        return error
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))
