"""What pools share: memory in the order of a layout, viewed by pages and by layers."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arrays as exporters
from .. import devices
from .. import formats as dtypes
from ..arrays import ArrayView, array_at, memory_of, transposed
from ..devices.protocol import Device
from ..dlpack import exporting
from ..ops import checks
from ..ops.outputs import format_name
from ..pickling import ProcessLocal
from . import wrapped
from .pages import PageAllocator

# Axes as they are stored: Layers, Pages, Slots of a page, Heads, Dimensions of a head.
_ORDERS = {
    "layer_first": "LPSHD",
    "page_first": "PSLHD",
    "page_first_direct": "PLSHD",
    "page_head": "PHSLD",
}
_PLACEMENTS = ("device", "pinned", "pageable")


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are evenly spaced in memory.

    Attributes
    ----------
    layers : their numbers, without gaps
    parts, scale_parts : as those of a `Pool`, of these layers
    """

    layers: range
    parts: tuple[ArrayView, ...]
    scale_parts: tuple[ArrayView, ...] = ()


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
    groups : the layers, by sets that are evenly spaced in memory: one, but for pools over arrays
        that are elsewhere for each layer (`wrap`)
    parts : ArrayViews of K and V, or of the latent, (num_pages, num_layers, page_size, heads,
        width), with the strides of the layout; those of one group after another
    scale_parts : none, or one for each of the parts, float32 (num_pages, num_layers, page_size,
        heads, 1)
    allocator : the PageAllocator of the pages
    is_wrapped : whether the memory is that of arrays of others
    """

    is_wrapped = False

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
        self._fill(widths, bool(scales))
        self.allocator = PageAllocator(self.num_pages)

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

    def views(self, layer: int) -> tuple[ArrayView, ...]:
        """Return K and V, or the latent, of a layer as ArrayViews (num_pages, page_size, heads,
        width)."""
        return self._views[self._layer(layer)]

    def note_written(self, layers: Iterable[int] | None = None) -> None:
        """Let autograd know that layers, or all, were written, where they are torch tensors."""
        if self._tensors:
            chosen = self._tensors if layers is None else layers
            exporters.note_written([t for i in chosen for t in self._tensors.get(i, ())])

    def k(self, layer: int) -> Any:
        """Return K of one layer as a view, (num_pages, page_size, heads, head_dim)."""
        return self._layers[0][self._layer(layer)]

    def v(self, layer: int) -> Any:
        """Return V of one layer as a view, (num_pages, page_size, heads, v_head_dim)."""
        return self._layers[-1][self._layer(layer)]

    def torch_k(self, layer: int) -> Any:
        """Return K of one layer, shaped as by `k`, as a torch tensor without a copy.

        It is the same tensor each time, a view of that which the pool is over (`wrap`) if it is a
        tensor: what kvcupy writes counts as a change of it. Work on it is ordered like work on any
        tensor, by torch's current stream.

        Raises
        ------
        ImportError : torch is missing
        TypeError : the call is under a FakeTensorMode
        """
        return self._torch(0, self._layer(layer))

    def torch_v(self, layer: int) -> Any:
        """Return V of one layer, shaped as by `v`, as `torch_k` does K."""
        return self._torch(len(self._layers) - 1, self._layer(layer))

    def _torch(self, part: int, layer: int) -> Any:
        known = self._torch_views.get((part, layer))
        if known is None:
            from ..arrays import tensor_of

            known = self._shown(tensor_of(self._views[layer][part]))
            exporters.view(known)  # not a fake one, which others would be given too
            known = self._torch_views.setdefault((part, layer), known)
            self._tensors.setdefault(layer, []).append(known)
        return known

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

    # --- Memory that is there ---

    _has_heads = True

    @classmethod
    def _over(cls, given: dict[str, Any], layout: str, page_size: Any, device: Any) -> Any:
        """Return a pool over arrays, of K and V or of the latent, by the names of the arguments."""
        layout = _choice(layout, "layout", tuple(_ORDERS))
        size = None if page_size is None else count(page_size, "page_size")
        layers = wrapped.layers_of(given, _ORDERS[layout], size, has_heads=cls._has_heads)
        pool = cls.__new__(cls)
        pool._adopt(layers, layout, device)
        return pool

    def _adopt(
        self,
        layers: Sequence[tuple[ArrayView, ...]],
        layout: str,
        device: Any,
    ) -> None:
        """Take the memory of arrays, which `wrapped.layers_of` has checked, as it lies.

        Parameters
        ----------
        layers : of each layer K and V, or the latent, (num_pages, page_size, heads, width)
        """
        first, self.is_wrapped = layers[0], True
        self.num_pages, self.page_size, self.num_kv_heads, self.head_dim = first[0].shape
        self.v_head_dim = first[-1].shape[-1]
        self.num_layers = len(layers)
        self.dtype, self.layout = first[0].format, layout
        views = [part for layer in layers for part in layer]
        self.device, self.placement = _where(views, device)
        self.num_bytes = sum(v.size * v.itemsize for v in views)
        self.page_bytes = self.num_bytes // self.num_pages
        self._group([
            LayerGroup(run, tuple(_stacked([layers[i][n] for i in run]) for n in range(len(first))))
            for run in _evenly_spaced(layers)
        ])  # fmt: skip
        parts = tuple(zip(*layers, strict=True))
        self._layers = tuple(
            tuple(self._shown(exporting(_array_of(self.device, v))) for v in part) for part in parts
        )
        self._scales: tuple[tuple[Any, ...], ...] = ()
        self._views = tuple(layers)
        self._tensors: dict[int, list[Any]] = {}  # whose counters go up when a layer is written
        if any(v.library == "torch" for v in views):
            self._tensors = {i: [v.owner for v in layer] for i, layer in enumerate(layers)}
        self._torch_views: dict[tuple[int, int], Any] = {}
        self.allocator = PageAllocator(self.num_pages)

    def _shown(self, of_layer: Any) -> Any:
        """Return the view of one layer, (num_pages, page_size, heads, width), as users see it."""
        return of_layer

    # --- Memory ---

    def _group(self, groups: Sequence[LayerGroup]) -> None:
        self.groups = tuple(groups)
        self.parts = tuple(part for group in groups for part in group.parts)
        self.scale_parts = tuple(part for group in groups for part in group.scale_parts)

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
        layers = range(self.num_layers)
        scale_parts = tuple(exporters.view(_by_page(a, scale_order)) for a in scale_data)
        self._group([LayerGroup(layers, tuple(map(exporters.view, by_page)), scale_parts)])
        self._layers = tuple(tuple(self._of_layer(a, i) for i in layers) for a in by_page)
        self._views = tuple(tuple(part[:, i] for part in self.groups[0].parts) for i in layers)
        self._tensors = {}
        self._torch_views = {}
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
        except BaseException as error:
            made.clear()  # else the error's traceback would keep what was allocated before it
            if isinstance(error, MemoryError):
                raise MemoryError(
                    f"num_pages: expected a pool that there is memory for, got {self.num_pages} "
                    f"pages of {self.page_bytes} bytes, {self.num_bytes / 1e9:.4g} GB: {error}"
                ) from error
            raise
        return made

    def _of_layer(self, by_page: Any, layer: int) -> Any:
        return self._shown(exporting(by_page[:, layer]))

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
    # An ArrayView is of a format that the device's array library does not have.
    return array.transpose(axes) if not isinstance(array, ArrayView) else transposed(array, axes)


# --- Arrays of others -----------------------------------------------------------------------------


def _where(views: Sequence[ArrayView], device: Any) -> tuple[Device, str]:
    """Return the device that computes on the pages of some arrays, and their placement."""
    name = views[0].device
    pinned = name == "host" and all(v.pinned for v in views)
    if device is None:
        own = devices.default_device() if pinned else devices.get(name)
    else:
        own = devices.get(device)
        if name not in ("host", own.name):
            raise ValueError(f"device: expected {name}, where the arrays are, got {own.name}")
    if pinned:
        return own, "pinned"
    return own, "device" if own.name == name else "pageable"


def _evenly_spaced(layers: Sequence[tuple[ArrayView, ...]]) -> list[range]:
    """Split layers into runs that are one allocation each, at one distance in every part."""
    runs: list[range] = []
    distance: tuple[int, ...] | None = None
    for i in range(1, len(layers)):
        pairs = list(zip(layers[i - 1], layers[i], strict=True))
        step = tuple(b.pointer - a.pointer for a, b in pairs)
        together = all(
            a.strides == b.strides and memory_of(a.owner) == memory_of(b.owner) for a, b in pairs
        )
        if together and distance in (None, step):
            distance = step
        else:
            runs.append(range(runs[-1].stop if runs else 0, i))
            distance = None
    return [*runs, range(runs[-1].stop if runs else 0, len(layers))]


def _stacked(layers: Sequence[ArrayView]) -> ArrayView:
    """View evenly spaced (pages, slots, heads, width) as (pages, layers, slots, heads, width)."""
    first = layers[0]
    distance = layers[1].pointer - first.pointer if len(layers) > 1 else 0
    pages, *rest = first.shape
    return ArrayView(
        first.pointer, (pages, len(layers), *rest),
        (first.strides[0], distance, *first.strides[1:]), first.format, first.device,
        library=first.library, owner=first.owner,  # who keeps the memory of all
    )  # fmt: skip


def _array_of(device: Device, v: ArrayView) -> Any:
    """Return an array of the device's library over a view; the view where it lacks the format."""
    dtype = dtypes.numpy_dtype(v.format)
    if v.device == "host":
        return array_at(v.owner, v.pointer, v.shape, dtype, v.strides)
    format = dtypes.FORMATS[v.format]
    lacking = format.quantised and not format.native  # CuPy has bfloat16, but no 8-bit floats
    return v if lacking else device.carrier(v).view(dtype)
