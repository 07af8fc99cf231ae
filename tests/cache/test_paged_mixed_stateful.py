"""`PagedKVCache` with `past`: any calls in any order, with the model beside it after each."""

from __future__ import annotations

import pytest
from helpers import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from line_process import poll
from mixed_model import MixedTwin
from paged_cases import rope_of
from test_paged_stateful import DATA, MAX_TOKENS, NUM_PAGES, SETTINGS, PagedCacheMachine

import kvcupy as kv
from kvcupy.cache.pool import pool_like

# What is looked at is the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("lenient_host")


class MixedMachine(PagedCacheMachine):
    """As the machine of one format; the border lies anywhere, and the past may be full."""

    @initialize(
        seed=st.integers(0, 2**16),
        page_size=st.integers(1, 4),
        mode=st.sampled_from(["none", "normal", "inline"]),
        dtype=st.sampled_from(["fp32", "bf16"]),
        past=st.sampled_from(["fp8_e4m3", "int8", "nvfp4"]),
        recent=st.integers(0, 9),
        sinks=st.integers(0, 5),
        num_past_pages=st.sampled_from([2, 6, 20]),
        hadamard=st.booleans(),
    )
    def make(self, seed, page_size, mode, dtype, past, recent, sinks, num_past_pages, hadamard):
        if past != "nvfp4":
            hadamard = False
        elif hadamard:
            mode = "none"  # a key cannot be rotated by its position after it is stored
        elif mode == "normal":
            mode = "inline"  # a rotated key that is a unit off may be a whole step off
        self.twin = MixedTwin(
            self.device, seed=seed, page_size=page_size, num_pages=NUM_PAGES, dtype=dtype,
            rope=rope_of(8, 2 * NUM_PAGES * 4), rope_mode=mode, max_batch_tokens=MAX_TOKENS,
            head_dim=16 if past == "nvfp4" else 8, past=past, recent=recent,
            sinks=sinks, num_past_pages=num_past_pages, hadamard=hadamard,
        )  # fmt: skip
        self.open = []
        cache = self.twin.cache
        self.ends = [
            kind(pool)
            for kind in (kv.PageSender, kv.PageReceiver)
            for pool in (cache.pool, cache.past_pool)
        ]
        host = pool_like(cache.pool, NUM_PAGES, dtype=dtype)
        cache.attach(kv.TieredCache(cache.pool, host))

    def movable(self):
        """Sequences that there is room for another of; those with demoted pages, if there are."""
        model = self.twin.model
        with_room, demoted = [], []
        for name in self.free(tree=False):
            pages = model.sequences[name].pages()
            past = pages & model.past_pages.keys()
            is_wide_enough = len(pages - past) <= model.available
            if pages and is_wide_enough and len(past) <= model.available_past:
                with_room.append(name)
                demoted += [name] * bool(past)
        return demoted or with_room

    @precondition(lambda self: self.movable())
    @rule(data=DATA)
    def step_aside(self, data):
        """It comes back on pages of its own, whoever has shared them."""
        name = self.draw(data, st.sampled_from(self.movable()), "seq")
        self.twin.cache.offload(name)
        self.twin.cache.onboard(name)
        model = self.twin.model
        model.leave(name, "aside")
        model.sequences[name] = model.sequences.pop("aside")

    @precondition(lambda self: self.movable() and len(self.sequences) < 6)
    @rule(data=DATA)
    def exchange(self, data):
        """A sequence is exported, and imported under another name."""
        name = self.draw(data, st.sampled_from(self.movable()), "seq")
        cache, (sender, past_sender, receiver, past_receiver) = self.twin.cache, self.ends
        ticket = cache.export_sequence(name, sender, past_sender=past_sender)
        copy = self.new_name()
        pull = cache.import_sequence(copy, ticket, receiver, past_receiver=past_receiver)
        pull.synchronize()
        assert poll(lambda: not any(end.stats()["offers"] for end in (sender, past_sender)))
        self.twin.model.leave(name, copy)

    def teardown(self):
        for end in getattr(self, "ends", ()):
            end.close()
        super().teardown()


def test_any_calls(device, tmp_path):
    run_state_machine_as_test(
        lambda: MixedMachine(device, tmp_path),
        settings=settings(SETTINGS, max_examples=examples(60)),
    )
