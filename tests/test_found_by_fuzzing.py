"""What `stress.py fuzz` has found: each call once, as small as it can be.

Most came out as an error of another type, or one that named no argument. Some had done half of
their work by then, or continued without an error.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import valid_calls

import kvcupy as kv

HUGE = 10**400
TWO = np.array([True, False])
SHAPE = {"page_size": 2, "num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": "fp16"}
CACHE = {
    "num_layers": 1, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_pages": 4,
    "page_size": 4, "dtype": "fp32",
}  # fmt: skip


def pool(device, num_pages=4, **changes):
    return kv.KVPool(num_pages, **{**SHAPE, **changes}, device=device)


def paged(device, **changes):
    return kv.PagedKVCache(**{**CACHE, **changes}, device=device)


def raises_by_name(call, error, name):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert caught.type is error, repr(caught.value)
    assert re.match(rf"{name}\b", str(caught.value)), str(caught.value)


class Unknown:
    """A number without a value, like the elements of torch's meta tensors."""

    def __index__(self):
        raise RuntimeError("no number")

    __int__ = __index__


class Interface:
    """A GPU array of another library, whose interface lacks the type of its elements."""

    __cuda_array_interface__ = {"version": 3, "shape": (2,), "data": (0, False)}  # noqa: RUF012


def operation(name, **changes):
    """A call of an operation with changed arguments, of which the first is to be named."""
    function = lambda d: getattr(kv, name)(**{**valid_calls.EXAMPLES[name](d), **changes})  # noqa: E731
    return function, next(iter(changes))


def with_tiers(device, **changes):
    kv.TieredCache(pool(device), pool(device, placement="pinned"), **changes)


def transfer(device, src=(0,), **changes):
    kv.transfer_pages(pool(device), pool(device), src, [1] * len(src), **changes)


def misaligned(device, dtype, *shape):
    raw = device.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 16, np.uint8)
    return raw[1 : raw.size - 15].view(dtype).reshape(shape)


def on_host(call):
    """A call with arrays of NumPy or tensors of the CPU, which other devices do not take."""

    def run(device):
        if device.kind != "host":
            pytest.skip("the arrays are on the host")
        call(device)

    return run


def wrap(device, k, **options):
    return kv.KVPool.wrap(k, k, **options)


def many_layers(device, axis):
    """An array of 2**33 layers, each of which got a view, for hours."""
    one = np.zeros((1, 4, 2, 2, 4), np.float16)
    if axis == 0:
        return wrap(device, np.broadcast_to(one, (2**33, 4, 2, 2, 4)))
    first = np.broadcast_to(one[0][:, :, None], (4, 2, 2**33, 2, 4))
    return wrap(device, first, layout="page_first")


def note_written(layers):
    def run(device):
        torch = pytest.importorskip("torch")
        kv.KVPool.wrap(*(torch.zeros(2, 4, 2, 2, 4) for _ in "kv")).note_written(layers)

    return on_host(run)


def array(device, shape, dtype=np.int32, value=0):
    return device.asarray(np.full(shape, value, dtype))


CALLS = [
    (*operation("store_kv", k_scale=HUGE), ValueError),
    (*operation("store_kv", key=Interface()), TypeError),
    (*operation("gather_kv", dtype=("f4", 2**40), k_out=None, v_out=None), TypeError),
    (*operation("paged_attention", causal=TWO), TypeError),
    (*operation("paged_attention", layout=np.array(["NHD", "HND"])), ValueError),
    (*operation("apply_rope", sections=(Unknown(), 1, 1)), TypeError),
    (lambda d: kv.arrays.view(np.zeros(3))[:1.5], "index", TypeError),
    (lambda d: kv.block_hashes([1, [2]], 1), "token_ids", ValueError),
    (lambda d: kv.device("cuda:" + "9" * 5000), "device", ValueError),
    (lambda d: kv.explore(lambda _: 1, schedules=float("nan")), "schedules", TypeError),
    (lambda d: kv.explore(lambda _: 1, replay=[0.5]), "replay", TypeError),
    (lambda d: kv.rope_table(2**62, 8), "max_positions", ValueError),
    (lambda d: kv.rope_table(16, 8, scaling={"rope_type": []}), "scaling", ValueError),
    (lambda d: kv.rope_table(16, 8, scaling={"rope_type": "linear", "factor": HUGE}), "scaling",
     ValueError),
    # Four of 2**62 tokens came to none at all in 64 bits.
    (lambda d: kv.slot_mapping(array(d, (4, 1), int), array(d, 4, int, 1),
                               array(d, 4, int, 2**62), 4), "append_lens", ValueError),
    # The kernel read it in place, which a GPU cannot.
    (lambda d: transfer(d, misaligned(d, np.int64, 2)), "src_pages", ValueError),
    (lambda d: transfer(d, layers=np.array([0], "m8[s]")), "layers", TypeError),
    (lambda d: kv.device("host").empty((0, 2**70), "fp32"), "shape", ValueError),
    (lambda d: kv.device("host").zeros((2,), "\ud800"), "dtype", TypeError),
    (lambda d: kv.device("host").asarray([[1], [1, 2]]), "array", TypeError),
    (lambda d: kv.fork(3, d.stream()), "main", TypeError),
    (lambda d: with_tiers(d, write=np.array(["through", "back"])), "write", ValueError),
    (on_host(lambda d: many_layers(d, 0)), "k", ValueError),
    (note_written([9]), "layers", ValueError),
    (lambda d: paged(d, rope=misaligned(d, np.float32, 16, 8)), "rope", ValueError),
    (lambda d: paged(d).begin_forward(np.array("a"), [1]), "seqs", TypeError),
    (lambda d: kv.Demotion("fp8_e4m3", recent=1.5), "recent", TypeError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "name", "error"), CALLS, ids=[f"{name}-{i}" for i, (_, name, _) in enumerate(CALLS)]
)
def test_a_call_names_what_it_cannot_take(device, tmp_path, monkeypatch, call, name, error):
    monkeypatch.chdir(tmp_path)
    raises_by_name(lambda: call(device), error, name)


def test_the_host_device_leaves_arrays_of_a_gpu_alone():
    """It read and wrote at addresses that mean nothing to it."""
    host = kv.device("host")
    own, there = np.zeros(4, np.float32), np.ones(4, np.float32)
    elsewhere = kv.ArrayView(there.ctypes.data, (4,), (4,), "fp32", "cuda:7", owner=there)
    raises_by_name(lambda: host.copy(elsewhere, own), ValueError, "dst")
    raises_by_name(lambda: host.copy(own, elsewhere), ValueError, "src")
    raises_by_name(lambda: host.to_numpy(elsewhere), ValueError, "array")
    assert there.all() and not own.any()


# Half done -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("out", ["query", "part of query", "pool", "misaligned"])
def test_attention_that_cannot_write_stores_no_keys(device, out, rope):
    """Keys and values of the step were stored before the error."""
    table = kv.rope_table(16, 8, device=device) if rope else None
    cache = kv.PagedKVCache(**CACHE, rope=table, device=device)
    cache.add_sequence("a")
    rows = valid_calls.array(device, 3, 4, 8)
    raw = device.zeros(2 * 4 * 8 * 4 + 4, np.uint8)
    results = {
        "query": rows[:2], "part of query": rows[1:],
        "pool": cache.pool.k(0).reshape(-1)[: 2 * 4 * 8].reshape(2, 4, 8),
        "misaligned": raw[1 : 1 + 2 * 4 * 8 * 4].view(np.float32).reshape(2, 4, 8),
    }  # fmt: skip
    cache.begin_forward(["a"], [2])
    before = [np.array(device.to_numpy(part)) for part in (cache.pool.k(0), cache.pool.v(0), rows)]
    key = valid_calls.array(device, 2, 2, 8, seed=1)

    def attend():
        cache.attention(0, rows[:2], key, key, out=results[out])

    if rope and "query" in out:  # attention reads a rotated copy
        attend()
    else:
        for _ in range(2):  # what was checked once is not taken as allowed
            raises_by_name(attend, ValueError, "out")
        after = [device.to_numpy(part) for part in (cache.pool.k(0), cache.pool.v(0), rows)]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    cache.end_forward()


def test_a_captured_second_stream_is_refused_before_keys_are_rotated(device):
    arguments = valid_calls.EXAMPLES["rope_store_kv"](device)
    key = arguments["key"]
    before = device.to_numpy(key).copy()
    main, other = device.stream(), device.stream()
    with pytest.raises(kv.CaptureError), other.capture():
        kv.rope_store_kv(**arguments, stream=main, alt_stream=other)
    device.synchronize()
    assert np.array_equal(device.to_numpy(key), before)
