"""Tables of cos and sin by position, for every rope scaling of Hugging Face configs."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import devices, reference
from ..checks import require_int, require_number
from ..config import logger

Config = Mapping[str, Any]

_BASE = 10000.0  # the default
_LARGEST = 1e30  # of a number above 0, whose inverse is the smallest

# Keys of every type of scaling, and of each.
_COMMON_KEYS = "rope_type type rope_theta partial_rotary_factor max_position_embeddings"
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
_FACTORS_OF_PAIRS = ("short_factor", "long_factor")
_ANY_SIGN = ("attention_factor", "mscale", "mscale_all_dim", "short_mscale", "long_mscale")


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
    if not 0 < base <= sys.float_info.max:
        raise ValueError(f"base: expected a finite number above 0, got {base!r}")
    target = devices.get(device)
    config = _checked({} if scaling is None else scaling, rotary_dim)
    try:
        table = reference.rope_table(max_positions, rotary_dim, base=float(base), scaling=config)
    except ArithmeticError as error:
        raise ValueError(f"scaling: expected other parameters, got {config}") from error
    return target.asarray(table)


def _checked(scaling: Config, rotary_dim: int) -> dict[str, Any]:
    """Return the parameters of a config that its type has, with numbers as floats."""
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling: expected a dictionary or None, got {scaling!r}")
    by_layer_type = [str(key) for key, value in scaling.items() if isinstance(value, Mapping)]
    if by_layer_type:
        raise ValueError(
            f"scaling: expected the parameters of one layer type, got those of "
            f"{', '.join(by_layer_type)}; make a table for each: "
            f"scaling=config.rope_parameters[{by_layer_type[0]!r}]"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"scaling: expected rope_type {', '.join(_KEYS)}, got {kind!r}")
    known = {*_COMMON_KEYS.split(), *_KEYS[kind].split()}
    present = {key: value for key, value in scaling.items() if value is not None}
    if ignored := [key for key in present if key not in known]:
        names = ", ".join(map(repr, ignored))
        message = "rope_table ignores %s of scaling, which rope_type %r does not have"
        logger.warning(message, names, kind)
    if present.get("partial_rotary_factor", 1) != 1 and kind != "proportional":
        message = "rope_table takes rotary_dim %d for partial_rotary_factor %s of the head already"
        logger.info(message, rotary_dim, present["partial_rotary_factor"])
    config: dict[str, Any] = {"rope_type": kind}
    for key, value in present.items():
        if key not in known or key in ("rope_type", "type"):
            continue
        if key in _FACTORS_OF_PAIRS:
            config[key] = _pair_factors(key, value, rotary_dim // 2)
        else:
            config[key] = bool(value) if key == "truncate" else _number(key, value)
    part = config.get("partial_rotary_factor", 1)
    if kind == "proportional" and not 0 <= part <= 1:
        raise ValueError(f"scaling: expected partial_rotary_factor from 0 to 1, got {part}")
    if kind == "longrope" and config.get("original_max_position_embeddings", 2) <= 1:
        raise ValueError(f"scaling: expected a trained length above 1, got {config}")
    return config


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"scaling: expected a number for {key!r}, got {value!r}")
    number: Any = value
    if key in _ANY_SIGN or key == "partial_rotary_factor":
        expected, fits = "a finite number", abs(number) <= _LARGEST
    else:
        expected, fits = "a finite number above 0", 1 / _LARGEST <= number <= _LARGEST
    if not fits:
        raise ValueError(f"scaling: expected {expected} for {key!r}, got {value!r}")
    return float(number)


def _pair_factors(key: str, value: Any, pairs: int) -> Any:
    try:
        factors = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        factors = np.empty(0)
    if factors.shape != (pairs,):
        raise ValueError(f"scaling: expected {pairs} numbers for {key!r}, got {value!r}")
    return factors
