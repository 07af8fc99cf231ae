"""A store as array expressions: what runs where its kernel cannot be compiled."""

from __future__ import annotations

from typing import Any

from ..arrays import ArrayView
from ..devices.protocol import Device
from . import expressions
from .store_launch import Side


def store_side(
    device: Device,
    side: Side,
    rows: ArrayView,
    cache: ArrayView,
    slots: ArrayView,
    skip_slot: int,
) -> None:
    """Write the rows of one side, (tokens, heads, width), into its cache by pages.

    Notes
    -----
    Choosing the valid slots waits for the device, so this is not legal in a capture.
    """
    numbers = device.carrier(slots)
    valid = (numbers >= 0) & (numbers < side.cache.num_slots) & (numbers != skip_slot)
    chosen = numbers[valid]
    where = (chosen // side.cache.page_size, chosen % side.cache.page_size)
    values = device.carrier(rows)[valid]
    target = device.carrier(cache)
    scales = None if side.scale_cache is None else device.carrier(side.scale_cache)
    if side.source is side.target:
        target[where] = values
        if scales is not None:
            scales[chosen] = 1
        return
    values = expressions.decode(values, side.source.name)
    if scales is not None:
        found = expressions.dynamic_scale(values, side.target.name)
        scales[chosen] = found
        values = expressions.divide(values, found[..., None])
    elif side.target.quantised:
        values = expressions.divide(values, _static_scale(device, side, values))
    target[where] = expressions.encode(values, side.target.name)


def _static_scale(device: Device, side: Side, values: Any) -> Any:
    """Return the scale, to divide (tokens, heads, width) by."""
    if side.scale.array is None:
        return values.dtype.type(side.scale.value)
    return device.carrier(side.scale.array).reshape(-1, 1)


def report_faults(device: Device, slots: ArrayView, num_slots: int, operation: int) -> None:
    """Note the slots past the end in the device's fault record, as a kernel would."""
    numbers = device.carrier(slots)
    bad = (numbers >= num_slots).nonzero()[0]
    if len(bad) == 0:
        return
    record = device.fault_array()
    if int(record[0]) == 0:
        record[1], record[2], record[3] = operation, bad[0], numbers[bad[0]]
    record[0] += len(bad)
