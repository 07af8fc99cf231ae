"""`store_kv` on a stream, with torch and NumPy in one call, and on GPUs."""

from __future__ import annotations

import pytest
from helpers import Case
from store_calls import small

import kvcupy as kv


def test_torch_and_numpy_in_one_call(device):
    torch = pytest.importorskip("torch")
    if device.kind != "host":
        pytest.skip("NumPy arrays live on the host device")
    case = Case(device, 49)
    args = small(case, fmt="fp32", cache_fmt="fp16")
    args[0].array = torch.from_numpy(args[0].array)
    args[3].array = torch.from_numpy(args[3].array)
    case.store_kv(*args, [2, 0, -1, 7, 6, 1])


@pytest.mark.gpu
def test_streams_of_cupy():
    """A CuPy stream is accepted directly."""
    import cupy

    case = Case(kv.device("cuda"), 50)
    case.store_kv(*small(case), [2, 0, -1, 7, 8, 1], stream=cupy.cuda.Stream(non_blocking=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["key", "value", "k_cache", "v_cache", "slot_mapping"])
def test_arrays_of_two_devices_are_refused(name):
    case, other = Case(kv.device("cuda"), 59), Case(kv.device("host"), 59)
    names = ("key", "value", "k_cache", "v_cache", "slot_mapping")
    args, foreign = (
        dict(zip(names, (a.array for a in (*small(c), c.slots(range(6)))), strict=True))
        for c in (case, other)
    )
    args[name] = foreign[name]
    with pytest.raises((TypeError, ValueError)):
        kv.store_kv(**args)
    case.check("", [])
    other.check("", [])
