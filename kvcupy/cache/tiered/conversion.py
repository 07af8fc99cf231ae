"""Blocks that a lower tier keeps in another number format, by way of pages in that format.

    host page --convert--> staged page --write--> disk, or shared store
    host page <--convert-- staged page <--read---

Formats that convert: any two of `kvcupy.formats.FORMATS`, and one of those and a four-bit format.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...errors import CacheFull, DeviceError
from ...formats import FOUR_BIT, bytes_per_element, require_groups
from ...ops import transfer
from ...ops.call import format_name
from ..pages import Pages
from ..pool import Pool, pool_like

_STAGING_BYTES = 2**25  # of the pages of a disk tier, or one page
_MOST_STAGED_PAGES = 64


class Conversion:
    """Converts pages of a host pool to staged pages of another format, and back.

    One thread at a time. When a call has returned or raised, nothing touches its pages any more.

    Parameters
    ----------
    host_pool, staged_pool : both in host memory, alike in all but format, layout and num_pages
    name : of the argument that the staged pool stands for

    Attributes
    ----------
    host_pool, staged_pool
    """

    def __init__(self, host_pool: Pool, staged_pool: Pool, name: str) -> None:
        self.host_pool, self.staged_pool = host_pool, staged_pool
        names = "host_pool", name
        self._down = transfer.prepare(host_pool, staged_pool, convert=True, names=names)
        self._up = transfer.prepare(staged_pool, host_pool, convert=True, names=names[::-1])
        self._stream = host_pool.device.stream()
        self._stream.name = f"convert {name}"

    def down(self, pages: Sequence[int], staged: Sequence[int]) -> None:
        """Convert host pages to staged ones, and wait for that."""
        self._move(self._down, pages, staged)

    def up(self, staged: Sequence[int], pages: Sequence[int]) -> None:
        """Convert staged pages to host pages, and wait for that."""
        self._move(self._up, staged, pages)

    def _move(
        self, prepared: transfer.PreparedTransfer, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        pairs = transfer.PagePairs.of_arrays(np.array(src, np.int64), np.array(dst, np.int64))
        try:
            prepared.issue(pairs, self._stream)
            self._stream.synchronize()
        except BaseException:  # an interrupt too
            with suppress(DeviceError):
                self._stream.synchronize()
            raise


def staged_conversion(host_pool: Pool, dtype: Any) -> Conversion | None:
    """Return the conversion of a disk tier, with pages of its own; None if the formats are equal.

    Rows of 8 bits get a scale per token and head.
    """
    format = checked_format(host_pool, dtype, "disk_dtype")
    if format == host_pool.dtype:
        return None
    num_pages = min(host_pool.num_pages, _MOST_STAGED_PAGES)
    num_pages = max(1, min(num_pages, _STAGING_BYTES // host_pool.page_bytes))
    return Conversion(host_pool, pool_like(host_pool, num_pages, dtype=format), "disk_dtype")


def checked_format(host_pool: Pool, dtype: Any, name: str) -> str:
    """Return the format of a tier below a host pool; ValueError unless blocks can go there."""
    format, above = format_name(dtype, name), host_pool.dtype
    if bytes_per_element(format) > bytes_per_element(above):
        raise ValueError(
            f"{name}: expected a format that is not wider than {above}, as of host_pool, "
            f"got {format}"
        )
    four_bit = FOUR_BIT.get(format)
    if four_bit is not None and format != above:
        if above in FOUR_BIT:
            raise ValueError(
                f"{name}: expected {above} like host_pool, for four-bit formats do not convert "
                f"into one another, got {format}"
            )
        for width in (host_pool.head_dim, host_pool.v_head_dim):
            require_groups(four_bit, width, name)
    return format


class ConvertedStore:
    """A shared store of another format: its blocks pass through pages of its own pool.

    It is called with host pages. Where no page of the store's pool is free, blocks are not put
    ("failed"), or missing; none is waited for. The same becomes of those for which the store's
    deadline, which all calls for one `put` or `get` share, leaves no time. What the store answers
    is up to the caller to check: an answer of another length is passed on as a shorter one.

    Parameters
    ----------
    store : what it wraps, see `kvcupy.cache.tiered.store_tier.Store`
    conversion : between the host pool and that of the store
    """

    def __init__(self, store: Any, conversion: Conversion) -> None:
        self._store, self._conversion = store, conversion

    def exists(self, hashes: Sequence[int]) -> int:
        known: int = self._store.exists(hashes)
        return known

    def put(self, hashes: Sequence[int], pages: Sequence[int]) -> list[str]:
        outcomes: list[str] = []
        deadline = self._deadline()
        while len(outcomes) < len(pages):
            start = len(outcomes)
            staged = self._borrow(len(pages) - start, deadline)
            if not staged:
                return outcomes + ["failed"] * (len(pages) - start)
            chunk = slice(start, start + len(staged))
            try:
                self._conversion.down(pages[chunk], staged)
                answer: Any = self._store.put(hashes[chunk], staged, **_time_left(deadline))
            finally:
                self._give_back(staged)
            if not _is_answer(answer, staged):
                break
            outcomes += answer
        return outcomes

    def get(self, hashes: Sequence[int], pages: Sequence[int]) -> list[bool]:
        arrived: list[bool] = []
        deadline = self._deadline()
        while len(arrived) < len(pages):
            start = len(arrived)
            staged = self._borrow(len(pages) - start, deadline)
            if not staged:
                return arrived + [False] * (len(pages) - start)
            chunk = slice(start, start + len(staged))
            try:
                answer: Any = self._store.get(hashes[chunk], staged, **_time_left(deadline))
                if not _is_answer(answer, staged):
                    break
                there = [i for i, whole in enumerate(answer) if whole is True]
                self._conversion.up([staged[i] for i in there], [pages[start + i] for i in there])
            finally:
                self._give_back(staged)
            arrived += answer
        return arrived

    def _deadline(self) -> float:
        """Return until when a call that begins now may last, a value of time.monotonic."""
        seconds: float = getattr(self._store, "deadline_s", math.inf)
        return time.monotonic() + seconds

    def _borrow(self, most: int, deadline: float) -> list[int]:
        """Allocate pages of the store's pool, as many as are free; none after the deadline."""
        if time.monotonic() >= deadline:
            return []
        allocator = self._conversion.staged_pool.allocator
        try:
            pages: Pages = allocator.alloc(min(most, allocator.num_free))
        except CacheFull:  # another user of the pool was first
            return []
        return [int(page) for page in pages]

    def _give_back(self, staged: Sequence[int]) -> None:
        self._conversion.staged_pool.allocator.free(staged)


def _time_left(deadline: float) -> dict[str, float]:
    """Return the option by which a store that has deadlines learns of this one."""
    if deadline == math.inf:
        return {}
    return {"deadline_s": max(0.0, deadline - time.monotonic())}


def _is_answer(answer: Any, pages: Sequence[int]) -> bool:
    return isinstance(answer, list) and len(answer) == len(pages)


def converted_store(store: Any, host_pool: Pool, dtype: Any) -> tuple[Any, Pool]:
    """Return a shared store as one of host pages, and the pool of its blocks.

    That is the host pool itself where `dtype` is its format; else the store has to be of another
    pool, of that format.
    """
    own = getattr(store, "pool", None)
    format = host_pool.dtype if dtype is None else checked_format(host_pool, dtype, "shared_dtype")
    if format == host_pool.dtype:
        if own is not None and own is not host_pool:
            raise ValueError("shared: expected a store of host_pool, got one of another pool")
        return store, host_pool
    if not isinstance(own, Pool) or own.dtype != format:
        got = f"one of {own.dtype}" if isinstance(own, Pool) else "one without"
        raise ValueError(f"shared: expected a store with a pool of {format}, got {got}")
    return ConvertedStore(store, Conversion(host_pool, own, "shared")), own
