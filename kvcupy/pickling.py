"""What is of one process: it is neither pickled nor copied."""

from __future__ import annotations

from typing import NoReturn


class ProcessLocal:
    """Base of what holds addresses, threads, locks or handles of a driver.

    In another process an address is a crash, and a copy in this one would be an alias that owns
    nothing. `_instead` says what to do.
    """

    __slots__ = ()

    _instead = "make one in each process"

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"{kind}: it cannot be pickled or copied; {self._instead}")

    def __setstate__(self, state: object) -> NoReturn:  # of a pickle from before this was refused
        self.__reduce__()
