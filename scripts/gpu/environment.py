"""Describe the machine of a GPU report, and find NVIDIA's tools."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .private import ROOT

PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime-cu12",
            "nvidia-cuda-runtime", "pytest")  # fmt: skip
_VARIABLES = ("KVCUPY_", "CUDA_", "CUPY_", "PYTORCH_")
_GPU = ("name", "compute_cap", "memory.total", "driver_version", "pcie.link.gen.max",
        "pcie.link.width.max", "power.limit", "mig.mode.current")  # fmt: skip


def environment() -> dict[str, str]:
    """Return the environment of the parts: this package is found, and output is unbuffered."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def output(*command: str, timeout_s: float = 60) -> str:
    """Return what a program prints, nothing if it is missing, fails, or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def facts(device: str, tools: dict[str, str | None]) -> dict[str, Any]:
    """Return the facts of the machine that the report states.

    Parameters
    ----------
    device : the name that was asked for
    tools : paths of programs by name, None if they are not installed
    """
    from common.report import describe  # which needs NumPy

    from kvcupy.doctor import libraries_apart

    smi = output("nvidia-smi")
    cuda = re.search(r"CUDA\D*Version\s*:\s*([\d.]+)", smi)
    gpus = output("nvidia-smi", f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader")
    busy = output("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader")
    about = describe(SimpleNamespace(name=device))
    return {
        "date": about["date"],
        "commit": about["commit"],
        "changed files": about["dirty"],
        "device": device,
        "GPUs": [dict(zip(_GPU, _fields(line), strict=False)) for line in gpus.splitlines()],
        "CUDA of the driver": cuda[1] if cuda else None,
        "other processes on the GPUs": len(busy.splitlines()),
        "loaded": {row.label: row.text for row in libraries_apart()},
        "versions": {**about["versions"], **_versions()},
        "tools": {name: _version_of(path) for name, path in tools.items()},
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "python": about["python"],
        "system": platform.platform(),
        "processor": f"{about['processor']}, {os.cpu_count()} cores",
        "memory": _memory(),
    }


def no_device(device: str) -> str:
    """Return why a device cannot be used, nothing if it may work."""
    if device.partition(":")[0] != "cuda":
        return ""
    code = "from kvcupy.devices import cuda; print('|', cuda.why_not() or '')"
    said = output(sys.executable, "-c", code, timeout_s=300)
    return said.rpartition("|")[2].strip().removeprefix("cuda: ")


def tool(name: str) -> str | None:
    """Return the path of one of NVIDIA's tools: on the PATH, in a toolkit, or from a wheel."""
    path = shutil.which(name)
    if path:
        return path
    return next((str(p) for p in _places(name) if os.access(p, os.X_OK) and p.is_file()), None)


def _places(name: str) -> Iterator[Path]:
    roots = [os.environ[v] for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    for root in map(Path, (*roots, "/usr/local/cuda", "/opt/cuda")):
        yield root / "bin" / name
        yield root / name / name
    yield from (Path(folder, "nvidia/cu13/bin", name) for folder in sys.path)
    yield from sorted(Path("/usr/local").glob(f"cuda-*/bin/{name}"), reverse=True)
    yield from sorted(Path("/opt/nvidia/nsight-compute").glob(f"*/{name}"), reverse=True)


def _version_of(path: str | None) -> str | None:
    if path is None:
        return None
    said = re.search(r"Version\s+([\d.]+)", output(path, "--version"))
    return said[1] if said else "unknown"


def _fields(line: str) -> list[str]:
    return [part.strip() for part in line.split(",")]


def _versions() -> dict[str, str]:
    from importlib import metadata

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _memory() -> str | None:
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    return f"{size / 1e9:.0f} GB"
