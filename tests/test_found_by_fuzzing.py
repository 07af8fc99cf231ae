"""What `scripts/fuzz.py` has found: each call once, as small as it can be.

Most came out as an error of another type, or one that named no argument. Some had done half of
their work by then, or went on without an error.
"""

from __future__ import annotations

import re
import threading

import every_call
import numpy as np
import pytest

import kvcupy as kv

HUGE = 10**400
TWO = np.array([True, False])
BROKEN_PATHS = ("a\0b", "\ud800")
SHAPE = {"page_size": 2, "num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": "fp16"}
CACHE = {
    "num_layers": 1, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_pages": 4,
    "page_size": 4, "dtype": "fp32",
}  # fmt: skip


def pool(device, num_pages=4, **changes):
    return kv.KVPool(num_pages, **{**SHAPE, **changes}, device=device)


def raises_by_name(call, error, name):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert caught.type is error, repr(caught.value)
    assert re.match(rf"{name}\b", str(caught.value)), str(caught.value)


class Unknown:
    """A number that is not there, such as those of torch's meta tensors."""

    def __index__(self):
        raise RuntimeError("no number")

    __int__ = __index__


OPERATIONS = [
    ("store_kv", {"k_scale": HUGE}, ValueError),
    ("store_mla", {"scale": HUGE}, ValueError),
    ("gather_kv", {"v_scale": HUGE, "v_scale_cache": None}, ValueError),
    ("gather_kv", {"dtype": ("f4", 2**40), "k_out": None, "v_out": None}, TypeError),
    ("gather_kv", {"dtype": "\ud800", "k_out": None, "v_out": None}, TypeError),
    ("paged_attention", {"sm_scale": HUGE}, ValueError),
    ("paged_attention", {"logits_soft_cap": HUGE}, ValueError),
    ("paged_attention", {"causal": TWO}, TypeError),
    ("paged_attention", {"layout": np.array(["NHD", "HND"])}, ValueError),
    ("apply_rope", {"interleaved": TWO}, TypeError),
    ("apply_rope", {"sections_interleaved": TWO}, TypeError),
    ("apply_rope", {"sections": (Unknown(), 1, 1)}, TypeError),
    ("apply_rope", {"sections": (float("inf"), 1, 1)}, TypeError),
    ("rope_store_kv", {"write_key": TWO}, TypeError),
    ("rope_store_mla", {"write_key": TWO}, TypeError),
]


@pytest.mark.parametrize(
    ("operation", "changes", "error"), OPERATIONS, ids=lambda value: str(value)[:40]
)
def test_an_operation_names_what_it_cannot_take(device, operation, changes, error):
    arguments = {**every_call.CALLS[operation](device), **changes}
    raises_by_name(lambda: getattr(kv, operation)(**arguments), error, next(iter(changes)))


def test_an_epsilon_of_any_size_is_one(device):
    arguments = every_call.apply_rope(device)
    kv.apply_rope(**{**arguments, "eps": HUGE})


class Interface:
    """A GPU array of another library, whose interface lacks the type of its elements."""

    __cuda_array_interface__ = {"version": 3, "shape": (2,), "data": (0, False)}  # noqa: RUF012


def test_an_interface_without_a_type(device):
    arguments = {**every_call.store_kv(device), "key": Interface()}
    raises_by_name(lambda: kv.store_kv(**arguments), TypeError, "key")


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: kv.view_as(np.zeros(3, np.uint16), []), ValueError, "dtype"),
        (lambda: kv.arrays.view(np.zeros(3))[:1.5], TypeError, "index"),
        (lambda: kv.arrays.view(np.zeros(3))[::0], ValueError, "index"),
        (lambda: kv.arrays.view(np.zeros(3)).__dlpack__(stream=5), TypeError, "options"),
        (lambda: kv.arrays.view(np.zeros(3)).__dlpack__(copy="x"), ValueError, "options"),
        (lambda: kv.block_hashes([1, [2]], 1), ValueError, "token_ids"),
        (lambda: kv.device("cuda:²"), ValueError, "device"),
        (lambda: kv.device("cuda:" + "9" * 5000), ValueError, "device"),
        (lambda: kv.device("host:"), ValueError, "device"),
        (lambda: setattr(kv.config, "strict_arch", {}), ValueError, "strict_arch"),
        (lambda: kv.explore(lambda device: 1, schedules=float("nan")), TypeError, "schedules"),
        (lambda: kv.explore(lambda device: 1, schedules=b"3"), TypeError, "schedules"),
        (lambda: kv.explore(lambda device: 1, schedules=np.timedelta64(3)), TypeError, "schedules"),
        (lambda: kv.explore(lambda device: 1, seed="x"), TypeError, "seed"),
        (lambda: kv.explore(lambda device: 1, replay=0.5), TypeError, "replay"),
        (lambda: kv.explore(lambda device: 1, replay=[0.5]), TypeError, "replay"),
        (lambda: kv.rope_table(2**62, 8), ValueError, "max_positions"),
        (lambda: kv.rope_table(16, np.uint64(2**63)), ValueError, "max_positions"),
        (lambda: kv.rope_table(16, 8, base=HUGE), ValueError, "base"),
    ],
)  # fmt: skip
def test_a_function_names_what_it_cannot_take(call, error, name):
    raises_by_name(call, error, name)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": []}, {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": HUGE}, {"rope_type": "linear", "factor": float("nan")},
        {**YARN, "beta_fast": -1.0}, {**YARN, "beta_fast": 1e308},
        {**YARN, "beta_slow": 1e-320}, {**YARN, "original_max_position_embeddings": 0},
        {**YARN, "factor": -1}, {**YARN, "rope_theta": 1.0},
        {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 1,
         "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    ],
    ids=str,
)  # fmt: skip
def test_a_scaling_without_a_table(scaling):
    raises_by_name(lambda: kv.rope_table(16, 8, scaling=scaling), ValueError, "scaling")


def test_numbers_of_numpy_do_not_wrap(device):
    table = kv.rope_table(np.int8(100), np.int8(4), device=device)
    assert table.shape == (100, 4)
    assert kv.explore(lambda device: 1, schedules=np.int8(1), seed=-(2**40)).ok


# Index arrays ----------------------------------------------------------------------------------


def test_page_sizes_beyond_int32(device):
    table, lengths = (device.asarray(np.zeros(s, np.int32)) for s in ((2, 3), (2,)))
    for size in (2**31, 2**70):
        raises_by_name(lambda s=size: kv.page_table_csr(table, lengths, s), ValueError, "page_size")


def test_lengths_whose_sum_wraps(device):
    """Four of 2**62 tokens came to none at all in 64 bits."""
    table, lengths = device.asarray(np.zeros((4, 1), np.int64)), device.asarray(np.ones(4, int))
    appended = device.asarray(np.full(4, 2**62))
    raises_by_name(lambda: kv.slot_mapping(table, lengths, appended, 4), ValueError, "append_lens")


def test_misaligned_page_lists(device):
    """The kernel read them in place, which a GPU cannot."""
    source, target = pool(device), pool(device)
    raw = device.zeros(17, np.uint8)
    pages = raw[1:].view(np.int64)
    raises_by_name(
        lambda: kv.transfer_pages(source, target, pages, [1, 2]), ValueError, "src_pages"
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"method": np.array("auto")}, ValueError), ({"convert": TWO}, TypeError),
        ({"layers": np.array([0], "m8[s]")}, TypeError),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_a_transfer(device, changes, error):
    source, target = pool(device), pool(device)
    raises_by_name(
        lambda: kv.transfer_pages(source, target, [0], [1], **changes), error, next(iter(changes))
    )


# Devices and streams ---------------------------------------------------------------------------


@pytest.fixture
def host():
    return kv.device("host")


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "name"),
    [
        (-1, "fp32", ValueError, "shape"), ((2, -1), "fp32", ValueError, "shape"),
        (2**70, "fp32", ValueError, "shape"), ((0, 2**70), "fp32", ValueError, "shape"),
        ("x", "fp32", TypeError, "shape"), (None, "fp32", TypeError, "shape"),
        ((1.0,), "fp32", TypeError, "shape"), ((2,), object, TypeError, "dtype"),
        ((Unknown(),), "fp32", TypeError, "shape"),
        ((2,), ("f4", (2,)), TypeError, "dtype"), ((2,), "\ud800", TypeError, "dtype"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["empty", "zeros", "empty_pinned"])
def test_arrays_that_cannot_be_allocated(host, method, shape, dtype, error, name):
    raises_by_name(lambda: getattr(host, method)(shape, dtype), error, name)


def test_what_is_no_array_of_numbers(host):
    for value in (np.array([None]), [[1], [1, 2]]):
        raises_by_name(lambda v=value: host.asarray(v), TypeError, "array")


def test_the_host_device_leaves_arrays_of_a_gpu_alone(host):
    """It read and wrote at addresses that mean nothing here."""
    own, there = np.zeros(4, np.float32), np.ones(4, np.float32)
    elsewhere = kv.ArrayView(there.ctypes.data, (4,), (4,), "fp32", "cuda:7", owner=there)
    raises_by_name(lambda: host.copy(elsewhere, own), ValueError, "dst")
    raises_by_name(lambda: host.copy(own, elsewhere), ValueError, "src")
    raises_by_name(lambda: host.to_numpy(elsewhere), ValueError, "array")
    assert there.all() and not own.any()


def test_a_stream_takes_functions_only(host):
    stream = host.stream()
    for queue in (stream, host.as_stream(None)):
        raises_by_name(lambda q=queue: q.call(3), TypeError, "function")
        raises_by_name(lambda q=queue: q.wait(3), TypeError, "other")
    with stream.capture():
        raises_by_name(lambda: stream.on_launch(None, print), TypeError, "before")
        raises_by_name(lambda: stream.on_launch(print, None), TypeError, "after")
    stream.synchronize()


@pytest.mark.parametrize("function", [kv.fork, kv.join])
def test_fork_and_join_say_which_is_no_stream(host, function):
    stream = host.stream()
    raises_by_name(lambda: function(3, stream), TypeError, "main")
    raises_by_name(lambda: function(stream, stream, 3), TypeError, "others")


def test_a_device_waits_for_streams_that_nobody_holds(host):
    opened, ran = threading.Event(), []
    stream = host.stream()
    stream.call(lambda: (opened.wait(20), ran.append(1)))
    del stream
    threading.Timer(0.05, opened.set).start()
    host.synchronize()
    assert ran == [1]


@pytest.mark.parametrize("name", BROKEN_PATHS)
def test_names_that_no_file_has(device, tmp_path, name):
    with kv.timeline() as line:
        pass
    raises_by_name(lambda: line.save(name), ValueError, "path")
    cache = kv.PagedKVCache(**CACHE, device=device)
    cache.add_sequence("a")
    raises_by_name(lambda: cache.save_sequence("a", name), ValueError, "path")
    raises_by_name(lambda: cache.load_sequence("b", name), ValueError, "path")
    pools = pool(device), pool(device, placement="pinned")
    tiers = {"disk": name, "disk_bytes": 1 << 16}
    raises_by_name(lambda: kv.TieredCache(*pools, **tiers), ValueError, "disk")


# Pools and caches ------------------------------------------------------------------------------


def test_an_array_of_too_many_layers(device):
    """Each got a view, for hours."""
    one = device.zeros((1, 4, 2, 2, 4), np.float16)
    many = np.broadcast_to(one, (2**33, 4, 2, 2, 4)) if device.kind == "host" else None
    if many is None:
        pytest.skip("the view is NumPy's")
    raises_by_name(lambda: kv.KVPool.wrap(many, many), ValueError, "k")
    first = np.broadcast_to(one[0][:, :, None], (4, 2, 2**33, 2, 4))
    raises_by_name(lambda: kv.KVPool.wrap(first, first, layout="page_first"), ValueError, "k")


def test_an_array_without_layers(device):
    none = device.zeros((0, 4, 2, 2, 4), np.float16)
    raises_by_name(lambda: kv.KVPool.wrap(none, none), ValueError, "k")


def test_layers_that_were_written(device):
    number = np.array(0)
    for layers, error in (
        (3, TypeError),
        (number, TypeError),
        ([9], ValueError),
        ([[]], TypeError),
    ):
        torch = pytest.importorskip("torch")
        if device.kind != "host":
            pytest.skip("the tensors are on the host")
        tensors = [torch.zeros(2, 4, 2, 2, 4) for _ in "kv"]
        wrapped = kv.KVPool.wrap(*tensors)
        raises_by_name(lambda w=wrapped, x=layers: w.note_written(x), error, "layers")


def test_a_layer_with_strides_that_torch_has_not(device):
    pytest.importorskip("torch")
    if device.kind != "host":
        pytest.skip("arrays of NumPy are on the host")
    backwards = np.zeros((2, 4, 2, 4), np.float32)[:, ::-1]
    wrapped = kv.KVPool.wrap([backwards], [backwards.copy()])
    raises_by_name(lambda: wrapped.torch_k(0), ValueError, "layer")


@pytest.mark.parametrize("num_pages", [2**60, 2**62, 2**70])
def test_more_pages_than_any_memory_has(num_pages):
    with pytest.raises(MemoryError, match="num_pages"):
        kv.PageAllocator(num_pages)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"disk": [], "disk_bytes": 1 << 16}, TypeError), ({"disk_bytes": 2**70}, ValueError),
        ({"disk_bytes": -1}, ValueError), ({"write": np.array(["through", "back"])}, ValueError),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_a_tiered_cache(device, tmp_path, changes, error):
    options = {"disk": tmp_path / "blocks", "disk_bytes": 1 << 16, **changes}
    name = next(iter(changes))
    pools = pool(device), pool(device, placement="pinned")
    raises_by_name(lambda: kv.TieredCache(*pools, **options), error, name)


def misaligned_table(device):
    rows = kv.rope_table(16, 8, device=device)
    raw = device.zeros(16 * 8 * 4 + 4, np.uint8)
    return raw[1 : 1 + 16 * 8 * 4].view(np.float32).reshape(rows.shape)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"cascade": TWO}, ValueError), ({"rope": misaligned_table}, ValueError),
        ({"k_scale": HUGE, "dtype": "int8"}, ValueError),
        ({"rope_mode": np.array(["normal", "none"])}, ValueError),
        ({"demotion": TWO}, TypeError), ({"demotion": ""}, TypeError),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_options_of_a_paged_cache(device, changes, error):
    made = {n: v(device) if callable(v) else v for n, v in changes.items()}
    raises_by_name(
        lambda: kv.PagedKVCache(**{**CACHE, **made}, device=device), error, next(iter(changes))
    )


def test_a_batch_that_is_no_list(device):
    cache = kv.PagedKVCache(**CACHE, device=device)
    raises_by_name(lambda: cache.begin_forward(np.array("a"), [1]), TypeError, "seqs")
    raises_by_name(lambda: cache.commit_token_tree(np.array("a"), [1]), TypeError, "seqs")


# Half done -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("out", ["query", "part of query", "pool", "misaligned"])
def test_attention_that_cannot_write_stores_no_keys(device, out, rope):
    """Keys and values of the step were stored before the error."""
    table = kv.rope_table(16, 8, device=device) if rope else None
    cache = kv.PagedKVCache(**CACHE, rope=table, device=device)
    cache.add_sequence("a")
    rows = every_call.array(device, 3, 4, 8)
    raw = device.zeros(2 * 4 * 8 * 4 + 4, np.uint8)
    results = {
        "query": rows[:2], "part of query": rows[1:],
        "pool": cache.pool.k(0).reshape(-1)[: 2 * 4 * 8].reshape(2, 4, 8),
        "misaligned": raw[1 : 1 + 2 * 4 * 8 * 4].view(np.float32).reshape(2, 4, 8),
    }  # fmt: skip
    cache.begin_forward(["a"], [2])
    before = [np.array(device.to_numpy(part)) for part in (cache.pool.k(0), cache.pool.v(0), rows)]
    key = every_call.array(device, 2, 2, 8, seed=1)

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


@pytest.mark.parametrize("varies", [False, True])
def test_a_bound_copy_of_four_bit_pages(device, varies):
    """Codes and scales are two arrays, which a bound call took for one."""
    rows = device.asarray(np.random.default_rng(0).integers(0, 256, (4, 2, 18), np.uint8))
    cache = kv.view_as(rows, "nvfp4")
    src, dst = (device.asarray(np.array(pages)) for pages in ([0], [3]))
    if varies:
        kv.bind(kv.copy_pages, kv.vary(cache), src, dst)(cache=cache)
    else:
        kv.bind(kv.copy_pages, cache, kv.vary(src), dst)(src_pages=src)
    device.synchronize()
    copied = device.to_numpy(rows)
    assert np.array_equal(copied[3], copied[0]) and not np.array_equal(copied[1], copied[0])


def test_a_captured_second_stream_is_refused_before_keys_are_rotated(device):
    arguments = every_call.rope_store_kv(device)
    key = arguments["key"]
    before = device.to_numpy(key).copy()
    main, other = device.stream(), device.stream()
    with pytest.raises(kv.CaptureError), other.capture():
        kv.rope_store_kv(**arguments, stream=main, alt_stream=other)
    device.synchronize()
    assert np.array_equal(device.to_numpy(key), before)


@pytest.mark.parametrize("value", [{}, np.zeros(2), 1.5, "", None])
@pytest.mark.parametrize("name", ["recent", "first"])
def test_numbers_of_tokens_that_are_no_count(name, value):
    counts = {"recent": 3, name: value}
    raises_by_name(lambda: kv.Demotion("fp8_e4m3", **counts), TypeError, name)
