"""The scheduler's side: which blocks to load and save, from vLLM's block hashes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ...config import BoundedLog, cache_logger
from .handover import asks_for_hand_over, parameters_of, ticket_of
from .options import setting
from .steps import Answer, Found, Load, PullJob, Step
from .worker import Worker

if TYPE_CHECKING:
    from .events import Events

_HANDED_OVER = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")  # not aborted, and no error
_CANNOT_HAND_OVER = (
    "expected no encoding, and one worker in the scheduler's process: distributed_executor_backend="
    '"uni", and on a CPU VLLM_ENABLE_V1_MULTIPROCESSING=0'
)


@dataclass
class Tracked:
    """A request with blocks of the engine."""

    request: Any
    blocks: list[int] = field(default_factory=list)
    num_saved: int = 0  # leading blocks that were sent to be saved


class Scheduler:
    """Decides what each step loads and saves.

    Parameters
    ----------
    config : vLLM's VllmConfig
    layerwise : whether to load in the step, layer by layer, if no other request runs
    find_worker : returns the only worker, if it is in this process, else None
    events : that describe saved blocks, or None
    """

    def __init__(
        self, config: Any, *, layerwise: bool, find_worker: Callable[[], Worker | None],
        events: Events | None = None,
    ) -> None:  # fmt: skip
        self.block_tokens = int(setting(config, "cache_config.block_size"))
        hash_tokens = int(setting(config, "cache_config.hash_block_size", 0)) or self.block_tokens
        self._hashes_per_block = max(1, self.block_tokens // hash_tokens)
        self._num_workers = int(setting(config, "parallel_config.world_size", 1))
        # Workers of which only one fails a load would save what the others computed from it.
        self._layerwise = layerwise and self._num_workers == 1
        self._find_worker = find_worker
        self._events = events
        self._step = Step()
        self._tracked: dict[str, Tracked] = {}
        self._hashes: dict[str, list[int]] = {}  # of full blocks, by request
        # First block, blocks from it on, and whether the request is to wait for their load.
        self._found: dict[str, tuple[int, Found, bool]] = {}
        self._loading: dict[str, Load] = {}  # loads whose outcome is not known
        self._recompute: set[str] = set()  # requests one of whose loads has failed
        self._tickets: dict[str, bytes] = {}  # of prompts to fetch from other engines
        self._pulled: set[str] = set()  # requests whose prompt was fetched, or cannot be
        self._taken_over: set[str] = set()  # and of these, the ones whose prompt was fetched
        self._log = BoundedLog(cache_logger)
        self._asked: dict[str, int] = {}  # first block, by request that workers look up
        self._answers: dict[str, list[Found]] = {}
        self._salt = b""  # random once blocks were forgotten, as after a change of the weights
        self._num_failures = 0
        self._running: set[str] = set()  # unfinished requests of the last step

    # --- Scheduling a request ---

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded, or None to be asked again."""
        name = request.request_id
        if (num_remote := self._match_remote(request, num_computed_tokens)) > 0:
            return num_remote, True
        first = num_computed_tokens // self.block_tokens
        hashes = self.hashes(request)[: (request.num_tokens - 1) // self.block_tokens]
        if name in self._recompute or first >= len(hashes):
            return 0, False
        found = self._look_up(name, first, hashes[first:])
        if found is None:
            return None, False
        is_async = not self._layerwise or bool(self._running)
        self._found[name] = (first, found, is_async)
        if not found.num_blocks:
            return 0, False
        return found.num_blocks * self.block_tokens, is_async

    def _match_remote(self, request: Any, num_computed_tokens: int) -> int:
        """Return how many tokens another engine has computed for this request."""
        name = request.request_id
        if name in self._pulled:
            return 0
        try:
            if (remote := ticket_of(request)) is None:
                return 0
            if (worker := self._find_worker()) is None or worker.hand_over is None:
                raise ValueError(_CANNOT_HAND_OVER)
        except ValueError as error:
            self._log.warning("the prompt of a request is computed again: %s", error)
            self._pulled.add(name)
            return 0
        ticket, num_tokens = remote
        if num_tokens > num_computed_tokens:
            self._tickets[name] = ticket
        return num_tokens - num_computed_tokens

    def _look_up(self, name: str, first: int, hashes: list[int]) -> Found | None:
        if (worker := self._find_worker()) is not None:
            return worker.lookup(name, first, hashes)
        if self._asked.get(name) != first:
            self._asked[name] = first
            self._answers[name] = []
            self._step.lookups[name] = (first, hashes)
        answers = self._answers[name]
        if len(answers) < self._num_workers:
            return None
        return min(answers, key=lambda found: found.num_blocks)

    def sources(self, request: Any, num_tokens: int) -> dict[str, int]:
        """Return tokens by the source of their blocks."""
        if request.request_id in self._taken_over:
            return {"remote": num_tokens}
        _, found, _ = self._found.get(request.request_id, (0, Found(), False))
        sources = found.sources[: num_tokens // self.block_tokens]
        return {s: sources.count(s) * self.block_tokens for s in dict.fromkeys(sources)}

    def allocated(self, request: Any, blocks: list[int], num_external_tokens: int) -> None:
        """Note the blocks of a request, and queue its load."""
        name = request.request_id
        tracked = self._tracked.setdefault(name, Tracked(request))
        tracked.blocks = list(blocks)
        if (ticket := self._tickets.pop(name, None)) is not None and num_external_tokens:
            self._pulled.add(name)
            self._taken_over.add(name)
            self._pull(name, ticket, blocks, num_external_tokens, request)
            return
        first, _, is_async = self._found.get(name, (0, Found(), False))
        num_loaded = num_external_tokens // self.block_tokens
        worker = self._find_worker()
        if not num_loaded:
            if worker is None:
                self._step.drops.append(name)
            else:
                worker.drop(name)
        else:
            targets = blocks[first : first + num_loaded]
            claim = None if worker is None else worker.claim(name)
            load = Load(name, targets, first, is_async, claim)
            self._step.loads.append(load)
            self._step.fresh += targets
            self._loading[name] = load
        self._asked.pop(name, None)
        self._answers.pop(name, None)

    def _pull(
        self, name: str, ticket: bytes, blocks: list[int], num_tokens: int, request: Any
    ) -> None:
        """Queue the fetch of the last `num_tokens` that another engine has computed."""
        total = int(request.kv_transfer_params["kvcupy_tokens"])
        first = (total - num_tokens) // self.block_tokens
        targets = blocks[first : -(-total // self.block_tokens)]
        self._step.pulls.append(PullJob(name, ticket, targets, first))
        self._step.fresh += targets
        self._loading[name] = Load(name, targets, first, True)

    # --- A step ---

    def build(self, output: Any) -> Step:
        """Return what the workers do in a step."""
        step, self._step = self._step, Step()
        step.num_failures = self._num_failures
        self._running = set(output.num_scheduled_tokens)
        size = self.block_tokens
        for new in output.scheduled_new_reqs:
            blocks = new.block_ids[0]
            step.fresh += blocks[new.num_computed_tokens // size :]
            self._replace_blocks(new.req_id, blocks)
            self._add_saves(step, output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for i, name in enumerate(cached.req_ids):
            added = () if cached.new_block_ids[i] is None else cached.new_block_ids[i][0]
            num_computed = cached.num_computed_tokens[i]
            if name in resumed:
                step.fresh += added[num_computed // size :]
                self._replace_blocks(name, added)
            else:
                step.fresh += added
                if (tracked := self._tracked.get(name)) is not None:
                    tracked.blocks += added
            self._add_saves(step, output, name, num_computed)
        return step

    def _replace_blocks(self, name: str, blocks: Sequence[int]) -> None:
        if (tracked := self._tracked.get(name)) is not None:
            tracked.blocks, tracked.num_saved = list(blocks), 0

    def _add_saves(self, step: Step, output: Any, name: str, num_computed: int) -> None:
        """Add the blocks of a request that are complete after the step."""
        if (tracked := self._tracked.get(name)) is None:
            return
        hashes = self.hashes(tracked.request)
        num_tokens = num_computed + output.num_scheduled_tokens[name]
        num_complete = min(num_tokens // self.block_tokens, len(hashes), len(tracked.blocks))
        first = tracked.num_saved
        for i in range(first, num_complete):
            step.saves.setdefault(hashes[i], tracked.blocks[i])
        if self._events is not None:
            numbers = hashes[first:num_complete]
            self._events.describe(tracked.request, first, numbers, self._hashes_per_block)
        tracked.num_saved = max(tracked.num_saved, num_complete)

    def hashes(self, request: Any) -> list[int]:
        """Return the hashes of a request's full blocks, of 128 bits."""
        known = self._hashes.setdefault(request.request_id, [])
        step = self._hashes_per_block
        for hash in request.block_hashes[(len(known) + 1) * step - 1 :: step]:
            known.append(_number(hash, self._salt))
        return known

    def note_output(self, output: Any, answer: Answer | None) -> None:
        """Note what the workers report after a step."""
        if answer is not None:
            for name, found in answer.found.items():
                if name in self._answers:
                    self._answers[name] += found
        if invalid := getattr(output, "invalid_block_ids", None):
            self._num_failures += 1
            for name, load in self._loading.items():
                if not invalid.isdisjoint(load.blocks):
                    self._recompute.add(name)
            for tracked in self._tracked.values():
                tracked.num_saved = 0  # blocks of failed steps were not saved; others are known
        for name in getattr(output, "finished_recving", None) or ():
            self._loading.pop(name, None)

    def finished(self, request: Any, blocks: list[int]) -> dict[str, Any] | None:
        """Forget a request; return the parameters with which another engine continues it.

        If it returns parameters, vLLM keeps the blocks until the worker reports them as sent.
        """
        name = request.request_id
        dicts: tuple[dict[str, Any], ...] = (
            self._tracked, self._hashes, self._found, self._loading, self._asked, self._answers,
            self._tickets,
        )  # fmt: skip
        for known in dicts:
            known.pop(name, None)
        self._running.discard(name)
        self._recompute.discard(name)
        self._pulled.discard(name)
        self._taken_over.discard(name)
        if not asks_for_hand_over(request) or request.status.name not in _HANDED_OVER:
            return None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        num_blocks = -(-num_tokens // self.block_tokens)
        worker = self._find_worker()
        if worker is None or worker.hand_over is None or request.prompt_token_ids is None:
            self._log.warning("a prompt cannot be handed over: %s", _CANNOT_HAND_OVER)
            return None
        if not num_blocks or len(blocks) < num_blocks:
            return None  # the request was preempted meanwhile
        ticket = worker.hand_over.offer(name, blocks[:num_blocks])
        return None if ticket is None else parameters_of(request, ticket, num_tokens)

    def clear(self) -> None:
        """Forget all blocks with the next step, including those in a shared store."""
        self._step.clear = True
        self._salt = secrets.token_bytes(16)
        self._hashes.clear()


def _number(hash: Any, salt: bytes) -> int:
    """Return one of vLLM's block hashes as an int of 128 bits."""
    if isinstance(hash, int):
        hash = hash.to_bytes((hash.bit_length() + 7) // 8, "little")
    digest = blake2b(hash, digest_size=16, key=salt).digest()
    return int.from_bytes(digest, "little") | 2**64  # an int of more than 64 bits


def block_ids(blocks: Any) -> list[int]:
    """Return the ids of the one group of vLLM's KVCacheBlocks."""
    ids: Iterable[int] = blocks.get_block_ids()[0]
    return list(ids)
