"""The pages of one group of layers: allocation for steps, copies, and demotion."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ... import metrics
from ...errors import ORDERLY_ERRORS
from ..hazards import Completion, CopiedPages, PageAccess
from ..pool import KVPool, Pool
from .layers import Layers, Rope
from .moves import DemotedPages, PageMover
from .sequences import CachedSequence, Ints, PageCopy, Sequences
from .tables import GroupTables


class PageGroup:
    """The pages of one group of layers, of all sequences.

    pool, demoted_pool : of its pages; the second one of demoted pages, or None
    demotion : that pool, and the numbers of last and first tokens that are not in it
    tables : finds the tables of the group in the tables of a step
    label : names it in errors, if there are several groups
    model_layers : the numbers of its layers in the model
    layers : its layers, numbered from 0
    sequences : the page lists of all sequences
    demoted : converts pages to and from the pool of demoted pages, or None
    window, sink_tokens : keys that a query sees, and the first keys, which all see; window 0: all
    """

    def __init__(
        self, pool: Pool, num_q_heads: int, rope: Rope, scales: list[tuple[Any, Any]], *,
        tables: GroupTables, model_layers: Sequence[int], label: str, batch_invariant: bool,
        demotion: tuple[KVPool, int, int] | None = None, window: int = 0, sink_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.pool, self.demoted_pool, self.demoted = pool, None, None
        self.window, self.sink_tokens, self.tables = window, sink_tokens, tables
        self.model_layers = tuple(model_layers)
        demoted_layers, demoted_allocator, kept = None, None, (0, 0)
        if demotion is not None:
            self.demoted_pool, *numbers = demotion
            kept = numbers[0], numbers[1]
            demoted_layers = Layers(self.demoted_pool, num_q_heads, rope, [], tables)
            demoted_allocator = self.demoted_pool.allocator
        self.layers = Layers(
            pool, num_q_heads, rope, scales, tables, demoted_layers, *kept, batch_invariant
        )
        if self.demoted_pool is not None and demoted_layers is not None:
            self.demoted = DemotedPages(pool, self.demoted_pool, self.layers, demoted_layers, *kept)
        self.sequences = Sequences(
            pool.allocator, pool.page_size, demoted_allocator, window, sink_tokens, label
        )
        self._mover = PageMover(pool)

    @property
    def num_pages(self) -> int:
        """Pages of both pools."""
        pools = (self.pool, self.demoted_pool)
        return sum(pool.num_pages for pool in pools if pool is not None)

    def window_of(self, window: Any, sink_tokens: Any) -> tuple[Any, Any]:
        """Return the window and sink tokens of the group, which a call may repeat."""
        if not self.window:
            return window, sink_tokens
        expected_values = self.window, self.sink_tokens
        for name, value, expected in zip(
            ("window", "sink_tokens"), (window, sink_tokens), expected_values, strict=True
        ):
            if value is not None and value != expected:
                raise ValueError(
                    f"{name}: expected None or {expected} as in the group, got {value}"
                )
        return self.window, self.sink_tokens or None

    # --- Steps ---

    def copy_shared(self, access: PageAccess, copies: Sequence[PageCopy]) -> CopiedPages:
        """Copy the partial pages that reserved ones replace."""
        src, dst = [copy.old for copy in copies], [copy.new for copy in copies]
        return self._copy_pages(access, src, dst, *(copy.sequence for copy in copies))

    def move_paths(
        self, access: PageAccess, sequences: Sequence[CachedSequence],
        paths: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        """Move the nodes of one path of each tree next to one another."""
        moves = []
        for sequence, path in zip(sequences, paths, strict=True):
            places = sequence.places(sequence.committed, sequence.length)
            slots = sequence.slots(places, self.pool.page_size)
            moves.append((slots[list(path)], slots[: len(path)]))
        src, dst = map(np.concatenate, zip(*moves, strict=True))
        moved = src != dst
        if not moved.any():
            return
        stream = access.copy_stream
        with access.on(stream, *sequences):
            self._mover.move_slots(src[moved], dst[moved], stream)
            copied = CopiedPages(stream)
        for sequence in sequences:
            add_load(sequence, copied)

    def commit(self, sequence: CachedSequence, count: int) -> None:
        """Keep the first `count` nodes of a tree."""
        committed = sequence.committed
        sequence.parents.clear()
        self.sequences.truncate(sequence, committed + count)
        self.sequences.slide(sequence)
        self.free_unseen(sequence, committed)

    def free_unseen(self, sequence: CachedSequence, step_start: int) -> None:
        """Free the pages before the window of a step's tokens, `step_start` being the first.

        What the window of the last step's first token holds is kept, at most a page more than the
        next token sees, so that rejected tokens can be popped.
        """
        if self.window:
            position = max(step_start, sequence.length - self.pool.page_size)
            self.sequences.free_unseen(sequence, position)

    # --- Copies ---

    def demote(self, access: PageAccess, sequences: Sequence[CachedSequence]) -> None:
        """Replace pages that hold no recent tokens, while there are pages for old tokens.

        After an error none is replaced. A shared page is converted once: the next sequence that
        leaves it takes the same demoted page.
        """
        demoted = self.demoted
        if demoted is None:
            return
        known = self.sequences
        leaving = [
            (sequence, index, int(sequence.pages[index]))
            for sequence in sequences
            if not any(load.failure for load in sequence.loads)  # it can only be removed
            for index in known.leaving(sequence, demoted.recent, demoted.sinks)
        ]
        if not leaving:
            return
        pages = list(dict.fromkeys(p for *_, p in leaving if known.demoted(p) is None))
        pages = pages[: demoted.pool.allocator.num_free]
        fresh = known.allocate_demoted(len(pages))
        targets = dict(zip(pages, fresh.tolist(), strict=True))
        copied = None
        if pages:
            owners = list({id(s): s for s, _, page in leaving if page in targets}.values())
            try:
                copied = self._copy_pages(access, pages, fresh.tolist(), *owners)
            except ORDERLY_ERRORS:
                known.free(fresh)
                raise
            metrics.add("kvcupy_demoted_pages_total", len(pages))
        blocked: set[int] = set()  # sequences that keep a page, and so all pages after it
        for sequence, index, page in leaving:
            before = known.demoted(page)
            target, completion = before or (targets.get(page), copied)
            if id(sequence) in blocked or target is None or completion is None:
                blocked.add(id(sequence))
                continue
            known.demote(sequence, index, target, completion)
            if completion not in sequence.loads:
                add_load(sequence, completion)

    def fork(self, access: PageAccess, parent: CachedSequence, child: Hashable, at: int) -> None:
        """Add a sequence that shares the first tokens of another."""
        pages = self.sequences.fork(parent, child, at)
        if pages is not None:
            try:
                copied = self._copy_pages(access, [pages[0]], [pages[1]], parent)
            except ORDERLY_ERRORS:
                self.sequences.remove(child)
                raise
            add_load(self.sequences.find(child), copied)

    def unshare(self, access: PageAccess, sequence: CachedSequence, places: Ints) -> None:
        """Copy the shared pages that hold some places of a sequence, so that it may write there."""
        indices = np.unique(places // self.pool.page_size)
        shared = self.sequences.shared(sequence, indices)
        if len(shared):
            pages = sequence.pages[shared]
            demoted = pages >= self.sequences.first_demoted
            demoted_count, fresh = int(demoted.sum()), np.empty(len(shared), np.int64)
            fresh[~demoted], pages_demoted = self.sequences.allocate_both(
                len(shared) - demoted_count, demoted_count
            )
            fresh[demoted] = pages_demoted + self.sequences.first_demoted
            try:
                copied = self._copy_pages(access, pages.tolist(), fresh.tolist(), sequence)
            except ORDERLY_ERRORS:
                self.sequences.free(fresh)
                raise
            add_load(sequence, copied)
            self.sequences.replace(sequence, shared, fresh)
        self.sequences.forget_demoted(sequence.pages[indices].tolist())

    def _copy_pages(
        self, access: PageAccess, src: list[int], dst: list[int], *sequences: CachedSequence
    ) -> CopiedPages:
        stream = access.copy_stream
        with access.on(stream, *sequences):
            if self.demoted is None:
                self._mover.copy_pages(src, dst, stream)
            else:
                self.demoted.copy_pages(self._mover, src, dst, stream)
            return CopiedPages(stream)


def add_load(sequence: CachedSequence, copied: Completion) -> None:
    """Add a load of a sequence, and forget earlier copies that have succeeded.

    Steps that attend forget them too, but there may be no such step.
    """
    sequence.loads = [
        load for load in sequence.loads if not (isinstance(load, CopiedPages) and load.succeeded)
    ]
    sequence.loads.append(copied)
