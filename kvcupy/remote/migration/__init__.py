"""Pages on their way to a pool of another process: offered by a sender, pulled by a receiver."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...cache.pool import Pool
    from .engines import Engine


def engine_for(name: Any, pool: Pool) -> Engine:
    """Return a new engine by name: "socket", "nixl", or one that another package registers.

    Another package names its engine class by an entry point of the group `kvcupy.page_engines`.

    Raises
    ------
    TypeError, ValueError : there is none of that name
    ImportError : its wheel is missing
    """
    if not isinstance(name, str):
        raise TypeError(f"engine: expected a str, got {type(name).__name__}")
    if name == "socket":
        from .engines import SocketEngine

        return SocketEngine(pool)
    if name == "nixl":
        from .nixl import NixlEngine

        return NixlEngine(pool)
    registered = entry_points(group="kvcupy.page_engines")
    if name not in registered.names:
        expected = ", ".join(("socket", "nixl", *sorted(registered.names)))
        raise ValueError(f"engine: expected one of {expected}, got {name!r}")
    engine: Engine = registered[name].load()(pool)
    return engine
