"""A rotation as array expressions: what runs where its kernel cannot be compiled."""

from __future__ import annotations

from typing import Any

from ..arrays import ArrayView
from ..devices.protocol import Device
from . import expressions
from .rope_launch import Rotation


def valid_tokens(device: Device, rotation: Rotation, positions: ArrayView) -> Any:
    """Return which tokens have all their positions inside the table."""
    numbers = device.carrier(positions)
    inside = (numbers >= 0) & (numbers < rotation.table.shape[0])
    return inside.all(axis=0) if inside.ndim == 2 else inside


def report_positions(device: Device, rotation: Rotation, positions: ArrayView) -> None:
    """Note the positions outside the table in the device's fault record."""
    numbers = device.carrier(positions)
    numbers = numbers if numbers.ndim == 2 else numbers[None]
    outside = (numbers < 0) | (numbers >= rotation.table.shape[0])
    bad = outside.any(axis=0).nonzero()[0]
    if len(bad):
        token = bad[0]
        axis = outside[:, token].argmax()  # one fault a token: its first such position
        expressions.note_fault(device, len(bad), rotation.fault_id, token, numbers[axis, token])


@expressions.QUIET
def turned_rows(
    device: Device,
    rotation: Rotation,
    rows: ArrayView,
    norm: ArrayView | None,
    table: ArrayView,
    positions: ArrayView,
    valid: Any,
) -> Any:
    """Return the rows of the valid tokens turned, as bits of their own format.

    In float64, where the products are exact, so that nothing cancels that a kernel keeps.
    """
    bits = device.carrier(rows)[valid]
    values = expressions.decode(bits, rows.format)
    xp = expressions.module_of(values)
    if norm is not None:
        mean = (values * values).mean(axis=-1, keepdims=True, dtype=xp.float32)
        weight = expressions.decode(device.carrier(norm), norm.format)
        values = values / xp.sqrt(mean + xp.float32(rotation.epsilon)) * weight
    cos, sin = _angles(device, rotation, table, positions, valid)
    half = rotation.dim // 2
    if rotation.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    x, y = (values[..., part].astype(xp.float64) for part in (first, second))
    values[..., first] = x * cos - y * sin
    values[..., second] = y * cos + x * sin
    changed = slice(None) if norm is not None else slice(0, 2 * half)
    bits[..., changed] = expressions.encode(values[..., changed], rows.format)
    return bits


def _angles(
    device: Device, rotation: Rotation, table: ArrayView, positions: ArrayView, valid: Any
) -> tuple[Any, Any]:
    """Return cos and sin, (tokens, 1, pairs)."""
    rows = device.carrier(table)
    numbers = device.carrier(positions)
    half = rotation.dim // 2
    if rotation.sections is None:
        chosen = rows[numbers[valid]]
        return chosen[:, None, :half], chosen[:, None, half:]
    xp = expressions.module_of(rows)
    by_axis = rows[numbers[:, valid]]  # (3, tokens, rotary_dim)
    axis = xp.asarray(pair_axes(half, rotation.sections, rotation.sections_interleaved))
    pairs = xp.arange(half)
    cos, sin = by_axis[axis, :, pairs].T, by_axis[axis, :, half + pairs].T
    return cos[:, None], sin[:, None]


def pair_axes(pairs: int, sections: tuple[int, int, int], interleaved: bool) -> list[int]:
    """Return the axis, of three, whose position turns each pair.

    >>> pair_axes(6, (2, 2, 2), False), pair_axes(6, (3, 2, 1), True)
    ([0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 0])
    """
    if not interleaved:
        return [0] * sections[0] + [1] * sections[1] + [2] * sections[2]
    return [i % 3 if i % 3 and i < 3 * sections[i % 3] else 0 for i in range(pairs)]
