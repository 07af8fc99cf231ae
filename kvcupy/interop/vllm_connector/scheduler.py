"""The scheduler's side: which blocks to load and save, from vLLM's block hashes."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from ...cache.tiered.changes import Change, Removed, Replaced, Stored
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError
from ...events import MEDIA
from .groups import NULL_BLOCK, Groups, Keys, number_of
from .options import setting
from .steps import Answer, Found, Load, Step
from .worker import Worker

_MAX_ABSENT = 10_000  # named blocks that no tier has


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
    """Decides what each step loads and saves."""

    def __init__(
        self, config: Any, groups: Groups, *, layerwise: bool,
        find_worker: Callable[[], Worker | None], events: Events | None = None,
    ) -> None:  # fmt: skip
        self._groups = groups
        self._num_workers = int(setting(config, "parallel_config.world_size", 1))
        # Workers of which only one fails a load would save what the others computed from it, and
        # vLLM cannot compute blocks again that a step of several groups lacks.
        self._layerwise = layerwise and self._num_workers == len(groups) == 1
        self._find_worker = find_worker
        self._events = events
        self._step = Step()
        self._tracked: dict[str, Tracked] = {}
        self._generation = Generation()
        self._written: dict[int, int] = {}  # generation of the engine's blocks; 0 if missing
        self._questions = count()
        self._num_failures = 0
        self._running: set[str] = set()  # unfinished requests of the last step

    # --- Scheduling a request ---

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded, or None to be asked again."""
        name = request.request_id
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
                self._events.name(
                    tracked.request, number, [index for index, _ in saved], numbers
                )  # fmt: skip
            tracked.num_saved[number] = end

    def _save_state(
        self, step: Step, name: str, number: int, block: int, num_tokens: int
    ) -> None:  # fmt: skip
        """Add a block with the state after the first tokens of a request."""
        index, rest = divmod(num_tokens, self._groups.groups[number].block_tokens)
        if (tracked := self._current(name)) is None or rest:
            return
        numbers = self.numbers(tracked.request)
        if index <= self._groups.num_blocks(number, numbers):
            step.saves.setdefault(self._groups.key(number, index - 1, numbers), block)
            if self._events is not None:
                self._events.name(tracked.request, number, [index - 1], numbers)

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

    def finished(self, request: Any) -> None:
        """Forget a request."""
        name = request.request_id
        now = self._generation
        dicts: tuple[dict[str, Any], ...] = (
            self._tracked, now.numbers, now.found, now.loading, now.questions,
        )  # fmt: skip
        for known in dicts:
            known.pop(name, None)
        self._running.discard(name)
        now.recompute.discard(name)

    def clear(self) -> None:
        """Begin the next generation: no block of an earlier one is found or saved any more.

        Requests that keep blocks of the engine continue with them. Workers clear their tiers with
        the next step; blocks in stores stay, under hashes that no request has any more.
        """
        self._generation = Generation(self._generation.number + 1, secrets.token_bytes(16))
        if (worker := self._find_worker()) is not None:
            worker.lookups.begin(self._generation.number)
        if self._events is not None:
            self._events.clear()


# --- Events ---


class Events:
    """Blocks that enter and leave the tiers of one worker, as KV events with vLLM's hashes.

    vLLM's own events with the same hashes have the parents and tokens. Tiers have a digest of
    vLLM's hash, so a block is announced once a request has named it.
    """

    def __init__(self, find_worker: Callable[[], Worker | None], groups: Groups) -> None:
        self._find_worker, self._groups = find_worker, groups
        self._is_following = False
        self._changes: deque[Change] = deque()
        self._names: dict[int, tuple[int, Any]] = {}  # number of the group, and vLLM's hash
        self._absent: dict[int, None] = {}  # named blocks in no tier, the oldest first
        self._present: dict[str, set[int]] = {"host": set()}
        self._events: list[Any] = []
        self._log = BoundedLog(cache_logger)

    def name(
        self, request: Any, number: int, indices: Sequence[int], numbers: Sequence[int]
    ) -> None:
        """Note vLLM's hashes of blocks of a group that a request has."""
        new = {}
        for index in indices:
            if (key := self._groups.key(number, index, numbers)) not in self._names:
                last = self._groups.last_hash(number, index)
                new[key] = number, request.block_hashes[last]
        self._names |= new
        self._absent |= dict.fromkeys(new)
        for tier, present in self._present.items():
            self._announce(Stored, tier, present.intersection(new))
        while len(self._absent) > _MAX_ABSENT:
            oldest = next(iter(self._absent))
            del self._absent[oldest], self._names[oldest]

    def clear(self) -> None:
        """Announce that every tier is empty: later blocks have other hashes in the tiers."""
        for tier, present in self._present.items():
            self._remove(tier, list(present))
        self._names.clear()
        self._absent.clear()

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        if (worker := self._find_worker()) is None:
            self._log.warning(
                "KV events of host memory need one worker in the scheduler's process: "
                'distributed_executor_backend="uni", and on a CPU VLLM_ENABLE_V1_MULTIPROCESSING=0'
            )
            return []
        if not self._is_following:
            with suppress(KvcupyError):  # it is closed
                worker.cache._follow(self._changes.append)
            self._is_following = True
        for _ in range(len(self._changes)):
            self._apply(self._changes.popleft())
        events, self._events = self._events, []
        return events

    def _apply(self, change: Change) -> None:
        if isinstance(change, Replaced):
            for tier, present in self._present.items():
                self._remove(tier, present.difference(change.blocks.get(tier, ())))
                self._store(tier, change.blocks.get(tier, ()))
        elif isinstance(change, Stored) and change.tier in self._present:
            self._store(change.tier, change.hashes)
        elif isinstance(change, Removed) and change.tier in self._present:
            self._remove(change.tier, change.hashes)

    def _store(self, tier: str, numbers: Iterable[int]) -> None:
        new = [number for number in numbers if number not in self._present[tier]]
        self._present[tier].update(new)
        self._announce(Stored, tier, new)

    def _remove(self, tier: str, numbers: Iterable[int]) -> None:
        gone = [number for number in numbers if number in self._present[tier]]
        self._present[tier].difference_update(gone)
        self._announce(Removed, tier, gone)

    def _announce(self, kind: type, tier: str, numbers: Iterable[int]) -> None:
        """Queue an event for each group that has some of the blocks."""
        hashes: dict[int, list[Any]] = {}
        for key in numbers:
            if (named := self._names.get(key)) is None:
                continue
            number, hash = named
            hashes.setdefault(number, []).append(maybe_convert_block_hash(hash))
            if kind is Stored:
                self._absent.pop(key, None)
            elif not any(key in present for present in self._present.values()):
                self._absent[key] = None
        for number, own in hashes.items():
            where = {"block_hashes": own, "medium": MEDIA[tier], "group_idx": number}
            if kind is Removed:
                self._events.append(BlockRemoved(**where))
                continue
            group = self._groups.groups[number]
            self._events.append(
                BlockStored(
                    **where, parent_block_hash=None, token_ids=[], block_size=group.block_tokens,
                    lora_id=None, lora_name=None, kv_cache_spec_kind=group.kind,
                    kv_cache_spec_sliding_window=group.window,
                )
            )  # fmt: skip
