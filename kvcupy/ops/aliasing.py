"""Whether the arrays of a call go together, decided by the distances between their addresses.

How far an array reaches from its address is part of a call's signature. So whether two arrays share
a byte depends on the distance between them alone, and most distances are longer than the arrays:
two comparisons of integers then decide, for addresses that no call has had before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from ..arrays import ArrayView, overlap

_Layout = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides and format

_ANYWHERE = 1 << 52  # an address, far from those that do not exist


class Aliasing:
    """What the addresses of every call of one signature must satisfy.

    Parameters
    ----------
    views : of one such call: what is touched of each array, None for what is no array
    outputs : which of them are written. They share no byte with one another or with an input
    in_place : (output, input) that may nevertheless have one address: what is read is written
    """

    def __init__(
        self,
        views: Sequence[ArrayView | None],
        outputs: Collection[int],
        in_place: Collection[tuple[int, int]] = (),
    ) -> None:
        arrays = {i: v for i, v in enumerate(views) if v is not None}
        self._strides_fit = not any(n % v.itemsize for v in arrays.values() for n in v.strides)
        self._itemsizes = [(i, v.itemsize) for i, v in arrays.items() if v.itemsize > 1]
        self._layouts = {i: (v.shape, v.strides, v.format) for i, v in arrays.items() if v.size}
        self._in_place = frozenset(in_place)
        # With the distances between which byte ranges intersect.
        self._pairs: list[tuple[int, int, int, int]] = []
        reach = {i: _reach(arrays[i]) for i in self._layouts}
        written = [i for i in outputs if i in reach]
        others = [j for j in reach if j not in written]
        for n, i in enumerate(written):
            low, high = reach[i]
            for j in (*written[n + 1 :], *others):
                self._pairs.append((i, j, low - reach[j][1], high - reach[j][0]))

    def allows(self, addresses: Sequence[int]) -> bool:
        """Return whether elements lie at multiples of their size, and outputs by themselves."""
        for i, itemsize in self._itemsizes:
            if addresses[i] % itemsize:
                return False
        for i, j, nearest, farthest in self._pairs:
            distance = addresses[j] - addresses[i]
            if nearest < distance < farthest and self._share(i, j, distance):
                return False
        return self._strides_fit

    def _share(self, i: int, j: int, distance: int) -> bool:
        if distance == 0 and (i, j) in self._in_place:
            return False
        return _share_bytes(self._layouts[i], self._layouts[j], distance)


def _reach(view: ArrayView) -> tuple[int, int]:
    """Return from where to where a view reaches, in bytes from its address."""
    low, high = view.byte_range()
    return low - view.pointer, high - view.pointer


@lru_cache(maxsize=4096)  # interleaved arrays, K and V of one pool say, keep their distance
def _share_bytes(layout: _Layout, other: _Layout, distance: int) -> bool:
    """Return whether two arrays share a byte, the second `distance` bytes after the first."""
    first = ArrayView(_ANYWHERE, *layout, "host")
    return overlap(first, ArrayView(_ANYWHERE + distance, *other, "host"))
