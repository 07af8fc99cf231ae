"""The names of `store` for transfers, until they use them themselves."""

from __future__ import annotations

from .store import PACK, WORDS

__all__ = ["PACK", "WORDS"]
