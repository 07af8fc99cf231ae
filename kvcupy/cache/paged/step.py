"""A step of a paged cache: its sequences, their new tokens, and the tables that attention reads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from ...devices.protocol import Stream
from ...errors import CaptureError
from ..hazards import CopiedPages, loads_of
from .exchange import Export
from .page_group import PageGroup
from .sequences import CachedSequence, Ints, PageCopy, tree_depths, tree_mask
from .tables import STATE_SLOTS, TRANSPOSED_TABLE, Shapes

_SHARED = ("positions", "seq_lens", "evicted_starts", "evicted_lens")  # of captured steps


class GroupStep:
    """The part of a step in one group of layers.

    sequences, counts, in_tree : of the step, see `Step`
    copies, copied : shared pages that were replaced for the step, and the completion of the copies
    loads : transfers, leases and copies that bring some pages of the sequences
    exports : of the sequences; each layer is sent once it is written
    demoted_distance : the minimum number of tokens between demoted ones and the first new one of a
        sequence, once the tables were computed
    attended : the layers that have attended, or may have in a graph
    """

    def __init__(
        self, group: PageGroup, sequences: list[CachedSequence], counts: list[int],
        in_tree: list[bool], copies: list[PageCopy], copied: CopiedPages | None,
    ) -> None:  # fmt: skip
        self.group, self.sequences = group, sequences
        self._counts, self._in_tree = counts, in_tree
        self.copies, self.copied = copies, copied
        self.loads = loads_of(sequences)
        self.exports: list[Export] = []
        self.demoted_distance = 0
        self.attended: set[int] = set()
        self._num_layers, self._layers_waited = group.pool.num_layers, 0

    # --- Loads ---

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
        self._layers_waited = self._num_layers
        self.attended.update(range(self._num_layers))

    @property
    def is_loaded(self) -> bool:
        """Whether the pages of its sequences have been waited for in all layers."""
        return self._layers_waited == self._num_layers

    # --- Begin and end ---

    def free_unseen(self) -> None:
        """Free the pages before the windows of the step's first tokens."""
        if self.group.window:
            rows = zip(self.sequences, self._counts, self._in_tree, strict=True)
            for sequence, n, is_tree in rows:
                start = sequence.committed if is_tree else sequence.length - n
                self.group.sequences.free_unseen(sequence, start)

    def end(self, keep_step: bool) -> None:
        """Let windows slide; `keep_step`: except in groups with a window."""
        group, is_loaded = self.group, self.is_loaded
        for sequence in self.sequences:
            if is_loaded and sequence.loads:
                sequence.loads.clear()
            if sequence.window and not sequence.parents:
                group.sequences.slide(sequence)
        if group.window and not keep_step:
            for sequence, count in zip(self.sequences, self._counts, strict=True):
                if not sequence.parents:
                    group.free_unseen(sequence, sequence.length - count)

    def abort(self) -> None:
        """Take the tokens of the step back."""
        if self.copied is not None:
            for copy in self.copies:  # the sequence has its shared page again
                loads = copy.sequence.loads
                copy.sequence.loads = [load for load in loads if load is not self.copied]
        for sequence, n, is_tree in zip(self.sequences, self._counts, self._in_tree, strict=True):
            if is_tree:
                del sequence.parents[-n:]
        self.group.sequences.shrink(self.sequences, self._counts, self.copies)

    # --- Tables ---

    def add_tables(
        self, tables: dict[str, Ints], rows: Ints, places: Ints, table: Ints, demoted: Ints | None
    ) -> None:
        """Write pages to rows of `table` and of `demoted`, and add the group's other tables.

        rows, places : of each new token
        demoted : for demoted pages; None: a new table, if there are such pages
        """
        group, size = self.group, self.group.pool.page_size
        for row, sequence in zip(table, self.sequences, strict=True):
            row[: sequence.num_pages] = sequence.pages
        slots = table[rows, places // size].astype(np.int64)
        slots *= size
        slots += places % size
        tables[group.tables.name("slots")] = slots
        if group.demoted is None:
            return
        is_captured = demoted is not None
        if demoted is None:
            if not (table >= group.sequences.first_demoted).any():
                return
            demoted = tables[group.tables.name("demoted_table")] = np.zeros_like(table)
        starts, stops = self._split(table, demoted)
        tables[group.tables.name("demoted_starts")] = starts
        tables[group.tables.name("demoted_stops")] = stops
        if not is_captured:
            pairs = zip(self.sequences, self._counts, strict=True)
            new = [s.length - max(n, len(s.parents)) for s, n in pairs]  # the first: or uncommitted
            self.demoted_distance = int((np.array(new) - stops)[stops > starts].min())

    def _split(self, table: Ints, demoted_table: Ints) -> tuple[Ints, Ints]:
        """Move demoted pages to their table, and return where their positions start and stop.

        Each table is -1 where the page is in the other one: attention sees no key there.
        """
        group, first_demoted = self.group, self.group.sequences.first_demoted
        demoted = table >= first_demoted
        demoted_table[...] = np.where(demoted, table - first_demoted, -1)
        table[demoted] = -1
        starts = demoted.argmax(axis=1)
        places = np.stack([starts, starts + demoted.sum(axis=1)]) * group.pool.page_size
        if any(s.evicted for s in self.sequences):
            kept = np.array([s.sink_tokens for s in self.sequences])
            evicted = np.array([s.evicted for s in self.sequences])
            places = np.where(places <= kept, places, np.maximum(places - evicted, kept))
        starts, stops = places.astype(np.int32)
        return starts, stops


class Step:
    """A step between its begin and its end.

    names, sequences, counts : the sequences and their numbers of tokens, in the order of their rows
    in_tree : for each, whether its tokens are nodes of a tree
    parts : of each group of attention layers
    max_pages : pages per sequence that a captured step has space for
    state_slots : of the sequences in the recurrent groups; empty without such groups
    """

    def __init__(
        self, names: list[Hashable], counts: list[int], in_tree: list[bool],
        parts: Sequence[GroupStep], max_pages: int, state_slots: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.names, self.counts, self.in_tree, self.parts = names, counts, in_tree, parts
        self.sequences = parts[0].sequences
        self.num_tokens = sum(counts)
        self._has_trees = True in in_tree
        self._is_decode = self.num_tokens == len(counts) and not self._has_trees
        self._page_size = parts[0].group.pool.page_size
        self._num_pages = max([s.num_pages for s in self.sequences])  # of the longest
        self._max_pages, self._state_slots = max_pages, state_slots

    def before_launch(self, stream: Stream) -> None:
        """Make a stream wait until all layers are loaded, before a launch of a graph."""
        for part in self.parts:
            part.before_launch(stream)

    def tables(self) -> dict[str, Ints]:
        """Return the tables of the step as host arrays.

        Returns
        -------
        positions int32 (T,), seq_lens int32 (B,); where they matter query_lens, evicted_starts,
        evicted_lens, tree_lens int32 (B,), cu_query_lens int32 (B + 1,), tree_mask bool (T, nodes),
        tree_positions int32 (B, nodes), state_slots int32 (B,). Of each group, named by
        `GroupTables`: slots int64 (T,), block_table int32 (B, pages of the longest), and if some
        pages are demoted demoted_table int32 (B, pages of the longest), and demoted_starts and
        demoted_stops int32 (B,)
        """
        tables, rows, places = self._positions()
        for part in self.parts:
            table = np.zeros((len(self.sequences), self._num_pages), np.int32)
            part.add_tables(tables, rows, places, table, None)
            tables[part.group.tables.name("block_table")] = table
        if not self._is_decode:
            tables["query_lens"] = np.array(self.counts, np.int32)
            tables["cu_query_lens"] = _starts(tables["query_lens"])
        if self._has_trees:
            self._add_trees(tables)
        if self._state_slots:
            tables[STATE_SLOTS] = np.array(self._state_slots, np.int32)
        return tables

    def page_lists(self) -> dict[str, Ints]:
        """Return indptr int32 (B + 1,), indices int32 (pages,), last_page_len int32 (B,)."""
        sequences, size = self.sequences, self._page_size
        indptr = np.zeros(len(sequences) + 1, np.int32)
        indptr[1:] = np.cumsum([s.num_pages for s in sequences])
        last = [s.end - (s.num_pages - 1) * size for s in sequences]
        indices = np.concatenate([s.pages for s in sequences])
        return {"indptr": indptr, "indices": indices, "last_page_len": np.array(last, np.int32)}

    def captured_shapes(self) -> Shapes:
        """Return shape and format of the arrays that such a captured step reads."""
        if not self._is_decode:
            raise CaptureError("append_lens: expected one token per sequence in a captured step")
        count, num_columns = len(self.counts), 0
        shapes: Shapes = {name: ((count,), "int32") for name in _SHARED}
        for part in self.parts:
            tables = part.group.tables
            shapes[tables.name("slots")] = (count,), "int64"
            if part.group.demoted is not None:
                for name in ("demoted_starts", "demoted_stops"):
                    shapes[tables.name(name)] = (count,), "int32"
            num_columns += tables.num_columns * count
        if self._state_slots:
            shapes[STATE_SLOTS] = (count,), "int32"
        # Last: it may be shorter.
        return {**shapes, TRANSPOSED_TABLE: ((self._max_pages, num_columns), "int32")}

    def captured_tables(self, shapes: Shapes) -> dict[str, Ints]:
        """Return the tables for a captured step, which may have had more sequences."""
        max_pages, num_columns = shapes[TRANSPOSED_TABLE][0]
        max_count, count = shapes["seq_lens"][0][0], len(self.counts)
        if not self._is_decode or count > max_count:
            raise ValueError(
                f"append_lens: expected one token each for at most {max_count} sequences, as in "
                f"the captured step, got {self.num_tokens} for {count}"
            )
        if self._num_pages > max_pages:
            raise ValueError(
                f"seqs: expected at most {max_pages} pages each, which the captured step has room "
                f"for (max_seq_len), got {self._num_pages}"
            )
        tables, rows, places = self._positions()
        whole = np.zeros((self._num_pages, num_columns), np.int32)
        for part in self.parts:
            pages = whole.T[part.group.tables.columns(max_count)]
            part.add_tables(tables, rows, places, pages[:count], pages[max_count:][:count])
        if self._state_slots:
            tables[STATE_SLOTS] = np.array(self._state_slots, np.int32)
        padded: dict[str, Ints] = {}
        for name, (shape, format) in shapes.items():
            is_slot = name == STATE_SLOTS or format == "int64"  # rows without one are skipped
            padded[name] = np.full(shape, -1 if is_slot else 0, format)
            if name in tables:
                padded[name][:count] = tables[name]
        return {**padded, TRANSPOSED_TABLE: whole}

    def _positions(self) -> tuple[dict[str, Ints], Ints, Ints]:
        """Return the tables that all groups share, and the row and the place of each new token.

        Evicted spans are included if there are any. Calls methods of arrays, because functions of
        NumPy go through several Python frames.
        """
        sequences, num_tokens = self.sequences, self.num_tokens
        lengths, evicted = [], []
        for sequence in sequences:
            lengths.append(sequence.length)
            evicted.append(sequence.evicted)
        seq_lens = np.array(lengths, np.int32)
        tables = {"seq_lens": seq_lens}
        rows = first_rows = np.arange(len(sequences))
        positions = seq_lens - 1
        if num_tokens > len(sequences):
            counts = np.array(self.counts)
            rows = rows.repeat(counts)
            first_rows = counts.cumsum() - counts
            positions = np.arange(num_tokens) + (seq_lens - counts - first_rows)[rows]
        places = positions
        if any(evicted):
            tables["evicted_starts"] = np.array([s.sink_tokens for s in sequences], np.int32)
            tables["evicted_lens"] = np.array(evicted, np.int32)
            places = positions + tables["evicted_lens"][rows]
        if self._has_trees:
            positions = positions.copy()
            for i, in_tree in enumerate(self.in_tree):
                if in_tree:
                    sequence, first, count = sequences[i], first_rows[i], self.counts[i]
                    depths = tree_depths(sequence.parents)[-count:]
                    positions[first : first + count] = sequence.committed + np.array(depths)
        tables["positions"] = positions.astype(np.int32)
        return tables, rows, places

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
