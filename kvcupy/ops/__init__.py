"""The operations on KV caches, one family a module."""

from __future__ import annotations

from ..dtypes import FORMATS
from ..kernels import Specialisation


def specialisations() -> list[Specialisation]:
    """Return every kernel specialisation that any operation can ask for."""
    from . import gather, indexing, pages, rope_launch, store, transfer_kernels

    return [
        found
        for module in (store, rope_launch, gather, pages, indexing, transfer_kernels)
        for found in module.specialisations()
    ]


def promises_128_bits(specialisation: Specialisation) -> bool:
    """Return whether a kernel is meant to move 16 bytes at a time, in and out.

    Copies of 16-byte words are, and kernels that take packs of 8 elements of at least two bytes.
    """
    arguments = specialisation.arguments
    if arguments[:1] == ("16",):
        return True
    one_byte = {f.ctype for f in FORMATS.values() if f.itemsize == 1}
    return arguments[2:3] == ("8",) and one_byte.isdisjoint(arguments[:2])
