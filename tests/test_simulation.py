"""Protocols in simulated worlds (`tests/simulate.py`), and the worlds themselves."""

import errno
import os

import pytest

pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')

from simulation import PROTOCOLS
from support.world import Interrupt, Stuck, run_once, search

NUM_SEEDS = 200  # of each protocol; 10,000 every night


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_return_what_they_may(protocol, first):
    if failure := search(PROTOCOLS[protocol], range(first, first + 50)):
        raise failure


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_seed_decides_a_run(protocol):
    runs = [run_once(PROTOCOLS[protocol], seed)[1] for seed in (1, 2, 1)]
    assert runs[0].digest == runs[2].digest != runs[1].digest
    assert runs[0].log == runs[2].log


# --- The world ------------------------------------------------------------------------------------


def test_threads_take_turns_in_virtual_time():
    def scenario(world):
        lock, values = world.threading.Lock(), []

        def count(name):
            for i in range(3):
                with lock:
                    values.append((name, i))
                    world.time.sleep(3600.0)

        tasks = [world.process("p").start(count, name) for name in "ab"]
        world.run(1e6)
        assert all(task.is_over for task in tasks)
        assert sorted(values) == [(name, i) for name in "ab" for i in range(3)]
        assert world.now > 6 * 3600

    orders = set()
    for seed in range(20):
        failure, world = run_once(scenario, seed)
        assert failure is None, failure
        orders.add(world.digest)


def test_a_deadlock_is_reported_with_its_places():
    def scenario(world):
        locks = [world.threading.Lock() for _ in range(2)]

        def take(first, second):
            with locks[first]:
                world.time.sleep(1.0)
                with locks[second]:
                    pass

        process = world.process("p")
        process.start(take, 0, 1, name="one")
        process.start(take, 1, 0, name="other")
        world.run()

    failure, _ = run_once(scenario, 0)
    assert isinstance(failure.error, Stuck)
    assert "p/one waits at" in str(failure) and __file__ in str(failure)


def test_a_call_that_is_not_simulated_is_an_error():
    def scenario(world):
        world.process("p").start(lambda: world.os.fork())
        world.run()

    failure, _ = run_once(scenario, 0)
    assert isinstance(failure.error, AttributeError)


def test_killed_processes_release_their_locks():
    def scenario(world):
        import fcntl

        holder, other = world.process("holder"), world.process("other")

        def hold():
            descriptor = world.os.open("/lock", os.O_RDWR | os.O_CREAT, 0o600)
            world.fcntl.flock(descriptor, fcntl.LOCK_EX)
            world.time.sleep(1e6)

        def take():
            world.time.sleep(1.0)
            descriptor = world.os.open("/lock", os.O_RDWR)
            with pytest.raises(BlockingIOError):
                world.fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holder.kill()
            world.fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

        holder.start(hold)
        other.start(take)
        world.run()

    for seed in range(20):
        failure, _ = run_once(scenario, seed)
        assert failure is None, failure


def test_a_power_failure_keeps_what_was_synced():
    torn = set()

    def scenario(world):
        def write():
            descriptor = world.os.open("/file", os.O_RDWR | os.O_CREAT, 0o600)
            world.os.pwrite(descriptor, b"a" * 1024, 0)
            world.os.fsync(descriptor)
            world.os.pwrite(descriptor, b"b" * 1024, 0)

        process = world.process("p")
        process.start(write)
        world.run()
        process.kill()
        world.files.lose_power()
        data = bytes(world.files.inodes["/file"].data)
        sectors = data[:512], data[512:]
        assert all(sector in (b"a" * 512, b"b" * 512) for sector in sectors)
        torn.add(data)

    for seed in range(30):
        failure, _ = run_once(scenario, seed)
        assert failure is None, failure
    assert len(torn) == 4


def test_a_failing_run_is_shortened_to_the_steps_that_it_needs():
    def scenario(world):
        done = set()

        def work():
            for number in range(20):
                world.time.sleep(1.0)
                if world.step(f"number {number}"):
                    done.add(number)
            assert not {3, 11} <= done, "both"

        world.process("p").start(work)
        world.run()

    failure = search(scenario, range(1))
    steps = [line for line in failure.log if ": step " in line]
    assert len(steps) == 2 and "number 3" in steps[0] and "number 11" in steps[1]


def test_an_interrupt_leaves_a_condition_locked_as_in_python():
    def scenario(world):
        condition = world.threading.Condition()
        process = world.process("p")

        def enter():
            try:
                with condition:
                    pass
            except Interrupt:
                pass

        task = process.start(enter)
        process.start(world.interrupt, task)
        other = process.start(lambda: condition.acquire(timeout=1.0) or pytest.fail("locked"))
        world.run()
        assert other.is_over

    outcomes = [run_once(scenario, seed)[0] is None for seed in range(40)]
    assert not all(outcomes)


def test_disk_faults_reach_the_caller():
    def scenario(world):
        def fail(call, path):
            if call == "write":
                raise OSError(errno.ENOSPC, "No space left on device")

        world.files.fault = fail

        def write():
            descriptor = world.os.open("/file", os.O_RDWR | os.O_CREAT, 0o600)
            with pytest.raises(OSError, match="No space"):
                world.os.pwrite(descriptor, b"a", 0)

        world.process("p").start(write)
        world.run()

    failure, _ = run_once(scenario, 0)
    assert failure is None, failure
