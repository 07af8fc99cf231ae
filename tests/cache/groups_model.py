"""A model of mixed layers, and its cache: every token and state is known, and freed memory is NaN.

A token has a number, from which follow its rows in every layer and what it does to a state. So
tokens that a cache asks for again are the same tokens. A sequence is the list of its numbers.
`TieredMixture` is the same over tiers, with prompts whose hashes name their blocks.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import cache as memoised

import numpy as np
from tiered_cases import MemoryStore

import kvcupy as kv
from kvcupy import reference

HEADS, PAGE = 4, 4
SCALE = 0.3  # of scores in latent layers


def full(*layers, **options):
    return kv.FullAttention(layers=layers, num_kv_heads=2, head_dim=8, dtype="fp32", **options)


def sliding(*layers, window, sink_tokens=0):
    return kv.SlidingWindow(
        layers=layers, window=window, sink_tokens=sink_tokens, num_kv_heads=1, head_dim=16,
        v_head_dim=8, dtype="fp32",
    )  # fmt: skip


def latent(*layers):
    return kv.Latent(layers=layers, latent_dim=8, rope_dim=4, dtype="fp32")


def recurrent(*layers, checkpoint_tokens=8):
    state = {"conv": ((4, 3), "bf16"), "ssm": ((2, 5), "fp32")}
    return kv.Recurrent(layers=layers, state=state, checkpoint_tokens=checkpoint_tokens)


MIXES = {
    "full": [full(0, 1)],
    "full, window": [full(0, 3), sliding(1, 2, window=8)],
    "window, full, latent": [sliding(0, window=5, sink_tokens=3), full(2), latent(1, 4)],
    "full, state": [full(0), recurrent(1, 2)],
    "state, window, full": [recurrent(0, 2), sliding(1, window=6), full(3)],
    "windows": [sliding(0, window=1), sliding(1, window=16, sink_tokens=4)],
    "full and state": [full(0, 1), recurrent(1, 2)],
    "two states": [recurrent(0), full(1), recurrent(2), sliding(3, window=40)],
}


@memoised
def rows(layer, token, heads, width):
    return np.random.default_rng([layer, token]).standard_normal((heads, width), np.float32)


def after(state, layer, token):
    """The state behind a token; whole numbers up to 250, which bf16 holds."""
    return (3 * state + token + layer + np.arange(state.size).reshape(state.shape)) % 251


class Taken(Exception):
    """Takes a step back."""


class Mixture:
    """A cache with groups, the tokens of its sequences, and the operations on both."""

    def __init__(self, groups, device, **options):
        shared = {"num_q_heads": HEADS, "page_size": PAGE, "device": device, "max_batch_tokens": 64}
        self.cache = kv.PagedKVCache(groups=groups, **{**shared, "num_tokens": 256, **options})
        self.device = self.cache.device
        self.groups = groups
        self.has_states = any(isinstance(g, kv.Recurrent) for g in groups)
        self.has_windows = any(isinstance(g, kv.SlidingWindow) for g in groups)
        self.tokens: dict[str, list[int]] = {}
        self.parents: dict[str, list[int]] = {}
        self.slid: dict[str, tuple[int, int]] = {}  # window and sink tokens
        self.rng = np.random.default_rng(11)
        self._next = 0

    def new(self, count):
        """Numbers of new tokens."""
        self._next += count
        return list(range(self._next - count, self._next))

    # --- Operations ---

    def add(self, name):
        self.cache.add_sequence(name)
        self.tokens[name] = []

    def remove(self, name):
        self.cache.remove_sequence(name)
        del self.tokens[name]
        self.slid.pop(name, None)

    def fork(self, parent, child, at=None):
        n = len(self.tokens[parent]) if at is None else at
        restorable = self.cache.restorable_length(parent, n)
        r = self.cache.fork_sequence(parent, child, at)
        self._check_restorable(restorable, n - r)
        self._check_missing(r, n, parent)
        self.tokens[child] = self.tokens[parent][: n - r]
        if parent in self.slid:
            self.slid[child] = self.slid[parent]
        return r

    def pop(self, name, count):
        left = len(self.tokens[name]) - count
        restorable = self.cache.restorable_length(name, left)
        r = self.cache.pop_tokens(name, count)
        self._check_restorable(restorable, left - r)
        self._check_missing(r, left, name)
        self.tokens[name] = self.tokens[name][: left - r]
        return r

    def _check_restorable(self, reported, restored):
        assert reported == restored

    def slide(self, name, window, sink_tokens):
        """Evict tokens at the end of steps from now on. A cache of one group can."""
        self.cache.enable_sliding_window(name, window, sink_tokens)
        self.slid[name] = window, sink_tokens

    def _slide(self, name):
        window, sink_tokens = self.slid.get(name, (0, 0))
        if window and name not in self.parents and len(self.tokens[name]) > window + sink_tokens:
            self.tokens[name][sink_tokens:-window] = []

    def set_kv(self, name, start, tokens):
        """Replace tokens by others. In a cache of one group."""
        (group,) = self.groups
        for layer in group.layers:
            both = np.array([rows(layer, t, 2, 16) for t in tokens]).reshape(-1, 2, 16)
            k, v = (
                self.device.asarray(np.ascontiguousarray(a, np.float32))
                for a in np.split(both, 2, -1)
            )
            self.cache.set_kv(name, start, k, v, layer=layer)
        self.tokens[name][start : start + len(tokens)] = tokens

    def _check_missing(self, r, n, parent):
        assert 0 <= r <= n
        if n == len(self.tokens[parent]) or not (self.has_states or self.has_windows):
            assert r == 0

    def step(self, appended, trees=None, *, work=True, keep=True, keep_step=False):
        """A step that appends tokens, by name; `keep` False: an exception takes it back.

        `work` False: nothing is computed in the step. "attention": states are not updated.
        """
        names, lens = list(appended), [len(tokens) for tokens in appended.values()]
        before = {name: list(self.tokens[name]) for name in names}
        nodes = None if trees is None else [trees.get(name) for name in names]
        self._read_states(names)
        with (
            suppress(Taken),
            self.cache.forward(list(names), lens, token_tree=nodes, keep_step=keep_step),
        ):
            for name in names:
                self.tokens[name] = before[name] + list(appended[name])
                if trees and trees.get(name):
                    self.parents.setdefault(name, []).extend(trees[name])
            if work:
                self._attend(names, lens)
            if work is True:
                self._update(names, lens)
            if not keep:
                raise Taken
        if keep:
            for name in names:
                self._slide(name)
        else:
            for name in names:
                length = self.cache.sequence_length(name)
                assert length == len(before[name]) or (self.has_states and work is True)
                assert length <= len(before[name])
                self.tokens[name] = before[name][:length]
                self.parents.pop(name, None)

    def commit(self, name, leaf):
        tokens, parents = self.tokens[name], self.parents.pop(name)
        first, path = len(tokens) - len(parents), []
        while leaf >= 0:
            path.insert(0, leaf)
            leaf = parents[leaf]
        (r,) = self.cache.commit_token_tree([name], [path[-1] if path else -1])
        assert r == (len(path) if self.has_states and len(path) < len(parents) else 0)
        kept = path[: len(path) - r]
        self.tokens[name] = tokens[:first] + [tokens[first + node] for node in kept]
        self._slide(name)

    # --- What a model does ---

    def _attend(self, names, lens):
        total = sum(lens)
        for group in self.groups:
            if isinstance(group, kv.Recurrent):
                continue
            is_latent = isinstance(group, kv.Latent)
            if is_latent:
                heads, width, v_width = 1, 12, 8
            else:
                heads, width, v_width = group.num_kv_heads, group.head_dim, group.v_head_dim
            for layer in group.layers:
                query = self.rng.standard_normal((total, HEADS, width), np.float32)

                def cached(name, layer=layer, heads=heads, width=width, v_width=v_width,
                           is_latent=is_latent):  # fmt: skip
                    both = [rows(layer, t, heads, width + v_width) for t in self.tokens[name]]
                    both = np.array(both).reshape(-1, heads, width + v_width)
                    key = both[..., :width]
                    return key, key[..., :v_width] if is_latent else both[..., width:]

                new = [tuple(a[-n:] for a in cached(m)) for m, n in zip(names, lens, strict=True)]
                key, value = (np.concatenate(side) for side in zip(*new, strict=True))
                args = [self.device.asarray(a) for a in (query, key, value)]
                if is_latent:
                    parts = (np.ascontiguousarray(a) for a in (key[:, 0, :8], key[:, 0, 8:]))
                    parts = map(self.device.asarray, parts)
                    got = self.cache.attention_mla(layer, args[0], *parts, sm_scale=SCALE)
                else:
                    got = self.cache.attention(layer, *args)
                want = self._expected(group, query, names, lens, [cached(name) for name in names])
                self._check_output(self.device.to_numpy(got), want, group)

    def _check_output(self, got, want, group):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=str(group))

    def _expected(self, group, query, names, lens, caches):
        longest = max(len(key) for key, _ in caches)
        padded = [
            np.stack([np.pad(part, ((0, longest - len(part)), (0, 0), (0, 0))) for part in side])
            for side in zip(*caches, strict=True)
        ]
        mask = positions = None
        nodes = np.array([len(self.parents.get(name, ())) for name in names])
        if nodes.any():  # a node sees its ancestors, a plain token those before it
            mask = np.zeros((sum(lens), nodes.max()), bool)
            positions = np.zeros((len(names), nodes.max()), np.int64)
            first = 0
            for row, (name, count) in enumerate(zip(names, lens, strict=True)):
                parents = self.parents.get(name, [])
                for node, parent in enumerate(parents):
                    committed = len(caches[row][0]) - len(parents)
                    positions[row, node] = committed if parent < 0 else positions[row, parent] + 1
                for row, node in enumerate(range(len(parents) - count, len(parents))):
                    while node >= 0:
                        mask[first + row, node] = True
                        node = parents[node]
                first += count
        out, _, _ = reference.paged_attention(
            query, *padded, np.arange(len(names))[:, None], np.array([len(k) for k, _ in caches]),
            query_lens=np.array(lens), window=getattr(group, "window", None),
            sink_tokens=getattr(group, "sink_tokens", None) or None,
            sm_scale=SCALE if isinstance(group, kv.Latent) else None, tree_mask=mask,
            tree_lens=None if mask is None else nodes, tree_positions=positions,
        )  # fmt: skip
        return out

    def check_contents(self, name, start, stop):
        """Compare what layers hold of some tokens that no window has freed."""
        tokens = self.tokens[name][start:stop]
        for group in self.groups:
            if isinstance(group, kv.Recurrent):
                continue
            is_latent = isinstance(group, kv.Latent)
            heads, width, v_width = (
                (1, 12, 8) if is_latent
                else (group.num_kv_heads, group.head_dim, group.v_head_dim)
            )  # fmt: skip
            for layer in group.layers:
                k, v = map(self.device.to_numpy, self.cache.get_kv(name, start, stop, layer=layer))
                both = [rows(layer, t, heads, width + v_width) for t in tokens]
                both = np.array(both).reshape(-1, heads, width + v_width)
                got = np.concatenate([k, v], -1)
                want = both[:, 0, :width] if is_latent else both
                np.testing.assert_array_equal(got, want, err_msg=f"{name} layer {layer}")

    def states(self, tokens, layer, shape):
        state = np.zeros(shape, np.int64)
        for token in tokens:
            state = after(state, layer, token)
        return state

    def _read_states(self, names):
        """Compare the states before a step."""
        if not self.has_states:
            return
        slots = self.cache.state_slots_of(names)
        for group in self.groups:
            if not isinstance(group, kv.Recurrent):
                continue
            for name, slot in zip(names, slots, strict=True):
                if slot < 0:
                    assert not self.tokens[name]
                    continue
                for part, (shape, _) in group.state.items():
                    array = self.device.to_numpy(self.cache.state(group.layers[0], part))
                    want = self.states(self.tokens[name], group.layers[0], shape)
                    self._check_state(array[slot].astype(np.float64), want, f"{name} {part}")

    def _update(self, names, lens):
        if not self.has_states:
            return
        slots = self.device.to_numpy(self.cache.state_slots())
        assert len(set(slots.tolist())) == len(names)
        for group in self.groups:
            if not isinstance(group, kv.Recurrent):
                continue
            for layer in group.layers:
                for part, (shape, _) in group.state.items():
                    array = self.cache.state(layer, part)
                    for name, count, slot in zip(names, lens, slots, strict=True):
                        tokens = self.tokens[name]
                        got = self.device.to_numpy(array)[slot].astype(np.float64)
                        want = self.states(tokens[:-count], layer, shape)
                        self._check_state(got, want, f"{name} {layer} {part}")
                        array[int(slot)] = self.device.asarray(
                            self.states(tokens, layer, shape).astype(array.dtype)
                        )

    def _check_state(self, got, want, what):
        np.testing.assert_array_equal(got, want, err_msg=what)

    # --- Invariants ---

    def check(self):
        """Compare lengths and pages with what may be held, and overwrite all that is free."""
        cache = self.cache
        assert {name: cache.sequence_length(name) for name in self.tokens} == {
            name: len(tokens) for name, tokens in self.tokens.items()
        }
        assert cache.total_length == sum(map(len, self.tokens.values()))
        for group in cache._groups:
            known = group.sequences._known
            counts = np.zeros(group.pool.num_pages, int)
            for name, sequence in known.items():
                pages = sequence.pages[sequence.pages >= 0]
                counts[pages] += 1
                if group.window and name not in self.parents:
                    needed = -(-group.sink_tokens // PAGE) - (-(group.window + PAGE) // PAGE) + 1
                    assert len(pages) <= needed, f"{name} has {len(pages)} pages of {group.window}"
            assert counts.tolist() == group.sequences._references.tolist()
            assert (counts > 0).sum() == group.pool.allocator.num_allocated
        self.poison()

    def poison(self):
        """Overwrite free pages and states with NaN."""
        self.device.synchronize()
        for group in self.cache._groups:
            pool = group.pool
            free = np.setdiff1d(np.arange(pool.num_pages), pool.allocator.allocated())
            for layer in range(pool.num_layers):
                for part in pool.views(layer):
                    self.device.carrier(part).view(np.float32)[free] = np.nan
        states = self.cache._states
        if states is not None:
            allocator = states._allocator
            free = np.setdiff1d(np.arange(states.num_slots), allocator.allocated())
            for array in states._arrays.values():
                array[free] = np.nan
        self.device.synchronize()

    def check_empty(self):
        for name in list(self.tokens):
            self.remove(name)
        for group in self.cache._groups:
            group.pool.allocator.check_leaks()
        if self.cache._states is not None:
            self.cache._states._allocator.check_leaks()


# --- Over tiers ---


def hashes_of(tokens):
    return kv.block_hashes(tokens, PAGE)


def stores_of(blocks, number=1, model=""):
    """Options of a cache with stores of each group, whose `blocks` are by model and hash."""

    def store(which):
        return lambda pool, name: MemoryStore(pool, blocks.setdefault((which, name), {}))

    return {"stores": [store(i) for i in range(number)], "model": model}


class TieredMixture(Mixture):
    """Adds sequences by their prompts; what is cached of them is not computed again.

    Attributes
    ----------
    tiers : the TieredCache, with room for about `blocks` blocks of each group in host memory
    hits : how many tokens were not computed, of each prompt
    failures : how often sequences were lost to a DeviceError
    away : the sequences in host memory
    """

    def __init__(self, groups, device, *, blocks=16, tiers=None, **options):
        super().__init__(groups, device, **options)
        described = self.cache._tier_groups()
        self.interval = described[0].blocks.interval
        pages = [-(-blocks // self.interval) if g.blocks.is_state else blocks for g in described]
        num_bytes = sum(n * g.pool.page_bytes for n, g in zip(pages, described, strict=True))
        self.tiers = kv.TieredCache(groups=self.cache, host_bytes=num_bytes, **(tiers or {}))
        self.cache.attach(self.tiers)
        self.caches = self.tiers._tiers
        self.hits, self.failures = [], 0
        self.away: set[str] = set()

    def offload(self, name):
        self.cache.offload(name)
        if self.tokens[name]:
            self.away.add(name)

    def onboard(self, name):
        self.cache.onboard(name)
        self.away.discard(name)

    def remove(self, name):
        super().remove(name)
        self.away.discard(name)

    def prompt(self, name, tokens, *, chunk=8, work=True, hashes=None):
        """Add a sequence, and compute the tokens of its prompt that are not cached."""
        hashes = hashes_of(tokens[:-1]) if hashes is None else hashes
        whole = tokens[: PAGE * len(hashes)]
        self.cache.add_sequence(name, hashes=hashes, num_tokens=len(tokens), token_ids=whole)
        length = self.cache.sequence_length(name)
        self.tokens[name] = list(tokens[:length])
        self.hits.append(length)
        try:
            while length < len(tokens):  # steps end at multiples of the chunk
                stop = min(len(tokens), length - length % chunk + chunk)
                self.step({name: tokens[length:stop]}, work=work)
                length = stop
        except kv.CacheFull:
            self.remove(name)
            raise

    def _check_restorable(self, reported, restored):
        assert reported <= restored  # tiers may have more

    def settle(self):
        """Wait for all transfers."""
        self.device.synchronize()
        for cache in self.caches:
            for stream in (cache.engine.load_stream, cache.engine.save_stream):
                stream.synchronize()
        self.tiers.stats()
        for cache in self.caches:
            for pool in (cache.device.pool, cache.host.pool):
                assert pool.allocator.num_free >= 0  # asking lets it look at transfers

    def prompts(self, count=8):
        """Prompts that share prefixes of several lengths; their hashes are the chains."""
        rng = np.random.default_rng(3)
        prompts = [self.new(30)]
        for _ in range(count - 1):
            stem = prompts[rng.integers(len(prompts))]
            kept = int(rng.integers(len(stem)))
            prompts.append(stem[:kept] + self.new(int(rng.integers(3, 40 - kept // 2))))
        self.chains = [hashes_of(tokens) for tokens in prompts]
        return prompts

    @contextmanager
    def removing_what_fails(self):
        """Remove all sequences after a DeviceError: some can only be removed."""
        try:
            yield
        except kv.DeviceError:
            self.failures += 1
            for name in list(self.cache._sequences._known):
                self.cache.remove_sequence(name)
            self.tokens.clear()
            self.parents.clear()
            self.away.clear()

    def serve(self, seed, steps):
        """Prompts that share prefixes, and what may happen to their sequences, at random."""
        rng, prompts = np.random.default_rng(seed), self.prompts()
        for number in range(steps):
            names = list(self.tokens)
            name = names[rng.integers(len(names))] if names else None
            common, rare = ["prompt", "remove"] * 3, ["step", "fork", "evict", "offload"]
            action = rng.choice(common + rare)
            with self.removing_what_fails(), suppress(kv.CacheFull):
                if action == "evict":
                    self.tiers.evict(int(rng.integers(12)))
                elif name is None or (action == "prompt" and len(names) < 4):
                    tokens = prompts[rng.integers(len(prompts))]
                    self.prompt(number, tokens, chunk=int(rng.choice([5, 8, 16])))
                elif action == "remove":
                    self.remove(name)
                elif name in self.away:
                    self.onboard(name)
                elif action == "offload":
                    self.offload(name)
                elif action == "step":
                    self.step({name: self.new(int(rng.integers(1, 10)))})
                elif action == "fork" and len(names) < 4:
                    self.fork(name, number, int(rng.integers(len(self.tokens[name]) + 1)))
            self.check()

    def evict_all(self):
        """Leave blocks in host memory and below only."""
        self.tiers.evict(10_000)
        self.settle()

    def check(self):
        """Compare lengths, references and owners of pages, and overwrite all that is free."""
        self.settle()
        assert {name: self.cache.sequence_length(name) for name in self.tokens} == {
            name: len(tokens) for name, tokens in self.tokens.items()
        }
        for group, cache in zip(self.cache._groups, self.caches, strict=False):
            references = np.zeros(group.pool.num_pages, int)
            for sequence in group.sequences._known.values():
                references[sequence.pages[sequence.pages >= 0]] += 1
            used = references > 0
            for page, leases in group.sequences._leased._of.items():
                references[page] += len(leases)
                assert used[page], "a lease of a page without users"
            assert references.tolist() == group.sequences._references.tolist()
            owned = cache.device.owned
            assert not (owned & used & ~np.isin(range(len(owned)), [*group.sequences._leased._of])
                        ).any(), "a page with two owners"  # fmt: skip
            assert (owned | used).sum() == group.pool.allocator.num_allocated
        self.poison()

    def poison(self):
        super().poison()
        for cache in self.caches:
            pool = cache.host.pool
            free = np.setdiff1d(np.arange(pool.num_pages), pool.allocator.allocated())
            for part in pool.parts:
                part.owner[free] = 0x7F if pool.dtype == "int8" else np.nan

    def known(self):
        """The blocks of each group in any tier, by the caller's hashes."""
        found = []
        for cache in self.caches:
            found.append({*cache.device.pages, *cache.host.pages})
        return found

    def check_useful(self):
        """Every block in a tier is needed by a usable prefix, or one in use."""
        self.tiers.stats()
        has, chains = self.known(), {}
        for hashes in self.chains:
            chains |= {hash: hashes[: i + 1] for i, hash in enumerate(hashes)}
        used = {hash for keys in self.cache._tiers._chains.values() for hash in keys}
        blocks = [group.blocks for group in self.tiers.groups]
        needed = [set(used) for _ in blocks]
        for chain in chains.values():
            if all(
                len(chain) % own.interval == 0
                and all(chain[i] in used | has[g] for i in own.needed(len(chain)))
                for g, own in enumerate(blocks)
            ):
                for g, own in enumerate(blocks):
                    needed[g] |= {chain[i] for i in own.needed(len(chain))}
        for g, kept in enumerate(has):
            assert kept <= needed[g], f"{len(kept - needed[g])} blocks of {self.tiers.groups[g]}"

    chains = ()

    def check_empty(self):
        for name in list(self.tokens):
            self.remove(name)
        self.settle()
        self.tiers.flush()
        self.tiers.clear()
        for cache in self.caches:
            cache.host.pool.allocator.check_leaks()
        super().check_empty()
        self.tiers.close()
