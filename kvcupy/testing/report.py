"""What a result was measured with, and its file."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from ..files import make_folder

_PACKAGES = (
    "kvcupy", "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "torch", "flashinfer-python",
    "sglang", "vllm",
)  # fmt: skip
_CHECKOUT = Path(__file__).resolve().parents[2]


def describe(device: Any) -> dict[str, Any]:
    """Return where a result is measured: device, driver, versions, date and commit."""
    return {
        "device": device.name,
        "processor": _processor(),
        "gpu_and_driver": _output(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", "*.py", "*.cu*")),
    }


def write_json(path: str | Path, report: dict[str, Any]) -> None:
    """Write a report, a line for each row of a table, and create its folder."""
    make_folder(Path(path).parent)
    Path(path).write_text(as_rows(report) + "\n")


def as_rows(report: dict[str, Any]) -> str:
    """Return JSON with a line for each entry, and for each item of a list of objects.

    Examples
    --------
    >>> print(as_rows({"seed": 1, "rows": [{"case": "a", "us": 0.5}, {"case": "b", "us": 2.0}]}))
    {
     "seed": 1,
     "rows": [
      {"case": "a", "us": 0.5},
      {"case": "b", "us": 2.0}
     ]
    }
    """

    def laid_out(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    entries = (f" {json.dumps(name)}: {laid_out(value)}" for name, value in report.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def _git(*arguments: str) -> str | None:
    """Return what git says of the checkout; None for an installed package."""
    if not (_CHECKOUT / "pyproject.toml").is_file():
        return None
    return _output("git", "-C", str(_CHECKOUT), *arguments)


def _output(*command: str) -> str | None:
    """Return what a program prints, None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None if result.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
