"""What the cache must hold: the row of a token follows from all tokens of its sequence so far.

ids      7   3   3   9        equal prefixes have equal rows, so that they may share pages;
chains  c0  c1  c2  c3        any other token before makes another row
rows    41 802  17 333        numbers of rows in a stock of random ones
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcupy import formats, reference

ROWS = 1021
LAYERS, PAGE, Q_HEADS, WIDTH = 2, 4, 2, 8
LATENT, ROPE = 8, 4  # of multi-head latent attention
MAX_POSITIONS = 160
SM_SCALE = 0.2  # of latent attention
TOLERANCE = 1e-4  # of attention in float32

Array = np.ndarray[Any, Any]


def next_chain(chain: int, token: int) -> int:
    """Return the number that stands for all tokens up to `token`; 0 for none."""
    return (chain * 6364136223846793005 + 2 * token + 1442695040888963407) % 2**64


def row_of(chain: int) -> int:
    return (chain >> 33) % ROWS


@dataclass(frozen=True)
class Variant:
    """A kind of cache.

    Attributes
    ----------
    dtype : of the cache; int8 and fp8 have a scale per token and head
    latent : multi-head latent attention
    rope : keys are rotated in attention
    past : the format of old tokens; rows are then such that it holds them exactly, so that it makes
        no difference which of them have been demoted, and how often
    write : of the tiered cache
    """

    name: str
    dtype: str = "bf16"
    latent: bool = False
    rope: bool = False
    past: str | None = None
    write: str = "through"

    @property
    def width(self) -> int:
        """Elements of a head."""
        return 2 * WIDTH if self.past else WIDTH


VARIANTS = (
    Variant("bf16"),
    Variant("fp8", dtype="fp8_e4m3", rope=True, write="back"),
    Variant("mla", latent=True),
    Variant("past", past="nvfp4"),
)


class Stock:
    """The rows of a variant, of all layers, and what its cache gives back of them.

    Attributes
    ----------
    query, key, value : float32 (LAYERS, ROWS, heads, width); of MLA the latent and the rope part
        in place of key and value, without heads
    stored : K and V as `get_kv` returns them in float32, of all rows
    table : float32 rope table, or None
    """

    def __init__(self, variant: Variant) -> None:
        rng = np.random.default_rng(7)
        self.variant = variant
        self.table = (
            reference.rope_table(MAX_POSITIONS, WIDTH).astype(np.float32) if variant.rope else None
        )
        if variant.latent:
            shapes = (Q_HEADS, LATENT + ROPE), (LATENT,), (ROPE,)
        else:
            shapes = (Q_HEADS, variant.width), (1, variant.width), (1, variant.width)
        self.query, self.key, self.value = (
            rng.standard_normal((LAYERS, ROWS, *shape)).astype(np.float32) for shape in shapes
        )
        if variant.past:
            self.key, self.value = (_on_grid(rows) for rows in (self.key, self.value))
        self.stored = self._rounded(self.key), self._rounded(self.value)
        self.out_width = LATENT if variant.latent else variant.width

    def _rounded(self, rows: Array) -> Array:
        """Return what a cache of the format holds of rows."""
        if self.variant.dtype not in reference.LIMIT:
            bits = reference.encode(rows, self.variant.dtype)
            return reference.decode(bits, self.variant.dtype).astype(np.float32)
        flat = rows.reshape(-1, *rows.shape[2:])
        slots = np.arange(len(flat))
        cache = np.zeros(flat.shape, formats.numpy_dtype(self.variant.dtype))
        back = np.zeros(flat.shape, np.float32)
        scales = np.zeros(flat.shape[:2], np.float32)
        spare = np.zeros_like(cache), np.zeros_like(back), np.zeros_like(scales)
        options = {"k_scale_cache": scales, "v_scale_cache": spare[2]}
        reference.store_kv(flat, flat, cache, spare[0], slots, **options)
        reference.gather_kv(cache, spare[0], slots, k_out=back, v_out=spare[1], **options)
        return back.reshape(rows.shape)

    def attend(
        self, layer: int, rows: Sequence[int], query_row: int, positions: Array, position: int
    ) -> Array:
        """Return the attention of one query over cached rows, float64 (Q_HEADS, out width)."""
        chosen = list(rows)
        keys, values = (part[layer, chosen] for part in self.stored)
        query = self.query[layer, query_row]
        if self.variant.latent:
            keys, values = np.concatenate([keys, values], -1)[:, None], keys[:, None]
        if self.table is not None:
            keys = reference.rotate(keys, *reference.cos_sin(self.table, positions))
            angles = reference.cos_sin(self.table, np.array([position]))
            query = reference.rotate(query[None], *angles)[0]
        scale = SM_SCALE if self.variant.latent else self.variant.width**-0.5
        scores = (query.astype(np.float64)[:, None] * keys[:, 0]).sum(-1) * scale
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        return np.asarray((weights[..., None] * values[:, 0]).sum(1))


def _on_grid(rows: Array) -> Array:
    """Round rows to what E2M1 has, with its largest number in each, so that their scale is 1."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    nearest = np.abs(np.abs(rows)[..., None] - grid).argmin(-1)
    rounded = np.sign(rows) * grid[nearest]
    rounded[..., 0] = 6
    return np.asarray(rounded, np.float32)
