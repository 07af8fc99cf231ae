"""The pages and the tokens of the sequences of a paged cache. Host work only.

A token has a *position*, counted in what is cached, and a *place*, which says where its row is:
`pages[place // page_size]`, offset `place % page_size`. They differ where a sliding window has
evicted tokens after the sink tokens: the evicted places are between, until they fill pages that
can be freed.

Where old tokens are kept in a narrower format, their pages are of a second pool. Their numbers
follow the numbers of the first pool, so a list of pages names both.

Layers that attend within a window free the pages that no query can see again. Such a page is
`FREED` in the list of its sequence, and the pages after it keep their indices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import checks
from ...checks import positive_int
from ...errors import ORDERLY_ERRORS, CacheFull, UnknownSequence
from ..engine import TransferEngine
from ..hazards import Completion
from ..pages import PageAllocator
from ..tiered.leases import Lease

Ints = np.ndarray[Any, Any]

_FIRST_CAPACITY = 4  # pages
FREED = -1
"""Stands in a list of pages for a page that was freed before a window."""


class CachedSequence:
    """One sequence.

    length : tokens cached, including a pending tree
    evicted : places between the sink tokens and the token after them that hold no token
    window, sink_tokens : the last and the first tokens that a sliding window keeps; window 0: none
    parents : of the nodes of the uncommitted tree, which are its last tokens
    hashes : of its first full pages, in a tiered cache now or later
    token_ids : of these pages, (pages, page_size), or None
    loads : transfers, leases and copies that bring some of its pages
    offloaded : its pages in host memory, instead of any on the device; None: it is on the device
    first_kept : index after its `FREED` pages, 0 without any
    """

    __slots__ = (
        "_pages", "evicted", "first_kept", "hashes", "length", "loads", "num_pages", "offloaded",
        "parents", "sink_tokens", "token_ids", "window",
    )  # fmt: skip

    def __init__(self) -> None:
        self.length = self.evicted = self.window = self.sink_tokens = self.num_pages = 0
        self.first_kept = 0
        self.parents: list[int] = []
        self.hashes: list[int] = []
        self.token_ids: Ints | None = None
        self.loads: list[Completion] = []
        self.offloaded: OffloadedPages | None = None
        self._pages = np.empty(_FIRST_CAPACITY, np.int32)

    @property
    def pages(self) -> Ints:
        """Its pages in order, int32, a view."""
        return self._pages[: self.num_pages]

    @property
    def end(self) -> int:
        """The place of its next token."""
        return self.length + self.evicted

    @property
    def committed(self) -> int:
        """Tokens before the pending tree."""
        return self.length - len(self.parents)

    def extend(self, pages: Ints) -> None:
        """Append pages."""
        num_pages = self.num_pages + len(pages)
        if num_pages > len(self._pages):
            capacity = max(num_pages, 2 * len(self._pages))
            self._pages = np.concatenate(
                [self.pages, np.empty(capacity - self.num_pages, np.int32)]
            )
        self._pages[self.num_pages : num_pages] = pages
        self.num_pages = num_pages

    def places(self, start: int, stop: int) -> Ints:
        """Return the places of the tokens at positions `start` to `stop` - 1, int64."""
        positions = np.arange(start, stop, dtype=np.int64)
        if not self.evicted:
            return positions
        return positions + np.where(positions < self.sink_tokens, 0, self.evicted)

    def slots(self, places: Ints, page_size: int) -> Ints:
        """Return the slots of places, int64."""
        slots: Ints = self.pages[places // page_size].astype(np.int64)
        slots *= page_size
        slots += places % page_size
        return slots

    @property
    def num_beyond_window(self) -> int:
        """How many tokens the sliding window evicts at the end of a step."""
        beyond = self.length - self.sink_tokens - self.window
        return beyond if self.window and beyond > 0 else 0

    def set_window(self, window: Any, sink_tokens: Any) -> None:
        """Set the sliding window; raise if it does not fit the tokens that are evicted already."""
        positive_int(window, "window")
        checks.require_int(sink_tokens, "sink_tokens")
        if not 0 <= sink_tokens < 2**31:
            raise ValueError(f"sink_tokens: expected 0 to 2**31 - 1, got {sink_tokens}")
        if self.evicted and sink_tokens != self.sink_tokens:
            raise ValueError(
                f"sink_tokens: expected {self.sink_tokens} as before, got {sink_tokens}"
            )
        self.window, self.sink_tokens = int(window), int(sink_tokens)

    def evicted_before(self, length: int) -> int:
        """Return how many evicted places are before the end if it had `length` tokens."""
        return self.evicted if length > self.sink_tokens else 0


@dataclass(frozen=True, eq=False)
class OffloadedPages:
    """Pages in host memory that hold an offloaded sequence, and the transfer `save` to them.

    engine : of that transfer
    demoted : the host pages of its demoted pages, if it has any, from its page `demoted_start` on
    """

    pages: Ints
    save: Completion
    engine: TransferEngine
    demoted: OffloadedPages | None = None
    demoted_start: int = 0

    def free(self) -> None:
        """Free the pages, as soon as no transfer touches them."""
        self.engine.host_pool.allocator.free(self.pages)
        if self.demoted is not None:
            self.demoted.free()


@dataclass(frozen=True, eq=False)
class PageCopy:
    """A shared page of a sequence, by its index there, and the page that replaces it."""

    sequence: CachedSequence
    index: int
    old: int
    new: int


@dataclass
class Reservation:
    """Pages for the tokens of a step, allocated but not yet part of any sequence."""

    pages: Ints  # all of them
    copies: list[PageCopy]  # of last pages that are partial and shared
    num_new: list[int]  # the other pages, by sequence


class Sequences:
    """All sequences of a cache, and how many of them refer to each page.

    window, sink_tokens : the keys that a query sees, itself included, and the first keys, which all
        queries see; window 0: all keys
    label : names the layers where there are too few pages

    first_demoted : the number of the first page of the pool of demoted pages
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int,
        demoted_allocator: PageAllocator | None = None,
        window: int = 0, sink_tokens: int = 0, label: str = "",
    ) -> None:  # fmt: skip
        self.label = label
        self._allocator, self._demoted_allocator = allocator, demoted_allocator
        self._window, self._num_sink_pages = window, -(-sink_tokens // page_size)
        self._page_size = page_size
        self.first_demoted = num_pages = allocator.num_pages
        if demoted_allocator is not None:
            num_pages += demoted_allocator.num_pages
        self._references = np.zeros(num_pages, np.int32)
        # By shared page that some sequence has demoted: the demoted page, and its copy. By
        # demoted page: the original.
        self._demoted: dict[int, tuple[int, Completion]] = {}
        self._origins: dict[int, int] = {}
        self._leased = LeasedPages(self._references)
        # Called when too few pages are free, with how many are needed.
        self.evict: Callable[[int], object] | None = None
        # Called before pages are allocated: pages that were held may have become free.
        self.reclaim: Callable[[], object] | None = None
        # Called before pages before a window are freed; returns those that a tiered cache took.
        self.take_unseen: Callable[[Sequences, CachedSequence, int, int], set[int]] | None = None
        self._known: dict[Hashable, CachedSequence] = {}
        self.total_length = 0

    def __contains__(self, seq: Hashable) -> bool:
        return seq in self._known

    def __len__(self) -> int:
        return len(self._known)

    def find(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence; `name` is the argument, for errors."""
        sequence = self._known.get(_hashable(seq, name))
        if sequence is None:
            raise UnknownSequence(f"{name}: expected a sequence of this cache, got {seq!r}")
        return sequence

    def find_all(self, seqs: Sequence[Hashable], name: str) -> list[CachedSequence]:
        """Return several sequences; raise if one comes twice."""
        try:
            sequences = list(map(self._known.__getitem__, seqs))
        except (KeyError, TypeError):
            sequences = [self.find(seq, name) for seq in seqs]  # raises, saying which
        if len(set(seqs)) < len(seqs):
            twice = next(seq for i, seq in enumerate(seqs) if seq in seqs[:i])
            raise ValueError(f"{name}: expected each sequence once, got {twice!r} twice")
        return sequences

    def add(self, seq: Hashable) -> CachedSequence:
        """Add an empty sequence."""
        self.require_new(seq, "seq")
        sequence = self._known[seq] = CachedSequence()
        return sequence

    def require_new(self, seq: Hashable, name: str) -> None:
        """Raise if there is such a sequence already."""
        if _hashable(seq, name) in self._known:
            raise ValueError(f"{name}: expected a new sequence, got {seq!r}, which is cached")

    def share(
        self, seq: Hashable, lease: Lease | None, num_blocks: int, indices: Sequence[int]
    ) -> CachedSequence:
        """Add a sequence of the pages that a lease pins, for as long as it or a fork uses them.

        num_blocks : of the sequence
        indices : of the pages of the lease in the sequence; the others are `FREED`
        """
        sequence = self.add(seq)
        if lease is None or num_blocks == 0:
            if lease is not None:
                lease.release()
            return sequence
        sequence.extend(np.full(num_blocks, FREED, np.int64))
        sequence.length = num_blocks * self._page_size
        self.total_length += sequence.length
        self.fill(sequence, lease, indices)
        return sequence

    def fill(self, sequence: CachedSequence, lease: Lease, indices: Sequence[int]) -> None:
        """Put the pages that a lease pins in place of `FREED` ones."""
        if lease.num_blocks == 0:
            lease.release()
        sequence.pages[list(indices)] = lease.pages
        self._references[lease.pages] += 1
        gap = np.flatnonzero(sequence.pages == FREED)
        sequence.first_kept = int(gap[-1]) + 1 if len(gap) else 0
        self._leased.add(lease)
        sequence.loads.append(lease.completion)

    def is_shared(self, sequence: CachedSequence) -> bool:
        """Return whether some page of a sequence is shared."""
        return bool((self._references[_kept(sequence.pages)] > 1).any())

    def owned_of(self, sequence: CachedSequence, indices: range) -> list[int]:
        """Return which of some indices are of unshared pages."""
        pages = sequence.pages[indices.start : indices.stop]
        unshared = (pages != FREED) & (self._references[pages] == 1)
        owned: list[int] = (np.flatnonzero(unshared) + indices.start).tolist()
        return owned

    def remove(self, seq: Hashable, published: Collection[int] = ()) -> None:
        """Drop a sequence; free its pages, except shared and `published` ones."""
        sequence = self.find(seq)
        if sequence.offloaded is not None:
            sequence.offloaded.free()
        self.drop(sequence, published)
        self.total_length -= sequence.length
        del self._known[seq]

    def drop(self, sequence: CachedSequence, published: Collection[int] = ()) -> None:
        """Release the pages of a sequence, except the `published` ones."""
        if published:
            self.forget_demoted(published)
            self._release_except(sequence.pages, published)
        else:
            self._release(sequence.pages)

    def hold(self, sequence: CachedSequence) -> CachedSequence:
        """Return a copy of a sequence that shares its pages, until `drop` releases them.

        The partial page is shared too: appending to the sequence copies it first.
        """
        held = CachedSequence()
        for name in ("length", "evicted", "window", "sink_tokens", "first_kept", "token_ids"):
            setattr(held, name, getattr(sequence, name))
        held.hashes, held.loads = list(sequence.hashes), list(sequence.loads)
        held.extend(sequence.pages)
        self._references[_kept(held.pages)] += 1
        return held

    def clear(self) -> None:
        """Drop all sequences."""
        for seq in list(self._known):
            self.remove(seq)

    # --- Growing and shrinking ---

    def reserve(self, sequences: Sequence[CachedSequence], counts: Sequence[int]) -> Reservation:
        """Allocate the pages that sequences need for more tokens, `counts` each; all or none."""
        size = self._page_size
        dropped: dict[int, int] = {}  # by page, references that copies of this call replace
        shared: list[tuple[CachedSequence, int, int]] = []
        num_new = []
        references = self._references.item  # a scalar of NumPy takes several times as long
        for sequence, count in zip(sequences, counts, strict=True):
            end, num_pages = sequence.length + sequence.evicted, sequence.num_pages
            if end % size:
                page = sequence._pages.item(num_pages - 1)
                if page >= self.first_demoted:  # new tokens are not stored in the demoted format
                    shared.append((sequence, num_pages - 1, page))
                elif references(page) > 1:
                    dropped[page] = dropped.get(page, 0) + 1
                    if references(page) > dropped[page]:  # the last sequence may keep it
                        shared.append((sequence, num_pages - 1, page))
            num_new.append(-(-(end + count) // size) - num_pages)
        pages = self.allocate(len(shared) + sum(num_new))
        copies = [PageCopy(*place, int(page)) for place, page in zip(shared, pages, strict=False)]
        return Reservation(pages, copies, num_new)

    def grow(
        self, sequences: Sequence[CachedSequence], counts: Sequence[int], reserved: Reservation
    ) -> None:
        """Append tokens to each sequence, in the reserved pages.

        Replaced pages keep their references until `release_replaced` or `shrink`.
        """
        self._references[reserved.pages] = 1
        for copy in reserved.copies:
            copy.sequence.pages[copy.index] = copy.new
        start = len(reserved.copies)
        for sequence, count, num_new in zip(sequences, counts, reserved.num_new, strict=True):
            if num_new:
                sequence.extend(reserved.pages[start : start + num_new])
                start += num_new
            sequence.length += count
        self.total_length += sum(counts)

    def release_replaced(self, copies: Sequence[PageCopy]) -> None:
        """Release the shared pages that `grow` replaced."""
        for copy in copies:  # one by one: several may have shared it
            self._release(np.array([copy.old]))

    def shrink(
        self, sequences: Sequence[CachedSequence], counts: Sequence[int], copies: Sequence[PageCopy]
    ) -> None:
        """Undo `grow`."""
        for sequence, count in zip(sequences, counts, strict=True):
            self.truncate(sequence, sequence.length - count)
        for copy in copies:
            self._release(np.array([copy.new]))
            copy.sequence.pages[copy.index] = copy.old

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Drop the tokens from position `length` on."""
        self.total_length += length - sequence.length
        sequence.evicted = sequence.evicted_before(length)
        sequence.length = length
        num_pages = -(-sequence.end // self._page_size)
        dropped = sequence.pages[num_pages:]
        sequence.num_pages = num_pages
        if sequence.first_kept > num_pages:  # only sink tokens are left
            sequence.first_kept = 0
        self._release(dropped)
        if sequence.end % self._page_size:  # it may be written to
            self.forget_demoted(sequence.pages[-1:].tolist())

    def slide(self, sequence: CachedSequence) -> None:
        """Evict the tokens that have left a sequence's window, and pages that have no others."""
        beyond = sequence.num_beyond_window
        if not beyond:
            return
        size, kept = self._page_size, sequence.sink_tokens
        sequence.length -= beyond
        sequence.evicted += beyond
        del sequence.hashes[kept // size :]  # they do not describe what follows a gap
        self.total_length -= beyond
        first = -(-kept // size)  # the first page that begins within the evicted span
        last = (kept + sequence.evicted) // size
        if last > first:
            dropped = sequence.pages[first:last].copy()
            rest = sequence.pages[last:].copy()
            sequence.num_pages = first
            sequence.extend(rest)
            sequence.evicted -= (last - first) * size
            self._release(dropped)

    # --- Pages that no query can see again ---

    def free_unseen(self, sequence: CachedSequence, position: int) -> None:
        """Free the pages that no query at `position` or after it sees."""
        if not self._window:
            return
        start = max(sequence.first_kept, self._num_sink_pages)
        stop = (position - self._window + 1) // self._page_size
        if stop > start:
            taken: Collection[int] = ()
            if self.take_unseen is not None:
                taken = self.take_unseen(self, sequence, start, stop)
            pages = sequence.pages[start:stop]
            self._release_except(pages.copy(), taken)
            pages[:] = FREED
            sequence.first_kept = stop

    def skip(self, sequence: CachedSequence, num_pages: int) -> None:
        """Append `FREED` pages to a sequence that ends with a page, and their tokens."""
        if not num_pages:
            return
        sequence.extend(np.full(num_pages, FREED, np.int32))
        sequence.first_kept = sequence.num_pages
        sequence.length += num_pages * self._page_size
        self.total_length += num_pages * self._page_size

    def kept_runs(self, length: int, first_kept: int) -> list[tuple[int, int]]:
        """Return the positions, in runs, of the tokens that are not in `FREED` pages."""
        if not first_kept:
            return [(0, length)]
        sinks = self._num_sink_pages * self._page_size
        return [(0, sinks), (first_kept * self._page_size, length)]

    def may_be(self, length: int, first_kept: int) -> bool:
        """Return whether a sequence of `length` tokens may have `FREED` pages before an index."""
        if not first_kept:
            return True
        first_seen = length - self._window + 1
        return (
            self._window > 0 and self._num_sink_pages < first_kept <= first_seen // self._page_size
        )

    def restorable(self, sequence: CachedSequence, length: int) -> int:
        """Return the most tokens, up to `length`, after which a query sees no `FREED` page."""
        first_kept = sequence.first_kept * self._page_size
        if first_kept == 0 or length - self._window + 1 >= first_kept:
            return length
        return min(length, self._num_sink_pages * self._page_size)

    # --- Sharing ---

    def require_fork(self, parent: CachedSequence, child: Hashable, at: Any) -> int:
        """Return how many tokens a fork is to have; raise unless it can be made."""
        self.require_new(child, "child")
        if at is None:
            at = parent.length
        checks.require_int(at, "at")
        if not 0 <= at <= parent.length:
            raise ValueError(f"at: expected 0 to {parent.length}, got {at}")
        return int(at)

    def fork(self, parent: CachedSequence, child: Hashable, at: int) -> tuple[int, int] | None:
        """Add a sequence of the first `at` tokens of another, which shares its full pages.

        Returns the source and the target of a page to be copied, if the last one is partial.
        """
        evicted = parent.evicted_before(at)
        full, partial = divmod(at + evicted, self._page_size)
        fresh = self.allocate(1 if partial else 0)
        sequence = self.add(child)
        sequence.length, sequence.evicted = at, evicted
        sequence.window, sequence.sink_tokens = parent.window, parent.sink_tokens
        sequence.hashes = parent.hashes[: at // self._page_size]
        sequence.token_ids = parent.token_ids
        sequence.loads = list(parent.loads)
        sequence.extend(parent.pages[:full])
        sequence.extend(fresh)
        sequence.first_kept = parent.first_kept if parent.first_kept <= full else 0
        self._references[_kept(sequence.pages)] += 1
        self.total_length += at
        return (int(parent.pages[full]), int(fresh[0])) if partial else None

    def shared(self, sequence: CachedSequence, indices: Ints) -> Ints:
        """Return the indices, of some of a sequence's pages, whose pages are shared."""
        shared: Ints = indices[self._references[sequence.pages[indices]] > 1]
        return shared

    def replace(self, sequence: CachedSequence, indices: Ints, pages: Ints) -> None:
        """Replace pages of a sequence with allocated ones."""
        replaced = sequence.pages[indices]
        sequence.pages[indices] = pages
        self._references[pages] = 1
        self._release(replaced)

    def allocate(self, count: int) -> Ints:
        """Allocate pages, all or none; a tiered cache evicts blocks where too few are free."""
        if count == 0:
            return np.empty(0, np.int64)
        if self.reclaim is not None:
            self.reclaim()
        if self.evict is not None and self._allocator.num_free < count:
            with suppress(CacheFull):  # pages in flight may suffice
                self.evict(count)
        return self._alloc(self._allocator, count)

    def allocate_demoted(self, count: int) -> Ints:
        """Allocate pages of the pool of demoted pages, all or none; numbered as in sequences."""
        assert self._demoted_allocator is not None
        if self.reclaim is not None:
            self.reclaim()
        return self._alloc(self._demoted_allocator, count) + self.first_demoted

    def _alloc(self, allocator: PageAllocator, count: int) -> Ints:
        try:
            return allocator.alloc(count)
        except CacheFull as error:
            if not self.label:
                raise
            raise CacheFull(f"{self.label}: {error.args[0]}", error.argument) from error

    def free(self, pages: Ints) -> None:
        """Free allocated pages of either pool that belong to no sequence."""
        if self._demoted_allocator is None:
            self._allocator.free(pages)
            return
        demoted = pages >= self.first_demoted
        if not demoted.all():
            self._allocator.free(pages[~demoted])
        if demoted.any():
            self._demoted_allocator.free(pages[demoted] - self.first_demoted)

    def offload(self, sequence: CachedSequence, offloaded: OffloadedPages) -> None:
        """Replace the pages of a sequence with pages in host memory."""
        pages = sequence.pages.copy()
        sequence.num_pages, sequence.offloaded = 0, offloaded
        sequence.loads.clear()
        self._release(pages)

    def onboard(self, sequence: CachedSequence, pages: Ints, loads: Sequence[Completion]) -> None:
        """Give a sequence a list of allocated pages again, which transfers fill."""
        self._references[_kept(pages)] = 1
        sequence.extend(pages)
        sequence.offloaded = None
        sequence.loads.extend(loads)

    def receive(
        self, seq: Hashable, state: CachedSequence, pages: Ints, loads: Sequence[Completion]
    ) -> None:
        """Add a sequence like `state`, with a list of allocated pages that `loads` fill."""
        self.require_new(seq, "seq")
        self._known[seq] = state
        self._references[_kept(pages)] = 1
        state.extend(pages)
        state.loads.extend(loads)
        self.total_length += state.length

    # --- Old tokens in a narrower format ---

    def demoted_range(self, sequence: CachedSequence) -> tuple[int, int]:
        """Return the range of a sequence's demoted pages, which are neighbours; (0, 0) for none."""
        if self._demoted_allocator is None:
            return 0, 0
        demoted = np.flatnonzero(sequence.pages >= self.first_demoted)
        return (int(demoted[0]), int(demoted[-1]) + 1) if len(demoted) else (0, 0)

    def split(self, sequence: CachedSequence) -> tuple[Ints, Ints, int]:
        """Return a sequence's pages in each pool, and the index of its first demoted page."""
        start, stop = self.demoted_range(sequence)
        pages = _kept(sequence.pages).astype(np.int64)
        return np.delete(pages, slice(start, stop)), pages[start:stop] - self.first_demoted, start

    def combine(self, sequence: CachedSequence, pages: Ints, demoted: Ints, start: int) -> Ints:
        """Return the list of pages of a sequence that `split` would divide so."""
        combined: Ints = np.insert(pages, start, demoted + self.first_demoted)
        if sequence.first_kept:
            num_freed = sequence.first_kept - self._num_sink_pages
            combined = np.insert(combined, self._num_sink_pages, np.full(num_freed, FREED))
        return combined

    def num_kept(self, sequence: CachedSequence) -> int:
        """Return how many pages that are not `FREED` a sequence of its length has."""
        num_pages = -(-sequence.end // self._page_size)
        first = sequence.first_kept
        return num_pages - first + self._num_sink_pages if first else num_pages

    def allocate_both(self, count: int, demoted_count: int) -> tuple[Ints, Ints]:
        """Allocate pages of both pools, each by the numbers of its pool, all or none."""
        pages = self.allocate(count)
        if not demoted_count:
            return pages, np.empty(0, np.int64)
        try:
            return pages, self.allocate_demoted(demoted_count) - self.first_demoted
        except ORDERLY_ERRORS:
            self._allocator.free(pages)
            raise

    def free_both(self, pages: Ints, demoted: Ints) -> None:
        """Free the results of `allocate_both`."""
        self.free(np.concatenate([pages, demoted + self.first_demoted]))

    def leaving(self, sequence: CachedSequence, recent: int, sinks: int) -> range:
        """Return the indices of the pages to demote next, after the demoted ones.

        They hold none of the first `sinks` tokens and none of the last `recent` committed ones.
        """
        oldest = sequence.committed - recent  # the first token that is recent
        if oldest <= 0:
            return range(0)
        size = self._page_size
        first = 0 if sinks == 0 else -(-(int(sequence.places(sinks - 1, sinks)[0]) + 1) // size)
        start, stop = self.demoted_range(sequence)
        if stop > start:
            if stop < first:
                return range(0)
            first = stop
        return range(first, int(sequence.places(oldest, oldest + 1)[0]) // size)

    def demoted(self, page: int) -> tuple[int, Completion] | None:
        """Return the demoted page of a shared page, and its copy, if another sequence has left it.

        A page whose copy has failed is forgotten.
        """
        known = self._demoted.get(page)
        if known is not None and known[1].failure is not None:
            self.forget_demoted([page])
            return None
        return known

    def demote(self, sequence: CachedSequence, index: int, page: int, copied: Completion) -> None:
        """Replace a page of a sequence with its demoted page; others that share it keep it."""
        old = int(sequence.pages[index])
        sequence.pages[index] = page
        self._references[page] += 1
        if self._references[old] > 1:
            self._demoted[old], self._origins[page] = (page, copied), old
        self._release(np.array([old]))

    def forget_demoted(self, pages: Iterable[int]) -> None:
        """Forget the demoted pages or originals of pages that are to be written or freed."""
        if not self._demoted:
            return
        for page in pages:
            if page in self._demoted:
                del self._origins[self._demoted.pop(page)[0]]
            elif page in self._origins:
                del self._demoted[self._origins.pop(page)]

    def _release_except(self, pages: Ints, taken: Collection[int]) -> None:
        """Release pages, except those that a tiered cache owns now."""
        if taken:
            self._references[list(taken)] = 0
            pages = np.array([page for page in pages.tolist() if page not in taken], np.int64)
        self._release(pages)

    def _release(self, pages: Ints) -> None:
        """Drop one reference to each of some pages; those without any are freed."""
        if self._window:
            pages = _kept(pages)
        if len(pages) == 0:
            return
        left = self._references[pages] - 1
        self._references[pages] = left
        if not left.all():
            self.forget_demoted(pages[left == 0].tolist())
            self.free(pages[left == 0])
        if len(self._leased):
            self._leased.release_unused(pages.tolist())
            unused = [page for page in self._demoted if self._references.item(page) == 0]
            self.forget_demoted(unused)


class LeasedPages:
    """Leases of pages that a tiered cache owns; of each, the pages that sequences use are held.

    A lease counts as one reference to each of its pages. So a page in use has more references than
    leases, and no sequence writes to it, because it is shared.
    """

    def __init__(self, references: Ints) -> None:
        self._references = references
        self._of: dict[int, list[Lease]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, lease: Lease) -> None:
        """Hold a lease, whose pages a sequence uses."""
        for page in lease.pages.tolist():
            self._of.setdefault(page, []).append(lease)
        self._references[lease.pages] += 1

    def release_unused(self, pages: Iterable[int]) -> None:
        """Release the given pages that no sequence uses any more."""
        of, references = self._of, self._references.item
        unused = {page for page in pages if page in of and references(page) == len(of[page])}
        leases = {id(lease): lease for page in unused for lease in of.pop(page)}
        self._references[list(unused)] = 0
        for lease in leases.values():
            lease._release_pages(unused)


def _kept(pages: Ints) -> Ints:
    """Return the pages that are not `FREED`."""
    kept: Ints = pages[pages != FREED]
    return kept


# --- Token trees: drafts that branch, each node with its parent ---


def check_tree_nodes(parents: Any, pending: int, count: int) -> list[int]:
    """Return the parents of the nodes `pending` to `pending + count` - 1 of a tree as ints.

    Raises unless there are `count`, and each is -1 or an earlier node.
    """
    name = "token_tree"
    values = checks.as_list(parents, name, "parents")
    if len(values) != count:
        raise ValueError(f"{name}: expected {count} parents, one an appended token, got {values}")
    for node, parent in enumerate(values, pending):
        checks.require_int(parent, name)
        if not -1 <= parent < node:
            bound = f"a parent from -1 to {node - 1}" if node else "the parent -1"
            raise ValueError(f"{name}: expected for node {node} {bound}, got {parent}")
    return [int(parent) for parent in values]


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Return how far below its root each node is.

    >>> tree_depths([-1, 0, 0, 2, -1])
    [0, 1, 1, 2, 0]
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def tree_mask(parents: Sequence[int]) -> Ints:
    """Return which nodes each node sees: itself and its ancestors, bool (nodes, nodes).

    >>> tree_mask([-1, 0, 0]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    sees = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees


def tree_path(parents: Sequence[int], leaf: int) -> list[int]:
    """Return the nodes from the root to a leaf; none for leaf -1.

    >>> tree_path([-1, 0, 0, 2], 3)
    [0, 2, 3]
    """
    nodes = []
    while leaf >= 0:
        nodes.append(leaf)
        leaf = parents[leaf]
    return nodes[::-1]


def _hashable(seq: Hashable, name: str) -> Hashable:
    try:
        hash(seq)
    except TypeError:
        raise TypeError(f"{name}: expected a hashable name of a sequence, got {seq!r}") from None
    return seq
