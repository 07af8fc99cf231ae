"""Prompts handed over from one engine to another: pages under a lease, fetched by ticket."""

from __future__ import annotations

import base64
import functools
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from ...cache.pool import Pool
from ...cache.tiered.cache import TieredCache
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError, ProcessLocal
from ...remote.migration.protocol import Address
from ...remote.migration.receiver import PageReceiver, Pull
from ...remote.migration.sender import PageSender
from .groups import NULL_BLOCK, Groups
from .links import Link
from .options import Options

LEASE_S, _MAX_LEASE_S = 30.0, 60.0  # the engine's blocks are free again after that
_PULL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Share:
    """The KV heads of one worker: the workers of an engine divide them, or repeat them.

    Attributes
    ----------
    rank, size : of the worker, and how many the engine has
    total_heads : of the model; 1 for a latent, which all workers have
    """

    rank: int
    size: int
    total_heads: int

    @property
    def heads(self) -> range:
        first = self.rank * self.total_heads // self.size
        return range(first, first + max(1, self.total_heads // self.size))

    def senders(self, size: int) -> list[int]:
        """Return the workers of an engine with `size` that send these heads, each head once."""
        if size == self.size:
            return [self.rank]
        repeats = max(1, size // self.total_heads)
        return list(
            dict.fromkeys(
                head * size // self.total_heads + self.rank % repeats for head in self.heads
            )
        )

    def num_pulls(self, size: int) -> int:
        """Return how many workers of an engine with `size` fetch pages of this one."""
        others = (replace(self, rank=rank, size=size) for rank in range(size))
        return sum(self.rank in other.senders(self.size) for other in others)


@dataclass(frozen=True)
class Ends:
    """The pools between which pages move, and what a sender and a receiver need to know of them.

    Attributes
    ----------
    device, host : pools of the engine's blocks and of host pages
    heads : as for `PageSender`
    model : distinguishes pools
    """

    device: Pool
    host: Pool
    heads: tuple[int, int] | None
    model: str


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
        self, hand_over: HandOver, tickets: Sequence[bytes], numbers: Sequence[int],
        blocks: Sequence[int], after: Any,
    ) -> None:  # fmt: skip
        """Fetch the pages to host memory, and load them from there: bytes that are late land there.

        tickets : of all workers of the other engine
        numbers : of the pages to load, one for each of `blocks`

        Host pages of a failed pull become free when no byte can arrive in them any more.
        """
        cache, pages = hand_over.cache, ()
        try:
            receiver = hand_over.receiver(len(tickets))
            own = [tickets[rank] for rank in hand_over.share.senders(len(tickets))]
            pages = cache.take_host_pages(receiver.inspect(own[0]).num_pages)
            self.pull = receiver.pull(own, pages, deadline_s=_PULL_TIMEOUT_S, after=False)
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


class HandOver(ProcessLocal):
    """The sender and the receivers of a worker, made when they are needed.

    Parameters
    ----------
    cache : tiers of the worker
    options : of the connector
    share : of the worker
    model : distinguishes blocks, including blocks of other workers
    split : returns the ends for engines with another number of workers; raises ValueError if the
        blocks cannot be divided by heads
    """

    def __init__(
        self, cache: TieredCache, options: Options, share: Share, model: str,
        split: Callable[[], Ends],
    ) -> None:  # fmt: skip
        self.cache, self.share, self._options = cache, share, options
        self._alike = Ends(cache.device_pool, cache.host_pool, None, model)
        self._split = functools.cache(split)
        size = options.decode_tensor_parallel or share.size
        self._ends(size)  # raises now if they cannot be divided
        self._decode_size, self._num_pulls = size, share.num_pulls(size)
        self._lock = threading.Lock()
        self._sender: PageSender | None = None
        self._receivers: dict[bool, PageReceiver] = {}  # by whether the engines are alike
        self._offered: set[str] = set()  # requests whose blocks the engine keeps
        self._released: set[str] = set()  # requests whose blocks nobody reads any more
        self._link: Link | None = None
        self.num_offers = 0  # so far
        self._log = BoundedLog(cache_logger)

    def _ends(self, size: int) -> Ends:
        return self._alike if size == self.share.size else self._split()

    @property
    def path(self) -> str | None:
        """Where the scheduler's side asks for tickets; None if no socket can be made."""
        with self._lock:
            try:
                self._link = self._link or Link(self._offer)
            except (OSError, ValueError) as error:  # such as a TMPDIR with a long path
                self._log.warning("prompts cannot be handed over: %s", error)
                return None
            return self._link.path

    def _offer(self, name: str, blocks: list[int], trace: str) -> str | None:
        """Offer the blocks of a request; `take_sent` returns it in the end, also after a failure.

        Returns the ticket, "" if no worker fetches these heads here, or None after a failure.
        """

        def release(pages: Any = None) -> None:
            with self._lock:
                self._released.add(name)

        if not self._num_pulls:
            release()
            return ""
        try:
            with self._lock:
                if self._sender is None:
                    self._sender = self._make_sender()
            ticket = self._sender.offer(
                blocks, after=False, lease_s=LEASE_S, pulls=self._num_pulls, release=release,
                trace_id=trace,
            )  # fmt: skip
        except (KvcupyError, OSError, ValueError) as error:
            self._log.warning("a prompt cannot be handed over: %s", error)
            release()
            return None
        self.num_offers += 1
        return base64.b64encode(ticket).decode()

    def _make_sender(self) -> PageSender:
        options, rank, ends = self._options, self.share.rank, self._ends(self._decode_size)
        return PageSender(
            ends.device, listen=_of_rank(options.listen, rank),
            advertise=options.advertise and _of_rank(options.advertise, rank),
            secret=options.secret, heads=ends.heads, model=ends.model, max_lease_s=_MAX_LEASE_S,
        )  # fmt: skip

    def receiver(self, size: int) -> PageReceiver:
        """Return the receiver of pages of an engine with `size` workers."""
        with self._lock:
            if (is_alike := size == self.share.size) not in self._receivers:
                ends = self._ends(size)
                self._receivers[is_alike] = PageReceiver(
                    ends.host, secret=self._options.secret, heads=ends.heads, model=ends.model
                )
            return self._receivers[is_alike]

    def note_offered(self, names: Iterable[str]) -> None:
        """Note requests whose blocks the engine keeps until `take_sent` returns them."""
        with self._lock:
            self._offered.update(names)

    def take_sent(self) -> set[str]:
        """Return requests whose offers have ended, each once."""
        with self._lock:
            sent = self._offered & self._released
            self._offered -= sent
            self._released -= sent
            return sent

    def close(self) -> None:
        with self._lock:
            ends = (self._link, self._sender, *self._receivers.values())
        for end in ends:
            if end is not None:
                end.close()


def _of_rank(address: str, rank: int) -> str:
    """Return the address of a worker, from the address of the first."""
    parsed = Address.parse(address, "listen")
    if parsed.path:
        return f"{address}.rank{rank}" if rank else address
    return str(replace(parsed, port=parsed.port + rank)) if parsed.port else address


# --- kv_transfer_params ---


def asks_for_hand_over(request: Any) -> bool:
    """Return whether a request is to be continued by another engine."""
    parameters = getattr(request, "kv_transfer_params", None)
    return isinstance(parameters, dict) and bool(parameters.get("do_remote_decode"))


@dataclass(frozen=True)
class Prompt:
    """The part of a prompt whose blocks move.

    Attributes
    ----------
    num_tokens : its length
    starts : index of the first of its blocks, by group
    blocks : of the engine that has computed it, group by group
    """

    num_tokens: int
    starts: list[int]
    blocks: list[int]

    @classmethod
    def of(cls, request: Any, groups: Groups, tables: Sequence[Sequence[int]]) -> Prompt | None:
        """Return what a finished request can hand over; None if blocks are missing."""
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
        return cls(num_tokens, starts, blocks) if blocks else None

    def parameters(
        self, request: Any, tickets: Sequence[str | None], decode_size: int
    ) -> dict[str, Any]:
        """Return the parameters with which another engine continues the request.

        tickets : of the blocks, by worker
        decode_size : workers of the other engine
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kvcupy_tickets": list(tickets),
            "kvcupy_decode_tensor_parallel": decode_size,
            "kvcupy_tokens": self.num_tokens,
            "kvcupy_starts": self.starts,
            "kvcupy_prompt": prompt_digest(request, self.num_tokens, self.starts),
        }


@dataclass(frozen=True)
class Offered:
    """A prompt that another engine has computed, as `kv_transfer_params` describe it.

    Attributes
    ----------
    tickets : of the pages, group by group, by worker of the other engine
    num_tokens : how many tokens of the prompt are in the pages
    starts : index of the first block that is in the pages, by group
    """

    tickets: list[bytes]
    num_tokens: int
    starts: list[int]

    @classmethod
    def to(cls, request: Any, num_groups: int, size: int) -> Offered | None:
        """Return the prompt that is offered to a request of an engine with `size` workers.

        None without one. ValueError if it is offered to others, or the parameters are of another
        prompt, or damaged.
        """
        parameters = getattr(request, "kv_transfer_params", None)
        if not isinstance(parameters, dict) or not parameters.get("do_remote_prefill"):
            return None
        tickets = parameters.get("kvcupy_tickets")
        if not (isinstance(tickets, list) and tickets and all(isinstance(t, str) for t in tickets)):
            raise ValueError(f"kv_transfer_params: expected kvcupy_tickets, got {type(tickets)}")
        if (expected := parameters.get("kvcupy_decode_tensor_parallel")) != size:
            raise ValueError(
                f"tensor_parallel_size: expected {expected}, decode_tensor_parallel of the engine "
                f"that has computed the prompt, got {size}"
            )
        if request.prompt_token_ids is None:
            raise ValueError("kv_transfer_params: expected a prompt of tokens")
        num_tokens, starts = parameters.get("kvcupy_tokens"), parameters.get("kvcupy_starts")
        if not isinstance(num_tokens, int) or not 0 < num_tokens < request.num_prompt_tokens:
            raise ValueError("kv_transfer_params: expected the prompt of this request")
        if not isinstance(starts, list) or len(starts) != num_groups:
            raise ValueError(f"kv_transfer_params: expected kvcupy_starts of {num_groups} groups")
        if parameters.get("kvcupy_prompt") != prompt_digest(request, num_tokens, starts):
            raise ValueError("kv_transfer_params: expected the prompt of this request, got another")
        decoded = [base64.b64decode(ticket, validate=True) for ticket in tickets]
        return cls(decoded, num_tokens, starts)

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
