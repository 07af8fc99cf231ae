"""What kv.TransferEngine puts on the streams of a GPU, seen by a stand-in for CuPy."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
from devices.fake_cuda import FakeApi
from engine_cases import NUM_LAYERS, pool_of

import kvcupy as kv
from kvcupy import cuda_api
from kvcupy.devices import cuda


@pytest.fixture
def api(monkeypatch):
    api = FakeApi()
    api.install(monkeypatch)
    monkeypatch.setattr(cuda.CudaDevice, "fault_pointer", 1)  # the real one takes a kernel
    return api


@pytest.fixture
def gpu(api):
    return cuda.CudaDevice(0, api)


def engine_of(gpu, **options):
    pools = pool_of(gpu, 8), pool_of(gpu, 12, layout="page_first_direct", placement="pinned")
    return kv.TransferEngine(*pools, method="copy", **options)


def work_on(api, stream):
    """What was put on a stream, by kind; neighbours alike as one, for copies record events too."""
    kinds = (kind for kind, *rest in api.runtime.log if stream.pointer in rest[:2])
    return [kind for kind, _ in itertools.groupby(kinds)]


def waits_of(api, stream):
    return [entry[:2] for entry in api.runtime.log].count(("wait", stream.pointer))


def test_a_load_and_a_save(api, gpu):
    engine, compute = engine_of(gpu), gpu.stream()
    save = engine.save([1], [2], after=compute)
    load = engine.load([5], [6], after=compute)
    load.wait_layer(1, compute)
    save.wait(compute)
    layer = ["copy", "record"]
    assert work_on(api, engine.load_stream) == ["wait", "record", *layer * NUM_LAYERS]
    assert work_on(api, engine.save_stream) == ["wait", "record", "copy", "record"]
    assert work_on(api, compute) == ["record", "wait"]
    assert waits_of(api, compute) == 2


def test_one_event_keeps_what_a_batch_uses(api, gpu):
    """It is behind all layers, and pools live until it has passed."""
    engine = engine_of(gpu)
    stream, pool = engine.load_stream, weakref.ref(engine.device_pool)
    engine.load([5], [6])
    engine._flush()
    records = [e for e in api.runtime.log if e[0] == "record" and e[2] == stream.pointer]
    assert len(records) == NUM_LAYERS + 3, "start, layers, pools and lists, end"
    del engine
    gc.collect()
    assert pool() is not None
    stream.synchronize()
    gc.collect()
    assert pool() is None


def test_loads_one_after_another_share_events(api, gpu, monkeypatch):
    """Also where nobody allocates from the pools, whose allocators then keep the last batches."""
    engine, made = engine_of(gpu), []
    create = api.runtime.eventCreateWithFlags
    monkeypatch.setattr(
        api.runtime, "eventCreateWithFlags", lambda flags: made.append(flags) or create(flags)
    )
    loads = []
    for _ in range(5):
        loads.append(engine.load([5], [6]))
        loads[-1].synchronize()
        for load in loads:
            load.wait_layer(0, gpu.stream())
    assert made.count(cuda_api.DISABLE_TIMING) < 2 * NUM_LAYERS, "of 5 loads"


def test_only_what_touches_the_same_pages_waits_for_work_in_flight(api, gpu):
    engine = engine_of(gpu)
    load = engine.load([5], [6])
    assert not load.done()
    for pages, waits in (([1], [1]), 1), (([6], [1]), 2), (([1], [5]), 2):
        api.runtime.log.clear()
        engine.save(*pages)
        engine._flush()
        assert waits_of(api, engine.save_stream) == waits, pages
    gpu.synchronize()
    assert load.done()
    api.runtime.log.clear()
    engine.save([6], [5]).done()
    assert waits_of(api, engine.save_stream) == 1


def test_pages_in_flight_are_held_back(api, gpu):
    engine = engine_of(gpu)
    allocator = engine.device_pool.allocator
    engine.load([5, 6], allocator.alloc(2))
    allocator.free([0, 1])
    assert allocator.num_free == 6
    gpu.synchronize()
    assert allocator.num_free == 8


def test_what_fails_on_a_stream_later_is_none_of_a_finished_transfer(api, gpu):
    def boom():
        raise OSError("no such luck")

    stream = gpu.stream()
    engine = engine_of(gpu, save_stream=stream)
    transfer = engine.save([1], [1])
    transfer.synchronize()
    stream.call(boom)
    assert transfer.done()
    with pytest.raises(kv.DeviceError, match="no such luck"):
        stream.synchronize()


def test_a_copy_that_fails(api, gpu):
    """Both directions end, and nothing is left to wait for once the GPU works again."""
    engine = engine_of(gpu)
    transfers = [engine.save([1], [1]), engine.load([2], [2])]
    api.runtime.fault = 700
    with pytest.raises(kv.DeviceError, match="load 2: 1 page, layer 0: "):
        engine._flush()
    api.runtime.fault = 0
    for transfer in transfers:
        with pytest.raises(kv.DeviceError, match=f"{transfer.kind} {transfer.number}: 1 page"):
            transfer.synchronize()
    engine.save([1], [1]).synchronize()
