"""Write K and V, or the latent and rope parts of MLA, into a cache in one launch."""

from __future__ import annotations

from typing import Any

from .. import devices
from ..arrays import ArrayView
from ..formats import FORMATS
from ..kernels import Kernel, Specialisation
from . import cache_rows, checks, plan
from .cache_rows import ARRAYS, NUM_ROWS, PACK, PARAMS, CacheRowsPlan
from .side import Side, require_rows, sides_of_kv, sides_of_mla
from .store_expressions import report_slots, store_rows

COPY = Kernel("store.cu", "store_copy", PARAMS, "CacheRowsParams")
CONVERT = Kernel("store.cu", "store_convert", PARAMS, "CacheRowsParams")
DYNAMIC = Kernel("store.cu", "store_dynamic", PARAMS, "CacheRowsParams", barriers=True)

_KV = tuple("slot_mapping" if name == "slots" else name for name in ARRAYS)
_MLA = ("latent", "rope_key", "cache", "cache", "slot_mapping", "scale", "scale", "", "")
_OUTPUTS = (2, 3, 7, 8)


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a store can ask for."""
    found = cache_rows.copies(COPY)
    for source in FORMATS.values():
        for target in FORMATS.values():
            for count in (PACK, 1) if source is not target else ():
                found.append(CONVERT.specialise(source.ctype, target.ctype, count))
                if target.quantised:
                    found.append(DYNAMIC.specialise(source.ctype, target.ctype, count))
    return found


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
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

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
    >>> import numpy as np
    >>> k = np.ones((2, 8, 64), np.float16)
    >>> k_cache, v_cache = np.zeros((2, 16, 8, 64), np.float16)
    >>> store_kv(k, 2 * k, k_cache, v_cache, np.array([3, 7]))
    >>> float(k_cache[7, 0, 0]), float(v_cache[3, 0, 0]), float(k_cache[4, 0, 0])
    (1.0, 2.0, 0.0)
    """
    arrays = (
        key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_scale_cache, v_scale_cache,
    )  # fmt: skip
    pointers, made = plan.obtain(
        "store_kv", _KV, arrays, NUM_ROWS, (layout, skip_slot, type(skip_slot)),
        lambda given, alignment: _plan_kv(given, layout, skip_slot, alignment),
    )  # fmt: skip
    made.run(pointers, arrays, stream)


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
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Stream, Capture: as `store_kv`. Source: vLLM `concat_and_cache_mla`.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.zeros((64, 576), np.float16)
    >>> latent, rope = np.ones((1, 512), np.float16), np.full((1, 64), 2, np.float16)
    >>> store_mla(latent, rope, cache, np.array([5]))
    >>> float(cache[5, 511]), float(cache[5, 512])
    (1.0, 2.0)
    """
    arrays = (latent, rope_key, cache, cache, slot_mapping, scale, scale, None, None)
    pointers, made = plan.obtain(
        "store_mla", _MLA, arrays, NUM_ROWS, (skip_slot, type(skip_slot)),
        lambda given, alignment: _plan_mla(given, skip_slot, alignment),
    )  # fmt: skip
    made.run(pointers, arrays, stream)


# --- Plans ----------------------------------------------------------------------------------------


class StorePlan(CacheRowsPlan):
    """A store of K and V, or of the two parts of MLA."""

    def kernel_of(self, one: Side) -> Kernel:
        """Return the kernel that a side takes."""
        if one.rows_format is one.cache_format:
            return COPY
        return CONVERT if one.scale_cache is None else DYNAMIC

    def formats_of(self, one: Side) -> tuple[str, str]:
        """Return the formats of the rows and of the cache, as the kernels name them."""
        return one.rows_format.ctype, one.cache_format.ctype

    def slots(self, views: list[ArrayView | None], output: int) -> ArrayView | None:
        """Return the slots: all that is written is written there."""
        return views[4]

    def express(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Store as array expressions."""
        device, views = self.device, self.views(pointers, arrays)
        slots = views[4]
        assert slots is not None
        num_slots = self.k.cache.num_slots
        report_slots(device, slots, num_slots, self.skip_slot, self.fault_id)
        for i, side in enumerate((self.k, self.v)):
            rows, cache = views[i], views[2 + i]
            assert rows is not None and cache is not None
            store_rows(
                device, side, device.carrier(rows), cache, slots, self.skip_slot, views[5 + i],
                views[7 + i],
            )  # fmt: skip


def _plan_kv(given: dict[str, Any], layout: Any, skip_slot: Any, alignment: int) -> StorePlan:
    checks.require_given(given, _KV[:5])
    checks.require_same_device(given)
    k, v = sides_of_kv(given, layout)
    return _plan("store_kv", _KV, given, k, v, skip_slot, alignment)


def _plan_mla(given: dict[str, Any], skip_slot: Any, alignment: int) -> StorePlan:
    checks.require_given(given, _MLA[:5])
    checks.require_same_device(given)
    latent, rope = sides_of_mla(given)
    offset = latent.rows.width * latent.cache_format.itemsize
    made = _plan("store_mla", _MLA, given, latent, rope, skip_slot, alignment | offset & 15)
    made.offsets = tuple(offset if i == 3 else 0 for i in range(len(_MLA)))
    return made


def _plan(
    operation: str,
    names: tuple[str, ...],
    given: dict[str, Any],
    k: Side,
    v: Side,
    skip_slot: Any,
    alignment: int,
) -> StorePlan:
    slots = given["slot_mapping"]
    checks.indices(slots, "slot_mapping")
    for name, side in zip(names[:2], (k, v), strict=True):
        require_rows(side, name, slots.shape[0])
    skip = checks.slot_number(skip_slot, "skip_slot")
    return StorePlan(
        operation, names, _OUTPUTS, devices.get(slots.device), given[names[0]].library,
        k, v, slots, skip, alignment,
    )  # fmt: skip
