"""A secondary tier of vLLM's KV offloading: blocks of its CPU memory in block stores.

Named in `kv_connector_extra_config` of vLLM's OffloadingConnector, which imports it:

    {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 * 2**30, "secondary_tiers": [
        {"type": "KvcupyTier", "module_path": "kvcupy.interop.vllm_tier",
         "stores": [{"url": "file:/mnt/nvme/kv", "capacity_bytes": 500 * 2**30},
                    "redis://cache:6379"]}]}

Once this module is imported, as by a plugin of vLLM, `"type": "kvcupy"` suffices.

Source: vllm-project/vllm `vllm/v1/kv_offload/tiering/base.py` (the interface).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

try:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
except ImportError as error:
    message = "kvcupy.interop.vllm_tier needs vLLM 0.32 or newer: pip install vllm"
    raise ImportError(message) from error

from ..arrays import array_at
from ..cache.pool import MLAPool
from ..config import BoundedLog, cache_logger
from ..errors import ProcessLocal
from .byte_store import PoolStores, block_hash


class KvcupyTier(ProcessLocal, SecondaryTierManager):  # type: ignore[misc]  # vLLM counts as untyped
    """Keeps blocks of vLLM's CPU tier in block stores.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector : passed by vLLM
    stores : as in `store_options`, the nearest first
    encryption_key : as in `as_key`
    model : distinguishes weights that vLLM knows by the same name, such as a revision
    num_threads : threads that load; as many store
    locality, enable_kv_events : as in vLLM's own tiers: None, "LOCAL" or "REMOTE"; and whether
        stored blocks are published, where vLLM publishes events

    Raises
    ------
    TypeError, ValueError, ImportError : an option is invalid, or a package is missing
    OSError : a directory cannot be written

    Notes
    -----
    Identity: blocks are found by engines with the same model name, `model`, dtype, layout, groups
    of layers, block sizes, and parallel sizes where they matter. vLLM's keys are hashes of all
    tokens up to the block, and of the cache salt.

    Failure: a block that a store does not have, or that fails its checksum or tag, is a miss, and
    vLLM computes it. A server that is unreachable at the start is tried again every 30 s.

    Bytes: each block once in each direction, from and to vLLM's memory.
    """

    medium = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None, *,
        stores: Any = None, encryption_key: Any = None, model: str = "", num_threads: int = 4,
        locality: str | None = None, enable_kv_events: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        # By address: vLLM cannot unmap memory of which arrays are exported.
        memory = np.asarray(primary_kv_view)
        num_chunks, address = len(memory), memory.ctypes.data
        del memory
        shape = (num_chunks, 1, self.block_size_bytes)
        pool = MLAPool.wrap([array_at(None, address, shape, np.dtype(np.int8))])
        self._below = PoolStores(
            stores, pool, model=_identity(offloading_spec, model), encryption_key=encryption_key
        )
        self._loads, self._stores = (
            futures.ThreadPoolExecutor(num_threads, f"kvcupy {verb}") for verb in ("load", "store")
        )
        self._log = BoundedLog(cache_logger)
        self._jobs: set[futures.Future[None]] = set()
        # Results, with the keys of stored blocks and of blocks that could not be loaded.
        self._finished: SimpleQueue[tuple[JobResult, list[bytes], list[bytes]]] = SimpleQueue()
        published = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if published else None
        self._lookup_manager = _Lookup(tier_type, self._contains)

    # --- Called by vLLM's scheduler, which must not wait ---

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookup_manager.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(self._stores, self._put, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(self._loads, self._get, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while not self._finished.empty():
            result, stored, missing = self._finished.get()
            self._lookup_manager.mark_miss(missing)  # else vLLM would load them again
            if self._events is not None and stored:
                self._events.append(
                    OffloadingEvent(stored, self.medium, False, locality=self.locality)
                )
            results.append(result)
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = self._events or []
        yield from events
        events.clear()

    def on_schedule_end(self, context: Any) -> None:
        self._lookup_manager.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookup_manager.cleanup(req_context.req_id)

    def drain_jobs(self) -> None:
        futures.wait(list(self._jobs))

    def shutdown(self) -> None:
        """Cancel jobs that have not begun, wait for the others, and close the stores."""
        self._lookup_manager.shutdown()
        for executor in (self._loads, self._stores):
            executor.shutdown(cancel_futures=True)
        self._below.close()

    # --- Jobs ---

    def _submit(
        self, executor: futures.Executor,
        move: Callable[[Sequence[bytes], Sequence[int]], list[bool]], job: Any,
    ) -> None:  # fmt: skip
        future = executor.submit(self._run, move, job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)

    def _run(self, move: Callable[[Sequence[bytes], Sequence[int]], list[bool]], job: Any) -> None:
        keys, chunks = list(job.keys), [int(chunk) for chunk in job.chunk_ids]
        started = time.monotonic()
        try:
            arrived = move(keys, chunks)
        except Exception as error:  # it would end the engine
            self._log.warning("%d blocks are missing: %s", len(keys), error)
            arrived = [False] * len(keys)
        whole = [key for key, there in zip(keys, arrived, strict=True) if there]
        missing = [key for key, there in zip(keys, arrived, strict=True) if not there]
        result = JobResult(
            job_id=job.job_id, success=not missing, successful_keys=tuple(whole) or None,
            transfer_time=time.monotonic() - started,
            transfer_bytes=len(whole) * self.block_size_bytes,
        )  # fmt: skip
        is_load = move == self._get
        stored = [] if is_load or missing else keys
        self._finished.put((result, stored, missing if is_load else []))

    def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._below.contains(list(map(block_hash, keys)))

    def _put(self, keys: Sequence[bytes], chunks: Sequence[int]) -> list[bool]:
        return self._below.put(list(map(block_hash, keys)), chunks)

    def _get(self, keys: Sequence[bytes], chunks: Sequence[int]) -> list[bool]:
        return self._below.get(list(map(block_hash, keys)), chunks)


class _Lookup(AsyncLookupManager):  # type: ignore[misc]  # vLLM counts as untyped
    """Asks the stores in a thread, and keeps the answers for a request."""

    def __init__(self, tier_type: str, contains: Callable[[Sequence[bytes]], list[bool]]) -> None:
        self._contains = contains
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._contains(keys)


def _identity(spec: Any, model: str) -> str:
    """Describe what must be equal for blocks of two engines to be interchangeable."""
    mapper = FileMapper.from_offloading_spec(
        "", spec, blocks_per_file=spec.config.cache.blocks_per_chunk, parallel_agnostic=True
    )
    fields = mapper.get_run_config(), mapper.rank, spec.config.kv_cache_layout, model
    return f"vllm {block_hash(json.dumps(fields, sort_keys=True)):032x}"


with suppress(ValueError):  # registered before, if the module is imported again
    SecondaryTierFactory.register_tier("kvcupy", __name__, KvcupyTier.__name__)
