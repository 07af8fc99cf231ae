"""Gather K and V rows out of a cache, and copy whole pages within one."""

from __future__ import annotations

from typing import Any

from .. import devices
from ..arrays import ArrayView, describe, view
from ..formats import FORMATS
from ..kernels import Kernel, Specialisation
from . import cache_rows, checks, expressions, outputs, plan
from .cache_rows import ARRAYS, NUM_ROWS, PACK, PARAMS, CacheRowsPlan
from .side import Side, require_rows, sides_of_kv
from .store_expressions import report_slots, static_scale

COPY = Kernel("gather.cu", "gather_copy", PARAMS, "CacheRowsParams")
CONVERT = Kernel("gather.cu", "gather_convert", PARAMS, "CacheRowsParams")

_NAMES = tuple({"key": "k_out", "value": "v_out"}.get(name, name) for name in ARRAYS)
_OUTPUTS = (0, 1)


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a gather can ask for."""
    return cache_rows.copies(COPY) + [
        CONVERT.specialise(source.ctype, target.ctype, count)
        for source in FORMATS.values()
        for target in FORMATS.values()
        for count in ((PACK, 1) if source is not target else ())
    ]


def gather_kv(
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    *,
    layout: str = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    k_out: Any = None,
    v_out: Any = None,
    dtype: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Read the K and V rows of slots, dequantised where that is wanted, in one launch.

    Parameters
    ----------
    k_cache, v_cache, layout : as in `store_kv`
    slots : int32 or int64 (T,). Negative: that row is left alone. Past the end: likewise, and
        raised by `check_faults`
    k_scale, v_scale, k_scale_cache, v_scale_cache : as in `store_kv`, of a quantised cache
    k_out, v_out : written in place, (T', H, D) and (T', H, Dv), T' >= T, or (T', W) with 2-D
        caches; None: allocated, zero where a slot is skipped
    dtype : format of allocated outputs ("bf16", a NumPy dtype, ...). None: that of the other
        output, else the cache's if it is not quantised, else "bf16"
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Returns
    -------
    (K, V) : the outputs; allocated ones are of the caches' library

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Same format in and out: bits are copied. Else float32 arithmetic, stored * scale, one rounding.
    Stream: one kernel, in order; K and V of different format pairs take one each. Capture: legal
    with both outputs given. Bytes: each row read once and written once.
    Source: vLLM `gather_and_maybe_dequant_cache`.

    Examples
    --------
    >>> import numpy as np
    >>> k_cache, v_cache = np.arange(32, dtype=np.float32).reshape(2, 4, 1, 4)
    >>> k, v = gather_kv(k_cache, v_cache, np.array([2, -1]))
    >>> k[:, 0, 0].tolist(), v[:, 0, 0].tolist()
    ([8.0, 0.0], [24.0, 0.0])
    """
    if k_out is None or v_out is None:
        k_out, v_out = _allocate(k_cache, v_cache, slots, layout, k_out, v_out, dtype, stream)
    arrays = (
        k_out, v_out, k_cache, v_cache, slots, k_scale, v_scale, k_scale_cache, v_scale_cache,
    )  # fmt: skip
    wanted = None if dtype is None else outputs.format_name(dtype)
    pointers, made = plan.obtain(
        "gather_kv", _NAMES, arrays, NUM_ROWS, (layout, wanted),
        lambda given, alignment: _plan(given, layout, wanted, alignment),
    )  # fmt: skip
    made.run(pointers, arrays, stream)
    return k_out, v_out


class GatherPlan(CacheRowsPlan):
    """A gather of K and V."""

    index_name = "slots"

    def kernel_of(self, one: Side) -> Kernel:
        """Return the kernel that a side takes."""
        return COPY if one.rows_format is one.cache_format else CONVERT

    def formats_of(self, one: Side) -> tuple[str, str]:
        """Return the formats of the cache and of the rows, as the kernels name them."""
        return one.cache_format.ctype, one.rows_format.ctype

    def express(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Gather as array expressions."""
        device, views = self.device, self.views(pointers, arrays)
        slots = views[4]
        assert slots is not None
        report_slots(device, slots, self.k.cache.num_slots, self.skip_slot, self.fault_id)
        for i, side in enumerate((self.k, self.v)):
            rows, cache = views[i], views[2 + i]
            assert rows is not None and cache is not None
            numbers = device.carrier(slots)
            valid = (numbers >= 0) & (numbers < side.cache.num_slots)
            chosen = numbers[valid]
            page_size = side.cache.page_size
            bits = device.carrier(cache)[chosen // page_size, chosen % page_size]
            if side.rows_format is not side.cache_format:
                values = expressions.decode(bits, side.cache_format.name)
                if side.cache_format.quantised:
                    scale, scales = views[5 + i], views[7 + i]
                    own = device.carrier(scales)[chosen][..., None] if scales is not None else None
                    values = expressions.multiply(
                        values, static_scale(device, side, values, scale) if own is None else own
                    )
                bits = expressions.encode(values, side.rows_format.name)
            device.carrier(rows)[valid] = bits


def _plan(given: dict[str, Any], layout: Any, wanted: str | None, alignment: int) -> GatherPlan:
    checks.require_given(given, _NAMES[:5])
    checks.require_same_device(given)
    k, v = sides_of_kv(given, layout, ("k_out", "v_out"), into_cache=False)
    slots = given["slots"]
    checks.indices(slots, "slots")
    for name, side in (("k_out", k), ("v_out", v)):
        require_rows(side, name, slots.shape[0])
        if wanted is not None and side.rows_format.name != wanted:
            raise ValueError(
                f"{name}: expected {wanted} as dtype says, got {describe(given[name])}"
            )
    return GatherPlan(
        "gather_kv", _NAMES, _OUTPUTS, devices.get(slots.device), given["k_cache"].library,
        k, v, slots, -1, alignment,
    )  # fmt: skip


def _allocate(
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    layout: Any,
    k_out: Any,
    v_out: Any,
    dtype: Any,
    stream: Any,
) -> tuple[Any, Any]:
    """Allocate the outputs that are not given."""
    checks.layout_name(layout)
    num_tokens = checks.length_of(view(slots, "slots"), "slots")
    made = []
    for name, cache, out, other in (
        ("k", k_cache, k_out, v_out),
        ("v", v_cache, v_out, k_out),
    ):
        cache_view = view(cache, f"{name}_cache")
        if out is not None:
            made.append(out)
            continue
        own_format = checks.number_format(cache_view, f"{name}_cache")
        if dtype is not None:
            wanted = outputs.format_name(dtype)
        elif other is not None:
            wanted = view(other, "k_out" if name == "v" else "v_out").format
        else:
            wanted = "bf16" if own_format.quantised else own_format.name
        shape = _row_shape(cache_view, f"{name}_cache", layout)
        made.append(outputs.zeros(cache_view, (num_tokens, *shape), wanted, stream))
    return made[0], made[1]


def _row_shape(cache: ArrayView, name: str, layout: str) -> tuple[int, ...]:
    if cache.ndim == 2:
        return cache.shape[1:]
    read = checks.cache(cache, name, layout, 3, written=False)
    return read.num_heads, read.width
