"""How threads are laid over rows, and that no such choice changes what is stored."""

from __future__ import annotations

import itertools
import sys

import kernel_checks
import numpy as np
import pytest
from helpers import Case, examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from valid_calls import checks_of, name_check

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices.host import HostDevice
from kvcupy.ops.launch import spread, widest

work = given(
    num_rows=st.one_of(st.integers(1, 300), st.integers(1, 2**31 - 1)),
    words=st.one_of(st.integers(1, 100), st.integers(1, 2**20)),
    multiprocessors=st.sampled_from([1, 2, 8, 84, 132, 160, 100_000]),
    options=st.fixed_dictionaries(
        {"whole_warps": st.booleans(), "warp_lanes": st.sampled_from([1, 32])}
    ),
)
quick = settings(max_examples=examples(500), deadline=None, database=None)


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


@quick
@work
@example(num_rows=2**31 - 1, words=1, multiprocessors=1, options={})
@example(num_rows=1, words=1, multiprocessors=100_000, options={})
def test_every_row_has_its_lanes(num_rows, words, multiprocessors, options):
    shape = spread(num_rows, words, multiprocessors, **options)
    (grid, *flat_grid), (block, *flat_block) = shape.grid, shape.block
    assert [*flat_grid, *flat_block] == [1, 1, 1, 1]
    assert is_power_of_two(shape.lanes)
    assert shape.lanes == 1 << shape.lane_shift
    assert block % shape.lanes == 0
    # Row r belongs to the threads with global number r * lanes and on: each once, none too few.
    rows_per_block = block // shape.lanes
    assert grid * rows_per_block >= num_rows
    assert (grid - 1) * rows_per_block < num_rows
    # What CUDA allows, and whole warps where threads step together.
    smallest = 32 if options.get("warp_lanes", 32) == 32 or options.get("whole_warps") else 8
    assert smallest <= block <= 1024
    assert block % smallest == 0
    assert 1 <= grid <= 2**31 - 1


@quick
@work
def test_lanes_are_not_wasted(num_rows, words, multiprocessors, options):
    lanes = spread(num_rows, words, multiprocessors, **options).lanes
    assert lanes < 2 * words or lanes == 1
    assert lanes >= min(words, options["warp_lanes"])


@quick
@work
def test_small_work_is_spread_over_the_device(num_rows, words, multiprocessors, options):
    """With a block for each multiprocessor, or as many blocks as there are rows or warps."""
    shape = spread(num_rows, words, multiprocessors, **options)
    warps = -(-num_rows * shape.lanes // 32)
    assert shape.grid[0] >= min(multiprocessors, num_rows, warps) // 2
    alone = options["warp_lanes"] == 1 and not options["whole_warps"]
    smallest, blocks = (8, 4) if alone else (32, 1)
    if num_rows * shape.lanes < multiprocessors * blocks * smallest:
        assert shape.block[0] == max(smallest, shape.lanes)


def test_workers_share_what_takes_long():
    """A row a thread: many small blocks, for a helper to find some left when it comes."""
    some = spread(128, 128, 2, warp_lanes=1)
    assert (some.grid, some.block) == ((8, 1, 1), (16, 1, 1))
    few = spread(3, 128, 2, warp_lanes=1)
    assert (few.grid, few.block) == ((1, 1, 1), (8, 1, 1))


@quick
@work
def test_a_thread_has_few_words_in_flight(num_rows, words, multiprocessors, options):
    lanes = spread(num_rows, words, multiprocessors, **options).lanes
    assert words <= 4 * lanes or lanes == {1: 1, 32: 512}[options["warp_lanes"]]


def test_geometries_of_usual_work():
    """8 heads of 128 bf16 elements: one row of 128 words where they join."""
    one_token = spread(1, 128, 132)
    assert (one_token.lanes, one_token.grid, one_token.block) == (128, (1, 1, 1), (128, 1, 1))
    many = spread(4096, 128, 132)
    assert (many.lanes, many.grid, many.block) == (32, (1024, 1, 1), (128, 1, 1))
    heads = spread(4096 * 8, 16, 132)
    assert (heads.lanes, heads.grid) == (16, (4096, 1, 1))


@quick
@given(st.lists(st.integers(0, 2**40), max_size=6))
def test_widest_divides_all_and_no_wider_word_does(numbers):
    word = widest(numbers)
    assert word in (1, 2, 4, 8, 16)
    assert all(n % word == 0 for n in numbers)
    assert word == 16 or any(n % (2 * word) for n in numbers)


def test_widest_takes_any_iterable():
    assert widest(n for n in (64, 24)) == 8
    assert widest([]) == 16


# Stores under every geometry ------------------------------------------------------------------


@pytest.fixture(params=[(1, 1), (1, 32), (8, 32), (132, 32), (100_000, 32)], ids=str)
def host(request, monkeypatch):
    """A host device that claims so many multiprocessors, whose warps are so wide."""
    device = HostDevice()
    device.sm_count, device.warp_lanes = request.param
    monkeypatch.setitem(devices._devices, "host", device)
    monkeypatch.setattr(kv.config, "fallback", "error")
    forget_plans(monkeypatch)
    return device


def forget_plans(monkeypatch):
    for name, module in list(sys.modules.items()):
        if name.startswith("kvcupy.ops.") and hasattr(module, "_plans"):
            monkeypatch.setattr(module, "_plans", {})


def store_of_each_kind(case, shape, v_width):
    """A copy, a conversion, and one with dynamic scales."""
    tokens, heads, width = shape
    slots = case.rng.permutation(np.arange(-1, tokens + 3))[:tokens]
    for source, target, dynamic in (
        ("bf16", "bf16", False), ("bf16", "fp8_e4m3", False), ("fp32", "int8", True),
    ):  # fmt: skip
        key, value = case.input(source, shape), case.input(source, (tokens, heads, v_width))
        caches = [case.output(target, (tokens + 2, heads, w)) for w in (width, v_width)]
        options = {}
        if dynamic:
            options = {f"{s}_scale_cache": case.output("fp32", (tokens + 2, heads)) for s in "kv"}
        elif target == "fp8_e4m3":
            options = {"k_scale": case.rng.uniform(0.5, 2, heads).astype(np.float32)}
        case.store_kv(key, value, *caches, slots, **options)


SHAPES = [(1, 1, 1), (1, 1, 40), (3, 2, 128), (2, 1, 4096), (1, 1, 9000), (70, 3, 33), (257, 1, 8)]


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_geometry_changes_what_is_stored(host, shape):
    for v_width in (shape[2], max(1, shape[2] // 3)):
        store_of_each_kind(Case(host, shape), shape, v_width)


def test_the_claim_decides_the_geometry(host, monkeypatch):
    """The control of the test above: rows are really shared by one warp, or by several."""
    launched = []
    launch = host.launch
    monkeypatch.setattr(host, "launch", lambda f, *a: launched.append(a[:3]) or launch(f, *a))
    case = Case(host, 1)
    store_of_each_kind(case, (2, 1, 4096), 4096)
    threads = [grid[0] * block[0] for grid, block, _ in launched]
    assert len(threads) == 3
    if host.warp_lanes == 1:
        assert threads == [8, 8, 32]
    else:  # two rows of 512 words: all the lanes that a row may have, or four words a lane
        assert threads == {1: [256] * 3, 8: [1024] * 3}.get(host.sm_count, [1024] * 3)


# Every operation ------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 16, 24])
def test_a_few_long_pages_are_spread_over_the_device(host, monkeypatch, odd):
    """As many blocks as there are multiprocessors, or as there is work for."""
    grids, launch = [], host.launch
    monkeypatch.setattr(
        host, "launch", lambda f, grid, *rest: (grids.append(grid[0]), launch(f, grid, *rest))
    )
    case = Case(host, 15)
    case.call("copy_pages", case.bits((4, 2**20 + odd)), [0, 3], [2, 1])
    blocks_of_work = 2 * 2**20 // (8 * 2**10 if host.warp_lanes == 32 else 8 * 64 * 2**10)
    assert len(grids) == 1
    assert grids[0] >= min(host.sm_count, blocks_of_work)


@pytest.mark.usefixtures("lenient_host")
@pytest.mark.parametrize("tokens", [300, 7000])
def test_more_rows_than_a_cache_holds(host, tokens):
    """Rows of 2 KiB each, stored in any order and gathered, some of them skipped."""
    rng = np.random.default_rng(tokens)
    k, v = rng.integers(0, 256, (2, tokens, 8, 256), dtype=np.uint8).view(np.float16)
    caches = np.zeros((2, tokens + 5, 8, 128), np.float16)
    slots = rng.permutation(tokens + 5)[:tokens]
    slots[::97] = -1
    kv.store_kv(k, v, *caches, slots)
    gathered = kv.gather_kv(*caches, slots)
    for rows, cache, got in zip((k, v), caches, gathered, strict=True):
        want = np.where((slots >= 0)[:, None, None], rows.view(np.uint16), 0)
        np.testing.assert_array_equal(got.view(np.uint16), want)
        np.testing.assert_array_equal(cache[slots[slots >= 0]].view(np.uint16), want[slots >= 0])


def memory_of(case):
    """All bytes of a check: its buffers, and the pools of a transfer."""
    pools = [memory for pool in getattr(case, "pools", ()) for memory in pool.memories]
    bits = (np.ascontiguousarray(m.download()).reshape(-1).view(np.uint8) for m in pools)
    return [*(b.read() for b in case.buffers), *bits]


COPIES = checks_of(
    "store_kv", "store_mla", "gather_kv", "apply_rope", "rope_store_kv", "copy_pages",
    "slot_mapping", "update_conv_state",
)  # fmt: skip


@pytest.mark.parametrize("check", [*COPIES[::3], *kernel_checks.TRANSFERS], ids=name_check)
def test_no_geometry_changes_a_result(monkeypatch, check):
    """Each is as the reference has it, and all are equal bit for bit, but for sums of squares."""
    found = []
    for multiprocessors, warp_lanes in itertools.product((1, 132), (1, 32)):
        device = HostDevice()
        device.sm_count, device.warp_lanes = multiprocessors, warp_lanes
        monkeypatch.setitem(devices._devices, "host", device)
        monkeypatch.setattr(kv.config, "fallback", "error")
        forget_plans(monkeypatch)
        found.append(memory_of(check(device)))
    assert len(found[0]) >= 3
    for other in found[1:] if "norm" not in name_check(check) else ():
        for index, (got, want) in enumerate(zip(other, found[0], strict=True)):
            assert np.array_equal(got, want), f"buffer {index}"
