"""What a place for shared blocks offers to `SharedStore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BackendLost(Exception):
    """The server is not reachable, or did not answer in time."""

    def __init__(self, message: str, results: Sequence[Any] = (), *, refused: bool = False) -> None:
        super().__init__(message)
        self.results = results
        self.refused = refused
