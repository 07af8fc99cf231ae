"""An L2 adapter of LMCache: chunks of its memory in block stores.

LMCache's server imports it with `--l2-adapter`:

    {"type": "plugin", "module_path": "kvcupy.interop.lmcache_backend",
     "class_name": "KvcupyL2Adapter", "adapter_params": {"stores": ["redis://cache:6379"]}}

Source: LMCache/LMCache `lmcache/v1/distributed/l2_adapters/base.py` (the interface).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from math import prod
from typing import Any

import numpy as np

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise ImportError(
        "kvcupy.interop.lmcache_backend needs LMCache 0.5.6 or newer: pip install lmcache"
    ) from error

from ..config import BoundedLog, cache_logger
from ..errors import ProcessLocal
from .byte_store import Bytes, ByteStore

_NUM_THREADS = 4

_Layout = tuple[str, int]  # description of a chunk, and its bytes


class KvcupyL2Adapter(ProcessLocal, L2AdapterInterface):  # type: ignore[misc]  # LMCache counts as untyped
    """Keeps chunks of LMCache in block stores.

    Parameters
    ----------
    config : `stores`, as in `store_options`; optionally `model`, which distinguishes weights that
        LMCache knows by the same name, and is required for fp8, of which LMCache does not know the
        kind; and `encryption_key`, as in `as_key`
    l1_memory_desc : ignored

    Raises
    ------
    TypeError, ValueError : `stores` is missing, or an option is invalid

    Notes
    -----
    Identity: LMCache's key (model name, rank, object group, cache salt, hash of the tokens),
    `model`, and the chunk's shapes and dtypes. A chunk that LMCache transforms ("serde") has
    another length than the lookup says, and is not found.

    Failure: a chunk that the store does not have is 0 in the bitmap. The store evicts by itself:
    nothing is locked, and a chunk may be missing after a successful lookup. Bytes: each chunk twice
    in each direction.
    """

    def __init__(self, config: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        options = {"stores": None, "model": "", **config}
        self._model = str(options.pop("model"))
        self._store = ByteStore(model=f"lmcache {self._model}", num_calls=_NUM_THREADS, **options)
        self._log = BoundedLog(cache_logger)
        self._threads = futures.ThreadPoolExecutor(_NUM_THREADS, "kvcupy lmcache")
        self._store_event, self._lookup_event, self._load_event = (
            create_event_notifier() for _ in range(3)
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the results
        self._stored: dict[int, Any] = {}
        self._read: dict[int, Any] = {}  # of lookups and loads

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    # --- Tasks ---

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(
            lambda: self._put(keys, objects), L2StoreResult(False, 0), self._stored,
            self._store_event,
        )  # fmt: skip

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            results = dict(self._stored)
            self._stored.clear()
        return results

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: dict[int, Any]
    ) -> int:
        return self._submit(
            lambda: self._contains(keys, group_layout_descs), Bitmap(len(keys)), self._read,
            self._lookup_event,
        )  # fmt: skip

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._read.pop(task_id, None)

    query_load_result = query_lookup_and_lock_result

    def submit_unlock(self, keys: list[Any]) -> None:
        pass

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(
            lambda: self._get(keys, objects), Bitmap(len(keys)), self._read, self._load_event
        )

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": type(self).__name__, "stores": self._store.stats()}

    def close(self) -> None:
        """Cancel tasks that have not begun, wait for the others, and close the store."""
        self._threads.shutdown(cancel_futures=True)
        self._store.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    def _submit(
        self, task: Callable[[], Any], failed: Any, results: dict[int, Any], event: Any
    ) -> int:
        """Run a task in a thread, put its result, and notify; `failed` after an exception."""
        number = next(self._numbers)

        def run() -> None:
            try:
                result = task()
            except Exception as error:  # LMCache would wait for ever
                self._log.warning("chunks are missing: %s", error)
                result = failed
            with self._lock:
                results[number] = result
            event.notify()

        self._threads.submit(run)
        return number

    # --- In threads ---

    def _put(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        held = []
        for places, names, blocks in self._alike(keys, objects):
            is_held = self._store.put(names, blocks)
            held += [i for i, there in zip(places, is_held, strict=True) if there]
        sizes = [objects[i].get_size() for i in held]
        if held:
            self._notify_keys_stored([keys[i] for i in held], sizes)
        return L2StoreResult(len(held) == len(keys), sum(sizes))

    def _get(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        found = []
        for places, names, blocks in self._alike(keys, objects):
            arrived = self._store.get(names, blocks)
            found += [i for i, whole in zip(places, arrived, strict=True) if whole]
        if found:
            self._notify_keys_accessed([keys[i] for i in found])
        return _bitmap(len(keys), found)

    def _contains(self, keys: Sequence[Any], descriptions: dict[int, Any]) -> Any:
        layouts = {
            group: self._layout(of_group.shapes, of_group.dtypes)
            for group, of_group in descriptions.items()
        }
        found = []
        for layout, places in _groups(layouts.get(key.object_group_id) for key in keys).items():
            names = [_name(keys[i], layout) for i in places]
            known = self._store.contains(names, layout[1])
            found += [i for i, there in zip(places, known, strict=True) if there]
        return _bitmap(len(keys), found)

    def _alike(
        self, keys: Sequence[Any], objects: Sequence[Any]
    ) -> Iterable[tuple[list[int], list[str], list[list[Bytes]]]]:
        """Yield places, names and memory of chunks, by layout."""
        layouts = [self._layout(chunk.get_shapes(), chunk.get_dtypes()) for chunk in objects]
        for layout, places in _groups(layouts).items():
            memory = [np.frombuffer(objects[i].byte_array, np.uint8) for i in places]
            yield places, [_name(keys[i], layout) for i in places], [[part] for part in memory]

    def _layout(self, shapes: Iterable[Any], dtypes: Iterable[Any]) -> _Layout:
        parts = [(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        if not self._model and any(str(dtype) == "torch.uint8" for _, dtype in parts):
            raise ValueError(
                'adapter_params: expected "model" to name the format of a cache of 8 bits, got none'
            )
        return str(parts), sum(prod(shape) * dtype.itemsize for shape, dtype in parts)


def _groups(layouts: Iterable[_Layout | None]) -> dict[_Layout, list[int]]:
    """Return the places of each layout, in the order of first use."""
    groups: dict[_Layout, list[int]] = {}
    for i, layout in enumerate(layouts):
        if layout is not None:
            groups.setdefault(layout, []).append(i)
    return groups


def _name(key: Any, layout: _Layout) -> str:
    parts = key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash.hex()
    return f"{parts} {layout[0]}"


def _bitmap(size: int, places: Iterable[int]) -> Any:
    bitmap = Bitmap(size)
    for i in places:
        bitmap.set(i)
    return bitmap
