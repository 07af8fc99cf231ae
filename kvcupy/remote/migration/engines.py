"""What moves the bytes of a pull, and what sender and receiver give it to work with.

A pull is one connection, with a thread at each end. Behind the grant both call their engine, which
moves the layers in order. `socket` sends them over that same connection.
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

_POLL_S = 0.001  # while a layer that is asked for is not ready
_START_POLL_S = 0.01  # whether the offer is over, while pages of the receiver are still in use
_TOGETHER_BYTES = 1 << 20  # of layers that are ready at the same time, and so go together
_LAYER = struct.Struct(">IIQ")  # the first, how many, their bytes
_CHECKSUM = struct.Struct(">IIQ")  # the first, how many, their checksum


class Engine(Protocol):
    """Moves layers of pages between a sender's pool and a receiver's.

    A sender and a receiver each have one. It is made with the pool, which it may register with a
    network; the pages that it may touch are those of the pulls that it is called for.

    Attributes
    ----------
    name : that users pass, and that both ends must share
    poll_s : how often the sender calls `poll` now; None: not at all. It is asked again when a pull
        is over
    staged : whether it moves pages by `layers.PageBytes`, and so those of a pool that the host
        cannot address by way of a `Staging`; else it must reach the pool by itself
    bounded : whether `quiet` is true soon after every pull that was given up, so that who needs its
        pages may wait for that
    """

    name: str
    staged: bool
    bounded: bool

    @property
    def poll_s(self) -> float | None: ...

    def describe(self) -> bytes:
        """Return what the engine of the peer must know of this one, in at most 512 KiB. It goes
        over the authenticated connection: the receiver's with PULL, the sender's with GRANT."""
        ...

    def offered(self, offered: Offered) -> None:
        """Hear of pages that may be pulled from now on; what can be done ahead is done by a thread
        of the engine's own."""

    def serve(self, service: Service) -> None:
        """Let the receiver have every layer, each once it is ready; return when it says that it has
        them. Whatever is raised ends the pull, and pages are no longer read then."""
        ...

    def pull(self, task: PullTask) -> None:
        """Bring every layer into the pages, and call `task.arrived(layer)` for each in order, once
        it is complete and verified. Whatever is raised fails the pull."""
        ...

    def quiet(self, task: PullTask) -> bool:
        """Return whether nothing can land in the pages of a pull any more, after `pull` raised."""
        ...

    def poll(self) -> None:
        """Make progress, where the engine has no thread that does."""

    def close(self, deadline: float) -> None:
        """Give up what the engine holds."""


class Offered:
    """Pages that a sender offers.

    Attributes
    ----------
    pool, pages : int64 (n,)
    number, generation : of the offer
    key : of checksums that do not depend on a connection; receivers derive it from the ticket
    check : raises TransferError if the offer is over
    is_ready : returns whether a layer has been written; TransferError if it never will be
    reading : context in which a thread that serves no pull may read them; TransferError if the
        offer is over
    prepared : what the engine keeps with them, by a key of its own
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
    """One pull as its sender sees it.

    Attributes
    ----------
    channel : the connection
    offered : the pages
    pool, pages, number, generation : of them
    heads : of the pool, those that are asked for
    peer : what the receiver's engine described
    lease_s : how long the peer may be silent
    run_pages : that a layer is sent in runs of (see `layers`)
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
        """Return whether a layer has been written."""
        return self.offered.is_ready(layer)

    def wait_ready(self, layer: int) -> None:
        """Wait until a layer has been written, and answer the receiver meanwhile.

        Raises
        ------
        TransferError : the offer is over, or what should write the layer has failed
        Lost : the receiver is gone
        """
        while True:
            self.check()
            if self.is_ready(layer):
                return
            self.flush()
            self.hear(_POLL_S)

    def hear(self, deadline_s: float = 0.0) -> None:
        """Renew the lease if the receiver asks for that within a time.

        Raises
        ------
        TransferError, Lost : as `wait_ready`
        """
        self.check()
        if self.channel.readable(deadline_s):
            self.channel.receive(self.deadline(), RENEW)
            self.renew()

    def wait_start(self) -> None:
        """Wait until the receiver can take pages, for as long as it renews the lease.

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
        """Send what is kept back; who ends the offer does not wait for a receiver that is stopped.

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
        """Return until when the receiver has to react to what is done now."""
        return time.monotonic() + self.lease_s


class PullTask:
    """One pull, or one sender's part of it, as its receiver sees it.

    Attributes
    ----------
    channel : the connection
    pool, pages : int64 (n,), where the pages go
    heads : of the pool, those that come
    number, generation, key : of the offer (see `Offered`)
    peer : what the sender's engine described
    deadline : of the whole pull, a value of time.monotonic
    lease_s : how long this end may be silent
    run_pages : that a layer is sent in runs of (see `layers`)
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
        """Return the next message, and renew the lease as long as there is none.

        Raises
        ------
        TransferError : the sender has refused, or the pull is cancelled
        Lost, TimeoutError : there will be none, or not in time
        """
        self.wait_readable()
        return self.channel.receive(self.deadline, *kinds)

    def wait_readable(self) -> None:
        """Wait until something comes, and renew the lease as long as nothing does.

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
        """Renew the lease if that is due, and go on.

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
        """Seconds in which `keep` is due again."""
        return max(0.0, min(self._renew_at, self.deadline) - time.monotonic())

    def renew_if_due(self) -> None:
        """Renew the lease, if a third of it has passed since the last time."""
        if time.monotonic() >= self._renew_at:
            self.channel.send(RENEW, b"", self.deadline)
            self._renew_at = time.monotonic() + self.lease_s / 3


class SocketEngine:
    """Sends layers over the connection on which they were asked for. Both ends take part.

    Small layers that are ready at the same time go together, under one checksum. They are complete
    when that is right, and nothing lands in pages of a pull after its thread has ended: it is that
    thread which puts bytes there.
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
        """Nothing: bytes are checksummed as they are sent, while the processor has them."""

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
        """Send some layers that are ready; return those that come next, if some are ready too."""
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
            # No deadline of its own: who does not renew the lease ends the offer, and so this.
            with service.staging.borrowed(len(run), math.inf, service.hear) as staged:
                for layer in layers:
                    service.staging.save(run, staged, layer, service.stream())
                following = self._send(service, staged, layers, checksum, is_last)
        return following

    def _send(
        self, service: Service, pages: Pages, layers: range, checksum: Any, is_last: bool
    ) -> range:
        """Send pages of some layers; and along with the last bytes of them the checksum, and which
        layers come next, if some are ready. Return these."""
        channel, end = service.channel, None
        following = range(layers.stop, layers.stop)
        left = len(layers) * len(pages) * service.page_bytes.page_bytes
        channel.moving = True  # whoever ends the offer from now on aborts the channel
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
            service.renew()  # the receiver takes what is sent: it lives
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
            first = bytearray(MIN_MESSAGE_BYTES)  # of the message behind the layers
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
                raise TransferError(f"layer {layers.start}{last}: the checksum is wrong", "corrupt")
            for layer in layers:
                task.arrived(layer)

    def _announced(self, head: bytes, first: int, num_layers: int, layer_bytes: int) -> range:
        """Return the layers that come next; Lost unless they are those, and of their size."""
        if len(head) == _LAYER.size:
            start, count, num_bytes = _LAYER.unpack(head)
            is_next = start == first and 1 <= count <= num_layers - first
            if is_next and num_bytes == count * layer_bytes:
                return range(first, first + count)
        raise Lost("the sender sends other layers than the next")

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
        """Nothing: each pull has a thread."""

    def close(self, deadline: float) -> None:
        """Nothing: connections are closed by their owners."""


def _ready_layers(service: Service, first: int) -> range:
    """Return the layers from `first` on that are ready, and go together; at least one, if any."""
    layer_bytes = len(service.pages) * service.page_bytes.page_bytes
    most = max(1, _TOGETHER_BYTES // max(1, layer_bytes))
    end = min(first + most, service.pool.num_layers)
    stop = first
    while stop < end and service.is_ready(stop):
        stop += 1
    return range(first, stop)


def _announcement(service: Service, layers: range) -> bytes:
    """Return what says that layers come next, empty for none."""
    num_bytes = len(layers) * len(service.pages) * service.page_bytes.page_bytes
    return _LAYER.pack(layers.start, len(layers), num_bytes) if layers else b""


def _runs_of(pages: Pages, run_pages: int) -> list[Pages]:
    return [pages[i : i + run_pages] for i in range(0, len(pages), run_pages)]
