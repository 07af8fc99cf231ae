"""Migration of pages to a pool in another process: a sender offers them, a receiver pulls them."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...cache.pool import Pool
    from .engines import Engine


def engine_for(name: Any, pool: Pool) -> Engine:
    """Create an engine by name: "socket", "nixl", or a name that another package registers.

    Other packages register engine classes as entry points in the group `kvcupy.page_engines`.

    Raises
    ------
    TypeError : `name` is not a str
    ValueError : no engine has that name
    ImportError : the engine's wheel is not installed
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
