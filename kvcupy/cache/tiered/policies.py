"""Eviction policies: the eviction order of a tier, by name or as a user-defined class."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise, takewhile
from typing import Any, Protocol

from .parts import MASK, parts, untracked

_PIECE_KEYS = 4096


class Policy(Protocol):
    """The eviction order of one tier.

    `victims` yields every key once, in eviction order, and changes nothing. The caller skips keys
    that it may not evict. During the iteration it may `remove` keys already yielded, and calls no
    other method.

    A policy may also have `touch_all(keys)`, which touches keys of an iterable in turn, and
    `set_aside(key)`, which removes a leased key that `victims` has yielded from the order and
    returns its place for `put_back(key, place)`, or None if the key must stay. Without `set_aside`,
    every eviction iterates over the leased keys before its victims.
    """

    def add(self, key: int) -> None: ...  # add an unknown key
    def touch(self, key: int) -> None: ...  # record a use of a known key
    def remove(self, key: int) -> None: ...
    def victims(self) -> Iterator[int]: ...


class Fifo:
    """First in, first out, regardless of use."""

    def __init__(self) -> None:
        # An OrderedDict, since iterating over a dict scans all entries removed from its front.
        self._order: OrderedDict[int, int] = untracked(OrderedDict())  # sequence number by key
        self._num_added = 0
        self._returned: list[tuple[int, int]] = []  # (sequence number, key) of keys put back

    def add(self, key: int) -> None:
        self._num_added += 1
        self._order[key] = self._num_added

    def touch(self, key: int) -> None:
        pass

    def remove(self, key: int) -> None:
        self._merge()
        del self._order[key]

    def set_aside(self, key: int) -> int:
        return self._order.pop(key)

    def put_back(self, key: int, place: int) -> None:
        self._returned.append((place, key))

    def victims(self) -> Iterator[int]:
        self._merge()
        return in_order(self._order)

    def _merge(self) -> None:
        """Merge keys that were put back into the front of the order."""
        if not self._returned:
            return
        last, _ = max(self._returned)
        older = takewhile(lambda item: item[1] < last, self._order.items())
        front = [*self._returned, *((number, key) for key, number in older)]
        for number, key in sorted(front, reverse=True):
            self._order[key] = number
            self._order.move_to_end(key, last=False)
        self._returned = []


class Lru:
    """The least recently used block is evicted first.

    Keys are appended to pieces, each of which has a number. A key that is used again is appended to
    the last piece; its earlier entry becomes stale: `_number_of` has another number. Unlike an
    OrderedDict, no table of all keys is ever rebuilt.
    """

    def __init__(self) -> None:
        self._number_of = parts()  # number of the piece with each key
        self._pieces: dict[int, list[int]] = {}  # by number, the oldest first; without the last
        self._sizes: dict[int, int] = {}  # of these pieces: the number of keys that are not stale
        self._last: dict[int, None] = untracked({})
        self._last_number = 0

    def add(self, key: int) -> None:
        self._number_of[hash(key) & MASK][key] = self._last_number
        self._last[key] = None
        if len(self._last) >= _PIECE_KEYS:
            self._begin_piece()

    def touch(self, key: int) -> None:
        self.touch_all((key,))

    def touch_all(self, keys: Iterable[int]) -> None:
        """Call `touch` for each key; takes less time."""
        last = self._last
        for key in keys:
            if key in last:
                del last[key]
            else:
                number_of = self._number_of[hash(key) & MASK]
                self._sizes[number_of[key]] -= 1
                number_of[key] = self._last_number
            last[key] = None
        if len(last) >= _PIECE_KEYS:
            self._begin_piece()

    def remove(self, key: int) -> None:
        number = self._number_of[hash(key) & MASK].pop(key)
        if number == self._last_number:
            del self._last[key]
        else:
            self._sizes[number] -= 1

    def set_aside(self, key: int) -> int:
        self.remove(key)
        return 0

    def put_back(self, key: int, place: int) -> None:
        self.add(key)  # at the end: the release is the last use

    def victims(self) -> Iterator[int]:
        self._drop_stale_front()
        number_of = self._number_of
        for number in list(self._pieces):
            piece = self._pieces[number]
            if self._sizes[number] == len(piece):
                yield from piece
                continue
            for key in piece:
                if number_of[hash(key) & MASK].get(key) == number:
                    yield key
        yield from in_order(self._last)

    def _drop_stale_front(self) -> None:
        """Drop stale entries before the first key, so that no call passes them again."""
        while self._pieces:
            number = next(iter(self._pieces))
            if not self._sizes[number]:
                del self._pieces[number], self._sizes[number]
                continue
            number_of, piece = self._number_of, self._pieces[number]
            num_stale = 0
            while number_of[hash(key := piece[num_stale]) & MASK].get(key) != number:
                num_stale += 1
            del piece[:num_stale]
            return

    def _begin_piece(self) -> None:
        """Begin another last piece; make up for it by merging pieces that are mostly stale."""
        sizes = self._sizes
        self._pieces[self._last_number] = untracked(list(self._last))
        sizes[self._last_number] = len(self._last)
        self._last, self._last_number = untracked({}), self._last_number + 1
        numbers = list(sizes)
        small = (
            (first, second)
            for first, second in pairwise(numbers)
            if sizes[first] + sizes[second] <= _PIECE_KEYS // 2
        )
        if (pair := next(small, None)) is not None:
            self._merge(*pair)

    def _merge(self, number: int, second: int) -> None:
        """Append the keys of the second piece to the one before it."""
        moved = self._keys(second)
        self._pieces[number] = untracked(self._keys(number) + moved)
        self._sizes[number] += self._sizes.pop(second)
        del self._pieces[second]
        for key in moved:
            self._number_of[hash(key) & MASK][key] = number

    def _keys(self, number: int) -> list[int]:
        """Return the keys of a piece that are not stale."""
        of = self._number_of
        return [key for key in self._pieces[number] if of[hash(key) & MASK].get(key) == number]


class _Bucket:
    """Keys with equal numbers of uses, linked to the neighbouring buckets."""

    __slots__ = ("after", "before", "count", "keys")

    def __init__(self, count: int) -> None:
        self.count = count
        self.keys: OrderedDict[int, None] = untracked(OrderedDict())  # longest unused first
        self.before = self.after = self

    def follow(self, before: _Bucket) -> None:
        self.before, self.after = before, before.after
        before.after.before = before.after = self

    def leave(self) -> None:
        """Leave the ring; `after` stays, for an iteration in progress."""
        self.before.after, self.after.before = self.after, self.before


class Lfu:
    """The least frequently used block is evicted first; ties go to the least recently used.

    Buckets of equal counts form a ring in ascending order, so that `add`, `touch` and `remove` need
    no search.
    """

    def __init__(self) -> None:
        self._ring = _Bucket(0)
        self._count_of: dict[int, int] = untracked({})
        self._bucket_of: dict[int, _Bucket] = {}  # by count

    def add(self, key: int) -> None:
        self._put(key, self._ring, 1)

    def touch(self, key: int) -> None:
        bucket = self._bucket_of[self._count_of[key]]
        self._put(key, bucket, bucket.count + 1)
        self._take(key, bucket)

    def remove(self, key: int) -> None:
        self._take(key, self._bucket_of[self._count_of.pop(key)])

    def set_aside(self, key: int) -> int:
        count = self._count_of[key]
        self.remove(key)
        return count

    def put_back(self, key: int, place: int) -> None:
        before = self._ring
        while before.after is not self._ring and before.after.count < place:
            before = before.after
        self._put(key, before, place)

    def victims(self) -> Iterator[int]:
        bucket = self._ring.after
        while bucket is not self._ring:
            yield from in_order(bucket.keys)
            bucket = bucket.after

    def _put(self, key: int, before: _Bucket, count: int) -> None:
        """Put a key into the bucket of `count`, which belongs after `before`."""
        bucket = before.after
        if bucket is self._ring or bucket.count != count:
            bucket = self._bucket_of[count] = _Bucket(count)
            bucket.follow(before)
        bucket.keys[key] = None
        self._count_of[key] = count

    def _take(self, key: int, bucket: _Bucket) -> None:
        del bucket.keys[key]
        if not bucket.keys:
            bucket.leave()
            del self._bucket_of[bucket.count]


class TwoQueues:
    """Blocks used once are evicted before blocks used again, so a long scan evicts few of those.

        add -> [ once, in order of arrival ] -- touch --> [ again, longest unused first ]
                     | remove                                  ^
                     v                                         |
               [ ghosts: keys only ] ------------- add --------'

    The first queue is limited to a quarter of the blocks, and the ghosts to the number of blocks.
    Source: Johnson and Shasha, "2Q", VLDB 1994, with promotion on the second use.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[int, None] = untracked(OrderedDict())
        self._again: OrderedDict[int, None] = untracked(OrderedDict())
        self._ghosts: OrderedDict[int, None] = untracked(OrderedDict())
        self._num_aside = 0

    def add(self, key: int) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None

    def touch(self, key: int) -> None:
        if key in self._once:
            del self._once[key]
            self._again[key] = None
        else:
            self._again.move_to_end(key)

    def remove(self, key: int) -> None:
        num_blocks = self._num_blocks
        if key in self._again:
            del self._again[key]
        else:
            del self._once[key]
            self._ghosts[key] = None
        while len(self._ghosts) > num_blocks:
            self._ghosts.popitem(last=False)

    def set_aside(self, key: int) -> int | None:
        if key in self._once:  # removing it would change which keys are in the first quarter
            return None
        del self._again[key]
        self._num_aside += 1
        return 0

    def put_back(self, key: int, place: int) -> None:
        self._again[key] = None
        self._num_aside -= 1

    @property
    def _num_blocks(self) -> int:
        return len(self._once) + len(self._again) + self._num_aside

    def victims(self) -> Iterator[int]:
        share = max(1, self._num_blocks // 4)
        once = in_order(self._once)
        yield from islice(once, max(0, len(self._once) - share))
        yield from in_order(self._again)
        yield from once


_POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": Lru, "fifo": Fifo, "lfu": Lfu, "2q": TwoQueues,
}  # fmt: skip
_METHODS = ("add", "touch", "remove", "victims")


def make(policy: Any) -> Policy:
    """Create an eviction order by name, or from a class or function without arguments.

    >>> order = make("lru")
    >>> for key in (1, 2, 3):
    ...     order.add(key)
    >>> order.touch(1)
    >>> list(order.victims())
    [2, 3, 1]
    """
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(_POLICIES)}, got {policy!r}")
        return _POLICIES[policy]()
    if not callable(policy):
        raise TypeError(f"policy: expected a name or a class, got {policy!r}")
    order: Policy = policy()
    if lacking := [name for name in _METHODS if not callable(getattr(order, name, None))]:
        raise TypeError(f"policy: expected one with {', '.join(lacking)}, got {order!r}")
    return order


def in_order(order: dict[int, Any]) -> Iterator[int]:
    """Yield keys in order; yielded keys may be removed meanwhile.

    Reads keys in growing pieces: a few keys cost little, and all keys cost a constant each.
    """
    yielded: list[int] = []
    passed = 0
    while piece := list(islice(order, passed, passed + 16 + len(yielded))):
        yield from piece
        yielded += piece
        passed = sum(key in order for key in yielded)
