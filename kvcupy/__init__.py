"""KV-cache kernels for LLM inference: CUDA sources compiled at run time, streams made explicit.

Importing this touches no device, imports neither CuPy nor torch, and compiles nothing.
"""

import sys
from typing import TYPE_CHECKING, Any

from . import events, metrics
from .arrays import ArrayView, view_as
from .cache.engine import Transfer, TransferEngine
from .cache.identity import BlockKeys, PoolIdentity
from .cache.paged import backends as _backends
from .cache.paged.arguments import Demotion
from .cache.paged.cache import PagedKVCache
from .cache.paged.groups import FullAttention, Latent, Recurrent, SlidingWindow
from .cache.pages import PageAllocator, block_hashes
from .cache.pool import KVPool, MLAPool
from .cache.tiered import store_tier as _store_tier
from .cache.tiered.cache import TieredCache
from .cache.tiered.leases import Lease
from .config import config
from .devices import check_faults, default_device, device
from .errors import (
    CacheFull,
    CaptureError,
    CompileError,
    DeviceError,
    IndexFault,
    KvcupyError,
    OrderError,
    OrderWarning,
    TransferError,
    UnknownSequence,
)
from .formats import Encoding
from .ops import launch as _launch
from .ops.attention import paged_attention
from .ops.custom import kernel
from .ops.indexing import find_duplicate_slots, page_table_csr, slot_mapping
from .ops.merge import merge_states
from .ops.pages import copy_pages, shift_pages
from .ops.rope import apply_rope, rope_store_kv, rope_store_mla
from .ops.rope_table import rope_table
from .ops.states import gather_state, store_state, update_conv_state
from .ops.store import gather_kv, store_kv, store_mla
from .ops.transfer import transfer_pages
from .order.checker import declare, order_checker
from .order.explore import ExploreResult, explore
from .remote.migration.receiver import PageReceiver, Pull
from .remote.migration.sender import PageSender
from .remote.stores.store import BlockStore
from .streams import fork, join, keep_alive
from .timelines import nvtx as _nvtx  # noqa: F401 -- config.nvtx takes effect
from .timelines.timeline import timeline

__version__ = "0.1.0"

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "kvcupy relies on the global interpreter lock: start this free-threaded Python with "
        "-X gil=1 or PYTHON_GIL=1"
    )

if TYPE_CHECKING:
    from .devices.protocol import Device as _Device
    from .kernels import Specialisation as _Specialisation
    from .testing.verification import verify
else:

    def __getattr__(name: str) -> Any:
        """Import `verify`, which needs `kvcupy.testing`, when it is asked for."""
        if name != "verify":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .testing.verification import verify

        return verify


def _is_verified(device: "_Device", specialisation: "_Specialisation") -> bool | None:
    from .testing.verification import is_verified

    return is_verified(device, specialisation)


def _open_backend(attention: Any, pool: Any, layers: Any, steps: Any) -> Any:
    from .interop.attention_backends import open_backend

    return open_backend(attention, pool, layers, steps)


_launch.verifier = _is_verified
_backends.opener = _open_backend
_store_tier.opener = BlockStore.open

__all__ = [
    "ArrayView",
    "BlockKeys",
    "BlockStore",
    "CacheFull",
    "CaptureError",
    "CompileError",
    "Demotion",
    "DeviceError",
    "Encoding",
    "ExploreResult",
    "FullAttention",
    "IndexFault",
    "KVPool",
    "KvcupyError",
    "Latent",
    "Lease",
    "MLAPool",
    "OrderError",
    "OrderWarning",
    "PageAllocator",
    "PageReceiver",
    "PageSender",
    "PagedKVCache",
    "PoolIdentity",
    "Pull",
    "Recurrent",
    "SlidingWindow",
    "TieredCache",
    "Transfer",
    "TransferEngine",
    "TransferError",
    "UnknownSequence",
    "apply_rope",
    "block_hashes",
    "check_faults",
    "config",
    "copy_pages",
    "declare",
    "default_device",
    "device",
    "events",
    "explore",
    "find_duplicate_slots",
    "fork",
    "gather_kv",
    "gather_state",
    "join",
    "keep_alive",
    "kernel",
    "merge_states",
    "metrics",
    "order_checker",
    "page_table_csr",
    "paged_attention",
    "rope_store_kv",
    "rope_store_mla",
    "rope_table",
    "shift_pages",
    "slot_mapping",
    "store_kv",
    "store_mla",
    "store_state",
    "timeline",
    "transfer_pages",
    "update_conv_state",
    "verify",
    "view_as",
]
