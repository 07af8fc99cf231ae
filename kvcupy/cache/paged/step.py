"""A step of a paged cache, from begin_forward to end_forward.

`Step` has the sequences and their numbers of new tokens, and computes the tables; `Steps` begins,
ends and takes back steps as transactions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from ... import metrics
from ...devices.protocol import Stream
from ...errors import CacheFull, CaptureError, DeviceError, KvcupyError
from ...ops import checks
from ..hazards import AccessOrder, Completion, CopiedPages, CopyStream, PageAccess, loads_of
from ..pool import Pool
from .exchange import Export
from .layers import Layers
from .moves import PageMover, Past
from .sequences import (
    CachedSequence,
    Ints,
    PageCopy,
    Sequences,
    check_tree_nodes,
    tree_depths,
    tree_mask,
    tree_path,
)
from .tables import TRANSPOSED_TABLE, Shapes, StepTables, TableRing, Tables

Nodes = list[int] | None
"""The parents of a sequence's new nodes; None for plain tokens."""

# In a cascade, shared keys are read once instead of once per sequence; in return every token's
# result is written, read and merged, twice in float32, by two more launches. The break-even point
# of the host device in multiples of these bytes; not measured on a GPU, whose L2 keeps some keys.
_MIN_SAVED = 20


@dataclass(frozen=True)
class Cascade:
    """A batch in groups of neighbours, each with a prefix that all its sequences have.

    Attributes
    ----------
    lengths : tokens of each group's prefix, int32 (groups,); 0 without a prefix
    counts : sequences of each group
    pages : of each prefix, int32 (groups, most pages), padded with zeros
    """

    lengths: Ints
    counts: Ints
    pages: Ints

    @property
    def saved_keys(self) -> int:
        """Keys that need not be read again."""
        return int(((self.counts - 1).astype(np.int64) * self.lengths).sum())


@dataclass
class Step:
    """A step between its begin and its end.

    Attributes
    ----------
    names, sequences, counts : the sequences and their numbers of tokens, in the order of their rows
    in_tree : for each, whether its tokens are nodes of a tree
    page_size, max_pages : slots per page; pages per sequence that a captured step has space for
    num_layers : of the cache
    tree_positions : whether attention needs the positions of a tree's nodes, to rotate their keys
    cascade : prefixes to be attended first, or None
    copies, copied : shared pages that were replaced for the step, and the completion of the copies
    first_past : the first page number of the pool of old tokens, or None
    exports : of its sequences; each layer is sent once it is written
    loads : transfers, leases and copies that bring some pages of its sequences
    past_distance : the minimum number of tokens between old ones and the first new one of a
        sequence, once `tables` has been called
    """

    names: list[Hashable]
    sequences: list[CachedSequence]
    counts: list[int]
    in_tree: list[bool]
    page_size: int
    max_pages: int
    num_layers: int = 0
    tree_positions: bool = False
    cascade: Cascade | None = None
    copies: list[PageCopy] = field(default_factory=list)
    copied: CopiedPages | None = None
    first_past: int | None = None
    exports: list[Export] = field(default_factory=list)
    past_distance: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = sum(self.counts)
        self.has_trees = True in self.in_tree
        self.is_decode = self.num_tokens == len(self.counts) and not self.has_trees
        self.num_pages = max([s.num_pages for s in self.sequences])  # of the longest
        self.loads = loads_of(self.sequences)
        self._layers_waited = 0

    @property
    def is_loaded(self) -> bool:
        """Whether the pages of its sequences have been waited for in all layers."""
        return self._layers_waited == self.num_layers

    def wait_layer(self, layer: int, stream: Stream) -> None:
        """Make a stream wait until a layer of the pages of its sequences is loaded."""
        for load in self.loads:
            load.wait_layer(layer, stream)
        if self.loads and layer == self._layers_waited:  # out of order: again in the next step
            self._layers_waited += 1

    def before_launch(self, stream: Stream) -> None:
        """Make a stream wait until all layers are loaded, before a launch of a graph."""
        for load in self.loads:
            load.wait(stream)
        self._layers_waited = self.num_layers

    def tables(self) -> dict[str, Ints]:
        """Return the tables of the step as host arrays.

        Returns
        -------
        positions int32 (T,), slots int64 (T,), block_table int32 (B, pages of the longest),
        seq_lens int32 (B,); where they matter query_lens, evicted_starts, evicted_lens,
        tree_lens int32 (B,), cu_query_lens int32 (B + 1,), tree_mask bool (T, nodes),
        tree_positions int32 (B, nodes), and of a cascade prefix_table int32 (groups, pages),
        prefix_lens, prefix_queries int32 (groups,), cu_prefix_queries int32 (groups + 1,),
        key_starts int32 (B,); and if some pages are of the pool of old tokens past_table int32 (B,
        pages of the longest), past_starts, past_stops int32 (B,)
        """
        table = np.zeros((len(self.sequences), self.num_pages), np.int32)
        tables = self._plain(table)
        tables["block_table"] = table
        if self.first_past is not None and (table >= self.first_past).any():
            tables["past_table"] = past_table = np.zeros_like(table)
            tables |= self._split(table, past_table)
            stops = tables["past_stops"]
            distances = tables["seq_lens"] - np.array(self.counts) - stops
            self.past_distance = int(distances[stops > tables["past_starts"]].min())
        if not self.is_decode:
            tables["query_lens"] = np.array(self.counts, np.int32)
            tables["cu_query_lens"] = _starts(tables["query_lens"])
        if self.has_trees:
            self._add_trees(tables)
        if self.cascade is not None:
            self._add_cascade(tables, self.cascade)
        return tables

    def page_lists(self) -> dict[str, Ints]:
        """Return indptr int32 (B + 1,), indices int32 (pages,), last_page_len int32 (B,)."""
        sequences, size = self.sequences, self.page_size
        indptr = np.zeros(len(sequences) + 1, np.int32)
        indptr[1:] = np.cumsum([s.num_pages for s in sequences])
        last = [s.end - (s.num_pages - 1) * size for s in sequences]
        indices = np.concatenate([s.pages for s in sequences])
        return {"indptr": indptr, "indices": indices, "last_page_len": np.array(last, np.int32)}

    def captured_shapes(self) -> Shapes:
        """Return shape and format of the arrays that such a captured step reads."""
        if not self.is_decode:
            raise CaptureError("append_lens: expected one token per sequence in a captured step")
        count = len(self.counts)
        names = ["positions", "seq_lens", "evicted_starts", "evicted_lens"]
        rows = count
        if self.first_past is not None:
            names += ["past_starts", "past_stops"]
            rows = 2 * count  # pages of the one pool, then of the other
        return {
            "slots": ((count,), "int64"),
            **{name: ((count,), "int32") for name in names},
            TRANSPOSED_TABLE: ((self.max_pages, rows), "int32"),  # last: it may be shorter
        }

    def captured_tables(self, shapes: Shapes) -> dict[str, Ints]:
        """Return the tables for a captured step, which may have had more sequences."""
        max_pages, max_rows = shapes[TRANSPOSED_TABLE][0]
        max_count = shapes["slots"][0][0]
        count = len(self.counts)
        if not self.is_decode or count > max_count:
            raise ValueError(
                f"append_lens: expected one token each for at most {max_count} sequences, as in "
                f"the captured step, got {self.num_tokens} for {count}"
            )
        if self.num_pages > max_pages:
            raise ValueError(
                f"seqs: expected at most {max_pages} pages each, which the captured step has room "
                f"for (max_seq_len), got {self.num_pages}"
            )
        table = np.zeros((self.num_pages, max_rows), np.int32)
        padded: dict[str, Ints] = {
            name: np.full(max_count, -1 if name == "slots" else 0, format)
            for name, (_, format) in shapes.items()
            if name != TRANSPOSED_TABLE
        }
        tables = self._plain(table.T)
        if self.first_past is not None:
            tables |= self._split(table.T[:count], table.T[max_count : max_count + count])
        for name, array in tables.items():
            padded[name][:count] = array
        return {**padded, TRANSPOSED_TABLE: table}

    # --- Parts of the tables ---

    def _plain(self, table: Ints) -> dict[str, Ints]:
        """Write the pages of each sequence into its row; return the other tables of every step.

        Evicted spans are included if there are any. Calls methods of arrays, because functions of
        NumPy go through several Python frames.
        """
        sequences, num_tokens = self.sequences, self.num_tokens
        lengths, evicted = [], []
        for row, sequence in zip(table, sequences, strict=False):
            row[: sequence.num_pages] = sequence.pages
            lengths.append(sequence.length)
            evicted.append(sequence.evicted)
        tables = {"seq_lens": np.array(lengths, np.int32)}
        rows = first_rows = np.arange(len(sequences))
        positions = tables["seq_lens"] - 1
        if num_tokens > len(sequences):
            counts = np.array(self.counts)
            rows = rows.repeat(counts)
            first_rows = counts.cumsum() - counts
            positions = np.arange(num_tokens) + (tables["seq_lens"] - counts - first_rows)[rows]
        places = positions
        if any(evicted):
            tables["evicted_starts"] = np.array([s.sink_tokens for s in sequences], np.int32)
            tables["evicted_lens"] = np.array(evicted, np.int32)
            places = positions + tables["evicted_lens"][rows]
        slots = table[rows, places // self.page_size].astype(np.int64)
        slots *= self.page_size
        slots += places % self.page_size
        if self.has_trees:
            for i, in_tree in enumerate(self.in_tree):
                if in_tree:
                    sequence, first, count = sequences[i], first_rows[i], self.counts[i]
                    depths = tree_depths(sequence.parents)[-count:]
                    positions[first : first + count] = sequence.committed + np.array(depths)
        return {"positions": positions.astype(np.int32), "slots": slots, **tables}

    def _split(self, table: Ints, past_table: Ints) -> dict[str, Ints]:
        """Move the pages of old tokens to their table, and return the range of their positions.

        Each table is -1 where the page is in the other one: attention sees no key there.
        """
        demoted = table >= self.first_past
        past_table[...] = np.where(demoted, table - self.first_past, -1)
        table[demoted] = -1
        starts = demoted.argmax(axis=1)
        places = np.stack([starts, starts + demoted.sum(axis=1)]) * self.page_size
        if any(s.evicted for s in self.sequences):
            kept = np.array([s.sink_tokens for s in self.sequences])
            evicted = np.array([s.evicted for s in self.sequences])
            places = np.where(places <= kept, places, np.maximum(places - evicted, kept))
        names = "past_starts", "past_stops"
        return dict(zip(names, places.astype(np.int32), strict=True))

    def _add_trees(self, tables: dict[str, Ints]) -> None:
        sequences = self.sequences
        nodes = [len(s.parents) for s in sequences]
        mask = np.zeros((self.num_tokens, max(nodes)), bool)
        first = 0
        for sequence, count in zip(sequences, self.counts, strict=True):
            if sequence.parents:
                visible = tree_mask(sequence.parents)[-count:]
                mask[first : first + count, : visible.shape[1]] = visible
            first += count
        tables["tree_lens"] = np.array(nodes, np.int32)
        tables["tree_mask"] = mask
        if self.tree_positions:
            tails = np.zeros((len(sequences), max(nodes)), np.int32)
            for row, sequence in zip(tails, sequences, strict=True):
                row[: len(sequence.parents)] = tree_depths(sequence.parents)
                row += sequence.committed
            tables["tree_positions"] = tails

    def _add_cascade(self, tables: dict[str, Ints], cascade: Cascade) -> None:
        first_sequences = np.cumsum(cascade.counts) - cascade.counts
        tables["prefix_lens"], tables["prefix_table"] = cascade.lengths, cascade.pages
        tables["prefix_queries"] = np.add.reduceat(np.array(self.counts, np.int32), first_sequences)
        tables["cu_prefix_queries"] = _starts(tables["prefix_queries"])
        tables["key_starts"] = np.repeat(cascade.lengths, cascade.counts)


def _starts(counts: Ints) -> Ints:
    """Return where the rows of each sequence begin, and where the last ends."""
    starts = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=starts[1:])
    return starts


class Steps:
    """The steps of a cache: each takes effect as a whole or not at all.

    Attributes
    ----------
    running : the step between its begin and its end, or None
    tables : of the running step
    access : access to the pages outside of attention
    """

    def __init__(
        self, pool: Pool, layers: Layers, sequences: Sequences, *,
        copy_stream: Any, slots_in_flight: int, max_batch_tokens: int, max_pages: int,
        cascade: bool | None, past: Past | None = None,
    ) -> None:  # fmt: skip
        self._pool, self._layers, self._sequences = pool, layers, sequences
        self._mover = PageMover(pool)
        self._past = past
        self._max_batch_tokens, self._max_pages = max_batch_tokens, max_pages
        self._cascade = cascade
        self._order = AccessOrder()
        copies = CopyStream(pool.device, copy_stream)
        self._ring, self._lists_ring = (
            TableRing(copies, slots_in_flight, self._order.begin) for _ in range(2)
        )
        self.access = PageAccess(copies, self._order, self._ring.streams_in_step)
        self._lists: StepTables | None = None
        self._begun_s: float | None = None  # when, if that is measured
        self.running: Step | None = None
        self.tables: StepTables | None = None

    def is_running(self, seq: Hashable) -> bool:
        """Return whether a sequence belongs to the running step."""
        return self.running is not None and seq in self.running.names

    def on_device(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence; raise if it is offloaded."""
        sequence = self._sequences.find(seq, name)
        _require_on_device(sequence, seq, name)
        return sequence

    def settled(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence; raise if it is in the running step or its tree is not committed."""
        sequence = self.on_device(seq, name)
        self.require_outside(seq, name)
        if sequence.parents:
            raise ValueError(f"{name}: {seq!r} has a token tree: call commit_token_tree first")
        return sequence

    def require_outside(self, seq: Hashable, name: str = "seq") -> None:
        """Raise if a sequence belongs to the running step."""
        if self.is_running(seq):
            raise KvcupyError(
                f"{name}: {seq!r} belongs to the running step; call end_forward first"
            )

    # --- Steps ---

    def begin(self, seqs: Any, append_lens: Any, token_tree: Any) -> None:
        """Append tokens to sequences; all or nothing."""
        if self.running is not None:
            raise KvcupyError("a step is running: call end_forward before begin_forward")
        self._begun_s = perf_counter() if metrics.enabled else None
        names, counts, entries = _check_batch(seqs, append_lens, token_tree)
        sequences = self._sequences.find_all(names, "seqs")
        nodes = self._check(names, sequences, counts, entries)
        reserved = self._sequences.reserve(sequences, counts)
        copied = None
        try:
            if copies := reserved.copies:
                src, dst = [copy.old for copy in copies], [copy.new for copy in copies]
                copied = self._copy_pages(src, dst, *(copy.sequence for copy in copies))
        except BaseException:
            self._pool.allocator.free(reserved.pages)
            raise
        if copied is not None:
            for copy in reserved.copies:
                _add_load(copy.sequence, copied)
        self._sequences.grow(sequences, counts, reserved)
        for sequence, new in zip(sequences, nodes, strict=True):
            if new is not None:
                sequence.parents.extend(new)
        self.running = Step(
            names, sequences, counts, [new is not None for new in nodes],
            self._pool.page_size, self._max_pages,
            num_layers=self._pool.num_layers,
            tree_positions=self._layers.rope.mode == "inline",
            cascade=self._find_cascade(sequences, sum(counts)), copies=reserved.copies,
            copied=copied,
            first_past=None if self._past is None else self._sequences.first_past,
        )  # fmt: skip
        self.tables = self._ring.open(self.running)

    def end(self) -> None:
        """Close the running step; windows slide."""
        step = self.running
        if step is None:
            raise KvcupyError("no step is running: call begin_forward before end_forward")
        try:
            try:
                self._close()
            finally:
                self._finish_exports(step)
        finally:
            self._sequences.release_replaced(step.copies)
            is_loaded = step.is_loaded
            for sequence in step.sequences:
                if is_loaded and sequence.loads:
                    sequence.loads.clear()
                if sequence.window and not sequence.parents:
                    self._sequences.slide(sequence)
        self.demote(step.sequences)
        if self._begun_s is not None:
            metrics.note("kvcupy_step_seconds", perf_counter() - self._begun_s)
            metrics.add("kvcupy_step_tokens_total", sum(step.counts))

    def _finish_exports(self, step: Step) -> None:
        """Let the layers of exported sequences go out whose attention did not run in the step."""
        if not step.exports:
            return
        stream = self.access.copy_stream
        try:
            with self.access.on(stream, *step.sequences):
                pass  # waits for the loads of their pages too
            for export in step.exports:
                export.finish(stream)
        except BaseException:
            for export in step.exports:
                export.withdraw(self.access.copy_stream_behind_all())
            raise

    def abort(self) -> None:
        """Close the running step, if there is one, and take its tokens back."""
        step = self.running
        if step is None:
            return
        try:
            self._close()
        finally:
            for export in step.exports:
                export.withdraw(self.access.copy_stream_behind_all())
            if step.copied is not None:
                for copy in step.copies:  # the sequence has its shared page again
                    loads = copy.sequence.loads
                    copy.sequence.loads = [load for load in loads if load is not step.copied]
            for sequence, n, in_tree in zip(step.sequences, step.counts, step.in_tree, strict=True):
                if in_tree:
                    del sequence.parents[-n:]
            self._sequences.shrink(step.sequences, step.counts, step.copies)

    def lists(self, stream: Stream) -> Tables:
        """Return the page lists of the running step; the first call uploads them."""
        if stream.capturing:
            raise CaptureError("page_table_csr: its lengths differ each step; use block_table")
        if self._lists is None:
            assert self.running is not None
            self._lists = self._lists_ring.open(self.running, self.running.page_lists)
        return self._lists.on(stream)

    def _close(self) -> None:
        open_tables = [tables for tables in (self.tables, self._lists) if tables is not None]
        self.running = self.tables = self._lists = None
        self._layers.end_step()
        try:
            for tables in open_tables:
                tables.close()
        finally:
            for stream in dict.fromkeys(s for tables in open_tables for s in tables.streams):
                self._order.end(stream)

    # --- Trees ---

    def commit(self, seqs: Any, leaves: Any) -> None:
        """Keep one path of each tree; all or nothing."""
        names, chosen, _ = _check_batch(seqs, leaves, None, "leaves")
        sequences = self._sequences.find_all(names, "seqs")
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
            paths.append(tree_path(sequence.parents, leaf))

        moves = []
        for sequence, path in zip(sequences, paths, strict=True):
            places = sequence.places(sequence.committed, sequence.length)
            slots = sequence.slots(places, self._pool.page_size)
            moves.append((slots[path], slots[: len(path)]))
        src, dst = map(np.concatenate, zip(*moves, strict=True))
        moved = src != dst
        if moved.any():
            stream = self.access.copy_stream
            try:
                with self.access.on(stream, *sequences):
                    self._mover.move_slots(src[moved], dst[moved], stream)
                    copied = CopiedPages(stream)
            except DeviceError:  # some arrays may have been moved, and must not be moved again
                for sequence in sequences:
                    committed = sequence.committed
                    sequence.parents.clear()
                    self._sequences.truncate(sequence, committed)
                raise
            for sequence in sequences:
                _add_load(sequence, copied)
        for sequence, path in zip(sequences, paths, strict=True):
            length = sequence.committed + len(path)
            sequence.parents.clear()
            self._sequences.truncate(sequence, length)
            self._sequences.slide(sequence)

    # --- Pages ---

    def demote(self, sequences: Sequence[CachedSequence]) -> None:
        """Replace pages that sequences have left behind, while there are pages for old tokens.

        After an error none is replaced. A shared page is converted once: the next sequence that
        leaves it takes the same demoted page.
        """
        past = self._past
        if past is None:
            return
        known = self._sequences
        leaving = [
            (sequence, index, int(sequence.pages[index]))
            for sequence in sequences
            if not any(load.failure for load in sequence.loads)  # it can only be removed
            for index in known.leaving(sequence, past.recent, past.sinks)
        ]
        if not leaving:
            return
        pages = list(dict.fromkeys(p for *_, p in leaving if known.demoted(p) is None))
        pages = pages[: past.pool.allocator.num_free]
        fresh = known.allocate_past(len(pages))
        targets = dict(zip(pages, fresh.tolist(), strict=True))
        copied = None
        if pages:
            owners = list({id(s): s for s, _, page in leaving if page in targets}.values())
            try:
                copied = self._copy_pages(pages, fresh.tolist(), *owners)
            except BaseException:
                known.free(fresh)
                raise
            metrics.add("kvcupy_demoted_pages_total", len(pages))
        blocked: set[int] = set()  # sequences that keep a page, and so all pages behind it
        for sequence, index, page in leaving:
            before = known.demoted(page)
            target, completion = before or (targets.get(page), copied)
            if id(sequence) in blocked or target is None or completion is None:
                blocked.add(id(sequence))
                continue
            known.demote(sequence, index, target, completion)
            if completion not in sequence.loads:
                _add_load(sequence, completion)

    def fork(
        self, parent: CachedSequence, child: Hashable, at: int | None, inherit_window: bool
    ) -> None:
        """Add a sequence that shares the first tokens of another."""
        pages = self._sequences.fork(parent, child, at, inherit_window)
        if pages is not None:
            try:
                copied = self._copy_pages([pages[0]], [pages[1]], parent)
            except BaseException:
                self._sequences.remove(child)
                raise
            _add_load(self._sequences.find(child), copied)

    def splice(
        self, sequence: CachedSequence, source: CachedSequence, start: int, stop: int
    ) -> None:
        """Append tokens of another sequence, with their keys at the positions that follow."""
        count, delta = stop - start, sequence.length - start
        reserved = self._sequences.reserve([sequence], [count])
        try:
            copied = [self._copy_pages([c.old], [c.new], sequence) for c in reserved.copies]
        except BaseException:
            self._sequences.free(reserved.pages)
            raise
        self._sequences.grow([sequence], [count], reserved)
        try:
            places = sequence.places(sequence.length - count, sequence.length)
            targets = sequence.slots(places, self._pool.page_size)
            sources = source.slots(source.places(start, stop), self._pool.page_size)
            copied.append(self._splice_slots(sources, targets, delta, sequence, source))
        except BaseException:
            self._sequences.shrink([sequence], [count], reserved.copies)
            raise
        self._sequences.release_replaced(reserved.copies)
        del sequence.hashes[(sequence.length - count) // self._pool.page_size :]
        for completion in copied:
            _add_load(sequence, completion)
        self.demote([sequence])

    def _splice_slots(
        self, sources: Ints, targets: Ints, delta: int, *sequences: CachedSequence
    ) -> CopiedPages:
        """Copy tokens to slots of the pool, with their keys moved on by `delta` positions."""
        stream, rope = self.access.copy_stream, self._layers.rope
        rotates = rope.mode == "normal" and delta != 0
        first_past = self._pool.num_pages * self._pool.page_size
        demoted = sources >= first_past
        with self.access.on(stream, *sequences):
            if self._past is not None and demoted.any():
                self._past.promote_slots(sources[demoted] - first_past, targets[demoted], stream)
                if rotates:
                    self._mover.shift_slots(targets[demoted], targets[demoted], delta, rope, stream)
            src, dst = sources[~demoted], targets[~demoted]
            if rotates and len(src):
                self._mover.shift_slots(src, dst, delta, rope, stream)
            else:
                self._mover.move_slots(src, dst, stream)
            return CopiedPages(stream)

    def unshare(self, sequence: CachedSequence, places: Ints) -> None:
        """Copy the shared pages that hold some places of a sequence, so that it may write there."""
        indices = np.unique(places // self._pool.page_size)
        shared = self._sequences.shared(sequence, indices)
        if len(shared):
            pages = sequence.pages[shared]
            demoted = pages >= self._sequences.first_past
            past_count, fresh = int(demoted.sum()), np.empty(len(shared), np.int64)
            fresh[~demoted], past = self._sequences.allocate_both(
                len(shared) - past_count, past_count
            )
            fresh[demoted] = past + self._sequences.first_past
            try:
                copied = self._copy_pages(pages.tolist(), fresh.tolist(), sequence)
            except BaseException:
                self._sequences.free(fresh)
                raise
            _add_load(sequence, copied)
            self._sequences.replace(sequence, shared, fresh)
        self._sequences.forget_demoted(sequence.pages[indices].tolist())

    def _copy_pages(
        self, src: list[int], dst: list[int], *sequences: CachedSequence
    ) -> CopiedPages:
        stream = self.access.copy_stream
        with self.access.on(stream, *sequences):
            if self._past is None:
                self._mover.copy_pages(src, dst, stream)
            else:
                self._past.copy_pages(self._mover, src, dst, stream)
            return CopiedPages(stream)

    # --- Checks ---

    def _check(
        self, names: list[Any], sequences: list[CachedSequence], counts: list[Any],
        entries: list[Any],
    ) -> list[Nodes]:  # fmt: skip
        """Raise unless each sequence can get its tokens; return the parents of new nodes."""
        if set(map(type, counts)) != {int} or min(counts) < 1:
            for i, (name, n) in enumerate(zip(names, counts, strict=True)):
                checks.require_int(n, "append_lens")
                if n < 1:
                    raise ValueError(f"append_lens: expected at least 1 for {name!r}, got {n}")
                counts[i] = int(n)
        if sum(counts) > self._max_batch_tokens:
            num_slots = self._pool.num_pages * self._pool.page_size
            if num_slots <= self._max_batch_tokens:
                raise CacheFull(
                    f"append_lens: {sum(counts)} tokens, and all {self._pool.num_pages} pages "
                    f"(num_pages) hold {num_slots}"
                )
            raise ValueError(
                f"append_lens: expected at most {self._max_batch_tokens} tokens per step "
                f"(max_batch_tokens), got {sum(counts)}"
            )
        max_positions = self._layers.rope.max_positions
        nodes: list[Nodes] = list(entries)
        for i, (name, sequence, n) in enumerate(zip(names, sequences, counts, strict=True)):
            if sequence.offloaded is not None:
                _require_on_device(sequence, name, "seqs")
            end = sequence.length + n
            if entries[i] is not None:
                nodes[i] = new = check_tree_nodes(entries[i], len(sequence.parents), n)
                end = sequence.committed + max(tree_depths([*sequence.parents, *new])) + 1
            elif sequence.parents:
                raise ValueError(
                    f"token_tree: expected parents for {name!r}, whose tree is not committed"
                )
            if max_positions is not None and end > max_positions:
                raise ValueError(
                    f"append_lens: expected {name!r} to stay within the {max_positions} "
                    f"positions of rope, got {end}"
                )
        return nodes

    def _find_cascade(self, sequences: Sequence[CachedSequence], num_tokens: int) -> Cascade | None:
        if self._cascade is False or len(sequences) < 2:
            return None
        shared = self._sequences.share_first_page(sequences)
        if sum(shared) < 2:
            return None
        cascade = find_cascade(sequences, shared, self._pool.page_size)
        if cascade is None or self._cascade:
            return cascade
        layers = self._layers
        pays = cascade_pays(cascade.saved_keys, num_tokens, layers.key_bytes, layers.state_bytes)
        return cascade if pays else None


# --- Arguments ---


def _require_on_device(sequence: CachedSequence, seq: Hashable, name: str) -> None:
    """Raise if a sequence is offloaded."""
    if sequence.offloaded is not None:
        raise ValueError(f"{name}: {seq!r} is offloaded: call onboard first")


def _add_load(sequence: CachedSequence, copied: Completion) -> None:
    """Add a load of a sequence, and forget earlier copies that have succeeded.

    Steps that attend forget them too, but there may be no such step.
    """
    sequence.loads = [
        load for load in sequence.loads if not (isinstance(load, CopiedPages) and load.succeeded)
    ]
    sequence.loads.append(copied)


def _check_batch(
    seqs: Any, append_lens: Any, token_tree: Any, name: str = "append_lens"
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the arguments of a step as lists of equal length; `name` is the second argument."""
    names, counts = _as_list(seqs, "seqs"), _as_list(append_lens, name)
    if not names:
        raise ValueError("seqs: expected at least one sequence, got none")
    if len(counts) != len(names):
        raise ValueError(f"{name}: expected {len(names)} like seqs, got {len(counts)}")
    if token_tree is None:
        return names, counts, [None] * len(names)
    trees = _as_list(token_tree, "token_tree")
    if len(trees) != len(names):
        raise ValueError(f"token_tree: expected {len(names)} lists like seqs, got {len(trees)}")
    return names, counts, trees


def _as_list(values: Any, name: str) -> list[Any]:
    if isinstance(values, np.ndarray) and values.ndim:
        return list(values.tolist())
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name}: expected a list, got {values!r}") from None


# --- Shared prefixes ---


def find_cascade(
    sequences: Sequence[CachedSequence], is_shared: Sequence[bool], page_size: int
) -> Cascade | None:
    """Group neighbours by the leading pages that they share; None if there are no shared pages.

    `is_shared` is True for a sequence whose first page is shared by another.
    """
    groups: list[tuple[Ints, int]] = []  # pages of the prefix, sequences
    for sequence, shared in zip(sequences, is_shared, strict=True):
        pages = sequence.pages
        if sequence.evicted:
            pages = pages[: sequence.sink_tokens // page_size]
        if shared and groups:
            prefix, count = groups[-1]
            common = _num_common(prefix, pages)
            # A third sequence joins only if it has the whole prefix that the others share.
            if common and (count == 1 or common == len(prefix)):
                groups[-1] = prefix[:common], count + 1
                continue
        groups.append((pages if shared else pages[:0], 1))
    if len(groups) == len(sequences):
        return None
    prefixes = [prefix if count > 1 else prefix[:0] for prefix, count in groups]
    lengths = np.array([len(prefix) for prefix in prefixes], np.int32)
    table = np.zeros((len(prefixes), lengths.max()), np.int32)
    for row, prefix in zip(table, prefixes, strict=True):
        row[: len(prefix)] = prefix
    counts = np.array([count for _, count in groups], np.int32)
    return Cascade(lengths * page_size, counts, table)


def _num_common(a: Ints, b: Ints) -> int:
    """Return how many leading pages two lists have in common."""
    count = min(len(a), len(b))
    differ = np.flatnonzero(a[:count] != b[:count])
    return int(differ[0]) if len(differ) else count


def cascade_pays(saved_keys: int, num_tokens: int, key_bytes: int, state_bytes: int) -> bool:
    """Return whether two passes and a merge move fewer bytes than reading `saved_keys` again.

    >>> cascade_pays(31 * 2048, 32, 4096, 16384), cascade_pays(16, 2, 4096, 16384)
    (True, False)
    """
    # Two states are written and read, and the result is written.
    return saved_keys * key_bytes >= _MIN_SAVED * 5 * num_tokens * state_bytes
