"""Pools of pages: K and V, or the latent, of every layer, in one array each."""

from __future__ import annotations

from typing import Any

from .storage import Pool, count


class KVPool(Pool):
    """Pages of K and V of every layer.

    Parameters
    ----------
    num_pages, page_size, num_layers, num_kv_heads, head_dim : counts; head_dim is the width of K
    v_head_dim : the width of V; None is that of K
    dtype : name of a number format, or its NumPy, ml_dtypes or torch dtype
    layout : axes as stored, K and V in arrays of their own. "layer_first" (layers, pages,
        page_size, heads, width), "page_first" (pages, page_size, layers, heads, width),
        "page_first_direct" (pages, layers, page_size, heads, width), "page_head" (pages, heads,
        page_size, layers, width)
    placement : "device"; "pinned", host memory that the device reads and writes directly;
        "pageable", plain host memory. All start as zeros
    device : a Device or its name; None is the default device
    scales : lay float32 scales beside K and V of a quantised format, one for each token and head

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    DeviceError, MemoryError : there is no room; nothing stays allocated

    Notes
    -----
    Attributes: those of `Pool`. Bytes: exactly `num_bytes`, in an allocation each for K, for V and
    for the scales of each.
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
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: Any = "bf16",
        layout: str = "layer_first",
        placement: str = "device",
        device: Any = None,
        scales: bool = False,
    ) -> None:
        k_width = count(head_dim, "head_dim")
        v_width = k_width if v_head_dim is None else count(v_head_dim, "v_head_dim")
        super().__init__(
            num_pages, page_size, num_layers, num_kv_heads, (k_width, v_width),
            dtype=dtype, layout=layout, placement=placement, device=device, scales=scales,
        )  # fmt: skip

    def _row(self) -> str:
        width = str(self.head_dim)
        if self.v_head_dim != self.head_dim:
            width += f" (K) and {self.v_head_dim} (V)"
        return f"{self.num_kv_heads} heads of {width}"


class MLAPool(Pool):
    """Pages of the latent of every layer, for multi-head latent attention.

    Parameters
    ----------
    latent_dim : elements that a token has in a layer, the rope part included
    num_pages, page_size, num_layers, dtype, layout, placement, device, scales : as in `KVPool`;
        the layouts have one head

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    DeviceError, MemoryError : there is no room; nothing stays allocated

    Notes
    -----
    Attributes: those of `Pool`, with one head, and `latent_dim`, which is the width of K and of V.
    `k` and `v` both give the latent of a layer, (num_pages, page_size, latent_dim), `k_scale` and
    `v_scale` its scales.

    Examples
    --------
    >>> MLAPool(64, 16, 2, 576, device="host").k(0).shape
    (64, 16, 576)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        latent_dim: int,
        *,
        dtype: Any = "bf16",
        layout: str = "layer_first",
        placement: str = "device",
        device: Any = None,
        scales: bool = False,
    ) -> None:
        self.latent_dim = count(latent_dim, "latent_dim")
        super().__init__(
            num_pages, page_size, num_layers, 1, (self.latent_dim,),
            dtype=dtype, layout=layout, placement=placement, device=device, scales=scales,
        )  # fmt: skip

    def _row(self) -> str:
        return f"a latent of {self.latent_dim}"

    def _of_layer(self, by_page: Any, layer: int) -> Any:
        return by_page[:, layer, :, 0]
