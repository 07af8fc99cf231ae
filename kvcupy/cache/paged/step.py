"""A step of a paged cache, from begin_forward to end_forward.

`Step` has the sequences and their numbers of new tokens, and computes the tables; `Steps` begins,
ends and takes back steps as transactions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from ... import metrics
from ...config import cache_logger, config
from ...devices.protocol import Stream
from ...errors import CacheFull, CaptureError, DeviceError, KvcupyError
from ...ops import checks
from ..hazards import AccessOrder, CopiedPages, CopyStream, PageAccess, loads_of
from ..tiered.grouped import GroupedLease
from .exchange import Export
from .grouped_tiers import GroupedTiers, losing
from .page_group import PageGroup, add_load
from .sequences import (
    CachedSequence,
    Ints,
    PageCopy,
    Reservation,
    check_tree_nodes,
    tree_depths,
    tree_mask,
    tree_path,
)
from .states import States
from .tables import (
    STATE_SLOTS,
    TRANSPOSED_TABLE,
    GroupTables,
    Shapes,
    StepTables,
    TableRing,
    Tables,
)

Nodes = list[int] | None
"""The parents of a sequence's new nodes; None for plain tokens."""


@dataclass
class Step:
    """A step between its begin and its end.

    Attributes
    ----------
    names, sequences, counts : the sequences and their numbers of tokens, in the order of their rows
    in_tree : for each, whether its tokens are nodes of a tree
    page_size, max_pages : slots per page; pages per sequence that a captured step has space for
    num_layers : of the cache
    copies, copied : shared pages that were replaced for the step, and the completion of the copies
    first_past : the first page number of the pool of old tokens, or None
    exports : of its sequences; each layer is sent once it is written
    loads : transfers, leases and copies that bring some pages of its sequences
    past_distance : the minimum number of tokens between old ones and the first new one of a
        sequence, once `tables` has been called
    attended : the layers that have attended, or may have in a graph
    """

    names: list[Hashable]
    sequences: list[CachedSequence]
    counts: list[int]
    in_tree: list[bool]
    page_size: int
    max_pages: int
    num_layers: int = 0
    copies: list[PageCopy] = field(default_factory=list)
    copied: CopiedPages | None = None
    first_past: int | None = None
    exports: list[Export] = field(default_factory=list)
    past_distance: int = 0
    attended: set[int] = field(default_factory=set)

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
        self.attended.update(range(self.num_layers))

    def tables(self) -> dict[str, Ints]:
        """Return the tables of the step as host arrays.

        Returns
        -------
        positions int32 (T,), slots int64 (T,), block_table int32 (B, pages of the longest),
        seq_lens int32 (B,); where they matter query_lens, evicted_starts, evicted_lens,
        tree_lens int32 (B,), cu_query_lens int32 (B + 1,), tree_mask bool (T, nodes),
        tree_positions int32 (B, nodes); and if some pages are of the pool of old tokens past_table
        int32 (B, pages of the longest), past_starts, past_stops int32 (B,)
        """
        table = np.zeros((len(self.sequences), self.num_pages), np.int32)
        tables = self._plain(table)
        tables["block_table"] = table
        if self.first_past is not None and (table >= self.first_past).any():
            tables["past_table"] = past_table = np.zeros_like(table)
            tables |= self._split(table, past_table)
            stops = tables["past_stops"]
            pairs = zip(self.sequences, self.counts, strict=True)
            new = np.array([max(count, len(s.parents)) for s, count in pairs])  # or not committed
            distances = tables["seq_lens"] - new - stops
            self.past_distance = int(distances[stops > tables["past_starts"]].min())
        if not self.is_decode:
            tables["query_lens"] = np.array(self.counts, np.int32)
            tables["cu_query_lens"] = _starts(tables["query_lens"])
        if self.has_trees:
            self._add_trees(tables)
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
        tails = np.zeros((len(sequences), max(nodes)), np.int32)
        for row, sequence in zip(tails, sequences, strict=True):
            row[: len(sequence.parents)] = tree_depths(sequence.parents)
            row += sequence.committed
        tables["tree_positions"] = tails


def _starts(counts: Ints) -> Ints:
    """Return where the rows of each sequence begin, and where the last ends."""
    starts = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=starts[1:])
    return starts


class MixedStep:
    """The tables of a step of several groups of layers.

    Parameters
    ----------
    parts : the step of each group
    groups : which tables are theirs
    slots : of the sequences in the recurrent groups; empty without such groups
    """

    def __init__(
        self, parts: Sequence[Step], groups: Sequence[GroupTables], slots: Sequence[int]
    ) -> None:
        self._parts, self._groups, self._slots = parts, groups, slots

    def tables(self) -> dict[str, Ints]:
        """Return the tables of all groups, named by `GroupTables`."""
        tables = {
            group.name(name): table
            for part, group in zip(self._parts, self._groups, strict=True)
            for name, table in part.tables().items()
        }
        if self._slots:
            tables[STATE_SLOTS] = np.array(self._slots, np.int32)
        return tables

    def captured_shapes(self) -> Shapes:
        """Return shape and format of the arrays that such a captured step reads."""
        shapes: Shapes = {}
        num_columns = 0
        for part, group in zip(self._parts, self._groups, strict=True):
            own = part.captured_shapes()
            max_pages, columns = own.pop(TRANSPOSED_TABLE)[0]
            num_columns += columns
            shapes |= {group.name(name): shape for name, shape in own.items()}
        if self._slots:
            shapes[STATE_SLOTS] = shapes["seq_lens"]
        return {**shapes, TRANSPOSED_TABLE: ((max_pages, num_columns), "int32")}

    def captured_tables(self, shapes: Shapes) -> dict[str, Ints]:
        """Return the tables for a captured step, which may have had more sequences."""
        max_count = shapes["seq_lens"][0][0]
        max_pages = shapes[TRANSPOSED_TABLE][0][0]
        tables: dict[str, Ints] = {}
        pages = []
        for part, group in zip(self._parts, self._groups, strict=True):
            columns = group.columns(max_count)
            own_shapes = {name: shapes[group.name(name)] for name in part.captured_shapes()
                          if name != TRANSPOSED_TABLE}  # fmt: skip
            own_shapes[TRANSPOSED_TABLE] = ((max_pages, columns.stop - columns.start), "int32")
            own = part.captured_tables(own_shapes)
            pages.append(own.pop(TRANSPOSED_TABLE))
            tables |= {group.name(name): table for name, table in own.items()}
        if self._slots:
            tables[STATE_SLOTS] = np.full(max_count, -1, np.int32)
            tables[STATE_SLOTS][: len(self._slots)] = self._slots
        return {**tables, TRANSPOSED_TABLE: np.concatenate(pages, axis=1)}

    def before_launch(self, stream: Stream) -> None:
        """Make a stream wait until all layers are loaded, before a launch of a graph."""
        for part in self._parts:
            part.before_launch(stream)


class Steps:
    """The steps of a cache: each takes effect as a whole or not at all.

    Parameters
    ----------
    groups : the groups of attention layers, whose sequences have equal names and lengths
    states : of the recurrent groups, or None

    Attributes
    ----------
    running : the step between its begin and its end, of the first group, or None
    parts : the same step of each group; () if none is running
    tables : of the running step
    access : access to the pages outside of attention
    grouped : of a cache with groups, once it is attached to tiers
    """

    def __init__(
        self, groups: Sequence[PageGroup], states: States | None = None, *,
        copy_stream: Any, slots_in_flight: int, max_batch_tokens: int, max_pages: int,
    ) -> None:  # fmt: skip
        self._groups, self._states = groups, states
        self._tables = [group.tables for group in groups if group.tables is not None]
        self._pool, self._sequences = groups[0].pool, groups[0].sequences
        self._max_positions = groups[0].layers.rope.max_positions
        self._max_batch_tokens, self._max_pages = max_batch_tokens, max_pages
        self._order = AccessOrder()
        copies = CopyStream(self._pool.device, copy_stream)
        self._ring, self._lists_ring = (
            TableRing(copies, slots_in_flight, self._order.begin) for _ in range(2)
        )
        self.access = PageAccess(copies, self._order, self._ring.streams_in_step)
        self._lists: StepTables | None = None
        self._begun_s: float | None = None  # when, if that is measured
        self._missed: set[tuple[int, ...]] = set()  # layers that a warning has named
        self.running: Step | None = None
        self.parts: Sequence[Step] = ()
        self.tables: StepTables | None = None
        self.grouped: GroupedTiers | None = None

    def is_running(self, seq: Hashable) -> bool:
        """Return whether a sequence belongs to the running step."""
        return self.running is not None and seq in self.running.names

    def start_of(self, seq: Hashable) -> int | None:
        """Return the length of a sequence before the running step; None if it is not in it."""
        step = self.running
        if step is None or seq not in step.names:
            return None
        number = step.names.index(seq)
        return step.sequences[number].length - step.counts[number]

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
            raise KvcupyError("a step is running: call end_forward or abort_forward first")
        self._begun_s = perf_counter() if metrics.enabled else None
        names, counts, entries = _check_batch(seqs, append_lens, token_tree)
        groups, states = self._groups, self._states
        found = [group.sequences.find_all(names, "seqs") for group in groups]
        nodes = self._check(names, found[0], counts, entries)
        in_tree = [new is not None for new in nodes]
        if states is not None:
            states.check_trees(names, nodes, [sequence.parents for sequence in found[0]])
        reserved: list[Reservation] = []
        try:
            for group, sequences in zip(groups, found, strict=True):
                reserved.append(group.sequences.reserve(sequences, counts))
            copied = [
                group.copy_shared(self.access, own.copies) if own.copies else None
                for group, own in zip(groups, reserved, strict=True)
            ]
            if states is not None:
                states.begin(self.access, names, found[0], in_tree)
        except BaseException as error:
            if isinstance(error, CacheFull):
                error.argument = "append_lens"
            for group, own in zip(groups, reserved, strict=False):
                group.pool.allocator.free(own.pages)
            raise
        parts = []
        for group, sequences, own, copies in zip(groups, found, reserved, copied, strict=True):
            if copies is not None:
                for copy in own.copies:
                    add_load(copy.sequence, copies)
            group.sequences.grow(sequences, counts, own)
            for sequence, new in zip(sequences, nodes, strict=True):
                if new is not None:
                    sequence.parents.extend(new)
            parts.append(Step(
                names, sequences, counts, in_tree, self._pool.page_size, self._max_pages,
                num_layers=group.pool.num_layers,
                copies=own.copies, copied=copies,
                first_past=None if group.past is None else group.sequences.first_past,
            ))  # fmt: skip
        self.parts = parts
        self.running = source = parts[0]
        if self._tables:
            slots = [] if states is None else states.slots(names)
            self.tables = self._ring.open(MixedStep(parts, self._tables, slots))
        else:
            self.tables = self._ring.open(source)
        try:
            for group, part in zip(groups, parts, strict=True):
                self._free_unseen(group, part)
        except BaseException:
            self.abort()
            raise

    @staticmethod
    def _free_unseen(group: PageGroup, part: Step) -> None:
        """Free the pages behind the window of a step's first tokens."""
        if group.window:
            for sequence, n, in_tree in zip(part.sequences, part.counts, part.in_tree, strict=True):
                start = sequence.committed if in_tree else sequence.length - n
                group.sequences.free_unseen(sequence, start)

    def end(self, keep_step: bool = False) -> None:
        """Close the running step; windows slide, and states are kept."""
        step, parts = self.running, self.parts
        if step is None:
            raise KvcupyError("no step is running: call begin_forward before end_forward")
        tables = self.tables
        assert tables is not None
        try:
            try:
                self._close()
            finally:
                self._finish_exports(parts)
        finally:
            for group, part in zip(self._groups, parts, strict=True):
                group.sequences.release_replaced(part.copies)
            for group, part in zip(self._groups, parts, strict=True):
                self._end_part(group, part, keep_step)
        for group, part in zip(self._groups, parts, strict=True):
            if group.past is not None:
                group.demote(self.access, part.sequences)
        # While a stream is captured, nothing has updated the states.
        if self._states is not None and not any(s.capturing for s in tables.streams):
            kept = self._states.end(self.access, step.names, step.sequences, self._is_useless)
            if self.grouped is not None and kept:
                self.grouped.publish_states(kept)
        if self._begun_s is not None:
            metrics.note("kvcupy_step_seconds", perf_counter() - self._begun_s)
            metrics.add("kvcupy_step_tokens_total", sum(step.counts))
        if config.strict:
            self._warn_of_layers(parts)

    def _warn_of_layers(self, parts: Sequence[Step]) -> None:
        """Name the layers of a step that have not attended, once, if others have.

        A step without any is for tokens from elsewhere. It is no error: other kernels may have
        written them, or `set_kv` is to follow.
        """
        missing = tuple(sorted(
            group.model_layers[layer] if group.model_layers else layer
            for group, part in zip(self._groups, parts, strict=True)
            for layer in range(part.num_layers) if layer not in part.attended
        ))  # fmt: skip
        if missing and missing not in self._missed and any(part.attended for part in parts):
            self._missed.add(missing)
            cache_logger.warning(
                "%s %s did not attend in a step in which others did: %s keys and values of its "
                "tokens are undefined, unless your kernels have written them or set_kv does",
                "layers" if len(missing) > 1 else "layer",
                ", ".join(map(str, missing)),
                "their" if len(missing) > 1 else "its",
            )

    @staticmethod
    def _end_part(group: PageGroup, part: Step, keep_step: bool) -> None:
        is_loaded = part.is_loaded
        for sequence in part.sequences:
            if is_loaded and sequence.loads:
                sequence.loads.clear()
            if sequence.window and not sequence.parents:
                group.sequences.slide(sequence)
        if group.window and not keep_step:
            for sequence, count in zip(part.sequences, part.counts, strict=True):
                if not sequence.parents:
                    group.free_unseen(sequence, sequence.length - count)

    def _finish_exports(self, parts: Sequence[Step]) -> None:
        """Let the layers of exported sequences go out whose attention did not run in the step."""
        exports = [export for part in parts for export in part.exports]
        if not exports:
            return
        stream = self.access.copy_stream
        try:
            with self.access.on(stream, *(own for part in parts for own in part.sequences)):
                pass  # waits for the loads of their pages too
            for export in exports:
                export.finish(stream)
        except BaseException:
            with ExitStack() as undo:
                self._withdraw(exports, undo)
            raise

    def _withdraw(self, exports: Sequence[Export], undo: ExitStack) -> None:
        """Let `undo` take offers back, behind all work so far if no error prevents that."""
        for export in exports:
            undo.callback(export.withdraw, self.access.copy_stream)
        if exports:
            undo.callback(self.access.copy_stream_behind_all)

    def abort(self) -> None:
        """Close the running step, if there is one, and take its tokens back."""
        step, parts = self.running, self.parts
        if step is None:
            return
        states_used = self.tables is not None and self.tables.states_used
        with ExitStack() as undo:  # from the last to the first; all of them, after an error too
            if self._states is not None:
                for own in zip(step.names, step.sequences, step.in_tree, strict=True):
                    undo.callback(self._abort_state, *own, states_used)
            self._withdraw([export for part in parts for export in part.exports], undo)
            for group, part in zip(self._groups, parts, strict=True):
                undo.callback(self._abort_part, group, part)
            undo.callback(self._close)

    @staticmethod
    def _abort_part(group: PageGroup, part: Step) -> None:
        if part.copied is not None:
            for copy in part.copies:  # the sequence has its shared page again
                loads = copy.sequence.loads
                copy.sequence.loads = [load for load in loads if load is not part.copied]
        for sequence, n, in_tree in zip(part.sequences, part.counts, part.in_tree, strict=True):
            if in_tree:
                del sequence.parents[-n:]
        group.sequences.shrink(part.sequences, part.counts, part.copies)

    def _abort_state(
        self, seq: Hashable, sequence: CachedSequence, in_tree: bool, states_used: bool
    ) -> None:
        """Return to a state that the model has not updated in the step."""
        assert self._states is not None
        if in_tree:
            self._states.commit(seq, accepted=not states_used)
        elif states_used or sequence.length == 0:
            self._return_to(seq, self._restorable(seq, sequence.length, is_live=False))

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
        self.parts = ()
        for group in self._groups:
            group.layers.end_step()
        try:
            for tables in open_tables:
                tables.close()
        finally:
            for stream in dict.fromkeys(s for tables in open_tables for s in tables.streams):
                self._order.end(stream)

    # --- Trees ---

    def commit(self, seqs: Any, leaves: Any) -> list[int]:
        """Keep one path of each tree; all or nothing.

        Returns how many tokens of each path are dropped too, because there is no state behind them.
        """
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

        missing = [0] * len(names)
        if self._states is not None:
            accepted = [len(p) == len(s.parents) for p, s in zip(paths, sequences, strict=True)]
            missing = [0 if a else len(p) for a, p in zip(accepted, paths, strict=True)]
            paths = [path if a else [] for a, path in zip(accepted, paths, strict=True)]
        found = [group.sequences.find_all(names, "seqs") for group in self._groups]
        at_checkpoint = self._ending_at_checkpoint(names, sequences, paths)
        try:
            for group, own in zip(self._groups, found, strict=True):
                group.move_paths(self.access, own, paths)
            if at_checkpoint:  # an earlier failure surfaces while the trees can be dropped
                with suppress(CaptureError):
                    self.access.copy_stream_behind_all()
        except DeviceError:  # some arrays may have been moved, and must not be moved again
            self._commit(names, found, [0] * len(names))
            raise
        self._commit(names, found, list(map(len, paths)))
        if at_checkpoint and self._states is not None:
            with losing("states at checkpoints"):
                kept = self._states.keep(self.access, at_checkpoint)
                if self.grouped is not None and kept:
                    self.grouped.publish_states(kept)
        return missing

    def _ending_at_checkpoint(
        self, names: Sequence[Hashable], sequences: Sequence[CachedSequence],
        paths: Sequence[Sequence[int]],
    ) -> list[tuple[Hashable, CachedSequence]]:  # fmt: skip
        """Return the sequences whose states are to be kept once these paths are committed."""
        if (states := self._states) is None:
            return []
        return [
            (name, sequence)
            for name, sequence, path in zip(names, sequences, paths, strict=True)
            if path and states.at_checkpoint(sequence.length)
        ]

    def _commit(
        self, names: Sequence[Hashable], found: Sequence[Sequence[CachedSequence]],
        counts: Sequence[int],
    ) -> None:  # fmt: skip
        """Keep the first nodes of each tree, `counts` of them."""
        if self._states is not None:
            for name, sequence, count in zip(names, found[0], counts, strict=True):
                self._states.commit(name, accepted=count == len(sequence.parents))
        for group, sequences in zip(self._groups, found, strict=True):
            for sequence, count in zip(sequences, counts, strict=True):
                group.commit(sequence, count)

    # --- Sequences ---

    def fork(self, parent: Hashable, child: Hashable, at: Any) -> int:
        """Add a sequence that shares the first tokens of another.

        Returns how many of the first `at` it lacks, because they cannot be restored.
        """
        source = self.settled(parent, "parent")
        count = self._sequences.require_fork(source, child, at)
        kept = self._restorable(parent, count)
        lease = self._acquire_behind(parent, kept, count)
        load = loaded = None
        forked = []
        try:
            if lease is not None and self.grouped is not None:
                kept, load = lease.num_blocks * self._pool.page_size, self.grouped.load_state(lease)
            for group in self._groups:
                own = group.sequences.find(parent)
                group.fork(self.access, own, child, kept)
                forked.append(group)
            if self._states is not None:
                sequence = self._sequences.find(child)
                loaded = self._states.fork(
                    self.access, parent, child, kept, source.length, sequence, load
                )
        except BaseException:
            for group in forked:
                group.sequences.remove(child)
            if lease is not None:
                lease.release()
            raise
        if self.grouped is not None:
            self.grouped.fork(parent, child)
            if lease is not None:
                self.grouped.fill(child, lease, loaded)
        return count - kept

    def _acquire_behind(self, seq: Hashable, length: int, most: int) -> GroupedLease | None:
        """Acquire from tiers what restores more than `length` tokens; None if that is nothing."""
        if self.grouped is None or length == most:
            return None
        return self.grouped.acquire_behind(seq, length, most)

    def pop(self, seq: Hashable, n: Any) -> int:
        """Drop the last tokens of a sequence.

        Returns how many more are dropped, because some group cannot restore the rest.
        """
        sequence = self.settled(seq)
        checks.require_int(n, "n")
        if not 0 <= n <= sequence.length:
            raise ValueError(f"n: expected 0 to {sequence.length}, got {n}")
        left = sequence.length - int(n)
        kept = self._restorable(seq, left)
        lease = self._acquire_behind(seq, kept, left)
        if lease is not None and self.grouped is not None:
            kept = lease.num_blocks * self._pool.page_size
            self._shorten(seq, kept, lease, self.grouped)
        elif self._states is not None and kept < sequence.length:
            self._return_to(seq, kept)
        else:
            self._truncate(seq, kept)
        return left - kept

    def _shorten(
        self, seq: Hashable, length: int, lease: GroupedLease, grouped: GroupedTiers
    ) -> None:
        """Shorten a sequence to a length, what it lacks there being in a lease."""
        loaded = None
        try:
            load = grouped.load_state(lease)
            if load is not None and self._states is not None:
                sequence = self._sequences.find(seq)
                loaded = self._states.restore(self.access, seq, length, sequence, load)
                self._truncate(seq, length)
            elif self._states is not None:
                self._return_to(seq, length)
            else:
                self._truncate(seq, length)
        except BaseException:
            lease.release()
            raise
        grouped.fill(seq, lease, loaded)

    def state_slots_of(self, seqs: Any, stream: Stream) -> list[int]:
        """Return the slots of states, which work on a stream may read behind their copies."""
        assert self._states is not None
        names = checks.as_list(seqs, "seqs", "sequences")
        sequences = self._sequences.find_all(names, "seqs")
        for name, sequence in zip(names, sequences, strict=True):
            _require_on_device(sequence, name, "seqs")
        with self.access.on(stream, *sequences):
            return self._states.slots(names)

    @contextmanager
    def rewinding(
        self, seqs: Sequence[Hashable], counts: Sequence[int], stream: Stream
    ) -> Iterator[list[int]]:
        """Drop the last tokens of sequences, whose live states the caller overwrites."""
        sequences = [self.settled(seq) for seq in seqs]
        with self.access.on(stream, *sequences):
            yield [] if self._states is None else self._states.slots(seqs)
        for seq, sequence, count in zip(seqs, sequences, counts, strict=True):
            self._truncate(seq, sequence.length - count)
            if self._states is not None:
                self._states.forget(seq, sequence.length)

    def restorable_length(self, seq: Hashable, at: Any, *, with_states: bool = True) -> int:
        """Return how many of the first `at` tokens of a sequence can be restored.

        with_states : also the states behind them
        """
        sequence = self.settled(seq)
        checks.require_int(at, "at")
        if not 0 <= at <= sequence.length:
            raise ValueError(f"at: expected 0 to {sequence.length}, got {at}")
        return self._restorable(seq, int(at), with_states=with_states)

    def _truncate(self, seq: Hashable, length: int) -> None:
        for group in self._groups:
            sequence = group.sequences.find(seq)
            group.sequences.truncate(sequence, length)
            del sequence.hashes[length // self._pool.page_size :]

    def _return_to(self, seq: Hashable, length: int) -> None:
        """Shorten a sequence to a length behind which there is a kept state, or to 0."""
        assert self._states is not None
        self._truncate(seq, length)
        try:
            self._states.restore(self.access, seq, length, self._sequences.find(seq))
        except BaseException:  # the live state may be half of the one and half of the other
            self._truncate(seq, 0)
            self._states.restore(self.access, seq, 0, self._sequences.find(seq))
            raise

    def _restorable(
        self, seq: Hashable, length: int, *, is_live: bool = True, with_states: bool = True
    ) -> int:
        """Return the most tokens, up to `length`, that all groups can restore.

        is_live : whether the state behind all tokens is one of those that can be restored
        """
        while True:
            longest = length
            for group in self._groups:
                sequence = group.sequences.find(seq)
                longest = group.sequences.restorable(sequence, longest)
            if self._states is not None and with_states:
                current = sequence.length if is_live else -1
                longest = self._states.restorable(seq, longest, current)
            if longest == length:
                return length
            length = longest

    def _is_useless(self, seq: Hashable, length: int) -> bool:
        """Return whether the windows of a sequence have moved on from `length` tokens."""
        return any(
            group.sequences.restorable(group.sequences.find(seq), length) < length
            for group in self._groups
        )

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
                    raise ValueError(
                        f"append_lens: expected at least 1 for {name!r}, got {n}; num_tokens of "
                        "add_sequence leaves the last token of a cached prompt to compute"
                    )
                counts[i] = int(n)
        if sum(counts) > self._max_batch_tokens:
            num_slots = self._pool.num_pages * self._pool.page_size
            if num_slots <= self._max_batch_tokens:
                raise CacheFull(
                    f"{sum(counts)} tokens, and all {self._pool.num_pages} pages (num_pages) hold "
                    f"{num_slots}",
                    "append_lens",
                )
            raise ValueError(
                f"append_lens: expected at most {self._max_batch_tokens} tokens per step "
                f"(max_batch_tokens), got {sum(counts)}"
            )
        max_positions = self._max_positions
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


# --- Arguments ---


def _require_on_device(sequence: CachedSequence, seq: Hashable, name: str) -> None:
    """Raise if a sequence is offloaded."""
    if sequence.offloaded is not None:
        raise ValueError(f"{name}: {seq!r} is offloaded: call onboard first")


def _check_batch(
    seqs: Any, append_lens: Any, token_tree: Any, name: str = "append_lens"
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the arguments of a step as lists of equal length; `name` is the second argument."""
    names, counts = (
        checks.as_list(seqs, "seqs", "sequences"),
        checks.as_list(append_lens, name, "ints"),
    )
    if not names:
        raise ValueError("seqs: expected at least one sequence, got none")
    if len(counts) != len(names):
        raise ValueError(f"{name}: expected {len(names)} like seqs, got {len(counts)}")
    if token_tree is None:
        return names, counts, [None] * len(names)
    trees = checks.as_list(token_tree, "token_tree", "lists")
    if len(trees) != len(names):
        raise ValueError(f"token_tree: expected {len(names)} lists like seqs, got {len(trees)}")
    return names, counts, trees
