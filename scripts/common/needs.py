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
CORE = ("numpy", "ml_dtypes", "platformdirs", "tqdm")
# What --torch is for: tensors, and the models' own rotations.
TORCH = {"torch": "torch==2.13.0", "transformers": "transformers>=5,<6"}
SANITIZER = "nvidia-cuda-sanitizer-api"  # compute-sanitizer
COMPILERS = ("c++", "g++", "clang++")
# CuPy multiplies matrices with it: the models in the scripts do, the package does not.
CUBLAS = {"cuda12": "nvidia-cublas-cu12>=12.3", "cuda13": "nvidia-cublas>=13,<14"}


def lacks(*modules: str) -> bool:
    """Return whether one of these modules cannot be found."""
    return any(find_spec(module) is None for module in modules)


def lacks_compiler() -> bool:
    """Return whether this machine has no C++ compiler."""
    chosen = os.environ.get("CXX", "").split()
    present = any(shutil.which(name) for name in (*chosen[:1], *COMPILERS))
    return not present and lacks("ziglang")


def lacks_headers() -> bool:
    """Return whether the headers that NVRTC compiles kernels with are missing."""
    sys.path.insert(0, str(ROOT))
    from kvcupy import sources

    return not sources.cuda_include_dirs()


def has_cuda_wheels() -> bool:
    """Return whether CuPy and NVIDIA publish wheels for this system and processor."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def lacks_nvrtc() -> bool:
    """Return whether CuPy or NVRTC is missing."""
    wheel = any(name.startswith("nvidia-cuda-nvrtc") for name in installed())
    toolkit = find_library("nvrtc") or list(Path("/usr/local/cuda").glob("lib64/libnvrtc.so*"))
    return lacks("cupy") or not (wheel or toolkit)


def lacks_cublas(extra: str) -> bool:
    """Return whether the cuBLAS is missing that belongs to the CuPy of an extra."""
    wheel, major = re.split(r"[<>=]", CUBLAS[extra])[0], extra.removeprefix("cuda")
    if wheel in installed() or (find_library("cublas") or "").endswith(f".so.{major}"):
        return False
    return not list(Path("/usr/local/cuda").glob(f"lib64/libcublas.so.{major}*"))


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
    """Return the extra that fits the CuPy that is here already, else the driver."""
    if "cupy-cuda13x" in installed():
        return "cuda13"
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
        gpu = driver_cuda() >= 12
        compiles = task != "demo" and has_cuda_wheels()  # for GPUs, even on a machine without one
        lacking = (compiles and lacks_nvrtc()) or (gpu and lacks("cupy"))
        if not core:  # without them the package cannot look for headers yet
            lacking = lacking or ((compiles or gpu) and lacks_headers())
        extras[cuda_extra()] = lacking
        if gpu and lacks_cublas(cuda_extra()):
            wheels.append(CUBLAS[cuda_extra()])
        if compiles:
            extras["test"] |= lacks_nvdisasm()
    names = sorted(extra for extra, absent in extras.items() if absent)
    arguments = ["-e", f"{ROOT}[{','.join(names)}]" if names else str(ROOT)]
    wheels += [release for name, release in TORCH.items() if torch and lacks(name)]
    return (arguments if core or names else []) + wheels


def missing_for_report(torch: bool = False, essential: bool = False) -> list[str]:
    """Return the same for a GPU report; torch's wheels and the sanitizer are for CUDA 13."""
    cuda13 = driver_cuda() >= 13
    arguments = missing("report", torch and cuda13, essential)
    if cuda13 and not essential and lacks_sanitizer():
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
