"""The names of `fallback` for attention and transfers, until they use them themselves."""

from __future__ import annotations

from .fallback import (
    QUIET,
    decode,
    divide,
    dynamic_scale,
    encode,
    module_of,
    multiply,
    note_fault,
)

__all__ = [
    "QUIET", "decode", "divide", "dynamic_scale", "encode", "module_of", "multiply", "note_fault",
]  # fmt: skip
