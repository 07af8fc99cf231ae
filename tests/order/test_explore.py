"""kv.explore: which orders there are, that races are met, and that schedules are repeated."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from helpers import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcupy as kv


def logged(steps):
    """A program that puts steps on streams, and returns in which order they ran.

    Parameters
    ----------
    steps : ("run", stream), ("record", stream, event), ("wait", stream, event)
    """

    def program(device):
        streams, events = [device.stream() for _ in range(3)], [device.event() for _ in range(2)]
        log = []
        for number, (what, stream, *rest) in enumerate(steps):
            if what == "run":
                streams[stream].call(lambda number=number: log.append(number))
            elif what == "record":
                streams[stream].record(events[rest[0]])
            else:
                streams[stream].wait(events[rest[0]])
        device.synchronize()
        return log

    return program


def orders(steps):
    """All orders of the "run" steps that streams and events allow."""
    behind, last, recorded = {}, {}, {}
    for number, (what, stream, *rest) in enumerate(steps):
        seen = set(last.get(stream, ()))
        if what == "run":
            behind[number] = frozenset(seen)
            seen.add(number)
        elif what == "record":
            recorded[rest[0]] = frozenset(seen)
        else:
            seen |= recorded.get(rest[0], frozenset())
        last[stream] = seen
    return {
        order
        for order in permutations(behind)
        if all(behind[n] <= set(order[:i]) for i, n in enumerate(order))
    }


STEPS = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 2)),
    st.tuples(st.sampled_from(["record", "wait"]), st.integers(0, 2), st.integers(0, 1)),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(STEPS, max_size=5))
@example([("run", 0), ("record", 0, 0), ("wait", 0, 0), ("run", 1)])
@example([("run", 0), ("record", 0, 0), ("wait", 1, 0), ("run", 2)])
def test_all_orders(steps):
    result = kv.explore(logged(steps), schedules=None)
    assert {tuple(outcome) for outcome, _ in result.outcomes} == orders(steps)
    assert result.ok == (len(orders(steps)) == 1)


def double(device, *, waits=True, late=0):
    """Copy to a buffer on one stream, out of it on another."""
    source, buffer, target = (device.zeros(4, "fp32") for _ in range(3))
    main, copy = device.stream(), device.stream()
    source[...] = 1
    for _ in range(late):
        main.call(lambda: None)
    device.copy(buffer, source, stream=copy)
    if waits:
        main.wait(copy)
    device.copy(target, buffer, stream=main)
    device.synchronize()
    return target


def test_a_missing_wait():
    assert kv.explore(double).ok
    result = kv.explore(lambda device: double(device, waits=False))
    (failure,) = result.failures
    assert not result.ok and result.schedules == 200
    assert sum(count for _, count in result.outcomes) == 200
    assert np.all(failure.outcome == 0) and np.all(failure.expected == 1)


@pytest.mark.parametrize(("late", "most"), [(0, 2), (5, 2), (60, 9)])
def test_a_failure_is_minimal_and_repeated(late, most):
    """Two steps: the host continues, then the consumer does. Long schedules are shortened too."""

    def program(device):
        return double(device, waits=False, late=late)

    result = kv.explore(program, seed=7)
    (failure,) = result.failures
    assert 2 <= sum(map(bool, failure.schedule)) <= most
    assert failure.seed >= 7 and result.seed == 7
    assert str(failure.seed) in str(failure) and "replay=" in str(failure)
    for replay in (failure, failure.schedule):
        again = kv.explore(program, replay=replay)
        assert not again.ok and again.schedules == 2
        assert np.array_equal(again.failures[0].outcome, failure.outcome)


def test_a_seed_gives_the_same_again():
    def program(device):
        return logged([("run", i % 3) for i in range(6)])(device)

    first, second, other = (kv.explore(program, schedules=30, seed=s) for s in (3, 3, 4))
    assert first.outcomes == second.outcomes != other.outcomes


def test_programs_that_raise():
    def program(device):
        got = double(device, waits=False)
        assert np.all(got == 1), "too early"

    result = kv.explore(program)
    (failure,) = result.failures
    assert isinstance(failure.outcome, AssertionError) and failure.expected is None
    always = kv.explore(lambda device: 1 / 0, schedules=3)
    assert not always.ok and len(always.failures) == 1


def test_a_deadlock_is_found():
    def program(device):
        a, b = device.stream(), device.stream()
        b.wait(a.record())
        b.synchronize()
        with pytest.raises(kv.DeviceError, match="deadlock"):
            device.context._scheduler.run_until(lambda: False)

    assert kv.explore(program, schedules=5).ok


def deep(device):
    """Wrong only if one stream runs between two others: of depth three."""
    log, streams = [], [device.stream() for _ in range(3)]
    for i, stream in enumerate(streams):
        for step in range(3):
            stream.call(lambda i=i, step=step: log.append((i, step)))
    device.synchronize()
    at = {step: n for n, step in enumerate(log)}
    return at[2, 2] < at[0, 1] < at[1, 0]


def test_rare_orders_are_met():
    assert not kv.explore(deep).ok
