"""A stand-in for vLLM: the modules that a connector imports, and an engine small enough to read.

The engine calls a connector in the order of vLLM's scheduler and model runner. What it "computes"
of a token, a number in every element of its row of the cache, depends on the weights and the row
before it. The next token depends on every row that is read, so a wrong, late or stale block changes
tokens.

Source: vllm-project/vllm `vllm/distributed/kv_transfer/kv_connector/v1/base.py` (signatures),
`vllm/v1/core/sched/scheduler.py` (order of the calls).
"""

from __future__ import annotations

import enum
import hashlib
import pickle
import sys
import time
import uuid
import zlib
from collections import OrderedDict
from functools import reduce
from types import ModuleType, SimpleNamespace

import numpy as np

BLOCK_TOKENS = 4
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")

# --- Modules ---


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    pass


class SupportsHMA:
    pass


class KVConnectorTransferResults:
    def __init__(self, finished_sending, finished_recving, failed_recving):
        self.finished_sending, self.finished_recving = finished_sending, finished_recving
        self.failed_recving = failed_recving


class KVConnectorBase_V1:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


class BlockStored(SimpleNamespace):
    pass


class BlockRemoved(SimpleNamespace):
    pass


def maybe_convert_block_hash(hash_bytes):
    return hash_bytes


def get_kv_cache_spec_kind(kv_cache_spec):
    is_window = getattr(kv_cache_spec, "sliding_window", None) is not None
    value = getattr(kv_cache_spec, "kind", "sliding_window" if is_window else "full_attention")
    return SimpleNamespace(value=value)


def get_kv_cache_spec_sliding_window(kv_cache_spec):
    return getattr(kv_cache_spec, "sliding_window", None)


class CacheHitSource(enum.Enum):
    HOST = "host"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


def install(monkeypatch):
    """Make the modules importable, and return the connector's class."""
    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    names = {
        f"{v1}.base": [
            KVConnectorRole, KVConnectorMetadata, KVConnectorWorkerMetadata, KVConnectorBase_V1,
            KVConnectorTransferResults, SupportsHMA,
        ],
        "vllm.v1.metrics.cache_hit_source": [CacheHitSource],
        "vllm.distributed.kv_events": [BlockStored, BlockRemoved],
        "vllm.v1.core.kv_cache_utils": [maybe_convert_block_hash],
        "vllm.v1.kv_cache_interface": [
            get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window,
        ],
    }  # fmt: skip
    for name, members in names.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules or getattr(sys.modules[path], "__file__", None):
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[path])
        for member in members:
            setattr(sys.modules[name], member.__name__, member)
    for name in [n for n in sys.modules if n.startswith("kvcupy.interop.vllm_connector")]:
        monkeypatch.delitem(sys.modules, name)
    from kvcupy.interop.vllm_connector import KvcupyConnector

    return KvcupyConnector


# --- What a model computes ---


def row_of(token, before, weights=0):
    """What the cache holds for a token behind the row `before`."""
    return zlib.crc32(f"{weights} {int(before)} {token}".encode()) % 997


def rows_of(tokens, weights=0):
    rows = [0]
    for token in tokens:
        rows.append(row_of(token, rows[-1], weights))
    return rows[1:]


def next_token(rows):
    return 3 + int(sum((i + 1) * row for i, row in enumerate(rows))) % 500


def tokens_alone(prompt, count, weights=0):
    """What an engine without a cache generates."""
    tokens, rows = list(prompt), rows_of(prompt, weights)
    for _ in range(count):
        tokens.append(next_token(rows))
        rows.append(row_of(tokens[-1], rows[-1], weights))
    return tokens[len(prompt) :]


# --- The engine ---


class Request:
    def __init__(self, name, prompt, count, salt=""):
        self.request_id = f"{name}-{uuid.uuid4().hex[:8]}"
        self.prompt_token_ids, self.tokens = list(prompt), list(prompt)
        self.num_prompt_tokens, self.count, self.salt = len(prompt), count, salt
        self.block_hashes, self.tables = [], []  # a table for each group, once it has blocks
        self.num_computed_tokens = 0
        self.status = SimpleNamespace(name="WAITING")
        self.num_cached = self.num_external = 0
        self.computed_in = self.loaded_in = 0  # the reset before its oldest block, and its load
        self.external_done = True  # False while an asynchronous load is in flight
        self.hash_blocks()

    @property
    def num_tokens(self):
        return len(self.tokens)

    @property
    def all_token_ids(self):
        return self.tokens

    @property
    def output(self):
        return self.tokens[self.num_prompt_tokens :]

    def hash_blocks(self):
        for i in range(len(self.block_hashes), len(self.tokens) // BLOCK_TOKENS):
            previous = self.block_hashes[-1] if i else self.salt.encode()
            block = np.array(self.tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS], np.int64)
            self.block_hashes.append(hashlib.sha256(previous + block.tobytes()).digest())


class Engine:
    """A scheduler and its workers, in one process, or as if they were in several (`separate`).

    With two `windows` each layer is a group, with full attention or the window, in shared memory.
    With `heads` the workers divide or repeat the heads, which are the axis "H" of the shape.
    Reports of workers reach the scheduler some steps `late`, as with asynchronous scheduling.
    """

    def __init__(
        self, connector, options, *, num_blocks=24, chunk=16, shape=None, separate=False,
        name="model", max_running=4, device_type="cpu", spec=None, events=False,
        windows=(None,), zeroes=False, workers=1, heads=None, late=0, policy="recompute",
    ):  # fmt: skip
        self.windows, self.zeroes = windows, zeroes
        separate |= workers > 1
        self.chunk, self.max_running = chunk, max_running
        transfer = SimpleNamespace(
            kv_connector_extra_config=options, engine_id=uuid.uuid4().hex,
            kv_load_failure_policy=policy,
        )  # fmt: skip
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            model_config=SimpleNamespace(model=name, dtype="float32"),
            cache_config=SimpleNamespace(block_size=BLOCK_TOKENS),
            parallel_config=SimpleNamespace(
                world_size=workers, tensor_parallel_size=workers, rank=0
            ),
            device_config=SimpleNamespace(device_type=device_type),
            kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        )
        specs = [spec]
        if len(windows) > 1:
            specs = [
                SimpleNamespace(sliding_window=window, block_size=BLOCK_TOKENS)
                for window in windows
            ]
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        kv_cache_config = SimpleNamespace(
            num_blocks=num_blocks, kv_cache_groups=groups, needs_kv_cache_zeroing=zeroes
        )  # fmt: skip
        self.workers = []
        for rank in range(workers):
            parallel = SimpleNamespace(**{**vars(config.parallel_config), "rank": rank})
            own = SimpleNamespace(**{**vars(config), "parallel_config": parallel})
            self.workers.append(connector(own, KVConnectorRole.WORKER, kv_cache_config))
        self.separate = separate
        if separate:
            transfer = SimpleNamespace(**{**vars(transfer), "engine_id": "another process"})
            config = SimpleNamespace(**{**vars(config), "kv_transfer_config": transfer})
        self.scheduler = connector(config, KVConnectorRole.SCHEDULER, kv_cache_config)
        shape = shape or (num_blocks, 2, BLOCK_TOKENS, 8)
        self.block_axis = shape.index(num_blocks)
        self.head_axis = shape.index("H") if heads else None
        self.heads = [
            range(rank * heads // workers, rank * heads // workers + max(1, heads // workers))
            for rank in range(workers if heads else 0)
        ]
        shape = tuple(len(self.heads[0]) if n == "H" else n for n in shape)
        self.caches = []
        for worker in self.workers:
            caches = {name: np.zeros(shape, np.float32) for name in LAYERS}
            if len(windows) > 1:
                caches = dict.fromkeys(LAYERS, caches[LAYERS[0]])
            worker.register_kv_caches(caches)
            self.caches.append(caches)
        self.free = OrderedDict.fromkeys(range(1, num_blocks))  # block 0 is never used
        self.num_refs = [0] * num_blocks
        self.hash_of = {}  # by block
        self.block_of = {}  # by group and hash
        self.waiting, self.running, self.held = [], [], {}
        self.finished, self.scheduled = set(), set()
        self.num_steps = self.num_preempted = 0
        self.sources = {}
        self.weights = self.num_resets = 0
        self.computed_in = [0] * num_blocks  # how many resets were before the oldest row it needs
        self.late, self.reports = late, []
        self.events = []
        self.num_reports, self.failed = {}, set()  # of some workers

    def close(self):
        for worker in self.workers:
            worker.shutdown()

    @property
    def worker(self):
        """The only worker."""
        (worker,) = self.workers
        return worker

    # The caches

    def blocks(self, layer):
        """Yield each worker's blocks, (blocks, tokens, ...), and what its heads add to a value."""
        for rank, caches in enumerate(self.caches):
            blocks, added = caches[layer], np.zeros((1,) * caches[layer].ndim, np.float32)
            if self.heads:
                others = [axis for axis in range(blocks.ndim) if axis != self.head_axis]
                added = np.expand_dims(np.array(self.heads[rank], np.float32) * 1000, others)
            token_axis = next(
                axis for axis, n in enumerate(blocks.shape)
                if n == BLOCK_TOKENS and axis not in (self.block_axis, self.head_axis)
            )  # fmt: skip
            axes = self.block_axis, token_axis
            yield np.moveaxis(blocks, axes, (0, 1)), np.moveaxis(added, axes, (0, 1))[0]

    def write(self, layer, block, offset, value):
        for blocks, added in self.blocks(layer):
            blocks[block, offset] = value + added[0]

    def read(self, layer, table, start, end):
        rows = np.concatenate(
            [
                (blocks[table] - added).reshape(len(table) * BLOCK_TOKENS, -1)[start:end]
                for blocks, added in self.blocks(layer)
            ],
            axis=1,
        )
        return [row[0] if (row == row[0]).all() else -1.0 for row in rows]

    def group_of(self, layer):
        return LAYERS.index(layer) if len(self.windows) > 1 else 0

    def start_of(self, group, num_tokens):
        """The first token that a group still needs for the one behind `num_tokens`."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1)

    # Blocks

    def take(self, count):
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            if (hash := self.hash_of.pop(block, None)) is not None:
                del self.block_of[hash]
            self.num_refs[block] = 1
            taken.append(block)
        return taken

    def use(self, block):
        self.num_refs[block] += 1
        self.free.pop(block, None)

    def give_back(self, tables):
        for block in reversed([block for table in tables for block in table if block]):
            self.num_refs[block] -= 1
            if not self.num_refs[block]:
                self.free[block] = None

    def retire(self, request):
        """Give back the blocks before the windows of a request."""
        for group, table in enumerate(request.tables):
            for i in range(self.start_of(group, request.num_computed_tokens) // BLOCK_TOKENS):
                self.give_back([[table[i]]])
                table[i] = 0

    def publish(self, request):
        """Let other requests find the complete blocks of this one."""
        for group, table in enumerate(request.tables):
            for i in range(min(request.num_computed_tokens // BLOCK_TOKENS, len(table))):
                key = group, request.block_hashes[i]
                if table[i] and key not in self.block_of and table[i] not in self.hash_of:
                    self.block_of[key] = table[i]
                    self.hash_of[table[i]] = key

    def local(self, request):
        """The tables of the longest prefix that all groups have."""
        for count in range((request.num_tokens - 1) // BLOCK_TOKENS, 0, -1):
            tables = []
            for group in range(len(self.windows)):
                start = self.start_of(group, count * BLOCK_TOKENS) // BLOCK_TOKENS
                hashes = request.block_hashes[start:count]
                tables.append([0] * start + [self.block_of.get((group, h), -1) for h in hashes])
            if not any(-1 in table for table in tables):
                return tables
        return [[] for _ in self.windows]

    # Requests

    def add(self, prompt, count=3, **options):
        request = Request(f"r{self.num_steps}", prompt, count, **options)
        self.waiting.append(request)
        return request

    def abort(self, request):
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.status = SimpleNamespace(name="FINISHED_ABORTED")
        self.finish(request, keep=not request.external_done)

    def finish(self, request, keep=False):
        self.retire(request)
        tables = tuple(map(list, request.tables))
        assert self.scheduler.request_finished_all_groups(request, tables) == (False, None)
        self.finished.add(request.request_id)
        if keep:
            self.held[request.request_id] = request
        else:
            self.give_back(request.tables)

    def preempt(self, request):
        self.running.remove(request)
        self.give_back(request.tables)
        request.tables, request.num_computed_tokens = [], 0
        request.status = SimpleNamespace(name="PREEMPTED")
        self.waiting.insert(0, request)
        self.num_preempted += 1

    def reset(self, preempt=True):
        """Change the weights, and reset the prefix cache and the connector as vLLM does.

        preempt : `reset_running_requests`
        """
        while preempt and self.running:
            self.preempt(self.running[-1])
        if len(self.free) == len(self.num_refs) - 1:
            self.hash_of, self.block_of = {}, {}
        elif preempt:
            raise RuntimeError("a request waits for its load")
        self.num_resets += 1  # and otherwise vLLM keeps its own cache
        self.weights += 1
        assert self.scheduler.reset_cache()

    def run(self, *requests, timeout_s=60.0):
        """Step until the requests are done."""
        deadline = time.monotonic() + timeout_s  # steps that wait for a thread take no time
        while time.monotonic() < deadline:
            if not any(r in self.waiting or r in self.running for r in requests):
                return [r.output for r in requests]
            self.step()
        raise AssertionError("the engine does not get on")

    def generate(self, *prompts, count=3):
        return self.run(*[self.add(prompt, count) for prompt in prompts])

    # A step

    def step(self, executed=lambda: None, admits=True):
        """Schedule and execute a step, call `executed`, and note what has come out.

        admits : whether to consider waiting requests
        """
        scheduled, new, cached = {}, [], []
        preempted_before, has_sync_loads = self.num_preempted, False
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(self.chunk, request.num_tokens - request.num_computed_tokens)
            self.retire(request)
            short = self.shortage(request, count)
            while sum(short) > len(self.free) and request in self.running:
                scheduled.pop(self.running[-1].request_id, None)
                self.preempt(self.running[-1])
            if request not in self.running:
                break
            added = self.extend(request, short)
            scheduled[request.request_id] = count
            cached.append((request, added))
        cached = [(r, added) for r, added in cached if r in self.running]
        scheduled = {r.request_id: scheduled[r.request_id] for r, _ in cached}
        resumed = set()
        if admits and self.num_preempted == preempted_before:
            has_sync_loads = self.admit(scheduled, new, cached, resumed)
        num_computed = {r.request_id: r.num_computed_tokens for r in self.running}
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r.request_id, block_ids=tuple(map(list, r.tables)),
                    num_computed_tokens=r.num_computed_tokens,
                )
                for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, _ in cached], resumed_req_ids=resumed,
                new_block_ids=[added if any(added) else None for _, added in cached],
                num_computed_tokens=[num_computed[r.request_id] for r, _ in cached],
            ),
            num_scheduled_tokens=scheduled,
            finished_req_ids=self.finished,
            kv_connector_block_state=SimpleNamespace(
                boundary_state_offloads={},
                get_block_ids=lambda name: next(
                    tuple(map(list, r.tables)) for r in self.running if r.request_id == name
                ),
            ),
        )  # fmt: skip
        self.finished = set()
        metadata = self.scheduler.build_connector_meta(output)
        if self.separate:
            metadata = pickle.loads(pickle.dumps(metadata))
        rows = self.execute(output, metadata, scheduled, has_sync_loads)
        executed()
        self.update(scheduled, rows)
        self.num_steps += 1

    def shortage(self, request, count):
        """Blocks that each group lacks."""
        needed = -(-(request.num_computed_tokens + count) // BLOCK_TOKENS)
        tables = request.tables or [[] for _ in self.windows]
        return [max(0, needed - len(table)) for table in tables]

    def extend(self, request, short):
        added = [self.take(count) for count in short]
        for table, own in zip(request.tables, added, strict=True):
            table += own
        return tuple(added)

    def admit(self, scheduled, new, cached, resumed):
        has_sync_loads = False
        for request in sorted(self.waiting, key=lambda r: not r.tables):  # then in order
            if len(self.running) == self.max_running:
                break
            started = (*self.running, *(r for r in self.waiting if r.tables))
            reserved = sum(
                sum(self.shortage(r, r.num_tokens - r.num_computed_tokens)) for r in started
            )
            if not request.external_done:
                continue
            tables, external, is_async = request.tables, 0, False
            computed = request.num_computed_tokens
            if not computed:
                tables = self.local(request)
                computed = len(tables[0]) * BLOCK_TOKENS
                external, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
                if external is None:
                    continue
                assert not (is_async and not external)
            computed += external
            count = 0 if is_async else min(self.chunk, request.num_tokens - computed)
            tables = [
                [0] * start + table[start:]
                for group, table in enumerate(tables)
                for start in [self.start_of(group, computed) // BLOCK_TOKENS]
            ]
            needed = -(-(computed + count) // BLOCK_TOKENS)
            short = [max(0, needed - len(table)) for table in tables]
            reusable = sum(block in self.free for table in tables for block in table)
            whole = sum(-(-request.num_tokens // BLOCK_TOKENS) - len(table) for table in tables)
            if not request.tables and whole > len(self.free) - reusable - reserved:
                break
            if sum(short) > len(self.free) - reusable:
                break
            if request.tables:
                self.retire(request)
            else:
                for block in [block for table in tables for block in table if block]:
                    self.use(block)
                request.num_cached += computed
                request.num_external += external
                request.tables = tables
            hits = [self.computed_in[block] for table in tables for block in table if block]
            request.computed_in = min(hits, default=self.num_resets)
            for block in [block for added in self.extend(request, short) for block in added]:
                self.computed_in[block] = self.num_resets
            blocks = SimpleNamespace(
                get_block_ids=lambda r=request: tuple(map(list, r.tables))
            )  # fmt: skip
            self.scheduler.update_state_after_alloc(request, blocks, external)
            if external:
                found = self.scheduler.get_external_cache_hit_sources(request, external)
                assert sum(found.values()) == external
                for source, tokens in found.items():
                    self.sources[source] = self.sources.get(source, 0) + tokens
            request.num_computed_tokens = computed
            if is_async:
                request.external_done, request.loaded_in = False, self.num_resets
                continue
            self.waiting.remove(request)
            self.running.append(request)
            scheduled[request.request_id] = count
            has_sync_loads |= external > 0
            if request.status.name == "PREEMPTED":
                resumed.add(request.request_id)
                cached.append((request, tuple(map(list, request.tables))))
            else:
                new.append(request)
            request.status = SimpleNamespace(name="RUNNING")
        return has_sync_loads

    def execute(self, output, metadata, scheduled, has_sync_loads):
        rows = {}
        if self.zeroes:
            self.zero(output)
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            if has_sync_loads:
                worker.start_load_kv(None)
        for layer in LAYERS if scheduled else ():
            for worker in self.workers:
                worker.wait_for_layer_load(layer)
            group = self.group_of(layer)
            for request in self.running:
                table, start = request.tables[group], request.num_computed_tokens
                end = start + scheduled[request.request_id]
                for i in range(start, end):
                    before = self.read(layer, table, i - 1, i)[0] if i else 0
                    row = row_of(request.tokens[i], before, self.weights)
                    self.write(layer, table[i // BLOCK_TOKENS], i % BLOCK_TOKENS, row)
                    self.computed_in[table[i // BLOCK_TOKENS]] = request.computed_in
                rows.setdefault(request.request_id, []).append(
                    self.read(layer, table, self.start_of(group, start), end)
                )
            for worker, caches in zip(self.workers, self.caches, strict=True):
                worker.save_kv_layer(layer, caches[layer], None)
        answers = []
        for worker in self.workers:
            if not has_sync_loads:
                worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(output.finished_req_ids)
            answers.append(
                SimpleNamespace(
                    **vars(results),
                    invalid_block_ids=worker.get_block_ids_with_load_errors(),
                    kv_connector_worker_meta=worker.build_connector_worker_meta(),
                )
            )
            worker.clear_connector_metadata()
        self.report = self.aggregate(answers)
        return rows

    def aggregate(self, answers):
        """What the workers report together; a request is finished once all of them say so."""
        first = answers[0]
        if len(answers) == 1:
            return first
        whole = {}
        for name in ("finished_sending", "finished_recving"):
            for request in (r for answer in answers for r in getattr(answer, name) or ()):
                self.num_reports[name, request] = self.num_reports.get((name, request), 0) + 1
            whole[name] = {
                request for (kind, request), count in self.num_reports.items()
                if kind == name and count == len(self.workers)
            }  # fmt: skip
            for request in whole[name]:
                del self.num_reports[name, request]
        self.failed |= {r for answer in answers for r in answer.failed_recving or ()}
        metas = [a.kv_connector_worker_meta for a in answers if a.kv_connector_worker_meta]
        return SimpleNamespace(
            **whole, failed_recving=self.failed & whole["finished_recving"],
            invalid_block_ids=set().union(*(a.invalid_block_ids for a in answers)),
            kv_connector_worker_meta=reduce(lambda a, b: a.aggregate(b), metas) if metas else None,
        )  # fmt: skip

    def zero(self, output):
        """Zero the blocks that a step writes from their first token on."""
        cached = output.scheduled_cached_reqs
        tables = [(new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        for name, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tables.append((added or (), computed if name in cached.resumed_req_ids else 0))
        for own, computed in tables:
            for block in [b for table in own for b in table[-(-computed // BLOCK_TOKENS) :] if b]:
                for cache in self.caches[0].values():
                    np.moveaxis(cache, self.block_axis, 0)[block] = 0

    def update(self, scheduled, rows):
        report = self.report
        failed = self.handle_invalid(report.invalid_block_ids, scheduled)
        for request in list(self.running):
            name = request.request_id
            if name not in scheduled or request in failed:
                continue
            request.num_computed_tokens += scheduled[name]
            self.publish(request)
            if request.num_computed_tokens < request.num_tokens:
                continue
            *others, whole = sorted(rows[name], key=len)
            assert all(whole[-len(own) :] == own for own in others), "layers have different rows"
            if request.computed_in == self.num_resets:
                expected = rows_of(request.tokens, self.weights)
                assert whole == expected[-len(whole) :], "rows of other weights or tokens"
            request.tokens.append(next_token(whole))
            request.hash_blocks()
            if len(request.output) == request.count:
                self.running.remove(request)
                request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
                self.finish(request)
        self.reports.append(report)
        if len(self.reports) > self.late:
            self.note(self.reports.pop(0))

    def note(self, report):
        """Note what the workers report of their transfers."""
        self.scheduler.update_connector_output(report)
        for name in report.finished_recving or ():
            if name in self.held:
                self.give_back(self.held.pop(name).tables)
                continue
            (request,) = (r for r in self.waiting if r.request_id == name)
            request.external_done = True
            if name in report.failed_recving:
                self.give_back(request.tables)
                request.tables, request.num_computed_tokens = [], 0
            self.publish(request)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        assert not report.finished_sending
        self.events += self.scheduler.take_events()

    def handle_invalid(self, invalid, scheduled):
        failed = []
        assert not invalid or len(self.windows) == 1  # vLLM's engine ends
        for request in self.running:
            computed = -(-request.num_computed_tokens // BLOCK_TOKENS)
            bad = [i for i, block in enumerate(request.tables[0][:computed]) if block in invalid]
            if bad:
                failed.append(request)
                request.num_computed_tokens = bad[0] * BLOCK_TOKENS
        return failed
