"""A `PagedKVCache` and its model, driven together: each call goes to both, and all is compared.

Attention is compared with float64 within the model's error bound; lengths, free pages, positions
and exports are compared exactly; so is what the cache holds, but for keys that were rotated, which
may be a unit in the last place off.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gather_cases import as_numpy
from helpers import DTYPE, QUANTISED, Case, compare, demoting, from_values
from paged_model import Full, PagedModel, stored_errors

import kvcupy as kv
from kvcupy import reference
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
    options : of the constructor, over `SMALL`; `rope` as a NumPy array
    fmt : of queries, keys and values that steps bring; None is that of the cache, bf16 if that is
        quantised
    """

    Model = PagedModel

    def __init__(self, device, *, seed=0, fmt=None, **options):
        self.device, self.seed = device, seed
        self.options = {**SMALL, **options}
        self.model = self.Model(**self.options)
        on_device = {
            name: device.asarray(value) if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        self.cache = kv.PagedKVCache(**demoting(on_device), device=device)
        cache_fmt = self.options["dtype"]
        self.fmt = fmt or ("bf16" if cache_fmt in QUANTISED else cache_fmt)
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
            assert self.lengths() == before
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
        """Replace some tokens by random ones."""
        shape = (len(self.layers), count, self.model.heads)
        key, value = (
            from_values(self.rng.standard_normal((*shape, width)), fmt or self.fmt)
            for width in (self.model.k_width, self.model.v_width)
        )
        case = Case(self.device, next(self._cases))
        placed = [case.place(a, fmt or self.fmt) for a in (key, value)]
        try:
            self.model.set_kv(name, start, key, value)
        except Full:
            with pytest.raises(kv.CacheFull):
                self.cache.set_kv(name, start, *(p.array for p in placed))
            done = False
        else:
            self.cache.set_kv(name, start, *(p.array for p in placed))
            done = True
        case.check("", [])
        self.check()
        return done

    # Steps

    def prefill(self, *names_and_lens):
        """Add sequences and append to them in one step: name, length, name, length, ..."""
        names, lens = names_and_lens[::2], names_and_lens[1::2]
        self.add(*names)
        return self.step(names, lens)

    def step(self, names, lens, trees=None, *, contents=True, **options):
        """Do a whole step, with attention in every layer; False if it does not fit.

        `options` are those of `attend`.
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
        content = [
            self.rng.standard_normal((count + padding, h, width)) * size
            for h, width, size in (
                (heads, model.k_width, loud), (kv_heads, model.k_width, loud),
                (kv_heads, model.v_width, 1.0),
            )
        ]  # fmt: skip
        for rows in content:
            rows[count:] = np.nan
        content = [from_values(rows, fmt) for rows in content]
        if packed:
            whole = case.place(np.concatenate(content, 1), fmt, name="qkv")
            cuts = np.cumsum([0, heads, kv_heads, kv_heads])
            given = [whole.sub(lambda a, i=i: a[:, cuts[i] : cuts[i + 1]]) for i in range(3)]
        else:
            given = [
                case.place(a, fmt, name=n)
                for a, n in zip(content, ("query", "key", "value"), strict=True)
            ]
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
        got = call(
            layer, *([whole.array] if packed else [a.array for a in given]),
            out=None if out is None else out.array, stream=stream, **passed,
        )  # fmt: skip
        if stream is not None:
            stream.synchronize()
        want, allowed = model.attention(layer, *(a.view for a in given), **masks)
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
        assert self.lengths() == {name: len(s.tokens) for name, s in model.sequences.items()}
        assert all(name in cache for name in model.sequences)
        assert cache.total_length == model.total_length
        assert cache.num_available_pages == model.available, "free pages"
        if contents:
            for name in model.sequences:
                self.check_contents(name)

    def check_contents(self, name, start=0, stop=None):
        """Compare K and V of all layers of some tokens."""
        cache_fmt = self.options["dtype"]
        fmt = "bf16" if cache_fmt in QUANTISED else cache_fmt
        stop = len(self.model.sequences[name].tokens) if stop is None else stop
        if start == stop:
            return
        got = self.cache.get_kv(name, start, stop)
        want = self.model.get_kv(name, start, stop)
        for side, array, values in zip("KV", got, want, strict=True):
            self.compare_rows(f"{side} of {name!r}", array, values, fmt, side)

    def compare_rows(self, label, array, values, fmt, side):
        """Compare rows from the cache with values of the model, rounded to `fmt`."""
        assert tuple(array.shape) == values.shape, label
        stored = as_numpy(self.device, array, fmt)
        if side == "K" and self.model.mode == "normal":
            allowed = stored_errors(values, self.fmt, self.options["dtype"])
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
        cache_fmt = self.options["dtype"]
        if cache_fmt in QUANTISED:
            return
        for layer, side in itertools.product(layers, "KV"):
            rows = {"K": cache.pool.k, "V": cache.pool.v}[side](layer)
            rows = as_numpy(self.device, rows, cache_fmt)
            rows = rows.reshape(pages * size, model.heads, -1)[slots]
            want = np.stack([getattr(s.tokens[i], side.lower())[layer] for s, i in new])
            if not self.model.latent_dim:
                self.compare_rows(f"{side} at the slots of layer {layer}", rows, want,
                                  cache_fmt, side)  # fmt: skip

    def check_empty(self):
        """Assert that nothing is left, and every page free."""
        assert not self.model.sequences
        assert self.cache.num_available_pages == self.options["num_pages"]
        assert self.cache.total_length == 0


# Trees -------------------------------------------------------------------------------------------

BINARY = [-1, 0, 0, 1, 1, 2, 2]
FOREST = [-1, -1, 0, 1, 1, -1, 2]
CHAIN = [-1, 0, 1, 2, 3]


def random_tree(rng, count, first=0):
    """Parents of `count` nodes that follow `first` others."""
    return [int(rng.integers(-1, first + i)) for i in range(count)]
