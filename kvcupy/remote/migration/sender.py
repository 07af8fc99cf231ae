"""PageSender: offers pages to other processes under a lease."""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ... import metrics, observe
from ...cache.hazards import StreamCompletion
from ...cache.pages import Pages, hash_list
from ...cache.pool import positive_int
from ...config import BoundedLog, cache_logger
from ...errors import CaptureError, KvcupyError, OrderError, TransferError, finalize
from ...ops import checks
from ...streams import stream_after
from ...waiting import Waiters
from . import protocol
from .endpoint import (
    GRANT_HEAD,
    PULL_HEAD,
    Endpoint,
    accesses,
    as_transfer_error,
    checked_page_list,
    place,
    positive_seconds,
    reason_samples,
)
from .engines import Offered, Service
from .protocol import (
    CONFIRMED,
    DONE,
    GRANT,
    OPERATE,
    PULL,
    RENEW,
    Address,
    Channel,
    Lost,
    Ticket,
)

_IDLE_TIMEOUT_S = 60.0
_MAX_CONCURRENT_HANDSHAKES = 16
_MIN_HANDSHAKE_S = 0.5  # before another connection may replace an unfinished handshake
_ACCEPT_RETRY_S = 0.05  # after an error, such as a temporary lack of file descriptors
_MAX_PULLS_PER_OFFER = 1 << 20
_MAX_ENDED_OFFERS = 1024
_UNIX_BUFFER_BYTES = 1 << 20  # lets both ends of a Unix socket work concurrently
_CLOSE_TIMEOUT_S = 5.0
_ABORT_DELAY_S = 0.05  # from the end of an offer until blocked connections are aborted
_MAX_SLEEP_S = 3600.0
_SETTLE_POLL_S = 1.0  # for ended offers, since an interrupted call may not wake the keeper
_MAX_REQUEST_BYTES = 4096  # of an operator
_CREDENTIALS = struct.Struct("@iII")  # struct ucred: process, user, group


@dataclass(eq=False)
class _Connection:
    """A connection, from its acceptance until its thread ends."""

    socket: socket.socket  # replaced by an encrypted one when TLS starts
    since: float  # when the state began
    state: str = "handshake"  # or "busy", "idle", or "evicted" in favour of a new connection
    thread: threading.Thread = field(init=False)

    def enter(self, state: str) -> None:
        """Change the state, unless the connection is evicted. The caller holds the lock."""
        if self.state != "evicted":
            self.state, self.since = state, time.monotonic()


@dataclass(eq=False)
class _Offer:
    """Offered pages, until they are released."""

    number: int
    generation: int  # changes when the offer ends
    token: bytes
    pages: Pages
    lease_s: float
    latest: float  # expiry that renewals cannot extend, a value of time.monotonic
    num_pulls: int
    trace_id: str
    release: Callable[[Any], object]
    written: list[StreamCompletion | None]  # completion of each layer; None: not announced yet
    expires: float = 0.0
    ticket: bytes = b""  # as returned by `PageSender.offer`
    completed: int = 0  # number of completed pulls
    channels: set[Channel] = field(default_factory=set)  # of pulls in progress
    num_readers: int = 0  # engine threads that read the pages outside of pulls
    is_withdrawn: bool = False  # the keeper is to end the offer
    ended: str = ""  # reason, empty while the offer is open
    is_released: bool = False
    is_over: bool = False  # the release has returned
    offered: Offered = field(init=False)  # the engine's view, until the release

    def renew(self) -> None:
        self.expires = max(self.expires, min(time.monotonic() + self.lease_s, self.latest))


class PageSender(Endpoint):
    """Offers pages of a pool to other processes, which fetch them with a `PageReceiver`.

    Parameters
    ----------
    pool : KVPool or MLAPool
    listen : "tcp:HOST:PORT", with port 0 for any free port, or "unix:PATH", a socket that the
        sender creates for this user only
    secret : at least 16 bytes, shared with receivers. Addresses other than loopback and Unix
        sockets need a secret or `tls`
    engine : engine that moves the bytes: "socket", or "nixl"
    heads : (first, total) of the model's heads, if the pool holds only some; None for all heads
    model : distinguishes models whose pools look alike, such as by weights and adapter; receivers
        must pass the same
    tls : ssl.SSLContext for servers, with a certificate; None disables encryption
    staging_pages : number of pinned pages that stage a pool which the host cannot address; a pull
        uses at most a quarter of them. None stages only such pools, with up to 64 pages
    advertise : address in tickets instead of `listen`, such as this machine's address if `listen`
        is "tcp:0.0.0.0:PORT"
    max_lease_s : maximum time from `offer` until an offer expires, however often receivers renew
        it, unless its own `lease_s` is longer
    max_connections : maximum number of connections. At the maximum, a new connection replaces the
        one that has been idle longest, and waits in the listening socket's backlog if none is idle

    Attributes
    ----------
    address : listening address, with the port

    Raises
    ------
    TypeError, ValueError : an argument is invalid, such as no secret for a public address
    OSError : the sender cannot listen at the address
    KvcupyError : no thread can be started
    ImportError : the engine needs a package that is missing

    Notes
    -----
    Stream: a thread of the sender reads pages once `after` has completed the work enqueued before.
    Capture: illegal. Bytes: each page once per pull, and over "nixl" once per offer for checksums.
    Lifetime: a daemon thread, and one per connection, until `close`; over "nixl" another thread,
    which reads pages as soon as they are written. Threads may share a sender. The first one ends
    offers and frees pages, so an exception of a signal handler during a call loses none: the pages
    of an interrupted `offer` are still the caller's, or free when its lease ends.
    Security: with a secret, both ends authenticate each other, and messages are authenticated. Page
    data has a keyed checksum, which detects network faults but is not a cryptographic MAC. Nothing
    is encrypted. `tls` authenticates and encrypts page data too. See docs/migration.md.
    Source: vLLM `NixlConnector` (leases renewed by the receiver), SGLang disaggregation.

    Examples
    --------
    >>> import kvcupy as kv
    >>> pools = [kv.KVPool(8, 16, 2, 4, 64, dtype="fp16", device="host") for _ in range(2)]
    >>> pools[0].k(1)[...] = 3
    >>> with kv.PageSender(pools[0]) as sender, kv.PageReceiver(pools[1]) as receiver:
    ...     ticket = sender.offer(pools[0].allocator.alloc(2))
    ...     pages = pools[1].allocator.alloc(receiver.inspect(ticket).num_pages)
    ...     receiver.pull(ticket, pages).synchronize()
    >>> float(pools[1].k(1)[pages[1], 0, 0, 0])
    3.0
    """

    tls_is_for = "servers"

    def __init__(
        self, pool: Any, *, listen: str = "tcp:127.0.0.1:0", secret: bytes | None = None,
        engine: str = "socket", heads: tuple[int, int] | None = None, model: str = "",
        tls: Any = None, staging_pages: int | None = None, advertise: str | None = None,
        max_connections: int = 64, max_lease_s: float = 3600.0,
    ) -> None:  # fmt: skip
        super().__init__(pool, secret, heads, model, tls)
        self._max_connections = positive_int(max_connections, "max_connections")
        self._max_lease_s = positive_seconds(max_lease_s, "max_lease_s")
        address = Address.parse(listen, "listen")
        if not (address.is_local or self._secret or self._tls):
            raise ValueError(
                f"secret: expected one, or tls, to listen on {address}, which is not loopback"
            )
        advertised = None if advertise is None else Address.parse(advertise, "advertise")
        if advertised is None and address.is_wildcard:
            raise ValueError(f"advertise: expected the address of this machine, for {address}")
        self._open_engine(engine, staging_pages)
        self._id = secrets.token_bytes(16)
        self._token_of = partial(protocol.offer_token, secrets.token_bytes(32))
        self._log = BoundedLog(cache_logger)
        self._lock = threading.RLock()  # guards the fields below
        self._changed = Waiters(self._lock)
        self._offers: dict[int, _Offer] = {}  # open offers, by number
        self._unreleased: dict[int, _Offer] = {}  # open and ended offers, by number
        self._by_ticket: dict[bytes, _Offer] = {}  # unreleased; avoids decoding a ticket per layer
        self._owned = np.zeros(pool.num_pages, np.bool_)  # pages that the sender frees
        self._is_adding = False  # true between calls: an interrupt has left `_owned` outdated
        self._draining = False
        self._since = time.monotonic()
        self._ended: OrderedDict[int, str] = OrderedDict()  # reasons by offer number
        self._connections: set[_Connection] = set()
        self._is_crowded = False  # whether a waiting connection cannot be accepted yet
        self._next = 1
        self._to_abort: list[tuple[float, _Offer, Channel]] = []  # if still blocked at that time
        self._wakes_at = 0.0  # next wakeup of the keeper thread, by time.monotonic
        self._engine_closed = False
        self._counts: Counter[str] = Counter()
        self._failed_pulls: Counter[str] = Counter()  # by reason, as the next one
        self._dropped: Counter[str] = Counter()
        self._order_error: OrderError | None = None  # of a thread, not raised yet
        self._server, listening = address.listen()
        self.address = str(listening)
        self._advertised = self.address if advertised is None else str(advertised)
        self._unlink = None
        if address.path:
            self._unlink = finalize(self, _unlink, address.path, _inode(address.path), at_exit=True)
        self._server.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._keeper = threading.Thread(target=self._keep, name="kvcupy page sender", daemon=True)
        try:
            self._keeper.start()
        except RuntimeError as error:
            if self._unlink is not None:
                self._unlink()
            for each in (self._server, self._wake, self._woken):
                each.close()
            raise KvcupyError(f"PageSender: cannot start a thread: {error}") from error
        counts = self._counts, self._failed_pulls, self._dropped
        metrics.follow(self, _samples, partial(_totals, *counts))

    def __repr__(self) -> str:
        return f"<PageSender at {self.address}, {len(self._offers)} offers>"

    # --- Offers ---

    def offer(
        self, pages: Any, *, hashes: Any = None, after: Any = None, lease_s: float = 30.0,
        by_layer: bool = False, pulls: int = 1, attachment: bytes = b"",
        release: Callable[[Any], object] | None = None, trace_id: str = "",
    ) -> bytes:  # fmt: skip
        """Offer pages. The sender owns them until it frees them.

        Parameters
        ----------
        pages : int32 or int64 (N,) on the host, or a non-empty list of ints: allocated pages of the
            pool, without duplicates and not already offered, in the order for the receiver
        hashes : hashes of the blocks in the pages, sent with the ticket; None for none
        after : stream that writes the pages: Stream, or a CuPy or torch stream; None for the
            current stream of CuPy or torch; False if the pages are written. A layer is sent once
            the stream has completed the work enqueued before this call
        lease_s : seconds after which the offer expires, unless a receiver renews it, up to the
            sender's `max_lease_s`
        by_layer : send each layer when `layer_done` announces it; ignore `after`
        pulls : number of pulls that complete the offer, if several receivers each fetch all pages
            or some of their heads
        attachment : up to 1 MiB, which receivers read with the ticket
        release : function to call once with the pages when the offer ends, on any thread, instead
            of the pool's `allocator.free`. The pages may then be in several offers
        trace_id : up to 128 bytes of text, sent with the ticket, that logs and errors of both ends
            name. Receivers of kvcupy before wire version 4 refuse such tickets

        Returns
        -------
        bytes : the ticket, for `PageReceiver.pull`. Anyone holding it and the secret can fetch the
            pages. It is authenticated, not encrypted

        Raises
        ------
        TypeError, ValueError : an argument is invalid, such as a page that is not allocated
        CaptureError : `after` is being captured
        KvcupyError : the sender is closed, or draining

        Notes
        -----
        The pages are freed exactly once, to `pool.allocator`: after `pulls` completed pulls, when
        the lease expires, on `withdraw`, when the work that writes them fails, or when the sender
        closes. They are never freed while a page is being read, nor before all layers are announced
        unless the sender closes. Only the sender owns lease and pages: a receiver that hangs or
        dies cannot keep them.
        """
        ordered = self._checked_pages(pages)
        lease = positive_seconds(lease_s, "lease_s")
        pulls = positive_int(pulls, "pulls")
        if pulls > _MAX_PULLS_PER_OFFER:
            raise ValueError(f"pulls: expected at most {_MAX_PULLS_PER_OFFER}, got {pulls}")
        by_layer = checks.flag(by_layer, "by_layer")
        numbers = () if hashes is None else tuple(hash_list(hashes))
        if numbers and len(numbers) != len(ordered):
            raise ValueError(
                f"hashes: expected one for each page, {len(ordered)}, got {len(numbers)}"
            )
        if not isinstance(attachment, (bytes, bytearray)):
            raise TypeError(f"attachment: expected bytes, got {type(attachment).__name__}")
        if len(attachment) > protocol.MAX_ATTACHMENT_BYTES:
            raise ValueError(f"attachment: expected at most 1 MiB, got {len(attachment)} bytes")
        trace_id = protocol.checked_trace_id(trace_id)
        if release is not None and not callable(release):
            raise TypeError(f"release: expected a function, got {release!r}")
        written: list[StreamCompletion | None] = [None] * self._pool.num_layers
        if not by_layer:
            queue = stream_after(self._pool.device, after, "an offer")
            completion = self._written_by(queue, ordered, "after")
            written = [completion] * self._pool.num_layers
        with self._lock:
            self._require_open()
            if self._draining:
                raise KvcupyError("PageSender: draining, so it accepts no new offers")
            if self._is_adding:
                self._find_owned()
            if release is None and self._owned[ordered].any():
                twice = ordered[self._owned[ordered]][0]
                raise ValueError(f"pages: expected pages that are not offered, got {twice}")
            now = time.monotonic()
            offer = _Offer(
                self._next, secrets.randbits(63), self._token_of(self._next), ordered, lease,
                now + max(lease, self._max_lease_s), pulls, trace_id, release or self._free,
                written, now + lease,
            )  # fmt: skip
            offer.offered = offered = self._offered(offer)
            self._next += 1
            if offer.expires < self._wakes_at:
                self._wake_keeper()
            self._is_adding = True
            if release is None:
                self._owned[ordered] = True
            self._unreleased[offer.number] = offer  # from here on, the pages are the sender's
            self._offers[offer.number] = offer
            self._is_adding = False
        self._engine.offered(offered)
        ticket = Ticket(
            offer.number, offer.generation, offer.token, self._id, self._digest, lease,
            len(ordered), pulls, self._advertised, self._engine.name, self._identity,
            protocol.VERSIONS[-1], numbers, bytes(attachment), trace_id,
        ).encoded(self._secret)  # fmt: skip
        with self._lock:
            if not offer.is_released:
                offer.ticket = ticket
                self._by_ticket[ticket] = offer
        return ticket

    def layer_done(self, ticket: bytes, layer: int, stream: Any = None) -> None:
        """Announce that the work enqueued on a stream so far writes a layer of a `by_layer` offer.

        Parameters
        ----------
        ticket : ticket of `offer` with `by_layer`
        layer : 0 to num_layers - 1, each once, in any order; layers are sent in ascending order
        stream : stream that writes the layer: Stream, or a CuPy or torch stream; None for the
            current stream

        Raises
        ------
        TypeError, ValueError : an argument is invalid, or the layer was already announced
        TransferError : `ticket` is from another sender
        CaptureError : the stream is being captured

        Notes
        -----
        Also legal after the offer has ended: its pages are freed once all layers are announced.
        """
        number = self._pool.layer_number(layer)
        self._raise_order_error()
        offer = self._offer_of(ticket)
        if offer is None:
            return
        with self._lock:
            if offer.is_released:  # the sender was closed meanwhile
                return
            if offer.written[number] is not None:
                raise ValueError(f"layer: expected one that is not done yet, got {number}")
        completion = self._written_by(stream, offer.pages, "stream")
        with self._lock:
            if offer.ended:
                self._wake_keeper()
            if not offer.is_released:
                offer.written[number] = completion
        if offer.ended:
            self._await_release(offer)

    def withdraw(self, ticket: bytes) -> bool:
        """Cancel an offer, including pulls in progress; return whether it was still open.

        Raises
        ------
        TypeError : `ticket` is not bytes
        TransferError : `ticket` is from another sender

        Notes
        -----
        Pages that no pull reads are free when this returns. A `release` function may run later.
        """
        self._raise_order_error()
        offer = self._offer_of(ticket)
        if offer is None:
            return False
        with self._lock:
            if offer.ended or offer.is_withdrawn:
                return False
            self._wake_keeper()
            offer.is_withdrawn = True
        self._await_release(offer)
        reason: str = offer.ended  # the keeper has set it
        return reason == "withdrawn"

    def outcome(self, ticket: bytes) -> str:
        """Return how an offer has ended: "completed", "expired", "withdrawn", "failed" or "closed".

        "" while it is open; "unknown" after many later ones have ended.

        Raises
        ------
        TypeError : `ticket` is not bytes
        TransferError : `ticket` is from another sender
        """
        offer = self._offer_of(ticket)
        number = Ticket.decoded(ticket, self._secret).number if offer is None else offer.number
        with self._lock:
            return "" if number in self._offers else self._ended.get(number, "unknown")

    def drain(self, deadline_s: float | None = None, *, undo: bool = False) -> bool:
        """Refuse new offers, and wait until none is open; pulls of open ones still complete.

        Parameters
        ----------
        deadline_s : maximum time to wait; None does not wait
        undo : accept offers again, and do not wait

        Returns
        -------
        bool : whether no offer is open
        """
        seconds = 0.0 if deadline_s is None else positive_seconds(deadline_s, "deadline_s")
        undo = checks.flag(undo, "undo")
        with self._lock:
            self._draining = not undo
        if not undo:
            self._changed.wait_for(lambda: not self._offers, seconds)
        return not self._offers

    def stats(self) -> dict[str, Any]:
        """Return current and cumulative counts.

        Returns
        -------
        dict : current "offers", "offered_pages" (not yet freed), "pulls" and "connections";
            whether it is "draining";
            cumulative "completed", "expired", "withdrawn", "failed" and "closed" offers,
            "lost_pulls", "refused_pulls", "dropped_connections" (before the end of the handshake)
            and "sent_bytes"; "pull_failures" by the reason of the `TransferError`;
            "connection_drops" by "late", "crowded" (replaced by a waiting connection), "secret" (or
            ticket), "version", "stranger" (not a receiver), "thread" (no thread can be started) and
            "lost"
        """
        with self._lock:
            now = {
                "offers": len(self._offers),
                "offered_pages": sum(len(offer.pages) for offer in self._unreleased.values()),
                "pulls": sum(len(offer.channels) for offer in self._unreleased.values()),
                "connections": len(self._open_connections()),
                "draining": self._draining,
            }
            return {
                **now,
                **{name: self._counts[name] for name in _COUNTS},
                "dropped_connections": self._dropped.total(),
                "pull_failures": dict(self._failed_pulls),
                "connection_drops": dict(self._dropped),
            }

    def close(self, deadline_s: float = _CLOSE_TIMEOUT_S) -> None:
        """End all offers and connections, free the pages, and wait for the threads.

        Parameters
        ----------
        deadline_s : maximum time to wait; threads still running then end later
        """
        deadline = time.monotonic() + positive_seconds(deadline_s, "deadline_s")
        with self._lock:
            self._wake_keeper()
            self._closed = True
            connections = list(self._connections)
        if threading.current_thread() is self._keeper:  # in a `release` function
            self._end_all()
        for thread in (self._keeper, *(each.thread for each in connections)):
            is_started = thread.ident is not None  # the keeper may have failed to start it
            if is_started and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            first, self._engine_closed = not self._engine_closed, True
        if first:
            self._engine.close(deadline)
        self._raise_order_error()

    def _abandon(self) -> None:
        connections = [each.socket for each in self._connections]
        for inherited in (self._server, self._wake, self._woken, *connections):
            with suppress(OSError):
                os.close(inherited.detach())

    # --- Checks, and the end of offers ---

    def _checked_pages(self, pages: Any) -> Pages:
        self._pool.allocator._require_allocated(pages)
        ordered = checked_page_list(pages)
        if not 1 <= len(ordered) <= protocol.MAX_PAGES:
            raise ValueError(f"pages: expected 1 to {protocol.MAX_PAGES}, got {len(ordered)}")
        return ordered

    def _written_by(self, stream: Any, pages: Pages, name: str) -> StreamCompletion:
        queue = self._pool.device.as_stream(stream, name=name)
        if queue.capturing:
            raise CaptureError(f"{name}: pages written by a captured stream cannot be offered")
        completion = StreamCompletion(queue)
        if not completion.done():
            self._pool.allocator._mark_busy(pages, completion)
        return completion

    def _offer_of(self, ticket: Any) -> _Offer | None:
        """Return the offer of a ticket, or None if its pages are released."""
        if type(ticket) is bytes:
            with self._lock:
                if (offer := self._by_ticket.get(ticket)) is not None:
                    return offer
        decoded = Ticket.decoded(ticket, self._secret)
        if decoded.sender_id != self._id:
            raise TransferError("ticket: expected one of this sender", "ticket")
        with self._lock:
            return self._unreleased.get(decoded.number)

    def _find_owned(self) -> None:
        """Find the pages that the sender frees. The caller holds the lock."""
        self._owned[:] = False
        for offer in self._unreleased.values():
            if offer.release == self._free and not offer.is_released:
                self._owned[offer.pages] = True
        self._is_adding = False

    def _await_release(self, offer: _Offer) -> None:
        """Wait until the keeper has ended an offer and freed its pages, unless a pull reads them.

        Signals interrupt only the main thread, so the keeper does the work that must not be lost.
        Does not wait for a `release` function, which may take a lock that this thread holds.
        """
        if threading.current_thread() is self._keeper:  # in a `release` function
            self._end_if_due(offer, time.monotonic())
        elif offer.release == self._free:
            self._changed.wait_for(lambda: self._is_settled(offer), _CLOSE_TIMEOUT_S)
        else:
            self._changed.wait_for(lambda: offer.ended, _CLOSE_TIMEOUT_S)

    def _is_settled(self, offer: _Offer) -> bool:
        return bool(offer.ended) and (offer.is_over or self._is_held(offer))

    def _is_held(self, offer: _Offer) -> bool:
        """Return whether pages are read or may be written. The caller holds the lock."""
        unwritten = None in offer.written and not self._closed
        return bool(offer.channels or offer.num_readers or unwritten)

    def _end_if_due(self, offer: _Offer, now: float) -> None:
        if offer.is_withdrawn:
            self._end(offer, "withdrawn")
        elif offer.expires <= now:
            self._end(offer, "expired")
        self._settle(offer)

    def _end(self, offer: _Offer, reason: str) -> bool:
        """End an offer, once; its pages are freed when nothing accesses them."""
        with self._lock:
            if offer.ended:
                return False
            offer.ended = reason
            offer.generation += 1
            self._counts[reason] += 1
            self._offers.pop(offer.number, None)
            self._ended[offer.number] = reason
            while len(self._ended) > _MAX_ENDED_OFFERS:
                self._ended.popitem(last=False)
            abort_at = time.monotonic() + _ABORT_DELAY_S
            moving = [(abort_at, offer, each) for each in offer.channels if each.moving]
            self._to_abort += moving  # other pulls check the offer before they move bytes
            self._changed.notify()
        if moving:
            self._notify()
        self._settle(offer)
        return True

    def _abort_blocked(self, now: float) -> float:
        """Abort blocked connections of ended offers; return seconds until the next is due."""
        with self._lock:
            self._to_abort = [each for each in self._to_abort if each[2] in each[1].channels]
            due = [channel for at, _, channel in self._to_abort if at <= now and channel.moving]
            ends = [at - now for at, _, _ in self._to_abort if at > now]
        for channel in due:
            channel.abort()
        return min(ends, default=_MAX_SLEEP_S)

    def _settle(self, offer: _Offer) -> None:
        """Free the pages of an offer, once, if it has ended and nothing reads or writes them."""
        with self._lock:
            if not offer.ended or self._is_held(offer) or offer.is_released:
                return
            offer.is_released = True
            offer.written = []
            offer.offered.prepared.clear()  # breaks reference cycles that include the pool
            del offer.offered
            self._by_ticket.pop(offer.ticket, None)
        try:
            offer.release(offer.pages)
        except Exception as error:
            cache_logger.exception("cannot release the pages of an offer: %s", error)
        with self._lock:
            offer.is_over = True
            self._unreleased.pop(offer.number, None)
            self._changed.notify()

    def _free(self, pages: Pages) -> None:
        with self._lock:
            self._owned[pages] = False
        self._pool.allocator.free(pages)

    def _notify(self) -> None:
        with self._lock:
            self._wake_keeper()

    def _wake_keeper(self) -> None:
        """Make the keeper check the state after the caller, which holds the lock, releases it.

        Call this before changing the state, so that an interrupt cannot lose the wake-up.
        """
        with suppress(OSError):  # the keeper has closed the socket
            self._wake.send(b"\0", socket.MSG_DONTWAIT)

    # --- Keeper thread: accepts connections, ends expired offers ---

    def _keep(self) -> None:
        try:
            self._keep_until_closed()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End all offers and connections of a closed sender."""
        if self._unlink is not None:
            self._unlink()  # while it listens, so that another sender does not take it for stale
        with self._lock:
            self._closed = True
            offers, connections = list(self._unreleased.values()), list(self._connections)
        for offer in offers:
            self._end(offer, "closed")
            self._settle(offer)
        for connection in connections:
            protocol.shut_down(connection.socket)
        with self._lock:
            for each in (self._server, self._wake, self._woken):
                each.close()

    def _keep_until_closed(self) -> None:
        accept_at = math.inf  # next attempt, while the sender is too crowded to accept
        while True:
            now = time.monotonic()
            with self._lock:  # so that the change of a thread that has woken this one is complete
                if self._closed:
                    return
                self._wakes_at = math.inf  # makes new offers notify this thread
                offers = list(self._unreleased.values())
            for offer in offers:
                self._end_if_due(offer, now)
            ends = [_SETTLE_POLL_S if each.ended else each.expires - now for each in offers]
            ends += [self._abort_blocked(now), accept_at - now]
            with self._lock:
                self._wakes_at = now + min(ends)
            poll_s = self._engine.poll_s
            if poll_s is not None:
                try:
                    self._engine.poll()
                except Exception as error:  # one peer's error must not stop the others
                    self._log.warning("%s: the engine failed to make progress: %s", self, error)
                ends.append(poll_s)
            awaited = (self._woken,) if self._is_crowded else (self._woken, self._server)
            if protocol.any_readable(awaited, min(ends)):
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            accept_at = self._accept()

    def _accept(self) -> float:
        """Accept a waiting connection, or return the time of the next attempt.

        Connections that do not fit wait in the backlog of the listening socket.
        """
        self._is_crowded = False
        if not protocol.any_readable((self._server,), 0):
            return math.inf
        with self._lock:
            retry_at = self._make_space()
            self._is_crowded = retry_at > 0
        if retry_at > 0:
            return retry_at
        try:
            accepted, _ = self._server.accept()
        except BlockingIOError:
            return math.inf
        except OSError as error:
            if not self._closed:
                self._log.warning("cannot accept a connection: %s", error)
            self._is_crowded = True
            return time.monotonic() + _ACCEPT_RETRY_S
        connection = _Connection(accepted, time.monotonic())
        connection.thread = threading.Thread(
            target=self._converse, args=(connection,), name="kvcupy pages", daemon=True
        )
        with self._lock:
            self._connections.add(connection)
        try:
            connection.thread.start()
        except RuntimeError as error:  # no thread can be started
            self._log.warning("cannot serve a connection: %s", error)
            self._drop(connection, "thread")
        return math.inf

    def _make_space(self) -> float:
        """Return 0 if another connection fits, else the time of the next attempt.

        Without space, evict the connection that has been idle longest, or the oldest unfinished
        handshake if it has had its minimum time. The caller holds the lock.
        """
        connections = self._open_connections()
        handshakes = [each for each in connections if each.state == "handshake"]
        idle = [each for each in connections if each.state == "idle"]
        is_full = len(connections) >= self._max_connections
        if len(handshakes) < _MAX_CONCURRENT_HANDSHAKES:
            if not is_full:
                return 0.0
            if idle:
                self._evict(min(idle, key=lambda each: each.since))
                return 0.0
        oldest = min(handshakes, key=lambda each: each.since, default=None)
        if oldest is None:
            return math.inf  # the next connection that ends or becomes idle wakes the keeper
        if (retry_at := oldest.since + _MIN_HANDSHAKE_S) > time.monotonic():
            return retry_at
        self._evict(oldest)
        return 0.0

    def _open_connections(self) -> list[_Connection]:
        return [each for each in self._connections if each.state != "evicted"]

    def _evict(self, connection: _Connection) -> None:
        if connection.state == "handshake":
            self._dropped["crowded"] += 1
        connection.enter("evicted")
        protocol.shut_down(connection.socket)  # its receiver reconnects

    def _drop(self, connection: _Connection, reason: str) -> None:
        """Close a connection whose handshake has failed."""
        with self._lock:
            if connection.state != "evicted":  # else counted already
                self._dropped[reason] += 1
        self._remove(connection)

    def _remove(self, connection: _Connection) -> None:
        connection.socket.close()
        with self._lock:
            self._connections.discard(connection)
        self._made_space()

    def _made_space(self) -> None:
        """Wake the keeper if a connection waits for space."""
        if self._is_crowded:
            self._notify()

    # --- Connection threads ---

    def _converse(self, connection: _Connection) -> None:
        try:
            channel, digest = self._shake_hands(connection)
        except (Lost, OSError, ValueError) as error:
            self._log.log(logging.INFO, "dropped a connection to %s: %s", self.address, error)
            reason = "late" if isinstance(error, TimeoutError) else "lost"
            self._drop(connection, error.reason if isinstance(error, Lost) else reason)
            return
        with self._lock:
            connection.enter("busy")
        self._made_space()
        try:
            while not self._closed and self._is_asked(channel, connection):
                deadline = time.monotonic() + protocol.HANDSHAKE_S
                kind, request = channel.receive(deadline, PULL, OPERATE)
                if kind == OPERATE:
                    is_served = self._operate(channel, connection.socket, request)
                else:
                    is_served = self._serve(channel, digest, request)
                if not is_served:
                    break
        except (Lost, TimeoutError, TransferError):
            pass  # the receiver has disconnected
        finally:
            self._remove(connection)

    def _shake_hands(self, connection: _Connection) -> tuple[Channel, bytes]:
        deadline = connection.since + protocol.HANDSHAKE_S
        accepted = connection.socket
        accepted.setblocking(True)
        if accepted.family == socket.AF_UNIX:  # TCP sizes its buffers automatically
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        else:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            entered = partial(self._entered_tls, connection)
            protocol.encrypt(accepted, self._tls, deadline, entered, server_side=True)
        return protocol.as_sender(
            connection.socket, self._secret, self._digest, self._id, self._token_of, deadline
        )

    def _entered_tls(self, connection: _Connection, encrypted: socket.socket) -> None:
        connection.socket = encrypted
        with self._lock:  # a thread that ended the connection may have shut down the old socket
            if self._closed or connection.state == "evicted":
                raise Lost("the connection was evicted, or the sender closed")

    def _is_asked(self, channel: Channel, connection: _Connection) -> bool:
        """Wait for the next request; False if the connection is idle too long or evicted."""
        if channel.readable(0):
            return True
        with self._lock:
            connection.enter("idle")
        self._made_space()
        is_asked = channel.readable(_IDLE_TIMEOUT_S)
        with self._lock:
            connection.enter("busy")
            return is_asked and connection.state != "evicted"

    def _operate(self, channel: Channel, connection: socket.socket, request: bytes) -> bool:
        """Answer an operator; return whether the connection can be used for another request."""
        deadline = time.monotonic() + protocol.HANDSHAKE_S
        if not (self._secret or _is_own_user(connection)):
            message = "operators need the secret, or a Unix socket of the sender's user"
            channel.refuse("secret", message, deadline)
            return False
        asked = None
        if len(request) <= _MAX_REQUEST_BYTES:
            with suppress(ValueError, RecursionError):
                asked = json.loads(request)
        if asked in ({"action": "drain", "undo": False}, {"action": "drain", "undo": True}):
            cache_logger.info("%r: request of an operator: %s", self, asked)
            self.drain(undo=asked["undo"])
        elif asked != {"action": "stat"}:
            channel.refuse("version", "this sender does not know the request", deadline)
            return False
        answer = {
            **self.stats(), "address": self.address, "engine": self._engine.name,
            "age_s": round(time.monotonic() - self._since, 3), "pid": os.getpid(),
            "identity": asdict(self._identity),
        }  # fmt: skip
        channel.send(OPERATE, json.dumps(answer).encode(), deadline)
        return True

    def _serve(self, channel: Channel, digest: bytes, request: bytes) -> bool:
        """Serve one pull; return whether the connection can be used for another."""
        if not hmac.compare_digest(digest, self._digest):
            return self._refuse(channel, "identity", "the pools differ")
        if len(request) < PULL_HEAD.size:
            raise Lost("truncated request")
        number, generation, token, first, count, run_pages, waits = PULL_HEAD.unpack_from(request)
        start = first - self._identity.head_start
        heads = range(start, start + count)
        if not (start >= 0 and count and heads.stop <= self._pool.num_kv_heads and run_pages):
            return self._refuse(channel, "identity", "the sender's pool lacks these heads")
        offer, refusal = self._claim(channel, number, generation, token)
        if offer is None:
            return self._refuse(channel, *refusal)
        try:
            peer = request[PULL_HEAD.size :]
            self._move(channel, offer, heads, run_pages, peer, waits=bool(waits))
        except BaseException as raised:
            error = self._failed(offer, raised) if isinstance(raised, OrderError) else raised
            failure = as_transfer_error(error, place(self.address, offer.trace_id))
            is_expected = isinstance(error, (TransferError, Lost, TimeoutError))
            level = logging.INFO if is_expected else logging.ERROR
            cache_logger.log(level, "incomplete pull from %s", failure, exc_info=not is_expected)
            is_refused = isinstance(error, TransferError)
            self._leave(channel, offer, "refused_pulls" if is_refused else "lost_pulls", failure)
            if is_refused:
                with suppress(Lost, TimeoutError):
                    channel.refuse(failure.reason, str(error), time.monotonic() + 1)
            return False
        with suppress(Lost, TimeoutError):
            channel.send(CONFIRMED, b"", time.monotonic() + 1)
            return True
        return False

    def _claim(
        self, channel: Channel, number: int, generation: int, token: bytes
    ) -> tuple[_Offer | None, tuple[str, str]]:
        """Return the offer that a pull names, or (reason, message) of a refusal."""
        with self._lock:
            offer = self._offers.get(number)
            if offer is None:
                reason = self._ended.get(number, "ticket")
                reason = "taken" if reason == "completed" else reason
                message = "no such offer" if reason == "ticket" else f"the offer: {reason}"
                return None, (reason, message)
            known = offer.generation == generation and hmac.compare_digest(offer.token, token)
            if not known:
                return None, ("ticket", "no such offer")
            if offer.completed + len(offer.channels) >= offer.num_pulls:
                return None, ("taken", f"the offer: all {offer.num_pulls} pulls are taken")
            offer.channels.add(channel)
            offer.renew()
        return offer, ("", "")

    def _move(
        self, channel: Channel, offer: _Offer, heads: range, run_pages: int, peer: bytes, *,
        waits: bool,
    ) -> None:  # fmt: skip
        staging = self._used_staging
        page_bytes = self._bytes_of(heads)
        run_pages = min(run_pages, len(offer.pages) if staging is None else staging.share)
        service = Service(
            channel, offer.offered, heads, peer=peer, lease_s=offer.lease_s, run_pages=run_pages,
            page_bytes=page_bytes, staging=staging, stream=self._lazy_stream(),
            renew=offer.renew,
        )  # fmt: skip
        grant = GRANT_HEAD.pack(
            round(offer.lease_s * 1e3), run_pages, len(offer.pages), self._pool.num_layers,
            page_bytes.page_bytes,
        )  # fmt: skip
        grant += self._engine.describe()
        channel.send(GRANT, grant, service.deadline(), more=True)  # sent with the first layers
        before = channel.num_bytes
        try:
            if waits:
                service.wait_start()
            self._engine.serve(service)
            channel.moving = True  # ending the offer aborts the wait for DONE
            self._check(offer)
            while channel.receive(service.deadline(), DONE, RENEW)[0] != DONE:
                offer.renew()
            self._check(offer)
        finally:
            with self._lock:
                self._counts["sent_bytes"] += channel.num_bytes - before
                channel.moving = False
        self._leave(channel, offer)

    def _leave(
        self, channel: Channel, offer: _Offer, lost: str = "", failure: TransferError | None = None
    ) -> None:  # fmt: skip
        """Record the end of a pull, and end the offer if the pull was the last."""
        with self._lock:
            offer.channels.discard(channel)
            if failure is not None:
                self._counts[lost] += 1
                self._failed_pulls[failure.reason] += 1
            else:
                offer.completed += 1
            is_last = offer.completed >= offer.num_pulls
        if is_last:
            self._end(offer, "completed")
        self._settle(offer)
        if self._engine.poll_s is not None:
            self._notify()

    def _refuse(self, channel: Channel, reason: str, message: str) -> bool:
        with self._lock:
            self._counts["refused_pulls"] += 1
            self._failed_pulls[reason] += 1
        channel.refuse(reason, message, time.monotonic() + protocol.HANDSHAKE_S)
        return True

    def _offered(self, offer: _Offer) -> Offered:
        return Offered(
            self._pool, offer.pages, number=offer.number, generation=offer.generation,
            key=protocol.offer_key(self._secret, offer.token), check=partial(self._check, offer),
            is_ready=partial(self._is_ready, offer), reading=partial(self._reading, offer),
        )  # fmt: skip

    @contextmanager
    def _reading(self, offer: _Offer) -> Iterator[None]:
        """Hold the pages of an offer for an engine thread; TransferError if the offer has ended."""
        with self._lock:
            self._check(offer)
            offer.num_readers += 1
        try:
            yield
        finally:
            with self._lock:
                offer.num_readers -= 1
            self._settle(offer)

    def _check(self, offer: _Offer) -> None:
        if offer.ended:
            raise TransferError(f"the offer: {offer.ended}", offer.ended)

    def _is_ready(self, offer: _Offer, layer: int) -> bool:
        completion = offer.written[layer]
        if completion is None:
            return False
        try:
            is_done, failure = completion.done(), completion.failure
        except Exception as error:
            is_done, failure = True, error
        if failure is not None:
            self._end(offer, "failed")
            raise TransferError(f"the write of layer {layer} failed: {failure}", "failed")
        if is_done and observe.order_observers and self._staging is None:
            try:
                observe.touched_by_host("send pages", accesses(self._pool, offer.pages, layer))
            except OrderError as error:
                raise self._failed(offer, error) from error
        return is_done

    def _failed(self, offer: _Offer, error: OrderError) -> TransferError:
        """End an offer; return the error for the receiver. The next call here raises the other."""
        self._order_error = error
        self._end(offer, "failed")
        return TransferError(str(error), "failed")

    def _raise_order_error(self) -> None:
        """Raise, once, the OrderError of a thread that was to send pages."""
        error, self._order_error = self._order_error, None
        if error is not None:
            raise OrderError(error.report)


_COUNTS = (
    "completed", "expired", "withdrawn", "failed", "closed", "lost_pulls", "refused_pulls",
    "sent_bytes",
)  # fmt: skip


def _samples(sender: PageSender) -> Iterator[tuple[str, metrics.Labels, float]]:
    stats = sender.stats()
    yield from _totals(stats, stats["pull_failures"], stats["connection_drops"])
    yield "kvcupy_migration_offered_pages", (), stats["offered_pages"]


def _totals(
    counts: Mapping[str, int], pulls: Mapping[str, int], connections: Mapping[str, int]
) -> Iterator[tuple[str, metrics.Labels, float]]:
    for name in ("completed", "expired", "withdrawn", "failed", "closed"):
        yield "kvcupy_migration_offers_total", (("outcome", name),), counts[name]
    yield "kvcupy_migration_bytes_total", (("direction", "sent"),), counts["sent_bytes"]
    yield from reason_samples("sender", pulls, connections)


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer is a process of this user, on a Unix socket."""
    option = getattr(socket, "SO_PEERCRED", None)  # Linux
    if option is None or connection.family != socket.AF_UNIX:
        return False
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _inode(path: str) -> int:
    return Path(path).stat().st_ino


def _unlink(path: str, inode: int) -> None:
    """Remove a socket, unless another socket has replaced it."""
    with suppress(OSError):
        if _inode(path) == inode:
            Path(path).unlink()
