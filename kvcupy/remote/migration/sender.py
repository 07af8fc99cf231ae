"""PageSender: offers pages to other processes under a lease."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import observe
from ...cache.hazards import StreamCompletion
from ...cache.pages import Pages, hash_list, page_array
from ...cache.pool import Pool
from ...checks import positive_seconds
from ...config import cache_logger
from ...errors import KvcupyError, OrderError
from ...streams import stream_after
from .endpoint import Endpoint, Sample, accesses
from .ticket import KEY_BYTES, OUTCOMES, TOKEN_BYTES, Part, Status, Ticket, described_sender

_MAX_OFFERS = 4096
_WITHDRAW_TIMEOUT_S = 5.0

monotonic = time.monotonic


@dataclass(eq=False)
class Offer:
    """Offered pages, until they are free again."""

    sender: PageSender
    generation: int
    slot: int
    token: bytes = field(repr=False)
    parts: Sequence[Part]
    units: Sequence[tuple[int, int]]
    expires: float
    release: Callable[[], object]
    written: list[StreamCompletion | None]  # by unit, the work that writes it; None: to come
    ticket: bytes = field(default=b"", repr=False)
    num_ready: int = 0  # leading units that are written
    outcome: str = ""  # why the offer has ended
    is_withdrawn: bool = False  # and ends with the next step
    is_over: bool = False  # the pages are free

    def announce(self, units: Sequence[int], stream: Any) -> None:
        """Let units go out once `stream` has passed this point; the first call of each counts."""
        self.sender._announce(self, units, stream)

    def withdraw(self) -> None:
        """End the offer. Its pages are free once all units are announced and written."""
        self.sender._withdraw(self)


class PageSender(Endpoint):
    """Offers pages of a pool to other processes, which fetch them with a `PageReceiver`.

    Parameters
    ----------
    pool : KVPool or MLAPool in host memory, or a PagedKVCache, for `export_sequence`
    secret : at least 16 bytes, shared with the receivers, which authenticates tickets

    Raises
    ------
    TypeError, ValueError : an argument is invalid, such as a pool in GPU memory
    ImportError : NIXL is not installed (`pip install --no-deps nixl-cu12`)
    KvcupyError : NIXL has no plugin for UCX

    Notes
    -----
    Capture: illegal. Bytes: each page once per pull. Lifetime: a daemon thread from the first offer
    until `close`, which polls NIXL while offers are open. Threads may share a sender. An exception
    of a signal handler in `offer` leaves the pages with the caller, or free when the lease is over.
    Security: NIXL neither encrypts nor authenticates data, so every process that can reach it is
    trusted. `secret` keeps receivers from forged tickets. See docs/beyond_one_process.md.
    Source: vLLM `NixlConnector`, SGLang disaggregation.

    Examples
    --------
    >>> import kvcupy as kv
    >>> pools = [kv.KVPool(8, 16, 2, 4, 64, dtype="fp16", device="host") for _ in range(2)]
    >>> pools[0].k(1)[...] = 3
    >>> with kv.PageSender(pools[0]) as sender, kv.PageReceiver(pools[1]) as receiver:
    ...     ticket = sender.offer(pools[0].allocator.alloc(2))
    ...     pages = pools[1].allocator.alloc(2)
    ...     receiver.pull(ticket, pages).synchronize()
    >>> float(pools[1].k(1)[pages[1], 0, 0, 0])
    3.0
    """

    _idle_pause_s, _idle_s = 0.02, 60.0  # for READs of receivers that came late

    def __init__(self, pool: Any, *, secret: bytes | None = None) -> None:
        super().__init__(pool, secret, _MAX_OFFERS)
        self._status_key = secrets.token_bytes(KEY_BYTES)
        self._described = described_sender(self._agent.metadata, self._memories)
        self._offers: dict[int, Offer] = {}  # by generation, until their pages are free
        self._in_use = self._offers
        self._owners = [np.zeros(each.num_pages, np.int64) for each in self.pools]  # generations
        self._generations = itertools.count(1)
        self._free_slots = deque(range(_MAX_OFFERS))
        self._order_error: OrderError | None = None  # of the thread, not raised yet

    def __repr__(self) -> str:
        return f"<PageSender of {self.pools[0]!r}, {len(self._offers)} offers>"

    # --- For users ---

    def offer(
        self, pages: Any, *, hashes: Any = None, after: Any = None, lease_s: float = 30.0
    ) -> bytes:
        """Offer pages. The sender owns them until it frees them.

        Parameters
        ----------
        pages : int32 or int64 (N,) on the host, or a non-empty list of ints: allocated pages of the
            pool, without duplicates and not already offered, in the order for the receiver
        hashes : hashes of the blocks in the pages, for the receiver; None for none
        after : what writes the pages: Stream, or a CuPy or torch stream; a list of an Event for
            each layer; None for the current stream of CuPy or torch; False if they are written. A
            layer goes out once its event, or the work enqueued on the stream before this call, is
            over
        lease_s : seconds until the offer ends. A lease is not renewed

        Returns
        -------
        bytes : the ticket, for `PageReceiver.pull`, over any channel. It is authenticated, if there
            is a secret, and not encrypted

        Raises
        ------
        TypeError, ValueError : an argument is invalid, such as a page that is not allocated
        CaptureError : `after` is being captured
        KvcupyError : the sender is closed, or has 4096 open offers

        Notes
        -----
        The pages are freed exactly once, to the allocator of the pool: when a receiver is done, the
        lease is over, the work that writes them fails, or the sender closes; never before that work
        is over.
        """
        if len(self.pools) > 1:
            raise ValueError(
                f"pages: expected a sender of one pool, got one of {len(self.pools)}; use "
                "PagedKVCache.export_sequence"
            )
        (pool,) = self.pools
        self._require_open()
        pool.allocator._require_allocated(pages)
        ordered: Pages = np.array(page_array(pages), np.int64)
        if len(ordered) == 0:
            raise ValueError("pages: expected at least one, got none")
        numbers = [] if hashes is None else hash_list(hashes)
        if numbers and len(numbers) != len(ordered):
            raise ValueError(
                f"hashes: expected one for each page, {len(ordered)}, got {len(numbers)}"
            )
        written = self._written(pool, after)

        def release() -> None:
            pool.allocator.free(ordered)

        offer = self._offer_parts(
            [Part(0, ordered)], [(0, layer) for layer in range(pool.num_layers)], written, release,
            lease_s, hashes=numbers, owns=True,
        )  # fmt: skip
        return offer.ticket

    def stats(self) -> dict[str, int]:
        """Return counts.

        Returns
        -------
        dict : current "offers" and "offered_pages"; ended offers by outcome: "completed",
            "expired", "withdrawn", "failed" (the work that writes the pages) and "closed"
        """
        with self._lock:
            current = [each for each in self._offers.values() if not each.outcome]
            pages = sum(len(part.pages) for each in self._offers.values() for part in each.parts)
            ended = {name: self._counts[name] for name in OUTCOMES[1:]}
        return {"offers": len(current), "offered_pages": pages, **ended}

    def close(self) -> None:
        """End all offers, and free their pages."""
        self._begin_close()
        self._finish_close()
        self._raise_order_error()

    # --- For PagedKVCache ---

    def _offer_parts(
        self, pages: Iterable[tuple[int, Pages]], units: Sequence[tuple[int, int]],
        written: Sequence[StreamCompletion | None], release: Callable[[], object],
        lease_s: float, *, hashes: Sequence[int] = (), owns: bool = False,
        sequence: Mapping[str, Any] | None = None,
    ) -> Offer:  # fmt: skip
        """Offer `pages`, (pool, int64 pages), under one lease; the thread calls `release` once.

        Where `written` is None for a unit, `Offer.announce` follows. A page that an offer `owns` is
        in no other.
        """
        seconds = positive_seconds(lease_s, "lease_s")
        self._raise_order_error()
        parts = [Part(*part) for part in pages]
        self._hold_back(parts, units, written)
        with self._lock:
            self._require_open()
            for part in parts if owns else ():
                self.pools[part.pool].allocator._require_allocated(part.pages)
                owners = self._owners[part.pool][part.pages]
                twice = part.pages[np.isin(owners, [*self._offers])]
                if len(twice):
                    raise ValueError(f"pages: expected pages that are not offered, got {twice[0]}")
            if not self._free_slots:
                raise KvcupyError(f"offer: expected less than {_MAX_OFFERS} open offers")
            # The oldest free one, so that an ended offer's says why for a while.
            generation, slot = next(self._generations), self._free_slots[0]
            token = secrets.token_bytes(TOKEN_BYTES)
            offer = Offer(
                self, generation, slot, token, parts, units, monotonic() + seconds, release,
                list(written),
            )  # fmt: skip
            offer.ticket = Ticket(
                generation, self._slots[slot].ctypes.data, self._status_key, token, seconds,
                self._described, parts, units, hashes, sequence,
            ).encoded(self._key)  # fmt: skip
            self._start_thread()
            self._changed.notify()
            self._free_slots.popleft()
            self._write(offer, Status(generation, 0))
            for part in parts if owns else ():
                self._owners[part.pool][part.pages] = generation
            self._offers[generation] = offer  # from here on, the pages are the sender's
        return offer

    def _offer_with(self, release: Callable[[], object]) -> Offer | None:
        """Return the offer of a call that an interrupt kept from returning it, if there is one."""
        with self._lock:
            return next((each for each in self._offers.values() if each.release is release), None)

    def _announce(self, offer: Offer, units: Sequence[int], stream: Any) -> None:
        completion = StreamCompletion(stream)
        self._hold_back(offer.parts, [offer.units[unit] for unit in units], [completion])
        with self._lock:
            self._changed.notify()
            for unit in units:
                if offer.written[unit] is None:
                    offer.written[unit] = completion

    def _hold_back(
        self, parts: Sequence[Part], units: Sequence[tuple[int, int]],
        written: Sequence[StreamCompletion | None],
    ) -> None:  # fmt: skip
        """Hold back the pages of some units, should they be freed, while they are written."""
        # They are of one stream, in order: the last covers the others.
        completion = next((each for each in reversed(written) if each is not None), None)
        if completion is not None and not completion.done():
            for number in {number for number, _ in units}:
                part = parts[number]
                self.pools[part.pool].allocator._mark_busy(part.pages, completion)

    def _withdraw(self, offer: Offer) -> None:
        with self._lock:
            self._changed.notify()
            offer.is_withdrawn = True
        if self._thread is None:
            self._step()
        elif self._thread is not threading.current_thread():
            self._changed.wait_for(lambda: offer.outcome, _WITHDRAW_TIMEOUT_S)

    # --- Parts ---

    def _raise_order_error(self) -> None:
        error, self._order_error = self._order_error, None
        if error is not None:
            raise error

    def _written(self, pool: Pool, after: Any) -> list[StreamCompletion]:
        """Return the work that writes each layer."""
        if not isinstance(after, (list, tuple)):
            stream = stream_after(pool.device, after, "an offer")
            return [StreamCompletion(stream)] * pool.num_layers
        if len(after) != pool.num_layers:
            raise ValueError(
                f"after: expected an event for each of {pool.num_layers} layers, got {len(after)}"
            )
        written, stream = [], pool.device.stream()  # layers go out in order
        for event in after:
            if not (hasattr(event, "done") and hasattr(event, "synchronize")):
                raise TypeError(f"after: expected an Event for each layer, got {event!r:.80}")
            event.done()  # raises CaptureError in a capture, which the stream must not join
            stream.wait(event)
            written.append(StreamCompletion(stream))
        return written

    def _write(self, offer: Offer, status: Status) -> None:
        record = np.frombuffer(status.encoded(self._status_key), np.uint8)
        self._slots[offer.slot, : len(record)] = record

    # --- The thread, which ends offers and frees pages ---

    def _step(self) -> bool:
        try:
            messages = self._agent.poll()
        except Exception as error:  # one peer's error must not stop the others
            cache_logger.warning("%r: NIXL failed to make progress: %s", self, error)
            messages = []
        moved = bool(messages)
        with self._lock:
            offers, is_closed = list(self._offers.values()), self._closed
        for offer in offers:
            moved |= self._advance(offer)
            if offer.token in messages:
                self._end(offer, "completed")
            elif is_closed:
                self._end(offer, "closed")
            elif offer.is_withdrawn:
                self._end(offer, "withdrawn")
            elif monotonic() >= offer.expires:
                self._end(offer, "expired")
            self._settle(offer)
        return moved

    def _advance(self, offer: Offer) -> bool:
        """Count the units that are written, and let receivers know."""
        if offer.outcome or offer.num_ready == len(offer.written):
            return False
        before, ready = offer.num_ready, offer.num_ready
        try:
            while ready < len(offer.written):
                completion = offer.written[ready]
                if completion is None or not completion.done():
                    break
                if completion.failure is not None:
                    raise completion.failure
                if observe.order_observers:
                    self._observe(offer, ready)
                ready += 1
        except Exception as error:
            cache_logger.warning("%r: the work that writes offered pages failed: %s", self, error)
            self._end(offer, "failed")
            return True
        with self._lock:
            if ready > before and not offer.outcome:
                offer.num_ready = ready
                self._write(offer, Status(offer.generation, ready))
        return ready > before

    def _observe(self, offer: Offer, unit: int) -> None:
        """Announce that receivers read a unit from now on."""
        part, layer = offer.units[unit]
        pool = self.pools[offer.parts[part].pool]
        try:
            observe.touched_by_host("send pages", accesses(pool, offer.parts[part].pages, layer))
        except OrderError as error:
            self._order_error = error
            raise

    def _end(self, offer: Offer, outcome: str) -> None:
        """End an offer, once. The generation is raised before a page can become free."""
        with self._lock:
            if offer.outcome:
                return
            self._write(offer, Status(next(self._generations), offer.num_ready, outcome))
            self._counts[outcome] += 1
            self._changed.notify()
            offer.outcome = outcome

    def _settle(self, offer: Offer) -> None:
        """Free the pages of an offer that has ended, once all writes to them are announced."""
        with self._lock:  # until they count as offered no more
            is_written = None not in offer.written or self._closed
            if not offer.outcome or not is_written or offer.is_over:
                return
            offer.is_over = True
            try:
                offer.release()
            except Exception as error:
                cache_logger.exception("cannot release the pages of an offer: %s", error)
            self._changed.notify()
            self._free_slots.append(offer.slot)
            del self._offers[offer.generation]

    def _samples(self) -> Iterator[Sample]:
        stats = self.stats()
        yield "kvcupy_migration_offered_pages", (), stats["offered_pages"]
        yield from self._totals(Counter(stats))

    @staticmethod
    def _totals(counts: Counter[Any]) -> Iterator[Sample]:
        for name in OUTCOMES[1:]:
            yield "kvcupy_migration_offers_total", (("outcome", name),), counts[name]
