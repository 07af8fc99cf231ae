"""Copies within a pool, against a loop in NumPy over all of the pool's bytes."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import FORMATS, QUANTISED, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Gate, Log

import kvcupy as kv
from kvcupy import observe, scratch
from kvcupy.cache.paged.moves import PageMover
from kvcupy.ops import transfer_kernels

PAGES, SIZE, LAYERS = 7, 4, 3
SLOTS = PAGES * SIZE


class Filled:
    """A pool of random bits, and the same bits by page, layer and offset on the host."""

    def __init__(self, device, kind="kv", fmt="bf16", seed=1, shape=(PAGES, SIZE, LAYERS), **more):
        if kind == "kv":
            pool = kv.KVPool(*shape, 2, 6, v_head_dim=10, dtype=fmt, device=device, **more)
        else:
            pool = kv.MLAPool(*shape, 6, dtype=fmt, device=device, **more)
        rng = np.random.default_rng(seed)
        self.pool, self.parts = pool, (*pool.parts, *pool.scale_parts)
        self.device = kv.device(self.parts[0].device)
        self.want = []
        for part in self.parts:
            carrier = self.device.carrier(part)
            bits = rng.integers(0, 256, (*part.shape, carrier.itemsize), dtype=np.uint8)
            self.want.append(bits)
            carrier[...] = self.device.asarray(bits.view(carrier.dtype)[..., 0])
        self.device.synchronize()
        self.mover = PageMover(pool)

    def copy_pages(self, src, dst):
        """Expect copies of pages."""
        for bits in self.want:
            for one, other in zip(src, dst, strict=True):
                bits[other] = bits[one]

    def move_slots(self, src, dst):
        """Expect moves of tokens, one after another."""
        for bits in self.want:
            for one, other in zip(src, dst, strict=True):
                (p, o), (q, r) = divmod(int(one), SIZE), divmod(int(other), SIZE)
                bits[q, :, r] = bits[p, :, o]

    def check(self, why=""):
        kv.check_faults(self.device)
        self.check_bits(why)

    def check_bits(self, why=""):
        """Compare without waiting for any stream."""
        for part, want in zip(self.parts, self.want, strict=True):
            whole = np.asarray(self.device.to_numpy(part))
            got = np.ascontiguousarray(whole).view(np.uint8).reshape(want.shape)
            assert np.array_equal(got, want), (
                f"{part}: first at (page, layer, offset, head, element, byte) "
                f"{np.argwhere(got != want)[0]} {why}"
            )


def issued(call):
    """How many copies, and how many launches, a call issues."""
    with observe.attached(Log()) as log:
        call()
    names = [operation.name for operation in log.operations]
    assert set(names) <= {"copy", "copy_pages"}
    return names.count("copy"), names.count("copy_pages")


POOLS = [(kind, fmt, scales) for kind in ("kv", "mla") for fmt in FORMATS
         for scales in ((False, True) if fmt in QUANTISED else (False,))]  # fmt: skip


# --- Pages ---


@pytest.mark.parametrize(("kind", "fmt", "scales"), POOLS)
def test_pages_of_every_format(device, kind, fmt, scales):
    filled = Filled(device, kind, fmt, scales=scales)
    assert len(filled.parts) == (2 if kind == "kv" else 1) * (2 if scales else 1)
    for src, dst in (([2, 6, 2], [0, 5, 4]), ([3], [1])):
        assert issued(lambda s=src, d=dst: filled.mover.copy_pages(s, d)) == (1, len(filled.parts))
        filled.copy_pages(src, dst)
    filled.check()


@pytest.mark.parametrize("seed", range(10))
def test_random_page_sets(device, seed):
    filled = Filled(device, fmt="int8", scales=True, seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        order = rng.permutation(PAGES)
        cut = int(rng.integers(1, PAGES + 1))
        dst = order[cut:].astype(rng.choice([np.int32, np.int64]))
        src = rng.choice(order[:cut], len(dst))
        filled.mover.copy_pages(src, dst)
        filled.copy_pages(src, dst)
    filled.check(f"(seed {seed})")


# --- Slots ---


@pytest.mark.parametrize(("kind", "fmt", "scales"), POOLS)
def test_slots_of_every_format(device, kind, fmt, scales):
    """Across pages, from the last slot to the first, and one source to several targets."""
    filled = Filled(device, kind, fmt, scales=scales)
    src, dst = [SLOTS - 1, 5, 5, 9, 13], [0, 6, 22, 3, 13]
    assert issued(lambda: filled.mover.move_slots(src, dst)) == (1, len(filled.parts))
    filled.move_slots(src, dst)
    filled.check()


def longest_chain(src, dst):
    """How many launches an array there must be: by all pairs of moves, which is slow and plain."""
    moves = [(s, d) for s, d in zip(src, dst, strict=True) if s != d]
    place = []
    for i, (s, d) in enumerate(moves):
        behind = [place[j] + 1 for j in range(i) if moves[j][1] == s or moves[j][0] == d]
        beside = [place[j] for j in range(i) if moves[j][1] == d]
        place.append(max(1, *behind, *beside, 1))
    return max(place, default=0)


CHAINS = {
    "to the left, as a tree that is committed": (range(1, 20), range(19)),
    "to the left by two": (range(2, 20), range(18)),
    "to the right: the first slot goes everywhere": (range(19), range(1, 20)),
    "to the right from behind": (range(18, -1, -1), range(19, 0, -1)),
    "round in a ring": ([3, 7, 12, 25, 27], [27, 3, 7, 12, 25]),
    "to and fro": ([4, 9, 4, 9], [9, 4, 9, 4]),
    "one target often": ([4, 9, 13, 22], [0, 0, 0, 0]),
    "one target often, and read between": ([4, 0, 9, 13], [0, 17, 0, 0]),
    "the target of a move is overwritten, then read": ([1, 2, 3], [2, 1, 2]),
    "several independent chains": ([1, 2, 11, 12, 21, 22], [0, 1, 10, 11, 20, 21]),
    "nothing but slots onto themselves": ([3, 9], [3, 9]),
    "a slot onto itself amid a chain": ([1, 1, 2], [0, 1, 1]),
    "none": ([], []),
}  # fmt: skip
LAUNCHES = {
    "to the left, as a tree that is committed": 19,
    "to the left by two": 9,
    "several independent chains": 2,
    "one target often": 1,
    "nothing but slots onto themselves": 0,
}


@pytest.mark.parametrize("chain", CHAINS)
def test_chains(device, chain):
    filled = Filled(device, fmt="fp8_e4m3", scales=True)
    src, dst = CHAINS[chain]
    copies, launches = issued(lambda: filled.mover.move_slots(src, dst))
    batches = longest_chain(src, dst)
    assert LAUNCHES.get(chain, batches) == batches
    assert (copies, launches) == (min(batches, 1), batches * len(filled.parts))
    filled.move_slots(src, dst)
    filled.check()


@settings(max_examples=examples(150), deadline=None, database=None)
@given(
    moves=st.lists(
        st.tuples(*[st.integers(0, SLOTS - 1) | st.integers(0, 5)] * 2), max_size=40
    ),
    kind=st.sampled_from(["kv", "mla"]),
    dtype=st.sampled_from([None, np.int32, np.int64]),
)  # fmt: skip
def test_any_moves(device, moves, kind, dtype):
    """Few slots, so that most moves have to do with one another; as few launches as can be."""
    filled = Filled(device, kind, "fp8_e5m2", scales=True)
    src, dst = [s for s, _ in moves], [d for _, d in moves]
    sides = (src, dst) if dtype is None else (np.array(src, dtype), np.array(dst, dtype))
    _, launches = issued(lambda: filled.mover.move_slots(*sides))
    assert launches == longest_chain(src, dst) * len(filled.parts)
    filled.move_slots(src, dst)
    filled.check()


def test_many_moves(device):
    """More than one block, and than the smallest buffer holds."""
    shape = (1500, SIZE, 2)
    filled = Filled(device, shape=shape)
    order = np.random.default_rng(5).permutation(1500 * SIZE)
    src, dst = np.concatenate([order[:2000], order[2000:3000]]), order[1500:4500]
    filled.mover.move_slots(src, dst)
    filled.move_slots(src, dst)
    filled.check()


# --- Nothing to do, and pools of all kinds ---


@pytest.mark.parametrize("empty", [[], (), range(0), np.empty(0, np.int64), np.empty(0, np.int32)])
def test_nothing_to_do_issues_nothing(device, empty):
    filled = Filled(device)
    assert issued(lambda: filled.mover.copy_pages(empty, [])) == (0, 0)
    assert issued(lambda: filled.mover.move_slots([], empty)) == (0, 0)
    filled.check()


@pytest.mark.parametrize("placement", ["device", "pinned", "pageable"])
def test_pools_of_every_placement(device, placement):
    filled = Filled(device, placement=placement)
    filled.mover.copy_pages([1], [2])
    filled.mover.move_slots([9, 8], [8, 3])
    filled.copy_pages([1], [2])
    filled.move_slots([9, 8], [8, 3])
    filled.check()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
def test_slots_must_be_evenly_spaced(device, layout):
    """They are wherever all layers of a slot lie beside one another, or a page is one slot."""
    if layout == "page_first":
        filled = Filled(device, fmt="int8", scales=True, layout=layout)
        filled.mover.move_slots([9, 8], [8, 3])
        filled.move_slots([9, 8], [8, 3])
        filled.check()
    else:
        with pytest.raises(ValueError, match=r"^pool: expected evenly spaced slots, as in layout"):
            Filled(device, layout=layout)


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize("shape", [(1, SIZE, 2), (1, 1, 1), (9, 1, 2), (2, SIZE, 1)])
def test_axes_of_one(device, shape, layout):
    """Slots are evenly spaced there in more layouts."""
    filled = Filled(device, fmt="fp32", shape=shape, layout=layout)
    last = shape[0] * shape[1] - 1
    filled.mover.move_slots([last], [0])
    for bits in filled.want:
        bits[0, :, 0] = bits[-1, :, -1]
    filled.check()


# --- Streams and graphs ---


def load_kernels(device, **options):
    """A first load on a GPU may wait for the device, and that for a gate."""
    mover = Filled(device, **options).mover
    mover.move_slots([1], [0])
    mover.copy_pages([1], [2])
    device.synchronize()


@pytest.mark.races
def test_in_the_order_of_a_stream_with_lists_that_are_reused(device):
    """Behind a gate nothing is copied; lists and arrays may change before it opens."""
    load_kernels(device, fmt="int8", scales=True)
    filled, stream = Filled(device, fmt="int8", scales=True), device.stream()
    gate = Gate(stream)
    lists, arrays = ([1, 2, 3], [0, 1, 2]), tuple(np.array(n) for n in ([3, 6], [1, 4]))
    for _ in range(3):
        filled.mover.move_slots(*lists, stream)
        filled.mover.copy_pages(*arrays, stream)
    filled.check_bits("(before the gate opened)")
    for _ in range(3):
        filled.move_slots(*lists)
        filled.copy_pages(*arrays)
    for side in (*lists, *arrays):
        side[:] = [0] * len(side)
    gc.collect()
    gate.open()
    stream.synchronize()
    filled.check()


class GateBehindCopies:
    """Holds a stream up between the copy of the lists and the kernels that read them."""

    def after(self, operation):
        if operation.name == "copy":
            self.copied, self.gate = operation.stream.record(), Gate(operation.stream)

    def before(self, *_):
        pass

    recorded = waited = before


def test_lists_in_flight_keep_their_memory(device):
    """Otherwise the lists of a call on another stream would overwrite them."""
    load_kernels(device)
    filled, late, other = Filled(device), device.stream(), device.stream()
    gc.collect()  # what earlier tests left: to free pinned memory waits for the gate, too
    held = GateBehindCopies()
    with observe.attached(held):
        filled.mover.move_slots([1, 2], [0, 1], late)
    held.copied.synchronize()
    gc.collect()
    filled.mover.move_slots([20, 21], [24, 25], other)
    other.synchronize()
    held.gate.open()
    late.synchronize()
    filled.move_slots([1, 2, 20, 21], [0, 1, 24, 25])
    filled.check()


def test_all_of_it_is_put_on_the_stream(device):
    filled, stream = Filled(device), device.stream()
    with observe.attached(Log()) as log:
        filled.mover.move_slots([1, 2], [0, 1], stream)
        filled.mover.copy_pages([1], [4], stream)
    assert {operation.stream for operation in log.operations} == {stream}
    assert [operation.name for operation in log.operations] == [
        "copy", *["copy_pages"] * 4, "copy", *["copy_pages"] * 2
    ]  # fmt: skip


def test_a_graph_repeats_the_moves_that_it_captured(device):
    filled, stream = Filled(device, fmt="fp8_e4m3", scales=True), device.stream()
    src, dst, pages = np.array([1, 2, 3]), np.array([0, 1, 2]), np.array([2])
    with stream.capture() as graph:
        filled.mover.move_slots(src, dst, stream)
        filled.mover.copy_pages(pages, pages + 3, stream)
    filled.check("(nothing runs before the launch)")
    for _ in range(2):
        src[:], dst[:], pages[:] = 9, 10, 6
        filled.mover.move_slots([25, 26], [27, 25])  # takes other buffers
        filled.move_slots([25, 26], [27, 25])
        device.synchronize()
        graph.launch(stream)
        stream.synchronize()
        filled.move_slots([1, 2, 3], [0, 1, 2])
        filled.copy_pages([2], [5])
        filled.check()


# --- Errors ---

METHODS = ("copy_pages", "move_slots")
WRONG = {
    "lengths differ": (ValueError, "dst", ([0, 1], [2])),
    "src negative": (ValueError, "src", ([0, -1], [2, 3])),
    "dst negative": (ValueError, "dst", ([0, 1], [-3, 3])),
    "src past the end": (ValueError, "src", ([0, SLOTS], [2, 3])),
    "dst far past the end": (ValueError, "dst", ([0, 1], [2, 2**40])),
    "too large for 64 bits": (ValueError, "dst", ([0], [2**64])),
    "floats": (TypeError, "src", ([0.0], [1])),
    "bools": (TypeError, "src", ([True], [1])),
    "float array": (TypeError, "dst", ([0], np.zeros(1))),
    "int16": (TypeError, "src", (np.zeros(1, np.int16), [1])),
    "two dimensions": (ValueError, "src", (np.zeros((1, 1), np.int64), [1])),
    "a number": (TypeError, "src", (1, 2)),
    "None": (TypeError, "dst", ([1], None)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_lists(device, wrong, method):
    error, name, sides = WRONG[wrong]
    filled = Filled(device)
    with pytest.raises(error, match=rf"^{name}: expected"):
        getattr(filled.mover, method)(*sides)
    filled.check()


@pytest.mark.parametrize("method", METHODS)
def test_the_last_that_exists_and_the_first_that_does_not(device, method):
    filled = Filled(device)
    count = PAGES if method == "copy_pages" else SLOTS
    with pytest.raises(ValueError, match=rf"0 to {count - 1}, got {count}$"):
        getattr(filled.mover, method)([0], [count])
    getattr(filled.mover, method)([0], [count - 1])
    getattr(filled, method)([0], [count - 1])
    filled.check()


@pytest.mark.parametrize(
    ("src", "dst"), [([0, 1], [2, 2]), ([0, 1], [1, 2]), ([0, 1], [2, 0]), ([3], [3])]
)
def test_pages_that_are_written_twice_or_read_too(device, src, dst):
    filled = Filled(device)
    with pytest.raises(ValueError, match=r"^dst: expected each page once and none of src, got \d"):
        filled.mover.copy_pages(src, dst)
    filled.check()


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_stream(device, method):
    filled = Filled(device)
    with pytest.raises(TypeError, match=r"^stream: "):
        getattr(filled.mover, method)([0], [1], "main")
    filled.check()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("left", [0, 1])
def test_no_memory_for_the_lists(device, monkeypatch, method, left):
    """Neither pinned, nor on the device: nothing was written, and the next call works."""
    filled, calls = Filled(device), []

    def borrow(*arguments, **options):
        if len(calls) == left:
            raise kv.DeviceError("no room")
        calls.append(arguments)
        return scratch.borrow(*arguments, **options)

    with monkeypatch.context() as patch:
        lists = {"borrowed_array": scratch.borrowed_array}
        patch.setattr(transfer_kernels, "scratch", SimpleNamespace(borrow=borrow, **lists))
        with pytest.raises(kv.DeviceError, match="no room"):
            getattr(filled.mover, method)([0], [1])
    filled.check()
    getattr(filled.mover, method)([0], [1])
    getattr(filled, method)([0], [1])
    filled.check()


@pytest.mark.parametrize("method", METHODS)
def test_an_observer_may_refuse_the_launch(device, method):
    filled = Filled(device)
    with observe.attached(Log(refuse="copy_pages")), pytest.raises(kv.KvcupyError, match="refused"):
        getattr(filled.mover, method)([0], [1])
    filled.check()
