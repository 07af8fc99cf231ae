"""`PagedKVCache`: any calls in any order, with the model beside it after each of them.

Hypothesis prints the calls of a failure, shortened; the seed among them is that of all numbers.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pytest
from helpers import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from paged_cases import Twin, rope_of
from paged_model import Full
from paged_snapshot import snapshot

import kvcupy as kv

# What is looked at is the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("lenient_host")

SETTINGS = settings(
    max_examples=examples(120), stateful_step_count=25, deadline=None, database=None,
    print_blob=True, report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
NUM_PAGES, MAX_TOKENS = 20, 16
SAVES = importlib.util.find_spec("safetensors") is not None

DATA = st.data()
MASKS = st.sampled_from(
    [
        {}, {}, {"window": 3}, {"window": 6, "sink_tokens": 2}, {"logits_soft_cap": 4.0},
        {"sm_scale": 0.8},
    ]
)  # fmt: skip


class PagedCacheMachine(RuleBasedStateMachine):
    """Two layers, two heads of 8, twenty pages, up to six sequences; at most one open step."""

    def __init__(self, device, folder):
        super().__init__()
        self.device, self.folder = device, folder
        self.saved, self.count, self.twin = {}, 0, None

    @initialize(
        seed=st.integers(0, 2**16),
        page_size=st.integers(1, 4),
        mode=st.sampled_from(["none", "normal", "inline"]),
        dtype=st.sampled_from(["fp32", "fp32", "fp32", "bf16", "int8"]),
        cascade=st.sampled_from([None, True, False]),
    )
    def make(self, seed, page_size, mode, dtype, cascade):
        self.twin = Twin(
            self.device, seed=seed, page_size=page_size, num_pages=NUM_PAGES, dtype=dtype,
            rope=rope_of(8, 2 * NUM_PAGES * 4), rope_mode=mode, cascade=cascade,
            max_batch_tokens=MAX_TOKENS,
        )  # fmt: skip
        self.open = []

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

    def draw(self, data, strategy, label):
        return data.draw(strategy, label=label)

    def one(self, data, label="seq", **which):
        return self.draw(data, st.sampled_from(self.free(**which)), label)

    def new_name(self):
        self.count += 1
        return self.count

    # Sequences

    @precondition(lambda self: len(self.sequences) < 6)
    @rule()
    def add(self):
        self.twin.both("add", self.new_name())

    @precondition(lambda self: self.free() and len(self.sequences) > 2)
    @rule(data=DATA)
    def remove(self, data):
        self.twin.both("remove", self.one(data))

    @precondition(lambda self: self.free(tree=False) and len(self.sequences) < 6)
    @rule(data=DATA)
    def fork(self, data):
        parent = self.one(data, "parent", tree=False)
        length = len(self.sequences[parent].tokens)
        at = self.draw(data, st.one_of(st.none(), st.integers(0, length)), "at")
        self.twin.fork(parent, self.new_name(), at)

    @precondition(lambda self: self.free(tree=False))
    @rule(data=DATA)
    def pop(self, data):
        name = self.one(data, tree=False)
        length = len(self.sequences[name].tokens)
        self.twin.both("pop", name, self.draw(data, st.integers(0, length), "n"))

    @precondition(lambda self: self.free(tree=False))
    @rule(data=DATA)
    def slide(self, data):
        name = self.one(data, tree=False)
        sequence = self.sequences[name]
        kept = self.draw(data, st.integers(0, 4), "sink_tokens")
        kept = sequence.sink_tokens if sequence.slid else kept
        self.twin.slide(name, self.draw(data, st.integers(1, 9 - kept), "window"), kept)

    @precondition(lambda self: self.free(tree=False))
    @rule(data=DATA)
    def set_kv(self, data):
        name = self.one(data, tree=False)
        length = len(self.sequences[name].tokens)
        start = self.draw(data, st.integers(0, length), "start")
        self.twin.set_kv(name, start, self.draw(data, st.integers(0, length - start), "n"))

    @precondition(lambda self: SAVES and self.free(tree=False))
    @rule(data=DATA)
    def save(self, data):
        name = self.one(data, tree=False)
        path = Path(tempfile.mkstemp(dir=self.folder)[1])
        self.twin.cache.save_sequence(name, path)
        self.saved[path] = self.sequences[name].copy()

    @precondition(lambda self: self.saved and len(self.sequences) < 6)
    @rule(data=DATA)
    def load(self, data):
        number = self.draw(data, st.integers(0, len(self.saved) - 1), "file")
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

    @precondition(lambda self: not self.open and len(self.sequences) > 4)
    @rule(really=st.sampled_from([False, False, True]))
    def clear(self, really):
        if really:
            self.twin.both("clear")
            self.twin.check_empty()

    # Steps

    @precondition(lambda self: not self.open and self.free())
    @rule(data=DATA, masks=MASKS, padding=st.integers(0, 2), packed=st.booleans(),
          ends=st.sampled_from(["at once", "at once", "later", "raises"]))  # fmt: skip
    def step(self, data, masks, padding, packed, ends):
        """Append to some sequences, with trees or without; take it back, or leave it open."""
        names = self.draw(data, st.lists(st.sampled_from(self.free()), min_size=1, unique=True,
                                         max_size=4), "seqs")  # fmt: skip
        most = MAX_TOKENS // len(names)
        lens = [self.draw(data, st.integers(1, most), "length") for _ in names]
        trees = [self.tree(data, self.sequences[n], c) for n, c in zip(names, lens, strict=True)]
        trees = trees if any(trees) else None
        options = {**masks, "padding": padding, "packed": packed}
        if ends == "raises":
            self.raise_in(names, lens, trees, options)
        elif self.twin.both("begin", names, lens, trees):
            self.open = names
            self.twin.attend(**options)
            if ends == "at once":
                self.end()

    def tree(self, data, sequence, count):
        """None, or parents of nodes, which a sequence with a pending tree must have."""
        pending = len(sequence.parents)
        if not pending and self.draw(data, st.integers(0, 2), "tree") < 2:
            return None
        return [self.draw(data, st.integers(-1, pending + i - 1), "parent") for i in range(count)]

    def raise_in(self, names, lens, trees, options):
        try:
            with self.twin.cache.forward(names, lens, token_tree=trees):
                self.twin.model.begin(names, lens, trees)
                self.twin.attend(layers=[0], **options)
                raise ZeroDivisionError
        except ZeroDivisionError:
            self.twin.model.take_back()
        except kv.CacheFull:
            pass

    @precondition(lambda self: self.open)
    @rule(masks=MASKS)
    def attend_again(self, masks):
        self.twin.attend(**masks)

    @precondition(lambda self: self.open)
    @rule()
    def end(self):
        self.twin.both("end")
        self.open = []

    @precondition(lambda self: self.free(tree=True))
    @rule(data=DATA)
    def commit(self, data):
        waiting = st.lists(st.sampled_from(self.free(tree=True)), min_size=1, unique=True)
        names = self.draw(data, waiting, "seqs")
        leaves = [
            self.draw(data, st.integers(-1, len(self.sequences[name].parents) - 1), "leaf")
            for name in names
        ]
        self.twin.both("commit", names, leaves)

    # What is refused

    @precondition(lambda self: self.sequences)
    @rule(data=DATA)
    def refused(self, data):
        """Calls that raise wherever they are made; nothing that can be seen changes."""
        name = self.draw(data, st.sampled_from([*self.sequences]), "seq")
        length = len(self.sequences[name].tokens)
        calls = {
            "add": lambda c: c.add_sequence(name),
            "unknown": lambda c: c.begin_forward([name, 0], [1, 1]),
            "twice": lambda c: c.begin_forward([name, name], [1, 1]),
            "zero": lambda c: c.begin_forward([name], [0]),
            "much": lambda c: c.begin_forward([name], [MAX_TOKENS + 1]),
            "tree": lambda c: c.begin_forward([name], [2], token_tree=[[-1, length + 1]]),
            "fork": lambda c: c.fork_sequence(name, name),
            "fork far": lambda c: c.fork_sequence(name, 0, length + 1),
            "pop": lambda c: c.pop_tokens(name, length + 1),
            "leaf": lambda c: c.commit_token_tree([name], [length + 1]),
            "get": lambda c: c.get_kv(name, 0, length + 1),
            "window": lambda c: c.enable_sliding_window(name, 0, 2),
        }
        call = self.draw(data, st.sampled_from([*calls]), "call")
        before = snapshot(self.twin.cache, [*self.sequences])
        with pytest.raises((ValueError, kv.KvcupyError)):
            calls[call](self.twin.cache)
        assert snapshot(self.twin.cache, [*self.sequences]) == before

    # What holds after each call

    @invariant()
    def agrees(self):
        if self.twin is not None:
            self.twin.check()

    def teardown(self):
        """Removed in any order, the sequences leave no page behind."""
        if self.twin is None:
            return
        if self.open:
            self.end()
        for name in self.twin.rng.permutation([*self.sequences]).tolist():
            self.twin.both("remove", name)
        self.twin.check_empty()


def test_any_calls(device, tmp_path):
    run_state_machine_as_test(lambda: PagedCacheMachine(device, tmp_path), settings=SETTINGS)
