"""PageReceiver: fetches pages that another process offers, layer by layer."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import checks, observe
from ...cache.hazards import Completion, StreamCompletion, waiting_stream
from ...cache.identity import PoolIdentity
from ...cache.pages import Pages, page_array
from ...checks import positive_seconds
from ...config import cache_logger
from ...errors import DeviceError, ProcessLocal, TransferError, transfer_failure
from ...observe import Operation
from ...streams import stream_after
from ...waiting import Latch, Waiters
from .agent import Reading
from .endpoint import Endpoint, Sample, accesses
from .memory import PoolMemory, cut
from .ticket import STATUS_BYTES, Status, Ticket

if TYPE_CHECKING:
    from ...devices.protocol import Event, Stream

_READ_BYTES = 8 << 20
_MAX_READS = 2  # in flight, of a pull
_MAX_PULLS = 1024  # in flight; others wait for one to end
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5e-5, 1e-3  # between READs of a status
_ABANDONED_POLL_S = 0.5  # interval of checks for pulls that an interrupt kept from starting
_COUNTS = ("completed", "failed", "cancelled", "received_bytes")
_ENDED = {"completed": "taken"}  # reasons of a TransferError by outcome, where they differ

monotonic = time.monotonic


class Landing(Completion):
    """The `Completion` for allocators: done once no bytes can arrive in the pages of a pull.

    Also done once the pull is gone: the receiver holds it while it is in progress.
    """

    failure: BaseException | None = None  # `Pull.failure` has the error
    unbounded = True  # a stopped peer may resume at any time, or never

    def __init__(self, pull: Pull) -> None:
        self._pull = weakref.ref(pull)
        self._over = Latch()

    def end(self) -> None:
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set() or self._pull() is None

    def synchronize(self, deadline_s: float | None = None) -> None:
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        while not self.done() and (left_s := deadline - time.monotonic()) > 0:
            self._over.wait(min(left_s, _ABANDONED_POLL_S))

    def wait(self, stream: Any = None) -> None:
        self.synchronize()


class _Target(NamedTuple):
    """Pages of the receiver for a part of a ticket."""

    memory: PoolMemory
    pages: Pages


class Pull(ProcessLocal):
    """A pull in progress, returned by `PageReceiver.pull`: a `Completion`.

    Attributes
    ----------
    num_bytes : bytes of the pages to receive
    failure : TransferError with the reason of a failure, or None. Neither waits nor raises

    Notes
    -----
    A failed pull leaves the contents of its pages undefined. Cancelled and late pulls have failed.
    """

    _instead = "pull in each process"
    start = None  # the pages belong to the pull from the call on

    def __init__(
        self, ticket: Ticket, targets: Sequence[_Target | None], layers: Mapping[int, int],
        deadline: float, after: StreamCompletion,
    ) -> None:  # fmt: skip
        self._ticket, self._targets = ticket, targets
        self._layers = layers  # number of the unit with which a layer is complete
        self._deadline, self._after = deadline, after
        into = [target for target in targets if target is not None]
        self._num_pages = sum(len(target.pages) for target in into)
        self.num_bytes = sum(len(t.pages) * t.memory.pool.page_bytes for t in into)
        self.failure: TransferError | None = None
        self._landing = Landing(self)
        self._device = into[0].memory.pool.device
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._num_units, self._num_arrived = len(ticket.units), 0
        # For the receiver's thread:
        self._steps: Iterator[bool] | None = None  # none yet
        self._reads: list[Reading] = []  # that may still write
        self._slot: int | None = None
        self._is_connected = False
        # Created when a stream first waits.
        self._stream: Stream | None = None
        self.layer_events: list[Event] = []  # of the first units

    def __repr__(self) -> str:
        state = f"{self._num_arrived} of {self._num_units} layers"
        return f"<Pull of {self._num_pages} pages, {'failed' if self.failure else state}>"

    # --- For users ---

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make later work of a stream wait until a layer has arrived.

        Parameters
        ----------
        layer : number of a layer; of a sequence, of a layer of the model
        stream : Stream, or a CuPy or torch stream; None for the current stream. The host does not
            block, unless the stream is the calling thread

        Raises
        ------
        TypeError, ValueError : `layer` is out of range, or `stream` is not a stream
        CaptureError : the stream is being captured
        TransferError : the pull has failed. If it fails later, the stream's work on the host device
            fails too; on a GPU the work runs on undefined pages, so check `failure` before using
            its results
        """
        checks.require_int(layer, "layer")
        unit = self._layers.get(int(layer))
        if unit is None:
            last = max(self._layers)
            raise ValueError(f"layer: expected a layer of the pull, up to {last}, got {layer}")
        self._wait(unit, stream)

    def wait(self, stream: Any = None) -> None:
        """Make later work of a stream wait for all layers; otherwise like `wait_layer`."""
        self._wait(self._num_units - 1, stream)

    def done(self) -> bool:
        """Return whether all layers have arrived. TransferError if the pull has failed."""
        self._raise_failure()
        return self._landing.done()

    def synchronize(self) -> None:
        """Wait until all layers have arrived, or the pull has failed and no bytes can arrive.

        TransferError if the pull has failed.
        """
        self._landing.synchronize()
        self._raise_failure()

    def cancel(self) -> None:
        """Cancel the pull, unless all layers have arrived or it has failed. Does not wait.

        Pages that are freed become free when no bytes can arrive in them, for which `synchronize`
        waits.
        """
        self._fail(TransferError("the pull was cancelled", "cancelled"))

    def _part(self, layers: Mapping[int, int]) -> PullPart:
        return PullPart(self, layers)

    # --- Waiting ---

    @property
    def end(self) -> Event | None:
        return self.layer_events[-1] if self.layer_events else None

    def _wait(self, unit: int, stream: Any) -> None:
        waiting = waiting_stream(self._device, stream, "a pull")
        self._raise_failure()
        if self._num_arrived > unit and not observe.order_observers:
            return
        event = self._event_of(unit)
        try:
            waiting.wait(event)
        except DeviceError:
            self._raise_failure()
            raise
        if self._num_arrived <= unit:
            self._raise_failure()

    def _event_of(self, unit: int) -> Event:
        """Return an event that completes when a unit has arrived."""
        with self._lock:
            self._raise_failure()
            if self._stream is None:
                self._stream = self._device.stream()
                self._stream.name = "pull"
                if observe.order_observers:
                    self._after.wait(self._stream)  # for observers: the thread waits too
            stream = self._stream
            while len(self.layer_events) <= unit:
                number = len(self.layer_events)
                observe.issue(
                    partial(self._operation, number, stream),
                    partial(stream.call, partial(self._await_unit, number)),
                )
                self.layer_events.append(stream.record())
            return self.layer_events[unit]

    def _operation(self, unit: int, stream: Any) -> Operation:
        part, layer = self._ticket.units[unit]
        target = self._targets[part]
        writes = () if target is None else accesses(target.memory.pool, target.pages, layer)
        return Operation(f"pull {layer}", stream, (), tuple(writes))

    def _await_unit(self, unit: int) -> None:
        self._changed.wait_for(lambda: self._num_arrived > unit or self.failure is not None)
        if self._num_arrived <= unit:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if (failure := self.failure) is not None:
            raise transfer_failure(str(failure), failure.reason, failure)

    # --- For the receiver ---

    def _arrive(self, num_units: int) -> None:
        """Pass on the first units."""
        with self._lock:
            self._changed.notify()
            if self.failure is None:
                self._num_arrived = num_units

    def _fail(self, failure: TransferError) -> None:
        """Fail the pull, unless all layers have arrived; the first failure stays."""
        with self._lock:
            self._changed.notify()
            if self.failure is None and self._num_arrived < self._num_units:
                self.failure = failure

    def _settle(self) -> None:
        """Note that no more bytes arrive in the pages."""
        try:
            if self.failure is None:
                for target in filter(None, self._targets):
                    target.memory.pool.note_written()
                if observe.order_observers and self._stream is not None:
                    self._stream.synchronize()  # notifies observers of the host's wait
            elif self._stream is not None:  # private stream; `failure` has the error
                with suppress(DeviceError):
                    self._stream.synchronize()
                self._stream, self.layer_events = None, []
        finally:
            self._landing.end()


class PullPart(Completion):
    """Some layers of a pull, by layer the number of its unit: what a sequence waits for."""

    def __init__(self, pull: Pull, layers: Mapping[int, int]) -> None:
        self._pull, self._layers = pull, layers
        self._last = max(layers.values())

    @property
    def failure(self) -> BaseException | None:
        return self._pull.failure

    def done(self) -> bool:
        return self._pull.done()

    def synchronize(self) -> None:
        self._pull.synchronize()

    def wait(self, stream: Any = None) -> None:
        self._pull._wait(self._last, stream)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self._pull._wait(self._layers[layer], stream)


class PageReceiver(Endpoint):
    """Fetches pages that a `PageSender` of another process, or of this one, offers.

    Parameters
    ----------
    pool : KVPool or MLAPool in host memory, with the sender's format, page size, layers, heads and
        widths; the layout may differ. Or a PagedKVCache, for `import_sequence`
    secret : the sender's

    Raises
    ------
    TypeError, ValueError, ImportError, KvcupyError : as for `PageSender`

    Notes
    -----
    Capture: illegal; a pull cannot be part of a capture. Lifetime: a daemon thread from the first
    pull until `close`. Threads may share a receiver. See `PageSender` for an example, and for what
    is trusted.
    """

    _idle_pause_s, _idle_s = 1e-3, 0.1  # for the last notification

    def __init__(self, pool: Any, *, secret: bytes | None = None) -> None:
        super().__init__(pool, secret, _MAX_PULLS)
        self._pulls: list[Pull] = []  # whose pages may be written
        self._in_use = self._pulls
        self._free_slots = deque(range(_MAX_PULLS))

    def __repr__(self) -> str:
        return f"<PageReceiver into {self.pools[0]!r}, {len(self._pulls)} pulls>"

    # --- For users ---

    def inspect(self, ticket: bytes) -> Ticket:
        """Decode a ticket: `num_pages` and `hashes`, among others. Sends nothing.

        TypeError if it is not bytes, TransferError if it is damaged or made with another secret.
        """
        return Ticket.decoded(ticket, self._key)

    def pull(self, ticket: bytes, pages: Any, *, deadline_s: float = 30.0) -> Pull:
        """Fetch the pages of a ticket into pages of the pool, in the background.

        Parameters
        ----------
        ticket : of `PageSender.offer`
        pages : int32 or int64 (N,) on the host, or a list of ints: destination pages of the pool,
            in order, as many as offered, without duplicates. The caller keeps owning them. Pages
            freed during the pull become free once no more bytes can arrive in them. That may be
            never, while a sender is stopped: `alloc` does not wait for such pages
        deadline_s : seconds until the pull is late

        Returns
        -------
        Pull : a handle to wait on or cancel

        Raises
        ------
        TypeError, ValueError : an argument is invalid, such as a wrong number of pages
        TransferError : the ticket is damaged or made with another secret, or the pools differ. No
            page is written
        CaptureError : the current stream is being captured
        KvcupyError : the receiver is closed

        Notes
        -----
        Does not block. Pages are written once the current stream has completed the work enqueued
        before this call. Bytes: each page once.
        """
        decoded = Ticket.decoded(ticket, self._key)
        if len(decoded.parts) != 1 or len(self.pools) != 1:
            raise ValueError("ticket: expected one of PageSender.offer, for a pool; use "
                             "PagedKVCache.import_sequence")  # fmt: skip
        (pool,) = self.pools
        listed = page_array(pages)
        ordered: Pages = np.array(listed, np.int64)
        outside = ordered[(ordered < 0) | (ordered >= pool.num_pages)]
        if len(outside):
            raise ValueError(f"pages: expected 0 to {pool.num_pages - 1}, got {outside[0]}")
        if len(np.unique(ordered)) < len(ordered):
            raise ValueError("pages: expected each page once")
        if decoded.num_pages != len(ordered):
            raise ValueError(
                f"pages: expected {decoded.num_pages}, as many as are offered, got {len(ordered)}"
            )
        stream = stream_after(pool.device, None, "a pull")
        layers = {layer: unit for unit, (_, layer) in enumerate(decoded.units)}
        return self._pull(decoded, [(0, ordered)], layers, deadline_s, stream)

    def stats(self) -> dict[str, Any]:
        """Return counts.

        Returns
        -------
        dict : current "pulls" and "quarantined_pages" (of failed pulls, which may still be
            written); cumulative "completed", "failed" and "cancelled" pulls, and "received_bytes";
            "pull_failures" by the reason of the `TransferError`
        """
        with self._lock:
            failed = [pull for pull in self._pulls if pull.failure is not None]
            return {
                "pulls": len(self._pulls),
                "quarantined_pages": sum(pull._num_pages for pull in failed),
                **{name: self._counts[name] for name in _COUNTS},
                "pull_failures": _failures(self._counts),
            }

    def close(self) -> None:
        """Cancel all pulls, and wait until their pages cannot be written, at most 5 s.

        Pages that may still be written then stay in quarantine, and the memory of the pool is kept
        until they cannot.
        """
        self._begin_close()
        for pull in list(self._pulls):
            pull._fail(TransferError("the receiver was closed", "closed"))
        self._finish_close()
        if self._pulls:
            cache_logger.warning(
                "%r: READs of NIXL have not ended; the memory is kept until they have", self
            )

    # --- For PagedKVCache ---

    def _pull(
        self, ticket: Ticket, into: Sequence[tuple[int, Any] | None], layers: Mapping[int, int],
        deadline_s: float, after: Stream,
    ) -> Pull:  # fmt: skip
        """Fetch each part of a ticket into (number of the pool, pages), after the work of a stream.

        A part for None is not fetched. A layer is complete with the unit that `layers` names.
        """
        seconds = positive_seconds(deadline_s, "deadline_s")
        targets: list[_Target | None] = []
        for part, place in zip(ticket.parts, into, strict=True):
            if place is None:
                targets.append(None)
                continue
            memory, pages = self._memories[place[0]], np.array(place[1], np.int64)
            identity, theirs = PoolIdentity.of(memory.pool), ticket.agent.pools[part.pool].identity
            if difference := identity.difference(replace(theirs, wire=identity.wire)):
                raise TransferError(f"the pools differ: {difference}", "identity")
            targets.append(_Target(memory, pages))
        pull = Pull(ticket, targets, layers, monotonic() + seconds, StreamCompletion(after))
        try:
            if observe.order_observers:  # so that they see it now
                pull._event_of(pull._num_units - 1)
            with self._lock:
                self._require_open()
                self._start_thread()
                for target in filter(None, targets):
                    target.memory.pool.allocator._mark_busy(target.pages, pull._landing)
                self._changed.notify()
                self._pulls.append(pull)
        except BaseException:
            if pull not in self._pulls:
                pull._fail(TransferError("cannot start the pull", "lost"))
                pull._settle()
            raise
        return pull

    # --- The thread, which reads ---

    def _step(self) -> bool:
        moved = False
        with self._lock:
            pulls = list(self._pulls)
        if not pulls:
            with suppress(Exception):
                self._agent.poll()
        for pull in pulls:
            if pull.failure is None and monotonic() >= pull._deadline:
                pull._fail(TransferError("the deadline has passed", "late"))
            if pull.failure is None:
                try:
                    if pull._steps is None:
                        pull._steps = self._run(pull)
                    moved |= next(pull._steps)
                    continue
                except StopIteration:
                    pass
                except TransferError as error:
                    pull._fail(error)
                except Exception as error:
                    pull._fail(transfer_failure(f"NIXL: {error!r}", "lost", error))
            moved |= self._end(pull)
        return moved

    def _end(self, pull: Pull) -> bool:
        """Settle a pull that is over, unless bytes may still arrive; return whether it was."""
        pull._reads = [reading for reading in pull._reads if not reading.done()]
        if pull._reads:
            return False
        pull._steps = iter(())
        if pull._is_connected:
            self._agent.disconnect(pull._ticket.agent.metadata, failed=pull.failure is not None)
        if pull._slot is not None:
            self._free_slots.append(pull._slot)
        with self._lock:
            self._count(pull)
            self._pulls.remove(pull)
        try:
            pull._settle()
        except Exception as error:
            cache_logger.exception("cannot settle a pull: %s", error)
        return True

    def _count(self, pull: Pull) -> None:
        if pull.failure is None:
            outcome = "completed"
            self._counts["received_bytes"] += pull.num_bytes
        else:
            outcome = "cancelled" if pull.failure.reason == "cancelled" else "failed"
            self._counts["reason", pull.failure.reason] += 1
        self._counts[outcome] += 1

    def _samples(self) -> Iterator[Sample]:
        yield from self._totals(self._counts)
        yield "kvcupy_migration_quarantined_pages", (), self.stats()["quarantined_pages"]

    @staticmethod
    def _totals(counts: Counter[Any]) -> Iterator[Sample]:
        for name in _COUNTS[:3]:
            yield "kvcupy_migration_pulls_total", (("outcome", name),), counts[name]
        yield "kvcupy_migration_bytes_total", (), counts["received_bytes"]
        for reason, count in _failures(counts).items():
            yield "kvcupy_migration_failed_pulls_total", (("reason", reason),), count

    def _run(self, pull: Pull) -> Iterator[bool]:
        """Read all units of a pull. Yields whether anything has moved."""
        while not pull._after.done():
            yield False
        landings = [each._landing for each in self._before(pull)]
        while not (self._free_slots and all(landing.done() for landing in landings)):
            yield False
        pull._slot = self._free_slots.popleft()
        ticket, theirs = pull._ticket, pull._ticket.agent
        peer = self._agent.connect(theirs.metadata)
        pull._is_connected = True

        def read(*pieces: Any) -> Reading:
            pull._reads = [each for each in pull._reads if not each.done()]
            pull._reads.append(self._agent.read(peer, theirs.process, *pieces))
            return pull._reads[-1]

        local, remote, size = (np.array([n], np.int64) for n in (
            self._slots[pull._slot].ctypes.data, ticket.status, STATUS_BYTES))  # fmt: skip
        num_ready = num_read = num_covered = posted = 0  # leading units
        unread: deque[tuple[Any, int]] = deque()  # pieces, and the units read after them
        reads: deque[tuple[Reading | None, int]] = deque()  # None: for a part that is not fetched
        status: Reading | None = None
        status_at, pause_s = 0.0, _FIRST_PAUSE_S
        while pull._num_arrived < pull._num_units:
            moved = False
            if reads and (reads[0][0] is None or _is_over(reads[0][0])):
                num_read, moved = max(num_read, reads.popleft()[1]), True
            if len(unread) < _MAX_READS and posted < num_ready:
                stop = self._batch(pull, posted, num_ready)
                unread.extend(self._pieces(pull, posted, stop))
                posted = stop
            if unread and len(reads) < _MAX_READS:
                pieces, units = unread.popleft()
                reads.append((read(*pieces) if pieces else None, units))
                moved = True
            if status is not None and _is_over(status):
                status, moved = None, True
                found = Status.decoded(self._slots[pull._slot].tobytes(), ticket.key)
                if found is not None:  # else it was read while it was written
                    _require_open_offer(found, ticket)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                    if num_covered > pull._num_arrived or found.num_ready > num_ready:
                        pause_s = _FIRST_PAUSE_S
                    num_ready = max(num_ready, found.num_ready)
                    pull._arrive(num_covered)
                    status_at = monotonic() + pause_s
            is_needed = num_read > pull._num_arrived or (
                num_ready == posted < pull._num_units and monotonic() >= status_at
            )
            if status is None and is_needed:
                num_covered = num_read  # only what was read before the status is
                status, moved = read(local, remote, size), True
            yield moved
        with suppress(Exception):  # without it, the offer lasts until its lease is over
            self._agent.notify(peer, ticket.token)

    def _before(self, pull: Pull) -> list[Pull]:
        """Return the earlier pulls that may still write to a page of this one."""
        with self._lock:
            earlier = self._pulls[: self._pulls.index(pull)]
        return [
            other for other in earlier
            if any(mine and theirs and mine.memory is theirs.memory
                   and len(np.intersect1d(mine.pages, theirs.pages))
                   for mine in pull._targets for theirs in other._targets)
        ]  # fmt: skip

    def _batch(self, pull: Pull, start: int, num_ready: int) -> int:
        """Return the end of a run of units to read at once: layers of a part, up to some size."""
        units = pull._ticket.units
        target = pull._targets[units[start][0]]
        num_bytes, stop = 0, start
        while stop < num_ready and (
            stop == start or units[stop] == (units[start][0], units[start][1] + stop - start)
        ):
            num_bytes += 0 if target is None else target.memory.layer_bytes * len(target.pages)
            if stop > start and num_bytes > _READ_BYTES:
                break
            stop += 1
        return stop

    def _pieces(self, pull: Pull, start: int, stop: int) -> Iterable[tuple[Any, int]]:
        """Return the pieces of a run of units, and after each how many units have been read."""
        number, layer = pull._ticket.units[start]
        target, part = pull._targets[number], pull._ticket.parts[number]
        if target is None:
            return [(None, stop)]
        theirs = pull._ticket.agent.pools[part.pool].tables
        layers = range(layer, layer + stop - start)
        pieces = target.memory.pieces(target.pages, theirs, part.pages, layers)
        groups = cut(*pieces, _READ_BYTES)
        return [(each, 0) for each in groups[:-1]] + [(groups[-1], stop)]


def _is_over(reading: Reading) -> bool:
    """Return whether a READ is done; TransferError if it has failed."""
    is_over, failure = reading.done(), reading.failure
    if failure is not None:
        raise TransferError(f"NIXL: {failure}", "lost") from failure
    return is_over


def _require_open_offer(status: Status, ticket: Ticket) -> None:
    if status.generation != ticket.generation:
        outcome = status.outcome or "expired"  # the place is another offer's by now
        message = {
            "completed": "another receiver has taken the offer",
            "expired": f"the lease of {ticket.lease_s:g} s is over",
            "withdrawn": "the offer was withdrawn",
            "failed": "the work that writes the pages has failed",
            "closed": "the sender was closed",
        }[outcome]
        raise TransferError(message, _ENDED.get(outcome, outcome))


def _failures(counts: Counter[Any]) -> dict[str, int]:
    """Return the number of failed pulls by reason."""
    return {name[1]: count for name, count in counts.items() if name[0] == "reason"}
