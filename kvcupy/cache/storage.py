"""What pools share: memory in the order of a layout, viewed by pages and by layers."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from .. import devices, dtypes, exporters
from ..arrays import ArrayView
from ..devices.protocol import Device
from ..ops import checks
from ..ops.outputs import format_name
from ..pickling import ProcessLocal
from .pages import PageAllocator

# Axes as they are stored: Layers, Pages, Slots of a page, Heads, Dimensions of a head.
_ORDERS = {
    "layer_first": "LPSHD",
    "page_first": "PSLHD",
    "page_first_direct": "PLSHD",
    "page_head": "PHSLD",
}
_PLACEMENTS = ("device", "pinned", "pageable")


class Pool(ProcessLocal, abc.ABC):
    """Base of the pools.

    Attributes
    ----------
    device : the Device that computes on the pages, or next to which they lie
    placement : "device", "pinned" or "pageable"
    layout : "layer_first", "page_first", "page_first_direct" or "page_head"
    dtype : name of the number format, "bf16"
    num_pages, page_size, num_layers, num_kv_heads, head_dim, v_head_dim : counts
    num_bytes : of all pages, with scales
    page_bytes : of one page of all layers, K and V, with scales
    parts : ArrayViews of K and V, or of the latent, (num_pages, num_layers, page_size, heads,
        width), with the strides of the layout
    scale_parts : none, or one for each of the parts, float32 (num_pages, num_layers, page_size,
        heads, 1)
    allocator : the PageAllocator of the pages
    """

    _instead = "make one in each process, and move pages with transfer_pages or as arrays"

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        widths: tuple[int, ...],
        *,
        dtype: Any,
        layout: str,
        placement: str,
        device: Any,
        scales: bool,
    ) -> None:
        self.num_pages = count(num_pages, "num_pages")
        self.page_size = count(page_size, "page_size")
        self.num_layers = count(num_layers, "num_layers")
        self.num_kv_heads = count(num_kv_heads, "num_kv_heads")
        self.head_dim, self.v_head_dim = widths[0], widths[-1]
        self.dtype = format_name(dtype)
        self.layout = _choice(layout, "layout", tuple(_ORDERS))
        self.placement = _choice(placement, "placement", _PLACEMENTS)
        if not isinstance(scales, (bool, np.bool_)):
            raise TypeError(f"scales: expected True or False, got {scales!r}")
        if scales and not dtypes.FORMATS[self.dtype].quantised:
            raise ValueError(f"scales: expected False for a {self.dtype} pool, got True")
        self.device: Device = devices.get(device)
        self.allocator = PageAllocator(self.num_pages)
        self._fill(widths, bool(scales))

    def __repr__(self) -> str:
        scales = " with scales" if self.scale_parts else ""
        return (
            f"<{type(self).__name__} of {self.num_pages} pages of {self.page_size}, "
            f"{self.num_layers} layers of {self._row()}, {self.dtype}{scales}, {self.layout}, "
            f"{self.placement} on {self.device.name}, {self.num_bytes / 1e9:.4g} GB>"
        )

    @abc.abstractmethod
    def _row(self) -> str:
        """Return what a token has in a layer, in words."""

    def k(self, layer: int) -> Any:
        """Return K of one layer as a view, (num_pages, page_size, heads, head_dim)."""
        return self._layers[0][self._layer(layer)]

    def v(self, layer: int) -> Any:
        """Return V of one layer as a view, (num_pages, page_size, heads, v_head_dim)."""
        return self._layers[-1][self._layer(layer)]

    def k_scale(self, layer: int) -> Any:
        """Return the scales of K of one layer as a view, float32 (num_pages * page_size, heads).

        It goes to operations as `k_scale_cache`. None for a pool without scales.
        """
        layer = self._layer(layer)
        return self._scales[0][layer] if self._scales else None

    def v_scale(self, layer: int) -> Any:
        """Return the scales of V of one layer, as `k_scale` does those of K."""
        layer = self._layer(layer)
        return self._scales[-1][layer] if self._scales else None

    # --- Memory ---

    def _fill(self, widths: tuple[int, ...], scales: bool) -> None:
        """Allocate everything and view it by pages and by layers."""
        order = _ORDERS[self.layout]
        # A scale a slot and head, whose slots are evenly spaced within a layer in every layout.
        scale_order = order if self.layout == "layer_first" else _ORDERS["page_first"]
        wanted = [(self._shape(order, width), self.dtype) for width in widths]
        if scales:
            wanted += [(self._shape(scale_order, 1), "fp32") for _ in widths]
        self.num_bytes = sum(_num_bytes(shape, format) for shape, format in wanted)
        self.page_bytes = self.num_bytes // self.num_pages
        if self.num_bytes >= 2**63:
            raise ValueError(f"num_pages: expected less than 2**63 bytes, got {self.num_bytes}")
        made = self._allocate(wanted)

        data, scale_data = made[: len(widths)], made[len(widths) :]
        by_page = [_by_page(array, order) for array in data]
        self.parts = tuple(map(exporters.view, by_page))
        self.scale_parts = tuple(exporters.view(_by_page(a, scale_order)) for a in scale_data)
        layers = range(self.num_layers)
        self._layers = tuple(tuple(self._of_layer(a, i) for i in layers) for a in by_page)
        self._scales = tuple(tuple(self._scale_of_layer(a, i) for i in layers) for a in scale_data)

    def _shape(self, order: str, width: int) -> tuple[int, ...]:
        sizes = {
            "L": self.num_layers,
            "P": self.num_pages,
            "S": self.page_size,
            "H": self.num_kv_heads,
            "D": width,
        }
        return tuple(sizes[axis] for axis in order)

    def _allocate(self, wanted: list[tuple[tuple[int, ...], str]]) -> list[Any]:
        made: list[Any] = []
        try:
            for shape, format in wanted:
                made.append(_zeros(self.device, self.placement, shape, format))
        except BaseException:
            made.clear()  # else the error's traceback would keep what was allocated before it
            raise
        return made

    def _of_layer(self, by_page: Any, layer: int) -> Any:
        """Return the view of one layer that users see."""
        return by_page[:, layer]

    def _scale_of_layer(self, stored: Any, layer: int) -> Any:
        slots = self.num_pages * self.page_size
        if self.layout == "layer_first":
            return stored.reshape(self.num_layers, slots, self.num_kv_heads)[layer]
        return stored.reshape(slots, self.num_layers, self.num_kv_heads)[:, layer]

    def _layer(self, layer: Any) -> int:
        checks.require_int(layer, "layer")
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer: expected 0 to {self.num_layers - 1}, got {layer}")
        return int(layer)


# --- Arguments and arrays -------------------------------------------------------------------------


def count(value: Any, name: str) -> int:
    """Return a count argument as an int of at least one."""
    checks.require_int(value, name)
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return int(value)


def _choice(value: Any, name: str, known: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    return value


def _num_bytes(shape: tuple[int, ...], format: str) -> int:
    product = dtypes.FORMATS[format].itemsize
    for n in shape:
        product *= n
    return product


def _zeros(device: Device, placement: str, shape: tuple[int, ...], format: str) -> Any:
    if placement == "device":
        return device.zeros(shape, format)
    if placement == "pageable":
        return devices.get("host").zeros(shape, format)
    array = device.empty_pinned(shape, format)
    array.view(np.uint8)[...] = 0
    return array


def _by_page(array: Any, order: str) -> Any:
    """View an array stored in `order` as (pages, layers, slots, heads, width)."""
    axes = tuple(map(order.index, "PLSHD"))
    if not isinstance(array, ArrayView):
        return array.transpose(axes)
    return ArrayView(  # of a format that the device's array library does not have
        array.pointer,
        tuple(array.shape[i] for i in axes),
        tuple(array.strides[i] for i in axes),
        array.format,
        array.device,
        library=array.library,
        readonly=array.readonly,
        owner=array.owner,
    )
