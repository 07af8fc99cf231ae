"""Exceptions of signal handlers, such as KeyboardInterrupt, in the middle of calls.

They are raised at every place where Python runs signal handlers. Afterwards an object is whole, or
it is broken and says so in every call.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from agents import Network
from helpers import examples
from line_process import PATIENCE_S, poll
from pages_world import LAYERS, PAGES, pool_of
from tiered_cases import MemoryStore, in_time

import kvcupy as kv
from kvcupy.cache.threads import Helpers, Users
from kvcupy.errors import InterruptGuard
from kvcupy.waiting import Latch, Waiters

PACKAGE = str(Path(kv.__file__).parent)
SHAPE = {"page_size": 2, "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "fp16"}
FIRST = 1 << 100
NUM_PAGES = 6


class Interrupt(BaseException):
    pass


def interrupted(call, place, folder=""):
    """Interrupt a call at a place, counted from 1; return the number of places until then.

    Python runs handlers where functions begin, and after calls of C functions.
    """
    number = 0

    def profile(frame, event, argument):
        nonlocal number
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE + folder):
            number += 1
            if number == place:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return number


def places_of(call, folder=""):
    """Return places of a call: some 40, or all with ``--full``."""
    number = interrupted(call, 0, folder)
    step = 1 if examples(4) > 1 else 1 + number // 40
    return [*range(1 + step // 2, number, step), number]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Loggers keep their lock if they are interrupted in Python; finalizers swallow interrupts."""
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)
    for name, each in logging.root.manager.loggerDict.items():
        if name.startswith("kvcupy") and isinstance(each, logging.Logger):
            monkeypatch.setattr(each, "disabled", True)


# --- Objects that are whole or broken afterwards --------------------------------------------------


def fill(pool, pages, numbers):
    for layer in range(2):
        for page, number in zip(pages, numbers, strict=True):
            pool.k(layer)[page], pool.v(layer)[page] = number, number + 0.5


def assert_filled(pool, pages, numbers):
    for layer in range(2):
        for page, number in zip(pages, numbers, strict=False):
            assert (np.asarray(pool.k(layer)[page]) == number).all(), f"block {number}"
            assert (np.asarray(pool.v(layer)[page]) == number + 0.5).all(), f"block {number}"


def hashes(*numbers):
    return [FIRST + number for number in numbers]


class Subject:
    def close(self):
        pass


class Tiers(Subject):
    """Eight blocks, of which four are on the device, one of them leased."""

    stores = ()

    def __init__(self):
        self.pool = kv.KVPool(NUM_PAGES, **SHAPE, device="host")
        self.host_pool = kv.KVPool(8, **SHAPE, device="host", placement="pinned")
        self.cache = kv.TieredCache(self.pool, self.host_pool, stores=self.stores)
        self.handles = []
        for number in range(8):
            self.insert(number)
            if number in (3, 5):
                self.cache.evict(2)
        self.lease = self.cache.acquire(hashes(7))
        self.pages = self.alloc(2)  # to be inserted
        fill(self.pool, self.pages, (20, 21))

    def alloc(self, number):
        missing = number - self.pool.allocator.num_available
        if missing > 0:
            self.cache.evict(missing)
        return self.pool.allocator.alloc(number)

    def insert(self, number):
        pages = self.alloc(1)
        fill(self.pool, pages, [number])
        self.pool.allocator.free(self.cache.insert(hashes(number), pages))

    def read(self, number, expected=None):
        with self.cache.acquire(hashes(number)) as lease:
            lease.wait()
            assert_filled(self.pool, lease.pages, [expected or number])

    def keep(self, handle):
        self.handles.append(handle)

    def audit(self):
        """Read all blocks, empty the cache and fill it again: no page is lost or has two owners."""
        cache, is_open = self.cache, not self.cache.closed
        if not is_open:
            try:
                cache.match([])
            except kv.KvcupyError as error:
                if "closed" not in str(error).split(":")[1][:20]:
                    raise
        for handle in self.handles:
            if isinstance(handle, kv.Lease):
                handle.wait()
                assert_filled(self.pool, handle.pages, range(3))
            else:
                assert_filled(self.host_pool, handle.pages, range(3))
            handle.release()
        for number in [*range(8), 20, 21] * 2 * is_open:
            self.read(number)
        self.lease.release()
        if is_open:
            cache.flush()
            cache.clear()
        owned = set(self.pool.allocator.allocated())
        assert owned <= set(self.pages), "pages are lost"
        self.pool.allocator.free(list(owned))
        if is_open:
            for number in range(40, 50):
                self.insert(number)
            for number in range(40, 50):
                self.read(number)
        self.close()
        self.pool.allocator.alloc(NUM_PAGES)  # waits for what is in flight; no page is lost
        self.host_pool.allocator.alloc(8)

    def close(self):
        self.cache.close()
        assert self.cache.closed


class TiersWithStore(Tiers):
    stores = (lambda pool, model: MemoryStore(pool),)


class Pages(Subject):
    def __init__(self):
        self.allocator = kv.PageAllocator(8)
        self.mine = self.allocator.alloc(3)

    def alloc(self):
        self.mine = [*self.mine, *self.allocator.alloc(2)]

    def audit(self):
        pages = self.allocator
        owned = set(pages.allocated())
        assert owned in (set(), set(self.mine)), "pages are lost"
        pages.free(list(owned))
        assert sorted(pages.alloc(8)) == list(range(8))
        assert pages.num_free == pages.num_available == 0


class Done:
    """A transfer that has ended."""

    def done(self):
        return True

    def synchronize(self):
        pass


class Engine(Subject):
    def __init__(self):
        self.pools = [kv.KVPool(4, **SHAPE, device="host") for _ in range(2)]
        self.engine = kv.TransferEngine(*self.pools)
        fill(self.pools[0], range(4), range(4))
        self.pages = self.pools[1].allocator.alloc(4)
        self.engine.save([0, 1], [0, 1]).synchronize()
        fill(self.pools[0], [0, 1], [8, 9])
        self.handle = None

    def wait_for(self, handle):
        self.handle = handle
        handle.synchronize()

    def audit(self):
        if self.handle is not None:
            try:
                self.handle.synchronize()
                assert_filled(self.pools[1], [2], [2])
            except kv.KvcupyError:
                pass
        self.pools[1].allocator.free(self.pages)
        pages = self.pools[1].allocator.alloc(4)  # waits for what is in flight
        fill(self.pools[0], range(4), range(4, 8))
        self.engine.save(range(4), pages.tolist()).synchronize()
        assert_filled(self.pools[1], pages, range(4, 8))
        fill(self.pools[0], range(4), [0] * 4)
        self.engine.load(pages, list(range(4))).synchronize()
        assert_filled(self.pools[0], range(4), range(4, 8))


class Paged(Subject):
    """Sequences of several lengths, some of whose pages are shared."""

    options = MappingProxyType(
        {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "num_pages": 16, "dtype": "fp16"}
    )

    def __init__(self):
        self.cache = kv.PagedKVCache(num_q_heads=1, page_size=2, device="host", **self.options)
        self.tokens = {}
        self.add("a", 5)
        self.add("b", 3)
        self.cache.fork_sequence("a", "c")
        self.tokens["c"] = list(self.tokens["a"])

    def add(self, name, length):
        self.cache.add_sequence(name)
        self.tokens[name] = []
        self.append([name], [length], 1 + 10 * len(self.tokens))

    def append(self, names, lengths, first):
        values = np.arange(first, first + sum(lengths))
        rows = np.repeat(values, 8).reshape(-1, 1, 8).astype(np.float16)
        with self.cache.forward(names, lengths):
            for layer in range(2):
                self.cache.attention(layer, rows, rows, rows)
        start = 0
        for name, length in zip(names, lengths, strict=True):
            self.tokens[name] += values[start : start + length].tolist()
            start += length

    def audit(self):
        cache = self.cache
        cache.abort_forward()
        for name in "abcd":
            if name not in cache:
                continue
            tokens = self.tokens.get(name, self.tokens["a"])
            length = cache.sequence_length(name)
            assert length <= len(tokens) + 1
            for layer in range(2):
                keys = cache.get_kv(name, 0, min(length, len(tokens)), layer=layer)[0]
                assert (np.asarray(keys)[:, 0, 0] == tokens[: len(keys)]).all(), name
        for name in "abcd":
            if name in cache:
                cache.remove_sequence(name)
        assert cache.total_length == 0
        for pool in cache.pools:
            assert pool.allocator.num_free == pool.num_pages, "pages are lost"
        self.add("e", 20)
        assert cache.sequence_length("e") == 20


GROUPS = {
    "num_tokens": 64,
    "groups": [
        kv.FullAttention(layers=[0], num_kv_heads=1, head_dim=8, dtype="fp16"),
        kv.SlidingWindow(layers=[1], window=64, num_kv_heads=1, head_dim=8, dtype="fp16"),
    ],
}


class PagedGroups(Paged):
    options = GROUPS


class PagedTiers(Paged):
    """The prompt of "p" is in host memory."""

    def __init__(self):
        super().__init__()
        self.tiers = self.new_tiers()
        self.cache.attach(self.tiers)
        self.hashes = kv.block_hashes(range(6), 2)
        self.cache.add_sequence("p", self.hashes)
        self.tokens["p"] = []
        self.append(["p"], [6], 200)
        self.cache.remove_sequence("p")
        self.tiers.evict()

    def new_tiers(self):
        return kv.TieredCache(self.cache.pool, kv.KVPool(8, **SHAPE, device="host"))

    def audit(self):
        if "p" in self.cache:
            self.cache.remove_sequence("p")
        self.cache.onboard("a")
        self.cache.add_sequence("p", self.hashes)
        for layer in range(2):
            keys = self.cache.get_kv("p", 0, self.cache.sequence_length("p"), layer=layer)[0]
            assert (np.asarray(keys)[:, 0, 0] == self.tokens["p"][: len(keys)]).all()
        self.cache.remove_sequence("p")
        self.tiers.close()
        super().audit()

    def close(self):
        self.tiers.close()


class GroupTiers(PagedTiers):
    options = GROUPS

    def new_tiers(self):
        return kv.TieredCache(groups=self.cache, host_bytes=1 << 14)


ABC = hashes(0, 1, 2)
TIER_CALLS = {
    "insert": lambda s: s.cache.insert(hashes(20, 21), s.pages),
    "acquire": lambda s: s.keep(s.cache.acquire(ABC)),
    "hold": lambda s: s.keep(s.cache.hold(ABC)),
    "save": lambda s: s.cache.save(hashes(30), s.lease.pages).synchronize(),
    "release": lambda s: s.lease.release(),
    "clear": lambda s: (s.lease.release(), s.cache.clear()),
    "evict": lambda s: s.cache.evict(1),
    "flush": lambda s: s.cache.flush(),
    "close": lambda s: s.cache.close(),
}
PAGED_CALLS = {
    "begin": lambda s: s.cache.begin_forward(["a", "b"], [2, 1]),
    "end": lambda s: (s.cache.begin_forward(["b"], [1]), s.cache.end_forward()),
    "abort": lambda s: (s.cache.begin_forward(["b"], [1]), s.cache.abort_forward()),
    "add": lambda s: s.cache.add_sequence("d"),
    "remove": lambda s: s.cache.remove_sequence("a"),
    "fork": lambda s: s.cache.fork_sequence("a", "d", 3),
    "pop": lambda s: s.cache.pop_tokens("c", 2),
    "length": lambda s: s.cache.sequence_length("a"),
    "read": lambda s: s.cache.get_kv("a", 0, 1, layer=0),
    "clear": lambda s: s.cache.clear(),
}
PAGED_TIER_CALLS = {
    "add": lambda s: s.cache.add_sequence("p", s.hashes),
    "remove": lambda s: (s.cache.add_sequence("p", s.hashes), s.cache.remove_sequence("p")),
    "evict": lambda s: (s.cache.add_sequence("p", s.hashes), s.cache.remove_sequence("p"),
                        s.tiers.evict()),
    "offload": lambda s: s.cache.offload("a"),
    "onboard": lambda s: (s.cache.offload("a"), s.cache.onboard("a")),
    "match": lambda s: s.tiers.match(s.hashes),
}  # fmt: skip
CALLS = {
    Tiers: TIER_CALLS,
    TiersWithStore: TIER_CALLS,
    Pages: {
        "alloc": Pages.alloc,
        "free": lambda s: s.allocator.free(s.mine),
        "busy": lambda s: s.allocator._mark_busy(s.mine, Done()),
    },
    Engine: {
        "save": lambda s: s.wait_for(s.engine.save([2, 3], [2, 3])),
        "both": lambda s: (s.engine.load([0, 1], [0, 1]), s.wait_for(s.engine.save([2], [2]))),
    },
    Paged: PAGED_CALLS,
    PagedGroups: PAGED_CALLS,
    PagedTiers: PAGED_TIER_CALLS,
    GroupTiers: PAGED_TIER_CALLS,
}


def says_so(call, *, or_refuses=False):
    """Return whether a call says that an earlier one was interrupted."""
    try:
        in_time(call)
    except (kv.KvcupyError, ValueError) as error:
        if "interrupted" in str(error):
            return True
        if not or_refuses:
            raise
    return False


def faults(kind, name):
    """Interrupt a call at its places; yield each place with what is wrong afterwards."""
    calls, first = CALLS[kind], kind()
    for place in places_of(lambda: calls[name](first)):
        subject = kind()
        interrupted(lambda: calls[name](subject), place)  # noqa: B023
        try:
            if says_so(subject.audit):
                later = [partial(call, subject) for call in calls.values()]
                assert any([says_so(call, or_refuses=True) for call in later])
                in_time(subject.close)
        except Exception as error:
            yield place, error


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id=f"{kind.__name__}-{name}")
        for kind in CALLS
        for name in CALLS[kind]
    ],
)
def test_an_interrupt_anywhere_in_a_call(kind, name):
    assert list(faults(kind, name)) == []


@pytest.mark.parametrize(("kind", "name"), [(Tiers, "insert"), (Pages, "alloc"), (Paged, "clear")])
def test_without_the_rule(monkeypatch, kind, name):
    """A control: without it pages are lost, and calls fail without naming an interrupt."""
    for method in ("mark_broken", "require_whole", "__enter__"):
        monkeypatch.setattr(InterruptGuard, method, lambda self: None)
    assert next(faults(kind, name), None)


@pytest.fixture
def storm():
    """Call a function again and again, while a signal handler raises at random times."""
    is_armed = False

    def handle(*_):
        if is_armed:
            raise Interrupt

    def repeat(call, number, seconds, prepare=lambda: None):
        """Until so many calls were interrupted, each within so many seconds.

        Before each, and after a call that has returned False, `prepare` runs undisturbed.
        """
        nonlocal is_armed
        rng, end = random.Random(3), time.monotonic() + PATIENCE_S
        while number:
            assert time.monotonic() < end
            prepare()
            try:
                is_armed = True
                # Again after a while: finalizers swallow exceptions.
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, seconds), 0.02)
                while call() is not False:
                    pass
            except Interrupt:
                number -= 1
            finally:
                is_armed = False

    before = signal.signal(signal.SIGALRM, handle)
    yield repeat
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_storm_of_signals_gives_no_wrong_byte(storm):
    """A cache that an interrupt has broken is replaced, with its pools."""
    subject, num_reads, num_broken, rng = None, 0, 0, random.Random(5)

    def prepare():
        nonlocal subject
        if subject is None:
            subject = TiersWithStore()
            subject.lease.release()

    def call():
        nonlocal subject, num_reads, num_broken
        try:
            number = rng.randrange(30)
            if rng.random() < 0.4:
                subject.insert(number)
            else:
                subject.read(number)
                num_reads += 1
        except kv.KvcupyError as error:
            if "interrupted" in str(error) or subject.cache.closed:  # within the next line
                num_broken += 1
                subject.cache.close()
            elif not isinstance(error, kv.CacheFull):  # pages of interrupted inserts
                raise
            subject = None
            return False

    storm(call, 1000 if examples(4) > 1 else 200, 5e-3, prepare)
    assert num_reads > 100 and num_broken > 20


# --- Waits ----------------------------------------------------------------------------------------


def test_waiters(storm):
    """A thread notifies all the while; another one still excludes it in the end."""
    lock = threading.Lock()
    changed, number, over = Waiters(lock), 0, False

    def notify():
        nonlocal number
        while not over:
            with lock:
                number += 1
                changed.notify()

    def wait():
        seen = number
        changed.wait_for(lambda: number != seen, 0.01)

    thread = threading.Thread(target=notify)
    thread.start()
    try:
        storm(wait, 1000, 2e-4)
        assert lock.acquire(timeout=PATIENCE_S)
        seen = number
        time.sleep(0.05)
        assert number == seen  # nothing has released the lock meanwhile
        lock.release()
    finally:
        over = True
        thread.join()


def test_a_latch_whose_set_or_wait_is_interrupted():
    def check(latch):
        waiting = threading.Thread(target=latch.wait, daemon=True)
        waiting.start()
        assert poll(lambda: latch._changed._waiting)
        return waiting

    for call in (Latch.set, lambda latch: latch.wait(0.01)):
        for place in places_of(lambda: call(Latch())):  # noqa: B023
            latch = Latch()
            waiting = check(latch)
            interrupted(lambda: call(latch), place)  # noqa: B023
            in_time(latch.set)
            waiting.join(PATIENCE_S)
            assert not waiting.is_alive() and latch.wait()


def test_users(storm):
    """A call that an interrupt leaves behind is replaced by the next one of its thread."""
    users = Users(2)

    def use():
        call = users.enter(1)
        assert call is not None
        users.leave(call)

    storm(use, 1000, 5e-5)
    other = in_time(lambda: users.enter(1))
    assert other is not None
    first = users.enter()
    assert in_time(lambda: users.enter(0.05) is None)  # two are in a call
    del other  # as with the frame that held it
    assert users.close() is False  # as from a signal handler in this call
    users.leave(first)
    assert users.close() is True
    assert users.enter() is None


def test_users_close_after_calls_in_progress():
    users, entered, over = Users(), threading.Event(), threading.Event()

    def use():
        call = users.enter()
        entered.set()
        over.wait(PATIENCE_S)
        users.leave(call)

    thread = threading.Thread(target=use)
    thread.start()
    assert entered.wait(PATIENCE_S)
    threading.Timer(0.1, over.set).start()
    assert users.close() is True
    assert over.is_set()
    thread.join()


def test_helpers_have_ended_after_an_interrupt_of_their_start(monkeypatch):
    helpers, started, done = Helpers(1, "test"), threading.Event(), []
    real = helpers._executor.submit

    def submit(work):
        real(work)
        assert started.wait(PATIENCE_S)
        raise Interrupt  # while the thread begins to work

    def function(item):
        started.set()
        time.sleep(0.1)
        done.append(item)

    monkeypatch.setattr(helpers._executor, "submit", submit)
    with pytest.raises(Interrupt):
        helpers.each(function, [1, 2, 3], 1)
    assert done == [1], "the item that a thread has taken, and no other"
    helpers.close()


# --- Pages between processes ----------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch):
    """A sender of three layers, of which each page has its number, and a receiver."""
    Network(immediate=True).install(monkeypatch)
    source, target = pool_of(), pool_of()
    for layer in range(LAYERS):
        source.k(layer)[...] = np.arange(PAGES).reshape(-1, 1, 1, 1)
    with kv.PageSender(source) as sender, kv.PageReceiver(target) as receiver:
        yield sender, receiver


def offered(sender, pages):
    """Offer pages of which no layer is announced yet, and which stay the caller's."""
    units = [(0, layer) for layer in range(LAYERS)]
    return sender._offer_parts([(0, pages)], units, [None] * LAYERS, lambda: None, 0.05)


def announce(sender, offer):
    offer.announce(range(LAYERS), sender.pools[0].device.as_stream(None))


@pytest.mark.parametrize("name", ["offer", "pull", "cancel"])
def test_senders_and_receivers(ends, name):
    """Afterwards both work, and all pages come back."""
    sender, receiver = ends
    allocators = [end.pools[0].allocator for end in ends]
    running = []

    def call():
        if name == "offer":
            sender.offer(running[0], lease_s=1e-3, after=False)
        else:
            offer = offered(sender, running[0])
            if name == "pull":
                announce(sender, offer)
            pull = receiver.pull(offer.ticket, [3, 4], deadline_s=1.0)
            pull.cancel() if name == "cancel" else pull.synchronize()

    def prepared():
        running[:] = [allocators[0].alloc(2)]
        return call

    def is_quiet():
        for offer in list(sender._offers.values()):
            announce(sender, offer)
        return not (sender.stats()["offered_pages"] or receiver.stats()["pulls"])

    for place in places_of(prepared(), "/remote/migration"):
        assert in_time(lambda: poll(is_quiet))
        allocators[0].free(allocators[0].allocated())
        assert poll(lambda: allocators[0].num_free == PAGES), place
        interrupted(prepared(), place, "/remote/migration")
    assert in_time(lambda: poll(is_quiet))
    allocators[0].free(allocators[0].allocated())
    pages = allocators[0].alloc(PAGES)
    ticket = in_time(lambda: sender.offer(pages[:2]))
    in_time(lambda: receiver.pull(ticket, [5, 6]).synchronize() or True)
    for layer in range(LAYERS):
        assert (receiver.pools[0].k(layer)[[5, 6]] == np.reshape(pages[:2], (-1, 1, 1, 1))).all()


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
