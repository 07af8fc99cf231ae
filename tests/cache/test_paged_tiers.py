"""Sequences that begin with cached blocks of a tiered cache: their contents and owners."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
from paged_tiers_cases import (
    FORMATS,
    Prefixed,
    fresh,
    hashes_of,
    same_outputs,
    tokens_of,
)  # fmt: skip

import kvcupy as kv

# These tests check the host's bookkeeping, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

PROMPT = tokens_of(1, 14)  # three blocks, and two tokens
OTHER = PROMPT[:8] + tokens_of(2, 6)  # two of them, then another


def make(device, **options):
    return Prefixed(device, **options)


# --- Refusals ---


def test_attach(device):
    one, other = make(device, tiered=False), make(device)
    for wrong in (None, one.cache.pool, "tiers", kv.TransferEngine):
        with pytest.raises(TypeError, match=r"^tiers: "):
            one.cache.attach(wrong)
    with pytest.raises(ValueError, match=r"^tiers: .*pool of this cache"):
        one.cache.attach(other.tiers)
    again = kv.TieredCache(other.cache.pool, other.host_pool)
    for tiers in (other.tiers, again):
        with pytest.raises(ValueError, match=r"^tiers: .*once"):
            other.cache.attach(tiers)
    other.publish(PROMPT)
    assert other.known(PROMPT)[0] == 12, "it is attached as before"


def test_without_tiers(device):
    one = make(device, tiered=False)
    with pytest.raises(ValueError, match=r"^hashes: "):
        one.cache.add_sequence("s", hashes=[])
    assert "s" not in one.cache
    one.cache.add_sequence("s")
    with pytest.raises(ValueError, match="attach"):
        one.cache.offload("s")
    one.cache.onboard("s")  # it is here
    one.cache.remove_sequence("s")


def test_names_and_hashes_that_are_refused(device):
    one = make(device)
    one.publish(PROMPT)
    one.prefill("s", PROMPT)
    before = one.state()
    with pytest.raises(ValueError, match=r"^seq: "):
        one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
    with pytest.raises(TypeError, match=r"^seq: "):
        one.cache.add_sequence([], hashes=hashes_of(PROMPT))
    for wrong in (3, ["a"], [2**128], [1.5]):
        with pytest.raises((TypeError, ValueError), match=r"^hashes: "):
            one.cache.add_sequence("t", hashes=wrong)
    for wrong in (11, 0, -1, "12", True, 12.0):
        with pytest.raises((TypeError, ValueError), match=r"^num_tokens: expected"):
            one.cache.add_sequence("t", hashes=hashes_of(PROMPT[:12]), num_tokens=wrong)
    for call in (one.cache.offload, one.cache.onboard, one.cache.remove_sequence):
        with pytest.raises(kv.UnknownSequence, match="seq"):
            call("t")
    assert one.state() == before
    one.assert_no_leak()


# --- Reuse ---


@pytest.mark.parametrize("name", FORMATS)
def test_a_known_prefix(device, name):
    """Its bits, and attention of new tokens, equal a cache that computes the whole prompt."""
    one = make(device, **FORMATS[name])
    assert one.prefill("first", PROMPT) == 0
    raw = [part[:3] for part in one_page_each(one, "first")]
    one.cache.remove_sequence("first")
    assert one.tiers.stats()["device_blocks"] == 3
    assert one.cache.num_available_pages == 9
    one.cache.add_sequence("second", hashes=hashes_of(PROMPT))
    assert one.cache.sequence_length("second") == 12
    assert [part[:3] for part in one_page_each(one, "second")] == raw
    out = one.step("second", PROMPT[12:])
    want, bits = fresh(device, PROMPT[:12], PROMPT[12:], **FORMATS[name])
    same_outputs(out, want)
    assert one.bits("second") == bits
    one.assert_no_leak()


def test_the_last_token_of_a_known_prompt_is_left(device):
    """A prompt of whole pages, sent twice: its last block is computed again, and stays known."""
    one = make(device)
    prompt = PROMPT[:12]
    one.publish(prompt)
    for num_tokens, known in ((None, 12), (12, 8), (13, 12), (99, 12)):
        one.cache.add_sequence("s", hashes=hashes_of(prompt), num_tokens=num_tokens)
        assert one.cache.sequence_length("s") == known
        if num_tokens is None:
            with pytest.raises(ValueError, match=r"^append_lens: .*num_tokens of add_sequence"):
                one.cache.begin_forward(["s"], [0])
        elif num_tokens == 12:
            out = one.step("s", prompt[known:])
            want, bits = fresh(device, prompt[:known], prompt[known:])
            same_outputs(out, want)
            assert one.bits("s") == bits
        one.cache.remove_sequence("s")
        assert one.tiers.stats()["device_blocks"] == 3
    one.cache.add_sequence("none known", num_tokens=5)
    one.cache.add_sequence("short", hashes=[], num_tokens=2)
    one.cache.clear()
    one.assert_no_leak()


def one_page_each(one, name):
    """The raw bytes of each page of a sequence, by part."""
    pages = one.cache._sequences.find(name).num_pages
    return [np.frombuffer(part, np.uint8).reshape(pages, -1).tolist() for part in one.raw(name)]


def test_computed_twice_at_once(device):
    """What the second has computed for itself is not needed, and its pages are free again."""
    one = make(device)
    one.prefill("a", PROMPT)
    one.prefill("b", PROMPT)
    one.cache.remove_sequence("a")
    one.cache.remove_sequence("b")
    assert one.tiers.stats()["device_blocks"] == 3 and one.cache.num_available_pages == 9
    one.assert_no_leak()


def test_a_sequence_without_hashes_is_not_published(device):
    one = make(device)
    one.cache.add_sequence("s")
    one.step("s", PROMPT)
    one.assert_no_leak("s")
    assert one.tiers.stats()["inserted"] == 0


# --- A block in the tier never changes ---


@pytest.mark.covering
@pytest.mark.parametrize("sinks", [0, 4, 5])
@pytest.mark.parametrize("steps", range(1, 10))
def test_slid_by_whole_pages(device, sinks, steps):
    """Where no evicted span is left, pages have still moved to the front."""
    one = make(device)
    one.prefill("s", PROMPT[:12])
    one.cache.enable_sliding_window("s", 10 - sinks, sinks)
    one.step("s", tokens_of(9, steps))
    one.cache.remove_sequence("s")
    count, bits = one.known(PROMPT)
    if count:
        assert bits == fresh(device, PROMPT[:count])[1]
    one.assert_no_leak()


def test_a_sequence_that_no_longer_uses_its_lease(device):
    """Its lease has been released before any stream waited for its blocks."""
    one = make(device)
    one.publish(PROMPT)
    cases = {
        "popped": lambda: one.cache.pop_tokens("s", 12),
        "forked": lambda: (
            one.cache.fork_sequence("s", "child", at=2), one.cache.remove_sequence("s"),
            one.cache.fork_sequence("child", "s"), one.cache.remove_sequence("child"),
        ),
        "written": lambda: one.cache.set_kv("s", 0, *one.rows(PROMPT[:12])[1:]),
        "begun": lambda: (
            one.cache.pop_tokens("s", 11), one.cache.begin_forward(["s"], [1]),
            one.cache.end_forward(),
        ),
    }  # fmt: skip
    for name, change in cases.items():
        for again in (lambda: one.step("s", [3]), lambda: one.bits("s")):
            one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
            change()
            assert len(one.cache._sequences._leased) == 0, name
            again()
            one.cache.remove_sequence("s")
    one.assert_no_leak()


# --- Orders of going ---


@pytest.mark.parametrize("order", list(itertools.permutations("abcd"))[::3])
def test_removed_in_any_order(device, order):
    one = make(device, num_pages=20)
    one.publish(PROMPT)
    one.prefill("a", PROMPT)
    one.prefill("b", OTHER)
    one.cache.fork_sequence("a", "c", at=9)
    one.cache.fork_sequence("b", "d")
    one.step("c", [1, 2, 3, 4], "a", [5], "d", [6], "b", [7])
    one.assert_no_leak(*order)


def test_tiers_cannot_be_cleared_under_a_sequence(device):
    one = make(device)
    one.publish(PROMPT)
    one.prefill("a", PROMPT)
    with pytest.raises(kv.KvcupyError, match="leased"):
        one.tiers.clear()
    one.assert_no_leak()


def test_pools_go_with_a_cache_that_nobody_has(device):
    """At once, not when cycles are looked for: they are most of a GPU's memory."""
    one = Prefixed(device)
    one.publish(tokens_of(1, 14))
    device.synchronize()
    one.tiers.close()
    parts = one.cache, one.cache.pool, one.host_pool, one.tiers, one.tiers.engine
    remaining = [weakref.ref(part) for part in parts]
    gc.collect()
    gc.disable()
    try:
        del one, parts
        assert [part() for part in remaining] == [None] * 5
    finally:
        gc.enable()
