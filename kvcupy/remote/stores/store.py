"""Content-addressed blocks that outlive a process, or that processes share."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from ... import checks, metrics
from ...cache.identity import KEY_BYTES, BlockKeys, identity_of
from ...cache.pages import page_array
from ...cache.pool import Pool
from ...cache.threads import Helpers, Users
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError, ProcessLocal
from ..wire import WirePages, checksum
from .backend import FAILED, KNOWN, STORED, Backend, BackendLost
from .encrypted import SEAL_BYTES, BlockCipher, EncryptedBackend

_Result = TypeVar("_Result")

# Modules of this package by URL scheme, imported on demand by `BlockStore.open`.
_BACKENDS = {
    "file": "file", "redis": "redis", "rediss": "redis", "unix": "redis", "mooncake": "mooncake",
}  # fmt: skip

_HEADER = struct.Struct(f"<8sQQ{KEY_BYTES}s")  # magic, bytes of the block, checksum, key
HEADER_BYTES = _HEADER.size
_MAGIC = b"kvcupy-1"

_MIN_HELPED_BYTES = 2**21  # a call of less ends before another thread has woken up
_KEYS_PER_QUERY = 1024
_MAX_LOST_IN_A_ROW, _SKIP_S = 3, 10.0
_NEGATIVE_CACHE_TTL_S, _NEGATIVE_CACHE_SIZE = 10.0, 2**16


class BlockStore(ProcessLocal):
    """Stores pages of a host pool under their block hashes: in files, in Redis or in Mooncake.

    Made by `BlockStore.open`. A block is found whole, with the bytes that were put, or not at all.
    Processes find each other's blocks if their pools have the same identity (format, page size,
    layers, heads, widths, `model`) and `tenant`. Layouts may differ, but "page_head" pools share
    only with each other.

    Attributes
    ----------
    pool : the host pool
    identity : its PoolIdentity, part of every key
    deadline_s : default time limit of a call, in seconds

    Notes
    -----
    Errors: each call raises TypeError or ValueError for its arguments, before any block is read or
    stored, and KvcupyError if the store is closed or belongs to the parent of this process.

    Failure: a lost, late, full or damaged store is an outcome and a counter, never an exception of
    `match`, `get` or `put`. Blocks are verified on arrival (XXH3, or the tag of an encrypted
    block); a damaged one is a miss, and is dropped. After 3 consecutive lost or late calls, the
    store is skipped for 10 s: lookups miss and puts fail. Calls with less than half of the store's
    deadline do not count. Blocks that could not be read are not requested again for 10 s.

    Stream: calls run on the CPU. Before the call, pages to put must be complete, and pages to get
    into must not be in use. When it returns or raises, nothing accesses them any more.

    Capture: legal; nothing is enqueued on a stream. Bytes: each page once in each direction. Pools
    whose pages consist of small pieces (see `WirePages.is_direct`) copy them once more.

    Threads may share a store. It belongs to the process that opened it.

    Source: LMCache/LMCache and vllm-project/vllm keep a block per file, too.
    """

    _instead = "open one in each process"

    def __init__(
        self, backend: Backend, pages: WirePages, keys: BlockKeys, *, deadline_s: float
    ) -> None:
        self.pool, self.identity, self.deadline_s = pages.pool, keys.identity, deadline_s
        self._backend, self._pages, self._keys = backend, pages, keys
        self._helpers = Helpers(backend.num_threads - 1, "kvcupy store")
        self._log = BoundedLog(cache_logger)
        self._lock = threading.RLock()  # guards the fields below
        self._users = Users()  # calls in progress on the backend
        self._counts: Counter[str] = Counter()  # also of seconds
        self._retry_at: dict[bytes, float] = {}  # of keys whose last read failed
        self._lost_in_a_row, self._skipped_until = 0, -math.inf
        self._buffers: list[np.ndarray[Any, np.dtype[np.uint8]]] = []  # not in use
        counts = self._counts
        metrics.follow(self, lambda store: _samples(store._counts), lambda: _samples(counts))

    @classmethod
    def open(
        cls, url: str, host_pool: Any, *,
        capacity_bytes: int | None = None, tenant: str | bytes = "", model: str = "",
        heads: tuple[int, int] | None = None, encryption_key: bytes | None = None,
        deadline_s: float = 5.0,
    ) -> BlockStore:  # fmt: skip
        """Open a store.

        Parameters
        ----------
        url : "file:PATH", a directory on a disk, in /dev/shm or on a shared file system, used by
            one process or many; "redis://...", "rediss://..." or "unix:PATH", a Redis or Valkey
            server; "mooncake://host:port", the master of a Mooncake Store. See
            docs/beyond_one_process.md for what the URLs of servers may contain
        host_pool : a KVPool or an MLAPool in host memory: of the host device, or "pinned" or
            "pageable"
        capacity_bytes : for "file:", disk space of the blocks, each a multiple of 4 KiB, of which
            the least recently used are then evicted; None evicts when the disk is full. Servers
            evict by their own policy
        tenant : str or bytes. Tenants cannot find each other's blocks
        model : a string that distinguishes models whose pools have the same shape: weights,
            adapter, rotary settings
        heads : (first, total), if the pool holds some heads of the model: the first of them, and
            the number of all
        encryption_key : None, or 32 bytes, secret and random, with which blocks are encrypted
            and authenticated. Stores with another key, or with none, do not find these blocks, and
            store other blocks next to them
        deadline_s : default time limit of a call, and the limit of this one, in seconds

        Raises
        ------
        TypeError, ValueError : an argument has the wrong type or value
        ImportError : a package is missing; the message names it
        OSError : the directory cannot be made or written, or is not private; ConnectionError or
            PermissionError if the server is unreachable or denies access

        Examples
        --------
        >>> import tempfile, kvcupy as kv
        >>> shape = dict(page_size=16, num_layers=2, num_kv_heads=8, head_dim=128, device="host")
        >>> one, other = kv.KVPool(4, **shape), kv.KVPool(4, **shape, layout="page_first_direct")
        >>> one.k(1)[0, 5] = 7
        >>> hashes = kv.block_hashes(range(48), 16)
        >>> folder = tempfile.TemporaryDirectory()
        >>> url = f"file:{folder.name}/blocks"
        >>> with kv.BlockStore.open(url, one, capacity_bytes=2**21) as store:
        ...     store.put(hashes[:2], [0, 1])
        ['stored', 'stored']
        >>> with kv.BlockStore.open(url, other) as again:
        ...     again.match(hashes), again.get(hashes, [3, 2, 1])
        (2, [True, True, False])
        >>> float(other.k(1)[3, 5, 0, 0])
        7.0
        >>> folder.cleanup()
        """
        if not isinstance(url, str):
            raise TypeError(f"url: expected a str, got {type(url).__name__}")
        scheme = url.partition(":")[0]
        if scheme not in _BACKENDS:
            raise ValueError(
                f"url: expected one that starts with one of {', '.join(_BACKENDS)}, got {scheme!r}"
            )
        if not isinstance(host_pool, Pool):
            kind = type(host_pool).__name__
            raise TypeError(f"host_pool: expected a KVPool or an MLAPool, got {kind}")
        identity = identity_of(host_pool, model, heads)
        keys, cipher = BlockKeys(identity, tenant), None
        namespace = keys.namespace
        pages = WirePages(host_pool)
        num_bytes = HEADER_BYTES + pages.block_bytes
        if encryption_key is not None:
            cipher = BlockCipher(encryption_key, identity.digest())
            keys = BlockKeys(identity, tenant, secret=cipher.name_key)
            num_bytes += SEAL_BYTES
        seconds = checks.seconds_of(deadline_s)
        module = import_module(f".{_BACKENDS[scheme]}", __package__)
        try:
            backend = module.open_backend(
                url, namespace=blake2b(identity.digest(), digest_size=16, key=namespace).digest(),
                num_bytes=num_bytes, capacity_bytes=capacity_bytes,
                deadline=time.monotonic() + seconds,
            )  # fmt: skip
        except BackendLost as error:
            failure = PermissionError if error.refused else ConnectionError
            raise failure(f"url: {error}") from error
        if cipher is not None:
            backend = EncryptedBackend(backend, cipher)
        return cls(backend, pages, keys, deadline_s=seconds)

    def __repr__(self) -> str:
        return f"<BlockStore over {self._backend!r}>"

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- Blocks ---

    def match(self, hashes: Any) -> int:
        """Count the leading blocks that the store has.

        Parameters
        ----------
        hashes : list of 128-bit ints (`block_hashes`), starting at the first block of a prefix
        """
        return self._look_up(hashes, until_missing=True)[1]

    def contains(self, hashes: Any) -> list[bool]:
        """Return for each block whether the store has it; False if it is lost or late.

        Parameters
        ----------
        hashes : list of 128-bit ints, of any blocks
        """
        return self._look_up(hashes, until_missing=False)[0]

    def _look_up(self, hashes: Any, *, until_missing: bool) -> tuple[list[bool], int]:
        """Return which blocks the store has, and the number of leading ones."""
        keys = self._keys.keys(hashes)
        known: list[bool] = []
        with self._using():
            deadline = time.monotonic() + self.deadline_s
            for start in range(0, len(keys), _KEYS_PER_QUERY):
                if start and time.monotonic() >= deadline:
                    break
                known += self._known(keys[start : start + _KEYS_PER_QUERY], deadline)
                if until_missing and not known[-1]:
                    break
        known += [False] * (len(keys) - len(known))
        return known, [*known, False].index(False)

    def put(self, hashes: Any, pages: Any) -> list[str]:
        """Store the blocks that the store does not have.

        Parameters
        ----------
        hashes : list of 128-bit ints
        pages : list or integer array, the page of each block

        Returns
        -------
        for each block "stored"; "known", the store already had it; "full", the place has no room
        and nothing can be evicted; or "failed", the store is lost or late. A "failed" block may
        have been stored. Blocks of one call do not evict each other
        """
        keys = self._keys.keys(hashes)
        numbers = self._page_list(pages, len(keys))
        with self._using():
            started, deadline = time.perf_counter(), time.monotonic() + self.deadline_s
            known = self._known(keys, deadline) if keys else []
            outcomes = [KNOWN if is_known else FAILED for is_known in known]
            first: dict[bytes, int] = {}  # of equal keys
            for i, is_known in enumerate(known):
                if not is_known:
                    first.setdefault(keys[i], i)
            missing, used_ns = list(first.values()), _times_of_use(keys)
            self._pages.announce("put to a store", [numbers[i] for i in missing], is_read=True)

            def put(chunk: Sequence[int]) -> None:
                if time.monotonic() >= deadline:
                    return
                chunk_keys = [keys[i] for i in chunk]
                with self._blocks([numbers[i] for i in chunk]) as blocks:
                    for i, block in zip(chunk, blocks, strict=True):
                        if not self._pages.is_direct:
                            self._pages.read_into(numbers[i], block[1])
                        block[0][:] = self._header(keys[i], checksum(block[1:]))
                    results, _ = self._call(
                        self._backend.put, chunk_keys, blocks, used_ns, deadline=deadline
                    )
                for i, outcome in zip(chunk, results or [FAILED] * len(chunk), strict=True):
                    outcomes[i] = outcome

            self._each(put, missing)
            for i, key in enumerate(keys):
                if (same := first.get(key, i)) != i and not known[i]:
                    outcomes[i] = KNOWN if outcomes[same] == STORED else outcomes[same]
            for key, outcome in zip(keys, outcomes, strict=True) if self._retry_at else ():
                if outcome == STORED:
                    self._retry_at.pop(key, None)
            self._note_call("put", outcomes, started)
        return outcomes

    def get(self, hashes: Any, pages: Any, *, deadline_s: float | None = None) -> list[bool]:
        """Read blocks into pages.

        Parameters
        ----------
        hashes : list of 128-bit ints
        pages : list or integer array, the destination page of each block, without duplicates
        deadline_s : time limit of this call, in seconds. Late blocks are misses

        Returns
        -------
        for each block, whether it is in its page. The contents of the other pages are undefined
        """
        keys = self._keys.keys(hashes)
        numbers = self._page_list(pages, len(keys))
        if len(set(numbers)) < len(numbers):
            raise ValueError("pages: expected each page once, got one twice")
        seconds = self.deadline_s if deadline_s is None else checks.seconds_of(deadline_s)
        with self._using():
            started, deadline = time.perf_counter(), time.monotonic() + seconds
            is_hit = [False] * len(keys)
            asked = [i for i, failed in enumerate(self._are_failed(keys)) if not failed]
            used_ns = _times_of_use(keys)
            self._pages.announce("get from a store", [numbers[i] for i in asked], is_read=False)

            def get(chunk: Sequence[int]) -> None:
                if time.monotonic() >= deadline:
                    self._count("late", len(chunk))
                    return
                arrived = self._get_some(
                    [keys[i] for i in chunk], [numbers[i] for i in chunk], used_ns, deadline
                )
                for i, whole in zip(chunk, arrived, strict=True):
                    is_hit[i] = whole

            try:
                self._each(get, asked)
            finally:
                if asked:
                    self.pool.note_written()
            self._note_call("get", ["hits" if hit else "misses" for hit in is_hit], started)
        return is_hit

    def _get_some(
        self, keys: Sequence[bytes], pages: Sequence[int], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[bool]:  # fmt: skip
        """Read blocks with one backend call; return which arrived and passed verification."""
        with self._blocks(pages) as blocks:
            results, lost = self._call(self._backend.get, keys, blocks, used_ns, deadline=deadline)
            arrived = list(results or [None if lost else False] * len(keys))
            failed = [key for key, whole in zip(keys, arrived, strict=True) if whole is None]
            damaged = []
            for i, block in enumerate(blocks):
                if arrived[i] is not True:
                    continue
                if block[0] != self._header(keys[i], checksum(block[1:])):
                    arrived[i] = None
                    damaged.append(keys[i])
                elif not self._pages.is_direct:
                    self._pages.write_from(pages[i], block[1])
        if damaged:
            self._count("damaged", len(damaged))
            self._log.warning("dropping %d damaged blocks of %r", len(damaged), self._backend)
            self._call(self._backend.discard, damaged, deadline=deadline)
        self._note_failed(damaged + failed)
        return [whole is True for whole in arrived]

    def clear(self) -> None:
        """Drop the blocks of this tenant, model and identity, for all processes.

        OSError if blocks may be left; ConnectionError if the server is lost.
        """
        with self._using():
            try:
                self._backend.clear(time.monotonic() + self.deadline_s)
            except BackendLost as error:
                raise ConnectionError(f"clear: {error}") from error

    # --- Statistics and closing ---

    def stats(self) -> dict[str, Any]:
        """Return this process's counts since the store was opened, and the backend's counters.

        Puts, in blocks: `stored`, `known`, `full` and `failed`. Gets, in blocks: `hits` and
        `misses`; of the misses, `damaged` (the header or the checksum is wrong) and `late`. Also
        `put_bytes`, `get_bytes`, `put_s` and `get_s`. Calls: `lost` (no connection), `slow`
        (late), and `skipped` (after consecutive lost or late calls).
        """
        names = (
            "stored", "known", "full", "failed", "hits", "misses", "damaged", "late",
            "put_bytes", "get_bytes", "put_s", "get_s", "lost", "slow", "skipped",
        )  # fmt: skip
        with self._using():
            with self._lock:
                counts: dict[str, Any] = {name: self._counts[name] for name in names}
            return {**counts, **self._backend.stats()}

    def close(self) -> None:
        """Wait for calls of other threads, then close the store; its blocks stay. Idempotent."""
        if self._users.close():
            self._helpers.close()
            self._backend.close()

    # --- Memory ---

    def _header(self, key: bytes, total: int) -> bytes:
        return _HEADER.pack(_MAGIC, self._pages.block_bytes, total, key)

    @contextmanager
    def _blocks(self, pages: Sequence[int]) -> Iterator[list[list[memoryview]]]:
        """Yield memory for header and contents of blocks: the pages' own, or buffers."""
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in pages]
        if self._pages.is_direct:
            yield [
                [header, *self._pages.pieces(page)]
                for header, page in zip(headers, pages, strict=True)
            ]
            return
        buffers = [self._buffer() for _ in pages]
        yield [[header, buffer.data] for header, buffer in zip(headers, buffers, strict=True)]
        self._buffers += buffers

    def _buffer(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            return self._buffers.pop()
        except IndexError:
            return np.empty(self._pages.block_bytes, np.uint8)

    def _page_list(self, pages: Any, count: int) -> list[int]:
        numbers = [int(page) for page in page_array(pages)]
        if len(numbers) != count:
            raise ValueError(f"pages: expected {count}, one for each hash, got {len(numbers)}")
        for page in numbers:
            if not 0 <= page < self.pool.num_pages:
                raise ValueError(f"pages: expected 0 to {self.pool.num_pages - 1}, got {page}")
        return numbers

    # --- Calls to the backend ---

    def _each(self, move: Callable[[Sequence[int]], None], indices: list[int]) -> None:
        """Call a function with chunks of the indices of blocks, in several threads if they help."""
        per_call = self._backend.blocks_per_call
        chunks = [indices[i : i + per_call] for i in range(0, len(indices), per_call)]
        is_large = len(indices) * self._pages.block_bytes >= _MIN_HELPED_BYTES
        share = min(self._helpers.count, len(chunks) - 1) if is_large else 0
        self._helpers.each(move, chunks, share)

    def _known(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which blocks the store has, excluding those in the negative cache."""
        known, _ = self._call(self._backend.exists, keys, deadline=deadline)
        if known is None:
            return [False] * len(keys)
        return [
            is_known and not failed
            for is_known, failed in zip(known, self._are_failed(keys), strict=True)
        ]

    def _call(
        self, function: Callable[..., _Result], *arguments: Any, deadline: float
    ) -> tuple[_Result | None, bool]:
        """Call a method of the backend, unless the backend is being skipped.

        Return the result, or None if it is unknown, and whether the backend was lost.
        """
        started = time.monotonic()
        with self._lock:
            if started < self._skipped_until:
                self._counts["skipped"] += 1
                return None, False
        result, failure = None, ""
        try:
            result = function(*arguments, deadline)
        except (BackendLost, OSError) as error:
            failure = str(error) or type(error).__name__
        except Exception as error:  # of a client library, whose texts may contain a password
            failure = type(error).__name__
        now = time.monotonic()
        late = now - started >= self.deadline_s
        # A deadline that was short, or nearly over at the start, says nothing about the server.
        hurried = now >= deadline and deadline - started < self.deadline_s / 2
        lost = bool(failure) and not hurried
        with self._lock:
            self._counts["lost"] += bool(failure)
            if not lost and not late:
                if not failure:
                    self._lost_in_a_row = 0
                return result, False
            self._counts["slow"] += not failure
            self._lost_in_a_row += 1
            skips = self._lost_in_a_row >= _MAX_LOST_IN_A_ROW
            if skips:
                self._skipped_until = now + _SKIP_S
        if skips:
            self._log.warning(
                "skipping %r for %g s: %s", self._backend, _SKIP_S, failure or "calls are late"
            )
        return result, lost

    def _are_failed(self, keys: Sequence[bytes]) -> list[bool]:
        if not self._retry_at:
            return [False] * len(keys)
        now = time.monotonic()
        with self._lock:
            return [self._retry_at.get(key, now) > now for key in keys]

    def _note_failed(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        until = time.monotonic() + _NEGATIVE_CACHE_TTL_S
        with self._lock:
            for key in keys:
                self._retry_at.pop(key, None)  # keeps the oldest first
                self._retry_at[key] = until
            while len(self._retry_at) > _NEGATIVE_CACHE_SIZE:
                del self._retry_at[next(iter(self._retry_at))]

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self._counts[name] += amount

    def _note_call(self, call: str, outcomes: Sequence[str], started: float) -> None:
        """Count the blocks of a put or a get, and its seconds."""
        seconds = time.perf_counter() - started
        moved = sum(outcome in (STORED, "hits") for outcome in outcomes)
        with self._lock:
            self._counts.update(outcomes)
            self._counts[f"{call}_bytes"] += moved * self._pages.block_bytes
            self._counts[f"{call}_s"] += seconds  # type: ignore[assignment]

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the backend open during a call; KvcupyError if it is closed."""
        call = self._users.enter()
        if call is None:
            raise KvcupyError("store: expected an open store, got a closed one")
        try:
            yield
        finally:
            self._users.leave(call)


def _times_of_use(keys: Sequence[bytes]) -> dict[bytes, int]:
    """Return when the blocks of a call are used: of a prefix, the first blocks last."""
    now_ns = time.time_ns()
    return {key: now_ns - i for i, key in enumerate(keys)}


def _samples(counts: Counter[str]) -> list[tuple[str, metrics.Labels, float]]:
    samples: list[tuple[str, metrics.Labels, float]] = []
    for call, outcomes in (
        ("put", ("stored", "known", "full", "failed")), ("get", ("hits", "misses")),
    ):  # fmt: skip
        of_call = ("call", call)
        samples += [
            ("kvcupy_store_blocks_total", (of_call, ("outcome", name)), counts[name])
            for name in outcomes
        ]
        samples.append(("kvcupy_store_bytes_total", (of_call,), counts[f"{call}_bytes"]))
        samples.append(("kvcupy_store_seconds_total", (of_call,), counts[f"{call}_s"]))
    samples.append(("kvcupy_store_damaged_blocks_total", (), counts["damaged"]))
    samples += [
        ("kvcupy_store_lost_calls_total", (("reason", name),), counts[name])
        for name in ("lost", "skipped", "slow")
    ]
    return samples
