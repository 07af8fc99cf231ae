"""What keeps the blocks of a `SharedStore`: the protocol that memory, servers and engines meet.

A module of backends has a function `open_backend(url, pages, *, namespace, capacity_bytes,
deadline, **options) -> Backend`: the URL as the user wrote it; the `WirePages` of the host pool;
16 bytes that are the same for all blocks of a tenant; the user's `capacity_bytes` or None, and
options of its own. It raises TypeError, ValueError or OSError where an argument does not fit, and
BackendLost where there is no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ...cache.pages import Completion
from ..wire import HASHERS, Hasher, checksum

Block = Sequence[memoryview]  # the bytes of a block in wire order, in contiguous pieces

STORED, KNOWN, FULL, FAILED = "stored", "known", "full", "failed"  # outcomes of a put

MAX_HEADER_BYTES = 128


class BackendLost(Exception):
    """The store cannot be reached, or did not answer in time.

    `SharedStore` counts it, and answers a miss or "failed".

    Attributes
    ----------
    results : what the call would have returned, as far as that is known: as many, or none
    refused : whether it is there, but does not let this user in
    repeatable : whether the same call may succeed at once; not so if it is `refused`
    """

    def __init__(
        self, message: str, results: Sequence[Any] = (), *,
        refused: bool = False, repeatable: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.results = results
        self.refused = refused
        self.repeatable = repeatable and not refused


class SummedBlock(list[memoryview]):
    """A block, with a checksum that who copies it may calculate on the way.

    A part that was just copied, or is copied next, is read from the processor's cache.
    """

    def __init__(self, pieces: Iterable[memoryview], algorithm: str) -> None:
        super().__init__(pieces)
        self._algorithm = algorithm
        self._hasher: Hasher | None = None

    def begin(self) -> Callable[[Any], None] | None:
        """Return what all parts of the block are to be passed to, in order; None if nothing is."""
        if self._algorithm not in HASHERS:
            return None
        self._hasher = HASHERS[self._algorithm]()
        return self._hasher.update

    def checksum(self, algorithm: str) -> int:
        """Return the checksum of all that was passed on, or else of the block."""
        if self._hasher is None or algorithm != self._algorithm:
            return checksum(self, algorithm)
        return self._hasher.intdigest()


class Backend(Protocol):
    """Keeps blocks by key, each with a header that it does not look into.

    A block is visible whole or not at all, and the first that is stored under a key stays.
    `SharedStore` makes headers, verifies what has arrived, and does not trust what it gets. Threads
    may call a backend together. What cannot be helped by another attempt is no exception: a block
    is "failed" or missing. After `deadline`, a value of `time.monotonic`, a call gives up.

    Attributes
    ----------
    blocks_per_get : how many blocks `SharedStore` asks of one `get` at most: few where little is
        gained by more, so that they are verified while they are in the processor's cache
    put_asks_first : whether `put` sends nothing of blocks that are known, so that nobody needs to
        ask `exists` before
    """

    blocks_per_get: int
    put_asks_first: bool

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which keys have a block. It may be gone when it is asked for.

        Raises
        ------
        BackendLost : the store cannot be reached
        """
        ...

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], headers: Sequence[bytes],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        """Store blocks, and return for each "stored", "known", "full" or "failed".

        Each of `headers`, of at most `MAX_HEADER_BYTES`, is calculated from its block when it is
        first asked for: asking for it just before the block is sent, or after all of it was passed
        to what `SummedBlock.begin` returns, reads the block only once from memory. Blocks of
        one call do not evict each other.

        Raises
        ------
        BackendLost : the store cannot be reached; which blocks were stored is unknown
        """
        ...

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[bytes | None]:
        """Fill blocks, and return the header stored with each; None for those that are missing.

        Blocks that are missing, or of another length, may have been written to. Of those that are
        not, all or nothing was passed to what `SummedBlock.begin` returns.

        Raises
        ------
        BackendLost : the store cannot be reached; what was filled is undefined
        """
        ...

    def busy(self, keys: Sequence[bytes]) -> Completion | None:
        """Return what is over when the blocks of keys are accessed no more that `get` did not
        return or `put` did not store, or either was lost with; None where that is over with the
        call.
        """
        ...

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        """Forget blocks that have turned out to be damaged, as far as that is possible.

        Raises
        ------
        BackendLost : the store cannot be reached
        """
        ...

    def remove(self, deadline: float) -> Any:
        """Give the memory of the embedded store back, or forget all blocks of this tenant.

        Raises
        ------
        OSError, BackendLost : that failed
        """
        ...

    def close(self) -> None:
        """Let go of connections and memory, after the calls of other threads are over."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return what the backend knows beside `SharedStore`'s own counts, by name."""
        ...
