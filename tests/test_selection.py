"""Which cases run (`conftest.py`), and in which order: markers, options, and what is strict."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

PRODUCT = """
@pytest.mark.{marker}
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(4))
def test_{name}(a, b, c): pass
"""

OTHERS = """
@pytest.mark.covering
@pytest.mark.parametrize(("name", "value"), [("n", 0), ("m", 0), ("n", 1), ("m", 1)])
def test_table(name, value): pass

@pytest.mark.parametrize("size", [1, full_only(2)])
def test_sizes(size): pass

@pytest.mark.parametrize("a", [3, 4])
@pytest.mark.parametrize("b", [0, 1])
def test_quick(quick_host, a, b):
    assert kv.config.strict == ((a, b) == (3, 0))

def test_only(quick_host):
    assert kv.config.strict

def test_lenient(lenient_host):
    assert not kv.config.strict
"""

LIBRARY = """
import pytest

pytest.importorskip("library")

def test_library(): pass
"""

MIXED = """
import pytest

@pytest.mark.parametrize("number", range(12))
def test_alone(number): pass

def test_library():
    pytest.importorskip("library")

def test_seed(request):
    (request.path.parent / f"seed {request.config.option.strict_seed}").touch()
"""

MARKERS = {
    "once": "covering",
    "twice": "covering(2)",
    "again": "again",
    "all": 'filterwarnings("default")',
}


def run(folder: Path, *options: str, **modules: str) -> str:
    """Run test modules with the suite's own conftest; return what pytest prints."""
    shutil.copy(HERE / "conftest.py", folder)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, f"--rootdir={folder}"]
    result = subprocess.run(
        [*command, *options, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [HERE, HERE.parent, folder]))},
        cwd=folder, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def cases(output: str, test: str) -> list[tuple[str, ...]]:
    return [tuple(case.split("-")) for case in re.findall(rf"::test_{test}\[(.*)\] PASSED", output)]


@pytest.mark.parametrize("full", [False, True])
def test_which_cases_run(tmp_path, full):
    tests = [PRODUCT.format(marker=marker, name=name) for name, marker in MARKERS.items()]
    imports = ["import pytest", "from helpers import full_only", "import kvcupy as kv"]
    output = run(tmp_path, *["--full"] * full, test_cases="\n".join([*imports, *tests, OTHERS]))

    for name, count in (("once", 1), ("twice", 2), ("again", 1), ("all", 3)):
        count = min(count + full, 3)
        chosen = cases(output, name)
        for places in itertools.combinations(range(3), count):
            seen = {tuple(case[i] for i in places) for case in chosen}
            assert len(seen) == 4**count, f"{name}: values of parameters {places}"
        assert len(chosen) <= 1.5 * 4**count, f"{name}: many more than it takes"

    assert len(cases(output, "table")) == 4, "a row of a table is one value"
    assert cases(output, "sizes") == [("1",), ("2",)][: 1 + full]
    # These assert whether they are strict.
    assert len(cases(output, "quick")) == 4
    assert all(f"::test_{name} PASSED" in output for name in ("only", "lenient"))


def test_the_seed_in_the_header_orders_all_workers_and_the_next_run_takes_what_remains(tmp_path):
    output = run(  # xdist refuses workers that have collected in different orders
        tmp_path, "-n", "2", "--random-order", test_library=LIBRARY, test_mixed=MIXED
    )
    assert "13 passed, 2 skipped" in output
    (seed,) = re.findall(r"--strict-seed (\d+)", output)
    assert [path.name for path in tmp_path.glob("seed *")] == [f"seed {seed}"]
    assert "2 passed, 13 deselected" in run(tmp_path, "--remaining", library="")


STUBS = {  # of CuPy on a machine with a GPU: nothing that creates a context is there
    "cupy/__init__.py": "from types import SimpleNamespace as _N\n"
    "cuda = _N(memory=_N(OutOfMemoryError=MemoryError))",
    "cupy_backends/__init__.py": "",
    "cupy_backends/cuda/__init__.py": "",
    "cupy_backends/cuda/api/__init__.py": "",
    "cupy_backends/cuda/api/driver.py": "class CUDADriverError(Exception): pass",
    "cupy_backends/cuda/api/runtime.py": "class CUDARuntimeError(Exception): pass\n"
    "def driverGetVersion(): return 12040\n"
    "def runtimeGetVersion(): return 12090\n"
    "def getDeviceCount(): return 1\n",
}
GPU_TESTS = """
import os, pytest

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(6))
def test_on_gpu(n):
    open(f"gpu-{n}-{os.getpid()}", "w")
"""


def test_one_process_runs_the_tests_for_gpus(tmp_path):
    """The others create no context, which a GPU in exclusive mode would refuse."""
    pytest.importorskip("xdist")
    for name, text in STUBS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(HERE / "conftest.py", tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(GPU_TESTS)
    paths = [str(tmp_path), str(HERE), str(HERE.parent)]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={tmp_path}"]
    result = subprocess.run(
        [*command, "-n", "2", "--dist", "worksteal", "test_one.py", "test_two.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert "12 passed" in result.stdout, result.stdout + result.stderr
    processes = {file.name.rpartition("-")[2] for file in tmp_path.glob("gpu-*")}
    assert len(processes) == 1
