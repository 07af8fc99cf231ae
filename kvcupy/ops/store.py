"""Write K and V, or the latent and rope parts of MLA, into a cache in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import devices
from ..arrays import ArrayView, describe
from ..exporters import probe, view
from . import checks
from .store_launch import Side
from .store_plan import Plan

_KV = (
    "key", "value", "k_cache", "v_cache", "slot_mapping",
    "k_scale", "v_scale", "k_scale_cache", "v_scale_cache",
)  # fmt: skip
_MLA = ("latent", "rope_key", "cache", "cache", "slot_mapping", "scale", "scale", "", "")

_plans: dict[Any, Plan] = {}
_MAX_PLANS = 4096


def store_kv(
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    layout: str = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    skip_slot: int | None = None,
    stream: Any = None,
) -> None:
    """Write K and V rows into the slots of a cache, both in one launch.

    Parameters
    ----------
    key : (T', H, D), or (T', W) with 2-D caches; T' >= T; any number format
    value : (T', H, Dv), or (T', Wv)
    k_cache, v_cache : written in place. (num_slots, H, D), or paged: "NHD" (num_pages, page_size,
        H, D), "HND" (num_pages, H, page_size, D); or (num_slots, W). Same format as the rows: bits
        are copied, and a static scale only describes them. Another format: float32 arithmetic, one
        rounding
    slot_mapping : int32 or int64 (T,); slot = page * page_size + offset. Negative: skipped. Past
        the end: skipped, and raised by `check_faults`
    k_scale, v_scale : dequantisation multipliers for quantised caches: None (1), a number, or
        float32 of one element or (H,)
    k_scale_cache, v_scale_cache : float32 (num_slots, H), written in place; each token and head
        then gets its own scale, max(absmax, 1e-6) / limit. Absmax passes over NaN and takes an
        infinity for the largest float32; rows already in the cache's format get the scale 1
    skip_slot : a sink slot that is never written
    stream : see API.md; None is the current stream of the arrays' library

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Stream: one kernel, in order; K and V of different format pairs take one each. The arrays are
    kept alive until it has run. Capture: legal. Bytes: each row read once (twice with dynamic
    scales, the second time from cache) and written once.
    Source: sgl-project/sglang pull 8884, vLLM `reshape_and_cache_flash`.

    Examples
    --------
    >>> k = np.ones((2, 8, 64), np.float16)
    >>> k_cache, v_cache = np.zeros((2, 16, 8, 64), np.float16)
    >>> store_kv(k, 2 * k, k_cache, v_cache, np.array([3, 7]))
    >>> float(k_cache[7, 0, 0]), float(v_cache[3, 0, 0]), float(k_cache[4, 0, 0])
    (1.0, 2.0, 0.0)
    """
    arrays = (
        key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_scale_cache, v_scale_cache,
    )  # fmt: skip
    found = _find_plan("store_kv", arrays, layout, skip_slot)
    if found is None:
        raise _refusal(_KV, arrays, layout, skip_slot)
    pointers, signature, plan = found
    if plan is None:
        plan = _remember(signature, _plan_kv(arrays, layout, skip_slot, pointers))
    plan.run(pointers, arrays, stream)


def store_mla(
    latent: Any,
    rope_key: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    scale: Any = None,
    skip_slot: int | None = None,
    stream: Any = None,
) -> None:
    """Write the latent and the rotated part of multi-head latent attention side by side.

    Parameters
    ----------
    latent : (T', R), T' >= T; any number format
    rope_key : (T', P)
    cache : (num_slots, R + P) or (num_pages, page_size, R + P), written in place
    slot_mapping : int32 or int64 (T,), as in `store_kv`
    scale : of a quantised cache: None (1), a number, or float32 of one element
    skip_slot : a sink slot that is never written
    stream : see API.md

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Stream, Capture: as `store_kv`. Source: vLLM `concat_and_cache_mla`.

    Examples
    --------
    >>> cache = np.zeros((64, 576), np.float16)
    >>> latent, rope = np.ones((1, 512), np.float16), np.full((1, 64), 2, np.float16)
    >>> store_mla(latent, rope, cache, np.array([5]))
    >>> float(cache[5, 511]), float(cache[5, 512])
    (1.0, 2.0)
    """
    arrays = (latent, rope_key, cache, cache, slot_mapping, scale, scale, None, None)
    found = _find_plan("store_mla", arrays, "NHD", skip_slot)
    if found is None:
        raise _refusal(_MLA, arrays, "NHD", skip_slot)
    pointers, signature, plan = found
    if plan is None:
        plan = _remember(signature, _plan_mla(arrays, skip_slot, pointers))
    plan.run(plan.shifted(pointers), arrays, stream)


def find_duplicate_slots(slot_mapping: Any) -> np.ndarray[Any, Any]:
    """Return the slots that occur more than once, sorted; negative ones do not count.

    Parameters
    ----------
    slot_mapping : int32 or int64 (T,)

    Returns
    -------
    NumPy array of the same dtype. Which of two rows with one slot a store keeps is undefined.

    Notes
    -----
    Stream: waits for the array. Capture: illegal.

    Examples
    --------
    >>> find_duplicate_slots(np.array([4, 1, 4, -1, -1]))
    array([4])
    """
    v = view(slot_mapping, "slot_mapping")
    checks.indices(v, "slot_mapping")
    slots, counts = np.unique(devices.get(v.device).to_numpy(slot_mapping), return_counts=True)
    repeated: np.ndarray[Any, Any] = slots[(counts > 1) & (slots >= 0)]
    return repeated


# --- Plans ----------------------------------------------------------------------------------------


def _find_plan(
    operation: str, arrays: tuple[Any, ...], layout: Any, skip_slot: Any
) -> tuple[tuple[int, ...], Any, Plan | None] | None:
    """Return addresses, signature and the plan if there is one; None if something is no array."""
    try:
        kp, ks = probe(arrays[0])
        vp, vs = probe(arrays[1])
        kcp, kcs = probe(arrays[2])
        vcp, vcs = probe(arrays[3])
        sp, ss = probe(arrays[4])
        ksp, kss = checks.probe_scale(arrays[5])
        vsp, vss = checks.probe_scale(arrays[6])
        kdp, kds = checks.probe_scale(arrays[7])
        vdp, vds = checks.probe_scale(arrays[8])
        alignment = (kp | vp | kcp | vcp) & 15
        # The type too: 5.0 is equal to 5, and no slot.
        signature = (
            operation, layout, skip_slot, type(skip_slot), alignment,
            ks, vs, kcs, vcs, ss, kss, vss, kds, vds,
        )  # fmt: skip
        return (kp, vp, kcp, vcp, sp, ksp, vsp, kdp, vdp), signature, _plans.get(signature)
    except TypeError:
        return None


def _remember(signature: Any, plan: Plan) -> Plan:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[signature] = plan
    return plan


def _refusal(
    names: tuple[str, ...], arrays: tuple[Any, ...], layout: Any, skip_slot: Any
) -> TypeError:
    """Find the argument that has no signature: raise the error that names it."""
    for i, (name, array) in enumerate(zip(names, arrays, strict=True)):
        if i < len(_KV) - 4 or checks.is_array(array):
            view(array, name)
    checks.layout_name(layout)
    checks.slot_number(skip_slot, "skip_slot")
    return TypeError(f"expected hashable arguments, got {layout!r}, {skip_slot!r}")


def _plan_kv(
    arrays: tuple[Any, ...], layout: Any, skip_slot: Any, pointers: tuple[int, ...]
) -> Plan:
    layout = checks.layout_name(layout)
    views = [view(array, name) for array, name in zip(arrays[:5], _KV[:5], strict=True)]
    key, value, k_cache, v_cache, slots = views
    named = zip(_KV[5:], arrays[5:], strict=True)
    scales = [(name, view(a, name)) for name, a in named if checks.is_array(a)]
    checks.require_same_device([*zip(_KV, views, strict=False), *scales])

    sides = []
    for prefix, rows_view, cache_view, scale, dynamic in (
        ("k", key, k_cache, arrays[5], arrays[7]),
        ("v", value, v_cache, arrays[6], arrays[8]),
    ):
        name = "key" if prefix == "k" else "value"
        source = checks.number_format(rows_view, name)
        target = checks.number_format(cache_view, f"{prefix}_cache")
        rows = checks.rows(rows_view, name)
        cache = checks.cache(cache_view, f"{prefix}_cache", layout, rows_view.ndim)
        if (cache.num_heads, cache.width) != (rows.num_heads, rows.width):
            raise ValueError(
                f"{prefix}_cache: expected {rows.num_heads} heads of {rows.width} like {name}, "
                f"got {describe(cache_view)} ({layout})"
            )
        static = checks.scale(scale, f"{prefix}_scale", rows.num_heads, target)
        scale_cache = checks.scale_cache(
            dynamic, f"{prefix}_scale_cache", (f"{prefix}_scale", scale), cache, target
        )
        sides.append(Side(prefix, rows, cache, source, target, static, scale_cache))
    k, v = sides
    if value.ndim != key.ndim or v.rows.num_heads != k.rows.num_heads:
        raise ValueError(f"value: expected heads as in key {describe(key)}, got {describe(value)}")
    if (v.cache.num_slots, v.cache.page_size) != (k.cache.num_slots, k.cache.page_size):
        raise ValueError(
            f"v_cache: expected pages as in k_cache {describe(k_cache)}, got {describe(v_cache)}"
        )
    return _finish("store_kv", _KV, [k, v], slots, skip_slot, pointers, key.library)


def _plan_mla(arrays: tuple[Any, ...], skip_slot: Any, pointers: tuple[int, ...]) -> Plan:
    found = [view(arrays[i], _MLA[i]) for i in (0, 1, 2, 4)]
    latent, _, cache_view, slots = found
    named = list(zip(("latent", "rope_key", "cache", "slot_mapping"), found, strict=True))
    if checks.is_array(arrays[5]):
        named.append(("scale", view(arrays[5], "scale")))
    checks.require_same_device(named)
    for name, v in named[:2]:
        if v.ndim != 2:
            raise ValueError(f"{name}: expected (tokens, width), got {describe(v)}")
    rows = [checks.rows(v, name) for name, v in named[:2]]
    target = checks.number_format(cache_view, "cache")
    cache = checks.mla_cache(cache_view, "cache")
    if cache.width != rows[0].width + rows[1].width:
        raise ValueError(
            f"cache: expected rows of {rows[0].width} + {rows[1].width}, got {describe(cache_view)}"
        )
    scale = checks.scale(arrays[5], "scale", 1, target)
    sides = [
        Side(prefix, r, replace(cache, width=r.width), checks.number_format(v, name), target, scale)
        for prefix, r, (name, v) in zip("kv", rows, named[:2], strict=True)
    ]
    offset = rows[0].width * target.itemsize
    shifted = (*pointers[:3], pointers[3] + offset, *pointers[4:])
    plan = _finish("store_mla", _MLA, sides, slots, skip_slot, shifted, latent.library)
    plan.v_cache_offset = offset
    return plan


def _finish(
    operation: str,
    names: tuple[str, ...],
    sides: list[Side],
    slots: ArrayView,
    skip_slot: Any,
    pointers: tuple[int, ...],
    library: str,
) -> Plan:
    """Check what both operations have in common, and plan."""
    checks.indices(slots, "slot_mapping")
    for name, side in zip(names, sides, strict=False):
        if side.rows.num_tokens < slots.shape[0]:
            raise ValueError(
                f"{name}: expected at least {slots.shape[0]} rows, one a slot, "
                f"got {side.rows.num_tokens}"
            )
    skip = checks.slot_number(skip_slot, "skip_slot")
    alignment = (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15
    flat = [replace(side, cache=side.cache.flattened()) for side in sides]
    if all(side.cache.page_size == 1 for side in flat):
        sides = flat
    return Plan(operation, names, sides, slots, skip, alignment, library)
