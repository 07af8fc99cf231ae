"""`PagedKVCache`: forks share pages, pops and removals free them, no sequence sees another's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from paged_cases import Twin, rope_of

import kvcupy as kv
from kvcupy.cache.paged import moves

# What is looked at is the host's part, not the kernels.
pytestmark = pytest.mark.usefixtures("quick_host")

# --- Forks ---


@pytest.mark.covering
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 8, 9, 11, 12, None])
def test_fork_anywhere(device, page_size, at):
    """Parent and child go on, each on its own; full pages are shared, the partial one is copied."""
    twin = Twin(device, seed=1, page_size=page_size)
    twin.prefill("parent", 12)
    before, at_token = twin.cache.num_available_pages, 12 if at is None else at
    twin.fork("parent", "child", at)
    copied = int(at_token % page_size != 0)
    assert twin.cache.num_available_pages == before - copied
    assert twin.cache.sequence_length("child") == at_token
    twin.step(["parent", "child"], [1, 1])
    twin.step(["child"], [7])
    twin.step(["child", "parent"], [2, 5])


def test_a_copy_that_failed_in_flight(device, monkeypatch):
    """The child has no such page, even where somebody else has been told of the failure."""
    if device.kind != "host":
        pytest.skip("work of the host device can be made to fail")
    twin = Twin(device, page_size=4)
    twin.prefill("parent", 6)

    def fail():
        raise ZeroDivisionError("in flight")

    with monkeypatch.context() as patch:
        patch.setattr(moves, "copy_pages", lambda *_, stream, **__: stream.call(fail))
        twin.cache.fork_sequence("parent", "child")
    with pytest.raises(kv.DeviceError, match="in flight"):
        twin.cache._steps.access.copy_stream.synchronize()
    rows = [device.zeros((1, heads, 8), "fp32") for heads in (4, 2, 2)]
    twin.cache.begin_forward(["child"], [1])
    with pytest.raises(kv.DeviceError, match="never copied") as raised:
        twin.cache.attention(0, *rows)
    assert "in flight" in repr(raised.value.__cause__)
    twin.cache.end_forward()
    twin.cache.remove_sequence("child")
    twin.step(["parent"], [2])


def test_fork_of_an_empty_sequence(device):
    twin = Twin(device)
    twin.add("a")
    twin.fork("a", "b")
    twin.fork("a", "c", 0)
    assert twin.cache.num_available_pages == 40
    twin.step("bac", [3, 5, 1])


def test_forks_of_forks(device):
    """Eight deep, at page ends and within pages, decoded together; the chain loses its middle."""
    twin = Twin(device, seed=2, num_pages=60, rope=rope_of(8))
    twin.prefill(0, 9)
    for child, at in enumerate([9, 8, 11, 12, 5, 13, 16, 10], start=1):
        twin.fork(child - 1, child, min(at, twin.cache.sequence_length(child - 1)))
        twin.step([child], [4])
    assert len(twin.lengths()) == 9
    twin.step(range(9), [1] * 9)
    twin.remove(3, 0, 5)
    twin.step([8, 1, 4], [2, 1, 3])
    twin.remove(8, 1, 2, 4, 6, 7)
    twin.check_empty()


def test_many_forks_of_one(device):
    """More readers of a page than any small counter has."""
    twin = Twin(device, seed=3, num_pages=320, num_layers=1)
    twin.prefill("root", 9)
    for child in range(300):
        twin.both("fork", "root", child, 8)
    twin.check(contents=False)
    assert twin.cache.num_available_pages == 320 - 3
    twin.step([299, 0, 150], [1, 2, 3])
    for name in [*range(300), "root"]:
        twin.both("remove", name)
    twin.check_empty()


def test_names_of_the_removed_are_free(device):
    """A fork may have the name of a sequence that was removed, and its pages."""
    twin = Twin(device, seed=4, num_pages=6)
    twin.prefill("a", 9, "b", 9)
    twin.remove("a")
    twin.fork("b", "a", 7)
    twin.step("ab", [1, 1])
    twin.remove("b")
    twin.fork("a", "b")
    twin.step("ba", [3, 2])


@pytest.mark.parametrize("at", [9, 8, 11])
def test_the_parent_writes_on(device, at):
    """What the parent appends after the fork, to the page it forked in, is not the child's."""
    twin = Twin(device, seed=5)
    twin.prefill("a", 11)
    twin.fork("a", "b", at)
    twin.step("a", [2])
    twin.step("b", [2])
    twin.fork("b", "c", at)  # the child forks where it was forked itself
    twin.step("cab", [1, 1, 1])


def test_a_fork_in_a_full_cache(device):
    """Where it takes no page it works, where it takes one it changes nothing."""
    twin = Twin(device, seed=6, num_pages=3)
    twin.prefill("a", 11)
    assert twin.fork("a", "b", 8)
    assert twin.fork("a", "c", 0)
    assert not twin.fork("a", "d")
    assert "d" not in twin.cache
    twin.remove("a")
    assert twin.fork("b", "d", 7)


# --- Pops ---


@pytest.mark.parametrize("counts", [(0,), (1,), (4,), (5,), (11,), (1, 1, 1), (2, 9), (11, 0)])
def test_pop(device, counts):
    """Pages without a token left are free; appending goes on where it stopped."""
    twin = Twin(device, seed=7)
    twin.prefill("a", 11)
    for count in counts:
        twin.pop("a", count)
    left = 11 - sum(counts)
    assert twin.cache.num_available_pages == 40 - -(-left // 4)
    twin.step("a", [1])
    twin.step("a", [6])


@pytest.mark.covering
@pytest.mark.parametrize("popped", ["parent", "child"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 10])
def test_pop_across_shared_pages(device, popped, count):
    """The other keeps all; a partial page that is shared is copied when its owner appends."""
    twin = Twin(device, seed=8)
    twin.prefill("parent", 8)
    twin.fork("parent", "child")
    twin.step(["child"], [2])
    other = {"parent": "child", "child": "parent"}[popped]
    count = min(count, twin.cache.sequence_length(popped))
    free = twin.cache.num_available_pages
    twin.pop(popped, count)
    assert twin.cache.num_available_pages >= free
    twin.step([popped], [1])
    twin.step([other], [1])
    twin.step([popped, other], [3, 2])


def test_both_pop_into_a_shared_page(device):
    """Whoever appends first takes a page of its own; the other then has the old one alone."""
    twin = Twin(device, seed=9)
    twin.prefill("a", 8)
    twin.fork("a", "b")
    twin.pop("a", 1)
    twin.pop("b", 2)
    assert twin.cache.num_available_pages == 38
    twin.step("b", [1])
    assert twin.cache.num_available_pages == 37
    twin.step("a", [1])
    assert twin.cache.num_available_pages == 37


def test_sharers_append_in_one_step(device):
    """Three of them, to a page that all have partially."""
    twin = Twin(device, seed=10)
    twin.prefill("a", 8)
    twin.fork("a", "b")
    twin.fork("a", "c")
    for name, count in zip("abc", (1, 2, 3), strict=True):
        twin.pop(name, count)
    twin.step("cab", [1, 2, 1])
    twin.step("abc", [1, 1, 1])


def test_the_copy_of_a_shared_page_counts(device):
    """`begin_forward` needs a page for it; a pop never needs one."""
    twin = Twin(device, seed=11, num_pages=2)
    twin.prefill("a", 8)
    twin.fork("a", "b")
    twin.pop("b", 3)
    assert twin.cache.num_available_pages == 0
    assert not twin.step("b", [1])
    twin.remove("a")
    assert twin.step("b", [1])
    twin.check()


def test_pop_then_fork(device):
    """A fork of a sequence whose last page is shared and partial."""
    twin = Twin(device, seed=12)
    twin.prefill("a", 8)
    twin.fork("a", "b")
    twin.pop("b", 2)
    twin.fork("b", "c")
    twin.fork("b", "d", 4)
    twin.step("abcd", [1, 1, 1, 1])
    twin.pop("c", 7)
    twin.pop("a", 9)
    twin.step("ca", [2, 5])


def test_a_popped_sequence_lives(device):
    twin = Twin(device, seed=13)
    twin.prefill("a", 5)
    twin.pop("a", 5)
    assert "a" in twin.cache and twin.cache.sequence_length("a") == 0
    assert twin.cache.num_available_pages == 40
    twin.step("a", [5])


# --- Removal ---


@pytest.mark.covering
@pytest.mark.parametrize("order", [*itertools.permutations("abcd")])
def test_removal_in_every_order(device, order):
    """A family that shares pages: those that remain keep their contents, and no page is lost."""
    twin = Twin(device, seed=14, num_layers=1)
    twin.prefill("a", 7)
    twin.fork("a", "b", 6)
    twin.step("b", [5])
    twin.fork("b", "c", 9)
    twin.fork("a", "d", 4)
    twin.step("abcd", [1, 2, 3, 4], contents=False)
    for name in order:
        twin.remove(name)
        twin.check()
    twin.check_empty()


def test_removal_between_steps(device):
    """Pages go from the removed to those that come; contents stay right all along."""
    twin = Twin(device, seed=15, num_pages=12)
    rng = np.random.default_rng(15)
    twin.prefill(0, 6)
    for name in range(1, 25):
        if rng.random() < 0.5:
            twin.fork(name - 1, name, int(rng.integers(twin.cache.sequence_length(name - 1) + 1)))
        else:
            twin.add(name)
        if len(twin.lengths()) > 2:
            twin.remove(min(twin.lengths()))
        twin.step(sorted(twin.lengths())[-2:], rng.integers(1, 6, 2).tolist())


# --- set_kv on what is shared ---


@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 2), (5, 3), (0, 9), (8, 1), (9, 2)])
def test_set_kv_leaves_the_other_sequence(device, start, count):
    """Of the parent, then of the child: each time the pages that are shared are copied."""
    twin = Twin(device, seed=16, dtype="bf16")
    twin.prefill("a", 11)
    twin.fork("a", "b", 9)
    twin.fork("a", "c", 4)
    twin.step("b", [2])
    twin.set_kv("b", start, count)
    twin.set_kv("a", start, count)
    twin.step("cab", [1, 1, 1])


def test_set_kv_in_a_full_cache(device):
    """It allocates a page per shared page, and where none is free it changes nothing."""
    twin = Twin(device, seed=17, num_pages=4)
    twin.prefill("a", 12)
    twin.fork("a", "b")
    assert not twin.set_kv("b", 3, 2)  # two pages, one is free
    assert twin.set_kv("b", 4, 4)
    assert not twin.set_kv("b", 3, 2)
    assert twin.set_kv("a", 5, 1)  # its own by now
    assert not twin.step("a", [1])


def test_copies_that_are_over_are_forgotten(device):
    """Also where no step attends: sequences that are forked and written forever stay small."""
    twin = Twin(device, seed=18)
    twin.prefill("a", 11)
    for _ in range(4):
        twin.fork("a", "b")
        twin.set_kv("a", 0, 9)
        device.synchronize()
        twin.remove("b")
    for parent, child in itertools.pairwise("abcde"):
        twin.fork(parent, child)
        device.synchronize()
    loads = [len(twin.cache._sequences.find(name).loads) for name in "abcde"]
    assert max(loads) == 1, loads
