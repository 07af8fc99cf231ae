"""Copies of pages within a pool, moves of tokens, and demotion to a pool in a narrower format.

    pages of a sequence   | sinks | demoted ...        | recent ...      | new tokens
    pool                  | dtype | demoted               | dtype

A full page that has left the recent window is demoted: converted on the copy stream, after all
work on it so far, and freed. Where tokens are appended to a demoted page, it is converted back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import devices, metrics
from ...arrays import ArrayView, bytes_of, describe, reshaped, view_as
from ...devices.protocol import Stream
from ...formats import CACHE_FORMATS
from ...ops.pages import copy_pages
from ...ops.store import gather_kv, store_kv
from ...ops.transfer_kernels import PagePairs, upload
from ..pool import KVPool, Pool
from .layers import Layers, borrow
from .sequences import Ints

Caches = Sequence[Mapping[str, Any]]  # of each layer, the arguments that name its arrays

_NAMES = ("src", "dst")


# --- Within a pool ---


class PageMover:
    """Copies pages, and moves tokens, of every layer of a pool: K, V and their scales.

    `src` and `dst` of both methods are int32 or int64 arrays of the host, or lists of ints, (N,);
    they are read during the call and may be reused at once. Stream: one copy that brings both to
    the device, then kernels, in order. Capture: legal; a graph repeats what was captured.

    Parameters
    ----------
    pool : of layout "layer_first", or one in which slots are evenly spaced within each layer

    Examples
    --------
    >>> import kvcupy as kv
    >>> pool = kv.KVPool(4, 2, 1, 1, 8, dtype="fp32", device="host")
    >>> pool.k(0)[3] = 7
    >>> mover = PageMover(pool)
    >>> mover.copy_pages([3], [0])
    >>> mover.move_slots([1, 7], [2, 1])
    >>> pool.k(0)[:2, :, 0, 0].tolist()
    [[7.0, 7.0], [7.0, 0.0]]
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._pages = (*map(bytes_of, pool.parts), *pool.scale_parts)
        # Wrapped arrays may have heads before slots, or V between the pages of K.
        self._uneven_parts = [
            pool.views(layer)
            for group in pool.groups
            if pool.layout == "layer_first" and not all(map(_is_even, group.parts))
            for layer in group.layers
        ]
        self._uneven = [_halves(tuple(map(_as_numbers, parts))) for parts in self._uneven_parts]
        even = [g for g in pool.groups if not self._uneven or all(map(_is_even, g.parts))]
        self._slots = tuple(
            _slots_first(bytes_of(v)) for g in even for v in (*g.parts, *g.scale_parts)
        )
        self._device = devices.get(self._pages[0].device)
        self._library = self._pages[0].library

    def copy_pages(self, src: Any, dst: Any, stream: Any = None) -> None:
        """Copy pages onto other pages, in one launch per array.

        No page may be written twice, or both read and written. Bytes: each copied page is read once
        and written once.
        """
        sources, targets = _pairs(src, dst, self._pool.num_pages, "pages")
        touched = set(sources.tolist())
        for page in targets.tolist():
            if page in touched:
                raise ValueError(f"dst: expected each page once and none of src, got {page} too")
            touched.add(page)
        self._copy(self._pages, [], [(sources, targets)], stream)

    def move_slots(self, src: Any, dst: Any, stream: Any = None) -> None:
        """Copy tokens to other slots, as if one after another in the order of the arguments.

        A slot, `page * page_size + offset`, may occur any number of times on either side.

        Per array one launch, or as many as the longest chain of moves that must follow one another.
        Bytes: each token is read once and written once; twice where slots are spaced unevenly, by
        way of a buffer and with two launches per layer.
        """
        pairs = _pairs(src, dst, self._pool.num_pages * self._pool.page_size, "slots")
        self._copy(self._slots, self._uneven, _independent(*pairs), stream)

    def _copy(
        self, arrays: tuple[ArrayView, ...], uneven: list[tuple[ArrayView, ArrayView]],
        batches: list[tuple[Ints, Ints]], stream: Any,
    ) -> None:  # fmt: skip
        """Copy rows of the first axis, and slots of uneven layers, batch by batch."""
        stream = self._device.as_stream(stream, self._library)
        sources, targets = (np.concatenate(side) for side in zip(*batches, strict=True))
        if len(sources) == 0:
            return
        uploaded = upload([sources, targets], self._device, stream)
        start = 0
        for batch, _ in batches:
            part = slice(start, start + len(batch))
            if arrays:
                copy_pages(arrays, uploaded[0, part], uploaded[1, part], stream=stream)
            for k, v in uneven:
                key, value = (
                    borrow(self._device, (len(batch), *cache.shape[2:]), cache.format, stream)
                    for cache in (k, v)
                )
                gather_kv(k, v, uploaded[0, part], k_out=key, v_out=value, stream=stream)
                store_kv(key, value, k, v, uploaded[1, part], stream=stream)
            start = part.stop
        self._pool.note_written()


# --- Between pools ---


class DemotedPages:
    """The pool of old tokens, with copies of pages into it, out of it and within it.

    Pages are numbered as in sequences: the pool's pages follow the pages of the wide pool.

    wide_pool, wide : the pool of pages in dtype and its layers
    pool, demoted : the pool of demoted pages and its layers
    recent, sinks : numbers of the last and the first tokens that are not demoted
    """

    def __init__(
        self, wide_pool: Pool, pool: KVPool, wide: Layers, demoted: Layers, recent: int, sinks: int
    ) -> None:
        self.pool, self.recent, self.sinks = pool, recent, sinks
        self.layers, self._wide_pool, self._wide = demoted, wide_pool, wide
        self._mover = PageMover(pool)

    def copy_pages(self, wide: PageMover, src: Any, dst: Any, stream: Stream) -> None:
        """Copy pages onto pages of either pool, converted where they are of different pools.

        `wide` copies within the pool of the cache. Bytes: converted rows pass through a buffer in
        the cache's format (float32 if that is quantised); each is read and written twice.
        """
        sources, targets = np.asarray(src, np.int64), np.asarray(dst, np.int64)
        first = self._wide_pool.num_pages
        from_demoted, to_demoted = sources >= first, targets >= first
        same = ~from_demoted & ~to_demoted
        if same.any():
            wide.copy_pages(sources[same], targets[same], stream)
        same = from_demoted & to_demoted
        if same.any():
            self._mover.copy_pages(sources[same] - first, targets[same] - first, stream)
        demoted = ~from_demoted & to_demoted
        if demoted.any():
            slots = self._slots(sources[demoted]), self._slots(targets[demoted] - first)
            self._convert(self._wide.caches, self.layers.caches, *slots, stream)
        promoted = from_demoted & ~to_demoted
        if promoted.any():
            slots = self._slots(sources[promoted] - first), self._slots(targets[promoted])
            self._convert(self.layers.caches, self._wide.caches, *slots, stream)
            self._wide_pool.note_written()
            metrics.add("kvcupy_promoted_pages_total", int(promoted.sum()))

    def convert_back(self, slots: Ints, targets: Caches, stream: Stream) -> None:
        """Store demoted tokens in flat caches of the wide pool's format, one after another."""
        self._convert(self.layers.caches, targets, slots, np.arange(len(slots)), stream)

    def _convert(self, src: Caches, dst: Caches, sources: Ints, targets: Ints, s: Stream) -> None:
        """Convert tokens from slots of `src` to slots of `dst`, in every layer."""
        slots = upload([sources, targets], self.pool.device, s)
        quantised = CACHE_FORMATS[self._wide_pool.dtype].quantised
        format = "fp32" if quantised else self._wide_pool.dtype
        count = slots.shape[1]
        key, value = (
            borrow(self.pool.device, (count, self.pool.num_kv_heads, width), format, s)
            for width in (self.pool.head_dim, self.pool.v_head_dim)
        )
        for source, target in zip(src, dst, strict=True):
            gather_kv(slots=slots[0], k_out=key, v_out=value, stream=s, **source)
            store_kv(key, value, slot_mapping=slots[1], stream=s, **target)

    def _slots(self, pages: Ints) -> Ints:
        size = self.pool.page_size
        slots: Ints = (pages[:, None] * size + np.arange(size)).ravel()
        return slots


# --- Arguments of copies ---


def _independent(src: Ints, dst: Ints) -> list[tuple[Ints, Ints]]:
    """Sort moves into the fewest batches, in each of which no slot is both read and written.

    A move goes after moves that write its source, and after moves that read its target. Of the
    moves of a batch to the same slot the last remains, for no other move reads the slot.

    >>> for s, d in _independent(np.array([5, 6, 9, 7]), np.array([4, 5, 8, 6])):
    ...     print(s, "to", d)
    [5 9] to [4 8]
    [6] to [5]
    [7] to [6]
    """
    read: dict[int, int] = {}  # by slot, the last batch that reads it
    written: dict[int, int] = {}  # and the last that writes it
    batches: list[dict[int, int]] = [{}]  # target: source
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        if source == target:
            continue
        batch = max(written.get(source, -1) + 1, read.get(target, -1) + 1, written.get(target, 0))
        if batch == len(batches):
            batches.append({})
        batches[batch][target] = source
        written[target] = batch
        read[source] = max(batch, read.get(source, 0))
    return [
        (np.array([*moves.values()], np.int64), np.array([*moves], np.int64)) for moves in batches
    ]


def _pairs(src: Any, dst: Any, count: int, what: str) -> list[Ints]:
    """Return copies of both lists as int64 arrays, with numbers from 0 to count - 1."""
    pairs = PagePairs(src, dst, _NAMES)
    sides = []
    for name, numbers, array in zip(_NAMES, (pairs.src, pairs.dst), pairs.views, strict=True):
        if numbers is None:
            raise TypeError(f"{name}: expected an array of the host, got one on {array.device}")
        if ((numbers < 0) | (numbers >= count)).any():
            outside = numbers[(numbers < 0) | (numbers >= count)][0]
            raise ValueError(f"{name}: expected {what} from 0 to {count - 1}, got {outside}")
        sides.append(numbers)
    return sides


def _is_even(part: ArrayView) -> bool:
    """Return whether the slots of (pages, layers, page_size, ...) are evenly spaced."""
    pages, _, page_size, *_ = part.shape
    return 1 in (pages, page_size) or part.strides[0] == page_size * part.strides[2]


def _as_numbers(v: ArrayView) -> ArrayView:
    """Return a view in a format of whole bytes, for copies without conversion."""
    return v if v.scales is None else view_as(bytes_of(v), "int8")


def _halves(views: tuple[ArrayView, ...]) -> tuple[ArrayView, ArrayView]:
    """Return K and V of one layer, or the two halves of a latent's width."""
    if len(views) == 2:
        return views[0], views[1]
    half = views[0].shape[-1] // 2
    if half == 0:
        raise ValueError(f"pool: expected evenly spaced slots, got {describe(views[0])}")
    return views[0][..., :half], views[0][..., half:]


def _slots_first(part: ArrayView) -> ArrayView:
    """View (pages, layers, page_size, heads, width) as (slots, layers, heads, width)."""
    pages, layers, page_size, *row = part.shape
    page_bytes, layer_bytes, slot_bytes, *row_bytes = part.strides
    if page_size == 1:
        slot_bytes = page_bytes
    if not _is_even(part):
        raise ValueError(
            f"pool: expected evenly spaced slots, as in layout layer_first, got {describe(part)} "
            f"with strides of {part.strides} bytes"
        )
    return reshaped(part, (pages * page_size, layers, *row), (slot_bytes, layer_bytes, *row_bytes))
