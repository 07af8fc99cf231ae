"""Conformance cases: what each operation must compute, for any implementation of it.

A case draws its arguments from a seed, between canaries and beside mirrors, and compares what an
implementation left with the float64 reference. Shapes are small, and chosen to show mistakes:
scattered slots, the last page, K narrower than V, values halfway between two of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import reference
from .arrays import (
    POISON_SLOT,
    Argument,
    Arguments,
    Array,
    from_values,
    rounding_boundaries,
)
from .tolerances import attention_errors, merge_errors, rotation_errors

HEADS, PAGES, PAGE_SIZE = 2, 5, 4
SLOTS = PAGES * PAGE_SIZE
OPERATIONS = (
    "store_kv", "store_mla", "gather_kv", "apply_rope", "rope_store_kv", "paged_attention",
    "merge_states", "copy_pages", "slot_mapping",
)  # fmt: skip
FEATURES = {
    "padding": "negative indices, which are skipped",
    "past the end": "indices past the end, which are skipped",
    "poison": "NaN and huge indices wherever nothing is to be read",
    "views": "arrays that are not contiguous",
}
"""What a case asks for that options do not show, so that an implementation can decline it."""


@dataclass
class Call:
    """Arguments of one call, and how to compare what it leaves.

    Attributes
    ----------
    arguments : by the names of kvcupy's parameters: `Argument`, a tuple of them, or a plain value
    compare : brings the mirrors to what the reference says, notes what is further off than its
        tolerance, and returns whether an index was past the end. All other bytes are compared
        afterwards
    """

    arguments: dict[str, Any]
    compare: Callable[[], bool]


@dataclass(frozen=True)
class Case:
    """One thing that an operation must do.

    Attributes
    ----------
    operation, name : which case this is
    build : draws the arguments
    compared : a key of `tolerances.REASONS`
    features : keys of `FEATURES`
    """

    operation: str
    name: str
    build: Callable[[Arguments], Call]
    compared: str = "bits"
    features: frozenset[str] = field(default=frozenset())


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
    chosen_cases = [case for case in _CASES if case.operation in chosen]
    return sorted(chosen_cases, key=lambda case: OPERATIONS.index(case.operation))


_CASES: list[Case] = []


def _case(
    operation: str, name: str, *features: str, compared: str = "bits", **options: Any
) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Add a case which calls the decorated builder with `options`."""

    def add(build: Callable[..., Call]) -> Callable[..., Call]:
        _CASES.insert(0, Case(  # decorators apply from below
            operation, name, lambda case: build(case, **options), compared, frozenset(features)
        ))  # fmt: skip
        return build

    return add


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


def _tellers(fmt: str, scale: float, shape: tuple[int, ...]) -> Array:
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
@_case("store_kv", "padding", "padding", kind="padding")
@_case("store_kv", "past the end", "past the end", kind="past the end")
@_case("store_kv", "a sink slot", skip=0)
@_case("store_kv", "views", "views", views=True)
@_case("store_kv", "fp32 to bf16", fmt="fp32", cache_fmt="bf16")
@_case("store_kv", "fp32 to fp8_e4m3, scales", fmt="fp32", cache_fmt="fp8_e4m3", scales="static")
@_case("store_kv", "fp32 to int8, scales by head", fmt="fp32", cache_fmt="int8", scales="per head")
@_case("store_kv", "bf16 to fp8_e4m3, scales by row", cache_fmt="fp8_e4m3", scales="dynamic")
def _store_kv(
    case: Arguments, *, fmt: str = "bf16", cache_fmt: str = "", widths: tuple[int, int] = (16, 40),
    layout: str = "NHD", index: str = "int64", kind: str = "", spare: int = 0,
    tokens: int | None = None, skip: int | None = None, views: bool = False, scales: str = "",
) -> Call:  # fmt: skip
    slots = _slots(case, kind)[:tokens]
    rows, cache_fmt = len(slots) + spare, cache_fmt or fmt
    options = _scales(case, scales)
    if fmt != cache_fmt and scales != "dynamic":
        factors = [1.0, 1.0]
        if scales == "static":
            factors = [options["k_scale"], options["v_scale"]]
        elif scales:
            factors = [float(options[f"{side}_scale"].view[0]) for side in "kv"]
        key, value = (
            case.place(_tellers(cache_fmt, factor, (rows, HEADS, width)), fmt, name=name)
            for name, factor, width in zip(("key", "value"), factors, widths, strict=True)
        )
    elif views:  # of one packed array, as a projection leaves it
        packed = case.input(fmt, (rows, 3 * HEADS, max(widths)), name="key and value")
        key = packed.sub(lambda a: a[:, HEADS : 2 * HEADS, : widths[0]])
        value = packed.sub(lambda a: a[:, 2 * HEADS :, : widths[1]])
    else:
        draw = case.rows if scales else case.input
        key = draw(fmt, (rows, HEADS, widths[0]), name="key")
        value = draw(fmt, (rows, HEADS, widths[1]), name="value")
    k_cache, v_cache = _caches(case, cache_fmt, widths, layout, gaps=views)
    if layout != "NHD":
        options["layout"] = layout
    if skip is not None:
        options["skip_slot"] = skip
    return _copied(
        {
            "key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache,
            "slot_mapping": case.slots(slots, index, step=2 if views else 1), **options,
        },
        "store_kv", k_cache=fmt, v_cache=fmt,
    )  # fmt: skip


@_case("store_mla", "bf16")
@_case("store_mla", "slots, not pages", paged=False)
@_case("store_mla", "padding", "padding", kind="padding")
@_case("store_mla", "past the end", "past the end", kind="past the end")
@_case("store_mla", "bf16 to fp8_e4m3, a scale", cache_fmt="fp8_e4m3", scale=0.3)
def _store_mla(
    case: Arguments, *, cache_fmt: str = "bf16", paged: bool = True, kind: str = "",
    scale: float | None = None,
) -> Call:  # fmt: skip
    slots = _slots(case, kind)
    latent = case.input("bf16", (len(slots), 64), name="latent")
    rope_key = case.input("bf16", (len(slots), 16), name="rope_key")
    shape = (PAGES, PAGE_SIZE, 80) if paged else (SLOTS, 80)
    options = {} if scale is None else {"scale": scale}
    return _copied(
        {
            "latent": latent, "rope_key": rope_key,
            "cache": case.output(cache_fmt, shape, name="cache"),
            "slot_mapping": case.slots(slots), **options,
        },
        "store_mla", cache="bf16",
    )  # fmt: skip


@_case("gather_kv", "bf16")
@_case("gather_kv", "HND pages", layout="HND")
@_case("gather_kv", "padding", "padding", kind="padding")
@_case("gather_kv", "past the end", "past the end", kind="past the end")
@_case("gather_kv", "views", "views", views=True)
@_case("gather_kv", "fp8_e4m3 to bf16, scales", cache_fmt="fp8_e4m3", scales="static")
@_case("gather_kv", "int8 to bf16, scales by head", cache_fmt="int8", scales="per head")
@_case("gather_kv", "int8 to bf16, scales by row", cache_fmt="int8", scales="dynamic")
def _gather_kv(
    case: Arguments, *, cache_fmt: str = "bf16", layout: str = "NHD", kind: str = "",
    views: bool = False, scales: str = "",
) -> Call:  # fmt: skip
    slots, widths = _slots(case, kind), (16, 40)
    k_cache, v_cache = _caches(case, cache_fmt, widths, layout, gaps=views)
    k_out, v_out = (
        case.output("bf16", (len(slots), HEADS, width), name=name)
        for name, width in zip(("k_out", "v_out"), widths, strict=True)
    )
    options = {} if layout == "NHD" else {"layout": layout}
    return _copied(
        {
            "k_cache": k_cache, "v_cache": v_cache, "slots": case.slots(slots, name="slots"),
            "k_out": k_out, "v_out": v_out, **options, **_scales(case, scales),
        },
        "gather_kv", k_out=cache_fmt, v_out=cache_fmt,
    )  # fmt: skip


# apply_rope, rope_store_kv --------------------------------------------------------------------

MAX_POSITIONS = 64


def _positions(case: Arguments, kind: str, count: int) -> tuple[Argument, Array]:
    """Return the positions, first and last of the table among them, and the tokens inside."""
    values = np.array([0, MAX_POSITIONS - 1, *case.rng.integers(0, MAX_POSITIONS, count - 2)])
    if kind == "past the end":
        values[3], values[4] = MAX_POSITIONS, -1
    inside = np.flatnonzero((values >= 0) & (values < MAX_POSITIONS))
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
    tokens: Array, interleaved: bool,
) -> None:  # fmt: skip
    """Compare rotated rows with float64, and let the mirror of `target` hold them."""
    fmt, width = target.fmt, table.view.shape[1]
    rows = before[tokens]
    cosine, sine = reference.cos_sin(table.view, positions.view[tokens])
    exact = reference.rotate(rows, cosine, sine, interleaved=interleaved)
    allowed = rotation_errors(exact, rows, cosine, sine, fmt, interleaved=interleaved)
    got = np.ascontiguousarray(target.live()[tokens])
    target.buffer.case.note_unless_near(
        name, reference.decode(got, fmt)[..., :width], exact[..., :width], allowed[..., :width]
    )
    # Elements that are not rotated keep their bits.
    stored = rows.copy()
    stored[..., :width] = got[..., :width]
    reference.bits_of(target.view, fmt)[tokens] = reference.bits_of(stored, fmt)


@_case("apply_rope", "bf16", compared="rotation")
@_case("apply_rope", "fp16, interleaved", compared="rotation", fmt="fp16", interleaved=True)
@_case("apply_rope", "fp32", compared="rotation", fmt="fp32")
@_case("apply_rope", "a part of each head", compared="rotation", rotary_dim=16)
@_case("apply_rope", "to outputs", compared="rotation", outputs=True)
@_case("apply_rope", "past the end", "past the end", compared="rotation", kind="past the end")
def _apply_rope(
    case: Arguments, *, fmt: str = "bf16", rotary_dim: int = 32, interleaved: bool = False,
    outputs: bool = False, kind: str = "",
) -> Call:  # fmt: skip
    count = 11
    positions, tokens = _positions(case, kind, count)
    table = _table(case, rotary_dim, positions)
    query = case.rows(fmt, (count, 3 * HEADS, 32), name="query")
    key = case.rows(fmt, (count, HEADS, 32), name="key")
    arguments: dict[str, Any] = {
        "query": query, "key": key, "rope_table": table, "positions": positions
    }  # fmt: skip
    if interleaved:
        arguments["interleaved"] = True
    targets = {"query": query, "key": key}
    if outputs:
        for name, rows in tuple(targets.items()):
            targets[name] = case.output(fmt, rows.view.shape, name=f"{name}_out")
            arguments[f"{name}_out"] = targets[name]

    def compare() -> bool:
        for name, rows in (("query", query), ("key", key)):
            _compare_rotated(
                targets[name].buffer.name, rows.view.copy(), targets[name], table, positions,
                tokens, interleaved,
            )  # fmt: skip
        return len(tokens) < count

    return Call(arguments, compare)


@_case("rope_store_kv", "bf16", compared="rotation")
@_case("rope_store_kv", "fp16, interleaved", compared="rotation", fmt="fp16", interleaved=True)
@_case("rope_store_kv", "a part of each head", compared="rotation", rotary_dim=16)
@_case("rope_store_kv", "padding", "padding", compared="rotation", kind="padding")
@_case("rope_store_kv", "past the end", "past the end", compared="rotation", kind="past the end")
@_case("rope_store_kv", "bf16 to fp8_e4m3, scales", compared="rotation", cache_fmt="fp8_e4m3",
       scales="static")  # fmt: skip
def _rope_store_kv(
    case: Arguments, *, fmt: str = "bf16", cache_fmt: str = "", rotary_dim: int = 32,
    interleaved: bool = False, kind: str = "", scales: str = "",
) -> Call:  # fmt: skip
    slots = case.slots(_slots(case, kind))
    count = len(slots.view)
    positions, _ = _positions(case, "", count)
    tokens = np.arange(count)
    table = _table(case, rotary_dim, positions)
    query = case.rows(fmt, (count, 3 * HEADS, 32), name="query")
    key = case.rows(fmt, (count, HEADS, 32), name="key")
    value = case.rows(fmt, (count, HEADS, 32), name="value")
    k_cache, v_cache = _caches(case, cache_fmt or fmt, (32, 32))
    options = _scales(case, scales)
    arguments: dict[str, Any] = {
        "query": query, "key": key, "value": value, "rope_table": table, "positions": positions,
        "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots, **options,
    }  # fmt: skip
    if interleaved:
        arguments["interleaved"] = True

    def compare() -> bool:
        for name, rows in (("query", query), ("key", key)):
            _compare_rotated(name, rows.view.copy(), rows, table, positions, tokens, interleaved)
        # The cache holds, bit for bit, the store of the rotated key that was left in `key`.
        names = ("key", "value", "k_cache", "v_cache", "slot_mapping", *options)
        faults = reference.store_kv(**_mirrors({name: arguments[name] for name in names}))
        return bool(faults)

    return Call(arguments, compare)


# paged_attention, merge_states ----------------------------------------------------------------


def _pages_of(
    case: Arguments, seq_lens: list[int], page_size: int, *, poison: bool
) -> tuple[Argument, Array]:
    """Return a block table of scattered pages, and which slots are in use."""
    counts = [-(-length // page_size) for length in seq_lens]
    pages = case.rng.permutation(sum(counts) + 2)
    table = np.full((len(counts), max(counts) + 2 * poison), POISON_SLOT if poison else 0, np.int32)
    used = np.zeros((len(pages), page_size), bool)
    start = 0
    for row, length, count in zip(table, seq_lens, counts, strict=True):
        row[:count] = pages[start : start + count]
        tokens = np.arange(length)
        used[row[tokens // page_size], tokens % page_size] = True
        start += count
    return case.place(table, "int32", name="block_table"), used


def _cache_values(
    case: Arguments, fmt: str, used: Array, heads: int, width: int, poison: bool
) -> Array:
    """Return values of a cache (pages, page_size, heads, width), NaN where no token is."""
    values = from_values(case.rng.standard_normal((*used.shape, heads, width)), fmt)
    if poison and fmt != "int8":
        values[~used] = from_values(np.nan, fmt)
    return values


@_case("paged_attention", "decode, sequences of one length", compared="attention",
       seq_lens=(32, 32, 32))  # fmt: skip
@_case("paged_attention", "decode", compared="attention", seq_lens=(1, 37, 16, 5))
@_case("paged_attention", "decode, fp32", compared="attention", seq_lens=(9, 20), fmt="fp32")
@_case("paged_attention", "decode, HND pages", compared="attention", seq_lens=(9, 20), layout="HND")
@_case("paged_attention", "decode, poisoned tails", "poison", compared="attention",
       seq_lens=(1, 37, 16, 5), poison=True)  # fmt: skip
@_case("paged_attention", "decode, lse", compared="attention", seq_lens=(1, 37, 16, 5), lse=True)
@_case("paged_attention", "decode, an empty sequence", compared="attention", seq_lens=(7, 0, 18),
       lse=True)  # fmt: skip
@_case("paged_attention", "decode, fp8_e4m3 cache", compared="attention", seq_lens=(9, 20),
       cache_fmt="fp8_e4m3", options={"k_scale": 0.7, "v_scale": 1.3})  # fmt: skip
@_case("paged_attention", "decode, window", compared="attention", seq_lens=(3, 37, 16),
       options={"window": 8})  # fmt: skip
@_case("paged_attention", "decode, window and first keys", compared="attention",
       seq_lens=(3, 37, 16), options={"window": 8, "sinks": 2})  # fmt: skip
@_case("paged_attention", "decode, learned sinks", compared="attention", seq_lens=(3, 37, 16),
       sinks=True)  # fmt: skip
@_case("paged_attention", "decode, soft cap and scale", compared="attention", seq_lens=(3, 37, 16),
       options={"logits_soft_cap": 2.0, "sm_scale": 0.4})  # fmt: skip
@_case("paged_attention", "prefill", compared="attention", seq_lens=(19, 6), new=(19, 6))
@_case("paged_attention", "prefill behind a prefix", compared="attention", seq_lens=(32, 32),
       new=(16, 16))  # fmt: skip
@_case("paged_attention", "prefill of ragged chunks", "poison", compared="attention",
       seq_lens=(37, 20, 9), new=(5, 1, 9), poison=True, lse=True)  # fmt: skip
@_case("paged_attention", "prefill, not causal", compared="attention", seq_lens=(19, 6),
       new=(7, 6), options={"causal": False})  # fmt: skip
@_case("paged_attention", "a tree of drafted tokens", compared="attention", seq_lens=(19, 12),
       new=(6, 4), tree=True)  # fmt: skip
@_case("paged_attention", "MLA decode", compared="attention", seq_lens=(1, 37, 16), mla=True)
def _paged_attention(
    case: Arguments, *, seq_lens: tuple[int, ...], new: tuple[int, ...] | None = None,
    fmt: str = "bf16", cache_fmt: str = "", layout: str = "NHD", poison: bool = False,
    lse: bool = False, sinks: bool = False, tree: bool = False, mla: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Call:  # fmt: skip
    page_size, heads, group, width, v_width = 16, 2, 4, 64, 64
    if mla:  # one cached row for all heads, whose first part is the value
        heads, group, width, v_width = 1, 16, 80, 64
    cache_fmt = cache_fmt or fmt
    table, used = _pages_of(case, list(seq_lens), page_size, poison=poison)
    rows = len(seq_lens) if new is None else sum(new)

    def arrange(pages: Array) -> Array:
        return pages.swapaxes(1, 2) if layout == "HND" else pages

    query = case.place(
        from_values(case.rng.standard_normal((rows, heads * group, width)), fmt), fmt, name="query"
    )
    keys = _cache_values(case, cache_fmt, used, heads, width, poison)
    k_cache = case.place(arrange(keys), cache_fmt, name="k_cache")
    if mla:
        v_cache = k_cache.sub(lambda a: a[..., :v_width])
    else:
        values = _cache_values(case, cache_fmt, used, heads, v_width, poison)
        v_cache = case.place(arrange(values), cache_fmt, name="v_cache")
    arguments: dict[str, Any] = {
        "query": query, "k_cache": k_cache, "v_cache": v_cache, "block_table": table,
        "seq_lens": case.place(np.array(seq_lens, np.int32), "int32", name="seq_lens"),
        **(options or {}),
    }  # fmt: skip
    if new is not None:
        arguments["query_lens"] = case.place(np.array(new, np.int32), "int32", name="query_lens")
    if layout != "NHD":
        arguments["layout"] = layout
    if sinks:
        loud = (4 * case.rng.standard_normal(heads * group)).astype(np.float32)
        arguments["sinks"] = case.place(loud, "fp32", name="sinks")
    if tree and new is not None:
        arguments["tree_mask"] = case.place(_tree_mask(case, new), "bool", name="tree_mask")
    inputs = dict(arguments)
    out = arguments["out"] = case.output(fmt, (rows, heads * group, v_width), name="out")
    if lse:
        arguments["lse_out"] = case.output("fp32", (rows, heads * group), name="lse_out")

    def compare() -> bool:
        views = _mirrors(inputs)
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
            case.note_unless_near("lse_out", seen, want_lse, of_lse)
            arguments["lse_out"].take_over()
        return any(faults.values())

    return Call(arguments, compare)


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


@_case("merge_states", "bf16", compared="merge")
@_case("merge_states", "fp32", compared="merge", fmt="fp32")
@_case("merge_states", "base 2", compared="merge", base="2")
@_case("merge_states", "one of two saw no key", compared="merge", unseen="one")
@_case("merge_states", "neither saw a key", compared="merge", unseen="both")
def _merge_states(case: Arguments, *, fmt: str = "bf16", base: str = "e", unseen: str = "") -> Call:
    tokens, heads, width = 7, 4, 64
    arguments: dict[str, Any] = {}
    for side in "ab":
        values = case.rng.standard_normal((tokens, heads, width))
        logs = (3 * case.rng.standard_normal((tokens, heads))).astype(np.float32)
        if unseen and (side == "b" or unseen == "both"):
            values[2:4], logs[2:4] = (np.nan if side == "b" else 0), -np.inf  # ignored, what it is
        arguments[f"out_{side}"] = case.place(from_values(values, fmt), fmt, name=f"out_{side}")
        arguments[f"lse_{side}"] = case.place(logs, "fp32", name=f"lse_{side}")
    if base != "e":
        arguments["lse_base"] = base
    inputs = dict(arguments)
    out = arguments["out"] = case.output(fmt, (tokens, heads, width), name="out")
    lse = arguments["lse_out"] = case.output("fp32", (tokens, heads), name="lse_out")

    def compare() -> bool:
        views = _mirrors(inputs)
        want, want_lse = reference.merge_states(**views)
        outs = np.stack([reference.decode(views[f"out_{side}"], fmt) for side in "ab"])
        lses = np.stack([views[f"lse_{side}"].astype(np.float64) for side in "ab"])
        allowed, of_lse = merge_errors(outs, lses, want, want_lse, fmt)
        allowed[np.isneginf(want_lse)] = 0
        got = reference.decode(np.ascontiguousarray(out.live()), fmt)
        case.note_unless_near("out", got, want, allowed)
        case.note_unless_near("lse_out", lse.live().astype(np.float64), want_lse, of_lse)
        out.take_over()
        lse.take_over()
        return False

    return Call(arguments, compare)


# copy_pages, slot_mapping ---------------------------------------------------------------------


@_case("copy_pages", "pages")
@_case("copy_pages", "no pages", pairs=((), ()))
@_case("copy_pages", "K and V", arrays=2)
@_case("copy_pages", "padding", "padding", pairs=((8, -1, 0, 3), (1, 6, -4, 5)))
@_case("copy_pages", "past the end", "past the end", pairs=((8, 9, 0, 3), (1, 6, 9, 5)))
@_case("copy_pages", "views", "views", views=True)
def _copy_pages(
    case: Arguments, *, pairs: tuple[tuple[int, ...], tuple[int, ...]] = ((8, 0, 3), (1, 6, 5)),
    arrays: int = 1, views: bool = False,
) -> Call:  # fmt: skip
    shape, cut = (9, PAGE_SIZE, HEADS, 24), None
    if views:
        shape, cut = (27, PAGE_SIZE, HEADS, 31), lambda a: a[9:18, ..., :24]
    caches = tuple(case.output("bf16", shape, cut, name=f"cache {i}") for i in range(arrays))
    src, dst = (
        case.slots(pages, name=name)
        for pages, name in zip(pairs, ("src_pages", "dst_pages"), strict=True)
    )
    cache = caches if arrays > 1 else caches[0]
    return _copied({"cache": cache, "src_pages": src, "dst_pages": dst}, "copy_pages")


@_case("slot_mapping", "a token per sequence", appended=(1, 1, 1, 1))
@_case("slot_mapping", "ragged", appended=(5, 0, 16, 3))
@_case("slot_mapping", "whole sequences", appended=(5, 33, 16, 8))
@_case("slot_mapping", "poisoned table", "poison", appended=(5, 0, 16, 3), poison=True)
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
