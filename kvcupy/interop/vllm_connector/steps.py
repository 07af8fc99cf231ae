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
    """Blocks to load for a request."""

    request: str  # its id
    blocks: dict[BlockKey, int]  # the engine's blocks to load into
    is_async: bool  # whether the request waits for the load, instead of the step
    # number of the worker for the blocks that it holds, in the scheduler's process
    claim: int | None = None


@dataclass
class Step:
    """One step of the engine."""

    # loads that have failed as far as the scheduler knew. A worker that knows of more does not save
    # what this step computes
    num_failures: int = 0
    loads: list[Load] = field(default_factory=list)  # to start
    # hash and block of each block that is complete after this step
    saves: dict[int, int] = field(default_factory=dict)
    # blocks that the engine has allocated to be written from this step on
    fresh: list[int] = field(default_factory=list)
    # by request, number of the question, first unit and hashes of the blocks from it on, where
    # worker and scheduler are in different processes
    lookups: dict[str, tuple[int, int, Keys]] = field(default_factory=dict)
    # requests that do not load the blocks held for them
    drops: list[str] = field(default_factory=list)
    # increases with each reset: a worker first forgets all blocks of earlier ones
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
