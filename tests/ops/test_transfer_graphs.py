"""`transfer_pages` in graphs, and how long it keeps its arguments alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from stream_cases import Gate
from transfer_cases import METHODS, MIXED_LAYOUTS, TransferCase, chain

import kvcupy as kv

SRC, DST = [1, 2, 6, 0], [4, 5, 0, 8]

every_method = pytest.mark.parametrize("method", METHODS)
some_layouts = pytest.mark.parametrize("layouts", MIXED_LAYOUTS, ids="-".join)


@some_layouts
@pytest.mark.parametrize("convert", [False, True])
def test_a_captured_kernel_reads_its_arrays_at_replay(device, layouts, convert):
    """Both the pools and page lists on the device."""
    case = TransferCase(device, 11)
    formats = ("bf16", "int8") if convert else ("bf16", "bf16")
    src, dst = (
        case.pool(layout, fmt, scales=fmt == "int8")
        for layout, fmt in zip(layouts, formats, strict=True)
    )
    pages = case.indices(SRC), case.indices(DST, "int32")
    stream = device.stream()
    options = {"method": "kernel", "convert": convert}
    case.transfer(src, dst, *pages, stream=stream, **options)
    with stream.capture() as graph:
        case.issue(src, dst, *pages, stream=stream, **options)
    for other in ((SRC, DST), (DST[::-1], SRC), ([0, 9, -1, 3], [7, 1, 2, 6])):
        src.refill(case.bits)
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
    """A replay reads the pools again, for the pages of the call; it repeats the faults."""
    case = TransferCase(device, 12)
    src, dst = chain(case, layouts)
    stream = device.stream()
    pages = [1, 2, 9, 6, -1], [4, 5, 1, 0, 3]
    case.transfer(src, dst, *pages, method=method, stream=stream)
    with stream.capture() as graph:
        case.issue(src, dst, *pages, method=method, stream=stream)
    for launched_on in (stream, device.stream(), stream):
        src.refill(case.bits)
        dst.refill(case.bits)
        device.synchronize()
        case.finish()
        graph.launch(launched_on)
        launched_on.synchronize()
        case.finish(case.expect(src, dst, *pages))


@every_method
def test_a_first_call_may_be_captured(device, method):
    """With shapes that are new."""
    case = TransferCase(device, 13)
    src, dst = chain(case, heads=7, widths=(22, 26), layers=2)
    stream = device.stream()
    device.synchronize()
    with stream.capture() as graph:
        case.issue(src, dst, SRC, DST, method=method, stream=stream)
    case.finish()
    graph.launch(stream)
    stream.synchronize()
    case.finish(case.expect(src, dst, SRC, DST))


@every_method
def test_captured_one_after_another(device, method):
    """In one graph, in order, with a fork in between."""
    case = TransferCase(device, 14)
    pools = chain(case, length=4)
    stream, other = device.stream(), device.stream()
    device.synchronize()
    with stream.capture() as graph:
        case.issue(pools[0], pools[1], SRC, DST, method=method, stream=stream)
        kv.fork(stream, other)
        case.issue(pools[1], pools[2], DST, SRC, method=method, stream=other)
        case.issue(pools[1], pools[3], DST, [0, 1, 2, 3], method=method, stream=stream)
        kv.join(stream, other)
        case.issue(pools[2], pools[0], SRC, DST, method=method, stream=stream)
    for _ in range(2):
        graph.launch(stream)
        case.expect(pools[0], pools[1], SRC, DST)
        case.expect(pools[1], pools[2], DST, SRC)
        case.expect(pools[1], pools[3], DST, [0, 1, 2, 3])
        case.expect(pools[2], pools[0], SRC, DST)
    stream.synchronize()
    case.finish()


@pytest.mark.parametrize("method", ["staged", "auto"])
def test_a_graph_and_calls_side_by_side(device, method):
    """A graph and calls on other streams have separate staging buffers."""
    case = TransferCase(device, 15)
    geometry = {"pages": 70, "page_size": 16, "layers": 4, "widths": (64, 64)}
    captured, called = chain(case, **geometry), chain(case, MIXED_LAYOUTS[2], **geometry)
    stream, other = device.stream(), device.stream()
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


@every_method
def test_a_refused_call_leaves_a_capture_as_it_was(device, method):
    case = TransferCase(device, 16)
    src, dst = chain(case)
    stream = device.stream()
    device.synchronize()
    with stream.capture() as graph:
        with pytest.raises(ValueError, match="layers"):
            case.issue(src, dst, SRC, DST, method=method, layers=[5], stream=stream)
        case.issue(src, dst, SRC, DST, method=method, stream=stream)
    graph.launch(stream)
    stream.synchronize()
    case.finish(case.expect(src, dst, SRC, DST))


# Lifetime -------------------------------------------------------------------------------------


@every_method
def test_pools_live_until_they_are_read(device, method):
    """The caller drops everything while the stream is blocked."""
    case = TransferCase(device, 17)
    stream = device.stream()
    pages = case.rng.permutation(64).tolist(), case.rng.permutation(64).tolist()

    def transfer(src, dst):
        lists = (case.list_for(method, device.asarray(np.array(p)), np.array(p)) for p in pages)
        kv.transfer_pages(src.pool, dst.pool, *lists, method=method, stream=stream)
        case.expect(src, dst, *pages)

    geometry = {"pages": 64, "page_size": 16, "widths": (64, 64)}
    transfer(*chain(case, **geometry))  # a first load may wait for the device, and that for a gate
    src, dst = chain(case, **geometry)
    device.synchronize()
    gate = Gate(stream)
    transfer(src, dst)
    case.pools.remove(src)
    num_bytes = src.parts[0].want.nbytes
    del src
    gc.collect()
    others = [device.asarray(np.full(num_bytes, 0xA5, np.uint8)) for _ in range(4)]
    lists = [device.asarray(np.full(64, -1)) for _ in range(8)]
    gate.open()
    stream.synchronize()
    case.finish()
    del others, lists


@every_method
def test_a_graph_keeps_its_pools(device, method):
    case = TransferCase(device, 18)
    src, dst = chain(case, pages=64, page_size=16, widths=(64, 64))
    stream = device.stream()
    device.synchronize()
    with stream.capture() as graph:
        case.issue(src, dst, list(range(64)), list(range(64)), method=method, stream=stream)
    case.expect(src, dst, list(range(64)), list(range(64)))
    case.pools.remove(src)
    num_bytes = src.parts[0].want.nbytes
    del src
    gc.collect()
    others = [device.asarray(np.full(num_bytes, 0xA5, np.uint8)) for _ in range(4)]
    device.synchronize()
    graph.launch(stream)
    stream.synchronize()
    case.finish()
    del others


@every_method
@pytest.mark.parametrize("own_stream", [False, True], ids=["current", "own"])
def test_no_pool_is_kept_after_its_transfer(device, method, own_stream):
    """Neither by its plan nor by the stream that it ran on."""
    stream = device.stream() if own_stream else None
    for _ in range(2):
        case = TransferCase(device, 19)
        src, dst = chain(case)
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
