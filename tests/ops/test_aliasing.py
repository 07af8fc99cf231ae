"""Arrays of a call that share bytes: what addresses decide, whatever was called before."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from valid_calls import EXAMPLES, array

import kvcupy as kv
from kvcupy.arrays import ArrayView
from kvcupy.ops import call as op_call
from kvcupy.ops.call import Aliasing

ITEMSIZES = {"int8": 1, "fp16": 2, "fp32": 4, "int64": 8}


@st.composite
def layouts(draw):
    """Shapes and strides of up to three axes, broadcast and reversed ones among them."""
    format = draw(st.sampled_from(sorted(ITEMSIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    steps = st.integers(-6, 6).map(lambda n: n * ITEMSIZES[format])
    return shape, tuple(draw(steps) for _ in shape), format


def numpy_of(memory, at, layout):
    shape, strides, format = layout
    bits = np.dtype((np.void, ITEMSIZES[format]))
    return np.ndarray(shape, bits, memory, at, strides)


@settings(max_examples=examples(500), deadline=None)
@given(layouts(), layouts(), st.lists(st.integers(-160, 160), min_size=1, max_size=8))
def test_what_is_refused_is_what_numpy_says_shares_memory(first, second, distances):
    """For every distance of two arrays, after the check was made for another one."""
    memory, middle = bytearray(2048), 1024  # room for any of them at any distance
    views = [ArrayView(1 << 20, *layout, "host") for layout in (first, second)]
    check = Aliasing(views, outputs=(0,))
    size = ITEMSIZES[second[2]]
    for distance in (d * size for d in distances if abs(d * size) < 320):
        shares = np.shares_memory(
            numpy_of(memory, middle, first), numpy_of(memory, middle + distance, second)
        )
        start = 5 << 30
        assert check.allows((start, start + distance)) == (not shares), distance


@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(3, 7), st.integers(0, 3),
    st.lists(st.tuples(st.integers(-24, 24), st.integers(-24, 24)), min_size=1, max_size=6),
    st.integers(1, 5),
)  # fmt: skip
def test_an_operation_refuses_what_shares_memory(pages, width, pitch, count, places, step):
    """Pages and page lists in one buffer, at one place after another: one plan, many distances."""
    raw = np.full(120, -1)  # pairs to be skipped
    middle = 48
    cache = np.lib.stride_tricks.as_strided(raw[middle:], (pages, width), (8 * pitch, 8))
    for first, second in places:
        lists = [raw[middle + at :][: count * step : step] for at in (first, second)]
        shares = any(np.shares_memory(cache, one) for one in lists)
        try:
            kv.copy_pages(cache, *lists)
        except ValueError as error:
            assert shares and "expected memory of its own" in str(error)
        else:
            assert not shares
    assert (raw == -1).all()


# Operations -----------------------------------------------------------------------------------


@pytest.fixture
def looked_at(monkeypatch):
    """The operations that have looked at their arrays again, in order."""
    monkeypatch.setattr(op_call, "_plans", {})
    log, accessed = [], op_call.Plan.accessed

    def spy(self, pointers, arrays):
        log.append(str(self.operation))
        return accessed(self, pointers, arrays)

    monkeypatch.setattr(op_call.Plan, "accessed", spy)
    return log


@pytest.mark.parametrize("operation", EXAMPLES)
def test_new_addresses_are_not_looked_at(device, looked_at, operation):
    """A model's activations are at other addresses in every step."""
    kept = [EXAMPLES[operation](device) for _ in range(4)]
    for call in kept:
        getattr(kv, operation)(**call)
    device.synchronize()
    assert looked_at == []


def interleaved(device):
    """K and V of pages that lie side by side: their ranges intersect, their bytes do not."""
    pages = device.zeros((2, 2, 4, 2, 8), np.float32)
    rows = {"key": array(device, 3, 2, 8), "value": array(device, 3, 2, 8)}
    slots = device.asarray(np.array([5, -1, 0]))
    return {**rows, "k_cache": pages[:, 0], "v_cache": pages[:, 1], "slot_mapping": slots}


def test_interleaved_caches_are_tested_once(device, looked_at):
    op_call._share_bytes.cache_clear()
    for _ in range(3):
        call = interleaved(device)
        kv.store_kv(**call)
        device.synchronize()
        assert np.array_equal(
            device.to_numpy(call["k_cache"])[1, 1], device.to_numpy(call["key"])[0]
        )
    info = op_call._share_bytes.cache_info()
    assert looked_at == [] and info.hits >= 2 and info.misses <= 2


def test_one_byte_in_common_is_refused_after_calls_that_were_right(device, looked_at):
    kv.store_kv(**interleaved(device))
    call = interleaved(device)
    raw = device.zeros((2 * 2 * 4 * 2 * 8 + 1,), np.float32)
    pages = raw[:-1].reshape(2, 2, 4, 2, 8)
    call["k_cache"] = pages[:, 0]
    call["v_cache"] = raw[63 : 63 + 192].reshape(3, 64)[::2].reshape(2, 4, 2, 8)
    with pytest.raises(ValueError, match=r"^k_cache: expected memory of its own, .* v_cache's"):
        kv.store_kv(**call)
    kv.store_kv(**interleaved(device))


def test_rows_beside_after_rows_in_place(device, looked_at):
    call = EXAMPLES["apply_rope"](device)
    in_place = {**call, "query_out": call["query"]}
    kv.apply_rope(**in_place)
    raw = device.zeros((4 * 4 * 8,), np.float32)
    halves = {"query": raw[:96].reshape(3, 4, 8), "query_out": raw[32:].reshape(3, 4, 8)}
    with pytest.raises(ValueError, match=r"^query_out: expected memory of its own, .* query's"):
        kv.apply_rope(**{**call, **halves})
    kv.apply_rope(**in_place)


# Which plans stay -----------------------------------------------------------------------------


def pages_of(device, count):
    return {**EXAMPLES["copy_pages"](device), **{n: device.asarray(np.full(count, -1))
                                     for n in ("src_pages", "dst_pages")}}  # fmt: skip


def counts():
    """How many pages the plans that are kept copy, in no order."""
    return sorted(known.num_pairs for known in op_call._plans.values())


@pytest.fixture
def four_plans(monkeypatch):
    monkeypatch.setattr(op_call, "_plans", {})
    monkeypatch.setattr(op_call, "_MAX_PLANS", 4)


def test_the_oldest_plan_leaves(device, four_plans):
    for count in (1, 2, 3, 4, 1, 5, 1, 6, 3):
        kv.copy_pages(**pages_of(device, count))
    assert counts() == [3, 4, 5, 6]


def test_a_plan_that_is_always_used_is_made_once(device, four_plans, monkeypatch):
    """Though it has left, for the last plan of an operation is kept."""
    made, plan = [], op_call.Operation.plan
    monkeypatch.setattr(
        op_call.Operation, "plan", lambda self, *call: made.append(self.name) or plan(self, *call)
    )
    for count in range(1, 30):
        kv.copy_pages(**pages_of(device, count))
        kv.store_kv(**EXAMPLES["store_kv"](device))
    assert made.count("store_kv") == 1 and made.count("copy_pages") == 29


def test_many_threads_take_and_evict_plans(four_plans):
    """On the host device: another processor would not make it harder."""
    device = kv.device("host")
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for count in rng.integers(1, 12, 150):
                call = pages_of(device, int(count))
                call["src_pages"][:], call["dst_pages"][:] = 0, 3
                kv.copy_pages(**call)
                assert np.array_equal(call["cache"][3], call["cache"][0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and len(op_call._plans) == 4
