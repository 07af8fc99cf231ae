"""kv.TransferEngine: what it moves, when batches go out, and what handles return."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from engine_cases import (
    NUM_LAYERS,
    PATIENCE_S,
    World,
    contents,
    layer_bits,
    pool_of,
    transfers_in,
)
from stream_cases import Gate, Log

import kvcupy as kv
from kvcupy import observe

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.fixture
def world(device):
    return World(device)


def assert_moved(pool, before, moved, source):
    """Exactly the target pages have changed, to what the source pages were."""
    expected = before.copy()
    for src, dst in moved:
        expected[dst] = source[src]
    wrong = np.flatnonzero((contents(pool) != expected).any(axis=1))
    assert len(wrong) == 0, f"pages {wrong} differ from what was moved: {moved}"


# Content -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_layout", LAYOUTS)
@pytest.mark.parametrize("device_layout", LAYOUTS)
def test_round_trip(device, device_layout, host_layout):
    world = World(
        device,
        pool_of(device, 8, layout=device_layout),
        pool_of(device, 12, layout=host_layout, placement="pinned"),
    )
    on_device, on_host = world.before
    world.engine.save([1, 7, 4], [11, 0, 5], after=world.compute).synchronize()
    assert_moved(world.host_pool, on_host, [(1, 11), (7, 0), (4, 5)], on_device)
    assert np.array_equal(contents(world.device_pool), on_device), "the source has changed"
    world.engine.load([5, 11], [0, 2], after=world.compute).synchronize()
    assert_moved(world.device_pool, on_device, [(4, 0), (1, 2)], on_device)


@pytest.mark.parametrize("placement", ["pinned", "pageable"])
@pytest.mark.parametrize("method", ["auto", "copy", "staged", "kernel"])
def test_methods_and_placements(device, method, placement):
    if method == "kernel" and placement == "pageable" and device.kind == "cuda":
        pytest.skip("kernels do not reach pageable memory")
    host_pool = pool_of(device, 5, layout="page_head", placement=placement)
    world = World(device, host_pool=host_pool, method=method)
    on_device, on_host = world.before
    world.engine.save([3, 2], [1, 4]).synchronize()
    assert_moved(host_pool, on_host, [(3, 1), (2, 4)], on_device)
    world.engine.load([1], [6]).synchronize()
    assert_moved(world.device_pool, on_device, [(3, 6)], on_device)


def test_latent_pools(device):
    pools = [
        kv.MLAPool(6, 2, 3, 8, dtype="fp16", layout=layout, device=device)
        for layout in ("layer_first", "page_first_direct")
    ]
    device.copy(pools[0].k(2)[1], device.asarray(np.full((2, 8), 7, np.float16)))
    device.synchronize()
    transfer = kv.TransferEngine(*pools).save([1], [4])
    transfer.synchronize()
    assert device.to_numpy(pools[1].k(2))[4].tolist() == [[7] * 8] * 2
    assert transfer.num_bytes == 3 * 2 * 8 * 2


def test_conversion_in_transit(device):
    host_pool = pool_of(device, 4, dtype="fp8_e4m3", placement="pinned", scales=True)
    device_pool = pool_of(device, 4)
    engine = kv.TransferEngine(device_pool, host_pool, convert=True)
    ones = device.asarray(np.full(device_pool.k(0).shape[1:], 3.5, np.float16))
    device.copy(device_pool.k(1)[2], ones)
    device.synchronize()
    saved = engine.save([2], [0])
    back = engine.load([0], [3])
    back.synchronize()
    assert np.allclose(device.to_numpy(device_pool.k(1))[3].astype(np.float32), 3.5, rtol=0.04)
    assert saved.num_bytes == device_pool.page_bytes
    assert back.num_bytes < device_pool.page_bytes


@pytest.mark.parametrize("make", [list, tuple, np.int32, np.int64, "strided", "reversed"])
def test_kinds_of_page_lists(world, make):
    device_pages, host_pages = [5, 0, 3], [2, 9, 7]
    if make in ("strided", "reversed"):
        step = 2 if make == "strided" else -1
        lists = []
        for pages in (device_pages, host_pages):
            backing = np.full(6, 2147480000, np.int64)
            backing[::step][:3] = pages
            lists.append(backing[::step][:3])
    elif make in (np.int32, np.int64):
        lists = [np.array(pages, make) for pages in (device_pages, host_pages)]
    else:
        lists = [make(pages) for pages in (device_pages, host_pages)]
    world.engine.save(*lists).synchronize()
    assert_moved(world.host_pool, world.before[1], [(5, 2), (0, 9), (3, 7)], world.before[0])


def test_page_lists_are_copied_by_the_call(world):
    device_pages, host_pages = np.array([5, 0]), np.array([2, 9])
    transfer = world.engine.save(device_pages, host_pages)
    device_pages[:], host_pages[:] = 1, 1
    transfer.synchronize()
    assert_moved(world.host_pool, world.before[1], [(5, 2), (0, 9)], world.before[0])


def test_negative_pages_are_skipped(world):
    saved = world.engine.save([1, -1, 2, 99, -5], [3, 4, -1, -7, 99])
    assert saved.num_pages == 1
    assert saved.num_bytes == world.device_pool.page_bytes
    saved.synchronize()
    assert_moved(world.host_pool, world.before[1], [(1, 3)], world.before[0])


def test_a_source_page_may_go_to_several_targets(world):
    world.engine.load([4, 4, 4], [1, 2, 7]).synchronize()
    moved = [(4, 1), (4, 2), (4, 7)]
    assert_moved(world.device_pool, world.before[0], moved, world.before[1])


def test_a_target_page_twice_is_made_of_the_two(world):
    world.engine.load([4, 6], [1, 1]).synchronize()
    got = contents(world.device_pool)
    # Which of them is undefined, and may be another in each byte: blocks and copies have no order.
    assert np.logical_or(*(got[1] == world.before[1][page] for page in (4, 6))).all()
    got[1] = world.before[0][1]
    assert np.array_equal(got, world.before[0])


# Nothing to move ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lists", [([], []), (np.empty(0, np.int32), []), ([-1, 3], [2, -1])])
def test_an_empty_transfer_is_done(world, lists):
    gates = [Gate(stream) for stream in world.streams.values()]
    pending = world.engine.load([1], [1])
    with observe.attached(Log()) as log:
        for call in (world.engine.save, world.engine.load):
            transfer = call(*lists, after=world.compute)
            assert transfer.done()
            transfer.synchronize()
            transfer.wait(world.compute)
            transfer.wait_layer(NUM_LAYERS - 1, world.compute)
            told = transfer.num_bytes, transfer.elapsed_us, transfer.gb_per_s, transfer.num_pages
            assert told == (0, 0.0, 0.0, 0)
            with pytest.raises(ValueError, match="layer"):
                transfer.wait_layer(NUM_LAYERS, world.compute)
    assert log.take() == []
    assert "queued" in repr(pending)
    for gate in gates:
        gate.open()
    pending.synchronize()


# Merging -----------------------------------------------------------------------------------------


FLUSHES = {
    "wait": lambda t, world: t.wait(world.compute),
    "wait_layer": lambda t, world: t.wait_layer(1, world.compute),
    "done": lambda t, world: t.done(),
    "synchronize": lambda t, world: t.synchronize(),
    "elapsed_us": lambda t, world: t.elapsed_us,
    "gb_per_s": lambda t, world: t.gb_per_s,
    "flush": lambda t, world: world.engine._flush(),
}
LOAD = [f"load {layer}" for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("asked", [0, 1, 2, 3])
@pytest.mark.parametrize("flush", FLUSHES)
def test_queued_calls_go_out_as_one_per_direction(world, flush, asked):
    engine, (on_device, on_host) = world.engine, world.before
    with observe.attached(Log()) as log:
        transfers = [
            engine.load([1, 2], [1, 2]), engine.save([5], [9]),
            engine.load([3], [4]), engine.save([6, 7], [10, 11]),
        ]  # fmt: skip
        assert [t.num_bytes for t in transfers] == [
            n * world.device_pool.page_bytes for n in (2, 1, 1, 2)
        ]
        assert all("queued" in repr(t) for t in transfers)
        assert log.operations == []
        FLUSHES[flush](transfers[asked], world)
        issued = transfers_in(log, world.device)
        assert sorted(o.name for o in issued) == sorted([*LOAD, "save"])
        for transfer in transfers:
            transfer.synchronize()
        engine._flush()
        assert len(transfers_in(log, world.device)) == NUM_LAYERS + 1
    assert_moved(world.device_pool, on_device, [(1, 1), (2, 2), (3, 4)], on_host)
    assert_moved(world.host_pool, on_host, [(5, 9), (6, 10), (7, 11)], on_device)


def test_many_calls_go_out_as_one(device):
    """Allocators that poll the transfers announced to them do not send those out."""
    world = World(device, pool_of(device, 300), pool_of(device, 300))
    with observe.attached(Log()) as log:
        for page in range(300):
            transfer = world.engine.save([page], [page])
        assert log.operations == []
        transfer.synchronize()
        assert [o.name for o in transfers_in(log, device)] == ["save"]
    assert np.array_equal(contents(world.host_pool), world.before[0])


def test_calls_after_a_flush_go_out_by_themselves(world):
    with observe.attached(Log()) as log:
        first = world.engine.load([1], [1])
        first.done()
        second = world.engine.load([2], [2])
        second.synchronize()
        first.synchronize()
    assert [o.name for o in transfers_in(log, world.device)] == LOAD * 2


def test_a_flush_of_nothing(world):
    with observe.attached(Log()) as log:
        world.engine._flush()
        world.engine._flush()
    assert log.take() == []


# Handles -----------------------------------------------------------------------------------------


def test_done_is_true_once_the_transfer_is_over(world):
    gate = Gate(world.engine.load_stream)
    transfer = world.engine.load([1], [1])
    assert not transfer.done()
    assert "in flight" in repr(transfer)
    gate.open()
    transfer.synchronize()
    assert transfer.done()
    assert repr(transfer) == "<load 1: 1 page, done>"


def test_time_and_bandwidth(world):
    first = world.engine.save([1, 2], [1, 2])
    second = world.engine.save([3], [3])
    assert first.elapsed_us == second.elapsed_us > 0
    assert first.num_bytes == 2 * second.num_bytes == 2 * world.device_pool.page_bytes
    for transfer in (first, second):
        expected = transfer.num_bytes / (transfer.elapsed_us * 1e-6) / 1e9
        assert transfer.gb_per_s == pytest.approx(expected)


def test_the_time_is_that_of_the_transfer_and_not_of_what_it_waits_for(world):
    gate = Gate(world.compute)
    transfer = world.engine.save([1], [1], after=world.compute)
    world.engine._flush()
    threading.Timer(0.3, gate.open).start()
    assert transfer.elapsed_us < 0.25e6


def test_numbers_and_kinds(world):
    engine = world.engine
    transfers = [engine.save([1], [1]), engine.load([], []), engine.load([2], [2])]
    assert [(t.kind, t.number) for t in transfers] == [("save", 1), ("load", 2), ("load", 3)]


def test_the_timeline_shows_layers_on_the_load_stream(world):
    with kv.timeline() as timeline:
        load = world.engine.load([1], [1])
        save = world.engine.save([2], [2])
        load.wait_layer(0, world.compute)
        save.wait(world.compute)
    device = world.device.name
    lanes = [(span.name, span.lane, span.device) for span in timeline.spans]
    if world.device.kind == "cuda":  # lists of pages are copied up
        lanes = [lane for lane in lanes if lane[0] != "copy"]
    assert [lane for lane in lanes if lane[0] != "save"] == [(n, "load", device) for n in LOAD]
    assert ("save", "save", device) in lanes


def test_streams_of_the_user_are_used_and_keep_their_names(device):
    load, save = device.stream(), device.stream()
    load.name = "mine"
    world = World(device, load_stream=load, save_stream=save)
    assert (world.engine.load_stream, world.engine.save_stream) == (load, save)
    with observe.attached(Log()) as log:
        world.engine.load([1], [1])
        world.engine.save([2], [2]).synchronize()
        world.engine.load([3], [3]).synchronize()
    assert {(o.name, o.stream) for o in transfers_in(log, device)} == {
        *((name, load) for name in LOAD), ("save", save),
    }  # fmt: skip
    assert load.name == "mine"


def test_the_calling_thread_as_both_streams(device):
    if device.kind != "host":
        pytest.skip("a GPU has no calling thread")
    inline = device.as_stream(None)
    world = World(device, load_stream=inline, save_stream=inline)
    saved = world.engine.save([1], [2])
    world.engine.load([2], [5])
    world.engine._flush()
    assert saved.done()
    assert np.array_equal(world.loaded(5), world.before[0][1])


# Cost --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("scripts_on_path", "lenient_host")
def test_a_warm_load_takes_few_python_frames(device):
    """Frames of the engine and of a layer; the C++ or CUDA below is not counted."""
    if device.kind != "host":
        pytest.skip("frames are counted on the host device")
    from benchmarks.frames import frames_of, own

    sizes = {"num_layers": 4, "page_size": 16}
    engine = kv.TransferEngine(
        pool_of(device, 8, **sizes), pool_of(device, 8, layout="page_first", **sizes)
    )
    for _ in range(3):
        engine.load([0, 1], [2, 3]).synchronize()
    load = own(frames_of(lambda: engine.load([0, 1], [2, 3])))
    flush = own(frames_of(lambda: engine._flush()))
    assert 0 < len(load) <= 25 and len(load + flush) <= 135, (load, flush)


# Layer by layer ----------------------------------------------------------------------------------


class Held:
    """Puts a gate before one operation."""

    def __init__(self, name):
        self.name, self.gate = name, None

    def before(self, operation):
        if operation.name == self.name:
            self.gate = Gate(operation.stream)

    def after(self, operation): ...
    def recorded(self, event, stream): ...
    def waited(self, stream, event): ...


@pytest.mark.parametrize("held", range(NUM_LAYERS))
def test_layers_before_one_that_is_late_can_be_computed_on(world, held):
    """Each layer is in place after its own wait, while the later ones have not begun."""
    transfer = world.engine.load([4], [6], after=world.compute)
    with observe.attached(Held(f"load {held}")) as holder:
        world.engine._flush()
    seen, passed = [], []
    for layer in range(NUM_LAYERS):
        transfer.wait_layer(layer, world.compute)
        seen.append(world.read(6, world.compute, [layer]))
        passed.append(world.compute.record())
    for layer in range(held):
        passed[layer].synchronize()
    assert [event.done() for event in passed] == [layer < held for layer in range(NUM_LAYERS)]
    assert not transfer.done()
    holder.gate.open()
    world.compute.synchronize()
    for layer, bits in enumerate(seen):
        expected = layer_bits(world.host_pool, world.before[1][4], layer)
        assert np.array_equal(bits(), expected), f"layer {layer}"
    transfer.synchronize()


def test_a_save_is_waited_for_as_a_whole(world):
    gate = Gate(world.engine.save_stream)
    transfer = world.engine.save([1], [1])
    transfer.wait_layer(0, world.compute)
    event = world.compute.record()
    assert not event.done()
    gate.open()
    event.synchronize()
    assert transfer.done()


def test_waits_do_not_hold_up_the_host(world):
    gates = [Gate(world.engine.load_stream), Gate(world.engine.save_stream), Gate(world.compute)]
    for transfer in (
        world.engine.load([1], [1], after=world.compute),
        world.engine.save([2], [2], after=world.compute),
    ):
        transfer.wait_layer(0, world.compute)
        transfer.wait(world.compute)
        assert not transfer.done()
    for gate in gates:
        gate.open()
    world.compute.synchronize()


@pytest.mark.races
def test_the_calling_thread_waits_by_nature(device, world):
    if device.kind != "host":
        pytest.skip("a GPU has no calling thread")
    transfer = world.engine.load([4], [6])
    transfer.wait_layer(1)
    found = layer_bits(world.device_pool, world.loaded(6), 1)
    assert np.array_equal(found, layer_bits(world.host_pool, world.before[1][4], 1))
    transfer.wait()
    assert transfer.done()


# Pages in flight ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [False, True], ids=["queued", "sent"])
@pytest.mark.parametrize("kind", ["load", "save"])
def test_freed_pages_in_flight_are_not_allocated(world, kind, sent):
    engine = world.engine
    gate = Gate(world.streams[kind])
    pages = {pool: pool.allocator.alloc(3) for pool in (world.device_pool, world.host_pool)}
    if kind == "load":
        transfer = engine.load(pages[world.host_pool], pages[world.device_pool])
    else:
        transfer = engine.save(pages[world.device_pool], pages[world.host_pool])
    if sent:
        engine._flush()
    for pool, held in pages.items():
        pool.allocator.free(held)
        left = pool.num_pages - 3
        assert pool.allocator.num_free == left
        assert not set(pool.allocator.alloc(left)) & set(held)
    threading.Timer(0.1, gate.open).start()
    for pool, held in pages.items():
        assert set(pool.allocator.alloc(3)) == set(held)
        assert transfer.done(), "the pages came back before the transfer was done"


def test_pages_come_back_once_it_is_done(world):
    pages = world.device_pool.allocator.alloc(2)
    transfer = world.engine.save(pages, [1, 2])
    world.device_pool.allocator.free(pages)
    transfer.synchronize()
    assert world.device_pool.allocator.num_free == world.device_pool.num_pages
    world.host_pool.allocator.check_leaks()


def test_pages_of_calls_that_never_went_out_come_back_with_the_engine(world):
    pool = world.device_pool
    gate = Gate(world.engine.load_stream)
    pages = pool.allocator.alloc(pool.num_pages)
    world.engine.load([1], [pages[0]])
    pool.allocator.free(pages)
    del world.engine
    gc.collect()
    assert pool.allocator.num_free == pool.num_pages
    gate.open()


# Lifetime ----------------------------------------------------------------------------------------


def test_nothing_is_kept_alive(device):
    world = World(device)
    transfers = [world.engine.save([1], [1]), world.engine.load([1], [2])]
    world.engine.load([3], [4]).wait(world.compute)
    for transfer in transfers:
        transfer.synchronize()
    watched = [weakref.ref(x) for x in (world.engine, world.device_pool, world.host_pool)]
    device.synchronize()
    del world, transfers, transfer
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_queued_calls_do_not_keep_an_engine_alive(device):
    world = World(device)
    world.engine.save([1], [1])
    watched = [weakref.ref(x) for x in (world.engine, world.device_pool)]
    del world
    gc.collect()
    assert [ref() for ref in watched] == [None] * 2


def test_a_handle_alone_can_be_waited_for(device):
    world = World(device)
    transfer, pool, expected = world.engine.save([1], [1]), world.host_pool, world.before[0][1]
    del world
    gc.collect()
    transfer.synchronize()
    assert np.array_equal(contents(pool)[1], expected)


def test_finished_batches_let_go_of_their_pages(world):
    first = world.engine.save([1], [1])
    first.synchronize()
    batch = first._batch
    world.engine.load([2], [2]).synchronize()
    assert not batch.device_pages and not batch.host_pages and not batch.after_events
    assert first.done()
    assert world.engine._save._in_flight == [], "the engine still holds a batch that is over"


# Threads -----------------------------------------------------------------------------------------


def test_threads_share_an_engine(device):
    """Each has its own pages, which are saved and loaded many times."""
    num_threads, turns = 4, 15
    world = World(device, pool_of(device, 2 * num_threads), pool_of(device, 2 * num_threads))
    wrong, start = [], threading.Barrier(num_threads)

    def work(thread):
        compute = device.stream()
        mine, other = 2 * thread, 2 * thread + 1
        expected = world.before[0][mine]
        start.wait(PATIENCE_S)
        for turn in range(turns):
            saved = world.engine.save([mine], [mine], after=compute)
            loaded = world.engine.load([mine], [other], after=compute)
            if turn % 3 == 0:
                loaded.wait(compute)
            elif turn % 3 == 1:
                for layer in range(NUM_LAYERS):
                    loaded.wait_layer(layer, compute)
            else:
                saved.synchronize()
                loaded.wait(compute)
            bits = world.read(other, compute)
            compute.synchronize()
            if not np.array_equal(bits(), expected):
                wrong.append((thread, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
