"""A cache with groups over its tiers: `Mixture` with prompts, whose hashes name their blocks."""

from __future__ import annotations

import numpy as np
from groups_model import PAGE, Mixture

import kvcupy as kv


def hashes_of(tokens):
    return kv.block_hashes(tokens, PAGE)


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
