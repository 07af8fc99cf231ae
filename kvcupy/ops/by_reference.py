"""Operations by their reference, on the host device where no kernel can be compiled.

The arrays of a call become NumPy arrays over the same memory, in the dtype of their format, or
`FourBitRows`. They and the options are keyword arguments of the function in `kvcupy.reference` that
has the operation's name. Unrounded results are rounded once to the output's format, and faults are
written to the device's fault record, as by a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .. import formats, reference
from ..arrays import ArrayView, view
from ..devices.protocol import Device
from .checks import is_array

Faults = list[tuple[int, int]]

FAULTS = {
    **dict.fromkeys(("store_kv", "store_mla"), ("slot_mapping",)),
    **dict.fromkeys(("rope_store_kv", "rope_store_mla"), ("positions", "slot_mapping")),
    **dict.fromkeys(("gather_kv", "store_state", "gather_state"), ("slots",)),
    "apply_rope": ("positions",), "copy_pages": ("src_pages", "dst_pages"),
    "shift_pages": ("pages", "out_pages", "delta"), "update_conv_state": ("slots", "cu_query_lens"),
}  # fmt: skip
"""By operation, the arguments whose faults the reference returns, in this order."""


def run(
    device: Device, operation: str, arguments: Iterable[tuple[str, Any]],
    options: Mapping[str, Any], fault_ids: Mapping[str, int],
) -> None:  # fmt: skip
    """Run an operation on arrays, numbers or None of the host, which its plan has checked."""
    values = dict(options)
    for name, x in arguments:
        if x is not None:
            values[name] = array(device, view(x)) if is_array(x) else x
    faults = _OTHERS.get(operation, _call)(operation, values)
    for argument, noted in faults.items():
        if noted:
            note_fault(device, len(noted), fault_ids[argument], *noted[0])


def array(device: Device, v: ArrayView) -> Any:
    """Return an argument of the reference: an array over its memory, or `FourBitRows`."""
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


def _call(operation: str, values: dict[str, Any]) -> dict[str, Faults]:
    faults = getattr(reference, operation)(**values)
    by_argument = faults if isinstance(faults, tuple) else (faults,)
    return dict(zip(FAULTS[operation], by_argument, strict=True))


def _gather_kv(operation: str, values: dict[str, Any]) -> dict[str, Faults]:
    del values["dtype"]  # the outputs are allocated
    return _call(operation, values)


def _of_states(operation: str, values: dict[str, Any]) -> dict[str, Faults]:
    """Pass two arrays, `caches[0]` and `caches[1]`, as a tuple."""
    several: dict[str, Any] = {}
    for name, value in values.items():
        whole, is_one_of_two, _ = name.partition("[")
        several[whole] = (*several.get(whole, ()), value) if is_one_of_two else value
    return _call(operation, several)


def _apply_rope(operation: str, values: dict[str, Any]) -> dict[str, Faults]:
    outputs = values.pop("query_out", None), values.pop("key_out", None)
    rotated = reference.apply_rope(**{"query": None, "key": None} | values)
    faults = _once_a_token(
        reference.position_faults(values["positions"], len(values["rope_table"]))
    )
    inside = np.setdiff1d(np.arange(values["positions"].shape[-1]), [token for token, _ in faults])
    for out, rows in zip(outputs, rotated, strict=True):
        if out is not None and rows is not None:
            fmt = reference.format_of(rows)
            reference.bits_of(out, fmt)[inside] = reference.bits_of(rows, fmt)[inside]
    return {"positions": faults}


def _rope_store(operation: str, values: dict[str, Any]) -> dict[str, Faults]:
    values.pop("two_streams", None)
    key_outs = [values.pop(name, None) for name in ("key_out", "rope_key_out")]
    written = any(out is not None for out in key_outs)
    faults = _call(operation, {"query": None} | values | {"write_key": written})
    return faults | {"positions": _once_a_token(faults["positions"])}


def _once_a_token(faults: Faults) -> Faults:
    """Return the first fault of each token, which may have three positions."""
    return sorted(dict(reversed(faults)).items())


def _paged_attention(operation: str, values: dict[str, Any]) -> dict[str, Faults]:
    options = values.pop("options")
    values.pop("returns_lse", None)
    out, lse_out = values.pop("out"), values.pop("lse_out", None)
    sums, misplaced = values.pop("cu_query_lens", None), []
    if sums is not None and "query_lens" not in values:
        least = np.maximum(np.append(0, sums[:-1]), 0)
        wrong = np.flatnonzero((sums < least) | (sums > len(values["query"])))
        misplaced = [(int(i), int(sums[i])) for i in wrong]
        values["query_lens"] = np.maximum(np.diff(np.clip(sums, 0, len(values["query"]))), 0)
    want, lse, faults = reference.paged_attention(
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
        faults.pop("query_lens", None)
    return {**faults, "cu_query_lens": misplaced}


def _slot_mapping(operation: str, values: dict[str, Any]) -> dict[str, Faults]:
    past, misfits = reference.fill_slot_mapping(**values)
    return {"append_lens": misfits, "seq_lens": past}


def _merge_states(operation: str, values: dict[str, Any]) -> dict[str, Faults]:
    out, lse_out = values.pop("out"), values.pop("lse_out")
    merged, lse_out[...] = reference.merge_states(**values)
    _write(out, merged)
    return {}


def _write(target: Any, values: Any, where: Any = ...) -> None:
    """Round float64 values to the format of an array."""
    fmt = reference.format_of(target)
    reference.bits_of(target, fmt)[where] = reference.bits_of(reference.encode(values, fmt), fmt)


_OTHERS: dict[str, Callable[[str, dict[str, Any]], dict[str, Faults]]] = {
    "gather_kv": _gather_kv, "store_state": _of_states, "gather_state": _of_states,
    "apply_rope": _apply_rope, "rope_store_kv": _rope_store, "rope_store_mla": _rope_store,
    "paged_attention": _paged_attention, "merge_states": _merge_states,
    "slot_mapping": _slot_mapping,
}  # fmt: skip
"""Operations that are more than one call of their reference."""
