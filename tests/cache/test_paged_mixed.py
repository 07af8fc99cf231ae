"""`PagedKVCache` with `past`: old tokens in a narrower format."""

from __future__ import annotations

import pytest
from mixed_model import MixedTwin
from paged_cases import BINARY, rope_of

PASTS = ["fp8_e4m3", "int8"]
MIXED = {"num_pages": 24, "num_past_pages": 20, "past": "fp8_e4m3", "recent": 6, "head_dim": 16}


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_steps_cross_the_border(device, past, dtype, mode, sinks):
    """Prefill, decode and chunks; each token is where the rule says, with what its format keeps."""
    twin = MixedTwin(
        device, **{**MIXED, "past": past, "dtype": dtype, "sinks": sinks},
        rope=None if mode == "none" else rope_of(16), rope_mode=mode,
    )  # fmt: skip
    twin.prefill("a", 17, "b", 3)
    assert twin.model.is_past("a").tolist() == [4 * (sinks > 0) <= i < 8 for i in range(17)]
    twin.step("ba", [9, 1])
    twin.step("ab", [5, 1], logits_soft_cap=4.0)
    for _ in range(4):
        twin.step("ab", [1, 1])
    assert twin.model.is_past("b").any()


@pytest.mark.parametrize("popped", range(14))
def test_popping_across_the_border(device, popped):
    """What is popped, then appended to: a demoted page that is partly filled is converted back."""
    twin = MixedTwin(device, **MIXED)
    twin.prefill("a", 18)
    twin.fork("a", "b", 15)
    twin.pop("a", popped)
    twin.step("a", [1])
    twin.step("ab", [3, 1])
    twin.step("ab", [3, 6])


def test_trees(device):
    twin = MixedTwin(device, **MIXED)
    twin.prefill("a", 14, "b", 2)
    twin.step("ab", [7, 7], [BINARY, BINARY])
    twin.commit("ba", [3, 6])
    twin.step("ab", [1, 1])


@pytest.mark.parametrize("at", range(18))
def test_forks(device, at):
    """Full pages are shared, demoted ones too; what one leaves behind the other may still have."""
    twin = MixedTwin(device, **{**MIXED, "recent": 4})
    twin.prefill("a", 17)
    twin.fork("a", "b", at)
    twin.step("ab", [3, 2])
    twin.step("b", [5])
    twin.set_kv("b", 0, 6)
    twin.step("ab", [4, 4])
    twin.remove("a")
    twin.remove("b")
    twin.check_empty()
