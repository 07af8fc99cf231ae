"""From the arguments of a call on RoPE to its plan: the checks, and the launches that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import devices, faults
from ..arrays import describe
from . import checks
from .rope_launch import REPORT_POSITIONS, REPORT_SLOTS, ROTATED, Part, Rotation, Store, Turned
from .rope_plan import NAMES, OUTPUTS, AlternatePlan, RopePlan
from .side import Side, require_rows, sides_of_kv, sides_of_mla

MLA_NAMES = tuple(
    {"key": "rope_key", "value": "latent", "k_cache": "cache", "v_cache": "cache",
     "k_scale": "scale", "v_scale": "scale"}.get(name, name)
    for name in NAMES
)  # fmt: skip


def as_tuple(sections: Any) -> Any:
    """Return a list of sections as a tuple, for only that can be part of a signature."""
    return tuple(sections) if isinstance(sections, list) else sections


@dataclass(frozen=True)
class Turning:
    """How pairs turn, as the caller says it."""

    interleaved: Any
    sections: Any
    sections_interleaved: Any
    eps: Any

    def rotation(self, operation: str, given: dict[str, Any]) -> Rotation:
        fault_id = faults.operation_id(operation, "positions")
        return rotation_of(
            fault_id, given, self.interleaved, self.sections, self.sections_interleaved, self.eps
        )


def plan_rotation(given: dict[str, Any], turning: Turning, alignment: int) -> RopePlan:
    """Check and plan `apply_rope`."""
    checks.require_given(given, ("key",))
    checks.require_same_device(given)
    rotation = turning.rotation("apply_rope", given)
    query = turned_of(given, "query", rotation)
    key = turned_of(given, "key", rotation)
    return _plan("apply_rope", NAMES, given, rotation, parts_of(query, key, None, None), None,
                 alignment)  # fmt: skip


def plan_store(
    given: dict[str, Any],
    turning: Turning,
    layout: Any,
    skip_slot: Any,
    alternate: bool,
    alignment: int,
) -> RopePlan | AlternatePlan:
    """Check and plan `rope_store_kv`."""
    checks.require_given(given, ("key", "value", "k_cache", "v_cache", "slot_mapping"))
    checks.require_same_device(given)
    rotation = turning.rotation("rope_store_kv", given)
    query = turned_of(given, "query", rotation)
    key = turned_of(given, "key", rotation, written="key_out" in given)
    k, v = sides_of_kv(given, layout)
    store = _store("rope_store_kv", given, "value", v, rotation, skip_slot)

    def planned(parts: list[Part]) -> RopePlan:
        return _plan("rope_store_kv", NAMES, given, rotation, parts, store, alignment)

    if not alternate:
        return planned(parts_of(query, key, k, v))
    written = key is not None and key.out is not None
    whole = RopePlan(
        "rope_store_kv", NAMES, OUTPUTS, devices.get(store.slots.device), given["key"].library,
        rotation, parts_of(query, key, k, v), store, alignment, loads=False,
    )  # fmt: skip
    first = parts_of(query, key if written else None, None, None)
    then_k = Part(key=key, k=k, turns=not written, reports=0 if first else REPORT_POSITIONS)
    then_v = Part(v=v, reports=REPORT_SLOTS)
    return AlternatePlan(whole, planned(first), planned([then_k]), planned([then_v]))


def plan_mla(given: dict[str, Any], turning: Turning, skip_slot: Any, alignment: int) -> RopePlan:
    """Check and plan `rope_store_mla`."""
    checks.require_given(given, ("latent", "rope_key", "cache", "slot_mapping"))
    checks.require_same_device(given)
    rotation = turning.rotation("rope_store_mla", given)
    query = turned_of(given, "query", rotation)
    key = turned_of(
        {**given, "key": given["rope_key"]}, "key", rotation, written="key_out" in given
    )
    latent, rope = sides_of_mla(given)
    store = _store("rope_store_mla", given, "latent", latent, rotation, skip_slot)
    offset = latent.rows.width * latent.cache_format.itemsize
    made = _plan(
        "rope_store_mla", MLA_NAMES, given, rotation, parts_of(query, key, rope, latent), store,
        alignment | offset & 15,
    )  # fmt: skip
    made.offsets = tuple(offset if name == "k_cache" else 0 for name in NAMES)
    return made


def _store(
    operation: str,
    given: dict[str, Any],
    name: str,
    v: Side,
    rotation: Rotation,
    skip_slot: Any,
) -> Store:
    """Check the slots, and the rows that do not turn."""
    slots = given["slot_mapping"]
    checks.indices(slots, "slot_mapping")
    if slots.shape[0] > rotation.num_tokens:
        raise ValueError(
            f"slot_mapping: expected at most {rotation.num_tokens} slots, one a position, "
            f"got {slots.shape[0]}"
        )
    require_rows(v, name, slots.shape[0])
    if v.rows_format.name not in ROTATED:
        raise TypeError(f"{name}: expected {', '.join(ROTATED)}, got {describe(given[name])}")
    skip = checks.slot_number(skip_slot, "skip_slot")
    return Store(slots, skip, faults.operation_id(operation, "slot_mapping"))


def _plan(
    operation: str,
    names: tuple[str, ...],
    given: dict[str, Any],
    rotation: Rotation,
    parts: list[Part],
    store: Store | None,
    alignment: int,
) -> RopePlan:
    positions = given["positions"]
    first = next((given[n] for n in ("query", "key", "rope_key") if n in given), positions)
    return RopePlan(
        operation, names, OUTPUTS, devices.get(positions.device), first.library,
        rotation, parts, store, alignment,
    )  # fmt: skip


# --- The parts of a call --------------------------------------------------------------------------


def turned_of(
    given: dict[str, Any], name: str, rotation: Rotation, *, written: bool = True
) -> Turned | None:
    """Check query or key, where it goes, and its norm."""
    own = given.get(name)
    if own is None:
        return None
    num_tokens = rotation.num_tokens
    public = "rope_key" if "rope_key" in given and name == "key" else name
    own_format = checks.number_format(own, public)
    if own_format.name not in ROTATED:
        raise TypeError(f"{public}: expected {', '.join(ROTATED)}, got {describe(own)}")
    if own.ndim == 2 and public != "rope_key":
        raise ValueError(f"{public}: expected (tokens, heads, width), got {describe(own)}")
    rows = checks.rows(own, public)
    if rows.num_tokens < num_tokens:
        raise ValueError(f"{public}: expected at least {num_tokens} rows, got {describe(own)}")
    if rows.width % 2:
        raise ValueError(f"{public}: expected an even head dimension, got {describe(own)}")
    if rows.width < rotation.dim:
        wanted = f"heads of at least {rotation.dim}, the width of rope_table"
        raise ValueError(f"{public}: expected {wanted}, got {describe(own)}")
    out = None
    if written:
        target, target_name = given[f"{name}_out"], f"{name}_out"
        if target.pointer == own.pointer and target.strides == own.strides:
            target_name = public
        checks.require_output(target, target_name)
        out = checks.rows(target, target_name)
        if target.format != own.format or target.shape[1:] != own.shape[1:]:
            raise ValueError(f"{target_name}: expected {describe(own)}, got {describe(target)}")
        if out.num_tokens < num_tokens:
            raise ValueError(f"{target_name}: expected {num_tokens} rows, got {describe(target)}")
    norm = given.get(f"{name}_norm")
    if norm is not None:
        if norm.format not in ("fp32", own.format):
            wanted = f"fp32 or {own.format}"
            raise TypeError(f"{name}_norm: expected {wanted}, got {describe(norm)}")
        if norm.shape != (rows.width,) or (rows.width > 1 and norm.strides[0] != norm.itemsize):
            wanted = f"contiguous ({rows.width},)"
            raise ValueError(f"{name}_norm: expected {wanted}, got {describe(norm)}")
    return Turned(rows, out, own_format, norm)


def rotation_of(
    operation_fault: int,
    given: dict[str, Any],
    interleaved: Any,
    sections: Any,
    sections_interleaved: Any,
    eps: Any,
) -> Rotation:
    """Check the table, the positions and how pairs use them."""
    checks.require_given(given, ("rope_table", "positions"))
    table, positions = given["rope_table"], given["positions"]
    if table.format != "fp32":
        raise TypeError(f"rope_table: expected float32, got {describe(table)}")
    if table.ndim != 2 or table.shape[1] % 2 or table.shape[1] < 2:
        raise ValueError(
            f"rope_table: expected (max_positions, even rotary_dim), got {describe(table)}"
        )
    checks.require_contiguous(table, "rope_table")
    if positions.format not in ("int32", "int64"):
        raise TypeError(f"positions: expected int32 or int64, got {describe(positions)}")
    if sections is None:
        if positions.ndim != 1:
            raise ValueError(f"positions: expected (tokens,), got {describe(positions)}")
    else:
        sections = _sections(sections, table.shape[1] // 2)
        if positions.ndim != 2 or positions.shape[0] != 3:
            raise ValueError(f"positions: expected (3, tokens), got {describe(positions)}")
    checks.require_number(eps, "eps")
    if not eps >= 0:
        raise ValueError(f"eps: expected at least 0, got {eps!r}")
    return Rotation(
        table, positions, bool(interleaved), sections, bool(sections_interleaved), float(eps),
        operation_fault,
    )  # fmt: skip


def _sections(sections: Any, pairs: int) -> tuple[int, int, int]:
    try:
        counts = [int(n) for n in sections]
    except (TypeError, ValueError):
        raise TypeError(f"sections: expected three ints, got {sections!r}") from None
    if len(counts) != 3 or min(counts) < 0 or sum(counts) != pairs:
        raise ValueError(f"sections: expected three that sum to {pairs}, got {sections!r}")
    return counts[0], counts[1], counts[2]


def parts_of(
    query: Turned | None, key: Turned | None, k: Side | None, v: Side | None
) -> list[Part]:
    """Put as much as can be into one launch: what differs in format takes one of its own."""
    parts = []
    if query is not None and key is not None and query.rows.width != key.rows.width:
        wanted = f"heads of {key.rows.width} like the key's"
        raise ValueError(f"query: expected {wanted}, got heads of {query.rows.width}")
    with_query = query is None or (
        key is not None
        and query.format is key.format
        and (query.norm is None or key.norm is None or query.norm.format == key.norm.format)
    )
    with_value = v is None or (
        k is not None and v.rows_format is k.rows_format and v.cache_format is k.cache_format
    )
    if key is not None or v is not None:
        parts.append(Part(query if with_query else None, key, k, v if with_value else None))
    if query is not None and not with_query:
        parts.append(Part(query=query, reports=0 if parts else REPORT_POSITIONS))
    if v is not None and not with_value:
        parts.append(Part(v=v, reports=0))
    return parts
