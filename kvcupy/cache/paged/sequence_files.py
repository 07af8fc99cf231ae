"""A sequence of a paged cache as a file: its tokens, and what reading them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import saved
from .contents import Tensors
from .sequence import CachedSequence

_OWN = ("length", "window", "sinks")  # fields that may differ from sequence to sequence


@dataclass(frozen=True)
class SavedSequence:
    """What a file holds."""

    length: int
    window: int
    sinks: int
    tensors: Tensors


def write(
    path: str | Path, sequence: CachedSequence, tensors: Tensors, fields: Mapping[str, str]
) -> None:
    """Write a sequence; `fields` are what whoever reads it must have in common."""
    own = {name: str(getattr(sequence, name)) for name in _OWN}
    saved.write(path, tensors, {**fields, **own})


def read(
    path: str | Path,
    fields: Mapping[str, str],
    expected: Callable[[int], dict[str, tuple[str, tuple[int, ...]]]],
) -> SavedSequence:
    """Read a sequence.

    Parameters
    ----------
    expected : gives format and shape of the tensors of so many tokens, by name

    Raises
    ------
    ValueError : the file is none, or was written by another kind of cache
    OSError : it cannot be read
    """
    tensors, metadata = saved.read(path)
    saved.check(metadata, fields)
    try:
        length, window, sinks = (int(metadata[name]) for name in _OWN)
    except (KeyError, ValueError):
        raise ValueError(f"path: expected a saved sequence, got {path} without {_OWN}") from None
    wanted = expected(max(0, length))
    found = {name: (format, tuple(shape)) for name, (format, shape, _) in tensors.items()}
    if length < 0 or found != wanted:
        raise ValueError(f"path: expected {path} to hold {wanted}, got {found}")
    if window and not 0 <= sinks < window:
        raise ValueError(f"path: expected sinks below window in {path}, got {sinks} and {window}")
    return SavedSequence(length, window, sinks, tensors)
