"""The names of `call` for attention and transfers, until they use them themselves."""

from __future__ import annotations

from typing import Any

from . import call
from .call import Geometry, require_countable, widest

__all__ = ["Geometry", "require_countable", "spread", "widest"]


def spread(num_rows: int, words: int, sm_count: int, **options: Any) -> Geometry:
    """Lay threads over rows as `call.spread` does."""
    if "most_lanes" in options:
        options["max_lanes"] = options.pop("most_lanes")
    return call.spread(num_rows, words, sm_count, **options)
