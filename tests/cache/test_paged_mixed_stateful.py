"""`PagedKVCache` with `past`: any calls in any order, with the model beside it after each."""

from __future__ import annotations

import pytest
from helpers import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from mixed_model import MixedTwin
from paged_cases import rope_of
from test_paged_stateful import MOST_TOKENS, NUM_PAGES, SETTINGS, PagedCacheMachine

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
        rotation=st.sampled_from([None, "hadamard"]),
    )
    def make(self, seed, page_size, mode, dtype, past, recent, sinks, num_past_pages, rotation):
        if past != "nvfp4":
            rotation = None
        elif rotation is not None:
            mode = "none"  # a key cannot be rotated by its position after it is stored
        elif mode == "normal":
            mode = "inline"  # a rotated key that is a unit off may be a whole step off
        self.twin = MixedTwin(
            self.device, seed=seed, page_size=page_size, num_pages=NUM_PAGES, dtype=dtype,
            rope=rope_of(8, 2 * NUM_PAGES * 4), rope_mode=mode, max_batch_tokens=MOST_TOKENS,
            head_dim=16 if past == "nvfp4" else 8, past=past, recent=recent,
            sinks=sinks, num_past_pages=num_past_pages, rotation=rotation,
        )  # fmt: skip
        self.open = []


def test_any_calls(device, tmp_path):
    run_state_machine_as_test(
        lambda: MixedMachine(device, tmp_path),
        settings=settings(SETTINGS, max_examples=examples(28)),
    )
