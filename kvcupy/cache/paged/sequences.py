"""Which pages, and how many tokens, the sequences of a paged cache have. Host work only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress

import numpy as np

from ...errors import CacheFull, UnknownSequence
from ..pages import PageAllocator
from ..tiered.leases import Lease
from .leases import LeaseArrival, LeasedPages
from .sequence import Arrival, CachedSequence, Ints, Reservation


class Sequences:
    """All sequences of a cache, and how many of them refer to each page."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._references = np.zeros(allocator.num_pages, np.int32)
        self._leased = LeasedPages(self._references)
        # Called with a number of pages that are wanted when there are fewer.
        self.make_room: Callable[[int], object] | None = None
        self._known: dict[Hashable, CachedSequence] = {}
        self.total_length = 0

    def __contains__(self, seq: Hashable) -> bool:
        return seq in self._known

    def __len__(self) -> int:
        return len(self._known)

    def find(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence by its name; `name` is that of the argument, for errors."""
        found = self._known.get(_hashable(seq, name))
        if found is None:
            raise UnknownSequence(f"{name}: expected a sequence of this cache, got {seq!r}")
        return found

    def add(self, seq: Hashable) -> CachedSequence:
        """Add an empty sequence."""
        self.require_new(seq, "seq")
        made = self._known[seq] = CachedSequence()
        return made

    def require_new(self, seq: Hashable, name: str) -> None:
        """Refuse a sequence that is there already."""
        if _hashable(seq, name) in self._known:
            raise ValueError(f"{name}: expected a new sequence, got {seq!r}, which is cached")

    def adopt(self, seq: Hashable, made: CachedSequence, reserved: Reservation, count: int) -> None:
        """Add a sequence with the pages that were reserved for its tokens."""
        self._known[seq] = made
        self.grow([made], [count], reserved)

    def share(self, seq: Hashable, lease: Lease) -> CachedSequence:
        """Add a sequence of the pages that a lease pins, for as long as it or a fork uses one."""
        made = self.add(seq)
        if lease.num_blocks == 0:
            lease.release()
            return made
        made.extend(lease.pages)
        self._references[lease.pages] += 1
        self._leased.add(lease)
        made.length = lease.num_blocks * self._page_size
        made.arriving.append(LeaseArrival(lease))
        self.total_length += made.length
        return made

    def owned(self, sequence: CachedSequence, count: int) -> Ints:
        """Return which of the first pages of a sequence nobody else refers to, by index."""
        found: Ints = np.flatnonzero(self._references[sequence.pages[:count]] == 1)
        return found

    def remove(self, seq: Hashable, given_away: Collection[int] = ()) -> None:
        """Drop a sequence; pages that nobody else refers to become free.

        Parameters
        ----------
        given_away : pages of it alone that now are somebody else's
        """
        gone = self.find(seq)
        if gone.away is not None:
            gone.away.drop()
        if given_away:
            self._references[list(given_away)] = 0
            kept = [page for page in gone.pages.tolist() if page not in given_away]
            self._release(np.array(kept, np.int64))
        else:
            self._release(gone.pages)
        self.total_length -= gone.length
        del self._known[seq]

    def clear(self) -> None:
        """Drop all sequences."""
        for sequence in self._known.values():
            if sequence.away is not None:
                sequence.away.drop()
            self._release(sequence.pages)
        self._known.clear()
        self.total_length = 0

    # --- Growing and shrinking ---

    def reserve(self, sequences: Sequence[CachedSequence], counts: Sequence[int]) -> Reservation:
        """Take the pages that sequences need for so many more tokens.

        Raises
        ------
        CacheFull : there are too few; none was taken
        """
        size = self._page_size
        left: dict[int, int] = {}  # pages that some here no longer refer to
        shared: list[tuple[CachedSequence, int]] = []
        more = []
        for sequence, count in zip(sequences, counts, strict=True):
            end = sequence.length + sequence.hole
            last = sequence.num_pages - 1
            if end % size:
                page = int(sequence.pages[last])
                if self._references[page] - left.get(page, 0) > 1:
                    left[page] = left.get(page, 0) + 1
                    shared.append((sequence, last))
            more.append(-(-(end + count) // size) - last - 1)
        wanted = len(shared) + sum(more)
        pages = self.allocate(wanted)
        copies = [(s, i, int(page)) for (s, i), page in zip(shared, pages, strict=False)]
        return Reservation(pages, copies, more)

    def give_back(self, reservation: Reservation) -> None:
        """Free what was reserved and is not to be used."""
        self._allocator.free(reservation.pages)

    def grow(
        self, sequences: Sequence[CachedSequence], counts: Sequence[int], reserved: Reservation
    ) -> list[tuple[CachedSequence, int, int]]:
        """Let sequences have the reserved pages, and so many more tokens.

        Returns
        -------
        sequence, index, page : the shared pages that were replaced. They stay referred to until
            `settle` or `shrink`
        """
        self._references[reserved.pages] = 1
        replaced = []
        for sequence, index, page in reserved.copies:
            replaced.append((sequence, index, int(sequence.pages[index])))
            sequence.pages[index] = page
        at = len(reserved.copies)
        for sequence, count, more in zip(sequences, counts, reserved.more, strict=True):
            if more:
                sequence.extend(reserved.pages[at : at + more])
                at += more
            sequence.length += count
        self.total_length += sum(counts)
        return replaced

    def settle(self, replaced: Sequence[tuple[CachedSequence, int, int]]) -> None:
        """Let go of the shared pages that `grow` replaced."""
        for _, _, page in replaced:  # one by one: several may have shared it
            self._release(np.array([page]))

    def shrink(
        self,
        sequences: Sequence[CachedSequence],
        counts: Sequence[int],
        replaced: Sequence[tuple[CachedSequence, int, int]],
    ) -> None:
        """Undo `grow`."""
        for sequence, count in zip(sequences, counts, strict=True):
            self.truncate(sequence, sequence.length - count)
        for sequence, index, page in replaced:
            self._release(sequence.pages[index : index + 1])
            sequence.pages[index] = page

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Drop the tokens from position `length` on."""
        self.total_length += length - sequence.length
        sequence.hole = sequence.hole_at(length)
        sequence.length = length
        keep = -(-sequence.end // self._page_size)
        gone = sequence.pages[keep:]
        sequence.num_pages = keep
        self._release(gone)

    def slide(self, sequence: CachedSequence) -> None:
        """Drop the tokens that have left a sequence's window, and the pages that only they had."""
        beyond = sequence.length - sequence.window
        if not sequence.window or beyond <= 0:
            return
        size = self._page_size
        sequence.length -= beyond
        sequence.hole += beyond
        del sequence.hashes[sequence.sinks // size :]  # of what comes behind a gap they say nothing
        self.total_length -= beyond
        first = -(-sequence.sinks // size)  # page that begins within the hole
        last = (sequence.sinks + sequence.hole) // size
        if last > first:
            gone = sequence.pages[first:last].copy()
            kept = sequence.pages[last:].copy()
            sequence.num_pages = first
            sequence.extend(kept)
            sequence.hole -= (last - first) * size
            self._release(gone)

    # --- Sharing ---

    def fork(self, parent: CachedSequence, child: Hashable, at: int) -> tuple[int, int] | None:
        """Add a sequence of the first `at` tokens of another, which shares its full pages.

        Returns
        -------
        source, target : pages to be copied, because the last page is partial; None if it is not

        Raises
        ------
        CacheFull : there is no page for it; nothing has changed
        """
        hole = parent.hole_at(at)
        full, partial = divmod(at + hole, self._page_size)
        fresh = self.allocate(1 if partial else 0)
        made = self.add(child)
        made.length, made.hole = at, hole
        made.window, made.sinks = parent.window, parent.sinks
        made.hashes = parent.hashes[: at // self._page_size]
        made.arriving = list(parent.arriving)
        made.extend(parent.pages[:full])
        made.extend(fresh)
        self._references[made.pages] += 1
        self.total_length += at
        return (int(parent.pages[full]), int(fresh[0])) if partial else None

    def shared(self, sequence: CachedSequence, places: Ints) -> Ints:
        """Return which of a sequence's pages hold some places and are shared, by index."""
        indices = np.unique(places // self._page_size)
        found: Ints = indices[self._references[sequence.pages[indices]] > 1]
        return found

    def replace(self, sequence: CachedSequence, indices: Ints, pages: Ints) -> None:
        """Give a sequence allocated pages in place of others."""
        gone = sequence.pages[indices]
        sequence.pages[indices] = pages
        self._references[pages] = 1
        self._release(gone)

    def allocate(self, count: int) -> Ints:
        """Take pages, for which room is made where that can be done.

        Raises
        ------
        CacheFull : there are too few; none was taken
        """
        if count == 0:
            return np.empty(0, np.int64)
        if self.make_room is not None and self._allocator.num_free < count:
            with suppress(CacheFull):  # pages in flight may do
                self.make_room(count - self._allocator.num_free)
        return self._allocator.alloc(count)

    def leave(self, sequence: CachedSequence, away: object) -> None:
        """Let a sequence be somewhere else, and its pages go."""
        gone = sequence.pages.copy()
        sequence.num_pages, sequence.away = 0, away
        sequence.arriving.clear()
        self._release(gone)

    def come_back(self, sequence: CachedSequence, pages: Ints, arrival: Arrival) -> None:
        """Let a sequence have allocated pages again, which a transfer fills."""
        self._references[pages] = 1
        sequence.extend(pages)
        sequence.away = None
        sequence.arriving.append(arrival)

    def is_shared(self, page: int) -> bool:
        """Return whether several sequences refer to a page."""
        return bool(self._references[page] > 1)

    def _release(self, pages: Ints) -> None:
        """Refer to pages, each once, no more."""
        if len(pages) == 0:
            return
        self._references[pages] -= 1
        self._allocator.free(pages[self._references[pages] == 0])
        if len(self._leased):
            self._leased.give_back(pages.tolist())


def _hashable(seq: Hashable, name: str) -> Hashable:
    try:
        hash(seq)
    except TypeError:
        raise TypeError(f"{name}: expected a hashable name of a sequence, got {seq!r}") from None
    return seq
