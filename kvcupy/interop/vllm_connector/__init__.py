"""kvcupy's tiers below vLLM's cache: a KV connector of vLLM (version 1 of that interface).

Pass `KVTransferConfig(kv_connector="KvcupyConnector", kv_role="kv_both",
kv_connector_module_path="kvcupy.interop.vllm_connector", kv_load_failure_policy="recompute",
kv_connector_extra_config={"host_bytes": 2**33})` to vLLM. See docs/engines.md.

Source: the interface is vllm-project/vllm `vllm/distributed/kv_transfer/kv_connector/v1/base.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ...config import cache_logger
from ...errors import process_lock
from ...extras import install

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
except ImportError as error:
    raise ImportError(f"KvcupyConnector needs vLLM: {install('vllm')}") from error

from .groups import Groups
from .options import Options, setting
from .scheduler import Events, Scheduler
from .steps import Answer, Step
from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["KvcupyConnector"]

_workers: WeakValueDictionary[str, Worker] = WeakValueDictionary()  # of this process, by engine
_workers_lock = process_lock()


class KvcupyMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """A step, as the scheduler's side sends it to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class KvcupyWorkerMetadata(base.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The answer of a worker to the scheduler's side."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def aggregate(self, other: KvcupyWorkerMetadata) -> KvcupyWorkerMetadata:
        return KvcupyWorkerMetadata(self.answer.merged(other.answer))


class KvcupyConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """Blocks of vLLM in host memory and in stores below.

    vLLM makes one for its scheduler and one for each worker. Options: see
    `kvcupy.interop.vllm_connector.options.Options`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = options = Options.of(transfer.kv_connector_extra_config)
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if (size := setting(vllm_config, f"parallel_config.{name}", 1)) != 1:
                raise ValueError(f"KvcupyConnector: expected {name} of 1, got {size}")
        self._groups = Groups.of(vllm_config, kv_cache_config)
        self._engine = str(getattr(transfer, "engine_id", ""))
        self._worker: Worker | None = None
        self._scheduler: Scheduler | None = None
        self._events: Events | None = None
        if role == base.KVConnectorRole.WORKER:
            return
        if getattr(transfer, "kv_load_failure_policy", "recompute") == "fail":
            cache_logger.warning(
                'KvcupyConnector: kv_load_failure_policy="fail" ends a request when one of its '
                'blocks is lost between lookup and load; "recompute" is recommended'
            )
        if setting(vllm_config, "kv_events_config.enable_kv_cache_events", False):
            self._events = Events(self._find_worker, self._groups)
        self._scheduler = Scheduler(
            vllm_config, self._groups, layerwise=options.layerwise,
            find_worker=self._find_worker, events=self._events,
        )  # fmt: skip

    def _find_worker(self) -> Worker | None:
        """Return the only worker of this engine, if it is in this process."""
        if int(setting(self._vllm_config, "parallel_config.world_size", 1)) > 1:
            return None
        with _workers_lock:
            return _workers.get(self._engine)

    # --- The worker's side ---

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._worker = Worker(
            self._vllm_config, self._options, self._groups, self._kv_cache_config, kv_caches
        )
        with _workers_lock:
            _workers[self._engine] = self._worker

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._of_worker().begin(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata().step
        worker = self._of_worker()
        worker.begin(step)
        worker.start_loads(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._of_worker().wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass  # blocks are saved whole, after the step

    def wait_for_save(self) -> None:
        worker = self._of_worker()
        worker.finish_loads()
        worker.start_saves()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        received, failed = self._of_worker().finished(finished_req_ids)
        return base.KVConnectorTransferResults(set(), received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker().take_invalid()

    def build_connector_worker_meta(self) -> KvcupyWorkerMetadata | None:
        answer = self._of_worker().answer()
        return None if answer is None else KvcupyWorkerMetadata(answer)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return Options.of(extra_config).layerwise

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    def _of_worker(self) -> Worker:
        assert self._worker is not None, "a method of the worker's side"
        return self._worker

    # --- The scheduler's side ---

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._of_scheduler().match(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        sources = {
            "host": CacheHitSource.HOST, "store": CacheHitSource.EXTERNAL_UNSPECIFIED,
        }  # fmt: skip
        found = self._of_scheduler().sources(request, num_external_tokens)
        return {sources[name]: number for name, number in found.items()}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvcupyMetadata:
        return KvcupyMetadata(self._of_scheduler().build(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        answer = None if metadata is None else metadata.answer
        self._of_scheduler().note_output(connector_output, answer)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._of_scheduler().finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return () if self._events is None else self._events.take()

    def reset_cache(self) -> bool | None:
        self._of_scheduler().clear()
        return True

    def _of_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "a method of the scheduler's side"
        return self._scheduler
