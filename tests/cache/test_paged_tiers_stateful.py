"""Sequences over a tiered cache under random calls, compared with the same without tiers."""

from __future__ import annotations

import pytest
from helpers import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from paged_tiers_cases import NUM_LAYERS, PAGE, Prefixed, same_outputs, tokens_of

import kvcupy as kv

# These tests check the host's bookkeeping, not the kernels.
pytestmark = pytest.mark.usefixtures("lenient_host")

PROMPTS = [
    tokens_of(1, 4 * PAGE + 2),
    tokens_of(1, 2 * PAGE) + tokens_of(2, 2 * PAGE),
    tokens_of(3, 4 * PAGE),
]
PICK = st.integers(0, 99)
TOKENS = st.lists(st.integers(0, 20), min_size=1, max_size=PAGE + 2)


class PrefixMachine(RuleBasedStateMachine):
    """Every call runs on a cache with tiers (`one`) and on one without (`plain`)."""

    device = None

    @initialize(
        num_pages=st.integers(10, 20), host_pages=st.integers(3, 16),
        write=st.sampled_from(["through", "back"]),
    )  # fmt: skip
    def start(self, num_pages, host_pages, write):
        self.one = Prefixed(
            self.device, num_pages=num_pages, host_pages=host_pages, tiers={"write": write}
        )
        self.plain = Prefixed(self.device, tiered=False, num_pages=1000)  # is never full
        self.names, self.made, self.slid = [], 0, set()

    def chosen(self, pick):
        """Return the name of a sequence that is on the device, or None."""
        names = [n for n in self.names if not self.one.cache._sequences.find(n).offloaded]
        return names[pick % len(names)] if names else None

    def on_both(self, call):
        """Call a function with each cache; after CacheFull check that nothing has changed."""
        self.one.settle()
        before = self.one.state()
        try:
            result = call(self.one)
        except kv.CacheFull:
            after = self.one.state()
            assert (after[0], after[2:5]) == (before[0], before[2:5])
            return False
        other = call(self.plain)
        if isinstance(result, list):
            same_outputs(result, other)
        return True

    @rule(prompt=st.sampled_from(PROMPTS), count=st.integers(0, 4 * PAGE + 2), hashed=st.booleans())
    def add(self, prompt, count, hashed):
        self.added(prompt[:count], None if hashed else [])

    def added(self, tokens, hashes=None):
        """Add a sequence, and compute the tokens that are not known; return whether pages suffice.

        Without `hashes`, the sequence has the hashes of its tokens.
        """
        if len(self.names) == 20:
            return False
        name = self.made
        self.made += 1
        try:
            self.one.prefill(name, tokens, hashes)
        except kv.CacheFull:
            if name in self.one.cache:
                self.one.cache.remove_sequence(name)
            return False
        assert self.one.cache.sequence_length(name) == len(tokens)
        self.plain.cache.add_sequence(name)
        if tokens:
            self.plain.step(name, tokens)
        self.names.append(name)
        return True

    @rule(
        prompt=st.sampled_from(PROMPTS), tokens=TOKENS, at=PICK,
        change=st.sampled_from(["pop", "set_kv", "slide", "tree", "abort", "fork"]),
    )  # fmt: skip
    def change_and_reuse(self, prompt, tokens, at, change):
        """Change a sequence, append to it, remove it, and begin another with its hashes."""
        if not self.added(prompt):
            return
        changes = {
            "pop": lambda: self.pop(-1, at),
            "set_kv": lambda: self.set_kv(-1, tokens, at),
            "slide": lambda: self.slide(-1, 3 + at % 4, at % 6),
            "tree": lambda: (self.pop(-1, at), self.tree(-1, (tokens * 4)[:4])),
            "abort": lambda: (self.pop(-1, at), self.abort(-1, tokens)),
            "fork": lambda: self.fork(-1, at),
        }
        changes[change]()
        for token in tokens:
            self.step_in_window(-1, token)
        self.step(-1, (tokens * PAGE)[: 2 * PAGE])
        self.remove(-1)
        if change == "fork" and self.names:
            self.remove(-1)
        self.added(prompt)

    @rule(pick=PICK, tokens=TOKENS)
    def step(self, pick, tokens):
        if (name := self.chosen(pick)) is not None and name not in self.slid:
            self.on_both(lambda side: side.step(name, tokens))

    @rule(pick=PICK, token=st.integers(0, 20))
    def step_in_window(self, pick, token):
        if (name := self.chosen(pick)) in self.slid:
            self.on_both(lambda side: side.step(name, [token]))

    @rule(pick=PICK, at=PICK)
    def fork(self, pick, at):
        name = self.chosen(pick)
        length = 0 if name is None else self.plain.cache.sequence_length(name)
        if length and name not in self.slid:
            child, self.made = self.made, self.made + 1
            at = 1 + at % length
            if self.on_both(lambda side: side.cache.fork_sequence(name, child, at=at)):
                self.names.append(child)

    @rule(pick=PICK, count=PICK)
    def pop(self, pick, count):
        name = self.chosen(pick)
        if name is not None and name not in self.slid:
            count %= self.plain.cache.sequence_length(name) + 1
            self.on_both(lambda side: side.cache.pop_tokens(name, count))

    @rule(pick=PICK, tokens=TOKENS, start=PICK)
    def set_kv(self, pick, tokens, start):
        name = self.chosen(pick)
        length = 0 if name is None else self.plain.cache.sequence_length(name)
        if length and name not in self.slid:
            tokens = tokens[:length]
            start %= length - len(tokens) + 1
            self.on_both(
                lambda side: side.cache.set_kv(name, start, *side.rows(tokens)[1:])
            )  # fmt: skip

    @rule(pick=PICK, window=st.integers(3, 6), sinks=st.integers(0, 5))
    def slide(self, pick, window, sinks):
        if (name := self.chosen(pick)) is not None and name not in self.slid:
            self.slid.add(name)
            self.on_both(lambda side: side.cache.enable_sliding_window(name, window, sinks))

    @rule(pick=PICK, tokens=st.lists(st.integers(0, 20), min_size=4, max_size=4))
    def tree(self, pick, tokens):
        """Attend to a token tree, and keep one of its branches."""
        name = self.chosen(pick)
        if name is None or name in self.slid:
            return

        def grow(side):
            rows = side.rows(tokens)
            with side.cache.forward([name], [4], token_tree=[[-1, -1, 1, 0]]):
                for layer in range(NUM_LAYERS):
                    side.attend(layer, rows)
            side.cache.commit_token_tree([name], [2])

        self.on_both(grow)

    @rule(pick=PICK, tokens=TOKENS)
    def abort(self, pick, tokens):
        """A step that raises leaves no trace."""
        name = self.chosen(pick)
        if name is None or name in self.slid:
            return

        def begin(side):
            rows = side.rows(tokens)
            with pytest.raises(InterruptedError), side.cache.forward([name], [len(tokens)]):
                side.attend(0, rows)
                raise InterruptedError

        self.on_both(begin)

    @rule(pick=PICK)
    def offload(self, pick):
        if (name := self.chosen(pick)) is not None:
            try:
                self.one.cache.offload(name)
            except kv.CacheFull:
                assert not self.one.cache._sequences.find(name).offloaded

    @rule()
    def onboard(self):
        for name in self.names:
            try:
                self.one.cache.onboard(name)
            except kv.CacheFull:
                assert self.one.cache._sequences.find(name).offloaded

    @rule(pick=PICK)
    def remove(self, pick):
        if self.names:
            name = self.names.pop(pick % len(self.names))
            self.on_both(lambda side: side.cache.remove_sequence(name))

    @rule(really=st.integers(0, 5))
    def clear(self, really):
        if not really:
            self.names.clear()
            self.on_both(lambda side: side.cache.clear())

    @invariant()
    def same_contents(self):
        """A sequence begins with cached blocks only if they are what its tokens say."""
        for name in getattr(self, "names", ()):
            length = self.plain.cache.sequence_length(name)
            assert self.one.cache.sequence_length(name) == length
            if length and not self.one.cache._sequences.find(name).offloaded:
                assert self.one.bits(name) == self.plain.bits(name)

    def teardown(self):
        if hasattr(self, "names"):
            self.one.assert_no_leak(*self.names)


def test_any_sequence_of_calls(device):
    class Machine(PrefixMachine):
        pass

    Machine.device = device
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples(150), stateful_step_count=30, deadline=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
