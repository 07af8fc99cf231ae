"""kv.TieredCache over groups of layers: what its calls do, and what is kept of a prefix.

Any order of calls is walked through by the machine of `test_paged_machine.py`.
"""

from __future__ import annotations

import gc
import random
import weakref
from functools import partial

import numpy as np
import pytest
from groups_model import (
    MIXES,
    PAGE,
    TieredMixture,
    full,
    hashes_of,
    recurrent,
    sliding,
    stores_of,
)
from stream_cases import Log
from tiered_cases import MemoryStore

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.engine import TransferQueue
from kvcupy.cache.pool import pool_like
from kvcupy.cache.tiered import store_tier
from kvcupy.cache.tiered.prefixes import GroupBlocks, Prefixes, longest

pytestmark = pytest.mark.usefixtures("lenient_host")


# --- What is kept of a prefix ---


FULL = GroupBlocks()


WINDOW = GroupBlocks(num_last=2)


BLOCKS = [
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


@pytest.mark.parametrize("groups", BLOCKS, ids=str)
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


@pytest.mark.parametrize("groups", BLOCKS, ids=str)
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


# --- Calls ---


def test_what_is_found_where(device):
    mixture = TieredMixture(MIXES["full, window"], device, blocks=40, num_tokens=300)
    tokens = mixture.new(33)
    hashes = hashes_of(tokens)
    mixture.prompt("a", tokens)
    assert mixture.tiers.match(hashes) == (0, 0, 0)
    mixture.remove("a")
    assert mixture.tiers.match(hashes) == (8, 8, 8)
    mixture.settle()
    with mixture.tiers.acquire(hashes[:5]) as lease:
        assert lease.num_blocks == 5
        assert [len(part.pages) for part in lease.leases] == [5, 2]
        lease.wait()
        with pytest.raises(kv.KvcupyError, match="leased"):
            mixture.tiers.clear()
        mixture.tiers.evict(100)
        assert mixture.tiers.match(hashes) == (5, 8, 8)
    assert lease.released
    mixture.evict_all()
    assert mixture.tiers.match(hashes) == (0, 8, 8)
    stats = mixture.tiers.stats()
    assert stats["prefix_hits"] == 5 and stats["prefix_misses"] == 8
    mixture.tiers.clear()
    assert mixture.tiers.match(hashes) == (0, 0, 0)
    mixture.check_empty()
    assert mixture.tiers.closed
    with pytest.raises(kv.KvcupyError, match="closed"):
        mixture.tiers.match(hashes)


def served_once(mixture, *prompts):
    """Serve prompts, and leave their blocks in host memory."""
    for tokens in prompts:
        mixture.prompt("served", tokens)
        mixture.remove("served")
        mixture.evict_all()


@pytest.mark.parametrize("options", [None, {}, {"priority": -1}, {"ttl_s": 0}])
@pytest.mark.parametrize("mix", ["full", "state, window, full"])
def test_what_is_retained_is_evicted_last(device, mix, options):
    """In all groups, so that the prefix stays usable."""
    mixture = TieredMixture(MIXES[mix], device, blocks=20, num_tokens=300)
    first, *others = [mixture.new(33) for _ in range(5)]
    hashes = hashes_of(first[:-1])
    served_once(mixture, first)
    if options is not None:
        assert mixture.tiers.retain(hashes[:4], **options) is None
    served_once(mixture, *others)
    kept = mixture.tiers.match(hashes).host
    assert kept == (4 if options == {} else 0)
    if kept:
        assert mixture.tiers.release(hashes) is None
        served_once(mixture, *others)
        assert mixture.tiers.match(hashes).host == 0
    mixture.check_empty()


@pytest.mark.parametrize("mix", MIXES)
def test_the_last_token_of_a_known_prompt_is_left(device, mix):
    mixture = TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300)
    tokens, interval = mixture.new(32), mixture.interval * PAGE
    for name in "abc":
        mixture.prompt(name, tokens, hashes=hashes_of(tokens))
        mixture.check()
    mixture.remove("a")
    mixture.prompt("a", tokens, hashes=hashes_of(tokens))
    assert mixture.hits[-1] == 31 // interval * interval
    for name in "abc":
        mixture.remove(name)
    assert mixture.tiers.match(hashes_of(tokens)).stores == 32 // PAGE
    mixture.prompt("a", [*tokens, *mixture.new(1)])
    assert mixture.hits[-1] == 32
    mixture.check()
    mixture.check_empty()


def test_a_checkpoint_behind_a_tree_is_in_the_tiers(device):
    mixture = TieredMixture([full(0), recurrent(1)], device, blocks=40, num_tokens=300)
    tokens = mixture.new(17)
    hashes = hashes_of(tokens)
    mixture.cache.add_sequence("a", hashes=hashes)
    mixture.tokens["a"] = []
    mixture.step({"a": tokens[:14]})
    mixture.step({"a": tokens[14:16]}, {"a": [-1, 0]})
    mixture.commit("a", 1)
    mixture.check()
    mixture.remove("a")
    assert mixture.tiers.match(hashes).stores == 4
    mixture.prompt("b", tokens)
    assert mixture.hits == [16]
    mixture.check()
    mixture.check_empty()


def test_a_full_pool_changes_nothing(device):
    """There are too few free pages for the blocks of a prompt."""
    mixture = TieredMixture(MIXES["full, state"], device, blocks=40, num_tokens=64)
    tokens = mixture.new(49)
    mixture.prompt("a", tokens)
    mixture.remove("a")
    mixture.prompt("b", mixture.new(40))
    before = [group.pool.allocator.num_available for group in mixture.cache._groups]
    with pytest.raises(kv.CacheFull):
        mixture.cache.add_sequence("a", hashes=hashes_of(tokens))
    assert "a" not in mixture.cache
    assert [g.pool.allocator.num_available for g in mixture.cache._groups] == before
    mixture.check()
    mixture.remove("b")
    mixture.prompt("a", tokens)
    assert mixture.hits[-1] == 48
    mixture.check_empty()


def test_loads_go_out_in_the_order_of_layers(device):
    """The state first, because it is not waited for layer by layer."""
    groups = [full(1, 5), sliding(0, 2, 4, window=6), recurrent(3)]
    mixture = TieredMixture(groups, device, blocks=40, num_tokens=300)
    tokens = mixture.new(42)
    mixture.prompt("a", tokens)
    mixture.remove("a")
    mixture.evict_all()
    layers = {}
    for cache, group in zip(mixture.caches, mixture.tiers.groups, strict=True):
        for i, layer in enumerate(group.layers):
            layers[cache.engine.load_stream, f"load {i}"] = layer
    with observe.attached(Log()) as log:
        mixture.cache.add_sequence("a", hashes=hashes_of(tokens[:-1]))
    sent = [(stream, name) for when, name, stream in log.lines if when == "before"]
    assert [layers[key] for key in sent if key in layers] == [3, 0, 1, 2, 4, 5]
    mixture.tokens["a"] = tokens[:40]
    mixture.step({"a": tokens[40:]})
    mixture.check_empty()


# --- Stores ---


def served(mixture, prompts):
    """Serve prompts twice, the second time from host memory."""
    for _ in range(2):
        for number, tokens in enumerate(prompts):
            mixture.prompt(f"p{number}", tokens)
            mixture.remove(f"p{number}")
        mixture.evict_all()
        mixture.check()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("write", ["through", "back"])
def test_stores_outlive_the_cache(device, mix, write):
    """Closing writes what is only above, and another model finds none of it."""
    blocks = {}
    tiers = {**stores_of(blocks, 2, "m"), "write": write}
    mixture = TieredMixture(MIXES[mix], device, blocks=24, num_tokens=300, tiers=tiers)
    prompts = mixture.prompts(5)
    served(mixture, prompts)
    hits = mixture.hits[5:]
    mixture.tiers.close()
    again = TieredMixture(MIXES[mix], device, blocks=24, num_tokens=300, tiers=tiers)
    matches = [again.tiers.match(hashes_of(tokens[:-1])) for tokens in prompts]
    assert [PAGE * match.stores for match in matches] >= hits
    assert max(match.host for match in matches) == 0
    served(again, prompts)
    assert again.tiers.stats()["store_hits"] > 0
    assert again.hits[0] >= hits[0]
    again.check_empty()
    other = {**stores_of(blocks, 2, "other"), "write": write}
    other = TieredMixture(MIXES[mix], device, blocks=24, num_tokens=300, tiers=other)
    assert not any(other.tiers.match(hashes_of(tokens)).stores for tokens in prompts)
    other.check_empty()


def test_a_url_opens_a_store_for_each_group(device, monkeypatch):
    """With its own model; the cache closes them."""
    opened, blocks = [], {}

    def open_store(url, pool, *, model, heads):
        opened.append((url, model, heads, MemoryStore(pool, blocks.setdefault((url, model), {}))))
        return opened[-1][-1]

    monkeypatch.setattr(store_tier, "opener", open_store)
    tiers = {"stores": ["file:/near", "file:/far"], "model": "m"}
    mixture = TieredMixture(MIXES["full, state"], device, blocks=10, num_tokens=300, tiers=tiers)
    names = [f"m/{group.name}" for group in mixture.tiers.groups]
    assert [each[:3] for each in opened] == [
        (url, name, None) for name in names for url in tiers["stores"]
    ]
    served(mixture, mixture.prompts(3))
    mixture.check_empty()
    assert all(blocks.values()) and all(store.closed for *_, store in opened)


def test_stores_that_fail_to_open_leave_none_open(device):
    opened = []

    def open_store(pool, model):
        if len(opened) == 3:
            raise OSError("no space")
        opened.append(MemoryStore(pool))
        return opened[-1]

    with pytest.raises(OSError, match="no space"):
        TieredMixture(MIXES["full, state"], device, tiers={"stores": [open_store, open_store]})
    assert len(opened) == 3 and all(store.closed for store in opened)


# --- Failures, and controls: a group that is forgotten is noticed ---


@pytest.mark.parametrize("mix", ["state, window, full", "full", "windows"])
def test_transfers_that_fail_at_random(device, monkeypatch, mix):
    """Blocks are lost, and computed again; none is wrong, and nothing leaks."""
    mixture = TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300)
    rng, issue = np.random.default_rng(4), TransferQueue._issue
    refused = {"load": 0, "save": 0}

    def fails_at_times(queue, batch, other):
        if rng.random() < (0.5 if queue.kind == "load" else 0.2):
            refused[queue.kind] += 1
            raise OSError("no bus")
        return issue(queue, batch, other)

    with monkeypatch.context() as patch:
        patch.setattr(TransferQueue, "_issue", fails_at_times)
        mixture.serve(5, 90)
    assert min(refused.values()) > 0 and mixture.failures > 0
    mixture.check_empty()


# --- Lifetime and refusals ---


def test_caches_are_freed_without_a_search_for_cycles(device):
    mixture = TieredMixture(MIXES["state, window, full"], device, blocks=40, num_tokens=300)
    tokens = mixture.new(42)
    for name in "ab":
        mixture.prompt(name, tokens)
    mixture.fork("a", "c", 20)
    mixture.remove("b")
    mixture.settle()
    gone = [weakref.ref(mixture.cache), weakref.ref(mixture.tiers)]
    gone += [weakref.ref(cache.host.pool) for cache in mixture.caches]
    gc.collect()
    gc.disable()
    try:
        del mixture
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_refusals(device):
    mixture = TieredMixture(MIXES["full, window"], device)
    other = TieredMixture(MIXES["full, window"], device)
    pool = mixture.cache.pool
    with pytest.raises(TypeError, match="groups"):
        kv.TieredCache(groups=pool, host_bytes=1 << 20)
    with pytest.raises(ValueError, match="host_bytes: expected None"):
        kv.TieredCache(pool, pool_like(pool, 4, dtype=pool.dtype), host_bytes=1 << 20)
    with pytest.raises(ValueError, match="host_bytes: expected at least"):
        kv.TieredCache(groups=other.cache, host_bytes=100)
    with pytest.raises(ValueError, match="device_pool"):
        kv.TieredCache(pool, groups=other.cache, host_bytes=1 << 20)
    for options in ({"convert": True}, {"heads": (0, 2)}):
        with pytest.raises(ValueError, match="with groups"):
            kv.TieredCache(groups=other.cache, host_bytes=1 << 20, **options)
    opened = MemoryStore(pool_like(pool, 4, dtype=pool.dtype))
    for stores in (3, "file:/kv", [3], [opened]):
        with pytest.raises(TypeError, match=r"^stores: expected"):
            kv.TieredCache(groups=other.cache, host_bytes=1 << 20, stores=stores)
    with pytest.raises(ValueError, match="once"):
        mixture.cache.attach(mixture.tiers)
    fresh = kv.PagedKVCache(
        num_q_heads=4, groups=MIXES["full, window"], num_tokens=64, page_size=PAGE, device=device
    )
    with pytest.raises(ValueError, match="another"):
        fresh.attach(mixture.tiers)
    with pytest.raises(TypeError, match="groups"):
        fresh.attach(kv.TieredCache(pool, pool_like(pool, 4, dtype=pool.dtype)))
    with pytest.raises(ValueError, match="hashes"):
        fresh.add_sequence("a", hashes=[1])
    calls = {"insert": ([1], [0]), "hold": ([1],), "save": ([1], [0]), "take_host_pages": (1,)}
    for name, arguments in calls.items():
        with pytest.raises(NotImplementedError, match=name):
            getattr(mixture.tiers, name)(*arguments)
