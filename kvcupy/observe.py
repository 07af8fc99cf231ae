"""Where operations, records and waits are announced to whoever watches (a timeline, a checker).

Nothing is announced while nobody watches: `issue` then costs one truth test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .arrays import ArrayView
    from .devices.protocol import Event, Stream


@dataclass(frozen=True)
class Access:
    """Bytes that an operation reads or writes: a view, or only the slots of it that `slots` names.

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
    stream: Stream
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()


class Observer(Protocol):
    """Told of everything that is put on a stream, in issue order. `before` may raise to refuse."""

    def before(self, operation: Operation) -> None: ...
    def after(self, operation: Operation) -> None: ...
    def recorded(self, event: Event, stream: Stream) -> None: ...
    def waited(self, stream: Stream, event: Event) -> None: ...


_observers: tuple[Observer, ...] = ()


def issue(
    describe: Callable[[], Operation],
    enqueue: Callable[[], None],
) -> None:
    """Run `enqueue`, which puts one operation on its stream, and announce it if someone watches."""
    if not _observers:
        enqueue()
        return
    operation = describe()
    for observer in _observers:
        observer.before(operation)
    enqueue()
    for observer in reversed(_observers):
        observer.after(operation)


def recorded(event: Event, stream: Stream) -> None:
    """Announce that `event` was recorded in `stream`."""
    for observer in _observers:
        observer.recorded(event, stream)


def waited(stream: Stream, event: Event) -> None:
    """Announce that `stream` waits for `event`."""
    for observer in _observers:
        observer.waited(stream, event)


def watching() -> bool:
    """Return whether anybody watches."""
    return bool(_observers)


@contextmanager
def attached(observer: Any) -> Iterator[Any]:
    """Announce to `observer` for the length of a with block."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield observer
    finally:
        _observers = tuple(o for o in _observers if o is not observer)
