"""Files of sequences, in the safetensors format.

A file has the tensors that each group of layers keeps, bit for bit: tokens, except before a
window, and the live state. Its metadata describe the cache.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import formats
from ...errors import file_path, naming
from ..hazards import PageAccess
from .contents import Arrays, Contents
from .groups import Recurrent, SlidingWindow
from .memory_plan import MemoryPlan
from .page_group import PageGroup
from .sequences import CachedSequence
from .states import States

PathLike = str | os.PathLike[str]

KIND = {"kvcupy": "1", "kind": "sequence"}  # metadata of every file

# Names of number formats in files; calls of the package take NumPy's names.
_TAGS = {
    "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2",
    "I8": "int8",
}  # fmt: skip

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
                if group.demoted is not None:  # demoting a part makes room for the next
                    count = min(count, group.pool.allocator.num_available * size or count)
                reserved = known.reserve([sequence], [count])
                known.grow([sequence], [count], reserved)
                end = sequence.length
                rows = {name: tensor[:, row : row + count] for name, tensor in arrays.items()}
                contents.fill(sequence, end - count, end, rows)
                group.demote(self._access, [sequence])
                row += count


# --- Safetensors ---


def write_file(path: PathLike, tensors: Arrays, metadata: Mapping[str, object]) -> None:
    """Write or replace a file, as a whole: after an error the old file is unchanged.

    Bytes: all are written once, to a file next to `path` that gets its name when all are on disk.
    Contiguous arrays are not copied.
    """
    package = _package()
    path = file_path(path, "path")
    if path.exists() and not path.is_file():  # such as a device, which the file would replace
        raise ValueError(f"path: expected the name of a file, got {path}")
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    specs = {
        name: package.TensorSpec(
            dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }  # fmt: skip
    described = {**{name: str(value) for name, value in metadata.items()}, **KIND}
    temporary = path.with_name(f".kvcupy-{secrets.token_hex(8)}")
    # Only the owner can read it, since keys and values reveal prompts.
    with naming(path.parent):
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        try:
            package.serialize_file(specs, temporary, described)
        except package.SafetensorError as error:
            raise _system_error(error, path) from error
        with naming(path):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_file(path: PathLike) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Bytes: the header. The arrays are the mapped file, and are loaded where they are read. They keep
    the old contents if the file is replaced, as by `write_file`; if it is truncated meanwhile,
    reading them kills the process.
    """
    package = _package()
    path = file_path(path, "path")
    with path.open("rb") as file:
        try:
            with package.safe_open(path, framework="np"):
                pass  # checks that the header fits the file and itself, to the last byte
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except package.SafetensorError as error:
            raise ValueError(f"path: expected a safetensors file, got {path}: {error}") from None
    metadata = header.pop("__metadata__", None) or {}
    start = 8 + header_bytes
    tensors = {name: _mapped(path, name, entry, mapped, start) for name, entry in header.items()}
    return tensors, metadata


def check_metadata(metadata: Mapping[str, str], expected: Mapping[str, object]) -> None:
    """Raise if metadata do not describe a saved sequence, or differ in an expected field.

    >>> check_metadata({"kvcupy": "1", "kind": "sequence", "num_layers": "32"}, {"num_layers": 28})
    Traceback (most recent call last):
    ValueError: path: expected a saved sequence with num_layers 28, got 32
    """
    for field, value in {**KIND, **expected}.items():
        if metadata.get(field) != str(value):
            got = metadata.get(field, "none")
            raise ValueError(f"path: expected a saved sequence with {field} {value}, got {got}")


def _package() -> Any:
    """Return the safetensors package."""
    try:
        import safetensors
        from safetensors import TensorSpec  # noqa: F401 - since 0.8
    except ImportError as error:
        raise ImportError(
            "saved sequences need safetensors 0.8 or newer: pip install 'safetensors>=0.8'"
        ) from error
    return safetensors


def _mapped(
    path: Path, name: str, entry: Any, mapped: mmap.mmap, start: int
) -> np.ndarray[Any, Any]:
    """Return a tensor of a file as part of its mapping."""
    format = _TAGS.get(entry["dtype"])
    if format is None:
        raise ValueError(
            f"path: expected tensors of {', '.join(_TAGS)}, got {entry['dtype']} for {name} "
            f"in {path}"
        )
    first, last = entry["data_offsets"]
    bits = np.frombuffer(mapped, np.uint8, last - first, start + first)
    return bits.view(formats.numpy_dtype(format)).reshape(entry["shape"])


def _system_error(error: Exception, path: Path) -> Exception:
    """Return the OSError that an error of the package wraps, if it wraps one."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
        return error
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))
