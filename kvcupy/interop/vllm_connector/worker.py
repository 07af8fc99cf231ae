"""The worker's side: the tiers below vLLM's cache, and the transfers of each step.

The thread of the step only queues transfers.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...cache.pool import pool_like
from ...cache.tiered.cache import TieredCache
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError
from ...remote.stores.store import BlockStore
from .caches import Caches, wrap_caches, wrap_values
from .groups import Groups, Keys
from .lookups import Lookups
from .options import Options, describe_blocks, setting
from .steps import Answer, Found, Load, Step

_CLOSE_TIMEOUT_S = 5.0


@dataclass
class Loading:
    """A load in flight into blocks of the engine."""

    blocks: list[int]
    completion: Any  # None if nothing is in flight
    is_failed: bool = False


class Worker:
    """The tiers of one worker, below the engine's caches."""

    def __init__(
        self, config: Any, options: Options, groups: Groups, kv_cache_config: Any,
        kv_caches: Mapping[str, Any],
    ) -> None:  # fmt: skip
        caches = _wrapped(config, options, groups, kv_cache_config, kv_caches)
        device_pool, self._layers = caches.pool, caches.layers
        encoding = options.encoding or device_pool.dtype
        page_bytes = pool_like(device_pool, 1, dtype=encoding).page_bytes
        num_pages = options.host_bytes // page_bytes
        if num_pages < 2:
            raise ValueError(
                f"host_bytes: expected at least two blocks of {page_bytes} bytes, got "
                f"{options.host_bytes}"
            )
        host_pool = pool_like(device_pool, num_pages, dtype=encoding)
        model = describe_blocks(config, caches.layout)
        self._groups = groups
        stores = [
            partial(_open_store, each.url, each.capacity_bytes, options.encryption_key)
            for each in options.stores
        ]
        self.cache = TieredCache(
            device_pool, host_pool, stores=stores, convert=options.encoding is not None,
            model=model,
        )  # fmt: skip
        device_pool.allocator.alloc(device_pool.num_pages)  # the engine says which are free
        self.lookups = Lookups(self.cache, groups, has_stores=bool(stores))
        # Lookups of requests that the scheduler asks about in steps.
        self._asked: dict[str, tuple[int, int, Keys]] = {}
        self._step = Step()
        self._step_loads: list[Loading] = []  # that this step waits for
        self._receiving: dict[str, Loading] = {}  # loads that requests wait for
        # Whether vLLM computes what a request has not received, in place of ending the request.
        policy = setting(config, "kv_transfer_config.kv_load_failure_policy", "recompute")
        self._recomputes = policy == "recompute"
        self._saving: list[tuple[Any, frozenset[int]]] = []
        # vLLM may zero blocks that it allocates before it calls the connector.
        self._waits_for_saves = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
        self._invalid: set[int] = set()  # blocks whose load has failed in a step
        self._step_failed = False  # whether a load failed that this step waits for
        self._num_failures = 0  # steps with such loads, at least as many as the scheduler knows
        self._log = BoundedLog(cache_logger)

    def shutdown(self) -> None:
        """Write the remaining blocks to the stores, for a while, and close the tiers."""
        self.lookups.stop()
        closing = threading.Thread(target=self._close, name="kvcupy close", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def _close(self) -> None:
        self.cache.close(deadline_s=_CLOSE_TIMEOUT_S / 2)

    # --- A step, in its thread ---

    @property
    def _compute(self) -> Any:
        """The stream on which vLLM computes; None on the host, where the thread does."""
        if self.cache.engine.device.kind == "host":
            return None
        import torch

        return torch.cuda.current_stream()

    def begin(self, step: Step) -> None:
        """Make sure that no save still reads blocks that the step may overwrite."""
        self._saving = [(saving, blocks) for saving, blocks in self._saving if not _over(saving)]
        if self._saving and step.fresh:
            fresh = frozenset(step.fresh)
            for saving, blocks in self._saving:
                if not fresh.isdisjoint(blocks):
                    with suppress(KvcupyError):  # a failed save reads nothing
                        saving.wait(self._compute)

    def start_loads(self, step: Step) -> None:
        """Start the loads of a step."""
        if step.generation > self._step.generation:
            self._begin(step.generation)
        self._step = step
        self._asked.update(step.lookups)
        for request in step.drops:
            self.lookups.drop(request)
        for load in step.loads:
            loading = self._started(load)
            if load.is_async:
                self._receiving[load.request] = loading
            else:
                self._step_loads.append(loading)

    def _started(self, load: Load) -> Loading:
        """Start a load; blocks that are not held any more are missing."""
        lookup = self.lookups.take(load.request, load.claim)
        numbers = {} if lookup is None else lookup.numbers(self._groups, load.blocks)
        targets = [load.blocks[block] for block in numbers]
        completion = None
        if lookup is not None and lookup.prefix is not None:
            try:
                completion = lookup.prefix.held.load(
                    targets, after=self._compute, blocks=list(numbers.values())
                )
            except KvcupyError as error:
                self._log.warning("blocks could not be loaded: %s", error)
                targets = []
        if lookup is not None:
            self.lookups.release(lookup)
        if missing := set(load.blocks.values()).difference(targets):
            self._fail(missing, in_step=not load.is_async)
        return Loading(targets, completion, is_failed=bool(missing))

    def _fail(self, blocks: Collection[int], *, in_step: bool) -> None:
        """Note blocks that are missing; requests that wait for a load are failed by name."""
        if in_step:
            self._invalid.update(blocks)
            self._step_failed = True

    def wait_for_layer(self, name: str) -> None:
        """Make the compute stream wait until a layer of the step's loads has arrived."""
        for loading in self._step_loads:
            if loading.completion is None:
                continue
            try:
                for layer in self._layers.get(name, ()):
                    loading.completion.wait_layer(layer, self._compute)
            except KvcupyError as error:
                self._lose(loading, error)

    def _lose(self, loading: Loading, error: BaseException) -> None:
        self._log.warning("blocks could not be loaded: %s", error)
        loading.completion = None
        self._fail(loading.blocks, in_step=True)

    def finish_loads(self) -> None:
        """Make the compute stream wait for all of the step's loads."""
        for loading in self._step_loads:
            if loading.completion is not None:
                try:
                    loading.completion.wait(self._compute)
                    if (failure := loading.completion.failure) is not None:
                        raise failure
                except KvcupyError as error:
                    self._lose(loading, error)
        self._step_loads = []
        if self._step_failed:
            known = self._step.num_failures
            self._num_failures = max(self._num_failures, known) + 1
            self._step_failed = False

    def start_saves(self) -> None:
        """Start to save the blocks that the step has completed."""
        saves = self._step.saves
        if not saves:
            return
        if self._num_failures > self._step.num_failures:
            return  # the step may have attended to blocks that were not loaded
        try:
            saving = self.cache.save(list(saves), list(saves.values()), after=self._compute)
        except KvcupyError as error:
            self._log.warning("blocks could not be saved: %s", error)
            return
        self._saving.append((saving, frozenset(saves.values())))
        if self._waits_for_saves:
            with suppress(KvcupyError):  # a failed save reads nothing
                saving.wait(self._compute)

    def finished(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose loads are over, and among them the failed ones."""
        for request in finished:
            self.lookups.drop(request)
            self._asked.pop(request, None)
        received, failed = set(), set()
        for request, loading in list(self._receiving.items()):
            completion = loading.completion
            if completion is not None and not _over(completion):
                continue
            del self._receiving[request]
            if completion is not None and completion.failure is not None:
                self._log.warning("blocks could not be loaded: %s", completion.failure)
                self._fail(loading.blocks, in_step=False)
                loading.is_failed = True
            received.add(request)
            if loading.is_failed:
                failed.add(request)
        return received, failed

    def take_invalid(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def answer(self) -> Answer | None:
        """Answer the lookups of this and earlier steps whose blocks have arrived."""
        found: dict[tuple[str, int], list[Found]] = {}
        for request, (number, first, keys) in list(self._asked.items()):
            if (units := self.lookups.find(request, first, keys)) is not None:
                found[request, number] = [units]
                del self._asked[request]
        return Answer(found) if found else None

    def _begin(self, generation: int) -> None:
        """Forget all blocks, and the questions about them."""
        self._asked.clear()
        self.lookups.begin(generation)
        if self._recomputes:
            for loading in self._receiving.values():
                loading.is_failed = True
        try:
            self.cache.clear()
        except KvcupyError as error:
            self._log.warning("the cache was not cleared: %s", error)


def _wrapped(
    config: Any, options: Options, groups: Groups, kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
) -> Caches:  # fmt: skip
    """Return vLLM's tensors as a pool of pages."""
    num_blocks = kv_cache_config.num_blocks
    if options.encoding is None:
        return wrap_caches(kv_caches, num_blocks, groups)
    if setting(config, "device_config.device_type") == "cpu":
        raise ValueError(
            "encoding: expected None on a CPU, where vLLM keeps K of a block transposed, got "
            f"{options.encoding}"
        )
    if len(groups) > 1:
        raise ValueError(
            f"encoding: expected None for a model with {len(groups)} groups of KV caches, got "
            f"{options.encoding}"
        )
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    sizes = [getattr(spec, name, None) for name in ("num_kv_heads", "head_size")]
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"encoding: expected layers of K and V, got {spec!r}")
    heads, head_dim = (int(size or 0) for size in sizes)
    return wrap_values(kv_caches, num_blocks, groups.unit_tokens, heads, head_dim)


def _over(completion: Any) -> bool:
    try:
        return bool(completion.done())
    except KvcupyError:
        return True  # failed: nothing is read or written any more


def _open_store(
    url: str, capacity_bytes: int | None, encryption_key: bytes | None, host_pool: Any, model: str
) -> BlockStore:
    return BlockStore.open(
        url, host_pool, capacity_bytes=capacity_bytes, model=model, encryption_key=encryption_key
    )
