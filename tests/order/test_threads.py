"""Host threads of the order checker: what orders them, and that nothing else does."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.pool import ThreadPool

import pytest
import test_tiered_threads
from engine_cases import parts_of

import kvcupy as kv
from kvcupy.cache.threads import Users
from kvcupy.waiting import Latch, Waiters

LUCK_S = 0.05  # in which another thread is done, by all experience


class World:
    """A producer and a consumer on their own threads and streams."""

    def __init__(self, device):
        self.device = device
        self.a, self.b = device.stream(), device.stream()
        self.x, self.y, self.z = (device.zeros((8, 4), "fp32") for _ in range(3))

    def produce(self, *, waits=True):
        self.device.copy(self.x, self.y, stream=self.a)
        if waits:
            self.a.synchronize()

    def consume(self):
        self.device.copy(self.z, self.x, stream=self.b)


@pytest.fixture
def world(device):
    yield World(device)
    device.synchronize()


def kinds(checker):
    return [report.kind for report in checker.reports]


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def sleep_while(thread):
    """Wait until a thread has ended, of which the checker learns nothing."""
    deadline = time.monotonic() + 20
    while any(t is thread for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- By luck --------------------------------------------------------------------------------------


def test_another_thread_was_quicker(world):
    """The host wait of one thread does not order another, which only came later."""
    with kv.order_checker("record") as checker:
        thread = in_thread(world.produce)
        sleep_while(thread)
        world.consume()
        thread.join()
    (report,) = checker.reports
    assert report.kind == "RAW"
    assert f"take over from thread {thread.name!r}" in report.edge


def test_a_stream_is_waited_for_that_another_thread_may_not_have_used_yet(world):
    with kv.order_checker("record") as checker:
        thread = in_thread(lambda: world.produce(waits=False))
        sleep_while(thread)
        world.b.wait(world.a)
        world.consume()
        thread.join()
    assert kinds(checker) == ["RAW"]


@pytest.mark.parametrize("wait", ["stream", "device"])
def test_the_host_waits_for_what_another_thread_may_not_have_issued_yet(world, wait):
    with kv.order_checker("record") as checker:
        thread = in_thread(lambda: world.produce(waits=False))
        sleep_while(thread)
        (world.a if wait == "stream" else world.device).synchronize()
        world.consume()
    assert kinds(checker) == ["RAW"]


def test_two_threads_that_were_started_together(world):
    with kv.order_checker("record") as checker:
        first = in_thread(world.produce)
        second = in_thread(lambda: (time.sleep(LUCK_S), world.consume()))
        first.join()
        second.join()
    assert kinds(checker) == ["RAW"] or kinds(checker) == ["WAR"]


def test_a_lock_that_was_not_taken_orders_nothing(world):
    with kv.order_checker("record") as checker:
        lock, other = threading.Lock(), threading.Lock()

        def produce():
            world.produce()
            with lock:
                pass

        sleep_while(in_thread(produce))
        with other:
            pass
        world.consume()
    assert kinds(checker) == ["RAW"]


@pytest.mark.parametrize("which", ["event", "stream"])
@pytest.mark.parametrize("uses", [True, False])
def test_a_poll_whose_answer_is_ignored(world, which, uses):
    with kv.order_checker("record") as checker:
        world.produce(waits=False)
        event = world.a.record()
        while world.a in world.device.busy_streams():  # of which the checker learns nothing
            time.sleep(0.001)
        polled = event if which == "event" else world.a
        found = polled.done()
        while uses and not found:
            found = polled.done()
        world.consume()
    assert kinds(checker) == ["RAW"] * (not uses)


def test_the_answer_of_a_poll_is_true(world):
    with kv.order_checker():
        world.produce()
        for what in (world.a, world.a.record()):
            while not (answer := what.done()):
                pass
            assert answer == True and answer != False  # noqa: E712
            assert isinstance(answer, int) and int(answer) == 1 and [0, 5][answer] == 5
            assert repr(answer) == "True" and hash(answer) == hash(True)
            assert answer & True and answer | False and answer != 0
    assert world.a.done() is True


def test_an_answer_counts_for_the_moment_of_the_poll(world):
    with kv.order_checker("record") as checker:
        world.a.synchronize()
        early = world.a.done()
        world.produce(waits=False)
        assert early
        world.consume()
    assert kinds(checker) == ["RAW"]


def test_work_from_before_the_block(world):
    """Its bytes are not known: what may race with it is listed, and is no error."""
    release = threading.Event()
    world.a.call(lambda: release.wait(20))
    world.produce(waits=False)
    event = world.a.record()
    with kv.order_checker() as checker:
        world.consume()
        (report,) = checker.unchecked
        assert report.first.stream == world.a.name and report.second.operation == "copy"
        assert report.edge == "self.b.wait(self.a)"
        world.b.wait(event)
        world.consume()
        world.device.copy(world.z, world.y, stream=world.b)
        assert len(checker.unchecked) == 1
        release.set()
    assert checker.reports == []


def test_streams_that_are_idle_when_the_block_begins_are_fine(world):
    world.produce()
    with kv.order_checker() as checker:
        world.consume()
    assert checker.unchecked == []


# --- What orders ----------------------------------------------------------------------------------


def by_join(world, work):
    thread = in_thread(work)
    thread.join()


def by_is_alive(world, work):
    thread = in_thread(work)
    while thread.is_alive():
        pass


def by_event(world, work):
    done = threading.Event()
    in_thread(lambda: (work(), done.set()))
    assert done.wait(20)


def by_polled_event(world, work):
    done = threading.Event()
    in_thread(lambda: (work(), done.set()))
    while not done.is_set():
        pass


def by_condition(world, work):
    condition, done = threading.Condition(), []

    def produce():
        work()
        with condition:
            done.append(True)
            condition.notify_all()

    in_thread(produce)
    with condition:
        condition.wait_for(lambda: done, 20)


def by_queue(world, work, make=queue.Queue):
    results = make()
    in_thread(lambda: (work(), results.put(1)))
    assert results.get(timeout=20)


def by_simple_queue(world, work):
    by_queue(world, work, queue.SimpleQueue)


def by_lock(world, work, make=None):
    lock, done = (make or threading.Lock)(), []

    def produce():
        work()
        with lock:
            done.append(True)

    in_thread(produce)
    while True:
        with lock:
            if done:
                return


def by_rlock(world, work):
    by_lock(world, work, threading.RLock)


def by_acquired_lock(world, work):
    lock = threading.Lock()
    assert lock.acquire() and lock.locked()
    in_thread(lambda: (work(), lock.release()))
    assert lock.acquire(timeout=20)
    lock.release()


def by_semaphore(world, work):
    semaphore = threading.Semaphore(0)
    in_thread(lambda: (work(), semaphore.release()))
    assert semaphore.acquire(timeout=20)


def by_barrier(world, work):
    barrier = threading.Barrier(2)
    in_thread(lambda: (work(), barrier.wait(20)))
    barrier.wait(20)


def by_future(world, work):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def by_future_found_done(world, work):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while not future.done():
            pass


def by_futures_that_are_waited_for(world, work):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while future._state != "FINISHED":
            time.sleep(0.001)
        futures.wait([future])
        world.consume()


def by_futures_as_completed(world, work):
    with ThreadPoolExecutor(1) as pool:
        for _ in futures.as_completed([pool.submit(work)]):
            world.consume()


def by_tasks_that_are_done(world, work):
    jobs = queue.Queue()
    jobs.put(None)
    in_thread(lambda: (jobs.get(), work(), jobs.task_done()))
    jobs.join()


def by_timer(world, work):
    timer = threading.Timer(0.001, work)
    timer.start()
    timer.join()


def by_pool_of_threads(world, work):
    with ThreadPool(1) as pool:
        pool.apply(work)


def by_call_soon_threadsafe(world, work):
    async def main():
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        in_thread(lambda: (work(), loop.call_soon_threadsafe(arrived.set)))
        await arrived.wait()

    asyncio.run(main())


def by_submission(world, work):
    work()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()
        pool.submit(world.consume).result()


def by_latch(world, work):
    latch = Latch()
    in_thread(lambda: (work(), latch.set()))
    assert latch.wait(20)


def by_polled_latch(world, work):
    latch = Latch()
    in_thread(lambda: (work(), latch.set()))
    while not latch.is_set():
        time.sleep(0.001)


def by_waiters(world, work):
    lock, done = threading.Lock(), []
    waiters = Waiters(lock)

    def produce():
        work()
        with lock:
            done.append(True)
            waiters.notify()

    in_thread(produce)
    waiters.wait_for(lambda: done, 20)


def by_calls_that_have_ended(world, work):
    """As `BlockStore.close` waits for calls of other threads."""
    users = Users()

    def produce():
        call = users.enter()
        work()
        users.leave(call)

    thread = in_thread(produce)
    while not users._calls and thread in threading.enumerate():
        time.sleep(0.001)
    assert users.close()


def by_asyncio(world, work):
    async def main():
        await asyncio.get_running_loop().run_in_executor(None, work)
        world.consume()

    asyncio.run(main())


def by_handoff(world, work):
    done = []

    def produce():
        work()
        with kv.declare(handoff=done):
            done.append(True)

    in_thread(produce)
    while not done:
        time.sleep(0.001)
    with kv.declare(handoff=done):
        done.pop()


def by_another_thread(world, work):
    first, second = threading.Event(), threading.Event()
    in_thread(lambda: (work(), first.set()))
    in_thread(lambda: (first.wait(20), second.set()))
    assert second.wait(20)


def by_an_event_of_the_device(world, work):
    events = []
    in_thread(lambda: (world.produce(waits=False), events.append(world.a.record())))
    while not events:
        time.sleep(0.001)
    world.b.wait(events[0])


def by_a_function_on_a_stream(world, work):
    done = threading.Event()
    world.produce(waits=False)
    world.a.call(done.set)
    assert done.wait(20)


ORDERS = {
    name.removeprefix("by_"): value for name, value in globals().items() if name.startswith("by_")
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_it_orders(world, order):
    with kv.order_checker() as checker:
        order(world, world.produce)
        world.consume()
    assert checker.reports == []


MADE_BEFORE = {name: order for name, order in ORDERS.items() if not name.startswith("futures_")}
"""Futures are made by `submit`, thus in the block."""


@pytest.mark.parametrize("order", MADE_BEFORE.values(), ids=MADE_BEFORE)
def test_made_before_the_block(world, order):
    """Whatever was there before is known, or the thread that uses it counts as ordered."""
    genuine = threading.Lock, threading.RLock, queue.SimpleQueue
    with kv.order_checker() as checker:
        inside = threading.Lock, threading.RLock, queue.SimpleQueue
        threading.Lock, threading.RLock, queue.SimpleQueue = genuine
        try:
            order(world, world.produce)
        finally:
            threading.Lock, threading.RLock, queue.SimpleQueue = inside
        world.consume()
    assert checker.reports == []


def test_a_handoff_by_name(world):
    with kv.order_checker() as checker:
        seen = []

        def produce():
            with kv.declare(handoff="pages"):
                world.produce()
                seen.append(True)

        in_thread(produce)
        with kv.declare(handoff="pages"):
            while not seen:
                time.sleep(0.001)
        world.consume()
    assert checker.reports == []


def test_another_handoff_orders_nothing(world):
    with kv.order_checker("record") as checker:
        seen = []

        def produce():
            with kv.declare(handoff="pages"):
                world.produce()
            seen.append(True)

        in_thread(produce)
        while not seen:
            time.sleep(0.001)
        with kv.declare(handoff="tables"):
            pass
        world.consume()
    assert kinds(checker) == ["RAW"]


def test_threads_from_before_the_block_are_one_with_all(world):
    jobs, done = queue.Queue(), []

    def work():
        while (job := jobs.get()) is not None:
            job()
            done.append(True)

    thread = in_thread(work)
    with kv.order_checker() as checker:
        in_thread(lambda: None).join()
        jobs.put(world.produce)
        while not done:
            time.sleep(0.001)
        world.consume()
        jobs.put(None)
    thread.join()
    assert checker.reports == []


def test_threads_of_one_stream_share_its_order(world):
    with kv.order_checker() as checker:
        thread = in_thread(lambda: world.produce(waits=False))
        sleep_while(thread)
        world.device.copy(world.z, world.x, stream=world.a)
    assert checker.reports == []


def test_pages_that_one_thread_frees_and_another_allocates(device):
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": "fp32", "device": device}
    pool = kv.KVPool(2, 2, **shape)
    streams = device.stream(), device.stream()
    pages = pool.allocator.alloc(2)
    with kv.order_checker() as checker:

        def first():
            with kv.declare(writes=pool, stream=streams[0]):
                pass
            streams[0].synchronize()
            pool.allocator.free(pages)

        thread = in_thread(first)
        while pool.allocator.num_free < 2:
            time.sleep(0.001)
        pool.allocator.alloc(2)
        with kv.declare(writes=pool, stream=streams[1]):
            pass
        thread.join()
    assert checker.reports == []


def test_an_edge_names_no_thread_for_work_from_before_the_first_thread(world):
    with kv.order_checker("record") as checker:
        world.produce(waits=False)
        in_thread(lambda: None).join()
        world.consume()
    assert kinds(checker) == ["RAW"]
    assert "thread" not in checker.reports[0].edge


@pytest.mark.parametrize(
    "wait",
    [
        lambda lease, stream: lease.wait_layer(0, stream),
        lambda lease, _: lease.completion.synchronize(),
    ],
    ids=["wait_layer", "synchronize"],
)
def test_a_lease_waits_for_a_load_that_another_thread_has_settled(device, wait):
    blocks = test_tiered_threads.Blocks(device)
    blocks.insert([1])
    blocks.evict_all()
    blocks.settle()
    stream, target = device.stream(), device.asarray(blocks.values(1)[0])
    with kv.order_checker() as checker, blocks.cache.acquire([1]) as lease:
        sleep_while(in_thread(blocks.settle))
        wait(lease, stream)
        device.copy(target, parts_of(blocks.device_pool)[0][lease.pages[0]], stream=stream)
        stream.synchronize()
    assert checker.reports == []


@pytest.mark.parametrize("tiers", ["two tiers", "three tiers", "a small host tier, a slow disk"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_a_cache_from_before_the_block(device, tmp_path, monkeypatch, write, tiers):
    """Its locks are silent; it says itself which thread is behind which."""
    checkers, make = [], test_tiered_threads.Blocks

    def before_the_block(*arguments, **options):
        blocks = make(*arguments, **options)
        device.synchronize()
        checkers.append(block.enter_context(kv.order_checker("record")))
        return blocks

    monkeypatch.setattr(test_tiered_threads, "Blocks", before_the_block)
    with ExitStack() as block:
        test_tiered_threads.test_many_threads(device, tmp_path, monkeypatch, write, tiers)
    assert checkers[0].reports == []


def test_nothing_stays_replaced():
    owners = [
        (threading, "Lock"), (threading, "RLock"), (queue, "SimpleQueue"),
        (threading.Thread, "start"), (threading.Thread, "join"), (threading.Thread, "is_alive"),
        (threading.Condition, "__enter__"), (threading.Condition, "wait"),
        (threading.Event, "set"), (threading.Event, "is_set"), (ThreadPoolExecutor, "submit"),
    ]  # fmt: skip
    genuine = [getattr(owner, name) for owner, name in owners]
    with kv.order_checker():
        kept = threading.Lock(), threading.RLock(), queue.SimpleQueue()
        with kv.order_checker("record"):
            assert threading.Lock is not genuine[0]
        assert threading.Lock is not genuine[0]
    assert [getattr(owner, name) for owner, name in owners] == genuine
    lock, rlock, items = kept
    for _ in range(2):
        with lock, rlock, rlock:
            assert lock.locked() and not lock.acquire(blocking=False)
    items.put(1)
    assert items.get() == 1
    with threading.Condition(rlock) as entered:
        assert entered


def test_others_may_patch_threads_too(world, monkeypatch):
    """They may put back what they found inside of a block, after that block."""
    start = threading.Thread.start
    with kv.order_checker():
        monkeypatch.setattr(threading.Thread, "start", lambda thread: found(thread))
        found = monkeypatch._setattr[-1][-1]
    monkeypatch.undo()
    assert threading.Thread.start is not start
    for _ in range(2):
        with kv.order_checker() as checker:
            by_event(world, world.produce)
            world.consume()
        assert checker.reports == []
    assert threading.Thread.start is start


def test_a_thread_that_fails_to_start_leaves_nothing(world, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with kv.order_checker() as checker:
        monkeypatch.setattr(threading, "_start_new_thread", refuse)
        with pytest.raises(RuntimeError):
            in_thread(lambda: None)
        monkeypatch.undo()
        world.produce()
        world.consume()
    assert checker.reports == []
