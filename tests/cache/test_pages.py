"""The page allocator, alone and beside transfers that touch its pages."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref

import numpy as np
import pytest
from helpers import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcupy as kv


class FakeTransfer:
    """A transfer that is done when the test says so, or once it has been waited for."""

    def __init__(self, finished=False, error=None, watch=None):
        self.finished, self.error, self.watch = finished, error, watch
        self.asked = self.waited = 0

    def done(self):
        self.asked += 1
        if self.watch:
            self.watch()
        if self.error:
            raise self.error
        return self.finished

    def synchronize(self):
        self.waited += 1
        if self.watch:
            self.watch()
        if self.error:
            raise self.error
        self.finished = True


class UnboundedTransfer(FakeTransfer):
    """One that nobody may wait for, such as a call to a machine that does not answer."""

    unbounded = True

    def synchronize(self):
        raise AssertionError("it may never be done")


def state_of(pages):
    return pages.num_free, pages.num_allocated, pages.allocated().tolist()


# --- alloc and free ---


def test_a_fresh_allocator_gives_pages_in_order():
    pages = kv.PageAllocator(8)
    got = pages.alloc(3)
    assert got.tolist() == [0, 1, 2] and got.dtype == np.int64
    assert pages.alloc(5).tolist() == [3, 4, 5, 6, 7]
    assert state_of(pages) == (0, 8, list(range(8)))


def test_not_enough_pages_changes_nothing():
    pages = kv.PageAllocator(8)
    pages.alloc(3)
    before = state_of(pages)
    with pytest.raises(kv.CacheFull, match=r"\bn: expected at most 5, .* 8 pages, got 6"):
        pages.alloc(6)
    assert issubclass(kv.CacheFull, kv.KvcupyError)
    assert state_of(pages) == before
    assert pages.alloc(5).tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "form",
    [
        list, tuple, set, iter, np.array, lambda p: np.array(p, np.int32),
        lambda p: np.array(p, np.uint8), lambda p: np.array(p, object),
        lambda p: np.repeat(p, 2)[::2], lambda p: [np.int32(i) for i in p],
    ],
)  # fmt: skip
def test_pages_of_any_form(form):
    pages = kv.PageAllocator(8)
    pages.alloc(8)
    pages.free(form([5, 2, 7]))
    assert pages.alloc(3).tolist() == [2, 5, 7]


@pytest.mark.parametrize(
    ("error", "n"),
    [(TypeError, n) for n in (None, 2.0, True, "2", np.float64(1), [1])]
    + [(ValueError, n) for n in (-1, np.int64(-3), -(2**70))],
)
def test_numbers_that_are_none(error, n):
    pages = kv.PageAllocator(4)
    with pytest.raises(error, match=r"^n: expected"):
        pages.alloc(n)
    assert pages.num_free == 4


@pytest.mark.parametrize(
    ("error", "count"),
    [(TypeError, n) for n in (None, 2.0, True, "2")] + [(ValueError, n) for n in (0, -1)],
)
def test_allocators_of_no_pages(error, count):
    with pytest.raises(error, match=r"^num_pages: expected"):
        kv.PageAllocator(count)


WRONG = {
    "past the end": ([0, 8], 8),
    "far past the end": ([0, 2**63], 2**63),
    "past 64 bits": ([0, 2**64 + 1], 2**64 + 1),
    "negative": ([0, -1], -1),
    "never given": ([0, 5], 5),
    "freed before": ([0, 3], 3),
    "twice": ([0, 1, 2, 1], 1),
    "past the end, of 32 bits": (np.array([0, 2**31 - 1], np.int32), 2**31 - 1),
    "past the end, unsigned": (np.array([0, 2**64 - 1], np.uint64), 2**64 - 1),
    "a float": ([0, 1.0], 1.0),
    "floats": (np.array([0.5, 1.0]), 0.5),
    "a bool": ([0, True], True),
    "bools": (np.array([True, False]), True),
    "a string": ([0, "1"], "1"),
    "None": ([0, None], None),
    "a float among objects": (np.array([0, 1.5], object), 1.5),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_list_with_one_wrong_page_frees_nothing(wrong):
    given, page = WRONG[wrong]
    pages = kv.PageAllocator(8)
    pages.alloc(4)
    pages.free([3])
    before = state_of(pages)
    with pytest.raises(ValueError, match=r"^pages: expected") as caught:
        pages.free(given)
    assert str(page) in str(caught.value)
    assert state_of(pages) == before
    assert pages.alloc(5).tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [(given, TypeError, "a list") for given in (None, 3, 2.5, object())]
    + [(np.zeros(shape, int), ValueError, "one dimension") for shape in ((1, 1), ())],
)
def test_an_invalid_list_frees_nothing(given, error, said):
    pages = kv.PageAllocator(8)
    pages.alloc(4)
    with pytest.raises(error, match=f"^pages: expected {said}"):
        pages.free(given)
    assert pages.num_allocated == 4


def test_leaks_are_named():
    pages = kv.PageAllocator(32)
    pages.check_leaks()
    pages.alloc(20)
    pages.free([0, 1, 3])
    with pytest.raises(kv.KvcupyError, match=r"17 of 32 .*: 2, 4, 5, 6, 7, 8, 9, 10, \.\.\.$"):
        pages.check_leaks()
    pages.free(np.setdiff1d(pages.allocated(), [7]))
    assert pages.allocated().dtype == np.int64
    with pytest.raises(kv.KvcupyError, match=r"1 of 32 .*: 7$"):
        pages.check_leaks()
    pages.free([7])
    pages.check_leaks()
    assert re.search(r"32 of 32 pages free", repr(pages))


# --- Transfers ---


def deferring(count=8, freed=(2, 3), **how):
    """An allocator whose pages are all out but those freed while a transfer touches them."""
    pages, transfer = kv.PageAllocator(count), FakeTransfer(**how)
    pages.alloc(count)
    pages._mark_busy(freed, transfer)
    pages.free(freed)
    return pages, transfer


def test_pages_that_an_unbounded_transfer_holds_back_are_not_waited_for():
    pages, bounded, unbounded = kv.PageAllocator(8), FakeTransfer(), UnboundedTransfer()
    pages.alloc(8)
    pages._mark_busy([0, 1, 2], unbounded)
    pages._mark_busy([2, 3, 4], bounded)  # page 2 by both
    pages.free([1, 2, 3, 5])
    assert (pages.num_free, pages.num_available, pages.num_allocated) == (1, 2, 4)
    with pytest.raises(kv.CacheFull, match=r"expected at most 2, which"):
        pages.alloc(3)
    assert bounded.waited == 0
    assert pages.alloc(2).tolist() == [3, 5] and bounded.waited == 1
    pages._wait_for_freed()  # there is nothing to wait for
    assert (pages.num_free, pages.num_available) == (0, 0)
    pages.free([0])
    unbounded.finished = True
    assert pages.num_available == 3
    assert pages.alloc(3).tolist() == [0, 1, 2]


def test_finished_transfers_do_not_accumulate():
    pages = kv.PageAllocator(8)
    mine = pages.alloc(8)
    alive = weakref.WeakSet()
    for _ in range(1000):
        transfer = FakeTransfer(finished=True)
        alive.add(transfer)
        pages._mark_busy(mine, transfer)
    del transfer
    gc.collect()
    assert len(alive) < 200
    pages.free(mine)
    assert pages.num_free == 8
    gc.collect()
    assert len(alive) == 0


def test_no_lock_is_held_while_a_transfer_is_asked_or_waited_for():
    """Its owner may hold a lock that another thread holds while it calls the allocator."""
    pages = kv.PageAllocator(200)

    def elsewhere():
        calls = threading.Thread(
            target=lambda: (pages.num_allocated, pages._mark_busy([0], FakeTransfer(True))),
            daemon=True,
        )
        calls.start()
        calls.join(10)
        assert not calls.is_alive(), "the allocator is locked"

    pages.alloc(200)
    transfer = FakeTransfer(watch=elsewhere)
    pages._mark_busy([3], transfer)
    pages.free([3])
    assert pages.num_free == 0
    assert pages.alloc(1).tolist() == [3] and transfer.waited == 1
    crowd = [FakeTransfer(watch=elsewhere) for _ in range(70)]
    for one in crowd:
        pages._mark_busy([1], one)
    assert any(one.asked for one in crowd)


@pytest.mark.parametrize("ask", ["num_free", "alloc"])
def test_the_pages_of_a_failed_transfer_are_free_and_it_is_logged(ask, caplog):
    pages, _ = deferring(error=kv.DeviceError("copy engine lost"))
    got = pages.num_free if ask == "num_free" else pages.alloc(2).size
    assert got == 2
    assert "copy engine lost" in caplog.text
    caplog.clear()
    assert pages.num_free == (2 if ask == "num_free" else 0) and caplog.text == ""


def test_a_capture_leaves_the_pages_busy(caplog):
    """Nothing can be asked, nor waited for, while streams are captured."""
    pages, transfer = deferring(error=kv.CaptureError("stream 1 is being captured"))
    assert pages.num_free == 0
    with pytest.raises(kv.CaptureError):
        pages.alloc(1)
    assert (pages.num_free, pages.num_allocated) == (0, 6) and caplog.text == ""
    transfer.error = None
    assert pages.alloc(2).tolist() == [2, 3]


# --- Threads ---


def in_threads(count, work):
    """Call `work(0)`, `work(1)`, ... at once, with as many changes between them as there can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


def test_threads_share_an_allocator_with_transfers_that_finish_at_any_time():
    pages = kv.PageAllocator(64)
    owners = np.zeros(64, np.int64)
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                try:
                    got = pages.alloc(int(rng.integers(0, 20)))
                except kv.CacheFull:
                    continue
                owners[got] += 1
                if (owners[got] != 1).any():
                    wrong.append(got)
                transfer = FakeTransfer(finished=bool(rng.integers(2)))
                pages._mark_busy(got[::2], transfer)
                owners[got] -= 1
                pages.free(got)
                transfer.finished = transfer.finished or bool(rng.integers(2))
        except BaseException as error:
            wrong.append(error)

    in_threads(4, work)
    assert not wrong
    pages.check_leaks()
    assert np.sort(pages.alloc(64)).tolist() == list(range(64))


# --- Against a model ---


class Model(RuleBasedStateMachine):
    """Sets of pages, and transfers that finish, fail or are waited for."""

    @initialize(count=st.integers(1, 24))
    def start(self, count):
        self.pages, self.count = kv.PageAllocator(count), count
        self.out: set[int] = set()
        self.deferred: set[int] = set()
        self.flights: list[tuple[FakeTransfer, set[int]]] = []

    def settle(self):
        """Forget finished transfers and what they held."""
        self.flights = [(t, p) for t, p in self.flights if not (t.finished or t.error)]
        self.deferred &= set().union(*(p for _, p in self.flights))

    @property
    def free_pages(self):
        return set(range(self.count)) - self.out - self.deferred

    @rule(n=st.integers(0, 26))
    def alloc(self, n):
        self.settle()
        could = len(self.free_pages) + len(self.deferred)
        must_wait = n > len(self.free_pages)
        if n > could:
            with pytest.raises(kv.CacheFull):
                self.pages.alloc(n)
            assert not any(t.waited for t, _ in self.flights)
            return
        got = self.pages.alloc(n)
        assert got.dtype == np.int64 and got.shape == (n,) and len(set(got.tolist())) == n
        assert any(t.waited for t, _ in self.flights) == must_wait
        self.settle()
        assert set(got.tolist()) <= self.free_pages  # in no unfinished transfer either
        self.out |= set(got.tolist())

    @rule(data=st.data())
    def free(self, data):
        some = data.draw(st.permutations(sorted(self.out)))
        some = some[: data.draw(st.integers(0, len(some)))]
        self.settle()
        self.pages.free(np.array(some, np.int32) if data.draw(st.booleans()) else some)
        self.out -= set(some)
        self.deferred |= set(some) & set().union(*(p for _, p in self.flights))

    @rule(data=st.data())
    def free_what_is_not_out(self, data):
        good = (
            data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True)) if self.out else []
        )
        bad = data.draw(st.integers(-3, self.count + 3).filter(lambda p: p not in self.out))
        with pytest.raises(ValueError, match=rf"pages: .* {bad}\b"):
            self.pages.free([*good, bad])

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free_twice_at_once(self, data):
        page = data.draw(st.sampled_from(sorted(self.out)))
        with pytest.raises(ValueError, match=rf"pages: .* {page} twice"):
            self.pages.free([page, *sorted(self.out)])

    @rule(data=st.data(), finished=st.booleans())
    def busy(self, data, finished):
        touched = data.draw(st.lists(st.sampled_from([-1, self.count, 2**40, *sorted(self.out)])))
        transfer = FakeTransfer(finished)
        self.pages._mark_busy(touched, transfer)
        self.flights.append((transfer, set(touched)))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data, fails):
        transfer, _ = data.draw(st.sampled_from(self.flights))
        if fails:
            transfer.error = kv.DeviceError("lost")
        else:
            transfer.finished = True

    @rule()
    def ask(self):
        self.settle()
        assert self.pages.num_free == len(self.free_pages)

    @invariant()
    def out_is_what_the_model_says(self):
        assert self.pages.allocated().tolist() == sorted(self.out)
        assert self.pages.num_allocated == len(self.out)


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, database=None
)
