"""Blocks of bytes in shared stores, for engines that allocate their pages themselves.

Blocks are copied through a staging buffer. An engine's memory is therefore only written with blocks
that have passed verification, and no late access of a transfer engine reaches it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from ..arrays import array_at
from ..cache.pool import MLAPool
from ..config import cache_logger
from ..errors import CacheFull, ProcessLocal
from ..remote.stores.backend import FAILED, KNOWN, STORED
from ..remote.stores.store import SharedStore
from .engine_options import as_key

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

HELD = STORED, KNOWN

_STAGING_BYTES = 2**24  # per call in progress
_MAX_STAGED_BLOCKS = 64
_REOPEN_INTERVAL_S = 30.0


class ByteStore(ProcessLocal):
    """Keeps blocks of bytes in a shared store, under keys that an engine chooses.

    Parameters
    ----------
    url : as in `SharedStore.open`. A store in shared memory has blocks of one length, so the length
        is appended to its name: "shm:NAME" becomes "shm:NAME-65536"
    model : distinguishes all that the keys do not: engine, weights, format, layout, rank
    encryption_key : as in `SharedStore.open`, or as in `as_key`
    num_calls : calls in progress at most; others wait for them
    options : of `SharedStore.open`

    Notes
    -----
    Failure: a lost, late or full store and a damaged block are outcomes, never exceptions. A server
    that is unreachable when it is first needed is tried again every 30 s.

    A block is a sequence of writable uint8 arrays (`bytes_at`), its parts in order. All blocks of a
    call have the same length. Threads may share a store. Bytes: each block twice in each direction.
    Memory: for each length up to 16 MiB, or one block, per call in progress.

    Examples
    --------
    >>> import os
    >>> store = ByteStore(f"shm:doctest-{os.getpid()}", model="m", capacity_bytes=2**20)
    >>> block, copy = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    >>> store.put(["a"], [[block]]), store.contains(["a", "b"], 256)
    (['stored'], [True, False])
    >>> store.get(["a", "b"], [[copy[:100], copy[100:]], [np.zeros(256, np.uint8)]])
    [True, False]
    >>> bool((copy == block).all())
    True
    >>> store.remove()
    """

    def __init__(
        self, url: str, *, model: str, encryption_key: Any = None, num_calls: int = 4,
        **options: Any,
    ) -> None:  # fmt: skip
        self._url, self._num_calls = url, num_calls
        self._options = {**options, "model": model, "encryption_key": as_key(encryption_key)}
        self._lock = threading.Lock()
        self._by_length: dict[int, _Blocks] = {}

    def open(self, num_bytes: int) -> None:
        """Open the store for blocks of one length; a server that is unreachable is tried later.

        Raises
        ------
        TypeError, ValueError, ImportError, OSError : as `SharedStore.open`, for all that is wrong
            with the arguments, except a ConnectionError
        """
        self._of_length(num_bytes).open()

    def contains(self, keys: Sequence[str | bytes], num_bytes: int) -> list[bool]:
        """Return for each key whether the store has a block of this length."""
        store = self._of_length(num_bytes).store()
        return store.contains(list(map(block_hash, keys))) if store else [False] * len(keys)

    def match(self, keys: Sequence[str | bytes], num_bytes: int) -> int:
        """Count the leading keys of which the store has a block of this length."""
        store = self._of_length(num_bytes).store()
        return store.match(list(map(block_hash, keys))) if store else 0

    def put(self, keys: Sequence[str | bytes], blocks: Sequence[Sequence[Bytes]]) -> list[str]:
        """Store blocks; return the outcomes of `SharedStore.put`. `HELD` has the successes."""
        if not keys:
            return []
        return self._of_length(_length(blocks[0])).put(list(map(block_hash, keys)), blocks)

    def get(self, keys: Sequence[str | bytes], blocks: Sequence[Sequence[Bytes]]) -> list[bool]:
        """Fill blocks; return for each whether it arrived. The others are not written."""
        if not keys:
            return []
        return self._of_length(_length(blocks[0])).get(list(map(block_hash, keys)), blocks)

    def stats(self) -> dict[int, dict[str, Any]]:
        """Return `SharedStore.stats` by length of the blocks, of the stores that are open."""
        with self._lock:
            lengths = dict(self._by_length)
        return {n: store.stats() for n, blocks in lengths.items() if (store := blocks.opened)}

    def close(self) -> None:
        """Close the stores; no calls may be in progress. Idempotent."""
        for blocks in self._by_length.values():
            if blocks.opened is not None:
                blocks.opened.close()

    def remove(self) -> None:
        """Close the stores, and remove the blocks that `SharedStore.remove` does."""
        for blocks in self._by_length.values():
            if blocks.opened is not None:
                blocks.opened.remove()
        self.close()

    def _of_length(self, num_bytes: int) -> _Blocks:
        with self._lock:
            if num_bytes not in self._by_length:
                is_memory = self._url.partition(":")[0] == "shm"
                url = f"{self._url}-{num_bytes}" if is_memory else self._url
                self._by_length[num_bytes] = _Blocks(url, num_bytes, self._num_calls, self._options)
            return self._by_length[num_bytes]


class _Blocks:
    """The blocks of one length, and the buffer in which they are staged.

    Attributes
    ----------
    opened : the SharedStore, or None while it is unreachable
    """

    def __init__(self, url: str, num_bytes: int, num_calls: int, options: dict[str, Any]) -> None:
        self._url, self._options = url, options
        self._at_once = max(1, min(_MAX_STAGED_BLOCKS, _STAGING_BYTES // num_bytes))
        memory = np.empty((num_calls * self._at_once, 1, num_bytes), np.int8)
        self._pool = MLAPool.wrap([memory])
        self._rows: Bytes = memory[:, 0].view(np.uint8)
        self._calls = threading.BoundedSemaphore(num_calls)
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self.opened: SharedStore | None = None

    def open(self) -> None:
        """Open the store, or try again later if it is unreachable; raise other errors."""
        self._open(ConnectionError)

    def store(self) -> SharedStore | None:
        """Return the store, opened if it is time to try; None if that fails."""
        if self.opened is None and time.monotonic() >= self._retry_at:
            self._open(OSError)
        return self.opened

    def _open(self, expected: type[OSError]) -> None:
        with self._lock:
            if self.opened is not None:
                return
            try:
                self.opened = SharedStore.open(self._url, self._pool, **self._options)
            except expected as error:
                self._retry_at = time.monotonic() + _REOPEN_INTERVAL_S
                cache_logger.warning(
                    "%s is tried again in %g s: %s", self._url, _REOPEN_INTERVAL_S, error
                )

    def put(self, hashes: Sequence[int], blocks: Sequence[Sequence[Bytes]]) -> list[str]:
        if (store := self.store()) is None:
            return [FAILED] * len(hashes)
        outcomes = [KNOWN if known else FAILED for known in store.contains(hashes)]
        missing = [i for i, outcome in enumerate(outcomes) if outcome == FAILED]
        for some in self._chunks(missing):
            with self._staged(len(some)) as pages:
                for page, i in zip(pages, some, strict=False):
                    _copy(blocks[i], self._rows[page], to_row=True)
                results = store.put([hashes[i] for i in some[: len(pages)]], pages)
                for i, result in zip(some, results, strict=False):
                    outcomes[i] = result
        return outcomes

    def get(self, hashes: Sequence[int], blocks: Sequence[Sequence[Bytes]]) -> list[bool]:
        there = [False] * len(hashes)
        if (store := self.store()) is None:
            return there
        for some in self._chunks(range(len(hashes))):
            with self._staged(len(some)) as pages:
                arrived = store.get([hashes[i] for i in some[: len(pages)]], pages)
                for page, i, whole in zip(pages, some, arrived, strict=False):
                    if whole:
                        _copy(blocks[i], self._rows[page], to_row=False)
                        there[i] = True
        return there

    def _chunks(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(numbers), self._at_once):
            yield numbers[start : start + self._at_once]

    @contextmanager
    def _staged(self, count: int) -> Iterator[Any]:
        """Yield pages of the staging buffer; none while accesses that have failed hold them."""
        with self._calls:
            try:
                pages = self._pool.allocator.alloc(count)
            except CacheFull:
                yield []
                return
            try:
                yield pages
            finally:
                self._pool.allocator.free(pages)


def block_hash(key: str | bytes) -> int:
    """Return the 128-bit hash that names a block.

    >>> f"{block_hash('a'):032x}"
    '27c35e6e9373877f29e562464e46497e'
    """
    data = key.encode() if isinstance(key, str) else key
    return int.from_bytes(blake2b(data, digest_size=16).digest(), "big")


def bytes_at(pointer: int, num_bytes: int, owner: object = None) -> Bytes:
    """Return memory of an engine, which `owner` or the caller keeps alive, as an array."""
    return array_at(owner, pointer, (num_bytes,), np.dtype(np.uint8))


def _length(block: Sequence[Bytes]) -> int:
    return sum(part.nbytes for part in block)


def _copy(parts: Sequence[Bytes], row: Bytes, *, to_row: bool) -> None:
    start = 0
    for part in parts:
        staged = row[start : start + part.nbytes]
        if to_row:
            staged[...] = part
        else:
            part[...] = staged
        start += part.nbytes
