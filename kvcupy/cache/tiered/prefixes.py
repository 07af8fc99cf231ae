"""Which blocks of several groups of layers are useful: a tree of the prefixes that they make up.

    full attention   [0][1][2][3][4][5]      all blocks of a prefix
    window                     [3][4][5]     its last blocks, and its first for sink tokens
    state                            [5]     the one behind it

A prefix is usable while every group has what it needs of it. A block is useful while a usable
prefix needs it. The other blocks are discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupBlocks:
    """The blocks that a group needs of a prefix.

    Attributes
    ----------
    num_last : how many of the last ones; None: all
    num_first : how many of the first ones too
    interval : the length of a usable prefix is a multiple of so many blocks
    is_state : whether a block is the state behind a prefix

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
    """A prefix, by the hash of its last block.

    Attributes
    ----------
    depth : its number of blocks
    users : sequences and leases of it, whose blocks count as present
    is_whole : whether all blocks are there of the groups that need all, and the first of the others
    runs : of each other group, how many blocks without a gap end here, at most those it needs
    is_usable : whether all groups have what they need
    """

    __slots__ = ("children", "depth", "is_usable", "is_whole", "parent", "runs", "users")

    def __init__(self, parent: int | None, depth: int) -> None:
        self.parent, self.depth = parent, depth
        self.children: set[int] = set()
        self.users = 0
        self.is_whole = self.is_usable = False
        self.runs: tuple[int, ...] = ()


class Prefixes:
    """The prefixes whose blocks are in the tiers of a cache of groups.

    Every leaf is usable or has users. The caller holds a lock.

    Parameters
    ----------
    groups : what each needs
    has : called with the number of a group and a hash; returns whether a tier has the block
    discard : called with the number of a group and the hashes of useless blocks, of which some may
        not be there
    """

    def __init__(
        self, groups: Sequence[GroupBlocks], has: Callable[[int, int], bool],
        discard: Callable[[int, list[int]], None],
    ) -> None:  # fmt: skip
        self._groups = list(enumerate(groups))
        self._has, self._discard = has, discard
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def enter(self, hashes: Sequence[int]) -> None:
        """Add a user of a prefix, and of all prefixes of it."""
        parent = None
        for depth, hash in enumerate(hashes, 1):
            node = self._nodes.get(hash)
            if node is None:
                node = self._nodes[hash] = _Node(parent, depth)
                if parent is not None:
                    self._nodes[parent].children.add(hash)
            node.users += 1
            parent = hash
        self._update(hashes)

    def leave(self, hashes: Sequence[int]) -> None:
        """Remove a user that has entered; discard what nobody can use any more."""
        for hash in hashes:
            self._nodes[hash].users -= 1
        self._update(hashes)

    def lost(self, hash: int) -> None:
        """Discard what is useless without a block that a group has lost."""
        self._update([hash])

    def clear(self) -> None:
        """Forget the prefixes without users, whose blocks are gone."""
        used = {hash: node for hash, node in self._nodes.items() if node.users}
        for node in used.values():
            node.children &= used.keys()
        self._nodes = used

    # --- Usable prefixes ---

    def _update(self, hashes: Iterable[int]) -> None:
        """Look at nodes again, and at those behind them that depend on a change."""
        waiting, seen = deque(hashes), dict[int, _Node]()
        while waiting:
            hash = waiting.popleft()
            node = self._nodes.get(hash)
            if node is None:
                continue
            seen[hash] = node
            before = node.is_whole, node.runs
            self._evaluate(hash, node)
            if before != (node.is_whole, node.runs):
                waiting.extend(node.children)
        self._prune({h: n for h, n in seen.items() if not (n.users or n.is_usable)})

    def _evaluate(self, hash: int, node: _Node) -> None:
        parent = None if node.parent is None else self._nodes[node.parent]
        is_whole = is_usable = parent is None or parent.is_whole
        runs: list[int] = []
        for number, group in self._groups:
            has = node.users > 0 or self._has(number, hash)
            run = 0
            if group.num_last is None:
                is_whole &= has
            else:
                if node.depth <= group.num_first:
                    is_whole &= has
                before = 0 if parent is None or group.is_state else parent.runs[len(runs)]
                run = min(before + 1, group.num_last) if has else 0
                enough = run >= min(node.depth, group.num_last)
                is_usable &= enough and node.depth % group.interval == 0
                runs.append(run)
        node.is_whole, node.runs, node.is_usable = is_whole, tuple(runs), is_whole and is_usable

    # --- Useless blocks ---

    def _prune(self, useless: dict[int, _Node]) -> None:
        """Discard the blocks that were needed by prefixes that are not usable, and by no others."""
        discarded: list[list[int]] = [[] for _ in self._groups]
        above = self._above(useless)
        for hash, node in sorted(useless.items(), key=lambda item: -item[1].depth):
            for number, group in self._groups:
                if group.is_state:
                    discarded[number].append(hash)
            self._remove_branch(hash, node, discarded)
        for number, group in self._groups:
            if group.num_last is None or group.is_state:
                continue
            for hash in above:
                node_above = self._nodes.get(hash)
                if node_above is None or node_above.depth <= group.num_first:
                    continue
                if not self._is_needed(node_above, group.num_last):
                    discarded[number].append(hash)
        for number, hashes in enumerate(discarded):
            if hashes:
                self._discard(number, list(dict.fromkeys(hashes)))

    def _remove_branch(self, hash: int, node: _Node, discarded: list[list[int]]) -> None:
        """Remove a node, and those before it, up to one that is usable or lies before others."""
        while not (node.children or node.users or node.is_usable) and hash in self._nodes:
            for hashes in discarded:
                hashes.append(hash)
            del self._nodes[hash]
            if node.parent is None:
                return
            child, hash = hash, node.parent
            node = self._nodes[hash]
            node.children.discard(child)

    def _above(self, useless: dict[int, _Node]) -> dict[int, None]:
        """Return the hashes of blocks in windows before useless nodes."""
        windows = [g.num_last for _, g in self._groups if g.num_last is not None and not g.is_state]
        most = max(windows, default=0)
        found: dict[int, None] = {}
        for hash in useless if most else ():
            place: int | None = hash
            for distance in range(most):
                if place is None or (distance and place in found):
                    break
                found[place] = None
                place = self._nodes[place].parent
        return found

    def _is_needed(self, node: _Node, num_last: int) -> bool:
        """Return whether a window before a prefix that is usable, or has users, has this block."""
        if num_last == 0:
            return False
        level = [node]
        for _ in range(num_last):
            if any(n.users or n.is_usable for n in level):
                return True
            level = [self._nodes[hash] for n in level for hash in n.children]
        return False
