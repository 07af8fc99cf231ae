"""Which cases run (`conftest.py`): markers, ``--full``, and what is strict."""

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

MARKERS = {
    "once": "covering",
    "twice": "covering(2)",
    "again": "again",
    "all": 'filterwarnings("default")',
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The cases that run and pass, by whether ``--full`` is given."""
    folder = tmp_path_factory.mktemp("suite")
    shutil.copy(HERE / "conftest.py", folder)
    tests = [PRODUCT.format(marker=marker, name=name) for name, marker in MARKERS.items()]
    imports = ["import pytest", "from helpers import full_only", "import kvcupy as kv"]
    (folder / "test_cases.py").write_text("\n".join([*imports, *tests, OTHERS]))
    command = [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, f"--rootdir={folder}"]
    outputs = {}
    for full in (False, True):
        result = subprocess.run(
            [*command, *["--full"] * full, str(folder / "test_cases.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])},
            cwd=folder, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        outputs[full] = result.stdout
    return outputs


def cases(output: str, test: str) -> list[tuple[str, ...]]:
    return [tuple(case.split("-")) for case in re.findall(rf"::test_{test}\[(.*)\] PASSED", output)]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("name", "count"), [("once", 1), ("twice", 2), ("again", 1), ("all", 3)])
def test_each_combination_of_so_many_values_runs(ran, name, count, full):
    count = min(count + full, 3)
    chosen = cases(ran[full], name)
    for places in itertools.combinations(range(3), count):
        seen = {tuple(case[i] for i in places) for case in chosen}
        assert len(seen) == 4**count, f"values of parameters {places}"
    assert len(chosen) <= 1.5 * 4**count  # not many more than it takes


@pytest.mark.parametrize("full", [False, True])
def test_a_row_of_a_table_is_one_value(ran, full):
    assert len(cases(ran[full], "table")) == 4


@pytest.mark.parametrize("full", [False, True])
def test_values_for_full_runs(ran, full):
    assert cases(ran[full], "sizes") == [("1",), ("2",)][: 1 + full]


@pytest.mark.parametrize("full", [False, True])
def test_only_the_first_case_of_a_long_test_is_strict(ran, full):
    """Each case asserts whether it is."""
    assert len(cases(ran[full], "quick")) == 4
    assert all(f"::test_{name} PASSED" in ran[full] for name in ("only", "lenient"))
