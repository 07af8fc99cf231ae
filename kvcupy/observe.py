"""Announces operations, events and waits to observers: a timeline, the order checker.

Devices announce what is put on their streams, so this module stands below them: here a stream is
a `devices.protocol.Stream` and an event a `devices.protocol.Event`, but their types are not named.
Without observers an announcement costs one truth test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .arrays import ArrayView
from .errors import process_lock


@dataclass(frozen=True)
class DerivedSlots:
    """Slots that `choose` makes of the contents of index arrays, which it gets as NumPy arrays."""

    arrays: tuple[ArrayView, ...]
    choose: Callable[..., np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Access:
    """Bytes that an operation reads or writes: a view, or only the slots listed in `slots`.

    With `slots`, `view` is a cache whose first axis is slots, or pages and offsets (`page_size`
    of them, on axis `offset_axis`). Slots that are negative or past the end are not touched, nor is
    `skip_slot`.
    """

    view: ArrayView
    slots: ArrayView | DerivedSlots | None = None
    page_size: int = 1
    offset_axis: int = 0
    name: str = ""  # of the argument, for messages
    axes: tuple[str, ...] = ()  # what is counted on each axis, for messages
    skip_slot: int = -1


@dataclass(frozen=True)
class Operation:
    """One piece of work on one stream, with the bytes that it touches."""

    name: str
    stream: Any
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    graph: Any = None  # that is launched
    keeps_arrays: bool = True  # alive until the stream has passed the operation
    copies_bytes: bool = False  # from the array read to the array written, in the same order

    @cached_property
    def num_bytes(self) -> int | None:
        """Bytes read and written, of as many rows as there are slots; None: that depends on what
        arrays on the device hold."""
        total = 0
        for access in (*self.reads, *self.writes):
            array, slots = access.view, access.slots
            num_bytes = array.num_bytes
            if isinstance(slots, DerivedSlots):
                return None
            if slots is not None:
                num_slots = array.shape[0] * access.page_size
                num_bytes = num_bytes // num_slots * slots.size if num_slots else 0
            total += num_bytes
        return total


class DeferredOperation(Operation):
    """An operation whose accesses are described when an observer looks at them."""

    def __init__(
        self, name: str, stream: Any,
        describe: Callable[[], tuple[tuple[Access, ...], tuple[Access, ...]]],
    ) -> None:  # fmt: skip
        vars(self).update(name=name, stream=stream, _describe=describe)  # the class is frozen

    @cached_property
    def _accesses(self) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        accesses: tuple[tuple[Access, ...], tuple[Access, ...]] = vars(self)["_describe"]()
        return accesses

    @property
    def reads(self) -> tuple[Access, ...]:
        return self._accesses[0]

    @property
    def writes(self) -> tuple[Access, ...]:
        return self._accesses[1]


def copy_of(stream: Any, source: ArrayView, target: ArrayView) -> Operation:
    """Return the copy of an array to another on a stream."""
    reads, writes = Access(source, name="src"), Access(target, name="dst")
    return Operation("copy", stream, (reads,), (writes,), copies_bytes=True)


class Observer:
    """Notified of everything that is put on a stream, in issue order."""

    def before(self, operation: Operation) -> None:
        """Note that an operation is about to be issued; may raise, which prevents it."""

    def after(self, operation: Operation) -> None:
        """Note that it was issued."""

    def failed(self, operation: Operation) -> None:
        """Note that an operation raised after `before`, so that no `after` comes."""

    def recorded(self, event: Any, stream: Any) -> None:
        """Note that an event was recorded in a stream."""

    def waited(self, stream: Any, event: Any) -> None:
        """Note that a stream waits for an event."""


class OrderObserver(Observer):
    """An observer that is also notified of what orders the host and the streams."""

    def synchronized(self, point: Any) -> None:
        """Note that the host has waited for an event, a stream, or all streams of a device, or has
        found it done."""

    def touched_by_host(self, name: str, reads: Iterable[Access], writes: Iterable[Access]) -> None:
        """Note that the calling thread itself is about to read or write arrays; may raise."""

    def check(self, operation: Operation) -> None:
        """Raise if `before` would raise for an operation; note nothing."""

    def calls(self, operation: Operation, function: Callable[[], object]) -> Callable[[], object]:
        """Return what a stream is to call in place of a host function."""
        return function

    def capture_began(self, graph: Any, stream: Any) -> None:
        """Note that work on `stream` goes into `graph` from now on."""

    def capture_ended(self, graph: Any) -> None:
        """Note that the capture of a graph is over, well or not."""

    def kept(self, arrays: Iterable[ArrayView], stream: Any) -> None:
        """Note that arrays stay alive until `stream` has passed this point."""

    def lent(self, memory: ArrayView, stream: Any) -> None:
        """Note that work which comes next on `stream` may write to memory; may raise."""


observers: tuple[Observer, ...] = ()
"""Who is notified. Operations look here before they describe themselves."""
order_observers: tuple[OrderObserver, ...] = ()
"""The OrderObservers among the observers, so that announcing to them alone costs one truth test."""
_lock = process_lock()  # held while the two are replaced


def issue(describe: Callable[[], Operation], enqueue: Callable[[], None]) -> None:
    """Run `enqueue`, which puts one operation on its stream, and announce it to observers."""
    if not observers:
        enqueue()
        return
    with announced(describe()):
        enqueue()


@contextmanager
def announced(operation: Operation) -> Iterator[None]:
    """Announce an operation to observers, which the block puts on its stream."""
    notified = observers  # the same at both ends
    announced_to: list[Observer] = []
    try:
        for observer in notified:
            observer.before(operation)
            announced_to.append(observer)
        yield
    except BaseException:
        for observer in reversed(announced_to):
            observer.failed(operation)
        raise
    for observer in reversed(notified):
        observer.after(operation)


def call(
    stream: Any, function: Callable[[], object], enqueue: Callable[[Callable[[], object]], None]
) -> None:
    """Put a host function on a stream by `enqueue`, and announce it to observers."""
    if not callable(function):
        raise TypeError(f"function: expected a function, got {function!r}")
    if not observers:
        enqueue(function)
        return
    operation = Operation("call", stream)
    with announced(operation):
        for observer in order_observers:
            function = observer.calls(operation, function)
        enqueue(function)


def recorded(event: Any, stream: Any) -> None:
    """Announce that `event` was recorded in `stream`."""
    for observer in observers:
        observer.recorded(event, stream)


def waited(stream: Any, event: Any) -> None:
    """Announce that `stream` waits for `event`."""
    for observer in observers:
        observer.waited(stream, event)


def synchronized(point: Any) -> None:
    """Announce that the host has waited for an event, a stream or a device, or found it done."""
    for observer in order_observers:
        observer.synchronized(point)


def check(operation: Operation) -> None:
    """Raise what announcing an operation would raise to order checkers; announce nothing."""
    for observer in order_observers:
        observer.check(operation)


def touched_by_host(name: str, reads: Iterable[Access], writes: Iterable[Access] = ()) -> None:
    """Announce that the calling thread is about to read or write arrays, outside all streams."""
    for observer in order_observers:
        observer.touched_by_host(name, reads, writes)


def capture_began(graph: Any, stream: Any) -> None:
    """Announce that work on `stream` goes into `graph` from now on."""
    for observer in order_observers:
        observer.capture_began(graph, stream)


def capture_ended(graph: Any) -> None:
    """Announce that the capture of a graph is over, well or not."""
    for observer in order_observers:
        observer.capture_ended(graph)


def kept(arrays: Iterable[ArrayView], stream: Any) -> None:
    """Announce that arrays stay alive until `stream` has passed this point."""
    for observer in order_observers:
        observer.kept(arrays, stream)


def lent(memory: ArrayView, stream: Any) -> None:
    """Announce that work which comes next on `stream` may write to temporary memory."""
    for observer in order_observers:
        observer.lent(memory, stream)


@contextmanager
def attached(observer: Any) -> Iterator[Any]:
    """Notify `observer` for the length of a with block."""
    attach(observer)
    try:
        yield observer
    finally:
        detach(observer)


def attach(observer: Any) -> None:
    """Notify `observer` from now on, unless it is notified already."""
    with _lock:
        if not any(o is observer for o in observers):
            _notify((*observers, observer))


def detach(observer: Any) -> None:
    """Notify `observer` no more."""
    with _lock:
        _notify(tuple(o for o in observers if o is not observer))


def _notify(notified: tuple[Any, ...]) -> None:
    """Replace the observers; the caller holds the lock."""
    global observers, order_observers
    observers = notified
    order_observers = tuple(o for o in notified if isinstance(o, OrderObserver))
