"""One step of a paged cache: which sequences get how many tokens, and the tables that say so."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...arrays import ArrayView
from ...devices.protocol import Stream
from ...errors import CaptureError
from . import trees
from .cascade import Cascade
from .sequence import CachedSequence, Ints

Room = dict[str, tuple[tuple[int, ...], str]]
"""Arrays of fixed shapes, for a captured step: shape and format by name."""

TABLE_BY_PLACE = "table_by_place"
"""Name of a captured step's page table, (pages, sequences): what is in use is its first rows."""

_PER_SEQUENCE = ("seq_lens", "hole_starts", "holes")


@dataclass
class Step:
    """A step between its begin and its end.

    Attributes
    ----------
    names, sequences, counts : who gets how many tokens, in the order of their rows
    in_tree : for each, whether its tokens are nodes of a tree
    page_size, max_pages : slots a page; pages of a sequence that a captured step has room for
    num_layers : of the cache
    tree_positions : whether attention must be told the positions of a tree's nodes
    cascade : prefixes to be attended first, or None
    replaced : shared pages that were copied for it (`Sequences.grow`)
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
    replaced: list[tuple[CachedSequence, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = sum(self.counts)
        self.has_trees = any(self.in_tree)
        self.is_decode = self.num_tokens == len(self.counts) and not self.has_trees
        self._arriving = list({id(a): a for s in self.sequences for a in s.arriving}.values())
        self._awaited = 0  # layers
        self.num_pages = max(s.num_pages for s in self.sequences)  # of the longest

    @property
    def has_arrived(self) -> bool:
        """Whether all that was on its way to its sequences has been waited for."""
        return self._awaited == self.num_layers

    def await_layer(self, layer: int, stream: Stream) -> None:
        """Make a stream wait for a layer of the pages that are on their way to its sequences."""
        for arrival in self._arriving:
            arrival.wait_layer(layer, stream)
        if self._arriving and layer == self._awaited:  # out of order: once more in the next step
            self._awaited += 1

    def launching(self, stream: Stream) -> None:
        """Make a stream wait for all of them, before a launch of a graph."""
        for arrival in self._arriving:
            arrival.wait(stream)
        self._awaited = self.num_layers

    def tables(self) -> dict[str, Ints]:
        """Return the tables of the step as host arrays.

        Returns
        -------
        positions int32 (T,), slots int64 (T,), block_table int32 (B, pages of the longest),
        seq_lens int32 (B,); and where they matter query_lens, hole_starts, holes, tree_lens int32
        (B,), tree_mask bool (T, nodes), tail_positions int32 (B, nodes), and of a cascade
        prefix_table int32 (groups, pages), prefix_lens, prefix_queries int32 (groups,), key_starts
        int32 (B,)
        """
        found = self._by_sequence()
        table = np.zeros((len(self.sequences), self.num_pages), np.int32)
        for row, sequence in zip(table, self.sequences, strict=True):
            row[: sequence.num_pages] = sequence.pages
        found.update(self._by_token(found, table))
        found["block_table"] = table
        if not found["holes"].any():
            del found["hole_starts"], found["holes"]
        if not self.is_decode:
            found["query_lens"] = np.array(self.counts, np.int32)
        if self.has_trees:
            self._add_trees(found)
        if self.cascade is not None:
            self._add_cascade(found, self.cascade)
        return found

    def room(self) -> Room:
        """Return the arrays that a captured step like this one reads.

        Raises
        ------
        CaptureError : it is no decode step
        """
        if not self.is_decode:
            raise CaptureError("append_lengths: expected one token a sequence in a captured step")
        count = len(self.counts)
        shapes: Room = {"slots": ((count,), "int64"), "positions": ((count,), "int32")}
        shapes.update({name: ((count,), "int32") for name in _PER_SEQUENCE})
        shapes[TABLE_BY_PLACE] = ((self.max_pages, count), "int32")
        return shapes

    def fixed(self, room: Room) -> dict[str, Ints]:
        """Return the tables for a captured step; it may have had more sequences.

        Raises
        ------
        ValueError : this step does not fit; the message says why
        """
        most_pages, most = room[TABLE_BY_PLACE][0]
        count = len(self.counts)
        if not self.is_decode or count > most:
            raise ValueError(
                f"append_lengths: expected one token each for at most {most} sequences, as in the "
                f"captured step, got {self.num_tokens} for {count}"
            )
        if self.num_pages > most_pages:
            raise ValueError(
                f"seqs: expected at most {most_pages} pages each, which the captured step has room "
                f"for (max_seq_len), got {self.num_pages}"
            )
        found = self._by_sequence()
        table = np.zeros((self.num_pages, most), np.int32)
        for i, sequence in enumerate(self.sequences):
            table[: sequence.num_pages, i] = sequence.pages
        found.update(self._by_token(found, table.T))
        padded: dict[str, Ints] = {n: np.zeros(most, a.dtype) for n, a in found.items()}
        padded["slots"].fill(-1)
        for name, array in found.items():
            padded[name][:count] = array
        padded[TABLE_BY_PLACE] = table
        return {name: padded[name] for name in room}

    # --- Parts of the tables ---

    def _by_sequence(self) -> dict[str, Ints]:
        sequences = self.sequences
        return {
            "seq_lens": np.array([s.length for s in sequences], np.int32),
            "hole_starts": np.array([s.sinks for s in sequences], np.int32),
            "holes": np.array([s.hole for s in sequences], np.int32),
        }

    def _by_token(self, by_sequence: dict[str, Ints], table: Ints) -> dict[str, Ints]:
        counts = np.array(self.counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        first_rows = np.cumsum(counts) - counts
        starts = by_sequence["seq_lens"] - counts - first_rows
        positions = starts[rows] + np.arange(self.num_tokens)
        places = positions + by_sequence["holes"][rows]
        page, offset = np.divmod(places, self.page_size)
        slots = table[rows, page].astype(np.int64) * self.page_size + offset
        for i in np.flatnonzero(self.in_tree):
            sequence, first, count = self.sequences[i], first_rows[i], self.counts[i]
            new = trees.depths(sequence.parents)[-count:]
            positions[first : first + count] = sequence.committed + np.array(new)
        return {"slots": slots, "positions": positions.astype(np.int32)}

    def _add_trees(self, found: dict[str, Ints]) -> None:
        sequences = self.sequences
        nodes = [len(s.parents) for s in sequences]
        mask = np.zeros((self.num_tokens, max(nodes)), bool)
        first = 0
        for sequence, count in zip(sequences, self.counts, strict=True):
            if sequence.parents:
                seen = trees.mask(sequence.parents)[-count:]
                mask[first : first + count, : seen.shape[1]] = seen
            first += count
        found["tree_lens"] = np.array(nodes, np.int32)
        found["tree_mask"] = mask
        if self.tree_positions:
            tails = np.zeros((len(sequences), max(nodes)), np.int32)
            for row, sequence in zip(tails, sequences, strict=True):
                row[: len(sequence.parents)] = trees.depths(sequence.parents)
                row += sequence.committed
            found["tail_positions"] = tails

    def _add_cascade(self, found: dict[str, Ints], cascade: Cascade) -> None:
        first_sequences = np.cumsum(cascade.counts) - cascade.counts
        found["prefix_lens"] = cascade.lengths
        found["prefix_table"] = cascade.pages
        found["prefix_queries"] = np.add.reduceat(np.array(self.counts, np.int32), first_sequences)
        found["key_starts"] = np.repeat(cascade.lengths, cascade.counts)


def by_sequence(tables: Mapping[str, ArrayView]) -> ArrayView:
    """Return a step's page table, (sequences, pages), in whichever order it lies."""
    found = tables.get("block_table")
    if found is not None:
        return found
    found = tables[TABLE_BY_PLACE]
    return ArrayView(
        found.pointer, found.shape[::-1], found.strides[::-1], found.format, found.device,
        library=found.library, owner=found.owner,
    )  # fmt: skip


def check_batch(
    seqs: Any, append_lengths: Any, token_tree: Any, name: str = "append_lengths"
) -> tuple[list[Any], list[Any], Sequence[Any] | None]:
    """Return the arguments of a step as lists of equal length; `name` is that of the second.

    Raises
    ------
    TypeError, ValueError : one is no list, empty, or of another length
    """
    names, counts = _as_list(seqs, "seqs"), _as_list(append_lengths, name)
    if not names:
        raise ValueError("seqs: expected at least one sequence, got none")
    if len(counts) != len(names):
        raise ValueError(f"{name}: expected {len(names)} like seqs, got {len(counts)}")
    if token_tree is None:
        return names, counts, None
    given = _as_list(token_tree, "token_tree")
    if len(given) != len(names):
        raise ValueError(f"token_tree: expected {len(names)} lists like seqs, got {len(given)}")
    return names, counts, given


def _as_list(values: Any, name: str) -> list[Any]:
    if isinstance(values, np.ndarray):
        return list(values.tolist())
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name}: expected a list, got {values!r}") from None


class PageLists:
    """The pages of a step in CSR form, as a source of tables."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def tables(self) -> dict[str, Ints]:
        """Return indptr int32 (B + 1,), indices int32 (pages,), last_page_len int32 (B,)."""
        sequences, size = self._step.sequences, self._step.page_size
        indptr = np.zeros(len(sequences) + 1, np.int32)
        indptr[1:] = np.cumsum([s.num_pages for s in sequences])
        last = [s.end - (s.num_pages - 1) * size for s in sequences]
        indices = np.concatenate([s.pages for s in sequences])
        return {
            "indptr": indptr, "indices": indices, "last_page_len": np.array(last, np.int32)
        }  # fmt: skip

    def room(self) -> Room:
        """Refuse to be captured."""
        raise CaptureError("page_table_csr: its lengths differ from step to step; use block_table")

    def fixed(self, room: Room) -> dict[str, Ints]:
        """Refuse likewise: there is no room for it."""
        raise CaptureError("page_table_csr: no captured step has it")

    def launching(self, stream: Stream) -> None:
        """Do nothing: no launch reads these lists."""
