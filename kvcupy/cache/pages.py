"""The pages of a pool, and the hashes of the blocks of tokens in them.

A page is free, allocated, or freed while work in flight still touches it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence, Set
from hashlib import blake2b
from typing import Any

import numpy as np

from .. import checks
from ..config import cache_logger
from ..errors import CacheFull, CaptureError, InterruptGuard, KvcupyError, ProcessLocal
from .hazards import Completion

Pages = np.ndarray[Any, Any]

# States of a page. Deferred: freed while a transfer touches it.
_FREE, _ALLOCATED, _DEFERRED = 0, 1, 2
_WORD_MASK = 2**64 - 1
_MIN_TRANSFERS = 64  # remembered before `_mark_busy` looks for finished ones


class PageAllocator(ProcessLocal):
    """Allocates the pages of a pool, 0 to `num_pages` - 1.

    A fresh allocator returns 0, 1, 2, ...; pages freed together are allocated again first, in
    ascending order, so that runs of neighbours stay whole. The time of a call depends on the number
    of its pages, not on the size of the pool. Threads may share an allocator.

    Attributes
    ----------
    num_pages : pages of the pool
    num_free : pages that `alloc` can return now
    num_allocated : pages that are not freed yet. A page freed while a transfer touches it counts in
        neither until the transfer is done
    num_available : pages that `alloc` can return, now or when the transfers that hold them back are
        done; without the pages that an `unbounded` transfer holds back

    Notes
    -----
    A transfer that raises a failure no longer touches its pages: they become free. The failure is
    logged, and raised by the handle of the transfer. `CaptureError` is not a failure: the pages
    stay busy. No lock is held while a transfer is polled or waited for. After an exception of a
    signal handler in the middle of a change, every call raises KvcupyError.

    Examples
    --------
    >>> pages = PageAllocator(8)
    >>> pages.alloc(3)
    array([0, 1, 2])
    >>> pages.free([2, 0])
    >>> pages.alloc(3), pages.num_free
    (array([0, 2, 3]), 4)
    """

    def __init__(self, num_pages: int) -> None:
        checks.require_int(num_pages, "num_pages")
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
        self.num_pages = int(num_pages)
        try:
            # The free pages, the next one last.
            self._stack = np.arange(self.num_pages - 1, -1, -1, dtype=np.int64)
            self._state = np.zeros(self.num_pages, np.int8)
            self._num_transfers = np.zeros(self.num_pages, np.int32)  # that touch each page
        except (MemoryError, ValueError) as error:  # ValueError: more than any memory has
            raise MemoryError(
                f"num_pages: expected pages whose bookkeeping (13 bytes each) fits in memory, "
                f"got {num_pages}: {error}"
            ) from error
        self._lock = threading.Lock()
        self._guard = InterruptGuard("PageAllocator", self)
        self._num_free = self.num_pages
        self._num_deferred = 0
        # By number, in order of issue: what is in flight, and its pages.
        self._transfers: dict[int, tuple[Completion, Pages]] = {}
        self._num_unbounded = 0  # of them
        self._numbers = itertools.count()
        self._poll_above = _MIN_TRANSFERS

    def __repr__(self) -> str:
        return f"<PageAllocator {self._num_free} of {self.num_pages} pages free>"

    @property
    def num_free(self) -> int:
        if self._num_deferred:
            self._poll()
        return self._num_free

    @property
    def num_allocated(self) -> int:
        with self._lock:
            return self.num_pages - self._num_free - self._num_deferred

    @property
    def num_available(self) -> int:
        if self._num_unbounded:
            self._poll()
        with self._lock:
            return self._available()

    def alloc(self, n: int) -> Pages:
        """Allocate `n` pages.

        Returns
        -------
        int64 (n,) : the pages, until `free` returns them

        Raises
        ------
        TypeError, ValueError : `n` is not an int, or negative
        CacheFull : fewer than `n` are free, or become free; nothing was allocated

        Notes
        -----
        Waits, no longer than necessary, if it needs pages that transfers still touch: the oldest
        transfer first, and never an `unbounded` one.
        """
        checks.require_int(n, "n")
        if n < 0:
            raise ValueError(f"n: expected a number of pages, got {n}")
        n = int(n)
        polled = False
        while True:
            try:
                with self._lock:
                    if n <= self._num_free:
                        return self._take(n)
                    available = self._available()
                    if n > available and (polled or not self._num_unbounded):
                        raise CacheFull(
                            f"expected at most {available}, which are free of "
                            f"{self.num_pages} pages, got {n}",
                            "n",
                        )
                    oldest = self._oldest_that_defers()
            except BaseException as error:  # the pages have perhaps not reached the caller
                self._guard.note(error)
                raise
            if polled and oldest is not None:
                self._wait(oldest)
            else:
                self._poll()
            polled = not polled

    def free(self, pages: Any) -> None:
        """Free pages.

        Parameters
        ----------
        pages : list or integer array (n,) of allocated pages, each once, in any order. One that a
            transfer touches becomes free when the transfer is done

        Raises
        ------
        TypeError : `pages` is not a list or an array
        ValueError : one is not an integer, not a page of this pool, not allocated, or listed twice;
            none was freed
        """
        ordered = np.sort(self._require_pages(page_array(pages)))
        with self._lock:
            self._require_out(ordered)
            try:
                if self._transfers:
                    held = self._num_transfers[ordered] > 0
                    self._state[ordered] = np.where(held, _DEFERRED, _FREE)
                    self._num_deferred += int(np.count_nonzero(held))
                    ordered = ordered[~held]
                self._put(ordered)
            except BaseException as error:
                self._guard.note(error)
                raise

    def _require_allocated(self, pages: Any) -> Pages:
        """Return pages in ascending order; raise what `free` would raise for them."""
        ordered: Pages = np.sort(self._require_pages(page_array(pages)))
        with self._lock:
            self._require_out(ordered)
        return ordered

    def allocated(self) -> Pages:
        """Return the allocated pages, int64, ascending."""
        with self._lock:
            return np.flatnonzero(self._state == _ALLOCATED).astype(np.int64)

    def check_leaks(self) -> None:
        """Raise if pages are still allocated.

        Raises
        ------
        KvcupyError : names some of them
        """
        leaked = self.allocated()
        if len(leaked):
            first = ", ".join(map(str, leaked[:8])) + (", ..." if len(leaked) > 8 else "")
            raise KvcupyError(f"{len(leaked)} of {self.num_pages} pages were never freed: {first}")

    def _mark_busy(self, pages: Any, transfer: Completion) -> None:
        """Hold back pages, if they are freed, until a Completion is done. None: all pages."""
        if not (hasattr(transfer, "done") and hasattr(transfer, "synchronize")):
            raise TypeError(f"transfer: expected one with done() and synchronize(), got {transfer}")
        if pages is None:
            touched = np.arange(self.num_pages)
        else:
            as_is = type(pages) is np.ndarray and pages.ndim == 1 and pages.dtype == np.int64
            listed = pages if as_is else page_array(pages)
            touched = listed[(listed >= 0) & (listed < self.num_pages)].astype(np.int64)
        if len(touched) == 0:
            return
        with self._lock:
            try:
                self._transfers[next(self._numbers)] = transfer, touched
                self._num_transfers[touched] += 1
                if getattr(transfer, "unbounded", False):
                    self._num_unbounded += 1
            except BaseException as error:
                self._guard.note(error)
                raise
            crowded = len(self._transfers) > self._poll_above
            if crowded:  # so that threads that call this meanwhile do not poll too
                self._poll_above = 2 * len(self._transfers)
        if crowded:
            self._poll()
            self._poll_above = max(_MIN_TRANSFERS, 2 * len(self._transfers))

    def _wait_for_freed(self) -> None:
        """Wait for the oldest bounded transfer that holds back freed pages, if there is one."""
        with self._lock:
            oldest = self._oldest_that_defers() if self._num_deferred else None
        if oldest is not None:
            self._wait(oldest)

    # --- With the lock held ---

    def _take(self, n: int) -> Pages:
        taken = self._stack[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        self._state[taken] = _ALLOCATED
        return taken

    def _put(self, ordered: Pages) -> None:
        self._stack[self._num_free : self._num_free + len(ordered)] = ordered[::-1]
        self._num_free += len(ordered)
        self._state[ordered] = _FREE

    def _require_out(self, ordered: Pages) -> None:
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(repeated):
            raise ValueError(f"pages: expected each page once, got {repeated[0]} twice")
        free = ordered[self._state[ordered] != _ALLOCATED]
        if len(free):
            raise ValueError(f"pages: expected allocated pages, got {free[0]}, which is free")

    def _available(self) -> int:
        """Return how many pages are free, or become free when bounded transfers are done."""
        if not (self._num_unbounded and self._num_deferred):
            return self._num_free + self._num_deferred
        return self._num_free + int(np.count_nonzero(self._coming()))

    def _coming(self) -> Pages:
        """Return which pages become free when bounded transfers are done, bool (num_pages,)."""
        coming: Pages = self._state == _DEFERRED
        for transfer, pages in self._transfers.values():
            if _is_unbounded(transfer):
                coming[pages] = False
        return coming

    def _oldest_that_defers(self) -> int | None:
        """Return the number of the oldest transfer that holds back a page which becomes free."""
        coming = self._coming() if self._num_unbounded else None
        for number, (_, pages) in self._transfers.items():
            waiting = self._state[pages] == _DEFERRED if coming is None else coming[pages]
            if waiting.any():
                return number
        return None

    # --- Without the lock: a transfer may take other locks, and its owner may call `_mark_busy` ---

    def _poll(self) -> None:
        """Drop the transfers that are done."""
        with self._lock:
            transfers = list(self._transfers.items())
        self._drop([number for number, (transfer, _) in transfers if _is_done(transfer)])

    def _wait(self, number: int) -> None:
        with self._lock:
            transfer, _ = self._transfers.get(number, (None, None))
        if transfer is None:  # another thread has seen that it is done
            return
        try:
            transfer.synchronize()
        except CaptureError:  # it may still run, and must not be waited for here
            raise
        except Exception as error:
            _report(transfer, error)
        self._drop([number])

    def _drop(self, numbers: Sequence[int]) -> None:
        """Forget transfers, and free what only they held back."""
        with self._lock, self._guard:
            # Another thread may have been first.
            ended = [self._transfers.pop(n) for n in numbers if n in self._transfers]
            dropped = [pages for _, pages in ended]
            if self._num_unbounded:
                self._num_unbounded -= sum(_is_unbounded(transfer) for transfer, _ in ended)
            for pages in dropped:
                self._num_transfers[pages] -= 1
            if dropped and self._num_deferred:
                touched = np.unique(np.concatenate(dropped))
                waiting = self._state[touched] == _DEFERRED
                freed = touched[waiting & (self._num_transfers[touched] == 0)]
                self._num_deferred -= len(freed)
                self._put(freed)

    def _require_pages(self, pages: Pages) -> Pages:
        outside = pages[(pages < 0) | (pages >= self.num_pages)]
        if len(outside):
            raise ValueError(f"pages: expected 0 to {self.num_pages - 1}, got {outside[0]}")
        return pages.astype(np.int64)


def _is_unbounded(transfer: Completion) -> bool:
    """Return whether a transfer may never be done; its answer never changes."""
    return bool(getattr(transfer, "unbounded", False))


def _is_done(transfer: Completion) -> bool:
    try:
        return transfer.done()
    except CaptureError:  # the caller may be capturing; the transfer may still run
        return False
    except Exception as error:
        _report(transfer, error)
        return True


def _report(transfer: Completion, error: Exception) -> None:
    cache_logger.warning("the pages of %r are free, because it failed: %s", transfer, error)


# --- Page lists ---


def page_array(pages: Any) -> Pages:
    """Return a list or array of pages as an array (n,) of an integer type, or raise."""
    if isinstance(pages, np.ndarray):
        array: Pages = pages
    elif hasattr(pages, "__array__"):
        try:
            array = np.asarray(pages)
        except (TypeError, RuntimeError) as error:  # it is on a GPU, or its bits are not its values
            raise TypeError(f"pages: expected an array of the host, {error}") from None
    else:
        array = _listed(pages)
    if array.ndim != 1:
        raise ValueError(f"pages: expected one dimension, got {array.ndim}")
    if array.size == 0:  # NumPy makes an empty list one of floats
        return np.empty(0, np.int64)
    if array is pages and array.dtype.kind == "O":
        return _listed(array)
    if array.dtype.kind not in "iuO":
        raise ValueError(f"pages: expected integers, got {array[0]!r}")
    return array


def _listed(pages: Iterable[Any]) -> Pages:
    if isinstance(pages, Set):  # pages are freed in any order
        pages = list(pages)
    numbers = checks.as_list(pages, "pages", "ints")
    for page in numbers:
        try:
            checks.require_int(page, "pages")
        except TypeError:
            raise ValueError(f"pages: expected integers, got {page!r}") from None
    try:
        return np.array(numbers, np.int64)
    except OverflowError:  # kept as objects, for an error that names one
        return np.array(numbers, object)


# --- Hashes of blocks: the same in every process and on every machine ---


def block_hashes(
    token_ids: Any, block_tokens: int, *, parent: int = 0, bits: int = 128
) -> list[int]:
    """Hash the full blocks of a sequence; equal hashes mean equal tokens from the start on.

    Parameters
    ----------
    token_ids : list of ints, or array (T,) of an integer type on the host
    block_tokens : tokens per block; a last block that is not full has no hash
    parent : hash of the block before the first one; 0 at the start of a sequence, or another number
        for sequences that must not share blocks, for example of another model or adapter
    bits : 128, or 64 for caches of one process: of 10**9 hashes two of 64 bits are equal with a
        probability of 2.7 %, and equal ones can be constructed

    Returns
    -------
    list of int, (T // block_tokens,), each from 0 to 2**bits - 1

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    A hash is BLAKE2b of `bits` over the parent's hash, a little-endian number of as many bits, and
    the token ids, numbers of 64 bits. It is the same on every machine and in every process.

    Examples
    --------
    >>> first, second = block_hashes(range(10), 4)
    >>> block_hashes([4, 5, 6, 7], 4, parent=first) == [second]
    True
    >>> block_hashes(range(4), 4, bits=64)[0].bit_length() <= 64
    True
    """
    checks.require_int(block_tokens, "block_tokens")
    if block_tokens < 1:
        raise ValueError(f"block_tokens: expected at least 1, got {block_tokens}")
    checks.require_int(bits, "bits")
    if bits not in (64, 128):
        raise ValueError(f"bits: expected 64 or 128, got {bits}")
    checks.require_int(parent, "parent")
    if not -(2 ** (bits - 1)) <= parent < 2**bits:
        raise ValueError(f"parent: expected an int of {bits} bits, got {parent}")
    data = token_array(token_ids).astype("<i8").tobytes()
    block_bytes, hash_bytes = 8 * int(block_tokens), int(bits) // 8
    before = (int(parent) % 2 ** int(bits)).to_bytes(hash_bytes, "little")
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        block = before + data[start : start + block_bytes]
        before = blake2b(block, digest_size=hash_bytes).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes


def hash_list(hashes: Any, name: str = "hashes") -> list[int]:
    """Return hashes as ints from 0 to 2**128 - 1; negative ints are read as unsigned 64 bits."""
    if isinstance(hashes, np.ndarray):
        if hashes.ndim != 1 or (hashes.size and hashes.dtype.kind not in "iuO"):
            raise ValueError(f"{name}: expected integers (n,), got {hashes.dtype} {hashes.shape}")
        hashes = hashes.tolist()
    numbers = checks.as_list(hashes, name, "ints")
    if not all(type(hash) is int for hash in numbers):
        for hash in numbers:
            checks.require_int(hash, name)
        numbers = [int(hash) for hash in numbers]
    if numbers and (min(numbers) < 0 or max(numbers) > _WORD_MASK):
        outside = [hash for hash in numbers if not -(2**63) <= hash < 2**128]
        if outside:
            raise ValueError(f"{name}: expected ints of 64 or 128 bits, got {outside[0]}")
        numbers = [hash & _WORD_MASK if hash < 0 else hash for hash in numbers]
    return numbers


def token_array(token_ids: Any) -> np.ndarray[Any, Any]:
    """Return token ids as an array (T,) of an integer type."""
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise TypeError(f"token_ids: expected ints, got {type(token_ids).__name__}")
    try:
        array = np.asarray(list(token_ids) if isinstance(token_ids, range) else token_ids)
    except (TypeError, RuntimeError) as error:  # it is on a GPU, or its bits are not its values
        raise TypeError(f"token_ids: expected a list or an array of the host, {error}") from None
    except ValueError:  # lists of several lengths
        raise ValueError(f"token_ids: expected ints, got {token_ids!r}") from None
    if array.ndim != 1:
        raise ValueError(f"token_ids: expected one dimension, got {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"token_ids: expected ints, got {array.dtype}")
    if array.dtype == np.uint64 and array.max() > 2**63 - 1:
        raise ValueError(f"token_ids: expected 64-bit ints, got {array.max()}")
    return array
