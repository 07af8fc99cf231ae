"""A storage backend of SGLang's HiCache: pages of its host pools in block stores.

SGLang imports it with `--hicache-storage-backend dynamic` and
`--hicache-storage-backend-extra-config`:

    {"backend_name": "kvcupy", "module_path": "kvcupy.interop.sglang_hicache",
     "class_name": "KvcupyStorage", "interface_v1": 1, "stores": ["redis://cache:6379"]}

Source: sgl-project/sglang `python/sglang/srt/mem_cache/hicache_storage.py` (the interface).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

try:
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        PoolHitPolicy,
        PoolName,
        PoolTransferResult,
    )
except ImportError as error:
    raise ImportError(
        "kvcupy.interop.sglang_hicache needs SGLang 0.5.23 or newer: pip install sglang"
    ) from error

from ..config import BoundedLog, cache_logger
from .byte_store import Bytes, ByteStore, block_hash, bytes_at


class KvcupyStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang counts as untyped
    """Keeps pages of SGLang's host pools in block stores.

    Parameters
    ----------
    storage_config : SGLang's HiCacheStorageConfig. Its `extra_config` has `stores`, as in
        `store_options`; optionally `model`, which distinguishes weights that SGLang knows by the
        same name, and is required for fp8, of which host pools do not know the kind; and
        `encryption_key`, as in `as_key`. `interface_v1` is required: SGLang then passes indices of
        pages, which are read and written where they are
    pool : ignored, since SGLang registers its pools

    Raises
    ------
    TypeError, ValueError, ImportError, OSError : an option is invalid, here or when SGLang
        registers a pool

    Notes
    -----
    Identity: a page is found by ranks and engines with the same model name, `model`, dtype, layout,
    page size and shapes, pipeline and context parallel ranks and sizes, and tensor parallel rank
    and size, unless all ranks have equal pages (MLA).

    Failure: a page that the store does not have is False or None. A server that is unreachable at
    the start is tried again every 30 s. Bytes: each page twice in each direction, from and to the
    addresses of the pool's `get_page_buffer_meta`.
    """

    def __init__(self, storage_config: Any, pool: Any = None) -> None:
        own, extra = storage_config, dict(storage_config.extra_config or {})
        for name in ("backend_name", "module_path", "class_name"):
            extra.pop(name, None)
        if not extra.pop("interface_v1", False):
            raise ValueError(
                'extra_config: expected "interface_v1": 1, with which SGLang passes indices of '
                "pages, got none"
            )
        self._model = str(extra.pop("model", ""))
        fields = {
            "model": (own.model_name, self._model),
            "pp": (own.pp_rank, own.pp_size), "cp": (own.attn_cp_rank, own.attn_cp_size),
            "dcp": (own.dcp_rank, own.dcp_size),
        }  # fmt: skip
        identity = f"sglang {block_hash(json.dumps(fields, sort_keys=True)):032x}"
        self._tp, self._is_mla = f"tp {own.tp_rank} {own.tp_size}", bool(own.is_mla_model)
        self._store = ByteStore(**{"stores": None, **extra}, model=identity)
        self._log = BoundedLog(cache_logger)
        self._pools: dict[str, _Pages] = {}

    # --- Pages of registered pools ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if mem_pool_host.dtype == torch.uint8 and not self._model:
            raise ValueError(
                'extra_config: expected "model" to name the format of a cache of 8 bits, got none'
            )
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        # Beside MLA, states and the heads of a draft model still differ between ranks.
        is_sharded = name == PoolName.MAMBA or "MHA" in type(host_pool).__name__
        pages = _Pages(host_pool, f"{name} {self._tp if is_sharded or not self._is_mla else ''}")
        self._store.open(pages.num_bytes)
        self._pools[name] = pages

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return [*self._contains(PoolName.KV, keys), False].index(False)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._move(self._store.get, PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._move(self._store.put, PoolName.KV, keys, host_indices)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            t.name: self._move(self._store.get, t.name, t.keys or [], t.host_indices)
            for t in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            t.name: self._move(self._store.put, t.name, t.keys or [], t.host_indices)
            for t in transfers
        }

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        num_pages = self.batch_exists(keys)
        hits = {PoolName.KV: num_pages} if num_pages else {}
        restorable = set(range(1, num_pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # SGLang skips a pool without an entry
            there = self._contains(transfer.name, keys[:num_pages])
            window = num_pages
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            ends = {n for n in restorable if all(there[max(0, n - window) : n])}
            if ends:
                hits[transfer.name] = max(ends)
            restorable = ends
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _contains(self, name: Any, keys: list[str]) -> list[bool]:
        if (pages := self._pools.get(str(name))) is None:
            return [False] * len(keys)
        return self._store.contains(pages.keys(keys), pages.num_bytes)

    def _move(
        self, move: Callable[[list[str], list[list[Bytes]]], list[bool]], name: Any,
        keys: list[str], indices: Any,
    ) -> list[bool]:  # fmt: skip
        """Put or get pages; False for each if the pool is unknown, or indices do not fit keys."""
        pages, got = self._pools.get(str(name)), 0 if indices is None else len(indices)
        try:
            if pages is None or got != len(keys) * pages.page_size:
                raise ValueError(
                    f"{name}: expected {len(keys)} pages of a registered pool, got {got} rows"
                )
            return move(pages.keys(keys), pages.blocks(indices)) if keys else []
        except Exception as error:  # it would end a thread of SGLang
            self._log.warning("%d pages are missing: %s", len(keys), error)
            return [False] * len(keys)

    # --- What SGLang does not call with `interface_v1`: pages as tensors ---

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("pages are moved by index: batch_get_v1, batch_set_v1")

    batch_get = set = batch_set = get

    def clear(self) -> bool:
        """Refuse: other engines use these blocks. The server's own tools drop them."""
        cache_logger.warning("not cleared: other engines use the blocks of this store")
        return False

    def close(self) -> None:
        """Close the store; no calls may be in progress."""
        self._store.close()


class _Pages:
    """The pages of a host pool of SGLang, as blocks of bytes."""

    def __init__(self, pool: Any, name: str) -> None:
        self._pool, self.page_size = pool, int(pool.page_size or 1)
        _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        self.num_bytes = sum(sizes)
        self._name = f"{name} {_layout(pool)} {list(sizes)}"

    def keys(self, keys: Sequence[str]) -> list[str]:
        return [f"{self._name} {key}" for key in keys]

    def blocks(self, indices: torch.Tensor) -> list[list[Bytes]]:
        """Return the parts of each page, in the order of the pool."""
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        parts = [bytes_at(*part) for part in zip(pointers, sizes, strict=True)]
        per_page = len(parts) * self.page_size // len(indices)
        return [parts[start : start + per_page] for start in range(0, len(parts), per_page)]


def _layout(pool: Any) -> str:
    """Describe the order and the format of the bytes of a pool."""
    tag = getattr(pool, "storage_format_tag", None)
    return f"{pool.dtype} {pool.layout} {pool.page_size} {tag}"
