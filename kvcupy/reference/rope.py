"""Rotary position embedding: the table, rotations, and rotations followed by a store.

Everything is float64 until tables and rotated rows are rounded, once: to float32, and to the format
of the rows. Tables are scaled in every way that extends the context of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .formats import LIMIT, Array, Float32, Float64, bits_of, decode, encode, format_of
from .four_bit import FourBitRows, quantise_rows
from .store import (
    Faults,
    Rows,
    Scale,
    copy_bits,
    divide,
    dynamic_scales,
    scaled,
    split_pages,
    store_kv,
    store_mla,
    write_rounded,
)

# --- The table ------------------------------------------------------------------------------------

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
    """Divide each frequency by its own factor, of the list for this context length.

    Phi-3.5-MoE has an attention factor for each list, named mscale.
    """
    original = scaling["original_max_position_embeddings"]
    length = "long" if context > original else "short"
    divisors = np.asarray(scaling[f"{length}_factor"], np.float64)
    if divisors.shape != plain.shape:
        raise ValueError(f"scaling: expected {len(plain)} factors, got {divisors.shape}")
    attention = scaling.get(f"{length}_mscale")
    if attention is None:
        attention = scaling.get("attention_factor")
    if attention is None:
        ratio = scaling.get("factor")
        if ratio is None:
            raise ValueError("scaling: expected factor or max_position_embeddings, got neither")
        attention = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return plain / divisors, float(attention)


def _proportional(plain: Float64, scaling: Scaling, base: float, context: int) -> Frequencies:
    """Rotate the first pairs of the whole head, and no others."""
    part = 1.0 if scaling.get("partial_rotary_factor") is None else scaling["partial_rotary_factor"]
    rotated = np.arange(len(plain)) < int(part * 2 * len(plain) // 2)
    return np.where(rotated, plain / (scaling.get("factor") or 1.0), 0.0), 1.0


#: By rope_type: what changes the plain frequencies, and the keys that it needs.
SCALINGS: dict[str, tuple[Callable[[Float64, Scaling, float, int], Frequencies], str]] = {
    "default": (lambda plain, scaling, base, context: (plain, 1.0), ""),
    "linear": (_linear, "factor"),
    "dynamic": (_dynamic, "factor original_max_position_embeddings"),
    "llama3": (_llama3, "factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": (_yarn, "factor original_max_position_embeddings"),
    "longrope": (_longrope, "short_factor long_factor original_max_position_embeddings"),
    "proportional": (_proportional, ""),
}


def rope_frequencies(
    context: int, rotary_dim: int, *, base: float = 10000.0, scaling: Scaling | None = None
) -> Frequencies:
    """Return the radians that each pair rotates per position, and the factor of cosine and sine.

    `scaling` is the dictionary of a Hugging Face config, with `rope_type` (once `type`) and, in
    newer ones, `rope_theta`, which replaces the default of `base`. `max_position_embeddings` of the
    config may be added.
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
    length = config.get("max_position_embeddings")
    if length is not None:  # of the config: where it has nothing else, and always for dynamic
        key = "original_max_position_embeddings"
        if kind == "dynamic" or config.get(key) is None:
            config[key] = length
        if kind in ("yarn", "longrope") and config.get("factor") is None:
            config["factor"] = length / config[key]
    missing = [key for key in needed.split() if config.get(key) is None]
    if missing:
        hint = "; add max_position_embeddings of the config" if length is None else ""
        raise ValueError(f"scaling: expected {kind} to have {missing}, got {sorted(config)}{hint}")
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


# --- Rotations ------------------------------------------------------------------------------------


def position_faults(positions: Array, max_positions: int) -> Faults:
    """Return (token, position) for every position outside the table.

    With three positions per token, ``(3, T)``, each of them counts, even one that rotates no pair.
    """
    axes = np.atleast_2d(positions)
    outside = (axes < 0) | (axes >= max_positions)
    return [(int(token), int(axes[axis, token])) for token, axis in np.argwhere(outside.T)]


def _tokens_inside(positions: Array, max_positions: int) -> Array:
    """Return the tokens without a fault."""
    outside = [token for token, _ in position_faults(positions, max_positions)]
    return np.setdiff1d(np.arange(positions.shape[-1]), outside)


def pair_axes(pairs: int, sections: Sequence[int], interleaved: bool) -> list[int]:
    """Return, for each pair, which of the three positions of a token rotates it."""
    if not interleaved:  # Qwen2-VL: first all pairs of axis 0, then of 1, then of 2.
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    # Qwen3-VL: axes alternate; once one has all its pairs, axis 0 takes its place.
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs)]


def cos_sin(
    rope_table: Array,
    positions: Array,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
) -> tuple[Float64, Float64]:
    """Return the cosine and sine of every token and pair, each ``(T, rotary_dim / 2)``."""
    pairs = rope_table.shape[1] // 2
    axes = [0] * pairs
    if sections is not None:
        axes = pair_axes(pairs, sections, sections_interleaved)
    position_of_pair = np.atleast_2d(positions)[axes].T
    table, column = rope_table.astype(np.float64), np.arange(pairs)
    return table[position_of_pair, column], table[position_of_pair, pairs + column]


def rotate(
    rows: Array,
    cosine: Float64,
    sine: Float64,
    *,
    interleaved: bool = False,
    norm: Array | None = None,
    eps: float = 1e-6,
) -> Float64:
    """Return rows ``(T, H, D)`` or ``(T, D)`` with the first elements rotated; unrounded.

    Cosine and sine are ``(T, rotary_dim / 2)``. With `norm` ``(D,)``, rows first become ``x * norm
    / sqrt(mean(x ** 2) + eps)``.
    """
    x = decode(rows, format_of(rows))
    if rows.ndim == 3:
        cosine, sine = cosine[:, None], sine[:, None]
    with np.errstate(invalid="ignore"):
        if norm is not None:
            mean = np.mean(x**2, axis=-1, keepdims=True)
            x = x * decode(norm, format_of(norm)) / np.sqrt(mean + eps)
        return rotate_values(x, cosine, sine, interleaved=interleaved)


def rotate_values(
    x: Float64, cosine: Float64, sine: Float64, *, interleaved: bool = False, start: int = 0
) -> Float64:
    """Return rows of exact values with the pairs from element `start` on rotated."""
    pairs = cosine.shape[-1]
    if interleaved:
        first, second = (slice(start + i, start + 2 * pairs, 2) for i in (0, 1))
    else:
        first, second = (slice(start + i, start + i + pairs) for i in (0, pairs))
    result = x.copy()
    result[..., first] = x[..., first] * cosine - x[..., second] * sine
    result[..., second] = x[..., second] * cosine + x[..., first] * sine
    return result


def apply_rope(
    query: Array | None,
    key: Array | None,
    rope_table: Array,
    positions: Array,
    *,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Array | None = None,
    key_norm: Array | None = None,
    eps: float = 1e-6,
) -> tuple[Array | None, Array | None]:
    """Return the rotated query and key, None for None. `cos_sin` and `rotate` do not round.

    Arguments are as in `kvcupy.apply_rope`. Tokens whose position is outside the table are not
    changed, see `position_faults`.
    """
    tokens = _tokens_inside(positions, len(rope_table))
    cosine, sine = cos_sin(rope_table, positions[..., tokens], sections, sections_interleaved)

    def rotated(rows: Array | None, norm: Array | None) -> Array | None:
        if rows is None:
            return None
        result, fmt = rows.copy(), format_of(rows)
        exact = rotate(rows[tokens], cosine, sine, interleaved=interleaved, norm=norm, eps=eps)
        # Elements that are not rotated keep their bits, unless they are normalised.
        width = rope_table.shape[1] if norm is None else rows.shape[-1]
        bits_of(result, fmt)[tokens, ..., :width] = bits_of(encode(exact[..., :width], fmt), fmt)
        return result

    return rotated(query, query_norm), rotated(key, key_norm)


def _write_rotated(rotated: Array | None, target: Array | None, tokens: Array) -> None:
    """Copy the bits of the tokens that were rotated."""
    if rotated is not None and target is not None:
        fmt = format_of(rotated)
        bits_of(target, fmt)[tokens] = bits_of(rotated, fmt)[tokens]


def _slots_to_store(slot_mapping: Array, tokens: Array) -> Array:
    """Return the slots of the tokens that were rotated, and -1 for the others."""
    return np.where(np.isin(np.arange(len(slot_mapping)), tokens), slot_mapping, -1)


def rope_store_kv(
    query: Array | None,
    key: Array,
    value: Array,
    rope_table: Array,
    positions: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Array | None = None,
    key_norm: Array | None = None,
    eps: float = 1e-6,
    write_key: bool = True,
    query_out: Array | None = None,
    layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    skip_slot: int | None = None,
) -> tuple[Faults, Faults]:
    """Rotate query and key, and write the rotated key and the value to their slots, in place.

    Arguments are as in `kvcupy.rope_store_kv`. Return (token, position) outside the table, whose
    tokens are neither rotated nor stored, and (token, slot) past the end.
    """
    new_query, new_key = apply_rope(
        query, key, rope_table, positions, interleaved=interleaved,
        sections=sections, sections_interleaved=sections_interleaved,
        query_norm=query_norm, key_norm=key_norm, eps=eps,
    )  # fmt: skip
    assert new_key is not None
    tokens = _tokens_inside(positions, len(rope_table))
    slots = _slots_to_store(slot_mapping, tokens)
    _write_rotated(new_query, query if query_out is None else query_out, tokens)
    if write_key:
        _write_rotated(new_key, key, tokens)
    faults = store_kv(
        new_key, value, k_cache, v_cache, slots, layout=layout, k_scale=k_scale, v_scale=v_scale,
        k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache, skip_slot=skip_slot,
    )  # fmt: skip
    return position_faults(positions, len(rope_table)), faults


def rope_store_mla(
    query: Array | None,
    latent: Array,
    rope_key: Array,
    rope_table: Array,
    positions: Array,
    cache: Array,
    slot_mapping: Array,
    *,
    interleaved: bool = False,
    write_key: bool = True,
    query_out: Array | None = None,
    scale: Scale = None,
    skip_slot: int | None = None,
) -> tuple[Faults, Faults]:
    """Rotate query ``(T, Hq, P)`` and rope_key ``(T, P)``, and store as `store_mla` does.

    The faults returned, and the destinations, are as in `rope_store_kv`.
    """
    new_query, new_key = apply_rope(query, rope_key, rope_table, positions, interleaved=interleaved)
    assert new_key is not None
    tokens = _tokens_inside(positions, len(rope_table))
    slots = _slots_to_store(slot_mapping, tokens)
    _write_rotated(new_query, query if query_out is None else query_out, tokens)
    if write_key:
        _write_rotated(new_key, rope_key, tokens)
    faults = store_mla(latent, new_key, cache, slots, scale=scale, skip_slot=skip_slot)
    return position_faults(positions, len(rope_table)), faults


# --- Cached keys at other positions ---------------------------------------------------------------


def shift_angles(rope_table: Array, delta: int) -> tuple[Float64, Float64]:
    """Return cosine and sine of the rotation by `delta` positions, each ``(rotary_dim / 2,)``.

    The cosines of position 0 are the attention factor, which the result is without.
    """
    table, pairs = rope_table.astype(np.float64), rope_table.shape[1] // 2
    with np.errstate(all="ignore"):
        unit = table[abs(delta)] / np.tile(table[0, :pairs], 2)
    return unit[:pairs], np.sign(delta or 1) * unit[pairs:]


def shift_rows(
    rows: Rows, rope_table: Array, delta: int, *, interleaved: bool = False, start: int = 0,
    scales: Array | None = None,
) -> Float64:  # fmt: skip
    """Return keys ``(..., D)`` moved on by `delta` positions, unrounded.

    `scales` ``(...)`` are dynamic ones. The elements from `start` on are rotated.
    """
    cosine, sine = shift_angles(rope_table, delta)
    x = decode(rows, format_of(rows)) if isinstance(rows, np.ndarray) else scaled(rows, None)
    if scales is not None:
        x = scaled(rows, scales)
    with np.errstate(invalid="ignore", over="ignore"):
        rotated = rotate_values(
            x.astype(np.float64), cosine, sine, interleaved=interleaved, start=start
        )
    rotated[..., start : start + 2 * len(cosine)] += 0.0  # a sum that is zero has no sign
    return rotated


def shift_pages(
    pool: Rows,
    pages: Array,
    delta: int | Array,
    rope_table: Array,
    *,
    out_pages: Array | None = None,
    interleaved: bool = False,
    start: int | None = None,
    values: Rows | None = None,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
) -> tuple[Faults, Faults, Faults]:
    """Rotate the keys of pages on by `delta` positions, in place or onto `out_pages`.

    Arguments are as in `kvcupy.shift_pages`, of an array of keys ``(pages, ..., D)``. `values` go
    with the keys onto other pages, with their scales ``(pages, ..., 1)``; `key_scales` are dynamic,
    and new ones are written. `start` is the first element that is rotated. Return (position, page)
    past the end, of `pages` and of `out_pages`, and (position, delta) outside of the table.
    """
    targets = pages if out_pages is None else out_pages
    deltas = np.broadcast_to(delta, pages.shape)
    rotary_dim = rope_table.shape[1]
    if start is None:
        start = pool.shape[-1] - rotary_dim if pool.ndim == 3 else 0
    _, (src, dst) = split_pages(pages, targets, (len(pool), len(pool)))
    past = {position for position, _ in (*src, *dst)}
    outside: Faults = []
    for position, (page, target, by) in enumerate(
        zip(pages.tolist(), targets.tolist(), deltas.tolist(), strict=True)
    ):
        if min(page, target) < 0 or position in past:
            continue
        if abs(by) >= len(rope_table):
            outside.append((position, by))
            continue
        scales = None if key_scales is None else key_scales[page][..., 0]
        exact = shift_rows(
            pool[page], rope_table, by, interleaved=interleaved, start=start, scales=scales
        )
        _write_shifted(
            exact, pool[page], pool[target], slice(start, start + rotary_dim),
            None if key_scales is None else key_scales[target],
        )  # fmt: skip
        if values is not None and page != target:
            copy_bits(values[page], values[target])
            if value_scales is not None:
                copy_bits(value_scales[page], value_scales[target])
    return src, ([] if out_pages is None else dst), outside


def _write_shifted(
    exact: Float64, source: Rows, target: Rows, rotated: slice, scales: Array | None
) -> None:
    """Write a page of rotated keys, rounded once; `scales` get the dynamic scales of its rows."""
    with np.errstate(over="ignore"):
        x = exact.astype(np.float32)
    if isinstance(target, FourBitRows):
        quantise_rows(x, target, np.ones(x.shape[:-1], np.float32))
    elif scales is not None:
        scales[..., 0] = dynamic_scales(x, format_of(target))
        write_rounded(divide(x, scales[..., 0]), target)
    else:
        copy_bits(source, target)
        quantised = format_of(target) in LIMIT  # from float32, as in every store
        write_rounded((x if quantised else exact)[..., rotated], target[..., rotated])
