"""`python -m kvcupy`: one line and a status for what is wrong, progress, and a clean stop."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import pytest

import kvcupy
from kvcupy import __main__ as command_line
from kvcupy import extras, ops, progress
from kvcupy.commands.doctor import environment
from kvcupy.devices import cuda, cxx, nvrtc
from kvcupy.errors import CompileError
from kvcupy.ops import store
from kvcupy.testing import verification
from kvcupy.testing.cases import cases

ROOT = Path(__file__).resolve().parents[1]
COMPILE_CHECK = str(ROOT / "scripts" / "compile_check.py")


def have_nvrtc() -> bool:
    try:
        nvrtc.nvrtc_version()
    except CompileError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not have_nvrtc(), reason="no NVRTC here")
needs_compiler = pytest.mark.skipif(cxx.find_compiler() is None, reason="no C++ compiler here")


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"kvcupy {kvcupy.__version__}\n"


def refused(capsys, *arguments: str) -> str:
    """Return the line that a command says before it ends with status 2."""
    assert command_line.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_a_device_that_is_none(capsys):
    line = refused(capsys, "calibrate", "--device", "frob")
    assert line.startswith("calibrate: device: expected ") and "'frob'" in line


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_42", "sm_91", "frob", "sm_", "90"])
def test_an_architecture_that_is_none(capsys, arch):
    line = refused(capsys, "compile", "--arch", "sm_90", arch)
    assert line.startswith("compile: --arch: expected ") and line.endswith(f"got {arch}")


@pytest.mark.parametrize("command", ["compile", "calibrate"])
def test_a_cache_that_keeps_nothing(monkeypatch, capsys, command):
    """It is said before the work, of which nothing would be left."""
    monkeypatch.setenv("KVCUPY_CACHE_DIR", "/dev/null/x")
    options = ["--device", "host"] if command == "calibrate" else []
    line = refused(capsys, command, *options)
    assert line.startswith(f"{command}: /dev/null: Not a directory") and "KVCUPY_CACHE_DIR" in line


# Compiling -----------------------------------------------------------------------------------


def few(monkeypatch, *found):
    monkeypatch.setattr(ops, "specialisations", lambda: list(found))


COPIES = [store.COPY.specialise(word) for word in (1, 2, 4)]


@needs_nvrtc
def test_kernels_are_compiled_into_the_cache(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path))
    few(monkeypatch, *COPIES)
    command = ["compile", "--arch", "sm_90", "--jobs", "2", "--progress"]
    assert command_line.main(command) == 0
    said = capsys.readouterr()
    assert "3 of 3 kernels" in said.err
    assert "3 kernels ready, 0 failed" in said.out
    assert len(list(tmp_path.glob("cubin-*"))) == 3
    monkeypatch.setattr(nvrtc, "_compile", None)  # found, not compiled
    assert all(nvrtc.compile_cubin(one, "sm_90").image for one in COPIES)


@needs_compiler
def test_what_fails_is_said_once_for_each_cause(monkeypatch, tmp_path, capsys):
    wrong = [store.CONVERT.specialise("half", "half", name) for name in ("nothing", "nought")]
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "why_not", lambda: "no GPU is asked")
    few(monkeypatch, COPIES[0], *wrong)
    assert command_line.main(["compile"]) == 1
    first, *causes = capsys.readouterr().out.splitlines()
    assert first.startswith("host    1 kernels ready, 2 failed")
    assert len(causes) == 2 and "nothing" in causes[0]


@pytest.mark.parametrize("command", [
    pytest.param(("-m", "kvcupy", "compile", "--arch", "sm_90"), marks=needs_nvrtc),
    pytest.param((COMPILE_CHECK, "--arch", "sm_90"), marks=needs_nvrtc),
    pytest.param(("-m", "kvcupy", "compile"), marks=needs_compiler),
])  # fmt: skip
def test_ctrl_c_stops_at_once_and_keeps_what_is_done(tmp_path, command):
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, *command, "--jobs", "2"],
        env={**environment(), "KVCUPY_CACHE_DIR": str(cache), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not kept(cache):
            assert time.monotonic() < deadline and process.poll() is None, "nothing was compiled"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)  # it takes tenths of a second
    finally:
        process.kill()
    assert process.returncode == 130
    (line,) = said.splitlines()
    assert line.startswith("stopped: ") and line.endswith(f"those stay in {cache}")
    assert 0 <= int(line.split()[1]) <= len(kept(cache))
    assert list(temporary.iterdir()) == []
    deadline = time.monotonic() + 60
    while members := running_in_group(process.pid):
        assert time.monotonic() < deadline, f"processes {members} go on"
        time.sleep(0.01)


def running_in_group(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, of_group, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended just now
        if int(of_group) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members


def kept(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.glob("*-*") if file.is_file())


# Processes -----------------------------------------------------------------------------------


def test_a_reader_that_ends_early():
    """As of `store list | head`: neither a traceback nor a message of Python's at exit."""
    code = (
        "import sys; from kvcupy import __main__; from kvcupy.commands import doctor;"
        "doctor.main = lambda: print('fine') or 0;"
        "sys.exit(__main__.main(['doctor']))"
    )
    command = [sys.executable, "-c", code]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert ended.returncode == 141
    assert ended.stderr == ""


def test_a_worker_that_dies_is_noticed():
    with pytest.raises(BrokenProcessPool):
        progress.run(os._exit, [3, 3], 1)


# Progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_checks_show_how_far_they_are(monkeypatch, capsys, terminal):
    few_cases = cases(["copy_pages"])
    monkeypatch.setattr(verification, "cases", lambda *_: few_cases)
    monkeypatch.setattr(verification, "own_cases", lambda: [])
    monkeypatch.setattr(verification, "_further_cases", lambda arch: [])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    total = len(few_cases)
    assert command_line.main(["verify", "--device", "host"]) == 0
    said = capsys.readouterr().err
    assert (f"{total}/{total}" in said and "100%" in said) if terminal else said == ""
    assert command_line.main(["verify", "--device", "host", "--progress"]) == 0
    said = capsys.readouterr().err
    assert (f"{total} of {total} cases, " in said) != terminal


# Logging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [
    pytest.param(cxx.build, marks=needs_compiler),
    pytest.param(partial(nvrtc.compile_cubin, arch="sm_90"), marks=needs_nvrtc),
])  # fmt: skip
def test_the_first_compilation_is_logged_with_its_time(monkeypatch, tmp_path, caplog, build):
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, logger="kvcupy")
    for _ in range(2):
        build(COPIES[0])
    first, second = (r.getMessage() for r in caplog.records if r.name == "kvcupy.compile")
    target = "host" if build is cxx.build else "sm_90"
    assert first == f"compiling store.cu:store_copy<1> for {target}"
    assert second.startswith(f"compiled store.cu:store_copy<1> for {target} in ")
    assert second.endswith(" s")


# Installing ----------------------------------------------------------------------------------


def test_a_wheel_names_the_packages_themselves(monkeypatch, tmp_path):
    listed = ["numpy>=2.0", "ziglang>=0.13; extra == 'host'", "kvcupy[headers]; extra == 'host'"]
    listed += ["a-header>=12; (sys_platform == 'linux') and extra == \"headers\"", "x; python<'4'"]
    monkeypatch.setattr(extras, "_PACKAGE", tmp_path / "kvcupy")
    monkeypatch.setattr(extras.metadata, "requires", lambda name: listed)
    assert extras.install("host") == "pip install 'ziglang>=0.13' 'a-header>=12'"
    assert extras.install("headers") == "pip install 'a-header>=12'"
