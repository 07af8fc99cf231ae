"""The operations on KV caches, one family a module."""

from __future__ import annotations

from ..kernels import Specialisation


def specialisations() -> list[Specialisation]:
    """Return every kernel specialisation that any operation can ask for."""
    from . import gather, indexing, pages, rope_launch, store

    return [
        found
        for module in (store, rope_launch, gather, pages, indexing)
        for found in module.specialisations()
    ]
