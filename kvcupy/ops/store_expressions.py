"""A store as array expressions: what runs where its kernel cannot be compiled."""

from __future__ import annotations

from typing import Any

from ..arrays import ArrayView
from ..devices.protocol import Device
from . import expressions
from .side import Side


def store_rows(
    device: Device,
    side: Side,
    rows: Any,
    cache: ArrayView,
    slots: ArrayView,
    skip_slot: int,
    scale: ArrayView | None,
    scale_cache: ArrayView | None,
    allowed: Any = True,
) -> None:
    """Write the rows of one side into its cache.

    Parameters
    ----------
    rows : bits of the rows, (tokens, heads, width), as the device's own array
    cache : by pages, (num_pages, page_size, heads, width)
    allowed : which tokens may be stored at all

    Notes
    -----
    Choosing the valid slots waits for the device, so this is not legal in a capture.
    """
    numbers = device.carrier(slots)
    valid = (numbers >= 0) & (numbers < side.cache.num_slots) & (numbers != skip_slot) & allowed
    chosen = numbers[valid]
    where = (chosen // side.cache.page_size, chosen % side.cache.page_size)
    values = rows[valid]
    target = device.carrier(cache)
    scales = None if scale_cache is None else device.carrier(scale_cache)
    if side.rows_format is side.cache_format:
        target[where] = values
        if scales is not None:
            scales[chosen] = 1
        return
    values = expressions.decode(values, side.rows_format.name)
    if scales is not None:
        found = expressions.dynamic_scale(values, side.cache_format.name)
        scales[chosen] = found
        values = expressions.divide(values, found[..., None])
    elif side.cache_format.quantised:
        values = expressions.divide(values, static_scale(device, side, values, scale))
    target[where] = expressions.encode(values, side.cache_format.name)


def static_scale(device: Device, side: Side, values: Any, scale: ArrayView | None) -> Any:
    """Return the scale that goes with float32 values (tokens, heads, width)."""
    if scale is None:
        return values.dtype.type(side.scale.value)
    return device.carrier(scale).reshape(-1, 1)


def report_slots(
    device: Device,
    slots: ArrayView,
    num_slots: int,
    skip_slot: int,
    operation: int,
    allowed: Any = True,
) -> None:
    """Note the slots past the end in the device's fault record, as a kernel would."""
    numbers = device.carrier(slots)
    bad = ((numbers >= num_slots) & (numbers != skip_slot) & allowed).nonzero()[0]
    if len(bad):
        expressions.note_fault(device, len(bad), operation, bad[0], numbers[bad[0]])
