"""Large transfers, pools of more than 2**31 bytes, and pools between canaries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from transfer_cases import METHODS, PLACEMENTS, POOL_LAYOUTS, TransferCase, pools, reaches

import kvcupy as kv
from kvcupy import formats
from kvcupy.arrays import pinned_at
from kvcupy.devices.host import HostDevice

every_method = pytest.mark.parametrize("method", METHODS)


@pytest.mark.covering
@pytest.mark.parametrize(
    "layouts", [("layer_first", "page_first"), ("page_head", "layer_first")], ids="-".join
)
@every_method
def test_more_than_a_staging_buffer_holds(device, method, layouts):
    """48 MiB in 384 pages, or in 2 pages of several runs."""
    case = TransferCase(device, 18)
    both = pools(
        case, layouts=layouts, pages=(390, 384), page_size=16, layers=4, heads=8, widths=(64, 64)
    )
    case.transfer(*both, case.rng.permutation(390)[:384], case.rng.permutation(384), method=method)


@every_method
def test_one_page_larger_than_a_staging_buffer(device, method):
    case = TransferCase(device, 19)
    both = pools(case, pages=(1, 2), page_size=64, layers=20, heads=16, widths=(512, 480))
    case.transfer(*both, [0], [1], method=method)


@pytest.mark.slow
@pytest.mark.parametrize("layout", POOL_LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_offsets_past_two_gigabytes(device, layout, method):
    """The second layer, or the last pages, begin past 2**31 bytes; other memory stays zero."""
    if not reaches(device, method, ["device", "pageable"]):
        pytest.skip("kernels of a GPU reach no pageable memory")
    page_size, heads, width, layers = 64, 16, 512, 2
    pages = 2**31 // (page_size * heads * width) + 3
    large = kv.KVPool(
        pages, page_size, layers, heads, width, dtype="int8", layout=layout, placement="pageable",
        device=device,
    )  # fmt: skip
    case = TransferCase(device, 20)
    small = case.pool(
        "page_head", "int8", pages=4, page_size=page_size, layers=layers, heads=heads,
        widths=(width, width),
    )  # fmt: skip
    there, back = [pages - 1, 0, pages - 3], [3, 1, 2]
    assert large.parts[0].byte_range()[1] - large.parts[0].pointer > 2**31 + 2**30
    kv.transfer_pages(small.pool, large, [0, 1, 2], there, method=method)
    kv.transfer_pages(large, small.pool, [*there, pages], [*back, 0], method=method)
    for part in small.parts:
        part.view[:, back] = part.view[:, [0, 1, 2]].copy()
    case.finish(([(3, pages)], []))
    for read in (large.k, large.v):
        for layer, page in itertools.product(range(layers), (1, pages - 2, pages // 2)):
            assert not np.asarray(read(layer))[page].any(), (layer, page)


# Canaries -------------------------------------------------------------------------------------

GUARD_BYTES = 4096
CANARY = 0xA5


@pytest.fixture
def guards(device, monkeypatch):
    """Let all memory of the host device, staging buffers too, be between canaries."""
    if device.kind != "host":
        pytest.skip("memory of a GPU comes from a pool of its own")
    kept, real_empty = [], HostDevice.empty

    def guarded(self, shape, dtype):
        element = formats.numpy_dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
        raw = real_empty(self, num_bytes + 2 * GUARD_BYTES, np.uint8)
        raw[...] = CANARY
        kept.append(raw)
        return raw[GUARD_BYTES : GUARD_BYTES + num_bytes].view(element).reshape(shape)

    def zeros(self, shape, dtype):
        array = guarded(self, shape, dtype)
        array.view(np.uint8)[...] = 0
        return array

    def pinned(self, shape, dtype):
        array = guarded(self, shape, dtype)
        return pinned_at(array, array.ctypes.data, array.shape, array.dtype)

    for name, make in (("empty", guarded), ("zeros", zeros), ("empty_pinned", pinned)):
        monkeypatch.setattr(HostDevice, name, make)
    return kept


def check_guards(kept):
    assert kept, "nothing was allocated between canaries"
    for raw in kept:
        for side in (raw[:GUARD_BYTES], raw[-GUARD_BYTES:]):
            assert (side == CANARY).all(), "a byte next to an allocation changed"


@pytest.mark.covering
@every_method
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("widths", [(1, 3), (16, 8), (33, 5), (64, 48)])
def test_nothing_is_written_beside_a_pool(device, guards, method, widths, placement):
    """The first and the last page among those moved, whatever the width of a row."""
    for layouts in itertools.product(POOL_LAYOUTS, repeat=2):
        case = TransferCase(device, widths)
        for fmt in ("int8", "bf16", ("bf16", "int8"), ("fp8_e4m3", "fp32")):
            if not isinstance(fmt, str) and method == "copy":
                continue
            both = pools(
                case, fmt, layouts, pages=(3, 4), widths=widths, placements=(placement,) * 2,
                page_size=3,
            )  # fmt: skip
            case.transfer(*both, [2, 0, 3, -1], [3, 0, 1, 2], method=method)
    check_guards(guards)


def test_a_byte_beside_a_pool_is_noticed(device, guards):
    """The control."""
    pool = TransferCase(device, 22).pool()
    guards[0][GUARD_BYTES + pool.parts[0].want.nbytes] = 0
    with pytest.raises(AssertionError, match="next to an allocation"):
        check_guards(guards)
