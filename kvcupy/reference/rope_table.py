"""The rope table, with every way of scaling it that extends the context of a model.

Everything is float64, rounded once to float32 at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .formats import Array, Float32, Float64

Scaling = Mapping[str, Any]
Frequencies = tuple[Float64, float]


def _linear(plain: Float64, scaling: Scaling, base: float, context: int) -> Frequencies:
    """Divide all angles by `factor`: positions are interpolated."""
    return plain / scaling["factor"], 1.0


def _dynamic(plain: Float64, scaling: Scaling, base: float, context: int) -> Frequencies:
    """Raise the base with the context length, once that exceeds the original one."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    growth = factor * max(context, original) / original - (factor - 1)
    # base * growth ** (dim / (dim - 2)), as a factor of frequency i = base ** (-2i / dim)
    pairs = len(plain)
    return plain * growth ** (-np.arange(pairs) / max(pairs - 1, 1)), 1.0


def _llama3(plain: Float64, scaling: Scaling, base: float, context: int) -> Frequencies:
    """Divide low frequencies by `factor`, keep high ones, blend those in between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return plain * kept + plain / scaling["factor"] * (1 - kept), 1.0


def _yarn(plain: Float64, scaling: Scaling, base: float, context: int) -> Frequencies:
    """Blend as llama3 does, but by the index of the pair, and scale cosine and sine too."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    rotary_dim = 2 * len(plain)

    def pair_with(rotations: float) -> float:
        """Return the index of the pair that makes so many rotations in the original context."""
        return rotary_dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(base))

    first = pair_with(scaling.get("beta_fast") or 32)
    last = pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001
    divided = np.clip((np.arange(len(plain)) - first) / width, 0.0, 1.0)
    frequencies = plain * (1 - divided) + plain / factor * divided

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        attention = magnitude(1.0)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            attention = magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return frequencies, float(attention)


def _longrope(plain: Float64, scaling: Scaling, base: float, context: int) -> Frequencies:
    """Divide each frequency by its own factor, of the list for this context length."""
    original = scaling["original_max_position_embeddings"]
    divisors = np.asarray(
        scaling["long_factor" if context > original else "short_factor"], np.float64
    )
    if divisors.shape != plain.shape:
        raise ValueError(f"scaling: expected {len(plain)} factors, got {divisors.shape}")
    attention = scaling.get("attention_factor")
    if attention is None:
        ratio = scaling.get("factor") or context / original
        attention = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return plain / divisors, float(attention)


#: By rope_type: what changes the plain frequencies, and the keys that it needs.
SCALINGS: dict[str, tuple[Callable[[Float64, Scaling, float, int], Frequencies], str]] = {
    "default": (lambda plain, scaling, base, context: (plain, 1.0), ""),
    "linear": (_linear, "factor"),
    "dynamic": (_dynamic, "factor original_max_position_embeddings"),
    "llama3": (_llama3, "factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": (_yarn, "factor original_max_position_embeddings"),
    "longrope": (_longrope, "short_factor long_factor original_max_position_embeddings"),
}


def rope_frequencies(
    context: int, rotary_dim: int, *, base: float = 10000.0, scaling: Scaling | None = None
) -> Frequencies:
    """Return the radians that each pair rotates per position, and the factor of cosine and sine.

    `scaling` is the dictionary of a Hugging Face config, with `rope_type` (once `type`) and, in
    newer ones, `rope_theta`, which replaces the default of `base`.
    """
    config = dict(scaling or {})
    theta = config.get("rope_theta")
    if theta is not None:
        if base not in (10000.0, theta):
            raise ValueError(f"base: expected {theta} as in scaling, got {base}")
        base = float(theta)
    kind = config.get("rope_type", config.get("type", "default"))
    if kind not in SCALINGS:
        raise ValueError(f"scaling: expected a rope_type of {sorted(SCALINGS)}, got {kind!r}")
    scale, needed = SCALINGS[kind]
    missing = [key for key in needed.split() if config.get(key) is None]
    if missing:
        raise ValueError(f"scaling: expected {kind} to have {missing}, got {sorted(config)}")
    plain = base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    return scale(plain, config, base, context)


def rope_rows(positions: Array, frequencies: Float64, attention: float) -> Float64:
    """Return ``[cos | sin]`` of each position, times the attention factor, unrounded."""
    angles = positions[:, None].astype(np.float64) * frequencies
    return attention * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def rope_table(
    max_positions: int, rotary_dim: int, *, base: float = 10000.0, scaling: Scaling | None = None
) -> Float32:
    """Return ``[cos | sin]`` of every position, float32 ``(max_positions, rotary_dim)``.

    Dynamic and longrope scaling take `max_positions` as the context length.
    """
    frequencies = rope_frequencies(max_positions, rotary_dim, base=base, scaling=scaling)
    return rope_rows(np.arange(max_positions), *frequencies).astype(np.float32)
