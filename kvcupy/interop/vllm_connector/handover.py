"""Prompts handed over from one engine to another: pages under a lease, fetched by ticket."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from ...cache.tiered.cache import TieredCache
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError
from ...remote.migration.receiver import PageReceiver, Pull
from ...remote.migration.sender import PageSender
from .options import Options

LEASE_S, _MAX_LEASE_S = 30.0, 60.0  # the engine's blocks are free again after that
_PULL_S = 30.0


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
        self, receiver: PageReceiver, cache: TieredCache, ticket: bytes, first: int,
        blocks: Sequence[int], after: Any,
    ) -> None:  # fmt: skip
        """Fetch the pages to host memory, and load them from there: bytes that are late land there.

        Host pages of a failed pull become free when no byte can arrive in them any more.
        """
        pages: Any = ()
        try:
            pages = cache.take_host_pages(receiver.inspect(ticket).num_pages)
            self.pull = receiver.pull(ticket, pages, deadline_s=_PULL_S, after=False)
            if self._is_cancelled:
                self.pull.cancel()
            self.pull.synchronize()
            cache.engine.load(
                pages[first : first + len(blocks)], list(blocks), after=after
            ).synchronize()
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

    def offer(self, request: str, blocks: Sequence[int]) -> bytes | None:
        """Offer the blocks of a request; return the ticket, or None if they cannot be offered."""

        def release(pages: Any) -> None:
            with self._lock:
                self._released.add(request)

        try:
            with self._lock:
                if self._sender is None:
                    self._sender = self._make_sender()
                self._offered.add(request)
            ticket = self._sender.offer(list(blocks), after=False, lease_s=LEASE_S, release=release)
            self.num_offers += 1
            return ticket
        except (KvcupyError, OSError, ValueError) as error:
            self._log.warning("a prompt cannot be handed over: %s", error)
            with self._lock:
                self._offered.discard(request)
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


def parameters_of(request: Any, ticket: bytes, num_tokens: int) -> dict[str, Any]:
    """Return the parameters that the other engine's request takes."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvcupy_ticket": base64.b64encode(ticket).decode(),
        "kvcupy_tokens": num_tokens,
        "kvcupy_prompt": prompt_digest(request, num_tokens),
    }


def ticket_of(request: Any) -> tuple[bytes, int] | None:
    """Return the ticket of a request's prompt, and its number of tokens; None without one.

    ValueError if the parameters are of another prompt, or damaged.
    """
    parameters = getattr(request, "kv_transfer_params", None)
    if not isinstance(parameters, dict) or not parameters.get("do_remote_prefill"):
        return None
    if not isinstance(ticket := parameters.get("kvcupy_ticket"), str):
        raise ValueError(f"kv_transfer_params: expected a kvcupy_ticket, got {type(ticket)}")
    if request.prompt_token_ids is None:
        raise ValueError("kv_transfer_params: expected a prompt of tokens")
    num_tokens = parameters.get("kvcupy_tokens")
    if not isinstance(num_tokens, int) or not 0 < num_tokens <= request.num_prompt_tokens:
        raise ValueError("kv_transfer_params: expected the prompt of this request")
    if parameters.get("kvcupy_prompt") != prompt_digest(request, num_tokens):
        raise ValueError("kv_transfer_params: expected the prompt of this request, got another")
    return base64.b64decode(ticket, validate=True), num_tokens


def prompt_digest(request: Any, num_tokens: int) -> str:
    """Digest what determines the KV cache of a prompt's first tokens."""
    features = getattr(request, "mm_features", None) or ()
    adapter = getattr(request, "lora_request", None)
    described = [
        list(map(int, request.prompt_token_ids[:num_tokens])),
        [str(getattr(feature, "identifier", "")) for feature in features],
        None if adapter is None else str(adapter.lora_name),
    ]
    return blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
