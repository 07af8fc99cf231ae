"""A secondary tier of vLLM's KV offloading: blocks of its CPU memory on disk and in shared stores.

Named in `kv_connector_extra_config` of vLLM's OffloadingConnector, which imports it:

    {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 * 2**30, "secondary_tiers": [
        {"type": "KvcupyTier", "module_path": "kvcupy.interop.vllm_tier",
         "disk_path": "/mnt/nvme/kv", "disk_bytes": 500 * 2**30, "store": "redis://cache:6379"}]}

Once this module is imported, as by a plugin of vLLM, `"type": "kvcupy"` suffices.

Source: vllm-project/vllm `vllm/v1/kv_offload/tiering/base.py` (the interface).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from contextlib import suppress
from itertools import islice
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
from ..cache.encryption import key_for
from ..cache.identity import PoolIdentity
from ..cache.pool import MLAPool
from ..cache.tiered.disk_blocks import DiskBlocks, DiskMove
from ..cache.tiered.order import EvictionOrder
from ..config import BoundedLog, cache_logger
from ..errors import ProcessLocal
from .byte_store import HELD, ByteStore, block_hash
from .engine_options import as_key, open_file


class KvcupyTier(ProcessLocal, SecondaryTierManager):  # type: ignore[misc]  # vLLM counts as untyped
    """Keeps blocks of vLLM's CPU tier in a file, in a shared store, or in both.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector : passed by vLLM
    disk_path, disk_bytes, store, encryption_key : as in
        `kvcupy.interop.vllm_connector.options.Options`; the key may also be a function from tenant
        to 32 bytes. The length of a block is appended to the name of a store in shared memory
    store_bytes : size of a new "shm:" store
    tenant : engines with other tenants do not find these blocks
    model : distinguishes weights that vLLM knows by the same name, such as a revision
    num_threads : threads that load; as many store
    locality, enable_kv_events : as in vLLM's own tiers: None, "LOCAL" or "REMOTE"; and whether
        stored blocks are published, where vLLM publishes events
    options : of `SharedStore.open`, such as `deadline_s`

    Raises
    ------
    TypeError, ValueError, ImportError : an option is invalid, or a package is missing
    BlockingIOError : another process has the file open
    OSError : the file cannot be opened, or belongs to another user

    Notes
    -----
    Identity: blocks are found by engines with the same model name, `model`, dtype, layout, groups
    of layers, block sizes, and parallel sizes where they matter. vLLM's keys are hashes of all
    tokens up to the block, and of the cache salt.

    Failure: a block that a disk or store does not have, or that fails its checksum or tag, is a
    miss, and vLLM computes it. A store that is unreachable at the start is tried again every 30 s.

    Bytes: a block is read from and written to the disk in place, and is copied once more on its way
    to and from a store.
    """

    medium = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None, *,
        disk_path: Any = None, disk_bytes: int = 0, store: str | None = None,
        store_bytes: int | None = None, encryption_key: Any = None,
        tenant: str = "", model: str = "",
        num_threads: int = 4, locality: str | None = None, enable_kv_events: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        if disk_path is None and store is None:
            raise ValueError("secondary_tiers: expected disk_path, store or both, got neither")
        if options and store is None:
            raise TypeError(
                f"secondary_tiers: expected options of KvcupyTier, got {', '.join(options)}"
            )
        # By address: vLLM cannot unmap memory of which arrays are exported.
        memory = np.asarray(primary_kv_view)
        num_chunks, address = len(memory), memory.ctypes.data
        del memory
        shape = (num_chunks, self.block_size_bytes)
        self._chunks = array_at(None, address, shape, np.dtype(np.uint8))
        identity = _identity(offloading_spec, model)
        self._store: ByteStore | None = None
        if store_bytes is not None:
            options["capacity_bytes"] = store_bytes
        if store is not None:
            self._store = ByteStore(
                store, model=identity, tenant=tenant, encryption_key=encryption_key,
                num_calls=2 * num_threads, **options,
            )  # fmt: skip
            self._store.open(self.block_size_bytes)
        self._disk: DiskBlocks | None = None
        self._lock = threading.Lock()  # guards the disk's index
        if disk_path is not None:
            pool = MLAPool.wrap([self._chunks[:, None].view(np.int8)])
            key = as_key(encryption_key)
            own = f"vllm {block_hash(f'{identity} {tenant}'):032x}"  # the tenant may be secret
            self._disk = open_file(
                disk_path, own.replace(" ", "-"),
                lambda file: DiskBlocks(
                    file, disk_bytes, pool, EvictionOrder(),
                    PoolIdentity.of(pool, model=own), None if key is None else key_for(key, tenant),
                ),
            )  # fmt: skip
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

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        if self._disk is not None:
            hashes = list(map(block_hash, keys))
            with self._lock:
                self._disk.use(hashes)

    def on_schedule_end(self, context: Any) -> None:
        self._lookup_manager.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookup_manager.cleanup(req_context.req_id)

    def drain_jobs(self) -> None:
        futures.wait(list(self._jobs))

    def shutdown(self) -> None:
        """Cancel jobs that have not begun, wait for the others, and close disk and store."""
        self._lookup_manager.shutdown()
        for executor in (self._loads, self._stores):
            executor.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()
        if self._disk is not None:
            try:
                self._disk.flush()
            except (OSError, ValueError) as error:  # such as of a disk that is closed already
                cache_logger.warning("the disk tier may lose its last blocks: %s", error)
            self._disk.close()

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
        there = [False] * len(keys)
        if self._disk is not None:
            hashes = list(map(block_hash, keys))
            with self._lock:
                if self._disk.available:
                    there = [hash in self._disk.slots for hash in hashes]
        missing = [i for i, known in enumerate(there) if not known]
        if self._store is not None and missing:
            known = self._store.contains([keys[i] for i in missing], self.block_size_bytes)
            for i, found in zip(missing, known, strict=True):
                there[i] = found
        return there

    def _put(self, keys: Sequence[bytes], chunks: Sequence[int]) -> list[bool]:
        """Store blocks; return for each whether disk or store has it now."""
        there = self._write(list(map(block_hash, keys)), chunks)
        if self._store is None:
            return there
        stored = self._store.put(keys, [[self._chunks[chunk]] for chunk in chunks])
        return [a or b in HELD for a, b in zip(there, stored, strict=True)]

    def _get(self, keys: Sequence[bytes], chunks: Sequence[int]) -> list[bool]:
        """Load blocks; return for each whether it is in its chunk now."""
        there = self._read(list(map(block_hash, keys)), chunks)
        missing = [i for i, arrived in enumerate(there) if not arrived]
        if self._store is not None and missing:
            blocks = [[self._chunks[chunks[i]]] for i in missing]
            arrived = self._store.get([keys[i] for i in missing], blocks)
            for i, whole in zip(missing, arrived, strict=True):
                there[i] = whole
        return there

    # --- The disk ---

    def _write(self, hashes: Sequence[int], chunks: Sequence[int]) -> list[bool]:
        disk, move = self._disk, None
        if disk is None:
            return [False] * len(hashes)
        with self._lock:
            moving = {hash for other in disk.moves for hash in other.slots}
            new = {
                hash: chunk for hash, chunk in zip(hashes, chunks, strict=True)
                if hash not in disk.slots and hash not in moving
            }  # fmt: skip
            if new and disk.available:
                disk.evict(disk.choose(len(new) - disk.num_free, keep=set(hashes)))
                move = disk.begin_write(dict(islice(new.items(), disk.num_free)))
        self._finish(disk, move)
        with self._lock:
            return [hash in disk.slots or hash in moving for hash in hashes]

    def _read(self, hashes: Sequence[int], chunks: Sequence[int]) -> list[bool]:
        disk, move = self._disk, None
        if disk is None:
            return [False] * len(hashes)
        with self._lock:
            moving = {hash for other in disk.moves for hash in other.slots}
            found = {
                hash: chunk for hash, chunk in zip(hashes, chunks, strict=True)
                if hash in disk.slots and hash not in moving
            }  # fmt: skip
            if found and disk.available:
                disk.use(list(found))
                move = disk.begin_read(list(found), found.values())
        self._finish(disk, move)
        arrived = set() if move is None else set(move.arrived)
        return [hash in arrived for hash in hashes]

    def _finish(self, disk: DiskBlocks, move: DiskMove | None) -> None:
        """Carry out a move, if there is one."""
        if move is None:
            return
        try:
            disk.run(move)
        finally:
            with self._lock:
                disk.land(move)
                disk.finish(move)


class _Lookup(AsyncLookupManager):  # type: ignore[misc]  # vLLM counts as untyped
    """Asks disk and store in a thread, and keeps the answers for a request."""

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
