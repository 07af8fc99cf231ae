"""The order checker: reports work that touches the same bytes with nothing that orders it.

    copy stream      store_kv writes page 3 |
    compute stream                            gather_kv reads page 3     no wait in between: RAW

Every stream and the host have a vector clock: how much of the work of each stream and of the host
comes before its next work. A stream that waits for an event joins the event's clock, the host joins
the clock of a stream that it synchronises with, and a call joins the host's clock to the stream's.
All host threads share one clock: they count as ordered. An operation that is not ordered after
earlier work on the same bytes, while one of the two writes, is reported before it is issued: the
program may run in either order, whichever it took this time.

The checker remembers the work that the host has not synchronised with, by address.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from .. import devices, observe, streams
from ..arrays import ArrayView, Memory, array_at, contiguous_strides, view
from ..errors import KvcupyError, OrderError, OrderWarning
from ..formats import numpy_dtype
from ..observe import Access, DerivedSlots, Operation
from .callers import (
    caches_of,
    names_of_streams,
    site,
    stack_level,
    transfers_of,
    users_frames,
    variables_of,
)
from .history import (
    HOST,
    Actor,
    ByteRanges,
    Clock,
    Histories,
    Lifetime,
    Point,
    Site,
    Touch,
    Work,
    join,
    last_write,
)  # fmt: skip

_ACTIONS = ("raise", "record", "warn")
_Result = TypeVar("_Result")
_KINDS = {(True, False): "RAW", (False, True): "WAR", (True, True): "WAW"}  # first, second writes
_MAX_SNAPSHOT_BYTES = 1 << 20
_WAIT_S = 0.2  # for work that produces an index array

_Access = tuple[Access, bool, Lifetime | None]
"""An access without owners, whether it writes, and the lifetime of the memory."""

# --- Reports --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Two accesses to the same bytes, at least one a write, that nothing orders.

    Attributes
    ----------
    kind : "RAW" (the second reads what the first writes), "WAR", "WAW" or "use after free" (the
        array of the first is gone, and its memory is used again)
    first, second : in the order in which they were issued
    what : the array, which part of it, and how many bytes
    edge : the missing wait, as a line of code before the second (see `__str__`)
    """

    kind: str
    first: Site
    second: Site
    what: str
    edge: str

    def __str__(self) -> str:
        return (
            f"{self.kind}: nothing orders {self.second.operation} after {self.first.operation}\n"
            f"  first:   {self.first}\n"
            f"  second:  {self.second}\n"
            f"  bytes:   {self.what}\n"
            f"  missing: {self.edge}"
        )


@dataclass(eq=False)
class _Captured:
    """A capture: the work in the graph so far, and the clock of each of its streams."""

    clocks: dict[Actor, Clock]
    open: bool = True
    items: list[tuple[Work, list[_Access]]] = field(default_factory=list)
    histories: Histories = field(default_factory=Histories)
    last_launch: Clock = field(default_factory=dict)  # launches of one graph run one by one


@dataclass(frozen=True)
class Running:
    """A host function that runs on a stream: its point there, and its clock."""

    point: Point
    stream_name: str
    stream: Callable[[], Any]
    clock: Clock


@dataclass(frozen=True)
class _Recorded:
    """A point in a stream: in which capture, and its clock."""

    captured: _Captured | None = None
    clock: Clock = field(default_factory=dict)


class _Thread(threading.local):
    """The state of the calling thread."""

    def __init__(self) -> None:
        # Operations between `before` and `after`, by id, with their accesses.
        self.pending: list[tuple[int, list[Touch]]] = []
        # Of index arrays that were read for the operation that is checked.
        self.contents: dict[tuple[str, int, int], bytes | None] = {}
        self.muted = False  # whether recording is suspended
        self.running: Running | None = None  # the host function that it runs


# --- The checker ----------------------------------------------------------------------------------


class OrderChecker(observe.OrderObserver):
    """Made by `kv.order_checker`.

    Attributes
    ----------
    reports : the races so far
    unresolved : how many accesses had slots that could not be known. They conflict only with
        accesses to all of the memory
    """

    def __init__(self, action: str) -> None:
        if not isinstance(action, str) or action not in _ACTIONS:
            raise ValueError(f"action: expected one of {', '.join(_ACTIONS)}, got {action!r}")
        self.action = action
        self.reports: list[Report] = []
        self.unresolved = 0
        self._host: Clock = {}  # the work that has ended, as far as any host thread knows
        self._clocks: dict[Actor, Clock] = {}  # of streams
        self._owners: dict[Actor, tuple[Any, int]] = {}
        self._histories = Histories()
        self._events: WeakKeyDictionary[Any, _Recorded] = WeakKeyDictionary()
        self._graphs: WeakKeyDictionary[Any, _Captured] = WeakKeyDictionary()
        self._capturing: dict[Actor, _Captured] = {}
        self._lifetimes: dict[int, tuple[Any, Lifetime]] = {}
        self._reported: set[tuple[str, Site, Site]] = set()
        self._late: set[Actor] = set()  # streams that were waited for in vain
        self._lock = threading.RLock()
        self._thread = _Thread()

    # Announcements.

    def before(self, operation: Operation) -> None:
        if self._thread.muted:
            return
        touches = self._with_contents(lambda: self._issued(operation))
        self._thread.pending.append((id(operation), touches))

    def after(self, operation: Operation) -> None:
        if self._thread.muted:
            return
        pending = self._thread.pending
        while pending:
            number, touches = pending.pop()
            if number == id(operation):
                with self._lock:
                    self._commit(touches)
                return

    def recorded(self, event: Any, stream: Any) -> None:
        if self._thread.muted:
            return
        with self._lock:
            actor = self._actor(stream)
            captured = self._capturing.get(actor)
            if captured is not None:
                clock = dict(captured.clocks.setdefault(actor, {}))
                self._events[event] = _Recorded(captured, clock)
                return
            clock = dict(self._clocks.get(actor, {}))
            join(clock, self._calling_clock())
            self._events[event] = _Recorded(None, clock)

    def waited(self, stream: Any, event: Any) -> None:
        # A wait of the host synchronizes, which is announced too.
        if self._thread.muted or stream.identity is HOST:
            return
        with self._lock:
            recorded, actor = self._recorded(event), self._actor(stream)
            captured = recorded.captured
            if captured is not None:
                if captured.open:
                    self._capturing[actor] = captured
                    join(captured.clocks.setdefault(actor, {}), recorded.clock)
            elif actor not in self._capturing:
                self._put_on(actor, recorded.clock)

    def synchronized(self, point: Any) -> None:
        if self._thread.muted:
            return
        with self._lock:
            for clock in self._reached(point):
                join(self._calling_clock(), clock)

    def check(self, operation: Operation) -> None:
        if not self._thread.muted and self.action == "raise":
            self._with_contents(lambda: self._issued(operation))

    def touched_by_host(self, name: str, reads: Iterable[Access], writes: Iterable[Access]) -> None:
        if self._thread.muted:
            return

        def touched() -> None:
            operation = Operation(name, None, keeps_arrays=False)
            work = self._work(operation, self._next_of_host())
            touches = self._touches(work, self._accesses(reads, writes))
            self._check(touches, self._histories)
            self._commit(touches)

        self._with_contents(touched)

    def lent(self, memory: ArrayView, stream: Any) -> None:
        operation = Operation("borrow", stream, (), (Access(memory, name="scratch"),))
        self.before(operation)
        self.after(operation)

    def calls(self, operation: Operation, function: Callable[[], object]) -> Callable[[], object]:
        stream = operation.stream
        if self._thread.muted or stream.identity is HOST:
            return function
        with self._lock:
            actor = self._actor(stream)
            captured = self._capturing.get(actor)
            clocks = self._clocks if captured is None else captured.clocks
            clock = dict(clocks.get(actor, {}))
            point = Point(actor, clock.get(actor, 0), clock)
            running = Running(point, stream.name, ref(stream), clock)
        me = ref(self)

        def called() -> object:
            checker = me()
            if checker is None:
                return function()
            with checker._running(None if captured is not None else running):
                return function()

        return called

    def capture_began(self, graph: Any, stream: Any) -> None:
        with self._lock:
            actor = self._actor(stream)
            captured = _Captured({actor: {}})
            self._graphs[graph] = captured
            self._capturing[actor] = captured

    def capture_ended(self, graph: Any) -> None:
        with self._lock:
            captured = self._graphs.get(graph)
            if captured is not None:
                captured.open = False
                for actor in captured.clocks:
                    self._capturing.pop(actor, None)

    def kept(self, arrays: Iterable[ArrayView], stream: Any) -> None:
        with self._lock:
            actor = self._actor(stream)
            captured = self._capturing.get(actor)
            clocks = self._clocks if captured is None else captured.clocks
            number = clocks.get(actor, {}).get(actor, 0)
            for array in arrays:
                lifetime = self._lifetime(array.owner)
                if lifetime is not None:
                    lifetime.kept[actor] = number

    # Threads.

    def _with_contents(self, change: Callable[[], _Result]) -> _Result:
        """Call `change` with the lock held, and with the contents of the index arrays it reads.

        Contents that it lacks are waited for and read without the lock, which a host function on
        that stream may need. `change` is then called again.
        """
        thread = self._thread
        thread.contents = {}
        try:
            while True:
                with self._lock:
                    unresolved = self.unresolved
                    try:
                        return change()
                    except _Lacking as lacking:
                        self.unresolved = unresolved
                        device, low, high, writer = lacking.args
                is_there = writer is None or self._is_written(writer)
                contents = self._read(device, low, high) if is_there else None
                thread.contents[device, low, high] = contents
        finally:
            thread.contents = {}

    @contextmanager
    def _running(self, running: Running | None) -> Iterator[None]:
        """Let this thread act for a stream, in a host function. None: ignore its announcements."""
        thread = self._thread
        before = thread.muted, thread.running
        thread.muted, thread.running = running is None, running
        try:
            yield
        finally:
            thread.muted, thread.running = before

    # Clocks.

    def _actor(self, stream: Any) -> Actor:
        """Return the actor of a stream, distinct from destroyed streams of the same address."""
        identity: Actor = stream.identity
        owner = getattr(stream, "owner", None)
        if identity is None:
            return HOST
        known, generation = self._owners.get(identity, (None, 0))
        if owner is not None and (known is None or known() is not owner):
            generation += known is not None and known() is None
            self._owners[identity] = ref(owner), generation
        return identity[0], identity[1] | generation << 96

    def _calling_clock(self) -> Clock:
        """Return the clock of the host, or of the host function that the calling thread runs."""
        running = self._thread.running
        return self._host if running is None else running.clock

    def _put_on(self, actor: Actor, clock: Clock) -> None:
        """Order later work on a stream after a clock, which must not change afterwards."""
        join(self._clocks.setdefault(actor, {}), clock)

    def _recorded(self, event: Any) -> _Recorded:
        """Return the point of an event; one from before the block orders nothing."""
        return self._events.get(event) or _Recorded()

    def _reached(self, point: Any) -> list[Clock]:
        """Return the clocks that a wait of the host joins."""
        if hasattr(point, "identity"):
            return [self._clocks.get(self._actor(point), {})]
        if hasattr(point, "as_stream"):  # a device: all of its streams
            return [c for a, c in self._clocks.items() if a is not None and a[0] == point.name]
        recorded = self._recorded(point)
        return [recorded.clock] if recorded.captured is None else []

    def _next(self, actor: Actor, captured: _Captured | None = None) -> Point:
        """Return the point of new work on a stream."""
        if captured is not None:
            clock = captured.clocks.setdefault(actor, {})
        else:
            clock = self._clocks.setdefault(actor, {})
            join(clock, self._calling_clock())
        clock[actor] = number = clock.get(actor, 0) + 1
        return Point(actor, number, dict(clock))

    def _next_of_host(self) -> Point:
        """Return the point of an access by the host itself."""
        if (running := self._thread.running) is not None:
            return running.point
        self._host[HOST] = number = self._host.get(HOST, 0) + 1
        return Point(HOST, number, dict(self._host))

    # Operations.

    def _issued(self, operation: Operation) -> list[Touch]:
        """Check an operation; return its accesses."""
        stream = operation.stream
        actor = self._actor(stream)
        captured = self._capturing.get(actor)
        if captured is None and actor is not HOST and stream.capturing:
            return []  # another library's capture, of which nothing is known
        graph = self._graphs.get(operation.graph) if operation.graph is not None else None
        point = self._next_of_host() if actor is HOST else self._next(actor, captured)
        work = self._work(operation, point)
        if captured is not None:
            self._capture(captured, work, operation, graph)
            return []
        if graph is not None:
            join(point.clock, graph.last_launch)
            touches = self._launched(graph, work)  # may raise: then nothing is launched
            if actor is not HOST:
                self._put_on(actor, point.clock)
            graph.last_launch = dict(point.clock)
            return touches
        touches = self._touches(work, self._accesses(operation.reads, operation.writes))
        self._check(touches, self._histories)
        self._note_copy(touches)
        return touches

    def _capture(
        self, captured: _Captured, work: Work, operation: Operation, graph: _Captured | None
    ) -> None:
        """Add an operation to a graph, and check it against the other work in the graph."""
        own = self._accesses(operation.reads, operation.writes)
        for _, others in () if graph is None else graph.items:
            own += others
        self._in_graph(captured.histories, work, own, resolves=False)
        captured.items.append((work, own))

    def _launched(self, graph: _Captured, launch: Work) -> list[Touch]:
        """Check a launch of a graph with its current slots, inside and against other work."""
        inside = Histories()
        touches = []
        for work, own in graph.items:
            for touch in self._in_graph(inside, work, own, resolves=True):
                outside = copy(touch)
                outside.work = copy(work)
                outside.work.name = f"{work.name} in a graph"
                outside.work.stream_name = launch.stream_name
                outside.work.site = f"{work.site}, launched at {launch.site}"
                outside.work.point, outside.work.stream = launch.point, launch.stream
                touches.append(outside)
        self._check(touches, self._histories)
        return touches

    def _in_graph(
        self, histories: Histories, work: Work, own: list[_Access], *, resolves: bool
    ) -> list[Touch]:
        touches = self._touches(work, own, histories if resolves else None, resolves=resolves)
        self._check(touches, histories)
        if resolves:
            self._note_copy(touches, histories)
        for touch in touches:
            histories[touch.access.view.device].add(touch)
        return touches

    def _work(self, operation: Operation, point: Point) -> Work:
        stream, running = operation.stream, self._thread.running
        if stream is None or stream.identity is HOST:
            stream_name = "the host" if running is None else running.stream_name
            weak = _nothing if running is None else running.stream
        else:
            stream_name, weak = stream.name, ref(stream)
        return Work(
            operation.name, stream_name, weak, site(sys._getframe(1)), point,
            operation.keeps_arrays, operation.copies_bytes, threading.get_ident(),
        )  # fmt: skip

    def _accesses(self, reads: Iterable[Access], writes: Iterable[Access]) -> list[_Access]:
        return [
            (_without_owners(access), is_write, self._lifetime(access.view.owner))
            for accesses, is_write in ((reads, False), (writes, True))
            for access in accesses
            if access.view.size
        ]

    def _touches(
        self, work: Work, accesses: Iterable[_Access], inside: Histories | None = None, *,
        resolves: bool = True,
    ) -> list[Touch]:  # fmt: skip
        touches = []
        for access, is_write, lifetime in accesses:
            slots = None
            if access.slots is not None and resolves:
                slots = self._slots(access, inside)
                self.unresolved += slots is None
            unknown = access.slots is not None and slots is None
            low, high = access.view.byte_range()
            touches.append(Touch(work, access, is_write, low, high, slots, unknown, lifetime))
        return touches

    def _commit(self, touches: list[Touch]) -> None:
        for touch in touches:
            history = self._histories[touch.access.view.device]
            history.forget(self._host, touch.low, touch.high)
            history.add(touch)

    # Conflicts.

    def _check(self, touches: list[Touch], histories: Histories) -> None:
        for touch in touches:
            history = histories[touch.access.view.device]
            for earlier in history.unordered(touch.work.point, touch.low, touch.high):
                kind = _conflict(earlier, touch)
                shared = None if kind is None else earlier.shared_with(touch)
                if kind is not None and shared is not None:
                    self._report(kind, earlier, touch, shared)

    def _report(self, kind: str, first: Touch, second: Touch, shared: ByteRanges) -> None:
        described = first.work.described, second.work.described
        if self.action != "raise" and (kind, *described) in self._reported:
            return
        self._reported.add((kind, *described))
        what = second.describe(shared)
        if (other := first.describe(shared)) != what:
            what = f"{what}; of the first: {other}"
        plural = "" if shared.num_bytes == 1 else "s"
        report = Report(
            kind, *described, f"{what}: {shared.num_bytes:,} byte{plural}",
            self._edge(kind, first, second),
        )  # fmt: skip
        self.reports.append(report)
        if self.action == "raise":
            raise OrderError(report)
        if self.action == "warn":
            warnings.warn(OrderWarning(report), stacklevel=stack_level(sys._getframe()))

    def _edge(self, kind: str, first: Touch, second: Touch) -> str:
        """Return the line of code that would order two accesses, with the names of the caller."""
        earlier_name, later_name = names_of_streams(first.work, second.work)
        if kind == "use after free":
            array = first.access.name or "array"
            return f"kv.keep_alive({array}, {earlier_name})  # before {array} is dropped"
        if first.work.point.actor is HOST:
            return f"{later_name}.synchronize()  # before {first.work.site}"
        is_host = second.work.point.actor is HOST
        if _is_transfer(first):
            return self._wait_for_transfer(first.work, "" if is_host else later_name)
        if is_host:
            return f"{earlier_name}.synchronize()"
        if _is_transfer(second):
            return f"after={earlier_name}  # in the call that starts {second.work.name}"
        return f"{later_name}.wait({earlier_name})"

    def _wait_for_transfer(self, work: Work, waiting: str) -> str:
        """Return how the caller lets a stream wait for a transfer; the host if it is ""."""

        def covers(event: Any) -> bool:
            recorded, point = None if event is None else self._events.get(event), work.point
            return recorded is not None and recorded.clock.get(point.actor, 0) >= point.number

        layer = work.name.partition(" ")[2]
        known = transfers_of(sys._getframe())
        covering = [(n, h) for n, h, t in known if covers(t.end) and not covers(t.start)]
        if not covering and not layer:
            for cache in caches_of(sys._getframe()):
                return f"{cache}.flush()"
        name, handle = covering[0] if covering else ("transfer", None)
        note = "" if covering else "  # what the call that starts it returned"
        if waiting and layer and (handle is None or hasattr(handle, "wait_layer")):
            return f"{name}.wait_layer({layer}, {waiting}){note}"
        synchronizes = not waiting and hasattr(handle, "synchronize")
        return f"{name}.{'synchronize' if synchronizes else 'wait'}({waiting}){note}"

    # Lifetimes.

    def _lifetime(self, owner: Any) -> Lifetime | None:
        """Return the lifetime of an allocation; None if it cannot be known."""
        root = _root(owner)
        known = self._lifetimes.get(id(root))
        if known is not None:
            return known[1]
        lifetime = Lifetime()
        lifetimes, number, host = self._lifetimes, id(root), self._host

        def ended(_: object) -> None:
            lifetime.alive, lifetime.ended_on = False, threading.get_ident()
            lifetime.ended_after = dict(host)  # without the lock, as a finalizer must
            lifetimes.pop(number, None)

        try:
            self._lifetimes[number] = ref(root, ended), lifetime
        except TypeError:
            return None
        return lifetime

    # Which slots.

    def _slots(self, access: Access, inside: Histories | None) -> Any:
        """Return the slots of an access; None while their index array is not written."""
        listed = access.slots
        assert listed is not None
        choose = None if isinstance(listed, ArrayView) else listed.choose
        arrays = (listed,) if isinstance(listed, ArrayView) else listed.arrays
        contents = [self._contents(array, inside) for array in arrays]
        known = [c for c in contents if c is not None]
        if len(known) < len(contents):
            return None
        slots = known[0] if choose is None else choose(*known)
        return slots[slots != access.skip_slot] if access.skip_slot >= 0 else slots

    def _contents(self, array: ArrayView, inside: Histories | None) -> Any:
        """Return the contents that an index array will have; None if they are not known in time.

        The work of `inside`, if there is such, comes after all other.
        """
        low, high = array.byte_range()
        data = self._bytes(array.device, low, high, inside)
        if data is None:
            return None
        dtype = numpy_dtype(array.format)
        return np.ndarray(array.shape, dtype, data, array.pointer - low, array.strides)

    def _bytes(self, device: str, low: int, high: int, inside: Histories | None) -> bytes | None:
        """Return the bytes that a range of addresses will have, as `_contents` does."""
        if low >= high:
            return b""
        writer = None if inside is None else last_write(inside[device], low, high, {})
        is_inside = writer is not None
        if writer is None:
            writer = last_write(self._histories[device], low, high, self._host)
        if writer is None or writer.snapshot is None:
            return None if is_inside else self._contents_now(device, low, high, writer)
        head = self._bytes(device, low, writer.low, inside)
        tail = self._bytes(device, writer.high, high, inside)
        if head is None or tail is None:
            return None
        first, stop = max(low - writer.low, 0), min(high, writer.high) - writer.low
        return head + writer.snapshot[first:stop] + tail

    def _contents_now(self, device: str, low: int, high: int, writer: Touch | None) -> bytes | None:
        """Return the bytes at a range of addresses once `writer` is done; None if unknown.

        _Lacking if that is not at hand.
        """
        contents = self._thread.contents
        if (device, low, high) in contents:
            return contents[device, low, high]
        if writer is None and device == "host":
            return self._read(device, low, high)
        raise _Lacking(device, low, high, writer)

    def _read(self, device: str, low: int, high: int) -> bytes | None:
        """Return the bytes at a range of addresses now; None while they cannot be read.

        On a GPU, in the order of CuPy's current stream, if that is not late. Without the lock.
        """
        if device == "host":
            return array_at(None, low, (high - low,), np.dtype(np.uint8)).tobytes()
        held = ArrayView(low, (high - low,), (1,), "uint8", device, library="cupy")
        gpu = devices.get(device)
        stream: Any = gpu.as_stream(None, "cupy")
        with self._running(None):
            try:
                if not self._is_over(stream):
                    return None
                return bytes(gpu.to_numpy(held).tobytes())
            except KvcupyError:  # the stream is being captured
                return None

    def _note_copy(self, touches: list[Touch], inside: Histories | None = None) -> None:
        """Note the bytes that a copy of integers leaves in its target, where they are known.

        They may be tables, in which later work finds its slots.
        """
        if len(touches) != 2 or not touches[0].work.copies_bytes:
            return
        source, target = touches
        src, num_bytes = source.access.view, source.high - source.low
        if "int" not in src.format or src.device != "host" or num_bytes > _MAX_SNAPSHOT_BYTES:
            return
        views = src, target.access.view
        whole = all([v.strides == contiguous_strides(v.shape, v.itemsize) for v in views])
        if whole and num_bytes == target.high - target.low:
            contents = self._contents(src, inside)
            target.snapshot = None if contents is None else contents.tobytes()

    def _is_written(self, writer: Touch) -> bool:
        """Wait for a while until the stream of a write is done; return whether it is."""
        stream = writer.work.stream()
        with self._running(None):
            try:
                return stream is None or self._is_over(stream)
            except KvcupyError:
                return False

    def _is_over(self, stream: Any) -> bool:
        """Wait for a while until a stream is done; return whether it is. Without the lock."""
        actor = self._actor(stream)
        deadline = time.monotonic() + (0 if actor in self._late else _WAIT_S)
        while not stream.done():
            if time.monotonic() >= deadline:
                self._late.add(actor)
                return False
            time.sleep(1e-4)
        self._late.discard(actor)
        return True


class _Lacking(Exception):
    """Device, low and high end of addresses whose contents are not read yet, and the last write."""


def _is_transfer(touch: Touch) -> bool:
    """Return whether a transfer engine or a receiver made an access, not a user's function."""
    name = touch.work.name
    is_save = name == "save" and touch.access.name.startswith(("src_pool", "dst_pool"))
    return is_save or re.fullmatch(r"(load|pull) \d+", name) is not None


def _nothing() -> None:
    """Stand in for a weak reference to no stream."""


def _conflict(first: Touch, second: Touch) -> str | None:
    """Return what two accesses that nothing orders would be, if they share bytes; None if fine."""
    lifetime, work = first.lifetime, first.work
    if lifetime is not None and not lifetime.alive and lifetime is not second.lifetime:
        actor, number = work.point.actor, work.point.number
        ends = lifetime.kept.get(actor, 0), lifetime.ended_after.get(actor, 0)
        is_over = work.keeps_arrays or actor is HOST or max(ends) >= number
        # Where another thread than the caller's was the last to hold it, that had finished with it.
        return None if is_over or lifetime.ended_on != work.thread else "use after free"
    return _KINDS.get((first.writes, second.writes))


def _without_owners(access: Access) -> Access:
    """Return an access whose views keep nothing alive."""
    slots = access.slots
    if isinstance(slots, ArrayView):
        slots = slots.without_owner()
    elif slots is not None:
        slots = DerivedSlots(tuple([v.without_owner() for v in slots.arrays]), slots.choose)
    return Access(
        access.view.without_owner(), slots, access.page_size, access.offset_axis, access.name,
        access.axes, access.skip_slot,
    )  # fmt: skip


def _root(owner: Any) -> Any:
    """Return the object that lives as long as an allocation, from any array's owner."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    while True:
        if isinstance(owner, (ArrayView, Memory)):
            inner = owner.owner
        elif isinstance(owner, np.ndarray) or (
            cupy is not None and isinstance(owner, cupy.ndarray)
        ):
            inner = getattr(owner, "base", None)
        elif isinstance(owner, memoryview):
            inner = owner.obj
        elif torch is not None and isinstance(owner, torch.Tensor):
            return owner.untyped_storage()
        else:
            return owner
        if inner is None:
            return owner
        owner = inner


# --- What users call ------------------------------------------------------------------------------


@contextmanager
def order_checker(action: Literal["raise", "record", "warn"] = "raise") -> Iterator[OrderChecker]:
    """Report work in the block that touches the same bytes with nothing that orders it.

    Parameters
    ----------
    action : "raise" raises `OrderError` before the second of the two is issued, "warn" warns once
        for each pair of places in the code, and "record" does no more than add to `.reports`

    Returns
    -------
    OrderChecker : with `.reports`, each with `.kind` ("RAW", "WAR", "WAW" or "use after free"),
        `.first`, `.second` (each with `.operation`, `.stream` and `.site`), `.what` (the bytes) and
        `.edge` (the missing wait); `str(report)` says it all

    Raises
    ------
    ValueError : there is no such action
    OrderError : from the calls in the block, with `.report`

    Notes
    -----
    Work is ordered by its stream; by events and waits for streams; where the host waits, or
    `done()` has returned True; within a graph as it was captured. Order between Python threads is
    not checked, nor is work that streams hold when the block begins. CUDA's implicit order between
    the legacy default stream and blocking streams does not count.
    An operation counts with the bytes that it touches: other pages, slots, heads, halves and layers
    do not conflict. Announce accesses of other libraries and of host functions with `kv.declare`.
    Index arrays that a kernel still computes are waited for, up to 0.2 s; accesses that remain
    unknown are left out (`.unresolved`).
    Stream: nothing is put on any. Capture: legal; a graph is checked at each launch too. Without a
    checker an announcement costs a test of one tuple.

    Examples
    --------
    >>> import kvcupy as kv
    >>> host = kv.device("host")
    >>> main, copy = host.stream(), host.stream()
    >>> cache, rows = host.zeros((8, 4), "fp32"), host.zeros((2, 4), "fp32")
    >>> with order_checker("record") as checker:
    ...     host.copy(cache[2:4], rows, stream=copy)
    ...     host.copy(rows, cache[4:6], stream=main)
    ...     main.wait(copy)
    ...     host.copy(rows, cache[2:4], stream=main)
    >>> report = checker.reports[0]
    >>> report.kind, report.edge
    ('WAR', 'main.wait(copy)')
    """
    checker = OrderChecker(action)
    with observe.attached(checker):
        yield checker


class declare:
    """Announce work that is not kvcupy's own, to the order checker and to timelines.

    Parameters
    ----------
    reads, writes : an array or pool, or a tuple of them, that the work in the block reads or
        writes; of any library. As a decorator, also names of parameters of the function
    stream : the stream of that work: Stream, or a CuPy or torch stream; None: the current one of
        the arrays' library, for NumPy arrays the calling thread. As a decorator, also the name of a
        parameter

    Raises
    ------
    TypeError, ValueError : an argument does not fit. `reads`, `writes` and `stream` are checked at
        the start of the block, and only where an order checker or a timeline is on
    OrderError : at the start of the block, where an order checker is on; see `kv.order_checker`

    Notes
    -----
    The block must put all of the work on the one stream. Nothing is kept alive: `kv.keep_alive` is
    for that. Stream: nothing is put on it. Capture: legal.

    Examples
    --------
    >>> import kvcupy as kv
    >>> host = kv.device("host")
    >>> stream, x, y = host.stream(), host.zeros(4, "fp32"), host.zeros(4, "fp32")
    >>> with kv.order_checker(), declare(reads=x, writes=y, stream=stream):
    ...     stream.call(lambda: np.add(x, 1, out=y))
    >>> @declare(reads=("x",), writes=("y",), stream="stream")
    ... def add_one(x, y, stream):
    ...     stream.call(lambda: np.add(x, 1, out=y))
    >>> add_one(x, y, stream)
    """

    def __init__(self, *, reads: Any = (), writes: Any = (), stream: Any = None) -> None:
        self._reads, self._writes, self._stream = _as_tuple(reads), _as_tuple(writes), stream
        self._name = "declared work"
        self._blocks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        if observe.observers:
            frame = next(users_frames(sys._getframe(1)), None)
            variables = {} if frame is None else variables_of(frame)
            reads, writes = (
                tuple([a for x in arrays for a in _accesses(x, argument, variables)])
                for argument, arrays in (("reads", self._reads), ("writes", self._writes))
            )
            if reads or writes:
                stream = _stream_of((*reads, *writes), self._stream)
                stack.enter_context(
                    observe.announced(
                        Operation(self._name, stream, reads, writes, keeps_arrays=False)
                    )
                )
        self._blocks.append(stack)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._blocks.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function each of whose calls is announced."""
        signature = inspect.signature(function)
        arguments = {"reads": self._reads, "writes": self._writes, "stream": (self._stream,)}
        for argument, names in arguments.items():
            for name in names:
                if isinstance(name, str) and name not in signature.parameters:
                    raise ValueError(
                        f"{argument}: expected a parameter of {function.__name__}, got {name!r}"
                    )

        @wraps(function)
        def declared(*arguments: Any, **options: Any) -> Any:
            if not observe.observers:
                return function(*arguments, **options)
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            values = bound.arguments

            def named(items: tuple[Any, ...]) -> tuple[Any, ...]:
                chosen = [(values[x] if isinstance(x, str) else x) for x in items]
                return tuple([x for each in chosen for x in _as_tuple(each) if x is not None])

            stream = values[self._stream] if isinstance(self._stream, str) else self._stream
            block = declare(
                reads=named(self._reads), writes=named(self._writes), stream=stream
            )  # fmt: skip
            block._name = function.__name__
            with block:
                return function(*arguments, **options)

        return declared


def _as_tuple(arrays: Any) -> tuple[Any, ...]:
    return tuple(arrays) if isinstance(arrays, (list, tuple)) else (arrays,)


def _accesses(array: Any, argument: str, variables: dict[str, Any]) -> list[Access]:
    """Return the access to all of an array or a pool, named as a variable of the caller."""
    if isinstance(array, str):
        raise TypeError(f"{argument}: expected arrays, got {array!r}; only a decorator takes names")
    name = next((n for n, value in variables.items() if value is array), "")
    if hasattr(array, "parts") and hasattr(array, "placement"):
        return [
            Access(view(part), name=name)
            for part in (*array.parts, *getattr(array, "scale_parts", ()))
        ]
    return [Access(view(array, name or argument), name=name)]


def _stream_of(accesses: tuple[Access, ...], stream: Any) -> Any:
    """Return the stream of declared work: as passed, or the current one of the arrays' library."""
    if stream is not None and hasattr(stream, "identity"):
        return stream
    views = [access.view for access in accesses]
    on_gpu = [v for v in views if v.device != "host"]
    if stream is None:
        first = (on_gpu or views)[0]
        return devices.get(first.device).as_stream(None, first.library)
    if on_gpu:
        return devices.get(on_gpu[0].device).as_stream(stream)
    if not any(hasattr(stream, name) for name in ("__cuda_stream__", "cuda_stream", "ptr")):
        return devices.get("host").as_stream(stream)
    (own,) = streams.as_streams((stream,), "stream")
    return own
