"""A `PagedKVCache` with a tiered cache, whose tokens say what their rows are."""

from __future__ import annotations

import numpy as np
from engine_cases import load_kernels
from helpers import QUANTISED, demoting
from paged_cases import SMALL
from paged_snapshot import pages_of_pool

import kvcupy as kv

NUM_LAYERS, PAGE, VOCABULARY = 3, 4, 97
BASE = {**SMALL, "num_layers": NUM_LAYERS, "page_size": PAGE, "num_pages": 12}
MLA = {"latent_dim": 16, "rope_dim": 8, "head_dim": 24, "num_kv_heads": 1, "num_q_heads": 4}
FORMATS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "fp8": {"dtype": "fp8_e4m3"},
    "mla": MLA,
    "mla bf16": {**MLA, "dtype": "bf16"},
    "rotated": {"dtype": "nvfp4+hadamard", "head_dim": 16},
    "mla rotated": {**MLA, "dtype": "nvfp4+hadamard", "head_dim": 48, "latent_dim": 32,
                    "rope_dim": 16},
}  # fmt: skip


def tokens_of(seed, count):
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def hashes_of(tokens):
    return kv.block_hashes(tokens, PAGE)


class Prefixed:
    """A cache, and unless `tiered` is False a tiered cache that it shares its pages with.

    Whatever a row holds follows from its token, so that equal tokens have equal blocks.
    """

    def __init__(self, device, *, tiered=True, host_pages=16, tiers=None, stream=None, **options):
        self.device, self.stream = device, stream
        options = {**BASE, **options}
        self.cache = kv.PagedKVCache(device=device, **demoting(options))
        self.is_latent = "latent_dim" in options
        rows, width = options["num_kv_heads"], options["head_dim"]
        latent = options.get("latent_dim", width)
        fmt = np.float32 if options["dtype"] == "fp32" else np.float16
        rng = np.random.default_rng(7)
        shapes = {"query": (options["num_q_heads"], width), "key": (rows, width)}
        shapes["value"] = shapes["key"]
        if self.is_latent:
            shapes["key"], shapes["value"] = (latent,), (width - latent,)
        self.out_shape = (options["num_q_heads"], latent)
        self.stock = [
            rng.standard_normal((NUM_LAYERS, VOCABULARY, *shape)).astype(fmt)
            for shape in shapes.values()
        ]
        self.tiers = None
        if tiered:
            self.host_pool = self.host_pool_of(host_pages, options)
            load_kernels(self.cache.pool, self.host_pool)
            self.tiers = kv.TieredCache(self.cache.pool, self.host_pool, **(tiers or {}))
            self.cache.attach(self.tiers)

    def host_pool_of(self, num_pages, options):
        shape = [num_pages, options["page_size"], NUM_LAYERS]
        more = {"dtype": options["dtype"], "layout": "page_first", "placement": "pinned"}
        if self.is_latent:
            widths = options["latent_dim"], options["rope_dim"]
            return kv.MLAPool(*shape, *widths, device=self.device, **more)
        if options["dtype"] in QUANTISED:
            more["scales"] = True
        heads = options["num_kv_heads"], options["head_dim"]
        return kv.KVPool(*shape, *heads, device=self.device, **more)

    # --- Steps ---

    def rows(self, tokens):
        """Query, key and value of tokens, all layers."""
        return [self.device.asarray(np.ascontiguousarray(s[:, tokens])) for s in self.stock]

    def attend(self, layer, rows, stream=None):
        """Attend in a layer of the running step; return the output on the device."""
        given = [r[layer] for r in rows]
        stream = stream or self.stream
        out = self.device.zeros((rows[0].shape[1], *self.out_shape), self.stock[0].dtype)
        if self.is_latent:
            self.cache.attention_mla(layer, *given, sm_scale=0.2, out=out, stream=stream)
        else:
            self.cache.attention(layer, *given, out=out, stream=stream)
        return out

    def step(self, *names_and_tokens, stream=None):
        """Append tokens: name, tokens, name, tokens, ...; return the outputs as bits."""
        names, tokens = names_and_tokens[::2], names_and_tokens[1::2]
        rows = self.rows([t for one in tokens for t in one])
        with self.cache.forward(list(names), [len(t) for t in tokens]):
            outs = [self.attend(layer, rows, stream) for layer in range(NUM_LAYERS)]
        self.device.synchronize()
        return [self.device.to_numpy(out).copy() for out in outs]

    def prefill(self, name, tokens, hashes=None):
        """Add a sequence, and compute what is not known of it; return how many tokens were."""
        self.cache.add_sequence(name, hashes=hashes_of(tokens) if hashes is None else hashes)
        known = self.cache.sequence_length(name)
        if known < len(tokens):
            self.step(name, tokens[known:])
        return known

    def publish(self, *prompts):
        """Let the tiered cache have the full blocks of prompts."""
        for tokens in prompts:
            self.prefill("publisher", tokens)
            self.cache.remove_sequence("publisher")

    def known(self, tokens):
        """How many tokens a sequence of this prompt begins with, and their bits."""
        self.cache.add_sequence("asks", hashes=hashes_of(tokens))
        count, bits = self.cache.sequence_length("asks"), self.bits("asks")
        self.cache.remove_sequence("asks")
        return count, bits

    # --- What there is ---

    def bits(self, name, stop=None):
        """K and V of a sequence."""
        length = self.cache.sequence_length(name)
        got = self.cache.get_kv(name, 0, length if stop is None else stop)
        self.device.synchronize()
        arrays = [self.device.carrier(a) if hasattr(a, "pointer") else a for a in got]
        return [self.device.to_numpy(a).tobytes() for a in arrays]

    def raw(self, name):
        """All bytes of the pages of a sequence, the scales too."""
        sequences = self.cache._sequences
        pages, past_pages, start = sequences.split(sequences.find(name))
        raw = [part[pages].tobytes() for part in pages_of_pool(self.cache.pool)]
        if len(past_pages):
            past = pages_of_pool(self.cache.past_pool)
            raw += [start, *(part[past_pages].tobytes() for part in past)]
        return raw

    def spoil(self):
        """Overwrite all pages of the device, so that a read that comes too early gets this."""
        self.device.synchronize()
        for view in (self.cache.pool.k, self.cache.pool.v):
            for layer in range(NUM_LAYERS):
                part = view(layer)
                part[...] = 7
        self.device.synchronize()

    def settle(self):
        self.device.synchronize()
        for stream in (self.tiers.engine.load_stream, self.tiers.engine.save_stream):
            stream.synchronize()
        self.tiers.stats()

    def state(self):
        """What a call that raises must leave as it was."""
        known, host = self.cache._sequences._known, self.host_pool.allocator
        return (
            {
                n: (s.length, s.pages.tolist(), list(s.hashes), s.offloaded)
                for n, s in known.items()
            },
            self.cache.num_available_pages, self.cache.total_length, host.num_allocated,
            self.cache._sequences._references.tolist(), self.cache.pool.allocator.num_free,
        )  # fmt: skip

    def assert_no_leak(self, *names):
        """Once sequences are gone, in this order, and all is forgotten, every page is free."""
        for name in names or list(self.cache._sequences._known):
            self.cache.remove_sequence(name)
        sequences = self.cache._sequences
        assert len(sequences) == 0 and self.cache.total_length == 0
        assert not sequences._references.any(), "a page is still referred to"
        assert len(sequences._leased) == 0, "a lease was not released"
        self.tiers.clear()
        for pool in (self.cache.pool, self.host_pool):
            pool.allocator.check_leaks()
            pool.allocator.free(pool.allocator.alloc(pool.num_pages))
        assert self.cache.num_available_pages == self.cache.pool.num_pages


def same_outputs(got, want):
    """Outputs of a step, all layers, bit for bit."""
    for layer, (one, other) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"layer {layer}")


def fresh(device, tokens, *steps, **options):
    """Return the outputs of the last step of a sequence in a new cache, and its contents."""
    plain = Prefixed(device, tiered=False, **options)
    plain.cache.add_sequence("s")
    for part in (tokens, *steps):
        out = plain.step("s", part)
    return out, plain.bits("s")
