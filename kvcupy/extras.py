"""The commands that install kvcupy's optional dependencies."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def install(extra: str) -> str:
    """Return the `pip install` command for an extra of kvcupy.

    From a checkout it installs that checkout's extra; else it names the packages themselves, as
    kvcupy is on no package index.

    >>> install("torch")
    "pip install ..."
    """
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'{checkout}[{extra}]')}"
    packages = requirements(extra) or [f"/path/to/a/checkout/of/kvcupy[{extra}]"]
    return "pip install " + " ".join(map(shlex.quote, packages))


def requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, from the metadata of the installed package."""
    try:
        listed = metadata.requires("kvcupy") or []
    except metadata.PackageNotFoundError:
        return []
    names: list[str] = []
    for line in listed:
        requirement, _, marker = line.partition(";")
        if not re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            continue
        if extras := re.match(r"kvcupy\[([\w,-]+)\]", requirement.strip()):
            for other in extras[1].split(","):
                names += requirements(other)
        else:
            names.append(requirement.strip())
    return list(dict.fromkeys(names))
