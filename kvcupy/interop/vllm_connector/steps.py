"""Messages of each step: from the scheduler's side to the workers, and their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .groups import BlockKey, Keys


class Found(NamedTuple):
    """The leading units of a prefix that a worker holds for a request: the tier of each."""

    sources: tuple[str, ...] = ()

    @property
    def num_units(self) -> int:
        return len(self.sources)


@dataclass
class Load:
    """Blocks to load for a request.

    Attributes
    ----------
    request : its id
    blocks : the engine's blocks to load into
    is_async : whether the request waits for the load, instead of the step
    claim : number of the worker for the blocks that it holds, in the scheduler's process
    """

    request: str
    blocks: dict[BlockKey, int]
    is_async: bool
    claim: int | None = None


@dataclass
class Step:
    """One step of the engine.

    Attributes
    ----------
    num_failures : loads that have failed as far as the scheduler knew. A worker that knows of
        more does not save what this step computes
    loads : to start
    saves : hash and block of each block that is complete after this step
    fresh : blocks that the engine has allocated to be written from this step on
    lookups : by request, number of the question, first unit and hashes of the blocks from it on,
        where worker and scheduler are in different processes
    drops : requests that do not load the blocks held for them
    generation : increases with each reset: a worker first forgets all blocks of earlier ones
    """

    num_failures: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: dict[int, int] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)
    lookups: dict[str, tuple[int, int, Keys]] = field(default_factory=dict)
    drops: list[str] = field(default_factory=list)
    generation: int = 0


@dataclass
class Answer:
    """Units found by request and number of the question, one entry for each worker."""

    found: dict[tuple[str, int], list[Found]] = field(default_factory=dict)

    def merged(self, other: Answer) -> Answer:
        found = {question: list(entries) for question, entries in self.found.items()}
        for question, entries in other.found.items():
            found.setdefault(question, []).extend(entries)
        return Answer(found)
