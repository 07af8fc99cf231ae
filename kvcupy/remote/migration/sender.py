"""PageSender: offers pages to other processes under a lease."""

from __future__ import annotations

import hmac
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ... import metrics, observe
from ...cache.hazards import StreamCompletion
from ...cache.pages import Pages, hash_list
from ...cache.pool import positive_int
from ...config import cache_logger
from ...errors import CaptureError, KvcupyError, OrderError, TransferError
from ...ops import checks
from ...streams import stream_after
from . import protocol
from .endpoint import (
    GRANT_HEAD,
    PULL_HEAD,
    Endpoint,
    accesses,
    checked_page_list,
    positive_seconds,
)
from .engines import Offered, Service
from .protocol import CONFIRMED, DONE, GRANT, PULL, RENEW, Address, Channel, Lost, Ticket

_IDLE_TIMEOUT_S = 60.0
_MAX_CONCURRENT_HANDSHAKES = 16
_MAX_PULLS_PER_OFFER = 1 << 20
_MAX_ENDED_OFFERS = 1024
_UNIX_BUFFER_BYTES = 1 << 20  # lets both ends of a Unix socket work concurrently
_CLOSE_TIMEOUT_S = 5.0
_ABORT_DELAY_S = 0.05  # from the end of an offer until blocked connections are aborted
_MAX_SLEEP_S = 3600.0


@dataclass(eq=False)
class _Offer:
    """Offered pages, until they are released."""

    number: int
    generation: int  # changes when the offer ends
    token: bytes
    pages: Pages
    lease_s: float
    num_pulls: int
    release: Callable[[Any], object]
    written: list[StreamCompletion | None]  # completion of each layer; None: not announced yet
    expires: float = 0.0  # a value of time.monotonic
    ticket: bytes = b""  # as returned by `PageSender.offer`
    completed: int = 0  # number of completed pulls
    channels: set[Channel] = field(default_factory=set)  # of pulls in progress
    num_readers: int = 0  # engine threads that read the pages outside of pulls
    ended: str = ""  # reason, empty while the offer is open
    is_released: bool = False
    offered: Offered = field(init=False)  # the engine's view, until the release


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
    max_connections : maximum number of connections. At the maximum, a new connection replaces the
        one that has been idle longest, and is dropped if none is idle

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
    which reads pages as soon as they are written. Threads may share a sender.
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

    def __init__(
        self, pool: Any, *, listen: str = "tcp:127.0.0.1:0", secret: bytes | None = None,
        engine: str = "socket", heads: tuple[int, int] | None = None, model: str = "",
        tls: Any = None, staging_pages: int | None = None, advertise: str | None = None,
        max_connections: int = 64,
    ) -> None:  # fmt: skip
        super().__init__(pool, secret, heads, model, tls)
        self._max_connections = positive_int(max_connections, "max_connections")
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
        self._changed = threading.Condition()  # guards the fields below
        self._offers: dict[int, _Offer] = {}  # open offers, by number
        self._unreleased: set[_Offer] = set()  # open and ended offers
        self._by_ticket: dict[bytes, _Offer] = {}  # unreleased; avoids decoding a ticket per layer
        self._owned = np.zeros(pool.num_pages, np.bool_)  # pages that the sender frees
        self._ended: OrderedDict[int, str] = OrderedDict()  # reasons by offer number
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, None] = {}  # connections without a pull, oldest first
        self._evicted: set[socket.socket] = set()  # connections being closed for new ones
        self._num_handshakes = 0
        self._next = 1
        self._to_abort: list[tuple[float, _Offer, Channel]] = []  # if still blocked at that time
        self._wakes_at = 0.0  # next wakeup of the keeper thread, by time.monotonic
        self._counts: Counter[str] = Counter()
        self._order_error: OrderError | None = None  # of a thread, not raised yet
        self._server, listening = address.listen()
        self.address = str(listening)
        self._advertised = self.address if advertised is None else str(advertised)
        self._unlink = None
        if address.path:
            self._unlink = weakref.finalize(self, _unlink, address.path, _inode(address.path))
        self._server.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        protocol.closed_in_children.add(self)
        self._keeper = threading.Thread(target=self._keep, name="kvcupy page sender", daemon=True)
        try:
            self._keeper.start()
        except RuntimeError as error:
            for each in (self._server, self._wake, self._woken):
                each.close()
            if self._unlink is not None:
                self._unlink()
            raise KvcupyError(f"PageSender: cannot start a thread: {error}") from error
        metrics.follow(self, _samples, partial(_totals, self._counts))

    def __repr__(self) -> str:
        return f"<PageSender at {self.address}, {len(self._offers)} offers>"

    # --- Offers ---

    def offer(
        self, pages: Any, *, hashes: Any = None, after: Any = None, lease_s: float = 30.0,
        by_layer: bool = False, pulls: int = 1, attachment: bytes = b"",
        release: Callable[[Any], object] | None = None,
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
        lease_s : seconds after which the offer expires, unless a receiver renews it
        by_layer : send each layer when `layer_done` announces it; ignore `after`
        pulls : number of pulls that complete the offer, if several receivers each fetch all pages
            or some of their heads
        attachment : up to 1 MiB, which receivers read with the ticket
        release : function to call once with the pages when the offer ends, on any thread, instead
            of the pool's `allocator.free`. The pages may then be in several offers

        Returns
        -------
        bytes : the ticket, for `PageReceiver.pull`. Anyone holding it and the secret can fetch the
            pages. It is authenticated, not encrypted

        Raises
        ------
        TypeError, ValueError : an argument is invalid, such as a page that is not allocated
        CaptureError : `after` is being captured
        KvcupyError : the sender is closed

        Notes
        -----
        The pages are freed exactly once, to `pool.allocator`: after `pulls` completed pulls, when
        the lease expires, on `withdraw`, when the work that writes them fails, or when the sender
        closes. They are never freed while a page is being read, nor before all layers are announced
        unless the sender closes. Only the sender owns lease and pages: a receiver that hangs or
        dies cannot keep them.
        """
        self._require_own_process()
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
        if release is not None and not callable(release):
            raise TypeError(f"release: expected a function, got {release!r}")
        written: list[StreamCompletion | None] = [None] * self._pool.num_layers
        if not by_layer:
            queue = stream_after(self._pool.device, after, "an offer")
            completion = self._written_by(queue, ordered, "after")
            written = [completion] * self._pool.num_layers
        with self._changed:
            self._require_open()
            if release is None:
                if self._owned[ordered].any():
                    twice = ordered[self._owned[ordered]][0]
                    raise ValueError(f"pages: expected pages that are not offered, got {twice}")
                self._owned[ordered] = True
            offer = _Offer(
                self._next, secrets.randbits(63), secrets.token_bytes(16), ordered, lease, pulls,
                release or self._free, written, time.monotonic() + lease,
            )  # fmt: skip
            offer.offered = offered = self._offered(offer)
            self._next += 1
            self._offers[offer.number] = offer
            self._unreleased.add(offer)
            is_earliest = offer.expires < self._wakes_at
        if is_earliest:
            self._notify()
        self._engine.offered(offered)
        ticket = Ticket(
            offer.number, offer.generation, offer.token, self._id, self._digest, lease,
            len(ordered), pulls, self._advertised, self._engine.name, self._identity, numbers,
            bytes(attachment),
        ).encoded(self._secret)  # fmt: skip
        with self._changed:
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
        with self._changed:
            if offer.is_released:  # the sender was closed meanwhile
                return
            if offer.written[number] is not None:
                raise ValueError(f"layer: expected one that is not done yet, got {number}")
        completion = self._written_by(stream, offer.pages, "stream")
        with self._changed:
            if not offer.is_released:
                offer.written[number] = completion
        self._settle(offer)

    def withdraw(self, ticket: bytes) -> bool:
        """Cancel an offer, including pulls in progress; return whether it was still open.

        Raises
        ------
        TypeError : `ticket` is not bytes
        TransferError : `ticket` is from another sender
        """
        self._raise_order_error()
        offer = self._offer_of(ticket)
        if offer is None or offer.ended:
            return False
        return self._end(offer, "withdrawn")

    def stats(self) -> dict[str, int]:
        """Return current and cumulative counts.

        Returns
        -------
        dict : current "offers", "offered_pages" (not yet freed), "pulls" and "connections";
            cumulative "completed", "expired", "withdrawn", "failed" and "closed" offers,
            "lost_pulls", "refused_pulls", "dropped_connections" (not from a receiver, or over the
            limit) and "sent_bytes"
        """
        with self._changed:
            now = {
                "offers": len(self._offers),
                "offered_pages": sum(len(offer.pages) for offer in self._unreleased),
                "pulls": sum(len(offer.channels) for offer in self._unreleased),
                "connections": len(self._connections) - len(self._evicted),
            }
            return now | {name: self._counts[name] for name in _COUNTS}

    def close(self, deadline_s: float = _CLOSE_TIMEOUT_S) -> None:
        """End all offers and connections, free the pages, and wait for the threads.

        Parameters
        ----------
        deadline_s : maximum time to wait; threads still running then end later
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + positive_seconds(deadline_s, "deadline_s")
        with self._changed:
            first, self._closed = not self._closed, True
            offers = list(self._unreleased)
            connections = dict(self._connections)
        if first:
            for offer in offers:
                self._end(offer, "closed")
                self._settle(offer)
            self._notify()
            for connection in connections:
                protocol.shut_down(connection)
        for thread in (self._keeper, *connections.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        if first:
            self._engine.close(deadline)
            if self._unlink is not None:
                self._unlink()
        self._raise_order_error()

    def _close_in_child(self) -> None:
        """Close inherited sockets in a forked child, without ending the parent's offers."""
        self._changed = threading.Condition()  # a thread of the parent may hold the old one
        if self._unlink is not None:
            self._unlink.detach()
        for inherited in (self._server, self._wake, self._woken, *self._connections):
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
        self._require_own_process()
        if type(ticket) is bytes:
            with self._changed:
                if (offer := self._by_ticket.get(ticket)) is not None:
                    return offer
        decoded = Ticket.decoded(ticket, self._secret)
        if decoded.sender_id != self._id:
            raise TransferError("ticket: expected one of this sender", "ticket")
        with self._changed:
            return next((o for o in self._unreleased if o.number == decoded.number), None)

    def _end(self, offer: _Offer, reason: str) -> bool:
        """End an offer, once; its pages are freed when nothing accesses them."""
        with self._changed:
            if offer.ended:
                return False
            offer.ended = reason
            offer.generation += 1
            self._counts[reason] += 1
            del self._offers[offer.number]
            self._ended[offer.number] = reason
            while len(self._ended) > _MAX_ENDED_OFFERS:
                self._ended.popitem(last=False)
            abort_at = time.monotonic() + _ABORT_DELAY_S
            moving = [(abort_at, offer, each) for each in offer.channels if each.moving]
            self._to_abort += moving  # other pulls check the offer before they move bytes
        if moving:
            self._notify()
        self._settle(offer)
        return True

    def _abort_blocked(self, now: float) -> float:
        """Abort blocked connections of ended offers; return seconds until the next is due."""
        with self._changed:
            self._to_abort = [each for each in self._to_abort if each[2] in each[1].channels]
            due = [channel for at, _, channel in self._to_abort if at <= now and channel.moving]
            ends = [at - now for at, _, _ in self._to_abort if at > now]
        for channel in due:
            channel.abort()
        return min(ends, default=_MAX_SLEEP_S)

    def _settle(self, offer: _Offer) -> None:
        """Free the pages of an offer, once, if it has ended and nothing reads or writes them."""
        with self._changed:
            unwritten = None in offer.written and not self._closed
            is_read = offer.channels or offer.num_readers
            if not offer.ended or is_read or unwritten or offer.is_released:
                return
            offer.is_released = True
            offer.written = []
            offer.offered.prepared.clear()  # breaks reference cycles that include the pool
            del offer.offered
            self._unreleased.discard(offer)
            self._by_ticket.pop(offer.ticket, None)
        try:
            offer.release(offer.pages)
        except Exception as error:
            cache_logger.exception("cannot release the pages of an offer: %s", error)

    def _free(self, pages: Pages) -> None:
        with self._changed:
            self._owned[pages] = False
        self._pool.allocator.free(pages)

    def _notify(self) -> None:
        with self._changed, suppress(OSError):  # the lock: the keeper may be closing the socket
            self._wake.send(b"\0", socket.MSG_DONTWAIT)

    # --- Keeper thread: accepts connections, ends expired offers ---

    def _keep(self) -> None:
        while not self._closed:
            now = time.monotonic()
            with self._changed:
                self._wakes_at = math.inf  # makes new offers notify this thread
                offers = list(self._offers.values())
            for offer in offers:
                if offer.expires <= now:
                    self._end(offer, "expired")
            ends = [offer.expires - now for offer in offers if not offer.ended]
            ends.append(self._abort_blocked(now))
            with self._changed:
                self._wakes_at = now + min(ends)
            poll_s = self._engine.poll_s
            if poll_s is not None:
                try:
                    self._engine.poll()
                except Exception as error:  # one peer's error must not stop the others
                    cache_logger.warning("%s: the engine failed to make progress: %s", self, error)
                ends.append(poll_s)
            if protocol.any_readable((self._server, self._woken), min(ends)):
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._accept()
        with self._changed:
            for each in (self._server, self._wake, self._woken):
                each.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._closed:  # such as a temporary lack of file descriptors
                cache_logger.warning("cannot accept a connection: %s", error)
                time.sleep(0.05)
            return
        with self._changed:
            is_crowded = self._num_handshakes >= _MAX_CONCURRENT_HANDSHAKES
            if self._closed or is_crowded or not self._make_space():
                self._counts["dropped_connections"] += 1
                connection.close()
                return
            thread = threading.Thread(
                target=self._converse, args=(connection,), name="kvcupy pages", daemon=True
            )
            self._connections[connection] = thread
            self._num_handshakes += 1
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started
            cache_logger.warning("cannot serve a connection: %s", error)
            self._dropped(connection)

    def _make_space(self) -> bool:
        """Evict an idle connection if the maximum is reached; return whether one more fits."""
        if len(self._connections) - len(self._evicted) < self._max_connections:
            return True
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        self._evicted.add(oldest)
        protocol.shut_down(oldest)  # its receiver reconnects for the next pull
        return True

    def _dropped(self, connection: socket.socket) -> None:
        connection.close()
        with self._changed:
            self._num_handshakes -= 1
            self._connections.pop(connection, None)
            self._counts["dropped_connections"] += 1

    # --- Connection threads ---

    def _converse(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + protocol.HANDSHAKE_S
        accepted = connection
        try:
            connection.setblocking(True)
            if connection.family == socket.AF_UNIX:  # TCP sizes its buffers automatically
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                protocol.set_timeout(connection, deadline)
                connection = self._tls.wrap_socket(connection, server_side=True)
                with self._changed:
                    self._connections[connection] = self._connections.pop(accepted)
            channel, digest = protocol.as_sender(
                connection, self._secret, self._digest, self._id, deadline
            )
        except (Lost, OSError, ValueError, KeyError) as error:
            cache_logger.info("dropped a connection to %s: %s", self.address, error)
            with self._changed:
                self._connections.pop(accepted, None)
            self._dropped(connection)
            return
        with self._changed:
            self._num_handshakes -= 1
        try:
            while not self._closed and self._is_asked(channel, connection):
                _, request = channel.receive(time.monotonic() + protocol.HANDSHAKE_S, PULL)
                if not self._serve(channel, digest, request):
                    break
        except (Lost, TimeoutError, TransferError):
            pass  # the receiver has disconnected
        finally:
            channel.close()
            with self._changed:
                self._connections.pop(connection, None)
                self._evicted.discard(connection)

    def _is_asked(self, channel: Channel, connection: socket.socket) -> bool:
        """Wait for the next request; False if the connection is idle too long or evicted."""
        if channel.readable(0):
            return True
        with self._changed:
            self._idle[connection] = None
        is_asked = channel.readable(_IDLE_TIMEOUT_S)
        with self._changed:
            self._idle.pop(connection, None)
            return is_asked and connection not in self._evicted

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
        except (OrderError, TransferError) as error:
            failure = self._failed(offer, error) if isinstance(error, OrderError) else error
            self._leave(channel, offer, "refused_pulls")
            with suppress(Lost, TimeoutError):
                channel.refuse(failure.reason, str(failure), time.monotonic() + 1)
            return False
        except (Lost, TimeoutError) as error:
            cache_logger.info("incomplete pull from %s: %s", self.address, error)
            self._leave(channel, offer, "lost_pulls")
            return False
        except BaseException as error:
            cache_logger.exception("failed pull from %s: %s", self.address, error)
            self._leave(channel, offer, "lost_pulls")
            return False
        with suppress(Lost, TimeoutError):
            channel.send(CONFIRMED, b"", time.monotonic() + 1)
            return True
        return False

    def _claim(
        self, channel: Channel, number: int, generation: int, token: bytes
    ) -> tuple[_Offer | None, tuple[str, str]]:
        """Return the offer that a pull names, or (reason, message) of a refusal."""
        with self._changed:
            offer = self._offers.get(number)
            if offer is None:
                reason = self._ended.get(number, "ticket")
                if reason in ("completed", "failed"):
                    reason = "taken" if reason == "completed" else reason
                message = "no such offer" if reason == "ticket" else f"the offer: {reason}"
                return None, (reason, message)
            known = offer.generation == generation and hmac.compare_digest(offer.token, token)
            if not known:
                return None, ("ticket", "no such offer")
            if offer.completed + len(offer.channels) >= offer.num_pulls:
                return None, ("taken", f"the offer: all {offer.num_pulls} pulls are taken")
            offer.channels.add(channel)
            offer.expires = max(offer.expires, time.monotonic() + offer.lease_s)
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
            renew=partial(self._renew, offer),
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
                self._renew(offer)
            self._check(offer)
        finally:
            with self._changed:
                self._counts["sent_bytes"] += channel.num_bytes - before
                channel.moving = False
        self._leave(channel, offer)

    def _leave(self, channel: Channel, offer: _Offer, lost: str = "") -> None:
        """Record the end of a pull, and end the offer if the pull was the last."""
        with self._changed:
            offer.channels.discard(channel)
            if lost:
                self._counts[lost] += 1
            else:
                offer.completed += 1
            is_last = offer.completed >= offer.num_pulls
        if is_last:
            self._end(offer, "completed")
        self._settle(offer)
        if self._engine.poll_s is not None:
            self._notify()

    def _refuse(self, channel: Channel, reason: str, message: str) -> bool:
        with self._changed:
            self._counts["refused_pulls"] += 1
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
        with self._changed:
            self._check(offer)
            offer.num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                offer.num_readers -= 1
            self._settle(offer)

    def _check(self, offer: _Offer) -> None:
        if offer.ended:
            raise TransferError(f"the offer: {offer.ended}", offer.ended)

    def _renew(self, offer: _Offer) -> None:
        offer.expires = time.monotonic() + offer.lease_s

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
    "dropped_connections", "sent_bytes",
)  # fmt: skip


def _samples(sender: PageSender) -> Iterator[tuple[str, metrics.Labels, float]]:
    stats = sender.stats()
    yield from _totals(stats)
    yield "kvcupy_migration_offered_pages", (), stats["offered_pages"]


def _totals(counts: Mapping[str, int]) -> Iterator[tuple[str, metrics.Labels, float]]:
    for name in ("completed", "expired", "withdrawn", "failed", "closed"):
        yield "kvcupy_migration_offers_total", (("outcome", name),), counts[name]
    yield "kvcupy_migration_bytes_total", (("direction", "sent"),), counts["sent_bytes"]


def _inode(path: str) -> int:
    return Path(path).stat().st_ino


def _unlink(path: str, inode: int) -> None:
    """Remove a socket, unless another socket has replaced it."""
    with suppress(OSError):
        if _inode(path) == inode:
            Path(path).unlink()
