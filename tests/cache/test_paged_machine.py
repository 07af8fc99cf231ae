"""`PagedKVCache`: any calls in any order on caches of all kinds, each compared with the model.

Hypothesis prints the calls of a failure, shortened; their seed is the seed of all numbers.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import pytest
from agents import Network
from groups_model import MIXES, PAGE, TieredMixture, hashes_of, stores_of
from helpers import examples
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from line_process import poll
from paged_cases import SMALL, Twin, rope_of, snapshot
from paged_model import Full

import kvcupy as kv
from kvcupy.cache.paged.sequences import Sequences
from kvcupy.cache.paged.states import States
from kvcupy.cache.pool import pool_like

SETTINGS = settings(
    max_examples=examples(48), stateful_step_count=25, deadline=None, database=None,
    print_blob=True, report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
NUM_PAGES, MAX_TOKENS, MAX_SEQUENCES = 20, 16, 6
HAS_FILES = importlib.util.find_spec("safetensors") is not None

NORMAL, INLINE = {"rope_mode": "normal"}, {"rope_mode": "inline"}
LATENT = {"latent_dim": 16, "rope_dim": 8, "head_dim": 24, "num_kv_heads": 1, "num_q_heads": 6}
FOUR_BIT = {"head_dim": 16, "num_layers": 1}
PER_HEAD = np.float32([0.04, 0.02])

# Options of a cache, over `SMALL`. `rotary_dim` is the width of its table, of the whole row unless
# given; `fmt` is the format of queries, keys and values.
CACHES = {
    "fp32": {},
    "fp32, rotated": NORMAL,
    "fp32, rotated in attention": INLINE,
    "fp16, wide": {**NORMAL, "dtype": "fp16", "head_dim": 64, "num_layers": 1},
    "bf16, wide": {**INLINE, "dtype": "bf16", "head_dim": 64, "num_layers": 1},
    "part of a head": {**NORMAL, "dtype": "bf16", "head_dim": 24, "v_head_dim": 16,
                       "rotary_dim": 10, "interleaved": True},
    "part of a head, in attention": {**INLINE, "head_dim": 24, "v_head_dim": 40, "rotary_dim": 10},
    "one head": {"num_q_heads": 6, "num_kv_heads": 1, "head_dim": 16, "dtype": "fp16"},
    "odd widths": {"num_q_heads": 3, "num_kv_heads": 3, "head_dim": 7, "v_head_dim": 1},
    "fp32 into bf16": {**INLINE, "dtype": "bf16", "fmt": "fp32", "interleaved": True},
    "bf16 into fp32": {**NORMAL, "fmt": "bf16"},
    "narrow values": {**NORMAL, "v_head_dim": 6},
    "bf16, rotated in attention": {**INLINE, "dtype": "bf16"},
    "int8": {"dtype": "int8", "v_head_dim": 24},
    "int8, rotated": {**NORMAL, "dtype": "int8"},
    "fp8_e4m3": {**INLINE, "dtype": "fp8_e4m3", "fmt": "fp32"},
    "fp8_e5m2": {**NORMAL, "dtype": "fp8_e5m2", "fmt": "fp16"},
    "a scale": {"dtype": "fp8_e4m3", "k_scale": 0.05, "v_scale": 0.03},
    "scales of layers and heads": {"dtype": "int8", "v_scale": PER_HEAD,
                                   "k_scale": np.float32([[0.02, 0.1], [0.3, 0.05]])},
    "scales of layers": {"dtype": "fp8_e5m2", "k_scale": np.float32([[0.1], [0.3]]),
                         "v_scale": PER_HEAD},
    "nvfp4": {**FOUR_BIT, **INLINE, "dtype": "nvfp4"},
    "mxfp4": {**FOUR_BIT, "dtype": "mxfp4", "head_dim": 32},
    "int4, stored rotated": {**FOUR_BIT, "dtype": "int4+hadamard", "head_dim": 32},
    "int4": {**FOUR_BIT, "dtype": "int4", "head_dim": 32, "fmt": "fp32"},
    "latents": {**LATENT, **NORMAL},
    "latents, bf16": {**LATENT, **INLINE, "dtype": "bf16"},
    "latents, fp8": {**LATENT, **INLINE, "dtype": "fp8_e4m3", "k_scale": 0.05},
    "latents, int8": {**LATENT, **NORMAL, "dtype": "int8"},
    "demoted to fp8": {**NORMAL, "past": "fp8_e4m3"},
    "demoted to fp8_e5m2": {**INLINE, "dtype": "bf16", "past": "fp8_e5m2", "v_head_dim": 12},
    "demoted to int8": {**INLINE, "past": "int8"},
    "demoted to int8, rotated": {**NORMAL, "dtype": "bf16", "past": "int8"},
    "demoted to nvfp4": {**FOUR_BIT, **INLINE, "past": "nvfp4", "scale_rule": "four_over_six"},
    "demoted to nvfp4, stored rotated": {**FOUR_BIT, "past": "nvfp4", "hadamard": True},
    "demoted from fp8": {**FOUR_BIT, "dtype": "fp8_e4m3", "past": "mxfp4", "head_dim": 32},
    "demoted to int4": {**FOUR_BIT, "dtype": "bf16", "past": "int4", "head_dim": 64},
}  # fmt: skip
# On the strict host device; the tests of the operations look at all kernels there.
STRICT = {"fp32, rotated", "int8", "latents", "demoted to fp8"}
EXCHANGED = {"fp32", "latents, bf16", "int8", "demoted to fp8", "demoted to nvfp4"}

NAMES = [0, -1, 1, -2, "one", ("a", 2), None, frozenset([3])]  # any hashable
DATA = st.data()
MASKS = st.sampled_from(
    [
        {}, {}, {}, {"window": 1}, {"window": 3}, {"window": 6, "sink_tokens": 2},
        {"logits_soft_cap": 4.0}, {"sm_scale": 0.8}, {"sinks": True},
        {"window": 5, "sinks": True, "logits_soft_cap": 3.0},
    ]
)  # fmt: skip
CHAIN, RANDOM = "chain", "random"


class PagedCacheMachine(RuleBasedStateMachine):
    """Twenty pages, up to six sequences, at most one open step, and another cache on the pool."""

    def __init__(self, device, folder, cache):
        super().__init__()
        self.device, self.folder, self.name = device, folder, cache
        self.saved, self.count, self.twin, self.ends = {}, 0, None, None

    @initialize(
        seed=st.integers(0, 2**16),
        page_size=st.sampled_from([4, 3, 2, 4, 3, 1]),
        lengths=st.lists(st.integers(1, MAX_TOKENS), min_size=2, max_size=3),
        fork_at=st.integers(0, MAX_TOKENS),
        window=st.one_of(st.none(), st.tuples(st.integers(1, 9), st.integers(0, 4))),
        recent=st.integers(0, 9),
        first=st.integers(0, 5),
        num_demoted_pages=st.sampled_from([2, 6, 20]),
        is_shared=st.booleans(),
    )
    def make(
        self, seed, page_size, lengths, fork_at, window, recent, first, num_demoted_pages, is_shared
    ):  # fmt: skip
        """A cache with some sequences: one has a fork, and one may slide."""
        options = {**SMALL, **CACHES[self.name]}
        if "rope_mode" in options:
            width = options.get("rope_dim", options["head_dim"])
            options["rope"] = rope_of(options.pop("rotary_dim", width), 2 * NUM_PAGES * 4)
        if "past" in options:
            options |= {"recent": recent, "sinks": first, "num_demoted_pages": num_demoted_pages}
        options |= {"num_pages": NUM_PAGES, "page_size": page_size, "max_batch_tokens": MAX_TOKENS}
        self.twin = Twin(self.device, seed=seed, **options)
        cache = self.twin.cache
        cache.attach(kv.TieredCache(cache.pool, pool_like(cache.pool, NUM_PAGES,
                                                          dtype=cache.pool.dtype)))  # fmt: skip
        self.open, self.other, self.others = [], None, None
        if is_shared:
            given = {n: options[n] for n in ("num_q_heads", "k_scale", "v_scale") if n in options}
            given = {n: self.device.asarray(v) if isinstance(v, np.ndarray) else v
                     for n, v in given.items()}  # fmt: skip
            self.other = kv.PagedKVCache(pool=cache.pool, **given)
            self.other.add_sequence("other")
        names = [self.new_name() for _ in lengths]
        self.twin.add(*names)
        if window is not None:
            self.twin.both("enable_sliding_window", names[-1], *window)
        for name, length in zip(names, lengths, strict=True):
            self.twin.step([name], [length])
        at = min(fork_at, len(self.sequences[names[0]].tokens))
        self.twin.both("fork", names[0], self.new_name(), at)

    # What there is to draw from

    @property
    def sequences(self):
        return self.twin.model.sequences

    def free(self, *, tree=None):
        """The sequences that are in no step; those with a pending tree, or without."""
        return [
            name
            for name, s in self.sequences.items()
            if name not in self.open and tree in (None, bool(s.parents))
        ]

    def movable(self):
        """Sequences of which there are pages for a copy; those with demoted pages, if any."""
        model, movable, demoted = self.twin.model, [], []
        for name in self.free(tree=False):
            pages = model.sequences[name].pages()
            past = pages & model.demoted_pages.keys()
            fits = len(pages - past) <= model.available and len(past) <= model.available_demoted
            if pages and fits:
                movable.append(name)
                demoted += [name] * bool(past)
        return demoted or movable

    def one(self, data, label="seq", **which):
        return data.draw(st.sampled_from(self.free(**which)), label=label)

    def new_name(self):
        self.count += 1
        return NAMES[self.count - 1] if self.count <= len(NAMES) else self.count

    def masks(self, masks):
        """What this cache takes of masks; learned sinks are one number per query head."""
        masks, model = dict(masks), self.twin.model
        if "sinks" in masks:
            masks["sinks"] = np.linspace(-2, 3, self.twin.options["num_q_heads"], dtype=np.float32)
        if model.past and masks.get("window", 0) > model.recent + 1:
            del masks["window"]
        if model.past:
            masks.pop("sink_tokens", None)
        return masks

    # Sequences

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule()
    def add(self):
        self.twin.both("add", self.new_name())

    @precondition(lambda self: self.free() and len(self.sequences) > 2)
    @rule(data=DATA)
    def remove(self, data):
        self.twin.both("remove", self.one(data))

    @precondition(lambda self: self.free(tree=False) and len(self.sequences) < MAX_SEQUENCES)
    @rule(data=DATA)
    def fork(self, data):
        parent = self.one(data, "parent", tree=False)
        most = len(self.sequences[parent].tokens)
        at = data.draw(st.one_of(st.none(), st.integers(0, most)), label="at")
        child = self.new_name()
        self.twin.both("fork", parent, child, at)
        self.go_on(data, parent, child)

    @precondition(lambda self: self.free(tree=False))
    @rule(data=DATA)
    def pop(self, data):
        name = self.one(data, tree=False)
        length = len(self.sequences[name].tokens)
        self.twin.both("pop", name, data.draw(st.integers(0, length), label="n"))
        self.go_on(data, name)

    @precondition(lambda self: self.free(tree=False))
    @rule(data=DATA)
    def slide(self, data):
        name = self.one(data, tree=False)
        sequence = self.sequences[name]
        kept = data.draw(st.integers(0, 4), label="sink_tokens")
        kept = sequence.sink_tokens if sequence.slid else kept
        window = data.draw(st.integers(1, 9), label="window")
        self.twin.both("enable_sliding_window", name, window, kept)
        self.go_on(data, name)

    @precondition(lambda self: self.free())
    @rule(data=DATA, fmt=st.sampled_from([None, "fp32", "fp16"]))
    def set_kv(self, data, fmt):
        name = self.one(data)
        length = self.sequences[name].committed
        start = data.draw(st.integers(0, length), label="start")
        count = data.draw(st.integers(0, length - start), label="n")
        self.twin.set_kv(name, start, count, fmt)
        self.go_on(data, name)

    @precondition(lambda self: self.free())
    @rule(data=DATA, dtype=st.sampled_from(["fp32", "fp16", "bf16"]))
    def get_kv(self, data, dtype):
        """Some tokens, in another format; the arrays are the caller's."""
        if self.twin.model.mode == "normal":
            dtype = None  # rotated keys are compared within a unit of the cache's format
        name = self.one(data)
        length = len(self.sequences[name].tokens)
        start = data.draw(st.integers(0, length), label="start")
        stop = data.draw(st.integers(start, length), label="stop")
        self.twin.check_contents(name, start, stop, dtype)
        for array in self.twin.cache.get_kv(name, start, stop):
            if not hasattr(array, "pointer"):
                array[...] = 0

    @precondition(lambda self: HAS_FILES and self.free(tree=False))
    @rule(data=DATA)
    def save(self, data):
        name = self.one(data, tree=False)
        path = Path(tempfile.mkdtemp(dir=self.folder), "saved")
        self.twin.cache.save_sequence(name, path)
        self.saved[path] = self.sequences[name].copy()

    @precondition(lambda self: self.saved and len(self.sequences) < MAX_SEQUENCES)
    @rule(data=DATA)
    def load(self, data):
        number = data.draw(st.integers(0, len(self.saved) - 1), label="file")
        path, sequence = [*self.saved.items()][number]
        name = self.new_name()
        try:
            self.twin.model.load(name, sequence)
        except Full:
            with pytest.raises(kv.CacheFull):
                self.twin.cache.load_sequence(name, path)
            assert name not in self.twin.cache
        else:
            self.twin.cache.load_sequence(name, path)

    @precondition(lambda self: len(self.sequences) == MAX_SEQUENCES)
    @rule(really=st.sampled_from([False, False, True]))
    def clear(self, really):
        """Drop the running step too, if there is one."""
        if not really:
            return
        self.twin.both("clear")
        self.twin.check_empty()
        self.open = []
        with pytest.raises(kv.KvcupyError):
            self.twin.cache.end_forward()

    # Other places

    @precondition(lambda self: self.movable())
    @rule(data=DATA)
    def offload(self, data):
        """It comes back on new pages, whichever sequences shared them."""
        name = data.draw(st.sampled_from(self.movable()), label="seq")
        self.twin.cache.offload(name)
        if self.other is not None:  # which writes to pages that are free now
            self.use_the_pool(6)
            self.use_the_pool(-6)
        self.twin.cache.onboard(name)
        model = self.twin.model
        model.copy_over(name, "aside")
        model.sequences[name] = model.sequences.pop("aside")

    @precondition(lambda self: self.name in EXCHANGED and self.movable()
                  and len(self.sequences) < MAX_SEQUENCES)  # fmt: skip
    @rule(data=DATA)
    def exchange(self, data):
        """A sequence is exported, and imported under another name."""
        name = data.draw(st.sampled_from(self.movable()), label="seq")
        cache, copy = self.twin.cache, self.new_name()
        if self.ends is None:
            self.ends = kv.PageSender(cache), kv.PageReceiver(cache)
        sender, receiver = self.ends
        ticket = cache.export_sequence(name, sender)
        cache.import_sequence(copy, ticket, receiver).synchronize()
        assert poll(lambda: not sender.stats()["offers"])
        self.twin.model.copy_over(name, copy)

    @precondition(lambda self: self.other is not None)
    @rule(count=st.integers(-6, 6))
    def use_the_pool(self, count):
        """Another cache allocates pages of the same pool, which stay unchanged."""
        other, size = self.other, self.twin.options["page_size"]
        length = other.sequence_length("other")
        if count < 0:
            other.pop_tokens("other", min(-count, length))
        elif count and -(-(length + count) // size) <= self.twin.model.taken + max(
            0, self.twin.model.available
        ):
            with other.forward(["other"], [count]):
                pass
            rows = other.get_kv("other", length, length + count)
            given = [self.device.asarray(self.twin.rng.standard_normal(tuple(a.shape)).astype("f4"))
                     for a in rows]  # fmt: skip
            other.set_kv("other", length, *given)
        self.twin.model.taken = -(-other.sequence_length("other") // size)
        self.others = snapshot(other, ["other"])["other"]

    # Steps

    @precondition(lambda self: not self.open and self.free())
    @rule(data=DATA, masks=MASKS, of_second=st.one_of(st.none(), MASKS), padding=st.integers(0, 2),
          packed=st.booleans(), given_out=st.booleans(), on_stream=st.booleans(),
          ends=st.sampled_from(["at once", "at once", "at once", "later", "raises"]))  # fmt: skip
    def step(self, data, masks, of_second, padding, packed, given_out, on_stream, ends):
        """Append to some sequences, with trees or without; take it back, or leave it open."""
        free = st.lists(st.sampled_from(self.free()), min_size=1, unique=True, max_size=4)
        names = data.draw(free, label="seqs")
        most = MAX_TOKENS // len(names)
        lens = [data.draw(st.one_of(st.just(1), st.integers(1, most)), label="n") for _ in names]
        trees = [self.tree(data, self.sequences[n], c) for n, c in zip(names, lens, strict=True)]
        trees = trees if any(trees) else None
        packed = packed and self.twin.options.get("v_head_dim") is None
        options = {"padding": padding, "packed": packed, "given_out": given_out}
        if on_stream:
            options["stream"] = self.device.stream()
        second = masks if of_second is None else of_second
        options["per_layer"] = [self.masks(masks), self.masks(second)]
        if ends == "raises":
            self.raise_in(names, lens, trees, options)
        elif self.twin.both("begin", names, lens, trees):
            self.open = names
            self.twin.attend(**options)
            if ends == "at once":
                self.end()

    def go_on(self, data, *names):
        """Often, append to sequences that a call has just changed."""
        names = [name for name in names if name in self.free(tree=False)]
        if names and not self.open and data.draw(st.integers(0, 3), label="goes on"):
            most = min(5, MAX_TOKENS // len(names))
            lens = [data.draw(st.integers(1, most), label="n") for _ in names]
            self.twin.step(names, lens, contents=False)

    def tree(self, data, sequence, count):
        """None, or parents of nodes, which a sequence with a pending tree must have."""
        pending = len(sequence.parents)
        kind = data.draw(st.sampled_from([None, None, CHAIN, RANDOM, RANDOM]), label="tree")
        if kind is None and not pending:
            return None
        if kind == CHAIN:
            return list(range(pending - 1, pending + count - 1))
        return [data.draw(st.integers(-1, pending + i - 1), label="parent") for i in range(count)]

    def raise_in(self, names, lens, trees, options):
        try:
            with self.twin.cache.forward(names, lens, token_tree=trees):
                self.twin.model.begin(names, lens, trees)
                self.twin.attend(layers=[0], **options)
                raise ZeroDivisionError
        except ZeroDivisionError:
            self.twin.model.take_back()
        except kv.CacheFull:
            with pytest.raises(Full):
                self.twin.model.begin(names, lens, trees)

    @precondition(lambda self: self.open)
    @rule(masks=MASKS)
    def attend_again(self, masks):
        """Attention of a layer replaces what the step had stored there."""
        self.twin.attend(**self.masks(masks))

    @precondition(lambda self: self.open)
    @rule()
    def end(self):
        self.twin.both("end")
        self.open = []

    @precondition(lambda self: self.free(tree=True))
    @rule(data=DATA)
    def commit(self, data):
        """In any order; a path to any node, or none."""
        waiting = st.lists(st.sampled_from(self.free(tree=True)), min_size=1, unique=True)
        names = data.draw(waiting, label="seqs")
        leaves = [
            data.draw(st.integers(-1, len(self.sequences[name].parents) - 1), label="leaf")
            for name in names
        ]
        self.twin.both("commit", names, leaves)
        self.go_on(data, *names)

    # What is refused

    @precondition(lambda self: self.sequences)
    @rule(data=DATA)
    def refused(self, data):
        """Calls that raise wherever they are made; nothing that can be seen changes."""
        name = data.draw(st.sampled_from([*self.sequences]), label="seq")
        length = len(self.sequences[name].tokens)
        calls = {
            "add": lambda c: c.add_sequence(name),
            "unknown": lambda c: c.begin_forward([name, "nobody"], [1, 1]),
            "twice": lambda c: c.begin_forward([name, name], [1, 1]),
            "zero": lambda c: c.begin_forward([name], [0]),
            "much": lambda c: c.begin_forward([name], [MAX_TOKENS + 1]),
            "tree": lambda c: c.begin_forward([name], [2], token_tree=[[-1, length + 1]]),
            "fork": lambda c: c.fork_sequence(name, name),
            "fork far": lambda c: c.fork_sequence(name, "new", length + 1),
            "pop": lambda c: c.pop_tokens(name, length + 1),
            "leaf": lambda c: c.commit_token_tree([name], [length + 1]),
            "get": lambda c: c.get_kv(name, 0, length + 1),
            "window": lambda c: c.enable_sliding_window(name, 0, 2),
        }
        call = data.draw(st.sampled_from([*calls]), label="call")
        before = snapshot(self.twin.cache, [*self.sequences])
        with pytest.raises((ValueError, kv.KvcupyError)):
            calls[call](self.twin.cache)
        assert snapshot(self.twin.cache, [*self.sequences]) == before

    # What holds after each call

    @invariant()
    def agrees(self):
        if self.twin is None:
            return
        self.twin.check()
        if self.others is not None:
            assert snapshot(self.other, ["other"])["other"] == self.others, "another cache's pages"

    def teardown(self):
        """Removed in any order, the sequences leave no page behind, and others are unchanged."""
        if self.twin is None:
            return
        if self.open:
            self.end()
        names = [*self.sequences]
        for number in self.twin.rng.permutation(len(names)):
            self.twin.both("remove", names[number])
            self.agrees()
        self.twin.check_empty()
        for end in reversed(self.ends or ()):  # the receiver first
            end.close()


class MixtureMachine(RuleBasedStateMachine):
    """Groups of layers over tiers, with little or enough memory: prompts begin with cached blocks.

    A call without room changes nothing.
    """

    def __init__(self, device, folder, mix):
        super().__init__()
        self.device, self.folder, self.mix = device, folder, mix
        self.mixture, self.saved, self.count = None, [], 0

    @initialize(data=DATA, num_tokens=st.sampled_from([256, 160, 48]),
                blocks=st.sampled_from([80, 12, 6]), has_store=st.booleans())  # fmt: skip
    def make(self, data, num_tokens, blocks, has_store):
        self.has_store = has_store
        self.mixture = self.new_mixture(
            MIXES[self.mix], self.device, blocks=blocks, num_tokens=num_tokens,
            tiers=stores_of({}) if has_store else {},
        )  # fmt: skip
        self.prompts = self.mixture.prompts()
        self.add()
        self.grow(data)
        self.grow(data)

    new_mixture = TieredMixture

    def present(self):
        """The sequences on the device that have no pending tree."""
        return sorted(set(self.mixture.tokens) - set(self.mixture.parents) - self.mixture.away)

    changed = None  # the sequence that a rule of several calls is about

    def one(self, data, names=None):
        if self.changed is not None:
            return self.changed
        return data.draw(st.sampled_from(self.present() if names is None else names), label="seq")

    def new_name(self):
        self.count += 1
        return f"s{self.count}"

    def attempt(self, call, *arguments, **options):
        """Return whether there was room; if not, make some."""
        before = {name: list(tokens) for name, tokens in self.mixture.tokens.items()}
        try:
            call(*arguments, **options)
        except kv.CacheFull:
            self.mixture.tokens = before
            self.mixture.check()
            if names := self.present():
                self.mixture.remove(max(names, key=lambda name: len(before[name])))
            return False
        return True

    def go_on(self, name):
        """Append to a sequence that a call has just brought."""
        self.mixture.check()
        self.attempt(self.mixture.step, {name: self.mixture.new(1)})

    @precondition(lambda self: len(self.mixture.tokens) < MAX_SEQUENCES)
    @rule()
    def add(self):
        self.mixture.add(self.new_name())

    @precondition(lambda self: len(self.mixture.tokens) < MAX_SEQUENCES)
    @rule(number=st.integers(0, 7), chunk=st.sampled_from([5, 8, 16]), again=st.booleans())
    def prompt(self, number, chunk, again):
        """What is cached of a prompt is not computed; it may be removed and sent again."""
        for _ in range(1 + again):
            name = self.new_name()
            if self.attempt(self.mixture.prompt, name, self.prompts[number], chunk=chunk) and again:
                self.mixture.check()
                self.mixture.remove(name)

    @precondition(lambda self: len(self.mixture.tokens) < MAX_SEQUENCES - 1)
    @rule(data=DATA, count=st.integers(1, 9),
          change=st.sampled_from(["pop", "fork", "tree", "abort", "offload"]))  # fmt: skip
    def change_and_reuse(self, data, count, change):
        """Change a sequence, append to it, remove it, and begin another with its hashes."""
        name, tokens = self.new_name(), self.mixture.new(18)
        self.mixture.chains.append(hashes_of(tokens))
        if not self.attempt(self.mixture.prompt, name, tokens):
            return
        self.changed = name
        getattr(self, change)(data)
        self.changed = None
        if name in self.mixture.away:
            self.attempt(self.mixture.onboard, name)
        for changed in dict.fromkeys([f"s{self.count}", name]):  # a child goes first
            if changed in self.present():
                self.attempt(self.mixture.step, {changed: self.mixture.new(count)})
            if changed in self.present():
                self.mixture.remove(changed)
        if self.attempt(self.mixture.prompt, self.new_name(), tokens):
            self.mixture.check()

    @precondition(lambda self: self.mix == "full" and len(self.mixture.tokens) < MAX_SEQUENCES - 1)
    @rule(data=DATA, change=st.sampled_from(["set_kv", "slide"]))
    def rewrite_and_reuse(self, data, change):
        self.change_and_reuse(data, 3, change)

    @rule(count=st.integers(0, 12))
    def evict(self, count):
        self.attempt(self.mixture.tiers.evict, count)

    @rule(number=st.integers(0, 7), call=st.sampled_from(["retain", "release", "prefetch"]),
          priority=st.integers(-2, 2), ttl_s=st.sampled_from([None, 0.0, 1000.0]))  # fmt: skip
    def retain(self, number, call, priority, ttl_s):
        options = {"priority": priority, "ttl_s": ttl_s} if call == "retain" else {}
        getattr(self.mixture.tiers, call)(self.mixture.chains[number], **options)

    @precondition(lambda self: len(self.present()) > 2)
    @rule(data=DATA)
    def remove(self, data):
        self.mixture.remove(self.one(data))

    @precondition(lambda self: self.mix == "full" and self.present())
    @rule(data=DATA)
    def set_kv(self, data):
        """Blocks that were written to are no prompt's any more."""
        name = self.one(data)
        start = data.draw(st.integers(0, len(self.mixture.tokens[name])), label="start")
        most = min(5, len(self.mixture.tokens[name]) - start)
        new = self.mixture.new(data.draw(st.integers(min(1, most), most), label="n"))
        self.attempt(self.mixture.set_kv, name, start, new)

    @precondition(lambda self: self.mix == "full" and self.present())
    @rule(data=DATA)
    def slide(self, data):
        name, window = self.one(data), data.draw(st.integers(3, 12), label="window")
        sink_tokens = data.draw(st.integers(0, 5), label="sink_tokens")
        if name not in self.mixture.slid:
            self.mixture.slide(name, window, sink_tokens)

    @precondition(lambda self: self.present())
    @rule(data=DATA)
    def grow(self, data):
        """A step of several sequences, perhaps of many tokens."""
        names = st.lists(st.sampled_from(self.present()), min_size=1, unique=True, max_size=4)
        names = data.draw(names, label="seqs")
        counts = data.draw(st.tuples(*[st.sampled_from([1, 2, 5, 8, 16]) for _ in names]))
        appended = {n: self.mixture.new(k) for n, k in zip(names, counts, strict=True)}
        self.attempt(self.mixture.step, appended)

    @precondition(lambda self: self.present())
    @rule(data=DATA)
    def abort(self, data):
        name, count = self.one(data), data.draw(st.integers(1, 9), label="n")
        work = data.draw(st.sampled_from([True, "attention", False]), label="work")
        trees = (
            {name: list(range(-1, count - 1))} if data.draw(st.booleans(), label="tree") else None
        )
        appended = {name: self.mixture.new(count)}
        self.attempt(self.mixture.step, appended, trees, work=work, keep=False)

    @precondition(lambda self: self.present())
    @rule(data=DATA)
    def tree(self, data):
        name, count = self.one(data), data.draw(st.integers(1, 5), label="n")
        parents = list(range(-1, count - 1))
        if not self.mixture.has_states:
            parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
        appended = {name: self.mixture.new(count)}
        for other in [n for n in self.present() if n != name][:1]:
            appended[other] = self.mixture.new(2)
        if self.attempt(self.mixture.step, appended, {name: parents}):
            leaf = data.draw(st.integers(-1, count - 1), label="leaf")
            self.mixture.check()
            self.attempt(self.mixture.commit, name, leaf)

    @precondition(lambda self: self.present() and len(self.mixture.tokens) < MAX_SEQUENCES)
    @rule(data=DATA)
    def fork(self, data):
        name = self.one(data)
        at = st.one_of(st.none(), st.integers(0, len(self.mixture.tokens[name])))
        child = self.new_name()
        if self.attempt(self.mixture.fork, name, child, data.draw(at, label="at")):
            self.go_on(child)

    @precondition(lambda self: self.present())
    @rule(data=DATA)
    def pop(self, data):
        name = self.one(data)
        length = len(self.mixture.tokens[name])
        n = data.draw(st.one_of(st.integers(0, 3), st.integers(0, length)), label="n")
        self.mixture.pop(name, min(n, length))
        self.go_on(name)

    @precondition(lambda self: self.present())
    @rule(data=DATA)
    def contents(self, data):
        """Of the last token, unless a step that was taken back has freed its page."""
        name = self.one(data)
        length, groups = len(self.mixture.tokens[name]), self.mixture.cache._groups
        kept = PAGE * max(group.sequences.find(name).first_kept for group in groups)
        self.mixture.check_contents(name, min(length, max(kept, length - 1)), length)

    @precondition(lambda self: HAS_FILES and self.present())
    @rule(data=DATA)
    def save(self, data):
        name, path = self.one(data), Path(tempfile.mkdtemp(dir=self.folder), "saved")
        self.mixture.cache.save_sequence(name, path)
        self.saved.append((path, list(self.mixture.tokens[name]), self.mixture.slid.get(name)))

    @precondition(lambda self: self.saved and len(self.mixture.tokens) < MAX_SEQUENCES)
    @rule(data=DATA)
    def load(self, data):
        path, tokens, slid = data.draw(st.sampled_from(self.saved), label="file")
        name = self.new_name()
        if self.attempt(self.mixture.cache.load_sequence, name, path):
            self.mixture.tokens[name] = list(tokens)
            if slid:
                self.mixture.slid[name] = slid
            self.go_on(name)

    @precondition(lambda self: self.present())
    @rule(data=DATA)
    def offload(self, data):
        self.attempt(self.mixture.offload, self.one(data))

    @precondition(lambda self: self.mixture.away)
    @rule(data=DATA)
    def onboard(self, data):
        name = self.one(data, sorted(self.mixture.away))
        try:
            self.mixture.onboard(name)
        except kv.CacheFull:
            self.mixture.remove(name)
        else:
            self.go_on(name)

    @invariant()
    def agrees(self):
        if self.mixture is not None:
            self.mixture.check()
            if not self.has_store:
                self.mixture.check_useful()

    def teardown(self):
        if self.mixture is not None:
            self.mixture.check_empty()


@pytest.fixture(autouse=True)
def network(monkeypatch):
    return Network(immediate=True).install(monkeypatch)


@pytest.mark.parametrize("cache", [*CACHES, *MIXES])
def test_any_calls(device, tmp_path, request, cache):
    if cache not in STRICT:
        request.getfixturevalue("lenient_host")
    machine = MixtureMachine if cache in MIXES else PagedCacheMachine
    run_state_machine_as_test(lambda: machine(device, tmp_path, cache), settings=SETTINGS)


def is_noticed(device, folder, mix):
    settings_of_control = settings(SETTINGS, phases=[Phase.generate], derandomize=True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            lambda: MixtureMachine(device, folder, mix), settings=settings_of_control
        )


def test_a_page_freed_too_early_is_noticed(device, lenient_host, tmp_path, monkeypatch):
    """The control of the test above."""
    free_unseen = Sequences.free_unseen
    monkeypatch.setattr(
        Sequences, "free_unseen", lambda self, s, position: free_unseen(self, s, position + PAGE)
    )
    is_noticed(device, tmp_path, "full, window")


@pytest.mark.parametrize("method", ["restore", "_copy"])
def test_a_state_that_is_forgotten_is_noticed(device, lenient_host, tmp_path, monkeypatch, method):
    """The control for states: pops that leave them, and copies that are not made."""
    genuine = getattr(States, method)

    def forgetful(self, access, *arguments, **options):
        if method == "_copy" and not options.get("zeros"):
            return genuine(self, access, [], *arguments[1:])
        if method == "restore" and arguments[1]:
            return None
        return genuine(self, access, *arguments, **options)

    monkeypatch.setattr(States, method, forgetful)
    is_noticed(device, tmp_path, "full, state")
