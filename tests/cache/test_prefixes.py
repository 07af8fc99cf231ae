"""Useful blocks of several groups, compared with the definition on random trees of prefixes."""

from __future__ import annotations

import random
from functools import partial

import pytest

from kvcupy.cache.tiered.prefixes import GroupBlocks, Prefixes, longest

FULL = GroupBlocks()
WINDOW = GroupBlocks(num_last=2)
MIXES = [
    [FULL],
    [FULL, WINDOW],
    [GroupBlocks(num_last=3, num_first=2), WINDOW],
    [FULL, GroupBlocks(num_last=1, interval=2, is_state=True)],
    [
        GroupBlocks(num_last=1, interval=3, is_state=True), FULL,
        GroupBlocks(num_last=2, num_first=1, interval=3),
    ],
]  # fmt: skip


class Tree:
    """Prefixes, the blocks that groups have, and the prefixes in use."""

    def __init__(self, groups, rng):
        self.groups, self.rng = groups, rng
        self.has = [set() for _ in groups]
        self.prefixes = Prefixes(
            groups, [partial(self.present, g) for g in range(len(groups))],
            [partial(self.discard, g) for g in range(len(groups))],
        )  # fmt: skip
        self.used, self.known = [], {}

    def present(self, g, hashes):
        return [hash in self.has[g] for hash in hashes]

    def discard(self, g, hashes):
        self.has[g] -= set(hashes)

    def chain(self):
        """The hashes of a prefix: of the blocks 0 and 1, so that many share their first ones."""
        blocks = self.rng.choices([0, 1], [3, 1], k=self.rng.randint(1, 9))
        hashes = [hash(tuple(blocks[: i + 1])) for i in range(len(blocks))]
        self.known |= {h: hashes[: i + 1] for i, h in enumerate(hashes)}
        return hashes

    def needed(self):
        """The blocks that usable prefixes need, by group; all of those in use."""
        users = {hash for chain in self.used for hash in chain}

        def usable(chain):
            return all(
                len(chain) % group.interval == 0
                and all(chain[i] in users | self.has[g] for i in group.needed(len(chain)))
                for g, group in enumerate(self.groups)
            )

        prefixes = [self.known[h] for h in users] + [c for c in self.known.values() if usable(c)]
        return [
            users | {chain[i] for chain in prefixes for i in group.needed(len(chain))}
            for group in self.groups
        ]

    def leave(self):
        chain = self.used.pop(self.rng.randrange(len(self.used)))
        for g, group in enumerate(self.groups):
            for i, hash in enumerate(chain, 1):
                if self.rng.random() < 0.9 and not (group.is_state and i % group.interval):
                    self.has[g].add(hash)
        before = [set(has) for has in self.has]
        self.prefixes.leave(chain)
        return before

    def lose(self):
        lost = []
        for _ in range(self.rng.randint(1, 3)):
            has = self.rng.choice(self.has)
            lost += self.rng.sample(sorted(has), min(len(has), 1))
            has.difference_update(lost[-1:])
        before = [set(has) for has in self.has]
        self.prefixes.lost(lost)
        return before

    def enter(self):
        self.used.append(self.chain())
        before = [set(has) for has in self.has]
        self.prefixes.enter(self.used[-1])
        return before


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_what_is_kept_is_what_usable_prefixes_need(groups):
    for seed in range(60):
        tree = Tree(groups, random.Random(seed))
        for _ in range(60):
            act = tree.rng.choice([tree.enter, tree.lose, *[tree.leave] * bool(tree.used)])
            before = act()
            for has, kept, needed in zip(before, tree.has, tree.needed(), strict=True):
                assert kept == has & needed, (seed, act.__name__)
        while tree.used:
            tree.leave()
        while any(tree.has):
            tree.lose()
        assert len(tree.prefixes) == 0


def test_only_what_may_have_changed_is_looked_at():
    """However many prefixes there are behind a common one."""
    groups, asked = [FULL, WINDOW], []

    def present(hashes):
        asked.append(len(hashes))
        return [True] * len(hashes)

    prefixes = Prefixes(groups, [present] * 2, [lambda hashes: None] * 2)
    common = list(range(1, 101))
    for chain in range(1000, 2000, 10):
        prefixes.enter([*common, *range(chain, chain + 10)])
    for chain in range(1000, 1990, 10):
        prefixes.leave([*common, *range(chain, chain + 10)])
    assert asked == [10, 10] * 99
    asked.clear()
    prefixes.leave([*common, *range(1990, 2000)])
    prefixes.enter(common)
    prefixes.enter(common)
    prefixes.leave(common)
    assert asked == [110, 110]


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_longest(groups):
    rng = random.Random(5)
    for _ in range(500):
        has = [{i for i in range(10) if rng.random() < 0.85} for _ in groups]

        def first_missing(g, indices, has=has):
            return next((i for i in indices if i not in has[g]), None)

        usable = [
            n for n in range(11)
            if all((set(group.needed(n)) <= has[g] and n % group.interval == 0) or n == 0
                   for g, group in enumerate(groups))
        ]  # fmt: skip
        assert longest(groups, 10, first_missing) == max(usable)
