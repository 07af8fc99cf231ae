"""A plain simulation of the tiers of several groups of layers, by hashes alone.

    full attention   [0][1][2][3][4][5]      all blocks of a prefix
    window                     [3][4][5]     its last blocks
    state                            [5]     the one behind it

Each group has its three tiers (`TierSimulation`). A prefix is usable if every group has what it
needs of it; a block that no usable prefix needs is discarded, at the latest behind each step.
Requests come one at a time, and the blocks of a request count as present until it ends. With a
disk, the host should hold at least twice the blocks of the longest request: the cache may move
other blocks than the simulation where a prefix hardly fits into host memory on its way from the
disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .simulation import Sizes, Tier, TierSimulation


@dataclass(frozen=True)
class GroupShape:
    """The blocks that a group of layers keeps.

    Attributes
    ----------
    page_tokens : of a block
    interval : the length of a usable prefix is a multiple of so many blocks
    window : how many keys a query sees; 0: all
    is_state : whether the group has a state instead, behind a prefix
    """

    page_tokens: int
    interval: int
    window: int = 0
    is_state: bool = False

    @property
    def num_last(self) -> int | None:
        """How many of the last blocks a prefix needs; None: all blocks."""
        if self.is_state:
            return 1
        return -(-(self.window - 1) // self.page_tokens) if self.window else None

    def needed(self, length: int) -> range:
        """Return the blocks that a prefix of `length` blocks needs."""
        return range(0 if self.num_last is None else max(0, length - self.num_last), length)

    def can_serve(self, block: int) -> bool:
        """Return whether some usable prefix could need a block."""
        return any(
            block in self.needed(length)
            for length in range(block + 1, block + 1 + self.interval)
            if length % self.interval == 0
        )

    def unseen(self, position: int) -> int:
        """Return how many leading blocks no query from a position on sees."""
        return max(0, position - self.window + 1) // self.page_tokens if self.window else 0


class NotingTier(Tier):
    """A tier that notes the blocks that leave it."""

    def __init__(self, size: int, left: set[int]) -> None:
        super().__init__(size)
        self.left = left

    def remove(self, block: int) -> None:
        super().remove(block)
        self.left.add(block)


class GroupTiers(TierSimulation):
    """The tiers of a group, and the pages that the running request has of it.

    Attributes
    ----------
    left : blocks that have left a tier; they may be in another
    own : blocks that the request has computed, and that no tier has on its page
    leased : blocks that the request shares with the device tier
    num_pages : allocated by the request, partial ones included
    """

    def __init__(self, shape: GroupShape, sizes: Sizes, write: str) -> None:
        super().__init__(sizes, write)
        self.left: set[int] = set()
        self.device, self.host, self.disk = (NotingTier(size, self.left) for size in sizes.all)
        self.shape = shape
        self.own: set[int] = set()
        self.leased: set[int] = set()
        self.num_pages = self.first = 0

    def __contains__(self, block: int) -> bool:
        return block in self.device or block in self.host or block in self.disk

    def begin(self, hashes: Sequence[int], length: int) -> None:
        """Bring the blocks of a prefix to the device; states only to host memory."""
        needed = self.shape.needed(length)
        blocks = [hashes[i] for i in needed]
        self.own, self.leased, self.first, self.num_pages = set(), set(), 0, length
        if self.shape.is_state:
            self._hold(blocks)
            return
        if self.acquire(blocks) is None:
            raise ValueError(f"{len(blocks)} blocks do not fit on the device")
        self.leased = set(needed)
        self.first = needed.start if length else 0

    def _hold(self, blocks: Sequence[int]) -> None:
        below = [block for block in blocks if block not in self.host]
        self._room_on_host(len(below), blocks, blocks)
        self.counts["disk_read"] += len(below)
        self._use(blocks, host=below)

    def save(self, block: int) -> None:
        """Copy a state to the host."""
        fits = block in self.host or self._room_on_host(1, [block], [block])
        self._use([block], host=[block] if fits else [])

    def grow(self, tokens: int) -> None:
        """Allocate the pages of `tokens` tokens."""
        count = -(-tokens // self.shape.page_tokens) - self.num_pages
        if not self.make_room(count):
            raise ValueError(f"{count} pages do not fit on the device")
        self.own |= set(range(self.num_pages, self.num_pages + count))
        self.num_pages += count
        self.device.taken += count

    def slide(self, hashes: Sequence[int], position: int) -> None:
        """Give the tiers the blocks that no query from a position on sees."""
        stop = self.shape.unseen(position)
        if stop > self.first:
            self._leave(hashes, range(self.first, stop), len(hashes))
            self.first = stop

    def end(self, hashes: Sequence[int]) -> None:
        """Drop the pages that the request still has."""
        self._leave(hashes, range(self.first, self.num_pages), 0)

    def publish(self, hashes: Sequence[int], blocks: Iterable[int]) -> None:
        """Give the tiers some of the request's own blocks, as far as they can serve."""
        given = [i for i in blocks if i in self.own and self.shape.can_serve(i)]
        self.own -= set(given)
        self.device.taken -= len(given)
        self.insert([hashes[i] for i in given])

    def _leave(self, hashes: Sequence[int], blocks: range, num_useful: int) -> None:
        self.publish(hashes, [i for i in blocks if i < num_useful])
        dropped = self.own & set(blocks)
        self.own -= dropped
        self.device.taken -= len(dropped)
        released = [i for i in blocks if i in self.leased]
        self.leased -= set(released)
        self.release([hashes[i] for i in released])

    def discard(self, block: int) -> None:
        for tier in (self.device, self.host, self.disk):
            if block in tier:
                tier.remove(block)


@dataclass
class Prefix:
    """A prefix of a request.

    Attributes
    ----------
    chain : the hashes of its blocks
    missing : how many of the blocks that it needs are not present
    children : hashes of the prefixes that are a block longer
    """

    chain: tuple[int, ...]
    missing: int = 0
    children: set[int] = field(default_factory=set)


class GroupSimulation:
    """Requests through the tiers of several groups, one after another.

    Parameters
    ----------
    shapes, sizes : of each group; the blocks on the device are the pages of its pool
    """

    def __init__(
        self, shapes: Sequence[GroupShape], sizes: Sequence[Sizes],
        write: str = "back",
    ) -> None:  # fmt: skip
        pairs = zip(shapes, sizes, strict=True)
        self.groups = [GroupTiers(shape, size, write) for shape, size in pairs]
        self.attention = [group for group in self.groups if not group.shape.is_state]
        self.states = [group for group in self.groups if group.shape.is_state]
        self.page_tokens, self.interval = shapes[0].page_tokens, shapes[0].interval
        self.hashes: tuple[int, ...] = ()  # of the running request
        self.running: set[int] = set()
        self.prefixes: dict[int, Prefix] = {}  # by the hash of the last block
        # Of each group: the blocks that are in a tier or the running request's, and how many usable
        # prefixes need each.
        self.present: list[set[int]] = [set() for _ in self.groups]
        self.uses: list[Counter[int]] = [Counter() for _ in self.groups]

    # --- A request ---

    def begin(self, hashes: Sequence[int]) -> int:
        """Begin a request; return how many of its leading blocks were found."""
        self.hashes, self.running = tuple(hashes), set(hashes)
        lengths = range(len(hashes), 0, -1)
        found = next((length for length in lengths if self._usable(length)), 0)
        self._add_prefixes()
        for group in self.groups:
            group.begin(hashes, found)
        self._discard(self._note_left())
        return found

    def step(self, start: int, stop: int) -> None:
        """Run the tokens from `start` to `stop` - 1."""
        for group in self.attention:
            group.grow(stop)
        for position in (start, max(start, stop - self.page_tokens)):
            for group in self.attention:
                group.slide(self.hashes, position)
        length, rest = divmod(stop, self.page_tokens)
        if rest == 0 and length % self.interval == 0 and length <= len(self.hashes):
            for group in self.states:
                group.save(self.hashes[length - 1])
        self._discard(self._note_left())

    def end(self, num_tokens: int) -> None:
        """End a request of so many tokens; its useful blocks stay."""
        length = min(len(self.hashes), num_tokens // self.page_tokens)
        length -= length % self.interval
        while length and any(self.hashes[length - 1] not in group for group in self.states):
            length -= self.interval
        for group in self.attention:
            group.publish(self.hashes, range(length))
        for group in self.attention:
            group.end(self.hashes)
        self.running = set()
        changed = self._note_left()
        for number, group in enumerate(self.groups):
            changed |= {(number, hash) for hash in self.hashes}
            changed |= self._lose(number, [hash for hash in self.hashes if hash not in group])
        self._discard(changed)

    def _usable(self, length: int) -> bool:
        return length % self.interval == 0 and all(
            self.hashes[i] in group for group in self.groups for i in group.shape.needed(length)
        )

    # --- Which blocks are useful ---

    def _add_prefixes(self) -> None:
        """Let all blocks of the running request be present, and add its prefixes."""
        for number, present in enumerate(self.present):
            for index, hash in enumerate(self.hashes):
                if hash not in present:
                    present.add(hash)
                    self._change(number, index, hash, -1)
        for length, hash in enumerate(self.hashes, 1):
            if hash not in self.prefixes:
                self.prefixes[hash] = Prefix(self.hashes[:length])
                self._count_uses(self.prefixes[hash], 1)
                if length > 1:
                    self.prefixes[self.hashes[length - 2]].children.add(hash)

    def _note_left(self) -> set[tuple[int, int]]:
        """Take notice of blocks that have left the tiers; return those that may be useless now."""
        changed = set()
        for number, group in enumerate(self.groups):
            changed |= self._lose(number, [hash for hash in group.left if hash not in group])
            group.left.clear()
        return changed

    def _lose(self, number: int, hashes: Iterable[int]) -> set[tuple[int, int]]:
        changed = set()
        for hash in hashes:
            if hash in self.present[number] and hash not in self.running:
                self.present[number].remove(hash)
                index = len(self.prefixes[hash].chain) - 1
                changed |= self._change(number, index, hash, 1)
        return changed

    def _change(self, number: int, index: int, hash: int, missing: int) -> set[tuple[int, int]]:
        """Count a block that is present or missing now, in the prefixes that need it.

        Returns the blocks, with their groups, that these prefixes needed while they were usable.
        """
        shape, changed = self.groups[number].shape, set()
        waiting = [hash] if hash in self.prefixes else []
        while waiting:
            prefix = self.prefixes[waiting.pop()]
            if index not in shape.needed(len(prefix.chain)):
                continue
            if prefix.missing == 0:
                changed |= self._count_uses(prefix, -1)
            prefix.missing += missing
            self._count_uses(prefix, 1)
            waiting.extend(prefix.children)
        return changed

    def _count_uses(self, prefix: Prefix, count: int) -> set[tuple[int, int]]:
        """Count a usable prefix in the blocks that it needs; return these."""
        length, used = len(prefix.chain), set()
        if prefix.missing == 0 and length % self.interval == 0:
            for number, group in enumerate(self.groups):
                for i in group.shape.needed(length):
                    self.uses[number][prefix.chain[i]] += count
                    used.add((number, prefix.chain[i]))
        return used

    def _discard(self, changed: set[tuple[int, int]]) -> None:
        """Discard the blocks that no usable prefix needs, and forget their prefixes."""
        ends = set()
        for number, hash in changed:
            if hash not in self.running and not self.uses[number][hash]:
                self.groups[number].discard(hash)
                ends.add(hash)
        self._note_left()
        for hash in sorted(ends, key=lambda hash: -len(self.prefixes[hash].chain)):
            self._forget(hash)

    def _forget(self, hash: int) -> None:
        """Forget a prefix that is not usable, and those before it, unless others extend them."""
        while (prefix := self.prefixes.get(hash)) is not None and not prefix.children:
            length = len(prefix.chain)
            if hash in self.running or (prefix.missing == 0 and length % self.interval == 0):
                return
            del self.prefixes[hash]
            if length == 1:
                return
            hash = prefix.chain[-2]
            self.prefixes[hash].children.remove(prefix.chain[-1])
