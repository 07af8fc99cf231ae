"""Print what a task still lacks, as arguments for `pip install`, one per line.

Runs before anything is installed, so that it imports the standard library alone until it knows
that the package's own requirements are there.

    python scripts/common/needs.py demo
    python scripts/common/needs.py test --torch
    python scripts/common/needs.py report --torch
    python scripts/common/needs.py dev
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from ctypes.util import find_library
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("numpy", "ml_dtypes", "platformdirs", "tqdm", "xxhash")
# --torch installs these: tensors, and the models' own rotations.
TORCH = {"torch": "torch==2.13.0", "transformers": "transformers>=5.16,<6"}
SANITIZER = "nvidia-cuda-sanitizer-api"  # compute-sanitizer
COMPILERS = ("c++", "g++", "clang++")
# torch's own wheels on PyPI need a driver for CUDA 13.
TORCH_FOR_CUDA12 = ("--extra-index-url", "https://download.pytorch.org/whl/cu126")
NVRTC = {"cuda12": "nvidia-cuda-nvrtc-cu12", "cuda13": "nvidia-cuda-nvrtc"}
# CuPy multiplies matrices with it, in the models of the scripts and where attention has no kernel.
CUBLAS = {"cuda12": "nvidia-cublas-cu12>=12.3", "cuda13": "nvidia-cublas>=13,<14"}


def lacks(*modules: str) -> bool:
    """Return whether one of these modules cannot be found."""
    return any(find_spec(module) is None for module in modules)


def lacks_compiler() -> bool:
    """Return whether this machine has no C++ compiler."""
    chosen = os.environ.get("CXX", "").split()
    present = any(shutil.which(name) for name in (*chosen[:1], *COMPILERS))
    return not present and lacks("ziglang")


def lacks_headers(extra: str) -> bool:
    """Return whether the headers are missing that the NVRTC of an extra compiles kernels with."""
    sys.path.insert(0, str(ROOT))
    from kvcupy import sources

    return not any(place.major == cuda_major(extra) for place in sources.header_places())


def has_cuda_wheels() -> bool:
    """Return whether CuPy and NVIDIA publish wheels for this system and processor."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def lacks_nvrtc(extra: str) -> bool:
    """Return whether CuPy, or the NVRTC of an extra, is missing."""
    return lacks("cupy") or lacks_library("nvrtc", NVRTC[extra], cuda_major(extra))


def lacks_cublas(extra: str) -> bool:
    """Return whether the cuBLAS is missing that belongs to the CuPy of an extra."""
    return lacks_library("cublas", re.split(r"[<>=]", CUBLAS[extra])[0], cuda_major(extra))


def lacks_library(name: str, wheel: str, major: int) -> bool:
    """Return whether one of CUDA's libraries is in no wheel and no toolkit of a CUDA version."""
    if wheel in installed() or (find_library(name) or "").endswith(f".so.{major}"):
        return False
    return not list(Path("/usr/local/cuda").glob(f"lib64/lib{name}.so.{major}*"))


def cuda_major(extra: str) -> int:
    """Return the CUDA version of an extra."""
    return int(extra.removeprefix("cuda"))


def lacks_nvdisasm() -> bool:
    """Return whether NVIDIA's disassembler is missing."""
    return "nvidia-cuda-nvdisasm" not in installed() and shutil.which("nvdisasm") is None


def lacks_sanitizer() -> bool:
    """Return whether compute-sanitizer is missing."""
    tool = "compute-sanitizer"
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    inside = any(Path(toolkit, "bin", tool).exists() for toolkit in toolkits if toolkit)
    return not inside and SANITIZER not in installed() and shutil.which(tool) is None


def installed() -> set[str]:
    """Return the names of all installed distributions."""
    names = (d.metadata["Name"] for d in distributions())
    return {name.lower().replace("_", "-") for name in names if name}


def driver_cuda() -> int:
    """Return the CUDA version of this machine's NVIDIA driver, 0 if no GPU can be used."""
    try:
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = re.search(r"CUDA\D*Version\s*:\s*(\d+)\.", smi.stdout)
    return int(version[1]) if smi.returncode == 0 and version else 0


def cuda_extra() -> str:
    """Return the extra of the CuPy that is installed, else the one for the driver."""
    for extra in CUBLAS:
        if f"cupy-{extra}x" in installed():
            return extra
    return "cuda13" if driver_cuda() >= 13 else "cuda12"


def missing(task: str, torch: bool = False, essential: bool = False) -> list[str]:
    """Return the arguments for `pip install`: what `task` lacks, or only what is essential to it.

    Without the rest a task does less: no picture, no GPU, no check of the CUDA compiler.
    """
    core = lacks(*CORE)
    wheels: list[str] = []
    extras = {
        "test": task != "demo" and lacks("pytest", "xdist", "hypothesis", "hatchling"),
        "dev": task == "dev" and lacks("ruff", "mypy", "clang_format", "importlinter"),
    }
    if not essential:
        extras["plot"] = lacks("matplotlib")
        extras["host"] = lacks_compiler()
        cuda = cuda_extra()
        gpu = driver_cuda() >= cuda_major(cuda)
        compiles = task != "demo" and has_cuda_wheels()  # for GPUs, even on a machine without one
        lacking = (compiles or gpu) and lacks_nvrtc(cuda)
        if not core:  # without them the package cannot look for headers yet
            lacking = lacking or ((compiles or gpu) and lacks_headers(cuda))
        extras[cuda] = lacking
        if gpu and lacks_cublas(cuda):
            wheels.append(CUBLAS[cuda])
        if compiles:
            extras["test"] |= lacks_nvdisasm()
    names = sorted(extra for extra, absent in extras.items() if absent)
    arguments = ["-e", f"{ROOT}[{','.join(names)}]" if names else str(ROOT)]
    if torch and lacks("torch") and driver_cuda() == 12:
        wheels += TORCH_FOR_CUDA12
    wheels += [release for name, release in TORCH.items() if torch and lacks(name)]
    return (arguments if core or names else []) + wheels


def missing_for_report(torch: bool = False, essential: bool = False) -> list[str]:
    """Return the same for a GPU report, with the sanitizer, which is for CUDA 13."""
    arguments = missing("report", torch, essential)
    if driver_cuda() >= 13 and not essential and lacks_sanitizer():
        arguments.append(f"{SANITIZER}>=13,<14")
    return arguments


def main() -> None:
    """Read the command line and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=("demo", "test", "report", "dev"))
    parser.add_argument("--torch", action="store_true", help="torch too")
    parser.add_argument("--essential", action="store_true", help="only what is indispensable")
    options = parser.parse_args()
    if options.task == "report":
        arguments = missing_for_report(options.torch, options.essential)
    else:
        arguments = missing(options.task, options.torch, options.essential)
    for argument in arguments:
        print(argument)


if __name__ == "__main__":
    main()
