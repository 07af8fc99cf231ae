"""kv.fork, kv.join, kv.keep_alive, and what is announced to observers."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from stream_cases import Gate, Log, nothing, ranges, run_ahead

import kvcupy as kv
from kvcupy import observe
from kvcupy.arrays import view


class Arrays:
    """Ten numbers that go from `source` through `middle` to `target`."""

    def __init__(self, device):
        self.device = device
        self.source = device.asarray(np.arange(1, 11, dtype=np.float32))
        self.middle = [device.zeros(10, np.float32) for _ in range(3)]
        self.target = [device.zeros(10, np.float32) for _ in range(3)]
        device.synchronize()

    def copy(self, dst, src, stream):
        self.device.copy(dst, src, stream=stream)

    def right(self, array) -> bool:
        return self.device.to_numpy(array).tolist() == list(range(1, 11))


def produce_then_fork(device, fork):
    """main writes late, the others read."""
    arrays, (main, *others) = Arrays(device), [device.stream() for _ in range(4)]
    gate = Gate(main)
    arrays.copy(arrays.middle[0], arrays.source, main)
    fork(main, *others)
    for target, other in zip(arrays.target, others, strict=True):
        arrays.copy(target, arrays.middle[0], other)
    run_ahead([gate], *others, is_control=fork is nothing)
    device.synchronize()
    return [arrays.right(target) for target in arrays.target]


def produce_then_join(device, join):
    """The others write late, main reads."""
    arrays, (main, *others) = Arrays(device), [device.stream() for _ in range(4)]
    gates = [Gate(other) for other in others]
    for middle, other in zip(arrays.middle, others, strict=True):
        arrays.copy(middle, arrays.source, other)
    join(main, *others)
    for target, middle in zip(arrays.target, arrays.middle, strict=True):
        arrays.copy(target, middle, main)
    run_ahead(gates, main, is_control=join is nothing)
    device.synchronize()
    return [arrays.right(target) for target in arrays.target]


def read_then_overwrite(device, join):
    """main overwrites what another stream still reads."""
    arrays, main, reader = Arrays(device), device.stream(), device.stream()
    gate = Gate(reader)
    arrays.copy(arrays.target[0], arrays.source, reader)
    join(main, reader)
    arrays.copy(arrays.source, arrays.middle[0], main)
    run_ahead([gate], main, is_control=join is nothing)
    device.synchronize()
    return [arrays.right(arrays.target[0])]


PROTOCOLS = [
    (produce_then_fork, kv.fork), (produce_then_join, kv.join), (read_then_overwrite, kv.join),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "order"), PROTOCOLS)
def test_fork_and_join_order_streams(device, protocol, order):
    for repeat in range(3):
        right = protocol(device, order)
        assert all(right), f"repeat {repeat}: right were {right}"


@pytest.mark.races
@pytest.mark.parametrize(("protocol", "order"), PROTOCOLS)
def test_without_fork_or_join_the_result_is_wrong(device, protocol, order):
    """The control of the test above."""
    assert not any(protocol(device, nothing))


@pytest.mark.races
def test_fork_and_join_are_for_what_was_there_before(device):
    """Neither waits for what comes later."""
    arrays, main, other = Arrays(device), device.stream(), device.stream()
    kv.fork(main, other)
    kv.join(other, main)
    gate = Gate(main)
    arrays.copy(arrays.middle[0], arrays.source, main)
    arrays.copy(arrays.target[0], arrays.middle[0], other)
    run_ahead([gate], other, is_control=True)
    device.synchronize()
    assert not arrays.right(arrays.target[0])


def test_fork_and_join_in_a_capture(device):
    arrays, main, other = Arrays(device), device.stream(), device.stream()
    with main.capture() as graph:
        arrays.copy(arrays.middle[0], arrays.source, main)
        kv.fork(main, other)
        arrays.copy(arrays.middle[1], arrays.middle[0], other)
        kv.join(main, other)
        arrays.copy(arrays.target[0], arrays.middle[1], main)
    device.synchronize()
    assert not arrays.right(arrays.target[0])
    graph.launch(main)
    main.synchronize()
    assert arrays.right(arrays.target[0])


def test_fork_and_join_refuse_what_is_no_stream(device):
    main = device.stream()
    for order in (kv.fork, kv.join):
        with pytest.raises(TypeError, match="stream"):
            order(main, 3)
        with pytest.raises(TypeError, match="stream"):
            order("main", main)


# Lifetime ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True], ids=["array", "list"])
def test_keep_alive(device, many):
    arrays = [device.zeros(4, np.float32) for _ in range(2)]
    watched = [weakref.ref(array) for array in arrays]
    stream = device.stream()
    gate = Gate(stream)
    kv.keep_alive(arrays if many else arrays[0], stream)
    del arrays
    gc.collect()
    assert [ref() is not None for ref in watched] == [True, many]
    gate.open()
    device.synchronize()
    kv.keep_alive((), stream)  # a device may release what has passed only when it is called again
    device.synchronize()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_what_is_no_array_is_not_kept(device):
    for wrong in (3, [device.zeros(4, np.float32), 3]):
        with pytest.raises(TypeError, match=r"^arrays: expected an array"):
            kv.keep_alive(wrong, device.stream())


def test_without_keep_alive_an_array_goes_at_once(device):
    array = device.zeros(4, np.float32)
    watched = weakref.ref(array)
    gate = Gate(device.stream())
    del array
    gc.collect()
    assert watched() is None
    gate.open()


def test_store_keeps_its_arguments_alive(device):
    stream = device.stream()
    caches = [device.zeros((8, 1, 4), np.float32) for _ in range(2)]
    arguments = [device.asarray(np.ones((3, 1, 4), np.float32)) for _ in range(2)]
    arguments.append(device.asarray(np.array([1, 0, 7])))
    watched = [weakref.ref(array) for array in arguments]
    kv.store_kv(*arguments[:2], *caches, arguments[2], stream=stream)  # loads the kernel
    device.synchronize()
    gate = Gate(stream)
    kv.store_kv(*arguments[:2], *caches, arguments[2], stream=stream)
    del arguments
    gc.collect()
    assert all(ref() is not None for ref in watched)
    gate.open()
    stream.synchronize()
    assert device.to_numpy(caches[0])[:, 0, 0].tolist() == [1, 1, 0, 0, 0, 0, 0, 1]


# Observers ---------------------------------------------------------------------------------------


def store_arguments(device, tokens=3):
    arrays = [
        device.zeros((5, 2, 4), np.float32),
        device.zeros((5, 2, 6), np.float32),
        device.zeros((4, 2, 2, 4), np.float32),
        device.zeros((4, 2, 2, 6), np.float32),
        device.asarray(np.arange(tokens)),
    ]
    device.synchronize()
    return arrays


def test_everything_is_announced_in_the_order_of_issue(device):
    main, side = device.stream(), device.stream()
    array, other = device.zeros(4, np.float32), device.zeros(4, np.float32)
    with observe.attached(Log()) as log:
        device.copy(array, other, stream=main)
        event = main.record()
        side.wait(event)
        side.call(lambda: None)
        main.wait(side)
        kv.store_kv(*store_arguments(device), stream=main)
        device.event()
    lines = log.take()
    joined = lines[6][1]  # the event that waiting for a stream makes
    assert lines == [
        ("before", "copy", main), ("after", "copy", main),
        ("recorded", event, main), ("waited", event, side),
        ("before", "call", side), ("after", "call", side),
        ("recorded", joined, side), ("waited", joined, main),
        ("before", "store_kv", main), ("after", "store_kv", main),
    ]  # fmt: skip
    device.copy(array, other, stream=main)
    main.record()
    device.synchronize()
    assert log.take() == [], "announced after the observer was detached"


def test_reads_and_writes_of_a_copy(device):
    dst, src = device.zeros((4, 8), np.float32), device.zeros((4, 4), np.float32)
    with observe.attached(Log()) as log:
        device.copy(dst[:, ::2], src)
    (operation,) = log.operations
    assert [a.view.pointer for a in operation.reads] == [view(src).pointer]
    assert [a.view.pointer for a in operation.writes] == [view(dst).pointer]
    (write,) = operation.writes
    assert (write.view.shape, write.view.strides) == ((4, 4), (32, 8))


@pytest.mark.parametrize("dynamic", [False, True])
def test_reads_and_writes_of_a_store_name_its_slots(device, dynamic):
    key, value, k_cache, v_cache, slots = store_arguments(device)
    scales = {}
    if dynamic:
        k_cache, v_cache = (device.zeros(c.shape, np.int8) for c in (k_cache, v_cache))
        scales = {
            name: device.zeros((8, 2), np.float32) for name in ("k_scale_cache", "v_scale_cache")
        }
    with observe.attached(Log()) as log:
        kv.store_kv(key, value, k_cache, v_cache, slots, **scales)
    (operation,) = log.operations
    # Rows past the slots are not read.
    expected = [key[:3], value[:3], slots]
    assert ranges(operation.reads) == sorted(view(a).byte_range() for a in expected)
    written = [k_cache, v_cache, *scales.values()]
    assert ranges(operation.writes) == sorted(view(a).byte_range() for a in written)
    for write in operation.writes:
        assert write.slots is not None
        assert write.slots.pointer == view(slots).pointer
        assert write.slots.shape == (3,)


def test_a_capture_is_announced_as_it_is_recorded_and_a_replay_as_one(device):
    main, side = device.stream(), device.stream()
    array, other = device.zeros(4, np.float32), device.zeros(4, np.float32)
    with observe.attached(Log()) as log:
        with main.capture() as graph:
            kv.fork(main, side)
            device.copy(array, other, stream=side)
            kv.join(main, side)
        assert [line[0] for line in log.take()] == [
            "recorded", "waited", "before", "after", "recorded", "waited",
        ]  # fmt: skip
        graph.launch(main)
        graph.launch(main)
        main.synchronize()
    assert log.take() == [("before", "graph", main), ("after", "graph", main)] * 2


def test_a_raising_observer_refuses_before_anything_is_issued(device):
    main, seen = device.stream(), []
    key, value, k_cache, v_cache, slots = store_arguments(device)
    key[...] = 1
    with main.capture() as graph:
        main.call(lambda: seen.append("graph"))
    target = device.zeros((5, 2, 4), np.float32)
    for name, issue in (
        ("copy", lambda: device.copy(target, key, stream=main)),
        ("call", lambda: main.call(lambda: seen.append("call"))),
        ("store_kv", lambda: kv.store_kv(key, value, k_cache, v_cache, slots, stream=main)),
        ("graph", lambda: graph.launch(main)),
    ):
        with observe.attached(Log(refuse=name)) as log:
            with pytest.raises(kv.KvcupyError, match="refused"):
                issue()
            assert log.take() == [("before", name, main)]
    device.synchronize()
    assert seen == []
    assert not device.to_numpy(target).any()
    assert not device.to_numpy(k_cache).any()
    device.copy(target, key, stream=main)
    device.synchronize()
    assert device.to_numpy(target).all()
