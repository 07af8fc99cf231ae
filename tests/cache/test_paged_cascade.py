"""`PagedKVCache`: attention over shared prefixes, in parts or at once, is the same attention."""

from __future__ import annotations

import numpy as np
import pytest
from paged_cases import BINARY, Twin, rope_of

from kvcupy.cache.paged.sequences import CachedSequence
from kvcupy.cache.paged.step import find_cascade

pytestmark = pytest.mark.usefixtures("quick_host")

LEARNED = np.float32([1.5, -2.0, 0.0, 3.0])
CASCADES = [True, False, None]


def family(device, **options):
    """Sequences that share pages at several depths, and one that shares none."""
    twin = Twin(device, num_pages=80, **options)
    twin.prefill("root", 17, "alone", 6)
    for name in ("a", "b"):
        twin.fork("root", name, 16)
        twin.step([name], [9], contents=False)
    for name, parent, at in (("a1", "a", None), ("a2", "a", 24), ("b1", "b", 20), ("c", "root", 8)):
        twin.fork(parent, name, at)
    return twin


NAMES = ["root", "a", "a1", "alone", "b", "a2", "b1", "c"]


@pytest.mark.covering
@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("rope_mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_families(device, fmt, rope_mode, cascade):
    twin = family(device, dtype=fmt, rope=rope_of(8), rope_mode=rope_mode, cascade=cascade)
    twin.step(NAMES, [1] * 8, contents=False)
    twin.step(NAMES[::-1], [1, 3, 1, 5, 2, 1, 4, 1])
    twin.remove("root", "a")
    twin.step(["b1", "a2", "c", "b", "a1"], [1] * 5)


@pytest.mark.covering
@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("masks", [
    {"window": 5}, {"window": 30}, {"window": 6, "sink_tokens": 3}, {"sinks": LEARNED},
    {"window": 9, "sinks": LEARNED, "logits_soft_cap": 3.0}, {"sm_scale": 0.8},
])  # fmt: skip
def test_masks(device, masks, cascade):
    """A window may hide a shared prefix wholly, or cut through it; a learned sink counts once."""
    twin = family(device, seed=1, cascade=cascade)
    twin.step(NAMES, [1] * 8, contents=False, **masks)
    twin.step(NAMES[::-1], [1, 3, 1, 5, 2, 1, 4, 1], contents=False, **masks)


@pytest.mark.parametrize("cascade", CASCADES)
def test_trees(device, cascade):
    twin = family(device, seed=2, cascade=cascade, rope=rope_of(8))
    trees = [BINARY if i % 2 else [-1] for i in range(8)]
    twin.step(NAMES, [len(tree) for tree in trees], trees, contents=False)
    twin.commit(NAMES[::-1], [5, 0, 3, 0, 6, -1, -1, 0])
    twin.step(NAMES, [1] * 8)


@pytest.mark.parametrize("cascade", CASCADES)
def test_windows_of_sequences(device, cascade):
    """Shared pages lie at other positions in the sequences that have slid."""
    twin = Twin(device, seed=3, cascade=cascade, rope=rope_of(8), rope_mode="inline", num_pages=80)
    twin.prefill("a", 24)
    for name in "bcd":
        twin.fork("a", name)
    twin.slide("b", 16, 4)
    twin.slide("c", 20, 0)
    for _ in range(8):
        twin.step("abcd", [1, 2, 2, 1], contents=False)
    twin.fork("b", "e")
    twin.fork("c", "f", 12)
    twin.step("fabced", [1] * 6)
    twin.step("fabced", [2, 1, 4, 1, 3, 1])


@pytest.mark.parametrize("cascade", CASCADES)
def test_the_whole_of_a_sequence_is_shared(device, cascade):
    """Page-aligned forks: what each has of its own begins with the step."""
    twin = Twin(device, seed=4, cascade=cascade, v_head_dim=6)
    twin.prefill("a", 16)
    for name in "bcdefg":
        twin.fork("a", name)
    twin.step("gcaebfd", [1] * 7)
    twin.step("abcdefg", [1, 1, 3, 1, 1, 2, 1])


@pytest.mark.parametrize("cascade", [True, False])
def test_padding_and_an_output_of_ones_own(device, cascade):
    twin = family(device, seed=5, cascade=cascade, dtype="fp16")
    for given_out in (True, False):
        twin.step(NAMES, [1] * 8, padding=5, given_out=given_out, contents=False)
        twin.step(NAMES, [2] * 8, padding=1, given_out=given_out, packed=True, contents=False)


def test_who_shares_a_prefix():
    """A third sequence joins only if the others lose nothing of what they share."""

    def sequence(*pages):
        cached = CachedSequence()
        cached.extend(np.array(pages))
        return cached

    batch = [sequence(1, 2, 3), sequence(1, 2, 4), sequence(1, 5), sequence(1, 6), sequence(7)]
    found = find_cascade(batch, [True] * 4 + [False], 8)
    assert found.counts.tolist() == [2, 2, 1] and found.lengths.tolist() == [16, 8, 0]
    assert found.pages.tolist() == [[1, 2], [1, 0], [0, 0]] and found.saved_keys == 24
    assert find_cascade([batch[0], batch[4]], [True, False], 8) is None
