"""The interface of what keeps blocks: a directory of files, Redis, Mooncake, or another around one.

A backend module has a function `open_backend(url, *, namespace, num_bytes, capacity_bytes,
deadline) -> Backend`: the URL as the user wrote it; 16 bytes that are the same for all blocks of a
tenant and an identity; the length of every block, with its header; the user's `capacity_bytes` or
None. It raises TypeError, ValueError, ImportError or OSError for what the user can mend, and
BackendLost if the server is unreachable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Block = Sequence[memoryview]  # writable bytes: the header, then the contents in wire order

STORED, KNOWN, FULL, FAILED = "stored", "known", "full", "failed"  # outcomes of a put

CALL_BYTES = 2**22  # of the blocks of one call, unless one block is longer


class BackendLost(Exception):
    """The store is unreachable, did not answer in time, or `refused` access to this user."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Backend(Protocol):
    """Keeps blocks of one length by key.

    A block is visible whole or not at all. `BlockStore` makes headers, and verifies each block on
    arrival without trusting the backend. Methods are thread-safe, access the memory of blocks until
    they return or raise and not after that, and raise BackendLost if the store is unreachable or
    has not answered by `deadline`, a value of `time.monotonic`.

    `used_ns` has times of use by key, for all keys of the user's call, whose blocks must not be
    evicted to make room. Later blocks of a prefix have earlier times and are evicted first, since
    they cannot be used without the others.
    """

    blocks_per_call: int  # of a `put` or `get`, at most
    num_threads: int  # with the caller's, that `put` and `get` gain from

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return whether each key has a block. The block may be evicted before a later `get`."""
        ...

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        """Store blocks, and return "stored", "known", "full" or "failed" for each."""
        ...

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[bool | None]:  # fmt: skip
        """Fill blocks, and return for each True, False if it is missing, or None if reading it
        has failed. Blocks of the last two kinds may be partly written."""
        ...

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        """Drop damaged blocks (best effort)."""
        ...

    def clear(self, deadline: float) -> None:
        """Drop all blocks of the namespace. OSError if that fails."""
        ...

    def close(self) -> None:
        """Release connections and threads; no calls may be in progress."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return counters by name, in addition to the counts of `BlockStore`."""
        ...


def num_bytes_of(block: Block) -> int:
    """Return the length of a block with its header."""
    return sum(piece.nbytes for piece in block)


def blocks_per_call(num_bytes: int) -> int:
    """Return how many blocks of a length are moved at once.

    >>> blocks_per_call(2**16), blocks_per_call(2**30)
    (64, 1)
    """
    return max(1, min(1024, CALL_BYTES // num_bytes))
