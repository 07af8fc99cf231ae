"""Announces operations, event records and waits to observers: a timeline, an order checker.

Devices announce what is put on their streams, so this module stands below them: here a stream is
a `devices.protocol.Stream` and an event a `devices.protocol.Event`, but their types are not named.
Without observers an operation costs one truth test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from .arrays import ArrayView


@dataclass(frozen=True)
class Access:
    """Bytes that an operation reads or writes: a view, or only the slots listed in `slots`.

    With `slots`, `view` is a cache whose first axis is slots, or pages and offsets (`page_size`
    of them, on axis `offset_axis`).
    """

    view: ArrayView
    slots: ArrayView | None = None
    page_size: int = 1
    offset_axis: int = 0


@dataclass(frozen=True)
class Operation:
    """One piece of work on one stream, with the bytes that it touches."""

    name: str
    stream: Any
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()


class Observer(Protocol):
    """Notified of everything that is put on a stream, in issue order.

    `before` may raise, which prevents the operation.
    """

    def before(self, operation: Operation) -> None: ...
    def after(self, operation: Operation) -> None: ...
    def recorded(self, event: Any, stream: Any) -> None: ...
    def waited(self, stream: Any, event: Any) -> None: ...


observers: tuple[Observer, ...] = ()
"""Who is notified. Operations look here before they describe themselves."""


def issue(describe: Callable[[], Operation], enqueue: Callable[[], None]) -> None:
    """Run `enqueue`, which puts one operation on its stream, and announce it to observers."""
    if not observers:
        enqueue()
        return
    operation = describe()
    for observer in observers:
        observer.before(operation)
    enqueue()
    for observer in reversed(observers):
        observer.after(operation)


def recorded(event: Any, stream: Any) -> None:
    """Announce that `event` was recorded in `stream`."""
    for observer in observers:
        observer.recorded(event, stream)


def waited(stream: Any, event: Any) -> None:
    """Announce that `stream` waits for `event`."""
    for observer in observers:
        observer.waited(stream, event)


@contextmanager
def attached(observer: Any) -> Iterator[Any]:
    """Notify `observer` for the length of a with block."""
    global observers
    observers = (*observers, observer)
    try:
        yield observer
    finally:
        observers = tuple(o for o in observers if o is not observer)
