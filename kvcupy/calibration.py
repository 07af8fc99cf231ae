"""What `python -m kvcupy calibrate` has measured, kept by device in the folder of the kernel cache.

One JSON file a device model: {"device", "date", "measured", and what `ops.transfer` reads}.
A file that is missing, or that makes no sense, counts as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from .devices import cache


def path(model: str) -> Path:
    """Return where the calibration of a device model lies, or would lie."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-") or "device"
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return cache.directory() / f"calibration-{name}-{digest}.json"


def load(model: str) -> dict[str, Any]:
    """Return the calibration of a device model; empty if there is none."""
    return _read(path(model))


def kept() -> list[dict[str, Any]]:
    """Return the calibrations of all devices."""
    files = sorted(cache.directory().glob("calibration-*.json"))
    return [found for file in files if (found := _read(file))]


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def save(model: str, content: dict[str, Any]) -> Path:
    """Keep a calibration, in place of an earlier one; return its file.

    Raises
    ------
    OSError : the folder cannot be written
    """
    place = path(model)
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=".calibration-")
    with os.fdopen(handle, "w") as file:
        json.dump(content, file, indent=1)
    Path(temporary).replace(place)
    return place
