"""The names of `call` for attention, until it uses them itself."""

from __future__ import annotations

from typing import Any

from . import call
from .call import Launch, Plan, alignment, forget

__all__ = ["Launch", "Plan", "alignment", "forget", "obtain"]


def obtain(*arguments: Any) -> Any:
    """Call `call.obtain`, whichever function that is by now."""
    return call.obtain(*arguments)
