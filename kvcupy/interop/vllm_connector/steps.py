"""What the scheduler's side sends to the workers with each step, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

SOURCES = ("host", "disk", "shared")


class Found(NamedTuple):
    """Leading blocks of a request that a worker holds: where it has found each."""

    sources: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.sources)


@dataclass
class Load:
    """Blocks to load for a request.

    Attributes
    ----------
    request : its id
    blocks : the engine's blocks to load into
    first : number of the first of them in the prefix
    is_async : whether the request waits for the load, instead of the step
    claim : number of the worker for the blocks that it holds, in the scheduler's process
    """

    request: str
    blocks: list[int]
    first: int
    is_async: bool
    claim: int | None = None


@dataclass
class PullJob:
    """Blocks to fetch from the engine that has computed the prompt of a request."""

    request: str
    ticket: bytes
    blocks: list[int]
    first: int


@dataclass
class Step:
    """One step of the engine.

    Attributes
    ----------
    number_of_failures : loads that have failed as far as the scheduler knew. A worker that knows of
        more does not save what this step computes
    loads, pulls
    saves : hash and block of each block that is complete after this step
    fresh : blocks that the engine has allocated to be written from this step on
    lookups : hashes by request, and the number of the first, where worker and scheduler are in
        different processes
    drops : requests that do not load the blocks held for them
    clear : whether to forget all blocks first
    """

    number_of_failures: int = 0
    loads: list[Load] = field(default_factory=list)
    pulls: list[PullJob] = field(default_factory=list)
    saves: dict[int, int] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)
    lookups: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    drops: list[str] = field(default_factory=list)
    clear: bool = False


@dataclass
class Answer:
    """What workers answer to a step: blocks found for requests, one entry for each worker."""

    found: dict[str, list[Found]] = field(default_factory=dict)

    def merged(self, other: Answer) -> Answer:
        found = {request: list(entries) for request, entries in self.found.items()}
        for request, entries in other.found.items():
            found.setdefault(request, []).extend(entries)
        return Answer(found)
