"""Arguments, pool and engine that senders and receivers of pages have in common."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ... import metrics
from ...cache.identity import PoolIdentity
from ...cache.pages import Pages, page_array
from ...cache.pool import Pool, positive_int
from ...errors import KvcupyError, ProcessLocal, TransferError, transfer_failure
from ...observe import Access
from ...ops import checks
from . import protocol
from .layers import PageBytes, Staging, staging_for

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from .engines import Engine

_Self = TypeVar("_Self", bound="Endpoint")

# Number, generation, token; first head, number of heads; pages per run; whether START follows.
PULL_HEAD = struct.Struct(">QQ16sIIII")
GRANT_HEAD = struct.Struct(">QIIIQ")  # lease in ms, pages per run, pages, layers, page bytes

_MAX_SECONDS = 1e6


class Endpoint(ProcessLocal):
    """A sender or receiver of pages.

    The constructor checks arguments; `_open_engine` allocates resources.
    """

    tls_is_for: str  # "servers" or "clients"

    def __init__(self, pool: Any, secret: Any, heads: Any, model: Any, tls: Any) -> None:
        self._identity = identity_of(pool, heads, model)
        self._digest = common_digest(self._identity)
        self._pool: Pool = pool
        self._secret = protocol.checked_secret(secret)
        self._tls = protocol.checked_tls(tls, self.tls_is_for)
        self._page_bytes: dict[range, PageBytes] = {}
        self._closed = False

    def _open_engine(self, name: Any, staging_pages: Any) -> None:
        """Create the engine, and staging for its transfers if requested or needed."""
        if staging_pages is not None:
            staging_pages = positive_int(staging_pages, "staging_pages")
        self._staging: Staging | None = staging_for(self._pool, staging_pages)
        self._engine: Engine = engine_for(name, self._pool)

    @property
    def pool(self) -> Pool:
        """The pool whose pages are sent or received."""
        return self._pool

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._closed:
            raise KvcupyError(f"{type(self).__name__}: closed")

    @property
    def _used_staging(self) -> Staging | None:
        return self._staging if self._engine.staged else None

    def _bytes_of(self, heads: range) -> PageBytes:
        """Return the bytes of some heads, of the pool or of the staging pool."""
        if heads not in self._page_bytes:
            staging = self._used_staging
            of = self._pool if staging is None else staging.pool
            self._page_bytes[heads] = PageBytes(of, heads)
        return self._page_bytes[heads]

    def _lazy_stream(self) -> Callable[[], Stream]:
        """Return a function that creates a stream when it is first called."""
        return cache(self._pool.device.stream)


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


def identity_of(pool: Any, heads: Any, model: Any) -> PoolIdentity:
    """Make an identity from the arguments of a sender or receiver."""
    if heads is None:
        return PoolIdentity.of(pool, model=model)
    if not (isinstance(heads, tuple) and len(heads) == 2):
        raise TypeError(f"heads: expected (first, total), got {heads!r}")
    for number in heads:
        checks.require_int(number, "heads")
    first, total = map(int, heads)
    try:
        return PoolIdentity.of(pool, head_start=first, total_kv_heads=total, model=model)
    except ValueError as error:
        raise ValueError(f"heads: {error}") from None


@lru_cache(64)
def common_digest(identity: PoolIdentity) -> bytes:
    """Digest the fields that the pools of sender and receiver must share: all except the range of
    heads and the layout."""
    return replace(
        identity, head_start=0, num_kv_heads=identity.total_kv_heads, wire="page_first_direct"
    ).digest()


def checked_page_list(pages: Any) -> Pages:
    """Copy pages, which an allocator has checked, to an int64 array in the same order."""
    listed: Pages = np.ascontiguousarray(page_array(pages), np.int64).copy()
    return listed


def place(address: Any, trace_id: str) -> str:
    """Name the sender of a pull, and the trace, for logs and errors."""
    return f"{address}, trace {trace_id}" if trace_id else str(address)


def as_transfer_error(error: BaseException, where: str) -> TransferError:
    """Convert the error of a pull's thread to a TransferError that says where it occurred."""
    if isinstance(error, TransferError):
        return transfer_failure(f"{where}: {error}", error.reason, error)
    if isinstance(error, TimeoutError):
        return transfer_failure(f"{where}: the deadline has passed", "late", error)
    return transfer_failure(f"{where}: {error or type(error).__name__}", "lost", error)


def reason_samples(
    end: str, pulls: Mapping[str, int], connections: Mapping[str, int]
) -> Iterator[tuple[str, metrics.Labels, float]]:
    """Yield samples of failed pulls and dropped connections, by reason."""
    for name, counts in (("failed_pulls", pulls), ("dropped_connections", connections)):
        for reason, count in counts.items():
            labels = ("end", end), ("reason", reason)
            yield f"kvcupy_migration_{name}_total", labels, count


def positive_seconds(value: Any, name: str) -> float:
    """Check an argument in seconds, and return it as a float."""
    checks.require_number(value, name)
    if not 0 < value <= _MAX_SECONDS:
        raise ValueError(f"{name}: expected more than 0 and at most 1e6 seconds, got {value}")
    return float(value)


def accesses(pool: Pool, pages: Pages, layer: int) -> list[Access]:
    """Describe accesses to a layer of some pages, for observers."""
    return [
        Access(part[page, layer - group.layers.start], name="pages")
        for group in pool.groups if layer in group.layers
        for part in (*group.parts, *group.scale_parts)
        for page in pages.tolist()
    ]  # fmt: skip
