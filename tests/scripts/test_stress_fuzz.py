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
from kvcupy.devices import host, host_streams
from kvcupy.order.checker import OrderChecker
from kvcupy.timelines.timeline import Timeline

ROOT = Path(__file__).resolve().parents[2]

NUM_CASES = 150

NOT_FUZZED = {
    "kernel": "runs the caller's own code; tests/ops/test_custom.py passes it wrong arguments",
    "default_device": "has no arguments",
    "verify": "runs every kernel; tests/test_verify.py gives it wrong arguments",
    "OrderWarning": "a warning",
    "ExploreResult": "made by explore; it has no methods with arguments",
    "PoolIdentity": "made by its class methods of pools that are fuzzed themselves",
    "BlockKeys": "tests/remote passes it wrong arguments",
    "BlockStore": "tests/remote passes it wrong arguments",
    "PageSender": "tests/remote passes it wrong arguments",
    "PageReceiver": "tests/remote passes it wrong arguments",
    "Pull": "tests/remote passes it wrong arguments",
    "PagedKVCache.export_sequence": "tests/remote passes it wrong arguments",
    "PagedKVCache.import_sequence": "tests/remote passes it wrong arguments",
    "metrics": "a module: `value` takes names; test_metrics gives it wrong ones",
    "events": "needs pyzmq; test_events.py gives it wrong arguments",
    "Encoding.of": "strings of all kinds are passed to view_as and to every dtype",
    "Encoding.rotated_elements": "called by every array and view of four bits",
    "ArrayView.byte_range": "has no arguments; called by the target ArrayView",
    "ArrayView.without_owner": "has no arguments; called by the target ArrayView",
    "HostDevice.busy_streams": "has no arguments",
    "PagedKVCache.forward": "begin_forward and end_forward",
    "Timeline.plot": "as save, with matplotlib, which takes seconds",
    **{
        f"Timeline.{method}": "an observer's: operations call it"
        for method in ("before", "after", "failed", "recorded", "waited")
    },
    "OrderChecker": "made by order_checker; all of its methods are an observer's",
    "HostStream.capture": "a context manager; the target Stream enters it",
    "HostStream.enqueue": "what operations call",
    "HostStream.forgive": "what graphs call",
    "HostGraph.launch": "called by the target Stream, on graphs that it captures",
}
"""Why a public name is no target, or no method of one."""

OF_OPERATIONS = (
    "as_stream", "load", "launch", "run", "keep", "copy_runs", "copy_bytes", "address", "carrier",
    "fault_array", "fall_back", "allocate", "release", "fingerprint",
)  # fmt: skip
"""Methods of a device that operations call, as `devices.protocol` says."""


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
    import workloads.objects

    return workloads


def methods_of(cls):
    return [
        name for name, _ in inspect.getmembers(cls, callable)
        if not name.startswith("_") and name not in OF_OPERATIONS
    ]  # fmt: skip


def test_nothing_public_is_left_out(fuzzing):
    targets, methods = fuzzing.cases.TARGETS, fuzzing.objects.METHODS
    classes = {
        "KVPool": ("Pool", kv.KVPool, "pools"), "MLAPool": ("Pool", kv.MLAPool, "pools"),
        "HostDevice": ("HostDevice", host.HostDevice, "Device"),
        "HostStream": ("HostStream", host_streams.HostStream, "Stream"),
        "HostEvent": ("HostEvent", host_streams.HostEvent, "Stream"),
        "HostGraph": ("", host_streams.HostGraph, "Stream"),
        "Transfer": ("Transfer", kv.Transfer, "TransferEngine"),
        "ExploreResult": ("", kv.ExploreResult, "explore"),
        "Lease": ("Lease", kv.Lease, "TieredCache"), "Timeline": ("Timeline", Timeline, "timeline"),
        "OrderChecker": ("", OrderChecker, "declare"),
        "Encoding": ("", kv.Encoding, "view_as"), "Demotion": ("", kv.Demotion, "PagedKVCache"),
        **{name: (name, getattr(kv, name), "groups")
           for name in ("FullAttention", "SlidingWindow", "Latent", "Recurrent")},
    }  # fmt: skip
    covered = set(NOT_FUZZED) | set(targets) | {"order_checker", "check_faults"}
    covered |= {"Timeline.save", "Timeline.add"}
    for name in kv.__all__:
        value = getattr(kv, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            covered.add(name)
        elif inspect.isclass(value) and name not in classes and name not in NOT_FUZZED:
            classes[name] = (name, value, name)
    assert {target for _, _, target in classes.values()} <= set(targets)
    for name, (listed, cls, _) in classes.items():
        covered |= {name} | {f"{name}.{method}" for method in methods.get(listed, "").split()}
        covered |= {f"{name}.wrap"} if hasattr(cls, "wrap") else set()
        if name in NOT_FUZZED:
            covered |= {f"{name}.{method}" for method in methods_of(cls)}
    public = set(kv.__all__) | {
        f"{name}.{method}" for name, (_, cls, _) in classes.items() for method in methods_of(cls)
    }
    assert sorted(public - covered) == [], "scripts/workloads/ has no case of them; see NOT_FUZZED"


def test_every_parameter_has_a_meaning(fuzzing):
    from workloads.attempts import MEANINGS

    kinds = [kv.KVPool, kv.MLAPool, kv.PageAllocator, kv.PagedKVCache, kv.TieredCache,
             kv.TransferEngine]  # fmt: skip
    functions = [getattr(kv, name) for name in kv.__all__ if not inspect.isclass(getattr(kv, name))]
    functions = [function for function in functions if inspect.isfunction(function)] + kinds
    functions += [getattr(kind, name) for kind in kinds for name in methods_of(kind)]
    names = {name for f in functions for name in inspect.signature(f).parameters}
    assert sorted(names - set(MEANINGS) - {"self"}) == []


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

    return Case("control", 1, tmp_path)


def finding(case, function, **options):
    from workloads.attempts import Finding

    with pytest.raises(Finding) as caught:
        case.attempt(function, {"x": 1}, described=refuse, **options)
    return str(caught.value)


def test_it_sees_undocumented_errors(case):
    def fail(x):
        raise KeyError("x")

    assert "KeyError" in finding(case, fail) and not case.raised


def test_it_sees_errors_that_name_nothing(case):
    def fail(x):
        raise ValueError("no")

    assert "names no argument" in finding(case, fail)


def test_it_sees_errors_of_valid_calls(case):
    assert "refused a valid call" in finding(case, refuse, valid=True)


@pytest.mark.parametrize("place", ["array", "canary"])
def test_it_sees_what_a_call_that_raises_has_changed(case, place):
    array = case.place(np.zeros(5, np.uint8))
    memory = case.arena.buffers[0].bytes

    def fail(x):
        memory[np.flatnonzero((memory == 0) == (place == "array"))[0]] = 7
        kv.view_as(np.zeros(3, np.uint16), "x")

    text = finding(case, fail, names=["dtype"])
    assert "changed 1 bytes" in text and array.shape == (5,)


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
        results = [worker.run(f"{name} 1")["finding"] for name in ("leak", "leak", "leak")]
    finally:
        worker.close()
    assert results[:2] == ["", ""] and results[2].startswith("leak: 3 cases hold ")


@pytest.mark.parametrize("name", ["TieredCache", "PagedKVCache"])
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
        "from random import Random; import numpy as np; from workloads.memory import Buffer\n"
        "array = Buffer(np.zeros(5, np.uint8), True, 0).array\n"
        "print(array[4], flush=True)\n"
        "ctypes.string_at(array.ctypes.data + 5, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False
    )
    assert done.stdout == b"0\n" and done.returncode == -11


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
