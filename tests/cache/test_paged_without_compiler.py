"""A paged cache on the host device without a compiler: the reference, and the same results.

Tests of the kernels run again, with the same tolerances.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import test_paged
import test_paged_graphs
import test_paged_machine
from helpers import again, examples
from hypothesis import settings
from paged_cases import BINARY, Twin, rope_of
from test_paged_machine import network
from test_without_compiler import device, fresh, warnings_are_errors

import kvcupy as kv

__all__ = ["device", "fresh", "network", "warnings_are_errors"]  # fixtures


pytestmark = pytest.mark.again

globals().update(
    again(test_paged)
    | again(test_paged_machine, "test_any_calls")
    | again(test_paged_graphs, "test_bits_of_plain_calls", "test_ways_to_capture")
)


@pytest.fixture(autouse=True)
def shorter_machine(monkeypatch):
    few = settings(test_paged_machine.SETTINGS, max_examples=examples(12))
    monkeypatch.setattr(test_paged_machine, "SETTINGS", few)


# --- Warnings ---


def everything(device, **options):
    """Calls of all kinds on one cache, twice."""
    for _ in range(2):
        twin = Twin(device, **options)
        twin.prefill("a", 6, "b", 8)
        twin.fork("a", "c")
        twin.step("ab", [1, 1])
        twin.step("c", [7], [BINARY])
        twin.commit("c", [5])
        twin.slide("b", 4, 1)
        twin.step("bc", [2, 1])
        twin.set_kv("b", 1, 3)


STORES = {
    "none": {"store_kv"},
    "normal": {"rope_store_kv", "store_kv"},  # the latter for set_kv
    "inline": {"store_kv", "apply_rope"},
}


@pytest.mark.parametrize("mode", STORES)
def test_one_warning_an_operation(fresh, caplog, mode):
    caplog.set_level(logging.WARNING, logger="kvcupy")
    rope = {} if mode == "none" else {"rope": rope_of(8), "rope_mode": mode}
    everything(fresh, **rope)
    said = [r.getMessage() for r in caplog.records if "in NumPy" in r.getMessage()]
    assert all("no C++ compiler was found" in message for message in said)
    names = [message.split()[0] for message in said]
    assert sorted(names) == sorted(STORES[mode] | {"paged_attention", "gather_kv", "copy_pages"})


def test_error_raises_and_takes_the_step_back(fresh, monkeypatch):
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=8, num_pages=6, page_size=4,
        dtype="fp32", device=fresh,
    )  # fmt: skip
    rows = np.ones((6, 4, 8), np.float32)
    cache.add_sequence("a")

    def step():
        with cache.forward(["a"], [6]):
            cache.attention(0, rows, rows[:, :2], rows[:, :2])

    step()
    monkeypatch.setattr(kv.config, "fallback", "error")
    for call in (step, lambda: cache.fork_sequence("a", "b"), lambda: cache.get_kv("a", 0, 6)):
        with pytest.raises(kv.CompileError, match=r"no C\+\+ compiler was found"):
            call()
        assert (cache.sequence_length("a"), cache.num_available_pages) == (6, 4)
        assert "b" not in cache
