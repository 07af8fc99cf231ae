"""The command that installs what an optional part of kvcupy needs, from where kvcupy came from."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def install(extra: str) -> str:
    """Return the `pip install` that brings what an extra of kvcupy needs.

    In a checkout it installs the extra of that checkout; else it names the packages themselves, for
    no index has kvcupy.

    >>> install("torch")
    "pip install ..."
    """
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'{checkout}[{extra}]')}"
    wanted = requirements(extra) or [f"/path/to/a/checkout/of/kvcupy[{extra}]"]
    return "pip install " + " ".join(map(shlex.quote, wanted))


def requirements(extra: str) -> list[str]:
    """Return what an extra requires, as the metadata of the installed package lists it."""
    try:
        listed = metadata.requires("kvcupy") or []
    except metadata.PackageNotFoundError:
        return []
    found: list[str] = []
    for line in listed:
        requirement, _, marker = line.partition(";")
        if not re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            continue
        if own := re.match(r"kvcupy\[([\w,-]+)\]", requirement.strip()):
            for name in own[1].split(","):
                found += requirements(name)
        else:
            found.append(requirement.strip())
    return list(dict.fromkeys(found))
