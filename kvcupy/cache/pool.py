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
    for the scales of each. `k(layer)` and `v(layer)` are arrays of the device's library (NumPy,
    CuPy; fp8 of a GPU as ArrayViews), which export DLPack in every format; `torch_k` and `torch_v`
    give them as tensors. `KVPool.wrap` makes a pool over memory that is there.
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

    @classmethod
    def wrap(
        cls,
        k: Any,
        v: Any,
        *,
        layout: str = "layer_first",
        page_size: int | None = None,
        device: Any = None,
    ) -> KVPool:
        """Return a pool over memory that is there: nothing is copied.

        Parameters
        ----------
        k, v : NumPy or CuPy arrays, torch tensors, or ArrayViews of `view_as`, on one device and of
            one format. Either one array with the axes of `layout`, or a list of one array a layer:
            (pages, page_size, heads, width), with any strides whose last is contiguous, or
            (slots, heads, width) with `page_size`. The widths of K and V may differ
        layout : as in `KVPool`; with lists "layer_first"
        page_size : slots a page, for arrays by slots
        device : a Device or its name: for memory of the host that is to go with a pool of a GPU,
            that GPU. None: that of the arrays, and for pinned memory the default one

        Returns
        -------
        KVPool : with a fresh allocator, and "device", "pinned" or "pageable" for its placement, as
            the arrays are. It keeps them alive

        Raises
        ------
        TypeError, ValueError : an array does not fit, is read-only, or shares bytes with another

        Notes
        -----
        Layers in allocations of their own take a kernel each where those of a pool's own array take
        one for all. Transfers, engines, tiers and the paged cache take the pool as any other.
        Source: vLLM `(2, num_blocks, block_size, heads, head_dim)` a layer, where k is `c[0]` and v
        `c[1]`; SGLang `MHATokenToKVPool`, (slots, heads, head_dim) a layer; FlashInfer's paged NHD
        and HND, the latter as `k.transpose(1, 2)`.

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

    @classmethod
    def wrap(
        cls,
        latent: Any,
        *,
        layout: str = "layer_first",
        page_size: int | None = None,
        device: Any = None,
    ) -> MLAPool:
        """Return a pool over memory that is there, as `KVPool.wrap` does.

        Parameters
        ----------
        latent : one array with the axes of `layout`, the one head left out or not, or a list of one
            array a layer: (pages, page_size, latent_dim), or (slots, latent_dim) and
            (slots, 1, latent_dim) with `page_size`
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
        pool.latent_dim = pool.head_dim
        return pool

    _has_heads = False

    def _row(self) -> str:
        return f"a latent of {self.latent_dim}"

    def _shown(self, of_layer: Any) -> Any:
        return of_layer[:, :, 0]
