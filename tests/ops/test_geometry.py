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
    # None without a word, and few words in flight for each.
    warp = options.get("warp_lanes", 32)
    assert shape.lanes < 2 * words or shape.lanes == 1
    assert words <= 4 * shape.lanes or shape.lanes == {1: 1, 32: 512}[warp]
    # What CUDA allows, and whole warps where threads step together.
    smallest = 32 if warp == 32 or options.get("whole_warps") else 8
    assert smallest <= block <= 1024
    assert block % smallest == 0
    assert 1 <= grid <= 2**31 - 1


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


@quick
@given(st.lists(st.integers(0, 2**40), max_size=6))
def test_widest_divides_all_and_no_wider_word_does(numbers):
    word = widest(numbers)
    assert word in (1, 2, 4, 8, 16)
    assert all(n % word == 0 for n in numbers)
    assert word == 16 or any(n % (2 * word) for n in numbers)


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
