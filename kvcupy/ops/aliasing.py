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
        self._in_place = frozenset(in_place)
        self._strides_fit = True
        self._itemsizes: list[tuple[int, int]] = []
        self._layouts: dict[int, _Layout] = {}
        reach: dict[int, tuple[int, int]] = {}  # in bytes from the address; empty arrays have none
        for i, v in enumerate(views):
            if v is None:
                continue
            if v.itemsize > 1:
                self._itemsizes.append((i, v.itemsize))
                self._strides_fit &= not any([n % v.itemsize for n in v.strides])
            low, high = v.byte_range()
            if low < high:
                reach[i] = low - v.pointer, high - v.pointer
                self._layouts[i] = v.shape, v.strides, v.format
        # Two arrays, and the distances between which their byte ranges intersect.
        self._pairs: list[tuple[int, int, int, int]] = []
        for i in outputs:
            if i not in reach:
                continue
            low, high = reach.pop(i)
            self._pairs += [(i, j, low - to, high - start) for j, (start, to) in reach.items()]

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


@lru_cache(maxsize=4096)  # interleaved arrays, K and V of one pool say, keep their distance
def _share_bytes(layout: _Layout, other: _Layout, distance: int) -> bool:
    """Return whether two arrays share a byte, the second `distance` bytes after the first."""
    first = ArrayView(_ANYWHERE, *layout, "host")
    return overlap(first, ArrayView(_ANYWHERE + distance, *other, "host"))
