"""ArrayViews and arrays of pools in other libraries' hands, by DLPack: every format, no copy."""

from __future__ import annotations

import gc
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from helpers import DTYPE, FORMATS, UNSIGNED

import kvcupy as kv
from kvcupy.arrays import view


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def on_the_host(device):
    if device.kind != "host":
        pytest.skip("arrays of the host")


def bits_of(tensor):
    """The bits of a tensor, as NumPy sees them."""
    import torch

    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(signed).numpy().view(UNSIGNED[tensor.element_size()])


def random_bits(fmt, shape):
    rng = np.random.default_rng(3)
    size = DTYPE[fmt].itemsize
    return rng.integers(0, 2 ** (8 * size), shape, dtype=UNSIGNED[size])


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_into_torch(torch, fmt, versioned):
    """Under its own code, in place, with the strides of the view."""
    bits = random_bits(fmt, (4, 6))
    for cut in (np.s_[:], np.s_[1:, ::2], np.s_[:, 3:3]):
        v = view(bits.view(DTYPE[fmt]))[cut]
        tensor = torch.from_dlpack(v if versioned else v.__dlpack__())
        assert tensor.dtype == getattr(torch, DTYPE[fmt].name)
        assert tuple(tensor.shape) == v.shape
        if v.size:
            assert tensor.data_ptr() == v.pointer
            assert tuple(s * v.itemsize for s in tensor.stride()) == v.strides
        np.testing.assert_array_equal(bits_of(tensor), bits[cut])


def test_what_is_read_only_says_so():
    a = np.zeros(3)
    a.flags.writeable = False
    assert not np.from_dlpack(view(a)).flags.writeable
    assert view(Hidden(view(a))).readonly
    with pytest.raises(BufferError, match="readonly"):
        view(a).__dlpack__()


class Hidden:
    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_the_owner_lives_as_long_as_the_tensor(torch):
    """And is let go of on whatever thread the last tensor dies."""
    a = np.zeros((4, 4), np.uint16)
    before = sys.getrefcount(a)
    held = [torch.from_dlpack(kv.view_as(a, "bf16")[1:])]
    gc.collect()
    assert sys.getrefcount(a) > before
    held[0][0, 0] = 1
    assert a[1, 0] == 0x3F80
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert sys.getrefcount(a) == before
    capsule = kv.view_as(a, "bf16").__dlpack__()  # never consumed
    assert sys.getrefcount(a) > before
    del capsule
    assert sys.getrefcount(a) == before


# --- Pools ---


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_layers_of_pools_as_tensors(torch, fmt, layout):
    pool = kv.KVPool(3, 2, 2, 2, 4, v_head_dim=6, dtype=fmt, layout=layout, device="host")
    for own, as_torch in ((pool.k, pool.torch_k), (pool.v, pool.torch_v)):
        array = own(1)
        bits = array.view(UNSIGNED[array.itemsize])
        bits[...] = random_bits(fmt, array.shape)
        tensor = as_torch(1)
        assert tensor.dtype == getattr(torch, DTYPE[fmt].name)
        assert tensor.data_ptr() == array.ctypes.data and tuple(tensor.shape) == array.shape
        np.testing.assert_array_equal(bits_of(tensor), bits)
        assert as_torch(1) is tensor
        taken = torch.from_dlpack(array)
        assert taken.dtype == tensor.dtype and taken.data_ptr() == tensor.data_ptr()
        part = torch.from_dlpack(array[1:, :, 0])
        np.testing.assert_array_equal(bits_of(part), bits[1:, :, 0])
    with pytest.raises(ValueError, match=r"^layer: expected 0 to 1, got 2"):
        pool.torch_k(2)


def test_tensors_of_a_wrapped_pool_are_views_of_those_given(torch):
    caches = [torch.zeros(2, 3, 2, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    pool = kv.KVPool.wrap([c[0] for c in caches], [c[1] for c in caches])
    k = pool.torch_k(1)
    assert k.data_ptr() == caches[1].data_ptr() and k.dtype == torch.bfloat16
    before = caches[1]._version
    k[0] = 1
    assert caches[1]._version > before and bool((caches[1][0, 0] == 1).all())
    packed = [torch.zeros(4, 1, 8, dtype=torch.uint8) for _ in range(2)]
    tagged = [kv.view_as(p, "fp8_e5m2") for p in packed]
    pool = kv.KVPool.wrap(tagged[:1], tagged[1:], page_size=2)
    assert pool.torch_v(0).dtype == torch.float8_e5m2
    assert pool.torch_v(0).data_ptr() == packed[1].data_ptr()
    arrays = [np.zeros((4, 2, 1, 8), ml_dtypes.bfloat16) for _ in range(2)]
    assert kv.KVPool.wrap(arrays[:1], arrays[1:]).torch_k(0).data_ptr() == arrays[0].ctypes.data


def test_a_torch_that_lacks_the_format(torch, monkeypatch):
    """Then it gets integers, whose bits are named afterwards."""
    whole = torch.from_dlpack

    def refuses(x):
        if not view(x).format.startswith("int"):
            raise RuntimeError("unsupported")
        return whole(x)

    monkeypatch.setattr(torch, "from_dlpack", refuses)
    for fmt in FORMATS:
        pool = kv.KVPool(2, 2, 1, 1, 4, dtype=fmt, device="host")
        pool.k(0)[1] = 2
        assert pool.torch_k(0).dtype == getattr(torch, DTYPE[fmt].name)
        assert float(pool.torch_k(0)[1, 0, 0, 0]) == 2


def test_backward_steps_are_not_taken_to_the_process_end(torch):
    """torch's importer aborts on negative strides."""
    a = np.zeros((2, 2, 1, 8), np.float16)
    pool = kv.KVPool.wrap([a[::-1]], [a.copy()])
    with pytest.raises(ValueError, match="strides that torch has"):
        pool.torch_k(0)
