"""Stand-ins for the interfaces of vLLM, SGLang and LMCache, where these are not installed.

Made from the signatures and docstrings of vLLM 0.32 (`vllm/v1/kv_offload`), SGLang 0.5.23
(`sglang/srt/mem_cache/hicache_storage.py`) and LMCache 0.5.6 (`lmcache/v1/distributed`).
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar


@contextmanager
def adapter(name, interfaces):
    """Import a module of kvcupy.interop, with stand-ins by module name unless these can be."""
    full = f"kvcupy.interop.{name}"
    missing = {}
    for module, contents in interfaces.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing[module] = contents
    names = {
        ".".join(parts[:n])
        for parts in (module.split(".") for module in missing) for n in range(1, len(parts) + 1)
    }  # fmt: skip
    added = [each for each in sorted(names) if each not in sys.modules]
    for each in added:
        sys.modules[each] = ModuleType(each)
    for module, contents in missing.items():
        vars(sys.modules[module]).update(contents)
    try:
        yield importlib.import_module(full)
    finally:
        if missing:
            del sys.modules[full]
        for each in added:
            del sys.modules[each]


# --- vLLM ---


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass
class ReqContext:
    req_id: str


@dataclass
class RequestOffloadingContext:
    policy: Any = None


@dataclass
class OffloadingEvent:
    keys: list
    medium: Any
    removed: bool
    locality: Any = None


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: Any


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(
        self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None
    ):  # fmt: skip
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type

    @property
    def block_size_bytes(self):
        return self._block_size_bytes


class AsyncLookupManager:
    """Answers at the end of a step, and keeps an answer while a request needs it."""

    def __init__(self, tier_type):
        self._answers, self._requests, self._asked = {}, {}, []

    def lookup(self, key, req_context):
        if key not in self._answers:
            self._answers[key] = None
            self._asked.append((key, req_context))
        self._requests.setdefault(key, set()).add(req_context.req_id)
        return self._answers[key]

    def flush(self):
        for key, req_context in self._asked:
            [self._answers[key]] = self.batch_lookup([key], req_context)
        self._asked = []

    def mark_miss(self, keys):
        self._answers.update((key, False) for key in keys if key in self._answers)

    def cleanup(self, req_id):
        for key, requests in list(self._requests.items()):
            requests.discard(req_id)
            if not requests:
                del self._answers[key], self._requests[key]

    def shutdown(self):
        pass


class FileMapper:
    def __init__(self, fields, rank):
        self._fields, self.rank = fields, rank

    @classmethod
    def from_offloading_spec(
        cls, root_dir, offloading_spec, blocks_per_file=1, parallel_agnostic=False
    ):  # fmt: skip
        config = offloading_spec.config
        fields = {"model": config.model.name, "dtype": config.model.dtype, "n": blocks_per_file}
        return cls({**fields, "tp": config.parallel.tp_size}, config.parallel.rank)

    def get_run_config(self):
        return dict(self._fields)


class SecondaryTierFactory:
    tiers: ClassVar[dict] = {}

    @classmethod
    def register_tier(cls, tier_type, module_path, class_name):
        if tier_type in cls.tiers:
            raise ValueError(f"{tier_type} is registered")
        cls.tiers[tier_type] = module_path, class_name

    @classmethod
    def create_secondary_tier(cls, tier_config, primary_kv_view, offloading_spec):
        options = dict(tier_config)
        kind = options.pop("type")
        path, name = cls.tiers.get(kind, (options.pop("module_path", None), kind))
        return getattr(importlib.import_module(path), name)(
            offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, tier_type=kind,
            backpressure_detector=None, **options,
        )  # fmt: skip


def names(*values):
    return {value.__name__: value for value in values}


VLLM = {
    "vllm.v1.kv_offload.base": names(
        Locality, LookupResult, Medium, OffloadingEvent, ReqContext, RequestOffloadingContext
    ),
    "vllm.v1.kv_offload.file_mapper": names(FileMapper),
    "vllm.v1.kv_offload.tiering.async_lookup": names(AsyncLookupManager),
    "vllm.v1.kv_offload.tiering.base": names(JobResult, SecondaryTierManager, TransferJob),
    "vllm.v1.kv_offload.tiering.factory": names(SecondaryTierFactory),
}


def vllm_spec(model="m", dtype="bfloat16", tp_size=1, layout="NHD", replica=0, events=False):
    """Return an OffloadingSpec of vLLM as far as tiers read it."""
    parallel = SimpleNamespace(
        rank=0, world_size=tp_size, tp_size=tp_size, pp_size=1, pcp_size=1, dcp_size=1,
        data_parallel_index=replica, is_parallelism_agnostic=False,
    )  # fmt: skip
    config = SimpleNamespace(
        groups=(), model=SimpleNamespace(name=model, dtype=dtype),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1), parallel=parallel,
        kv_cache_layout=layout, canonical_layout=False, replicated_layout=False,
    )  # fmt: skip
    return SimpleNamespace(
        config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=events)
    )


# --- SGLang ---


class PoolName(str, Enum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"

    def __str__(self):
        return self.value


class PoolHitPolicy(str, Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: Any
    host_indices: Any = None
    device_indices: Any = None
    keys: Any = None
    hit_policy: Any = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable_prefix_pages: Any = None


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        self.__dict__.setdefault("registered_pools", {})[host_pool_name] = host_pool


SGLANG = {
    "sglang.srt.mem_cache.hicache_storage": names(
        HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult
    )
}


# --- LMCache ---


class Bitmap:
    def __init__(self, size):
        self._bits = [False] * size

    def set(self, index):
        self._bits[index] = True

    def test(self, index):
        return self._bits[index]


class L2StoreResult(int):
    def __new__(cls, success, bytes_transferred):
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self):
        return self >= 0

    def bytes_transferred(self):
        return max(int(self), 0)


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes=0):
        self.stored, self.accessed = [], []

    def _notify_keys_stored(self, keys, sizes):
        self.stored += zip(keys, sizes, strict=True)

    def _notify_keys_accessed(self, keys):
        self.accessed += keys


class EventNotifier:
    def __init__(self):
        self._ends = os.pipe()

    def fileno(self):
        return self._ends[0]

    def notify(self):
        os.write(self._ends[1], b"1")

    def close(self):
        for end in self._ends:
            os.close(end)


def create_event_notifier():
    return EventNotifier()


LMCACHE = {
    "lmcache.lmcache_native": names(Bitmap),
    "lmcache.v1.distributed.internal_api": names(L2StoreResult),
    "lmcache.v1.distributed.l2_adapters.base": names(L2AdapterInterface),
    "lmcache.v1.platform": names(create_event_notifier),
}


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass
class Chunk:
    """An object in LMCache's memory."""

    data: Any
    shapes: list
    dtypes: list

    @property
    def byte_array(self):
        return memoryview(self.data)

    def get_shapes(self):
        return self.shapes

    def get_dtypes(self):
        return self.dtypes

    def get_size(self):
        return self.data.nbytes


@dataclass(frozen=True)
class TorchDtype:
    """A dtype of torch."""

    name: str
    itemsize: int = field(compare=False, default=2)

    def __repr__(self):
        return f"torch.{self.name}"


_numbers, _folder = itertools.count(), tempfile.TemporaryDirectory()


def store_url():
    """Return the URL of a new store in a directory."""
    return f"file:{_folder.name}/{next(_numbers)}"
