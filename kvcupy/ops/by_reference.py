"""Operations by their reference, on the host device where no kernel can be compiled.

The arrays of a call become NumPy arrays over the same memory, in the dtype of their format, or
`FourBitRows`. `kvcupy.reference` computes, what it returns unrounded is rounded once to the format
of the output, and its faults go to the device's record as a kernel's would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import formats, reference
from ..arrays import ArrayView, view
from ..devices.protocol import Device
from .checks import is_array

Faults = list[tuple[int, int]]


def run(
    device: Device, operation: str, arguments: Iterable[tuple[str, Any]],
    options: tuple[Any, ...], fault_ids: Mapping[str, int],
) -> None:  # fmt: skip
    """Run an operation on arrays of the host, which its plan has checked.

    `arguments` are names and arrays, numbers or None; the rest is as in its plan.
    """
    values = {
        name: array(device, view(x)) if is_array(x) else x for name, x in arguments if x is not None
    }
    for argument, own_faults in _OPERATIONS[operation](values, *options).items():
        if own_faults:
            note_fault(device, len(own_faults), fault_ids[argument], *own_faults[0])


def array(device: Device, v: ArrayView) -> Any:
    """Return what the reference takes for a view: an array over its memory, or `FourBitRows`."""
    if v.scales is None:
        return device.carrier(v).view(formats.numpy_dtype(v.format))
    codes, scales = (device.carrier(part) for part in (v.codes, v.scales))
    scales = scales.view(reference.FOUR_BIT[v.format].scale_carrier)
    return reference.FourBitRows(codes, scales, v.format, v.rotated_width, v.scale_rule)


def note_fault(device: Device, count: int, operation: int, position: Any, value: Any) -> None:
    """Note faults in the record of the host device, as `report_fault` of the kernels does."""
    record = device.fault_array()
    if record[0] == 0:
        record[1:] = operation, position, value
    record[0] += count


def _write(target: Any, values: Any, where: Any = ...) -> None:
    """Round float64 values to the format of an array."""
    fmt = reference.format_of(target)
    reference.bits_of(target, fmt)[where] = reference.bits_of(reference.encode(values, fmt), fmt)


# --- By operation: the arguments by name, then the options; what is returned are faults -----------


def _store_kv(values: dict[str, Any], layout: str, skip_slot: int) -> dict[str, Faults]:
    return {"slot_mapping": reference.store_kv(**values, layout=layout, skip_slot=skip_slot)}


def _store_mla(values: dict[str, Any], skip_slot: int) -> dict[str, Faults]:
    return {"slot_mapping": reference.store_mla(**values, skip_slot=skip_slot)}


def _gather_kv(values: dict[str, Any], layout: str, dtype: str | None) -> dict[str, Faults]:
    return {"slots": reference.gather_kv(**values, layout=layout)}


def _rotated(
    values: dict[str, Any], rotary: tuple[Any, ...], names: Sequence[str]
) -> tuple[dict[str, Any], Faults]:
    """Rotate some arrays of rows, and write those that have an output.

    Returns the rotated rows by name; and (token, position) outside the table, once for each token,
    which was left alone.
    """
    interleaved, sections, sections_interleaved, eps = rotary
    table, positions = values["rope_table"], values["positions"]
    outside = dict(reversed(reference.position_faults(positions, len(table))))
    inside = np.setdiff1d(np.arange(positions.shape[-1]), list(outside))
    rotated = {}
    for name in names:
        if name not in values:
            continue
        norm = values.get(f"{name}_norm")
        _, rows = reference.apply_rope(
            None, values[name], table, positions, interleaved=interleaved, sections=sections,
            sections_interleaved=sections_interleaved, key_norm=norm, eps=eps,
        )  # fmt: skip
        rotated[name] = rows
        if (out := values.get(f"{name}_out")) is not None:
            fmt = reference.format_of(rows)
            reference.bits_of(out, fmt)[inside] = reference.bits_of(rows, fmt)[inside]
    return rotated, sorted(outside.items())


def _apply_rope(values: dict[str, Any], rotary: tuple[Any, ...]) -> dict[str, Faults]:
    return {"positions": _rotated(values, rotary, ("query", "key"))[1]}


def _rope_store_kv(
    values: dict[str, Any], rotary: tuple[Any, ...], layout: str, skip_slot: int, *_: Any
) -> dict[str, Faults]:
    rotated, outside = _rotated(values, rotary, ("query", "key"))
    names = "value", "k_cache", "v_cache", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache"
    past = reference.store_kv(
        rotated["key"], slot_mapping=_slots_to_store(values["slot_mapping"], outside),
        **{name: values[name] for name in names if name in values},
        layout=layout, skip_slot=skip_slot,
    )  # fmt: skip
    return {"positions": outside, "slot_mapping": past}


def _rope_store_mla(
    values: dict[str, Any], rotary: tuple[Any, ...], skip_slot: int
) -> dict[str, Faults]:
    rotated, outside = _rotated(values, rotary, ("query", "rope_key"))
    past = reference.store_mla(
        values["latent"], rotated["rope_key"], values["cache"],
        _slots_to_store(values["slot_mapping"], outside), scale=values.get("scale"),
        skip_slot=skip_slot,
    )  # fmt: skip
    return {"positions": outside, "slot_mapping": past}


def _slots_to_store(slots: Any, outside: Faults) -> Any:
    """Return slots, and -1 for tokens that were not rotated."""
    tokens = [token for token, _ in outside if token < len(slots)]
    if tokens:
        slots = slots.copy()
        slots[tokens] = -1
    return slots


def _paged_attention(values: dict[str, Any], options: Any, *_: Any) -> dict[str, Faults]:
    out, lse_out = values.pop("out"), values.pop("lse_out", None)
    sums, misplaced = values.pop("cu_query_lens", None), []
    if sums is not None and "query_lens" not in values:
        least = np.maximum(np.append(0, sums[:-1]), 0)
        wrong = np.flatnonzero((sums < least) | (sums > len(values["query"])))
        misplaced = [(int(i), int(sums[i])) for i in wrong]
        values["query_lens"] = np.maximum(np.diff(np.clip(sums, 0, len(values["query"]))), 0)
    want, lse, others = reference.paged_attention(
        **values, layout=options.layout, sm_scale=options.sm_scale, causal=options.causal,
        window=options.window or None, sink_tokens=options.sink_keys,
        logits_soft_cap=options.soft_cap or None, interleaved=options.interleaved,
        rotary_start=options.rotary_start,
    )  # fmt: skip
    rows = len(want)
    if (counts := values.get("query_lens")) is not None:
        rows = min(rows, int(np.maximum(counts, 0).sum(dtype=np.int64)))
    _write(out, want[:rows], slice(rows))
    if lse_out is not None:
        lse_out[:rows] = lse[:rows]
    if sums is not None:
        others.pop("query_lens", None)
    return {**others, "cu_query_lens": misplaced}


def _merge_states(values: dict[str, Any], lse_base: str) -> dict[str, Faults]:
    out, lse_out = values.pop("out"), values.pop("lse_out")
    merged, lse = reference.merge_states(**values, lse_base=lse_base)
    _write(out, merged)
    lse_out[...] = lse
    return {}


def _copy_pages(values: dict[str, Any]) -> dict[str, Faults]:
    src, dst = reference.copy_pages(values["cache"], values["src_pages"], values["dst_pages"])
    known = {position for position, _ in src}  # a pair is reported once
    return {"src_pages": src, "dst_pages": [fault for fault in dst if fault[0] not in known]}


def _shift_pages(values: dict[str, Any], interleaved: bool, start: int | None) -> dict[str, Faults]:
    src, dst, outside = reference.shift_pages(**values, interleaved=interleaved, start=start)
    known = {position for position, _ in src}  # a pair is reported once
    return {
        "pages": src, "out_pages": [fault for fault in dst if fault[0] not in known],
        "delta": outside,
    }  # fmt: skip


def _store_state(values: dict[str, Any], skip_slot: int) -> dict[str, Faults]:
    states, caches = _several(values, "states"), _several(values, "caches")
    past = reference.store_state(states, caches, values["slots"], skip_slot=skip_slot)
    return {"slots": past}


def _gather_state(values: dict[str, Any], skip_slot: int) -> dict[str, Faults]:
    caches, out = _several(values, "caches"), _several(values, "out")
    return {"slots": reference.gather_state(caches, values["slots"], out=out, skip_slot=skip_slot)}


def _several(values: dict[str, Any], name: str) -> tuple[Any, ...]:
    """Return an argument that is one array, or two."""
    return tuple([values[n] for n in (name, f"{name}[0]", f"{name}[1]") if n in values])


def _update_conv_state(values: dict[str, Any], skip_slot: int) -> dict[str, Faults]:
    past, misplaced = reference.update_conv_state(**values, skip_slot=skip_slot)
    return {"slots": past, "cu_query_lens": misplaced}


def _slot_mapping(values: dict[str, Any], page_size: int) -> dict[str, Faults]:
    past, misfits = reference.fill_slot_mapping(**values, page_size=page_size)
    return {"append_lens": misfits, "seq_lens": past}


_OPERATIONS: dict[str, Callable[..., dict[str, Faults]]] = {
    "store_kv": _store_kv, "store_mla": _store_mla, "gather_kv": _gather_kv,
    "apply_rope": _apply_rope, "rope_store_kv": _rope_store_kv, "rope_store_mla": _rope_store_mla,
    "paged_attention": _paged_attention, "merge_states": _merge_states, "copy_pages": _copy_pages,
    "shift_pages": _shift_pages, "slot_mapping": _slot_mapping, "store_state": _store_state,
    "gather_state": _gather_state, "update_conv_state": _update_conv_state,
}  # fmt: skip
