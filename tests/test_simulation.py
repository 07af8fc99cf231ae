"""Tiers in a simulated world (`tests/simulate.py`), and the worlds themselves."""

import pytest

pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')

from simulated_tiers import tiers
from support.world import Stuck, run_once, search

NUM_SEEDS = 200  # 10,000 every night


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_calls_return_what_they_may(first):
    if failure := search(tiers, range(first, first + 50)):
        raise failure


def test_a_seed_decides_a_run():
    runs = [run_once(tiers, seed)[1] for seed in (1, 2, 1)]
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
        world.process("p").start(lambda: world.threading.Condition())
        world.run()

    failure, _ = run_once(scenario, 0)
    assert isinstance(failure.error, AttributeError)


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
