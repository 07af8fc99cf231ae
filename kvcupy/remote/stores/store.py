"""Content-addressed blocks shared by processes, in memory of this machine or on a server."""

from __future__ import annotations

import inspect
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ... import metrics
from ...cache.encryption import SEAL_BYTES, BlockCipher, Decryption, key_for
from ...cache.identity import DIGEST_BYTES, KEY_BYTES, BlockKeys, PoolIdentity
from ...cache.pages import page_array
from ...cache.pool import Pool
from ...cache.threads import Helpers, Users
from ...config import BoundedLog, cache_logger
from ...errors import KvcupyError, ProcessLocal
from ...ops import checks
from ..wire import WirePages
from .backend import (
    FAILED,
    FULL,
    KNOWN,
    STORED,
    Backend,
    BackendLost,
    SealedBlock,
    SummedBlock,
)

_Result = TypeVar("_Result")

# Modules of this package by URL scheme, imported on demand by `SharedStore.open`.
_BACKENDS = {
    "shm": "shm", "redis": "redis", "rediss": "redis", "unix": "redis",
    "redis+cluster": "redis", "rediss+cluster": "redis", "redis+sentinel": "redis",
    "rediss+sentinel": "redis", "mooncake": "mooncake",
}  # fmt: skip

_HEADER = struct.Struct(f"<4sBBHQQ{DIGEST_BYTES}s{KEY_BYTES}s")
HEADER_BYTES = _HEADER.size
_MAGIC, _VERSION = b"kvsb", 1
# Algorithms in a header; 2 is reserved, for a former one. With _AES_256_GCM the checksum is 0, and
# the seal follows the header.
_NO_CHECKSUM, _XXH3_64, _AES_256_GCM = 0, 1, 3

_WORST_FIRST = FAILED, FULL, "misses", STORED, KNOWN, "hits"
_SCRATCH_BYTES = 2**24  # per buffer in which pages are gathered or encrypted before they are sent
_MIN_HELPED_BYTES = 2**21  # below this, blocks are encrypted before another thread wakes up
_KEYS_PER_QUERY = 1024
_MAX_LOST_IN_A_ROW, _SKIP_S = 3, 10.0
_NEGATIVE_CACHE_TTL_S, _NEGATIVE_CACHE_SIZE = 10.0, 2**16


class BlockHeader(NamedTuple):
    """What is stored before a block."""

    version: int
    algorithm: int
    num_bytes: int
    checksum: int
    identity: bytes
    key: bytes

    @classmethod
    def decode(cls, header: bytes) -> BlockHeader | None:
        """Decode a header; None if it is damaged."""
        if len(header) < HEADER_BYTES:
            return None
        magic, version, algorithm, _, *others = _HEADER.unpack_from(header)
        return cls(version, algorithm, *others) if magic == _MAGIC else None

    @property
    def header_bytes(self) -> int:
        """Length of the header, with the seal of an encrypted block."""
        return HEADER_BYTES + (SEAL_BYTES if self.algorithm == _AES_256_GCM else 0)

    @property
    def has_checksum(self) -> bool:
        """Whether this version can compute the checksum."""
        return (self.version, self.algorithm) == (_VERSION, _XXH3_64)


class SharedStore(ProcessLocal):
    """Stores pages of a host pool under their block hashes, for other processes to find.

    Made by `SharedStore.open`. A block is visible whole or not at all; the first block stored under
    a hash stays until the store evicts it. Processes find each other's blocks if their pools have
    the same identity (format, page size, layers, heads, widths, `model`) and `tenant`. Layouts may
    differ, but "page_head" pools share only with each other.

    Attributes
    ----------
    pool : the host pool
    identity : its PoolIdentity, part of every key
    deadline_s : default time limit of a call, in seconds

    Notes
    -----
    Failure: a lost, late, full or damaged store is an outcome and a counter, never an exception.
    Blocks are verified on arrival; a damaged block is a miss, and is dropped. After 3 consecutive
    lost or late calls, the store is skipped for 10 s: lookups miss and puts fail. Calls with less
    than half of the store's deadline do not count. Blocks that could not be fetched are not
    requested again for 10 s.

    Stream: calls run on the CPU. Before the call, pages to put must be complete, and pages to get
    into must not be in use. Both are free for other uses when the call returns, unless it failed
    and the engine may still access them (Mooncake): free such pages to `pool.allocator`, which
    holds them back until the accesses end, and do not write to them before.

    Capture: legal; nothing is enqueued on a stream. Bytes: each page once in each direction. Pools
    whose pages consist of small pieces (see `WirePages.is_direct`) copy them once more.

    Threads may share a store. It belongs to the process that opened it.

    Source: puts are write-once and visible when whole, as in kvcache-ai/Mooncake `mooncake-store`.
    """

    _instead = "open one in each process"

    def __init__(
        self, backend: Backend, pages: WirePages, keys: BlockKeys, *,
        deadline_s: float, is_summed: bool, retries: int, cipher: BlockCipher | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.identity = pages.pool, keys.identity
        self._backend, self._pages, self._keys = backend, pages, keys
        self._digest = keys.identity.digest()
        self._deadline_s, self._is_summed, self._retries = deadline_s, is_summed, retries
        self._cipher = cipher
        self._puts_pages = cipher is None and pages.is_direct  # their memory, without a copy
        self._log = BoundedLog(cache_logger)
        self._lock = threading.RLock()  # guards the fields below
        self._users = Users()  # calls in progress on the backend
        self._counts: Counter[str] = Counter()
        self._times_s = {"put": 0.0, "get": 0.0}
        self._retry_at: dict[bytes, float] = {}  # of keys whose last fetch failed
        self._lost_in_a_row, self._skipped_until = 0, -math.inf
        self._scratch: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        counts, times_s = self._counts, self._times_s
        metrics.follow(
            self, lambda store: _samples(store._counts, store._times_s),
            lambda: _samples(counts, times_s),
        )  # fmt: skip

    @classmethod
    def open(
        cls, url: str, host_pool: Any, *,
        capacity_bytes: int | None = None, tenant: str | bytes = "", head_start: int = 0,
        total_kv_heads: int | None = None, model: str = "", deadline_s: float = 5.0,
        checksum: str = "xxh3_64", encryption_key: Any = None, retries: int = 1, **options: Any,
    ) -> SharedStore:  # fmt: skip
        """Open a store.

        Parameters
        ----------
        url : "shm:NAME", memory of this machine shared by processes of this user; "redis://...",
            "rediss://...", "unix:/path", a Redis or Valkey server; "redis+cluster://...",
            "redis+sentinel://...", several servers; "mooncake://host:port"; or a scheme that
            another package registers as an entry point in the group `kvcupy.store_backends`
        host_pool : a KVPool or an MLAPool in host memory: of the host device, or "pinned" or
            "pageable"
        capacity_bytes : size of the memory. "shm:": required in the first process; other processes
            pass the same value or None. All blocks under a name have the same length, so pools
            with other page sizes need another name
        tenant : str or bytes. Tenants cannot find each other's blocks
        head_start, total_kv_heads, model : as for `PoolIdentity.of`. `model` is a string that
            distinguishes models whose pools look alike: weights, adapter, rotary settings
        deadline_s : default time limit of a call, and the limit of this one, in seconds
        checksum : algorithm stored with blocks: "xxh3_64", or "none", which also reads blocks
            without verifying their bytes. Encrypted blocks are verified by their tags instead
        encryption_key : None, or 32 bytes, secret and random, with which blocks are encrypted
            and authenticated; or a function from `tenant` to them. Stores with another key, or
            with none, do not find these blocks, and store their own beside them
        retries : maximum retries of a call that has lost the server, within its deadline
        options : backend options. "shm:": `folder` of the file, default "/dev/shm"; `threads`, the
            number of threads that copy the blocks of one call, including the caller's, up to 4 by
            default; `ttl_s`, seconds after which a block of this process is missing; `quota_bytes`,
            which the blocks of this tenant and model take at most. Redis:
            `ttl_s`, `max_connections`, `plaintext_password` and the options of redis-py's
            connections. Mooncake: `segment_bytes`, `host`, `protocol`, `devices`. See
            docs/shared_store_servers.md

        Raises
        ------
        TypeError, ValueError : an argument has the wrong type or value
        ImportError : a package is missing; the message names it
        ConnectionError, FileNotFoundError, OSError : the store does not exist or is unreachable, or
            memory allocation fails

        Examples
        --------
        >>> import os, kvcupy as kv
        >>> shape = dict(page_size=16, num_layers=2, num_kv_heads=8, head_dim=128, device="host")
        >>> one, other = kv.KVPool(4, **shape), kv.KVPool(4, **shape, layout="page_first_direct")
        >>> one.k(1)[0, 5] = 7
        >>> hashes = kv.block_hashes(range(48), 16)
        >>> url = f"shm:doctest-{os.getpid()}"
        >>> with kv.SharedStore.open(url, one, capacity_bytes=2**21) as store:
        ...     store.put(hashes[:2], [0, 1])
        ...     with kv.SharedStore.open(url, other) as again:
        ...         again.match(hashes), again.get(hashes, [3, 2, 1])
        ...     store.remove()
        ['stored', 'stored']
        (2, [True, True, False])
        >>> float(other.k(1)[3, 5, 0, 0])
        7.0
        """
        if not isinstance(url, str):
            raise TypeError(f"url: expected a str, got {type(url).__name__}")
        scheme = url.partition(":")[0]
        if scheme not in _BACKENDS:
            registered = entry_points(group="kvcupy.store_backends")
            if scheme not in registered.names:
                known = ", ".join((*_BACKENDS, *sorted(registered.names)))
                raise ValueError(
                    f"url: expected one that starts with one of {known}, got {scheme!r}"
                )
        if not isinstance(host_pool, Pool):
            kind = type(host_pool).__name__
            raise TypeError(f"host_pool: expected a KVPool or an MLAPool, got {kind}")
        identity = PoolIdentity.of(
            host_pool, head_start=head_start, total_kv_heads=total_kv_heads, model=model
        )
        keys, cipher = BlockKeys(identity, tenant), None
        if encryption_key is not None:
            cipher = BlockCipher(key_for(encryption_key, tenant), identity.digest())
            keys = BlockKeys(identity, tenant, secret=cipher.name_key)
        pages = WirePages(host_pool)
        seconds = _seconds(deadline_s)
        if checksum not in ("xxh3_64", "none"):
            raise ValueError(f"checksum: expected xxh3_64 or none, got {checksum!r}")
        checks.require_int(retries, "retries")
        if not 0 <= retries <= 100:
            raise ValueError(f"retries: expected 0 to 100, got {retries}")
        try:
            if scheme in _BACKENDS:
                open_backend = import_module(f".{_BACKENDS[scheme]}", __package__).open_backend
            else:
                open_backend = registered[scheme].load()
            _require_options(open_backend, options)
            backend = open_backend(
                url, pages, namespace=keys.namespace, capacity_bytes=capacity_bytes,
                deadline=time.monotonic() + seconds, **options,
            )  # fmt: skip
        except BackendLost as error:
            failure = PermissionError if error.refused else ConnectionError
            raise failure(f"url: {error}") from error
        if cipher is not None and getattr(backend, "puts_pages_only", False):
            backend.close()
            raise ValueError(
                f"encryption_key: expected None, since {url} sends blocks of {pages.block_bytes} "
                f"bytes from the pages themselves"
            )
        return cls(
            backend, pages, keys, deadline_s=seconds, is_summed=checksum != "none",
            retries=int(retries), cipher=cipher,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<SharedStore over {self._backend!r}>"

    def __enter__(self) -> SharedStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def deadline_s(self) -> float:
        return self._deadline_s

    # --- Blocks ---

    def match(self, hashes: Any) -> int:
        """Count the leading blocks that the store has.

        Parameters
        ----------
        hashes : list of 128-bit ints (`block_hashes`), starting at the first block of a prefix

        Raises
        ------
        TypeError, ValueError : `hashes` has other values
        KvcupyError : the store is closed, or belongs to the parent of this process
        """
        keys = self._keys.keys(hashes)
        with self._using():
            deadline = time.monotonic() + self._deadline_s
            for start in range(0, len(keys), _KEYS_PER_QUERY):
                if start and time.monotonic() >= deadline:
                    return start
                asked = keys[start : start + _KEYS_PER_QUERY]
                known = self._known(asked, deadline)
                if not all(known):
                    return start + known.index(False)
            return len(keys)

    def contains(self, hashes: Any) -> list[bool]:
        """Return for each block whether the store has it; False if it is lost or late.

        Parameters
        ----------
        hashes : list of 128-bit ints, of any blocks

        Raises
        ------
        TypeError, ValueError : `hashes` has other values
        KvcupyError : the store is closed, or belongs to the parent of this process
        """
        keys = self._keys.keys(hashes)
        known: list[bool] = []
        with self._using():
            deadline = time.monotonic() + self._deadline_s
            for start in range(0, len(keys), _KEYS_PER_QUERY):
                if start and time.monotonic() >= deadline:
                    return known + [False] * (len(keys) - start)
                known += self._known(keys[start : start + _KEYS_PER_QUERY], deadline)
        return known

    def put(self, hashes: Any, pages: Any, *, deadline_s: float | None = None) -> list[str]:
        """Store the blocks that the store does not have.

        Parameters
        ----------
        hashes : list of 128-bit ints
        pages : list or integer array, the page of each block
        deadline_s : time limit of this call, in seconds. Late blocks are "failed"

        Returns
        -------
        for each block "stored"; "known", the store already had it; "full", no space could be freed;
        or "failed", the store is lost or late. A "failed" block may have been stored

        Raises
        ------
        TypeError, ValueError : an argument is invalid, such as a page out of range; nothing was
            stored
        KvcupyError : the store is closed, or belongs to the parent of this process
        """
        keys = self._keys.keys(hashes)
        numbers = self._page_list(pages, len(keys))
        seconds = self._deadline_s if deadline_s is None else _seconds(deadline_s)
        with self._using(), self._timed("put") as timed:
            deadline = time.monotonic() + seconds
            if self._backend.put_asks_first and self._puts_pages:
                known = [False] * len(keys)
            else:
                known = self._known(keys, deadline) if keys else []
            outcomes = [KNOWN if there else FAILED for there in known]
            missing = [i for i, there in enumerate(known) if not there]
            self._pages.announce("put shared", [numbers[i] for i in missing], is_read=True)
            for chunk in _chunks(missing, self._blocks_at_once(self._puts_pages)):
                if time.monotonic() >= deadline:
                    break
                asked, asked_pages = [keys[i] for i in chunk], [numbers[i] for i in chunk]
                with self._to_put(asked, asked_pages) as (blocks, headers):
                    try:
                        results, _ = self._call(
                            self._backend.put, asked, blocks, headers, deadline=deadline
                        )
                    except BaseException:
                        self._hold_back(asked, asked_pages, blocks, self._puts_pages)
                        raise
                    for i, outcome in zip(chunk, results or [FAILED] * len(chunk), strict=True):
                        outcomes[i] = outcome
                    failed = [i for i in chunk if outcomes[i] == FAILED]
                    self._hold_back(
                        [keys[i] for i in failed], [numbers[i] for i in failed], blocks,
                        self._puts_pages,
                    )  # fmt: skip
            self._count_put(keys, outcomes)
            timed += outcomes
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

        Raises
        ------
        TypeError, ValueError : an argument is invalid, such as a duplicate page; nothing was read
        KvcupyError : the store is closed, or belongs to the parent of this process
        """
        keys = self._keys.keys(hashes)
        numbers = self._page_list(pages, len(keys))
        if len(set(numbers)) < len(numbers):
            raise ValueError("pages: expected each page once, got one twice")
        seconds = self._deadline_s if deadline_s is None else _seconds(deadline_s)
        with self._using(), self._timed("get") as timed:
            deadline = time.monotonic() + seconds
            there = [False] * len(keys)
            asked = [i for i, failed in enumerate(self._are_failed(keys)) if not failed]
            self._pages.announce("get shared", [numbers[i] for i in asked], is_read=False)
            at_once = min(self._backend.blocks_per_get, self._blocks_at_once(self._pages.is_direct))
            for chunk in _chunks(asked, at_once):
                if time.monotonic() >= deadline:
                    self._count("late", sum(i >= chunk[0] for i in asked))
                    break
                arrived = self._get_some(
                    [keys[i] for i in chunk], [numbers[i] for i in chunk], deadline
                )
                for i, whole in zip(chunk, arrived, strict=True):
                    there[i] = whole
            if asked:
                self.pool.note_written()
            hits = sum(there)
            self._count("hits", hits)
            self._count("misses", len(keys) - hits)
            self._count("get_bytes", hits * self._pages.block_bytes)
            timed += ["hits" if whole else "misses" for whole in there]
        return there

    def _get_some(self, keys: Sequence[bytes], pages: Sequence[int], deadline: float) -> list[bool]:
        """Read blocks with one backend call; return which arrived and passed verification."""
        backend, is_direct = self._backend, self._pages.is_direct
        with self._to_get(keys, pages) as blocks:
            try:
                headers, lost = self._call(backend.get, keys, blocks, deadline=deadline)
            except BaseException:  # such as KeyboardInterrupt
                self._hold_back(keys, pages, blocks, is_direct)
                raise
            headers = headers or [None] * len(keys)
            failed = []
            if lost:  # else blocks without a header are missing, or were not requested
                failed = [k for k, header in zip(keys, headers, strict=True) if header is None]
            verdicts = [
                None if header is None else self._verify(header, key, block)
                for header, key, block in zip(headers, keys, blocks, strict=True)
            ]
            if not is_direct:
                for page, block, verdict in zip(pages, blocks, verdicts, strict=True):
                    if verdict:
                        self._pages.write_from(page, block[0])
            missing = [i for i, header in enumerate(headers) if header is None]
            self._hold_back(
                [keys[i] for i in missing], [pages[i] for i in missing], blocks, is_direct
            )
        damaged = [key for key, verdict in zip(keys, verdicts, strict=True) if verdict is False]
        if damaged:
            self._count("damaged", len(damaged))
            self._log.warning("dropping %d damaged blocks of %r", len(damaged), backend)
            self._call(backend.discard, damaged, deadline=deadline)
        self._note_failed(damaged + failed)
        return [verdict is True for verdict in verdicts]

    def _hold_back(
        self, keys: Sequence[bytes], pages: Sequence[int], blocks: list[SummedBlock],
        are_pages: bool,
    ) -> None:  # fmt: skip
        """Hold back memory that the engine may still access, so that it is not reused.

        `are_pages` : whether the blocks are the pages' memory, instead of a scratch buffer
        """
        if keys and (completion := self._backend.busy(keys)) is not None:
            if are_pages:
                self.pool.allocator._mark_busy(pages, completion)
            else:
                blocks.clear()

    # --- Statistics, closing and removal ---

    def stats(self) -> dict[str, Any]:
        """Return this process's counts since the store was opened, and the backend's counters.

        Raises
        ------
        KvcupyError : the store is closed, or belongs to the parent of this process

        Notes
        -----
        Puts, in blocks: `stored`, `known`, `full` and `failed`. Gets, in blocks: `hits` and
        `misses`; of the misses, `damaged` (the checksum or the tag is wrong), `unverified` (stored
        without a checksum, or with one that this version does not know) and `late`. Also
        `put_bytes`, `get_bytes`, `put_s` and `get_s`. Calls: `lost` (no connection), `slow`
        (late), and `skipped` (after consecutive lost or late calls).
        """
        names = (
            "stored", "known", "full", "failed", "hits", "misses", "damaged", "unverified", "late",
            "put_bytes", "get_bytes", "lost", "slow", "skipped",
        )  # fmt: skip
        with self._using():
            with self._lock:
                counts: dict[str, Any] = {name: self._counts[name] for name in names}
                counts |= {f"{call}_s": seconds for call, seconds in self._times_s.items()}
            return {**counts, **self._backend.stats()}

    def close(self) -> None:
        """Wait for calls of other threads, then close the store; its blocks stay. Idempotent."""
        if self._users.close():
            self._backend.close()

    def remove(self) -> None:
        """Remove the embedded store's memory, or this tenant's blocks on a server.

        Memory ("shm:") loses its name at once: the next process that opens the name creates a new
        store. Processes that have the old one open can keep using it; its memory is freed when
        the last of them closes it.

        Raises
        ------
        OSError : the store could not be removed; ConnectionError if the server is lost
        KvcupyError : the store is closed, or belongs to the parent of this process
        """
        with self._using():
            try:
                self._backend.remove(time.monotonic() + self._deadline_s)
            except BackendLost as error:
                raise ConnectionError(f"remove: {error}") from error

    # --- Headers and verification ---

    def _header(self, key: bytes, block: SummedBlock) -> bytes:
        if self._is_summed:
            return self._packed(key, _XXH3_64, block.checksum())
        return self._packed(key, _NO_CHECKSUM)

    def _packed(self, key: bytes, algorithm: int, total: int = 0) -> bytes:
        return _HEADER.pack(
            _MAGIC, _VERSION, algorithm, 0, self._pages.block_bytes, total, self._digest, key
        )

    def _verify(self, header: bytes, key: bytes, block: SummedBlock) -> bool | None:
        """Return whether a block is what was put; None if its checksum cannot be computed."""
        if isinstance(block, SealedBlock):
            return block.is_authentic(header)
        stored = BlockHeader.decode(header)
        expected = (self._pages.block_bytes, self._digest, key)
        if stored is None or len(header) != stored.header_bytes:
            return False
        if (stored.num_bytes, stored.identity, stored.key) != expected:
            return False
        if not self._is_summed and (stored.version, stored.algorithm) == (_VERSION, _NO_CHECKSUM):
            return True
        if not stored.has_checksum:  # such as of another version of kvcupy
            self._count("unverified", 1)
            return None
        return not self._is_summed or block.checksum() == stored.checksum

    def _decryption(self, key: bytes, header: bytes) -> Decryption | None:
        """Start to decrypt a block; None unless its header is right but for the seal."""
        assert self._cipher is not None
        # Another version is damage, too. One that seals blocks otherwise has other names for them.
        expected, seal = self._packed(key, _AES_256_GCM), header[HEADER_BYTES:]
        if header[:HEADER_BYTES] != expected or len(seal) != SEAL_BYTES:
            return None
        return self._cipher.decryption(key, seal)

    # --- Memory ---

    def _blocks_at_once(self, are_pages: bool) -> int:
        """Return the maximum number of blocks in one backend call."""
        if are_pages:
            return _KEYS_PER_QUERY
        return max(1, _SCRATCH_BYTES // self._pages.block_bytes)

    @contextmanager
    def _to_put(
        self, keys: Sequence[bytes], pages: Sequence[int]
    ) -> Iterator[tuple[list[SummedBlock], Sequence[bytes]]]:
        """Yield pages as blocks in wire order, encrypted if there is a key, and their headers."""
        if self._puts_pages:
            blocks = [self._block(self._pages.pieces(page)) for page in pages]
            yield blocks, _Headers(self, keys, blocks)
            return
        with self._gathered(len(pages)) as blocks:
            if self._cipher is None:
                for page, block in zip(pages, blocks, strict=True):
                    self._pages.read_into(page, block[0])
                yield blocks, _Headers(self, keys, blocks)
            else:
                yield blocks, self._sealed(self._cipher, keys, pages, blocks)

    def _sealed(
        self, cipher: BlockCipher, keys: Sequence[bytes], pages: Sequence[int],
        blocks: Sequence[SummedBlock],
    ) -> Sequence[bytes]:  # fmt: skip
        """Encrypt pages into blocks, and return their headers."""
        headers = [b""] * len(keys)

        def seal(i: int) -> None:
            [out] = blocks[i]
            if self._pages.is_direct:
                pieces = self._pages.pieces(pages[i])
            else:
                self._pages.read_into(pages[i], out)
                pieces = [out]
            headers[i] = self._packed(keys[i], _AES_256_GCM) + cipher.seal(keys[i], pieces, out)

        helpers: Helpers | None = getattr(self._backend, "helpers", None)
        if helpers is None or len(keys) * self._pages.block_bytes < _MIN_HELPED_BYTES:
            for i in range(len(keys)):
                seal(i)
        else:
            helpers.each(seal, range(len(keys)), min(helpers.count, len(keys) - 1))
        return headers

    @contextmanager
    def _to_get(self, keys: Sequence[bytes], pages: Sequence[int]) -> Iterator[list[SummedBlock]]:
        """Yield the memory to read blocks into, in wire order: the pages', or a scratch buffer."""
        if self._pages.is_direct:
            blocks = [self._block(self._pages.pieces(page)) for page in pages]
            yield self._decrypted(keys, blocks)
            return
        with self._gathered(len(pages)) as blocks:
            blocks[:] = self._decrypted(keys, blocks)
            yield blocks

    def _decrypted(self, keys: Sequence[bytes], blocks: list[SummedBlock]) -> list[SummedBlock]:
        """Return blocks that are decrypted when they arrive, if there is a key."""
        if self._cipher is None:
            return blocks
        return [
            SealedBlock(block, partial(self._decryption, key))
            for key, block in zip(keys, blocks, strict=True)
        ]

    @contextmanager
    def _gathered(self, count: int) -> Iterator[list[SummedBlock]]:
        """Yield blocks in a scratch buffer. Clearing the list prevents reuse of the buffer."""
        num_bytes = self._pages.block_bytes
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = np.empty(self._blocks_at_once(False) * num_bytes, np.uint8)
        blocks = [
            self._block([scratch[n * num_bytes : (n + 1) * num_bytes].data]) for n in range(count)
        ]
        yield blocks
        if blocks:
            self._scratch.append(scratch)

    def _block(self, pieces: list[memoryview]) -> SummedBlock:
        return SummedBlock(pieces, is_summed=self._is_summed)

    def _page_list(self, pages: Any, count: int) -> list[int]:
        numbers = [int(page) for page in page_array(pages)]
        if len(numbers) != count:
            raise ValueError(f"pages: expected {count}, one for each hash, got {len(numbers)}")
        for page in numbers:
            if not 0 <= page < self.pool.num_pages:
                raise ValueError(f"pages: expected 0 to {self.pool.num_pages - 1}, got {page}")
        return numbers

    # --- Calls to the backend ---

    def _known(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which blocks the store has, excluding those in the negative cache."""
        known, _ = self._call(self._backend.exists, keys, deadline=deadline)
        if known is None:
            return [False] * len(keys)
        return [
            there and not failed
            for there, failed in zip(known, self._are_failed(keys), strict=True)
        ]

    def _call(
        self, function: Callable[..., _Result], *arguments: Any, deadline: float
    ) -> tuple[_Result | None, bool]:
        """Call a method of the backend, unless the backend is being skipped.

        Returns
        -------
        the method's result, or None if unknown; and whether the backend was lost, excluding calls
        whose deadline was too short to tell
        """
        started = time.monotonic()
        with self._lock:
            if started < self._skipped_until:
                self._counts["skipped"] += 1
                return None, False
        result: Any = None
        failure: Exception | None = None
        for _ in range(1 + self._retries):
            try:
                result = function(*arguments, deadline)
            except (BackendLost, OSError) as error:
                failure = error
                self._count("lost", 1)
                results = getattr(error, "results", ())
                result = list(results) or None
                if not getattr(error, "repeatable", True) or time.monotonic() >= deadline:
                    break
            else:
                failure = None
                break
        now = time.monotonic()
        late = now - started >= self._deadline_s
        # A deadline that was short, or nearly over at the start, says nothing about the server.
        hurried = now >= deadline and deadline - started < self._deadline_s / 2
        lost = failure is not None and not hurried
        with self._lock:
            if not lost and not late:
                if failure is None:
                    self._lost_in_a_row = 0
                return cast("_Result | None", result), False
            if failure is None:
                self._counts["slow"] += 1
            self._lost_in_a_row += 1
            skips = self._lost_in_a_row >= _MAX_LOST_IN_A_ROW
            if skips:
                self._skipped_until = now + _SKIP_S
        if skips:
            self._log.warning(
                "skipping %r for %g s: %s", self._backend, _SKIP_S, failure or "calls are late"
            )
        return cast("_Result | None", result), lost

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

    def _count_put(self, keys: Sequence[bytes], outcomes: Sequence[str]) -> None:
        with self._lock:
            self._counts.update(outcomes)
            self._counts["put_bytes"] += outcomes.count(STORED) * self._pages.block_bytes
            if self._retry_at:
                for key, outcome in zip(keys, outcomes, strict=True):
                    if outcome == STORED:
                        self._retry_at.pop(key, None)

    @contextmanager
    def _timed(self, call: str) -> Iterator[list[str]]:
        """Measure a call, by the worst of the outcomes that it adds to the list."""
        started = time.perf_counter()
        results: list[str] = []
        try:
            yield results
        finally:
            seconds = time.perf_counter() - started
            with self._lock:
                self._times_s[call] += seconds
            if metrics.enabled:
                worst = next((outcome for outcome in _WORST_FIRST if outcome in results), "none")
                metrics.note("kvcupy_shared_call_seconds", seconds, call=call, outcome=worst)

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


class _Headers(Sequence[bytes]):
    """Headers of blocks, each computed on first access."""

    def __init__(
        self, store: SharedStore, keys: Sequence[bytes], blocks: Sequence[SummedBlock]
    ) -> None:
        self._store, self._keys, self._blocks = store, keys, blocks
        self._headers: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        n = range(len(self))[i]
        if n not in self._headers:
            self._headers[n] = self._store._header(self._keys[n], self._blocks[n])
        return self._headers[n]


def _chunks(numbers: list[int], count: int) -> Iterator[list[int]]:
    for start in range(0, len(numbers), count):
        yield numbers[start : start + count]


def _require_options(open_backend: Callable[..., Any], options: dict[str, Any]) -> None:
    known = inspect.signature(open_backend).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in options:
        if name not in known:
            common = "url", "pages", "namespace", "capacity_bytes", "deadline"
            own = ", ".join(n for n in known if n not in common)
            raise TypeError(f"options: expected some of {own}, got {name}")


def _seconds(deadline_s: Any) -> float:
    is_number = isinstance(deadline_s, (int, float, np.integer, np.floating))
    if not is_number or isinstance(deadline_s, bool):
        raise TypeError(f"deadline_s: expected seconds, got {deadline_s!r}")
    if not 0 <= deadline_s < 10**9:
        raise ValueError(f"deadline_s: expected 0 to 1e9 seconds, got {deadline_s!r}")
    return float(deadline_s)


def _samples(
    counts: Counter[str], times_s: dict[str, float]
) -> list[tuple[str, metrics.Labels, float]]:
    samples: list[tuple[str, metrics.Labels, float]] = []
    for call, outcomes in (
        ("put", ("stored", "known", "full", "failed")), ("get", ("hits", "misses")),
    ):  # fmt: skip
        of_call = ("call", call)
        samples += [
            ("kvcupy_shared_blocks_total", (of_call, ("outcome", name)), counts[name])
            for name in outcomes
        ]
        samples.append(("kvcupy_shared_bytes_total", (of_call,), counts[f"{call}_bytes"]))
        samples.append(("kvcupy_shared_seconds_total", (of_call,), times_s[call]))
    samples.append(("kvcupy_shared_damaged_blocks_total", (), counts["damaged"]))
    samples += [
        ("kvcupy_shared_lost_calls_total", (("reason", name),), counts[name])
        for name in ("lost", "skipped", "slow")
    ]
    return samples
