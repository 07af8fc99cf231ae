"""`store_kv` on streams, in graphs, and with arrays of other libraries."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import QUANTISED, Case, compare, random_elements
from store_calls import small

import kvcupy as kv
from kvcupy import reference


def test_explicit_stream(device):
    case = Case(device, 44)
    stream = device.stream()
    for cache_fmt in ("bf16", "fp8_e4m3"):
        case.store_kv(*small(case, cache_fmt=cache_fmt), [3, 9, -1, 0, 7, 2], stream=stream)


def test_two_stores_on_a_stream_keep_their_order(device):
    case = Case(device, 45)
    stream = device.stream()
    args = small(case, tokens=12)
    later = [arg.sub(lambda a: a[6:]) for arg in args[:2]]
    slots = case.slots(range(6))
    device.synchronize()
    kv.store_kv(*(a.array for a in args), slots.array, stream=stream)
    kv.store_kv(*(a.array for a in (*later, *args[2:])), slots.array, stream=stream)
    stream.synchronize()
    reference.store_kv(*(a.view for a in (*later, *args[2:])), slots.view)
    case.check("store_kv", [])


def test_in_a_graph(device):
    """A captured store runs at replay, and reads its arrays then."""
    case = Case(device, 46)
    stream = device.stream()
    key, value, k_cache, v_cache = small(case)
    slots = case.slots([5, 2, -1, 0, 7, 1])
    case.store_kv(key, value, k_cache, v_cache, slots, stream=stream)
    arrays = [a.array for a in (key, value, k_cache, v_cache, slots)]
    with stream.capture() as graph:
        kv.store_kv(*arrays, stream=stream)
    for arg in (key, value):
        fresh = np.frombuffer(case.rng.bytes(arg.view.nbytes // 4), np.uint8)
        arg.buffer.want[arg.buffer.start :][: fresh.size] = fresh
        arg.buffer.restore()
    device.synchronize()
    for cache in (k_cache, v_cache):
        cache.buffer.check()  # nothing has run yet
    graph.launch(stream)
    stream.synchronize()
    reference.store_kv(*(a.view for a in (key, value, k_cache, v_cache, slots)))
    case.check("store_kv", [])


class OnlyDLPack:
    """An array that shows nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_any_exporter_of_dlpack(device):
    case = Case(device, 47)
    args = (*small(case, fmt="fp32", cache_fmt="fp32"), case.slots([1, 7, -1, 3, 0, 9], "int32"))
    for arg in args:
        arg.array = OnlyDLPack(arg.array)
    case.store_kv(*args)


def torch_tensor(torch, device, array, dtype):
    """A torch tensor of `dtype` with the bits of a NumPy array, on `device`."""
    bits = torch.from_numpy(array.view(np.uint8).copy()).view(dtype)
    return bits.cuda() if device.kind == "cuda" else bits


@pytest.mark.parametrize(
    "pair",
    [
        ("fp32", "fp32"),
        ("bf16", "bf16"),
        ("fp16", "fp8_e4m3"),
        ("bf16", "fp8_e5m2"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp32", "int8"),
    ],
    ids="-".join,
)
def test_torch_tensors(device, pair):
    torch = pytest.importorskip("torch")
    if device.kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    kinds = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }
    rng = np.random.default_rng(48)
    qkv = random_elements(rng, pair[0], 5 * 6 * 8).reshape(5, 6, 8)
    mirror = random_elements(rng, pair[1], 4 * 2 * 2 * 2 * 8).reshape(4, 2, 2, 2, 8)
    slots = np.array([7, -1, 3, 0, 4], np.int32)
    scale = 0.5 if pair[1] in QUANTISED else None
    on_torch = torch_tensor(torch, device, qkv, kinds[pair[0]])
    cache = torch_tensor(torch, device, mirror, kinds[pair[1]])
    kv.store_kv(
        on_torch[:, 2:4],
        on_torch[:, 4:],
        cache[:, 0],
        cache[:, 1],
        torch.from_numpy(slots).to(cache.device),
        k_scale=scale,
    )
    kv.check_faults(device)
    reference.store_kv(qkv[:, 2:4], qkv[:, 4:], mirror[:, 0], mirror[:, 1], slots, k_scale=scale)
    for name, tensor, want in (("qkv", on_torch, qkv), ("cache", cache, mirror)):
        got = tensor.cpu().contiguous().view(torch.uint8).numpy().view(want.dtype)
        compare(got, want, pair[name == "cache"], exact=pair[0] == pair[1], name=name, seed=48)


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
    """A CuPy stream is accepted as it is."""
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
