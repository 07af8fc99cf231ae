"""Changes of the blocks in a cache's tiers, for listeners such as `kvcupy.events.Publisher`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

TokenIds: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.integer]]"


@dataclass(frozen=True)
class Stored:
    """Blocks have entered a tier: "device" or "host"."""

    tier: str
    hashes: Sequence[int]


@dataclass(frozen=True)
class Removed:
    """Blocks have left a tier."""

    tier: str
    hashes: Sequence[int]


@dataclass(frozen=True)
class Described:
    """Blocks that are about to enter a tier: the blocks before them, and their tokens.

    Attributes
    ----------
    parents : hash of the preceding block of each; 0 for none, or where it is unknown
    token_ids : (blocks, page_size), or None
    """

    hashes: Sequence[int]
    parents: Sequence[int]
    token_ids: TokenIds | None = None

    @classmethod
    def prefix(cls, hashes: Sequence[int], token_ids: TokenIds | None = None) -> Described:
        """Describe blocks that follow each other from the start of a sequence."""
        return cls(hashes, [0, *hashes][: len(hashes)], token_ids)

    def at(self, indices: Sequence[int]) -> Described:
        """Return some of the blocks, by their places."""
        tokens = None if self.token_ids is None else self.token_ids[list(indices)]
        return Described(
            [self.hashes[i] for i in indices], [self.parents[i] for i in indices], tokens
        )

    def of(self, hashes: Iterable[int]) -> Described:
        """Return the blocks that have one of some hashes."""
        wanted = set(hashes)
        return self.at([i for i, hash in enumerate(self.hashes) if hash in wanted])


@dataclass(frozen=True)
class Replaced:
    """These are all blocks of the cache now, hashes by tier."""

    blocks: Mapping[str, Sequence[int]] = field(default_factory=dict)


Change: TypeAlias = Stored | Removed | Described | Replaced
# Called with the lock of the cache held, so it must neither block nor raise.
Listener: TypeAlias = Callable[[Change], None]


def announce(listeners: Sequence[Listener], change: Change) -> None:
    """Call listeners."""
    for listener in listeners:
        listener(change)
