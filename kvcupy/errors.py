"""The exceptions that kvcupy raises, beside `TypeError` and `ValueError` for bad arguments."""

from __future__ import annotations


class KvcupyError(Exception):
    """Base of every kvcupy error that is not a plain argument error."""


class CompileError(KvcupyError):
    """A kernel could not be compiled or loaded; `log` holds what the compiler said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


class DeviceError(KvcupyError):
    """A launch, a copy or a host function failed on its device."""


class IndexFault(KvcupyError):
    """A slot, page or position that only the device could see was past the end."""


class CaptureError(KvcupyError):
    """A call that is illegal while its stream is being captured into a graph."""


class CacheFull(KvcupyError):
    """There are fewer free pages than requested."""


class UnknownSequence(KvcupyError, KeyError):
    """There is no such sequence in the cache."""

    __str__ = Exception.__str__  # KeyError's would show the message in quotes
