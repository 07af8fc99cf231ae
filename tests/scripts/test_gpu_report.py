"""scripts/gpu_report.sh: what it reports of parts that pass, fail, hang, crash or are not there.

The parts are stand-ins, but for one test of `every_operation.py`; nothing here needs a GPU.
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
import tarfile
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
ABOUT = {"date": "today", "GPUs": [{"name": "a GPU", "driver_version": "1.2"}]}

pytestmark = [
    pytest.mark.usefixtures("scripts_on_path"),
    pytest.mark.skipif(os.name != "posix", reason="processes are stopped by signals"),
]


@pytest.fixture(autouse=True)
def pytest_without_plugins(monkeypatch):
    """Half of the time that it takes to start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def stand_in(name, code, *arguments, judge=None, limit_s=60.0, **options):
    """A part that runs Python code."""
    from gpu import verdicts as gpu_verdicts
    from gpu.parts import Part

    command = (sys.executable, "-c", code, *arguments)
    judge = judge or gpu_verdicts.of_status
    return Part(name, "stand-ins", f"stands in for {name}", command, 0.1, limit_s, judge, **options)


def reported(out, *parts, cwd=ROOT, grace_s=0.3):
    """Run parts; return whether all is well, the page, and the states by name."""
    from gpu.report import Report
    from gpu.run import Interrupts

    report = Report(parts, out, ABOUT, "--quick")
    report.cwd, report.grace_s = cwd, grace_s
    well = report.run(Interrupts())
    written = json.loads((out / "report.json").read_text())
    assert written["state"] == "finished" and written["all_well"] == well
    states = {part["name"]: part["state"] for part in written["parts"]}
    return well, (out / "report.md").read_text(), states


FINE = "print('line one'); print('all of it is fine')"


# Parts ---------------------------------------------------------------------------------------

WRITES = (
    "import json, sys; print('case  us'); print('working', file=sys.stderr); "
    "open(sys.argv[1], 'w').write(json.dumps({'us': 3}))"
)
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
CONNECTIONS = "import os; print('connections', os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))"


def stumbling(ended, files):
    return 1 / 0


# By name: code, options of the part, its state, and what the page says.
PARTS = {
    "first": (FINE, {}, "passed", "all of it is fine"),
    "fails": ("import sys; print('what went wrong'); sys.exit(3)", {}, "failed",
              r"\| fails \|.*\| failed \| 0 \| exit status 3 \|[^\0]*what went wrong"),
    "hangs": (STUBBORN, {"limit_s": 1.0}, "failed",
              r"\| hangs \|.*stopped after its time limit, \d+ s \|"),
    "crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {}, "failed",
                "died of SIGSEGV"),
    "absent": (FINE, {"missing": "there is no such tool"}, "skipped", "there is no such tool"),
    "gone": ("", {"command": ("/no/such/program",)}, "failed",
             r"could not be started[^\0]*/no/such/program"),
    "odd": (FINE, {"judge": stumbling}, "failed", "not understood: ZeroDivisionError"),
    "bench": (WRITES, {"result": "b.json", "keep_apart": True}, "passed", "```\ncase  us\n```"),
    "empty": ("print(1)", {"result": "none.json"}, "failed", "no JSON"),
    "connected": (CONNECTIONS, {"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}}, "passed",
                  "connections 32"),
    "last": (CONNECTIONS, {}, "passed", "connections None"),
}  # fmt: skip


def test_a_part_that_fails_hangs_or_crashes_ends_no_other(tmp_path, monkeypatch):
    from gpu.verdicts import of_benchmark

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(sys, "stdout", Closed())  # nobody at the terminal ends no report
    parts = []
    for name, (code, options, *_) in PARTS.items():
        arguments = ["{result}"] if "result" in options else []
        judge = {"judge": of_benchmark} if arguments else {}
        changes = {k: v for k, v in options.items() if k == "command"}
        options = {k: v for k, v in options.items() if k != "command"}
        parts.append(replace(stand_in(name, code, *arguments, **judge, **options), **changes))
    well, page, states = reported(tmp_path, *parts)
    assert not well
    assert states == {name: row[2] for name, row in PARTS.items()}
    assert "**Finished: 4 passed, 6 failed, 1 skipped.**" in page
    for name, row in PARTS.items():
        assert re.search(row[3], page), name
    assert json.loads((tmp_path / "results" / "b.json").read_text()) == {"us": 3}
    assert "working" not in page and "working" in (tmp_path / "logs" / "bench.log").read_text()


def test_all_well_is_when_parts_passed_and_none_did_worse_than_being_skipped(tmp_path):
    absent = stand_in("absent", FINE, missing="not here")
    assert reported(tmp_path / "a", stand_in("first", FINE), absent)[0]
    assert not reported(tmp_path / "b", absent)[0]
    assert not reported(tmp_path / "c", stand_in("first", "1 / 0"))[0]


def test_what_a_part_leaves_running_is_ended(tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid)"
    reported(tmp_path, stand_in("parent", child))
    pid = int((tmp_path / "logs" / "parent.log").read_text())
    for _ in range(1200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} goes on")


def test_a_part_that_says_too_much_is_cut_short(tmp_path, monkeypatch):
    from gpu import report as gpu_report

    monkeypatch.setattr(gpu_report, "LOG_BYTES", 1000)
    reported(tmp_path, stand_in("long", "print('first' + 9999 * '-' + 'last \u00fc')"))
    log = (tmp_path / "logs" / "long.log").read_text()
    assert log.startswith("first-") and log.endswith("last \u00fc\n") and len(log) < 1100
    assert "bytes ..." in log


# Tests as parts ------------------------------------------------------------------------------


def pytest_part(folder, code, *, may_skip_all=False, group="suite"):
    """A part that runs pytest over some code, as the report runs the suite."""
    from gpu import parts as gpu_parts
    from gpu.verdicts import of_tests

    (folder / "suite").mkdir(parents=True)
    (folder / "suite" / "test_some.py").write_text("import os, signal, time, pytest\n" + code)
    part = gpu_parts._pytest("suite", group, "some tests", "host", 1, "suite")
    at = part.command.index("--device")  # not by this suite's settings
    settings = ("--rootdir", str(folder), "-c", os.devnull)
    command = (*part.command[:at], *settings, *part.command[at + 2 :])
    return replace(part, command=command, judge=of_tests(may_skip_all))


SKIPPED = "@pytest.mark.skip(reason='no usable GPU')\ndef test_skipped(): pass\n"
# By name: code, options of the part, its state, what the page says, and what it does not say.
SUITES = {
    "failing tests are named with their last lines": (
        "def test_fine(): pass\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_wrong(n): assert n == 1, 'n is not what it should be'\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no such thing')\n"
        "def test_setup(broken): pass\n" + SKIPPED,
        {}, "failed",
        (r"\| 1 failed, 2 passed, 1 skipped, 1 error \|",
         r"FAILED \S*test_some.py::test_wrong\[2\]", "n is not what it should be",
         r"ERROR \S*test_some.py::test_setup", "no such thing"),
        ("test_fine", "test_wrong[1]"),
    ),
    "a file cannot be imported": (
        "def test_fine(): pass\n", {"other": "import no_such_module_anywhere\n"},
        "failed", ("1 passed, 1 error", "no_such_module_anywhere"), (),
    ),
    "all pass": ("def test_fine(): pass\n", {}, "passed", (r"\| 1 passed \|",), ("test_fine",)),
    "passing tests of a GPU are named": (
        "def test_fine(): pass\n", {"group": "gpu"}, "passed",
        (r"PASSED \S*test_some.py::test_fine",), (),
    ),
    "none ran": (
        SKIPPED, {}, "failed", ("no test ran, 1 skipped", r"SKIPPED \[1\] .*no usable GPU"), (),
    ),
    "none ran, as may be": (SKIPPED, {"may_skip_all": True}, "skipped", ("1 skipped",), ()),
    "the test that ends its process is named": (
        "def test_before(): assert False\n"
        "def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def test_after(): pass\n",
        {}, "failed",
        (r"1 tests ended; died of SIGSEGV, in \S*test_some.py::test_crash",
         r"test_some.py::test_before FAILED"),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SUITES)
def test_what_is_said_of_a_suite(tmp_path, case):
    code, options, state, said, not_said = SUITES[case]
    options = dict(options)
    other = options.pop("other", None)
    part = pytest_part(tmp_path, code, **options)
    if other:
        (tmp_path / "suite" / "test_other.py").write_text(other)
    well, page, states = reported(tmp_path / "out", part, cwd=tmp_path)
    assert states == {"suite": state} and well == (state == "passed")
    for text in said:
        assert re.search(text, page), text
    assert not any(text in page for text in not_said)


@pytest.mark.parametrize("ignores", [False, True], ids=["asked", "killed"])
def test_a_test_that_hangs_is_stopped_and_named(tmp_path, ignores):
    """Asked to stop, pytest still writes its report; killed, it leaves its log."""
    from gpu.report import Report
    from gpu.run import Interrupts

    code = "import warnings\ndef test_before(): warnings.warn('of another test')\n"
    code += "def test_hang():\n"
    code += "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if ignores else ""
    code += f"    open({str(tmp_path / 'begun')!r}, 'w').close()\n    time.sleep(600)\n"

    class OnceBegun(Interrupts):
        @property
        def count(self):
            return int((tmp_path / "begun").exists())

        @count.setter
        def count(self, value): ...

    report = Report([pytest_part(tmp_path, code)], tmp_path / "out", ABOUT)
    report.cwd, report.grace_s = tmp_path, (0.3 if ignores else 30.0)
    assert not report.run(OnceBegun())
    page = (tmp_path / "out" / "report.md").read_text()
    assert report.results[0].state == "interrupted"
    said = "1 tests ended; interrupted" if ignores else "1 passed, 1 warning; interrupted"
    assert re.search(rf"{said}, in \S*/test_some.py::test_hang \|", page)
    assert ("KeyboardInterrupt" in page) != ignores


# Interrupted ---------------------------------------------------------------------------------


DRIVER = """
import sys
from pathlib import Path

sys.path.insert(0, {scripts!r})
sys.path.insert(0, {tests!r})
from gpu import report as gpu_report
from test_gpu_report import ABOUT, FINE, stand_in

slow = "import time; print('begun', flush=True); time.sleep(600)"
parts = [stand_in("first", FINE), stand_in("slow", slow), stand_in("last", FINE)]
sys.exit(gpu_report.report(parts, Path({out!r}), ABOUT, ["--quick"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_stops_the_part_and_leaves_a_report(tmp_path, number):
    out = tmp_path / "out"
    code = DRIVER.format(scripts=str(SCRIPTS), tests=str(ROOT / "tests" / "scripts"), out=str(out))
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    log, end = out / "logs" / "slow.log", time.monotonic() + 120
    while not (log.exists() and "begun" in log.read_text()):
        assert running.poll() is None and time.monotonic() < end
        time.sleep(0.05)

    # What is there while it runs, and would be there if it were killed:
    assert "**Running: 1 passed, 1 running, 1 not run.**" in (out / "report.md").read_text()
    running.send_signal(number)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 1
    page = (out / "report.md").read_text()
    assert "**Interrupted: 1 passed, 1 interrupted, 1 not run.**" in page
    assert json.loads((out / "report.json").read_text())["state"] == "interrupted"
    assert str(out / "report.md") in said
    assert (tmp_path / "out.tar.gz").exists()


# What is private -----------------------------------------------------------------------------


def test_no_name_of_a_person_or_machine_is_left(tmp_path, monkeypatch):
    home = tmp_path / "homes" / "ada.l"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "ada.l")
    monkeypatch.setattr(platform, "node", lambda: "babbage7.example.org")
    monkeypatch.setattr("socket.gethostname", lambda: "babbage7")
    out = home / "kv" / "out"
    lines = [
        f"{home}/work/x.py and ~ada.l, pytest-of-ada.l", "ran on Babbage7.example.org (babbage7)",
        "/home/grace/code.py, /Users/alan", f"{ROOT}/tests/test_x.py",
        "GPU-01234567-89ab-cdef-0123-456789abcdef", "the canada.law and babbage70 stay",
    ]  # fmt: skip
    code = (
        "import json, sys\nfor line in json.loads(sys.argv[1]): print(line)\n"
        "json.dump({'path': sys.argv[2]}, open(sys.argv[2], 'w'))\nsys.exit(2)"
    )
    part = stand_in("first", code, json.dumps(lines), "{result}", result="first.json")
    reported(out, part)
    from gpu.private import pack

    with tarfile.open(pack(out)) as archive:
        members = archive.getmembers()
        texts = {m.name: archive.extractfile(m).read().decode() for m in members if m.isfile()}
    assert {"out/report.md", "out/report.json", "out/logs/first.log", "out/results/first.json"} == (
        texts.keys()
    )
    assert all((m.uid, m.gid, m.uname, m.gname) == (0, 0, "", "") for m in members)
    for name, text in texts.items():
        for private in ("ada.l", "babbage7.", "Babbage", "(babbage7)", "grace", "alan", str(ROOT)):
            assert private not in text.replace("canada.law", ""), (name, private)
    said = texts["out/logs/first.log"]
    assert "~/work/x.py and ~USER, pytest-of-USER" in said and "ran on HOST (HOST)" in said
    assert "/home/USER/code.py, /Users/USER" in said
    assert "<checkout>/tests/test_x.py" in said and "GPU-UUID" in said
    assert "the canada.law and babbage70 stay" in said
    assert json.loads(texts["out/results/first.json"]) == {"path": "<report>/results/first.json"}


def test_names_that_everybody_has_are_no_secret():
    from gpu.private import Anonymiser

    private = Anonymiser({}, {"root": "USER", "localhost": "HOST", "": "USER", "x": "USER"})
    assert private.text("root of x on localhost") == "root of x on localhost"


# The command line ----------------------------------------------------------------------------


def no_tools():
    return dict.fromkeys(("compute-sanitizer", "ncu"))


def all_parts(device="cuda", extent="full", **options):
    from gpu.parts import parts

    return parts(device, extent=extent, tools=options.pop("tools", no_tools()), **options)


def test_every_test_file_is_run_by_one_part():
    files = {str(path) for path in (ROOT / "tests").rglob("test_*.py")}
    taken = []
    for part in all_parts():
        if part.group != "suite":
            continue
        paths = [word for word in part.command if word.startswith(str(ROOT))]
        ignored = [word[9:] for word in part.command if word.startswith("--ignore=")]
        taken += [
            name for name in files
            if any(name.startswith(path + os.sep) for path in paths)
            and not any(name.startswith(path + os.sep) for path in ignored)
        ]  # fmt: skip
    assert sorted(taken) == sorted(files)


def test_every_script_that_writes_json_is_run():
    from bench import BENCHMARKS

    named = {
        path.stem for path in SCRIPTS.glob("*.py")
        if re.search(r'"--json", \w+=|frame\.(main|parse)\(', path.read_text())
    } | {f"bench_{name}" for name in (*BENCHMARKS, "models")}  # fmt: skip
    named |= {"overlap_demo", "overlap_demo_offload"}
    named -= {"fault_table", "fuzz", "order_table"}  # of the host device alone
    named -= {"quantisation_study"}  # of no device
    named -= {
        "bench_disk",
        "bench_shared",
        "bench_migration",
        "disaggregated_demo",
    }  # of host memory alone
    named -= {"bench_blocks", "bench_growth", "bench_memory"}
    named -= {"vllm_check", "vllm_demo"}  # of the host device, and of vLLM on a CPU
    assert {p.name for p in all_parts() if p.group == "bench"} == named


@pytest.mark.parametrize("extent", ["full", "quick", "smoke"])
def test_the_scripts_take_what_they_are_given(extent, monkeypatch):
    """Each script's own parser reads the arguments of its part."""
    import argparse
    import importlib

    def only_read(parser, argv=None, _read=argparse.ArgumentParser.parse_args):
        _read(parser, argv)
        raise InterruptedError

    for device in ("cuda", "host"):
        for part in all_parts(device, extent):
            if part.group not in ("bench", "operations", "verify"):
                continue
            if "-m" in part.command:
                at, module = part.command.index("kvcupy"), "kvcupy.__main__"
            else:
                script = next(Path(word) for word in part.command if word.endswith(".py"))
                at = part.command.index(str(script))
                module = ".".join(script.relative_to(SCRIPTS).with_suffix("").parts)
            with monkeypatch.context() as patch, pytest.raises(InterruptedError):
                patch.setattr(argparse.ArgumentParser, "parse_args", only_read)
                importlib.import_module(module).main(part.command[at + 1 :])


def test_pictures_are_drawn_where_that_can_be_done(monkeypatch):
    from gpu import parts as gpu_parts

    def drawing():
        return {part.name for part in all_parts() if "--out" in part.command}

    monkeypatch.setattr(gpu_parts, "find_spec", lambda name: object())
    assert drawing() == {"overlap_demo", "overlap_demo_offload", "serve_demo"}
    monkeypatch.setattr(gpu_parts, "find_spec", lambda name: None)
    assert drawing() == set()


def test_what_cannot_run_is_named():
    found = all_parts(no_device="no driver")
    assert [part.name for part in found if not part.missing] == ["doctor"]
    assert all("cuda cannot be used" in part.missing for part in found[1:])
    found = {part.name: part.missing for part in all_parts()}
    assert "compute-sanitizer is not installed" in found["racecheck"]
    assert "ncu is not installed" in found["ncu"]
    assert not found["gpu-cuda_gpu"]
    quick = next(p for p in all_parts(extent="quick") if p.name == "suite")
    files = [word for word in quick.command if word.endswith(".py")]
    assert files and all(Path(file).is_file() for file in files)


def test_only_takes_parts_and_groups():
    from gpu.report import chosen_parts

    found = all_parts()
    names = [part.name for part in chosen_parts(found, ["sanitizer", "ncu"])]
    assert names == ["memcheck", "racecheck", "synccheck", "initcheck", "ncu"]
    assert chosen_parts(found, None) == found
    gpu = [part.name for part in chosen_parts(found, ["gpu"])]
    assert "gpu-cuda_gpu_calls" in gpu and len(gpu) > 5
    with pytest.raises(ValueError, match=r"--only: expected one of bench, bench_calls.*got xyz"):
        chosen_parts(found, ["xyz"])


def test_the_plan_says_what_runs_and_how_long(capsys):
    from gpu.report import main

    assert main(["--device", "host", "--quick", "--list", "--only", "doctor", "bench"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"doctor +0.5 min  what is installed", said)
    assert re.search(r"About \d+ minutes on a GPU, by estimate", said)
    assert "memcheck" not in said
    assert main(["--device", "host", "--only", "nothing"]) == 2
    assert "--only: expected one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--device", "gpu"])
    assert "--device: expected host, cuda or cuda:1, got gpu" in capsys.readouterr().err


def test_without_a_gpu_the_reason_is_said_first(tmp_path, monkeypatch, capsys):
    from gpu import environment as gpu_environment
    from gpu.report import main

    monkeypatch.setattr(gpu_environment, "no_device", lambda name: "no driver")
    arguments = ["--quick", "--only", "gpu", "memcheck", "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "cuda cannot be used: no driver.\nWith --device host" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.md").read_text()
    assert re.search(r"\*\*Finished: \d+ skipped.\*\*", page)
    assert "**Whether kvcupy works here is open, for this did not run: gpu.**" in page


def test_an_earlier_report_is_kept_and_nothing_else_overwritten(tmp_path):
    from gpu.report import make_room

    out = tmp_path / "out"
    make_room(out)
    (out / "report.json").write_text("{}")
    make_room(out)
    assert list(out.iterdir()) == []
    kept = [path for path in tmp_path.iterdir() if path != out]
    assert [path.name for path in kept[0].iterdir()] == ["report.json"]
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="--out: expected a new folder"):
        make_room(out)
    with pytest.raises(ValueError, match="--out: expected a folder, got a file"):
        make_room(out / "thesis.txt")
    assert (out / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (["passed"] * 6, "kvcupy works here."),
        (["passed"] * 5 + ["failed"], "kvcupy works here, but these failed: bench."),
        (["passed", "failed"] + ["passed"] * 4, "does not work here: verify: 2 kernels differ"),
        (["passed"] * 3 + ["failed", "passed", "passed"], "does not work here: gpu-streams: "),
        (["passed", "not run"] + ["passed"] * 4, "is open, for this did not run: verify."),
        (["passed", "passed", "passed", "skipped", "passed", "passed"], "kvcupy works here."),
        (["skipped"] * 6, "did not run: doctor, verify, operations, gpu."),
    ],
)  # fmt: skip
def test_the_first_line_says_whether_it_works(states, said):
    """By what decides it: not by benchmarks, nor by one of several files that was skipped."""
    from gpu.page import Result, page

    groups = {"doctor": "doctor", "verify": "verify", "operations": "operations",
              "gpu-streams": "gpu", "gpu-graphs": "gpu", "bench": "bench"}  # fmt: skip
    results = [
        Result(replace(stand_in(name, ""), group=group), state, "2 kernels differ")
        for (name, group), state in zip(groups.items(), states, strict=True)
    ]
    first = page(results, ABOUT, state="finished", options="").splitlines()[2]
    assert first.startswith("**") and said in first


def test_quick_and_smoke_runs_end_in_time():
    for extent, minutes in (("quick", 15), ("smoke", 3.5)):
        chosen = all_parts(extent=extent, tools=dict.fromkeys(("compute-sanitizer", "ncu"), "it"))
        assert {"doctor", "verify", "operations"} <= {part.group for part in chosen}
        assert sum(part.minutes for part in chosen) <= minutes
    assert {part.group for part in chosen} == {"doctor", "verify", "operations", "bench"}


def test_each_file_of_gpu_tests_has_a_process_and_connections_of_its_own():
    marked = {
        path for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(@|pytestmark = |    )pytest.mark.gpu", path.read_text(), re.MULTILINE)
    }  # fmt: skip
    parts = [part for part in all_parts() if part.group == "gpu"]
    assert {Path(part.command[-1]) for part in parts} >= marked
    assert all(part.limit_s <= 300 for part in parts)
    for part in all_parts():
        connections = part.variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
        assert connections == ("32" if part.group in ("gpu", "suite") else None), part.name


# Questions to the driver ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (
            "print('said before'); print('works; the capture survives')",
            "works; the capture survives",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("raise OSError('no libcuda')", "OSError: no libcuda"),
    ],
)
def test_a_question_that_hangs_or_crashes_is_answered_by_that(code, answer, monkeypatch):
    from gpu import driver_facts

    started = subprocess.run

    def run(command, **options):
        return started((sys.executable, "-c", code), **options)

    monkeypatch.setattr(driver_facts.subprocess, "run", run)
    assert driver_facts.ask("cudaFree in a global capture", 1.0) == answer


def test_questions_call_what_cupy_has():
    """Without a GPU each ends at its first call, but every name that it uses is looked up."""
    runtime = pytest.importorskip("cupy_backends.cuda.api.runtime")
    from gpu import driver_facts

    named = set(re.findall(r"runtime\.(\w+)", Path(driver_facts.__file__).read_text()))
    assert len(named) > 12 and [name for name in named if not hasattr(runtime, name)] == []


def test_a_batched_copy_reads_memory_that_lives(monkeypatch):
    """What is freed before the call ends the process, which would be no answer of the driver."""
    from gpu import driver_facts

    sources, arange = [], driver_facts.np.arange

    def noted(*arguments, **options):
        array = arange(*arguments, **options)
        sources.append(weakref.ref(array))
        return array

    monkeypatch.setattr(driver_facts.np, "arange", noted)
    api = SimpleNamespace(
        memcpy_batch=lambda *_: 0, runtime=SimpleNamespace(malloc=lambda num_bytes: 4096)
    )
    copy = driver_facts._copy_batch(api)
    assert copy(0) == 0
    assert [source() is not None for source in sources] == [True]


# The doctor and NVIDIA's tools ---------------------------------------------------------------


@pytest.mark.parametrize("works", [True, False])
def test_the_doctors_page_is_read(tmp_path, monkeypatch, works):
    from gpu.run import Ended
    from gpu.verdicts import Files, of_doctor

    from kvcupy import doctor
    from kvcupy.doctor import Probe

    broken = Probe("failed", "no kernel image")
    cuda = Probe("kernel", seconds=2.0) if works else broken
    monkeypatch.setattr(doctor, "probe_apart", lambda n: cuda if n == "cuda" else Probe("kernel"))
    page = tmp_path / "page.txt"
    page.write_text(doctor.page()[0])
    verdict = of_doctor("cuda")(Ended("exited", 0, 1.0), Files(page, page, page))
    assert verdict.state == ("passed" if works else "failed")
    expected = "cuda: yes: rows stored" if works else "cuda: no: no kernel image"
    assert verdict.summary.startswith(expected)
    assert of_doctor("host")(Ended("exited", 0, 1.0), Files(page, page, page)).state == "passed"


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


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Puts stand-ins for NVIDIA's tools on the PATH, which print and end as a test wants it."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    bash = shutil.which("bash")

    def make(name: str, text: str, status: int, *, to_log: str = "") -> Path:
        (folder / "said").write_text(text + "\n")
        (folder / "logged").write_text(to_log)
        tool = folder / name
        tool.write_text(
            f"#!{bash}\nprintf '%s\\n' \"$@\" >>'{folder}/asked'\ncat '{folder}/said'\n"
            "while (($#)); do\n"
            f"  if [[ $1 == --log-file ]]; then cat '{folder}/logged' >\"$2\"; fi\n  shift\n"
            f"done\nexit {status}\n"
        )
        tool.chmod(0o755)
        return folder / "asked"

    return make


@pytest.mark.parametrize("case", SANITIZED)
def test_what_compute_sanitizer_says(tmp_path, tools, case):
    from gpu.environment import tool

    text, status, state, summary = SANITIZED[case]
    asked = tools("compute-sanitizer", text, status)
    path = tool("compute-sanitizer")
    part = next(p for p in all_parts("host", tools={**no_tools(), "compute-sanitizer": path})
                if p.name == "racecheck")  # fmt: skip
    well, page, states = reported(tmp_path / "out", part)
    assert states == {"racecheck": state} and well == (state == "passed")
    assert f"| {summary} |" in page
    assert ("store_" in page) == ("store_" in text)
    words = asked.read_text().splitlines()
    assert words[words.index("--tool") + 1] == "racecheck"
    assert words[-3:] == [str(SCRIPTS / "gpu" / "every_operation.py"), "--device", "host"]


def test_a_program_that_calls_no_cuda_is_no_pass_on_a_gpu(tmp_path, tools):
    tools("compute-sanitizer", UNUSED, 255)
    path = {**no_tools(), "compute-sanitizer": "compute-sanitizer"}
    part = next(p for p in all_parts("cuda", tools=path) if p.name == "memcheck")
    _, page, states = reported(tmp_path / "out", part)
    assert states == {"memcheck": "failed"} and "before first instrumented API call" in page


NCU = """==PROF== Connected to process 1
==PROF== Profiling "store_copy" - 0: 0%....50%....100% - 4 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__time_duration.sum","launch__registers_per_thread",\
"sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","","","","","","","%","us","register/thread","%"
"0","1","python3","127.0.0.1","void store_copy<16>(CacheRowsParams)","1","7","(256, 1, 1)",\
"(132, 1, 1)","0","9.0","81.25","12.3","40","93.5"
"1","1","python3","127.0.0.1","void store_copy<16>(CacheRowsParams)","1","7","(256, 1, 1)",\
"(132, 1, 1)","0","9.0","80.00","12.5","40","93.1"
"2","1","python3","127.0.0.1","attention_decode<bfloat16, 4, 1, 0>(AttentionParams)","1","7",\
"(128, 1, 1)","(8, 8, 4)","0","9.0","70.50","99.0","168","22.0"
"""
DENIED = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"


@pytest.mark.parametrize(
    ("logged", "status", "state", "summary"),
    [
        (NCU, 0, "passed", "2 kernels measured"),
        (DENIED, 1, "skipped", "not permitted (ERR_NVGPUCTRPERM): run it as root"),
        ("==PROF== nothing", 0, "failed", "no kernel was measured"),
        (NCU, 9, "failed", "exit status 9"),
    ],
)
def test_what_ncu_says(tmp_path, tools, logged, status, state, summary):
    from gpu.environment import tool

    asked = tools("ncu", "program output", status, to_log=logged)
    part = next(p for p in all_parts("host", tools={**no_tools(), "ncu": tool("ncu")})
                if p.name == "ncu")  # fmt: skip
    _, page, states = reported(tmp_path / "out", part)
    assert states == {"ncu": state}
    assert summary in page
    rows = ("| `store_copy<16>` | (132, 1, 1) | (256, 1, 1) | 12.3 us | 81.25 | 93.5 | 40 |",
            "| `attention_decode<bfloat16, 4, 1, 0>` | (8, 8, 4) | (128, 1, 1) | 99.0 us | 70.50 "
            "| 22.0 | 168 |")  # fmt: skip
    assert all((row in page) == (state == "passed") for row in rows)
    assert "store_copy|" in asked.read_text() and "attention_prefill" in asked.read_text()


def test_tools_are_found_in_a_toolkit(tmp_path, monkeypatch):
    from gpu.environment import tool

    monkeypatch.setenv("PATH", "")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ncu"
    program.write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tool("ncu") != str(program)  # it cannot be run
    program.chmod(0o755)
    assert tool("ncu") == str(program)


SMI = """case "$*" in
  *query-gpu*) echo "GPU A, 9.0, 81559 MiB, 580.1, 5, 16, 700.00 W, Disabled"
               echo "GPU B, 8.0, 40960 MiB, 580.1, 4, 16, 400.00 W, [N/A]" ;;
  *query-compute-apps*) echo "300 MiB" ;;
  *) echo "| NVIDIA-SMI 580.1  Driver Version: 580.1  CUDA Version: 13.0 |" ;;
esac
"""


def test_the_gpus_are_described(tmp_path, monkeypatch):
    from gpu.environment import facts
    from gpu.page import page

    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!{shutil.which('bash')}\n{SMI}")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    about = facts("cuda:1", no_tools())
    assert [gpu["name"] for gpu in about["GPUs"]] == ["GPU A", "GPU B"]
    assert about["GPUs"][1]["compute_cap"] == "8.0" and about["CUDA of the driver"] == "13.0"
    assert about["other processes on the GPUs"] == 1
    shown = page([], about, state="finished", options="")
    assert "# kvcupy on cuda:1" in shown and "CUDA_VISIBLE_DEVICES 1" in shown
    assert re.search(r"\| GPUs \| name GPU A, compute_cap 9.0, .*; name GPU B", shown)


def test_a_whole_run_with_the_tools_standing_in(tmp_path, tools, capsys):
    from gpu.report import main

    tools("compute-sanitizer", CLEAN, 0)
    arguments = ["--device", "host", "--quick", "--only", "sanitizer", "--out", str(tmp_path / "o")]
    assert main(arguments) == 0
    page = (tmp_path / "o" / "report.md").read_text()
    assert "**Finished: 1 passed.**" in page
    for fact in (
        "| date |",
        "| commit |",
        "| GPUs |",
        "| CUDA of the driver |",
        "| loaded | driver ",
    ):
        assert fact in page
    assert re.search(r"\| versions \|.*numpy \d", page)
    with tarfile.open(tmp_path / "o.tar.gz") as archive:
        assert "o/report.md" in archive.getnames()
    assert "Please attach to an issue" in capsys.readouterr().out
    tools("compute-sanitizer", WRITE, 86)
    assert main(arguments) == 1


# What the tools look at ----------------------------------------------------------------------


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
