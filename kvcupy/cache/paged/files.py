"""Files of sequences, in the safetensors format.

A file has the tensors that each group of layers keeps, bit for bit: tokens, except before a
window, and the live state. Its metadata describe the cache.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import formats
from ..hazards import PageAccess
from .contents import Arrays, Contents, check_metadata, read_file, write_file
from .groups import Recurrent, SlidingWindow
from .memory_plan import MemoryPlan
from .page_group import PageGroup
from .sequences import CachedSequence
from .states import States

_NUMBERS = ("length", "window", "sink_tokens")  # of a sequence


def _name(name: str, number: int) -> str:
    """Return the name of a field or a tensor of a group; the first group's are plain."""
    return f"{name} {number}" if number else name


class SequenceFiles:
    """Saves and loads sequences; `contents` has one entry per group of attention layers."""

    def __init__(
        self, plan: MemoryPlan, groups: Sequence[PageGroup], contents: Sequence[Contents],
        states: States | None, access: PageAccess,
    ) -> None:  # fmt: skip
        self._groups, self._states, self._access = groups, states, access
        self._contents = contents
        self._page_size = groups[0].pool.page_size
        self._fields = {"num_groups": str(len(plan.groups))}
        if any(group.window for group in groups):  # which frees whole pages
            self._fields["page_size"] = str(self._page_size)
        remaining = iter(contents)
        for number, part in enumerate(plan.groups):
            group = part.group
            fields: dict[str, Any] = {"group": type(group).__name__}
            if isinstance(group, Recurrent):
                fields["state"] = {name: [*shape] for name, (shape, _) in group.state.items()}
                fields["dtypes"] = [dtype for _, dtype in group.state.values()]
            else:
                fields |= next(remaining).fields()
            if isinstance(group, SlidingWindow):
                fields |= {"group_window": group.window, "group_sink_tokens": group.sink_tokens}
            fields["layers"] = list(group.layers)
            self._fields |= {_name(name, number): str(value) for name, value in fields.items()}

    def fields(self) -> Mapping[str, str]:
        """Return what a file must have in common with this cache."""
        return self._fields

    def cache_fields(self) -> Mapping[str, str]:
        """Return what another cache must have in common with this one to exchange sequences."""
        return {**self.fields(), "page_size": str(self._page_size)}

    def save(self, seq: Hashable, path: str | Path) -> None:
        """Write the tokens and states that the groups keep of a sequence to a file."""
        tensors: dict[str, np.ndarray[Any, Any]] = {}
        sequences = [group.sequences.find(seq) for group in self._groups]
        for number, (group, sequence) in enumerate(zip(self._groups, sequences, strict=True)):
            runs = group.sequences.kept_runs(sequence.length, sequence.first_kept)
            kept = self._contents[number].tensors(sequence, runs)
            tensors |= {_name(name, number): tensor for name, tensor in kept.items()}
        first = sequences[0]
        if self._states is not None and first.length:
            tensors |= self._states.tensors(self._access, seq)
        fields = {name: str(getattr(first, name)) for name in _NUMBERS}
        first_kept = json.dumps([sequence.first_kept for sequence in sequences])
        write_file(path, tensors, {**self.fields(), **fields, "first_kept": first_kept})

    def load(self, seq: Hashable, path: str | Path) -> None:
        """Add the sequence of a file; all or nothing."""
        tensors, metadata = read_file(path)
        check_metadata(metadata, self.fields())
        length, first_kept, window, sink_tokens = self._numbers(metadata, path)
        self._check_tensors(tensors, length, first_kept, path)
        added = []
        try:
            for number, group in enumerate(self._groups):
                sequence = group.sequences.add(seq)
                added.append(group)
                sequence.window, sequence.sink_tokens = window, sink_tokens
                self._fill(number, sequence, length, first_kept[number], tensors)
            if self._states is not None:
                sequence = self._groups[0].sequences.find(seq)
                self._states.load(self._access, seq, tensors, sequence)
        except BaseException:
            for group in added:
                group.sequences.remove(seq)
            raise

    def _numbers(
        self, metadata: Mapping[str, str], path: str | Path
    ) -> tuple[int, list[int], int, int]:
        """Return the length, the index after the freed pages of each group, and the window."""
        try:
            length, window, sink_tokens = (int(metadata[name]) for name in _NUMBERS)
            first_kept = json.loads(metadata["first_kept"])
            consistent = min(length, window, sink_tokens) >= 0 and all(
                type(first) is int and group.sequences.may_be(length, first)
                for group, first in zip(self._groups, first_kept, strict=True)
            )
        except (KeyError, ValueError, TypeError):
            consistent = False
        if not consistent:
            raise ValueError(f"path: expected a saved sequence, got {path} with {metadata}")
        return length, first_kept, window, sink_tokens

    def _check_tensors(
        self, tensors: Arrays, length: int, first_kept: Sequence[int], path: str | Path
    ) -> None:
        expected: dict[str, tuple[str, tuple[int, ...]]] = {}
        for number, (group, contents) in enumerate(zip(self._groups, self._contents, strict=True)):
            runs = group.sequences.kept_runs(length, first_kept[number])
            entries = contents.expected(sum(stop - start for start, stop in runs))
            expected |= {_name(name, number): entry for name, entry in entries.items()}
        if self._states is not None and length:
            expected |= self._states.shapes()
        got = {name: (formats.tag(array.dtype), array.shape) for name, array in tensors.items()}
        if got != expected:
            raise ValueError(f"path: expected {path} to hold {expected}, got {got}")

    def _fill(
        self, number: int, sequence: CachedSequence, length: int, first_kept: int, tensors: Arrays
    ) -> None:
        """Append the tokens of a file to an empty sequence of a group."""
        group, contents = self._groups[number], self._contents[number]
        known, size = group.sequences, self._page_size
        arrays = {name: tensors[_name(name, number)] for name in contents.expected(0)}
        row = 0
        for start, stop in known.kept_runs(length, first_kept):
            known.skip(sequence, (start - sequence.length) // size)
            while sequence.length < stop:
                count = stop - sequence.length
                if group.past is not None:  # demoting a part makes room for the next
                    count = min(count, group.pool.allocator.num_available * size or count)
                reserved = known.reserve([sequence], [count])
                known.grow([sequence], [count], reserved)
                end = sequence.length
                rows = {name: tensor[:, row : row + count] for name, tensor in arrays.items()}
                contents.fill(sequence, end - count, end, rows)
                group.demote(self._access, [sequence])
                row += count
