"""What a cache keeps of keys and values, and attention over it.

A scheme says how a cache stores rows. The rows go through the number formats of
`kvcupy.reference`, so that what attention sees is, bit for bit, what a cache of that format holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcupy import reference
from kvcupy.formats import CACHE_FORMATS, FORMATS, FOUR_BIT

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scheme:
    """How a cache stores keys and values."""

    fmt: str
    """Of the past; what is left of it in 16 bits is bf16."""
    hadamard: bool = False
    """Whether heads are rotated by `kvcupy.reference.hadamard` before, and back after."""
    pre_rope: bool = False
    """Whether keys are stored before RoPE, which readers then apply."""
    four_over_six: bool = False
    """Whether each group is scaled to 4 or to 6, whichever has the smaller squared error."""
    recent: int = 0
    """The last tokens of a query that stay in 16 bits; 0: not even its own."""
    sinks: int = 0
    """The first tokens of a sequence that stay in 16 bits."""
    parts: str = "kv"
    """What is quantised: "k", "v" or both."""

    @property
    def name(self) -> str:
        """Return it in words."""
        parts = {"k": " keys", "v": " values", "kv": ""}[self.parts]
        words = [self.fmt + parts]
        words += ["hadamard"] * self.hadamard + ["before RoPE"] * self.pre_rope
        words += ["4 over 6"] * self.four_over_six
        words += [f"recent {self.recent}"] * bool(self.recent)
        words += [f"sinks {self.sinks}"] * bool(self.sinks)
        return ", ".join(words)

    def bits(self, width: int) -> float:
        """Return the bits of an element of a row of the past, scales included."""
        if self.fmt in FOUR_BIT:
            return 8 * FOUR_BIT[self.fmt].row_bytes(width) / width
        form = CACHE_FORMATS[self.fmt]  # with a float32 scale per row where it is quantised
        return 8 * form.itemsize + (32 / width if form.quantised else 0)

    def fits(self, width: int) -> bool:
        """Return whether a row of this width is whole groups."""
        return self.fmt not in FOUR_BIT or width % FOUR_BIT[self.fmt].group == 0

    def stored(self, rows: Array) -> Float32:
        """Return what is read back of rows ``(..., D)``."""
        x = reference.hadamard(rows) if self.hadamard else rows
        x = np.asarray(x, np.float32)
        if not self.four_over_six:
            back = through(x, self.fmt)
        else:
            groups = (*x.shape[:-1], -1, FOUR_BIT[self.fmt].group)
            six, four = (through(x, self.fmt, limit).reshape(groups) for limit in (6.0, 4.0))
            error_six, error_four = (
                np.square(back.astype(np.float64) - x.reshape(groups)).sum(axis=-1, keepdims=True)
                for back in (six, four)
            )
            back = np.where(error_four < error_six, four, six).reshape(x.shape)
        return (reference.hadamard(back) if self.hadamard else back).astype(np.float32)

    def visible_in_16_bits(self, tokens: int) -> npt.NDArray[np.bool_]:
        """Return which keys ``(query, key)`` a query reads in 16 bits."""
        query, key = np.arange(tokens)[:, None], np.arange(tokens)
        return (query - key < self.recent) | (key < self.sinks)


def through(x: Float32, fmt: str, limit: float | None = None) -> Float32:
    """Store rows in a format and read them back, with dynamic scales in fp8 and int8."""
    if fmt == "fp32":
        return x
    if fmt == "bf16":
        return x.astype(FORMATS["bf16"].numpy).astype(np.float32)
    flat = x.reshape(-1, x.shape[-1])
    if fmt in FOUR_BIT:
        packed = np.zeros((len(flat), FOUR_BIT[fmt].row_bytes(x.shape[-1])), np.uint8)
        rows = reference.FourBitRows.packed(packed, fmt)
        reference.quantise_rows(flat, rows, np.ones(len(flat), np.float32), limit=limit)
        return reference.dequantise_rows(rows).reshape(x.shape)
    scales = reference.dynamic_scales(flat, fmt)
    stored = reference.encode(reference.divide(flat, scales), fmt)
    values = reference.decode(stored, fmt).astype(np.float32)
    return np.asarray(values * scales[:, None], np.float32).reshape(x.shape)


def rope(rows: Float32, table: Float32) -> Float32:
    """Rotate ``(T, H, D)``, the halves of a head paired, by ``[cos | sin]`` of each position."""
    cosine, sine = np.split(table[: len(rows), None], 2, axis=-1)
    first, second = np.split(rows, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


@dataclass
class CachedRows:
    """Keys and values ``(T, H, D)`` as a scheme stores them, and in 16 bits, keys with RoPE."""

    keys: Float32
    values: Float32
    recent_keys: Float32
    recent_values: Float32


def cached(scheme: Scheme, keys: Float32, values: Float32, table: Float32) -> CachedRows:
    """Store keys, which RoPE has not rotated yet, and values."""
    plain, values = through(keys, "bf16"), through(values, "bf16")
    rotated = through(rope(plain, table), "bf16")
    past, past_values = rotated, values
    if "k" in scheme.parts:
        past = rope(scheme.stored(plain), table) if scheme.pre_rope else scheme.stored(rotated)
    if "v" in scheme.parts:
        past_values = scheme.stored(values)
    return CachedRows(past, past_values, rotated, values)


QUERIES_PER_BLOCK = 128


@dataclass
class Attended:
    """What causal attention gives: logits ``(Hq, T, T)``, if kept, and outputs ``(T, Hq, D)``."""

    logits: Float32 | None
    outputs: Float32


def attend(
    scheme: Scheme, query: Float32, rows: CachedRows, scale: float, *, keep_logits: bool = False
) -> Attended:
    """Attend with queries ``(T, Hq, D)``; KV head h serves the queries from ``h * Hq / H`` on."""
    tokens, heads = query.shape[:2]
    ratio = heads // rows.keys.shape[1]
    queries = query.transpose(1, 0, 2) * np.float32(scale)
    past, past_values, recent, recent_values = (
        np.repeat(part.transpose(1, 0, 2), ratio, axis=0)
        for part in (rows.keys, rows.values, rows.recent_keys, rows.recent_values)
    )
    exact = scheme.visible_in_16_bits(tokens)
    outputs = np.empty(queries.shape, np.float32)
    logits = np.zeros((heads, tokens, tokens), np.float32) if keep_logits else None
    for first in range(0, tokens, QUERIES_PER_BLOCK):
        block, stop = (
            slice(first, first + QUERIES_PER_BLOCK),
            min(first + QUERIES_PER_BLOCK, tokens),
        )
        score = queries[:, block] @ past[:, :stop].swapaxes(1, 2)
        is_exact = exact[block, :stop]
        if is_exact.any():
            exact_score = queries[:, block] @ recent[:, :stop].swapaxes(1, 2)
            score = np.where(is_exact, exact_score, score)
        if logits is not None:
            logits[:, block, :stop] = score
        score[:, np.arange(stop) > np.arange(first, stop)[:, None]] = -np.inf
        score -= score.max(axis=2, keepdims=True)
        weight = np.exp(score, out=score)
        weight /= weight.sum(axis=2, keepdims=True)
        if is_exact.any():
            outputs[:, block] = np.where(is_exact, weight, 0) @ recent_values[:, :stop]
            weight[:, is_exact] = 0
            outputs[:, block] += weight @ past_values[:, :stop]
        else:
            outputs[:, block] = weight @ past_values[:, :stop]
    return Attended(logits, np.ascontiguousarray(outputs.transpose(1, 0, 2)))


def logit_error(got: Attended, want: Attended) -> float:
    """Return the RMS error of attention logits, less what all keys of a query share.

    The softmax cancels that. The first query, with one key, has no error left.
    """
    assert got.logits is not None and want.logits is not None
    tokens = got.logits.shape[-1]
    seen = np.tril(np.ones((tokens, tokens), bool))
    error = np.where(seen, got.logits.astype(np.float64), 0) - np.where(seen, want.logits, 0)
    error -= error.sum(axis=-1, keepdims=True) / seen.sum(axis=-1)[:, None]
    return float(np.sqrt(np.square(error[:, seen]).mean()))


def output_error(got: Attended, want: Attended) -> float:
    """Return the relative L2 error of attention outputs."""
    exact = want.outputs.astype(np.float64)
    return float(np.linalg.norm(got.outputs - exact) / np.linalg.norm(exact))
