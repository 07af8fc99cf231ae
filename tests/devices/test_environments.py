"""The environments that people have: CUDA 12 and 13 side by side, old and new drivers, old NumPy.

Drivers and installed packages are stood in; `test_wheels` makes real environments of real wheels.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_cuda import CudaError, FakeApi

import kvcupy as kv
from kvcupy import cuda_api, extras
from kvcupy.commands import doctor
from kvcupy.devices import cuda
from kvcupy.errors import CompileError, DeviceError

ROOT = Path(__file__).resolve().parents[2]
CUDA12, CUDA13 = extras.install("cuda12"), extras.install("cuda13")


# --- Drivers ---


@pytest.mark.parametrize(
    ("driver", "cupy", "nvrtc", "said"),
    [
        (0, 12090, (12, 9), ["no NVIDIA driver", "libcuda.so.1"]),
        (11080, 12090, (12, 9), ["driver is for CUDA 11.8", "install driver 525"]),
        (12020, 12090, (12, 9), []),  # any compiler of the same major version
        (12090, 12090, (12, 3), []),
        (12040, 12090, None, []),  # what needs NVRTC says that it is missing
        (12040, 13020, (13, 0), ["CUDA 12.4", "CuPy is built for CUDA 13", CUDA12]),
        (12040, 12090, (13, 5), ["CUDA 12.4", "NVRTC 13.5", CUDA12]),
        (13000, 13020, (13, 5), []),
        (13000, 12090, (12, 9), []),
        (13000, 12090, (13, 5), []),
        (14000, 13020, (13, 5), []),
    ],
)
def test_what_a_driver_can_run(monkeypatch, driver, cupy, nvrtc, said):
    monkeypatch.setattr(cuda_api, "wheel_library", lambda library, major: None)
    complaint = cuda_api.driver_complaint(driver, cupy, nvrtc)
    assert bool(complaint) == bool(said) and "\n" not in complaint
    assert all(part in complaint for part in said), complaint


@pytest.fixture
def api(monkeypatch):
    """CUDA as CuPy shows it, stood in: a driver for CUDA 12.4, CuPy and NVRTC for 12.9."""
    api = FakeApi()
    monkeypatch.setattr(cuda_api, "CudaApi", lambda: api)
    monkeypatch.setattr(cuda, "CudaApi", lambda: api)
    monkeypatch.setattr("kvcupy.devices._devices", {})
    monkeypatch.setattr("kvcupy.devices._logged", set())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda_api, "driver_version", lambda: api.runtime.driver_version)
    return api


@pytest.mark.parametrize(
    ("cupy", "nvrtc", "said"), [(13020, (13, 2), "CuPy is built"), (12090, (13, 5), "NVRTC 13.5")]
)
def test_an_environment_that_the_driver_cannot_run_is_no_device(api, caplog, cupy, nvrtc, said):
    """Before the first compilation, and not as a kernel's failure."""
    api.runtime.runtime_version, api.nvrtc_version = cupy, nvrtc
    api.runtime.getDeviceCount = lambda: pytest.fail("CuPy's own error would hide the cause")
    with pytest.raises(DeviceError, match=said) as refusal:
        kv.device("cuda")
    assert cuda.why_not() == str(refusal.value).replace("cuda:0", "cuda")
    with caplog.at_level(logging.WARNING, logger="kvcupy"):
        assert [kv.default_device().name for _ in range(3)] == ["host"] * 3
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_a_gpu_that_another_process_has_for_itself_counts_as_none(api, monkeypatch, caplog):
    """In EXCLUSIVE_PROCESS mode the driver lists it, and refuses a context."""

    def refuse():
        raise CudaError(46)

    monkeypatch.setattr(api.runtime, "memGetInfo", refuse)
    assert "46" in cuda.why_not()
    assert kv.default_device().name == "host"
    assert "46" in caplog.text


@pytest.mark.parametrize("hidden", [False, True])
def test_nothing_is_logged_without_a_driver_or_with_a_hidden_gpu(api, monkeypatch, caplog, hidden):
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        api.runtime.count = 0
    else:
        api.runtime.driver_version = 0
    assert kv.default_device().name == "host"
    assert not caplog.records


@pytest.mark.parametrize(("status", "lasts"), [(222, True), (209, True), (200, True), (2, False)])
def test_an_image_that_the_driver_refuses_is_not_tried_again(api, monkeypatch, status, lasts):
    """Out of memory it may load later."""
    from kvcupy.devices import cuda
    from kvcupy.ops.store import COPY

    def refuse(path):
        loads.append(path)
        raise CudaError(status)

    loads: list[str] = []
    compiled = SimpleNamespace(image=b"", lowered_name="f", target="sm_90")
    monkeypatch.setattr(cuda.nvrtc, "compile_cubin", lambda *_: compiled)
    monkeypatch.setattr(cuda.nvrtc, "compiler", lambda: "NVRTC 12.9.86")
    monkeypatch.setattr(api.cupy, "RawModule", refuse)
    device = kv.device("cuda")
    for _ in range(2):
        with pytest.raises(CompileError) as refusal:
            device.load(COPY.specialise(16))
    assert len(loads) == (1 if lasts else 2)
    cause = "NVRTC 12.9.86; the driver is for CUDA 12.4"
    assert refusal.value.transient != lasts and (cause in str(refusal.value)) == lasts


# --- NumPy and the libraries of CuPy ---


@pytest.mark.parametrize(("cupy", "wheel"), [(12, "nvidia-cublas-cu12"), (13, "nvidia-cublas")])
def test_array_expressions_without_cublas_say_how_to_install_it(api, monkeypatch, cupy, wheel):
    def multiply():
        raise ImportError("libcublas.so: cannot open shared object file")

    monkeypatch.setattr(cuda_api, "cupy_major", lambda: cupy)
    device = kv.device("cuda")
    with pytest.raises(DeviceError, match=rf"libcublas.so.*\(pip install {wheel}\)$"):
        device.run(multiply, device.stream())


@pytest.mark.parametrize("version", ["2.0.2", "2.1.0", "2.1.1"])
def test_a_numpy_without_which_cupy_has_no_bfloat16_is_named(version):
    with pytest.raises(DeviceError, match=rf"NumPy {version}.*pip install 'numpy>=2.1.2'"):
        cuda_api.require_numpy(version)


FILES = {  # as NVIDIA's wheels name them
    (12, "nvrtc"): "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    (13, "nvrtc"): "nvidia/cu13/lib/libnvrtc.so.13",
    (12, "cublas"): "nvidia/cublas/lib/libcublas.so.12",
    (13, "cublas"): "nvidia/cu13/lib/libcublas.so.13",
}


@pytest.mark.parametrize("cupy", [12, 13])
@pytest.mark.parametrize("majors", [(12,), (13,), (12, 13)])
def test_where_wheels_of_both_are_installed_those_of_cupy_are_loaded(
    tmp_path, monkeypatch, cupy, majors
):
    for (major, _), name in FILES.items():
        if major in majors:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
    cuda_of_cupy = tmp_path / "cupy" / ".data" / "_wheel.json"
    cuda_of_cupy.parent.mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").touch()
    cuda_of_cupy.write_text(json.dumps({"cuda": f"{cupy}.x"}))
    opened = []

    def load(name, *_):
        if not str(name).startswith(str(tmp_path)):
            raise OSError(f"{name}: cannot open")
        opened.append(str(Path(name).relative_to(tmp_path)))

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    cuda_api.load_matching_libraries.__wrapped__()
    both = len(majors) == 2
    assert opened == [FILES[cupy, "nvrtc"], FILES[cupy, "cublas"]] * both


# --- torch ---

TORCH_FOR_12 = "https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize("driver", ["12.4", "13.0"])
@pytest.mark.parametrize("cuda", ["12.6", "13.0", None])
def test_a_torch_that_the_driver_cannot_run_is_named(tmp_path, monkeypatch, driver, cuda):
    smi = tmp_path / "nvidia-smi"
    banner = f"Driver Version: 550.54   CUDA Version: {driver}"
    smi.write_text(f"#!/bin/sh\n[ $# = 0 ] && echo '{banner}' || echo 'L4, 8.9, 1 MiB, 550'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "version.py").write_text(f"cuda: Optional[str] = {cuda!r}\n")
    torch = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(doctor, "find_spec", lambda name: torch)
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1.0")
    row = next(row for row in doctor.versions() if row.label == "torch")
    if (driver, cuda) == ("12.4", "13.0"):
        assert "built for CUDA 13, which the driver does not support" in row.text
        assert "pip uninstall -y torch &&" in row.remedy and TORCH_FOR_12 in row.remedy
    else:
        assert (row.text, row.remedy) == ("1.0", None)


# --- Real wheels ---

CUPY12 = ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12")
CUPY13 = ("cupy-cuda13x", "nvidia-cuda-nvrtc>=13,<14", "nvidia-cuda-runtime>=13,<14")
SCRIPT = """
import json, sys
from kvcupy import cuda_api
from kvcupy.devices import cuda, nvrtc
from kvcupy.ops.store import COPY

said = {"why_not": cuda.why_not()}
if "NumPy" not in said["why_not"]:
    api = cuda_api.CudaApi()
    image = nvrtc.compile_cubin(COPY.specialise(16), "sm_90").image
    import cupy
    from cupy._core.core import assemble_cupy_compiler_options
    program = cupy.cuda.compiler._NVRTCProgram(
        "#include <cupy/carray.cuh>\\nextern \\"C\\" __global__ void f(int* a) { a[0] = 1; }",
        "f.cu", method="cubin")
    program.compile((*assemble_cupy_compiler_options(()), "-arch=sm_90"))
    said |= {
        "nvrtc": api.nvrtc_version[0],
        "loaded": [cuda_api.loaded_library("nvrtc", major) is not None for major in (12, 13)],
        "abi": image[8],
        "complaints": {
            driver: cuda_api.driver_complaint(
                driver, api.runtime.runtimeGetVersion(), api.nvrtc_version)
            for driver in (12020, 12040, 13000)
        },
    }
print("said", json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="NVIDIA publishes wheels for Linux on x86-64 and ARM only",
)
@pytest.mark.parametrize(
    ("wheels", "nvrtc", "usable"),
    [
        ((*CUPY12, "numpy==2.1.1"), None, None),
        ((*CUPY12, *CUPY13[1:]), 12, {12020, 12040, 13000}),
        ((CUPY12[0], *CUPY13[1:]), 13, {13000}),
        ((*CUPY13, *CUPY12[1:]), 13, {13000}),
    ],
    ids=["12-numpy211", "12-both", "12-nvrtc13", "13-both"],
)  # fmt: skip
def test_wheels(tmp_path, wheels, nvrtc, usable):
    """Imports and compilations of CuPy and of kvcupy in an environment of real wheels."""
    environment = tmp_path / "environment"
    python = str(environment / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    requirements = ["ml_dtypes", "platformdirs", "tqdm", "xxhash", *wheels]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *requirements],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"pip: {(done.stderr.strip().splitlines() or ['no pip'])[-1]}")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "KVCUPY_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([python, "-c", SCRIPT], env=variables, capture_output=True, text=True)
    shutil.rmtree(environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.rpartition("said ")[2])
    if nvrtc is None:
        assert "pip install 'numpy>=2.1.2'" in said["why_not"]
        return
    assert "NumPy" not in said["why_not"]
    assert (said["nvrtc"], said["loaded"]) == (nvrtc, [nvrtc == 12, nvrtc == 13])
    complaints = said["complaints"]
    assert {int(driver) for driver, text in complaints.items() if not text} == usable
    assert all("pip " in text and "\n" not in text for text in complaints.values() if text)
