"""Backend protocol of `SharedStore`: shared memory, servers and transfer engines implement it.

A backend module has a function `open_backend(url, pages, *, namespace, capacity_bytes, deadline,
**options) -> Backend`: the URL as the user wrote it; the `WirePages` of the host pool; 16 bytes
that are the same for all blocks of a tenant; the user's `capacity_bytes` or None; and
backend-specific options. It raises TypeError, ValueError or OSError for invalid arguments, and
BackendLost if the server is unreachable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import xxhash

from ...cache.encryption import Decryption
from ...cache.hazards import Completion
from ..wire import checksum

Block = Sequence[memoryview]  # the bytes of a block in wire order, in contiguous pieces

STORED, KNOWN, FULL, FAILED = "stored", "known", "full", "failed"  # outcomes of a put

MAX_HEADER_BYTES = 128


class StoredBlock(NamedTuple):
    """A block of a store, as its operator sees it.

    Attributes
    ----------
    key : names the block in this store
    num_bytes : of the block; on a server, of the memory that it takes
    idle_s : seconds since its last use; None if unknown
    tenant : digest of the tenant, in hexadecimal; "" if unknown
    """

    key: bytes
    num_bytes: int
    idle_s: float | None = None
    tenant: str = ""


class BackendLost(Exception):
    """The store is unreachable, or did not answer in time.

    `SharedStore` counts it, and reports a miss or "failed".

    Attributes
    ----------
    results : one result per block, as far as known; or empty
    refused : whether the store is reachable but denies access to this user
    repeatable : whether an immediate retry may succeed; False if `refused`
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
    """A block whose checksum can be computed while the block is copied.

    Hashing each part next to its copy reads the part from the CPU cache.
    """

    def __init__(self, pieces: Iterable[memoryview], *, is_summed: bool) -> None:
        super().__init__(pieces)
        self._is_summed = is_summed
        self._hasher: xxhash.xxh3_64 | None = None

    def begin(self, header: bytes | None = None) -> Callable[[Any], None] | None:
        """Start a checksum; pass all parts of the block to the returned function, in order.

        Return None if nothing is to be done with the parts. `header`: of a block that is copied
        from the store.
        """
        if not self._is_summed:
            return None
        self._hasher = xxhash.xxh3_64()
        return self._hasher.update

    def checksum(self) -> int:
        """Return the checksum of the parts passed since `begin`, or compute it from the block."""
        return checksum(self) if self._hasher is None else self._hasher.intdigest()


class SealedBlock(SummedBlock):
    """An encrypted block that is decrypted in place, if possible while it is copied.

    `decryption` : starts it by the block's header; returns None for a header of no encrypted block
    """

    def __init__(
        self, pieces: Iterable[memoryview], decryption: Callable[[bytes], Decryption | None]
    ) -> None:
        super().__init__(pieces, is_summed=False)
        self._start = decryption
        self._decryption: Decryption | None = None

    def begin(self, header: bytes | None = None) -> Callable[[Any], None] | None:
        self._decryption = None if header is None else self._start(header)
        return None if self._decryption is None else self._decryption.update

    def is_authentic(self, header: bytes) -> bool:
        """Return whether the block is authentic, after decrypting it unless that has been done."""
        if self._decryption is None and (update := self.begin(header)) is not None:
            for piece in self:
                update(piece)
        return self._decryption is not None and self._decryption.is_authentic()


class Backend(Protocol):
    """Keeps blocks by key, each with an opaque header.

    A block is visible whole or not at all, and the first block stored under a key stays.
    `SharedStore` makes headers, and verifies blocks on arrival without trusting the backend.
    Methods are thread-safe. A permanent failure is not an exception: the block is "failed" or
    missing. After `deadline`, a value of `time.monotonic`, a call gives up.

    Attributes
    ----------
    blocks_per_get : maximum number of blocks `SharedStore` requests in one `get`. Small where
        batching gains little, so that blocks are verified while they are in the CPU cache
    put_asks_first : whether `put` sends no data of known blocks, so that calling `exists` before
        it is unnecessary. Blocks that are encrypted are asked for in any case

    Optional attributes
    -------------------
    helpers : `Helpers`, threads that also encrypt the blocks of large puts
    puts_pages_only : whether `put` takes no blocks from memory outside the pool; such stores cannot
        encrypt. False by default
    """

    blocks_per_get: int
    put_asks_first: bool

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return whether each key has a block. The block may be evicted before a later `get`.

        Raises
        ------
        BackendLost : the store is unreachable
        """
        ...

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], headers: Sequence[bytes],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        """Store blocks, and return "stored", "known", "full" or "failed" for each.

        Each of `headers`, of at most `MAX_HEADER_BYTES`, is computed from its block on first
        access. Access it just before sending the block, or after passing the whole block to the
        function from `SummedBlock.begin`, so that the block is read from memory only once. Blocks
        of one call do not evict each other.

        Raises
        ------
        BackendLost : the store is unreachable; it is unknown which blocks were stored
        """
        ...

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[bytes | None]:
        """Fill blocks, and return the header stored with each; None for each missing block.

        Missing blocks, and blocks of another length, may be partly written. Of every other block,
        either all or no parts were passed, in place, to the function from
        `SummedBlock.begin(header)`, which may change them.

        Raises
        ------
        BackendLost : the store is unreachable; the contents of the blocks are undefined
        """
        ...

    def busy(self, keys: Sequence[bytes]) -> Completion | None:
        """Return the completion of accesses that outlive a failed `get` or `put` of these keys.

        Applies to blocks that `get` did not return or `put` did not store, and to calls that
        raised BackendLost. None means that the backend stops accessing blocks when the call ends.
        """
        ...

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        """Drop damaged blocks (best effort).

        Raises
        ------
        BackendLost : the store is unreachable
        """
        ...

    def remove(self, deadline: float) -> Any:
        """Release the memory of the embedded store, or drop all blocks of this tenant.

        Raises
        ------
        OSError, BackendLost : the store could not be removed
        """
        ...

    def close(self) -> None:
        """Release connections and memory; no calls may be in progress."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return counters by name, in addition to the counts of `SharedStore`."""
        ...
