"""The constructor arguments of a paged cache: checked, and made into pools, RoPE and scales."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, get_args

import numpy as np

from ... import devices
from ...arrays import ArrayView, describe, view
from ...checks import positive_int, require_int, require_number
from ...devices.protocol import Device
from ...formats import CACHE_FORMATS, FORMATS, Encoding, RopeMode, bytes_per_element
from ...ops import checks
from ..pool import KVPool, MLAPool, Pool
from .layers import Rope

PAGE_SIZE, DTYPE = 16, "bf16"  # defaults, which any pool passed to a cache may replace
_ROPE_MODES = get_args(RopeMode)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Demotion:
    """How a `PagedKVCache` keeps old tokens: in a narrower encoding, in pages of another pool.

    Parameters
    ----------
    encoding : an Encoding or its string, narrower than the cache's dtype
    recent : at least this number of a sequence's last tokens is in the cache's dtype before a step
    first : number of a sequence's first tokens that stay in the cache's dtype too
    num_pages : pages for old tokens; None: as many as the cache has

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    The end of a step demotes each page of its sequences that holds none of their first `first` and
    none of their last `recent` committed tokens: the page is converted on the copy stream, after
    all work on it so far, and freed. Where no page for old tokens is free, it stays in dtype until
    the end of a later step. A page that several sequences share is converted once: each sequence
    moves to the demoted page when the page leaves its recent tokens, and the last one frees the
    original. A demoted token stays demoted, also if tokens after it are popped; appending to a
    demoted page, or forking within it, converts the page back to dtype with the values that are
    left. Scales are one per token and head, or one per group. Attention reads each format by a
    separate launch and merges the results. Not with a Demotion: latent_dim, k_scale and v_scale,
    a `window` of attention longer than recent + 1 or with first keys, and page tables
    for other libraries. `offload` and `export_sequence` move demoted pages without converting them.

    Examples
    --------
    >>> Demotion("nvfp4+hadamard", recent=64, first=4).encoding.format
    'nvfp4'
    """

    encoding: Encoding
    _: KW_ONLY
    recent: int
    first: int = 0
    num_pages: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoding", Encoding.of(self.encoding, "encoding"))
        for name in ("recent", "first"):
            value = getattr(self, name)
            require_int(value, name)
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
            object.__setattr__(self, name, int(value))
        if self.num_pages is not None:
            object.__setattr__(self, "num_pages", positive_int(self.num_pages, "num_pages"))


# --- Pools ---


def pool_of(
    pool: Any, *, num_layers: int | None, num_kv_heads: Any, head_dim: Any,
    num_pages: int | None, page_size: int, dtype: Any, device: Any, v_head_dim: int | None,
    latent_dim: int | None, rope_dim: int | None, has_static_scales: bool,
) -> tuple[Pool, int | None]:  # fmt: skip
    """Return `pool`, which must agree with the other arguments, or a new one; and latent_dim."""
    if isinstance(pool, MLAPool):
        if latent_dim is None and pool.rope_dim:
            latent_dim = pool.latent_dim
        if latent_dim is not None and rope_dim is None:
            rope_dim = pool.head_dim - positive_int(latent_dim, "latent_dim")
            if rope_dim < 1:
                raise ValueError(
                    f"latent_dim: expected less than {pool.head_dim}, got {latent_dim}"
                )
    kind, relation = (KVPool, "without") if latent_dim is None else (MLAPool, "with")
    if pool is not None and not isinstance(pool, kind):
        raise TypeError(
            f"pool: expected a {kind.__name__} {relation} latent_dim, got {type(pool).__name__}"
        )
    if latent_dim is not None:
        row = positive_int(latent_dim, "latent_dim") + positive_int(rope_dim, "rope_dim")
        if v_head_dim is not None:
            raise ValueError(f"v_head_dim: expected None with latent_dim, got {v_head_dim}")
        for name, value, expected in (
            ("num_kv_heads", num_kv_heads, 1),
            ("head_dim", head_dim, row),
        ):
            if value is not None and positive_int(value, name) != expected:
                raise ValueError(
                    f"{name}: expected None or {expected} with latent_dim, got {value}"
                )
        head_dim = row
    elif rope_dim is not None:
        raise ValueError(f"rope_dim: expected None without latent_dim, got {rope_dim}")
    if pool is not None:
        counts = {
            "num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "num_pages": num_pages, "v_head_dim": v_head_dim,
            "page_size": None if page_size == PAGE_SIZE else page_size,
        }  # fmt: skip
        _require_agreement(pool, counts, dtype, device, latent_dim, has_static_scales)
        return pool, latent_dim
    shared: dict[str, Any] = {
        "num_pages": num_pages, "page_size": page_size, "num_layers": num_layers,
        "dtype": dtype, "device": device,
    }  # fmt: skip
    if latent_dim is not None:
        return MLAPool(**shared, latent_dim=latent_dim, rope_dim=head_dim - latent_dim), latent_dim
    scales = not has_static_scales and has_token_scales(Encoding.of(dtype).format)
    return KVPool(  # raises for None, by the argument's name
        **shared, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        scales=scales,
    ), None  # fmt: skip


def has_token_scales(format: str) -> bool:
    """Return whether rows of a format need scales per token and head; four-bit groups have some."""
    return format in FORMATS and FORMATS[format].quantised


def _require_agreement(
    pool: Pool, counts: dict[str, int | None], dtype: Any, device: Any, latent_dim: int | None,
    has_static_scales: bool,
) -> None:  # fmt: skip
    """Raise if the other arguments contradict a pool, or attention cannot read its pages."""
    for name, value in counts.items():
        if value is not None and positive_int(value, name) != getattr(pool, name):
            raise ValueError(f"{name}: expected {getattr(pool, name)} as in pool, got {value}")
    accepted = pool.encoding, Encoding(pool.encoding.format)
    if dtype is not DTYPE and Encoding.of(dtype) not in accepted:
        raise ValueError(f"dtype: expected {pool.encoding} as in pool, got {dtype!r}")
    if device is not None and devices.get(device) is not pool.device:
        raise ValueError(f"device: expected {pool.device.name} as in pool, got {device!r}")
    if pool.placement != "device":
        raise ValueError(f"pool: expected pages on the device, got {pool}")
    if isinstance(pool, MLAPool) and pool.rope_dim and latent_dim != pool.latent_dim:
        raise ValueError(f"latent_dim: expected {pool.latent_dim} as in pool, got {latent_dim}")
    if has_static_scales and pool.scale_parts:
        raise ValueError(f"k_scale, v_scale: expected None with the scales of {pool}")


def demoted_pool_of(
    pool: Pool, demotion: Demotion | None, has_static_scales: bool
) -> KVPool | None:
    """Return a pool for the old tokens of a cache, or None if it has none; check the arguments."""
    if demotion is None:
        return None
    if not isinstance(demotion, Demotion):
        raise TypeError(f"demotion: expected a Demotion, got {demotion!r}")
    if not isinstance(pool, KVPool):
        raise ValueError(f"demotion: expected None with latent_dim, got {demotion}")
    format = demotion.encoding.format
    if bytes_per_element(format) >= bytes_per_element(pool.dtype):
        raise ValueError(f"demotion: expected a format narrower than {pool.dtype}, got {format}")
    if has_static_scales:
        raise ValueError("k_scale, v_scale: expected None with demotion")
    return KVPool(
        pool.num_pages if demotion.num_pages is None else demotion.num_pages,
        pool.page_size, pool.num_layers, pool.num_kv_heads, pool.head_dim,
        v_head_dim=pool.v_head_dim, dtype=demotion.encoding, scales=has_token_scales(format),
        device=pool.device,
    )  # fmt: skip


# --- RoPE and scales ---


def require_rope_mode(mode: Any) -> None:
    """Check the argument `rope_mode`."""
    if not isinstance(mode, str) or mode not in _ROPE_MODES:
        raise ValueError(f"rope_mode: expected one of {', '.join(_ROPE_MODES)}, got {mode!r}")


def rope_of(
    table: Any, mode: str, interleaved: Any, device: Device, head_dim: int, latent_dim: int | None
) -> Rope:
    """Check the arguments that say how keys are rotated."""
    if not isinstance(interleaved, (bool, np.bool_)):
        raise TypeError(f"interleaved: expected a bool, got {interleaved!r}")
    if table is None:
        if mode == "inline":
            raise ValueError("rope: expected a table for rope_mode 'inline', got None")
        return Rope(None, "none", False, latent_dim or 0)
    rows = view(table, "rope")
    first = latent_dim or 0
    if rows.format != "fp32" or rows.ndim != 2 or rows.shape[0] == 0:
        raise ValueError(f"rope: expected (max_positions, rotary_dim) fp32, got {describe(rows)}")
    if rows.shape[1] % 2 or not 2 <= rows.shape[1] <= head_dim - first:
        raise ValueError(
            f"rope: expected an even rotary_dim up to {head_dim - first}, got {describe(rows)}"
        )
    if rows.device != device.name:
        raise ValueError(f"rope: expected it on {device.name}, got {rows.device}")
    checks.require_contiguous(rows, "rope")
    checks.require_aligned([("rope", rows)])
    return Rope(rows, str(mode), bool(interleaved), first)


def rope_positions(table: Any) -> int | None:
    """Return the positions of a RoPE table; None without a table."""
    shape: Any = getattr(table, "shape", ())
    return int(shape[0]) if len(shape) == 2 else None


def scales_of(pool: Pool, k_scale: Any, v_scale: Any) -> list[tuple[Any, Any]]:
    """Return the static scales of K and V of each layer; empty if there are none."""
    if k_scale is None and v_scale is None:
        return []
    if not CACHE_FORMATS[pool.dtype].quantised:
        for scale, name in ((k_scale, "k_scale"), (v_scale, "v_scale")):
            if scale is not None and (checks.is_array(scale) or scale != 1.0):
                got = describe(view(scale, name=name)) if checks.is_array(scale) else repr(scale)
                raise ValueError(
                    f"{name}: expected None or 1.0 for a {pool.dtype} cache, got {got}"
                )
        return []
    if isinstance(pool, MLAPool):
        if v_scale is not None:
            raise ValueError("v_scale: expected None with latent_dim, whose one scale is k_scale")
        v_scale = k_scale
    k_scales = _scale_per_layer(pool, k_scale, "k_scale")
    v_scales = _scale_per_layer(pool, v_scale, "v_scale")
    return list(zip(k_scales, v_scales, strict=True))


def _scale_per_layer(pool: Pool, scale: Any, name: str) -> list[Any]:
    if scale is None or not checks.is_array(scale):
        if scale is not None:
            require_number(scale, name)
            # Any int compares with a Python float.
            if not (0 < scale <= _MAX_FLOAT32 and np.float32(scale) > 0):
                raise ValueError(f"{name}: expected a finite number above zero, got {scale!r}")
        return [scale] * pool.num_layers
    scales = view(scale, name)
    num_heads = pool.num_kv_heads
    rows = [(num_heads,), (1,)]
    if scales.format != "fp32" or not (
        scales.shape in rows
        or (scales.shape[:1] == (pool.num_layers,) and scales.shape[1:] in rows)
    ):
        raise ValueError(
            f"{name}: expected a number, or ({num_heads},), ({pool.num_layers}, 1) or "
            f"({pool.num_layers}, {num_heads}) fp32, got {describe(scales)}"
        )
    copied: ArrayView = view(pool.device.asarray(devices.get(scales.device).to_numpy(scale)))
    if copied.ndim == 1:
        return [copied] * pool.num_layers
    return [copied[layer] for layer in range(pool.num_layers)]
