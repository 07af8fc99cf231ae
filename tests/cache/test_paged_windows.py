"""`PagedKVCache`: windows of layers, which hide keys, and of sequences, which drop them."""

from __future__ import annotations

import numpy as np
import pytest
from paged_cases import BINARY, Twin, rope_of

pytestmark = pytest.mark.usefixtures("quick_host")

LEARNED = np.float32([1.5, -2.0, 0.0, 3.0])


# --- Windows of layers ---


@pytest.mark.parametrize("masks", [
    [{}, {"window": 3}],
    [{"window": 1}, {"window": 5, "sink_tokens": 2}],
    [{"window": 4, "sinks": LEARNED}, {"sinks": LEARNED}],
    [{"logits_soft_cap": 2.0}, {"window": 6, "logits_soft_cap": 4.0, "sm_scale": 0.9}],
])  # fmt: skip
def test_windows_by_layer(device, masks):
    """Within a chunk, across chunks, in decode, after a fork: nothing is dropped."""
    twin = Twin(device, rope=rope_of(8))
    twin.add("a", "b")
    for lens in ([9, 2], [1, 1], [5, 7], [1, 1]):
        twin.step("ab", lens, per_layer=masks)
    twin.fork("a", "c", 10)
    twin.pop("b", 3)
    twin.step("cab", [1, 1, 1], per_layer=masks)
    twin.step("cab", [4, 1, 2], per_layer=masks)
    assert twin.lengths() == {"a": 18, "b": 11, "c": 15}


@pytest.mark.parametrize("window", [1, 2, 4, 16, 17])
def test_a_chunk_longer_than_the_window(device, window):
    """Queries far into the chunk see none of the keys before it: no NaN, no key out of reach."""
    twin = Twin(device, seed=1, page_size=3)
    twin.prefill("a", 5, "b", 1)
    twin.step("ba", [20, 17], window=window)
    twin.step("ab", [1, 1], window=window)


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_windows_in_half_precision(device, fmt):
    twin = Twin(device, seed=2, dtype=fmt, head_dim=64)
    masks = [{"window": 7, "sinks": LEARNED}, {"window": 5, "sink_tokens": 3}]
    twin.add("a", "b")
    for lens in ([19, 6], [1, 1], [6, 1]):
        twin.step("ab", lens, per_layer=masks)


def test_windows_of_layers_and_inline_rotation(device):
    """A layer's window changes no position."""
    twin = Twin(device, seed=3, rope=rope_of(8), rope_mode="inline")
    twin.add("a")
    for count in (9, 1, 4, 1):
        twin.step("a", [count], per_layer=[{}, {"window": 3, "sink_tokens": 1}])


@pytest.mark.parametrize("masks", [{"window": 12, "sink_tokens": 2}, {"sinks": LEARNED}])
def test_a_chain_of_a_tree_in_a_layer_with_a_window(device, masks):
    """Old keys are hidden as they are from a plain chunk."""
    twin = Twin(device, seed=4)
    twin.prefill("a", 17, "b", 9)
    twin.step("ab", [4, 7], [[-1, 0, 1, 2], None], **masks)
    twin.commit("a", [2])
    twin.step("ab", [1, 1], **masks)


def test_trees_with_learned_sinks_and_a_cap(device):
    twin = Twin(device, seed=5)
    twin.prefill("a", 6)
    twin.step("a", [7], [BINARY], sinks=LEARNED, logits_soft_cap=3.0)
    twin.commit("a", [5])


# --- Windows of sequences ---


@pytest.mark.covering(2)
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize(("window", "sinks"), [(8, 0), (5, 3), (1, 0), (1, 8), (1, 4), (15, 2)])
def test_decode_through_a_window(device, window, sinks, page_size):
    """After each step the first and the last tokens remain, and pages wholly passed are free."""
    twin = Twin(device, seed=6, page_size=page_size, num_pages=60)
    twin.add("a")
    twin.slide("a", window, sinks)
    twin.step("a", [3])
    for _ in range(25):
        twin.step("a", [1])
    assert twin.cache.sequence_length("a") == window + sinks
    most = -(-sinks // page_size) + -(-window // page_size) + 1
    assert twin.cache.num_available_pages >= 60 - most


def test_the_position_of_decode_with_a_full_window(device):
    """Eight tokens stay, so that the next has position 8, always, and sees nine keys."""
    twin = Twin(device, seed=7, rope=rope_of(8), rope_mode="inline", num_layers=1)
    twin.add("a")
    twin.slide("a", 6, 2)
    twin.step("a", [12])
    for _ in range(10):
        twin.both("begin", ["a"], [1], None)
        assert device.to_numpy(twin.cache.query_positions()).tolist() == [8]
        assert twin.cache.sequence_length("a") == 9
        twin.attend()
        twin.both("end")
        assert twin.cache.sequence_length("a") == 8


@pytest.mark.parametrize("sinks", [0, 1, 6])
def test_chunks_past_a_window(device, sinks):
    """Attention within a step is causal over what is cached and all of the step."""
    twin = Twin(device, seed=8, rope=rope_of(8), rope_mode="inline")
    twin.add("a", "b")
    twin.slide("a", 7 - sinks, sinks)
    for lens in ([30, 2], [5, 3], [7, 1], [1, 1], [8, 1], [40, 20]):
        twin.step("ab", lens)
    assert twin.lengths() == {"a": 7, "b": 28}


def test_a_window_without_sinks(device):
    """They are none unless said; enabling is not refused for other sinks of nothing."""
    twin = Twin(device, seed=21)
    twin.prefill("a", 3)
    twin.both("enable_sliding_window", "a", 5)
    for _ in range(4):
        twin.step("a", [2])
    twin.both("enable_sliding_window", "a", 6)
    twin.step("a", [4])


@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
def test_keys_that_keep_their_rotation_are_logged(device, caplog, mode):
    """Once a cache, and only where a window goes with rotated keys."""
    twin = Twin(device, seed=22, rope=rope_of(8), rope_mode=mode)
    twin.prefill("a", 3, "b", 3)
    caplog.clear()
    for name in "ab":
        twin.slide(name, 5)
    twin.step("ab", [4, 4])
    warnings = [r for r in caplog.records if r.name.startswith("kvcupy") and "window" in r.message]
    assert len(warnings) == int(mode == "normal")


def test_windows_among_plain_sequences(device):
    twin = Twin(device, seed=9)
    twin.prefill("a", 6, "b", 6, "c", 6)
    twin.slide("a", 6)
    twin.slide("c", 3, 5)
    for _ in range(9):
        twin.step("bca", [1, 1, 1])
    twin.step("cb", [3, 2])
    assert twin.lengths() == {"a": 6, "b": 17, "c": 8}


def test_a_window_shorter_than_what_is_there(device):
    """Set late, it takes what is over after the next step."""
    twin = Twin(device, seed=10)
    twin.prefill("a", 23)
    twin.slide("a", 3, 2)
    twin.step("a", [1])
    assert twin.cache.sequence_length("a") == 5
    twin.step("a", [3])


def test_another_window(device):
    """Wider, then narrower, with the same sinks; other sinks while nothing has slid."""
    twin = Twin(device, seed=11)
    twin.add("a")
    twin.slide("a", 8, 1)
    twin.step("a", [8])
    twin.slide("a", 6, 3)
    for window in (6, 9, 3):
        twin.slide("a", window, 3)
        for _ in range(5):
            twin.step("a", [2])
        assert twin.cache.sequence_length("a") == window + 3
    with pytest.raises(ValueError, match=r"\bsink_tokens\b"):
        twin.cache.enable_sliding_window("a", 4, 2)
    twin.step("a", [1])


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_shared_prefix_longer_than_the_window(device, page_size, sinks):
    """The child releases pages that the parent keeps."""
    twin = Twin(device, seed=12, page_size=page_size, num_pages=60)
    twin.prefill("parent", 32)
    twin.fork("parent", "child")
    twin.slide("child", 10 - sinks, sinks)
    for _ in range(8):
        twin.step(["child", "parent"], [1, 1])
    twin.remove("parent")
    twin.check()
    for _ in range(8):
        twin.step(["child"], [2])
    twin.remove("child")
    twin.check_empty()


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 8, 9, 10, None])
@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_fork_of_a_slid_sequence(device, at, mode):
    """Within the sinks, behind them, at the end; the child's window is that of its parent."""
    twin = Twin(device, seed=13, rope=rope_of(8), rope_mode=mode)
    twin.add("a")
    twin.slide("a", 7, 3)
    twin.step("a", [9])
    for _ in range(3):
        twin.step("a", [3])
    twin.fork("a", "b", at)
    twin.step("ba", [1, 1])
    for _ in range(5):
        twin.step("ab", [3, 2])
    assert twin.lengths() == {"a": 10, "b": 10}
    twin.remove("a")
    twin.check()
    twin.remove("b")
    twin.check_empty()


def test_a_fork_without_the_window(device):
    """It keeps all of its tokens, and can only be of those that never leave the parent."""
    twin = Twin(device, seed=13)
    twin.add("a")
    twin.slide("a", 7, 3)
    twin.step("a", [14])
    for at in (None, 4):
        with pytest.raises(ValueError, match=r"^at: expected at most the 3 sink_tokens"):
            twin.cache.fork_sequence("a", "b", at, inherit_window=False)
    twin.cache.fork_sequence("a", "b", 3, inherit_window=False)
    with twin.cache.forward(["b"], [12]):
        pass
    assert twin.cache.sequence_length("b") == 15


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 6, 8])
@pytest.mark.parametrize("sinks", [0, 2, 4])
def test_pop_of_a_slid_sequence(device, count, sinks):
    """No page still in use is given back, and none that is not stays."""
    twin = Twin(device, seed=14)
    twin.add("a")
    twin.slide("a", 8 - sinks, sinks)
    twin.step("a", [9])
    for _ in range(4):
        twin.step("a", [3])
    twin.pop("a", count)
    twin.step("a", [1])
    for _ in range(4):
        twin.step("a", [4])
    twin.remove("a")
    twin.check_empty()


@pytest.mark.parametrize("count", [1, 3, 4, 6, 9])
def test_pop_into_a_shared_part_of_a_slid_sequence(device, count):
    """Both parent and child slide and pop, in pages that they share."""
    twin = Twin(device, seed=15)
    twin.add("a")
    twin.slide("a", 8, 2)
    twin.step("a", [15])
    twin.step("a", [3])
    twin.fork("a", "b")
    twin.pop("b", count)
    twin.step("b", [1])
    twin.pop("a", min(count + 1, 10))
    twin.step("ab", [2, 1])
    for _ in range(4):
        twin.step("ba", [3, 3])


def test_set_kv_of_a_slid_sequence(device):
    """By position in the cache, across the gap; the pages that are shared are copied."""
    twin = Twin(device, seed=16)
    twin.add("a")
    twin.slide("a", 7, 2)
    twin.step("a", [14])
    twin.step("a", [3])
    twin.fork("a", "b", 7)
    for start, count in ((1, 3), (0, 9), (2, 1), (6, 3)):
        twin.set_kv("a", start, count)
    twin.set_kv("b", 0, 7)
    twin.step("ab", [1, 1])


def test_windows_in_a_full_cache(device):
    """Evicted tokens free pages, but only after the step that needs them."""
    twin = Twin(device, seed=17, num_pages=4, num_layers=1)
    twin.add("a")
    twin.slide("a", 7, 1)
    twin.step("a", [10])
    for _ in range(20):
        assert twin.step("a", [1])
    assert not twin.step("a", [20])
    assert twin.step("a", [2])


@pytest.mark.parametrize("leaf", [-1, 0, 3, 6])
def test_trees_slide_when_they_are_committed(device, leaf):
    twin = Twin(device, seed=18, rope=rope_of(8), rope_mode="inline")
    twin.add("a", "b")
    twin.slide("a", 7, 2)
    twin.step("ab", [12, 3])
    twin.step("a", [2])
    twin.step("ab", [7, 1], [BINARY, None])
    assert twin.cache.sequence_length("a") == 16
    twin.step("a", [1], [[2]])
    assert twin.cache.sequence_length("a") == 17
    twin.commit("a", [leaf])
    assert twin.cache.sequence_length("a") == 9
    twin.step("ab", [1, 1])
