"""scripts/: what the demo and the benchmark report, and that their checks can fail."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import kvcupy as kv

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.usefixtures("scripts_on_path")


def demo(device_name, *arguments):
    import overlap_demo

    small = ["--device", device_name, "--tokens", "24", "--steps", "4", "--rounds", "1"]
    return overlap_demo.main([*small, *map(str, arguments)])


def wrong_byte(operation, cache_index):
    """Wrap an operation so that it flips a bit of one stored byte afterwards."""

    def wrapped(*arrays, stream=None, **options):
        operation(*arrays, stream=stream, **options)
        cache, slots = kv.device("host").carrier(kv.arrays.view(arrays[cache_index])), arrays[-1]

        def flip():
            at = int(kv.device("host").carrier(kv.arrays.view(slots))[0])
            cache[at].reshape(-1).view(np.uint8)[7] ^= 4

        if stream is None:
            flip()
        else:
            kv.device("host").run(flip, stream)

    return wrapped


# The demo ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama-3.1-70b-tp8", "deepseek-v3-mla"])
def test_demo_reports_every_case(device_name, model, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, report = tmp_path / "out", tmp_path / "new" / "report.json"
    assert demo(device_name, "--model", model, "--json", report, "--out", out) == 0
    read = json.loads(report.read_text())

    assert [row["case"] for row in read["rows"]] == [
        "copy alone", "compute and store alone", "in sequence, one stream",
        "copy stream, two buffers",
    ]  # fmt: skip
    for row in read["rows"]:
        assert row["time_us"] >= row["least_us"] > 0 and row["gb_per_s"] > 0
    assert 0 <= read["rows"][-1]["hidden"] <= 1
    assert read["model"] == model and read["tokens"] == 24
    assert read["steps"] == 4

    printed = capsys.readouterr().out
    assert "Copy in the next step's K/V while this one computes" in printed
    assert f"timelines: {out}" in printed
    for name in ("sequence", "overlap"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        events = json.loads((out / f"{name}.json").read_text())["traceEvents"]
        assert any(event["ph"] == "X" for event in events)
    lanes = {e["args"]["name"] for e in events_named(out / "overlap.json", "thread_name")}
    assert lanes == {"main", "copy"}
    assert len(events_named(out / "overlap.json", "matmul")) == 4


def events_named(path, name):
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == name]


@pytest.mark.parametrize(
    ("model", "operation", "cache_index"),
    [("llama-3.1-70b-tp8", "store_kv", 3), ("deepseek-v3-mla", "store_mla", 2)],
)
def test_demo_notices_one_wrong_byte(device, monkeypatch, capsys, model, operation, cache_index):
    if device.name != "host":
        pytest.skip("the wrong byte is written by the host")
    monkeypatch.setattr(kv, operation, wrong_byte(getattr(kv, operation), cache_index))
    assert demo("host", "--model", model) == 1
    assert re.search(r"wrong result: in sequence.* bytes differ", capsys.readouterr().err)


@pytest.mark.parametrize("deaf", ["main", "copy"])
def test_demo_notices_a_missing_wait(device, monkeypatch, capsys, deaf):
    """Control of the copy stream: without either of its waits, a step stores what it must not.

    "main": steps do not wait for their copy, which comes after they are all done. "copy": a copy
    does not wait until its buffer was read, which is after all copies.
    """
    if device.name != "host":
        pytest.skip("holds up streams of the host")
    from overlap.products import Products
    from overlap.steps import Steps

    copy, work, wait = Steps.copy, Steps.work, type(device.stream()).wait
    overlapped, over = Steps.overlapped, threading.Event()

    def hold(self, step, stream, enqueue):
        """In `overlapped`, let the other stream wait for the last step of the deaf one."""
        if is_overlapped and stream.name != deaf:
            stream.call(lambda: over.wait(60))
        enqueue()
        if is_overlapped and stream.name == deaf and step == self.count - 1:
            stream.call(over.set)

    def deaf_wait(self, other):
        if self.name != deaf or not is_overlapped:
            wait(self, other)

    def run(self):
        nonlocal is_overlapped
        over.clear()
        is_overlapped = True
        overlapped(self)
        is_overlapped = False

    is_overlapped = False
    monkeypatch.setattr(
        Steps,
        "copy",
        lambda self, step, stream: hold(self, step, stream, partial(copy, self, step, stream)),
    )
    monkeypatch.setattr(
        Steps, "work", lambda self, step: hold(self, step, self.main, partial(work, self, step))
    )
    monkeypatch.setattr(Steps, "overlapped", run)
    monkeypatch.setattr(Products, "fit", lambda self, stream, target_us: None)
    monkeypatch.setattr(type(device.stream()), "wait", deaf_wait)
    assert demo("host", "--model", "llama-3.1-70b-tp8") == 1
    assert "wrong result: copy stream" in capsys.readouterr().err


# The benchmark -------------------------------------------------------------------------------


def test_the_memory_of_mixed_layers(device_name, tmp_path, capsys):
    import bench

    path = tmp_path / "memory.json"
    assert bench.main(["memory", "--device", device_name, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    gemma, jamba = report["rows"]
    for row, least in ((gemma, 4.5), (jamba, 7)):
        assert row["needed_bytes"] < row["groups_bytes"] <= 1.1 * row["needed_bytes"]
        assert row["without_groups_bytes"] > least * row["groups_bytes"]
    assert gemma["needed_bytes"] == 8192 * (5 * 1024 + 32768)
    assert bench.main(["memory", "--device", device_name, "--tokens", "2000"]) == 1
    assert "1.393 times the bytes that are needed" in capsys.readouterr().err


# What both stand on --------------------------------------------------------------------------


def test_require_equal_names_the_first_byte():
    from common.checks import WrongBytes, require_equal

    want = np.arange(12, dtype=np.uint16).reshape(3, 4)
    got = want.copy()
    require_equal("same", got, want)
    got[1, 2] ^= 0x0100
    message = (
        r"case: 1 of 24 bytes differ, the first at byte 13 \(element \(1, 2\)\): got 1, want 0"
    )
    with pytest.raises(WrongBytes, match=message):
        require_equal("case", got, want)
    with pytest.raises(WrongBytes, match="shape"):
        require_equal("case", got[:2], want)


def test_interleave_takes_turns_and_medians():
    from common.timers import interleave, medians

    order, times = [], {"a": iter([99, 1, 5, 3]), "b": iter([99, 2, 2, 8])}

    def measure(name):
        order.append(name)
        return next(times[name])

    found = interleave({name: lambda name=name: measure(name) for name in "ab"}, 3)
    assert found["b"][-1] == 8 and 99 not in found["a"]  # the first of each was the warm-up
    assert medians(found) == {"a": 3, "b": 2}
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"


def test_programs_of_the_tests_need_pytest(monkeypatch):
    from common import tests

    monkeypatch.setattr(tests, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"need pytest: pip install -e '\.\[test\]'"):
        tests.use_tests("order")
