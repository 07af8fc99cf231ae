"""`transfer_pages` on streams, on threads and in graphs, what it announces and keeps alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from stream_cases import Gate, Log
from transfer_cases import KINDS, METHODS, TransferCase, pools

import kvcupy as kv
from kvcupy import observe
from kvcupy.arrays import overlap

SRC, DST = [1, 2, 6, 0], [4, 5, 0, 8]
LAYOUTS = [
    ("layer_first", "page_first"), ("layer_first", "layer_first"), ("page_head", "page_first")
]  # fmt: skip
LARGE = {"pages": (70, 70), "page_size": 16, "layers": 4, "widths": (64, 64)}
every_method = pytest.mark.parametrize("method", METHODS)
some_layouts = pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
ways = pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, method) for kind in ("bf16", "bf16 to int8", "int4 to bf16") for method in METHODS
     if method != "copy" or kind == "bf16"],
)  # fmt: skip


def warm(case, *args, **options):
    """Load the kernels of a call: a first load may wait for the device, and that for a gate."""
    case.transfer(*args, **options)
    case.device.synchronize()


# Order ----------------------------------------------------------------------------------------


@ways
@some_layouts
def test_after_a_slow_producer(device, kind, method, layouts):
    """A transfer moves what the same stream wrote before it, for page lists of any kind."""
    case, stream = TransferCase(device, 1), device.stream()
    src, dst = pools(case, KINDS[kind], layouts)
    draw = case.bits if kind == "bf16" else case.numbers
    placed = case.indices(SRC), case.indices(DST)
    warm(case, src, dst, SRC, DST, method=method)
    for pages in ((SRC, DST), (np.array(SRC, np.int32), np.array(DST)), placed):
        gate = Gate(stream)
        src.refill(draw, stream)
        case.issue(src, dst, *pages, method=method, stream=stream)
        gate.open()
        stream.synchronize()
        case.finish(case.expect(src, dst, *pages))


@pytest.mark.races
@every_method
@some_layouts
def test_without_the_stream_it_comes_too_early(device, method, layouts):
    """The control: a transfer on another stream does not wait for a blocked one."""
    case, stream, other = TransferCase(device, 3), device.stream(), device.stream()
    src, dst = pools(case, layouts=layouts)
    warm(case, src, dst, SRC, DST, method=method)
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
    """It returns while the stream is blocked; lists may change then, nothing is written yet."""
    case, stream = TransferCase(device, 4), device.stream()
    src, dst = pools(case)
    warm(case, src, dst, [*SRC, 9], [*DST, 1], method=method, layers=[2, 0])
    src.refill(case.bits)
    device.synchronize()
    gate = Gate(stream)
    lists, layers = ([*SRC, 9], [*DST, 1]), [2, 0]
    before = [memory.download().tobytes() for memory in dst.memories]
    case.issue(src, dst, *lists, method=method, layers=layers, stream=stream)
    for changed in (*lists, layers):
        changed[:] = [7] * 9
    during = [memory.download().tobytes() for memory in dst.memories]
    gate.open()
    stream.synchronize()
    assert during == before
    case.finish(case.expect(src, dst, [*SRC, 9], [*DST, 1], [2, 0]))


# What is announced ----------------------------------------------------------------------------


@every_method
@some_layouts
def test_it_is_announced(device, method, layouts):
    """By its name, on its stream, with what it reads and writes; what an observer refuses does not
    run."""
    case, stream = TransferCase(device, 20), device.stream()
    src, dst = pools(case, "int8", layouts)
    device.synchronize()
    with observe.attached(Log(refuse="transfer_pages")), pytest.raises(kv.KvcupyError):
        case.issue(src, dst, SRC, DST, method=method, stream=stream)
    stream.synchronize()
    case.finish()
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


# Graphs ---------------------------------------------------------------------------------------


@some_layouts
@pytest.mark.parametrize("kind", ["bf16", "bf16 to int8", "int4 to bf16"])
def test_a_captured_kernel_reads_its_arrays_at_replay(device, layouts, kind):
    """Both the pools and page lists on the device."""
    case, stream = TransferCase(device, 11), device.stream()
    src, dst = pools(case, KINDS[kind], layouts)
    pages = case.indices(SRC), case.indices(DST, "int32")
    case.transfer(src, dst, *pages, stream=stream, method="kernel")
    with stream.capture() as graph:
        case.issue(src, dst, *pages, stream=stream, method="kernel")
    for other in ((SRC, DST), (DST[::-1], SRC), ([0, 9, -1, 3], [7, 1, 2, 6])):
        src.refill(case.bits if kind == "bf16" else case.numbers)
        for arg, values in zip(pages, other, strict=True):
            arg.view[...] = values
            arg.buffer.restore()
        device.synchronize()
        case.finish()  # nothing has run yet
        graph.launch(stream)
        stream.synchronize()
        case.finish(case.expect(src, dst, *pages))


@every_method
@some_layouts
def test_a_captured_transfer_of_lists(device, method, layouts):
    """A replay reads the pools again, for the pages of the call, and repeats the faults; the shapes
    may be new, and a refused call leaves nothing in the graph."""
    case, stream = TransferCase(device, 12), device.stream()
    src, dst = pools(case, layouts=layouts, heads=7, widths=(22, 26), layers=2)
    pages = [1, 2, 9, 6, -1], [4, 5, 1, 0, 3]
    device.synchronize()
    with stream.capture() as graph:
        with pytest.raises(ValueError, match="layers"):
            case.issue(src, dst, SRC, DST, method=method, layers=[5], stream=stream)
        case.issue(src, dst, *pages, method=method, stream=stream)
    for launched_on in (stream, device.stream(), stream):
        src.refill(case.bits)
        dst.refill(case.bits)
        device.synchronize()
        case.finish()
        graph.launch(launched_on)
        launched_on.synchronize()
        case.finish(case.expect(src, dst, *pages))


@pytest.mark.parametrize("method", ["staged", "auto"])
def test_a_graph_and_calls_side_by_side(device, method):
    """A graph and calls on other streams have separate staging buffers."""
    case, stream, other = TransferCase(device, 15), device.stream(), device.stream()
    captured, called = pools(case, **LARGE), pools(case, layouts=LAYOUTS[2], **LARGE)
    order = case.rng.permutation(70).tolist()
    device.synchronize()
    with stream.capture() as graph:
        case.issue(*captured, order, order[::-1], method=method, stream=stream)
    for _ in range(6):
        graph.launch(stream)
        case.issue(*called, order[:30], order[30:60], method=method, stream=other)
    device.synchronize()
    case.expect(*captured, order, order[::-1])
    case.expect(*called, order[:30], order[30:60])
    case.finish()


# Lifetime -------------------------------------------------------------------------------------


def drop(case, pool):
    """Leave a pool to the garbage collector, and ask for its memory again."""
    case.pools.remove(pool)
    num_bytes = pool.parts[0].want.nbytes
    pool.pool = pool.parts = pool.scales = None
    gc.collect()
    return [case.device.asarray(np.full(num_bytes, 0xA5, np.uint8)) for _ in range(4)]


@every_method
@pytest.mark.parametrize("captured", [False, True], ids=["call", "graph"])
def test_pools_live_until_they_are_read(device, method, captured):
    """The caller drops everything while the stream is blocked, or before the graph is launched."""
    case, stream = TransferCase(device, 17), device.stream()
    pages = case.rng.permutation(64).tolist(), case.rng.permutation(64).tolist()
    geometry = {"pages": (64, 64), "page_size": 16, "widths": (64, 64)}

    def issue(src, dst):
        lists = pages
        if not captured:  # arrays that the call alone refers to
            arrays = map(np.array, pages)
            lists = [case.list_for(method, device.asarray(p), p) for p in arrays]
        kv.transfer_pages(src.pool, dst.pool, *lists, method=method, stream=stream)

    warm(case, *pools(case, **geometry), *pages, method=method)
    src, dst = pools(case, **geometry)
    device.synchronize()
    if captured:
        with stream.capture() as graph:
            issue(src, dst)
    else:
        gate = Gate(stream)
        issue(src, dst)
    case.expect(src, dst, *pages)
    others = drop(case, src)
    others += [device.asarray(np.full(64, -1)) for _ in range(8)]
    if captured:
        device.synchronize()
        graph.launch(stream)
    else:
        gate.open()
    stream.synchronize()
    case.finish()
    del others


@every_method
@pytest.mark.parametrize("has_stream", [False, True], ids=["current", "own"])
def test_no_pool_is_kept_after_its_transfer(device, method, has_stream):
    """Neither by its plan nor by the stream that it ran on."""
    stream = device.stream() if has_stream else None
    for _ in range(2):
        case = TransferCase(device, 19)
        src, dst = pools(case)
        device.synchronize()
        case.issue(src, dst, SRC, DST, method=method, stream=stream)
        device.synchronize()
        if stream is not None:
            kv.keep_alive((), stream)  # a device may release what has passed when called again
            device.synchronize()
        kept = [weakref.ref(a.pool) for a in (src, dst)]
        owners = [weakref.ref(v.owner) for a in (src, dst) for v in a.pool.parts]
        del case, src, dst
        gc.collect()
        assert [ref() is None for ref in (*kept, *owners)] == [True] * 6
