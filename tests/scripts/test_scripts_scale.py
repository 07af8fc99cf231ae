"""scripts/bench.py scale: what it reports; and calls do no work on what has no part in them."""

from __future__ import annotations

import json
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import kvcupy as kv
from kvcupy.cache.paged.sequences import Sequences
from kvcupy.cache.pages import PageAllocator

pytestmark = pytest.mark.usefixtures("scripts_on_path")

PACKAGE = str(Path(kv.__file__).parent)
SIZES = {
    "sequences": (50, 5000), "pages": (500, 50_000), "blocks": (500, 8000),
    "elements": (2**20, 2**26),
}  # fmt: skip
OPERATIONS = {
    "sequences": ("step", "add_and_remove", "fork_and_remove", "pop"),
    "pages": ("alloc_and_free",), "blocks": ("match", "acquire", "evict_and_insert"),
    "elements": ("attention",),
}  # fmt: skip
CASES = [(family, operation) for family in OPERATIONS for operation in OPERATIONS[family]]
BATCH = 5
WARM_UP, ROUNDS = 3, 5


def cost_of(call):
    """Return the bytecode instructions that the package executes in a call, and the most memory.

    Array operations execute no instructions, but those on many elements take memory.
    """
    count = 0

    def enter(frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return trace

    def trace(frame, event, argument):
        nonlocal count
        count += event == "opcode"
        return trace

    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(None)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return count, most - before


def costs(device, family, operation):
    """Return the least instructions and bytes of a call, in a small state and in a large one."""
    from benchmarks.scale import FAMILIES

    least = []
    for size in SIZES[family]:
        state = FAMILIES[family].state(device, size, BATCH)
        call = partial(getattr(state, operation), BATCH)
        for _ in range(WARM_UP):
            call()
        least.append(np.min([cost_of(call) for _ in range(ROUNDS)], axis=0))
    return least


def grows(small, large):
    """Return whether a cost depends on the size; a wait may add a little."""
    instructions, num_bytes = large - small
    return bool(instructions > 100 + small[0] // 20 or num_bytes > 2500)


@pytest.mark.parametrize(("family", "operation"), CASES)
def test_no_call_costs_more_among_many(device, quick_host, family, operation):
    small, large = costs(device, family, operation)
    assert min(small) > 0
    assert not grows(small, large), f"instructions and bytes: {small} among few, {large} among many"


SCANS = {
    "bytes": (PageAllocator, "free", lambda self: np.count_nonzero(self._state != 0)),
    "instructions": (
        Sequences,
        "truncate",
        lambda self: [len(s.pages) for s in self._known.values()],
    ),
}


@pytest.mark.parametrize(
    ("family", "operation", "scan"),
    [("pages", "alloc_and_free", "bytes"), ("sequences", "pop", "instructions")],
)
def test_a_scan_would_be_seen(device, quick_host, monkeypatch, family, operation, scan):
    owner, name, work = SCANS[scan]
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *rest: (work(self), method(self, *rest)))
    assert grows(*costs(device, family, operation))


def test_evictions_do_not_pass_leased_blocks_again(device, quick_host, monkeypatch):
    """If they stayed in the order, each would."""
    from kvcupy.cache.tiered.page_tier import PageTier

    choose = PageTier.choose

    def keep_leased(self, *arguments, **options):
        before = list(self.order)
        chosen = choose(self, *arguments, **options)
        self.order.touch(before)
        return chosen

    monkeypatch.setattr(PageTier, "choose", keep_leased)
    assert grows(*costs(device, "blocks", "evict_and_insert"))


def test_it_reports_every_size(device_name, tmp_path, capsys):
    import bench
    from benchmarks.scale import FAMILIES

    path = tmp_path / "new" / "scale.json"
    small = ["--sizes", "2097152", "4194304", "--batches", "1", "3", "--rounds", "2"]
    arguments = ["--device", device_name, "--json", str(path)]
    assert bench.main(["scale", "--only", "pages", "elements", *small, *arguments]) == 0
    report = json.loads(path.read_text())
    assert report["device"] == kv.device(device_name).name
    assert {(row["family"], row["batch"], row["size"]) for row in report["rows"]} == {
        (family, batch, 2**power) for family in ("pages", "elements") for batch in (1, 3)
        for power in (21, 22)
    }  # fmt: skip
    for row in report["rows"]:
        assert row["operation"] in FAMILIES[row["family"]].operations.values()
        assert row["median_us"] >= row["least_us"] > 0
    printed = capsys.readouterr().out
    assert "4,194,304" in printed and "last to first" in printed


def test_calls_among_many_blocks_are_measured(quick_host, tmp_path, capsys):
    import bench

    path = tmp_path / "blocks.json"
    arguments = ["--device", "host", "--quick", "--json", str(path)]
    assert bench.main(["blocks", *arguments]) == 0
    report = json.loads(path.read_text())
    assert [row["phase"] for row in report["rows"]] == ["growing", "full"]
    for row in report["rows"]:
        assert 16 * 1024 < row["blocks"] <= 20 * 1024
        assert row["insert_longest_ms"] >= row["insert_median_ms"] > 0
        assert row["evict_longest_ms"] >= row["evict_median_ms"] > 0
        assert row["match_us"] > 0 and row["acquire_us"] > 0
        assert isinstance(row["bytes"], float)  # so few blocks are lost in the process's memory
    assert "insert_longest_ms" in capsys.readouterr().out
