"""What kvcupy raises besides argument errors; names of files; objects that can be lost."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

_F = TypeVar("_F", bound=Callable[[], object])


class KvcupyError(Exception):
    """Base of every kvcupy error that is not a plain argument error."""


class CompileError(KvcupyError):
    """A kernel could not be compiled or loaded.

    Attributes
    ----------
    log : what the compiler said
    transient : whether the system lacked something (memory, disk space, a process), so that the
        next call tries again; else the same kernel is refused at once
    """

    def __init__(self, message: str, log: str = "", *, transient: bool = False) -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log
        self.transient = transient


class DeviceError(KvcupyError):
    """A launch, a copy or a host function failed on its device."""


class IndexFault(KvcupyError):
    """A slot, page or position that only the device could see was past the end.

    Attributes
    ----------
    bound : what was expected, "0 to 63" say; None where only a user-defined kernel knows
    """

    def __init__(self, message: str, bound: str | None = None) -> None:
        super().__init__(message)
        self.bound = bound


class CaptureError(KvcupyError):
    """A call that is illegal while its stream is being captured into a graph."""


class CacheFull(KvcupyError):
    """There are fewer free pages than requested.

    Attributes
    ----------
    argument : of the call, which needs them; "" if none does
    """

    def __init__(self, message: str = "", argument: str = "") -> None:
        super().__init__(message, argument)
        self.argument = argument

    def __str__(self) -> str:
        return f"{self.argument}: {self.args[0]}" if self.argument else str(self.args[0])


@contextmanager
def needs_pages(argument: str) -> Iterator[None]:
    """Name the argument of a call that needs pages, if it raises CacheFull."""
    try:
        yield
    except CacheFull as error:
        error.argument = argument
        raise


class TransferError(KvcupyError):
    """Pages could not be moved between two processes.

    Attributes
    ----------
    reason : "cancelled", "late" (the deadline), "expired" (the lease), "withdrawn", "taken" (by
        another pull), "lost" (the peer), "identity" (of the pools), "ticket", "closed" or "failed"
        (the work that was to write the pages)
    """

    def __init__(self, message: str, reason: str = "lost") -> None:
        super().__init__(message)
        self.reason = reason


class OrderError(KvcupyError):
    """Work touches the same bytes as earlier work with nothing that orders it; see `report`."""

    def __init__(self, report: Any) -> None:
        Exception.__init__(self, str(report))
        self.report = report


class DeviceOrderError(OrderError, DeviceError):
    """An OrderError in the background, where a DeviceError is raised for other failures."""


class TransferOrderError(OrderError, TransferError):
    """An OrderError in the background of a transfer between processes."""

    reason = "failed"


def device_failure(message: str, cause: BaseException | None) -> DeviceError:
    """Return what waiting for failed work raises: also an OrderError, if that is the cause."""
    failure = DeviceOrderError(cause.report) if isinstance(cause, OrderError) else DeviceError()
    failure.args, failure.__cause__ = (message,), cause
    return failure


def transfer_failure(message: str, reason: str, cause: BaseException) -> TransferError:
    """Return what waiting for a failed transfer raises, as `device_failure` does."""
    failure: TransferError
    if isinstance(cause, OrderError):
        failure = TransferOrderError(cause.report)
    else:
        failure = TransferError(message, reason)
    failure.args, failure.__cause__ = (message,), cause
    return failure


class OrderWarning(RuntimeWarning):
    """What `kv.order_checker(action="warn")` warns of; see `report`."""

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report


class UnknownSequence(KvcupyError, KeyError):
    """There is no such sequence in the cache."""

    __str__ = Exception.__str__  # KeyError's would show the message in quotes


def file_path(value: Any, name: str) -> Path:
    """Return an argument that names a file as a Path; TypeError or ValueError if it cannot be one.

    >>> file_path("a.json", "path").suffix
    '.json'
    """
    try:
        path = Path(value)
        encoded = os.fsencode(path)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name}: expected a str or a Path, got {kind}") from None
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise ValueError(f"{name}: expected the name of a file, got {value!r}")
    return path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError name `path`, rather than a temporary file in or next to it, or no file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        del error.filename2
        raise


# --- Objects of one process -----------------------------------------------------------------------
#
# A forked child has none of its parent's threads, and a lock that another thread held at the fork
# stays locked there. So the child gives each inherited object a class that raises KvcupyError for
# any use. Calls in the parent cost nothing.


class Unpicklable:
    """Base of classes that hold addresses, threads, locks or driver handles.

    An address is meaningless in another process, and a copy in this one would be an alias that owns
    nothing. `_instead` is the advice that ends the error message.
    """

    __slots__ = ()

    _instead = "make one in each process"

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"{kind}: it cannot be pickled or copied; {self._instead}")

    def __setstate__(self, state: object) -> NoReturn:  # of a pickle from before this was refused
        self.__reduce__()


class ProcessLocal(Unpicklable):
    """Base of classes whose objects a forked child must not use; it makes its own.

    In the child `close`, the end of a `with` block and destructors do nothing, so that they leave
    alone what the parent owns; everything else raises KvcupyError, except `_usable` attributes.
    """

    __slots__ = ()

    _usable: tuple[str, ...] = ()

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        self = super().__new__(cls)
        _objects.add(_Reference(self, _objects.discard))
        return self

    def _abandon(self) -> None:
        """Close the descriptors that a forked child has inherited, which outlive the parent's."""


class _Reference(weakref.ref[Any]):
    """A weak reference that is equal to itself alone, and never hashes its object."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


_objects: set[_Reference] = set()
_locks: set[_Reference] = set()
_num_forks = 0  # between the first process and this one
_kept: list[object] = []  # of finalizers, whose destructors would act on what the parent owns


def process_lock(make: Callable[[], Any] = threading.Lock) -> Any:
    """Return a lock of the process's own state, which a forked child finds released."""
    lock = make()
    _locks.add(_Reference(lock, _locks.discard))
    return lock


def finalize(
    owner: object, function: Callable[..., object], *arguments: Any, at_exit: bool = False
) -> weakref.finalize[Any, Any]:
    """Call a function when its owner is gone, as `weakref.finalize`, but not in a forked child."""
    call = weakref.finalize(owner, _finalize, _num_forks, function, arguments)
    call.atexit = at_exit
    return call


def _finalize(num_forks: int, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if num_forks == _num_forks:
        function(*arguments)
    else:
        _kept.append((function, arguments))


def in_child(function: _F) -> _F:
    """Call a function in every forked child, before it runs anything else."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=function)
    return function


@in_child
def _disown() -> None:
    """Refuse the parent's objects, and release the locks of its other threads."""
    global _num_forks
    for reference in tuple(_locks):
        if (lock := reference()) is not None:
            lock._at_fork_reinit()
    inherited = [each for reference in tuple(_objects) if (each := reference()) is not None]
    _objects.clear()
    for each in inherited:
        # Another thread was constructing it, or an interrupt has broken it.
        with suppress(AttributeError, OSError, KvcupyError):
            each._abandon()
    for each in inherited:
        kind: Any = type(each)
        reason = (
            f"expected the process that made it ({os.getppid()}), got {os.getpid()}, which was "
            f"forked from it; {kind._instead}"
        )
        with suppress(TypeError):  # a user's class that cannot be derived from
            each.__class__ = _refusing(kind, f"of process {os.getppid()}", reason)
    _num_forks += 1


@cache
def _refusing(kind: Any, state: str, reason: str) -> type:
    """Return a class for objects of a kind that must not be used any more."""

    def __getattribute__(self: object, name: str) -> Any:
        if name.startswith("__") or name in ("close", "_guard", *kind._usable):
            return object.__getattribute__(self, name)
        raise KvcupyError(f"{kind.__name__}: {reason}")

    def nothing(self: object, *arguments: object, **options: object) -> None:
        pass

    names: dict[str, Any] = {
        "__slots__": (), "__module__": kind.__module__, "__getattribute__": __getattribute__,
        "__repr__": lambda self: f"<{kind.__name__} {state}>",
    }  # fmt: skip
    names |= {n: nothing for n in ("close", "__exit__", "__del__") if hasattr(kind, n)}
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made


# --- Objects that an interrupt breaks -------------------------------------------------------------
#
# A signal handler may raise wherever Python runs one, as KeyboardInterrupt does. An object that it
# leaves half changed is lost, with its pages, and every later call says so: nothing can tell which
# half is right. Transfers in flight continue, and their pages are not reused.

# A call that raises one of them has undone what it had changed.
ORDERLY_ERRORS = (
    KvcupyError, TypeError, ValueError, MemoryError, ImportError, NotImplementedError
)  # fmt: skip


_INTERRUPTED = (
    "a call was interrupted in the middle of a change; close it, and make another with other pages"
)


class InterruptGuard:
    """Finds changes of an object that an exception has ended midway.

    Use it inside the lock of the object: `with self._lock, self._guard:`. Where a change must be
    quick, or its result would be lost on its way to the caller, catch exceptions and call `note`.

    Parameters
    ----------
    kind : name of the class of the object
    owner : the object, if any use of it is to raise once it is broken
    reentrant : whether its lock is
    """

    def __init__(
        self, kind: str, owner: ProcessLocal | None = None, *, reentrant: bool = False
    ) -> None:
        self._kind, self._reentrant = kind, reentrant
        self._owner = None if owner is None else weakref.ref(owner)
        self._depth = 0  # changes in progress; a second interrupt can keep one from its end
        self.is_broken = False

    def __enter__(self) -> None:
        if self._depth or self.is_broken:
            if not self._reentrant:
                self.mark_broken()
            self.require_whole()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and not issubclass(kind, ORDERLY_ERRORS):
            self.mark_broken()
        self._depth -= 1

    def note(self, error: BaseException) -> None:
        """Note what has ended a call that may have changed the object."""
        if not isinstance(error, ORDERLY_ERRORS):
            self.mark_broken()

    def require_whole(self) -> None:
        if self.is_broken:
            raise KvcupyError(f"{self._kind}: {_INTERRUPTED}")

    def mark_broken(self) -> None:
        self.is_broken = True
        owner: Any = None if self._owner is None else self._owner()
        if owner is not None:
            kind: Any = type(owner)
            owner.__class__ = _refusing(kind, "after an interrupt", _INTERRUPTED)
