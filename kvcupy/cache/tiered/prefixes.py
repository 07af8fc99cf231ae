"""Which blocks of several groups of layers a prefix can still use: a tree of prefixes.

    full attention   [0][1][2][3][4][5]      all blocks of a prefix
    window                     [3][4][5]     its last blocks, and its first for sink tokens
    state                            [5]     the one at its end

A prefix is usable while every group has what it needs of it. A block is reachable while a usable
prefix needs it. The other blocks are discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..pool import Pool


@dataclass(frozen=True)
class GroupBlocks:
    """The blocks that a group needs of a prefix.

    Attributes
    ----------
    num_last : how many of the last ones; None: all
    num_first : how many of the first ones too
    interval : the length of a usable prefix is a multiple of so many blocks
    is_state : whether a block is the state at the end of a prefix

    Examples
    --------
    >>> GroupBlocks(num_last=2, num_first=1).needed(5)
    [0, 3, 4]
    """

    num_last: int | None = None
    num_first: int = 0
    interval: int = 1
    is_state: bool = False

    def can_serve(self, index: int) -> bool:
        """Return whether some usable prefix could need a block."""
        if self.num_last is None or index < self.num_first:
            return True
        return self.interval - index % self.interval <= self.num_last

    def needed(self, length: int) -> list[int]:
        """Return the indices of the blocks that the group needs of a prefix of `length` blocks."""
        if self.num_last is None:
            return list(range(length))
        start = max(0, length - self.num_last)
        return [*range(min(self.num_first, start)), *range(start, length)]


@dataclass(frozen=True)
class TierGroup:
    """A group of layers whose blocks are kept in tiers.

    Attributes
    ----------
    name : distinguishes it from the other groups of the model, the same in every process
    pool : of its pages on the device
    blocks : which ones it needs of a prefix
    layers : for each layer of the pool, its number in the model
    window : how many keys a query sees; 0: all
    """

    name: str
    pool: Pool
    blocks: GroupBlocks
    layers: tuple[int, ...]
    window: int = 0


def longest(
    groups: Sequence[GroupBlocks], length: int,
    first_missing: Callable[[int, Sequence[int]], int | None],
) -> int:  # fmt: skip
    """Return the length of the longest usable prefix of up to `length` blocks.

    Parameters
    ----------
    first_missing : returns the first of some blocks of a group, by index, that is missing, or None

    Examples
    --------
    >>> groups = [GroupBlocks(), GroupBlocks(num_last=2)]
    >>> has = [{0, 1, 2, 3, 4}, {1, 2, 4}]
    >>> longest(groups, 9, lambda g, indices: next((i for i in indices if i not in has[g]), None))
    3
    """
    for number, group in enumerate(groups):
        if group.num_last is None and length:
            missing = first_missing(number, range(length))
            length = length if missing is None else missing
    # A prefix that does not end before a missing block needs it too.
    others = [(i, group) for i, group in enumerate(groups) if group.num_last is not None]
    others.sort(key=lambda item: not item[1].is_state)  # they rule out the most
    is_usable = False
    while length and not is_usable:
        is_usable = True
        for number, group in others:
            missing = length - length % group.interval
            if missing == length:
                first = first_missing(number, group.needed(length))
                if first is None:
                    continue
                missing = first
            length, is_usable = missing, False
            break
    return length


class _Node:
    """A prefix, by the hash of its last block."""

    __slots__ = ("children", "depth", "full", "is_usable", "nearest", "parent", "runs", "users")

    def __init__(self, parent: int | None, depth: int, full: tuple[int, ...]) -> None:
        self.parent, self.depth = parent, depth
        # Of each group that needs last blocks: how many there can be, and how many are there
        # without a gap, not counting the blocks of users.
        self.full = self.runs = full
        self.children: set[int] = set()
        self.users = 0  # sequences and leases
        self.nearest = 0  # blocks from its end to the end of the nearest usable or used prefix
        self.is_usable = False


class Prefixes:
    """The prefixes whose blocks are in the tiers of a cache of groups.

    Every leaf is usable or has users. The caller holds a lock.

    Parameters
    ----------
    groups : what each needs
    has : for each group, called with hashes; returns whether a tier has each block
    discard : for each group, called with the hashes of unreachable blocks, of which some may not be
        there
    """

    def __init__(
        self, groups: Sequence[GroupBlocks],
        has: Sequence[Callable[[Sequence[int]], Sequence[bool]]],
        discard: Sequence[Callable[[Sequence[int]], None]],
    ) -> None:  # fmt: skip
        numbered = list(enumerate(groups))
        self._all, self._none = [True] * len(groups), [False] * len(groups)
        self._whole = [i for i, group in numbered if group.num_last is None]
        self._last = [(i, g.num_last, g.num_first) for i, g in numbered if g.num_last is not None]
        self._interval = math.lcm(*(group.interval for group in groups))
        self._most = max((num_last for _, num_last, _ in self._last), default=0)
        self._full = [  # by the number of blocks of a prefix, up to the most
            tuple(min(depth, num_last) for _, num_last, _ in self._last)
            for depth in range(self._most + 1)
        ]
        self._has, self._discard = has, discard
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def enter(self, hashes: Sequence[int]) -> None:
        """Add a user of a prefix, and of all prefixes of it."""
        nodes, most = self._nodes, self._most
        changed: list[_Node] = []
        parent, above = None, None
        for depth, hash in enumerate(hashes, 1):
            node = nodes.get(hash)
            if node is None:
                node = nodes[hash] = _Node(parent, depth, self._full[min(depth, most)])
                if above is not None:
                    above.children.add(hash)
            elif not node.users:
                node.nearest = 0
                if node.runs != node.full:
                    changed.append(node)
            node.users += 1
            parent, above = hash, node
        self._update([hash for node in changed for hash in node.children])

    def leave(self, hashes: Sequence[int]) -> None:
        """Remove a user that has entered; discard what nobody can use any more."""
        unused = []
        for hash in hashes:
            node = self._nodes[hash]
            node.users -= 1
            if not node.users:
                node.runs = node.full  # until now
                unused.append(hash)
        self._update(unused)

    def lost(self, hashes: Iterable[int]) -> None:
        """Discard what is unreachable without blocks that groups have lost."""
        known = [hash for hash in dict.fromkeys(hashes) if hash in self._nodes]
        self._update(sorted(known, key=lambda hash: self._nodes[hash].depth))

    def clear(self) -> None:
        """Forget the prefixes without users, whose blocks are gone."""
        used = {hash: node for hash, node in self._nodes.items() if node.users}
        for node in used.values():
            node.children &= used.keys()
        self._nodes = used

    # --- Usable prefixes ---

    def _update(self, hashes: Sequence[int]) -> None:
        """Evaluate prefixes without users, parents first, and longer ones that depend on them."""
        nodes = self._nodes
        evaluated: dict[int, Sequence[bool]] = {}  # which groups have their blocks
        removed: list[int] = []
        while hashes := [hash for hash in hashes if not nodes[hash].users]:
            present = [has_blocks(hashes) for has_blocks in self._has]
            evaluating, longer = set(hashes), list[int]()
            for hash, has in zip(hashes, zip(*present, strict=True), strict=True):
                node = nodes.get(hash)
                if node is None:  # removed with one before it
                    continue
                before = node.runs
                if self._evaluate(node, has):
                    evaluated.pop(hash, None)
                    evaluated[hash] = has
                    if node.runs != before:
                        longer.extend(node.children - evaluating)
                else:
                    self._remove(hash, removed)
                    if node.parent is not None:
                        evaluated.setdefault(node.parent, self._all)
            hashes = [hash for hash in longer if hash in nodes]
        if evaluated or removed:
            self._prune(evaluated, removed)

    def _evaluate(self, node: _Node, has: Sequence[bool]) -> bool:
        """Update a prefix without users; return False if a longer one cannot be usable."""
        for number in self._whole:
            if not has[number]:
                return False
        before, runs = self._full[0], []
        if node.parent is not None:
            parent = self._nodes[node.parent]
            before = parent.full if parent.users else parent.runs
        for run, (number, num_last, num_first) in zip(before, self._last, strict=True):
            if has[number]:
                runs.append(run + 1 if run < num_last else num_last)
            elif node.depth <= num_first:
                return False
            else:
                runs.append(0)
        node.runs = tuple(runs)
        node.is_usable = node.depth % self._interval == 0 and node.runs == node.full
        return True

    # --- Unreachable blocks ---

    def _remove(self, hash: int, removed: list[int]) -> None:
        """Remove a prefix and all longer ones, none of which has users."""
        parent = self._nodes[hash].parent
        if parent is not None:
            self._nodes[parent].children.discard(hash)
        waiting = [hash]
        while waiting:
            removed.append(waiting.pop())
            waiting.extend(self._nodes.pop(removed[-1]).children)

    def _prune(self, evaluated: dict[int, Sequence[bool]], removed: list[int]) -> None:
        """Remove prefixes before which nothing is usable, and discard what no prefix needs."""
        nodes = self._nodes
        looked_at: set[int] = set()
        moved: dict[int, _Node] = {}
        for hash in reversed(evaluated):  # most children before their parents
            place: int | None = None if hash in looked_at else hash
            while place is not None:
                node = nodes.get(place)
                if node is None or node.users:
                    break
                looked_at.add(place)
                if not (node.is_usable or node.children):
                    self._remove(place, removed)
                    place = node.parent
                    continue
                nearest = 0 if node.is_usable else self._most
                for child in node.children if nearest else ():
                    nearest = min(nearest, nodes[child].nearest + 1)
                if nearest == node.nearest:
                    break
                node.nearest = nearest
                moved[place] = node
                place = node.parent
        discarded = [list(removed) for _ in self._discard]
        for hash, node in moved.items():
            has = evaluated.get(hash, self._all) if hash in nodes else self._none
            for number, num_last, num_first in self._last:
                if has[number] and node.nearest >= num_last and node.depth > num_first:
                    discarded[number].append(hash)
        for discard, hashes in zip(self._discard, discarded, strict=True):
            if hashes:
                discard(hashes)
