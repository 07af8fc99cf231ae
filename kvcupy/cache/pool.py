"""Pools of pages: K and V, or the latent, of every layer, in one array each."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import numpy as np

from .. import devices, formats, metrics
from ..arrays import (
    ArrayView,
    array_at,
    bytes_of,
    describe,
    first_overlap,
    memory_of,
    note_written,
    overlaps_itself,
    reshaped,
    transposed,
    view,
    with_rotation,
)
from ..arrays.dlpack import exporting
from ..checks import flag, positive_int, require_int
from ..devices.protocol import Device, Stream
from ..errors import KvcupyError, ProcessLocal
from ..formats import Placement, PoolLayout, ScaleRule
from ..ops import checks
from .pages import PageAllocator

_Named = tuple[str, ArrayView]

# Axes as they are stored: Layers, Pages, Slots of a page, Heads, Dimensions of a head.
_ORDERS = {
    "layer_first": "LPSHD", "page_first": "PSLHD",
    "page_first_direct": "PLSHD", "page_head": "PHSLD",
}  # fmt: skip
_T = TypeVar("_T")
_MAX_LAYERS = 1 << 16  # of an array; each gets a view


@dataclass(frozen=True)
class EvenLayers:
    """Layers without gaps that are evenly spaced in memory, and their parts as in `Pool`."""

    layers: range
    parts: tuple[ArrayView, ...]
    scale_parts: tuple[ArrayView, ...] = ()


class Pool(ProcessLocal, abc.ABC):
    """Base class of the pools.

    Attributes
    ----------
    device : the Device that computes on the pages, or that accesses them in host memory
    placement : "device", "pinned" or "pageable"
    layout : "layer_first", "page_first", "page_first_direct" or "page_head"
    dtype : name of the number format, "bf16"
    encoding : the Encoding of K, or of the latent
    stored_as : format and rotated elements of K and V, a string that files and other processes
        compare
    num_pages, page_size, num_layers, num_kv_heads, head_dim, v_head_dim : counts
    num_bytes : of all pages, with scales
    page_bytes : of one page of all layers, K and V, with scales
    groups : runs of layers that are evenly spaced in memory: one, except in pools over an array for
        each layer (`wrap`)
    parts : ArrayViews of K and V, or of the latent, (num_pages, num_layers, page_size, heads,
        width), with the strides of the layout, group by group
    scale_parts : empty, or one for each of the parts, float32 (num_pages, num_layers, page_size,
        heads, 1)
    allocator : the PageAllocator of the pages
    is_wrapped : whether the pool is over existing arrays (`wrap`)
    """

    is_wrapped = False

    _instead = "make one in each process, and move pages with transfer_pages or as arrays"

    def __init__(
        self, num_pages: int, page_size: int, num_layers: int, num_kv_heads: int,
        widths: tuple[int, ...], *, dtype: Any, layout: PoolLayout, placement: Placement,
        device: Any, scales: bool,
    ) -> None:  # fmt: skip
        self.num_pages = positive_int(num_pages, "num_pages")
        self.page_size = positive_int(page_size, "page_size")
        self.num_layers = positive_int(num_layers, "num_layers")
        self.num_kv_heads = positive_int(num_kv_heads, "num_kv_heads")
        self.head_dim, self.v_head_dim = widths[0], widths[-1]
        encoding = formats.Encoding.of(dtype)
        self.dtype = encoding.format
        self.layout = _choice(layout, "layout", _ORDERS)
        self.placement = _choice(placement, "placement", get_args(Placement))
        if flag(scales, "scales") and not formats.CACHE_FORMATS[self.dtype].quantised:
            raise ValueError(f"scales: expected False for a {self.dtype} pool, got True")
        four_bit = formats.FOUR_BIT.get(self.dtype)
        if four_bit is not None:
            if scales:
                raise ValueError(
                    f"scales: expected False for a {self.dtype} pool, which stores scales with its "
                    "rows, got True"
                )
            for name, width in zip(self._width_names, widths, strict=True):
                formats.require_groups(four_bit, width, name)
        rotated = [encoding.rotated_elements(n) for n in self._rotated_widths(widths)]
        self.device: Device = devices.get(device)
        self._fill(widths, rotated, encoding.scale_rule, bool(scales))

    def __repr__(self) -> str:
        scales = " with scales" if self.scale_parts else ""
        return (
            f"<{type(self).__name__} of {self.num_pages} pages of {self.page_size}, "
            f"{self.num_layers} layers of {self._row()}, {self.dtype}"
            f"{' rotated' if self.encoding.hadamard else ''}{scales}, {self.layout}, "
            f"{self.placement} on {self.device.name}, {self.num_bytes / 1e9:.4g} GB>"
        )

    @property
    def encoding(self) -> formats.Encoding:
        return self.views(0)[0].encoding

    @property
    def stored_as(self) -> str:
        parts = [formats.stored_as(part.format, part.rotated_width) for part in self.views(0)]
        return ",".join(dict.fromkeys(parts)) if parts[0] == parts[-1] else ",".join(parts)

    def _rotated_widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many elements of rows of some widths hadamard rotates."""
        return widths

    @abc.abstractmethod
    def _row(self) -> str:
        """Describe what a token stores in a layer."""

    def _as_stream(self, stream: Any) -> Stream:
        """Return a stream argument as a Stream; None: the current one of the pool's library."""
        return self.device.as_stream(stream, self.parts[0].library)

    def views(self, layer: int) -> tuple[ArrayView, ...]:
        """Return K and V, or the latent, of a layer as ArrayViews (num_pages, page_size, heads,
        width)."""
        return self._views[self.layer_number(layer)]

    def note_written(self, layers: Iterable[int] | None = None) -> None:
        """Advance the version counters of written layers, if they are torch tensors.

        Parameters
        ----------
        layers : their numbers; None: all

        Raises
        ------
        TypeError, ValueError : `layers` are not numbers of layers
        """
        if layers is not None and type(layers) is not tuple:  # isinstance of an ABC is slow
            is_number = getattr(layers, "shape", None) == ()  # an array without axes
            if is_number or not isinstance(layers, Iterable):
                raise TypeError(f"layers: expected ints, got {layers!r}")
        if self._tensors:
            chosen = list(self._tensors)
            if layers is not None:
                chosen = [self.layer_number(layer, "layers") for layer in layers]
            note_written([t for i in chosen for t in self._tensors.get(i, ())])

    def k(self, layer: int) -> Any:
        """Return K of one layer as a view, (num_pages, page_size, heads, head_dim)."""
        return self._layers[0][self.layer_number(layer)]

    def v(self, layer: int) -> Any:
        """Return V of one layer as a view, (num_pages, page_size, heads, v_head_dim)."""
        return self._layers[-1][self.layer_number(layer)]

    def torch_k(self, layer: int) -> Any:
        """Return K of one layer, shaped as by `k`, as a torch tensor without a copy.

        It is the same tensor each time; in a pool over tensors (`wrap`), a view of the wrapped one,
        so that kvcupy's writes count as changes of it. Work on it is ordered by torch's current
        stream, as for any tensor.

        Raises
        ------
        ImportError : torch is missing
        TypeError, ValueError : `layer` is out of range, its strides are not torch's, or the call is
            under a FakeTensorMode
        """
        return self._torch(0, self.layer_number(layer))

    def torch_v(self, layer: int) -> Any:
        """Return V of one layer, shaped as by `v`, as a torch tensor; see `torch_k`."""
        return self._torch(len(self._layers) - 1, self.layer_number(layer))

    def _torch(self, part: int, layer: int) -> Any:
        tensor = self._torch_views.get((part, layer))
        if tensor is None:
            from ..arrays import tensor_of

            tensor = self._as_shown(tensor_of(self._views[layer][part], "layer"))
            view(tensor)  # raises for a fake one, which must not be kept for later calls
            tensor = self._torch_views.setdefault((part, layer), tensor)
            self._tensors.setdefault(layer, []).append(tensor)
        return tensor

    def k_scale(self, layer: int) -> Any:
        """Return the scales of K of one layer as a view, float32 (num_pages * page_size, heads).

        Pass it to operations as `k_scale_cache`. None for a pool without scales.
        """
        layer = self.layer_number(layer)
        return self._scales[0][layer] if self._scales else None

    def v_scale(self, layer: int) -> Any:
        """Return the scales of V of one layer; see `k_scale`."""
        layer = self.layer_number(layer)
        return self._scales[-1][layer] if self._scales else None

    # --- Wrapping existing memory ---

    _has_heads = True
    _width_names: tuple[str, ...] = ("head_dim", "v_head_dim")  # arguments

    @classmethod
    def _over(cls, arrays: dict[str, Any], layout: PoolLayout, page_size: Any, device: Any) -> Any:
        """Return a pool over arrays of K and V, or of the latent, by the name of the argument."""
        layout = _choice(layout, "layout", _ORDERS)
        size = None if page_size is None else positive_int(page_size, "page_size")
        layers = _layers_of(arrays, _ORDERS[layout], size, has_heads=cls._has_heads)
        pool = cls.__new__(cls)
        pool._adopt(layers, layout, device, next(iter(arrays)))
        return pool

    def _adopt(
        self, layers: Sequence[tuple[ArrayView, ...]], layout: PoolLayout, device: Any, name: str
    ) -> None:
        """Use the memory of arrays checked by `_layers_of`; `name` is the first argument's."""
        first, self.is_wrapped = layers[0], True
        self.num_pages, self.page_size, self.num_kv_heads, self.head_dim = first[0].shape
        self.v_head_dim = first[-1].shape[-1]
        self.num_layers = len(layers)
        self.dtype, self.layout = first[0].format, layout
        views = [part for layer in layers for part in layer]
        self.device, self.placement = _where(views, device, name)
        self.num_bytes = sum(v.num_bytes for v in views)
        self.page_bytes = self.num_bytes // self.num_pages
        groups = [
            EvenLayers(run, tuple(_stacked([layers[i][n] for i in run]) for n in range(len(first))))
            for run in _evenly_spaced(layers)
        ]
        arrays = [[array_of(self.device, v) for v in part] for part in zip(*layers, strict=True)]
        self._finish(groups, layers, arrays, [])
        if any(v.library == "torch" for v in views):
            self._tensors.update((i, [v.owner for v in layer]) for i, layer in enumerate(layers))

    def _finish(
        self, groups: Sequence[EvenLayers], views: Iterable[tuple[ArrayView, ...]],
        arrays: Iterable[Iterable[Any]], scales: Iterable[Iterable[Any]],
    ) -> None:  # fmt: skip
        """Set the views, by layer, and the arrays and scales, by part and layer."""
        self.groups = tuple(groups)
        self.parts = tuple(part for group in groups for part in group.parts)
        self.scale_parts = tuple(part for group in groups for part in group.scale_parts)
        self._views = tuple(views)
        self._layers = tuple(
            tuple(self._as_shown(exporting(array)) for array in part) for part in arrays
        )
        self._scales = tuple(map(tuple, scales))
        # Tensors over each layer, whose version counters advance when the layer is written.
        self._tensors: dict[int, list[Any]] = {}
        self._torch_views: dict[tuple[int, int], Any] = {}
        self.allocator = PageAllocator(self.num_pages)
        metrics.follow(self, _page_samples)

    def _as_shown(self, of_layer: Any) -> Any:
        """Return the view of one layer, (num_pages, page_size, heads, width), as users see it."""
        return of_layer

    # --- Allocating memory ---

    def _fill(
        self, widths: tuple[int, ...], rotated: list[int], rule: ScaleRule, scales: bool
    ) -> None:
        """Allocate all arrays, and view them by page and by layer."""
        order = _ORDERS[self.layout]
        # One scale per slot and head. In every layout the slots of a layer are evenly spaced.
        scale_order = order if self.layout == "layer_first" else _ORDERS["page_first"]
        specs = [(self._shape(order, width), self.dtype) for width in widths]
        if scales:
            specs += [(self._shape(scale_order, 1), "fp32") for _ in widths]
        self.num_bytes = sum(formats.num_bytes(*spec) for spec in specs)
        self.page_bytes = self.num_bytes // self.num_pages
        if self.num_bytes >= 2**63:
            raise ValueError(f"num_pages: expected less than 2**63 bytes, got {self.num_bytes}")
        arrays = self._allocate(specs, rotated, rule)

        data, scale_data = arrays[: len(widths)], arrays[len(widths) :]
        by_page = [_by_page(array, order) for array in data]
        layers = range(self.num_layers)
        scale_parts = tuple(view(_by_page(a, scale_order)) for a in scale_data)
        group = EvenLayers(layers, tuple(map(view, by_page)), scale_parts)
        self._finish(
            [group], [tuple(part[:, i] for part in group.parts) for i in layers],
            [[a[:, i] for i in layers] for a in by_page],
            [[self._scale_of_layer(a, i) for i in layers] for a in scale_data],
        )  # fmt: skip

    def _shape(self, order: str, width: int) -> tuple[int, ...]:
        sizes = (self.num_layers, self.num_pages, self.page_size, self.num_kv_heads, width)
        return tuple(sizes["LPSHD".index(axis)] for axis in order)

    def _allocate(
        self, specs: list[tuple[tuple[int, ...], str]], rotated: list[int], rule: ScaleRule
    ) -> list[Any]:
        """Allocate arrays; `rotated` are the rotated elements of a row, of the first arrays."""
        arrays: list[Any] = []
        try:
            widths = [*rotated, *[0] * (len(specs) - len(rotated))]
            for (shape, format), width in zip(specs, widths, strict=True):
                used = rule if format == self.dtype else "absmax"
                arrays.append(_zeros(self.device, self.placement, shape, format, width, used))
        except BaseException as error:
            arrays.clear()  # else the error's traceback would keep what was allocated before it
            if isinstance(error, MemoryError):
                raise MemoryError(
                    f"num_pages: expected a pool that there is memory for, got {self.num_pages} "
                    f"pages of {self.page_bytes} bytes, {self.num_bytes / 1e9:.4g} GB: {error}"
                ) from error
            raise
        return arrays

    def _scale_of_layer(self, stored: Any, layer: int) -> Any:
        slots = self.num_pages * self.page_size
        if self.layout == "layer_first":
            return stored.reshape(self.num_layers, slots, self.num_kv_heads)[layer]
        return stored.reshape(slots, self.num_layers, self.num_kv_heads)[:, layer]

    def layer_number(self, layer: Any, name: str = "layer") -> int:
        """Return an argument `layer` as an int; TypeError or ValueError if it is out of range."""
        require_int(layer, name)
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"{name}: expected 0 to {self.num_layers - 1}, got {layer}")
        return int(layer)


class KVPool(Pool):
    """Pages of K and V of every layer.

    Parameters
    ----------
    num_pages, page_size, num_layers, num_kv_heads, head_dim : counts; head_dim is the width of K
    v_head_dim : the width of V; None: head_dim
    dtype : an Encoding or its string, or a NumPy, ml_dtypes or torch dtype. With a four-bit format
        widths are whole groups, and the scales of a row follow its codes in every layout
    layout : axes as stored, K and V in separate arrays. "layer_first" (layers, pages,
        page_size, heads, width), "page_first" (pages, page_size, layers, heads, width),
        "page_first_direct" (pages, layers, page_size, heads, width), "page_head" (pages, heads,
        page_size, layers, width)
    placement : "device"; "pinned", host memory that the device reads and writes directly;
        "pageable", plain host memory. All start as zeros
    device : a Device or its name; None is the default device
    scales : store float32 scales with K and V of a quantised format, one for each token and head

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    DeviceError, MemoryError : out of memory; nothing stays allocated

    Notes
    -----
    Attributes: as in `Pool`. Bytes: exactly `num_bytes`, in one allocation each for K, for V and
    for the scales of each. `k(layer)` and `v(layer)` are arrays of the device's library (NumPy,
    CuPy; fp8 on a GPU and four-bit formats as ArrayViews), which export DLPack in every format;
    `torch_k` and `torch_v` return them as tensors. `KVPool.wrap` makes a pool over existing memory.
    Source: sgl-project/sglang `python/sglang/srt/mem_cache/memory_pool_host.py` (the layouts).

    Examples
    --------
    >>> pool = KVPool(64, 16, 2, 8, 128, dtype="fp16", layout="page_first", device="host")
    >>> pool
    <KVPool of 64 pages of 16, 2 layers of 8 heads of 128, fp16, page_first, device on host, ... GB>
    >>> pool.k(1).shape, pool.num_bytes == 64 * pool.page_bytes == 2 * 64 * 16 * 2 * 8 * 128 * 2
    ((64, 16, 8, 128), True)
    """

    def __init__(
        self, num_pages: int, page_size: int, num_layers: int, num_kv_heads: int, head_dim: int, *,
        v_head_dim: int | None = None, dtype: Any = "bf16", layout: PoolLayout = "layer_first",
        placement: Placement = "device", device: Any = None, scales: bool = False,
    ) -> None:  # fmt: skip
        k_width = positive_int(head_dim, "head_dim")
        v_width = k_width if v_head_dim is None else positive_int(v_head_dim, "v_head_dim")
        super().__init__(
            num_pages, page_size, num_layers, num_kv_heads, (k_width, v_width),
            dtype=dtype, layout=layout, placement=placement, device=device, scales=scales,
        )  # fmt: skip

    @classmethod
    def wrap(
        cls, k: Any, v: Any, *,
        layout: PoolLayout = "layer_first", page_size: int | None = None, device: Any = None,
    ) -> KVPool:  # fmt: skip
        """Return a pool over existing memory: nothing is copied.

        Parameters
        ----------
        k, v : NumPy or CuPy arrays, torch tensors, or ArrayViews of `view_as`, on one device and of
            one format. Either one array with the axes of `layout`, or a list of one array for each
            layer: (pages, page_size, heads, width), with any strides whose last is contiguous, or
            (slots, heads, width) with `page_size`. The widths of K and V may differ, and either may
            be rotated
        layout : as in `KVPool`; with lists "layer_first"
        page_size : slots per page, for arrays by slots
        device : a Device or its name: for host memory that exchanges pages with a pool of a GPU,
            that GPU. None: the device of the arrays, and for pinned memory the default device

        Returns
        -------
        KVPool : with a fresh allocator, and the placement of the arrays, "device", "pinned" or
            "pageable". It keeps them alive

        Raises
        ------
        TypeError, ValueError : an array does not fit, is read-only, or shares bytes with another

        Notes
        -----
        A transfer of layers in separate allocations launches a kernel for each, where a pool's own
        array needs one for all. The pool can be used like any other.
        Source: vLLM `(2, num_blocks, block_size, heads, head_dim)` per layer, where k is `c[0]` and
        v `c[1]`; SGLang `MHATokenToKVPool`, (slots, heads, head_dim) per layer; FlashInfer's paged
        NHD and HND, the latter as `k.transpose(1, 2)`.

        Examples
        --------
        >>> import numpy as np
        >>> caches = [np.zeros((2, 64, 16, 8, 128), np.float16) for _ in range(4)]
        >>> KVPool.wrap([c[0] for c in caches], [c[1] for c in caches])
        <KVPool of 64 pages of 16, 4 layers of 8 heads of 128, fp16, layer_first, device on host...>
        """
        pool: KVPool = cls._over({"k": k, "v": v}, layout, page_size, device)
        return pool

    def _row(self) -> str:
        width = str(self.head_dim)
        if self.v_head_dim != self.head_dim:
            width += f" (K) and {self.v_head_dim} (V)"
        return f"{self.num_kv_heads} heads of {width}"


class MLAPool(Pool):
    """Pages of the latent of every layer, for multi-head latent attention.

    Parameters
    ----------
    latent_dim, rope_dim : elements of the latent and of the rotated key after it, per token and
        layer; a row has both
    dtype : as in `KVPool`. With "+hadamard" the latent is rotated, the rope part never
    num_pages, page_size, num_layers, layout, placement, device, scales : as in `KVPool`; the
        layouts have one head

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    DeviceError, MemoryError : out of memory; nothing stays allocated

    Notes
    -----
    Attributes: as in `Pool`, with one head whose `head_dim` is latent_dim + rope_dim, and
    `latent_dim` and `rope_dim`. `k` and `v` both give the rows of a layer, (num_pages, page_size,
    latent_dim + rope_dim), `k_scale` and `v_scale` their scales.

    Examples
    --------
    >>> MLAPool(64, 16, 2, 512, 64, device="host").k(0).shape
    (64, 16, 576)
    """

    def __init__(
        self, num_pages: int, page_size: int, num_layers: int, latent_dim: int, rope_dim: int = 0,
        *, dtype: Any = "bf16", layout: PoolLayout = "layer_first", placement: Placement = "device",
        device: Any = None, scales: bool = False,
    ) -> None:  # fmt: skip
        self.latent_dim = positive_int(latent_dim, "latent_dim")
        self.rope_dim = _rope_dim(rope_dim)
        encoding = formats.Encoding.of(dtype)
        if encoding.hadamard:
            formats.require_groups(
                formats.FOUR_BIT[encoding.format], self.latent_dim, "latent_dim"
            )  # fmt: skip
        super().__init__(
            num_pages, page_size, num_layers, 1, (self.latent_dim + self.rope_dim,),
            dtype=encoding, layout=layout, placement=placement, device=device, scales=scales,
        )  # fmt: skip

    @classmethod
    def wrap(
        cls, latent: Any, *,
        rope_dim: int = 0, layout: PoolLayout = "layer_first", page_size: int | None = None,
        device: Any = None,
    ) -> MLAPool:  # fmt: skip
        """Return a pool over existing memory, as `KVPool.wrap` does.

        Parameters
        ----------
        latent : one array with the axes of `layout`, with or without the one head, or a list of one
            array per layer: (pages, page_size, width), or (slots, width) and (slots, 1, width) with
            `page_size`; width is latent_dim + rope_dim
        rope_dim : elements of the rope part, the last of a row
        layout, page_size, device : as in `KVPool.wrap`

        Raises
        ------
        TypeError, ValueError : as in `KVPool.wrap`

        Examples
        --------
        >>> import numpy as np
        >>> MLAPool.wrap([np.zeros((1024, 1, 576), np.float16)], page_size=16).k(0).shape
        (64, 16, 576)
        """
        pool: MLAPool = cls._over({"latent": latent}, layout, page_size, device)
        pool.rope_dim = _rope_dim(rope_dim)
        if pool.rope_dim >= pool.head_dim:
            raise ValueError(f"rope_dim: expected less than {pool.head_dim}, got {rope_dim}")
        pool.latent_dim = pool.head_dim - pool.rope_dim
        return pool

    _has_heads = False
    _width_names = ("latent_dim + rope_dim",)

    def _rotated_widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        return (self.latent_dim,)

    def _row(self) -> str:
        rope = f" and a rope part of {self.rope_dim}" if self.rope_dim else ""
        return f"a latent of {self.latent_dim}{rope}"

    def _as_shown(self, of_layer: Any) -> Any:
        return of_layer[:, :, 0]


def pool_like(pool: Pool, num_pages: int, *, dtype: str, placement: Placement = "pinned") -> Pool:
    """Return a new pool of contiguous pages for the same layers, in another format or memory."""
    if dtype == pool.dtype and any(part.rotated_width for part in pool.parts):
        arrays = [
            _zeros(
                pool.device, placement,
                (num_pages, pool.num_layers, pool.page_size, pool.num_kv_heads, part.shape[-1]),
                dtype, part.rotated_width, part.scale_rule,
            )
            for part in pool.groups[0].parts
        ]  # fmt: skip
        shared: dict[str, Any] = {"layout": "page_first_direct", "device": pool.device}
        if isinstance(pool, MLAPool):
            return MLAPool.wrap(*arrays, rope_dim=pool.rope_dim, **shared)
        return KVPool.wrap(*arrays, **shared)
    format = formats.FORMATS.get(dtype)  # groups of a four-bit format have scales anyway
    scales = bool(pool.scale_parts)
    if dtype != pool.dtype:
        scales = format is not None and format.quantised
    options: dict[str, Any] = {
        "dtype": dtype, "layout": "page_first_direct", "placement": placement,
        "device": pool.device, "scales": scales,
    }  # fmt: skip
    if isinstance(pool, MLAPool):
        counts = num_pages, pool.page_size, pool.num_layers, pool.latent_dim, pool.rope_dim
        return MLAPool(*counts, **options)
    return KVPool(
        num_pages, pool.page_size, pool.num_layers, pool.num_kv_heads, pool.head_dim,
        v_head_dim=pool.v_head_dim, **options,
    )  # fmt: skip


# --- Arguments and arrays -------------------------------------------------------------------------


def _rope_dim(value: Any) -> int:
    require_int(value, "rope_dim")
    if value < 0:
        raise ValueError(f"rope_dim: expected at least 0, got {value}")
    return int(value)


def _choice(value: _T, name: str, choices: Iterable[str]) -> _T:
    if isinstance(value, str) and value in choices:
        return value
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _page_samples(pool: Pool) -> Iterator[tuple[str, metrics.Labels, float]]:
    labels = (("placement", pool.placement),)
    yield "kvcupy_pool_pages", labels, pool.num_pages
    with suppress(KvcupyError):  # after an interrupt
        yield "kvcupy_pool_allocated_pages", labels, pool.allocator.num_allocated


def _zeros(
    device: Device, placement: Placement, shape: tuple[int, ...], format: str, rotated_width: int,
    scale_rule: ScaleRule,
) -> Any:  # fmt: skip
    four_bit = format in formats.FOUR_BIT
    dtype = formats.Encoding(format, scale_rule=scale_rule) if four_bit else format
    if placement == "pinned":
        array = device.empty_pinned(shape, dtype)
        v = bytes_of(view(array))
        size = formats.num_bytes(shape, format)
        array_at(v.owner, v.pointer, (size,), np.dtype(np.uint8))[...] = 0
    else:
        array = (device if placement == "device" else devices.get("host")).zeros(shape, dtype)
    return with_rotation(array, rotated_width) if rotated_width else array


def _by_page(array: Any, order: str) -> Any:
    """View an array stored in `order` as (pages, layers, slots, heads, width)."""
    axes = tuple(map(order.index, "PLSHD"))
    # An ArrayView has a format that the device's array library lacks.
    return array.transpose(axes) if not isinstance(array, ArrayView) else transposed(array, axes)


# --- Wrapped arrays -------------------------------------------------------------------------------


def _where(views: Sequence[ArrayView], device: Any, argument: str) -> tuple[Device, Placement]:
    """Return the device of a pool over some arrays, and their placement."""
    name = views[0].device
    pinned = name == "host" and all(v.pinned for v in views)
    if device is None:
        found = devices.default_device() if pinned else devices.of(views[0], argument)
    else:
        found = devices.get(device)
        if name not in ("host", found.name):
            raise ValueError(f"device: expected {name}, where the arrays are, got {found.name}")
    if pinned:
        return found, "pinned"
    return found, "device" if found.name == name else "pageable"


def _evenly_spaced(layers: Sequence[tuple[ArrayView, ...]]) -> list[range]:
    """Split layers into runs within one allocation, each part at a constant distance."""
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
        library=first.library, owner=first.owner,  # which keeps the memory of all of them
        rotated_width=first.rotated_width, scale_rule=first.scale_rule,
    )  # fmt: skip


def array_of(device: Device, v: ArrayView) -> Any:
    """Return an array of the device's library over a view, or the view if it lacks the format."""
    if v.scales is not None:
        return v
    dtype = formats.numpy_dtype(v.format)
    if v.device == "host":
        return array_at(v.owner, v.pointer, v.shape, dtype, v.strides)
    format = formats.FORMATS[v.format]
    lacking = format.quantised and not format.native  # CuPy has bfloat16, but no 8-bit floats
    return v if lacking else device.carrier(v).view(dtype)


def _layers_of(
    arguments: dict[str, Any], order: str, page_size: int | None, *, has_heads: bool
) -> list[tuple[ArrayView, ...]]:
    """Return K and V, or the latent, of each layer, (pages, page_size, heads, width)."""
    parts = []
    for name, arrays in arguments.items():
        if isinstance(arrays, (list, tuple)):
            if not order.startswith("L"):
                raise ValueError(f"layout: expected layer_first with {name} as a list of layers")
            if not arrays:
                raise ValueError(f"{name}: expected at least one layer, got none")
            by_layer = [(f"{name}[{i}]", view(a, f"{name}[{i}]")) for i, a in enumerate(arrays)]
        else:
            by_layer = _split(view(arrays, name), name, order, page_size, has_heads)
        parts.append([(n, _layer_by_page(v, n, page_size, has_heads)) for n, v in by_layer])
    _require_alike(parts, tuple(arguments))
    return [tuple(v for _, v in layer) for layer in zip(*parts, strict=True)]


def _split(
    v: ArrayView, name: str, order: str, page_size: int | None, has_heads: bool
) -> list[_Named]:
    """Return the layers of one array, each as it would be in a list."""
    bare = order if has_heads else order.replace("H", "")
    if order.startswith("L"):
        least = len(bare) - (page_size is not None)  # by slots
        if least <= v.ndim <= len(order):
            _require_layers(v, v.shape[0], name)
            return [(name, v[i]) for i in range(v.shape[0])]
    elif v.ndim in (len(bare), len(order)):
        axes = order if v.ndim == len(order) else bare
        by_page = transposed(v, [axes.index(axis) for axis in "PLSHD" if axis in axes])
        _require_layers(v, by_page.shape[1], name)
        return [(name, by_page[:, i]) for i in range(by_page.shape[1])]
    words = {"L": "layers", "P": "pages", "S": "page_size", "H": "heads", "D": "width"}
    axis_names = ", ".join(words[axis] for axis in bare)
    by_slots = ""
    if order.startswith("L"):
        by_slots = f", ({axis_names.replace('pages, page_size', 'slots')}) with page_size=,"
    raise ValueError(
        f"{name}: expected ({axis_names}){by_slots} or a list of one array a layer, "
        f"got {describe(v)}"
    )


def _require_layers(v: ArrayView, count: int, name: str) -> None:
    if not 1 <= count <= _MAX_LAYERS:
        raise ValueError(f"{name}: expected 1 to {_MAX_LAYERS} layers, got {describe(v)}")


def _layer_by_page(v: ArrayView, name: str, page_size: int | None, has_heads: bool) -> ArrayView:
    """View a layer as (pages, page_size, heads, width)."""
    pages = v
    shape = "(pages, page_size, heads, width)" if has_heads else "(pages, page_size, width)"
    if not has_heads and v.ndim in (2, 3):
        slots = page_size is not None and v.ndim == 3 and v.shape[1] == 1 != page_size
        if not slots:  # no axis of one head
            strides = (*v.strides[:-1], 0, v.strides[-1])
            pages = reshaped(v, (*v.shape[:-1], 1, v.shape[-1]), strides)
    if pages.ndim == 3:
        if page_size is None:
            raise ValueError(
                f"{name}: expected {shape}, or page_size= with slots first, got {describe(v)}"
            )
        num_slots, step = pages.shape[0], pages.strides[0]
        if num_slots % page_size:
            raise ValueError(
                f"page_size: expected a divisor of the {num_slots} slots of {name}, got {page_size}"
            )
        by_page = (num_slots // page_size, page_size, *pages.shape[1:])
        pages = reshaped(pages, by_page, (page_size * step, step, *pages.strides[1:]))
    if pages.ndim != 4:
        raise ValueError(f"{name}: expected {shape}, got {describe(v)}")
    if not has_heads and pages.shape[2] != 1:
        raise ValueError(f"{name}: expected one head, got {describe(v)}")
    if page_size is not None and pages.shape[1] != page_size:
        raise ValueError(f"{name}: expected pages of {page_size} slots, got {describe(v)}")
    return pages


def _require_alike(parts: Sequence[Sequence[_Named]], names: Sequence[str]) -> None:
    """Raise unless layers are uniform, contiguous, writable and share no bytes."""
    if len(parts[-1]) != len(parts[0]):
        raise ValueError(
            f"{names[-1]}: expected {len(parts[0])} layers like {names[0]}, got {len(parts[-1])}"
        )
    first_name, first = parts[0][0]
    checks.number_format(first, first_name, four_bit=True)
    for part in parts:
        for name, v in part:
            if not v.size:
                raise ValueError(f"{name}: expected at least one element, got {describe(v)}")
            bytes_of(v, name)  # raises for group scales in a separate array
            hint = "; tag it with kv.view_as" if v.format not in formats.CACHE_FORMATS else ""
            of_part, rotated = part[0][1].shape, part[0][1].rotated_width
            shape = of_part if part is parts[0] else (*first.shape[:3], of_part[3])
            for expected, got, is_alike in (
                (first.format, f"{v.format}{hint}", v.format == first.format),
                (first.device, v.device, v.device == first.device),
                (f"pages of {shape}", v.shape, v.shape == shape),
                (f"{rotated} rotated elements", v.rotated_width, v.rotated_width == rotated),
                (f"scale_rule {first.scale_rule}", v.scale_rule, v.scale_rule == first.scale_rule),
            ):
                if not is_alike:
                    raise ValueError(f"{name}: expected {expected} like {first_name}, got {got}")
            checks.require_contiguous(v, name)
            checks.require_output(v, name)
            checks.require_aligned([(name, v)])
            if overlaps_itself(v):
                raise ValueError(f"{name}: expected distinct elements, got overlapping strides")
    names_of_all = [name for part in parts for name, _ in part]
    shared = first_overlap([v for part in parts for _, v in part])
    if shared is not None:
        owner, other = (names_of_all[i] for i in shared)
        raise ValueError(f"{other}: expected memory of its own, got some of {owner}'s")
