"""Conformance cases: what each operation must compute, for any implementation of it.

A case draws its arguments from a seed, between canaries and beside mirrors, and compares what an
implementation left with the float64 reference. Shapes are small, and chosen to show mistakes:
scattered slots, the last page, K narrower than V, values halfway between two of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from .. import reference
from ..arrays import ArrayView, view_as
from ..cache.pool import KVPool
from ..formats import CACHE_FORMATS, FOUR_BIT, ScaleRule
from ..kernels import Specialisation
from ..ops import spec
from .arrays import (
    POISON_SLOT,
    Argument,
    Arguments,
    Array,
    from_values,
    rounding_boundaries,
)
from .tolerances import attention_errors, merge_errors, rotation_errors, ulp

HEADS, PAGES, PAGE_SIZE = 2, 5, 4
SLOTS = PAGES * PAGE_SIZE


@dataclass(frozen=True)
class Call:
    """Arguments of one call by the names of kvcupy's parameters, and how to compare what it leaves.

    `compare` brings the mirrors to what the reference says, notes what is further off than its
    tolerance, and returns whether an index was past the end. All other bytes are compared
    afterwards.
    """

    arguments: dict[str, Any]  # `Argument`, a tuple of them, or a plain value
    compare: Callable[[], bool]


@dataclass(frozen=True)
class Case:
    """One thing that an operation must do; `build` draws the arguments."""

    operation: str
    name: str
    build: Callable[..., Call]


def cases(operations: Iterable[str] | None = None) -> list[Case]:
    """Return the conformance cases of some operations; None: of all.

    Examples
    --------
    >>> [case.name for case in cases(["copy_pages"])]
    ['pages', 'no pages', 'K and V', 'padding', 'past the end', 'views']
    """
    chosen = OPERATIONS if operations is None else tuple(operations)
    for name in chosen:
        if name not in OPERATIONS:
            raise ValueError(f"operations: expected some of {', '.join(OPERATIONS)}, got {name!r}")
    # Of each operation from above: decorators apply from below.
    return [
        case
        for operation in OPERATIONS if operation in chosen
        for case in reversed(_CASES) if case.operation == operation
    ]  # fmt: skip


def own_cases() -> list[Case]:
    """Return further cases, of what kvcupy alone has: `kvcupy.verify` runs them."""
    return _OWN_CASES[::-1]


_CASES: list[Case] = []
_OWN_CASES: list[Case] = []


def _case(
    operation: str, name: str, *, own: bool = False, **options: Any
) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Add a case which calls the decorated builder with `options`; `own`: to `own_cases`."""

    def add(build: Callable[..., Call]) -> Callable[..., Call]:
        (_OWN_CASES if own else _CASES).append(Case(operation, name, partial(build, **options)))
        return build

    return add


def _changed(operation: str, **options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults: an implementation may lack the others."""
    parameters = spec.OPERATIONS[operation].parameters
    return {name: value for name, value in options.items() if value != parameters[name].default}


def _mirrors(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same arguments for the reference."""

    def mirror(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(mirror, value))
        return value.view if isinstance(value, Argument) else value

    return {name: mirror(value) for name, value in arguments.items()}


def _copied(call: dict[str, Any], operation: str, **formats: str) -> Call:
    """Return a call of which all is compared bit for bit.

    `formats` are those that outputs are written from: where that is another, a NaN is any NaN.
    """
    for name, fmt in formats.items():
        call[name].buffer.exact = call[name].fmt == fmt

    def compare() -> bool:
        faults = getattr(reference, operation)(**_mirrors(call))
        return bool(any(faults) if isinstance(faults, tuple) else faults)

    return Call(call, compare)


# store_kv, store_mla, gather_kv ---------------------------------------------------------------


def _caches(
    case: Arguments, fmt: str, widths: tuple[int, int], layout: str = "NHD", *, gaps: bool = False
) -> tuple[Argument, Argument]:
    """Return two caches, paged; with gaps between the pages of each."""
    pages, rows = (3 * PAGES, PAGE_SIZE + 1) if gaps else (PAGES, PAGE_SIZE)
    k_cache, v_cache = (
        case.output(
            fmt,
            (pages, rows, HEADS, width) if layout == "NHD" else (pages, HEADS, rows, width),
            (lambda a: a[PAGES : 2 * PAGES, :PAGE_SIZE]) if gaps else None,
            name=name,
        )
        for name, width in zip(("k_cache", "v_cache"), widths, strict=True)
    )
    return k_cache, v_cache


def _slots(case: Arguments, kind: str = "") -> list[int]:
    """Return the slots of a case: the first and the last among them, each once."""
    slots = [SLOTS - 1, 0, *case.rng.permutation(np.arange(1, SLOTS - 1))[:9].tolist()]
    if kind == "padding":
        slots[2], slots[5] = -1, -PAGE_SIZE
    if kind == "past the end":
        slots[2], slots[5], slots[7] = SLOTS, SLOTS + 1, POISON_SLOT
    return slots


def _near_boundaries(fmt: str, scale: float, shape: tuple[int, ...]) -> Array:
    """Return float32 values that lie halfway between two stored ones, or next to that."""
    with np.errstate(over="ignore"):
        values = rounding_boundaries(fmt) * np.float32(scale)
    values = values[np.random.default_rng(0).permutation(values.size)]
    return np.resize(values, shape).astype(np.float32)


def _scales(case: Arguments, kind: str) -> dict[str, Any]:
    if kind == "static":
        return {"k_scale": 0.37, "v_scale": 1.9}
    if kind == "per head":
        scales = (np.array([0.37, 1.9], np.float32), np.array([0.013, 0.7], np.float32))
        return {
            f"{side}_scale": case.place(values, "fp32", name=f"{side}_scale")
            for side, values in zip("kv", scales, strict=True)
        }
    if kind == "dynamic":
        return {
            f"{side}_scale_cache": case.place(
                case.rng.uniform(0.1, 9, (SLOTS, HEADS)).astype(np.float32), "fp32",
                name=f"{side}_scale_cache",
            )
            for side in "kv"
        }  # fmt: skip
    return {}


@_case("store_kv", "bf16")
@_case("store_kv", "K and V of one width", widths=(16, 16))
@_case("store_kv", "fp16", fmt="fp16")
@_case("store_kv", "int32 slots", index="int32")
@_case("store_kv", "HND pages", layout="HND")
@_case("store_kv", "more rows than slots", spare=3)
@_case("store_kv", "no tokens", tokens=0)
@_case("store_kv", "padding", kind="padding")
@_case("store_kv", "past the end", kind="past the end")
@_case("store_kv", "a sink slot", skip=0)
@_case("store_kv", "views", views=True)
@_case("store_kv", "fp32 to bf16", fmt="fp32", cache_fmt="bf16")
@_case("store_kv", "fp32 to fp8_e4m3, scales", fmt="fp32", cache_fmt="fp8_e4m3", scales="static")
@_case("store_kv", "fp32 to int8, scales by head", fmt="fp32", cache_fmt="int8", scales="per head")
@_case("store_kv", "bf16 to fp8_e4m3, scales by row", cache_fmt="fp8_e4m3", scales="dynamic")
@_case("store_kv", "wide rows, scales by row", fmt="fp32", cache_fmt="int8", scales="dynamic",
       widths=(1024, 3000))  # fmt: skip
@_case("store_kv", "nvfp4, rotated", own=True, fmt="fp32", cache_fmt="nvfp4", widths=(48, 512),
       rotated=True, scales="static")  # fmt: skip
@_case("store_kv", "nvfp4, four over six", own=True, cache_fmt="nvfp4", widths=(128, 384),
       rule="four_over_six", scales="static")  # fmt: skip
@_case("store_kv", "narrow int4", own=True, fmt="fp32", cache_fmt="int4", widths=(32, 96),
       scales="static")  # fmt: skip
def _store_kv(
    case: Arguments, *, fmt: str = "bf16", cache_fmt: str = "", widths: tuple[int, int] = (16, 40),
    layout: str = "NHD", index: str = "int64", kind: str = "", spare: int = 0,
    tokens: int | None = None, skip: int | None = None, views: bool = False, scales: str = "",
    rotated: bool = False, rule: ScaleRule | None = None,
) -> Call:  # fmt: skip
    slots = _slots(case, kind)[:tokens]
    rows, cache_fmt = len(slots) + spare, cache_fmt or fmt
    options = _scales(case, scales)
    # Where blocks of a row are rotated, numbers of any size, too: their sums have to be bounded.
    draw = case.rows if (scales or fmt != cache_fmt) and not rotated else case.input
    if fmt == "fp32" != cache_fmt and cache_fmt not in FOUR_BIT and scales != "dynamic":
        factors = [1.0, 1.0]
        if scales == "static":
            factors = [options["k_scale"], options["v_scale"]]
        elif scales:
            factors = [float(options[f"{side}_scale"].view[0]) for side in "kv"]
        key, value = (
            case.place(_near_boundaries(cache_fmt, factor, (rows, HEADS, width)), fmt, name=name)
            for name, factor, width in zip(("key", "value"), factors, widths, strict=True)
        )
    elif views:  # of one packed array, as a projection leaves it
        packed = draw(fmt, (rows, 3 * HEADS, max(widths)), name="key and value")
        key = packed.sub(lambda a: a[:, HEADS : 2 * HEADS, : widths[0]])
        value = packed.sub(lambda a: a[:, 2 * HEADS :, : widths[1]])
    else:
        key = draw(fmt, (rows, HEADS, widths[0]), name="key")
        value = draw(fmt, (rows, HEADS, widths[1]), name="value")
    k_cache, v_cache = _caches(case, cache_fmt, widths, layout, gaps=views)
    if rotated:
        k_cache, v_cache = k_cache.rotated(), v_cache.rotated()
    if rule:
        k_cache, v_cache = k_cache.ruled(rule), v_cache.ruled(rule)
    return _copied(
        {
            "key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache,
            "slot_mapping": case.slots(slots, index, step=2 if views else 1), **options,
            **_changed("store_kv", layout=layout, skip_slot=skip),
        },
        "store_kv", k_cache=fmt, v_cache=fmt,
    )  # fmt: skip


@_case("store_mla", "bf16")
@_case("store_mla", "slots, not pages", paged=False)
@_case("store_mla", "padding", kind="padding")
@_case("store_mla", "past the end", kind="past the end")
@_case("store_mla", "bf16 to fp8_e4m3, a scale", cache_fmt="fp8_e4m3", scale=0.3)
def _store_mla(
    case: Arguments, *, cache_fmt: str = "bf16", paged: bool = True, kind: str = "",
    scale: float | None = None,
) -> Call:  # fmt: skip
    slots = _slots(case, kind)
    latent = case.input("bf16", (len(slots), 64), name="latent")
    rope_key = case.input("bf16", (len(slots), 16), name="rope_key")
    shape = (PAGES, PAGE_SIZE, 80) if paged else (SLOTS, 80)
    return _copied(
        {
            "latent": latent, "rope_key": rope_key,
            "cache": case.output(cache_fmt, shape, name="cache"),
            "slot_mapping": case.slots(slots), **_changed("store_mla", scale=scale),
        },
        "store_mla", cache="bf16",
    )  # fmt: skip


@_case("gather_kv", "bf16")
@_case("gather_kv", "HND pages", layout="HND")
@_case("gather_kv", "padding", kind="padding")
@_case("gather_kv", "past the end", kind="past the end")
@_case("gather_kv", "views", views=True)
@_case("gather_kv", "fp8_e4m3 to bf16, scales", cache_fmt="fp8_e4m3", scales="static")
@_case("gather_kv", "int8 to bf16, scales by head", cache_fmt="int8", scales="per head")
@_case("gather_kv", "int8 to bf16, scales by row", cache_fmt="int8", scales="dynamic")
@_case("gather_kv", "fp8_e5m2 to fp32", cache_fmt="fp8_e5m2", fmt="fp32", widths=(16, 48))
@_case("gather_kv", "fp8_e5m2 to fp32, odd widths", cache_fmt="fp8_e5m2", fmt="fp32",
       widths=(5, 7))  # fmt: skip
@_case("gather_kv", "nvfp4, rotated", own=True, fmt="fp32", cache_fmt="nvfp4", widths=(48, 512),
       rotated=True, scales="static")  # fmt: skip
@_case("gather_kv", "narrow int4", own=True, cache_fmt="int4", widths=(32, 96), scales="static")
def _gather_kv(
    case: Arguments, *, cache_fmt: str = "bf16", fmt: str = "bf16",
    widths: tuple[int, int] = (16, 40), layout: str = "NHD", kind: str = "", views: bool = False,
    scales: str = "", rotated: bool = False,
) -> Call:  # fmt: skip
    slots = _slots(case, kind)
    k_cache, v_cache = _caches(case, cache_fmt, widths, layout, gaps=views)
    if rotated:
        k_cache, v_cache = k_cache.rotated(), v_cache.rotated()
    k_out, v_out = (
        case.output(fmt, (len(slots), HEADS, width), name=name)
        for name, width in zip(("k_out", "v_out"), widths, strict=True)
    )
    return _copied(
        {
            "k_cache": k_cache, "v_cache": v_cache, "slots": case.slots(slots, name="slots"),
            "k_out": k_out, "v_out": v_out, **_scales(case, scales),
            **_changed("gather_kv", layout=layout),
        },
        "gather_kv", k_out=cache_fmt, v_out=cache_fmt,
    )  # fmt: skip


# apply_rope, rope_store_kv --------------------------------------------------------------------

MAX_POSITIONS = 64


def _positions(case: Arguments, kind: str, count: int, *, axes: int = 1) -> tuple[Argument, Array]:
    """Return the positions, first and last of the table among them, and the tokens inside."""
    values = np.array([0, MAX_POSITIONS - 1, *case.rng.integers(0, MAX_POSITIONS, count - 2)])
    if kind == "past the end":
        values[3], values[4] = MAX_POSITIONS, -1
    inside = np.flatnonzero((values >= 0) & (values < MAX_POSITIONS))
    if axes > 1:
        values = np.stack([np.roll(values, i) for i in range(axes)])
    return case.slots(values, name="positions"), inside


def _table(case: Arguments, rotary_dim: int, positions: Argument) -> Argument:
    """Return a rope table that is NaN wherever no position looks."""
    content = np.full((MAX_POSITIONS, rotary_dim), np.nan, np.float32)
    used = np.unique(positions.view)
    used = used[(used >= 0) & (used < MAX_POSITIONS)]
    content[used] = reference.rope_table(MAX_POSITIONS, rotary_dim)[used]
    return case.place(content, "fp32", name="rope_table")


def _compare_rotated(
    name: str, before: Array, target: Argument, table: Argument, positions: Argument,
    tokens: Array, interleaved: bool, norm: Argument | None = None, **sections: Any,
) -> None:  # fmt: skip
    """Compare rotated rows with float64, and let the mirror of `target` hold them."""
    fmt, width = target.fmt, table.view.shape[1]
    rows = before[tokens]
    cosine, sine = reference.cos_sin(table.view, positions.view[..., tokens], **sections)
    weights = None if norm is None else norm.view
    exact = reference.rotate(rows, cosine, sine, norm=weights, interleaved=interleaved)
    allowed = rotation_errors(exact, rows, cosine, sine, fmt, norm=weights, interleaved=interleaved)
    got = np.ascontiguousarray(target.live()[tokens])
    if norm is not None:  # what is not rotated, too
        width = rows.shape[-1]
    target.buffer.case.note_unless_near(
        name, reference.decode(got, fmt)[..., :width], exact[..., :width], allowed[..., :width]
    )
    # Elements that are not rotated keep their bits.
    stored = rows.copy()
    stored[..., :width] = got[..., :width]
    reference.bits_of(target.view, fmt)[tokens] = reference.bits_of(stored, fmt)


def _norms(case: Arguments, fmt: str, width: int) -> dict[str, Argument]:
    """Return weights of RMSNorm for query and key."""
    return {
        name: case.place(from_values(case.rng.uniform(0.5, 1.5, width), fmt), fmt, name=name)
        for name in ("query_norm", "key_norm")
    }


@_case("apply_rope", "bf16")
@_case("apply_rope", "fp16, interleaved", fmt="fp16", interleaved=True)
@_case("apply_rope", "fp32", fmt="fp32")
@_case("apply_rope", "a part of each head", rotary_dim=16)
@_case("apply_rope", "to outputs", outputs=True)
@_case("apply_rope", "past the end", kind="past the end")
@_case("apply_rope", "norms", norm="fp32")
@_case("apply_rope", "norms, a part of each head, interleaved", norm="bf16", rotary_dim=16,
       interleaved=True)  # fmt: skip
@_case("apply_rope", "sections", sections=(7, 5, 4))
@_case("apply_rope", "alternating sections", sections=(6, 5, 5), alternating=True)
@_case("apply_rope", "norms and sections, fp32", fmt="fp32", norm="fp32", sections=(7, 5, 4))
def _apply_rope(
    case: Arguments, *, fmt: str = "bf16", rotary_dim: int = 32, interleaved: bool = False,
    outputs: bool = False, kind: str = "", norm: str = "",
    sections: tuple[int, int, int] | None = None, alternating: bool = False,
) -> Call:  # fmt: skip
    count = 11
    positions, tokens = _positions(case, kind, count, axes=1 if sections is None else 3)
    by_section = _changed("apply_rope", sections=sections, sections_interleaved=alternating)
    table = _table(case, rotary_dim, positions)
    query = case.rows(fmt, (count, 3 * HEADS, 32), name="query")
    key = case.rows(fmt, (count, HEADS, 32), name="key")
    arguments: dict[str, Any] = {
        "query": query, "key": key, "rope_table": table, "positions": positions, **by_section,
        **_changed("apply_rope", interleaved=interleaved),
    }  # fmt: skip
    norms = _norms(case, norm, 32) if norm else {}
    arguments |= norms
    targets = {"query": query, "key": key}
    if outputs:
        for name, rows in tuple(targets.items()):
            targets[name] = case.output(fmt, rows.view.shape, name=f"{name}_out")
            arguments[f"{name}_out"] = targets[name]

    def compare() -> bool:
        for name, rows in (("query", query), ("key", key)):
            _compare_rotated(
                targets[name].buffer.name, rows.view.copy(), targets[name], table, positions,
                tokens, interleaved, norms.get(f"{name}_norm"), **by_section,
            )  # fmt: skip
        return len(tokens) < count

    return Call(arguments, compare)


@_case("rope_store_kv", "bf16")
@_case("rope_store_kv", "fp16, interleaved", fmt="fp16", interleaved=True)
@_case("rope_store_kv", "a part of each head", rotary_dim=16)
@_case("rope_store_kv", "padding", kind="padding")
@_case("rope_store_kv", "past the end", kind="past the end")
@_case("rope_store_kv", "bf16 to fp8_e4m3, scales", cache_fmt="fp8_e4m3", scales="static")
@_case("rope_store_kv", "bf16 to int8, scales by row", cache_fmt="int8", scales="dynamic")
@_case("rope_store_kv", "norms, bf16 to nvfp4", own=True, cache_fmt="nvfp4", width=128, norm=True,
       scales="static")  # fmt: skip
def _rope_store_kv(
    case: Arguments, *, fmt: str = "bf16", cache_fmt: str = "", width: int = 32,
    rotary_dim: int | None = None, interleaved: bool = False, norm: bool = False, kind: str = "",
    scales: str = "",
) -> Call:  # fmt: skip
    slots = case.slots(_slots(case, kind))
    count = len(slots.view)
    positions, _ = _positions(case, "", count)
    tokens = np.arange(count)
    table = _table(case, rotary_dim or width, positions)
    query = case.rows(fmt, (count, 3 * HEADS, width), name="query")
    key = case.rows(fmt, (count, HEADS, width), name="key")
    value = case.rows(fmt, (count, HEADS, width), name="value")
    k_cache, v_cache = _caches(case, cache_fmt or fmt, (width, width))
    options = _scales(case, scales)
    arguments: dict[str, Any] = {
        "query": query, "key": key, "value": value, "rope_table": table, "positions": positions,
        "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots, **options,
        **_changed("rope_store_kv", interleaved=interleaved),
    }  # fmt: skip
    norms = _norms(case, fmt, width) if norm else {}
    arguments |= norms

    def compare() -> bool:
        for name, rows in (("query", query), ("key", key)):
            _compare_rotated(
                name, rows.view.copy(), rows, table, positions, tokens, interleaved,
                norms.get(f"{name}_norm"),
            )  # fmt: skip
        # The cache holds, bit for bit, the store of the rotated key that was left in `key`.
        names = ("key", "value", "k_cache", "v_cache", "slot_mapping", *options)
        faults = reference.store_kv(**_mirrors({name: arguments[name] for name in names}))
        return bool(faults)

    return Call(arguments, compare)


# paged_attention, merge_states ----------------------------------------------------------------


def _pages_of(
    case: Arguments, seq_lens: list[int], page_size: int, *, poison: bool, columns: int = 0
) -> tuple[Argument, Array]:
    """Return a block table of scattered pages, and which slots are in use."""
    counts = [-(-length // page_size) for length in seq_lens]
    pages = case.rng.permutation(sum(counts) + 2)
    columns = max(columns, max(counts) + 2 * poison)
    table = np.full((len(counts), columns), POISON_SLOT if poison else 0, np.int32)
    used = np.zeros((len(pages), page_size), bool)
    start = 0
    for row, length, count in zip(table, seq_lens, counts, strict=True):
        row[:count] = pages[start : start + count]
        tokens = np.arange(length)
        used[row[tokens // page_size], tokens % page_size] = True
        start += count
    return case.place(table, "int32", name="block_table"), used


# Between which each byte of a group's scale is drawn, for scales of around a half.
_SCALE_BYTES = {
    "fp8_e4m3": [(0x2C, 0x34)], "e8m0": [(124, 127)], "fp16": [(0, 256), (0x34, 0x38)],
}  # fmt: skip


def _usual_groups(case: Arguments, fmt: str, shape: tuple[int, ...]) -> Array:
    """Return the bytes of rows of a four-bit format, with any codes and usual scales."""
    rows = case.four_bit_rows(fmt, shape)
    scales = rows[..., shape[-1] // 2 :]
    ranges = _SCALE_BYTES[FOUR_BIT[fmt].scale_format]
    for i, (low, high) in enumerate(ranges):
        part = scales[..., i :: len(ranges)]
        part[...] = case.rng.integers(low, high, part.shape)
    return rows


def _cache_of(
    case: Arguments, fmt: str, used: Array, heads: int, width: int, name: str, *, layout: str,
    poison: bool, gaps: bool,
) -> Argument:  # fmt: skip
    """Return a cache with a token in each used slot, and NaN in all others if they are poison.

    With gaps a row that belongs to no slot follows each page.
    """
    page_size = used.shape[1]
    used = np.pad(used, ((0, 0), (0, int(gaps))))
    if fmt in FOUR_BIT:
        pages = _usual_groups(case, fmt, (*used.shape, heads, width))
        if poison:
            pages[~used] = 0xFF
    else:
        pages = from_values(case.rng.standard_normal((*used.shape, heads, width)), fmt)
        if poison and fmt != "int8":
            pages[~used] = from_values(np.nan, fmt)
    if layout == "HND":
        return case.place(pages.swapaxes(1, 2), fmt, lambda a: a[:, :, :page_size], name=name)
    return case.place(pages, fmt, lambda a: a[:, :page_size], name=name)


@_case("paged_attention", "decode, sequences of one length", seq_lens=(32, 32, 32))
@_case("paged_attention", "decode", seq_lens=(1, 37, 16, 5))
@_case("paged_attention", "decode, fp32", seq_lens=(9, 20), fmt="fp32")
@_case("paged_attention", "decode, HND pages", seq_lens=(9, 20), layout="HND")
@_case("paged_attention", "decode, poisoned tails", seq_lens=(1, 37, 16, 5), poison=True)
@_case("paged_attention", "decode, lse", seq_lens=(1, 37, 16, 5), lse=True)
@_case("paged_attention", "decode, an empty sequence", seq_lens=(7, 0, 18), lse=True)
@_case("paged_attention", "decode, fp8_e4m3 cache", seq_lens=(9, 20),
       cache_fmt="fp8_e4m3", options={"k_scale": 0.7, "v_scale": 1.3})  # fmt: skip
@_case("paged_attention", "decode, window", seq_lens=(3, 37, 16), options={"window": 8})
@_case("paged_attention", "decode, window and first keys", seq_lens=(3, 37, 16),
       options={"window": 8, "sink_tokens": 2})  # fmt: skip
@_case("paged_attention", "decode, learned sinks", seq_lens=(3, 37, 16), sinks=True)
@_case("paged_attention", "decode, soft cap and scale", seq_lens=(3, 37, 16),
       options={"logits_soft_cap": 2.0, "sm_scale": 0.4})  # fmt: skip
@_case("paged_attention", "prefill", seq_lens=(19, 6), new=(19, 6))
@_case("paged_attention", "prefill behind a prefix", seq_lens=(32, 32), new=(16, 16))
@_case("paged_attention", "prefill of ragged chunks", seq_lens=(37, 20, 9),
       new=(5, 1, 9), poison=True, lse=True)  # fmt: skip
@_case("paged_attention", "prefill, not causal", seq_lens=(19, 6), new=(7, 6),
       options={"causal": False})  # fmt: skip
@_case("paged_attention", "prefill, int8 cache", seq_lens=(37, 20), new=(19, 20),
       cache_fmt="int8", options={"k_scale": 0.03, "v_scale": 0.05})  # fmt: skip
@_case("paged_attention", "a tree of drafted tokens", seq_lens=(19, 12), new=(6, 4), tree=True)
@_case("paged_attention", "MLA decode", seq_lens=(1, 37, 16), mla=True,
       heads=(1, 16), widths=(80, 64))  # fmt: skip
@_case("paged_attention", "decode, batch-invariant", seq_lens=(300, 37),
       options={"batch_invariant": True})  # fmt: skip
@_case("paged_attention", "decode, fp8_e4m3 cache, scales by row", seq_lens=(150, 37),
       cache_fmt="fp8_e4m3", scales=True)  # fmt: skip
@_case("paged_attention", "prefill, fp8_e4m3 cache, scales by row", seq_lens=(150, 37),
       new=(70, 37), cache_fmt="fp8_e4m3", widths=(128, 128), scales=True)  # fmt: skip
@_case("paged_attention", "prefill, fp8_e4m3 cache", seq_lens=(150, 37), new=(70, 37),
       cache_fmt="fp8_e4m3", widths=(128, 128),
       options={"k_scale": 0.7, "v_scale": 1.3})  # fmt: skip
@_case("paged_attention", "prefill, soft cap", seq_lens=(90, 37), new=(70, 37),
       options={"logits_soft_cap": 2.0})  # fmt: skip
@_case("paged_attention", "MLA decode, fp8_e4m3 cache, scales by row", seq_lens=(130, 37),
       mla=True, heads=(1, 16), widths=(576, 512), cache_fmt="fp8_e4m3", scales=True)  # fmt: skip
@_case("paged_attention", "decode, fp32, int8 cache", seq_lens=(9, 20), fmt="fp32",
       cache_fmt="int8", options={"k_scale": 0.03, "v_scale": 0.05})  # fmt: skip
@_case("paged_attention", "past the end", seq_lens=(32, 20), longer=8)
@_case("paged_attention", "prefill, not causal, more new tokens than keys", seq_lens=(3, 19, 2),
       new=(5, 19, 6), options={"causal": False})  # fmt: skip
@_case("paged_attention", "decode of several tokens", seq_lens=(64, 96), new=(2, 3))
@_case("paged_attention", "prefill, fp8_e4m3 cache, soft cap", seq_lens=(90, 37), new=(70, 37),
       cache_fmt="fp8_e4m3", widths=(128, 128),
       options={"k_scale": 0.7, "v_scale": 1.3, "logits_soft_cap": 2.0})  # fmt: skip
@_case("paged_attention", "prefill, logits that rise", seq_lens=(300,), new=(40,), rising=True,
       widths=(128, 128))  # fmt: skip
@_case("paged_attention", "decode, many sequences", seq_lens=(300, *[3] * 38, 600))
@_case("paged_attention", "batch-invariant, a prefix in two sequences", own=True,
       seq_lens=(75, 75), new=(1, 8), twins=True, lse=True,
       options={"batch_invariant": True, "window": 21, "sink_tokens": 5})  # fmt: skip
@_case("paged_attention", "a tree of drafted tokens, window", own=True, seq_lens=(19, 12),
       new=(6, 4), tree=True, depths=True, options={"window": 6, "sink_tokens": 2})  # fmt: skip
@_case("paged_attention", "decode, int4 cache, large scales", own=True, cache_fmt="int4",
       seq_lens=(150, 20), widths=(128, 128), loud=True)  # fmt: skip
@_case("paged_attention", "MLA decode of many heads, large queries", own=True, heads=(1, 40),
       seq_lens=(130, 37), mla=True, widths=(576, 512), cache_fmt="fp8_e4m3", loud=True,
       options={"k_scale": 0.7, "v_scale": 1.3, "sm_scale": 3e-6})  # fmt: skip
@_case("paged_attention", "an evicted span, keys that are hidden", own=True, fmt="fp16",
       seq_lens=(90, 21, 40), evicted=((30, 16), (5, 3), (7, 0)), key_starts=(0, 4, 9))  # fmt: skip
@_case("paged_attention", "rotated keys, fp32", own=True, fmt="fp32", seq_lens=(9, 20),
       rotates=True, widths=(40, 24), rotary=(8, 32))  # fmt: skip
@_case("paged_attention", "rotated keys, interleaved, fp32", own=True, fmt="fp32",
       seq_lens=(9, 20), rotates=True, widths=(41, 24), rotary=(3, 32),
       interleaved=True)  # fmt: skip
@_case("paged_attention", "rotated keys, fp32, int8 cache", own=True, fmt="fp32", cache_fmt="int8",
       seq_lens=(9, 20), rotates=True, options={"k_scale": 0.03, "v_scale": 0.05})  # fmt: skip
@_case("paged_attention", "rotated keys, interleaved, fp32, int8 cache", own=True, fmt="fp32",
       cache_fmt="int8", seq_lens=(9, 20), rotates=True, interleaved=True,
       options={"k_scale": 0.03, "v_scale": 0.05})  # fmt: skip
@_case("paged_attention", "rotated keys, fp32, int4 cache", own=True, fmt="fp32", cache_fmt="int4",
       seq_lens=(9, 20), rotates=True, widths=(128, 128), rotary=(64, 64))  # fmt: skip
@_case("paged_attention", "rotated keys, fp8_e4m3 cache", own=True, cache_fmt="fp8_e4m3",
       seq_lens=(150, 20), rotates=True)  # fmt: skip
@_case("paged_attention", "rotated keys, interleaved, fp8_e4m3 cache", own=True,
       cache_fmt="fp8_e4m3", seq_lens=(150, 20), rotates=True, interleaved=True)  # fmt: skip
@_case("paged_attention", "rotated keys, nvfp4 cache", own=True, cache_fmt="nvfp4",
       seq_lens=(150, 20), rotates=True, widths=(128, 128), rotary=(64, 64))  # fmt: skip
@_case("paged_attention", "rotated keys, int4 cache", own=True, cache_fmt="int4",
       seq_lens=(150, 20), rotates=True, widths=(128, 128), rotary=(64, 64))  # fmt: skip
@_case("paged_attention", "rotated keys, prefill", own=True, seq_lens=(90, 20), new=(70, 20),
       rotates=True)  # fmt: skip
@_case("paged_attention", "rotated keys, interleaved, prefill", own=True, seq_lens=(90, 20),
       new=(70, 20), rotates=True, interleaved=True)  # fmt: skip
@_case("paged_attention", "nvfp4, stored rotated", own=True, cache_fmt="nvfp4", seq_lens=(150, 20),
       widths=(192, 128), stored_rotated=True)  # fmt: skip
@_case("paged_attention", "fp32, nvfp4, stored rotated", own=True, fmt="fp32", cache_fmt="nvfp4",
       seq_lens=(40, 20), widths=(96, 128), stored_rotated=True)  # fmt: skip
@_case("paged_attention", "nvfp4, codes and scales of keys apart", own=True, cache_fmt="nvfp4",
       seq_lens=(150, 20), widths=(128, 128), apart=True)  # fmt: skip
@_case("paged_attention", "mxfp4, exponents that rise", own=True, cache_fmt="mxfp4",
       seq_lens=(200,), widths=(128, 128), rising=True)  # fmt: skip
def _paged_attention(
    case: Arguments, *, seq_lens: tuple[int, ...], new: tuple[int, ...] | None = None,
    fmt: str = "bf16", cache_fmt: str = "", layout: str = "NHD", poison: bool = False,
    lse: bool = False, sinks: bool = False, tree: bool = False, mla: bool = False,
    heads: tuple[int, int] = (2, 4), widths: tuple[int, int] = (64, 64), rotates: bool = False,
    columns: int = 0, gaps: bool = False, options: Mapping[str, Any] | None = None,
    scales: bool = False, evicted: tuple[tuple[int, int], ...] = (),
    key_starts: tuple[int, ...] = (), rotary: tuple[int, int] | None = None,
    interleaved: bool = False, stored_rotated: bool = False, rising: bool = False,
    longer: int = 0, twins: bool = False, depths: bool = False, loud: bool = False,
    apart: bool = False,
) -> Call:  # fmt: skip
    page_size, (kv_heads, group), (width, v_width) = 16, heads, widths
    cache_fmt = cache_fmt or fmt
    stored = [n + evicted[i][1] if evicted else n for i, n in enumerate(seq_lens)]
    table, used = _pages_of(case, stored, page_size, poison=poison, columns=columns)
    rows, num_heads = len(seq_lens) if new is None else sum(new), kv_heads * group

    numbers = case.rng.standard_normal((rows, num_heads, width))
    if twins:  # the last tokens of two sequences, which have the same pages
        numbers[-1], table.view[1] = numbers[0], table.view[0]
        table.buffer.restore()
    if loud and cache_fmt not in FOUR_BIT:
        numbers *= 2e4
    query = case.place(from_values(numbers, fmt), fmt, name="query")
    shown: dict[str, Any] = {"layout": layout, "poison": poison, "gaps": gaps}
    k_cache = _cache_of(case, cache_fmt, used, kv_heads, width, "k_cache", **shown)
    if mla:  # one cached row for all heads, whose first part is the value
        v_cache = k_cache.sub(lambda a: a[..., :v_width])
    else:
        v_cache = _cache_of(case, cache_fmt, used, kv_heads, v_width, "v_cache", **shown)
    if rising and cache_fmt in FOUR_BIT:  # in one warp, of every other pair of chunks
        v_cache.view.scales[table.view[0, 9], ..., 1:3] += 5
        v_cache.buffer.restore()
    elif loud and cache_fmt in FOUR_BIT:  # above a seventh of the largest fp16
        v_cache.view.scales[...] = 0x7100
        v_cache.buffer.restore()
    elif rising:
        k_cache.view[table.view[0, 9:]] *= k_cache.view.dtype.type(16)
        k_cache.buffer.restore()
    if stored_rotated:
        k_cache, v_cache = k_cache.rotated(), v_cache.rotated()
    if apart:
        k_cache = _apart(case, k_cache)
    arguments: dict[str, Any] = {
        "query": query, "k_cache": k_cache, "v_cache": v_cache, "block_table": table,
        "seq_lens": case.place(np.array(seq_lens, np.int32) + longer, "int32", name="seq_lens"),
        **_changed("paged_attention", layout=layout, **(options or {})),
    }  # fmt: skip
    if new is not None:
        arguments["query_lens"] = case.place(np.array(new, np.int32), "int32", name="query_lens")
    if sinks:
        logits = (4 * case.rng.standard_normal(num_heads)).astype(np.float32)
        arguments["sinks"] = case.place(logits, "fp32", name="sinks")
    if tree and new is not None:
        mask = _tree_mask(case, new)
        arguments["tree_mask"] = case.place(mask, "bool", name="tree_mask")
        if depths:
            parts = np.split(mask, np.cumsum(new)[:-1])
            at = [
                np.resize(length - count + part.sum(1) - 1, max(new))
                for length, count, part in zip(seq_lens, new, parts, strict=True)
            ]
            positions = np.array(at, np.int32)
            arguments["tree_positions"] = case.place(positions, "int32", name="tree_positions")
    for name, values in (
        ("evicted_starts", [start for start, _ in evicted]),
        ("evicted_lens", [lens for _, lens in evicted]),
        ("key_starts", key_starts),
    ):
        if values:
            arguments[name] = case.place(np.array(values, np.int32), "int32", name=name)
    if scales:  # that differ between rows of a tile
        for side in "k" if mla else "kv":
            sizes = np.exp2(case.rng.uniform(-4, 1, (used.size, kv_heads))).astype(np.float32)
            name = f"{side}_scale_cache"
            arguments[name] = case.place(sizes, "fp32", name=name)
        if mla:
            arguments["v_scale_cache"] = arguments["k_scale_cache"]
    if rotates:
        start, rotary_dim = rotary or (0, width)
        angles = reference.rope_table(max(seq_lens), rotary_dim)
        arguments["rope_table"] = case.place(angles, "fp32", name="rope_table")
        if start or interleaved:
            arguments |= {"rotary_start": start, "interleaved": interleaved}
    inputs = dict(arguments)
    out = arguments["out"] = case.output(fmt, (rows, num_heads, v_width), name="out")
    if lse:
        arguments["lse_out"] = case.output("fp32", (rows, num_heads), name="lse_out")

    def compare() -> bool:
        views = _mirrors(inputs)
        views.pop("batch_invariant", None)
        want, want_lse, faults = reference.paged_attention(**views)
        allowed, of_lse = attention_errors(
            views, want, want_lse, rounded_weights=case.rounded_weights
        )
        allowed[np.isneginf(want_lse)] = 0  # what sees no key is exactly zero
        got = reference.decode(np.ascontiguousarray(out.live()), fmt)
        case.note_unless_near("out", got, want, allowed)
        out.take_over()
        if lse:
            seen = arguments["lse_out"].live().astype(np.float64)
            if twins:
                for each, rows in (("out", got), ("lse_out", seen)):
                    case.note_unless_near(f"{each} of the second", rows[-1], rows[0], 0)
            case.note_unless_near("lse_out", seen, want_lse, of_lse)
            arguments["lse_out"].take_over()
        return any(faults.values())

    return Call(arguments, compare)


def _apart(case: Arguments, rows: Argument) -> Argument:
    """Return four-bit rows whose codes and scales are in two arrays."""
    codes, scales = (
        case.place(part.copy(), "uint8", name=f"{rows.buffer.name} {name}")
        for name, part in (("codes", rows.view.codes), ("scales", rows.view.scales))
    )
    codes.array = view_as(codes.array, rows.fmt, scales=scales.array)
    codes.view = reference.FourBitRows(codes.view, scales.view, rows.fmt)
    return codes


def _tree_mask(case: Arguments, new: tuple[int, ...]) -> Array:
    """Return the mask of a random tree per sequence: each token sees itself and its ancestors."""
    mask = np.zeros((sum(new), max(new)), bool)
    start = 0
    for count in new:
        for node in range(count):
            parent = int(case.rng.integers(-1, node))
            if parent >= 0:
                mask[start + node] = mask[start + parent]
            mask[start + node, node] = True
        start += count
    return mask


@_case("merge_states", "bf16")
@_case("merge_states", "fp32", fmt="fp32")
@_case("merge_states", "base 2", base="2")
@_case("merge_states", "one of two saw no key", unseen="one")
@_case("merge_states", "neither saw a key", unseen="both")
@_case("merge_states", "an lse far from zero", lse=300.0)
def _merge_states(
    case: Arguments, *, fmt: str = "bf16", out_fmt: str = "", base: str = "e", unseen: str = "",
    states: int = 2, tokens: int = 7, width: int = 64, lse: float = 0.0,
) -> Call:  # fmt: skip
    heads, out_fmt = 4, out_fmt or fmt
    outs = case.rng.standard_normal((states, tokens, heads, width))
    lses = (lse + 3 * case.rng.standard_normal((states, tokens, heads))).astype(np.float32)
    for state in {"": (), "one": (1,), "both": (0, 1)}[unseen]:
        outs[state, 2:4] = 0 if state == 0 else np.nan  # ignored, what it is
        lses[state, 2:4] = -np.inf
    arguments: dict[str, Any] = {}
    if states == 2:
        for side, values, logs in zip("ab", outs, lses, strict=True):
            name = f"out_{side}"
            arguments[name] = case.place(from_values(values, fmt), fmt, name=name)
            arguments[f"lse_{side}"] = case.place(logs, "fp32", name=f"lse_{side}")
    else:
        arguments["out_a"] = case.place(from_values(outs, fmt), fmt, name="out_a")
        arguments["lse_a"] = case.place(lses, "fp32", name="lse_a")
        arguments |= {"out_b": None, "lse_b": None}
    arguments |= _changed("merge_states", lse_base=base)
    inputs = dict(arguments)
    out = arguments["out"] = case.output(out_fmt, (tokens, heads, width), name="out")
    lse_out = arguments["lse_out"] = case.output("fp32", (tokens, heads), name="lse_out")

    def compare() -> bool:
        want, want_lse = reference.merge_states(**_mirrors(inputs))
        stored = reference.decode(from_values(outs, fmt), fmt)
        allowed, of_lse = merge_errors(stored, lses.astype(np.float64), want, want_lse, out_fmt)
        allowed[np.isneginf(want_lse)] = 0
        got = reference.decode(np.ascontiguousarray(out.live()), out_fmt)
        case.note_unless_near("out", got, want, allowed)
        case.note_unless_near("lse_out", lse_out.live().astype(np.float64), want_lse, of_lse)
        out.take_over()
        lse_out.take_over()
        return False

    return Call(arguments, compare)


# copy_pages, shift_pages, slot_mapping --------------------------------------------------------


@_case("copy_pages", "pages")
@_case("copy_pages", "no pages", pairs=((), ()))
@_case("copy_pages", "K and V", arrays=2)
@_case("copy_pages", "padding", pairs=((8, -1, 0, 3), (1, 6, -4, 5)))
@_case("copy_pages", "past the end", pairs=((8, 9, 0, 3), (1, 6, 9, 5)))
@_case("copy_pages", "views", views=True)
def _copy_pages(
    case: Arguments, *, pairs: tuple[tuple[int, ...], tuple[int, ...]] = ((8, 0, 3), (1, 6, 5)),
    arrays: int = 1, views: bool = False, widths: tuple[int, int] = (24, 31),
) -> Call:  # fmt: skip
    width, row_width = widths
    shape, cut = (9, PAGE_SIZE, HEADS, width), None
    if views:
        shape, cut = (27, PAGE_SIZE, HEADS, row_width), lambda a: a[9:18, ..., :width]
    caches = tuple(case.output("bf16", shape, cut, name=f"cache {i}") for i in range(arrays))
    src, dst = (
        case.slots(pages, name=name)
        for pages, name in zip(pairs, ("src_pages", "dst_pages"), strict=True)
    )
    cache = caches if arrays > 1 else caches[0]
    return _copied({"cache": cache, "src_pages": src, "dst_pages": dst}, "copy_pages")


def exact_rotations(rng: np.random.Generator, positions: int, rotary_dim: int) -> Array:
    """Return a rope table of eighths, times a factor: float32 rotates few bits exactly by it."""
    table = rng.integers(-8, 9, (positions, rotary_dim)) / 8
    table[0] = np.repeat([1, 0], rotary_dim // 2)
    return np.asarray(1.5 * table, np.float32)


@_case("shift_pages", "bf16")
@_case("shift_pages", "fp16, interleaved", fmt="fp16", interleaved=True)
@_case("shift_pages", "fp32", fmt="fp32")
@_case("shift_pages", "a part of each head", rotary_dim=16)
@_case("shift_pages", "onto other pages", out=True)
@_case("shift_pages", "a delta for each page", delta=(5, -63, 0))
@_case("shift_pages", "latents", latent=True, rotary_dim=16)
@_case("shift_pages", "fp8_e4m3", fmt="fp8_e4m3")
@_case("shift_pages", "int8, onto other pages", fmt="int8", out=True)
@_case("shift_pages", "padding", out=True, pages=(8, -1, 3), out_pages=(1, 6, -4))
@_case("shift_pages", "past the end", out=True, pages=(9, 4, 3, 0),
       out_pages=(1, 9, 6, 5), delta=(1, 1, 64, -64))  # fmt: skip
@_case("shift_pages", "views", views=True)
@_case("shift_pages", "a part of each head, onto other pages", rotary_dim=16, out=True)
def _shift_pages(
    case: Arguments, *, fmt: str = "bf16", width: int = 32, rotary_dim: int | None = None,
    interleaved: bool = False, latent: bool = False, out: bool = False, views: bool = False,
    pages: tuple[int, ...] = (8, 0, 3), out_pages: tuple[int, ...] = (1, 6, 5),
    delta: int | tuple[int, ...] = -7,
) -> Call:  # fmt: skip
    rows = (PAGE_SIZE,) if latent else (PAGE_SIZE, HEADS)
    shape, cut = (9, *rows, width), None
    if views:
        shape, cut = (27, PAGE_SIZE, 2 * HEADS, width), lambda a: a[9:18, :, :HEADS]
    quantised = CACHE_FORMATS[fmt].quantised
    if fmt in FOUR_BIT:
        keys = case.place(_usual_groups(case, fmt, shape), fmt, cut, name="pool")
    elif quantised:
        keys = case.output(fmt, shape, cut, name="pool")
    else:
        keys = case.rows(fmt, shape, cut, name="pool")
    rotary_dim = rotary_dim or width
    table = exact_rotations(case.rng, MAX_POSITIONS, rotary_dim)
    if not quantised:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        table = reference.rope_table(MAX_POSITIONS, rotary_dim, scaling=scaling)
    arguments: dict[str, Any] = {
        "pool": keys, "pages": case.slots(pages, name="pages"),
        "delta": delta if isinstance(delta, int) else case.slots(delta, name="delta"),
        "rope_table": case.place(table, "fp32", name="rope_table"),
        **_changed("shift_pages", interleaved=interleaved),
    }  # fmt: skip
    if out:
        arguments["out_pages"] = case.slots(out_pages, name="out_pages")
    if quantised:
        keys.buffer.exact = False  # what is converted again: a NaN is any NaN
        return _copied(arguments, "shift_pages")
    start = width - rotary_dim if latent else 0
    part = slice(start, start + rotary_dim)

    def compare() -> bool:
        before, got = keys.view.copy(), keys.live()
        faults = reference.shift_pages(**_mirrors(arguments))
        deltas = np.broadcast_to(delta, len(pages)).tolist()
        for page, target, by in zip(pages, out_pages if out else pages, deltas, strict=True):
            if not (0 <= page < 9 and 0 <= target < 9 and abs(by) < MAX_POSITIONS):
                continue
            moved = before[page][..., part]
            exact = reference.shift_rows(moved, table, by, interleaved=interleaved)
            cosine, sine = (
                np.broadcast_to(x, (PAGE_SIZE, x.size)) for x in reference.shift_angles(table, by)
            )
            allowed = rotation_errors(exact, moved, cosine, sine, fmt, interleaved=interleaved)
            # Two roundings more where cosine and sine are divided by the factor.
            allowed += 2 * (allowed - ulp(exact, fmt) / 2)
            shifted = np.ascontiguousarray(got[target][..., part])
            case.note_unless_near("pool", reference.decode(shifted, fmt), exact, allowed)
            reference.bits_of(keys.view, fmt)[target][..., part] = reference.bits_of(shifted, fmt)
        return any(faults)

    return Call(arguments, compare)


@_case("shift_pages", "a pool, onto other pages", own=True)
def _shift_pool(case: Arguments) -> Call:
    keys, values = (
        case.output("fp8_e4m3", (2, 9, PAGE_SIZE, HEADS, width), name=name)
        for name, width in (("keys", 32), ("values", 48))
    )
    table = exact_rotations(case.rng, MAX_POSITIONS, 32)
    arguments: dict[str, Any] = {
        "pool": KVPool.wrap(*(
            [part.sub(itemgetter(layer)).array for layer in range(2)] for part in (keys, values)
        )),
        "pages": case.slots((8, 0, 3), name="pages"), "delta": -7,
        "rope_table": case.place(table, "fp32", name="rope_table"),
        "out_pages": case.slots((1, 6, 5), name="out_pages"),
    }  # fmt: skip

    def compare() -> bool:
        pages, out_pages = arguments["pages"].view, arguments["out_pages"].view
        for pool, rows in zip(keys.view, values.view, strict=True):
            reference.shift_pages(pool, pages, -7, table, out_pages=out_pages, values=rows)
        return False

    return Call(arguments, compare)


_STATES: dict[str, tuple[str, tuple[int, ...]]] = {
    "conv": ("bf16", (24, 3)), "ssm": ("fp32", (2, 5, 8))
}  # fmt: skip
"""Format and shape of the parts of a state."""


def _rows_of_states(
    draw: Callable[..., Argument], count: int, parts: tuple[str, ...], name: str, *,
    gaps: bool = False,
) -> Argument | tuple[Argument, ...]:  # fmt: skip
    """Return rows of one part of states, or of two; with gaps between the rows of each."""
    rows = []
    for part in parts:
        fmt, shape = _STATES[part]
        if gaps:
            rows.append(draw(fmt, (count, 3, *shape), lambda a: a[:, 1], name=f"{name} {part}"))
        else:
            rows.append(draw(fmt, (count, *shape), name=f"{name} {part}"))
    return tuple(rows) if len(rows) > 1 else rows[0]


@_case("store_state", "conv")
@_case("store_state", "conv and ssm", parts=("conv", "ssm"))
@_case("store_state", "int32 slots", index="int32")
@_case("store_state", "no rows", rows=0)
@_case("store_state", "padding", kind="padding")
@_case("store_state", "past the end", kind="past the end")
@_case("store_state", "a sink slot", skip=0)
@_case("store_state", "views", parts=("conv", "ssm"), views=True)
@_case("gather_state", "conv", gathers=True)
@_case("gather_state", "conv and ssm", gathers=True, parts=("conv", "ssm"))
@_case("gather_state", "padding", gathers=True, kind="padding")
@_case("gather_state", "past the end", gathers=True, kind="past the end")
@_case("gather_state", "a sink slot", gathers=True, skip=0)
@_case("gather_state", "views", gathers=True, parts=("conv", "ssm"), views=True)
def _copy_state(
    case: Arguments, *, gathers: bool = False, parts: tuple[str, ...] = ("conv",), kind: str = "",
    index: str = "int64", rows: int | None = None, skip: int | None = None, views: bool = False,
) -> Call:  # fmt: skip
    operation, name = ("gather_state", "out") if gathers else ("store_state", "states")
    draw_rows, draw_caches = (case.output, case.input) if gathers else (case.input, case.output)
    slots = _slots(case, kind)[:rows]
    return _copied(
        {
            name: _rows_of_states(draw_rows, len(slots), parts, name, gaps=views),
            "caches": _rows_of_states(draw_caches, SLOTS, parts, "caches", gaps=views),
            "slots": case.slots(slots, index, step=2 if views else 1, name="slots"),
            **_changed(operation, skip_slot=skip),
        },
        operation,
    )  # fmt: skip


@_case("update_conv_state", "bf16")
@_case("update_conv_state", "fp32", fmt="fp32")
@_case("update_conv_state", "inputs first", inputs_first=True)
@_case("update_conv_state", "a token per sequence", new=(1,))
@_case("update_conv_state", "no tokens", new=(0,))
@_case("update_conv_state", "padding", kind="padding")
@_case("update_conv_state", "past the end", kind="past the end")
@_case("update_conv_state", "a sink slot", skip=0)
@_case("update_conv_state", "views", inputs_first=True, views=True)
def _update_conv_state(
    case: Arguments, *, fmt: str = "bf16", new: tuple[int, ...] = (2, 3, 0, 7, 1),
    inputs_first: bool = False, widths: tuple[int, int] = (24, 31), kind: str = "",
    skip: int | None = None, views: bool = False,
) -> Call:  # fmt: skip
    slots, inputs = _slots(case, kind), 3
    channels, row_width = widths
    sums = np.cumsum([0, *np.resize(new, len(slots)).tolist()])
    tokens = int(sums[-1])
    if kind == "past the end":
        sums[-1] = POISON_SLOT
    x_shape, cut = (tokens, channels), None
    if views:
        x_shape, cut = (tokens, row_width), lambda a: a[:, :channels]
    shape = (SLOTS, inputs, channels) if inputs_first else (SLOTS, channels, inputs)
    cache = case.output(
        fmt, shape, (lambda a: a.swapaxes(1, 2)) if inputs_first else None, name="cache"
    )
    return _copied(
        {
            "x": case.input(fmt, x_shape, cut, name="x"), "cache": cache,
            "slots": case.slots(slots, name="slots"),
            "cu_query_lens": case.place(sums, "int64", name="cu_query_lens"),
            **_changed("update_conv_state", skip_slot=skip),
        },
        "update_conv_state",
    )  # fmt: skip


@_case("slot_mapping", "a token per sequence", appended=(1, 1, 1, 1))
@_case("slot_mapping", "ragged", appended=(5, 0, 16, 3))
@_case("slot_mapping", "whole sequences", appended=(5, 33, 16, 8))
@_case("slot_mapping", "poisoned table", appended=(5, 0, 16, 3), poison=True)
def _slot_mapping(case: Arguments, *, appended: tuple[int, ...], poison: bool = False) -> Call:
    lengths, page_size = [5, 33, 16, 8], 8
    table, _ = _pages_of(case, lengths, page_size, poison=poison)
    arguments: dict[str, Any] = {
        "block_table": table,
        "seq_lens": case.place(np.array(lengths, np.int32), "int32", name="seq_lens"),
        "append_lens": case.place(np.array(appended, np.int32), "int32", name="append_lens"),
        "page_size": page_size,
    }
    inputs = dict(arguments)
    content = case.rng.integers(0, 99, sum(appended))
    out = arguments["out"] = case.place(content, "int64", name="out")

    def compare() -> bool:
        out.view[...] = reference.slot_mapping(**_mirrors(inputs))
        return False

    return Call(arguments, compare)


OPERATIONS = tuple(dict.fromkeys(case.operation for case in _CASES))

# The case of a specialisation -----------------------------------------------------------------

_NAMES = {form.ctype: name for name, form in reversed(CACHE_FORMATS.items())}
_GROUP = 128  # the largest of a four-bit format: rows of so many elements are whole groups


def case_of(specialisation: Specialisation) -> Case | None:
    """Return a case whose call takes a specialisation on a GPU; None if it has no plainer one.

    Examples
    --------
    >>> from kvcupy.ops.store import CONVERT
    >>> print(case_of(CONVERT.specialise("float", "int8", 8)).operation)
    store_kv
    >>> case_of(CONVERT.specialise("float", "int8", 1))
    """
    arguments = specialisation.arguments
    # The first number is the width that a kernel relies on, of a word or a pack: 1 is the plainest.
    is_plainest = next((each for each in arguments if each.isdigit()), "") == "1"
    build = _BUILDERS.get(specialisation.kernel.name)
    if build is None or is_plainest:
        return None
    operation, builder, options_of = build
    options = options_of(*arguments)
    if options is None:
        return None
    return Case(operation, specialisation.expression, lambda case: builder(case, **options))


# Kernels that copy words: rows of odd multiples of a word, in elements of two bytes.


def _copied_rows(word: str) -> dict[str, Any]:
    elements = int(word) // 2
    return {"widths": (5 * elements, 7 * elements), "views": True}


def _copied_pages(word: str) -> dict[str, Any]:
    elements = int(word) // 2
    return {"widths": (3 * elements, 5 * elements), "views": True}


def _transferred_words(word: str, rows: str, tables: str = "") -> dict[str, Any] | None:
    if tables:  # of addresses, which no operation takes
        return None
    return {"width": int(word) // 2 * (201 if rows == "1" else 3)}


def _converted(fmt: str, cache_fmt: str, _count: str, scales: str = "static") -> dict[str, Any]:
    """Return the options for kernels that convert packs of elements between two formats."""
    rows, cache = _NAMES[fmt], _NAMES[cache_fmt]
    widths = (16, 48)
    if cache in FOUR_BIT:
        widths = (2 * _GROUP, 4 * _GROUP)  # whose scales are whole words, too
    if not CACHE_FORMATS[cache].quantised:
        scales = ""
    return {"fmt": rows, "cache_fmt": cache, "widths": widths, "views": True, "scales": scales}


def _gathered(cache_fmt: str, fmt: str, count: str) -> dict[str, Any]:
    return _converted(fmt, cache_fmt, count)


def _dynamic(fmt: str, cache_fmt: str, count: str) -> dict[str, Any]:
    return _converted(fmt, cache_fmt, count, "dynamic")


def _rotated(fmt: str, cache_fmt: str, _count: str, reduces: str) -> dict[str, Any]:
    cache = _NAMES[cache_fmt]
    options: dict[str, Any] = {"fmt": _NAMES[fmt], "cache_fmt": cache}
    if cache in FOUR_BIT:
        return {**options, "width": _GROUP}
    if reduces == "true" and not CACHE_FORMATS[cache].quantised:
        return {**options, "norm": True}
    if CACHE_FORMATS[cache].quantised:
        options["scales"] = "dynamic" if reduces == "true" else "static"
    return options


def _merged(fmt: str, out_fmt: str, _count: str, block: str = "") -> dict[str, Any]:
    states = {"": {}, "false": {"states": 5}, "true": {"states": 33, "tokens": 1, "width": 256}}[
        block
    ]
    return {"fmt": _NAMES[fmt], "out_fmt": _NAMES[out_fmt], **states}


def _attended(**changed: Any) -> dict[str, Any]:
    """Return sequences of one key, of a ragged page, and of more keys than a block takes.

    The block table is so wide that keys are split over blocks. Unused pages, table entries, ends of
    pages and the gaps between them are poison.
    """
    options = {"seq_lens": (1, 37, 330), "columns": 40, "poison": True, "gaps": True, "lse": True}
    return {**options, **changed}


def _decoded(ctype: str, k: str, v: str, rows: str, unaligned: str = "") -> dict[str, Any]:
    cache, k_width = _NAMES[ctype], int(k)
    if unaligned:
        k_width = _unaligned_width(cache, k_width)
    scales = {"k_scale": 0.7, "v_scale": 1.3} if CACHE_FORMATS[cache].quantised else {}
    return _attended(
        fmt=cache if cache in ("fp16", "bf16") else "bf16", cache_fmt=cache,
        widths=(k_width, int(v)), heads=(2, int(rows)), options=scales,
    )  # fmt: skip


def _unaligned_width(cache: str, k_width: int) -> int:
    """Return the widest rows, up to `k_width`, that behind one another do not begin at words."""
    return next(n for n in range(k_width, 0, -32) if FOUR_BIT[cache].row_bytes(n) % 4)


def _latent(heads: int, ctype: str) -> dict[str, Any]:
    # Bytes of four-bit rows are not sliced by elements: there, values have a separate cache.
    shares = _NAMES[ctype] not in FOUR_BIT
    return {**_decoded(ctype, "576", "512", "16"), "mla": shares, "heads": (1, heads)}


def _prefilled(
    ctype: str, k_width: str, v_width: str, rotates: str, rows: str, _stages: str, quantised: str
) -> dict[str, Any]:
    # Large tiles are for sequences that fill them, and a GPU with them, as far as shapes tell.
    size = {"new": (1, 20, 26)} if rows == "64" else {"new": (1, 30, 40), "columns": 2000}
    cache: dict[str, Any] = {}
    if quantised == "true":  # several formats, by a branch that both query formats share
        cache_fmt = "fp8_e4m3" if ctype == "bfloat16" else "nvfp4"
        cache = {"cache_fmt": cache_fmt, "options": {"k_scale": 0.7, "v_scale": 1.3}}
    return _attended(
        fmt=_NAMES[ctype], widths=(int(k_width), int(v_width)), rotates=rotates == "true",
        **size, **cache,
    )  # fmt: skip


def _shifted(fmt: str, _count: str) -> dict[str, Any]:
    options: dict[str, Any] = {"fmt": _NAMES[fmt], "out": True, "views": True}
    return {**options, "width": _GROUP} if options["fmt"] in FOUR_BIT else options


def _transferred(source: str, target: str, count: str) -> dict[str, Any] | None:
    formats = {_NAMES[source], _NAMES[target]}
    if formats <= FOUR_BIT.keys():  # nothing is converted
        return None
    width = 3 * int(count) if formats.isdisjoint(FOUR_BIT) else _GROUP
    return {"fmt": _NAMES[source], "to_fmt": _NAMES[target], "width": width}


@_case("transfer_pages", "copies, pages past the end", own=True, method="copy",
       src_pages=(4, 0, 9, 2), dst_pages=(1, 3, 0, 5))  # fmt: skip
@_case("transfer_pages", "bf16 to nvfp4, odd addresses", own=True, to_fmt="nvfp4", width=_GROUP,
       misalign=1)  # fmt: skip
def _transfer_pages(
    case: Arguments, *, fmt: str = "bf16", to_fmt: str = "", width: int = 24,
    method: str = "kernel", src_pages: tuple[int, ...] = (4, 0, -1, 2),
    dst_pages: tuple[int, ...] = (1, 3, 0, 4), misalign: int = 0,
) -> Call:  # fmt: skip
    """Move pages between two pools, whose pages and layers lie apart."""
    layers, pages, page_size = 2, 5, 3

    def pool(fmt: str, name: str, misalign: int) -> tuple[list[Argument], Any]:
        shape = (layers, pages + 2, page_size + 1, 1, width)
        parts = [
            case.output(
                fmt, shape, lambda a: a[:, 1:-1, :page_size], misalign=misalign,
                name=f"{name} {part}",
            )
            for part in "KV"
        ]  # fmt: skip
        by_layer = [
            [part.sub(itemgetter(layer)).array for layer in range(layers)] for part in parts
        ]
        return parts, KVPool.wrap(*by_layer)

    src, src_pool = pool(fmt, "src", misalign)
    dst, dst_pool = pool(to_fmt or fmt, "dst", 0)
    for part in dst:
        part.buffer.exact = src[0].fmt == part.fmt
    arguments = {
        "src_pool": src_pool, "dst_pool": dst_pool, "src_pages": np.array(src_pages),
        "dst_pages": np.array(dst_pages), "method": method, "convert": src[0].fmt != dst[0].fmt,
    }  # fmt: skip
    if method == "kernel":  # the other methods take lists of the host
        for name in ("src_pages", "dst_pages"):
            arguments[name] = case.slots(arguments[name], name=name)

    def compare() -> bool:
        sources, targets = ([part.view for part in parts] for parts in (src, dst))
        pages = np.array(src_pages), np.array(dst_pages)
        return any(reference.transfer_pages(sources, targets, *pages))

    return Call(arguments, compare)


class _Memory:
    """Memory of a pool, one part of it or its scales, beside the bytes that should be there."""

    def __init__(self, case: Arguments, view: ArrayView, fmt: str, rows: Array) -> None:
        self.case, self.fmt, self.bytes = case, fmt, np.ascontiguousarray(rows)
        self._rotated_width = view.rotated_width
        self._raw = ArrayView(
            view.pointer, (self.bytes.nbytes,), (1,), "uint8", view.device, library=view.library,
            owner=view.owner,
        )  # fmt: skip
        case.device.copy(self._raw, case.device.asarray(self.bytes.reshape(-1).view(np.uint8)))

    @property
    def rows(self) -> Any:
        if self.fmt in FOUR_BIT:
            return reference.FourBitRows.packed(self.bytes, self.fmt, self._rotated_width)
        return self.bytes

    def compare(self, name: str) -> None:
        got = np.array(self.case.device.to_numpy(self._raw)).astype(np.float64)
        self.case.note_unless_near(name, got, self.bytes.reshape(-1).view(np.uint8), 0.0)


@_case("transfer_pages", "bf16 to int8, scales by row", own=True, to_fmt="int8", scaled=(0, 1))
@_case("transfer_pages", "fp32 to int8, scales of wide rows", own=True, fmt="fp32", to_fmt="int8",
       widths=(520, 24), scaled=(0, 1))  # fmt: skip
@_case("transfer_pages", "int8 to fp32, scales by row", own=True, fmt="int8", to_fmt="fp32",
       scaled=(1, 0))  # fmt: skip
@_case("transfer_pages", "mxfp4 to int8, scales by row", own=True, fmt="mxfp4", to_fmt="int8",
       widths=(64, 32), scaled=(0, 1))  # fmt: skip
@_case("transfer_pages", "mxfp4 to int8, scales of wide rows", own=True, fmt="mxfp4",
       to_fmt="int8", widths=(1056, 544), scaled=(0, 1))  # fmt: skip
@_case("transfer_pages", "int8, scales by row", own=True, fmt="int8", scaled=(1, 1))
@_case("transfer_pages", "nvfp4 to int4", own=True, fmt="nvfp4", to_fmt="int4", widths=(64, 128),
       scaled=(0, 0))  # fmt: skip
@_case("transfer_pages", "nvfp4, stored rotated, to bf16", own=True, fmt="nvfp4+hadamard",
       to_fmt="bf16", widths=(64, 128), scaled=(0, 0))  # fmt: skip
def _transfer_scaled(
    case: Arguments, *, fmt: str = "bf16", to_fmt: str = "", widths: tuple[int, int] = (24, 17),
    scaled: tuple[int, int],
) -> Call:  # fmt: skip
    """Move pages between pools of which some have a scale for each row."""
    pages, page_size, layers = 5, 3, 2
    rows_of_heads = (layers, pages, page_size, HEADS)
    pools, memories = [], []
    for form, has_scales in zip((fmt, to_fmt or fmt), scaled, strict=True):
        pool = KVPool(
            pages, page_size, layers, HEADS, widths[0], v_head_dim=widths[1], dtype=form,
            device=case.device, scales=bool(has_scales),
        )  # fmt: skip
        parts, scales = [], []
        for view, width in zip(pool.parts, widths, strict=True):
            shape = (*rows_of_heads, width)
            values = case.rng.standard_normal(shape) * (40 if form == "int8" else 1)
            fmt = view.format
            rows = _usual_groups(case, fmt, shape) if fmt in FOUR_BIT else from_values(values, fmt)
            parts.append(_Memory(case, view, fmt, rows))
        for view in pool.scale_parts:
            factors = case.rng.uniform(1e-3, 3, rows_of_heads).astype(np.float32)
            scales.append(_Memory(case, view, "fp32", factors))
        pools.append(pool)
        memories.append((parts, scales))
    (src, src_scales), (dst, dst_scales) = memories
    src_pages, dst_pages = [4, 0, -1, 2], [1, 3, 0, 4]

    def compare() -> bool:
        faults = reference.transfer_pages(
            [each.rows for each in src], [each.rows for each in dst], np.array(src_pages),
            np.array(dst_pages), src_scales=[each.rows for each in src_scales] or None,
            dst_scales=[each.rows for each in dst_scales] or None,
        )  # fmt: skip
        for name, memory in zip(
            ("K", "V", "scales of K", "scales of V"), [*dst, *dst_scales], strict=False
        ):
            memory.compare(name)
        return any(faults)

    return Call({
        "src_pool": pools[0], "dst_pool": pools[1], "src_pages": src_pages, "dst_pages": dst_pages,
        "method": "kernel", "convert": bool(to_fmt),
    }, compare)  # fmt: skip


# By kernel: the operation, what builds its arguments, and the options that a specialisation needs,
# from its template arguments; None for the plainest.
_Options = Callable[..., "dict[str, Any] | None"]
_BUILDERS: dict[str, tuple[str, Callable[..., Call], _Options]] = {
    "store_copy": ("store_kv", _store_kv, _copied_rows),
    "store_convert": ("store_kv", _store_kv, _converted),
    "store_dynamic": ("store_kv", _store_kv, _dynamic),
    "store_four_bit": ("store_kv", _store_kv, _converted),
    "gather_copy": ("gather_kv", _gather_kv, _copied_rows),
    "gather_convert": ("gather_kv", _gather_kv, _gathered),
    "gather_four_bit": ("gather_kv", _gather_kv, _gathered),
    "rope_store": ("rope_store_kv", _rope_store_kv, _rotated),
    "attention_prefill": ("paged_attention", _paged_attention, _prefilled),
    "attention_decode_mma": ("paged_attention", _paged_attention, _decoded),
    "attention_decode_latent": (
        "paged_attention", _paged_attention, lambda ctype: _latent(16, ctype)
    ),
    "attention_decode_heads": (
        "paged_attention", _paged_attention, lambda ctype, keys: _latent(40, ctype)
    ),
    "merge_states": ("merge_states", _merge_states, _merged),
    "merge_many": ("merge_states", _merge_states, _merged),
    "copy_pages": ("copy_pages", _copy_pages, _copied_pages),
    "update_conv_state": (
        "update_conv_state", _update_conv_state,
        lambda word: {**_copied_pages(word), "inputs_first": True},
    ),
    "shift_rows": ("shift_pages", _shift_pages, _shifted),
    "shift_four_bit": ("shift_pages", _shift_pages, _shifted),
    "transfer_copy": ("transfer_pages", _transfer_pages, _transferred_words),
    "transfer_convert": ("transfer_pages", _transfer_pages, _transferred),
    "transfer_to_four_bit": ("transfer_pages", _transfer_pages, _transferred),
    "transfer_from_four_bit": ("transfer_pages", _transfer_pages, _transferred),
}  # fmt: skip
