"""Copies within a pool: whole pages, and tokens from slot to slot."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import devices, scratch
from ...arrays import ArrayView, contiguous_strides, describe, reshaped
from ...devices.protocol import Stream
from ...ops.page_pairs import PagePairs, send
from ...ops.pages import copy_pages
from ...ops.store import gather_kv, store_kv
from ..storage import Pool

_NAMES = ("src", "dst")


class PageMover:
    """Copies pages, and moves tokens, of every layer of a pool: K, V and their scales.

    Parameters
    ----------
    pool : of layout "layer_first", or one in which slots are evenly spaced within each layer

    Raises
    ------
    ValueError : the pool is neither

    Notes
    -----
    `src` and `dst` of both methods are int32 or int64 arrays of the host, or lists of ints, (N,);
    they are read during the call and may be reused at once. Stream: one copy that brings both to
    the device, then kernels, in order. Capture: legal; a graph repeats what was captured.

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
        self._pages = (*pool.parts, *pool.scale_parts)
        # Arrays of others may have heads before slots, or V between the pages of K.
        self._uneven = [
            _halves(pool.views(layer))
            for group in pool.groups
            if pool.layout == "layer_first" and not all(map(_is_even, group.parts))
            for layer in group.layers
        ]
        even = [g for g in pool.groups if not self._uneven or all(map(_is_even, g.parts))]
        self._slots = tuple(_slots_first(v) for g in even for v in (*g.parts, *g.scale_parts))
        self._num_pages, self._page_size = pool.num_pages, pool.page_size
        self._device = devices.get(self._pages[0].device)
        self._library = self._pages[0].library

    def copy_pages(self, src: Any, dst: Any, stream: Any = None) -> None:
        """Copy pages onto other pages, in one launch an array.

        Parameters
        ----------
        src, dst : page numbers (N,); no page is written twice, or both read and written
        stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

        Raises
        ------
        TypeError, ValueError : an argument does not fit; nothing was written
        CompileError : the kernel cannot be compiled and `config.fallback` is "error"

        Notes
        -----
        Bytes: each copied page is read once and written once.
        """
        sources, targets = _pairs(src, dst, self._num_pages, "pages")
        taken = set(sources.tolist())
        for page in targets.tolist():
            if page in taken:
                raise ValueError(f"dst: expected each page once and none of src, got {page} too")
            taken.add(page)
        self._copy(self._pages, [], [(sources, targets)], stream)

    def move_slots(self, src: Any, dst: Any, stream: Any = None) -> None:
        """Copy tokens to other slots, as if one after another in the order given.

        Parameters
        ----------
        src, dst : slots (N,), `page * page_size + offset`. A slot may occur any number of times on
            either side
        stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

        Raises
        ------
        TypeError, ValueError : an argument does not fit; nothing was written
        CompileError : the kernel cannot be compiled and `config.fallback` is "error"

        Notes
        -----
        As many launches an array as the longest chain of moves that must wait for one another has;
        one if none of the slots written is read. Bytes: each token is read once and written once;
        twice where slots are spaced unevenly, by way of a buffer and with two launches a layer.
        """
        pairs = _pairs(src, dst, self._num_pages * self._page_size, "slots")
        self._copy(self._slots, self._uneven, _independent(*pairs), stream)

    def _copy(
        self,
        arrays: tuple[ArrayView, ...],
        uneven: list[tuple[ArrayView, ArrayView]],
        batches: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]],
        stream: Any,
    ) -> None:
        """Copy rows of the first axis, and slots of uneven layers, batch by batch."""
        on = self._device.as_stream(stream, self._library)
        sources, targets = (np.concatenate(side) for side in zip(*batches, strict=True))
        if len(sources) == 0:
            return
        sent = send([sources, targets], self._device, on)
        start = 0
        for batch, _ in batches:
            part = slice(start, start + len(batch))
            if arrays:
                copy_pages(arrays, sent[0, part], sent[1, part], stream=on)
            for k, v in uneven:
                rows = [self._space(cache, len(batch), on) for cache in (k, v)]
                gather_kv(k, v, sent[0, part], k_out=rows[0], v_out=rows[1], stream=on)
                store_kv(rows[0], rows[1], k, v, sent[1, part], stream=on)
            start = part.stop
        self._pool.note_written()

    def _space(self, cache: ArrayView, count: int, on: Stream) -> ArrayView:
        """Return a buffer for tokens of (pages, slots, heads, width)."""
        shape = (count, *cache.shape[2:])
        strides = contiguous_strides(shape, cache.itemsize)
        lent = scratch.borrow(self._device, count * strides[0], on)
        return ArrayView(
            lent.pointer, shape, strides, cache.format, lent.device,
            library=lent.library, owner=lent.owner,
        )  # fmt: skip


def _independent(
    src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Sort moves into the fewest batches, in each of which no slot is both read and written.

    A move goes behind those that write what it reads, and behind those that read what it writes;
    of moves of a batch to the same slot the last remains, for nothing reads what the others wrote.

    >>> for s, d in _independent(np.array([5, 6, 9, 7]), np.array([4, 5, 8, 6])):
    ...     print(s, "to", d)
    [5 9] to [4 8]
    [6] to [5]
    [7] to [6]
    """
    read: dict[int, int] = {}  # the last batch that reads a slot, and that writes one
    written: dict[int, int] = {}
    batches: list[dict[int, int]] = [{}]  # target: source
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        if source == target:
            continue
        place = max(written.get(source, -1) + 1, read.get(target, -1) + 1, written.get(target, 0))
        if place == len(batches):
            batches.append({})
        batches[place][target] = source
        written[target] = place
        read[source] = max(place, read.get(source, 0))
    return [
        (np.array([*batch.values()], np.int64), np.array([*batch], np.int64)) for batch in batches
    ]


def _pairs(src: Any, dst: Any, count: int, what: str) -> list[np.ndarray[Any, Any]]:
    """Return both lists as int64 arrays of their own, all numbers of them in 0..count-1."""
    pairs = PagePairs(src, dst, _NAMES)
    sides = []
    for name, numbers, given in zip(_NAMES, (pairs.src, pairs.dst), pairs.views, strict=True):
        if numbers is None:
            raise TypeError(f"{name}: expected an array of the host, got one on {given.device}")
        if ((numbers < 0) | (numbers >= count)).any():
            outside = numbers[(numbers < 0) | (numbers >= count)][0]
            raise ValueError(f"{name}: expected {what} from 0 to {count - 1}, got {outside}")
        sides.append(numbers)
    return sides


def _is_even(part: ArrayView) -> bool:
    """Return whether the slots of (pages, layers, page_size, ...) are evenly spaced."""
    pages, _, page_size, *_ = part.shape
    return 1 in (pages, page_size) or part.strides[0] == page_size * part.strides[2]


def _halves(views: tuple[ArrayView, ...]) -> tuple[ArrayView, ArrayView]:
    """Return K and V of a layer; of a latent the two halves of its width."""
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
