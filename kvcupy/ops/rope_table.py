"""Tables of cos and sin by position, for every rope scaling of Hugging Face configs."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import devices
from ..checks import require_int, require_number
from ..config import logger

Frequencies = np.ndarray[Any, np.dtype[np.float64]]
Config = Mapping[str, Any]

_BASE = 10000.0  # the default
_LENGTHS = "short", "long"  # of the context, by whether it is longer than the trained one

# Keys of every type of scaling, and of each.
_COMMON_KEYS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings",
)  # fmt: skip
_KEYS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor original_max_position_embeddings",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate",
    "longrope": "factor original_max_position_embeddings attention_factor short_factor long_factor "
    "short_mscale long_mscale",
    "proportional": "factor",
}


def rope_table(
    max_positions: int,
    rotary_dim: int,
    *,
    base: float = _BASE,
    scaling: Config | None = None,
    device: Any = None,
) -> Any:
    """Return `[cos | sin]` of every position, computed in float64 and rounded once.

    Parameters
    ----------
    max_positions : rows of the table, which "dynamic" and "longrope" take as the context length
    rotary_dim : elements of a head that are rotated; even
    base : rope_theta. At its default of 10000, the base of `scaling` is taken, if there is one
    scaling : `config.rope_parameters`, or `config.rope_scaling`, of Hugging Face: `rope_type` is
        one of default, linear, dynamic, llama3, yarn, longrope, proportional. The attention factor
        is folded in. Add `max_position_embeddings` of the config where a length or factor is
        missing. `partial_rotary_factor` is expected in rotary_dim: `int(head_dim * factor)`; but
        "proportional" takes the whole head_dim, and does not rotate the other pairs
    device : Device or its name; None: the default device

    Returns
    -------
    float32 (max_positions, rotary_dim) on the device: cos of the rotary_dim / 2 frequencies, then
    sin of them

    Raises
    ------
    TypeError, ValueError : an argument does not fit, `scaling` lacks a key of its type, is one of
        several layer types, or has another rope_theta than `base`

    Notes
    -----
    Keys of `scaling` that its type does not have are ignored, with a warning in the log.
    Source: huggingface/transformers `modeling_rope_utils.py`; yarn: arXiv 2309.00071.

    Examples
    --------
    >>> table = rope_table(4096, 128, base=500000.0, device="host")
    >>> table.shape, float(table[0, 0]), float(table[0, 64])
    ((4096, 128), 1.0, 0.0)
    """
    require_int(max_positions, "max_positions")
    require_int(rotary_dim, "rotary_dim")
    # NumPy's integers would wrap.
    max_positions, rotary_dim = int(max_positions), int(rotary_dim)
    if max_positions < 1:
        raise ValueError(f"max_positions: expected at least 1, got {max_positions}")
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected an even number above 0, got {rotary_dim}")
    if max_positions * rotary_dim >= 2**59:
        raise ValueError(
            f"max_positions: expected a table that memory holds, got {max_positions} rows of "
            f"{rotary_dim}"
        )
    require_number(base, "base")
    own_base = _float(base)
    if not (own_base > 0 and math.isfinite(own_base)):
        raise ValueError(f"base: expected a finite number above 0, got {base!r}")
    target = devices.get(device)
    scaling = {} if scaling is None else scaling
    theta = _theta(own_base, scaling)
    frequencies, factor = _frequencies(max_positions, rotary_dim, theta, scaling)
    angles = np.arange(max_positions, dtype=np.float64)[:, None] * frequencies
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * factor
    return target.asarray(table.astype(np.float32))


def _theta(base: float, scaling: Config) -> float:
    """Return the base, of the argument or of a config, which must agree."""
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling: expected a dictionary or None, got {scaling!r}")
    by_layer_type = [str(key) for key, value in scaling.items() if isinstance(value, Mapping)]
    if by_layer_type:
        raise ValueError(
            f"scaling: expected the parameters of one layer type, got those of "
            f"{', '.join(by_layer_type)}; make a table for each: "
            f"scaling=config.rope_parameters[{by_layer_type[0]!r}]"
        )
    theta = scaling.get("rope_theta")
    if theta is None:
        return base
    theta = _number(scaling, "rope_theta")
    if not (theta > 0 and math.isfinite(theta)):
        raise ValueError(f"scaling: expected a finite rope_theta above 0, got {theta!r}")
    if base not in (_BASE, theta):
        raise ValueError(f"base: expected {theta}, the rope_theta of scaling, got {base}")
    return theta


def _frequencies(context: int, dim: int, base: float, scaling: Config) -> tuple[Frequencies, float]:
    """Return the angle of each pair at position 1, and the attention factor."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"scaling: expected rope_type {', '.join(_KINDS)}, got {kind!r}")
    known = {*_COMMON_KEYS, *_KEYS[kind].split()}
    ignored = [key for key, value in scaling.items() if key not in known and value is not None]
    if ignored:
        names = ", ".join(map(repr, ignored))
        message = "rope_table ignores %s of scaling, which rope_type %r does not have"
        logger.warning(message, names, kind)
    if scaling.get("partial_rotary_factor") not in (None, 1) and kind != "proportional":
        message = "rope_table takes rotary_dim %d for partial_rotary_factor %s of the head already"
        logger.info(message, dim, scaling["partial_rotary_factor"])
    try:
        return _KINDS[kind](context, dim, base, scaling)
    except ArithmeticError as error:
        raise ValueError(
            f"scaling: expected parameters of {kind!r}, got {dict(scaling)}"
        ) from error


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of an int
        return math.inf


def _powers(dim: int, base: float) -> Frequencies:
    powers: Frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return powers


def _number(scaling: Config, key: str, default: float | None = None) -> float:
    value = default if scaling.get(key) is None else scaling[key]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        got = f"{scaling.get(key)!r} in {dict(scaling)}"
        raise ValueError(f"scaling: expected a number for {key!r}, got {got}")
    number = _float(value)
    if not math.isfinite(number):
        raise ValueError(f"scaling: expected a finite number for {key!r}, got {value!r}")
    return number


def _positive(scaling: Config, key: str, default: float | None = None) -> float:
    number = _number(scaling, key, default)
    if not number > 0:
        raise ValueError(f"scaling: expected a number above 0 for {key!r}, got {number!r}")
    return number


def _first(scaling: Config, *keys: str) -> float:
    """Return the value of the first of some keys that is there."""
    for key in keys:
        if scaling.get(key) is not None:
            return _positive(scaling, key)
    raise ValueError(
        f"scaling: expected a number for {' or '.join(map(repr, keys))}, got {dict(scaling)}; "
        "config.max_position_embeddings serves: add that"
    )


def _trained(scaling: Config) -> float:
    """Return the context length that the model was trained for."""
    return _first(scaling, "original_max_position_embeddings", "max_position_embeddings")


def _factor(scaling: Config, trained: float) -> float:
    """Return the factor of the context, which configs may give as its length."""
    factor = _first(scaling, "factor", "max_position_embeddings")
    return factor if scaling.get("factor") is not None else factor / trained


def _default(context: int, dim: int, base: float, scaling: Config) -> tuple[Frequencies, float]:
    return _powers(dim, base), 1.0


def _linear(context: int, dim: int, base: float, scaling: Config) -> tuple[Frequencies, float]:
    return _powers(dim, base) / _positive(scaling, "factor"), 1.0


def _dynamic(context: int, dim: int, base: float, scaling: Config) -> tuple[Frequencies, float]:
    """Stretch the base once the context is longer than the model was trained for (NTK)."""
    factor = _positive(scaling, "factor")
    # Configs have two lengths for other types alone, and transformers takes this one.
    trained = _first(scaling, "max_position_embeddings", "original_max_position_embeddings")
    if dim > 2:
        stretch = factor * max(context, trained) / trained - (factor - 1)
        base *= stretch ** (dim / (dim - 2))
    return _powers(dim, base), 1.0


def _llama3(context: int, dim: int, base: float, scaling: Config) -> tuple[Frequencies, float]:
    """Stretch long wavelengths, keep short ones, blend between."""
    factor = _positive(scaling, "factor")
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    trained = _trained(scaling)
    frequencies = _powers(dim, base)
    rotations = trained * frequencies / (2 * math.pi)  # within the context that was trained
    kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def _yarn(context: int, dim: int, base: float, scaling: Config) -> tuple[Frequencies, float]:
    """Interpolate slow pairs, keep fast ones, ramp between; sharpen attention."""
    trained = _trained(scaling)
    factor = _factor(scaling, trained)

    def pair_of(key: str, default: float) -> float:
        rotations = _positive(scaling, key, default)
        turns = trained / (rotations * 2 * math.pi)
        if not 0 < turns < math.inf:
            raise ValueError(f"scaling: expected another number for {key!r}, got {rotations!r}")
        return dim * math.log(turns) / (2 * math.log(base))

    first, last = pair_of("beta_fast", 32.0), pair_of("beta_slow", 1.0)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - first) / (last - first), 0.0, 1.0)
    frequencies = _powers(dim, base)
    return frequencies * (1 - ramp) + frequencies / factor * ramp, _yarn_attention(factor, scaling)


def _yarn_attention(factor: float, scaling: Config) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")

    def sharpened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        over = sharpened(_number(scaling, "mscale_all_dim"))
        return sharpened(_number(scaling, "mscale")) / over
    return sharpened(1.0)


def _longrope(context: int, dim: int, base: float, scaling: Config) -> tuple[Frequencies, float]:
    """Divide each pair's frequency by its factor in the short or the long list."""
    trained = _trained(scaling)
    if not trained > 1:
        raise ValueError(
            f"scaling: expected original_max_position_embeddings above 1, got {trained}"
        )
    factors = {name: _pair_factors(scaling, f"{name}_factor", dim // 2) for name in _LENGTHS}
    length = _LENGTHS[context > trained]
    for key in (f"{length}_mscale", "attention_factor"):
        if scaling.get(key) is not None:
            attention = _number(scaling, key)
            break
    else:
        factor = _factor(scaling, trained)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return _powers(dim, base) / factors[length], attention


def _pair_factors(scaling: Config, key: str, pairs: int) -> Frequencies:
    try:
        factors = np.asarray(scaling.get(key), dtype=np.float64)
    except (TypeError, ValueError):
        factors = np.empty(0)
    if factors.shape != (pairs,):
        raise ValueError(f"scaling: expected {pairs} numbers for {key!r}, got {scaling.get(key)!r}")
    return factors


def _proportional(
    context: int, dim: int, base: float, scaling: Config
) -> tuple[Frequencies, float]:
    """Rotate the first pairs of the head; the others have frequency 0."""
    part = _number(scaling, "partial_rotary_factor", 1.0)
    if not 0 <= part <= 1:
        raise ValueError(f"scaling: expected partial_rotary_factor from 0 to 1, got {part}")
    frequencies = _powers(dim, base) / _positive(scaling, "factor", 1.0)
    frequencies[int(part * dim // 2) :] = 0.0
    return frequencies, 1.0


_KINDS: dict[str, Callable[[int, int, float, Config], tuple[Frequencies, float]]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope, "proportional": _proportional,
}  # fmt: skip
