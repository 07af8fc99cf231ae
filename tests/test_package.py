"""The package as installed: what importing does, where the kernels are, what a wheel holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from kvcupy import sources
from kvcupy.errors import KvcupyError

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, *, cwd: Path, path: Path) -> str:
    """Run code in a new process that finds packages at `path` first, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Importing ---------------------------------------------------------------------------------------

IMPORT = """
import json, sys
events, imports = [], set()
def hook(name, args):
    events.append((name, repr(args)))
    if name == "import":  # tried, whether the module is installed or not
        imports.add(args[0].split(".")[0])
sys.addaudithook(hook)
import kvcupy
names = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system", "ctypes.dlopen")
print(json.dumps({
    "imports": sorted(imports),
    "started": [event for event in events if event[0] in names[:-1]],
    "libraries": [args for name, args in events if name == names[-1]],
    "made": [event for event in events if event[0] == "os.mkdir"],
}))
"""


def test_import_touches_no_device_and_compiles_nothing(tmp_path):
    seen = json.loads(run_python(IMPORT, cwd=tmp_path, path=ROOT))
    assert not {"cupy", "cupyx", "torch", "cuda", "matplotlib"} & set(seen["imports"])
    assert seen["started"] == []
    assert [name for name in seen["libraries"] if "cuda" in name or "nvrtc" in name] == []
    assert [event for event in seen["made"] if "__pycache__" not in event[1]] == []


def test_python_without_the_gil_is_refused(tmp_path):
    code = "import sys; sys._is_gil_enabled = lambda: {}; import kvcupy; print(kvcupy.__name__)"
    assert run_python(code.format(True), cwd=tmp_path, path=ROOT).strip() == "kvcupy"
    with pytest.raises(AssertionError, match=r"ImportError: .* PYTHON_GIL=1"):
        run_python(code.format(False), cwd=tmp_path, path=ROOT)


# kernels_src -------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of kernels_src in another checkout, which `sources` takes for the package's."""
    shutil.copytree(ROOT / "kernels_src", tmp_path / "kernels_src")
    (tmp_path / "kvcupy").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "kvcupy")
    return tmp_path


def test_no_kernels_is_an_error_that_names_the_place(tree):
    (tree / "pyproject.toml").unlink()
    with pytest.raises(KvcupyError, match=r"kvcupy.kernels_src"):
        sources.kernels_dir()


def test_digest_is_of_names_and_contents(tree):
    before = sources.digest()
    assert before == sources.digest()
    header = tree / "kernels_src" / "common.cuh"
    text = header.read_bytes()
    header.write_bytes(text + b"\n")
    edited = sources.digest()
    assert edited != before
    header.write_bytes(text)
    assert sources.digest() == before
    header.rename(header.with_name("renamed.cuh"))
    assert sources.digest() not in (before, edited)


# NVIDIA's headers --------------------------------------------------------------------------------


def make_headers(folder: Path, version: int | None, target: str | None = None) -> Path:
    """Make a folder that looks like CUDA's headers of `version`, and `nv/target` at `target`."""
    folder.mkdir(parents=True)
    if version is not None:
        for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
            (folder / name).touch()
        (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    if target is not None:
        (folder / target / "nv").mkdir(parents=True)
        (folder / target / "nv" / "target").touch()
    return folder


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A process that finds no CUDA headers but those under the folder returned."""
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sources, "_cupy_target", lambda: None)
    monkeypatch.setattr(sources, "_TOOLKIT", tmp_path / "toolkit" / "include")
    return tmp_path


def test_headers_of_the_version_asked_for_come_from_its_wheel(bare):
    twelve = make_headers(bare / "nvidia" / "cuda_runtime" / "include", 12090)
    thirteen = make_headers(bare / "nvidia" / "cu13" / "include", 13050)
    assert sources.cuda_include_dirs(12) == [twelve]
    assert sources.cuda_include_dirs(13) == [thirteen]
    assert sources.cuda_include_dirs(14) == [twelve]  # better than none


# Wheel and sdist ---------------------------------------------------------------------------------


def build(kind: str, folder: Path) -> Path:
    """Build a "wheel" or an "sdist" of this checkout with its own build backend."""
    pytest.importorskip("hatchling", reason="builds need hatchling")
    code = f"from hatchling.build import build_{kind}; print(build_{kind}({str(folder)!r}))"
    return folder / run_python(code, cwd=ROOT, path=ROOT).split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def kernel_files() -> set[str]:
    files = (ROOT / "kernels_src").rglob("*")
    return {path.relative_to(ROOT).as_posix() for path in files if path.is_file()}


def test_wheel_holds_package_and_kernels_and_no_more(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"kvcupy/{name}" for name in kernel_files()} <= names
    assert "kvcupy/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"kvcupy", "kvcupy-0.1.0.dist-info"}
    assert "kvcupy-0.1.0.dist-info/licenses/LICENSE" in names


def test_every_extra_that_another_names_exists(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("kvcupy-0.1.0.dist-info/METADATA").decode()
    fields = [line.split(": ", 1) for line in metadata.split("\n\n")[0].splitlines()]
    extras = {value for name, value in fields if name == "Provides-Extra"}
    named = {
        extra
        for name, value in fields
        if name == "Requires-Dist" and value.startswith("kvcupy[")
        for extra in value.split("[")[1].split("]")[0].split(",")
    }
    assert named <= extras
    assert {"cuda12", "cuda13", "host", "plot", "test", "torch", "dev"} <= extras
    host = [
        value for name, value in fields if name == "Requires-Dist" and "extra == 'host'" in value
    ]
    assert [re.split(r"[^\w-]", value)[0] for value in host] == ["ziglang"]


STORE = """
import numpy as np
import kvcupy as kv
from kvcupy import sources

kv.config.fallback = "error"
rows = np.arange(16, dtype=np.float16).reshape(1, 2, 8)
k_cache, v_cache = np.zeros((4, 2, 8), np.float16), np.zeros((4, 2, 8), np.float16)
kv.store_kv(rows, -rows, k_cache, v_cache, np.array([2]))
assert (k_cache[2] == rows[0]).all() and (v_cache[2] == -rows[0]).all()
assert not k_cache[[0, 1, 3]].any() and not v_cache[[0, 1, 3]].any()
print(kv.__file__)
print(sources.kernels_dir())
"""


@pytest.fixture(scope="module")
def project(wheel, tmp_path_factory):
    """A user's project: a program, and an environment with the wheel."""
    pytest.importorskip("pip", reason="installing needs pip")
    folder = tmp_path_factory.mktemp("project")
    (folder / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", packages_of(folder), wheel], check=True, capture_output=True)
    (packages_of(folder) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def packages_of(project: Path) -> Path:
    (packages,) = (project / "env").glob("lib/python*/site-packages")
    return packages


def test_installed_wheel_stores_rows_with_the_kernels_that_it_brought(project, tmp_path):
    site = packages_of(project)
    package, kernels = run_python(STORE, cwd=tmp_path, path=site).split()
    assert Path(package) == site / "kvcupy" / "__init__.py"
    assert Path(kernels) == site / "kvcupy" / "kernels_src"


# Types -------------------------------------------------------------------------------------------

PROGRAM = """
from typing import Any

import numpy as np

import kvcupy as kv

x: Any = 0
kv.config.strict = True
kv.config.fallback = "error"
kv.config.nosuch = True  # mistake
kv.config.strict = "yes"  # mistake
kv.config.fallback = "never"  # mistake
kv.config.verify = "always"  # mistake
kv.config.strict_index_faults = "print"  # mistake
kv.store_kv(x, x, x, x, x, layout="HND")
kv.store_kv(x, x, x, x, x, layout="NDH")  # mistake
kv.gather_kv(x, x, x, layout="NDH")  # mistake
kv.rope_store_kv(x, x, x, x, x, x, x, x, layout="NDH")  # mistake
kv.paged_attention(x, x, x, x, x, layout="NDH")  # mistake
kv.merge_states(x, x, x, x, lse_base="10")  # mistake
kv.store_kv(np.zeros(1), wrong=1)  # mistake
kv.no_such_name  # mistake
metrics: list[kv.metrics.Metric] = kv.metrics.collect()
stream: kv.devices.protocol.Stream = kv.device("host").stream()
pool = kv.KVPool(4, 2, 1, 1, 8, layout="page_first", placement="pinned")
kv.KVPool(4, 2, 1, 1, 8, layout="page")  # mistake
kv.MLAPool(4, 2, 1, 8, placement="host")  # mistake
kv.KVPool.wrap(x, x, layout="first")  # mistake
kv.transfer_pages(pool, pool, [0], [1], method="dma")  # mistake
kv.TransferEngine(pool, pool, method="dma")  # mistake
kv.PagedKVCache(num_q_heads=1, rope_mode="rotated")  # mistake
kv.Encoding("nvfp4", scale_rule="max")  # mistake
tiers = kv.TieredCache(pool, pool, write="back")
blocks: str = tiers.match([1]).device  # mistake
tiers.nosuch  # mistake
kv.TieredCache(pool, pool, write="both")  # mistake
kv.TieredCache(pool, pool, store=[])  # mistake
kv.TieredCache(groups=x, host_bytes=2**20, stores=["file:/x"])
with kv.order_checker(action="print"):  # mistake
    pass
"""
WRONG = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if "# mistake" in line}


def lines_of(errors: str) -> set[int]:
    """Return the lines of the program that a type checker complains about, and no other file."""
    found = re.findall(r"^\s*(\S+\.py):(\d+):(?:\d+ -)? error", errors, re.MULTILINE)
    assert {Path(name).name for name, _ in found} <= {"program.py"}, errors
    return {int(line) for _, line in found}


def test_mypy_knows_the_types_of_an_installed_wheel(project):
    pytest.importorskip("mypy", reason="needs mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", "env/bin/python"]
    done = subprocess.run([*command, "program.py"], cwd=project, capture_output=True, text=True)
    assert lines_of(done.stdout) == WRONG, done.stdout + done.stderr
