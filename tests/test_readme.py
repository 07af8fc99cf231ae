"""What the README shows runs, and what it and CONTRIBUTING.md name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvcupy as kv

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples_run(code):
    exec(compile(code, "README.md", "exec"), {})


def test_named_functions_exist():
    named = set(re.findall(r"kv\.(\w+)", README)) | set(re.findall(r"^\| `(\w+)\(", README, re.M))
    missing = sorted(name for name in named if not hasattr(kv, name))
    assert named and not missing


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_named_files_exist(name):
    text = (ROOT / name).read_text()
    paths = re.findall(r"(?:scripts|kernels_src|kvcupy|tests)/[\w/.]+\.\w+", text)
    missing = sorted({path for path in paths if not (ROOT / path).exists()})
    assert paths and not missing
