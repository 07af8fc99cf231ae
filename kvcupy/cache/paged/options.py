"""The arguments that a paged cache is made with."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import devices
from ...arrays import ArrayView, describe, view
from ...devices.protocol import Device
from ...formats import FORMATS
from ...ops import checks
from ...ops.outputs import format_name
from ..pool import KVPool, MLAPool
from ..storage import Pool, count
from .layers import MODES, Rope

PAGE_SIZE, DTYPE = 16, "bf16"  # unless given


def pool_of(
    pool: Any,
    *,
    num_layers: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    num_pages: int | None,
    page_size: int,
    dtype: Any,
    device: Any,
    v_head_dim: int | None,
    latent_dim: int | None,
    has_static_scales: bool,
) -> Pool:
    """Return the pages: those given, whose geometry is that of the other arguments, or new ones."""
    if latent_dim is not None:
        count(latent_dim, "latent_dim")
        if v_head_dim is not None:
            raise ValueError(f"v_head_dim: expected None with latent_dim, got {v_head_dim}")
    if pool is not None:
        counts = {
            "num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "num_pages": num_pages, "v_head_dim": v_head_dim,
            "page_size": None if page_size == PAGE_SIZE else page_size,
        }  # fmt: skip
        _require_pool(
            pool, counts, None if dtype is DTYPE else dtype, device, latent_dim, has_static_scales
        )
        found: Pool = pool
        return found
    shared: dict[str, Any] = {
        "num_pages": num_pages, "page_size": page_size, "num_layers": num_layers,
        "dtype": dtype, "device": device,
    }  # fmt: skip
    heads: Any = num_kv_heads  # the pool refuses None by its name
    width: Any = head_dim
    if latent_dim is None:
        dynamic = FORMATS[format_name(dtype)].quantised and not has_static_scales
        return KVPool(
            **shared, num_kv_heads=heads, head_dim=width, v_head_dim=v_head_dim, scales=dynamic
        )
    if count(num_kv_heads, "num_kv_heads") != 1:
        raise ValueError(f"num_kv_heads: expected 1 with latent_dim, got {num_kv_heads}")
    if latent_dim >= count(head_dim, "head_dim"):
        raise ValueError(f"latent_dim: expected less than head_dim {head_dim}, got {latent_dim}")
    return MLAPool(**shared, latent_dim=width)


def _require_pool(
    pool: Any,
    counts: dict[str, int | None],
    dtype: Any,
    device: Any,
    latent_dim: int | None,
    has_static_scales: bool,
) -> None:
    """Refuse a pool that the other arguments contradict, or whose pages attention cannot read."""
    wanted = KVPool if latent_dim is None else MLAPool
    if not isinstance(pool, wanted):
        beside = "without" if latent_dim is None else "with"
        raise TypeError(
            f"pool: expected a {wanted.__name__} {beside} latent_dim, got {type(pool).__name__}"
        )
    for name, value in counts.items():
        if value is not None and count(value, name) != getattr(pool, name):
            raise ValueError(f"{name}: expected {getattr(pool, name)} as in pool, got {value}")
    if dtype is not None and format_name(dtype) != pool.dtype:
        raise ValueError(f"dtype: expected {pool.dtype} as in pool, got {dtype!r}")
    if device is not None and devices.get(device) is not pool.device:
        raise ValueError(f"device: expected {pool.device.name} as in pool, got {device!r}")
    if pool.placement != "device":
        raise ValueError(f"pool: expected pages on the device, got {pool}")
    if latent_dim is not None and latent_dim >= pool.head_dim:
        raise ValueError(f"latent_dim: expected less than {pool.head_dim}, got {latent_dim}")
    if has_static_scales and pool.scale_parts:
        raise ValueError(f"k_scale, v_scale: expected None with the scales of {pool}")


def rope_of(
    table: Any, mode: Any, interleaved: Any, device: Device, head_dim: int, latent_dim: int | None
) -> Rope:
    """Check how keys turn."""
    if mode not in MODES:
        raise ValueError(f"rope_mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if not isinstance(interleaved, (bool, np.bool_)):
        raise TypeError(f"interleaved: expected a bool, got {interleaved!r}")
    if table is None:
        return Rope(None, "none", False, latent_dim or 0)
    found = view(table, "rope")
    first = latent_dim or 0
    if found.format != "fp32" or found.ndim != 2 or found.shape[0] == 0:
        raise ValueError(f"rope: expected (max_positions, rotary_dim) fp32, got {describe(found)}")
    if found.shape[1] % 2 or not 2 <= found.shape[1] <= head_dim - first:
        raise ValueError(
            f"rope: expected an even rotary_dim up to {head_dim - first}, got {describe(found)}"
        )
    if found.device != device.name:
        raise ValueError(f"rope: expected it on {device.name}, got {found.device}")
    return Rope(found, str(mode), bool(interleaved), first)


def scales_of(pool: Pool, k_scale: Any, v_scale: Any) -> list[tuple[Any, Any]]:
    """Return the static scales of K and V of each layer; empty if there are none."""
    if k_scale is None and v_scale is None:
        return []
    if not FORMATS[pool.dtype].quantised:
        name = "k_scale" if k_scale is not None else "v_scale"
        raise ValueError(f"{name}: expected None for a cache of {pool.dtype}")
    if isinstance(pool, MLAPool):
        if v_scale is not None:
            raise ValueError("v_scale: expected None with latent_dim, whose one scale is k_scale")
        v_scale = k_scale
    sides = (_by_layer(pool, k_scale, "k_scale"), _by_layer(pool, v_scale, "v_scale"))
    return list(zip(*sides, strict=True))


def _by_layer(pool: Pool, scale: Any, name: str) -> list[Any]:
    if scale is None or not checks.is_array(scale):
        if scale is not None:
            checks.require_number(scale, name)
            if not (np.isfinite(np.float32(scale)) and np.float32(scale) > 0):
                raise ValueError(f"{name}: expected a finite number above zero, got {scale!r}")
        return [scale] * pool.num_layers
    given = view(scale, name)
    num_heads = pool.num_kv_heads
    rows = [(num_heads,), (1,)]
    if given.format != "fp32" or not (
        given.shape in rows or (given.shape[:1] == (pool.num_layers,) and given.shape[1:] in rows)
    ):
        raise ValueError(
            f"{name}: expected a number, or ({num_heads},), ({pool.num_layers}, 1) or "
            f"({pool.num_layers}, {num_heads}) fp32, got {describe(given)}"
        )
    own: ArrayView = view(pool.device.asarray(devices.get(given.device).to_numpy(scale)))
    return (
        [own[layer] for layer in range(pool.num_layers)]
        if own.ndim == 2
        else ([own] * pool.num_layers)
    )
