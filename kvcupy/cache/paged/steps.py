"""Steps of a paged cache: begun and ended as transactions, their page copies in order."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...devices.protocol import Stream
from ...errors import KvcupyError
from ...ops import checks
from ..pool import Pool
from . import cascade, trees
from .cascade import Cascade
from .layers import Layers
from .moves import PageMover
from .sequence import CachedSequence
from .sequences import Sequences
from .step import PageLists, Step, check_batch
from .tables import StepTables, TableRing
from .turns import Turns


class Steps:
    """What changes the sequences of a cache from step to step.

    Attributes
    ----------
    turns : order of the streams that work on the pool
    running : the step between its begin and its end, or None
    tables : those of the running step
    copy_stream : where tables and pages are copied
    """

    def __init__(
        self,
        pool: Pool,
        layers: Layers,
        sequences: Sequences,
        *,
        copy_stream: Any,
        slots_in_flight: int,
        max_batch_tokens: int,
        max_positions: int | None,
        max_pages: int,
        cascade: bool | None,
    ) -> None:
        self._pool, self._layers, self._sequences = pool, layers, sequences
        self._mover = PageMover(pool)
        self._max_batch_tokens, self._max_positions = max_batch_tokens, max_positions
        self._max_pages, self._cascade = max_pages, cascade
        self.turns = Turns()
        self._ring = TableRing(pool.device, copy_stream, slots_in_flight, self.turns.enter)
        self.copy_stream = self._ring.copy_stream
        # Through the same courier: a failure on the copy stream is told once.
        self._lists_ring = TableRing(
            pool.device, self._ring.courier, slots_in_flight, self.turns.enter
        )
        self._lists: StepTables | None = None
        self.running: Step | None = None
        self.tables: StepTables | None = None

    def require_outside(self, seq: Hashable, name: str = "seq") -> None:
        """Refuse a sequence of the running step."""
        if self.running is not None and seq in self.running.names:
            raise KvcupyError(
                f"{name}: {seq!r} belongs to the running step; call end_forward first"
            )

    # --- Steps ---

    def begin(self, seqs: Any, append_lengths: Any, token_tree: Any) -> None:
        """Let sequences grow; all or nothing."""
        if self.running is not None:
            raise KvcupyError("a step is running: call end_forward before begin_forward")
        names, counts, entries = check_batch(seqs, append_lengths, token_tree)
        sequences = self._find(names)
        for name, sequence in zip(names, sequences, strict=True):
            require_here(sequence, name, "seqs")
        self._check_counts(names, counts)
        nodes = self._check_trees(names, sequences, counts, entries)
        self._check_positions(names, sequences, counts, nodes)

        reserved = self._sequences.reserve(sequences, counts)
        try:
            self._copy_pages(*reserved.replaced(), *(s for s, _, _ in reserved.copies))
        except BaseException:
            self._sequences.give_back(reserved)
            raise
        replaced = self._sequences.grow(sequences, counts, reserved)
        for sequence, new in zip(sequences, nodes, strict=True):
            sequence.parents.extend(new or ())
        self.running = Step(
            names, sequences, counts, [new is not None for new in nodes],
            self._pool.page_size, self._max_pages,
            num_layers=self._pool.num_layers,
            tree_positions=bool(self._layers.rope.inline),
            cascade=self._find_cascade(sequences, sum(counts)), replaced=replaced,
        )  # fmt: skip
        self.tables = self._ring.open(self.running)

    def end(self) -> None:
        """Close the running step; windows slide."""
        step = self._require_running()
        try:
            self._close()
        finally:
            self._sequences.settle(step.replaced)
            for sequence in step.sequences:
                if step.has_arrived:
                    sequence.arriving.clear()
                if not sequence.parents:
                    self._sequences.slide(sequence)

    def abort(self) -> None:
        """Close the running step and take its tokens back."""
        step = self._require_running()
        try:
            self._close()
        finally:
            for sequence, n, in_tree in zip(step.sequences, step.counts, step.in_tree, strict=True):
                if in_tree:
                    del sequence.parents[-n:]
            self._sequences.shrink(step.sequences, step.counts, step.replaced)

    def lists(self) -> StepTables:
        """Return the page lists of the running step, which are sent only if somebody asks."""
        if self._lists is None:
            assert self.running is not None
            self._lists = self._lists_ring.open(PageLists(self.running))
        return self._lists

    def _require_running(self) -> Step:
        if self.running is None:
            raise KvcupyError("no step is running: call begin_forward before end_forward")
        return self.running

    def _close(self) -> None:
        open_tables = [one for one in (self.tables, self._lists) if one is not None]
        self.running = self.tables = self._lists = None
        try:
            for one in open_tables:
                one.close()
        finally:
            for stream in dict.fromkeys(s for one in open_tables for s in one.streams):
                self.turns.leave(stream)

    # --- Trees ---

    def commit(self, seqs: Any, leaves: Any) -> None:
        """Keep a path of each tree; all or nothing."""
        names, chosen, _ = check_batch(seqs, leaves, None, "leaves")
        sequences = self._find(names)
        paths = []
        for name, sequence, leaf in zip(names, sequences, chosen, strict=True):
            self.require_outside(name, "seqs")
            if not sequence.parents:
                raise ValueError(f"seqs: expected sequences with a token tree, got {name!r}")
            checks.require_int(leaf, "leaves")
            if not -1 <= leaf < len(sequence.parents):
                raise ValueError(
                    f"leaves: expected -1 to {len(sequence.parents) - 1} for {name!r}, got {leaf}"
                )
            paths.append(trees.path(sequence.parents, leaf))

        src, dst = [], []
        for sequence, path in zip(sequences, paths, strict=True):
            places = sequence.places(sequence.committed, sequence.length)
            slots = sequence.slots(places, self._pool.page_size)
            src.append(slots[path])
            dst.append(slots[: len(path)])
        moved = np.concatenate(src) != np.concatenate(dst)
        if moved.any():
            with self.turn(self.copy_stream, *sequences):
                self._mover.move_slots(
                    np.concatenate(src)[moved], np.concatenate(dst)[moved], self.copy_stream
                )
        for sequence, path in zip(sequences, paths, strict=True):
            kept = sequence.committed + len(path)
            sequence.parents.clear()
            self._sequences.truncate(sequence, kept)
            self._sequences.slide(sequence)

    # --- Pages ---

    def fork(self, parent: CachedSequence, child: Hashable, at: int) -> None:
        """Add a sequence that shares the first tokens of another."""
        copied = self._sequences.fork(parent, child, at)
        if copied is not None:
            try:
                self._copy_pages([copied[0]], [copied[1]], parent)
            except BaseException:
                self._sequences.remove(child)
                raise

    def own(self, sequence: CachedSequence, places: Any) -> None:
        """Copy the shared pages that hold some places of a sequence."""
        shared = self._sequences.shared(sequence, places)
        if len(shared) == 0:
            return
        fresh = self._sequences.allocate(len(shared))
        try:
            self._copy_pages(sequence.pages[shared].tolist(), fresh.tolist(), sequence)
        except BaseException:
            self._pool.allocator.free(fresh)
            raise
        self._sequences.replace(sequence, shared, fresh)

    @contextmanager
    def turn(self, stream: Stream, *sequences: CachedSequence) -> Iterator[None]:
        """Let `stream` work on the pool, behind the running step so far.

        It waits for what is on its way to `sequences`.
        """
        if self.tables is not None:
            for used in self.tables.streams:
                if not used.capturing:
                    self.turns.leave(used)
        courier = self._ring.courier
        if stream == self.copy_stream:
            courier.recover()
        self.turns.enter(stream)
        try:
            for arrival in {id(a): a for s in sequences for a in s.arriving}.values():
                arrival.wait(stream)
            yield
        finally:
            self.turns.leave(stream)
            if stream == self.copy_stream:
                courier.note()

    def _copy_pages(self, src: list[int], dst: list[int], *sequences: CachedSequence) -> None:
        if src:
            with self.turn(self.copy_stream, *sequences):
                self._mover.copy_pages(src, dst, self.copy_stream)

    # --- Checks ---

    def _find(self, names: Sequence[Hashable]) -> list[CachedSequence]:
        found = [self._sequences.find(name, "seqs") for name in names]
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ValueError(f"seqs: expected each sequence once, got {twice!r} twice")
        return found

    def _check_counts(self, names: Sequence[Hashable], counts: list[Any]) -> None:
        for i, (name, n) in enumerate(zip(names, counts, strict=True)):
            checks.require_int(n, "append_lengths")
            if n < 1:
                raise ValueError(f"append_lengths: expected at least 1 for {name!r}, got {n}")
            counts[i] = int(n)
        if sum(counts) > self._max_batch_tokens:
            raise ValueError(
                f"append_lengths: expected at most {self._max_batch_tokens} tokens a step "
                f"(max_batch_tokens), got {sum(counts)}"
            )

    def _check_trees(
        self,
        names: Sequence[Hashable],
        sequences: Sequence[CachedSequence],
        counts: Sequence[int],
        entries: Sequence[Any] | None,
    ) -> list[list[int] | None]:
        """Return the parents of each sequence's new nodes; None for plain tokens."""
        nodes: list[list[int] | None] = []
        for i, (name, sequence, n) in enumerate(zip(names, sequences, counts, strict=True)):
            entry = None if entries is None else entries[i]
            if entry is not None:
                nodes.append(trees.check_nodes(entry, len(sequence.parents), n, "token_tree"))
                continue
            if sequence.parents:
                raise ValueError(
                    f"token_tree: expected parents for {name!r}, whose tree is not committed"
                )
            nodes.append(None)
        return nodes

    def _check_positions(
        self,
        names: Sequence[Hashable],
        sequences: Sequence[CachedSequence],
        counts: Sequence[int],
        nodes: Sequence[list[int] | None],
    ) -> None:
        if self._max_positions is None:
            return
        for name, sequence, n, new in zip(names, sequences, counts, nodes, strict=True):
            end = sequence.length + n
            if new is not None:
                end = sequence.committed + max(trees.depths([*sequence.parents, *new])) + 1
            if end > self._max_positions:
                raise ValueError(
                    f"append_lengths: expected {name!r} to stay within the {self._max_positions} "
                    f"positions of rope, got {end}"
                )

    def _find_cascade(self, sequences: Sequence[CachedSequence], num_tokens: int) -> Cascade | None:
        if self._cascade is False or len(sequences) < 2:
            return None
        shared = [s.num_pages > 0 and self._sequences.is_shared(s.pages[0]) for s in sequences]
        if sum(shared) < 2:
            return None
        found = cascade.find(sequences, shared, self._pool.page_size)
        if found is None or self._cascade:
            return found
        layers = self._layers
        worth = cascade.pays(found.saved_keys, num_tokens, layers.key_bytes, layers.state_bytes)
        return found if worth else None


def require_here(sequence: CachedSequence, seq: Hashable, name: str) -> None:
    """Refuse a sequence that is offloaded."""
    if sequence.away is not None:
        raise ValueError(f"{name}: {seq!r} is offloaded: call onboard first")
