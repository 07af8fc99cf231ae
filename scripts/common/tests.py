"""Lets a script run programs of the tests."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def use_tests(*folders: str) -> None:
    """Let modules of tests/ and of some folders there be imported; exit if pytest is missing."""
    if find_spec("pytest") is None:
        name = Path(sys.argv[0]).name
        raise SystemExit(
            f"{name} runs programs of the tests, which need pytest: pip install -e '.[test]'"
        )
    paths = [ROOT, ROOT / "tests", *(ROOT / "tests" / folder for folder in folders)]
    sys.path[1:1] = [str(path) for path in paths if str(path) not in sys.path]
