"""`PagedKVCache`: trees of tokens, which are attended to along their branches, then committed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from paged_cases import BINARY, CHAIN, FOREST, Twin, random_tree, rope_of

pytestmark = pytest.mark.usefixtures("quick_host")

TREES = {
    "one": [-1], "chain": CHAIN, "binary": BINARY, "forest": FOREST, "roots": [-1] * 6,
    "star": [-1, *[0] * 6], "comb": [-1, 0, 0, 2, 2, 4, 4],
}  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("tree", TREES)
def test_every_leaf_of_every_tree(device, tree, page_size):
    """Each time the path to one node remains, as if it had been appended plainly."""
    parents = TREES[tree]
    twin = Twin(device, num_layers=1, rope=rope_of(8), page_size=page_size, num_pages=60)
    twin.prefill("root", 6)
    for leaf in range(-1, len(parents)):
        twin.fork("root", leaf)
        twin.step([leaf], [len(parents)], [parents], contents=False)
        assert twin.cache.sequence_length(leaf) == 6 + len(parents)
        twin.commit([leaf], [leaf])
        depth = len(twin.model.sequences[leaf].tokens) - 6
        assert twin.cache.sequence_length(leaf) == 6 + depth
        twin.step([leaf], [1], contents=False)
        twin.remove(leaf)
    twin.check()


def test_a_tree_at_the_start(device):
    """Of a sequence without tokens: its roots have position 0."""
    twin = Twin(device, seed=1, rope=rope_of(8))
    twin.add("a", "b")
    twin.step("ab", [7, 5], [BINARY, CHAIN])
    twin.commit("ab", [4, -1])
    assert twin.lengths() == {"a": 3, "b": 0}
    twin.step("ba", [1, 1])


# Whether a batch is of chains must not be asked of its last sequence alone.
@pytest.mark.parametrize("order", [*itertools.permutations(["chain", "binary", "forest"])])
def test_chains_and_trees_in_one_batch(device, order):
    twin = Twin(device, seed=2)
    twin.prefill("chain", 5, "binary", 6, "forest", 9)
    twin.step(order, [len(TREES[name]) for name in order], [TREES[name] for name in order])
    leaves = {"chain": 2, "binary": 6, "forest": 4}
    twin.commit(order, [leaves[name] for name in order])
    twin.step(order, [1, 2, 1])


@pytest.mark.parametrize("order", [*itertools.permutations("abc")])
def test_commit_in_another_order(device, order):
    """Leaves go with the names beside them, not with the places of the step."""
    twin = Twin(device, seed=3)
    twin.prefill("a", 5, "b", 6, "c", 9)
    twin.step("abc", [7, 7, 7], [BINARY, FOREST, BINARY])
    leaves = {"a": 3, "b": 4, "c": 6}
    twin.commit(order, [leaves[name] for name in order])
    twin.step("abc", [1, 1, 1])


def test_commit_of_a_part(device):
    """The others stay as they are, through steps of the rest, and are committed one by one."""
    twin = Twin(device, seed=4)
    twin.prefill("a", 5, "b", 6, "c", 9, "plain", 3)
    twin.step(["a", "b", "c"], [7, 7, 5], [BINARY, FOREST, CHAIN])
    twin.commit("b", [6])
    twin.step(["b", "plain"], [2, 1])
    twin.commit("c", [1])
    twin.step(["plain", "c", "a"], [1, 1, 1], [None, None, [4]])
    twin.step(["c", "b"], [3, 5], [[-1, 0, 0], CHAIN])
    twin.commit("cab", [-1, 7, 4])
    twin.step("abc", [1, 1, 1])


@pytest.mark.parametrize("leaf", [-1, 2, 6, 9, 11, 13])
def test_several_rounds_committed_once(device, leaf):
    """Nodes keep their numbers; each round hangs on any node before it, or on the root."""
    twin = Twin(device, seed=5, rope=rope_of(8), page_size=3)
    twin.prefill("a", 5, "b", 4)
    twin.step("ab", [7, 2], [BINARY, [-1, 0]])
    twin.step("ba", [1, 3], [[1], [3, 7, 8]])
    twin.step("a", [2], [[9, 9]])
    twin.step("ab", [2, 4], [[-1, 2], [-1, 3, 4, 2]])
    assert twin.lengths() == {"a": 19, "b": 11}
    twin.commit("ab", [leaf, 2])
    twin.step("ab", [1, 1])


@pytest.mark.parametrize("rounds", [2, 5])
def test_a_chain_over_several_rounds(device, rounds):
    """One node a round, as in speculative decoding, among a sequence that decodes plainly."""
    twin = Twin(device, seed=6, rope=rope_of(8))
    twin.prefill("a", 6, "b", 6)
    for node in range(rounds):
        twin.step("ba", [1, 1], [None, [node - 1]])
    twin.commit("a", [rounds - 1])
    assert twin.lengths() == {"a": 6 + rounds, "b": 6 + rounds}
    twin.step("ab", [1, 1])


def test_trees_beside_plain_sequences(device):
    """An entry None appends plainly, before and after those with trees."""
    twin = Twin(device, seed=7, rope=rope_of(8))
    twin.prefill("a", 6, "b", 2, "c", 9)
    twin.step("abc", [3, 7, 1], [None, BINARY, None])
    twin.step("cab", [2, 1, 1], [None, None, [3]])
    twin.commit("b", [7])
    twin.step("abc", [1, 1, 1], [None, None, None])


@pytest.mark.parametrize("rope_mode", ["normal", "inline"])
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_trees_in_half_precision(device, fmt, rope_mode):
    twin = Twin(device, seed=8, dtype=fmt, rope=rope_of(64), head_dim=64, rope_mode=rope_mode)
    twin.prefill("a", 33, "b", 7)
    twin.step("ab", [7, 7], [BINARY, FOREST])
    twin.step("ba", [1, 2], [[6], [3, 7]])
    twin.commit("ba", [7, 8])
    twin.step("ab", [1, 1])


def test_a_tree_wider_than_any_mask_word(device):
    """300 nodes at random."""
    twin = Twin(device, seed=9, num_pages=200, num_layers=1)
    twin.prefill("a", 10, "b", 3)
    trees = [random_tree(twin.rng, 300), random_tree(twin.rng, 65)]
    twin.step("ab", [300, 65], trees)
    twin.commit("ba", [64, 299])
    twin.step("ab", [1, 1])


def test_random_trees(device):
    """Batches at random: rounds, parts, orders, leaves."""
    twin = Twin(device, seed=10, num_layers=1, num_pages=80, page_size=3)
    rng = np.random.default_rng(10)
    twin.prefill(0, 4, 1, 7, 2, 1)
    for _ in range(25):
        names = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        pending = {name: len(twin.model.sequences[name].parents) for name in names}
        if all(pending.values()) and rng.random() < 0.5:
            leaves = [int(rng.integers(-1, pending[name])) for name in names]
            twin.commit(names, leaves)
            continue
        lens = rng.integers(1, 6, len(names)).tolist()
        trees = [
            random_tree(rng, count, pending[name]) if pending[name] or rng.random() < 0.7 else None
            for name, count in zip(names, lens, strict=True)
        ]
        twin.step(names, lens, trees)


def test_pages_of_what_is_rejected(device):
    """They come back; the committed part of the last page stays where it is."""
    twin = Twin(device, seed=11, num_pages=6)
    twin.prefill("a", 5)
    twin.step("a", [19], [[-1] * 19])
    assert twin.cache.num_available_pages == 0
    twin.commit("a", [17])
    assert twin.lengths() == {"a": 6} and twin.cache.num_available_pages == 4
    twin.step("a", [10])


def test_trees_on_a_shared_partial_page(device):
    """The nodes of one sequence are not written to the other's page; nor is what is compacted."""
    twin = Twin(device, seed=12)
    twin.prefill("a", 8)
    twin.fork("a", "b")
    twin.pop("b", 2)
    twin.step("ba", [7, 7], [BINARY, FOREST])
    twin.commit("ab", [6, 5])
    twin.step("ab", [1, 1])


def test_forks_pops_and_removal_around_trees(device):
    """Legal again once a tree is committed; removal is legal before, and a sibling may fork."""
    twin = Twin(device, seed=13)
    twin.prefill("a", 6, "b", 7)
    twin.step("ab", [7, 7], [BINARY, FOREST])
    twin.remove("b")
    twin.check()
    twin.commit("a", [5])
    twin.fork("a", "b", 8)
    twin.pop("a", 2)
    twin.step("ab", [5, 1], [CHAIN, None])
    twin.fork("b", "c")
    twin.commit("a", [0])
    twin.step("abc", [1, 1, 1])


def test_set_kv_of_committed_tokens_under_a_tree(device):
    twin = Twin(device, seed=14)
    twin.prefill("a", 6)
    twin.step("a", [7], [BINARY])
    twin.set_kv("a", 1, 4)
    twin.commit("a", [3])
    twin.step("a", [1])
