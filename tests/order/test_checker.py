"""kv.order_checker: every kind of report with its missing edge, and the same program with it."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import PATIENCE_S, Gate
from tiered_cases import MemoryStore

import kvcupy as kv
from kvcupy import observe
from kvcupy.arrays import array_at, view
from kvcupy.ops import attention
from kvcupy.order import checker as order_checker


class World:
    """Two streams, and some rows that they copy."""

    def __init__(self, device):
        self.device = device
        self.main, self.copy = device.stream(), device.stream()
        self.x, self.y, self.z = (device.zeros((8, 4), "fp32") for _ in range(3))


@pytest.fixture
def world(device):
    return World(device)


def kinds(checker):
    return [report.kind for report in checker.reports]


# --- Kinds, and what orders -----------------------------------------------------------------------


PROGRAMS = {"RAW": ("xy", "zx"), "WAR": ("zx", "xy"), "WAW": ("xy", "xz")}  # targets and sources


def run(world, kind, edge):
    """Copy on one stream, then on the other, with an edge in between."""
    for copied, stream in zip(PROGRAMS[kind], (world.copy, world.main), strict=True):
        target, source = (getattr(world, name) for name in copied)
        if stream is world.main:
            edge(world)
        world.device.copy(target, source, stream=stream)


def poll_until_done(what):
    while not what.done():
        pass


def record_again(world):
    world.main.wait(world.copy.record(world.early))


def wait_for_a_late_event(world):
    event = world.copy.record()
    spare = world.device.zeros((2, 1, 4), "fp32")
    world.device.copy(spare[0], spare[1], stream=world.copy)  # behind the event: no matter
    world.main.wait(event)


def by_way_of_a_third_stream(world):
    third = world.device.stream()
    third.wait(world.copy)
    world.main.wait(third)


EDGES = {
    "wait for the stream": lambda world: world.main.wait(world.copy),
    "wait for an event": lambda world: world.main.wait(world.copy.record()),
    "wait for an event, more behind it": wait_for_a_late_event,
    "by way of a third stream": by_way_of_a_third_stream,
    "join": lambda world: kv.join(world.main, world.copy),
    "fork": lambda world: kv.fork(world.copy, world.main),
    "the host waits for the stream": lambda world: world.copy.synchronize(),
    "the host waits for an event": lambda world: world.copy.record().synchronize(),
    "the host waits for the device": lambda world: world.device.synchronize(),
    "the host finds the event done": lambda world: poll_until_done(world.copy.record()),
    "the host finds the stream done": lambda world: poll_until_done(world.copy),
    "an event that is recorded again": lambda world: world.main.wait(
        world.copy.record(world.early)
    ),
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_an_edge_orders(world, kind, edge):
    with kv.order_checker() as checker:
        world.early = world.copy.record()
        run(world, kind, edge)
    assert checker.reports == []


NO_EDGES = {
    "none": lambda world: None,
    "the other way round": lambda world: world.copy.wait(world.main),
    "never recorded": lambda world: world.main.wait(world.device.event()),
    "an event before the work": lambda world: world.main.wait(world.early),
    "another stream": lambda world: world.main.wait(world.device.stream()),
    "the host waits for another stream": lambda world: world.main.synchronize(),
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("edge", NO_EDGES.values(), ids=NO_EDGES)
def test_without_it_there_is_a_report(world, kind, edge):
    with kv.order_checker("record") as checker:
        world.early = world.copy.record()
        run(world, kind, edge)
    (report,) = checker.reports
    assert report.kind == kind
    assert (report.first.operation, report.second.operation) == ("copy", "copy")
    assert (report.first.stream, report.second.stream) == (world.copy.name, world.main.name)


# --- Reports --------------------------------------------------------------------------------------


def test_a_report_says_it_all(device):
    main, copy = device.stream(), device.stream()
    k, v = (device.zeros((16, 4, 2, 8), "fp16") for _ in "kv")
    key, slots = device.zeros((2, 2, 8), "fp16"), np.array([13, 14])
    outputs = {f"{name}_out": device.zeros((3, 2, 8), "fp16") for name in "kv"}
    with kv.order_checker("record") as checker:
        line = inspect.currentframe().f_lineno
        kv.store_kv(key, key, k, v, device.asarray(slots), stream=copy)
        kv.gather_kv(k, v, device.asarray(np.array([12, 13, 3])), **outputs, stream=main)
    (report,) = checker.reports
    assert report.kind == "RAW"
    assert report.first == kv.order.history.Site("store_kv", copy.name, f"{__file__}:{line + 1}")
    assert report.second == kv.order.history.Site("gather_kv", main.name, f"{__file__}:{line + 2}")
    assert report.edge == "main.wait(copy)"
    assert "k_cache" in report.what and "slot 13" in report.what
    assert "32 bytes" in report.what
    text = str(report)
    assert len(text.splitlines()) <= 6
    for part in ("RAW", "gather_kv", "store_kv", f"{line + 2}", report.what, report.edge):
        assert part in text


def test_the_edge_names_what_the_caller_has(device):
    class Model:
        def __init__(self):
            self.compute, self.load = device.stream(), device.stream()

        def run(self, x, y):
            device.copy(x, y, stream=self.load)
            device.copy(y, x, stream=self.compute)

    x, y = (device.zeros(4, "fp32") for _ in range(2))
    with kv.order_checker("record") as checker:
        Model().run(x, y)
        nameless = [device.stream(), device.stream()]
        nameless[0].name, nameless[1].name = "copy engine", "main"
        device.synchronize()
        device.copy(x, y, stream=nameless[0])
        device.copy(y, x, stream=nameless[1])
    assert checker.reports[0].edge == "self.compute.wait(self.load)"
    assert checker.reports[-1].edge == "main.wait(copy_engine)"


def test_raising_comes_before_the_operation(world):
    world.x[...] = 1
    world.device.synchronize()
    gate = Gate(world.copy)
    with kv.order_checker() as checker, pytest.raises(kv.OrderError) as caught:
        world.device.copy(world.y, world.x, stream=world.copy)
        world.device.copy(world.y, world.z, stream=world.main)
    gate.open()
    world.device.synchronize()
    assert isinstance(caught.value, kv.KvcupyError)
    assert caught.value.report is checker.reports[0]
    assert str(caught.value) == str(caught.value.report)
    assert np.all(world.device.to_numpy(world.y) == 1), "the second copy was issued"


def test_what_was_refused_was_not_done(world):
    with kv.order_checker() as checker:
        world.device.copy(world.x, world.y, stream=world.copy)
        with pytest.raises(kv.OrderError):
            world.device.copy(world.z, world.x, stream=world.main)
        world.device.copy(world.z, world.y, stream=world.copy)  # z is not in use
        world.main.wait(world.copy)
        world.device.copy(world.z, world.x, stream=world.main)
    assert kinds(checker) == ["RAW"]


def test_warnings_point_at_the_call(world):
    with kv.order_checker("warn") as checker, pytest.warns(kv.OrderWarning) as caught:
        for _ in range(3):
            world.device.copy(world.x, world.y, stream=world.copy)
            world.device.copy(world.x, world.z, stream=world.main)
    assert len(caught) == len(checker.reports), "once for each pair of places"
    assert caught[0].filename == __file__
    assert caught[0].message.report is checker.reports[0]


@pytest.mark.parametrize("action", ["ignore", None, True])
def test_actions(action):
    with pytest.raises(ValueError, match="action: expected one of raise, record, warn"):
        kv.order_checker(action).__enter__()


# --- Advice about transfers -----------------------------------------------------------------------


class Pages:
    """Pools with an engine, and a stream that writes the first row of page 0."""

    def __init__(self, device):
        self.device, self.main = device, device.stream()
        shape = {"page_size": 2, "num_layers": 3, "num_kv_heads": 1, "head_dim": 8}
        self.near = kv.KVPool(8, **shape, device=device)
        self.far = kv.KVPool(2, **shape, placement="pinned", device=device)
        self.engine = kv.TransferEngine(self.near, self.far)
        self.rows = device.zeros((1, 1, 8), "bf16")

    def write(self, main, layer=2, page=0):
        caches = self.near.k(layer), self.near.v(layer)
        slots = self.device.asarray(np.array([2 * page]))
        kv.store_kv(self.rows, self.rows, *caches, slots, stream=main)


def load_by_layer(pages, main, advise):
    loaded = pages.engine.load([0], [0], after=main)
    loaded.wait_layer(1, main)
    advise(locals())
    pages.write(main)


def load_of_all_layers(pages, main, advise):
    loaded = pages.engine.load([0], [0], after=main)
    loaded.wait_layer(1, main)
    advise(locals())
    slots = [pages.device.asarray(np.array([page])) for page in (5, 0)]
    kv.copy_pages(pages.near, *slots, stream=main)


def load_that_an_object_holds(pages, main, advise):
    model = SimpleNamespace(loaded=pages.engine.load([0], [0], after=main))
    model.loaded.wait_layer(0, main)
    advise(locals())
    pages.write(main)


def load_in_a_list(pages, main, advise):
    loads = [pages.engine.load([page], [page], after=main) for page in (1, 0)]
    loads[0].wait_layer(0, main)
    advise(locals())
    pages.write(main)


def the_first_of_two_loads(pages, main, advise):
    gate = Gate(main)
    later, first = None, pages.engine.load([0], [0], after=main)
    pages.engine._flush()
    later = pages.engine.load([1], [1], after=main)
    pages.engine._flush()
    advise(locals())
    pages.write(main)
    gate.open()
    later.synchronize()


def load_that_the_host_reads(pages, main, advise):
    loaded = pages.engine.load([0], [0], after=main)
    pages.engine._flush()
    advise(locals())
    pages.device.to_numpy(pages.near.k(2))


def save(pages, main, advise):
    saved = pages.engine.save([0], [0], after=main)
    pages.engine._flush()
    advise(locals())
    pages.write(main)


def insert_and_overwrite(pages, main, advise):
    cache = kv.TieredCache(pages.near, pages.far)
    taken = pages.near.allocator.alloc(1)
    cache.insert(kv.block_hashes(range(2), 2), taken, after=main)
    pages.engine = None
    advise(locals())
    pages.write(main, page=int(taken[0]))
    cache.close()


def lease(pages, main, advise, stores=(), use=Pages.write):
    cache = kv.TieredCache(pages.near, pages.far, stores=stores)
    hashes = kv.block_hashes(range(6), 2)
    for block in hashes:  # host memory has two pages: the first block is left in the store
        cache.insert([block], pages.near.allocator.alloc(1), after=main)
        cache.flush()
        cache.evict(1)
    lease = cache.acquire(hashes[:1] if stores else hashes[1:], after=main, deadline_s=PATIENCE_S)
    lease.wait_layer(0, main)
    advise(locals())
    use(pages, main, page=int(lease.pages[0]))
    lease.release()
    cache.close()


def lease_of_stored_blocks(pages, main, advise):
    lease(pages, main, advise, [MemoryStore(pages.far)])


def lease_that_the_host_reads(pages, main, advise):
    lease(pages, main, advise, (), lambda pages, main, page: pages.device.to_numpy(pages.near.k(2)))


ADVICE = {
    load_by_layer: "loaded.wait_layer(2, main)",
    load_of_all_layers: "loaded.wait_layer(2, main)",
    load_that_an_object_holds: "model.loaded.wait_layer(2, main)",
    load_in_a_list: "loads[0].wait_layer(2, main)",
    the_first_of_two_loads: "first.wait_layer(2, main)",
    load_that_the_host_reads: "loaded.synchronize()",
    save: "saved.wait(main)",
    insert_and_overwrite: "cache.flush()",
    lease: "lease.wait_layer(2, main)",
    lease_of_stored_blocks: "lease.wait_layer(2, main)",
    lease_that_the_host_reads: "lease.wait()",
}


@pytest.mark.parametrize("program", ADVICE, ids=lambda program: program.__name__)
def test_the_advice_names_what_the_caller_waits_for(device, program):
    """Without the line there are reports, and with it none."""
    if device.kind != "host" and ("host" in program.__name__ or "two" in program.__name__):
        pytest.skip("a GPU's to_numpy waits for one stream alone; its first load may be over")
    for line in ("", ADVICE[program]):
        pages = Pages(device)
        with kv.order_checker("record") as checker:
            program(pages, pages.main, lambda variables: exec(line, {}, variables))  # noqa: B023
        device.synchronize()
        assert {r.edge for r in checker.reports} == (set() if line else {ADVICE[program]})


def test_advice_about_a_transfer_that_the_caller_does_not_hold(device):
    pages = Pages(device)
    main = pages.main
    with kv.order_checker("record") as checker:
        pages.engine.load([0], [0], after=False)
        pages.engine._flush()
        pages.write(main)
        device.synchronize()
        pages.write(main, layer=1)
        pages.engine.load([0], [0], after=False).wait_layer(0)
    device.synchronize()
    first, second = (report.edge for report in checker.reports[:2])
    assert first.startswith("transfer.wait_layer(2, main)  # ")
    assert second.startswith("after=main  # ")


# --- Bytes ----------------------------------------------------------------------------------------

SLOTS = (np.array([4, 5, 9]), np.array([6, 8]), np.array([3, 5]))  # the third shares slot 5


@pytest.mark.parametrize("layout", ["NHD", "HND", "slots"])
@pytest.mark.parametrize("other", [1, 2])
def test_slots(device, layout, other):
    """Stores to other slots, of one page even, do not conflict; those to one slot do."""
    shape = {"NHD": (4, 4, 2, 8), "HND": (4, 2, 4, 8), "slots": (16, 2, 8)}[layout]
    caches = [device.zeros(shape, "fp16") for _ in "kv"]
    options = {} if layout == "slots" else {"layout": layout}
    streams = [device.stream() for _ in range(2)]
    with kv.order_checker("record") as checker:
        for stream, slots in zip(streams, (SLOTS[0], SLOTS[other]), strict=True):
            rows = device.zeros((len(slots), 2, 8), "fp16")
            kv.store_kv(rows, rows, *caches, device.asarray(slots), stream=stream, **options)
    assert kinds(checker) == ["WAW"] * (other == 2)
    device.synchronize()


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        (np.s_[:4], np.s_[4:], False),
        (np.s_[:5], np.s_[4:], True),
        (np.s_[::2], np.s_[1::2], False),
        (np.s_[::-1], np.s_[3:4], True),
        (np.s_[:, :2], np.s_[:, 2:], False),
        (np.s_[:, ::2], np.s_[:, 1::2], False),
        (np.s_[:, 1:3], np.s_[:, 2:], True),
        (np.s_[0:0], np.s_[:], False),
    ],
)
def test_halves_and_interleaved_views(world, first, second, conflict):
    with kv.order_checker("record") as checker:
        world.device.copy(world.x[first], world.y[first], stream=world.copy)
        world.device.copy(world.x[second], world.z[second], stream=world.main)
    assert kinds(checker) == ["WAW"] * conflict


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_layers_and_pages_of_a_pool(device, layout):
    pool = kv.KVPool(8, 2, 3, 2, 8, dtype="fp16", layout=layout, device=device)
    other = kv.KVPool(8, 2, 3, 2, 8, dtype="fp16", device=device)
    a, b = device.stream(), device.stream()
    rows, outputs = device.zeros((2, 2, 8), "fp16"), [device.zeros((2, 2, 8), "fp16") for _ in "kv"]
    page_3, pages = device.asarray(np.array([6, 7])), ([0, 3], [5, 6])

    def gather(layer, slots, stream):
        k_out, v_out = outputs
        cache = pool.k(layer), pool.v(layer)
        kv.gather_kv(*cache, slots, k_out=k_out, v_out=v_out, stream=stream)

    with kv.order_checker("record") as checker:
        kv.transfer_pages(other, pool, *pages, layers=[1], stream=a)  # writes pages 5 and 6
        gather(1, page_3, b)
        gather(0, device.asarray(np.array([10, 11])), b)
        assert checker.reports == []
        kv.store_kv(rows, rows, pool.k(1), pool.v(1), page_3, stream=b)
        kv.copy_pages(pool, device.asarray(np.array([3])), device.asarray(np.array([4])), stream=b)
        assert checker.reports == []
        gather(1, device.asarray(np.array([10, 3])), b)
    (report,) = checker.reports
    assert report.edge == "stream.wait(a)" or report.edge == "b.wait(a)"
    assert "dst_pool, layer 1" in report.what and "page 5" in report.what
    device.synchronize()


def attend_to_pages(device, k, v, main):
    """Only pages of its sequences, up to their lengths."""
    query, out = (device.zeros((2, 2, 8), "fp16") for _ in range(2))
    table = device.asarray(np.array([[2, 5, 2147480000], [6, -1, 3]], np.int32))
    lengths = device.asarray(np.array([6, 3]))
    return lambda: kv.paged_attention(query, k, v, table, lengths, out=out, stream=main)


def attend_behind_an_evicted_span(device, k, v, main):
    """Positions from 2 on lie three slots further."""
    query, out = (device.zeros((1, 2, 8), "fp16") for _ in range(2))
    one = [device.asarray(np.array([n], np.int32)) for n in (5, 2, 3)]
    tables = dict(zip(("seq_lens", "evicted_starts", "evicted_lens"), one, strict=True))
    table = device.asarray(np.array([[2, 1]], np.int32))
    step = attention.StepAttention(block_table=table, **tables)
    options = attention.check_options("NHD", None, True, None, None, None)
    return lambda: step.run(attention.LayerArrays(k, v), query, out, options, stream=main)


@pytest.mark.parametrize(
    ("attending", "num_pages", "read"),
    [
        (attend_to_pages, 8, {8, 9, 10, 11, 20, 21, 24, 25, 26}),
        (attend_behind_an_evicted_span, 4, {8, 9, 5, 6, 7}),
    ],
)
def test_slots_that_attention_reads(device, attending, num_pages, read):
    """A store to a slot conflicts with it if it reads that slot."""
    k, v = (device.zeros((num_pages, 4, 2, 8), "fp16") for _ in "kv")
    rows, main, other = device.zeros((1, 2, 8), "fp16"), device.stream(), device.stream()
    attend = attending(device, k, v, main)
    for slot in range(4 * num_pages):
        where = device.asarray(np.array([slot]))
        device.synchronize()
        with kv.order_checker("record") as checker:
            attend()
            kv.store_kv(rows, rows, k, v, where, stream=other)
        assert kinds(checker) == ["WAR"] * (slot in read), slot
    device.synchronize()


@pytest.mark.parametrize(("page", "kind"), [(1, "WAR"), (2, "WAW"), (3, None)])
def test_pages_that_are_copied(device, page, kind):
    cache, row = device.zeros((4, 8), "fp16"), device.zeros(8, "fp16")
    source, target = (device.asarray(np.array([number])) for number in (1, 2))
    main, other = device.stream(), device.stream()
    with kv.order_checker("record") as checker:
        kv.copy_pages(cache, source, target, stream=main)
        device.copy(cache[page], row, stream=other)
    device.synchronize()
    assert kinds(checker) == [kind] * (kind is not None)


@pytest.mark.parametrize("last", [None, [1], [1, 2]])
def test_an_access_stands_for_those_before_only_if_it_is_the_same(device, last):
    cache, (main, other) = device.zeros((4, 8), "fp16"), (device.stream(), device.stream())

    def write(slots):
        listed = None if slots is None else view(device.asarray(np.array(slots)))
        access = observe.Access(view(cache), listed)
        observe.issue(lambda: observe.Operation("write", main, (), (access,)), lambda: None)

    for first in (None, [0], [0, 1]):
        device.synchronize()
        with kv.order_checker("record") as checker:
            write(first)
            write(last)
            with kv.declare(reads=cache[0], stream=other):
                pass
        assert kinds(checker) == ["RAW"], first
        main.record().synchronize()


def test_skipped_slots_are_not_touched(device):
    k, v = (device.zeros((16, 2, 8), "fp16") for _ in "kv")
    rows = device.zeros((3, 2, 8), "fp16")
    with kv.order_checker():
        for slots in ([-1, 15, 2], [3, 15, -1], [-5, 15, 4]):
            where = device.asarray(np.array(slots))
            kv.store_kv(rows, rows, k, v, where, skip_slot=15, stream=device.stream())
    device.synchronize()


# --- Which slots, where the host does not know yet ------------------------------------------------


def stored_by_tables(device, slots, stream, upload):
    """Store through a slot mapping that comes to the device by a copy on another stream."""
    caches, rows = device.caches, device.zeros((1, 2, 8), "fp16")
    pinned = device.empty_pinned((4,), "int64")
    pinned[...] = slots
    tables = device.zeros(4, "int64")
    device.copy(tables, pinned, stream=upload)
    stream.wait(upload)
    kv.store_kv(rows, rows, *caches, tables[1:2], stream=stream)


@pytest.mark.parametrize("slot", [5, 6])
def test_tables_that_are_being_copied(device, slot):
    """They are followed through the copy: nothing waits."""
    a, b, upload = (device.stream() for _ in range(3))
    device.caches = [device.zeros((8, 2, 8), "fp16") for _ in "kv"]
    stored_by_tables(device, [0, 5, 0, 0], a, upload)  # loads the kernel
    device.synchronize()
    gate = Gate(upload)
    with kv.order_checker("record") as checker:
        stored_by_tables(device, [0, 5, 0, 0], a, upload)
        stored_by_tables(device, [0, slot, 0, 0], b, upload)
    gate.open()
    device.synchronize()
    del device.caches
    assert kinds(checker) == ["WAW"] * (slot == 5)
    assert checker.unresolved == 0


@pytest.mark.parametrize("page", [1, 2])
def test_slots_that_a_kernel_computes(device, monkeypatch, page):
    monkeypatch.setattr(order_checker, "_WAIT_S", PATIENCE_S)
    caches = [device.zeros((4, 4, 2, 8), "fp16") for _ in "kv"]
    rows, a, b = device.zeros((2, 2, 8), "fp16"), device.stream(), device.stream()
    with kv.order_checker("record") as checker:
        for stream, pages in ((a, [1]), (b, [page])):
            table, slots = device.asarray(np.array([pages])), device.zeros(2, "int64")
            lengths = device.asarray(np.array([3])), device.asarray(np.array([2]))
            kv.slot_mapping(table, *lengths, 4, out=slots, stream=stream)
            kv.store_kv(rows, rows, *caches, slots, stream=stream)
    device.synchronize()
    assert kinds(checker) == ["WAW"] * (page == 1)
    assert checker.unresolved == 0


def test_slots_that_cannot_be_known_in_time(device):
    """They count for nothing against other slots, and as some slot against the whole cache."""
    caches = [device.zeros((8, 2, 8), "fp16") for _ in "kv"]
    rows, slots = device.zeros((1, 2, 8), "fp16"), device.zeros(1, "int64")
    a, b, producer = (device.stream() for _ in range(3))
    kv.store_kv(rows, rows, *caches, slots)  # loads the kernel
    device.synchronize()
    gate = Gate(producer)
    with kv.order_checker("record") as checker:
        with kv.declare(writes=slots, stream=producer):
            producer.call(lambda: None)
        a.wait(producer)
        kv.store_kv(rows, rows, *caches, slots, stream=a)
        kv.store_kv(rows, rows, *caches, device.asarray(np.array([3])), stream=b)
        assert checker.reports == [] and checker.unresolved == 2
        device.copy(caches[0], device.zeros((8, 2, 8), "fp16"), stream=producer)
    gate.open()
    device.synchronize()
    assert sorted(kinds(checker)) == ["WAW", "WAW"]


# --- The host -------------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronises", [True, False])
def test_reading_results(world, synchronises):
    with kv.order_checker("record") as checker:
        world.device.copy(world.x, world.y, stream=world.main)
        if synchronises:
            world.main.synchronize()
        world.device.to_numpy(world.x)
    if world.device.kind == "host":  # a GPU's to_numpy waits for the default stream alone
        assert kinds(checker) == ["RAW"] * (not synchronises)
        assert synchronises or checker.reports[0].edge.startswith("world.main.synchronize()")


@pytest.mark.parametrize("synchronises", [True, False])
@pytest.mark.parametrize("accesses", ["reads", "writes"])
def test_pinned_memory_that_the_host_accesses(world, accesses, synchronises):
    """Before the copy is issued the host may write it."""
    device = world.device
    with kv.order_checker("record") as checker:
        pinned = device.empty_pinned((8, 4), "fp32")
        with kv.declare(writes=pinned):
            pinned[...] = 1
        device.copy(world.x, pinned, stream=world.main)
        device.copy(pinned[:4], world.y[:4], stream=world.main)
        if synchronises:
            world.main.synchronize()
        with kv.declare(**{accesses: pinned[:4]}):
            pinned[1] + 1
    world.main.synchronize()
    assert bool(checker.reports) == (not synchronises)
    assert {r.second.site.rpartition(":")[0] for r in checker.reports} <= {__file__}


def test_work_on_the_calling_thread(world):
    if world.device.kind != "host":
        pytest.skip("a GPU has no calling thread")
    with kv.order_checker("record") as checker:
        world.device.copy(world.x, world.y, stream=world.main)
        world.device.copy(world.z, world.x)
        assert checker.reports[0].edge.startswith("world.main.synchronize()")
        world.device.as_stream(None).wait(world.main)
        world.device.copy(world.z, world.x)
    assert kinds(checker) == ["RAW"]


@pytest.mark.parametrize("ordered", [True, False])
def test_work_that_a_host_function_does(world, ordered):
    """It counts where its stream is, whenever it runs."""
    if world.device.kind != "host":
        pytest.skip("a function on a GPU's stream cannot use the GPU")

    def function():
        world.device.copy(world.x, world.y)

    gate = Gate(world.copy)
    with kv.order_checker("record") as checker:
        world.copy.call(function)
        if ordered:
            world.main.wait(world.copy)
        world.device.copy(world.z, world.x, stream=world.main)
        gate.open()
        world.copy.synchronize()
        world.device.copy(world.z, world.x)
    world.device.synchronize()
    expected = ["WAR"] if not ordered else []
    assert kinds(checker)[: len(expected)] == expected
    assert ordered == (world.copy.name not in {r.second.stream for r in checker.reports})


def test_the_host_and_a_function_that_runs_later(world):
    """What the host does is remembered for it."""
    if world.device.kind != "host":
        pytest.skip("of the calling thread")

    def function():
        with kv.declare(reads=world.x):
            pass

    gate = Gate(world.copy)
    with kv.order_checker("record") as checker:
        with kv.declare(writes=world.x):
            pass
        world.copy.call(function)  # behind the write
        with kv.declare(writes=world.x[:1]):
            line = inspect.currentframe().f_lineno - 1
        with kv.declare(reads=world.x[1:]):
            pass
        gate.open()
        world.copy.synchronize()
    (report,) = checker.reports
    assert (report.kind, report.first.stream) == ("RAW", "the host")
    assert report.second.stream == world.copy.name
    assert report.edge.endswith(f".synchronize()  # before {__file__}:{line}")


# --- Host threads ---------------------------------------------------------------------------------


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("waits", [True, False])
def test_what_one_host_thread_has_waited_for_all_have(world, waits):
    device = world.device

    def produce():
        device.copy(world.x, world.y, stream=world.copy)
        if waits:
            world.copy.synchronize()

    with kv.order_checker("record") as checker:
        in_a_thread(produce)
        device.copy(world.z, world.x, stream=world.main)
    assert kinds(checker) == ["RAW"] * (not waits)


def test_work_from_before_the_block(world):
    """Its bytes are not known: what may race with it is listed, and is no error."""
    gate = Gate(world.copy)
    world.device.copy(world.x, world.y, stream=world.copy)
    event = world.copy.record()
    with kv.order_checker() as checker:
        world.device.copy(world.z, world.x, stream=world.main)
        (report,) = checker.unchecked
        assert report.first.stream == world.copy.name and report.second.operation == "copy"
        assert report.edge == "world.main.wait(world.copy)"
        world.main.wait(event)
        world.device.copy(world.z, world.x, stream=world.main)
        assert len(checker.unchecked) == 1
        gate.open()
    assert checker.reports == []


def test_streams_that_are_idle_when_the_block_begins_are_fine(world):
    world.device.copy(world.x, world.y, stream=world.copy)
    world.copy.synchronize()
    with kv.order_checker() as checker:
        world.device.copy(world.z, world.x, stream=world.main)
    assert checker.unchecked == []


@pytest.mark.parametrize("which", ["event", "stream"])
def test_an_answer_that_is_not_yet_true_orders_nothing(world, which):
    if world.device.kind != "host":
        pytest.skip("a stand-in runs its functions at once")
    gate = Gate(world.copy)
    with kv.order_checker("record") as checker:
        world.device.copy(world.x, world.y, stream=world.copy)
        polled = world.copy.record() if which == "event" else world.copy
        assert polled.done() is False
        world.device.copy(world.z, world.x, stream=world.main)
        gate.open()
        poll_until_done(polled)
        assert polled.done() is True
        world.device.copy(world.z, world.x, stream=world.main)
    assert kinds(checker) == ["RAW"]


# --- Graphs ---------------------------------------------------------------------------------------


def fork_and_join(world, *, forks=True, joins=True):
    """Capture work on two streams that a fork and a join order."""
    device, main, side = world.device, world.main, world.copy
    with main.capture() as graph:
        side.wait(main)
        device.copy(world.x, world.y, stream=main)
        if forks:
            side.wait(main)
        device.copy(world.z[:4], world.x[:4], stream=side)
        if joins:
            main.wait(side)
        device.copy(world.z, world.x, stream=main)
        main.wait(side)
    return graph


@pytest.mark.parametrize(("forks", "joins"), [(True, True), (False, True), (True, False)])
def test_inside_a_graph(world, forks, joins):
    with kv.order_checker("record") as checker:
        graph = fork_and_join(world, forks=forks, joins=joins)
        assert kinds(checker) == ["RAW"] * (not forks) + ["WAW"] * (not joins)
        graph.launch(world.main)
        graph.launch(world.copy)
    world.device.synchronize()
    assert len(checker.reports) == (not forks) + (not joins), "reported once"
    if not forks:
        assert checker.reports[0].edge == "side.wait(main)"


def test_a_refused_launch_orders_nothing(world):
    device, main, side, other = world.device, world.main, world.copy, world.device.stream()
    written, read = device.zeros((8, 4), "fp32"), device.zeros((8, 4), "fp32")
    with kv.order_checker():
        graph = fork_and_join(world)
        device.copy(read, world.z, stream=other)
        device.copy(written, device.zeros((8, 4), "fp32"), stream=side)
        with pytest.raises(kv.OrderError):
            graph.launch(side)
        main.wait(other)
        graph.launch(main)
        with pytest.raises(kv.OrderError):
            device.copy(read, written, stream=main)
        device.copy(read, world.z, stream=main)
        with pytest.raises(kv.OrderError):
            graph.launch(other)
        with pytest.raises(kv.OrderError):
            device.copy(device.zeros((8, 4), "fp32"), world.x, stream=other)
    device.synchronize()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", ["RAW", "WAR"])
def test_around_a_launch(world, ordered, kind):
    device, other = world.device, world.device.stream()
    with kv.order_checker("record") as checker:
        graph = fork_and_join(world)
        if kind == "RAW":
            graph.launch(world.main)
            if ordered:
                other.wait(world.main)
            device.copy(world.y, world.z, stream=other)
        else:
            device.copy(device.zeros((8, 4), "fp32"), world.z, stream=other)
            if ordered:
                world.main.wait(other)
            graph.launch(world.main)
    device.synchronize()
    assert bool(checker.reports) == (not ordered)
    if not ordered:
        inside = checker.reports[0].first if kind == "RAW" else checker.reports[0].second
        assert inside.operation == "copy in a graph" and "launched at" in inside.site


def test_what_is_captured_is_not_done(world):
    with kv.order_checker("record") as checker:
        world.device.copy(world.z, world.y, stream=world.device.stream())
        fork_and_join(world)
    assert checker.reports == []


@pytest.mark.parametrize("slot", [3, 4])
def test_a_launch_has_the_slots_of_its_time(device, slot):
    caches, rows = [device.zeros((8, 2, 8), "fp16") for _ in "kv"], device.zeros((1, 2, 8), "fp16")
    main, other, slots = device.stream(), device.stream(), device.asarray(np.array([4]))
    with kv.order_checker("record") as checker:
        with main.capture() as graph:
            kv.store_kv(rows, rows, *caches, slots, stream=main)
        kv.store_kv(rows, rows, *caches, device.asarray(np.array([3])), stream=other)
        slots[...] = slot
        device.as_stream(None).synchronize()  # not of `other`
        graph.launch(main)
    device.synchronize()
    assert kinds(checker) == ["WAW"] * (slot == 3)


def test_a_capture_that_fails_leaves_nothing(world):
    with kv.order_checker() as checker:
        with pytest.raises(ZeroDivisionError), world.main.capture():
            world.device.copy(world.x, world.y, stream=world.main)
            raise ZeroDivisionError
        world.device.copy(world.z, world.x, stream=world.copy)
    assert checker.reports == []


# --- Lifetimes ------------------------------------------------------------------------------------


class Block:
    """A block that a memory pool hands out, at an address that it has handed out before."""

    def __init__(self, arena):
        self.arena = arena

    def array(self):
        return array_at(self, self.arena.ctypes.data, (8,), np.dtype(np.float32))


def use_and_free(arena, stream, *, keeps):
    array = Block(arena).array()
    with kv.declare(reads=array, stream=stream):
        stream.call(lambda: None)
    if keeps:
        kv.keep_alive(array, stream)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("reuse", ["reads", "writes"])
def test_memory_that_is_used_again(device, keeps, reuse):
    if device.kind != "host":
        pytest.skip("the block is host memory")
    arena, main, other = np.zeros(8, np.float32), device.stream(), device.stream()
    gate = Gate(main)
    with kv.order_checker("record") as checker:
        use_and_free(arena, main, keeps=keeps)
        if keeps:
            gate.open()
            main._thread and wait_until_idle(main)
        gc.collect()
        array = Block(arena).array()
        with kv.declare(**{reuse: array}, stream=other):
            other.call(lambda: None)
    gate.open()
    device.synchronize()
    assert kinds(checker) == ["use after free"] * (not keeps)
    if not keeps:
        assert checker.reports[0].edge.startswith("kv.keep_alive(array, main)")


def wait_until_idle(stream):
    """Wait without the host's knowing: nobody synchronises."""
    passed = threading.Event()
    with observe_nothing():
        stream.call(passed.set)
    assert passed.wait(20)


@contextmanager
def observe_nothing():
    observers = observe.observers
    observe._notify(())
    try:
        yield
    finally:
        observe._notify(observers)


def test_operations_keep_their_own_arrays(device):
    """Memory of arrays that operations have used is free again when the last of them is over."""
    if device.kind != "host":
        pytest.skip("the block is host memory")
    arena, target = np.zeros(8, np.float32), device.zeros(8, "fp32")
    with kv.order_checker():
        for _ in range(3):
            stream = device.stream()
            device.copy(target, Block(arena).array(), stream=stream)
            wait_until_idle(stream)
            gc.collect()
            target = device.zeros(8, "fp32")


def test_a_checker_keeps_nothing_alive(world):
    class Owner(np.ndarray):
        pass

    with kv.order_checker():
        array = np.zeros((8, 4), np.float32).view(Owner)
        slots = world.device.asarray(np.arange(1))
        known = [weakref.ref(array), weakref.ref(slots), weakref.ref(world.copy)]
        stream = world.copy
        world.device.copy(world.x, array, stream=stream)
        cache, rows = world.device.zeros((4, 1, 4), "fp32"), world.device.zeros((1, 1, 4), "fp32")
        kv.store_kv(rows, rows, cache, cache.copy(), slots, stream=stream)
        stream.synchronize()
        event = weakref.ref(stream.record())
        del array, slots, stream
        world.copy = None
        gc.collect()
        assert [r() for r in (*known, event)] == [None] * 4


def test_what_is_declared_can_be_freed_where_it_was_declared(world):
    """Names are looked up in the caller's variables, of which nothing must stay behind."""
    array = np.zeros((8, 4), np.float32)
    known = weakref.ref(array)
    with kv.order_checker("record") as checker:
        with kv.declare(writes=array, stream=world.main):
            pass
        with kv.declare(writes=array, stream=world.copy):
            pass
        del array
        gc.collect()
        assert known() is None
    assert kinds(checker) == ["WAW"] and "world.copy.wait(world.main)" in checker.reports[0].edge


# --- A model --------------------------------------------------------------------------------------

PARTS = st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda p: abs(p[0] - p[1]) > 1)
STEPS = st.one_of(
    st.tuples(st.just("copy"), st.integers(0, 2), PARTS).map(lambda s: (*s[:2], *s[2])),
    st.tuples(st.just("record"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("synchronize"), st.integers(0, 2)),
)


def races_of(program):
    """The pairs of steps that race, by reachability in the graph of all that is ordered."""
    last, events, host = {}, {}, set()
    races, copies = [], []
    for number, (what, stream, *rest) in enumerate(program):
        seen = set(last.get(stream, set())) | host
        if what == "copy":
            source, target = (set(range(4 * i, 4 * i + 8)) for i in rest)
            for other, (read, written) in copies:
                hit = written & (source | target) or read & target
                if hit and other not in seen:
                    races.append((other, number))
            copies.append((number, (source, target)))
            seen = seen | {number}
        elif what == "record":
            events[rest[0]] = set(seen)
        elif what == "wait":
            seen |= events.get(rest[0], set())
        else:
            host |= seen
        last[stream] = seen
    return races


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(STEPS, max_size=14))
def test_random_programs(program):
    """A step is reported if it races with another by reachability, and with such a one."""
    device = kv.device("host")
    memory = device.zeros(64, "int8")
    streams = [device.stream() for _ in range(3)]
    events = [device.event() for _ in range(2)]
    raced = []
    with kv.order_checker("record") as checker:
        for number, (what, stream, *rest) in enumerate(program):
            if what == "copy":
                source, target = (memory[4 * i : 4 * i + 8] for i in rest)
                checker._reported.clear()
                before = len(checker.reports)
                streams[stream].name = f"step {number}"
                device.copy(target, source, stream=streams[stream])
                for report in checker.reports[before:]:
                    first = int(re.sub(r"\D", "", report.first.stream))
                    raced.append((first, number))
            elif what == "record":
                streams[stream].record(events[rest[0]])
            elif what == "wait":
                streams[stream].wait(events[rest[0]])
            else:
                streams[stream].synchronize()
    device.synchronize()
    expected = races_of(program)
    assert set(raced) <= set(expected)
    # Of accesses that a stream repeats, the last stands for all.
    assert {second for _, second in raced} == {second for _, second in expected}
