"""The old tokens of a paged cache in a narrower format, in a pool of their own.

    pages of a sequence   | sinks | demoted ...        | recent ...      | new tokens
    pool                  | dtype | past               | dtype

A full page that has left the recent window is converted on the copy stream, behind all work on it
so far, and freed. Where tokens are appended to a demoted page, it is converted back first.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ... import metrics
from ...devices.protocol import Stream
from ...formats import CACHE_FORMATS, FORMATS, Encoding, bytes_per_element
from ...ops import checks
from ...ops.page_pairs import upload
from ...ops.store import gather_kv, store_kv
from ..pool import KVPool, Pool, positive_int
from .layers import Layers, borrow
from .moves import PageMover
from .sequences import Ints


@dataclass(frozen=True)
class Demotion:
    """How a `PagedKVCache` keeps old tokens: in a narrower encoding, in pages of another pool.

    Parameters
    ----------
    encoding : an Encoding or its string, narrower than the cache's dtype
    recent : tokens of a sequence that stay in the cache's dtype: at least the last `recent` before
        each step
    first : tokens that stay there too: the first of a sequence
    num_pages : pages for old tokens; None: as many as the cache has

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Examples
    --------
    >>> Demotion("nvfp4+hadamard", recent=64, first=4).encoding.format
    'nvfp4'
    """

    encoding: Encoding
    _: KW_ONLY
    recent: int
    first: int = 0
    num_pages: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoding", Encoding.of(self.encoding, "encoding"))
        for name in ("recent", "first"):
            value = getattr(self, name)
            checks.require_int(value, name)
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
            object.__setattr__(self, name, int(value))
        if self.num_pages is not None:
            object.__setattr__(self, "num_pages", positive_int(self.num_pages, "num_pages"))


class Past:
    """The pool of old tokens, and what is moved into it, out of it and within it.

    Pages are numbered as in sequences: those of the past follow those of the cache's own pool.

    Parameters
    ----------
    wide_pool, pool : the pool of the cache, and that of old tokens
    wide, past : their layers

    Attributes
    ----------
    pool, layers : the pool of old tokens, and its layers
    recent, sinks : tokens that stay as they are: the last, and the first
    """

    def __init__(
        self, wide_pool: Pool, pool: KVPool, wide: Layers, past: Layers, recent: int, sinks: int
    ) -> None:
        self.pool, self.recent, self.sinks = pool, recent, sinks
        self.layers, self._wide_pool, self._wide = past, wide_pool, wide
        self._mover = PageMover(pool)

    def copy_pages(self, wide: PageMover, src: Any, dst: Any, stream: Stream) -> None:
        """Copy pages onto pages of either pool, converted where they are of different pools.

        `wide` copies within the pool of the cache. Bytes: converted rows pass through a buffer in
        the cache's format (float32 if that is quantised); each is read and written twice.
        """
        sources, targets = np.asarray(src, np.int64), np.asarray(dst, np.int64)
        first = self._wide_pool.num_pages
        from_past, to_past = sources >= first, targets >= first
        same = ~from_past & ~to_past
        if same.any():
            wide.copy_pages(sources[same], targets[same], stream)
        same = from_past & to_past
        if same.any():
            self._mover.copy_pages(sources[same] - first, targets[same] - first, stream)
        demoted = ~from_past & to_past
        if demoted.any():
            self._convert(
                self._wide, self.layers, sources[demoted], targets[demoted] - first, stream
            )
        promoted = from_past & ~to_past
        if promoted.any():
            self._convert(
                self.layers, self._wide, sources[promoted] - first, targets[promoted], stream
            )
            self._wide_pool.note_written()
            metrics.add("kvcupy_promoted_pages_total", int(promoted.sum()))

    def _convert(self, src: Layers, dst: Layers, sources: Ints, targets: Ints, s: Stream) -> None:
        slots = upload([self._slots(sources), self._slots(targets)], self.pool.device, s)
        quantised = CACHE_FORMATS[self._wide_pool.dtype].quantised
        format = "fp32" if quantised else self._wide_pool.dtype
        count = slots.shape[1]
        key, value = (
            borrow(self.pool.device, (count, self.pool.num_kv_heads, width), format, s)
            for width in (self.pool.head_dim, self.pool.v_head_dim)
        )
        for source, target in zip(src.caches, dst.caches, strict=True):
            gather_kv(slots=slots[0], k_out=key, v_out=value, stream=s, **source)
            store_kv(key, value, slot_mapping=slots[1], stream=s, **target)

    def _slots(self, pages: Ints) -> Ints:
        size = self.pool.page_size
        slots: Ints = (pages[:, None] * size + np.arange(size)).ravel()
        return slots


def wide_format(pool: Pool) -> str:
    """Return the format in which rows of a pool are read: its own, or bf16 if it is quantised."""
    return "bf16" if CACHE_FORMATS[pool.dtype].quantised else pool.dtype


def past_pool_of(pool: Pool, demotion: Demotion | None) -> KVPool | None:
    """Return a pool for the old tokens of a cache, or None if it has none; check the arguments."""
    if demotion is None:
        return None
    if not isinstance(demotion, Demotion):
        raise TypeError(f"demotion: expected a Demotion, got {demotion!r}")
    if not isinstance(pool, KVPool):
        raise ValueError(f"demotion: expected None with latent_dim, got {demotion}")
    format = demotion.encoding.format
    if bytes_per_element(format) >= bytes_per_element(pool.dtype):
        raise ValueError(f"demotion: expected a format narrower than {pool.dtype}, got {format}")
    own = FORMATS.get(format)  # groups of a four-bit format have scales anyway
    return KVPool(
        pool.num_pages if demotion.num_pages is None else demotion.num_pages,
        pool.page_size, pool.num_layers, pool.num_kv_heads, pool.head_dim,
        v_head_dim=pool.v_head_dim, dtype=demotion.encoding,
        scales=own is not None and own.quantised, device=pool.device,
    )  # fmt: skip
