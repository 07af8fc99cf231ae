"""stress.py fuzz: nothing public is left out, it sees what is wrong, and finds nothing now."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcupy as kv

ROOT = Path(__file__).resolve().parents[2]

NUM_CASES = 150

NOT_FUZZED = {
    "kernel": "runs the caller's code; tests/ops/test_custom.py passes it wrong arguments",
    "default_device": "has no arguments",
    "verify": "runs every kernel; tests/test_verify.py gives it wrong arguments",
    "config": "tests/test_config.py sets wrong values",
    "declare": "a context manager; tests/order passes it wrong arguments",
    "order_checker": "a context manager; tests/order passes it wrong arguments",
    "fork": "as HostStream.wait; tests/test_streams.py passes it wrong arguments",
    "join": "as HostStream.wait; tests/test_streams.py passes it wrong arguments",
    "timeline": "a context manager; tests/test_timeline.py passes it wrong arguments",
    "OrderWarning": "a warning",
    "ExploreResult": "made by explore; it has no methods with arguments",
    "Lease": "made by TieredCache.acquire; tests/cache passes it wrong arguments",
    "Transfer": "made by TransferEngine, whose target calls `wait_layer`",
    "PoolIdentity": "made by its class methods of pools that are fuzzed themselves",
    **dict.fromkeys(
        ("BlockKeys", "BlockStore", "PageSender", "PageReceiver", "Pull"),
        "tests/remote passes it wrong arguments",
    ),
    "metrics": "a module: `value` takes names; test_metrics gives it wrong ones",
    "events": "needs pyzmq; test_events.py gives it wrong arguments",
}
"""Why a public name is no target."""


@pytest.fixture
def fuzzing(monkeypatch):
    """The modules of the fuzzer, and settings that are put back."""
    paths = [ROOT / "scripts", ROOT / "tests" / "cache"]
    for path in paths:
        monkeypatch.syspath_prepend(str(path))
    for name in ("_strict", "_strict_index_faults", "_strict_seed", "_fallback"):
        monkeypatch.setattr(kv.config, name, getattr(kv.config, name))
    monkeypatch.setattr(kv.device("host"), "warp_lanes", kv.device("host").warp_lanes)
    import workloads.cases

    return workloads


def test_nothing_public_is_left_out(fuzzing):
    targets = {name.removesuffix(".methods") for name in fuzzing.cases.TARGETS}
    public = {
        name for name in kv.__all__
        if not (inspect.isclass(kind := getattr(kv, name)) and issubclass(kind, BaseException))
    }  # fmt: skip
    assert sorted(public - targets - set(NOT_FUZZED)) == [], "see NOT_FUZZED"
    assert set(NOT_FUZZED) <= set(kv.__all__) - targets


def test_each_parameter_of_a_method_has_a_value(fuzzing, case):
    """A method whose arguments are always missing is not tried."""
    from workloads.calls import OBJECTS, methods_of

    for kind in OBJECTS.values():
        held = kind(case)
        for name in methods_of(held.target):
            parameters = inspect.signature(getattr(held.target, name)).parameters.values()
            needed = {
                p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD
            }
            assert needed <= held.values.keys(), (kind.__name__, name)


# What it sees ----------------------------------------------------------------------------------


def refuse(x):
    """Raise.

    Raises
    ------
    ValueError : always
    """
    raise ValueError("x: expected another one")


@pytest.fixture
def case(fuzzing, tmp_path):
    from workloads.attempts import Case

    case = Case("control", 1, tmp_path)
    with case.exits:
        yield case


def finding(case, function, **options):
    from workloads.attempts import Finding

    with pytest.raises(Finding) as caught:
        case.attempt(function, {"x": 1}, described=refuse, **options)
    return str(caught.value)


def test_it_sees_errors_that_a_call_must_not_raise(case):
    def undocumented(x):
        raise KeyError("x")

    def unnamed(x):
        raise ValueError("no")

    assert "KeyError" in finding(case, undocumented) and not case.raised
    assert "names no argument" in finding(case, unnamed)
    assert "refused a valid call" in finding(case, refuse, valid=True)


@pytest.mark.parametrize("place", ["array", "canary"])
def test_it_sees_what_a_call_that_raises_has_changed(case, place):
    case.place(np.zeros(5, np.uint8))
    memory, _ = case.arena._pages[0]

    def fail(x):
        memory[np.flatnonzero((memory == 0) == (place == "array"))[0]] = 7
        kv.view_as(np.zeros(3, np.uint16), "x")

    text = finding(case, fail, names=["dtype"])
    assert "changed 1 bytes" in text


def test_it_sees_an_object_that_has_changed(case):
    state = [1]

    def fail(x):
        state.append(2)
        kv.view_as(np.zeros(3, np.uint16), "x")

    assert "changed its object" in finding(case, fail, state=lambda: list(state), names=["dtype"])


def test_it_sees_writes_beside_what_may_be_written(case):
    array = case.place(np.zeros(8, np.uint8))

    def write(x):
        array[:4] = 1

    case.attempt(write, {"x": 1}, writes=lambda: [array[:4]])
    array[:] = 0
    assert "wrote what it must not" in finding(case, write, writes=lambda: [array[1:]])


def test_it_sees_a_crash_and_goes_on_in_another_process(fuzzing):
    from workloads.fuzz import Fuzzer

    fuzzer = Fuzzer(1, [], torch=False)
    cases = iter(["crash 1", "rope_table 1"])
    fuzzer.draw = lambda: next(cases)
    for _ in range(2):
        fuzzer.step()
    fuzzer.close()
    (found,) = fuzzer.findings.values()
    assert found == ["crash 1"] and fuzzer.cases == {"crash": 1, "rope_table": 1}
    assert fuzzer.problems() == list(fuzzer.findings)


def test_it_sees_files_that_stay_open(fuzzing, monkeypatch):
    from workloads import fuzz

    monkeypatch.setattr(fuzz, "WARM_UP_CASES", 2)
    worker = fuzz.Worker(torch=False)
    try:
        results = [worker.run("leak 1")["finding"] for _ in range(3)]
    finally:
        worker.close()
    assert results[:2] == ["", ""] and results[2].startswith("leak: 3 cases hold ")


@pytest.mark.parametrize("name", ["TieredCache.methods", "PagedKVCache.methods"])
def test_it_sees_pages_without_an_owner(fuzzing, monkeypatch, name):
    """Control: the audit of the other sources of work, after each call."""
    from kvcupy.cache.pages import PageAllocator

    free = PageAllocator.free
    monkeypatch.setattr(PageAllocator, "free", lambda self, pages: free(self, list(pages)[:-1]))
    found = [fuzzing.cases.run_case(name, number)["finding"] for number in range(40)]
    assert any("are allocated, and nobody has them" in finding for finding in found)


def test_it_sees_a_hang(fuzzing, monkeypatch):
    from workloads import fuzz

    monkeypatch.setattr(fuzz, "HANG_S", 0.3)
    worker = fuzz.Worker(torch=False)
    try:
        assert "no answer for 0.3 s" in worker.run("hang 1")["finding"]
    finally:
        worker.close()


def test_a_byte_past_an_array_cannot_be_touched(fuzzing):
    """The guard page ends the process, which is a finding."""
    program = (
        "import sys, ctypes; sys.path[:0] = ['scripts', '.']\n"
        "from workloads.memory import PAGE, guarded\n"
        "pages = guarded(PAGE)\n"
        "print(pages[PAGE - 1], flush=True)\n"
        "ctypes.string_at(pages.ctypes.data + PAGE, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False
    )
    assert done.stdout == b"165\n" and done.returncode == -11


# What it finds ---------------------------------------------------------------------------------


def test_a_fixed_seed_finds_nothing(fuzzing, tmp_path, capsys):
    import stress

    report = tmp_path / "fuzz.json"
    arguments = ["fuzz", "--steps", str(NUM_CASES), "--seed", "1", "--no-torch"]
    status = stress.main([*arguments, "--json", str(report)])
    assert status == 0, capsys.readouterr().out
    run = json.loads(report.read_text())
    assert run["steps"] == NUM_CASES and run["findings"] == {} and run["problems"] == []
    assert sum(run["accepted"].values()) > NUM_CASES / 2
    assert {"TypeError", "ValueError", "KvcupyError"} <= run["raised"].keys()


def test_a_case_is_repeated(fuzzing, tmp_path, capsys):
    script = str(ROOT / "scripts" / "stress.py")
    command = [sys.executable, script, "fuzz", "--no-torch", "--case"]
    done = subprocess.run([*command, "store_kv 12345"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "store_kv(" in done.stdout, done.stderr
