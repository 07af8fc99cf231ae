"""Engines, which move the bytes of a pull, and the sender's and receiver's interfaces to them.

A pull is one connection, with a thread at each end. After the grant, both ends call their engine,
which moves the layers in order. `SocketEngine` sends them over the same connection.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ...cache.pages import Pages
from ...errors import TransferError
from .layers import PageBytes, Staging
from .protocol import CHECKSUM, LAYER, MIN_MESSAGE_BYTES, RENEW, START, Channel, Lost

if TYPE_CHECKING:
    from ...cache.pool import Pool
    from ...devices.protocol import Stream

_READY_POLL_S = 0.001  # interval of checks for a layer that is not ready
_START_POLL_S = 0.01  # interval of checks for a cancelled offer, until the receiver's START
_MAX_GROUP_BYTES = 1 << 20  # of ready layers that are sent under one checksum
_LAYER = struct.Struct(">IIQ")  # first layer, number of layers, bytes
_CHECKSUM = struct.Struct(">IIQ")  # first layer, number of layers, checksum


class Engine(Protocol):
    """Moves layers of pages from a sender's pool to a receiver's pool.

    Each sender and each receiver has one engine. It is made with the pool, which it may register
    with a network. It may access only the pages of the pulls that it is called for.

    Attributes
    ----------
    name : name that users pass; both ends must use the same engine
    poll_s : interval in which the sender calls `poll`; None for no calls. The sender reads it again
        after each pull
    staged : whether the engine moves pages through `layers.PageBytes`, and therefore through a
        `Staging` if the host cannot address the pool; else the engine accesses the pool directly
    bounded : whether `quiet` becomes true soon after an abandoned pull, so that callers can wait
        for the pages
    """

    name: str
    staged: bool
    bounded: bool

    @property
    def poll_s(self) -> float | None: ...

    def describe(self) -> bytes:
        """Return up to 512 KiB of data for the peer's engine. It is sent over the authenticated
        connection: the receiver's with PULL, the sender's with GRANT."""
        ...

    def offered(self, offered: Offered) -> None:
        """Notify the engine of a new offer. The engine may prepare it in a separate thread."""

    def serve(self, service: Service) -> None:
        """Send every layer once it is ready; return when all layers are sent, or when the receiver
        confirms them. An exception ends the pull; the engine then reads no more pages."""
        ...

    def pull(self, task: PullTask) -> None:
        """Receive every layer, and call `task.arrived(layer)` for each in order, once the layer is
        complete and verified. An exception fails the pull."""
        ...

    def quiet(self, task: PullTask) -> bool:
        """Return whether no more bytes can arrive in the pages of a pull, after `pull` raised."""
        ...

    def poll(self) -> None:
        """Make progress, if the engine has no progress thread."""

    def close(self, deadline: float) -> None:
        """Release all resources."""


class Offered:
    """Pages that a sender offers.

    Attributes
    ----------
    pool, pages : int64 (n,)
    number, generation : identify the offer
    key : key of checksums that do not depend on a connection; receivers derive it from the ticket
    check : raises TransferError if the offer has ended
    is_ready : returns whether a layer has been written; TransferError if its write has failed
    reading : context in which a thread that serves no pull may read the pages; TransferError if
        the offer has ended
    prepared : the engine's data for this offer, by keys that the engine chooses
    """

    def __init__(
        self, pool: Pool, pages: Pages, *, number: int, generation: int, key: bytes,
        check: Callable[[], None], is_ready: Callable[[int], bool],
        reading: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self.pool, self.pages = pool, pages
        self.number, self.generation, self.key = number, generation, key
        self.check, self.is_ready, self.reading = check, is_ready, reading
        self.prepared: dict[Any, Any] = {}


class Service:
    """The sender's side of one pull.

    Attributes
    ----------
    channel : the connection
    offered : the offered pages
    pool, pages, number, generation : same as in `offered`
    heads : requested range of the pool's heads
    peer : result of `describe` of the receiver's engine
    lease_s : maximum time between messages of the peer
    run_pages : number of pages per run of a layer (see `layers`)
    """

    def __init__(
        self, channel: Channel, offered: Offered, heads: range, *, peer: bytes, lease_s: float,
        run_pages: int, page_bytes: PageBytes, staging: Staging | None,
        stream: Callable[[], Stream], renew: Callable[[], None],
    ) -> None:  # fmt: skip
        self.channel, self.offered, self.heads = channel, offered, heads
        self.pool, self.pages = offered.pool, offered.pages
        self.number, self.generation, self.peer = offered.number, offered.generation, peer
        self.lease_s, self.run_pages = lease_s, run_pages
        self.page_bytes, self.staging, self.stream = page_bytes, staging, stream
        self.check, self.renew = offered.check, renew

    def is_ready(self, layer: int) -> bool:
        return self.offered.is_ready(layer)

    def wait_ready(self, layer: int) -> None:
        """Wait until a layer has been written, and accept lease renewals meanwhile.

        Raises
        ------
        TransferError : the offer has ended, or the write of the layer has failed
        Lost : the connection has ended
        """
        while True:
            self.check()
            if self.is_ready(layer):
                return
            self.flush()
            self.hear(_READY_POLL_S)

    def hear(self, deadline_s: float = 0.0) -> None:
        """Renew the lease if the receiver requests it within `deadline_s`.

        Raises
        ------
        TransferError, Lost : as `wait_ready`
        """
        self.check()
        if self.channel.readable(deadline_s):
            self.channel.receive(self.deadline(), RENEW)
            self.renew()

    def wait_start(self) -> None:
        """Wait for the receiver's START, while it renews the lease.

        Raises
        ------
        TransferError, Lost : as `wait_ready`
        """
        self.flush()
        while True:
            self.check()
            if self.channel.readable(_START_POLL_S):
                if self.channel.receive(self.deadline(), START, RENEW)[0] == START:
                    return
                self.renew()

    def flush(self) -> None:
        """Send buffered messages. Ending the offer aborts the call if the receiver is stopped.

        Raises
        ------
        TransferError, Lost : as `wait_ready`
        """
        self.channel.moving = True
        try:
            self.check()
            self.channel.flush(self.deadline())
        finally:
            self.channel.moving = False

    def deadline(self) -> float:
        """Return the time by which the receiver must respond."""
        return time.monotonic() + self.lease_s


class PullTask:
    """The receiver's side of one pull from one sender.

    Attributes
    ----------
    channel : the connection
    pool, pages : int64 (n,), destination of the pages
    heads : range of the pool's heads to receive
    number, generation, key : identify the offer (see `Offered`)
    peer : result of `describe` of the sender's engine
    deadline : of the whole pull, a value of time.monotonic
    lease_s : maximum time between messages of this end
    run_pages : number of pages per run of a layer (see `layers`)
    """

    def __init__(
        self, channel: Channel, pool: Pool, pages: Pages, heads: range, *, number: int,
        generation: int, key: bytes, peer: bytes, lease_s: float, deadline: float, run_pages: int,
        page_bytes: PageBytes, staging: Staging | None, stream: Callable[[], Stream],
        check: Callable[[], None], arrived: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.channel, self.pool, self.pages, self.heads = channel, pool, pages, heads
        self.number, self.generation, self.key, self.peer = number, generation, key, peer
        self.lease_s, self.deadline, self.run_pages = lease_s, deadline, run_pages
        self.page_bytes, self.staging, self.stream = page_bytes, staging, stream
        self.check, self.arrived = check, arrived
        self._renew_at = time.monotonic() + lease_s / 3

    def receive(self, *kinds: int) -> tuple[int, bytes]:
        """Return the next message, and renew the lease until it arrives.

        Raises
        ------
        TransferError : the sender has refused, or the pull is cancelled
        Lost : the connection has ended
        TimeoutError : the deadline has passed
        """
        self.wait_readable()
        return self.channel.receive(self.deadline, *kinds)

    def wait_readable(self) -> None:
        """Wait until the connection is readable, and renew the lease until then.

        Raises
        ------
        TransferError, Lost, TimeoutError : as `receive`
        """
        while True:
            if time.monotonic() >= self.deadline:
                raise TimeoutError("timed out")
            is_readable = self.channel.readable(self.next_keep_s)
            self.check()
            if is_readable:
                return
            self.renew_if_due()

    def keep(self) -> None:
        """Renew the lease if due.

        Raises
        ------
        TransferError : the pull has failed
        TimeoutError : its deadline has passed
        """
        self.check()
        if time.monotonic() >= self.deadline:
            raise TimeoutError("timed out")
        self.renew_if_due()

    @property
    def next_keep_s(self) -> float:
        """Seconds until `keep` is due."""
        return max(0.0, min(self._renew_at, self.deadline) - time.monotonic())

    def renew_if_due(self) -> None:
        """Renew the lease if a third of it has passed since the last renewal."""
        if time.monotonic() >= self._renew_at:
            self.channel.send(RENEW, b"", self.deadline)
            self._renew_at = time.monotonic() + self.lease_s / 3


class SocketEngine:
    """Sends layers over the connection of the pull.

    Small layers that are ready at the same time are sent as one group under one checksum. A group
    is complete when its checksum is verified. Only the thread of a pull writes to its pages, so no
    bytes arrive after that thread has ended.
    """

    name = "socket"
    poll_s: float | None = None
    staged = True
    bounded = True

    def __init__(self, pool: Pool) -> None:
        del pool

    def describe(self) -> bytes:
        return b""

    def offered(self, offered: Offered) -> None:
        """Do nothing: bytes are checksummed as they are sent, while they are in the CPU cache."""

    def serve(self, service: Service) -> None:
        channel, runs = service.channel, _runs_of(service.pages, service.run_pages)
        layers = range(0)
        while layers.stop < service.pool.num_layers:
            first = layers.stop
            service.wait_ready(first)
            layers = _ready_layers(service, first)
            channel.send(LAYER, _announcement(service, layers), service.deadline(), more=True)
            while layers:
                layers = self._send_group(service, runs, layers)

    def _send_group(self, service: Service, runs: list[Pages], layers: range) -> range:
        """Send a group of ready layers; return the next group, empty if none is ready."""
        checksum = service.channel.checksum(
            service.number, service.generation, layers.start, len(layers)
        )
        following = range(layers.stop, layers.stop)
        for run in runs:
            is_last = run is runs[-1]
            if service.staging is None:
                following = self._send(service, run, layers, checksum, is_last)
                continue
            service.flush()
            # Needs no deadline: the offer ends if the receiver does not renew the lease.
            with service.staging.borrowed(len(run), math.inf, service.hear) as staged:
                for layer in layers:
                    service.staging.save(run, staged, layer, service.stream())
                following = self._send(service, staged, layers, checksum, is_last)
        return following

    def _send(
        self, service: Service, pages: Pages, layers: range, checksum: Any, is_last: bool
    ) -> range:
        """Send pages of some layers. Append the checksum, and the announcement of the next group
        if it is ready, to the last bytes. Return the next group."""
        channel, end = service.channel, None
        following = range(layers.stop, layers.stop)
        left = len(layers) * len(pages) * service.page_bytes.page_bytes
        channel.moving = True  # from now on, ending the offer aborts the channel
        for views, num_bytes in service.page_bytes.reading(pages, layers):
            service.check()
            for view in views:
                checksum.update(view)
            left -= num_bytes
            if is_last and not left:
                following = _ready_layers(service, layers.stop)
                tail = _CHECKSUM.pack(layers.start, len(layers), checksum.intdigest())
                end = CHECKSUM, tail + _announcement(service, following)
            channel.send_data(views, num_bytes, service.deadline(), end)
            service.renew()  # the receiver accepts bytes, so it is alive
        channel.moving = False
        return following

    def pull(self, task: PullTask) -> None:
        layer_bytes = len(task.pages) * task.page_bytes.page_bytes
        runs = _runs_of(task.pages, task.run_pages)
        stop, head = 0, b""
        while stop < task.pool.num_layers:
            head = head or task.receive(LAYER)[1]
            layers = self._announced(head, stop, task.pool.num_layers, layer_bytes)
            stop = layers.stop
            checksum = task.channel.checksum(
                task.number, task.generation, layers.start, len(layers)
            )
            first = bytearray(MIN_MESSAGE_BYTES)  # start of the message after the layers
            for run in runs:
                task.wait_readable()  # the sender may be waiting for staging pages
                message = first if run is runs[-1] else None
                if task.staging is None:
                    self._receive(task, run, layers, checksum, message)
                    continue
                with task.staging.borrowed(len(run), task.deadline, task.keep) as staged:
                    self._receive(task, staged, layers, checksum, message)
                    for layer in layers:
                        task.staging.load(staged, run, layer, task.stream())
            _, tail = task.channel.received(first, task.deadline, CHECKSUM)
            expected, head = tail[: _CHECKSUM.size], tail[_CHECKSUM.size :]
            if expected != _CHECKSUM.pack(layers.start, len(layers), checksum.intdigest()):
                last = f" to {stop - 1}" if len(layers) > 1 else ""
                raise TransferError(f"layer {layers.start}{last}: checksum mismatch", "corrupt")
            for layer in layers:
                task.arrived(layer)

    def _announced(self, head: bytes, first: int, num_layers: int, layer_bytes: int) -> range:
        """Parse an announcement; Lost unless it names the next layers with their size."""
        if len(head) == _LAYER.size:
            start, count, num_bytes = _LAYER.unpack(head)
            is_next = start == first and 1 <= count <= num_layers - first
            if is_next and num_bytes == count * layer_bytes:
                return range(first, first + count)
        raise Lost("the sender announced an unexpected layer")

    def _receive(
        self, task: PullTask, pages: Pages, layers: range, checksum: Any,
        message: bytearray | None,
    ) -> None:  # fmt: skip
        left = len(layers) * len(pages) * task.page_bytes.page_bytes
        for views, num_bytes in task.page_bytes.writing(pages, layers):
            task.check()
            task.renew_if_due()
            left -= num_bytes
            task.channel.receive_data(views, num_bytes, task.deadline, None if left else message)
            for view in views:
                checksum.update(view)

    def quiet(self, task: PullTask) -> bool:
        return True

    def poll(self) -> None:
        """Do nothing: each pull has a thread."""

    def close(self, deadline: float) -> None:
        """Do nothing: senders and receivers close their connections."""


def _ready_layers(service: Service, first: int) -> range:
    """Return the ready layers from `first` on that form the next group; empty if none is ready."""
    layer_bytes = len(service.pages) * service.page_bytes.page_bytes
    max_layers = max(1, _MAX_GROUP_BYTES // max(1, layer_bytes))
    end = min(first + max_layers, service.pool.num_layers)
    stop = first
    while stop < end and service.is_ready(stop):
        stop += 1
    return range(first, stop)


def _announcement(service: Service, layers: range) -> bytes:
    """Return the payload that announces a group of layers, empty for no layers."""
    num_bytes = len(layers) * len(service.pages) * service.page_bytes.page_bytes
    return _LAYER.pack(layers.start, len(layers), num_bytes) if layers else b""


def _runs_of(pages: Pages, run_pages: int) -> list[Pages]:
    return [pages[i : i + run_pages] for i in range(0, len(pages), run_pages)]
