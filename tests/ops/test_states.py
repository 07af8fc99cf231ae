"""`store_state`, `gather_state` and `update_conv_state`, by what a user sees of them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Case
from kernel_checks import lay_out
from stream_cases import Log

import kvcupy as kv
from kvcupy import observe

SLOTS = (5, 0, 3)


# store_state, gather_state -----------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int64, np.complex128])
@pytest.mark.parametrize("shape", [(24, 3), (2, 5, 8), (1,), (), (7, 1, 3)])
def test_any_dtype_and_shape(device, dtype, shape):
    case = Case(device, 1)
    rows, cache = case.bits((3, *shape), dtype), case.bits((8, *shape), dtype)
    case.call("store_state", rows, cache, [*SLOTS])
    case.call("gather_state", cache, [7, *SLOTS[1:]], out=rows)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_formats_that_numpy_does_not_know(device, fmt):
    case = Case(device, 2)
    rows, cache = case.input(fmt, (3, 6, 5)), case.input(fmt, (8, 6, 5))
    case.call("store_state", rows, cache, [*SLOTS])
    case.call("gather_state", cache, [*SLOTS], out=rows)


def test_two_arrays_take_one_launch(device):
    log = Log()
    rows = tuple(device.zeros((2, n), np.float32) for n in (6, 4096))
    caches = tuple(device.zeros((4, n), np.float32) for n in (6, 4096))
    slots = device.asarray(np.array([3, 1]))
    launched, launch = [], device.launch
    try:
        device.launch = lambda *a: launched.append(a) or launch(*a)
        with observe.attached(log):
            kv.store_state(rows, caches, slots)
            conv, ssm = kv.gather_state(caches, slots)
    finally:
        del device.launch
    assert len(launched) == 2 and (conv.shape, ssm.shape) == ((2, 6), (2, 4096))
    store, gather = log.operations
    assert (store.name, gather.name) == ("store_state", "gather_state")
    written = [[a.name for a in each.writes] for each in (store, gather)]
    assert written == [["caches[0]", "caches[1]"], ["out[0]", "out[1]"]]
    assert all(a.slots is not None for a in (*store.writes, *gather.reads) if "caches" in a.name)


@pytest.mark.covering
@pytest.mark.parametrize("misalign", [0, 1, 4])
@pytest.mark.parametrize("row_bytes", [1, 2, 3, 8, 15, 16, 17, 100, 257, 4099, 70_000])
def test_rows_of_any_size(device, row_bytes, misalign):
    case = Case(device, 5)
    rows = case.bits((3, row_bytes), misalign=misalign)
    cache = case.bits((8, row_bytes), misalign=2 * misalign)
    case.call("store_state", rows, cache, [*SLOTS])
    case.call("gather_state", cache, [*SLOTS], out=rows)


def test_what_a_gather_allocates(device):
    caches = device.asarray(np.ones((4, 3), np.float16)), device.asarray(np.ones((4, 2, 5)))
    slots = device.asarray(np.array([3, -1]))
    rows = kv.gather_state(caches, slots)
    assert isinstance(rows, tuple)
    for row, cache in zip(rows, caches, strict=True):
        assert row.dtype == cache.dtype
        numbers = device.to_numpy(row)
        assert (numbers[0] == 1).all() and not numbers[1].any()
    alone = kv.gather_state(caches[1], slots)
    assert np.array_equal(device.to_numpy(alone), device.to_numpy(rows[1]))
    assert kv.gather_state(list(caches), slots, out=rows) == rows


def test_rows_of_two_gigabytes_are_refused(device):
    row = kv.ArrayView(1 << 44, (2, 2**31), (2**31, 1), "int8", device.name)
    with pytest.raises(ValueError, match=r"^caches: expected rows of less than 2 GiB"):
        kv.store_state(row, row, device.asarray(np.array([0, 1])))


# update_conv_state -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["inputs last", "channels last"])
def test_steps_add_up(device, order):
    """Chunks of any length, the last of them one by one, leave what all tokens at once do."""
    case = Case(device, 13)
    x = case.bits((40, 16), np.float16, name="x")
    once = lay_out(case, 4, 16, 5, np.float16, order)
    case.call("update_conv_state", x, once, [3], [0, 40])
    by_steps = lay_out(case, 4, 16, 5, np.float16, order)
    at = 0
    for chunk in (3, 0, 1, 17, 5, 6, *[1] * 8):
        case.call("update_conv_state", x.sub(lambda a, i=at: a[i:]), by_steps, [3], [0, chunk])
        at += chunk
    assert at == 40
    for cache in (once, by_steps):
        assert cache.view[3].tobytes() == x.view[-5:].T.tobytes()


def test_what_transformers_keeps(device):
    """Of one sequence after another, in a prefill of any length and in steps."""
    torch = pytest.importorskip("torch")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if not hasattr(cache_utils, "LinearAttentionLayer"):
        pytest.skip("this transformers keeps the states of convolutions in its models")
    rng, inputs = np.random.default_rng(20), 4
    lengths = [2, 4, 1, 9]
    layers = [cache_utils.LinearAttentionLayer() for _ in lengths]
    cache = device.zeros((6, 8, inputs), np.float32)
    slots = [4, 0, 5, 2]
    for new in (lengths, [1, 1, 1, 1], [1, 3, 6, 2]):
        x = rng.standard_normal((sum(new), 8)).astype(np.float32)
        sums = np.cumsum([0, *new])
        for layer, start, end in zip(layers, sums, sums[1:], strict=False):
            own = torch.from_numpy(x[start:end].T.copy())[None]
            layer.update_conv_state(own, conv_kernel_size=inputs)
        kv.update_conv_state(
            device.asarray(x), cache, device.asarray(np.array(slots)), device.asarray(sums)
        )
        got = device.to_numpy(cache)
        for layer, slot in zip(layers, slots, strict=True):
            assert np.array_equal(got[slot], layer.conv_states[0][0].numpy())
    assert not got[[1, 3]].any()


@pytest.mark.parametrize(
    "sums",
    [
        (0, 2, 5, 10), (0, 10, 5, 9), (-1, 2, 5, 9), (0, 5, 2, 9), (10, 10, 10, 10),
        (0, 2**31, 2**31 + 1, 9), (0, -(2**63), 2**63 - 1, 9), (0, 0, 0, 2**40),
    ],
)  # fmt: skip
def test_sums_that_are_none(device, sums):
    """Sequences that they do not place within `x` are left alone, and recorded."""
    case = Case(device, 16)
    x, cache = case.bits((9, 8), name="x"), case.bits((6, 8, 3), name="cache")
    case.call("update_conv_state", x, cache, [1, 0, 4], [*sums])


def test_zero_sequences_tokens_channels_and_inputs(device):
    case = Case(device, 17)
    cache = case.bits((6, 8, 3), name="cache")
    case.call("update_conv_state", case.bits((0, 8), name="x"), cache, [], [0])
    case.call("update_conv_state", case.bits((0, 8), name="x"), cache, [1, 2], [0, 0, 0])
    case.call("update_conv_state", case.bits((4, 0), name="x"), case.bits((6, 0, 3)), [1], [0, 4])
    case.call("update_conv_state", case.bits((4, 8), name="x"), case.bits((6, 8, 0)), [1], [0, 4])
    case.call("update_conv_state", case.bits((4, 8), name="x"), case.bits((0, 8, 3)), [0], [0, 4])


def test_slots_of_two_gigabytes_are_refused(device):
    x = kv.ArrayView(1 << 44, (2, 2**30), (2**30, 1), "int8", device.name)
    cache = kv.ArrayView(1 << 45, (2, 2**30, 2), (2**31, 2, 1), "int8", device.name)
    slots, sums = device.asarray(np.array([0])), device.asarray(np.array([0, 1]))
    with pytest.raises(ValueError, match=r"^cache: expected slots of less than 2 GiB"):
        kv.update_conv_state(x, cache, slots, sums)
