"""Tiers by groups of layers: random programs against a model that knows every token and state."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from groups_model import PAGE, full, latent, recurrent, sliding
from line_process import poll
from stream_cases import Log
from tiered_groups_cases import TieredMixture, hashes_of
from tiered_groups_reference import GroupReference, Reference
from tiered_store_cases import MemoryStore

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.engine import TransferQueue
from kvcupy.cache.hazards import CopiedPages
from kvcupy.cache.paged.sequences import Sequences
from kvcupy.cache.paged.states import StateLoad, States
from kvcupy.cache.pool import pool_like
from kvcupy.cache.tiered import store_tier
from kvcupy.cache.tiered.group_prefixes import GroupedLease
from kvcupy.cache.tiered.prefixes import GroupBlocks

pytestmark = pytest.mark.usefixtures("lenient_host")

MIXES = {
    "window, full": [sliding(0, 1, window=6), full(2)],
    "sinks": [full(0), sliding(1, window=9, sink_tokens=5), latent(2)],
    "full, state": [full(0), recurrent(1, 2)],
    "state, window, full": [recurrent(0), sliding(1, window=7), full(2)],
    "windows": [sliding(0, window=5), sliding(1, window=12, sink_tokens=2)],
}


def stores_of(blocks, number=1, model=""):
    """Options of a cache with stores of each group, whose `blocks` are by model and hash."""

    def store(which):
        return lambda pool, name: MemoryStore(pool, blocks.setdefault((which, name), {}))

    return {"stores": [store(i) for i in range(number)], "model": model}


def prompts_of(mixture, count=8):
    """Prompts that share prefixes of several lengths."""
    rng = np.random.default_rng(3)
    prompts = [mixture.new(30)]
    for _ in range(count - 1):
        stem = prompts[rng.integers(len(prompts))]
        kept = int(rng.integers(len(stem)))
        prompts.append(stem[:kept] + mixture.new(int(rng.integers(3, 40 - kept // 2))))
    return prompts


@contextmanager
def removing_what_fails(mixture):
    """Remove all sequences after a DeviceError: some can only be removed."""
    try:
        yield
    except kv.DeviceError:
        mixture.failures += 1
        for name in list(mixture.cache._sequences._known):
            mixture.cache.remove_sequence(name)
        mixture.tokens.clear()
        mixture.parents.clear()
        mixture.away.clear()


def run(mixture, seed, steps=90):
    rng = np.random.default_rng(seed)
    prompts = prompts_of(mixture)
    mixture.chains = [hashes_of(p) for p in prompts]
    made = 0
    for _ in range(steps):
        names = list(mixture.tokens)
        name = names[rng.integers(len(names))] if names else None
        action = rng.choice(
            ["prompt", "step", "remove", "fork", "pop", "evict", "abort", "offload"],
            p=[0.32, 0.1, 0.25, 0.08, 0.08, 0.08, 0.04, 0.05],
        )
        with removing_what_fails(mixture), suppress(kv.CacheFull):
            if action == "prompt" and len(names) < 4:
                made += 1
                mixture.prompt(
                    f"s{made}", prompts[rng.integers(len(prompts))],
                    chunk=int(rng.choice([5, 8, 16])),
                )  # fmt: skip
            elif name is None:
                continue
            elif action == "offload" and name not in mixture.away:
                mixture.offload(name)
            elif action == "evict":
                mixture.tiers.evict(int(rng.integers(12)))
            elif name in mixture.away and action != "remove":
                mixture.onboard(name)
            elif action == "step":
                mixture.step({name: mixture.new(int(rng.integers(1, 10)))})
            elif action == "abort":
                mixture.step({name: mixture.new(3)}, keep=False)
            elif action == "remove":
                mixture.remove(name)
            elif action == "fork" and len(names) < 4:
                made += 1
                mixture.fork(name, f"s{made}", int(rng.integers(len(mixture.tokens[name]) + 1)))
            elif action == "pop":
                mixture.pop(name, int(rng.integers(min(6, len(mixture.tokens[name]) + 1))))
        mixture.check()
        if mixture.tiers.stats().get("store_stored") is None:
            mixture.check_useful()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", MIXES)
def test_random_operations(device, mix, seed):
    mixture = TieredMixture(MIXES[mix], device, blocks=[12, 40, 6][seed], num_tokens=160)
    run(mixture, seed)
    assert sum(mixture.hits) > 0
    mixture.check_empty()


@pytest.mark.parametrize("mix", MIXES)
def test_random_operations_with_stores(device, mix):
    tiers = stores_of({})
    mixture = TieredMixture(MIXES[mix], device, blocks=6, num_tokens=160, tiers=tiers)
    run(mixture, 7)
    stats = mixture.tiers.stats()
    assert stats["store_put_bytes"] > 0 and stats["store_get_bytes"] > 0
    mixture.check_empty()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mix", MIXES)
def test_hits_are_those_of_a_simulation(device, mix, seed):
    mixture = TieredMixture(
        MIXES[mix], device, blocks=[14, 24][seed], num_tokens=200, tiers={"write": "back"}
    )
    rng = np.random.default_rng(seed)
    prompts = prompts_of(mixture, 12)
    groups = [
        GroupReference(group.blocks, window, cache.host.pool.num_pages)
        for group, cache, window in zip(
            mixture.tiers.groups, mixture.caches,
            [*(g.window for g in mixture.cache._groups), 0], strict=False,
        )
    ]  # fmt: skip
    reference = Reference(groups)
    expected = []
    for _ in range(60):
        tokens = prompts[min(rng.geometric(0.2) - 1, len(prompts) - 1)]
        chunk = int(rng.choice([5, 8, 16]))
        expected.append(PAGE * reference.request(hashes_of(tokens[:-1]), len(tokens), chunk))
        mixture.prompt("a", tokens, chunk=chunk)
        mixture.settle()
        mixture.remove("a")
        mixture.settle()
        mixture.evict_all()
        for known, group in zip(mixture.known(), groups, strict=True):
            assert known == set(group.host)
    assert mixture.hits == expected
    assert 0 < sum(expected) < 60 * sum(map(len, prompts)) / len(prompts)
    mixture.check_empty()


# --- Controls: a group that is forgotten is noticed ---


def served(mixture, prompts):
    """Serve prompts twice, the second time from host memory."""
    for _ in range(2):
        for number, tokens in enumerate(prompts):
            mixture.prompt(f"p{number}", tokens)
            mixture.remove(f"p{number}")
        mixture.evict_all()
        mixture.check()


FORGETTING = {
    "a state": ("full, state", lambda own: own.is_state),
    "a page of a window": ("window, full", lambda own: own.num_last is not None),
    "a page of sink tokens": ("sinks", lambda own: own.num_first),
    "all of a window": ("state, window, full", lambda own: own.num_last and not own.is_state),
}


@pytest.mark.parametrize("what", [None, *FORGETTING])
def test_a_forgotten_group_is_noticed(device, monkeypatch, what):
    mix, forgets = FORGETTING.get(what, ("full, state", lambda own: False))
    mixture = TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300)
    prompts = [mixture.new(42)]
    prompts += [prompts[0][:-10] + mixture.new(8) for _ in range(3)]
    needed, restore = GroupBlocks.needed, Sequences.fill

    def fewer(own, length):
        indices = needed(own, length)
        return indices[1:] if forgets(own) else indices

    def fill(own, sequence, lease, indices):
        """Take a page that nobody has written for those that are missing."""
        restore(own, sequence, lease, indices)
        sequence.pages[sequence.pages < 0] = own._allocator.num_pages - 1

    monkeypatch.setattr(GroupBlocks, "needed", fewer)
    monkeypatch.setattr(Sequences, "fill", fill if what else restore)
    if what is None:
        served(mixture, prompts)
        assert sum(mixture.hits) > 100
        mixture.check_empty()
        return
    if what == "a state":
        # The sequence gets any slot, to which nothing is loaded.
        monkeypatch.setattr(StateLoad, "wait", lambda load, stream=None: None)
        receive = States.receive

        def without_load(states, seq, load):
            return receive(states, seq, lambda slot: CopiedPages(mixture.device.stream()))

        monkeypatch.setattr(States, "receive", without_load)
    with pytest.raises(AssertionError):
        served(mixture, prompts)


def tokens_of(mixture, prompt, count, name="a"):
    """The tokens that a model with attention and states generates greedily."""
    mixture.prompt(name, prompt)
    tokens = []
    for _ in range(count):
        mixture.step({name: [(31 * mixture.seen() + 7) % 1000]})
        tokens.append(mixture.tokens[name][-1])
    mixture.remove(name)
    return tokens


class Generating(TieredMixture):
    """The next token depends on the last outputs of attention, and on the live states."""

    def _attend(self, names, lens):
        self.outputs = []
        self.rng = np.random.default_rng(self.tokens[names[0]][-1])
        super()._attend(names, lens)

    def _check_output(self, got, want, group):
        self.outputs.append(got[-1])

    def _check_state(self, got, want, what):
        self.outputs.append(got)

    def seen(self):
        return int(sum(np.round(np.abs(out) * 64).sum() for out in self.outputs))


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_equal_tokens(device, monkeypatch, mix, forget):
    """With and without hits; where a hit forgets a group's blocks, other tokens come."""
    mixture = Generating(MIXES[mix], device, blocks=40, num_tokens=300)
    prompt = mixture.new(43)
    expected = tokens_of(mixture, prompt, 12)
    mixture.evict_all()
    if forget:  # what is loaded is overwritten
        hand_over = GroupedLease.hand_over

        def overwrite(lease):
            mixture.settle()
            last = mixture.tiers.groups[-1].pool
            for part in last.parts:
                part.owner[...] = 1
            hand_over(lease)

        monkeypatch.setattr(GroupedLease, "hand_over", overwrite)
    assert (tokens_of(mixture, prompt, 12) == expected) is not forget
    assert mixture.hits[-1] > 20


# --- Stores ---


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("write", ["through", "back"])
def test_stores_outlive_the_cache(device, mix, write):
    """Closing writes what is only above, and another model finds none of it."""
    blocks = {}
    tiers = {**stores_of(blocks, 2, "m"), "write": write}
    mixture = TieredMixture(MIXES[mix], device, blocks=24, num_tokens=300, tiers=tiers)
    prompts = prompts_of(mixture, 5)
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


@pytest.mark.parametrize("mix", MIXES)
def test_two_caches_share_stores(device, mix):
    tiers = stores_of({})
    mixtures = [
        TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300, tiers=tiers) for _ in range(2)
    ]
    prompts = prompts_of(mixtures[0], 5)
    served(mixtures[0], prompts)
    assert mixtures[0].tiers.flush() == 0
    mixtures[1].new(mixtures[0]._next)
    match = mixtures[1].tiers.match(hashes_of(prompts[0][:-1]))
    assert match.stores > match.host == 0
    served(mixtures[1], prompts)
    assert mixtures[1].hits[0] == match.stores * PAGE
    assert mixtures[1].tiers.stats()["store_hits"] > 0
    run(mixtures[1], 3, 25)
    for mixture in mixtures:
        mixture.check_empty()


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
    served(mixture, prompts_of(mixture, 3))
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


# --- Retention ---


def served_once(mixture, *prompts):
    """Serve prompts, and leave their blocks in host memory."""
    for tokens in prompts:
        mixture.prompt("served", tokens)
        mixture.remove("served")
        mixture.evict_all()


@pytest.mark.parametrize("options", [None, {}, {"priority": -1}, {"ttl_s": 0}])
@pytest.mark.parametrize("mix", MIXES)
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
def test_blocks_that_are_not_cached_are_skipped(device, mix):
    mixture = TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300)
    tokens = mixture.new(33)
    hashes = hashes_of(tokens)

    def retained():
        return [cache._retentions.priorities for cache in mixture.caches]

    for call in (mixture.tiers.retain, mixture.tiers.release, mixture.tiers.prefetch):
        call(hashes)
        call([])
    assert not any(retained())
    mixture.prompt("a", tokens)
    mixture.remove("a")
    mixture.tiers.retain([*hashes, *hashes_of(mixture.new(8))])
    assert all(retained())
    assert set.union(*map(set, retained())) <= set(hashes)
    for options, error in [({"priority": "high"}, TypeError), ({"ttl_s": -1}, ValueError)]:
        with pytest.raises(error, match=next(iter(options))):
            mixture.tiers.retain(hashes, **options)
    mixture.check_empty()


@pytest.mark.parametrize("mix", MIXES)
def test_without_a_number_all_that_may_go_are_evicted(device, mix):
    """At the end of the block of code the cache is closed."""
    mixture = TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300)
    first, second = mixture.new(33), mixture.new(33)
    mixture.prompt("a", first)
    mixture.prompt("b", second)
    mixture.remove("b")
    mixture.settle()
    mixture.tiers.evict()
    assert mixture.tiers.match(hashes_of(second[:-1])) == (0, 8, 8)
    mixture.check()
    mixture.remove("a")
    mixture.tiers.evict()
    assert mixture.tiers.stats()["device_blocks"] == 0
    with pytest.raises(ValueError, match="num_blocks"):
        mixture.tiers.evict(-1)
    mixture.check_empty()
    with mixture.tiers as tiers:
        assert tiers is mixture.tiers
    assert tiers.closed


@pytest.mark.parametrize("mix", MIXES)
def test_prefetched_blocks_are_in_host_memory(device, mix):
    tiers = stores_of({})
    mixtures = [
        TieredMixture(MIXES[mix], device, blocks=24, num_tokens=300, tiers=tiers) for _ in range(2)
    ]
    tokens = mixtures[0].new(33)
    served_once(mixtures[0], tokens)
    mixtures[0].tiers.flush()
    second = mixtures[1].tiers
    assert second.match(hashes_of(tokens)).host == 0
    assert second.prefetch(hashes_of(tokens)) is None
    assert poll(lambda: second.match(hashes_of(tokens)).host == 8, 10)
    for mixture in mixtures:
        mixture.check_empty()


@pytest.mark.parametrize("mix", MIXES)
def test_blocks_are_retained_at_random(device, mix):
    """Nothing useless is kept."""
    mixture = TieredMixture(MIXES[mix], device, blocks=24, num_tokens=160)
    rng, check = np.random.default_rng(5), mixture.check

    def retain_and_check():
        check()
        chain = mixture.chains[rng.integers(len(mixture.chains))]
        what = rng.choice(["retain", "release", "prefetch", "none"])
        if what == "retain":
            ttl_s = rng.choice([None, 0.0, 1000.0])
            mixture.tiers.retain(chain, priority=int(rng.integers(-2, 3)), ttl_s=ttl_s)
        elif what != "none":
            getattr(mixture.tiers, what)(chain)

    mixture.check = retain_and_check
    run(mixture, 3, 80)
    assert sum(mixture.hits) > 0
    mixture.check_empty()


# --- Forks, pops, and the whole cache ---


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


@pytest.mark.parametrize("mix", ["window, full", "state, window, full"])
def test_behind_a_window_tiers_restore(device, mix):
    mixture = TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300)
    prompt = mixture.new(41)
    mixture.prompt("a", prompt)
    interval = mixture.interval * PAGE
    assert mixture.fork("a", "b", 22) == 22 % interval
    assert mixture.fork("a", "c", 3) == 3
    assert mixture.pop("a", 41 - 26) == 26 % interval
    for name in ("a", "b", "c"):
        mixture.step({name: mixture.new(9)})
    mixture.check()
    mixture.tiers.evict(100)
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


def test_what_is_found_where(device):
    mixture = TieredMixture(MIXES["window, full"], device, blocks=40, num_tokens=300)
    tokens = mixture.new(33)
    hashes = hashes_of(tokens)
    mixture.prompt("a", tokens)
    assert mixture.tiers.match(hashes) == (0, 0, 0)
    mixture.remove("a")
    assert mixture.tiers.match(hashes) == (8, 8, 8)
    mixture.settle()
    with mixture.tiers.acquire(hashes[:5]) as lease:
        assert lease.num_blocks == 5
        assert [len(part.pages) for part in lease.leases] == [2, 5]
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


@pytest.mark.parametrize("mix", MIXES)
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
        run(mixture, 5, 90)
    assert min(refused.values()) > 0 and mixture.failures > 0
    mixture.check_empty()


@pytest.mark.parametrize("group", range(3))
def test_a_load_that_fails(device, monkeypatch, group):
    """The sequence raises until it is removed; then the prompt is computed again."""
    mixture = TieredMixture(MIXES["state, window, full"], device, blocks=40, num_tokens=300)
    tokens = mixture.new(42)
    mixture.prompt("a", tokens)
    mixture.remove("a")
    mixture.evict_all()
    queue = mixture.caches[group].engine._load

    def fail(*arguments):
        raise OSError("no bus")

    with monkeypatch.context() as patch:
        patch.setattr(queue, "_issue", fail)
        with pytest.raises(kv.DeviceError, match="no bus"):
            mixture.prompt("a", tokens)
    assert mixture.hits[-1] > 0
    del mixture.tokens["a"]
    mixture.cache.remove_sequence("a")
    mixture.check()
    mixture.prompt("a", tokens)
    mixture.check_empty()


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
    mixture = TieredMixture(MIXES["window, full"], device)
    other = TieredMixture(MIXES["window, full"], device)
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
        num_q_heads=4, groups=MIXES["window, full"], num_tokens=64, page_size=PAGE, device=device
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
