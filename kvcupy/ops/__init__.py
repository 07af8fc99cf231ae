"""The operations on KV caches, one family a module."""

from __future__ import annotations

from ..kernels import Specialisation


def specialisations() -> list[Specialisation]:
    """Return every kernel specialisation that any operation can ask for."""
    from . import store_launch

    return store_launch.specialisations()
