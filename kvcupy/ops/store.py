"""Write K and V rows into a cache (store), and read them out of one (gather), in one launch."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np

from .. import devices, faults
from ..arrays import ArrayView, describe, view
from ..formats import CACHE_FORMATS, FORMATS, FOUR_BIT, Encoding, Layout
from ..kernels import Kernel, Specialisation, by_lanes
from ..observe import Access
from . import call, checks, kv_operand
from .call import Operation, Plan, Probed, StepOperation, Views
from .kv_operand import KVArrays, KVOperand
from .launch import Launch, Pointer, fields_of, require_countable, spread, widest
from .spec import Argument, DType

Scale = ArrayView | float | None
"""A static scale of K or V."""

_KEY = Argument("key", "tokens kv_heads head_dim", words=True)
VALUE = Argument("value", "tokens kv_heads v_head_dim", words=True)
CACHES = (
    Argument("k_cache", "pages page_size kv_heads head_dim", cache=True, output=True, words=True),
    Argument("v_cache", "pages page_size kv_heads v_head_dim", cache=True, output=True, words=True),
)
SCALES = (
    Argument("k_scale", "kv_heads", number=True),
    Argument("v_scale", "kv_heads", number=True, in_example=False),
)
SCALE_CACHES = (
    Argument("k_scale_cache", "slots kv_heads", output=True, in_example=False),
    Argument("v_scale_cache", "slots kv_heads", output=True),
)
SLOT_MAPPING = Argument("slot_mapping", "tokens", example=(5, -1, 0))
ROPE_KEY = Argument("rope_key", "tokens rope_dim", words=True)
LATENTS = (
    Argument("latent", "tokens latent_dim", words=True),
    Argument("cache", "pages page_size latent_width", cache=True, output=True, words=True),
    Argument("scale", "one", number=True),
)

_STORE_KV = Operation("store_kv", _KEY, VALUE, *CACHES, *SCALES, *SCALE_CACHES, SLOT_MAPPING)
_STORE_MLA = Operation("store_mla", LATENTS[0], ROPE_KEY, *LATENTS[1:], SLOT_MAPPING)


def only_read(*arguments: Argument) -> tuple[Argument, ...]:
    """Return arguments of another operation for one that only reads them."""
    return tuple([replace(a, output=False) for a in arguments])


def _rows_of_caches(
    arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and format of the rows that a gather allocates."""
    rows: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, cache_name, other in (("k_out", "k_cache", "v_out"), ("v_out", "v_cache", "k_out")):
        if name in arguments:
            continue
        cache, slots = arguments[cache_name], arguments["slots"]
        shape = tuple(cache.shape)
        if len(shape) == 4:
            row = shape[1 if options["layout"] == "HND" else 2], shape[3]
        else:
            row = shape[1:]
        format = CACHE_FORMATS.get(cache.format)
        default = "bf16" if format is None or format.quantised else format.name
        like_other = arguments[other].format if other in arguments else default
        rows[name] = (slots.shape[0], *row), options["dtype"] or like_other
    return rows


_GATHER_KV = Operation(
    "gather_kv",
    Argument(
        "k_out", "tokens kv_heads head_dim", output=True, fresh=True, words=True, returned=True
    ),
    Argument(
        "v_out", "tokens kv_heads v_head_dim", output=True, fresh=True, words=True, returned=True
    ),
    *only_read(*CACHES), replace(SLOT_MAPPING, name="slots"), *SCALES, *only_read(*SCALE_CACHES),
    outputs_of=_rows_of_caches,
)  # fmt: skip


class CacheRowsPointers(TypedDict, total=False):
    """The pointers of CacheRowsParams in kernels_src/cache_rows.cuh."""

    key: Pointer
    value: Pointer
    k_cache: Pointer
    v_cache: Pointer
    slots: Pointer
    k_scale: Pointer
    v_scale: Pointer
    k_scale_cache: Pointer
    v_scale_cache: Pointer
    faults: Pointer


# CacheRowsParams
PARAMS = np.dtype(
    [
        *fields_of(np.uint64, CacheRowsPointers.__annotations__),
        ("k", kv_operand.OPERAND_PARAMS),
        ("v", kv_operand.OPERAND_PARAMS),
        *fields_of(np.int64, "slot_stride_bytes num_slots skip_slot operation"),
        *fields_of(np.int32, "num_rows num_heads page_size page_shift"),
        *fields_of(np.int32, "index_bytes lane_shift zeroed_outputs"),
    ],
    align=True,
)

COPY = Kernel("store.cu", "store_copy", PARAMS, "CacheRowsParams")
CONVERT = Kernel("store.cu", "store_convert", PARAMS, "CacheRowsParams")
DYNAMIC = Kernel("store.cu", "store_dynamic", PARAMS, "CacheRowsParams", barriers=True)
FOUR_BIT_STORE = Kernel(
    "store_four_bit.cu", "store_four_bit", PARAMS, "CacheRowsParams", barriers=True
)
GATHER_COPY = Kernel("gather.cu", "gather_copy", PARAMS, "CacheRowsParams")
GATHER_CONVERT = Kernel("gather.cu", "gather_convert", PARAMS, "CacheRowsParams")
GATHER_FOUR_BIT = by_lanes("gather_four_bit.cu", "gather_four_bit", PARAMS, "CacheRowsParams")

_ZEROED = {"k": 1, "v": 2}  # kZeroedKey and kZeroedValue of kernels_src/cache_rows.cuh

PACK = 8  # elements that a thread converts at a time, where alignment allows
CODES_PER_THREAD = 16  # elements of a four-bit row, kCodesPerThread in kernels_src/four_bit.cuh
WORDS = (16, 8, 4, 2, 1)  # bytes that a thread copies at a time


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a store or a gather can ask for."""
    needed = [*copies(COPY), *copies(GATHER_COPY)]
    for source in FORMATS.values():
        for target in FORMATS.values():
            for count in (PACK, 1) if source is not target else ():
                needed.append(CONVERT.specialise(source.ctype, target.ctype, count))
                if target.quantised:
                    needed.append(DYNAMIC.specialise(source.ctype, target.ctype, count))
                needed.append(GATHER_CONVERT.specialise(source.ctype, target.ctype, count))
    for four_bit in dict.fromkeys(f.ctype for f in FOUR_BIT.values()):
        for rows in FORMATS.values():
            for count in (CODES_PER_THREAD, 1):
                needed.append(FOUR_BIT_STORE.specialise(rows.ctype, four_bit, count))
                needed.append(GATHER_FOUR_BIT[32].specialise(four_bit, rows.ctype, count))
    return needed


def copies(kernel: Kernel) -> list[Specialisation]:
    """Return the specialisations of a kernel that copies words."""
    return [kernel.specialise(word) for word in WORDS]


@_STORE_KV.public
def store_kv(
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    layout: Layout = "NHD",
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
    key : (T', H, D), or (T', W) with 2-D caches; T' >= T; any number format; a four-bit one
        only if the cache has it
    value : (T', H, Dv), or (T', Wv)
    k_cache, v_cache : written in place. (num_slots, H, D), or paged: "NHD" (num_pages, page_size,
        H, D), "HND" (num_pages, H, page_size, D); or (num_slots, W). Same format as the rows: bits
        are copied, and a static scale only describes them. Another format: float32 arithmetic, one
        rounding; a four-bit format scales each group of elements by itself, and its D and Dv are
        whole groups, rotated whole or not at all
    slot_mapping : int32 or int64 (T,); slot = page * page_size + offset. Negative: skipped. Past
        the end: skipped, and raised by `check_faults`
    k_scale, v_scale : dequantisation multipliers for quantised caches: None (1), a number, or
        float32 of one element or (H,)
    k_scale_cache, v_scale_cache : float32 (num_slots, H), written in place; each token and head
        then gets a scale, max(absmax, 1e-6) / limit. Absmax ignores NaN, and an infinity counts as
        the largest float32; rows already in the cache's format get the scale 1. Not for four-bit
        formats
    skip_slot : a sink slot that is never written, and no fault where it is past the end
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    Stream: one kernel, in order; K and V of different format pairs take one each. The arrays are
    kept alive until it has run. Capture: legal. Bytes: each row read once (with dynamic scales a
    long row twice, the second time from cache) and written once.
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
    skip_slot = -1 if skip_slot is None else checks.sink_slot(skip_slot)
    arrays = (
        key, value, k_cache, v_cache, k_scale, v_scale, k_scale_cache, v_scale_cache, slot_mapping
    )  # fmt: skip
    _STORE_KV.run(arrays, (layout, skip_slot), _plan_store_kv, stream)


@_STORE_MLA.public
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
    cache : (num_slots, R + P) or (num_pages, page_size, R + P), written in place; of a four-bit
        format R and P are whole groups
    slot_mapping : int32 or int64 (T,), as in `store_kv`
    scale : of a quantised cache: None (1), a number, or float32 of one element
    skip_slot : a sink slot that is never written, and no fault where it is past the end
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

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
    skip_slot = -1 if skip_slot is None else checks.sink_slot(skip_slot)
    arrays = (latent, rope_key, cache, scale, slot_mapping)
    _STORE_MLA.run(arrays, (skip_slot,), _plan_store_mla, stream)


@_GATHER_KV.public
def gather_kv(
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    *,
    layout: Layout = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    k_out: Any = None,
    v_out: Any = None,
    dtype: DType = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Read the K and V rows of slots, dequantised if the format says so, in one launch.

    Parameters
    ----------
    k_cache, v_cache, layout : as in `store_kv`
    slots : int32 or int64 (T,). Negative: that row is not written. Past the end: not written, and
        raised by `check_faults`
    k_scale, v_scale, k_scale_cache, v_scale_cache : as in `store_kv`, of a quantised cache
    k_out, v_out : written in place, (T', H, D) and (T', H, Dv), T' >= T, or (T', W) with 2-D
        caches; None: allocated, zero where a slot is skipped
    dtype : format of allocated outputs ("bf16", a NumPy dtype, ...). None: as the other
        output, else the cache's if it is not quantised, else "bf16". The four-bit format of the
        cache gives its rows unchanged, rotated or not, as an ArrayView; it takes no other rows
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Returns
    -------
    (K, V) : the outputs; allocated ones are of the caches' library

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    Same format in and out: bits are copied. Else float32 arithmetic, stored * scale, one rounding;
    of a four-bit format code * (group scale * scale), where the scales' product is rounded, too.
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
    encoding = None if dtype is None else Encoding.of(dtype)
    if encoding is not None and encoding.hadamard:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            v = view(cache, name)
            if v.format == encoding.format and not v.rotated_width:
                raise ValueError(f"dtype: expected {v.encoding} like {name}, got {encoding}")
    dtype_name = None if encoding is None else encoding.format
    arrays = (
        k_out, v_out, k_cache, v_cache, slots, k_scale, v_scale, k_scale_cache, v_scale_cache
    )  # fmt: skip
    outputs: tuple[Any, Any] = _GATHER_KV.run(arrays, (layout, dtype_name), _plan_gather_kv, stream)
    return outputs


def step_store(slot_mapping: Any) -> StepOperation:
    """Return `store_kv` into the slots of a step, for rows (key, value)."""
    return StepOperation(_STORE_KV, _plan_store_kv, 2, (slot_mapping,), ("NHD", -1))


def step_store_mla(slot_mapping: Any) -> StepOperation:
    """Return `store_mla` into the slots of a step, for rows (latent, rope_key)."""
    return StepOperation(_STORE_MLA, _plan_store_mla, 2, (slot_mapping,), (-1,))


class LatentArrays(Probed):
    """The latents of a layer, with their scale, as in `store_mla`: probed once for all steps."""

    def __init__(self, cache: Any, scale: Any = None) -> None:
        super().__init__(_STORE_MLA.arguments[2:4], (cache, scale))


# --- Checks ---------------------------------------------------------------------------------------


def _plan_store_kv(
    alignment: int, layout: Any, skip_slot: int, *, key: ArrayView, value: ArrayView,
    k_cache: ArrayView, v_cache: ArrayView, slot_mapping: ArrayView, k_scale: Scale = None,
    v_scale: Scale = None, k_scale_cache: ArrayView | None = None,
    v_scale_cache: ArrayView | None = None,
) -> StorePlan:  # fmt: skip
    k, v = kv_operand.kv_operands(
        KVArrays(key, k_cache, "k_scale", k_scale, k_scale_cache),
        KVArrays(value, v_cache, "v_scale", v_scale, v_scale_cache), layout,
    )  # fmt: skip
    return _store_plan(_STORE_KV, k, v, slot_mapping, skip_slot, alignment)


def _plan_store_mla(
    alignment: int, skip_slot: int, *, latent: ArrayView, rope_key: ArrayView, cache: ArrayView,
    slot_mapping: ArrayView, scale: Scale = None,
) -> StorePlan:  # fmt: skip
    first, second = kv_operand.mla_operands(latent, rope_key, cache, scale)
    alignment |= second.cache_offset_bytes & 15
    return _store_plan(_STORE_MLA, first, second, slot_mapping, skip_slot, alignment)


def _store_plan(
    operation: Operation, k: KVOperand, v: KVOperand, slots: ArrayView, skip_slot: int,
    alignment: int,
) -> StorePlan:  # fmt: skip
    num_slots = checks.indices(slots, "slot_mapping")
    for operand in (k, v):
        kv_operand.require_rows(operand, num_slots)
    return StorePlan(operation, k.arrays.rows.library, k, v, slots, skip_slot, alignment)


def _plan_gather_kv(
    alignment: int, layout: Any, dtype: str | None, *, k_cache: ArrayView, v_cache: ArrayView,
    slots: ArrayView, k_out: ArrayView | None = None, v_out: ArrayView | None = None,
    k_scale: Scale = None, v_scale: Scale = None, k_scale_cache: ArrayView | None = None,
    v_scale_cache: ArrayView | None = None,
) -> GatherPlan:  # fmt: skip
    checks.layout_name(layout)
    num_slots = checks.indices(slots, "slots")
    for out, cache in ((k_out, k_cache), (v_out, v_cache)):
        if out is None:
            checks.number_format(cache, cache.name, four_bit=True)
            if cache.ndim != 2:
                kv_operand.cache(cache, cache.name, layout, 3, written=False)
    outputs = {"k_out": k_out, "v_out": v_out}
    arguments = {"k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    arguments |= {name: out for name, out in outputs.items() if out is not None}
    rows = _rows_of_caches(arguments, {"layout": layout, "dtype": dtype})
    caches = {"k_out": k_cache, "v_out": v_cache}
    allocated = {name: call.to_allocate(caches[name], *rows[name], name) for name in rows}
    k, v = kv_operand.kv_operands(
        KVArrays(k_out or allocated["k_out"], k_cache, "k_scale", k_scale, k_scale_cache),
        KVArrays(v_out or allocated["v_out"], v_cache, "v_scale", v_scale, v_scale_cache),
        layout, into_cache=False,
    )  # fmt: skip
    for operand in (k, v):
        kv_operand.require_rows(operand, num_slots)
        if dtype is not None and operand.rows_format.name != dtype:
            out = operand.arrays.rows
            raise ValueError(f"{out.name}: expected {dtype} as dtype says, got {describe(out)}")
    return GatherPlan(_GATHER_KV, k_cache.library, k, v, slots, -1, alignment, allocated)


# --- Plans ----------------------------------------------------------------------------------------


class _CacheRowsPlan(Plan):
    """Moves K and V rows, or the two parts of MLA, between a cache and arrays of rows.

    The kernels zero the rows of skipped slots in `allocated` outputs.
    """

    def __init__(
        self, operation: Operation, library: str, k: KVOperand, v: KVOperand, slots: ArrayView,
        skip_slot: int, alignment: int, allocated: Views | None = None,
    ) -> None:  # fmt: skip
        super().__init__(operation, devices.get(slots.device), library)
        self.allocated, self.zeroed = allocated or {}, False
        self.k, self.v, self.slots, self.skip_slot = k, v, slots, skip_slot
        self.report(**{slots.name: faults.below(k.cache.num_slots)})
        self.num_tokens = slots.shape[0]
        if self.num_tokens:
            self.load(
                lambda aligned: [self._launch(*each, aligned) for each in self._launched()],
                alignment,
            )

    @abc.abstractmethod
    def kernel_of(self, operand: KVOperand) -> Kernel:
        """Return the kernel for an operand."""

    @abc.abstractmethod
    def formats_of(self, operand: KVOperand) -> tuple[str, str]:
        """Return source and target format of an operand, as the kernels name them."""

    def touched(self, views: Views) -> Views:
        """Return rows by tokens and caches by pages."""
        touched = dict(views)
        for operand in (self.k, self.v):
            name, cache_name = operand.arrays.rows.name, operand.arrays.cache.name
            touched[name] = operand.rows.of(views[name], self.num_tokens)
            if cache_name != "cache":  # of MLA, whose two parts together are all of it
                touched[cache_name] = operand.cache_view(views)
        return touched

    def access(self, name: str, views: Views) -> Access:
        """Return the slots of caches and their scales, and all of other arrays."""
        for operand in (self.k, self.v):
            access = operand.slots_of(name, views[name], views[self.slots.name], self.skip_slot)
            if access is not None:
                return access
        return super().access(name, views)

    def _launched(self) -> list[tuple[KVOperand | None, KVOperand | None]]:
        """Return K and V of each launch: both in one if they take the same kernel."""
        k, v = self.k, self.v
        if k.four_bit or v.four_bit:
            parts = [each.byte_operands() if each.copies else [each] for each in (k, v)]
            if len(parts[0]) == len(parts[1]) > 1:
                return list(zip(*parts, strict=True))
            if len(parts[0]) > 1 or len(parts[1]) > 1:
                return [(part, None) for part in parts[0]] + [(None, part) for part in parts[1]]
            (k,), (v,) = parts
        same_kernel = self.kernel_of(k) is self.kernel_of(v)
        if same_kernel and (k.copies or self.formats_of(k) == self.formats_of(v)):
            return [(k, v)]
        return [(k, None), (None, v)]

    def _launch(self, k: KVOperand | None, v: KVOperand | None, alignment: int) -> Launch:
        device, slots = self.device, self.slots
        operands = {n: operand for n, operand in (("k", k), ("v", v)) if operand is not None}
        first = next(iter(operands.values()))
        kernel, cache = self.kernel_of(first), first.cache
        num_heads = first.rows.num_heads
        widths = {field: operand.rows.width for field, operand in operands.items()}
        if all([operand.heads_join for operand in operands.values()]):
            widths = {field: width * num_heads for field, width in widths.items()}
            num_heads = 1

        steps = [alignment]
        for operand in operands.values():
            steps += map(abs, operand.row_strides + operand.cache_strides)
        if first.four_bit is not None and not first.copies:
            rows = [alignment]
            for operand in operands.values():
                rows += map(abs, operand.row_strides)
            step = CODES_PER_THREAD if widest(rows) == 16 else 1
            specialisation = kernel.specialise(*self.formats_of(first), step)
        elif first.copies:
            widths = {f: n * operands[f].rows_format.itemsize for f, n in widths.items()}
            for operand in operands.values():
                steps += [operand.rows_offset_bytes, operand.cache_offset_bytes]
            step = widest((*widths.values(), *steps))
            specialisation = kernel.specialise(step)
        else:
            word = min(16, PACK * max(first.rows_format.itemsize, first.cache_format.itemsize))
            whole = all([n % PACK == 0 for n in widths.values()])
            step = PACK if whole and widest(steps) >= word else 1
            specialisation = kernel.specialise(*self.formats_of(first), step)

        num_rows = self.num_tokens * num_heads
        require_countable(num_rows, slots.name)
        # HeldRow::kHeld of the kernel with dynamic scales
        packs_per_thread = 2 if kernel is DYNAMIC and first.rows_format.itemsize <= 2 else 1
        elements_per_thread, min_lanes = step * packs_per_thread, 1
        if first.four_bit is not None and not first.copies:
            # Two packs of a thread share what finding its row costs. A group has a thread per pack,
            # and so has what is rotated together.
            elements_per_thread = 2 * CODES_PER_THREAD
            min_lanes = max([operand.shared_elements for operand in operands.values()])
            min_lanes //= CODES_PER_THREAD
        min_lanes = max(min_lanes, -(-max(widths.values()) // elements_per_thread))
        geometry = spread(
            num_rows, min_lanes, device.sm_count,
            warp_lanes=device.warp_lanes, whole_warps=kernel.barriers,
        )  # fmt: skip
        params: dict[str, Any] = {
            # A launch of V alone leaves reporting to K's.
            "operation": -1 if k is None else self.fault_ids[slots.name],
            "skip_slot": self.skip_slot,
            "slot_stride_bytes": slots.strides[0], "index_bytes": slots.itemsize,
            "num_slots": cache.num_slots, "num_rows": num_rows, "num_heads": num_heads,
            "page_size": cache.page_size, "page_shift": cache.page_shift,
            "lane_shift": geometry.lane_shift, "zeroed_outputs": 0,
        }  # fmt: skip
        for field, operand in operands.items():
            params |= operand.params(field, widths[field], alignment)
            if operand.arrays.rows.name in self.allocated:
                params["zeroed_outputs"] |= _ZEROED[field]
        pointers: CacheRowsPointers = {"slots": slots}
        if k is not None:
            pointers["key"] = k.rows_pointer
            pointers["k_cache"] = k.cache_pointer
            pointers["k_scale"] = k.scale.array
            pointers["k_scale_cache"] = k.arrays.scale_cache
        if v is not None:
            pointers["value"] = v.rows_pointer
            pointers["v_cache"] = v.cache_pointer
            pointers["v_scale"] = v.scale.array
            pointers["v_scale_cache"] = v.arrays.scale_cache
        smem_bytes = geometry.block[0] // 32 * 4 if kernel is DYNAMIC else 0
        return Launch(
            device, specialisation, geometry.grid, geometry.block, smem_bytes, params, pointers,
            self.operation.names,
        )  # fmt: skip


class StorePlan(_CacheRowsPlan):
    """A store of K and V, or of the two parts of MLA."""

    def kernel_of(self, operand: KVOperand) -> Kernel:
        if operand.copies:
            return COPY
        if operand.four_bit is not None:
            return FOUR_BIT_STORE
        return CONVERT if operand.arrays.scale_cache is None else DYNAMIC

    def formats_of(self, operand: KVOperand) -> tuple[str, str]:
        return operand.rows_format.ctype, operand.cache_format.ctype


class GatherPlan(_CacheRowsPlan):
    """A gather of K and V."""

    def kernel_of(self, operand: KVOperand) -> Kernel:
        if operand.copies:
            return GATHER_COPY
        if operand.four_bit is None:
            return GATHER_CONVERT
        return GATHER_FOUR_BIT[self.device.warp_lanes]

    def formats_of(self, operand: KVOperand) -> tuple[str, str]:
        return operand.cache_format.ctype, operand.rows_format.ctype
