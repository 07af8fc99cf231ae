"""What a graph calls around each of its launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import CaptureError

Hook = Callable[[Any], object]
"""Takes the stream that the graph is launched on."""


class LaunchHooks:
    """Pairs of functions, each called once a launch however often it was added."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Hook, Hook]] = []

    def add(self, before: Hook, after: Hook) -> None:
        """Add a pair, unless it is there."""
        if (before, after) not in self._pairs:
            self._pairs.append((before, after))

    @contextmanager
    def around(self, stream: Any) -> Iterator[None]:
        """Call every `before`, run the block, and call the `after` of each that did not raise.

        Raises
        ------
        CaptureError : `stream` is captured, so that launches of it would pass the functions by
        """
        if self._pairs and stream.capturing:
            raise CaptureError(
                f"{stream.name} is being captured: a graph that calls functions before each launch "
                "(Stream.on_launch) cannot become part of another"
            )
        with ExitStack() as begun:
            for before, after in self._pairs:
                before(stream)
                begun.callback(after, stream)
            yield
