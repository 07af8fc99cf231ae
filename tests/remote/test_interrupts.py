"""Exceptions of signal handlers, such as KeyboardInterrupt, leave no lock held and no page lost."""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
import time
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from agents import Network
from line_process import PATIENCE_S, poll
from pages_world import LAYERS, PAGES, pool_of

import kvcupy as kv
from kvcupy import streams
from kvcupy.cache.threads import Helpers, Users
from kvcupy.waiting import Latch, Waiters

NUM_INTERRUPTS = 2000


class Interrupt(BaseException):
    pass


@pytest.fixture
def interrupt(monkeypatch):
    """Repeat a call until it was interrupted often, each time within so many seconds.

    The tracebacks keep the frames of the calls alive until the test is over, as sys.last_traceback
    does with one.
    """
    errors, armed = [], False
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)  # of finalizers
    # Python's handlers keep their lock if they are interrupted just before `try`. All threads that
    # log later in this process would wait for pytest's handlers.
    # So do locks that were made under an order checker, as of a stream that outlives its test.
    monkeypatch.setattr(streams, "_idle", WeakKeyDictionary())
    for name, each in logging.root.manager.loggerDict.items():
        if name.startswith("kvcupy") and isinstance(each, logging.Logger):
            monkeypatch.setattr(each, "disabled", True)

    def raise_interrupt(*_):
        if armed:
            raise Interrupt

    def repeat(call, seconds):
        nonlocal armed
        assert threading.current_thread() is threading.main_thread()
        rng, num_errors = random.Random(3), len(errors)
        before = signal.signal(signal.SIGALRM, raise_interrupt)
        end = time.monotonic() + PATIENCE_S
        try:
            while len(errors) < num_errors + NUM_INTERRUPTS:
                assert time.monotonic() < end
                try:
                    armed = True
                    # Again after a while, since a signal just before a wait does not end it, and
                    # finalizers swallow exceptions.
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, seconds), 0.02)
                    while True:
                        call()
                except Interrupt as error:
                    armed = False
                    errors.append(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    hook = sys.unraisablehook
    sys.unraisablehook = lambda raised: None  # one in Python might be interrupted, too
    repeat.forget = errors.clear
    yield repeat
    sys.unraisablehook = hook
    errors.clear()


def eventually(condition):
    assert poll(condition)


def in_time(call):
    """Return the result of a call in another thread, which must end."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(20)
    assert results, "the call does not return"
    return results[0]


# --- Waiters, latches and users ---


def test_waiters(interrupt):
    """A thread notifies all the while; another one still excludes it in the end."""
    lock = threading.Lock()
    changed, number, over = Waiters(lock), 0, False

    def count():
        nonlocal number
        while not over:
            with lock:
                number += 1
                changed.notify()

    thread = threading.Thread(target=count)
    thread.start()
    try:

        def wait():
            seen = number
            changed.wait_for(lambda: number != seen, 0.01)

        interrupt(wait, 2e-4)
        assert lock.acquire(timeout=20)
        seen = number
        time.sleep(0.05)
        assert number == seen  # nothing has released the lock meanwhile
        lock.release()
    finally:
        over = True
        thread.join()


def test_waiters_wait_until_a_change_or_a_timeout():
    lock, values = threading.Lock(), []
    changed = Waiters(lock)
    start = time.monotonic()
    assert changed.wait_for(lambda: values, 0.05) == []
    assert time.monotonic() - start >= 0.05
    assert not changed._waiting
    waiting = [threading.Thread(target=changed.wait_for, args=(lambda: values,)) for _ in range(3)]
    for thread in waiting:
        thread.start()
    eventually(lambda: len(changed._waiting) == 3)
    with lock:
        changed.notify()  # in vain
    eventually(lambda: len(changed._waiting) == 3)
    with lock:
        values.append(1)
        changed.notify()
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()


def test_latch(interrupt):
    latch = Latch()
    interrupt(lambda: latch.wait(1), 2e-4)
    assert not latch.is_set()
    assert latch.wait(0.01) is False
    in_time(latch.set)
    assert latch.is_set() and latch.wait()


def test_users(interrupt):
    """A call that an interrupt leaves behind is replaced by the next one of its thread."""
    users = Users(2)

    def use():
        call = users.enter(1)
        assert call is not None
        users.leave(call)

    interrupt(use, 5e-5)
    other = in_time(lambda: users.enter(1))
    assert other is not None
    first = users.enter()
    assert in_time(lambda: users.enter(0.05) is None)  # two are in a call
    users.leave(first)
    del other  # as with the frame that held it
    assert users.close() is True
    assert users.close() is True
    assert users.enter() is None


def test_a_call_left_behind_does_not_keep_others_from_closing():
    users = Users()
    users.enter()  # whose frame is gone
    assert in_time(users.close)


def test_users_close_while_calls_are_in_progress():
    users, entered, over = Users(), threading.Event(), threading.Event()

    def use():
        call = users.enter()
        entered.set()
        over.wait(20)
        users.leave(call)

    thread = threading.Thread(target=use)
    thread.start()
    assert entered.wait(20)
    threading.Timer(0.1, over.set).start()
    assert users.close() is True
    assert over.is_set()
    thread.join()
    own = Users()
    call = own.enter()
    assert own.close() is False  # as from a signal handler
    own.leave(call)


def test_helpers_have_ended_after_an_interrupt_of_their_start(monkeypatch):
    helpers, started, done = Helpers(1, "test"), threading.Event(), []
    real = helpers._executor.submit

    def submit(work):
        real(work)
        assert started.wait(20)
        raise Interrupt  # as of a signal handler, while the thread begins to work

    def function(item):
        started.set()
        time.sleep(0.1)
        done.append(item)

    monkeypatch.setattr(helpers._executor, "submit", submit)
    with pytest.raises(Interrupt):
        helpers.each(function, [1, 2, 3], 1)
    assert done == [1], "the item that a thread has taken, and no other"
    helpers.close()
    assert done == [1]


# --- What is made of them ---


def test_a_store(tmp_path, interrupt):
    pool = pool_of()
    store = kv.BlockStore.open(f"file:{tmp_path}/store", pool, capacity_bytes=1 << 20, model="m")
    hashes = [(1 << 100) + i for i in range(8)]

    def call():
        store.put(hashes, range(8))
        store.match(hashes)
        store.get(hashes, range(8))
        store.stats()

    interrupt(call, 5e-4)
    assert in_time(lambda: store.get(hashes, range(8)))
    assert store.stats()["hits"] >= 0
    in_time(lambda: store.close() or True)


def test_a_tiered_cache(interrupt):
    shape = {"page_size": 4, "num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": "fp16"}
    pools = (
        kv.KVPool(16, **shape, device="host"),
        kv.KVPool(32, **shape, device="host", placement="pinned"),
    )
    cache = kv.TieredCache(*pools)
    hashes = [(1 << 100) + i for i in range(4)]
    interrupt(lambda: cache.match(hashes), 5e-5)
    in_time(lambda: cache.match(hashes) is not None)
    in_time(lambda: cache.close() or True)


@pytest.fixture
def ends(monkeypatch):
    """A sender of three layers, of which each page has its number, and a receiver."""
    Network(immediate=True).install(monkeypatch)
    source, target = pool_of(), pool_of()
    for layer in range(LAYERS):
        source.k(layer)[...] = np.arange(PAGES).reshape(-1, 1, 1, 1)
    with kv.PageSender(source) as sender, kv.PageReceiver(target) as receiver:
        yield sender, receiver


def offered(sender, pages, lease_s=PATIENCE_S):
    """Offer pages of which no layer is announced yet, and which stay the caller's."""
    return sender._offer_parts(
        [(0, pages)], [(0, layer) for layer in range(LAYERS)], [None] * LAYERS, lambda: None,
        lease_s,
    )  # fmt: skip


def announce(sender, offer):
    offer.announce(range(LAYERS), sender.pools[0].device.as_stream(None))


def assert_pulled(receiver, pages, sources):
    for layer in range(LAYERS):
        assert (receiver.pools[0].k(layer)[pages] == np.reshape(sources, (-1, 1, 1, 1))).all()


def test_a_sender(interrupt, ends):
    sender, receiver = ends
    pages = sender.pools[0].allocator.alloc(2)

    def call():
        offer = offered(sender, pages, lease_s=0.01)
        announce(sender, offer)
        offer.withdraw()
        sender.stats()

    interrupt(call, 2e-4)
    for offer in list(sender._offers.values()):  # those whose layers were never announced
        announce(sender, offer)
    eventually(lambda: in_time(sender.stats)["offers"] == 0 and not sender._offers)
    ticket = in_time(lambda: sender.offer(pages))
    receiver.pull(ticket, [0, 1]).synchronize()
    assert_pulled(receiver, [0, 1], pages)


def test_a_receiver(interrupt, ends):
    sender, receiver = ends
    pages = sender.pools[0].allocator.alloc(2)

    def call():
        offer = offered(sender, pages)
        announce(sender, offer)
        receiver.pull(offer.ticket, [3, 4]).synchronize()
        receiver.stats()

    interrupt(call, 1e-3)
    in_time(receiver.stats)
    offer = offered(sender, pages)
    announce(sender, offer)
    in_time(lambda: receiver.pull(offer.ticket, [5, 6]).synchronize() or True)
    assert_pulled(receiver, [5, 6], pages)


def test_a_pull_that_is_waited_for(interrupt, ends):
    sender, receiver = ends
    pages = sender.pools[0].allocator.alloc(2)
    offer = offered(sender, pages)
    pull = receiver.pull(offer.ticket, [3, 4], deadline_s=PATIENCE_S)
    interrupt(lambda: pull._await_unit(2), 2e-4)
    interrupt(pull.synchronize, 2e-4)
    announce(sender, offer)
    in_time(lambda: pull.synchronize() or True)
    assert_pulled(receiver, [3, 4], pages)


def test_a_cancel_that_is_interrupted(monkeypatch, ends):
    """A second call wakes the threads that wait for the pull."""
    sender, receiver = ends
    offer = offered(sender, sender.pools[0].allocator.alloc(2))
    pull = receiver.pull(offer.ticket, [3, 4], deadline_s=PATIENCE_S)
    errors = []

    def wait():
        try:
            pull._await_unit(2)
        except kv.TransferError as error:
            errors.append(error.reason)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    eventually(lambda: pull._changed._waiting)

    def interrupted(*_):
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull._changed, "notify", interrupted)
        with pytest.raises(Interrupt):
            pull.cancel()
    pull.cancel()
    waiting.join(5)
    pull._landing.synchronize(5)
    assert errors == ["cancelled"] and pull._landing.done()
    announce(sender, offer)


def test_a_latch_whose_set_is_interrupted(monkeypatch):
    latch = Latch()
    waiting = threading.Thread(target=latch.wait, daemon=True)
    waiting.start()
    eventually(lambda: latch._changed._waiting)

    def interrupted():
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(latch._changed, "notify", interrupted)
        with pytest.raises(Interrupt):
            latch.set()
    assert not latch.is_set()  # else the thread would wait for ever
    latch.set()
    waiting.join(5)
    assert not waiting.is_alive()


def test_what_a_handler_that_does_not_raise_may_call(ends):
    """At every line of the same calls: a trace function takes the place of the signal."""
    folder, lines = str(Path(kv.PageSender.offer.__code__.co_filename).parent), set()
    sender, receiver = ends

    def call():
        pages = sender.pools[0].allocator.alloc(2)
        first = offered(sender, pages)
        running = receiver.pull(first.ticket, [0, 1])

        def trace(frame, event, argument):
            if frame.f_code.co_filename.startswith(folder):
                lines.add((frame.f_code.co_filename, frame.f_lineno))
                sender.stats()
                receiver.stats()
                running.cancel()
                return trace

        sys.settrace(trace)
        try:
            pull = receiver.pull(sender.offer(pages), [2, 3])
            pull.cancel()
            return receiver.stats()
        finally:
            sys.settrace(None)
            announce(sender, first)

    in_time(call)
    assert len(lines) > 70


# --- Every page comes back ---


class Done:
    """A transfer that has ended."""

    def done(self):
        return True

    def synchronize(self):
        pass


def test_pages_of_an_allocator(interrupt):
    """An interrupted `alloc` may leave pages allocated that it has not returned."""
    pages = kv.KVPool(64, 4, 1, 1, 8, device="host").allocator

    def call():
        mine = pages.alloc(3)
        pages._mark_busy(mine, Done())
        pages.free(mine)
        assert pages.num_free + pages.num_allocated <= 64

    def freed():
        while True:
            try:
                return pages.free(pages.allocated())
            except Interrupt:
                pass

    def again():
        try:
            call()
        except kv.CacheFull:
            freed()

    interrupt(again, 1e-4)
    pages.free(pages.allocated())
    assert pages.num_free == 64
    assert sorted(pages.alloc(64)) == list(range(64))
    assert not pages._num_transfers.any() and pages._num_deferred == 0


def test_pages_of_a_sender(interrupt, ends):
    sender, _ = ends
    allocator = sender.pools[0].allocator

    def call():
        sender.offer(allocator.alloc(2), lease_s=1e-3, after=False)

    def repeated():
        try:
            call()
        except kv.CacheFull:  # the caller's pages, of interrupted calls
            eventually(lambda: sender.stats()["offered_pages"] == 0)
            allocator.free(allocator.allocated())

    interrupt(repeated, 5e-4)
    eventually(lambda: sender.stats()["offered_pages"] == 0)
    allocator.free(allocator.allocated())
    eventually(lambda: allocator.num_free == PAGES)
    sender.offer(allocator.alloc(PAGES), lease_s=1e-3)  # none counts as offered
    eventually(lambda: allocator.num_free == PAGES)


def test_pages_of_a_receiver(interrupt, ends):
    """Frames of interrupted calls keep what they were about to do, so they must be gone."""
    sender, receiver = ends
    allocator, sources = receiver.pools[0].allocator, sender.pools[0].allocator.alloc(2)

    def call():
        offer = offered(sender, sources)
        announce(sender, offer)
        pages = allocator.alloc(2)
        receiver.pull(offer.ticket, pages).synchronize()
        allocator.free(pages)

    def again():
        try:
            call()
        except kv.CacheFull:  # pages of interrupted calls
            allocator.free(allocator.allocated())

    interrupt(again, 2e-3)
    interrupt.forget()
    eventually(lambda: receiver.stats()["pulls"] == 0)
    assert receiver.stats()["quarantined_pages"] == 0
    allocator.free(allocator.allocated())
    eventually(lambda: allocator.num_free == PAGES)
    in_time(lambda: allocator.free(allocator.alloc(PAGES)) or True)
