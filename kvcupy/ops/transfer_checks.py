"""What a transfer between two pools must satisfy, checked before anything moves."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import ArrayView, describe, overlap
from ..devices.protocol import Device
from .transfer_method import METHODS
from .transfer_route import Pages, PoolPages


@dataclass(frozen=True)
class Request:
    """The options of a transfer, checked. `layers` is in rising order; None: all."""

    layers: tuple[int, ...] | None
    method: str
    max_blocks: int | None
    convert: bool

    @classmethod
    def of(cls, layers: Any, method: Any, max_blocks: Any, convert: Any) -> Request:
        """Check the options."""
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if max_blocks is not None:
            if not _is_int(max_blocks):
                raise TypeError(f"max_blocks: expected None or an int, got {max_blocks!r}")
            if not 1 <= max_blocks < 2**31:
                raise ValueError(f"max_blocks: expected at least 1, got {max_blocks}")
            max_blocks = int(max_blocks)
        if not isinstance(convert, (bool, np.bool_)):
            raise TypeError(f"convert: expected a bool, got {convert!r}")
        return cls(_layers(layers), method, max_blocks, bool(convert))

    def slices(self, num_layers: int) -> list[slice]:
        """Return the layers as evenly spaced sets."""
        if self.layers is None:
            return [slice(0, num_layers, 1)]
        return [
            slice(run[0], run[-1] + 1, run[1] - run[0] if len(run) > 1 else 1)
            for run in evenly_spaced(self.layers)
        ]


def evenly_spaced(numbers: Iterable[int]) -> list[list[int]]:
    """Split rising numbers into runs of one step each, every run as long as it gets.

    >>> evenly_spaced([0, 1, 2, 5, 11, 17, 18])
    [[0, 1, 2], [5, 11, 17], [18]]
    """
    runs: list[list[int]] = []
    for n in numbers:
        run = runs[-1] if runs else []
        if run and (len(run) == 1 or n - run[-1] == run[-1] - run[-2]):
            run.append(n)
        else:
            runs.append([n])
    return runs


def require_pool(pool: Any, name: str) -> None:
    """Refuse what is no pool."""
    if not all(hasattr(pool, a) for a in ("groups", "device", "placement")):
        raise TypeError(f"{name}: expected a KVPool or MLAPool, got {type(pool).__name__}")


def pages_of(pool: Any) -> PoolPages:
    """Return the pages of a pool, described by address: nothing is kept alive."""
    on_device = pool.placement == "device"
    return PoolPages(
        tuple(
            (
                group.layers,
                Pages(
                    tuple(v.without_owner() for v in group.parts),
                    tuple(v.without_owner() for v in group.scale_parts),
                    on_device,
                ),
            )
            for group in pool.groups
        )
    )


def require_geometry(
    source: PoolPages, target: PoolPages, request: Request, devices: tuple[Device, Device],
    names: tuple[str, str],
) -> None:  # fmt: skip
    """Refuse pools that do not go together, and layers that they do not have."""
    src_name, dst_name = names
    src, dst = source.any_group, target.any_group
    if devices[0] is not devices[1]:
        raise ValueError(
            f"{dst_name}: expected one of {devices[0].name} like {src_name}, "
            f"got one of {devices[1].name}"
        )
    if len(src.parts) != len(dst.parts):
        kinds = {1: "an MLA pool", 2: "a pool of K and V"}
        raise ValueError(
            f"{dst_name}: expected {kinds[len(src.parts)]} like {src_name}, "
            f"got {kinds[len(dst.parts)]}"
        )
    shapes = zip(source.row_shapes, target.row_shapes, strict=True)
    for part, (a, b) in zip(("K", "V"), shapes, strict=False):
        if a != b:
            raise ValueError(
                f"{dst_name}: expected pages of (layers, page_size, heads, width) "
                f"{a} like {part} of {src_name}, got {b}"
            )
    if src.format != dst.format:
        if not request.convert:
            raise ValueError(
                f"{dst_name}: expected {src.format} like {src_name}, got {dst.format}; "
                "convert=True converts in transit"
            )
        if request.method == "copy":
            raise ValueError(
                'method: expected "kernel", "staged" or "auto" between pools of different '
                'formats, got "copy"'
            )
    elif bool(src.scales) != bool(dst.scales):
        own, other = ("scales", "none") if src.scales else ("no scales", "some")
        raise ValueError(f"{dst_name}: expected {own} like {src_name}, got {other}")
    num_layers = source.num_layers
    for layer in request.layers or ():
        if not 0 <= layer < num_layers:
            raise ValueError(f"layers: expected 0 to {num_layers - 1}, got {layer}")
    _require_separate(source.all, target.all, names)


def _require_separate(
    src: tuple[ArrayView, ...], dst: tuple[ArrayView, ...], names: tuple[str, str]
) -> None:
    """Refuse two pools that share bytes; one pool may be both."""
    ranges = [b.byte_range() for b in dst]
    for a in src:
        low, high = a.byte_range()
        for b, (b_low, b_high) in zip(dst, ranges, strict=True):
            if b_high <= low or high <= b_low:
                continue
            same = (a.pointer, a.shape, a.strides) == (b.pointer, b.shape, b.strides)
            if not same and overlap(a, b):
                raise ValueError(
                    f"{names[1]}: expected memory of its own, got {describe(b)} over {names[0]}'s"
                )


def _layers(layers: Any) -> tuple[int, ...] | None:
    if layers is None:
        return None
    given = [layers] if _is_int(layers) else layers
    try:
        chosen = list(given)
    except TypeError:
        raise TypeError(f"layers: expected None, an int or several, got {layers!r}") from None
    for layer in chosen:
        if not _is_int(layer):
            raise TypeError(f"layers: expected ints, got {layer!r}")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers: expected each once, got {layers!r}")
    return tuple(sorted(int(layer) for layer in chosen))


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
