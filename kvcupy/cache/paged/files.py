"""Files of sequences, in the safetensors format.

A file has the tensors that each group of layers keeps, bit for bit: tokens, but for those behind a
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
from .groups import LayerGroup, Recurrent, SlidingWindow
from .page_group import PageGroup
from .sequences import CachedSequence
from .states import States

_OWN = ("length", "window", "sink_tokens")  # of a sequence of a cache without groups


class SequenceFiles:
    """Saves and loads sequences.

    Parameters
    ----------
    declared : the groups that the user has passed; None: the cache has no others than the first
    contents : of each group of attention layers
    """

    def __init__(
        self, declared: Sequence[LayerGroup] | None, groups: Sequence[PageGroup],
        contents: Sequence[Contents], states: States | None, access: PageAccess,
    ) -> None:  # fmt: skip
        self._groups, self._states, self._access = groups, states, access
        self._contents = contents
        self._page_size = groups[0].pool.page_size
        self._is_mixed = declared is not None
        # Of the tensors of each group.
        self._prefixes = [f"{i} " for i in range(len(groups))] if self._is_mixed else [""]
        self._fields: dict[str, str] = {}  # of declared groups
        if declared is None:
            return
        self._fields = {"num_groups": str(len(declared)), "page_size": str(self._page_size)}
        remaining = iter(contents)
        for number, group in enumerate(declared):
            own: dict[str, Any] = {"kind": type(group).__name__, "layers": list(group.layers)}
            if isinstance(group, Recurrent):
                own["state"] = {name: [*shape] for name, (shape, _) in group.state.items()}
                own["dtypes"] = [dtype for _, dtype in group.state.values()]
            else:
                own |= next(remaining).fields()
            if isinstance(group, SlidingWindow):
                own |= {"window": group.window, "sink_tokens": group.sink_tokens}
            self._fields |= {f"{number} {name}": str(value) for name, value in own.items()}

    def fields(self) -> Mapping[str, str]:
        """Return what a file must have in common with this cache."""
        return self._fields if self._is_mixed else self._contents[0].fields()

    def cache_fields(self) -> Mapping[str, str]:
        """Return what another cache must have in common with this one to exchange sequences."""
        return {**self.fields(), "page_size": str(self._page_size)}

    def save(self, seq: Hashable, path: str | Path) -> None:
        """Write the tokens and states that the groups keep of a sequence to a file."""
        tensors: dict[str, np.ndarray[Any, Any]] = {}
        found = [group.sequences.find(seq) for group in self._groups]
        for group, contents, sequence, prefix in zip(
            self._groups, self._contents, found, self._prefixes, strict=True
        ):
            runs = group.sequences.kept_runs(sequence.length, sequence.first_kept)
            own = contents.tensors(sequence, runs)
            tensors |= {prefix + name: tensor for name, tensor in own.items()}
        if self._states is not None and found[0].length:
            tensors |= self._states.tensors(self._access, seq)
        own_fields = {name: str(getattr(found[0], name)) for name in _OWN}
        if self._is_mixed:
            first_kept = json.dumps([sequence.first_kept for sequence in found])
            own_fields = {"length": own_fields["length"], "first_kept": first_kept}
        write_file(path, tensors, {**self.fields(), **own_fields})

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
        """Return the length, the index behind the freed pages of each group, and the window."""
        try:
            if self._is_mixed:
                length, first_kept = int(metadata["length"]), json.loads(metadata["first_kept"])
                window = sink_tokens = 0
            else:
                length, window, sink_tokens = (int(metadata[name]) for name in _OWN)
                first_kept = [0]
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
            own = contents.expected(sum(stop - start for start, stop in runs))
            expected |= {self._prefixes[number] + name: entry for name, entry in own.items()}
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
        known, size, prefix = group.sequences, self._page_size, self._prefixes[number]
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
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
                rows = {name: tensor[:, row : row + count] for name, tensor in own.items()}
                contents.fill(sequence, end - count, end, rows)
                group.demote(self._access, [sequence])
                row += count
