"""Keys and values with the outlier channels that are published of Llama and Qwen keys.

Of Llama, Falcon and Mistral, KIVI (arXiv 2402.02750) shows that a few fixed channels of the keys
are large in all tokens, and that values have no such channels. KVQuant (arXiv 2401.18079) adds that
the channels are steadier before RoPE, which mixes each with its pair. Qwen2's keys have a bias, so
that some channels are a hundred times as large. How large and how many is this file's: see `KINDS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcupy import reference

from .schemes import Float32, rope

HEADS, WIDTH = 4, 128
LOGIT_SPREAD = 2.0
"""Standard deviation of a query's exact logits over its keys."""


@dataclass(frozen=True)
class Kind:
    """How keys are drawn: normal, with some channels of each head around a mean of their own."""

    outliers: int
    """Channels of each head with a mean."""
    low: float
    high: float
    """Magnitude of a mean, in standard deviations of the other channels."""
    rope_base: float


KINDS = {
    "plain": Kind(0, 0.0, 0.0, 500_000.0),
    "llama": Kind(4, 8.0, 16.0, 500_000.0),
    "qwen": Kind(8, 30.0, 120.0, 1_000_000.0),
}


@dataclass(frozen=True)
class Drawn:
    """Rows ``(T, H, D)``: queries after RoPE, keys before."""

    query: Float32
    keys: Float32
    values: Float32
    table: Float32


def draw_rows(kind: Kind, tokens: int, seed: int) -> Drawn:
    """Draw the rows of one sequence."""
    rng = np.random.default_rng(seed)
    shape = (tokens, HEADS, WIDTH)
    spread = np.exp(rng.normal(0, 0.3, (HEADS, WIDTH)))  # channels differ by themselves
    keys = rng.standard_normal(shape) * spread
    for head in range(HEADS):
        channels = rng.choice(WIDTH, kind.outliers, replace=False)
        means = rng.uniform(kind.low, kind.high, kind.outliers)
        keys[:, head, channels] += means * rng.choice([-1, 1], kind.outliers)
    values = rng.standard_normal(shape) * np.exp(rng.normal(0, 0.3, (tokens, HEADS, 1)))
    keys, values = keys.astype(np.float32), values.astype(np.float32)
    table = reference.rope_table(tokens, WIDTH, base=kind.rope_base)
    query = rng.standard_normal(shape)
    # Queries see all keys of a position alike: of the last token, so that spreads are comparable.
    rotated = rope(keys, table)
    for head in range(HEADS):
        logits = query[:, head] @ rotated[:, head].T
        query[:, head] *= (LOGIT_SPREAD / logits.std(axis=1))[:, None]
    return Drawn(query.astype(np.float32), keys, values, table)
