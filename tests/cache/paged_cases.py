"""A `PagedKVCache` and its model, driven together: each call goes to both, and all is compared.

Attention is compared with float64 within the model's error bound. Lengths, free pages, positions,
tables and contents are compared exactly, except that a rotated key may be a unit in the last place
off.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from engine_cases import load_kernels
from helpers import DTYPE, QUANTISED, Case, as_numpy, compare, demoting, from_values
from paged_model import Full, PagedModel, stored_errors

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import bytes_of
from kvcupy.testing.arrays import assert_near

SMALL = {
    "num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_pages": 40,
    "page_size": 4, "dtype": "fp32",
}  # fmt: skip


def rope_of(width, positions=256, **scaling):
    """A table, NumPy float32, whose slowest pairs rotate visibly within a few tokens."""
    return reference.rope_table(positions, width, base=100.0, **scaling)


class Twin:
    """A cache and the model of it.

    Parameters
    ----------
    options : of the constructor, over `SMALL`; `rope` as a NumPy array, a demotion as for
        `helpers.demoting`; with latent_dim, head_dim is the width of the whole row
    fmt : of queries, keys and values that steps bring; None is the format of the cache, bf16
        if it is quantised
    """

    def __init__(self, device, *, seed=0, fmt=None, **options):
        self.device, self.seed = device, seed
        self.options = {**SMALL, **options}
        self.model = PagedModel(**self.options)
        self.latent_dim = self.model.latent_dim
        on_device = {
            name: device.asarray(value) if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        self.cache = kv.PagedKVCache(**demoting(on_device), device=device)
        self.is_quantised = self.model.fmt not in ("fp32", "fp16", "bf16")
        self.read_fmt = "bf16" if self.is_quantised else self.model.fmt
        self.fmt = fmt or self.read_fmt
        self.rng = np.random.default_rng(seed)
        self.layers = range(self.options["num_layers"])
        self._cases = itertools.count(1000 * seed)

    # Calls

    def both(self, call, *arguments, **keywords):
        """Make a call of both; the one runs out of pages exactly if the other does.

        Returns whether they did not.
        """
        try:
            getattr(self.model, call)(*arguments, **keywords)
        except Full:
            before = self.lengths()
            with pytest.raises(kv.CacheFull):
                self.on_cache(call, *arguments, **keywords)
            assert self.lengths() == before, "lengths after CacheFull"
            return False
        self.on_cache(call, *arguments, **keywords)
        return True

    def on_cache(self, call, *arguments, **keywords):
        names = {
            "add": "add_sequence", "remove": "remove_sequence", "fork": "fork_sequence",
            "pop": "pop_tokens", "begin": "begin_forward", "end": "end_forward",
            "commit": "commit_token_tree",
        }  # fmt: skip
        if call == "begin":
            *arguments, trees = arguments
            keywords = {} if trees is None else {"token_tree": trees}
        return getattr(self.cache, names.get(call, call))(*arguments, **keywords)

    def add(self, *names):
        for name in names:
            self.both("add", name)

    def remove(self, *names):
        for name in names:
            self.both("remove", name)
            self.check(contents=False)

    def fork(self, parent, child, at=None):
        done = self.both("fork", parent, child, *(() if at is None else (at,)))
        self.check()
        return done

    def pop(self, name, count):
        self.both("pop", name, count)
        self.check()

    def slide(self, name, window, sink_tokens=0):
        self.both("enable_sliding_window", name, window, sink_tokens)
        self.check(contents=False)

    def commit(self, names, leaves):
        self.both("commit", list(names), list(leaves))
        self.check()

    def clear(self):
        self.both("clear")
        self.check()

    def set_kv(self, name, start, count, fmt=None):
        """Replace some tokens by random ones; return False if there is no page for a copy."""
        fmt, model = fmt or self.fmt, self.model
        shape, case = (len(self.layers), count), Case(self.device, next(self._cases))
        if self.latent_dim:
            widths = (self.latent_dim,), (model.k_width - self.latent_dim,)
        else:
            widths = (model.heads, model.k_width), (model.heads, model.v_width)
        rows = [from_values(self.rng.standard_normal((*shape, *width)), fmt) for width in widths]
        placed = [case.place(a, fmt).array for a in rows]
        try:
            model.set_kv(name, start, *self.as_model(*rows))
        except Full:
            with pytest.raises(kv.CacheFull):
                self.cache.set_kv(name, start, *placed)
            done = False
        else:
            self.cache.set_kv(name, start, *placed)
            done = True
        case.check("", [])
        self.check()
        return done

    def as_model(self, key, value):
        """K and V of the model: of latents K is the latent and the rope key side by side."""
        if not self.latent_dim:
            return key, value
        return np.concatenate([key, value], -1)[..., None, :], key[..., None, :]

    # Steps

    def prefill(self, *names_and_lens):
        """Add sequences and append to them in one step: name, length, name, length, ..."""
        names, lens = names_and_lens[::2], names_and_lens[1::2]
        self.add(*names)
        return self.step(names, lens)

    def step(self, names, lens, trees=None, *, contents=True, **options):
        """Do a whole step, with attention in every layer; False if it does not fit.

        `options` are passed to `attend`.
        """
        names, lens = list(names), list(lens)
        if not self.both("begin", names, lens, trees):
            self.check()
            return False
        self.attend(**options)
        self.both("end")
        self.check(contents=contents)
        return True

    def attend(self, *, layers=None, per_layer=None, **options):
        """Attend in the layers of a begun step, then compare its tables and what was stored."""
        for layer in self.layers if layers is None else layers:
            more = {} if per_layer is None else per_layer[layer]
            self.attend_layer(layer, **options, **more)
        self.check_tables(self.layers if layers is None else layers)

    def attend_layer(
        self, layer, *, packed=False, padding=0, given_out=True, loud=2.0, fmt=None, stream=None,
        **masks,
    ):  # fmt: skip
        """Attend once, to random rows, with canaries around and NaN in the padding."""
        fmt = fmt or self.fmt
        model, case = self.model, Case(self.device, next(self._cases))
        count = len(model.new_tokens())
        heads, kv_heads = self.options["num_q_heads"], model.heads
        if self.latent_dim:
            masks.setdefault("sm_scale", 0.2)
            names, packed = ("query", "latent", "rope_key"), False
            rest = (self.latent_dim,), (model.k_width - self.latent_dim,)
        else:
            names = "query", "key", "value"
            rest = (kv_heads, model.k_width), (kv_heads, model.v_width)
        sizes = loud, loud, loud if self.latent_dim else 1.0
        content = [
            self.rng.standard_normal((count + padding, *shape)) * size
            for shape, size in zip(((heads, model.k_width), *rest), sizes, strict=True)
        ]
        for rows in content:
            rows[count:] = np.nan
        content = [from_values(rows, fmt) for rows in content]
        if packed:
            whole = case.place(np.concatenate(content, 1), fmt, name="qkv")
            cuts = np.cumsum([0, heads, kv_heads, kv_heads])
            given = [whole.sub(lambda a, i=i: a[:, cuts[i] : cuts[i + 1]]) for i in range(3)]
        else:
            given = [case.place(a, fmt, name=n) for a, n in zip(content, names, strict=True)]
        out = None
        if given_out:
            out = case.output(fmt, (count + padding, heads, model.v_width), name="out")
        passed = {
            name: case.place(value, "fp32", name=name).array
            if isinstance(value, np.ndarray)
            else value
            for name, value in masks.items()
        }
        if stream is not None:
            self.device.synchronize()
        call = self.cache.attention_qkv if packed else self.cache.attention
        if self.latent_dim:
            call = self.cache.attention_mla
        got = call(
            layer, *([whole.array] if packed else [a.array for a in given]),
            out=None if out is None else out.array, stream=stream, **passed,
        )  # fmt: skip
        if stream is not None:
            stream.synchronize()
        query, *rest = (a.view for a in given)
        want, allowed = model.attention(layer, query, *self.as_model(*rest), **masks)
        assert tuple(got.shape) == (count + padding, *want.shape[1:])
        stored = as_numpy(self.device, got, fmt)
        values = reference.decode(stored, fmt)[:count]
        assert_near(f"out of layer {layer}", values, want, allowed, self.seed)
        if out is None:
            assert not stored[count:].view(np.uint8).any(), "padding of out is not zero"
        else:
            reference.bits_of(out.view, fmt)[:count] = reference.bits_of(stored, fmt)[:count]
        case.check("", [])

    # Comparisons

    def lengths(self):
        return {name: self.cache.sequence_length(name) for name in self.model.sequences}

    def check(self, contents=True):
        """Compare lengths, free pages, and what every sequence holds."""
        model, cache = self.model, self.cache
        want = {name: len(s.tokens) for name, s in model.sequences.items()}
        assert self.lengths() == want, f"lengths {self.lengths()}, want {want}"
        assert all(name in cache for name in model.sequences)
        assert cache.total_length == model.total_length
        assert cache.num_available_pages == model.available, "free pages"
        assert cache.num_available_demoted_pages == model.available_demoted, "past pages"
        if contents:
            for name in model.sequences:
                self.check_contents(name)

    def check_contents(self, name, start=0, stop=None, dtype=None):
        """Compare K and V of all layers of some tokens."""
        stop = len(self.model.sequences[name].tokens) if stop is None else stop
        got = self.cache.get_kv(name, start, stop, dtype=dtype)
        key, value = self.model.get_kv(name, start, stop)
        if self.latent_dim and start < stop:
            key, value = np.split(key[:, :, 0], [self.latent_dim], -1)
        is_demoted = self.model.is_demoted(name)[start:stop]
        for side, array, values in zip("KV", got, (key, value), strict=True):
            label = f"{side} of {name!r}"
            assert tuple(array.shape)[:2] == (len(self.layers), stop - start), label
            if start < stop:
                is_key = side == ("V" if self.latent_dim else "K")  # what is rotated
                self.compare_rows(label, array, values, dtype or self.read_fmt, is_key, is_demoted)

    def compare_rows(self, label, array, values, fmt, is_key, is_demoted=None):
        """Compare rows from the cache with values of the model, rounded to `fmt`."""
        assert tuple(array.shape) == values.shape, label
        stored = as_numpy(self.device, array, fmt)
        if is_key and self.model.mode == "normal":
            allowed = stored_errors(values, self.fmt, self.model.fmt)
            if is_demoted is not None and is_demoted.any():
                is_demoted = is_demoted.reshape(1, -1, *[1] * (values.ndim - 2))
                further = 2 * stored_errors(values, self.fmt, self.model.past)
                allowed = np.where(is_demoted, allowed + further, allowed)
            got = reference.decode(stored, fmt)
            assert_near(label, got, values.astype(np.float64), allowed, self.seed)
        else:
            want = reference.encode(values, fmt).view(DTYPE[fmt])
            compare(stored, want, fmt, exact=True, name=label, seed=self.seed)

    def check_tables(self, layers):
        """Compare the tables of a begun step; in the layers done, tokens are where slots say."""
        model, cache = self.model, self.cache
        new, to_numpy = model.new_tokens(), self.device.to_numpy
        positions, slots = (to_numpy(a) for a in (cache.query_positions(), cache.slot_mapping()))
        assert positions.dtype == np.int32 and slots.dtype == np.int64
        np.testing.assert_array_equal(positions, model.query_positions())
        assert slots.shape == (len(new),) and len(set(slots.tolist())) == len(new)
        pages, size = self.options["num_pages"], self.options["page_size"]
        assert slots.min() >= 0 and slots.max() < pages * size
        np.testing.assert_array_equal(slots % size, [s.places[i][1] for s, i in new])
        if not model.past:
            self.check_page_lists(slots)
        if self.is_quantised or self.latent_dim:
            return
        for layer, side in itertools.product(layers, "KV"):
            rows = {"K": cache.pool.k, "V": cache.pool.v}[side](layer)
            rows = as_numpy(self.device, rows, model.fmt)
            rows = rows.reshape(pages * size, model.heads, -1)[slots]
            want = np.stack([getattr(s.tokens[i], side.lower())[layer] for s, i in new])
            label = f"{side} at the slots of layer {layer}"
            self.compare_rows(label, rows, want, model.fmt, side == "K")

    def check_page_lists(self, slots):
        """Compare the block table and the page lists with each other, the model and the slots."""
        size, to_numpy = self.options["page_size"], self.device.to_numpy
        table = to_numpy(self.cache.block_table())
        indptr, indices, last = (to_numpy(a) for a in self.cache.page_table_csr())
        assert {a.dtype for a in (table, indptr, indices, last)} == {np.dtype(np.int32)}
        lists = [indices[a:b] for a, b in itertools.pairwise(indptr)]
        assert table.shape == (len(lists), max(map(len, lists)))
        row = 0
        for listed, padded, used, (sequence, count) in zip(
            lists, table, last, self.model.batch, strict=True
        ):
            np.testing.assert_array_equal(padded, np.pad(listed, (0, len(padded) - len(listed))))
            order = list(dict.fromkeys(page for page, _ in sequence.places))
            held = [order.index(page) for page, _ in sequence.places[-count:]]
            assert used == sequence.places[-1][1] + 1
            if not sequence.slid:  # else pages of an evicted span may be among them
                assert len(listed) == len(order)
                np.testing.assert_array_equal(slots[row : row + count] // size, listed[held])
            row += count

    def check_empty(self):
        """Assert that nothing is left, and every page free."""
        assert not self.model.sequences
        assert self.cache.num_available_pages == self.options["num_pages"] - self.model.taken
        assert self.cache.num_available_demoted_pages == self.model.num_demoted_pages
        assert self.cache.total_length == 0


# Trees -------------------------------------------------------------------------------------------

BINARY = [-1, 0, 0, 1, 1, 2, 2]
CHAIN = [-1, 0, 1, 2, 3]


def random_tree(rng, count, first=0):
    """Parents of `count` nodes that follow `first` others."""
    return [int(rng.integers(-1, first + i)) for i in range(count)]


# --- What can be seen of a cache ---


def pages_of_pool(pool):
    """K, V and the scales of all layers as bytes, each (num_pages, page_size, bytes)."""
    device = pool.device
    device.synchronize()  # copies may be in flight on the cache's own stream
    found = []
    for view in (pool.k, pool.v, pool.k_scale, pool.v_scale):
        for layer in range(pool.num_layers):
            part = view(layer)
            if part is None:
                continue
            if hasattr(part, "pointer"):
                part = device.carrier(bytes_of(part))
            array = np.ascontiguousarray(device.to_numpy(part))
            found.append(array.reshape(pool.num_pages, pool.page_size, -1).view(np.uint8).copy())
    return found


def snapshot(cache, names):
    """Bytes of the pool and of the sequences, lengths and free pages, to be compared by ==."""
    state = {
        "pool": [part.tobytes() for part in pages_of_pool(cache.pool)],
        "free": cache.num_available_pages,
        "total": cache.total_length,
    }
    for name in names:
        length = cache.sequence_length(name)
        arrays = cache.get_kv(name, 0, length)
        device = cache.pool.device
        arrays = [device.carrier(a) if hasattr(a, "pointer") else a for a in arrays]
        state[name] = (length, *(device.to_numpy(a).tobytes() for a in arrays))
    return state


# --- Over tiers ---

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
        pages, demoted_pages, start = sequences.split(sequences.find(name))
        raw = [part[pages].tobytes() for part in pages_of_pool(self.cache.pool)]
        if len(demoted_pages):
            past = pages_of_pool(self.cache.demoted_pool)
            raw += [start, *(part[demoted_pages].tobytes() for part in past)]
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
