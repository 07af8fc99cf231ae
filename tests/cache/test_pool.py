"""Pools: where each element is stored, that operations take their views, and errors."""

from __future__ import annotations

import inspect
import weakref

import numpy as np
import pytest
from helpers import DTYPE, FORMATS, QUANTISED, UNSIGNED, random_finite

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import ArrayView, view

PAGES, SIZE, LAYERS, HEADS, D, DV = 5, 4, 3, 2, 6, 10
SLOTS = PAGES * SIZE
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PLACEMENTS = ("device", "pinned", "pageable")

#: (layers, pages, page_size, heads, width) as each layout has it in memory.
STORED = {
    "layer_first": lambda a: a,
    "page_first": lambda a: a.transpose(1, 2, 0, 3, 4),
    "page_first_direct": lambda a: a.transpose(1, 0, 2, 3, 4),
    "page_head": lambda a: a.transpose(1, 3, 2, 0, 4),
}


def kv_pool(device, **options):
    return kv.KVPool(
        PAGES, SIZE, LAYERS, HEADS, D, v_head_dim=DV, **{"device": device, **options}
    )  # fmt: skip


def mla_pool(device, **options):
    return kv.MLAPool(PAGES, SIZE, LAYERS, D, **{"device": device, **options})


POOLS = {"kv": kv_pool, "mla": mla_pool}


def numpy_of(array):
    """A copy of any array, wherever it is."""
    return np.asarray(kv.device(view(array).device).to_numpy(array))


def write(array, values):
    """Write a contiguous NumPy array to any array, wherever it is."""
    owner = kv.device(view(array).device)
    owner.copy(array, owner.asarray(values) if values.dtype.kind != "V" else values)
    owner.synchronize()


def memory_of(part, num_bytes):
    """The bytes at the first address of a part and after it, as they lie."""
    flat = ArrayView(
        part.pointer, (num_bytes,), (1,), "uint8", part.device, library=part.library,
        owner=part.owner,
    )  # fmt: skip
    return numpy_of(flat)


def some(rng, fmt, shape):
    return random_finite(rng, fmt, int(np.prod(shape))).reshape(shape)


def bits(array):
    return np.ascontiguousarray(array).view(UNSIGNED[array.dtype.itemsize])


# --- Memory ---


@pytest.mark.covering(2)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", POOLS)
def test_every_element_lies_where_the_layout_says(device, kind, layout, placement, fmt):
    """Write through the views of each layer; read the allocation from end to end."""
    pool = POOLS[kind](device, dtype=fmt, layout=layout, placement=placement)
    rng = np.random.default_rng(1)
    heads = HEADS if kind == "kv" else 1
    sides = ((pool.k, D), (pool.v, DV)) if kind == "kv" else ((pool.k, D),)
    assert len(pool.parts) == len(sides) and pool.scale_parts == ()
    for part, (of_layer, width) in zip(pool.parts, sides, strict=True):
        want = some(rng, fmt, (LAYERS, PAGES, SIZE, heads, width))
        assert not memory_of(part, want.nbytes).any(), "not zeroed"
        for layer in range(LAYERS):
            array = of_layer(layer)
            shape = (PAGES, SIZE, heads, width) if kind == "kv" else (PAGES, SIZE, width)
            assert array.shape == shape
            assert view(array).format == fmt
            write(array, want[layer].reshape(shape))
        got = memory_of(part, want.nbytes)
        assert np.array_equal(got, bits(STORED[layout](want)).reshape(-1).view(np.uint8))
        # The same elements through the part, pages first.
        assert part.shape == (PAGES, LAYERS, SIZE, heads, width) and part.format == fmt
        assert np.array_equal(bits(numpy_of(part)), bits(want.transpose(1, 0, 2, 3, 4)))
        # All of it, and nothing else, belongs to the part.
        assert part.byte_range() == (part.pointer, part.pointer + want.nbytes)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", POOLS)
def test_placements(device, kind, placement):
    pool = POOLS[kind](device, placement=placement, dtype="fp8_e4m3", scales=True)
    assert pool.device is device and pool.placement == placement
    everything = [*pool.parts, *pool.scale_parts, *map(view, (pool.k(1), pool.k_scale(1)))]
    where = device.name if placement == "device" else "host"
    assert {v.device for v in everything} == {where}
    assert {v.pinned for v in everything} == {placement == "pinned"}
    if placement != "device":
        assert all(isinstance(pool.k(i), np.ndarray) for i in range(LAYERS))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes(device, layout, fmt):
    itemsize = DTYPE[fmt].itemsize
    pool = kv_pool(device, dtype=fmt, layout=layout)
    assert pool.num_bytes == SLOTS * LAYERS * HEADS * (D + DV) * itemsize
    assert pool.page_bytes == SIZE * LAYERS * HEADS * (D + DV) * itemsize
    pool = mla_pool(device, dtype=fmt, layout=layout)
    assert pool.num_bytes == SLOTS * LAYERS * D * itemsize == PAGES * pool.page_bytes
    if fmt in QUANTISED:
        pool = kv_pool(device, dtype=fmt, layout=layout, scales=True)
        assert (
            pool.num_bytes == SLOTS * LAYERS * HEADS * (D + DV + 2 * 4) == PAGES * pool.page_bytes
        )
        pool = mla_pool(device, dtype=fmt, layout=layout, scales=True)
        assert pool.num_bytes == SLOTS * LAYERS * (D + 4) == PAGES * pool.page_bytes


class Device:
    """A device that allocates on the host, and fails after some allocations."""

    name = kind = "host"
    fault_pointer = 0

    def __init__(self, allocations=99):
        self.left, self.allocated, self.asked = allocations, [], []

    def zeros(self, shape, dtype):
        self.left -= 1
        if self.left < 0:
            raise kv.DeviceError("no room")
        array = kv.device("host").zeros(shape, dtype)
        memory = array
        while memory.base is not None:
            memory = memory.base
        self.allocated.append(weakref.ref(memory))
        self.asked.append((shape, dtype))
        return array

    def empty_pinned(self, shape, dtype):
        array = self.zeros(shape, dtype)
        array.view(np.uint8)[...] = 0xA5
        return array


@pytest.mark.parametrize("placement", ["device", "pinned"])
@pytest.mark.parametrize("allocations", range(4))
def test_nothing_stays_allocated_when_memory_runs_out(allocations, placement):
    """Not even while the error is being handled: the handler might try a smaller pool."""
    device = Device(allocations)
    try:
        kv_pool(device, dtype="fp8_e5m2", scales=True, placement=placement)
    except kv.DeviceError:
        assert len(device.allocated) == allocations
        assert [ref() for ref in device.allocated] == [None] * allocations
    else:
        pytest.fail("the pool was made")


# --- Operations on the views ---


@pytest.mark.covering(2)
@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dynamic_scales(device, layout, placement, fmt):
    """`store_kv` fills the scales beside the rows, and `gather_kv` reads them."""
    pool = kv_pool(device, layout=layout, placement=placement, dtype=fmt, scales=True)
    where = kv.device(pool.parts[0].device)
    rng = np.random.default_rng(6)
    want = [np.zeros((LAYERS, SLOTS, HEADS), np.float32) for _ in "kv"]
    for layer in range(LAYERS):
        slots = rng.permutation(SLOTS)[:9]
        rows = [np.float32(rng.normal(size=(9, HEADS, width))) for width in (D, DV)]
        caches = [np.zeros((SLOTS, HEADS, width), DTYPE[fmt]) for width in (D, DV)]
        k_scale, v_scale = (one[layer] for one in want)
        reference.store_kv(*rows, *caches, slots, k_scale_cache=k_scale, v_scale_cache=v_scale)
        scales = {"k_scale_cache": pool.k_scale(layer), "v_scale_cache": pool.v_scale(layer)}
        layers = pool.k(layer), pool.v(layer)
        kv.store_kv(*map(where.asarray, rows), *layers, where.asarray(slots), **scales)
        got = kv.gather_kv(*layers, where.asarray(slots), dtype="fp32", **scales)
        for back, row in zip(got, rows, strict=True):
            assert np.abs(numpy_of(back) - row).max() < 0.2 * np.abs(row).max()
    kv.check_faults(where)
    order = LAYERS, PAGES, SIZE, HEADS, 1
    for part, scale, one in zip(pool.scale_parts, (pool.k_scale, pool.v_scale), want, strict=True):
        assert part.format == "fp32" and part.shape == (PAGES, LAYERS, SIZE, HEADS, 1)
        one = one.reshape(order)
        assert np.array_equal(numpy_of(part), one.transpose(1, 0, 2, 3, 4))
        stored = one if layout == "layer_first" else one.transpose(1, 2, 0, 3, 4)
        assert np.array_equal(
            memory_of(part, one.nbytes), np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        )
        for layer in range(LAYERS):
            assert numpy_of(scale(layer)).tolist() == one[layer].reshape(SLOTS, HEADS).tolist()
            assert scale(layer).strides[1] == 4


def test_without_scales_there_are_none(device):
    for make in POOLS.values():
        pool = make(device, dtype="int8")
        assert pool.k_scale(0) is pool.v_scale(2) is None
        with pytest.raises(ValueError, match="layer"):
            pool.k_scale(LAYERS)


def test_the_latent_is_both(device):
    pool = mla_pool(device)
    pool.k(1)[...] = 3
    assert (numpy_of(pool.v(1)).astype(np.float32) == 3).all() and pool.v(1).shape == (5, 4, 6)


# --- Attributes ---


def test_attributes(device):
    pool = kv_pool(device, layout="page_head", placement="pageable", dtype="fp16")
    names = ["num_pages", "page_size", "num_layers", "num_kv_heads", "head_dim", "v_head_dim"]
    assert [getattr(pool, n) for n in names] == [PAGES, SIZE, LAYERS, HEADS, D, DV]
    assert (pool.layout, pool.placement, pool.dtype) == ("page_head", "pageable", "fp16")
    assert isinstance(pool.allocator, kv.PageAllocator) and pool.allocator.num_pages == PAGES
    assert pool.parts is pool.parts
    pool = mla_pool(device)
    assert [getattr(pool, n) for n in [*names, "latent_dim"]] == [PAGES, SIZE, LAYERS, 1, D, D, D]
    assert (pool.layout, pool.placement, pool.dtype) == ("layer_first", "device", "bf16")
    assert kv.KVPool(1, 1, 1, 1, 7, device=device).v_head_dim == 7


def test_signatures():
    """The parameters of API.md, with scales at the end."""
    names = ["num_pages", "page_size", "num_layers"]
    rest = ["dtype", "layout", "placement", "device", "scales"]
    expected = {
        kv.KVPool: [*names, "num_kv_heads", "head_dim", "v_head_dim", *rest],
        kv.MLAPool: [*names, "latent_dim", "rope_dim", *rest],
    }
    for pool, parameters in expected.items():
        signature = inspect.signature(pool).parameters
        assert list(signature) == parameters
        first = 5
        for i, parameter in enumerate(signature.values()):
            assert (parameter.kind is parameter.KEYWORD_ONLY) == (i >= first)


def dtypes_of(fmt):
    yield from (fmt, DTYPE[fmt], DTYPE[fmt].type, DTYPE[fmt].name)


@pytest.mark.parametrize("fmt", FORMATS)
def test_names_of_formats(device, fmt):
    for dtype in dtypes_of(fmt):
        assert kv.MLAPool(1, 1, 1, 4, dtype=dtype, device=device).dtype == fmt


# --- Errors ---

COUNTS = ("num_pages", "page_size", "num_layers", "num_kv_heads", "head_dim", "v_head_dim")


@pytest.mark.parametrize(
    ("error", "value"),
    [*((TypeError, v) for v in (2.0, True, "2", np.float32(2))),
     *((ValueError, v) for v in (0, -1, np.int64(-5)))],
)  # fmt: skip
@pytest.mark.parametrize("name", [*COUNTS, "latent_dim"])
def test_counts_that_are_none(name, error, value):
    good = dict(zip(COUNTS, (PAGES, SIZE, LAYERS, HEADS, D, DV), strict=True))
    make = kv.KVPool
    if name == "latent_dim":
        good, make = {n: good[n] for n in COUNTS[:3]}, kv.MLAPool
    device = Device()
    with pytest.raises(error, match=rf"^{name}: expected") as caught:
        make(**{**good, name: value}, device=device)
    assert str(caught.value).endswith((f"got {value!r}", f"got {value}"))
    assert not device.asked


OPTIONS = {
    "dtype": [(ValueError, "int64"), (ValueError, np.uint8), (TypeError, "half precision"),
              (TypeError, 3)],
    "layout": [(ValueError, "NHD"), (ValueError, "Layer_first"), (TypeError, None),
               (TypeError, [])],
    "placement": [(ValueError, "host"), (ValueError, ""), (TypeError, 1), (TypeError, None)],
    "device": [(ValueError, "gpu"), (ValueError, "host:0"), (TypeError, 0)],
    "scales": [(TypeError, 1), (TypeError, "yes"), (TypeError, None), (ValueError, True)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [(name, *case) for name, cases in OPTIONS.items() for case in cases],
)
@pytest.mark.parametrize("make", POOLS.values())
def test_options_that_are_none(make, name, error, value):
    device = Device()
    with pytest.raises(error, match=rf"^{name}: expected") as caught:
        make(**{"device": device, name: value})
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)
    assert not device.asked


def test_a_pool_of_more_bytes_than_an_address_has():
    device = Device()
    with pytest.raises(ValueError, match=r"^num_pages: expected less than 2\*\*63 bytes"):
        kv.KVPool(2**20, 2**20, 2**10, 2**6, 2**7, device=device)
    assert not device.asked
