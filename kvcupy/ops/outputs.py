"""The names of `call` for attention and the caches, until they use them themselves."""

from __future__ import annotations

from .call import format_name, in_library, zeros

__all__ = ["format_name", "in_library", "zeros"]
