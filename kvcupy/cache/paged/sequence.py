"""One sequence of a paged cache: its pages, and where its tokens lie in them.

A token has a *position*, counted in what is cached, and a *place*, which says where its row lies:
`pages[place // page_size]`, offset `place % page_size`. They differ where a sliding window has
dropped tokens behind the sinks: `hole` places lie between, until they fill pages that can go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Ints = np.ndarray[Any, Any]

_FIRST_ROOM = 4  # pages


class Arrival(Protocol):
    """Pages on their way: a Transfer, or a Lease."""

    def wait_layer(self, layer: int, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...


class CachedSequence:
    """One sequence.

    Attributes
    ----------
    length : tokens cached, those of a pending tree included
    hole : places between the sinks and the token after them
    window, sinks : of a sliding window; window 0: none
    parents : of the nodes of the tree that is not committed yet, the last tokens
    hashes : what a tiered cache knows its first full pages by, or will
    arriving : transfers and leases that bring some of its pages
    away : where it is instead of on the device, if it is offloaded
    """

    __slots__ = (
        "_pages", "arriving", "away", "hashes", "hole", "length", "num_pages", "parents", "sinks",
        "window",
    )  # fmt: skip

    def __init__(self) -> None:
        self.length = self.hole = self.window = self.sinks = self.num_pages = 0
        self.parents: list[int] = []
        self.hashes: list[int] = []
        self.arriving: list[Arrival] = []
        self.away: Any = None
        self._pages = np.empty(_FIRST_ROOM, np.int32)

    @property
    def pages(self) -> Ints:
        """Its pages in order, int32, a view."""
        return self._pages[: self.num_pages]

    @property
    def end(self) -> int:
        """The place that its next token gets."""
        return self.length + self.hole

    @property
    def committed(self) -> int:
        """Tokens before the pending tree."""
        return self.length - len(self.parents)

    def extend(self, pages: Ints) -> None:
        """Put pages behind its own."""
        wanted = self.num_pages + len(pages)
        if wanted > len(self._pages):
            self._pages = np.concatenate(
                [self.pages, np.empty(max(wanted, 2 * len(self._pages)) - self.num_pages, np.int32)]
            )
        self._pages[self.num_pages : wanted] = pages
        self.num_pages = wanted

    def places(self, start: int, stop: int) -> Ints:
        """Return the places of the tokens at positions `start` to `stop` - 1, int64."""
        positions = np.arange(start, stop, dtype=np.int64)
        return (
            positions + np.where(positions < self.sinks, 0, self.hole) if self.hole else positions
        )

    def slots(self, places: Ints, page_size: int) -> Ints:
        """Return the slots of places, int64."""
        slots: Ints = self.pages[places // page_size].astype(np.int64)
        slots *= page_size
        slots += places % page_size
        return slots

    def hole_at(self, length: int) -> int:
        """Return the places missing before the end if it had `length` tokens."""
        return self.hole if length > self.sinks else 0


@dataclass
class Reservation:
    """Pages for the tokens of a step, taken but not yet anybody's.

    Attributes
    ----------
    copies : sequence, index of its last page, and the page that takes its place, because the last
        one is partial and shared
    pages : all pages taken
    """

    pages: Ints
    copies: list[tuple[CachedSequence, int, int]] = field(default_factory=list)
    more: list[int] = field(default_factory=list)  # new pages of each sequence

    def replaced(self) -> tuple[list[int], list[int]]:
        """Return the pages to copy, and where to."""
        return [int(s.pages[i]) for s, i, _ in self.copies], [page for _, _, page in self.copies]
