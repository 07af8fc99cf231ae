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
_ROW_WIDTH = 240  # of what nests in a row and is no item of a list


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


def where(report: dict[str, Any]) -> str:
    """Return one line on the device, the date and the commit of a report."""
    commit = (report["commit"] or "unknown")[:12] + (" with changes" if report["dirty"] else "")
    machine = report["gpu_and_driver"] or report["processor"]
    return f"{report['device']} ({machine}), {report['date']}, commit {commit}"


def write_json(path: str | Path, report: Any) -> None:
    """Write a report as `as_rows` lays it out, and create its folder."""
    make_folder(Path(path).parent)
    Path(path).write_text(as_rows(report) + "\n")


def as_rows(report: Any) -> str:
    """Return JSON with a line for each row of a table.

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
    return _lay_out(report, 0, in_list=False)


def _lay_out(value: Any, indent: int, *, in_list: bool) -> str:
    """Return a value on one line if it is a row, else with each part on a separate line."""
    line = json.dumps(value)
    depth = _depth(value)
    is_short = isinstance(value, dict) and len(line) <= _ROW_WIDTH
    is_row = depth < 2 or (depth == 2 and (in_list or is_short))
    if is_row and indent:
        return line
    if isinstance(value, dict):
        brackets = "{}"
        parts = [
            f"{json.dumps(name)}: {_lay_out(part, indent + 1, in_list=False)}"
            for name, part in value.items()
        ]
    elif isinstance(value, (list, tuple)):
        brackets = "[]"
        parts = [_lay_out(part, indent + 1, in_list=True) for part in value]
    else:
        return line
    if not parts:
        return line
    start = "\n" + " " * (indent + 1)
    return f"{brackets[0]}{start}{f',{start}'.join(parts)}\n{' ' * indent}{brackets[1]}"


def _depth(value: Any) -> int:
    """Return how deep containers are nested."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, (list, tuple)) else 0


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
