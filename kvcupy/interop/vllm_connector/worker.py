"""The worker's side: the tiers below vLLM's cache, and the transfers of each step.

A thread writes blocks to disk ahead of their eviction. A few others fetch blocks from disk and the
shared store, and whole prompts from other engines. The thread of the step only queues transfers.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...cache.identity import PoolIdentity
from ...cache.pool import pool_like
from ...cache.tiered.cache import TieredCache
from ...cache.tiered.holds import HeldBlocks
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError
from ...remote.stores.store import SharedStore
from ...streams import stream_after
from .caches import Caches, wrap_caches, wrap_values
from .handover import HandOver, Pulling
from .options import Options, describe_blocks, setting
from .steps import Answer, Found, Load, PullJob, Step

_NUM_FETCHERS = 4
_FLUSH_INTERVAL_S = 0.2
_SKIP_S = 10.0  # without fetches after one that was late
_FETCH_S, _FETCH_S_PER_1024_TOKENS = 1.0, 0.25  # deadline of a fetch
_QUEUED = 10  # times as long may a fetch be queued
_MAX_HELD = 0.5  # of the host pages
_MAX_FILES = 16  # of engines that share a folder
_CLOSE_S = 5.0

# What is counted, by the names of `TieredCache.stats` where it has them.
COUNTERS = {
    "host_hits": "Blocks held for requests that were in host memory",
    "disk_hits": "Blocks held for requests that were on disk",
    "shared_hits": "Blocks held for requests that were in the shared store",
    "misses": "Blocks of looked up prefixes that no tier had",
    "inserted": "Blocks saved to host memory",
    "lost": "Blocks evicted from the last tier",
    "load_bytes": "Bytes loaded from host memory",
    "save_bytes": "Bytes saved to host memory",
    "disk_read_bytes": "Bytes read from disk",
    "disk_write_bytes": "Bytes written to disk",
    "disk_errors": "Blocks that failed to be read or written, or were damaged",
    "shared_get_bytes": "Bytes fetched from the shared store",
    "shared_put_bytes": "Bytes put into the shared store",
    "shared_errors": "Calls of the shared store that failed",
    "failed_blocks": "Blocks whose load failed, which were computed again",
    "late_fetches": "Lookups whose blocks were not fetched in time",
    "handed_over": "Prompts offered to other engines",
    "taken_over": "Prompts fetched from other engines",
}


class Lookup:
    """A request whose blocks are to be fetched to host memory, or are held there."""

    def __init__(self, first: int, hashes: list[int], seconds: float) -> None:
        self.first = first  # number of the first block in the prefix
        self.hashes = hashes
        self.seconds = seconds  # for the fetch
        self.deadline = time.monotonic() + _QUEUED * seconds
        self.num_held = 0  # blocks that count as held, also while they are being fetched
        self.is_started = False
        self.held: HeldBlocks | None = None  # once fetched
        self.is_dropped = False  # nobody waits for it any more


@dataclass
class Loading:
    """A load in flight into blocks of the engine."""

    blocks: list[int]
    completion: Any


class Threads:
    """Daemon threads that call functions in order; one that hangs does not keep the process."""

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name="kvcupy fetch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class Worker:
    """The tiers of one worker.

    Parameters
    ----------
    config : vLLM's VllmConfig
    options : of the connector
    num_blocks : blocks of the engine
    spec : what vLLM says of its caches, a KVCacheSpec
    """

    def __init__(self, config: Any, options: Options, num_blocks: int, spec: Any = None) -> None:
        self.cache: TieredCache | None = None
        self._config, self._options, self._num_blocks = config, options, num_blocks
        self._spec = spec
        self._block_tokens = int(setting(config, "cache_config.block_size", 1))
        self._lock = threading.Lock()  # guards the fields that `_fetch` and the scheduler use
        self._lookups: dict[str, Lookup] = {}
        self._claimed: dict[int, Lookup] = {}  # lookups whose load is in a step, by number
        self._num_claims = 0  # so far
        self._num_held = 0  # blocks, including those being fetched
        self._skip_until = 0.0
        self._fetchers, self._pullers = Threads(_NUM_FETCHERS), Threads(_NUM_FETCHERS)
        self.hand_over: HandOver | None = None
        self._store: SharedStore | None = None
        self._layers: dict[str, tuple[int, ...]] = {}
        # First block and hashes of requests that the scheduler asks about in steps.
        self._asked: dict[str, tuple[int, list[int]]] = {}
        self._lost: set[str] = set()  # requests whose lookup has failed
        # Of the thread of the step:
        self._step = Step()
        self._step_loads: list[Loading] = []  # that this step waits for
        self._receiving: dict[str, Loading] = {}  # loads that requests wait for
        self._saving: list[tuple[Any, frozenset[int]]] = []
        self._invalid: set[int] = set()  # blocks whose load has failed
        self._step_failed = False  # whether a load failed that this step waits for
        self._num_failures = 0  # steps with such loads, at least as many as the scheduler knows
        self._stop = threading.Event()
        self._dirty = threading.Event()  # set when there may be blocks to write to disk
        self._log = BoundedLog(cache_logger)
        self.counts = dict.fromkeys(("misses", "failed_blocks", "late_fetches", "taken_over"), 0)
        self._reported: dict[str, float] = {}

    # --- Set-up ---

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Make the tiers below the engine's caches."""
        options = self._options
        caches = self._wrapped(kv_caches)
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
        self.model = describe_blocks(self._config, caches.layout)
        if options.store is not None:
            self._store = _open_store(options, host_pool, self.model)
        make = partial(
            TieredCache, device_pool, host_pool, convert=options.encoding is not None,
            model=self.model, policy=options.policy, shared=self._store, shared_prefetch=_MAX_HELD,
        )  # fmt: skip
        if options.disk_path is None:
            self.cache = make()
        else:
            path = Path(options.disk_path)
            rank = setting(self._config, "parallel_config.rank", 0)
            identity = PoolIdentity.of(device_pool, model=self.model)
            self.cache = _with_disk(make, options, path, rank, identity.digest().hex())
            flusher = threading.Thread(
                target=_flush, args=(weakref.ref(self.cache), self._dirty, self._stop),
                name="kvcupy flush", daemon=True,
            )  # fmt: skip
            flusher.start()
        device_pool.allocator.alloc(device_pool.num_pages)  # the engine says which are free
        if options.encoding is None:
            self.hand_over = HandOver(self.cache, options, self.model)

    def _wrapped(self, kv_caches: Mapping[str, Any]) -> Caches:
        if self._options.encoding is None:
            return wrap_caches(kv_caches, self._num_blocks)
        if setting(self._config, "device_config.device_type") == "cpu":
            raise ValueError(
                "encoding: expected None on a CPU, where vLLM keeps K of a block transposed, got "
                f"{self._options.encoding}"
            )
        sizes = [getattr(self._spec, name, None) for name in ("num_kv_heads", "head_size")]
        if not all(isinstance(size, int) for size in sizes):
            raise ValueError(f"encoding: expected layers of K and V, got {self._spec!r}")
        heads, head_dim = (int(size or 0) for size in sizes)
        return wrap_values(kv_caches, self._num_blocks, self._block_tokens, heads, head_dim)

    def shutdown(self) -> None:
        """Write what is left to disk and the store, for a while, and close the tiers."""
        self._stop.set()
        self._dirty.set()
        self._fetchers.stop()
        self._pullers.stop()
        closing = threading.Thread(target=self._close, name="kvcupy close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _close(self) -> None:
        if self.hand_over is not None:
            self.hand_over.close()
        if self.cache is not None:
            with suppress(OSError):
                self.cache.close(deadline_s=_CLOSE_S / 2)
        if self._store is not None:
            self._store.close()

    # --- Looking up; called by the scheduler in the same process, or for it ---

    def lookup(self, request: str, first: int, hashes: list[int]) -> Found | None:
        """Hold the leading blocks of a request in host memory; None while they are being fetched.

        Parameters
        ----------
        request : its id
        first : number of the first hash in the prefix
        hashes : of the blocks that the engine lacks
        """
        with self._lock:
            lookup = self._lookups.get(request)
            if lookup is not None and lookup.first > first:
                self._drop(request)
                lookup = None
            if lookup is not None:
                if lookup.held is not None:
                    skipped = first - lookup.first
                    return Found(tuple(lookup.held.sources[skipped : skipped + len(hashes)]))
                if self._has_time(lookup):
                    self._submit(request, lookup)
                    return None
                self._drop(request)
        if self.cache is None or not hashes or request in self._lost:
            return Found()
        try:
            known = self.cache.match(hashes, shared=False)
            only_host = lookup is not None or self._skips
            if known.host == len(hashes) or (known.disk == known.host and not self._store):
                only_host = True
            if only_host:
                return self._hold_now(request, first, hashes, known.host)
        except KvcupyError as error:
            self._log.warning("blocks could not be looked up: %s", error)
            return Found()
        seconds = _FETCH_S + _FETCH_S_PER_1024_TOKENS * len(hashes) * self._block_tokens / 1024
        with self._lock:
            self._lookups[request] = lookup = Lookup(first, hashes, seconds)
            self._submit(request, lookup)
        return None

    @property
    def _skips(self) -> bool:
        """Whether to do without disk and store, after a fetch that was late."""
        return time.monotonic() < self._skip_until

    def _has_time(self, lookup: Lookup) -> bool:
        """Return whether to wait longer for a lookup. The caller holds the lock."""
        if time.monotonic() < lookup.deadline:
            return lookup.is_started or not self._skips
        if lookup.is_started:
            self._note_late()
        return False

    def _note_late(self) -> None:
        self.counts["late_fetches"] += 1
        self._skip_until = time.monotonic() + _SKIP_S
        self._log.warning("blocks were not fetched in time; the next %d s do without", _SKIP_S)

    def _submit(self, request: str, lookup: Lookup) -> None:
        """Queue a fetch, unless too many blocks are held. The caller holds the lock."""
        assert self.cache is not None
        count = len(lookup.hashes)
        max_held = int(_MAX_HELD * self.cache.host_pool.num_pages)
        if lookup.num_held or (self._num_held and self._num_held + count > max_held):
            return
        lookup.num_held = count
        self._num_held += count
        self._fetchers.submit(partial(self._fetch, request, lookup))

    def _hold_now(self, request: str, first: int, hashes: list[int], num_known: int) -> Found:
        """Hold blocks that are in host memory."""
        assert self.cache is not None
        self.counts["misses"] += len(hashes) - num_known
        if not num_known:
            return Found()
        held = self.cache.hold(hashes[:num_known], wait="best_effort")
        lookup = Lookup(first, hashes, 0.0)
        lookup.held, lookup.num_held = held, held.num_blocks
        with self._lock:
            self._lookups[request] = lookup
            self._num_held += held.num_blocks
        return Found(tuple(held.sources))

    def _fetch(self, request: str, lookup: Lookup) -> None:
        """Fetch blocks to host memory, in a thread."""
        assert self.cache is not None
        started = time.monotonic()
        with self._lock:
            is_wanted = not lookup.is_dropped
            if not is_wanted:
                return
            lookup.is_started, lookup.deadline = True, started + 2 * lookup.seconds
        try:
            held = self.cache.hold(lookup.hashes, wait="timeout", deadline_s=lookup.seconds)
        except Exception as error:  # the engine computes the blocks
            self._log.warning("blocks could not be fetched: %s: %s", type(error).__name__, error)
            with self._lock:
                if self._lookups.get(request) is lookup:
                    self._lost.add(request)
                    self._drop(request)
            return
        with self._lock:
            is_wanted = not lookup.is_dropped
            if not is_wanted:
                held.release()
                return
            num_missing = len(lookup.hashes) - held.num_blocks
            self.counts["misses"] += num_missing
            if num_missing and time.monotonic() - started >= lookup.seconds:
                self._note_late()
            self._num_held += held.num_blocks - lookup.num_held
            lookup.held, lookup.num_held = held, held.num_blocks

    def _drop(self, request: str) -> None:
        """Forget the lookup of a request. The caller holds the lock."""
        if (lookup := self._lookups.pop(request, None)) is not None:
            self._release(lookup)

    def _release(self, lookup: Lookup) -> None:
        lookup.is_dropped = True
        self._num_held -= lookup.num_held
        if lookup.held is not None:
            lookup.held.release()

    def claim(self, request: str) -> int:
        """Reserve the blocks held for a request for its load; return a number for the step.

        The scheduler may be a step ahead, and look up the same request again before the load.
        """
        with self._lock:
            self._num_claims += 1
            if (lookup := self._lookups.pop(request, None)) is not None:
                self._claimed[self._num_claims] = lookup
            return self._num_claims

    def drop(self, request: str) -> None:
        """Let blocks be evicted that were held for a request."""
        with self._lock:
            self._drop(request)
            self._lost.discard(request)

    # --- A step, in its thread ---

    @property
    def _compute(self) -> Any:
        """The stream on which vLLM computes; None on the host, where the thread does."""
        if self.cache is None or self.cache.engine.device.kind == "host":
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
        self._step = step
        if step.clear:
            self._clear()
        self._asked.update(step.lookups)
        for request in step.drops:
            self.drop(request)
        for load in step.loads:
            loading = self._started(load)
            if load.is_async:
                self._receiving[load.request] = loading
            else:
                self._step_loads.append(loading)
        for pull in step.pulls:
            self._receiving[pull.request] = self._pulled(pull)

    def _pulled(self, job: PullJob) -> Loading:
        """Start to fetch a prompt from another engine."""
        assert self.cache is not None and self.hand_over is not None
        pulling = Pulling()
        after: Any = False
        device = self.cache.engine.device
        if device.kind != "host":  # what the stream of this thread still does with the blocks
            after = device.stream()
            after.wait(stream_after(device, self._compute, "a load").record())
        run = partial(
            pulling.run, self.hand_over.receiver, self.cache, job.ticket, job.first, job.blocks,
            after,
        )  # fmt: skip
        self._pullers.submit(run)
        return Loading(job.blocks, pulling)

    def _started(self, load: Load) -> Loading:
        """Start a load; blocks that are not held any more are invalid."""
        with self._lock:
            if load.claim is None:
                lookup = self._lookups.pop(load.request, None)
            else:
                lookup = self._claimed.pop(load.claim, None)
            held = None if lookup is None else lookup.held
        num_loaded, completion = 0, None
        if lookup is not None and held is not None and load.first >= lookup.first:
            skipped = load.first - lookup.first
            num_loaded = max(0, min(len(load.blocks), held.num_blocks - skipped))
            try:
                completion = held.load(load.blocks[:num_loaded], after=self._compute, first=skipped)
            except KvcupyError as error:
                self._log.warning("blocks could not be loaded: %s", error)
                num_loaded = 0
        if lookup is not None:
            with self._lock:
                self._release(lookup)
        if missing := load.blocks[num_loaded:]:
            self._fail(missing, in_step=not load.is_async)
        return Loading(load.blocks[:num_loaded], completion)

    def _fail(self, blocks: list[int], *, in_step: bool) -> None:
        self._invalid.update(blocks)
        self.counts["failed_blocks"] += len(blocks)
        self._step_failed |= in_step

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
            known = self._step.number_of_failures
            self._num_failures = max(self._num_failures, known) + 1
            self._step_failed = False

    def start_saves(self) -> None:
        """Start to save the blocks that the step has completed."""
        saves = self._step.saves
        if not saves or self.cache is None:
            return
        if self._num_failures > self._step.number_of_failures:
            return  # the step may have attended to blocks that were not loaded
        try:
            saving = self.cache.save(list(saves), list(saves.values()), after=self._compute)
        except KvcupyError as error:
            self._log.warning("blocks could not be saved: %s", error)
            return
        self._saving.append((saving, frozenset(saves.values())))
        self._dirty.set()

    def finished(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """Return requests whose blocks have been sent, and requests whose loads are over."""
        for request in finished:
            self.drop(request)
            self._asked.pop(request, None)
            receiving = self._receiving.get(request)
            if receiving is not None and isinstance(receiving.completion, Pulling):
                receiving.completion.cancel()
        received = set()
        for request, loading in list(self._receiving.items()):
            completion = loading.completion
            if completion is not None and not _over(completion):
                continue
            del self._receiving[request]
            if completion is not None and completion.failure is not None:
                self._log.warning("blocks could not be loaded: %s", completion.failure)
                self._fail(loading.blocks, in_step=False)
            elif isinstance(completion, Pulling):
                self.counts["taken_over"] += 1
            received.add(request)
        sent = set() if self.hand_over is None else self.hand_over.take_sent(finished)
        return sent, received

    def take_invalid(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def answer(self) -> Answer | None:
        """Answer the lookups of this and earlier steps whose blocks have arrived."""
        found: dict[str, list[Found]] = {}
        for request, (first, hashes) in list(self._asked.items()):
            if (blocks := self.lookup(request, first, hashes)) is not None:
                found[request] = [blocks]
                del self._asked[request]
        return Answer(found) if found else None

    def _clear(self) -> None:
        with self._lock:
            for request in list(self._lookups):
                self._drop(request)
            while self._claimed:
                self._release(self._claimed.popitem()[1])
        if self.cache is not None:
            try:
                self.cache.clear()
            except KvcupyError as error:
                self._log.warning("the cache was not cleared: %s", error)

    # --- Statistics ---

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call that are not zero."""
        if self.cache is None:
            return {}
        stats = self.cache.stats()
        if self.hand_over is not None:
            stats["handed_over"] = self.hand_over.num_offers
        totals = {name: self.counts.get(name, stats.get(name, 0)) for name in COUNTERS}
        changed = {n: v - self._reported.get(n, 0) for n, v in totals.items()}
        self._reported = totals
        return {name: value for name, value in changed.items() if value}


def _over(completion: Any) -> bool:
    try:
        return bool(completion.done())
    except KvcupyError:
        return True  # failed: nothing is read or written any more


def _open_store(options: Options, host_pool: Any, model: str) -> SharedStore:
    assert options.store is not None
    open_store = partial(
        SharedStore.open, options.store, host_pool,
        model=model, encryption_key=options.encryption_key,
    )  # fmt: skip
    if not options.store.startswith("shm:"):
        return open_store()
    try:
        return open_store()
    except (FileNotFoundError, ValueError):  # the first process says how large it is
        return open_store(capacity_bytes=options.store_bytes or 4 * options.host_bytes)


def _with_disk(
    make: Callable[..., TieredCache], options: Options, path: Path, rank: int, identity: str
) -> TieredCache:
    """Make the tiers over a file, or over a file of this model in a folder."""
    make = partial(make, disk_bytes=options.disk_bytes, encryption_key=options.encryption_key)
    if options.disk_path is not None and options.disk_path.endswith("/"):
        path.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        return make(disk=path if rank == 0 else path.with_name(f"{path.name}.rank{rank}"))
    for number in range(_MAX_FILES):
        file = path / f"{identity}-{number}.kv"
        try:
            return make(disk=file)
        except BlockingIOError:  # another engine of this model uses it
            if number == _MAX_FILES - 1:
                raise
    raise AssertionError("unreachable")


def _flush(
    cache_of: weakref.ref[TieredCache], dirty: threading.Event, stop: threading.Event
) -> None:
    """Write blocks to disk ahead of their eviction, until the cache is closed."""
    log = BoundedLog(cache_logger)
    while not stop.wait(_FLUSH_INTERVAL_S):
        dirty.wait()
        dirty.clear()
        cache = cache_of()
        if cache is None or stop.is_set():
            return
        try:
            cache.flush(deadline_s=0.0)
        except OSError as error:
            log.warning("blocks could not be written to disk: %s", error)
        except KvcupyError:
            return  # closed
        del cache
