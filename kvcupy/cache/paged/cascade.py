"""Prefixes that neighbours in a batch share: attended once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sequence import CachedSequence, Ints

# Shared keys are read once instead of once a sequence; in return every token's result is written,
# read and merged, twice in float32, by two launches more. Where the host device breaks even; a GPU,
# whose L2 has some of what is read again, was not tried.
_LEAST_SAVED = 20  # times those bytes


@dataclass(frozen=True)
class Cascade:
    """A batch in groups of neighbours, each with a prefix that all its sequences have.

    Attributes
    ----------
    lengths : tokens of each group's prefix, int32 (groups,); 0 where there is none
    counts : sequences of each group
    pages : of each prefix, int32 (groups, most pages), filled up with zeros
    """

    lengths: Ints
    counts: Ints
    pages: Ints

    @property
    def saved_keys(self) -> int:
        """Keys that need not be read again."""
        return int(((self.counts - 1).astype(np.int64) * self.lengths).sum())


def find(
    sequences: Sequence[CachedSequence], is_shared: Sequence[bool], page_size: int
) -> Cascade | None:
    """Group neighbours by the pages that they share from the first on; None if none do.

    Parameters
    ----------
    is_shared : whether somebody else refers to the first page of each
    """
    groups: list[tuple[Ints, int]] = []  # pages of the prefix, sequences
    for sequence, shared in zip(sequences, is_shared, strict=True):
        pages = sequence.pages[: sequence.sinks // page_size] if sequence.hole else sequence.pages
        if shared and groups:
            prefix, count = groups[-1]
            common = _common(prefix, pages)
            # A third sequence joins if it does not cost the others what they share already.
            if common and (count == 1 or common == len(prefix)):
                groups[-1] = prefix[:common], count + 1
                continue
        groups.append((pages if shared else pages[:0], 1))
    if len(groups) == len(sequences):
        return None
    used = [prefix if count > 1 else prefix[:0] for prefix, count in groups]
    lengths = np.array([len(prefix) for prefix in used], np.int32)
    table = np.zeros((len(used), lengths.max()), np.int32)
    for row, prefix in zip(table, used, strict=True):
        row[: len(prefix)] = prefix
    counts = np.array([count for _, count in groups], np.int32)
    return Cascade(lengths * page_size, counts, table)


def _common(a: Ints, b: Ints) -> int:
    """Return how many pages two lists begin with alike."""
    count = min(len(a), len(b))
    differ = np.flatnonzero(a[:count] != b[:count])
    return int(differ[0]) if len(differ) else count


def pays(saved_keys: int, num_tokens: int, key_bytes: int, state_bytes: int) -> bool:
    """Return whether two passes and a merge move less than one pass.

    Parameters
    ----------
    saved_keys : that are read once a group
    key_bytes : of K and V of a token in a layer
    state_bytes : of the float32 result of one query token, all heads

    >>> pays(31 * 2048, 32, 4096, 16384), pays(16, 2, 4096, 16384)
    (True, False)
    """
    # Two states are written and read, and the result is written.
    return saved_keys * key_bytes >= _LEAST_SAVED * 5 * num_tokens * state_bytes
