"""Blocks that enter and leave the tiers below vLLM's cache, as vLLM's KV events.

Source: vllm-project/vllm `vllm/distributed/kv_events.py`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from ...cache.tiered.changes import Change, Removed, Replaced, Stored
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError
from ...events import MEDIA
from .groups import Groups
from .worker import Worker

_MAX_CHANGES = 10_000  # that wait for a step
_MAX_ABSENT = 10_000  # described blocks that no tier has


class Block(NamedTuple):
    """A block as vLLM describes it."""

    group: int
    hash: Any
    parent: Any
    token_ids: array[int]
    lora: tuple[int, str] | None
    extra_keys: Any


class Events:
    """The events of one worker, on the scheduler's side.

    Tiers know a digest of vLLM's hash. A block is announced once a request has described it, so
    blocks on disk after a restart are announced when they are used.

    Parameters
    ----------
    find_worker : returns the only worker, if it is in this process, else None
    groups : of layers
    """

    def __init__(self, find_worker: Callable[[], Worker | None], groups: Groups) -> None:
        self._find_worker, self._groups = find_worker, groups
        self._changes: deque[Change] = deque()
        self._is_behind = True  # changes are dropped until the cache announces all of its blocks
        self._blocks: dict[int, Block] = {}
        self._absent: dict[int, None] = {}  # described blocks in no tier, the oldest first
        self._present: dict[str, set[int]] = {"host": set(), "disk": set()}
        self._events: list[Any] = []
        self._log = BoundedLog(cache_logger)

    def describe(
        self, request: Any, group: int, indices: Sequence[int], numbers: Sequence[int]
    ) -> None:
        """Note vLLM's hashes, tokens and parents of blocks that a request has.

        Parameters
        ----------
        group, indices : number of the group of the blocks, and their indices in the prefix
        numbers : of the request's hashes
        """
        for index in indices:
            key = self._groups.key(group, index, numbers)
            if key not in self._blocks:
                self._blocks[key] = self._described(request, group, index)
                self._absent[key] = None
                for tier in self._present:
                    if key in self._present[tier]:
                        self._store(tier, [key])
        while len(self._absent) > _MAX_ABSENT:
            oldest = next(iter(self._absent))
            del self._absent[oldest], self._blocks[oldest]

    def _described(self, request: Any, group: int, index: int) -> Block:
        hashes, lora = request.block_hashes, request.lora_request
        size = self._groups.groups[group].block_tokens
        start, end = index * size, (index + 1) * size
        before = self._groups.last_hash(group, index - 1)
        extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        return Block(
            group=group,
            hash=maybe_convert_block_hash(hashes[self._groups.last_hash(group, index)]),
            parent=maybe_convert_block_hash(hashes[before]) if index else None,
            token_ids=array("i", request.all_token_ids[start:end]),
            lora=None if lora is None else (lora.adapter_id, lora.name),
            extra_keys=to_event_extra_keys([extra_keys])[0],
        )

    def clear(self) -> None:
        """Announce that every tier is empty: later blocks have other hashes in the tiers."""
        for tier, present in self._present.items():
            self._remove(tier, present)
        self._blocks.clear()
        self._absent.clear()

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        worker = self._find_worker()
        if worker is None or worker.cache is None:
            self._log.warning(
                "KV events of host memory and disk need one worker in the scheduler's process: "
                'distributed_executor_backend="uni", and on a CPU VLLM_ENABLE_V1_MULTIPROCESSING=0'
            )
            return []
        if self._is_behind:
            with suppress(KvcupyError):  # it is closed
                worker.cache._follow(self._note)
        for _ in range(len(self._changes)):
            self._apply(self._changes.popleft())
        events, self._events = self._events, []
        return events

    def _note(self, change: Change) -> None:
        """Queue a change of the tiers. Called by any thread, with the lock of the cache."""
        if isinstance(change, Replaced):
            self._is_behind = False
        elif len(self._changes) >= _MAX_CHANGES:
            self._is_behind = True
        if not self._is_behind:
            self._changes.append(change)

    def _apply(self, change: Change) -> None:
        if isinstance(change, Replaced):
            for tier, present in self._present.items():
                blocks = change.blocks.get(tier, ())
                self._remove(tier, present.difference(blocks))
                self._store(tier, [hash for hash in blocks if hash not in present])
        elif isinstance(change, Stored) and change.tier in self._present:
            present = self._present[change.tier]
            self._store(change.tier, [hash for hash in change.hashes if hash not in present])
        elif isinstance(change, Removed) and change.tier in self._present:
            self._remove(change.tier, self._present[change.tier].intersection(change.hashes))

    def _store(self, tier: str, numbers: Sequence[int]) -> None:
        """Announce blocks that follow each other by one event."""
        self._present[tier].update(numbers)
        event: Any = None
        for number in numbers:
            if (block := self._blocks.get(number)) is None:
                continue
            self._absent.pop(number, None)
            if event is not None and (block.group, block.parent) == (
                event.group_idx, event.block_hashes[-1]
            ):  # fmt: skip
                event.block_hashes.append(block.hash)
                event.token_ids += block.token_ids
                event.extra_keys.append(block.extra_keys)
                continue
            lora_id, lora_name = block.lora or (None, None)
            group = self._groups.groups[block.group]
            event = BlockStored(
                block_hashes=[block.hash], parent_block_hash=block.parent,
                token_ids=list(block.token_ids), block_size=group.block_tokens,
                lora_id=lora_id, lora_name=lora_name, medium=MEDIA[tier],
                extra_keys=[block.extra_keys], group_idx=block.group,
                kv_cache_spec_kind=group.kind, kv_cache_spec_sliding_window=group.window,
            )  # fmt: skip
            self._events.append(event)

    def _remove(self, tier: str, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        self._present[tier].difference_update(numbers)
        described = [number for number in numbers if number in self._blocks]
        by_group: dict[int, list[Any]] = {}
        for number in described:
            block = self._blocks[number]
            by_group.setdefault(block.group, []).append(block.hash)
        for group, hashes in by_group.items():
            self._events.append(
                BlockRemoved(block_hashes=hashes, medium=MEDIA[tier], group_idx=group)
            )
        for number in described:
            if not any(number in present for present in self._present.values()):
                self._absent[number] = None
