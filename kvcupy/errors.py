"""What kvcupy raises beside plain argument errors; names of files; what cannot be pickled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


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
    """A slot, page or position that only the device could see was past the end."""


class CaptureError(KvcupyError):
    """A call that is illegal while its stream is being captured into a graph."""


class CacheFull(KvcupyError):
    """There are fewer free pages than requested."""


class TransferError(KvcupyError):
    """Pages could not be moved between two processes.

    Attributes
    ----------
    reason : "cancelled", "late" (the deadline), "expired" (the lease), "withdrawn", "taken" (by
        other pulls), "lost" (the peer or the connection), "corrupt", "identity" (of the pools),
        "secret", "version", "ticket", "closed" or "failed" (the work that was to write the pages)
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
    """Let an OSError name `path`, rather than a temporary file in it or beside it, or no file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        del error.filename2
        raise


class ProcessLocal:
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
