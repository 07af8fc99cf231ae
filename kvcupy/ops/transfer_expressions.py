"""A transfer as array expressions: what runs where its kernel cannot be compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..devices.protocol import Device
from . import expressions

if TYPE_CHECKING:
    from .transfer_route import Pages


def move(device: Device, src: Pages, dst: Pages, src_pages: Any, dst_pages: Any) -> None:
    """Move pages, all of which exist, between pools; convert where the formats differ."""
    if src.format == dst.format:
        for source, target in zip((*src.parts, *src.scales), (*dst.parts, *dst.scales),
                                  strict=True):  # fmt: skip
            device.carrier(target)[dst_pages] = device.carrier(source)[src_pages]
        return
    for i, (source, target) in enumerate(zip(src.parts, dst.parts, strict=True)):
        values = expressions.decode(device.carrier(source)[src_pages], src.format)
        if src.scales:
            values = expressions.multiply(values, device.carrier(src.scales[i])[src_pages])
        if dst.scales:
            scale = expressions.dynamic_scale(values, dst.format)
            device.carrier(dst.scales[i])[dst_pages] = scale[..., None]
            values = expressions.divide(values, scale[..., None])
        device.carrier(target)[dst_pages] = expressions.encode(values, dst.format)
