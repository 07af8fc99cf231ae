"""kv.TransferEngine: what it moves, when batches go out, and what handles return."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pytest
from devices.fake_cuda import FakeApi
from engine_cases import (
    NUM_LAYERS,
    PATIENCE_S,
    World,
    bits_of,
    contents,
    layer_bits,
    page_values,
    poll,
    pool_of,
    transfers_in,
)
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Gate, Log

import kvcupy as kv
from kvcupy import observe
from kvcupy.devices import cuda

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


def test_negative_pages_are_skipped(world):
    saved = world.engine.save([1, -1, 2, 99, -5], [3, 4, -1, -7, 99])
    assert saved.num_pages == 1
    assert saved.num_bytes == world.device_pool.page_bytes
    saved.synchronize()
    assert_moved(world.host_pool, world.before[1], [(1, 3)], world.before[0])


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


# --- Random programs ---


DEVICE, HOST = 0, 1
# Random programs ---------------------------------------------------------------------------------

DEVICE_PAGES, HOST_PAGES = 4, 5


def pairs(source, target):
    """Lists of pages, the targets each once; some are skipped."""
    return st.lists(
        st.tuples(st.integers(-1, source - 1), st.integers(-1, target - 1)),
        max_size=4, unique_by=lambda pair: pair[1],
    )  # fmt: skip


STEPS = st.one_of(
    st.tuples(st.just("save"), pairs(DEVICE_PAGES, HOST_PAGES)),
    st.tuples(st.just("load"), pairs(HOST_PAGES, DEVICE_PAGES)),
    st.tuples(st.just("write"), st.integers(0, DEVICE_PAGES - 1)),
    st.tuples(st.just("read"), st.integers(0, DEVICE_PAGES - 1)),
    st.tuples(st.just("late"), st.sampled_from(["load", "save", "compute"])),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.sampled_from(["done", "synchronize"]), st.integers(0, 9)),
)


class Program:
    """Runs steps on a world, and at once on plain arrays; compute waits where its user must."""

    def __init__(self, device, by_layer):
        self.world = World(device)
        self.by_layer = by_layer
        self.model = [side.copy() for side in self.world.before]
        self.calls = []  # (transfer, device pages), not waited for by compute
        self.all_calls = []
        self.reads = []

    def wait_for(self, page, to_write):
        for call in [c for c in self.calls if page in c[1] and (to_write or c[0].kind == "load")]:
            self.calls.remove(call)
            if self.by_layer:
                for layer in range(NUM_LAYERS):
                    call[0].wait_layer(layer, self.world.compute)
            else:
                call[0].wait(self.world.compute)

    def step(self, number, verb, argument):
        world = self.world
        if verb in ("save", "load"):
            source, target = ([pair[i] for pair in argument] for i in (0, 1))
            transfer = getattr(world.engine, verb)(source, target, after=world.compute)
            of, to = (DEVICE, HOST) if verb == "save" else (HOST, DEVICE)
            before = self.model[of].copy()
            for s, t in argument:
                if s >= 0 and t >= 0:
                    self.model[to][t] = before[s]
            self.calls.append((transfer, source if verb == "save" else target))
            self.all_calls.append(transfer)
        elif verb == "write":
            self.wait_for(argument, to_write=True)
            values = page_values(world.device_pool, number)
            world.write(world.device_pool, argument, values, world.compute)
            self.model[DEVICE][argument] = bits_of(values)
        elif verb == "read":
            self.wait_for(argument, to_write=False)
            seen = world.read(argument, world.compute)
            self.reads.append((number, seen, self.model[DEVICE][argument].copy()))
        elif verb == "late":
            world.streams[argument].call(lambda: time.sleep(0.003))
        elif verb == "flush":
            world.engine._flush()
        elif self.all_calls:
            getattr(self.all_calls[argument % len(self.all_calls)], verb)()

    def check(self):
        self.world.engine._flush()
        self.world.device.synchronize()
        for number, seen, expected in self.reads:
            assert np.array_equal(seen(), expected), f"the read of step {number}"
        assert np.array_equal(contents(self.world.device_pool), self.model[DEVICE])
        assert np.array_equal(contents(self.world.host_pool), self.model[HOST])


@settings(max_examples=examples(150), deadline=None)
@given(steps=st.lists(STEPS, max_size=20), by_layer=st.booleans())
def test_random_programs_do_what_they_would_one_step_after_the_other(device, steps, by_layer):
    program = Program(device, by_layer)
    for number, (verb, argument) in enumerate(steps):
        program.step(number, verb, argument)
    program.check()


# --- Failures ---


@pytest.fixture
def host_world(device):
    if device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    return World(device)


def boom():
    raise OSError("no such luck")


ASKED = {
    "wait": lambda t, world: t.wait(world.compute),
    "wait_layer": lambda t, world: t.wait_layer(0, world.compute),
    "done": lambda t, world: t.done(),
    "synchronize": lambda t, world: t.synchronize(),
    "elapsed_us": lambda t, world: t.elapsed_us,
    "gb_per_s": lambda t, world: t.gb_per_s,
}


def assert_failed(transfer, world, cause, said):
    """Every method raises DeviceError, each time it is called."""
    for _ in range(2):
        for ask in ASKED.values():
            with pytest.raises(kv.DeviceError, match=said) as caught:
                ask(transfer, world)
            assert isinstance(caught.value.__cause__, cause)
            assert f"{transfer.kind} {transfer.number}: " in str(caught.value)
    assert "failed" in repr(transfer)


def assert_works(world):
    """Transfers of both directions still move what they should, and no page is held back."""
    before = contents(world.device_pool)
    world.engine.save([0, 1], [8, 9], after=world.compute).synchronize()
    load = world.engine.load([8, 9], [2, 3], after=world.compute)
    load.wait_layer(NUM_LAYERS - 1, world.compute)
    load.synchronize()
    assert np.array_equal(contents(world.device_pool)[2:4], before[0:2])
    world.device.synchronize()
    for pool in (world.device_pool, world.host_pool):
        pages = pool.allocator.alloc(pool.num_pages)
        pool.allocator.free(pages)
        assert pool.allocator.num_free == pool.num_pages
        pool.allocator.check_leaks()


# Refused at the call -----------------------------------------------------------------------------

REFUSED = [
    (([0, 1], [0]), ValueError, "{1}"),
    (([8], [0]), ValueError, "device_pages: expected pages below 8, got 8"),
    (([0], [12]), ValueError, "host_pages: expected pages below 12, got 12"),
    (([0], [2**62]), ValueError, "host_pages"),
    (([0.0], [0]), TypeError, "device_pages"),
    (([0], ["a"]), TypeError, "host_pages"),
    (([True], [0]), TypeError, "device_pages"),
    ((3, [0]), TypeError, "device_pages"),
    (([0], None), TypeError, "host_pages"),
    ((np.zeros(1, np.uint8), [0]), TypeError, "device_pages"),
    (([0], np.zeros(1, np.float32)), TypeError, "host_pages"),
    ((np.zeros((1, 1), np.int64), [0]), ValueError, "device_pages"),
    ((np.int64(0), [0]), (TypeError, ValueError), "device_pages"),
]


@pytest.mark.parametrize(("lists", "error", "said"), REFUSED)
@pytest.mark.parametrize("kind", ["save", "load"])
def test_invalid_page_lists(world, kind, lists, error, said):
    said = said.format(None, "host_pages" if kind == "save" else "device_pages")
    lists = lists if kind == "save" else lists[::-1]
    with observe.attached(Log()) as log:
        with pytest.raises(error, match=f"^{said}"):
            getattr(world.engine, kind)(*lists, after=world.compute)
        world.engine._flush()
    assert log.take() == []
    assert_works(world)


def test_pools_that_do_not_go_together(device):
    right = pool_of(device, 4)
    for changes in (
        {"num_layers": 2}, {"page_size": 4}, {"head_dim": 8}, {"num_kv_heads": 1},
        {"dtype": "bf16"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^host_pool: .*device_pool"):
            kv.TransferEngine(right, pool_of(device, 4, **changes))
    with pytest.raises(ValueError, match=r"^host_pool"):
        kv.TransferEngine(right, kv.MLAPool(4, 2, 3, 8, dtype="fp16", device=device))
    with pytest.raises(ValueError, match=r"^host_pool"):
        kv.TransferEngine(right, right)
    with pytest.raises(TypeError, match=r"^host_pool"):
        kv.TransferEngine(right, np.zeros(3))
    with pytest.raises(TypeError, match=r"^device_pool"):
        kv.TransferEngine(None, right)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"load_stream": 7}, TypeError), ({"save_stream": "main"}, TypeError),
     ({"method": "magic"}, ValueError), ({"max_blocks": 0}, ValueError)],
)  # fmt: skip
def test_invalid_options(device, options, error):
    (name,) = options
    with pytest.raises(error, match=f"^{name}"):
        kv.TransferEngine(pool_of(device, 4), pool_of(device, 4), **options)


# Captures ----------------------------------------------------------------------------------------


def test_a_captured_stream_raises_and_nothing_is_queued(world):
    queued = world.engine.save([1], [1])
    with world.compute.capture():
        for call in (world.engine.save, world.engine.load):
            with pytest.raises(kv.CaptureError, match="after"):
                call([1], [1], after=world.compute)
        for wait in (queued.wait, lambda s: queued.wait_layer(0, s)):
            with pytest.raises(kv.CaptureError, match="stream"):
                wait(world.compute)
        assert "queued" in repr(queued)
    with observe.attached(Log()) as log:
        queued.synchronize()
        world.engine._flush()
    assert [operation.name for operation in transfers_in(log, world.device)] == ["save"]
    assert_works(world)


# Failures while a batch is issued ----------------------------------------------------------------


@pytest.mark.parametrize("ask", [*ASKED, "flush", "conflict", "allocator"])
@pytest.mark.parametrize("failing", ["save", "load 0", "load 1", f"load {NUM_LAYERS - 1}"])
def test_a_batch_that_cannot_be_issued(world, failing, ask):
    engine, kind = world.engine, failing.partition(" ")[0]
    loads = [engine.load([1], [1]), engine.load([2, 3], [2, 3])]
    saves = [engine.save([5], [5]), engine.save([6, 7], [6, 7])]
    bad, good = (loads, saves) if kind == "load" else (saves, loads)
    where = "" if kind == "save" else f", layer {failing[5:]}"
    first, second = (rf"{t.kind} {t.number}: " for t in bad)
    said = rf"1 page{where}: KvcupyError: refused"
    with observe.attached(Log(refuse=failing)):
        if ask == "flush":
            with pytest.raises(kv.DeviceError, match=f"{first[:-2]}, {second}3 pages{where}: Kv"):
                engine._flush()
        elif ask == "conflict":
            engine.save([1], [1])
        elif ask == "allocator":
            pages = world.device_pool.allocator.alloc(8)
            world.device_pool.allocator.free(pages)
            assert len(world.device_pool.allocator.alloc(8)) == 8
            world.device_pool.allocator.free(pages)
        else:
            with pytest.raises(kv.DeviceError, match=first + said):
                ASKED[ask](bad[0], world)
    for transfer in good:  # asked first: the failure alongside is not theirs
        transfer.wait(world.compute)
        transfer.synchronize()
        assert transfer.elapsed_us > 0
    assert_failed(bad[0], world, kv.KvcupyError, said)
    assert_failed(bad[1], world, kv.KvcupyError, said.replace("1 page", "2 pages", 1))
    world.compute.synchronize()
    world.engine._flush()
    assert_works(world)


# Failures that only the stream sees --------------------------------------------------------------

SAID = "OSError: no such luck"


@pytest.mark.parametrize("elsewhere", [None, "stream", "device", "other handle", "allocator"])
@pytest.mark.parametrize("kind", ["load", "save"])
def test_work_behind_a_failure_raises_for_every_transfer(host_world, kind, elsewhere):
    """Even if the failure has surfaced before anybody asks."""
    world, engine = host_world, host_world.engine
    stream, call = world.streams[kind], getattr(engine, kind)
    gate = Gate(stream)
    stream.call(boom)
    pages = world.device_pool.allocator.alloc(2)
    first, second = (call([i], [i]) for i in pages)
    engine._flush()
    third = call([3], [3])
    engine._flush()
    other = (engine.save if kind == "load" else engine.load)([6], [6])
    engine._flush()
    gate.open()
    if elsewhere == "allocator":
        world.device_pool.allocator.free(pages)
        world.device_pool.allocator.alloc(8)
        world.device_pool.allocator.free(range(8))
    elif elsewhere:
        with pytest.raises(kv.DeviceError, match="no such luck"):
            {"stream": stream, "device": world.device, "other handle": second}[
                elsewhere
            ].synchronize()
    for transfer in (first, second, third):
        with pytest.raises(kv.DeviceError, match=SAID):
            transfer.synchronize()
        assert_failed(transfer, world, OSError, f"1 page.*: {SAID}")
    other.synchronize()
    assert np.array_equal(contents(world.device_pool)[:6], world.before[0][:6])
    world.compute.synchronize()
    if elsewhere != "allocator":
        world.device_pool.allocator.free(pages)
    assert_works(world)


@pytest.mark.parametrize("surfaced", [False, True])
@pytest.mark.parametrize("sent", [False, True], ids=["queued", "sent"])
@pytest.mark.parametrize("kind", ["load", "save"])
def test_a_failure_of_the_compute_stream_before_the_fence(host_world, kind, sent, surfaced):
    """What the transfer builds on was never computed, so nothing may be moved."""
    world = host_world
    gate = Gate(world.compute)
    world.compute.call(boom)
    transfer = getattr(world.engine, kind)([1], [2], after=world.compute)
    world.compute.record()
    if sent:
        world.engine._flush()
    gate.open()
    if surfaced:
        with pytest.raises(kv.DeviceError):
            world.compute.synchronize()
    with pytest.raises(kv.DeviceError, match=SAID):
        transfer.synchronize()
    assert np.array_equal(contents(world.device_pool), world.before[0])
    assert np.array_equal(contents(world.host_pool), world.before[1])
    if not surfaced:
        with pytest.raises(kv.DeviceError):
            world.compute.synchronize()
    assert_failed(transfer, world, OSError, SAID)
    assert_works(world)


def test_a_failure_that_is_never_observed_does_not_stop_later_transfers(host_world):
    """On a stream of the engine's own nothing else would let it surface."""
    world = host_world
    world.engine.save_stream.call(boom)
    forgotten = world.engine.save([1], [1])
    world.engine._flush()
    assert poll(forgotten._batch.done, PATIENCE_S)
    world.engine.save([2], [2]).synchronize()
    assert np.array_equal(world.saved(2), world.before[0][2])
    assert_failed(forgotten, world, OSError, SAID)
    assert_works(world)


# --- A GPU, by what it is asked for ---


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
    """Return the kinds of work on a stream; consecutive equal ones count as one."""
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
