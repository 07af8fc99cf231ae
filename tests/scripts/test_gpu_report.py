"""scripts/gpu_report.sh: what it reports of parts that pass, fail, hang, crash or are missing.

The parts are stand-ins, but for the tests of `split_decode` and `every_operation`; nothing here
needs a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
ABOUT = {"date": "today"}

pytestmark = [
    pytest.mark.usefixtures("scripts_on_path"),
    pytest.mark.skipif(os.name != "posix", reason="processes are stopped by signals"),
]


@pytest.fixture(autouse=True)
def pytest_without_plugins(monkeypatch):
    """Half of the time that it takes to start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def stand_in(name, code, *arguments, judge=None, **options):
    """A part that runs Python code."""
    from gpu import verdicts
    from gpu.parts import Part

    command = (sys.executable, "-c", code, *arguments)
    return Part(name, "stand-ins", command, judge or verdicts.of_status, **options)


def reported(out, *parts, cwd=ROOT, grace_s=0.3, minutes=None):
    """Run parts; return the report, and its parts by name."""
    from gpu.report import Report

    report = Report(parts, out, ABOUT, "--only x", minutes)
    report.cwd, report.grace_s = cwd, grace_s
    well = report.run()
    written = json.loads(out.read_text())
    assert written["all_well"] == (well and written["state"] == "finished")
    return written, {part["name"]: part for part in written["parts"]}


FINE = "print('line one'); print('all of it is fine')"


# Parts ---------------------------------------------------------------------------------------

WRITES = "import json, sys; print('case  us'); json.dump({'us': 3}, open(sys.argv[1], 'w'))"
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
CONNECTIONS = "import os; print('connections', os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))"


def stumbling(ended):
    return 1 / 0


# By name: code, options of the part, its state, and what its summary and lines say.
PARTS = {
    "first": (FINE, {}, "passed", "all of it is fine"),
    "fails": ("import sys; print('what went wrong'); sys.exit(3)", {}, "failed",
              r"exit status 3 what went wrong"),
    "hangs": (STUBBORN, {"limit_s": 1.0}, "failed", r"stopped after its time limit, \d+ s"),
    "crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {}, "failed",
                "died of SIGSEGV"),
    "absent": (FINE, {"missing": "there is no such tool"}, "skipped", "there is no such tool"),
    "gone": ("", {"command": ("/no/such/program",)}, "failed",
             r"could not be started .*/no/such/program"),
    "odd": (FINE, {"judge": stumbling}, "failed", "not understood: ZeroDivisionError"),
    "bench": (WRITES, {"result": True}, "passed", "checked and measured"),
    "empty": ("print(1)", {"result": True}, "failed", "no JSON"),
    "connected": (CONNECTIONS, {"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}}, "passed",
                  "connections 32"),
    "last": (CONNECTIONS, {}, "passed", "connections None"),
}  # fmt: skip


def test_a_part_that_fails_hangs_or_crashes_ends_no_other(tmp_path, monkeypatch):
    from gpu.verdicts import of_result

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(sys, "stdout", Closed())  # nobody at the terminal ends no report
    parts = []
    for name, (code, given, *_) in PARTS.items():
        options = dict(given)
        changes = {"command": options.pop("command")} if "command" in options else {}
        if options.pop("result", False):
            options["judge"] = of_result
        parts.append(replace(stand_in(name, code, "{result}", **options), **changes))
    report, found = reported(tmp_path / "r.json", *parts)
    assert {name: part["state"] for name, part in found.items()} == {
        name: row[2] for name, row in PARTS.items()
    }
    assert report["counts"] == "4 passed, 6 failed, 1 skipped" and not report["all_well"]
    for name, row in PARTS.items():
        said = " ".join([found[name]["summary"], *found[name].get("lines", ())])
        assert re.search(row[3], said), (name, said)
    assert found["bench"]["result"] == {"us": 3}


def test_processes_that_a_part_leaves_are_ended(tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid)"
    _, found = reported(tmp_path / "r", stand_in("parent", child))
    state = Path(f"/proc/{found['parent']['summary']}/stat")
    for _ in range(1200):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"{state} goes on")


def test_no_part_begins_after_the_minutes(tmp_path):
    parts = stand_in("first", "import time; time.sleep(0.1)"), stand_in("second", FINE)
    _, found = reported(tmp_path / "r", *parts, minutes=0.0001)
    assert [part["state"] for part in found.values()] == ["passed", "not run"]


# Tests as parts ------------------------------------------------------------------------------


def pytest_part(folder, code, *, may_skip_all=False):
    """A part that runs pytest over some code, as the report runs the suite."""
    from gpu import parts
    from gpu.verdicts import of_tests

    (folder / "suite").mkdir(parents=True)
    (folder / "suite" / "test_some.py").write_text("import os, signal, time, pytest\n" + code)
    part = parts._pytest("suite", "suite", "host", "suite")
    at = part.command.index("--device")  # not by this suite's settings
    settings = ("--rootdir", str(folder), "-c", os.devnull)
    command = (*part.command[:at], *settings, *part.command[at + 2 :])
    return replace(part, command=command, judge=of_tests(may_skip_all))


SKIPPED = "@pytest.mark.skip(reason='no usable GPU')\ndef test_skipped(): pass\n"
# By name: code, options of the part, its state, what is said, and the tests that failed.
SUITES = {
    "failing tests are named with their last lines": (
        "def test_fine(): pass\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_wrong(n): assert n == 1, 'n is not what it should be'\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no such thing')\n"
        "def test_setup(broken): pass\n" + SKIPPED,
        {}, "failed",
        ("1 failed, 2 passed, 1 skipped, 1 error", "n is not what it should be", "no such thing"),
        ["suite/test_some.py::test_wrong[2]", "suite/test_some.py::test_setup"],
    ),
    "a file cannot be imported": (
        "def test_fine(): pass\n", {"other": "import no_such_module_anywhere\n"},
        "failed", ("1 passed, 1 error", "no_such_module_anywhere"), ["suite/test_other.py"],
    ),
    "all pass": ("def test_fine(): pass\n", {}, "passed", ("^1 passed",), []),
    "none ran": (SKIPPED, {}, "skipped", ("no test ran, 1 skipped",), []),
    "the test that ends its process is named": (
        "def test_before(): assert False\n"
        "def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def test_after(): pass\n",
        {}, "failed",
        (r"1 tests ended; died of SIGSEGV, in \S*test_some.py::test_crash",),
        ["suite/test_some.py::test_crash"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SUITES)
def test_the_verdict_on_a_suite(tmp_path, case):
    code, options, state, said, failed = SUITES[case]
    options = dict(options)
    other = options.pop("other", None)
    part = pytest_part(tmp_path, code, **options)
    if other:
        (tmp_path / "suite" / "test_other.py").write_text(other)
    _, found = reported(tmp_path / "r", part, cwd=tmp_path)
    result = found["suite"]
    assert result["state"] == state and result.get("failed", []) == failed
    text = "\n".join([result["summary"], *result.get("lines", ())])
    assert all(re.search(words, text) for words in said), text


DRIVER = """
import sys
from pathlib import Path

sys.path.insert(0, {scripts!r})
sys.path.insert(0, {tests!r})
from gpu import report
from test_gpu_report import ABOUT, FINE, stand_in

slow = "import time; print('begun', flush=True); time.sleep(600)"
parts = [stand_in("first", FINE), stand_in("slow", slow), stand_in("last", FINE)]
sys.exit(report.report(parts, Path({out!r}), ABOUT))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_stops_the_part_and_leaves_a_report(tmp_path, number):
    out = tmp_path / "out.json"
    code = DRIVER.format(scripts=str(SCRIPTS), tests=str(ROOT / "tests" / "scripts"), out=str(out))
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    log, end = tmp_path / "out_logs" / "slow.log", time.monotonic() + 120
    while not (log.exists() and "begun" in log.read_text()):
        assert running.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    # What is there while it runs, and would be there if it were killed:
    assert json.loads(out.read_text())["counts"] == "1 passed, 1 running, 1 not run"
    running.send_signal(number)
    said, _ = running.communicate(timeout=120)
    report = json.loads(out.read_text())
    assert running.returncode == 1 and str(out) in said
    assert report["state"] == "interrupted"
    assert report["counts"] == "1 passed, 1 interrupted, 1 not run"


def test_no_name_of_a_person_or_machine_is_left(tmp_path, monkeypatch):
    home = tmp_path / "homes" / "ada.l"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "ada.l")
    monkeypatch.setattr(platform, "node", lambda: "babbage7.example.org")
    monkeypatch.setattr("socket.gethostname", lambda: "babbage7")
    lines = [
        f"{home}/work/x.py and ~ada.l, pytest-of-ada.l", "ran on Babbage7.example.org (babbage7)",
        "/home/grace/code.py, /Users/alan", f"{ROOT}/tests/test_x.py",
        "GPU-01234567-89ab-cdef-0123-456789abcdef", "the canada.law and babbage70 stay",
    ]  # fmt: skip
    code = "import json, sys\nfor line in json.loads(sys.argv[1]): print(line)\nsys.exit(2)"
    _, found = reported(tmp_path / "r", stand_in("first", code, json.dumps(lines)))
    text = (tmp_path / "r").read_text()
    for private in ("ada.l", "babbage7.", "Babbage", "(babbage7)", "grace", "alan", str(ROOT)):
        assert private not in text.replace("canada.law", ""), private
    assert found["first"]["lines"] == [
        "~/work/x.py and ~USER, pytest-of-USER", "ran on HOST (HOST)",
        "/home/USER/code.py, /Users/USER", "<checkout>/tests/test_x.py",
        "GPU-UUID", "the canada.law and babbage70 stay",
    ]  # fmt: skip


# The command line ----------------------------------------------------------------------------


def all_parts(device="cuda", **options):
    from gpu.parts import parts

    return parts(device, **options)


def test_every_test_file_is_run_by_one_part():
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py"))
    suite = [part for part in all_parts() if part.group == "suite"]
    assert sorted(part.command[-1] for part in suite) == files
    marked = {
        str(path) for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(@|pytestmark = |    )pytest.mark.gpu", path.read_text(), re.MULTILINE)
    }  # fmt: skip
    gpu = [part for part in all_parts() if part.group == "gpu"]
    assert {part.command[-1] for part in gpu} >= marked
    names = [part.name for part in all_parts()]
    assert len(names) == len(set(names))


def test_parts_come_in_the_order_in_which_they_tell_most():
    parts = all_parts(before=["tests/test_x.py::test_y", "tests/devices/test_cuda_gpu.py::test_z"])
    groups = list(dict.fromkeys(part.group for part in parts))
    assert groups == ["doctor", "split_decode", "verify", "gpu", "transfer", "host times",
                      "operations", "sanitizer", "suite", "bench"]  # fmt: skip
    first, second = [part for part in parts if part.group == "gpu"][:2]
    assert first.name == "failed-before"
    assert first.command[-2:] == (
        "tests/test_x.py::test_y", "tests/devices/test_cuda_gpu.py::test_z")  # fmt: skip
    assert second.command[-1].endswith("tests/devices/test_cuda_gpu.py")
    assert all(part.limit_s <= 720 for part in parts)


def test_the_scripts_take_their_arguments(monkeypatch):
    """Each script's own parser reads the arguments of its part."""
    import argparse
    import importlib

    def only_read(parser, argv=None, _read=argparse.ArgumentParser.parse_args):
        _read(parser, argv)
        raise InterruptedError

    for device in ("cuda", "host"):
        for part in all_parts(device):
            if part.group in ("doctor", "gpu", "suite", "sanitizer"):
                continue
            if "-m" in part.command:
                at = part.command.index("-m") + 1
                module = part.command[at].replace("kvcupy", "kvcupy.__main__")
            else:
                script = next(Path(word) for word in part.command if word.endswith(".py"))
                at = part.command.index(str(script))
                module = ".".join(script.relative_to(SCRIPTS).with_suffix("").parts)
            with monkeypatch.context() as patch, pytest.raises(InterruptedError):
                patch.setattr(argparse.ArgumentParser, "parse_args", only_read)
                importlib.import_module(module).main(part.command[at + 1 :])


def test_parts_are_chosen_by_name_and_group(tmp_path, monkeypatch, capsys):
    from gpu import report

    found = all_parts()
    names = [part.name for part in report.chosen_parts(found, ["sanitizer", "verify"])]
    assert names == ["verify", "memcheck", "racecheck", "synccheck", "initcheck"]
    names = [part.name for part in report.chosen_parts(found, ["smoke"])]
    assert names == ["doctor", "split_decode", "verify", "operations"]
    assert report.chosen_parts(found, None) == found
    assert report.main(["--device", "host", "--list", "--only", "doctor", "host times"]) == 0
    assert "scale" in capsys.readouterr().out
    assert report.main(["--device", "host", "--only", "nothing"]) == 2
    assert "--only: expected one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        report.main(["--device", "gpu"])
    assert "--device: expected host, cuda or cuda:1, got gpu" in capsys.readouterr().err
    (tmp_path / "thesis.txt").write_text("years of work")
    only = ["--device", "host", "--only", "doctor"]
    assert report.main([*only, "--out", str(tmp_path / "thesis.txt")]) == 2
    assert "--out: expected a new file or an earlier report" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (["passed"] * 5 + ["failed"], "kvcupy works here, but these failed: bench."),
        (["passed"] + ["failed"] + ["passed"] * 4, "does not work here: verify: differs"),
        (["not run"] + ["passed"] * 5, "is open; this did not run: split_decode."),
        (["passed"] * 4 + ["skipped", "passed"], "kvcupy works here"),
    ],
)  # fmt: skip
def test_the_verdict_says_whether_it_works(tmp_path, states, said):
    """By the parts that decide it: not by benchmarks, nor by one of several skipped files."""
    from gpu.report import Report

    groups = {"split_decode": "split_decode", "verify": "verify",
              "operations": "operations", "gpu-streams": "gpu", "gpu-graphs": "gpu",
              "bench": "bench"}  # fmt: skip
    parts = [replace(stand_in(name, ""), group=group) for name, group in groups.items()]
    report = Report(parts, tmp_path / "r", ABOUT)
    for result, state in zip(report.results.values(), states, strict=True):
        result |= {"state": state, "summary": "differs"}
    assert said in report.verdict


# The doctor and compute-sanitizer ------------------------------------------------------------


def ended(text, status=0):
    from gpu.verdicts import Ended

    return Ended("exited", status, 1.0, text, Path(os.devnull))


CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors"
WRITE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 16 bytes
=========     at store_copy<(int)16>(CacheRowsParams)+0x2a0
========= ERROR SUMMARY: 2 errors"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at store_dynamic and Read access
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""
NO_RACE = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
UNUSED = """========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call"""
SANITIZED = {
    "nothing": (CLEAN, 0, "passed", "nothing reported"),
    "no race": (NO_RACE, 0, "passed", "nothing reported"),
    "a wrong write": (WRITE, 86, "failed", "2 errors"),
    "a race": (RACE, 86, "failed", "1 hazards"),
    "no summary": ("========= COMPUTE-SANITIZER", 0, "failed", "no summary"),
    "the program fails": (CLEAN, 1, "failed", "exit status 1"),
    "no GPU used": (UNUSED, 255, "skipped", "the program made no CUDA call"),
}


@pytest.mark.parametrize("case", SANITIZED)
def test_the_verdict_of_compute_sanitizer(tmp_path, monkeypatch, case):
    from gpu.report import sanitizer
    from gpu.verdicts import of_sanitizer

    text, status, state, summary = SANITIZED[case]
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    (tmp_path / "said").write_text(text + "\n")
    tool.write_text(
        f"#!{shutil.which('bash')}\necho \"$@\"; cat '{tmp_path}/said'; exit {status}\n"
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitizer() != str(tool)  # it cannot be run
    tool.chmod(0o755)
    assert sanitizer() == str(tool)
    part = next(p for p in all_parts("host", sanitizer=sanitizer()) if p.name == "racecheck")
    assert part.command[1:3] == ("--tool", "racecheck")
    assert part.command[-3:] == (str(SCRIPTS / "gpu" / "every_operation.py"), "--device", "host")
    report, found = reported(tmp_path / "r", part)
    assert (found["racecheck"]["state"], found["racecheck"]["summary"]) == (state, summary)
    assert ("store_" in json.dumps(report)) == ("store_" in text)
    if state == "skipped":  # on a GPU, a program that calls no CUDA does not pass
        assert of_sanitizer(may_go_unused=False)(ended(text, status)).state == "failed"


SMI = """case "$*" in
  *query-gpu*) echo "GPU A, 9.0, 81559 MiB, 580.1, 5, 16, 700.00 W, Disabled"
               echo "GPU B, 8.0, 40960 MiB, 580.1, 4, 16, 400.00 W, [N/A]" ;;
  *query-compute-apps*) echo "300 MiB" ;;
  *) echo "| NVIDIA-SMI 580.1  Driver Version: 580.1  CUDA Version: 13.0 |" ;;
esac
"""


def test_the_gpus_are_described(tmp_path, monkeypatch):
    from gpu.report import facts

    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!{shutil.which('bash')}\n{SMI}")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    about = facts("cuda:1")
    assert [gpu["name"] for gpu in about["GPUs"]] == ["GPU A", "GPU B"]
    assert about["GPUs"][1]["compute_cap"] == "8.0" and about["CUDA of the driver"] == "13.0"
    assert about["other processes on the GPUs"] == 1 and about["device"] == "cuda:1"
    assert about["variables"]["CUDA_VISIBLE_DEVICES"] == "1"


# The programs of the parts -------------------------------------------------------------------


def test_a_decode_that_differs_once_is_noticed(device, lenient_host, monkeypatch):
    from gpu import split_decode

    import kvcupy as kv

    assert split_decode.repeat(device, 3, (70, 3)) == 0
    calls, attention = [], kv.paged_attention

    def differing(query, k_cache, *rest, **options):
        calls.append(1)
        result = attention(query, k_cache, *rest, **options)
        if len(calls) == 3:
            out, stream = device.carrier(kv.arrays.view(options["out"])), options["stream"]
            device.run(lambda: out.reshape(-1)[:2].fill(7), stream)
        return result

    monkeypatch.setattr(kv, "paged_attention", differing)
    assert split_decode.repeat(device, 4, (70, 3)) == 2


def test_every_operation_is_called_and_every_kernel_launched(device, monkeypatch):
    """By the program that the sanitizers watch: none escapes them."""
    from gpu import every_operation

    import kvcupy as kv
    from kvcupy.ops import specialisations

    launched, launch = set(), type(device).launch

    def noting(self, function, *rest, **options):
        launched.add(function.specialisation.kernel.name)
        return launch(self, function, *rest, **options)

    operations = {
        name: getattr(kv, name) for name in kv.__all__
        if getattr(getattr(kv, name), "__module__", "").startswith("kvcupy.ops.")
        and name != "kernel"  # makes operations of its caller's
    }  # fmt: skip
    called = set()

    def calling(name):
        def call(*arguments, **options):
            called.add(name)
            return operations[name](*arguments, **options)

        return call

    monkeypatch.setattr(type(device), "launch", noting)
    for name in operations:
        monkeypatch.setattr(kv, name, calling(name))
    every_operation.run(device)
    assert launched == {one.kernel.name for one in specialisations()}
    assert called == operations.keys() >= {"store_kv", "paged_attention", "transfer_pages"}
