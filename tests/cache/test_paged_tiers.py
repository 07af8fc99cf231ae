"""Sequences that begin with cached blocks of a tiered cache: what they hold, and which owns it."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
from paged_tiers_cases import (
    FORMATS,
    NUM_LAYERS,
    Prefixed,
    fresh,
    hashes_of,
    same_outputs,
    tokens_of,
)  # fmt: skip

import kvcupy as kv

# What is looked at is the host's part, not the kernels.
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
    for call in (one.cache.offload, one.cache.onboard, one.cache.remove_sequence):
        with pytest.raises(kv.UnknownSequence, match="seq"):
            call("t")
    assert one.state() == before
    one.assert_no_leak()


# --- Reuse ---


@pytest.mark.parametrize("name", FORMATS)
def test_a_known_prefix(device, name):
    """Its bits, and attention of new tokens over it, are those of a cache that computes it all."""
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


def one_page_each(one, name):
    """The raw bytes of each page of a sequence, by part."""
    pages = one.cache._sequences.find(name).num_pages
    return [np.frombuffer(part, np.uint8).reshape(pages, -1).tolist() for part in one.raw(name)]


@pytest.mark.parametrize(
    ("prompt", "known"),
    [(PROMPT, 12), (PROMPT[:12], 12), (PROMPT[:11], 8), (OTHER, 8), (PROMPT[:3], 0), ([], 0),
     (PROMPT + tokens_of(3, 9), 12), (tokens_of(4, 14), 0)],
)  # fmt: skip
def test_leading_blocks_that_are_known(device, prompt, known):
    one = make(device)
    one.publish(PROMPT)
    assert one.known(prompt)[0] == known
    one.assert_no_leak()


def test_two_sequences_share_blocks(device):
    one = make(device, num_pages=8)
    one.publish(PROMPT)
    for name in "abc":
        one.prefill(name, PROMPT)  # three known pages, and one each
    assert one.cache.num_available_pages == 2
    pages = [one.cache._sequences.find(name).pages for name in "abc"]
    for other in pages[1:]:
        assert pages[0][:3].tolist() == other[:3].tolist() and pages[0][3] != other[3]
    out = one.step("a", [5], "b", [6], "c", [5])
    for i, token in enumerate((5, 6, 5)):
        want, bits = fresh(device, PROMPT[:12], PROMPT[12:], [token])
        for layer in range(NUM_LAYERS):
            np.testing.assert_allclose(out[layer][i], want[layer][0], rtol=1e-5, atol=1e-6)
        assert one.bits("abc"[i]) == bits
    one.assert_no_leak()


def test_computed_twice_at_once(device):
    """What the second has computed for itself is not needed, and its pages are free again."""
    one = make(device)
    one.prefill("a", PROMPT)
    one.prefill("b", PROMPT)
    one.cache.remove_sequence("a")
    one.cache.remove_sequence("b")
    assert one.tiers.stats()["device_blocks"] == 3 and one.cache.num_available_pages == 9
    one.assert_no_leak()


def test_hashes_longer_than_what_was_computed(device):
    one = make(device)
    one.cache.add_sequence("s", hashes=hashes_of(PROMPT + tokens_of(3, 20)))
    one.step("s", PROMPT[:10])
    one.cache.remove_sequence("s")
    assert one.tiers.stats()["device_blocks"] == 2
    assert one.known(PROMPT)[0] == 8
    one.prefill("s", PROMPT)  # goes on where the other has stopped
    one.cache.remove_sequence("s")
    assert one.known(PROMPT) == (12, fresh(device, PROMPT[:12])[1])
    one.assert_no_leak()


def test_a_sequence_without_hashes_is_not_published(device):
    one = make(device)
    one.cache.add_sequence("s")
    one.step("s", PROMPT)
    one.assert_no_leak("s")
    assert one.tiers.stats()["inserted"] == 0


# --- A block in the tier never changes ---


def changed_by_append(one, name):
    one.cache.pop_tokens(name, one.cache.sequence_length(name) - 6)
    one.step(name, tokens_of(9, 6))


def changed_by_set_kv(one, name):
    key, value = (a[:, :3] for a in one.rows(tokens_of(9, 3))[1:])
    one.cache.set_kv(name, 3, key, value)


def changed_by_tree(one, name):
    one.cache.pop_tokens(name, one.cache.sequence_length(name) - 6)
    rows = one.rows(tokens_of(9, 4))
    with one.cache.forward([name], [4], token_tree=[[-1, -1, 1, 0]]):
        for layer in range(NUM_LAYERS):
            one.attend(layer, rows)
    one.cache.commit_token_tree([name], [2])


def changed_by_abort(one, name):
    one.cache.pop_tokens(name, one.cache.sequence_length(name) - 6)
    rows = one.rows(tokens_of(9, 5))
    with pytest.raises(InterruptedError), one.cache.forward([name], [5]):
        one.attend(0, rows)
        raise InterruptedError


def changed_by_fork(one, name):
    one.cache.fork_sequence(name, "child", at=6)
    one.step("child", tokens_of(9, 5))
    one.cache.remove_sequence("child")


def changed_by_window(one, name):
    one.cache.enable_sliding_window(name, 4, 3)
    for token in tokens_of(9, 6):
        one.step(name, [token])


CHANGES = {
    "append": changed_by_append, "set_kv": changed_by_set_kv, "tree": changed_by_tree,
    "abort": changed_by_abort, "fork": changed_by_fork, "window": changed_by_window,
}  # fmt: skip


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "shared"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_others_reuse_stays(device, change, alone):
    """Neither in place, nor by what the changed sequence gives the cache when it goes."""
    one = make(device)
    one.publish(PROMPT)
    want = one.known(PROMPT)
    one.cache.add_sequence("s", hashes=hashes_of(PROMPT + tokens_of(3, 10)))
    if not alone:
        one.prefill("other", PROMPT)
    CHANGES[change](one, "s")
    assert one.known(PROMPT) == want
    if not alone:
        assert one.bits("other", 12) == want[1]
    one.cache.remove_sequence("s")
    assert one.known(PROMPT) == want
    long = PROMPT + tokens_of(3, 10)
    assert one.known(long)[0] == 12, "what follows was never computed as the hashes say"
    one.assert_no_leak()


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_not_published(device, change):
    """Of a sequence that has computed its blocks itself."""
    one = make(device)
    want = fresh(device, PROMPT[:12])[1]
    one.prefill("s", PROMPT)
    CHANGES[change](one, "s")
    one.cache.remove_sequence("s")
    count, bits = one.known(PROMPT)
    rows = len(want[0]) // NUM_LAYERS // 12
    for got, all_rows in zip(bits, want, strict=True):
        if count:
            kept = np.frombuffer(all_rows, np.uint8).reshape(NUM_LAYERS, 12, rows)[:, :count]
            assert got == kept.tobytes(), "a block is not what its hash says"
    one.assert_no_leak()


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


def test_the_window_over_reused_blocks(device):
    one = make(device)
    one.publish(PROMPT)
    plain = Prefixed(device, tiered=False)
    one.cache.add_sequence("s", hashes=hashes_of(PROMPT))
    plain.cache.add_sequence("s")
    plain.step("s", PROMPT[:12])
    for world in (one, plain):
        world.cache.enable_sliding_window("s", 5, 2)
    for token in tokens_of(9, 9):
        same_outputs(one.step("s", [token]), plain.step("s", [token]))
        assert one.bits("s") == plain.bits("s")
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


def test_clear_gives_leases_back(device):
    one = make(device)
    one.publish(PROMPT)
    for name in "ab":
        one.prefill(name, PROMPT)
    one.cache.fork_sequence("a", "c", 7)
    one.cache.offload("b")
    one.cache.begin_forward(["a"], [1])
    one.cache.clear()
    one.assert_no_leak()


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
