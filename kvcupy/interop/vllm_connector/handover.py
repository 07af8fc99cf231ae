"""Prompts handed over from one engine to another: pages under a lease, fetched by ticket."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from ...cache.tiered.cache import TieredCache
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError
from ...remote.migration.receiver import PageReceiver, Pull
from ...remote.migration.sender import PageSender
from .groups import NULL_BLOCK, Groups
from .options import Options

LEASE_S, _MAX_LEASE_S = 30.0, 60.0  # the engine's blocks are free again after that
_PULL_TIMEOUT_S = 30.0


class Pulling:
    """Pages on their way from another engine; has the methods of a `Completion` that loads use."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.pull: Pull | None = None
        self._is_cancelled = False
        self._over = threading.Event()

    def done(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> None:
        self._is_cancelled = True
        if (pull := self.pull) is not None:
            pull.cancel()

    def run(
        self, receiver: PageReceiver, cache: TieredCache, ticket: bytes, numbers: Sequence[int],
        blocks: Sequence[int], after: Any,
    ) -> None:  # fmt: skip
        """Fetch the pages to host memory, and load them from there: bytes that are late land there.

        numbers : of the pages to load, one for each of `blocks`

        Host pages of a failed pull become free when no byte can arrive in them any more.
        """
        pages: Any = ()
        try:
            pages = cache.take_host_pages(receiver.inspect(ticket).num_pages)
            self.pull = receiver.pull(ticket, pages, deadline_s=_PULL_TIMEOUT_S, after=False)
            if self._is_cancelled:
                self.pull.cancel()
            self.pull.synchronize()
            sources = [pages[number] for number in numbers]
            cache.engine.load(sources, list(blocks), after=after).synchronize()
        except Exception as error:  # the prompt is computed instead
            self.failure = error
        finally:
            if len(pages):
                cache.host_pool.allocator.free(pages)
            self._over.set()


class HandOver:
    """The sender and the receiver of an engine, made when they are needed.

    Parameters
    ----------
    cache : tiers of the engine
    options, model : of the worker
    """

    def __init__(self, cache: TieredCache, options: Options, model: str) -> None:
        self._cache = cache
        self._make_sender = partial(
            PageSender, cache.device_pool, listen=options.listen, advertise=options.advertise,
            secret=options.secret, model=model, max_lease_s=_MAX_LEASE_S,
        )  # fmt: skip
        self._make_receiver = partial(
            PageReceiver, cache.host_pool, secret=options.secret, model=model
        )
        self._lock = threading.Lock()
        self._sender: PageSender | None = None
        self._receiver: PageReceiver | None = None
        self._offered: set[str] = set()  # requests whose pages are offered
        self._released: set[str] = set()  # and of these, the ones whose pages are free again
        self._finished: set[str] = set()  # and the ones that the worker knows to be finished
        self.num_offers = 0  # so far
        self._log = BoundedLog(cache_logger)

    def offer(
        self, request: Any, groups: Groups, tables: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Offer the blocks of a finished request.

        Returns the parameters that the other engine's request takes, or None.
        """
        # The other engine computes the last token of the prompt, whose output it needs.
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens - 1)
        blocks: list[int] = []
        starts = []
        for group, table in zip(groups.groups, tables, strict=True):
            count = -(-num_tokens // group.block_tokens)
            own = table[:count]
            starts.append(own.count(NULL_BLOCK))  # a window has no blocks before it
            blocks += own[starts[-1] :]
            if len(own) < count or starts[-1] > group.first_needed(num_tokens):
                return None  # the request was preempted, or its window has moved on
        if not blocks:
            return None
        ticket = self._ticket(request.request_id, blocks)
        return None if ticket is None else Offered(ticket, num_tokens, starts).parameters(request)

    def _ticket(self, name: str, blocks: Sequence[int]) -> bytes | None:
        """Offer blocks; return the ticket, or None if they cannot be offered."""

        def release(pages: Any) -> None:
            with self._lock:
                self._released.add(name)

        try:
            with self._lock:
                if self._sender is None:
                    self._sender = self._make_sender()
                self._offered.add(name)
            ticket = self._sender.offer(list(blocks), after=False, lease_s=LEASE_S, release=release)
            self.num_offers += 1
            return ticket
        except (KvcupyError, OSError, ValueError) as error:
            self._log.warning("a prompt cannot be handed over: %s", error)
            with self._lock:
                self._offered.discard(name)
            return None

    @property
    def receiver(self) -> PageReceiver:
        with self._lock:
            if self._receiver is None:
                self._receiver = self._make_receiver()
            return self._receiver

    def take_sent(self, finished: set[str]) -> set[str]:
        """Return finished requests whose offers have ended, each once."""
        with self._lock:
            self._finished |= finished & self._offered
            sent = self._finished & self._released
            for known in (self._offered, self._released, self._finished):
                known -= sent
            return sent

    def close(self) -> None:
        with self._lock:
            ends = (self._sender, self._receiver)
        for end in ends:
            if end is not None:
                end.close()


# --- kv_transfer_params ---


def asks_for_hand_over(request: Any) -> bool:
    """Return whether a request is to be continued by another engine."""
    parameters = getattr(request, "kv_transfer_params", None)
    return isinstance(parameters, dict) and bool(parameters.get("do_remote_decode"))


@dataclass(frozen=True)
class Offered:
    """A prompt that another engine has computed, as `kv_transfer_params` describe it.

    Attributes
    ----------
    ticket : of the pages, group by group
    num_tokens : how many tokens of the prompt are in the pages
    starts : index of the first block that is in the pages, by group
    """

    ticket: bytes
    num_tokens: int
    starts: list[int]

    def parameters(self, request: Any) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kvcupy_ticket": base64.b64encode(self.ticket).decode(),
            "kvcupy_tokens": self.num_tokens,
            "kvcupy_starts": self.starts,
            "kvcupy_prompt": prompt_digest(request, self.num_tokens, self.starts),
        }

    @classmethod
    def to(cls, request: Any, num_groups: int) -> Offered | None:
        """Return the prompt that is offered to a request; None without one.

        ValueError if the parameters are of another prompt, or damaged.
        """
        parameters = getattr(request, "kv_transfer_params", None)
        if not isinstance(parameters, dict) or not parameters.get("do_remote_prefill"):
            return None
        if not isinstance(ticket := parameters.get("kvcupy_ticket"), str):
            raise ValueError(f"kv_transfer_params: expected a kvcupy_ticket, got {type(ticket)}")
        if request.prompt_token_ids is None:
            raise ValueError("kv_transfer_params: expected a prompt of tokens")
        num_tokens, starts = parameters.get("kvcupy_tokens"), parameters.get("kvcupy_starts")
        if not isinstance(num_tokens, int) or not 0 < num_tokens < request.num_prompt_tokens:
            raise ValueError("kv_transfer_params: expected the prompt of this request")
        if not isinstance(starts, list) or len(starts) != num_groups:
            raise ValueError(f"kv_transfer_params: expected kvcupy_starts of {num_groups} groups")
        if parameters.get("kvcupy_prompt") != prompt_digest(request, num_tokens, starts):
            raise ValueError("kv_transfer_params: expected the prompt of this request, got another")
        return cls(base64.b64decode(ticket, validate=True), num_tokens, starts)

    def pages(
        self, groups: Groups, tables: Sequence[Sequence[int]], num_tokens: int
    ) -> list[tuple[int | None, int]]:
        """Return the engine's blocks of the last `num_tokens`, each behind its page's number.

        The number is None if the pages lack the block.
        """
        found: list[tuple[int | None, int]] = []
        num_before = 0
        for group, table, start in zip(groups.groups, tables, self.starts, strict=True):
            end = -(-self.num_tokens // group.block_tokens)
            first = (self.num_tokens - num_tokens) // group.block_tokens
            for index, block in enumerate(table[first:end], first):
                if block != NULL_BLOCK:
                    found.append((num_before + index - start if index >= start else None, block))
            num_before += end - start
        return found


def prompt_digest(request: Any, num_tokens: int, starts: Sequence[int]) -> str:
    """Digest what determines the KV cache of a prompt's first tokens, and its first blocks."""
    features = getattr(request, "mm_features", None) or ()
    adapter = getattr(request, "lora_request", None)
    described = [
        list(map(int, request.prompt_token_ids[:num_tokens])),
        [str(getattr(feature, "identifier", "")) for feature in features],
        None if adapter is None else str(adapter.lora_name),
        list(starts),
    ]
    return blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
