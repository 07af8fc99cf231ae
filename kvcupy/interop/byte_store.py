"""Block stores of engines that allocate their pages themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from ..arrays import array_at
from ..cache.pool import MLAPool
from ..config import cache_logger
from ..errors import ProcessLocal
from ..remote.stores.backend import KNOWN, STORED
from ..remote.stores.store import BlockStore
from .engine_options import StoreOptions, as_key, store_options

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_STAGING_BYTES = 2**24  # per call in progress
_MAX_STAGED_BLOCKS = 64
_REOPEN_INTERVAL_S = 30.0


class PoolStores(ProcessLocal):
    """Block stores of one pool, the nearest first."""

    def __init__(self, stores: Any, pool: Any, *, model: str, encryption_key: Any = None) -> None:
        self._pool = pool
        self._options = {"model": model, "encryption_key": as_key(encryption_key)}
        self._lock = threading.Lock()  # guards the fields below
        self._unopened = list(enumerate(store_options(stores)))
        self._opened: dict[int, BlockStore] = {}
        self._retry_at = 0.0
        try:
            self._open(ConnectionError)
        except BaseException:
            self.close()
            raise

    def contains(self, hashes: Sequence[int]) -> list[bool]:
        """Return for each block whether a store has it."""
        held = [False] * len(hashes)
        for store in self._stores():
            missing = [i for i, known in enumerate(held) if not known]
            known = store.contains([hashes[i] for i in missing])
            for i, found in zip(missing, known, strict=True):
                held[i] = found
        return held

    def put(self, hashes: Sequence[int], pages: Sequence[int]) -> list[bool]:
        """Put blocks into all stores; return for each whether one has it now."""
        held = [False] * len(hashes)
        for store in self._stores():
            for i, outcome in enumerate(store.put(hashes, pages)):
                held[i] |= outcome in (STORED, KNOWN)
        return held

    def get(self, hashes: Sequence[int], pages: Sequence[int]) -> list[bool]:
        """Read blocks into pages; return for each whether it arrived."""
        held = [False] * len(hashes)
        for store in self._stores():
            missing = [i for i, arrived in enumerate(held) if not arrived]
            arrived = store.get([hashes[i] for i in missing], [pages[i] for i in missing])
            for i, whole in zip(missing, arrived, strict=True):
                held[i] = whole
        return held

    def stats(self) -> list[dict[str, Any]]:
        """Return `BlockStore.stats` of the stores that are open."""
        return [store.stats() for store in self._stores()]

    def close(self) -> None:
        """Close the stores; their blocks stay. Idempotent."""
        for store in self._opened.values():
            store.close()

    def _stores(self) -> list[BlockStore]:
        """Return the stores that are open, after trying the others if it is time to."""
        if self._unopened and time.monotonic() >= self._retry_at:
            self._open(OSError)
        with self._lock:
            return [self._opened[i] for i in sorted(self._opened)]

    def _open(self, expected: type[OSError]) -> None:
        """Open the stores that are not open yet; try again later after the expected error."""
        with self._lock:
            for number, (url, capacity_bytes) in list(self._unopened):
                try:
                    store = BlockStore.open(
                        url, self._pool, capacity_bytes=capacity_bytes, **self._options
                    )
                except expected as error:
                    self._retry_at = time.monotonic() + _REOPEN_INTERVAL_S
                    cache_logger.warning(
                        "store %d is tried again in %g s: %s", number, _REOPEN_INTERVAL_S, error
                    )
                else:
                    self._opened[number] = store
                    self._unopened.remove((number, StoreOptions(url, capacity_bytes)))


class ByteStore(ProcessLocal):
    """Keeps blocks of bytes in block stores, under keys that an engine chooses.

    Blocks are copied through a staging buffer: an engine's memory is only written with blocks that
    have passed verification.
    """

    def __init__(
        self, stores: Any, *, model: str, encryption_key: Any = None, num_calls: int = 4
    ) -> None:
        self._stores, self._num_calls = store_options(stores), num_calls
        self._model, self._encryption_key = model, as_key(encryption_key)
        self._lock = threading.Lock()
        self._by_length: dict[int, _Blocks] = {}

    def open(self, num_bytes: int) -> None:
        """Open the stores for blocks of one length."""
        self._of_length(num_bytes)

    def contains(self, keys: Sequence[str | bytes], num_bytes: int) -> list[bool]:
        """Return for each key whether a store has a block of this length."""
        return self._of_length(num_bytes).stores.contains(list(map(block_hash, keys)))

    def put(self, keys: Sequence[str | bytes], blocks: Sequence[Sequence[Bytes]]) -> list[bool]:
        """Store blocks; return for each whether a store has it now."""
        if not keys:
            return []
        return self._of_length(_length(blocks[0])).put(list(map(block_hash, keys)), blocks)

    def get(self, keys: Sequence[str | bytes], blocks: Sequence[Sequence[Bytes]]) -> list[bool]:
        """Fill blocks; return for each whether it arrived. The others are not written."""
        if not keys:
            return []
        return self._of_length(_length(blocks[0])).get(list(map(block_hash, keys)), blocks)

    def stats(self) -> dict[int, list[dict[str, Any]]]:
        """Return `BlockStore.stats` of each store that is open, by length of the blocks."""
        with self._lock:
            lengths = dict(self._by_length)
        return {num_bytes: blocks.stores.stats() for num_bytes, blocks in lengths.items()}

    def close(self) -> None:
        """Close the stores; no calls may be in progress. Idempotent."""
        for blocks in self._by_length.values():
            blocks.stores.close()

    def _of_length(self, num_bytes: int) -> _Blocks:
        with self._lock:
            if num_bytes not in self._by_length:
                self._by_length[num_bytes] = _Blocks(
                    self._stores, num_bytes, self._num_calls, self._model, self._encryption_key
                )
            return self._by_length[num_bytes]


class _Blocks:
    """The blocks of one length, and the buffer in which they are staged."""

    def __init__(
        self, stores: Any, num_bytes: int, num_calls: int, model: str, encryption_key: Any
    ) -> None:
        self._at_once = max(1, min(_MAX_STAGED_BLOCKS, _STAGING_BYTES // num_bytes))
        memory = np.empty((num_calls * self._at_once, 1, num_bytes), np.int8)
        self._pool = MLAPool.wrap([memory])
        self._rows: Bytes = memory[:, 0].view(np.uint8)
        self._calls = threading.BoundedSemaphore(num_calls)
        self.stores = PoolStores(stores, self._pool, model=model, encryption_key=encryption_key)

    def put(self, hashes: Sequence[int], blocks: Sequence[Sequence[Bytes]]) -> list[bool]:
        held = [False] * len(hashes)
        for some, pages in self._staged(range(len(hashes))):
            for page, i in zip(pages, some, strict=True):
                _copy(blocks[i], self._rows[page], to_row=True)
            outcomes = self.stores.put([hashes[i] for i in some], pages)
            for i, is_held in zip(some, outcomes, strict=True):
                held[i] = is_held
        return held

    def get(self, hashes: Sequence[int], blocks: Sequence[Sequence[Bytes]]) -> list[bool]:
        held = [False] * len(hashes)
        for some, pages in self._staged(range(len(hashes))):
            arrived = self.stores.get([hashes[i] for i in some], pages)
            for page, i, whole in zip(pages, some, arrived, strict=True):
                if whole:
                    _copy(blocks[i], self._rows[page], to_row=False)
                    held[i] = True
        return held

    def _staged(self, numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], Any]]:
        """Yield chunks of the blocks' numbers, each with as many pages of the staging buffer."""
        for start in range(0, len(numbers), self._at_once):
            some = numbers[start : start + self._at_once]
            with self._calls:
                pages = self._pool.allocator.alloc(len(some))
                try:
                    yield some, pages
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
