"""The scheduler's side: which blocks to load and save, from vLLM's block hashes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from ...config import BoundedLog, cache_logger
from .groups import NULL_BLOCK, Groups, Keys, number_of
from .handover import Offered, Prompt, asks_for_hand_over
from .links import ask
from .options import setting
from .steps import Answer, Found, Load, PullJob, Step
from .worker import Worker

if TYPE_CHECKING:
    from .events import Events

_HANDED_OVER = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")  # not aborted, and no error
_TRACEPARENT = "[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
_CANNOT_HAND_OVER = "expected no encoding, no layers with states and no pipeline parallelism"


@dataclass
class Tracked:
    """A request with blocks of the engine."""

    request: Any
    num_saved: list[int]  # leading blocks that were sent to be saved, by group
    generation: int = -1  # the oldest one of its blocks, once it is scheduled


@dataclass
class Question:
    """A lookup by workers in other processes, and their answers."""

    number: int
    first: int  # unit
    answers: list[Found] = field(default_factory=list)


@dataclass
class Generation:
    """What is known of requests since the last reset; a reset begins the next generation."""

    number: int = 0
    salt: bytes = b""  # random after a reset, as after a change of the weights
    numbers: dict[str, list[int]] = field(default_factory=dict)  # of block hashes
    # First unit, units from it on, and whether the request is to wait for their load.
    found: dict[str, tuple[int, Found, bool]] = field(default_factory=dict)
    questions: dict[str, Question] = field(default_factory=dict)
    loading: dict[str, set[int]] = field(default_factory=dict)  # blocks that a step loads
    recompute: set[str] = field(default_factory=set)  # requests one of whose loads has failed


class Scheduler:
    """Decides what each step loads and saves.

    Parameters
    ----------
    config : vLLM's VllmConfig
    groups : of layers
    layerwise : whether to load in the step, layer by layer, if no other request runs
    find_worker : returns the only worker, if it is in this process, else None
    decode_size : workers of engines that take over requests; 0: as many as here
    events : that describe saved blocks, or None

    Attributes
    ----------
    links : where each worker is asked for tickets; empty if no prompts are handed over
    """

    def __init__(
        self, config: Any, groups: Groups, *, layerwise: bool,
        find_worker: Callable[[], Worker | None], decode_size: int = 0,
        events: Events | None = None,
    ) -> None:  # fmt: skip
        self._groups = groups
        self._num_workers = int(setting(config, "parallel_config.world_size", 1))
        # Workers of which only one fails a load would save what the others computed from it, and
        # vLLM cannot compute blocks again that a step of several groups lacks.
        self._layerwise = layerwise and self._num_workers == len(groups) == 1
        self._find_worker = find_worker
        self._decode_size = decode_size or self._num_workers
        self.links: list[str] = []
        self._events = events
        self._step = Step()
        self._tracked: dict[str, Tracked] = {}
        self._generation = Generation()
        self._written: dict[int, int] = {}  # generation of the engine's blocks; 0 if missing
        self._questions = count()
        self._offered: dict[str, Offered] = {}  # prompts to fetch from other engines
        self._pulled: set[str] = set()  # requests whose prompt was fetched, or cannot be
        self._taken_over: set[str] = set()  # and of these, the ones whose prompt was fetched
        self._log = BoundedLog(cache_logger)
        self._num_failures = 0
        self._running: set[str] = set()  # unfinished requests of the last step

    # --- Scheduling a request ---

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded, or None to be asked again."""
        name = request.request_id
        if (num_remote := self._match_remote(request, num_computed_tokens)) > 0:
            return num_remote, True
        unit = self._groups.unit_tokens
        first, numbers = num_computed_tokens // unit, self.numbers(request)
        end = min((request.num_tokens - 1) // unit, self._groups.num_units(numbers))
        if name in self._generation.recompute or first >= end:
            return 0, False
        found = self._look_up(name, first, self._groups.keys(numbers, first, end))
        if found is None:
            return None, False
        is_async = not self._layerwise or bool(self._running)
        self._generation.found[name] = (first, found, is_async)
        if not found.num_units:
            return 0, False
        return found.num_units * unit, is_async

    def _match_remote(self, request: Any, num_computed_tokens: int) -> int:
        """Return how many tokens another engine has computed for this request."""
        name = request.request_id
        if name in self._pulled:
            return 0
        try:
            offered = Offered.to(request, len(self._groups), self._num_workers)
            if offered is None:
                return 0
            if not self._find_links():
                raise ValueError(_CANNOT_HAND_OVER)
        except ValueError as error:
            self._log.warning("the prompt of a request is computed again: %s", error)
            self._pulled.add(name)
            return 0
        if offered.num_tokens > num_computed_tokens:
            self._offered[name] = offered
        return offered.num_tokens - num_computed_tokens

    def _find_links(self) -> list[str]:
        """Return `links`, which vLLM may not have passed on if the worker is in this process."""
        worker = self._find_worker()
        if not self.links and worker is not None and worker.hand_over is not None:
            path = worker.hand_over.path
            self.links = [path] if path else []
        return self.links

    def _look_up(self, name: str, first: int, keys: Keys) -> Found | None:
        if (worker := self._find_worker()) is not None:
            return worker.lookups.find(name, first, keys)
        question = self._generation.questions.get(name)
        if question is None or question.first != first:
            question = self._ask(name, first, keys)
        answers = question.answers
        if len(answers) < self._num_workers:
            return None
        shortest = min(answers, key=lambda found: found.num_units)
        if len(self._groups) > 1 and any(a.num_units > shortest.num_units for a in answers):
            # A window needs other blocks of a shorter prefix than those that workers hold.
            self._ask(name, first, self._groups.leading(keys, shortest.num_units))
            return None
        return shortest

    def _ask(self, name: str, first: int, keys: Keys) -> Question:
        """Queue a lookup; answers to earlier ones of the request do not count any more."""
        question = Question(next(self._questions), first)
        self._generation.questions[name] = question
        self._step.lookups[name] = (question.number, first, keys)
        return question

    def sources(self, request: Any, num_tokens: int) -> dict[str, int]:
        """Return tokens by the source of their blocks."""
        if request.request_id in self._taken_over:
            return {"remote": num_tokens}
        _, found, _ = self._generation.found.get(request.request_id, (0, Found(), False))
        unit = self._groups.unit_tokens
        sources = found.sources[: num_tokens // unit]
        return {s: sources.count(s) * unit for s in dict.fromkeys(sources)}

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Note that a request has blocks, and queue its load.

        tables : its blocks, by group
        """
        name = request.request_id
        self._tracked.setdefault(name, Tracked(request, [0] * len(self._groups)))
        if (offered := self._offered.pop(name, None)) is not None and num_external_tokens:
            self._pulled.add(name)
            self._taken_over.add(name)
            pages = offered.pages(self._groups, tables, num_external_tokens)
            self._step.pulls.append(PullJob(name, offered.tickets, pages))
            self._step.fresh += (blocks := [block for _, block in pages])
            self._written.update(dict.fromkeys(blocks, 0))  # the other engine was perhaps not reset
            return
        first, _, is_async = self._generation.found.get(name, (0, Found(), False))
        worker = self._find_worker()
        if num_external_tokens:
            end = first + num_external_tokens // self._groups.unit_tokens
            targets = self._groups.blocks_of(tables, first, end)
            claim = None if worker is None else worker.lookups.claim(name)
            self._step.loads.append(Load(name, targets, is_async, claim))
            self._step.fresh += targets.values()
            self._written.update(dict.fromkeys(targets.values(), self._generation.number))
            if not is_async:
                self._generation.loading[name] = set(targets.values())
        elif worker is None:
            self._step.drops.append(name)
        else:
            worker.lookups.drop(name)
        self._generation.questions.pop(name, None)

    # --- A step ---

    def build(self, output: Any) -> Step:
        """Return what the workers do in a step."""
        step, self._step = self._step, Step()
        step.num_failures, step.generation = self._num_failures, self._generation.number
        self._running = set(output.num_scheduled_tokens)
        scheduled = {
            new.req_id: (new.block_ids, new.num_computed_tokens, True)
            for new in output.scheduled_new_reqs
        }
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for i, name in enumerate(cached.req_ids):
            added = cached.new_block_ids[i]
            scheduled[name] = added or (), cached.num_computed_tokens[i], name in resumed
        for name in output.num_scheduled_tokens:  # in order: one may hit blocks of those before
            added, num_computed, again = scheduled[name]
            self._add_fresh(step, name, added, num_computed if again else None)
            self._add_saves(step, output, name, num_computed, again=again)
        for name, states in output.kv_connector_block_state.boundary_state_offloads.items():
            for number, block, num_tokens in states:
                self._save_state(step, name, number, block, num_tokens)
        return step

    def _add_fresh(
        self, step: Step, name: str, tables: Sequence[Sequence[int]], num_computed: int | None
    ) -> None:
        """Add blocks that a request writes from this step on.

        tables : blocks that it has received since the last step
        num_computed : tokens in these blocks that others have computed, or that were loaded, if it
            starts now, else None
        """
        fresh: list[int] = []
        hits: list[int] = []
        for group, table in zip(self._groups.groups, tables, strict=False):
            fresh += table[(num_computed or 0) // group.block_tokens :]
            hits += table[: -(-(num_computed or 0) // group.block_tokens)]
        step.fresh += fresh
        if (tracked := self._tracked.get(name)) is None:
            return
        if num_computed is not None:
            # While requests have blocks, a reset does not clear vLLM's own cache.
            written = [self._written.get(block, 0) for block in hits if block != NULL_BLOCK]
            tracked.generation = min(written, default=self._generation.number)
        self._written.update(dict.fromkeys(fresh, tracked.generation))

    def _add_saves(
        self, step: Step, output: Any, name: str, num_computed: int, *, again: bool = False
    ) -> None:
        """Add the blocks of a request that are complete after the step.

        again : whether to add blocks of earlier steps too
        """
        if (tracked := self._current(name)) is None:
            return
        numbers = self.numbers(tracked.request)
        num_tokens = num_computed + output.num_scheduled_tokens[name]
        tables: Any = None
        for number, group in enumerate(self._groups.groups):
            first = 0 if again else tracked.num_saved[number]
            end = min(
                num_tokens // group.block_tokens, self._groups.num_blocks(number, numbers)
            )  # fmt: skip
            if end <= first or group.needs.is_state:  # vLLM says which blocks have a state
                continue
            if tables is None:  # the current ones: a window has no blocks before it
                tables = output.kv_connector_block_state.get_block_ids(name)
            blocks = enumerate(tables[number][first:end], first)
            saved = [(index, block) for index, block in blocks if block != NULL_BLOCK]
            for index, block in saved:
                step.saves.setdefault(self._groups.key(number, index, numbers), block)
            if self._events is not None:
                self._events.describe(
                    tracked.request, number, [index for index, _ in saved], numbers
                )
            tracked.num_saved[number] = end

    def _save_state(
        self, step: Step, name: str, number: int, block: int, num_tokens: int
    ) -> None:  # fmt: skip
        """Add a block with the state behind the first tokens of a request."""
        index, rest = divmod(num_tokens, self._groups.groups[number].block_tokens)
        if (tracked := self._current(name)) is None or rest:
            return
        numbers = self.numbers(tracked.request)
        if index <= self._groups.num_blocks(number, numbers):
            step.saves.setdefault(self._groups.key(number, index - 1, numbers), block)
            if self._events is not None:
                self._events.describe(tracked.request, number, [index - 1], numbers)

    def _current(self, name: str) -> Tracked | None:
        """Return a request whose blocks all belong to this generation."""
        tracked = self._tracked.get(name)
        is_current = tracked is not None and tracked.generation == self._generation.number
        return tracked if is_current else None

    def numbers(self, request: Any) -> list[int]:
        """Return the hashes of a request's full blocks as ints of 128 bits."""
        known = self._generation.numbers.setdefault(request.request_id, [])
        salt = self._generation.salt
        known += [number_of(hash, salt) for hash in request.block_hashes[len(known) :]]
        return known

    def note_output(self, output: Any, answer: Answer | None) -> None:
        """Note what the workers report after a step."""
        if answer is not None:
            for (name, number), found in answer.found.items():
                question = self._generation.questions.get(name)
                if question is not None and question.number == number:
                    question.answers += found
        self._generation.recompute.update(getattr(output, "failed_recving", None) or ())
        if invalid := getattr(output, "invalid_block_ids", None):
            self._num_failures += 1
            for name, blocks in self._generation.loading.items():
                if not invalid.isdisjoint(blocks):
                    self._generation.recompute.add(name)
            for tracked in self._tracked.values():
                # Blocks of failed steps were not saved; others are known.
                tracked.num_saved = [0] * len(self._groups)

    def finished(
        self, request: Any, tables: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request.

        Returns whether vLLM keeps its blocks until the workers report them as sent, and the
        parameters with which another engine continues it.
        """
        name = request.request_id
        now = self._generation
        dicts: tuple[dict[str, Any], ...] = (
            self._tracked, self._offered, now.numbers, now.found, now.loading, now.questions,
        )  # fmt: skip
        for known in dicts:
            known.pop(name, None)
        self._running.discard(name)
        now.recompute.discard(name)
        self._pulled.discard(name)
        self._taken_over.discard(name)
        if not asks_for_hand_over(request) or request.status.name not in _HANDED_OVER:
            return False, None
        if not self._find_links() or request.prompt_token_ids is None:
            self._log.warning("a prompt cannot be handed over: %s", _CANNOT_HAND_OVER)
            return False, None
        if (prompt := Prompt.of(request, self._groups, tables)) is None:
            return False, None
        try:
            tickets = ask(self.links, name, prompt.blocks, _trace_of(request))
        except (OSError, ValueError) as error:
            self._log.warning("a prompt cannot be handed over: a worker: %s", error)
            return False, None
        self._step.offered.append(name)
        if None in tickets:
            return True, None  # until the offers of other workers have ended
        return True, prompt.parameters(request, tickets, self._decode_size)

    def clear(self) -> None:
        """Begin the next generation: no block of an earlier one is found or saved any more.

        Requests that keep blocks of the engine continue with them. Workers clear their tiers with
        the next step; blocks in a shared store stay, under hashes that no request has any more.
        """
        self._generation = Generation(self._generation.number + 1, secrets.token_bytes(16))
        if (worker := self._find_worker()) is not None:
            worker.lookups.begin(self._generation.number)
        if self._events is not None:
            self._events.clear()


def _trace_of(request: Any) -> str:
    """Return the W3C `traceparent` of a request, or an empty string."""
    headers = getattr(request, "trace_headers", None) or {}
    found = re.fullmatch(_TRACEPARENT, str(headers.get("traceparent")))
    return found[0] if found else ""
