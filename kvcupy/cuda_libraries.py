"""NVIDIA's libraries beside CuPy: those of its CUDA version are loaded, and fit the driver or not.

Wheels for CUDA 12 and 13 can be installed side by side: torch from PyPI brings those for 13 into an
environment with cupy-cuda12x. CuPy finds NVRTC and cuBLAS through cuda-pathfinder, which prefers
the wheels for 13 unless a library of the same name is loaded already. But a driver for CUDA 12
cannot run what NVRTC 13 compiles, and cupy-cuda12x cannot use cuBLAS 13.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from .extras import install

LIBRARIES = ("nvrtc", "cublas")
MAJORS = (12, 13)
_FOLDERS = {"nvrtc": "cuda_nvrtc", "cublas": "cublas"}  # of wheels for 12; those for 13 share one


@lru_cache
def load_matching() -> None:
    """Load the libraries of CuPy's CUDA version where wheels for another version are installed too.

    CuPy then uses these, if it has not loaded the others yet.
    """
    major = cupy_major()
    for library in LIBRARIES if major in MAJORS else ():
        if not any(wheel(library, other) for other in MAJORS if other != major):
            continue
        for place in _places(library, major):
            with suppress(OSError):
                ctypes.CDLL(place)
                break


def cupy_major() -> int:
    """Return the CUDA version that the installed CuPy is built for, without importing it.

    0 if there is no CuPy, or it does not come from a wheel.
    """
    try:
        spec = find_spec("cupy")
        if spec is None or spec.origin is None:
            return 0
        described = Path(spec.origin).parent / ".data" / "_wheel.json"
        cuda = json.loads(described.read_text(encoding="utf-8"))["cuda"]
        return int(str(cuda).partition(".")[0])
    except (ImportError, OSError, ValueError, KeyError, TypeError):
        return 0


def extra() -> str:
    """Return kvcupy's extra for this machine: by the installed CuPy, else by the driver."""
    return "cuda13" if (cupy_major() or driver_version() // 1000) >= MAJORS[-1] else "cuda12"


def install_cublas() -> str:
    """Return the command that installs the cuBLAS of CuPy, which multiplies matrices with it."""
    return "pip install nvidia-cublas" + ("-cu12" if extra() == "cuda12" else "")


def driver_version() -> int:
    """Return the CUDA version of the driver, 12040 for 12.4; 0 if there is none."""
    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def wheel(library: str, major: int) -> Path | None:
    """Return the file of a library that NVIDIA's wheel for a CUDA version has installed."""
    folder = _FOLDERS[library] if major == 12 else f"cu{major}"
    file = Path("nvidia", folder, "lib", f"lib{library}.so.{major}")
    paths = (Path(entry or ".", file) for entry in sys.path)
    return next((path for path in paths if path.is_file()), None)


def _places(library: str, major: int) -> Iterator[str]:
    """Yield what to load for a library, in the order of cuda-pathfinder."""
    name = f"lib{library}.so.{major}"
    if path := wheel(library, major):
        yield str(path.absolute())
    if conda := os.environ.get("CONDA_PREFIX"):
        yield str(Path(conda, "lib", name))
    yield name
    for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root:
            yield str(Path(root, "lib64", name))


def loaded(library: str, major: int | str = "") -> str | None:
    """Return the path from which this process has loaded a library, None if it has not.

    It ends in the full version where the library was loaded through a link.
    """
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and Path(path[0]).name.startswith(f"lib{library}.so.{major}"):
                return path[0]
    return None


def complaint(driver: int, cupy: int, nvrtc: tuple[int, int] | None) -> str:
    """Return in one line why a driver cannot run kernels, and the remedy; "" if it can.

    Within a major version a driver runs what any compiler makes for a GPU that it knows.

    Parameters
    ----------
    driver : the CUDA version of the driver, 12040 for 12.4; 0 if there is none
    cupy : the CUDA version that CuPy is built for, likewise
    nvrtc : the version of the NVRTC that is loaded; None if none can be loaded
    """
    major, here = driver // 1000, f"the driver is for CUDA {cuda_version(driver)}"
    if not driver:
        return "no NVIDIA driver is installed (libcuda.so.1 cannot be loaded)"
    if major < MAJORS[0]:
        return f"{here}, kvcupy needs CUDA {MAJORS[0]}: install driver 525 or newer"
    command = install(f"cuda{min(major, MAJORS[-1])}")
    if cupy // 1000 > major:
        return (
            f"{here}, and CuPy is built for CUDA {cupy // 1000}: "
            f"pip uninstall -y cupy-cuda12x cupy-cuda13x && {command}"
        )
    if nvrtc is not None and nvrtc[0] > major:
        where = loaded("nvrtc", nvrtc[0])
        what = f"NVRTC {nvrtc[0]}.{nvrtc[1]}" + (f" ({where})" if where else "")
        is_other_installed = wheel("nvrtc", major) is not None  # but the newer was loaded first
        remedy = "pip uninstall -y nvidia-cuda-nvrtc" if is_other_installed else command
        return f"{here}, and {what} compiles for CUDA {nvrtc[0]}: {remedy}"
    return ""


def cuda_version(number: int) -> str:
    """Return a version as CUDA counts it as people write it.

    >>> cuda_version(12040)
    '12.4'
    """
    return f"{number // 1000}.{number % 1000 // 10}"
