"""PageReceiver: fetches pages that another process offers, layer by layer."""

from __future__ import annotations

import math
import random
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import metrics, observe
from ...cache.hazards import Completion, StreamCompletion, waiting_stream
from ...cache.pages import Pages, page_array
from ...cache.pool import positive_int
from ...config import cache_logger
from ...errors import CacheFull, DeviceError, ProcessLocal, TransferError, transfer_failure
from ...observe import Operation
from ...streams import stream_after
from ...waiting import Latch, Waiters
from . import protocol
from .endpoint import (
    GRANT_HEAD,
    PULL_HEAD,
    Endpoint,
    accesses,
    as_transfer_error,
    common_digest,
    place,
    positive_seconds,
    reason_samples,
)
from .engines import PullTask
from .protocol import CONFIRMED, DONE, GRANT, PULL, START, Address, Channel, Lost, Ticket

if TYPE_CHECKING:
    from ...devices.protocol import Event, Stream

_WORKER_IDLE_S = 10.0
_MAX_IDLE_CONNECTIONS = 4  # per sender
_MAX_CACHED_PLANS = 64
_CONFIRM_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 5.0
_QUIET_POLL_S = 0.02
_ABANDONED_POLL_S = 0.5  # interval of checks for pulls that an interrupt kept from starting
_MAX_ATTEMPTS = 8  # to connect to a sender
_RETRY_S = 0.01  # pause after the first attempt; doubles with each


class PageReceiver(Endpoint):
    """Fetches pages that a `PageSender` of another process, or of this one, offers.

    Parameters
    ----------
    pool : KVPool or MLAPool, with the sender's format, page size, layers and widths. Layout and
        heads may differ
    secret : bytes, same as the sender's
    engine : "socket", or "nixl"; same as the sender's
    heads : (first, total) of the model's heads, if the pool holds only some; None for all heads
    model : same as the sender's
    tls : ssl.SSLContext for clients; None if the sender does not use TLS
    staging_pages : as in `PageSender`
    max_pulls : maximum number of concurrent pulls; further pulls are refused
    max_quarantined_pages : number of quarantined pages from which pulls are refused; None for half
        of the pool

    Raises
    ------
    TypeError, ValueError : an argument is invalid
    ImportError : the engine needs a package that is missing

    Notes
    -----
    Capture: illegal; a pull cannot be part of a capture. Lifetime: each pull has a daemon thread
    per ticket, and over "nixl" up to four threads verify received pages; connections are kept for
    later pulls until `close`. Threads may share a receiver. See `PageSender` for an example, and
    for the authentication.
    """

    tls_is_for = "clients"

    def __init__(
        self, pool: Any, *, secret: bytes | None = None, engine: str = "socket",
        heads: tuple[int, int] | None = None, model: str = "", tls: Any = None,
        staging_pages: int | None = None, max_pulls: int = 64,
        max_quarantined_pages: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pool, secret, heads, model, tls)
        self._max_pulls = positive_int(max_pulls, "max_pulls")
        if max_quarantined_pages is None:
            max_quarantined_pages = max(1, pool.num_pages // 2)
        self._max_quarantined = positive_int(max_quarantined_pages, "max_quarantined_pages")
        self._open_engine(engine, staging_pages)
        # Checked tickets with their plans, by sender and address.
        self._planned: dict[tuple[bytes, str], tuple[Ticket, Address, range]] = {}
        self._lock = threading.RLock()  # guards the fields below; see Waiters
        # Pulls whose pages may be written. Threads hold strong references. A pull that an exception
        # of a signal handler kept from starting is collected with the frames of the call.
        self._pulls: weakref.WeakSet[Pull] = weakref.WeakSet()
        self._workers = _Workers()
        self._idle: dict[tuple[str, bytes], list[Channel]] = {}
        self._counts: Counter[str] = Counter()
        self._failed_pulls: Counter[str] = Counter()  # by reason, as the next one
        self._dropped: Counter[str] = Counter()
        counts = self._counts, self._failed_pulls, self._dropped
        metrics.follow(self, _samples, partial(_totals, *counts))

    def __repr__(self) -> str:
        return f"<PageReceiver into {self._pool!r}, {len(self._pulls)} pulls>"

    def inspect(self, ticket: bytes) -> Ticket:
        """Decode a ticket: `num_pages`, `hashes` and `attachment`, among others.

        Parameters
        ----------
        ticket : ticket of `PageSender.offer`

        Raises
        ------
        TypeError : `ticket` is not bytes
        TransferError : the ticket is damaged, or made with another secret

        Notes
        -----
        Sends nothing, so the offer may have ended; only `pull` finds out.
        """
        return Ticket.decoded(ticket, self._secret)

    def check(self, ticket: bytes) -> None:
        """Raise unless `pull` can fetch the pages of a ticket into this pool. Sends nothing.

        Raises
        ------
        TypeError : `ticket` is not bytes
        TransferError : as of `pull`
        """
        self._plan([Ticket.decoded(ticket, self._secret)])

    def pull(self, ticket: Any, pages: Any, *, deadline_s: float = 30.0, after: Any = None) -> Pull:
        """Fetch the pages of a ticket into pages of the pool, in the background.

        Parameters
        ----------
        ticket : ticket of `PageSender.offer`; or a list of tickets from senders that each hold some
            of the heads, which together must cover this pool's heads without overlap
        pages : int32 or int64 (N,) on the host, or a list of ints: destination pages of the pool,
            in order, as many as offered, without duplicates. The caller keeps owning them. Pages
            freed during the pull become free once no more bytes can arrive in them. Over "nixl"
            that may be never, while a sender is stopped: `alloc` does not wait for such pages
        deadline_s : time limit of the whole pull, in seconds
        after : stream with the last use of the pages: Stream, or a CuPy or torch stream; pages are
            written once it has completed the work enqueued before this call. None for the current
            stream; False if no work uses the pages

        Returns
        -------
        Pull : a handle to wait on or cancel

        Raises
        ------
        TypeError, ValueError : an argument is invalid, such as a wrong number of pages
        CacheFull : too many pulls are in progress, or too many pages are in quarantine
        TransferError : the ticket is damaged or made with another secret; the pools differ; or the
            sender is on another machine, and neither a secret nor TLS is set. No page is written
        CaptureError : `after` is being captured
        KvcupyError : the receiver is closed

        Notes
        -----
        Does not block. Bytes: each page once, for the heads of this pool.
        """
        several = isinstance(ticket, (list, tuple))
        tickets = [Ticket.decoded(each, self._secret) for each in (ticket if several else [ticket])]
        ordered = self._checked_pages(pages, tickets)
        seconds = positive_seconds(deadline_s, "deadline_s")
        parts = self._plan(tickets)
        completion = None
        if after is not False:
            completion = StreamCompletion(stream_after(self._pool.device, after, "a pull"))
        pull = Pull(self, parts, ordered, time.monotonic() + seconds, completion)
        with self._lock:
            self._require_open()
            quarantined = self._quarantined()
            if quarantined >= self._max_quarantined:
                raise CacheFull(
                    f"expected less than {self._max_quarantined} in quarantine, got {quarantined}",
                    "pages",
                )
            if len(self._pulls) >= self._max_pulls:
                raise CacheFull(f"expected at most {self._max_pulls} pulls at a time", "max_pulls")
            self._pulls.add(pull)
        asked: list[tuple[Channel, bool] | None] = []
        try:
            for ticket_of_part, _, heads in parts:
                asked.append(self._ask_early(pull, ticket_of_part, heads))
            self._pool.allocator._mark_busy(ordered, pull._landing)
            pull._prepare()
        except BaseException:
            for channel, _ in filter(None, asked):
                channel.close()
            pull._fail(TransferError("cannot start the pull", "lost"))
            pull._settle()
            raise
        pull._start(asked)
        return pull

    def stats(self) -> dict[str, Any]:
        """Return current and cumulative counts.

        Returns
        -------
        dict : current "pulls", "connections" (kept for later pulls) and "quarantined_pages" (of
            failed pulls whose pages may still be written); cumulative "completed", "failed" and
            "cancelled" pulls, and "received_bytes"; by reason "pull_failures" (of `TransferError`)
            and "connection_drops": "idle" or "lost" before a grant, and replaced if there was time
        """
        with self._lock:
            return {
                "pulls": len(self._pulls),
                "quarantined_pages": self._quarantined(),
                "connections": sum(map(len, self._idle.values())),
                **{name: self._counts[name] for name in _COUNTS},
                "pull_failures": dict(self._failed_pulls),
                "connection_drops": dict(self._dropped),
            }

    def close(self, deadline_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Cancel all pulls, and wait until their pages cannot be written and senders are notified.

        Parameters
        ----------
        deadline_s : maximum time to wait. Pages that may still be written then stay in quarantine
        """
        deadline = time.monotonic() + positive_seconds(deadline_s, "deadline_s")
        with self._lock:
            first, self._closed = not self._closed, True
            pulls, idle, self._idle = list(self._pulls), self._idle, {}
        for pull in pulls:
            pull._cancel("the receiver was closed", "closed")
        for channel in chain.from_iterable(idle.values()):
            _close_confirmed(channel, min(deadline, time.monotonic() + _CONFIRM_TIMEOUT_S))
        self._workers.close(deadline)  # includes workers that send DONE
        if first:
            self._engine.close(deadline)

    def _abandon(self) -> None:
        for channel in chain.from_iterable(self._idle.values()):
            channel.close()

    # --- Arguments ---

    def _checked_pages(self, pages: Any, tickets: Sequence[Ticket]) -> Pages:
        listed = page_array(pages)
        numbers = listed.tolist()
        last = self._pool.num_pages - 1
        outside = [number for number in numbers if not 0 <= number <= last]
        if outside:
            raise ValueError(f"pages: expected 0 to {last}, got {outside[0]}")
        if len(set(numbers)) < len(numbers):
            raise ValueError("pages: expected each page once")
        is_own = listed is not pages and listed.dtype == np.int64
        ordered: Pages = listed if is_own else np.array(listed, np.int64)
        if not tickets:
            raise ValueError("ticket: expected at least one")
        for ticket in tickets:
            if ticket.num_pages != len(ordered):
                raise ValueError(
                    f"pages: expected {ticket.num_pages}, as many as are offered, "
                    f"got {len(ordered)}"
                )
        return ordered

    def _plan(self, tickets: Sequence[Ticket]) -> list[tuple[Ticket, Address, range]]:
        """Return each ticket with its sender's address, and the heads to fetch from that sender."""
        key = tickets[0].sender_id, tickets[0].address
        known = self._planned.get(key) if len(tickets) == 1 else None
        if known is not None and known[0].is_alike(tickets[0]):
            return [(tickets[0], *known[1:])]
        parts = []
        covered: list[int] = []
        own = range(
            self._identity.head_start, self._identity.head_start + self._identity.num_kv_heads
        )
        for ticket in tickets:
            theirs = ticket.identity
            if ticket.digest != self._digest or common_digest(theirs) != self._digest:
                raise TransferError(
                    f"the pools differ: {_difference(self._identity, theirs)}", "identity"
                )
            if ticket.engine != self._engine.name:
                raise TransferError(
                    f"engine: the sender's is {ticket.engine!r}, this one's {self._engine.name!r}",
                    "identity",
                )  # fmt: skip
            try:
                address = Address.parse(ticket.address, "ticket")
            except ValueError as error:
                raise TransferError(str(error), "ticket") from None
            if not (address.is_local or self._secret or self._tls):
                raise TransferError(
                    f"secret: expected one, or tls, to fetch pages from {address}", "secret"
                )
            heads = range(
                max(own.start, theirs.head_start),
                min(own.stop, theirs.head_start + theirs.num_kv_heads),
            )
            parts.append((ticket, address, heads))
            covered += heads
        if sorted(covered) != list(own):
            raise TransferError(
                f"heads: expected {own.start} to {own.stop - 1}, each once, got "
                f"{sorted(covered) or 'none'}", "identity",
            )  # fmt: skip
        if len(parts) == 1:
            if len(self._planned) >= _MAX_CACHED_PLANS:
                self._planned.clear()
            self._planned[key] = parts[0]
        return parts

    # --- Connections ---

    def _connect(self, pull: Pull, ticket: Ticket, address: Address) -> Channel:
        """Connect to the sender of a ticket, and shake hands."""
        deadline = min(pull._deadline, time.monotonic() + protocol.HANDSHAKE_S)
        try:
            channel, digest = self._shake_hands(pull, ticket, address, deadline)
        except TimeoutError as error:
            if time.monotonic() >= pull._deadline:
                raise
            message = f"no answer from a sender within {protocol.HANDSHAKE_S:g} s"
            raise TransferError(message, "lost") from error
        if channel.peer != ticket.sender_id:
            channel.close()
            raise TransferError("the sender that made the ticket no longer listens", "lost")
        if digest != self._digest:
            channel.close()
            raise TransferError("the pools differ", "identity")
        return channel

    def _shake_hands(
        self, pull: Pull, ticket: Ticket, address: Address, deadline: float
    ) -> tuple[Channel, bytes]:  # fmt: skip
        connection = address.connect(max(0.001, deadline - time.monotonic()))
        try:
            pull._uses(connection)
            if self._tls is not None:
                name = address.host or None
                connection = protocol.encrypt(
                    connection, self._tls, deadline, pull._uses, server_hostname=name
                )
            return protocol.as_receiver(connection, self._secret, self._digest, ticket, deadline)
        except BaseException:
            connection.close()
            raise

    def _borrow(self, ticket: Ticket) -> Channel | None:
        """Return an idle connection to the sender, or None."""
        key = ticket.address, ticket.sender_id
        while True:
            with self._lock:
                idle = self._idle.get(key)
                if not idle:
                    self._idle.pop(key, None)
                    return None
                channel = idle.pop()
            if _is_idle(channel):
                return channel
            channel.close()

    def _give_back(self, ticket: Ticket, channel: Channel) -> None:
        with self._lock:
            for key, channels in list(self._idle.items()):  # drop connections of dead senders
                ended = [each for each in channels if not _is_idle(each)]
                for each in ended:
                    channels.remove(each)
                    each.close()
                if not channels:
                    del self._idle[key]
            idle = self._idle.setdefault((ticket.address, ticket.sender_id), [])
            if not self._closed and len(idle) < _MAX_IDLE_CONNECTIONS:
                idle.append(channel)
                return
        _close_confirmed(channel, time.monotonic() + _CONFIRM_TIMEOUT_S)

    # --- One part of a pull (one ticket), in a worker thread ---

    def _ask(
        self, pull: Pull, ticket: Ticket, heads: range, channel: Channel, deadline: float
    ) -> bool:
        """Request pages from a sender; return whether the sender must wait for START."""
        run_pages = len(pull._pages)
        if self._used_staging is not None:
            run_pages = min(run_pages, self._used_staging.share)
        waits = pull._is_used()
        request = PULL_HEAD.pack(
            ticket.number, ticket.generation, ticket.token, heads.start, len(heads), run_pages,
            waits,
        )  # fmt: skip
        channel.send(PULL, request + self._engine.describe(), deadline)
        return waits

    def _ask_early(self, pull: Pull, ticket: Ticket, heads: range) -> tuple[Channel, bool] | None:
        """Send the request over an idle connection, so that the sender starts while a thread wakes
        up here; None if no connection is idle."""
        while (channel := self._borrow(ticket)) is not None:
            try:
                return channel, self._ask(pull, ticket, heads, channel, pull._deadline)
            except (Lost, TimeoutError, TransferError):  # the sender closed the idle connection,
                channel.close()  # or its answer concerns the previous pull
        return None

    def _run_parts(self, pull: Pull, asked: Sequence[tuple[Channel, bool] | None]) -> None:
        """Fetch all parts of a pull, in this thread and one for each other part."""
        first, *others = zip(pull._parts, asked, strict=True)
        for part, early in others:
            try:
                self._workers.run(partial(self._run, pull, *part, early))
            except RuntimeError as error:
                pull._fail(TransferError(f"cannot start a thread for the pull: {error}", "lost"))
                pull._part_ended()
        self._run(pull, *first[0], first[1])

    def _run(
        self, pull: Pull, ticket: Ticket, address: Address, heads: range,
        asked: tuple[Channel, bool] | None,
    ) -> None:  # fmt: skip
        """Fetch one part of a pull, and settle it, including after a failure."""
        task = None
        try:
            channel, granted, waits = self._granted(pull, ticket, address, heads, asked)
            before = channel.num_bytes
            try:
                task = self._task(pull, ticket, channel, heads, granted)
                if waits:
                    pull._wait_for_users(task)
                    channel.send(START, b"", pull._deadline)
                self._engine.pull(task)
            except BaseException:
                channel.close()
                raise
            finally:
                with self._lock:
                    self._counts["received_bytes"] += channel.num_bytes - before
        except BaseException as error:
            pull._fail(as_transfer_error(error, place(address, ticket.trace_id)))
            while task is not None and not self._engine.quiet(task):
                time.sleep(_QUIET_POLL_S)
            pull._part_ended()
            return
        pull._part_ended()
        pull._landing.synchronize()  # for the other parts
        if pull.failure is not None:
            channel.close()
            return
        try:  # without DONE, the offer lasts until its lease expires
            channel.send(DONE, b"", time.monotonic() + _CONFIRM_TIMEOUT_S)
        except (Lost, TimeoutError, TransferError):  # includes an ended offer, which is harmless
            channel.close()
        else:
            channel.confirming = True
            self._give_back(ticket, channel)

    def _granted(
        self, pull: Pull, ticket: Ticket, address: Address, heads: range,
        asked: tuple[Channel, bool] | None,
    ) -> tuple[Channel, bytes, bool]:  # fmt: skip
        """Return the connection, the payload of GRANT, and whether the sender waits for START.

        Nothing has been received before the grant, so lost connections are replaced: crowded
        senders drop the oldest ones whose handshake is unfinished.
        """
        num_attempts, was_lost = 0, False
        while True:
            is_reused, channel = asked is not None, None
            try:
                if asked is None:
                    num_attempts += 1
                    channel = self._connect(pull, ticket, address)
                    waits = self._ask(pull, ticket, heads, channel, pull._deadline)
                else:
                    (channel, waits), asked = asked, None
                    pull._uses(channel.socket)
                if channel.confirming:
                    channel.receive(pull._deadline, CONFIRMED)
                    channel.confirming = False
                return channel, channel.receive(pull._deadline, GRANT)[1], waits
            except BaseException as error:
                is_confirming = False
                if channel is not None:
                    is_confirming = channel.confirming
                    channel.close()
                pull._check()
                is_lost = isinstance(error, Lost)
                if isinstance(error, TransferError):
                    # The refusal is of the previous pull, or the sender has yet to notice the end
                    # of a connection over which it granted this one.
                    is_lost = is_confirming or (error.reason == "taken" and was_lost)
                if not is_lost:
                    raise
                was_lost = True
                with self._lock:
                    self._dropped["idle" if is_reused else "lost"] += 1
                if is_reused:  # the sender had closed the idle connection
                    continue
                pause_s = _RETRY_S * 2 ** (num_attempts - 1) * random.uniform(0.5, 1.5)
                is_late = time.monotonic() + pause_s >= pull._deadline
                if num_attempts >= _MAX_ATTEMPTS or is_late:
                    raise
                pull._pause(pause_s)

    def _task(
        self, pull: Pull, ticket: Ticket, channel: Channel, heads: range, granted: bytes
    ) -> PullTask:
        start = self._identity.head_start
        local = range(heads.start - start, heads.stop - start)
        staging, page_bytes = self._used_staging, self._bytes_of(local)
        if len(granted) < GRANT_HEAD.size:
            raise Lost("truncated grant")
        lease_ms, run_pages, *sizes = GRANT_HEAD.unpack_from(granted)
        max_run_pages = len(pull._pages) if staging is None else staging.share
        expected = [len(pull._pages), self._pool.num_layers, page_bytes.page_bytes]
        if sizes != expected or not 1 <= run_pages <= max_run_pages:
            raise Lost("the grant does not match the ticket")
        return PullTask(
            channel, self._pool, pull._pages, local, number=ticket.number,
            generation=ticket.generation, key=protocol.offer_key(self._secret, ticket.token),
            peer=granted[GRANT_HEAD.size :], lease_s=max(0.01, lease_ms / 1e3),
            deadline=pull._deadline, run_pages=run_pages,
            page_bytes=page_bytes, staging=staging, stream=self._lazy_stream(),
            check=pull._check, arrived=pull._part_arrived,
        )  # fmt: skip

    def _quarantined(self) -> int:
        return sum(len(pull._pages) for pull in self._pulls if pull.failure is not None)

    def _settled(self, pull: Pull) -> None:
        """Count a pull whose threads no longer access its pages."""
        failure = pull.failure
        outcome = "completed"
        if failure is not None:
            cache_logger.info("failed pull: %s", failure)
            outcome = "cancelled" if failure.reason in ("cancelled", "closed") else "failed"
        with self._lock:
            self._pulls.discard(pull)
            self._counts[outcome] += 1
            if failure is not None:
                self._failed_pulls[failure.reason] += 1
        if metrics.enabled:
            seconds = time.monotonic() - pull._start_s
            metrics.note("kvcupy_migration_pull_seconds", seconds, outcome=outcome)


_COUNTS = ("completed", "failed", "cancelled", "received_bytes")


class _Workers:
    """Daemon threads, kept for a while after each job, since starting a thread is slow."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._closed = False

    def run(self, job: Callable[[], None]) -> None:
        """Run a function on a thread; RuntimeError if no thread can be started."""
        with self._lock:
            if len(self._jobs) >= self._num_idle:
                thread = threading.Thread(target=self._work, name="kvcupy pull", daemon=True)
                thread.start()
                self._threads.add(thread)
            self._changed.notify_one()
            self._jobs.append(job)

    def close(self, deadline: float) -> None:
        """Let the threads finish their jobs and end; wait for them until the deadline."""
        with self._lock:
            self._closed = True
            self._changed.notify()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._lock:
                self._num_idle += 1
            self._changed.wait_for(lambda: self._jobs or self._closed, _WORKER_IDLE_S)
            with self._lock:
                self._num_idle -= 1
                if not self._jobs:
                    self._threads.discard(threading.current_thread())
                    return
                job = self._jobs.popleft()
            job()
            del job  # refers to the pull


class Landing(Completion):
    """The `Completion` for allocators: done once no bytes can arrive in the pages of a pull.

    Also done once the pull is gone: its threads hold it, so none has started, or all have ended.
    """

    failure: BaseException | None = None  # `Pull.failure` has the error

    def __init__(self, pull: Pull | None = None, *, unbounded: bool = False) -> None:
        self.unbounded = unbounded  # a stopped peer may resume at any time, or never
        self._pull = None if pull is None else weakref.ref(pull)
        self._over = Latch()

    def end(self) -> None:
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set() or (self._pull is not None and self._pull() is None)

    def synchronize(self, deadline_s: float | None = None) -> None:
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        while not self.done() and (left_s := deadline - time.monotonic()) > 0:
            self._over.wait(min(left_s, _ABANDONED_POLL_S))

    def wait(self, stream: Any = None) -> None:
        self.synchronize()


class Pull(ProcessLocal):
    """A pull in progress, returned by `PageReceiver.pull`: a `Completion`.

    Attributes
    ----------
    num_pages : number of pages to receive
    num_bytes : total bytes of the pages, for the heads of this pool
    hashes, attachment : from the ticket; from the first, if there are several
    failure : TransferError with the reason of a failure, or None. Neither waits nor raises

    Notes
    -----
    A failed pull leaves the contents of its pages undefined. Cancelled and late pulls have failed.
    """

    _instead = "pull in each process"

    def __init__(
        self, receiver: PageReceiver, parts: Sequence[tuple[Ticket, Address, range]], pages: Pages,
        deadline: float, after: StreamCompletion | None,
    ) -> None:  # fmt: skip
        pool = receiver._pool
        self._pages, self._deadline = pages, deadline
        self._start_s = time.monotonic()
        self.num_pages = len(pages)
        self.num_bytes = len(pages) * pool.page_bytes
        self.hashes, self.attachment = parts[0][0].hashes, parts[0][0].attachment
        self.failure: TransferError | None = None
        self._landing = Landing(self, unbounded=not receiver._engine.bounded)
        self._receiver, self._pool, self._parts = receiver, pool, parts
        self._after = after
        self._is_staged = receiver._used_staging is not None
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._sockets: list[socket.socket] = []  # reset if the pull fails
        self._missing = [len(parts)] * pool.num_layers  # number of missing parts, by layer
        self._num_arrived = 0  # number of leading layers that have arrived
        self._num_running = len(parts)
        # Created when a stream first waits.
        self._stream: Stream | None = None
        self._events: list[Event] = []

    def __repr__(self) -> str:
        state = f"{self._num_arrived} of {self._pool.num_layers} layers"
        return f"<Pull of {self.num_pages} pages, {'failed' if self.failure else state}>"

    # --- For users ---

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make later work of a stream wait until a layer has arrived and is verified.

        Parameters
        ----------
        layer : 0 to num_layers - 1
        stream : Stream, or a CuPy or torch stream; None for the current stream. The host does not
            block, unless the stream is the calling thread, or the pages are staged

        Raises
        ------
        TypeError, ValueError : `layer` is out of range, or `stream` is not a stream
        CaptureError : the stream is being captured
        TransferError : the pull has failed. If it fails later, the stream's work on the host device
            fails too; on a GPU the work runs on undefined pages, so check `failure` before using
            its results

        Notes
        -----
        On a GPU, streams wait for missing layers through `Stream.call`, one after the other. With
        staging pages, the copy of a layer to the GPU is enqueued only when the layer has arrived.
        Before that it has no event to wait for, and a stream that waits through `Stream.call` could
        block a copy that shares its hardware queue. The host waits instead.
        """
        self._wait(self._pool.layer_number(layer), stream)

    def wait(self, stream: Any = None) -> None:
        """Make later work of a stream wait for all layers; otherwise like `wait_layer`.

        Raises
        ------
        TypeError, ValueError, CaptureError, TransferError : as in `wait_layer`
        """
        self._wait(self._pool.num_layers - 1, stream)

    def done(self) -> bool:
        """Return whether all layers have arrived; does not wait.

        Raises
        ------
        TransferError : the pull has failed
        """
        self._raise_failure()
        return self._landing.done()

    def synchronize(self) -> None:
        """Wait until all layers have arrived, or the pull has failed and no bytes can arrive.

        Raises
        ------
        TransferError : the pull has failed
        """
        self._landing.synchronize()
        self._raise_failure()

    def cancel(self) -> None:
        """Cancel the pull. No effect if all layers have arrived, or the pull has failed.

        Notes
        -----
        Returns at once. The pages are in quarantine until no bytes can arrive in them:
        `synchronize` waits for that, and freed pages become free then.
        """
        self._cancel("the pull was cancelled", "cancelled")

    # --- Waiting ---

    def _wait(self, layer: int, stream: Any) -> None:
        waiting = waiting_stream(self._pool.device, stream, "a pull")
        self._raise_failure()
        if self._is_staged:  # a waiting stream could block the copy it waits for
            self._await_layer(layer)
            return
        if self._num_arrived > layer and not observe.order_observers:
            return
        event = self._event_of(layer)
        try:
            waiting.wait(event)
        except DeviceError:
            self._raise_failure()
            raise
        if self._num_arrived <= layer:
            self._raise_failure()

    def _event_of(self, layer: int) -> Event:
        """Return an event that completes when a layer has arrived."""
        with self._lock:
            self._raise_failure()
            if self._stream is None:
                self._stream = self._pool.device.stream()
                self._stream.name = "pull"
                if self._after is not None and observe.order_observers:
                    self._after.wait(self._stream)  # for observers: the pull's threads wait too
            stream = self._stream
            while len(self._events) <= layer:
                number = len(self._events)
                observe.issue(
                    partial(self._operation, number, stream),
                    partial(stream.call, partial(self._await_layer, number)),
                )
                self._events.append(stream.record())
            return self._events[layer]

    def _operation(self, layer: int, stream: Any) -> Operation:
        return Operation(
            f"pull {layer}", stream, (), tuple(accesses(self._pool, self._pages, layer))
        )

    def _await_layer(self, layer: int) -> None:
        self._changed.wait_for(lambda: self._num_arrived > layer or self.failure is not None)
        if self._num_arrived <= layer:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if (failure := self.failure) is not None:
            raise transfer_failure(str(failure), failure.reason, failure)

    # --- For the receiver, and its threads ---

    def _prepare(self) -> None:
        if observe.order_observers and not self._is_staged:  # else created by the first wait
            self._event_of(self._pool.num_layers - 1)

    def _start(self, asked: Sequence[tuple[Channel, bool] | None]) -> None:
        """Hand the pull to a worker thread, which signals cannot interrupt."""
        try:
            self._receiver._workers.run(partial(self._receiver._run_parts, self, asked))
        except RuntimeError as error:
            self._fail(TransferError(f"cannot start a thread for the pull: {error}", "lost"))
            self._settle()

    def _uses(self, connection: socket.socket) -> None:
        """Register a connection, which is reset if the pull fails."""
        with self._lock:
            self._sockets.append(connection)
        self._check()

    def _pause(self, seconds: float) -> None:
        """Wait before another attempt; TransferError if the pull fails meanwhile."""
        self._changed.wait_for(lambda: self.failure, seconds)
        self._check()

    def _is_used(self) -> bool:
        """Return whether a stream may still use the pages."""
        return self._after is not None and not self._after.done()

    def _wait_for_users(self, task: PullTask) -> None:
        """Wait until `after` has completed, so that the pages are unused."""
        while self._is_used():
            self._check()
            task.renew_if_due()
            if time.monotonic() > self._deadline:
                raise TimeoutError("timed out")
            time.sleep(0.0005)

    def _check(self) -> None:
        self._raise_failure()

    def _part_arrived(self, layer: int) -> None:
        """Record that a part of a layer is in its pages."""
        with self._lock:
            self._missing[layer] -= 1
            while self._num_arrived < len(self._missing) and not self._missing[self._num_arrived]:
                self._num_arrived += 1
            self._changed.notify()

    def _cancel(self, message: str, reason: str) -> None:
        ticket, address, _ = self._parts[0]
        self._fail(TransferError(f"{place(address, ticket.trace_id)}: {message}", reason))

    def _fail(self, failure: TransferError) -> None:
        """Fail the pull, unless all layers have arrived; the first failure stays.

        A repeated call completes one that a signal handler has interrupted.
        """
        with self._lock:
            if self._num_arrived == self._pool.num_layers:
                return
            self._changed.notify()
            if self.failure is None:
                self.failure = failure
            sockets = list(self._sockets)
        for connection in sockets:
            protocol.abort(connection)

    def _part_ended(self) -> None:
        """Record that a thread no longer accesses the pages."""
        with self._lock:
            self._num_running -= 1
            if self._num_running:
                return
            self._sockets = []
        self._settle()

    def _settle(self) -> None:
        """Record that no more bytes arrive in the pages."""
        try:
            if self.failure is None:
                self._pool.note_written()
                if observe.order_observers and self._stream is not None:
                    self._stream.synchronize()  # notifies observers of the host's wait
            elif self._stream is not None:  # private stream; `failure` has the error
                with suppress(DeviceError):
                    self._stream.synchronize()
                self._stream, self._events = None, []
        finally:
            self._receiver._settled(self)
            self._landing.end()

    def _abandon(self) -> None:
        for connection in self._sockets:
            connection.close()


def _is_idle(channel: Channel) -> bool:
    """Return whether an idle connection appears to be alive. Does not wait.

    The next pull reads the sender's CONFIRMED of the last one, since reading it here could block.
    """
    return not channel.has_ended() and (channel.confirming or not channel.readable(0))


def _close_confirmed(channel: Channel, deadline: float) -> None:
    """Close a connection once its sender has confirmed the last pull."""
    if channel.confirming:
        with suppress(Lost, TimeoutError, TransferError):
            channel.receive(deadline, CONFIRMED)
    channel.close()


def _difference(own: Any, theirs: Any) -> str:
    """Describe the first difference of two identities, except in heads and layout."""
    common = {"head_start": 0, "num_kv_heads": 0, "wire": ""}
    return str(replace(own, **common).difference(replace(theirs, **common)))


def _samples(receiver: PageReceiver) -> Iterator[tuple[str, metrics.Labels, float]]:
    stats = receiver.stats()
    yield from _totals(stats, stats["pull_failures"], stats["connection_drops"])
    yield "kvcupy_migration_quarantined_pages", (), stats["quarantined_pages"]


def _totals(
    counts: Mapping[str, int], pulls: Mapping[str, int], connections: Mapping[str, int]
) -> Iterator[tuple[str, metrics.Labels, float]]:
    for name in ("completed", "failed", "cancelled"):
        yield "kvcupy_migration_pulls_total", (("outcome", name),), counts[name]
    yield "kvcupy_migration_bytes_total", (("direction", "received"),), counts["received_bytes"]
    yield from reason_samples("receiver", pulls, connections)
