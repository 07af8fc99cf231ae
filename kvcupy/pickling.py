"""Objects that belong to one process: they can be neither pickled nor copied."""

from __future__ import annotations

from typing import NoReturn


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
