"""`transfer_pages` on streams and on threads, and what it announces to observers.

Graphs, and what a transfer keeps alive, are in `test_transfer_graphs.py`.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from stream_cases import Gate, Log, delay
from transfer_cases import METHODS, MIXED_LAYOUTS, TransferCase, chain

import kvcupy as kv
from kvcupy import observe
from kvcupy.arrays import overlap

SRC, DST = [1, 2, 6, 0], [4, 5, 0, 8]
every_method = pytest.mark.parametrize("method", METHODS)
some_layouts = pytest.mark.parametrize("layouts", MIXED_LAYOUTS, ids="-".join)


def fill_late(case, pool, stream):
    """Overwrite a pool on a stream that is delayed."""
    delay(stream)
    pool.refill(case.bits, stream)


def content(pool):
    return [memory.download().tobytes() for memory in pool.memories]


# Order ----------------------------------------------------------------------------------------


@every_method
@some_layouts
def test_behind_a_slow_producer(device, method, layouts):
    """A transfer moves what the same stream wrote before it, for page lists of any kind."""
    case = TransferCase(device, 1)
    src, dst = chain(case, layouts)
    stream = device.stream()
    placed = case.indices(SRC), case.indices(DST)
    for pages in ((SRC, DST), (np.array(SRC, np.int32), np.array(DST)), placed):
        device.synchronize()
        fill_late(case, src, stream)
        case.issue(src, dst, *pages, method=method, stream=stream)
        stream.synchronize()
        case.finish(case.expect(src, dst, *pages))


@every_method
def test_converting_behind_a_slow_producer(device, method):
    case = TransferCase(device, 2)
    src, dst = case.pool(fmt="bf16"), case.pool("page_first", "fp8_e4m3", scales=True)
    stream = device.stream()
    options = {"method": "auto" if method == "copy" else method, "convert": True}
    device.synchronize()
    fill_late(case, src, stream)
    case.issue(src, dst, SRC, DST, stream=stream, **options)
    stream.synchronize()
    case.finish(case.expect(src, dst, SRC, DST))


@some_layouts
def test_pages_that_come_late(device, layouts):
    """A kernel reads page arrays when it runs, not when it is launched."""
    case = TransferCase(device, 23)
    src, dst = chain(case, layouts)
    pages = case.indices([0, 0, 0, 0]), case.indices([7, 7, 7, 7], "int32")
    stream = device.stream()
    device.synchronize()
    delay(stream)
    for arg, values in zip(pages, (SRC, DST), strict=True):
        arg.view[...] = values
        device.copy(arg.array, device.asarray(arg.view.copy()), stream=stream)
    case.issue(src, dst, *pages, method="kernel", stream=stream)
    stream.synchronize()
    case.finish(case.expect(src, dst, *pages))


@pytest.mark.races
@every_method
@some_layouts
def test_without_the_stream_it_comes_too_early(device, method, layouts):
    """The control: a transfer on another stream does not wait for a blocked one."""
    case = TransferCase(device, 3)
    src, dst = chain(case, layouts)
    stream, other = device.stream(), device.stream()
    case.transfer(src, dst, SRC, DST, method=method)  # loads the kernels
    device.synchronize()
    gate = Gate(stream)
    src.refill(case.bits, stream)
    case.issue(src, dst, SRC, DST, method=method, stream=other)
    other.synchronize()
    gate.open()
    stream.synchronize()
    case.expect(src, dst, SRC, DST)
    with pytest.raises(pytest.fail.Exception, match="elements differ"):
        case.finish()


@pytest.mark.races
@every_method
def test_the_call_does_not_wait(device, method):
    """It returns while the stream is blocked, with nothing written or recorded yet."""
    stream = device.stream()
    warm = TransferCase(device, 4)  # a first load may wait for the device, and that for the gate
    pools, lists = chain(warm), ([*SRC, 9], [*DST, 1])
    warm.issue(*pools, *lists, method=method, stream=stream)
    stream.synchronize()
    warm.finish(warm.expect(*pools, *lists))
    case = TransferCase(device, 4)
    src, dst = chain(case)
    before = content(dst)
    device.synchronize()
    gate = Gate(stream)
    case.issue(src, dst, [*SRC, 9], [*DST, 1], method=method, stream=stream)
    during = content(dst)
    gate.open()
    stream.synchronize()
    assert during == before
    case.finish(case.expect(src, dst, [*SRC, 9], [*DST, 1]))


@every_method
@some_layouts
def test_one_after_another_on_a_stream(device, method, layouts):
    """Through four pools and back into pages that have been read."""
    case = TransferCase(device, 5)
    pools = chain(case, layouts, length=4)
    stream = device.stream()
    device.synchronize()
    fill_late(case, pools[0], stream)
    steps = [*itertools.pairwise(pools), (pools[3], pools[0])]
    for src, dst in steps:
        case.issue(src, dst, SRC, [2, 1, 0, 6], method=method, stream=stream)
    stream.synchronize()
    for src, dst in steps:
        case.expect(src, dst, SRC, [2, 1, 0, 6])
    case.finish()


@every_method
def test_a_consumer_on_the_same_stream(device, method):
    """A store after a transfer overwrites its target; one before it is part of its source."""
    case = TransferCase(device, 6)
    src, dst = chain(case, fmt="fp32")
    stream = device.stream()
    rows = case.rng.standard_normal((4, 2, 14)).astype(np.float32)
    key, value = device.asarray(rows[..., :8].copy()), device.asarray(rows[..., 8:].copy())
    slots = np.array([25, 24, 27, 26])  # of page 6, which goes to page 0, and of no other
    device.synchronize()
    delay(stream)

    def store(pool):
        kv.store_kv(
            key, value, pool.pool.k(1), pool.pool.v(1), device.asarray(slots), stream=stream
        )
        for memory, part in zip(pool.parts, (rows[..., :8], rows[..., 8:]), strict=True):
            memory.view[1, 6, slots % 4] = part

    store(src)
    case.issue(src, dst, SRC, DST, method=method, stream=stream)
    case.expect(src, dst, SRC, DST)
    store(dst)
    stream.synchronize()
    case.finish()


@every_method
def test_streams_side_by_side(device, method):
    """Several streams at once, with different pools, do not disturb one another."""
    case = TransferCase(device, 7)
    geometry = {"pages": 70, "page_size": 16, "layers": 4, "widths": (64, 64)}
    streams = [device.stream() for _ in range(4)]
    pairs = [chain(case, MIXED_LAYOUTS[i % 3], **geometry) for i in range(4)]
    device.synchronize()
    turns = [(case.rng.permutation(70), case.rng.permutation(70)[:35]) for _ in range(4)]
    for src_pages, dst_pages in turns:
        for stream, (src, dst) in zip(streams, pairs, strict=True):
            there = src_pages[:35].tolist(), dst_pages.tolist()
            case.issue(src, dst, *there, method=method, stream=stream)
            case.issue(dst, src, *there[::-1], method=method, stream=stream)
    device.synchronize()
    for src_pages, dst_pages in turns:
        for src, dst in pairs:
            case.expect(src, dst, src_pages[:35], dst_pages)
            case.expect(dst, src, dst_pages, src_pages[:35])
    case.finish()


@every_method
def test_threads_side_by_side(device, method):
    """As above, from threads that each wait for their calls."""
    cases = [TransferCase(device, (8, i)) for i in range(4)]
    geometry = {"pages": 40, "page_size": 16, "widths": (64, 48)}
    pairs = [chain(case, MIXED_LAYOUTS[i % 3], **geometry) for i, case in enumerate(cases)]
    lists = [[c.rng.permutation(40).tolist() for c in cases] for _ in range(2)]
    errors = []

    def work(i):
        try:
            for _ in range(5):
                cases[i].issue(*pairs[i], lists[0][i], lists[1][i], method=method)
                if device.kind != "host":
                    device.synchronize()
                for memory in pairs[i][1].memories:
                    memory.upload()  # a transfer that still runs would be seen at the end
                cases[i].issue(*pairs[i], lists[0][i], lists[1][i], method=method)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for i, case in enumerate(cases):
        case.expect(*pairs[i], lists[0][i], lists[1][i])
        case.finish()


@every_method
def test_lists_may_change_after_the_call(device, method):
    """Lists are read during the call."""
    case = TransferCase(device, 9)
    src, dst = chain(case)
    stream = device.stream()
    case.transfer(src, dst, SRC, DST, method=method, layers=[2, 0])  # loads the kernels
    src.refill(case.bits)
    device.synchronize()
    gate = Gate(stream)
    lists = list(SRC), list(DST)
    layers = [2, 0]
    case.issue(src, dst, *lists, method=method, layers=layers, stream=stream)
    for changed in (*lists, layers):
        changed[:] = [7] * 9
    gate.open()
    stream.synchronize()
    case.finish(case.expect(src, dst, SRC, DST, [2, 0]))


@every_method
def test_faults_of_a_stream(device, method):
    """Faults of all its transfers are counted; they do not stop later transfers."""
    case = TransferCase(device, 10)
    src, dst = chain(case)
    stream = device.stream()
    device.synchronize()
    for pages in (([1, 9], [2, 3]), ([2, 4], [77, 4]), ([3], [1])):
        case.issue(src, dst, *pages, method=method, stream=stream)
    stream.synchronize()
    for pages in (([1, 9], [2, 3]), ([2, 4], [77, 4]), ([3], [1])):
        case.expect(src, dst, *pages)
    case.finish(([(1, 9)], [(0, 77)]))


# What is announced ----------------------------------------------------------------------------


@every_method
@some_layouts
def test_it_is_announced(device, method, layouts):
    """By its name, on its stream, with what it reads and writes; and the source is only read."""
    case = TransferCase(device, 20)
    src, dst = chain(case, layouts, fmt="int8", scales=True)
    stream = device.stream()
    device.synchronize()
    with observe.attached(Log()) as log:
        case.issue(src, dst, SRC, DST, method=method, stream=stream)
    stream.synchronize()
    case.finish(case.expect(src, dst, SRC, DST))
    operations = [op for op in log.operations if op.stream is stream]
    assert any("transfer_pages" in op.name for op in operations)
    for pool, side in ((src, "reads"), (dst, "writes")):
        touched = [access.view for op in operations for access in getattr(op, side)]
        for memory in pool.memories:
            assert any(overlap(view, memory.raw) for view in touched), f"{side} of {memory.name}"
    for op in operations:
        for access in op.writes:
            assert not any(overlap(access.view, memory.raw) for memory in src.memories)


@every_method
def test_a_refusal_by_an_observer_changes_nothing(device, method):
    """If `before` raises, nothing is issued, and the next call works."""
    case = TransferCase(device, 21)
    src, dst = chain(case)
    stream = device.stream()
    device.synchronize()
    with observe.attached(Log(refuse="transfer_pages")), pytest.raises(kv.KvcupyError):
        case.issue(src, dst, SRC, DST, method=method, stream=stream)
    stream.synchronize()
    case.finish()
    case.transfer(src, dst, SRC, DST, method=method, stream=stream)


@every_method
def test_a_failure_before_it_skips_it(device, method):
    """Work queued behind a failed function does not run; later work does."""
    if device.kind != "host":
        pytest.skip("a failed host function does not stop a GPU's stream")
    case = TransferCase(device, 22)
    src, dst = chain(case)
    stream = device.stream()
    stream.call(lambda: 1 / 0)
    case.issue(src, dst, SRC, DST, method=method, stream=stream)
    with pytest.raises(kv.DeviceError):
        stream.synchronize()
    case.finish()
    case.transfer(src, dst, SRC, DST, method=method, stream=stream)
