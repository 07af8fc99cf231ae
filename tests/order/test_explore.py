"""kv.explore: which orders there are, that races are met, and that schedules are repeated."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from helpers import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcupy as kv
from kvcupy.order.explore import SimulatedDevice


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
    assert result.exhaustive
    assert {tuple(outcome) for outcome, _ in result.outcomes} == orders(steps)
    assert result.ok == (len(orders(steps)) == 1)


def test_the_host_orders_too():
    def program(device):
        a, b, log = device.stream(), device.stream(), []
        a.call(lambda: log.append("a"))
        a.synchronize()
        b.call(lambda: log.append("b"))
        event = b.record()
        while not event.done():
            pass
        a.call(lambda: log.append("c"))
        while not a.done():
            pass
        device.as_stream(None).wait(b)
        return log

    result = kv.explore(program, schedules=None)
    assert result.ok
    assert [outcome for outcome, _ in result.outcomes] == [["a", "b", "c"]]


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


def test_a_copy_reads_its_source_when_it_runs():
    def program(device):
        source, target, stream = np.zeros(4), np.zeros(4), device.stream()
        device.copy(target, source, stream=stream)
        source[...] = 1
        stream.synchronize()
        return float(target[0])

    assert {outcome for outcome, _ in kv.explore(program, schedules=None).outcomes} == {0.0, 1.0}


def test_a_host_that_asks_once_may_come_too_early():
    """And one that asks until it is so does not."""

    def program(device, loops):
        stream, log = device.stream(), []
        stream.call(lambda: log.append("ran"))
        event = stream.record()
        while not event.done() and loops:
            pass
        return list(log)

    for loops in (False, True):
        result = kv.explore(lambda device: program(device, loops), schedules=None)  # noqa: B023
        assert result.ok == loops


@pytest.mark.parametrize("late", [0, 5])
def test_a_failure_is_minimal_and_repeated(late):
    def program(device):
        return double(device, waits=False, late=late)

    result = kv.explore(program, seed=7)
    (failure,) = result.failures
    assert sum(map(bool, failure.schedule)) == 2, "the host goes on, then the consumer does"
    assert failure.seed >= 7 and result.seed == 7
    assert str(failure.seed) in str(failure) and "replay=" in str(failure)
    for replay in (failure, failure.schedule):
        again = kv.explore(program, replay=replay)
        assert not again.ok and again.schedules == 2
        assert np.array_equal(again.failures[0].outcome, failure.outcome)


def test_long_schedules_are_shortened_too():
    def program(device):
        return double(device, waits=False, late=60)

    (failure,) = kv.explore(program).failures
    assert not kv.explore(program, replay=failure).ok
    assert sum(map(bool, failure.schedule)) < 10


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
        event = a.record()
        b.wait(event)
        b.synchronize()
        with pytest.raises(kv.DeviceError, match="deadlock"):
            device._scheduler_of_test(lambda: False)

    def run(device):
        device._scheduler_of_test = device.context._scheduler.run_until
        program(device)

    assert kv.explore(run, schedules=5).ok


def test_failures_on_streams_surface():
    def program(device):
        stream = device.stream()
        stream.call(lambda: 1 / 0)
        with pytest.raises(kv.DeviceError, match="ZeroDivisionError"):
            stream.synchronize()
        stream.call(lambda: None)
        stream.synchronize()

    assert kv.explore(program, schedules=10).ok


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


@pytest.mark.parametrize(
    ("options", "error"), [({"schedules": 0}, "schedules: expected None or at least 1, got 0")]
)
def test_arguments(options, error):
    with pytest.raises(ValueError, match=error):
        kv.explore(double, **options)
    with pytest.raises(TypeError, match="program: expected arrays, numbers or strings, got set"):
        kv.explore(lambda device: {1})


def test_outcomes_are_compared_bit_for_bit():
    def program(device):
        return {"nan": float("nan"), "array": np.full(2, np.nan), "x": [np.float32(1), None]}

    assert kv.explore(program, schedules=5).ok


def test_dicts_are_equal_in_any_order():
    def program(device):
        finished = {}
        for name in "ab":
            device.stream().call(lambda name=name: finished.setdefault(name, name))
        device.synchronize()
        return finished

    assert len(kv.explore(program, schedules=None).outcomes) == 1


# --- Protocols ------------------------------------------------------------------------------------


def forked(device, out=()):
    """Fork and join around work on a second stream."""
    x, y = device.zeros(4, "fp32"), device.zeros(4, "fp32")
    main, side = device.stream(), device.stream()
    device.copy(x, np.ones(4, np.float32), stream=main)
    if "fork" not in out:
        kv.fork(main, side)
    device.copy(y, x, stream=side)
    if "join" not in out:
        kv.join(main, side)
    device.copy(x, y, stream=main)
    device.copy(y, np.zeros(4, np.float32), stream=main)
    device.synchronize()
    return x, y


def stored(device, out=()):
    """Kernels: a store on one stream, a gather on another."""
    k, v = (device.zeros((8, 1, 4), "fp32") for _ in "kv")
    rows, slots = device.zeros((2, 1, 4), "fp32"), np.array([5, 2])
    rows[...] = 3
    main, side = device.stream(), device.stream()
    kv.store_kv(rows, rows, k, v, slots, stream=side)
    if "wait" not in out:
        main.wait(side)
    outputs = {f"{name}_out": device.zeros((2, 1, 4), "fp32") for name in "kv"}
    kv.gather_kv(k, v, slots, **outputs, stream=main)
    device.synchronize()
    return outputs


def loaded(device, out=()):
    """A load, layer by layer, into pages that the compute stream has read; then a save."""
    pools = [
        kv.KVPool(3, 2, 2, 1, 4, dtype="fp32", placement=placement, device=device)
        for placement in ("device", "pinned")
    ]
    engine, compute, seen = kv.TransferEngine(*pools), device.stream(), []
    for layer in range(2):
        pools[0].k(layer)[...], pools[1].k(layer)[...] = 1 + layer, 5 + layer
    before = device.zeros((2, 1, 4), "fp32")
    device.copy(before, pools[0].k(1)[2], stream=compute)
    after = device.stream() if "after" in out else compute
    transfer = engine.load([0], [2], after=after)
    for layer in range(2):
        if "wait_layer" not in out:
            transfer.wait_layer(layer, compute)
        target = device.zeros((2, 1, 4), "fp32")
        device.copy(target, pools[0].k(layer)[2], stream=compute)
        seen.append(target)
    device.copy(pools[0].k(0)[1], np.full((2, 1, 4), 9, np.float32), stream=compute)
    engine.save([1], [1], after=device.stream() if "save" in out else compute).synchronize()
    transfer.synchronize()
    device.synchronize()
    return before, seen, pools[1].k(0)[1].copy()


def replayed(device, out=()):
    """A graph of two streams, launched twice, and its input changed in between."""
    x, y, z = (device.zeros(4, "fp32") for _ in range(3))
    main, side, total = device.stream(), device.stream(), []
    with main.capture() as graph:
        kv.fork(main, side)
        device.copy(y, x, stream=side)
        kv.join(main, side)
        device.copy(z, y, stream=main)
    for number in (1, 2):
        device.copy(x, np.full(4, number, np.float32), stream=side)
        if "before" not in out:
            main.wait(side)
        graph.launch(main)
        total.append(device.zeros(4, "fp32"))
        device.copy(total[-1], z, stream=main)
        if "behind" not in out:
            side.wait(main)
    device.synchronize()
    return total


PROTOCOLS = {
    forked: ("fork", "join"),
    stored: ("wait",),
    loaded: ("after", "wait_layer", "save"),
    replayed: ("before", "behind"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.__name__)
def test_a_protocol_comes_out_the_same_in_every_order(protocol):
    with kv.order_checker() as checker:
        result = kv.explore(protocol, schedules=examples(40))
    assert result.ok, "\n".join(map(str, result.failures))
    assert checker.reports == []


@pytest.mark.parametrize(
    ("protocol", "wait"), [(p, wait) for p, waits in PROTOCOLS.items() for wait in waits]
)
def test_without_one_of_its_waits_it_does_not(protocol, wait):
    """Both find it: the scheduler an order that goes wrong, the checker the missing wait."""
    result = kv.explore(lambda device: protocol(device, {wait}), schedules=60)
    assert not result.ok
    with kv.order_checker("record") as checker:
        protocol(kv.device("host"), {wait})
    assert checker.reports


def test_the_device_is_one_of_the_host(monkeypatch):
    seen = []

    def program(device):
        seen.append((type(device), device.name, device.kind))
        assert device.stream().device is device

    assert kv.explore(program, schedules=2).ok
    assert seen == [(SimulatedDevice, "host", "host")] * 2
