"""`PagedKVCache` held against what TVM's documentation says of its paged KV cache.

The reference keeps K and V of each sequence in one piece, and attends in float64.
"""

from __future__ import annotations

import math

import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

LAYERS, Q_HEADS, HEADS, WIDTH, PAGE = 2, 4, 2, 8, 16
CAPACITY, BASE, FACTOR = 256, 100.0, 2.0  # tokens; of the rotation
NUM_PAGES = CAPACITY // PAGE + 1  # TVM's extra one
SCALE = 0.3


@pytest.fixture
def place(device):
    return "cpu" if device.kind == "host" else device.torch_name


def create(place, *, rope_mode="normal", num_pages=NUM_PAGES):
    device = kv.device("host" if place == "cpu" else place)
    scaling = {"rope_type": "linear", "factor": FACTOR}
    rope = None
    if rope_mode != "none":
        rope = kv.rope_table(CAPACITY, WIDTH, base=BASE, scaling=scaling, device=device)
    return kv.PagedKVCache(
        num_layers=LAYERS, num_q_heads=Q_HEADS, num_kv_heads=HEADS, head_dim=WIDTH,
        num_pages=num_pages, page_size=PAGE, dtype="fp32", rope=rope, rope_mode=rope_mode,
        max_batch_tokens=72, device=device,
    )  # fmt: skip


def rotated(x, positions):
    """Rotate halves of (tokens, heads, width)."""
    frequencies = BASE ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = (positions.double()[:, None] / FACTOR * frequencies)[:, None]
    a, b = x.double().cpu().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def cached(cache, seq):
    """K and V of a sequence, (2, layers, tokens, heads, width)."""
    length = cache.sequence_length(seq)
    return torch.stack([torch.from_dlpack(rows).cpu() for rows in cache.get_kv(seq, 0, length)])


class World:
    """A cache, and K and V of its sequences as they are cached: (layers, tokens, heads, width)."""

    def __init__(self, place, **options):
        self.cache, self.place = create(place, **options), place
        self.generator = torch.Generator().manual_seed(0)
        self.kv = {}

    def add(self, *seqs):
        for seq in seqs:
            self.cache.add_sequence(seq)
            self.kv[seq] = torch.zeros(2, LAYERS, 0, HEADS, WIDTH, dtype=torch.float64)

    def fork(self, parent, child, at=None):
        self.cache.fork_sequence(parent, child, at)
        self.kv[child] = self.kv[parent][:, :, :at]

    def append(self, seqs, count, tree=None):
        """Run a step that appends as many ones to each sequence."""
        with self.cache.forward(seqs, [count] * len(seqs), token_tree=tree and [tree] * len(seqs)):
            qkv = torch.ones(count * len(seqs), Q_HEADS + 2 * HEADS, WIDTH, device=self.place)
            for layer in range(LAYERS):
                self.cache.attention_qkv(layer, qkv)

    def step(self, seqs, counts, parents=None):
        """Run a step, and compare positions and attention with the reference."""
        trees = parents or [chain(n) for n in counts]
        self.cache.begin_forward(seqs, counts, token_tree=parents)
        starts = [self.kv[seq].shape[2] for seq in seqs]
        tokens = torch.cat([
            torch.tensor([start + depth for depth in depths_of(tree)])
            for start, tree in zip(starts, trees, strict=True)
        ])  # fmt: skip
        assert self.cache.query_positions().tolist() == tokens.tolist()
        new = []
        for layer in range(LAYERS):
            qkv = torch.randn(len(tokens), Q_HEADS + 2 * HEADS, WIDTH, generator=self.generator)
            out = torch.full((len(tokens), Q_HEADS, WIDTH), math.nan, device=self.place)
            self.cache.attention_qkv(layer, qkv.to(self.place), out=out, sm_scale=SCALE)
            q, k = (
                rotated(x, tokens) for x in qkv[:, : Q_HEADS + HEADS].split([Q_HEADS, HEADS], 1)
            )
            new.append(torch.stack((k, qkv[:, Q_HEADS + HEADS :].double())))
            expected, at = [], 0
            for seq, count, tree in zip(seqs, counts, trees, strict=True):
                own = new[-1][:, at : at + count]
                keys, values = torch.cat((self.kv[seq][:, layer], own), dim=1)
                expected.append(attended(q[at : at + count], keys, values, tree))
                at += count
            assert torch.allclose(out.double().cpu(), torch.cat(expected), rtol=1e-5, atol=1e-5)
        self.cache.end_forward()
        at = 0
        for seq, count in zip(seqs, counts, strict=True):
            own = torch.stack([layer[:, at : at + count] for layer in new], dim=1)
            self.kv[seq] = torch.cat((self.kv[seq], own), dim=2)
            at += count

    def check(self):
        """Compare what is cached, and how much."""
        for seq, expected in self.kv.items():
            assert torch.allclose(cached(self.cache, seq).double(), expected, atol=1e-5)
        assert self.cache.total_length == sum(x.shape[2] for x in self.kv.values())


def chain(count):
    return list(range(-1, count - 1))


def path(tree, node):
    return [] if node < 0 else [*path(tree, tree[node]), node]


def depths_of(tree):
    return [len(path(tree, node)) - 1 for node in range(len(tree))]


def attended(q, keys, values, tree):
    """Attend with nodes of a tree over what is older and their own path."""
    older = len(keys) - len(tree)
    seen = torch.zeros(len(tree), len(keys), dtype=torch.bool)
    seen[:, :older] = True
    for node in range(len(tree)):
        seen[node, [older + i for i in path(tree, node)]] = True
    k, v = (x.repeat_interleave(Q_HEADS // HEADS, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.fixture
def world(place, quick_host):
    return World(place)


def test_prefill_and_decode(world):
    world.add(0, 1, 2)
    world.step([0, 2], [6, 19])
    world.step([2, 1, 0], [1, 17, 1])
    world.step([0, 1], [1, 1])
    world.check()


def test_forks_share_pages(world):
    """Of 40 tokens, page 16: a fork at 35 takes a page, at 32 and at 0 none."""
    world.add(0)
    world.step([0], [40])
    pages = world.cache.num_available_pages
    for child, at, taken in ((1, 35, 1), (2, 32, 1), (3, 0, 1)):
        world.fork(0, child, at)
        assert world.cache.num_available_pages == pages - taken
    world.fork(0, 4)
    world.check()
    world.step([1, 2, 4, 0], [2, 1, 1, 1])
    world.check()


def test_popped_tokens_are_gone(world):
    world.add(0)
    world.step([0], [40])
    world.fork(0, 1, 35)
    for seq, n in ((1, 17), (0, 8), (1, 0), (0, 32)):  # into what they share, and all of it
        world.cache.pop_tokens(seq, n)
        world.kv[seq] = world.kv[seq][:, :, : world.kv[seq].shape[2] - n]
        world.check()
    world.step([0, 1], [3, 1])
    world.check()


def test_removal_in_any_order_leaves_no_page(world):
    world.add(0)
    world.step([0], [40])
    for child in (1, 2):
        world.fork(child - 1, child, 20)
    for seq in (0, 2, 1):
        assert world.cache.num_available_pages < NUM_PAGES
        world.cache.remove_sequence(seq)
    assert (world.cache.total_length, world.cache.num_available_pages) == (0, NUM_PAGES)


def test_trees_are_committed_by_their_leaves(world):
    """In an order other than that of the step, the last a chain; -1 keeps nothing."""
    world.add(0, 1, 2)
    world.step([0, 1, 2], [5, 17, 3])
    trees = {0: [-1, 0, 0, 1, 1, 2], 1: [-1, -1, 0], 2: [-1, 0, 1, 2]}
    world.step([0, 1, 2], [6, 3, 4], list(trees.values()))
    leaves = {2: 2, 0: 4, 1: -1}
    world.cache.commit_token_tree(list(leaves), list(leaves.values()))
    for seq, leaf in leaves.items():
        committed = world.kv[seq].shape[2] - len(trees[seq])
        kept = [*range(committed), *(committed + i for i in path(trees[seq], leaf))]
        world.kv[seq] = world.kv[seq][:, :, kept]
    world.check()
    world.step([1, 0], [1, 2])
    world.check()


def test_trees_of_several_steps_are_committed_as_one(world):
    """Leaves are nodes of the whole tree, of which the path alone remains; TVM keeps more."""
    world.add(0, 1)
    world.step([0, 1], [2, 2])
    for tree in ([-1], [0, 0], [1, 1, 2, 2]):
        world.append([0, 1], len(tree), tree)
    assert world.cache.sequence_length(0) == 9
    # Paths 0, 1, 4; and 0, 2, of which the last step has none.
    world.cache.commit_token_tree([0, 1], [4, 2])
    assert [world.cache.sequence_length(seq) for seq in range(2)] == [5, 4]


def test_a_sliding_window_keeps_the_first_and_the_last(place, quick_host):
    cache = create(place, rope_mode="none")
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 5, 3)
    values = torch.arange(20.0).view(-1, 1, 1).expand(-1, Q_HEADS + 2 * HEADS, WIDTH).contiguous()
    with cache.forward([0], [20]):
        for layer in range(LAYERS):
            cache.attention_qkv(layer, values.to(place), sm_scale=0.0)
    assert cached(cache, 0)[1, :, :, 0, 0].tolist() == [[0, 1, 2, 15, 16, 17, 18, 19]] * LAYERS
    with cache.forward([0], [1]):
        assert cache.query_positions().tolist() == [8]  # those in the cache


def test_a_fork_without_the_parents_window(place, quick_host):
    """As in TVM: nothing leaves the child, which has tokens of the parent's sinks alone."""
    world = World(place, rope_mode="none")
    cache = world.cache
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 4, 4)
    world.append([0], 4)
    cache.fork_sequence(0, 1, inherit_window=False)
    world.append([1], 10)
    assert cache.sequence_length(1) == 14
    world.append([0], 1)
    for position in (None, 5):
        with pytest.raises(ValueError, match=r"^at: expected at most the 4 sink_tokens"):
            cache.fork_sequence(0, 2, position, inherit_window=False)
    assert 2 not in cache
    cache.fork_sequence(1, 2, 10, inherit_window=False)  # its parent has no window
    cache.enable_sliding_window(2, 1, 5)
    world.append([2], 3)
    assert [cache.sequence_length(seq) for seq in range(3)] == [5, 14, 6]


def test_a_full_cache_leaves_lengths(place):
    """Of three pages two sequences want four: neither gets any."""
    cache = create(place, num_pages=3)
    for seq in range(2):
        cache.add_sequence(seq)
    with pytest.raises(kv.CacheFull):
        cache.begin_forward([0, 1], [30, 30])
    assert (cache.num_available_pages, cache.total_length) == (3, 0)
    cache.begin_forward([0, 1], [30, 1])
